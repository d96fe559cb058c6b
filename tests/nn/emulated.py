"""Kernels in CUDA C++ on a CPU, by `emulator.h` and the machine's C++ compiler: for tests where there is no GPU.

    monkeypatch.setattr(nvrtc, "load", emulated.load)   # tensors may lie on the CPU from here on

They run in orders that are drawn anew for each `emulated.order`; results must not depend on it.
"""

from __future__ import annotations

import ctypes
import functools
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from qhyer.nn import nvrtc

COMPILER = shutil.which("g++")
HEADER = Path(__file__).with_name("emulator.h").read_text()
STATIC = 48 * 1024
folder = tempfile.TemporaryDirectory(prefix="qhyer-emulated-")
order = 0  # which of the orders kernels run in


class Failed(RuntimeError):
    """What a GPU would not forgive either, or would do wrong in silence."""


def _operands(text: str) -> list[str]:
    """The expressions of `"=f"(r), "f"(g(v))`."""
    found, at = [], 0
    while (start := text.find("(", at)) >= 0:
        depth, at = 1, start + 1
        while depth:
            depth += {"(": 1, ")": -1}.get(text[at], 0)
            at += 1
        found.append(text[start + 1 : at - 1])
    return found


def _call(match: re.Match) -> str:
    """asm("name.of.it %0, [%1], 16;" : "=f"(r) : "l"(p)); -> ptx::name_of_it(r, p, 16);"""
    name, _, wanted = match["ptx"].rstrip(";").partition(" ")
    operands = _operands(match["operands"])
    arguments = [part.strip(" []{}") for part in wanted.split(",")] if wanted else []
    given = (operands[int(part[1:])] if part[0] == "%" else part for part in arguments)
    return f"ptx::{name.replace('.', '_')}({', '.join(given)});"


def translated(source: str, shared: int) -> str:
    """What a C++ compiler takes."""
    source = source.replace("extern __shared__ __align__(16) char memory[];", "").replace("__shared__", "static")
    source = re.sub(r'asm(?: volatile)?\("(?P<ptx>[^"]*)"(?P<operands>[^;]*)\);', _call, source)
    names = re.findall(r'extern "C" __global__ void (?:__launch_bounds__\([^)]*\) )?(\w+)\(', source)
    launches = "".join(
        f'extern "C" const char* launch_{name}(const unsigned* grid, unsigned threads, void** p, uint64_t seed) {{\n'
        f"  return emulator::launch([](void** q) {{ emulator::call({name}, q); }}, grid, threads, p, seed);\n}}\n"
        for name in names
    )
    return f"#define SHARED {shared}\n{HEADER}\n{source}\n{launches}"


@functools.cache
def _built(source: str, options: tuple[str, ...]) -> ctypes.CDLL:
    shared = [int(option.partition("=")[2]) for option in options if "_BYTES=" in option]
    place = Path(folder.name) / f"{len(list(Path(folder.name).iterdir()))}"
    file = place.with_suffix(".cpp")
    file.write_text(translated(source, max([STATIC, *shared])))
    assert COMPILER is not None
    flags = ["-O1", "-std=c++17", "-fPIC", "-shared", "-fno-strict-aliasing", "-ffp-contract=off", "-w"]
    built = subprocess.run([COMPILER, *flags, *options, "-o", place.with_suffix(".so"), file], capture_output=True)
    if built.returncode:
        raise nvrtc.CompileError(built.stderr.decode())
    return ctypes.CDLL(str(place.with_suffix(".so")))


class Kernel:
    """Called as `nvrtc.Kernel` is."""

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self.name, self.launch = name, getattr(library, f"launch_{name}")
        self.launch.restype = ctypes.c_char_p

    def __call__(self, grid: tuple[int, int, int], threads: int, *arguments: nvrtc.Argument, shared: int = 0) -> None:
        assert all(not isinstance(each, torch.Tensor) or each.device.type == "cpu" for each in arguments)
        values = [nvrtc.as_c(each) for each in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        said = self.launch((ctypes.c_uint * 3)(*grid), threads, pointers, ctypes.c_uint64(order))
        if said:
            raise Failed(f"{self.name}: {said.decode()}")


class Module:
    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    def __getitem__(self, name: str) -> Kernel:
        return Kernel(self.library, name)


def load(source: str, options: tuple[str, ...], device: torch.device) -> Module:
    return Module(_built(source, options))
