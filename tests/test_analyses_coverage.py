"""Coverage of return-to-go and Q: shares worked out by hand, a critic trained for a moment, the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qhyer.agents.qhyer import QHyerConfig
from qhyer.analyses import _common, _maze, coverage
from qhyer.cli import main
from qhyer.data.episodes import Episodes
from qhyer.errors import UserError
from qhyer.train import TrainConfig, train

ENVIRONMENT = "pointmaze-medium-v0"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def maze() -> _maze.Maze:
    return _maze.Maze(ENVIRONMENT)


# --------------------------------------------------------------------------------------------------------- by hand


def test_segments_do_not_cross_trajectories() -> None:
    lengths = np.array([5, 2, 4])
    assert coverage.segment_ids(lengths, 2).tolist() == [0, 0, 1, 1, 2, 3, 3, 4, 4, 5, 5]
    assert coverage.segment_ids(lengths, 0).tolist() == [0] * 5 + [1] * 2 + [2] * 4


def test_share_counts_pairs_of_segments_that_vary() -> None:
    """Variances 0, 0.0625 and 0.0025: the middle segment alone is above 0.01, with 4 of 10 pairs."""
    values = np.array([1.0, 1.0, 1.0, 0.0, 0.5, 0.0, 0.5, 0.1, 0.2, 0.1, 0.2])[1:]
    ids = np.array([0, 0, 1, 1, 1, 1, 2, 2, 2, 2])
    assert coverage.share_above(values, ids) == pytest.approx(0.4)
    assert coverage.share_above(values, ids, threshold=0.002) == pytest.approx(0.8)
    assert coverage.share_above(values + 1e6, ids) == pytest.approx(0.4)  # a shift changes nothing


def test_returns_to_go() -> None:
    """Two trajectories of 3 and 2 steps; the goal is reached at rows 1 and 3 of the first, never in the second."""
    reached = np.array([0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0])
    lengths = np.array([3, 2])
    assert coverage.returns_to_go(reached, lengths).tolist() == [2.0, 1.0, 1.0, 0.0, 0.0]
    np.testing.assert_allclose(coverage.returns_to_go(reached, lengths, 0.5), [1.25, 0.5, 1.0, 0.0, 0.0])


def test_return_to_go_of_a_failure_has_no_signal() -> None:
    """The paper's point: one of four trajectories succeeds, and only its pairs can differ at all."""
    reached = np.zeros(4 * 11)
    reached[5] = 1.0
    lengths = np.full(4, 10)
    rtg = coverage.returns_to_go(reached, lengths)
    assert coverage.share_above(rtg, coverage.segment_ids(lengths, 0)) == pytest.approx(0.25)
    assert coverage.share_above(rtg, coverage.segment_ids(lengths, 5)) == 0.0  # 1 up to the cut, 0 after it
    assert coverage.share_above(rtg, coverage.segment_ids(lengths, 4)) == pytest.approx(0.1)


def test_scales() -> None:
    values = np.array([-3.0, 1.0, 5.0, 1.0])
    assert coverage.scaled(values, "range").tolist() == [0.0, 0.5, 1.0, 0.5]
    assert coverage.scaled(values, "spread").var() == pytest.approx(1.0)
    assert coverage.scaled(values, "raw") is values
    for scale in ("range", "spread"):
        assert not coverage.scaled(np.full(3, 7.0), scale).any()


def test_passing_compares_trajectories_at_one_place() -> None:
    """Place 0: two trajectories with means 0 and 1; place 1: two that agree; place 2: one alone, not counted."""
    places = np.array([0, 0, 0, 1, 1, 2])
    trajectory = np.array([0, 0, 1, 0, 1, 1])
    values = np.array([-0.5, 0.5, 1.0, 3.0, 3.0, 9.0])
    assert coverage.share_passing(values, places, trajectory) == pytest.approx(3 / 5)


def test_a_function_of_the_pair_does_not_differ_between_passers() -> None:
    rng = np.random.default_rng(0)
    places, trajectory = rng.integers(0, 6, 200), rng.integers(0, 9, 200)
    assert coverage.share_passing(places.astype(float), places, trajectory) == 0.0


def test_bins_are_squares_and_headings() -> None:
    xy = np.array([[0.2, 0.2], [0.8, 0.9], [1.2, 0.2], [0.2, 0.2], [0.2, 0.2]])
    actions = np.array([[1.0, 0.1], [1.0, 0.2], [1.0, 0.1], [-1.0, 0.1], [1.0, -0.1]])
    bins = coverage.pass_bins(xy, actions)
    assert bins[0] == bins[1] and len(set(bins.tolist())) == 4


def test_maze_knows_ways_and_tasks(maze: _maze.Maze) -> None:
    assert maze.goals.shape == (5, 2) and maze.radius == 1.0
    assert (maze.steps_to(maze.goals[0], maze.goals[:1]) == 0).all()
    here, there = maze.starts[0], maze.goals[0]
    assert maze.steps_to(there, here[None]) == maze.steps_to(here, there[None]) > 4
    corner = np.array([[-4.0, -4.0]])  # a wall
    assert np.isnan(maze.steps_to(there, corner)).all()


# --------------------------------------------------------------------------------------------------------- trained


def straight(path: Path, count: int = 40, steps: int = 24) -> Path:
    """Straight walks in the maze's square: where one goes depends on the action alone."""
    rng = np.random.default_rng(0)
    angle = rng.uniform(0, 2 * np.pi, (count, 1, 1))
    action = np.concatenate([np.cos(angle), np.sin(angle)], axis=2)
    xy = rng.uniform(2, 18, (count, 1, 2)) + 0.2 * action * np.arange(steps + 1)[:, None]
    terminals = np.zeros((count, steps + 1), dtype=bool)
    terminals[:, -1] = True
    np.savez(
        path,
        observations=xy.reshape(-1, 2).astype(np.float32),
        actions=np.broadcast_to(action, xy.shape).reshape(-1, 2).astype(np.float32),
        terminals=terminals.ravel(),
    )
    return path


def test_flow_transitions_have_later_goals(tmp_path: Path) -> None:
    episodes = Episodes.load(straight(tmp_path / "d.npz"), goal=(0, 1))
    sampler = _common.FlowSamplerConfig(0.9).build(episodes, torch.Generator().manual_seed(0))
    batch = sampler.sample(500)
    way = batch["flow_goals"] - batch["flow_observations"]
    along = (way * batch["flow_actions"]).sum(1) / 0.2
    assert (along > 0.9).all() and torch.allclose(way, 0.2 * along[:, None] * batch["flow_actions"], atol=1e-4)


def test_the_critic_learns_and_depends_on_the_seed_alone(tmp_path: Path, maze: _maze.Maze) -> None:
    episodes = Episodes.load(straight(tmp_path / "d.npz"), goal=(0, 1), name="pointmaze-medium-navigate-v0")
    short, long = (coverage.train_critic(episodes, 0, steps) for steps in (1, 30))
    again = coverage.train_critic(episodes, 0, 30)
    rows = episodes.transitions
    q, same, untrained = (
        coverage.flow_q(agent, episodes.observations[rows], episodes.actions[rows], maze.goals[0])
        for agent in (long, again, short)
    )
    np.testing.assert_array_equal(q, same)
    batch = _common.FlowSamplerConfig(0.99).build(episodes, torch.Generator().manual_seed(9)).sample(512)
    with torch.no_grad():
        assert long.critic_loss(batch)[0] < short.critic_loss(batch)[0]
    assert untrained.shape == q.shape == (len(rows),)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QHYER_DATA", str(tmp_path / "data"))
    options = [
        "--rows",
        "400",
        "--seeds",
        "1",
        "--steps",
        "3",
        "--workers",
        "1",
        "--dataset",
        "pointmaze-medium-stitch",
    ]
    out = tmp_path / "out"
    command = ["analyze", "coverage", *options, "--segment", "50", "--out", str(out)]
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert not ended.value.code
    said = capsys.readouterr().out
    assert "return-to-go" in said and "flow Q" in said
    result = json.loads((out / "coverage.json").read_text())
    assert {row["signal"] for row in result["rows"]} == set(coverage.SIGNALS)
    assert len(result["rows"]) == 5 * len(coverage.SIGNALS)
    noise = [row for row in result["rows"] if row["signal"] == "noise"]
    assert all(row["50-range"] == 1.0 for row in noise)  # the rule has no opinion on what varies
    for row in result["rows"]:
        assert 0.0 <= row["50-range"] <= 1.0
        if row["signal"].startswith("rtg"):
            assert row["0-raw"] <= row["successful"] + 1e-9
    assert all((out / f"coverage.{kind}").stat().st_size > 1000 for kind in ("csv", "png", "svg"))
    with pytest.raises(SystemExit):
        main(command)
    assert "is there already" in capsys.readouterr().out


def test_of_a_run(tmp_path: Path) -> None:
    path = straight(tmp_path / "d.npz")
    config: Any = QHyerConfig(
        steps=3, batch_size=16, context=2, width=16, layers=1, heads=2, flow_blocks=2, flow_channels=16,
        encoder_width=16, encoder_layers=1, representation=8, flow_batch=1.0,
    )  # fmt: skip
    episodes = Episodes.load(path, goal=(0, 1), name="pointmaze-medium-navigate-v0")
    quick = TrainConfig(device="cpu", log_every=3, threads=1)
    run = tmp_path / "run"
    train("qhyer", "straight", config, quick, run=run, episodes=episodes, environment=ENVIRONMENT, quiet=True)
    written = coverage.run((run,), data=path, segment=20, quiet=True)
    assert written == run / "analyses" / "coverage.json"
    result = json.loads(written.read_text())
    assert result["settings"]["step"] == 3 and result["settings"]["data"]["episodes"] == 40
    assert "100-range" not in result["rows"][0]  # no trajectory is that long
    with pytest.raises(UserError, match="smaller --segment"):
        coverage.run((run,), data=path, segment=100, quiet=True, out=tmp_path / "other")


def test_errors() -> None:
    with pytest.raises(UserError, match="segment must be one of"):
        coverage.run(segment=7)
    with pytest.raises(UserError, match="not a maze"):
        coverage.run(dataset="cube-single-play")
    with pytest.raises(UserError, match="one run, or none"):
        coverage.run((Path("a"), Path("b")))
    with pytest.raises(UserError, match="goes with a run"):
        coverage.run(data=Path("d.npz"))
