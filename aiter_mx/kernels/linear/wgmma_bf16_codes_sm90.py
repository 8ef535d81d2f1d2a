"""What a call of each code object of wgmma_bf16 and wgmma_f16_tiled takes that a menu may have, by
the model of ``wgmma_bf16_sm90``: arrays with a row for each, and a column for each number of rows.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from aiter_mx.kernels.linear import wgmma_f16_tiled_sm90 as over_f16
from aiter_mx.kernels.linear.fitted_sm90 import START_OF_BF16
from aiter_mx.kernels.linear.many_rows_sm90 import Array, works_of
from aiter_mx.kernels.linear.wgmma_bf16_layout_sm90 import MOST_F16, MOST_PAIRED, PAIR
from aiter_mx.kernels.linear.wgmma_bf16_sm90 import (
    MANY,
    MILLION,
    MOST_CROWDED,
    Tile,
    beside_k,
    cycles_of_work,
    every_tile,
    expanding,
)
from aiter_mx.kernels.sm90 import CHUNK, most_clusters
from aiter_mx.target import Target

_SPLITS = (1, 2)  # more are seldom faster


class Codes(NamedTuple):
    """What menus are made of, and what does not depend on the weight.

    Attributes:
        each: code objects: tiles with parts of K, those of pairs first.
        f16: whether each is of wgmma_f16_tiled.
        rows: numbers of rows of x.
        pairs: tiles of pairs, in columns.
        pairs_down: how many of each such rows have.
        alone, alone_down: likewise of other tiles, which come with each number of parts of K.
        split: these numbers.
        side_by_side: how many clusters of so many CTAs are.
        beside_k: what a tile's part takes beside its k.
    """

    each: tuple[tuple[Tile, int], ...]
    f16: Any
    rows: Any
    pairs: Tile
    pairs_down: Array
    alone: Tile
    alone_down: Array
    split: Any
    side_by_side: Any
    beside_k: Any


def _columns(tiles: list[Tile]) -> Tile:
    columns: Any = [np.array(values)[:, None] for values in zip(*tiles, strict=True)]
    return Tile(*columns)._replace(pairs=tiles[0].pairs, fitted=tiles[0].fitted)


_EVERY = [*(tile for tile in every_tile() if tile.tile_m > MOST_F16), *over_f16.every_tile()]
_PAIRS = [  # narrower ones are seldom faster
    tile for tile in _EVERY if tile.pairs and tile.tile_n == MOST_PAIRED
]
_ALONE = [tile for tile in _EVERY if not tile.pairs]
LARGE = [tile.tile_m for tile in _PAIRS].index(MANY)
"""Which of the code objects has the tile for more than MOST_OWN_M rows."""


@cache
def _codes(target: Target, every_rows: tuple[int, ...], splits: tuple[int, ...]) -> Codes:
    rows, pairs, alone = np.array(every_rows, float), _columns(_PAIRS), _columns(_ALONE)
    split: Any = np.array(splits)[:, None, None]
    each = (*((tile, 1) for tile in _PAIRS), *((t, split) for split in splits for t in _ALONE))
    return Codes(
        each,
        np.array([tile.f16 for tile, _ in each]),
        rows,
        pairs,
        np.ceil(rows / pairs.tile_m),
        alone,
        np.ceil(rows / alone.tile_m),
        split,
        np.array([most_clusters(target, split) for split in splits])[:, None, None],
        beside_k(alone, split),
    )


def costs_of_codes(
    target: Target, rows: tuple[int, ...], N: int, K: int
) -> tuple[tuple[tuple[Tile, int], ...], Array]:
    """What a menu may have, and what each takes at least of calls."""
    chunks = -(-K // CHUNK)
    of = _codes(target, rows, _SPLITS if chunks >= _SPLITS[-1] else _SPLITS[:1])
    millions: Any = np.minimum(of.rows * K / MILLION, MOST_CROWDED)
    work = works_of(target.cu_num // PAIR, chunks, of.pairs_down * -(-N // (PAIR * MOST_PAIRED)))
    pairs: Any = cycles_of_work(of.pairs, of.pairs.unit_at(millions), work)
    tiles = of.alone_down * np.ceil(N / of.alone.tile_n)
    part = -(-chunks // of.split) * 2 * of.alone.unit_at(millions) + of.beside_k
    alone = np.ceil(tiles / of.side_by_side) * part
    costs = np.concatenate((np.minimum.reduce(pairs), alone.reshape(-1, len(rows))))
    costs += expanding(of.rows, K) + START_OF_BF16
    costs[np.ix_(of.f16, of.rows > over_f16.MOST_OWN_M)] = np.inf
    return of.each, costs
