"""Exported models: small, complete, refused when damaged, and acting as the run they came from."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from qhyer import agents, envs, manifest, models, runs
from qhyer.config import from_dict
from qhyer.data.episodes import DataSpec
from qhyer.errors import CorruptFile, Taken, UserError
from qhyer.evaluate import EvalConfig
from qhyer.records import read_rows
from qhyer.train import TrainConfig, train

MAZE = "pointmaze-medium-v0"
FEW = EvalConfig(episodes=1, tasks=(1, 3), shard=2)
pytestmark = pytest.mark.usefixtures("looked_at_once")


def make_run(folder: Path, name: str, tiny_config, **overrides) -> Path:
    """A run of two updates on random data of the maze's shape."""
    generator = np.random.default_rng(0)
    ends = np.zeros(120, bool)
    ends[39::40] = True
    data = folder / "pointmaze-mine.npz"
    observations = np.cumsum(generator.normal(size=(120, 2)), 0)
    np.savez(data, observations=observations, actions=generator.uniform(-1, 1, (120, 2)), terminals=ends)
    config = tiny_config(name, **overrides)
    steps = {f: 2 for f in vars(config) if f.endswith("steps") and isinstance(getattr(config, f), int)}
    config = type(config)(**{**vars(config), **steps})
    return train(
        name,
        str(data),
        config,
        TrainConfig(device="cpu"),
        run=folder / name,
        environment=MAZE,
        preset="paper",
        quiet=True,
    )


@pytest.fixture(scope="module", autouse=True)
def short_episodes() -> Iterator[None]:
    """Real environments, cut after 50 steps: a policy that goes another way has gone it by then."""
    make, limit = envs.make, gymnasium.wrappers.TimeLimit
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(envs, "make", lambda environment: limit(make(environment), 50))
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_config) -> Path:
    """A QHyer wide enough to have matrices worth rounding, evaluated."""
    made = make_run(tmp_path_factory.mktemp("models"), "qhyer", tiny_config, width=64, context=2)
    runs.evaluate_run(made, FEW, workers=0, quiet=True)
    return made


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("QHYER_MODELS", raising=False)
    return tmp_path


def acts(agent, steps: int = 3) -> torch.Tensor:
    """Actions of a few steps of four episodes, memory and all."""
    generator = torch.Generator().manual_seed(1)
    width = agent.spec.observation_dim
    goal, memory, taken = torch.randn(4, width, generator=generator), None, []
    agent.eval()
    with torch.no_grad():
        for _ in range(steps):
            action, memory = agent.act(torch.randn(4, width, generator=generator), goal, memory)
            taken.append(action)
    return torch.stack(taken)


# ------------------------------------------------------------------------------------------------ every agent


@pytest.mark.parametrize("name", agents.names())
def test_the_acting_state_is_enough_to_act(name, tiny_agent, shake):
    """A fresh agent with the acting state of another acts as that one does, whatever else it holds."""
    trained, other = tiny_agent(name, seed=0), tiny_agent(name, seed=1)
    shake(trained)
    state = trained.acting_state()
    assert set(state) <= set(trained.state_dict()) and {"observation_mean", "observation_std"} <= set(state)
    assert not torch.equal(acts(other), acts(trained))
    missing, unexpected = other.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) == set(other.state_dict()) - set(state)
    assert torch.equal(acts(other), acts(trained))


@pytest.mark.parametrize("name", agents.names())
def test_a_model_of_every_agent_acts_as_its_run(name, here, tiny_config):
    run = make_run(here, name, tiny_config)
    made = models.export(run, dtype="fp32")
    assert made == Path("models/pointmaze-mine") and sorted(p.name for p in made.iterdir()) == [
        "README.md",
        "model.json",
        "model.safetensors",
    ]
    loaded, about = models.load("pointmaze-mine")
    assert about["agent"] == name and not loaded.training
    assert torch.equal(acts(loaded), acts(runs.load_agent(run)[0]))


# ------------------------------------------------------------------------------------------------- what is stored


def test_the_critic_stays_behind(run, here):
    made = models.export(run, here / "m")
    names = set(load_file(made / "model.safetensors"))
    whole, _ = runs.load_agent(run)
    assert names == {n for n in whole.state_dict() if not n.startswith("critic.")}
    loaded, _ = models.load(made)
    assert loaded.critic is not None  # built, not trained: acting does not look at it
    loaded.critic = None
    assert acts(loaded).isfinite().all()


def test_bf16_rounds_large_matrices_alone_and_acts_within_rounding(run, here):
    exact, rounded = models.export(run, here / "a", dtype="fp32"), models.export(run, here / "b")
    kept, half = load_file(exact / "model.safetensors"), load_file(rounded / "model.safetensors")
    assert {v.dtype for v in kept.values()} == {torch.float32}
    small = [n for n, v in half.items() if v.dtype == torch.float32]
    for part in (
        "observation_mean",
        "q_scale",
        "tokens.state.bias",
        "decoder.blocks.0.mamba.A_log",
        "action_head.weight",
    ):
        assert part in small
    assert half["decoder.blocks.0.attention.qkv.weight"].dtype == torch.bfloat16
    for name, value in half.items():
        torch.testing.assert_close(value.float(), kept[name], rtol=2**-8, atol=0)
        assert value.dtype == torch.bfloat16 or torch.equal(value, kept[name])
    actions = [acts(models.load(folder)[0]) for folder in (exact, rounded)]
    assert (actions[0] - actions[1]).abs().max() < 0.02 and not torch.equal(*actions)
    assert models.megabytes(models.read(rounded)) < 0.7 * models.megabytes(models.read(exact))


def test_what_the_model_says_of_itself(run, here, monkeypatch):
    info = json.loads((run / "run.json").read_text())
    made = models.export(run, here / "mine")
    about = models.read(made)
    for key in ("agent", "preset", "dataset", "environment", "seed", "config", "spec", "versions"):
        assert about[key] == info[key], key
    assert about["data"] == {k: v for k, v in info["data"].items() if k not in ("path", "file")}
    assert about["updates"] == 2 and about["dtype"] == "bf16"
    rows = read_rows(run / "episodes.csv")
    assert set(about["scores"]["tasks"]) == {"1", "3"}
    assert about["scores"]["tasks"]["1"] == {"success": float(rows[0].success), "episodes": 1}
    assert about["scores"]["mean"] == np.mean([row.success for row in rows])
    card = (made / "README.md").read_text()
    for words in ("# mine", "`qhyer`", "pointmaze-mine", info["data"]["fingerprint"], "2 updates, seed 0"):
        assert words in card
    for words in (about["weights"]["sha256"], "| 3 |", "before they were rounded", "qhyer eval --model mine"):
        assert words in card
    assert str(here) not in card + (made / "model.json").read_text()


def test_what_acting_alone_reads_can_be_changed(run, here):
    made = models.export(run, here / "m", override=["history=hopping", "past_q=critic"])
    agent, about = models.load(made)
    assert (agent.config.history, agent.config.past_q) == ("hopping", "critic")
    assert any(name.startswith("critic.") for name in load_file(made / "model.safetensors"))  # past_q asks it
    assert about["scores"] is None and about["override"] == ["history=hopping", "past_q=critic"]
    card = (made / "README.md").read_text()
    assert "It acts with `history=hopping`, `past_q=critic`" in card and "another way of acting" in card
    for wrong, words in (
        ("width=32", r"training reads it.* \(what can be changed: history, past_q\)"),
        ("histry=hopping", "did you mean history"),
        ("history", "history: write FIELD=VALUE, such as history=hopping; what can be changed: history, past_q$"),
        ("=hopping", "write FIELD=VALUE, such as history=hopping"),
        ("candidates=3", r"does not read it \(its action_head is gaussian\): leave it out"),
        ("choice_temperature=1.0", "does not read it"),
    ):
        with pytest.raises(UserError, match=words):
            models.export(run, here / "n", override=["past_q=critic", wrong])
    assert not (here / "n").exists()


@pytest.mark.parametrize(
    "fields, changes, unread, why",
    [
        ({"context": 1}, [], ["history=hopping", "past_q=critic", "candidates=3"], "context is one step|action_head"),
        ({"context": 1, "action_head": "best_of_mixture"}, ["candidates=3"], ["history=hopping"], "is one step"),
        ({"context": 2, "action_head": "mixture"}, ["history=hopping"], ["candidates=3"], "action_head is mixture"),
    ],
)
def test_what_a_policy_does_not_read_is_no_other_way_of_acting(here, tiny_config, fields, changes, unread, why):
    """It is refused, and what is said to be changed does change how it acts."""
    run = make_run(here, "qhyer", tiny_config, **fields)
    for text in unread:
        with pytest.raises(UserError, match=f"--override {text}: this policy does not read it .*({why})"):
            models.export(run, here / "m", override=[text])
        agent, free = runs.load_agent(run)[0], agents.load("qhyer").Config.acting_alone
        config = manifest.overridden(agent.config, [text], "qhyer")
        other = runs.build_agent("qhyer", config, agent.spec, 0)
        other.load_state_dict(agent.state_dict())
        assert torch.equal(acts(other), acts(agent)) and text.split("=")[0] in free
    for text in changes:
        agent, about = models.load(models.export(run, here / "m", override=[text]))
        assert about["override"] == [text] and not torch.equal(acts(agent, 5), acts(runs.load_agent(run)[0], 5))
    with pytest.raises(UserError, match="such as" if changes else "FIELD=VALUE, nothing of this policy can be changed"):
        models.export(run, here / "n", override=["history"])


def test_an_agent_of_which_nothing_can_be_changed_says_so(here, tiny_config):
    run = make_run(here, "gcbc", tiny_config)
    for text in ("history", "learning_rate=1.0", "history=hopping"):
        with pytest.raises(UserError, match=f"--override {text}: gcbc has no field that acting alone reads"):
            models.export(run, here / "m", override=[text])


@pytest.mark.parametrize(
    "size, said", [(20_310, "20 kB"), (999_400, "999 kB"), (999_900, "1.0 MB"), (7_240_000, "7.2 MB")]
)
def test_small_models_have_a_size_too(run, here, size, said):
    about = models.read(models.export(run, here / "m"))
    about["weights"]["bytes"] = size
    assert models.size_text(about) == said and f"bf16, {said} |" in models.card("m", about)


def test_an_override_that_changes_nothing_is_none(run, here):
    about = models.read(models.export(run, here / "m", override=["history=sliding"]))
    assert "override" not in about and about["scores"] == models.read(models.export(run, here / "n"))["scores"]
    about = models.read(models.export(run, here / "o", override=["history=sliding", "past_q=critic", "candidates=64"]))
    assert about["override"] == ["past_q=critic"]


def test_another_way_of_acting_is_another_model(run, here):
    models.export(run, here / "m")
    models.evaluate_model(here / "m", FEW, out=here / "rows", workers=0, quiet=True)
    before = (here / "rows" / "episodes.csv").read_bytes()
    models.export(run, here / "m", override=["history=hopping"], overwrite=True)
    with pytest.raises(UserError, match="exported before; --overwrite"):
        models.evaluate_model(here / "m", FEW, out=here / "rows", workers=0, quiet=True)
    assert (here / "rows" / "episodes.csv").read_bytes() == before


def test_the_command_names_nobodys_folders():
    command = "qhyer train qhyer /home/me/data/mine.npz --out=/tmp/run --goal 0 1 --name 'a b'"
    assert models._portable(command) == "qhyer train qhyer mine.npz --out=run --goal 0 1 --name 'a b'"
    assert models._portable(None) is None


def test_without_an_evaluation_the_card_says_so(here, tiny_config):
    made = models.export(make_run(here, "gcbc", tiny_config))
    assert models.read(made)["scores"] is None
    assert "had not been evaluated" in (made / "README.md").read_text()


def test_nothing_is_overwritten_unasked(run, here):
    made = models.export(run, here / "m")
    before = (made / "model.json").read_text()
    with pytest.raises(UserError, match="--overwrite"):
        models.export(run, made, dtype="fp32")
    assert (made / "model.json").read_text() == before
    models.export(run, made, dtype="fp32", overwrite=True)
    assert models.read(made)["dtype"] == "fp32"
    (here / "other").mkdir()
    (here / "other" / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="not a model"):
        models.export(run, here / "other", overwrite=True)
    assert (here / "other" / "thesis.txt").is_file()


# ------------------------------------------------------------------------------------------------ finding, refusing


def test_where_models_are_looked_for(run, here, monkeypatch):
    models.export(run, Path("models/one"))
    models.export(run, here / "elsewhere" / "two")
    models.export(run, here / "elsewhere" / "one")
    assert models.find("one") == models.find("one-v0") == Path("models/one")
    assert models.find("models/one") == Path("models/one")
    monkeypatch.setenv("QHYER_MODELS", str(here / "elsewhere"))
    assert models.find("two") == here / "elsewhere" / "two"
    assert models.find("one") == here / "elsewhere" / "one"
    assert {"one", "two"} <= set(models.available())


def test_a_missing_model_names_those_there_are(run, here):
    with pytest.raises(UserError, match="qhyer export RUN"):
        models.find("nothing")
    models.export(run, Path("models/maze"))
    with pytest.raises(UserError, match=r"did you mean maze\?.*there are .*maze"):
        models.find("mase")


@pytest.mark.parametrize("file, words", [("model.safetensors", "damaged"), ("model.json", "damaged")])
def test_a_changed_byte_is_refused(file, words, run, here):
    made = models.export(run, here / "m")
    content = bytearray((made / file).read_bytes())
    content[len(content) // 2] ^= 1
    (made / file).write_bytes(content)
    with pytest.raises(CorruptFile, match=words):
        models.load(made)


def test_missing_weights_and_other_formats_are_refused(run, here, monkeypatch):
    made = models.export(run, here / "m")
    monkeypatch.setattr(models, "FORMAT", 2)
    with pytest.raises(UserError, match="model format 1, this version reads 2"):
        models.load(made)
    monkeypatch.undo()
    (made / "model.safetensors").unlink()
    with pytest.raises(CorruptFile, match="missing"):
        models.load(made)


def test_weights_of_another_shape_are_refused(run, here, monkeypatch):
    made = models.export(run, here / "m")
    config = from_dict(agents.load("qhyer").Config, {**models.read(made)["config"], "layers": 1})
    smaller = runs.build_agent("qhyer", config, from_dict(DataSpec, models.read(made)["spec"]), 0)
    monkeypatch.setattr(models.runs, "build_agent", lambda *_: smaller)
    with pytest.raises(UserError, match="in this version"):
        models.load(made)


# ----------------------------------------------------------------------------------------------------- evaluation


def test_a_model_in_float32_scores_as_its_run_does(run, here):
    """Row for row and observation for observation."""
    models.export(run, Path("models/maze"), dtype="fp32")
    rate, out = models.evaluate_model("maze", FEW, workers=0, quiet=True)
    assert out == Path("runs/eval-maze") and sorted(p.name for p in Path("models/maze").iterdir()) == [
        "README.md",
        "model.json",
        "model.safetensors",
    ]
    own, theirs = read_rows(run / "episodes.csv"), read_rows(out / "episodes.csv")
    what = ("agent", "dataset", "seed", "step", "task", "episode", "env_seed", "success", "length")
    assert [[getattr(r, k) for k in what] for r in own] == [[getattr(r, k) for k in what] for r in theirs]
    assert rate == np.mean([row.success for row in own])
    with np.load(run / "rollouts" / "00000002.npz") as a, np.load(out / "rollouts" / "00000002.npz") as b:
        np.testing.assert_array_equal(a["observations"], b["observations"])
    assert runs.read(out)["model"]["name"] == "maze"  # the report reads it as a run


def test_a_model_that_is_being_evaluated_is_not_evaluated_beside(run, here, monkeypatch):
    pytest.importorskip("fcntl")
    models.export(run, Path("models/maze"))
    original, other = runs.evaluate, EvalConfig(episodes=1, tasks=(2,))

    def slower(*arguments, **options):
        monkeypatch.setattr(runs, "evaluate", original)
        with pytest.raises(Taken, match="runs/eval-maze is being evaluated by another process"):
            models.evaluate_model("maze", other, workers=0, quiet=True, overwrite=True)
        models.evaluate_model("maze", other, out=Path("elsewhere"), workers=0, quiet=True)
        return original(*arguments, **options)

    monkeypatch.setattr(runs, "evaluate", slower)
    _, out = models.evaluate_model("maze", FEW, workers=0, quiet=True)
    assert {row.task for row in read_rows(out / "episodes.csv")} == {1, 3}
    assert {row.task for row in read_rows(Path("elsewhere/episodes.csv"))} == {2} and not list(out.glob(".*"))


def test_rows_go_where_they_belong(run, here):
    models.export(run, Path("models/maze"))
    for wrong in ("models/maze", "models/maze/rows"):
        with pytest.raises(UserError, match="not written to"):
            models.evaluate_model("maze", FEW, out=Path(wrong), workers=0, quiet=True)
    shutil.copytree(run, "run")
    with pytest.raises(UserError, match=r"run is a run, not a model: `qhyer eval run` .* `qhyer export run` makes"):
        models.evaluate_model("run", FEW, workers=0, quiet=True)
    with pytest.raises(UserError, match="runs is a folder of runs: give one of them, such as runs/eval-maze"):
        Path("runs/eval-maze").mkdir(parents=True)
        Path("runs/eval-maze/run.json").write_text("{}")
        models.policy("runs")
    shutil.rmtree("runs")
    with pytest.raises(UserError, match="holds a run"):
        models.evaluate_model("maze", FEW, out=Path("run"), workers=0, quiet=True)
    one = EvalConfig(episodes=1, tasks=(3,))
    models.evaluate_model("maze", FEW, workers=0, quiet=True)
    with pytest.raises(UserError, match="has the rows of a model, and no weights: `qhyer eval --model maze`"):
        models.policy("runs/eval-maze")
    with pytest.raises(
        UserError, match="runs/eval-maze has the rows of a model, and is none: `qhyer eval --model maze`"
    ):
        models.evaluate_model("runs/eval-maze", FEW, workers=0, quiet=True)
    with pytest.raises(UserError, match="--overwrite"):
        models.evaluate_model("maze", one, workers=0, quiet=True)
    models.export(run, Path("models/maze"), dtype="fp32", overwrite=True)
    with pytest.raises(UserError, match="as it was exported before; --overwrite"):
        models.evaluate_model("maze", one, workers=0, quiet=True)
    models.evaluate_model("maze", one, workers=0, quiet=True, overwrite=True)
    assert len(Path("runs/eval-maze/episodes.csv").read_text().splitlines()) == 2  # the head, and one episode


def test_a_policy_for_ones_own_loop(run, here):
    """Of a run's folder, or of a model: the same network, rounded or not."""
    models.export(run, here / "exact", dtype="fp32")
    agent, _ = runs.load_agent(run)
    width = agent.spec.observation_dim
    state, goal = np.full(width, 0.3), np.full(width, -0.2)
    with torch.no_grad():
        expected, _ = agent.act(*(torch.tensor(x[None], dtype=torch.float32) for x in (state, goal)), None)
    for name in (run, here / "exact", str(run)):
        assert np.array_equal(models.policy(name)(state, goal), expected[0].clamp(-1, 1).numpy())
    with pytest.raises(UserError, match="no model is called"):
        models.policy("nowhere")
