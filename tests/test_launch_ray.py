"""The same on a Ray cluster of two nodes: results equal local ones, and what a lost worker had is run again."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_launch import count_aloud, die, die_once, square, told_to_go_once
from test_sweep import TINY, call, contents, write
from test_sweep import maze as maze  # a fixture

from qhyer import manifest, sweep
from qhyer import train as training
from qhyer.data import registry
from qhyer.data.generate import generate
from qhyer.errors import UserError
from qhyer.launch import BEGUN, LOST, TOLD, launch

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.timeout(120)
MAZE = registry.get("pointmaze-medium-stitch")
NODE: dict[str, Any] = dict(num_cpus=1, object_store_memory=80_000_000)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes of one core each, as `ray start` would make them on two machines."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        # The nodes import the functions of these tests.
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
        cluster.add_node(**NODE)
        cluster.wait_for_nodes()
        patch.setenv("RAY_ADDRESS", cluster.address)
        yield cluster
        ray.shutdown()
        cluster.shutdown()


def where(job: float) -> str:
    time.sleep(job)
    return ray.get_runtime_context().get_node_id()


def begin_and_wait(job: tuple[str, str]) -> str:
    """Says where it runs; goes on only if that is not the node to be lost."""
    began, doomed = map(Path, job)
    node = where(0.0)
    with open(began, "a") as file:
        file.write(node + "\n")
    while not doomed.exists() or doomed.read_text() == node:
        time.sleep(0.05)
    return node


def test_both_nodes_work_and_outcomes_are_those_of_one_machine(cluster):
    nodes = {outcome.result() for outcome in launch(where, [0.5] * 4, launcher="ray")}
    assert len(nodes) == 2
    assert not ray.is_initialized()  # the connection was ours, and is closed
    local = {o.index: (o.value, o.error) for o in launch(square, range(6))}
    assert local == {o.index: (o.value, o.error) for o in launch(square, range(6), launcher="ray", workers=3)}


def test_a_killed_workers_job_is_run_again(cluster, tmp_path):
    notes: list[str] = []
    jobs = [str(tmp_path / name) for name in "abc"]
    outcomes = list(launch(die_once, jobs, launcher="ray", note=notes.append))
    assert [(o.value, o.tries) for o in outcomes] == [("done", 2)] * 3
    assert len(notes) == 3 and "WorkerCrashedError" in notes[0]
    (outcome,) = launch(told_to_go_once, [str(tmp_path / "d")], launcher="ray")
    assert outcome.value == "done" and outcome.tries == 2
    (outcome,) = launch(die, [0], launcher="ray", retries=1)
    assert outcome.tries == 2 and "lost 2 times" in outcome.error


def tell_and_wait(marker: str) -> str:
    count_aloud(3)
    time.sleep(1.0)  # until they are fetched
    return die_once(marker) if marker else "done"


def test_what_jobs_tell_is_heard_in_order(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr("qhyer.launch.FETCH_S", 0.1)
    heard: list[tuple[int, str, object]] = []
    jobs = [str(tmp_path / "a"), ""]
    outcomes = list(launch(tell_and_wait, jobs, launcher="ray", hear=lambda *word: heard.append(word)))
    assert [(o.index, o.value, o.tries) for o in outcomes] == [(1, "done", 1), (0, "done", 2)]
    counted = [(BEGUN, None), *((TOLD, f"{number} of 3") for number in range(3))]
    assert [word[1:] for word in heard if word[0] == 1] == counted
    assert [word[1:] for word in heard if word[0] == 0] == [*counted, (LOST, None), *counted]


def test_a_lost_nodes_job_is_run_on_another(cluster, tmp_path):
    """A node goes away in the middle of its job."""
    extra = cluster.add_node(**NODE)
    cluster.wait_for_nodes()
    began, doomed = tmp_path / "began", tmp_path / "doomed"
    notes: list[str] = []
    outcomes = launch(begin_and_wait, [(str(began), str(doomed))] * 3, launcher="ray", note=notes.append)

    def lose() -> None:
        while not began.exists() or len(began.read_text().split()) < 3:
            time.sleep(0.05)
        doomed.write_text(extra.node_id)
        cluster.remove_node(extra, allow_graceful=False)

    thread = threading.Thread(target=lose)
    thread.start()
    found = list(outcomes)
    thread.join()
    assert len(found) == 3 and all(not o.error and o.value != extra.node_id for o in found)
    assert sorted(o.tries for o in found) == [1, 1, 2]
    assert len(notes) == 1 and "run again" in notes[0]


def test_generated_data_is_the_same_to_the_byte(cluster, tmp_path):
    options: dict[str, Any] = dict(episodes=6, seed=3, rows=30, progress=False)
    here = generate(MAZE, out=tmp_path / "here", workers=1, **options)
    there = generate(MAZE, out=tmp_path / "there", launcher="ray", **options)
    for suffix in (".npz", ".json", "-val.npz", "-val.json"):
        name = here.stem + suffix
        assert (here.parent / name).read_bytes() == (there.parent / name).read_bytes(), name


def test_episodes_that_fail_are_counted_and_the_others_kept(cluster, tmp_path, monkeypatch):
    from qhyer.data.generate import runner

    versions = runner.versions()
    monkeypatch.setattr(runner, "versions", lambda *_: {**versions, "mujoco": "0.1"})
    with pytest.raises(UserError, match=r"3 of 3 episodes failed.*mujoco .* there, 0.1 asked for"):
        generate(MAZE, out=tmp_path, episodes=2, rows=30, progress=False, launcher="ray")


def sees_gpus(job: object) -> str | None:
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def test_a_job_that_asks_for_no_gpu_sees_none(cluster):
    assert [outcome.value for outcome in launch(sees_gpus, [0], launcher="ray")] == [""]


def test_no_cluster_is_a_clear_error(cluster, monkeypatch, tmp_path):
    with pytest.raises(UserError, match=r"no Ray cluster answers at localhost:9: start one with `ray start --head`"):
        list(launch(square, [1], launcher="ray", address="localhost:9"))
    with pytest.raises(UserError, match="cannot be used"):
        list(launch(square, [1], launcher="ray", address="nonsense"))
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    write(tmp_path / "ray" / "ray_current_cluster", "127.0.0.1:9")  # one that was started here and is gone
    with pytest.raises(UserError, match="no Ray cluster is running here"):
        list(launch(square, [1], launcher="ray"))


def test_a_job_no_node_has_room_for_waits_and_says_so(cluster):
    notes: list[str] = []

    def add_such_a_node(text: str) -> None:
        notes.append(text)
        cluster.add_node(**NODE, num_gpus=4)

    (outcome,) = launch(square, [1], launcher="ray", gpus=4.0, note=add_such_a_node)
    assert outcome.value == 1
    assert notes == ["waiting: no node of the cluster has 1 CPUs and 4 GPUs for a job"]


# --------------------------------------------------------------------------------------------------------- sweeps


def die_in_training(job: sweep.CellJob) -> sweep.CellResult:
    """The first worker of seed 1 is killed at update 5; the updates of each are written down."""
    diary = Path(job.command[1]).parent / "diary"
    first = not diary.exists()

    def on_step(step: int) -> None:
        with open(diary, "a") as file:
            file.write(f"{step}\n")
        if first and step == 5:
            os._exit(1)

    original = training.train
    if job.cell.seed == 1:
        training.train = functools.partial(original, on_step=on_step)
    try:
        return sweep.run_cell(job)
    finally:
        training.train = original


@pytest.fixture(scope="module")
def expected(maze, tmp_path_factory) -> list[dict[str, Any]]:
    """What the small sweep comes to on this machine alone."""
    folder = tmp_path_factory.mktemp("local")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("QHYER_DATA", str(maze))
        path = write(folder / "local.toml", TINY.format(out="local"))
        assert call("sweep", path) == 0
        return [contents(cell.folder) for cell in manifest.read(path)]


@pytest.fixture
def here(maze, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QHYER_DATA", str(maze))


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("shared", [False, True], ids=["files travel", "shared folder"])
def test_a_sweep_with_a_lost_worker_comes_to_the_same(cluster, expected, tmp_path, monkeypatch, capsys, shared):
    path = write(tmp_path / "there.toml", TINY.format(out="there"))
    monkeypatch.setattr("qhyer.launch.FETCH_S", 0.05)  # these runs are short: what they tell is fetched before they end
    monkeypatch.setattr(sweep, "run_cell", die_in_training)
    monkeypatch.setattr("sys.argv", ["qhyer", str(path)])
    assert call("sweep", path, "--launcher", "ray", *["--shared"] * shared) == 0
    output, told = capsys.readouterr()
    assert "s1-" in output and "its worker was lost (WorkerCrashedError); it is run again" in output
    assert "begun:" not in output and "0 of 2 over, 1 under way, 1 to begin" in told
    updates = [int(line) for line in (tmp_path / "diary").read_text().split()]
    assert updates == [1, 2, 3, 4, 5, *([5, 6] if shared else [1, 2, 3, 4, 5, 6])]
    cells = manifest.read(path)
    assert [contents(cell.folder) for cell in cells] == expected
    assert f'"qhyer {path}"' in (cells[0].folder / "run.json").read_text()
    assert all(cell.folder.parent == Path("there/pointmaze-medium-stitch-v0") for cell in cells)
    assert {item.name for item in cells[0].folder.parent.iterdir()} == {cell.folder.name for cell in cells}


@pytest.mark.usefixtures("here")
def test_an_unfinished_run_goes_on_there_and_failures_come_back(cluster, expected, tmp_path, monkeypatch, capsys):
    text = TINY.format(out="there").replace("seeds = [0, 1]", "seeds = [0]")
    path = write(tmp_path / "there.toml", text + "eval = false\n")
    assert call("sweep", path) == 0  # trained here, evaluated there
    write(path, text)
    (cell,) = manifest.read(path)
    assert sweep.status(cell).text == "trained, not evaluated"
    monkeypatch.setattr("sys.argv", ["qhyer"])
    assert call("sweep", path, "--launcher", "ray") == 0
    assert contents(cell.folder) == expected[0]

    write(path, text.replace("medium-stitch", "large-stitch") + "eval = false\n")
    assert call("sweep", path, "--launcher", "ray") == 1
    output = " ".join(capsys.readouterr().out.split())
    assert "pointmaze-large-stitch-v0 is not on this disk" in output and "on " in output
