"""Processes that step environments, apart from the policy.

Light on purpose: a worker imports a simulator and numpy, never torch or an agent. One process imports the simulator
and makes the environment, then forks into the others, so that a start costs the same however many there are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

import numpy as np

from qhyer import envs
from qhyer.errors import UserError, require
from qhyer.launch import cores

WORKER = "from qhyer.rollout import main; main()"

Stepped = tuple[np.ndarray, np.ndarray, np.ndarray]
"""observations, whether the episodes ended, whether they succeeded (so far)"""


Bounds = tuple[np.ndarray, np.ndarray]
"""the least and the greatest action, column by column"""

LOOKED_AT = 4  # episodes of an environment that is compared with the data
NARROW = 0.2  # of the range an environment takes: data that use less in every column may have other units
ROUNDING = 1e-6  # of a bound's size: this far beyond an environment's it is the same
SPAN_FLOOR = 1e-3  # of a column's range: where data hardly vary, policies see no smaller differences (STD_FLOOR)


@dataclass(frozen=True)
class EpisodeSpec:
    task: int
    episode: int
    seed: int


@dataclass(frozen=True)
class About:
    """What the policy's side must know of an environment, without importing a simulator."""

    tasks: int
    observation_dim: int
    geometry: dict[str, np.ndarray] | None
    """of a maze"""
    action_shape: tuple[int, ...] = ()
    bounds: Bounds | None = None
    """of actions, where the space has any"""
    seen: tuple[np.ndarray, np.ndarray] | None = None
    """starts and goals (n, d_s) of a few episodes, where they have been looked at"""
    space: str = "Box"
    """what kind of space its actions are from"""

    def require(self, environment: str, observation_dim: int, action_dim: int) -> None:
        """`UserError` unless observations and actions are of these sizes: those of the data, and of policies."""
        if self.observation_dim != observation_dim:
            raise UserError(
                f"{environment} has observations of {self.observation_dim} numbers, the policy's data have "
                f"{observation_dim}; name the environment of these data with --env"
            )
        if self.action_shape not in ((), (action_dim,)):
            raise UserError(
                f"{environment} takes actions of shape {self.action_shape}, the policy's data have {action_dim} "
                "numbers; name the environment of these data with --env"
            )

    @property
    def _finite(self) -> bool:
        """Whether its actions are from a box with ends."""
        return self.bounds is not None and all(bool(np.isfinite(end).all()) for end in self.bounds)

    def remark(self, environment: str, own: Bounds | None = None) -> str:
        """What is odd about it and no error; nothing for most. `own`: the units of the data's actions, where they have
        some; policies act in those."""
        if self.space != "Box":
            return (
                f"{environment} takes actions from a space of kind {self.space}; policies give vectors of numbers, and "
                "are for a gymnasium.spaces.Box (docs/protocol.md, 'Your own environment')"
            )
        if self.bounds is None:
            return ""
        low, high = (_short(end) for end in self.bounds)
        if own is not None:
            slack = ROUNDING * (np.abs(own[0]) + np.abs(own[1]))
            given = " to ".join(str(_short(end)) for end in own)
            if (own[0] >= self.bounds[0] - slack).all() and (own[1] <= self.bounds[1] + slack).all():
                if (own[1] - own[0] >= NARROW * (self.bounds[1] - self.bounds[0])).any() or not self._finite:
                    return ""
                return (
                    f"{environment} takes actions from {low} to {high}; policies of these data give {given}, as they "
                    "were recorded, less than a fifth of that in every column. Do the data's actions have its units?"
                )
            return (
                f"{environment} takes actions from {low} to {high}; policies of these data give {given}, as they were "
                "recorded. Is it the environment of these data, without RescaleAction?"
            )
        if all((np.abs(end) == 1.0).all() for end in self.bounds):
            return ""
        return (
            f"{environment} takes actions from {low} to {high}; policies give, and data must have, -1 to 1. Which "
            "units do the data's actions have? Those of the environment: `qhyer data convert FILE OUT.npz "
            "--scale-actions`, train on OUT.npz, and leave the environment as it is (docs/data.md, 'Actions in other "
            "units'). Scaled to [-1, 1] already when they were recorded: "
            + ("gymnasium.wrappers.RescaleAction(env, -1, 1)" if self._finite else "a wrapper that scales them back")
            + ", and leave the data as they are"
        )

    def doubts(
        self,
        environment: str,
        low: np.ndarray,
        high: np.ndarray,
        goal: Sequence[int],
        whole: bool,
        own: Bounds | None = None,
    ) -> list[str]:
        """What of it does not look like the data, whose columns lie between `low` and `high`: perhaps meant, and no
        error. `whole`: the agent reads all of a goal, not only its coordinates. `own`: the units of actions."""
        found = [self.remark(environment, own)]
        if self.seen is not None:
            starts, goals = self.seen
            every = list(range(len(low)))
            if columns := _far(starts, low, high, every):
                found.append(
                    f"{environment} starts far from the data: {columns}. "
                    "Are its columns in the order and the units of the data?"
                )
            if columns := _far(goals, low, high, every if whole else goal):
                found.append(
                    f"goals of {environment} are far from the data: {columns}. "
                    "Are they states as in the data, in their order and units?"
                )
            others = [c for c in every if c not in goal and high[c] > low[c]]
            if whole and others and len(goals) > 1 and (np.ptp(goals[:, others], axis=0) == 0).all():
                listed = ", ".join(map(str, others[:3])) + (", ..." if len(others) > 3 else "")
                found.append(
                    f"goals of {environment} have the same values in all columns that are not the goal's ({listed}), "
                    "states of the data do not, and this agent reads whole goals"
                )
        return [note for note in found if note]

    def looked_at(self, reset: Callable[[list[EpisodeSpec]], tuple[np.ndarray, np.ndarray]]) -> About:
        """With the starts and goals of a few episodes, one at a time: no environment is made for it."""
        seen = [reset([spec]) for spec in _looked_at(self.tasks)]
        starts, goals = (np.concatenate(part) for part in zip(*seen))
        return dataclasses.replace(self, seen=(starts, goals))


def _looked_at(tasks: int) -> list[EpisodeSpec]:
    return [EpisodeSpec(1 + i % tasks, i, i) for i in range(LOOKED_AT)]


def _far(states: np.ndarray, low: np.ndarray, high: np.ndarray, columns: Sequence[int]) -> str:
    """The first of these columns in which a state (n, d_s) lies further from the data than these are wide, in words."""
    beyond = np.maximum(low - states, states - high)  # (n, d_s)
    worst = states[beyond.argmax(0), np.arange(len(low))]  # (d_s,)
    far = beyond.max(0) > np.maximum(high - low, SPAN_FLOOR)
    told = [f"column {c} is {worst[c]:.4g}, in the data {low[c]:.4g} to {high[c]:.4g}" for c in columns if far[c]]
    return "; ".join(told[:3]) + (f"; and {len(told) - 3} more" if len(told) > 3 else "")


def _short(values: np.ndarray) -> list[float]:
    """Column by column, or once where all are the same."""
    flat = [float(f"{value:.6g}") for value in np.ravel(values)]
    return flat[:1] if len(set(flat)) == 1 else flat


def describe(environment: str, env: Any) -> About:
    """What there is to know of an environment; resets it. What it does wrong is the user's error."""
    tasks = envs.num_tasks(env)
    with _blamed(environment):
        observation, goal = envs.seeded_reset(env, 0, 1)
        space = env.action_space
        shape = tuple(space.shape or ())
        bounds = (np.asarray(space.low), np.asarray(space.high)) if hasattr(space, "low") else None
    if observation.ndim != 1 or goal.shape != observation.shape:
        raise UserError(
            f"{environment}: observations must be vectors and goals whole observations, of the same size; it has "
            f"observations of shape {observation.shape} and goals of shape {goal.shape} (docs/protocol.md)"
        )
    kind = "Box" if bounds else type(space).__name__
    return About(tasks, len(observation), envs.maze_geometry(env), shape, bounds, space=kind)


class ShardRunner:
    """Steps episodes together. Environments are made once and used again for later shards."""

    def __init__(self, environment: str, template: Any = None) -> None:
        self.environment = environment
        self.template = envs.make(environment) if template is None else template
        self.pool: list[Any] = []

    def reset(self, specs: list[EpisodeSpec]) -> tuple[np.ndarray, np.ndarray]:
        while len(self.pool) < len(specs):
            self.pool.append(envs.copy_of(self.template))
        starts = [envs.seeded_reset(env, spec.seed, spec.task) for env, spec in zip(self.pool, specs)]
        self.active, self.specs, self.taken = list(range(len(specs))), specs, 0
        observations, goals = np.stack([s for s, _ in starts]), np.stack([g for _, g in starts])
        self._require_finite(observations, "observation")
        self._require_finite(goals, "goal")
        return observations, goals

    def _require_finite(self, values: np.ndarray, what: str) -> None:
        """`values`: a row for each episode that is running."""
        for i, row in zip(self.active, values):
            if not np.isfinite(row).all():
                spec, column = self.specs[i], int(np.flatnonzero(~np.isfinite(row.ravel()))[0])
                raise UserError(
                    f"{self.environment}: the {what} is not finite ({row.ravel()[column]} in column {column}) "
                    f"{f'at step {self.taken}' if self.taken else 'at the reset'} of task {spec.task}, seed {spec.seed}"
                )

    def step(self, actions: np.ndarray) -> Stepped:
        """One step of the episodes still running; their returns so far, where the task has any, are in `returns`."""
        observations, ended, success, returns = [], [], [], []
        for i, action in zip(self.active, actions):
            observation, _, terminated, truncated, info = self.pool[i].step(action)
            observations.append(np.asarray(observation, dtype=np.float32))
            ended.append(bool(terminated or truncated))
            success.append(bool(info["success"]))
            returns.append(float(info.get("return", np.nan)))
        seen, self.taken = np.stack(observations), self.taken + 1
        self._require_finite(seen, "observation")
        self.active = [i for i, done in zip(self.active, ended) if not done]
        self.returns = np.asarray(returns)
        return seen, np.asarray(ended), np.asarray(success)

    def replay(self, specs: list[EpisodeSpec], actions: list[np.ndarray]) -> int:
        """The simulator alone: these episodes again, one after another, from their recorded actions -> steps taken."""
        for spec, taken in zip(specs, actions):
            self.reset([spec])
            for action in taken:
                self.step(action[None])
        return sum(map(len, actions))


@contextlib.contextmanager
def _blamed(environment: str) -> Iterator[None]:
    """What goes wrong in an environment is its author's to mend: one line, and where it was."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        for name, where in (("goal", "reset"), ("success", "step")):
            if isinstance(error, KeyError) and error.args == (name,):
                raise UserError(f"{environment}: the info of {where} lacks {name!r} (docs/protocol.md)") from error
        raise UserError(f"{environment} failed: {envs.told(error)}") from error


class Stepper:
    """One process's environments: a few shards, or parts of shards, under way at once, told apart by their slot."""

    def __init__(self, environment: str) -> None:
        self.environment = environment
        self.template = envs.make(environment)
        self.about = describe(environment, self.template)
        self.runners: dict[int, ShardRunner] = {}

    def answer(self, request: Any) -> tuple[int, Any]:
        with _blamed(self.environment):
            return self._answer(request)

    def _answer(self, request: Any) -> tuple[int, Any]:
        kind, slot, payload = request
        if slot not in self.runners:
            self.runners[slot] = ShardRunner(self.environment, self.template)
        runner = self.runners[slot]
        if kind == "replay":
            return slot, runner.replay(*payload)
        return slot, runner.reset(payload) if kind == "reset" else (*runner.step(payload), runner.returns)


# ------------------------------------------------------------------------------------------------ the worker's side


def main() -> None:
    """A process that resets and steps on request until told to stop, or until the one who asks is gone."""
    # Batch systems signal every process of a job. The parent decides what to do about it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    environment, *descriptors = sys.argv[1:]
    connections = [Connection(int(descriptor)) for descriptor in descriptors]
    try:
        stepper = Stepper(environment)
        answer: Any = stepper.about
    except UserError as error:
        answer = error
    try:
        connections[0].send(answer)
    except BrokenPipeError:  # nobody waits for it any more: something else was wrong
        return
    if isinstance(answer, UserError):
        return
    children: list[int] = []
    mine = connections[0]
    for connection in connections[1:]:
        if (child := os.fork()) == 0:
            mine, children = connection, []
            break
        children.append(child)
    for connection in connections:  # an end held by two processes would hide that one of them is gone
        if connection is not mine:
            connection.close()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while (request := mine.recv()) is not None:
            try:
                mine.send(stepper.answer(request))
            except UserError as error:
                mine.send(error)
    mine.close()
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    for code in filter(None, codes):  # the parent sees this process alone: it tells how the first of the others died
        sys.exit(code if code > 0 else 128 - code)


# ------------------------------------------------------------------------------------------------ the policy's side


class Inline:
    """The same conversation without a process."""

    def __init__(self, stepper: Stepper) -> None:
        self.stepper = stepper
        self.answers: list[tuple[int, Any]] = []

    def send(self, request: Any) -> None:
        self.answers.append(self.stepper.answer(request))

    def recv(self) -> Any:
        return self.answers.pop(0)


class Workers:
    """Processes that step environments, started on entry: `count` of them, one per core when None, none (0) inline."""

    def __init__(self, environment: str, count: int | None = None) -> None:
        require(count is None or count >= 0, "workers cannot be negative")
        self.environment = environment
        self.count = cores() if count is None else count
        self.connections: list[Any] = []
        self.process: subprocess.Popen[bytes] | None = None
        self._about: About | None = None

    def __enter__(self) -> Workers:
        if self.count == 0:
            stepper = Stepper(self.environment)
            self.connections, self._about = [Inline(stepper)], stepper.about
            return self
        pairs = [Pipe() for _ in range(self.count)]
        # Not multiprocessing: it would import the caller's main module, and torch with it, in every worker.
        # One thread: the simulator's matrices are small, and a process with threads should not fork.
        one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        descriptors = [theirs.fileno() for _, theirs in pairs]
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", WORKER, self.environment, *map(str, descriptors)],
            env={**os.environ, **one, "PYTHONPATH": path},
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
        )
        for _, theirs in pairs:
            theirs.close()
        self.connections = [ours for ours, _ in pairs]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> int | None:
        """Tells all to stop -> the first one's exit status, which says how another died; None where it had to be
        killed, or where there is none."""
        if self.process is None:
            return None
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.send(None)
            connection.close()
        try:
            return self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return None

    def about(self) -> About:
        """Waits for the environment to be ready."""
        if self._about is None:
            self._about = self.receive(self.connections[0])
        assert self._about is not None
        return self._about

    def ask(self, request: Any) -> Any:
        """The first one's answer to one request."""
        self.connections[0].send(request)
        _, answer = self.receive(self.connections[0])
        return answer

    def ready(self) -> list[Any]:
        """Waits until one of them has answered."""
        if self.process is None:
            return [connection for connection in self.connections if connection.answers]
        return wait(self.connections)

    def receive(self, connection: Any) -> Any:
        try:
            answer = connection.recv()
        except (EOFError, ConnectionResetError):
            raise UserError(
                f"{self.environment}: a process that steps it died{_cause(self._end())}. What it wrote, if anything, "
                "stands above; with --workers 0 it is stepped in the main process, and `python -X faulthandler -m "
                "qhyer eval ... --workers 0` says where a crash is"
            ) from None
        if isinstance(answer, UserError):
            raise answer
        return answer


def _cause(code: int | None) -> str:
    """How a process ended, in words. A shell, and `main`, give a signal as 128 and its number."""
    if not code:
        return ""
    number = -code if code < 0 else code - 128
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f" with exit code {code}"
    return f" of signal {number} ({name}{', perhaps for want of memory: fewer --workers' if name == 'SIGKILL' else ''})"


def check(environment: str, observation_dim: int | None = None, action_dim: int | None = None) -> About:
    """An environment that can be made, reset and stepped, in a process of its own, of these sizes if they are given;
    otherwise the user's error."""
    with Workers(environment, 1) as pool:
        about = pool.about()
        if observation_dim is not None and action_dim is not None:
            about.require(environment, observation_dim, action_dim)
        starts, goals = pool.ask(("reset", 0, _looked_at(about.tasks)))
        action = np.zeros((LOOKED_AT, *about.action_shape), dtype=np.float32)
        if about.bounds is not None:
            action = np.clip(action, *about.bounds)
        pool.ask(("step", 0, action))
        return dataclasses.replace(about, seen=(starts, goals))
