"""One contract for every agent, found by discovery, and for every option its configuration names."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import math
import re
import typing

import pytest
import torch

from qhyer import agents, checkpoint, presets
from qhyer.agent import RANGES, GoalConfig
from qhyer.agents.qhyer import LUCK_ROWS
from qhyer.config import from_dict, to_dict
from qhyer.errors import UserError
from qhyer.nn.chance import first_row
from qhyer.train import Update

# Options that are not Literals but switch code: tested as Literals are.
SWITCHES = {
    "qhyer": [
        dict(stitch_rate=0.1, stitch_cell=0.5),
        dict(p_random=0.2, conditioning="rtg"),
        dict(context=1),
        dict(warmup=2, cosine=True),
        dict(dropout=0.0),
        dict(flow_defence=0.1),
        dict(past_q="critic", q_normalization="standardize"),
        dict(past_q="critic", action_head="best_of_mixture"),
    ],
    "eik_hiqrl": [dict(coordinates=2), dict(encoding=2, low_actor_rep_grad=True, actor_p_random=0.5)],
    "gas": [dict(reach=1, efficiency=-1.0)],
    "gcbc": [dict(discount=0.9)],
    "gcivl": [dict(actor_p_random=0.5)],
    "qrl": [dict(actor_p_random=1.0)],
    "sharsa": [dict(double=True), dict(end_is_goal=False, actor_geometric=False, actor_p_random=0.0, goal_part=(1,))],
    "trl": [dict(goal_part=(1,), actor_p_random=0.5), dict(actor="frs", candidates=3, flow_steps=1)],
}


def variants() -> list[tuple[str, dict]]:
    """Each agent as it is, then once per value of each Literal field that is not the default, then its switches."""
    found: list[tuple[str, dict]] = []
    for name in agents.names():
        config = agents.load(name).Config
        found.append((name, {}))
        for field, hint in typing.get_type_hints(config).items():
            if typing.get_origin(hint) is typing.Literal and not (field == "goal_input" and config.whole_goals):
                default = getattr(config(), field)
                found += [(name, {field: option}) for option in typing.get_args(hint) if option != default]
        found += [(name, options) for options in SWITCHES.get(name, [])]
    return found


VARIANTS = variants()
IDS = ["-".join([name, *(f"{k}={v}" for k, v in options.items())]) for name, options in VARIANTS]
every_variant = pytest.mark.parametrize("name, options", VARIANTS, ids=IDS)
every_agent = pytest.mark.parametrize("name", agents.names())


def start(agent, episodes, seed: int = 0) -> list[Update]:
    """The updates of all stages, as the trainer makes them."""
    torch.manual_seed(seed)
    agent.train()
    generator = torch.Generator().manual_seed(seed)
    device = torch.device("cpu")
    return [Update(agent, s, s.sampler.build(episodes, generator), "fp32", device) for s in agent.stages()]


@every_variant
def test_learns_something_everywhere(name, options, tiny_agent, point_world):
    """Losses are finite, metrics detached, and within a few updates every trainable parameter has had a gradient."""
    agent = tiny_agent(name, **options)
    reached: set[str] = set()
    before = {n: p.detach().clone() for n, p in agent.named_parameters()}
    for update in start(agent, point_world):
        for step in range(4):  # zero-initialised layers hide what is behind them at first
            update(step)
            for n, p in agent.named_parameters():
                if p.grad is not None and p.grad.abs().sum() > 0:
                    assert p.grad.isfinite().all(), n
                    reached.add(n)
        metrics = update.take_metrics()
        assert metrics and all(value == value and abs(value) < 1e6 for value in metrics.values()), metrics
        assert all("/" in key for key in metrics if key not in ("loss", "grad_norm")), metrics
        if update.stage.finish is not None:
            update.stage.finish(point_world)
    missing = {n for n, p in agent.named_parameters() if p.requires_grad} - reached
    if options.get("context") == 1:  # no step has a past, so the token of a past action is never read
        missing -= {"tokens.action.weight", "tokens.action.bias"}
    assert not missing, f"no gradient reaches {sorted(missing)}"
    assert any(not torch.equal(p, before[n]) for n, p in agent.named_parameters())


@every_variant
def test_every_optimizer_s_parameter_belongs_to_one_optimizer(name, options, tiny_agent):
    agent = tiny_agent(name, **options)
    seen: dict[int, int] = {}
    for stage in agent.stages():
        for optimizer in stage.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    assert seen.setdefault(id(parameter), id(optimizer)) == id(optimizer)
    trainable = {id(p) for p in agent.parameters() if p.requires_grad}
    assert trainable <= set(seen)
    again = agent.stages()  # a view: asking twice gives the same optimisers
    assert [list(map(id, s.optimizers)) for s in again] == [list(map(id, s.optimizers)) for s in agent.stages()]
    assert tuple(stage.steps for stage in again) == agent.config.updates and sum(agent.config.updates) > 0


def walk(agent, episodes, which: list[int], steps: int, drop: tuple[int, int] | None = None) -> list[torch.Tensor]:
    """Acts along rows of the dataset, episodes `which` side by side; `drop`: (step, place) at which one ends."""
    agent.eval()
    starts = episodes.starts[[i % 6 for i in which]] + torch.tensor(which) // 6  # seven out of six: shifted by a row
    goals = episodes.observations[(starts + 37) % len(episodes.observations)]
    memory, actions = None, []
    active = torch.arange(len(which))
    for t in range(steps):
        action, memory = agent.act(episodes.observations[starts[active] + t], goals[active], memory)
        full = torch.full((len(which), action.shape[-1]), float("nan"))
        full[active] = action
        actions.append(full)
        if drop is not None and t == drop[0]:
            keep = torch.tensor([i for i in range(len(active)) if i != drop[1]])
            active = active[keep]
            memory = None if memory is None else {k: v[keep] for k, v in memory.items()}
    return actions


@every_variant
def test_acts_alike_alone_and_in_parallel(name, options, tiny_agent, point_world, shake):
    """Seven episodes at once are seven episodes alone, beyond the context's length, also when one of them ends."""
    agent = tiny_agent(name, **options)
    shake(agent)
    steps = getattr(agent.config, "context", 4) + 4
    with torch.no_grad():
        together = walk(agent, point_world, list(range(7)), steps, drop=(2, 3))
        for i in range(7):
            alone = walk(agent, point_world, [i], steps)
            for t in range(steps):
                if i == 3 and t > 2:
                    assert together[t][i].isnan().all()
                else:
                    torch.testing.assert_close(together[t][i], alone[t][0], rtol=0, atol=1e-5)
    actions = torch.stack(together)[:, [0, 1, 2, 4, 5, 6]]
    assert actions.abs().max() <= 1.0 and actions.shape[-1] == point_world.actions.shape[1]
    assert actions.std(0).max() > 1e-4 and actions.std(1).max() > 1e-4  # and they depend on what is seen


@every_variant
def test_acting_is_deterministic_and_leaves_no_trace(name, options, tiny_agent, point_world, shake):
    agent = tiny_agent(name, **options)
    shake(agent)
    before = {k: v.clone() for k, v in agent.state_dict().items()}
    with torch.no_grad():
        runs = [torch.stack(walk(agent, point_world, [0, 1], 6)) for _ in range(2)]
    assert torch.equal(*runs)
    assert all(torch.equal(v, before[k]) for k, v in agent.state_dict().items())


@every_variant
def test_save_and_load_act_alike(name, options, tiny_agent, point_world, shake, tmp_path):
    agent = tiny_agent(name, **options)
    for update in start(agent, point_world):
        update(0)
        if update.stage.finish is not None:
            update.stage.finish(point_world)
    shake(agent)
    checkpoint.save(tmp_path, 1, agent.state_dict(), {}, {})
    other = tiny_agent(name, seed=1, **options)
    with torch.no_grad():
        expected = torch.stack(walk(agent, point_world, [0, 1, 2], 6))
        assert not torch.equal(torch.stack(walk(other, point_world, [0, 1, 2], 6)), expected)
        other.load_state_dict(checkpoint.load(checkpoint.latest(tmp_path)).agent)
        assert torch.equal(torch.stack(walk(other, point_world, [0, 1, 2], 6)), expected)


@every_agent
def test_same_seed_same_weights(name, tiny_agent, point_world):
    """At the start, whatever torch's own generator did before, and after three updates."""
    torch.manual_seed(1)
    first = tiny_agent(name)
    torch.manual_seed(2)
    second, other = tiny_agent(name), tiny_agent(name, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(first.state_dict().values(), second.state_dict().values()))
    assert any(not torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters()))
    for agent in (first, second):
        for update in start(agent, point_world):
            for step in range(3):
                update(step)
    assert all(torch.equal(a, b) for a, b in zip(first.state_dict().values(), second.state_dict().values()))


@every_variant
def test_config_survives_json(name, options, tiny_config):
    for config in (tiny_config(name, **options), dataclasses.replace(agents.load(name).Config(), **options)):
        text = json.dumps(to_dict(config))
        assert from_dict(type(config), json.loads(text)) == config


@every_agent
def test_presets_name_their_sources(name):
    table = presets.table(name)
    assert "paper" in table
    for rules in table.values():
        assert rules
        for rule in rules:
            assert len(rule.source) >= 10, f"{rule.pattern}: where do the values come from?"


@every_agent
def test_docstring_says_what_it_is(name):
    text = importlib.import_module(f"qhyer.agents.{name}").__doc__ or ""
    for heading in ("Paper.", "Code.", "Deviations."):
        assert heading in text, f"agents/{name}.py: the docstring lacks {heading!r}"


@every_agent
def test_every_field_is_used(name):
    """A field that neither the agent's file nor what it builds on reads is a promise it does not keep."""
    cls = agents.load(name)
    source = inspect.getsource(inspect.getmodule(cls))
    used = source.split(f"class {cls.__name__}(", 1)[1]
    used += "".join(inspect.getsource(base) for base in cls.__mro__ if base.__module__.startswith("qhyer.agents."))
    for field in dataclasses.fields(cls.Config):
        if field.name not in ("steps", "batch_size", "learning_rate") and not (
            field.name == "goal_input" and issubclass(cls.Config, GoalConfig)  # agent.py's, for all: test_goal_input.py
        ):
            assert re.search(rf"\.{field.name}\b", used), field.name


def test_unknown_agent_suggests_the_nearest():
    with pytest.raises(Exception, match="did you mean qhyer"):
        agents.load("qhyr")


# ------------------------------------------------------------------------- QHyer against a slow, obvious version


def slow_act(agent, observations: torch.Tensor, goal: torch.Tensor, q: list, actions: list, rows: torch.Tensor):
    """Algorithm 1 without any cache: the window's tokens one by one, the decoder over all of them, twice.

    observations (n, T, d_s): the window; q, actions: those of the steps before its last; rows (n, N): of the table
    of chance.
    """
    tokens, config = agent.tokens, agent.config
    sequence: list[torch.Tensor] = []

    def read() -> torch.Tensor:
        return agent.decoder(torch.stack(sequence, 1))[0][:, -1]

    kind = {name: tokens.kind[i] for i, name in enumerate(_order(config))}
    g = agent.normalize(goal)
    where = list(agent.spec.goal_indices)
    if agent.config.goal_input == "coordinates":
        g = g[:, where]
    goals = g
    for i in range(observations.shape[1]):
        s, position = agent.normalize(observations[:, i]), tokens.position[i]
        g = goals[:, where] - s[:, where] if config.goal_input == "difference" else goals
        if config.tokenization == "separate":
            sequence.append(tokens.goal(g) + position + kind["goal"])
        inputs = torch.cat([s, g], -1) if config.tokenization == "concat" else s
        sequence.append(tokens.state(inputs) + position + kind["state"])
        last = i == observations.shape[1] - 1
        if config.conditioning != "none":
            q_i = agent.q_head(read()) if last else q[i]  # stage 1: no Q token of this step yet
            if last:
                q = [*q, q_i]
            sequence.append(tokens.q(q_i) + position + kind["q"])
        if last:
            action = agent.action_head(read()).clamp(-1, 1)  # stage 2
            if config.action_head == "mixture":
                m, d = config.mixtures, agent.spec.action_dim
                numbers = agent.action_head(read())
                rows = [row[m + int(row[:m].argmax()) * d :][:d] for row in numbers]
                action = torch.stack(rows).clamp(-1, 1)
            if config.action_head == "best_of_mixture":
                each = zip(rows, numbers_of(agent, read), observations[:, -1], goal)
                action = torch.stack([slow_choice(agent, *one) for one in each])
            if config.past_q == "critic":  # the next window's token of this step: what was done, not what was hoped
                done = agent.log_density(observations[:, -1], action, agent.goal_coordinates(goal))
                q = [*q[:-1], ((done - agent.q_shift) / (agent.q_scale + 1e-3))[:, None]]
            return action, q, [*actions, action]
        sequence.append(tokens.action(actions[i]) + position + kind["action"])
    raise AssertionError


def numbers_of(agent, read) -> torch.Tensor:
    return agent.action_head(read())


def slow_choice(agent, luck: torch.Tensor, row: torch.Tensor, state: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
    """One draw after the other from a mixture given by its numbers, and the one whose Q and luck are highest."""
    m, d, draws = agent.config.mixtures, agent.spec.action_dim, agent.draws[luck]
    weights = row[:m].exp() / row[:m].exp().sum()
    means, stds = row[m : m + m * d].view(m, d), row[m + m * d :].view(m, d).clamp(-3, 1).exp()
    best, score = None, -float("inf")
    for i, noise in enumerate(draws):
        heap, k = float(weights[0]), 0
        while k < m - 1 and (i + 0.5) / len(draws) > heap:
            k += 1
            heap += float(weights[k])
        action = (means[k] + stds[k] * noise).clamp(-1, 1)
        q = float(agent.log_density(state[None], action[None], agent.goal_coordinates(goal)[None]))
        if q + float(agent.luck[luck[i]]) > score:
            best, score = action, q + float(agent.luck[luck[i]])
    assert best is not None
    return best


def _order(config) -> list[str]:
    order = ["goal"] if config.tokenization == "separate" else []
    return [*order, "state", *(["q"] if config.conditioning != "none" else []), "action"]


QHYER = [(options, i) for (name, options), i in zip(VARIANTS, IDS) if name == "qhyer"]


@pytest.mark.parametrize("options", [o for o, _ in QHYER], ids=[i for _, i in QHYER])
def test_qhyer_acts_as_the_slow_version(options, tiny_agent, point_world, shake):
    """Step 2 through step 1's cache, the window cut to K steps, and the Q tokens remembered: all exact."""
    agent = tiny_agent("qhyer", **options).eval()
    shake(agent)
    agent.q_shift.fill_(0.4)
    agent.q_scale.fill_(1.7)
    K = agent.config.context
    goal = point_world.observations[[37, 97]]
    memory, q, actions, seen = None, [], [], []
    with torch.no_grad():
        for t in range(K + 4):
            observation = point_world.observations[[t, 60 + t]]
            seen = [*seen, observation][-K:]
            q, actions = q[len(q) - (len(seen) - 1) :], actions[len(actions) - (len(seen) - 1) :]
            if t == 0:
                first = first_row(observation, goal, LUCK_ROWS)
            rows = (first[:, None] + t * agent.config.candidates + torch.arange(agent.config.candidates)) % LUCK_ROWS
            expected, q, actions = slow_act(agent, torch.stack(seen, 1), goal, q, actions, rows)
            action, memory = agent.act(observation, goal, memory)
            torch.testing.assert_close(action, expected, rtol=0, atol=1e-5)
            if memory is not None and "q" in memory:
                torch.testing.assert_close(memory["q"][:, -1:], q[-1], rtol=0, atol=1e-5)
            if agent.config.history == "hopping" and len(seen) == K:
                seen = seen[-(K // 2) :]


def test_qhyer_acts_as_it_was_trained(tiny_agent, point_world, shake):
    """The training pass over a window reads Q-hat and the action where acting does: same window, same outputs."""
    agent = tiny_agent("qhyer", dropout=0.0).eval()
    shake(agent)
    K = agent.config.context
    rows = torch.arange(K)
    observations, goal = point_world.observations[rows][None], point_world.observations[[30]]
    memory, q, taken = None, [], []
    with torch.no_grad():
        for t in range(K):
            action, memory = agent.act(observations[:, t], goal, memory)
            taken.append(action)
            q.append(agent.q_head.weight.new_tensor(memory["q"][:, -1].tolist()))
        actions, q_tokens = torch.stack(taken, 1), torch.stack(q, 1)
        x = agent.tokens(
            agent.normalize(observations), agent.normalize(goal)[:, None].expand(-1, K, -1), q_tokens, actions
        )
        h = agent.decoder(x)[0].unflatten(1, (K, 3))
        torch.testing.assert_close(agent.q_head(h[:, :, 0]).squeeze(-1), q_tokens, rtol=0, atol=1e-5)
        torch.testing.assert_close(agent.action_head(h[:, :, 1]).clamp(-1, 1), actions, rtol=0, atol=1e-5)


# ----------------------------------------------------------------------------------------------- QHyer's Q values


def window_batch(agent, episodes, count: int = 64):
    stage = agent.stages()[0]
    return stage.sampler.build(episodes, torch.Generator().manual_seed(0)).sample(count)


def test_q_normalisation_is_a_running_mean_of_magnitudes(tiny_agent, point_world, shake):
    """The first batch sets the scale, later ones move it by a hundredth; evaluation moves nothing."""
    agent = tiny_agent("qhyer")
    shake(agent)
    batch = window_batch(agent, point_world)
    goals = agent.goal_coordinates(batch["goals"])[:, None].expand(-1, agent.config.context, -1)
    with torch.no_grad():
        raw = agent.log_density(batch["observations"], batch["actions"], goals)
    agent.train()
    first = agent.q_values(batch)
    torch.testing.assert_close(agent.q_scale, raw.abs().mean())
    torch.testing.assert_close(first, raw / (raw.abs().mean() + 1e-3))
    agent.q_scale.mul_(2.0)
    second = agent.q_values(batch)
    torch.testing.assert_close(agent.q_scale, raw.abs().mean() * (0.99 * 2 + 0.01))
    torch.testing.assert_close(second, raw / (agent.q_scale + 1e-3))
    agent.eval()
    scale = agent.q_scale.clone()
    agent.q_values(batch)
    assert torch.equal(agent.q_scale, scale)
    assert {"q_scale", "q_shift", "q_seen"} <= set(agent.state_dict())


def test_q_standardised_has_mean_zero_and_unit_deviation(tiny_agent, point_world, shake):
    agent = tiny_agent("qhyer", q_normalization="standardize")
    shake(agent)
    q = agent.train().q_values(window_batch(agent, point_world))
    assert abs(float(q.mean())) < 1e-3 and float(q.abs().mean()) == pytest.approx(1.0, abs=0.01)


def test_q_masks_padding(tiny_agent, point_world, shake):
    """Steps beyond a short episode's end move neither the scale nor any loss."""
    agent = tiny_agent("qhyer", dropout=0.0)
    shake(agent)
    batch = window_batch(agent, point_world)
    batch["valid"][:, 2:] = False
    spoilt = {k: v.clone() for k, v in batch.items()}
    spoilt["observations"][:, 2:] += 3.0
    spoilt["actions"][:, 2:] -= 0.5
    results = []
    for b in (batch, spoilt):
        agent.q_seen.zero_()
        bc, regression, _ = agent.train().actor_loss(b)
        results.append((bc.detach(), regression.detach(), agent.q_scale.clone()))
    for a, b in zip(*results):
        torch.testing.assert_close(a, b)


def test_gradients_of_the_flow_come_from_its_likelihood_alone(tiny_agent, point_world, shake):
    """Q tokens and targets are detached: the actor's losses do not reach the critic, nor the critic's the actor."""
    agent = tiny_agent("qhyer")
    shake(agent)
    batch = window_batch(agent, point_world)
    bc, regression, _ = agent.actor_loss(batch)
    (bc + regression).backward()
    assert all(p.grad is None for p in agent.critic.parameters())
    agent.zero_grad()
    agent.critic_loss(batch)[0].backward()
    assert all(p.grad is not None for p in agent.critic.parameters())
    assert all(p.grad is None for n, p in agent.named_parameters() if not n.startswith("critic"))


def test_loss_is_the_weighted_sum(tiny_agent, point_world, shake):
    """Eq. (14), and Eq. (10)'s sign: with tau near one, a Q-hat that is too low costs more than one too high."""
    agent = tiny_agent("qhyer", dropout=0.0, weight_critic=2.0, weight_bc=3.0, weight_q=5.0, flow_noise=0.0)
    shake(agent)
    batch = window_batch(agent, point_world)
    total, metrics = agent.loss(batch)
    expected = 2 * metrics["critic/nll"] + 3 * metrics["actor/bc"] + 5 * metrics["actor/q_loss"]
    torch.testing.assert_close(total.detach(), expected)
    costs = []
    for shift in (-100.0, 100.0):
        with torch.no_grad():
            agent.q_head.bias += shift
        costs.append(float(agent.actor_loss(batch)[1].detach()))
        with torch.no_grad():
            agent.q_head.bias -= shift
    assert costs[0] > 50 * costs[1]


def test_critic_likelihood_is_eq_5(tiny_agent, point_world, shake):
    """-mean log p(g | s, a) of the flow batch, at goals moved by the noise that torch's generator gives."""
    agent = tiny_agent("qhyer", flow_noise=0.5)
    shake(agent)
    batch = window_batch(agent, point_world)
    torch.manual_seed(3)
    loss, _ = agent.critic_loss(batch)
    torch.manual_seed(3)
    goals = (batch["flow_goals"] - agent.observation_mean)[:, [0, 1]] / agent.observation_std[[0, 1]]
    goals = goals + 0.5 * torch.randn_like(goals)
    z = agent.critic["encoder"](agent.normalize(batch["flow_observations"]), batch["flow_actions"])
    torch.testing.assert_close(loss, -agent.critic["flow"].log_prob(goals, z).mean())


def test_defended_density_is_a_mixture(tiny_agent, point_world, shake):
    """(1 - w) p_flow + w N(0, I): normalised on a grid, bounded below where the flow alone falls off."""
    plain, defended = (tiny_agent("qhyer", flow_defence=w) for w in (0.0, 0.2))
    for agent in (plain, defended):
        shake(agent, 0.2)
    s, a = point_world.observations[[3]], point_world.actions[[3]]
    axis = torch.linspace(-8, 8, 201)
    grid = torch.cartesian_prod(axis, axis)
    with torch.no_grad():
        flow, mixed = (
            agent.log_density(s.expand(len(grid), -1), a.expand(len(grid), -1), grid) for agent in (plain, defended)
        )
    normal = torch.distributions.Normal(0.0, 1.0).log_prob(grid).sum(-1)
    torch.testing.assert_close(mixed.exp(), 0.8 * flow.exp() + 0.2 * normal.exp(), rtol=1e-4, atol=1e-6)
    assert float(mixed.exp().sum() * (axis[1] - axis[0]) ** 2) == pytest.approx(1.0, abs=0.02)
    assert (mixed >= normal + torch.log(torch.tensor(0.2)) - 1e-4).all() and flow.min() < mixed.min() - 1


def test_critic_and_actor_are_clipped_apart(tiny_agent):
    """Each by its own norm: two optimisers, and no parameter of the critic in the actor's."""
    agent = tiny_agent("qhyer")
    actor, critic = ([p for g in o.param_groups for p in g["params"]] for o in agent.stages()[0].optimizers)
    assert {id(p) for p in critic} == {id(p) for p in agent.critic.parameters()}
    assert {id(p) for p in actor} == {id(p) for n, p in agent.named_parameters() if not n.startswith("critic.")}
    assert len(tiny_agent("qhyer", conditioning="none").stages()[0].optimizers) == 1


@every_agent
def test_weight_decay_spares_biases_and_norms(name, tiny_agent):
    agent = tiny_agent(name, **({"weight_decay": 0.1} if hasattr(agents.load(name).Config, "weight_decay") else {}))
    spared = re.compile(r"(bias|norm|A_log|position|kind|\bD$)")
    decayed = {
        id(p)
        for stage in agent.stages()
        for optimizer in stage.optimizers
        for group in optimizer.param_groups
        if group.get("weight_decay", 0.0)
        for p in group["params"]
    }
    names = [n for n, p in agent.named_parameters() if id(p) in decayed]
    assert not [n for n in names if spared.search(n) and not n.startswith("tokens.")], names


def test_schedule_warms_up_and_falls(tiny_agent):
    agent = tiny_agent("qhyer", warmup=10, cosine=True, steps=110)
    schedule = agent.stages()[0].schedule
    assert [schedule(s) for s in (0, 4, 9)] == pytest.approx([0.1, 0.5, 1.0])
    assert schedule(10) == pytest.approx(1.0) and schedule(60) == pytest.approx(0.5)
    assert schedule(109) == pytest.approx(0.0, abs=1e-3)
    assert tiny_agent("qhyer").stages()[0].schedule is None


# What a setting of such a name cannot be, whoever has it; by what is said of it.
WRONG = {
    "must be at least 1": (0, -3),
    "must be positive": (0.0, -1.0),
    "must be 0 or more": (-0.1, math.nan),
    "must lie between 0 and 1": (-0.1, 1.1, math.nan),
    "must lie between 0 and 1, and be neither": (0.0, 1.0, math.nan),
    "must be at least 0 and below 1": (-0.1, 1.0, math.nan),
    "must be above 0 and at most 1": (0.0, 1.1),
    "names goal coordinates by position, from 0, each once": ((1, 1), (-1,)),
}


@every_agent
def test_settings_have_their_ranges(name):
    config = agents.load(name).Config
    mine = {field.name for field in dataclasses.fields(config)} & set(RANGES)
    assert {"steps", "batch_size", "learning_rate"} <= mine
    for field in mine:
        for value in WRONG[RANGES[field][1]]:
            with pytest.raises(UserError, match=f"^{field} {RANGES[field][1]}"):
                config(**{field: value})
    for prefix in ("", "value_"):
        if {f"{prefix}p_current", f"{prefix}p_random"} <= mine:
            with pytest.raises(UserError, match="exceed one"):
                config(**{f"{prefix}p_current": 0.6, f"{prefix}p_random": 0.5})


def test_every_range_is_of_some_agent():
    known = {field.name for name in agents.names() for field in dataclasses.fields(agents.load(name).Config)}
    assert set(RANGES) <= known and {text for _, text in RANGES.values()} == set(WRONG)
