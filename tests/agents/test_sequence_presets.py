"""The maze rows of the sequence baselines' `paper` presets, as their sources have them."""

from __future__ import annotations

import pytest

from qhyer import presets

PLAIN = dict(goal="none", dataset_rewards=True, tolerance=0.5)
ANTMAZES = ["umaze", "umaze-diverse", "medium-play", "medium-diverse", "large-play", "large-diverse"]

# tinkoff-ai/CORL, configs/offline: dt, iql, cql; charleshsc/QT, run.sh; the rest as each preset says.
ROWS = [
    ("dt", "maze2d-umaze-v1", PLAIN | dict(batch_size=4096, learning_rate=8e-4, target_return=280.0, context=20)),
    ("dt", "antmaze-umaze-v2", PLAIN | dict(batch_size=64, learning_rate=1e-4, target_return=1.0, return_scale=1.0)),
    ("iql", "maze2d-large-v1", PLAIN | dict(expectile=0.7, temperature=3.0, reward_shift=0.0, terminal=False)),
    ("iql", "antmaze-large-play-v2", PLAIN | dict(expectile=0.9, temperature=10.0, reward_shift=-1.0, terminal=True)),
    ("cql", "maze2d-umaze-v1", PLAIN | dict(weight=10.0, gap=5.0, policy_learning_rate=3e-5, best_backup=False)),
    (
        "cql",
        "antmaze-umaze-v2",
        PLAIN
        | dict(weight=5.0, gap=0.8, policy_learning_rate=1e-4, best_backup=True, floor=-200.0)
        | dict(reward_scale=10.0, reward_shift=-5.0, value_hidden=(256,) * 5),
    ),
    ("qt", "maze2d-umaze-v1", PLAIN | dict(eta=5.0, grad_clip=20.0, steps=100_000, return_scale=10.0)),
    ("qt", "maze2d-medium-v1", PLAIN | dict(eta=5.0, grad_clip=9.0, steps=100_000, target_return=300.0)),
    ("qt", "maze2d-large-v1", PLAIN | dict(eta=4.0, grad_clip=9.0, steps=500_000)),
    ("qt", "antmaze-umaze-v2", PLAIN | dict(eta=0.05, reward_scale=1.0, target_return=1.0)),
    ("qt", "antmaze-umaze-diverse-v2", PLAIN | dict(eta=0.01, reward_scale=1.0)),
    ("qt", "antmaze-large-diverse-v2", PLAIN | dict(eta=0.005, reward_scale=4.0, reward_shift=-2.0, steps=100_000)),
    ("reinformer", "maze2d-medium-v1", PLAIN | dict(return_scale=100.0, reward_shift=0.0, context=5, expectile=0.99)),
    ("reinformer", "antmaze-medium-play-v2", PLAIN | dict(reward_scale=100.0, reward_shift=1.0, return_scale=1.0)),
    ("dmixer", "maze2d-umaze-v1", PLAIN | dict(return_scale=10.0, target_return=300.0, context=120)),
    ("lsdt", "maze2d-umaze-v1", dict(goal="concat", return_scale=1000.0, target_return=300.0, context=20)),
    ("lsdt", "maze2d-large-v1", dict(goal="concat", return_scale=1000.0, target_return=300.0, context=30)),
    ("lsdt", "antmaze-medium-play-v2", dict(goal="concat", return_scale=1000.0, target_return=100.0)),
    ("rvs", "antmaze-umaze-v2", dict(goal="concat", batch_size=16_384, steps=20_000, hidden=(1024, 1024))),
]


@pytest.mark.parametrize("agent, dataset, values", ROWS, ids=[f"{agent}-{dataset}" for agent, dataset, _ in ROWS])
def test_row(agent, dataset, values):
    config, _ = presets.resolve(agent, "paper", dataset)
    assert {name: getattr(config, name) for name in values} == values


@pytest.mark.parametrize(
    "agent", ["dt", "edt", "gdt", "qdt", "cgdt", "reinformer", "dc", "dmamba", "qt", "dmixer", "vdt", "iql", "cql"]
)
def test_d4rl_has_rewards_and_other_data_have_goals(agent):
    """As in the paper's table: no goal on D4RL; where there is no reward, a goal is the only task there is."""
    for dataset in [f"maze2d-{size}-v1" for size in ("umaze", "medium", "large")] + [
        f"antmaze-{a}-v2" for a in ANTMAZES
    ]:
        config, _ = presets.resolve(agent, "paper", dataset)
        assert (config.goal, config.dataset_rewards, config.tolerance) == ("none", True, 0.5), dataset
        if "maze2d" in dataset and hasattr(config, "terminal"):
            assert not config.terminal  # the task goes on
    config, _ = presets.resolve(agent, "paper", "pointmaze-medium-navigate-v0")
    assert (config.goal, config.dataset_rewards, config.tolerance) == ("concat", False, 1.0)
