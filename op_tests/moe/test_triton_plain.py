"""Triton's routing, sum over slots and quantisation against torch's, to the last bit.

In Triton's interpreter, and on a GPU. Run as a script, this file checks them in the interpreter.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

import aiter_mx
from aiter_mx.dispatch.dispatcher import route
from aiter_mx.kernels import triton as triton_kernels
from aiter_mx.kernels.moe_align import MoeAlignProblem
from aiter_mx.kernels.moe_combine import MoeCombineProblem
from aiter_mx.kernels.quantize import QuantizeProblem
from aiter_mx.kernels.registry import find_kernel, kernels_of
from aiter_mx.kernels.spec import Problem
from aiter_mx.plan import runner
from aiter_mx.target import ARCHS, CPU, hardware
from op_tests.conformance import DTYPES, INDICES
from op_tests.interpreted import assert_passes_in_the_interpreter
from op_tests.launches import poisoned
from op_tests.moe.operands import draw_ids
from op_tests.quantize.cases import draw as draw_values

BLOCKS_M = (4, 12, 16, 20, 32, 48, 64, 80, 96, 128)


def assert_as_torch(op: str, problem: Problem, inputs: list, outputs: list, device: str) -> None:
    """Both backends write the same bytes over poison, twice."""
    by_torch, by_triton = (
        runner(next(kernel for kernel in kernels_of(op) if kernel.backend == backend))
        for backend in ("torch", "triton")
    )
    expected = [None if t is None else t.clone() for t in outputs]
    by_torch(problem, [*inputs, *expected], {})
    there = [None if t is None else t.to(device) for t in inputs]
    for _ in range(2):
        got = [None if t is None else t.clone().to(device) for t in outputs]
        by_triton(problem, [*there, *got], {})
        for one, want in zip(got, expected, strict=True):
            if want is not None:
                assert torch.equal(one.cpu().view(torch.uint8), want.view(torch.uint8))


def check_routing(draw: random.Random, most_experts: int, most_tokens: int, device: str) -> None:
    packed = draw.random() < 0.4
    few, many = draw.randint(1, min(60, most_experts)), most_experts
    E = draw.choice([few, many])  # of no other size, as each is compiled
    top_k, shared = draw.randint(1, 8), draw.choice([0, 0, 1, 3])
    M, block_m = draw.choice([1, 2, draw.randint(3, most_tokens)]), draw.choice(BLOCKS_M)
    kind = draw.choice(["none", "mask" if packed else "numbers"])
    quantizes = not packed and draw.random() < 0.5
    problem = MoeAlignProblem(
        M=M,
        top_k=top_k,
        E=E,
        block_m=block_m,
        ids="aiter" if packed else "vllm",
        id_dtype=draw.choice(tuple(INDICES)),
        expert_map=kind,
        drop_absent=int(packed or draw.random() < 0.5),
        shared=0 if packed else shared,
        first_shared=draw.randint(0, E),
        x_dtype="fp16" if quantizes else "none",
        K=96 if quantizes else 0,
    )
    ids = draw_ids(draw, M, top_k, E).to(INDICES[problem.id_dtype])
    if problem.id_dtype == "i64":
        ids[draw.randrange(M), draw.randrange(top_k)] = (1 << 32) + draw.randrange(E)
    share = draw.choice([0.0, 0.3, 0.9])
    here = [draw.random() < share for _ in range(E)]
    numbers = {
        "mask": [7 * h for h in here],
        "numbers": [sum(here[:e]) if here[e] else -1 - e for e in range(E)],
    }
    count = draw.choice([None, -3, 0, draw.randint(0, M + 2)]) if packed else None
    generator = torch.Generator().manual_seed(draw.randrange(1000))
    inputs = [
        ids,
        torch.rand(M, top_k, generator=generator) if packed else None,
        None if kind == "none" else torch.tensor(numbers[kind], dtype=torch.int32),
        None if count is None else torch.tensor([count], dtype=torch.int32),
        draw_values((M, 96), torch.float16, generator) if quantizes else None,
    ]
    outputs = [
        poisoned((problem.max_ids,), torch.int32),
        poisoned((problem.max_ids,), torch.float32) if packed else None,
        poisoned((problem.max_ids // block_m,), torch.int32),
        poisoned((2 if packed else 1,), torch.int32),
        poisoned((M, 96), torch.float8_e4m3fn) if quantizes else None,
        poisoned((M, 3), torch.uint8) if quantizes else None,
    ]
    assert_as_torch("moe_align", problem, inputs, outputs, device)


def check_combine(draw: random.Random, dtypes: tuple[str, ...], device: str) -> None:
    M, N, E, top_k = draw.randint(1, 9), 4 * draw.randint(1, 400), draw.choice([1, 9]), 3
    problem = MoeCombineProblem(
        M=M,
        N=N,
        top_k=top_k,
        E=E,
        shared=draw.choice([0, 2]),
        y_dtype=draw.choice(dtypes),
        out_dtype=draw.choice(dtypes),
        id_dtype=draw.choice(tuple(INDICES)),
        sorted_y=draw.choice([False, True]),
    )
    generator = torch.Generator().manual_seed(draw.randrange(1000))
    y = torch.randn(M, top_k + problem.shared, N, generator=generator)
    weights = torch.rand(M, top_k, generator=generator)
    ids = draw_ids(draw, M, top_k, E).to(INDICES[problem.id_dtype])
    if problem.id_dtype == "i64":
        ids[0, 0] = 1 << 32
    expert_map = torch.tensor([draw.choice([0, 5, -1, -9]) for _ in range(E)], dtype=torch.int32)
    if draw.random() < 0.5:
        expert_map = None
    absent = (ids < 0) | (ids >= E)
    if expert_map is not None:
        absent |= expert_map[ids.clamp(0, E - 1).long()] < 0
    y[:, :top_k][absent] = torch.nan  # nobody has written these rows
    weights[absent] = torch.inf
    num_tokens = torch.tensor([draw.randint(-1, M + 1)], dtype=torch.int32)
    counted = draw.choice([None, num_tokens])
    rows, places = y.flatten(0, 1).to(DTYPES[problem.y_dtype]), None
    if problem.sorted_y:
        places = torch.randperm(len(rows), generator=generator).to(torch.int32)
        rows = torch.empty_like(rows).index_copy_(0, places.long(), rows)
        places[draw.randrange(len(places))] = -1
    inputs = [rows, places, ids, weights, expert_map, counted]
    outputs = [poisoned((M, N), DTYPES[problem.out_dtype])]
    assert_as_torch("moe_combine", problem, inputs, outputs, device)


def check_quantisation(
    seed: int, dtype: str, mode: str, shape: tuple[int, ...], device: str
) -> None:
    *leading, M, N = shape
    problem = QuantizeProblem(M, N, dtype, matrices=leading[0] if leading else 1, mode=mode)
    x = draw_values(shape, DTYPES[dtype], torch.Generator().manual_seed(seed))
    if dtype == "fp32":  # every tie between two numbers of e4m3, and what is next to it
        codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        ties = (codes[:-1] + codes[1:]) / 2
        near = torch.cat((ties, ties.nextafter(codes[1:]), ties.nextafter(codes[:-1])))
        near = torch.cat((near, -near))[: x.numel() // 32 * 31]
        blocks = x.view(-1, 32)[: -(-len(near) // 31)]
        blocks[:, 0], blocks[:, 1:] = 448.0, 0.0
        blocks[:, 1:][: len(near) // 31] = near[: len(near) // 31 * 31].view(-1, 31)
    outputs = [
        poisoned(shape, torch.float8_e4m3fn),
        poisoned((*shape[:-1], N // 32), torch.uint8),
    ]
    outputs += [None, None, None]
    assert_as_torch("quantize", problem, [x, None], outputs, device)


def check_all(
    dtypes: tuple[str, ...], cases: int, sizes: tuple[int, int], device: str, seed: int
) -> None:
    draw = random.Random(seed)
    for _ in range(cases):
        check_routing(draw, *sizes, device)
    for _ in range(cases // 2):
        check_combine(draw, dtypes, device)
    for dtype in dtypes:
        for mode in ("rceil", "floor"):
            check_quantisation(seed, dtype, mode, (3, 70, 96), device)
            check_quantisation(seed + 9, dtype, mode, (1, 32), device)


def test_backends_agree_in_the_interpreter() -> None:
    assert_passes_in_the_interpreter(__name__)


PROBLEMS = [
    ("moe_align", MoeAlignProblem(M=5, top_k=2, E=8)),
    ("moe_align", MoeAlignProblem(M=5, top_k=2, E=8, ids="aiter", expert_map="mask")),
    ("moe_combine", MoeCombineProblem(M=5, N=64, top_k=2, E=8)),
    ("quantize", QuantizeProblem(M=5, N=64)),
]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("op", "problem"), PROBLEMS)
def test_triton_comes_after_ours_and_before_torch(
    monkeypatch: pytest.MonkeyPatch, arch: str, op: str, problem: Problem
) -> None:
    ours = frozenset((k.backend, k.name) for k in kernels_of(op) if k.backend == "hip")
    assert route(op, hardware(arch), problem).backend == "hip"
    assert route(op, hardware(arch), problem, ours).backend == "triton"
    on_cpu = route(op, CPU, problem, ours)
    assert on_cpu.backend == "torch" and "Triton needs a GPU, and this is CPU" in on_cpu.reason
    other = replace(hardware(arch), arch="sm_80")
    assert "are for gfx950 and sm_90a, not for sm_80" in route(op, other, problem, ours).reason
    monkeypatch.setattr(triton_kernels, "_is_installed", lambda: False)
    without = route(op, hardware(arch), problem, ours)
    assert without.backend == "torch" and "Triton is not installed" in without.reason


def test_what_ours_refuse_goes_to_triton_and_what_triton_refuses_to_torch() -> None:
    def backend(op: str, **fields: object) -> tuple[str, str]:
        found = aiter_mx.explain(op, arch="sm_90a", M=2, **fields)
        return found.backend, found.reason

    for E, chosen, reason in ((1025, "triton", "above 1024"), (8193, "torch", "above 8192")):
        taken, why = backend("moe_align", E=E, top_k=3)
        assert taken == chosen and f"E={E} is {reason}" in why
    taken, why = backend("moe_align", E=8, top_k=3, block_m=1 << 28)
    assert taken == "hip"
    taken, why = backend("moe_combine", N=64, E=8, top_k=33)
    assert taken == "triton" and "33 slots are above 32" in why
    align = find_kernel("moe_align", "sm_90a", "triton", "align")
    many = MoeAlignProblem(M=2, top_k=3, E=8, block_m=1 << 28)
    assert "ids are above 1073741824" in str(align.refusal(hardware("sm_90a"), many))
    rows = find_kernel("quantize", "sm_90a", "triton", "rows")
    plain = QuantizeProblem(64, 64)
    for asked in (
        replace(plain, to="both"),
        replace(plain, format="e2m1"),
        replace(plain, block="32x32"),
        replace(plain, groups=2),
    ):
        assert "along rows of no groups alone" in str(rows.refusal(hardware("sm_90a"), asked))


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(3))
def test_backends_agree_on_a_gpu(seed: int) -> None:
    check_all(tuple(DTYPES), 16, (1500, 3000), "cuda", seed)


if __name__ == "__main__":
    # Interpreted conversions from and to bf16 are not exact: compiled kernels alone are held to it.
    check_all(("fp16", "fp32"), 8, (20, 150), "cpu", 8)
