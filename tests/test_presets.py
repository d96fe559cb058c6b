"""Every agent resolves on every dataset; QHyer's `paper` preset is the paper's tables, row by row."""

from __future__ import annotations

import dataclasses
import fnmatch

import pytest
import torch

from qhyer import agents, presets
from qhyer.data import registry
from qhyer.data.episodes import DataSpec
from qhyer.errors import UserError

# Copied from the paper: OGBench state-based table. K, d_model, L, H, LR, dropout, tau, NF blocks, NF channels.
STATE = """
cube-single-play-v0       20 256 4 4 3e-4 0.1  0.99  6 256
cube-single-noisy-v0      20 256 4 4 3e-4 0.1  0.95  6 256
cube-double-play-v0       25 384 5 6 3e-4 0.1  0.99  8 256
cube-double-noisy-v0      25 384 5 6 3e-4 0.1  0.95  8 256
cube-triple-play-v0       30 512 6 8 2e-4 0.15 0.99 10 384
cube-triple-noisy-v0      30 512 6 8 2e-4 0.15 0.95 10 384
cube-quadruple-play-v0    35 640 6 8 1e-4 0.2  0.99 12 512
cube-quadruple-noisy-v0   35 640 6 8 1e-4 0.2  0.95 12 512
scene-play-v0             30 384 5 6 3e-4 0.1  0.99  8 384
scene-noisy-v0            30 384 5 6 3e-4 0.1  0.95  8 384
puzzle-3x3-play-v0        25 512 6 8 3e-4 0.1  0.99  8 384
puzzle-3x3-noisy-v0       25 512 6 8 3e-4 0.1  0.95  8 384
puzzle-4x4-play-v0        30 640 6 8 2e-4 0.15 0.99 10 384
puzzle-4x4-noisy-v0       30 640 6 8 2e-4 0.15 0.95 10 384
puzzle-4x5-play-v0        35 768 6 8 1e-4 0.2  0.99 10 512
puzzle-4x5-noisy-v0       35 768 6 8 1e-4 0.2  0.95 10 512
puzzle-4x6-play-v0        40 768 6 8 1e-4 0.2  0.99 10 512
puzzle-4x6-noisy-v0       40 768 6 8 1e-4 0.2  0.95 10 512
"""
# D4RL table: K, LR, tau, d_model, L.
D4RL = """
antmaze-umaze-v2           2 2e-4 0.90 128 3
antmaze-umaze-diverse-v2   2 2e-4 0.90 128 3
antmaze-medium-play-v2     3 2e-4 0.99 128 3
antmaze-medium-diverse-v2  3 2e-4 0.99 128 3
antmaze-large-play-v2      3 4e-4 0.90 128 3
antmaze-large-diverse-v2   3 4e-4 0.90 128 3
maze2d-umaze-v1           10 2e-4 0.90 128 3
maze2d-medium-v1          10 2e-4 0.90 128 3
"""
GOAL_DIM = {
    "cube-single": 3, "cube-double": 6, "cube-triple": 9, "cube-quadruple": 12, "scene": 13,
    "puzzle-3x3": 9, "puzzle-4x4": 16, "puzzle-4x5": 20, "puzzle-4x6": 24, "pointmaze": 2,
}  # fmt: skip


def rows(table: str) -> list[tuple[str, list[float]]]:
    lines = [line.split() for line in table.strip().splitlines()]
    return [(name, [float(v) for v in values]) for name, *values in lines]


@pytest.mark.parametrize("dataset, values", rows(STATE), ids=[name for name, _ in rows(STATE)])
def test_state_row(dataset, values):
    config, rules = presets.resolve("qhyer", "paper", dataset)
    fields = [
        "context",
        "width",
        "layers",
        "heads",
        "learning_rate",
        "dropout",
        "expectile",
        "flow_blocks",
        "flow_channels",
    ]
    assert [getattr(config, f) for f in fields] == values
    common = dict(
        steps=1_000_000, batch_size=1024, weight_decay=0.0, grad_clip=1.0, flow_noise=0.05, encoder_width=1024,
        representation=64, weight_bc=1.0, weight_q=1.0, weight_critic=1.0, discount=0.99, warmup=0, cosine=False,
        backbone="hybrid", conditioning="flow", tokenization="concat", regression="expectile", stitch_rate=0.0,
        q_normalization="scale", goal_input="observation",
    )  # fmt: skip
    for field, value in common.items():
        assert getattr(config, field) == value, field
    assert config.p_random == (0.2 if "noisy" in dataset else 0.0)
    assert all("paper" in rule.source for rule in rules)
    assert config.width % config.heads == 0


@pytest.mark.parametrize("dataset, values", rows(D4RL), ids=[name for name, _ in rows(D4RL)])
def test_d4rl_row(dataset, values):
    config, _ = presets.resolve("qhyer", "paper", dataset)
    assert [getattr(config, f) for f in ("context", "learning_rate", "expectile", "width", "layers")] == values
    common = dict(steps=100_000, batch_size=256, weight_decay=1e-4, grad_clip=0.25, warmup=10_000, cosine=True)
    for field, value in common.items():
        assert getattr(config, field) == value, field
    # Not in the paper: heads, dropout and the flow's sizes, those of cube-single (docs/deviations.md).
    assert (config.heads, config.dropout, config.flow_blocks, config.flow_channels) == (4, 0.1, 6, 256)
    assert config.p_random == 0.0


def test_the_table_covers_every_manipulation_dataset():
    assert {name for name, _ in rows(STATE)} == {d.name for d in registry.DATASETS.values() if not d.is_maze}


@pytest.mark.parametrize("agent", agents.names())
def test_every_preset_resolves_on_every_dataset(agent):
    Config = agents.load(agent).Config
    fields = {field.name for field in dataclasses.fields(Config)}
    for preset, rules in presets.table(agent).items():
        for rule in rules:
            assert set(rule.overrides) <= fields, f"{preset}, {rule.pattern}: unknown {set(rule.overrides) - fields}"
        for dataset in registry.DATASETS:
            config, used = presets.resolve(agent, preset, dataset)
            assert isinstance(config, Config) and config.steps > 0 and config.batch_size > 0
            assert used == [rule for rule in rules if fnmatch.fnmatchcase(dataset, rule.pattern)]
            assert used, f"{agent} {preset} says nothing about {dataset}: not even a source for its defaults"


def test_later_rules_win(monkeypatch):
    rules = [presets.Rule("*", "a", {"steps": 1}), presets.Rule("cube-*", "b", {"steps": 2})]
    monkeypatch.setattr(presets, "table", lambda agent: {"mine": rules})
    assert presets.resolve("gcbc", "mine", "cube-single-play-v0")[0].steps == 2
    assert presets.resolve("gcbc", "mine", "scene-play-v0")[0].steps == 1


def test_unknown_preset_names_those_there_are():
    with pytest.raises(UserError, match="no preset 'papre'; it has paper"):
        presets.resolve("qhyer", "papre", "cube-single-play-v0")


@pytest.mark.parametrize("name", registry.DATASETS)
def test_goal_dimensions(name):
    """The paper's goal-dimension table."""
    dataset = registry.DATASETS[name]
    base = "pointmaze" if dataset.is_maze else name.rsplit("-", 2)[0]
    assert len(dataset.goal_indices) == len(set(dataset.goal_indices)) == GOAL_DIM[base]


@pytest.mark.parametrize("name", ["maze2d-umaze-v1", "maze2d-umaze-d4rl", "maze2d-medium-v1"])
def test_converted_mazes_get_their_row(name):
    """docs/data.md names converted files so; a name that no row matches would silently train for a million updates."""
    config, _ = presets.resolve("qhyer", "paper", name)
    assert (config.steps, config.context, config.batch_size) == (100_000, 10, 256)


@pytest.mark.parametrize(
    "name, chunk, head",
    [
        ("cube-double-play-v0", 5, "best_of_mixture"),
        ("cube-double-noisy-v0", 1, "gaussian"),
        ("scene-play-v0", 5, "best_of_mixture"),
        ("scene-noisy-v0", 1, "gaussian"),
        ("puzzle-3x3-play-v0", 5, "best_of_mixture"),
        ("puzzle-4x4-noisy-v0", 1, "best_of_mixture"),
    ],
)
def test_best_acts_one_step_at_a_time_on_noisy_data(name, chunk, head):
    config, _ = presets.resolve("qhyer", "best", name)
    assert (config.chunk, config.action_head) == (chunk, head)


@pytest.mark.parametrize("name", [name for name in registry.DATASETS if name.endswith(("-play-v0", "-noisy-v0"))])
def test_best_builds_an_agent_of_every_manipulation_dataset(name):
    """Its parts of goals are there, and nothing in it contradicts another."""
    dataset = registry.DATASETS[name]
    small = {"width": 16, "heads": 2, "layers": 1, "encoder_width": 8, "encoder_layers": 1, "flow_channels": 24}
    config = dataclasses.replace(presets.resolve("qhyer", "best", name)[0], **small)
    dim = max(dataset.goal_indices) + 1
    binary = tuple(dataset.family == "puzzle" for _ in dataset.goal_indices)
    spec = DataSpec(dim, 5, dataset.goal_indices, (0.0,) * dim, (1.0,) * dim, binary)
    agent = agents.load("qhyer")(config, spec).eval()
    action, _ = agent.act(torch.zeros(2, dim), torch.ones(2, dim), None)
    assert action.shape == (2, 5) and bool(action.isfinite().all())
    if dataset.family == "scene":  # the cube's place, two buttons, drawer and window
        assert agent.goal_indices.tolist() == [19, 20, 21, 29, 33, 36, 38]
