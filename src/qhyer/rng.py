"""One seed, named random streams.

Each consumer draws from its own stream, so an extra draw in one (say, another evaluation) cannot shift another
(the weights). `stream_seed(seed, "data")` is the same in every process and on every machine.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

import numpy as np


def stream_seed(seed: int, *names: str | int) -> int:
    """A 63-bit seed for the stream with this name: a hash, so that near seeds share nothing."""
    key = "/".join(str(part) for part in (seed, *names))
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little") >> 1


def episode_seed(seed: int, environment: str, task: int, episode: int) -> int:
    """The seed of an evaluation's episode: rows have it as env_seed."""
    return stream_seed(seed, "eval", environment, task, episode) % 2**31


def numpy_stream(seed: int, *names: str | int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(stream_seed(seed, *names)))


@contextlib.contextmanager
def global_numpy(seed: int) -> Iterator[None]:
    """Seed numpy's global generator for third-party code that draws from it, and put its state back after.

    OGBench's mazes draw start and goal noise from the global generator whatever `reset(seed=...)` says.
    """
    state = np.random.get_state()
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        np.random.set_state(state)
