"""What can compute ``aiter_mx.linear``: our kernels, Triton, the vendor, torch."""

from __future__ import annotations

from dataclasses import replace

from aiter_mx.kernels.linear import invariant_sm90
from aiter_mx.kernels.linear.choice_sm90 import (
    WGMMA_BF16,
    WGMMA_BF16_SWAPPED,
    WGMMA_F16_TILED,
    WGMMA_FP8,
    WGMMA_FP8_RESCALED,
    WGMMA_FP8_TILED,
)
from aiter_mx.kernels.linear.gemv import GEMV
from aiter_mx.kernels.linear.grouped import PERSISTENT_SM90
from aiter_mx.kernels.linear.mfma_gfx950 import MFMA, MFMA_SPLIT
from aiter_mx.kernels.linear.mma_registers_sm90 import MMA_REGISTERS
from aiter_mx.kernels.linear.mma_ring_sm90 import MMA_RING
from aiter_mx.kernels.linear.persistent_gfx950 import PERSISTENT, PERSISTENT_SPLIT
from aiter_mx.kernels.linear.problem import (
    KEY,
    QUANTISED_FIRST,
    QUANTISED_MEANWHILE,
    LinearProblem,
    stand_ins,
)
from aiter_mx.kernels.linear.triton import DOT_SCALED
from aiter_mx.kernels.linear.vendor import SCALED_MM
from aiter_mx.kernels.linear.wgmma_bf16_few_sm90 import declare_few
from aiter_mx.kernels.linear.wgmma_f16_sm90 import WGMMA_F16
from aiter_mx.kernels.spec import KernelSpec, reference

__all__ = ["KERNELS", "KEY", "PROBLEM", "LinearProblem", "stand_ins"]

PROBLEM = LinearProblem

_WGMMA_BF16 = replace(WGMMA_BF16, invariant=invariant_sm90.configure)
_WGMMA_BF16_FEW = declare_few(invariant_sm90.configure_few)
_STARTING_EARLY = (MMA_REGISTERS, WGMMA_FP8, WGMMA_FP8_TILED, _WGMMA_BF16_FEW, WGMMA_BF16_SWAPPED)
_FOR_QUANTISED_X = (
    MMA_REGISTERS,
    WGMMA_FP8_TILED,
    WGMMA_FP8,
    WGMMA_F16,
    MMA_RING,
    WGMMA_BF16_SWAPPED,
    WGMMA_F16_TILED,
    WGMMA_FP8_RESCALED,
    _WGMMA_BF16,
    _WGMMA_BF16_FEW,
    PERSISTENT_SPLIT,
    PERSISTENT,
    PERSISTENT_SM90,
    DOT_SCALED,
    SCALED_MM,
    reference("linear"),
)


def _composed(kernel: KernelSpec) -> KernelSpec:
    if kernel.composed is not None:  # says it itself
        return kernel
    early = any(kernel is each for each in _STARTING_EARLY)
    return replace(kernel, composed=QUANTISED_MEANWHILE if early else QUANTISED_FIRST)


KERNELS = (
    GEMV,
    MFMA,
    MFMA_SPLIT,
    *map(_composed, _FOR_QUANTISED_X),
)
