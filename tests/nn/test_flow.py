"""The flow as mathematics, in float64: a bijection, an exact log-determinant, a density that integrates to one."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import zuko
from torch.distributions import AffineTransform, Independent, MultivariateNormal, Normal, Transform, constraints

from qhyer.nn.flow import AffineCouplings, ConditionalRealNVP, InvertibleLinears, SAEncoder
from qhyer.nn.optim import adamw

CONTEXT = 3


def make(dim: int, blocks: int = 3, channels: int = 8, randomise: float = 0.3, seed: int = 0) -> ConditionalRealNVP:
    """A flow away from its start: the zero-initialised heads get weights."""
    torch.manual_seed(seed)
    flow = ConditionalRealNVP(dim, CONTEXT, blocks, channels).double()
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter += randomise * torch.randn_like(parameter)
        scale = flow.linears.scale  # keep the maps well conditioned, of either sign
        scale.copy_(torch.where(scale < 0, -1.0, 1.0) * scale.abs().clamp(0.6, 1.6))
    return flow


def draw(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("dim", [1, 2, 3, 5])
def test_inverse(dim):
    flow, x, y = make(dim), draw(50, dim), draw(50, CONTEXT, seed=2)
    z, _ = flow(x, y)
    assert (z - x).abs().max() > 0.1
    torch.testing.assert_close(flow.inverse(z, y), x, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(flow(flow.inverse(x, y), y)[0], x, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dim", [1, 2, 3, 5])
def test_log_det_is_autograd_s(dim):
    flow, x, y = make(dim), draw(6, dim), draw(6, CONTEXT, seed=2)
    _, log_det = flow(x, y)
    for i in range(6):
        jacobian = torch.autograd.functional.jacobian(lambda v, i=i: flow(v, y[i])[0], x[i])
        torch.testing.assert_close(log_det[i], torch.linalg.slogdet(jacobian).logabsdet)


def matrices(linears: InvertibleLinears) -> list[torch.Tensor]:
    """P L (U + diag s), block by block, as the paper writes it."""
    identity = torch.eye(linears.lower.shape[-1])
    return [
        permutation @ (lower.tril(-1) + identity) @ (upper.triu(1) + scale.diag())
        for permutation, lower, upper, scale in zip(linears.permutation, linears.lower, linears.upper, linears.scale)
    ]


@pytest.mark.parametrize("dim", [1, 2, 3, 5])
def test_linear_layer_is_its_matrix(dim):
    torch.manual_seed(dim)
    layer = InvertibleLinears(dim, 3).double()
    for W in matrices(layer):
        torch.testing.assert_close(W @ W.T, torch.eye(dim, dtype=torch.float64), rtol=0, atol=1e-5)  # starts orthogonal
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.3 * torch.randn_like(parameter)  # above the diagonal of `lower`, too: must not matter
    W, log_det = layer()
    torch.testing.assert_close(W, torch.stack(matrices(layer)))
    torch.testing.assert_close(log_det, torch.linalg.slogdet(W).logabsdet.sum())
    torch.testing.assert_close(layer.inverse() @ W, torch.eye(dim, dtype=torch.float64).expand(3, -1, -1))


def test_starts_as_the_base_density():
    torch.manual_seed(0)
    flow = ConditionalRealNVP(3, CONTEXT).double()
    x, y = draw(20, 3), draw(20, CONTEXT, seed=2)
    normal = Independent(Normal(torch.zeros(3).double(), 1.0), 1)
    torch.testing.assert_close(flow.log_prob(x, y), normal.log_prob(x), rtol=1e-4, atol=1e-4)


def support(flow: ConditionalRealNVP, y: torch.Tensor, margin: float) -> tuple[np.ndarray, np.ndarray]:
    samples = flow.sample(y.expand(20_000, -1), torch.Generator().manual_seed(3))
    low, high = samples.amin(0), samples.amax(0)
    return (low - margin * (high - low)).numpy(), (high + margin * (high - low)).numpy()


@pytest.mark.parametrize("seed", [0, 1])
def test_density_integrates_to_one(seed):
    flow, y = make(2, seed=seed), draw(CONTEXT, seed=4)
    low, high = support(flow, y, 0.5)
    axes = [torch.linspace(a, b, 500, dtype=torch.float64) for a, b in zip(low, high)]
    grid = torch.cartesian_prod(*axes)
    with torch.no_grad():
        p = flow.log_prob(grid, y.expand(len(grid), -1)).exp()
    area = math.prod(float(axis[1] - axis[0]) for axis in axes)
    assert float(p.sum() * area) == pytest.approx(1.0, abs=2e-3)
    # and its mean and covariance are those of the samples
    mean = (p[:, None] * grid).sum(0) * area
    covariance = ((p[:, None] * grid).T @ grid) * area - mean[:, None] * mean
    samples = flow.sample(y.expand(200_000, -1), torch.Generator().manual_seed(5))
    error = 5 * samples.std(0) / math.sqrt(len(samples))
    assert ((samples.mean(0) - mean).abs() < error).all()
    torch.testing.assert_close(torch.cov(samples.T), covariance, rtol=0.03, atol=0.01)


def test_density_integrates_to_one_on_a_line():
    flow, y = make(1), draw(CONTEXT, seed=4)
    low, high = support(flow, y, 0.5)
    grid = torch.linspace(float(low[0]), float(high[0]), 20_000, dtype=torch.float64)
    p = flow.log_prob(grid[:, None], y.expand(20_000, -1)).exp()
    assert float(torch.trapezoid(p, grid).detach()) == pytest.approx(1.0, abs=1e-4)


class Matrix(Transform):
    """x -> x W for a dense W: the oracle's linear layer, its determinant from numpy."""

    domain = codomain = constraints.real_vector
    bijective = True

    def __init__(self, W: torch.Tensor) -> None:
        super().__init__()
        self.W = W

    def _call(self, x):
        return torch.einsum("...i,ij->...j", x, self.W)

    def log_abs_det_jacobian(self, x, y):
        return torch.tensor(np.linalg.slogdet(self.W.numpy())[1]).expand(x.shape[:-1])

    def call_and_ladj(self, x):
        y = self._call(x)
        return y, self.log_abs_det_jacobian(x, y)


def one_network(couplings: AffineCouplings, block: int, which: int, inputs: torch.Tensor) -> torch.Tensor:
    """The scale (0) or the shift (1) network of a block, a plain MLP: Dense, LeakyReLU, LayerNorm, twice, Dense."""
    p = dict(couplings.named_parameters())
    channels = couplings.channels
    start = (2 * block + which) * channels
    mine = slice(start, start + channels)
    first = torch.cat([p["first"][block, which].T, p["context.weight"][mine]], dim=1)  # columns of (kept, context)
    h = torch.nn.functional.linear(inputs, first, p["context.bias"][mine])
    for i, (weight, bias) in enumerate([(p["second"], p["second_bias"]), (p["head"], p["head_bias"])]):
        scale, shift = p["norm_scale"][i, block, which, 0], p["norm_bias"][i, block, which, 0]
        h = torch.nn.functional.layer_norm(torch.nn.functional.leaky_relu(h, 0.01), (channels,), scale, shift)
        h = torch.nn.functional.linear(h, weight[block, which].T, bias[block, which, 0])
    return h


@pytest.mark.parametrize("dim", [1, 2, 3, 5])
def test_zuko_as_an_oracle(dim):
    """zuko's couplings and normalising-flow distribution, assembled from the same weights, give the same numbers."""
    flow, x, y = make(dim), draw(30, dim), draw(30, CONTEXT, seed=2)
    parts: list[Transform] = []
    for block, W in enumerate(matrices(flow.linears)):
        parts.append(Matrix(W.detach()))

        def meta(kept, block=block):
            s, t = (one_network(flow.couplings, block, which, torch.cat([kept, y], -1)) for which in (0, 1))
            affine = AffineTransform(-t * torch.exp(-s), torch.exp(-s))  # (x - t) e^-s
            return zuko.transforms.DependentTransform(affine, 1)

        mask = torch.arange(dim) < (math.ceil(dim / 2) if dim > 1 else 0)
        parts.append(zuko.transforms.CouplingTransform(meta, mask))
    base = Independent(Normal(torch.zeros(dim).double(), torch.ones(dim).double()), 1)
    oracle = zuko.distributions.NormalizingFlow(zuko.transforms.ComposedTransform(*parts), base)
    torch.testing.assert_close(flow.log_prob(x, y), oracle.log_prob(x))


def test_any_leading_dimensions():
    """(B, K) windows, one goal per step, a single point: the same numbers as a flat batch."""
    for dim in (1, 3):
        flow, x, y = make(dim), draw(6, dim), draw(6, CONTEXT, seed=2)
        flat = flow.log_prob(x, y)
        torch.testing.assert_close(flow.log_prob(x.view(2, 3, dim), y.view(2, 3, CONTEXT)), flat.view(2, 3))
        torch.testing.assert_close(flow.log_prob(x[0], y[0]), flat[0])
        torch.testing.assert_close(
            flow.inverse(x.view(2, 3, dim), y.view(2, 3, CONTEXT)).view(6, dim), flow.inverse(x, y)
        )


def test_biases_and_norms_are_not_decayed():
    """Their shapes have two dimensions and more, so a rule by dimension alone would decay them."""
    flow = ConditionalRealNVP(3, CONTEXT, blocks=1, channels=8)
    decayed = {id(p) for g in adamw(flow.parameters(), 0.1, 0.5).param_groups if g["weight_decay"] for p in g["params"]}
    names = {name.split(".")[-1] for name, p in flow.couplings.named_parameters() if id(p) in decayed}
    assert names == {"weight", "first", "second", "head"}


def test_gradients_reach_every_parameter():
    flow = make(3)
    flow.log_prob(draw(20, 3), draw(20, CONTEXT, seed=2)).sum().backward()
    for name, parameter in flow.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_fits_a_conditional_gaussian_and_conditioning_matters():
    """p(x | y) = N((y_0, -y_1), diag(0.5, 0.2)^2): close to the true density, and worse with shuffled contexts."""
    torch.manual_seed(0)
    flow = ConditionalRealNVP(2, CONTEXT, blocks=3, channels=32)
    optimizer = torch.optim.Adam(flow.parameters(), lr=5e-3)
    scale = torch.tensor([0.5, 0.2])
    for step in range(400):
        for group in optimizer.param_groups:
            group["lr"] = 5e-3 * (1 - step / 400)
        y = torch.randn(128, CONTEXT)
        x = torch.stack([y[:, 0], -y[:, 1]], -1) + scale * torch.randn(128, 2)
        loss = -flow.log_prob(x, y).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    y = torch.randn(2000, CONTEXT)
    mean = torch.stack([y[:, 0], -y[:, 1]], -1)
    x = mean + scale * torch.randn(2000, 2)
    with torch.no_grad():
        ours, shuffled = flow.log_prob(x, y).mean(), flow.log_prob(x, y.roll(1, 0)).mean()
    true = MultivariateNormal(mean, torch.diag(scale**2)).log_prob(x).mean()
    assert true - 0.15 < ours < true + 0.02  # never above the truth, up to the error of 2000 samples
    assert shuffled < ours - 1.0
    samples = flow.sample(y, torch.Generator().manual_seed(0))
    assert (samples - mean).mean(0).abs().max() < 0.08
    torch.testing.assert_close((samples - mean).std(0), scale, rtol=0.15, atol=0.02)


def test_a_far_goal_still_moves_the_density():
    """No layer saturates: goals many deviations away differ in likelihood (a spline's tails would not)."""
    flow, y = make(2), draw(1, CONTEXT, seed=2)
    far = torch.tensor([[20.0, 20.0], [21.0, 20.0], [20.0, 21.0]], dtype=torch.float64)
    values = flow.log_prob(far, y.expand(3, -1))
    assert values.isfinite().all() and (values[1:] - values[0]).abs().min() > 1e-3


def test_samples_follow_the_generator():
    flow, y = make(2), draw(5, CONTEXT)
    before = torch.get_rng_state()
    a, b = (flow.sample(y, torch.Generator().manual_seed(7)) for _ in range(2))
    assert torch.equal(a, b) and torch.equal(torch.get_rng_state(), before)


def test_encoder_layers():
    encoder = SAEncoder(5, hidden=8, layers=2, outputs=4)
    kinds = [type(layer).__name__ for layer in encoder.net]
    assert kinds == ["Linear", "LayerNorm", "SiLU"] * 2 + ["Linear"]
    s, a = torch.randn(3, 7, 2), torch.randn(3, 7, 3)
    assert encoder(s, a).shape == (3, 7, 4)
    torch.testing.assert_close(encoder(s, a)[1, 2], encoder(s[1, 2], a[1, 2]))
