"""Files that are whole or absent, and that notice when a byte has changed.

Every write goes to a temporary name beside the target, is flushed to the disk, and takes the final name in one
rename. JSON that other files depend on is sealed: it carries a SHA-256 of its own content.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import platform
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from qhyer.errors import CorruptFile, Taken

FULL = (errno.ENOSPC, errno.EDQUOT)  # the disk, or what somebody may use of it
TEMPORARY = ".partial-"  # prefix of names that are not yet files; swept by `sweep_partial`


def sha256_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _temporary(path: Path) -> Path:
    return path.parent / f"{TEMPORARY}{path.name}-{os.getpid()}-{secrets.token_hex(4)}"


@contextlib.contextmanager
def _by_name(temporary: Path, path: Path) -> Iterator[None]:
    """What the system refuses, a full disk or a folder without rights, is said of the file that was meant."""
    try:
        yield
    except OSError as error:
        told = str(error.filename or "")
        if told == str(temporary) or told.startswith(f"{temporary}{os.sep}"):
            error.filename, error.filename2 = str(path) + told.removeprefix(str(temporary)), None
        elif error.filename is None and error.errno in FULL:  # writing to an open file names none
            error.filename = str(path)
        raise


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yields a temporary path to write; it becomes `path` when the block ends well, and vanishes otherwise."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(path)
    try:
        with _by_name(temporary, path):
            yield temporary
            _sync(temporary)
            os.replace(temporary, path)
            _sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def discard(folder: Path) -> None:
    """Remove a folder so that it is gone at once: a kill half-way leaves litter to sweep, not half a folder."""
    temporary = _temporary(Path(folder))
    os.rename(folder, temporary)
    shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """The same for a folder; one that has the name already is replaced."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(path)
    try:
        with _by_name(temporary, path):
            temporary.mkdir()
            yield temporary
            for item in temporary.iterdir():
                _sync(item)
            _sync(temporary)
            if path.is_dir():  # a folder cannot be renamed over another: the old one leaves at the last moment
                discard(path)
            os.rename(temporary, path)
            _sync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def sweep_partial(folder: Path) -> None:
    """Remove what a killed process left half-written here."""
    if not folder.is_dir():
        return
    for item in folder.glob(f"{TEMPORARY}*"):
        if item.is_dir():
            shutil.rmtree(item, ignore_errors=True)
        else:
            item.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(path: Path, what: str, advice: str) -> Iterator[bool]:
    """Holds a lock on this file, which is there meanwhile, or raises `Taken` where another process holds it: it says
    `what` that process does, and the `advice`.

    The system lets go of it however the process ends; the file that a kill leaves behind is locked by nobody, and stops
    nobody. Folders that are made for it and stay empty are removed again. Yields False, and keeps nobody out, where the
    file system has no locks.
    """
    try:
        import fcntl
    except ImportError:  # nor has the system
        yield False
        return
    made = [folder for folder in (path.parent, *path.parent.parents) if not folder.exists()]
    file, held = _lock(path, what, advice)
    try:
        yield held
    finally:
        if _stands_at(path, file):
            with contextlib.suppress(OSError):
                path.unlink()  # first, while nobody else can have it
        if held:
            fcntl.flock(file, fcntl.LOCK_UN)
        file.close()
        with contextlib.suppress(OSError):  # not empty
            for folder in made:
                folder.rmdir()


@contextlib.contextmanager
def in_turn(path: Path, seconds: float = 60.0) -> Iterator[None]:
    """Holds such a lock for the work of a moment; where another process has it, waits for it."""
    until = time.monotonic() + seconds
    with contextlib.ExitStack() as held:
        while True:
            try:
                held.enter_context(locked(path, f"{path.parent} is being written to", "ask again when it is done"))
                break
            except Taken:
                if time.monotonic() > until:
                    raise
                time.sleep(0.01)
        yield


def _lock(path: Path, what: str, advice: str) -> tuple[IO[str], bool]:
    import fcntl

    for _ in range(100):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = open(path, "a+", encoding="utf-8", errors="replace")  # noqa: SIM115  # as long as the lock
        except FileNotFoundError:  # the folder has just been removed again by the one who made it
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EWOULDBLOCK, errno.EACCES):
                return file, False
            file.seek(0)
            who = file.read(200).strip()
            file.close()
            raise Taken(f"{what} by another process{f' ({who})' if who else ''}: {advice}") from None
        if _stands_at(path, file):
            with contextlib.suppress(OSError):  # a full disk: nobody is told who it is
                file.truncate(0)
                os.write(file.fileno(), f"{os.getpid()} on {platform.node()}".encode())
            return file, True
        file.close()  # it was removed by the one who had it, between our opening and locking it
    return open(os.devnull, "a+"), False  # files have another number at each look: no lock holds here


def _stands_at(path: Path, file: IO[str]) -> bool:
    """Whether this open file is still the one of that name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False


def write_text(path: Path, text: str) -> None:
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, values: Any) -> None:
    write_text(path, json.dumps(values, indent=1) + "\n")


def refusal(folder: Path) -> str:
    """Why no file can be made in this folder, which itself is made if need be; nothing where one can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except (FileExistsError, NotADirectoryError) as error:
        return f"{error.filename} is a file, or lies in one"
    except OSError as error:
        return error.strerror or str(error)


def _seal(values: dict[str, Any]) -> str:
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def write_sealed_json(path: Path, values: dict[str, Any]) -> None:
    values = json.loads(json.dumps(values))
    write_json(path, {**values, "seal": _seal(values)})


def read_sealed_json(path: Path) -> dict[str, Any]:
    """Reads what `write_sealed_json` wrote, byte for byte, or raises `CorruptFile`."""
    try:
        raw = path.read_bytes()
        values = json.loads(raw.decode("utf-8"))
        seal = values.pop("seal")
        whole = (json.dumps({**values, "seal": seal}, indent=1) + "\n").encode()
        intact = seal == _seal(values) and raw == whole
    except (ValueError, KeyError, AttributeError, TypeError):
        intact = False
    if not intact:
        raise CorruptFile(f"{path} is damaged: its content does not match its own checksum")
    return values
