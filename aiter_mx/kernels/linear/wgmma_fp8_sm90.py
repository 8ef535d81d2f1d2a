"""The Hopper kernel of the linear that has scales multiplied by the matrix unit too,
csrc/linear/wgmma_fp8_sm90.cu."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import inf
from typing import Any, NamedTuple

import numpy as np

from aiter_mx.kernels.declare import declare
from aiter_mx.kernels.linear.clusters_sm90 import ARGS, operand_maps, scalars
from aiter_mx.kernels.linear.fitted_sm90 import (
    WGMMA_FP8_MANY,
    WGMMA_FP8_TWO_A,
    WgmmaFp8,
)
from aiter_mx.kernels.linear.problem import (
    QUANTISED_MEANWHILE,
    X_CODES,
    LinearProblem,
    quantised_meanwhile,
)
from aiter_mx.kernels.linear.wgmma_fp8_layout_sm90 import (
    GROUPS,
    MOST_COLUMNS,
    PARAMS,
    TWO_A_M,
    Layout,
    chunks_of,
    groups_of_x,
    layout,
    layout_of,
    passes_of,
    registers,
    rows_m_of,
    shared_layout,
)
from aiter_mx.kernels.search import ROUNDED_OFF, Costed, Least, Search
from aiter_mx.kernels.sm90 import (
    CHUNK,
    GROUP_ROWS,
    most_clusters,
    up,
)
from aiter_mx.kernels.spec import (
    DTYPE_CODES,
    MAX_INT,
    Config,
    Geometry,
    Parts,
    as_defines,
    where_it_fits,
)
from aiter_mx.target import Target

MAX_M = 128
ACCUMULATION_ERROR = 2.0**-10
"""Of a sum, relative to the sum of its products' magnitudes, for random payloads, which were at
most half as far off; MOST_ACCUMULATION_ERROR bounds it for any."""
MOST_ACCUMULATION_ERROR = 2.0**-8
"""Likewise, for any operands. The matrix unit shifts the 32 products of a block to the exponent of
the largest and cuts them 13 bits below it, and then the sum: 32 times less than 2^-13 of a block's
largest product."""
_MOST_OWN_WEIGHTS = 400_000_000  # without a table, for more than 64 rows: no longer ones were timed
_FEWEST_OWN_ROWS = 17  # from which it was faster than all others on an H200, without a table
_FEWEST_OWN_WEIGHTS = 500_000
_FEWEST_OWN_WEIGHT_ROWS = 384
_MOST_QUANTISING_ROUNDS = 4  # of 16 elements of each thread; with more a launch ahead is faster
_MOST_ODD_CHUNKS = 128  # with 231 mma_ring takes 0.6 of the time at 32 rows on an H200
_MOST_CANDIDATES = 16
_MOST_ALIKE = 2
_MOST_SHARED_M = 16  # up to which several workgroups of an SM are candidates
_MOST_FAST_COLUMNS, _FEW_ROWS, _OF_SLOW_COLUMNS = 112, 48, 1.8
"""Beyond so many columns, and rows of w in a workgroup, products were seen to take that much
longer."""
_OF_ONE_GROUP = 1.1  # likewise those of a warpgroup alone, of more than 64 rows of x
FITTED = WgmmaFp8()


_layout = where_it_fits(layout)


def refusal_of_any_rows(target: Target, problem: LinearProblem) -> str | None:
    """Why it does not cover a problem, whatever its rows of x are."""
    if target.exact_sums:
        return "wgmma_fp8 adds the products of a block with 14 bits, and exact sums are asked for"
    if problem.out_dtype == "fp32":
        return "wgmma_fp8 sums a block with 14 bits: enough for 16-bit results, not for fp32"
    if max(problem.N, problem.K) > MAX_INT:
        return f"N={problem.N}, K={problem.K}: wgmma_fp8 counts both in 31 bits"
    return None


def _refusal(target: Target, problem: LinearProblem) -> str | None:
    if problem.M > MAX_M:
        return f"M={problem.M} is above {MAX_M}, the most rows of a tile of wgmma_fp8"
    if (refused := refusal_of_any_rows(target, problem)) is not None:
        return refused
    shapes = product(PARAMS[0].values, GROUPS)
    if not any(layout_of(target, problem, split, *groups) for split, groups in shapes):
        return f"N={problem.N}: no room for all of w in shared memory"
    return None


def _fitted(problem: LinearProblem) -> WgmmaFp8:
    if problem.M <= GROUP_ROWS:
        return FITTED
    return WGMMA_FP8_MANY if problem.M < TWO_A_M else WGMMA_FP8_TWO_A


def _costs(target: Target, problem: LinearProblem, least: Least) -> Iterator[Costed]:
    """A model of what a call takes beyond its start: see ``FITTED``."""
    fitted = _fitted(problem)
    between = fitted.between_passes
    for bound, tile in _bounds(target, problem, fitted):
        if bound * ROUNDED_OFF > least.cost:
            break
        found = layout_of(target, problem, *tile)
        if found is None:
            continue
        of_pass = cycles_of_pass(fitted, found, *tile)
        if found.passes * of_pass > least.cost:
            continue
        for depth in PARAMS[3].values:
            under_way = min(depth, found.stages) * found.stage_bytes
            once = of_pass + fitted.off * abs(under_way - fitted.under_way_bytes)
            cycles = found.passes * (once + between) - between
            yield cycles, (), (*tile, depth, 1)
            if depth >= found.stages:  # deeper ones are the same
                break
    if problem.pdl and problem.M <= _MOST_SHARED_M:
        yield from _shared_costs(target, problem)


def _shared_costs(target: Target, problem: LinearProblem) -> Iterator[Costed]:
    """Where workgroups share an SM, those of the next launch have what one leaves of it: a launch
    costs what it takes of all SMs, but no less than what each of its workgroups does."""
    fitted, columns = _fitted(problem), up(problem.M, 8)
    shapes = product(PARAMS[4].values[1:], (1, 2, 4, 8), GROUPS)
    for per_sm, split, (row_groups, k_groups) in shapes:
        found = shared_layout(target, problem, split, row_groups, k_groups, per_sm)
        if found is None:
            continue
        groups = row_groups * k_groups
        of_sm = max(1, found.clusters * split / target.cu_num)
        copied = of_sm * found.chunks * found.stage_bytes / fitted.bytes_a_cycle
        of_block = fitted.block + fitted.column * columns + fitted.sharing / (groups * per_sm)
        blocks = up(found.chunks, k_groups) * row_groups * 4
        computed = blocks * max(of_sm * of_block, fitted.waited / groups)
        exchanged = _exchange_cycles(fitted, split, found.rows_m * found.rows_w * k_groups)
        depth = next((d for d in PARAMS[3].values if d >= found.stages), PARAMS[3].values[-1])
        cycles = together(fitted, copied, computed) + exchanged
        yield cycles, (), (split, row_groups, k_groups, depth, per_sm)


class _Grid(NamedTuple):
    """Clusters of each size with each number of warpgroups, and what does not depend on N, K and
    most of M, in arrays.

    Attributes:
        tiles: the values of ``split``, ``row_groups`` and ``k_groups``.
        split, k_groups: of them.
        clusters: that run at once.
        rows: of w that a pass has at most where w is wgmma's A.
        w_groups: warpgroups side by side along w where x is A; next to none where x takes all.
        blocks: of all warpgroups, in a turn along K.
        a_group: cycles of a block beside its columns.
        of_pass, of_sums: of an exchange, and of it for each sum of a warpgroup along K.
    """

    tiles: list[tuple[int, int, int]]
    split: Any
    k_groups: Any
    clusters: Any
    rows: Any
    w_groups: Any
    blocks: Any
    a_group: Any
    of_pass: Any
    of_sums: Any


@lru_cache(maxsize=64)
def _grid(target: Target, fitted: WgmmaFp8, groups_of_x: int) -> _Grid:
    tiles = [(split, *groups) for split in PARAMS[0].values for groups in GROUPS]
    split, row_groups, k_groups = np.array(tiles, float).T.copy()
    of_pass, of_sum = (
        np.array([_exchange_cycles(fitted, of, sums) for of, *_ in tiles]) for sums in (0, 1)
    )
    return _Grid(
        tiles,
        split,
        k_groups,
        np.array([most_clusters(target, of) for of, *_ in tiles], float),
        GROUP_ROWS * row_groups,
        np.maximum(row_groups // groups_of_x, 1e-9),
        4 * k_groups * row_groups,
        fitted.block + fitted.sharing / (row_groups * k_groups),
        of_pass,
        (of_sum - of_pass) * k_groups,
    )


def _bounds(
    target: Target, problem: LinearProblem, fitted: WgmmaFp8
) -> Iterable[tuple[float, tuple[int, int, int]]]:
    """What clusters of each size take at least, by their warpgroups, the least first: their work
    without padding of w."""
    of, power = _grid(target, fitted, groups_of_x(problem)), fitted.together
    rows_b = rows_m_of(problem, False)
    rows_m = min(rows_b, rows_m_of(problem, True))
    share = np.ceil(problem.N / of.clusters)  # of w, in all passes
    chunks = np.ceil(chunks_of(problem) / of.split)
    passes_b = np.ceil(share / of.rows)
    passes_a = np.ceil(share / (MOST_COLUMNS * of.w_groups))
    w_is_a = passes_b * (of.a_group + fitted.column * rows_b)
    x_is_a = passes_a * of.a_group + fitted.column * share / of.w_groups
    computed = np.ceil(chunks / of.k_groups) * of.blocks * np.minimum(w_is_a, x_is_a)
    passes = np.minimum(passes_a, passes_b)
    copied = chunks * (passes * rows_m + share) * (CHUNK / fitted.bytes_a_cycle)
    exchanged = passes * of.of_pass + of.of_sums * (rows_m * share)
    bounds = (copied**power + computed**power) ** (1 / power) + exchanged
    bounds[passes > passes_of(problem)[-1]] = inf
    order = bounds.argsort()
    tiles = map(of.tiles.__getitem__, order.tolist())  # most are not asked for
    return zip(bounds[order].tolist(), tiles, strict=True)


def cycles_of_pass(
    fitted: WgmmaFp8, found: Layout, split: int, row_groups: int, k_groups: int
) -> float:
    """What workgroups take from their start to their end, with a good depth. ``found`` may have
    arrays of ``chunks`` and ``scale_chunks``."""
    groups = row_groups * k_groups
    copied: float = found.chunks * found.stage_bytes / fitted.bytes_a_cycle
    blocks = up(found.chunks, k_groups) * row_groups * 4
    doubled = 5 * found.columns // 2 + 32 <= registers(groups)
    waited = (fitted.waited if doubled else fitted.waited_single) / groups
    of_block = fitted.block + fitted.column * found.columns + fitted.sharing / groups
    if not found.x_is_a and found.columns > _MOST_FAST_COLUMNS and found.rows_w > _FEW_ROWS:
        of_block *= _OF_SLOW_COLUMNS
    elif groups == 1 and found.rows_m > GROUP_ROWS:
        of_block *= _OF_ONE_GROUP
    computed = blocks * max(of_block, waited)
    sums = found.rows_m * found.rows_w * k_groups
    cycles = together(fitted, copied, computed) + _exchange_cycles(fitted, split, sums)
    of_thread = (found.rows_m + found.rows_w) * found.chunks / (128 * groups)
    return cycles + (found.scale_chunks == 1) * (fitted.in_words * of_thread)


def together(fitted: WgmmaFp8, copied: float, computed: float) -> float:
    power = fitted.together
    cycles: float = (copied**power + computed**power) ** (1 / power)
    return cycles


def _exchange_cycles(fitted: WgmmaFp8, split: int, sums: float) -> float:
    exchanged = fitted.sent * sums + fitted.member * split if split > 1 else fitted.kept * sums
    if split in (3, 5, 6, 7):
        exchanged += fitted.odd_cluster  # so much slower than the model had them
    return exchanged


_search = Search(
    PARAMS,
    _costs,
    most=_MOST_CANDIDATES,
    alike=("split", "row_groups", "k_groups", "per_sm"),
    most_alike=_MOST_ALIKE,
)


@lru_cache(maxsize=1 << 14)
def cycles_of(target: Target, M: int, N: int, K: int) -> float:
    """What more than 64 rows take beyond their start, by the model; infinitely long for weights of
    which none were timed."""
    if N * K > _MOST_OWN_WEIGHTS:
        return inf
    found = _search.cheapest(target, LinearProblem(M, N, K))
    return inf if found is None else found[0]


def _yields(target: Target, problem: LinearProblem) -> str | None:
    chunks = chunks_of(problem)
    if (chunks % 2 or problem.K % CHUNK) and chunks > _MOST_ODD_CHUNKS:
        return f"wgmma_fp8 loads the scales of K={problem.K} as words, {chunks} chunks"
    enough = problem.M >= _FEWEST_OWN_ROWS and problem.N >= _FEWEST_OWN_WEIGHT_ROWS
    if enough and problem.N * problem.K >= _FEWEST_OWN_WEIGHTS:
        return None
    return "wgmma_fp8 keeps fewer bits of sums than the others, and gains where that was measured"


def defines_of(
    found: Layout, problem: LinearProblem, config: Config, tiled: bool
) -> Mapping[str, int]:
    """What tells the compiler of a layout."""
    return {
        **as_defines(config),
        "MX_TILED": int(tiled),
        "MX_X_IS_A": int(found.x_is_a),
        "MX_ROWS_M": found.rows_m,
        "MX_ROWS_W": found.rows_w,
        "MX_CHUNKS": found.chunks,
        "MX_STAGES": found.stages,
        "MX_SCALE_CHUNKS": found.scale_chunks,
        "MX_EVEN": int(chunks_of(problem) % config["split"] == 0),
        "MX_WHOLE": int(problem.K % CHUNK == 0),
        "MX_OUT": DTYPE_CODES[problem.out_dtype],
        "MX_X": X_CODES[problem.x_dtype],
        "MX_SHARED_BYTES": found.shared_bytes,
    }


def _parts(target: Target, problem: LinearProblem, config: Config) -> Parts:
    """A quantisation first, but of what stays in shared memory and is loaded at once."""
    found = layout(target, problem, config) if problem.x_dtype != "e4m3" else None
    if found is None:
        return ()
    chunks = found.chunks if found.x_is_a else up(found.chunks, 2)
    threads = 128 * config["row_groups"] * config["k_groups"]
    rounds = -(-found.rows_m * chunks * (CHUNK // 16) // threads)
    if found.stages >= found.chunks and rounds <= _MOST_QUANTISING_ROUNDS:
        return ()
    return quantised_meanwhile(target, problem, config)


def _defines(target: Target, problem: LinearProblem, config: Config) -> Mapping[str, int]:
    return defines_of(_layout(target, problem, config), problem, config, tiled=False)


def _geometry(target: Target, problem: LinearProblem, config: Config) -> Geometry:
    found = _layout(target, problem, config)
    groups = config["row_groups"] * config["k_groups"]
    return Geometry(
        grid=(found.clusters * config["split"], 1, 1),
        block=(128 * groups + (128 if config["per_sm"] == 1 else 64), 1, 1),
        shared_bytes=found.shared_bytes,
        overlaps=problem.pdl,
    )


def _box_rows(target: Target, problem: LinearProblem, config: Config) -> tuple[int, int]:
    found = _layout(target, problem, config)
    return found.rows_w, found.rows_m


WGMMA_FP8 = declare(
    "linear",
    "wgmma_fp8",
    {"sm_90a": "linear/wgmma_fp8_sm90.cu"},
    args=ARGS,
    defines=_defines,
    geometry=_geometry,
    scalars=scalars,
    tensor_maps=operand_maps(_box_rows),
    refusal=_refusal,
    search=_search,
    yields=_yields,
    composed=replace(QUANTISED_MEANWHILE, parts=_parts),
)
