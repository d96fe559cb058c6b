"""robomimic's HDF5: a group for each demonstration, its observations kept by key (docs/data.md).

    data/demo_0/obs/KEY (T, ...), actions (T, d_a), rewards (T,), dones (T,), next_obs/KEY (T, ...)
    mask/SPLIT          names of demonstrations

A step's reward is that of the state it leads to. The state after the last step is in `next_obs` alone. (The layout is
described in robomimic's documentation, "Datasets", rewards in its dataset_states_to_obs.py; read at d309eae.)
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qhyer.data.columns import Columns, numbers
from qhyer.data.pieces import Arrays
from qhyer.errors import DataError, UserError, did_you_mean


def is_layout(file: Any) -> bool:
    return bool(_demos(file))


def environment(file: Any) -> str | None:
    """What the demonstrations were recorded in, as the file says; it is no id of gymnasium."""
    try:
        return str(json.loads(file["data"].attrs["env_args"])["env_name"])
    except (KeyError, TypeError, ValueError):
        return None


def read_demos(path: Path, file: Any, keys: Sequence[str], split: str | None) -> tuple[Arrays, list[str]]:
    """The arrays of all demonstrations, or of a split's, and a sentence for each thing that is left out or moved."""
    columns, counts = Columns(str(path), keys), Counter[str]()
    parts: dict[str, list[np.ndarray]] = {}
    for name in _of_split(path, file, split):
        rows = _rows(path, name, file["data"][name], columns, counts)
        for key, array in rows.items():
            parts.setdefault(key, []).append(array)
    if not parts:
        which = f"no demonstration of split {split}" if split is not None else "no demonstration"
        raise DataError(f"{path} has {which} with a step to learn from")
    if len({piece.shape[1] for piece in parts["actions"]}) > 1:
        raise DataError(f"{path}: the actions of its demonstrations have different numbers of columns")
    if 0 < len(parts.get("rewards", [])) < len(parts["actions"]):
        del parts["rewards"]
        counts["unrewarded"], counts["lost"] = 1, 0  # all are left out, those of last steps among them
    arrays = {key: np.concatenate(pieces) for key, pieces in parts.items()}
    arrays["observation_names"] = np.array(columns.names())
    masks = sorted(_masks(file)) if split is None else []
    told = {
        "empty": "{} demonstrations without a step to learn from are left out",
        "beyond": "{} demonstrations have more rows than num_samples says: those beyond are left out",
        "last": "the state after the last step (next_obs) is not there in {} demonstrations: their last step is taken "
        "for the final state, its action is ignored",
        "lost": "rewards of {} last steps are left out, since the file does not have the states they led to",
        "unrewarded": "rewards are left out: not all demonstrations have them",
        "done": "dones marks {} steps before the last of their demonstrations: not cut there",
    }
    notes = [*columns.notes(), *(text.format(counts[what]) for what, text in told.items() if counts[what])]
    if masks:
        notes.append(f"all demonstrations are read; `qhyer data convert --split` takes those of {' or '.join(masks)}")
    return arrays, notes


def _demos(file: Any) -> list[str]:
    """Names of the demonstrations, by number."""
    if "data" not in file or hasattr(file["data"], "shape"):
        return []
    numbers = {name: int(found[1]) for name in file["data"] if (found := re.fullmatch(r"demo_(\d+)", name))}
    return sorted(numbers, key=lambda name: (numbers[name], name))


def _masks(file: Any) -> Any:
    """Lists of demonstrations by the name of their split; none if the file has none."""
    masks = file.get("mask", {})
    return {} if hasattr(masks, "shape") else masks


def _of_split(path: Path, file: Any, split: str | None) -> list[str]:
    names = _demos(file)
    if split is None:
        return names
    masks = _masks(file)
    if split not in masks:
        there = f"there are {', '.join(sorted(masks))}" if len(masks) else "it has no mask, and so no splits"
        raise UserError(f"{path} has no split {split!r}{did_you_mean(split, masks)} ({there})")
    if getattr(masks[split], "shape", None) is None:
        raise DataError(f"{path}: mask/{split} is no list of demonstrations' names")
    listed = {name.decode() if isinstance(name, bytes) else str(name) for name in np.ravel(masks[split][()])}
    if not listed:
        raise DataError(f"{path}: mask/{split} lists no demonstration")
    if unknown := sorted(listed - set(names)):
        raise DataError(f"{path}: mask/{split} names {unknown[0]}, which is not in data")
    return [name for name in names if name in listed]


def _rows(path: Path, name: str, group: Any, columns: Columns, counts: Counter[str]) -> Arrays:
    """A demonstration's rows, the final state included; nothing if there is no step to learn from."""
    if hasattr(group, "shape"):
        raise DataError(f"{path}: {name} is an array; a demonstration is a group with obs and actions")
    if not len(group):
        counts["empty"] += 1
        return {}
    if "actions" not in group or not hasattr(group["actions"], "shape") or group["actions"].ndim != 2:
        raise DataError(f"{path}: {name} has no actions (steps, columns); it has {', '.join(sorted(group))}")
    if "obs" not in group or hasattr(group["obs"], "shape"):
        raise DataError(
            f"{path}: {name} has no obs, a group of observations by key; it has {', '.join(sorted(group))}. "
            "Of a file with states alone, robomimic's dataset_states_to_obs.py makes one with observations"
        )
    if "next_obs" in group and hasattr(group["next_obs"], "shape"):
        raise DataError(f"{path}: next_obs of {name} is one array; it must be a group by key, as obs is")
    total = len(group["actions"])
    steps = _steps(path, name, group.attrs.get("num_samples", total))
    if steps > total:
        raise DataError(
            f"{path}: {name} has {total} actions, and {steps} by its num_samples: it was cut off. Remove it, "
            "or leave it out of a mask and take that (`qhyer data convert --split`)"
        )
    counts["beyond"] += steps < total
    if steps < 1:
        counts["empty"] += 1
        return {}
    states = columns.read(name, group["obs"], total)[:steps]  # (T, d_s)
    actions = numbers(str(path), f"actions of {name}", group["actions"])[:steps]  # (T, d_a)
    rewards = np.zeros(0, np.float32)
    if "rewards" in group:
        rewards = np.ravel(numbers(str(path), f"rewards of {name}", group["rewards"])).astype(np.float32)  # (T,)
        if len(rewards) != total:
            raise DataError(f"{path}: {name} has {len(rewards)} rewards and {total} actions")
        rewards = rewards[:steps]
    if "next_obs" in group and not columns.missing(group["next_obs"]):
        after = columns.read(f"{name}/next_obs", group["next_obs"], total, more=True)[steps - 1 : steps]  # (1, d_s)
        states, actions = np.concatenate([states, after]), np.concatenate([actions, actions[:1]])
    elif steps > 1:
        counts["last"] += 1
        counts["lost"] += int(rewards[-1:].any())
        rewards = rewards[:-1]
    else:
        counts["empty"] += 1
        return {}
    actions[-1] = 0
    if "dones" in group:
        dones = np.ravel(numbers(str(path), f"dones of {name}", group["dones"]))  # (T,)
        counts["done"] += int(np.count_nonzero(dones[: steps - 1]))
    rows = {"observations": states, "actions": actions, "terminals": np.arange(len(states)) == len(states) - 1}
    return rows | ({"rewards": np.append(np.float32(0), rewards)} if "rewards" in group else {})


def _steps(path: Path, name: str, stored: Any) -> int:
    """`num_samples`: a whole number, or an array of one."""
    try:
        return int(np.ravel(stored).item())
    except (TypeError, ValueError, OverflowError):
        raise DataError(f"{path}: num_samples of {name} is {stored!r}, not a number of steps") from None
