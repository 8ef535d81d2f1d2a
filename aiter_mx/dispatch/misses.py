"""Appends to the CSV of shapes without a tuned row, which processes of many ranks may share."""

from __future__ import annotations

import logging
import os
import time
from typing import NamedTuple

from aiter_mx.dispatch.cells import SCOPE, SHAPE

KEPT_SECONDS = 1.0
_APPENDING = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK
"""Without waiting, as nobody may ever read a pipe."""
_HEADER = ",".join((*SCOPE, SHAPE)) + "\n"
_LOG = logging.getLogger("aiter_mx")
_unwritable: set[str | bytes] = set()


class _Kept(NamedTuple):
    """A file that was opened, for a while: opening and closing it takes longer than a line.

    Attributes:
        path, handle: what it was named by, and its descriptor.
        inode: which file the descriptor is of.
        until: when its name may be another file's, by ``time.monotonic``.
    """

    path: str | bytes
    handle: int
    inode: tuple[int, int]
    until: float


_kept: _Kept | None = None


def append(path: str | bytes, line: str) -> None:
    """Have a file end in a line more, and begin with a header. The caller holds a lock.

    One write to a file opened for appending: ranks that share it do not cut lines in two. Nothing
    waits to be written, so that nothing is lost with a process that is killed.
    """
    try:
        handle, is_empty = _opened(path)
        os.write(handle, ((_HEADER if is_empty else "") + line).encode())
    except OSError as error:  # a full disk ends the list of shapes, not the server
        if path not in _unwritable:
            _unwritable.add(path)
            _LOG.warning(
                "AITER_MX_LOG_UNTUNED names %r, which cannot be written (%s): shapes without "
                "a tuned row are missing from it",
                os.fsdecode(path),
                error.strerror,
            )


def _opened(path: str | bytes) -> tuple[int, bool]:
    """The descriptor of a file, and whether the file is empty.

    A file that was removed is made anew at once, and one that was moved away after a second at
    most: until then it has the lines. A descriptor that is another file's by now, as after
    ``os.closerange``, is left alone.
    """
    global _kept
    kept = _kept
    if kept is not None:
        try:
            found = os.fstat(kept.handle)
        except OSError:  # somebody closed it
            found = None
        if found is not None and (found.st_dev, found.st_ino) == kept.inode:
            if kept.path == path and found.st_nlink and time.monotonic() < kept.until:
                return kept.handle, found.st_size == 0
            _kept = None  # ahead of closing it: a fork in between would close another's
            os.close(kept.handle)
        _kept = None
    handle = os.open(path, _APPENDING, 0o644)
    found = os.fstat(handle)
    inode = found.st_dev, found.st_ino
    _kept = _Kept(path, handle, inode, time.monotonic() + KEPT_SECONDS)
    return handle, found.st_size == 0
