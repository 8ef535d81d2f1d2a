"""``rescaled``: the Hopper grouped GEMM that rescales w once for all of a group's rows.

csrc/grouped/rescaled_sm90.cu puts tiles of w under one scale in memory, a ring of them, a few ahead
of the products that read them; rescaled_groups_sm90.py says what is ahead of it.
"""

from __future__ import annotations

from collections.abc import Mapping

from aiter_mx.kernels.grouped_gemm import rescaled_groups_sm90 as groups
from aiter_mx.kernels.grouped_gemm.problem import GroupedGemmProblem
from aiter_mx.kernels.grouped_gemm.rescaled_groups_sm90 import (
    ROWS,
    across,
    list_bytes,
    most_blocks,
    ring_pays,
    steps_of,
)
from aiter_mx.kernels.sm90 import CHUNK, up
from aiter_mx.kernels.spec import DTYPE_CODES, MAX_INT, Config, Param, combinations
from aiter_mx.target import Target

PARAMS = (Param("ring_mib", (16, 32, 64, 128), "of w that is rescaled ahead of the products"),)

_STAGES, _RAW_BLOCKS = 5, 4  # what shared memory has room for
_SHARED_BYTES = (2 * _STAGES + _RAW_BLOCKS) * ROWS * CHUNK
_USUAL_MIB = 64
_PANEL = 16  # tiles of w that share tiles of x: with 8 of these about as many as there are CTAs


def _room_for(ring_mib: int, K: int) -> int:
    """Tiles of w whose payload the ring has room for."""
    return max(2, (ring_mib << 20) // (ROWS * K))


def ring_tiles(problem: GroupedGemmProblem, config: Config) -> int:
    """Tiles of w in the ring."""
    return min(problem.G * across(problem), _room_for(config["ring_mib"], problem.K))


def panel_tiles(problem: GroupedGemmProblem, config: Config) -> int:
    """Tiles of w of a panel: while one is multiplied, there is room for the next one."""
    return max(1, min(_PANEL, ring_tiles(problem, config) // 2))


def _operand_tiles(problem: GroupedGemmProblem, config: Config) -> int:
    """Of 128 rows, of x and of the ring."""
    return most_blocks(problem) + ring_tiles(problem, config)


def workspace_bytes(target: Target, problem: GroupedGemmProblem, config: Config) -> int:
    """See ``GroupWorkspace`` in csrc/grouped/rescaled_groups_sm90.h."""
    tiles = _operand_tiles(problem, config)
    words = steps_of(problem) * up(tiles * (ROWS + 2), 4) + 2 + 2 * problem.G * across(problem)
    return tiles * ROWS * problem.K + 4 * words + list_bytes(problem)


def refusal(target: Target, problem: GroupedGemmProblem) -> str | None:
    """Why the kernel does not cover a problem, or None."""
    found = groups.refusal(target, problem)
    if found is not None:
        return found
    of_w = problem.G * across(problem)
    most = most_blocks(problem)
    most += max(ring_tiles(problem, config) for config in combinations(PARAMS))
    if most * (ROWS + 2) * steps_of(problem) > MAX_INT:
        return "the scales of both operands are counted in 31 bits"
    if of_w * max(2, steps_of(problem)) > MAX_INT - groups.MOST_CTAS:
        return f"b has {of_w} tiles of {steps_of(problem)} steps, and these are counted in 31 bits"
    return None


def yields(target: Target, problem: GroupedGemmProblem) -> str | None:
    """Why other kernels come first."""
    rows, N, K = problem.usual_rows, problem.N, problem.K
    if ring_pays(rows, N, K):
        return None
    return f"w of {N} x {K} is rescaled in place for {rows} rows of a group"


def configure(target: Target, problem: object) -> Config:
    """Without a table."""
    return {"ring_mib": _USUAL_MIB}


def candidates(target: Target, problem: GroupedGemmProblem) -> list[Config]:
    """One for each number of tiles, the usual one first."""
    values = sorted(PARAMS[0].values, key=lambda mib: (mib != _USUAL_MIB, mib))
    found = {ring_tiles(problem, {"ring_mib": mib}): mib for mib in reversed(values)}
    return [{"ring_mib": mib} for mib in sorted(found.values(), key=values.index)]


def _sizes(problem: GroupedGemmProblem, config: Config) -> tuple[int, ...]:
    return most_blocks(problem), ring_tiles(problem, config), panel_tiles(problem, config)


def defines(target: Target, problem: GroupedGemmProblem, config: Config) -> Mapping[str, int]:
    """Of the code object that all launches share."""
    return {
        "MX_OUT": DTYPE_CODES[problem.out_dtype],
        "MX_STAGES": _STAGES,
        "MX_RAW_BLOCKS": _RAW_BLOCKS,
        "MX_SHARED_BYTES": _SHARED_BYTES,
    }


def _rows_of_operands(problem: GroupedGemmProblem, config: Config) -> int:
    return _operand_tiles(problem, config) * ROWS


SIZES = ("most_blocks", "room", "panel")
ARGS = groups.args_of(*SIZES)
LAUNCHES = groups.launches(
    "grouped/rescaled_sm90.cu",
    "aiter_mx_grouped_rescaled",
    ARGS,
    _sizes,
    defines,
    _SHARED_BYTES,
    (_rows_of_operands, ROWS),
)
RESCALED = groups.declared(
    "rescaled",
    LAUNCHES,
    workspace_bytes=workspace_bytes,
    refusal=refusal,
    params=PARAMS,
    configure=configure,
    candidates=candidates,
    yields=yields,
)
