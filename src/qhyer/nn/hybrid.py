"""The hybrid decoder: attention and Mamba in parallel, mixed by a learned gate (Section 3.2 of the paper).

    alpha = sigmoid(w^T x + b),   y = alpha y_attn + (1 - alpha) y_mamba        per token
    x <- x + y;   x <- x + MLP(LN(x))                                           pre-norm

Both branches see the full normalised input. `backbone` selects one branch alone for the ablation, `ssm` the kind of
Mamba.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qhyer.nn.attention import CausalAttention, KeyValues
from qhyer.nn.mamba import Mamba, MambaState
from qhyer.nn.mamba2 import Mamba2
from qhyer.nn.scan import kernels
from qhyer.streams import Begun

if TYPE_CHECKING:
    from qhyer.nn.hybrid_triton import _Weights

Ready: TypeAlias = "Begun[_Weights]"
"""what the fused pass makes of a decoder's weights alone, begun"""
Backbone = Literal["hybrid", "attention", "mamba"]
StateSpace = Literal["mamba", "mamba2"]
MIXERS: dict[StateSpace, type[Mamba] | type[Mamba2]] = {"mamba": Mamba, "mamba2": Mamba2}


class BlockCache(NamedTuple):
    attention: KeyValues | None
    mamba: MambaState | None


Cache = list[BlockCache]
Kept = TypeVar("Kept", KeyValues, MambaState)


class HybridBlock(nn.Module):
    def __init__(
        self,
        dim: int,
        heads: int,
        dropout: float,
        backbone: Backbone = "hybrid",
        state_size: int = 16,
        ssm: StateSpace = "mamba",
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.norm = nn.LayerNorm(dim)
        self.attention = CausalAttention(dim, heads, dropout) if backbone != "mamba" else None
        self.mamba = MIXERS[ssm](dim, state_size) if backbone != "attention" else None
        self.gate = nn.Linear(dim, 1) if backbone == "hybrid" else None
        if self.gate is not None:
            nn.init.zeros_(self.gate.weight)  # alpha = 1/2 everywhere at the start
            nn.init.zeros_(self.gate.bias)
        self.dropout = nn.Dropout(dropout)
        self.mlp = nn.Sequential(
            nn.LayerNorm(dim),
            nn.Linear(dim, 4 * dim),
            nn.GELU(),
            nn.Linear(4 * dim, dim),
            nn.Dropout(dropout),
        )

    def kept(self, length: int) -> float:
        """Numbers that a token of so many keeps for the backward pass where no kernels do the work, as counted in
        float32 (`test_what_a_window_keeps`): the norms and the MLP, then each branch."""
        dim = self.norm.normalized_shape[0]
        count = 10.0 * dim
        if self.dropout.p > 0:
            count += 2.0 * dim
        if self.attention is not None:
            count += 6.0 * dim
            if self.dropout.p > 0:  # torch's attention then keeps scores, their softmax and what is dropped
                count += 3.0 * self.attention.heads * length
        return count if self.mamba is None else count + self.mamba.kept(length)

    def forward(self, x: Tensor, cache: BlockCache | None = None) -> tuple[Tensor, BlockCache]:
        h = self.norm(x)
        keys, state = None, None
        if self.attention is not None:
            y_attention, keys = self.attention(h, cache.attention if cache else None)
            y = y_attention
        if self.mamba is not None:
            past = cache.mamba if cache else None
            if past is not None and h.shape[1] == 1:
                y_mamba, state = self.mamba.step(h[:, 0], past)
                y_mamba = y_mamba[:, None]
            else:
                y_mamba, state = self.mamba(h, past)
            y = y_mamba
        if self.gate is not None:
            alpha = torch.sigmoid(self.gate(h))  # (B, L, 1)
            y = alpha * y_attention + (1.0 - alpha) * y_mamba
        x = x + self.dropout(y)
        return x + self.mlp(x), BlockCache(keys, state)


@functools.cache
def _say_unfused(length: int, dtype: torch.dtype) -> None:
    logging.getLogger(__name__).warning(
        "windows of %d tokens in %s do not fit into the fused pass with these heads: trained without it, slower",
        length,
        str(dtype).removeprefix("torch."),
    )


def first_of_steps(h: Tensor, per_step: int, first: int) -> Tensor:
    """h (B, L, d), steps of `per_step` tokens -> the first `first` of every step (B, K * first, d), in order.

    The last step may have fewer tokens than the others, but not fewer than `first`.
    """
    missing = -h.shape[1] % per_step
    if not 0 < first <= per_step - missing:
        raise ValueError(f"of {h.shape[1]} tokens, {per_step} a step, {first} a step cannot be read: some lack")
    return F.pad(h, (0, 0, 0, missing)).unflatten(1, (-1, per_step))[:, :, :first].flatten(1, 2)


class HybridDecoder(nn.Module):
    """A stack of blocks and a final norm. Causal: output i depends on tokens up to i only."""

    def __init__(
        self,
        dim: int,
        layers: int,
        heads: int,
        dropout: float = 0.0,
        backbone: Backbone = "hybrid",
        state_size: int = 16,
        ssm: StateSpace = "mamba",
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(HybridBlock(dim, heads, dropout, backbone, state_size, ssm) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)

    def kept(self, length: int) -> int:
        """Numbers that a window of so many tokens keeps for the backward pass where no kernels do the work, about."""
        return round(length * sum(block.kept(length) for block in self.blocks if isinstance(block, HybridBlock)))

    def _fused(self, like: Tensor, length: int) -> torch.dtype | None:
        """The dtype of the products if the fused pass trains windows of this length, on the device of `like`."""
        if not torch.is_grad_enabled() or kernels(like) is None:
            return None
        from qhyer.nn import hybrid_triton

        on = torch.is_autocast_enabled(like.device.type)
        dtype = torch.get_autocast_dtype(like.device.type) if on else like.dtype
        if hybrid_triton.fits(self, length, dtype):
            return dtype
        _say_unfused(length, dtype)
        return None

    def prepare(self, like: Tensor, length: int) -> Ready | None:
        """Begins what `forward` makes of the weights alone, where there is such work, for a window of so many tokens
        that is not there yet, on the device of `like`: the pass is told by `ready`."""
        dtype = self._fused(like, length)
        if dtype is None:
            return None
        from qhyer.nn import hybrid_triton

        return hybrid_triton.prepare(self, dtype, like.device)

    def forward(
        self, x: Tensor, cache: Cache | None = None, read: tuple[int, int] | None = None, ready: Ready | None = None
    ) -> tuple[Tensor, Cache]:
        """x (B, L, d), the tokens after those in `cache` -> outputs (B, L, d) and the cache of all of them.

        A window followed by single tokens through the cache gives what one pass over all tokens gives. In training,
        where nothing follows, the cache comes back empty if the fused pass did the work (`hybrid_triton.py`).

        `read`, (P, R): x is a window of steps of P tokens, of which the outputs at the first R alone are read, and come
        back: (B, K R, d), as `first_of_steps` takes them. Every token passes through all branches, since those after it
        look at it there; but what follows the last of them, the last block's MLP and the final norm, sees one token at
        a time, and the fused pass leaves it out where nobody reads.
        """
        assert read is None or cache is None
        if cache is None and (dtype := self._fused(x, x.shape[1])) is not None:
            from qhyer.nn import hybrid_triton

            return hybrid_triton.decode(self, x, dtype, read, ready), []
        after: Cache = []
        for i, block in enumerate(self.blocks):
            x, block_cache = block(x, cache[i] if cache is not None else None)
            after.append(block_cache)
        h = self.norm(x)
        return h if read is None else first_of_steps(h, *read), after

    @staticmethod
    def pack(cache: Cache) -> dict[str, Tensor]:
        """A cache as tensors by name, each with the sequences as its first axis."""
        return {
            f"{i}/{name}/{part}": value
            for i, block in enumerate(cache)
            for name, kept in block._asdict().items()
            if kept is not None
            for part, value in kept._asdict().items()
        }

    @staticmethod
    def unpack(tensors: Mapping[str, Tensor]) -> Cache | None:
        """The inverse; None of nothing."""
        blocks = 1 + max((int(name.split("/")[0]) for name in tensors), default=-1)

        def part(name: str, kind: Callable[..., Kept], *fields: str) -> Kept | None:
            found = [tensors[f"{name}/{field}"] for field in fields if f"{name}/{field}" in tensors]
            return kind(*found) if found else None

        cache = [
            BlockCache(
                part(f"{i}/attention", KeyValues, *KeyValues._fields),
                part(f"{i}/mamba", MambaState, *MambaState._fields),
            )
            for i in range(blocks)
        ]
        return cache or None

    @torch.no_grad()
    def readout(self, x: Tensor) -> list[dict[str, Tensor]]:
        """Per block, on these tokens: the gate alpha (B, L), Mamba's Delta_t (B, L, E) and A_bar_t (B, L, E, N), of
        Mamba-2 (B, L, H) and (B, L, H, 1)."""
        readouts = []
        for block in self.blocks:
            assert isinstance(block, HybridBlock)
            h = block.norm(x)
            values: dict[str, Tensor] = {}
            if block.gate is not None:
                values["alpha"] = torch.sigmoid(block.gate(h)).squeeze(-1)
            if block.mamba is not None:
                values.update(block.mamba.readout(h))
            readouts.append(values)
            x, _ = block(x)
        return readouts
