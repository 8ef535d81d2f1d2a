"""What thousands of rows take on Hopper, by kernel, so that one of them is chosen.

Their CTAs stay and take tiles in turns, two of a cluster side by side along the features.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from aiter_mx.kernels.linear.fitted_sm90 import PERSISTENT_MANY, ManyRows
from aiter_mx.kernels.linear.problem import LinearProblem, Sizes
from aiter_mx.kernels.linear.wgmma_bf16_layout_sm90 import PAIR
from aiter_mx.kernels.sm90 import CHUNK
from aiter_mx.target import Target

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


def pairs_that_suit(target: Target, chunks: int, tiles: int) -> tuple[int, int]:
    """All, and as many as have equally many tiles each, or parts of one, which may be as many."""
    most, every = target.cu_num // PAIR, tiles * chunks
    even = tiles * (most // tiles) if tiles < most else tiles // -(-tiles // most)
    return min(every, most), min(every, even)


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
