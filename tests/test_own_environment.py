"""An environment of one's own: evaluated as documented, and every mistake in it told in one line."""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from PIL import Image, ImageSequence

from qhyer import cli, envs, models, rollout, runs, show
from qhyer.agent import Agent, AgentConfig
from qhyer.data.episodes import DataSpec
from qhyer.errors import UserError
from qhyer.evaluate import EvalConfig, evaluate
from qhyer.records import read_rows, write_rows

WORLD = """
import os
import signal

import gymnasium
import numpy as np


class Reach(gymnasium.Env):
    num_tasks = 2
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,))
    goal, extra, limit = np.ones(2), {}, 20

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = np.zeros(2)
        return self.at.copy(), {"goal": self.goal * options["task_id"]}

    def step(self, action):
        self.at += 0.2 * np.asarray(action)
        reached = bool(self.at.sum() > 1.0)
        return self.at.copy(), 0.0, reached, False, {"success": reached}


class NoGoal(Reach):
    def reset(self, **kwargs):
        return super().reset(**kwargs)[0], {}


class NoSuccess(Reach):
    def step(self, action):
        return (*super().step(action)[:4], {})


class ShortGoal(Reach):
    goal = np.ones(1)


class NoActions(Reach):
    action_space = None


class Raises(Reach):
    def step(self, action):
        return 1 / 0


class NotFinite(Reach):
    def step(self, action):
        return (np.full(2, np.nan), *super().step(action)[1:])


class Wide(Reach):
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (3,))


class Endless(Reach):
    limit = None


class Unmade(Reach):
    def __init__(self):
        raise ValueError("no such robot")


class Seen(Reach):
    metadata = {"render_modes": ["rgb_array"]}

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def render(self):
        return np.full((30, 60, 3), 200 * min(1.0, self.at[0]), np.uint8)


class Blank(Seen):
    def render(self):
        return None


class Late(Reach):
    steps = 0

    def step(self, action):
        self.steps += 1
        return super().step(action) if self.steps < 3 else 1 / 0


class NoPlace(Reach):
    goal = np.array([1.0, np.nan])


class Parts(Reach):
    def reset(self, **kwargs):
        at, info = super().reset(**kwargs)
        return {"at": at, "seen": 1}, info


class Leaves(Reach):
    def step(self, action):
        os._exit(3)


class Crashes(Reach):
    def step(self, action):
        os.kill(os.getpid(), signal.SIGSEGV)


class Idle(Reach):
    num_tasks = 0


class Strong(Reach):
    action_space = gymnasium.spaces.Box(-5.0, 5.0, (2,))


class Millimetres(Reach):
    def reset(self, **kwargs):
        at, info = super().reset(**kwargs)
        return at + 500, {"goal": 1000 * info["goal"]}


class Buttons(Reach):
    action_space = gymnasium.spaces.MultiBinary(2)


class Tall(Reach):
    def reset(self, **kwargs):
        super().reset(**kwargs)
        return np.zeros(3), {"goal": np.ones(3)}


every = (Reach, NoGoal, NoSuccess, ShortGoal, NoActions, Raises, NotFinite, Wide, Endless, Unmade, Seen, Blank)
for kind in (*every, NoPlace, Parts, Leaves, Crashes, Idle, Late, Strong, Millimetres, Buttons, Tall):
    gymnasium.register(f"{kind.__name__}-v0", kind, max_episode_steps=kind.limit)
"""

MISTAKES = {
    "own_world:NoGoal-v0": "the info of reset lacks 'goal'",
    "own_world:NoSuccess-v0": "the info of step lacks 'success'",
    "own_world:ShortGoal-v0": r"observations of shape \(2,\) and goals of shape \(1,\)",
    "own_world:NoActions-v0": "has no action_space",
    "own_world:Raises-v0": r"failed: ZeroDivisionError: division by zero \(own_world.py:\d+\)",
    "own_world:NotFinite-v0": r"own_world:NotFinite-v0: the observation is not finite \(nan in column 0\) at step 1 of",
    "own_world:NoPlace-v0": r"goal is not finite \(nan in column 1\) at the reset of task 1, seed \d+",
    "own_world:Parts-v0": "observations must be vectors of numbers, .* of kind dict with at, seen: wrap it",
    "own_world:Idle-v0": "it needs one task or more",
    "own_world:Endless-v0": "without max_episode_steps",
    "own_world:Unmade-v0": r"cannot be made: ValueError: no such robot \(own_world.py:\d+\)",
    "own_world:Other-v0": r"no environment is called .*: own_world \(.*\) registers Reach-v0, NoGoal-v0",
    "./own_world.py:Reach-v0": "give the module's name, not its file: --env own_world:Reach-v0$",
    "there/own_world.py:Reach-v0": "--env own_world:Reach-v0, from there or with",
    "no_such_world:Reach-v0": "its module cannot be imported",
}
FEW = EvalConfig(episodes=2, shard=2)
pytestmark = pytest.mark.filterwarnings("ignore:.*Overriding environment")


class Ahead(Agent):
    """Goes on, whatever it sees."""

    Config = AgentConfig

    def __init__(self, config, spec):
        super().__init__(config, spec)
        self.pace = torch.nn.Parameter(torch.ones(()))

    def stages(self):
        return ()

    def act(self, observation, goal, memory):
        return self.pace.expand(len(observation), 2), None


@pytest.fixture
def ahead() -> Ahead:
    return Ahead(AgentConfig(), DataSpec(2, 2, (0, 1), (0.0, 0.0), (1.0, 1.0)))


@pytest.fixture
def world(tmp_path, monkeypatch) -> Path:
    (tmp_path / "own_world.py").write_text(WORLD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("own_world", None)


@pytest.mark.parametrize("workers", [0, 1])
def test_it_is_evaluated(world, ahead, workers):
    results = evaluate(ahead, "own_world:Reach-v0", FEW, workers=workers)
    assert [(result.success, result.length) for result in results] == [(True, 3)] * 4


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("environment", MISTAKES)
def test_a_mistake_is_told_in_a_line(world, ahead, environment, workers):
    with pytest.raises(UserError, match=MISTAKES[environment]):
        evaluate(ahead, environment, FEW, workers=workers)


def test_one_whose_name_is_python_s_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("json.py").write_text(WORLD)
    with pytest.raises(UserError, match=r"json is .*json.__init__.py, not .*json.py: give that another name"):
        envs.make("json:Nobody-v0")


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("name", "words"), [("Leaves", "exit code 3"), ("Crashes", r"signal 11 \(SIGSEGV\)")])
def test_one_that_ends_its_process(world, ahead, name, words, workers):
    with pytest.raises(UserError, match=f"own_world:{name}-v0: a process that steps it died .*{words}"):
        evaluate(ahead, f"own_world:{name}-v0", FEW, workers=workers)


def test_it_is_looked_at_before_training(world, capsys):
    arrays = dict(observations=np.random.default_rng(0).normal(size=(40, 2)), actions=np.zeros((40, 2)))
    np.savez("mine.npz", **arrays, terminals=np.arange(40) % 10 == 9)
    tiny = ["--steps", "2", "--agent.hidden", "8", "--agent.batch-size", "4", "--device", "cpu", "--out", "run"]
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "gcbc", "mine.npz", *tiny, "--env", "own_world:Unmade-v0"])
    assert ended.value.code == 2 and not Path("run").exists()
    assert "no such robot" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:  # steps, and breaks some steps later: what was trained is kept
        cli.main(["train", "gcbc", "mine.npz", *tiny, "--env", "own_world:Late-v0", "--eval-every", "1"])
    assert ended.value.code == 2 and Path("run/checkpoints/00000001").is_dir()
    assert "The update is saved" in " ".join(capsys.readouterr().err.split())
    Path("sweep.toml").write_text(
        'out = "swept"\ndatasets = ["mine.npz"]\nenvironment = "own_world:Unmade-v0"\n[[grid]]\nagents = ["gcbc"]\n'
    )
    with pytest.raises(SystemExit) as ended:
        cli.main(["sweep", "sweep.toml", "--dry-run"])
    assert ended.value.code == 2


def test_actions_of_another_size(world, capsys):
    arrays = dict(observations=np.random.default_rng(0).normal(size=(40, 2)), actions=np.zeros((40, 2)))
    np.savez("mine.npz", **arrays, terminals=np.arange(40) % 10 == 9)
    tiny = ["--steps", "1", "--agent.hidden", "8", "--agent.batch-size", "4", "--device", "cpu", "--out", "run"]
    with pytest.raises(SystemExit):
        cli.main(["train", "gcbc", "mine.npz", *tiny])
    with pytest.raises(SystemExit) as ended:
        cli.main(["eval", "run", "--env", "own_world:Wide-v0", "--workers", "0"])
    assert ended.value.code == 2 and "takes actions of shape (3,)" in " ".join(capsys.readouterr().err.split())
    short = ["--episodes", "2", "--workers", "0"]
    with pytest.raises(SystemExit):
        cli.main(["eval", "run", "--env", "own_world:Reach-v0", *short])
    for other in (["--seed", "1"], ["--tasks", "1", "--episodes", "9"]):  # not the same episodes: not replaced unasked
        with pytest.raises(SystemExit) as ended:
            cli.main(["eval", "run", "--env", "own_world:Reach-v0", *short, *other])
        assert ended.value.code == 2 and "replaces it if it is given --overwrite" in " ".join(
            capsys.readouterr().err.split()
        )


def test_a_check_says_what_there_is(world):
    about = rollout.check("own_world:Reach-v0")
    assert (about.tasks, about.observation_dim, about.action_shape) == (2, 2, (2,))
    assert about.remark("Reach-v0") == ""


@pytest.fixture
def tiny(world) -> list[str]:
    """A training of nearly nothing on data that fit Reach, into the folder `run`."""
    arrays = dict(observations=np.random.default_rng(0).normal(size=(40, 2)), actions=np.zeros((40, 2)))
    np.savez("mine.npz", **arrays, terminals=np.arange(40) % 10 == 9)
    small = ["--steps", "2", "--agent.hidden", "8", "--agent.batch-size", "4", "--device", "cpu", "--out", "run"]
    return ["train", "gcbc", "mine.npz", *small]


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    return int(ended.value.code or 0)


@pytest.mark.parametrize(
    "environment, words", [("own_world:Wide-v0", "shape (3,)"), ("own_world:Tall-v0", "observations of 3 numbers")]
)
def test_it_must_fit_the_data_before_anything_is_trained(tiny, environment, words, capsys):
    assert call(*tiny, "--env", environment) == 2
    assert words in " ".join(capsys.readouterr().err.split()) and not Path("run").exists()


def test_wider_actions_are_remarked(tiny, capsys):
    assert call(*tiny, "--env", "own_world:Strong-v0") == 0
    assert "takes actions from [-5.0] to [5.0]; policies give" in " ".join(capsys.readouterr().err.split())
    assert call("eval", "run", "--episodes", "1", "--workers", "0") == 0
    assert "takes actions from [-5.0] to [5.0]; policies give" in " ".join(capsys.readouterr().err.split())


def test_bounds_are_told_column_by_column():
    ends = (np.array([-2.0, -3.0]), np.array([2.0, 3.0]))
    assert "from [-2.0, -3.0] to [2.0, 3.0]" in rollout.About(1, 2, None, (2,), ends).remark("Arm-v0")


def test_what_does_not_look_like_the_data_is_told():
    low, high = np.array([0.0, -1.0, 0.0]), np.array([1.0, 1.0, 2.0])
    starts, goals = np.full((4, 3), 0.5), np.array([[x, 0.0, 0.0] for x in (0.1, 0.2, 0.3, 0.4)])
    same = rollout.About(1, 3, None, seen=(starts, goals))
    assert "in all columns that are not the goal's (1, 2)" in same.doubts("Arm-v0", low, high, [0], True)[0]
    assert same.doubts("Arm-v0", low, high, [0], False) == []
    varied = rollout.About(1, 3, None, seen=(starts, goals + np.arange(4)[:, None] / 10))
    assert varied.doubts("Arm-v0", low, high, [0], True) == []
    far = rollout.About(1, 3, None, seen=(starts * [1, 20, 1], goals))
    assert "column 1 is 10, in the data -1 to 1" in far.doubts("Arm-v0", low, high, [0], False)[0]


def test_goals_far_from_the_data_are_told_where_they_are_read():
    low, high = np.array([0.0, -1.0, 0.3]), np.array([1.0, 1.0, 0.3])
    starts = np.full((4, 3), 0.3) + np.float32(1e-6)  # a column that never changes, but for rounding
    goals = starts * [1, -100, 1] + np.arange(4)[:, None] / 1e4
    about = rollout.About(1, 3, None, seen=(starts, goals))
    (note,) = about.doubts("Arm-v0", low, high, [0], True)
    assert "goals of Arm-v0 are far from the data: column 1 is -30, in the data -1 to 1." in note
    assert about.doubts("Arm-v0", low, high, [0], False) == []
    assert "column 1 is -30" in about.doubts("Arm-v0", low, high, [1, 0], False)[0]
    last = rollout.About(1, 3, None, seen=(starts, np.where(np.arange(4)[:, None] == 3, 1000 * starts, starts)))
    (note,) = last.doubts("Arm-v0", low, high, [0], False)  # of one task: it is that one's number
    assert "column 0 is 300, in the data 0 to 1." in note
    (note, *_) = rollout.About(1, 3, None, seen=(1000 * starts, starts)).doubts("Arm-v0", low, high, [0], False)
    assert "column 2 is 300" in note and "more" not in note


FEW_OPTIONS = ["--episodes", "1", "--workers", "0"]


def test_whoever_names_the_environment_is_told_what_training_tells(tiny, capsys):
    """Training, evaluations of a run, of a folder of runs and of a model, and pictures: the same notes, each once."""
    elsewhere = ["--env", "own_world:Millimetres-v0"]

    def notes(*arguments: str) -> list[str]:
        capsys.readouterr()
        assert call(*arguments) == 0
        lines = capsys.readouterr().err.splitlines()
        return [line for line in lines if line.startswith("note: ") and "own_world" in line]

    told = notes(*tiny, *elsewhere)
    assert ["far from the data" in note for note in told] == [True, True]
    assert "starts" in told[0] and "goals" in told[1]
    shutil.move("run", "trained")
    assert notes(*tiny[:-1], "runs/one") == notes(*tiny[:-1], "runs/two", "--seed", "1") == []
    assert notes("eval", "runs", *elsewhere, *FEW_OPTIONS) == told
    assert notes("export", "runs/one", "--out", "model") == []
    assert notes("eval", "--model", "model", "--out", "rows", *elsewhere, *FEW_OPTIONS) == told
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(show, "pictures", lambda played, files, *_: files[0].touch())  # it renders nothing
        for name in ("runs/one", "model"):
            assert notes("show", name, "--out", "a.gif", *elsewhere) == told
    for arguments in (["eval", "trained"], ["eval", "--model", "model", "--out", "rows", "--overwrite", *elsewhere]):
        assert notes(*arguments, *FEW_OPTIONS) == told  # its own environment, and again
    assert notes("eval", "runs", "--env", "own_world:Reach-v0", "--overwrite", *FEW_OPTIONS) == []


def test_ranges_of_the_data_are_kept_and_may_be_missing(tiny, capsys):
    """In run.json and model.json, column by column. What was written without them gets no comparison."""
    assert call(*tiny) == 0 and call("export", "run", "--out", "model") == 0
    with np.load("mine.npz") as arrays:
        observations = np.float32(arrays["observations"])
    for kept in (runs.read(Path("run"))["data"], models.read(Path("model"))["data"]):
        assert np.array_equal(np.float32(kept["low"]), observations.min(0))
        assert np.array_equal(np.float32(kept["high"]), observations.max(0))
    info = runs.read(Path("run"))
    del info["data"]["low"], info["data"]["high"]
    Path("run/run.json").write_text(json.dumps(info))
    capsys.readouterr()
    assert call("eval", "run", "--env", "own_world:Millimetres-v0", *FEW_OPTIONS) == 0
    assert call("export", "run", "--out", "old") == 0
    assert call("eval", "--model", "old", "--env", "own_world:Millimetres-v0", *FEW_OPTIONS) == 0
    assert "far from the data" not in capsys.readouterr().err
    assert call(*tiny) == 0 and runs.read(Path("run"))["data"] == info["data"]  # finished: left as it is


def test_the_environment_of_the_dataset_is_not_compared(ahead):
    about = rollout.About(1, 2, None)
    info = {"dataset": "pointmaze-medium-navigate-v0", "data": {"low": [0, 0], "high": [1, 1]}}

    def far(specs):
        return np.full((1, 2), 99.0), np.full((1, 2), 99.0)

    assert runs.notes_on(info, ahead, "pointmaze-medium-v0", about, far) == []
    assert len(runs.notes_on(info, ahead, "pointmaze-large-v0", about, far)) == 2
    assert len(runs.notes_on({**info, "dataset": "mine"}, ahead, "pointmaze-medium-v0", about, far)) == 2


def test_actions_from_no_box_are_told(tiny, capsys):
    assert call(*tiny, "--env", "own_world:Buttons-v0") == 0 and call("eval", "run", *FEW_OPTIONS) == 0
    assert " ".join(capsys.readouterr().err.split()).count("takes actions from a space of kind MultiBinary") == 2


def test_a_check_takes_a_step(tiny, capsys):
    """An environment that fails in its first step is known before anything is trained."""
    assert call(*tiny, "--env", "own_world:NoSuccess-v0") == 2
    assert "the info of step lacks 'success'" in " ".join(capsys.readouterr().err.split()) and not Path("run").exists()


def test_own_data_say_what_is_read_of_a_goal(tiny, capsys):
    assert call(*tiny, "--goal", "0") == 0
    assert "but gcbc reads a goal's other columns, too" in " ".join(capsys.readouterr().err.split())
    small = [*tiny[2:5], "--preset", "demo", "--device", "cpu", "--agent.batch-size", "4", "--agent.width", "8"]
    for extra, told in (([], "coordinates reads the goal's alone"), (["coordinates"], "and qhyer reads those")):
        options = ["--agent.goal-input", *extra] if extra else []
        assert call("train", "qhyer", *small, "--goal", "0", *options, "--out", "".join(["q", *extra])) == 0
        assert told in " ".join(capsys.readouterr().err.split())


def test_what_is_read_of_a_goal_can_be_chosen(tiny, capsys):
    """Told, chosen, or refused with a reason; sequence models and TRL read coordinates as they are."""
    assert call(*tiny, "--goal", "0") == 0
    assert "--agent.goal-input coordinates reads the goal's alone" in " ".join(capsys.readouterr().err.split())
    chosen = ["--agent.goal-input", "coordinates", "--out", "part"]
    assert call(*tiny, "--goal", "0", *chosen) == 0
    assert "and gcbc reads those of a goal alone" in " ".join(capsys.readouterr().err.split())
    seen = [models.policy(run)([0.5, 0.5], [0.1, other]).tolist() for run in ("part", "run") for other in (0, 9)]
    assert seen[0] == seen[1] and seen[2] != seen[3]
    small = [*tiny[2:5], "--agent.hidden", "8", "--agent.batch-size", "4", "--device", "cpu", "--goal", "0"]
    assert call("train", "qrl", *small, *chosen) == 2
    assert "goal_input can only be observation here: its distance" in " ".join(capsys.readouterr().err.split())
    for agent, told in (("qrl", "as in the data (its distance is one"), ("trl", "and trl reads those of a goal alone")):
        nets = ["--agent.value-hidden", "8", "--out", agent]
        assert call("train", agent, *small, *nets) == 0
        assert told in " ".join(capsys.readouterr().err.split())
    assert call("train", "rvs", *small, "--out", "rvs") == 0
    assert "and rvs reads those of a goal alone" in " ".join(capsys.readouterr().err.split())


def test_an_evaluation_says_how_each_task_went(tiny, capsys):
    """In a line of its own, below the mean's, which is as it was; of one task there is nothing more to say."""
    assert call(*tiny, "--env", "own_world:Reach-v0") == 0 and call("export", "run", "--out", "model") == 0

    def printed(*arguments: str) -> list[str]:
        capsys.readouterr()
        assert call("eval", *arguments, "--workers", "0", "--overwrite") == 0
        lines = capsys.readouterr().out.splitlines()
        return [line for line in lines if not line.startswith("evaluating")]

    assert printed("run", "--episodes", "2") == ["run: success 0.0 %", "  tasks 1: 0.0 %, 2: 0.0 %"]
    rows = read_rows(Path("run/episodes.csv"))
    write_rows(Path("run/episodes.csv"), [replace(row, success=int(row.task + row.episode == 2)) for row in rows])
    assert runs.task_text(Path("run")) == "tasks 1: 50.0 %, 2: 50.0 %" and runs.task_text(Path("run"), 1) == ""
    assert printed("run", "--tasks", "2") == ["run: success 0.0 %"]
    assert printed("--model", "model", "--out", "rows")[1:] == ["  tasks 1: 0.0 %, 2: 0.0 %"]


def test_a_run_gets_its_environment_once(tiny, capsys):
    assert call(*tiny) == 0 and runs.read(Path("run"))["environment"] is None
    assert call(*tiny, "--env", "own_world:Reach-v0") == 0
    assert runs.read(Path("run"))["environment"] == "own_world:Reach-v0"
    capsys.readouterr()
    assert call("eval", "run", "--episodes", "1", "--workers", "0") == 0
    assert call("report", "run", "--out", "page") == 0 and "was evaluated in" not in capsys.readouterr().out
    assert call(*tiny, "--env", "own_world:Seen-v0") == 0
    assert runs.read(Path("run"))["environment"] == "own_world:Reach-v0"
    assert "stays a run of own_world:Reach-v0" in " ".join(capsys.readouterr().err.split())


def test_a_run_stays_where_it_began(tiny):
    """Also for the evaluations of a training that goes on."""
    often = ["--save-every", "1", "--keep", "2"]
    assert call(*tiny, *often, "--env", "own_world:Reach-v0") == 0
    shutil.rmtree("run/checkpoints/00000002")
    elsewhere = ["--env", "own_world:Seen-v0", "--eval-every", "2", "--eval-episodes", "1"]
    assert call(*tiny, *often, "--resume", *elsewhere) == 0
    assert runs.read(Path("run"))["environment"] == "own_world:Reach-v0"
    assert {row.environment for row in read_rows(Path("run/episodes.csv"))} == {""}


def test_a_refused_training_settles_nothing(tiny):
    assert call(*tiny, "--save-every", "1", "--keep", "2") == 0
    shutil.rmtree("run/checkpoints/00000002")
    before = Path("run/run.json").read_bytes()
    assert call(*tiny, "--save-every", "1", "--keep", "2", "--env", "own_world:Reach-v0") == 2
    assert Path("run/run.json").read_bytes() == before


def test_runs_of_two_environments_are_not_averaged(tiny, capsys):
    """Whether they were trained for two, or a model is evaluated at home and elsewhere."""
    few = ["--episodes", "1", "--workers", "0"]
    for name in ("Reach", "Seen"):
        assert call(*tiny[:-1], name, "--env", f"own_world:{name}-v0") == 0 and call("eval", name, *few) == 0
    capsys.readouterr()
    assert call("report", "Reach", "Seen", "--out", "page") == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "environment=own_world:Reach-v0" in output and "environment=own_world:Seen-v0" in output
    assert call("export", "Reach", "--out", "model") == 0
    assert call("eval", "--model", "model", "--out", "home", *few) == 0
    assert call("eval", "--model", "model", "--out", "away", "--env", "own_world:Seen-v0", *few) == 0
    assert {row.environment for row in read_rows(Path("away/episodes.csv"))} == {"own_world:Seen-v0"}
    assert {row.environment for row in read_rows(Path("home/episodes.csv"))} == {""}


def test_scores_of_another_environment_are_told_apart(tiny, capsys):
    """In rows, report and model; an evaluation at home leaves no trace of it."""
    few = ["--episodes", "1", "--workers", "0"]
    assert call(*tiny, "--env", "own_world:Reach-v0") == 0
    assert call("eval", "run", *few) == 0
    assert "environment" not in Path("run/episodes.csv").read_text().splitlines()[0]
    shutil.copytree("run", "other")
    assert call("eval", "other", *few, "--env", "own_world:Seen-v0", "--overwrite") == 0
    assert {row.environment for row in read_rows(Path("other/episodes.csv"))} == {"own_world:Seen-v0"}
    capsys.readouterr()
    assert call("report", "run", "other", "--out", "page") == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "environment=own_world:Seen-v0" in output and "each counts as a seed" not in output
    assert "was evaluated in own_world:Seen-v0, not in own_world:Reach-v0" in output
    assert call("export", "other", "--out", "model") == 0 and call("export", "run", "--out", "home") == 0
    assert json.loads(Path("model/model.json").read_text())["scores"]["environment"] == "own_world:Seen-v0"
    assert "Measured in own_world:Seen-v0." in Path("model/README.md").read_text()
    assert "environment" not in json.loads(Path("home/model.json").read_text())["scores"]
    assert call("eval", "other", *few, "--overwrite") == 0
    assert Path("other/episodes.csv").read_text().splitlines()[0].endswith(",return")


def test_it_is_shown_as_it_renders_itself(world, ahead):
    played = show.play(ahead, "own_world:Seen-v0", task=1)
    how = show.pictures(played, [world / "a.gif", world / "a.png"], width=40)
    assert how == "rendered by the environment"
    frames = [np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(Image.open(world / "a.gif"))]
    assert [frame.shape for frame in frames] == [(20, 40, 3)] * 4  # as wide as asked for, at its own proportions
    assert [int(frame.mean()) // 20 for frame in frames] == [0, 2, 4, 6]  # 0, 40, 80, 120
    strip = Image.open(world / "a.png")
    assert strip.width == 4 * 40 + 3 * 2  # four moments, and no picture of the goal


def test_one_that_does_not_render(world, ahead, monkeypatch):
    with pytest.raises(UserError, match=r"Reach-v0 cannot be rendered .*render_mode"):
        show.pictures(show.play(ahead, "own_world:Reach-v0", task=1), [world / "a.gif"])
    first = show.renderers()[:1]
    monkeypatch.setattr(show, "renderers", lambda: first)  # each is a process
    with pytest.raises(UserError, match=r"render\(\) gave nothing, not bytes of shape"):
        show.pictures(show.play(ahead, "own_world:Blank-v0", task=1), [world / "a.gif"])
    assert not list(world.glob("*.gif"))


def documented() -> str:
    """The environment of docs/protocol.md, as it stands there."""
    page = (Path(__file__).parents[1] / "docs" / "protocol.md").read_text(encoding="utf-8")
    return page.split("\n## Your own environment\n")[1].split("```python\n")[1].split("```")[0]


def test_the_documented_environment_runs_as_it_stands(tmp_path, monkeypatch, capsys):
    """Data of it by pushing at random, a training, an evaluation: no mistake, and no note on starts or actions."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("reach.py").write_text(documented())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*already in registry")  # other tests' Reach
        checked = gymnasium.make("reach:Reach-v0", render_mode="rgb_array")
        checked.reset(seed=0, options={"task_id": 1})
        checked.step(checked.action_space.sample())
    assert checked.render().shape == (100, 100, 3)
    env = checked.unwrapped
    rng, rows = np.random.default_rng(0), []
    for episode in range(4):
        state, info = env.reset(seed=episode, options={"task_id": 1 + episode % 2})
        assert info["goal"].shape == state.shape == env.observation_space.shape
        push = rng.uniform(-1, 1, 2)
        for _ in range(30):
            rows.append((state, action := np.clip(push + rng.normal(0, 0.5, 2), -1, 1)))
            state, *_ = env.step(action)
    observations, actions = map(np.stack, zip(*rows))
    np.savez("mine.npz", observations=observations, actions=actions, terminals=np.arange(120) % 30 == 29)
    small = ["--steps", "2", "--agent.hidden", "8", "--agent.batch-size", "4", "--device", "cpu", "--out", "run"]
    own = ["--goal", "0", "1", "--agent.goal-input", "coordinates", "--env", "reach:Reach-v0"]
    assert call("train", "gcbc", "mine.npz", *small, *own) == 0 and call("eval", "run", *FEW_OPTIONS) == 0
    assert "note: reach" not in capsys.readouterr().err
    assert call("show", "run", "--out", "a.gif") == 0 and Path("a.gif").is_file()
    to_goal = np.array([-1.0, 1.0])  # of task 2
    env.reset(seed=0, options={"task_id": 2})
    assert any(env.step(to_goal)[4]["success"] for _ in range(20))
    sys.modules.pop("reach", None)
