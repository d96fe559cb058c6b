"""The rate of exponentials on a GPU: a kernel that does nothing else, in registers.

torch.exp2 is bound by reading and writing its tensor, even one that stays in the cache.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

BLOCK, PROGRAMS, REPEAT = 1024, 8192, 256
COUNT = BLOCK * PROGRAMS * REPEAT
"""exponentials of a call"""


@triton.jit
def _kernel(x_ptr, REPEAT: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    for _ in range(REPEAT):
        x = tl.exp2(-x)  # draws near to 0.64
    tl.store(x_ptr + at, x)


def powers(device: torch.device) -> Callable[[], object]:
    x = torch.rand(BLOCK * PROGRAMS, device=device)
    return lambda: _kernel[(PROGRAMS,)](x, REPEAT=REPEAT, BLOCK=BLOCK)
