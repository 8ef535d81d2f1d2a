"""Finds the compiler for an architecture, and says why that one."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from types import ModuleType

from aiter_mx._version import __version__
from aiter_mx.errors import ToolchainError
from aiter_mx.forks import Lock
from aiter_mx.jit import amd, nvidia
from aiter_mx.jit.cache import discard, get_or_build
from aiter_mx.jit.compiler import Candidate, Refused, Toolchain

__all__ = ["Toolchain", "find_toolchain", "llvm_tool", "vendor_of"]

_MOST_OF_SCRIPT = 1 << 16
_search_lock = Lock()


def vendor_of(arch: str) -> ModuleType:
    """The module that knows the compilers for ``arch``.

    Raises:
        ValueError: the name is of no architecture's form.
    """
    if re.fullmatch(r"gfx[0-9a-f]{3,4}", arch):
        return amd
    if re.fullmatch(r"sm_\d{2,3}[af]?", arch):
        return nvidia
    raise ValueError(f"an architecture is called like gfx950 or sm_90a, got {arch!r}")


def find_toolchain(arch: str) -> Toolchain:
    """The compiler to use for an architecture such as ``gfx950`` or ``sm_90a``.

    The first of the vendor's candidates that compiles a trial kernel is chosen, and what the
    environment names but cannot be used stands in its reason. The choice is remembered in the cache
    folder until one of the candidates changes, so that a later process starts no compiler to find
    it again.

    Raises:
        ToolchainError: there is none; the message lists every place looked at, why it was
            refused, and what to install.
        ValueError: the name is of no architecture's form.
    """
    names = ("PATH", "AITER_MX_CACHE_DIR", *vendor_of(arch).ENVIRONMENT)
    environment = tuple(os.environ.get(name) for name in names)
    with _search_lock:
        return _find(arch, environment)


@cache
def _find(arch: str, environment: tuple[str | None, ...]) -> Toolchain:
    candidates: list[Candidate | str] = list(vendor_of(arch).candidates())
    places = [place if isinstance(place, str) else _stamp(place.path) for place in candidates]
    question = json.dumps([arch, places, __version__])
    key = hashlib.sha256(question.encode()).hexdigest()[:32]

    def search(out: Path) -> None:
        tool = _search(arch, candidates, out.parent)
        record = asdict(tool) | {"stamps": [_stamp(path) for path in tool.watch]}
        out.write_text(json.dumps(record, default=str))

    describe = f"the choice of a compiler for {arch}"
    answer = get_or_build("toolchain", key, "json", search, describe)
    if (tool := _parse(arch, answer.data)) is None:
        discard(answer)
        tool = _parse(arch, get_or_build("toolchain", key, "json", search, describe).data)
    if tool is None:  # what is out of date could not be replaced
        with tempfile.TemporaryDirectory(prefix="aiter_mx-") as work:
            tool = _search(arch, candidates, Path(work))
    return tool


def _search(arch: str, candidates: list[Candidate | str], work: Path) -> Toolchain:
    vendor = vendor_of(arch)
    refusals = []
    tried = set()
    for candidate in candidates:
        if isinstance(candidate, str):
            refusals.append(candidate)
            continue
        program = candidate.path.name, candidate.path.resolve()
        if program in tried:
            continue
        tried.add(program)
        try:
            found: Toolchain = vendor.probe(candidate, arch, work)
        except Refused as refusal:
            refusals.append(f"{candidate}: {refusal}")
        else:
            passed = [text for text in refusals if text.startswith(vendor.ENVIRONMENT)]
            reason = "; ".join([found.reason, *(f"passed over {text}" for text in passed)])
            identity = f"{found.identity}{_wrapper(found.compiler)}"
            return replace(found, reason=reason, identity=identity)
    listed = "\n".join(f"  - {refusal}" for refusal in refusals)
    raise ToolchainError(
        f"no compiler for {arch} was found. Looked at:\n{listed}\nTo build kernels, "
        f"{vendor.INSTALL}; or fill the cache where there is a compiler: aiter-mx build"
    )


def _wrapper(compiler: Path) -> str:
    """What to add to the identity of a compiler that is a script: its flags may change."""
    with compiler.open("rb") as file:
        text = file.read(_MOST_OF_SCRIPT)
    return f"; script {hashlib.sha256(text).hexdigest()[:16]}" if text.startswith(b"#!") else ""


def _stamp(path: Path) -> list[str | int]:
    """What changes when a file is replaced."""
    try:
        status = path.stat()
    except OSError:
        return [str(path)]
    return [str(path.resolve()), status.st_size, status.st_mtime_ns]


def _parse(arch: str, text: bytes) -> Toolchain | None:
    """The remembered choice, or None when it is none, or the compiler has changed since."""
    try:
        record = json.loads(text)
        watch = tuple(Path(path) for path in record["watch"])
        if record["arch"] != arch or record["stamps"] != [_stamp(path) for path in watch]:
            return None
        return Toolchain(
            kind=_text(record["kind"]),
            arch=arch,
            compiler=Path(record["compiler"]),
            identity=_text(record["identity"]),
            reason=_text(record["reason"]),
            flags=tuple(map(_text, record["flags"])),
            watch=watch,
        )
    except (ValueError, KeyError, TypeError):
        return None


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, got {value!r}")
    return value


@cache
def llvm_tool(name: str) -> Path:
    """An LLVM program that knows gfx950, such as ``llvm-objdump``.

    Raises:
        ToolchainError: it is neither beside the compiler for gfx950, nor on PATH in version 20 or
            newer.
    """
    try:
        beside = find_toolchain("gfx950").compiler.resolve().parent / name
        if beside.exists():
            return beside
    except ToolchainError:
        pass  # the program may be there all the same
    if versioned := amd.versioned_programs(name):
        return versioned[0]
    plain = shutil.which(name)
    if plain:
        said = subprocess.run([plain, "--version"], capture_output=True, text=True, check=False)
        version = re.search(r"LLVM version (\d+)", said.stdout)
        if version and int(version[1]) >= amd.OLDEST_CLANG:
            return Path(plain)
    raise ToolchainError(
        f"no {name} of LLVM {amd.OLDEST_CLANG} or newer is beside a compiler for gfx950 or on "
        f"PATH ({plain or 'no ' + name} and no {name}-N there). To have it, {amd.INSTALL}"
    )
