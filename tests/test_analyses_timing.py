"""The table of times: which datasets, one half trained at a time, products counted by hand, the command."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qhyer import presets, runs
from qhyer.analyses import timing
from qhyer.bench import common
from qhyer.bench.train import launch
from qhyer.config import replace
from qhyer.data import registry
from qhyer.data.episodes import Episodes
from qhyer.errors import UserError


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def episodes() -> Episodes:
    rng = np.random.default_rng(0)
    ends = np.arange(1, 6) * 31 - 1
    return Episodes.from_arrays(
        rng.normal(size=(155, 6)), rng.uniform(-1, 1, (155, 3)), ends, goal=(0, 1), name="made-up"
    )


@pytest.fixture(params=[1, 3], ids=["one-action", "three-actions"])
def agent(episodes: Episodes, request: pytest.FixtureRequest) -> Any:
    config, _ = presets.resolve("qhyer", "demo", "cube-single-play-v0")
    return runs.build_agent("qhyer", replace(config, {"chunk": request.param}), episodes.spec(), 0)


def test_the_paper_s_table_is_whole() -> None:
    assert len(timing.PAPER) == 18 and all(name in registry.DATASETS for name in timing.PAPER)
    means = np.mean(list(timing.PAPER.values()), axis=0)
    assert (np.abs(means - timing.AVERAGE) < [0.006, 0.006, 6e-4, 6e-4, 0.06]).all(), means


def test_which_datasets() -> None:
    assert [dataset.name for dataset in timing.chosen((), "cpu")] == ["cube-single-play-v0"]
    assert len(timing.chosen((), "cuda")) == len(timing.chosen(("all",), "cpu")) == 18
    assert [dataset.name for dataset in timing.chosen(("scene-play", "scene-play"), "cpu")] == ["scene-play-v0"]
    with pytest.raises(UserError, match="not in the paper's table"):
        timing.chosen(("pointmaze-medium-navigate",), "cpu")


def test_each_half_trains_alone(agent: Any, episodes: Episodes) -> None:
    for name, stage in timing.stages(agent, 8).items():
        before = {key: value.clone() for key, value in agent.named_parameters()}
        launch([timing.Part(agent, stage, episodes, "fp32", graph=True)], 2)
        moved = {key for key, value in agent.named_parameters() if not torch.equal(value, before[key])}
        assert moved, name
        assert {key.startswith("critic.") for key in moved} == {name == "flow_train"}


def test_products_are_counted_for_the_whole_batch() -> None:
    x, w = torch.ones(timing.COUNTED, 5), torch.ones(5, 7)
    assert timing.count(lambda: x @ w, 256) == 2 * 256 * 5 * 7


def test_measure(agent: Any, episodes: Episodes) -> None:
    found = timing.measure(agent, episodes, 8, "fp32", 0.01, graph=True)
    assert all(found[name] > 0 and found[f"{name}_gflop"] > 0 for name in timing.COLUMNS)
    assert set(found["paths"].values()) == {"eager"}
    assert found["nf_percent"] == pytest.approx(
        100 * found["flow_train"] / (found["flow_train"] + found["actor_train"])
    )
    # Backward passes cost about twice the forward one: training the flow, three times asking it.
    assert 2.0 < found["flow_train_gflop"] / found["infer_q_gflop"] <= 3.01


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def made_up(dataset: registry.Dataset, count: int, device: torch.device) -> Episodes:
        rng = np.random.default_rng(0)
        return Episodes.from_arrays(
            rng.normal(size=(60, 20)), rng.uniform(-1, 1, (60, 5)), np.array([59]), goal=(17, 18, 19), name=dataset.name
        )

    monkeypatch.setattr(common, "made_up_episodes", made_up)  # no simulator
    options: dict[str, Any] = dict(device="cpu", preset="demo", batch=4, seconds=0.01, out=tmp_path, quiet=True)
    path = timing.run(datasets=("cube-single-play", "scene-noisy"), **options)
    result = json.loads(path.read_text())
    assert [row["dataset"] for row in result["rows"]] == ["cube-single-play-v0", "scene-noisy-v0"]
    said = capsys.readouterr().out
    assert "2.42" in said and "mean" in said and "RTX 3090" in said
    assert all(path.with_suffix(f".{kind}").stat().st_size > 500 for kind in ("csv", "png", "svg"))
    with pytest.raises(UserError, match="other settings"):
        timing.run(datasets=("cube-single-play",), **options)
    with pytest.raises(UserError, match="must be positive"):
        timing.run(batch=0)


def test_what_was_measured_before_a_stop_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = lambda *_: (presets.resolve("qhyer", "demo", "cube-single-play-v0")[0], [])
    monkeypatch.setattr(timing, "presets", type("tiny", (), {"resolve": staticmethod(tiny)}))
    measured: list[str] = []

    def measure(agent: Any, episodes: Episodes, *_: Any) -> dict[str, Any]:
        if len(measured) == 1:
            measured.append("stop")
            raise KeyboardInterrupt
        measured.append(episodes.name)
        names = [*timing.COLUMNS, "nf_percent", "actor_train_gflop", "actor_train_3090_ms"]
        return {**dict.fromkeys(names, float(len(measured))), "paths": {"flow_train": "eager"}}

    monkeypatch.setattr(timing, "measure", measure)
    asked = dict(datasets=("cube-single-play", "scene-play"), device="cpu", seconds=0.01, out=tmp_path, quiet=True)
    with pytest.raises(KeyboardInterrupt):
        timing.run(**asked)
    path = timing.run(**asked)
    rows = json.loads(path.read_text())["rows"]
    assert [row["flow_train"] for row in rows] == [1.0, 3.0] and len(measured) == 3
    assert not (tmp_path / "unfinished.json").exists()
    with pytest.raises(UserError, match="other settings"):
        timing.run(**{**asked, "seconds": 0.02})


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path) -> None:
    path = timing.run(datasets=("cube-single-play",), device="cuda", seconds=0.2, out=tmp_path, quiet=True)
    (row,) = json.loads(path.read_text())["rows"]
    assert set(row["paths"].values()) == {"captured"}


def test_the_page_has_the_times_that_were_taken():
    root = Path(__file__).parents[1]
    page = (root / "docs" / "analyses" / "timing.md").read_text(encoding="utf-8")
    section = page.split("\n## Here\n")[1].split("\n## ")[0]
    with open(root / "results" / "analyses" / "timing-cuda" / "timing.csv", newline="") as file:
        taken = list(csv.DictReader(file))
    assert {row["dataset"] for row in taken} == set(timing.PAPER)
    for row in taken:
        times = [float(row[name]) for name in ("flow_train", "actor_train", "infer_q", "infer_a")]
        rate = float(row["actor_train_gflop"]) / float(row["actor_train"])
        cells = [
            *(f"{t:.3g}" if t >= 1 else f"{t:.3f}" for t in times),
            f"{float(row['nf_percent']):.1f}",
            f"{rate:.0f}",
        ]
        assert f"| {row['dataset'].removesuffix('-v0')} | {' | '.join(cells)} |" in section
