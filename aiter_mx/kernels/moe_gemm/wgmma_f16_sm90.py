"""The Hopper kernel of the grouped GEMM for tens of tokens an expert, moe/wgmma_f16_sm90.cu."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice, product, zip_longest

from aiter_mx.kernels.moe_gemm.mma_ring_sm90 import MAX_SIDE, most_rows
from aiter_mx.kernels.moe_gemm.problem import (
    ARGS,
    MoeGemmProblem,
    sm90_defines,
)
from aiter_mx.kernels.moe_gemm.reblock_sm90 import declare_reblocking
from aiter_mx.kernels.search import by_distance
from aiter_mx.kernels.sm90 import CHUNK, GROUP_ROWS, SHARED_BYTES
from aiter_mx.kernels.spec import (
    Config,
    Geometry,
    Param,
    TensorMap,
    first_of,
    place_of,
)
from aiter_mx.target import Target

PARAMS = (
    Param(
        "col_tiles",
        (4, 6, 8, 10, 12, 14, 16),
        "tiles of 8 rows of x that a workgroup takes at a time",
    ),
    Param("groups", (2, 3), "warpgroups of a workgroup that add"),
    Param("tiles", (1, 2), "times 64 rows of w of each of these"),
    Param("depth", (2, 3, 4, 5, 6), "times 128 k of w that are in flight"),
    Param("slots", (0, 2, 3, 4), "times 128 k of x that are ready; 0: all of K, from tile to tile"),
    Param("ahead", (2, 3, 4, 6), "times 128 k of x that are on their way"),
)

_NAMES = tuple(param.name for param in PARAMS)
BRING_GROUPS = 3  # warpgroups that bring what others add
_ENTRIES = 4  # of the queue
_MOST_WEIGHT_ROWS = MAX_SIDE - 256  # of all experts, as boxes may start past the last
_MOST_ROWS = 1 << 25  # of an expert, whose tiles times what they cost are counted in 32 bits
_MOST_CANDIDATES = 24
_MOST_TILES = PARAMS[0].values[-1]
_TWO_TILES = {
    "col_tiles": (8, 10, 12),
    "groups": (2,),
    "slots": (2, 3),
    "depth": (3, 4, 5, 6),
    "ahead": (2, 3, 4),
}
"""What there is of two tiles, whose sums leave few registers."""
_SCALE_CHUNKS = 4  # times 128 k whose scales are loaded at once, where there are two tiles
_FEWEST_ROWS_OF_TWO = {0.25: 24, 0.05: 36, float("-inf"): 40}
"""Of an expert, by the share of time that is saved where two tiles fill rounds better."""
_MOST_ROWS_OF_TWO = 96  # of a block
_MOST_OF_THREE_GROUPS = 12  # tiles of x whose sums three warpgroups have registers for
_WHOLE_ROWS = 48  # of a block that is taken at once, however few rows an expert has on average
_FEW_ROWS = 24  # of a block, for which 48 columns have no more room for an expert's than 32


def _slots(problem: MoeGemmProblem, config: Config) -> int:
    return config["slots"] or problem.K // CHUNK


def layout_bytes(
    problem: MoeGemmProblem, config: Config, groups: int, slots: int, scale_chunks: int = 1
) -> int:
    """Of a workgroup: weights, x in fp16 and as fetched, factors, the queue, maxima, barriers.

    Args:
        problem: what is computed.
        config: columns, stages and chunks under way.
        groups: warpgroups that add.
        slots: times 128 k of x that are ready.
        scale_chunks: times 128 k whose scales are fetched at once.
    """
    depth, ahead, cols = config["depth"], config["ahead"], config["col_tiles"] * 8
    rows, passes = groups * GROUP_ROWS, -(-cols // 16)
    ring = depth * rows * (CHUNK + 8)
    ready = slots * 8 * (32 * cols + 16)
    scale_places = (ahead + 2 * (scale_chunks - 1)) // scale_chunks
    fetched = passes * 16 * (ahead * CHUNK + scale_places * scale_chunks * 4)
    barriers = 16 * (groups * depth + slots + ahead)
    total = ring + ready + fetched + frame_bytes(problem, cols, groups) + barriers
    return -(-total // 1024) * 1024  # weights are where a KiB begins


def frame_bytes(problem: MoeGemmProblem, cols: int, groups: int) -> int:
    """Of a workgroup: the queue with its barriers, and maxima of what is activated."""
    maxima = 32 * groups * (2 if problem.activation == "none" else cols)
    return maxima + _ENTRIES * (24 * cols + 32 + 16)


def shared_bytes(problem: MoeGemmProblem, config: Config) -> int:
    """Of a workgroup. Beside two tiles there are scales of w as they are, of this tile and the next
    one, twice as many as are loaded at once."""
    groups, tiles = config["groups"], config["tiles"]
    if tiles == 1:
        return layout_bytes(problem, config, groups, _slots(problem, config))
    scales = 2 * 2 * groups * tiles * GROUP_ROWS * _SCALE_CHUNKS * 4
    return layout_bytes(problem, config, groups, config["slots"], _SCALE_CHUNKS) + scales


def _exists(problem: MoeGemmProblem, config: Config) -> bool:
    """Whether the device code has such tiles, and registers for them."""
    if config["col_tiles"] > _MOST_OF_THREE_GROUPS and config["groups"] > 2:
        return False
    return config["tiles"] == 1 or (
        problem.K % (_SCALE_CHUNKS * CHUNK) == 0
        and all(config[name] in values for name, values in _TWO_TILES.items())
    )


def _fits(problem: MoeGemmProblem, config: Config) -> bool:
    return _exists(problem, config) and shared_bytes(problem, config) <= SHARED_BYTES


def _stays(problem: MoeGemmProblem, tiles: int) -> bool:
    """Whether there is room for all of x."""
    least = {"col_tiles": tiles, "groups": 3, "tiles": 1, "depth": 2, "slots": 0, "ahead": 2}
    return _fits(problem, least)


def refusal(target: Target, problem: MoeGemmProblem) -> str | None:
    if problem.K % CHUNK:
        return f"K={problem.K} is not a multiple of {CHUNK}"
    if problem.N == 0 or max(problem.N * problem.E, problem.K) > _MOST_WEIGHT_ROWS:
        return (
            f"E * N={problem.E * problem.N} and K={problem.K} must be from 1 to {_MOST_WEIGHT_ROWS}"
        )
    if problem.N > _MOST_ROWS:
        return f"N={problem.N} is more than {_MOST_ROWS}"
    return None


def rows_of_block(problem: MoeGemmProblem) -> float:
    """Hardly ever more: what an entry has no room for is another entry, which takes w anew."""
    rows = problem.rows_of_expert
    most: float = min(problem.block_m, rows + 4 * rows**0.5)  # of experts chosen at random
    return most


def _in_order(target: Target, problem: MoeGemmProblem) -> Iterator[Config]:
    """Those that fit, the ones that did well on an H200 first: of one tile and of two in turns,
    where experts have rows for two."""
    one: Iterator[Config] = islice(_of_one_tile(problem), _MOST_CANDIDATES)
    if problem.rows_of_expert < _fewest_rows_of_two(target, problem):
        yield from one
        return
    two = islice(_of_two_tiles(problem), _MOST_CANDIDATES)
    first = next(one, None)
    one = chain(() if first is None else (first,), one)
    stays = first is not None and first["slots"] == 0
    two_first = not stays and rows_of_block(problem) <= _MOST_ROWS_OF_TWO
    in_turn = zip_longest(two, one) if two_first else zip_longest(one, two)
    yield from (config for pair in in_turn for config in pair if config is not None)


def _fewest_rows_of_two(target: Target, problem: MoeGemmProblem) -> int:
    """Rows of an expert from which two tiles are faster: fewer where they save rounds of tiles."""

    def rounds(groups: int) -> int:
        return -(-problem.E * -(-problem.N // (groups * GROUP_ROWS)) // target.cu_num) * groups

    saved = 1 - rounds(4) / rounds(3)
    return next(rows for least, rows in _FEWEST_ROWS_OF_TWO.items() if saved >= least)


_configure = first_of(_in_order)


def candidates(target: Target, problem: MoeGemmProblem) -> list[Config]:
    return list(_in_order(target, problem))


def _fitting(problem: MoeGemmProblem, alike: Iterable[Sequence[int]]) -> Iterator[Config]:
    """What fits of the products of a parameter's values each, in the order of ``PARAMS``."""
    for values in product(*alike):
        config = dict(zip(_NAMES, values, strict=True))
        if _fits(problem, config):
            yield config


def _of_two_tiles(problem: MoeGemmProblem) -> Iterator[Config]:
    if problem.K % (_SCALE_CHUNKS * CHUNK):
        return
    rows = rows_of_block(problem)
    tiles = 10 if rows <= 80 else 12  # for fewer 8 are 1 % faster, and one more code object
    for cols, depths, slots, ahead in product(
        by_distance(_TWO_TILES["col_tiles"], lambda c: abs(c - tiles)),
        by_distance(_TWO_TILES["depth"], lambda d: abs(d - 4)),
        by_distance(_TWO_TILES["slots"], lambda s: abs(s - (3 if tiles == 10 else 2))),
        by_distance(_TWO_TILES["ahead"], lambda a: abs(a - 3)),
    ):
        yield from _fitting(problem, (cols, _TWO_TILES["groups"], (2,), depths, slots, ahead))


def _of_one_tile(problem: MoeGemmProblem) -> Iterator[Config]:
    rows = problem.block_m if problem.block_m <= _WHOLE_ROWS else rows_of_block(problem)
    tiles = next((t for t in PARAMS[0].values if rows <= t * 8), _MOST_TILES)
    plain = problem.activation == "none"
    if plain and rows_of_block(problem) > _FEW_ROWS and not _stays(problem, tiles):
        # Blocks are joined: where few experts have most of the rows, there are 8 % fewer tiles.
        tiles = max(tiles, 6)
    # 6 tiles leave the L1 more of an SM's memory with 3 stages, which is worth more than a fourth.
    depth, slots, ahead = {4: (4, 3, 3), 6: (3, 4, 4), 8: (4, 3, 3)}.get(tiles, (3, 3, 4))
    groups = 3 if tiles <= _MOST_OF_THREE_GROUPS else 2
    values = {param.name: param.values for param in PARAMS}
    ready = [values["slots"][:1]], by_distance(values["slots"][1:], lambda s: abs(s - slots))
    for cols, of_groups, kinds, of_depth, of_ahead in product(
        by_distance(values["col_tiles"], lambda c: abs(c - tiles)),
        by_distance(values["groups"], lambda g: g != groups),
        ready,
        by_distance(values["depth"], lambda d: abs(d - depth)),
        by_distance(values["ahead"], lambda a: abs(a - ahead)),
    ):
        for of_slots in kinds:
            yield from _fitting(problem, (cols, of_groups, (1,), of_depth, of_slots, of_ahead))


def _invariant(target: Target, problem: MoeGemmProblem) -> Config:
    """The configuration where this kernel has to serve few rows too: some did better on an H200
    there. In all of them K is added up in one order."""
    chosen = _configure(target, problem)
    if chosen["col_tiles"] > PARAMS[0].values[0]:
        return chosen
    better: dict[str, int] = {}
    if problem.activation == "none":
        better = {"groups": 3, "depth": 6, "slots": 3, "ahead": 3}
    elif problem.touched * -(-problem.N // (3 * GROUP_ROWS)) <= target.cu_num:
        better = {"groups": 2, "depth": 4, "slots": 0, "ahead": 4}
    other = {**chosen, **better}
    return other if _fits(problem, other) else chosen


def _yields(target: Target, problem: MoeGemmProblem) -> str | None:
    rows = problem.rows_of_expert
    if rows <= most_rows(problem):
        return f"mma_ring is faster for the {rows:.0f} rows of an expert"
    return None


def frame_defines(
    problem: MoeGemmProblem,
    config: Config,
    shared_bytes: int,
    groups: int,
    *,
    tiles: int = 1,
    long_scales: bool = True,
) -> dict[str, int]:
    """What csrc/moe/wgmma_sm90.h asks for.

    Args:
        problem: what is computed.
        config: columns, stages and chunks under way; slots of 0: all of x stays.
        shared_bytes: of a workgroup.
        groups: warpgroups that add.
        tiles: times 64 rows of w of each of these.
        long_scales: whether scales are copied for four chunks at once.
    """
    return {
        **sm90_defines(problem),
        "MX_COL_TILES": config["col_tiles"],
        "MX_GROUPS": groups,
        "MX_TILES": tiles,
        "MX_LONG_SCALES": int(long_scales),
        "MX_FP8": 0,
        "MX_DEPTH": config["depth"],
        "MX_SLOTS": _slots(problem, config),
        "MX_AHEAD": config.get("ahead", 1),
        "MX_RESIDENT": int(config["slots"] == 0),
        "MX_SHARED_BYTES": shared_bytes,
    }


def frame_geometry(target: Target, groups: int, shared_bytes: int) -> Geometry:
    """Of a kernel that has a workgroup, of so many warpgroups, on each SM."""
    return Geometry(
        grid=(target.cu_num, 1, 1),
        block=(groups * 4 * target.wave_size, 1, 1),
        shared_bytes=shared_bytes,
        overlaps=True,
    )


def _defines(target: Target, problem: MoeGemmProblem, config: Config) -> Mapping[str, int]:
    tiles = config["tiles"]
    shared = shared_bytes(problem, config)
    return frame_defines(
        *(problem, config, shared, config["groups"]), tiles=tiles, long_scales=tiles > 1
    )


def _geometry(target: Target, problem: MoeGemmProblem, config: Config) -> Geometry:
    if not _exists(problem, config):
        raise ValueError(f"{dict(config)} does not fit {problem}")
    groups = config["groups"] + BRING_GROUPS
    return frame_geometry(target, groups, shared_bytes(problem, config))


def weights_map(target: Target, problem: MoeGemmProblem, config: Config) -> TensorMap:
    halves = problem.activation != "none" and problem.layout == "halves"
    box_rows = GROUP_ROWS // 2 if halves else GROUP_ROWS
    return TensorMap(place_of(ARGS, "wq"), problem.E * problem.N, problem.K, box_rows, CHUNK)


WGMMA_F16 = declare_reblocking(
    "wgmma_f16",
    {"sm_90a": "moe/wgmma_f16_sm90.cu"},
    defines=_defines,
    geometry=_geometry,
    tensor_maps=(weights_map,),
    refusal=refusal,
    params=PARAMS,
    in_order=_in_order,
    candidates=candidates,
    invariant=_invariant,
    yields=_yields,
)
