"""Translated kernels as shared libraries, kept in the artifact cache.

A library is linked from three sorts of parts. The machine, which is always the same, and vector
functions, most of which many kernels share, are compiled once each and kept as objects. A kernel's
own part is calls and branches, and is compiled each time without optimisation, which would take
seconds and gain little.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path

from aiter_mx.errors import BuildError, CacheError, ToolchainError
from aiter_mx.jit.cache import get_or_build
from aiter_mx.jit.compiler import run
from aiter_mx.jit.toolchain import llvm_tool
from aiter_mx.sim.translate import Translation

_HERE = Path(__file__).resolve().parent
_FLAGS = (
    "-std=gnu11", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-fwrapv",
    "-fno-strict-aliasing", "-march=native", "-w", "-fPIC", "-fvisibility=hidden",
)  # fmt: skip
_OPTIMISED = ("-O2", "-ftree-vectorize")
_MANY = 128  # functions of one kernel: most of them no other will have, so they are compiled as one


@cache
def c_compiler() -> str:
    """The C compiler to use: CC, else the clang that is there for gfx950, else cc or gcc.

    Raises:
        ToolchainError: there is none.
    """
    named = os.environ.get("CC")
    if named and (found := shutil.which(named)) and _knows_half(found):
        return found
    try:
        return str(llvm_tool("clang"))
    except ToolchainError:
        pass
    for name in ("cc", "gcc", "clang"):
        if (found := shutil.which(name)) and _knows_half(found):
            return found
    raise ToolchainError(
        "the simulator needs a C compiler with _Float16, gcc 12 or any recent clang, and found "
        f"none among {', '.join(filter(None, (named, 'cc', 'gcc', 'clang')))}; to have one: "
        "apt-get install clang"
    )


def _knows_half(compiler: str) -> bool:
    """GCC before 12 has no half floats on x86."""
    command = [compiler, "-x", "c", "-fsyntax-only", "-"]
    return not subprocess.run(command, input=b"_Float16 x;", capture_output=True).returncode


@cache
def _version() -> str:
    command = [c_compiler(), "--version"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


@cache
def _host_key() -> str:
    """What a library compiled with -march=native depends on besides its source."""
    try:
        info = Path("/proc/cpuinfo").read_text()
        cpu = next((line for line in info.splitlines() if line.startswith("flags")), "")
    except OSError:
        cpu = platform.processor()
    return f"{_version()}{platform.machine()}{' '.join(sorted(cpu.split()))}{_FLAGS}"


def _digest_of(pattern: str) -> bytes:
    digest = hashlib.sha256()
    for path in sorted(_HERE.rglob(pattern)):
        if path.parent.name != "timing":  # which reads results, and has no part in them
            digest.update(path.name.encode() + path.read_bytes())
    return digest.digest()


@cache
def _own_sources() -> tuple[bytes, bytes]:
    """Digests of the machine's sources and of the translator, whose output changes with them."""
    return _digest_of("*.[ch]"), _digest_of("*.py")


def _key(*parts: bytes) -> str:
    whole = hashlib.sha256(b"".join([*parts, _own_sources()[0], _host_key().encode()]))
    return whole.hexdigest()[:32]


def library(
    key: bytes, translate: Callable[[], Translation], strict: bool, describe: str
) -> ctypes.CDLL:
    """The shared library for a key; ``translate`` is called when it has to be made."""
    artifact = get_or_build(
        "sim",
        _key(key, _own_sources()[1]),
        "so",
        lambda out: _build(translate(), strict, out),
        describe,
    )
    try:
        return ctypes.CDLL(str(artifact.path))
    except OSError as error:
        if os.statvfs(artifact.path).f_flag & os.ST_NOEXEC:
            raise CacheError(
                f"the simulator's library {artifact.path} cannot be loaded, as its file system is "
                "mounted noexec; set AITER_MX_CACHE_DIR to a folder on another"
            ) from error
        raise CacheError(f"the simulator's library cannot be loaded: {error}") from error


def _build(kernel: Translation, strict: bool, out: Path) -> None:
    own = out.with_suffix(".c")
    own.write_text(kernel.source)
    texts, compiled = list(kernel.functions.values()), out.with_name("kernel.o")
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        machine = pool.submit(_machine, strict)
        waves = pool.submit(_compile, ["-O0", "-c", own], compiled)
        if len(texts) > _MANY:
            functions = [out.with_name("functions.o")]
            _compile_functions("\n".join(texts), functions[0])
        else:
            functions = list(pool.map(_function, texts))
    waves.result()
    _link([compiled, machine.result(), *functions], out)


@cache
def _linker() -> str | None:
    return shutil.which("ld")


def _link(objects: Sequence[Path], out: Path) -> None:
    """Links by the linker itself, for which a compiler takes ten times as long, or else by that."""
    if linker := _linker():
        with suppress(BuildError):  # it may not know where libraries are, which compilers tell it
            run([linker, "-shared", *objects, "-lm", "-lc", "-o", out], out.parent)
            return
    _compile(["-shared", *objects, "-lm"], out)


def _machine(strict: bool) -> Path:
    def build(out: Path) -> None:
        _compile([*_OPTIMISED, f"-DSTRICT={int(strict)}", "-c", _HERE / "csrc/machine.c"], out)

    describe = f"the simulator's machine, {'strict' if strict else 'checks off'}"
    return get_or_build("sim", _key(b"machine", bytes([strict])), "o", build, describe).path


def plain_library(source: Path, describe: str) -> ctypes.CDLL:
    """The shared library of a C file that stands by itself."""

    def build(out: Path) -> None:
        _compile([*_OPTIMISED, "-fvisibility=default", "-shared", source, "-lm"], out)

    return ctypes.CDLL(
        str(get_or_build("sim", _key(source.read_bytes(), b"plain"), "so", build, describe).path)
    )


def _function(text: str) -> Path:
    describe = f"vector function of the simulator, {text.partition('(')[0]}"
    return get_or_build(
        "sim", _key(text.encode()), "o", lambda out: _compile_functions(text, out), describe
    ).path


def _compile_functions(text: str, out: Path) -> None:
    source = out.with_suffix(".c")
    source.write_text(f'#include "numbers.h"\n{text}\n')
    _compile([*_OPTIMISED, *_numbers(), "-c", source], out)


def _numbers() -> list[str | Path]:
    """What has a clang take ``numbers.h`` as it was read once, which takes half as long."""
    if "clang" not in _version():
        return []
    header = _HERE / "csrc/numbers.h"

    def build(out: Path) -> None:
        _compile([*_OPTIMISED, "-Xclang", "-fno-pch-timestamp", "-x", "c-header", header], out)

    # It names the header, which is taken for another one in another place.
    key = _key(b"numbers", os.fsencode(header))
    return ["-include-pch", get_or_build("sim", key, "pch", build, "the simulator's numbers").path]


def _compile(what: Sequence[str | Path], out: Path) -> None:
    command = [c_compiler(), *_FLAGS, f"-I{_HERE / 'csrc'}", *what, "-o", out]
    try:
        run(command, out.parent)
    except BuildError as error:
        raise ToolchainError(f"the simulator's C did not compile: {error}") from error
