"""How much memory a process may still take here: the kernel ends one that takes more, without a word."""

from __future__ import annotations

from pathlib import Path

UNLIMITED = 2**60  # version 1 of cgroups says "no limit" with a number about this large


def available(root: Path = Path("/")) -> int | None:
    """Bytes that are free or can be freed, and what is left of the limits of this process's cgroups (a container, a
    batch job), whichever is less; None where the system does not say, as on macOS."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
        free = 1024 * (kib["MemAvailable"] + kib.get("SwapFree", 0))
    except (OSError, ValueError, KeyError, IndexError):
        return None
    return min([free, *_left_of_limits(root)])


def _left_of_limits(root: Path) -> list[int]:
    """Of each cgroup with a limit that this process is in, those above it included."""
    left = []
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for group in groups:
        _, _, rest = group.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":  # version 2
            base, limit, used = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit, used = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        inside = Path(path.strip("/"))
        for folder in (base / inside, *(base / above for above in inside.parents)):
            try:
                most, taken = int((folder / limit).read_text()), int((folder / used).read_text())
            except (OSError, ValueError):  # "max", or not there, as where a container sees its own group as the root
                continue
            if most < UNLIMITED:
                left.append(max(0, most - taken + _files(folder)))
    return left


def _files(folder: Path) -> int:
    """Of what a cgroup has taken, the files read long ago: given back as soon as memory is wanted."""
    try:
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
    except (OSError, ValueError):
        return 0
