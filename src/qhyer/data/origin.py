"""Where data come from: their hash, what their file looks like, and how they were generated. Without torch: a report
compares, too."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qhyer.errors import DataError, UserError
from qhyer.storage import read_sealed_json

ANT = Path(__file__).with_name("ant") / "ant.json"  # the one that comes with the package


def fingerprint(observations: np.ndarray, actions: np.ndarray, ends: np.ndarray, others: Sequence[np.ndarray]) -> str:
    """Of float32 observations and actions, the rows of the last states, and what else there is (rewards, bounds)."""
    digest = hashlib.sha256()
    for array in (observations, actions, ends.astype(np.int64), *others):
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def ends_of(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """Where episodes of an npz end: its `terminals`, and its `timeouts`, if it has any, as in HDF5."""
    terminals = arrays["terminals"]
    if "timeouts" not in arrays:
        return terminals
    rows, timeouts = len(np.atleast_1d(arrays["observations"])), arrays["timeouts"]
    late = _flags(timeouts, rows)
    if late is None:
        raise DataError(
            f"timeouts has shape {timeouts.shape} ({timeouts.dtype}) and does not fit {rows} rows: like terminals, it "
            "is 1 on the last rows of episodes. Rename it if it is something else"
        )
    flags = _flags(terminals, rows)
    return terminals if flags is None else flags | late  # what is wrong with terminals is the check's to say


def _flags(ends: np.ndarray, rows: int) -> np.ndarray | None:
    """Of flags or row numbers, of which the last need not be there; None of what is neither."""
    if ends.ndim != 1 or ends.dtype.kind not in "fiub":
        return None
    if len(ends) == rows:
        return ends.astype(bool) if np.isin(ends, (0, 1)).all() else None
    if ends.dtype.kind not in "iu" or (len(ends) and not 0 <= ends.min() <= ends.max() < rows):
        return None
    flags = np.zeros(rows, bool)
    flags[ends] = True
    return flags


def sidecar(path: Path) -> dict[str, Any]:
    """What the sidecar of an npz says; nothing where there is none that can be read."""
    try:
        return read_sealed_json(path.with_suffix(".json")) if path.suffix == ".npz" else {}
    except (UserError, OSError):
        return {}


def generated(path: Path) -> dict[str, Any]:
    """How this file was generated; nothing where it was not. `own` are the settings that are not those of
    `qhyer data generate NAME --seed --episodes`, as far as they are known here: the ant that walked."""
    made = sidecar(path)
    if not {"dataset", "seed", "episodes"} <= made.keys():
        return {}
    about = ("dataset", "split", "episodes", "seed", "sha256", "settings")
    ant = (made.get("settings") or {}).get("ant")
    released = read_sealed_json(ANT)["sha256"] if ant and ANT.is_file() else None
    own = {"ant": ant} if ant != released else {}
    return {**{name: made[name] for name in about if name in made}, "own": own}


def of_file(path: Path) -> dict[str, Any]:
    """What run.json keeps of a dataset's file."""
    if not path.is_file():
        return {}
    found, made = path.stat(), generated(path)
    outside = {"bytes": found.st_size, "modified": found.st_mtime_ns}
    return {"file": outside, **({"generated": made} if made else {})}
