"""Runs independent jobs: here, in processes of this machine, or on a Ray cluster. The results are the same.

A job is one argument of a module-level function; results come in the order in which they are ready. A job that raises
does not stop the others. One whose worker is lost (killed, out of memory, its machine gone) is run again: a function
that writes files must be able to start over, or go on from what it finds.

On a cluster, only arguments and results travel. The same qhyer must be installed on every node.
"""

from __future__ import annotations

import contextlib
import functools
import math
import multiprocessing
import os
import platform
import signal
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from qhyer import __version__
from qhyer.errors import UserError, require

Job = TypeVar("Job")
Result = TypeVar("Result")
Launcher = Literal["local", "ray"]

SAVE_S = 60.0  # what a job that is told to stop gets for saving
LOOK_S = 30.0  # between two looks at whether the cluster has room for what is waiting
FETCH_S = 1.0  # between two looks at what jobs on the cluster have told

BEGUN, TOLD, LOST = "begun", "told", "lost"
Hear = Callable[[int, str, Any], None]
"""gets a job's place in the list, one of the three above, and what was told"""


class Lost(Exception):
    """Raised by a job that was told to go before it was done (SIGTERM to its worker): it is run again."""


@dataclass(frozen=True)
class Outcome(Generic[Result]):
    """What became of a job: its value, or what was wrong."""

    index: int
    """the job's place in the list"""
    value: Result | None = None
    error: str = ""
    """empty when all is well"""
    trace: str = ""
    """the traceback, where the error is not one meant for the user"""
    tries: int = 1

    def result(self) -> Result:
        assert not self.error, self.error
        return self.value  # type: ignore[return-value]


_teller: Callable[[Any], None] | None = None


def tell(value: Any) -> None:
    """From within a job, a word to whoever listens to it (`hear`); lost where nobody does. It is no result: small, and
    not often."""
    if _teller is not None:
        _teller(value)


@contextlib.contextmanager
def _telling(teller: Callable[[Any], None] | None) -> Iterator[None]:
    global _teller
    before, _teller = _teller, teller
    try:
        yield
    finally:
        _teller = before


def launch(
    function: Callable[[Job], Result],
    jobs: Sequence[Job],
    *,
    launcher: Launcher = "local",
    workers: int | None = None,
    address: str | None = None,
    cpus: float = 1.0,
    gpus: float = 0.0,
    retries: int = 3,
    names: Sequence[str] | None = None,
    note: Callable[[str], None] | None = None,
    hear: Hear | None = None,
) -> Generator[Outcome[Result], None, None]:
    """Runs function(job) for each job and yields the outcomes as they come. Close it (or let it end) to stop the rest.

    local: one worker is this process; more are processes of their own. In a script, call it under
    `if __name__ == "__main__":`, as those processes import the script.
    ray: tasks that ask for `cpus` and `gpus` on the cluster at `address` ($RAY_ADDRESS, else the one running here), at
    most `workers` at a time; as many as the cluster has room for when not given.
    `retries`: how often a job is run again after its worker was lost. `note` gets sentences about such events.
    `hear` is told when a job has begun, when its worker was lost, and what the job itself says (`tell`).
    """
    require(workers is None or workers >= 1, f"workers must be at least 1, not {workers}")
    require(retries >= 0, "retries cannot be negative")
    require(cpus >= 0 and gpus >= 0, "cpus and gpus cannot be negative")
    names = names or [f"job {index}" for index in range(len(jobs))]
    queue = _Queue(names, retries, note or (lambda text: None), hear)
    if launcher == "ray":
        return _on_ray(function, jobs, queue, workers, address, cpus, gpus)
    require(launcher == "local", f"no launcher is called {launcher!r}: use local or ray")
    require(address is None, "--address is for --launcher ray")
    require((cpus, gpus) == (1.0, 0.0), "--cpus and --gpus are for --launcher ray")
    if (workers or 1) == 1:
        return _here(function, jobs, hear)
    return _in_processes(function, jobs, queue, workers or 1)


class _Queue:
    """Jobs that wait, and how often each was tried."""

    def __init__(self, names: Sequence[str], retries: int, note: Callable[[str], None], hear: Hear | None) -> None:
        self.names, self.retries, self.note = names, retries, note
        self.listened = hear is not None
        self.hear: Hear = hear or (lambda *_: None)
        self.waiting = deque(range(len(names)))
        self.tries = [0] * len(names)

    def next(self) -> int:
        index = self.waiting.popleft()
        self.tries[index] += 1
        return index

    def outcome(self, index: int, answer: dict[str, Any]) -> Outcome[Any] | None:
        """The answer's outcome. There is none yet for a lost job that is put back, in front of the others."""
        tries = self.tries[index]
        if "lost" not in answer:
            return Outcome(index, **answer, tries=tries)
        if tries > self.retries:
            return Outcome(index, error=f"its worker was lost {tries} times, at last: {answer['lost']}", tries=tries)
        self.note(f"{self.names[index]}: its worker was lost ({answer['lost']}); it is run again")
        self.hear(index, LOST, None)
        self.waiting.appendleft(index)
        return None

    def stop(self, count: int) -> None:
        """Said before the wait that follows."""
        if count:
            self.note(f"stopping: {count} under way, up to {SAVE_S:g} seconds to save")


# --------------------------------------------------------------------------------------------------- one attempt


def failure(error: BaseException) -> tuple[str, str]:
    """An exception in a line and its traceback; a user's mistake needs none."""
    if isinstance(error, UserError):
        return str(error), ""
    return f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))


def _attempt(function: Callable[[Job], Result], job: Job) -> dict[str, Any]:
    """The fields of an outcome: plain values, as not every exception can travel. A lost job has `lost` instead."""
    try:
        return {"value": function(job)}
    except Lost as lost:
        return {"lost": str(lost) or "told to stop"}
    except Exception as error:
        message, trace = failure(error)
        return {"error": message, "trace": trace}


def _here(
    function: Callable[[Job], Result], jobs: Sequence[Job], hear: Hear | None
) -> Generator[Outcome[Result], None, None]:
    for index, job in enumerate(jobs):
        if hear is not None:
            hear(index, BEGUN, None)
        with _telling(None if hear is None else functools.partial(hear, index, TOLD)):
            answer = _attempt(function, job)
        if "lost" in answer:  # this process is the worker, and it is the one that was told to go
            raise KeyboardInterrupt
        yield Outcome(index, **answer)


# ------------------------------------------------------------------------------------------ processes of this machine


def cores() -> int:
    """Cores this process may use, which in a container or a batch job are fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextlib.contextmanager
def few_threads(count: int) -> Iterator[None]:
    """Processes started here keep to this many threads, where the user has not chosen: the cores are shared."""
    names = [name for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS") if name not in os.environ]
    os.environ.update(dict.fromkeys(names, str(count)))
    try:
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)


def follow_parent() -> None:
    """A worker whose parent is gone goes too."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _process(connection: Connection, function: Callable[[Job], Result], job: Job, listened: bool) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which tells us with SIGTERM
    follow_parent()

    def say(value: Any) -> None:
        with contextlib.suppress(OSError):  # nobody is listening any more
            connection.send({TOLD: value})

    with _telling(say if listened else None):
        answer = _attempt(function, job)
    try:
        connection.send(answer)
    except OSError:  # nobody is listening any more
        raise
    except Exception as error:  # a value that cannot travel
        connection.send(dict(zip(("error", "trace"), failure(error))))
    connection.close()


def _in_processes(
    function: Callable[[Job], Result], jobs: Sequence[Job], queue: _Queue, workers: int
) -> Generator[Outcome[Result], None, None]:
    """A process for each job: what one leaves behind, on a GPU or in memory, the next does not see."""
    context = multiprocessing.get_context("spawn")  # forking a process with threads (torch, BLAS) may hang
    running: dict[Any, tuple[Any, int]] = {}
    try:
        while queue.waiting or running:
            while queue.waiting and len(running) < workers:
                index = queue.next()
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_process, args=(theirs, function, jobs[index], queue.listened))
                with few_threads(max(1, cores() // workers)):
                    process.start()
                theirs.close()
                running[ours] = process, index
                queue.hear(index, BEGUN, None)
            ready: list[Any] = wait(list(running))
            for connection in ready:
                process, index = running[connection]
                try:
                    answer = connection.recv()
                except (EOFError, OSError):
                    process.join()
                    answer = {"lost": f"the process ended with code {process.exitcode}"}
                if TOLD in answer:
                    queue.hear(index, TOLD, answer[TOLD])
                    continue
                del running[connection]
                connection.close()
                process.join()
                if outcome := queue.outcome(index, answer):
                    yield outcome
    finally:
        queue.stop(len(running))
        for process, _ in running.values():
            process.terminate()
        for process, _ in running.values():
            process.join(SAVE_S)
            if process.is_alive():
                process.kill()


# ------------------------------------------------------------------------------------------------------------- Ray


def _import_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise UserError("Ray is not installed: pip install 'qhyer[ray]', here and on every node") from None
    return ray


def _last_started() -> str:
    """The address of the cluster that was last started or joined here, which may be gone by now."""
    with contextlib.suppress(OSError):
        return Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster").read_text().strip()
    return ""


@contextlib.contextmanager
def _connected(ray: Any, address: str | None) -> Iterator[None]:
    """The cluster: the one this process is connected to already, or the one at the address."""
    if ray.is_initialized():
        yield
        return
    where = address or os.environ.get("RAY_ADDRESS") or "auto"
    host, _, port = (_last_started() if where == "auto" else where).rpartition(":")
    handler = signal.getsignal(signal.SIGTERM)
    try:
        if host and port.isdigit() and "://" not in host:  # knock first: Ray itself tries for minutes
            socket.create_connection((host, int(port)), timeout=10).close()
        ray.init(address=where, log_to_driver=False, logging_level="ERROR")
    except (RuntimeError, ValueError) as error:  # other versions there, or no address at all
        raise UserError(f"the Ray cluster at {where} cannot be used: {error}") from None
    except OSError:  # ConnectionError is one, and so is a host that is not known
        what = "no Ray cluster is running here" if where == "auto" else f"no Ray cluster answers at {where}"
        raise UserError(
            f"{what}: start one with `ray start --head`, join other machines to it with "
            "`ray start --address HEAD:6379`, and name it with --address or RAY_ADDRESS where it is elsewhere"
        ) from None
    if threading.current_thread() is threading.main_thread() and handler is not None:
        signal.signal(signal.SIGTERM, handler)  # Ray put its own there, which ends the process
    try:
        yield
    finally:
        ray.shutdown()


class _Mailbox:
    """An actor, which holds what jobs tell until the caller fetches it. One call at a time: letters stay in order."""

    def __init__(self, pause: float) -> None:
        self.pause = pause
        self.letters: list[tuple[int, str, Any]] = []

    def put(self, index: int, event: str, value: Any) -> None:
        self.letters.append((index, event, value))

    def take(self) -> list[tuple[int, str, Any]]:
        time.sleep(self.pause)
        letters, self.letters = self.letters, []
        return letters


def _mailbox(ray: Any) -> Any:
    """It lives on the caller's node where that is one of the cluster's: others may go away."""
    from ray.util import client
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    where: Any = "DEFAULT"
    if not client.ray.is_connected():
        where = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    return ray.remote(num_cpus=0, scheduling_strategy=where)(_Mailbox).remote(FETCH_S)


def _remote_attempt(
    version: str, gpus: float, function: Callable[[Job], Result], job: Job, index: int, mailbox: Any
) -> dict[str, Any]:
    os.environ.setdefault("MUJOCO_GL", "disable")
    if not gpus:  # what was not asked for is not used: others may have asked
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if version != __version__:
        return {"error": f"{platform.node()} has qhyer {__version__}, and {version} asks: install one on every node"}
    if mailbox is None:
        return _attempt(function, job)
    mailbox.put.remote(index, BEGUN, None)
    with _telling(lambda value: mailbox.put.remote(index, TOLD, value)):
        return _attempt(function, job)


def _room(ray: Any, cpus: float, gpus: float) -> float:
    """How many such jobs the nodes that are alive can hold."""
    room = 0.0
    for node in ray.nodes():
        has = node["Resources"] if node["Alive"] else {}
        fits = [has.get(kind, 0.0) // amount for kind, amount in (("CPU", cpus), ("GPU", gpus)) if amount]
        room += min(fits, default=1.0)
    return room


def _on_ray(
    function: Callable[[Job], Result],
    jobs: Sequence[Job],
    queue: _Queue,
    workers: int | None,
    address: str | None,
    cpus: float,
    gpus: float,
) -> Generator[Outcome[Result], None, None]:
    """Ray's own retries are off: a loss is counted and told here, whether of a worker, a node or a result on it."""
    ray = _import_ray()
    errors = ray.exceptions
    gone = (errors.WorkerCrashedError, errors.NodeDiedError, errors.ObjectLostError, errors.OutOfMemoryError)
    task = ray.remote(max_retries=0, num_cpus=cpus, num_gpus=gpus)(_remote_attempt)
    running: dict[Any, int] = {}
    told, looked, room = False, -math.inf, 0.0
    with _connected(ray, address):
        mailbox = _mailbox(ray) if queue.listened else None
        letters = mailbox.take.remote() if mailbox is not None else None
        try:
            while queue.waiting or running:
                if time.monotonic() - looked >= LOOK_S:
                    room, looked = _room(ray, cpus, gpus), time.monotonic()
                    if room < 1 and not told:
                        queue.note(f"waiting: no node of the cluster has {cpus:g} CPUs and {gpus:g} GPUs for a job")
                    told = room < 1
                # Twice the room keeps every worker busy, and shows an autoscaler that more would be used.
                limit = workers or max(8, int(2 * room))
                while queue.waiting and len(running) < limit:
                    index = queue.next()
                    running[task.remote(__version__, gpus, function, jobs[index], index, mailbox)] = index
                asked = [*running] if letters is None else [*running, letters]
                ready, _ = ray.wait(asked, num_returns=1, timeout=LOOK_S)
                if letters is not None and letters in ready:
                    ready.remove(letters)
                    letters = _deliver(ray, mailbox, letters, queue.hear)
                for reference in ready:
                    looked = -math.inf
                    index = running.pop(reference)
                    try:
                        answer = ray.get(reference)
                    except gone as error:
                        answer = {"lost": type(error).__name__}
                    except errors.RayError as error:  # e.g. there is no qhyer on the node: its last line says so
                        answer = {"error": str(error).strip().splitlines()[-1].strip(), "trace": str(error)}
                    if outcome := queue.outcome(index, answer):
                        yield outcome
        finally:
            queue.stop(len(running))
            for reference in running:
                ray.cancel(reference, force=False)  # as Ctrl-C: a training saves before it goes
            if running:
                ray.wait(list(running), num_returns=len(running), timeout=SAVE_S)
            if mailbox is not None:
                ray.kill(mailbox)


def _deliver(ray: Any, mailbox: Any, letters: Any, hear: Hear) -> Any:
    """Passes on what has come, and asks for more. A mailbox that is lost, with its node, stops no job."""
    try:
        for letter in ray.get(letters):
            hear(*letter)
    except ray.exceptions.RayError:
        return None
    return mailbox.take.remote()
