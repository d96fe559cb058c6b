"""A sweep's manifest: TOML with grids of agents × datasets × seeds, read into the runs it asks for.

    out = "runs/ablation"                        # the runs' folder, seen from where the command is typed

    [[grid]]
    agents = ["qhyer", "gcbc"]
    datasets = ["cube-single-play"]              # registered names, or npz files (then also: goal, environment)
    seeds = [0, 1, 2]
    preset = "paper"                             # of each agent

    [grid.override]                              # fields of the agents' configurations
    steps = 100_000
    [grid.override.qhyer]                        # of this agent alone
    expectile = 0.95

    [grid.vary]                                  # a run for each value
    backbone = ["attention", "mamba", "hybrid"]

    [grid.variants.no-q]                         # a run for each table, under its name
    conditioning = "none"

    [grid.train]                                 # fields of TrainConfig
    save_every = 5000

    [grid.eval]                                  # fields of EvalConfig, device; or eval = false: train only
    episodes = 50

Outside a grid, the same keys hold for every grid that does not say otherwise. A table [ablation] is for `qhyer ablate`
(ablate.py), which has manifests of its own, and says nothing about the runs. A key that is not known, a value of the
wrong kind and two grids that disagree about one run are errors that name the place; nothing is started.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qhyer import agents, presets
from qhyer.agent import AgentConfig
from qhyer.config import chosen, fingerprint, replace
from qhyer.data import registry
from qhyer.errors import UserError, did_you_mean
from qhyer.evaluate import EvalConfig
from qhyer.runs import check_device
from qhyer.train import TrainConfig

KEYS = (
    "agents", "datasets", "seeds", "preset", "override", "vary", "variants", "train", "eval", "goal", "environment",
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One run of a sweep: what is trained on what, how it is evaluated, and where it goes."""

    agent: str
    preset: str
    variant: str
    """what sets it apart from other cells of the same agent and preset; mostly empty"""
    dataset: str
    """a registered name, or the path of an npz"""
    seed: int
    config: AgentConfig
    train: TrainConfig
    eval: EvalConfig | None
    """None: it is not evaluated"""
    eval_device: str
    goal: tuple[int | str, ...] | None
    environment: str | None
    out: Path
    place: str = dataclasses.field(default="", compare=False)
    """where it was asked for; errors about it begin so"""

    @property
    def dataset_name(self) -> str:
        return Path(self.dataset).stem if self.dataset.endswith(".npz") else self.dataset

    @property
    def name(self) -> str:
        """DATASET/AGENT-PRESET[-VARIANT]-sSEED-HASH: another configuration, another folder."""
        parts = [chosen(self.config), self.train.precision, self.goal]
        words = [self.agent, self.preset, re.sub(r"[^\w.]+", "-", self.variant).strip("-"), f"s{self.seed}"]
        return f"{self.dataset_name}/{'-'.join(filter(None, words))}-{fingerprint(parts)}"

    @property
    def folder(self) -> Path:
        return self.out / self.name


def read(path: Path) -> list[Cell]:
    """The runs that a manifest asks for, each once."""
    return cells(load(path), str(path))


def load(path: Path) -> dict[str, Any]:
    """What a manifest says, as it is written."""
    path = Path(path)
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"there is no manifest at {path}; docs/examples/sweep.toml is one to start from") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; a manifest is a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as TOML: {error}") from None


def cells(values: Mapping[str, Any], path: str) -> list[Cell]:
    """The runs that these values ask for, each once; errors begin with `path`."""
    values = dict(values)
    values.pop("ablation", None)
    out = Path(_text(values.pop("out", "runs"), f"{path}: out"))
    grids = values.pop("grid", None)
    if grids is None:
        grids, places = [{}], [path]
    else:
        if not isinstance(grids, list) or not all(isinstance(grid, dict) for grid in grids):
            raise UserError(f"{path}: grid: write each grid as a table [[grid]]")
        places = [f"{path}: grid {number}" for number in range(1, len(grids) + 1)]
    _known(values, (*KEYS, "out", "grid"), path)
    found: dict[str, tuple[Cell, str]] = {}
    for grid, place in zip(grids, places):
        _known(grid, KEYS, place)
        for cell in _expand(_merge(values, grid), place, out):
            before, where = found.setdefault(cell.name, (cell, place))
            if before.dataset != cell.dataset:
                raise UserError(
                    f"{place}: {before.dataset} and {cell.dataset} would be one run, {cell.name}: runs are named after "
                    "their files, give these different names"
                )
            if before != cell:
                raise UserError(
                    f"{place} and {where} ask for the same run, {cell.name}, with different train, eval or "
                    "environment: make these equal, or leave the run out of one of them"
                )
    if not found:
        raise UserError(f"{path} asks for no run: it has no grid with agents, datasets and seeds")
    return [cell for cell, _ in found.values()]


# ------------------------------------------------------------------------------------------------------ one grid


def _merge(common: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """What a grid says, and where it says nothing, what stands outside; tables are joined key by key."""
    merged = {**common, **own}
    for key in common.keys() & own.keys():
        if isinstance(common[key], dict) and isinstance(own[key], dict):
            merged[key] = _merge(common[key], own[key])
    return merged


def _expand(grid: Mapping[str, Any], place: str, out: Path) -> Iterator[Cell]:
    names = _list(grid, "agents", place, lambda value, where: _text(value, where))
    for name in names:
        _near(name, agents.names(), f"{place}: agents", "agent")
    datasets = _list(grid, "datasets", place, _dataset)
    seeds = _list(grid, "seeds", place, lambda value, where: _typed(int, value, where))
    if any(seed < 0 for seed in seeds):
        raise UserError(f"{place}: seeds: a seed cannot be negative")
    preset = _text(grid.get("preset", "paper"), f"{place}: preset")
    goal = None
    if "goal" in grid:
        if not all(dataset.endswith(".npz") for dataset in datasets):
            raise UserError(f"{place}: goal: it is for npz files; a registered dataset has its goal coordinates")
        goal = tuple(_list(grid, "goal", place, _coordinate))
    environment = grid.get("environment")
    if environment is not None:
        _text(environment, f"{place}: environment")
    train = _train_config(_table(grid, "train", place), f"{place}: train")
    evaluation, device = _eval_config(grid.get("eval", True), f"{place}: eval")
    for dataset in datasets:
        if evaluation is not None and environment is None and Path(dataset).stem not in registry.DATASETS:
            raise UserError(
                f"{place}: environment: name the one to evaluate {dataset} in, or write eval = false "
                "(with `qhyer ablate`: --env)"
            )
    override, variants = _table(grid, "override", place), _variants(grid, place)
    for agent in names:
        _near(preset, list(presets.table(agent)), f"{place}: preset", f"preset of {agent}")
    for name in (key for key, value in override.items() if isinstance(value, dict)):
        _near(name, names, f"{place}: override.{name}", "agent of this grid")
    for agent, dataset, (variant, changes), seed in itertools.product(names, datasets, variants, seeds):
        named = Path(dataset).stem if dataset.endswith(".npz") else dataset
        config, _ = presets.resolve(agent, preset, named)
        common = {f"override.{key}": (key, value) for key, value in override.items() if not isinstance(value, dict)}
        own = {f"override.{agent}.{key}": (key, value) for key, value in override.get(agent, {}).items()}
        config = _apply(config, {**common, **own, **changes}, place, agent)
        yield Cell(
            agent=agent,
            preset=preset,
            variant=variant,
            dataset=dataset,
            seed=seed,
            config=config,
            train=replace(train, {"seed": seed}),
            eval=evaluation,
            eval_device=device,
            goal=goal,
            environment=environment,
            out=out,
            place=place,
        )


def _variants(grid: Mapping[str, Any], place: str) -> list[tuple[str, dict[str, tuple[str, Any]]]]:
    """Each variant's name and changes (written key -> field, value): named tables × the values of `vary`."""
    tables = _table(grid, "variants", place)
    for name, fields in tables.items():
        if not isinstance(fields, dict):
            raise UserError(f"{place}: variants.{name}: write it as a table [grid.variants.{name}]")
    vary = _table(grid, "vary", place)
    for key, values in vary.items():
        if not isinstance(values, list) or not values:
            raise UserError(f"{place}: vary.{key}: give a list of values, one run for each")
    found = []
    for name in tables or ("",):
        named = {f"variants.{name}.{key}": (key, value) for key, value in tables.get(name, {}).items()}
        for values in itertools.product(*vary.values()):
            chosen = dict(zip(vary, values))
            label = ", ".join(filter(None, [name, *(f"{key}={_label(value)}" for key, value in chosen.items())]))
            found.append((label, {**named, **{f"vary.{key}": (key, value) for key, value in chosen.items()}}))
    return found


def varied(values: Mapping[str, Any], place: str) -> dict[str, list[str]]:
    """The fields that set variants apart, of a manifest without grids -> the variants that set them."""
    found: dict[str, list[str]] = {}
    for name, changes in _variants(values, place):
        for field, _ in changes.values():
            found.setdefault(field, []).append(name)
    return found


def _label(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, list) else str(value).lower()


def _apply(config: AgentConfig, changes: Mapping[str, tuple[str, Any]], place: str, agent: str) -> AgentConfig:
    hints = typing.get_type_hints(type(config))
    fields = [field.name for field in dataclasses.fields(config)]
    typed = {}
    for key, (field, value) in changes.items():
        _near(field, fields, f"{place}: {key}", f"field of {agent}")
        typed[field] = _typed(hints[field], value, f"{place}: {key}")
    return _checked(lambda: replace(config, typed), f"{place}: {agent}")


def field_and_value(text: str) -> tuple[str, Any]:
    """FIELD=VALUE of a command line, with the value as a manifest has it."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UserError(f"--override {text}: write FIELD=VALUE, such as width=64 or goal_input=coordinates")
    try:
        read = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return name, value  # a word, without the quotes that a shell would eat
    if isinstance(read, dict):  # a manifest has tables here for single agents; behind one, a field would not be seen
        raise UserError(f"--override {text}: write FIELD=VALUE for each field, not a table")
    return name, read


def overridden(config: AgentConfig, texts: Iterable[str], agent: str) -> AgentConfig:
    """The agent's configuration with what a command line overrides."""
    return _apply(config, {name: (name, value) for name, value in map(field_and_value, texts)}, "--override", agent)


def _train_config(values: Mapping[str, Any], place: str) -> TrainConfig:
    if "seed" in values:
        raise UserError(f"{place}.seed: seeds are given by `seeds`")
    fields = _fields(TrainConfig, values, place)
    _device(fields.get("device", "auto"), f"{place}.device")
    return _checked(lambda: TrainConfig(**fields), place)


def _eval_config(values: Any, place: str) -> tuple[EvalConfig | None, str]:
    if isinstance(values, bool):
        return (EvalConfig() if values else None), "cpu"
    if not isinstance(values, dict):
        raise UserError(f"{place}: write a table, or false for none")
    values = dict(values)
    device = _device(_text(values.pop("device", "cpu"), f"{place}.device"), f"{place}.device")
    fields = _fields(EvalConfig, values, place)
    return _checked(lambda: EvalConfig(**fields), place), device


# --------------------------------------------------------------------------------------------------------- values

T = typing.TypeVar("T")


def _fields(cls: type, values: Mapping[str, Any], place: str) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    for key in values:
        _near(key, list(hints), f"{place}.{key}", f"field of {cls.__name__}")
    return {key: _typed(hints[key], value, f"{place}.{key}") for key, value in values.items()}


def _checked(make: Callable[[], T], place: str) -> T:
    try:
        return make()
    except UserError as error:
        raise UserError(f"{place}: {error}") from None


def _near(word: str, options: Iterable[str], place: str, what: str) -> None:
    """An error that suggests the nearest word, unless it is one of the options."""
    options = list(options)
    if word not in options:
        hint = did_you_mean(word, options) or f"; there are: {', '.join(options)}"
        raise UserError(f"{place}: no {what} is called {word!r}{hint}")


def _known(values: Mapping[str, Any], keys: Iterable[str], place: str) -> None:
    for key in values:
        _near(key, keys, place, "key")


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str) or not value:
        raise UserError(f"{place}: write it as text, not {value!r}")
    return value


def _table(grid: Mapping[str, Any], key: str, place: str) -> dict[str, Any]:
    value = grid.get(key, {})
    if not isinstance(value, dict):
        raise UserError(f"{place}: {key}: write it as a table, not {value!r}")
    return value


def _list(grid: Mapping[str, Any], key: str, place: str, read: Callable[[Any, str], T]) -> list[T]:
    values = grid.get(key)
    if not isinstance(values, list) or not values:
        said = "it is missing" if values is None else f"not {values!r}"
        raise UserError(f"{place}: {key}: give a list ({said})")
    return list(dict.fromkeys(read(value, f"{place}: {key}") for value in values))


def _dataset(value: Any, place: str) -> str:
    name = _text(value, place)
    if name.endswith(".npz"):
        return str(Path(name).resolve())
    if name.endswith((".hdf5", ".h5")):
        raise UserError(f"{place}: a sweep takes npz files; `qhyer data convert {name} FILE.npz` makes one of it")
    return _checked(lambda: registry.get(name).name, place)


def _device(name: str, place: str) -> str:
    """Whether there is such a device is for the machine to say that a run is made on."""
    return _checked(lambda: check_device(name), place)


def _coordinate(value: Any, place: str) -> int | str:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise UserError(f"{place}: a coordinate is an index or a name, not {value!r}")
    return value


def _typed(hint: Any, value: Any, place: str) -> Any:
    """The value as the field wants it (lists to tuples, integers to floats, "none" to None), or an error."""
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value == "none" and type(None) in options:
            return None
        (hint,) = (option for option in options if option is not type(None))
        return _typed(hint, value, place)
    if origin is typing.Literal:
        if not isinstance(value, str):
            raise UserError(f"{place}: {value!r} is none of {', '.join(options)}")
        _near(value, options, place, "choice")
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise UserError(f"{place}: give a list, not {value!r}")
        return tuple(_typed(options[0], item, place) for item in value)
    kinds = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    fits = isinstance(value, int | float if hint is float else hint) and isinstance(value, bool) == (hint is bool)
    if not fits:
        raise UserError(f"{place}: give {kinds[hint]}, not {value!r}")
    return float(value) if hint is float else value
