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
    """Where each has as many whole tiles as all have, and its even share of the chunks of the
    others."""
    rounds, left = divmod(tiles, pairs)
    if not left:
        return Work(rounds * chunks, rounds, 0, 0)
    rounds = max(rounds - 1, 0)
    part, more = divmod((tiles - rounds * pairs) * chunks, pairs)
    whole = more == 0 and part < chunks and chunks % part == 0
    parts = 1 if whole else 2
    others = chunks // part - whole if part < chunks else 1
    return Work(
        rounds * chunks + part + (more > 0), rounds + parts + (part > chunks), parts, others
    )


def pairs_that_suit(target: Target, chunks: int, tiles: int) -> set[int]:
    """All, and as many as have equally many tiles each, or parts of one."""
    most = target.cu_num // PAIR
    even = tiles // -(-tiles // most) if tiles >= most else tiles * (most // tiles)
    return {min(most, tiles * chunks), min(even, tiles * chunks)}


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
