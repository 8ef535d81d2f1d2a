"""Translated kernels as shared libraries, kept in the artifact cache."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

from aiter_mx.errors import ToolchainError
from aiter_mx.jit.cache import get_or_build
from aiter_mx.jit.toolchain import llvm_tool

_HERE = Path(__file__).resolve().parent
_FLAGS = (
    "-std=gnu11", "-O1", "-ftree-vectorize", "-fno-math-errno", "-fno-trapping-math",
    "-ffp-contract=off", "-fwrapv", "-fno-strict-aliasing", "-march=native", "-w", "-shared",
    "-fPIC",
)  # fmt: skip


@cache
def c_compiler() -> str:
    """The C compiler to use: the first of CC, cc, gcc and any clang that knows _Float16.

    Raises:
        ToolchainError: there is none.
    """
    named = [name for name in (os.environ.get("CC"), "cc", "gcc", "clang") if name]
    for name in named:
        if (found := shutil.which(name)) and _knows_half(found):
            return found
    try:
        return str(llvm_tool("clang"))
    except ToolchainError:
        raise ToolchainError(
            f"the simulator needs a C compiler with _Float16, gcc 12 or any recent clang, and "
            f"found none among {', '.join(named)}; to have one: apt-get install gcc"
        ) from None


def _knows_half(compiler: str) -> bool:
    """GCC before 12 has no half floats on x86."""
    command = [compiler, "-x", "c", "-fsyntax-only", "-"]
    return not subprocess.run(command, input=b"_Float16 x;", capture_output=True).returncode


@cache
def _host_key() -> str:
    """What a library compiled with -march=native depends on besides its source."""
    version = subprocess.run(
        [c_compiler(), "--version"], capture_output=True, text=True, check=False
    ).stdout
    try:
        info = Path("/proc/cpuinfo").read_text()
        cpu = next((line for line in info.splitlines() if line.startswith("flags")), "")
    except OSError:
        cpu = platform.processor()
    return f"{version}{platform.machine()}{' '.join(sorted(cpu.split()))}{_FLAGS}"


@cache
def _own_sources() -> bytes:
    """A digest of the translator itself: its output may change with any of its files."""
    digest = hashlib.sha256()
    for path in sorted([*_HERE.rglob("*.py"), *_HERE.rglob("*.h")]):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.digest()


def library(key: bytes, make_source: Callable[[], str], describe: str) -> ctypes.CDLL:
    """The shared library for a key; ``make_source`` is called when it has to be compiled."""
    digest = hashlib.sha256(key + _own_sources() + _host_key().encode()).hexdigest()[:32]
    artifact = get_or_build("sim", digest, "so", lambda out: _compile(make_source(), out), describe)
    return ctypes.CDLL(str(artifact.path))


def _compile(source: str, out: Path) -> None:
    path = out.with_suffix(".c")
    path.write_text(source)
    command = [c_compiler(), *_FLAGS, f"-I{_HERE / 'csrc'}", str(path), "-o", str(out), "-lm"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        errors = [line[:300] for line in run.stderr.splitlines() if "error" in line]
        raise ToolchainError(
            f"the simulator's C did not compile: {' '.join(command)}\n" + "\n".join(errors[:10])
        )
