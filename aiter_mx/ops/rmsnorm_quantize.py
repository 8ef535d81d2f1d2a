"""``aiter_mx.rmsnorm_quantize``: RMSNorm whose result is quantised before it leaves registers."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aiter_mx.checks import (
    ALIGNMENT_BYTES,
    check_tensor,
    refuse_no_tensor,
    shape_text,
)
from aiter_mx.codec import DTYPE_NAMES
from aiter_mx.kernels.rmsnorm_quantize import RMSNormQuantizeProblem
from aiter_mx.launch import Run, call
from aiter_mx.numerics import BLOCK
from aiter_mx.plan import Plans, bind
from aiter_mx.registration import in_clear, is_traced, register, wants_gradient
from aiter_mx.target import cpu_target, target_of


class RMSNormQuantized(NamedTuple):
    """A norm that is quantised.

    Attributes:
        payload: float8_e4m3fn ``[..., N]``.
        scale: uint8 ``[..., N // 32]``, row-major.
        residual: x + residual, of x's dtype, or None.
        norm2: of x2, of its dtype, or None.
    """

    payload: Tensor
    scale: Tensor
    residual: Tensor | None
    norm2: Tensor | None


@in_clear
def rmsnorm_quantize(
    x: Tensor,
    weight: Tensor,
    epsilon: float = 1e-6,
    *,
    residual: Tensor | None = None,
    x2: Tensor | None = None,
    weight2: Tensor | None = None,
    epsilon2: float | None = None,
    mode: str = "rceil",
) -> RMSNormQuantized:
    """``quantize(s * weight / sqrt(mean(s ** 2) + epsilon))`` with ``s = x + residual``.

    The norm is computed in fp32 and rounded to e4m3 alone. A second tensor may be normalised in the
    same launch, as low-rank attention has it. Results are bitwise the same on every run. There is
    no gradient: where torch records one, its backward pass raises. The call does not synchronise
    and can be captured.

    Args:
        x: bf16, fp16 or fp32 ``[..., N]``, contiguous, N a multiple of 32.
        weight: ``[N]`` of x's dtype.
        epsilon: what is added to the mean of squares.
        residual: ``[..., N]`` of x's dtype, which is added first, or None. The sum is rounded to
            x's dtype and returned.
        x2: ``[..., N2]`` of x's dtype with as many rows, N2 a multiple of 8, or None.
        weight2: ``[N2]``, where x2 is given.
        epsilon2: of the second norm; by default ``epsilon``.
        mode: of the scales, as ``aiter_mx.quantize`` has it.

    Returns:
        payload and scale as ``aiter_mx.quantize`` has them, the sum, and the norm of x2 in its
        dtype; None for what was not asked for.

    Raises:
        TypeError: an argument that is no tensor, or of another dtype.
        ValueError: a shape, stride or device other than those above, or no such mode.
    """
    refuse_no_tensor(("residual", "x2", "weight2"), x=x, weight=weight, residual=residual, x2=x2,
                     weight2=weight2)  # fmt: skip
    epsilons = float(epsilon), float(epsilon if epsilon2 is None else epsilon2)
    tensors = (x, residual, weight, x2, weight2)
    if is_traced(tensors) or wants_gradient(*tensors):
        payload, scale, summed, norm2 = _through_torch(*tensors, *epsilons, mode)
    else:
        payload, scale, summed, norm2 = _run(*tensors, *epsilons, mode)
    return RMSNormQuantized(
        payload, scale, None if residual is None else summed, None if x2 is None else norm2
    )


_plans: Plans[Run] = Plans()


def _run(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    x2: Tensor | None,
    weight2: Tensor | None,
    epsilon: float,
    epsilon2: float,
    mode: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    inputs = (x, residual, weight, x2, weight2)
    problem = _problem_of(*inputs, epsilon, epsilon2, mode)
    results = _results(x, residual, x2)
    if problem.M == 0:
        return results
    key = (problem, x.device, x.is_cuda or cpu_target())
    run = _plans.by_call.get(key)
    if run is None:
        run = _plans.keep(key, bind("rmsnorm_quantize", target_of(x.device), problem, x.device))
    payload, scale, summed, norm2 = results
    given = [_whole(tensor) for tensor in inputs]
    outputs = (
        payload,
        scale,
        None if residual is None else summed,
        None if x2 is None else norm2,
    )
    call(run, *given, *outputs)
    return results


def _whole(tensor: Tensor | None) -> Tensor | None:
    """A tensor whose first value is where kernels may load pieces."""
    if tensor is None:
        return None
    tensor = tensor.resolve_neg()
    return tensor.clone() if tensor.data_ptr() % ALIGNMENT_BYTES else tensor


def _problem_of(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    x2: Tensor | None,
    weight2: Tensor | None,
    epsilon: float,
    epsilon2: float,
    mode: str,
) -> RMSNormQuantizeProblem:
    if x.dtype not in DTYPE_NAMES:
        raise TypeError(f"x must be bfloat16, float16 or float32, got {x.dtype}")
    if x.ndim == 0 or x.shape[-1] == 0 or x.shape[-1] % BLOCK:
        raise ValueError(
            f"x must be [..., N], N a multiple of {BLOCK}, got x of shape {shape_text(x)}"
        )
    if (x2 is None) != (weight2 is None):
        raise ValueError("x2 and weight2 go together: give both or neither")
    dtype, device, leading = (x.dtype,), x.device, tuple(x.shape[:-1])
    check_tensor("x", x, dtype, tuple(x.shape))
    check_tensor("weight", weight, dtype, (x.shape[-1],), device)
    if residual is not None:
        check_tensor("residual", residual, dtype, tuple(x.shape), device)
    N2 = 0
    if x2 is not None and weight2 is not None:
        check_tensor("x2", x2, dtype, (*leading, "N2"), device)
        N2 = x2.shape[-1]
        check_tensor("weight2", weight2, dtype, (N2,), device)
        if N2 == 0:
            raise ValueError(f"x2 must have at least one column, got {shape_text(x2)}")
    return RMSNormQuantizeProblem(
        M=prod(leading),
        N=x.shape[-1],
        dtype=DTYPE_NAMES[x.dtype],
        N2=N2,
        residual=int(residual is not None),
        mode=mode,
        epsilon=epsilon,
        epsilon2=epsilon2,
    )


def _results(
    x: Tensor, residual: Tensor | None, x2: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Uninitialised: payload, scales, sum and second norm; empty where there is none."""
    return (
        x.new_empty(x.shape, dtype=torch.float8_e4m3fn),
        x.new_empty((*x.shape[:-1], x.shape[-1] // BLOCK), dtype=torch.uint8),
        x.new_empty(0 if residual is None else x.shape),
        x.new_empty(0 if x2 is None else x2.shape),
    )


def _fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, residual, _, x2, *_ = arguments
    _problem_of(*arguments)
    return _results(x, residual, x2)


_through_torch = register(
    "rmsnorm_quantize",
    "(Tensor x, Tensor? residual, Tensor weight, Tensor? x2, Tensor? weight2, float epsilon, "
    "float epsilon2, str mode) -> (Tensor, Tensor, Tensor, Tensor)",
    _run,
    _fake,
)
