"""What README and docs/ablations.md say was measured is what the records hold: rows in results/, models in models/."""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev

import pytest

from qhyer import models
from qhyer.records import read_rows

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def of_summary(suite: str, column: str) -> dict[tuple[str, ...], list[float]]:
    """(dataset, agent, preset, variant) -> a number for each seed."""
    found: dict[tuple[str, ...], list[float]] = defaultdict(list)
    with open(ROOT / "results" / suite / "summary.csv", newline="") as file:
        for row in csv.DictReader(file):
            found[row["dataset"], row["agent"], row["preset"], row.get("variant", "")].append(float(row[column]))
    return found


def text(values: list[float]) -> str:
    return f"{mean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")


def line_of(name: str) -> list[str]:
    (line,) = re.findall(rf"^\| {re.escape(name)} \|(.*)\|$", README, re.M)
    return [cell.strip() for cell in line.split("|")]


OURS = {
    dataset.removesuffix("-v0"): values
    for (dataset, *rest), values in of_summary("ogbench", "success").items()
    if rest == ["qhyer", "best", ""]
}


def test_ogbench_has_a_row_for_each_dataset_that_was_run():
    assert OURS and set(OURS) == set(re.findall(r"^\| ((?:cube|scene|puzzle)[\w-]+) \| \d", README, re.M))


@pytest.mark.parametrize("dataset", sorted(OURS))
def test_ogbench_rows(dataset):
    seeds, ours, paper, *_ = line_of(dataset)
    assert int(seeds) == len(OURS[dataset])
    assert ours.strip("*") == text(OURS[dataset])
    assert ours.startswith("**") == (mean(OURS[dataset]) > float(paper.split()[0]))  # bold: above the paper's


def test_maze2d_rows():
    scores = of_summary("mazes", "score")
    for maze in ("umaze", "medium"):
        kinds = [("dt", ""), ("lsdt", ""), ("qhyer", ""), ("qhyer", "no-q")]
        found = [scores[f"maze2d-{maze}-v1", agent, "paper", variant] for agent, variant in kinds]
        cells = line_of(maze)
        assert [cell.strip("*") for cell in cells] == [text(values) for values in found]
        assert [cell.startswith("**") for cell in cells] == [values == max(found, key=mean) for values in found]


@pytest.mark.parametrize("name", sorted(path.parent.name for path in (ROOT / "models").glob("*/model.json")))
def test_released_models_carry_the_scores_of_their_run(name):
    about = models.read(ROOT / "models" / name)
    run = ROOT / "results" / "ogbench" / name / f"{about['agent']}-{about['preset']}" / f"s{about['seed']}"
    assert about["scores"] == models.scores(read_rows(run / "episodes.csv"), about["updates"])
    rounded = models.scores(read_rows(ROOT / "results" / "models" / name / "episodes.csv"), about["updates"])
    (line,) = re.findall(rf"^qhyer eval --model {name} +# (.*)$", README, re.M)
    assert line == f"{100 * rounded['mean']:.1f} %; the run it was rounded from: {100 * about['scores']['mean']:.1f} %"


TABLES = sorted((ROOT / "results" / "ablations").glob("*.csv"))


def test_there_are_ablations():
    assert TABLES


@pytest.mark.parametrize("table", TABLES, ids=[path.stem for path in TABLES])
def test_ablations_are_those_of_their_rows(table):
    page = (ROOT / "docs" / "ablations.md").read_text(encoding="utf-8")
    with open(table, newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) >= 3
    for row in rows:
        full = row["variant"] in ("flow", "expectile", "expectile=0.9")  # the preset itself, whose runs have no name
        name = "" if full else "-" + row["variant"].replace("=", "-")
        runs = (ROOT / "results" / "ablations" / row["dataset"].removesuffix("-v0")).glob(f"qhyer-demo{name}-s[01]-*")
        each = [100 * mean(episode.success for episode in read_rows(run / "episodes.csv")) for run in runs]
        assert len(each) == int(row["seeds"]) and mean(each) == pytest.approx(float(row["mean"]))
        assert f"| {row['variant']} | {text(each)} |" in page
