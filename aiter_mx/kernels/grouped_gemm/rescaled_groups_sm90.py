"""What Hopper's grouped GEMMs over fp8 with a scale for 128 k share.

csrc/grouped/rescale_groups_sm90.h is ahead of both. A launch lists blocks of x, and another puts
four blocks of 32 k of x under one scale where none of them loses by it what a result would show.
The third does so to w while it multiplies: ``rescaled`` tile after tile in memory,
``rescaled_in_place`` in shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from aiter_mx.kernels.declare import declare
from aiter_mx.kernels.grouped_gemm.problem import ARGS as POINTERS_AND_SIZES
from aiter_mx.kernels.grouped_gemm.problem import GroupedGemmProblem
from aiter_mx.kernels.grouped_gemm.problem import scalars as problem_scalars
from aiter_mx.kernels.sm90 import CHUNK, up
from aiter_mx.kernels.spec import (
    MAX_INT,
    Arg,
    Config,
    Geometry,
    KernelSpec,
    Module,
    TensorMap,
    numbers,
    place_of,
)
from aiter_mx.numerics import BLOCK
from aiter_mx.target import Target

MAX_GROUPS = 4096
ROWS = 128  # of a block, of x and of w
MOST_CTAS = 132
_THREADS, _RESCALE_THREADS, _LIST_THREADS = 4 * 128, 256, 256
_BLOCK_BYTES = 8  # of the list's

FROM_ROWS = 16
"""Rows of a group on average, from where on rescaling pays on an H200."""
_FROM_ROWS_OF_RING, _FROM_N_OF_RING, _FROM_K_OF_RING = 1536, 1536, 2560


def ring_pays(rows: float, N: int, K: int) -> bool:
    """Whether so many rows of a group pay for rescaling w once for all of them, in memory."""
    return rows >= _FROM_ROWS_OF_RING and N >= _FROM_N_OF_RING and K >= _FROM_K_OF_RING


def across(problem: GroupedGemmProblem) -> int:
    """Tiles of w of a group; those of 64 features of gate and up each have 128 rows as well."""
    return -(-problem.N // ROWS)


def most_blocks(problem: GroupedGemmProblem) -> int:
    """The most blocks of x that there can be."""
    return problem.most_tiles(ROWS)


def steps_of(problem: GroupedGemmProblem) -> int:
    """Of 128 k."""
    return -(-problem.K // CHUNK)


def list_bytes(problem: GroupedGemmProblem) -> int:
    """See ``GroupLists`` in csrc/grouped/groups_sm90.h."""
    return 4 * up(5 * problem.G + 1, 2) + _BLOCK_BYTES * most_blocks(problem)


def refusal(target: Target, problem: GroupedGemmProblem) -> str | None:
    """Why neither covers a problem, or None."""
    if target.exact_sums:
        return "the fp8 matrix unit adds with about 14 bits"
    if problem.out_dtype == "fp32":
        return "the fp8 matrix unit adds with about 14 bits, which fp32 results would show"
    if problem.a_format != "e4m3":
        return f"rows in {problem.a_format} are not rescaled, only those in e4m3"
    if problem.layout not in ("jagged", "masked"):
        return f"its groups have one range of rows each, the same in out, not {problem.layout} ones"
    return _size_refusal(problem)


def _size_refusal(problem: GroupedGemmProblem) -> str | None:
    M, N, G = problem.M, problem.N, problem.G
    if not M or not N:
        return f"M={M} and N={N}: there is nothing to multiply"
    if G > MAX_GROUPS:
        return f"G={G} is above {MAX_GROUPS}, the most groups that it lists"
    if N % BLOCK:
        return f"N={N} is not a multiple of {BLOCK}"
    if M > MAX_INT:
        return f"M={M}: rows are counted in 31 bits"
    if G * N > MAX_INT - ROWS:
        return f"b has {G * N} rows, and these are counted in 31 bits"
    results = most_blocks(problem) * across(problem)
    if results > MAX_INT - MOST_CTAS:
        return f"there are up to {results} tiles of results, and they are counted in 31 bits"
    if G * -(-M // ROWS) > MAX_INT:  # of groups that overlap, which are counted before they are cut
        return f"{G} groups of up to {M} rows: tiles are counted in 31 bits"
    return None


_POINTERS = sum(arg.kind == "pointer" for arg in POINTERS_AND_SIZES)
SCALE_ALIGNMENT = 4
"""Where K is a multiple of 128, four scales of a row of w are loaded at once."""


def args_of(*sizes: str) -> tuple[Arg, ...]:
    """The arguments of all launches, with a workspace's own sizes."""
    return (
        *(
            replace(arg, align=SCALE_ALIGNMENT) if arg.name == "ws" else arg
            for arg in POINTERS_AND_SIZES[:_POINTERS]
        ),
        Arg("workspace", "pointer", "rw"),
        *POINTERS_AND_SIZES[_POINTERS:],
        *numbers("i32", *sizes),
    )


def launches(
    source: str,
    symbol: str,
    args: tuple[Arg, ...],
    sizes: Callable[[GroupedGemmProblem, Config], tuple[int, ...]],
    defines: Callable[[Target, GroupedGemmProblem, Config], Mapping[str, int]],
    shared_bytes: int,
    boxes: tuple[Callable[[GroupedGemmProblem, Config], int], int],
) -> tuple[Module, Module, Module]:
    """The list, x's rescaling and the product, which share a code object.

    Args:
        source, symbol: of the product.
        args: ``args_of`` the workspace's sizes, and
        sizes: their values.
        defines: of all.
        shared_bytes: that the product takes.
        boxes: rows that the workspace has of operands, and rows of a box of these.
    """
    sources = {"sm_90a": source}

    def scalars(
        target: Target, problem: GroupedGemmProblem, config: Config
    ) -> tuple[int | float, ...]:
        return *problem_scalars(problem), *sizes(problem, config)

    def listed(target: Target, problem: GroupedGemmProblem, config: Config) -> Geometry:
        return Geometry(grid=(1, 1, 1), block=(_LIST_THREADS, 1, 1), overlaps=True)

    def rescaled(target: Target, problem: GroupedGemmProblem, config: Config) -> Geometry:
        grid = (most_blocks(problem) * steps_of(problem), 1, 1)
        return Geometry(grid=grid, block=(_RESCALE_THREADS, 1, 1), overlaps=True)

    def multiplied(target: Target, problem: GroupedGemmProblem, config: Config) -> Geometry:
        tiles = most_blocks(problem) * across(problem)  # a row of x is of one group
        return Geometry(
            grid=(max(1, min(target.cu_num, MOST_CTAS, tiles)), 1, 1),
            block=(_THREADS, 1, 1),
            shared_bytes=shared_bytes,
            overlaps=True,
        )

    def operands(target: Target, problem: GroupedGemmProblem, config: Config) -> TensorMap:
        rows, box_rows = boxes[0](problem, config), boxes[1]
        return TensorMap(place_of(args, "workspace"), rows, problem.K, box_rows, CHUNK)

    def weights(target: Target, problem: GroupedGemmProblem, config: Config) -> TensorMap:
        return TensorMap(place_of(args, "wq"), problem.G * problem.N, problem.K, ROWS, CHUNK)

    maps = (operands, weights)
    return (
        Module(sources, "aiter_mx_grouped_rescale_list", args, defines, listed, scalars),
        Module(sources, "aiter_mx_grouped_rescale", args, defines, rescaled, scalars),
        Module(sources, symbol, args, defines, multiplied, scalars, maps),
    )


def declared(name: str, launches: tuple[Module, ...], **more: Any) -> KernelSpec:
    """A kernel of these launches, and other fields of ``KernelSpec``."""
    *ahead, product = launches
    return declare(
        "grouped_gemm",
        name,
        product.sources,
        symbol=product.symbol,
        args=product.args,
        defines=product.defines,
        geometry=product.geometry,
        scalars=product.scalars,
        tensor_maps=product.tensor_maps,
        before=tuple(ahead),
        **more,
    )
