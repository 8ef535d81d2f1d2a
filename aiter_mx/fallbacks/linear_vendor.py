"""The MX-FP8 linear of the vendor's library, through torch: hipBLASLt on gfx950.

Torch's conditions for it (``aten/src/ATen/native/cuda/ScaledBlas.cpp``) are the envelope here. It
was never run by this package's authors, who have no such GPU, so no envelope prefers it: only a
tuned table names it, after the tuner has found it right and fastest on the GPU at hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from aiter_mx.target import Target

if TYPE_CHECKING:
    from torch import Tensor

_MULTIPLE = 32  # of M, N and K


class Shape(Protocol):
    """The part of a linear's problem that the envelope depends on."""

    @property
    def M(self) -> int: ...

    @property
    def N(self) -> int: ...

    @property
    def out_dtype(self) -> str: ...

    @property
    def bias(self) -> str: ...


def refusal(target: Target, problem: Shape) -> str | None:
    """Why the vendor's library does not compute a linear on ``target``, or None when it does."""
    if target.arch == "sm_90a":
        return "NVIDIA's library has no MX GEMM for sm_90a, which has no MX datapath"
    if target.arch != "gfx950" or target.runtime != "hip":
        return f"the vendor's MX GEMM needs a gfx950 GPU, and this is {target.name}"
    if problem.M % _MULTIPLE or problem.N % _MULTIPLE:
        return f"the vendor's MX GEMM needs M and N to be multiples of {_MULTIPLE}"
    if problem.out_dtype == "fp32" or problem.bias != "none":
        return "the vendor's MX GEMM writes bf16 or fp16, and adds no bias"
    return None


def linear_vendor(
    xq: Tensor,
    xs: Tensor,
    wq: Tensor,
    ws: Tensor,
    bias: Tensor | None,
    out: Tensor,
    config: Mapping[str, int],
) -> None:
    """``out = dequantised(xq) @ dequantised(wq).T`` by ``torch._scaled_mm``.

    Args:
        xq: float8_e4m3fn ``[M, K]``.
        xs: uint8 or float8_e8m0fnu ``[M, K // 32]``.
        wq: float8_e4m3fn ``[N, K]``.
        ws: uint8 or float8_e8m0fnu ``[N, K // 32]``.
        bias: None.
        out: ``[M, N]``, bfloat16 or float16, written.
        config: nothing.

    Raises:
        LaunchError: this build of torch cannot.
    """
    import torch

    from aiter_mx.errors import LaunchError

    e8m0 = torch.float8_e8m0fnu
    try:
        torch._scaled_mm(
            xq, wq.t(), scale_a=xs.view(e8m0), scale_b=ws.view(e8m0), out_dtype=out.dtype, out=out
        )
    except (NotImplementedError, RuntimeError, ValueError) as error:
        raise LaunchError(f"torch._scaled_mm refuses MX-FP8 here: {error}") from error
