"""The Hopper kernel of the grouped GEMM for few tokens an expert, csrc/moe/mma_ring_sm90.cu."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain, islice, product

from aiter_mx.kernels.moe_gemm.problem import (
    MoeGemmProblem,
    sm90_defines,
)
from aiter_mx.kernels.moe_gemm.reblock_sm90 import declare_reblocking
from aiter_mx.kernels.sm90 import CHUNK, REGISTERS, RESERVED_BYTES, SHARED_BYTES
from aiter_mx.kernels.spec import (
    Config,
    Geometry,
    Param,
    as_defines,
)
from aiter_mx.target import Target

PARAMS = (
    Param("row_tiles", (1, 2, 3, 4), "tiles of 16 rows of w that a workgroup takes at a time"),
    Param("col_tiles", (1, 2, 4), "tiles of 8 rows of x that it takes at a time"),
    Param("k_warps", (1, 2, 3, 4, 6, 8, 12), "warps of a workgroup, which share K"),
    Param("depth", (2, 3, 4, 6, 8), "times 128 k of a warp that are in its ring"),
    Param("groups", (1, 2, 3, 4, 6, 8), "workgroups of an SM"),
)

_NAMES = tuple(param.name for param in PARAMS)
_ACTIVATED_TILES = 4  # hold the gate and up rows of a block of 32 features
_PIECE = 64  # ids of a block that are looked up at a time
MAX_SIDE = 1 << 31  # N and K, of which products alone are 64 bits wide
_MAX_ITEMS = 1 << 31
_MOST_CANDIDATES = 40
# Of an expert, measured on an H200: of what is activated, and else of more experts and of few.
_MOST_ROWS, _MOST_ROWS_PLAIN, _MOST_ROWS_OF_FEW_EXPERTS, _FEW_EXPERTS = 12, 8, 10.8, 8
# Where K is no multiple of a chunk, which wgmma_f16 refuses: of few weights, and of many.
_MOST_ROWS_UNEVEN, _MOST_ROWS_OF_MANY, _MANY_WEIGHTS = 17, 16, 120_000_000


def most_rows(problem: MoeGemmProblem) -> float:
    """Rows of an expert up to which no other kernel of ours is faster."""
    if problem.K % CHUNK == 0:
        if problem.activation != "none":
            return _MOST_ROWS
        return _MOST_ROWS_OF_FEW_EXPERTS if problem.E <= _FEW_EXPERTS else _MOST_ROWS_PLAIN
    is_many = problem.E * problem.N * problem.K >= _MANY_WEIGHTS
    return _MOST_ROWS_OF_MANY if is_many else _MOST_ROWS_UNEVEN


def shared_bytes(problem: MoeGemmProblem, config: Config) -> int:
    """Of a workgroup: its warps' rings, partial sums and queues."""
    rows, cols, depth = config["row_tiles"] * 16, config["col_tiles"] * 8, config["depth"]
    scale_bytes = 4 if problem.K % CHUNK == 0 else 8
    slot = (rows + cols) * (CHUNK + scale_bytes)
    entry = cols * 8 + 16
    of_warp = depth * slot + cols * (rows + 4) * 4 + (depth + 1) * entry
    cluster = _cluster(problem, config)
    maxima = 16 + 2 * cols * 8 * 4 if cluster > 1 else 0
    return config["k_warps"] * of_warp + maxima


def _cluster(problem: MoeGemmProblem, config: Config) -> int:
    """Workgroups that have a block of 32 features of an activated result together."""
    return 1 if problem.activation == "none" else _ACTIVATED_TILES // config["row_tiles"]


def _items(problem: MoeGemmProblem, config: Config) -> int:
    pieces = problem.blocks * -(-problem.block_m // _PIECE)
    return pieces * -(-problem.N // (config["row_tiles"] * 16))


def _refusal(target: Target, problem: MoeGemmProblem) -> str | None:
    if max(problem.N, problem.K) >= MAX_SIDE:
        return f"N={problem.N} and K={problem.K} must be below {MAX_SIDE}"
    if _items(problem, {"row_tiles": 1}) >= _MAX_ITEMS:
        return f"{problem.blocks} blocks by N={problem.N} are more tiles than 31 bits count"
    return None


def _shares_blocks(problem: MoeGemmProblem, config: Config) -> bool:
    """Whether clusters have one block of 32 features, and of those that exchange maxima each
    workgroup a thread for every four of its features of each row of x."""
    if problem.activation == "none":
        return True
    cluster, row_tiles = _cluster(problem, config), config["row_tiles"]
    enough = config["col_tiles"] * 8 * row_tiles * 2 <= config["k_warps"] * 32
    return cluster * row_tiles == _ACTIVATED_TILES and (cluster == 1 or enough)


def fits(problem: MoeGemmProblem, config: Config) -> bool:
    """Whether an SM has room for a configuration's workgroups, and these for the problem."""
    chunks = -(-problem.K // CHUNK)
    threads = config["k_warps"] * 32 * config["groups"]
    registers = 56 + 10 * config["row_tiles"] * (2 + config["col_tiles"])
    return (
        config["k_warps"] <= chunks
        and _shares_blocks(problem, config)
        and (shared_bytes(problem, config) + RESERVED_BYTES) * config["groups"] <= SHARED_BYTES
        and threads <= 2048
        and threads * registers <= REGISTERS
    )


def _rounds(tiles: int, workgroups: int) -> int:
    """The most tiles of a workgroup."""
    return -(-tiles // workgroups)


def _preferred(target: Target, problem: MoeGemmProblem) -> list[Config]:
    """Configurations that did well on an H200, the best first; not all fit."""
    rows = problem.rows_of_expert
    most_cols = -(-min(problem.block_m, _PIECE) // 8)
    is_uneven = problem.K % CHUNK
    # Two tiles of ids are no slower for few, but where K is uneven. Some more rows than half of
    # them still leave an expert chosen at random within them.
    few = (1, 2) if is_uneven else (2,)
    col_tiles = next((c for c in few if rows <= 5 * c or most_cols <= c), 4)
    plain, is_long = problem.activation == "none", problem.K >= 16 * CHUNK
    row_tiles = 3 if plain and not (is_uneven and is_long) else 4
    if is_long:
        shapes = [(row_tiles, 8, 2, 1), (row_tiles, 4, 2, 2), (4, 8, 2, 1), (2, 4, 2, 2)]
        tiles = min(problem.routed, problem.E) * -(-problem.N // (row_tiles * 16))
        if not plain:
            if tiles <= target.cu_num:  # two workgroups for each block of features, or four
                shapes = [(2, 6, 2, 2), (2, 8, 2, 2), *shapes, (1, 8, 2, 2)]
            elif _rounds(tiles, 2 * target.cu_num) * 2 <= _rounds(tiles, target.cu_num):
                shapes.insert(0, shapes.pop(1))
        elif tiles <= target.cu_num:
            shapes.insert(0, (row_tiles, 12, 2, 1))
        elif tiles <= 2 * target.cu_num:
            shapes.insert(0, (row_tiles, 6, 2, 2))
        if plain and is_uneven and col_tiles == 1 and problem.num_experts in (0, problem.E):
            shapes.insert(0, (3, 6, 2, 2))  # of all experts' few rows, as tables have it
    else:
        shapes = [(row_tiles, 2, 3, 4), (row_tiles, 2, 2, 4), (row_tiles, 2, 2, 3), (2, 2, 2, 4)]
    shapes += [(row_tiles, 2, 2, 2), (row_tiles, 1, 2, 4), (row_tiles, 1, 2, 2), (4, 1, 2, 1)]
    names = ("row_tiles", "k_warps", "depth", "groups")
    return [
        {"col_tiles": cols, **dict(zip(names, shape, strict=True))}
        for cols in dict.fromkeys((col_tiles, 2, 1))
        for shape in shapes
    ]


def _in_order(target: Target, problem: MoeGemmProblem) -> Iterator[Config]:
    """What fits: the preferred ones first, then what is near them."""
    seen = set()
    for config in chain(_preferred(target, problem), _of_clusters(target, problem), _near(problem)):
        values = tuple(config[name] for name in _NAMES)
        if values not in seen:
            seen.add(values)
            if fits(problem, config):
                yield config


def _near(problem: MoeGemmProblem) -> Iterator[Config]:
    most_cols = -(-min(problem.block_m, _PIECE) // 8)
    least_rows = 2 if problem.activation == "none" else _ACTIVATED_TILES
    for values in product(*(param.values for param in PARAMS)):
        row_tiles, col_tiles, k_warps, depth, groups = values
        shaped = row_tiles >= least_rows and col_tiles <= max(2, most_cols)
        if shaped and depth <= 3 and 4 <= k_warps * groups <= 12:
            yield dict(zip(_NAMES, values, strict=True))


def _candidates(target: Target, problem: MoeGemmProblem) -> list[Config]:
    return list(islice(_in_order(target, problem), _MOST_CANDIDATES))


def _of_clusters(target: Target, problem: MoeGemmProblem) -> list[Config]:
    """Of a block of 32 activated features for two workgroups or four, where these are few."""
    blocks = min(problem.routed, problem.E) * -(-problem.N // (_ACTIVATED_TILES * 16))
    if problem.activation == "none" or blocks > 3 * target.cu_num:
        return []
    names = ("row_tiles", "k_warps", "depth", "groups")
    shapes = [(2, 6, 2, 2), (2, 4, 2, 3), (2, 4, 2, 2), (2, 8, 2, 2), (1, 4, 2, 4), (1, 8, 2, 2)]
    return [{"col_tiles": 1, **dict(zip(names, shape, strict=True))} for shape in shapes]


def _yields(target: Target, problem: MoeGemmProblem) -> str | None:
    rows = problem.rows_of_expert
    if rows <= most_rows(problem):
        return None
    other = "grouped" if problem.K % CHUNK else "wgmma_f16"
    return f"{other} is faster for the {rows:.0f} rows of an expert"


def _defines(target: Target, problem: MoeGemmProblem, config: Config) -> Mapping[str, int]:
    return {
        **sm90_defines(problem),
        **as_defines(config),
        "MX_WHOLE": int(problem.K % CHUNK == 0),
        "MX_SHARED_BYTES": shared_bytes(problem, config),
    }


def _geometry(target: Target, problem: MoeGemmProblem, config: Config) -> Geometry:
    chunks = problem.K // CHUNK
    if problem.K % CHUNK == 0 and config["k_warps"] > chunks:
        raise ValueError(
            f"{dict(config)} does not fit {problem}: k_warps must be at most {chunks}, as each "
            f"warp has {CHUNK} k or more"
        )
    cluster = _cluster(problem, config)
    groups = min(target.cu_num * config["groups"], _items(problem, config)) // cluster * cluster
    return Geometry(
        grid=(max(cluster, groups), 1, 1),
        block=(config["k_warps"] * target.wave_size, 1, 1),
        shared_bytes=shared_bytes(problem, config),
        overlaps=True,
    )


MMA_RING = declare_reblocking(
    "mma_ring",
    {"sm_90a": "moe/mma_ring_sm90.cu"},
    defines=_defines,
    geometry=_geometry,
    refusal=_refusal,
    params=PARAMS,
    in_order=_in_order,
    candidates=_candidates,
    yields=_yields,
)
