"""Errors meant for the user: the message says what is wrong and what to do about it."""

from __future__ import annotations


class UserError(Exception):
    """Something the user can mend. The command line prints the message alone, without a traceback."""


class DataError(UserError):
    """A dataset that must not be trained on; the message is what `qhyer data check` prints."""


class CorruptFile(UserError):
    """A file whose content does not match its checksum."""


def require(condition: bool, message: str) -> None:
    """Raises `UserError` unless the condition holds: for the ranges of configurations."""
    if not condition:
        raise UserError(message)
