"""AdamW that decays matrices only, and never what a module marked `no_decay` (Mamba's A_log, D, step bias), and
schedules: functions of the number of the update that give a factor on the learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn


def adamw(
    parameters: Iterable[nn.Parameter], lr: float, weight_decay: float = 0.0, **options: Any
) -> torch.optim.AdamW:
    decay: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for parameter in parameters:
        skip = parameter.dim() < 2 or getattr(parameter, "no_decay", False)
        (plain if skip else decay).append(parameter)
    groups = [{"params": decay, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    # Fused: one kernel for all tensors, on the CPU too, where the loop over tensors costs more than the arithmetic.
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=lr, fused=True, **options)


def warm_up(updates: int) -> Callable[[int], float] | None:
    """It rises linearly over these updates, then stays; nothing to do for none."""
    return (lambda step: min(1.0, (step + 1) / updates)) if updates else None


def warm_up_cosine(updates: int, total: int, final: float = 0.0) -> Callable[[int], float]:
    """It rises linearly, then falls along a cosine, to `final` when all updates are done."""

    def factor(step: int) -> float:
        if step < updates:
            return (step + 1) / updates
        progress = min(1.0, (step - updates) / max(1, total - updates))
        return final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * progress))

    return factor
