"""One update of S stacked seeds against one update of each of S seeds side by side, per agent."""

from __future__ import annotations

import argparse
import gc

import numpy as np
import torch

from qhyer import presets, runs
from qhyer.bench import common
from qhyer.bench.train import BLOCK, Training, launch, profile_updates, show_profile, time_updates
from qhyer.config import replace
from qhyer.data import registry
from qhyer.data.goals import Several
from qhyer.lane import Lane
from qhyer.rng import stream_seed
from qhyer.stack import stacked
from qhyer.train import torch_settings
from qhyer.update import GraphedUpdate, Update, capture_for, random_generators

UPDATES = 10  # before anything is timed; their losses are compared


class Stack(Training):
    """As Training, of several seeds."""

    def __init__(self, agent, config, episodes, precision, seeds):
        device = episodes.device
        self.plain, self.step = False, 0
        own = [runs.build_agent(agent, config, episodes.spec(), seed).to(device).train() for seed in seeds]
        self.own = own
        self.agent, stage = stacked(own)
        self.lane = Lane(device, 0)
        drawing = [torch.Generator(device).manual_seed(stream_seed(seed, "data")) for seed in seeds]
        sampler = stage.sampler.build(episodes, Several(drawing))
        arguments = (self.agent, stage, sampler, precision, device)
        with self.lane.turn():
            capture = capture_for(device, *drawing)
            if capture is None:
                self.update = Update(*arguments)
            else:
                generators = random_generators(device, *drawing)
                self.update = GraphedUpdate(*arguments, capture, generators, common.note)


def losses(stack: Stack, trainings: list[Training]) -> float:
    """The greatest relative difference of a seed's mean metric after the first updates."""
    update = stack.update
    worst = 0.0
    for i, training in enumerate(trainings):
        means = training.update.take_metrics()
        for name, ours in zip(update.names, (update.sums[i] / update.count).tolist()):
            if name in ("loss", "grad_norm"):
                worst = max(worst, abs(ours - means[name]) / (abs(means[name]) + 1e-3))
    return worst


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--agents", nargs="+", default=["gcbc", "gcivl", "gciql", "qrl", "crl", "hiql"])
    parser.add_argument("--sizes", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--precision", default="tf32")
    parser.add_argument("--batch", type=int, default=0)
    parser.add_argument("--profile", type=int, default=0, help="list this many kernels of the stack of the last size")
    options = parser.parse_args()
    device = torch.device(options.device)
    cuda = device.type == "cuda"
    registered = registry.get("cube-single-play")
    episodes = common.made_up_episodes(registered, 100, device)
    with torch_settings(1, options.precision, options.device):
        print(
            f"{'agent':8} {'S':>2} | {'stacked ms':>10} {'per seed':>9} {'kernels':>8} {'busy ms':>8} | "
            f"{'streams ms':>10} {'per seed':>9} {'kernels':>8} | {'gain':>5} {'loss diff':>9}  path"
        )
        profiles = []
        for name in options.agents:
            config, _ = presets.resolve(name, "paper", registered.name)
            if options.batch:
                config = replace(config, {"batch_size": options.batch})
            for size in options.sizes:
                gc.collect()
                common.release(device)
                stack = Stack(name, config, episodes, options.precision, range(size))
                apart = [Training(name, config, episodes, options.precision, seed=seed) for seed in range(size)]
                launch([stack], UPDATES)
                launch(apart, UPDATES)
                common.synchronize(device)
                different = losses(stack, apart)
                block = BLOCK if cuda else 1
                ours, theirs = map(np.median, time_updates([([stack], block), (apart, block)], options.seconds, device))
                profiles.append((name, size, ours, theirs, different, stack.update.path, apart[0].update.path))
                del stack, apart
        for name, size, ours, theirs, different, path, other in profiles:  # what watches kernels slows what follows
            config, _ = presets.resolve(name, "paper", registered.name)
            counts = (0.0, 0.0, 0.0)
            if cuda:
                gc.collect()
                common.release(device)
                stack = Stack(name, config, episodes, options.precision, range(size))
                apart = Training(name, config, episodes, options.precision, seed=0)
                launch([stack], UPDATES)
                launch([apart], UPDATES)
                found = profile_updates(stack, 5, device)
                counts = found["count"], found["busy_us"] / 1e3, size * profile_updates(apart, 5, device)["count"]
            print(
                f"{name:8} {size:2} | {ours:10.3f} {ours / size:9.3f} {counts[0]:8.0f} {counts[1]:8.3f} | "
                f"{theirs:10.3f} {theirs / size:9.3f} {counts[2]:8.0f} | {theirs / ours:5.2f} {different:9.1e}  "
                f"{path} / {other}",
                flush=True,
            )
            if cuda and options.profile and size == options.sizes[-1]:
                show_profile(found, config.batch_size, options.profile)
                stack = apart = None


main()
