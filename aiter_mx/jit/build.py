"""Builds kernels: source and compile-time parameters in, code object out."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from aiter_mx.errors import BuildError, ToolchainError
from aiter_mx.jit import cache, compiler
from aiter_mx.jit.folder import cache_dir, naming_scarcity
from aiter_mx.jit.toolchain import Toolchain, find_toolchain, vendor_of
from aiter_mx.paths import csrc_dir

_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*["<]([^">\n]+)[">]', re.MULTILINE)
_COMPUTED_INCLUDE = re.compile(rb"^[ \t]*#[ \t]*include[ \t]+\w", re.MULTILINE)
_STEERING = (  # environment variables that change what a compiler makes of the same command line
    "CPATH",
    "CPLUS_INCLUDE_PATH",
    "CCC_OVERRIDE_OPTIONS",
    "HIPCC_COMPILE_FLAGS_APPEND",
    "NVCC_PREPEND_FLAGS",
    "NVCC_APPEND_FLAGS",
    "NVCC_CCBIN",
)


@dataclass(frozen=True)
class BuildRequest:
    """One kernel to build.

    Attributes:
        source: relative to ``csrc/``.
        arch: ``gfx950`` or ``sm_90a``.
        defines: preprocessor definitions, name and value.
        with_lines: whether the code object tells the source line of each instruction.
    """

    source: str
    arch: str
    defines: tuple[tuple[str, int], ...] = ()
    with_lines: bool = False

    def __str__(self) -> str:
        defines = " ".join(f"{name}={value}" for name, value in self.defines)
        return f"{self.source} for {self.arch} ({defines or 'no defines'})"


@dataclass(frozen=True)
class CodeObject:
    """A compiled kernel.

    Attributes:
        key: what it is stored under in the cache.
        image: the ELF that a runtime loads.
        path: where it is.
        built: whether this call compiled it.
        seconds: how long that took; 0 when it came out of the cache.
    """

    key: str
    image: bytes
    path: Path
    built: bool
    seconds: float


def build(request: BuildRequest) -> CodeObject:
    """The code object of a request, from the cache or compiled now.

    Where there is no compiler at all, an artifact of the same sources, flags and definitions by
    any compiler is used: that is how a container is filled ahead of time.

    Raises:
        BuildError: it does not compile; the message has the command line and the output.
        ToolchainError: there is no compiler and no artifact.
        CacheError: another process builds it and takes too long, or there is no space at all.
        ValueError: there is no such source, or no such architecture.
    """
    with naming_scarcity(f"build {request}"):
        return _build(request)


def _build(request: BuildRequest) -> CodeObject:
    sources = _source_key(request)
    suffix = vendor_of(request.arch).SUFFIX
    try:
        tool = find_toolchain(request.arch)
    except ToolchainError as error:
        found = cache.lookup_prefix(request.arch, f"{sources}-", suffix)
        if found is None:
            raise ToolchainError(
                f"{request} is not in the cache {cache_dir()}, and {error}"
            ) from None
        key = found.path.name.partition(".")[0]
    else:
        key = f"{sources}-{_compiler_key(tool)}"
        found = cache.get_or_build(
            request.arch,
            key,
            suffix,
            lambda out: _compile(request, sources, tool, out),
            str(request),
        )
    return CodeObject(key, found.data, found.path, found.built, found.seconds)


def sources_key(request: BuildRequest) -> str:
    """What the keys of a request's code objects begin with: a hash of all but the compiler.

    Raises:
        ValueError: there is no such source, or no such architecture.
    """
    return _source_key(request)


def is_cached(request: BuildRequest) -> bool:
    """Whether ``build`` would compile nothing."""
    sources = _source_key(request)
    try:
        prefix = f"{sources}-{_compiler_key(find_toolchain(request.arch))}."
    except ToolchainError:
        prefix = f"{sources}-"
    suffix = vendor_of(request.arch).SUFFIX
    return cache.lookup_prefix(request.arch, prefix, suffix) is not None


def build_all(
    requests: Sequence[BuildRequest],
    jobs: int | None = None,
    on_done: Callable[[BuildRequest, CodeObject], None] | None = None,
) -> list[CodeObject]:
    """Build many in parallel.

    Args:
        requests: duplicates are built once.
        jobs: how many at a time; by default one for each core.
        on_done: called in this thread after each build, in the order in which they finish.

    Returns:
        The code objects in the order of ``requests``.

    Raises:
        ValueError: less than one job.
        Exception: what ``build`` raised first; builds that had not started are dropped.
    """
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs must be at least 1, or None for one for each core, got {jobs}")
    pool = ThreadPoolExecutor(jobs or len(os.sched_getaffinity(0)), "aiter_mx-build")
    try:
        futures = {pool.submit(build, request): request for request in dict.fromkeys(requests)}
        done = {}
        for future in as_completed(futures):
            request = futures[future]
            done[request] = future.result()
            if on_done:
                on_done(request, done[request])
        return [done[request] for request in requests]
    finally:
        pool.shutdown(cancel_futures=True)


def _source_key(request: BuildRequest) -> str:
    """Hash of everything but the compiler that the code object depends on."""
    whole = hashlib.sha256()
    parts: list[object] = [request.arch, *vendor_of(request.arch).FLAGS, *_line_flags(request)]
    parts += [f"{name}={value}" for name, value in sorted(request.defines)]
    parts += [part for name, source in _sources(request) for part in (name, source.digest)]
    whole.update("\0".join(map(str, parts)).encode())
    return whole.hexdigest()[:32]


def _line_flags(request: BuildRequest) -> list[str]:
    return list(vendor_of(request.arch).LINE_FLAGS) if request.with_lines else []


def _compiler_key(tool: Toolchain) -> str:
    steering = [f"{name}={os.environ[name]}" for name in _STEERING if name in os.environ]
    return hashlib.sha256("\0".join([tool.identity, *steering]).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class _Source:
    """A source file as it was read.

    Attributes:
        stamp: its length and when it was changed.
        digest: of its text.
        includes: what it names in include lines.
    """

    stamp: tuple[int, int]
    digest: str
    includes: tuple[str, ...]


_read_before: dict[Path, _Source] = {}


def _read(path: Path) -> _Source:
    """A source file, read again where it may have changed."""
    status = path.stat()
    stamp = status.st_size, status.st_mtime_ns
    kept = _read_before.get(path)
    if kept is not None and kept.stamp == stamp:
        return kept
    text = path.read_bytes()
    if _COMPUTED_INCLUDE.search(text):
        raise ValueError(f"{path} includes what a macro names; the cache key would not see it")
    names = tuple(os.fsdecode(name) for name in _INCLUDE.findall(text))
    source = _Source(stamp, hashlib.sha256(text).hexdigest(), names)
    if time.time_ns() - status.st_mtime_ns > cache.TICK_NS:
        _read_before[path] = source
    return source


def _sources(request: BuildRequest) -> list[tuple[str, _Source]]:
    """The source and everything under ``csrc/`` that it includes, whatever the preprocessor's
    conditions, with their names, in the order in which they are met."""
    csrc = csrc_dir()
    source = csrc / request.source
    if not source.is_file():
        raise ValueError(f"there is no kernel source {request.source!r} in {csrc}")
    found: dict[Path, _Source] = {}
    waiting = [source]
    while waiting:
        path = waiting.pop(0)
        if path in found:
            continue
        found[path] = _read(path)
        for name in found[path].includes:
            places = (folder / name for folder in (path.parent, csrc / "include"))
            waiting += islice(filter(Path.is_file, places), 1)
    return [(os.path.relpath(path, csrc), source) for path, source in found.items()]


def source_names(request: BuildRequest) -> list[str]:
    """The source and everything under ``csrc/`` that it includes, by their names there."""
    return [name for name, _ in _sources(request)]


def _compile(request: BuildRequest, sources: str, tool: Toolchain, out: Path) -> None:
    command = [*vendor_of(request.arch).command(tool), f"-I{csrc_dir() / 'include'}"]
    if request.with_lines:
        command += [*_line_flags(request), *vendor_of(request.arch).where_lines_are(csrc_dir())]
    command += vendor_of(request.arch).flags_for(dict(request.defines))
    command += [f"-D{name}={value}" for name, value in sorted(request.defines)]
    try:
        compiler.run([*command, csrc_dir() / request.source, "-o", out], out.parent)
    except BuildError as error:
        raise BuildError(f"building {request} failed: {error}") from None
    if _source_key(request) != sources:
        raise BuildError(f"building {request}: its sources changed meanwhile; build it again")
    if not out.is_file() or not out.stat().st_size:
        raise BuildError(f"building {request} failed: {tool.compiler} succeeded but wrote nothing")
