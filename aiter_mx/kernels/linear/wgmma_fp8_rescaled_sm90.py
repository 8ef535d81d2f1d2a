"""The Hopper linear over fp8 with a scale for 128 k, csrc/linear/wgmma_fp8_rescaled_sm90.cu.

A launch ahead, csrc/linear/rescale_sm90.h, puts four blocks of 32 k under one scale where none of
them loses by it what a result would show; other blocks keep theirs. What it does so by, and what
multiplies, rescaling_sm90.h and rescaled_product_sm90.h, grouped products have too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, lru_cache
from math import inf
from typing import Any, NamedTuple

import numpy as np

from aiter_mx.kernels.declare import declare
from aiter_mx.kernels.linear.fitted_sm90 import WGMMA_FP8_RESCALED as FITTED
from aiter_mx.kernels.linear.many_rows_sm90 import Array, sharers_that_suit, sharers_that_suit_each
from aiter_mx.kernels.linear.problem import (
    POINTERS,
    QUANTISED_MEANWHILE,
    LinearProblem,
    Sizes,
)
from aiter_mx.kernels.linear.wgmma_bf16_layout_sm90 import Shares, chunks_of, shares
from aiter_mx.kernels.linear.wgmma_bf16_sm90 import EXPAND_X
from aiter_mx.kernels.search import Costed, Least, Search
from aiter_mx.kernels.sm90 import CHUNK, up
from aiter_mx.kernels.spec import (
    DTYPE_CODES,
    MAX_INT,
    Arg,
    Config,
    Geometry,
    Module,
    Param,
    TensorMap,
    numbers,
    place_of,
)
from aiter_mx.target import Target

PARAMS = (Param("ctas", tuple(range(1, 133)), "that stay and share all tiles"),)

ACCUMULATION_ERROR = 2.0**-9
"""Of the sum of the magnitudes of 128 products, of random payloads, which are added up with about
14 bits; MOST_ACCUMULATION_ERROR bounds it for any: 127 of them may be cut off beside the first."""
MOST_ACCUMULATION_ERROR = 2.0**-6
RESCALING_ERROR = 2.0**-11
"""Of the largest magnitude of its block of 32, what an element may change by under another scale:
half of e4m3's least number, 2^-10, where the largest is still 2.0."""

_ROWS = 128  # of a block of an operand, and of x and of w in a tile
_STAGES = 6  # what shared memory has room for
_SHARED_BYTES = _STAGES * 2 * _ROWS * CHUNK
_THREADS, _RESCALE_THREADS = 3 * 128, 256
_COUNTERS = 1024  # of parts of tiles that have ended
_MOST_BEYOND_X = 64 << 20  # bytes of a workspace, beside x in bf16
_MOST_CTAS = PARAMS[0].values[-1]
_PART_BYTES = 2 * _MOST_CTAS * _ROWS * _ROWS * 4  # of sums: two parts of tiles of each
_MOST_PARTS = 3  # of a tile that is shared, where whole tiles go before
MIN_OWN_M = 257  # without a table
_MILLION = 1e6


class Slice(NamedTuple):
    """Features of w that are rescaled and multiplied at a time, as their copy has to find room."""

    first: int
    features: int

    def blocks(self, M: int) -> int:
        """Of rows, of x and of these."""
        return -(-M // _ROWS) + -(-self.features // _ROWS)

    def tiles(self, M: int) -> int:
        return -(-M // _ROWS) * -(-self.features // _ROWS)


def _words_of(K: int, blocks: int) -> int:
    return -(-K // CHUNK) * up(blocks * (_ROWS + 2), 4) + _COUNTERS


def _most_blocks(M: Any, K: int) -> Any:
    """Of w beside x, of a number of rows or an array of them, that a call's workspace has room
    for."""
    of_block = _ROWS * K + 4 * -(-K // CHUNK) * (_ROWS + 2)
    others = _PART_BYTES + 4 * _words_of(K, 1)  # more than rounding words up takes
    return (2 * M * K + _MOST_BEYOND_X - others) // of_block - -(-M // _ROWS)


@lru_cache(maxsize=1024)
def slices(M: int, N: int, K: int) -> tuple[Slice, ...]:
    """What w is rescaled by: as few as there is room for."""
    across = -(-N // _ROWS)
    count = -(-across // max(_most_blocks(M, K), 1))
    features = -(-across // count) * _ROWS
    return tuple(Slice(first, min(features, N - first)) for first in range(0, N, features))


def _workspace_bytes(target: Target, problem: LinearProblem, config: Config) -> int:
    """See ``RescaledOperands`` in csrc/linear/rescaled_sm90.h."""
    blocks = slices(problem.M, problem.N, problem.K)[0].blocks(problem.M)
    return blocks * _ROWS * problem.K + 4 * _words_of(problem.K, blocks) + _PART_BYTES


def _refusal(target: Target, problem: LinearProblem) -> str | None:
    M, N, K = problem.M, problem.N, problem.K
    if target.exact_sums:
        return "the fp8 matrix unit adds with about 14 bits"
    if problem.out_dtype == "fp32":
        return "the fp8 matrix unit adds with about 14 bits, which fp32 results would show"
    if _most_blocks(M, K) < 1:
        return f"K={K}: 128 rows of w take more room than a call may take"
    widest = slices(M, N, K)[0]
    if widest.blocks(M) * (_ROWS + 2) * chunks_of(problem) > MAX_INT:
        return "the scales of both operands are counted in 31 bits"
    if widest.tiles(M) > MAX_INT:
        return f"there are {widest.tiles(M)} tiles, and they are counted in 31 bits"
    return None


def _defines(target: Target, problem: LinearProblem, config: Config) -> Mapping[str, int]:
    return {
        "MX_OUT": DTYPE_CODES[problem.out_dtype],
        "MX_STAGES": _STAGES,
        "MX_SHARED_BYTES": _SHARED_BYTES,
    }


WITH_WORKSPACE = (*POINTERS, Arg("workspace", "pointer", "rw"))
_SIZES = numbers("i64", "M", "N", "K", "features", "first_feature")  # N: of the widest slice
_RESCALE_ARGS = (*WITH_WORKSPACE, *_SIZES, *numbers("i64", "first_block"))
ARGS = (
    *WITH_WORKSPACE,
    *_SIZES,
    Arg("bias_kind", "i32"),
    *numbers("i32", "rounds", "part", "parts_with_one_more"),
)


def _slice_of(problem: LinearProblem, index: int) -> Slice:
    return slices(problem.M, problem.N, problem.K)[index]


def _sizes(problem: LinearProblem, index: int) -> tuple[int, ...]:
    """Where a slice begins, and what all are laid out by, so that x stays where the first has
    it."""
    M, N, K = problem.M, problem.N, problem.K
    return M, _slice_of(problem, 0).features, K, N, _slice_of(problem, index).first


def _ctas(problem: LinearProblem, config: Config, index: int) -> int:
    """All, but for a last slice that has less to share."""
    tiles = _slice_of(problem, index).tiles(problem.M)
    return min(config["ctas"], tiles * chunks_of(problem))


def _modules(index: int) -> tuple[Module, Module]:
    """The launches for a slice: x is rescaled with the first."""

    def first_block(problem: LinearProblem) -> int:
        return 0 if index == 0 else -(-problem.M // _ROWS)

    def rescale_geometry(target: Target, problem: LinearProblem, config: Config) -> Geometry:
        blocks = _slice_of(problem, index).blocks(problem.M) - first_block(problem)
        return Geometry(
            grid=(blocks * chunks_of(problem), 1, 1),
            block=(_RESCALE_THREADS, 1, 1),
            overlaps=problem.pdl and index == 0,
        )

    def rescale_scalars(
        target: Target, problem: LinearProblem, config: Config
    ) -> tuple[int | float, ...]:
        return *_sizes(problem, index), first_block(problem)

    def geometry(target: Target, problem: LinearProblem, config: Config) -> Geometry:
        if config["ctas"] > _ctas(problem, config, 0):
            raise ValueError(
                f"{dict(config)} does not fit {problem}: there is not as much to share"
            )
        return Geometry(
            grid=(_ctas(problem, config, index), 1, 1),
            block=(_THREADS, 1, 1),
            shared_bytes=_SHARED_BYTES,
            overlaps=True,  # with the launch that rescales
        )

    def scalars(target: Target, problem: LinearProblem, config: Config) -> tuple[int | float, ...]:
        tiles = _slice_of(problem, index).tiles(problem.M)
        shared = shares_of(tiles, chunks_of(problem), _ctas(problem, config, index))
        return *_sizes(problem, index), DTYPE_CODES[problem.bias], *shared

    def operands(target: Target, problem: LinearProblem, config: Config) -> TensorMap:
        rows = _slice_of(problem, 0).blocks(problem.M) * _ROWS
        return TensorMap(place_of(ARGS, "workspace"), rows, problem.K, _ROWS, CHUNK)

    return (
        Module(
            EXPAND_X.sources,  # of the same code object
            "aiter_mx_linear_rescale",
            _RESCALE_ARGS,
            EXPAND_X.defines,
            rescale_geometry,
            rescale_scalars,
        ),
        Module(
            {"sm_90a": "linear/wgmma_fp8_rescaled_sm90.cu"},
            "aiter_mx_linear_wgmma_fp8_rescaled",
            ARGS,
            _defines,
            geometry,
            scalars,
            (operands,),
        ),
    )


@cache
def _launches_of(count: int) -> tuple[Module, ...]:
    return tuple(module for index in range(count) for module in _modules(index))


def _in_turn(target: Target, problem: LinearProblem, config: Config) -> tuple[Module, ...]:
    return _launches_of(len(slices(problem.M, problem.N, problem.K)))


def _rounds(tiles: Any, ctas: Any) -> Any:
    """Of whole tiles, before what is left is shared: so many that a tile has few parts. As long as
    CTAs multiply whole tiles, neighbours find in the L2 what the others have read."""
    whole, left = tiles // ctas, tiles % ctas
    return whole - ((whole > 0) & (left > 0) & (_MOST_PARTS * left < ctas))


def shares_of(tiles: int, chunks: int, ctas: int) -> Shares:
    """How CTAs share tiles."""
    return shares(tiles, chunks, ctas, int(_rounds(tiles, ctas)))


def _cycles(M: Any, N: int, K: int, count: Any, ctas: Any, larger: Callable[..., Any]) -> Any:
    """A model of a call of so many slices, see ``FITTED``: of a number of rows, where `larger` is
    ``max``, or of an array of them."""
    of, chunks = FITTED, -(-K // CHUNK)
    tiles = -(-M // _ROWS) * -(-N // _ROWS)
    rounds = _rounds(tiles, ctas)
    left = tiles - rounds * ctas  # tiles that are shared
    parts = larger(ctas / larger(left, 1), 1)  # of one of these
    shared = of.part + of.other * parts + of.segment * (1 + left / ctas)
    busiest, balanced = -(-tiles * chunks // ctas), tiles * chunks / _MOST_CTAS
    product = of.chunk * busiest + of.balanced * balanced + of.segment * rounds
    ahead = of.start + (of.rescaled * (M + N) + of.again * (count - 1) * M) * K / _MILLION
    return ahead + product + shared * (left > 0)


def _costs(target: Target, problem: LinearProblem | Sizes, least: Least) -> Iterator[Costed]:
    M, N, K = problem.M, problem.N, problem.K
    most, chunks = min(target.cu_num, _MOST_CTAS), -(-K // CHUNK)
    across, room = -(-N // _ROWS), _most_blocks(M, K)
    tiles, count = -(-M // _ROWS) * across, -(-across // room) if room >= 1 else inf
    widest = slices(M, N, K)[0].tiles(M) * chunks
    for ctas in {*sharers_that_suit(most, chunks, tiles)}:
        yield _cycles(M, N, K, count, ctas, max), (), (min(ctas, widest),)


def costs_of_rows(target: Target, rows: Array, N: int, K: int) -> Array:
    """What so many rows take."""
    most, chunks = min(target.cu_num, _MOST_CTAS), -(-K // CHUNK)
    across, room = -(-N // _ROWS), _most_blocks(rows, K)
    count = np.where(room < 1, inf, -(-across // np.maximum(room, 1)))
    ctas = np.stack(sharers_that_suit_each(most, chunks, np.ceil(rows / _ROWS) * across))
    cycles = np.minimum.reduce(_cycles(rows, N, K, count, ctas, np.maximum))
    return np.where(rows < MIN_OWN_M, inf, cycles)


_search = Search(PARAMS, _costs, most=4)


@lru_cache(maxsize=1024)  # kernels that may yield to it ask again
def cheapest(target: Target, sizes: Sizes) -> tuple[float, Config]:
    """The choice without a table, and its cycles."""
    found = _search.cheapest(target, sizes)
    assert found is not None
    return found


_RESCALE, _PRODUCT = _modules(0)
WGMMA_FP8_RESCALED = declare(
    "linear",
    "wgmma_fp8_rescaled",
    _PRODUCT.sources,
    args=ARGS,
    defines=_defines,
    geometry=_PRODUCT.geometry,
    scalars=_PRODUCT.scalars,
    tensor_maps=_PRODUCT.tensor_maps,
    before=(_RESCALE,),
    in_turn=_in_turn,
    workspace_bytes=_workspace_bytes,
    refusal=_refusal,
    search=_search,
    composed=replace(QUANTISED_MEANWHILE, parts=lambda target, problem, config: ()),
)
