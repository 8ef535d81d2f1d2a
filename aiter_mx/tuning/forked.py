"""Processes that work for a tuner under no interpreter's lock but their own, and end with it.

They are forks, as each would take seconds to import what the tuner has, and must be begun before
there are threads. They never touch the GPU, which a process and its fork cannot share.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from threading import Thread

_POLL_S = 0.5


def forked_pool(
    workers: int, begin: Callable[..., None] | None = None, *of: object
) -> ProcessPoolExecutor:
    """A pool of so many processes, which are there when this returns; each calls ``begin(*of)``."""
    pool = ProcessPoolExecutor(
        workers, get_context("fork"), initializer=_begin, initargs=(os.getpid(), begin, of)
    )
    pool.submit(os.getpid)
    return pool


@contextmanager
def aside() -> Iterator[Executor]:
    """One such process; what it has not begun with when it is no longer wanted is dropped."""
    pool = forked_pool(1)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(parent: int, begin: Callable[..., None] | None, of: tuple[object, ...]) -> None:
    def end_with_parent() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_S)
        os._exit(1)

    # One that is killed would leave these behind, with what they have open of its GPU.
    Thread(target=end_with_parent, daemon=True).start()
    if begin is not None:
        begin(*of)
