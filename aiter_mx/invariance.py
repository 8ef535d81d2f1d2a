"""Whether results must have the same bits whatever else is in the batch."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_asked = threading.local()


def is_on() -> bool:
    """Whether the calling thread, or ``AITER_MX_BATCH_INVARIANT=1``, asks for it.

    Raises:
        ValueError: the variable is neither 0 nor 1.
    """
    if getattr(_asked, "times", 0):
        return True
    text = os.environ.get("AITER_MX_BATCH_INVARIANT") or "0"
    if text not in ("0", "1"):
        raise ValueError(f"AITER_MX_BATCH_INVARIANT must be 0 or 1, got {text!r}")
    return text == "1"


@contextmanager
def asked() -> Iterator[bool]:
    """Ask for it in this thread; yields whether nobody around has."""
    times = getattr(_asked, "times", 0)
    _asked.times = times + 1
    try:
        yield times == 0
    finally:
        _asked.times = times
