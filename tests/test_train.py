"""Training can be stopped anywhere and goes on to the same bits; evaluating and saving leave no trace in it."""

from __future__ import annotations

import contextlib
import copy
import errno
import functools
import json
import shutil
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch

from qhyer import agents, checkpoint, envs, presets, rollout, runs
from qhyer import train as training
from qhyer.agent import Agent, AgentConfig, Stage
from qhyer.config import to_dict
from qhyer.data import registry
from qhyer.data.episodes import UNNAMED, Episodes
from qhyer.data.samplers import TransitionSamplerConfig
from qhyer.errors import Taken, UserError
from qhyer.evaluate import evaluate
from qhyer.nn.mlp import MLP
from qhyer.storage import write_json
from qhyer.train import NonFinite, TrainConfig, Update, train, train_seeds

CPU = TrainConfig(device="cpu", log_every=4, save_every=3, keep=10, threads=1)


def contents(run: Path) -> tuple[dict[str, torch.Tensor], bytes]:
    """All that a training has come to: weights, optimisers, generators, and the metrics it wrote."""
    saved = checkpoint.load(checkpoint.latest(run / "checkpoints"))
    state = {k: v for k, v in saved.state.items() if k != "seconds"}
    assert state["step"] > 0
    tensors = {f"agent/{k}": v for k, v in saved.agent.items()} | {
        f"training/{k}": v for k, v in saved.training.items()
    }
    tensors["state"] = torch.tensor(list(json.dumps(state, sort_keys=True).encode()))
    return tensors, (run / "metrics.jsonl").read_bytes()


def assert_same(a: Path, b: Path) -> None:
    (first, first_metrics), (second, second_metrics) = contents(a), contents(b)
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name
    assert first_metrics == second_metrics and first_metrics.count(b"\n") >= 2


def stop_at(step: int):
    def on_step(now: int) -> None:
        if now == step:
            raise KeyboardInterrupt

    return on_step


def interrupted(name, config, train_config, run: Path, every: int = 4, **options) -> int:
    """Trains with a Ctrl-C after each `every` further updates; returns how many there were."""
    stops, at = 0, every
    while True:
        try:
            train(
                name, "x", config, train_config, run=run, resume=stops > 0, quiet=True, on_step=stop_at(at), **options
            )
            return stops
        except KeyboardInterrupt:
            stops, at = stops + 1, at + every


# -------------------------------------------------------------------------------------------------------- resume


@pytest.mark.parametrize("name", agents.names())
def test_resume_is_exact(name, tiny_config, point_world, tmp_path):
    """N + M updates are N, a stop, and M: weights, moments, generators and the bytes of metrics.jsonl."""
    config = tiny_config(name)
    whole = train(name, "x", config, CPU, run=tmp_path / "whole", episodes=point_world, quiet=True)
    assert interrupted(name, config, CPU, tmp_path / "parts", episodes=point_world) >= 2
    assert_same(whole, tmp_path / "parts")


QHYER = [
    dict(warmup=6, cosine=True),
    dict(q_normalization="standardize"),
    dict(weight_decay=0.1),
    dict(stitch_rate=0.2, stitch_cell=0.5),
]


@pytest.mark.parametrize("options", QHYER, ids=lambda o: "-".join(o))
def test_resume_is_exact_with_options(options, tiny_config, point_world, tmp_path):
    """A schedule must not start again from the rate it had been lowered to."""
    config = tiny_config("qhyer", **options)
    whole = train("qhyer", "x", config, CPU, run=tmp_path / "whole", episodes=point_world, quiet=True)
    assert interrupted("qhyer", config, CPU, tmp_path / "parts", episodes=point_world) >= 2
    assert_same(whole, tmp_path / "parts")


def test_the_test_sees_a_lost_generator(tiny_config, point_world, tmp_path, monkeypatch):
    config = tiny_config("gcbc")
    whole = train("gcbc", "x", config, CPU, run=tmp_path / "whole", episodes=point_world, quiet=True)
    monkeypatch.setattr(training._Loop, "restore", without_sampler_state)
    interrupted("gcbc", config, CPU, tmp_path / "parts", episodes=point_world)
    with pytest.raises(AssertionError):
        assert_same(whole, tmp_path / "parts")


original_restore = training._Loop.restore


def without_sampler_state(loop) -> None:
    before = loop.generator.get_state()
    original_restore(loop)
    fresh = torch.Generator().manual_seed(99)
    loop.generator = fresh
    assert not torch.equal(before, fresh.get_state())


@dataclass(frozen=True)
class TwoStagesConfig(AgentConfig):
    pass


class TwoStages(Agent):
    """A critic and then an actor on one optimiser: other metrics, another batch size, a schedule, a finish."""

    Config = TwoStagesConfig

    def __init__(self, config, spec):
        super().__init__(config, spec)
        self.net = MLP(spec.observation_dim, (8,), 2)
        self.register_buffer("finished", torch.zeros(2))
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=1e-2)

    def first(self, batch):
        loss = self.net(batch["observations"]).square().mean() + torch.rand(())
        return loss, {"critic/a": loss.detach(), "critic/b": 2 * loss.detach()}

    def second(self, batch):
        loss = (self.net(batch["goals"]) - 1).square().mean()
        return loss, {"actor/only": loss.detach()}

    def stages(self):
        sampler = TransitionSamplerConfig()
        optimizers = (self.optimizer,)
        done = lambda place: lambda episodes: self.finished[place].fill_(self.finished.sum() + 1)
        fall = lambda step: 1.0 / (1 + step)
        return (
            Stage("critic", 7, 4, sampler, self.first, optimizers, schedule=fall, finish=done(0)),
            Stage("actor", 6, 8, sampler, self.second, optimizers, schedule=lambda step: 1.0, finish=done(1)),
        )

    def act(self, observation, goal, memory):
        return self.net(observation).clamp(-1, 1), None


@pytest.fixture
def two_stages(monkeypatch):
    known, load = agents.names(), agents.load
    monkeypatch.setattr(agents, "names", lambda: [*known, "two_stages"])
    monkeypatch.setattr(agents, "load", lambda name: TwoStages if name == "two_stages" else load(name))
    return TwoStagesConfig(steps=13)


@pytest.mark.parametrize("every", [2, 3, 4, 7])
def test_resume_across_stages(two_stages, point_world, tmp_path, every):
    """Also where the stop falls on the boundary: stages differ in metrics, batch size and schedule."""
    options = replace(CPU, save_every=1)
    whole = train("two_stages", "x", two_stages, options, run=tmp_path / "whole", episodes=point_world, quiet=True)
    interrupted("two_stages", two_stages, options, tmp_path / "parts", every=every, episodes=point_world)
    assert_same(whole, tmp_path / "parts")
    agent, step = runs.load_agent(whole)
    assert step == 13 and agent.finished.tolist() == [1.0, 2.0]
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["stage"]) for line in lines] == [
        (4, "critic"), (7, "critic"), (8, "actor"), (12, "actor"), (13, "actor"),
    ]  # fmt: skip
    assert "critic/b" in lines[0] and set(lines[2]) == {"step", "stage", "loss", "actor/only", "grad_norm"}


def test_a_stage_starts_from_the_optimiser_s_own_rate(two_stages, point_world, tmp_path):
    """The first stage's schedule leaves a seventh of the rate; the second's factor one means the whole of it."""
    run = train("two_stages", "x", two_stages, CPU, run=tmp_path / "run", episodes=point_world, quiet=True)
    saved = checkpoint.load(checkpoint.latest(run / "checkpoints"))
    assert saved.state["optimizers"][0][0]["lr"] == pytest.approx(1e-2)


def test_a_run_of_two_stages_is_not_finished_after_the_first(two_stages, point_world, tmp_path):
    """`steps` of the configuration is what is asked for; stages decide how many there are."""
    config = replace(two_stages, steps=5)  # less than the stages' thirteen
    with pytest.raises(KeyboardInterrupt):
        train("two_stages", "x", config, CPU, run=tmp_path, episodes=point_world, quiet=True, on_step=stop_at(11))
    train("two_stages", "x", config, CPU, run=tmp_path, episodes=point_world, quiet=True, resume=True)
    assert checkpoint.steps(tmp_path / "checkpoints")[-1] == 13


# ------------------------------------------------------------------------------------------- kills and signals

CHILD = """
import json, sys, time, torch
torch.set_num_threads(1)
from qhyer import agents
from qhyer.config import from_dict
from qhyer.train import Stopped, TrainConfig, train
name, data, run, config, options = json.loads(sys.argv[1])
def on_step(step):
    print("step", step, flush=True)
    time.sleep(0.01)
try:
    train(name, data, from_dict(agents.load(name).Config, config), from_dict(TrainConfig, options), run=run,
          quiet=True, on_step=on_step)
except Stopped as stopped:
    print(stopped, flush=True)
else:
    print("done", flush=True)
"""


def child(name, data: Path, run: Path, config, options: TrainConfig) -> subprocess.Popen:
    arguments = json.dumps([name, str(data), str(run), to_dict(config), to_dict(options)])
    return subprocess.Popen([sys.executable, "-c", CHILD, arguments], stdout=subprocess.PIPE, text=True)


def write_data(episodes: Episodes, path: Path) -> Path:
    terminals = np.zeros(len(episodes.observations), bool)
    terminals[episodes.ends] = True
    np.savez(
        path,
        observations=episodes.observations.numpy(),
        actions=episodes.actions.numpy(),
        terminals=terminals,
        goal_indices=np.array([0, 1]),
    )
    return path


@pytest.fixture
def data_file(point_world, tmp_path) -> Path:
    return write_data(point_world, tmp_path / "points.npz")


STOPPED = replace(CPU, save_every=10, log_every=7)


@pytest.fixture(scope="module")
def whole_run(point_world, tmp_path_factory, tiny_config) -> Path:
    """Data, and what the run on them comes to that nobody stops."""
    folder = tmp_path_factory.mktemp("whole")
    path = write_data(point_world, folder / "points.npz")
    return train("qhyer", str(path), tiny_config("qhyer", steps=60, warmup=30), STOPPED, run=folder / "run", quiet=True)


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=["SIGKILL", "SIGTERM", "SIGINT"]
)
def test_a_stopped_process_goes_on_to_the_same_bits(number, tiny_config, whole_run, tmp_path):
    """SIGTERM and Ctrl-C end after the update under way: saved, said. SIGKILL loses what came after a save."""
    config, data = tiny_config("qhyer", steps=60, warmup=30), whole_run.parent / "points.npz"
    process = child("qhyer", data, tmp_path, config, STOPPED)
    for line in process.stdout:
        if line == "step 27\n":
            process.send_signal(number)
            break
    rest = process.stdout.read()
    code = process.wait(timeout=180)
    reached = checkpoint.steps(tmp_path / "checkpoints")[-1]
    if number != signal.SIGKILL:
        assert code == 0 and 27 <= reached < 60
        assert f"stopped; saved update {reached} of 60; --resume continues" in rest
    else:
        assert code == -signal.SIGKILL and reached % 10 == 0 and 20 <= reached < 60
    assert "done" not in rest
    steps: list[int] = []
    train("qhyer", str(data), config, STOPPED, run=tmp_path, resume=True, quiet=True, on_step=steps.append)
    assert steps == list(range(reached + 1, 61))
    assert_same(whole_run, tmp_path)


def test_sigterm_is_given_back(tiny_config, point_world, tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    train("gcbc", "x", tiny_config("gcbc"), CPU, run=tmp_path, episodes=point_world, quiet=True)
    assert signal.getsignal(signal.SIGTERM) is before


# ------------------------------------------------------------------------------------------------ leaves no trace


def test_callers_random_state_and_threads_are_put_back(tiny_config, point_world, tmp_path):
    torch.manual_seed(5)
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    train("qhyer", "x", tiny_config("qhyer"), CPU, run=tmp_path, episodes=point_world, quiet=True)
    assert torch.equal(torch.get_rng_state(), before) and (np.random.get_state()[1] == numpy_before).all()
    assert torch.get_num_threads() == 1


def test_callers_random_state_does_not_matter(tiny_config, point_world, tmp_path):
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)
        train("qhyer", "x", tiny_config("qhyer"), CPU, run=tmp_path / str(seed), episodes=point_world, quiet=True)
    assert_same(tmp_path / "1", tmp_path / "2")


def test_another_seed_is_another_run(tiny_config, point_world, tmp_path):
    for seed in (0, 1):
        options = replace(CPU, seed=seed)
        train("gcbc", "x", tiny_config("gcbc"), options, run=tmp_path / str(seed), episodes=point_world, quiet=True)
    with pytest.raises(AssertionError):
        assert_same(tmp_path / "0", tmp_path / "1")


@pytest.fixture
def maze_like() -> Episodes:
    """Two-dimensional rows, as pointmaze has them."""
    rng = np.random.default_rng(0)
    rows = np.cumsum(rng.normal(size=(200, 2)), 0)
    return Episodes.from_arrays(rows, rng.uniform(-1, 1, (200, 2)), [99, 199], goal=[0, 1], name="maze-like")


MEDIUM = "pointmaze-medium-v0"


@pytest.fixture
def short_episodes(monkeypatch) -> None:
    """Real environments, cut after 15 steps and stepped in this process."""
    make = envs.make
    limit = gymnasium.wrappers.TimeLimit
    monkeypatch.setattr(envs, "make", lambda environment: limit(make(environment), 15))
    monkeypatch.setattr(training, "evaluate", functools.partial(evaluate, workers=0))


@pytest.fixture(scope="module")
def kept() -> list[rollout.Workers]:
    return []


@pytest.fixture
def kept_environments(kept, short_episodes, monkeypatch) -> None:
    """The same environments for all evaluations, but those of GCBC and QHyer, which make theirs anew each time."""
    if not kept:
        kept.append(rollout.Workers(MEDIUM, 0).__enter__())

    def with_kept(agent, environment, config):
        anew = isinstance(agent, (agents.load("gcbc"), agents.load("qhyer")))
        return evaluate(agent, environment, config, workers=0 if anew else kept[0])

    monkeypatch.setattr(training, "evaluate", with_kept)


@pytest.mark.parametrize("name", agents.names())
def test_evaluating_more_often_changes_no_weight(
    name, tiny_config, maze_like, tmp_path, kept_environments, looked_at_once
):
    """None, every five updates, every two: same weights, same generators, same metrics."""
    for every in (0, 5, 2):
        options = replace(CPU, eval_every=every, eval_episodes=1)
        run = tmp_path / str(every)
        train(
            name, "x", tiny_config(name), options, run=run, episodes=maze_like, environment=MEDIUM, quiet=True,
        )  # fmt: skip
    total = checkpoint.steps(tmp_path / "2" / "checkpoints")[-1]
    assert len((tmp_path / "2" / "episodes.csv").read_text().splitlines()) == 1 + 5 * (total // 2)
    assert_same(tmp_path / "0", tmp_path / "5")
    assert_same(tmp_path / "0", tmp_path / "2")


def test_saving_and_logging_more_often_changes_no_weight(tiny_config, point_world, tmp_path):
    for every, log in ((3, 4), (1, 1), (0, 100)):
        options = replace(CPU, save_every=every, log_every=log)
        train("qhyer", "x", tiny_config("qhyer"), options, run=tmp_path / str(every), episodes=point_world, quiet=True)
    first, second, third = (contents(tmp_path / str(every))[0] for every in (3, 1, 0))
    for name in first:
        if name.startswith(("agent/", "training/rng", "training/optimizer")):
            assert torch.equal(first[name], second[name]) and torch.equal(first[name], third[name]), name


# ---------------------------------------------------------------------------------------------- refusals, failures


def test_data_without_a_name_get_the_one_they_are_trained_under(tiny_config, point_world, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    unnamed = copy.copy(point_world)
    unnamed.name = UNNAMED
    run = train("qhyer", "mine", tiny_config("qhyer"), TrainConfig(device="cpu"), episodes=unnamed, quiet=True)
    assert runs.read(run)["dataset"] == "mine" and run.parent.name == "mine" and unnamed.name == UNNAMED
    run = train("qhyer", "mine.v2", tiny_config("qhyer"), CPU, episodes=unnamed, quiet=True)
    assert runs.read(run)["dataset"] == "mine.v2"
    with pytest.raises(UserError, match="cube-single-v0 has observations of 28 numbers"):
        train("qhyer", "cube-single-play-v0", tiny_config("qhyer"), CPU, episodes=unnamed, quiet=True)
    before = runs.read(run)
    write_json(run / "run.json", {**before, "dataset": UNNAMED})  # as it was called before names were kept
    train("qhyer", "mine.v2", tiny_config("qhyer"), CPU, run=run, episodes=unnamed, quiet=True)


def test_checkpoints_of_nobody_knows_what_are_refused(tiny_config, point_world, tmp_path):
    """Without run.json the next training would take them for its own."""
    config = tiny_config("gcbc")
    train("gcbc", "x", config, CPU, run=tmp_path, episodes=point_world, quiet=True)
    (tmp_path / "run.json").unlink()
    before = contents(tmp_path)
    for resume in (False, True):
        with pytest.raises(UserError, match=r"has checkpoints but no run\.json"):
            train("gcbc", "x", config, CPU, run=tmp_path, episodes=point_world, quiet=True, resume=resume)
    assert contents(tmp_path)[1] == before[1]


def test_an_unfinished_run_needs_resume(tiny_config, point_world, tmp_path):
    config = tiny_config("gcbc")
    with pytest.raises(KeyboardInterrupt):
        train("gcbc", "x", config, CPU, run=tmp_path, episodes=point_world, quiet=True, on_step=stop_at(5))
    before = contents(tmp_path)
    with pytest.raises(UserError, match=r"unfinished run at update 3: continue it with --resume"):
        train("gcbc", "x", config, CPU, run=tmp_path, episodes=point_world, quiet=True)
    assert contents(tmp_path)[1] == before[1]


def test_a_finished_run_is_left_alone(tiny_config, point_world, tmp_path, capsys):
    config = tiny_config("gcbc")
    train("gcbc", "x", config, CPU, run=tmp_path, episodes=point_world, quiet=True)
    files = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()}
    for resume in (False, True):
        train("gcbc", "x", config, CPU, run=tmp_path, episodes=point_world, resume=resume)
    assert files == {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()}
    assert "is finished (10 updates); nothing to do" in capsys.readouterr().out


@pytest.mark.parametrize(
    "change, word",
    [
        (dict(config=dict(learning_rate=0.5)), "config.learning_rate: 0.001 there, 0.5 asked for"),
        (dict(train=dict(seed=3)), "seed"),
        (dict(train=dict(precision="bf16")), "precision"),
        (dict(data=True), "data"),
    ],
)
def test_resume_refuses_another_run(tiny_config, point_world, tmp_path, change, word):
    config = tiny_config("gcbc")
    with pytest.raises(KeyboardInterrupt):
        train("gcbc", "x", config, CPU, run=tmp_path, episodes=point_world, quiet=True, on_step=stop_at(5))
    before = contents(tmp_path)[1]
    other_config = replace(config, **change.get("config", {}))
    options = replace(CPU, **change.get("train", {}))
    episodes = point_world
    if "data" in change:  # one action differs: same sizes, same scales
        actions = point_world.actions.clone()
        actions[0] = 0.123
        episodes = Episodes.from_arrays(point_world.observations, actions, point_world.ends, goal=[0, 1])
        episodes.name = point_world.name
    for resume in (False, True):
        with pytest.raises(UserError, match=rf"is another run .*{word}"):
            train("gcbc", "x", other_config, options, run=tmp_path, episodes=episodes, quiet=True, resume=resume)
    assert contents(tmp_path)[1] == before


def test_resume_of_nothing_starts(tiny_config, point_world, tmp_path):
    run = train(
        "gcbc", "x", tiny_config("gcbc"), CPU, run=tmp_path / "new", episodes=point_world, quiet=True, resume=True
    )
    assert checkpoint.steps(run / "checkpoints")[-1] == 10


def test_two_trainings_of_one_run_do_not_meet(tiny_config, point_world, tmp_path):
    """The second is refused before it touches anything; the first may be new or go on, the second have other seeds."""
    config, told = tiny_config("gcbc"), r"is being trained by another process \(\d+ on .*\): wait until it ends"
    both = functools.partial(train, "gcbc", "x", config, CPU, episodes=point_world, quiet=True)
    seeds = functools.partial(train_seeds, "gcbc", "x", config, CPU, episodes=point_world, quiet=True)
    refused: list[int] = []

    def meanwhile(step: int) -> None:
        if step in (2, 5, 8):
            partial = tmp_path / "s1" / "checkpoints" / ".partial-00000003-1-00000000"
            partial.mkdir(parents=True)  # as if it were just being saved
            for other in (both, functools.partial(both, resume=True), functools.partial(both, resume=None)):
                with pytest.raises(Taken, match=told):
                    other(run=tmp_path / "s1")
            with pytest.raises(Taken, match=rf"s1 {told}"):
                seeds((0, 1), out=tmp_path)
            refused.append(step)
            partial.rmdir()  # still there
            assert not (tmp_path / "s0").exists()  # nothing of the other seed, either
        if step == 5 and len(refused) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        both(run=tmp_path / "s1", on_step=meanwhile)
    assert not list((tmp_path / "s1").glob(".*"))
    both(run=tmp_path / "s1", resume=None, on_step=meanwhile)
    assert refused == [2, 5, 5, 8]
    assert_same(both(run=tmp_path / "whole"), tmp_path / "s1")
    assert not list(tmp_path.rglob(".partial-*"))


def test_a_lock_that_a_kill_left_stops_nobody_nor_does_a_lack_of_locks(
    tiny_config, point_world, tmp_path, monkeypatch, capsys
):
    fcntl = pytest.importorskip("fcntl")
    config = tiny_config("gcbc")
    (tmp_path / training.LOCK).write_text("1 on elsewhere")
    run = train("gcbc", "x", config, CPU, run=tmp_path, episodes=point_world, quiet=True)
    assert runs.is_run(run) and not (tmp_path / training.LOCK).exists()

    def none(file, kind) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    run = train("gcbc", "x", config, CPU, run=tmp_path / "other", episodes=point_world)
    assert runs.is_run(run) and not (run / training.LOCK).exists()
    assert "other: files cannot be locked there" in " ".join(capsys.readouterr().err.split())


def test_a_damaged_checkpoint_is_not_resumed(tiny_config, point_world, tmp_path):
    config = tiny_config("gcbc")
    with pytest.raises(KeyboardInterrupt):
        train("gcbc", "x", config, CPU, run=tmp_path, episodes=point_world, quiet=True, on_step=stop_at(5))
    path = tmp_path / "checkpoints" / "00000003" / "training.safetensors"
    spoilt = bytearray(path.read_bytes())
    spoilt[-1] ^= 1
    path.write_bytes(spoilt)
    with pytest.raises(UserError, match=r"training\.safetensors is damaged"):
        train("gcbc", "x", config, CPU, run=tmp_path, episodes=point_world, quiet=True, resume=True)


def test_weights_alone_are_not_resumed(tiny_config, point_world, tmp_path):
    """Said before anything is touched, with and without --resume; an earlier whole checkpoint goes on."""
    config = tiny_config("gcbc")
    whole = train("gcbc", "x", config, CPU, run=tmp_path / "whole", episodes=point_world, quiet=True)
    run = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train("gcbc", "x", config, CPU, run=run, episodes=point_world, quiet=True, on_step=stop_at(7))
    (run / "checkpoints" / "00000006" / checkpoint.TRAINING).unlink()
    files = {p: p.stat().st_mtime_ns for p in run.rglob("*") if p.is_file()}
    for resume in (False, True):
        with pytest.raises(UserError, match=r"00000006 cannot be resumed: .* is missing .* to fall back to update 3"):
            train("gcbc", "x", config, CPU, run=run, episodes=point_world, quiet=True, resume=resume)
    assert files == {p: p.stat().st_mtime_ns for p in run.rglob("*") if p.is_file()}
    shutil.rmtree(run / "checkpoints" / "00000006")
    train("gcbc", "x", config, CPU, run=run, episodes=point_world, quiet=True, resume=True)
    assert_same(whole, run)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["gcbc", "qhyer"])
def test_a_loss_that_is_not_finite_stops_before_the_weights_are_touched(
    name, value, tiny_config, point_world, tmp_path, monkeypatch
):
    """Says where, keeps the last checkpoint, and saves the rows of the batch that did it."""
    cls = agents.load(name)
    loss, seen = cls.loss, []

    def poisoned(self, batch):
        seen.append((batch["rows"].clone(), [p.detach().clone() for p in self.parameters()], self))
        total, metrics = loss(self, batch)
        return (total * value if len(seen) == 6 else total), metrics

    monkeypatch.setattr(cls, "loss", poisoned)
    with pytest.raises(NonFinite, match=r"not finite at update 5; the batch's rows are in .*npz; .* is update 3\."):
        train(name, "x", tiny_config(name), CPU, run=tmp_path, episodes=point_world, quiet=True)
    rows, weights, agent = seen[-1]
    assert len(seen) == 6 and all(torch.equal(a, b) for a, b in zip(weights, agent.parameters()))
    with np.load(tmp_path / "nonfinite-00000005.npz") as dumped:
        assert (dumped["rows"] == rows.numpy()).all() and "goal_rows" in dumped.files
    assert checkpoint.steps(tmp_path / "checkpoints") == [3]
    checkpoint.load(checkpoint.latest(tmp_path / "checkpoints"))
    assert b"NaN" not in (tmp_path / "metrics.jsonl").read_bytes()
    monkeypatch.setattr(cls, "loss", loss)  # the cause removed, it goes on
    train(name, "x", tiny_config(name), CPU, run=tmp_path, episodes=point_world, quiet=True, resume=True)
    assert checkpoint.steps(tmp_path / "checkpoints")[-1] == 10


def test_a_metric_that_is_not_finite_stops_too(tiny_config, point_world, tmp_path, monkeypatch):
    cls = agents.load("gcbc")
    loss = cls.loss

    def poisoned(self, batch):
        total, metrics = loss(self, batch)
        return total, {**metrics, "actor/mse": metrics["actor/mse"] * float("nan")}

    monkeypatch.setattr(cls, "loss", poisoned)
    with pytest.raises(NonFinite):
        train("gcbc", "x", tiny_config("gcbc"), CPU, run=tmp_path, episodes=point_world, quiet=True)


def test_no_cuda_is_said_plainly():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(UserError, match="no CUDA device is usable here; use --device cpu"):
        runs.resolve_device("cuda")
    assert runs.resolve_device("auto") == "cpu"


# ---------------------------------------------------------------------------------------------- what a run records


def test_run_json_and_the_agent_in_it(tiny_config, point_world, tmp_path):
    config = tiny_config("qhyer")
    run = train("qhyer", "x", config, CPU, run=tmp_path / "run", episodes=point_world, quiet=True, preset="tiny")
    info = runs.read(run)
    assert (info["agent"], info["preset"], info["dataset"], info["seed"]) == ("qhyer", "tiny", "point-world", 0)
    assert info["config"] == to_dict(config) and info["data"]["fingerprint"] == point_world.fingerprint
    assert info["data"]["transitions"] == 6 * 59 and info["versions"]["torch"] == torch.__version__
    agent, step = runs.load_agent(run)
    assert step == 10 and not agent.training
    assert info["parameters"] == sum(p.numel() for p in agent.parameters())
    with pytest.raises(UserError, match="no checkpoint of step 4"):
        runs.load_agent(run, step=4)
    assert runs.load_agent(run, step=3)[1] == 3
    with pytest.raises(UserError, match=r"is a folder of runs: give one of them, such as .*run"):
        runs.read(tmp_path)
    with pytest.raises(UserError, match="is not a run"):
        runs.read(run / "checkpoints")


def test_metrics_are_means_since_the_last_line(tiny_config, point_world, tmp_path):
    for every in (1, 5):
        options = replace(CPU, log_every=every)
        train("qhyer", "x", tiny_config("qhyer"), options, run=tmp_path / str(every), episodes=point_world, quiet=True)
    fine, coarse = (
        [json.loads(line) for line in (tmp_path / str(every) / "metrics.jsonl").read_text().splitlines()]
        for every in (1, 5)
    )
    assert [line["step"] for line in coarse] == [5, 10]
    for key in ("loss", "actor/bc", "grad_norm"):
        assert coarse[0][key] == pytest.approx(statistics.mean(line[key] for line in fine[:5]))
        assert coarse[1][key] == pytest.approx(statistics.mean(line[key] for line in fine[5:]))


def test_a_finished_run_is_not_taken_for_another(tiny_config, point_world, tmp_path):
    train("gcbc", "x", tiny_config("gcbc"), CPU, run=tmp_path, episodes=point_world, quiet=True)
    with pytest.raises(UserError, match="agent: gcbc there, qhyer asked for"):
        train("qhyer", "x", tiny_config("qhyer"), CPU, run=tmp_path, episodes=point_world, quiet=True)


def test_default_folder_depends_on_what_is_trained(tiny_config, point_world):
    config = tiny_config("gcbc")
    name = functools.partial(training.default_run_dir, "gcbc", "paper")
    here = name(point_world, config, CPU)
    assert here == name(point_world, config, replace(CPU, log_every=9, save_every=9))
    assert here.parts[:2] == ("runs", point_world.name)
    actions = point_world.actions.clone()
    actions[0] = 0.123
    changed = Episodes.from_arrays(point_world.observations, actions, point_world.ends, goal=[0, 1])
    others = {
        name(point_world, replace(config, batch_size=9), CPU),
        name(point_world, config, replace(CPU, seed=1)),
        name(changed, config, CPU),
    }
    assert here not in others and len(others) == 3


def test_gradient_clipping(point_world, tiny_agent):
    agent = tiny_agent("qhyer", grad_clip=1e-3)
    stage = agent.stages()[0]
    update = Update(agent, stage, stage.sampler.build(point_world, torch.Generator()), "fp32", torch.device("cpu"))
    update(0)
    assert update.take_metrics()["grad_norm"] > 1e-2  # before clipping
    for optimizer in stage.optimizers:
        grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
        assert float(torch.stack([g.norm() for g in grads]).norm()) < 1.01e-3


def test_bf16_trains(tiny_config, point_world, tmp_path):
    """Products in bfloat16 move the losses a little, not a lot, and everything stays finite."""
    for precision in ("fp32", "bf16"):
        options = replace(CPU, precision=precision, log_every=1)
        train(
            "qhyer", "x", tiny_config("qhyer"), options, run=tmp_path / precision, episodes=point_world, quiet=True
        )  # fmt: skip
    full, half = (
        [json.loads(line)["loss"] for line in (tmp_path / p / "metrics.jsonl").read_text().splitlines()]
        for p in ("fp32", "bf16")
    )
    assert full != half and half == pytest.approx(full, rel=0.1)


# -------------------------------------------------------------------------------------------------------- its cost


def test_sampling_is_a_small_part_of_an_update():
    """At most a tenth, for cube-single's `paper` preset with a smaller batch, on one core; medians of one run."""
    config = replace(presets.resolve("qhyer", "paper", "cube-single-play-v0")[0], batch_size=8)
    rows, dataset = 100 * 1001, registry.get("cube-single-play-v0")
    rng = np.random.default_rng(0)
    episodes = Episodes.from_arrays(
        rng.normal(size=(rows, 28)), rng.uniform(-1, 1, (rows, 5)), 1001 * np.arange(1, 101) - 1,
        goal=dataset.goal_indices,
    )  # fmt: skip
    agent = runs.build_agent("qhyer", config, episodes.spec(), 0)
    stage = agent.stages()[0]
    sampler = stage.sampler.build(episodes, torch.Generator().manual_seed(0))
    update = Update(agent, stage, sampler, "fp32", torch.device("cpu"))
    update(0)
    sampling, updating = [], []
    for step in range(1, 6):
        begun = time.perf_counter()
        sampler.sample(config.batch_size)
        middle = time.perf_counter()
        update(step)
        sampling.append(middle - begun)
        updating.append(time.perf_counter() - middle)
    share = statistics.median(sampling) / statistics.median(updating)
    assert share < 0.1, f"sampling takes {100 * share:.1f} % of an update"


def test_an_option_that_came_later_does_not_make_it_another_run(tmp_path, point_world, tiny_config):
    """run.json of an earlier version, without `chunk` and with an option that is gone: it goes on, to the same end."""
    config = tiny_config("qhyer", steps=4)
    for run, stop in ((tmp_path / "whole", None), (tmp_path / "cut", 2)):
        with contextlib.suppress(KeyboardInterrupt):
            step = None if stop is None else stop_at(stop)
            train("qhyer", "x", config, CPU, run=run, episodes=point_world, quiet=True, on_step=step)
    about = json.loads((tmp_path / "cut" / "run.json").read_text())
    del about["config"]["chunk"]
    about["config"]["prior_weight"] = 0.3
    (tmp_path / "cut" / "run.json").write_text(json.dumps(about))
    train("qhyer", "x", config, CPU, run=tmp_path / "cut", episodes=point_world, quiet=True)
    whole, cut = (runs.load_agent(tmp_path / name)[0].state_dict() for name in ("whole", "cut"))
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
