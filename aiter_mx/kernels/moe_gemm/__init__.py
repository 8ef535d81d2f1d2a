"""What can compute ``aiter_mx.moe_gemm``: our kernels, Triton, and the torch reference."""

from __future__ import annotations

from aiter_mx.kernels.moe_gemm.grouped import GROUPED, GROUPED_SM90
from aiter_mx.kernels.moe_gemm.mfma_gfx950 import MFMA as MFMA_GFX950
from aiter_mx.kernels.moe_gemm.mma_ring_sm90 import MMA_RING
from aiter_mx.kernels.moe_gemm.problem import KEY, MoeGemmProblem, stand_ins
from aiter_mx.kernels.moe_gemm.rescaled_sm90 import IN_PLACE, RESCALED
from aiter_mx.kernels.moe_gemm.triton import DOT_SCALED
from aiter_mx.kernels.moe_gemm.wgmma_f16_sm90 import WGMMA_F16
from aiter_mx.kernels.moe_gemm.wgmma_fp8_sm90 import WGMMA_FP8
from aiter_mx.kernels.spec import reference

__all__ = ["KERNELS", "KEY", "PROBLEM", "MoeGemmProblem", "stand_ins"]

PROBLEM = MoeGemmProblem

KERNELS = (
    GROUPED,
    RESCALED,
    IN_PLACE,
    GROUPED_SM90,
    MFMA_GFX950,
    WGMMA_FP8,
    MMA_RING,
    WGMMA_F16,
    DOT_SCALED,
    reference("moe_gemm"),
)
