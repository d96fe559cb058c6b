"""Conditional RealNVP, Eqs. (2) to (5): an exact, normalised log-density of x given a context y.

Block structure after Ghugare and Eysenbach (2025), data to noise: an invertible linear map z = x W with
W = P L (U + diag s), then an affine coupling that keeps the first half of z and moves the second:

    z_2 <- (z_2 - t(z_1, y)) exp(-s(z_1, y)),      log|det| = sum log|s| - sum s(z_1, y)

The base density is N(0, I). Everything is closed form, so density, inverse and samples are exact.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class InvertibleLinear(nn.Module):
    """z = x W, W = P L (U + diag s): fixed permutation, unit lower, strictly upper, free diagonal."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        # LU of a random orthogonal matrix: log|det| = 0 at the start.
        permutation, lower, upper = torch.linalg.lu(torch.linalg.qr(torch.randn(dim, dim))[0])
        self.register_buffer("permutation", permutation)
        self.lower = nn.Parameter(lower.tril(-1))
        self.upper = nn.Parameter(upper.triu(1))
        self.scale = nn.Parameter(upper.diagonal().clone())
        self.register_buffer("identity", torch.eye(dim), persistent=False)

    permutation: Tensor
    identity: Tensor

    def _factors(self) -> tuple[Tensor, Tensor]:
        return self.lower.tril(-1) + self.identity, self.upper.triu(1) + torch.diag(self.scale)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        lower, upper = self._factors()
        return x @ (self.permutation @ lower @ upper), self.scale.abs().log().sum()

    def inverse(self, z: Tensor) -> Tensor:
        # z = x P L U'  ->  solve from the right, one triangle at a time.
        lower, upper = self._factors()
        z = torch.linalg.solve_triangular(upper, z, upper=True, left=False)
        z = torch.linalg.solve_triangular(lower, z, upper=False, left=False, unitriangular=True)
        return z @ self.permutation.t()


class PairedMLP(nn.Module):
    """The scale and the shift network of a coupling: two MLPs of one shape, computed as one batched product.

    Each is Dense, LeakyReLU, LayerNorm, twice; then a zero-initialised Dense: the coupling starts as the identity.
    """

    def __init__(self, inputs: int, context_dim: int, channels: int, outputs: int) -> None:
        super().__init__()
        bound = (inputs + context_dim) ** -0.5
        self.context = nn.Linear(context_dim, 2 * channels)  # the first Dense, its context columns, for both
        nn.init.uniform_(self.context.weight, -bound, bound)
        nn.init.uniform_(self.context.bias, -bound, bound)
        self.first = nn.Parameter(torch.empty(2, inputs, channels).uniform_(-bound, bound))
        bound = channels**-0.5
        self.second = nn.Parameter(torch.empty(2, channels, channels).uniform_(-bound, bound))
        self.second_bias = nn.Parameter(torch.empty(2, 1, channels).uniform_(-bound, bound))
        self.norm_scale = nn.Parameter(torch.ones(2, 2, 1, channels))
        self.norm_bias = nn.Parameter(torch.zeros(2, 2, 1, channels))
        self.head = nn.Parameter(torch.zeros(2, channels, outputs))
        self.head_bias = nn.Parameter(torch.zeros(2, 1, outputs))
        for parameter in (self.second_bias, self.norm_scale, self.norm_bias, self.head_bias):
            parameter.no_decay = True  # type: ignore[attr-defined]  # biases and scales, whatever their shape

    def _norm(self, h: Tensor, i: int) -> Tensor:
        h = F.leaky_relu(h, 0.01)
        return torch.addcmul(self.norm_bias[i], F.layer_norm(h, h.shape[-1:]), self.norm_scale[i])

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        """x (M, inputs), context (M, c) -> both outputs (2, M, outputs)."""
        h = self.context(context).unflatten(-1, (2, -1)).transpose(0, 1)  # (2, M, channels)
        if x.shape[-1]:
            h = torch.baddbmm(h, x.expand(2, -1, -1), self.first)
        h = torch.baddbmm(self.second_bias, self._norm(h, 0), self.second)
        return torch.baddbmm(self.head_bias, self._norm(h, 1), self.head)


class AffineCoupling(nn.Module):
    """Eq. (3): z_2 <- (z_2 - t) exp(-s) with s, t two separate networks of (z_1, y). In one dimension there is
    no half to keep and s, t see the context alone."""

    def __init__(self, dim: int, context_dim: int, channels: int) -> None:
        super().__init__()
        self.kept = math.ceil(dim / 2) if dim > 1 else 0
        self.networks = PairedMLP(self.kept, context_dim, channels, dim - self.kept)

    def _scale_shift(self, kept: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        count = context.shape[:-1].numel()  # not -1: in one dimension `kept` has no elements to divide by
        both = self.networks(kept.reshape(count, self.kept), context.reshape(count, -1))
        s, t = both.view(2, *context.shape[:-1], -1)
        return s, t

    def forward(self, z: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        kept, moved = z[..., : self.kept], z[..., self.kept :]
        s, t = self._scale_shift(kept, context)
        return torch.cat([kept, (moved - t) * torch.exp(-s)], dim=-1), -s.sum(-1)

    def inverse(self, z: Tensor, context: Tensor) -> Tensor:
        kept, moved = z[..., : self.kept], z[..., self.kept :]
        s, t = self._scale_shift(kept, context)
        return torch.cat([kept, moved * torch.exp(s) + t], dim=-1)


class ConditionalRealNVP(nn.Module):
    def __init__(self, dim: int, context_dim: int, blocks: int = 6, channels: int = 256) -> None:
        super().__init__()
        self.dim = dim
        self.linears = nn.ModuleList(InvertibleLinear(dim) for _ in range(blocks))
        self.couplings = nn.ModuleList(AffineCoupling(dim, context_dim, channels) for _ in range(blocks))

    def forward(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        """f(x; y): data (..., d) -> noise (..., d) and log|det df/dx| (...)."""
        log_det = x.new_zeros(x.shape[:-1])
        for linear, coupling in zip(self.linears, self.couplings):
            x, from_linear = linear(x)
            x, from_coupling = coupling(x, context)
            log_det = log_det + from_linear + from_coupling
        return x, log_det

    def inverse(self, z: Tensor, context: Tensor) -> Tensor:
        for linear, coupling in zip(reversed(self.linears), reversed(self.couplings)):
            z = linear.inverse(coupling.inverse(z, context))  # type: ignore[operator]
        return z

    def log_prob(self, x: Tensor, context: Tensor) -> Tensor:
        """Eqs. (2), (4): log p_0(f(x; y)) + log|det df/dx|, (...)."""
        z, log_det = self(x, context)
        return -0.5 * z.square().sum(-1) - 0.5 * self.dim * math.log(2 * math.pi) + log_det

    @torch.no_grad()
    def sample(self, context: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """One x per context (..., c) -> (..., d)."""
        noise = torch.randn(
            *context.shape[:-1], self.dim, generator=generator, device=context.device, dtype=context.dtype
        )
        return self.inverse(noise, context)


class SAEncoder(nn.Module):
    """(s, a) -> the flow's context: layers of Dense, LayerNorm, SiLU, then a Dense to the representation."""

    def __init__(self, inputs: int, hidden: int = 1024, layers: int = 4, outputs: int = 64) -> None:
        super().__init__()
        widths = [inputs] + [hidden] * layers
        parts: list[nn.Module] = []
        for a, b in itertools.pairwise(widths):
            parts += [nn.Linear(a, b), nn.LayerNorm(b, eps=1e-6), nn.SiLU()]
        self.net = nn.Sequential(*parts, nn.Linear(widths[-1], outputs))

    def forward(self, observations: Tensor, actions: Tensor) -> Tensor:
        return self.net(torch.cat([observations, actions], dim=-1))
