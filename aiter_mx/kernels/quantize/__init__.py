"""What can compute ``aiter_mx.quantize`` and its kin: our kernels, Triton, and torch."""

from __future__ import annotations

from aiter_mx.kernels.quantize.problem import KEY, QuantizeProblem
from aiter_mx.kernels.quantize.rows import ROWS
from aiter_mx.kernels.quantize.staged_sm90 import STAGED
from aiter_mx.kernels.quantize.tiles import TILES
from aiter_mx.kernels.spec import reference
from aiter_mx.kernels.triton import without_tiles

__all__ = ["KERNELS", "KEY", "PROBLEM", "QuantizeProblem"]

PROBLEM = QuantizeProblem


def _triton_refusal(problem: QuantizeProblem) -> str | None:
    plain = ("rows", "e4m3", "1x32", "row_major", 0)
    asked = (problem.to, problem.format, problem.block, problem.layout, problem.groups)
    if asked != plain:
        return "the Triton kernel makes e4m3 along rows of no groups alone, scales row-major"
    return None


KERNELS = (
    ROWS,
    STAGED,
    TILES,
    without_tiles("quantize", "rows", _triton_refusal),
    reference("quantize"),
)
