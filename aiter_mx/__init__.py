"""MX-FP8 ops for AMD CDNA4 and NVIDIA Hopper.

Importing the package does nothing but define names: torch, Triton and the GPU bindings are
imported when an op is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from aiter_mx._version import __version__

if TYPE_CHECKING:
    from aiter_mx.autograd import grouped_linear, linear_autograd
    from aiter_mx.dispatch.explain import explain
    from aiter_mx.dispatch.route import Route
    from aiter_mx.layouts import shuffle_scales, unshuffle_scales
    from aiter_mx.ops.fused_moe import fused_moe, fused_moe_masked
    from aiter_mx.ops.grouped_gemm import grouped_gemm
    from aiter_mx.ops.grouped_wgrad import grouped_gemm_dgrad, grouped_gemm_wgrad
    from aiter_mx.ops.linear import linear
    from aiter_mx.ops.moe_align import moe_align, moe_sort
    from aiter_mx.ops.moe_gemm import moe_gemm, moe_gemm_activated
    from aiter_mx.ops.quantize import (
        dequantize,
        quantize,
        quantize_dual,
        quantize_dual_batched,
        quantize_dual_grouped,
        quantize_grouped,
    )
    from aiter_mx.ops.rmsnorm_quantize import rmsnorm_quantize
    from aiter_mx.plan import batch_invariant
    from aiter_mx.runtimes.sim import simulate
    from aiter_mx.ungated import fused_moe_ungated
    from aiter_mx.warm import warmup

_HOME = {
    "Route": "aiter_mx.dispatch.route",
    "batch_invariant": "aiter_mx.plan",
    "dequantize": "aiter_mx.ops.quantize",
    "explain": "aiter_mx.dispatch.explain",
    "grouped_gemm": "aiter_mx.ops.grouped_gemm",
    "grouped_gemm_dgrad": "aiter_mx.ops.grouped_wgrad",
    "grouped_gemm_wgrad": "aiter_mx.ops.grouped_wgrad",
    "grouped_linear": "aiter_mx.autograd",
    "fused_moe": "aiter_mx.ops.fused_moe",
    "fused_moe_masked": "aiter_mx.ops.fused_moe",
    "fused_moe_ungated": "aiter_mx.ungated",
    "linear": "aiter_mx.ops.linear",
    "linear_autograd": "aiter_mx.autograd",
    "moe_align": "aiter_mx.ops.moe_align",
    "moe_gemm": "aiter_mx.ops.moe_gemm",
    "moe_gemm_activated": "aiter_mx.ops.moe_gemm",
    "moe_sort": "aiter_mx.ops.moe_align",
    "quantize": "aiter_mx.ops.quantize",
    "quantize_dual": "aiter_mx.ops.quantize",
    "quantize_dual_batched": "aiter_mx.ops.quantize",
    "quantize_dual_grouped": "aiter_mx.ops.quantize",
    "quantize_grouped": "aiter_mx.ops.quantize",
    "rmsnorm_quantize": "aiter_mx.ops.rmsnorm_quantize",
    "shuffle_scales": "aiter_mx.layouts",
    "simulate": "aiter_mx.runtimes.sim",
    "unshuffle_scales": "aiter_mx.layouts",
    "warmup": "aiter_mx.warm",
}

_MODULES = ("distributed", "nn")

__all__ = [
    "Route",
    "__version__",
    "batch_invariant",
    "dequantize",
    "explain",
    "fused_moe",
    "fused_moe_masked",
    "fused_moe_ungated",
    "grouped_gemm",
    "grouped_gemm_dgrad",
    "grouped_gemm_wgrad",
    "grouped_linear",
    "linear",
    "linear_autograd",
    "moe_align",
    "moe_gemm",
    "moe_gemm_activated",
    "moe_sort",
    "quantize",
    "quantize_dual",
    "quantize_dual_batched",
    "quantize_dual_grouped",
    "quantize_grouped",
    "rmsnorm_quantize",
    "shuffle_scales",
    "simulate",
    "unshuffle_scales",
    "warmup",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"aiter_mx.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'aiter_mx' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
