"""Where data come from: their hash, what their file looks like, and how they were generated. Without torch: a report
compares, too."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qhyer.errors import UserError
from qhyer.storage import read_sealed_json

ANT = Path(__file__).with_name("ant") / "ant.json"  # the one that comes with the package


def fingerprint(observations: np.ndarray, actions: np.ndarray, ends: np.ndarray, others: Sequence[np.ndarray]) -> str:
    """Of float32 observations and actions, the rows of the last states, and what else there is (rewards, bounds)."""
    digest = hashlib.sha256()
    for array in (observations, actions, ends.astype(np.int64), *others):
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


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
