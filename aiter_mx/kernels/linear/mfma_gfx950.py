"""The CDNA4 kernel of the linear for up to 64 rows of x, csrc/linear/mfma_gfx950.cu."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from aiter_mx.kernels.linear.problem import (
    MATRIX_ARGS,
    MAX_GRID_X,
    QUANTISED_FIRST,
    X_CODES,
    LinearProblem,
    matrix_scalars,
    quantise_pays,
    quantised_first,
)
from aiter_mx.kernels.spec import (
    DTYPE_CODES,
    Arg,
    Config,
    Geometry,
    KernelSpec,
    Module,
    Param,
    Parts,
    combinations,
    first_of,
    refuse_static_lds,
)
from aiter_mx.target import Target

_WAVES = (1, 2, 3, 4, 6, 8, 12, 16)
PARAMS = (
    Param("row_tiles", (1, 2, 3, 4), "tiles of w that a workgroup computes, 16 / fold rows each"),
    Param("fold", (1, 2, 4), "parts of K that a tile has side by side"),
    Param("waves", _WAVES, "waves of a workgroup, which split K"),
    Param(
        "unroll", (1, 2, 3, 4), "steps of a wave whose loads are issued before the first is used"
    ),
)

MAX_M = 64
MAX_K = 1 << 25  # offsets within the rows of a workgroup, at most 64, are below 2^31
_SIDE = 16  # rows of an operand of the matrix instruction
_TILE_K = 256  # of one operand row in a tile
_BLOCK = 32
_MOST_COL_TILES = 4
_MOST_CANDIDATES = 48

# Of a compute unit: CDNA4 ISA manual and white paper.
_SIMDS = 4
_LDS_BYTES = 160 * 1024
_REGISTERS, _MOST_REGISTERS = 512, 256  # of a lane: in all waves of a SIMD, in one
# docs/kernels/mfma.md derives these.
_BYTES_A_CYCLE = 13  # of memory, for each compute unit
_LATENCY_CYCLES = 4800
_TILE_CYCLES = 80  # of the address unit
_QUANTISING = 4.8  # vector instructions for 64 values


@dataclass(frozen=True)
class _Work:
    """What a configuration makes of a problem.

    Attributes:
        col_tiles: tiles of x.
        groups: workgroups.
        rows: of w, of the largest of them.
        steps: tiles along K.
    """

    col_tiles: int
    groups: int
    rows: int
    steps: int


def _work(target: Target, problem: LinearProblem, config: Config) -> _Work:
    """Workgroups are as many on each compute unit, where there are rows for them: the busiest has
    no more of them then, and each has fewer rows."""
    fold = config["fold"]
    needed = -(-problem.N * fold // (_SIDE * config["row_tiles"]))
    groups = min(problem.N, -(-needed // target.cu_num) * target.cu_num)
    return _Work(
        col_tiles=-(-problem.M * fold // _SIDE),
        groups=groups,
        rows=-(-problem.N // max(groups, 1)),
        steps=-(-problem.K // (_TILE_K * fold)),
    )


def _refusal(target: Target, problem: LinearProblem) -> str | None:
    if target.arch not in MODULE.sources:
        return f"no scaled-MFMA kernel for {target.arch}, only for {' and '.join(MODULE.sources)}"
    if problem.M > MAX_M:
        return f"M={problem.M} is above {MAX_M}, the most rows of mfma"
    if problem.K >= MAX_K:
        return f"K={problem.K} is not below {MAX_K}, as the 32-bit offsets of mfma demand"
    return None


def _parts(target: Target, problem: LinearProblem, config: Config) -> Parts:
    """A quantisation first, where doing it here costs more or takes too much of something."""
    work = _work(target, problem, config)
    fits = problem.K < MAX_K // 2 and _resident(config, work, quantises=True) > 0
    if fits and quantise_pays(target, problem, work.groups, _QUANTISING):
        return ()
    return quantised_first(target, problem, config)


def _registers(config: Config, col_tiles: int, quantises: bool = False) -> int:
    """At most so many registers of a lane: loads, sums and addresses, as compilers have it."""
    rows, cols = config["row_tiles"], col_tiles
    held = 10 * max(0, rows - 2) * max(0, cols - 1)
    if quantises:
        held += 8 + 16 * config["unroll"] * cols
    return 42 + 17 * config["unroll"] * (rows + cols) + 4 * rows * cols + held


def _resident(config: Config, work: _Work, quantises: bool = False) -> int:
    """Workgroups that a compute unit holds at once; 0 where not even one fits."""
    registers = -(-_registers(config, work.col_tiles, quantises) // 8) * 8
    waves = config["waves"]
    if registers > _MOST_REGISTERS:
        return 0
    lds = _lds_bytes(config, work)
    return min(_REGISTERS // registers // -(-waves // _SIMDS), _LDS_BYTES // lds)


def _lds_bytes(config: Config, work: _Work) -> int:
    """What a workgroup declares: a tile or the sums of each wave, and the bias of its rows."""
    return config["waves"] * 1024 * max(4, config["row_tiles"] * work.col_tiles) + 256


def _candidates(target: Target, problem: LinearProblem) -> list[Config]:
    """The configurations that fit and waste no wave: those of the lowest bounds, best first."""

    def suits(config: Config) -> bool:
        work = _work(target, problem, config)
        waves, unroll = config["waves"], config["unroll"]
        return (
            work.col_tiles <= _MOST_COL_TILES
            and _resident(config, work) > 0
            and unroll <= -(-work.steps // waves)
            and waves == _fewest_waves(work.steps, waves, unroll)
        )

    suitable = [config for config in combinations(PARAMS) if suits(config)]
    return sorted(suitable, key=lambda config: _cycles(target, problem, config))[:_MOST_CANDIDATES]


def _fewest_waves(steps: int, waves: int, unroll: int) -> int:
    """The fewest waves that take no more rounds of their loop than ``waves`` take."""
    rounds = -(-steps // (waves * unroll))
    return next(w for w in _WAVES if w * unroll * rounds >= steps)


def _cycles(target: Target, problem: LinearProblem, config: Config) -> tuple[float, ...]:
    """A bound on the time in cycles; then what to have less of where bounds are equal."""
    work, row_tiles = _work(target, problem, config), config["row_tiles"]
    of_busiest = -(-work.groups // target.cu_num)
    memory = of_busiest * work.rows * problem.K * 33 / 32 / _BYTES_A_CYCLE
    loads = of_busiest * work.steps * (row_tiles + work.col_tiles) * _TILE_CYCLES
    under_way = config["waves"] * config["unroll"]
    rounds = -(-work.steps // under_way) * -(-of_busiest // _resident(config, work))
    return (
        max(memory, loads, rounds * _LATENCY_CYCLES),
        rounds,
        loads,
        under_way,
        config["unroll"],
    )


def _defines(target: Target, problem: LinearProblem, config: Config) -> Mapping[str, int]:
    return {
        "MX_ROW_TILES": config["row_tiles"],
        "MX_COL_TILES": _work(target, problem, config).col_tiles,
        "MX_FOLD": config["fold"],
        "MX_WAVES": config["waves"],
        "MX_UNROLL": config["unroll"],
        "MX_EVEN_BLOCKS": int(problem.K % (2 * _BLOCK) == 0),
        "MX_X": X_CODES[problem.x_dtype],
        "MX_OUT": DTYPE_CODES[problem.out_dtype],
        "MX_MAX_GRID_X": MAX_GRID_X,
    }


def _geometry(target: Target, problem: LinearProblem, config: Config) -> Geometry:
    work = _work(target, problem, config)
    refuse_static_lds(problem, config, _lds_bytes(config, work))
    groups = work.groups
    return Geometry(
        grid=(min(groups, MAX_GRID_X), -(-groups // MAX_GRID_X), 1),
        block=(config["waves"] * target.wave_size, 1, 1),
    )


def _scalars(target: Target, problem: LinearProblem, config: Config) -> tuple[int | float, ...]:
    groups = max(1, _work(target, problem, config).groups)
    return (*matrix_scalars(problem), problem.N // groups, problem.N % groups)


MODULE = Module(
    sources={"gfx950": "linear/mfma_gfx950.cu"},
    symbol="aiter_mx_linear_mfma",
    args=(*MATRIX_ARGS, Arg("rows_each", "i32"), Arg("longer_groups", "i64")),
    defines=_defines,
    geometry=_geometry,
    scalars=_scalars,
)

MFMA = KernelSpec(
    op="linear",
    backend="hip",
    name="mfma",
    params=PARAMS,
    refusal=_refusal,
    configure=first_of(_candidates),
    candidates=_candidates,
    module=MODULE,
    parts=_parts,
    joined_by=QUANTISED_FIRST,
)
