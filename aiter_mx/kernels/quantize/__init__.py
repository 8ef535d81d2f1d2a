"""What can compute ``aiter_mx.quantize`` and its kin: our kernels, and the torch reference."""

from __future__ import annotations

from aiter_mx.kernels.quantize.problem import KEY, QuantizeProblem, stand_ins
from aiter_mx.kernels.quantize.rows import ROWS
from aiter_mx.kernels.quantize.staged_sm90 import STAGED
from aiter_mx.kernels.quantize.tiles import TILES
from aiter_mx.kernels.spec import reference

__all__ = ["KERNELS", "KEY", "PROBLEM", "QuantizeProblem", "stand_ins"]

PROBLEM = QuantizeProblem

KERNELS = (
    ROWS,
    STAGED,
    TILES,
    reference("quantize"),
)
