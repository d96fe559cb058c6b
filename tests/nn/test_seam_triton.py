"""The fused kernels between matrix products against plain torch; without a GPU, in Triton's interpreter."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from qhyer.nn import seam_triton as seam_module
from qhyer.nn.seam_triton import bias_gelu, column_sum, seam

device = "cuda" if torch.cuda.is_available() else "cpu"
ROUNDING = 2**-8 if device == "cuda" else 2**-7  # of bfloat16: the interpreter cuts off where a GPU rounds
SIZES = [(1, 16), (7, 100), (33, 48), (7, 64)]


def lower(h: Tensor, dtype: torch.dtype) -> Tensor:
    """h in `dtype`, as kernels write it here: the interpreter cuts bfloat16 off."""
    if device == "cpu" and dtype == torch.bfloat16:
        h = h + ((h.detach().view(torch.int32) & -(2**16)).view(torch.float32) - h).detach()
    return h.to(dtype)


def seam_ref(x, y, y_bias, y2, alpha, norm_weight, norm_bias, gate_weight, gate_bias, eps, out_dtype, keep=None):
    """The seam in plain torch; `keep` is what dropout multiplies r by."""
    if y is not None:
        r = y.float() if y_bias is None else y.float() + y_bias
        if y2 is not None:
            r = alpha[..., None] * r + (1.0 - alpha[..., None]) * y2.float()
        x = (x + (r if keep is None else r * keep)).to(x.dtype)
    h = lower(F.layer_norm(x.float(), x.shape[-1:], norm_weight, norm_bias, eps), out_dtype)
    gated = None if gate_weight is None else torch.sigmoid(h.float() @ gate_weight.flatten() + gate_bias)
    return x, h, gated


def arguments(rows: int, width: int, pieces: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor | None]:
    """Random inputs; `pieces` names the optional ones: y, bias, mix, gate."""
    generator = torch.Generator().manual_seed(rows * width)

    def draw(*shape: int, kind: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, kind).requires_grad_()

    def optional(piece: str, *shape: int, kind: torch.dtype = torch.float32) -> Tensor | None:
        value = draw(*shape, kind=kind)
        return value if piece in pieces else None

    alpha = torch.rand(rows, generator=generator).to(device).requires_grad_()
    return dict(
        x=draw(rows, width),
        y=optional("y", rows, width, kind=dtype),
        y_bias=optional("bias", width),
        y2=optional("mix", rows, width, kind=dtype),
        alpha=alpha if "mix" in pieces else None,
        norm_weight=draw(width),
        norm_bias=draw(width),
        gate_weight=optional("gate", 1, width),
        gate_bias=optional("gate", 1),
    )


def gradients(outputs, inputs: dict[str, Tensor | None], used: str = "x h alpha") -> dict[str, Tensor | None]:
    """Of a random projection of the outputs used, by every input there is."""
    generator = torch.Generator().manual_seed(5)
    loss = torch.zeros((), device=device)
    for name, output in zip(("x", "h", "alpha"), outputs):
        if output is not None:
            direction = torch.randn(output.shape, generator=generator).to(device)
            if name in used.split():
                loss = loss + (direction * output.float()).sum()
    there = [name for name, value in inputs.items() if value is not None]
    return dict(zip(there, torch.autograd.grad(loss, [inputs[name] for name in there], allow_unused=True)))


def close(ours: Tensor, theirs: Tensor, tolerance: float) -> bool:
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    ours, theirs = ours.double(), theirs.double()
    return bool((ours - theirs).abs().max() <= tolerance * theirs.abs().max().clamp_min(1.0))


@contextmanager
def soiled():
    """What is allocated and not written is not a number."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def rows_read(rows: int, read: tuple[int, int, int]) -> list[int]:
    length, per_step, first = read
    return [row for row in range(rows) if row % length % per_step < first]


def check_read(inputs, read: tuple[int, int, int], drop: float = 0.0, tolerance: float = 1e-5) -> None:
    """The seam of some rows, against plain torch of all rows, of whose results these are taken."""
    seed = torch.tensor([77], device=device)
    settings = dict(drop=drop, seed=seed, eps=1e-5, out_dtype=torch.float32)
    taken = rows_read(len(inputs["x"]), read)
    ones = dict.fromkeys(inputs) | {name: inputs[name] for name in ("norm_weight", "norm_bias")}
    ones |= {"x": torch.zeros_like(inputs["x"]), "y": torch.ones_like(inputs["x"])}
    keep = seam(**ones, **settings)[0].detach()  # what r is multiplied by
    assert bool((keep == 0).any()) == (drop > 0)
    with soiled():
        ours = seam(**inputs, **settings, read=read)
        found = gradients(ours, inputs)
    full = seam(**inputs, **settings)
    theirs = [None if t is None else t[taken] for t in seam_ref(**inputs, eps=1e-5, out_dtype=torch.float32, keep=keep)]
    for a, whole, b in zip(ours, full, theirs):
        assert (a is None) == (b is None)
        assert a is None or (torch.equal(a, whole[taken]) and close(a, b, tolerance))
    for name, expected in gradients(theirs, inputs).items():
        assert close(found[name], expected, tolerance), name
        if name in ("x", "y", "y2", "alpha"):
            others = [row for row in range(len(expected)) if row not in taken]
            assert not found[name][others].any(), name


# Windows, and (L, P, R): one step and more, with the last action and without; more than one row left out in a step.
READS = [
    (3, (2, 3, 2)), (2, (3, 3, 2)), (3, (11, 3, 2)), (2, (9, 3, 2)), (1, (1, 2, 1)), (3, (7, 2, 1)), (2, (8, 2, 1)),
    (2, (11, 4, 3)), (2, (9, 4, 1)), (2, (11, 4, 1)), (2, (12, 4, 1)),
]  # fmt: skip


@pytest.mark.parametrize("windows, read", READS)
def test_seam_of_the_rows_that_are_read(windows, read, monkeypatch):
    monkeypatch.setattr(seam_module, "SEAM_WARPS", 3)
    for pieces in ("y", "y bias mix"):
        check_read(arguments(windows * read[0], 48, pieces), read)


@pytest.mark.parametrize("pieces", ["y bias", "y mix", "y bias mix gate"])
@pytest.mark.parametrize("width", [16, 100, 260])
def test_dropout_of_the_rows_that_are_read(width, pieces, monkeypatch):
    monkeypatch.setattr(seam_module, "SEAM_WARPS", 3)
    check_read(arguments(33, width, pieces), (11, 3, 2), drop=0.3)


def check(inputs, used: str = "x h alpha", tolerance: float = 1e-5, out_dtype: torch.dtype = torch.float32) -> None:
    ours = seam(**inputs, drop=0.0, seed=None, eps=1e-5, out_dtype=out_dtype)
    theirs = seam_ref(**inputs, eps=1e-5, out_dtype=out_dtype)
    for a, b in zip(ours, theirs):
        assert (a is None) == (b is None)
        assert a is None or close(a, b, tolerance)
    expected = gradients(theirs, inputs, used)
    for name, gradient in gradients(ours, inputs, used).items():
        theirs_by_name = expected[name]
        if theirs_by_name is None:  # nothing that was used depends on it
            assert gradient is None or not gradient.any(), name
        else:
            assert gradient is not None and close(gradient, theirs_by_name, tolerance), name


@pytest.mark.parametrize("pieces", ["", "gate", "y", "y bias", "y bias gate", "y mix", "y bias mix", "y bias mix gate"])
@pytest.mark.parametrize("rows, width", SIZES)
def test_seam_equals_plain_torch(rows, width, pieces):
    check(arguments(rows, width, pieces))


@pytest.mark.parametrize("used", ["x", "h", "alpha", "x h", "x alpha"])
@pytest.mark.parametrize("pieces", ["gate", "y bias mix gate"])
def test_seam_when_only_some_outputs_are_used(used, pieces):
    check(arguments(7, 48, pieces), used)


def test_a_seam_without_y_takes_both_gradients_of_x():
    """The one of x, which goes on, and that of h: autograd has nothing to add."""
    inputs = arguments(7, 48, "gate")
    x, h, alpha = seam(**inputs, drop=0.0, seed=None, eps=1e-5, out_dtype=torch.float32)
    assert x.data_ptr() == inputs["x"].data_ptr()
    assert x.grad_fn is not None and x.grad_fn is h.grad_fn is alpha.grad_fn


@pytest.mark.parametrize("pieces", ["gate", "y bias", "y bias mix gate"])
def test_seam_in_bfloat16(pieces):
    check(arguments(7, 48, pieces, torch.bfloat16), tolerance=ROUNDING, out_dtype=torch.bfloat16)


def test_seam_walks_through_many_rows(monkeypatch):
    """Programs of more than one step, the last not full, and a width of several warps."""
    monkeypatch.setattr(seam_module, "SEAM_WARPS", 3)
    check(arguments(33, 64, "y bias mix gate"))
    check(arguments(9, 260, "y bias gate"))


def test_seam_takes_leading_dimensions_and_views():
    inputs = arguments(6, 16, "y bias mix gate")
    flat = seam(**inputs, drop=0.0, seed=None, eps=1e-5, out_dtype=torch.float32)
    shaped = {
        k: None if v is None else v.reshape(2, 3, *v.shape[1:]) if v.shape[0] == 6 else v for k, v in inputs.items()
    }
    doubled = torch.cat([shaped["y"], shaped["y2"]], -1)
    shaped["y"], shaped["y2"] = doubled.chunk(2, -1)
    outputs = seam(**shaped, drop=0.0, seed=None, eps=1e-5, out_dtype=torch.float32)
    for a, b in zip(outputs, flat):
        assert a.shape[:2] == (2, 3) and torch.equal(a.flatten(0, 1), b)
    for name, gradient in gradients(outputs, inputs).items():
        assert gradient is not None and gradient.shape == inputs[name].shape, name


@pytest.mark.parametrize("width", [16, 100])
def test_dropout_is_the_same_mask_forward_and_backward(width):
    rows, drop = 64, 0.3
    inputs = arguments(rows, width, "y bias mix gate")
    settings = dict(drop=drop, eps=1e-5, out_dtype=torch.float32)
    seed = torch.tensor([1234567890123], device=device)

    def mask(seed: Tensor) -> Tensor:
        """What r is multiplied by, from r = 1 on x = 0."""
        ones = {**arguments(rows, width, ""), "x": torch.zeros(rows, width, device=device)}
        return seam(**{**ones, "y": torch.ones(rows, width, device=device)}, seed=seed, **settings)[0].detach()

    keep = mask(seed)
    scale = torch.tensor(1 / (1 - drop))
    assert all(torch.isclose(value, scale) or value == 0.0 for value in keep.unique().cpu())
    count = rows * width
    for values in (keep, keep[:, : width // 2], keep[: rows // 2]):
        rate = (values == 0).double().mean().item()
        assert abs(rate - drop) < 5 * (drop * (1 - drop) / values.numel()) ** 0.5
    other = mask(seed + 1)
    both = ((keep == 0) & (other == 0)).double().mean().item()
    assert abs(both - drop**2) < 5 * (drop**2 * (1 - drop**2) / count) ** 0.5  # independent
    assert torch.equal(keep, mask(seed.clone()))

    ours = seam(**inputs, seed=seed, **settings)
    theirs = seam_ref(**inputs, eps=1e-5, out_dtype=torch.float32, keep=keep)
    assert all(close(a, b, 1e-5) for a, b in zip(ours, theirs))
    expected = gradients(theirs, inputs)
    for name, gradient in gradients(ours, inputs).items():
        assert close(gradient, expected[name], 1e-5), name


@pytest.mark.parametrize("width", [256, 2048, 4096])
def test_backward_asks_for_no_more_registers_than_there_are(width, monkeypatch):
    asked = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *_, **options: asked.append(32 * options["num_warps"] * options["maxnreg"])

    x = torch.zeros(2, width, device=device, requires_grad=True)
    y = seam(x, None, None, None, None, x[0].detach(), x[0].detach(), None, None, 0.0, None, 1e-5, torch.float32)[1]
    monkeypatch.setattr(seam_module, "_seam_backward_kernel", Kernel())
    y.sum().backward()
    (registers,) = asked
    assert registers <= 65536


def test_bad_arguments():
    inputs = arguments(1, 16, "y")
    with pytest.raises(ValueError, match="seed"):
        seam(**inputs, drop=0.1, seed=None, eps=1e-5, out_dtype=torch.float32)
    with pytest.raises(ValueError, match="go with y"):
        seam(**{**inputs, "y": None, "y2": inputs["y"]}, drop=0.0, seed=None, eps=1e-5, out_dtype=torch.float32)
    inputs = arguments(8, 16, "y")
    for read in ((3, 3, 2), (4, 3, 2), (8, 3, 3), (8, 3, 0)):
        with pytest.raises(ValueError, match="read"):
            seam(**inputs, drop=0.0, seed=None, eps=1e-5, out_dtype=torch.float32, read=read)
    with pytest.raises(ValueError, match="read"):
        seam(**{**inputs, "y": None}, drop=0.0, seed=None, eps=1e-5, out_dtype=torch.float32, read=(8, 3, 2))


@pytest.mark.parametrize("rows, width", [*SIZES, (33, 300)])
def test_bias_gelu_equals_plain_torch(rows, width, monkeypatch):
    monkeypatch.setattr(seam_module, "WARPS", 2)
    u = (2.5 * torch.randn(rows, width)).to(device).requires_grad_()
    bias = torch.randn(width).to(device).requires_grad_()
    direction = torch.randn(rows, width).to(device)
    ours, theirs = bias_gelu(u, bias), F.gelu(u + bias)
    assert close(ours, theirs, 1e-6)
    for a, b in zip(torch.autograd.grad(ours, [u, bias], direction), torch.autograd.grad(theirs, [u, bias], direction)):
        assert close(a, b, 1e-5)


def test_bias_gelu_in_bfloat16():
    u = torch.randn(7, 48).to(device, torch.bfloat16).requires_grad_()
    bias = torch.randn(48).to(device).requires_grad_()
    ours, theirs = bias_gelu(u, bias), F.gelu(u.float() + bias).to(torch.bfloat16)
    assert close(ours, theirs, ROUNDING)
    for a, b in zip(torch.autograd.grad(ours.sum(), [u, bias]), torch.autograd.grad(theirs.sum(), [u, bias])):
        assert close(a, b, ROUNDING)


@pytest.mark.parametrize("rows, width", [*SIZES, (300, 20), (33, 300)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_column_sum(rows, width, dtype, monkeypatch):
    monkeypatch.setattr(seam_module, "WARPS", 2)
    u = torch.randn(rows, 2 * width).to(device, dtype)
    assert close(column_sum(u), u.float().sum(0), 1e-5)
    assert close(column_sum(u[:, :width]), u[:, :width].float().sum(0), 1e-5)  # a slice, as it lies
    assert close(column_sum(u.view(rows, 2, width)), u.float().view(-1, width).sum(0), 1e-5)


def test_same_inputs_same_bits():
    inputs = arguments(33, 48, "y bias mix gate")
    seed = torch.tensor([7], device=device)

    def run() -> list[Tensor]:
        outputs = seam(**inputs, drop=0.1, seed=seed, eps=1e-5, out_dtype=torch.float32)
        activated = bias_gelu(inputs["y"], inputs["y_bias"])
        more = torch.autograd.grad(activated.square().sum(), [inputs["y"], inputs["y_bias"]])
        return [*outputs, *gradients(outputs, inputs).values(), activated, *more, column_sum(inputs["x"])]

    assert all(torch.equal(a, b) for a, b in zip(run(), run()))


def test_operators_are_well_formed():
    """Schemas, fake tensors and autograd registration, as torch itself checks them."""
    x = arguments(3, 16, "y bias mix gate")
    seed = torch.tensor([3], device=device)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for read in ((), (3, 2, 1)):
        values = (*x.values(), 0.1, seed, 1e-5, torch.float32, read)
        torch.library.opcheck(seam_module.seam_forward, values, test_utils=checks)
    plain = arguments(3, 16, "")
    torch.library.opcheck(
        seam_module.seam_forward, (*plain.values(), 0.0, None, 1e-5, torch.float32, ()), test_utils=checks
    )
    torch.library.opcheck(bias_gelu, (x["y"], x["y_bias"]), test_utils=checks)
    torch.library.opcheck(column_sum, (x["x"].detach(),), test_utils=checks)
