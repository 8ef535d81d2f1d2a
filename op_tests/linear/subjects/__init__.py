"""The kernels of the linear that the conformance suite tries, and the cases it tries them with."""

from __future__ import annotations

from op_tests.conformance import alone
from op_tests.linear.subjects.gfx950 import GEMV, MFMA_GFX950, MFMA_SPLIT_GFX950
from op_tests.linear.subjects.mma_sm90 import MMA_REGISTERS, MMA_RING
from op_tests.linear.subjects.persistent_gfx950 import PERSISTENT_SPLIT_GFX950
from op_tests.linear.subjects.subject import Case, Subject
from op_tests.linear.subjects.wgmma_bf16_sm90 import (
    WGMMA_BF16,
    WGMMA_BF16_FEW,
    WGMMA_BF16_SWAPPED,
    WGMMA_F16,
    WGMMA_F16_TILED,
)
from op_tests.linear.subjects.wgmma_fp8_rescaled_sm90 import WGMMA_FP8_RESCALED
from op_tests.linear.subjects.wgmma_fp8_sm90 import WGMMA_FP8, WGMMA_FP8_TILED

_SHAPES = [(1, 1, 32), (3, 40, 160), (17, 65, 1056), (150, 20, 64), (2, 16, 64)]

TORCH = Subject(
    "reference",
    ("torch",),
    alone([Case(*shape, {}, None, dtype) for shape in _SHAPES for dtype in ("fp32", "bf16")]),
    few=[Case(9, 33, 256, {}), Case(17, 65, 1056, {})],
    most_rows=64,
    of_rows=lambda M: {},
    with_bias=[Case(3, 37, 1120, {})],
    backend="torch",
    accumulation_error=2.0**-45,
    underflow=0.0,
)
SUBJECTS = (
    GEMV,
    MFMA_GFX950,
    MFMA_SPLIT_GFX950,
    PERSISTENT_SPLIT_GFX950,
    MMA_REGISTERS,
    MMA_RING,
    WGMMA_FP8,
    WGMMA_FP8_TILED,
    WGMMA_FP8_RESCALED,
    WGMMA_BF16,
    WGMMA_BF16_FEW,
    WGMMA_BF16_SWAPPED,
    WGMMA_F16,
    WGMMA_F16_TILED,
    TORCH,
)

__all__ = ["SUBJECTS", "Case", "Subject"]
