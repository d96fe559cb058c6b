"""A critic that is a batch ahead of the rest: the same numbers as in its turn, in a run and in what it saves."""

from __future__ import annotations

import copy
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from test_train import assert_same, stop_at

from qhyer import agents, checkpoint, runs
from qhyer.agents.qhyer import QHyer
from qhyer.data.episodes import Episodes
from qhyer.train import NonFinite, Stopped, TrainConfig, train, train_seeds
from qhyer.update import GraphedUpdate

OPTIONS = [
    dict(p_random=0.3, weight_critic=0.5, weight_bc=2.0, weight_q=0.3),
    dict(stitch_rate=0.3, stitch_cell=0.5, q_normalization="standardize"),
    dict(binary_goals="bits", goal_frame="relative", goal_input="difference", flow_defence=0.2),
    dict(binary_goals="bits", goal_part=(1,), tokenization="separate"),
    dict(action_head="mixture", regression="quantile", past_q="critic"),
    dict(action_head="best_of_mixture", context=1, chunk=2, goal_input="coordinates"),
    dict(critic="cvae", regression="mse", goal_frame="relative"),
    dict(critic="contrastive", flow_defence=0.2, backbone="mamba"),
]


@pytest.fixture(scope="module")
def lamps() -> Episodes:
    """Walks in the plane past a lamp that changes now and then, in episodes of which one is shorter than a window."""
    rng = np.random.default_rng(0)
    lengths = [3, 39, 40, 38]
    places = np.concatenate([rng.normal(size=(n, 2)).cumsum(0) * 0.3 for n in lengths])
    observations = np.concatenate([places, rng.integers(0, 2, size=(len(places), 1))], -1)
    actions = rng.uniform(-1, 1, size=(len(places), 2))
    return Episodes.from_arrays(observations, actions, np.cumsum(lengths) - 1, goal=[0, 2, 1], name="lamps")


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options))
def test_the_loss_is_the_sum_of_its_parts(options, lamps, tiny_config, shake):
    """With the same draws: value, metrics and their order, gradients, and scales that move with the batch alone."""
    whole = runs.build_agent("qhyer", tiny_config("qhyer", **options), lamps.spec(), 0).train()
    shake(whole)
    parts = copy.deepcopy(whole)
    for seed in range(2):  # the first sets the scales, the second moves them
        (stage,), (other,) = whole.stages(), parts.stages()
        batch = stage.sampler.build(lamps, torch.Generator().manual_seed(seed)).sample(8)
        torch.manual_seed(seed)
        expected, values = stage.loss(batch)
        expected.backward()
        torch.manual_seed(seed)
        loss, seen = other.ahead.loss(batch)
        loss.backward()
        buffers, chance = [b.clone() for b in parts.buffers()], torch.get_rng_state()
        prepared = other.ahead.prepare(batch)
        assert torch.equal(torch.get_rng_state(), chance) and not any(x.requires_grad for x in prepared.values())
        assert all(torch.equal(*pair) for pair in zip(parts.buffers(), buffers)) and not set(prepared) & set(batch)
        rest, metrics = other.ahead.rest(batch | prepared)
        rest.backward()
        assert torch.equal(rest + loss, expected) and list(metrics | seen) == list(values)
        assert all(torch.equal((metrics | seen)[name], value) for name, value in values.items())
        assert all(torch.equal(*pair) for pair in zip(whole.buffers(), parts.buffers(), strict=True))
        for (name, ours), theirs in zip(parts.named_parameters(), whole.parameters(), strict=True):
            assert ours.grad is theirs.grad is None or torch.equal(ours.grad, theirs.grad), name
    learned = {id(p) for group in other.ahead.optimizer.param_groups for p in group["params"]}
    assert learned == {id(p) for p in parts.critic.parameters()}


def test_only_a_critic_can_be_ahead(tiny_agent):
    for name in agents.names():
        assert name == "qhyer" or all(stage.ahead is None for stage in tiny_agent(name).stages())
    for conditioning in ("none", "rtg"):
        assert all(stage.ahead is None for stage in tiny_agent("qhyer", conditioning=conditioning).stages())


# --------------------------------------------------------------------------------------------------------- runs

CPU = TrainConfig(device="cpu", log_every=2, save_every=4, keep=10, threads=1)
EAGER = replace(CPU, graph=False)
STEPS = 14


@pytest.fixture
def go(tiny_config, point_world, tmp_path):
    """go("a", CPU, resume=True): a run in a folder of that name."""

    def run(folder: str, how: TrainConfig, resume: bool = False, on_step=None, **options) -> Path:
        config = tiny_config("qhyer", **{"steps": STEPS, **options})
        place = tmp_path / folder
        return train(
            "qhyer", "x", config, how, run=place, episodes=point_world, quiet=True, resume=resume, on_step=on_step
        )

    return run


@pytest.fixture
def captured(monkeypatch) -> list[GraphedUpdate]:
    """Updates are captured in name, and this lists those whose critic is ahead, once for each of their replays."""
    replays: list[GraphedUpdate] = []
    compute = GraphedUpdate.compute_ahead

    def noted(self, ahead):
        replays.append(self)
        compute(self, ahead)

    monkeypatch.setattr(GraphedUpdate, "compute_ahead", noted)
    monkeypatch.setattr("qhyer.update.capture_for", lambda device, sampler: lambda work: work)
    return replays


def assert_same_checkpoints(a: Path, b: Path) -> None:
    """All that were saved on the way, generators included."""
    found = checkpoint.steps(a / "checkpoints")
    assert found == checkpoint.steps(b / "checkpoints") == [4, 8, 12, 14]
    for step in found:
        one, two = (checkpoint.load(run / "checkpoints" / f"{step:08d}") for run in (a, b))
        for ours, theirs in ((one.agent, two.agent), (one.training, two.training)):
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(value, theirs[name]) for name, value in ours.items()), step


@pytest.mark.parametrize(
    "options",
    [dict(), dict(warmup=6, cosine=True, p_random=0.3), dict(q_normalization="standardize", weight_critic=0.5)],
    ids=["plain", "schedule", "options"],
)
def test_a_run_and_its_checkpoints_are_those_of_an_eager_one(options, go, captured):
    eager, ahead = go("eager", EAGER, **options), go("ahead", CPU, **options)
    assert len(captured) == STEPS - GraphedUpdate.WARMUP
    assert_same(eager, ahead)
    assert_same_checkpoints(eager, ahead)


@pytest.mark.parametrize(
    "first, second", [(CPU, CPU), (CPU, EAGER), (EAGER, CPU)], ids=["ahead", "to-eager", "to-ahead"]
)
def test_resumes_from_one_another_s_checkpoints(first, second, go, captured):
    """A batch that was drawn ahead and never used is drawn again."""
    eager = go("eager", EAGER)
    with pytest.raises(KeyboardInterrupt):
        go("run", first, on_step=stop_at(9))  # after the checkpoint of update 8
    run = go("run", second, resume=True)
    assert_same(eager, run)
    assert_same_checkpoints(eager, run)
    assert captured


def test_the_next_stage_draws_what_it_would_have_drawn(go, captured, monkeypatch):
    stages = QHyer.stages

    def two(self):
        (stage,) = stages(self)
        return replace(stage, name="first", steps=6), replace(stage, name="second", steps=STEPS - 6)

    monkeypatch.setattr(QHyer, "stages", two)
    assert_same(go("eager", EAGER), go("ahead", CPU))
    assert len(captured) == STEPS - 2 * GraphedUpdate.WARMUP and len(set(captured)) == 2


@pytest.mark.parametrize("step", [3, 4, 5, 9])
def test_a_run_that_is_stopped_saves_what_it_goes_on_from(step, go, captured, tmp_path):
    """Before the first update that is captured, at it, and after."""

    def stop(at: int) -> None:
        if at == step:
            signal.raise_signal(signal.SIGTERM)

    eager = go("eager", EAGER)
    with pytest.raises(Stopped):
        go("run", CPU, on_step=stop)
    run = go("run", CPU, resume=True)
    assert_same(eager, run)
    (one, two) = (checkpoint.load(each / "checkpoints" / f"{STEPS:08d}") for each in (eager, run))
    assert all(torch.equal(value, two.training[name]) for name, value in one.training.items())


def test_a_stage_that_could_not_be_finished_is_finished_later(go, captured, monkeypatch, tmp_path):
    stages, broken = QHyer.stages, [True]

    def finish(episodes) -> None:
        if broken:
            raise RuntimeError("no disk")

    def two(self):
        (stage,) = stages(self)
        return replace(stage, name="first", steps=6, finish=finish), replace(stage, name="second", steps=STEPS - 6)

    monkeypatch.setattr(QHyer, "stages", two)
    with pytest.raises(RuntimeError, match="no disk"):
        go("ahead", CPU)
    broken.clear()
    assert_same(go("eager", EAGER), go("ahead", CPU, resume=True))


def test_of_several_seeds_one_ends_alone(captured, monkeypatch, tiny_config, point_world, tmp_path):
    loss, made = QHyer.critic_loss, []

    def poisoned(self, batch):
        first, metrics = loss(self, batch)
        if self not in made:
            made.append(self)
        self.drawn = getattr(self, "drawn", 0) + 1
        return first * (torch.nan if made.index(self) == 1 and self.drawn == 9 else 1.0), metrics

    monkeypatch.setattr(QHyer, "critic_loss", poisoned)
    for name, how in (("eager", EAGER), ("ahead", CPU)):
        made.clear()
        with pytest.raises(NonFinite):
            train_seeds(
                "qhyer", "x", tiny_config("qhyer", steps=STEPS), how, (0, 1, 2), out=tmp_path / name,
                episodes=point_world, quiet=True,
            )  # fmt: skip
    runs_of = lambda name: sorted(place.parent for place in (tmp_path / name).glob("**/metrics.jsonl"))
    eager, ahead = runs_of("eager"), runs_of("ahead")
    assert len(eager) == len(ahead) == 3
    for seed in (0, 2):
        assert_same(eager[seed], ahead[seed])
        assert_same_checkpoints(eager[seed], ahead[seed])
    (one,), (two,) = (list(each[1].glob("nonfinite-*.npz")) for each in (eager, ahead))
    assert one.name == two.name
    with np.load(one) as first, np.load(two) as second:
        assert first.files == second.files and all((first[key] == second[key]).all() for key in first.files)


def test_a_capture_that_is_refused_leaves_no_trace(go, monkeypatch):
    """Not even of the batch that had been drawn for its first replay."""

    def refuse(work):
        raise RuntimeError("no graph today")

    monkeypatch.setattr("qhyer.update.capture_for", lambda device, sampler: refuse)
    options = dict(stitch_rate=0.3, stitch_cell=0.5)
    assert_same(go("eager", EAGER, **options), go("refused", CPU, **options))


def test_a_compiled_loss_is_not_taken_apart(go, captured, monkeypatch):
    monkeypatch.setattr(GraphedUpdate, "compile", lambda self, *_: setattr(self, "fused", "compiled"))
    assert_same(go("eager", EAGER), go("compiled", replace(CPU, compile=True)))
    assert not captured


@pytest.mark.parametrize("part", ["critic_loss", "actor_loss"])
def test_the_rows_are_those_of_the_batch_that_was_not_finite(part, go, captured, monkeypatch, tmp_path):
    loss, factor = getattr(QHyer, part), torch.ones(())

    def poisoned(self, batch):
        first, *others = loss(self, batch)
        return first * factor, *others

    def poison(step: int) -> None:
        factor.fill_(torch.nan if step == 7 else 1.0)

    monkeypatch.setattr(QHyer, part, poisoned)
    rows = []
    for name, how in (("eager", EAGER), ("ahead", CPU)):
        factor.fill_(1.0)
        with pytest.raises(NonFinite, match=r"at update 7; the batch's rows are in .*npz; .* is update 4\."):
            go(name, how, on_step=poison)
        with np.load(tmp_path / name / "nonfinite-00000007.npz") as dumped:
            rows.append({key: dumped[key].tolist() for key in dumped.files})
    assert rows[0] == rows[1] and rows[0].keys() >= {"rows", "goal_rows", "flow_rows"} and captured
    assert_same(tmp_path / "eager", tmp_path / "ahead")
