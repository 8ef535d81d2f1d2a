"""Locks that a forked child finds free.

A fork copies the locks that other threads hold but not the threads, so that a child would wait for
them for ever.
"""

from __future__ import annotations

import os
import threading
from weakref import WeakSet


class Lock:
    """A lock for ``with`` that is free in a forked child, whoever holds it in the parent."""

    def __init__(self) -> None:
        self._lock = self._held = threading.Lock()
        _locks.add(self)

    def __enter__(self) -> None:
        lock = self._lock
        lock.acquire()
        self._held = lock

    def __exit__(self, *raised: object) -> None:
        self._held.release()  # the parent's, where a child leaves what its parent entered

    def _renew(self) -> None:
        self._lock = threading.Lock()


_locks: WeakSet[Lock] = WeakSet()


def _renew_all() -> None:
    for lock in list(_locks):
        lock._renew()


os.register_at_fork(after_in_child=_renew_all)
