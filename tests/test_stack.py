"""Seeds stacked into one update make the runs that each makes alone, up to the order of additions."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_cli import call
from test_train import CPU, assert_same, contents, data_file  # noqa: F401

from qhyer import agents, checkpoint, runs
from qhyer import train as training
from qhyer.data.goals import Several
from qhyer.errors import UserError
from qhyer.nn.scan import kernels
from qhyer.stack import stacked
from qhyer.train import NonFinite, Stopped, train, train_seeds

SEEDS = (0, 1, 5)
STACKED = replace(CPU, together="stacked")
STACKABLE = [name for name in agents.names() if agents.load(name).stackable]
OPTIONS = [(name, {}) for name in STACKABLE] + [
    ("gciql", {"actor_loss": "awr", "actor_p_random": 0.3}),
    ("crl", {"actor_loss": "awr"}),
    ("qrl", {"actor_loss": "awr"}),
    ("qrl", {"quasimetric": "mrn"}),
    ("hiql", {"low_actor_rep_grad": True, "actor_p_random": 0.3}),
    ("eik_hiqrl", {"coordinates": 2, "encoding": 3}),
    ("trl", {"goal_part": (1,), "actor_p_random": 0.3}),
    ("hiql", {"goal_input": "coordinates"}),
]


def lines(run: Path, name: str = "metrics.jsonl") -> list[dict]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def assert_close(run: Path, other: Path, rel: float = 1e-4) -> None:
    """All that is in a checkpoint: the same names, shapes and types, and numbers that differ in their last digits."""
    (ours, _), (theirs, _) = contents(run), contents(other)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].shape == value.shape and ours[name].dtype == value.dtype, name
        if not value.is_floating_point():  # generators, and state.json
            assert torch.equal(ours[name], value), name
        else:
            assert (ours[name] - value).norm() <= rel * value.norm() + 1e-7, name
    for mine, its in zip(lines(run), lines(other), strict=True):
        assert mine.keys() == its.keys() and mine["step"] == its["step"]
        assert mine["loss"] == pytest.approx(its["loss"], rel=rel)
        assert mine["grad_norm"] == pytest.approx(its["grad_norm"], rel=rel)


def together(name: str, config, out: Path, options=STACKED, seeds=SEEDS, **more) -> list[Path]:
    return train_seeds(name, "x", config, options, seeds, out=out, quiet=True, **more)


def alone(name: str, config, seed: int, run: Path, **more) -> Path:
    return train(name, "x", config, replace(CPU, seed=seed), run=run, quiet=True, **more)


def test_the_baselines_can_be_stacked():
    known = ["crl", "eik_hiqrl", "gcbc", "gciql", "gcivl", "hiql", "ota", "qrl", "saw", "trl"]
    assert set(known) <= set(STACKABLE)


@pytest.mark.parametrize(("name", "changes"), OPTIONS)
def test_the_same_runs_as_alone(name, changes, tiny_config, point_world, tmp_path):
    config = tiny_config(name, **changes)
    made = together(name, config, tmp_path / "stacked", episodes=point_world)
    for seed, run in zip(SEEDS, made):
        other = alone(name, config, seed, tmp_path / f"alone{seed}", episodes=point_world)
        assert_close(run, other)
        about, its = runs.read(run), runs.read(other)
        assert about.pop("train") == {**its.pop("train"), "together": "stacked"} and about == its
        assert {(line["together"], line["stacked"]) for line in lines(run, "timings.jsonl")} == {(3, 3)}
        agent, step = runs.load_agent(run)
        assert step == 10 and agent.act(torch.zeros(2, 4), torch.zeros(2, 4), None)[0].shape == (2, 2)
    with pytest.raises(AssertionError):
        assert_close(made[0], made[1])


@pytest.mark.parametrize("name", ["crl", "eik_hiqrl", "gcivl", "gciql", "hiql", "ota", "qrl", "saw", "trl"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's; a GPU's own: test_train_gpu.py")
def test_with_kernels(name, tiny_config, point_world, tmp_path, monkeypatch):
    """Triton's, in its interpreter: a seed is a member more."""
    config = tiny_config(name, steps=2)
    monkeypatch.setenv("QHYER_TRITON", "0")
    others = [alone(name, config, seed, tmp_path / f"alone{seed}", episodes=point_world) for seed in (0, 1)]
    monkeypatch.setenv("QHYER_TRITON", "interpret")
    assert kernels(point_world.observations) is not None  # else the plain code would take their place
    for run, other in zip(together(name, config, tmp_path, seeds=(0, 1), episodes=point_world), others):
        assert_close(run, other)


def test_bf16(tiny_config, point_world, tmp_path):
    config, options = tiny_config("gciql"), replace(STACKED, precision="bf16")
    made = together("gciql", config, tmp_path / "stacked", options, episodes=point_world)
    others = together("gciql", config, tmp_path / "apart", replace(options, together="streams"), episodes=point_world)
    for run, other in zip(made, others):
        for ours, theirs in zip(lines(run), lines(other), strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-2)


def test_captured_too(tiny_config, point_world, tmp_path, monkeypatch):
    plain = together("gcivl", tiny_config("gcivl"), tmp_path / "plain", episodes=point_world)
    monkeypatch.setattr("qhyer.update.capture_for", lambda device, *samplers: lambda work: work)
    made = together("gcivl", tiny_config("gcivl"), tmp_path / "captured", episodes=point_world)
    for run, other in zip(made, plain):
        assert contents(run)[1] == contents(other)[1]
        assert lines(run, "timings.jsonl")[-1]["update"] == "captured"


def test_alone_and_stacked_go_on_with_one_another_s_runs(tiny_config, point_world, tmp_path):
    """One stopped half-way alone, one not begun, two stopped half-way in a stack; then a stack, and one of it alone."""
    config, options = tiny_config("gcivl"), dict(episodes=point_world, resume=True)

    def stop(step: int) -> None:
        if step == 5:
            raise KeyboardInterrupt

    for seed in (0, 1):
        with pytest.raises(KeyboardInterrupt):
            alone("gcivl", config, seed, tmp_path / f"s{seed}", episodes=point_world, on_step=stop)
    made = together("gcivl", config, tmp_path, **options)  # seeds 0 and 1 are at update 3, seed 5 is alone
    assert [lines(run, "timings.jsonl")[-1].get("stacked") for run in made] == [2, 2, None]
    for seed, run in zip(SEEDS, made):
        assert_close(run, alone("gcivl", config, seed, tmp_path / f"alone{seed}", episodes=point_world))


def test_a_stop_saves_all_and_a_seed_goes_on_alone(tiny_config, point_world, tmp_path, monkeypatch):
    config, asked = tiny_config("gciql"), itertools.count(1)

    class Signal:
        def is_set(self) -> bool:
            return next(asked) > 6  # it is looked for once a round

    monkeypatch.setattr(training, "_stop_on_signal", lambda: contextlib.nullcontext(Signal()))
    with pytest.raises(Stopped, match="saved update seed 0: 6, seed 1: 6, seed 5: 6 of 10"):
        together("gciql", config, tmp_path, episodes=point_world)
    monkeypatch.undo()
    shutil.copytree(tmp_path, tmp_path / "again")
    resumed = together("gciql", config, tmp_path / "again", episodes=point_world, resume=True)
    for run, whole in zip(resumed, together("gciql", config, tmp_path / "whole", episodes=point_world)):
        assert_same(run, whole)  # stacked as before, and so bit for bit
    for seed in SEEDS:
        run = alone("gciql", config, seed, tmp_path / f"s{seed}", episodes=point_world, resume=True)
        assert_close(run, alone("gciql", config, seed, tmp_path / f"alone{seed}", episodes=point_world))


def test_one_seed_that_diverges_leaves_the_others(tiny_config, point_world, tmp_path, monkeypatch):
    cls = agents.load("gcbc")
    loss, calls = cls.loss, []

    def poisoned(self, batch):
        calls.append(1)
        total, metrics = loss(self, batch)
        ill = (batch["rows"] == marked).all() & (len(calls) == 6)
        return total + torch.where(ill, torch.nan, 0.0), metrics

    generator = torch.Generator().manual_seed(training.stream_seed(1, "data"))
    (stage,) = runs.build_agent("gcbc", tiny_config("gcbc"), point_world.spec(), 0).stages()
    sampler = stage.sampler.build(point_world, generator)
    marked = [sampler.sample(8)["rows"] for _ in range(6)][-1]  # the second seed's sixth batch
    monkeypatch.setattr(cls, "loss", poisoned)
    with pytest.raises(NonFinite, match=r"(?s)1 of 3 seeds stopped.*seed 1: loss .* not finite at update 5"):
        together("gcbc", tiny_config("gcbc"), tmp_path, episodes=point_world)
    assert [checkpoint.steps(tmp_path / f"s{s}" / "checkpoints")[-1] for s in SEEDS] == [10, 3, 10]
    monkeypatch.setattr(cls, "loss", loss)
    together("gcbc", tiny_config("gcbc"), tmp_path, episodes=point_world, resume=True)
    for seed in SEEDS:
        other = alone("gcbc", tiny_config("gcbc"), seed, tmp_path / f"alone{seed}", episodes=point_world)
        assert_close(tmp_path / f"s{seed}", other)


def test_what_cannot_be_stacked_says_so(tiny_config, point_world, tmp_path):
    with pytest.raises(UserError, match="seeds of nf_gcbc cannot be stacked; those of crl, eik_hiqrl, gcbc"):
        together("nf_gcbc", tiny_config("nf_gcbc"), tmp_path, episodes=point_world)
    with pytest.raises(UserError, match="seeds of trl cannot be stacked as it is set"):  # its flow draws
        together("trl", replace(tiny_config("trl"), actor="frs"), tmp_path, episodes=point_world)
    assert not list(tmp_path.iterdir())


def test_a_cpu_takes_turns_unless_asked(tiny_config, point_world, tmp_path):
    (run, _) = together("gcbc", tiny_config("gcbc"), tmp_path, CPU, (0, 1), episodes=point_world)
    assert "stacked" not in lines(run, "timings.jsonl")[-1]


def test_agents_keep_views(tiny_agent):
    own = [tiny_agent("hiql", seed) for seed in range(3)]
    before = [{name: value.clone() for name, value in agent.state_dict().items()} for agent in own]
    whole, _ = stacked(own)
    for agent, weights in zip(own, before):
        assert all(torch.equal(value, weights[name]) for name, value in agent.state_dict().items())
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter[1] = 7.0
    assert all(bool((p == 7.0).all()) for p in own[1].parameters())
    assert not any(bool((p == 7.0).any()) for p in own[2].parameters())


@pytest.mark.parametrize(("name", "changes"), OPTIONS)
def test_each_seed_draws_its_own_batches(name, changes, tiny_agent, point_world):
    """To the bit, from a generator that is left where it would be alone."""
    (stage,) = tiny_agent(name, **changes).stages()
    ours, theirs = ([torch.Generator().manual_seed(seed) for seed in SEEDS] for _ in range(2))
    sampler = stage.sampler.build(point_world, Several(ours))
    apart = [stage.sampler.build(point_world, generator) for generator in theirs]
    for _ in range(3):
        batch, batches = sampler.sample(8), [one.sample(8) for one in apart]
        assert batch.keys() == batches[0].keys()
        assert all(torch.equal(batch[key], torch.stack([b[key] for b in batches])) for key in batch)
    assert all(torch.equal(a.get_state(), b.get_state()) for a, b in zip(ours, theirs))


def test_command_line(data_file, tmp_path, monkeypatch, capsys):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    command = ["train", "gcbc", data_file.name, "--steps", "4", "--agent.hidden", "16", "--device", "cpu", "--seeds"]
    assert call(*command, "0", "2", "--together", "stacked") == 0
    capsys.readouterr()
    assert call(*command, "2") == 0
    assert "nothing to do" in capsys.readouterr().out  # the same folders as without
