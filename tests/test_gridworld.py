"""The GridWorld analyses: the true density against a simulation, metrics by hand, commands with few steps."""

from __future__ import annotations

import itertools
import json
import math
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

from qhyer import theory
from qhyer.analyses import _gridworld as grid
from qhyer.analyses import _output, expectile_max, gridworld_density
from qhyer.cli import main
from qhyer.errors import UserError


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


# ------------------------------------------------------------------------------------------------------------ world


def test_moves_stay_on_the_grid() -> None:
    f = grid.transitions()
    up, down, left, right = range(4)
    assert f[12].tolist() == [7, 17, 11, 13]
    assert f[0, up] == f[0, left] == 0 and f[24, down] == f[24, right] == 24
    assert f[4, right] == 4 and f[20, down] == 20


def test_true_density_is_the_series_and_the_simulation() -> None:
    """P = (1 - g) sum_k g^k T0 T^k, and the place after K ~ Geom(1 - g) steps."""
    world = grid.make_world(0, discount=0.7)
    np.testing.assert_allclose(world.future.sum(-1), 1.0)
    t0 = np.eye(grid.CELLS)[world.following]
    t = np.einsum("sa,sak->sk", world.policy, t0)
    series = 0.3 * sum(0.7**k * t0 @ np.linalg.matrix_power(t, k) for k in range(100))
    np.testing.assert_allclose(world.future, series, atol=1e-12)
    rng = np.random.default_rng(0)
    cell = np.full(40_000, world.following[12, 3])
    end = np.full(40_000, -1)
    for _ in range(60):
        stop = rng.uniform(size=len(cell)) < 0.3
        end = np.where((end < 0) & stop, cell, end)
        action = (rng.uniform(size=(len(cell), 1)) > world.policy[cell].cumsum(1)).sum(1).clip(max=3)
        cell = world.following[cell, action]
    frequency = np.bincount(end[end >= 0], minlength=grid.CELLS) / (end >= 0).sum()
    np.testing.assert_allclose(frequency, world.future[12, 3], atol=0.01)


def test_trajectories_follow_the_policy_and_observations_their_cells() -> None:
    world = grid.make_world(1)
    data = grid.Trajectories(world, 1)
    assert data.cells.shape == data.actions.shape == (100, 101) and data.visits.sum() == 10_000
    np.testing.assert_array_equal(data.cells[:, 1:], world.following[data.cells[:, :-1], data.actions[:, :-1]])
    cell, inside = grid.grid_bins()(data.observations)
    assert inside.all() and (cell.numpy() == data.cells).all()
    visits = data.visits.sum(1)
    expected = visits[:, None] * world.policy
    chi = np.square(data.visits - expected) / np.maximum(expected, 1.0)
    assert chi.mean() < 2.0
    again = grid.Trajectories(world, 1)
    assert torch.equal(again.observations, data.observations)
    assert not np.array_equal(grid.Trajectories(world, 2).cells, data.cells)


def test_goals_of_a_batch_follow_the_true_density() -> None:
    """Where trajectories are long: over many draws, goal frequencies of a (state, action) are P's."""
    world = grid.make_world(0)
    data = grid.Trajectories(world, 0, trajectories=400, length=300)
    goal, state, action, following = data.sample(torch.Generator().manual_seed(0), 300_000)
    cells, goals = grid.grid_bins()(state)[0].numpy(), grid.grid_bins()(goal)[0].numpy()
    next_cell = grid.grid_bins()(following[1])[0].numpy()
    chosen = action.argmax(-1).numpy()
    np.testing.assert_array_equal(next_cell, world.following[cells, chosen])
    s, a = np.unravel_index(data.visits.argmax(), data.visits.shape)
    here = (cells == s) & (chosen == a)
    frequency = np.bincount(goals[here], minlength=grid.CELLS) / here.sum()
    assert 0.5 * np.abs(frequency - world.future[s, a]).sum() < 0.03


def test_quadrature_integrates_a_cell() -> None:
    places, log_weights = grid.quadrature()
    x = places[7].astype(float) * grid.SCALE + 2  # cell (1, 2), in cells
    weights = np.exp(log_weights) * grid.SCALE**2
    assert weights.sum() == pytest.approx(1.0)
    assert (weights * x[:, 0] ** 4 * x[:, 1] ** 2).sum() == pytest.approx((1.5**5 - 0.5**5) / 5 * (2.5**3 - 1.5**3) / 3)


def test_masses_of_the_marginal() -> None:
    data = grid.Trajectories(grid.make_world(0), 0)
    marginal = grid.fit("marginal", data, 0, 20)
    mass = np.exp(grid.log_masses(marginal, grid.centres()[:2]))
    assert mass.shape == (2, 4, 25)
    np.testing.assert_allclose(mass.sum(-1), 1.0, rtol=1e-5)
    assert np.ptp(mass, axis=(0, 1)).max() < 1e-6


@pytest.mark.parametrize("name", grid.ESTIMATORS)
def test_every_estimator_is_fitted_the_same_way_twice(name: str) -> None:
    data = grid.Trajectories(grid.make_world(0), 0, trajectories=5, length=20)
    first, second = (grid.log_masses(grid.fit(name, data, 3, 4), grid.centres()[:1]) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert np.isfinite(first).all()


# ---------------------------------------------------------------------------------------------------------- metrics


def test_errors_by_hand() -> None:
    p = np.array([[[0.5, 0.5]], [[0.25, 0.75]]])  # two states, one action, two goals
    q = np.array([[[[1.0, 1.0]], [[0.5, 0.5]]]])  # one observation; masses 2 and 1
    visits = np.array([[3.0], [1.0]])
    found = gridworld_density.errors(np.log(q), p, visits)
    second = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    assert found["kl"] == pytest.approx(second / 2) and found["kl_data"] == pytest.approx(second / 4)
    assert found["mass"] == pytest.approx(1.5)
    generalised = [(p[0] * np.log(p[0] / q[0, 0]) - p[0] + q[0, 0]).sum(), second]
    assert found["kl_as_is"] == pytest.approx(np.mean(generalised))


def test_interval_is_student_s() -> None:
    from scipy import stats

    for n in (2, 5, 16, 30):
        values = np.random.default_rng(n).normal(size=n)
        mean, half = _output.interval(values)
        low, high = stats.t.interval(0.95, n - 1, values.mean(), stats.sem(values))
        assert mean == pytest.approx(values.mean()) and half == pytest.approx((high - low) / 2, rel=3e-3)
    assert math.isnan(_output.interval([1.0])[1])


def test_maxima_over_the_data_s_actions() -> None:
    future = np.array([[[0.1], [0.4], [0.4], [0.9]]])  # the last action is never taken
    found = expectile_max.maxima(future, np.array([[6.0, 1.0, 1.0, 0.0]]))
    assert found["best"].item() == 0.4 and found["range"].item() == pytest.approx(0.3)
    assert found["coverage"].item() == pytest.approx(0.25)


def test_network_learns_the_expectile(monkeypatch: pytest.MonkeyPatch) -> None:
    """After some training the head of tau 1/2 is near the mean, and a greater tau predicts more."""
    monkeypatch.setattr(expectile_max, "HIDDEN", (64, 64))
    world = grid.make_world(0)
    data = grid.Trajectories(world, 0)
    heads = expectile_max.regress("network", data, world.future, 0, 200)
    found = expectile_max.predictions(heads)
    weights = data.visits[:, None].repeat(grid.CELLS, axis=1)
    exact = theory.expectile(world.future.transpose(0, 2, 1), 0.5, weights)
    assert expectile_max.r_squared(exact, found[0]) > 0.2
    mean = found.mean((1, 2))
    assert mean[0] < mean[2] < mean[4]


# --------------------------------------------------------------------------------------------------------- commands


@pytest.mark.parametrize("name", ["gridworld-density", "expectile-max"])
def test_command_end_to_end(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grid, "SAMPLES", 1)
    monkeypatch.setattr(gridworld_density, "OBSERVATIONS", 1)
    monkeypatch.setattr(expectile_max, "HIDDEN", (16,))
    few = ["--steps", "2", "--seeds", "1", "--workers", "1", "--out", str(tmp_path)]
    few += ["--flow-steps", "2"] if name == "expectile-max" else []

    def call(*options: str) -> int:
        with pytest.raises(SystemExit) as stop:
            main(["analyze", name, *few, *options])
        return int(stop.value.code or 0)

    assert call() == 0
    out = capsys.readouterr().out
    assert "written:" in out and ("RealNVP" in out or "0.999" in out)
    files = {path.suffix: path for path in tmp_path.iterdir()}
    assert set(files) == {".json", ".csv", ".png", ".svg"}
    assert all(path.stem == name for path in files.values())
    before = {key: path.read_bytes() for key, path in files.items()}
    result = json.loads(before[".json"])
    assert result["settings"]["steps"] == 2
    assert len(before[".csv"].splitlines()) == len(result["rows"]) + 1
    if name == "expectile-max":
        exact = [row for row in result["rows"] if row["way"] == "exact"]
        assert all(row["within_bound"] == 1.0 for row in exact)
        assert all(a["mae"] > b["mae"] for a, b in itertools.pairwise(exact))

    assert call() == 0  # the same settings: the same files, at once
    assert "there already" in capsys.readouterr().out
    assert {key: path.read_bytes() for key, path in files.items()} == before
    few[1] = "3"
    assert call() == 2  # other settings: asked about
    assert "--overwrite" in capsys.readouterr().err
    assert files[".json"].read_bytes() == before[".json"]


def test_another_file_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "gridworld-density.json").write_text("[]")
    with pytest.raises(UserError, match="not a result"):
        gridworld_density.run(out=tmp_path, seeds=1, steps=1, quiet=True)


def test_help_lists_all(capsys: pytest.CaptureFixture[str]) -> None:
    for args, expected in (
        (["analyze", "--help"], ["gridworld-density", "expectile-max", "critic", "RUN"]),
        (["analyze", "expectile-max", "--help"], ["--flow-steps", "--seeds", "--out"]),
    ):
        with pytest.raises(SystemExit) as stop:
            main(args)
        assert not stop.value.code
        text = capsys.readouterr().out
        assert all(word in text for word in expected)


# ---------------------------------------------------------------------------------------------------------- example


@pytest.mark.parametrize("name", ["flow", "cvae", "clearning", "contrastive"])
def test_example_runs(name: str) -> None:
    """docs/examples/density.py, shorter: goals ahead are likelier than goals behind."""
    path = Path(__file__).parent.parent / "docs" / "examples" / "density.py"
    assert runpy.run_path(str(path))["main"](name, steps=120) > 0.5
