"""Agents, found by discovery: `agents/NAME.py` defines the one `Agent` subclass called NAME (in any case)."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

from qhyer.agent import Agent
from qhyer.errors import UserError, did_you_mean


def names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def load(name: str) -> type[Agent]:
    """The agent class of this name, or an error that suggests the nearest one."""
    if name not in names():
        hint = did_you_mean(name, names())
        raise UserError(f"no agent is called {name!r}{hint} (there are: {', '.join(names())})")
    module = importlib.import_module(f"{__name__}.{name}")
    found = [
        item
        for item in vars(module).values()
        if inspect.isclass(item) and issubclass(item, Agent) and item.__module__ == module.__name__
    ]
    assert len(found) == 1, f"agents/{name}.py must define one Agent, it defines {len(found)}"
    return found[0]
