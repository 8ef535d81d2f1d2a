"""The MX-FP8 linear of the vendor's library, through torch: hipBLASLt on gfx950.

Torch's conditions for it (``aten/src/ATen/native/cuda/ScaledBlas.cpp``) are the envelope here. It
was never run by this package's authors, who have no such GPU, so no envelope prefers it: only a
tuned table names it, after the tuner has found it right and fastest on the GPU at hand.
"""

from __future__ import annotations

from aiter_mx.kernels.linear.problem import LinearProblem
from aiter_mx.kernels.spec import KernelSpec
from aiter_mx.target import Target

_MULTIPLE = 32  # of M, N and K


def _refusal(target: Target, problem: LinearProblem) -> str | None:
    if target.arch == "sm_90a":
        return "NVIDIA's library has no MX GEMM for sm_90a, which has no MX datapath"
    if target.arch != "gfx950" or target.runtime != "hip":
        return f"the vendor's MX GEMM needs a gfx950 GPU, and this is {target.name}"
    if problem.M % _MULTIPLE or problem.N % _MULTIPLE:
        return f"the vendor's MX GEMM needs M and N to be multiples of {_MULTIPLE}"
    if problem.out_dtype == "fp32" or problem.bias != "none":
        return "the vendor's MX GEMM writes bf16 or fp16, and adds no bias"
    return None


SCALED_MM = KernelSpec(
    op="linear",
    backend="vendor",
    name="scaled_mm",
    params=(),
    refusal=_refusal,
    configure=lambda target, problem: {},
    candidates=lambda target, problem: ({},),
    runner="aiter_mx.fallbacks.linear_vendor:run",
)
