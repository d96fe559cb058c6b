"""Reads HDF5 in the layouts of D4RL (one flat file), Minari and robomimic (a group an episode), with h5py alone.

The result has the arrays of our npz (docs/data.md). What is wrong with such files and known is repaired on the way, and
each repair is said: `read` returns the sentences, `read_hdf5` logs them, `qhyer data check` prints them.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qhyer.data import check, robomimic
from qhyer.data.bounds import CLIPPED
from qhyer.data.columns import Columns, numbers
from qhyer.data.pieces import Arrays, gather, is_about
from qhyer.errors import CorruptFile, DataError, UserError

WALK = 1000  # transitions of the pieces a continuing walk is cut into, as in the generated datasets
# Further than anything moves in a step: the point at most 0.05, the ant about half a metre.
JUMP = {"maze2d": 0.2, "antmaze": 1.0}
FLAT = ("observations", "actions", "terminals")
OPTIONAL = ("timeouts", "rewards", "goal_indices", "observation_names")
LAYOUTS = (
    "D4RL's is flat (observations, actions, rewards, terminals, timeouts, infos/goal), Minari's has a group for each "
    "episode (episode_0/observations, episode_0/actions, ...), robomimic's a group for each demonstration "
    "(data/demo_0/obs, data/demo_0/actions, ...)"
)

log = logging.getLogger(__name__)


def read_hdf5(path: str | Path) -> Arrays:
    """The arrays of an HDF5 file; what was repaired is logged."""
    arrays, notes = read(path)
    for note in notes:
        log.warning("%s: %s", Path(path).name, note)
    return arrays


def read(
    path: str | Path, keys: Sequence[str] = (), split: str | None = None, *, clip: bool = True
) -> tuple[Arrays, list[str]]:
    """The arrays of an HDF5 file, and a sentence for each thing that was repaired, or left out.

    keys    which observations to read, in this order, where the file keeps them by key; all of them if none is named
    split   of a robomimic file: read the demonstrations that its mask lists under this name
    clip    put actions back that are beyond [-1, 1] by rounding; not where they have units of their own
    """
    import h5py

    path = Path(path)
    if not path.is_file():
        raise UserError(f"no dataset at {path}")
    try:
        with h5py.File(path, "r") as file:
            arrays, notes = _read(path, file, keys, split)
    except (OSError, RuntimeError, KeyError) as error:  # h5py's, of what is damaged or linked to nothing
        raise CorruptFile(f"{path} cannot be read as HDF5, or its end is missing: {error}") from error
    except (TypeError, ValueError, IndexError, AttributeError) as error:  # of what nobody thought of
        raise DataError(f"{path} cannot be read ({type(error).__name__}: {error}). What is: {LAYOUTS}") from error
    for name in ("observations", "actions"):
        arrays[name] = arrays[name].astype(np.float32)
    return _clipped(arrays, notes) if clip else arrays, notes


def _read(path: Path, file: Any, keys: Sequence[str], split: str | None) -> tuple[Arrays, list[str]]:
    if robomimic.is_layout(file):
        return robomimic.read_demos(path, file, keys, split)
    if split is not None:
        raise UserError(f"{path} has no splits: those are masks of robomimic's files (--split)")
    if any(_number(key) is not None for key in file):
        return _minari(path, file, keys)
    if keys:
        raise UserError(f"{path} has no observations by key: only robomimic's files and Minari's do (--keys)")
    if "observations" in file or "actions" in file:
        return _d4rl(path, file)
    found = ", ".join(sorted(file)[:8]) or "nothing"
    raise DataError(f"{path} has an unknown layout (it holds {found}): {LAYOUTS}{check.meant(FLAT, file)}")


def recorded_in(path: str | Path) -> str | None:
    """The environment that a robomimic file says it was recorded in."""
    import h5py

    with h5py.File(path, "r") as file:
        return robomimic.environment(file) if robomimic.is_layout(file) else None


# ------------------------------------------------------------------------------------------------------------- D4RL


def _d4rl(path: Path, file: Any) -> tuple[Arrays, list[str]]:
    missing = [key for key in FLAT if key not in file]
    if missing:
        raise DataError(f"{path} {check.lacking(missing, sorted(file))}; {LAYOUTS}")

    def stored(key: str, table: bool = False) -> np.ndarray:
        return numbers(str(path), key, file[key], table)

    arrays: Arrays = {key: stored(key, table=True) for key in ("observations", "actions")}
    if "rewards" in file:
        arrays["rewards"] = np.ravel(stored("rewards")).astype(np.float32)
    terminals = np.ravel(stored("terminals")) != 0
    timeouts = np.ravel(stored("timeouts")) != 0 if "timeouts" in file else None
    if "infos/goal" in file:
        arrays["goals"] = stored("infos/goal", table=True).astype(np.float32)
    lengths = {key: len(array) for key, array in arrays.items()} | {"terminals": len(terminals)}
    lengths |= {} if timeouts is None else {"timeouts": len(timeouts)}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{count} of {key}" for key, count in lengths.items())
        raise DataError(f"{path} has unequal numbers of steps: {counts}")
    if not lengths["actions"]:
        raise DataError(f"{path} has no steps")
    widths = arrays["observations"].shape[1], arrays["actions"].shape[1]
    kind = {(4, 2): "maze2d", (29, 8): "antmaze"}.get(widths)
    notes: list[str] = []
    if kind is not None and "infos/goal" not in file and kind not in path.name:  # anyone's, with as many columns
        notes.append(
            f"as wide as D4RL's {kind}, but neither its name nor infos/goal says so: episodes end where terminals and "
            f"timeouts do. If it is {kind}'s, give it a name with {kind}"
        )
        kind = None
    if kind is not None:
        arrays["goal_indices"] = np.array([0, 1])
    elif not terminals.any() and (timeouts is None or not timeouts.any()):
        raise DataError(f"{path}: neither terminals nor timeouts marks an end; one is 1 on an episode's last row")
    else:
        notes += [problem.brief for problem in check.misspelt(file, OPTIONAL)]
        if "goal_indices" in file:
            arrays["goal_indices"] = np.asarray(file["goal_indices"][()])
        if "observation_names" in file:
            arrays["observation_names"] = np.asarray(file["observation_names"].asstr()[()])
    if kind == "maze2d":
        arrays["observation_names"] = np.array(["x", "y", "vx", "vy"])
        return _one_walk(arrays, terminals, timeouts, notes), notes
    return _episodes(arrays, terminals, timeouts, kind, notes), notes


def _one_walk(arrays: Arrays, terminals: np.ndarray, timeouts: np.ndarray | None, notes: list[str]) -> Arrays:
    """maze2d: one walk without resets. Its `timeouts` mark where the controller reached its goal (D4RL#85)."""
    if timeouts is None:
        timeouts = terminals if terminals.any() else _new_goals(arrays.get("goals"), len(terminals))
        how = (
            "terminals says"
            if terminals.any()
            else "the changes of infos/goal say"
            if timeouts.any()
            else "nothing says"
        )
        notes.append(f"there are no timeouts (D4RL#176): {how} where goals were reached")
    arrays["arrivals"] = timeouts
    observations = arrays["observations"]
    repeats = np.append(False, (observations[1:] == observations[:-1]).all(1))
    if repeats.any():  # the generator records the state before a new goal again, in place of the one after it
        arrays["arrivals"] = timeouts | np.append(repeats[1:] & timeouts[1:], False)
        arrays = {key: array if is_about(key) else array[~repeats] for key, array in arrays.items()}
        notes.append(f"{int(repeats.sum())} rows that repeat the state before them are left out")
    ends = _jumps(arrays["observations"], JUMP["maze2d"])
    if ends.any():
        notes.append(f"cut at {int(ends.sum())} places where the position jumps")
    rows = len(ends)
    cuts = np.flatnonzero(ends)
    pieces = list(zip(np.append(0, cuts + 1), np.append(cuts, rows - 1)))
    made = gather(arrays, [piece for begin, end in pieces for piece in _fixed(int(begin), int(end), WALK)])
    notes.append(f"one walk without resets, cut every {WALK} steps; arrivals at goals are kept as `arrivals`")
    return made


def _episodes(
    arrays: Arrays, terminals: np.ndarray, timeouts: np.ndarray | None, kind: str | None, notes: list[str]
) -> Arrays:
    """antmaze, and any other: episodes that end where the flags, and the positions, say so."""
    rows = len(terminals)
    ends = np.zeros(rows, bool) if timeouts is None else timeouts.copy()
    if kind == "antmaze":
        jumps = _jumps(arrays["observations"], JUMP["antmaze"])
        unmarked = jumps & ~ends
        if unmarked.any():
            notes.append(
                f"{int(unmarked.sum())} ends are not marked by timeouts, the ant is elsewhere then (D4RL#77): cut there"
            )
        ends |= jumps
        if terminals.any():
            notes.append(f"terminals marks {int(terminals.sum())} steps at the goal, no ends (D4RL#199): not cut there")
    else:
        ends |= terminals
    if timeouts is None and kind is not None:
        notes.append("there are no timeouts (D4RL#176): ends are where positions jump")
    if "rewards" in arrays:  # that of a step belongs to the state it leads to
        lost = np.count_nonzero(arrays["rewards"][ends | (np.arange(rows) == rows - 1)])
        if lost and kind is None:
            notes.append(
                f"rewards are moved to the states that steps lead to: those of {lost} last steps are left out, since "
                "the file does not have the states they led to"
            )
        arrays["rewards"] = np.append(np.float32(0), arrays["rewards"][:-1])
        arrays["rewards"][1:][ends[:-1]] = 0
    if kind is None and not ends[-1]:
        notes.append("the last row is not marked as an end: taken for one")
    ends[-1] = True
    last = np.flatnonzero(ends)
    first = np.append(0, last[:-1] + 1)
    kept = last > first
    if not kept.all():
        notes.append(f"{int((~kept).sum())} episodes of a single row are left out")
    if not kept.any():
        raise DataError("every episode has a single row: timeouts and terminals mark every step")
    return gather(arrays, list(zip(first[kept], last[kept])))


def from_legacy(arrays: Arrays, rows: int, columns: int) -> Arrays:
    """maze2d in D4RL's coordinates -> in those of our environment, for a maze of so many rows and columns.

    There x counts rows downwards and y columns, and the centre of cell (i, j) is at (i - 0.2, j - 0.2); here x goes to
    the right, y upwards, and the middle of the maze is at 0. The point and the walls are the same.
    """
    middle = np.array([(columns - 1) / 2, (1 - rows) / 2])

    def turn(vectors: np.ndarray) -> np.ndarray:
        return np.stack([vectors[:, 1], -vectors[:, 0]], axis=1)

    def place(xy: np.ndarray) -> np.ndarray:
        return turn(xy.astype(np.float64) + 0.2) - middle

    observations = arrays["observations"]
    made = {**arrays, "actions": turn(arrays["actions"])}
    made["observations"] = np.concatenate([place(observations[:, :2]), turn(observations[:, 2:])], 1).astype(np.float32)
    if "goals" in arrays:
        made["goals"] = place(arrays["goals"]).astype(np.float32)
    return made


def _jumps(observations: np.ndarray, limit: float) -> np.ndarray:
    """Rows after which the position is further away than a step can lead."""
    return np.append(np.linalg.norm(np.diff(observations[:, :2], axis=0), axis=1) > limit, False)


def _new_goals(goals: np.ndarray | None, rows: int) -> np.ndarray:
    """The last rows with the same goal as before."""
    if goals is None:
        return np.zeros(rows, bool)
    return np.append((np.diff(goals, axis=0) != 0).any(1), False)


# ----------------------------------------------------------------------------------------------------------- Minari


def _number(key: str) -> int | None:
    found = re.fullmatch(r"episode_(\d+)", key)
    return int(found[1]) if found else None


def _minari(path: Path, file: Any, keys: Sequence[str]) -> tuple[Arrays, list[str]]:
    """Episodes of T steps with T + 1 observations; the reward of a step belongs to the state it leads to."""
    numbered = ((_number(key), key) for key in file)
    episodes = [key for _, key in sorted((number, key) for number, key in numbered if number is not None)]
    whole = Columns(str(path), keys)
    by_key = defaultdict(lambda: Columns(str(path)), {"": whole})  # of the observations, and of groups in them
    notes: list[str] = []
    parts: dict[str, list[np.ndarray]] = {}
    empty = 0
    columns: tuple[int, ...] | None = None
    for key in episodes:
        group = file[key]
        if hasattr(group, "shape"):
            raise DataError(f"{path}: {key} is an array; {LAYOUTS}")
        for needed in ("observations", "actions"):
            if needed not in group:
                raise DataError(f"{path}: {key} {check.lacking([needed], sorted(group))}; {LAYOUTS}")
        if not hasattr(group["actions"], "shape"):
            raise DataError(f"{path}: the actions of {key} are not one array; only continuous actions can be learned")
        actions = numbers(str(path), f"actions of {key}", group["actions"], table=True)
        observations, goals, columns = _minari_observations(path, key, group["observations"], columns, by_key, notes)
        if len(observations) != len(actions) + 1:
            raise DataError(
                f"{path}: {key} has {len(observations)} observations and {len(actions)} actions; Minari keeps one "
                "observation more, the final state"
            )
        if not len(actions):
            empty += 1
            continue
        rows = {"observations": observations, "actions": np.concatenate([actions, np.zeros_like(actions[:1])])}
        if goals is not None:
            rows["goals"] = goals.astype(np.float32)
        if "rewards" in group:
            rewards = np.ravel(numbers(str(path), f"rewards of {key}", group["rewards"]))
            if len(rewards) != len(actions):
                raise DataError(f"{path}: {key} has {len(rewards)} rewards and {len(actions)} actions")
            rows["rewards"] = np.append(0, rewards).astype(np.float32)
        rows["terminals"] = np.arange(len(observations)) == len(actions)
        for name, array in rows.items():
            parts.setdefault(name, []).append(array)
    if not parts:
        raise DataError(f"{path} has no episode with a step")
    for each in by_key.values():
        notes += each.notes()
    if empty:
        notes.append(f"{empty} episodes without a step are left out")
    for name, pieces in parts.items():
        if len(pieces) != len(parts["terminals"]) or len({piece.shape[1:] for piece in pieces}) > 1:
            raise DataError(f"{path}: the {name} of its episodes have different shapes, or some episodes lack them")
    arrays = {name: np.concatenate(pieces) for name, pieces in parts.items()}
    if columns is not None:
        arrays["goal_indices"] = np.array(columns)
    if whole.first:
        arrays["observation_names"] = np.array(whole.names())
    return arrays, notes


def _minari_observations(
    path: Path,
    key: str,
    stored: Any,
    columns: tuple[int, ...] | None,
    by_key: dict[str, Columns],
    notes: list[str],
) -> tuple[np.ndarray, np.ndarray | None, tuple[int, ...] | None]:
    """Observations, goals and the goal's coordinates of one episode, from an array or a dict (a goal environment's)."""
    if hasattr(stored, "shape"):
        if by_key[""].asked:
            raise UserError(f"{path}: the observations of {key} are one array, without keys: leave out --keys")
        return numbers(str(path), f"observations of {key}", stored, table=True), None, columns

    def part(name: str) -> np.ndarray:
        inside, where = stored[name], f"{key}/{name}"
        if hasattr(inside, "shape"):
            return numbers(str(path), where, inside, table=True)
        return by_key[name].read(where, inside)

    goals_apart = "observation" in stored and "achieved_goal" in stored
    plain = "observation" in stored and hasattr(stored["observation"], "shape")
    if by_key[""].asked or not (goals_apart or plain):
        return by_key[""].read(key, stored), None, columns
    observation = part("observation")
    if not goals_apart:
        others = sorted(set(stored) - {"observation", "desired_goal"})
        note = f"of the observations, `observation` alone is read, not {', '.join(others)}: `qhyer data convert --keys`"
        if others and note not in notes:
            notes.append(note)
        return observation, None, columns
    achieved = part("achieved_goal")
    goals = part("desired_goal") if "desired_goal" in stored else None
    for name, array in (("achieved_goal", achieved), ("desired_goal", achieved if goals is None else goals)):
        if len(array) != len(observation):
            raise DataError(f"{path}: {key} has {len(observation)} observations and {len(array)} of {name}")
    width = achieved.shape[1]
    if columns is None:  # decided once, by the first episode: a mixture of both would fit no network
        columns = _columns_of(observation, achieved)
        if columns is None:
            columns = tuple(range(width))
            notes.append(f"the achieved goal is no part of the observation: its {width} numbers are put before it")
    if _columns_of(observation, achieved, columns) is None:
        observation = np.concatenate([achieved, observation], axis=1)
    return observation, goals, columns


def _columns_of(
    observation: np.ndarray, achieved: np.ndarray, columns: tuple[int, ...] | None = None
) -> tuple[int, ...] | None:
    """The columns of the observation that are the achieved goal, in its order; None if it is not among them."""
    if columns is not None:
        fits = max(columns) < observation.shape[1] and np.array_equal(observation[:, list(columns)], achieved)
        return columns if fits else None
    found: list[int] = []
    for j in range(achieved.shape[1]):
        same = [
            i
            for i in range(observation.shape[1])
            if i not in found and np.array_equal(observation[:, i], achieved[:, j])
        ]
        if not same:
            return None
        found.append(same[0])
    return tuple(found)


# ----------------------------------------------------------------------------------------------------------- pieces


def _fixed(begin: int, end: int, steps: int) -> list[tuple[int, int]]:
    """Pieces of so many transitions between two rows; a piece begins in the state where the one before ends."""
    return [(row, min(row + steps, end)) for row in range(begin, end, steps)]


def _clipped(arrays: Arrays, notes: list[str]) -> Arrays:
    """Actions that are out of range by rounding alone are put back."""
    actions = arrays["actions"]
    if actions.size and np.isfinite(actions).all():
        worst = float(np.abs(actions).max())
        if 1.0 + 1e-6 < worst <= 1.0 + CLIPPED:
            notes.append(f"actions up to {worst:.6g} are clipped to 1")
            arrays["actions"] = actions.clip(-1.0, 1.0)
    return arrays
