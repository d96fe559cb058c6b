from __future__ import annotations

import csv
import json
import math

import pytest

from qhyer.records import references
from qhyer.report import write_report
from qhyer.report.alike import unlike
from qhyer.report.collect import collect
from qhyer.report.commands import report
from qhyer.report.compare import compare, difference_text, tally
from qhyer.report.published import QHYER, QHYER_D4RL, QHYER_RECENT, canonical, for_dataset, published
from qhyer.report.tables import groups, success_csv, success_markdown, success_rows, warnings
from qhyer.rng import episode_seed


def rows_of(root):
    return success_rows(groups(collect([root])))


def test_exact_rows(runs):
    rows = {(row.agent, row.task): row for row in rows_of(runs)}
    assert set(rows) == {(agent, task) for agent in ("qhyer", "gcbc") for task in ("overall", "1", "2")}
    overall = rows["qhyer", "overall"]
    # seed 0: (100 + 50) / 2 = 75; seed 1: (75 + 25) / 2 = 50
    assert (overall.seeds, overall.episodes, overall.step) == (2, 16, "200")
    assert overall.mean == 62.5 and overall.std == pytest.approx(25 / math.sqrt(2))
    assert overall.interval == "bootstrap" and (overall.low, overall.high) == (50.0, 75.0)
    assert overall.iqm == pytest.approx((50 + 75) / 2)
    assert rows["qhyer", "1"].mean == 87.5 and rows["qhyer", "2"].mean == 37.5
    one = rows["gcbc", "overall"]
    assert one.mean == 12.5 and math.isnan(one.std) and one.interval == "wilson"
    assert (one.low, one.high) == pytest.approx((2.2417, 47.0887), abs=1e-3)  # Wilson, 1 of 8


def test_the_score_is_the_last_step(runs):
    rows = [row for row in rows_of(runs) if row.task == "overall"]
    assert {row.step for row in rows} == {"200"}  # qhyer was also evaluated at step 100, at 0 and 50 %


def test_csv_and_markdown(runs):
    rows = rows_of(runs)
    lines = success_csv(rows).splitlines()
    assert lines[0] == "dataset,agent,preset,variant,task,step,batch,seeds,episodes,mean,std,low,high,interval,iqm"
    assert lines[1].startswith("pointmaze-medium-navigate-v0,gcbc,demo,,overall,200,,1,8,12.5,,")
    assert len(lines) == 1 + len(rows)
    text = success_markdown(rows)
    assert "| agent | preset | seeds | success % | 95 % interval | task 1 | task 2 |" in text
    assert "| qhyer | demo | 2 | **62.5 ± 17.7** | 50–75 | **87.5** | **37.5** |" in text
    assert "| gcbc | demo | 1 | 12.5 | 2.2–47.1 | 25 | 0 |" in text


def test_intervals_do_not_depend_on_the_other_agents(runs, tmp_path, make_run):
    before = {(row.agent, row.task): (row.low, row.high) for row in rows_of(runs)}
    make_run(runs, "crl", 0, {1: [1, 0], 2: [0, 1]})
    after = {(row.agent, row.task): (row.low, row.high) for row in rows_of(runs)}
    assert before.items() <= after.items()


def test_seeds_that_score_alike_still_have_an_interval(tmp_path, make_run):
    for seed in range(3):
        make_run(tmp_path, "gcbc", seed, {1: [0] * 10})
    row = rows_of(tmp_path)[0]
    assert (row.mean, row.low, row.interval) == (0, 0, "wilson") and row.high == pytest.approx(11.35, abs=0.01)


def test_an_ablation_is_not_averaged_with_the_real_thing(tmp_path, make_run):
    make_run(tmp_path, "qhyer", 0, {1: [1, 1]})
    make_run(tmp_path, "qhyer", 1, {1: [1, 1]})
    make_run(tmp_path, "qhyer", 0, {1: [0, 0]}, name="ablated", config={"tau": 0.5})
    rows = [row for row in rows_of(tmp_path) if row.task == "overall"]
    assert [(row.variant, row.seeds, row.mean) for row in rows] == [("tau=0.5", 1, 0), ("tau=0.95", 2, 100)]


def test_an_exported_model_is_no_seed_of_its_run(tmp_path, make_run):
    make_run(tmp_path, "qhyer", 0, {1: [1, 1]})
    path = make_run(tmp_path, "qhyer", 0, {1: [0, 0]}, name="eval-mine") / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model": {"name": "mine", "dtype": "bf16"}}))
    rows = [row for row in rows_of(tmp_path) if row.task == "overall"]
    assert [(row.variant, row.seeds, row.mean) for row in rows] == [("", 1, 100), ("model mine, bf16", 1, 0)]


def test_data_may_vary_with_the_seed_but_not_within_it(tmp_path, make_run):
    """A seed may have data of its own; two sets of data for one seed are two experiments."""

    def on(data: str, seed: int, name: str) -> None:
        path = make_run(tmp_path, "qhyer", seed, {1: [1, 0]}, name=name) / "run.json"
        info = json.loads(path.read_text())
        path.write_text(json.dumps({**info, "data": {"fingerprint": data * 8}}))

    on("aa", 0, "first")
    on("bb", 1, "second")
    assert [(row.variant, row.seeds) for row in rows_of(tmp_path) if row.task == "overall"] == [("", 2)]
    on("cc", 0, "third")
    assert len([row for row in rows_of(tmp_path) if row.task == "overall"]) == 3


def test_what_must_be_known_before_comparing(tmp_path, make_run):
    make_run(tmp_path, "qhyer", 0, {1: [1, 1], 2: [1, 0]})
    make_run(tmp_path, "qhyer", 0, {1: [0, 0]}, name="again", step=400)
    notes = " ".join(warnings(groups(collect([tmp_path]))))
    assert "2 different runs have seed 0" in notes
    assert "different steps (200–400)" in notes
    assert "again was not evaluated on task 2" in notes


def test_a_run_that_is_not_trained_to_its_end_is_said_to_be(tmp_path, make_run):
    make_run(tmp_path, "gcbc", 0, {1: [1]}, step=2000, config={"steps": 3000})
    make_run(tmp_path, "gcbc", 1, {1: [1]}, step=3000, config={"steps": 3000})
    notes = [note for note in warnings(groups(collect([tmp_path]))) if "last evaluated at update" in note]
    assert len(notes) == 1 and notes[0].endswith("was last evaluated at update 2,000 of 3,000")


def test_a_preset_with_other_settings_is_said_to_be(tmp_path, make_run):
    make_run(tmp_path, "gcbc", 0, {1: [1]}, config={"steps": 20, "hidden": [16], "learning_rate": 3e-4})
    found = groups(collect([tmp_path]))
    (note,) = warnings(found, lambda *_: {"steps": 3400, "hidden": [512, 512], "learning_rate": 3e-4, "new": 1})
    assert note.endswith("not the preset as it stands: steps=20 (preset: 3400), hidden=[16] (preset: [512, 512])")
    assert warnings(found, lambda *_: None) == warnings(found) == []


def evaluate(root, make_run, agent, tasks, episodes, *, seed=0, protocol=0, rate=1, dataset="cube-single-play-v0"):
    """A run as `eval --tasks TASKS --episodes EPISODES --seed PROTOCOL` leaves it."""
    folder = make_run(root, agent, seed, {task: [rate] * episodes for task in tasks}, dataset=dataset)
    path = folder / "episodes.csv"
    header, *lines = csv.reader(path.read_text().splitlines())
    for line in lines:
        line[8] = str(episode_seed(protocol, "pointmaze-medium-v0", int(line[6]), int(line[7])))
    path.write_text("".join(",".join(line) + "\n" for line in [header, *lines]))


def test_agents_of_other_tasks_are_not_compared(tmp_path, make_run, capsys):
    root = tmp_path / "runs"
    evaluate(root, make_run, "gcbc", [2], 4)
    evaluate(root, make_run, "crl", range(1, 6), 4, rate=0)
    evaluate(root, make_run, "qrl", [1, 2, 3, 4], 4, rate=0)
    evaluate(root, make_run, "qhyer", range(1, 6), 4, seed=1)
    note = "on cube-single-play-v0 not all were evaluated on the same tasks, so overall numbers cannot be compared: "
    note += "task 2 (gcbc); tasks 1, 2, 3, 4 (qrl); tasks 1, 2, 3, 4, 5 (crl, qhyer)"
    report((root,), out=tmp_path / "out")
    assert f"note: {note}\n" in (printed := capsys.readouterr().out)
    table = (tmp_path / "out" / "success.md").read_text()
    page = (tmp_path / "out" / "index.html").read_text()
    assert f"- {note}\n" in table and note in page
    assert "| gcbc | demo | 1 | 100 | " in table and "| qhyer | demo | 1 | **100** | " in table
    names = ["qhyer", "crl", "gcbc", "qrl"]  # a part of the tasks is never first
    assert sorted(names, key=lambda name: printed.index(f"\n{name} ")) == names
    assert page.index("qhyer</th>") < page.index("crl</th>") < page.index("gcbc</th>") < page.index("qrl</th>")
    found = {line.agent: line for line in compare(rows_of(root))}
    assert found["gcbc"].verdict == "task 2 only" and math.isnan(found["gcbc"].difference)
    assert found["qrl"].verdict == "tasks 1, 2, 3, 4 only" and found["qhyer"].verdict == "agrees"
    assert '<td class="t tag">task 2 only</td>' in page and "2 comparisons without a verdict" in page
    line = next(csv.DictReader((tmp_path / "out" / "published.csv").read_text().splitlines()))
    assert (line["agent"], line["verdict"]) == ("crl", "below")


def test_one_line_of_few_tasks_has_no_verdict(tmp_path, make_run):
    evaluate(tmp_path, make_run, "gcbc", [2, 3], 4)
    evaluate(tmp_path, make_run, "crl", [2, 3], 4, rate=0)
    assert unlike(groups(collect([tmp_path]))) == []  # like each other, so one of them is the best
    assert "| gcbc | demo | 1 | **100** |" in success_markdown(rows_of(tmp_path))
    found = {line.agent: line for line in compare(rows_of(tmp_path))}
    assert found["gcbc"].verdict == found["crl"].verdict == "tasks 2, 3 only"
    assert sum(tally(list(found.values())).values()) == 0
    page = write_report([tmp_path], tmp_path / "out").page.read_text()
    assert "2 comparisons without a verdict" in page and "None of the agents run here" not in page


def test_other_episodes_and_seeds_are_said_to_be(tmp_path, make_run):
    evaluate(tmp_path, make_run, "gcbc", [1, 2], 4)
    evaluate(tmp_path, make_run, "crl", [1, 2], 4)
    assert unlike(groups(collect([tmp_path]))) == []
    evaluate(tmp_path, make_run, "qrl", [1, 2], 6, protocol=7)
    assert unlike(groups(collect([tmp_path]))) == [
        "on cube-single-play-v0 not all were evaluated on as many episodes a task: 4 (crl, gcbc); 6 (qrl)",
        "on cube-single-play-v0 not all were evaluated with the same seed, so not on the same episodes: "
        "seed 0 (crl, gcbc); seed 7 (qrl)",
    ]
    evaluate(tmp_path, make_run, "qrl", [1, 2], 6, seed=1)  # another seed of qrl's, on the usual episodes
    evaluate(tmp_path, make_run, "qrl", [1, 2], 6, dataset="cube-double-play-v0", seed=2, protocol=3)
    _, last = unlike(groups(collect([tmp_path])))
    assert last.endswith("seed 0 (crl; gcbc; qrl, run qrl-1); seed 7 (qrl, run qrl-0)")


def test_an_interval_holds_the_mean_of_seeds_with_other_tasks(tmp_path, make_run):
    make_run(tmp_path, "gcbc", 0, {task: [int(task == 2), 0] for task in range(1, 6)})  # 10 %
    make_run(tmp_path, "gcbc", 1, {2: [1, 1]})  # 100 %
    row, *tasks = rows_of(tmp_path)
    assert (row.mean, row.interval, row.low, row.high) == pytest.approx((55, "bootstrap", 10, 100))
    assert all(each.low <= each.mean <= each.high for each in tasks)
    (note,) = (each for each in warnings(groups(collect([tmp_path]))) if "not evaluated" in each)
    assert note.endswith("on task 1, 3, 4, 5; overall, each run counts by the mean of the tasks it has")
    (line,) = (line for line in compare(rows_of(tmp_path)) if line.agent == "gcbc")
    assert line.verdict == "seeds differ in tasks" and math.isnan(line.difference)


def test_published_numbers_add_up_to_the_totals_their_paper_prints():
    totals = {
        ("cube", "play"): [24, 68, 16, 0, 8, 90, 111, 6, 35, 152],
        ("cube", "noisy"): [45, 64, 46, 2, 10, 94, 124, 29, 43, 145],
        ("puzzle", "play"): [26, 19, 29, 11, 2, 36, 147, 1, 8, 169],
        ("puzzle", "noisy"): [74, 104, 54, 11, 1, 98, 160, 0, 39, 172],
        ("visual-cube", "play"): [149, 148, 100, 0, 21, 84, 46, 62, 50, 99],
    }
    agents = ["HIQL", "SAW", "OTA", "Eik-HIQRL", "GCBC", "GCIVL", "GCIQL", "QRL", "CRL", "QHyer"]
    ours = [entry for entry in published() if entry.source == QHYER]
    for (env, kind), expected in totals.items():
        for agent, total in zip(agents, expected):
            found = [
                entry.mean
                for entry in ours
                if entry.agent == agent and entry.dataset.startswith(f"{env}-") and f"-{kind}-" in entry.dataset
            ]
            # Eik-HIQRL is not reported on pixels
            assert sum(found) == total, (env, kind, agent)
    assert len(ours) == 23 * 10 - 5
    assert all(entry.source and (entry.measure == "score" or 0 <= entry.mean <= 100) for entry in published())
    recent: dict[str, list[float]] = {}
    for entry in published():
        if entry.source == QHYER_RECENT:
            recent.setdefault(canonical(entry.agent), []).append(entry.mean)
    averages = {agent: round(sum(means) / len(means), 1) for agent, means in recent.items()}
    assert averages == {"trl": 10.0, "sharsa": 28.7, "deas": 23.9, "qcfql": 12.8}  # as printed
    mazes = [entry for entry in published() if entry.source == QHYER_D4RL]
    sums = {}
    for entry in mazes:
        assert entry.measure == "score"
        sums[entry.agent] = round(sums.get(entry.agent, 0) + entry.mean, 1)
    printed = [136.5, 158.0, 39.2, 70.6, 58.2, 148.3, 58.3, 182.1, 182.1, 277.4, 140.7, 291.5]
    assert list(sums.values()) == printed and list(sums)[-1] == "QHyer" and len(mazes) == 24
    keys = [(entry.dataset, entry.agent, entry.source) for entry in published()]
    assert len(keys) == len(set(keys))


def test_names_of_agents_meet():
    assert canonical("Eik-HIQRL") == canonical("eik_hiqrl")
    assert canonical("GC-QCFQL") == canonical("QC-FQL") == canonical("qc_fql") and canonical("GCIQL") == "gciql"
    found = [entry.agent for entry in for_dataset("pointmaze-medium-navigate-v0")]
    assert found == ["GCBC", "GCIVL", "GCIQL", "QRL", "CRL", "HIQL"]


def test_losses_are_shown(tmp_path, make_run):
    def result(agent, dataset, successes, trials):
        outcomes = [1] * successes + [0] * (trials - successes)
        make_run(tmp_path, agent, 0, {task: outcomes[task - 1 :: 5] for task in range(1, 6)}, dataset=dataset)

    result("qhyer", "cube-single-play-v0", 50, 100)  # published 84
    result("gciql", "cube-single-play-v0", 90, 100)  # published 68
    result("gcbc", "cube-single-play-v0", 6, 100)  # published 6
    result("mine", "cube-single-play-v0", 1, 100)
    lines = compare(rows_of(tmp_path))
    found = {line.agent: line for line in lines}
    assert found["qhyer"].verdict == "below" and difference_text(found["qhyer"]) == "−34"
    assert found["gciql"].verdict == "above" and found["gciql"].published_std == 6
    assert found["gcbc"].verdict == "agrees" and found["gcbc"].difference == pytest.approx(0)
    assert found["mine"].verdict == "unpublished"
    assert found["GCIVL"].verdict == "not run" and found["GCIVL"].seeds == 0
    assert tally(lines) == {"above": 1, "agrees": 1, "below": 1}
    # two papers disagree about SAW on this dataset: both numbers stand
    assert sorted(line.published for line in lines if line.agent == "SAW") == [23, 72]


def test_scores_of_returns(tmp_path, make_run):
    low, high = (references()["maze2d-umaze-v1"][key]["mean"] for key in ("random", "controller"))
    middle = (low + high) / 2
    for seed, values in enumerate(([low, high], [high, high])):  # scores 50 and 100
        make_run(tmp_path, "qhyer", seed, {1: [0, 1]}, dataset="maze2d-umaze-v1", returns=values)
    make_run(tmp_path, "gcbc", 0, {1: [0, 1]}, dataset="maze2d-umaze-v1", returns=[low, high])
    make_run(tmp_path, "crl", 0, {1: [0, 1]}, dataset="pointmaze-medium-navigate-v0")
    rows = {row.agent: row for row in rows_of(tmp_path) if row.task == "overall"}
    assert rows["qhyer"].score == pytest.approx(75) and rows["qhyer"].score_std == pytest.approx(50 / math.sqrt(2))
    assert (rows["qhyer"].score_low, rows["qhyer"].score_high) == pytest.approx((50, 100))
    assert rows["qhyer"].returned == pytest.approx((middle + high) / 2)
    # one seed: over its episodes
    assert rows["gcbc"].score == pytest.approx(50) and math.isnan(rows["gcbc"].score_std)
    assert (rows["gcbc"].score_low, rows["gcbc"].score_high) == pytest.approx((0, 100), abs=1e-6)
    assert math.isnan(rows["crl"].score) and math.isnan(rows["crl"].returned)

    everything = rows_of(tmp_path)
    lines = success_csv(everything).splitlines()
    assert lines[0].endswith(",iqm,return,score,score_std,score_low,score_high")
    assert any(line.endswith(",,,,,") for line in lines[1:])  # crl's
    text = success_markdown(everything)
    assert "| agent | preset | seeds | return | score | score 95 % | success % | 95 % interval | task 1 |" in text
    assert "| qhyer | demo | 2 | " in text and " | **75 ± 35.4** | 50–100 | " in text
    assert "| agent | preset | seeds | success % | 95 % interval | task 1 |" in text and "own references" in text


def test_returns_pass_through_a_report(tmp_path, make_run):
    make_run(tmp_path / "runs", "gcbc", 0, {1: [0, 1]}, dataset="maze2d-umaze-v1", returns=[0.0, 223.0])
    made = write_report([tmp_path / "runs"], tmp_path / "out")
    assert "score 95 %" in made.page.read_text()
    assert (tmp_path / "out" / "episodes.csv").read_text().splitlines()[0].endswith(",seconds,return")
    again = collect([tmp_path / "out" / "episodes.csv"])
    assert [row.returned for row in again.episodes] == [0.0, 223.0]
    assert success_rows(groups(again))[0].score == made.success[0].score


def test_lines_are_ranked_by_score_where_there_is_one(tmp_path, make_run, capsys):
    """All but the worst reach Maze2D's goal some time: success would put them in the wrong order, or in none."""
    maze = dict(dataset="maze2d-umaze-v1")
    make_run(tmp_path / "runs", "dt", 0, {1: [1, 1]}, returns=[60.0, 60.0], **maze)
    make_run(tmp_path / "runs", "qhyer", 0, {1: [0, 1]}, returns=[0.0, 223.0], **maze)
    made = write_report([tmp_path / "runs"], tmp_path / "out")
    text = success_markdown(made.success)
    assert "| **40.4** |" in text and "| 50 | 9.5–90.5 |" in text and "| 12.8 |" in text
    page = made.page.read_text()
    assert page.count("<h1>Scores on maze2d-umaze-v1</h1>") == 1 and "<td class=best>40.4</td>" in page
    assert page.index("40.4") < page.index("12.8") and "Scores on maze2d-umaze-v1: qhyer 40.4; dt 12.8." in page
    assert "<td class=best>50</td>" not in page and "another scale" in page and "cannot be subtracted" in page


def test_a_score_is_not_compared_with_one_by_other_references(tmp_path, make_run):
    make_run(tmp_path, "dt", 0, {1: [1, 1]}, dataset="maze2d-umaze-v1", returns=[60.0, 60.0])
    make_run(tmp_path, "rvs", 0, {1: [1, 1]}, dataset="maze2d-umaze-v1", returns=[60.0, 60.0])
    lines = compare(rows_of(tmp_path))
    found = {line.agent: line for line in lines}
    assert (found["dt"].published, found["dt"].verdict) == (31, "other scale")
    assert found["dt"].ours == pytest.approx(12.8, abs=0.05) and math.isnan(found["dt"].difference)
    assert found["rvs"].verdict == "unpublished" and found["rvs"].ours == found["dt"].ours
    assert found["QHyer"].verdict == "not run" and {line.measure for line in lines} == {"score"}
    assert sum(tally(lines).values()) == 0


def test_a_variant_goes_by_the_name_its_sweep_gave_it(tmp_path, make_run):
    make_run(tmp_path, "dt", 0, {1: [1]}, preset="paper", name="dt-paper-s0-0123abcd")
    for seed in (0, 1):
        make_run(
            tmp_path,
            "dt",
            seed,
            {1: [0]},
            preset="paper",
            name=f"dt-paper-backbone-s{seed}-89abcdef",
            config={"tau": 1},
        )
    make_run(tmp_path, "hdt", 0, {1: [0]}, preset="paper", name="hdt-paper-backbone-s0-89abcdef")
    found = groups(collect([tmp_path]))
    assert [(group.agent, group.variant, len(group.runs)) for group in found] == [
        ("dt", "", 1),
        ("dt", "backbone", 2),
        ("hdt", "backbone", 1),
    ]
    # an unnamed difference within the variant still is one
    make_run(tmp_path, "dt", 2, {1: [0]}, preset="paper", name="dt-paper-backbone-s2-00000000", config={"tau": 2})
    variants = [group.variant for group in groups(collect([tmp_path])) if group.agent == "dt"]
    assert variants == ["", "backbone, tau=1", "backbone, tau=2"]
