"""RMSNorm fused with MX quantisation in torch operations, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from aiter_mx.codec import FORMATS, amax_bits, encode_blocks, pack_elements
from aiter_mx.kernels.rmsnorm_quantize import RMSNormQuantizeProblem
from aiter_mx.kernels.spec import Config
from aiter_mx.launch import Tensors
from aiter_mx.numerics import BLOCK


def run(problem: RMSNormQuantizeProblem, tensors: Tensors, config: Config) -> None:
    """Compute what csrc/quantize/rmsnorm.cu does, but for the order of sums."""
    x, residual, weight, x2, weight2, payload, scales, summed, norm2 = tensors
    if residual is not None:
        x = (x.float() + residual.float()).to(x.dtype)
        summed.copy_(x)
    e4m3 = FORMATS["e4m3"]
    norm = rmsnorm(x, weight, problem.epsilon)
    blocks = norm.unflatten(-1, (problem.N // BLOCK, BLOCK)).contiguous()
    elements, found = encode_blocks(blocks, amax_bits(blocks), e4m3, problem.mode)
    payload.copy_(pack_elements(elements.flatten(-2), e4m3))
    scales.copy_(found)
    if x2 is not None:
        norm2.copy_(rmsnorm(x2, weight2, problem.epsilon2))


def rmsnorm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """float32: rows over their root mean square, times weights."""
    values = x.float()
    factor = torch.rsqrt(values.square().mean(-1, keepdim=True) + epsilon)
    return values * factor * weight.float()
