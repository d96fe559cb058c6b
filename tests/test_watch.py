"""What is told of runs under way: which, how far, and how long it may take, by hand."""

from __future__ import annotations

import io
import re
import sys
import time

import pytest
from rich.console import Console

from qhyer.launch import BEGUN, LOST, TOLD
from qhyer.progress import Progress, listened
from qhyer.watch import EVALUATING, SHOWN, TRAINING, Task, Watch, roughly


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def watch_of(*updates: int, evaluated: bool = True, kind: str = "") -> tuple[Watch, Clock]:
    clock = Clock()
    tasks = [Task(f"run-{i}", kind, count, evaluated) for i, count in enumerate(updates)]
    return Watch(tasks, Console(file=io.StringIO()), alone=True, clock=clock), clock


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0.2, "1 second"),
        (42, "42 seconds"),
        (89, "89 seconds"),
        (118.3, "2 minutes"),
        (3600, "60 minutes"),
        (5400, "1.5 hours"),
        (36000, "10 hours"),
        (200_000, "2.3 days"),
        (1e6, "12 days"),
    ],
)
def test_times_as_one_says_them(seconds, text):
    assert roughly(seconds) == text


def test_what_is_left_counted_by_hand(capsys):
    """Three runs of a hundred updates, two at a time: 4 seconds to start, 0.1 an update, 2 an episode."""
    watch, clock = watch_of(100, 100, 100)
    assert watch.left() == (None, False)
    watch.hear(0, BEGUN, None)
    watch.hear(1, BEGUN, None)
    clock.now = 4.0
    watch.hear(0, TOLD, (TRAINING, 0, 100))
    watch.hear(1, TOLD, (TRAINING, 0, 100))
    assert watch.left() == (None, False)
    clock.now = 6.0
    watch.hear(0, TOLD, (TRAINING, 20, 100))
    watch.hear(1, TOLD, (TRAINING, 20, 100))
    # 8 seconds are left of both, then the third begins: 4 to start, 10 to train. Nothing is known of evaluations.
    assert watch.left() == (pytest.approx(8 + 14), False)
    assert watch.summary() == "0 of 3 over, 2 under way, 1 to begin, about 22 seconds left, evaluations not counted"
    assert watch.under_way() == [("run-0", "training 20 of 100"), ("run-1", "training 20 of 100")]
    clock.now = 14.0
    watch.hear(0, TOLD, (TRAINING, 100, 100))
    watch.hear(0, TOLD, (EVALUATING, 0, 10))
    clock.now = 22.0
    watch.hear(0, TOLD, (EVALUATING, 4, 10))
    # Run 0: 6 episodes at 2 seconds. Run 1 has been silent for 16 seconds, 8 more than its training needed: of 20 for
    # its evaluation 12 are left. Then the third: 4 + 10 + 20.
    assert watch.left() == (pytest.approx(12 + 34), True)
    watch.over(0)
    watch.over(1, failed=True)
    watch.hear(1, TOLD, (TRAINING, 30, 100))  # a late word of one that is over
    assert watch.summary() == "2 of 3 over (1 failed), 0 under way, 1 to begin"
    watch.hear(2, BEGUN, None)
    assert watch.left() == (pytest.approx(4 + 10 + 20), True)
    watch.hear(2, LOST, None)
    assert watch.summary().startswith("2 of 3 over (1 failed), 0 under way, 1 to begin")
    output = capsys.readouterr()
    assert not output.out and output.err.splitlines()[0] == "begun: run-0; 0 of 3 over, 1 under way, 2 to begin"


def test_a_run_that_goes_on_and_one_that_is_not_evaluated():
    watch, clock = watch_of(50, 1000, evaluated=False)
    watch.hear(0, BEGUN, None)
    watch.hear(0, TOLD, (TRAINING, 950, 1000))  # where it stopped
    clock.now = 10.0
    watch.hear(0, TOLD, (TRAINING, 975, 1000))
    assert watch.left() == (pytest.approx(10 + 400), True)


def test_kinds_have_paces_of_their_own():
    watch, clock = watch_of(100, 100, 100, evaluated=False)
    watch.tasks[1].kind = watch.tasks[2].kind = "slow"
    for index in (0, 1):
        watch.hear(index, BEGUN, None)
        watch.hear(index, TOLD, (TRAINING, 0, 100))
    clock.now = 10.0
    watch.hear(0, TOLD, (TRAINING, 50, 100))
    watch.hear(1, TOLD, (TRAINING, 10, 100))
    # 10 seconds of run 0, in whose place run 2 takes 100; run 1: 90.
    assert watch.left() == (pytest.approx(110), True)


def test_without_a_terminal_lines_come_now_and_then_and_not_to_stdout(capsys):
    watch, _ = watch_of(*[10] * (SHOWN + 2))
    watch.alone, watch.every = False, 0.05
    with watch:
        for index in range(SHOWN + 2):
            watch.hear(index, BEGUN, None)
        watch.hear(0, TOLD, (TRAINING, 1234, 5000))
        lines: list[str] = []
        while len(lines) < 2:
            time.sleep(0.05)
            output = capsys.readouterr()
            assert not output.out
            lines += [line for line in output.err.splitlines() if not line.startswith("begun: ")]
    assert lines[-1].startswith("0 of 12 over, 12 under way, 0 to begin; run-0 training 1,234 of 5,000; run-1 starting")
    assert lines[-1].endswith("; and 2 more")


def test_on_a_terminal_lines_are_redrawn_below_what_stays(monkeypatch):
    watch, _ = watch_of(10, 10)
    watch.alone = False
    watch.console = screen = Console(file=io.StringIO(), force_terminal=True, width=60, color_system=None)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    watch.tasks[0].name = 60 * "x" + "-s0"
    with watch:
        watch.hear(0, BEGUN, None)
        watch.hear(0, TOLD, (TRAINING, 3, 10))
        watch.say("1 of 2: done")
        watch.live.refresh()
    shown = screen.file.getvalue()  # type: ignore[attr-defined]
    assert "1 of 2: done" in shown and "training 3 of 10  …xx" in shown and "xx-s0\n" in shown
    assert max(map(len, re.split(r"\x1b\[[^A-Za-z]*[A-Za-z]|[\r\n]", shown))) == 60
    assert "0 of 2 over, 1 under way, 1 to begin" in shown and shown.rstrip("\r\n").endswith("\x1b[2K")


def test_whoever_listens_hears_quiet_progress(capsys):
    heard: list[tuple[int, int]] = []
    with listened(lambda done, total: heard.append((done, total))), Progress("x", 4, quiet=True, start=1) as progress:
        for done in (2, 3, 4):
            progress.advance(done)
    with Progress("x", 4, quiet=True) as progress:
        progress.advance(4)
    assert heard == [(1, 4), (4, 4)] and not capsys.readouterr().out


def test_brackets_in_names_are_no_markup_of_a_bar(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    with Progress("gcbc on v[m/s] [/s]", 2) as progress:
        progress.advance(2)
        progress.note("saved in of[/s]")
    assert "saved in of[/s]" in re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
