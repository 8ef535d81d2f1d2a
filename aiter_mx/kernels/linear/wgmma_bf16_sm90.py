"""The Hopper linear for tens to thousands of rows, csrc/linear/wgmma_bf16_sm90.cu."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from aiter_mx.kernels.declare import declare
from aiter_mx.kernels.linear.clusters_sm90 import w_map
from aiter_mx.kernels.linear.fitted_sm90 import WGMMA_BF16_PAIRS, WgmmaBf16
from aiter_mx.kernels.linear.problem import (
    POINTERS,
    LinearProblem,
    matrix_scalars,
)
from aiter_mx.kernels.search import ROUNDED_OFF, Costed, Least, Search
from aiter_mx.kernels.sm90 import CHUNK, GROUP_ROWS, SHARED_BYTES, most_clusters, up
from aiter_mx.kernels.spec import (
    DTYPE_CODES,
    MAX_INT,
    Arg,
    Config,
    Geometry,
    Module,
    Param,
    TensorMap,
    where_it_fits,
)
from aiter_mx.target import Target

PARAMS = (
    Param("tile_m", (96, 128, 160, 192, 256), "tokens of a tile"),
    Param("tile_n", (64, 128, 192), "features of a CTA, 64 for each warpgroup that multiplies"),
    Param("split", (1, 2, 3, 4, 6, 8), "CTAs of a cluster, which share K, where none stay"),
    Param("pairs", tuple(range(67)), "of CTAs that stay and share all tiles, or 0"),
)

MIN_M = 65
_PAIR = 2  # CTAs of a cluster
_MOST_TOKENS = {64: 256, 128: 256, 192: 128}  # of a tile, by its features: registers for sums
_UNIT = 64  # k that are multiplied at a time
_FLAG_BYTES = 2048  # barriers, and which tokens and features have scales that bf16 does not cover
_COUNTERS = 1024  # of parts of tiles that have ended, see ``XWorkspace``
_MOST_OWN_M = 2048  # without a table
FITTED, FITTED_PAIRS = WgmmaBf16(), WGMMA_BF16_PAIRS


class Layout(NamedTuple):
    """What the host works out of a configuration: see the constants of the kernel.

    Attributes:
        x_stages: stages of x in bf16.
        w_stages: stages of w.
        shared_bytes: shared memory of a CTA.
        clusters: that are launched.
        rounds: of whole tiles, of which each pair computes one.
        part: chunks of the other tiles that each pair computes,
        parts_with_one_more: and how many have one more.
    """

    x_stages: int
    w_stages: int
    shared_bytes: int
    clusters: int
    rounds: int = 0
    part: int = 0
    parts_with_one_more: int = 0


def _chunks(problem: LinearProblem) -> int:
    return -(-problem.K // CHUNK)


def layout(target: Target, problem: LinearProblem, config: Config) -> Layout | None:
    """How a configuration is laid out, or None where it does not fit."""
    tile_m, tile_n, split, pairs = (config[p.name] for p in PARAMS)
    chunks = _chunks(problem)
    if tile_m > _MOST_TOKENS[tile_n] or split > chunks:
        return None
    if pairs and (split > 1 or tile_n > 128 or pairs > target.cu_num // _PAIR):
        return None
    tiles = _tiles(problem, tile_m, tile_n * (_PAIR if pairs else 1))
    if pairs > tiles * chunks:
        return None
    most = SHARED_BYTES - _FLAG_BYTES
    x, w = tile_m * _UNIT * 2, tile_n * CHUNK
    chunks_ahead = min(most // (2 * x + w), 6)  # of both operands
    x_stages, w_stages = 2 * chunks_ahead, chunks_ahead
    w_stages += min((most - x_stages * x - w_stages * w) // w, 2)  # it comes from further away
    x_stages += min((most - x_stages * x - w_stages * w) // x, 2)
    stages = x_stages * x + w_stages * w
    sums = 0 if pairs else tile_m * (tile_n + 4) * 4
    found = Layout(x_stages, w_stages, max(stages, sums) + _FLAG_BYTES, pairs or tiles)
    if not pairs or tiles % pairs == 0:
        return found._replace(rounds=tiles // pairs if pairs else 0)
    rounds = max(tiles // pairs - 1, 0)
    part, parts_with_one_more = divmod((tiles - rounds * pairs) * chunks, pairs)
    return found._replace(rounds=rounds, part=part, parts_with_one_more=parts_with_one_more)


def _tiles(problem: LinearProblem, tile_m: int, features: int) -> int:
    return -(-problem.M // tile_m) * -(-problem.N // features)


_layout = where_it_fits(layout)


def _refusal(target: Target, problem: LinearProblem) -> str | None:
    if problem.M < MIN_M:
        return f"M={problem.M} is below {MIN_M}: the other kernels have tiles of so few rows"
    for name in ("M", "N", "K"):
        if (value := getattr(problem, name)) > MAX_INT:
            return f"{name}={value}: wgmma_bf16 counts it in 31 bits"
    tiles = _tiles(problem, PARAMS[0].values[0], PARAMS[1].values[0])
    if tiles * _chunks(problem) > MAX_INT:
        return f"there are up to {tiles} tiles, and the chunks of K of all are counted in 31 bits"
    return None


def _unit_cycles(of: WgmmaBf16, tile_m: int, tile_n: int, copied: float) -> float:
    """What 64 k of a tile take, of which so many bytes are copied."""
    computed = tile_n // GROUP_ROWS * max(of.group, of.product * tile_m)
    both: float = (computed**of.together + (copied / of.bytes_a_cycle) ** of.together) ** (
        1 / of.together
    )
    return both


def _costs(target: Target, problem: LinearProblem, least: Least) -> Iterator[Costed]:
    """A model of a call's time beyond its start, see ``FITTED``."""
    for tile_m, tile_n in product(PARAMS[0].values, PARAMS[1].values):
        if tile_m <= _MOST_TOKENS[tile_n]:
            yield from _costs_of_splits(target, problem, least, tile_m, tile_n)
            if tile_n <= 128:
                yield from _costs_of_pairs(target, problem, least, tile_m, tile_n)


def _costs_of_splits(
    target: Target, problem: LinearProblem, least: Least, tile_m: int, tile_n: int
) -> Iterator[Costed]:
    chunks, of = _chunks(problem), FITTED
    unit = _unit_cycles(of, tile_m, tile_n, (tile_m * 2 + tile_n) * _UNIT)
    clusters = _tiles(problem, tile_m, tile_n)
    if clusters / target.cu_num * chunks * 2 * unit * ROUNDED_OFF > least.cost:
        return
    of_tile = of.tile + tile_m * tile_n * 4 / of.stored
    for split in PARAMS[2].values:
        if split > chunks:
            return
        rounds = -(-clusters // most_clusters(target, split))
        exchange = 0.0
        if split > 1:
            received = tile_m * tile_n * 4 * (split - 1) / split
            exchange = received / of.exchanged + of.exchange
        cycles = rounds * (-(-chunks // split) * 2 * unit + of_tile + exchange)
        yield cycles, (), (tile_m, tile_n, split, 0)


def _costs_of_pairs(
    target: Target, problem: LinearProblem, least: Least, tile_m: int, tile_n: int
) -> Iterator[Costed]:
    chunks, of = _chunks(problem), FITTED_PAIRS
    unit = _unit_cycles(of, tile_m, tile_n, (tile_m + tile_n) * _UNIT)
    tiles, most = _tiles(problem, tile_m, _PAIR * tile_n), target.cu_num // _PAIR
    if tiles / most * chunks * 2 * unit * ROUNDED_OFF > least.cost:
        return
    of_tile, sums = of.tile + tile_m * tile_n * 4 / of.stored, tile_m * tile_n * 4
    few = min(most, tiles * chunks)
    for pairs in {few, tiles // -(-tiles // most) if tiles >= most else tiles * (most // tiles)}:
        if pairs > tiles * chunks:
            continue
        rounds, left = divmod(tiles, pairs)
        own, segments, parts, others = rounds * chunks, rounds, 0, 0
        if left:
            rounds = max(rounds - 1, 0)
            part, more = divmod((tiles - rounds * pairs) * chunks, pairs)
            own, segments = rounds * chunks + part + (more > 0), rounds + 2
            parts, others = 2, 1
            if part < chunks:
                even = more == 0 and chunks % part == 0
                others = chunks // part - even
                parts, segments = (1, rounds + 1) if even else (2, rounds + 2)
            elif part > chunks:
                segments += 1
        join = parts * of.exchange + others * sums / of.exchanged
        yield 2 * own * unit + segments * of_tile + join, (), (tile_m, tile_n, 1, pairs)


_search = Search(PARAMS, _costs, most=12)


def rows_chosen_for(M: int) -> int:
    """The most rows of those that have one configuration, without a table: few code objects serve
    all numbers of rows."""
    return up(M, 32 if M <= 160 else 64 if M <= 512 else 256 if M <= 1024 else 512)


def _configure(target: Target, problem: LinearProblem) -> Config:
    chosen = _search.best(target, replace(problem, M=rows_chosen_for(problem.M)))
    if not chosen["pairs"]:
        return chosen
    costs = _costs_of_pairs(target, problem, Least(), chosen["tile_m"], chosen["tile_n"])
    *_, pairs = min(costs)[2]
    return {**chosen, "pairs": pairs}


def _candidates(target: Target, problem: LinearProblem) -> list[Config]:
    """The choice for this number of rows and those near it, then the best for this one alone."""
    chosen = _configure(target, problem)
    others = [found for found in _search.candidates(target, problem) if found != chosen]
    return [chosen, *others]


def _yields(target: Target, problem: LinearProblem) -> str | None:
    if problem.M <= _MOST_OWN_M:
        return None
    return "persistent has the larger tiles, and enough of them for all SMs"


def _defines(target: Target, problem: LinearProblem, config: Config) -> Mapping[str, int]:
    found = _layout(target, problem, config)
    return {
        "MX_TILE_M": config["tile_m"],
        "MX_GROUPS": config["tile_n"] // GROUP_ROWS,
        "MX_SPLIT": config["split"],
        "MX_PAIRS": int(config["pairs"] > 0),
        "MX_X_STAGES": found.x_stages,
        "MX_W_STAGES": found.w_stages,
        "MX_OUT": DTYPE_CODES[problem.out_dtype],
        "MX_SHARED_BYTES": found.shared_bytes,
    }


def _geometry(target: Target, problem: LinearProblem, config: Config) -> Geometry:
    found = _layout(target, problem, config)
    return Geometry(
        grid=(found.clusters * (_PAIR if config["pairs"] else config["split"]), 1, 1),
        block=(128 * (config["tile_n"] // GROUP_ROWS + 1), 1, 1),
        shared_bytes=found.shared_bytes,
        overlaps=True,  # with the launch that expands x
    )


def _scalars(target: Target, problem: LinearProblem, config: Config) -> tuple[int | float, ...]:
    found = _layout(target, problem, config)
    return *matrix_scalars(problem), found.rounds, found.part, found.parts_with_one_more


def _weights(target: Target, problem: LinearProblem, config: Config) -> TensorMap:
    return w_map(problem, config["tile_n"])


def _units(problem: LinearProblem, config: Config) -> int:
    """Of x, in all tiles of tokens, each of which a CTA of the launch ahead expands."""
    return -(-problem.M // config["tile_m"]) * -(-problem.K // _UNIT)


def _workspace_bytes(target: Target, problem: LinearProblem, config: Config) -> int:
    """See ``XWorkspace`` in csrc/linear/wgmma_bf16_x_sm90.h."""
    units, tile_m = _units(problem, config), config["tile_m"]
    found = _layout(target, problem, config)
    parts = 2 * config["pairs"] if found.part or found.parts_with_one_more else 0
    return (
        4 * _COUNTERS
        + up(4 * units, 1024)
        + units * tile_m * _UNIT * 2
        + parts * _PAIR * tile_m * config["tile_n"] * 4
    )


def _x_defines(target: Target, problem: LinearProblem, config: Config) -> Mapping[str, int]:
    return {}


def _x_scalars(target: Target, problem: LinearProblem, config: Config) -> tuple[int | float, ...]:
    return problem.M, problem.K, config["tile_m"]


def _x_geometry(target: Target, problem: LinearProblem, config: Config) -> Geometry:
    return Geometry(grid=(_units(problem, config), 1, 1), block=(256, 1, 1), overlaps=problem.pdl)


_POINTERS = (*POINTERS, Arg("workspace", "pointer", "rw"))
EXPAND_X = Module(
    {"sm_90a": "linear/wgmma_bf16_x_sm90.cu"},
    "aiter_mx_linear_wgmma_bf16_x",
    (*_POINTERS, Arg("M", "i64"), Arg("K", "i64"), Arg("tile_tokens", "i32")),
    _x_defines,
    _x_geometry,
    _x_scalars,
)


WGMMA_BF16 = declare(
    "linear",
    "wgmma_bf16",
    {"sm_90a": "linear/wgmma_bf16_sm90.cu"},
    args=(
        *_POINTERS,
        *(Arg(name, "i64") for name in ("M", "N", "K")),
        Arg("bias_kind", "i32"),
        *(Arg(name, "i32") for name in ("rounds", "part", "parts_with_one_more")),
    ),
    defines=_defines,
    geometry=_geometry,
    scalars=_scalars,
    tensor_maps=(_weights,),
    before=(EXPAND_X,),
    workspace_bytes=_workspace_bytes,
    refusal=_refusal,
    params=PARAMS,
    configure=_configure,
    candidates=_candidates,
    yields=_yields,
)
