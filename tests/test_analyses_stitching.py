"""Rollouts as chains of data pieces: by hand on a line, then the command on a small model and made-up pieces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qhyer import models
from qhyer.agents.gcbc import GCBCConfig
from qhyer.analyses import _maze, stitching
from qhyer.data.episodes import Episodes
from qhyer.errors import UserError
from qhyer.train import TrainConfig, train

ENVIRONMENT = "pointmaze-medium-v0"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def lines(*ways: tuple[float, float, float]) -> dict[str, np.ndarray]:
    """Pieces along the x axis: (first x, last x, y), 0.5 a step; the action is the direction."""
    observations, actions, terminals = [], [], []
    for first, last, y in ways:
        x = np.linspace(first, last, round(abs(last - first) / 0.5) + 1)
        observations.append(np.stack([x, np.full_like(x, y)], axis=1))
        actions.append(np.tile([np.sign(last - first), 0.0], (len(x), 1)))
        terminals.append(np.arange(len(x)) == len(x) - 1)
    return {
        "observations": np.concatenate(observations).astype(np.float32),
        "actions": np.concatenate(actions).astype(np.float32),
        "terminals": np.concatenate(terminals),
    }


def pieces_of(*ways: tuple[float, float, float]) -> stitching.Pieces:
    arrays = lines(*ways)
    episodes = Episodes.from_arrays(arrays["observations"], arrays["actions"], arrays["terminals"], goal=(0, 1))
    return stitching.Pieces(episodes, 1.0)


# ---------------------------------------------------------------------------------------------------------- by hand


def test_places_finds_all_within_its_side() -> None:
    rng = np.random.default_rng(0)
    xy = rng.uniform(-3, 5, (400, 2))
    places = _maze.Places(xy, 0.7)
    for place in rng.uniform(-4, 6, (50, 2)):
        near = set(places.near(place).tolist())
        within = set(np.flatnonzero(np.linalg.norm(xy - place, axis=1) <= 0.7).tolist())
        assert within <= near and len(near) < 400
    assert len(places.near(np.array([100.0, 100.0]))) == 0


def test_chain_takes_the_piece_that_lasts_longest() -> None:
    explains = np.zeros((8, 4), dtype=bool)
    explains[0:3, 0] = True
    explains[0:5, 1] = True  # lasts longer from the start
    explains[4:7, 2] = True
    explains[2:6, 3] = True
    given = stitching.chain(explains)
    assert given.tolist() == [1, 1, 1, 1, 1, 2, 2, -1]
    assert stitching.runs_of(given) == [(1, 0, 5), (2, 5, 7)]


def test_chain_is_the_shortest_there_is() -> None:
    """Against every choice of one piece for each step, few enough to try."""
    rng = np.random.default_rng(1)
    for _ in range(20):
        explains = rng.uniform(size=(6, 3)) < 0.7
        best = 99
        for number in range(3**6):
            choice = [number // 3**t % 3 for t in range(6)]
            legal = all(explains[t, p] or not explains[t].any() for t, p in enumerate(choice))
            chosen = np.where(explains.any(1), choice, -1)
            if legal:
                best = min(best, len(stitching.runs_of(chosen)))
        assert len(stitching.runs_of(stitching.chain(explains))) == best


def test_pieces_explain_what_goes_their_way() -> None:
    """Two pieces to the right, one to the left, one far away: a walk to the right is the first, then the second."""
    pieces = pieces_of((0, 10, 0), (8, 20, 0), (20, 0, 0.2), (0, 20, 9))
    xy = np.stack([np.arange(0, 20.5, 0.5), np.full(41, 0.4)], axis=1)
    ways = stitching.headings(xy, np.full(41, 40))
    explains = pieces.explaining(xy[:-1], ways[:-1])
    assert not explains[:-1, 2:].any()
    assert stitching.runs_of(stitching.chain(explains))[0][0] == 0
    assert [piece for piece, _, _ in stitching.runs_of(stitching.chain(explains))] == [0, 1]
    still = pieces.explaining(xy[4:5], np.zeros((1, 2)))  # without a heading the place alone counts
    assert still[0].tolist() == [True, False, True, False]


def test_distance_in_standard_deviations_and_limits() -> None:
    pieces = pieces_of((0, 10, 0), (0, 10, 0.1), (0, 10, 0.2))
    on = pieces.distance(np.array([[2.0, 0.1]]), np.array([[1.0, 0.0]]))
    np.testing.assert_allclose(on, 0.0, atol=1e-5)
    apart = pieces.distance(np.array([[2.0, 0.15]]), np.array([[1.0, 0.0]]))
    np.testing.assert_allclose(apart, 0.05 / pieces.scale[1], rtol=1e-4)
    assert np.isinf(pieces.distance(np.array([[2.0, 7.0]]), np.array([[1.0, 0.0]]))).all()
    limits = pieces.limits()  # every pair has one of another piece exactly 0.1 away
    np.testing.assert_allclose(limits, 0.1 / pieces.scale[1], rtol=1e-4)


def test_covering_needs_start_before_goal() -> None:
    pieces = pieces_of((0, 10, 0), (12, 0, 0), (0, 14, 5))
    start, goal = np.array([0.5, 0.0]), np.array([9.0, 0.0])
    assert pieces.covering(start, goal) == 1
    assert pieces.covering(goal, start) == 1
    assert pieces.covering(start, np.array([14.0, 0.0])) == 0


# ---------------------------------------------------------------------------------------------------------- trained


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "pointmaze-medium-stitch-v0.npz"
    np.savez(path, **lines(*((x, x + 6, y) for x in (0.0, 6.0, 12.0) for y in (0.0, 4.0, 20.0))))  # type: ignore[arg-type]
    return path


def trained(folder: Path, data: Path, seed: int = 0) -> Path:
    episodes = Episodes.load(data, goal=(0, 1), name="pointmaze-medium-stitch-v0")
    settings = TrainConfig(device="cpu", threads=1, seed=seed)
    config: Any = GCBCConfig(steps=2, batch_size=4, hidden=(8,))
    return train(
        "gcbc", "pointmaze-medium-stitch-v0", config, settings, run=folder, episodes=episodes, environment=ENVIRONMENT,
        quiet=True,
    )  # fmt: skip


def test_runs_and_models(tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained(tmp_path / "one", data)
    model = models.export(trained(tmp_path / "two", data), tmp_path / "models" / "copy", dtype="fp32")
    path = stitching.run((run, model), data=data, tasks=(3,), episodes=1, out=tmp_path / "out", quiet=True)
    result = json.loads(path.read_text())
    assert result["data"]["training_data"] and result["data"]["episodes"] == 9
    assert len(result["rows"]) == 2 and len(result["drawn"]) == 2
    one, two = ([row | {"policy": ""} for row in result["rows"] if row["policy"] == name] for name in ("one", "copy"))
    assert one == two  # the same weights go the same way
    assert all(0.0 <= row[key] <= 1.0 for row in one for key in ("out", "state_out", "unexplained", "still"))
    assert "cover a task alone" in capsys.readouterr().out
    assert all(path.with_suffix(f".{kind}").stat().st_size > 100 for kind in ("csv", "png", "svg"))


def test_errors(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="give the runs or models"):
        stitching.run()
    with pytest.raises(UserError, match="neither a run"):
        stitching.run((tmp_path,))
    other = tmp_path / "pointmaze-medium-stitch-v0.npz"
    np.savez(other, **lines((0, 6, 0), (0, 6, 4)))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="has tasks 1 to 5"):
        stitching.run((trained(tmp_path / "c", data),), tasks=(6,), data=data)
    with pytest.raises(UserError, match="other data"):
        stitching.run((trained(tmp_path / "a", data), trained(tmp_path / "b", other)))
