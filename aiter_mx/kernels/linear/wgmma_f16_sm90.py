"""The Hopper kernel of the linear over wgmma and fp16, for up to 64 rows of x,
csrc/linear/wgmma_f16_sm90.cu."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from aiter_mx.kernels.declare import declare
from aiter_mx.kernels.linear.clusters_sm90 import ARGS, operand_maps, scalars
from aiter_mx.kernels.linear.fitted_sm90 import WgmmaF16
from aiter_mx.kernels.linear.problem import LinearProblem
from aiter_mx.kernels.search import ROUNDED_OFF, Costed, Least, Search
from aiter_mx.kernels.sm90 import CHUNK, SHARED_BYTES, SUM_BYTES, most_clusters
from aiter_mx.kernels.spec import (
    DTYPE_CODES,
    MAX_INT,
    Config,
    Geometry,
    Param,
    as_defines,
    where_it_fits,
)
from aiter_mx.target import Target

PARAMS = (
    Param("split", (1, 2, 3, 4, 5, 6, 7, 8), "workgroups of a cluster, which share K"),
    Param("rows", tuple(range(32, 257, 16)), "of w that a cluster takes at a time"),
    Param("depth", (1, 2, 3, 4, 5, 6, 7, 8), "times 128 k of them that are in flight"),
)

_ROWS = PARAMS[1].values

MAX_M = 64
_MOST_CANDIDATES = 16
_MOST_ALIKE = 2
_MOST_OF_OTHERS = 16  # rows of x up to which mma_ring is faster on one H200
_TILES_M = (8, 16, 32, 48, 64)
_MOST_CHUNKS = 16  # of a part of K, whose scales are in registers for a while
_MOST_CHUNKS_OF_MANY = 12  # of more than 16 rows of x
FITTED = WgmmaF16()
_MOST_APART = 6  # of 64 rows of x, which have room beside the ring before they are fp16
_BUSY_CHUNKS = 4  # of a pass of which sums are sent in the next, with them and with other work
_SHARED_BYTES = SHARED_BYTES - 1024  # static shared memory apart


class Layout(NamedTuple):
    """What the host works out of a configuration: see the constants of the kernel.

    Attributes:
        tile_m: rows of x with padding.
        clusters: how many share the rows of w.
        passes: in which the busiest cluster takes its rows.
        chunks: of K in the largest part.
        shared_bytes: of a workgroup.
        spare_bytes: of them, that only x takes, before it is fp16.
        late: whether the loop runs on from pass to pass, and sums are sent in the next.
    """

    tile_m: int
    clusters: int
    passes: int
    chunks: int
    shared_bytes: int
    spare_bytes: int
    late: bool


def _threads(rows: int) -> int:
    return max(-(-rows // 64) + 1, 4) * 128


def layout(target: Target, problem: LinearProblem, config: Config) -> Layout | None:
    """How a configuration is laid out, or None where it does not fit."""
    return _layout_of(target, problem, config["split"], config["rows"], config["depth"])


def _tile_m(problem: LinearProblem) -> int:
    return next(tile for tile in _TILES_M if tile >= problem.M)


def _shares(problem: LinearProblem, rows: int, most: int) -> tuple[int, int]:
    """How many clusters share the rows of w, and in how many passes, where so many run at once."""
    tiles = -(-problem.N // rows)
    passes = -(-tiles // most)
    return -(-tiles // passes), passes


def _layout_of(
    target: Target, problem: LinearProblem, split: int, rows: int, depth: int
) -> Layout | None:
    tile_m, chunks = _tile_m(problem), -(-problem.K // (CHUNK * split))
    clusters, passes = _shares(problem, rows, most_clusters(target, split))
    if chunks > _MOST_CHUNKS:
        return None
    sums = rows // 16 * tile_m // 8
    if passes > 1 and sums < split:
        return None  # who owns no sums would let the others send theirs too early
    inbox = -(-sums // split) * split * SUM_BYTES if split > 1 else 0
    late = passes > 1 and _runs_on(problem, split, rows, chunks, tile_m)
    ring, slot = depth * rows * CHUNK, CHUNK * tile_m
    shared_bytes = ring + chunks * 2 * slot + inbox + (1 + late) * rows * ((chunks + 1) | 1) * 4
    # x, before it is fp16, takes the ring's end and the inbox, or what else there is.
    left = _SHARED_BYTES - shared_bytes
    spare = min(max(chunks * slot - inbox, 0), left) // 1024 * 1024
    slots = (ring + inbox + spare) // slot
    if left < 0 or slots < min(chunks, _threads(rows) * 16 // slot):
        return None
    shared_bytes += spare
    return Layout(tile_m, clusters, passes, chunks, shared_bytes, spare, late)


def _runs_on(problem: LinearProblem, split: int, rows: int, chunks: int, tile_m: int) -> bool:
    """Whether the loop of several passes runs on from one to the next: kLate of the kernel."""
    whole = problem.K % (CHUNK * split) == 0
    return split > 1 and 64 < rows <= 128 and tile_m > 32 and chunks > _BUSY_CHUNKS and whole


_layout = where_it_fits(layout)


def _refusal(target: Target, problem: LinearProblem) -> str | None:
    if problem.M > MAX_M:
        return f"M={problem.M} is above {MAX_M}, the most rows of a tile of wgmma_f16"
    if problem.N > MAX_INT:
        return f"N={problem.N}: wgmma_f16 counts rows of w in 31 bits"
    # The shortest parts of K and rings: one of these fits where any configuration does.
    found = ((rows, _layout_of(target, problem, 8, rows, 1)) for rows in _ROWS)
    fits = _most_chunks(_tile_m(problem)) >= -(-problem.K // (CHUNK * 8))
    if not fits or not any(layout and _has_registers(layout, rows) for rows, layout in found):
        return f"M={problem.M}, K={problem.K}: wgmma_f16 has no room for an eighth of x"
    return None


def _has_registers(found: Layout, rows: int) -> bool:
    """Whether sums, x on its way and scales, which share the registers, spill none."""
    if found.tile_m <= _MOST_OF_OTHERS:
        return True
    most_chunks = 8 if rows > 192 else _MOST_CHUNKS_OF_MANY
    return found.chunks <= most_chunks and (rows <= 192 or found.tile_m <= 32)


def _costs(target: Target, problem: LinearProblem, least: Least) -> Iterator[Costed]:
    """A model of a call's time: see ``FITTED``."""
    tile_m = _tile_m(problem)
    of_group = FITTED.group + FITTED.group_row * tile_m
    for bound, split, rows in sorted(_bounds(target, problem, tile_m, of_group)):
        if bound > least.cost:
            break
        chunks, most = -(-problem.K // (CHUNK * split)), most_clusters(target, split)
        clusters, passes = _shares(problem, rows, most)
        groups = clusters * split
        rounds = -(-groups // target.cu_num)
        computed = chunks * rounds * (FITTED.chunk + -(-rows // 64) * of_group)
        exchanged = _exchange_cycles(split, rows, tile_m)
        started, cluster = _start_cycles(tile_m, chunks), _cluster_cycles(split)
        at_once = min(groups, target.cu_num)
        at_best = rounds * at_once * rows * chunks * CHUNK / FITTED.bytes_a_cycle
        for depth in PARAMS[2].values[: chunks * passes]:
            copied = at_best
            if passes > 1:  # copies go on while sums are exchanged, as far as the ring is long
                missing = max(0.0, 1 - depth * rows * CHUNK / FITTED.ring_bytes)
                copied *= 1 + FITTED.short_ring * missing
            a_pass = max(copied, computed + exchanged)
            last = max(copied, computed) + exchanged
            depths = _depth_cycles(depth, passes == 1 and tile_m == MAX_M and chunks > _MOST_APART)
            cost = started + (passes - 1) * a_pass + last + depths + cluster
            if cost <= least.cost:
                found = _layout_of(target, problem, split, rows, depth)
                if found is None or not _has_registers(found, rows):
                    break
                yield cost, (), (split, rows, depth)


def _bounds(
    target: Target, problem: LinearProblem, tile_m: int, of_group: float
) -> Iterator[tuple[float, int, int]]:
    """What clusters of each size and rows take at least, however short copies are."""
    for split in PARAMS[0].values:
        chunks, most = -(-problem.K // (CHUNK * split)), most_clusters(target, split)
        if chunks > _most_chunks(tile_m):
            continue
        started = (_start_cycles(tile_m, chunks) + _cluster_cycles(split)) * ROUNDED_OFF
        of_pass = (chunks * FITTED.chunk + FITTED.exchange) * ROUNDED_OFF
        of_64_rows = chunks * of_group * ROUNDED_OFF
        of_row = FITTED.exchange_sum * tile_m * ROUNDED_OFF if split > 1 else 0.0
        for rows in _ROWS:
            passes = -(-problem.N // (rows * most))
            a_pass = of_pass + -(-rows // 64) * of_64_rows + rows * of_row
            yield started + passes * a_pass, split, rows


def _most_chunks(tile_m: int) -> int:
    return _MOST_CHUNKS if tile_m <= _MOST_OF_OTHERS else _MOST_CHUNKS_OF_MANY


def _start_cycles(tile_m: int, chunks: int) -> float:
    return FITTED.start + FITTED.start_row * tile_m * chunks


def _exchange_cycles(split: int, rows: int, tile_m: int) -> float:
    return FITTED.exchange + (FITTED.exchange_sum * rows * tile_m if split > 1 else 0)


def _depth_cycles(depth: int, lent: bool) -> float:
    """What a ring costs that is too short, or too long, also one whose end x takes at first."""
    enough, most = (3, 3) if lent else (4, 5)
    return FITTED.shallow * max(0, enough - depth) + FITTED.deep * max(0, depth - most)


def _cluster_cycles(split: int) -> float:
    return FITTED.cluster.get(split, FITTED.other_cluster)


_search = Search(
    PARAMS,
    _costs,
    most=_MOST_CANDIDATES,
    alike=("split", "rows"),
    most_alike=_MOST_ALIKE,
)


def _yields(target: Target, problem: LinearProblem) -> str | None:
    if problem.M <= _MOST_OF_OTHERS:
        return f"mma_ring is faster up to M={_MOST_OF_OTHERS}"
    return None


def _defines(target: Target, problem: LinearProblem, config: Config) -> Mapping[str, int]:
    found = _layout(target, problem, config)
    return {
        **as_defines(config),
        "MX_TILE_M": found.tile_m,
        "MX_OUT": DTYPE_CODES[problem.out_dtype],
        "MX_CHUNKS": found.chunks,
        "MX_ONE_PASS": int(found.passes == 1),
        "MX_WHOLE": int(problem.K % (CHUNK * config["split"]) == 0),
        "MX_LATE": int(found.late),
        "MX_SPARE": found.spare_bytes,
        "MX_SHARED_BYTES": found.shared_bytes,
    }


def _geometry(target: Target, problem: LinearProblem, config: Config) -> Geometry:
    found = _layout(target, problem, config)
    return Geometry(
        grid=(found.clusters * config["split"], 1, 1),
        block=(_threads(config["rows"]), 1, 1),
        shared_bytes=found.shared_bytes,
        overlaps=problem.pdl,
    )


def _box_rows(target: Target, problem: LinearProblem, config: Config) -> tuple[int, int]:
    return config["rows"], _tile_m(problem)


WGMMA_F16 = declare(
    "linear",
    "wgmma_f16",
    {"sm_90a": "linear/wgmma_f16_sm90.cu"},
    args=ARGS,
    defines=_defines,
    geometry=_geometry,
    scalars=scalars,
    tensor_maps=operand_maps(_box_rows),
    refusal=_refusal,
    search=_search,
    yields=_yields,
)
