"""One loop for every agent: sample, loss, backward, clip, step; log, evaluate, save; resume bit-exactly.

Everything that decides the next update is in the checkpoint: weights, optimiser moments, the sampler's generator,
torch's own generator (dropout, noise), the running sums of the metrics. Wall-clock times go to a file of their own,
so that metrics.jsonl of an interrupted run equals that of an uninterrupted one.
"""

from __future__ import annotations

import contextlib
import json
import math
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from qhyer import checkpoint, runs
from qhyer.agent import Agent, AgentConfig, Batch, Sampler, Stage
from qhyer.config import fingerprint, to_dict
from qhyer.data import registry
from qhyer.data.episodes import Episodes
from qhyer.errors import UserError, require
from qhyer.evaluate import EvalConfig, evaluate, success_rate
from qhyer.progress import Progress
from qhyer.rng import stream_seed
from qhyer.storage import atomic_file, write_json


@dataclass(frozen=True)
class TrainConfig:
    """How to run a training, as opposed to what is trained (the agent's own configuration)."""

    seed: int = 0
    """one seed for everything: initial weights, batches, dropout and noise each draw from their own stream of it"""
    device: str = "auto"
    """cpu, cuda, or auto: cuda where there is one"""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: matrix products in bfloat16; scan, log-densities and losses stay in float32"""
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
    """on CUDA, capture the whole update in a graph"""
    threads: int = 0
    """CPU threads; 0 chooses: one for small networks, whose products are too short to share, else torch's default"""
    tensorboard: bool = False
    """also write TensorBoard events (needs the extra qhyer[tensorboard])"""

    def __post_init__(self) -> None:
        require(self.log_every >= 1, "log_every must be at least 1")
        require(self.keep >= 1, "keep must be at least 1")
        require(self.save_every >= 0 and self.eval_every >= 0, "save_every and eval_every cannot be negative")
        require(self.eval_episodes >= 1, "eval_episodes must be at least 1")
        require(self.threads >= 0, "threads cannot be negative")


SMALL = 1_000_000  # parameters


class Stopped(Exception):
    """Training ended early because it was asked to (SIGTERM, Ctrl-C); everything is saved."""


class NonFinite(UserError):
    """The loss became NaN or infinite; the message says where the batch was saved."""


class Update:
    """One gradient update of a stage. The order of its parts is the definition of a step.

    Metrics are summed on the device as one vector, so that reading them costs nothing until a line is due.
    """

    def __init__(self, agent: Agent, stage: Stage, sampler: Sampler, precision: str, device: torch.device) -> None:
        self.agent, self.stage, self.sampler, self.device = agent, stage, sampler, device
        self.autocast = precision == "bf16"
        self.parameters = [[p for group in o.param_groups for p in group["params"]] for o in stage.optimizers]
        # Kept with the groups, and so in checkpoints: after a resume, or in a later stage, "lr" holds what the
        # schedule made of it.
        self.base_rates = [
            [g.setdefault("initial_lr", float(g["lr"])) for g in o.param_groups] for o in stage.optimizers
        ]
        self.names: list[str] = []
        self.sums: Tensor | None = None
        self.count = 0
        self.healthy: Tensor | None = None
        self.rows: Batch = {}

    def set_rates(self, step: int) -> None:
        if self.stage.schedule is None:
            return
        factor = self.stage.schedule(step)
        for optimizer, rates in zip(self.stage.optimizers, self.base_rates):
            for group, rate in zip(optimizer.param_groups, rates):
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(rate * factor)
                else:
                    group["lr"] = rate * factor

    def _watch(self, batch: Batch, finite: Tensor) -> None:
        """Remembers the rows of the first batch whose loss or gradient is not finite (of the latest while all are)."""
        rows = {name: value for name, value in batch.items() if not value.is_floating_point()}
        if self.device.type == "cpu":
            self.rows = rows
            if not finite:
                raise FloatingPointError  # before the weights are touched
            return
        if self.healthy is None:  # on a GPU nobody looks until a line or a checkpoint is due
            self.healthy = torch.ones((), dtype=torch.bool, device=self.device)
            self.rows = {name: value.clone() for name, value in rows.items()}
        for name, value in rows.items():
            self.rows[name].copy_(torch.where(self.healthy, value, self.rows[name]))
        self.healthy.logical_and_(finite)

    def check(self) -> None:
        """Raises FloatingPointError if a loss or a gradient has not been finite."""
        if self.healthy is not None and not self.healthy:
            raise FloatingPointError

    def compute(self) -> None:
        """Sample, loss, backward, clip, step, metrics."""
        batch = self.sampler.sample(self.stage.batch_size)
        # No cache of casts: one made under no_grad (the Q tokens) would cut the gradient of the same weights later.
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.autocast, cache_enabled=False):
            loss, metrics = self.stage.loss(batch)
        for optimizer in self.stage.optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        clip = math.inf if self.stage.grad_clip is None else self.stage.grad_clip
        norms = [torch.nn.utils.clip_grad_norm_(parameters, clip) for parameters in self.parameters]
        metrics = {"loss": loss.detach(), **metrics, "grad_norm": torch.stack(norms).norm()}
        self._watch(batch, torch.isfinite(metrics["loss"]) & torch.isfinite(metrics["grad_norm"]))
        for optimizer in self.stage.optimizers:
            optimizer.step()
        if self.stage.after_step is not None:
            self.stage.after_step()
        values = torch.stack([value.detach().double() for value in metrics.values()])
        if self.sums is None:
            self.names, self.sums = list(metrics), torch.zeros_like(values)
        self.sums += values

    def __call__(self, step: int) -> None:
        self.set_rates(step)
        self.compute()
        self.count += 1

    def take_metrics(self) -> dict[str, float]:
        """Means since the last call."""
        if self.sums is None or self.count == 0:
            return {}
        means = dict(zip(self.names, (self.sums / self.count).tolist()))
        self.sums.zero_()
        self.count = 0
        return means


class GraphedUpdate(Update):
    """The same update captured in a CUDA graph after a few eager ones: one launch instead of thousands."""

    WARMUP = 3

    def __init__(
        self,
        agent: Agent,
        stage: Stage,
        sampler: Sampler,
        precision: str,
        device: torch.device,
        generator: torch.Generator,
    ) -> None:
        super().__init__(agent, stage, sampler, precision, device)
        self.generator = generator
        self.graph: torch.cuda.CUDAGraph | None = None
        self.calls = 0
        for optimizer in stage.optimizers:  # learning rates and step counts must live on the device
            for group in optimizer.param_groups:
                group["capturable"] = True
                group["lr"] = torch.tensor(float(group["lr"]), device=device)

    def __call__(self, step: int) -> None:
        self.set_rates(step)
        if self.graph is not None:
            self.graph.replay()
        elif self.calls < self.WARMUP:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self.compute()
            torch.cuda.current_stream().wait_stream(side)
        else:
            for optimizer in self.stage.optimizers:
                optimizer.zero_grad(set_to_none=True)
            graph = torch.cuda.CUDAGraph()
            graph.register_generator_state(self.generator)
            with torch.cuda.graph(graph):
                self.compute()
            self.graph = graph
            graph.replay()
        self.calls += 1
        self.count += 1


def default_run_dir(agent: str, preset: str, episodes: Episodes, config: AgentConfig, train: TrainConfig) -> Path:
    """runs/DATASET/AGENT-PRESET-sSEED-HASH: another configuration or other data, another folder."""
    parts = [to_dict(config), train.precision, episodes.fingerprint, list(episodes.goal_indices)]
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
    resume: bool = False,
    episodes: Episodes | None = None,
    environment: str | None = None,
    quiet: bool = False,
    on_step: Callable[[int], None] | None = None,
) -> Path:
    """Trains and returns the run's folder. `episodes` may be given instead of loading `dataset` from disk.

    A finished run is left as it is. An unfinished one needs `resume`, so that nothing is overwritten by accident.
    """
    device = runs.resolve_device(train_config.device)
    if episodes is None:
        episodes, _ = registry.load(dataset, device)
    else:
        episodes = episodes.to(device)
    run = Path(run) if run is not None else default_run_dir(agent_name, preset, episodes, config, train_config)
    if run.exists() and not run.is_dir():
        raise UserError(f"{run} is a file; give a folder with --out")
    folder = run / "checkpoints"
    registered = registry.DATASETS.get(episodes.name)
    environment = environment or (registered.environment if registered else None)
    if train_config.eval_every and environment is None:
        raise UserError("--eval-every needs an environment: name it with --env")
    agent = runs.build_agent(agent_name, config, episodes.spec(), train_config.seed).to(device)
    parameters = sum(p.numel() for p in agent.parameters())
    threads = train_config.threads or (1 if parameters < SMALL else torch.get_num_threads())
    name = Path(sys.argv[0]).name
    info = {
        "agent": agent_name,
        "preset": preset,
        "dataset": episodes.name,
        "environment": environment,
        "seed": train_config.seed,
        "config": to_dict(config),
        "train": to_dict(train_config),
        "data": {
            "fingerprint": episodes.fingerprint,
            "episodes": episodes.num_episodes,
            "transitions": episodes.num_transitions,
            "path": str(Path(dataset).resolve()) if dataset.endswith(".npz") else None,
        },
        "spec": to_dict(episodes.spec()),
        "versions": runs.versions(),
        "command": shlex.join(["qhyer" if name == "__main__.py" else name, *sys.argv[1:]]),
        "hardware": runs.hardware(device, threads),
        "parameters": parameters,
    }
    kept = checkpoint.steps(folder)
    if kept and (run / "run.json").is_file():
        _check_same_run(run, info)
        if is_finished(run, config):
            if not quiet:
                print(f"{run} is finished ({kept[-1]} updates); nothing to do")
            return run
        if not resume:
            raise UserError(
                f"{run} holds an unfinished run at update {kept[-1]}: "
                "continue it with --resume, or remove the folder to start again"
            )
    else:
        write_json(run / "run.json", info)
    loop = _Loop(run, agent, episodes, train_config, torch.device(device), environment, quiet, on_step)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return loop.run_all(resume)
    finally:
        torch.set_num_threads(before)


def _check_same_run(run: Path, info: dict[str, Any]) -> None:
    """A run that is there already must be the one asked for: same agent, configuration, data, precision, device."""
    before = runs.read(run)
    kinds = [str(run_info["hardware"]).partition(" CPU")[1] for run_info in (before, info)]
    pairs: list[tuple[str, Any, Any]] = [(key, before.get(key), info[key]) for key in ("agent", "dataset", "seed")]
    pairs += [(f"config.{key}", before["config"].get(key), value) for key, value in info["config"].items()]
    pairs += [
        ("goal coordinates", before["spec"]["goal_indices"], info["spec"]["goal_indices"]),
        ("precision", before["train"]["precision"], info["train"]["precision"]),
        ("data (fingerprint)", before["data"]["fingerprint"][:12], info["data"]["fingerprint"][:12]),
        ("kind of device", kinds[0] or "GPU", kinds[1] or "GPU"),
    ]
    different = [f"{name}: {there} there, {asked} asked for" for name, there, asked in pairs if there != asked]
    if different:
        raise UserError(f"{run} is another run ({'; '.join(different)}); choose another --out, or ask for the same")


class _Loop:
    def __init__(
        self,
        run: Path,
        agent: Agent,
        episodes: Episodes,
        config: TrainConfig,
        device: torch.device,
        environment: str | None,
        quiet: bool,
        on_step: Callable[[int], None] | None,
    ) -> None:
        self.run, self.agent, self.episodes, self.config, self.device = run, agent, episodes, config, device
        self.environment, self.quiet, self.on_step = environment, quiet, on_step
        self.folder = run / "checkpoints"
        self.stages = agent.stages()
        self.total = sum(stage.steps for stage in self.stages)
        self.step = 0  # over all stages
        self.update: Update | None = None
        self.saved_metrics: tuple[list[str], Tensor, int] | None = None
        self.generator = torch.Generator(device=device)
        self.seconds_before = 0.0
        self.writer: Any = None

    # ------------------------------------------------------------------------------------------- state

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        unique: dict[int, torch.optim.Optimizer] = {}
        for stage in self.stages:
            for optimizer in stage.optimizers:
                unique[id(optimizer)] = optimizer
        return list(unique.values())

    def save(self) -> Path:
        tensors, groups = checkpoint.pack_optimizers(self._optimizers())
        tensors["rng/sampler"] = self.generator.get_state()
        tensors["rng/torch"] = torch.get_rng_state()
        if self.device.type == "cuda":
            tensors["rng/cuda"] = torch.cuda.get_rng_state(self.device)
        state = {"step": self.step, "total": self.total, "optimizers": groups, "seconds": self.seconds}
        if self.update is not None and self.update.sums is not None and self.update.count:
            tensors["metrics"] = self.update.sums
            state |= {"metrics": self.update.names, "metrics_count": self.update.count}
        return checkpoint.save(self.folder, self.step, self.agent.state_dict(), tensors, state, self.config.keep)

    def restore(self) -> None:
        saved = checkpoint.load(checkpoint.latest(self.folder), self.device)
        self.agent.load_state_dict(saved.agent)
        checkpoint.unpack_optimizers(self._optimizers(), saved.training, saved.state["optimizers"])
        self.generator.set_state(saved.training["rng/sampler"])
        torch.set_rng_state(saved.training["rng/torch"])
        if "rng/cuda" in saved.training and self.device.type == "cuda":
            torch.cuda.set_rng_state(saved.training["rng/cuda"], self.device)
        if "metrics" in saved.training:
            sums = saved.training["metrics"].to(self.device)
            self.saved_metrics = (saved.state["metrics"], sums, saved.state["metrics_count"])
        self.step = saved.state["step"]
        self.seconds_before = saved.state["seconds"]
        for name in ("metrics.jsonl", "timings.jsonl"):
            _truncate_jsonl(self.run / name, self.step)

    @property
    def seconds(self) -> float:
        return self.seconds_before + time.perf_counter() - self.begun

    # -------------------------------------------------------------------------------------------- loop

    def run_all(self, resume: bool) -> Path:
        self.begun = time.perf_counter()
        checkpoint.clean(self.folder)
        self.generator.manual_seed(stream_seed(self.config.seed, "data"))
        # torch's global generator serves dropout and noise; put back afterwards what the caller had.
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), _stop_on_signal() as stop:
            torch.manual_seed(stream_seed(self.config.seed, "train"))
            if resume and checkpoint.steps(self.folder):
                self.restore()
            else:
                for name in ("metrics.jsonl", "timings.jsonl"):
                    (self.run / name).unlink(missing_ok=True)
            if self.config.tensorboard:
                self.writer = _tensorboard(self.run, self.step)
            description = f"{runs.read(self.run)['agent']} on {self.episodes.name}"
            with Progress(description, self.total, self.quiet, start=self.step) as self.progress:
                done = 0
                for stage in self.stages:
                    if self.step < done + stage.steps:
                        self._run_stage(stage, done, stop)
                    done += stage.steps
                    if stop.is_set():
                        break
        if self.writer is not None:
            self.writer.close()
        if stop.is_set() and self.step < self.total:
            raise Stopped(f"stopped; saved update {self.step} of {self.total}; --resume continues")
        return self.run

    def _make_update(self, stage: Stage, sampler: Sampler) -> Update:
        precision = self.config.precision
        if self.device.type == "cuda" and self.config.graph:
            update: Update = GraphedUpdate(self.agent, stage, sampler, precision, self.device, self.generator)
        else:
            update = Update(self.agent, stage, sampler, precision, self.device)
        if self.saved_metrics is not None:  # sums since the last line, from the checkpoint
            update.names, update.sums, update.count = self.saved_metrics
            self.saved_metrics = None
        self.update = update
        return update

    def _run_stage(self, stage: Stage, first: int, stop: threading.Event) -> None:
        sampler = stage.sampler.build(self.episodes, self.generator)
        update = self._make_update(stage, sampler)
        self.agent.train()
        last = first + stage.steps
        while self.step < last:
            after = self.step + 1
            log = after == last or after % self.config.log_every == 0
            save = after == last or (self.config.save_every and after % self.config.save_every == 0)
            try:
                update(self.step - first)
                if log or save or stop.is_set():
                    update.check()  # a poisoned state is never saved
            except FloatingPointError:
                self._dump_and_stop()
            self.step = after
            if self.on_step is not None:
                self.on_step(self.step)
            if log:
                self._log(stage)
            self.progress.advance(self.step)
            if self.step == last and stage.finish is not None:
                stage.finish(self.episodes)
            if save or stop.is_set():
                self.save()
            if self.config.eval_every and self.step % self.config.eval_every == 0 and self.environment:
                self._evaluate()
            if stop.is_set():
                return

    def _log(self, stage: Stage) -> None:
        assert self.update is not None
        values = self.update.take_metrics()
        if not all(np.isfinite(value) for value in values.values()):
            self._dump_and_stop()
        self.run.mkdir(parents=True, exist_ok=True)
        with open(self.run / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": self.step, "stage": stage.name, **values}) + "\n")
        with open(self.run / "timings.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": self.step, "seconds": round(self.seconds, 3)}) + "\n")
        if self.writer is not None:
            for name, value in values.items():
                self.writer.add_scalar(name, value, self.step)
        self.progress.show(self.step, values)

    def _dump_and_stop(self) -> None:
        """Save the row numbers of the offending batch, and say where."""
        assert self.update is not None
        path = self.run / f"nonfinite-{self.step:08d}.npz"
        rows: dict[str, Any] = {name: value.cpu().numpy() for name, value in self.update.rows.items()}
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
        results = evaluate(self.agent, self.environment, EvalConfig(episodes=self.config.eval_episodes))
        runs.save_evaluation(self.run, self.step, results, self.environment)
        self.progress.note(f"update {self.step}: success {100 * success_rate(results):.1f} %")


def _tensorboard(run: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UserError("TensorBoard is not installed: pip install 'qhyer[tensorboard]'") from error
    return SummaryWriter(run / "tensorboard", purge_step=step)
