"""Errors meant for the user: the message says what is wrong and what to do about it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Something the user can mend. The command line prints the message alone, without a traceback."""


class DataError(UserError):
    """A dataset that must not be trained on; the message is what `qhyer data check` prints."""


class Kept(UserError):
    """A longer evaluation stands where a shorter one would replace it."""


class CorruptFile(UserError):
    """A file whose content does not match its checksum."""


class Taken(UserError):
    """Something that another process is at work on."""


def nearest(word: str, known: Iterable[str], most: int = 1, cutoff: float = 0.6) -> list[str]:
    """The nearest of the known words, none where all are far."""
    return difflib.get_close_matches(word, list(known), n=most, cutoff=cutoff)


def did_you_mean(word: str, known: Iterable[str], most: int = 1, cutoff: float = 0.6) -> str:
    """ "; did you mean X?" with the nearest of the known words, or nothing: for errors about a name."""
    near = nearest(word, known, most, cutoff)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def require(condition: bool, message: str) -> None:
    """Raises `UserError` unless the condition holds: for the ranges of configurations."""
    if not condition:
        raise UserError(message)
