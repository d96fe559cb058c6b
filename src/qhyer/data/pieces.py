"""Cutting the arrays of a dataset into other episodes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qhyer.errors import DataError, UserError

Arrays = dict[str, np.ndarray]


def is_about(key: str) -> bool:
    """Arrays that describe columns, and have no rows."""
    return key in ("goal_indices", "observation_names", "action_low", "action_high")


def gather(arrays: Arrays, pieces: Sequence[tuple[int, int]]) -> Arrays:
    """Episodes from first and last rows, both included; a row may end one piece and begin another."""
    if not pieces:
        raise DataError("there is no episode with a step")
    first, last = (np.array(side, dtype=np.int64) for side in zip(*pieces))
    rows = np.concatenate([np.arange(a, b + 1) for a, b in zip(first, last)])
    ends = np.cumsum(last - first + 1) - 1
    made = {key: array if is_about(key) else array[rows] for key, array in arrays.items()}
    made["terminals"] = np.zeros(len(rows), bool)
    made["terminals"][ends] = True
    made["actions"][ends] = 0
    return made


def recut(arrays: Arrays) -> Arrays:
    """Cuts episodes where their controller reached a goal: D4RL's own pieces, from goal to goal."""
    if "arrivals" not in arrays:
        raise UserError("it does not say where goals were reached (no `arrivals`): only maze2d data do")
    last = np.flatnonzero(arrays["terminals"])
    first = np.append(0, last[:-1] + 1)
    arrivals = np.flatnonzero(arrays["arrivals"])
    pieces: list[tuple[int, int]] = []
    for a, b in zip(first.tolist(), last.tolist()):
        inside = arrivals[np.searchsorted(arrivals, a, "right") : np.searchsorted(arrivals, b, "left")].tolist()
        pieces += [(begin, end) for begin, end in zip([a, *inside], [*inside, b]) if end > begin]
    made = gather(arrays, pieces)
    if "goals" in made:  # a row that ends one piece and begins another has the goal of each
        ends = np.flatnonzero(made["terminals"])
        begins = np.append(0, ends[:-1] + 1)
        goals = made["goals"].copy()
        made["goals"][ends], made["goals"][begins] = goals[ends - 1], goals[begins + 1]
        short = ends - begins == 1  # a single step: there is no second row to tell its goal
        made["goals"][ends[short]] = made["goals"][begins[short]] = goals[begins[short]]
    return made
