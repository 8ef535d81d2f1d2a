"""The CDNA4 kernel of the grouped GEMM over routed tokens, csrc/moe/mfma_gfx950.cu."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from aiter_mx.kernels.moe_gemm.problem import ACTIVATION_CODES, MoeGemmProblem, module
from aiter_mx.kernels.spec import (
    DTYPE_CODES,
    Config,
    Geometry,
    KernelSpec,
    Param,
    combinations,
    first_of,
    refuse_static_lds,
)
from aiter_mx.target import Target

_WAVES = (1, 2, 3, 4, 6, 8, 12, 16)
PARAMS = (
    Param("row_tiles", (1, 2, 4), "tiles of 16 rows of w that a workgroup computes"),
    Param("col_tiles", (1, 2, 4), "the most tiles of 16 ids that a workgroup takes at once"),
    Param("waves", _WAVES, "waves of a workgroup, which split K"),
    Param(
        "unroll", (1, 2, 3, 4), "steps of a wave whose loads are issued before the first is used"
    ),
)

MAX_K = 1 << 25  # offsets within the rows of a workgroup, at most 64, are below 2^31
MAX_TILES = 1 << 20  # of w in a grid: HIP counts its threads in 32 bits
MAX_GROUPS_Y = 65535
_SIDE = 16  # rows of an operand of the matrix instruction
_ACTIVATED_TILES = 4  # hold the gate and up rows of a block of 32 features
_TILE_K = 256  # of one operand row in a tile
_TILE_BYTES = _SIDE * _TILE_K * 33 // 32
_BLOCK = 32
_WIDE_BYTES = 1 << 31
_MOST_CANDIDATES = 32

# Of a compute unit, as in kernels/linear/mfma_gfx950.py; docs/kernels/mfma.md derives them.
_SIMDS = 4
_LDS_BYTES = 160 * 1024
_REGISTERS, _MOST_REGISTERS = 512, 256
_BYTES_A_CYCLE = 13
_LATENCY_CYCLES = 4800
_TILE_CYCLES = 80
_LOOK_UP_CYCLES = 1500  # the expert of a block and its ids: a latency of the L2


@dataclass(frozen=True)
class _Work:
    """What a configuration makes of a problem whose tokens choose experts at random.

    Attributes:
        tiles: tiles of w of an expert.
        experts: experts with a token.
        chunks: chunks of ids with a token.
        col_tiles: tiles of x that the average chunk takes.
        steps: tiles along K.
    """

    tiles: int
    experts: float
    chunks: float
    col_tiles: int
    steps: int


def _work(problem: MoeGemmProblem, config: Config) -> _Work:
    experts, of_expert = problem.touched, problem.rows_of_expert
    in_chunk = min(of_expert, _chunk(problem, config))
    chunks = max(experts, experts * of_expert / _chunk(problem, config))
    return _Work(
        tiles=-(-problem.N // (_SIDE * config["row_tiles"])),
        experts=experts,
        chunks=chunks,
        col_tiles=next(c for c in (1, 2, 4) if c * _SIDE >= in_chunk),
        steps=-(-problem.K // _TILE_K),
    )


def _chunk(problem: MoeGemmProblem, config: Config) -> int:
    """The most ids of a chunk."""
    return min(problem.block_m, _SIDE * config["col_tiles"])


def _refusal(target: Target, problem: MoeGemmProblem) -> str | None:
    if target.arch not in MODULE.sources:
        return f"no scaled-MFMA kernel for {target.arch}, only for {' and '.join(MODULE.sources)}"
    if problem.K >= MAX_K:
        return f"K={problem.K} is not below {MAX_K}, as the 32-bit offsets of mfma demand"
    if problem.N > MAX_TILES * _SIDE:
        return f"N={problem.N} is above {MAX_TILES * _SIDE}, the most rows of a grid of mfma"
    return None


def _registers(config: Config) -> int:
    """At most so many registers of a lane: loads, sums, rows and addresses."""
    rows, cols = config["row_tiles"], config["col_tiles"]
    held = 10 * max(0, rows - 2) * max(0, cols - 1) + 4 * (rows > 1)
    return 72 + 18 * config["unroll"] * (rows + cols) + 4 * rows * cols + 10 * cols + held


def _resident(config: Config) -> int:
    """Workgroups that a compute unit holds at once; 0 where not even one fits."""
    registers = -(-_registers(config) // 8) * 8
    waves = config["waves"]
    if registers > _MOST_REGISTERS:
        return 0
    return min(_REGISTERS // registers // -(-waves // _SIMDS), _LDS_BYTES // _lds_bytes(config))


def _lds_bytes(config: Config) -> int:
    """What a workgroup declares: a tile or the sums of each wave, and little else."""
    return config["waves"] * 1024 * max(4, config["row_tiles"] * config["col_tiles"]) + 256


def _candidates(target: Target, problem: MoeGemmProblem) -> list[Config]:
    """The configurations that fit and waste no wave: those of the lowest bounds, best first."""
    steps = -(-problem.K // _TILE_K)

    def suits(config: Config) -> bool:
        waves, unroll = config["waves"], config["unroll"]
        return (
            (problem.activation == "none" or config["row_tiles"] == _ACTIVATED_TILES)
            and config["col_tiles"] * _SIDE < 2 * max(problem.block_m, _SIDE)
            and _resident(config) > 0
            and unroll <= -(-steps // waves)
            and waves == _fewest_waves(steps, waves, unroll)
        )

    suitable = [config for config in combinations(PARAMS) if suits(config)]
    return sorted(suitable, key=lambda c: _cycles(target, problem, c))[:_MOST_CANDIDATES]


def _fewest_waves(steps: int, waves: int, unroll: int) -> int:
    """The fewest waves that take no more rounds of their loop than ``waves`` take."""
    rounds = -(-steps // (waves * unroll))
    return next(w for w in _WAVES if w * unroll * rounds >= steps)


def _cycles(target: Target, problem: MoeGemmProblem, config: Config) -> tuple[float, ...]:
    """A bound on the time in cycles; then what to have less of where bounds are equal.

    Weights come from memory once for an expert, and from the caches for its further chunks.
    """
    work, row_tiles = _work(problem, config), config["row_tiles"]
    of_busiest = -(-int(work.tiles * work.chunks) // target.cu_num)
    row_steps = work.tiles * work.steps * row_tiles
    memory = work.experts * row_steps * _TILE_BYTES / (target.cu_num * _BYTES_A_CYCLE)
    loads = of_busiest * work.steps * (row_tiles + work.col_tiles) * _TILE_CYCLES
    under_way = config["waves"] * config["unroll"]
    turns = -(-of_busiest // _resident(config))
    waiting = turns * (-(-work.steps // under_way) * _LATENCY_CYCLES + _LOOK_UP_CYCLES)
    return (
        max(memory, loads, waiting),
        turns,
        loads,
        config["col_tiles"],
        under_way,
        config["unroll"],
    )


def _defines(target: Target, problem: MoeGemmProblem, config: Config) -> Mapping[str, int]:
    rows_of_x = -(-problem.routed // problem.a_div)
    return {
        "MX_ROW_TILES": config["row_tiles"],
        "MX_COL_TILES": config["col_tiles"],
        "MX_WAVES": config["waves"],
        "MX_UNROLL": config["unroll"],
        "MX_EVEN_BLOCKS": int(problem.K % (2 * _BLOCK) == 0),
        "MX_WIDE": int(rows_of_x * problem.K >= _WIDE_BYTES),
        "MX_OUT": DTYPE_CODES["fp32" if problem.out_dtype == "mxfp8" else problem.out_dtype],
        "MX_ACTIVATION": ACTIVATION_CODES[problem.activation],
        "MX_INTERLEAVED": int(problem.activation != "none" and problem.layout == "interleaved"),
        "MX_MAX_GROUPS_Y": MAX_GROUPS_Y,
    }


def _geometry(target: Target, problem: MoeGemmProblem, config: Config) -> Geometry:
    if problem.activation != "none" and config["row_tiles"] != _ACTIVATED_TILES:
        raise ValueError(
            f"{dict(config)} does not fit {problem}: a workgroup holds the gate and up rows of 32 "
            f"features with row_tiles={_ACTIVATED_TILES} alone"
        )
    refuse_static_lds(problem, config, _lds_bytes(config))
    chunks = problem.blocks * -(-problem.block_m // (_SIDE * config["col_tiles"]))
    return Geometry(
        grid=(
            -(-problem.N // (_SIDE * config["row_tiles"])),
            min(chunks, problem.routed, MAX_GROUPS_Y),
            1,
        ),
        block=(config["waves"] * target.wave_size, 1, 1),
    )


MODULE = module("mfma", {"gfx950": "moe/mfma_gfx950.cu"}, _defines, _geometry)

MFMA = KernelSpec(
    op="moe_gemm",
    backend="hip",
    name="mfma",
    params=PARAMS,
    refusal=_refusal,
    configure=first_of(_candidates),
    candidates=_candidates,
    module=MODULE,
)
