"""Seeds trained together make the runs that each makes alone, to the bit, and do not get in one another's way."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_cli import call
from test_train import CPU, TwoStages, assert_same, data_file, two_stages  # noqa: F401

from qhyer import agents, checkpoint, runs
from qhyer.errors import UserError
from qhyer.lane import Lane
from qhyer.train import NonFinite, train, train_seeds

SEEDS = (0, 1, 5)


def alone(name, config, seed: int, run: Path, **options) -> Path:
    return train(name, "x", config, replace(CPU, seed=seed), run=run, quiet=True, **options)


@pytest.mark.parametrize("name", agents.names())
def test_the_same_runs_as_alone(name, tiny_config, point_world, tmp_path):
    """Weights, moments, generators and the bytes of metrics.jsonl, dropout and noise included; run.json too."""
    config = tiny_config(name)
    made = train_seeds(name, "x", config, CPU, SEEDS, out=tmp_path / "together", episodes=point_world, quiet=True)
    assert made == [tmp_path / "together" / f"s{seed}" for seed in SEEDS]
    for seed, run in zip(SEEDS, made):
        other = alone(name, config, seed, tmp_path / f"alone{seed}", episodes=point_world)
        assert_same(other, run)
        assert runs.read(other) == runs.read(run)
        timings = [json.loads(line) for line in (run / "timings.jsonl").read_text().splitlines()]
        assert {line["together"] for line in timings} == {3}
    with pytest.raises(AssertionError):
        assert_same(made[0], made[1])


def test_stages_and_captures_too(two_stages, point_world, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr("qhyer.update.capture_for", lambda device, sampler: lambda work: work)
    made = train_seeds("two_stages", "x", two_stages, CPU, SEEDS, out=tmp_path, episodes=point_world, quiet=True)
    for seed, run in zip(SEEDS, made):
        assert_same(alone("two_stages", two_stages, seed, tmp_path / f"alone{seed}", episodes=point_world), run)


def test_seeds_at_different_updates_go_on(tiny_config, point_world, tmp_path):
    """One finished, one stopped half-way, one not begun: the first is left alone, the others reach the same bits."""
    config = tiny_config("qhyer")

    def stop(step: int) -> None:
        if step == 5:
            raise KeyboardInterrupt

    alone("qhyer", config, 0, tmp_path / "s0", episodes=point_world)
    with pytest.raises(KeyboardInterrupt):
        alone("qhyer", config, 1, tmp_path / "s1", episodes=point_world, on_step=stop)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(UserError, match="unfinished run at update 3: continue it with --resume"):
        train_seeds("qhyer", "x", config, CPU, SEEDS, out=tmp_path, episodes=point_world, quiet=True)
    assert before == {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()}  # nothing was begun
    train_seeds("qhyer", "x", config, CPU, SEEDS, out=tmp_path, episodes=point_world, quiet=True, resume=True)
    for path in (tmp_path / "s0").rglob("*"):
        assert path.is_dir() or before[path] == path.stat().st_mtime_ns
    for seed in (1, 5):
        other = alone("qhyer", config, seed, tmp_path / f"alone{seed}", episodes=point_world)
        assert_same(other, tmp_path / f"s{seed}")


def test_one_seed_that_diverges_leaves_the_others(tiny_config, point_world, tmp_path, monkeypatch):
    cls = agents.load("gcbc")
    loss, calls = cls.loss, {}

    def poisoned(self, batch):
        calls[id(self)] = calls.get(id(self), 0) + 1
        total, metrics = loss(self, batch)
        second = list(calls).index(id(self)) == 1
        return (total * torch.nan if second and calls[id(self)] == 6 else total), metrics

    monkeypatch.setattr(cls, "loss", poisoned)
    with pytest.raises(NonFinite, match=r"(?s)1 of 3 seeds stopped.*seed 1: loss .* not finite at update 5"):
        train_seeds("gcbc", "x", tiny_config("gcbc"), CPU, SEEDS, out=tmp_path, episodes=point_world, quiet=True)
    assert [checkpoint.steps(tmp_path / f"s{s}" / "checkpoints")[-1] for s in SEEDS] == [10, 3, 10]
    monkeypatch.setattr(cls, "loss", loss)
    train_seeds("gcbc", "x", tiny_config("gcbc"), CPU, SEEDS, out=tmp_path, episodes=point_world, resume=True)
    for seed in SEEDS:
        other = alone("gcbc", tiny_config("gcbc"), seed, tmp_path / f"alone{seed}", episodes=point_world)
        assert_same(other, tmp_path / f"s{seed}")


def test_callers_random_state_is_put_back(tiny_config, point_world, tmp_path):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    train_seeds("qhyer", "x", tiny_config("qhyer"), CPU, (0, 1), out=tmp_path, episodes=point_world, quiet=True)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_lane_draws_what_its_seed_alone_would():
    """Turns in any order, and a turn that ends in an error: nothing leaks in or out."""
    expected = {}
    for seed in (3, 4):
        torch.manual_seed(seed)
        expected[seed] = torch.rand(6)
    torch.manual_seed(99)
    outside = torch.get_rng_state()
    lanes = {seed: Lane(torch.device("cpu"), seed) for seed in (3, 4)}
    drawn: dict[int, list[torch.Tensor]] = {3: [], 4: []}
    for seed in (3, 4, 4, 3, 3, 4):
        with pytest.raises(ZeroDivisionError), lanes[seed].turn():
            drawn[seed].append(torch.rand(2))
            raise ZeroDivisionError
    for seed in (3, 4):
        assert torch.equal(torch.cat(drawn[seed]), expected[seed])
    assert torch.equal(torch.get_rng_state(), outside)


def test_the_bar_shows_the_mean_of_the_seeds(tiny_config, point_world, tmp_path, capsys):
    options = replace(CPU, log_every=10)
    made = train_seeds("gcbc", "x", tiny_config("gcbc"), options, (0, 1), out=tmp_path, episodes=point_world)
    said = capsys.readouterr().out.splitlines()
    losses = [json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["loss"] for run in made]
    assert said[0] == "gcbc on point-world, seeds 0 1: 0 of 10"
    assert len(said) == 2 and f"loss {sum(losses) / 2:.3g}" in said[1]


# ------------------------------------------------------------------------------------------------ command line

TINY = ["--agent.hidden", "16", "16", "--agent.batch-size", "8", "--device", "cpu"]


def test_command_line(data_file, tmp_path, monkeypatch, capsys):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    command = ["train", "gcbc", data_file.name, "--steps", "4", *TINY]
    assert call(*command, "--seeds", "0", "2") == 0
    said = capsys.readouterr().out.splitlines()
    names = [Path(line.removeprefix("run: ")).name for line in said if line.startswith("run: ")]
    assert [name.split("-")[2] for name in names] == ["s0", "s2"]
    assert call(*command, "--seed", "2") == 0
    assert "nothing to do" in capsys.readouterr().out  # the same run as alone
    for options, words in (
        (["--seeds", "0", "1", "--seed", "0"], "either --seed or --seeds"),
        (["--seeds", "1", "1"], "each seed once"),
        (["--seeds"], "--seeds needs at least one"),
    ):
        assert call(*command, *options) == 2
        assert words in capsys.readouterr().err


def test_sigterm_saves_all(data_file, tmp_path):  # noqa: F811
    command = ["train", "gcbc", data_file.name, "--steps", "1000000", "--seeds", "0", "1", "--out", "runs", *TINY]
    process = subprocess.Popen(
        [sys.executable, "-m", "qhyer", *command, "--log-every", "1"], stdout=subprocess.PIPE, text=True, cwd=tmp_path
    )
    while not (tmp_path / "runs" / "s1" / "metrics.jsonl").exists() and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=180)
    reached = [checkpoint.steps(tmp_path / "runs" / f"s{seed}" / "checkpoints")[-1] for seed in (0, 1)]
    assert process.returncode == 130 and abs(reached[0] - reached[1]) <= 1
    assert f"saved update seed 0: {reached[0]}, seed 1: {reached[1]} of 1000000; --resume continues" in output
