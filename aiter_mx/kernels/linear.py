"""What can compute ``aiter_mx.linear``: the decode GEMV, Triton, and the torch reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from aiter_mx.fallbacks import linear_tiles
from aiter_mx.kernels.linear_mfma_gfx950 import MFMA as MFMA_GFX950
from aiter_mx.kernels.linear_mfma_sm90 import MFMA as MFMA_SM90
from aiter_mx.kernels.spec import (
    DTYPE_CODES,
    Arg,
    Config,
    Geometry,
    KernelSpec,
    Module,
    Param,
    combinations,
)
from aiter_mx.target import Target

OUT_DTYPES = ("bf16", "fp16", "fp32")
BIAS_DTYPES = ("none", "bf16", "fp16", "fp32")
BLOCK = 32  # elements of K that share a scale


@dataclass(frozen=True)
class LinearProblem:
    """``y[M, N] = x[M, K] @ w[N, K].T + bias[N]`` over MX-FP8 x and w.

    Attributes:
        M: tokens.
        N: output features.
        K: elements of the reduction, a multiple of 32.
        out_dtype: of y: ``bf16``, ``fp16`` or ``fp32``.
        bias: dtype of the bias, one of those or ``none``.

    Raises:
        ValueError: a field is none of the above.
    """

    M: int
    N: int
    K: int
    out_dtype: str = "bf16"
    bias: str = "none"

    def __post_init__(self) -> None:
        for name, value in (("M", self.M), ("N", self.N)):
            if value < 0:
                raise ValueError(f"{name} must not be negative, got {name}={value}")
        if self.K <= 0 or self.K % BLOCK:
            raise ValueError(f"K must be a multiple of {BLOCK}, got K={self.K}")
        for name, dtype, known in (
            ("out_dtype", self.out_dtype, OUT_DTYPES),
            ("bias", self.bias, BIAS_DTYPES),
        ):
            if dtype not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {dtype!r}")


PROBLEM = LinearProblem
KEY = ("M", "N", "K", "out_dtype")


def stand_ins(key: LinearProblem) -> tuple[LinearProblem, ...]:
    """The next power of two rows, and bf16, which is what tables are tuned for."""
    rounded = 1 << (key.M - 1).bit_length() if key.M else 0
    return (
        replace(key, M=rounded),
        replace(key, out_dtype="bf16"),
        replace(key, M=rounded, out_dtype="bf16"),
    )


# The GEMV, csrc/linear_gemv.cu.

GEMV_MAX_M = 16
_PIECE_BYTES = 16  # what a lane reads of one row of w in one step
_GEMV_WAVES = (1, 2, 3, 4, 6, 8, 12)
_MANY_WAVES = 8  # with more of them in a workgroup large M spills
_MAX_GRID_X = 1 << 20  # workgroups; more continue in y. HIP counts threads of a grid in 32 bits.

GEMV_PARAMS = (
    Param("rows", (1, 2, 3, 4, 6, 8), "output features that a workgroup computes"),
    Param("waves", _GEMV_WAVES, "waves of a workgroup, which split K"),
    Param(
        "unroll", (1, 2, 3, 4), "steps of a wave whose loads are issued before the first is used"
    ),
)


def _gemv_refusal(target: Target, problem: LinearProblem) -> str | None:
    if target.arch not in GEMV.sources:
        return f"no gemv kernel for {target.arch}, only for {' and '.join(GEMV.sources)}"
    if problem.M > GEMV_MAX_M:
        return f"M={problem.M} is above {GEMV_MAX_M}, the most rows gemv holds in registers"
    return None


def _gemv_configure(target: Target, problem: LinearProblem) -> Config:
    """A balanced configuration without spills; docs/kernels.md derives its numbers."""
    M, cus = problem.M, target.cu_num

    def groups_a_cu(rows: int) -> int:
        return -(-problem.N // (rows * cus))

    # Instructions of the busiest compute unit for two k of each row: to convert w and x, to
    # multiply, and for each 16 k to sum and scale.
    most_rows = 3 if M > 14 else 4
    rows = min(range(most_rows, 0, -1), key=lambda r: groups_a_cu(r) * (r * (1 + 1.375 * M) + M))
    most_unroll = {1: 3, 2: 2}.get(M, 1)
    # Enough lanes on a compute unit to hide memory's latency, in waves of at least one step.
    lanes = 768 if M <= 8 else 512
    steps = _gemv_steps(target, problem)
    wanted = min(-(-lanes // (target.wave_size * groups_a_cu(rows))), steps, _MANY_WAVES)
    waves = next(w for w in _GEMV_WAVES if w >= wanted)
    unroll = min(most_unroll, -(-steps // waves))
    return {"rows": rows, "waves": _fewest_waves(steps, waves, unroll), "unroll": unroll}


def _gemv_yields(target: Target, problem: LinearProblem) -> str | None:
    """Where mfma is the better kernel: docs/kernels.md derives it for gfx950, and fits sm_90a."""
    if target.arch == "sm_90a" and problem.M <= GEMV_MAX_M:
        gemv_us = 3 + 1.0e-7 * problem.N * problem.K * problem.M
        mfma_us = 7 + 2.3e-7 * problem.N * problem.K
        return "mfma is faster here by its fitted times" if mfma_us < gemv_us else None
    if target.arch != "gfx950" or problem.M > GEMV_MAX_M:
        return None
    rows = _gemv_configure(target, problem)["rows"]
    rows_of_busiest = -(-problem.N // (rows * target.cu_num)) * rows
    pairs = problem.K / (2 * target.wave_size)  # of k, of a row, for all lanes
    vector_cycles = rows_of_busiest * pairs * (3.3 + 2.3 * problem.M)
    memory_cycles = problem.N * problem.K * 33 / 32 / (13 * target.cu_num)
    if vector_cycles <= max(memory_cycles, 2400):
        return None
    return f"at M={problem.M} gemv is limited by arithmetic"


def _gemv_steps(target: Target, problem: LinearProblem) -> int:
    return -(-problem.K // (_PIECE_BYTES * target.wave_size))


def _fewest_waves(steps: int, waves: int, unroll: int) -> int:
    """The fewest waves that take no more rounds of their loop than ``waves`` take."""
    rounds = -(-steps // (waves * unroll))
    return next(w for w in _GEMV_WAVES if w * unroll * rounds >= steps)


def _gemv_candidates(target: Target, problem: LinearProblem) -> list[Config]:
    """The configurations that waste no wave and leave the sums and loads room in registers."""
    M, steps = problem.M, _gemv_steps(target, problem)
    return [
        config
        for config in combinations(GEMV_PARAMS)
        if (rows := config["rows"]) <= (3 if M > 14 else 4) or rows * M <= 32
        if (unroll := config["unroll"]) == 1 or unroll * (rows + M) <= 16
        if (waves := config["waves"]) <= _MANY_WAVES or rows * M <= 8
        if waves == _fewest_waves(steps, waves, unroll) and unroll <= -(-steps // waves)
    ]


def _gemv_defines(target: Target, problem: LinearProblem, config: Config) -> Mapping[str, int]:
    return {
        "MX_M": problem.M,
        "MX_OUT": DTYPE_CODES[problem.out_dtype],
        "MX_ROWS": config["rows"],
        "MX_WAVES": config["waves"],
        "MX_UNROLL": config["unroll"],
        "MX_MAX_GRID_X": _MAX_GRID_X,
    }


def _gemv_geometry(target: Target, problem: LinearProblem, config: Config) -> Geometry:
    groups = -(-problem.N // config["rows"])
    return Geometry(
        grid=(min(groups, _MAX_GRID_X), -(-groups // _MAX_GRID_X), 1),
        block=(config["waves"] * target.wave_size, 1, 1),
    )


def _gemv_scalars(
    target: Target, problem: LinearProblem, config: Config
) -> tuple[int | float, ...]:
    return (problem.N, problem.K, DTYPE_CODES[problem.bias])


GEMV = Module(
    sources={"gfx950": "linear_gemv.cu", "sm_90a": "linear_gemv.cu"},
    symbol="aiter_mx_linear_gemv",
    args=(
        Arg("xq", "pointer", "r"),
        Arg("xs", "pointer", "r"),
        Arg("wq", "pointer", "r"),
        Arg("ws", "pointer", "r"),
        Arg("bias", "pointer", "r"),
        Arg("y", "pointer", "w"),
        Arg("N", "i64"),
        Arg("K", "i64"),
        Arg("bias_kind", "i32"),
    ),
    defines=_gemv_defines,
    geometry=_gemv_geometry,
    scalars=_gemv_scalars,
)

KERNELS = (
    KernelSpec(
        op="linear",
        backend="hip",
        name="gemv",
        params=GEMV_PARAMS,
        refusal=_gemv_refusal,
        configure=_gemv_configure,
        candidates=_gemv_candidates,
        module=GEMV,
        yields=_gemv_yields,
    ),
    MFMA_GFX950,
    MFMA_SM90,
    KernelSpec(
        op="linear",
        backend="triton",
        name="dot_scaled",
        params=linear_tiles.PARAMS,
        refusal=linear_tiles.refusal,
        configure=linear_tiles.configure,
        candidates=linear_tiles.candidates,
    ),
    KernelSpec(
        op="linear",
        backend="torch",
        name="reference",
        params=(),
        refusal=lambda target, problem: None,
        configure=lambda target, problem: {},
        candidates=lambda target, problem: ({},),
    ),
)
