"""Maze2D's table: scores, backbones and the order the paper claims, from small made-up records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qhyer import manifest
from qhyer.config import to_dict
from qhyer.records import references
from qhyer.report.collect import collect
from qhyer.report.commands import report as command

ROOT = Path(__file__).parents[2]

MARKS = "# Title\n\n<!-- mazes table: made by a command -->\n<!-- end of mazes table -->\n\nAfter.\n"


@pytest.fixture
def add(tmp_path, make_run):
    """Adds a run whose two episodes average to a score."""

    def add_run(agent, maze, seed, score, variant="", **more):
        dataset = f"maze2d-{maze}-v1"
        low, high = (references()[dataset][key]["mean"] for key in ("random", "controller"))
        middle = low + (high - low) * score / 100
        name = "-".join(filter(None, (agent, "paper", variant, f"s{seed}", "0123abcd")))
        more = {"config": {"batch_size": 64}, "preset": "paper", **more}
        root = tmp_path / "records" / maze
        return make_run(
            root, agent, seed, {1: [1, 1]}, name=name, dataset=dataset, returns=[middle - 5, middle + 5], **more
        )

    return add_run


@pytest.fixture
def made(tmp_path, capsys):
    """The document that the command writes."""
    path = tmp_path / "mazes.md"
    path.write_text(MARKS)

    def make():
        command((tmp_path / "records",), out=tmp_path / "out", summary=tmp_path / "summary.csv", table=path)
        return path.read_text()

    return make


def cells(text, agent):
    return [
        [cell.strip() for cell in line.strip("|").split("|")[1:]]
        for line in text.splitlines()
        if line.startswith((f"| {agent} |", f"| {agent}, "))
    ]


def order(text):
    (line,) = [part for part in text.replace("\n", " ").split("  ") if part.startswith("By our means")]
    return line


def test_ours_beside_published_and_what_was_not_run_says_so(add, made, tmp_path):
    add("qhyer", "umaze", 0, 60)
    add("qhyer", "umaze", 1, 80)
    add("qhyer", "medium", 0, 20)
    add("rvs", "umaze", 0, 90)
    add("dt", "medium", 0, 30)
    text = made()
    assert cells(text, "QHyer") == [["118.5 ± 1.9", "70 ± 14.1 (2)", "173 ± 11.9", "20 (1)", "200 × 64", "123,456"]]
    assert cells(text, "RvS") == [["", "90 (1)", "", "not run", "200 × 64", "123,456"]]
    assert cells(text, "DT") == [["31", "not run", "8.2", "30 (1)", "200 × 64", "123,456"]]
    assert cells(text, "LSDT") == [["72.3", "not run", "68.4", "not run", "", ""]]
    agents = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")]
    assert agents[1:3] == ["QHyer", "RvS"] and len(agents) == 17  # QHyer, then by our score on umaze
    assert "large" not in text and "backbone" not in text and "HDT" not in text
    assert "umaze (not run: DT, LSDT); is open on medium (not run: LSDT)." in order(text)
    assert text.startswith("# Title\n") and text.endswith("\nAfter.\n")
    assert made() == text
    page = (tmp_path / "out" / "index.html").read_text()
    assert page.count('id="mazes"') == 1 and "70 ± 14.1 (2)" in page and 'id="ogbench"' not in page
    assert (tmp_path / "out" / "mazes.md").is_file()


def test_summary(add, made, tmp_path):
    add("dt", "umaze", 0, 50)
    add("dt", "umaze", 1, 100, variant="backbone")
    made()
    header, *lines = (tmp_path / "summary.csv").read_text().splitlines()
    assert header == "dataset,agent,preset,variant,seed,updates,batch,success,return,score"
    low, high = (references()["maze2d-umaze-v1"][key]["mean"] for key in ("random", "controller"))
    found = [line.split(",") for line in lines]
    assert [line[:8] for line in found] == [
        ["maze2d-umaze-v1", "dt", "paper", "", "0", "200", "64", "100"],
        ["maze2d-umaze-v1", "dt", "paper", "backbone", "1", "200", "64", "100"],
    ]
    assert [float(line[8]) for line in found] == pytest.approx([(low + high) / 2, high])
    assert [float(line[9]) for line in found] == pytest.approx([50, 100])


def test_a_third_maze_and_an_agent_without_published_numbers(add, made):
    add("dt", "large", 0, 10)
    add("hdt", "large", 0, 20)
    text = made()
    assert "| large, published | large, ours |" in text
    assert cells(text, "DT")[0][-4:] == ["", "10 (1)", "200 × 64", "123,456"]
    assert cells(text, "HDT") == [["", "not run", "", "not run", "", "20 (1)", "200 × 64", "123,456"]]


def test_settings_of_one_agent_are_told_apart(add, made):
    add("dt", "umaze", 0, 10)
    add("dt", "umaze", 0, 20, preset="small", variant="x")
    text = made()
    assert [line[1] for line in cells(text, "DT")] == ["20 (1)", "10 (1)"]
    assert "| DT, small |" in text and "| DT, paper |" in text


def test_a_variant_has_no_published_number_and_does_not_stand_for_its_agent(add, made):
    add("dt", "umaze", 0, 10)
    add("lsdt", "umaze", 0, 20)
    add("qhyer", "umaze", 0, 15)
    add("qhyer", "umaze", 0, 40, variant="no-q")
    text = made()
    plain, varied = (line for line in text.splitlines() if line.startswith("| QHyer"))
    assert "118.5" in plain and "118.5" not in varied and "no-q" in varied and "40 (1)" in varied
    assert "does not hold on umaze (DT 10, QHyer 15, LSDT 20" in order(text)


def test_backbones_have_a_table_of_their_own(add, made):
    add("dt", "umaze", 0, 50)
    for agent, score in (("dt", 10), ("lsdt", 20), ("hdt", 30)):
        add(agent, "umaze", 0, score, variant="backbone")
    text = made()
    assert "**The same head on each backbone, ours**" in text
    assert [line[:2] for line in cells(text, "DT")] == [["31", "50 (1)"], ["10 (1)", "not run"]]
    below = text[text.index("The same head") :]
    agents = [line.split("|")[1].strip() for line in below.splitlines() if line.startswith("| ")]
    assert agents == ["agent", "DT", "HDT", "LSDT", "DMixer"]  # the reference, then by score
    assert cells(below, "DMixer") == [["not run", "not run", "", ""]]
    assert cells(text, "LSDT")[0][1] == "not run"  # a backbone's run is not one of the method
    assert "is open on umaze (not run: LSDT, QHyer)" in order(text)


def test_the_order_holds(add, made):
    for agent, scores in (("dt", (10, 20)), ("lsdt", (30, 40)), ("qhyer", (50, 60))):
        for seed, score in enumerate(scores):
            add(agent, "umaze", seed, score)
    assert "holds on umaze (DT 15, LSDT 35, QHyer 55; no seeds overlap)" in order(made())


def test_the_order_does_not_hold(add, made):
    for agent, scores in (("dt", (10, 40)), ("lsdt", (30, 38)), ("qhyer", (5, 12))):
        for seed, score in enumerate(scores):
            add(agent, "medium", seed, score)
    said = "does not hold on medium (QHyer 8.5, DT 25, LSDT 34; seeds overlap: QHyer and DT, DT and LSDT)"
    assert said in order(made())


def test_equal_means_are_no_order_and_one_seed_is_named(add, made):
    add("dt", "umaze", 0, 10)
    add("lsdt", "umaze", 0, 10)
    add("qhyer", "umaze", 0, 20)
    said = "does not hold on umaze (DT 10, LSDT 10, QHyer 20; seeds overlap: DT and LSDT; one seed of DT, LSDT, QHyer)"
    assert said in order(made())


def test_the_committed_runs_are_cells_of_the_manifest():
    """With the configurations that it and the presets have today; the final checkpoint, 50 episodes of the one task.

    A name ends with a digest of options, which was once of all of them, defaults too: the rest of it must be the same.
    """
    listed = list(manifest.read(ROOT / "docs/examples/maze2d.toml"))
    cells = {cell.name.rpartition("-")[0]: cell for cell in listed}
    assert len(cells) == len(listed)
    gone = {"prior_weight"}  # options there were, that these runs did not use
    runs = collect([ROOT / "results/mazes"]).runs
    assert runs
    for run in runs:
        cell = cells[f"{run.dataset}/{run.last[0].run.rpartition('-')[0]}"]
        config = json.loads(json.dumps(to_dict(cell.config)))
        then = {key: value for key, value in run.info["config"].items() if key not in gone}
        assert then == {key: config[key] for key in then}, run.path
        assert (run.agent, run.seed, run.steps) == (cell.agent, cell.seed, (cell.config.steps,)), run.path
        assert len({row.episode for row in run.last}) == len(run.last) == 50, run.path
        assert len(run.info["data"]["fingerprint"]) == 64 and " /" not in run.info["command"], run.path
    for dataset in {run.dataset for run in runs}:
        assert len({run.info["data"]["fingerprint"] for run in runs if run.dataset == dataset}) == 1, dataset
