"""Kernels of grouped GEMMs whose scales are fp32, one for each 128 k."""

from __future__ import annotations

from aiter_mx.kernels.promoted_gemm.mfma_gfx950 import MFMA
from aiter_mx.kernels.promoted_gemm.problem import KEY, PromotedGemmProblem
from aiter_mx.kernels.promoted_gemm.wgmma_fp8_sm90 import WGMMA_FP8
from aiter_mx.kernels.spec import reference

__all__ = ["KERNELS", "KEY", "PROBLEM", "PromotedGemmProblem"]

PROBLEM = PromotedGemmProblem

KERNELS = (MFMA, WGMMA_FP8, reference("promoted_gemm"))
