"""What thousands of rows take on Hopper, by kernel, so that one of them is chosen.

Their CTAs stay and take tiles in turns, two of a cluster side by side along the features.
"""

from __future__ import annotations

from math import ceil
from typing import Any, NamedTuple

import numpy as np

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
    others. Of numbers or arrays of them."""
    rounds, left = divmod(tiles, pairs)
    shared = lesser(left, 1)
    rounds = rounds - lesser(rounds, shared)
    part, more = divmod((tiles - rounds * pairs) * chunks, pairs)
    times, rest = divmod(chunks, lesser(part, chunks) + 1 - shared)  # 0 where nothing is shared
    whole = shared * ((more == 0) & (rest == 0) & (part < chunks))
    return Work(
        rounds * chunks + part + lesser(more, 1),
        rounds + 2 * shared - whole + (part > chunks),
        2 * shared - whole,
        shared * times - whole,
    )


def pairs_that_suit(target: Target, chunks: int, tiles: int) -> tuple[int, int]:
    """All, and as many as have equally many tiles each, or parts of one, which may be as many. Of
    numbers or arrays of them."""
    most = target.cu_num // PAIR
    rounds = -(-tiles // most)
    even = tiles // rounds * (1 + (most - lesser(tiles, most)) // tiles)
    return lesser(tiles * chunks, most), lesser(even, tiles * chunks)


def lesser(a: Any, b: Any) -> Any:
    """Of two numbers, or of each two of arrays."""
    return np.minimum(a, b) if isinstance(a, np.ndarray) else min(a, b)


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
