"""Many tokens an expert: ``moe_gemm`` by way of ``grouped_gemm``."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

import aiter_mx
from aiter_mx import launch
from aiter_mx.checks import BLOCK
from aiter_mx.kernels.moe_gemm import MoeGemmProblem
from aiter_mx.kernels.moe_gemm.grouped import GATHER, GROUPED, grouped_problem
from aiter_mx.target import hardware, target_of
from op_tests.launches import POISON, on
from op_tests.moe.layers import assert_layer, random_call
from op_tests.moe.operands import Case, draw_layer


@pytest.fixture(params=["sim", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    if request.param == "sim":
        with aiter_mx.simulate("gfx950"):
            yield torch.device("cpu")
    else:
        here = torch.device("cuda", 0)
        why_not = GROUPED.refusal(target_of(here), MoeGemmProblem(1, 32, 32, 1, 1))
        if why_not:
            pytest.skip(why_not)
        yield here


def test_gathered_padding_has_scales_that_the_matrix_unit_takes(device: torch.device) -> None:
    for seed in range(4):
        drawn = draw_layer(Case(20, 32, 256, 4, 2, 12), seed, "fp32")
        problem = drawn.problem
        xq, xs, _, _, ids, expert_ids, used, *_ = [
            t if t is None else t.to(device) for t in drawn.tensors
        ]
        target, blocks = target_of(device), problem.K // BLOCK
        rows = grouped_problem(problem).M
        gathered = torch.full((rows, problem.K), POISON, dtype=torch.uint8, device=device)
        scales = torch.full((rows, blocks), 254, dtype=torch.uint8, device=device)
        bounds = torch.empty((2, problem.E), dtype=torch.int32, device=device)
        run = launch.bind(GATHER, target, problem, {}, device.index or 0)
        every = (xq, xs, ids, expert_ids, used, gathered, scales, *bounds)
        run(every, [tensor.data_ptr() for tensor in every])
        of_tokens = 0
        for start, end in zip(*bounds.tolist(), strict=True):
            for place in range(start, end):
                is_token = int(ids[place]) in range(problem.routed)
                of_tokens += is_token
                if not is_token and problem.ids == "vllm":
                    assert scales[place].tolist() == [127] * blocks
        assert problem.ids != "vllm" or of_tokens


def test_dispatch_hands_over_where_experts_have_many_rows() -> None:
    for M, kernel in [(1, "mfma"), (512, "mfma"), (8192, "grouped")]:
        shape = {"N": 6144, "K": 768, "E": 128, "top_k": 4, "out_dtype": "fp32"}
        assert aiter_mx.explain("moe_gemm", arch="gfx950", M=M, **shape).kernel == kernel
    odd = MoeGemmProblem(8192, 100, 768, 8, 4)
    assert "N=100 is not a multiple of 32" in str(GROUPED.refusal(hardware("gfx950"), odd))


def test_fused_layer_of_many_tokens_matches_float64(device: torch.device) -> None:
    fixed = {"M": 300, "experts": 2, "top_k": 2, "hidden": 256, "intermediate": 256, "shared": 0}
    fixed |= {"has_map": False, "dtype": torch.bfloat16, "id_dtype": torch.int32, "biased": True}
    call = random_call(random.Random(1), 1, activation="silu", layout="halves", **fixed)
    with_wide_blocks = aiter_mx.fused_moe(**on(device, call))
    assert_layer(with_wide_blocks.cpu(), call, device)
