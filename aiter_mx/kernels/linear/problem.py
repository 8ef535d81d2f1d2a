"""What a linear asks for, and what its kernels are told: the same for all of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from aiter_mx.kernels.quantize.problem import QuantizeProblem
from aiter_mx.kernels.spec import (
    BIAS_DTYPES,
    DTYPE_CODES,
    OUT_DTYPES,
    Arg,
    Composition,
    Config,
    Key,
    Parts,
    numbers,
    place_of,
    pointers,
    require,
    require_blocks,
)
from aiter_mx.target import Target

POINTERS = (
    *pointers("r", "xq", "xs", "wq", "ws", "bias"),
    Arg("y", "pointer", "w"),
)
"""The pointers of every linear kernel. Its scalars follow: sizes, then the bias's dtype code."""

MATRIX_ARGS = (
    *POINTERS,
    *numbers("i64", "M", "N", "K"),
    Arg("bias_kind", "i32"),
)
"""What the arguments of every kernel that uses the matrix unit begin with."""

X_POINTER, W_POINTER = place_of(POINTERS, "xq"), place_of(POINTERS, "wq")
"""Which of them a tensor map of x or of the weights begins at."""

X_CODES = {"e4m3": DTYPE_CODES["none"], **{d: DTYPE_CODES[d] for d in ("bf16", "fp16")}}
"""What kernels that quantise x themselves are told of its dtype, ``MX_X``."""

# What a launch that quantises adds: 2.5 us at 2.4 GHz; 1.5 us at 1.98 GHz, measured on an H200.
_LAUNCH_CYCLES = {"gfx950": 6000, "sm_90a": 3000}
_BYTES_A_CYCLE = 13  # of memory, for each compute unit of an MI355X


_LEAST = {"M": 0, "N": 0}
_KNOWN = {"out_dtype": OUT_DTYPES, "bias": BIAS_DTYPES, "x_dtype": tuple(X_CODES)}


@dataclass(frozen=True)
class LinearProblem:
    """``y[M, N] = x[M, K] @ w[N, K].T + bias[N]`` over MX-FP8 w, and x or what it is quantised to.

    Attributes:
        M: tokens.
        N: output features.
        K: elements of the reduction, a multiple of 32.
        out_dtype: of y: ``bf16``, ``fp16`` or ``fp32``.
        bias: dtype of the bias, one of those or ``none``.
        pdl: whether the launch may begin before the kernel ahead of it in the stream ends.
        x_dtype: of x: ``e4m3`` with scales, or ``bf16`` or ``fp16`` that is yet to be quantised.
        after_quantize: whether what it overlaps is the launch that quantises x, and no more.

    Raises:
        ValueError: a field is none of the above.
    """

    M: int
    N: int
    K: int
    out_dtype: str = "bf16"
    bias: str = "none"
    pdl: bool = False
    x_dtype: str = "e4m3"
    after_quantize: bool = False

    def __post_init__(self) -> None:
        require(self, _LEAST, _KNOWN)
        require_blocks("K", self.K)
        if self.pdl not in (False, True):
            raise ValueError(f"pdl must be False or True, got {self.pdl!r}")

    @property
    def is_empty(self) -> bool:
        """Whether the result has no element, so that no kernel is asked for it."""
        return 0 in (self.M, self.N)


class Sizes(NamedTuple):
    """All that the models of many rows ask of a linear."""

    M: int
    N: int
    K: int


def matrix_scalars(problem: LinearProblem) -> tuple[int, ...]:
    """The values of those of ``MATRIX_ARGS`` that are no pointers."""
    return (problem.M, problem.N, problem.K, DTYPE_CODES[problem.bias])


def too_many_results(problem: LinearProblem, most_rows: int) -> str | None:
    """Why a gfx950 kernel whose workgroups have results of so many rows refuses a problem."""
    rows = min(problem.M, most_rows)
    if rows * problem.N * 4 < 1 << 31:
        return None
    return f"{rows} rows of N={problem.N} are too many results for offsets of 31 bits"


def rows_tuned_for(M: int) -> int:
    """The next power of two: what is chosen for so many rows serves fewer of them too, so that few
    code objects serve all numbers of rows."""
    return 1 << (M - 1).bit_length()


KEY = ("M", "N", "K", "out_dtype", "x_dtype", "pdl")


def stand_ins(key: Key) -> tuple[Key, ...]:
    """Those of the next power of two rows, of bf16, without overlap and of quantised x.

    M is given up first and the kind of x last: what quantises x itself is another kernel's work.
    """
    own_M, N, K, own_out, own_x, own_pdl = key
    tuned_M = rows_tuned_for(own_M)
    rows = (own_M,) if tuned_M == own_M else (own_M, tuned_M)
    out_dtypes = ("bf16",) if own_out == "bf16" else (own_out, "bf16")
    overlaps = (True, False) if own_pdl else (False,)
    x_dtypes = {"e4m3": ("e4m3",), "bf16": ("bf16", "e4m3")}.get(own_x, (own_x, "bf16", "e4m3"))
    return tuple(
        (M, N, K, out_dtype, x_dtype, pdl)
        for x_dtype in x_dtypes
        for pdl in overlaps
        for out_dtype in out_dtypes
        for M in rows
    )


def quantised_first(target: Target, problem: LinearProblem, config: Config) -> Parts:
    """What a kernel that takes quantised x alone does for another: have it quantised before."""
    if problem.x_dtype == "e4m3":
        return ()
    quantisation = QuantizeProblem(problem.M, problem.K, problem.x_dtype)
    return (("quantize", quantisation), ("linear", replace(problem, x_dtype="e4m3")))


def quantised_meanwhile(target: Target, problem: LinearProblem, config: Config) -> Parts:
    """The same for a kernel that begins while x is quantised, and has its weights come.

    Whoever wrote the weights has ended by then, as the launch that quantises waits for those before
    it.
    """
    overlaps = problem.pdl or target.arch == "sm_90a"
    return quantised_first(target, replace(problem, pdl=overlaps), config)


QUANTISED_FIRST = Composition(quantised_first, "aiter_mx.joined:quantised_first")
"""Of a kernel that takes quantised x alone."""
QUANTISED_MEANWHILE = replace(QUANTISED_FIRST, parts=quantised_meanwhile)
"""Of one that gains by starting early on an H200, as ``gemv`` and ``wgmma_f16`` do not."""


def quantise_pays(target: Target, problem: LinearProblem, groups: int, cycles: float) -> bool:
    """Whether so many workgroups, each quantising all of x, take less than one more launch.

    Args:
        target: what it runs on.
        problem: the linear.
        groups: workgroups.
        cycles: of a compute unit for 64 values. On gfx950 they are taken to be free while memory
            brings the weights; on an H200 they were seen not to be.
    """
    of_busiest = -(-groups // target.cu_num)
    hidden = problem.N * problem.K * 33 / 32 / (_BYTES_A_CYCLE * target.cu_num)
    free = _LAUNCH_CYCLES[target.arch] + (hidden if target.arch == "gfx950" else 0)
    return of_busiest * problem.M * problem.K / 64 * cycles <= free
