"""What README and docs/ablations.md say was measured is what the records hold: rows in results/, models in models/."""

from __future__ import annotations

import csv
import json
import re
from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev

import pytest

from qhyer import ablate, models
from qhyer.records import read_rows

ROOT = Path(__file__).parents[1]
OGBENCH = ROOT / "results" / "ogbench"
PROPER = {"qhyer": "QHyer", "nf_gcbc": "NF-GCBC"}
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


def test_expectile_rows():
    """τ on cube-single: the tables of `qhyer ablate`, and beside play data the variant without a Q."""

    def table(name: str, kind: str) -> dict[str, str]:
        with open(ROOT / "results" / "ablations" / f"{name}-cube-single-{kind}-v0-fast.csv", newline="") as file:
            rows = [row for row in csv.DictReader(file) if int(row["seeds"])]
        return {row["variant"]: f"{float(row['mean']):.1f} ± {float(row['std']):.1f}" for row in rows}

    taus = [f"expectile={tau}" for tau in (0.5, 0.7, 0.9, 0.95, 0.99)]
    for kind, tau in (("play", 0.99), ("noisy", 0.95)):
        found = table("expectile", kind)
        none = table("paper-tau/q-estimator", "play")["none"] if kind == "play" else ""
        cells = line_of(f"{kind} (the paper's τ: {tau})")
        assert [cell.strip("*") for cell in cells] == [*(found.get(variant, "") for variant in taus), none]
        highest = max(filter(None, cells), key=lambda cell: float(cell.strip("*").split()[0]))
        assert [cell for cell in cells if cell.startswith("**")] == [highest]


def test_what_it_needs():
    """One thing taken away at a time: as the tables of `qhyer ablate` have it."""

    def score(table: str, variant: str) -> str:
        with open(ROOT / "results" / "ablations" / f"{table}.csv", newline="") as file:
            (row,) = [row for row in csv.DictReader(file) if row["variant"] == variant]
        return f"{float(row['mean']):.1f} ± {float(row['std']):.1f}"

    asked = [
        *[("q-estimator", "flow"), ("q-estimator", "none"), ("backbone", "hybrid-rtg"), ("tokenization", "no_goal")],
        *[("context", "K=1"), ("backbone", "attention"), ("backbone", "mamba"), ("q-estimator", "cvae")],
    ]
    assert line_of("`fast`") == [score(f"{name}-cube-single-play-v0-fast", variant) for name, variant in asked]
    variants = (
        "best",
        "no-q",
        "one-gaussian",
        "flow-alone",
        "absolute-frame",
        "whole-goal",
        "near-goals",
        "one-action",
    )
    assert line_of("`best`") == [score("without-puzzle-3x3-play-v0-best", variant) for variant in variants]


TABLES = sorted((ROOT / "results" / "ablations").glob("**/*-v0-*.csv"))
PAPER_TAU = {"cube-single-play-v0": 0.99, "cube-single-noisy-v0": 0.95}  # of the tables in the folder paper-tau
PRECISION = {"fast": "bf16", "best": "bf16", "demo": "fp32"}  # on a GPU, on a CPU


def test_there_are_ablations():
    assert TABLES


@pytest.mark.parametrize("table", TABLES, ids=[f"{path.parent.name}-{path.stem}" for path in TABLES])
def test_ablations_are_those_of_their_rows(table, tmp_path):
    """The command makes the same tables from the same rows, and the page says what they say."""
    with open(table, newline="") as file:
        (name, dataset, preset, steps), *others = {
            (row["ablation"], row["dataset"], row["preset"], int(row["updates"])) for row in csv.DictReader(file)
        }
    assert not others
    asked, small = ablate.get(name), table.parent.name == "small"
    seeds = [0, 1, 2] if small else [0, 1]
    made = {"datasets": [dataset], "preset": preset, "seeds": seeds, "out": str(table.parent)}
    tau = {"expectile": PAPER_TAU[dataset]} if table.parent.name == "paper-tau" else {}
    settings = f"{table.stem}.json"
    own = json.loads((table.parent / settings).read_text())["settings"]["options"] if small else {}
    made |= {"override": {**asked.values.get("override", {}), "steps": steps, **tau, **own}, "eval": {}}
    chosen = ablate.variants(asked, {**made, "train": {"precision": "fp32" if small else PRECISION[preset]}})
    lines = ablate.write(asked, chosen, tmp_path)
    assert (tmp_path / table.name).read_text() == table.read_text()
    assert (tmp_path / settings).read_text() == (table.parent / settings).read_text()
    assert sum(line.seeds == len(seeds) for line in lines) >= 2

    page = (ROOT / "docs" / "ablations.md").read_text(encoding="utf-8")
    section = page.split("\n## On pointmaze-medium-stitch\n")[1]
    column, missing = 1, "not run"
    if preset != "demo":
        section = page.split(f"\n## {name}\n")[1].split("\n## ")[0]
        (header,) = re.findall(r"^\| variant \|.*$", section, re.M)
        titles = cells_of(header)
        whose = "paper's τ" if table.parent.name == "paper-tau" else "ours"
        kind = "small" if small else f"{whose}, {dataset.split('-')[-2]}"
        column, missing = titles.index(kind if kind in titles else "ours"), "not run yet"
    for line in lines:
        (said,) = re.findall(rf"^\| {re.escape(line.variant)} \| (?!success %).*$", section, re.M)
        assert cells_of(said)[column] == (text(list(line.scores)) if line.seeds else missing)


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_baselines_take_as_long_as_was_measured():
    page = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8").split("\n**The baselines.**")[1]
    files = [ROOT / "results" / "bench" / name for name in ("agents.json", "agents-hierarchies.json")]
    rows = {row["name"]: row for file in files for row in json.loads(file.read_text())["rows"]}
    hierarchies = ("saw", "ota", "eik_hiqrl")
    for name in ("gcbc", "gcivl", "gciql", "qrl", "crl", "hiql", "nf_gcbc", *hierarchies):
        one, stacked = rows[name], [rows.get(f"{name}, {seeds} seeds") for seeds in (2, 8)]
        missing = "not measured" if name in hierarchies else "not stacked"
        cells = [f"{one['ms']:.2f}", f"{one['floor_ms']:.3f}"]
        cells += [f"{one['extra'][path]:.1f}" for path in ("eager_ms", "plain_ms")]
        cells += [f"{row['extra']['seed_ms']:.2f}" if row else missing for row in stacked]
        assert f"| {name} | {' | '.join(cells)} |" in page


def test_the_baselines_score_what_their_rows_say():
    page = (ROOT / "docs" / "ogbench.md").read_text(encoding="utf-8").split("\n## The baselines\n")[1].split("\n## ")[0]
    for dataset, agent, scores in baseline_scores():
        (line,) = re.findall(rf"^\| {agent} \|.*$", page.split(f"| {dataset} |")[1].split("\n\n")[0], re.M)
        assert cells_of(line)[2] == ", ".join(f"{score:.1f}" for score in scores)


def baseline_scores() -> list[tuple[str, str, list[float]]]:
    """Of each baseline on each OGBench dataset, the success of its seeds in their order."""
    found = []
    for folder in sorted((ROOT / "results" / "ogbench").glob("*/*-paper")):
        agent = folder.name.removesuffix("-paper").upper().replace("_", "-")
        rows = [read_rows(run / "episodes.csv") for run in sorted(folder.iterdir())]
        found.append((folder.parent.name, agent, [100 * mean(row.success for row in run) for run in rows]))
    return found


def test_the_tasks_of_the_point_mazes_are_those_of_the_rows():
    records = ROOT / "results" / "pointmaze"
    page = (
        (ROOT / "docs" / "pointmaze.md").read_text(encoding="utf-8").split("\nSuccess % by task")[1].split("\n## ")[0]
    )
    said = {cells[0]: cells[1:] for cells in map(cells_of, re.findall(r"^\|.*$", page, re.M)[2:])}
    folders = sorted((records / "pointmaze-medium-navigate").iterdir())
    assert set(said) == {PROPER.get(name, name.upper()) for name in (folder.name.split("-")[0] for folder in folders)}
    for folder in folders:
        cells = []
        for maze in ("navigate", "stitch"):
            runs = sorted((records / f"pointmaze-medium-{maze}" / folder.name).iterdir())
            rows = [read_rows(run / "episodes.csv") for run in runs]
            rates = [
                [100 * mean(row.success for row in run if row.task == task) for task in range(1, 6)] for run in rows
            ]
            cells += [", ".join(f"{rate:.0f}" for rate in task) for task in zip(*rates)]
        name = folder.name.split("-")[0]
        assert said[PROPER.get(name, name.upper())] == cells


def test_how_much_evaluations_vary_is_what_the_rows_say():
    root = ROOT / "results" / "protocol"
    lines = [
        cells_of(line) for line in (root / "README.md").read_text(encoding="utf-8").splitlines() if line[:2] == "| "
    ]
    rate = {path.parent: 100 * mean(row.success for row in read_rows(path)) for path in root.rglob("episodes.csv")}
    rate |= {path.parent: 100 * mean(row.success for row in read_rows(path)) for path in OGBENCH.rglob("episodes.csv")}
    said = 0
    for dataset, agent, seed, *cells in (line if len(line) == 5 else ["cube-single-play", *line] for line in lines):
        if not seed.isdigit():
            continue
        run = Path(agent) if "/" in agent else Path(dataset) / f"{agent}-paper" / f"s{seed}"
        again = ["settling"] if len(cells) == 2 else ["eval-seed-1", "eval-seed-2", "eval-seed-3"]
        numbers = [rate[OGBENCH / run], *(rate[root / name / run] for name in again)]
        assert cells == [f"{number:.1f}" for number in (*numbers, *([mean(numbers)] if len(cells) == 5 else []))]
        said += len(again)
    assert said == len(list(root.rglob("episodes.csv")))


def test_what_was_tried_on_the_point_mazes_agrees_with_its_rows():
    folder = ROOT / "results" / "pointmaze" / "exploration"
    lines = [cells_of(line) for line in (folder / "README.md").read_text().splitlines() if line.startswith("| ")]
    said = {cells[0]: cells[2:] for cells in lines[1:]}
    assert set(said) == {path.name for path in folder.iterdir() if path.is_dir()}
    for name, cells in said.items():
        rows = read_rows(folder / name / "episodes.csv")
        tasks = [100 * mean(row.success for row in rows if row.task == task) for task in range(1, 6)]
        assert cells == [str(len(rows)), f"{mean(tasks):.1f}", *(f"{task:.0f}" for task in tasks)]
