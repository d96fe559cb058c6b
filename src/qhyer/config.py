"""Frozen dataclasses <-> JSON, and a short hash that names a configuration."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from qhyer.errors import UserError

T = TypeVar("T")

Precision = Literal["fp32", "tf32", "bf16"]
"""of a training's matrix products; `TrainConfig` says what each means"""


def to_dict(config: Any) -> dict[str, Any]:
    """A dataclass as plain JSON values (tuples become lists)."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def from_dict(cls: type[T], values: Mapping[str, Any]) -> T:
    """The inverse of `to_dict`. Unknown names are an error, never ignored; a class with `upgrade` reads older ones."""
    assert dataclasses.is_dataclass(cls)
    values = getattr(cls, "upgrade", dict)(values)
    hints = typing.get_type_hints(cls)
    unknown = set(values) - {f.name for f in dataclasses.fields(cls)}
    if unknown:
        raise UserError(f"{cls.__name__} has no field {', '.join(sorted(unknown))}")
    return typing.cast(T, cls(**{name: _restore(hints[name], value) for name, value in values.items()}))


def _restore(hint: Any, value: Any) -> Any:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        options = [option for option in typing.get_args(hint) if option is not type(None)]
        return _restore(options[0], value) if len(options) == 1 else value
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return from_dict(hint, value)
    if origin is tuple:
        return tuple(_restore(typing.get_args(hint)[0], item) for item in value)
    if hint is float and isinstance(value, int):
        return float(value)
    return value


def replace(config: T, overrides: Mapping[str, Any]) -> T:
    """`dataclasses.replace` that names the misspelt field and the ones there are."""
    names = {f.name for f in dataclasses.fields(config)}  # type: ignore[arg-type]
    unknown = set(overrides) - names
    if unknown:
        raise UserError(
            f"{type(config).__name__} has no field {', '.join(sorted(unknown))}; it has {', '.join(sorted(names))}"
        )
    return dataclasses.replace(config, **overrides)  # type: ignore[type-var]


def chosen(config: Any) -> dict[str, Any]:
    """What differs from the class's defaults: a name made of it stays the same when the class gains an option."""
    usual = to_dict(type(config)())
    return {name: value for name, value in to_dict(config).items() if value != usual[name]}


def fingerprint(values: Any, length: int = 8) -> str:
    """A short hash of JSON values: equal configurations, equal names."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:length]
