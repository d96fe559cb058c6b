"""CUDA C++ compiled at run time, by the library that PyTorch's CUDA builds bring along: no compiler is installed.

    scan = load(source, ("-DN=16",), device)["scan_forward"]
    scan((blocks, batch, 1), threads, x, y, length)        # tensors as pointers, int, float, structures; torch's stream

Where Triton's layouts cost more than the arithmetic, or arguments are tables, a kernel is written out by hand. Wherever
it cannot be built, something else serves, which is its reference, too.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qhyer.driver import DriverError, checked, driver, enter

STATIC = 48 * 1024  # bytes of shared memory that a block has without asking
MAX_DYNAMIC_SHARED_SIZE, PREFERRED_SHARED_CARVEOUT = 8, 9  # CUfunction_attribute


@functools.cache
def source(name: str) -> str:
    """What stands in a file of this folder."""
    return Path(__file__).with_name(name).read_text()


class CompileError(RuntimeError):
    """The compiler's own words."""


@functools.cache
def _compiler() -> ctypes.CDLL:
    """By its name, where the loader knows it, or in the packages beside PyTorch's."""
    major, torch_folder = str(torch.version.cuda).partition(".")[0], Path(torch.__file__).parent
    if sys.platform == "win32":
        name, found = f"nvrtc64_{major}0_0.dll", list((torch_folder / "lib").glob(f"nvrtc64_{major}*_0.dll"))
    else:
        name = f"libnvrtc.so.{major}"
        found = sorted((torch_folder.parent / "nvidia").glob(f"*/lib/{name}"))
    for place in (name, *map(str, found)):
        try:
            return ctypes.CDLL(place)
        except OSError:
            continue
    raise CompileError(f"{name} was not found")


def _compile(source: str, options: tuple[str, ...]) -> bytes:
    """-> machine code."""
    library = _compiler()
    program = ctypes.c_void_p()

    def text(kind: str) -> bytes:
        size = ctypes.c_size_t()
        getattr(library, f"nvrtcGet{kind}Size")(program, ctypes.byref(size))
        found = ctypes.create_string_buffer(size.value)
        getattr(library, f"nvrtcGet{kind}")(program, found)
        return found.raw

    if library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None):
        raise CompileError("NVRTC refused the program")
    try:
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if library.nvrtcCompileProgram(program, len(options), given):
            raise CompileError(text("ProgramLog").rstrip(b"\0").decode())
        return text("CUBIN")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


Argument = Tensor | int | float | ctypes.Structure


def as_c(value: Argument) -> Any:
    """As a kernel takes it: tensors by their address."""
    if isinstance(value, Tensor):
        return ctypes.c_void_p(value.data_ptr())
    if isinstance(value, ctypes.Structure):
        return value
    return ctypes.c_int(value) if isinstance(value, int) else ctypes.c_float(value)


class Kernel:
    def __init__(self, function: ctypes.c_void_p) -> None:
        self.function = function
        self.shared = STATIC

    def __call__(self, grid: tuple[int, int, int], threads: int, *arguments: Argument, shared: int = 0) -> None:
        """`shared`: bytes of shared memory beside what the kernel names itself."""
        values = [as_c(each) for each in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        enter()
        if shared > self.shared:
            checked(driver().cuFuncSetAttribute(self.function, MAX_DYNAMIC_SHARED_SIZE, shared))
            checked(driver().cuFuncSetAttribute(self.function, PREFERRED_SHARED_CARVEOUT, 100))  # per cent
            self.shared = shared
        checked(driver().cuLaunchKernel(self.function, *grid, threads, 1, 1, shared, stream, pointers, None))


class Module:
    def __init__(self, module: ctypes.c_void_p) -> None:
        self.module = module
        self.kernels: dict[str, Kernel] = {}

    def __getitem__(self, name: str) -> Kernel:
        if name not in self.kernels:
            function = ctypes.c_void_p()
            checked(driver().cuModuleGetFunction(ctypes.byref(function), self.module, name.encode()))
            self.kernels[name] = Kernel(function)
        return self.kernels[name]


@functools.cache
def room(device: torch.device) -> int:
    """Bytes of arguments that a kernel may have: more since CUDA 12.1, compiler and driver, from Volta on."""
    version = ctypes.c_int()
    checked(driver().cuDriverGetVersion(ctypes.byref(version)))
    compiler = tuple(map(int, str(torch.version.cuda).split(".")[:2]))
    more = version.value >= 12010 and compiler >= (12, 1) and torch.cuda.get_device_capability(device) >= (7, 0)
    return 32764 if more else 4096


@functools.cache
def works(source: str, options: tuple[str, ...], device: torch.device, instead: str) -> bool:
    """Whether this can be compiled for this device; if not, why and what serves instead, said once."""
    try:
        load(source, options, device)
        return True
    except (CompileError, DriverError, OSError, AttributeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        logging.getLogger(__name__).warning("%s on %s, slower: %s", instead, device, reason)
        return False


@functools.cache
def load(source: str, options: tuple[str, ...], device: torch.device) -> Module:
    """The kernels of this source on this device, the current one, compiled once."""
    major, minor = torch.cuda.get_device_capability(device)
    code = _compile(source, (f"--gpu-architecture=sm_{major}{minor}", "--std=c++17", *options))
    enter()
    module = ctypes.c_void_p()
    checked(driver().cuModuleLoadData(ctypes.byref(module), code))
    return Module(module)
