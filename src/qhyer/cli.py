"""The command line: parse, call, print. Every command's work is a function elsewhere."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

# Threads that wait for work should sleep, not spin: on a shared machine spinning costs far more than it saves.
# It must be set before torch is imported, hence here and not in the library.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Nothing here draws with the simulator's own renderer, and looking for one prints warnings where there is no screen.
os.environ.setdefault("MUJOCO_GL", "disable")

import tyro

from qhyer import __version__
from qhyer.errors import Kept, Taken, UserError, did_you_mean
from qhyer.storage import FULL

NO_ROOM = (
    "Nothing that was there is lost: files are written whole or not at all. Make room and give the command again "
    "(`qhyer train`: with --resume, which goes on from its last checkpoint)"
)
STOPPED = 130  # exit status of a training that a signal ended: saved, and not finished

COMMANDS = {
    "demo": "data, QHyer and a baseline trained, evaluated and reported, in minutes on a laptop",
    "data": "generate | check | info | convert | list | ant: datasets",
    "train": "AGENT DATASET: train an agent",
    "eval": "RUN... | --model NAME: evaluate trained runs, or an exported model",
    "export": "RUN: write its policy as a small model to pass on",
    "show": "RUN | MODEL: one episode as an animation and a strip of pictures",
    "sweep": "MANIFEST: train and evaluate many: agents × datasets × seeds, here or on a Ray cluster",
    "ablate": "NAME: one ablation of QHyer, its variants at equal updates; without NAME, what there is",
    "report": "RUN...: one page with tables and figures",
    "analyze": "NAME [RUN...]: answer one question, about runs or on its own",
    "bench": "all | train | agents | backbones | scan | infer | eval | data | traffic: how fast it is here",
    "list": "agents | datasets | presets | ablations | analyses | models: what there is",
    "doctor": "what works on this machine, and what to do about what does not",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `qhyer`. Errors meant for the user are printed without a traceback, exit code 2."""
    args = list(sys.argv[1:] if arguments is None else arguments)
    here = os.getcwd()
    if not {"", here} & set(sys.path):
        sys.path.append(here)  # as `python -m qhyer` has it: --env module:Id finds a module of this folder
    try:
        code = _dispatch(args) or 0
        if "qhyer.distributed" in sys.modules:
            sys.modules["qhyer.distributed"].end(code)
        sys.exit(code)
    except UserError as error:
        from rich.console import Console
        from rich.markup import escape

        Console(stderr=True).print(f"[red]error:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt as interrupt:
        if not interrupt.args:  # else what was interrupted has said so
            print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:
        if error.errno in FULL:
            where = f"{error.filename}: " if error.filename else ""
            print(f"error: {where}{(error.strerror or 'no space left').lower()}. {NO_ROOM}", file=sys.stderr)
            sys.exit(2)
        if error.filename is None:
            raise
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        sys.exit(2)


def _usage() -> str:
    lines = [
        f"qhyer {__version__}: offline goal-conditioned RL",
        "",
        "usage: qhyer COMMAND ...  (--help after any)",
        "",
    ]
    return "\n".join(lines + [f"  {name:<9}{text}" for name, text in COMMANDS.items()])


def _dispatch(args: list[str]) -> int | None:
    if not args or args[0] in ("-h", "--help"):
        print(_usage())
        return 0
    if args[0] == "--version":
        print(__version__)
        return 0
    command, rest = args[0], args[1:]
    handlers: dict[str, Callable[[list[str]], int | None]] = {
        "demo": _demo,
        "data": _data,
        "train": _train,
        "eval": _eval,
        "export": _export,
        "show": _show,
        "sweep": _sweep,
        "ablate": _ablate,
        "report": _report,
        "analyze": _analyze,
        "bench": _bench,
        "list": _list,
        "doctor": _doctor,
    }
    if command not in handlers:
        raise UserError(f"no command is called {command!r}{did_you_mean(command, handlers)}\n\n{_usage()}")
    return handlers[command](rest)


def _subcommands(prog: str, args: list[str], functions: dict[str, Callable[..., int | None]]) -> int | None:
    return tyro.extras.subcommand_cli_from_dict(functions, prog=prog, args=args)


def _data(args: list[str]) -> int | None:
    from qhyer.data import commands

    return _subcommands(
        "qhyer data",
        args,
        {
            "generate": commands.generate,
            "check": commands.check,
            "info": commands.info,
            "convert": commands.convert,
            "list": commands.list_,
            "ant": commands.ant,
        },
    )


# ------------------------------------------------------------------------------------------------------ train


@dataclass(frozen=True)
class _TrainOptions:
    """Options of `qhyer train` that are not the agent's."""

    steps: int | None = None
    """updates; the preset's when not given. Of an agent with two stages those of the second: GAS's first has
    --agent.distance-steps, which this leaves as it is"""
    seeds: tuple[int, ...] = ()
    """instead of --seed: train these together, a run for each; on CUDA side by side (docs/scale.md)"""
    out: Path | None = None
    """the run's folder, or with --seeds the folder of theirs (s0, s1 ...); when not given,
    runs/DATASET/AGENT-PRESET-sSEED-HASH"""
    resume: bool = False
    """continue an unfinished run (on a CPU bit for bit)"""
    goal: tuple[str, ...] = ()
    """own data: the coordinates that make the goal, by index or name"""
    env: str | None = None
    """own data: gymnasium id of the environment to evaluate in"""


def _train(args: list[str]) -> int | None:
    from qhyer import agents, distributed, presets, runs
    from qhyer.config import replace
    from qhyer.data import registry
    from qhyer.data.episodes import FILES, HDF5
    from qhyer.train import Stopped, TrainConfig, train, train_seeds

    parser = argparse.ArgumentParser(
        prog="qhyer train",
        description=f"Train an agent. Agents: {', '.join(agents.names())}. Give AGENT and DATASET before --help to see "
        "all options of that agent.",
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("agent", help="agent name (`qhyer list agents`)")
    parser.add_argument("dataset", help="dataset name (`qhyer list datasets`) or path of an npz or HDF5 (docs/data.md)")
    parser.add_argument("--preset", default="paper", help="which preset (`qhyer list presets AGENT`)")
    if len(args) < 2 or args[0].startswith("-") or args[1].startswith("-"):
        parser.print_help()
        if {"-h", "--help"} & set(args):
            return 0
        if args and not args[0].startswith("-"):
            agents.load(args[0])
            raise UserError(f"DATASET is missing, a name or a file: qhyer train {args[0]} DATASET [options]")
        raise UserError("name the agent and the dataset first: qhyer train AGENT DATASET [options]")
    known, rest = parser.parse_known_args(args)
    path = Path(known.dataset)
    name = path.stem if path.suffix in FILES else registry.get(known.dataset).name
    if path.suffix in HDF5:
        name = name.replace("-sparse", "")  # D4RL's files say so where its names do not
    config, _ = presets.resolve(known.agent, known.preset, name)
    options_type = dataclasses.make_dataclass(
        "Options",
        [
            ("train", Annotated[TrainConfig, tyro.conf.arg(name="")], field(default=TrainConfig())),
            ("agent", type(config), field(default=config)),
        ],
        bases=(_TrainOptions,),
        frozen=True,
    )
    options: Any = tyro.cli(
        options_type,
        args=rest,
        prog=f"qhyer train {known.agent} {known.dataset}",
        description=f"Train {known.agent} on {name}, preset {known.preset}. Values shown are the preset's. "
        f"--preset takes {', '.join(presets.table(known.agent))}.",
    )
    config = options.agent if options.steps is None else replace(options.agent, {"steps": options.steps})
    left = presets.untouched_stages(known.agent, known.preset, name, config)
    episodes = None
    if options.goal:
        from qhyer.data.episodes import Episodes, coordinate

        if path.suffix not in FILES:
            raise UserError("--goal is for your own file; a registered dataset has its goal coordinates")
        episodes = Episodes.load(path, goal=list(map(coordinate, options.goal)))  # type: ignore[arg-type]
    what = (known.agent, str(path) if path.suffix in FILES else name, config)
    common: dict[str, Any] = dict(
        preset=known.preset, resume=options.resume, episodes=episodes, environment=options.env
    )
    given = {argument.split("=")[0] for argument in rest}
    if {"--seed", "--seeds"} <= given:
        raise UserError("give either --seed or --seeds")
    if "--seeds" in given and not options.seeds:
        raise UserError("--seeds needs at least one")
    with distributed.processes(runs.resolve_device(options.train.device)) as device:
        if left and distributed.is_main():
            print(f"note: {left}", file=sys.stderr)
        how = replace(options.train, {"device": device}) if distributed.active() else options.train
        try:
            if options.seeds:
                made = train_seeds(*what, how, options.seeds, out=options.out, **common)
            else:
                made = [train(*what, how, run=options.out, **common)]
            said, status = [f"run: {run}" for run in made], 0
        except Stopped as stopped:
            # torchrun would call it a failure of a process, and print pages.
            said, status = [str(stopped)], 0 if distributed.active() else STOPPED
        if distributed.is_main():
            print("\n".join(said), flush=True)
    return status


# ------------------------------------------------------------------------------------------------------- eval


@dataclass(frozen=True)
class _EvalOptions:
    """Options of `qhyer eval` that are not the protocol's."""

    model: str | None = None
    """instead of runs: an exported model, by name (`qhyer list models`) or folder"""
    out: Path | None = None
    """of a model: the folder for its rows; runs/eval-NAME when not given"""
    step: int | None = None
    """evaluate this checkpoint instead of the last"""
    env: str | None = None
    """environment, where the run does not name one"""
    overwrite: bool = False
    """replace a longer evaluation of the same checkpoint"""
    device: str = "cpu"
    """where the policy acts: cpu, cuda or auto"""
    workers: int | None = None
    """processes that step environments; one per core when not given"""


def _eval(args: list[str]) -> int | None:
    from qhyer.evaluate import EvalConfig
    from qhyer.runs import below, cut_short, evaluate_run, score_text, task_text

    options_type = dataclasses.make_dataclass(
        "Options",
        [
            ("runs", tyro.conf.Positional[tuple[Path, ...]]),
            ("eval", Annotated[EvalConfig, tyro.conf.arg(name="")], field(default=EvalConfig())),
        ],
        bases=(_EvalOptions,),
        frozen=True,
        kw_only=True,
    )
    options: Any = tyro.cli(
        options_type,
        args=args,
        prog="qhyer eval",
        description="Evaluate trained runs (in a folder: all), or a model, on every task of the environment; "
        "rows go to RUN/episodes.csv.",
    )
    common: dict[str, Any] = dict(
        environment=options.env, device=options.device, workers=options.workers, overwrite=options.overwrite
    )
    if options.model is not None:
        if options.runs or options.step is not None:
            raise UserError("--model goes without runs and without --step: qhyer eval --model NAME")
        from qhyer.models import evaluate_model

        rate, out = evaluate_model(options.model, options.eval, out=options.out, **common)
        print(f"{options.model}: success {100 * rate:.1f} % (rows in {out})")
        _by_task(task_text(out))
        return 0
    if not options.runs:
        raise UserError("give at least one run's folder: qhyer eval RUN..., or a model: qhyer eval --model NAME")
    if options.out is not None:
        raise UserError("--out goes with --model; the rows of a run stay with the run")
    chosen, failed, kept, taken = below(*options.runs), 0, 0, 0
    notes: set[str] = set()
    for run in chosen:
        try:
            rate = evaluate_run(run, options.eval, step=options.step, told=notes, **common)
        except UserError as error:
            if len(chosen) == 1:
                raise
            longer, elsewhere = isinstance(error, Kept), isinstance(error, Taken)
            kept, taken = kept + longer, taken + elsewhere
            failed += not longer and not elsewhere  # the others need not wait for it
            told = str(error) if str(run) in str(error) else f"{run}: {error}"
            what = "kept" if longer else "left to another process" if elsewhere else "skipped"
            print(f"{what}: {told}", file=sys.stderr)
            continue
        print(f"{run}: success {100 * rate:.1f} %{score_text(run, options.step, options.env)}")
        _by_task(task_text(run, options.step))
        early = cut_short(run, options.step)
        if early:
            print(f"note: {early}", file=sys.stderr)
    if kept:
        print(f"{kept} of {len(chosen)} runs keep the evaluation they have (see above)", file=sys.stderr)
    if taken:
        print(f"{taken} of {len(chosen)} runs are left to another process (see above)", file=sys.stderr)
    if failed:
        raise UserError(f"{failed} of {len(chosen)} runs could not be evaluated (see above)")
    return 2 if kept or taken else 0


def _by_task(line: str) -> None:
    """Below the line with the mean, which scripts may read as it is."""
    if line:
        print(f"  {line}")


# ----------------------------------------------------------------------------------------------------- models


def _export(args: list[str]) -> int | None:
    from qhyer.models import export_command

    return tyro.cli(export_command, args=args, prog="qhyer export")


def _show(args: list[str]) -> int | None:
    from qhyer.show import show

    return tyro.cli(show, args=args, prog="qhyer show")


def _list_models() -> int:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from qhyer import models

    found = models.available()
    if not found:
        raise UserError(
            f"there are no models (looked in {', '.join(map(str, models.folders()))}); `qhyer export RUN` makes one"
        )
    table = Table()
    for column in ("model", "agent", "dataset", "updates", "success %", "by task", "size"):
        table.add_column(column, overflow="fold")
    for name, folder in found.items():
        try:
            about = models.read(folder)
        except UserError as error:
            table.add_row(escape(name), "", escape(str(error)), "", "", "", "")
            continue
        scores = about["scores"]
        mean = f"{100 * scores['mean']:.1f}" if scores else "not evaluated"
        tasks = " ".join(f"{100 * task['success']:.0f}" for task in scores["tasks"].values()) if scores else ""
        size = models.size_text(about)
        table.add_row(escape(name), about["agent"], escape(about["dataset"]), f"{about['updates']}", mean, tasks, size)
    Console().print(table)
    return 0


# ------------------------------------------------------------------------------------------------- the others


def _sweep(args: list[str]) -> int | None:
    from qhyer.sweep import sweep

    return tyro.cli(sweep, args=args, prog="qhyer sweep")


def _ablate(args: list[str]) -> int | None:
    from qhyer.ablate import ablate

    return tyro.cli(ablate, args=args, prog="qhyer ablate")


def _report(args: list[str]) -> int | None:
    from qhyer.report import commands

    return tyro.cli(functools.partial(commands.report, preset_of=_preset), args=args, prog="qhyer report")


def _preset(agent: str, preset: str, dataset: str) -> dict[str, Any] | None:
    from qhyer import presets
    from qhyer.config import to_dict

    try:
        return to_dict(presets.resolve(agent, preset, dataset)[0])
    except UserError:  # of a version that knew more, or less
        return None


def _analyze(args: list[str]) -> int | None:
    from qhyer.analyses import commands

    return commands.main(args)


def _bench(args: list[str]) -> int | None:
    from qhyer.bench.agents import every_agent
    from qhyer.bench.all import everything
    from qhyer.bench.backbones import backbones
    from qhyer.bench.data import data
    from qhyer.bench.eval import evaluation
    from qhyer.bench.infer import infer
    from qhyer.bench.scan import scan
    from qhyer.bench.traffic import traffic
    from qhyer.bench.train import updates

    benches: dict[str, Callable[..., int | None]] = {
        "all": everything,
        "train": updates,
        "agents": every_agent,
        "backbones": backbones,
        "scan": scan,
        "infer": infer,
        "eval": evaluation,
        "data": data,
        "traffic": traffic,
    }
    return _subcommands("qhyer bench", args, benches)


def _doctor(args: list[str]) -> int | None:
    from qhyer.doctor import doctor

    return tyro.cli(doctor, args=args, prog="qhyer doctor")


def _demo(args: list[str]) -> int | None:
    from qhyer.demo import demo

    return tyro.cli(demo, args=args, prog="qhyer demo")


def _list(args: list[str]) -> int | None:
    def show(
        what: tyro.conf.Positional[Literal["agents", "datasets", "presets", "ablations", "analyses", "models"]],
        agent: tyro.conf.Positional[str | None] = None,
    ) -> int:
        """Print what there is.

        Args:
            what: of which kind
            agent: of presets: this agent's alone, every line with what it changes and its source
        """
        if agent is not None and what != "presets":
            raise UserError(f"an agent's name goes with presets: qhyer list presets {agent}")
        from rich.console import Console
        from rich.table import Table

        if what == "datasets":
            from qhyer.data import commands

            return commands.list_() or 0
        if what == "models":
            return _list_models()
        from qhyer import agents, presets

        table = Table()
        if what == "agents":
            table.add_column("agent")
            table.add_column("what it is")
            for name in agents.names():
                module = sys.modules[agents.load(name).__module__]
                table.add_row(name, (module.__doc__ or "").strip().splitlines()[0])
        elif what == "presets" and agent is not None:
            for column in ("preset", "datasets", "what differs", "source"):
                table.add_column(column)
            for preset, rules in presets.table(agent).items():
                for rule in rules:
                    differs = ", ".join(f"{k} {v}" for k, v in rule.overrides.items())
                    table.add_row(preset, rule.pattern, differs, rule.source)
        elif what == "presets":
            for column in ("agent", "preset", "datasets with settings of their own"):
                table.add_column(column)
            for name in agents.names():
                for preset, rules in presets.table(name).items():
                    own = dict.fromkeys(rule.pattern for rule in rules if rule.pattern != "*")
                    table.add_row(name, preset, ", ".join(own))
            table.caption = "`qhyer list presets AGENT`: what each changes, and where it is from"
        elif what == "ablations":
            from qhyer.ablate import ablations

            table.add_column("ablation")
            table.add_column("the question it answers")
            for name, ablation in ablations().items():
                table.add_row(name, ablation.question)
        else:
            from qhyer import analyses

            table.add_column("analysis")
            table.add_column("the question it answers")
            for name in analyses.names():
                table.add_row(name, analyses.question(name))
        Console().print(table)
        return 0

    return tyro.cli(show, args=args, prog="qhyer list")


if __name__ == "__main__":
    main()
