"""Analyses of a small trained run: files in the promised layout, numbers that can be worked out by hand."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from qhyer import analyses, envs, runs
from qhyer.agents.gcbc import GCBCConfig
from qhyer.agents.qhyer import QHyerConfig
from qhyer.analyses import _common, critic, goal_density, memory
from qhyer.analyses.commands import analyze
from qhyer.data.episodes import Episodes
from qhyer.errors import UserError
from qhyer.evaluate import EvalConfig, plan
from qhyer.nn.mamba import Mamba
from qhyer.nn.tokens import Tokens
from qhyer.report.collect import read_run
from qhyer.report.figures import load_arrays
from qhyer.train import TrainConfig, train

ENVIRONMENT = "pointmaze-medium-v0"
TINY = QHyerConfig(
    steps=150, batch_size=32, learning_rate=3e-3, context=4, width=16, layers=2, heads=2, dropout=0.0, discount=0.95,
    flow_blocks=2, flow_channels=32, encoder_width=64, encoder_layers=2, representation=16, flow_batch=1.0,
)  # fmt: skip


def walks() -> dict[str, np.ndarray]:
    """Straight walks at 0.2 a step from anywhere in the maze's square: the action says where one will be."""
    rng = np.random.default_rng(0)
    observations, actions = [], []
    for _ in range(60):
        angle = rng.uniform(0, 2 * np.pi)
        action = np.array([np.cos(angle), np.sin(angle)])
        start = rng.uniform(0, 20, 2)
        observations.append(start + 0.2 * action * np.arange(41)[:, None])
        actions.append(np.repeat(action[None], 41, axis=0))
    terminals = np.zeros((60, 41), dtype=bool)
    terminals[:, -1] = True
    return {
        "observations": np.concatenate(observations).astype(np.float32),
        "actions": np.concatenate(actions).astype(np.float32),
        "terminals": terminals.ravel(),
    }


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "walks.npz"
    np.savez(path, **walks())  # type: ignore[arg-type]
    return path


def trained(path: Path, data: Path, agent: str, config: Any, environment: str | None = ENVIRONMENT) -> Path:
    torch.set_num_threads(1)
    episodes = Episodes.load(data, goal=[0, 1])
    settings = TrainConfig(device="cpu", log_every=50, threads=1)
    return train(agent, "walks", config, settings, run=path, episodes=episodes, environment=environment, quiet=True)


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("runs") / "qhyer", data, "qhyer", TINY)


@pytest.fixture(scope="module")
def gcbc_run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = GCBCConfig(steps=2, batch_size=4, hidden=(8,))
    return trained(tmp_path_factory.mktemp("runs") / "gcbc", data, "gcbc", config)


# ------------------------------------------------------------------------------------------------------- discovery


def test_discovery() -> None:
    assert {"critic", "expectile_max", "goal_density", "gridworld_density", "memory"} <= set(analyses.names())
    for name in analyses.names():
        assert analyses.question(name).endswith("?")
        assert callable(analyses.load(name).run)
    assert analyses.needs_run("memory") and not analyses.needs_run("gridworld-density")
    assert analyses.load("gridworld-density") is analyses.load("gridworld_density")
    with pytest.raises(UserError, match="did you mean memory"):
        analyses.load("memori")
    with pytest.raises(UserError, match="looks at no run"):
        analyze("gridworld_density", (Path("runs/some"),))


# ---------------------------------------------------------------------------------------------------- goal density


def test_density_agrees_with_the_agent_at_grid_points(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = goal_density.run(run)
    arrays = load_arrays(path, ("x", "y", "log_density", "goals", "titles"))
    x, y, field = arrays["x"], arrays["y"], arrays["log_density"]
    assert field.shape == (5, len(y), len(x)) and arrays["goals"].shape == (5, 2)
    assert [str(t) for t in arrays["titles"]] == [f"task {i}" for i in range(1, 6)]
    assert read_run(run).density == path
    assert capsys.readouterr().out.count("task") == 5

    env = envs.make(ENVIRONMENT)
    agent: Any
    agent, _ = runs.load_agent(run)
    generator = np.random.default_rng(0)
    for number, (spec,) in enumerate(plan(EvalConfig(episodes=1, shard=1), ENVIRONMENT, 5)):
        _, goal = envs.seeded_reset(env, spec.seed, spec.task)
        np.testing.assert_array_equal(arrays["goals"][number], goal)
        free = np.argwhere(np.isfinite(field[number]))
        for i, j in free[generator.integers(len(free), size=4)]:
            state = torch.tensor([[x[j], y[i]]], dtype=torch.float32)
            best = -np.inf
            for angle in np.arange(8) * np.pi / 4:  # one state, one action at a time
                action = torch.tensor([[np.cos(angle), np.sin(angle)]], dtype=torch.float32)
                with torch.no_grad():
                    log_p = agent.log_density(state, action, agent.goal_coordinates(torch.from_numpy(goal)[None]))
                best = max(best, float(log_p))
            assert field[number, i, j] == pytest.approx(best, abs=1e-3)


def test_walls_are_nan_and_the_grid_meets_the_cells() -> None:
    env = envs.make(ENVIRONMENT)
    geometry = envs.maze_geometry(env)
    assert geometry is not None
    x, y, free = goal_density.grid(geometry, points=3)
    assert free.shape == (len(y), len(x)) == (24, 24)
    maze = env.unwrapped
    for i in range(8):
        for j in range(8):
            centre = maze.ij_to_xy((i, j))
            assert (x[3 * j + 1], y[3 * i + 1]) == pytest.approx(tuple(centre))
            assert free[3 * i : 3 * i + 3, 3 * j : 3 * j + 3].all() == (geometry["maze_map"][i, j] != 1)


def test_density_needs_a_maze_and_a_flow(gcbc_run: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="conditioning=flow"):
        goal_density.run(gcbc_run)
    elsewhere = trained(tmp_path / "cube", data, "gcbc", GCBCConfig(steps=1, batch_size=4, hidden=(8,)), None)
    with pytest.raises(UserError, match="needs a maze"):
        goal_density.run(elsewhere)


def test_unit_actions() -> None:
    for dim, count in ((2, 8), (3, 6)):
        actions = goal_density.unit_actions(dim)
        assert actions.shape == (count, dim)
        torch.testing.assert_close(actions.norm(dim=1), torch.ones(count))


# ---------------------------------------------------------------------------------------------------------- memory


def test_effective_memory_by_hand() -> None:
    a_bar = torch.tensor([[0.1, 0.9, 0.9, 0.9], [0.9, 0.9, 0.9, 0.4], [1.0, 1.0, 1.0, 1.0]])
    # 0.9^3 = 0.73, then 0.07; 0.4 at once; never forgotten: the whole window
    assert memory.effective_memory(a_bar).tolist() == [3, 0, 4]


def test_memory_of_a_mamba_with_known_steps() -> None:
    """Delta = 0.1 everywhere, A = -1 and -2: A_bar is e^-0.1 and e^-0.2, which stay above 1/2 for 6 and 3 tokens."""
    mixer = Mamba(4, state_size=2)
    with torch.no_grad():
        mixer.dt_proj.weight.zero_()
        mixer.dt_proj.bias.fill_(float(np.log(np.expm1(0.1))))  # softplus of it is 0.1
    values = mixer.readout(torch.randn(3, 20, 4))
    readouts: list[dict[str, memory.Moments]] = [{}]
    memory.observe(readouts, [{**values, "alpha": torch.tensor([[0.2, 0.4]])}])
    found = memory.summarize(readouts, tokens_per_step=3)["all"]
    assert found["delta_mean"] == pytest.approx(0.1, rel=1e-5)
    assert found["delta_std"] == pytest.approx(0.0, abs=1e-6)
    assert found["a_bar_mean"] == pytest.approx((np.exp(-0.1) + np.exp(-0.2)) / 2, rel=1e-5)
    assert found["memory_tokens"] == pytest.approx((6 + 3) / 2)
    assert found["memory_steps"] == pytest.approx(1.5)
    assert found["memory_tokens_of_mean"] == 4  # mean 0.862: 0.862^4 = 0.551, 0.862^5 = 0.475
    assert (found["gate_attention"], found["gate_mamba"]) == pytest.approx((0.3, 0.7))
    assert found["a_bar_slowest_mean"] == pytest.approx(np.exp(-0.1), rel=1e-5)
    assert (found["memory_tokens_slowest"], found["memory_steps_slowest"]) == (6, 2)
    assert found["memory_steps_of_mean"] == pytest.approx(4 / 3)
    assert found["delta_positions"] == pytest.approx([0.1] * 20, rel=1e-5)
    (filled,) = np.flatnonzero(found["delta_histogram"])
    assert memory.EDGES[filled] < 0.1001 and memory.EDGES[filled + 1] > 0.0999


def test_the_slowest_state_is_each_channel_s_own() -> None:
    """Two channels whose slowest states have different numbers; in pieces, as a run is read."""
    delta = torch.tensor([[[0.1, 0.5], [0.2, 0.5], [0.3, 0.5]]])  # (1, 3, 2)
    A = torch.tensor([[-1.0, -4.0], [-8.0, -0.5]])
    values = {"delta": delta, "A_bar": torch.exp(delta[..., None] * A)}
    readouts: list[dict[str, memory.Moments]] = [{}]
    for _ in range(3):
        memory.observe(readouts, [values])
    (found,) = memory.summarize(readouts, tokens_per_step=1)["blocks"]
    first, second = np.exp([-0.1, -0.2, -0.3]), np.exp(-0.25)
    assert found["a_bar_slowest_mean"] == pytest.approx((first.mean() + second) / 2)
    # From the last token back: e^-0.3, e^-0.5, e^-0.6 > 1/2; and e^-0.25, e^-0.5 > 1/2 > e^-0.75.
    assert found["memory_tokens_slowest"] == pytest.approx((3 + 2) / 2)
    assert found["delta_positions"] == pytest.approx([0.3, 0.35, 0.4])


def test_histogram_of_delta_by_hand() -> None:
    counted = memory.Distribution()
    edges = memory.EDGES
    inside = float(np.sqrt(edges[30] * edges[31]))
    counted.add(torch.tensor([0.0, 1e-9, inside, float(edges[7])], dtype=torch.float64).view(1, 4, 1))
    counted.add(torch.tensor([inside, 9.99, 10.0, 500.0], dtype=torch.float64).view(1, 4, 1))
    shares = np.array(counted.shares)
    assert len(shares) == len(edges) - 1 and shares.sum() == pytest.approx(1.0)
    assert {int(i): shares[i] for i in np.flatnonzero(shares)} == {0: 2 / 8, 7: 1 / 8, 30: 2 / 8, 59: 3 / 8}
    assert counted.positions == pytest.approx([inside / 2, 9.99 / 2, (inside + 10) / 2, (edges[7] + 500) / 2])


def test_memory_over_blocks_is_the_mean_of_blocks() -> None:
    delta = torch.tensor([[[0.1], [0.2]]])
    readouts: list[dict[str, memory.Moments]] = [{}, {}]
    memory.observe(readouts, [{"delta": d, "A_bar": torch.exp(-d[..., None])} for d in (delta, 10 * delta)])
    found = memory.summarize(readouts, tokens_per_step=1)
    assert found["all"]["delta_positions"] == pytest.approx([0.55, 1.1])
    assert sum(found["all"]["delta_histogram"]) == pytest.approx(1.0)
    assert np.flatnonzero(found["all"]["delta_histogram"]).size == 4
    assert "gate_attention" not in found["all"]  # no gate with one branch


def test_token_kinds() -> None:
    def kinds(tokenization: str, with_q: bool) -> list[str]:
        tokens = Tokens(3, 2, 3, 8, 4, tokenization, with_q)  # type: ignore[arg-type]
        found = memory.token_kinds(tokens)
        assert len(found) == tokens.per_step and found[tokens.state_at].startswith("state")
        return found

    assert kinds("concat", True) == ["state-goal", "Q", "action"]
    assert kinds("separate", True) == ["goal", "state", "Q", "action"]
    assert kinds("no_goal", False) == ["state", "action"]
    assert memory.token_kinds(torch.nn.Identity()) == []


def test_memory_of_a_run(run: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(memory.run(run, data=data).read_text())
    assert len(found["blocks"]) == TINY.layers
    assert found["data"]["training_data"] is True
    assert found["window_tokens"] == 3 * TINY.context
    over = found["all"]
    assert 0 < over["a_bar_mean"] < 1 and 0 <= over["memory_tokens"] <= found["window_tokens"]
    assert over["gate_attention"] + over["gate_mamba"] == pytest.approx(1.0)
    assert "gate: attention" in capsys.readouterr().out
    for block in (over, *found["blocks"]):
        assert sum(block["delta_histogram"]) == pytest.approx(1.0)
        assert np.mean(block["delta_positions"]) == pytest.approx(block["delta_mean"])
        assert block["a_bar_mean"] < block["a_bar_slowest_mean"] < 1
        assert block["memory_tokens"] < block["memory_tokens_slowest"] <= found["window_tokens"]
    assert len(found["delta_edges"]) == len(over["delta_histogram"]) + 1
    assert found["token_kinds"] == ["state-goal", "Q", "action"] * TINY.context
    assert len(over["delta_positions"]) == found["window_tokens"]
    again = json.loads(memory.run(run, data=data).read_text())
    assert again == found  # a function of the run and the data


def test_memory_of_runs_side_by_side(run: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A hybrid of two blocks and a decoder of one Mamba block, which has no gate."""
    mamba = dataclasses.replace(TINY, backbone="mamba", layers=1, steps=2)
    other = trained(tmp_path / "runs" / "mamba", data, "qhyer", mamba)
    out = tmp_path / "out"
    assert analyze("memory", (run, other), data=data, out=out) == 0
    shown = capsys.readouterr().out
    own = [json.loads((folder / "analyses" / "memory.json").read_text()) for folder in (run, other)]
    assert f"{own[0]['all']['delta_mean']:.3f} ± {own[0]['all']['delta_std']:.3f}" in shown
    assert f"{own[1]['all']['memory_steps_slowest']:.2f}" in shown
    header, *lines = csv.reader((out / "memory.csv").read_text().splitlines())
    assert [name.rsplit("/", 1)[-1] for name in header] == ["block", "quantity", "qhyer", "mamba"]
    written = {(block, key): values for block, key, *values in lines}
    assert len(written) == len(lines) == 3 * 13  # ten of Delta and three of the gate, in two blocks and over them
    for (block, key), values in written.items():
        for value, result in zip(values, own):
            blocks = {"all": result["all"], **{str(i): line for i, line in enumerate(result["blocks"], 1)}}
            expected = blocks.get(block, {}).get(key)
            assert value == "" if expected is None else float(value) == pytest.approx(expected, rel=1e-9)
    assert written["all", "gate_mamba"][1] == "" and written["2", "delta_mean"][1] == ""
    both = json.loads((out / "memory.json").read_text())["runs"]
    assert [result["all"] for result in both] == [result["all"] for result in own]
    assert (out / "memory.png").stat().st_size > 10_000 and "</svg>" in (out / "memory.svg").read_text()
    with pytest.raises(UserError, match="another --out"):
        memory.compare([run, other], run / "analyses")
    before = (out / "memory.json").read_bytes()
    assert memory.compare([run, other], out).read_bytes() == before  # the same runs again
    with pytest.raises(UserError, match="of other runs"):
        memory.compare([other, run], out)
    with pytest.raises(UserError, match="at least one"):
        memory.compare([])
    assert (out / "memory.json").read_bytes() == before
    (other / "analyses" / "memory.json").unlink()
    with pytest.raises(UserError, match="qhyer analyze memory"):
        memory.compare([run, other], out)


def test_labels_say_what_differs() -> None:
    assert memory.labels([Path("a/play/s0")]) == ["s0"]
    assert memory.labels([Path("a/play/s0"), Path("a/noisy/s0")]) == ["play/s0", "noisy/s0"]
    assert memory.labels([Path("a/s0"), Path("a/s1")]) == ["s0", "s1"]


def test_memory_says_what_it_needs(run: Path, gcbc_run: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Mamba"):
        memory.run(gcbc_run, data=data)
    with pytest.raises(UserError, match="--data"):
        memory.run(run)
    other = tmp_path / "other.npz"
    np.savez(other, **{k: np.repeat(v, 2, axis=-1) if v.ndim == 2 else v for k, v in walks().items()})  # type: ignore[arg-type]
    with pytest.raises(UserError, match="columns"):
        memory.run(run, data=other)


# ---------------------------------------------------------------------------------------------------------- critic


def test_ranks_and_spearman_agree_with_scipy() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 5, 40).astype(float), rng.normal(size=40)  # many ties on one side
    np.testing.assert_allclose(_common.ranks(a) + 1, stats.rankdata(a))
    assert _common.spearman(a, b) == pytest.approx(stats.spearmanr(a, b).statistic)
    both = _common.spearman(np.stack([a, b]), np.stack([b, b]))
    np.testing.assert_allclose(both, [stats.spearmanr(a, b).statistic, 1.0])
    assert np.isnan(_common.spearman(np.ones(5), np.arange(5.0)))


class Oracle:
    """A critic that knows the straight walks: far goals and goals in another direction are unlikely."""

    config, plan_dim = SimpleNamespace(chunk=1), 2

    def goal_coordinates(self, goals: torch.Tensor) -> torch.Tensor:
        return goals

    def log_density(self, states: torch.Tensor, actions: torch.Tensor, goals: torch.Tensor) -> torch.Tensor:
        return -(goals - states - 0.2 * actions).norm(dim=-1)


def test_a_critic_that_knows_is_told_from_one_that_does_not(data: Path) -> None:
    episodes = Episodes.load(data, goal=[0, 1])
    knows, source = Oracle(), torch.Generator().manual_seed(0)
    found = critic.nearing(knows, episodes, 40, source)
    assert found["spearman"] == pytest.approx(1.0) and found["states_per_goal"] == critic.APPROACH
    ranking = critic.action_ranking(knows, episodes, 0.95, source)
    assert ranking["auc_other"] > 0.95 and ranking["auc_random"] > 0.6 and ranking["advantage_other"] > 0

    class Planner(Oracle):  # is asked about three actions at a time
        config, plan_dim = SimpleNamespace(chunk=3), 6

        def log_density(self, states: torch.Tensor, actions: torch.Tensor, goals: torch.Tensor) -> torch.Tensor:
            return super().log_density(states, actions.view(-1, 3, 2).mean(1), goals)

    assert critic.nearing(Planner(), episodes, 40, source)["spearman"] == pytest.approx(1.0)
    assert critic.action_ranking(Planner(), episodes, 0.95, source)["auc_other"] > 0.95

    class Ignorant(Oracle):
        def log_density(self, states: torch.Tensor, actions: torch.Tensor, goals: torch.Tensor) -> torch.Tensor:
            return torch.rand(len(states), generator=torch.Generator().manual_seed(len(states)))

    noise = critic.nearing(Ignorant(), episodes, 40, source)
    assert abs(noise["spearman"]) < 0.1
    constant = Ignorant()
    constant.log_density = lambda s, a, g: torch.zeros(len(s))  # type: ignore[method-assign]
    assert critic.action_ranking(constant, episodes, 0.95, source)["auc_random"] == 0.5
    assert critic.nearing(constant, episodes, 40, source)["spearman"] is None


def test_critic_of_a_run(run: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(critic.run(run, data=data).read_text())
    # 150 updates on walks whose action decides where they lead: the flow has learned something of it.
    assert found["nearing"]["spearman"] > 0.3
    assert found["action"]["auc_other"] > 0.6
    assert found["tokens"]["q_std"] > 0 and 0 <= found["tokens"]["q_hat_above_q"] <= 1
    assert "rank correlation" in capsys.readouterr().out


def test_token_spread_agrees_with_the_training_metric(run: Path, data: Path) -> None:
    agent: Any
    agent, _ = runs.load_agent(run)
    windows = agent.stages()[0].sampler.build(Episodes.load(data, goal=[0, 1]), torch.Generator()).sample(16)
    found = critic.token_spread(agent, windows)
    with torch.no_grad():
        _, _, metrics = agent.actor_loss(windows)
    assert found["q_hat_minus_q_mean"] == pytest.approx(float(metrics["q/hat_minus_q"]), abs=1e-5)
    assert found["q_mean"] == pytest.approx(float(metrics["q/mean"]), abs=1e-5)


# --------------------------------------------------------------------------------------------------------- command


def test_analyze(run: Path, gcbc_run: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert analyze("memory", (run,), data=data) == 0
    shown = capsys.readouterr().out
    assert analyses.question("memory") in shown and "written:" in shown
    beside = sorted(path.suffix for path in (run / "analyses").glob("memory.*"))
    assert beside == [".csv", ".json", ".png", ".svg"]
    assert "blocks" in json.loads((run / "analyses" / "memory.json").read_text())  # its own, not a comparison
    assert analyze("memory", (gcbc_run, run), data=data) == 1  # goes on after the run it cannot answer for
    with pytest.raises(UserError, match="--out"):
        analyze("critic", (run,), data=data, out=run)
    with pytest.raises(UserError, match="Mamba"):
        analyze("memory", (gcbc_run,), data=data)
    with pytest.raises(UserError, match="give the run"):
        analyze("memory", ())
