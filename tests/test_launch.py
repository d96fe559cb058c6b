"""Jobs run here and in processes: the same outcomes, one failure stops nobody, a lost worker's job is run again."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from qhyer.errors import UserError
from qhyer.launch import BEGUN, LOST, TOLD, Lost, few_threads, launch, tell


def square(job: int) -> int:
    if job == 3:
        raise ValueError("three is not liked")
    if job == 4:
        raise UserError("four is the user's mistake")
    return job * job


def die_once(marker: str) -> str:
    """What an out-of-memory kill looks like from outside."""
    if not Path(marker).exists():
        Path(marker).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return "done"


def die(job: object) -> None:
    os._exit(7)


def told_to_go_once(marker: str) -> str:
    if not Path(marker).exists():
        Path(marker).touch()
        raise Lost
    return "done"


def wait_for_sigterm(marker: str) -> None:
    def save(number: int, frame: object) -> None:
        Path(marker).write_text("saved")
        sys.exit(0)

    signal.signal(signal.SIGTERM, save)
    Path(marker).touch()
    time.sleep(60)


def answer_with_a_lambda(job: object) -> object:
    return lambda: job


@pytest.mark.parametrize("workers", [1, 2])
def test_outcomes(workers):
    outcomes = sorted(launch(square, range(6), workers=workers), key=lambda outcome: outcome.index)
    assert [outcome.index for outcome in outcomes] == list(range(6))
    assert [outcome.value for outcome in outcomes] == [0, 1, 4, None, None, 25]
    assert outcomes[3].error == "ValueError: three is not liked" and "in square" in outcomes[3].trace
    assert outcomes[4].error == "four is the user's mistake" and not outcomes[4].trace
    with pytest.raises(AssertionError, match="four"):
        outcomes[4].result()


def test_lost_processes_are_replaced(tmp_path):
    notes: list[str] = []
    jobs = [str(tmp_path / name) for name in "ab"]
    outcomes = list(launch(die_once, jobs, workers=2, names=["first", "second"], note=notes.append))
    assert [outcome.value for outcome in outcomes] == ["done", "done"]
    assert {outcome.tries for outcome in outcomes} == {2}
    assert len(notes) == 2 and "ended with code -9" in notes[0] and "run again" in notes[0]


def test_a_job_that_always_kills_its_worker_is_given_up():
    (outcome,) = launch(die, [0], workers=2, retries=1)
    assert outcome.tries == 2 and "lost 2 times" in outcome.error and "code 7" in outcome.error


def test_a_job_that_was_told_to_go(tmp_path):
    (outcome,) = launch(told_to_go_once, [str(tmp_path / "a")], workers=2)
    assert outcome.value == "done" and outcome.tries == 2
    with pytest.raises(KeyboardInterrupt):  # here the worker is this process
        list(launch(told_to_go_once, [str(tmp_path / "b")]))


def test_stopping_asks_running_jobs_to_save(tmp_path):
    marker = tmp_path / "marker"
    jobs = [("wait", str(marker)), ("quick", str(marker))]
    notes: list[str] = []
    with contextlib.closing(launch(either, jobs, workers=2, note=notes.append)) as outcomes:
        assert next(outcomes).index == 1
    assert marker.read_text() == "saved" and notes == ["stopping: 1 under way, up to 60 seconds to save"]


def either(job: tuple[str, str]) -> None:
    kind, marker = job
    if kind == "wait":
        wait_for_sigterm(marker)
    while not Path(marker).exists():
        time.sleep(0.01)


def test_a_value_that_cannot_travel():
    (outcome,) = launch(answer_with_a_lambda, [0], workers=2)
    assert outcome.error and outcome.tries == 1


def count_aloud(job: int) -> int:
    for number in range(job):
        tell(f"{number} of {job}")
    return job


@pytest.mark.parametrize("workers", [1, 2])
def test_what_jobs_tell_is_heard_in_order(workers):
    heard: list[tuple[int, str, object]] = []
    outcomes = launch(count_aloud, [2, 0, 3], workers=workers, hear=lambda *word: heard.append(word))
    assert sorted(outcome.result() for outcome in outcomes) == [0, 2, 3]
    for index, job in enumerate((2, 0, 3)):
        told = [(event, value) for at, event, value in heard if at == index]
        assert told == [(BEGUN, None), *((TOLD, f"{number} of {job}") for number in range(job))]
    assert count_aloud(2) == 2  # nobody listens
    assert sorted(outcome.result() for outcome in launch(count_aloud, [1, 2], workers=workers)) == [1, 2]


def test_a_lost_job_is_said_to_be(tmp_path):
    heard: list[str] = []
    list(launch(die_once, [str(tmp_path / "a")], workers=2, hear=lambda index, event, told: heard.append(event)))
    assert heard == [BEGUN, LOST, BEGUN]


def test_threads_are_shared_unless_chosen(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("MKL_NUM_THREADS", "5")
    with few_threads(2):
        assert os.environ["OMP_NUM_THREADS"] == "2" and os.environ["MKL_NUM_THREADS"] == "5"
    assert "OMP_NUM_THREADS" not in os.environ


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(workers=0), "workers must be at least 1"),
        (dict(launcher="slurm"), "no launcher is called 'slurm'"),
        (dict(address="here:1"), "--address is for"),
        (dict(retries=-1), "retries"),
        (dict(gpus=-1.0), "cannot be negative"),
        (dict(gpus=0.5), "--cpus and --gpus are for --launcher ray"),
    ],
)
def test_bad_options(options, words):
    with pytest.raises(UserError, match=words):
        launch(square, [1], **options)


def test_ray_is_asked_for_only_when_needed(monkeypatch):
    code = "import sys, qhyer.cli, qhyer.sweep, qhyer.manifest, qhyer.data.commands; print('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    with pytest.raises(UserError, match=r"pip install 'qhyer\[ray\]'"):
        list(launch(square, [1], launcher="ray"))
