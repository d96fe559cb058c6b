"""Episodes: a dataset as flat tensors with boundaries, on the device that trains.

Row convention (OGBench's files, made explicit here so that no agent needs to know it). An episode of T
transitions has T + 1 rows: rows 0..T-1 hold (s_t, a_t) and the last row holds the final state s_T, whose action
is meaningless and never used. `terminals` is 1 on that last row only; it marks the end of an episode, not success.

    rows          0    1   ...  T-1   T      0    1  ...
    observations  s_0  s_1 ... s_T-1 s_T  |  s_0  s_1
    actions       a_0  a_1 ... a_T-1  -   |  a_0  a_1
    terminals     0    0   ...   0    1   |  0    0

The final state may be a goal and the next state of a transition; it is never the start of one. Data of tasks with a
reward (D4RL's) also have `rewards`, one a row: that of the row's state, final states included, as in D4RL's maze files.
Data whose actions had other units have `action_low` and `action_high`: what -1 and 1 stand for, column by column.
"""

from __future__ import annotations

import logging
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qhyer.config import to_dict
from qhyer.data import bounds, check
from qhyer.data.origin import ends_of, fingerprint, of_file
from qhyer.errors import CorruptFile, DataError, UserError, did_you_mean
from qhyer.storage import read_sealed_json, sha256_file

log = logging.getLogger(__name__)

HDF5 = (".hdf5", ".h5")
FILES = (".npz", *HDF5)
UNNAMED = "custom"  # data that nobody has given a name
STD_FLOOR = 1e-3  # constant columns: a scale that leaves them at zero rather than blowing them up


@dataclass(frozen=True)
class DataSpec:
    """What an agent must know of its data: sizes, scales, and which coordinates make the goal."""

    observation_dim: int
    action_dim: int
    goal_indices: tuple[int, ...]
    """Coordinates of an observation that decide whether a goal is reached; the flow models these."""
    observation_mean: tuple[float, ...]
    observation_std: tuple[float, ...]
    goal_binary: tuple[bool, ...] = ()
    """Which goal coordinates take two values only (a button, a lamp); empty where none does."""
    action_low: tuple[float, ...] = ()
    """What -1 stands for in each column of actions; empty where the data are in [-1, 1] by nature."""
    action_high: tuple[float, ...] = ()
    """What 1 stands for."""

    @property
    def goal_dim(self) -> int:
        return len(self.goal_indices)

    @property
    def action_bounds(self) -> tuple[np.ndarray, np.ndarray] | None:
        """What -1 and 1 stand for, (d_a,) each; None where they stand for themselves."""
        ends = np.asarray(self.action_low, np.float32), np.asarray(self.action_high, np.float32)
        return ends if self.action_low else None

    def own_units(self, actions: np.ndarray) -> np.ndarray:  # (..., d_a) -> (..., d_a)
        """Actions in [-1, 1] as whoever recorded the data gave them."""
        return bounds.unscale(actions, *self.action_bounds) if self.action_bounds else actions

    def stored(self) -> dict[str, Any]:
        """As JSON values. Bounds are there where there are any: of all other data this is what it was without them."""
        absent = () if self.action_low else bounds.NAMES
        return {name: value for name, value in to_dict(self).items() if name not in absent}


class Episodes:
    """Flat tensors plus boundaries. Indices are rows; `starts[e]` and `ends[e]` bound episode e, inclusive."""

    def __init__(
        self,
        observations: Tensor,
        actions: Tensor,
        ends: Tensor,
        goal_indices: Sequence[int],
        name: str = UNNAMED,
        fingerprint: str = "",
        rewards: Tensor | None = None,
        action_low: Tensor | None = None,
        action_high: Tensor | None = None,
        *,
        observation_names: Sequence[str] | None = None,
        warnings: Sequence[check.Problem] = (),
        origin: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = name
        self.fingerprint = fingerprint
        self.observations = observations  # (N, observation_dim) float32
        self.actions = actions  # (N, action_dim) float32
        self.ends = ends  # (E,) int64: row of each final state
        self.starts = torch.cat([ends.new_zeros(1), ends[:-1] + 1])  # (E,)
        self.goal_indices = tuple(int(i) for i in goal_indices)
        self.rewards = rewards  # (N,) float32, or None where success is all there is
        self.action_low, self.action_high = action_low, action_high  # (d_a,) float32, or None
        self.observation_names = None if observation_names is None else tuple(observation_names)
        self.warnings = tuple(warnings)  # the check's, where nobody has been told yet
        self.origin = dict(origin or {})  # of the file they were read from: see `origin.of_file`
        lengths = self.ends - self.starts  # (E,) transitions per episode
        # Row -> row of its episode's final state, and the rows that start a transition (all but the final states).
        self.end_of = torch.repeat_interleave(self.ends, lengths + 1)  # (N,)
        rows = torch.arange(len(observations), device=observations.device)
        self.transitions = rows[rows != self.end_of]  # (N - E,)

    def __repr__(self) -> str:
        states, actions = self.observations.shape[-1], self.actions.shape[-1]
        return (
            f"<Episodes {self.name}: {self.num_episodes} episodes, {self.num_transitions} transitions, observations "
            f"({states},), actions ({actions},), goal {list(self.goal_indices)}>"
        )

    # ---------------------------------------------------------------------------------------------- building

    @classmethod
    def from_arrays(
        cls,
        observations: Any,
        actions: Any,
        ends: Any,
        *,
        goal: Sequence[int] | Sequence[str] | None = None,
        observation_names: Sequence[str] | None = None,
        name: str = UNNAMED,
        device: str | torch.device = "cpu",
        rewards: Any = None,
        action_low: Any = None,
        action_high: Any = None,
    ) -> Episodes:
        """Your own data in three arrays.

        observations  (N, d_s): the states of all episodes, one after the other, final states included
        actions       (N, d_a) in [-1, 1]: the action taken at each row (the one beside a final state is ignored)
        ends          (N,) flags, 1 on each episode's last row, or the (E,) rows of those last states
        goal          the coordinates that make the goal, by index or by name; all of them when not given
        rewards       (N,), for agents that learn from rewards: what being in the row's state is worth
        action_low    (d_a,), with action_high: what -1 and 1 stand for, where actions were scaled (`data.bounds`)

        What the check warns of is logged.
        """
        made = cls._checked(
            observations, actions, ends, goal, observation_names, name, device, rewards, action_low, action_high
        )
        if made.warnings:
            log.warning("%s", check.describe(name, made.warnings))
            made.warnings = ()
        return made

    @classmethod
    def _checked(
        cls,
        observations: Any,
        actions: Any,
        ends: Any,
        goal: Sequence[int] | Sequence[str] | None,
        observation_names: Sequence[str] | None,
        name: str,
        device: str | torch.device,
        rewards: Any,
        action_low: Any,
        action_high: Any,
    ) -> Episodes:
        """`from_arrays`, but the warnings are kept for whoever asked."""
        try:
            observations, actions, ends = np.asarray(observations), np.asarray(actions), np.asarray(ends)
        except ValueError as error:
            raise DataError(f"{name}: not an array, rows of unequal length? ({error})") from None
        flags = end_flags(ends, observations.shape[0] if observations.ndim else 0)
        problems = check.find_problems(observations, actions, flags, low=action_low, high=action_high)
        errors = [p for p in problems if p.severity == "error"]
        if errors:
            raise DataError(check.describe(name, errors))
        observations = np.ascontiguousarray(observations, dtype=np.float32)
        actions = np.ascontiguousarray(actions, dtype=np.float32)
        end_rows = np.flatnonzero(flags)
        goal_indices = goal_columns(goal, observation_names, observations.shape[1])
        brought = None if rewards is None else _rewards(name, rewards, len(flags))
        wrong = bounds.wrong_bounds(actions.shape[1], action_low, action_high)
        if wrong:
            raise DataError(check.describe(name, [check.Problem("error", "bounds", wrong)]))
        span = [] if action_low is None else [np.array(end, np.float32) for end in (action_low, action_high)]
        others = [*([] if brought is None else [brought]), *span]
        return cls(
            torch.from_numpy(observations),
            torch.from_numpy(actions),
            torch.from_numpy(end_rows).long(),
            goal_indices,
            name,
            fingerprint(observations, actions, end_rows, others),
            None if brought is None else torch.from_numpy(brought),
            *map(torch.from_numpy, span),
            observation_names=observation_names,
            warnings=problems,
        ).to(device)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        goal: Sequence[int] | Sequence[str] | None = None,
        name: str | None = None,
        device: str | torch.device = "cpu",
        task_goal: Sequence[float] | None = None,
        radius: float = 0.5,
        pieces: bool = False,
    ) -> Episodes:
        """Reads an npz in OGBench's layout, or HDF5 of D4RL, Minari or robomimic (docs/data.md); a sidecar is verified.

        With `task_goal` the rewards are those of this goal: 1 in states within `radius` of it.
        With `pieces` a walk over several goals becomes an episode for each, where the data say when they were reached.
        What the check warns of is kept in `warnings`.
        """
        origin = of_file(Path(path))
        arrays = read_arrays(path)
        misspelt = check.misspelt(arrays)
        if pieces and "arrivals" in arrays:
            from qhyer.data.pieces import recut

            arrays = recut(arrays)
        if task_goal is not None:
            arrays["rewards"] = goal_rewards(arrays["observations"], goal or (), task_goal, radius)
        if goal is None:
            goal = stored_goal(arrays)
        names = arrays.get("observation_names")
        made = cls._checked(
            arrays["observations"],
            arrays["actions"],
            arrays["terminals"],
            goal,
            None if names is None else [str(n) for n in np.ravel(names)],
            name or own_name(Path(path)),
            device,
            arrays.get("rewards"),
            arrays.get("action_low"),
            arrays.get("action_high"),
        )
        made.warnings = (*misspelt, *made.warnings)
        made.origin = origin
        return made

    # ------------------------------------------------------------------------------------------------- using

    @property
    def num_episodes(self) -> int:
        return len(self.ends)

    @property
    def num_transitions(self) -> int:
        return len(self.transitions)

    @property
    def device(self) -> torch.device:
        return self.observations.device

    def to(self, device: str | torch.device) -> Episodes:
        if torch.device(device) == self.device:
            return self
        return Episodes(
            self.observations.to(device),
            self.actions.to(device),
            self.ends.to(device),
            self.goal_indices,
            self.name,
            self.fingerprint,
            *(None if each is None else each.to(device) for each in (self.rewards, self.action_low, self.action_high)),
            observation_names=self.observation_names,
            warnings=self.warnings,
            origin=self.origin,
        )

    def spec(self) -> DataSpec:
        """Sizes and scales, the latter in float64 over all rows."""
        std, mean = torch.std_mean(self.observations.double(), dim=0, correction=0)
        goals = self.observations[:, list(self.goal_indices)]
        low, high = torch.aminmax(goals, dim=0)
        binary = ((goals == low) | (goals == high)).all(0) & (low < high)
        return DataSpec(
            observation_dim=self.observations.shape[1],
            action_dim=self.actions.shape[1],
            goal_indices=self.goal_indices,
            observation_mean=tuple(mean.tolist()),
            observation_std=tuple(std.clamp(min=STD_FLOOR).tolist()),
            goal_binary=tuple(binary.tolist()) if bool(binary.any()) else (),
            action_low=() if self.action_low is None else tuple(self.action_low.tolist()),
            action_high=() if self.action_high is None else tuple(self.action_high.tolist()),
        )


def own_name(path: Path) -> str:
    """A file's dataset name. HDF5 never has a generated dataset's: its coordinates and goals are others."""
    if path.suffix not in HDF5:
        return path.stem
    minari = path.name == "main_data.hdf5" and path.resolve().parent.name == "data"  # NAME/data/main_data.hdf5
    return f"{path.resolve().parents[1].name if minari else path.stem}-hdf5"


def read_arrays(path: str | Path) -> dict[str, np.ndarray]:
    """The arrays of a dataset's file, whatever its format: npz, or HDF5 of D4RL, Minari or robomimic."""
    if Path(path).suffix in HDF5:
        from qhyer.data.hdf5 import read_hdf5

        return read_hdf5(path)
    return read_npz(path)


def read_npz(path: str | Path) -> dict[str, np.ndarray]:
    """The arrays of an npz, never unpickled; its sidecar's SHA-256 is checked when there is a sidecar.

    `timeouts` are taken for ends, and are in `terminals` then.
    """
    path = Path(path)
    if not path.is_file():
        beside = [file.name for file in path.parent.glob("*") if file.suffix in FILES] if path.parent.is_dir() else []
        raise UserError(
            f"no dataset at {path}{did_you_mean(path.name, beside)} (`qhyer data generate NAME` makes those of "
            "`qhyer data list`)"
        )
    sidecar = own_sidecar(path)
    if sidecar.is_file():
        recorded = read_sealed_json(sidecar).get("sha256")
        if recorded != sha256_file(path):
            raise CorruptFile(
                f"{path} is damaged or was changed: its SHA-256 is not the one in {sidecar.name}. "
                "Generate it again, or delete the sidecar if you changed the data on purpose."
            )
    if not zipfile.is_zipfile(path):
        raise CorruptFile(f"{path} is not an npz file, or its end is missing; np.savez makes one (docs/data.md)")
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
    except Exception as error:  # zipfile and numpy raise many kinds
        raise CorruptFile(f"{path} cannot be read as npz: {error}") from error
    missing = {"observations", "actions", "terminals"} - set(arrays)
    if missing:
        raise DataError(
            f"{path} {check.lacking(sorted(missing), arrays)}; the layout is "
            "observations (N, d_s), actions (N, d_a), terminals (N,) with 1 on each episode's last row"
        )
    try:
        arrays["terminals"] = ends_of(arrays)
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    arrays.pop("timeouts", None)  # they are among the ends now
    return arrays


def header(path: str | Path) -> tuple[list[str] | None, int]:
    """What an npz says of its observations, without reading them: its columns' names, if any, and their number."""
    with zipfile.ZipFile(path) as whole, whole.open("observations.npy") as file:
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        shape, _, _ = read[np.lib.format.read_magic(file)](file)
    if len(shape) != 2:
        raise ValueError(f"observations of shape {shape}")
    with np.load(path) as arrays:
        names = arrays.get("observation_names")
    return None if names is None else [str(name) for name in np.ravel(names)], shape[1]


def own_sidecar(path: Path) -> Path:
    """Where a file's sidecar is, or would be; an error if something stands there that this project did not write."""
    sidecar = path.with_suffix(".json")
    if sidecar.is_file():
        content = sidecar.read_bytes()
        ours = b'"seal"' in content or b"sha256" in content
    else:
        ours = not sidecar.exists()
    if not ours:
        raise UserError(f"{sidecar} is not a sidecar this project wrote; rename it, it stands where one belongs")
    return sidecar


def columns_told(columns: Sequence[int], names: Sequence[str] | None) -> str:
    """Columns of observations by name, where they have names, else by number."""
    return ", ".join(str(column) if names is None else names[column] for column in columns)


def coordinate(text: str) -> int | str:
    """A coordinate as one types it: its index, or its name."""
    return int(text) if text.lstrip("-").isdigit() else text


def stored_goal(arrays: Mapping[str, np.ndarray]) -> list[int] | list[str] | None:
    """The goal coordinates a file names itself (`goal_indices`: numbers, or names of observations), or None."""
    if "goal_indices" not in arrays:
        return None
    values = np.ravel(arrays["goal_indices"])
    if np.issubdtype(values.dtype, np.integer):
        return [int(value) for value in values]
    if values.dtype.kind == "U":
        return [str(value) for value in values]
    raise DataError(f"goal_indices holds {values.dtype}: give whole numbers, or names in observation_names")


def goal_rewards(
    observations: np.ndarray, columns: Sequence[Any], goal: Sequence[float] | np.ndarray, radius: float
) -> np.ndarray:
    """1 in states whose goal coordinates lie within `radius` of the goal (one, or one a row), 0 elsewhere."""
    distance = np.linalg.norm(observations[:, list(columns)] - np.asarray(goal, np.float32), axis=1)
    return (distance <= radius).astype(np.float32)


def _rewards(name: str, rewards: Any, rows: int) -> np.ndarray:
    """One finite number for each row."""
    values = np.asarray(rewards)
    wrong = check.wrong_rewards(values, rows)
    if wrong:
        raise DataError(f"{name}: {wrong}")
    return values.astype(np.float32)


def end_flags(ends: np.ndarray, rows: int) -> np.ndarray:
    """Flags of length N from flags or from row numbers."""
    if ends.ndim == 1 and len(ends) == rows and (ends.dtype == bool or np.isin(ends, (0, 1)).all()):
        return ends.astype(bool)
    rows_given = ends.ndim == 1 and len(ends) > 0 and np.issubdtype(ends.dtype, np.integer)
    if rows_given and ends.min() >= 0 and ends.max() == rows - 1:
        flags = np.zeros(rows, dtype=bool)
        flags[ends] = True
        return flags
    raise DataError(
        f"ends has shape {ends.shape} and does not fit {rows} rows: give {rows} flags (1 on each episode's last row), "
        f"or the row numbers of the last rows, of which the greatest is {rows - 1}"
    )


def goal_columns(
    goal: Sequence[int] | Sequence[str] | None, names: Sequence[str] | None, width: int
) -> tuple[int, ...]:
    if names is not None and (len(names) != width or len(set(names)) != width):
        raise UserError(f"observation_names {', '.join(names)} must be distinct, one for each of {width} columns")
    if goal is None:
        return tuple(range(width))
    indices: list[int] = []
    for item in goal:
        if isinstance(item, str):
            # A key of robomimic's or of a Dict space stands for all of its columns.
            parts = [i for i, name in enumerate(names or ()) if name.startswith((f"{item}[", f"{item}/"))]
            if parts and item not in (names or ()):
                indices += parts
                continue
            if names is None or item not in names:
                known = "no observation_names were given" if names is None else f"the names are {', '.join(names)}"
                raise UserError(f"goal coordinate {item!r} is not known: {known}")
            indices.append(list(names).index(item))
        else:
            indices.append(int(item))
    if not indices or len(set(indices)) != len(indices) or min(indices) < 0 or max(indices) >= width:
        raise UserError(f"goal coordinates {list(goal)} must be distinct and within 0..{width - 1}")
    return tuple(indices)
