"""The cache folder: where it is, who may write to it, and what of it the cache has made."""

from __future__ import annotations

import errno
import os
import re
import resource
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from aiter_mx.errors import CacheError

NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
_MOST_BYTES = 1 << 30
"""Of an artifact; what is longer is none."""
_MANIFEST, _ASIDE = "manifest", "manifest.cleared."
_NOTE = re.compile(r"(?P<kind>[\w-]+)/(?P<key>[\w-]+)\.(?P<suffix>\w+)")


def cache_dir() -> Path:
    """The cache folder: AITER_MX_CACHE_DIR, else aiter_mx in XDG_CACHE_HOME or ~/.cache.

    It is not made by asking for it.

    Raises:
        CacheError: none of these is known.
    """
    if named := os.environ.get("AITER_MX_CACHE_DIR"):
        return Path(named).expanduser().absolute()
    above = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(above) if Path(above).is_absolute() else Path.home() / ".cache") / "aiter_mx"
    except RuntimeError as error:
        raise CacheError(f"no cache folder: {error}; set AITER_MX_CACHE_DIR to one") from None


def checked_dir(kind: str = "") -> Path | None:
    """The cache folder when it exists, after a look at whether others could plant things in it.

    Args:
        kind: which folder in it is looked at too.
    """
    root = cache_dir()
    try:
        status = root.stat()
    except OSError as error:
        if error.errno in NO_DESCRIPTORS:
            raise
        return None
    if not stat.S_ISDIR(status.st_mode):
        raise CacheError(f"the cache folder {root} is a file; set AITER_MX_CACHE_DIR to a folder")
    _refuse_others(root, status)
    _refuse_open_way(root)
    if kind:
        with suppress(FileNotFoundError):
            inner = (root / kind).lstat()
            if not stat.S_ISDIR(inner.st_mode):
                raise CacheError(
                    f"{root / kind} in the cache folder is a link or a file, and a folder was "
                    "expected; remove it"
                )
            # Below a folder that others cannot enter it does not matter what they may do.
            if status.st_mode & 0o011:
                _refuse_others(root / kind, inner)
    return root


def _refuse_others(folder: Path, status: os.stat_result) -> None:
    if status.st_uid not in (os.geteuid(), 0):
        raise CacheError(
            f"the cache folder {folder} belongs to user {status.st_uid}, and code from it would "
            f"run as user {os.geteuid()}; set AITER_MX_CACHE_DIR to a folder of your own"
        )
    if status.st_mode & 0o022:
        raise CacheError(
            f"others can write to the cache folder {folder} (mode {status.st_mode & 0o7777:o}), "
            "and code from it would run as you; chmod 700 it, or set AITER_MX_CACHE_DIR to a "
            "folder that does not exist yet"
        )


@cache
def _refuse_open_way(root: Path) -> None:
    """Raise CacheError where anybody could put another folder in the place of one on the way."""
    for above in root.resolve().parents:
        mode = above.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise CacheError(
                f"anybody can write to {above} (mode {mode & 0o7777:o}), above the cache folder "
                f"{root}, and could put another in its place; chmod o-w it, or set "
                "AITER_MX_CACHE_DIR to a folder elsewhere"
            )


def made_dir() -> Path:
    """The cache folder, made if it does not exist."""
    cache_dir().mkdir(mode=0o700, parents=True, exist_ok=True)
    root = checked_dir()
    if root is None:
        raise FileNotFoundError(f"{cache_dir()} is gone")
    return root


def read_regular(path: Path) -> bytes | None:
    """The contents of a file of ours; None for a link, a pipe, a device or another's file.

    Raises:
        OSError: the process has as many files open as it may, which says nothing of the file.
    """
    try:
        if not _is_ours(path.lstat()):
            return None
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            return file.read() if _is_ours(os.fstat(descriptor)) else None
    except OSError as error:
        if error.errno in NO_DESCRIPTORS:
            raise
        return None


def _is_ours(status: os.stat_result) -> bool:
    is_file = stat.S_ISREG(status.st_mode) and status.st_size <= _MOST_BYTES
    return is_file and status.st_uid in (os.geteuid(), 0)


def note(root: Path, kind: str, key: str, suffix: str) -> None:
    """Write into the manifest of a cache folder that this is built there."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(root / _MANIFEST, flags, 0o600)
    try:
        # It begins a line, whatever a full disk or a kill left of the one before.
        os.write(descriptor, f"\n{kind}/{key}.{suffix}\n".encode())
    finally:
        os.close(descriptor)


def notes_aside(root: Path) -> list[Path]:
    """The manifest under another name, as what is built from now on is noted in a new one; and
    those that were set aside before, and whose clearing was cut short."""
    with suppress(FileNotFoundError):
        (root / _MANIFEST).rename(root / f"{_ASIDE}{time.time_ns()}")
    return sorted(root.glob(f"{_ASIDE}*"))


def noted(manifests: Iterable[Path]) -> list[re.Match[str]]:
    """What they name, each once: ``kind``, ``key`` and ``suffix``."""
    text = b"\n".join(read_regular(path) or b"" for path in manifests)
    lines = text.decode(errors="replace").splitlines()
    return [match for line in dict.fromkeys(lines) if (match := _NOTE.fullmatch(line))]


def manifests(root: Path) -> list[Path]:
    """The manifest of a cache folder, and those that are set aside."""
    return [root / _MANIFEST, *sorted(root.glob(f"{_ASIDE}*"))]


@contextmanager
def naming_scarcity(purpose: str) -> Iterator[None]:
    """Turn the error of a process that may open no more files into one that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_DESCRIPTORS:
            raise
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise CacheError(
            f"cannot {purpose}: {os.strerror(error.errno or 0).lower()}, and this process may have "
            f"{soft}; raise the limit with ulimit -n, or close files that are no longer needed"
        ) from error
