"""One loop for every agent: update, log, evaluate, save; resume bit-exactly; several seeds take turns.

Everything that decides the next update is in the checkpoint: weights, optimiser moments, the sampler's generator,
torch's own generator (dropout, noise), the running sums of the metrics. Wall-clock times go to a file of their own,
so that metrics.jsonl of an interrupted run equals that of an uninterrupted one. Seeds trained together share the
dataset and the device and nothing else: each writes the run that it would have written alone (stacked into one update,
to the last digits).
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from qhyer import agents, checkpoint, distributed, memory, presets, rollout, runs
from qhyer.agent import Agent, AgentConfig, Stage
from qhyer.config import Precision, chosen, fingerprint, to_dict
from qhyer.data import check, registry
from qhyer.data.episodes import FILES, UNNAMED, Episodes, columns_told, own_name
from qhyer.data.goals import of_seeds
from qhyer.errors import Taken, UserError, require
from qhyer.evaluate import EvalConfig, evaluate, success_rate
from qhyer.lane import Lane
from qhyer.progress import Progress
from qhyer.rng import stream_seed
from qhyer.stack import Seat, Stack, stacked
from qhyer.storage import TEMPORARY, atomic_file, locked, write_json
from qhyer.update import Update, make_update


@dataclass(frozen=True)
class TrainConfig:
    """How to run a training, as opposed to what is trained (the agent's own configuration)."""

    seed: int = 0
    """one seed for everything: initial weights, batches, dropout and noise each draw from their own stream of it"""
    device: str = "auto"
    """cpu, cuda, or auto: cuda where there is one"""
    precision: Precision = "fp32"
    """bf16: matrix products in bfloat16; scan, log-densities, values and losses stay in float32. tf32: everything in
    float32, products rounded to TF32 on a GPU that has it; the quickest for small networks, whose casts cost more than
    their products"""
    log_every: int = 100
    """updates between two lines of metrics"""
    save_every: int = 5000
    """updates between two checkpoints; the last update is always saved"""
    keep: int = 2
    """checkpoints kept"""
    eval_every: int = 0
    """updates between two evaluations while training; 0: none"""
    eval_episodes: int = 10
    """episodes per task in those evaluations"""
    graph: bool = True
    """on CUDA, capture the whole update in a graph; what cannot be captured runs without, and says so"""
    compile: bool = False
    """let torch's compiler fuse the loss and its gradient, which takes it a minute at first; agents with kernels of
    their own gain nothing (`qhyer bench agents --compile` tells). What cannot be compiled runs without, and says so"""
    together: Literal["auto", "stacked", "streams"] = "auto"
    """how several seeds train at once: stacked into one update, or an update each, on CUDA in a stream each; auto:
    stacked on CUDA where the agent allows it"""
    threads: int = 0
    """CPU threads; 0 chooses: one for small networks, whose products are too short to share, else torch's default"""
    tensorboard: bool = False
    """also write TensorBoard events (needs the extra qhyer[tensorboard])"""

    def __post_init__(self) -> None:
        require(self.seed >= 0, "a seed cannot be negative")
        require(self.log_every >= 1, "log_every must be at least 1")
        require(self.keep >= 1, "keep must be at least 1")
        require(self.save_every >= 0 and self.eval_every >= 0, "save_every and eval_every cannot be negative")
        require(self.eval_episodes >= 1, "eval_episodes must be at least 1")
        require(self.threads >= 0, "threads cannot be negative")


SMALL = 1_000_000  # parameters
LONG = 100_000  # updates: hours on a CPU
# An update's greatest need over what it keeps for backward, measured with QHyer's paper sizes in batches of 8 to 56.
PEAK = 1.3
LOCK = f"{TEMPORARY}lock"  # in the run's folder while it is trained: named as what is neither shipped nor reported


class Stopped(Exception):
    """Training ended early because it was asked to (SIGTERM, Ctrl-C); everything is saved."""


class NonFinite(UserError):
    """The loss became NaN or infinite; the message says where the batch was saved."""


def _goals_read(agent: str, config: AgentConfig, episodes: Episodes) -> str:
    """For own data, what a goal is: a user who names two columns may expect that the others do not matter."""
    width, goal = episodes.observations.shape[1], columns_told(episodes.goal_indices, episodes.observation_names)
    if len(episodes.goal_indices) == width:
        return f"the goal is the whole observation, {width} columns (--goal names fewer)" if width > 1 else ""
    if not config.reads_whole_goals:
        return f"the goal is columns {goal}, and {agent} reads those of a goal alone"
    instead = f": {config.coordinates_option} reads the goal's alone" if config.coordinates_option else ""
    if config.whole_goals:
        instead = f" ({config.whole_goals})"
    acting = "when acting, goals must be whole states as in the data"
    return f"the goal is columns {goal}, but {agent} reads a goal's other columns, too; {acting}{instead}"


def _memory_note(agent: Agent, name: str, preset: str) -> str:
    """On a CPU: what to expect where an update may take more memory than there is; `UserError` where it surely does,
    since the kernel would end the process without a word."""
    kept, free = agent.update_bytes(), memory.available()
    if kept is None or free is None or PEAK * kept <= free:
        return ""
    size = agent.config.batch_size
    share = size * free / (PEAK * kept)
    advice = ["--preset demo, which is sized for a CPU"] if preset != "demo" and "demo" in presets.table(name) else []
    if share >= 1:
        advice.append(f"a smaller batch, --agent.batch-size {2 ** math.floor(math.log2(share))}")
    else:
        advice.append("a smaller network (--help lists its sizes): not even one window of this one fits")
    less = " or ".join(advice)
    need = f"an update of {size} takes about {PEAK * kept / 1e9:.1f} GB of memory"
    if kept > free:
        raise UserError(f"{need}, and {free / 1e9:.1f} GB are free here; give {less}")
    return f"{need}, and {free / 1e9:.1f} GB are free here: it may be ended for want of it. Less takes {less}"


def _range(episodes: Episodes) -> tuple[np.ndarray, np.ndarray]:
    """Least and greatest of each column."""
    low, high = torch.aminmax(episodes.observations, dim=0)
    return low.cpu().numpy(), high.cpu().numpy()


def _place_for(run: Path) -> Path:
    """The folder of a run: a new or an empty one, or that of a run, begun or finished."""
    if run.exists() and not run.is_dir():
        raise UserError(f"{run} is a file; give a folder with --out")
    if (run / "run.json").is_file() and not (run / "checkpoints").is_dir() and runs.read(run).get("model"):
        raise UserError(f"{run} has the rows of a model; give another folder with --out")
    if run.is_dir() and not any((run / name).exists() for name in ("run.json", "checkpoints")):
        other = min((item.name for item in run.iterdir() if not item.name.startswith(".")), default=None)
        if other is not None:
            raise UserError(f"{run} is no run, and holds other things ({other}); give a folder of its own with --out")
    return run


def default_run_dir(agent: str, preset: str, episodes: Episodes, config: AgentConfig, train: TrainConfig) -> Path:
    """runs/DATASET/AGENT-PRESET-sSEED-HASH: another configuration or other data, another folder."""
    parts = [chosen(config), train.precision, episodes.fingerprint, list(episodes.goal_indices)]
    return Path("runs") / episodes.name / f"{agent}-{preset}-s{train.seed}-{fingerprint(parts)}"


def is_finished(run: Path, config: AgentConfig) -> bool:
    """Whether a run has the checkpoint of its last update (of all its stages)."""
    folder = Path(run) / "checkpoints"
    found = checkpoint.steps(folder)
    return bool(found) and found[-1] >= checkpoint.read_state(folder / f"{found[-1]:08d}").get("total", config.steps)


@contextlib.contextmanager
def _stop_on_signal() -> Iterator[threading.Event]:
    """SIGTERM, or Ctrl-C, asks for a stop after the current update; a second Ctrl-C ends the process at once."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def interrupt(number: int, frame: Any) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = signal.signal(signal.SIGTERM, lambda *_: stop.set()), signal.signal(signal.SIGINT, interrupt)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGINT, before[1])


def _truncate_jsonl(path: Path, step: int) -> None:
    """Keep the lines up to this step: a resumed run writes the later ones again."""
    if path.is_file():
        lines = [line for line in path.read_text().splitlines() if _step_of(line) <= step]
        with atomic_file(path) as temporary:
            temporary.write_text("".join(line + "\n" for line in lines))


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError):
        return float("inf")  # a line cut short by a kill


def train(
    agent_name: str,
    dataset: str,
    config: AgentConfig,
    train_config: TrainConfig,
    *,
    preset: str = "custom",
    run: Path | None = None,
    resume: bool | None = False,
    episodes: Episodes | None = None,
    environment: str | None = None,
    quiet: bool = False,
    on_step: Callable[[int], None] | None = None,
) -> Path:
    """Trains and returns the run's folder. `episodes` may be given instead of loading `dataset` from disk.

    A finished run is left as it is. An unfinished one needs `resume`, so that nothing is overwritten by accident; with
    None it goes on, too, and one that has not begun begins without a word. What another process trains is refused.
    """
    asked = (agent_name, dataset, config, [train_config], [run], preset, resume, episodes, environment, quiet, on_step)
    with contextlib.ExitStack() as held:
        (path,) = _train(held, *asked)
    return path


def train_seeds(
    agent_name: str,
    dataset: str,
    config: AgentConfig,
    train_config: TrainConfig,
    seeds: Sequence[int],
    *,
    preset: str = "custom",
    out: Path | None = None,
    resume: bool | None = False,
    episodes: Episodes | None = None,
    environment: str | None = None,
    quiet: bool = False,
) -> list[Path]:
    """`train` for several seeds at once: one dataset on the device, updates in turn, on CUDA side by side.

    Each run is the one its seed would have made alone, in its own folder (OUT/sSEED where `out` is given). A seed whose
    loss is not finite leaves the others to go on; the error is raised when they are done.
    """
    require(len(seeds) > 0 and len(set(seeds)) == len(seeds), "give each seed once, and at least one")
    configs = [replace(train_config, seed=seed) for seed in seeds]
    folders = [None if out is None else Path(out) / f"s{seed}" for seed in seeds]
    asked = (agent_name, dataset, config, configs, folders, preset, resume, episodes, environment, quiet, None)
    with contextlib.ExitStack() as held:
        return _train(held, *asked)


def _train(
    held: contextlib.ExitStack,
    agent_name: str,
    dataset: str,
    config: AgentConfig,
    configs: Sequence[TrainConfig],
    folders: Sequence[Path | None],
    preset: str,
    resume: bool | None,
    episodes: Episodes | None,
    environment: str | None,
    quiet: bool,
    on_step: Callable[[int], None] | None,
) -> list[Path]:
    """The runs stay locked until `held` is closed."""
    quiet = quiet or not distributed.is_main()
    if len(configs) > 1 and distributed.active():
        raise UserError("torchrun shares the batches of one run among processes: give it one --seed, not --seeds")
    device = runs.resolve_device(configs[0].device)
    for given in filter(None, folders):  # before data are read and environments tried
        _place_for(Path(given))
    unnamed = episodes is not None and episodes.name == UNNAMED
    if episodes is None:
        episodes, _ = registry.load(dataset, device)
    else:
        episodes = copy.copy(episodes.to(device))
        if unnamed:
            episodes.name = own_name(Path(dataset)) if dataset.endswith(FILES) else dataset
    registered = registry.DATASETS.get(episodes.name)
    home, asked = registered.environment if registered else None, environment
    environment = environment or home
    notes = [] if registered else [_goals_read(agent_name, config, episodes)]
    if device == "cpu" and preset == "paper" and config.steps >= LONG and "demo" in presets.table(agent_name):
        size = f"{config.steps:,} updates of {config.batch_size:,}"
        notes.append(f"preset paper is sized for a GPU ({size}); on a CPU, --preset demo takes minutes")
    spans = _range(episodes)
    if environment is not None and (environment != home or unnamed):  # now, and not after hours of training
        found = rollout.check(environment, episodes.observations.shape[1], episodes.actions.shape[1])
        whole, own = config.reads_whole_goals, episodes.spec().action_bounds
        notes += found.doubts(environment, *spans, episodes.goal_indices, whole, own)
    if not quiet:
        for note in filter(None, notes):
            print(f"note: {note}", file=sys.stderr)
    typed = Path(sys.argv[0])
    name = "qhyer" if typed.parts[-2:] == ("qhyer", "__main__.py") else typed.name  # another name: run from Python
    command = shlex.join([name, *sys.argv[1:]])
    paths: list[Path] = []
    prepared: list[tuple[Agent, TrainConfig, str | None, dict[str, Any]]] = []
    for train_config, folder in zip(configs, folders):  # all are looked at before any is touched
        run = _place_for(Path(folder or default_run_dir(agent_name, preset, episodes, config, train_config)))
        kept = runs.read(run).get("environment") if runs.is_run(run) else None
        place = kept or environment  # a run stays where it began
        if train_config.eval_every and place is None:
            raise UserError("--eval-every needs an environment: name it with --env")
        if kept and asked and kept != asked and not quiet:
            elsewhere = f"`qhyer eval {run} --env {asked}` evaluates it elsewhere"
            print(f"note: {run} stays a run of {kept}; {elsewhere}", file=sys.stderr)
        agent = runs.build_agent(agent_name, config, episodes.spec(), train_config.seed).to(device)
        parameters = sum(p.numel() for p in agent.parameters())
        threads = train_config.threads or (1 if parameters < SMALL else torch.get_num_threads())
        info = {
            "agent": agent_name,
            "preset": preset,
            "dataset": episodes.name,
            "environment": place,
            "seed": train_config.seed,
            "config": to_dict(config),
            "train": to_dict(train_config),
            "data": {
                "fingerprint": episodes.fingerprint,
                "episodes": episodes.num_episodes,
                "transitions": episodes.num_transitions,
                "path": str(Path(dataset).resolve()) if dataset.endswith(".npz") else None,
                **{name: end.tolist() for name, end in zip(("low", "high"), spans)},
                **registry.origin_of(episodes),
            },
            "spec": episodes.spec().stored(),
            "versions": runs.versions(),
            "command": command,
            "hardware": runs.hardware(device, threads),
            "parameters": parameters,
            "updates": sum(stage.steps for stage in agent.stages()),
        }
        paths.append(run)
        prepared.append((agent, train_config, place, info))
    unfinished = [run for run in paths if not _seems_finished(run, config)]
    scarce = unfinished and device == "cpu" and not distributed.active() and _memory_note(agent, agent_name, preset)
    if scarce and not quiet:
        print(f"note: {scarce}", file=sys.stderr)
    hold(held, unfinished, quiet)
    loops: list[_Loop] = []
    infos: list[dict[str, Any]] = []
    for run, (agent, train_config, place, info) in zip(paths, prepared):
        if not _is_done(run, info, config, resume, quiet):
            loops.append(_Loop(run, agent, episodes, train_config, torch.device(device), place, on_step))
            infos.append(info)
    prepared.clear()  # agents of finished runs take no memory
    if len(loops) > 1 and configs[0].together == "stacked" and not loops[0].agent.stackable:
        can = [name for name in agents.names() if agents.load(name).stackable]
        so = " as it is set" if agent_name in can else ""
        others = ", ".join(name for name in can if name != agent_name)
        raise UserError(
            f"seeds of {agent_name} cannot be stacked{so}; those of {others} can. Train it with --together streams"
        )
    if not distributed.alike(episodes.fingerprint):
        raise UserError(f"the processes have read different data as {episodes.name}: give all of them the same file")
    if not distributed.alike(str([checkpoint.steps(run / "checkpoints")[-1:] for run in paths])):  # none writes before
        raise UserError(f"the processes see different checkpoints in {paths[0]}: it must lie where all of them see it")
    for run in paths:
        _settle(run, environment)
    warned = "" if registered else check.in_brief(episodes.warnings, dataset if dataset.endswith(FILES) else "")
    if warned and not quiet and any(not loop.has_begun() for loop in loops):  # of a resumed run it was told
        print(f"note: {warned}", file=sys.stderr)
    if loops:
        for loop, info in zip(loops, infos):
            if distributed.is_main() and not loop.has_begun():
                write_json(loop.run / "run.json", info)
        with torch_settings(threads, configs[0].precision, device):
            _take_turns(loops, resume is not False, f"{agent_name} on {episodes.name}", quiet)
    return paths


def _seems_finished(run: Path, config: AgentConfig) -> bool:
    """Whether it is left alone and needs no lock; where it may be another process's at this moment, it does."""
    try:
        return (run / "run.json").is_file() and is_finished(run, config)
    except (UserError, OSError):  # damaged, or just being written: looked at again under the lock
        return False


def hold(held: contextlib.ExitStack, folders: Sequence[Path], quiet: bool) -> None:
    """Until `held` is closed, no other process trains these runs; an error, and nothing held, where one does.

    The file is gone when the training is over, so that who copies a run or looks at it meets nothing new.
    """
    refused = ""
    if distributed.is_main():  # the one that writes
        advice = "wait until it ends, or stop it (what it has saved stays), and then ask again"
        try:
            for run in folders:
                alone = held.enter_context(locked(run / LOCK, f"{run} is being trained", advice))
                if not alone and not quiet:
                    note = "files cannot be locked there: see to it yourself that no other process trains it"
                    print(f"note: {run}: {note}", file=sys.stderr)
        except Taken as taken:
            refused = str(taken)
    if distributed.any_process(bool(refused)):
        held.close()
        raise Taken(refused or "the run is being trained by other processes (the first process says more)")


def _is_done(run: Path, info: dict[str, Any], config: AgentConfig, resume: bool | None, quiet: bool) -> bool:
    """Whether there is nothing left to train; raises where a run must not be touched."""
    kept = checkpoint.steps(run / "checkpoints")
    if not kept:
        if resume and not quiet:
            print(f"nothing to resume: {run} has no checkpoint (another configuration is another run); it begins anew")
        return False
    if not (run / "run.json").is_file():
        raise UserError(f"{run} has checkpoints but no run.json, so nobody knows whose they are; remove the folder")
    _check_same_run(run, info)
    if is_finished(run, config):
        if not quiet:
            print(f"{run} is finished ({kept[-1]} updates); nothing to do")
        return True
    checkpoint.require_training(checkpoint.latest(run / "checkpoints"))
    if resume is False:
        raise UserError(
            f"{run} holds an unfinished run at update {kept[-1]}: "
            "continue it with --resume, or remove the folder to start again"
        )
    return False


@contextlib.contextmanager
def torch_settings(threads: int, precision: str, device: str) -> Iterator[None]:
    """What a training sets for the whole process, put back when it ends."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with _float32_products(precision) if device.startswith("cuda") else contextlib.nullcontext():
            yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _float32_products(precision: str) -> Iterator[None]:
    """TF32 for all float32 products, with bf16 for those that remain (the flow's); fp32 means float32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _take_turns(loops: Sequence[_Loop], resume: bool, description: str, quiet: bool) -> None:
    """One update of each loop in turn until all are done. Each writes its own run; they share a bar and the signals."""
    seeds = [loop.config.seed for loop in loops]
    several = len(seeds) > 1
    failures: dict[int, NonFinite] = {}
    with _stop_on_signal() as stop:
        for loop in loops:
            loop.together = len(seeds)
            with loop.lane.turn():
                loop.begin(resume)
        if several:
            description += f", seeds {' '.join(map(str, seeds))}"
        with Progress(description, loops[0].total, quiet, start=min(loop.step for loop in loops)) as progress:
            board = _Board(progress, {loop.config.seed: loop.step for loop in loops})
            stacks = _stack(loops, board)
            asked = threading.Event()  # looked for once a round: seeds of a stack stop, and resume, at the same update
            turns = {loop.config.seed: (loop, loop.updates(board, asked)) for loop in loops}
            while turns:
                if stop.is_set():
                    asked.set()
                for seed, (loop, updates) in list(turns.items()):
                    with loop.lane.turn():
                        try:
                            next(updates)
                            continue
                        except StopIteration:
                            pass
                        except NonFinite as error:
                            failures[seed] = error
                            board.leave(seed, f"stopped at update {loop.step}: not finite")
                    del turns[seed]
                for lane, stack in stacks:
                    with lane.turn():
                        stack.advance()
    if failures and not several:
        raise failures[seeds[0]]
    saved = [(loop.config.seed, loop.step) for loop in loops if loop.step < loop.total]
    saved = [(seed, step) for seed, step in saved if seed not in failures]
    if failures:
        lines = [f"{len(failures)} of {len(seeds)} seeds stopped", *(f"seed {s}: {e}" for s, e in failures.items())]
        raise NonFinite("\n".join([*lines, *(f"seed {seed}: saved update {step}" for seed, step in saved)]))
    if saved:
        where = ", ".join(f"seed {seed}: {step}" for seed, step in saved) if several else str(saved[0][1])
        raise Stopped(f"stopped; saved update {where} of {loops[0].total}; --resume continues")


def _stack(loops: Sequence[_Loop], board: _Board) -> list[tuple[Lane, Stack]]:
    """Where that is asked for, those that are at the same update as one; the others keep updates of their own."""
    first, how = loops[0], loops[0].config.together
    if how == "streams" or not first.agent.stackable or (how == "auto" and first.device.type == "cpu"):
        return []
    stacks = []
    for step in sorted({loop.step for loop in loops}):
        first, *others = group = [loop for loop in loops if loop.step == step]
        if not others:
            continue
        for loop in others:
            loop.lane.join(first.lane)
        if first.device.type == "cuda":
            torch.cuda.synchronize(
                first.device
            )  # weights that are let go here may still be on their way in another stream
        with first.lane.turn():
            whole, stage = stacked([loop.agent for loop in group])
            generators = [loop.generator for loop in group]
            sampler = stage.sampler.build(first.episodes, of_seeds(generators))
            note = partial(board.note, first.config.seed)
            update = make_update(whole, stage, sampler, generators, note, **_how(first))
        stack = Stack([loop.agent for loop in group], update)
        for loop, seat in zip(group, stack.seats):
            loop.seat = seat
        stacks.append((first.lane, stack))
    return stacks


def _how(loop: _Loop) -> dict[str, Any]:
    """What decides how its updates are run."""
    config = loop.config
    return dict(precision=config.precision, device=loop.device, graph=config.graph, compile=config.compile)


class _Board:
    """One bar for all seeds: how far the last one is, and the mean of their latest values."""

    def __init__(self, progress: Progress, steps: dict[int, int]) -> None:
        self.progress, self.steps = progress, steps
        self.several = len(steps) > 1
        self.values: dict[int, dict[str, float]] = {}

    def advance(self, seed: int, step: int) -> None:
        self.steps[seed] = step
        self.progress.advance(min(self.steps.values()))

    def show(self, seed: int, step: int, values: dict[str, float]) -> None:
        self.steps[seed], self.values[seed] = step, values
        known = list(self.values.values())
        if min(self.steps.values()) == step:  # the last of them
            means = {name: sum(v.get(name, np.nan) for v in known) / len(known) for name in values}
            self.progress.show(step, means)

    def note(self, seed: int, text: str) -> None:
        self.progress.note(f"seed {seed}: {text}" if self.several else text)

    def leave(self, seed: int, why: str) -> None:
        if len(self.steps) > 1:
            self.note(seed, why)
            self.steps.pop(seed)
            self.values.pop(seed, None)


def as_today(agent: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration as some version wrote it, with today's defaults for the options that came later."""
    return {**to_dict(agents.load(agent).Config()), **config}


def _check_same_run(run: Path, info: dict[str, Any]) -> None:
    """A run that is there already must be the one asked for: same agent, configuration, data, precision, device."""
    before = runs.read(run)
    kinds = [str(run_info["hardware"]).partition(" CPU")[1] for run_info in (before, info)]
    pairs: list[tuple[str, Any, Any]] = [(key, before.get(key), info[key]) for key in ("agent", "dataset", "seed")]
    if before.get("dataset") == UNNAMED:  # as such data were called whatever they were trained under
        pairs = [pair for pair in pairs if pair[0] != "dataset"]
    then = as_today(info["agent"], before["config"])
    pairs += [(f"config.{key}", then.get(key), value) for key, value in info["config"].items()]
    pairs += [
        ("goal coordinates", before["spec"]["goal_indices"], info["spec"]["goal_indices"]),
        ("precision", before["train"]["precision"], info["train"]["precision"]),
        ("data (fingerprint)", before["data"]["fingerprint"][:12], info["data"]["fingerprint"][:12]),
        ("kind of device", kinds[0] or "GPU", kinds[1] or "GPU"),
    ]
    different = [f"{name}: {there} there, {asked} asked for" for name, there, asked in pairs if there != asked]
    if different:
        raise UserError(f"{run} is another run ({'; '.join(different)}); choose another --out, or ask for the same")


def _settle(run: Path, environment: str | None) -> None:
    """A run that began without an environment gets the one that is named now."""
    if environment is None or not runs.is_run(run) or not distributed.is_main():
        return
    before = runs.read(run)
    if before.get("environment") is None:
        write_json(run / "run.json", {**before, "environment": environment})


class _Loop:
    """One run from here to its end. Everything but `__init__` happens inside its lane's turn."""

    def __init__(
        self,
        run: Path,
        agent: Agent,
        episodes: Episodes,
        config: TrainConfig,
        device: torch.device,
        environment: str | None,
        on_step: Callable[[int], None] | None,
    ) -> None:
        self.run, self.agent, self.episodes, self.config, self.device = run, agent, episodes, config, device
        self.environment, self.on_step = environment, on_step
        self.folder = run / "checkpoints"
        self.stages = agent.stages()
        self.total = sum(stage.steps for stage in self.stages)
        self.step = 0  # over all stages
        self.together = 1  # seeds that take turns
        self.update: Update | None = None
        self.seat: Seat | None = None  # in a stack
        self.saved_metrics: tuple[list[str], Tensor, int] | None = None
        self.generator = torch.Generator(device=device)
        self.lane = Lane(device, self._noise_seed())
        self.stopping = False
        self.seconds_before = 0.0
        self.writer: Any = None

    # ------------------------------------------------------------------------------------------- state

    def _noise_seed(self, *names: str | int) -> int:
        """Dropout and noise: a stream of its own for each process that shares the batches."""
        others = () if distributed.is_main() else ("process", distributed.rank(), *names)
        return stream_seed(self.config.seed, "train", *others)

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        unique: dict[int, torch.optim.Optimizer] = {}
        for stage in self.stages:
            for optimizer in stage.optimizers:
                unique[id(optimizer)] = optimizer
        return list(unique.values())

    def save(self) -> None:
        if not distributed.is_main():
            return
        tensors, groups = checkpoint.pack_optimizers(self._optimizers())
        tensors["rng/sampler"] = self._sampler_state()
        tensors["rng/torch"] = torch.get_rng_state()
        if self.device.type == "cuda":
            tensors["rng/cuda"] = torch.cuda.get_rng_state(self.device)
        state = {"step": self.step, "total": self.total, "optimizers": groups, "seconds": self.seconds}
        if self.update is not None and self.update.sums is not None and self.update.count:
            tensors["metrics"] = self.update.sums
            state |= {"metrics": self.update.names, "metrics_count": self.update.count}
        checkpoint.save(self.folder, self.step, self.agent.state_dict(), tensors, state, self.config.keep)

    def _sampler_state(self) -> Tensor:
        return self.generator.get_state() if self.update is None else self.update.sampler_state(self.generator)

    def restore(self) -> None:
        saved = checkpoint.load(checkpoint.latest(self.folder), self.device)
        runs.load_weights(self.agent, saved.agent, self.run)
        checkpoint.unpack_optimizers(self._optimizers(), saved.training, saved.state["optimizers"])
        self.generator.set_state(saved.training["rng/sampler"])
        if distributed.is_main():
            torch.set_rng_state(saved.training["rng/torch"])
            if "rng/cuda" in saved.training and self.device.type == "cuda":
                torch.cuda.set_rng_state(saved.training["rng/cuda"], self.device)
        else:  # the main process's noise was saved; the others' goes on in a stream of its own
            torch.manual_seed(self._noise_seed(saved.state["step"]))
        if "metrics" in saved.training:
            sums = saved.training["metrics"].to(self.device)
            self.saved_metrics = (saved.state["metrics"], sums, saved.state["metrics_count"])
        self.step = saved.state["step"]
        self.seconds_before = saved.state["seconds"]

    @property
    def seconds(self) -> float:
        return self.seconds_before + time.perf_counter() - self.begun

    # -------------------------------------------------------------------------------------------- loop

    def has_begun(self) -> bool:
        return bool(checkpoint.steps(self.folder)) and (self.run / "run.json").is_file()

    def begin(self, resume: bool) -> None:
        self.begun = time.perf_counter()
        self.generator.manual_seed(stream_seed(self.config.seed, "data"))  # the same in all processes: one batch
        if resume and checkpoint.steps(self.folder):
            self.restore()
        distributed.copy_from_main(self.agent.state_dict().values())
        if distributed.is_main():
            checkpoint.clean(self.folder)
            for name in ("metrics.jsonl", "timings.jsonl"):
                _truncate_jsonl(self.run / name, self.step)
            if self.config.tensorboard:
                self.writer = _tensorboard(self.run, self.step)

    def updates(self, board: _Board, stop: threading.Event) -> Iterator[None]:
        """Trains, an update at a time, until the end or until `stop` is set anywhere; then everything is saved."""
        self.board = board
        done = 0
        try:
            for stage in self.stages:
                if self.step < done + stage.steps:
                    yield from self._run_stage(stage, done, stop)
                done += stage.steps
                if self.stopping:
                    return
        finally:
            if self.writer is not None:
                self.writer.close()

    def _note(self, text: str) -> None:
        self.board.note(self.config.seed, text)

    def _begin_update(self, stage: Stage) -> Update:
        if self.seat is None:
            sampler = stage.sampler.build(self.episodes, self.generator)
            update = make_update(self.agent, stage, sampler, [self.generator], self._note, **_how(self))
        else:
            update = self.seat
        if self.saved_metrics is not None:  # sums since the last line, from the checkpoint
            update.names, update.sums, update.count = self.saved_metrics
            self.saved_metrics = None
        self.update = update
        return update

    def _run_stage(self, stage: Stage, first: int, stop: threading.Event) -> Iterator[None]:
        self.agent.train()
        update = self._begin_update(stage)
        last = first + stage.steps
        while self.step < last:
            after = self.step + 1
            log = after == last or after % self.config.log_every == 0
            save = after == last or (self.config.save_every and after % self.config.save_every == 0)
            try:
                about = after == last > first + 1 and stage.finish is not None  # to be finished
                if about and self.step not in checkpoint.steps(self.folder):
                    update.check()
                    self.save()  # finishing may take long, or fail: from here the last update is made again, and it
                update(self.step - first)
                yield  # the other seeds' updates are on their way before this one is waited for
                self.stopping = distributed.any_process(stop.is_set())
                if log or save or self.stopping:
                    update.check()  # a poisoned state is never saved
            except FloatingPointError:
                self._dump_and_stop()
            self.step = after
            if after == last:
                self.generator.set_state(self._sampler_state())  # a batch that was drawn ahead is not used
            if self.on_step is not None:
                self.on_step(self.step)
            if log:
                self._log(stage)
            self.board.advance(self.config.seed, self.step)
            if self.step == last and stage.finish is not None:
                try:
                    stage.finish(self.episodes)
                except FloatingPointError as error:
                    raise NonFinite(f"after stage {stage.name}, update {self.step}: {error}") from error
                distributed.copy_from_main(self.agent.state_dict().values())
            if save or self.stopping:
                self.save()
            if self.config.eval_every and self.step % self.config.eval_every == 0 and self.environment:
                self._evaluate()
            if self.stopping:
                return

    def _log(self, stage: Stage) -> None:
        assert self.update is not None
        values = self.update.take_metrics()
        if not all(np.isfinite(value) for value in values.values()):
            self._dump_and_stop()
        if not distributed.is_main():
            return
        self.run.mkdir(parents=True, exist_ok=True)
        with open(self.run / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": self.step, "stage": stage.name, **values}) + "\n")
        with open(self.run / "timings.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(self._timing()) + "\n")
        if self.writer is not None:
            for name, value in values.items():
                self.writer.add_scalar(name, value, self.step)
        self.board.show(self.config.seed, self.step, values)

    def _timing(self) -> dict[str, Any]:
        """Seconds, and what they depend on: how updates are run, how many seeds or processes share the work."""
        assert self.update is not None
        line = {"step": self.step, "seconds": round(self.seconds, 3), "update": self.update.path}
        several = {"together": self.together, "processes": distributed.world()}
        line |= {name: count for name, count in several.items() if count > 1}
        return line | ({} if self.seat is None else {"stacked": len(self.seat.stack.seats)})

    def _dump_and_stop(self) -> None:
        """Save the row numbers of the offending batch, and say where."""
        assert self.update is not None
        path = self.run / f"nonfinite-{self.step:08d}.npz"
        if distributed.is_main():
            kinds = self.update.kinds
            rows: dict[str, Any] = {
                name: value.to(kinds.get(name, value.dtype)).cpu().numpy() for name, value in self.update.rows.items()
            }
            with atomic_file(path) as temporary, open(temporary, "wb") as file:
                np.savez(file, **rows)
        kept = checkpoint.steps(self.folder)
        last = f"the last good checkpoint is update {kept[-1]}" if kept else "no checkpoint was written yet"
        raise NonFinite(
            f"loss or gradient not finite at update {self.step}; the batch's rows are in {path}; {last}. "
            "Look at those rows (`qhyer data check`), or lower the learning rate."
        )

    def _evaluate(self) -> None:
        assert self.environment is not None
        if not distributed.is_main():
            return
        with contextlib.ExitStack() as held:
            with contextlib.suppress(Taken):  # an earlier update, evaluated by hand: its rows and these do not meet
                held.enter_context(runs.hold_rows(self.run))
            try:
                results = evaluate(self.agent, self.environment, EvalConfig(episodes=self.config.eval_episodes))
            except Exception as error:
                if distributed.active():  # saving is the work of all processes, and the others are not here
                    raise
                self.save()
                raise UserError(
                    f"the evaluation after update {self.step} failed: {error}. The update is saved: --resume goes on, "
                    "with --eval-every 0 without evaluations"
                ) from error
            runs.save_evaluation(self.run, self.step, results, self.environment)
        self._note(f"update {self.step}: success {100 * success_rate(results):.1f} %")


def _tensorboard(run: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UserError("TensorBoard is not installed: pip install 'qhyer[tensorboard]'") from error
    return SummaryWriter(run / "tensorboard", purge_step=step)
