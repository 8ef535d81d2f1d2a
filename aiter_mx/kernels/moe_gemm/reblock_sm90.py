"""Lists in blocks of another size than suits Hopper's kernels of ``moe_gemm``.

Engines list routed rows in blocks of one size, such as 64, whatever the number of tokens. Blocks
that are no whole pieces of a kernel's, and padding that counts as rows where workgroups divide
them, then take up to 1.7 times the time, above all where few experts have most of the rows. A
launch ahead, csrc/moe/reblock_sm90.cu, makes of such a list one in blocks as ``fused_moe`` has
them, where reading the weights takes long enough for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from aiter_mx.kernels.declare import declare
from aiter_mx.kernels.moe_gemm.blocks import MANY_ROWS, block_for
from aiter_mx.kernels.moe_gemm.problem import MoeGemmProblem, declare_gemm
from aiter_mx.kernels.spec import (
    Composition,
    Config,
    Geometry,
    KernelSpec,
    Parts,
    first_of,
    numbers,
    pointers,
)
from aiter_mx.target import Target

_THREADS, _PIECE = 1024, 32  # of the workgroup, and ids of each
_LEAST_ROWS = 2  # of an expert: else hardly any has more than are in the smallest block
_LEAST_WEIGHTS = 180_000_000  # bytes of those that are read: 40 us


def _is_covered(problem: MoeGemmProblem) -> bool:
    """Whether one workgroup takes a problem's list: each thread has a piece of one block."""
    ids = problem.blocks * problem.block_m
    return ids <= _THREADS * _PIECE and problem.block_m % _PIECE == 0


def _intermediate(problem: MoeGemmProblem) -> int:
    """Features between the two GEMMs of the layer that a problem is likely to be of."""
    is_first = problem.activation != "none" or problem.a_div > 1
    return problem.N // 2 if is_first else problem.K


def suiting_block(problem: MoeGemmProblem) -> int:
    """Ids of the blocks that a problem's list is multiplied in: of its own where others would not
    pay for the launch that makes them."""
    rows, own = problem.rows_of_expert, problem.block_m
    is_of_layer = problem.early_routing or problem.expected > 0  # whose blocks suit it
    if is_of_layer or problem.sorted_out or not _LEAST_ROWS <= rows < MANY_ROWS:
        return own
    if problem.touched * problem.N * problem.K < _LEAST_WEIGHTS or not _is_covered(problem):
        return own
    found = block_for(rows, _intermediate(problem))
    # Whole blocks of one are joined; and hardly an expert has more than one of either.
    return own if found % own == 0 or found >= problem.M else found


def in_blocks(problem: MoeGemmProblem, block_m: int) -> MoeGemmProblem:
    """The same over a list that is made of a problem's."""
    if block_m == problem.block_m:
        return problem
    # Each block may have an expert of its own, and no padding.
    most = problem.blocks * -(-problem.block_m // block_m)
    return replace(problem, block_m=block_m, max_blocks=most)


def reblocked(problem: MoeGemmProblem) -> MoeGemmProblem:
    """A problem over the list that its products are computed from."""
    return in_blocks(problem, suiting_block(problem))


def _parts(target: Target, problem: MoeGemmProblem, config: Config) -> Parts:
    found = reblocked(problem)
    return () if found is problem else (("moe_gemm", found),)


def _refusal(target: Target, problem: MoeGemmProblem) -> str | None:
    if not _is_covered(problem):
        return f"{problem.blocks} blocks of {problem.block_m} ids are no list of one workgroup"
    return None


def _defines(target: Target, problem: MoeGemmProblem, config: Config) -> Mapping[str, int]:
    return {
        "MX_PACKED": int(problem.ids == "aiter"),
        "MX_WEIGHTS": int(problem.weights == "by_place"),
    }


def _scalars(target: Target, problem: MoeGemmProblem, config: Config) -> tuple[int, ...]:
    packed = problem.ids == "aiter"
    valid = problem.M if packed else problem.routed
    lists = (problem.blocks, problem.block_m, suiting_block(problem))
    return (valid, problem.top_k if packed else 0, *lists)


REBLOCK = declare(
    "moe_gemm",
    "reblock",
    {"sm_90a": "moe/reblock_sm90.cu"},
    symbol="aiter_mx_moe_reblock",
    args=(
        *pointers("r", "ids", "experts", "padded", "weights"),
        *pointers("w", "to_ids", "to_experts", "to_padded", "to_weights"),
        *numbers("i32", "valid", "slots", "max_blocks", "block_m", "to_block"),
    ),
    defines=_defines,
    geometry=lambda target, problem, config: Geometry(
        grid=(1, 1, 1), block=(_THREADS, 1, 1), overlaps=True
    ),
    scalars=_scalars,
    refusal=_refusal,
)


def declare_reblocking(
    name: str,
    sources: Mapping[str, str],
    *,
    in_order: Callable[[Target, MoeGemmProblem], Iterable[Config]],
    candidates: Callable[[Target, MoeGemmProblem], Sequence[Config]],
    **more: Any,
) -> KernelSpec:
    """``declare_gemm`` for a kernel that takes lists in other blocks than those it suits.

    Args:
        name, sources: as of ``declare_gemm``.
        in_order: its configurations, the preferred ones first.
        candidates: those that a tuner should time.
        more: whatever else ``declare_gemm`` takes.
    """
    first = first_of(in_order)
    return declare_gemm(
        name,
        sources,
        configure=lambda target, problem: first(target, reblocked(problem)),
        candidates=lambda target, problem: candidates(target, reblocked(problem)),
        composed=Composition(
            parts=_parts,
            joined_by="aiter_mx.joined:in_other_blocks",
            around=lambda problem: REBLOCK.modules,
        ),
        **more,
    )
