"""The hybrid decoder's training pass on CUDA, with everything between its matrix products fused.

Between two products stands one kernel: `seam` (bias, mixing by the gate, dropout, residual, LayerNorm, the next gate),
`short_attention`, `bias_gelu`, and Mamba's convolution and scan. Biases are added, and their gradients summed, by the
kernel that reads the product. The residual stream is float32, what enters a product has its dtype (bfloat16 under
autocast). Same function as `HybridDecoder.forward`, which is the reference; tests compare values and gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from qhyer.nn.attention_triton import MAX_LENGTH, shared_bytes, shared_memory, short_attention
from qhyer.nn.mamba_triton import conv_silu, gated_scan
from qhyer.nn.seam_triton import bias_gelu, bias_gelu_backward, seam
from qhyer.nn.streams import concurrently

if TYPE_CHECKING:
    from qhyer.nn.attention import CausalAttention
    from qhyer.nn.hybrid import HybridBlock, HybridDecoder
    from qhyer.nn.mamba import Mamba


def fits(decoder: HybridDecoder, length: int, dtype: torch.dtype) -> bool:
    """Whether the kernels can hold such windows: attention keeps a window's queries, keys, values and scores on the
    chip at once."""
    attention = cast("CausalAttention | None", decoder.blocks[0].attention)
    if attention is None:
        return True
    head = attention.out.in_features // attention.heads
    room = shared_memory(attention.out.weight.device)
    return length <= MAX_LENGTH and head <= 128 and shared_bytes(length, head, dtype) <= room


class _Products(torch.autograd.Function):
    """x W_i^T for several matrices, given in float32 and again in x's dtype. Gradients go to the float32 ones.

    The gradient of x is accumulated by the products themselves, not by additions of their results.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, *weights: Tensor) -> tuple[Tensor, ...]:
        low = weights[count:]
        ctx.count = count
        ctx.save_for_backward(x, *low)
        return tuple(x @ weight.t() for weight in low)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *low = ctx.saved_tensors
        dx = None
        for grad, weight in zip(grads, low):
            dx = grad @ weight if dx is None else dx.addmm_(grad, weight)
        dweights = [_weight_gradient(grad, x) for grad in grads]
        return (dx, None, *dweights, *([None] * ctx.count))


class _GeluProduct(torch.autograd.Function):
    """GELU(u + bias) W^T, W given in float32 and again in u's dtype.

    Backward needs GELU(u + bias) for W's gradient. Kept, it would be the widest tensor of a block; the kernel that
    computes u's gradient has it at hand and writes it then.
    """

    @staticmethod
    def forward(ctx: Any, u: Tensor, bias: Tensor, weight: Tensor, low: Tensor) -> Tensor:
        ctx.save_for_backward(u, bias, low)
        return bias_gelu(u, bias) @ low.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        u, bias, low = ctx.saved_tensors
        du, dbias, h = bias_gelu_backward(u, bias, grad @ low, True)
        return du, dbias.to(bias.dtype), _weight_gradient(grad, h), None


def _weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    if grad.dtype != torch.float32 and grad.is_cuda:
        return torch.mm(grad.t(), x, out_dtype=torch.float32)
    return (grad.t() @ x).float()


class _Weights:
    """The decoder's matrices in the dtype of the products, all cast by one kernel per pass."""

    def __init__(self, decoder: nn.Module, dtype: torch.dtype) -> None:
        self.full = [m.weight for m in decoder.modules() if isinstance(m, nn.Linear) and m.out_features > 1]
        if dtype == torch.float32:
            low: Sequence[Tensor] = [weight.detach() for weight in self.full]
        else:
            low = [torch.empty_like(weight, dtype=dtype) for weight in self.full]
            with torch.no_grad():
                torch._foreach_copy_(low, self.full)
        self.low = {id(weight): copy for weight, copy in zip(self.full, low)}

    def of(self, layer: nn.Linear, parts: int = 1) -> list[tuple[Tensor, Tensor]]:
        """A layer's matrix in both dtypes, cut into parts of its outputs."""
        full, low = layer.weight, self.low[id(layer.weight)]
        return [(full, low)] if parts == 1 else list(zip(full.chunk(parts), low.chunk(parts)))

    def products(self, x: Tensor, *pairs: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        full, low = zip(*pairs)
        return _Products.apply(x, len(full), *full, *low)

    def product(self, x: Tensor, layer: nn.Linear) -> Tensor:
        return self.products(x, *self.of(layer))[0]


def _mamba(mamba: Mamba, x: Tensor, z: Tensor, weights: _Weights, batch: int) -> Tensor:
    """After the first projection, before the last: (M, E) all."""
    x, z = x.view(batch, -1, mamba.inner), z.view(batch, -1, mamba.inner)
    x = conv_silu(x, mamba.conv_weight, mamba.conv_bias, 0)
    selected = weights.product(x.flatten(0, 1), mamba.x_proj)  # (M, R + 2 N)
    dt, BC = selected.split([mamba.rank, 2 * mamba.state_size], dim=-1)
    dt = weights.product(dt, mamba.dt_proj).view(x.shape)
    B, C = BC.float().view(batch, -1, 2 * mamba.state_size).chunk(2, dim=-1)
    y, _ = gated_scan(x, dt, mamba.dt_proj.bias, mamba.A, B, C, mamba.D, z, None)
    return y.flatten(0, 1)


def _branches(
    block: HybridBlock, h: Tensor, weights: _Weights, batch: int, seed: Tensor, drop: float
) -> tuple[Tensor, Tensor | None]:
    """The outputs of the block's branches (M, d), attention's first and without its bias."""
    attention, mamba = block.attention, block.mamba

    def attend(qkv: Tensor) -> Tensor:
        assert attention is not None
        o = short_attention(qkv.view(batch, -1, qkv.shape[-1]), attention.qkv.bias, attention.heads, drop, seed)
        return weights.product(o.flatten(0, 1), attention.out)

    def scan(x: Tensor, z: Tensor) -> Tensor:
        assert mamba is not None
        return weights.product(_mamba(mamba, x, z, weights, batch), mamba.out_proj)

    if attention is None:
        assert mamba is not None
        return scan(*weights.products(h, *weights.of(mamba.in_proj, 2))), None
    if mamba is None:
        return attend(weights.product(h, attention.qkv)), None
    # x and z apart: together they would be one product, but their gradients two tensors to be joined by a copy.
    qkv, x, z = weights.products(h, *weights.of(attention.qkv), *weights.of(mamba.in_proj, 2))
    (out,) = weights.of(attention.out)
    return concurrently("attention", lambda: attend(qkv), lambda: scan(x, z), [qkv, seed, out[1]])


def decode(decoder: HybridDecoder, x: Tensor, dtype: torch.dtype) -> Tensor:
    """x (B, L, d) -> the decoder's outputs (B, L, d), in `dtype`."""
    batch, length, dim = x.shape
    blocks: list[HybridBlock] = list(decoder.blocks)  # type: ignore[arg-type]
    weights = _Weights(decoder, dtype)
    drop = blocks[0].dropout.p if decoder.training else 0.0
    seeds = torch.randint(2**31 - 1, (len(blocks), 3, 1), device=x.device)

    def join(
        x: Tensor, y: Tensor | None, bias: Tensor | None, other: Tensor | None, alpha: Tensor | None,
        norm: nn.LayerNorm, gate: nn.Linear | None, seed: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        return seam(
            x, y, bias, other, alpha, norm.weight, norm.bias, None if gate is None else gate.weight,
            None if gate is None else gate.bias, drop, seed, norm.eps, dtype,
        )  # fmt: skip

    x = x.reshape(-1, dim).float()
    _, h, alpha = join(x, None, None, None, None, blocks[0].norm, blocks[0].gate, seeds[0, 0])
    for i, block in enumerate(blocks):
        first, second = _branches(block, h, weights, batch, seeds[i, 0], drop)
        norm, up, _, down, _ = (cast(Any, layer) for layer in block.mlp)
        bias = None if block.attention is None else block.attention.out.bias
        x, h, _ = join(x, first, bias, second, alpha, norm, None, seeds[i, 1])
        h = _GeluProduct.apply(weights.product(h, up), up.bias, *weights.of(down)[0])
        last = i + 1 == len(blocks)
        norm, gate = (decoder.norm, None) if last else (blocks[i + 1].norm, blocks[i + 1].gate)
        x, h, alpha = join(x, h, down.bias, None, None, norm, gate, seeds[i, 2])
    return h.view(batch, length, dim)
