"""Layers of ``fused_moe``: calls drawn at random, and their results in float64."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

import aiter_mx
from aiter_mx.checks import DTYPE_NAMES
from aiter_mx.kernels.fused_moe import FusedMoeProblem
from aiter_mx.kernels.moe_combine import MoeCombineProblem
from aiter_mx.launch import call as launched
from aiter_mx.plan import bind
from aiter_mx.target import target_of
from op_tests.conformance import DTYPES
from op_tests.launches import on
from op_tests.moe.operands import SWIGLU, random_weights
from op_tests.moe.reference import Layer, assert_activated
from op_tests.mx_reference import assert_rounded
from op_tests.sums import stated_errors

CONSTANTS = ("alpha", "beta", "limit")


def random_call(draw: random.Random, seed: int, **given: Any) -> dict[str, Any]:
    """Arguments of a layer; ``given`` says what is not left to chance."""
    generator = torch.Generator().manual_seed(seed)

    def take(name: str, *choices: Any) -> Any:
        return given[name] if name in given else draw.choice(choices)

    hidden, intermediate = take("hidden", 64, 256), take("intermediate", 32, 96)
    routed_experts, top_k = take("experts", 2, 8), take("top_k", 1, 2, 4)
    shared, M = take("shared", 0, 1), take("M", 1, 5, 33)
    has_map = take("has_map", False, True)
    here = [not has_map or draw.random() < 0.6 for _ in range(routed_experts)]
    local = sum(here) + shared or 1
    options = {"scale_exponents": (-9, -7)}
    w1q, w1s = random_weights(local, 2 * intermediate, hidden, generator, **options)
    w2q, w2s = random_weights(local, hidden, intermediate, generator, **options)
    skewed = draw.random() < 0.3
    ids = torch.randint(0, 2 if skewed else routed_experts, (M, top_k), generator=generator)
    if draw.random() < 0.3:
        ids[0, 0] = draw.choice([-1, routed_experts])
    numbers = [sum(here[:e]) if here[e] else -1 for e in range(routed_experts)]
    biased = take("biased", False, True)
    return {
        "x": torch.randn(M, hidden, generator=generator).to(take("dtype", *DTYPES.values())),
        "w1q": w1q,
        "w1s": w1s,
        "w2q": w2q,
        "w2s": w2s,
        "topk_ids": ids.to(take("id_dtype", torch.int32, torch.int64)),
        "topk_weights": torch.rand(M, top_k, generator=generator),
        "expert_map": torch.tensor(numbers, dtype=torch.int32) if has_map else None,
        "shared_experts": shared if local > shared else 0,
        "activation": take("activation", "silu", "swiglu_oai"),
        "layout": take("layout", "halves", "interleaved"),
        "bias1": torch.randn(local, 2 * intermediate, generator=generator) if biased else None,
        "bias2": torch.randn(local, hidden, generator=generator).bfloat16() if biased else None,
    }


def experts_of(call: dict[str, Any]) -> list[int]:
    """The expert here of each routed row, or -1."""
    E, shared = call["w1q"].shape[0], call["shared_experts"]
    expert_map = call["expert_map"]
    numbers = range(E - shared) if expert_map is None else expert_map.tolist()
    found = []
    for row in call["topk_ids"].tolist():
        found += [numbers[e] if 0 <= e < len(numbers) else -1 for e in row]
        found += [E - shared + s for s in range(shared)]
    return found


def assert_layer(out: Tensor, call: dict[str, Any], device: torch.device) -> None:
    """Assert that ``out`` is the layer's result.

    What is quantised between the GEMMs is taken from the layer's own first GEMM, or from the first
    of two launches, after a check: a value between two steps of e4m3 may go either way.
    """
    M, top_k = call["topk_ids"].shape
    E, shared, experts = call["w1q"].shape[0], call["shared_experts"], experts_of(call)
    slots = top_k + shared
    here = on(device, call)
    expert_map = here["expert_map"]
    num_experts = E - shared if expert_map is None else len(expert_map)
    xq, xs = aiter_mx.quantize(here["x"])
    swiglu = dict(zip(CONSTANTS, SWIGLU, strict=True))
    swiglu |= {name: call[name] for name in CONSTANTS if name in call}
    kinds = {name: call[name] for name in ("activation", "layout")} | swiglu
    problem = FusedMoeProblem(
        *(M, call["x"].shape[1], call["w1q"].shape[1] // 2, E, top_k, num_experts, shared),
        has_map=int(expert_map is not None),
        quantised=1,
        bias1="none" if here["bias1"] is None else DTYPE_NAMES[here["bias1"].dtype],
        id_dtype="i32" if here["topk_ids"].dtype == torch.int32 else "i64",
        dtype=DTYPE_NAMES[call["x"].dtype],
        **kinds,
    )
    target = target_of(device, call.get("exact_sums"))
    launches = problem.parts(target.arch)
    (op, up), (_, last) = launches[0], launches[-1]
    gemms = [part for op, part in launches if op == "moe_gemm"]
    errors = [stated_errors("moe_gemm", target, gemm) for gemm in gemms] or [{}, {}]
    if op == "moe_up":
        rows = torch.zeros(M * slots, problem.intermediate, device=device)
        routing = (here["topk_ids"], expert_map, None)
        tensors = (*routing, xq, xs, here["w1q"], here["w1s"], here["bias1"], rows)
        launched(bind(op, target, up, device), *tensors)
        h, hs = aiter_mx.quantize(rows)
    else:
        lists = aiter_mx.moe_align(
            here["topk_ids"],
            problem.block_m,
            num_experts,
            expert_map,
            drop_absent=expert_map is not None,
            shared_experts=shared,
            first_shared=E - shared,
        )
        h = torch.zeros(M * slots, problem.intermediate, dtype=xq.dtype, device=device)
        hs = torch.zeros(M * slots, problem.intermediate // 32, dtype=xs.dtype, device=device)
        operands = (xq, xs, here["w1q"], here["w1s"], *lists, None, here["bias1"])
        launched(bind("moe_gemm", target, gemms[0], device), *operands, h, hs)
    h, hs, xq, xs = h.cpu(), hs.cpu(), xq.cpu(), xs.cpu()
    first = Layer(xq, xs, call["w1q"], call["w1s"], call["bias1"], experts, slots, **errors[0])
    interleaved = call["layout"] == "interleaved"
    assert_activated(h, hs, first, call["activation"], interleaved, tuple(swiglu.values()))
    second = Layer(h, hs, call["w2q"], call["w2s"], call["bias2"], experts, 1, **errors[1])
    weights = torch.cat((call["topk_weights"], torch.ones(M, shared)), 1).flatten().double()
    N = call["x"].shape[1]
    ref, error, total = (torch.zeros(M, N, dtype=torch.float64) for _ in range(3))
    rounded_slots = isinstance(last, MoeCombineProblem) and last.y_dtype == "bf16"
    for expert in set(experts) - {-1}:
        rows = torch.tensor(second.rows_of(expert))
        value, off, magnitude = second.sums(expert)
        if rounded_slots:
            off = off + 2.0**-8 * (value.abs() + off)
        weight = weights[rows].unsqueeze(1)
        parts = (value * weight, off * weight.abs(), magnitude * weight.abs())
        for sums, part in zip((ref, error, total), parts, strict=True):
            sums.index_add_(0, rows // slots, part)
    error += (slots + 2) * 2.0**-24 * total
    assert_rounded(out, ref, error, total, note="fused")


def variants() -> list[dict[str, Any]]:
    """What the compiled kernels depend on: few of them, for many random layers."""
    return [
        {"activation": "silu", "layout": "halves", "hidden": 256, "intermediate": 96},
        {"activation": "swiglu_oai", "layout": "interleaved", "hidden": 64, "intermediate": 32},
    ]


def gpu_call(M: int, seed: int = 0, has_map: bool = False) -> dict[str, Any]:
    fixed = {"hidden": 1024, "intermediate": 256, "experts": 32, "top_k": 4, "shared": 1}
    fixed |= {"dtype": torch.bfloat16, "id_dtype": torch.int32, "has_map": has_map, "biased": False}
    fixed |= {"activation": "silu", "layout": "halves"}
    return on(torch.device("cuda"), random_call(random.Random(seed), seed, M=M, **fixed))
