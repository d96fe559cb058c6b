"""What a report says of making it again: typed one after the other in an empty folder, it is made again."""

from __future__ import annotations

import html
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from qhyer import cli
from qhyer.data import origin, registry
from qhyer.data.episodes import Episodes
from qhyer.report.collect import collect
from qhyer.report.reproduce import commands
from qhyer.rng import episode_seed
from qhyer.storage import read_sealed_json, sha256_file, write_sealed_json

TINY = ("--preset", "demo", "--device", "cpu", "--steps", "2", "--agent.batch-size", "4")


@pytest.fixture
def typed(monkeypatch):
    """A command, as if it were typed in the folder one is in."""

    def call(*words: str) -> None:
        monkeypatch.setattr("sys.argv", ["/somewhere/bin/qhyer", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main(words)
        assert not ended.value.code, words

    return call


def test_the_commands_of_a_tiny_demo_make_it_again(tmp_path, monkeypatch, typed):
    """Data, two trainings, their evaluations and the page; one is evaluated while it is trained, too."""
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    monkeypatch.chdir(tmp_path / "first")
    monkeypatch.delenv("QHYER_DATA", raising=False)
    data = "demo/data-s1/pointmaze-medium-navigate-v0.npz"
    typed("data", "generate", "pointmaze-medium-navigate", "--out", "demo/data-s1", "--episodes", "1", "--seed", "1")
    typed("train", "gcbc", data, *TINY, "--agent.hidden", "8", "--out", "demo/runs/gcbc-s0")
    few = ("--episodes", "1", "--tasks", "3", "--workers", "0", "--seed", "7")
    small = ("--agent.width", "8", "--agent.context", "2", "--agent.encoder-width", "8", "--agent.flow-channels", "8")
    typed("train", "qhyer", data, *TINY, *small, "--out", "demo/runs/qhyer-s0")
    typed("eval", "demo/runs", *few)
    typed("report", "demo/runs/qhyer-s0", str(Path("demo/runs/gcbc-s0").resolve()), "--out", "demo/report")

    page = Path("demo/report/index.html").read_text()
    (lines,) = re.findall(r"<pre><code>(qhyer .*?)</code></pre>", page.split('id="reproduce"')[1], re.S)
    told = html.unescape(lines).splitlines()
    assert [line.split()[1] for line in told] == ["data", "train", "train", "eval", "report"]
    assert told[3] == "qhyer eval demo/runs/gcbc-s0 demo/runs/qhyer-s0 --episodes 1 --tasks 3 --seed 7"
    monkeypatch.chdir(tmp_path / "second")
    for line in told:
        typed(*shlex.split(line)[1:])
    for made in ("gcbc-s0", "qhyer-s0"):
        rows = [(tmp_path / each / "demo/runs" / made / "episodes.csv").read_text() for each in ("first", "second")]
        without = [[row.split(",")[:11] for row in text.splitlines()] for text in rows]  # seconds
        assert without[0] == without[1] and len(without[0]) == 2
    assert Path("demo/report/index.html").is_file()


def told_of(folder: Path, *sources: Path) -> tuple[list[str], str]:
    lines, notes = commands(collect(sources or [folder]), list(sources) or [folder], folder / "page")
    return lines, " ".join(notes)


def changed(run: Path, **entries) -> None:
    path = run / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def reseeded(run: Path, environment: str, seed: int) -> None:
    """The rows of its last step as an evaluation with this seed has them."""
    lines = []
    for line in (run / "episodes.csv").read_text().splitlines():
        cells = line.split(",")
        if cells[6].isdigit():
            cells[8] = str(episode_seed(seed, environment, int(cells[6]), int(cells[7])))
        lines.append(",".join(cells))
    (run / "episodes.csv").write_text("\n".join(lines) + "\n")


def test_evaluations_are_listed_as_they_were_made(tmp_path, make_run, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for seed in (0, 1):
        run = make_run(Path("runs"), "gcbc", seed, {1: [1, 0], 2: [0, 0]}, name=f"s{seed}")
        reseeded(run, "pointmaze-medium-v0", 3)
        changed(run, command="qhyer train gcbc pointmaze-medium-navigate --seeds 0 1 --out runs", updates=200)
    lines, notes = told_of(Path("runs"))
    assert lines == [
        "qhyer train gcbc pointmaze-medium-navigate --seeds 0 1 --out runs",
        "qhyer eval runs/s0 runs/s1 --episodes 2 --tasks 1 2 --seed 3",
        "qhyer report runs --out runs/page",
    ]
    assert notes == ""
    changed(run, updates=500, environment="own:Reach-v0")  # not its last checkpoint; an environment named later
    reseeded(run, "own:Reach-v0", 0)
    last = told_of(Path("runs"))[0][2]
    assert last == "qhyer eval runs/s1 --step 200 --episodes 2 --tasks 1 2 --seed 0 --env own:Reach-v0"
    changed(run, train={"eval_every": 100, "eval_episodes": 2})
    assert not any("runs/s1" in line for line in told_of(Path("runs"))[0])


@pytest.mark.parametrize("name", ["sweep grid.toml", "ablate backbone --seeds 0"])
def test_what_evaluates_its_runs_is_not_followed_by_an_evaluation(tmp_path, make_run, name):
    """Unless the rows are those of a later one, with another seed, or with more episodes, or elsewhere."""
    run = make_run(tmp_path, "gcbc", 0, {1: [1, 0]}, name="one")
    asked = {"episodes": 2, "seed": 3, "tasks": [1], "environment": "pointmaze-medium-v0"}
    changed(run, command=f"qhyer {name}", evaluation=asked, updates=200)

    def evaluated(seed: int, environment: str = "pointmaze-medium-v0") -> list[str]:
        reseeded(run, environment, seed)
        lines, notes = told_of(tmp_path)
        assert notes == "" and [line.split()[1] for line in lines if " eval " not in line] == [
            name.split()[0],
            "report",
        ]
        return [line for line in lines if " eval " in line]

    assert evaluated(3) == []
    again = f"qhyer eval {run} --episodes 2 --tasks 1 --seed 4 --overwrite --env pointmaze-medium-v0"
    assert evaluated(4) == [again.removesuffix(" --env pointmaze-medium-v0")]
    for other in ({"episodes": 1}, {"tasks": [1, 2]}, {"environment": "pointmaze-large-v0"}):
        changed(run, evaluation=asked | other)
        assert len(evaluated(3)) == 1
    changed(run, evaluation=None)  # an earlier version's: what is usual counts as asked for
    assert len(evaluated(0)) == 1
    usual = make_run(tmp_path, "gcbc", 1, {1: [1] * 50}, name="two")
    changed(usual, command=f"qhyer {name}")
    reseeded(usual, "pointmaze-medium-v0", 0)
    assert not any(str(usual) in line for line in told_of(tmp_path)[0])


def made_data(folder: Path, seed: int, **settings) -> dict:
    """A file as it is generated, in small, and what run.json has of it."""
    arrays = dict(zip(("observations", "actions"), np.random.default_rng(seed).normal(size=(2, 20, 2))))
    folder.mkdir(exist_ok=True)
    file = folder / "pointmaze-medium-navigate-v0.npz"
    np.savez(file, **{k: v.clip(-1, 1) for k, v in arrays.items()}, terminals=np.arange(20) % 10 == 9)
    sidecar = {"dataset": file.stem, "split": "train", "episodes": 2, "seed": seed, "settings": settings}
    write_sealed_json(file.with_suffix(".json"), sidecar | {"sha256": sha256_file(file)})
    episodes = Episodes.load(file)
    return {"fingerprint": episodes.fingerprint, **registry.origin_of(episodes)}


def test_data_are_made_as_they_were_when_it_was_trained(tmp_path, make_run, monkeypatch):
    """Not as the file that lies there today; runs of earlier versions say when it is another."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("QHYER_DATA", raising=False)
    words = "qhyer data generate pointmaze-medium-navigate-v0 --episodes 2 --seed"
    run, old = (make_run(Path("runs"), "gcbc", seed, {1: [1, 0]}, name=f"s{seed}") for seed in (0, 1))
    about = made_data(Path("data"), 4, rows=1001)
    for each in (run, old):
        reseeded(each, "pointmaze-medium-v0", 0)
    changed(run, data=about)
    changed(old, data={"fingerprint": about["fingerprint"]})
    lines, notes = told_of(Path("runs"))
    assert [line for line in lines if " data " in line] == [f"{words} 4"] and "data" not in notes
    later = made_data(Path("data"), 5, rows=1001)  # data generate --seed 5 --overwrite
    lines, notes = told_of(Path("runs"))
    assert [line for line in lines if " data " in line] == [f"{words} 4"]
    unknown = "is not what it was in the training, and which command made the data is not recorded: runs/s1."
    assert f"data/pointmaze-medium-navigate-v0.npz {unknown}" in notes
    changed(old, data=later)
    lines, notes = told_of(Path("runs"))
    assert [line for line in lines if " data " in line] == [f"{words} 4"]
    assert f"so last, once those of runs/s0 are trained, and `{words} 5 --overwrite`: runs/s1." in notes
    Path("data/pointmaze-medium-navigate-v0.npz").write_bytes(b"")
    changed(old, data={"fingerprint": about["fingerprint"]})
    assert "npz cannot be compared with the training, and" in told_of(Path("runs"))[1]


def test_a_file_by_its_path_is_the_data_of_that_name(tmp_path, make_run, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("QHYER_DATA", raising=False)
    about = made_data(Path("data"), 4, rows=1001)
    for seed, name in enumerate(("pointmaze-medium-navigate", "data/pointmaze-medium-navigate-v0.npz")):
        run = make_run(Path("runs"), "gcbc", seed, {1: [1, 0]}, name=f"s{seed}")
        changed(run, data=about, command=f"qhyer train gcbc {name} --seed {seed} --out runs/s{seed}")
    lines, notes = told_of(Path("runs"))
    assert len([line for line in lines if " data generate " in line]) == 1 and "other data" not in notes


def test_an_ant_of_ones_own_and_short_episodes_are_said(tmp_path, make_run, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = make_run(Path("runs"), "gcbc", 0, {1: [1, 0]})
    for settings, words in (
        ({"ant": "0123456789abcdef"}, "--ant FOLDER`; the SHA-256 of its weights is 0123456789ab…): runs/gcbc-0."),
        ({"rows": 30}, "Data generated from Python, with episodes of 30 rows, which `qhyer data generate"),
    ):
        changed(run, data=made_data(Path("data"), 4, **settings))
        lines, notes = told_of(Path("runs"))
        assert words in notes and not any(" data " in line for line in lines)
    released = read_sealed_json(origin.ANT)["sha256"]
    changed(run, data=made_data(Path("data"), 4, ant=released))
    lines, notes = told_of(Path("runs"))
    assert any(" data generate " in line for line in lines) and "an ant" not in notes


def test_what_no_command_makes_is_said(tmp_path, make_run, monkeypatch):
    monkeypatch.chdir(tmp_path)
    changed(make_run(Path("runs"), "gcbc", 0, {1: [1, 0]}, name="mine"), command="robot.py --fast")
    changed(make_run(Path("runs"), "gcbc", 1, {1: [1, 0]}, name="lost"), command=None)
    make_run(Path("runs"), "gcbc", 2, {1: [1, 0]}, name="away")
    model = make_run(Path("runs"), "gcbc", 3, {1: [1, 0]}, name="eval-arm")
    changed(model, model={"name": "arm", "dtype": "bf16"})
    lines, notes = told_of(Path("runs"))
    assert not any("robot.py" in line for line in lines)
    assert "Made from Python (robot.py), so train there first: runs/mine." in notes
    assert "No command is recorded for: runs/lost." in notes
    assert "named as it is now: runs/away." in notes
    assert "seed of the evaluation is not known for: runs/mine, runs/lost, runs/away, …" in notes
    assert "These models must be there (`qhyer export`): arm." in notes
    assert "qhyer eval --model arm --out runs/eval-arm --episodes 2 --tasks 1" in lines
    assert "qhyer eval runs/mine runs/lost runs/away --episodes 2 --tasks 1" in [
        re.sub(" --env.*", "", x) for x in lines
    ]
