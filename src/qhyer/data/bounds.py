"""Actions in units of their own <-> in [-1, 1], column by column.

A dataset's `action_low` and `action_high` say what -1 and 1 stand for. Data without them have actions that are in
[-1, 1] by nature.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from qhyer.data.pieces import Arrays
from qhyer.errors import UserError

NAMES = ("action_low", "action_high")
ROUNDING = 1e-6  # of a column's span: actions this far beyond given bounds are at them
CLIPPED = 1e-3  # actions this far beyond [-1, 1] are meant to be in it


def scale(actions: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:  # (..., d_a) -> (..., d_a) float32
    """low ... high -> -1 ... 1. A column whose bounds are one number becomes 0."""
    low, high, given = (np.asarray(x, np.float64) for x in (low, high, actions))
    span = high - low
    return np.where(span > 0, 2 * (given - low) / np.where(span > 0, span, 1) - 1, 0).astype(np.float32)


def unscale(actions: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:  # (..., d_a) -> (..., d_a) float32
    """-1 ... 1 -> low ... high, at both ends exactly."""
    low, high, given = (np.asarray(x, np.float64) for x in (low, high, actions))
    return (((1 - given) * low + (1 + given) * high) / 2).astype(np.float32)


def wrong_bounds(columns: int, low: Any, high: Any) -> str | None:
    """What is wrong with a dataset's bounds, if anything is; None where it has none."""
    if low is None and high is None:
        return None
    if low is None or high is None:
        return f"{NAMES[low is not None]} is missing: they go together, what -1 stands for and what 1 does"
    ends = np.asarray(low), np.asarray(high)
    for name, end in zip(NAMES, ends):
        if end.shape != (columns,) or end.dtype.kind not in "fiu":
            return f"{name} has shape {end.shape} ({end.dtype}); give {columns} numbers, one for each column of actions"
    below, above = (end.astype(np.float32) for end in ends)  # as they are kept
    if not (np.isfinite(below) & np.isfinite(above)).all():
        return f"{NAMES[0]} and {NAMES[1]} must be finite"
    if (below > above).any():
        column = int(np.argmax(below > above))
        return f"{NAMES[0]} is greater than {NAMES[1]} in column {column}: {below[column]:g}, {above[column]:g}"
    return None


def told(low: np.ndarray, high: np.ndarray) -> str:
    return ", ".join(f"{column}: {a:.6g} to {b:.6g}" for column, (a, b) in enumerate(zip(low, high)))


def options(low: np.ndarray, high: np.ndarray) -> str:
    """Bounds as options of `qhyer data convert`: the same float32 numbers, without exponents."""
    ends = (" ".join(np.format_float_positional(np.float32(x), trim="-") for x in end) for end in (low, high))
    return "--action-low {} --action-high {}".format(*ends)


def scaled(arrays: Arrays, low: Sequence[float] = (), high: Sequence[float] = ()) -> tuple[Arrays, list[str]]:
    """A dataset's arrays with actions in [-1, 1] and the bounds they had, and what was done in words.

    low, high   what becomes -1 and 1: a number for each column, or one for all; each column's least and greatest
                action when not given. Actions of final states, which mean nothing, become 0
    """
    if any(name in arrays for name in NAMES):
        raise UserError("its actions are scaled already: action_low and action_high say from what")
    if bool(len(low)) != bool(len(high)):
        raise UserError("give both --action-low and --action-high, or neither (--scale-actions: each column's own)")
    final = np.asarray(arrays["terminals"]) != 0  # (N,)
    actions = np.asarray(arrays["actions"], np.float32)  # (N, d_a)
    columns = actions.shape[1]
    used = actions[~final]
    least, greatest = used.min(0), used.max(0)
    notes = []
    if len(low):
        least_given, greatest_given = _each("low", low, columns), _each("high", high, columns)
        if wrong := wrong_bounds(columns, least_given, greatest_given):
            raise UserError(wrong)
        plain = (least_given == -1) & (greatest_given == 1)  # such actions are what a reader clips
        slack = np.where(plain, CLIPPED, ROUNDING * (greatest_given.astype(np.float64) - least_given))
        beyond = np.flatnonzero((least < least_given - slack) | (greatest > greatest_given + slack))
        if len(beyond):
            found = ", ".join(f"{c}: {least[c]:.6g} to {greatest[c]:.6g}" for c in beyond[:8])
            raise UserError(
                f"actions lie beyond the bounds given, by column: {found}. Give bounds that hold them, or leave both "
                "out (--scale-actions: each column's own least and greatest)"
            )
        worst = np.maximum(-least, greatest)[plain].max(initial=0)
        if worst > 1 + ROUNDING:
            notes.append(f"actions up to {worst:.6g} are clipped to 1")
        least, greatest = least_given, greatest_given
    else:
        still = np.flatnonzero(least == greatest)
        if len(still):
            notes.append(f"actions that never change are 0 in [-1, 1]: columns {', '.join(map(str, still))}")
    made = scale(actions, least, greatest).clip(-1, 1)
    made[final] = 0
    notes.insert(0, f"actions are scaled to [-1, 1]; -1 and 1 stand for {told(least, greatest)}")
    return {**arrays, "actions": made, "action_low": least, "action_high": greatest}, notes


def _each(option: str, values: Sequence[float], columns: int) -> np.ndarray:
    if len(values) not in (1, columns):
        raise UserError(f"--action-{option} has {len(values)} numbers: give one for each of {columns} columns, or one")
    return np.broadcast_to(np.asarray(values, np.float32), (columns,)).copy()
