"""Calls that are made at the same time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


def in_threads(call: Callable[[int], object], count: int) -> None:
    """``call(0)`` to ``call(count - 1)``, each in a thread; what one raises is raised here."""
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(call, range(count)))
