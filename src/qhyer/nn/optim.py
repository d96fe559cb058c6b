"""AdamW that decays matrices only, and never what a module marked `no_decay` (Mamba's A_log, D, step bias)."""

from __future__ import annotations

from collections.abc import Iterable
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
