"""Conditional RealNVP, Eqs. (2) to (5): an exact, normalised log-density of x given a context y.

Block structure after Ghugare and Eysenbach (2025), data to noise: an invertible linear map z = x W with
W = P L (U + diag s), then an affine coupling that keeps the first half of z and moves the second:

    z_2 <- (z_2 - t(z_1, y)) exp(-s(z_1, y)),      log|det| = sum log|s| - sum s(z_1, y)

The base density is N(0, I). Everything is closed form, so density, inverse and samples are exact.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qhyer.nn.scan import kernels

UNROLLED = 32  # dimensions: the kernels are unrolled over them, and far beyond take minutes to compile


@functools.cache
def _say_plain(dim: int) -> None:
    logging.getLogger(__name__).warning("goals of %d numbers are too many for the flow's kernels: slower", dim)


class InvertibleLinears(nn.Module):
    """z = x W, W = P L (U + diag s): fixed permutation, unit lower, strictly upper, free diagonal. One per block;
    their parameters are stacked, so that all matrices are made by one batched product."""

    def __init__(self, dim: int, blocks: int) -> None:
        super().__init__()
        # LU of random orthogonal matrices: log|det| = 0 at the start.
        permutation, lower, upper = torch.linalg.lu(torch.linalg.qr(torch.randn(blocks, dim, dim))[0])
        self.register_buffer("permutation", permutation)
        self.lower = nn.Parameter(lower.tril(-1))
        self.upper = nn.Parameter(upper.triu(1))
        self.scale = nn.Parameter(upper.diagonal(dim1=-2, dim2=-1).clone())  # (blocks, d)
        self.scale.no_decay = True  # type: ignore[attr-defined]
        self.register_buffer("identity", torch.eye(dim), persistent=False)

    permutation: Tensor
    identity: Tensor

    def _factors(self) -> tuple[Tensor, Tensor]:
        return self.lower.tril(-1) + self.identity, self.upper.triu(1) + torch.diag_embed(self.scale)

    def forward(self) -> tuple[Tensor, Tensor]:
        """The matrices W (blocks, d, d) and the sum of their log|det|."""
        lower, upper = self._factors()
        return self.permutation @ lower @ upper, self.scale.abs().log().sum()

    def inverse(self) -> Tensor:
        """W^-1 (blocks, d, d): one triangle at a time, never the whole."""
        lower, upper = self._factors()
        inverse = torch.linalg.solve_triangular(lower, self.permutation.mT, upper=False, unitriangular=True)
        return torch.linalg.solve_triangular(upper, inverse, upper=True)


class AffineCouplings(nn.Module):
    """Eq. (3): z_2 <- (z_2 - t) exp(-s) with s, t two separate networks of (z_1, y), for every block.

    A network is Dense, LeakyReLU, LayerNorm, twice; then a zero-initialised Dense: the coupling starts as the
    identity. In one dimension there is no half to keep and s, t see the context alone. Parameters are stacked
    (blocks, 2, ...), the 2 being s and t: both run as one batched product, and what does not wait for the block before
    (the context's part of the first Dense) is one product for all blocks.
    """

    def __init__(self, dim: int, context_dim: int, channels: int, blocks: int) -> None:
        super().__init__()
        self.kept = kept = math.ceil(dim / 2) if dim > 1 else 0
        self.channels, self.blocks = channels, blocks
        bound = (kept + context_dim) ** -0.5
        self.context = nn.Linear(context_dim, blocks * 2 * channels)  # the first Dense, its context columns
        nn.init.uniform_(self.context.weight, -bound, bound)
        nn.init.uniform_(self.context.bias, -bound, bound)
        self.first = nn.Parameter(torch.empty(blocks, 2, kept, channels).uniform_(-bound, bound))
        bound = channels**-0.5
        self.second = nn.Parameter(torch.empty(blocks, 2, channels, channels).uniform_(-bound, bound))
        self.second_bias = nn.Parameter(torch.empty(blocks, 2, 1, channels).uniform_(-bound, bound))
        self.norm_scale = nn.Parameter(torch.ones(2, blocks, 2, 1, channels))  # of both LayerNorms
        self.norm_bias = nn.Parameter(torch.zeros(2, blocks, 2, 1, channels))
        self.head = nn.Parameter(torch.zeros(blocks, 2, channels, dim - kept))
        self.head_bias = nn.Parameter(torch.zeros(blocks, 2, 1, dim - kept))
        for parameter in (self.second_bias, self.norm_scale, self.norm_bias, self.head_bias):
            parameter.no_decay = True  # type: ignore[attr-defined]  # biases and scales, whatever their shape

    def prepare(self, context: Tensor) -> list[tuple[Tensor, ...]]:
        """Per block, all that its networks need besides z_1, for contexts (..., c)."""
        h = (
            self.context(context).view(-1, self.blocks, 2, self.channels).permute(1, 2, 0, 3)
        )  # (blocks, 2, M, channels)
        # A LayerNorm's scale and bias are folded into the Dense after it: norm(h) * c + b, times W, is
        # norm(h) (c W) + b W, over the weights instead of over the batch.
        (scale_1, scale_2), (bias_1, bias_2) = self.norm_scale.mT, self.norm_bias
        second_bias = self.second_bias + bias_1 @ self.second
        head_bias = self.head_bias + bias_2 @ self.head
        weights = (h, self.first, scale_1 * self.second, second_bias, scale_2 * self.head, head_bias)
        return list(zip(*(weight.unbind(0) for weight in weights)))

    def _scale_shift(self, kept: Tensor, prepared: tuple[Tensor, ...]) -> Tensor:
        """z_1 (M, kept) -> s and t (2, M, d - kept)."""
        h, first, second, second_bias, head, head_bias = prepared
        if self.kept:
            h = torch.baddbmm(h, kept.expand(2, -1, -1), first)
        h = torch.baddbmm(second_bias, F.layer_norm(F.leaky_relu(h, 0.01), (self.channels,)), second)
        return torch.baddbmm(head_bias, F.layer_norm(F.leaky_relu(h, 0.01), (self.channels,)), head)

    def forward(self, z: Tensor, prepared: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """One block: z (M, d) -> the next z and s, whose negative sum is log|det|."""
        kept, moved = z[:, : self.kept], z[:, self.kept :]
        s, t = self._scale_shift(kept, prepared)
        return torch.cat([kept, (moved - t) * torch.exp(-s)], dim=-1), s

    def inverse(self, z: Tensor, prepared: tuple[Tensor, ...]) -> Tensor:
        kept, moved = z[:, : self.kept], z[:, self.kept :]
        s, t = self._scale_shift(kept, prepared)
        return torch.cat([kept, moved * torch.exp(s) + t], dim=-1)


class ConditionalRealNVP(nn.Module):
    def __init__(self, dim: int, context_dim: int, blocks: int = 6, channels: int = 256) -> None:
        super().__init__()
        self.dim = dim
        self.linears = InvertibleLinears(dim, blocks)
        self.couplings = AffineCouplings(dim, context_dim, channels, blocks)

    def _by_kernels(self, x: Tensor) -> bool:
        if self.dim == 1 or not x.numel() or x.dtype != torch.float32 or kernels(x) is None:
            return False
        if self.dim > UNROLLED:
            _say_plain(self.dim)
        return self.dim <= UNROLLED

    def forward(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        """f(x; y): data (..., d) -> noise (..., d) and log|det df/dx| (...)."""
        if self._by_kernels(x):
            from qhyer.nn.flow_triton import flow_forward

            return flow_forward(self, x, context)
        z, scales = x.reshape(-1, self.dim), []
        matrices, log_det = self.linears()
        for matrix, prepared in zip(matrices, self.couplings.prepare(context)):
            z, s = self.couplings(z @ matrix, prepared)
            scales.append(s)
        return z.view(x.shape), log_det - torch.cat(scales, dim=-1).sum(-1).view(x.shape[:-1])

    def inverse(self, z: Tensor, context: Tensor) -> Tensor:
        x = z.reshape(-1, self.dim)
        for inverse, prepared in reversed(list(zip(self.linears.inverse(), self.couplings.prepare(context)))):
            x = self.couplings.inverse(x, prepared) @ inverse
        return x.view(z.shape)

    def log_prob(self, x: Tensor, context: Tensor) -> Tensor:
        """Eqs. (2), (4): log p_0(f(x; y)) + log|det df/dx|, (...)."""
        z, log_det = self(x, context)
        if self._by_kernels(x):
            from qhyer.nn.losses_triton import normal

            return normal(z, log_det)
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
        x = torch.cat([observations, actions], dim=-1)
        if not x.numel() or kernels(x) is None:
            return self.net(x)
        from qhyer.nn.flow_triton import norm_silu
        from qhyer.nn.products_triton import lowered, product, product_dtype

        *layers, last = self.net
        assert isinstance(last, nn.Linear)
        denses: list[nn.Linear] = [*layers[::3], last]  # type: ignore[list-item]
        low = lowered([dense.weight for dense in denses], product_dtype(x))
        for dense, norm, copy in zip(denses, layers[1::3], low):
            assert isinstance(norm, nn.LayerNorm)
            u = product(x, dense.weight, low=copy)
            x = norm_silu(u, dense.bias, norm.weight, norm.bias, norm.eps, u.dtype)
        return product(x, last.weight, last.bias, low[-1])
