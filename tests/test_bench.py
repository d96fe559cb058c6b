"""The benchmarks run, their slow reference computes the same action, and what they write is complete."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from qhyer import presets, runs
from qhyer.agents.qhyer import QHyerConfig
from qhyer.bench import common
from qhyer.bench.common import BenchRow, Ceilings
from qhyer.bench.data import data
from qhyer.bench.eval import evaluation
from qhyer.bench.infer import Recompute, full_memory, infer, linear_floor, measure_acting
from qhyer.data import registry
from qhyer.data.episodes import DataSpec, Episodes
from qhyer.errors import UserError
from qhyer.evaluate import EvalConfig, Timings, evaluate
from qhyer.rollout import ShardRunner
from qhyer.train import TrainConfig, train

TINY = QHyerConfig(context=4, width=16, layers=2, heads=2, encoder_width=8, encoder_layers=1, flow_blocks=1)

CEILINGS = Ceilings(flops=1e9, bytes=1e9)


def spec(dim: int = 3, actions: int = 2) -> DataSpec:
    return DataSpec(dim, actions, (0, 1), (0.0,) * dim, (1.0,) * dim)


def test_sizes_come_from_the_environment() -> None:
    made = common.made_up_spec(registry.get("cube-single-play"))
    assert (made.observation_dim, made.action_dim, made.goal_indices) == (28, 5, (19, 20, 21))


def test_the_reference_without_a_cache_acts_the_same() -> None:
    agent = runs.build_agent("qhyer", TINY, spec(), seed=0).eval()
    row = measure_acting(agent, 2, 0.0, CEILINGS)
    assert row.extra["recompute_difference"] < 1e-5
    assert row.extra["calls"] >= common.LEAST_ROUNDS
    assert row.extra["speedup"] == pytest.approx(row.extra["recompute_ms"] / row.ms)
    assert not isinstance(agent.decoder, Recompute)  # put back
    assert row.gb is not None and row.gb > 0


def test_the_floor_of_acting_is_its_operations_or_its_bytes() -> None:
    agent = runs.build_agent("gcbc", presets.resolve("gcbc", "paper", "x")[0], spec(), seed=0).eval()
    row = measure_acting(agent, 8, 0.0, CEILINGS)
    weights = sum(p.nbytes for p in agent.parameters())
    flops = 2 * 8 * sum(m.weight.numel() for m in agent.modules() if isinstance(m, nn.Linear))
    assert (row.extra["flops"], row.extra["bytes"]) == (flops, weights + 2 * 8 * 3 * 4)
    assert row.floor_ms == pytest.approx(1e3 * max(flops / 1e9, row.extra["bytes"] / 1e9))
    assert row.ratio == pytest.approx(row.ms / row.floor_ms)


def test_operations_are_counted_backward_too() -> None:
    a, b, c = (torch.randn(2, *s, requires_grad=True) for s in ((3, 4), (4, 5), (3, 5)))
    for product in (lambda: torch.bmm(a, b), lambda: torch.baddbmm(c, a, b), lambda: a @ b):
        assert common.count_flops(product) == 2 * 2 * 3 * 4 * 5
        assert common.count_flops(lambda product=product: product().sum().backward()) == 3 * 2 * 2 * 3 * 4 * 5
    layer = nn.Linear(4, 6)
    assert common.count_flops(lambda: layer(a)) == 2 * 2 * 3 * 4 * 6
    q, k = torch.randn(2, 2, 7, 8, requires_grad=True), torch.randn(2, 2, 9, 8, requires_grad=True)
    attend = lambda: nn.functional.scaled_dot_product_attention(q, k, k)
    assert common.count_flops(attend) == 2 * 2 * (2 * 7 * 9 * 8) * 2
    assert common.count_flops(lambda: attend().sum().backward()) >= 3 * common.count_flops(attend)


def test_parameters_read_are_counted_once_and_only_those() -> None:
    net = nn.ModuleDict({"used": nn.Linear(3, 4), "unused": nn.Linear(3, 4)})
    twice = lambda: (net["used"](torch.zeros(1, 3)), net["used"](torch.zeros(5, 3)))
    assert common.parameter_bytes(net, twice) == 4 * (12 + 4)


def test_ceilings_are_positive_and_medians_are_of_calls() -> None:
    cpu = torch.device("cpu")
    measured = Ceilings.measure(cpu, seconds=0.0)
    assert measured.flops > 1e8 and measured.bytes > 1e7
    assert measured.facts()["matrix_tflops"] == pytest.approx(measured.flops / 1e12)
    calls: list[int] = []
    assert common.time_ms(lambda: calls.append(1), cpu, 0.0, least=7) >= 0.0
    assert len(calls) == common.WARMUP + 7


def test_the_table_and_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [BenchRow("x", 4, 3.0, 1.5, None, {"speed": 1234.5}), BenchRow("y", 1, 2.0)]
    common.show("title", rows, {"speed": "steps/s"})
    common.write(tmp_path / "o.json", "x", {"device": "cpu"}, rows)
    printed = capsys.readouterr().out
    assert "2.00" in printed and "1234" in printed and "steps/s" in printed
    written = json.loads((tmp_path / "o.json").read_text())
    assert written["bench"] == "x" and written["device"] == "cpu"
    assert {"name", "batch", "ms", "floor_ms", "gb"} <= set(written["rows"][0])


def test_the_window_is_full() -> None:
    agent = runs.build_agent("qhyer", TINY, spec(), seed=0).eval()
    memory = full_memory(agent, torch.zeros(2, 3), torch.zeros(2, 3), TINY.context)
    assert memory is not None and memory["observations"].shape == (2, TINY.context - 1, 3)


@pytest.mark.parametrize("options", [{"conditioning": "none"}, {"backbone": "attention"}, {"tokenization": "separate"}])
def test_ablations_are_measured_too(options: dict[str, str]) -> None:
    from dataclasses import replace

    agent = runs.build_agent("qhyer", replace(TINY, **options), spec(), seed=0).eval()  # type: ignore[arg-type]
    row = measure_acting(agent, 1, 0.0, CEILINGS)
    assert ("speedup" in row.extra) == (options.get("conditioning") != "none")  # one stage: nothing is saved


def test_floor_runs_each_linear_layer_as_often_as_the_call() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    ran: list[tuple[int, ...]] = []
    floor = linear_floor(net, lambda: (net(torch.zeros(5, 3)), net(torch.zeros(1, 3))))
    real = torch.nn.functional.linear
    try:
        torch.nn.functional.linear = lambda x, *rest: (ran.append(tuple(x.shape)), real(x, *rest))[1]  # type: ignore[assignment]
        floor()
    finally:
        torch.nn.functional.linear = real  # type: ignore[assignment]
    assert ran == [(5, 3), (5, 4), (1, 3), (1, 4)]


def test_calls_take_turns() -> None:
    order: list[str] = []
    first, second = common.interleave(
        [lambda: order.append("a"), lambda: order.append("b")], 0.0, torch.device("cpu"), least=4
    )
    assert order == ["a", "b"] * (common.WARMUP + 4)
    assert len(first) == len(second) == 4 and (first >= 0).all()


def test_infer_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presets, "resolve", lambda *_: (TINY, []))
    before = torch.get_num_threads()
    out = tmp_path / "infer.json"
    assert infer(dataset="pointmaze-medium-navigate", batch=(1, 3), seconds=0.0, out=out) == 0
    assert torch.get_num_threads() == before
    written = json.loads(out.read_text())
    assert [row["batch"] for row in written["rows"]] == [1, 3]
    assert written["threads"] == 1 and written["dataset"] == "pointmaze-medium-navigate-v0"
    assert "1 thread" in " ".join(capsys.readouterr().out.split())


def test_infer_of_an_agent_without_memory(tmp_path: Path) -> None:
    out = tmp_path / "infer.json"
    assert infer(agent="gcbc", batch=(1,), seconds=0.0, out=out) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert row["ms"] > 0 and "speedup" not in row["extra"]


def test_wrong_options_are_refused() -> None:
    with pytest.raises(UserError, match="batch"):
        infer(batch=(0,))
    with pytest.raises(UserError, match="threads"):
        infer(agent="gcbc", threads=0)
    with pytest.raises(UserError, match="workers"):
        evaluation(workers=0)
    with pytest.raises(UserError, match="manipulation"):
        data(dataset="pointmaze-medium-navigate")


def test_data_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "data.json"
    assert data(episodes=1, rows=20, out=out) == 0
    written = json.loads(out.read_text())
    (row,) = written["rows"]
    assert row["extra"]["steps"] == 20
    assert np.isclose(row["ms"], 1e3 / row["extra"]["generation_steps_per_s"])
    assert "replayed" in capsys.readouterr().out


@pytest.mark.parametrize("run", [False, True])
def test_eval_command(run: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], tiny_config) -> None:
    out = tmp_path / "eval.json"
    options: dict[str, object] = {"agent": "gcbc", "dataset": "pointmaze-medium-navigate"}
    if run:
        rng = np.random.default_rng(0)
        maze = Episodes.from_arrays(rng.normal(size=(80, 2)), rng.uniform(-1, 1, (80, 2)), [79], goal=[0, 1])
        config = TrainConfig(device="cpu")
        options = {"run": train("gcbc", "x", tiny_config("gcbc"), config, run=tmp_path / "r", episodes=maze, quiet=True,
                                environment="pointmaze-medium-v0")}  # fmt: skip
    assert evaluation(**options, episodes=1, workers=2, out=out) == 0  # type: ignore[arg-type]
    written = json.loads(out.read_text())
    (row,) = written["rows"]
    assert (row["name"], row["batch"], written["environment"]) == ("eval5", 5, "pointmaze-medium-v0")
    extra = row["extra"]
    assert extra["steps"] >= 5 and extra["policy_calls"] >= extra["steps"] / 5
    assert 0 < extra["start_s"] < extra["total_s"] and row["ms"] == pytest.approx(1e3 * extra["total_s"])
    assert row["floor_ms"] == pytest.approx(1e3 * extra["steps"] / extra["simulator_steps_per_s"])
    assert "simulator alone" in " ".join(capsys.readouterr().out.split())


def test_the_simulator_alone_replays_the_episodes(tiny_config) -> None:
    """From the actions alone: the same steps to the same ends."""
    environment, config = "pointmaze-medium-v0", EvalConfig(episodes=1, tasks=(1, 2), shard=1)
    agent = runs.build_agent("gcbc", tiny_config("gcbc"), spec(2, 2), seed=0)
    timings = Timings(actions={})
    results = evaluate(agent, environment, config, workers=0, timings=timings)
    assert timings.actions is not None and list(timings.actions) == [result.spec for result in results]
    runner = ShardRunner(environment)
    for result in results:
        actions = timings.actions[result.spec]
        assert result.observations is not None and len(actions) == result.length
        before = runner.replay([result.spec], [np.stack(actions[:-1])])
        observation, ended, success = runner.step(actions[-1][None])
        assert before == result.length - 1 and ended[0] and success[0] == result.success
        assert np.array_equal(observation[0], result.observations[-1])
