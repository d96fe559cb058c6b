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

from qhyer import agents, checkpoint
from qhyer.train import NonFinite, TrainConfig, train, train_seeds
from qhyer.update import GraphedUpdate

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


@pytest.mark.parametrize("ssm", ["mamba", "mamba2"])
def test_captured_with_kernels_is_plain(ssm, go, monkeypatch):
    """Without dropout and noise, which the kernels draw otherwise."""
    still = {"ssm": ssm, "dropout": 0.0, "flow_noise": 0.0}
    captured = go("qhyer", "captured", **still)
    monkeypatch.setenv("QHYER_TRITON", "0")
    plain = go("qhyer", "plain", replace(GPU, graph=False), **still)
    assert "captured" in paths(captured) and set(paths(plain)) == {"eager"}
    assert losses(captured) == pytest.approx(losses(plain), rel=1e-4)


def captured_part(name: str, of_ahead: str) -> str:
    """The method that is captured: an agent's loss, or this part of it where the critic is ahead."""
    return of_ahead if name == "qhyer" else "loss"


@every_agent
def test_a_loss_that_reads_back_still_trains(name, go, monkeypatch):
    """As if nobody had tried to capture it; and the next run is captured again."""
    cls, part = agents.load(name), captured_part(name, "critic_part")
    loss = getattr(cls, part)

    def reading(self, batch):
        total, metrics = loss(self, batch)
        total.item()
        return total, metrics

    monkeypatch.setattr(cls, part, reading)
    refused, eager = go(name, "refused"), go(name, "eager", replace(GPU, graph=False))
    assert paths(refused)[-1].startswith("eager (") and "captur" in paths(refused)[-1]
    assert losses(refused) == pytest.approx(losses(eager), rel=1e-5)
    monkeypatch.setattr(cls, part, loss)
    after = go(name, "after")
    assert paths(after)[-1] == "captured" and losses(after) == pytest.approx(losses(eager), rel=1e-4)


@every_agent
def test_a_loss_that_fails_in_python_while_captured(name, go, monkeypatch):
    """Where the critic is ahead, in the rest: its stream has been captured by then."""
    cls, part = agents.load(name), captured_part(name, "actor_part")
    loss = getattr(cls, part)

    def refusing(self, batch):
        total, metrics = loss(self, batch)
        if torch.cuda.is_current_stream_capturing():
            raise ValueError("not while captured")
        return total, metrics

    monkeypatch.setattr(cls, part, refusing)
    refused, eager = go(name, "refused"), go(name, "eager", replace(GPU, graph=False))
    assert paths(refused)[-1] == "eager (ValueError: not while captured)"
    assert losses(refused) == pytest.approx(losses(eager), rel=1e-5)


@pytest.fixture
def replayed(monkeypatch) -> list[GraphedUpdate]:
    """The updates that were captured with their critic ahead."""
    made: list[GraphedUpdate] = []
    compute = GraphedUpdate.compute_ahead
    monkeypatch.setattr(GraphedUpdate, "compute_ahead", lambda self, ahead: (made.append(self), compute(self, ahead)))
    return made


def test_a_critic_that_is_ahead_is_the_eager_one(go, replayed):
    """Losses, all metrics, weights, scales of Q; the sampler's generator exactly, without the batch drawn ahead."""
    options = dict(steps=14, dropout=0.0)
    how = replace(GPU, save_every=7, keep=10)
    ahead, eager = go("qhyer", "ahead", how, **options), go("qhyer", "eager", replace(how, graph=False), **options)
    assert len(set(replayed)) == 1 and paths(ahead)[3:] == ["captured"] * 11
    for found, expected in zip(lines(ahead), lines(eager), strict=True):
        assert list(found) == list(expected) and found.pop("stage") == expected.pop("stage")
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
    for step in (7, 14):
        one, two = (checkpoint.load(run / "checkpoints" / f"{step:08d}") for run in (ahead, eager))
        for name in ("rng/sampler", "rng/cuda", "rng/torch"):
            assert torch.equal(one.training[name], two.training[name]), (step, name)
        for name, value in one.agent.items():
            torch.testing.assert_close(value, two.agent[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_critic_that_is_ahead_is_the_captured_one(precision, go, replayed, monkeypatch):
    """With dropout: from one graph to the other nothing changes but when a kernel runs."""
    how = replace(GPU, precision=precision)
    ahead = go("qhyer", "ahead", how)
    cls = agents.load("qhyer")
    stages = cls.stages
    monkeypatch.setattr(cls, "stages", lambda self: tuple(replace(stage, ahead=None) for stage in stages(self)))
    turn = go("qhyer", "turn", how)
    assert len(set(replayed)) == 1 and paths(turn)[-1] == "captured"
    assert losses(ahead) == pytest.approx(losses(turn), rel=1e-6)


def test_a_critic_that_is_ahead_resumes(go, replayed):
    """After a batch that was drawn ahead and never used."""
    whole = go("qhyer", "whole", steps=14, dropout=0.0)
    options = replace(GPU, save_every=5)

    def stop(step: int) -> None:
        if step == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go("qhyer", "parts", options, on_step=stop, steps=14, dropout=0.0)
    parts = go("qhyer", "parts", options, resume=True, steps=14, dropout=0.0)
    assert len(set(replayed)) == 3 and losses(parts) == pytest.approx(losses(whole), rel=1e-5)


def test_the_rows_of_a_batch_that_was_not_finite(go, replayed, monkeypatch):
    """A factor that the graph reads turns bad before update 7: its batch is told, not the one drawn ahead."""
    cls = agents.load("qhyer")
    loss, factor = cls.critic_loss, torch.ones((), device="cuda")

    def poisoned(self, batch):
        nll, metrics = loss(self, batch)
        return nll * factor, metrics

    def poison(step: int) -> None:
        if step == 7:
            torch.cuda.synchronize()
            factor.fill_(torch.nan)
            torch.cuda.synchronize()

    monkeypatch.setattr(cls, "critic_loss", poisoned)
    rows = []
    for name, how in (("ahead", GPU), ("eager", replace(GPU, graph=False))):
        factor.fill_(1.0)
        with pytest.raises(NonFinite, match=r"at update 7; the batch.s rows are in .*npz;") as raised:
            go("qhyer", name, how, on_step=poison)
        with np.load(str(raised.value).split("rows are in ")[1].split(";")[0]) as dumped:
            rows.append({key: dumped[key].tolist() for key in dumped.files})
    assert replayed and rows[0] == rows[1]


@every_agent
@pytest.mark.parametrize("graph", [True, False], ids=["captured", "eager"])
def test_seeds_together_as_alone(name, graph, go, tiny_config, point_world, tmp_path):
    """Over ten updates, with dropout and noise: generators are not shared."""
    options = replace(GPU, graph=graph)
    seeds = (0, 1, 2, 3, 4) if name == "qhyer" else (0, 1, 2)  # five of these have more streams than torch gives out
    made = train_seeds(name, "x", tiny_config(name), options, seeds, out=tmp_path, episodes=point_world, quiet=True)
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
