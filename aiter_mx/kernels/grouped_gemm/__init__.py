"""What can compute ``aiter_mx.grouped_gemm``: our kernels, Triton, and the torch reference."""

from __future__ import annotations

from dataclasses import replace

from aiter_mx.kernels.grouped_gemm.in_place_sm90 import IN_PLACE as IN_PLACE_SM90
from aiter_mx.kernels.grouped_gemm.persistent_gfx950 import LAYOUTS as LAYOUTS_GFX950
from aiter_mx.kernels.grouped_gemm.persistent_gfx950 import PERSISTENT as PERSISTENT_GFX950
from aiter_mx.kernels.grouped_gemm.persistent_sm90 import PERSISTENT as PERSISTENT_SM90
from aiter_mx.kernels.grouped_gemm.problem import KEY, GroupedGemmProblem, stand_ins
from aiter_mx.kernels.grouped_gemm.rescaled_sm90 import RESCALED as RESCALED_SM90
from aiter_mx.kernels.grouped_gemm.triton import DOT_SCALED
from aiter_mx.kernels.spec import Composition, Config, KernelSpec, Parts, reference
from aiter_mx.target import Target

__all__ = ["KERNELS", "KEY", "PROBLEM", "GroupedGemmProblem", "stand_ins"]

PROBLEM = GroupedGemmProblem


def _reading(spec: KernelSpec, *layouts: str) -> KernelSpec:
    """A kernel that reads row-major scales and those of some layouts, for scales of any layout."""

    def parts(target: Target, problem: GroupedGemmProblem, config: Config) -> Parts:
        read = problem.with_scales_in("row_major", *layouts)
        return () if read == problem else (("grouped_gemm", read),)

    return replace(spec, composed=Composition(parts, "aiter_mx.joined:with_readable_scales"))


KERNELS = (
    _reading(PERSISTENT_GFX950, *LAYOUTS_GFX950),
    _reading(RESCALED_SM90),
    _reading(IN_PLACE_SM90),
    _reading(PERSISTENT_SM90),
    _reading(DOT_SCALED),
    _reading(reference("grouped_gemm")),
)
