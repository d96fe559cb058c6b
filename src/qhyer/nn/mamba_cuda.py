"""The selective scan of `mamba_triton.py` as CUDA C++ (`mamba_scan.cu`), compiled at run time: the same formulas, laid
out by hand, in two thirds to three quarters of the time.

It serves the usual case: no state carried in or out, channels in multiples of 64, up to 16 states, float32 or bfloat16.
`suits` says whether, and Triton's kernels do the rest.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from qhyer.nn import nvrtc
from qhyer.nn.total_triton import total
from qhyer.streams import Put, at_once

FILE = "mamba_scan.cu"
TYPES = {torch.float32: "float", torch.bfloat16: "bf16"}
STATES = (4, 8, 16)
THREADS = 256  # of a block, at most, two channels each
STEPS = 8  # between two meetings of a block
ORDERS = 4  # in which backward has B and C
CHUNK, PAIR = 16, 4  # bytes, in which channels, and B and C, are sent to shared memory
LARGEST = 2**31 - 1
KINDS = ("x", "dt", "BC", "z", "dy", "dBC")  # of tensors


@dataclass(frozen=True)
class Layout:
    """Of a block, and of its shared memory: the structures of the kernels in bytes."""

    threads: int
    size: int
    x: torch.dtype = torch.float32
    dt: torch.dtype = torch.float32
    BC: torch.dtype = torch.float32
    z: torch.dtype = torch.float32
    dy: torch.dtype = torch.float32
    dBC: torch.dtype = torch.float32

    @property
    def stage(self) -> int:
        """Steps whose inputs are there at a time: fewer where they are wider."""
        return 4 if max(kind.itemsize for kind in (self.x, self.dt, self.z, self.dy)) == 2 else 2

    def _seen(self, channel: int, orders: int) -> int:
        """Two stages, with so many bytes a channel and step; B and C of some steps, as they are and twice as float."""
        stages = 2 * self.stage * 2 * self.threads * channel
        return stages + STEPS * 2 * self.size * (self.BC.itemsize + 2 * orders * 4)

    @property
    def forward(self) -> int:
        return self._seen(self.x.itemsize + self.dt.itemsize + self.z.itemsize, 1)

    @property
    def backward(self) -> int:
        seen = self._seen(self.x.itemsize + self.dt.itemsize + self.z.itemsize + self.dy.itemsize + 4, ORDERS)
        decays, sums = 2 * self.size * self.threads, 2 * STEPS * self.threads // 32 * self.size
        return seen + 4 * (decays + sums)

    def options(self, softplus: bool, gate: bool) -> tuple[str, ...]:
        types = (f"-D{kind.upper()}_T={TYPES[getattr(self, kind)]}" for kind in KINDS)
        numbers = {
            "N": self.size, "THREADS": self.threads, "STAGE": self.stage, "STEPS": STEPS, "SOFTPLUS": softplus,
            "GATE": gate, "FORWARD_BYTES": self.forward, "BACKWARD_BYTES": self.backward,
        }  # fmt: skip
        return (*types, *(f"-D{name}={int(value)}" for name, value in numbers.items()))

    def kernel(self, name: str, softplus: bool, gate: bool, device: torch.device) -> nvrtc.Kernel:
        return nvrtc.load(nvrtc.source(FILE), self.options(softplus, gate), device)[name]


def suits(x: Tensor, A: Tensor, vectors: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> bool:
    """For x and `others` (B, L, ...), A and `vectors` (E,), without a state. QHYER_SCAN=triton says no to all."""
    if not x.is_cuda or torch.version.hip is not None or os.environ.get("QHYER_SCAN") == "triton":
        return False
    return fits(x, A, vectors, others) and works(x.device)


def fits(x: Tensor, A: Tensor, vectors: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> bool:
    """Whether the kernels can read and write these: their sizes, types and places, wherever they lie."""
    _, length, width = x.shape
    channels = width // 2
    found = x.numel() > 0 and width % 64 == 0 and channels % min(THREADS, channels) == 0 and A.shape[1] in STATES
    for tensor in (A, *vectors):  # A is read four numbers at a time, the others in pairs
        found = found and tensor.dtype == torch.float32 and tensor.storage_offset() % 4 == 0 and tensor.stride(-1) == 1
    for tensor in (x, *others):
        batch, row, last = tensor.stride()
        found = found and tensor.dtype in TYPES and last == 1 and max(batch, length * max(row, width)) <= LARGEST
        numbers = (CHUNK if tensor.shape[2] == width else PAIR) // tensor.element_size()
        found = found and batch % numbers == row % numbers == tensor.storage_offset() % numbers == 0
    return found


def works(device: torch.device) -> bool:
    """Whether it can be compiled; not for GPUs that have no bfloat16."""
    modern = torch.cuda.get_device_capability(device) >= (8, 0)  # all of these have 99 KiB for a block that asks
    typical = Layout(THREADS, 16, **dict.fromkeys(KINDS, torch.bfloat16)).options(softplus=True, gate=True)
    return modern and nvrtc.works(nvrtc.source(FILE), typical, device, "the scan runs as Triton's kernel")


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
    layout = Layout(threads, A.shape[1], x.dtype, dt.dtype, B.dtype, gate.dtype, x.dtype, B.dtype)
    layout.kernel("scan_forward", bias is not None, z is not None, x.device)(
        (width // 2 // threads, batch, 1), threads, x, dt, D if bias is None else bias, A.contiguous(), B, C, D, gate,
        y, last, length, width, *_strides(x, dt, B, C, gate), shared=layout.forward,
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
    layout = Layout(threads, size, x.dtype, dt.dtype, B.dtype, gate.dtype, dy.dtype, parts.dtype)
    layout.kernel("scan_backward", bias is not None, z is not None, x.device)(
        (blocks, batch, 1), threads, x, dt, D if bias is None else bias, A.contiguous(), B, C, D, gate, dy,
        dx, ddt, dgate, parts, dparameter, empty(batch, length, width), length, width, batch,
        *_strides(x, dt, B, C, gate, dy, dgate, parts[0]), shared=layout.backward,
    )  # fmt: skip
    if blocks > 1:
        total(parts, dBC)
    return dx, ddt, put(lambda: total(dparameter), [dparameter], D)
