"""The Hopper gradient of a grouped GEMM's weights: csrc/grouped/persistent_sm90.cu, MX_WGRAD."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from aiter_mx.kernels.declare import declare
from aiter_mx.kernels.grouped_gemm import persistent_sm90 as forward
from aiter_mx.kernels.grouped_gemm.problem import GroupedGemmProblem
from aiter_mx.kernels.grouped_wgrad.problem import (
    ARGS,
    INDEX_BYTES,
    START_COLUMNS,
    GroupedWgradProblem,
    in_pieces,
)
from aiter_mx.kernels.spec import (
    DTYPE_CODES,
    Arg,
    Composition,
    Config,
    Geometry,
    Module,
    Parts,
    TensorMap,
    numbers,
    place_of,
)
from aiter_mx.target import Target

PARAMS = forward.PARAMS
_TILE_ENTRY_BYTES = 40
_LIST_THREADS = 256
_LEAST_COLUMNS = 2048  # which take a cluster some 26 us


def _product(problem: GroupedWgradProblem) -> GroupedGemmProblem:
    """A grouped product of as many rows and features, over an even number of blocks."""
    return GroupedGemmProblem(
        M=problem.G * problem.N,
        N=problem.K,
        K=START_COLUMNS,
        G=problem.G,
        out_dtype=problem.out_dtype,
        a_format=problem.grad_format,
    )


def _refusal(target: Target, problem: GroupedWgradProblem) -> str | None:
    if problem.M >= forward.MAX_K:
        return f"M={problem.M} is not below {forward.MAX_K}, as 32-bit offsets in a tile demand"
    tiles = _most_tiles(problem) * forward.pairs(_product(problem))
    # Each of a band's tiles counts as if it were as deep as the deepest of them.
    band = _clusters(target, problem) + PARAMS[0].values[-1]
    parts = 2 * band * _tiles_of_group(problem) * (problem.M // START_COLUMNS + problem.G)
    units = problem.M // forward.UNIT_K * -(-problem.N // forward.SLAB_ROWS)
    for count, what in (
        (tiles, "tiles"),
        (parts, "parts of tiles"),
        (units, "pieces of grad"),
        (problem.G * problem.N, "rows of all groups"),
        (problem.G * problem.K, "columns of all groups"),
        (problem.K * forward.result_bytes(_product(problem)), "bytes in a row of results"),
    ):
        if count >= forward.MAX_TURNS - forward.TILE_N:
            return f"there are up to {count} {what}, and their numbers have 31 bits"
    return None


def _tiles_of_group(problem: GroupedWgradProblem) -> int:
    return -(-problem.N // (forward.MOST_SLABS * forward.SLAB_ROWS))


def _most_tiles(problem: GroupedWgradProblem) -> int:
    return problem.G * _tiles_of_group(problem)


def _most_words(problem: GroupedWgradProblem) -> int:
    """A tile has a word for each 16 chunks that it begins."""
    whole = problem.M // (forward.CHUNK_K * forward.CHUNKS_OF_WORD)
    return _tiles_of_group(problem) * (whole + problem.G)


def _clusters(target: Target, problem: GroupedWgradProblem) -> int:
    return max(1, min(target.cu_num // 2, _most_tiles(problem) * forward.pairs(_product(problem))))


def _parts(target: Target, problem: GroupedWgradProblem, config: Config) -> Parts:
    tiles = _most_tiles(problem) * forward.pairs(_product(problem))
    return in_pieces(problem, tiles, target.cu_num // 2, _LEAST_COLUMNS)


def _workspace_bytes(target: Target, problem: GroupedWgradProblem, config: Config) -> int:
    """See ``Workspace`` in csrc/grouped/tiles_sm90.h."""
    tiles = _most_tiles(problem)
    before_x = forward.HEADER_BYTES + tiles * _TILE_ENTRY_BYTES + 8 * _most_words(problem)
    before_x += problem.G * problem.K // 8 + 4 * problem.G + 4 * (tiles + 1)
    slabs = -(-problem.N // forward.SLAB_ROWS)
    return -(-before_x // 1024) * 1024 + slabs * forward.SLAB_ROWS * problem.M * 2


def _scalars(
    target: Target, problem: GroupedWgradProblem, config: Config
) -> tuple[int | float, ...]:
    """The forward product's, to which grad is x, x is w, and the rows of all groups are K."""
    return (
        *(problem.N, problem.K, problem.M, problem.G),
        *(0, INDEX_BYTES[problem.index], DTYPE_CODES["none"]),
        _most_tiles(problem),
        _most_words(problem),
        forward.pairs(_product(problem)),
        _clusters(target, problem),
    )


_ARGS = (
    # Scales of x are loaded in pairs.
    *(replace(arg, align=2 if arg.name == "x_scale" else 1) for arg in ARGS),
    Arg("workspace", "pointer", "rw"),
    *numbers("i64", "M", "N", "K", "G"),
    *numbers("i32", "layout", "index_bytes", "bias_kind"),
    *numbers("i64", "most_tiles", "most_words", "pairs"),
    Arg("clusters", "i32"),
)


def _list_defines(
    target: Target, problem: GroupedWgradProblem, config: Config
) -> Mapping[str, int]:
    pieces = {"MX_PIECES": problem.pieces} if problem.pieces > 1 else {}
    return pieces | {"MX_WGRAD": 1, "MX_THREADS": _LIST_THREADS, "MX_ORDER": config["order"]}


def _list_geometry(target: Target, problem: GroupedWgradProblem, config: Config) -> Geometry:
    return Geometry(grid=(1, 1, 1), block=(_LIST_THREADS, 1, 1), overlaps=True)


def _defines(target: Target, problem: GroupedWgradProblem, config: Config) -> Mapping[str, int]:
    return {
        **forward.defines(target, _product(problem), config),
        "MX_WGRAD": 1,
        "MX_ACCUMULATE": problem.accumulate,
    }


def _rows_of_x(target: Target, problem: GroupedWgradProblem, config: Config) -> TensorMap:
    box = (forward.TILE_N // 2, forward.BOX_K)
    return TensorMap(place_of(ARGS, "x"), problem.K, problem.M, *box)


def _results(target: Target, problem: GroupedWgradProblem, config: Config) -> TensorMap:
    row_bytes = problem.K * forward.result_bytes(_product(problem))
    rows = problem.G * problem.N
    return TensorMap(place_of(ARGS, "out"), rows, row_bytes, forward.BOX_ROWS, 128, True)


def _geometry(target: Target, problem: GroupedWgradProblem, config: Config) -> Geometry:
    return Geometry(
        grid=(2 * _clusters(target, problem), 1, 1),
        block=(forward.THREADS, 1, 1),
        shared_bytes=forward.SHARED_BYTES,
        overlaps=True,
    )


LIST = Module(
    sources={"sm_90a": "grouped/wgrad_list_sm90.cu"},
    symbol="aiter_mx_grouped_wgrad_list",
    args=_ARGS,
    defines=_list_defines,
    geometry=_list_geometry,
    scalars=_scalars,
)

PERSISTENT = declare(
    "grouped_wgrad",
    "persistent",
    {"sm_90a": "grouped/persistent_sm90.cu"},
    args=_ARGS,
    defines=_defines,
    geometry=_geometry,
    scalars=_scalars,
    tensor_maps=(_rows_of_x, _results),
    refusal=_refusal,
    params=PARAMS,
    configure=lambda target, problem: {"order": 4},
    candidates=lambda target, problem: [{"order": order} for order in (4, 8, 16)],
    before=(LIST,),
    workspace_bytes=_workspace_bytes,
    symbol="aiter_mx_grouped_gemm_persistent",
    composed=Composition(_parts, "aiter_mx.joined:added_up"),
)
