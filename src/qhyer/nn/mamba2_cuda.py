"""The scan of `mamba2_triton.py` as CUDA C++ (`mamba2_scan.cu`), compiled at run time: the same formulas, laid out by
hand.

It serves the usual case: bfloat16, heads of 64 channels, 16 states. `suits` says whether, and Triton's kernels do the
rest.
"""

from __future__ import annotations

import math
import os

import torch
from torch import Tensor

from qhyer.nn import nvrtc

FILE = "mamba2_scan.cu"
WIDTH, STATES = 64, 16
WARPS = 8  # at most, of sixteen steps each
CHUNK = 8  # numbers, which are read and written at once
FORWARD, BACKWARD = 24, 16  # warps of a multiprocessor: as many as registers allow
LARGEST = 2**31 - 1
SEQUENCES = 65_535  # blocks of a grid in its second dimension


def suits(steps: tuple[Tensor, ...], vectors: tuple[Tensor, ...], rows: tuple[Tensor, ...]) -> bool:
    """Whether the kernels do it: `steps` are dt and its gradient (B, L, H), `vectors` bias, A and D (H,), `rows` u and
    what is as wide as z (B, L, E), z last. QHYER_SCAN=triton says no to all."""
    z = rows[-1]
    if not z.is_cuda or torch.version.hip is not None or os.environ.get("QHYER_SCAN") == "triton":
        return False
    return fits(steps, vectors, rows) and works(z.device, z.shape[1])


def fits(steps: tuple[Tensor, ...], vectors: tuple[Tensor, ...], rows: tuple[Tensor, ...]) -> bool:
    """Whether the kernels can read and write these: their sizes, types and places, wherever they lie."""
    (batch, length, width), heads = rows[-1].shape, len(vectors[-1])
    found = 0 < batch <= SEQUENCES and 0 < length <= 16 * WARPS
    found = found and width == WIDTH * heads and rows[0].shape[2] == width + 2 * STATES
    for tensor in vectors:
        found = found and tensor.dtype == torch.float32 and (heads == 1 or tensor.stride(0) == 1)
    for tensor in (*steps, *rows):
        *apart, last = tensor.stride()
        found = found and tensor.dtype == torch.bfloat16 and (last == 1 or tensor.shape[2] == 1)
        found = found and max(apart[0], length * apart[1]) <= LARGEST
    for tensor in rows:
        found = found and not any(number % CHUNK for number in (*tensor.stride()[:2], tensor.storage_offset()))
    return found


def works(device: torch.device, length: int = 64) -> bool:
    """Whether it can be compiled; not for GPUs that have no bfloat16."""
    modern = torch.cuda.get_device_capability(device) >= (8, 0)
    return modern and nvrtc.works(nvrtc.source(FILE), options(length), device, "Mamba-2's scan runs as Triton's kernel")


def _shared(length: int) -> tuple[int, int]:
    """Bytes forward and backward: the structures of the kernels."""
    warps = math.ceil(length / 16)
    seen = 16 * warps * (2 * (WIDTH + 8) + 2 * 2 * (STATES + 8) + 2 * 4)
    return seen, seen + 16 * warps * (2 * (WIDTH + 8) + 2 * 4) + -(-4 * warps // 16) * 16


def options(length: int) -> tuple[str, ...]:
    warps = math.ceil(length / 16)
    numbers = {
        "WARPS": warps, "FORWARD_BLOCKS": FORWARD // warps, "BACKWARD_BLOCKS": BACKWARD // warps,
        "SHARED_BYTES": max(_shared(length)),
    }  # fmt: skip
    return tuple(f"-D{name}={value}" for name, value in numbers.items())


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for tensor in tensors for stride in tensor.stride()[:2]]


def forward(u: Tensor, dt: Tensor, bias: Tensor, A: Tensor, D: Tensor, z: Tensor, y: Tensor) -> None:
    """Writes y (B, L, E)."""
    batch, length, _ = z.shape
    kernel = nvrtc.load(nvrtc.source(FILE), options(length), u.device)["head_scan_forward"]
    kernel(
        (len(D), batch, 1), 32 * math.ceil(length / 16), u, dt, bias, A, D, z, y, length, len(D), *_strides(u, dt, z),
        shared=_shared(length)[0],
    )  # fmt: skip


def backward(
    u: Tensor, dt: Tensor, bias: Tensor, A: Tensor, D: Tensor, z: Tensor, dy: Tensor, du: Tensor, dz: Tensor,
    ddt: Tensor, parts: Tensor, dparameter: Tensor,
) -> None:  # fmt: skip
    """Writes du of x, dz and ddt, and the parts (H, B, L, 2 N) and (B, 3, H) of what is yet to be added up."""
    batch, length, _ = z.shape
    kernel = nvrtc.load(nvrtc.source(FILE), options(length), u.device)["head_scan_backward"]
    kernel(
        (len(D), batch, 1), 32 * math.ceil(length / 16), u, dt, bias, A, D, z, dy, du, dz, ddt, parts, dparameter,
        length, len(D), batch, *_strides(u, dt, z, dy, du, dz, ddt), shared=_shared(length)[1],
    )  # fmt: skip
