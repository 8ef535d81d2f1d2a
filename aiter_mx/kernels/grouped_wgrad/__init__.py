"""Kernels of the gradient of a grouped GEMM's weights."""

from __future__ import annotations

from aiter_mx.kernels.grouped_wgrad.persistent_gfx950 import PERSISTENT as PERSISTENT_GFX950
from aiter_mx.kernels.grouped_wgrad.persistent_sm90 import PERSISTENT as PERSISTENT_SM90
from aiter_mx.kernels.grouped_wgrad.problem import KEY, GroupedWgradProblem, stand_ins
from aiter_mx.kernels.grouped_wgrad.triton import DOT_SCALED
from aiter_mx.kernels.spec import reference

__all__ = ["KERNELS", "KEY", "PROBLEM", "GroupedWgradProblem", "stand_ins"]

PROBLEM = GroupedWgradProblem

KERNELS = (PERSISTENT_GFX950, PERSISTENT_SM90, DOT_SCALED, reference("grouped_wgrad"))
