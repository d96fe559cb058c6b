"""Finds what is wrong with a dataset, and says what it means. Training refuses errors with the same words."""

from __future__ import annotations

import hashlib
import math
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from qhyer.data import bounds
from qhyer.errors import did_you_mean, nearest


@dataclass(frozen=True)
class Problem:
    severity: Literal["error", "warning"]
    code: str
    """short and stable: nan, shape, ends, range, bounds, small, units, jump, spike, constant, duplicate, rewards, name
    """
    message: str
    """what was found, where, and what it means"""
    brief: str = ""
    """of warnings: the same in a few words, for those who did not ask"""


REQUIRED = ("observations", "actions", "terminals")
OPTIONAL = ("timeouts", "observation_names", "goal_indices", "rewards", *bounds.NAMES)
CARRIED = ("goals", "arrivals", "qpos", "qvel", "button_states")  # of generated data; one's own need none of them
NAMED = 12  # arrays of a file that an error names
ACTION_TOLERANCE = 1e-6
# Actions of a column that all lie within this of 0 have other units, perhaps. In generated data each column reaches
# 0.6 in any episode looked at (the least is cube-single-play's 0.62, of 300 episodes); metres or radians in a robot's
# step are a few hundredths.
SMALL = 0.2
LARGEST = float(np.finfo(np.float32).max)
BLOCK = 1 << 15  # rows looked at together: bounds the memory, whatever the size of the dataset
SAMPLED_STEPS = 1 << 17  # steps that estimate what is typical
MOVES = 1e-4  # share of a column's spread that counts as a move; the rest is a simulator's jitter
JUMP_ONE = 20.0  # times the 99.9% step, in any column
JUMP_MOST = 10.0  # times the 99% step, in most columns at once
JUMP_STD = 0.5  # and at least this share of the column's spread


def find_problems(
    observations: np.ndarray,
    actions: np.ndarray,
    terminals: np.ndarray,
    rewards: np.ndarray | None = None,
    *,
    low: Any = None,
    high: Any = None,
) -> list[Problem]:
    """All problems, errors first. Never raises, whatever it is given. low, high: the bounds beside the actions"""
    try:
        with np.errstate(all="ignore"):
            problems = list(_find(np.asarray(observations), np.asarray(actions), np.asarray(terminals), (low, high)))
            wrong = None if rewards is None else wrong_rewards(np.asarray(rewards), len(np.asarray(observations)))
            problems += [_error("rewards", wrong)] if wrong else []
    except Exception as error:  # arrays of a kind nobody thought of
        return [Problem("error", "shape", f"the arrays cannot be examined: {type(error).__name__}: {error}")]
    return sorted(problems, key=lambda problem: problem.severity != "error")


def wrong_rewards(rewards: np.ndarray, rows: int) -> str | None:
    """What is wrong with them, if anything is: one finite number for each row."""
    if rewards.shape != (rows,) or rewards.dtype.kind not in "fiub":
        return f"rewards has shape {rewards.shape} ({rewards.dtype}); give {rows} numbers, one a row"
    with np.errstate(over="ignore"):  # what is too large becomes infinite, and is told
        finite = np.isfinite(rewards.astype(np.float32))  # as they are kept
    if not finite.all():
        return f"rewards has values that are not finite, the first in row {int(np.argmin(finite))}"
    return None


def misspelt(there: Iterable[str], known: Sequence[str] = OPTIONAL) -> list[Problem]:
    """A warning for each array of an own file that nothing reads, whose name is nearly that of one which is not there.

    Nearly: as a whole, and word by word. Otherwise observation_mean would be as near to observation_names as
    observation_name is.
    """
    there = set(there)
    absent = [name for name in known if name not in there]
    problems = []
    for name in sorted(there - {*known, *REQUIRED, *CARRIED}):
        hint = did_you_mean(name.lower(), [each for each in absent if _word_by_word(name.lower(), each)], cutoff=0.8)
        if hint:
            told = f"{name} is no array that is read{hint}"
            problems.append(_warning("name", told, told))
    return problems


def _word_by_word(name: str, known: str) -> bool:
    words, others = name.split("_"), known.split("_")
    return len(words) != len(others) or all(nearest(a, [b]) for a, b in zip(words, others))


def lacking(missing: Sequence[str], there: Iterable[str]) -> str:
    """ "lacks X (it has Y, Z)", and which of these may be meant by what is missing."""
    there = list(there)
    held = ", ".join(there[:NAMED]) + _more(there, NAMED)
    return f"lacks {', '.join(missing)} (it has {held or 'nothing'}){meant(missing, there)}"


def meant(missing: Sequence[str], there: Iterable[str]) -> str:
    """ "; did you mean X where it says Y?" for each array that is missing, where one has nearly its name."""
    others = [name for name in there if name not in (*REQUIRED, *OPTIONAL, *CARRIED)]
    told = ""
    for needed in missing:
        short = [name for name in others if len(name) > 2 and needed.startswith(name)]  # obs is not near by its letters
        for name in short[:1] or nearest(needed, others):
            told += f"; did you mean {needed} where it says {name}?"
    return told


def describe(name: str, problems: Sequence[Problem]) -> str:
    return "\n".join([f"{name}:"] + [f"  {p.severity} [{p.code}] {p.message}" for p in problems])


def in_brief(problems: Sequence[Problem], file: str = "") -> str:
    """The warnings among them in a line; nothing where there are none."""
    told = "; ".join(problem.brief for problem in problems if problem.severity == "warning")
    return f"{told} (`qhyer data check {shlex.quote(file)}` says more)" if told and file else told


def _find(
    observations: np.ndarray, actions: np.ndarray, terminals: np.ndarray, beside: tuple[Any, Any]
) -> Iterator[Problem]:
    shapes = list(_shapes(observations, actions, terminals))
    yield from shapes
    if shapes:
        return  # nothing below can be trusted
    whole, found = _not_finite("observations", observations, None)
    usable, others = _not_finite("actions", actions, terminals)
    yield from (*found, *others)
    ends = list(_ends(terminals))
    yield from ends
    if ends:
        return
    # What is not finite hides nothing: the other rows are looked at all the same.
    last = np.flatnonzero(terminals)
    usable &= terminals == 0
    yield from _range(actions, usable, beside)
    yield from _jumps(observations, terminals, last, whole)
    yield from _constant("observations", observations, whole)
    yield from _constant("actions", actions, usable)
    yield from _duplicates(observations, actions, last)


# ----------------------------------------------------------------------------------------- shapes and ends


def _shapes(observations: np.ndarray, actions: np.ndarray, terminals: np.ndarray) -> Iterator[Problem]:
    for name, array in (("observations", observations), ("actions", actions)):
        if array.dtype.kind not in "fiub":
            yield _error(
                "shape",
                f"{name} has dtype {array.dtype}, not numbers"
                + ("; rows of unequal length make such an array" if array.dtype.kind == "O" else ""),
            )
        if array.ndim != 2:
            yield _error("shape", f"{name} has shape {array.shape}; it must be (rows, columns)")
        elif array.shape[1] == 0:
            yield _error("shape", f"{name} has no columns: shape {array.shape}")
    if terminals.dtype.kind not in "fiub":
        yield _error("shape", f"terminals has dtype {terminals.dtype}, not flags")
    if terminals.ndim != 1:
        yield _error("shape", f"terminals has shape {terminals.shape}; it must be (rows,)")
    rows = {
        name: array.shape[0]
        for name, array in (("observations", observations), ("actions", actions), ("terminals", terminals))
        if array.ndim
    }
    if len(set(rows.values())) > 1:
        counts = ", ".join(f"{count} of {name}" for name, count in rows.items())
        yield _error(
            "shape",
            f"unequal numbers of rows: {counts}. Each has one for every state, the final state of an episode "
            "included; the action beside a final state is ignored (write zeros)",
        )
    elif rows and min(rows.values()) == 0:
        yield _error("shape", "there are no rows")


def _ends(terminals: np.ndarray) -> Iterator[Problem]:
    flags = terminals != 0
    odd = np.flatnonzero(flags & (terminals != 1))
    if len(odd):
        yield _error(
            "ends",
            f"terminals must be 0 or 1, and is {terminals[odd[0]]} in row {odd[0]} ({len(odd)} such rows)",
        )
        return
    ends = np.flatnonzero(flags)
    if not len(ends):
        yield _error("ends", "terminals marks no end; it must be 1 on the last row of each episode")
        return
    if ends[-1] != len(flags) - 1:
        yield _error(
            "ends",
            f"the last row ({len(flags) - 1}) is not marked as an end, the last mark is in row {ends[-1]}: "
            "the data was cut off inside an episode, or terminals marks success instead of the episode's end",
        )
    lengths = np.diff(ends, prepend=-1)
    short = np.flatnonzero(lengths < 2)
    if len(short):
        yield _error(
            "ends",
            f"{len(short)} of {len(ends)} episodes have a single row, the first is episode {short[0]} at row "
            f"{ends[short[0]]}: an episode needs a state and a next state. Remove them; if all are "
            "such, terminals is 1 everywhere",
        )


# ----------------------------------------------------------------------------------------- values


def _not_finite(name: str, array: np.ndarray, terminals: np.ndarray | None) -> tuple[np.ndarray, list[Problem]]:
    """Which rows are finite, (N,), and what is wrong if some are not."""
    fine = np.ones(len(array), bool)
    if array.dtype.kind != "f":
        return fine, []
    count, first = 0, (0, 0)
    for begin, block in _blocks(array):
        bad = ~(np.abs(block) <= LARGEST)  # NaN, infinite, or infinite once it is float32
        if bad.any():
            if not count:
                row, column = np.argwhere(bad)[0]
                first = (begin + int(row), int(column))
            count += int(bad.sum())
            fine[begin : begin + len(block)] = ~bad.any(1)
    if not count:
        return fine, []
    row, column = first
    hint = "remove or repair the episodes that hold them"
    if terminals is not None and terminals[row]:
        hint = "that row is a final state, whose action is never used; write zeros there"
    problem = _error(
        "nan",
        f"{name} has {count} {'value that is' if count == 1 else 'values that are'} not finite, the first is "
        f"{array[row, column]} in row {row}, column {column}: {hint}",
    )
    return fine, [problem]


def _range(actions: np.ndarray, used: np.ndarray, beside: tuple[Any, Any]) -> Iterator[Problem]:
    low, high, count, first = _extremes(actions, used)
    bounded = any(end is not None for end in beside)
    fit = bounded and bounds.wrong_bounds(actions.shape[1], *beside) is None  # if not, that is an error of its own
    stand = bounds.units(low, high, *beside) if fit else ""
    limit = 1.0 + ACTION_TOLERANCE
    columns = np.flatnonzero((low < -limit) | (high > limit))
    if len(columns):
        yield _error(
            "range",
            f"actions must lie in [-1, 1]; {count} rows do not, the first is row {first} (by column: "
            f"{_spans(columns, low, high)}). {_how_to_scale(stand, *beside)}",
        )
        return  # whoever scales them scales the small ones, too
    if stand == "doubtful":
        ends = [np.asarray(end, np.float64) for end in beside]
        narrow = np.flatnonzero(bounds.narrow(*ends) & (low < high))
        listed = ", ".join(map(str, narrow[:8])) + _more(narrow, 8)
        scales = f"`qhyer data convert FILE OUT.npz {bounds.options(*ends)}`"
        yield _warning(
            "units",
            f"actions never leave action_low and action_high, which are a small part of [-1, 1] in columns {listed} "
            f"(actions: {_spans(narrow, low, high)}; bounds: {_spans(narrow, *ends)}). Are these the bounds of your "
            f"action space, and the actions not scaled? Policies would then act far too little. {scales} scales them. "
            "If they were scaled, nothing is wrong",
            f"actions never leave action_low and action_high in columns {listed}, far inside [-1, 1]: if they were not "
            f"scaled, {scales} scales them",
        )
    small = np.flatnonzero((np.maximum(-low, high) <= SMALL + ACTION_TOLERANCE) & (low < high))
    if len(small) and not bounded:
        scales = "`qhyer data convert FILE OUT.npz --scale-actions`"
        listed = ", ".join(map(str, small[:8])) + _more(small, 8)
        yield _warning(
            "small",
            f"actions use little of [-1, 1] in some columns: {_spans(small, low, high)}. Metres or radians, perhaps? "
            f"Policies learn such actions badly. {scales} maps each column to all of [-1, 1], and policies then give "
            "actions in your units",
            f"actions never leave [-{SMALL:g}, {SMALL:g}] in columns {listed}: if these have other units, {scales} "
            "scales them",
        )


def _how_to_scale(stand: str, low: Any, high: Any) -> str:
    """What to do about actions that do not lie in [-1, 1], by what the bounds beside them say (`bounds.units`)."""
    if not stand:
        return (
            "`qhyer data convert FILE OUT.npz --scale-actions` scales them, and policies then give actions in your "
            "units; or do it by the bounds of your action space: actions = 2 * (actions - low) / (high - low) - 1"
        )
    ends = [np.asarray(end, np.float32) for end in (low, high)]
    beside = f"action_low and action_high, which say what -1 and 1 stand for ({bounds.told(*ends)})"
    if stand == "raw":
        return (
            f"They lie between {beside}: they are not scaled yet. `qhyer data convert FILE OUT.npz --scale-actions` "
            "scales them by these bounds, and policies then give actions in your units; or do it yourself: "
            "actions = 2 * (actions - low) / (high - low) - 1"
        )
    if stand == "beyond":
        return (
            f"Nor do they lie between {beside}: are these another action space's? `qhyer data convert FILE OUT.npz "
            "--action-low ... --action-high ...` scales them by bounds that hold them"
        )
    return (
        f"They lie between {beside}, which does not show whether they were scaled: if so, clip them to [-1, 1]; if "
        f"not, `qhyer data convert FILE OUT.npz {bounds.options(*ends)}` scales them"
    )


def _spans(columns: np.ndarray, low: np.ndarray, high: np.ndarray) -> str:
    return ", ".join(f"{c}: {low[c]:.7g} to {high[c]:.7g}" for c in columns[:8]) + _more(columns, 8)


def _extremes(actions: np.ndarray, used: np.ndarray) -> tuple[np.ndarray, np.ndarray, int, int]:
    """Least and greatest action in each column, how many rows are out of range, and the first such row."""
    limit = 1.0 + ACTION_TOLERANCE
    low = np.full(actions.shape[1], np.inf)
    high = np.full(actions.shape[1], -np.inf)
    count, first = 0, -1
    for begin, block in _blocks(actions):
        kept = np.flatnonzero(used[begin : begin + len(block)])
        if not len(kept):
            continue
        values = block[kept].astype(np.float64)
        low, high = np.minimum(low, values.min(0)), np.maximum(high, values.max(0))
        outside = (np.abs(values) > limit).any(1)
        if outside.any() and first < 0:
            first = begin + int(kept[np.argmax(outside)])
        count += int(outside.sum())
    return low, high, count, first


def _jumps(observations: np.ndarray, terminals: np.ndarray, last: np.ndarray, whole: np.ndarray) -> Iterator[Problem]:
    """Steps far larger than is usual, inside an episode: most often an end that was not marked, or one bad row.

    Columns that mostly stand still (switches, buttons, drawers) may jump. A step is far in one column
    beyond 20 times the 99.9% step, or in half of the columns, two at least, beyond 10 times the 99% step:
    unmarked ends are more than 0.1% of the rows when episodes are short, and would hide themselves in the former.
    """
    steps = len(observations) - 1
    inside = (terminals[:-1] == 0) & whole[:-1] & whole[1:]
    chosen = np.flatnonzero(inside)
    if len(chosen) < 100:
        return  # too few to say what is usual
    sample = chosen[:: max(1, len(chosen) // SAMPLED_STEPS)]
    sampled = np.abs(_float(observations[sample + 1]) - _float(observations[sample]))
    spread = _float(observations[sample]).std(0)
    moving = np.flatnonzero((sampled > MOVES * spread).mean(0) > 0.1)
    if not len(moving):
        return
    sampled = sampled[:, moving]
    # Of few steps, the ten largest are left out: they may be what is looked for.
    ranks = [min(int(q * len(sampled)), len(sampled) - 11) for q in (0.99, 0.999)]
    usual, large = np.partition(sampled, ranks, axis=0)[ranks]
    spread = JUMP_STD * spread[moving]
    limit_one = np.maximum(JUMP_ONE * large, spread)
    limit_most = np.maximum(JUMP_MOST * usual, spread)
    together = max(min(2, len(moving)), math.ceil(len(moving) / 2))  # of x, y, vx, vy two: velocities do not jump

    def far(step: np.ndarray) -> np.ndarray:  # (n, moving columns) -> (n,)
        return (step > limit_one).any(1) | ((step > limit_most).sum(1) >= together)

    found: list[np.ndarray] = []
    for begin in range(0, steps, BLOCK):
        block = _float(observations[begin : begin + BLOCK + 1][:, moving])
        step = np.abs(np.diff(block, axis=0))
        found.append(begin + np.flatnonzero(far(step) & inside[begin : begin + len(step)]))
    rows = np.concatenate(found)
    # There and back again in two steps: one bad row. An end that was not marked does not come back.
    there = rows[:-1][np.diff(rows) == 1]
    across = np.abs(_float(observations[there + 2]) - _float(observations[there]))[:, moving]
    there = there[~far(across)]
    if len(there):
        row = int(there[0]) + 1
        before, value, after = _float(observations[row - 1 : row + 2])[:, moving]
        worst = int(np.argmax(np.abs(value - before) / limit_most))
        episode = int(np.searchsorted(last, row))
        yield _warning(
            "spike",
            f"{len(there)} single rows lie far from the rows before and after them, the first is row {row} of episode "
            f"{episode}: column {moving[worst]} is {value[worst]:.4g} between {before[worst]:.4g} and "
            f"{after[worst]:.4g}. Most often a reading that failed (or an angle that flipped); repair the row, or "
            "leave the episode out",
            f"{len(there)} single rows lie far from their neighbours, the first is row {row}: readings that failed?",
        )
    rows = np.setdiff1d(rows, np.concatenate([there, there + 1]))
    if not len(rows):
        return
    row = int(rows[0])
    size = np.abs(_float(observations[row + 1]) - _float(observations[row]))[moving]
    worst = int(np.argmax(size / limit_most))
    column, episode = int(moving[worst]), int(np.searchsorted(last, row))
    yield _warning(
        "jump",
        f"{len(rows)} steps inside an episode are far larger than usual, the first after row {row}"
        f" of episode {episode}: column {column} moves by {size[worst]:.4g}, where 99 of 100 steps are below "
        f"{usual[worst]:.4g}. "
        "Most often an episode's end was not marked there",
        f"{len(rows)} steps inside an episode are far larger than usual, the first after row {row}: an end that was "
        "not marked?",
    )


def _constant(name: str, array: np.ndarray, kept: np.ndarray) -> Iterator[Problem]:
    if not kept.any():
        return
    first = array[np.argmax(kept)]
    constant = np.ones(array.shape[1], bool)
    for begin, block in _blocks(array):
        if not constant.any():
            return
        rows = kept[begin : begin + len(block)]
        constant &= ((block == first) | ~rows[:, None]).all(0)
    columns = np.flatnonzero(constant)
    if not len(columns):
        return
    listed = ", ".join(f"{c} (always {float(first[c]):.4g})" for c in columns[:8]) + _more(columns, 8)
    if len(columns) == array.shape[1] and name == "actions":
        meaning = "no action ever changes, so there is nothing to learn from them"
    elif name == "actions":
        meaning = "no policy can learn to use them"
    else:
        meaning = "they say nothing; leave them out, and out of the goal"
    brief = f"{name} never change in columns {', '.join(map(str, columns[:8]))}{_more(columns, 8)}"
    yield _warning("constant", f"{name} has columns that never change: {listed}; {meaning}", brief)


def _duplicates(observations: np.ndarray, actions: np.ndarray, last: np.ndarray) -> Iterator[Problem]:
    seen: dict[bytes, int] = {}
    twins: list[tuple[int, int]] = []
    begin = 0
    for episode, end in enumerate(last.tolist()):
        # The action beside the final state is never used, so it does not make two episodes differ.
        digest = hashlib.sha1(observations[begin : end + 1].tobytes(), usedforsecurity=False)
        digest.update(actions[begin:end].tobytes())
        twin = seen.setdefault(digest.digest(), episode)
        if twin != episode:
            twins.append((episode, twin))
        begin = end + 1
    if not twins:
        return
    listed = ", ".join(f"{b} = {a}" for b, a in twins[:5]) + _more(twins, 5)
    yield _warning(
        "duplicate",
        f"{len(twins)} of {len(last)} episodes repeat an earlier one exactly ({listed}): was a file joined "
        "twice, or a seed used twice? They count double, and validation data among them is no validation",
        f"{len(twins)} of {len(last)} episodes repeat an earlier one exactly",
    )


# ----------------------------------------------------------------------------------------- helpers


def _blocks(array: np.ndarray) -> Iterable[tuple[int, np.ndarray]]:
    return ((begin, array[begin : begin + BLOCK]) for begin in range(0, len(array), BLOCK))


def _float(array: np.ndarray) -> np.ndarray:
    """Numbers that can be subtracted: unsigned ones wrap around, flags refuse, halves overflow."""
    return array if array.dtype in (np.float32, np.float64) else array.astype(np.float64)


def _more(items: Sequence[Any] | np.ndarray, shown: int) -> str:
    return f", and {len(items) - shown} more" if len(items) > shown else ""


def _error(code: str, message: str) -> Problem:
    return Problem("error", code, message)


def _warning(code: str, message: str, brief: str) -> Problem:
    return Problem("warning", code, message, brief)
