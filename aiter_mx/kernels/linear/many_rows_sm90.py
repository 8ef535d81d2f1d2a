"""What thousands of rows take on Hopper, by kernel, so that one of them is chosen.

Their CTAs stay and take tiles in turns, two of a cluster side by side along the features.
"""

from __future__ import annotations

from math import ceil
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from aiter_mx.kernels.linear.fitted_sm90 import PERSISTENT_MANY, ManyRows
from aiter_mx.kernels.linear.problem import LinearProblem, Sizes
from aiter_mx.kernels.linear.wgmma_bf16_layout_sm90 import PAIR
from aiter_mx.kernels.sm90 import CHUNK
from aiter_mx.target import Target

Array = npt.NDArray[np.float64]
_TILE = 256  # tokens, and features of a cluster
_MILLION = 1e6


class Work(NamedTuple):
    """Of the busiest of some pairs that share all tiles.

    Attributes:
        chunks: that it multiplies.
        segments: of tiles, of which it has all k or some.
        parts: of them, that others have k of.
        others: parts that it adds to its own.
    """

    chunks: int
    segments: int
    parts: int
    others: int


def work_of(chunks: int, tiles: int, pairs: int) -> Work:
    """Where each has an even share of all chunks, in as many whole tiles as all have and parts of
    the others."""
    whole, left = divmod(tiles, pairs)
    if not left:
        return Work(whole * chunks, whole, 0, 0)
    share, more = divmod(tiles * chunks, pairs)
    most = share + (more > 0)
    if whole:
        return Work(most, whole + 1 + (share > whole * chunks), 2, 1)
    times, rest = divmod(chunks, share)
    even = more == rest == 0  # then each share is of one tile
    return Work(most, 2 - even, 2 - even, times - even)


def works_of(most: int, chunks: int, tiles: Array) -> Work:
    """``work_of`` of so many tiles, with both numbers of those that ``sharers_that_suit``: one more
    dimension, the first."""
    every, sharers = tiles * chunks, np.stack(sharers_that_suit_each(most, chunks, tiles))
    whole, shares = np.floor(tiles / sharers), every / sharers
    shared, share = whole * sharers < tiles, np.floor(shares)
    part = np.minimum(share, chunks)
    times = np.floor(chunks / part)
    even_parts = (whole == 0) & (share == shares) & (times * part == chunks)
    joins = 2 * shared - even_parts
    segments = whole + joins - (shared & (share <= whole * chunks))
    work: Any = np.ceil(shares), segments, joins, times * shared - even_parts
    return Work(*work)


def pairs_that_suit(target: Target, chunks: int, tiles: int) -> tuple[int, int]:
    """All, and as many as have equally many tiles each, or parts of one, which may be as many."""
    return sharers_that_suit(target.cu_num // PAIR, chunks, tiles)


def sharers_that_suit(most: int, chunks: int, tiles: int) -> tuple[int, int]:
    """Likewise, of at most so many."""
    every = tiles * chunks
    even = tiles * (most // tiles) if tiles < most else tiles // -(-tiles // most)
    return min(every, most), min(every, even)


def sharers_that_suit_each(most: int, chunks: int, tiles: Array) -> tuple[Array, Array]:
    """``sharers_that_suit`` of each."""
    every = tiles * chunks
    even = np.floor(tiles / np.ceil(tiles / most)) * np.maximum(np.floor(most / tiles), 1)
    return np.minimum(every, most), np.minimum(every, even)


def cycles_of_pairs(
    fitted: ManyRows, target: Target, sizes: LinearProblem | Sizes, tile_m: int
) -> dict[int, float]:
    """A model of a call, of which the rows of x are expanded ahead, by the number of pairs."""
    M, N, K = sizes.M, sizes.N, sizes.K
    chunks, tiles, share = -(-K // CHUNK), -(-M // tile_m) * -(-N // _TILE), 2 * tile_m / _TILE
    balanced = share * chunks * tiles / (target.cu_num // PAIR) * fitted.balanced
    expanded, stored = M * K / _MILLION * fitted.expanded, M * N / _MILLION * fitted.stored
    found = {}
    for pairs in pairs_that_suit(target, chunks, tiles):
        work = work_of(chunks, tiles, pairs)
        found[pairs] = (
            fitted.start
            + share * work.chunks * fitted.unit
            + balanced
            + work.segments * fitted.segment
            + work.parts * fitted.join
            + expanded
            + stored
        )
    return found


def persistent_cycles(target: Target, sizes: LinearProblem | Sizes) -> float:
    """Likewise of persistent, which expands x meanwhile."""
    M, N, K = sizes.M, sizes.N, sizes.K
    fitted = PERSISTENT_MANY
    rounds = -(-M // _TILE) * -(-N // _TILE) / (target.cu_num // PAIR)
    units = 2 * -(-K // CHUNK)
    return (
        fitted.start
        + units * (ceil(rounds) * fitted.unit + rounds * fitted.balanced)
        + M * K / _MILLION * fitted.expanded
        + M * N / _MILLION * fitted.stored
    )
