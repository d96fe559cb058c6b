"""Named ablations: one question each, its variants trained for the same number of updates, and a table of the answer.

`ablations/NAME.toml` is a manifest (manifest.py) with a table [ablation] that says what is asked:

    [ablation]
    place = 1                            # in the list
    question = "..."
    paper = "..."                        # what the paper found, in a sentence
    source = "..."                       # and where
    full = "flow"                        # the variant that is the paper's QHyer: its published scores go beside it
    [ablation.numbers.cube-single-play-v0]
    attention = [74, 1]                  # what the paper prints for other variants: mean, standard deviation

A run is that of a sweep. The variant that changes nothing is the same run in all ablations, and is made once.
"""

from __future__ import annotations

import dataclasses
import json
import math
import textwrap
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from qhyer.config import Precision, fingerprint, replace
from qhyer.errors import UserError, did_you_mean
from qhyer.launch import Launcher

if TYPE_CHECKING:
    from qhyer.manifest import Cell
    from qhyer.report.collect import Run

NOT_RUN = "not run"
NOTE = (
    "Success in percent at the last update, ± the standard deviation over seeds; the interval of 95 % is that of "
    "docs/protocol.md. Paper: as printed there (a million updates of 1024 on OGBench). All variants have had the same "
    "number of updates."
)


@dataclass(frozen=True)
class Ablation:
    name: str
    question: str
    paper: str
    source: str
    full: str = ""
    numbers: Mapping[str, Mapping[str, Sequence[float]]] = field(default_factory=dict)
    place: int = 0
    values: Mapping[str, Any] = field(default_factory=dict)
    """the manifest"""

    def published(self, dataset: str, variant: str) -> tuple[float, float]:
        """The paper's mean and standard deviation in percent; NaN where it prints none."""
        from qhyer.report.published import QHYER, canonical, for_dataset

        if (printed := self.numbers.get(dataset, {}).get(variant)) is not None:
            mean, std = printed
            return float(mean), float(std)
        for entry in for_dataset(dataset) if variant == self.full else ():
            if canonical(entry.agent) == "qhyer" and entry.source == QHYER:
                return entry.mean, math.nan if entry.std is None else entry.std
        return math.nan, math.nan


@cache
def ablations() -> dict[str, Ablation]:
    """All there are, in the order of their places."""
    found = []
    for file in resources.files("qhyer").joinpath("ablations").iterdir():
        if file.name.endswith(".toml"):
            values = tomllib.loads(file.read_text(encoding="utf-8"))
            found.append(Ablation(file.name.removesuffix(".toml"), **values["ablation"], values=values))
    return {ablation.name: ablation for ablation in sorted(found, key=lambda ablation: ablation.place)}


def get(name: str) -> Ablation:
    """The ablation of this name, or an error that suggests the nearest one."""
    name = name.replace("_", "-")
    if name not in ablations():
        hint = did_you_mean(name, ablations())
        raise UserError(f"no ablation is called {name!r}{hint} (there are: {', '.join(ablations())})")
    return ablations()[name]


def variant_names(ablation: Ablation) -> list[str]:
    """As its tables and figures call them."""
    from qhyer import manifest

    return list(dict.fromkeys(cell.variant for cell in manifest.cells(ablation.values, ablation.name)))


def ablate(
    name: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[NAME]")] = None,
    *,
    dataset: tuple[str, ...] = (),
    preset: str | None = None,
    seeds: tuple[int, ...] = (),
    steps: int | None = None,
    override: tuple[str, ...] = (),
    episodes: int | None = None,
    tasks: tuple[int, ...] = (),
    goal: tuple[str, ...] = (),
    env: str | None = None,
    device: str | None = None,
    precision: Precision | None = None,
    out: Path = Path("runs/ablations"),
    dry_run: bool = False,
    only: tuple[str, ...] = (),
    workers: int | None = None,
    launcher: Launcher = "local",
    address: str | None = None,
    cpus: float = 1.0,
    gpus: float = 0.0,
    shared: bool = False,
    retries: int = 3,
) -> int:
    """Run a named ablation: its variants × seeds, and a table and a figure of them. Without a name: what there is.

    Run it again to go on after a stop, or to make the table of finished runs again. Without options most ask for a GPU:
    cube-single-play with the preset fast. On a CPU: --dataset pointmaze-medium-stitch --preset demo.

    Args:
        name: an ablation; `qhyer ablate` alone lists them
        dataset: one dataset or more, or npz files; the ablation's own if not given, mostly cube-single-play
        preset: QHyer's, which all variants start from; the ablation's own if not given, mostly fast
        seeds: the ablation's own if not given, mostly 0 1 2 3
        steps: updates of every variant; the preset's if not given
        override: fields of QHyer's configuration for every variant, as FIELD=VALUE; none that a variant sets
        episodes: evaluation episodes for each task; 50 if not given
        tasks: evaluate on these alone; on all if not given
        goal: own data: the coordinates that make the goal, by index or name
        env: own data: the environment to evaluate in
        device: where to train and to act: cpu, cuda, or auto (if not given)
        precision: of the training; fp32 if not given
        out: the folder of the runs; the table goes to OUT/NAME-DATASET-PRESET.csv, .md, .png and .svg, or, where there
            is one of other options, to a name of its own beside it
        dry_run: show the runs and stop: how many updates each makes, and how far it is
        only: only runs whose name has one of these in it, such as s0- or mamba
        workers: runs at a time; 1 if not given (ray: as many as the cluster has room for)
        launcher: local, or ray: on a Ray cluster, with the same results
        address: the Ray cluster's; $RAY_ADDRESS, or the one running here, if not given
        cpus: ray: cores that a run asks for
        gpus: ray: GPUs that a run asks for; 0.5 lets two share one
        shared: ray: every node sees the output folder under the same path; runs are written there directly
        retries: how often a run is tried again after its worker was lost
    """
    if name is None:
        print(overview())
        return 0
    from qhyer.data.episodes import coordinate
    from qhyer.sweep import run_cells

    asked = get(name)
    changes: dict[str, Any] = {key: list(given) for key, given in (("datasets", dataset), ("seeds", seeds)) if given}
    changes |= {"out": str(out)} | ({"preset": preset} if preset else {}) | ({"environment": env} if env else {})
    changes |= {"goal": list(map(coordinate, goal))} if goal else {}
    fields = _overridden(asked, override, steps)
    protocol = {"episodes": episodes, "tasks": list(tasks) or None, "device": device}
    how = {"device": device, "precision": precision}
    for key, given in (("override", fields), ("eval", protocol), ("train", how)):
        changes[key] = {**asked.values.get(key, {}), **{k: v for k, v in given.items() if v is not None}}
    chosen = variants(asked, changes)
    print(f"{asked.question}\n")
    code = run_cells(
        list({cell.folder: cell for cells in chosen.values() for cell in cells}.values()),
        dry_run=dry_run,
        only=only,
        workers=workers,
        launcher=launcher,
        address=address,
        cpus=cpus,
        gpus=gpus,
        shared=shared,
        retries=retries,
    )
    if not dry_run:
        write(asked, chosen, out)
    return code


def overview() -> str:
    """What there is, each with its question, its variants and what the paper has."""
    blocks = ["qhyer ablate NAME runs one; --help lists the options.\n"]
    for ablation in ablations().values():
        numbers = [
            f"{dataset.removesuffix('-v0')}: "
            + ", ".join(f"{variant} {_paper(*ablation.published(dataset, variant))}" for variant in printed)
            for dataset in ("cube-single-play-v0", "cube-single-noisy-v0")
            if (printed := [v for v in variant_names(ablation) if not math.isnan(ablation.published(dataset, v)[0])])
        ]
        lines = [ablation.question, "variants: " + ", ".join(variant_names(ablation))]
        lines += [f"paper: {ablation.paper} ({ablation.source})", *(f"       {text}" for text in numbers)]
        body = [textwrap.fill(line, 112, initial_indent="  ", subsequent_indent="    ") for line in lines]
        blocks.append("\n".join([ablation.name, *body]) + "\n")
    return "\n".join(blocks).rstrip()


# ------------------------------------------------------------------------------------------------------- the runs

Chosen = dict[tuple[str, str], list["Cell"]]
"""(dataset, variant) -> its runs, a seed each"""


def _overridden(ablation: Ablation, override: Sequence[str], steps: int | None) -> dict[str, Any]:
    """What a command line gives to every variant. None of it may be what sets them apart: a variant that leaves the
    field alone, and is called after that, would be trained as another, under its own name."""
    from qhyer import manifest

    fields = dict(map(manifest.field_and_value, override))
    varied = manifest.varied(ablation.values, f"ablation {ablation.name}")
    if wrong := [name for name in fields if name in varied]:
        name = wrong[0]
        raise UserError(
            f"--override {name}: ablation {ablation.name} varies {name} (variants that set it: "
            f"{', '.join(varied[name])}), and its other rows would not be what they are called. Leave it out; --only "
            "keeps some of the variants, and `qhyer sweep` runs those of a manifest of your own (docs/scale.md)"
        )
    if steps is None:
        return fields
    if fields.get("steps", steps) != steps:
        raise UserError(f"--steps {steps} and --override steps={fields['steps']} contradict each other: leave one out")
    return {**fields, "steps": steps}


def variants(ablation: Ablation, changes: Mapping[str, Any]) -> Chosen:
    """The runs, by dataset and variant. The one that is just the preset has no variant in its folder's name."""
    from qhyer import manifest

    values, place = {**ablation.values, **changes}, f"ablation {ablation.name}"
    plain = {key: value for key, value in values.items() if key not in ("variants", "vary")}
    base = {(cell.dataset, cell.seed): cell for cell in manifest.cells(plain, place)}
    found: Chosen = {}
    for cell in manifest.cells(values, place):
        unchanged = base[cell.dataset, cell.seed]
        same = cell.config == unchanged.config
        found.setdefault((cell.dataset_name, cell.variant), []).append(unchanged if same else cell)
        if (cell.config.steps, cell.config.batch_size) != (unchanged.config.steps, unchanged.config.batch_size):
            raise UserError(f"{place}: {cell.variant} has other steps or batches than the rest: nothing to compare")
    return found


# ------------------------------------------------------------------------------------------------------ the answer


@dataclass(frozen=True)
class Line:
    """One variant on one dataset: what it scored and what the paper has; in percent."""

    ablation: str
    dataset: str
    variant: str
    preset: str
    updates: int
    batch: int
    seeds: int
    episodes: int
    mean: float
    std: float  # over seeds; NaN with one
    low: float
    high: float
    interval: str  # wilson | bootstrap
    seconds: float  # of a training, mean over seeds
    paper: float
    paper_std: float
    scores: tuple[float, ...] = ()
    """each seed's"""
    finished: tuple[int, ...] = ()
    """the seeds"""


def _run(cell: Cell) -> Run:
    """A run with the rows of the episodes that were asked for: others may have been evaluated more widely since."""
    from qhyer.report.collect import read_run
    from qhyer.sweep import asked_for

    run = read_run(cell.folder)
    if cell.eval is None:
        return run
    environment = cell.environment or run.info["environment"]
    asked = {(str(task), episode, str(seed)) for task, episode, seed in asked_for(cell, environment)}
    kept = tuple(row for row in run.last if (row.task, row.episode, row.env_seed) in asked)
    return dataclasses.replace(run, episodes=kept)


def lines(ablation: Ablation, chosen: Chosen) -> list[Line]:
    """A line for each dataset and variant, from its finished runs alone: all have had the same number of updates."""
    from qhyer.report.tables import Group, run_score, success
    from qhyer.sweep import status

    found = []
    for (dataset, variant), cells in chosen.items():
        runs = tuple(_run(cell) for cell in cells if status(cell).finished)
        first = cells[0]
        rows = success(Group(dataset, first.agent, first.preset, variant, variant, runs))
        row = rows[0] if rows else None
        times = [run.seconds for run in runs if run.seconds is not None]
        paper, paper_std = ablation.published(dataset, variant)
        found.append(
            Line(
                ablation=ablation.name,
                dataset=dataset,
                variant=variant,
                preset=first.preset,
                updates=first.config.steps,
                batch=first.config.batch_size,
                seeds=row.seeds if row else 0,
                episodes=row.episodes if row else 0,
                mean=row.mean if row else math.nan,
                std=row.std if row else math.nan,
                low=row.low if row else math.nan,
                high=row.high if row else math.nan,
                interval=row.interval if row else "",
                seconds=sum(times) / len(times) if times else math.nan,
                paper=paper,
                paper_std=paper_std,
                scores=tuple(100 * run_score(run.last) for run in runs),
                finished=tuple(run.seed for run in runs),
            )
        )
    return found


HEADER = ("variant", "success %", "95 % interval", "seeds", "updates × batch", "seconds", "paper")


def _paper(mean: float, std: float) -> str:
    from qhyer.report.tables import number

    return number(mean) + ("" if math.isnan(std) else f" ± {number(std)}")


def cells_of(line: Line) -> list[str]:
    """A line as it is printed, under HEADER."""
    from qhyer.report.tables import number

    budget, paper = f"{line.updates:,} × {line.batch}", _paper(line.paper, line.paper_std)
    if line.seeds == 0:
        return [line.variant, NOT_RUN, "", "0", budget, "", paper]
    spread = "" if math.isnan(line.std) else f" ± {number(line.std)}"
    interval = f"{number(line.low)}–{number(line.high)}"
    return [
        line.variant, number(line.mean) + spread, interval, str(line.seeds), budget, number(line.seconds, 0), paper
    ]  # fmt: skip


def settings(ablation: Ablation, cells: Sequence[Cell]) -> dict[str, Any]:
    """What makes a table's runs comparable: all that its variants have in common, but for the seeds."""
    from qhyer import presets
    from qhyer.config import to_dict

    first = cells[0]
    plain, _ = presets.resolve(first.agent, first.preset, first.dataset_name)
    usual, preset, configs = to_dict(type(plain)()), to_dict(plain), [to_dict(cell.config) for cell in cells]
    common = {name: value for name, value in configs[0].items() if all(config[name] == value for config in configs)}
    protocol = to_dict(first.eval) if first.eval is not None else {}
    return {
        "ablation": ablation.name,
        "dataset": first.dataset_name,
        "preset": first.preset,
        # Options that are as they always are do not count: a later version has more of them.
        "options": {n: v for n, v in common.items() if not v == preset[n] == usual[n]},
        "precision": first.train.precision,
        "goal": None if first.goal is None else list(first.goal),
        "environment": first.environment,
        **{name: protocol.get(name) for name in ("episodes", "tasks", "seed")},
    }


def settings_text(values: Mapping[str, Any], seeds: Sequence[int]) -> str:
    """As people read them: what the preset does not say."""
    from qhyer import presets
    from qhyer.config import to_dict

    usual = to_dict(presets.resolve("qhyer", values["preset"], values["dataset"])[0])
    own = [f"{name}={value}" for name, value in values["options"].items() if usual.get(name) != value]
    texts = [f"Seeds {', '.join(map(str, seeds))}"] if seeds else []
    texts += [values["precision"], f"{values['episodes']} episodes of each task"]
    texts += [f"tasks {', '.join(map(str, values['tasks']))}"] if values["tasks"] else []
    texts += [f"in {values['environment']}"] if values["environment"] else []
    texts += [f"beside the preset: {', '.join(own)}"] if own else []
    return "; ".join(texts) + "."


def _differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Which settings differ, in words; an option that is in one of them alone is a default in the other."""
    flat = [{**values, **values["options"]} for values in (there, here)]
    names = [name for name in dict.fromkeys([*flat[0], *flat[1]]) if name != "options"]
    return ", ".join(
        f"{name} {flat[0].get(name, 'as usual')} there and {flat[1].get(name, 'as usual')} here"
        for name in names
        if flat[0].get(name) != flat[1].get(name)
    )


def place(stem: Path, values: Mapping[str, Any]) -> tuple[Path, list[int], str]:
    """Where a table of these settings goes, the seeds it has already, and a sentence where that is not `stem`.

    The first table has the plain name. One of other settings is put beside it, under a name with their fingerprint, so
    that neither is lost or mixed with the other.
    """
    own = stem.with_name(f"{stem.name}-{fingerprint(values)}")
    why = ""
    for path in (own, stem):
        try:
            found = json.loads(Path(f"{path}.json").read_text(encoding="utf-8"))
            there, seeds = found["settings"], [int(seed) for seed in found["seeds"]]
        except FileNotFoundError:
            continue
        except (ValueError, KeyError, TypeError):
            why = f"{path}.json cannot be read"
            continue
        if there == values:
            return path, seeds, ""
        why = f"{path}.csv is of other settings ({_differences(there, values)})"
    if not Path(f"{stem}.csv").exists() and not why:
        return stem, [], ""
    return own, [], f"{why or f'{stem}.csv does not say its settings'}: it stays, and this table is {own}.csv"


def with_seeds(chosen: Chosen, dataset: str, seeds: Sequence[int]) -> Chosen:
    """The runs on one dataset, with those of more seeds."""
    found: Chosen = {}
    for key, cells in chosen.items():
        if key[0] == dataset:
            first, have = cells[0], {cell.seed for cell in cells}
            more = [seed for seed in seeds if seed not in have]
            others = [replace(first, {"seed": seed, "train": replace(first.train, {"seed": seed})}) for seed in more]
            found[key] = sorted([*cells, *others], key=lambda cell: cell.seed)
    return found


def other_data(chosen: Chosen) -> str:
    """A sentence where finished runs of one dataset's variants have seen different data of that name."""
    from qhyer.sweep import data_seen, status

    variant = {cell.name: key[1] for key, cells in chosen.items() for cell in cells}
    seen = data_seen([cell for cells in chosen.values() for cell in cells if status(cell).finished])
    told = [
        f"{', '.join(dict.fromkeys(variant[cell.name] for cell in cells))} on {print_}"
        for print_, cells in seen.items()
    ]
    return f"Not all were trained on the same data of this name: {'; '.join(told)}." if len(seen) > 1 else ""


def write(ablation: Ablation, chosen: Chosen, out: Path) -> list[Line]:
    """Prints a table for each dataset, and writes it as CSV, Markdown and figures, with its settings beside it."""
    from qhyer.analyses._output import show
    from qhyer.report.tables import markdown, to_csv
    from qhyer.storage import write_json, write_text

    found: list[Line] = []
    names = [item.name for item in dataclasses.fields(Line) if item.name not in ("scores", "finished")]
    for dataset in dict.fromkeys(dataset for dataset, _ in chosen):
        cells = [cell for key, each in chosen.items() if key[0] == dataset for cell in each]
        values, asked = settings(ablation, cells), sorted({cell.seed for cell in cells})
        # Not with_suffix: a dataset's name may have a point in it.
        path, before, told = place(out / f"{ablation.name}-{dataset}-{cells[0].preset}", values)
        all_seeds = with_seeds(chosen, dataset, sorted({*asked, *before}))
        mine = lines(ablation, all_seeds)
        found += mine
        seeds = sorted({seed for line in mine for seed in line.finished})  # of any variant; not all that were asked for
        about = settings_text(values, seeds)
        print(f"\n{ablation.name} on {dataset}, preset {mine[0].preset}\n{about}")
        show(HEADER, [cells_of(line) for line in mine])
        if not any(line.seeds for line in mine):
            print("no run is finished yet: the same command goes on")
            continue
        if told:
            print(f"note: {told}")
        if earlier := [str(seed) for seed in seeds if seed not in asked]:
            print(f"note: with seeds {', '.join(earlier)} of earlier calls")
        if mixed := other_data(all_seeds):
            print(f"note: {mixed}")
        body = [
            f"### {ablation.name} on {dataset}, preset {mine[0].preset}",
            ablation.question,
            markdown(HEADER, [cells_of(line) for line in mine]).rstrip(),
            textwrap.fill(" ".join(filter(None, [about, mixed])), 120),
            textwrap.fill(f"{NOTE} The paper on this: {ablation.paper} ({ablation.source}).", 120),
        ]
        write_json(Path(f"{path}.json"), {"settings": values, "seeds": seeds})
        write_text(Path(f"{path}.csv"), to_csv(names, ([getattr(line, name) for name in names] for line in mine)))
        write_text(Path(f"{path}.md"), "\n\n".join(body) + "\n")
        draw(ablation, mine, path)
        print(f"written: {path}.csv, .md, .png and .svg; .json has its settings")
    return found


def draw(ablation: Ablation, mine: Sequence[Line], path: Path) -> None:
    """A bar for each variant with its interval, a dot for each seed, and the paper's number as a diamond."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from qhyer.analyses._output import save_figure, style
    from qhyer.report.figures import THEME

    ours, ink, theirs = (THEME[name][0] for name in ("agent-1", "ink", "agent-0"))
    diamond: dict[str, Any] = dict(color=theirs, markerfacecolor="white", markeredgewidth=1.5, markersize=6)
    with matplotlib.rc_context(style()):
        figure, axes = plt.subplots(figsize=(6.4, 1.0 + 0.36 * len(mine)), layout="constrained")
        for place, line in enumerate(mine):
            if line.seeds:
                axes.barh(place, line.mean, height=0.62, color=ours, alpha=0.75)
                axes.plot([line.low, line.high], [place, place], color=ink, linewidth=1.2)
                axes.plot(line.scores, [place] * len(line.scores), ".", color=ink, markersize=4)
            else:
                axes.text(1, place, NOT_RUN, va="center", color=ink, alpha=0.6)
            if not math.isnan(line.paper):
                axes.plot([line.paper], [place], "D", **diamond, clip_on=False)
        if not all(math.isnan(line.paper) for line in mine):
            axes.plot([], [], "D", **diamond, label="paper")
        axes.plot([], [], color=ink, marker=".", linewidth=1.2, label="95 % interval, seeds")
        axes.set_yticks(range(len(mine)), [line.variant for line in mine])
        axes.set_ylim(len(mine) - 0.5, -0.5)
        axes.set_xlim(0, 100)
        axes.set_xlabel("success %")
        axes.set_title(f"{ablation.name}, {mine[0].dataset}: {mine[0].updates:,} updates, preset {mine[0].preset}")
        axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
        save_figure(figure, Path(f"{path}.png"))
        plt.close(figure)
