"""A policy acts in the units of its data, wherever it acts; so does what is exported, evaluated and shown."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from qhyer import cli, models, rollout, runs, show
from qhyer.agent import Agent, AgentConfig
from qhyer.data.bounds import unscale
from qhyer.data.episodes import DataSpec
from qhyer.evaluate import EvalConfig, Timings, evaluate
from qhyer.policy import Policy

LOW, HIGH = np.float32([-0.05, 0.2, -300.0]), np.float32([0.07, 0.9, 100.0])


def recorded(seed: int = 0) -> dict[str, np.ndarray]:
    """Four walks of ten steps whose actions have units of their own; those of final states are nonsense."""
    rng = np.random.default_rng(seed)
    actions = rng.uniform(LOW, HIGH, (44, 3)).astype(np.float32)
    actions[10::11] = 9999.0
    observations = rng.normal(size=(44, 2)).astype(np.float32)
    return {"observations": observations, "actions": actions, "terminals": np.arange(44) % 11 == 10}


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


def said(text: str) -> str:
    return " ".join(text.split())


WORLD = """
import gymnasium
import numpy as np


class Reach(gymnasium.Env):
    num_tasks = 1
    action_space = gymnasium.spaces.Box(np.float32([-0.05, 0.2, -300.0]), np.float32([0.07, 0.9, 100.0]))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2), {"goal": np.ones(2)}

    def step(self, action):
        assert self.action_space.contains(action), action
        return np.float64(action[:2]), 0.0, False, False, {"success": False}


class Plain(Reach):
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (3,))


for kind in (Reach, Plain):
    gymnasium.register(f"{kind.__name__}-v0", kind, max_episode_steps=3)
"""


class Steady(Agent):
    """Always the same action, in [-1, 1]."""

    Config = AgentConfig

    def __init__(self, config, spec):
        super().__init__(config, spec)
        self.action = torch.nn.Parameter(torch.tensor([0.5, -2.0, 1.0]))

    def stages(self):
        return ()

    def act(self, observation, goal, memory):
        return self.action.detach().expand(len(observation), 3), None


def steady(**bounds: np.ndarray) -> Steady:
    given = {name: tuple(value.tolist()) for name, value in bounds.items()}
    return Steady(AgentConfig(), DataSpec(2, 3, (0, 1), (0.0, 0.0), (1.0, 1.0), **given))


@pytest.fixture
def world(tmp_path, monkeypatch) -> Path:
    (tmp_path / "units_world.py").write_text(WORLD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("units_world", None)


EXPECTED = unscale(np.float32([0.5, -1, 1]), LOW, HIGH)


@pytest.mark.filterwarnings("ignore:.*Overriding environment")
def test_everyone_who_acts_acts_in_the_datas_units(world):
    """A loop of one's own, the evaluation, and the pictures: what the environment is given is the same."""
    agent = steady(action_low=LOW, action_high=HIGH)
    policy = Policy(agent)
    one = policy([0, 0], [1, 1])
    policy.reset()
    several = policy(np.zeros((4, 2)), np.ones((4, 2)))
    assert one.dtype == np.float32 and one.shape == (3,) and np.array_equal(one, EXPECTED)
    assert several.shape == (4, 3) and (several == EXPECTED).all()
    timings = Timings(actions={})
    results = evaluate(agent, "units_world:Reach-v0", EvalConfig(episodes=2, shard=2), workers=0, timings=timings)
    assert [result.length for result in results] == [3, 3]
    assert all(np.array_equal(action, EXPECTED) for taken in timings.actions.values() for action in taken)
    assert np.array_equal(results[0].observations[1:], [EXPECTED[:2]] * 3)
    assert np.array_equal(show.play(agent, "units_world:Reach-v0", task=1).actions, [EXPECTED] * 3)

    timings = Timings(actions={})
    evaluate(steady(), "units_world:Plain-v0", EvalConfig(episodes=1), workers=0, timings=timings)
    assert np.array_equal(next(iter(timings.actions.values())), np.float32([[0.5, -1, 1]] * 3))


def test_environments_with_other_units_are_remarked():
    about = rollout.About(1, 2, None, (3,), (LOW, HIGH))
    assert about.remark("Arm-v0", (LOW, HIGH)) == "" and about.remark("Arm-v0", (LOW, (LOW + HIGH) / 2)) == ""
    plain = about.remark("Arm-v0")
    assert "policies give, and data must have, -1 to 1. Which units do the data's actions have?" in plain
    assert 0 < plain.index("qhyer data convert FILE OUT.npz --scale-actions") < plain.index("RescaleAction(env, -1, 1)")
    one = rollout.About(1, 2, None, (3,), (np.full(3, -1.0), np.ones(3)))
    assert one.remark("Arm-v0") == ""
    remark = one.remark("Arm-v0", (LOW, HIGH))
    assert "from [-1.0] to [1.0]; policies of these data give [-0.05, 0.2, -300.0] to [0.07, 0.9, 100.0]" in remark
    assert one.doubts("Arm-v0", np.zeros(2), np.ones(2), [0], True, (LOW, HIGH)) == [remark]
    fifth = one.remark("Arm-v0", (np.float32([-0.1, 0.5, -0.1]), np.float32([0.2, 0.6, 0.1])))
    assert "give [-0.1, 0.5, -0.1] to [0.2, 0.6, 0.1], as they were recorded, less than a fifth of that" in fifth
    assert one.remark("Arm-v0", (np.float32([-0.1, 0.5, -0.3]), np.float32([0.2, 0.6, 0.3]))) == ""
    free = rollout.About(1, 2, None, (3,), (np.full(3, -np.inf), np.full(3, np.inf)))
    assert free.remark("Arm-v0", (LOW, HIGH)) == ""
    assert "--scale-actions" in free.remark("Arm-v0") and "RescaleAction" not in free.remark("Arm-v0")
    assert "from a space of kind Discrete" in rollout.About(1, 2, None, space="Discrete").remark("Arm-v0")
    tenth = rollout.About(1, 2, None, (1,), (np.array([-0.1]), np.array([0.1])))  # float64, and float32 beside it
    assert tenth.remark("Arm-v0", (np.float32([-0.1]), np.float32([0.1]))) == ""


@pytest.mark.filterwarnings("ignore:.*Overriding environment")
def test_from_a_recording_to_actions_in_its_units(world, capsys):
    np.savez("mine.npz", **recorded())
    bounds = ["--action-low", *LOW.tolist(), "--action-high", *HIGH.tolist()]
    assert run("data", "convert", "mine.npz", "scaled.npz", *bounds) == 0
    tiny = ["--steps", "2", "--agent.hidden", "8", "--agent.batch-size", "4", "--device", "cpu"]
    where = ["--env", "units_world:Reach-v0"]
    assert run("train", "gcbc", "scaled.npz", *tiny, "--out", "run", *where) == 0
    assert "takes actions from" not in said(capsys.readouterr().err)
    spec = json.loads(Path("run/run.json").read_text())["spec"]
    assert np.array_equal(np.float32(spec["action_low"]), LOW)

    agent, _ = runs.load_agent(Path("run"))
    state, goal = np.float32([0.3, -0.2]), np.float32([0.1, 0.4])
    with torch.no_grad():
        raw = agent.act(*(torch.from_numpy(x[None]) for x in (state, goal)), None)[0][0].clamp(-1, 1).numpy()
    assert run("export", "run", "--out", "model", "--dtype", "fp32") == 0
    assert "| actions | in the units of the data, by column: 0: -0.05 to 0.07" in Path("model/README.md").read_text()
    for name in ("run", "model"):
        action = models.policy(name)(state, goal)
        assert np.array_equal(action, unscale(raw, LOW, HIGH)) and (action >= LOW).all() and (action <= HIGH).all()
    few = ["--episodes", "1", "--workers", "0"]
    capsys.readouterr()
    assert run("eval", "run", *few) == 0 and run("eval", "--model", "model", *few) == 0
    assert "note: units_world" not in capsys.readouterr().err
    assert run("eval", "run", "--env", "units_world:Plain-v0", "--overwrite", *few) == 2  # it refuses such actions
    assert "policies of these data give" in said(capsys.readouterr().err)

    assert run("data", "convert", "mine.npz", "other.npz", "--scale-actions") == 0  # other units, another run
    assert run("train", "gcbc", "other.npz", *tiny, "--out", "run") == 2
    assert "is another run" in said(capsys.readouterr().err)
