"""How far back does each block remember, and which branch does its gate trust?

The paper's statistics of Delta_t and of the gate: mean and spread of Delta_t, mean of A_bar_t = exp(Delta_t A), the
effective memory, and the mean gate weight of either branch, over windows drawn as in training.

Effective memory is the paper's "largest k with prod_{j=1..k} A_bar_{t-j+1} > 0.5", at the last token t of a window.
A_bar has one value per channel and state; the paper does not say how it averages them. `memory_tokens` is the mean over
channels and states of each one's own k; `memory_tokens_of_mean` is k of the product of A_bar averaged over channels and
states first. k is at most the number of tokens in a window, and a step has several tokens: `memory_steps` divides.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from qhyer import runs
from qhyer.agent import Batch
from qhyer.analyses._common import generator, load_episodes
from qhyer.errors import UserError
from qhyer.storage import write_json

BATCHES = 10
WINDOWS = 64
CHUNK = 8  # windows read out at once: A_bar of one window of the paper's cube-single takes 8 MB
HALF = 0.5


def effective_memory(a_bar: Tensor) -> Tensor:
    """A_bar (B, L, ...) -> at the last token, the largest k with prod_{j=1..k} A_bar_{t-j+1} > 1/2, (B, ...)."""
    kept = a_bar.double().flip(1).cumprod(dim=1) > HALF  # A_bar < 1, so the product only falls
    return kept.sum(dim=1)


class Moments:
    """Mean and standard deviation of values that come in pieces, in float64."""

    def __init__(self) -> None:
        self.count, self.total, self.squares = 0, 0.0, 0.0

    def add(self, values: Tensor) -> None:
        values = values.double()
        self.count += values.numel()
        self.total += float(values.sum())
        self.squares += float(values.square().sum())

    @property
    def mean(self) -> float:
        return self.total / self.count

    @property
    def std(self) -> float:
        return max(0.0, self.squares / self.count - self.mean**2) ** 0.5


def summarize(readouts: list[dict[str, Moments]], tokens_per_step: int) -> dict[str, Any]:
    """Moments per block -> the table's lines, per block and over blocks."""
    blocks = []
    for block in readouts:
        line: dict[str, float] = {}
        if "delta" in block:
            line |= {
                "delta_mean": block["delta"].mean,
                "delta_std": block["delta"].std,
                "a_bar_mean": block["a_bar"].mean,
                "memory_tokens": block["memory"].mean,
                "memory_tokens_of_mean": block["memory_of_mean"].mean,
                "memory_steps": block["memory"].mean / tokens_per_step,
            }
        if "alpha" in block:
            line |= {
                "gate_attention": block["alpha"].mean,
                "gate_mamba": 1.0 - block["alpha"].mean,
                "gate_std": block["alpha"].std,
            }
        blocks.append(line)
    keys = blocks[0].keys()
    return {"all": {key: sum(line[key] for line in blocks) / len(blocks) for key in keys}, "blocks": blocks}


def observe(readouts: list[dict[str, Moments]], values: list[dict[str, Tensor]]) -> None:
    """Adds what `readout` gave for some windows to the running moments of each block."""
    for moments, block in zip(readouts, values):
        pieces = {}
        if "delta" in block:
            a_bar = block["A_bar"]  # (B, L, E, N)
            pieces = {
                "delta": block["delta"],
                "a_bar": a_bar,
                "memory": effective_memory(a_bar),
                "memory_of_mean": effective_memory(a_bar.double().mean(dim=(2, 3))),
            }
        if "alpha" in block:
            pieces["alpha"] = block["alpha"]
        for name, piece in pieces.items():
            moments.setdefault(name, Moments()).add(piece)


def measure(agent: Any, windows: Batch, readouts: list[dict[str, Moments]]) -> None:
    size = len(windows["observations"])
    for first in range(0, size, CHUNK):
        part = {key: value[first : first + CHUNK] for key, value in windows.items() if len(value) == size}
        values = agent.readout(part)
        readouts += [{} for _ in range(len(values) - len(readouts))]
        observe(readouts, values)


def run(run: Path, *, device: str = "cpu", data: Path | None = None) -> Path:
    agent: Any
    agent, step = runs.load_agent(run, device=device)
    if not hasattr(agent, "readout"):
        raise UserError(
            f"{run} holds {runs.read(run)['agent']}, whose blocks cannot be read out; "
            "this analysis needs a decoder with Mamba branches, such as qhyer's"
        )
    episodes, about = load_episodes(run, agent, data, device)
    sampler = agent.stages()[0].sampler.build(episodes, generator("memory", device))
    readouts: list[dict[str, Moments]] = []
    for _ in range(BATCHES):
        windows = sampler.sample(WINDOWS)
        # Windows padded at an episode's end would count their padding.
        whole = windows["valid"].all(dim=1)
        if whole.any():
            windows = {k: v[whole] for k, v in windows.items() if len(v) == WINDOWS}
            measure(agent, windows, readouts)
    if not readouts or not readouts[0]:
        raise UserError(f"{run}: no block of the agent has a Mamba branch, or no episode is as long as its window")
    per_step = int(agent.tokens.per_step)
    found = summarize(readouts, per_step)
    context = int(getattr(agent.config, "context", 0))
    result = {
        "analysis": "memory",
        "step": step,
        "data": about,
        "batches": BATCHES,
        "windows_per_batch": WINDOWS,
        "tokens_per_step": per_step,
        "window_tokens": context * per_step,
        **found,
    }
    path = Path(run) / "analyses" / "memory.json"
    write_json(path, result)
    over = found["all"]
    if "delta_mean" in over:
        print(
            f"Delta {over['delta_mean']:.3f} ± {over['delta_std']:.3f}, A_bar {over['a_bar_mean']:.3f}; "
            f"effective memory {over['memory_tokens']:.1f} of {context * per_step} tokens, "
            f"{over['memory_steps']:.1f} of {context} steps"
        )
    if "gate_attention" in over:
        print(f"gate: attention {over['gate_attention']:.2f}, Mamba {over['gate_mamba']:.2f}")
    return path
