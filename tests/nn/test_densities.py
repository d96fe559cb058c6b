"""The estimators of log p(g | s, a): each against what it should be in a case where that is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.distributions import MultivariateNormal

from qhyer.nn.clearning import CLearning, mc_loss, td_loss
from qhyer.nn.contrastive import Contrastive, nce_loss
from qhyer.nn.cvae import CVAE
from qhyer.nn.densities import Bins, DensityEstimator, FlowDensity, Histogram, HistogramMarginal

DIMS = (3, 2, 2)  # state, action, goal


def bins(goal: bool = True) -> Bins:
    return Bins([-3.0, -3.0], [3.0, 3.0], [4, 3]) if goal else Bins([-3.0] * 3, [3.0] * 3, [2, 2, 2])


def estimators() -> dict[str, DensityEstimator]:
    torch.manual_seed(0)
    return {
        "flow": FlowDensity(*DIMS, 2, 8, encoder_width=16, encoder_layers=1, representation=4, noise=0.1),
        "cvae": CVAE(*DIMS, hidden=(16,), samples=7),
        "cvae, fixed": CVAE(*DIMS, hidden=(16,), samples=7, std=0.3),
        "C-learning": CLearning(*DIMS, hidden=(16,), marginal=HistogramMarginal(bins())),
        "C-learning, td": CLearning(*DIMS, hidden=(16,), kind="td", discount=0.9, slow=0.1),
        "contrastive": Contrastive(*DIMS, hidden=(16,), representation=4, marginal=HistogramMarginal(bins())),
        "histogram": Histogram(bins(goal=False), 2, bins()),
    }


def batch(size: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    state, action, goal = (torch.randn(size, d, generator=generator) for d in DIMS)
    return goal, state, action


@pytest.mark.parametrize("name", estimators())
def test_one_interface(name: str) -> None:
    """The same calls for all: shapes, determinism, one point as in a batch, and every weight learns."""
    estimator = estimators()[name]
    goal, state, action = batch(12)
    loss = estimator.loss(goal, state, action, batch(12, seed=1))
    assert loss.shape == () and loss.isfinite()
    if list(estimator.parameters()):
        loss.backward()
        for key, parameter in estimator.named_parameters():
            if parameter.requires_grad and "couplings" not in key and "encoder" not in key:  # those start at zero
                assert parameter.grad is not None and parameter.grad.isfinite().all(), key
    estimator.after_step(goal, state, action)
    with torch.no_grad():
        log_prob = estimator.log_prob(goal, state, action)
        torch.testing.assert_close(log_prob, estimator.log_prob(goal, state, action), rtol=0, atol=0)
        shaped = estimator.log_prob(*(x.view(3, 4, -1) for x in (goal, state, action)))
        torch.testing.assert_close(shaped, log_prob.view(3, 4))
        torch.testing.assert_close(estimator.log_prob(goal[2], state[2], action[2]), log_prob[2])
    again = estimators()[name]
    again.load_state_dict(estimator.state_dict())
    torch.testing.assert_close(again.log_prob(goal, state, action), log_prob)


@pytest.mark.parametrize("name", estimators())
def test_learns_where_the_goal_is(name: str) -> None:
    """Goals lie at (±1.5, 0) as the action's first entry is the greater or not; everything else is noise."""
    estimator = estimators()[name]
    learned = [p for p in estimator.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(learned, lr=1e-2) if learned else None
    generator = torch.Generator().manual_seed(0)

    def draw(size: int) -> tuple[torch.Tensor, ...]:
        left = torch.rand(size, generator=generator) < 0.5
        action = torch.stack([left, ~left], dim=-1).float()
        state = torch.randn(size, 3, generator=generator)
        goal = torch.stack([torch.where(left, 1.5, -1.5), torch.zeros(size)], dim=-1)
        return goal + 0.3 * torch.randn(size, 2, generator=generator), state, action

    for _ in range(150):
        goal, state, action = draw(64)
        following = (goal, state, action)  # the next state is already the goal, and one stays
        if optimizer is not None:
            optimizer.zero_grad()
            estimator.loss(goal, state, action, following).backward()
            optimizer.step()
        estimator.after_step(goal, state, action)
    goal, state, action = draw(200)
    with torch.no_grad():
        gain = estimator.log_prob(goal, state, action) - estimator.log_prob(goal, state, 1 - action)
    assert (gain > 0.3).float().mean() > 0.9, gain.mean()


# ---------------------------------------------------------------------------------------------------------- binning


def test_bins_and_histogram_count() -> None:
    cells = bins()
    points = torch.tensor([[-3.0, -3.0], [2.9, 2.9], [3.0, 3.0], [-3.0, 2.0], [0.1, 0.0], [3.1, 0.0]])
    index, inside = cells(points)
    assert index.tolist()[:5] == [0, 11, 11, 2, 7] and inside.tolist() == [True] * 5 + [False]
    marginal = HistogramMarginal(cells, prior=12.0)
    marginal.observe(points)  # five inside
    density = marginal.log_prob(points).exp() * 3.0  # a cell is 1.5 by 2
    torch.testing.assert_close(density, torch.tensor([2, 3, 3, 2, 2, 0]) / 17.0)
    centres = torch.cartesian_prod(torch.linspace(-2.25, 2.25, 4), torch.linspace(-2, 2, 3))
    assert float((marginal.log_prob(centres).exp() * 3.0).sum()) == pytest.approx(1.0)

    histogram = Histogram(bins(goal=False), 2, cells, prior=1.0, weight=0.5)
    state, action = torch.full((6, 3), 0.5), torch.tensor([[0.0, 1.0]]).expand(6, 2)
    histogram.after_step(points, state, action)
    mass = histogram.log_prob(centres, state[:1].expand(12, 3), action[:1].expand(12, 2)).exp() * 3.0
    assert float(mass.sum()) == pytest.approx(1.0) and float(mass[11]) == pytest.approx((1 + 1 / 12) / 3.5)
    elsewhere = histogram.log_prob(centres, -state[:1].expand(12, 3), action[:1].expand(12, 2)).exp() * 3.0
    torch.testing.assert_close(elsewhere, torch.full((12,), 1 / 12))


# ------------------------------------------------------------------------------------------------------------- CVAE


def linear_cvae(samples: int, exact: bool) -> tuple[CVAE, MultivariateNormal]:
    """Without hidden layers the CVAE is factor analysis: g = W z + b + noise, whose density and posterior are known."""
    torch.manual_seed(0)
    cvae = CVAE(1, 1, 2, hidden=(), latent=2, samples=samples, std=0.5).double()
    loading = torch.tensor([[0.8, 0.3], [-0.4, 0.6]], dtype=torch.float64)
    loading[:, 1] -= loading[:, 0] * (loading[:, 0] @ loading[:, 1]) / loading[:, 0].square().sum()  # q is diagonal
    offset = torch.tensor([0.2, -0.1], dtype=torch.float64)
    variance = 1 / (1 + loading.square().sum(0) / 0.25)  # of the posterior
    with torch.no_grad():
        for head in (cvae.decoder.head, cvae.encoder.head):
            head.weight.zero_(), head.bias.zero_()
        cvae.decoder.head.weight[:, 2:] = loading
        cvae.decoder.head.bias.copy_(offset)
        if exact:
            gain = variance[:, None] * loading.T / 0.25
            cvae.encoder.head.weight[:2, 2:] = gain
            cvae.encoder.head.bias[:2] = -gain @ offset
            cvae.encoder.head.bias[2:] = 0.5 * variance.log()
    return cvae, MultivariateNormal(offset, loading @ loading.T + 0.25 * torch.eye(2, dtype=torch.float64))


def points(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    goal, state, action = (torch.randn(count, d, generator=generator, dtype=torch.float64) for d in (2, 1, 1))
    return goal, state, action


def test_cvae_is_exact_with_the_exact_posterior() -> None:
    """Then every importance weight is p(g) itself, and the ELBO is log p(g)."""
    cvae, truth = linear_cvae(samples=3, exact=True)
    goal, state, action = points(20)
    torch.testing.assert_close(cvae.log_prob(goal, state, action), truth.log_prob(goal))
    many = tuple(x.repeat(2000, 1) for x in (goal, state, action))
    assert float(-cvae.loss(*many).detach()) == pytest.approx(float(truth.log_prob(goal).mean()), abs=0.02)


def test_cvae_bound_rises_to_the_density() -> None:
    """With a wrong encoder (the prior) the bound is loose at L = 1 and closes as L grows."""
    gaps = []
    for samples in (1, 10, 20_000):
        torch.manual_seed(3)
        cvae, truth = linear_cvae(samples, exact=False)
        goal, state, action = points(50)
        estimate = []
        for _ in range(200 if samples <= 10 else 1):
            cvae.noise.normal_()
            estimate.append(cvae.log_prob(goal, state, action).detach())
        gaps.append(float((truth.log_prob(goal) - torch.stack(estimate).mean(0)).mean()))
    assert gaps[0] > 2 * gaps[1] > 0 and abs(gaps[2]) < 0.02


def test_spot_loss_is_a_special_case() -> None:
    """Mean squared error + 0.5 mean KL, up to a factor and a constant: the gradients are parallel."""
    torch.manual_seed(0)
    cvae = CVAE(*DIMS, hidden=(8,), std=math.sqrt(1 / 8)).double()
    goal, state, action = (x.double() for x in batch(6))
    torch.manual_seed(1)
    ours = torch.autograd.grad(cvae.loss(goal, state, action), cvae.parameters())
    torch.manual_seed(1)
    mean, log_std = cvae.encode(goal, state, action)
    z = mean + log_std.exp() * torch.randn_like(mean)
    error = (cvae.decoder(torch.cat([state, action, z], dim=-1)) - goal).square().mean()
    kl = -0.5 * (1 + 2 * log_std - mean.square() - (2 * log_std).exp()).mean()
    spot = torch.autograd.grad(error + 0.5 * kl, cvae.parameters())
    for a, b in zip(ours, spot):
        torch.testing.assert_close(a, 4 * 2 * b)  # 4 d


# ------------------------------------------------------------------------------------------------------ classifiers


def chain(actions: int = 2, states: int = 4, discount: float = 0.8) -> dict[str, torch.Tensor]:
    """A random chain: next-state law T0 (S, A, S), policy, future law P, and p(g) under uniform (s, a)."""
    rng = np.random.default_rng(0)
    t0 = rng.dirichlet(np.ones(states), size=(states, actions))
    policy = rng.dirichlet(np.ones(actions), size=states)
    t = np.einsum("sa,sak->sk", policy, t0)
    future = (1 - discount) * t0 @ np.linalg.inv(np.eye(states) - discount * t)
    values = {"t0": t0, "policy": policy, "future": future, "marginal": future.mean((0, 1))}
    return {key: torch.from_numpy(value) for key, value in values.items()}


def test_td_loss_is_stationary_at_the_true_ratio() -> None:
    """The expected loss over the chain, w from the true ratio: its gradient in the table of logits is zero there."""
    c, discount = chain(), 0.8
    ratio = c["future"] / c["marginal"]  # (S, A, G)
    one_on = torch.einsum("sak,kb,kbg->sag", c["t0"], c["policy"], ratio)  # E of w over (s', a')
    for wrong, expected in ((0.0, True), (0.3, False)):
        logits = ratio.log() + wrong * torch.randn(ratio.shape, generator=torch.Generator().manual_seed(0))
        logits = logits.double().requires_grad_()
        s, a, n = (
            x.flatten() for x in torch.meshgrid(torch.arange(4), torch.arange(2), torch.arange(4), indexing="ij")
        )
        loss = torch.zeros((), dtype=torch.float64)
        for g in range(4):  # each (s, a, s') with its probability, each other goal with its own
            weight = c["t0"].flatten() / 8 * c["marginal"][g]
            terms = torch.stack(
                [
                    td_loss(logits[i, j, k][None], logits[i, j, g][None], one_on[i, j, g][None], discount)
                    for i, j, k in zip(s, a, n)
                ]
            )
            loss = loss + (weight * terms).sum()
        (gradient,) = torch.autograd.grad(loss, logits)
        assert (gradient.abs().max() < 1e-12) == expected


def test_mc_loss_is_stationary_at_the_true_ratio() -> None:
    c = chain()
    logits = (c["future"] / c["marginal"]).log().requires_grad_()
    joint, apart = c["future"] / 8, c["marginal"].expand(4, 2, 4) / 8
    terms = [mc_loss(x[None], torch.full((1,), -800.0)) for x in logits.flatten()]  # the positive half alone
    others = [mc_loss(torch.full((1,), 800.0), x[None]) for x in logits.flatten()]
    loss = (torch.stack(terms) * joint.flatten() + torch.stack(others) * apart.flatten()).sum()
    (gradient,) = torch.autograd.grad(loss, logits)
    assert gradient.abs().max() < 1e-12


@pytest.mark.parametrize("size", [4, 64])
def test_nce_loss_is_calibrated_whatever_the_batch(size: int) -> None:
    """Batches drawn from the chain: at f = log p(g | s, a) / p(g) the mean gradient is zero within its error."""
    c = chain()
    generator = torch.Generator().manual_seed(0)
    table = (c["future"] / c["marginal"]).log().view(8, 4).requires_grad_()
    gradients = []
    for _ in range(1500):
        place = torch.randint(8, (size,), generator=generator)
        goal = torch.multinomial(c["future"].view(8, 4)[place], 1, generator=generator).squeeze(1)
        gradients.append(torch.autograd.grad(nce_loss(table[place][:, goal]), table)[0])
    stack = torch.stack(gradients)
    z = stack.mean(0) / (stack.std(0) / math.sqrt(len(stack)))
    assert z.abs().max() < 4.5 and z.square().mean() < 2.0


def test_nce_loss_is_binary_cross_entropy() -> None:
    ratio = torch.randn(5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels, logits = torch.eye(5, dtype=torch.float64), ratio - math.log(4)
    expected = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum") / 5
    torch.testing.assert_close(nce_loss(ratio), expected)


def test_marginal_turns_the_ratio_into_a_density() -> None:
    for name in ("C-learning", "contrastive"):
        estimator = estimators()[name]
        goal, state, action = batch(100)
        inside = goal.abs().max(-1).values < 3
        goal, state, action = goal[inside], state[inside], action[inside]
        estimator.after_step(goal, state, action)
        ratio, marginal = estimator.log_ratio(goal, state, action), estimator.marginal.log_prob(goal)
        torch.testing.assert_close(estimator.log_prob(goal, state, action), ratio + marginal)
        assert marginal.std() > 0.1
        estimator.marginal = None
        torch.testing.assert_close(estimator.log_prob(goal, state, action), ratio)


def test_slow_copy_follows() -> None:
    estimator = CLearning(*DIMS, hidden=(4,), kind="td", slow=0.25)
    assert estimator.target is not None
    with torch.no_grad():
        estimator.classifier.head.bias.fill_(1.0)
    estimator.after_step(*batch(4))
    assert float(estimator.target.head.bias) == pytest.approx(0.25)
    assert not any(p.requires_grad for p in estimator.target.parameters())
    with pytest.raises(AssertionError, match="next step"):
        estimator.loss(*batch(4))


@pytest.mark.gpu
@pytest.mark.parametrize("name", estimators())
def test_a_step_is_captured_in_a_graph(name: str) -> None:
    estimator = estimators()[name].cuda()
    goal, state, action = (x.cuda() for x in batch(64))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            loss = estimator.loss(goal, state, action, (goal, state, action))
            estimator.after_step(goal, state, action)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = estimator.loss(goal, state, action, (goal, state, action))
        estimator.after_step(goal, state, action)
    graph.replay()
    assert not loss.isnan()  # a histogram gives a goal outside of its bins no probability: infinite, not wrong
