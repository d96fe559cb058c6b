"""Evaluation is a function of the weights and the seed: not of workers, of order, nor of anyone's random state."""

from __future__ import annotations

import contextlib
import csv
import errno
import json
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from test_policy import again

from qhyer import envs, records, runs
from qhyer import evaluate as evaluation
from qhyer import train as training
from qhyer.agent import Agent, AgentConfig
from qhyer.data.episodes import DataSpec, Episodes
from qhyer.errors import CorruptFile, Kept, Taken, UserError
from qhyer.evaluate import EvalConfig, evaluate, plan, success_rate
from qhyer.policy import GraphedPolicy
from qhyer.records import EpisodeRow, add_rows, normalised, read_rows, references
from qhyer.rng import global_numpy, numpy_stream, stream_seed
from qhyer.rollout import EpisodeSpec, ShardRunner, Workers
from qhyer.train import TrainConfig, train

MAZE = "pointmaze-medium-v0"
FEW = EvalConfig(episodes=2, tasks=(1, 3), shard=3)  # four episodes in two shards, the second of one


class Straight(Agent):
    """Heads for the goal with a wobble: its memory holds the episode's age, and a phase that is the episode's own."""

    Config = AgentConfig

    def __init__(self, config, spec):
        super().__init__(config, spec)
        self.gain = torch.nn.Parameter(torch.tensor(0.5))
        self.calls: list[int] = []

    def stages(self):
        return ()

    def act(self, observation, goal, memory):
        self.calls.append(len(observation))
        if memory is None:
            memory = {"age": torch.zeros(len(observation), 1), "phase": observation.sum(1, keepdim=True)}
        age, phase = memory["age"], memory["phase"]
        torch.rand(3), np.random.rand(3)  # a careless policy draws from the global generators
        wobble = torch.cat([torch.sin(age / 7 + phase), torch.cos(age / 5 + 3 * phase)], 1)
        action = self.gain * (goal - observation) + 0.5 * wobble
        return action.clamp(-1, 1), {"age": age + 1, "phase": phase}


@pytest.fixture
def straight() -> Straight:
    return Straight(AgentConfig(), DataSpec(2, 2, (0, 1), (0.0, 0.0), (1.0, 1.0)))


def summary(results) -> list[tuple]:
    """All of a result but its wall-clock time."""
    return [
        (r.spec, r.success, r.length, r.goal.tobytes(), None if r.observations is None else r.observations.tobytes())
        for r in results
    ]


@pytest.fixture(scope="module")
def reference() -> list[tuple]:
    agent = Straight(AgentConfig(), DataSpec(2, 2, (0, 1), (0.0, 0.0), (1.0, 1.0)))
    return summary(evaluate(agent, MAZE, FEW, workers=0))


@pytest.mark.parametrize("workers", [1, 2, pytest.param(8, marks=pytest.mark.slow)])
def test_workers_change_nothing(workers, straight, reference):
    assert summary(evaluate(straight, MAZE, FEW, workers=workers)) == reference


def test_again_changes_nothing_and_another_seed_does(straight, reference):
    assert summary(evaluate(straight, MAZE, FEW, workers=0)) == reference
    other = summary(evaluate(straight, MAZE, replace(FEW, seed=1), workers=0))
    assert {s[3] for s in other}.isdisjoint({s[3] for s in reference})  # other goals


def test_the_order_of_results_and_their_trails(reference):
    specs = [row[0] for row in reference]
    assert [(s.task, s.episode) for s in specs] == [(1, 0), (1, 1), (3, 0), (3, 1)]
    for _, success, length, _, trail in reference:
        assert 0 < length <= 1000 and isinstance(success, bool)
        assert len(np.frombuffer(trail, np.float32).reshape(-1, 2)) == length + 1


def test_no_random_state_is_moved(straight):
    """The policy draws from both global generators, the maze from numpy's; the caller's are as they were."""
    torch.manual_seed(7)
    np.random.seed(7)
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    place = np.random.get_state()[2]
    threads = torch.get_num_threads()
    straight.train()
    evaluate(straight, MAZE, replace(FEW, episodes=1, tasks=(3,)), workers=0)
    assert torch.equal(torch.get_rng_state(), before)
    assert straight.training and torch.get_num_threads() == threads
    assert (np.random.get_state()[1] == numpy_before).all() and np.random.get_state()[2] == place


def test_callers_random_state_does_not_matter(straight, reference):
    np.random.seed(123)
    torch.manual_seed(123)
    assert summary(evaluate(straight, MAZE, FEW, workers=0)) == reference


def test_episodes_of_a_shard_run_together_and_leave_when_done(straight, reference):
    evaluate(straight, MAZE, FEW, workers=0)
    lengths = [row[2] for row in reference]
    first, second = lengths[:3], lengths[3:]
    expected = [sum(length > t for length in first) for t in range(max(first))]
    expected += [sum(length > t for length in second) for t in range(max(second))]
    assert straight.calls == expected


def test_memory_stays_with_its_episode(straight, reference):
    """One episode alone gives what it gave within its shard: neighbours that end take nothing along."""
    for row in reference[:3]:
        alone = ShardRunner(MAZE)
        observation, goal = alone.reset([row[0]])
        memory, trail, ended = None, [observation[0]], False
        while not ended:
            with torch.no_grad():
                action, memory = straight.act(torch.from_numpy(observation), torch.from_numpy(goal), memory)
            observation, over, success = alone.step(action.numpy())
            trail.append(observation[0])
            ended = bool(over[0])
        recorded = np.frombuffer(row[4], np.float32).reshape(-1, 2)
        np.testing.assert_allclose(np.stack(trail), recorded, atol=1e-4)
        assert bool(success[0]) == row[1]


def test_a_worker_outlives_the_signals_that_end_a_job_and_not_its_parent():
    """SIGTERM and SIGINT reach a whole job: the parent, which saves, must not find its workers dead."""
    with Workers(MAZE, 1) as pool:
        assert (pool.about().tasks, pool.about().observation_dim) == (5, 2)
        (connection,) = pool.connections
        firsts = []
        for signals in ((), (signal.SIGTERM, signal.SIGINT)):
            for number in signals:
                pool.process.send_signal(number)
            connection.send(("reset", 0, [EpisodeSpec(1, 0, 5)]))
            assert connection.poll(60)
            slot, (observation, _) = connection.recv()
            firsts.append(observation)
        assert slot == 0 and np.array_equal(*firsts)
    assert pool.process.returncode == 0  # it was told to stop, or saw the pipe close


def test_workers_end_with_the_one_who_asks():
    """No farewell: the pipes close, as when the parent is killed; all processes, forked ones too, are gone."""
    pool = Workers(MAZE, 3).__enter__()
    pool.about()
    tasks = Path(f"/proc/{pool.process.pid}/task/{pool.process.pid}/children")
    children = [int(pid) for pid in tasks.read_text().split()] if tasks.exists() else []
    for connection in pool.connections:
        connection.close()
    assert pool.process.wait(timeout=60) == 0  # the first waits for the others
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)


@pytest.mark.parametrize("gone", [False, True], ids=["dying", "gone"])
def test_a_dead_worker_is_an_error_and_not_a_wait(gone, straight):
    """Whether its pipe is still open when it is asked, or closed already."""
    with Workers(MAZE, 2) as pool, pytest.raises(UserError, match=r"died of signal 9 \(SIGKILL, perhaps"):
        pool.about()
        pool.process.kill()  # the first of the two; the other lives on until its pipe closes
        if gone:
            pool.process.wait()
            for connection in pool.connections:
                connection.poll(5)  # readable: its end is closed
        evaluate(straight, MAZE, FEW, workers=pool)


def test_an_unknown_environment_is_the_users_error_in_a_worker_too(straight):
    for workers in (0, 1):
        with pytest.raises(UserError, match="no environment is called"):
            evaluate(straight, "pointmaze-tiny-v0", FEW, workers=workers)


def test_workers_serve_one_evaluation_after_another(straight, reference):
    with Workers(MAZE, 2) as pool:
        for _ in range(2):
            assert summary(evaluate(straight, MAZE, FEW, workers=pool)) == reference


@pytest.mark.parametrize("workers, shards, sizes", [(16, 16, [2] * 8), (2, 16, [1, 1]), (16, 4, [8, 8]), (5, 1, [5])])
def test_workers_share_shards_where_shards_are_few(workers, shards, sizes):
    groups = evaluation.crews(list(range(workers)), shards)
    assert [len(group) for group in groups] == sizes and [w for group in groups for w in group] == list(range(workers))


def test_workers_import_no_torch():
    code = "import sys, qhyer.rollout as r; r.Stepper('cube-single-v0'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


# ---------------------------------------------------------------------------------------------- graphs and fixed rows


def test_a_batch_of_fixed_size_gives_the_same_episodes(straight, reference, monkeypatch):
    """As on CUDA: rows of ended episodes stay, and a short shard is filled up."""
    monkeypatch.setattr(evaluation, "graphed", lambda agent, device: GraphedPolicy(agent, again))
    results = evaluate(straight, MAZE, FEW, workers=0)
    assert set(straight.calls) == {FEW.shard}
    for (spec, success, length, goal, trail), expected in zip(summary(results), reference):
        assert (spec, success, length, goal) == expected[:4]
        np.testing.assert_allclose(
            np.frombuffer(trail, np.float32), np.frombuffer(expected[4], np.float32), rtol=0, atol=1e-4
        )


def test_success_is_the_final_one():
    """OGBench's protocol: what counts is success when the episode ends, averaged over tasks, not episodes."""
    result = lambda task, success: evaluation.EpisodeResult(EpisodeSpec(task, 0, 0), success, 1, 0.0, np.zeros(2), None)
    assert success_rate([result(1, True), result(1, True), result(1, True), result(2, False)]) == 0.5


# ---------------------------------------------------------------------------------------------------------- seeds


def test_plan():
    shards = plan(EvalConfig(episodes=10, shard=16), MAZE, 5)
    assert [len(s) for s in shards] == [16, 16, 16, 2]
    specs = [spec for shard in shards for spec in shard]
    assert len({spec.seed for spec in specs}) == 50 and {spec.task for spec in specs} == {1, 2, 3, 4, 5}
    # An episode's seed depends on its task and number, not on how many others there are.
    fewer = [spec for shard in plan(EvalConfig(episodes=3, tasks=(4, 2), shard=2), MAZE, 5) for spec in shard]
    assert set(fewer) <= set(specs)
    other = [spec for shard in plan(EvalConfig(episodes=3, tasks=(4, 2)), "pointmaze-large-v0", 5) for spec in shard]
    assert {s.seed for s in other}.isdisjoint({s.seed for s in fewer})


@pytest.mark.parametrize("environment", [MAZE, "cube-single-v0", "scene-v0", "puzzle-3x3-v0"])
def test_reset_depends_on_the_seed_alone(environment):
    """The trap: reset(seed=...) is not enough, mazes draw from numpy's global generator, arms from their space."""
    first, second = envs.make(environment), envs.make(environment)
    np.random.seed(0)
    a, goal_a = envs.seeded_reset(first, 5, 2)
    np.random.seed(99)
    envs.seeded_reset(second, 6, 1)  # another history
    np.random.rand(17)
    b, goal_b = envs.seeded_reset(second, 5, 2)
    assert np.array_equal(a, b) and np.array_equal(goal_a, goal_b) and a.dtype == np.float32
    c, goal_c = envs.seeded_reset(second, 6, 2)
    assert not (np.array_equal(a, c) and np.array_equal(goal_a, goal_c))
    first.close()
    second.close()


def test_the_trap_is_still_there():
    """If OGBench's own reset becomes reproducible, `seeded_reset` can be simpler: this test says when."""
    env = envs.make(MAZE)
    starts = []
    for state in (0, 1):
        np.random.seed(state)
        starts.append(env.reset(seed=5, options={"task_id": 1})[0])
    assert not np.array_equal(*starts)
    env.close()


@pytest.mark.parametrize("environment", [MAZE, "cube-single-v0"])
def test_episodes_repeat_whatever_the_environment_did_before(environment):
    """Environments are used again for later shards: their past must not show, not even in the solver's warm start."""
    size = 2 if environment == MAZE else 5
    actions = np.random.default_rng(0).uniform(-1, 1, (40, 1, size)).astype(np.float32)
    runner = ShardRunner(environment)
    trails = []
    for seed in (11, 12, 11):
        observation, goal = runner.reset([EpisodeSpec(1, 0, seed)])
        trails.append(np.stack([observation[0], goal[0], *(runner.step(action)[0][0] for action in actions)]))
    assert np.array_equal(trails[0], trails[2]) and not np.array_equal(trails[0], trails[1])


@pytest.mark.parametrize("environment", [MAZE, "cube-single-v0", "scene-v0", "puzzle-3x3-v0"])
def test_a_copy_is_as_good_as_a_new_environment(environment):
    """Bit for bit, while its original and a second copy live other lives in between."""
    original, new = envs.make(environment), envs.make(environment)
    copies = [envs.copy_of(original), envs.copy_of(original)]
    rng = np.random.default_rng(0)
    for task in (1, 2):
        for i, env in enumerate((original, copies[1])):
            envs.seeded_reset(env, 50 + i, 3 + i)
        starts = [envs.seeded_reset(env, 7, task) for env in (copies[0], new)]
        assert all(np.array_equal(a, b) for a, b in zip(*starts))
        for _ in range(25):
            for env in (original, copies[1]):
                env.step(rng.uniform(-1, 1, env.action_space.shape).astype(np.float32))
            action = rng.uniform(-1, 1, new.action_space.shape).astype(np.float32)
            (a, *ends_a, info_a), (b, *ends_b, info_b) = (env.step(action) for env in (copies[0], new))
            assert np.array_equal(a, b) and ends_a == ends_b and info_a["success"] == info_b["success"]


@pytest.mark.parametrize("environment", ["cube-single-v0", "cube-double-v0", "puzzle-3x3-v0", "scene-v0"])
def test_what_copies_share_is_only_painted(environment):
    """Copies share a model where episodes change nothing in it but colours."""
    env = envs.make(environment)
    model = envs.copy_of(env).unwrapped._model
    if environment == "scene-v0":
        assert model is not env.unwrapped._model
        return
    assert model is env.unwrapped._model

    def content() -> dict[str, bytes]:
        names = [name for name in dir(model) if not name.startswith("_") and not name.endswith("rgba")]
        return {n: getattr(model, n).tobytes() for n in names if isinstance(getattr(model, n), np.ndarray)}

    before = content()
    rng = np.random.default_rng(0)
    for task in range(1, envs.num_tasks(env) + 1):
        envs.seeded_reset(env, task, task)
        for _ in range(10):
            env.step(rng.uniform(-1, 1, env.action_space.shape).astype(np.float32))
    assert content() == before


def test_named_streams():
    assert stream_seed(0, "data") == stream_seed(0, "data") < 2**63
    assert len({stream_seed(seed, name) for seed in range(50) for name in ("data", "init", "eval")}) == 150
    assert stream_seed(1, 2, 3) != stream_seed(12, 3) and stream_seed(0, "a", 1) != stream_seed(0, "a/1", 1)
    assert numpy_stream(3, "x").random() == numpy_stream(3, "x").random() != numpy_stream(3, "y").random()
    np.random.seed(1)
    before = np.random.get_state()[1].copy()
    with pytest.raises(KeyError), global_numpy(4):
        first = np.random.rand()
        raise KeyError
    assert (np.random.get_state()[1] == before).all()
    with global_numpy(4):
        assert np.random.rand() == first


def test_unknown_environment():
    with pytest.raises(UserError, match="no environment is called 'pointmaze-tiny-v0'"):
        envs.make("pointmaze-tiny-v0")


# ----------------------------------------------------------------------------------------------------------- rows


def test_rows_of_a_run(tiny_config, tmp_path):
    rng = np.random.default_rng(0)
    episodes = Episodes.from_arrays(
        rng.normal(size=(100, 2)), rng.uniform(-1, 1, (100, 2)), [49, 99], name="maze-like", goal=[0, 1]
    )
    run = train("gcbc", "x", tiny_config("gcbc"), TrainConfig(device="cpu"), run=tmp_path / "r", episodes=episodes,
                quiet=True, preset="tiny")  # fmt: skip
    agent, step = runs.load_agent(run)
    config = EvalConfig(episodes=2, tasks=(1, 3), record=1)
    results = evaluate(agent, MAZE, config, workers=0)
    runs.save_evaluation(run, step, results, MAZE)
    rows = read_rows(run / "episodes.csv")
    assert [(r.task, r.episode) for r in rows] == [(1, 0), (1, 1), (3, 0), (3, 1)]
    assert {(r.run, r.agent, r.preset, r.dataset, r.seed, r.step) for r in rows} == {
        ("r", "gcbc", "tiny", "maze-like", 0, 10)
    }
    assert [(r.env_seed, r.success, r.length) for r in rows] == [
        (x.spec.seed, int(x.success), x.length) for x in results
    ]
    with np.load(run / "rollouts" / "00000010.npz") as rollouts:  # the first episode of each task
        assert rollouts["task"].tolist() == [1, 3] and rollouts["observations"].shape[0] == 2
        assert "maze_map" in rollouts.files
        for i, length in enumerate(rollouts["length"]):
            assert np.isfinite(rollouts["observations"][i, : length + 1]).all()
            assert np.isnan(rollouts["observations"][i, length + 1 :]).all()
    runs.save_evaluation(run, step, results, MAZE)  # the same step again replaces, and does not count twice
    assert len(read_rows(run / "episodes.csv")) == 4


def test_rows_round_trip_and_sort(tmp_path: Path):
    path = tmp_path / "episodes.csv"
    row = EpisodeRow("r", "qhyer", "paper", "d", 0, 100, 2, 1, 77, 1, 123, 0.25)
    add_rows(path, [row, replace(row, task=1)])
    add_rows(path, [replace(row, step=50)])
    add_rows(path, [replace(row, success=0)])  # step 100 evaluated again
    assert read_rows(path) == [replace(row, step=50), replace(row, success=0)]
    with open(path, newline="") as file:
        assert next(csv.reader(file))[:4] == ["run", "agent", "preset", "dataset"]
    assert read_rows(tmp_path / "none.csv") == []


def test_rows_with_returns_and_rows_from_before_there_were_any(tmp_path: Path):
    path = tmp_path / "episodes.csv"
    row = EpisodeRow("r", "qhyer", "paper", "d", 0, 100, 1, 0, 77, 1, 300, 0.25)
    add_rows(path, [row, replace(row, episode=1, return_=123.0)])
    lines = path.read_text().splitlines()
    assert lines[0].endswith(",seconds,return") and lines[1].endswith(",0.25,") and lines[2].endswith(",0.25,123.0")
    path.write_text("".join(line.rsplit(",", 1)[0] + "\n" for line in lines))  # as older versions wrote it
    assert read_rows(path) == [row, replace(row, episode=1)]
    add_rows(path, [replace(row, step=200, return_=7.0)])
    assert [r.return_ for r in read_rows(path)] == [None, None, 7.0]
    path.write_text("run,agent\n")
    with pytest.raises(CorruptFile, match="not a file of episode rows"):
        read_rows(path)


# --------------------------------------------------------------------------------------------------------- Maze2D

UMAZE = "maze2d-umaze-v1"


class Push(Straight):
    """Pushes up and along: in half of the starts it comes by the goal."""

    def act(self, observation, goal, memory):
        return self.gain * (goal - observation)[:, :2], None


@pytest.fixture
def push() -> Push:
    return Push(AgentConfig(), DataSpec(4, 2, (0, 1), (0.0,) * 4, (1.0,) * 4))


def test_maze2d_has_returns_and_success_is_having_been_there(push):
    config = EvalConfig(episodes=12, shard=5)
    results = evaluate(push, UMAZE, config, workers=0)
    assert len(results) == 12 and {r.length for r in results} == {300}
    for result in results[:4]:  # recorded
        near = np.linalg.norm(result.observations[1:, :2] - result.goal[:2], axis=1) <= 0.5
        assert result.returned == near.sum() and result.success == near.any()
    returns = [r.returned for r in results]
    assert 0 < np.mean([r.success for r in results]) < 1 and len(set(returns)) > 2
    assert evaluation.mean_return(results) == np.mean(returns)
    others = evaluate(push, UMAZE, config, workers=2)
    assert summary(others) == summary(results) and [r.returned for r in others] == returns


def test_goal_reaching_tasks_have_no_return(straight):
    results = evaluate(straight, MAZE, replace(FEW, episodes=1, tasks=(1,)), workers=0)
    assert results[0].returned is None and evaluation.mean_return(results) is None


def test_scores_lie_between_the_references(tmp_path, tiny_config):
    from qhyer.data.generate.references import controller, measure, random_policy, returns

    known = references()[UMAZE]
    assert normalised(UMAZE, known["random"]["mean"]) == 0 and normalised(UMAZE, known["controller"]["mean"]) == 100
    assert normalised(MAZE, 1.0) is None and normalised(None, 1.0) is None
    for policy, name in ((random_policy, "random"), (controller, "controller")):  # the stored ones can be made again
        found = returns(UMAZE, policy, 60, 0)
        assert abs(found.mean() - known[name]["mean"]) < 4 * found.std() / 60**0.5
    assert measure(tmp_path / "r.json", episodes=1, seed=1) == 0
    made = json.loads((tmp_path / "r.json").read_text())
    assert set(made["environments"]) == set(references()) and "--episodes 1 --seed 1" in made["command"]
    assert set(made) == {"what", "command", "episodes", "seed", "versions", "environments"}


def test_a_maze2d_run_keeps_returns_and_says_its_score(tiny_config, tmp_path, capsys):
    from qhyer.cli import main
    from qhyer.data import registry
    from qhyer.data.generate import generate

    dataset = registry.get("maze2d-umaze")
    path = generate(dataset, out=tmp_path, episodes=2, workers=1, rows=200, validation=False, progress=False)
    run = train("gcbc", str(path), tiny_config("gcbc"), TrainConfig(device="cpu"), run=tmp_path / "run", quiet=True)
    assert runs.read(run)["environment"] == UMAZE
    with pytest.raises(SystemExit) as stopped:
        main(["eval", str(run), "--episodes", "3", "--workers", "0"])
    assert stopped.value.code == 0
    rows = read_rows(run / "episodes.csv")
    mean = np.mean([row.return_ for row in rows])
    assert len(rows) == 3 and f"return {mean:.1f}, score {normalised(UMAZE, mean):.1f}" in capsys.readouterr().out
    with np.load(run / "rollouts" / "00000010.npz") as rollouts:
        assert rollouts["maze_map"].shape == (5, 5) and rollouts["goals"].shape == (3, 4)


@pytest.mark.parametrize(
    "dataset, environment",
    [
        ("antmaze-large-stitch-v0", "antmaze-large-v0"),
        ("puzzle-4x4-play-v0", "puzzle-4x4-v0"),
        ("antmaze-umaze-v2-hdf5", None),
        ("mine", None),
    ],
)
def test_names_of_ogbench_say_the_environment(dataset, environment):
    assert envs.of_dataset(dataset) == environment


def test_a_run_on_a_file_with_an_ogbench_name_is_evaluated_there(tiny_config, tmp_path):
    """This maze has no registered dataset, and needs none: the file's name says where it belongs."""
    rng = np.random.default_rng(0)
    path = tmp_path / "antmaze-teleport-navigate-v0.npz"
    ends = np.arange(100) % 50 == 49
    np.savez(path, observations=rng.normal(size=(100, 29)), actions=rng.uniform(-1, 1, (100, 8)), terminals=ends)
    run = train("gcbc", str(path), tiny_config("gcbc"), TrainConfig(device="cpu"), run=tmp_path / "run", quiet=True)
    assert runs.read(run)["environment"] is None
    runs.evaluate_run(run, EvalConfig(episodes=1, tasks=(1,)), workers=0, quiet=True)
    (row,) = read_rows(run / "episodes.csv")
    assert row.length == 1000 and row.return_ is None


# ------------------------------------------------------------------------------------------------------- side by side


@pytest.fixture
def learn(tiny_config, tmp_path, monkeypatch):
    """Trains the run r, of a maze whose episodes are short."""
    make, limit, rng = envs.make, gymnasium.wrappers.TimeLimit, np.random.default_rng(0)
    monkeypatch.setattr(envs, "make", lambda environment: limit(make(environment), 20))
    actions = rng.uniform(-1, 1, (100, 2))
    episodes = Episodes.from_arrays(rng.normal(size=(100, 2)), actions, [49, 99], name="maze-like", goal=[0, 1])

    def made(**options) -> Path:
        on_step = options.pop("on_step", None)
        how = TrainConfig(device="cpu", **options)
        return train("gcbc", "x", tiny_config("gcbc"), how, run=tmp_path / "r", episodes=episodes, environment=MAZE,
                     quiet=True, on_step=on_step)  # fmt: skip

    return made


@pytest.fixture
def trained(learn) -> Path:
    return learn()


def meanwhile(monkeypatch, do) -> None:
    """Something else that is done in the middle of the next evaluation."""
    original = runs.evaluate

    def slower(*arguments, **options):
        monkeypatch.setattr(runs, "evaluate", original)
        do()
        return original(*arguments, **options)

    monkeypatch.setattr(runs, "evaluate", slower)


SHORT = dict(workers=0, quiet=True)


@pytest.mark.parametrize("overwrite", [False, True])
def test_of_two_evaluations_of_a_run_side_by_side_the_second_is_refused(trained, monkeypatch, overwrite):
    """The later to end would replace the rows of the other."""
    pytest.importorskip("fcntl")
    refused = []

    def second() -> None:
        told = r"r is being evaluated by another process \(\d+ on .*\): wait until it is done, and then ask again"
        for other in (EvalConfig(episodes=1, tasks=(3,)), EvalConfig(episodes=1, tasks=(1,), seed=3)):
            with pytest.raises(Taken, match=told):
                runs.evaluate_run(trained, other, overwrite=overwrite, **SHORT)
            refused.append(other)
        assert runs.below(trained.parent) == [trained]  # the lock is no run, and hides none

    meanwhile(monkeypatch, second)
    runs.evaluate_run(trained, EvalConfig(episodes=1, tasks=(1, 2)), **SHORT)
    assert [row.task for row in read_rows(trained / "episodes.csv")] == [1, 2] and len(refused) == 2
    assert not list(trained.glob(".*"))
    runs.evaluate_run(trained, EvalConfig(episodes=1, tasks=(1, 2, 3)), **SHORT)  # one after the other, as ever


def test_without_locks_an_evaluation_that_came_meanwhile_is_not_replaced(trained, monkeypatch):
    fcntl = pytest.importorskip("fcntl")

    def none(file, kind) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    one, other = EvalConfig(episodes=1, tasks=(1,)), EvalConfig(episodes=1, tasks=(2,))
    meanwhile(monkeypatch, lambda: runs.evaluate_run(trained, one, **SHORT))
    runs.evaluate_run(trained, one, **SHORT)  # the same episodes: the same rows
    assert [row.task for row in read_rows(trained / "episodes.csv")] == [1]
    meanwhile(monkeypatch, lambda: runs.evaluate_run(trained, other, overwrite=True, **SHORT))
    with pytest.raises(Kept, match="replaces it if it is given --overwrite"):
        runs.evaluate_run(trained, one, **SHORT)
    assert [row.task for row in read_rows(trained / "episodes.csv")] == [2]
    meanwhile(monkeypatch, lambda: runs.evaluate_run(trained, one, overwrite=True, **SHORT))
    runs.evaluate_run(trained, other, overwrite=True, **SHORT)
    assert [row.task for row in read_rows(trained / "episodes.csv")] == [2] and not list(trained.glob(".*"))


def test_a_run_in_training_is_evaluated_by_it_and_by_hand(learn, tmp_path, monkeypatch):
    """While it evaluates itself it is not by hand; while it is, of an earlier update, it does so all the same."""
    pytest.importorskip("fcntl")
    original, by_hand, one = training.evaluate, [], EvalConfig(episodes=1, tasks=(5,))

    def own(*arguments, **options):
        if not by_hand:  # after update 4
            with pytest.raises(Taken, match="is being evaluated"):
                runs.evaluate_run(tmp_path / "r", one, **SHORT)
        by_hand.append("refused")
        return original(*arguments, **options)

    def on_step(step: int) -> None:
        if step == 5:
            held.enter_context(runs.hold_rows(tmp_path / "r"))  # by hand, of update 4

    monkeypatch.setattr(training, "evaluate", own)
    with contextlib.ExitStack() as held:
        run = learn(save_every=4, eval_every=4, eval_episodes=1, on_step=on_step)
    assert {row.step for row in read_rows(run / "episodes.csv")} == {4, 8} and len(by_hand) == 2
    runs.evaluate_run(run, one, **SHORT)  # of the last update
    assert {(row.step, row.task) for row in read_rows(run / "episodes.csv")} >= {(4, 1), (8, 1), (10, 5)}


def test_rows_are_added_one_process_after_the_other(tmp_path, monkeypatch):
    """Of two that read the rows before either has written, one would be lost."""
    pytest.importorskip("fcntl")
    path, original = tmp_path / "episodes.csv", records.read_rows
    row = EpisodeRow("r", "qhyer", "paper", "d", 0, 100, 2, 1, 77, 1, 123, 0.25)
    other = threading.Thread(target=add_rows, args=(path, [replace(row, step=50)]))

    def slower(path: Path):
        monkeypatch.setattr(records, "read_rows", original)
        rows = original(path)
        other.start()
        other.join(0.3)
        return rows

    monkeypatch.setattr(records, "read_rows", slower)
    add_rows(path, [row])
    other.join()
    assert [r.step for r in read_rows(path)] == [50, 100]
    assert [item.name for item in tmp_path.iterdir()] == ["episodes.csv"]
