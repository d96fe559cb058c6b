"""Evaluation on OGBench's protocol: every task, a number of episodes each, deterministic policy, final success.

The result is a function of the weights and the seed alone. Episodes are dealt into fixed shards; a shard's
episodes run in lock-step in one process while the policy, here, acts on the shard as one batch. Which process
steps which shard, and how many there are, changes nothing: batches, seeds and order within a shard stay the same.
While the policy serves one shard, workers step the others.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import torch

from qhyer import envs
from qhyer.agent import Agent, Memory
from qhyer.errors import require
from qhyer.rng import stream_seed


@dataclass(frozen=True)
class EvalConfig:
    episodes: int = 50
    """episodes per task"""
    tasks: tuple[int, ...] | None = None
    """task numbers, from 1; all of the environment's when None"""
    seed: int = 0
    """evaluation seed: the same starts and goals for every policy"""
    shard: int = 16
    """episodes that run in lock-step; part of the protocol, not of the machine"""
    record: int = 4
    """episodes per task whose observations are kept for pictures"""

    def __post_init__(self) -> None:
        require(self.episodes >= 1, "episodes must be at least 1")
        require(self.shard >= 1, "shard must be at least 1")
        require(self.record >= 0, "record cannot be negative")


@dataclass(frozen=True)
class EpisodeSpec:
    task: int
    episode: int
    seed: int


@dataclass
class EpisodeResult:
    spec: EpisodeSpec
    success: bool
    length: int
    seconds: float
    goal: np.ndarray
    observations: np.ndarray | None
    """(length + 1, d_s), kept for the recorded episodes"""


def plan(config: EvalConfig, environment: str, tasks: int) -> list[list[EpisodeSpec]]:
    """All episodes, in shards."""
    numbers = config.tasks if config.tasks is not None else tuple(range(1, tasks + 1))
    require(
        bool(numbers) and all(1 <= number <= tasks for number in numbers),
        f"{environment} has tasks 1 to {tasks}, not {', '.join(map(str, numbers)) or 'none'}",
    )
    specs = [
        EpisodeSpec(task, episode, stream_seed(config.seed, "eval", environment, task, episode) % 2**31)
        for task in numbers
        for episode in range(config.episodes)
    ]
    return [specs[i : i + config.shard] for i in range(0, len(specs), config.shard)]


class ShardRunner:
    """Steps the episodes of one shard together. Environments are made once and used again for later shards."""

    def __init__(self, environment: str) -> None:
        self.environment = environment
        self.pool: list[Any] = []

    def reset(self, specs: list[EpisodeSpec]) -> tuple[np.ndarray, np.ndarray]:
        while len(self.pool) < len(specs):
            self.pool.append(envs.make(self.environment))
        starts = [envs.seeded_reset(env, spec.seed, spec.task) for env, spec in zip(self.pool, specs)]
        self.active = list(range(len(specs)))
        return np.stack([s for s, _ in starts]), np.stack([g for _, g in starts])

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """One step of the episodes still running -> their observations, whether they ended, whether they succeeded."""
        observations, ended, success = [], [], []
        for i, action in zip(self.active, actions):
            observation, _, terminated, truncated, info = self.pool[i].step(action)
            observations.append(np.asarray(observation, dtype=np.float32))
            ended.append(bool(terminated or truncated))
            success.append(bool(info["success"]))
        self.active = [i for i, done in zip(self.active, ended) if not done]
        return np.stack(observations), np.asarray(ended), np.asarray(success)


def _worker(connection: Connection, environment: str) -> None:
    """A process that resets and steps shards on request, until told to stop."""
    # Batch systems signal every process of a job. The parent decides what to do about it; a worker ends when the
    # parent says so or is gone.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(1)
    runner = ShardRunner(environment)
    with contextlib.suppress(EOFError, BrokenPipeError):
        while (request := connection.recv()) is not None:
            kind, payload = request
            connection.send(runner.reset(payload) if kind == "reset" else runner.step(payload))


class _Inline:
    """The same conversation without a process."""

    def __init__(self, environment: str) -> None:
        self.runner = ShardRunner(environment)
        self.answer: Any = None

    def send(self, request: Any) -> None:
        if request is not None:
            kind, payload = request
            self.answer = self.runner.reset(payload) if kind == "reset" else self.runner.step(payload)

    def recv(self) -> Any:
        return self.answer


class _Shard:
    """The policy's side of a shard: memory, and what has been seen of each episode."""

    def __init__(self, specs: list[EpisodeSpec], record: int) -> None:
        self.specs = specs
        self.record = record
        self.active = np.arange(len(specs))
        self.memory: Memory | None = None
        self.begun = time.perf_counter()
        self.results: list[EpisodeResult | None] = [None] * len(specs)
        self.lengths = np.zeros(len(specs), dtype=int)

    def begin(self, observations: np.ndarray, goals: np.ndarray) -> None:
        self.observation, self.goals = observations, goals
        self.trails = [[o] if s.episode < self.record else None for o, s in zip(observations, self.specs)]

    def act(self, agent: Agent, device: torch.device) -> np.ndarray:
        observation = torch.from_numpy(self.observation).to(device)
        goal = torch.from_numpy(self.goals[self.active]).to(device)
        action, self.memory = agent.act(observation, goal, self.memory)
        return action.clamp(-1.0, 1.0).float().cpu().numpy()

    def advance(self, observations: np.ndarray, ended: np.ndarray, success: np.ndarray) -> bool:
        """Takes a step's outcome; True when every episode of the shard is over."""
        self.lengths[self.active] += 1
        for k, i in enumerate(self.active):
            trail = self.trails[i]
            if trail is not None:
                trail.append(observations[k])
            if ended[k]:
                seconds = time.perf_counter() - self.begun
                recorded = None if trail is None else np.stack(trail)
                self.results[i] = EpisodeResult(
                    self.specs[i], bool(success[k]), int(self.lengths[i]), seconds, self.goals[i], recorded
                )
        running = ~ended
        self.active = self.active[running]
        self.observation = observations[running]
        if self.memory is not None and ended.any():
            keep = torch.from_numpy(np.flatnonzero(running))
            self.memory = {k: v[keep.to(v.device)] for k, v in self.memory.items()}
        return len(self.active) == 0


@contextlib.contextmanager
def _evaluation_mode(agent: Agent) -> Iterator[torch.device]:
    """Evaluation leaves no trace: mode, torch's and numpy's random states and torch's threads are put back.

    One thread: batches are small, and threads that wait for each other beside busy workers cost more than they do.
    """
    training, threads, numpy_state = agent.training, torch.get_num_threads(), np.random.get_state()
    agent.eval()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            yield next(agent.parameters()).device
    finally:
        agent.train(training)
        torch.set_num_threads(threads)
        np.random.set_state(numpy_state)


@contextlib.contextmanager
def _workers(environment: str, count: int) -> Iterator[list[Any]]:
    if count == 0:
        yield [_Inline(environment)]
        return
    context = multiprocessing.get_context("spawn")
    connections, processes = [], []
    for _ in range(count):
        ours, theirs = context.Pipe()
        process = context.Process(target=_worker, args=(theirs, environment), daemon=True)
        process.start()
        theirs.close()
        connections.append(ours)
        processes.append(process)
    try:
        yield connections
    finally:
        for connection in connections:
            with contextlib.suppress(BrokenPipeError, OSError):
                connection.send(None)
            connection.close()
        for process in processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()


def evaluate(
    agent: Agent,
    environment: str,
    config: EvalConfig | None = None,
    *,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[EpisodeResult]:
    """Runs the protocol. `workers`: processes that step environments; 0 steps them here; default one per core.

    `progress(done, total)` is called after each finished shard.
    """
    config = config or EvalConfig()
    require(workers is None or workers >= 0, "workers cannot be negative")
    env = envs.make(environment)
    shards = plan(config, environment, envs.num_tasks(env))
    env.close()
    count = min(len(shards), (os.cpu_count() or 1) if workers is None else workers)
    total, done = sum(map(len, shards)), 0
    finished: list[_Shard | None] = [None] * len(shards)
    waiting = list(range(len(shards)))[::-1]
    with _evaluation_mode(agent) as device, _workers(environment, count) as connections:
        serving: dict[Any, tuple[int, _Shard]] = {}

        def start(connection: Any) -> None:
            if waiting:
                number = waiting.pop()
                serving[connection] = (number, _Shard(shards[number], config.record))
                connection.send(("reset", shards[number]))

        for connection in connections:
            start(connection)
        while serving:
            ready: list[Any] = list(serving) if count == 0 else wait(list(serving))
            for connection in ready:
                number, shard = serving[connection]
                try:
                    answer = connection.recv()
                except EOFError:
                    raise RuntimeError(f"an evaluation worker for {environment} died; see its error above") from None
                if len(answer) == 2:
                    shard.begin(*answer)
                elif shard.advance(*answer):
                    finished[number] = shard
                    done += len(shard.specs)
                    if progress:
                        progress(done, total)
                    del serving[connection]
                    start(connection)
                    continue
                connection.send(("step", shard.act(agent, device)))
    return [result for shard in finished if shard is not None for result in shard.results if result is not None]


def success_rate(results: list[EpisodeResult]) -> float:
    """Mean over tasks of each task's success: OGBench's overall score."""
    by_task: dict[int, list[bool]] = {}
    for result in results:
        by_task.setdefault(result.spec.task, []).append(result.success)
    return float(np.mean([np.mean(v) for v in by_task.values()]))
