"""What can compute ``aiter_mx.grouped_gemm``: our kernels, Triton, and the torch reference."""

from __future__ import annotations

from aiter_mx.fallbacks import grouped_tiles
from aiter_mx.kernels.grouped_gemm.persistent_gfx950 import PERSISTENT as PERSISTENT_GFX950
from aiter_mx.kernels.grouped_gemm.persistent_sm90 import PERSISTENT as PERSISTENT_SM90
from aiter_mx.kernels.grouped_gemm.problem import KEY, GroupedGemmProblem, stand_ins
from aiter_mx.kernels.spec import KernelSpec, reference

__all__ = ["KERNELS", "KEY", "PROBLEM", "GroupedGemmProblem", "stand_ins"]

PROBLEM = GroupedGemmProblem

KERNELS = (
    PERSISTENT_GFX950,
    PERSISTENT_SM90,
    KernelSpec(
        op="grouped_gemm",
        backend="triton",
        name="dot_scaled",
        params=grouped_tiles.PARAMS,
        refusal=grouped_tiles.refusal,
        configure=grouped_tiles.configure,
        candidates=grouped_tiles.candidates,
    ),
    reference("grouped_gemm"),
)
