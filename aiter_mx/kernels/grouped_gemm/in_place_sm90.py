"""``rescaled_in_place``: the Hopper grouped GEMM that rescales w in shared memory.

csrc/grouped/in_place_sm90.cu; rescaled_groups_sm90.py says what is ahead of it.
"""

from __future__ import annotations

from collections.abc import Mapping

from aiter_mx.kernels.grouped_gemm import rescaled_groups_sm90 as groups
from aiter_mx.kernels.grouped_gemm.problem import GroupedGemmProblem
from aiter_mx.kernels.grouped_gemm.rescaled_groups_sm90 import (
    FROM_ROWS,
    ROWS,
    list_bytes,
    most_blocks,
    ring_pays,
    steps_of,
)
from aiter_mx.kernels.sm90 import CHUNK
from aiter_mx.kernels.spec import DTYPE_CODES, MAX_INT, Config
from aiter_mx.target import Target

_UNIT_ROWS, _RECORD_BYTES = 64, 4 * 68  # of x, what is multiplied at a time
_BLOCKS, _UNITS, _CONSUMERS = 8, 4, 2  # of w under way, and of x for each consumer
_WORDS = _CONSUMERS * _UNITS * _RECORD_BYTES + _BLOCKS * (2 * 4 * ROWS + 16)
_SHARED_BYTES = (_CONSUMERS * _UNITS * _UNIT_ROWS + _BLOCKS * ROWS) * CHUNK + _WORDS


def workspace_bytes(target: Target, problem: GroupedGemmProblem, config: Config) -> int:
    """See ``GroupWorkspace`` in csrc/grouped/in_place_groups_sm90.h."""
    blocks = most_blocks(problem)
    records = steps_of(problem) * blocks * (ROWS // _UNIT_ROWS) * _RECORD_BYTES
    return blocks * ROWS * problem.K + records + list_bytes(problem) + 4


def refusal(target: Target, problem: GroupedGemmProblem) -> str | None:
    """Why the kernel does not cover a problem, or None."""
    found = groups.refusal(target, problem)
    if found is not None:
        return found
    blocks = most_blocks(problem)
    if blocks * max(steps_of(problem), ROWS // _UNIT_ROWS * _RECORD_BYTES) > MAX_INT:
        return f"x has up to {blocks} blocks of {steps_of(problem)} steps, counted in 31 bits"
    if steps_of(problem) * CHUNK > MAX_INT:
        return f"K={problem.K}: columns are counted in 31 bits"
    return None


def yields(target: Target, problem: GroupedGemmProblem) -> str | None:
    """Why other kernels come first."""
    rows = problem.usual_rows
    if rows < FROM_ROWS:
        return f"{rows} rows of a group are fewer than the {FROM_ROWS} that pay for rescaling"
    if ring_pays(rows, problem.N, problem.K):
        return f"{rows} rows of a group pay for rescaling w once for all of them"
    return None


def _sizes(problem: GroupedGemmProblem, config: Config) -> tuple[int, ...]:
    return (most_blocks(problem),)


def defines(target: Target, problem: GroupedGemmProblem, config: Config) -> Mapping[str, int]:
    """Of the code object that all launches share."""
    return {
        "MX_OUT": DTYPE_CODES[problem.out_dtype],
        "MX_BLOCKS": _BLOCKS,
        "MX_UNITS": _UNITS,
        "MX_SHARED_BYTES": _SHARED_BYTES,
    }


def _rows_of_operands(problem: GroupedGemmProblem, config: Config) -> int:
    return most_blocks(problem) * ROWS


SIZES = ("most_blocks",)
ARGS = groups.args_of(*SIZES)
LAUNCHES = groups.launches(
    "grouped/in_place_sm90.cu",
    "aiter_mx_grouped_in_place",
    ARGS,
    _sizes,
    defines,
    _SHARED_BYTES,
    (_rows_of_operands, _UNIT_ROWS),
)
IN_PLACE = groups.declared(
    "rescaled_in_place",
    LAUNCHES,
    workspace_bytes=workspace_bytes,
    refusal=refusal,
    yields=yields,
)
