"""How many ids a block of an expert layer has."""

from __future__ import annotations

_BLOCKS = (16, 32, 48, 64, 80, 96)
MANY_ROWS, _BLOCK_OF_MANY = 128, 64
"""Of an expert, from which on its rows are multiplied in pieces of such blocks, whatever their
number: larger blocks have more padding."""
_WIDER = range(512, 1281)
"""Features of which 48 rows have room in a Hopper SM's shared memory beside weights on their way:
where few experts have most of the rows, the second GEMM then takes their weights fewer times."""


def block_of(rows: float) -> int:
    """The least block that holds so many rows of an expert, or the largest."""
    return next((block for block in _BLOCKS if rows <= block), 128)


def block_for(mean: float, intermediate: int, least: float = 0) -> int:
    """The least of these blocks that holds most experts' rows, chosen at random; 48 in place of 32
    where that costs other routings nothing, and 64 where no block would hold them.

    Args:
        mean: rows of an expert.
        intermediate: features between a layer's two GEMMs.
        least: rows that a block should hold, however few are the mean.
    """
    if mean >= MANY_ROWS:
        return _BLOCK_OF_MANY
    block = block_of(max(mean + 2 * mean**0.5, least))  # two deviations more
    return 48 if block == 32 and intermediate in _WIDER else block
