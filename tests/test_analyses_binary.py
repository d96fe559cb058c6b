"""What a critic knows of binary goals: counted by hand, and a flow told from exact probabilities."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from qhyer.agents.qhyer import QHyerConfig
from qhyer.analyses import binary_goals, critic
from qhyer.data.episodes import Episodes
from qhyer.errors import UserError
from qhyer.train import TrainConfig, train

TINY = QHyerConfig(
    steps=300, batch_size=64, learning_rate=5e-3, context=1, width=16, layers=1, heads=2, dropout=0.0, discount=0.8,
    flow_blocks=2, flow_channels=32, encoder_width=32, encoder_layers=1, representation=16, flow_batch=4.0,
    goal_input="difference", goal_frame="relative",
)  # fmt: skip


@pytest.fixture(scope="module")
def lamps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three lamps; the action's sign says whether the first changes, and nothing else ever changes it."""
    rng = np.random.default_rng(0)
    actions = rng.uniform(-1, 1, size=(50, 30, 1))
    state = np.zeros((50, 30, 3))
    for t in range(1, 30):
        state[:, t] = (state[:, t - 1] + (actions[:, t - 1] > 0.6) * np.array([1, 0, 0])) % 2
        state[:, t, 1:] = rng.integers(0, 2, size=(50, 2))
    ends = np.zeros((50, 30), bool)
    ends[:, -1] = True
    path = tmp_path_factory.mktemp("data") / "lamps.npz"
    np.savez(path, observations=state.reshape(-1, 3), actions=actions.reshape(-1, 1), terminals=ends.ravel())
    return path


def test_patterns_and_their_entropy(lamps: Path) -> None:
    episodes = Episodes.load(lamps, goal=[0, 1, 2])
    rows, other = torch.tensor([0, 1, 2]), torch.tensor([3, 4, 5])
    by_hand = [
        sum(int(a != b) << i for i, (a, b) in enumerate(zip(episodes.observations[r], episodes.observations[o])))
        for r, o in zip(rows, other)
    ]
    assert binary_goals.changes(episodes, rows, other).tolist() == by_hand
    assert binary_goals.entropy(torch.tensor([0, 0, 3, 3, 5, 5, 6, 6])) == pytest.approx(math.log(4))
    assert binary_goals.entropy(torch.tensor([7, 7])) == 0.0


@pytest.mark.parametrize("kind", ["bits", "flow"])
def test_of_a_run(kind: str, lamps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = QHyerConfig(**{**TINY.__dict__, "binary_goals": kind})
    episodes = Episodes.load(lamps, goal=[0, 1, 2])
    settings = TrainConfig(device="cpu", log_every=100, threads=1)
    run = train("qhyer", "lamps", config, settings, run=tmp_path / "run", episodes=episodes, quiet=True)
    found = json.loads(binary_goals.run(run, data=lamps).read_text())
    assert found["uniform"] == pytest.approx(3 * math.log(2))
    assert found["counted"] < found["uniform"] and "nats a goal" in capsys.readouterr().out
    assert found["exact"] == (kind == "bits")
    if kind == "bits":  # the action tells about the first lamp, so it beats counting; the other two are coins
        assert 2 * math.log(2) < found["critic"] < found["counted"]
    else:
        assert found["critic"] > found["counted"]  # a flow of two blocks cannot make eight spikes
    assert "tokens" in json.loads(critic.run(run, data=lamps).read_text())  # with goals as differences, too


def test_goals_that_are_not_binary_are_refused(tmp_path: Path, point_world, tiny_config) -> None:
    settings = TrainConfig(device="cpu", log_every=10, threads=1)
    run = train(
        "qhyer", "world", tiny_config("qhyer"), settings, run=tmp_path / "run", episodes=point_world, quiet=True
    )
    path = tmp_path / "world.npz"
    ends = np.zeros(len(point_world.observations), bool)
    ends[point_world.ends.numpy()] = True
    np.savez(path, observations=point_world.observations, actions=point_world.actions, terminals=ends)
    with pytest.raises(UserError, match="two values"):
        binary_goals.run(run, data=path)
