"""The benchmarks run, their slow reference computes the same action, and what they write is complete."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from qhyer import bench, presets, runs
from qhyer.agents.qhyer import QHyerConfig
from qhyer.data import registry
from qhyer.data.episodes import DataSpec
from qhyer.errors import UserError

TINY = QHyerConfig(context=4, width=16, layers=2, heads=2, encoder_width=8, encoder_layers=1, flow_blocks=1)


def spec(dim: int = 3, actions: int = 2) -> DataSpec:
    return DataSpec(dim, actions, (0, 1), (0.0,) * dim, (1.0,) * dim)


def test_sizes_come_from_the_environment() -> None:
    made = bench.made_up_spec(registry.get("cube-single-play"))
    assert (made.observation_dim, made.action_dim, made.goal_indices) == (28, 5, (19, 20, 21))


def test_the_reference_without_a_cache_acts_the_same() -> None:
    agent = runs.build_agent("qhyer", TINY, spec(), seed=0).eval()
    row = bench.measure_acting(agent, batch=2, seconds=0.0)
    assert row.extra["recompute_difference"] < 1e-5
    assert row.extra["calls"] >= bench.LEAST_ROUNDS
    assert row.extra["speedup"] == pytest.approx(row.extra["recompute_ms"] / row.ms)
    assert not isinstance(agent.decoder, bench.Recompute)  # put back
    assert row.floor_ms is not None and row.gb is not None and row.gb > 0


def test_the_window_is_full() -> None:
    agent = runs.build_agent("qhyer", TINY, spec(), seed=0).eval()
    memory = bench.full_memory(agent, torch.zeros(2, 3), torch.zeros(2, 3), TINY.context)
    assert memory is not None and memory["observations"].shape == (2, TINY.context - 1, 3)


@pytest.mark.parametrize("options", [{"conditioning": "none"}, {"backbone": "attention"}, {"tokenization": "separate"}])
def test_ablations_are_measured_too(options: dict[str, str]) -> None:
    from dataclasses import replace

    agent = runs.build_agent("qhyer", replace(TINY, **options), spec(), seed=0).eval()  # type: ignore[arg-type]
    row = bench.measure_acting(agent, batch=1, seconds=0.0)
    assert ("speedup" in row.extra) == (options.get("conditioning") != "none")  # one stage: nothing is saved


def test_floor_runs_each_linear_layer_as_often_as_the_call() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    ran: list[tuple[int, ...]] = []
    floor = bench.linear_floor(net, lambda: (net(torch.zeros(5, 3)), net(torch.zeros(1, 3))))
    real = torch.nn.functional.linear
    try:
        torch.nn.functional.linear = lambda x, *rest: (ran.append(tuple(x.shape)), real(x, *rest))[1]  # type: ignore[assignment]
        floor()
    finally:
        torch.nn.functional.linear = real  # type: ignore[assignment]
    assert ran == [(5, 3), (5, 4), (1, 3), (1, 4)]


def test_calls_take_turns() -> None:
    order: list[str] = []
    first, second = bench.interleave(
        [lambda: order.append("a"), lambda: order.append("b")], 0.0, torch.device("cpu"), least=4
    )
    assert order == ["a", "b"] * (bench.WARMUP + 4)
    assert len(first) == len(second) == 4 and (first >= 0).all()


def test_infer_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presets, "resolve", lambda *_: (TINY, []))
    before = torch.get_num_threads()
    out = tmp_path / "infer.json"
    assert bench.infer(dataset="pointmaze-medium-navigate", batch=(1, 3), seconds=0.0, out=out) == 0
    assert torch.get_num_threads() == before
    written = json.loads(out.read_text())
    assert [row["batch"] for row in written["rows"]] == [1, 3]
    assert written["threads"] == 1 and written["dataset"] == "pointmaze-medium-navigate-v0"
    assert "1 thread" in " ".join(capsys.readouterr().out.split())


def test_infer_of_an_agent_without_memory(tmp_path: Path) -> None:
    out = tmp_path / "infer.json"
    assert bench.infer(agent="gcbc", batch=(1,), seconds=0.0, out=out) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert row["ms"] > 0 and "speedup" not in row["extra"]


def test_wrong_options_are_refused() -> None:
    with pytest.raises(UserError, match="batch"):
        bench.infer(batch=(0,))
    with pytest.raises(UserError, match="threads"):
        bench.infer(agent="gcbc", threads=0)
    with pytest.raises(UserError, match="manipulation"):
        bench.data(dataset="pointmaze-medium-navigate")


def test_data_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "data.json"
    assert bench.data(episodes=1, rows=20, out=out) == 0
    written = json.loads(out.read_text())
    (row,) = written["rows"]
    assert row["extra"]["steps"] == 20
    assert np.isclose(row["ms"], 1e3 / row["extra"]["generation_steps_per_s"])
    assert "replayed" in capsys.readouterr().out
