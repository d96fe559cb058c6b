"""The tables of suites, OGBench's first, and the committed ones against the committed rows."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from qhyer.errors import UserError
from qhyer.report import SUITES, write_report
from qhyer.report.collect import collect
from qhyer.report.commands import report as command
from qhyer.report.ogbench import DATASETS, OGBENCH, against, agents_table, main_table
from qhyer.report.pointmaze import POINTMAZE
from qhyer.report.suite import put_into, suite_of
from qhyer.report.tables import groups, success_rows, summary_csv

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "results" / "ogbench"
COMMITTED = [suite for suite in SUITES if (ROOT / "results" / suite.name).is_dir()]
MARKS = "# Title\n\n<!-- ogbench table: made by a command -->\nold\n<!-- end of ogbench table -->\n\nAfter.\n"


def lines_of(root):
    return against(success_rows(groups(collect([root]))))


def markdown_of(suite, root):
    found = groups(collect([root]))
    return suite.account(found, success_rows(found)).markdown()


def five(outcomes):
    """The same on all of OGBench's tasks."""
    return dict.fromkeys(range(1, 6), outcomes)


@pytest.fixture
def some(tmp_path, make_run):
    """QHyer twice and GCBC once on cube-single-play, QHyer once on scene-noisy, NF-GCBC where nothing is published."""
    root = tmp_path / "records"
    big = {"batch_size": 256}
    make_run(root, "qhyer", 0, five([1, 1, 1, 1]), dataset="cube-single-play-v0", preset="best", config=big)
    make_run(root, "qhyer", 1, five([1, 1, 0, 0]), dataset="cube-single-play-v0", preset="best", config=big)
    make_run(root, "gcbc", 0, five([1, 0, 0, 0]), dataset="cube-single-play-v0", preset="paper")
    make_run(root, "qhyer", 0, five([1, 0]), name="other", dataset="scene-noisy-v0", preset="best", config=big)
    make_run(root, "nf_gcbc", 0, five([1, 0]), dataset="scene-noisy-v0", preset="paper", config=big)
    return root


def test_every_dataset_has_a_line_and_what_was_not_run_says_so(some):
    table = main_table(lines_of(some))
    header, body = table.header, table.body
    assert len(DATASETS) == 10 and [line[0] + "-v0" for line in body] == list(DATASETS)
    assert all(len(line) == len(header) for line in body)
    found = {line[0]: line[1:] for line in body}
    # seeds of 100 and 50: mean 75, standard deviation 50/√2
    assert found["cube-single-play"] == ["best", "84 ± 4", "75 ± 35.4", "50–100", "2", "200 × 256", "−9"]
    assert found["scene-noisy"][:3] == ["best", "25 ± 5", "50"] and found["scene-noisy"][-1] == "+25"
    assert found["cube-double-play"] == ["", "56 ± 2", "not run", "", "", "", ""]
    assert sum(line[3] == "not run" for line in body) == 8


def test_baselines_stand_beside_their_published_numbers(some):
    table = agents_table(lines_of(some))
    header, body = table.header, table.body
    main = ["QHyer", "GCBC", "GCIVL", "GCIQL", "QRL", "CRL", "HIQL", "SAW", "OTA", "Eik-HiQRL", "NF-GCBC"]
    assert header[2:] == [*main, "TRL", "SHARSA", "QC-FQL", "DEAS"]
    at = {name: number for number, name in enumerate(header)}
    first, ours = body[0], body[1]
    assert first[:2] == ["cube-single-play", "published"] and ours[:2] == ["", "ours"]
    # of two published numbers for HIQL here, the one printed in the paper that all the others come from
    assert (first[at["GCBC"]], first[at["HIQL"]], first[at["NF-GCBC"]]) == ("6 ± 2", "15 ± 3", "79.5")
    assert (first[at["TRL"]], first[at["QC-FQL"]]) == ("46.2 ± 0.8", "38.4 ± 1.5")
    assert ours[at["GCBC"]] == "25 (1; 200)" and ours[at["QHyer"]] == "75 ± 35.4 (2; 200 × 256)" and not ours[at["QRL"]]
    noisy = next(number for number, line in enumerate(body) if line[0] == "scene-noisy")
    assert body[noisy][at["NF-GCBC"]] == "" and body[noisy + 1][at["NF-GCBC"]] == "50 (1; 200 × 256)"
    assert len(body) == len(DATASETS) + 2


def test_point_mazes_have_a_table_of_their_own(tmp_path, make_run):
    root = tmp_path / "records"
    make_run(root, "qrl", 0, five([1, 1, 0, 0]), dataset="pointmaze-medium-stitch-v0", preset="paper")
    make_run(root, "qhyer", 0, five([1, 1, 1, 0]), dataset="pointmaze-medium-navigate-v0", preset="demo")
    found = groups(collect([root]))
    (table,) = POINTMAZE.account(found, success_rows(found)).parts
    at = {name: number for number, name in enumerate(table.header)}
    theirs, ours, stitch, ours_there = table.body
    assert theirs[:2] == ["pointmaze-medium-navigate", "published"] and stitch[0] == "pointmaze-medium-stitch"
    assert (theirs[at["GCIVL"]], stitch[at["QRL"]], theirs[at["QHyer"]]) == ("63 ± 6", "80 ± 12", "")
    assert (ours[at["QHyer"]], ours_there[at["QRL"]]) == ("75 (1; 200)", "50 (1; 200)")


def test_two_settings_of_an_agent_are_two_lines(some, make_run):
    make_run(some, "qhyer", 0, five([0, 0]), name="paper", dataset="scene-noisy-v0", preset="paper")
    assert [line[1] for line in main_table(lines_of(some)).body if line[0] == "scene-noisy"] == ["best", "paper"]
    assert "best: 50 (1; 200 × 256); paper: 0 (1; 200)" in markdown_of(OGBENCH, some)


def test_a_number_of_few_tasks_says_so(some, make_run):
    make_run(some, "crl", 0, {2: [1, 1, 1, 1]}, dataset="cube-single-play-v0", preset="paper")
    make_run(some, "qhyer", 0, {2: [1], 3: [1]}, name="few", dataset="scene-play-v0", preset="best")
    lines = lines_of(some)
    at = {name: number for number, name in enumerate(agents_table(lines).header)}
    assert agents_table(lines).body[1][at["CRL"]] == "100, task 2 only (1; 200)"
    (line,) = (line for line in main_table(lines).body if line[0] == "scene-play")
    assert line[3] == "100, tasks 2, 3 only" and line[-1] == ""


def test_exploration_is_left_out_unless_named(some, make_run):
    before = markdown_of(OGBENCH, some)
    make_run(some / "exploration", "qhyer", 0, five([0] * 4), name="try", dataset="cube-single-play-v0", preset="best")
    assert markdown_of(OGBENCH, some) == before
    assert len(collect([some / "exploration"]).runs) == 1


def test_the_page_has_the_table_when_several_datasets_were_run(some, runs, tmp_path):
    report = write_report([some], tmp_path / "out")
    text = report.page.read_text()
    assert text.count('id="ogbench"') == 1 and 'href="#ogbench"' in text and "<td class=quiet>not run</td>" in text
    assert (tmp_path / "out" / "ogbench.md").read_text() == markdown_of(OGBENCH, some)
    assert 'id="ogbench"' not in write_report([runs], tmp_path / "maze").page.read_text()
    assert not (tmp_path / "maze" / "ogbench.md").exists()


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.name)
def test_the_block_is_replaced_and_nothing_else(suite, tmp_path):
    path = tmp_path / "page.md"
    marks = MARKS.replace("ogbench", suite.name)
    path.write_text(marks)
    assert suite_of(path, SUITES) is suite
    put_into(path, suite, "new\n")
    once = path.read_text()
    assert "old" not in once and "\nnew\n" in once and once.startswith("# Title\n") and once.endswith("\nAfter.\n")
    put_into(path, suite, "new\n")
    assert path.read_text() == once


@pytest.mark.parametrize("text", ["# Title\n", MARKS + MARKS, MARKS + MARKS.replace("ogbench", "mazes"), MARKS[:-40]])
def test_a_document_without_one_place_is_left_alone(some, tmp_path, text):
    path = tmp_path / "page.md"
    path.write_text(text)
    with pytest.raises(UserError, match="no place for the table"):
        command((some,), out=tmp_path / "out", table=path)
    assert path.read_text() == text


def test_command_writes_summary_and_table(some, tmp_path, capsys):
    path = tmp_path / "page.md"
    path.write_text(MARKS)
    command((some,), out=tmp_path / "out", summary=tmp_path / "summary.csv", table=path)
    assert (tmp_path / "summary.csv").read_text().splitlines() == [
        "dataset,agent,preset,seed,updates,batch,success",
        "cube-single-play-v0,gcbc,paper,0,200,,25",
        "cube-single-play-v0,qhyer,best,0,200,256,100",
        "cube-single-play-v0,qhyer,best,1,200,256,50",
        "scene-noisy-v0,nf_gcbc,paper,0,200,256,50",
        "scene-noisy-v0,qhyer,best,0,200,256,50",
    ]
    assert "84 ± 4" in path.read_text() and "summary.csv" in capsys.readouterr().out.replace("\n", "")


# ------------------------------------------------------------------------------------------------ what is committed


@pytest.mark.parametrize("suite", COMMITTED, ids=lambda suite: suite.name)
def test_the_committed_summary_is_made_from_the_committed_rows(suite):
    records = ROOT / "results" / suite.name
    assert (records / "summary.csv").read_text() == summary_csv(collect([records]))


@pytest.mark.parametrize("suite", COMMITTED, ids=lambda suite: suite.name)
def test_the_committed_table_is_made_from_the_committed_rows(suite, tmp_path):
    committed = (ROOT / "docs" / f"{suite.name}.md").read_text()
    path = tmp_path / "page.md"
    path.write_text(committed)
    assert suite_of(path, SUITES) is suite
    put_into(path, suite, markdown_of(suite, ROOT / "results" / suite.name))
    assert path.read_text() == committed


@pytest.mark.parametrize("suite", COMMITTED, ids=lambda suite: suite.name)
def test_the_committed_records_lie_where_their_names_say(suite):
    records = ROOT / "results" / suite.name
    table = collect([records])
    assert not table.problems
    for run in table.runs:
        assert run.dataset in suite.datasets, run.path
        name = "-".join(filter(None, (run.agent, run.preset, run.variant)))
        folder, *rest = run.path.relative_to(records).parts
        assert run.dataset.startswith(folder) and rest == [name, f"s{run.seed}"], run.path


def test_the_committed_records_are_whole():
    for run in collect([RECORDS]).runs:
        info = run.info
        assert info["config"] and info["versions"] and len(info["data"]["fingerprint"]) == 64, run.path
        assert info["command"].startswith("qhyer train") and " /" not in info["command"], run.path
        assert run.steps == (info["config"]["steps"],), run.path  # the final checkpoint alone
        tasks = {row.task for row in run.last}
        assert tasks == {"1", "2", "3", "4", "5"} and len(run.last) == 250, run.path
        assert sum(file.stat().st_size for file in run.path.iterdir()) < 60_000, run.path


def test_the_account_of_what_was_tried_agrees_with_its_rows():
    folder = RECORDS / "exploration"
    text = (folder / "README.md").read_text()
    runs = collect([folder]).runs
    assert len(runs) == sum(line.startswith("| ") and not line.startswith("| run ") for line in text.splitlines())
    for run in runs:
        tasks = [[row.success for row in run.last if row.task == str(task)] for task in range(1, 6)]
        rates = [100 * sum(values) / len(values) for values in tasks]
        scores = " | ".join(f"{value:.0f}" for value in (sum(rates) / 5, *rates))
        (line,) = [line for line in text.splitlines() if line.startswith(f"| {run.path.name} |")]
        assert line.endswith(f" | {scores} |"), run.path


@pytest.mark.parametrize(
    "suite", [suite for suite in COMMITTED if suite in (OGBENCH, POINTMAZE)], ids=lambda suite: suite.name
)
def test_the_manifest_has_every_cell(suite):
    """Each committed run is a cell of the manifest, with the configuration that its preset has today."""
    from qhyer.config import to_dict
    from qhyer.manifest import read

    found = read(ROOT / "docs" / "examples" / f"{suite.name}.toml")
    cells = {(cell.agent, cell.preset, cell.dataset, cell.seed): cell for cell in found}
    assert len(cells) == len(found)
    newer = ("saw", "ota", "eik_hiqrl", "nf_gcbc", "trl", "sharsa", "qc_fql", "deas")
    for agent in ("qhyer", "gcbc", "gcivl", "gciql", "qrl", "crl", "hiql", *newer):
        assert {dataset for name, _, dataset, _ in cells if name == agent} == set(suite.datasets), agent
    records = ROOT / "results" / suite.name
    with open(records / "summary.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows
    for row in rows:
        cell = cells[row["agent"], row["preset"], row["dataset"], int(row["seed"])]
        name = f"{row['agent']}-{row['preset']}"
        folder = records / row["dataset"].removesuffix("-v0") / name / f"s{row['seed']}"
        info = json.loads((folder / "run.json").read_text())
        config = json.loads(json.dumps(to_dict(cell.config)))
        assert info["config"] == {key: config[key] for key in info["config"]}, folder
        assert info["train"]["precision"] == cell.train.precision
