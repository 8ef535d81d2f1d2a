"""The folder of built artifacts: each is built once, across processes, and checked when read.

An artifact is one file, ``<kind>/<key>.<digest>.<suffix>``. The digest, of its contents and of what
it was built for, is part of its name, so it appears whole by one rename, and a truncated or altered
one, or one under another's name, is known for what it is.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import time
from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

from aiter_mx.errors import BuildError, CacheError
from aiter_mx.forks import Lock
from aiter_mx.jit.folder import (
    NO_DESCRIPTORS,
    cache_dir,
    checked_dir,
    made_dir,
    naming_scarcity,
    note,
    read_regular,
)
from aiter_mx.jit.lock import build_lock

_LOG = logging.getLogger("aiter_mx")
_ABANDONED_S = 3600
TICK_NS = 10**9
"""Far longer than between two times of change that a file system can tell apart."""
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_SCRATCH = "aiter_mx-build-"
NAME = re.compile(r"(?P<key>[\w-]+)\.(?P<digest>[0-9a-f]{40})\.(?P<suffix>\w+)")

_listings: dict[Path, tuple[int, list[str]]] = {}
_thread_locks: dict[str, Lock] = {}
_unshared: dict[str, Artifact] = {}
_warned: set[str] = set()


@dataclass(frozen=True)
class Artifact:
    """Something that was built.

    Attributes:
        path: where it is; for one that could not be kept in the cache, a file in memory that lives
            as long as this process.
        data: its contents.
        built: whether this call built it.
        seconds: how long the build took; 0 when it came out of the cache.
    """

    path: Path
    data: bytes
    built: bool
    seconds: float


def _digest(kind: str, key: str, suffix: str, data: bytes) -> str:
    whole = hashlib.sha256(f"{kind}/{key}.{suffix}\0".encode())
    whole.update(data)
    return whole.hexdigest()[:40]


def _named(kind: str, prefix: str, suffix: str, as_kept: bool = False) -> list[Path]:
    """Files whose name says that they hold a key that begins with ``prefix``.

    ``as_kept`` asks the listing that was kept, whatever has come or gone since.
    """
    root = checked_dir(kind)
    if root is None:
        return []
    try:
        every = _listings.get(root / kind, (0, []))[1] if as_kept else _listing(root / kind)
    except FileNotFoundError:
        return []
    except OSError as error:
        _warn_once(f"the cache folder {root} cannot be read: {error.strerror}")
        return []
    names = takewhile(lambda name: name.startswith(prefix), every[bisect_left(every, prefix) :])
    matches = ((name, NAME.fullmatch(name)) for name in names)
    return [root / kind / name for name, match in matches if match and match["suffix"] == suffix]


def _listing(folder: Path) -> list[str]:
    """The names in a folder, sorted: a tuner looks a thousand times into one of thousands."""
    changed_at = folder.stat().st_mtime_ns
    kept = _listings.get(folder)
    if kept is not None and kept[0] == changed_at:
        return kept[1]
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries)
    if time.time_ns() - changed_at <= TICK_NS:  # a later change may have the same time
        changed_at = 0
    _listings[folder] = changed_at, names
    return names


def read(path: Path) -> bytes | None:
    """The contents of an artifact, or None when they are not what was built for its name."""
    match = NAME.fullmatch(path.name)
    data = read_regular(path)
    if data is None or match is None:
        return None
    named = path.parent.name, match["key"], match["suffix"]
    return data if _digest(*named, data) == match["digest"] else None


def _identity(path: Path) -> tuple[int, int, int] | None:
    """What tells a file from another that takes its place, or None where there is none."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def lookup(kind: str, key: str, suffix: str) -> Artifact | None:
    """The intact artifact of exactly this key, or None."""
    return lookup_prefix(kind, f"{key}.", suffix)


def lookup_prefix(kind: str, prefix: str, suffix: str) -> Artifact | None:
    """An intact artifact whose key, followed by a dot, begins with ``prefix``, or None."""
    suffix = suffix.lstrip(".")
    for path in _named(kind, prefix, suffix, as_kept=True):
        data = read(path)
        if data is not None:
            return Artifact(path, data, built=False, seconds=0.0)
    for path in _named(kind, prefix, suffix):
        listed = _identity(path)
        data = read(path)
        if data is not None:
            return Artifact(path, data, built=False, seconds=0.0)
        if listed is not None and listed == _identity(path):  # nobody cleared it meanwhile
            _warn_once(f"{path} is truncated or altered and will not be used")
    for entry, kept in list(_unshared.items()):
        if entry.startswith(f"{kind}/{prefix}") and entry.endswith(f".{suffix}"):
            return replace(kept, built=False, seconds=0.0)
    return None


def get_or_build(
    kind: str, key: str, suffix: str, build: Callable[[Path], None], describe: str = ""
) -> Artifact:
    """The artifact of a key, built now if the cache has no intact one.

    Of any number of threads and processes that ask at once, one builds and the others wait for it.
    Where the cache folder cannot be written, the artifact is built for this process alone, with a
    warning.

    Args:
        kind: what sort of artifact; a folder of the cache.
        key: letters, digits, ``_`` and ``-``; everything that the result depends on goes into it.
        suffix: of the file, such as ``hsaco``.
        build: writes the artifact to the path that it is given; it may leave other files beside it.
        describe: what it is, for people.

    Raises:
        CacheError: the wait for another builder took too long, there is no space even for a
            private build, or the cache folder is not private.
        BuildError: ``build`` wrote nothing.
        Exception: whatever ``build`` raises.
    """
    suffix = suffix.lstrip(".")
    entry = f"{kind}/{key}.{suffix}"
    describe = describe or entry
    with naming_scarcity(f"build {describe}"), _thread_locks.setdefault(entry, Lock()):
        if found := lookup(kind, key, suffix):
            return found
        try:
            return _build_shared(kind, key, suffix, build, describe)
        except OSError as error:
            if error.errno in NO_DESCRIPTORS:
                raise
            hindrance = error
        try:
            with tempfile.TemporaryDirectory(prefix="aiter_mx-") as work:
                data, seconds = _run(build, Path(work) / f"artifact.{suffix}", describe)
            return _keep(entry, data, seconds, hindrance)
        except OSError as error:
            if error.errno in NO_DESCRIPTORS:
                raise
            raise CacheError(
                f"cannot build {describe}: {error}. Neither the cache folder {cache_dir()} nor "
                f"the temporary folder {tempfile.gettempdir()} can be used; free some space, or "
                "set AITER_MX_CACHE_DIR (and TMPDIR) to a folder that has some and is writable"
            ) from error


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        _LOG.warning("%s", text)


def forget_unshared() -> None:
    """Drop what this process could not keep in the cache folder."""
    _unshared.clear()


def discard(artifact: Artifact) -> None:
    """Remove an artifact that has turned out to be out of date, where that can be done."""
    with suppress(OSError):
        artifact.path.unlink()
    for entry, kept in list(_unshared.items()):
        if kept.path == artifact.path:
            del _unshared[entry]


def _run(build: Callable[[Path], None], out: Path, describe: str) -> tuple[bytes, float]:
    start = time.perf_counter()
    try:
        build(out)
        data = out.read_bytes()
    except OSError as error:
        if error.errno in (*_NO_SPACE, *NO_DESCRIPTORS):
            raise
        raise BuildError(f"building {describe} failed: {error}") from error
    return data, time.perf_counter() - start


def _keep(entry: str, data: bytes, seconds: float, hindrance: OSError) -> Artifact:
    """An artifact that lives in this process's memory, under a path that its children can open."""
    cause = os.strerror(hindrance.errno) if hindrance.errno else str(hindrance)
    _warn_once(
        f"the cache folder {cache_dir()} cannot be used ({cause}), so what is built "
        "serves this process alone; set AITER_MX_CACHE_DIR to a writable folder with space"
    )
    descriptor = os.memfd_create(f"aiter_mx:{entry}"[:200])
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)
    path = Path(f"/proc/{os.getpid()}/fd/{descriptor}")
    _unshared[entry] = Artifact(path, data, built=True, seconds=seconds)
    return _unshared[entry]


def _build_shared(
    kind: str, key: str, suffix: str, build: Callable[[Path], None], describe: str
) -> Artifact:
    root = made_dir()
    checked_dir(kind)
    note(root, kind, key, suffix)
    with build_lock(root / "locks" / f"{kind}-{key}.lock", describe):
        if found := lookup(kind, key, suffix):
            return found
        for garbled in _named(kind, f"{key}.", suffix):
            garbled.unlink(missing_ok=True)  # another process may clear the cache
        scratch = root / "tmp"
        scratch.mkdir(mode=0o700, exist_ok=True)
        sweep(scratch)
        work = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=scratch))
        try:
            out = work / f"artifact.{suffix}"
            data, seconds = _run(build, out, describe)
            final = root / kind / f"{key}.{_digest(kind, key, suffix, data)}.{suffix}"
            try:
                _publish(out, final, describe)
            except OSError as error:
                return _keep(f"{kind}/{key}.{suffix}", data, seconds, error)
            with suppress(OSError):
                note(root, kind, key, suffix)  # again, as the cache may have been cleared meanwhile
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return Artifact(final, data, built=True, seconds=seconds)


def _publish(out: Path, final: Path, describe: str) -> None:
    final.parent.mkdir(mode=0o700, exist_ok=True)
    _sync(out)
    about = out.with_suffix(".about")
    about.write_text(json.dumps({"describe": describe}))
    about.replace(final.with_suffix(".about"))
    out.replace(final)
    with suppress(OSError):  # not every file system can; the artifact is there all the same
        _sync(final.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sweep(scratch: Path) -> None:
    """Remove what builders that were killed have left."""
    for work in scratch.glob(f"{_SCRATCH}*"):
        with suppress(OSError):
            if time.time() - work.stat().st_mtime > _ABANDONED_S:
                shutil.rmtree(work, ignore_errors=True)
