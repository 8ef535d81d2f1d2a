"""Many tokens an expert: ``moe_gemm`` by way of ``grouped_gemm``."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import aiter_mx
from aiter_mx import launch
from aiter_mx.checks import BLOCK, DTYPE_NAMES
from aiter_mx.dispatch.dispatcher import route
from aiter_mx.dispatch.route import Route
from aiter_mx.kernels.fused_moe import FusedMoeProblem
from aiter_mx.kernels.moe_combine import MoeCombineProblem
from aiter_mx.kernels.moe_gemm import MoeGemmProblem, grouped
from aiter_mx.kernels.moe_gemm.grouped import GATHER, GROUPED, grouped_problem
from aiter_mx.kernels.registry import find_kernel
from aiter_mx.kernels.spec import KernelSpec
from aiter_mx.ops import fused_moe_call
from aiter_mx.plan import Plans, bind_route, build_requests
from aiter_mx.target import hardware, target_of
from aiter_mx.workloads import workload_of
from op_tests.conformance import DTYPES
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
        if target_of(here).arch not in ("gfx950", "sm_90a"):
            pytest.skip("no kernel for it")
        yield here


def test_gathered_padding_has_scales_that_the_matrix_unit_takes(device: torch.device) -> None:
    if not GATHER.is_for(target_of(device).arch):
        pytest.skip("nothing is gathered there")
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
        places = torch.full((problem.routed,), -9, dtype=torch.int32, device=device)
        every = (xq, xs, ids, expert_ids, used, gathered, scales, *bounds, places)
        run(every, [tensor.data_ptr() for tensor in every])
        of_tokens = 0
        for start, end in zip(*bounds.tolist(), strict=True):
            for place in range(start, end):
                is_token = int(ids[place]) in range(problem.routed)
                of_tokens += is_token
                if not is_token and problem.ids == "vllm":
                    assert scales[place].tolist() == [127] * blocks
        assert problem.ids != "vllm" or of_tokens


def results_of(
    kernel: KernelSpec,
    problem: MoeGemmProblem,
    given: list[Tensor | None],
    out: Tensor,
    more: object,
) -> None:
    device = out.device
    run = bind_route(Route(kernel, {}, "envelope", ()), target_of(device), problem, device)
    launch.call(run, *given, out, more)


@pytest.mark.parametrize("backend", ["hip", "torch"])
@pytest.mark.parametrize("case", [Case(20, 64, 256, 4, 2, 12), Case(70, 96, 96, 3, 3, 20)])
def test_sorted_results_are_those_of_routed_rows(
    case: Case, backend: str, device: torch.device
) -> None:
    name = "grouped" if backend == "hip" else "reference"
    kernel = find_kernel("moe_gemm", target_of(device).arch, backend, name)
    for seed in range(3):
        drawn = draw_layer(case, seed, "fp32", weighted=False)
        plain = drawn.problem
        given = [t if t is None else t.to(device) for t in drawn.tensors]
        rows = torch.full((plain.routed, plain.N), torch.nan, device=device)
        results_of(kernel, plain, given, rows, None)
        every = torch.full((plain.blocks * plain.block_m, plain.N), torch.nan, device=device)
        places = torch.full((plain.routed,), -9, dtype=torch.int32, device=device)
        results_of(kernel, replace(plain, sorted_out=True), given, every, places)
        for t, (expert, place) in enumerate(zip(drawn.layer.experts, places.tolist(), strict=True)):
            if 0 <= expert < plain.E:
                assert torch.equal(every[place], rows[t])
            else:
                assert place == (-9 if expert < 0 else -1)


def test_layer_of_many_tokens_has_the_same_bits_with_sorted_results(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed = {"M": 300, "experts": 3, "top_k": 2, "hidden": 64, "intermediate": 96}
    fixed["dtype"] = torch.float16  # whose slots stay in fp32 both ways
    for seed, more in enumerate(({"has_map": False}, {"has_map": True, "shared": 1}, {})):
        call = on(device, random_call(random.Random(seed), seed, **fixed, **more))
        if seed == 2:
            call["num_tokens"] = torch.tensor([280], dtype=torch.int32, device=device)
            call["out"] = torch.full_like(call["x"], 7.0)
        layer = FusedMoeProblem(300, 64, 96, call["w1q"].shape[0], 2, 3, has_map=1, dtype="fp16")
        gemm = layer.parts(target_of(device).arch)[2][1]
        assert isinstance(gemm, MoeGemmProblem) and gemm.sorted_out
        tried = workload_of("moe_gemm").operands(gemm, device)
        kernel = find_kernel("moe_gemm", target_of(device).arch, "hip", "grouped")
        results_of(kernel, gemm, tried[:9], *tried[9:])
        assert workload_of("moe_gemm").judge(gemm, tried)(tried).right
        found = aiter_mx.fused_moe(**call).clone()
        with monkeypatch.context() as patch:
            patch.setattr(grouped, "is_first", lambda arch, problem: False)
            patch.setattr(fused_moe_call, "_plans", Plans())
            assert torch.equal(aiter_mx.fused_moe(**call), found)


def test_dispatch_hands_over_where_experts_have_many_rows() -> None:
    for M, kernel in [(1, "mfma"), (512, "mfma"), (8192, "grouped")]:
        shape = {"N": 6144, "K": 768, "E": 128, "top_k": 4, "out_dtype": "fp32"}
        assert aiter_mx.explain("moe_gemm", arch="gfx950", M=M, **shape).kernel == kernel
    odd = MoeGemmProblem(8192, 100, 768, 8, 4)
    assert "N=100 is not a multiple of 32" in str(GROUPED.refusal(hardware("gfx950"), odd))


def test_hopper_computes_exact_gemms_of_many_tokens_by_two_objects() -> None:
    target = replace(hardware("sm_90a"), exact_sums=True)
    for M in (2048, 8192, 32768):
        gemms = [gemm for _, gemm in FusedMoeProblem(M, 2048, 768, 128, 8).parts("sm_90a")][1:3]
        routes = [route("moe_gemm", target, gemm) for gemm in gemms]
        assert {chosen.kernel for chosen in routes} == {"grouped"}
        assert len(build_requests(target, gemms, routes)) == 2


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_fused_layer_of_many_tokens_matches_float64(
    dtype: torch.dtype, device: torch.device
) -> None:
    fixed = {"M": 300, "experts": 2, "top_k": 2, "hidden": 256, "intermediate": 256, "shared": 0}
    fixed |= {"has_map": False, "dtype": dtype, "id_dtype": torch.int32, "biased": True}
    call = random_call(random.Random(1), 1, activation="silu", layout="halves", **fixed)
    layer = FusedMoeProblem(300, 256, 256, 2, 2, dtype=DTYPE_NAMES[dtype])
    second, combine = (part for _, part in layer.parts(target_of(device).arch)[2:])
    slots = "bf16" if dtype == torch.bfloat16 else "fp32"
    assert isinstance(second, MoeGemmProblem) and second.out_dtype == slots
    assert isinstance(combine, MoeCombineProblem) and combine.y_dtype == slots
    with_wide_blocks = aiter_mx.fused_moe(**on(device, call))
    assert_layer(with_wide_blocks.cpu(), call, device)
