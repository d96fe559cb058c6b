"""A block's branches as one operation, with a backward written out.

Queries, keys, values and all that Mamba makes of its input are columns of one product; their gradients are written into
columns of one matrix, so that the gradient of h, and that of the stacked weights, is one product, too. Where a tensor
has two readers, the second gradient is accumulated by the product that makes it. Autograd would add, join and cast
instead, each time in a pass over memory.

Attention and the two kinds of Mamba each say which columns are theirs, what they make of them, and what backward needs
for it (`Mixer`); which Mamba it is, the number of its parameters tells. Importing qhyer does not import this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from qhyer.nn import attention_triton as attending
from qhyer.nn import mamba2_triton as heads_scanning
from qhyer.nn import mamba_triton as scanning
from qhyer.nn.products_triton import weight_gradient
from qhyer.streams import aside, fork

Branch = Callable[[], list[Tensor]]
ALIGNED = 8  # numbers: rows of a product at multiples of so many are what matrix units read at full speed


def put_weight(grad: Tensor, x: Tensor, of: Tensor) -> Tensor:
    """A weight's gradient, put aside."""
    return aside(lambda: weight_gradient(grad, x), (grad, x), of)


class Mixer(Protocol):
    """A kind of Mamba, whose parameters begin with the weight of its columns and end with that of its output; `low`
    are its other matrices in the products' dtype, and A.

    The gradients that backward returns lie as the kernels leave them; `assign` gives each parameter its own.
    """

    PARAMETERS: int

    @staticmethod
    def columns(parameters: list[Tensor]) -> list[int]: ...

    @staticmethod
    def forward(columns: list[Tensor], parameters: list[Tensor], low: list[Tensor]) -> list[Tensor]:
        """-> the output (M, d), and what backward needs (M, .)."""

    @staticmethod
    def kept(parameters: list[Tensor]) -> list[int]:
        """The widths of these."""

    @staticmethod
    def backward(
        grad: Tensor,
        columns: list[Tensor],
        into: list[Tensor],
        kept: list[Tensor],
        parameters: list[Tensor],
        low: list[Tensor],
    ) -> list[Tensor]:
        """Writes the columns' gradients, and returns those of the parameters but the first, put aside."""

    @staticmethod
    def shapes(parameters: list[Tensor]) -> list[tuple[int, ...]]:
        """Of these gradients, all float32."""

    @staticmethod
    def assign(found: list[Tensor], parameters: list[Tensor]) -> list[Tensor]:
        """The gradient of each parameter but the first."""


class Selective:
    """`Mamba`. Parameters: in_proj weight, conv weight and bias, x_proj weight, dt_proj weight and bias, A_log, D,
    out_proj weight. Low: x_proj, dt_proj, out_proj, A. Kept: x' (after the convolution), selected, dt, y."""

    PARAMETERS = 9

    @staticmethod
    def columns(parameters: list[Tensor]) -> list[int]:
        inner = len(parameters[7])
        return [inner, inner]  # x, z

    @staticmethod
    def _selection(selected: Tensor, rank: int, batch: int) -> tuple[Tensor, Tensor]:
        """(M, R + 2 N) -> delta (M, R) and [B; C] (B, L, 2 N), where they lie."""
        return selected[:, :rank], selected.view(batch, -1, selected.shape[1])[..., rank:]

    @staticmethod
    def forward(columns: list[Tensor], parameters: list[Tensor], low: list[Tensor]) -> list[Tensor]:
        x, z = columns
        _, conv_weight, conv_bias, _, _, bias, _, D, _ = parameters
        x_proj, dt_proj, out_proj, A = low
        u = scanning.conv_forward(x, conv_weight, conv_bias, 0)
        selected = u.flatten(0, 1) @ x_proj.t()
        delta, BC = Selective._selection(selected, dt_proj.shape[1], len(x))
        dt = delta @ dt_proj.t()
        B, C = BC.chunk(2, dim=-1)
        y, _ = scanning.scan_forward(u, dt.view(u.shape), bias, A, B, C, D, z, None, False)
        y = y.flatten(0, 1)
        return [y @ out_proj.t(), u.flatten(0, 1), selected, dt, y]

    @staticmethod
    def kept(parameters: list[Tensor]) -> list[int]:
        inner = len(parameters[7])
        return [inner, len(parameters[3]), inner, inner]

    @staticmethod
    def backward(
        grad: Tensor,
        columns: list[Tensor],
        into: list[Tensor],
        kept: list[Tensor],
        parameters: list[Tensor],
        low: list[Tensor],
    ) -> list[Tensor]:
        """-> [conv weight; bias] in a row, x_proj and dt_proj weights, [dt_proj bias; D] (2, E), A_log, out_proj."""
        x, z = columns
        dx, dz = into
        _, conv_weight, conv_bias, *of, bias, A_log, D, of_out = parameters
        x_proj, dt_proj, out_proj, A = low
        u, selected, dt, y = kept
        rank, inside = dt_proj.shape[1], x.shape
        delta, BC = Selective._selection(selected, rank, len(x))
        B, C = BC.chunk(2, dim=-1)
        dselected = torch.empty_like(selected)
        ddelta, dBC = Selective._selection(dselected, rank, len(x))
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
        weights = (put_weight(*each) for each in ((dselected, u, of[0]), (ddt, delta, of[1]), (grad, y, of_out)))
        dx_proj, ddt_proj, dout = weights
        return [dconv, dx_proj, ddt_proj, dvector, dA_log, dout]

    @staticmethod
    def shapes(parameters: list[Tensor]) -> list[tuple[int, ...]]:
        _, conv, _, x_proj, dt_proj, _, A_log, D, out_proj = parameters
        convolution = (conv.numel() + len(D),)
        return [convolution, x_proj.shape, dt_proj.shape, (2, len(D)), A_log.shape, out_proj.shape]

    @staticmethod
    def assign(found: list[Tensor], parameters: list[Tensor]) -> list[Tensor]:
        dconv, dx_proj, ddt_proj, dvector, dA_log, dout = found
        conv = scanning.of_conv(dconv, parameters[1])
        return [*conv, dx_proj, ddt_proj, dvector[0], dA_log, dvector[1], dout]


class Heads:
    """`Mamba2`. Parameters: in_proj weight, conv weight and bias, dt_bias, A_log, D, out_proj weight. Low: out_proj, A.
    Kept: x', B' and C' (after the convolution), y."""

    PARAMETERS = 7

    @staticmethod
    def columns(parameters: list[Tensor]) -> list[int]:
        _, conv_weight, _, _, _, D, out = parameters
        return [len(conv_weight), out.shape[1], len(D)]  # x, B and C; z; dt

    @staticmethod
    def forward(columns: list[Tensor], parameters: list[Tensor], low: list[Tensor]) -> list[Tensor]:
        mixed, z, dt = columns
        _, conv_weight, conv_bias, bias, _, D, _ = parameters
        out, A = low
        u = scanning.conv_forward(mixed, conv_weight, conv_bias, 0)
        y = heads_scanning.forward(u, dt, bias, A, D, z).flatten(0, 1)
        return [y @ out.t(), u.flatten(0, 1), y]

    @staticmethod
    def kept(parameters: list[Tensor]) -> list[int]:
        return [len(parameters[1]), parameters[6].shape[1]]

    @staticmethod
    def backward(
        grad: Tensor,
        columns: list[Tensor],
        into: list[Tensor],
        kept: list[Tensor],
        parameters: list[Tensor],
        low: list[Tensor],
    ) -> list[Tensor]:
        """-> [conv weight; bias] in a row, [dt_bias; A_log; D] (3, H), out_proj."""
        mixed, z, dt = columns
        dmixed, dz, ddt = into
        _, conv_weight, conv_bias, bias, _, D, of_out = parameters
        out, A = low
        u, y = kept
        dy = (grad @ out).view(z.shape)
        du, sums = heads_scanning.backward(u.view(mixed.shape), dt, bias, A, D, z, dy, dz, ddt, aside)
        dconv = scanning.conv_backward(mixed, conv_weight, conv_bias, du, 0, dmixed, aside)
        return [dconv, sums, put_weight(grad, y, of_out)]

    @staticmethod
    def shapes(parameters: list[Tensor]) -> list[tuple[int, ...]]:
        _, conv, conv_bias, _, _, D, out = parameters
        return [(conv.numel() + len(conv_bias),), (3, len(D)), out.shape]

    @staticmethod
    def assign(found: list[Tensor], parameters: list[Tensor]) -> list[Tensor]:
        dconv, (dbias, dA_log, dD), dout = found
        return [*scanning.of_conv(dconv, parameters[1]), dbias, dA_log, dD, dout]


MIXERS: dict[int, Mixer] = {each.PARAMETERS: each for each in (Selective, Heads)}


# ------------------------------------------------------------------------------------------------- the operation


def widths(attention: list[Tensor], mamba: list[Tensor]) -> list[int]:
    """Of the columns of each branch that is there, attention's first."""
    return [*([len(attention[0])] if attention else []), *(MIXERS[len(mamba)].columns(mamba) if mamba else [])]


def _columns(
    projected: Tensor, attention: list[Tensor], mamba: list[Tensor], batch: int
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """(M, .) -> attention's column [qkv], Mamba's, each (B, L, .), and what lies beyond them to fill a row."""
    sizes = widths(attention, mamba)
    rows = projected.view(batch, -1, projected.shape[1])
    *found, spare = rows.split([*sizes, rows.shape[2] - sum(sizes)], dim=-1)
    first = 1 if attention else 0
    return found[:first], found[first:], spare


def _either(attend: Branch | None, scan: Branch | None, device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
    """The branches that are there, side by side where there are two; nothing of one that is not. The scan's, which
    takes longer, is begun first: what comes first in a graph is begun at once, what comes second some us later."""
    if attend is None or scan is None:
        return attend() if attend else [], scan() if scan else []
    two, one = fork("branches", scan, attend, device)
    return one, two


@torch.library.custom_op("qhyer::branches", mutates_args=())
def branches(
    h: Tensor, attention: list[Tensor], mamba: list[Tensor], low: list[Tensor], seed: Tensor, batch: int, heads: int,
    drop: float,
) -> list[Tensor]:  # fmt: skip
    """The outputs of a block's branches of h (M, d): attention's, without its bias, and Mamba's, (M, d) each.

    Parameters, none of a branch that is not there:
      attention   qkv weight and bias, out weight
      mamba       as its `Mixer` has them
      low         in h's dtype: the stack of qkv and in_proj; attention's out; Mamba's other matrices, and A
    -> the outputs, the product with the stack, and what backward needs of each branch; attention's: o.
    """
    projected = h @ low[0].t()
    packed, columns, _ = _columns(projected, attention, mamba, batch)

    def attend() -> list[Tensor]:
        o = attending.forward(packed[0], attention[1], heads, drop, seed).flatten(0, 1)
        return [o @ low[1].t(), o]

    def scan() -> list[Tensor]:
        return MIXERS[len(mamba)].forward(columns, mamba, _own(low, attention))

    one, two = _either(attend if attention else None, scan if mamba else None, h.device)
    return [*one[:1], *two[:1], projected, *one[1:], *two[1:]]


def _own(low: list[Tensor], attention: list[Tensor]) -> list[Tensor]:
    """Mamba's: after the stack and attention's."""
    return low[2:] if attention else low[1:]


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
        kept += MIXERS[len(mamba)].kept(mamba)
    return [*outputs, *(h.new_empty(rows, width) for width in kept)]


@torch.library.custom_op("qhyer::branches_backward", mutates_args=())
def branches_backward(
    grads: list[Tensor], h: Tensor, attention: list[Tensor], mamba: list[Tensor], low: list[Tensor], kept: list[Tensor],
    seed: Tensor, batch: int, heads: int, drop: float,
) -> list[Tensor]:  # fmt: skip
    """-> gradients: of h and the stack; of attention's bias and out weight; of Mamba's parameters but the first, as its
    `Mixer` has them. But for h's they are put aside."""
    projected, *others = kept
    dprojected = torch.empty_like(projected)
    packed, columns, _ = _columns(projected, attention, mamba, batch)
    dpacked, dcolumns, spare = _columns(dprojected, attention, mamba, batch)
    if spare.shape[-1]:
        spare.zero_()

    def attend() -> list[Tensor]:
        grad, o = grads[0], others[0]
        do = (grad @ low[1]).view(batch, -1, o.shape[1])
        dbias = attending.backward(packed[0], attention[1], heads, drop, seed, do, dpacked[0], aside)
        return [dbias, put_weight(grad, o, attention[2])]

    def scan() -> list[Tensor]:
        mine = others[1:] if attention else others
        return MIXERS[len(mamba)].backward(grads[-1], columns, dcolumns, mine, mamba, _own(low, attention))

    one, two = _either(attend if attention else None, scan if mamba else None, h.device)
    return [dprojected @ low[0], put_weight(dprojected, h, (attention or mamba)[0]), *one, *two]


@branches_backward.register_fake
def _(
    grads: list[Tensor], h: Tensor, attention: list[Tensor], mamba: list[Tensor], low: list[Tensor], kept: list[Tensor],
    seed: Tensor, batch: int, heads: int, drop: float,
) -> list[Tensor]:  # fmt: skip
    shapes: list[tuple[int, ...]] = [low[0].shape]
    if attention:
        shapes += [attention[1].shape, attention[2].shape]
    if mamba:
        shapes += MIXERS[len(mamba)].shapes(mamba)
    return [h.new_empty(h.shape), *(h.new_empty(shape, dtype=torch.float32) for shape in shapes)]


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
    dattention, dmamba, begin = [], [], 0
    if attention:
        dbias, dout, *rest = rest
        begin = len(attention[0])
        dattention = [dstack[:begin], dbias, dout]
    if mamba:
        dmamba = [dstack[begin : begin + len(mamba[0])], *MIXERS[len(mamba)].assign(rest, mamba)]
    return dh, dattention, dmamba, [None] * len(low), None, None, None, None


branches.register_autograd(_backward, setup_context=_setup)
