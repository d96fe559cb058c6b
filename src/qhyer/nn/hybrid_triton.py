"""The hybrid decoder's training pass on CUDA, with everything between its matrix products fused.

Between two products stands one kernel: `seam` (bias, mixing by the gate, dropout, residual, LayerNorm, the next gate),
attention, `bias_gelu`, and Mamba's convolution and scan. Biases are added, and their gradients summed, by the kernel
that reads the product. The residual stream is float32, what enters a product has its dtype (bfloat16 under autocast).
Same function as `HybridDecoder.forward`, which is the reference; tests compare values and gradients.

A block's branches are one operation, `branches`, with a backward written out. Queries, keys, values, x and z are
columns of one product; their gradients are written into columns of one matrix, so that the gradient of h, and that of
the stacked weights, is one product, too. Where a tensor has two readers, the second gradient is accumulated by the
product that makes it. Autograd would add, join and cast instead, each time in a pass over memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from qhyer.nn import attention_triton as attending
from qhyer.nn import mamba_triton as scanning
from qhyer.nn.attention_triton import MAX_LENGTH, shared_bytes, shared_memory
from qhyer.nn.products_triton import weight_gradient
from qhyer.nn.seam_triton import bias_gelu, bias_gelu_backward, seam
from qhyer.streams import aside, begin, fork

if TYPE_CHECKING:
    from qhyer.nn.attention import CausalAttention
    from qhyer.nn.hybrid import HybridBlock, HybridDecoder, Ready


Branch = Callable[[], list[Tensor]]


def fits(decoder: HybridDecoder, length: int, dtype: torch.dtype) -> bool:
    """Whether the kernels can hold such windows: attention keeps a window's queries, keys, values and scores on the
    chip at once."""
    attention = cast("CausalAttention | None", decoder.blocks[0].attention)
    if attention is None:
        return True
    head = attention.out.in_features // attention.heads
    room = shared_memory(attention.out.weight.device)
    return length <= MAX_LENGTH and head <= 128 and shared_bytes(length, head, dtype) <= room


def _weight(grad: Tensor, x: Tensor, of: Tensor) -> Tensor:
    """A weight's gradient, put aside."""
    return aside(lambda: weight_gradient(grad, x), (grad, x), of)


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
        ddown = _weight(grad, y, down)  # waits for nothing that this makes
        du, dbias = bias_gelu_backward(u, bias, grad @ down_low)
        return du @ up_low, _weight(du, h, up), dbias.to(bias.dtype), ddown, None, None


class _Weights:
    """The decoder's matrices in the dtype of the products, all cast by one kernel per pass; those that read the same
    stand one below the other. And A of every Mamba."""

    def __init__(self, blocks: list[HybridBlock], decoder: nn.Module, dtype: torch.dtype) -> None:
        same = dtype == torch.float32
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
                stack = parts[0].new_empty(sum(map(len, parts)), parts[0].shape[1], dtype=dtype)
                sources += parts
                copies += stack.split([len(part) for part in parts])
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
        return iter([*self.low.values(), *self.stacks, *self.A])

    def of(self, layer: nn.Linear) -> Tensor:
        return self.low[id(layer.weight)]


# ------------------------------------------------------------------------------------------------- a block's branches


def _columns(projected: Tensor, attention: list[Tensor], batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """(M, 3 d + 2 E) -> queries, keys and values, x and z, (B, L, .) each; those of an absent branch are empty."""
    packed = len(attention[0]) if attention else 0
    rows = projected.view(batch, -1, projected.shape[1])
    inner = (projected.shape[1] - packed) // 2
    return rows[..., :packed], rows[..., packed : packed + inner], rows[..., packed + inner :]


def _selection(selected: Tensor, rank: int, batch: int) -> tuple[Tensor, Tensor]:
    """(M, R + 2 N) -> delta (M, R) and [B; C] (B, L, 2 N), where they lie."""
    return selected[:, :rank], selected.view(batch, -1, selected.shape[1])[..., rank:]


def _either(attend: Branch | None, scan: Branch | None, device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
    """The branches that are there, side by side where there are two; nothing of one that is not."""
    if attend is None or scan is None:
        return attend() if attend else [], scan() if scan else []
    return fork("branches", attend, scan, device)


@torch.library.custom_op("qhyer::branches", mutates_args=())
def branches(
    h: Tensor, attention: list[Tensor], mamba: list[Tensor], low: list[Tensor], seed: Tensor, batch: int, heads: int,
    drop: float,
) -> list[Tensor]:  # fmt: skip
    """The outputs of a block's branches of h (M, d): attention's, without its bias, and Mamba's, (M, d) each.

    Parameters, none of a branch that is not there:
      attention   qkv weight and bias, out weight
      mamba       in_proj weight, conv weight and bias, x_proj weight, dt_proj weight and bias, A_log, D, out_proj
                  weight
      low         in h's dtype: the stack of qkv and in_proj; attention's out; Mamba's x_proj, dt_proj, out_proj, and A
    -> the outputs, the product with the stack, and what backward needs of each branch: o; x' (after the convolution),
    selected, dt, y.
    """
    projected = h @ low[0].t()
    qkv, x, z = _columns(projected, attention, batch)

    def attend() -> list[Tensor]:
        o = attending.forward(qkv, attention[1], heads, drop, seed).flatten(0, 1)
        return [o @ low[1].t(), o]

    def scan() -> list[Tensor]:
        _, conv_weight, conv_bias, _, _, bias, _, D, _ = mamba
        x_proj, dt_proj, out_proj, A = low[-4:]
        u = scanning.conv_forward(x, conv_weight, conv_bias, 0)
        selected = u.flatten(0, 1) @ x_proj.t()
        delta, BC = _selection(selected, dt_proj.shape[1], batch)
        dt = delta @ dt_proj.t()
        B, C = BC.chunk(2, dim=-1)
        y, _ = scanning.scan_forward(u, dt.view(u.shape), bias, A, B, C, D, z, None, False)
        y = y.flatten(0, 1)
        return [y @ out_proj.t(), u.flatten(0, 1), selected, dt, y]

    one, two = _either(attend if attention else None, scan if mamba else None, h.device)
    return [*one[:1], *two[:1], projected, *one[1:], *two[1:]]


@branches.register_fake
def _(
    h: Tensor, attention: list[Tensor], mamba: list[Tensor], low: list[Tensor], seed: Tensor, batch: int, heads: int,
    drop: float,
) -> list[Tensor]:  # fmt: skip
    rows, dim = h.shape
    outputs = [h.new_empty(rows, dim) for _ in range(bool(attention) + bool(mamba))]
    kept = [len(low[0])]
    if attention:
        kept += [dim]
    if mamba:
        inner = len(mamba[7])
        kept += [inner, len(mamba[3]), inner, inner]
    return [*outputs, *(h.new_empty(rows, width) for width in kept)]


@torch.library.custom_op("qhyer::branches_backward", mutates_args=())
def branches_backward(
    grads: list[Tensor], h: Tensor, attention: list[Tensor], mamba: list[Tensor], low: list[Tensor], kept: list[Tensor],
    seed: Tensor, batch: int, heads: int, drop: float,
) -> list[Tensor]:  # fmt: skip
    """-> gradients: of h and the stack; of attention's bias and out weight; of Mamba's [conv weight; bias] in a row,
    x_proj and dt_proj weights, [dt_proj bias; D] (2, E), A_log and out_proj weight. But for h's they are put aside."""
    projected = kept[0]
    dprojected = torch.empty_like(projected)
    qkv, x, z = _columns(projected, attention, batch)
    dqkv, dx, dz = _columns(dprojected, attention, batch)

    def attend() -> list[Tensor]:
        grad, o = grads[0], kept[1]
        do = (grad @ low[1]).view(batch, -1, o.shape[1])
        dbias = attending.backward(qkv, attention[1], heads, drop, seed, do, dqkv, aside)
        return [dbias, _weight(grad, o, attention[2])]

    def scan() -> list[Tensor]:
        _, conv_weight, conv_bias, *of, bias, A_log, D, of_out = mamba
        x_proj, dt_proj, out_proj, A = low[-4:]
        grad, (u, selected, dt, y) = grads[-1], kept[-4:]
        rank, inside = dt_proj.shape[1], x.shape
        delta, BC = _selection(selected, rank, batch)
        B, C = BC.chunk(2, dim=-1)
        dselected = torch.empty_like(selected)
        ddelta, dBC = _selection(dselected, rank, batch)
        dy = (grad @ out_proj).view(inside)
        du, ddt, sums, _ = scanning.scan_backward(
            u.view(inside), dt.view(inside), bias, A, B, C, D, z, None, dy, None, dz, dBC, aside
        )
        ddt = ddt.flatten(0, 1)
        torch.mm(ddt, dt_proj, out=ddelta)
        du.view(-1, inside[-1]).addmm_(dselected, x_proj)  # u is read by x_proj and by the scan
        dconv = scanning.conv_backward(x, conv_weight, conv_bias, du, 0, dx, aside)
        dA, dvector = scanning.of_parameters(sums, inside[-1])
        dA_log = aside(lambda: torch.mul(dA, A, out=torch.empty_like(A)), [dA, A], A_log)
        weights = (_weight(*each) for each in ((dselected, u, of[0]), (ddt, delta, of[1]), (grad, y, of_out)))
        dx_proj, ddt_proj, dout = weights
        return [dconv, dx_proj, ddt_proj, dvector, dA_log, dout]

    one, two = _either(attend if attention else None, scan if mamba else None, h.device)
    return [dprojected @ low[0], _weight(dprojected, h, (attention or mamba)[0]), *one, *two]


@branches_backward.register_fake
def _(
    grads: list[Tensor], h: Tensor, attention: list[Tensor], mamba: list[Tensor], low: list[Tensor], kept: list[Tensor],
    seed: Tensor, batch: int, heads: int, drop: float,
) -> list[Tensor]:  # fmt: skip
    def full(*shape: int) -> Tensor:
        return h.new_empty(shape, dtype=torch.float32)

    found = [h.new_empty(h.shape), full(*low[0].shape)]
    if attention:
        found += [full(*attention[1].shape), full(*attention[2].shape)]
    if mamba:
        _, conv, _, x_proj, dt_proj, _, A_log, D, out_proj = mamba
        convolution = (conv.numel() + len(D),)
        shapes = [convolution, x_proj.shape, dt_proj.shape, (2, len(D)), A_log.shape, out_proj.shape]
        found += [full(*shape) for shape in shapes]
    return found


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    h, attention, mamba, low, seed, ctx.batch, ctx.heads, ctx.drop = inputs
    ctx.counts = [len(attention), len(mamba), len(low)]
    kept = output[bool(attention) + bool(mamba) :]
    ctx.save_for_backward(h, seed, *attention, *mamba, *low, *kept)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    h, seed, *saved = ctx.saved_tensors
    groups = []
    for count in ctx.counts:
        groups.append(saved[:count])
        saved = saved[count:]
    attention, mamba, low = groups
    # The gradients of the outputs alone: nobody else sees what was kept.
    given = [torch.zeros_like(h) if g is None else g for g in grads[: bool(attention) + bool(mamba)]]
    found = branches_backward(given, h, attention, mamba, low, saved, seed, ctx.batch, ctx.heads, ctx.drop)
    dh, dstack, *rest = found
    packed = len(attention[0]) if attention else 0
    dattention, dmamba = [], []
    if attention:
        dbias, dout = rest[:2]
        dattention = [dstack[:packed], dbias, dout]
    if mamba:
        dconv, dx_proj, ddt_proj, dvector, dA_log, dout_proj = rest[-6:]
        dmamba = [
            dstack[packed:], *scanning.of_conv(dconv, mamba[1]), dx_proj, ddt_proj, dvector[0], dA_log, dvector[1],
            dout_proj,
        ]  # fmt: skip
    return dh, dattention, dmamba, [None] * len(low), None, None, None, None


branches.register_autograd(_backward, setup_context=_setup)


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
        second = [
            mamba.in_proj.weight, mamba.conv_weight, mamba.conv_bias, mamba.x_proj.weight, mamba.dt_proj.weight,
            mamba.dt_proj.bias, mamba.A_log, mamba.D, mamba.out_proj.weight,
        ]  # fmt: skip
        products = (mamba.x_proj, mamba.dt_proj, mamba.out_proj)
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
    seeds = torch.randint(2**31 - 1, (len(blocks), 3, 1), device=x.device)

    def join(
        x: Tensor, y: Tensor | None, bias: Tensor | None, other: Tensor | None, alpha: Tensor | None,
        norm: nn.LayerNorm, gate: nn.Linear | None, seed: Tensor, read: tuple[int, int, int] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        return seam(
            x, y, bias, other, alpha, norm.weight, norm.bias, None if gate is None else gate.weight,
            None if gate is None else gate.bias, drop, seed, norm.eps, dtype, read,
        )  # fmt: skip

    x = x.reshape(-1, dim).float()
    _, h, alpha = join(x, None, None, None, None, blocks[0].norm, blocks[0].gate, seeds[0, 0])
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
