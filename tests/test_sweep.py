"""Sweeps: manifests that say what is wrong with them, runs that are done once, go on after a stop, and agree."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from qhyer import checkpoint, cli, envs, manifest, rollout, runs, sweep
from qhyer import train as training
from qhyer.config import chosen
from qhyer.data import registry
from qhyer.data.generate import generate
from qhyer.errors import UserError
from qhyer.evaluate import EvalConfig
from qhyer.records import normalised, read_rows
from qhyer.storage import locked

EXAMPLE = Path(__file__).parents[1] / "docs" / "examples" / "sweep.toml"

TINY = """
out = "{out}"
datasets = ["pointmaze-medium-stitch"]
seeds = [0, 1]
[override]
steps = 6
batch_size = 8
[override.gcbc]
hidden = [16, 16]
[train]
device = "cpu"
threads = 1
save_every = 2
log_every = 2
[eval]
episodes = 1
tasks = [3]
[[grid]]
agents = ["gcbc"]
"""


@pytest.fixture(scope="module")
def maze(tmp_path_factory) -> Path:
    """A folder with a very small registered dataset."""
    folder = tmp_path_factory.mktemp("data")
    generate(registry.get("pointmaze-medium-stitch"), out=folder, episodes=4, rows=30, workers=1, progress=False)
    return folder


@pytest.fixture
def tiny(maze, tmp_path, monkeypatch) -> Path:
    """A manifest of two small runs, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QHYER_DATA", str(maze))
    return write(tmp_path / "tiny.toml", TINY.format(out="runs"))


@pytest.fixture
def short_episodes(monkeypatch) -> None:
    """Real environments, cut after 15 steps and stepped in this process: where a score is one, whatever it says."""
    make, limit = envs.make, gymnasium.wrappers.TimeLimit
    monkeypatch.setattr(envs, "make", lambda environment: limit(make(environment), 15))
    monkeypatch.setattr(rollout, "cores", lambda: 0)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def call(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(list(map(str, arguments)))
    return int(ended.value.code or 0)


def contents(folder: Path) -> dict[str, Any]:
    """What a run came to, without clocks: weights, optimisers, metrics and scores."""
    last = checkpoint.latest(folder / "checkpoints")
    rows = [(row.run, row.task, row.episode, row.success, row.length) for row in read_rows(folder / "episodes.csv")]
    info = json.loads((folder / "run.json").read_text())
    named = ("agent", "preset", "dataset", "environment", "seed", "config", "train", "data", "versions")
    return {
        "weights": (last / "agent.safetensors").read_bytes(),
        "moments": (last / "training.safetensors").read_bytes(),
        "metrics": (folder / "metrics.jsonl").read_bytes(),
        "rows": rows,
        **{name: info[name] for name in named},
    }


# ----------------------------------------------------------------------------------------------------- manifests


def test_the_example_is_what_it_says():
    cells = manifest.read(EXAMPLE)
    assert [(cell.agent, cell.variant, cell.seed) for cell in cells] == [
        ("qhyer", "", 0),
        ("qhyer", "", 1),
        ("gcbc", "", 0),
        ("gcbc", "", 1),
        ("qhyer", "backbone=attention", 0),
        ("qhyer", "backbone=mamba", 0),
    ]
    assert all(cell.dataset == "pointmaze-medium-stitch-v0" and cell.preset == "demo" for cell in cells)
    assert all(cell.config.steps == 200 and cell.train.save_every == 100 for cell in cells)
    assert all(cell.eval == EvalConfig(episodes=4) and cell.train.seed == cell.seed for cell in cells)
    assert cells[2].config.hidden == (64, 64) and cells[5].config.backbone == "mamba"  # type: ignore[attr-defined]
    assert len({cell.folder for cell in cells}) == 6


def test_the_manual_shows_a_manifest_that_can_be_read(tmp_path):
    (text,) = re.findall(r"```toml\n(.*?)```", EXAMPLE.parents[1].joinpath("scale.md").read_text(), re.DOTALL)
    cells = manifest.read(write(tmp_path / "m.toml", text))
    assert len(cells) == 2 * 2 * 3 + 2 * 3 + 2 * 3
    assert {cell.variant for cell in cells} == {"", "backbone=attention", "backbone=mamba", "no-q", "no-goal"}


def test_variants_cross_with_values(tmp_path):
    text = """
    agents = ["qhyer"]
    datasets = ["cube-single-play", "scene-play-v0"]
    seeds = [3]
    [variants.full]
    [variants.no-q]
    conditioning = "none"
    [vary]
    expectile = [0.9, 1e-1]
    cosine = [true]
    """
    cells = manifest.read(write(tmp_path / "m.toml", text))
    assert len(cells) == 8
    assert [cell.variant for cell in cells[:4]] == [
        "full, expectile=0.9, cosine=true",
        "full, expectile=0.1, cosine=true",
        "no-q, expectile=0.9, cosine=true",
        "no-q, expectile=0.1, cosine=true",
    ]
    config: Any = cells[2].config
    assert config.conditioning == "none" and config.expectile == 0.9 and config.cosine
    assert config.width == 256 and cells[4].config.width == 384  # type: ignore[attr-defined]  # each dataset's preset
    assert cells[2].name.startswith("cube-single-play-v0/qhyer-paper-no-q-expectile-0.9-cosine-true-s3-")
    assert all(cell.eval == EvalConfig() and cell.out == Path("runs") for cell in cells)


def test_a_dry_run_says_how_many_updates_each_run_makes(tiny, capsys):
    """Of all stages; and that shorter second stages leave first ones as they were."""
    text = tiny.read_text().replace('agents = ["gcbc"]', 'agents = ["gcbc", "gas"]').replace("[0, 1]", "[0]")
    write(tiny, text.replace("steps = 6", "steps = 1_234"))
    assert call("sweep", tiny, "--dry-run") == 0
    output = capsys.readouterr().out
    cells = [[cell.strip() for cell in line.split("│")] for line in output.splitlines() if "-s0-" in line]
    assert [cell[2] for cell in cells] == ["1,234", "1,000,000 + 1,234"]
    said = "gas learns in 2 stages, distance_steps (1,000,000) and steps (1,234): steps was set, distance_steps was not"
    assert f"note: {said}" in " ".join(output.split())
    write(tiny, text + "[grid.override.gas]\ndistance_steps = 20\n")
    assert call("sweep", tiny, "--dry-run") == 0
    output = capsys.readouterr().out
    assert "20 + 6" in output and "stages" not in output
    assert call("sweep", tiny, "--dry-run", "--only", "gas") == 0
    assert "1 run, 0 finished, 1 to do; 20 + 6 updates each" in capsys.readouterr().out


def test_a_run_in_two_grids_is_one_run(tmp_path):
    grid = '[[grid]]\nagents = ["gcbc"]\ndatasets = ["cube-single-play"]\nseeds = [0, 0]\n'
    assert len(manifest.read(write(tmp_path / "m.toml", 2 * grid))) == 1
    with pytest.raises(UserError, match=r"grid 2 and .*grid 1 ask for the same run"):
        manifest.read(write(tmp_path / "m.toml", grid + grid + "train = {save_every = 7}\n"))


GRID = '[[grid]]\nagents = ["gcbc", "qhyer"]\ndatasets = ["cube-single-play"]\nseeds = [0]\n'


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "agents: give a list (it is missing)"),
        ("out = 3", "out: write it as text"),
        ("[[grid]", "cannot be read as TOML"),
        ("grid = 3", "write each grid as a table [[grid]]"),
        ("agent = 3\n" + GRID, "no key is called 'agent'; did you mean agents?"),
        (GRID + "sedes = [1]", "grid 1: no key is called 'sedes'; did you mean seeds?"),
        (GRID + GRID.replace("gcbc", "gcbd"), "grid 2: agents: no agent is called 'gcbd'; did you mean gcbc?"),
        (GRID.replace("cube-single", "cube-singel"), "datasets: no dataset is called 'cube-singel-play'; did you mean"),
        (GRID.replace("[0]", "0"), "grid 1: seeds: give a list (not 0)"),
        (GRID.replace("[0]", "[0.5]"), "seeds: give a whole number, not 0.5"),
        (GRID.replace("[0]", "[-1]"), "cannot be negative"),
        (GRID + 'preset = "papr"', "preset: no preset of gcbc is called 'papr'; did you mean paper?"),
        (GRID + "override = {stesp = 3}", "override.stesp: no field of gcbc is called 'stesp'; did you mean steps?"),
        (GRID + "override = {qhyer = {widht = 3}}", "override.qhyer.widht: no field of qhyer"),
        (GRID + "override = {crl = {width = 3}}", "override.crl: no agent of this grid is called 'crl'"),
        (GRID + 'override = {steps = "many"}', "override.steps: give a whole number, not 'many'"),
        (GRID + "override = {steps = true}", "override.steps: give a whole number, not True"),
        (GRID + "override = {steps = 0}", "gcbc: steps must be at least 1"),
        (GRID + "override = {gcbc = {hidden = 3}}", "override.gcbc.hidden: give a list, not 3"),
        (GRID + 'override = {qhyer = {backbone = "hibrid"}}', "no choice is called 'hibrid'; did you mean hybrid?"),
        (GRID + "override = {qhyer = {heads = 3}}", "qhyer: width 256 is not a multiple of 3 heads"),
        (GRID + "vary = {backbone = 3}", "vary.backbone: give a list of values"),
        (GRID + 'vary = {backbone = ["mamba"]}', "vary.backbone: no field of gcbc is called 'backbone'"),
        (GRID + "variants = {a = 3}", "variants.a: write it as a table"),
        (GRID + "train = {sav_every = 3}", "train.sav_every: no field of TrainConfig is called 'sav_every'; did you"),
        (GRID + "train = {seed = 3}", "train.seed: seeds are given by `seeds`"),
        (GRID + "train = {log_every = 0}", "train: log_every must be at least 1"),
        (GRID + "train = {threads = true}", "bad.toml: grid 1: train.threads: give a whole number, not True"),
        (GRID + 'train = {device = "gpu"}', "grid 1: train.device: no device is called 'gpu'"),
        (GRID + 'eval = {device = "gpu"}', "grid 1: eval.device: no device is called 'gpu'"),
        (GRID + "eval = {tasks = [0]}", "grid 1: eval: tasks: give at least one, numbered from 1"),
        (GRID + "eval = {episode = 3}", "eval.episode: no field of EvalConfig is called 'episode'; did you mean"),
        (GRID + "eval = 3", "eval: write a table, or false"),
        (GRID + "goal = [0]", "goal: it is for npz files"),
        (GRID.replace("cube-single-play", "mine.npz"), "environment: name the one to evaluate"),
        (GRID.replace("cube-single-play", "mine.hdf5"), "`qhyer data convert mine.hdf5 FILE.npz` makes one of it"),
    ],
)
def test_bad_manifests(tmp_path, capsys, text, words):
    path = write(tmp_path / "bad.toml", text)
    assert call("sweep", path) == 2
    output = capsys.readouterr()
    assert words in " ".join(output.err.split()), output.err
    assert not output.out and "bad.toml" in output.err  # nothing was begun, and the error names the file


def test_other_bad_input(tiny, capsys):
    for arguments, words in (
        (["absent.toml"], "there is no manifest at absent.toml"),
        ([tiny, "--only", "crl"], "no run matches --only crl; the names are like pointmaze-medium-stitch-v0/gcbc"),
        ([tiny, "--shared"], "--shared is for --launcher ray"),
        ([tiny, "--workers", "0"], "workers must be at least 1"),
        ([tiny, "--address", "here:1"], "--address is for --launcher ray"),
        ([tiny, "--gpus", "1", "--dry-run"], "--gpus is for --launcher ray; local runs share what this machine has"),
        ([tiny, "--cpus", "2"], "--cpus is for --launcher ray"),
        ([tiny.parent], "cannot be read: Is a directory; a manifest is a TOML file"),
    ):
        assert call("sweep", *arguments) == 2
        assert words in " ".join(capsys.readouterr().err.split())
    assert not Path("runs").exists()
    Path("runs").touch()  # no folder can be made there
    assert call("sweep", tiny) == 2
    assert "runs cannot be written to runs: " in " ".join(capsys.readouterr().err.split())


# ------------------------------------------------------------------------------------------------------- the runs


def test_runs_are_shown_made_and_then_left_alone(tiny, capsys, monkeypatch):
    cells = manifest.read(tiny)
    assert call("sweep", tiny, "--dry-run") == 0
    output = capsys.readouterr().out
    assert "2 runs, 0 finished, 2 to do" in output and output.count("new") == 2 and not Path("runs").exists()

    assert call("sweep", tiny, "--only", "s1-") == 0
    assert [sweep.status(cell).text for cell in cells] == ["new", "finished"]
    assert call("sweep", tiny) == 0
    output = capsys.readouterr().out
    assert "2 runs, 1 finished, 1 to do" in output and "1 of 1: pointmaze-medium-stitch-v0/gcbc-paper-s0" in output
    assert [sweep.status(cell).success for cell in cells] == [0.0, 0.0]
    asked = {"episodes": 1, "seed": 0, "tasks": [3], "environment": "pointmaze-medium-v0"}
    assert [runs.read(cell.folder)["evaluation"] for cell in cells] == [asked, asked]  # a later one is told from it
    assert contents(cells[0].folder)["weights"] != contents(cells[1].folder)["weights"]

    monkeypatch.setattr(sweep, "run_cell", None)
    assert call("sweep", tiny) == 0
    assert "2 runs, 2 finished, 0 to do" in capsys.readouterr().out
    for wrong in ("0", "-1"):  # though there is nothing to do
        assert call("sweep", tiny, "--workers", wrong) == 2
        assert f"workers must be at least 1, not {wrong}" in capsys.readouterr().err

    longer = write(tiny.parent / "longer.toml", tiny.read_text().replace("episodes = 1", "episodes = 2"))
    assert [sweep.status(cell).text for cell in manifest.read(longer)] == ["trained, not evaluated"] * 2
    untested = write(tiny.parent / "untested.toml", tiny.read_text().replace("[eval]", "[eval]\nseed = 1"))
    assert [sweep.status(cell).text for cell in manifest.read(untested)] == ["trained, not evaluated"] * 2
    assert call("report", "runs", "--out", "page") == 0


@pytest.mark.usefixtures("short_episodes")
def test_more_tasks_than_before_are_evaluated(tiny):
    text = tiny.read_text().replace("seeds = [0, 1]", "seeds = [0]")
    for tasks, status in (("tasks = [1, 2]", "new"), ("tasks = [2]", "finished"), ("", "trained, not evaluated")):
        (cell,) = manifest.read(write(tiny, text.replace("tasks = [3]", tasks)))
        assert sweep.status(cell).text == status
        assert call("sweep", tiny) == 0 and sweep.status(cell).text == "finished"
    assert {row.task for row in read_rows(cell.folder / "episodes.csv")} == {1, 2, 3, 4, 5}


def test_processes_make_the_same_runs(tiny, capsys):
    alone, many = manifest.read(tiny), manifest.read(write(tiny, tiny.read_text().replace('"runs"', '"many"')))
    assert call("sweep", tiny, "--workers", "2") == 0
    output, told = capsys.readouterr()
    assert f"2 of 2: {many[0].dataset_name}/gcbc-paper-s" in output and "begun" not in output
    assert told.count("begun: ") == 2 and f"begun: {many[1].name}; 0 of 2 over, 2 under way, 0 to begin" in told
    write(tiny, tiny.read_text().replace('"many"', '"runs"'))
    assert call("sweep", tiny) == 0
    assert f"begun: {alone[0].name}; 0 of 2 over, 1 under way, 1 to begin" in capsys.readouterr().err
    for one, other in zip(alone, many):
        assert one.folder != other.folder and contents(one.folder) == contents(other.folder)


@pytest.mark.usefixtures("short_episodes")
def test_options_that_come_later_leave_names_alone_and_changed_defaults_are_seen(tiny):
    """A name is made of what was chosen; a run whose other options were not today's is not taken for finished."""
    cell = manifest.read(tiny)[0]
    options = chosen(cell.config)
    assert options and all(getattr(type(cell.config)(), name) != getattr(cell.config, name) for name in options)
    assert call("sweep", tiny) == 0 and sweep.status(cell).finished
    path = cell.folder / "run.json"
    about = json.loads(path.read_text())
    default = next(name for name in about["config"] if name not in options)
    before = about["config"].pop(default)  # as if it came later
    path.write_text(json.dumps(about))
    assert sweep.status(cell).text == "finished"
    about["config"][default] = "other"
    path.write_text(json.dumps(about))
    assert sweep.status(cell).text == f"made with another {default}" and before != "other"


@pytest.mark.usefixtures("short_episodes")
def test_an_unfinished_run_goes_on(tiny, capsys, monkeypatch):
    cells = manifest.read(tiny)
    original = training.train

    def stopped(*arguments: Any, **options: Any) -> Path:
        def on_step(step: int) -> None:
            if step == 3:
                os.kill(os.getpid(), signal.SIGTERM)  # as a batch system does

        return original(*arguments, **options, on_step=on_step)

    with monkeypatch.context() as patch:
        patch.setattr(training, "train", stopped)
        assert call("sweep", tiny) == 130
    assert "the same command goes on from here" in capsys.readouterr().out
    at = sweep.status(cells[0]).text
    assert at in ("unfinished, at update 3", "unfinished, at update 4")
    assert sweep.status(cells[1]).text == "new"
    training_state = checkpoint.latest(cells[0].folder / "checkpoints") / checkpoint.TRAINING
    content = training_state.read_bytes()
    training_state.unlink()
    assert sweep.status(cells[0]).text == f"{at}; training.safetensors is missing"
    assert call("sweep", tiny, "--only", "s0-") == 1
    assert "cannot be resumed: training.safetensors is missing" in " ".join(capsys.readouterr().out.split())
    training_state.write_bytes(content)
    assert call("sweep", tiny) == 0
    assert "unfinished, at update" in capsys.readouterr().out
    whole = manifest.read(write(tiny, tiny.read_text().replace('"runs"', '"whole"')))
    assert call("sweep", tiny) == 0
    for one, other in zip(cells, whole):
        assert contents(one.folder) == contents(other.folder)


@pytest.mark.usefixtures("short_episodes")
def test_a_run_that_fails_does_not_stop_the_others(tiny, capsys, maze, monkeypatch):
    text = tiny.read_text().replace(
        '["pointmaze-medium-stitch"]', '["pointmaze-large-stitch", "pointmaze-medium-stitch"]'
    )
    write(tiny, text)
    assert call("sweep", tiny, "--dry-run") == 0
    assert "not on this disk" in " ".join(capsys.readouterr().out.split())
    assert call("sweep", tiny) == 2  # what is missing is found before anything starts
    assert "qhyer data generate pointmaze-large-stitch-v0" in " ".join(capsys.readouterr().err.split())
    assert not any(sweep.status(cell).finished for cell in manifest.read(tiny))
    damaged = registry.data_dir() / "pointmaze-large-stitch-v0.npz"
    damaged.write_bytes(b"nothing that numpy could read")
    try:
        assert call("sweep", tiny) == 1
    finally:
        damaged.unlink()
    output = " ".join(capsys.readouterr().out.split())
    assert output.count("failed: pointmaze-large-stitch-v0/gcbc") == 2 and "the same command tries them" in output
    finished = [sweep.status(cell).finished for cell in manifest.read(tiny)]
    assert finished == [False, False, True, True]


@pytest.mark.usefixtures("short_episodes")
def test_a_run_that_another_process_trains_is_left_to_it(tiny, capsys, monkeypatch):
    """Said for that run, others are made, and the end is no success; then the same command finds all done."""
    first, second = manifest.read(tiny)
    original = training.train

    def slower(*arguments: Any, **options: Any) -> Path:
        """Another sweep of the same manifest begins in the middle of the first run."""
        monkeypatch.setattr(training, "train", original)

        def on_step(step: int) -> None:
            if step == 3:
                assert call("sweep", tiny) == 1
                output, told = capsys.readouterr()
                output = " ".join(output.split())
                assert f"1 of 2: {first.name}: left to another process" in output and "Traceback" not in output + told
                assert f"left to another process: {first.name}: {first.folder.resolve()} is being trained" in output
                assert "failed" not in output and "the same command tries them again" in output
                assert sweep.status(second).finished and not sweep.status(first).finished

        return original(*arguments, **options, on_step=on_step)

    monkeypatch.setattr(training, "train", slower)
    assert call("sweep", tiny) == 0
    assert "2 of 2" in capsys.readouterr().out
    lines = (first.folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [2, 4, 6]
    files = {"run.json": b"{}"}
    with locked(first.folder / training.LOCK, "it is trained", ""):  # a run that goes to a cluster, or comes back
        taken: dict[str, str] = {}
        assert list(sweep._packed([first, second], taken)) == [second.name] and list(taken) == [first.name]
        kept = sweep._brought(sweep.CellResult(1.0, files), first.folder)
        assert kept.taken and not kept.files and sweep.status(first).finished
    assert sweep._brought(sweep.CellResult(1.0, files), first.folder).files == files
    assert [path.name for path in first.folder.iterdir()] == ["run.json"]


@pytest.mark.usefixtures("short_episodes")
def test_a_run_that_another_process_evaluates_is_left_to_it(tiny, capsys):
    pytest.importorskip("fcntl")
    first, second = manifest.read(tiny)
    with runs.hold_rows(first.folder):
        assert call("sweep", tiny) == 1
        output, told = capsys.readouterr()
        output = " ".join(output.split())
        assert f"1 of 2: {first.name}: left to another process" in output and "Traceback" not in output + told
        assert f"left to another process: {first.name}: {first.folder.resolve()} is being evaluated" in output
        assert sweep.status(first).text == "trained, not evaluated" and sweep.status(second).finished
        taken: dict[str, str] = {}
        assert list(sweep._packed([first, second], taken)) == [second.name] and list(taken) == [first.name]
        assert sweep._brought(sweep.CellResult(1.0, {"run.json": b"{}"}), first.folder).taken
    assert call("sweep", tiny) == 0 and sweep.status(first).finished


@pytest.mark.usefixtures("short_episodes")
def test_a_checkpoint_that_goes_while_it_is_read_is_no_damage(tiny, monkeypatch):
    assert call("sweep", tiny, "--only", "s0-") == 0
    cell = manifest.read(tiny)[0]
    checkpoints, read = cell.folder / "checkpoints", checkpoint.read_state

    def late(path: Path) -> dict[str, Any]:
        monkeypatch.setattr(checkpoint, "read_state", read)
        path.rename(checkpoints / "00000005")  # in its place a newer one
        return read(path)

    monkeypatch.setattr(checkpoint, "read_state", late)
    at = sweep.status(cell)
    assert not at.finished and "damaged" not in at.text
    (checkpoints / "00000005").rename(checkpoints / "00000006")
    (checkpoints / "00000006" / "state.json").unlink()
    assert sweep.status(cell).text.startswith("damaged")


@pytest.mark.usefixtures("short_episodes")
def test_damage_and_changed_data_are_noticed(tiny, capsys, monkeypatch):
    assert call("sweep", tiny, "--only", "s0-") == 0
    first, second = manifest.read(tiny)
    generate(registry.get("pointmaze-medium-stitch"), out=Path("data"), episodes=3, rows=30, workers=1, progress=False)
    monkeypatch.setenv("QHYER_DATA", "data")
    capsys.readouterr()
    assert call("sweep", tiny) == 1  # the second run is made, on other data than the first
    output = " ".join(capsys.readouterr().out.split())
    assert f"pointmaze-medium-stitch-v0.npz has changed since the training of {first.name}:" in output
    assert "were trained on different data" in output
    assert sweep.status(second).finished
    made = runs.read(first.folder)["data"]["generated"]
    assert (made["episodes"], made["seed"], made["own"]) == (4, 0, {"rows": 30}) and len(made["sha256"]) == 64
    sidecar = Path("data/pointmaze-medium-stitch-v0.json")
    sidecar.rename("aside")  # one alone is told apart by its sidecar, whatever its size and time
    assert sweep._looks_the_same(sidecar.with_suffix(".npz"), second.folder / "run.json") is False
    Path("aside").rename(sidecar)
    assert sweep._looks_the_same(sidecar.with_suffix(".npz"), second.folder / "run.json")
    weights = checkpoint.latest(first.folder / "checkpoints") / "agent.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0\1")
    assert sweep.status(first).text.startswith("damaged")
    assert call("sweep", tiny, "--only", "s0-") == 1
    assert "is damaged: its SHA-256" in " ".join(capsys.readouterr().out.split())


@pytest.mark.usefixtures("short_episodes")
def test_own_data(tiny, capsys, monkeypatch):
    generator = np.random.default_rng(0)
    ends = np.zeros(120, bool)
    ends[39::40] = True
    np.savez("mine.npz", observations=generator.normal(size=(120, 2)), actions=np.zeros((120, 2)), terminals=ends)
    text = tiny.read_text().replace("pointmaze-medium-stitch", "mine.npz").replace("seeds = [0, 1]", "seeds = [0]")
    write(tiny, text + 'goal = [0, 1]\nenvironment = "pointmaze-medium-v0"\n')
    assert call("sweep", tiny) == 0
    (cell,) = manifest.read(tiny)
    info = json.loads((cell.folder / "run.json").read_text())
    assert sweep.status(cell).finished and cell.name.startswith("mine/gcbc")
    with monkeypatch.context() as patch:  # a file that looks as it did is not read
        patch.setattr(sweep, "_load", None)
        assert call("sweep", tiny) == 0
    assert "generated" not in info["data"] and info["data"]["file"]["bytes"] == Path("mine.npz").stat().st_size
    assert info["data"]["path"] == str(Path("mine.npz").resolve()) and info["spec"]["goal_indices"] == [0, 1]
    capsys.readouterr()
    later = (cell.folder / "run.json").stat().st_mtime + 1000
    os.utime("mine.npz", (later, later))
    assert call("sweep", tiny) == 0 and "has changed" not in capsys.readouterr().out  # a date is no change
    np.savez("mine.npz", observations=generator.normal(size=(120, 2)), actions=np.zeros((120, 2)), terminals=ends)
    os.utime("mine.npz", (later, later))
    assert call("sweep", tiny) == 0 and "mine.npz has changed since the training of mine/gcbc" in " ".join(
        capsys.readouterr().out.split()
    )
    os.utime("mine.npz", (1e9, 1e9))  # copied over with its date, before the training (cp -p, rsync -t)
    assert call("sweep", tiny) == 0 and "mine.npz has changed" in " ".join(capsys.readouterr().out.split())
    Path("mine.npz").write_bytes(b"broken")  # nothing is to be trained on it: a note
    os.utime("mine.npz", (later, later))
    assert call("sweep", tiny) == 0 and "mine.npz has changed" in " ".join(capsys.readouterr().out.split())


def test_files_that_are_not_there_or_have_one_name(tiny, capsys):
    text = tiny.read_text() + 'goal = [0, 1]\nenvironment = "pointmaze-medium-v0"\n'
    write(tiny, text.replace("pointmaze-medium-stitch", "mien.npz"))
    assert call("sweep", tiny, "--dry-run") == 2
    assert "no such file" in capsys.readouterr().err
    write(tiny, text.replace('"pointmaze-medium-stitch"', '"a/mine.npz", "b/mine.npz"'))
    assert call("sweep", tiny, "--dry-run") == 2
    assert "give these different names" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("dry", [["--dry-run"], []])
def test_tasks_that_are_not_there_are_told_before_the_training(tiny, capsys, monkeypatch, dry):
    monkeypatch.setattr(sweep, "_run", None)  # nothing is started
    write(tiny, tiny.read_text().replace("tasks = [3]", "tasks = [1, 7]"))
    assert call("sweep", tiny, *dry) == 2
    told = f"{tiny}: grid 1: eval: pointmaze-medium-v0 has tasks 1 to 5, not 7"
    assert told in " ".join(capsys.readouterr().err.split()) and not Path("runs").exists()


def test_an_environment_that_cannot_be_made_here_says_nothing_of_its_tasks(tiny, capsys, monkeypatch):
    def make(environment: str) -> None:
        raise ImportError("no simulator")

    monkeypatch.setattr(envs, "make", make)
    sweep._num_tasks.cache_clear()
    write(tiny, tiny.read_text().replace("tasks = [3]", "tasks = [1, 7]"))
    assert call("sweep", tiny, "--dry-run") == 0
    assert "2 runs, 0 finished, 2 to do" in capsys.readouterr().out


@pytest.mark.parametrize("dry", [["--dry-run"], []])
def test_goals_that_are_not_there_are_told_before_the_training(tiny, capsys, monkeypatch, dry):
    monkeypatch.setattr(sweep, "_run", None)
    monkeypatch.setattr(rollout, "cores", lambda: 0)
    ends = np.arange(40) == 39
    arrays = {"observations": np.zeros((40, 2)), "actions": np.zeros((40, 2)), "terminals": ends}
    text = tiny.read_text().replace("pointmaze-medium-stitch", "mine.npz")
    text = 'environment = "pointmaze-medium-v0"\ngoal = GOAL\n' + text
    for names, goal, words in (
        (["x", "y"], '["x", "q"]', "goal coordinate 'q' is not known: the names are x, y"),
        (["x", "y"], "[0, 2]", "goal coordinates [0, 2] must be distinct and within 0..1"),
        (None, '["x"]', "goal coordinate 'x' is not known: no observation_names were given"),
    ):
        np.savez("mine.npz", **arrays, **({} if names is None else {"observation_names": names}))
        write(tiny, text.replace("GOAL", goal))
        assert call("sweep", tiny, *dry) == 2
        told = f"{tiny}: grid 1: goal: mine.npz: {words}"
        assert told in " ".join(capsys.readouterr().err.split()) and not Path("runs").exists()
    np.savez("mine.npz", **arrays, observation_names=["x", "y"])
    write(tiny, text.replace("GOAL", '["y", "x"]'))
    assert call("sweep", tiny, "--dry-run") == 0
    assert "2 to do" in capsys.readouterr().out


def test_a_task_that_pays_has_a_score(tiny, tmp_path, capsys, monkeypatch):
    generate(registry.get("maze2d-umaze"), out=tmp_path, episodes=2, rows=40, workers=1, progress=False)
    monkeypatch.setenv("QHYER_DATA", str(tmp_path))
    text = tiny.read_text().replace("pointmaze-medium-stitch", "maze2d-umaze").replace("seeds = [0, 1]", "seeds = [0]")
    write(tiny, text.replace("tasks = [3]", ""))
    assert call("sweep", tiny) == 0
    (cell,) = manifest.read(tiny)
    (row,) = read_rows(cell.folder / "episodes.csv")
    expected = normalised("maze2d-umaze-v1", row.return_)
    assert sweep.status(cell).score == expected is not None
    assert f"score {expected:.1f}" in capsys.readouterr().out


def test_a_folder_travels_whole(tmp_path):
    folder = tmp_path / "run"
    (folder / "checkpoints" / "00000002").mkdir(parents=True)
    (folder / "checkpoints" / "00000002" / "x").write_bytes(b"\0\1")
    (folder / "checkpoints" / ".partial-y").mkdir()
    (folder / "checkpoints" / ".partial-y" / "x").touch()
    (folder / "run.json").write_text("{}")
    files = sweep.pack(folder)
    assert files == {"checkpoints/00000002/x": b"\0\1", "run.json": b"{}"}
    (folder / "old").touch()
    sweep.unpack(files, folder)
    assert sweep.pack(folder) == files and sweep.pack(tmp_path / "absent") == {}


def test_ctrl_c_saves_the_runs_of_all_processes(tiny):
    """The command itself, with two processes that would train for hours."""
    write(tiny, tiny.read_text().replace("steps = 6", "steps = 1_000_000").replace("save_every = 2", "save_every = 0"))
    command = [sys.executable, "-m", "qhyer", "sweep", str(tiny), "--workers", "2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    metrics = [cell.folder / "metrics.jsonl" for cell in manifest.read(tiny)]
    while not all(path.exists() for path in metrics) and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130 and "goes on from here" in output, output
    assert all(sweep.status(cell).text.startswith("unfinished, at update") for cell in manifest.read(tiny))


@pytest.mark.usefixtures("short_episodes")
def test_rows_are_enough_when_the_weights_are_cleared_away(tiny):
    cells = manifest.read(tiny)
    assert call("sweep", tiny, "--only", "s0-") == 0
    done, other = cells
    assert sweep.status(done).text == "finished"
    shutil.rmtree(done.folder / "checkpoints")
    kept = sweep.status(done)
    assert kept.finished and kept.text == "finished; weights not kept" and kept.success is not None
    assert not sweep.status(other).finished
    more = dataclasses.replace(done, eval=EvalConfig(episodes=2, tasks=(3,)))
    assert not sweep.status(more).finished and not sweep.status(more).kept
    with pytest.raises(UserError, match="evaluated on other episodes than asked for, and the weights are not kept"):
        sweep.run_cells([more])
    assert (done.folder / "episodes.csv").is_file() and not (done.folder / "checkpoints").exists()
    assert sweep.status(dataclasses.replace(done, eval=None)) == sweep.Status("new")
    (done.folder / "episodes.csv").rename(done.folder / "rows")
    assert sweep.status(done) == sweep.Status("new")
    lines = (done.folder / "rows").read_text().splitlines()
    (done.folder / "episodes.csv").write_text("\n".join(lines).replace(",6,3,", ",4,3,") + "\n")  # on the way
    assert sweep.status(done) == sweep.Status("new")
