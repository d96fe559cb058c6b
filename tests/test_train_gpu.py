"""On a GPU: captured updates, refused captures, seeds side by side, and sums inside a graph."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from qhyer import agents
from qhyer.train import TrainConfig, train, train_seeds

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

GPU = TrainConfig(device="cuda", log_every=1, save_every=0)
every_agent = pytest.mark.parametrize("name", agents.names())


def lines(run: Path, name: str = "metrics.jsonl") -> list[dict]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in lines(run)]


def paths(run: Path) -> list[str]:
    return [line["update"] for line in lines(run, "timings.jsonl")]


@pytest.fixture
def go(tiny_config, point_world, tmp_path):
    """go("qhyer", "a", graph=False): ten updates on the GPU, in a folder of that name."""

    def run(name: str, folder: str, options: TrainConfig = GPU, resume: bool = False, on_step=None, **config) -> Path:
        return train(
            name, "x", tiny_config(name, **config), options, run=tmp_path / folder, episodes=point_world, quiet=True,
            resume=resume, on_step=on_step,
        )  # fmt: skip

    return run


@every_agent
def test_captured_is_eager(name, go):
    """Dropout and noise included: a graph draws what an eager update draws."""
    captured, eager = go(name, "captured"), go(name, "eager", replace(GPU, graph=False))
    stages: dict[str, list[str]] = {}
    for line, path in zip(lines(captured), paths(captured)):
        stages.setdefault(line["stage"], []).append(path)
    for updates in stages.values():
        assert updates[:3] == ["eager"] * 3 and set(updates[3:]) == {"captured"}
    assert set(paths(eager)) == {"eager"}
    assert losses(captured) == pytest.approx(losses(eager), rel=1e-4)


@every_agent
def test_a_loss_that_reads_back_still_trains(name, go, monkeypatch):
    """As if nobody had tried to capture it; and the next run is captured again."""
    cls = agents.load(name)
    loss = cls.loss

    def reading(self, batch):
        total, metrics = loss(self, batch)
        total.item()
        return total, metrics

    monkeypatch.setattr(cls, "loss", reading)
    refused, eager = go(name, "refused"), go(name, "eager", replace(GPU, graph=False))
    assert paths(refused)[-1].startswith("eager (") and "captur" in paths(refused)[-1]
    assert losses(refused) == pytest.approx(losses(eager), rel=1e-5)
    monkeypatch.setattr(cls, "loss", loss)
    after = go(name, "after")
    assert paths(after)[-1] == "captured" and losses(after) == pytest.approx(losses(eager), rel=1e-4)


@every_agent
def test_a_loss_that_fails_in_python_while_captured(name, go, monkeypatch):
    cls = agents.load(name)
    loss = cls.loss

    def refusing(self, batch):
        total, metrics = loss(self, batch)
        if torch.cuda.is_current_stream_capturing():
            raise ValueError("not while captured")
        return total, metrics

    monkeypatch.setattr(cls, "loss", refusing)
    refused, eager = go(name, "refused"), go(name, "eager", replace(GPU, graph=False))
    assert paths(refused)[-1] == "eager (ValueError: not while captured)"
    assert losses(refused) == pytest.approx(losses(eager), rel=1e-5)


@every_agent
@pytest.mark.parametrize("graph", [True, False], ids=["captured", "eager"])
def test_seeds_together_as_alone(name, graph, go, tiny_config, point_world, tmp_path):
    """Over ten updates, with dropout and noise: generators are not shared."""
    options = replace(GPU, graph=graph)
    made = train_seeds(name, "x", tiny_config(name), options, (0, 1, 2), out=tmp_path, episodes=point_world, quiet=True)
    for seed, run in enumerate(made):
        alone = go(name, f"alone{seed}", replace(options, seed=seed))
        assert losses(run) == pytest.approx(losses(alone), rel=1e-4)
        assert paths(run)[-1] == ("captured" if graph else "eager")


@every_agent
def test_resume(name, go):
    def stop(step: int) -> None:
        if step == 6:
            raise KeyboardInterrupt

    options = replace(GPU, save_every=5)
    whole = go(name, "whole", options)
    with pytest.raises(KeyboardInterrupt):
        go(name, "parts", options, on_step=stop)
    assert losses(go(name, "parts", options, resume=True)) == pytest.approx(losses(whole), rel=1e-4)


def test_callers_settings_and_generators_are_put_back(go):
    torch.manual_seed(5)
    before = torch.cuda.get_rng_state(), torch.get_rng_state(), torch.get_float32_matmul_precision()
    stream = torch.cuda.current_stream()
    go("qhyer", "run", replace(GPU, precision="bf16"))
    after = torch.cuda.get_rng_state(), torch.get_rng_state(), torch.get_float32_matmul_precision()
    assert torch.equal(before[0], after[0]) and torch.equal(before[1], after[1]) and before[2] == after[2]
    assert torch.cuda.current_stream() == stream


SCRIPT = """
import json, sys
from conftest import make_tiny_config
from qhyer import distributed
from qhyer.train import TrainConfig, train
name, data, run = sys.argv[1:]
with distributed.processes("cuda") as device:
    assert distributed.active()
    options = TrainConfig(device=device, log_every=1, save_every=0)
    train(name, data, make_tiny_config(name), options, run=run, quiet=True)
"""


@every_agent
def test_sums_over_processes_can_be_captured(name, go, point_world, tmp_path, tiny_config):
    """One process on one GPU, joined by torchrun: the sums of NCCL run inside the graph."""
    ends = np.zeros(len(point_world.observations), bool)
    ends[point_world.ends] = True
    arrays = dict(observations=point_world.observations.numpy(), actions=point_world.actions.numpy(), terminals=ends)
    np.savez(tmp_path / "points.npz", **arrays, goal_indices=np.array([0, 1]))
    (tmp_path / "script.py").write_text(SCRIPT)
    place = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    ended = subprocess.run(
        [*torchrun, "script.py", name, "points.npz", "joined"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "PYTHONPATH": place},
    )
    assert ended.returncode == 0, ended.stderr
    alone = train(name, str(tmp_path / "points.npz"), tiny_config(name), GPU, run=tmp_path / "alone", quiet=True)
    assert paths(tmp_path / "joined")[-1] == "captured"
    assert losses(tmp_path / "joined") == pytest.approx(losses(alone), rel=1e-4)
