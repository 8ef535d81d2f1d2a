"""Trying ops out: random operands, and a judge that lets nothing wrong pass."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from mx_reference import linear_reference

from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.tuning.models import MODELS, TENSOR_PARALLEL
from aiter_mx.workloads import workload_of
from aiter_mx.workloads.workload import poison

CPU = torch.device("cpu")
WORKLOAD = workload_of("linear")
PROBLEM = LinearProblem(M=5, N=70, K=192, out_dtype="bf16", bias="fp16")


@pytest.mark.parametrize("out_dtype", ["bf16", "fp16", "fp32"])
def test_judge_takes_what_is_rounded_and_nothing_else(out_dtype: str) -> None:
    problem = replace(PROBLEM, out_dtype=out_dtype)
    tensors = WORKLOAD.operands(problem, CPU)
    if out_dtype == "fp16":
        tensors[1] -= 20  # else most results are infinite
    judge = WORKLOAD.judge(problem, tensors)
    poison(tensors, WORKLOAD.results)
    assert not judge(tensors).right
    out = tensors[5]
    right = linear_reference(*tensors[:5], out_dtype=out.dtype)
    out.copy_(right)
    verdict = judge(tensors)
    assert verdict.right
    assert verdict.rel_err < 3e-3
    for spoil in (lambda x: x * 1.1, lambda x: -x, lambda x: x * torch.nan):
        for at in right.float().abs().flatten().argsort()[-3:]:  # one element of 350
            out.copy_(right)
            out.view(-1)[at] = spoil(out.view(-1)[at])
            assert not judge(tensors).right
    out.copy_(right.roll(1, dims=0))
    assert not judge(tensors).right


def test_samples_are_parts_of_the_whole() -> None:
    whole = LinearProblem(M=3, N=9216, K=6144)
    part, share = WORKLOAD.sample(whole, 0.01)
    assert (part.M, part.K) == (3, 6144)
    assert share == part.N / whole.N < 0.05
    assert WORKLOAD.sample(replace(whole, N=50), 0.01) == (replace(whole, N=50), 1.0)


def test_every_model_poses_linears_that_can_be_tuned() -> None:
    for name, model in MODELS.items():
        for gpus in TENSOR_PARALLEL:
            problems = WORKLOAD.problems(model, gpus)
            assert problems, name
            assert all(problem.N > 0 for problem in problems)
    shapes = {(p.N, p.K) for p in WORKLOAD.problems(MODELS["wide-6144"], 4)}
    assert shapes == {(2304, 6144), (6144, 2048), (1536, 6144), (6144, 768)}


def test_unknown_ops_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown op 'conv'"):
        workload_of("conv")
