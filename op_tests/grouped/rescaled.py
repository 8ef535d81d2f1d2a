"""The ring of tiles of w of grouped products over rescaled operands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from aiter_mx.kernels.grouped_gemm import rescaled_sm90


@contextmanager
def with_room_for(tiles: int) -> Iterator[None]:
    """As where the ring had room for so many tiles of w."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rescaled_sm90, "_room_for", lambda ring_mib, K: tiles)
        yield
