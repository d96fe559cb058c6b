"""Presets: per agent, what differs per dataset, and where each value comes from.

`presets/AGENT.py` holds `PRESETS`: preset name -> list of (dataset pattern, overrides, source). All patterns that
match a dataset apply in order, so a preset lists differences only. `paper` is what the agent's paper says.
"""

from __future__ import annotations

import fnmatch
import importlib
from dataclasses import dataclass, field
from typing import Any

from qhyer import agents
from qhyer.agent import AgentConfig
from qhyer.config import replace
from qhyer.errors import UserError


@dataclass(frozen=True)
class Rule:
    """These overrides, for datasets matching the pattern, from this source."""

    pattern: str
    source: str
    overrides: dict[str, Any] = field(default_factory=dict)


def table(agent: str) -> dict[str, list[Rule]]:
    """All presets of an agent."""
    agents.load(agent)
    module = f"{__name__}.{agent}"
    try:
        return importlib.import_module(module).PRESETS
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise UserError(f"agent {agent} has no presets yet: write src/qhyer/presets/{agent}.py") from None


def resolve(agent: str, preset: str, dataset: str) -> tuple[AgentConfig, list[Rule]]:
    """The agent's configuration for a dataset, and the rules that made it."""
    presets = table(agent)
    if preset not in presets:
        raise UserError(f"{agent} has no preset {preset!r}; it has {', '.join(presets)}")
    rules = [rule for rule in presets[preset] if fnmatch.fnmatchcase(dataset, rule.pattern)]
    config = agents.load(agent).Config()
    for rule in rules:
        config = replace(config, rule.overrides)
    return config, rules


def untouched_stages(agent: str, preset: str, dataset: str, config: AgentConfig) -> str:
    """A sentence where `steps` was changed and the updates of an agent's other stages were not: who shortens a training
    may think that all of it is shorter."""
    usual, _ = resolve(agent, preset, dataset)
    others = [name for name in config.stage_steps if name != "steps"]
    kept = [name for name in others if getattr(config, name) == getattr(usual, name)]
    if config.steps == usual.steps or not kept:
        return ""
    stages = " and ".join(f"{name} ({count:,})" for name, count in zip(config.stage_steps, config.updates))
    return f"{agent} learns in {len(config.updates)} stages, {stages}: steps was set, {', '.join(kept)} was not"
