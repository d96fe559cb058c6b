from __future__ import annotations

import json

import pytest

from qhyer.errors import UserError
from qhyer.report import write_report
from qhyer.report.collect import collect, read_run


def test_finds_runs_at_any_depth(runs, make_run):
    make_run(runs / "more" / "deep", "hiql", 0, {1: [1]})
    assert {run.name for run in collect([runs]).runs} == {"qhyer-0", "qhyer-1", "gcbc-0", "hiql-0"}
    assert len(collect([runs / "qhyer-0", runs / "qhyer-0", runs / "gcbc-0" / "run.json"]).runs) == 2


def test_reads_bare_tables_and_counts_no_row_twice(runs, tmp_path):
    out = tmp_path / "results"
    report = write_report([runs], out)
    alone = collect([out])
    assert len(alone.episodes) == len(report.table.episodes) == 40
    assert len(collect([runs, out]).episodes) == 40
    write_report([out], tmp_path / "again")
    assert (tmp_path / "again" / "success.csv").read_text() == (out / "success.csv").read_text()


def test_a_report_inside_the_folder_it_is_about_does_not_read_itself(runs):
    first = write_report([runs], runs / "report")
    (runs / "gcbc-0" / "episodes.csv").unlink()
    second = write_report([runs], runs / "report")
    assert len(second.success) < len(first.success)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("run.json", "{not json", "is not readable JSON"),
        ("run.json", '{"agent": "qhyer"}', "does not say preset, dataset, seed"),
        ("run.json", '{"agent": "a", "seal": "0"}', "does not match its own checksum"),
        ("run.json", "[1]", "should hold one JSON object"),
        ("episodes.csv", "a,b\n1,2\n", "lacks the column run, agent"),
        ("episodes.csv", b"\xff\xfe\x00", "cannot be read"),
    ],
)
def test_a_garbled_file_is_named_with_the_cure(runs, name, content, words):
    path = runs / "qhyer-0" / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as error:
        read_run(runs / "qhyer-0")
    assert str(path) in str(error.value) and words in str(error.value)
    table = collect([runs])  # the others are not lost
    assert {run.name for run in table.runs} == {"qhyer-1", "gcbc-0"}
    assert [str(path) in problem for problem in table.problems] == [True]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (",1,10,", ",2,10,", "success must be 0 or 1"),
        (",10,0.5", ",ten,0.5", "line 2"),
        (",0.5", "", "line 2"),
    ],
)
def test_a_garbled_row_condemns_its_file(runs, old, new, words):
    path = runs / "gcbc-0" / "episodes.csv"
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(UserError, match=words):
        read_run(runs / "gcbc-0")


def test_a_row_that_stands_twice_does_not_count_double(runs):
    path = runs / "gcbc-0" / "episodes.csv"
    path.write_text(path.read_text() + path.read_text().splitlines()[-1] + "\n")
    with pytest.raises(UserError, match="twice"):
        read_run(runs / "gcbc-0")


def test_rows_of_another_run_are_refused(runs):
    path = runs / "gcbc-0" / "episodes.csv"
    path.write_text((runs / "qhyer-0" / "episodes.csv").read_text())
    with pytest.raises(UserError, match="move the rows"):
        read_run(runs / "gcbc-0")


def test_half_a_line_ends_the_curve_and_nothing_else(runs):
    path = runs / "gcbc-0" / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 300, "lo')
    table = collect([runs])
    run = next(run for run in table.runs if run.name == "gcbc-0")
    assert [row["step"] for row in run.metrics] == [100, 200] and run.last
    assert any("line 3" in problem for problem in table.problems)


def test_optional_files_may_be_missing(runs):
    for name in ("metrics.jsonl", "timings.jsonl", "rollouts/00000200.npz", "analyses/goal_density.npz"):
        (runs / "qhyer-0" / name).unlink()
    table = collect([runs])
    assert len(table.runs) == 3 and not table.problems


def test_nothing_to_report(tmp_path, runs):
    with pytest.raises(UserError, match="does not exist"):
        collect([tmp_path / "nowhere"])
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UserError, match="contains no run"):
        collect([empty])
    with pytest.raises(UserError, match="no runs given"):
        collect([])
    for run in runs.iterdir():
        (run / "episodes.csv").unlink()
    with pytest.raises(UserError, match="qhyer eval"):
        collect([runs])


def test_a_missing_path_beside_good_ones_is_a_note(runs, tmp_path):
    table = collect([runs, tmp_path / "nowhere"])
    assert len(table.runs) == 3 and "nowhere" in table.problems[0]


def test_a_sealed_run_json_is_read(runs):
    from qhyer.storage import write_sealed_json

    path = runs / "gcbc-0" / "run.json"
    write_sealed_json(path, json.loads(path.read_text()))
    assert "seal" not in read_run(runs / "gcbc-0").info
