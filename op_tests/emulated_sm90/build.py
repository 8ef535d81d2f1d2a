"""Kernels for Hopper as shared libraries for this CPU, kept in the artifact cache."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

from aiter_mx.errors import ToolchainError
from aiter_mx.jit.cache import get_or_build
from aiter_mx.jit.compiler import run
from aiter_mx.jit.toolchain import llvm_tool
from op_tests.emulated_sm90.translate import translate

_HERE = Path(__file__).resolve().parent
_KIND = "emulated_sm90"
_FLAGS = (
    *("-std=c++17", "-march=x86-64-v3", "-ffp-contract=off", "-fno-omit-frame-pointer"),
    *("-fPIC", "-g1", "-w"),
)
# Translated PTX casts pointers, relies on wrapping, and must fail where a kernel uses a variable
# that it has not set, or an index or address that the hardware would not take.
_OF_KERNELS = (
    *("-O1", "-fno-strict-aliasing", "-fwrapv", "-ftrivial-auto-var-init=pattern"),
    *("-fsanitize=bounds,alignment", "-fsanitize-undefined-trap-on-error"),
)
_OF_RUNTIME = ("-O2",)
_FRAME = re.compile(r"<([^<>]+)\+0x([0-9a-f]+)>")


def unsupported() -> str:
    """Why nothing can be emulated on this machine, or nothing."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "the emulator of Hopper switches fibers on x86-64 under Linux alone"
    if " avx2 " not in Path("/proc/cpuinfo").read_text():
        return "the emulator of Hopper is compiled for CPUs with AVX2"
    return ""


@cache
def compiler() -> str:
    """The C++ compiler to use: CXX, else the clang that is there for gfx950, else c++ or g++.

    Raises:
        ToolchainError: there is none.
    """
    if (named := os.environ.get("CXX")) and (found := shutil.which(named)):
        return found
    try:
        return str(llvm_tool("clang++"))
    except ToolchainError:
        pass
    for name in ("c++", "g++"):
        if found := shutil.which(name):
            return found
    raise ToolchainError("the emulator of Hopper needs a C++ compiler: apt-get install g++")


@cache
def _told() -> bytes:
    return subprocess.run([compiler(), "--version"], capture_output=True, check=True).stdout


@cache
def _key_of_tools() -> bytes:
    sources = sorted([*_HERE.glob("*.py"), *_HERE.glob("runtime.*")])
    return _told() + b"".join(path.read_bytes() for path in sources)


def _built(
    text: bytes,
    flags: tuple[str, ...],
    describe: str,
    header: Callable[[], list[str | Path]] = list,
) -> Path:
    """The library of a C++ source; ``header`` gives options for one that was read before."""

    def build(out: Path) -> None:
        source, options = out.with_suffix(".cpp"), [*_FLAGS, *flags, *header(), f"-I{_HERE}"]
        source.write_bytes(text)
        run([compiler(), *options, "-shared", "-o", out, source, "-ldl"], out.parent)

    key = hashlib.sha256(_key_of_tools() + text + repr(flags).encode()).hexdigest()[:32]
    return get_or_build(_KIND, key, "so", build, describe).path


def _read_before() -> list[str | Path]:
    """What has a clang take ``runtime.h`` as it was read for an earlier kernel."""
    if b"clang" not in _told():
        return []

    def build(out: Path) -> None:
        options = [*_FLAGS, *_OF_KERNELS, "-Xclang", "-fno-pch-timestamp"]
        run([compiler(), *options, "-x", "c++-header", _HERE / "runtime.h", "-o", out], out.parent)

    # It names the header, which is taken for another one in another place.
    key = hashlib.sha256(_key_of_tools() + repr((_FLAGS, _OF_KERNELS, _HERE)).encode())
    read = get_or_build(_KIND, key.hexdigest()[:32], "pch", build, "the emulator's header")
    return ["-include-pch", read.path]


@cache
def runtime() -> ctypes.CDLL:
    """What kernels' libraries find their functions in."""
    text = b'#line 1 "runtime.cpp"\n' + (_HERE / "runtime.cpp").read_bytes()
    path = _built(text, _OF_RUNTIME, "the emulator of Hopper")
    return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def library(csrc: Path, source: str, defines: Mapping[str, int]) -> ctypes.CDLL:
    """The library of a source under ``csrc``."""
    return _library(csrc, source, tuple(sorted(defines.items())))


@cache
def _library(csrc: Path, source: str, defines: tuple[tuple[str, int], ...]) -> ctypes.CDLL:
    given = [f"-D{name}={value}" for name, value in defines]
    includes = [f"-I{csrc}", f"-I{csrc / 'include'}"]
    with tempfile.TemporaryDirectory() as work:
        path = Path(work) / "preprocessed"
        command = [compiler(), "-E", "-std=c++17", "-x", "c++", *includes, *given, "-o", path]
        run([*command, csrc / source], Path(work))
        text = path.read_text().replace(f'"{csrc}/', '"csrc/')  # the same wherever they are
    runtime()
    whole = ('#include "runtime.h"\n' + translate(text)).encode()
    built = _built(whole, _OF_KERNELS, f"{source}, emulated", _read_before)
    return ctypes.CDLL(str(built))


def with_lines(message: str) -> str:
    """A message of the runtime, whose addresses become lines of sources."""
    try:
        tool = str(llvm_tool("llvm-addr2line"))
    except ToolchainError:
        tool = shutil.which("addr2line") or ""
    if not tool:
        return message

    @cache
    def lines(of: str, address: str) -> str:
        command = [tool, "-Cfipse", of, f"0x{address}"]
        said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        each = (line.replace(" (inlined by) ", "") for line in said.splitlines())
        kept = [line for line in each if not re.search(r"runtime\.(cpp|h):|\?\?", line)]
        return "".join("\n      " + re.sub(r"^(.{60}).* at ", r"\1.. at ", line) for line in kept)

    return _FRAME.sub(lambda found: lines(found[1], found[2]), message)
