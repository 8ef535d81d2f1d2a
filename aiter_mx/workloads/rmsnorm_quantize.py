"""RMSNorm fused with quantisation, tried out: on rows whose magnitudes differ."""

from __future__ import annotations

import torch

from aiter_mx.codec import DTYPES, dequantize_block_scaled
from aiter_mx.kernels.rmsnorm_quantize import RMSNormQuantizeProblem
from aiter_mx.launch import Tensors
from aiter_mx.numerics import BLOCK
from aiter_mx.workloads.workload import ROUNDING, Judge, Operands, Verdict, Workload, fewer_rows

_RESULTS = (5, 6, 7, 8)
_E4M3_STEP = 2.0**-4  # half of a step, of a number that is normal
_LEAST = 2.0**-10  # half of the step of a subnormal e4m3, whose block's largest is 224 at least
_NORM_ERROR = 2.0**-18  # of sums and of the root


def _operands(problem: RMSNormQuantizeProblem, device: torch.device) -> Operands:
    p, dtype = problem, DTYPES[problem.dtype]

    def rows(columns: int) -> torch.Tensor | None:
        if not columns:
            return None
        exponents = torch.randint(-8, 8, (p.M, 1), device=device)
        return (torch.randn(p.M, columns, device=device) * 2.0**exponents).to(dtype)

    def weights(columns: int) -> torch.Tensor | None:
        return (torch.rand(columns, device=device) + 0.5).to(dtype) if columns else None

    residual = rows(p.N) if p.residual else None
    given = [rows(p.N), residual, weights(p.N), rows(p.N2), weights(p.N2)]
    return [*given, *_results(p, device)]


def _results(p: RMSNormQuantizeProblem, device: torch.device) -> Operands:
    dtype = DTYPES[p.dtype]
    return [
        torch.empty(p.M, p.N, dtype=torch.float8_e4m3fn, device=device),
        torch.empty(p.M, p.N // BLOCK, dtype=torch.uint8, device=device),
        torch.empty(p.M, p.N, dtype=dtype, device=device) if p.residual else None,
        torch.empty(p.M, p.N2, dtype=dtype, device=device) if p.N2 else None,
    ]


def _another(problem: RMSNormQuantizeProblem, operands: Operands) -> Operands:
    x = operands[0]
    assert x is not None
    return [torch.roll(x, 1, dims=1), *operands[1:5], *_results(problem, x.device)]


def _read_bytes(problem: RMSNormQuantizeProblem, operands: Operands | None) -> float:
    p = problem
    return p.M * (p.N * (1 + p.residual) + p.N2) * DTYPES[p.dtype].itemsize


def _norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    values = x.double()
    return values / (values.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight.double()


def _judge(problem: RMSNormQuantizeProblem, tensors: Tensors) -> Judge:
    p = problem
    x, residual, weight, x2, weight2, *_ = tensors
    total = x if residual is None else (x.float() + residual.float()).to(x.dtype)
    wanted = _norm(total, weight, p.epsilon)
    wanted2 = None if x2 is None else _norm(x2, weight2, p.epsilon2)

    def judge(results: Tensors) -> Verdict:
        payload, scale, summed, norm2 = results[5:]
        got = dequantize_block_scaled(payload, scale, torch.float64)
        error = (got - wanted).abs()
        block = torch.exp2(scale.double() - 127).repeat_interleave(BLOCK, -1)
        allowed = wanted.abs() * (_E4M3_STEP + _NORM_ERROR) + block * _LEAST
        worst = float((error / allowed).max()) if p.mode == "rceil" else 0.0
        if summed is not None and not torch.equal(summed, total):
            worst = float("inf")
        if norm2 is not None and wanted2 is not None:
            most = wanted2.abs() * (ROUNDING[p.dtype] + _NORM_ERROR) + 1e-6
            worst = max(worst, float(((norm2.double() - wanted2).abs() / most).max()))
        if got.isnan().any():
            worst = float("nan")
        return Verdict(rel_err=float(error.norm() / wanted.norm()), worst=worst)

    return judge


WORKLOAD = Workload(
    op="rmsnorm_quantize",
    draw=_operands,
    redraw=_another,
    read_bytes=_read_bytes,
    results=_RESULTS,
    judge=_judge,
    sample=fewer_rows,
)
