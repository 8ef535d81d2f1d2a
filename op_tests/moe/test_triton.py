"""The Triton grouped GEMM over routed tokens: in Triton's interpreter, and on a GPU.

Run as a script, this file checks the kernel in Triton's interpreter.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

import aiter_mx
from aiter_mx import launch, plan
from aiter_mx.errors import BuildError
from aiter_mx.kernels.fused_moe import FusedMoeProblem
from aiter_mx.kernels.moe_gemm import MoeGemmProblem
from aiter_mx.kernels.moe_gemm import triton as tiles
from aiter_mx.kernels.registry import find_kernel
from aiter_mx.ops import fused_moe_call, quantize_call
from aiter_mx.ops import moe_align as moe_align_module
from aiter_mx.ops import moe_gemm as moe_gemm_module
from aiter_mx.target import CPU, hardware
from op_tests.conformance import NAMES
from op_tests.interpreted import assert_passes_in_the_interpreter
from op_tests.launches import name_triton, poisoned
from op_tests.moe.layers import assert_layer, gpu_call
from op_tests.moe.operands import SWIGLU, Case, activated, draw_layer
from op_tests.moe.reference import assert_activated, assert_rows

CONFIG = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 64, "SWAP": 0, "num_warps": 4, "num_stages": 2}


def check(
    seed: int, N: int, K: int, dtype: torch.dtype, device: str, config: dict[str, int]
) -> None:
    from aiter_mx.fallbacks import moe_gemm_triton

    draw = random.Random(seed)
    M, E, top_k = draw.randint(1, 40), draw.randint(1, 6), draw.randint(1, 4)
    case = Case(M, N, K, E, top_k, draw.choice([4, 12, 16, 32, 64, 72]))
    drawn = draw_layer(case, seed, NAMES[dtype])
    every = [None if t is None else t.to(device) for t in drawn.tensors]
    out = poisoned((M * top_k, N), dtype, device)
    moe_gemm_triton.run(drawn.problem, [*every, out, None], config)
    assert_rows(out.cpu(), drawn.layer)


def check_activated(activation: str, layout: str, device: str) -> None:
    from aiter_mx.fallbacks import moe_gemm_triton

    drawn = activated(draw_layer(Case(30, 128, 256, 4, 3, 16), 4, "mxfp8"), activation, layout)
    routed = drawn.problem.routed
    out = poisoned((routed, 64), torch.float8_e4m3fn, device)
    scales = poisoned((routed, 2), torch.uint8, device)
    every = [None if t is None else t.to(device) for t in drawn.tensors]
    moe_gemm_triton.run(drawn.problem, [*every, out, scales], CONFIG)
    interleaved = layout == "interleaved"
    assert_activated(out.cpu(), scales.cpu(), drawn.layer, activation, interleaved, SWIGLU)


def check_tiles_without_ids_multiply_nothing() -> None:
    """Of blocks of 48 ids, tiles of 16 that have padding alone."""
    from triton.runtime.interpreter import InterpreterBuilder

    from aiter_mx.fallbacks import moe_gemm_triton

    products, multiply = [], InterpreterBuilder.create_dot_scaled

    def counted(*arguments: Any) -> Any:
        products.append(arguments)
        return multiply(*arguments)

    InterpreterBuilder.create_dot_scaled = counted
    drawn = draw_layer(Case(9, 32, 128, 3, 2, 48), 1, "fp32")
    ids, used, routed = drawn.tensors[4], drawn.tensors[6], drawn.problem.routed
    blocks = ids[: int(used)].view(-1, 48)
    blocks.copy_(blocks.sort().values)  # padding, which is above all ids, comes last
    ids_of_tiles = (blocks.view(-1, 16) < routed).sum(1)
    out = poisoned((routed, 32), torch.float32, "cpu")
    moe_gemm_triton.run(drawn.problem, [*drawn.tensors, out, None], CONFIG)
    InterpreterBuilder.create_dot_scaled = multiply
    assert_rows(out, drawn.layer)
    assert 0 < (ids_of_tiles == 0).sum() < ids_of_tiles.numel()
    assert len(products) == 2 * int((ids_of_tiles > 0).sum())  # a tile has two steps of 64 k


def check_in_the_interpreter() -> None:
    check_tiles_without_ids_multiply_nothing()
    # The interpreter truncates when it makes bf16, so that only compiled kernels can be held to it.
    for seed in range(4):
        dtype = [torch.float32, torch.float16][seed % 2]
        check(seed, 1 + 13 * seed, 64 + 32 * seed, dtype, "cpu", {**CONFIG, "SWAP": seed % 2})
    check_activated("silu", "interleaved", "cpu")
    check_activated("swiglu_oai", "halves", "cpu")


def test_triton_matches_float64_in_the_interpreter() -> None:
    from triton.runtime.interpreter import InterpreterBuilder

    if not hasattr(InterpreterBuilder, "create_dot_scaled"):
        pytest.skip("the interpreter of this Triton has no dot_scaled; 3.9's has")
    assert_passes_in_the_interpreter(__name__)


@pytest.mark.parametrize("arch", ["gfx950", "sm_90a"])
def test_candidates_are_legal_and_refused_without_a_gpu(arch: str) -> None:
    spec = find_kernel("moe_gemm", arch, "triton", "dot_scaled")
    for rows, candidates in tiles.CANDIDATES[arch].items():
        for candidate in candidates:
            spec.check_config(candidate)
            assert candidate["BLOCK_M"] == rows
    problem = MoeGemmProblem(20, 64, 64, 4, 2)
    assert spec.refusal(hardware(arch), problem) is None
    assert spec.configure(hardware(arch), problem) in tiles.candidates(hardware(arch), problem)
    assert "Triton needs a GPU" in str(spec.refusal(CPU, problem))


@pytest.mark.gpu
def test_every_candidate_matches_float64_on_a_gpu() -> None:
    from aiter_mx.target import gpu_target

    for candidates in tiles.CANDIDATES[gpu_target(0).arch].values():
        for seed, config in enumerate(candidates):
            check(seed, 200, 1056, torch.bfloat16, "cuda", config)
            check(seed + 10, 70, 512, torch.float32, "cuda", config)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["silu", "swiglu_oai", "gelu", "gelu_tanh", "relu2"])
@pytest.mark.parametrize("layout", ["halves", "interleaved"])
def test_activation_is_quantised_on_a_gpu(activation: str, layout: str) -> None:
    check_activated(activation, layout, "cuda")


def by_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no kernel of ours be built, and the next in line be taken."""

    def fail(*arguments: object) -> NoReturn:
        raise BuildError("no compiler today")

    for name in ("bind", "bind_module"):
        monkeypatch.setattr(launch, name, fail)
    monkeypatch.setenv("AITER_MX_ON_ERROR", "fallback")


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:hip/")
@pytest.mark.parametrize(
    ("activation", "has_map", "fails"),
    [("silu", False, False), ("swiglu_oai", True, False), ("silu", True, True)],
)
def test_layer_by_triton_is_right_and_can_be_captured(
    activation: str, has_map: bool, fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = gpu_call(7, has_map=has_map) | {"activation": activation}
    problem = FusedMoeProblem(
        M=7,
        hidden=1024,
        intermediate=256,
        E=len(call["w1q"]),
        top_k=4,
        num_experts=32,
        shared=1,
        has_map=int(has_map),
        activation=activation,
    )
    for module in (fused_moe_call, moe_gemm_module, moe_align_module, quantize_call):
        monkeypatch.setattr(module._plans, "by_call", {})
    launched: list[str] = []
    plan._imported.cache_clear()
    for name in ("moe_align_triton", "moe_gemm_triton", "moe_combine_triton"):
        module = import_module(f"aiter_mx.fallbacks.{name}")
        monkeypatch.setattr(module, "run", partial(noted, launched, name, module.run))
    if fails:
        by_failure(monkeypatch)
    else:
        name_triton(problem.parts(), tmp_path, monkeypatch)
        routes = aiter_mx.warmup("fused_moe", **vars(problem))
        assert [route.backend for route in routes] == ["triton"] * 4
        torch.cuda.synchronize()
        launched.clear()
    out = aiter_mx.fused_moe(**call)
    gemm = "moe_gemm_triton"
    assert launched == ["moe_align_triton", gemm, gemm, "moe_combine_triton"]
    cpu = {name: v.cpu() if isinstance(v, torch.Tensor) else v for name, v in call.items()}
    assert_layer(out.cpu(), cpu, torch.device("cuda"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = aiter_mx.fused_moe(**call)
    for seed in (0, 1):
        fresh = gpu_call(7, seed, has_map=has_map)
        for name in ("x", "topk_ids", "topk_weights"):
            call[name].copy_(fresh[name])
        graph.replay()
        assert torch.equal(again, aiter_mx.fused_moe(**call))


def noted(names: list[str], name: str, run: Callable[..., None], *arguments: Any) -> None:
    names.append(name)
    run(*arguments)


if __name__ == "__main__":
    check_in_the_interpreter()
