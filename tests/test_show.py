"""Pictures of a policy: the right episode, whole files of the right size, and a drawing wherever nothing renders."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageSequence

from qhyer import envs, show, views
from qhyer.agent import Agent, AgentConfig
from qhyer.data.episodes import DataSpec
from qhyer.errors import UserError
from qhyer.evaluate import EvalConfig, evaluate
from qhyer.rollout import EpisodeSpec, ShardRunner

MAZE = "pointmaze-medium-v0"


class Straight(Agent):
    """Heads for the goal, and in manipulation stays where it is."""

    Config = AgentConfig

    def __init__(self, width: int, actions: int) -> None:
        super().__init__(AgentConfig(), DataSpec(width, actions, (0, 1), (0.0,) * width, (1.0,) * width))
        self.gain = torch.nn.Parameter(torch.tensor(0.5))

    def stages(self):
        return ()

    def act(self, observation, goal, memory):
        return (self.gain * (goal - observation)).clamp(-1, 1)[:, : self.spec.action_dim], None


@pytest.fixture(scope="module")
def maze() -> show.Episode:
    return show.play(Straight(2, 2), MAZE, task=3, episode=1)


def short(environment: str, task: int = 1, steps: int = 4) -> show.Episode:
    """A few steps with the same action: no policy, no whole episode."""
    runner, spec = ShardRunner(environment), EpisodeSpec(task, 0, 5)
    observation, goal = runner.reset([spec])
    fixed = views.geometry(runner.pool[0])
    actions = np.tile(np.float32([0.5, -0.5, -1.0, 0.3, 1.0]), (steps, 1))
    observations = [observation[0], *(runner.step(action[None])[0][0] for action in actions)]
    return show.Episode(environment, spec, np.stack(observations), actions, goal[0], False, fixed)


@pytest.fixture(scope="module")
def cube() -> show.Episode:
    return short("cube-single-v0")


def test_it_is_the_episode_of_the_evaluation(maze):
    results = evaluate(Straight(2, 2), MAZE, EvalConfig(episodes=2, tasks=(3,), shard=1), workers=0)
    same = results[1]
    assert maze.spec == same.spec and maze.success == same.success
    np.testing.assert_array_equal(maze.observations, same.observations)
    assert len(maze.observations) == len(maze.actions) + 1 == same.length + 1


def test_steps_are_spread_evenly():
    assert show.spread(344, 6) == [0, 69, 138, 206, 275, 344]
    assert show.spread(3, 6) == [0, 1, 2, 3] and show.spread(0, 6) == [0]


def test_a_maze_as_an_animation_and_a_strip(maze, tmp_path):
    gif, png = tmp_path / "a.gif", tmp_path / "a.png"
    assert "drawn" in show.pictures(maze, [gif, png], width=100)
    with Image.open(gif) as image:
        frames = [frame.copy() for frame in ImageSequence.Iterator(image)]
        assert image.size == (100, 100) and 1 < len(frames) <= show.FRAMES and image.info["loop"] == 0
    assert gif.stat().st_size < 200_000
    with Image.open(png) as image:
        assert image.width == 7 * 100 + 6 * 2 and image.height > 100
        pixels = np.asarray(image.convert("RGB"))
    assert (pixels[:100, :100] != pixels[:100, 510:610]).any()  # something has moved
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.gif", "a.png"]


def test_walls_path_and_goal_are_where_they_are(maze):
    """Pixels of the drawing against the maze's own map."""
    frames, _ = show.draw(maze, [len(maze.actions)], 160)
    walls = np.asarray(maze.fixed["maze_map"])
    rows, columns = walls.shape
    height, width = frames[0].shape[:2]
    for i, j in np.argwhere(walls == 1):
        y, x = height - int((i + 0.5) * height / rows), int((j + 0.5) * width / columns)
        assert tuple(frames[0][y, x]) == (0xC3, 0xC8, 0xD0), (i, j)
    unit, offset = float(maze.fixed["maze_unit"]), maze.fixed["maze_offset"]
    x, y = ((maze.goal[:2] + offset) / unit + 0.5) * (width / columns, height / rows)
    around = frames[0][height - int(y) - 4 : height - int(y) + 5, int(x) - 4 : int(x) + 5].reshape(-1, 3)
    assert (np.abs(around.astype(int) - (0xF0, 0xA0, 0x26)).sum(1) < 30).any()  # the star


@pytest.mark.parametrize("environment", ["cube-double-v0", "scene-v0", "puzzle-3x3-v0"])
def test_manipulation_is_drawn_from_observations(environment):
    episode = short(environment, steps=3)
    frames, goal = show.draw(episode, [0, 3], 120)
    assert frames[0].shape == frames[1].shape == goal.shape and frames[0].shape[1] == 120
    assert (frames[0] != frames[1]).any() and (frames[0] != goal).any()


def test_a_cube_is_drawn_where_it_is(cube):
    """From above, right is y and down is x."""
    view = views.View("cube-single-v0", cube.fixed, cube.goal, 300)
    moved = cube.observations[0].copy()
    moved[12:15] = (2.5, 0.0, 3.0)  # the gripper out of the way
    centres = []
    for y in (-2.0, 2.0):
        moved[19:22] = (0.5, y, 0.2)
        pixels = view.draw(moved[None]).astype(int)
        red = np.argwhere(np.abs(pixels - (0xE0, 0x42, 0x4F)).sum(2) < 10)
        centres.append(red.mean(0))
    assert centres[1][1] - centres[0][1] == pytest.approx(0.4 / (2 * view.side) * 300, abs=3)
    assert abs(centres[1][0] - centres[0][0]) < 3


def test_geometry_does_not_depend_on_where_things_are_now():
    env = envs.make("scene-v0")
    kept = []
    for task in (1, 2):  # drawer and window closed, and open
        envs.seeded_reset(env, 3, task)
        kept.append(views.geometry(env))
    for name in ("buttons", "drawer", "window"):
        np.testing.assert_allclose(kept[0][name], kept[1][name], atol=1e-6)


def test_rendered_where_it_can_be(cube, monkeypatch):
    """Either pictures, or the reasons why there are none: never a crash of this process."""
    try:
        frames, goal = show.render(cube, [0, 4], 64)
    except UserError as error:
        assert "--view drawn" in str(error)
        pytest.skip(str(error))
    assert len(frames) == 2 and frames[0].shape == goal.shape == (64, 64, 3)
    assert (frames[0] != frames[1]).any() and (frames[0] != goal).any()


def test_without_a_renderer_it_is_drawn_and_says_why(cube, monkeypatch):
    monkeypatch.setattr(show, "RENDERER", "raise SystemExit('no screen')")
    frames, _, how = show.frames_of(cube, [0, 4], 64, "auto")
    assert len(frames) == 2 and "drawn from the observations: MuJoCo cannot render here" in how and "no screen" in how
    with pytest.raises(UserError, match="no screen"):
        show.frames_of(cube, [0], 64, "rendered")


def test_a_renderer_that_dies_takes_nothing_along(cube, monkeypatch):
    monkeypatch.setattr(show, "renderers", lambda: ["egl"])
    monkeypatch.setattr(show, "RENDERER", "import os; os.abort()")
    with pytest.raises(UserError, match="egl: ended with -6"):
        show.render(cube, [0], 64)


def test_what_to_render_with(monkeypatch):
    monkeypatch.setattr(show.sys, "platform", "linux")
    monkeypatch.setenv("MUJOCO_GL", "disable")
    assert show.renderers() == ["egl", "osmesa"]
    monkeypatch.setenv("MUJOCO_GL", "glfw")
    assert show.renderers() == ["glfw"]


def test_an_environment_that_cannot_be_seen(maze):
    with pytest.raises(UserError, match="no drawing of CartPole-v1"):
        views.View("CartPole-v1", {}, np.zeros(2))
    with pytest.raises(UserError, match="drawn, not rendered"):
        show.frames_of(maze, [0], 64, "rendered")


def test_an_animation_keeps_to_its_limit():
    noise = np.random.default_rng(0).integers(0, 256, (60, 48, 48, 3), dtype=np.uint8)
    free, tight = show.animation(list(noise)), show.animation(list(noise), limit=60_000)
    assert len(tight) < len(free)


@pytest.mark.parametrize(
    "options, words",
    [(dict(out=Path("a.jpg")), "ends in .gif or .png"), (dict(width=2), "width must lie")],
)
def test_bad_options(options, words):
    with pytest.raises(UserError, match=words):
        show.show("nothing", **options)
