"""Actions in units of their own <-> in [-1, 1], column by column.

A dataset's `action_low` and `action_high` say what -1 and 1 stand for. Data without them have actions that are in
[-1, 1] by nature.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from qhyer.data.pieces import Arrays
from qhyer.errors import UserError

NAMES = ("action_low", "action_high")
ROUNDING = 1e-6  # of a column's span: actions this far beyond given bounds are at them
CLIPPED = 1e-3  # actions this far beyond [-1, 1] are meant to be in it
LITTLE = 0.2  # share of a range: actions that were scaled use more of [-1, 1], as a rule (see check.SMALL)


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


def narrow(low: Any, high: Any) -> np.ndarray:  # (d_a,) -> (d_a,) bool
    """Which bounds are a small part of [-1, 1]: actions that never leave them may not have been scaled."""
    return np.asarray(high, np.float64) - np.asarray(low, np.float64) <= 2 * LITTLE + ROUNDING


def units(least: Any, greatest: Any, low: Any, high: Any) -> Literal["scaled", "raw", "doubtful", "beyond"]:
    """In which units actions are that have bounds beside them, by each column's least and greatest.

    scaled     in [-1, 1], as is meant where there are bounds
    raw        in those of the bounds still: between them, and well beyond [-1, 1]; so are recorded actions beside
               the bounds of their action space
    doubtful   of the bounds, or scaled: between bounds that are a small part of [-1, 1], or beyond [-1, 1] by so
               little of the bounds that it may be noise
    beyond     of neither
    """
    least, greatest, low, high = (np.asarray(x, np.float32).astype(np.float64) for x in (least, greatest, low, high))
    span = high - low
    slack = ROUNDING * span
    between = bool(((least >= low - slack) & (greatest <= high + slack)).all())
    size = np.maximum(-least, greatest)
    if (size <= 1 + ROUNDING).all():
        return "doubtful" if between and (narrow(low, high) & (least < greatest)).any() else "scaled"
    far = size > 1 + CLIPPED
    fills = size - 1 > LITTLE * (np.maximum(-low, high) - 1)  # of what the bounds allow beyond 1
    if not between:
        return "beyond"
    return "raw" if far.any() and fills[far].all() else "doubtful"


def told(low: np.ndarray, high: np.ndarray) -> str:
    return ", ".join(f"{column}: {a:.6g} to {b:.6g}" for column, (a, b) in enumerate(zip(low, high)))


def options(low: np.ndarray, high: np.ndarray) -> str:
    """Bounds as options of `qhyer data convert`: the same float32 numbers, without exponents."""
    ends = (" ".join(np.format_float_positional(np.float32(x), trim="-") for x in end) for end in (low, high))
    return "--action-low {} --action-high {}".format(*ends)


def scaled(arrays: Arrays, low: Sequence[float] = (), high: Sequence[float] = ()) -> tuple[Arrays, list[str]]:
    """A dataset's arrays with actions in [-1, 1] and the bounds they had, and what was done in words.

    low, high   what becomes -1 and 1: a number for each column, or one for all. When not given: the bounds beside
                the actions, if these are surely in their units still, or else each column's least and greatest
                action. Actions of final states, which mean nothing, become 0
    """
    if bool(len(low)) != bool(len(high)):
        raise UserError("give both --action-low and --action-high, or neither (--scale-actions: each column's own)")
    final = np.asarray(arrays["terminals"]) != 0  # (N,)
    actions = np.asarray(arrays["actions"], np.float32)  # (N, d_a)
    columns = actions.shape[1]
    used = actions[~final]
    least, greatest = used.min(0), used.max(0)
    notes, by = [], ""
    if any(name in arrays for name in NAMES):
        if wrong := wrong_bounds(columns, *map(arrays.get, NAMES)):
            raise UserError(wrong)
        beside = [np.asarray(arrays[name], np.float32) for name in NAMES]
        found = units(least, greatest, *beside)
        if found == "scaled":
            raise UserError("its actions are scaled already: action_low and action_high say from what")
        if not len(low) and found != "raw":
            raise UserError(_unclear(found, *beside))
        if not len(low):
            low, high, by = beside[0].tolist(), beside[1].tolist(), " by the bounds that were beside them"
    if len(low):
        least_given, greatest_given = _each("low", low, columns), _each("high", high, columns)
        if wrong := wrong_bounds(columns, least_given, greatest_given):
            raise UserError(wrong)
        plain = (least_given == -1) & (greatest_given == 1)  # such actions are what a reader clips
        slack = np.where(plain, CLIPPED, ROUNDING * (greatest_given.astype(np.float64) - least_given))
        beyond = np.flatnonzero((least < least_given - slack) | (greatest > greatest_given + slack))
        if len(beyond):
            spans = ", ".join(f"{c}: {least[c]:.6g} to {greatest[c]:.6g}" for c in beyond[:8])
            raise UserError(
                f"actions lie beyond the bounds given, by column: {spans}. Give bounds that hold them, or leave both "
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
    notes.insert(0, f"actions are scaled to [-1, 1]{by}; -1 and 1 stand for {told(least, greatest)}")
    return {**arrays, "actions": made, "action_low": least, "action_high": greatest}, notes


def _unclear(found: str, low: np.ndarray, high: np.ndarray) -> str:
    """Why actions are not scaled by the bounds beside them unless one says so."""
    beside = f"action_low and action_high, which are beside them ({told(low, high)})"
    if found == "beyond":
        return (
            f"its actions lie neither in [-1, 1] nor between {beside}: name bounds that hold them, --action-low and "
            "--action-high"
        )
    return (
        f"its actions may be scaled already: they lie between {beside}, as they would if they were in those units, but "
        f"that does not show that they are. If they are, say so: {options(low, high)}"
    )


def _each(option: str, values: Sequence[float], columns: int) -> np.ndarray:
    if len(values) not in (1, columns):
        raise UserError(f"--action-{option} has {len(values)} numbers: give one for each of {columns} columns, or one")
    return np.broadcast_to(np.asarray(values, np.float32), (columns,)).copy()
