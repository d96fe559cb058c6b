"""The hybrid decoder's training pass on CUDA, with everything between its matrix products fused.

Between two products stands one kernel: `seam` (bias, mixing by the gate, dropout, residual, LayerNorm, the next gate),
attention, `bias_gelu`, and Mamba's convolution and scan. Biases are added, and their gradients summed, by the kernel
that reads the product. The residual stream is float32, what enters a product has its dtype (bfloat16 under autocast).
Same function as `HybridDecoder.forward`, which is the reference; tests compare values and gradients.

A block's branches are one operation, `branches` (`branches_triton.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from qhyer.nn import mamba2_triton
from qhyer.nn.attention_triton import MAX_LENGTH, shared_bytes, shared_memory
from qhyer.nn.branches_triton import ALIGNED, branches, put_weight
from qhyer.nn.mamba2 import Mamba2
from qhyer.nn.seam_triton import bias_gelu, bias_gelu_backward, seam
from qhyer.streams import begin

if TYPE_CHECKING:
    from qhyer.nn.attention import CausalAttention
    from qhyer.nn.hybrid import HybridBlock, HybridDecoder, Ready


def fits(decoder: HybridDecoder, length: int, dtype: torch.dtype) -> bool:
    """Whether the kernels can hold such windows: attention keeps a window's queries, keys, values and scores on the
    chip at once, and so does Mamba-2."""
    attention = cast("CausalAttention | None", decoder.blocks[0].attention)
    mamba = decoder.blocks[0].mamba
    room = shared_memory(decoder.norm.weight.device)
    if attention is not None:
        head = attention.out.in_features // attention.heads
        if length > MAX_LENGTH or head > 128 or shared_bytes(length, head, dtype) > room:
            return False
    return not isinstance(mamba, Mamba2) or mamba2_triton.fits(mamba, length, dtype, room)


class _Middle(torch.autograd.Function):
    """GELU(h U^T + bias) W^T, an MLP but for its last bias; both weights in float32 and again in h's dtype.

    Backward needs GELU(u + bias), u = h U^T, for W's gradient. It is kept: (M, 4 d) more of a block to hold until then,
    and one pass over memory of that size less than writing it again beside u's gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, up: Tensor, bias: Tensor, down: Tensor, up_low: Tensor, down_low: Tensor
    ) -> Tensor:
        u = h @ up_low.t()
        y = bias_gelu(u, bias)
        ctx.save_for_backward(h, u, y, bias, up, down, up_low, down_low)
        return y @ down_low.t()

    @staticmethod
    @once_differentiable  # the low weights are apart from those they are made of
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None, None]:
        h, u, y, bias, up, down, up_low, down_low = ctx.saved_tensors
        ddown = put_weight(grad, y, down)  # waits for nothing that this makes
        du, dbias = bias_gelu_backward(u, bias, grad @ down_low)
        return du @ up_low, put_weight(du, h, up), dbias.to(bias.dtype), ddown, None, None


class _Weights:
    """The decoder's matrices in the dtype of the products, all cast by one kernel per pass; those that read the same
    stand one below the other. And A of every Mamba, and the seeds of dropout."""

    def __init__(self, blocks: list[HybridBlock], decoder: nn.Module, dtype: torch.dtype) -> None:
        same = dtype == torch.float32
        self.seeds = torch.randint(2**31 - 1, (len(blocks), 3, 1), device=blocks[0].norm.weight.device)
        self.low: dict[int, Tensor] = {}
        stacked: set[int] = set()  # weights
        self.stacks: list[Tensor] = []  # of each block: [qkv; x; z], of what it has
        self.A: list[Tensor] = []
        sources: list[Tensor] = []
        copies: list[Tensor] = []
        for block in blocks:
            parts: list[Tensor] = [] if block.attention is None else [block.attention.qkv.weight]
            parts += [] if block.mamba is None else [block.mamba.in_proj.weight]
            if same and len(parts) == 1:
                stack = parts[0].detach()
            else:
                used = sum(map(len, parts))
                rows = -(-used // ALIGNED) * ALIGNED
                stack = parts[0].new_empty(rows, parts[0].shape[1], dtype=dtype)
                if rows > used:
                    stack[used:].zero_()
                sources += parts
                copies += stack[:used].split([len(part) for part in parts])
            self.stacks.append(stack)
            stacked.update(map(id, parts))
        for layer in decoder.modules():
            if isinstance(layer, nn.Linear) and layer.out_features > 1 and id(layer.weight) not in stacked:
                low = layer.weight.detach() if same else torch.empty_like(layer.weight, dtype=dtype)
                if not same:
                    sources.append(layer.weight)
                    copies.append(low)
                self.low[id(layer.weight)] = low
        logs: list[Tensor] = [block.mamba.A_log for block in blocks if block.mamba is not None]
        with torch.no_grad():
            if copies:
                torch._foreach_copy_(copies, sources)
            if logs:
                self.A = list(torch._foreach_neg(torch._foreach_exp(logs)))

    def __iter__(self) -> Iterator[Tensor]:
        return iter([self.seeds, *self.low.values(), *self.stacks, *self.A])

    def of(self, layer: nn.Linear) -> Tensor:
        return self.low[id(layer.weight)]


def _branches(
    block: HybridBlock, h: Tensor, weights: _Weights, index: int, batch: int, seed: Tensor, drop: float
) -> tuple[Tensor, Tensor | None]:
    """The outputs of the block's branches (M, d), attention's first and without its bias."""
    first: list[Tensor] = []
    second: list[Tensor] = []
    low, heads = [weights.stacks[index]], 1
    if (attention := block.attention) is not None:
        first = [attention.qkv.weight, attention.qkv.bias, attention.out.weight]
        low, heads = [*low, weights.of(attention.out)], attention.heads
    if (mamba := block.mamba) is not None:
        second = [mamba.in_proj.weight, mamba.conv_weight, mamba.conv_bias]
        products = [mamba.out_proj]
        if isinstance(mamba, Mamba2):
            second += [mamba.dt_bias]
        else:
            second += [mamba.x_proj.weight, mamba.dt_proj.weight, mamba.dt_proj.bias]
            products = [mamba.x_proj, mamba.dt_proj, *products]
        second += [mamba.A_log, mamba.D, mamba.out_proj.weight]
        low = [*low, *(weights.of(layer) for layer in products), weights.A[index]]
    one, two, *_ = branches(h, first, second, low, seed, batch, heads, drop)
    return one, two if first and second else None


def prepare(decoder: HybridDecoder, dtype: torch.dtype, device: torch.device) -> Ready:
    """Begins to cast the weights."""
    blocks: list[HybridBlock] = list(decoder.blocks)  # type: ignore[arg-type]
    return begin("weights", lambda: _Weights(blocks, decoder, dtype), device)


def decode(
    decoder: HybridDecoder,
    x: Tensor,
    dtype: torch.dtype,
    read: tuple[int, int] | None = None,
    ready: Ready | None = None,
) -> Tensor:
    """x (B, L, d) -> the decoder's outputs (B, L, d), in `dtype`; with `read` those alone that are read, and after the
    last block's branches nothing else is computed."""
    batch, length, dim = x.shape
    blocks: list[HybridBlock] = list(decoder.blocks)  # type: ignore[arg-type]
    weights = _Weights(blocks, decoder, dtype) if ready is None else ready()
    drop = blocks[0].dropout.p if decoder.training else 0.0
    seeds = weights.seeds

    def join(
        x: Tensor, y: Tensor | None, bias: Tensor | None, other: Tensor | None, alpha: Tensor | None,
        norm: nn.LayerNorm, gate: nn.Linear | None, seed: Tensor, read: tuple[int, int, int] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        return seam(
            x, y, bias, other, alpha, norm.weight, norm.bias, None if gate is None else gate.weight,
            None if gate is None else gate.bias, drop, seed, norm.eps, dtype, read,
        )  # fmt: skip

    x = x.reshape(-1, dim).float()
    x, h, alpha = join(x, None, None, None, None, blocks[0].norm, blocks[0].gate, seeds[0, 0])
    for i, block in enumerate(blocks):
        first, second = _branches(block, h, weights, i, batch, seeds[i, 0], drop)
        norm, up, _, down, _ = (cast(Any, layer) for layer in block.mlp)
        bias = None if block.attention is None else block.attention.out.bias
        last = i + 1 == len(blocks)
        kept = (length, *read) if last and read is not None else None
        x, h, _ = join(x, first, bias, second, alpha, norm, None, seeds[i, 1], kept)
        h = _Middle.apply(h, up.weight, up.bias, down.weight, weights.of(up), weights.of(down))
        norm, gate = (decoder.norm, None) if last else (blocks[i + 1].norm, blocks[i + 1].gate)
        x, h, alpha = join(x, h, down.bias, None, None, norm, gate, seeds[i, 2])
    return h.view(batch, len(h) // batch, dim)
