"""A lock across processes that the kernel releases when its holder dies."""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from aiter_mx.errors import CacheError

_LOG = logging.getLogger("aiter_mx")
_DEFAULT_TIMEOUT_S = 120.0
_POLL_S = 0.02
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


def _timeout_s() -> float:
    text = os.environ.get("AITER_MX_LOCK_TIMEOUT", "")
    try:
        seconds = float(text or _DEFAULT_TIMEOUT_S)
    except ValueError:
        seconds = -1
    if not seconds >= 0:
        raise CacheError(f"AITER_MX_LOCK_TIMEOUT must be a number of seconds, got {text!r}")
    return seconds


@contextmanager
def build_lock(path: Path, purpose: str) -> Iterator[None]:
    """Hold the lock file ``path`` while something is built.

    On a file system without locks it holds nothing: publication is atomic, so the worst is that
    two processes build the same thing.

    Raises:
        CacheError: it was not free within ``AITER_MX_LOCK_TIMEOUT`` seconds (default 120); the
            message says who holds it.
        OSError: the lock file cannot be made.
    """
    timeout = _timeout_s()
    path.parent.mkdir(exist_ok=True)
    lock = FileLock(path, fallback_to_soft=False)  # a soft one would outlive a killed holder
    holder = path.with_suffix(".holder")
    try:
        lock.acquire(timeout=timeout, poll_interval=_POLL_S)
    except Timeout:
        raise CacheError(
            f"waited {timeout:g} s for the lock {path} to build {purpose}. {_held_by(holder)}. If "
            "it is still building, wait or set AITER_MX_LOCK_TIMEOUT (seconds) higher; if it "
            "hangs, end it: the lock is then free; or set AITER_MX_CACHE_DIR to another folder"
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        _LOG.warning("%s is on a file system without locks; building without one", path.parent)
        yield
        return
    try:
        with suppress(OSError):
            me = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
            holder.write_text(json.dumps(me | {"purpose": purpose}))
        yield
    finally:
        with suppress(OSError):
            holder.unlink()
        lock.release()


def _held_by(holder: Path) -> str:
    try:
        who = json.loads(holder.read_text())
        seconds = time.time() - float(who["since"])
        return (
            f"Process {who['pid']} on host {who['host']} has held it for {seconds:.0f} s to build "
            f"{who['purpose']}"
        )
    except (OSError, ValueError, KeyError, TypeError):
        return f"Who holds it is not known ({holder} cannot be read)"
