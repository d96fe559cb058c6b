"""Finds what is wrong with a dataset, and says what it means. Training refuses errors with the same words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np


@dataclass(frozen=True)
class Problem:
    severity: Literal["error", "warning"]
    code: str
    """short and stable: nan, shape, ends, range, jump, constant, duplicate"""
    message: str
    """what was found, where, and what it means"""


def find_problems(observations: np.ndarray, actions: np.ndarray, terminals: np.ndarray) -> list[Problem]:
    return []


def describe(name: str, problems: Sequence[Problem]) -> str:
    return "\n".join([f"{name}:"] + [f"  {p.severity} [{p.code}] {p.message}" for p in problems])
