"""The sequence models' losses worked by hand or by loops, who learns from which, and what acting does with them."""

from __future__ import annotations

import math

import pytest
import torch

from qhyer import losses
from qhyer.agents.edt import EDTConfig
from qhyer.agents.qdt import sweep
from qhyer.agents.qt import n_step
from qhyer.errors import UserError
from qhyer.nn.backbones import BACKBONES
from qhyer.nn.conservative import Conservative, squashed_log_density

NAMES = [
    "dt", "rvs", "edt", "gdt", "qdt", "cgdt", "reinformer", "dc", "dmamba", "qt", "lsdt", "dmixer", "vdt", "hdt",
    "iql", "cql",
]  # fmt: skip


def gaussian(x: float, mean: float, std: float) -> float:
    """-log N(x; mean, std^2)."""
    return 0.5 * ((x - mean) / std) ** 2 + math.log(std) + 0.5 * math.log(2 * math.pi)


def lean(u: float, tau: float) -> float:
    return tau if u >= 0 else 1 - tau


def make(tiny_agent, shake, name: str, **options):
    agent = tiny_agent(name, dropout=0.0, goal="concat", **options)
    shake(agent, 0.2)
    return agent


def drawn(agent, episodes, count: int = 6) -> dict[str, torch.Tensor]:
    """A batch whose first three windows end after two of their four steps."""
    batch = agent.stages()[0].sampler.build(episodes, torch.Generator().manual_seed(1)).sample(count)
    batch["valid"][:3, 2:] = False
    return batch


def valid_steps(batch) -> list[tuple[int, int]]:
    return [(i, k) for i in range(len(batch["valid"])) for k in range(4) if batch["valid"][i, k]]


# ------------------------------------------------------------------------------------------------------- formulas


def test_diagonal_nll_and_asymmetry():
    value = losses.diagonal_nll(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 1.0]), torch.tensor([3.0, -1.0]))
    assert float(value) == pytest.approx(gaussian(3, 1, 1) + gaussian(-1, 2, math.e), rel=1e-6)
    weights = losses.asymmetry(torch.tensor([-2.0, 0.5]), 0.8)
    torch.testing.assert_close(weights, torch.tensor([0.25, 1.0]))
    torch.testing.assert_close(losses.asymmetry(torch.tensor([-2.0, 0.5]), 0.5), torch.ones(2))


def test_a_squashed_density_is_one():
    """On a grid of a = tanh u: the integral of p(a) da, with da = (1 - a^2) du."""
    u = torch.linspace(-8, 8, 20001, dtype=torch.float64)[:, None]
    log_p = squashed_log_density(u, torch.tensor([0.3], dtype=u.dtype), torch.tensor([-0.2], dtype=u.dtype))
    mass = (log_p.exp() * (1 - torch.tanh(u[:, 0]) ** 2)).sum() * (u[1, 0] - u[0, 0])
    assert float(mass) == pytest.approx(1.0, abs=1e-6)


def test_values_take_the_place_of_returns():
    """QDT's sweep by hand. Three rows, rewards 1, 0, 0, logged returns 1, 0, 0; a value of 5 at the second: 1 + 5."""
    rewards, returns = torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([[1.0, 0.0, 0.0]])
    everywhere = torch.ones(1, 3, dtype=torch.bool)

    def swept(values: list[float], valid: torch.Tensor = everywhere) -> float:
        return float(sweep(torch.tensor([values]), rewards, returns, valid))

    assert swept([0, 5, 0]) == 6.0 and swept([7, 5, 0]) == 7.0
    assert swept([-9, -9, -9]) == 1.0  # never less than logged
    assert swept([0, 0, 3]) == 4.0
    assert swept([0, 5, 9], torch.tensor([[True, False, False]])) == 1.0  # beyond the end there is nothing


@pytest.mark.parametrize("seed", range(3))
def test_sweep_against_recursion(seed):
    generator = torch.Generator().manual_seed(seed)
    values, rewards = torch.randn(2, 1, 6, generator=generator).unbind(0)
    returns = rewards.flip(1).cumsum(1).flip(1) + 0.7  # something is left after the last row

    def best(m: int) -> float:
        logged = float(returns[0, 5]) if m == 5 else float(rewards[0, m]) + best(m + 1)
        return max(logged, float(values[0, m]))

    found = float(sweep(values, rewards, returns, torch.ones(1, 6, dtype=torch.bool)))
    assert found == pytest.approx(best(0), rel=1e-5)


def test_n_step_by_hand():
    """gamma 1/2. To the end: 1 + (2 + (4 + 8 / 2) / 2) / 2; ended by a goal at the second step; a window of two."""
    rewards = torch.tensor([[1.0, 2.0, 4.0, 9.0]]).expand(3, 4)
    going = torch.ones(3, 4)
    going[1, 1] = 0.0
    y = n_step(rewards, going, torch.tensor([3, 3, 1]), torch.tensor([8.0, 8.0, 6.0]), 0.5)
    assert y[0].tolist() == [4.0, 6.0, 8.0, 8.0]
    assert y[1].tolist() == [2.0, 2.0, 8.0, 8.0]
    assert y[2, :2].tolist() == [4.0, 6.0]


# -------------------------------------------------------------------------------------------------- whole losses


def test_reinformer_by_hand(tiny_agent, shake, point_world):
    agent = make(tiny_agent, shake, "reinformer", expectile=0.9, return_scale=2.0, tolerance=0.4, temperature=0.3)
    batch = drawn(agent, point_world)
    with torch.no_grad():
        best, mean = agent.predict(*agent.window(batch))
    steps = valid_steps(batch)
    size = sum(abs(float(batch["returns"][i, k])) / 2 for i, k in steps) / len(steps)
    regression = nll = 0.0
    for i, k in steps:
        u = (float(batch["returns"][i, k]) / 2 - float(best[i, k])) / size
        regression += lean(u, 0.9) * u**2 / len(steps)
        std = agent.log_std.exp().tolist()
        nll += sum(gaussian(float(a), float(m), s) for a, m, s in zip(batch["actions"][i, k], mean[i, k], std)) / len(
            steps
        )
    entropy = sum(s + 0.5 * math.log(2 * math.pi * math.e) for s in agent.log_std.tolist())
    alpha = math.exp(agent.log_temperature.item())
    expected = regression + nll - alpha * entropy + alpha * (entropy + 2)
    assert float(agent.loss(batch)[0].detach()) == pytest.approx(expected, rel=1e-4)


def test_reinformer_s_return_does_not_see_itself_and_its_action_does(tiny_agent, shake, point_world):
    agent = make(tiny_agent, shake, "reinformer").eval()
    window = agent.window(drawn(agent, point_world))
    moved = window.returns.clone()
    moved[:, -1] += 1.0
    with torch.no_grad():
        best, mean = agent.predict(*window)
        other, action = agent.predict(*window._replace(returns=moved))
    torch.testing.assert_close(best, other)
    assert (action[:, -1] - mean[:, -1]).abs().max() > 1e-4


def test_reinformer_asks_for_what_it_predicts(tiny_agent, shake, point_world):
    """At the first step: R-hat at the state, whatever is in the return's place, then the action given R-hat."""
    agent = make(tiny_agent, shake, "reinformer").eval()
    observation, goal = point_world.observations[[3, 80]], point_world.observations[[30, 100]]
    action, memory = agent.act(observation, goal, None)
    with torch.no_grad():
        window = agent.recall(observation, goal, None)
        best, _ = agent.predict(*window._replace(returns=torch.full((2, 1), 5.0)))
        _, mean = agent.predict(*window._replace(returns=best))
    torch.testing.assert_close(memory["returns"], best)
    torch.testing.assert_close(action, mean[:, -1].clamp(-1, 1))


def test_rvs_by_hand(tiny_agent, shake, point_world):
    agent = tiny_agent("rvs", goal="none", tolerance=0.4)
    shake(agent, 0.2)
    batch = agent.stages()[0].sampler.build(point_world, torch.Generator().manual_seed(0)).sample(8)
    total = 0.0
    for i in range(8):
        with torch.no_grad():
            mean = agent.actor(torch.cat([batch["observations"][i], batch["averages"][i][None]]))
        std = agent.log_std.exp().tolist()
        total += sum(gaussian(float(a), float(m), s) for a, m, s in zip(batch["actions"][i], mean, std))
    assert float(agent.loss(batch)[0].detach()) == pytest.approx(total / 8, rel=1e-4)
    agent.ask.after_step()
    assert float(agent.ask.target()) == pytest.approx(float(batch["averages"].max()))


def test_iql_by_hand(tiny_agent, shake, point_world):
    agent = tiny_agent("iql", goal="concat", discount=0.9, expectile=0.8, temperature=2.0, tolerance=0.3)
    shake(agent, 0.2)
    batch = agent.stages()[0].sampler.build(point_world, torch.Generator().manual_seed(0)).sample(10)
    value = critic = actor = 0.0
    for i in range(10):
        one = {key: batch[key][i : i + 1] for key in batch}
        s, next_s = (agent.state(one[key], one["goals"]) for key in ("observations", "next_observations"))
        with torch.no_grad():
            v, next_v = float(agent.value(s)), float(agent.value(next_s))
            advantage = float(agent.target_critic(s, one["actions"]).min()) - v
            target = float(one["rewards"]) + 0.9 * float(one["masks"]) * next_v
            value += lean(advantage, 0.8) * advantage**2
            critic += sum((q - target) ** 2 for q in agent.critic(s, one["actions"])[:, 0].tolist()) / 2
            std = agent.log_std.exp().tolist()
            nll = sum(gaussian(float(a), float(m), x) for a, m, x in zip(one["actions"][0], agent.actor(s)[0], std))
            actor += min(math.exp(2.0 * advantage), 100.0) * nll
    assert 0 < float(batch["rewards"].mean()) < 1
    assert float(agent.loss(batch)[0].detach()) == pytest.approx((value + critic + actor) / 10, rel=1e-4)


def learner(**options) -> Conservative:
    torch.manual_seed(0)
    settings = dict(discount=0.9, weight=2.0, gap=0.5, samples=5, best_backup=False) | options
    net = Conservative(3, 2, (16,), (16,), **settings)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return net


def test_the_penalty_of_a_flat_q_is_its_volume():
    """Q = c everywhere: the log of the sum of exp(c) / p over 3 n draws. Uniform ones give log(n 2^d) + c - c each."""
    net = learner(samples=2000)
    with torch.no_grad():
        for member in net.critic.members:
            member[-1].weight.zero_()
            member[-1].bias.fill_(1.5)
    s = torch.randn(4, 3)
    a = torch.zeros(4, 2)
    with torch.no_grad():
        penalty = net.penalty(s, a, s, net.critic(s, a))
    # The mean of 1 / p over draws from p is the volume, 4: the sum of 6000 such is 24000, up to the tails.
    torch.testing.assert_close(penalty, torch.full((2, 4), math.log(24000.0)), rtol=0, atol=0.25)


def test_each_of_cql_s_losses_moves_its_own_parameters():
    net = learner()
    s, next_s = torch.randn(2, 7, 3)
    a, r = torch.rand(7, 2) * 2 - 1, torch.rand(7)
    torch.manual_seed(1)
    net(s, a, r, torch.ones(7), next_s)[0].backward()
    together = {n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}
    assert not [n for n in together if n.startswith("target_critic")]
    # The actor's gradient, by its loss alone, with the same draws: the policy's samples come in the same order.
    net.zero_grad()
    torch.manual_seed(1)
    with torch.no_grad():
        net.policy.sample(next_s, 1)
        torch.rand(5, 7, 2)
        net.policy.sample(s, 5)
        net.policy.sample(next_s, 5)
    chosen, log_pi = net.policy.sample(s, 1)
    (net.log_alpha.exp().detach() * log_pi[0] - net.critic(s, chosen[0]).amin(0)).mean().backward()
    for name, parameter in net.policy.named_parameters():
        torch.testing.assert_close(parameter.grad, together[f"policy.{name}"])
    excess = together["log_lagrange"].item() / -math.exp(net.log_lagrange.item()) / 0.5
    torch.manual_seed(1)
    _, metrics = net(s, a, r, torch.ones(7), next_s)
    assert excess == pytest.approx(2 * 2.0 * (float(metrics["critic/penalty"]) - 0.5), rel=1e-3)


def test_cql_s_backup(tiny_agent, point_world):
    """Where nothing follows, the target is the reward: the squared error does not depend on the next state."""
    net = learner()
    s, a, r = torch.randn(5, 3), torch.zeros(5, 2), torch.rand(5)
    expected = ((r - net.critic(s, a)) ** 2).mean(1).sum()
    for next_s in torch.randn(2, 5, 3):
        _, metrics = net(s, a, r, torch.zeros(5), next_s)
        torch.testing.assert_close(metrics["critic/loss"], expected.detach())
    best = learner(best_backup=True)
    torch.manual_seed(0)
    one = float(learner()(s, a, r, torch.ones(5), s)[1]["critic/loss"])
    torch.manual_seed(0)
    assert float(best(s, a, r, torch.ones(5), s)[1]["critic/loss"]) != one


def test_edt_s_bins_and_losses(tiny_agent, shake, point_world):
    agent = make(tiny_agent, shake, "edt", bins=11, target_return=10.0, expectile=0.8, tolerance=0.4)
    returns = torch.tensor([0.0, 0.4, 0.6, 5.0, 10.0, 30.0])
    assert agent.bin_of(returns).tolist() == [0, 0, 1, 5, 10, 10]
    batch = drawn(agent, point_world)
    window = agent.window(batch)
    with torch.no_grad():
        h = agent.hidden(window.states, agent.bin_of(window.returns), window.actions, window.times)
        at_s, at_r = agent.tokens.read(h, "state"), agent.tokens.read(h, "return")
        actions, logits = agent.action_head(at_r), agent.bin_head(at_s).log_softmax(-1)
        states = agent.state_head(torch.cat([at_r, actions], -1))
        promised = agent.return_head(at_s)[..., 0]
        total, steps = 0.0, valid_steps(batch)
        for i, k in steps:
            u = min(float(batch["returns"][i, k]) / 10, 1.0) - float(promised[i, k])
            bin_ = round(min(float(batch["returns"][i, k]) / 10, 1.0) * 10)
            total += float((actions[i, k] - batch["actions"][i, k]).square().mean())
            total += float((states[i, k] - agent.normalize(batch["next_observations"][i, k])).square().mean())
            total += 0.5 * lean(u, 0.8) * u**2 - 0.001 * float(logits[i, k, bin_])
    assert float(agent.loss(batch)[0].detach()) == pytest.approx(total / len(steps), rel=1e-4)
    with pytest.raises(UserError, match="stride"):
        EDTConfig(stride=0)


def test_edt_acts_on_the_history_that_promises_most(tiny_agent, shake, point_world):
    """Against judging every history alone; and among likely bins it asks for the highest."""
    agent = make(tiny_agent, shake, "edt", stride=1, target_return=3.0, context=4).eval()
    goal, memory, lengths = point_world.observations[[50]], None, set()
    with torch.no_grad():
        for t in range(20):
            observation = point_world.observations[[2 * t]]
            window = agent.recall(observation, goal, memory)
            steps = window.returns.shape[1]
            judged = [agent.judge(type(window)(*(part[:, i:] for part in window))) for i in range(steps)]
            best = max(range(steps), key=lambda i: float(judged[i][0]))
            lengths.add(steps - best)
            action, memory = agent.act(observation, goal, memory)
            torch.testing.assert_close(action, judged[best][1].clamp(-1, 1), rtol=0, atol=1e-6)
        assert len(lengths) > 1
        h = torch.randn(1, 1, 16)
        logits = agent.bin_head(h)[0, 0]
        chosen = int(agent.promising(h))
        assert chosen == max(
            range(60), key=lambda b: float(logits[b] + 25 * b / 59) if logits[b] >= logits.sort()[0][9] else -1e9
        )


def test_qt_by_hand(tiny_agent, shake, point_world):
    agent = make(tiny_agent, shake, "qt", discount=0.8, eta=0.5, weight_bc=2.0, tolerance=0.4)
    batch = drawn(agent, point_world)
    window = agent.window(batch)
    with torch.no_grad():
        x = agent.tokens({"return": window.returns, "state": window.states, "action": window.actions}, window.times)
        h = agent.trunk(x)
        actions, states = agent.action_head(h[:, 1::3]), agent.state_head(h[:, 2::3])
        slow = agent.slow
        y = slow["tokens"]({"return": window.returns, "state": window.states, "action": window.actions}, window.times)
        slow_actions = slow["action_head"](slow["trunk"](y)[:, 1::3])
        critic, count = 0.0, 0
        for i in range(6):
            last = 1 if i < 3 else 3
            end = float(agent.target_critic(window.states[i, last], slow_actions[i, last]).min())
            target = float(batch["rewards"][i, last]) if batch["reached"][i, last] else end
            for k in range(last - 1, -1, -1):
                follows = 0.0 if batch["reached"][i, k] else 0.8 * target
                target = float(batch["rewards"][i, k]) + follows
                q = agent.critic(window.states[i, k], batch["actions"][i, k]).tolist()
                critic += sum((value - target) ** 2 for value in q)
                count += 1
        steps = valid_steps(batch)
        bc = sum(float((actions[i, k] - batch["actions"][i, k]).square().mean()) for i, k in steps) / len(steps)
        to = agent.normalize(batch["next_observations"])
        change = sum(float((states[i, k] - to[i, k]).square().mean()) for i, k in steps) / len(steps)
        q = torch.stack([agent.critic(window.states[i, k], actions[i, k]) for i, k in steps])  # (n, 2)
    assert 0 < float(batch["reached"].mean()) < 1
    both = [
        critic / count + 2.0 * (bc + change) - 0.5 * float(q[:, a].mean() / q[:, 1 - a].abs().mean()) for a in (0, 1)
    ]
    found = {round(float(agent.loss(batch)[0].detach()), 3) for _ in range(12)}
    assert found == {round(value, 3) for value in both}


def test_vdt_by_hand(tiny_agent, shake, point_world):
    agent = make(tiny_agent, shake, "vdt", discount=0.8, eta=0.5, expectile=0.8, temperature=2.0, tolerance=0.4)
    batch = drawn(agent, point_world)
    window, steps = agent.window(batch), valid_steps(batch)
    total, climbed = 0.0, []
    with torch.no_grad():
        actions = agent.predict(*window)
        following = agent.states(batch["next_observations"], batch["goals"])
        for i, k in steps:
            s, a = window.states[i, k], batch["actions"][i, k]
            v, next_v = float(agent.value(s)), float(agent.value(following[i, k]))
            advantage = float(agent.target_critic(s, a).min()) - v
            target = float(batch["rewards"][i, k]) + 0.8 * (1 - float(batch["reached"][i, k])) * next_v
            total += lean(advantage, 0.8) * advantage**2 + sum((q - target) ** 2 for q in agent.critic(s, a).tolist())
            total += min(math.exp(2.0 * advantage), 100.0) * float((actions[i, k] - a).square().mean())
            climbed.append(agent.critic(s, actions[i, k]))
        q = torch.stack(climbed)
    both = {round(total / len(steps) - 0.5 * float(q[:, a].mean() / q[:, 1 - a].abs().mean()), 3) for a in (0, 1)}
    assert {round(float(agent.loss(batch)[0].detach()), 3) for _ in range(12)} == both


def test_cgdt_by_hand(tiny_agent, shake, point_world):
    agent = make(
        tiny_agent, shake, "cgdt", critic_expectile=0.3, policy_expectile=0.8, alpha=0.5, rise=4, tolerance=0.4
    )
    agent.ask.updates.fill_(2.0)  # half-way up: alpha is 1/4
    batch = drawn(agent, point_world)
    window, steps = agent.window(batch), valid_steps(batch)
    critic = guidance = bc = 0.0
    with torch.no_grad():
        actions = agent.predict(*window)
        seen = agent.expected(window.states, window.actions, window.times)
        guided = agent.expected(window.states, actions, window.times)
        for i, k in steps:
            r, mean, std = float(batch["returns"][i, k]), float(seen[0][i, k]), math.exp(float(seen[1][i, k]))
            critic += lean(r - mean, 0.3) / 0.7 * gaussian(r, mean, std)
            u = (r - float(guided[0][i, k])) / math.exp(float(guided[1][i, k]))
            guidance += lean(u, 0.8) / 0.8 * u**2
            bc += float((actions[i, k] - batch["actions"][i, k]).square().mean())
    expected = (critic + (bc + 0.25 * guidance) / 1.25) / len(steps)
    assert float(agent.loss(batch)[0].detach()) == pytest.approx(expected, rel=1e-4)


def test_cgdt_acts_on_a_shorter_history(tiny_agent):
    agent = tiny_agent("cgdt", acting_steps=2).eval()
    _, memory = agent.act(torch.zeros(1, 4), torch.zeros(1, 4), None)
    for _ in range(3):
        _, memory = agent.act(torch.zeros(1, 4), torch.zeros(1, 4), memory)
    assert memory["actions"].shape[1] == 1


def test_dmixer_adds_the_guess(tiny_agent, shake, point_world):
    agent = make(tiny_agent, shake, "dmixer").train()
    batch = drawn(agent, point_world)
    loss, metrics = agent.loss(batch)
    torch.testing.assert_close(loss.detach(), metrics["actor/mse"] + metrics["router/guess"])
    assert metrics["router/guess"] > 0


def test_qdt_learns_from_corrected_returns(tiny_agent, shake, point_world):
    agent = make(tiny_agent, shake, "qdt", tolerance=0.4).eval()
    batch = drawn(agent, point_world)
    corrected = agent.relabelled(batch)
    gain = corrected - batch["returns"]
    assert (gain >= -1e-5).all()
    torch.testing.assert_close(
        gain, gain[:, :1].expand_as(gain), atol=1e-4, rtol=0
    )  # rewards in between are as they were
    with torch.no_grad():
        expected, _ = agent.imitation(batch, agent.predict(*agent.window(batch | {"returns": corrected})))
        torch.manual_seed(3)
        value, _ = agent.value_loss(batch)
        torch.manual_seed(3)
        torch.testing.assert_close(agent.loss(batch)[0], expected + value)


# ------------------------------------------------------------------------------------------------ who learns what


@pytest.mark.parametrize("name", ["qdt", "qt", "vdt", "cgdt"])
def test_actor_and_critic_do_not_learn_from_each_other(name, tiny_agent, shake, point_world):
    """A critic's weights moved: the actor's imitation has the same gradient; and the other way round for the critic."""
    agent = make(tiny_agent, shake, name, **({"eta": 0.0} if name in ("qt", "vdt") else {}))
    batch = drawn(agent, point_world)
    critics = ("learner.", "critic.", "value.")
    trained = {n: p for n, p in agent.named_parameters() if p.requires_grad}
    torch.manual_seed(0)
    agent.loss(batch)[0].backward()
    before = {n: p.grad.clone() for n, p in trained.items() if n.startswith(critics) and p.grad is not None}
    assert before
    agent.zero_grad()
    with torch.no_grad():
        for n, p in trained.items():
            if not n.startswith(critics):
                p += 0.1
    torch.manual_seed(0)
    agent.loss(batch)[0].backward()
    for n, grad in before.items():
        torch.testing.assert_close(trained[n].grad, grad, msg=n)


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("name", ["dt", "reinformer"])
def test_any_head_on_any_backbone(name, backbone, tiny_agent, shake, point_world):
    """The return-conditioned and the expectile head: both learn, and see no later step."""
    agent = make(tiny_agent, shake, name)
    agent.trunk = BACKBONES[backbone](16, 2, 2, 0.0)
    shake(agent.trunk, 0.2)
    batch = drawn(agent, point_world)
    agent.loss(batch)[0].backward()
    reached = [p for n, p in agent.trunk.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0]
    assert len(reached) >= 0.7 * len(list(agent.trunk.parameters()))  # a router's guess has a loss of its own
    agent.eval()
    window = agent.window(batch)
    later = window.states.clone()
    later[:, 2:] += 1.0

    def actions(w) -> torch.Tensor:
        out = agent.predict(*w)
        return out[1] if isinstance(out, tuple) else out

    with torch.no_grad():
        a, b = actions(window), actions(window._replace(states=later))
    torch.testing.assert_close(a[:, :2], b[:, :2], rtol=0, atol=1e-5)
    assert (a[:, 2:] - b[:, 2:]).abs().max() > 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_half_precision_and_short_windows(name, tiny_agent, point_world):
    """One update in bfloat16, and one with a context of a single step: finite, and it acts."""
    from qhyer.update import Update

    options = [{}] + ([{"context": 1}] if name not in ("rvs", "iql", "cql") else [])
    for extra in options:
        agent = tiny_agent(name, **extra)
        (stage,) = agent.stages()
        sampler = stage.sampler.build(point_world, torch.Generator().manual_seed(0))
        update = Update(agent.train(), stage, sampler, "bf16", torch.device("cpu"))
        for step in range(2):
            update(step)
        assert all(value == value for value in update.take_metrics().values())
        agent.eval()
        memory = None
        for t in range(3):
            action, memory = agent.act(point_world.observations[[t]], point_world.observations[[40]], memory)
        assert action.isfinite().all()


def test_impossible_settings_are_refused(tiny_config):
    for name, wrong in (
        ("dt", dict(width=16, heads=3)),
        ("dt", dict(tolerance=-1.0)),
        ("dt", dict(return_scale=0.0)),
        ("lsdt", dict(conv_share=1.0)),
        ("dmixer", dict(capacity=0.0)),
        ("reinformer", dict(expectile=1.0)),
        ("rvs", dict(p_random=2.0)),
        ("iql", dict(p_current=0.8, p_random=0.5)),
        ("cql", dict(samples=0)),
        ("qdt", dict(sweep=0)),
        ("qt", dict(candidates=0)),
        ("vdt", dict(expectile=0.0)),
        ("cgdt", dict(rise=0)),
    ):
        with pytest.raises(UserError):
            tiny_config(name, **wrong)


@pytest.mark.parametrize("name", ["qt", "vdt"])
def test_the_critic_chooses_between_targets(name, tiny_agent, shake, point_world):
    """Against asking for 8, 6, 4 and 2 one after the other, each with its own returns all the way back."""
    agent = make(tiny_agent, shake, name, target_return=8.0, candidates=4).eval()
    goal, memory, chosen = point_world.observations[[50]], None, set()
    with torch.no_grad():
        for t in range(12):
            observation = point_world.observations[[3 * t]]
            window = agent.recall(observation, goal, memory)
            tried = []
            for less in (0.0, 2.0, 4.0, 6.0):
                one = agent.predict(*window._replace(returns=window.returns - less))[:, -1].clamp(-1, 1)
                tried.append((float(agent.target_critic(window.states[:, -1], one).min()), one))
            best = max(range(4), key=lambda i: tried[i][0])
            chosen.add(best)
            action, memory = agent.act(observation, goal, memory)
            torch.testing.assert_close(action, tried[best][1], rtol=0, atol=1e-6)
            assert float(memory["returns"][0, -1]) == 8.0
    assert len(chosen) > 1
