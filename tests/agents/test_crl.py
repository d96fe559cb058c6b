"""CRL's losses worked pair by pair, and its logits on a chain against the frequencies they estimate."""

from __future__ import annotations

import math

import pytest
import torch

from qhyer.agents.crl import CRLConfig
from qhyer.data.samplers import GoalLaw
from qhyer.errors import UserError


def at(net, g: torch.Tensor, *inputs: torch.Tensor) -> list[float]:
    """Every member at one sample: phi' psi / sqrt(d), d = 16 here."""
    with torch.no_grad():
        phi, psi = net.phi(*(x[None] for x in inputs)), net.psi(g[None])
    return [float(a[0] @ b[0]) / 4.0 for a, b in zip(phi, psi)]


def make(tiny_agent, shake, **options):
    agent = tiny_agent("crl", **options)
    shake(agent, 0.3)
    return agent


def cross_entropy(net, batch, with_action: bool) -> float:
    """Mean of -log sigmoid(f) where the goal is the row's own, -log sigmoid(-f) where it is another's."""
    total, count = 0.0, len(batch["rows"])
    for i in range(count):
        inputs = [batch["observations"][i], *([batch["actions"][i]] if with_action else [])]
        for k in range(count):
            for f in at(net, batch["value_goals"][k], *inputs):
                total += math.log1p(math.exp(-f if i == k else f))
    return total / (count * count * len(net.phi.weights[0]))


def test_contrastive_loss_by_hand(tiny_agent, shake, batch_of):
    agent = make(tiny_agent, shake)
    batch = batch_of(agent, 6)
    logits = agent.critic.table(batch["value_goals"], batch["observations"], batch["actions"])
    loss, metrics = agent.contrastive_loss("critic", logits)
    assert float(loss.detach()) == pytest.approx(cross_entropy(agent.critic, batch, True), rel=1e-4)
    mean = logits.detach().mean(0)
    off = ~torch.eye(6, dtype=torch.bool)
    assert float(metrics["critic/positive"]) == pytest.approx(float(mean.diagonal().mean()), rel=1e-5)
    assert float(metrics["critic/negative"]) == pytest.approx(float(mean[off].mean()), rel=1e-4)


FLOORS = pytest.mark.parametrize("floor", [None, -3.0])


def test_a_floor_is_a_number():
    with pytest.raises(UserError, match="q_floor must be a number"):
        CRLConfig(q_floor=math.nan)


@FLOORS
def test_ddpgbc_by_hand(tiny_agent, shake, batch_of, floor):
    agent = make(tiny_agent, shake, alpha=0.7, q_floor=floor)
    batch, q, log_p = batch_of(agent), [], []
    for i in range(12):
        s, g, a = (batch[k][i] for k in ("observations", "actor_goals", "actions"))
        with torch.no_grad():
            mean = agent.actor(torch.cat([s, g]))
        q.append(min(at(agent.critic, g, s, mean.clamp(-1, 1))))
        log_p.append(sum(-0.5 * float(x) ** 2 - 0.5 * math.log(2 * math.pi) for x in a - mean))
    if floor is not None:
        assert min(q) < floor < max(q)
        q = [max(value, floor) for value in q]
    expected = -sum(q) / (sum(map(abs, q)) + 12e-6) - 0.7 * sum(log_p) / 12
    assert float(agent.actor_loss(batch)[0].detach()) == pytest.approx(expected, rel=1e-4)


@FLOORS
def test_awr_by_hand(tiny_agent, shake, batch_of, floor):
    """Its V is contrastive too, without the action, one member; all three losses are summed."""
    agent = make(tiny_agent, shake, alpha=2.0, actor_loss="awr", q_floor=floor)
    batch, total, below, low = batch_of(agent, 6), 0.0, 0, -math.inf if floor is None else floor
    for i in range(6):
        s, g, a = (batch[k][i] for k in ("observations", "actor_goals", "actions"))
        (v,) = at(agent.value, g, s)
        with torch.no_grad():
            mean = agent.actor(torch.cat([s, g]))
        log_p = sum(-0.5 * float(x) ** 2 - 0.5 * math.log(2 * math.pi) for x in a - mean)
        q = min(at(agent.critic, g, s, a))
        below += (q < low) + (v < low)
        total -= min(math.exp(2.0 * (max(q, low) - max(v, low))), 100.0) * log_p / 6
    assert (below > 0) == (floor is not None)
    assert float(agent.actor_loss(batch)[0].detach()) == pytest.approx(total, rel=1e-4)
    expected = total + cross_entropy(agent.critic, batch, True) + cross_entropy(agent.value, batch, False)
    assert float(agent.loss(batch)[0].detach()) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("actor_loss", ["ddpgbc", "awr"])
def test_the_actor_leaves_the_critic_be(tiny_agent, shake, batch_of, actor_loss):
    agent = make(tiny_agent, shake, actor_loss=actor_loss)
    agent.actor_loss(batch_of(agent))[0].backward()
    for name, parameter in agent.named_parameters():
        assert (parameter.grad is not None) == name.startswith("actor."), name


def test_goals_are_ogbench_s(tiny_agent):
    """The value's all geometric, the actor's uniform in the future."""
    sampler = tiny_agent("crl").stages()[0].sampler
    assert sampler.value == GoalLaw(0.0, 1.0, 0.0, 0.99) and sampler.actor == GoalLaw(0.0, 1.0, 0.0, None)


def test_the_actor_is_all_that_acting_reads(tiny_agent, point_world, shake):
    agent, other = tiny_agent("crl"), tiny_agent("crl", seed=1)
    shake(agent)
    state = agent.acting_state()
    assert {name.split(".")[0] for name in state} == {"actor", "observation_mean", "observation_std"}
    other.load_state_dict(state, strict=False)
    s, g = point_world.observations[:5], point_world.observations[20:25]
    assert torch.equal(agent.act(s, g, None)[0], other.act(s, g, None)[0])


@pytest.mark.parametrize("wrong", [dict(latent_dim=0), dict(discount=1.0), dict(actor_p_random=1.5)])
def test_nonsense_is_refused(wrong):
    with pytest.raises(UserError):
        CRLConfig(**wrong)


def test_logits_are_log_ratios(learn, chain, chain_world):
    """The best logit is log p(g | s, a) / ((B - 1) p(g)), counted here from many draws of the same goals; and the actor
    goes where it leads."""
    agent = learn("crl", 300, discount=0.7, latent_dim=16, alpha=0.5)
    draws = agent.stages()[0].sampler.build(chain_world, torch.Generator().manual_seed(1)).sample(200_000)
    s, g = draws["observations"].argmax(1), draws["value_goals"].argmax(1)
    a = (draws["actions"][:, 0] > 0).long()
    counts = torch.zeros(2, 7, 7).index_put_((a, s, g), torch.ones(len(s)), accumulate=True)
    given, overall = counts / counts.sum(-1, keepdim=True), counts.sum((0, 1)) / counts.sum()
    expected = (given / overall / 255).log()
    with torch.no_grad():
        logits = torch.stack(
            [
                chain.square(agent.critic(chain.goals, chain.states, torch.full((49, 1), action)).mean(0))
                for action in (-1.0, 1.0)
            ]
        )
    often = given > 0.01
    assert (logits - expected)[often].abs().mean() < 0.4
    assert (
        logits[counts == 0].max() < logits[often].mean() - 1.0
    )  # the other half is out of reach, and no walk joins them
    assert chain.alignment(agent) > 0.7
