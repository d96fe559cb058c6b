"""Analyses, found by discovery: `analyses/NAME.py` answers one question.

The first line of a module's docstring is the question. Its function

    run(run: Path, *, device: str = "cpu", data: Path | None = None) -> Path

writes RUN/analyses/NAME.npz or .json, whole or not at all, prints a short answer, and returns the file.
`data` is an npz to look at instead of the dataset the run was trained on (its validation file, for example).
Where it also has a function

    compare(folders: Sequence[Path], out: Path | None = None) -> Path

the command calls it once with all runs that were answered: it puts what `run` wrote for them side by side, in a table
and a figure beside one run's own file, or in results/analyses/NAME/ or `out` for several.

An analysis that makes its own data has no parameter `run`:

    run(*, seeds: int = 5, out: Path | None = None, ...) -> Path

Its keywords are its options, described in its docstring, and it writes to results/analyses/NAME/ or `out`. A hyphen in
a name is an underscore: `qhyer analyze gridworld-density` is gridworld_density.py.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import Any, Protocol

from qhyer.errors import UserError, did_you_mean

NOT_ANALYSES = {"commands"}


class Analysis(Protocol):
    """What a module of this package is."""

    __doc__: str | None

    run: Any
    """run(run, *, device, data) or run(*, ...): see above"""


def names() -> list[str]:
    found = (module.name for module in pkgutil.iter_modules(__path__))
    return sorted(name for name in found if not name.startswith("_") and name not in NOT_ANALYSES)


def load(name: str) -> Analysis:
    """The analysis of this name, or an error that suggests the nearest one."""
    name = name.replace("-", "_")
    if name not in names():
        hint = did_you_mean(name, names())
        raise UserError(f"no analysis is called {name!r}{hint} (there are: {', '.join(names())})")
    return importlib.import_module(f"{__name__}.{name}")


def needs_run(name: str) -> bool:
    """Whether it looks at trained runs, or makes its own data."""
    return "run" in inspect.signature(load(name).run).parameters


def question(name: str) -> str:
    """The first line of the module's docstring."""
    return (load(name).__doc__ or "").strip().splitlines()[0]
