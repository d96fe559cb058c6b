"""A policy at work, as a picture: one episode as an animation (GIF) and as a strip of moments (PNG).

Manipulation is rendered by MuJoCo where that works without a screen, in a process of its own: which OpenGL to use is
decided when the simulator is imported, and a broken one may end the process. Where none works, and for mazes, the
view is drawn from the observations (views.py). An environment of one's own shows what its `render` gives.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from qhyer import envs, views
from qhyer.errors import UserError, require
from qhyer.rollout import EpisodeSpec, ShardRunner, describe
from qhyer.storage import atomic_file

if TYPE_CHECKING:
    from qhyer.agent import Agent

FRAMES = 80  # of an animation: longer episodes skip steps
MOMENTS = 6  # of a strip, besides the goal
LIMIT = 1_000_000  # bytes of a GIF
RENDERER = "from qhyer.show import render_main; render_main()"

Kind = Literal["auto", "rendered", "drawn"]


@dataclass(frozen=True)
class Episode:
    """One episode, with all that is needed to see it again."""

    environment: str
    spec: EpisodeSpec
    observations: np.ndarray  # (length + 1, d_s)
    actions: np.ndarray  # (length, d_a)
    goal: np.ndarray
    success: bool
    fixed: dict[str, np.ndarray]
    """what stands still (`views.geometry`)"""


def play(
    agent: Agent,
    environment: str,
    task: int,
    episode: int = 0,
    seed: int = 0,
    info: Mapping[str, Any] | None = None,
) -> Episode:
    """An episode of the evaluation's plan, alone in its batch: the same start and goal as in the rows. Where the run's
    or the model's `info` is given, notes are printed on what of the environment does not look like its data."""
    import torch

    from qhyer import runs
    from qhyer.evaluate import EvalConfig, evaluation_mode, plan

    require(episode >= 0, "episodes are numbered from 0")
    runner = ShardRunner(environment)
    about = describe(environment, runner.template)
    about.require(environment, agent.spec.observation_dim, agent.spec.action_dim)
    config = EvalConfig(episodes=episode + 1, tasks=(task,), seed=seed, shard=1)
    spec = plan(config, environment, about.tasks)[episode][0]
    if info is not None:
        runs.tell(runs.notes_on(info, agent, environment, about, runner.reset))
    observation, goal = runner.reset([spec])
    env = runner.pool[0]
    fixed = views.geometry(env) if views.drawable(environment) else {}
    observations, actions, memory, ended, success = [observation[0]], [], None, False, False
    with evaluation_mode(agent) as device:
        goals = torch.from_numpy(goal).to(device)
        while not ended:
            action, memory = agent.act(torch.from_numpy(observation).to(device), goals, memory)
            actions.append(agent.spec.own_units(action.clamp(-1.0, 1.0).float().cpu().numpy())[0])
            observation, over, reached = runner.step(actions[-1][None])
            observations.append(observation[0])
            ended, success = bool(over[0]), bool(reached[0])
    return Episode(environment, spec, np.stack(observations), np.stack(actions), goal[0], success, fixed)


# ---------------------------------------------------------------------------------------------------------- frames


def spread(length: int, count: int) -> list[int]:
    """At most `count` of the steps 0 ... length, evenly, the first and the last among them."""
    return sorted({round(i) for i in np.linspace(0, length, min(count, length + 1))})


def draw(episode: Episode, steps: list[int], width: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Frames at these steps and the goal, from the observations."""
    view = views.View(episode.environment, episode.fixed, episode.goal, width)
    return [view.draw(episode.observations[: step + 1]) for step in steps], view.draw(episode.goal[None])


def renderers() -> list[str]:
    """What to try as MUJOCO_GL: what the user has set, or what works without a screen."""
    given = os.environ.get("MUJOCO_GL", "").lower()
    if given not in ("", "disable", "disabled", "off", "false", "0"):
        return [given]
    return {"darwin": ["cgl"], "win32": ["wgl"]}.get(sys.platform, ["egl", "osmesa"])


def render(episode: Episode, steps: list[int], width: int) -> tuple[list[np.ndarray], np.ndarray | None]:
    """Frames at these steps and the goal (None if the environment has no picture of it), by the environment itself;
    `UserError` with the reasons where no renderer works."""
    reasons = []
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    with tempfile.TemporaryDirectory() as folder:
        asked, answer = Path(folder) / "asked.npz", Path(folder) / "answer.npz"
        np.savez(
            asked,
            environment=episode.environment,
            seed=episode.spec.seed,
            task=episode.spec.task,
            observations=episode.observations,
            actions=episode.actions,
            steps=steps,
            width=width,
        )
        for name in renderers():
            try:
                done = subprocess.run(
                    [sys.executable, "-P", "-c", RENDERER, str(asked), str(answer)],
                    env={**os.environ, "MUJOCO_GL": name, "PYTHONPATH": path},
                    capture_output=True,
                    text=True,
                    timeout=120 + 5 * len(steps),
                )
            except subprocess.TimeoutExpired:
                reasons.append(f"{name}: no answer in time")
                continue
            if done.returncode == 0 and answer.is_file():
                with np.load(answer) as arrays:
                    return list(arrays["frames"]), arrays.get("goal")
            last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "")
            reasons.append(f"{name}: {last.strip() or f'ended with {done.returncode}'}")
    if not views.drawable(episode.environment):
        own = [reason.partition(": ")[2] for reason in reasons]  # whatever OpenGL was tried
        raise UserError(
            f"{episode.environment} cannot be rendered ({'; '.join(dict.fromkeys(own))}); it has to take "
            'render_mode="rgb_array" and then give frames from render(), as docs/protocol.md says under '
            "'Your own environment'"
        )
    raise UserError(
        f"MuJoCo cannot render here ({'; '.join(reasons)}); install EGL or OSMesa, set MUJOCO_GL to what there is, "
        "or use --view drawn"
    )


def render_main() -> None:
    """The renderer's process: plays the recorded actions again and takes pictures."""
    os.environ.pop("MUJOCO_GL") if os.environ.get("MUJOCO_GL") in ("cgl", "wgl") else None  # the platform's own
    import gymnasium
    import ogbench  # noqa: F401  (registers its environments)

    class WithGoal(gymnasium.Wrapper):
        """Asks for a picture of the goal, too, which the environment takes during the reset."""

        picture: np.ndarray | None = None

        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            observation, info = super().reset(seed=seed, options={**(options or {}), "render_goal": True})
            self.picture = info.get("goal_rendered")
            return observation, info

    with np.load(sys.argv[1]) as arrays:
        given = dict(arrays)
    environment, size = str(given["environment"]), int(given["width"])
    theirs = {"width": size, "height": size} if views.drawable(environment) else {}
    made = gymnasium.make(environment, disable_env_checker=True, render_mode="rgb_array", **theirs)
    env = WithGoal(made)
    observation, _ = envs.seeded_reset(env, int(given["seed"]), int(given["task"]))
    wanted, frames = {int(step) for step in given["steps"]}, []
    for step in range(len(given["observations"])):
        if step > 0:
            observation = env.step(given["actions"][step - 1])[0]
        if not np.allclose(observation, given["observations"][step], atol=1e-4):
            raise RuntimeError(f"the episode went another way at step {step}")
        if step in wanted:
            frames.append(_picture(env.render(), size))
    made_of = {"frames": np.stack(frames)}
    if env.picture is not None:
        made_of["goal"] = _picture(env.picture, size, frames[0].shape[0])
    with open(sys.argv[2], "wb") as file:
        np.savez(file, **made_of)  # type: ignore[arg-type]


def _picture(frame: Any, width: int, height: int | None = None) -> np.ndarray:
    """What an environment has rendered, as wide as it was asked for, at its own proportions if no height is given:
    (height, width, 3) bytes."""
    from PIL import Image

    pixels = np.asarray(frame)
    if pixels.ndim != 3 or pixels.shape[-1] != 3 or pixels.dtype != np.uint8:
        what = "nothing" if frame is None else f"{pixels.dtype} of shape {pixels.shape}"
        raise TypeError(f"render() gave {what}, not bytes of shape (height, width, 3)")
    height = height or max(1, round(pixels.shape[0] * width / pixels.shape[1]))
    if pixels.shape[:2] == (height, width):
        return pixels
    return np.asarray(Image.fromarray(pixels).resize((width, height)))


def frames_of(
    episode: Episode, steps: list[int], width: int, kind: Kind
) -> tuple[list[np.ndarray], np.ndarray | None, str]:
    """Frames, the goal if there is a picture of it, and in words how they were made."""
    maze = views.family(episode.environment) in views.MAZES
    if kind == "rendered" and maze:
        raise UserError(f"{episode.environment} is drawn, not rendered: leave out --view rendered")
    if kind == "drawn" or maze:
        return *draw(episode, steps, width), "drawn from the observations"
    try:
        by = "MuJoCo" if views.drawable(episode.environment) else "the environment"
        return *render(episode, steps, width), f"rendered by {by}"
    except UserError as error:
        if kind == "rendered" or not views.drawable(episode.environment):
            raise
        return *draw(episode, steps, width), f"drawn from the observations: {error}"


# -------------------------------------------------------------------------------------------------------- pictures


def strip(frames: list[np.ndarray], labels: list[str]) -> Any:
    """Frames side by side, a label below each -> a PIL image."""
    from PIL import Image, ImageDraw, ImageFont

    height, width = frames[0].shape[:2]
    gap, size = max(2, width // 50), max(10, width // 14)
    font = ImageFont.load_default(size)
    page = Image.new("RGB", (len(frames) * (width + gap) - gap, height + 2 * size), "white")
    pen = ImageDraw.Draw(page)
    for i, (frame, label) in enumerate(zip(frames, labels)):
        left = i * (width + gap)
        page.paste(Image.fromarray(frame), (left, 0))
        pen.text((left + width / 2, height + size), label, fill="#1b1d21", font=font, anchor="mm")
    return page


def animation(frames: list[np.ndarray], limit: int = LIMIT) -> bytes:
    """A GIF that repeats and rests at the end, with as many frames and colours as fit in `limit` bytes."""
    from PIL import Image

    made = b""
    for count, colours in ((FRAMES, 128), (FRAMES, 64), (FRAMES // 2, 64), (FRAMES // 2, 32), (FRAMES // 4, 32)):
        chosen = [frames[i] for i in spread(len(frames) - 1, count)]
        # One palette for all: colours that change from frame to frame would flicker, and cost.
        sample = np.concatenate([chosen[i] for i in spread(len(chosen) - 1, 5)])
        palette = Image.fromarray(sample).quantize(colours, method=Image.Quantize.MEDIANCUT)
        images = [Image.fromarray(frame).quantize(palette=palette, dither=Image.Dither.NONE) for frame in chosen]
        each = min(200, max(40, 6000 // len(images)))
        with io.BytesIO() as file:
            images[0].save(
                file,
                format="GIF",
                save_all=True,
                append_images=images[1:],
                duration=[each] * (len(images) - 1) + [1500],
                loop=0,
                optimize=True,
            )
            made = file.getvalue()
        if len(made) <= limit:
            break
    return made


def pictures(episode: Episode, files: list[Path], width: int = 200, kind: Kind = "auto") -> str:
    """Writes the episode to each of these files, a GIF or a PNG by its name -> how the frames were made."""
    length = len(episode.actions)
    moments = spread(length, MOMENTS)
    animated = any(file.suffix == ".gif" for file in files)
    steps = sorted({*moments, *(spread(length, FRAMES) if animated else [])})
    frames, goal, how = frames_of(episode, steps, width, kind)
    at = dict(zip(steps, frames))
    for file in files:
        with atomic_file(file) as temporary:
            if file.suffix == ".gif":
                temporary.write_bytes(animation([at[step] for step in spread(length, FRAMES)]))
            else:
                outcome = "reached" if episode.success else "not reached"
                labels = [f"step {step}" for step in moments[:-1]] + [f"step {length}: {outcome}"]
                shown = [at[step] for step in moments]
                if goal is not None:
                    shown, labels = [*shown, goal], [*labels, "goal"]
                strip(shown, labels).save(temporary, format="PNG", optimize=True)
    return how


def show(
    name: str,
    /,
    *,
    task: int = 1,
    episode: int = 0,
    out: Path | None = None,
    view: Kind = "auto",
    width: int = 200,
    step: int | None = None,
    env: str | None = None,
    seed: int = 0,
    device: str = "cpu",
) -> int:
    """One episode of a trained policy as an animation (GIF) and a strip of moments with the goal at the end (PNG).

    Args:
        name: a run's folder, or a model by its name or folder (`qhyer list models`)
        task: task number, from 1
        episode: which of the evaluation's episodes of this task, from 0; start and goal are those of its row
        out: FILE.gif or FILE.png; when not given both, in pictures/ of the run (of a model: runs/eval-NAME/pictures/)
        view: rendered by the environment, drawn from the observations, or auto: rendered where that works, mazes drawn
        width: pixels of one frame
        step: this checkpoint of a run instead of the last
        env: environment, where the run does not name one
        seed: evaluation seed
        device: where the policy acts: cpu, cuda or auto
    """
    from qhyer import models, runs

    require(32 <= width <= 2000, "width must lie between 32 and 2000 pixels")
    if out is not None and out.suffix not in (".gif", ".png"):
        raise UserError(f"{out}: name a file that ends in .gif or .png")
    device = runs.resolve_device(device)
    if (Path(name) / "run.json").is_file():
        agent, _ = runs.load_agent(Path(name), step, device)
        info, home = runs.read(Path(name)), Path(name)
    else:
        folder = models.find(name)
        if step is not None:
            raise UserError(f"{folder} is a model, with one set of weights: --step is for runs")
        agent, info = models.load(folder, device)
        home = models.evaluation_folder(folder)
    environment = env or info.get("environment")
    if environment is None:
        raise UserError(f"{name} was trained on own data; name the environment to act in with --env")
    if view == "drawn" and not views.drawable(environment):
        raise UserError(f"there is no drawing of {environment}: only of the datasets' environments")
    stem = home / "pictures" / f"task{task}-episode{episode}"
    files = [stem.with_suffix(".gif"), stem.with_suffix(".png")] if out is None else [out]
    played = play(agent, environment, task, episode, seed, info)
    how = pictures(played, files, width, view)
    outcome = "goal reached" if played.success else "goal not reached"
    print(f"{environment}, task {task}, episode {episode}: {outcome} after {len(played.actions)} steps; {how}")
    for file in files:
        print(f"{file}: {file.stat().st_size / 1000:.0f} kB")
    return 0
