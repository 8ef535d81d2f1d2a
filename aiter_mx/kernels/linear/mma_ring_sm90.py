"""The Hopper kernel of the linear over warps' mma, for up to 64 rows of x,
csrc/linear/mma_ring_sm90.cu."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from aiter_mx.kernels.declare import declare
from aiter_mx.kernels.linear.clusters_sm90 import PART_ARGS, part_scalars
from aiter_mx.kernels.linear.fitted_sm90 import MmaRing
from aiter_mx.kernels.linear.problem import (
    MATRIX_ARGS,
    QUANTISED_MEANWHILE,
    LinearProblem,
    matrix_scalars,
    quantised_meanwhile,
)
from aiter_mx.kernels.linear.wgmma_f16_sm90 import WGMMA_F16
from aiter_mx.kernels.search import ROUNDED_OFF, Costed, Least, Search
from aiter_mx.kernels.sm90 import (
    CHUNK,
    REGISTERS,
    RESERVED_BYTES,
    SHARED_BYTES,
    SUM_BYTES,
    most_clusters,
    up,
)
from aiter_mx.kernels.spec import (
    DTYPE_CODES,
    MAX_INT,
    Arg,
    Config,
    Geometry,
    Param,
    Parts,
    as_defines,
    where_it_fits,
)
from aiter_mx.target import Target

PARAMS = (
    Param("split", (1, 2, 4, 8), "workgroups of a cluster, which share K"),
    Param("row_tiles", (1, 2, 3, 4, 5), "tiles of 16 rows of w of a warp"),
    Param("row_warps", (1, 2, 3), "warps of a workgroup side by side along the rows of w"),
    Param("k_warps", (1, 2, 3, 4, 6, 8, 12, 16), "warps of a workgroup that take turns along K"),
    Param("depth", (1, 2, 3), "chunks of 128 k of a warp that are in flight"),
    Param("per_sm", (1, 2), "workgroups that an SM is to hold"),
)

FITTED = MmaRing()
_FEWEST_WARPS, _MOST_WARPS = 4, 18  # of an SM
_GROUPS = tuple(product(PARAMS[2].values, PARAMS[5].values))
_K_WARPS = {
    (row_warps, per_sm): tuple(
        k_warps
        for k_warps in PARAMS[3].values
        if _FEWEST_WARPS <= row_warps * k_warps * per_sm <= _MOST_WARPS
    )
    for row_warps, per_sm in _GROUPS
}

MAX_M = 64
_MOST_CANDIDATES = 20
_MOST_ALIKE = 2
_MOST_OWN_ROWS = 16  # above, wgmma_f16 is faster on one H200
_STATIC_BYTES = RESERVED_BYTES + 128  # of a workgroup: what the system takes, and barriers


class Layout(NamedTuple):
    """What the host works out of a configuration: see the constants of the kernel.

    Attributes:
        tiles_m: tiles of 8 rows of x.
        clusters: how many share the rows of w.
        passes: in which the busiest cluster takes its rows.
        turns: in which a pass's sums are exchanged.
        chunks: of K in the largest part.
        shared_bytes: of a workgroup.
    """

    tiles_m: int
    clusters: int
    passes: int
    turns: int
    chunks: int
    shared_bytes: int


def _shares(N: int, pass_rows: int, most: int, per_sm: int) -> tuple[int, int]:
    """How many clusters share the rows of w, of which an SM holds so many, and their passes."""
    needed = -(-N // pass_rows)
    clusters = min(most, -(-N // 16)) if needed <= most else min(needed, most * per_sm)
    most_rows = -(-N // clusters)
    return clusters, -(-most_rows // pass_rows)


def layout(target: Target, problem: LinearProblem, config: Config) -> Layout | None:
    """How a configuration is laid out, or None where it does not fit."""
    pass_rows = 16 * config["row_tiles"] * config["row_warps"]
    most = most_clusters(target, config["split"])
    shares = _shares(problem.N, pass_rows, most, config["per_sm"])
    return _laid_out(problem, *shares, *(config[param.name] for param in PARAMS))


def _laid_out(
    problem: LinearProblem,
    clusters: int,
    passes: int,
    split: int,
    row_tiles: int,
    row_warps: int,
    k_warps: int,
    depth: int,
    per_sm: int,
) -> Layout | None:
    tiles_m = -(-problem.M // 8)
    stage_rows = 16 * row_tiles + 8 * tiles_m
    stage_bytes = -(-stage_rows * (CHUNK + 8) // 128) * 128
    ring = row_warps * k_warps * depth * stage_bytes
    most_bytes = SHARED_BYTES // per_sm - _STATIC_BYTES
    if ring > most_bytes:
        return None
    for turns in range(1, tiles_m + 1):
        tiles = row_warps * row_tiles * tiles_m // turns
        one_turn = passes * turns == 1
        if tiles_m % turns or (tiles < split and not one_turn):
            continue
        inbox = -(-tiles // split) * split * SUM_BYTES if split > 1 else 0
        inboxes = inbox if one_turn else 2 * inbox
        partials = k_warps * tiles * SUM_BYTES if k_warps > 1 else 0
        shared_bytes = inboxes + (ring + partials if passes > 1 else max(ring, partials))
        if shared_bytes <= most_bytes:
            chunks = -(-problem.K // (CHUNK * split))
            return Layout(tiles_m, clusters, passes, turns, chunks, shared_bytes)
    return None


_layout = where_it_fits(layout)


def _refusal(target: Target, problem: LinearProblem) -> str | None:
    if problem.M > MAX_M:
        return f"M={problem.M} is above {MAX_M}, the most rows of a tile of mma_ring"
    if max(problem.N, problem.K) > MAX_INT:
        return f"N={problem.N}, K={problem.K}: mma_ring counts both in 31 bits"
    return None


def _costs(target: Target, problem: LinearProblem, least: Least) -> Iterator[Costed]:
    """A model of what a call takes beyond reading: see ``FITTED``."""
    M, N, K, tiles_m = problem.M, problem.N, problem.K, -(-problem.M // 8)
    units = N * K / (512 * 4 * target.cu_num)
    for bound, split, row_tiles in sorted(_bounds(target, problem)):
        if bound > least.cost:
            break
        part, most = -(-K // (CHUNK * split)), most_clusters(target, split)
        unit, exchange = _issue_cycles(tiles_m, row_tiles), FITTED.exchange[split]
        for (row_warps, per_sm), by_stall in zip(_GROUPS, _by_stall(part), strict=True):
            pass_rows, second = 16 * row_tiles * row_warps, FITTED.second_group * (per_sm - 1)
            clusters, passes = _shares(N, pass_rows, most, per_sm)
            groups, at_once = clusters * split, target.cu_num * per_sm
            idle = -(-groups // at_once) * at_once / groups
            padded = passes * pass_rows * clusters / N
            x_cycles = FITTED.x_byte * (M * K * clusters * passes * row_warps) / target.cu_num
            further = FITTED.further_pass * (passes - 1)
            of_stall, others = padded * idle * units * unit, x_cycles + exchange + further + second
            soonest = _least_overlap(target, groups) if problem.pdl else 0
            for stall, k_warps in by_stall:
                if (of_stall * stall + others) * ROUNDED_OFF + soonest > least.cost:
                    break
                warps = row_warps * k_warps * per_sm
                if 4 * row_tiles * tiles_m + 8 * tiles_m + 80 > min(REGISTERS // (32 * warps), 255):
                    continue
                chunks = -(-part // k_warps)  # of a warp in a pass
                steps = chunks * k_warps / (K / CHUNK / split)
                base = (
                    padded * steps * idle * units * (unit * _stall(warps))
                    + exchange
                    + x_cycles
                    + FITTED.warp * warps
                    + further  # sums are exchanged once more
                )
                if base + second + soonest > least.cost:
                    continue
                for depth in PARAMS[4].values[: max(1, chunks * passes)]:
                    in_flight = warps * depth * row_tiles * 16 * CHUNK
                    cost = (
                        base
                        # With one chunk in flight nothing is copied while it is computed.
                        + FITTED.one_chunk * (depth == 1) * chunks * passes
                        + second
                        + (0 if in_flight >= FITTED.in_flight_bytes else FITTED.starved)
                    )
                    if cost + soonest > least.cost:
                        continue
                    values = (split, row_tiles, row_warps, k_warps, depth, per_sm)
                    found = _laid_out(problem, clusters, passes, *values)
                    if found is None:
                        break
                    if problem.pdl:
                        cost += _overlap_cycles(target, found, groups)
                    yield cost, (), values


def _bounds(target: Target, problem: LinearProblem) -> Iterator[tuple[float, int, int]]:
    """What tiles of a warp take at least, with the best number of warps, by a cluster's size."""
    M, N, K = problem.M, problem.N, problem.K
    x_cycles = FITTED.x_byte * M * K * N / target.cu_num
    soonest = -FITTED.shares if problem.pdl else 0
    for split in PARAMS[0].values:
        most = most_clusters(target, split)
        stall = min(stalls[0][0] for stalls in _by_stall(-(-K // (CHUNK * split))))
        others = FITTED.exchange[split] + FITTED.warp * _FEWEST_WARPS
        for row_tiles in PARAMS[1].values:
            rows = 16 * row_tiles
            units = -(-N // (most * rows)) * rows / split * K / (512 * 4)
            computed = units * _issue_cycles(-(-M // 8), row_tiles) * stall
            cycles = (computed + x_cycles / rows + others) * ROUNDED_OFF
            yield cycles + soonest, split, row_tiles


def _issue_cycles(tiles_m: int, row_tiles: int) -> float:
    """Of an SM's scheduler, for 16 rows by 32 k."""
    return FITTED.unit + FITTED.unit_tile * tiles_m + FITTED.unit_share * tiles_m / row_tiles


def _stall(warps: int) -> float:
    return FITTED.stall.get(round(warps / 4), FITTED.many_stall)


@lru_cache(maxsize=1024)
def _by_stall(chunks: int) -> list[list[tuple[float, int]]]:
    """Warps that take turns along such a part of K, the best first, by group: each with its stall
    times what all together take beyond the part."""
    return [
        sorted(
            (_stall(row_warps * k_warps * per_sm) * up(chunks, k_warps) / chunks, k_warps)
            for k_warps in _K_WARPS[row_warps, per_sm]
        )
        for row_warps, per_sm in _GROUPS
    ]


def _overlap_cycles(target: Target, found: Layout, groups: int) -> float:
    """What a launch loses or wins beside others that start before it ends: see ``FITTED``."""
    alone = 2 * (found.shared_bytes + _STATIC_BYTES) > SHARED_BYTES
    return FITTED.alone * alone + _least_overlap(target, groups)


def _least_overlap(target: Target, groups: int) -> float:
    """Likewise, of one that does not fill an SM."""
    shares = target.cu_num < groups <= 1.5 * target.cu_num  # leaves the next one a place on an SM
    return -FITTED.shares * shares


_search = Search(
    PARAMS,
    _costs,
    most=_MOST_CANDIDATES,
    alike=("split", "row_tiles", "row_warps"),
    most_alike=_MOST_ALIKE,
)


def _yields(target: Target, problem: LinearProblem) -> str | None:
    if problem.M > _MOST_OWN_ROWS and WGMMA_F16.refusal(target, problem) is None:
        return f"wgmma_f16 is faster above M={_MOST_OWN_ROWS}"
    return None


def _defines(target: Target, problem: LinearProblem, config: Config) -> Mapping[str, int]:
    found = _layout(target, problem, config)
    return {
        **as_defines(config),
        "MX_TILES_M": found.tiles_m,
        "MX_OUT": DTYPE_CODES[problem.out_dtype],
        "MX_TURNS": found.turns,
        "MX_ONE_PASS": int(found.passes == 1),
        "MX_SHARED_BYTES": found.shared_bytes,
    }


def _geometry(target: Target, problem: LinearProblem, config: Config) -> Geometry:
    found = _layout(target, problem, config)
    return Geometry(
        grid=(found.clusters * config["split"], 1, 1),
        block=(config["row_warps"] * config["k_warps"] * 32, 1, 1),
        shared_bytes=found.shared_bytes,
        overlaps=problem.pdl,
        carveout_bytes=_carveout_bytes(found, config) if problem.after_quantize else 0,
    )


def _carveout_bytes(found: Layout, config: Config) -> int:
    """For as many workgroups as an SM is to hold: with more, those that find SMs busy with x would
    crowd the others."""
    return config["per_sm"] * (found.shared_bytes + _STATIC_BYTES)


def _parts(target: Target, problem: LinearProblem, config: Config) -> Parts:
    """A quantisation that finds room on the SMs whose next workgroup waits for it."""
    parts, found = quantised_meanwhile(target, problem, config), layout(target, problem, config)
    if not parts or found is None:
        return parts
    (_, quantisation), (_, linear) = parts
    beside = _carveout_bytes(found, config)
    return (
        ("quantize", replace(quantisation, carveout_bytes=beside)),
        ("linear", replace(linear, after_quantize=True)),
    )


def _scalars(target: Target, problem: LinearProblem, config: Config) -> tuple[int | float, ...]:
    found = _layout(target, problem, config)
    rows, clusters_with_one_more = divmod(problem.N, found.clusters)
    return (
        *matrix_scalars(problem),
        *(rows, clusters_with_one_more),
        *part_scalars(problem, config["split"]),
    )


MMA_RING = declare(
    "linear",
    "mma_ring",
    {"sm_90a": "linear/mma_ring_sm90.cu"},
    args=(
        *MATRIX_ARGS,
        Arg("cluster_rows", "i64"),
        Arg("clusters_with_one_more", "i32"),
        *PART_ARGS,
    ),
    defines=_defines,
    geometry=_geometry,
    scalars=_scalars,
    refusal=_refusal,
    search=_search,
    composed=replace(QUANTISED_MEANWHILE, parts=_parts),
    yields=_yields,
)
