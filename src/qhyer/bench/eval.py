"""`qhyer bench eval`: an evaluation from beginning to end, against the simulator alone.

The floor: the same episodes from their recorded actions, by as many workers, with no policy to wait for and nothing to
send; in the same run.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch

from qhyer import presets, runs
from qhyer.bench import common
from qhyer.bench.common import BenchRow
from qhyer.data import registry
from qhyer.errors import UserError, require
from qhyer.evaluate import EvalConfig, Timings, evaluate, success_rate
from qhyer.launch import cores
from qhyer.rollout import EpisodeSpec, Workers


def replay_seconds(environment: str, actions: dict[EpisodeSpec, list[np.ndarray]], workers: int) -> float:
    """How long the workers take to step through these episodes, dealt out evenly, once they have started."""
    dealt: list[list[EpisodeSpec]] = [[] for _ in range(workers)]
    for spec in sorted(actions, key=lambda spec: -len(actions[spec])):  # the longest first, each to the least busy
        min(dealt, key=lambda specs: sum(len(actions[s]) for s in specs)).append(spec)
    with Workers(environment, workers) as pool:
        pool.about()
        for connection in pool.connections:  # each makes its environment
            connection.send(("replay", 0, ([next(iter(actions))], [np.zeros((0, 1))])))
        for connection in pool.connections:
            pool.receive(connection)
        begun = time.perf_counter()
        for connection, specs in zip(pool.connections, dealt):
            connection.send(("replay", 0, (specs, [np.stack(actions[spec]) for spec in specs])))
        taken = sum(pool.receive(connection)[1] for connection in pool.connections)
        elapsed = time.perf_counter() - begun
    assert taken == sum(map(len, actions.values()))
    return elapsed


def evaluation(
    *,
    run: Path | None = None,
    agent: str = "qhyer",
    dataset: str = "cube-single-play",
    preset: str = "paper",
    episodes: int = 50,
    device: str = "cpu",
    workers: int | None = None,
    out: Path | None = None,
) -> int:
    """Measure an evaluation of all tasks, of a run or with random weights; no dataset is needed.

    Args:
        run: a trained run; when not given, the agent with random weights
        agent: the agent's name
        dataset: the dataset whose environment, sizes and preset are used
        preset: the agent's preset
        episodes: episodes per task
        device: where the policy acts: cpu, cuda or auto
        workers: processes that step environments; one per core when not given
        out: a JSON file to write
    """
    common.check_out(out, "eval")
    device = runs.resolve_device(device)
    require(workers is None or workers >= 1, "workers must be at least 1")
    config = EvalConfig(episodes=episodes)
    environment: str | None
    if run is not None:
        info = runs.read(run)
        agent, preset, environment = info["agent"], info["preset"], info.get("environment")
        policy, _ = runs.load_agent(run, device=device)
        if environment is None:
            raise UserError(f"{run} was trained on own data and names no environment")
    else:
        registered = registry.get(dataset)
        environment = registered.environment
        settings, _ = presets.resolve(agent, preset, registered.name)
        policy = runs.build_agent(agent, settings, common.made_up_spec(registered), seed=0).to(device)
    count = cores() if workers is None else workers
    place = torch.device(device)
    common.reset_peak(place)
    timings = Timings(actions={})
    results = evaluate(policy, environment, config, workers=count, timings=timings)
    assert timings.actions is not None
    floor_s = replay_seconds(environment, timings.actions, count)
    steps = sum(result.length for result in results)
    row = BenchRow(
        f"eval{len(results)}",
        batch=len(results),
        ms=1e3 * timings.total_s,
        floor_ms=1e3 * floor_s,
        gb=common.peak_gb(place),
        extra={
            "workers": count,
            "start_s": timings.start_s,
            "total_s": timings.total_s,
            "steps": steps,
            "steps_per_s": steps / (timings.total_s - timings.start_s),
            "simulator_steps_per_s": steps / floor_s,
            "policy_calls": timings.policy_calls,
            "policy_ms": 1e3 * timings.policy_s / timings.policy_calls,
            "success": success_rate(results),
        },
    )
    facts = {
        "agent": agent,
        "preset": preset,
        "environment": environment,
        "run": None if run is None else str(run),
        **common.machine(device),
    }
    common.show(
        f"evaluating {agent} {preset} on {environment}, {count} workers; policy on {facts['hardware']}",
        [row],
        {"start_s": "start s", "total_s": "total s", "steps_per_s": "steps/s", "policy_ms": "policy ms"},
        time="ms",
    )
    common.note(
        f"floor: the simulator alone, the same {steps:,} steps replayed by as many workers, {steps / floor_s:.0f} a "
        "second; steps/s: once started"
    )
    common.write(out, "eval", facts, [row])
    return 0
