"""The two launches of an expert layer of few tokens, each against float64, in the simulator."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import aiter_mx
from aiter_mx.kernels.fused_moe import FusedMoeProblem
from aiter_mx.kernels.moe_down import MoeDownProblem
from aiter_mx.kernels.moe_up import MoeUpProblem
from aiter_mx.kernels.registry import find_kernel
from aiter_mx.sim.program import Program
from aiter_mx.target import hardware
from aiter_mx.trial import prepare
from aiter_mx.workloads import workload_of
from op_tests.conformance import in_order
from op_tests.launches import bound, is_poison, poisoned
from op_tests.moe.layers import random_call
from op_tests.sim.mutation_operands import vary_halves
from op_tests.sim.tools import without_preload

CPU = torch.device("cpu")
NAN_SCALE, NAN_PAYLOAD = 255, 0x7F
# K: a part of a step, whole dwords of scales and not, several steps for each wave.
UPS = [
    MoeUpProblem(1, 64, 64, 3, 2, 3),
    MoeUpProblem(3, 192, 1120, 4, 2, 3, shared=1, activation="swiglu_oai", x_dtype="fp16"),
    MoeUpProblem(2, 128, 2176, 3, 2, 5, has_map=1, layout="interleaved", bias="bf16"),
    MoeUpProblem(1, 64, 7168, 2, 2, 2, x_dtype="mxfp8", activation="relu2", id_dtype="i64"),
    MoeUpProblem(2, 64, 1056, 2, 1, 2, x_dtype="mxfp8", activation="gelu", bias="fp32"),
    MoeUpProblem(2, 64, 640, 3, 2, 4, has_map=1, x_dtype="fp32", activation="gelu_tanh"),
]
DOWNS = [
    MoeDownProblem(1, 32, 64, 3, 2, 3),
    MoeDownProblem(3, 96, 416, 4, 3, 3, shared=1, out_dtype="fp16"),
    MoeDownProblem(2, 64, 768, 3, 4, 5, has_map=1, bias="bf16", out_dtype="fp32"),
    MoeDownProblem(1, 36, 2048, 2, 2, 2, id_dtype="i64", bias="fp32"),
    MoeDownProblem(4, 64, 1184, 4, 1, 2, shared=2, bias="fp16"),
]
PROBLEMS = [("moe_up", problem) for problem in UPS] + [("moe_down", problem) for problem in DOWNS]


def drawn(op: str, problem: Any, backend: str, seed: int = 0) -> tuple[list[Tensor | None], Any]:
    """Operands with a poisoned result, and what launches over them."""
    operands = workload_of(op).operands(problem, CPU, seed)
    values = operands[3 if op == "moe_up" else 0]
    assert values is not None
    if values.dtype != torch.float8_e4m3fn:  # halves of a block, which two lanes have, differ
        vary_halves(values)
    result = operands[-1]
    assert result is not None
    operands[-1] = poisoned(result.shape, result.dtype)
    arch = "gfx950"
    kernel = find_kernel(op, arch, backend, "gemv" if backend == "hip" else "reference")
    return operands, bound(kernel, CPU, problem)


@pytest.mark.parametrize("backend", ["hip", "torch"])
@pytest.mark.parametrize(("op", "problem"), PROBLEMS, ids=lambda value: str(value)[:60])
def test_each_half_is_float64s_in_any_order_of_waves(
    op: str, problem: Any, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw, results = random.Random(1), []
    with aiter_mx.simulate("gfx950"):
        operands, run = drawn(op, problem, backend)
        judge = workload_of(op).judge(problem, operands)
        for seed in range(3 if backend == "hip" else 1):
            in_order(monkeypatch, draw, seed)
            result = operands[-1]
            assert result is not None
            operands[-1] = poisoned(result.shape, result.dtype)
            run(operands)
            verdict = judge(operands)
            assert verdict.right, verdict
            results.append(operands[-1])
    assert all(torch.equal(results[0].view(torch.uint8), r.view(torch.uint8)) for r in results)


# Every number of rows, an odd and an even one with every split, as each triple compiles anew.
@pytest.mark.parametrize(
    ("rows", "waves", "halves"),
    [
        *((1, 1, 2), (2, 3, 1), (3, 2, 2), (3, 1, 2), (3, 3, 1)),
        *((4, 1, 2), (4, 3, 1), (4, 2, 2), (6, 3, 1), (8, 2, 2)),
    ],
)
def test_every_width_and_split_of_k(rows: int, waves: int, halves: int) -> None:
    """Features that a workgroup's do not divide, and steps that waves do not."""
    with aiter_mx.simulate("gfx950"):
        for op, problem, name in (
            ("moe_up", MoeUpProblem(1, 64, 5152, 2, 2, 2, bias="bf16"), "features"),
            ("moe_down", MoeDownProblem(1, 44, 2592, 2, 2, 2, bias="bf16"), "rows"),
        ):
            operands, _ = drawn(op, problem, "hip")
            judge = workload_of(op).judge(problem, operands)
            kernel = find_kernel(op, "gfx950", "hip", "gemv")
            bound(kernel, CPU, problem, {name: rows, "waves": waves, "halves": halves})(operands)
            assert judge(operands).right


@pytest.mark.parametrize("backend", ["hip", "torch"])
def test_rows_that_do_not_count_are_not_written(backend: str) -> None:
    up = MoeUpProblem(4, 64, 96, 2, 2, 3, has_map=1)
    down = MoeDownProblem(4, 32, 64, 2, 2, 3, has_map=1, bias="fp32")
    ids = torch.tensor([[0, 1], [-1, 2], [3, 1 << 30], [0, 2]], dtype=torch.int32)
    numbers = torch.tensor([1, -1, 2], dtype=torch.int32)  # 2 is beyond the experts here
    with aiter_mx.simulate("gfx950"):
        operands, run = drawn("moe_up", up, backend)
        operands[:3] = [ids, numbers, torch.tensor([3], dtype=torch.int32)]
        judge = workload_of("moe_up").judge(up, operands)
        run(operands)
        h = operands[-1]
        assert h is not None and judge(operands).right
        written = [not is_poison(h[t]) for t in range(8)]
        assert written == [True] + [False] * 7

        operands, run = drawn("moe_down", down, backend)
        payload = operands[0]
        assert payload is not None
        payload[1:] = torch.nan  # nobody reads what has no expert here
        operands[1], operands[3] = ids, numbers
        operands[2] = torch.tensor([[0.5, torch.nan]] + [[torch.nan] * 2] * 3)
        operands[4] = torch.tensor([3], dtype=torch.int32)
        run(operands)
        out = operands[-1]
        assert out is not None and is_poison(out[3])
        assert (out[1:3] == 0).all() and out[0].isfinite().all() and (out[0] != 0).any()


def test_a_count_that_is_not_given_is_all_tokens() -> None:
    with aiter_mx.simulate("gfx950"):
        for op, problem, at in (("moe_up", UPS[0], 2), ("moe_down", DOWNS[0], 4)):
            operands, run = drawn(op, problem, "hip")
            judge = workload_of(op).judge(problem, operands)
            operands[at] = None
            run(operands)
            assert judge(operands).right


def spoil(tensor: Tensor, at: tuple[int, ...], byte: int) -> None:
    tensor.view(torch.uint8)[at] = byte


@pytest.mark.parametrize("blocks", [3, 4])
def test_nans_reach_their_own_results_alone(blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scale or a payload of a weight's row, of x, and of activations between the launches."""
    monkeypatch.setenv("AITER_MX_SIM_FINITE_SCALES", "1")
    up = MoeUpProblem(2, 64, 32 * blocks, 2, 1, 2, x_dtype="mxfp8")
    down = MoeDownProblem(2, 32, 32 * blocks, 2, 1, 2)
    with aiter_mx.simulate("gfx950"):
        for place, byte in ((5, NAN_PAYLOAD), (6, NAN_SCALE)):
            operands, run = drawn("moe_up", up, "hip")
            operands[0] = torch.tensor([[0], [1]], dtype=torch.int32)
            w = operands[place]
            assert w is not None
            spoil(w, (1, 35, blocks - 1), byte)  # the up row of feature 3
            run(operands)
            h = operands[-1]
            assert h is not None
            assert h.isnan().nonzero().tolist() == [[1, 3]]
        for place, byte in ((3, NAN_PAYLOAD), (4, NAN_SCALE)):
            operands, run = drawn("moe_up", up, "hip")
            x = operands[place]
            assert x is not None
            spoil(x, (1, blocks - 1), byte)
            run(operands)
            h = operands[-1]
            assert h is not None and h[1].isnan().all() and not h[0].isnan().any()
        for place, byte in ((5, NAN_PAYLOAD), (6, NAN_SCALE)):
            operands, run = drawn("moe_down", down, "hip")
            operands[1] = torch.tensor([[0], [1]], dtype=torch.int32)
            w = operands[place]
            assert w is not None
            spoil(w, (0, 7, blocks - 1), byte)
            run(operands)
            out = operands[-1]
            assert out is not None and out.isnan().nonzero().tolist() == [[0, 7]]
        operands, run = drawn("moe_down", down, "hip")
        h = operands[0]
        assert h is not None
        h[0, 40] = torch.inf  # its block is NaN as a whole
        run(operands)
        out = operands[-1]
        assert out is not None and out[0].isnan().all() and not out[1].isnan().any()


def test_extreme_scales_neither_overflow_nor_vanish() -> None:
    """x times 2^120 by w times 2^-120, and the other way round."""
    up = MoeUpProblem(2, 64, 128, 2, 1, 2, x_dtype="mxfp8", activation="relu2")
    with aiter_mx.simulate("gfx950"):
        operands, run = drawn("moe_up", up, "hip")
        xs, ws = operands[4], operands[6]
        assert xs is not None and ws is not None
        xs[0], xs[1], ws[0], ws[1] = 240, 6, 2, 236
        operands[0] = torch.tensor([[0], [1]], dtype=torch.int32)
        judge = workload_of("moe_up").judge(up, operands)
        run(operands)
        assert judge(operands).right


def test_tokens_quantised_on_the_way_give_the_bits_of_those_that_come_quantised() -> None:
    """A block's scale is of both halves: which one it is of hardly shows in sums."""
    up = MoeUpProblem(2, 64, 640, 2, 1, 2)
    with aiter_mx.simulate("gfx950"):
        operands, run = drawn("moe_up", up, "hip")
        x, h = operands[3], operands[-1]
        assert x is not None and h is not None
        x.view(2, -1, 16)[:, ::2] *= 2.0**-12  # what a scale of this half alone would keep
        run(operands)
        operands[3:5] = aiter_mx.quantize(x, mode="rceil")
        operands[-1] = poisoned(h.shape, h.dtype)
        kernel = find_kernel("moe_up", "gfx950", "hip", "gemv")
        bound(kernel, CPU, replace(up, x_dtype="mxfp8"))(operands)
        quantised = operands[-1]
        assert quantised is not None and torch.equal(quantised, h)


@pytest.mark.parametrize(("op", "problem"), [PROBLEMS[0], PROBLEMS[-1]])
def test_waves_begin_with_pointers_in_registers(op: str, problem: Any) -> None:
    """And load them themselves on firmware that does not know of that."""
    kernel = find_kernel(op, "gfx950", "hip", "gemv")
    config = kernel.configure(hardware("gfx950"), problem)
    assert kernel.module is not None
    assert all(arg.kind == "pointer" for arg in kernel.module.args[:7])
    operands = workload_of(op).operands(problem, CPU)
    launch = prepare(kernel, problem, config, operands=operands)
    assert launch.kernel.descriptor.preload_dwords == 14
    assert launch.kernel.scratch_bytes == launch.kernel.vgpr_spills == 0
    judge = workload_of(op).judge(problem, operands)
    program = Program.from_image(without_preload(launch.image.read_bytes()))
    assert program.kernel(launch.symbol).descriptor.preload_dwords == 0
    replace(launch, program=program).run()
    assert judge(operands).right


def test_few_tokens_take_two_launches_where_an_architecture_has_them() -> None:
    layer = FusedMoeProblem(4, 6144, 768, 128, 4)
    assert [op for op, _ in layer.parts("gfx950")] == ["moe_up", "moe_down"]
    assert len(layer.parts("sm_90a")) == len(layer.parts()) == 4
    many = [
        FusedMoeProblem(5, 6144, 768, 128, 4),
        FusedMoeProblem(4, 6144, 768, 2, 2),  # slots share experts
        FusedMoeProblem(1, 6144, 768, 128, 4, reduce=0),
        FusedMoeProblem(1, 6144, 768, 128, 17),
        FusedMoeProblem(1, 8192, 4096, 64, 4),  # 2 GiB of weights
    ]
    assert [len(each.parts("gfx950")) for each in many] == [4, 4, 3, 4, 4]
    with aiter_mx.batch_invariant():
        assert len(layer.parts("gfx950")) == 4


def test_quantised_tokens_give_the_bits_of_tokens_that_are_quantised_inside() -> None:
    fixed = {"M": 2, "experts": 8, "top_k": 2, "shared": 1, "has_map": False, "biased": True}
    call = random_call(random.Random(2), 2, dtype=torch.bfloat16, **fixed)
    with aiter_mx.simulate("gfx950"):
        expected = aiter_mx.fused_moe(**call)
        xq, xs = aiter_mx.quantize(call["x"])
        assert torch.equal(aiter_mx.fused_moe(**{**call, "x": xq, "x_scale": xs}), expected)
