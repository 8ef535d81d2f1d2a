"""Many tokens an expert: ``moe_gemm`` by way of ``grouped_gemm``."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import aiter_mx
from aiter_mx import launch
from aiter_mx.dispatch.route import Route
from aiter_mx.kernels.moe_gemm import MoeGemmProblem
from aiter_mx.kernels.moe_gemm.grouped import GATHER, GROUPED, grouped_problem
from aiter_mx.ops.checks import BLOCK
from aiter_mx.plan import bind_route
from aiter_mx.target import hardware, target_of
from op_tests.moe.reference import assert_activated, assert_rows
from op_tests.moe.test_fused_moe import assert_layer, on, random_call
from op_tests.moe.test_gemm import DTYPES, POISON, SCHEDULES, SWIGLU, random_layer


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


def run_grouped(problem: MoeGemmProblem, device: torch.device, tensors: list) -> None:
    chosen = Route(GROUPED, {}, "test")
    bind_route(chosen, target_of(device), problem, device)(tensors, ())


def test_random_routings_match_float64(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(6)
    for seed in range(10):
        monkeypatch.setenv("AITER_MX_SIM_SCHEDULE", draw.choice(SCHEDULES))
        monkeypatch.setenv("AITER_MX_SIM_SEED", str(seed))
        N, K = 32 * draw.randint(1, 3), 256 * draw.randint(1, 2)
        problem, layer, tensors = random_layer(draw, seed, N, K, "fp32")
        if problem.weights != "none":  # then sums are fp32, as the variant in use has them
            problem = replace(problem, out_dtype="bf16")
        out = torch.empty(problem.routed, problem.N, dtype=DTYPES[problem.out_dtype])
        out.view(torch.uint8).fill_(POISON)
        every = [None if t is None else t.to(device) for t in (*tensors, out, None)]
        run_grouped(problem, device, every)
        assert_rows(every[9].cpu(), layer, POISON)


@pytest.mark.parametrize(
    ("activation", "layout"), [("silu", "halves"), ("swiglu_oai", "interleaved")]
)
def test_activated_rows_are_quantised_as_the_exact_ones(
    device: torch.device, activation: str, layout: str
) -> None:
    draw = random.Random(activation)
    for seed in range(4):
        N, K = 64 * draw.randint(1, 2), 256 * draw.randint(1, 2)
        problem, layer, tensors = random_layer(draw, seed, N, K, "fp32", activated=True)
        problem = replace(problem, out_dtype="mxfp8", activation=activation, layout=layout)
        out = torch.empty(problem.routed, N // 2, dtype=torch.float8_e4m3fn, device=device)
        scales = torch.empty(problem.routed, N // 64, dtype=torch.uint8, device=device)
        every = [None if t is None else t.to(device) for t in tensors]
        run_grouped(problem, device, [*every, out, scales])
        interleaved = layout == "interleaved"
        assert_activated(out.cpu(), scales.cpu(), layer, activation, interleaved, SWIGLU)


def test_gathered_padding_has_scales_that_the_matrix_unit_takes(device: torch.device) -> None:
    draw = random.Random(3)
    for seed in range(4):
        problem, _, tensors = random_layer(draw, seed, 32, 256, "fp32")
        xq, xs, _, _, ids, expert_ids, used, *_ = [
            t if t is None else t.to(device) for t in tensors
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
