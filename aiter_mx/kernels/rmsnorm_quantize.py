"""RMSNorm fused with MX quantisation: csrc/quantize/rmsnorm.cu, torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from aiter_mx.kernels.declare import declare
from aiter_mx.kernels.quantize.rows import MODES
from aiter_mx.kernels.spec import (
    DTYPE_CODES,
    MAX_GRID_X,
    MOST_THREADS,
    OUT_DTYPES,
    Arg,
    Config,
    Geometry,
    Param,
    numbers,
    pointers,
    reference,
    require,
)
from aiter_mx.numerics import BLOCK, DTYPE_BYTES
from aiter_mx.target import Target

_MOST_PIECES = 8  # of 16 bytes, of a thread: all of a row is in registers
_PIECE_BYTES = 16
_HOPPER_VALUES = 32  # of a thread, where an SM has several rows


@dataclass(frozen=True)
class RMSNormQuantizeProblem:
    """Rows, normalised and quantised, beside rows of a second tensor that are normalised alone.

    Attributes:
        M: rows of each.
        N: columns of the first, a multiple of 32.
        dtype: of both, of weights and of the residual.
        N2: columns of the second, a multiple of 8; 0 where there is none.
        residual: whether one is added first.
        mode: of the scales: ``rceil``, ``floor`` or ``even``.
        epsilon: what is added to the mean of squares.
        epsilon2: likewise of the second.

    Raises:
        ValueError: a field is none of the above.
    """

    M: int
    N: int
    dtype: str = "bf16"
    N2: int = 0
    residual: int = 0
    mode: str = "rceil"
    epsilon: float = 1e-6
    epsilon2: float = 1e-6

    def __post_init__(self) -> None:
        known = {"dtype": OUT_DTYPES, "residual": (0, 1), "mode": tuple(MODES)}
        require(self, {"M": 0, "N": BLOCK, "N2": 0}, known)
        if self.N % BLOCK or self.N2 % 8:
            raise ValueError(
                f"N must be a multiple of {BLOCK} and N2 of 8, got N={self.N}, N2={self.N2}"
            )

    @property
    def is_empty(self) -> bool:
        """Whether there is no row."""
        return self.M == 0


KEY = ("M", "N", "dtype", "N2", "residual")


PARAMS = (Param("waves", (1, 2, 4, 8, 16, 32), "waves of a workgroup, which has a row"),)


def _pieces(problem: RMSNormQuantizeProblem) -> int:
    """Of the longer row."""
    return max(problem.N, problem.N2) * DTYPE_BYTES[problem.dtype] // _PIECE_BYTES


def _refusal(target: Target, problem: RMSNormQuantizeProblem) -> str | None:
    if _pieces(problem) > _MOST_PIECES * MOST_THREADS:
        most = _MOST_PIECES * MOST_THREADS * _PIECE_BYTES
        return f"rows of {_pieces(problem) * _PIECE_BYTES} bytes are above {most}, the most"
    return None


def _configure(target: Target, problem: RMSNormQuantizeProblem) -> Config:
    """For few rows, or on CDNA4, at most two pieces a thread, as far as there are threads."""
    return next(c for c in _candidates(target, problem))


def _has_few_rows(target: Target, problem: RMSNormQuantizeProblem) -> bool:
    """Whether Hopper's SMs have a row each at most: then what counts is how long a row takes."""
    groups = problem.M * (2 if problem.N2 else 1)
    return target.arch == "sm_90a" and groups <= target.cu_num


def _candidates(target: Target, problem: RMSNormQuantizeProblem) -> list[Config]:
    lanes = target.wave_size
    if _has_few_rows(target, problem):
        wanted = -(-2 * _pieces(problem) // lanes)
    elif target.arch == "sm_90a" and target.cu_num < problem.M:
        # Many rows an SM keep memory busier than many threads a row, as far as registers go.
        wanted = -(-max(problem.N, problem.N2) // (_HOPPER_VALUES * lanes))
    else:
        wanted = -(-_pieces(problem) // (2 * lanes))
    fits = [
        waves
        for waves in PARAMS[0].values
        if waves * lanes <= MOST_THREADS and _pieces(problem) <= _MOST_PIECES * waves * lanes
    ]
    ordered = sorted(fits, key=lambda waves: (waves < wanted, abs(waves - wanted)))
    return [{"waves": waves} for waves in ordered]


def _defines(target: Target, problem: RMSNormQuantizeProblem, config: Config) -> Mapping[str, int]:
    return {
        "MX_IN": DTYPE_CODES[problem.dtype],
        "MX_N": problem.N,
        "MX_N2": problem.N2,
        "MX_MODE": MODES[problem.mode],
        "MX_RESIDUAL": problem.residual,
        "MX_WAVES": config["waves"],
        "MX_MAX_GRID_X": MAX_GRID_X,
        "MX_EARLY_WEIGHTS": int(_has_few_rows(target, problem)),
    }


def _geometry(target: Target, problem: RMSNormQuantizeProblem, config: Config) -> Geometry:
    threads = config["waves"] * target.wave_size
    if threads > MOST_THREADS or _pieces(problem) > _MOST_PIECES * threads:
        raise ValueError(f"{dict(config)} does not fit {problem}: a workgroup has a whole row")
    groups = problem.M * (2 if problem.N2 else 1)
    return Geometry(
        grid=(min(groups, MAX_GRID_X), -(-groups // MAX_GRID_X), 1),
        block=(threads, 1, 1),
        overlaps=_has_few_rows(target, problem),
    )


PROBLEM = RMSNormQuantizeProblem

KERNELS = (
    declare(
        "rmsnorm_quantize",
        "rows",
        {"gfx950": "quantize/rmsnorm.cu", "sm_90a": "quantize/rmsnorm.cu"},
        args=(
            *pointers("r", "x", "residual", "weight", "x2", "weight2"),
            *pointers("w", "payload", "scales", "sum", "norm2"),
            Arg("M", "i64"),
            *numbers("f32", "epsilon", "epsilon2"),
        ),
        defines=_defines,
        geometry=_geometry,
        scalars=lambda target, problem, config: (problem.M, problem.epsilon, problem.epsilon2),
        refusal=_refusal,
        params=PARAMS,
        configure=_configure,
        candidates=_candidates,
    ),
    reference("rmsnorm_quantize"),
)
