"""Named ablations: manifests that hold together, runs through the sweep, and a table that is what the rows say."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from qhyer import ablate, cli, manifest, presets, runs, sweep
from qhyer.data import registry
from qhyer.data.generate import generate
from qhyer.evaluate import EvalConfig, plan
from qhyer.records import EpisodeRow, add_rows, read_rows
from qhyer.report.statistics import wilson

ROOT = Path(__file__).parents[1]
DATASET = "pointmaze-medium-stitch-v0"
VARIANTS = {
    "q-estimator": ["none", "cvae", "contrastive", "flow"],
    "tokenization": ["no_goal", "separate", "concat"],
    "regression": ["mse", "quantile", "expectile"],
    "expectile": [f"expectile={tau}" for tau in (0.5, 0.7, 0.9, 0.95, 0.99)],
    "backbone": [f"{kind}{with_}" for with_ in ("", "-rtg") for kind in ("attention", "mamba", "hybrid")],
    "context": [f"K={k}" for k in (1, 5, 10, 20)],
    "flow-blocks": [f"flow_blocks={n}" for n in (2, 4, 6, 8)],
    "ssm": ["hybrid", "hybrid-mamba2", "mamba", "mamba2"],
}
SMALL = ["batch_size=8", "width=16", "layers=1", "encoder_width=16", "flow_channels=8", "representation=4"]


@pytest.fixture(scope="module")
def maze(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    generate(registry.get(DATASET), out=folder, episodes=4, rows=30, workers=1, progress=False)
    return folder


@pytest.fixture
def here(maze, tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QHYER_DATA", str(maze))
    return tmp_path


def call(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(list(map(str, arguments)))
    return int(ended.value.code or 0)


def tiny(name: str, *more: object, seeds: Sequence[int] = (0, 1)) -> int:
    options = ["--dataset", "pointmaze-medium-stitch", "--preset", "demo", "--seeds", *seeds, "--steps", 5]
    options += ["--episodes", 1, "--tasks", 1, 3, "--device", "cpu", "--override", *SMALL]
    return call("ablate", name, *options, *more)


# ------------------------------------------------------------------------------------------------- what there is


def test_all_are_there_and_ask_something():
    found = ablate.ablations()
    assert list(found) == [*(name for name in VARIANTS if name != "ssm"), "beyond", "chunk", "without", "ssm"]
    for name, ablation in found.items():
        assert ablation.question.endswith("?") and ablation.paper and ablation.source
        names = ablate.variant_names(ablation)
        assert names == VARIANTS.get(name, names) and len(names) >= 3
        assert not ablation.full or ablation.full in names
        assert all(set(printed) <= set(names) for printed in ablation.numbers.values()), name
        assert all(dataset in registry.DATASETS for dataset in ablation.numbers)


@pytest.mark.parametrize("name", [*VARIANTS, "beyond", "chunk"])
@pytest.mark.parametrize(
    "dataset, preset",
    [("cube-single-play", "fast"), (DATASET, "demo"), ("puzzle-3x3-noisy", "best"), ("scene-play", "best")],
)
def test_variants_are_apart_and_trained_alike(name, dataset, preset):
    """On the default's data and on a laptop's: equal updates, no two variants alike, and nothing else differs."""
    ablation = ablate.get(name)
    found = ablate.variants(ablation, {"datasets": [dataset], "preset": preset, "seeds": [0]})
    cells = [cells[0] for cells in found.values()]
    assert [variant for _, variant in found] == ablate.variant_names(ablation)
    assert len({cell.folder for cell in cells}) == len({cell.config for cell in cells}) == len(cells)
    assert len({(cell.config.steps, cell.config.batch_size, cell.train) for cell in cells}) == 1
    allowed = {
        "q-estimator": {"conditioning", "critic"},
        "backbone": {"backbone", "conditioning"},
        "context": {"context", "flow_batch"},
        "flow-blocks": {"flow_blocks"},
        "ssm": {"ssm", "backbone"},
    }.get(name, {name})
    changed = {
        field.name
        for field in dataclasses.fields(cells[0].config)
        if len({getattr(cell.config, field.name) for cell in cells}) > 1
    }
    if name == "beyond":  # one option at a time
        first = dataclasses.asdict(cells[0].config)
        for cell in cells[1:]:
            assert sum(first[key] != value for key, value in dataclasses.asdict(cell.config).items()) == 1
    elif name == "chunk":  # some presets have one step of context themselves
        assert {"chunk", "flow_batch"} <= changed <= {"chunk", "flow_batch", "context"}
    else:
        assert changed == allowed


@pytest.mark.parametrize("dataset", ["puzzle-3x3-play", "cube-double-play", "scene-play"])
def test_without_takes_one_option_of_best_away(dataset):
    found = ablate.variants(ablate.get("without"), {"datasets": [dataset], "seeds": [0]})
    (best, *others) = (cells[0] for cells in found.values())
    paper = presets.resolve("qhyer", "paper", f"{dataset}-v0")[0]
    full, plain = dataclasses.asdict(best.config), dataclasses.asdict(paper)
    assert best.folder.name.startswith("qhyer-best-s0-") and len({cell.folder for cell in others}) == len(others) == 7
    for cell in others:
        changed = {key: value for key, value in dataclasses.asdict(cell.config).items() if full[key] != value}
        if cell.variant == "no-q":
            assert changed == {"conditioning": "none", "action_head": "mixture"}
        else:
            assert changed == {key: plain[key] for key in changed} and len(changed) == 1, cell.variant


def test_the_critic_sees_as_many_transitions_at_every_context():
    cells = manifest.cells(ablate.get("context").values, "")
    assert {cell.config.context * cell.config.flow_batch for cell in cells} == {5.0}  # type: ignore[attr-defined]


def test_the_full_method_is_one_run_for_all():
    """Every ablation of the default dataset shares the run of the unchanged preset."""
    folders = {}
    for name, ablation in ablate.ablations().items():
        if name == "without":  # of another preset
            continue
        found = ablate.variants(ablation, {})
        full = [variant for (_, variant), cells in found.items() if not cells[0].variant]
        assert len(full) == 1 and full[0] in (ablation.full, "expectile=0.7", "K=20", "flow_blocks=6"), name
        folders[name] = [cell.folder for cell in found["cube-single-play-v0", full[0]]]
        same = "expectile=0.99" if name == "expectile" else full[0]  # the paper's tau is not the preset's
        assert ablation.published("cube-single-play-v0", same) == (84.0, 4.0)
    assert len({tuple(each) for each in folders.values()}) == 1
    assert folders["beyond"][0].name.startswith("qhyer-fast-s0-")


def test_numbers_of_the_paper():
    backbone = ablate.get("backbone")
    printed = [backbone.published("cube-single-noisy-v0", name) for name in ("attention", "mamba", "hybrid")]
    assert printed == [(60.0, 3.0), (91.0, 3.0), (95.0, 5.0)]
    assert math.isnan(backbone.published("cube-single-play-v0", "hybrid-rtg")[0])
    assert math.isnan(backbone.published(DATASET, "hybrid")[0])
    assert ablate.get("q_estimator").published("scene-play-v0", "flow") == (53.0, 2.0)


def test_a_packaged_ablation_is_a_manifest():
    path = Path(ablate.__file__).parent / "ablations" / "q-estimator.toml"
    assert len(manifest.read(path)) == 16


def test_listed(capsys):
    assert call("ablate") == 0
    output = capsys.readouterr().out
    assert "variants: none, cvae, contrastive, flow" in output
    assert "cube-single-play: attention 74 ± 1, mamba 80 ± 2, hybrid 84 ± 4" in output
    assert call("list", "ablations") == 0
    output = capsys.readouterr().out
    assert all(name in output for name in ablate.ablations())


def test_the_page_has_them_all():
    text = (ROOT / "docs" / "ablations.md").read_text()
    for name, ablation in ablate.ablations().items():
        section = text.split(f"\n## {name}\n")[1].split("\n## ")[0]
        assert ablation.question in section and f"qhyer ablate {name}" in section
        assert all(f"| {variant} |" in section for variant in ablate.variant_names(ablation)), name


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["q-estimater"], "no ablation is called 'q-estimater'; did you mean q-estimator?"),
        (["context", "--override", "width"], "--override width: write FIELD=VALUE"),
        (["context", "--override", "widht=3"], "no field of qhyer is called 'widht'; did you mean width?"),
        (["context", "--dataset", "cube-singel-play"], "no dataset is called 'cube-singel-play'; did you mean"),
        (["context", "--preset", "quick"], "ablation context: preset: no preset of qhyer is called 'quick'"),
        (["context", "--steps", "0"], "steps must be at least 1"),
        (["q-estimator", "--override", "goal_frame=relative"], "a contrastive critic needs goal_frame absolute"),
        (["context", "--steps", "20", "--override", "steps=7"], "--steps 20 and --override steps=7 contradict"),
        (["ssm", "--override", "qhyer={ssm='mamba2'}"], "write FIELD=VALUE for each field, not a table"),
    ],
)
def test_errors(arguments, words, here, capsys):
    assert call("ablate", *arguments) == 2
    assert words in " ".join(capsys.readouterr().err.split())
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    "name, override, those",
    [
        ("ssm", "ssm=mamba2", "hybrid-mamba2, mamba2"),
        ("ssm", "backbone=mamba", "mamba, mamba2"),
        ("regression", "regression=mse", "mse, quantile"),
        ("expectile", "expectile=0.99", "expectile=0.5, expectile=0.7, expectile=0.9, expectile=0.95, expectile=0.99"),
        ("tokenization", "tokenization=separate", "no_goal, separate"),
        ("q-estimator", "critic=cvae", "cvae, contrastive"),
        ("backbone", "conditioning=rtg", "attention-rtg, mamba-rtg, hybrid-rtg"),
        ("chunk", "chunk=5", "chunk=1, chunk=3, chunk=5, chunk=10"),
    ],
)
@pytest.mark.parametrize("dry", [["--dry-run"], []])
def test_what_an_ablation_varies_is_not_overridden(name, override, those, dry, here, capsys):
    """A variant that leaves the field alone would be another under its own name: nothing is shown nor trained."""
    assert tiny(name, override, *dry) == 2
    output = capsys.readouterr()
    field = override.partition("=")[0]
    told = f"--override {field}: ablation {name} varies {field} (variants that set it: {those})"
    assert told in " ".join(output.err.split()) and not output.out and not Path("runs").exists()


@pytest.mark.parametrize("dry", [["--dry-run"], []])
def test_tasks_are_looked_at_before_the_training(dry, here, capsys):
    assert call("ablate", "ssm", "--dataset", DATASET, "--preset", "demo", "--tasks", 9, *dry) == 2
    told = "ablation ssm: eval: pointmaze-medium-v0 has tasks 1 to 5, not 9"
    assert told in " ".join(capsys.readouterr().err.split()) and not Path("runs").exists()


def test_what_an_ablation_does_not_vary_is_overridden(here, capsys):
    for name, override in (("backbone", "expectile=0.99"), ("q-estimator", "expectile=0.99"), ("ssm", "context=2")):
        assert tiny(name, override, "--dry-run") == 0
    assert call("ablate", "ssm", "--steps", 7, "--override", "steps=7", "--dry-run") == 0  # said twice, once would do
    assert "; 7 updates each" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------------- the answer


WINS = {"none": (0, 0, 0, 0), "cvae": (1, 0, 1, 0), "contrastive": (1, 1, 1, 0), "": (1, 1, 1, 1)}
"""by hand: tasks 1 and 3 of seed 0, then of seed 1; the unchanged preset's folder has no variant in its name"""


def by_hand(run: Path, config: EvalConfig, **_: object) -> float:
    """Rows as an evaluation would write them, with the successes above; an episode in the maze takes seconds."""
    info = runs.read(run)
    variant = "" if run.name.startswith("qhyer-demo-s") else run.name.removeprefix("qhyer-demo-").rpartition("-s")[0]
    specs = [spec for shard in plan(config, info["environment"], 3) for spec in shard]
    assert [spec.task for spec in specs] == [1, 3] == list(config.tasks or ())
    about = (run.name, "qhyer", "demo", DATASET, info["seed"], 5)
    rows = [
        EpisodeRow(*about, spec.task, spec.episode, spec.seed, success, 10, 0.1)
        for spec, success in zip(specs, WINS[variant][2 * info["seed"] :])
    ]
    add_rows(run / "episodes.csv", rows)
    return 0.0


def test_from_the_command_to_the_table(here, capsys, monkeypatch):
    """Four variants of two seeds, five updates each; all but one evaluated by hand, and the table counted by hand."""
    assert tiny("q-estimator", "--dry-run") == 0
    assert "8 runs, 0 finished, 8 to do" in capsys.readouterr().out and not Path("runs").exists()
    assert tiny("q-estimator", "--only", "cvae-s0") == 0
    output = capsys.readouterr().out
    assert "Which estimator of Q" in output and output.count("not run") == 3
    (run,) = (path.parent for path in Path("runs/ablations").rglob("run.json"))
    rows = read_rows(run / "episodes.csv")
    assert [(row.task, row.step, row.success) for row in rows] == [(1, 5, 0), (3, 5, 0)]  # five updates reach nothing
    by_hand(run, EvalConfig(episodes=1, tasks=(1, 3)))
    assert [row.env_seed for row in read_rows(run / "episodes.csv")] == [row.env_seed for row in rows]
    with monkeypatch.context() as patch:
        patch.setattr(runs, "evaluate_run", by_hand)
        assert tiny("q-estimator") == 0
    assert "8 runs, 1 finished, 7 to do" in capsys.readouterr().out
    folders = sorted(path.parent for path in Path("runs/ablations").rglob("run.json"))
    assert len(folders) == 8 and sum(path.name.startswith("qhyer-demo-s") for path in folders) == 2

    monkeypatch.setattr(sweep, "run_cell", None)  # nothing is run again
    assert tiny("q-estimator") == 0
    output = capsys.readouterr().out
    assert "8 runs, 8 finished, 0 to do" in output
    stem = Path("runs/ablations") / f"q-estimator-{DATASET}-demo"
    with open(f"{stem}.csv", newline="") as file:
        table = {row["variant"]: row for row in csv.DictReader(file)}
    assert list(table) == VARIANTS["q-estimator"]
    # Scores of the two seeds: none 0, 0; cvae 1/2, 1/2; contrastive 1, 1/2; flow 1, 1.
    means = {name: float(row["mean"]) for name, row in table.items()}
    assert means == {"none": 0.0, "cvae": 50.0, "contrastive": 75.0, "flow": 100.0}
    assert float(table["contrastive"]["std"]) == pytest.approx(100 * math.sqrt(2 * 0.25**2))
    assert {row["seeds"] for row in table.values()} == {"2"} and {row["episodes"] for row in table.values()} == {"4"}
    assert {(row["updates"], row["batch"], row["preset"]) for row in table.values()} == {("5", "8", "demo")}
    for name, count in (("none", 0), ("cvae", 2), ("flow", 4)):  # seeds alike on each task: Wilson's over 4 episodes
        assert table[name]["interval"] == "wilson"
        interval = [float(table[name][end]) / 100 for end in ("low", "high")]
        assert interval == pytest.approx(wilson(count, 4), abs=1e-9)
    # Contrastive: task 1 always, task 3 in one seed of two; resampled, that is 0, 1/2 or 1, and the mean 1/2, 3/4 or 1.
    assert [float(table["contrastive"][end]) for end in ("low", "high")] == [50.0, 100.0]
    assert table["contrastive"]["interval"] == "bootstrap" and all(row["paper"] == "" for row in table.values())

    text = Path(f"{stem}.md").read_text()
    assert "| contrastive | 75 ± 35.4 | 50–100 | 2 | 5 × 8 |" in text and "No Q < CVAE < CRL < flow" in text
    assert "75 ± 35.4" in output and f"written: {stem}.csv" in output
    assert Path(f"{stem}.png").read_bytes().startswith(b"\x89PNG") and "contrastive" in Path(f"{stem}.svg").read_text()

    assert "same data" not in output
    (flow,) = (folder for folder in folders if folder.name.startswith("qhyer-demo-s0"))
    info = json.loads((flow / "run.json").read_text())
    info["data"]["fingerprint"] = "f" * 64
    (flow / "run.json").write_text(json.dumps(info))
    assert tiny("q-estimator") == 0
    told = capsys.readouterr().out.replace("\n", " ")
    assert "Not all were trained on the same data of this name: none, cvae, contrastive, flow on" in told
    assert f"; flow on {'f' * 12}." in " ".join(Path(f"{stem}.md").read_text().split())


def test_own_data_and_environment(here, capsys, monkeypatch):
    file, small = "mine.npz", ["--preset", "demo", "--seeds", 0, "--steps", 5, "--tasks", 1, "--override", *SMALL]
    shutil.copy(registry.find(DATASET), file)
    ask = ["ablate", "tokenization", "--dataset", file, *small, "--episodes", 1, "--device", "cpu", "--only", "no_goal"]
    assert call(*ask) == 2 and "mine.npz in, or write eval = false (with `qhyer ablate`: --env)" in " ".join(
        capsys.readouterr().err.split()
    )
    seen = {}

    def stand_in(run: Path, config: EvalConfig, **options: object) -> float:
        seen[run.name] = options["environment"]
        return 0.0

    monkeypatch.setattr(runs, "evaluate_run", stand_in)
    monkeypatch.setattr(sweep, "status", lambda cell: sweep.Status("new"))
    assert call(*ask, "--goal", 1, 0, "--env", "pointmaze-medium-v0") == 0
    (run,) = (path.parent for path in Path("runs/ablations/mine").rglob("run.json"))
    assert runs.read(run)["spec"]["goal_indices"] == [1, 0] and seen == {run.name: "pointmaze-medium-v0"}


def test_tables_of_other_options_stay(here, capsys, monkeypatch):
    """One of other settings has a name of its own; one of the same keeps the seeds it had."""
    monkeypatch.setattr(runs, "evaluate_run", by_hand)
    out = Path("runs/ablations")
    stem = f"regression-{DATASET}-demo"

    def tables() -> dict[str, str]:
        return {path.name: path.read_text() for path in out.glob("*.csv")}

    assert tiny("regression", "--only", "demo-s0-") == 0
    first = tables()
    assert list(first) == [f"{stem}.csv"] and ",5,8,2,4," not in first[f"{stem}.csv"]
    assert "Seeds 0; fp32" in capsys.readouterr().out and "Seeds 0; fp32" in (out / f"{stem}.md").read_text()
    assert json.loads((out / f"{stem}.json").read_text())["seeds"] == [0]  # seed 1 was asked for, and not made
    with monkeypatch.context() as patch:
        patch.setattr(sweep, "run_cell", None)
        assert tiny("regression", "--only", "demo-s0-", seeds=[0]) == 0
    output = capsys.readouterr().out
    assert "of earlier calls" not in output and "Seeds 0; fp32" in output and tables() == first
    assert tiny("regression", "width=8", "expectile=0.8", "--only", "demo-s0-") == 0
    output = " ".join(capsys.readouterr().out.split())
    (own,) = set(tables()) - set(first)
    assert own.startswith(f"{stem}-") and tables()[f"{stem}.csv"] == first[f"{stem}.csv"]
    told = "of other settings (width 16 there and 8 here, expectile 0.9 there and 0.8 here)"
    assert f"note: {out / stem}.csv is {told}: it stays, and this table is {out / own}" in output
    assert "expectile=0.8" in (out / own.replace(".csv", ".md")).read_text()
    kept = tables()
    assert tiny("regression", "width=8", "expectile=0.8", "--only", "demo-s0-") == 0
    assert tables() == kept and "other settings" not in capsys.readouterr().out

    assert tiny("regression", "--only", "demo-s1-") == 0  # a second seed of the first table
    two = tables()[f"{stem}.csv"]
    monkeypatch.setattr(sweep, "run_cell", None)
    assert tiny("regression", "--only", "demo-s0-", seeds=[0]) == 0
    assert tables()[f"{stem}.csv"] == two and "note: with seeds 1 of earlier calls" in capsys.readouterr().out
    (row,) = [row for row in csv.DictReader(two.splitlines()) if int(row["seeds"])]
    assert (row["variant"], row["seeds"], row["episodes"]) == ("expectile", "2", "4")

    (out / f"{stem}.json").unlink()  # as earlier versions left it
    (out / own.replace(".csv", ".json")).write_text("{}")
    assert tiny("regression", "--only", "demo-s0-") == 0
    assert f"note: {out / stem}.csv does not say its settings" in " ".join(capsys.readouterr().out.split())
    assert len(tables()) == 3 and tables()[f"{stem}.csv"] == two


def test_rows_of_a_wider_evaluation_do_not_mix(here, monkeypatch):
    """A table counts the episodes that were asked for, whatever else has been evaluated since."""
    with monkeypatch.context() as patch:
        patch.setattr(runs, "evaluate_run", by_hand)
        assert tiny("regression", "--only", "demo-s0-") == 0
    (run,) = (path.parent for path in Path("runs/ablations").rglob("run.json"))
    rows = read_rows(run / "episodes.csv")
    add_rows(run / "episodes.csv", [*rows, dataclasses.replace(rows[0], task=5, env_seed=1, success=0)])
    assert tiny("regression", "--only", "demo-s0-") == 0
    text = Path(f"runs/ablations/regression-{DATASET}-demo.csv").read_text()
    (row,) = [row for row in csv.DictReader(text.splitlines()) if int(row["seeds"])]
    assert (row["mean"], row["episodes"]) == ("100", "2")


def test_two_ablations_share_the_full_run_and_two_datasets_get_a_table_each(here, capsys, monkeypatch):
    """What one ablation has made is finished for the next; with no run at all the table says so."""
    with monkeypatch.context() as patch:
        patch.setattr(runs, "evaluate_run", by_hand)
        assert tiny("regression", "--only", "demo-s0-") == 0
    capsys.readouterr()
    monkeypatch.setattr(sweep, "run_cell", None)
    assert tiny("tokenization", "--only", "demo-s0-") == 0
    output = capsys.readouterr().out
    assert "1 run, 1 finished, 0 to do" in output and output.count("not run") == 2
    assert Path(f"runs/ablations/tokenization-{DATASET}-demo.csv").is_file()
    chosen = ablate.variants(ablate.get("regression"), {"datasets": ["cube-single-play", "scene-play"], "seeds": [0]})
    lines = ablate.write(ablate.get("regression"), chosen, Path("elsewhere"))
    assert [(line.dataset, line.seeds) for line in lines[2:4]] == [("cube-single-play-v0", 0), ("scene-play-v0", 0)]
    output = capsys.readouterr().out
    assert output.count("no run is finished yet") == 2 and "84 ± 4" in output and not Path("elsewhere").exists()
