"""Evaluation on OGBench's protocol: every task, a number of episodes each, deterministic policy, final success.

The result is a function of the weights and the seed alone. Episodes are dealt into fixed shards; a shard's
episodes run in lock-step, and the policy, here, acts on the shard as one batch. Which processes step a shard's
environments, and how many there are, changes nothing: batches, seeds and order within a shard stay the same.
While the policy serves one shard, workers step the others: each group of workers has two shards under way.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qhyer.agent import Agent, Memory
from qhyer.errors import require
from qhyer.policy import GraphedPolicy
from qhyer.rng import episode_seed
from qhyer.rollout import EpisodeSpec, Workers

Policy = Callable[[Tensor, Tensor, Memory | None], tuple[Tensor, Memory | None]]


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
        require(self.seed >= 0, "an evaluation's seed cannot be negative")
        require(self.shard >= 1, "shard must be at least 1")
        require(self.record >= 0, "record cannot be negative")
        numbers = (1,) if self.tasks is None else self.tasks
        require(len(numbers) > 0 and min(numbers) >= 1, "tasks: give at least one, numbered from 1")


@dataclass
class EpisodeResult:
    spec: EpisodeSpec
    success: bool
    length: int
    seconds: float
    goal: np.ndarray
    observations: np.ndarray | None
    """(length + 1, d_s), kept for the recorded episodes"""
    returned: float | None = None
    """the undiscounted return, where the task has rewards of its own (Maze2D)"""


@dataclass
class Timings:
    """Where the time of an evaluation went, for whoever asks."""

    start_s: float = 0.0
    """until the first observations: processes, environments, graphs"""
    policy_s: float = 0.0
    """the policy, waiting for its actions included"""
    policy_calls: int = 0
    total_s: float = 0.0
    actions: dict[EpisodeSpec, list[np.ndarray]] | None = None
    """of every step of every episode, kept where there is a place for them"""


def task_numbers(config: EvalConfig, environment: str, tasks: int) -> tuple[int, ...]:
    """Which of an environment's tasks are evaluated; `UserError` where it has not all of them."""
    numbers = config.tasks if config.tasks is not None else tuple(range(1, tasks + 1))
    absent = [number for number in numbers if not 1 <= number <= tasks]
    require(
        bool(numbers) and not absent,
        f"{environment} has tasks 1 to {tasks}, not {', '.join(map(str, absent)) or 'none'}",
    )
    return numbers


def plan(config: EvalConfig, environment: str, tasks: int) -> list[list[EpisodeSpec]]:
    """All episodes, in shards."""
    specs = [
        EpisodeSpec(task, episode, episode_seed(config.seed, environment, task, episode))
        for task in task_numbers(config, environment, tasks)
        for episode in range(config.episodes)
    ]
    return [specs[i : i + config.shard] for i in range(0, len(specs), config.shard)]


def episodes_of(config: EvalConfig, environment: str, tasks: int) -> set[tuple[int, int, int]]:
    """Which episodes these are, as `EpisodeRow.which` tells them apart."""
    return {(spec.task, spec.episode, spec.seed) for shard in plan(config, environment, tasks) for spec in shard}


class _Shard:
    """The policy's side of a shard: memory, what has been seen of each episode, and which workers step it.

    `rows`: the batch has this many rows from beginning to end, for graphs of fixed shapes; rows of no episode, or of
    one that has ended, are computed and ignored. When None, episodes that end leave the batch.
    """

    def __init__(
        self, specs: list[EpisodeSpec], record: int, crew: list[Any], slot: int, device: torch.device, rows: int | None
    ) -> None:
        self.specs, self.record, self.crew, self.slot = specs, record, crew, slot
        self.device, self.rows = device, rows
        self.active = np.arange(len(specs))
        self.memory: Memory | None = None
        self.begun = time.perf_counter()
        self.results: list[EpisodeResult | None] = [None] * len(specs)
        self.lengths = np.zeros(len(specs), dtype=int)
        parts = np.array_split(self.active, min(len(crew), len(specs)))
        self.parts = list(zip(crew, parts))
        self.answers: dict[Any, Any] = {}

    # ------------------------------------------------------------------------------------------------ to workers

    def request(self, kind: str, values: Any) -> None:
        """Sends each worker its part: `values` go with the running episodes, in order."""
        self.answers.clear()
        self.asked = []
        for connection, part in self.parts:
            mine = np.flatnonzero(np.isin(self.active, part))
            if len(mine):
                self.asked.append(connection)
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # dead: reading from it says so
                    connection.send((kind, self.slot, values[mine[0] : mine[-1] + 1]))

    def collect(self, connection: Any, answer: Any) -> bool:
        """True when all parts have answered."""
        self.answers[connection] = answer
        return len(self.answers) == len(self.asked)

    def joined(self) -> tuple[np.ndarray, ...]:
        return tuple(np.concatenate(arrays) for arrays in zip(*(self.answers[c] for c in self.asked)))

    # ----------------------------------------------------------------------------------------------- to the policy

    def begin(self, observations: np.ndarray, goals: np.ndarray) -> None:
        self.trails = [[o] if s.episode < self.record else None for o, s in zip(observations, self.specs)]
        self.goals = goals
        filled = np.minimum(np.arange(len(goals) if self.rows is None else self.rows), len(goals) - 1)
        self.observation = observations[filled]
        self.goal = torch.from_numpy(goals[filled]).to(self.device)

    def act(self, policy: Policy) -> Callable[[], np.ndarray]:
        """Begins to act -> what waits for the actions of the running episodes."""
        observation = torch.from_numpy(self.observation).to(self.device)
        action, self.memory = policy(observation, self.goal, self.memory)
        action = action.clamp(-1.0, 1.0).float()
        chosen: Any = slice(None) if self.rows is None else self.active
        if self.device.type != "cuda":
            return lambda: action.cpu().numpy()[chosen]
        actions = torch.empty(action.shape, dtype=action.dtype, pin_memory=True)
        actions.copy_(action, non_blocking=True)
        done = torch.cuda.Event()
        done.record()

        def finish() -> np.ndarray:
            done.synchronize()
            return actions.numpy()[chosen]

        return finish

    def advance(self, observations: np.ndarray, ended: np.ndarray, success: np.ndarray, returns: np.ndarray) -> bool:
        """Takes a step's outcome; True when every episode of the shard is over."""
        self.lengths[self.active] += 1
        for k, i in enumerate(self.active):
            trail = self.trails[i]
            if trail is not None:
                trail.append(observations[k])
            if ended[k]:
                seconds = time.perf_counter() - self.begun
                recorded = None if trail is None else np.stack(trail)
                returned = None if np.isnan(returns[k]) else float(returns[k])
                self.results[i] = EpisodeResult(
                    self.specs[i], bool(success[k]), int(self.lengths[i]), seconds, self.goals[i], recorded, returned
                )
        running = ~ended
        if self.rows is not None:
            self.observation[self.active] = observations
        else:
            self.observation = observations[running]
            if ended.any():
                keep = torch.from_numpy(np.flatnonzero(running)).to(self.device)
                self.goal = self.goal[keep]
                if self.memory is not None:
                    self.memory = {k: v[keep] for k, v in self.memory.items()}
        self.active = self.active[running]
        return len(self.active) == 0


def graphed(agent: Agent, device: torch.device) -> GraphedPolicy | None:
    return GraphedPolicy(agent) if device.type == "cuda" else None


@contextlib.contextmanager
def evaluation_mode(agent: Agent) -> Iterator[torch.device]:
    """Evaluation leaves no trace: mode, torch's and numpy's random states and torch's threads are put back.

    One thread: batches are small, and threads that wait for each other beside busy workers cost more than they do.
    """
    training, threads, numpy_state = agent.training, torch.get_num_threads(), np.random.get_state()
    device = next(agent.parameters()).device
    agent.eval()
    torch.set_num_threads(1)
    try:
        # The device is the current one: Triton launches nowhere else.
        current = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
        with current, torch.random.fork_rng(devices=[]), torch.no_grad():
            yield device
    finally:
        agent.train(training)
        torch.set_num_threads(threads)
        np.random.set_state(numpy_state)


def crews(connections: list[Any], shards: int) -> list[list[Any]]:
    """Workers in groups that each have two shards under way; where shards are few, more workers share them."""
    groups = min(len(connections), -(-shards // 2))
    return [connections[part[0] : part[-1] + 1] for part in np.array_split(np.arange(len(connections)), groups)]


def evaluate(
    agent: Agent,
    environment: str,
    config: EvalConfig | None = None,
    *,
    workers: int | Workers | None = None,
    progress: Callable[[int, int], None] | None = None,
    timings: Timings | None = None,
) -> list[EpisodeResult]:
    """Runs the protocol. `workers`: processes that step environments; 0 steps them here; default one per core.

    Workers of this environment that are running already may be given instead. `progress(done, total)` is called after
    each finished shard; `timings` are filled in.
    """
    config, timings = config or EvalConfig(), timings or Timings()
    begun = time.perf_counter()
    started = workers if isinstance(workers, Workers) else None
    with (
        contextlib.nullcontext(started) if started else Workers(environment, workers) as pool,  # type: ignore[arg-type]
        evaluation_mode(agent) as device,
    ):
        policy: Policy = agent.act
        rows: int | None = None
        if graphs := graphed(agent, device):
            policy, rows = graphs, config.shard
            graphs.prepare(rows)  # while workers start
        specs = plan(config, environment, pool.about().tasks)
        total, done = sum(map(len, specs)), 0
        shards: list[_Shard] = []
        under_way: dict[tuple[Any, int], _Shard] = {}
        acting: list[tuple[_Shard, Callable[[], np.ndarray]]] = []

        def start(crew: list[Any], slot: int) -> None:
            if len(shards) < len(specs):
                shard = _Shard(specs[len(shards)], config.record, crew, slot, device, rows)
                shards.append(shard)
                under_way.update({(connection, slot): shard for connection, _ in shard.parts})
                shard.request("reset", shard.specs)

        def deliver(left: int) -> None:
            while len(acting) > left:
                shard, finish = acting.pop(0)
                asked = time.perf_counter()
                actions = agent.spec.own_units(finish())
                timings.policy_s += time.perf_counter() - asked
                shard.request("step", actions)
                if timings.actions is not None:
                    for i, action in zip(shard.active, actions):
                        timings.actions.setdefault(shard.specs[i], []).append(action)

        groups = crews(pool.connections, len(specs))
        for slot in range(2 if pool.count else 1):
            for crew in groups:
                start(crew, slot)
        while done < total:
            for connection in pool.ready():
                slot, answer = pool.receive(connection)
                shard = under_way[connection, slot]
                if not shard.collect(connection, answer):
                    continue
                if len(answer) == 2:
                    shard.begin(*shard.joined())
                elif shard.advance(*shard.joined()):
                    done += len(shard.specs)
                    if progress:
                        progress(done, total)
                    start(shard.crew, slot)
                    continue
                asked = time.perf_counter()
                timings.start_s = timings.start_s or asked - begun
                acting.append((shard, shard.act(policy)))
                timings.policy_s += time.perf_counter() - asked
                timings.policy_calls += 1
                deliver(left=1 if device.type == "cuda" else 0)  # the device works while the next shard is read
            deliver(left=0)
    timings.total_s = time.perf_counter() - begun
    return [result for shard in shards for result in shard.results if result is not None]


def mean_return(results: list[EpisodeResult]) -> float | None:
    """Mean over episodes; None where the task has no rewards of its own."""
    returns = [result.returned for result in results if result.returned is not None]
    return float(np.mean(returns)) if returns else None


def success_rate(results: list[EpisodeResult]) -> float:
    """Mean over tasks of each task's success: OGBench's overall score."""
    by_task: dict[int, list[bool]] = {}
    for result in results:
        by_task.setdefault(result.spec.task, []).append(result.success)
    return float(np.mean([np.mean(v) for v in by_task.values()]))
