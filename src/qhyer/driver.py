"""The CUDA driver, for what PyTorch has no call for: kernels of our own, and streams beyond those that it hands out."""

from __future__ import annotations

import ctypes
import functools
import sys

import torch

NON_BLOCKING = 1  # CUstream_flags: does not wait for the default stream, as torch's do not


class DriverError(RuntimeError):
    """The driver's own words."""


@functools.cache
def driver() -> ctypes.CDLL:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def checked(status: int) -> None:
    if status:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(status, ctypes.byref(text))
        raise DriverError(text.value.decode() if text.value else f"CUDA error {status}")


def enter() -> None:
    """In a thread that has not used the device yet (autograd's, say) the driver knows no context: PyTorch's it is."""
    context, handle = ctypes.c_void_p(), ctypes.c_int()
    checked(driver().cuCtxGetCurrent(ctypes.byref(context)))
    if not context.value:
        checked(driver().cuDeviceGet(ctypes.byref(handle), torch.cuda.current_device()))
        checked(driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), handle))
        checked(driver().cuCtxSetCurrent(context))


def new_stream(device: torch.device, priority: int) -> int | None:
    """Its address; None where there is no such driver. It lives as long as the process."""
    if torch.version.hip is not None:
        return None
    found = ctypes.c_void_p()
    try:
        with torch.cuda.device(device):
            enter()
            checked(driver().cuStreamCreateWithPriority(ctypes.byref(found), NON_BLOCKING, priority))
    except (DriverError, OSError, AttributeError):
        return None
    return found.value
