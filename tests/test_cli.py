"""The commands a user types: the whole way on tiny data, and errors that say what to do, never a traceback."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import gymnasium
import numpy as np
import pytest

from qhyer import cli, envs, runs
from qhyer.data.episodes import Episodes
from qhyer.records import read_rows

TINY = ["--agent.hidden", "16", "16", "--agent.batch-size", "8", "--device", "cpu"]
pytestmark = pytest.mark.usefixtures("looked_at_once")


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(list(map(str, arguments)))
    return int(ended.value.code or 0)


def said(capsys) -> str:
    return " ".join(capsys.readouterr().err.split())


@pytest.fixture
def mine(tmp_path, monkeypatch) -> Path:
    """Somebody's own data: three episodes of forty rows, in a folder of their own."""
    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(0)
    observations = np.cumsum(generator.normal(size=(120, 2)), 0).astype(np.float32)
    ends = np.zeros(120, bool)
    ends[39::40] = True
    np.savez("mine.npz", observations=observations, actions=generator.uniform(-1, 1, (120, 2)), terminals=ends)
    return tmp_path / "mine.npz"


def test_own_data_the_whole_way(mine, capsys):
    assert call("data", "check", "mine.npz") == 0
    train = ["train", "gcbc", "mine.npz", "--goal", "0", "1", "--steps", "6", "--out", "run", *TINY]
    assert call(*train, "--env", "pointmaze-medium-v0") == 0
    assert call("eval", "run", "--episodes", "1", "--tasks", "3", "--workers", "0") == 0
    assert "success" in capsys.readouterr().out
    assert call("report", "run", "--out", "page") == 0
    assert "gcbc" in (mine.parent / "page" / "index.html").read_text()
    assert call(*train, "--env", "pointmaze-medium-v0") == 0  # finished: nothing to do
    assert "nothing to do" in capsys.readouterr().out


def test_a_run_copied_without_its_optimisers_state(mine, capsys, monkeypatch):
    """The files that docs/protocol.md names are enough for all but training."""
    make, limit = envs.make, gymnasium.wrappers.TimeLimit
    monkeypatch.setattr(envs, "make", lambda environment: limit(make(environment), 15))
    page = (Path(__file__).parents[1] / "docs" / "protocol.md").read_text(encoding="utf-8")
    said = page.split("\n## Which files of a run it needs\n")[1].split("\n## ")[0]
    needed = [line.split("`")[1] for line in said.splitlines() if line.startswith("| `") and line.endswith("| yes |")]
    train = ["train", "qhyer", "mine.npz", "--goal", "0", "1", "--preset", "demo", "--steps", "2", "--out", "run"]
    small = ["--agent.batch-size", "8", "--agent.width", "16", "--agent.flow-channels", "8", "--device", "cpu"]
    train += [*small, "--agent.encoder-width", "16", "--env", "pointmaze-medium-v0"]
    assert call(*train) == 0
    for name in needed:
        name = name.replace("STEP", "00000002")
        Path("copy", name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path("run", name), Path("copy", name))
    few = ["--episodes", "1", "--tasks", "3", "--workers", "0"]
    for run in ("run", "copy"):
        assert call("eval", run, *few) == 0
    rows = [read_rows(Path(run, "episodes.csv")) for run in ("run", "copy")]
    assert [(row.env_seed, row.length) for row in rows[0]] == [(row.env_seed, row.length) for row in rows[1]] != []
    assert call("show", "copy", "--task", "3", "--out", "a.png") == 0
    assert call("export", "copy", "--out", "model") == 0
    assert call("analyze", "critic", "copy", "--data", "mine.npz") == 0
    assert call(*train[:-1], "pointmaze-medium-v0", "--out", "copy", "--resume") == 0  # finished: nothing is needed
    capsys.readouterr()

    weights = Path("copy", "checkpoints", "00000002", "agent.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    for command in (["eval"], ["show"], ["export", "--out", "other"], ["analyze", "critic", "--data", "mine.npz"]):
        at = 2 if command[0] == "analyze" else 1
        assert call(*command[:at], "copy", *command[at:]) == 2
        assert "agent.safetensors is damaged: its SHA-256" in " ".join(capsys.readouterr().err.split())
    for command in (["export"], ["show"]):
        assert call(*command, ".") == 2
        assert ". is a folder of runs: give one of them, such as copy" in " ".join(capsys.readouterr().err.split())
    (Path("copy") / "run.json").unlink()
    assert call("eval", "copy") == 2 and "run.json is missing" in " ".join(capsys.readouterr().err.split())


def test_what_the_check_warns_of_is_told_before_training(tmp_path, monkeypatch, capsys, caplog):
    """Briefly and once: not of a run that goes on, of one that is finished, or of a registered dataset."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    walks = rng.normal(size=(40, 50, 3)).cumsum(1) * 0.05 + rng.uniform(-20, 20, (40, 1, 3))
    arrays = {"observations": walks.reshape(-1, 3), "actions": rng.uniform(-0.04, 0.04, (2000, 2))}
    arrays["terminals"] = np.arange(2000) % 50 == 49
    arrays["terminals"][99] = False
    named = {"observation_names": np.array(["x", "y", "[a]"]), "goal_indices": np.array(["y", "[a]"])}
    np.savez("my own.npz", **arrays, **named)
    train = ["train", "gcbc", "my own.npz", "--steps", "4", "--save-every", "2", *TINY]
    told = "note: actions never leave [-0.2, 0.2] in columns 0, 1: if these have other units, `qhyer data convert FILE "
    told += (
        "OUT.npz --scale-actions` scales them; 1 steps inside an episode are far larger than usual, the first after "
    )
    told += "row 99: an end that was not marked? (`qhyer data check 'my own.npz'` says more)"

    def said(*more: str) -> tuple[str, int]:
        assert call(*train, *more) == 0
        err = " ".join(capsys.readouterr().err.split())
        return err, err.count(told)

    err, times = said("--out", "run")
    assert times == 1 and "note: the goal is columns y, [a], but gcbc reads" in err
    assert said("--out", "run")[1] == 0  # finished
    shutil.rmtree("run/checkpoints/00000004")
    assert said("--out", "run", "--resume")[1] == 0
    err, times = said("--out", "other", "--goal", "x")
    assert times == 1 and "note: the goal is columns x, but" in err
    assert said("--out", "both", "--seeds", "0", "1")[1] == 1

    assert call("data", "convert", "my own.npz", "out.npz") == 0
    assert "my own.npz: warning: actions never leave" in capsys.readouterr().out
    assert call("data", "convert", "my own.npz", "scaled.npz", "--scale-actions") == 0
    shown = capsys.readouterr().out
    assert "my own.npz: warning: 1 steps inside" in shown and "`qhyer data check scaled.npz` says more" in shown
    assert call("data", "info", "my own.npz") == 0 and "columns y, [a]" in capsys.readouterr().out

    np.savez("typo.npz", **arrays, goal_index=np.array([1]))
    assert call(*("typo.npz" if word == "my own.npz" else word for word in train), "--out", "typo") == 0
    assert "note: goal_index is no array that is read; did you mean goal_indices?; " in capsys.readouterr().err

    assert not [record for record in caplog.records if "small" in record.message]
    made = Episodes.from_arrays(*arrays.values(), name="mine")
    (record,) = [record for record in caplog.records if "small" in record.message]
    assert record.message.startswith("mine:\n  warning [small]") and "warning [jump]" in record.message
    assert made.warnings == () and len(Episodes.load("my own.npz").warnings) == 2

    wide = {**arrays, "observations": np.tile(arrays["observations"], 10)}
    np.savez("pointmaze-medium-stitch-v0.npz", **wide)
    train[2] = "pointmaze-medium-stitch-v0.npz"
    assert "note: actions" not in said("--out", "known")[0]
    assert call("data", "convert", "pointmaze-medium-stitch-v0.npz", "more.npz") == 0
    assert "warning" not in capsys.readouterr().out


def test_a_goal_that_is_not_there(mine, capsys):
    with np.load("mine.npz") as file:
        np.savez("goal.npz", **file, goal_indices=np.array([0, 9]))
        np.savez("text.npz", **file, goal_indices=np.array(["x"]))
    for name, words in (("goal.npz", "within 0..1"), ("text.npz", "no observation_names were given")):
        assert call("data", "check", name) == 1
        assert words in " ".join(capsys.readouterr().out.split())
        assert call("data", "info", name) == 2
        assert call("train", "gcbc", name, "--steps", "2", *TINY) == 2
        assert words in " ".join(capsys.readouterr().err.split())


def test_steps_of_an_agent_with_two_stages(mine, capsys):
    small = ["--agent.hidden", "16", "--agent.value-hidden", "16", "--agent.batch-size", "8", "--device", "cpu"]
    train = ["train", "gas", "mine.npz", "--steps", "2", *small]
    assert call(*train, "--agent.distance-steps", "3", "--out", "run") == 0
    assert "stages" not in capsys.readouterr().err
    assert json.loads(Path("run/run.json").read_text())["updates"] == 5
    assert call(*train, "--out", "mine.npz") == 2  # before anything is trained
    assert "steps was set, distance_steps was not" in capsys.readouterr().err


def test_the_default_folder_of_own_data(mine, capsys):
    assert call("train", "gcbc", mine, "--steps", "2", *TINY) == 0
    (run,) = (mine.parent / "runs" / "mine").iterdir()
    assert json.loads((run / "run.json").read_text())["data"]["path"] == str(mine)
    assert call("train", "gcbc", mine, "--steps", "2", "--goal", "0", *TINY) == 0
    assert len(list((mine.parent / "runs" / "mine").iterdir())) == 2  # another goal is another run


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["trian"], "did you mean train?"),
        (["train", "--seed", "1", "gcbc", "mine.npz"], "agent and the dataset first"),
        (["train", "gcbd", "mine.npz"], "did you mean gcbc?"),
        (["train", "gcbc", "cube-singel-play"], "did you mean cube-single-play-v0"),
        (["train", "gcbc", "absent.npz"], "no dataset at"),
        (["train", "gcbc", "mine.npz", "--preset", "best"], "it has paper, demo"),
        (["train", "gcbc", "mine.npz", "--goal", "x"], "no observation_names were given"),
        (["train", "gcbc", "mine.npz", "--goal", "7"], "within 0..1"),
        (["train", "gcbc", "mine.npz", "--steps", "0"], "steps must be at least 1"),
        (["train", "gcbc", "mine.npz", "--log-every", "0"], "log_every must be at least 1"),
        (["train", "gcbc", "mine.npz", "--seed", "-1"], "a seed cannot be negative"),
        (["train", "gcbc", "mine.npz", "--seeds", "0", "-1"], "a seed cannot be negative"),
        (["train", "gcbc", "mine.npz", "--device", "tpu"], "no device is called"),
        (["train", "gcbc", "mine.npz", "--eval-every", "5"], "needs an environment"),
        (["train", "gcbc", "mine.npz", "--out", "mine.npz"], "is a file"),
        (["train", "qhyer", "mine.npz", "--agent.heads", "3"], "not a multiple of 3 heads"),
        (["train", "qhyer", "mine.npz", "--agent.discount", "1"], "discount must be"),
        (["train", "qhyer", "mine.npz", "--agent.expectile", "2"], "expectile must lie"),
        (["eval", "absent"], "is not a run"),
        (["eval"], "at least one run"),
        (["report", "absent"], "absent"),
        (["analyze", "nothing", "absent"], "nothing"),
        (["data", "info", "absent.npz"], "absent.npz"),
        (["data", "generate", "cube-octuple-play"], "no dataset is called"),
        (["train", "gcbc"], "DATASET is missing"),
        (["train", "gcbd"], "no agent is called 'gcbd'; did you mean gcbc?"),
        (["train", "gcbc", "there/my.pkl"], "there/my.pkl is not there: own data are read from npz or HDF5"),
        (["train", "gcbc", "full"], "full is a folder: own data"),
        (["data", "check", "full"], "full is a folder: own data"),
        (["train", "gcbc", "full/notes.csv"], "is another file: own data are read from npz or HDF5"),
        (["train", "gcbc", "mine.npz", "--out", "full"], "full is no run, and holds other things (notes.csv)"),
        (["train", "gcbc", "no.npz", "--out", "full"], "full is no run"),  # before the data are read
        (
            ["train", "gcbc", "lacks.npz"],
            "lacks actions, observations (it has obs, terminals); did you mean observations",
        ),
    ],
)
def test_bad_input_gets_a_clear_error(mine, capsys, arguments, words):
    Path("full").mkdir()
    Path("full/notes.csv").touch()
    np.savez("lacks.npz", obs=np.zeros((3, 2)), terminals=np.ones(3))
    assert call(*arguments) == 2
    output = capsys.readouterr()
    assert words in " ".join(output.err.split()), output.err
    assert "Traceback" not in output.err + output.out


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--tasks", "9"], "has tasks 1 to 5, not 9"),
        (["--episodes", "0"], "episodes must be at least 1"),
        (["--shard", "0"], "shard must be at least 1"),
        (["--workers", "-1"], "workers cannot be negative"),
        (["--seed", "-1"], "an evaluation's seed cannot be negative"),
        (["--env", "CartPole-v1"], "no goal-reaching tasks"),
        (["--env", "cube-single-v0"], "observations of 28 numbers"),
        (["--device", "tpu"], "no device is called"),
        (["--step", "3"], "no checkpoint of step 3"),
    ],
)
def test_bad_evaluations(mine, capsys, arguments, words):
    call("train", "gcbc", "mine.npz", "--steps", "2", "--out", "run", "--env", "pointmaze-medium-v0", *TINY)
    assert call("eval", "run", *arguments) == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_a_full_disk_is_one_line(mine, capsys, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", lambda *_, **__: full())
    assert call("data", "convert", "mine.npz", "other.npz") == 2
    err = capsys.readouterr().err
    assert err.startswith("error: other.npz: no space left on device. Nothing that was there is lost")
    monkeypatch.setattr(cli, "_doctor", full)  # of no file: what it prints goes to a full disk
    assert call("doctor") == 2 and capsys.readouterr().err.startswith("error: no space left on device. Nothing")


def test_a_short_evaluation_does_not_replace_a_long_one(mine, capsys):
    call("train", "gcbc", "mine.npz", "--steps", "2", "--out", "run", "--env", "pointmaze-medium-v0", *TINY)
    assert call("eval", "run", "--episodes", "2", "--tasks", "3", "--workers", "0") == 0
    rows = (mine.parent / "run" / "episodes.csv").read_text()
    assert call("eval", "run", "--episodes", "1", "--tasks", "3", "--workers", "0") == 2
    assert (mine.parent / "run" / "episodes.csv").read_text() == rows
    assert call("eval", "run", "--episodes", "1", "--tasks", "3", "--workers", "0", "--overwrite") == 0
    assert len((mine.parent / "run" / "episodes.csv").read_text().splitlines()) == 2
    capsys.readouterr()
    assert (
        call("eval", "run", "--episodes", "2", "--tasks", "3", "--workers", "0") == 0
    )  # a longer one does, and says so
    assert "note: run has a part of these 2 episodes, whose place they take" in capsys.readouterr().err
    assert call("eval", "run", "--episodes", "2", "--tasks", "3", "--workers", "0") == 0  # the same rows again
    assert "place" not in capsys.readouterr().err


def test_a_run_that_is_being_evaluated_is_left_to_the_other_process(mine, capsys):
    pytest.importorskip("fcntl")
    where = ("--env", "pointmaze-medium-v0")
    call("train", "gcbc", "mine.npz", "--steps", "2", "--seeds", "0", "1", "--out", "runs/both", *where, *TINY)
    short = ("--episodes", "1", "--tasks", "3", "--workers", "0")
    with runs.hold_rows(Path("runs/both/s0")):
        capsys.readouterr()
        assert call("eval", "runs", *short) == 2
        output = capsys.readouterr()
        assert "runs/both/s1: success" in output.out and "s0" not in output.out
        assert "left to another process: runs/both/s0 is being evaluated" in output.err
        assert "1 of 2 runs are left to another process" in output.err and "could not be" not in output.err
        assert call("eval", "runs/both/s0", *short) == 2
        assert "runs/both/s0 is being evaluated by another process" in said(capsys)
    assert call("eval", "runs", *short) == 0


def test_a_folder_of_runs_is_evaluated_run_by_run(mine, capsys):
    where = ("--env", "pointmaze-medium-v0")
    call("train", "gcbc", "mine.npz", "--steps", "2", "--seeds", "0", "1", "--out", "runs/both", *where, *TINY)
    short = ("--episodes", "1", "--tasks", "3", "--workers", "0")
    capsys.readouterr()
    assert call("eval", "runs", *short) == 0
    said = capsys.readouterr().out
    assert "runs/both/s0: success" in said and "runs/both/s1: success" in said
    assert call("eval", "runs", "--episodes", "2", "--tasks", "3", "--workers", "0") == 0
    assert "2 runs below runs" in capsys.readouterr().err
    assert call("eval", "runs", *short) == 2
    err = capsys.readouterr().err
    assert err.count("kept: runs/both/s0 has an evaluation of 2 episodes") == 1 and err.count("both/s0") == 1
    assert "2 of 2 runs keep the evaluation they have" in err and "could not be" not in err
    (mine.parent / "runs/both/s0/checkpoints/00000002/agent.safetensors").write_bytes(b"")
    assert call("eval", "runs", *short, "--overwrite") == 2
    output = capsys.readouterr()
    assert "runs/both/s1: success" in output.out
    assert "1 of 2 runs could not be evaluated" in " ".join(output.err.split())
    shutil.rmtree(mine.parent / "runs/both/s0/checkpoints")  # rows without weights are no run to evaluate
    shutil.copytree("runs/both/s1", "runs/copy")
    Path("runs/copy/run.json").unlink()
    shutil.copytree("runs/both/s1", "runs/part")
    Path("runs/part/checkpoints/00000002/manifest.json").unlink()
    shutil.copytree("runs/both/s1", "runs/.partial-s1")  # a folder that was being written when a process was killed
    shutil.copytree("runs/both/s0", "runs/model")
    about = json.loads(Path("runs/model/run.json").read_text())
    Path("runs/model/run.json").write_text(json.dumps({**about, "model": {"name": "a"}}))
    Path("runs/empty/checkpoints").mkdir(parents=True)
    assert call("eval", "runs", "runs/both", *short) == 0  # each is named once
    output = capsys.readouterr()
    assert output.out.count(": success") == 1 and "runs/both/s1: success" in output.out
    assert [line for line in output.err.splitlines() if line.startswith("skipped")] == [
        "skipped: runs/both/s0: it has no checkpoint: not trained so far yet, or the weights were cleared away",
        "skipped: runs/copy: run.json is missing; copy it from where the run was trained",
        "skipped: runs/part: runs/part/checkpoints/00000002 is not whole: manifest.json is missing; copy it from where "
        "the run was trained",
    ]


def test_a_report_says_what_is_not_the_preset(mine, capsys):
    call("train", "gcbc", "mine.npz", "--steps", "2", "--out", "run", "--env", "pointmaze-medium-v0", *TINY)
    call("eval", "run", "--episodes", "1", "--tasks", "3", "--workers", "0")
    assert call("report", "run", "--out", "page") == 0
    assert "not the preset as it stands: steps=2 (preset: 1000000)" in " ".join(capsys.readouterr().out.split())


def test_a_policy_from_the_middle_of_training_is_said_to_be(mine, capsys):
    call("train", "gcbc", "mine.npz", "--steps", "2", "--out", "run", "--save-every", "1", *TINY)
    assert call("export", "run", "--out", "whole") == 0
    assert "not trained to its end" not in capsys.readouterr().err
    assert call("export", "run", "--out", "half", "--step", "1") == 0
    assert "not trained to its end: 1 of 2 updates" in " ".join(capsys.readouterr().err.split())


def test_help_of_an_analysis_is_about_it(capsys):
    assert call("analyze", "memory", "--help") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "How far back" in said and "side by side" in said and "gridworld-density" not in said


@pytest.mark.parametrize("what", ["agents", "datasets", "presets", "analyses"])
def test_list(what, capsys):
    assert call("list", what) == 0
    assert {"agents": "qhyer", "datasets": "puzzle-4x6", "presets": "paper", "analyses": "critic"}[
        what
    ] in capsys.readouterr().out


def test_presets_of_one_agent_come_with_their_sources(capsys):
    assert call("list", "presets", "gciql") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "alpha" in said and "source" in said and "hiql" not in said
    assert call("list", "presets", "nobody") == 2
    assert call("list", "agents", "gciql") == 2


def test_help_names_every_command(capsys):
    assert call("--help") == 0
    text = capsys.readouterr().out
    assert all(name in text for name in cli.COMMANDS)


def test_sigterm_ends_the_command_cleanly(mine):
    command = [sys.executable, "-m", "qhyer", "train", "gcbc", "mine.npz", "--steps", "1000000", "--out", "run", *TINY]
    process = subprocess.Popen([*command, "--log-every", "1"], stdout=subprocess.PIPE, text=True, cwd=mine.parent)
    metrics = mine.parent / "run" / "metrics.jsonl"
    while not metrics.exists() and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=180)
    assert process.returncode == cli.STOPPED and "saved update" in output and "--resume continues" in output


def test_a_policy_to_pass_on(mine, capsys, monkeypatch):
    """Export, list, evaluate and show, with the data gone."""
    monkeypatch.delenv("QHYER_MODELS", raising=False)
    call("train", "gcbc", "mine.npz", "--steps", "2", "--out", "run", "--env", "pointmaze-medium-v0", *TINY)
    assert call("eval", "run", "--episodes", "1", "--tasks", "3", "--workers", "0") == 0
    assert call("export", "run", "--max-mb", "0.0001") == 0
    output = capsys.readouterr()
    size = Path("models/mine/model.safetensors").stat().st_size
    assert f"models/mine: {size / 1000:.0f} kB" in output.out and "more than 0.0001 MB" in output.err
    assert f"take {size / 1000:.0f} kB" in output.err
    mine.unlink()
    assert call("list", "models") == 0
    assert "mine" in capsys.readouterr().out
    assert call("eval", "--model", "mine", "--episodes", "1", "--tasks", "3", "--workers", "0") == 0
    assert "runs/eval-mine" in capsys.readouterr().out
    for command in (["eval"], ["analyze", "critic"]):
        assert call(*command, "models/mine") == 2
        assert "models/mine is an exported model, not a run: `qhyer eval --model models/mine`" in said(capsys)
    again = ("eval", "--model", "mine", "--episodes", "1", "--tasks", "3", "--workers", "0")
    assert call("export", "run", "--dtype", "fp32", "--overwrite") == 0 and call(*again) == 2
    assert "runs/eval-mine has rows of mine as it was exported before; --overwrite replaces them" in said(capsys)
    assert call(*again, "--overwrite") == 0 and call(*again) == 0
    info = json.loads(Path("run/run.json").read_text())
    Path("run/run.json").write_text(json.dumps({**info, "config": {**info["config"], "hidden": [32, 16]}}))
    capsys.readouterr()
    assert call("eval", "run") == 2
    assert said(capsys).startswith("error: the weights of run do not fit its run.json (")
    Path("run/run.json").write_text(json.dumps(info))
    assert call("report", "runs/eval-mine", "--out", "page") == 0
    assert call("report", "runs/eval-mine", "--out", "page") == 0  # a report is replaced
    rows = Path("run/episodes.csv").read_bytes()
    assert call("report", "runs/eval-mine", "--out", "run") == 2 and "run is no report, and holds" in said(capsys)
    assert Path("run/episodes.csv").read_bytes() == rows
    assert call("train", "gcbc", "mine.npz", "--out", "runs/eval-mine", *TINY) == 2
    assert "runs/eval-mine has the rows of a model" in said(capsys)
    assert call("show", "mine", "--task", "3", "--out", "a.png") == 0
    assert (mine.parent / "a.png").is_file() and "goal" in capsys.readouterr().out
    assert call("show", "run", "--task", "9") == 2
    assert "has tasks 1 to 5, not 9" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["export", "absent"], "is not a run"),
        (["eval", "--model", "absent"], "no model is called 'absent'"),
        (["eval", "run", "--model", "absent"], "--model goes without runs"),
        (["eval", "run", "--out", "rows"], "--out goes with --model"),
        (["show", "absent"], "no model is called 'absent'"),
        (["show", "absent", "--out", "a.jpg"], "ends in .gif or .png"),
    ],
)
def test_bad_input_about_models(mine, capsys, arguments, words):
    assert call(*arguments) == 2
    output = capsys.readouterr()
    assert words in " ".join(output.err.split()), output.err
    assert "Traceback" not in output.err + output.out


def test_an_interruption_is_told_once(monkeypatch, capsys):
    def stop(*told):
        raise KeyboardInterrupt(*told)

    monkeypatch.setattr(cli, "_doctor", lambda _: stop())
    assert call("doctor") == 130 and capsys.readouterr().err == "interrupted\n"
    monkeypatch.setattr(cli, "_doctor", lambda _: stop("told"))  # a sweep's
    assert call("doctor") == 130 and capsys.readouterr().err == ""


def test_an_example_of_a_run_is_not_looked_for_on_a_whole_disk(tmp_path, monkeypatch):
    deep = tmp_path / "a" / "b" / "c" / "run"
    deep.mkdir(parents=True)
    (deep / "run.json").touch()
    assert f"such as {deep}" in runs.folder_of_runs(tmp_path)
    (tmp_path / "y").mkdir()
    (tmp_path / "a").rename(tmp_path / "y" / "a")
    assert runs.folder_of_runs(tmp_path) == ""  # further down
    assert runs.folder_of_runs(tmp_path / "y") != ""
    monkeypatch.setattr(runs, "LOOKED_AT", 3)
    assert runs.folder_of_runs(tmp_path / "y") == ""
