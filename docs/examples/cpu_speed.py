"""QHyer on one CPU thread, rivals in turns in one run: an update with Mamba and with Mamba-2, and a step of acting with
a window that slides and with one that hops.

    python docs/examples/cpu_speed.py update > results/bench/cpu-mamba2.txt
    python docs/examples/cpu_speed.py acting > results/bench/acting-history.txt
"""

import statistics
import sys
import time

import torch

from qhyer import presets, runs
from qhyer.bench import common
from qhyer.bench.train import Training, launch, time_updates
from qhyer.config import replace
from qhyer.data import registry
from qhyer.train import torch_settings

CPU = torch.device("cpu")


def setting(dataset: str, preset: str):
    episodes = common.made_up_episodes(registry.get(dataset), 20, CPU)
    return episodes, presets.resolve("qhyer", preset, registry.get(dataset).name)[0]


def update(seconds: float = 40.0) -> None:
    print("# QHyer, one update on an x86 CPU, one thread, ms: medians of rounds in turns in one run")
    for dataset, preset, sizes in (
        ("cube-single-play", "paper", {"batch_size": 8}),
        ("pointmaze-medium-navigate", "demo", {"batch_size": 256, "context": 10}),
    ):
        episodes, config = setting(dataset, preset)
        kinds = {"mamba": {"ssm": "mamba"}, "mamba2": {"ssm": "mamba2"}, "attention alone": {"backbone": "attention"}}
        rivals = [Training("qhyer", replace(config, {**sizes, **kind}), episodes, "fp32") for kind in kinds.values()]
        for rival in rivals:
            launch([rival], 2)
        times = time_updates([([rival], 1) for rival in rivals], seconds, CPU)
        found = {name: statistics.median(each) for name, each in zip(kinds, times)}
        told = "  ".join(f"{name} {ms:.1f}" for name, ms in found.items())
        ratio = found["mamba2"] / found["mamba"]
        print(f"{dataset} {preset} {sizes}: {told}; mamba2/mamba {ratio:.3f} ({len(times[0])} rounds)")


def acting(steps: int = 60) -> None:
    print("# QHyer, a step of acting on an x86 CPU, one thread, ms: mean, median and greatest of steps once the window")
    print("# has been full; preset paper, random weights, the two histories in turns in one run")
    for dataset in ("cube-single-play", "scene-play"):
        episodes, config = setting(dataset, "paper")
        spec = episodes.spec()
        agents = {
            name: runs.build_agent("qhyer", replace(config, {"history": name}), spec, 0).eval()
            for name in ("sliding", "hopping")
        }
        for count, rounds in ((1, 3), (50, 1)):
            times = {name: [] for name in agents}
            for _ in range(rounds):
                for name, agent in agents.items():
                    generator, memory = torch.Generator().manual_seed(0), None
                    goal = torch.randn(count, spec.observation_dim, generator=generator)
                    for t in range(config.context + steps):
                        observation = torch.randn(goal.shape, generator=generator)
                        begin = time.perf_counter()
                        _, memory = agent.act(observation, goal, memory)
                        if t >= config.context:
                            times[name].append(1e3 * (time.perf_counter() - begin))
            told = "   ".join(
                f"{name} {statistics.mean(each):.1f} {statistics.median(each):.1f} {max(each):.1f}"
                for name, each in times.items()
            )
            ratio = statistics.mean(times["sliding"]) / statistics.mean(times["hopping"])
            print(f"{dataset} K {config.context}, episodes {count}: {told}   ratio of the means {ratio:.2f}")


if __name__ == "__main__":
    with torch_settings(1, "fp32", "cpu"):
        {"update": update, "acting": acting}[sys.argv[1]]()
