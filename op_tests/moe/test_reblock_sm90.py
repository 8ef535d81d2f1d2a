"""Lists in blocks of another size than suits Hopper's kernels of ``moe_gemm``."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest
import torch

from aiter_mx.dispatch.dispatcher import route
from aiter_mx.kernels.moe_gemm import MoeGemmProblem
from aiter_mx.kernels.moe_gemm.mma_ring_sm90 import MMA_RING
from aiter_mx.kernels.moe_gemm.reblock_sm90 import REBLOCK, in_blocks, reblocked
from aiter_mx.kernels.moe_gemm.wgmma_f16_sm90 import WGMMA_F16
from aiter_mx.kernels.moe_gemm.wgmma_fp8_sm90 import ACCUMULATION_ERROR, WGMMA_FP8
from aiter_mx.kernels.spec import KernelSpec
from aiter_mx.launch import bind_module, call
from aiter_mx.plan import functions_of
from aiter_mx.target import hardware, target_of
from op_tests.launches import Out, is_poison, launch, poisoned, same_bytes
from op_tests.moe.operands import Case, activated, draw_experts, draw_layer, lists_of
from op_tests.moe.reference import assert_activated, assert_rows

SM90 = hardware("sm_90a")
KERNELS = {kernel.name: kernel for kernel in (MMA_RING, WGMMA_FP8, WGMMA_F16)}
E4M3 = torch.float8_e4m3fn
SECOND = MoeGemmProblem(256, 2048, 768, 128, 8, 64, "fp32", weights="by_t")


@pytest.mark.parametrize(
    ("changes", "block_m"),
    [
        ({}, 48),
        ({"M": 64}, 16),
        ({"M": 1024}, 80),
        ({"M": 256, "block_m": 128}, 48),
        ({"M": 8}, 64),  # hardly two rows an expert
        ({"M": 4096}, 64),  # so many that blocks no longer matter
        ({"N": 1536}, 64),  # weights that are read in less than a launch is worth
        ({"block_m": 48}, 48),
        ({"block_m": 16}, 16),  # of which three are one
        ({"block_m": 112}, 112),  # of which a warp's pieces are no part
        ({"max_blocks": 513}, 64),  # more than one workgroup takes
        ({"early_routing": True}, 64),
        ({"M": 15, "E": 8, "K": 14336}, 64),  # whose experts have one block of either size
    ],
)
def test_lists_are_made_anew_where_that_pays(changes: dict[str, int], block_m: int) -> None:
    problem = replace(SECOND, **changes)
    found = reblocked(problem)
    assert found.block_m == block_m
    assert (found is problem) is (block_m == problem.block_m)
    assert reblocked(found) is found
    chosen = route("moe_gemm", SM90, problem)
    if found is not problem:
        own = replace(problem, block_m=block_m)
        assert chosen.config == chosen.spec.configure(SM90, own)
        assert "moe/reblock_sm90.cu" in [
            function.request.source for function in functions_of(SM90, problem, chosen)
        ]
    else:
        assert chosen.spec.name == "grouped" or not chosen.spec.parts(SM90, problem, chosen.config)


def test_gfx950_takes_lists_as_they_are() -> None:
    chosen = route("moe_gemm", hardware("gfx950"), SECOND)
    assert not chosen.spec.parts(hardware("gfx950"), SECOND, chosen.config)


@pytest.fixture
def device() -> torch.device:
    here = torch.device("cuda", 0)
    if target_of(here).arch != "sm_90a":
        pytest.skip("for Hopper")
    return here


def forced(kernel: KernelSpec, block_m: int) -> KernelSpec:
    """A kernel that takes every list in blocks of so many ids."""
    composed = kernel.composed
    assert composed is not None
    (module,) = composed.around(SECOND)
    anew = replace(
        module,
        scalars=lambda target, p, config: (*module.scalars(target, p, config)[:-1], block_m),
    )
    parts = replace(
        composed,
        parts=lambda target, p, config: (
            () if p.block_m == block_m else (("moe_gemm", in_blocks(p, block_m)),)
        ),
        around=lambda problem: (anew,),
    )
    return replace(kernel, composed=parts)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("M", "E"), [(1, 1), pytest.param(40, 3, marks=pytest.mark.sanitized), (700, 5), (2500, 3)]
)
def test_lists_in_other_blocks_are_those_of_the_same_rows(
    M: int, E: int, device: torch.device
) -> None:
    draw = random.Random(M)
    for ids, own, block_m in product(("vllm", "aiter"), (32, 64, 128), (16, 48, 80)):
        top_k = draw.choice([1, 4])
        experts = draw_experts(draw, M * top_k, E)
        packed = ids == "aiter"
        listed, blocks, used = lists_of(experts, E, own, top_k if packed else 0, draw)
        problem = MoeGemmProblem(
            *(M, 64, 512, E, top_k, own),
            out_dtype="fp32",
            weights="by_place" if packed else "by_t",
            ids=ids,
            max_blocks=len(blocks),
        )
        inner = in_blocks(problem, block_m)
        assert REBLOCK.refusal(SM90, problem) is None
        weights = torch.rand(len(listed))
        kernel = forced(WGMMA_F16, block_m)
        assert kernel.composed is not None
        (module,) = kernel.composed.around(problem)
        run = bind_module(kernel, module, target_of(device), problem, {}, 0)
        places = inner.blocks * block_m
        results = [
            poisoned((count,), dtype, device)
            for count, dtype in (
                (places, torch.int32),
                (inner.blocks, torch.int32),
                (1, torch.int32),
                (places, torch.float32),
            )
        ]
        given = [listed, blocks, used, weights if packed else None]
        call(run, *(None if t is None else t.to(device) for t in given), *results)
        to_ids, to_experts, to_used, to_weights = (t.cpu() for t in results)
        wanted_ids, wanted_experts, wanted_weights = expected(problem, block_m, *given)
        count = len(wanted_ids)
        assert to_used.item() == count
        assert torch.equal(to_ids[:count], wanted_ids)
        assert torch.equal(to_experts[: count // block_m], wanted_experts)
        assert is_poison(to_ids[count:]) and is_poison(to_experts[count // block_m :])
        if packed:
            valid = wanted_ids >= 0
            assert torch.equal(to_weights[:count][valid], wanted_weights[valid])
        else:
            assert is_poison(to_weights)


def expected(
    problem: MoeGemmProblem,
    block_m: int,
    ids: torch.Tensor,
    experts: torch.Tensor,
    used: torch.Tensor,
    weights: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The list that is to be made: its ids, experts and weights."""
    own, found = problem.block_m, ([], [], [])
    runs: list[tuple[int, list[int]]] = []
    for block in range(int(used) // own):
        expert = int(experts[block])
        if not runs or runs[-1][0] != expert:
            runs.append((expert, []))
        for at in range(block * own, (block + 1) * own):
            t = int(ids[at])
            if problem.ids == "aiter":
                is_valid = t >> 24 < problem.top_k and (t & 0xFFFFFF) < problem.M
                is_valid = is_valid and t >= 0
            else:
                is_valid = 0 <= t < problem.routed
            if is_valid:
                runs[-1][1].append(at)
    for expert, places in runs:
        padding = -len(places) % block_m
        found[0].extend([int(ids[at]) for at in places] + [-1] * padding)
        found[1].extend([expert] * ((len(places) + padding) // block_m))
        of = [0.0 if weights is None else float(weights[at]) for at in places]
        found[2].extend(of + [0.0] * padding)
    return (
        torch.tensor(found[0], dtype=torch.int32),
        torch.tensor(found[1], dtype=torch.int32),
        torch.tensor(found[2], dtype=torch.float32),
    )


CASES = [
    (Case(90, 128, 512, 5, 3, 64), 16),
    (Case(300, 192, 1024, 3, 2, 64), 80),
    (Case(200, 96, 512, 9, 4, 128), 48),
]


@pytest.mark.gpu
@pytest.mark.parametrize("name", KERNELS)
def test_products_over_a_list_that_is_made_anew_match_float64(
    name: str, device: torch.device
) -> None:
    dtype = "bf16" if name == "wgmma_fp8" else "fp32"
    error = ACCUMULATION_ERROR if name == "wgmma_fp8" else 0.0
    for seed, ((case, block_m), ids) in enumerate(product(CASES, ("vllm", "aiter"))):
        drawn = draw_layer(case, seed, dtype, accumulation_error=error, ids=ids)
        p, kernel = drawn.problem, forced(KERNELS[name], block_m)
        out_dtype = torch.bfloat16 if dtype == "bf16" else torch.float32
        tensors = [*drawn.tensors, Out((p.routed, p.N), out_dtype), None]
        (out,) = launch(kernel, device, p, None, tensors)
        assert_rows(out, drawn.layer)
        assert same_bytes(launch(kernel, device, p, None, tensors)[0], out)


@pytest.mark.gpu
@pytest.mark.parametrize("name", KERNELS)
def test_activated_products_over_such_a_list_match_float64(name: str, device: torch.device) -> None:
    for seed, (case, block_m) in enumerate(CASES):
        error = ACCUMULATION_ERROR if name == "wgmma_fp8" else 0.0
        drawn = draw_layer(case._replace(N=128), seed, "mxfp8", accumulation_error=error)
        drawn = activated(drawn, "silu", "halves")
        p, kernel = drawn.problem, forced(KERNELS[name], block_m)
        outs = Out((p.routed, p.N // 2), E4M3), Out((p.routed, p.N // 64), torch.uint8)
        results = launch(kernel, device, p, None, [*drawn.tensors, *outs])
        assert_activated(*results, drawn.layer, "silu", False, (p.alpha, p.beta, p.limit))
