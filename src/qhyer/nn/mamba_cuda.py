"""The selective scan of `mamba_triton.py` as CUDA C++ (`mamba_scan.cu`), compiled at run time: the same formulas, laid
out by hand, in three quarters to four fifths of the time.

It serves the usual case: no state carried in or out, channels in multiples of 64, up to 16 states, float32 or bfloat16.
`suits` says whether, and Triton's kernels do the rest.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from qhyer.nn import nvrtc
from qhyer.nn.total_triton import total
from qhyer.streams import Put, at_once

FILE = "mamba_scan.cu"
TYPES = {torch.float32: "float", torch.bfloat16: "bf16"}
STATES = (4, 8, 16)
THREADS = 256  # of a block, at most, two channels each
LARGEST = 2**31 - 1
TYPICAL = (*(f"-D{name}_T=bf16" for name in ("X", "DT", "BC", "Z", "DY", "DBC")), "-DN=16", "-DSOFTPLUS=1", "-DGATE=1")


def suits(x: Tensor, A: Tensor, vectors: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> bool:
    """For x and `others` (B, L, ...), A and `vectors` (E,), without a state. QHYER_SCAN=triton says no to all."""
    if not x.is_cuda or torch.version.hip is not None or os.environ.get("QHYER_SCAN") == "triton":
        return False
    _, length, width = x.shape
    channels = width // 2
    fits = x.numel() > 0 and width % 64 == 0 and channels % min(THREADS, channels) == 0 and A.shape[1] in STATES
    for tensor in (A, *vectors):  # A is read four numbers at a time, the others in pairs
        fits = fits and tensor.dtype == torch.float32 and tensor.storage_offset() % 4 == 0 and tensor.stride(-1) == 1
    for tensor in (x, *others):
        batch, row, last = tensor.stride()
        fits = fits and tensor.dtype in TYPES and last == 1 and max(batch, length * max(row, width)) <= LARGEST
        if tensor.shape[2] == width:  # channels are read in pairs
            fits = fits and batch % 2 == row % 2 == tensor.storage_offset() % 2 == 0
    return fits and works(x.device)


def works(device: torch.device) -> bool:
    """Whether it can be compiled; not for GPUs that have no bfloat16."""
    modern = torch.cuda.get_device_capability(device) >= (8, 0)
    return modern and nvrtc.works(nvrtc.source(FILE), TYPICAL, device, "the scan runs as Triton's kernel")


def _kernel(name: str, size: int, softplus: bool, gate: bool, device: torch.device, **tensors: Tensor) -> nvrtc.Kernel:
    types = [f"-D{key}_T={TYPES[tensor.dtype]}" for key, tensor in tensors.items()]
    flags = (f"-DN={size}", f"-DSOFTPLUS={int(softplus)}", f"-DGATE={int(gate)}")
    return nvrtc.load(nvrtc.source(FILE), (*types, *flags), device)[name]


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for tensor in tensors for stride in tensor.stride()[:2]]


def forward(
    x: Tensor, dt: Tensor, bias: Tensor | None, A: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor | None, ends: bool
) -> tuple[Tensor, Tensor]:
    """-> y (B, L, E) and the last state (B, E, N), empty unless it `ends` with it."""
    batch, length, width = x.shape
    y = torch.empty(batch, length, width, device=x.device, dtype=x.dtype)
    last = torch.empty(
        batch if ends else 0, width, A.shape[1], device=x.device, dtype=torch.float32
    )  # empty: no address
    gate = x if z is None else z
    threads = min(THREADS, width // 2)
    softplus = bias is not None
    kernel = _kernel(
        "scan_forward", A.shape[1], softplus, z is not None, x.device, X=x, DT=dt, BC=B, Z=gate, DY=x, DBC=B
    )
    kernel(
        (width // 2 // threads, batch, 1), threads, x, dt, D if bias is None else bias, A.contiguous(), B, C, D, gate,
        y, last, length, width, *_strides(x, dt, B, C, gate),
    )  # fmt: skip
    return y, last


def backward(
    x: Tensor, dt: Tensor, bias: Tensor | None, A: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor | None,
    dy: Tensor, dz: Tensor | None, dBC: Tensor, put: Put = at_once,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Writes dz and d[B; C] (B, L, 2 N), rows anywhere -> dx, ddt and, in a row, dA (E, N) and d[bias; D]."""
    batch, length, width = x.shape
    size = A.shape[1]
    threads = min(THREADS, width // 2)
    blocks = width // 2 // threads

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, device=x.device, dtype=dtype)

    dx, ddt = empty(batch, length, width, dtype=x.dtype), empty(batch, length, width, dtype=dt.dtype)
    dparameter = empty(batch, (size + 2) * width)
    parts = dBC[None] if blocks == 1 else empty(blocks, batch, length, 2 * size)  # one block has all channels: no parts
    gate, dgate = (x, dx) if z is None or dz is None else (z, dz)
    softplus = bias is not None
    kernel = _kernel(
        "scan_backward", size, softplus, z is not None, x.device, X=x, DT=dt, BC=B, Z=gate, DY=dy, DBC=parts
    )
    kernel(
        (blocks, batch, 1), threads, x, dt, D if bias is None else bias, A.contiguous(), B, C, D, gate, dy,
        dx, ddt, dgate, parts, dparameter, empty(batch, length, width), length, width, batch,
        *_strides(x, dt, B, C, gate, dy, dgate, parts[0]),
    )  # fmt: skip
    if blocks > 1:
        total(parts, dBC)
    return dx, ddt, put(lambda: total(dparameter), [dparameter], D)
