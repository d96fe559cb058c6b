"""Observations that a file keeps by key, as columns: robomimic's, and those of Dict spaces in Minari's files.

Keys come in alphabetical order, those of a group together: the order in which Gymnasium sorts a Dict space. Keys that
are asked for come in the order they are asked for. Numbers, vectors and matrices of a step are read, images are not.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from qhyer.errors import DataError, UserError, did_you_mean

JPEG = (0xFF, 0xD8, 0xFF)  # how such bytes begin; Minari keeps images so
IMAGES, OTHERS = "images", "what is not numbers"


class Columns:
    """Which keys become columns. The first episode decides, and every other must have them, too."""

    def __init__(self, file: str, asked: Sequence[str] = ()) -> None:
        self.file, self.asked = file, tuple(asked)
        self.shapes: dict[str, tuple[int, ...]] = {}
        """of one step, by key, in order"""
        self.left_out: dict[str, str] = {}
        """which keys are not read, and what they are"""
        self.first = ""

    def read(
        self, where: str, group: Any, rows: int | None = None, more: bool = False
    ) -> np.ndarray:  # (rows, columns)
        """An episode's observations; `where` names it in errors. With `more` it may have other keys besides."""
        there = arrays_of(group)
        if not self.first:
            self._decide(where, there)
        self._compare(where, there, more or bool(self.asked))
        parts = []
        for key, shape in self.shapes.items():
            rows = len(there[key]) if rows is None else rows
            if len(there[key]) != rows:
                raise DataError(f"{self.file}: {key} of {where} has {len(there[key])} rows, not {rows}")
            parts.append(np.asarray(there[key][()]).reshape(rows, int(np.prod(shape))))
        return np.concatenate(parts, axis=1)

    def missing(self, group: Any) -> list[str]:
        """Which of the keys a group lacks."""
        return [key for key in self.shapes if key not in group]

    def names(self) -> list[str]:
        """Of the columns: the key where it has one, otherwise key[0], key[1] ..., of a matrix key[0,0], key[0,1] ..."""
        found = []
        for key, shape in self.shapes.items():
            places = np.ndindex(*shape) if np.prod(shape) > 1 else [()]
            found += [key + (f"[{','.join(map(str, place))}]" if place else "") for place in places]
        return found

    def notes(self) -> list[str]:
        """What was left out that nobody asked for."""
        if self.asked:
            return []
        told = {kind: [key for key, what in self.left_out.items() if what == kind] for kind in (IMAGES, OTHERS)}
        return [f"{kind} {'are' if kind == IMAGES else 'is'} left out: {', '.join(k)}" for kind, k in told.items() if k]

    def _decide(self, where: str, there: dict[str, Any]) -> None:
        self.first = where
        self.left_out = {key: kind for key, array in there.items() if (kind := _unread(array))}
        for asked in self.asked or there:
            inside = [key for key in there if key == asked or key.startswith(f"{asked}/")]
            if not inside:
                hint = did_you_mean(asked, there)
                raise UserError(f"{self.file}: no observation is called {asked!r}{hint} (there are {', '.join(there)})")
            if asked in self.left_out and self.asked:
                raise UserError(f"{self.file}: {asked} cannot be read: {self.left_out[asked]} can be no columns")
            self.shapes |= {key: tuple(there[key].shape[1:]) for key in inside if key not in self.left_out}
        if not self.shapes:
            found = ", ".join(there) or "nothing"
            raise DataError(f"{self.file}: {where} has no observations of numbers, which are learned from: {found}")

    def _compare(self, where: str, there: dict[str, Any], more: bool) -> None:
        """Other keys, or other shapes, than in the first episode are an error: rows would have other meanings."""
        fits = [
            key
            for key, shape in self.shapes.items()
            if key in there and there[key].shape[1:] == shape and not _unread(there[key])
        ]
        new = [] if more else [key for key in there if key not in self.shapes and not _unread(there[key])]
        lacks = [key for key in self.shapes if key not in there]
        other = [key for key in self.shapes if key in there and key not in fits]
        if lacks:
            wrong = f"{where} lacks {', '.join(lacks)}, which {self.first} has"
        elif new:
            wrong = f"{self.first} lacks {', '.join(new)}, which {where} has"
        elif other:
            shapes = f"{there[other[0]].shape[1:]} in {where} and {self.shapes[other[0]]} in {self.first}"
            wrong = f"a step's {other[0]} has the shape {shapes}"
        else:
            return
        advice = f"; `qhyer data convert FILE OUT.npz --keys {' '.join(fits)}` reads what both have" if fits else ""
        raise DataError(f"{self.file}: {wrong}{advice}")


def numbers(file: str, where: str, stored: Any, table: bool = False) -> np.ndarray:
    """An array of numbers, read whole; with two axes, unless there is nothing in it, where that is asked for."""
    import h5py

    if not hasattr(stored, "shape") or stored.shape is None:
        raise DataError(f"{file}: {where} is {'empty' if hasattr(stored, 'shape') else 'a group'}, not an array")
    if stored.dtype.kind not in "fiub":
        kind = "text" if h5py.check_string_dtype(stored.dtype) is not None else str(stored.dtype)
        raise DataError(f"{file}: {where} holds {kind}, not numbers")
    if table and len(stored.shape) != 2 and stored.shape[:1] != (0,):
        raise DataError(f"{file}: {where} has the shape {stored.shape}; it must be (steps, columns)")
    return np.asarray(stored[()])


def arrays_of(group: Any) -> dict[str, Any]:
    """Every array below a group, by its path, in order."""
    found: dict[str, Any] = {}
    for name in sorted(group, key=_rank):
        inside = group[name]
        if hasattr(inside, "shape"):
            found[name] = inside
        else:
            found |= {f"{name}/{path}": array for path, array in arrays_of(inside).items()}
    return found


def _rank(name: str) -> str:
    """Alphabetical, but the places of a tuple, as Minari calls them, by number."""
    place = re.fullmatch(r"_index_(\d+)", name)
    return f"_index_{int(place[1]):09}" if place else name


def _unread(array: Any) -> str:
    """What an array is that cannot become columns; nothing if it can."""
    import h5py

    kind, axes = array.dtype, array.ndim - 1  # of a step
    if h5py.check_vlen_dtype(kind) == np.uint8:
        return IMAGES  # JPEG, as Minari keeps them
    if kind.kind not in "fiub" or axes < 0 or 0 in array.shape[1:]:
        return OTHERS
    if axes > 2 or (kind == np.uint8 and axes == 2):
        return IMAGES
    encoded = kind == np.uint8 and axes == 1 and array.shape[1] > 3 and len(array) > 0
    return IMAGES if encoded and tuple(array[0][:3].tolist()) == JPEG else ""
