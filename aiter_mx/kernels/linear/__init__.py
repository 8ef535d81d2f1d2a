"""What can compute ``aiter_mx.linear``: our kernels, Triton, the vendor, torch."""

from __future__ import annotations

from dataclasses import replace

from aiter_mx.fallbacks import linear_tiles, linear_vendor
from aiter_mx.kernels.linear.fp8_sm90 import FP8
from aiter_mx.kernels.linear.gemv import GEMV
from aiter_mx.kernels.linear.grouped import GROUPED
from aiter_mx.kernels.linear.mfma_gfx950 import MFMA as MFMA_GFX950
from aiter_mx.kernels.linear.mfma_sm90 import MFMA as MFMA_SM90
from aiter_mx.kernels.linear.mma_registers_sm90 import MMA_REGISTERS
from aiter_mx.kernels.linear.mma_ring_sm90 import MMA_RING
from aiter_mx.kernels.linear.problem import KEY, LinearProblem, quantised_first, stand_ins
from aiter_mx.kernels.linear.wgmma_fp8_sm90 import WGMMA_FP8
from aiter_mx.kernels.linear.wide_sm90 import WIDE
from aiter_mx.kernels.spec import KernelSpec, reference

__all__ = ["KERNELS", "KEY", "PROBLEM", "LinearProblem", "stand_ins"]

PROBLEM = LinearProblem

_FOR_QUANTISED_X = (
    MMA_REGISTERS,
    FP8,
    WGMMA_FP8,
    WIDE,
    MFMA_SM90,
    MMA_RING,
    *GROUPED,
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
        backend="vendor",
        name="scaled_mm",
        params=(),
        refusal=linear_vendor.refusal,
        configure=lambda target, problem: {},
        candidates=lambda target, problem: ({},),
    ),
    reference("linear"),
)

KERNELS = (
    GEMV,
    MFMA_GFX950,
    *(replace(kernel, parts=quantised_first) for kernel in _FOR_QUANTISED_X),
)
