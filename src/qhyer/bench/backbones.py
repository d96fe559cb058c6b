"""`qhyer bench backbones`: one update on each backbone, all else equal.

Decision Transformer's head, tokens, loss and optimiser on every backbone of `nn/backbones.py`, with the same width,
layers, heads, context and batch, through the trainer's own update. An agent stands for its backbone; what is special to
some of them (DMixer's routing loss, GDT's wider head) is part of the price.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qhyer import presets
from qhyer.agent import AgentConfig
from qhyer.bench.agents import compare
from qhyer.config import Precision
from qhyer.data import registry
from qhyer.errors import require

AGENT_OF = {
    "gpt": "dt",
    "graph": "gdt",
    "convformer": "dc",
    "mamba": "dmamba",
    "long_short": "lsdt",
    "routed": "dmixer",
    "hybrid": "hdt",
}
"""name in `nn.backbones.BACKBONES` -> the return-conditioned agent that has it"""


def backbones(
    *,
    names: tuple[str, ...] = tuple(AGENT_OF),
    dataset: str = "maze2d-umaze",
    width: int = 128,
    layers: int = 3,
    heads: int = 4,
    context: int = 20,
    batch: int = 64,
    precision: Precision | None = None,
    device: str = "auto",
    threads: int = 1,
    seconds: float = 3.0,
    out: Path | None = None,
) -> int:
    """Measure one update on each backbone, all else equal; no dataset is needed.

    Args:
        names: gpt, graph, convformer, mamba, long_short, routed, hybrid
        dataset: the dataset whose sizes are used
        width: of a token
        layers: blocks
        heads: of attention
        context: steps of a window; a step is three tokens
        batch: windows
        precision: fp32, tf32 or bf16; when not given, bf16 on CUDA and fp32 on a CPU
        device: cpu, cuda, or auto
        threads: threads of torch
        seconds: how long to measure each row
        out: a JSON file to write
    """
    unknown = [name for name in names if name not in AGENT_OF]
    require(not unknown, f"no backbone is called {', '.join(unknown)} (there are: {', '.join(AGENT_OF)})")
    require(min(width, layers, heads, context, batch) >= 1, "sizes must be at least 1")
    name = registry.get(dataset).name
    sizes = dict(width=width, layers=layers, heads=heads, context=context, batch_size=batch, dropout=0.1)
    configs = {key: (AGENT_OF[key], _sized(AGENT_OF[key], name, sizes)) for key in names}
    return compare("backbones", configs, dataset, precision, device, threads, seconds, out)


def _sized(agent: str, dataset: str, sizes: Mapping[str, Any]) -> AgentConfig:
    """The agent's preset in these sizes, as far as it has them; rewards in hindsight, since made-up data have none."""
    config, _ = presets.resolve(agent, "paper", dataset)
    fields = {field.name for field in dataclasses.fields(config)}
    values = {**sizes, "goal": "concat", "dataset_rewards": False}
    return dataclasses.replace(config, **{key: value for key, value in values.items() if key in fields})
