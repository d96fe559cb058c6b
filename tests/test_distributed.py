"""Processes that share a batch train as one process with the whole of it does."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from qhyer import checkpoint, cli, distributed, losses, runs
from qhyer.errors import UserError

SIZES = dict(
    batch_size=8,
    context=6,
    width=16,
    layers=1,
    heads=2,
    state_size=4,
    flow_blocks=2,
    flow_channels=8,
    encoder_width=16,
    encoder_layers=1,
    representation=4,
    q_normalization="standardize",
)
STILL = dict(dropout=0.0, flow_noise=0.0)  # noise differs between processes
AGENTS = {"qhyer": SIZES | STILL, "gcbc": dict(batch_size=8)}


def command(agent: str, out: str, *more: object, **sizes) -> list[str]:
    options = [f"--agent.{key.replace('_', '-')}={value}" for key, value in sizes.items()]
    log = ["--log-every", "1", "--save-every", "4", "--device", "cpu", "--threads", "1"]
    return ["-m", "qhyer", "train", agent, "short.npz", "--out", out, *log, *options, *map(str, more)]


def torchrun(*arguments: str, processes: int = 2) -> list[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), *place, *arguments]


def call(arguments: list[str], cwd: Path, status: int = 0) -> str:
    ended = subprocess.run(arguments, cwd=cwd, capture_output=True, text=True, timeout=240)
    assert ended.returncode == status, ended.stderr
    return ended.stdout


def alone(arguments: list[str], cwd: Path) -> None:
    """The same command in this process."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.chdir(cwd)
        cli.main(arguments[2:])
    assert not ended.value.code


def write_data(folder: Path) -> Path:
    """Episodes of 3 to 12 rows, many shorter than the context of 6: shares differ in how much of them is padding."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(3, 13, size=40)
    ends = np.zeros(lengths.sum(), bool)
    ends[np.cumsum(lengths) - 1] = True
    rows = np.cumsum(rng.normal(size=(len(ends), 3)), 0).astype(np.float32)
    actions = rng.uniform(-1, 1, (len(ends), 2))
    np.savez(folder / "short.npz", observations=rows, actions=actions, terminals=ends, goal_indices=np.array([0, 1]))
    return folder


@pytest.fixture
def short(tmp_path) -> Path:
    return write_data(tmp_path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[str, Path]:
    """Twelve updates by one process, of each agent."""
    folder = write_data(tmp_path_factory.mktemp("whole"))
    for agent, sizes in AGENTS.items():
        alone(command(agent, agent, "--steps", 12, **sizes), folder)
    return {agent: folder / agent for agent in AGENTS}


def lines(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def assert_close(one: Path, two: Path, updates: int) -> None:
    assert len(lines(one)) == len(lines(two)) == updates
    for a, b in zip(lines(one), lines(two)):
        for key in set(a) - {"stage", "critic/log_p_std"}:  # a mean of deviations is not the deviation of all
            assert a[key] == pytest.approx(b[key], rel=1e-5, abs=1e-6), (a["step"], key)
    first, second = (checkpoint.load(checkpoint.latest(run / "checkpoints")) for run in (one, two))
    for name, tensor in first.agent.items():
        same = torch.isclose(tensor, second.agent[name], rtol=1e-5, atol=1e-6)
        if name.endswith("attention.qkv.bias"):  # attention ignores the keys' bias: Adam makes steps of its rounding
            same = same.view(3, -1)[[0, 2]]
        assert same.all(), name
    assert torch.equal(first.training["rng/sampler"], second.training["rng/sampler"])


@pytest.mark.parametrize("agent", AGENTS)
def test_two_processes_are_one(agent, whole, short):
    """Twelve updates: losses, gradient norms, metrics, weights and running statistics."""
    said = call(torchrun(*command(agent, "two", "--steps", 12, **AGENTS[agent])), short)
    assert_close(whole[agent], short / "two", updates=12)
    assert said.count("run: two") == 1  # one of them speaks
    timings = [json.loads(line) for line in (short / "two" / "timings.jsonl").read_text().splitlines()]
    assert {line["processes"] for line in timings} == {2}
    assert runs.read(short / "two")["config"] == runs.read(whole[agent])["config"]


@pytest.mark.parametrize("first", ["two", pytest.param("one", marks=pytest.mark.slow)])
def test_a_run_goes_on_with_more_or_fewer_processes(first, whole, short):
    """Six updates by two processes, a stop, then six by one; and the other way round."""
    (short / "stop_at_6.py").write_text(STOP)
    begin = ["stop_at_6.py", *command("qhyer", "parts", "--steps", 12, **AGENTS["qhyer"])[2:]]
    go_on = command("qhyer", "parts", "--steps", 12, "--resume", **AGENTS["qhyer"])
    if first == "two":
        call(torchrun(*begin), short)
    else:
        call([sys.executable, *begin], short, cli.STOPPED)
    assert checkpoint.steps(short / "parts" / "checkpoints")[-1] == 6
    if first == "two":
        alone(go_on, short)
    else:
        call(torchrun(*go_on), short)
    assert_close(whole["qhyer"], short / "parts", updates=12)


STOP = """
import os, signal
from qhyer import cli, train
log = train._Loop._log
def stopping(loop, stage):
    log(loop, stage)
    last = int(os.environ.get("WORLD_SIZE", "1")) - 1
    if loop.step == 5 and int(os.environ.get("RANK", "0")) == last:  # one process is asked, and not the one that saves
        os.kill(os.getpid(), signal.SIGTERM)
train._Loop._log = stopping
cli.main()
"""


def test_a_signal_to_torchrun_saves(short):
    arguments = torchrun(*command("gcbc", "run", "--steps", 1000000, batch_size=8))
    process = subprocess.Popen(arguments, cwd=short, stdout=subprocess.PIPE, text=True)
    while not (short / "run" / "metrics.jsonl").exists() and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=180)
    reached = checkpoint.steps(short / "run" / "checkpoints")[-1]
    assert f"stopped; saved update {reached} of 1000000" in said


def test_a_batch_that_cannot_be_shared(short):
    arguments = torchrun(*command("gcbc", "run", "--steps", 2, batch_size=7))
    ended = subprocess.run(arguments, cwd=short, capture_output=True, text=True, timeout=240)
    assert ended.returncode != 0 and "cannot be shared evenly by 2 processes" in " ".join(ended.stderr.split())


def test_processes_that_see_different_files_are_told(short):
    """A run that only the first can see would be continued by one and begun anew by the other."""
    (short / "elsewhere").mkdir()
    (short / "apart.py").write_text(APART)
    alone(command("gcbc", "run", "--steps", 4, batch_size=8), short)
    arrays = dict(np.load(short / "short.npz"))
    for scale, expected in ((1.0, "see different checkpoints in run"), (0.5, "read different data")):
        np.savez(short / "elsewhere" / "short.npz", **{**arrays, "actions": scale * arrays["actions"]})
        arguments = torchrun("apart.py", *command("gcbc", "run", "--steps", 4, "--resume", batch_size=8)[2:])
        ended = subprocess.run(arguments, cwd=short, capture_output=True, text=True, timeout=240)
        assert ended.returncode != 0 and expected in " ".join(ended.stderr.split()), ended.stderr


APART = """
import os
from qhyer import cli
if os.environ["RANK"] == "1":
    os.chdir("elsewhere")
cli.main()
"""


def test_a_loss_that_is_not_finite_stops_all(short):
    """One process's rows are poisoned; all stop before a weight is touched, and the whole batch is saved."""
    (short / "poison.py").write_text(POISON)
    arguments = torchrun("poison.py", *command("gcbc", "run", "--steps", 12, batch_size=8)[2:])
    ended = subprocess.run(arguments, cwd=short, capture_output=True, text=True, timeout=240)
    assert ended.returncode != 0 and ended.stderr.count("not finite at update 5") >= 1, ended.stderr
    with np.load(short / "run" / "nonfinite-00000005.npz") as dumped:
        assert len(dumped["rows"]) == 8
    assert checkpoint.steps(short / "run" / "checkpoints") == [4]


POISON = """
import os
from qhyer import agents, cli
cls, calls = agents.load("gcbc"), []
loss = cls.loss
def poisoned(self, batch):
    calls.append(0)
    total, metrics = loss(self, batch)
    return (total * float("nan") if len(calls) == 6 and os.environ["RANK"] == "1" else total), metrics
cls.loss = poisoned
cli.main()
"""


# --------------------------------------------------------------------------------------------- in one process


@pytest.fixture
def second_of_two(monkeypatch):
    """As if this were the second of two processes, the first of which holds what `first` says."""
    first: list[torch.Tensor] = []

    def all_reduce(tensor, op=None):
        tensor += first.pop(0)

    monkeypatch.setattr(distributed, "_place", (1, 2))
    monkeypatch.setattr(distributed.dist, "all_reduce", all_reduce)
    return first


def test_one_process_is_the_identity():
    x = torch.randn(3)
    assert distributed.mean(x) is x and (distributed.rank(), distributed.world()) == (0, 1)
    batch = {"rows": x}
    assert distributed.share(batch) is batch and distributed.is_main() and not distributed.active()
    assert distributed.any_process(True) and not distributed.any_process(False) and distributed.alike("anything")


def test_shares(second_of_two):
    batch = {"windows": torch.arange(8).view(4, 2), "flow": torch.arange(6)}
    mine = distributed.share(batch)
    assert mine["windows"].tolist() == [[4, 5], [6, 7]] and mine["flow"].tolist() == [3, 4, 5]
    with pytest.raises(UserError, match="5 rows of 'flow' cannot be shared evenly by 2 processes"):
        distributed.share({"flow": torch.arange(5)})


def test_masked_means_average_to_the_mean_of_all(second_of_two):
    x = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    valid = torch.tensor([True, True, True, False, True, False])
    halves = []
    for part, other in ((slice(0, 3), slice(3, 6)), (slice(3, 6), slice(0, 3))):
        second_of_two.append(valid[other].float().sum())
        halves.append(losses.masked_mean(x[part], losses.shares(valid[part])))
    torch.testing.assert_close((halves[0] + halves[1]) / 2, x[valid].mean())


def test_gradients_are_averaged_in_one_sum(second_of_two):
    parameters = [
        torch.nn.Parameter(torch.zeros(2)),
        torch.nn.Parameter(torch.zeros(1, 2)),
        torch.nn.Parameter(torch.zeros(3)),
    ]
    parameters[0].grad, parameters[1].grad = torch.tensor([1.0, 2.0]), torch.tensor([[3.0, 4.0]])
    second_of_two.append(torch.tensor([10.0, 20.0, 30.0, 40.0]))
    distributed.average_gradients(parameters)
    assert parameters[0].grad.tolist() == [5.5, 11.0] and parameters[1].grad.tolist() == [[16.5, 22.0]]
    assert parameters[2].grad is None and not second_of_two
