"""`paper` of OGBench's baselines against its table of commands (impls/hyperparameters.sh at 1d41409)."""

from __future__ import annotations

import pytest

from qhyer import presets
from qhyer.data import registry

# alpha on manipulation, play and noisy, on point mazes and on ant mazes; every size of a family has the same.
ALPHA = {
    "gcivl": (10.0, 10.0, 10.0, 10.0),
    "gciql": (1.0, 0.03, 0.003, 0.3),
    "crl": (3.0, 0.1, 0.03, 0.1),
    "qrl": (0.3, 0.03, 0.0003, 0.003),
}


OGBENCH = {name: dataset for name, dataset in registry.DATASETS.items() if name.endswith("-v0")}


@pytest.mark.parametrize("dataset", OGBENCH.values(), ids=list(OGBENCH))
@pytest.mark.parametrize("agent", ALPHA)
def test_settings(agent, dataset):
    config, rules = presets.resolve(agent, "paper", dataset.name)
    play, noisy, point, ant = ALPHA[agent]
    known = {"pointmaze": point, "antmaze": ant}.get(dataset.family, play if dataset.kind == "play" else noisy)
    assert config.alpha == known
    assert config.actor_p_random == (0.5 if dataset.kind == "stitch" else 0.0)
    common = dict(steps=1_000_000, batch_size=1024, learning_rate=3e-4, hidden=(512,) * 3, value_hidden=(512,) * 3)
    common |= dict(actor_loss="ddpgbc", latent_dim=512, quasimetric="iqe", margin=0.05)
    common |= dict(expectile=0.9, target_rate=0.005, value_p_current=0.2, value_p_random=0.3)
    common |= dict(discount=0.995 if "giant" in dataset.name else 0.99)
    for field, value in common.items():
        assert getattr(config, field, value) == value, field
    assert all("1d41409" in rule.source for rule in rules)


# What is not registered here has its settings all the same, for files of one's own that carry OGBench's names.
ELSEWHERE = {
    "humanoidmaze-large-stitch-v0": {
        "gcivl": dict(alpha=10.0, discount=0.995, actor_p_random=0.5),
        "gciql": dict(alpha=0.1, discount=0.995, actor_p_random=0.5),
        "qrl": dict(alpha=0.001, actor_p_random=0.5),
        "crl": dict(alpha=0.1, discount=0.995, actor_p_random=0.5),
        "hiql": dict(alpha_low=3.0, alpha_high=3.0, subgoal_steps=100, discount=0.995, actor_p_random=0.5),
        "ota": dict(alpha_low=3.0, alpha_high=3.0, subgoal_steps=100, discount=0.995, actor_p_random=0.5),
        "saw": dict(subgoal_steps=100, discount=0.995),
        "eik_hiqrl": dict(coordinates=2, subgoal_steps=100, discount=0.995, actor_p_random=0.5),
    },
    "antmaze-teleport-explore-v0": {
        "gcivl": dict(alpha=10.0, discount=0.99, actor_p_random=1.0),
        "gciql": dict(alpha=0.01, discount=0.99, actor_p_random=1.0),
        "qrl": dict(alpha=0.001, actor_p_random=1.0),
        "crl": dict(alpha=0.003, discount=0.99, actor_p_random=1.0),
        "hiql": dict(alpha_low=10.0, alpha_high=10.0, subgoal_steps=25, actor_p_random=1.0),
        "ota": dict(alpha_low=10.0, alpha_high=10.0, subgoal_steps=25, actor_p_random=1.0),
        "eik_hiqrl": dict(alpha_low=10.0, alpha_high=10.0, coordinates=2, actor_p_random=1.0),
    },
    "antsoccer-medium-navigate-v0": {
        "gcivl": dict(alpha=10.0, discount=0.99, actor_p_random=0.0),
        "gciql": dict(alpha=0.1, discount=0.99, actor_p_random=0.0),
        "qrl": dict(alpha=0.003, actor_p_random=0.0),
        "crl": dict(alpha=0.3, discount=0.99, actor_p_random=0.0),
        "hiql": dict(alpha_low=3.0, alpha_high=3.0, subgoal_steps=25, discount=0.99),
    },
}


@pytest.mark.parametrize("dataset", ELSEWHERE)
def test_settings_of_other_data(dataset):
    for agent, expected in ELSEWHERE[dataset].items():
        config = presets.resolve(agent, "paper", dataset)[0]
        assert {field: getattr(config, field) for field in expected} == expected, agent
