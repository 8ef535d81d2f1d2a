"""Hopper's grouped kernel over routed rows, which it finds, activates and quantises by itself."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest
import torch

import aiter_mx
from aiter_mx.kernels.fused_moe import ACTIVATIONS
from aiter_mx.kernels.moe_gemm.grouped import GROUPED_SM90, sums_problem
from aiter_mx.kernels.moe_gemm.problem import LAYOUTS
from aiter_mx.kernels.spec import KernelSpec
from aiter_mx.target import target_of
from op_tests.launches import Out, is_poison, launch, on, same_bytes
from op_tests.moe.layers import assert_layer, random_call
from op_tests.moe.operands import Case, Drawn, activated, draw_layer
from op_tests.moe.reference import assert_activated

pytestmark = pytest.mark.gpu

E4M3 = torch.float8_e4m3fn
# N: of the tiles, of 128 features, that is whole, a tail, or short of 32 or of 96.
CASES = [
    Case(700, 512, 256, 3, 2, 64),
    Case(300, 320, 320, 2, 2, 128),
    Case(150, 448, 64, 4, 3, 20),
    Case(260, 384, 576, 2, 4, 64),
    Case(40, 64, 512, 4, 2, 12),
    Case(513, 128, 1344, 1, 1, 64),
]
ODD = Case(333, 640, 416, 3, 2, 64)  # an odd number of scales a row
OUTSIDE = {  # of x and of w: what bf16 does not cover of x, of w, of both
    "x": ((56, 61), (-64, -61)),
    "some w": ((44, 47), (-66, -63)),
    "both": ((56, 62), (-81, -75)),
}


@pytest.fixture
def device() -> torch.device:
    here = torch.device("cuda", 0)
    if target_of(here).arch != "sm_90a":
        pytest.skip("for Hopper")
    return here


def results_of(kernel: KernelSpec, drawn: Drawn, device: torch.device) -> list[torch.Tensor]:
    p = drawn.problem
    outs = Out((p.routed, p.N // 2), E4M3), Out((p.routed, p.N // 64), torch.uint8)
    return launch(kernel, device, p, {}, [*drawn.tensors, *outs])


def assert_right(drawn: Drawn, device: torch.device) -> list[torch.Tensor]:
    results, p = results_of(GROUPED_SM90, drawn, device), drawn.problem
    swiglu = (p.alpha, p.beta, p.limit)
    assert_activated(*results, drawn.layer, p.activation, p.layout == "interleaved", swiglu)
    assert all(is_poison(result[drawn.layer.rows_of(-1)]) for result in results)
    return results


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_and_layout_matches_float64(
    activation: str, layout: str, device: torch.device
) -> None:
    for seed, case in enumerate((*CASES, ODD) if activation == "silu" else CASES[:4]):
        drawn = activated(draw_layer(case, seed, "mxfp8"), activation, layout)
        first = assert_right(drawn, device)
        assert all(map(same_bytes, first, results_of(GROUPED_SM90, drawn, device)))


@pytest.mark.sanitized
def test_tiles_that_are_not_full_match_float64(device: torch.device) -> None:
    for seed, layout in enumerate(LAYOUTS):
        drawn = draw_layer(Case(70, 192, 160, 3, 2, 20), seed, "mxfp8")
        assert_right(activated(drawn, "silu", layout), device)


@pytest.mark.parametrize("kind", OUTSIDE)
def test_scales_that_bf16_does_not_cover_are_computed_exactly(
    kind: str, device: torch.device
) -> None:
    for seed, (case, layout) in enumerate(product(CASES[1:4], LAYOUTS)):
        drawn = draw_layer(case, seed, "mxfp8", exponents=OUTSIDE[kind])
        assert_right(activated(drawn, "silu", layout), device)


def test_bits_are_those_of_sums_in_fp32_that_are_activated_by_a_launch_of_their_own(
    device: torch.device,
) -> None:
    composed = GROUPED_SM90.composed
    assert composed is not None
    apart = replace(
        GROUPED_SM90,
        composed=replace(
            composed,
            parts=lambda target, p, config: (
                () if p.sorted_out else (("moe_gemm", sums_problem(p)),)
            ),
        ),
    )
    for seed, (case, layout) in enumerate(product(CASES, LAYOUTS)):
        drawn = activated(draw_layer(case, seed, "mxfp8"), "silu", layout)
        found = (results_of(kernel, drawn, device) for kernel in (GROUPED_SM90, apart))
        assert all(map(same_bytes, *found))


@pytest.mark.parametrize("exact_sums", [None, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_layers_of_many_tokens_match_float64(
    dtype: torch.dtype, exact_sums: bool | None, device: torch.device
) -> None:
    for seed, activation in enumerate(("silu", "swiglu_oai", "silu")):
        draw = random.Random(seed)
        fixed = {"M": 600, "experts": 3 + seed % 2, "top_k": 2, "intermediate": 96 + 64 * seed}
        call = random_call(draw, seed, dtype=dtype, hidden=256, activation=activation, **fixed)
        call["exact_sums"] = exact_sums
        found = aiter_mx.fused_moe(**on(device, call))
        assert_layer(found.cpu(), call, device)
        assert torch.equal(aiter_mx.fused_moe(**on(device, call)), found)


def test_experts_of_other_ranks_are_left_out(device: torch.device) -> None:
    fixed = {"M": 1200, "experts": 64, "top_k": 8, "hidden": 128, "intermediate": 64}
    for seed in range(2):
        call = random_call(random.Random(seed), seed, has_map=False, shared=0, **fixed)
        here = 8
        call |= {name: call[name][:here] for name in ("w1q", "w1s", "w2q", "w2s")}
        call |= {name: call[name][:here] for name in ("bias1", "bias2") if call[name] is not None}
        numbers = torch.full((64,), -1, dtype=torch.int32)
        numbers[torch.randperm(64, generator=torch.Generator().manual_seed(seed))[:here]] = (
            torch.arange(here, dtype=torch.int32)
        )
        call["expert_map"] = numbers
        assert_layer(aiter_mx.fused_moe(**on(device, call)).cpu(), call, device)
