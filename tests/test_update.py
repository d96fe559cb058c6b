"""An update that cannot be captured trains as if nobody had tried; one that can be, trains the same."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch
from test_train import assert_same, stop_at

from qhyer import agents
from qhyer.train import TrainConfig, train
from qhyer.update import GraphedUpdate, Update, is_capturable

CPU = TrainConfig(device="cpu", log_every=2, save_every=3, keep=10, threads=1)


def as_if_captured(device, sampler):
    """Nothing is recorded; `replay` does the work anew."""
    return lambda work: work


class Refused:
    """Goes through the motions of an update, as recording does, and complains again when it is closed, as CUDA does."""

    recording = False

    def __init__(self, device, sampler):
        pass

    def __call__(self, work):
        Refused.recording = True
        try:
            work()
        finally:
            Refused.recording = False
            self.close()

    def close(self):
        raise RuntimeError("operation failed due to a previous error during capture")


def reading_back(loss):
    """A loss with dropout-like draws that reads its value, which CUDA forbids while it records."""

    def wrapped(self, batch):
        torch.rand(3)
        total, metrics = loss(self, batch)
        if Refused.recording:
            for parameter in self.parameters():  # gradients from the graph's own memory
                parameter.grad = torch.full_like(parameter, torch.nan)
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore about it")
        return total, metrics

    return wrapped


def timings(run):
    return [json.loads(line) for line in (run / "timings.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", agents.names())
@pytest.mark.parametrize("stops", [False, True], ids=["whole", "resumed"])
def test_a_refused_capture_changes_nothing(
    name, stops, tiny_agent, tiny_config, point_world, tmp_path, monkeypatch, capsys
):
    cls = agents.load(name)
    # One for each stage: the first that is recorded, before anything has moved, as nothing does while CUDA records.
    losses = {(stage.ahead or stage).loss.__name__ for stage in tiny_agent(name).stages()}
    for loss in losses:
        monkeypatch.setattr(cls, loss, reading_back(getattr(cls, loss)))
    config = tiny_config(name)
    options = dict(episodes=point_world)
    plain = train(name, "x", config, replace(CPU, graph=False), run=tmp_path / "plain", quiet=True, **options)
    monkeypatch.setattr("qhyer.update.capture_for", Refused)
    if stops:
        with pytest.raises(KeyboardInterrupt):
            train(name, "x", config, CPU, run=tmp_path / "run", quiet=True, on_step=stop_at(6), **options)
        capsys.readouterr()
    run = train(name, "x", config, CPU, run=tmp_path / "run", resume=stops, **options)
    assert_same(plain, run)
    said = capsys.readouterr().out
    assert said.count("could not be captured in a CUDA graph, and goes on without") == len(losses)
    assert "RuntimeError: CUDA error: operation not permitted when stream is capturing" in said
    assert timings(run)[0]["update"] == "eager" and timings(plain)[-1]["update"] == "eager"
    assert timings(run)[-1]["update"].startswith("eager (RuntimeError: CUDA error: operation not permitted")


@pytest.mark.parametrize("name", agents.names())
def test_a_captured_update_is_the_eager_one(name, tiny_config, point_world, tmp_path, monkeypatch):
    """Warm-up, the first replay, metrics and checkpoints fall on the same updates."""
    plain = train(name, "x", tiny_config(name), CPU, run=tmp_path / "plain", quiet=True, episodes=point_world)
    monkeypatch.setattr("qhyer.update.capture_for", as_if_captured)
    run = train(name, "x", tiny_config(name), CPU, run=tmp_path / "run", quiet=True, episodes=point_world)
    assert_same(plain, run)
    stages = len({json.loads(line)["stage"] for line in (run / "metrics.jsonl").read_text().splitlines()})
    each = ["eager", *["captured"] * (len(timings(run)) // stages - 1)]
    assert [line["update"] for line in timings(run)] == stages * each
    assert GraphedUpdate.WARMUP == 3


def test_an_optimiser_without_a_capturable_form_is_said(tiny_config, point_world, tmp_path, monkeypatch, capsys):
    cls = agents.load("gcbc")
    made = cls.__init__

    def with_sgd(self, config, spec):
        made(self, config, spec)
        self.optimizer = torch.optim.SGD(self.actor.parameters(), lr=1e-3)

    monkeypatch.setattr(cls, "__init__", with_sgd)
    monkeypatch.setattr("qhyer.update.capture_for", as_if_captured)
    run = train("gcbc", "x", tiny_config("gcbc"), CPU, run=tmp_path / "run", episodes=point_world)
    assert "SGD has no capturable form" in capsys.readouterr().out
    assert timings(run)[-1]["update"] == "eager (SGD has no capturable form)"


def test_every_agent_s_optimisers_can_be_captured(tiny_agent):
    for name in agents.names():
        assert all(is_capturable(o) for stage in tiny_agent(name).stages() for o in stage.optimizers), name


def test_no_graph_is_tried_where_none_is_asked_for(tiny_config, point_world, tmp_path, monkeypatch):
    monkeypatch.setattr("qhyer.update.capture_for", lambda *_: pytest.fail("asked for"))
    options = replace(CPU, graph=False)
    train("gcbc", "x", tiny_config("gcbc"), options, run=tmp_path, episodes=point_world, quiet=True)


# ------------------------------------------------------------------------------------------------------- compiling

SMALL = (
    "gcbc",
    "gcivl",
    "gciql",
    "qrl",
    "crl",
    "hiql",
    "saw",
    "ota",
    "eik_hiqrl",
    "nf_gcbc",
    "sharsa",
    "trl",
    "qc_fql",
    "deas",
)


def numbers(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "stage"} for line in lines]


@pytest.mark.parametrize("name", SMALL)
def test_the_compiler_can_follow_the_small_agents(name, tiny_agent, point_world):
    """Losses, to the end and without a break; the same values and gradients."""
    agent = tiny_agent(name)
    (stage,) = agent.stages()
    batch = stage.sampler.build(point_world, torch.Generator().manual_seed(0)).sample(16)
    parameters, found = [id(p) for p in agent.parameters()], []
    for loss in (stage.loss, torch.compile(stage.loss, fullgraph=True, dynamic=False, backend="aot_eager")):
        agent.zero_grad()
        torch.manual_seed(0)
        total, values = loss(batch)
        total.backward()
        found.append([total.detach(), *values.values(), *(p.grad for p in agent.parameters() if p.grad is not None)])
    for value, followed in zip(*found, strict=True):
        torch.testing.assert_close(followed, value)
    assert [id(p) for p in agent.parameters()] == parameters  # networks that were frozen have theirs again


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's compiler needs one for C++")
@pytest.mark.parametrize(
    "name", [name if name == "gcbc" else pytest.param(name, marks=pytest.mark.slow) for name in SMALL]
)
def test_a_compiled_update_is_the_eager_one(name, tiny_config, point_world, tmp_path, monkeypatch):
    """Up to the order of sums, chance and all; whatever is captured has been compiled before."""
    options = replace(CPU, log_every=1)
    plain = train(name, "x", tiny_config(name), options, run=tmp_path / "plain", quiet=True, episodes=point_world)
    monkeypatch.setattr("qhyer.update.capture_for", as_if_captured)
    options = replace(options, compile=True)
    run = train(name, "x", tiny_config(name), options, run=tmp_path / "run", quiet=True, episodes=point_world)
    assert len(numbers(plain)) >= 10
    for line, compiled in zip(numbers(plain), numbers(run), strict=True):
        rel = 1e-4 if name == "eik_hiqrl" else 1e-5  # gradients of gradients round more
        least = 1e-5 if name == "deas" else 1e-6  # its advantage is a small difference of large values
        assert compiled == pytest.approx(line, rel=rel, abs=least)
    expected = [*["eager, compiled"] * 3, *["captured, compiled"] * (len(timings(run)) - 3)]
    assert [line["update"] for line in timings(run)] == expected


def test_a_loss_that_cannot_be_compiled_goes_on_without(tiny_config, point_world, tmp_path, monkeypatch, capsys):
    """It reads a value back, and draws; the attempt leaves no trace."""
    cls = agents.load("gcbc")
    loss = cls.loss

    def reads_back(self, batch):
        total, metrics = loss(self, batch)
        self.observation_mean.add_(1.0)  # a buffer that moves
        return total + torch.rand(()) if float(total.detach()) > 0 else total, metrics

    monkeypatch.setattr(cls, "loss", reads_back)
    plain = train("gcbc", "x", tiny_config("gcbc"), CPU, run=tmp_path / "plain", quiet=True, episodes=point_world)
    options = replace(CPU, compile=True)
    run = train("gcbc", "x", tiny_config("gcbc"), options, run=tmp_path / "run", episodes=point_world)
    assert_same(plain, run)
    assert capsys.readouterr().out.count("could not be compiled, and goes on without: ") == 1
    assert timings(run)[-1]["update"].startswith("eager, not compiled (")


def test_the_rows_of_the_first_bad_batch_are_kept():
    """On a GPU nobody looks until a line is due; batches without rows, and rows that are marks, are watched too."""
    watching = Update.__new__(Update)
    watching.device, watching.healthy, watching.rows = torch.device("cuda"), None, {}
    for number, finite in enumerate([True, True, False, True, False]):
        batch = {"rows": torch.tensor([number, 9]), "valid": torch.tensor([[number > 1], [True]])}
        watching._watch({**batch, "actions": torch.zeros(2)}, torch.tensor(finite))
    assert watching.rows["rows"].tolist() == [2, 9] and watching.rows["valid"].tolist() == [[1], [1]]
    assert watching.kinds == {"rows": torch.int64, "valid": torch.bool} and not watching.healthy
    with pytest.raises(FloatingPointError):
        watching.check()
    bare = Update.__new__(Update)
    bare.device, bare.healthy, bare.rows = torch.device("cuda"), None, {}
    bare._watch({"actions": torch.zeros(2)}, torch.tensor(True))
    bare.check()
    assert bare.rows == {}
