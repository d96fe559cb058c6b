"""What memory there is: the machine's, and what containers and batch jobs leave of it; and who asks before training."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from qhyer import memory, runs
from qhyer.errors import UserError
from qhyer.train import TrainConfig, train

GIB = 2**30


def machine(root: Path, files: dict[str, str]) -> Path:
    files = {"proc/meminfo": f"MemTotal: 99 kB\nMemAvailable: {8 * GIB // 1024} kB\n", **files}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def limited(folder: str, limit: str, used: int, idle: int) -> dict[str, str]:
    """Version 2's files of a group."""
    group = f"sys/fs/cgroup/{folder}"
    stat = f"anon 1\ninactive_file {idle}\n"
    return {f"{group}/memory.max": limit, f"{group}/memory.current": str(used), f"{group}/memory.stat": stat}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8 * GIB),
        ({"proc/meminfo": "MemTotal: 1 kB\n"}, None),
        ({"proc/self/cgroup": "0::/job/step\n", **limited("job/step", "max\n", GIB, 0)}, 8 * GIB),
        ({"proc/self/cgroup": "0::/job/step\n", **limited("job", f"{4 * GIB}\n", 3 * GIB, GIB)}, 2 * GIB),
        ({"proc/self/cgroup": "0::/\n", **limited("", f"{4 * GIB}\n", 3 * GIB, 0)}, GIB),
        (
            {
                "proc/self/cgroup": "4:cpu,memory:/docker/x\n1:cpu:/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{3 * GIB}\n",  # a container sees its own as the root
                "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
            },
            2 * GIB,
        ),
    ],
)
def test_the_least_of_what_is_free_and_what_limits_leave(tmp_path, files, expected):
    assert memory.available(machine(tmp_path, files)) == expected


def test_systems_that_do_not_say(tmp_path):
    assert memory.available(tmp_path) is None


@pytest.mark.skipif(not Path("/proc/meminfo").is_file(), reason="Linux")
def test_this_machine():
    there = memory.available()
    assert there is not None and there > 0
    assert there < 4 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # swap included


def test_an_update_that_does_not_fit_is_refused_before_anything_is_written(
    tiny_config, point_world, tmp_path, monkeypatch, capsys
):
    config = replace(tiny_config("qhyer"), steps=1)
    kept = runs.build_agent("qhyer", config, point_world.spec(), 0).update_bytes()
    run = tmp_path / "run"

    def go() -> None:
        train("qhyer", "x", config, TrainConfig(device="cpu", threads=1), run=run, episodes=point_world)

    monkeypatch.setattr(memory, "available", lambda: kept - 1)
    with pytest.raises(UserError, match=r"(?s)an update of 8 takes .* GB .*are free here.*--preset demo.*batch-size 4"):
        go()
    assert not run.exists()
    monkeypatch.setattr(memory, "available", lambda: kept // 20)  # not even one window; the preset is in use already
    with pytest.raises(UserError, match="a smaller network") as told:
        train("qhyer", "x", config, TrainConfig(device="cpu"), run=run, episodes=point_world, preset="demo")
    assert "--preset" not in str(told.value) and "batch-size" not in str(told.value)
    monkeypatch.setattr(memory, "available", lambda: kept + 1)  # perhaps
    go()
    assert "may be ended" in capsys.readouterr().err
    monkeypatch.setattr(memory, "available", lambda: None)
    go()
    assert "memory" not in capsys.readouterr().err
