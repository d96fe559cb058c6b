"""The benchmarks run, their slow reference computes the same action, and what they write is complete."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import nn

from qhyer import presets, runs
from qhyer.agents.qhyer import QHyerConfig
from qhyer.bench import all as whole
from qhyer.bench import common
from qhyer.bench.agents import every_agent
from qhyer.bench.backbones import AGENT_OF, backbones
from qhyer.bench.common import BenchRow, Ceilings
from qhyer.bench.data import data
from qhyer.bench.eval import evaluation
from qhyer.bench.infer import Recompute, full_memory, infer, linear_floor, measure_acting
from qhyer.bench.scan import Problem, around, difference, loop, scan
from qhyer.bench.traffic import traffic
from qhyer.bench.train import WARMUP, Training, category, covered, launch, measure_updates, profile_updates, updates
from qhyer.data import registry
from qhyer.data.episodes import DataSpec, Episodes
from qhyer.errors import UserError
from qhyer.evaluate import EvalConfig, Timings, evaluate
from qhyer.nn.backbones import BACKBONES
from qhyer.rollout import ShardRunner
from qhyer.train import TrainConfig, train

TINY = QHyerConfig(context=4, width=16, layers=2, heads=2, encoder_width=8, encoder_layers=1, flow_blocks=1)

CEILINGS = Ceilings(flops=1e9, bytes=1e9)


def spec(dim: int = 3, actions: int = 2) -> DataSpec:
    return DataSpec(dim, actions, (0, 1), (0.0,) * dim, (1.0,) * dim)


def test_sizes_come_from_the_environment() -> None:
    made = common.made_up_spec(registry.get("cube-single-play"))
    assert (made.observation_dim, made.action_dim, made.goal_indices) == (28, 5, (19, 20, 21))


@pytest.mark.parametrize("history", ["sliding", "hopping"])
def test_the_reference_without_a_cache_acts_the_same(history: Literal["sliding", "hopping"]) -> None:
    agent = runs.build_agent("qhyer", dataclasses.replace(TINY, history=history), spec(), seed=0).eval()
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


def test_rows_of_one_file_are_unique(tmp_path: Path) -> None:
    """A row takes the place of the one with its name and batch; any other stays where it is."""
    path = tmp_path / "a" / "rows.json"
    for row in (BenchRow("update", 256, 2.0), BenchRow("cold84", 1, 9.0), BenchRow("update", 1024, 5.0)):
        common.add_row(path, row, {"device": "cpu"})
    common.add_row(path, BenchRow("update", 256, 1.0, 0.5, 3.0, {"path": "captured"}))
    rows = json.loads(path.read_text())
    assert [(row["name"], row["batch"], row["ms"]) for row in rows] == [
        ("update", 256, 1.0), ("cold84", 1, 9.0), ("update", 1024, 5.0)
    ]  # fmt: skip
    assert rows[0]["floor_ms"] == 0.5 and rows[0]["gb"] == 3.0 and rows[0]["extra"] == {"path": "captured"}
    assert rows[1]["facts"] == {"device": "cpu"}
    for wrong in ("{}", "[1]", "nothing"):
        path.write_text(wrong)
        with pytest.raises(UserError, match=r"JSON|list"):
            common.add_row(path, BenchRow("x", 1, 1.0))


def test_kernels_are_off_only_within(monkeypatch: pytest.MonkeyPatch) -> None:
    for before in (None, "1"):
        monkeypatch.delenv("QHYER_TRITON", raising=False)
        if before is not None:
            monkeypatch.setenv("QHYER_TRITON", before)
        with pytest.raises(KeyError), common.plain_operations():
            assert os.environ["QHYER_TRITON"] == "0"
            raise KeyError
        assert os.environ.get("QHYER_TRITON") == before


def test_parts_of_a_parameter_are_counted() -> None:
    """A slice taken under no_grad has no history, which torch's own hooks on modules do not accept."""
    layer, weight = nn.Identity(), nn.Parameter(torch.randn(2, 3, 3))
    with torch.no_grad():
        assert common.count_flops(lambda: layer(weight.unbind(0)[0]) @ weight[1]) == 2 * 27


def test_small_numbers_are_not_shown_as_zero() -> None:
    assert common.figures(2e-7) == "2.0e-07" and common.figures(0.0123) == "0.012" and common.figures(0.0) == "0.00"


def test_the_window_is_full() -> None:
    agent = runs.build_agent("qhyer", TINY, spec(), seed=0).eval()
    memory = full_memory(agent, torch.zeros(2, 3), torch.zeros(2, 3))
    assert memory is not None and memory["observations"].shape == (2, TINY.context - 1, 3)


@pytest.mark.parametrize("head", ["gaussian", "best_of_mixture"])
def test_a_choice_is_measured_and_not_the_rest_of_a_plan(head: str) -> None:
    from dataclasses import replace

    options = dict(context=1, chunk=3, action_head=head)
    agent = runs.build_agent("qhyer", replace(TINY, **options), spec(), seed=0).eval()  # type: ignore[arg-type]
    assert measure_acting(agent, 1, 0.0, CEILINGS).extra["flops"] > 0


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
    for rows in (-5, 0, 1):
        with pytest.raises(UserError, match="at least 2 rows"):
            data(rows=rows)
    for seconds in (-1.0, float("nan"), float("inf")):
        with pytest.raises(UserError, match="--seconds"):
            updates(seconds=seconds, device="cpu")
    for options in ({"batch": ()}, {"seeds": (0,)}, {"episodes": 0}, {"top": -3}):
        with pytest.raises(UserError, match=f"--{next(iter(options))}"):
            updates(device="cpu", **options)  # type: ignore[arg-type]


def test_traces_of_updates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small: dict[str, Any] = {"agent": "gcbc", "dataset": "pointmaze-medium-navigate", "preset": "demo", "episodes": 2}
    small |= {"batch": (8, 16), "seconds": 0.01, "device": "cpu"}
    assert updates(**small, trace=tmp_path / "new" / "trace.json") == 0
    assert "trace-16.json" in capsys.readouterr().out.replace("\n", "")
    for size in small["batch"]:
        events = json.loads((tmp_path / "new" / f"trace-{size}.json").read_text())["traceEvents"]
        assert any(event.get("name") == "aten::addmm" and event["dur"] >= 0 for event in events)
    (tmp_path / "file").write_text("")
    for trace, why in ((tmp_path, "it is a folder"), (tmp_path / "file" / "trace.json", "is a file")):
        with pytest.raises(UserError, match=f"--trace .* cannot be written: .*{why}"):
            updates(**small, trace=trace)


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


# -------------------------------------------------------------------------------------------------------- training


@pytest.mark.parametrize("agent", ["gcbc", "qhyer"])
def test_updates_are_the_trainer_s(agent: str, tmp_path: Path, tiny_config, point_world) -> None:
    """To the bit: the same weights, batches and noise from the same seed."""
    config = tiny_config(agent)
    run = train(agent, "x", config, TrainConfig(device="cpu", log_every=1, seed=3), run=tmp_path / "r",
                episodes=point_world, quiet=True)  # fmt: skip
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    training = Training(agent, config, point_world, "fp32", seed=3)
    for line in lines:
        training()
        assert training.update.take_metrics()["loss"] == line["loss"]
    assert training.flops() > 0 and all(p.grad is None for p in training.agent.parameters())


def test_the_floor_of_an_update(tiny_config, point_world) -> None:
    """Two products for each weight forward and backward, one more for each input but the first; seven numbers moved."""
    config = tiny_config("gcbc", batch_size=4)
    make = lambda **options: Training("gcbc", config, point_world, "fp32", **options)
    row = measure_updates(make, 1, 0.0, CEILINGS, torch.device("cpu"))
    agent = make().agent
    layers = [m for m in agent.modules() if isinstance(m, nn.Linear)]
    flops = 2 * 4 * (3 * sum(layer.weight.numel() for layer in layers) - layers[0].weight.numel())
    moved = 7 * sum(p.nbytes for p in agent.parameters())
    assert (row.extra["flops"], row.extra["optimizer_bytes"]) == (flops, moved)
    assert row.floor_ms == pytest.approx(1e3 * (flops + moved) / 1e9)
    assert (row.name, row.batch, row.extra["path"]) == ("update", 4, "eager")


def test_several_seeds_are_measured_together(tiny_config, point_world) -> None:
    config = tiny_config("gcbc")
    made: list[Training] = []

    def make(**options: int) -> Training:
        made.append(Training("gcbc", config, point_world, "fp32", **options))  # type: ignore[arg-type]
        return made[-1]

    row = measure_updates(make, 3, 0.0, CEILINGS, torch.device("cpu"))
    assert row.name == "seeds3" and len(made) == 3
    first, second, third = (next(training.agent.parameters()) for training in made)
    assert not torch.equal(first, second) and not torch.equal(second, third)
    assert made[0].step == 2 * made[1].step - WARMUP and made[1].step == made[2].step  # the first also alone
    assert row.extra["times_one"] == pytest.approx(row.ms / row.extra["one_ms"])
    single = measure_updates(make, 1, 0.0, CEILINGS, torch.device("cpu"))
    assert row.floor_ms == pytest.approx(3 * single.floor_ms) and single.floor_ms is not None


def test_every_update_is_launched_before_the_next_round() -> None:
    order: list[str] = []

    class Pretend:
        lane = type("Lane", (), {"device": torch.device("cpu")})()

        def __init__(self, name: str) -> None:
            self.name = name

        def __call__(self) -> None:
            order.append(self.name)

    launch([Pretend("a"), Pretend("b")], 2)  # type: ignore[list-item]
    assert order == ["a", "b", "a", "b"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_TNT", "matrix products"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x128>", "matrix products"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention)", "attention"),
        ("void pytorch_flash::flash_bwd_kernel<Flash_bwd_kernel_traits<64>>", "attention"),
        ("_scan_forward_kernel", "scan"),
        ("_head_scan_backward_kernel", "scan"),
        ("head_scan_backward", "scan"),
        ("_attention_backward_kernel", "attention"),
        ("_seam_forward_kernel", "norm/elementwise"),
        ("_gelu_backward_kernel", "norm/elementwise"),
        ("_forward_kernel", "other"),
        ("_conv_backward_kernel", "convolution"),
        ("void at::native::tensor_kernel_scan_innermost_dim<float, std::plus<float>>", "other"),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>", "norm/elementwise"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor<float>>", "norm/elementwise"),
        ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>", "copies/casts"),
        ("Memcpy DtoD (Device -> Device)", "copies/casts"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", "reductions"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "matrix products"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float>>", "optimiser"),
        ("aten::addmm", "matrix products"),
        ("aten::baddbmm", "matrix products"),
        ("aten::mul_", "norm/elementwise"),
        ("aten::_fused_adamw_", "optimiser"),
        ("aten::sum", "reductions"),
    ],
)
def test_kernels_are_known_by_their_names(name: str, expected: str) -> None:
    assert category(name) == expected


def test_overlapping_time_counts_once() -> None:
    assert covered([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 2.5)]) == 4.0
    assert covered([]) == 0.0


def test_train_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tiny_config
) -> None:
    monkeypatch.setattr(presets, "resolve", lambda *_: (tiny_config("gcbc"), []))
    out = tmp_path / "train.json"
    options = {"dataset": "pointmaze-medium-navigate", "batch": (4, 6), "seeds": (1, 2), "episodes": 2, "seconds": 0.0}
    assert updates(**options, agent="gcbc", device="cpu", profile=True, top=3, out=out) == 0  # type: ignore[arg-type]
    written = json.loads(out.read_text())
    assert [(row["name"], row["batch"]) for row in written["rows"]] == [
        ("update", 4), ("seeds2", 4), ("update", 6), ("seeds2", 6)
    ]  # fmt: skip
    assert written["precision"] == "fp32" and written["threads"] == 1 and written["data"] == "made up"
    found = written["profiles"]["4"]
    assert found["top"][0]["us"] >= found["top"][-1]["us"]
    assert sum(group["share"] for group in found["categories"].values()) == pytest.approx(1.0)
    assert {"matrix products", "optimiser"} <= set(found["categories"])
    assert "by category" in capsys.readouterr().out


def test_train_command_on_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_config) -> None:
    monkeypatch.setattr(presets, "resolve", lambda *_: (tiny_config("gcbc"), []))
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "own.npz", observations=rng.normal(size=(80, 2)), actions=rng.uniform(-1, 1, (80, 2)),
             terminals=np.arange(80) % 40 == 39)  # fmt: skip
    own, out = str(tmp_path / "own.npz"), tmp_path / "o.json"
    options = {"agent": "gcbc", "device": "cpu", "batch": (4,), "seconds": 0.0, "out": out}
    assert updates(data=own, precision="bf16", **options) == 0  # type: ignore[arg-type]
    written = json.loads(out.read_text())
    assert (written["dataset"], written["data"], written["precision"]) == ("own", own, "bf16")
    with pytest.raises(UserError, match="--batch"):
        updates(agent="gcbc", batch=(0,), device="cpu")


def test_train_command_with_fields_of_one_s_own(tmp_path: Path) -> None:
    """Fields that are not the preset's, typed as in a manifest and told in the row's name."""
    out = tmp_path / "o.json"
    small = ("ssm=mamba2", "width=16", "layers=1", "context=2", "flow_blocks=1", "encoder_width=16", "flow_noise=0")
    sizes = {"dataset": "pointmaze-medium-navigate", "preset": "demo", "batch": (4,), "episodes": 2, "seconds": 0.0}
    assert updates(**sizes, override=small, device="cpu", out=out) == 0  # type: ignore[arg-type]
    written = json.loads(out.read_text())
    assert written["rows"][0]["name"] == " ".join(("update", *small)) and written["override"] == list(small)
    assert written["parameters"] < 30_000
    for wrong, message in (("width", "FIELD=VALUE"), ("wdth=3", "did you mean width"), ("ssm=3", "none of mamba")):
        with pytest.raises(UserError, match=message):
            updates(override=(wrong,), device="cpu")


# ------------------------------------------------------------------------------------------------------------ scan


def test_backbones_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every backbone has an agent; sizes are the ones asked for, the same for all."""
    assert set(AGENT_OF) == set(BACKBONES)
    sizes = dict(width=16, layers=1, heads=2, context=2, batch=4, device="cpu", seconds=0.01)
    out = tmp_path / "backbones.json"
    assert backbones(**sizes, out=out) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["name"] for row in rows] == list(AGENT_OF) and rows[0]["extra"]["times_first"] == 1.0
    assert all(row["ms"] > 0 and row["batch"] == 4 for row in rows)
    weights = {row["name"]: row["extra"]["parameters"] for row in rows}
    assert weights["hybrid"] > weights["gpt"] > weights["convformer"]  # attention and Mamba; attention; a filter
    assert "x gpt" in capsys.readouterr().out
    with pytest.raises(UserError, match="no backbone is called gtp"):
        backbones(names=("gtp",))


def test_agents_command(tmp_path: Path) -> None:
    out = tmp_path / "agents.json"
    assert (
        every_agent(names=("gcbc", "iql"), dataset="pointmaze-medium-stitch", device="cpu", seconds=0.01, out=out) == 0
    )
    rows = json.loads(out.read_text())["rows"]
    sizes = [presets.resolve(name, "paper", "pointmaze-medium-stitch-v0")[0].batch_size for name in ("gcbc", "iql")]
    assert [(row["name"], row["batch"]) for row in rows] == list(zip(("gcbc", "iql"), sizes))


def test_stacked_seeds_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "agents.json"
    same = dict(names=("gcbc", "iql"), dataset="pointmaze-medium-stitch", device="cpu", seconds=0.01)
    assert every_agent(**same, stack=(1, 2), out=out) == 0
    rows = {row["name"]: row for row in json.loads(out.read_text())["rows"]}
    assert (
        list(rows) == ["gcbc", "gcbc, 2 seeds", "iql"] and "iql: seeds of this agent cannot" in capsys.readouterr().out
    )
    one, two = rows["gcbc"], rows["gcbc, 2 seeds"]
    assert two["extra"]["flops"] == 2 * one["extra"]["flops"]
    assert two["extra"]["seed_ms"] == pytest.approx(two["ms"] / 2)
    with pytest.raises(UserError, match="can be stacked of crl, eik_hiqrl, gcbc"):
        every_agent(**{**same, "names": ("iql",)}, stack=(2,))
    with pytest.raises(UserError, match="--stack"):
        every_agent(**same, stack=(0,))


def test_scan_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "scan.json"
    assert scan(batch=2, channels=3, states=4, lengths=(5, 10), device="cpu", seconds=0.0, out=out) == 0
    written = json.loads(out.read_text())
    assert [(row["name"], row["batch"], row["extra"]["length"]) for row in written["rows"]] == [
        ("scan", 2, 5), ("scan", 2, 10)
    ]  # fmt: skip
    for row in written["rows"]:
        extra = row["extra"]
        assert extra["kernels"] == "none"  # on a CPU
        assert extra["difference"] < 1e-5 and set(extra["differences"]) == {"y", "du", "ddelta", "dA", "dB", "dC", "dD"}
        assert row["floor_ms"] == max(extra["exponentials_ms"], extra["bytes_ms"]) and extra["loop_ms"] > 0
        cells = 3 * 2 * extra["length"] * 3 * 4
        assert extra["exponentials_ms"] == pytest.approx(1e3 * cells / written["exp2_per_s"])
    assert "float64" in capsys.readouterr().out
    with pytest.raises(UserError, match="--states must be at least 1, not 0"):
        scan(states=0, device="cpu")
    with pytest.raises(UserError, match="--length must"):
        scan(lengths=(5, -3), device="cpu")


def test_a_difference_is_seen_and_belongs_to_its_tensor() -> None:
    """Around the scan too: softplus of the steps before it, the gate after it."""
    problem = Problem.make(2, 6, 3, 4, torch.float32, torch.device("cpu"), fused=True)
    assert max(difference(around(loop), around(loop), problem).values()) < 1e-5
    louder = lambda *inputs: 1.1 * around(loop)(*inputs)
    assert difference(louder, around(loop), problem)["y"] == pytest.approx(0.1, rel=1e-3)
    step = nn.functional.softplus(problem.inputs[6])
    assert float(step.detach().min()) > 5e-4 and float(step.detach().max()) < 0.2
    half = problem.of(1, torch.bfloat16)
    assert half.dy.shape[0] == 1 and half.inputs[0].dtype == torch.bfloat16 and half.inputs[2].dtype == torch.float32


# --------------------------------------------------------------------------------------------------------- traffic


def test_traffic_is_what_kernels_are_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_config) -> None:
    """GELU forward reads and writes (rows, 4 d) in bfloat16; the last block's has the tokens that are read alone."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("with a GPU, kernels were compiled when they were imported")
    config = tiny_config("qhyer")
    monkeypatch.setattr(presets, "resolve", lambda *_: (config, []))
    monkeypatch.setenv("QHYER_TRITON", "0")
    out = tmp_path / "traffic.json"
    options = {"dataset": "pointmaze-medium-navigate", "out": out}
    assert traffic(batch=(10, 1000), copy_rate=2.0, **options) == 0  # type: ignore[arg-type]
    assert os.environ["QHYER_TRITON"] == "0"
    rows = {(row["name"], row["batch"]): row for row in json.loads(out.read_text())["rows"]}
    tokens, read = 3 * config.context - 1, 2 * config.context
    seams = rows["seams and GELU", 10]["extra"]["kernels"]
    assert seams["_gelu_forward_kernel"] == 2 * 2 * 4 * config.width * ((config.layers - 1) * tokens + read)
    scans = rows["scan", 10]["extra"]["kernels"]  # x, dt, z and y, (L, 2 d) each, and B and C
    each = 4 * tokens * 2 * config.width + 2 * tokens * config.state_size
    assert scans["_scan_forward_kernel"] == 2 * config.layers * each
    assert rows["all", 1000]["ms"] == pytest.approx(100 * rows["all", 10]["ms"])
    moved = sum(row["extra"]["window_bytes"] for (name, batch), row in rows.items() if name != "all" and batch == 10)
    assert rows["all", 10]["ms"] == pytest.approx(1e3 * 10 * moved / 2e9)
    with pytest.raises(UserError, match="--copy-rate"):
        traffic(copy_rate=0.0)


# ------------------------------------------------------------------------------------------------------- all of it


def test_all_of_it_in_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_config) -> None:
    monkeypatch.setattr(presets, "resolve", lambda *_: (tiny_config("gcbc"), []))
    made = BenchRow("eval250", 250, 1.0, 0.5)
    monkeypatch.setattr(whole, "evaluation", lambda **_: common.write(None, "eval", {"workers": 2}, [made]))
    out = tmp_path / "bench" / "all.json"
    common.add_row(out, BenchRow("cold84", 1, 7.0))
    options = {"agent": "gcbc", "dataset": "pointmaze-medium-navigate", "device": "cpu", "seconds": 0.0}
    assert whole.everything(out=out, batch=(4, 6), seeds=2, acting=(1,), **options) == 0  # type: ignore[arg-type]
    rows = json.loads(out.read_text())
    assert [(row["name"], row["batch"]) for row in rows] == [
        ("cold84", 1), ("infer", 1), ("eval250", 250), ("scan", 8), ("seeds2", 4), ("update", 4), ("update", 6)
    ]  # fmt: skip
    assert all({"name", "batch", "ms", "floor_ms", "gb", "extra", "facts"} <= set(row) for row in rows)
    assert rows[1]["facts"]["bench"] == "infer" and rows[-1]["facts"]["hardware"]


def test_what_fails_leaves_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_config) -> None:
    monkeypatch.setattr(presets, "resolve", lambda *_: (tiny_config("gcbc"), []))

    def fails(**_: object) -> int:
        raise UserError("no simulator")

    monkeypatch.setattr(whole, "evaluation", fails)
    out = tmp_path / "all.json"
    options = {"agent": "gcbc", "dataset": "pointmaze-medium-navigate", "device": "cpu", "seconds": 0.0}
    with pytest.raises(UserError, match="not measured: eval"):
        whole.everything(out=out, batch=(4,), seeds=2, acting=(1,), **options)  # type: ignore[arg-type]
    assert [row["name"] for row in json.loads(out.read_text())] == ["infer", "scan", "seeds2", "update"]


# ------------------------------------------------------------------------------------------------------- on a GPU

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("agent", ["gcbc", "qhyer"])
def test_updates_on_a_gpu(agent: str, tiny_config, point_world) -> None:
    """Captured, with rivals; memory comes back; kernels are seen inside graphs, twice."""
    place = torch.device("cuda")
    episodes, config = point_world.to("cuda"), tiny_config(agent)
    make = lambda **options: Training(agent, config, episodes, "bf16", **options)
    held = []
    for seeds in (1, 2, 1):
        row = measure_updates(make, seeds, 0.1, CEILINGS, place)
        assert row.extra["path"] == "captured" and row.floor_ms is not None and row.floor_ms > 0
        assert ("eager_ms" in row.extra) == (seeds == 1) and ("times_one" in row.extra) == (seeds == 2)
        common.release(place)
        held.append(torch.cuda.memory_allocated())
    assert held[0] == pytest.approx(held[2], rel=0.01, abs=2**20)
    for _ in range(2):
        training = make()
        launch([training], WARMUP)
        found = profile_updates(training, 3, place)
        assert found["count"] > 5 and found["count"] == pytest.approx(round(found["count"]))
        assert 0 < found["busy_us"] <= found["us"] * 1.001
        assert {"matrix products", "optimiser"} <= set(found["categories"])


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_scan_on_a_gpu(dtype, tmp_path: Path) -> None:
    out = tmp_path / "scan.json"
    assert scan(batch=4, channels=64, lengths=(30, 60), dtype=dtype, device="cuda", seconds=0.1, out=out) == 0
    written = json.loads(out.read_text())
    served = {row["extra"]["kernels"] for row in written["rows"]}
    assert served == {"none"} or served <= {"triton", "by hand"}
    names = ["scan"] if served == {"none"} else ["scan", "scan_fused"]
    assert [row["name"] for row in written["rows"]] == 2 * names
    assert written["exp2_per_s"] > 1e10
    for row in written["rows"]:
        assert row["extra"]["difference_fp32"] < 1e-4
        assert row["extra"]["difference"] < (0.05 if dtype == "bf16" else 1e-4)


@pytest.mark.parametrize("name", ["train", "scan", "infer", "eval", "data", "traffic", "all"])
def test_a_folder_to_write_to_is_refused_before_anything_is_measured(name, tmp_path):
    from qhyer import cli

    with pytest.raises(UserError, match="is a folder"):
        cli._dispatch(["bench", name, "--out", str(tmp_path)])


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path):
    """Below a file no folder can be made, whoever asks."""
    (tmp_path / "file").touch()
    for out in (tmp_path / "file" / "x.json", tmp_path / "file" / "deeper" / "x.json"):
        with pytest.raises(UserError, match=r"x\.json cannot be written: "):
            common.check_out(out, "scan")
    common.check_out(tmp_path / "new" / "x.json", "scan")
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize(
    "options", [{"seeds": 0}, {"batch": (8, -1)}, {"acting": ()}, {"workers": 0}, {"episodes": 0}, {"agent": "qhier"}]
)
def test_all_of_it_finds_bad_options_before_anything_is_measured(options, tmp_path, monkeypatch):
    monkeypatch.setattr(whole, "infer", lambda **_: pytest.fail("measured"))
    with pytest.raises(UserError, match=str(next(iter(options)))):
        whole.everything(out=tmp_path / "all.json", dataset="pointmaze-medium-navigate", device="cpu", **options)


def test_out_of_another_benchmark_is_not_replaced(tmp_path):
    """Known before anything is measured; what the file held is still there."""
    mine, other = tmp_path / "scan.json", tmp_path / "train.json"
    common.write(mine, "scan", {}, [])
    common.write(other, "train", {}, [])
    common.check_out(mine, "scan")
    common.check_out(tmp_path / "new.json", "scan")
    before = other.read_text()
    with pytest.raises(UserError, match="name another file"):
        common.check_out(other, "scan")
    assert other.read_text() == before
