"""Backbones of sequence models: tokens (B, L, d) -> (B, L, d), causal, the kinds of token taking turns.

A `Trunk` is a stack of blocks, a block is a mixer over tokens and an MLP over channels; what tells the methods apart is
the mixer, and whether norms come before (GPT-2) or after (the first transformers):

    pre    x <- x + mix(LN(x));  x <- x + MLP(LN(x));  a norm at the end
    post   x <- LN(x + mix(x));  x <- LN(x + MLP(x))

    gpt           attention                                                     Chen et al., 2021 (DT)
    graph         attention that knows which tokens cause which                 Hu et al., 2023 (GDT)
    convformer    a short convolution, its filter by kind of token              Kim et al., 2024 (DC)
    mamba         a selective state space (nn/mamba.py)                         Ota, 2024 (DMamba)
    long_short    attention and dynamic convolution on a share of the channels  Wang et al., 2025 (LSDT)
    routed        attention, every second block for chosen tokens alone         Decision Mixer
    hybrid        attention and Mamba, mixed by a gate (nn/hybrid.py)           QHyer

All are called alike, so that any head can sit on any of them (`BACKBONES`). Acting computes the window anew: it slides,
and what a layer made of a token depends on tokens that have left it, so that nothing can be kept from step to step.

Letters: B batch · L tokens · d width · P kinds of token, which follow each other as 0, 1, ..., P - 1, 0, 1, ...
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qhyer.nn.hybrid import HybridDecoder
from qhyer.nn.mamba import Mamba, causal_conv

# --------------------------------------------------------------------------------------------------------- mixers


class Attention(nn.Module):
    """Causal self-attention; `seen` (broadcast to (B, H, L, L), True where a query sees a key) narrows it further."""

    def __init__(self, dim: int, heads: int, dropout: float = 0.0, project: bool = True) -> None:
        super().__init__()
        assert dim % heads == 0, f"width {dim} is not a multiple of {heads} heads"
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim) if project else nn.Identity()

    def forward(self, x: Tensor, seen: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # (B, H, L, d/H) each
        dropout = self.dropout if self.training else 0.0
        if seen is not None:
            seen = seen & causal(x.shape[1], x.device)
        y = F.scaled_dot_product_attention(q, k, v, seen, dropout, is_causal=seen is None)
        return self.out(y.transpose(1, 2).flatten(2))


def causal(length: int, device: torch.device) -> Tensor:
    """(L, L): whether token i (down) sees token j (across)."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


class FirstReturnAttention(nn.Module):
    """Attention that sees of the return tokens the window's first alone (EDT); a token's own return reaches its output
    around the attention, not through it."""

    def __init__(self, dim: int, heads: int, dropout: float, kind: int, period: int = 3) -> None:
        super().__init__()
        self.attention = Attention(dim, heads, dropout)
        self.kind, self.period = kind, period

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1], device=x.device)
        shown = (at % self.period != self.kind) | (at < self.period)  # (L,) keys
        return self.attention(x, shown)


def causes(length: int, device: torch.device) -> Tensor:
    """GDT's graph over tokens R, s, a, R, s, a, ...: (L, L), True where token j (across) is a cause of token i (down).

    Within a step R_t -> a_t and s_t -> a_t; to the next R_t, s_t, a_t -> R_{t+1} and s_t, a_t -> s_{t+1}.
    """
    at = torch.arange(length, device=device)
    step, kind = at // 3, at % 3
    later = step[:, None] - step[None, :]
    target, source = kind[:, None], kind[None, :]
    within = (later == 0) & (target == 2) & (source < 2)
    following = (later == 1) & ((target == 0) | ((target == 1) & (source > 0)))
    return within | following


class GraphAttention(nn.Module):
    """Attention whose queries and keys carry a vector for each pair, by whether one token causes the other (GDT):

        score_ij = (q_i + r_e)' (k_j + p_e) / sqrt(d_h),   e = 1 if j causes i, else 0

    There are two vectors r and two p, so the scores with either are two plain products, and the graph picks: no tensor
    of a vector per pair is ever made.
    """

    def __init__(self, dim: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        assert dim % heads == 0, f"width {dim} is not a multiple of {heads} heads"
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.relation = nn.Parameter(0.02 * torch.randn(2, 2, dim))  # (no edge or edge, query or key, d)
        self.out = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # (B, H, L, d/H) each
        relation = self.relation.to(q.dtype).unflatten(-1, (self.heads, -1))[:, :, :, None]  # (2, 2, H, 1, d/H)
        apart, linked = ((q + r) @ (k + p).mT for r, p in relation)  # (B, H, L, L) each
        length = x.shape[1]
        scores = torch.where(causes(length, x.device), linked, apart) / math.sqrt(q.shape[-1])
        weights = scores.masked_fill(~causal(length, x.device), -math.inf).softmax(-1)
        y = self.dropout(weights) @ v
        return self.out(y.transpose(1, 2).flatten(2))


class KindConvolution(nn.Module):
    """A causal depth-wise convolution whose filter is that of the token's own kind (DC)."""

    def __init__(self, dim: int, period: int = 3, taps: int = 6) -> None:
        super().__init__()
        bound = 1.0 / math.sqrt(taps)
        self.period, self.taps = period, taps
        self.weight = nn.Parameter(torch.empty(taps, period, dim).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(period, dim).uniform_(-bound, bound))
        self.bias.no_decay = True  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        kind = torch.arange(length, device=x.device) % self.period
        padded = F.pad(x, (0, 0, self.taps - 1, 0))
        y = self.bias[kind].expand_as(x)
        for j, weight in enumerate(self.weight):  # the last tap is the token itself
            y = y + padded[:, j : j + length] * weight[kind]
        return y

    def reference(self, x: Tensor) -> Tensor:
        """As published: every filter over the whole sequence, and of each only the outputs at its own kind."""
        padded, out = F.pad(x, (0, 0, self.taps - 1, 0)), torch.zeros_like(x)
        for kind in range(self.period):
            y = causal_conv(padded, self.weight[:, kind].T.contiguous(), self.bias[kind])
            out[:, kind :: self.period] = y[:, kind :: self.period]
        return out


class MambaMixer(nn.Module):
    def __init__(self, dim: int, state_size: int = 16) -> None:
        super().__init__()
        self.mamba = Mamba(dim, state_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.mamba(x)[0]


def dynamic_conv(u: Tensor, logits: Tensor) -> Tensor:
    """y_t = sum_j softmax_j(logits_t) u_{t - j}, j = 0 ... taps - 1, over the taps that are there; u (B, L, C), logits
    (B, L, H, taps): C / H neighbouring channels share a kernel."""
    length, channels = u.shape[1:]
    heads, taps = logits.shape[2:]
    back = torch.arange(taps, device=u.device)
    missing = torch.arange(length, device=u.device)[:, None] < back  # (L, taps): before the first token
    weights = logits.masked_fill(missing[:, None], -math.inf).softmax(-1)  # (B, L, H, taps)
    padded = F.pad(u, (0, 0, taps - 1, 0)).unflatten(-1, (heads, channels // heads))
    y = torch.zeros_like(u).unflatten(-1, (heads, channels // heads))
    for j in range(taps):
        y = y + weights[..., j, None] * padded[:, taps - 1 - j : taps - 1 - j + length]
    return y.flatten(2)


def dynamic_conv_ref(u: Tensor, logits: Tensor) -> Tensor:
    """The same, one token and one channel after the other."""
    length, channels = u.shape[1:]
    heads, taps = logits.shape[2:]
    y = torch.zeros_like(u)
    for t in range(length):
        there = min(taps, t + 1)
        for c in range(channels):
            kernel = logits[:, t, c // (channels // heads), :there].softmax(-1)
            for j in range(there):
                y[:, t, c] = y[:, t, c] + kernel[:, j] * u[:, t - j, c]
    return y


class DynamicConvolution(nn.Module):
    """A gated linear unit, a kernel of its own for each token, a projection (Wu et al., 2019, as LSDT has it)."""

    def __init__(self, dim: int, taps: int, share: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = max(1, dim // share)
        assert dim % self.heads == 0, f"{dim} channels cannot share kernels by {share}"
        self.inner = nn.Linear(dim, 2 * dim)
        self.kernel = nn.Linear(dim, self.heads * taps)
        self.dropout = nn.Dropout(dropout)
        self.bias = nn.Parameter(torch.zeros(dim))
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        u = F.glu(self.inner(x))  # (B, L, C)
        logits = self.dropout(self.kernel(u)).unflatten(-1, (self.heads, -1))
        return self.out(dynamic_conv(u, logits) + self.bias)


class LongShort(nn.Module):
    """Attention on the first channels, dynamic convolution on the last `short`, gated together (LSDT).

    g = softmax over channels of W_2 ReLU(W_1 c);  out = W (g * c),  c the two branches side by side
    """

    def __init__(self, dim: int, heads: int, dropout: float, short: int, taps: int) -> None:
        super().__init__()
        assert 0 < short < dim, f"{short} of {dim} channels for the convolution: both branches need some"
        self.short = short
        self.long = Attention(dim - short, heads, dropout, project=False)
        self.conv = DynamicConvolution(short, taps, dropout=dropout)
        self.gate = nn.Sequential(nn.Linear(dim, dim // 2), nn.ReLU(), nn.Linear(dim // 2, dim))
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        long, short = x.split([x.shape[-1] - self.short, self.short], dim=-1)
        c = torch.cat([self.long(long), self.conv(short)], dim=-1)
        return self.out(self.gate(c).softmax(-1) * c)


# --------------------------------------------------------------------------------------------------------- stacks


class Block(nn.Module):
    def __init__(
        self,
        dim: int,
        mixer: nn.Module,
        dropout: float = 0.0,
        activation: Callable[[], nn.Module] = nn.GELU,
        post_norm: bool = False,
        expand: int = 4,
    ) -> None:
        super().__init__()
        self.mixer, self.post_norm = mixer, post_norm
        self.norms = nn.ModuleList([nn.LayerNorm(dim), nn.LayerNorm(dim)])
        self.dropout = nn.Dropout(dropout)
        self.mlp = nn.Sequential(
            nn.Linear(dim, expand * dim), activation(), nn.Linear(expand * dim, dim), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor, **how: Any) -> Tensor:
        """`how` goes to the mixer."""
        if self.post_norm:
            x = self.norms[0](x + self.dropout(self.mixer(x, **how)))
            return self.norms[1](x + self.mlp(x))
        x = x + self.dropout(self.mixer(self.norms[0](x), **how))
        return x + self.mlp(self.norms[1](x))


class Routed(nn.Module):
    """A block for chosen tokens alone; the others pass as they are (mixture of depths, as Decision Mixer uses it).

    In training the ceil(capacity L) tokens of a window with the greatest weights w go through, x <- x + w (block(x) -
    x), and a second network learns to tell from a token alone whether it was chosen: choosing the greatest looks at
    tokens to come, which are not there when acting. Then that network decides. The chosen attend to each other only; a
    mask says so instead of a shorter sequence, whose length would depend on the data.
    """

    def __init__(self, dim: int, block: Block, capacity: float) -> None:
        super().__init__()
        self.block, self.capacity = block, capacity
        self.router = nn.Linear(dim, 1)
        self.predictor = nn.Sequential(nn.Linear(dim, dim // 2), nn.SiLU(), nn.Linear(dim // 2, 1))

    def route(self, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        """Who goes through (B, L), and the loss of the network that guesses it (log-odds, binary cross-entropy)."""
        guess = self.predictor(x.detach()).squeeze(-1)  # (B, L)
        if not self.training:
            return guess > 0, guess.new_zeros(())
        count = max(1, math.ceil(self.capacity * x.shape[1]))
        least = w.detach().topk(count, dim=-1).values[:, -1:]
        chosen = w.detach() >= least
        return chosen, F.binary_cross_entropy_with_logits(guess.float(), chosen.float())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        w = self.router(x).squeeze(-1)  # (B, L)
        chosen, loss = self.route(x, w)
        itself = torch.eye(x.shape[1], dtype=torch.bool, device=x.device)  # or a row without keys would have no answer
        y = self.block(x, seen=chosen[:, None, None, :] | itself)
        return torch.where(chosen[..., None], x + w[..., None] * (y - x), x), loss


class Trunk(nn.Module):
    """A stack of blocks, and a norm at its end unless the blocks end in one. Causal."""

    def __init__(
        self, dim: int, blocks: Sequence[nn.Module], final_norm: bool = True, init: float | None = 0.02
    ) -> None:
        """init: standard deviation of the initial weights of plain Linear layers, zero biases (GPT-2's), or torch's."""
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(dim) if final_norm else nn.Identity()
        if init is not None:
            # Not Mamba's: a zero bias of its step sizes would make every memory short.
            kept = {id(m) for mamba in self.modules() if isinstance(mamba, Mamba) for m in mamba.modules()}
            for module in self.modules():
                if isinstance(module, nn.Linear) and id(module) not in kept:
                    nn.init.normal_(module.weight, std=init)
                    nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.with_loss(x)[0]

    def with_loss(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The outputs, and what the blocks themselves ask to be minimised (routed ones alone; their mean)."""
        asked = []
        for block in self.blocks:
            if isinstance(block, Routed):
                x, loss = block(x)
                asked.append(loss)
            else:
                x = block(x)
        return self.norm(x), torch.stack(asked).mean() if asked else x.new_zeros(())


class HybridTrunk(nn.Module):
    """QHyer's gated attention and Mamba, called as the others are."""

    def __init__(self, dim: int, layers: int, heads: int, dropout: float, state_size: int = 16) -> None:
        super().__init__()
        self.decoder = HybridDecoder(dim, layers, heads, dropout, "hybrid", state_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(x)[0]


# -------------------------------------------------------------------------------------------------- by their names


def gpt(
    dim: int,
    layers: int,
    heads: int,
    dropout: float,
    activation: Callable[[], nn.Module] = nn.GELU,
    post_norm: bool = False,
) -> Trunk:
    """GPT-2's stack; with `post_norm` that of the small re-implementations of DT, whose initial weights are torch's."""
    blocks = [Block(dim, Attention(dim, heads, dropout), dropout, activation, post_norm) for _ in range(layers)]
    return Trunk(dim, blocks, final_norm=not post_norm, init=None if post_norm else 0.02)


def graph(dim: int, layers: int, heads: int, dropout: float) -> Trunk:
    """Post-norm, ReLU, an MLP twice as wide."""
    blocks = [
        Block(dim, GraphAttention(dim, heads, dropout), dropout, nn.ReLU, post_norm=True, expand=2)
        for _ in range(layers)
    ]
    return Trunk(dim, blocks, final_norm=False)


def convformer(dim: int, layers: int, dropout: float, period: int = 3, taps: int = 6) -> Trunk:
    return Trunk(dim, [Block(dim, KindConvolution(dim, period, taps), dropout) for _ in range(layers)])


def mamba(dim: int, layers: int, dropout: float, state_size: int = 16) -> Trunk:
    return Trunk(dim, [Block(dim, MambaMixer(dim, state_size), dropout) for _ in range(layers)])


def long_short(dim: int, layers: int, heads: int, dropout: float, short: int, taps: int = 6) -> Trunk:
    """Post-norm; Xavier's initial weights and zero biases."""
    mixers = [LongShort(dim, heads, dropout, short, taps) for _ in range(layers)]
    trunk = Trunk(dim, [Block(dim, mixer, dropout, post_norm=True) for mixer in mixers], final_norm=False, init=None)
    for module in trunk.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
    return trunk


def routed(dim: int, layers: int, heads: int, dropout: float, capacity: float = 0.5) -> Trunk:
    """GPT-2's blocks, every second of them for chosen tokens alone."""
    blocks: list[nn.Module] = [Block(dim, Attention(dim, heads, dropout), dropout) for _ in range(layers)]
    for i in range(1, layers, 2):
        block = blocks[i]
        assert isinstance(block, Block)
        blocks[i] = Routed(dim, block, capacity)
    return Trunk(dim, blocks)


BACKBONES: dict[str, Callable[[int, int, int, float], nn.Module]] = {
    "gpt": gpt,
    "graph": graph,
    "convformer": lambda dim, layers, heads, dropout: convformer(dim, layers, dropout),
    "mamba": lambda dim, layers, heads, dropout: mamba(dim, layers, dropout),
    "long_short": lambda dim, layers, heads, dropout: long_short(dim, layers, heads, dropout, dim // 2),
    "routed": routed,
    "hybrid": HybridTrunk,
}
"""name -> (width, layers, heads, dropout) -> backbone for three kinds of token (R, s, a for `graph`)"""
