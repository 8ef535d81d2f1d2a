"""Trying ops out: random operands, and a judge that lets nothing wrong pass."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch

from aiter_mx.codec import INDICES
from aiter_mx.kernels.fused_moe import FusedMoeProblem
from aiter_mx.kernels.group_runs import GroupRunsProblem
from aiter_mx.kernels.grouped_gemm import GroupedGemmProblem
from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.moe_align import MoeAlignProblem
from aiter_mx.kernels.moe_combine import MoeCombineProblem
from aiter_mx.kernels.moe_gemm import MoeGemmProblem
from aiter_mx.kernels.promoted_gemm import PromotedGemmProblem
from aiter_mx.kernels.quantize import QuantizeProblem
from aiter_mx.kernels.registry import find_kernel, key_of, ops, problem_type, stand_ins
from aiter_mx.kernels.spec import reference
from aiter_mx.ops.grouped_gemm import grouped_gemm_ranges
from aiter_mx.plan import runner
from aiter_mx.target import hardware
from aiter_mx.trial import try_out
from aiter_mx.workloads import workload_of
from aiter_mx.workloads.models import MODELS, TENSOR_PARALLEL
from aiter_mx.workloads.moe_gemm import ROWS
from aiter_mx.workloads.workload import Workload, poison
from op_tests.mx_reference import linear_reference

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
    part = WORKLOAD.sample(whole, 0.01)
    assert (part.M, part.K) == (3, 6144)
    assert part.N < 0.05 * whole.N
    assert WORKLOAD.sample(replace(whole, N=50), 0.01) == replace(whole, N=50)


def test_every_model_poses_linears_that_can_be_tuned() -> None:
    for name, model in MODELS.items():
        for gpus in TENSOR_PARALLEL:
            problems = WORKLOAD.problems(model, gpus, "sm_90a")
            assert problems, name
            assert all(problem.N > 0 for problem in problems)
    posed = WORKLOAD.problems(MODELS["wide-6144"], 4, "sm_90a")
    assert {(p.N, p.K) for p in posed} == {(2304, 6144), (6144, 2048), (1536, 6144), (6144, 768)}
    assert {p.M for p in posed if p.pdl} == {1, 2, 4, 8}
    assert {p.M for p in posed if p.x_dtype == "bf16"} == {1, 2}
    of_gfx950 = WORKLOAD.problems(MODELS["wide-6144"], 4, "gfx950")
    assert not any(p.pdl or p.x_dtype != "e4m3" for p in of_gfx950)


def test_every_op_says_how_it_is_tried_out() -> None:
    for op in ops():
        assert workload_of(op).op == op


def test_unknown_ops_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown op 'conv'"):
        workload_of("conv")


def op_of(problem: object) -> str:
    return next(op for op in ops() if problem_type(op) is type(problem))


OTHERS = [
    GroupedGemmProblem(M=70, N=64, K=96, G=5),
    GroupedGemmProblem(M=70, N=40, K=96, G=5, out_dtype="fp32", bias="bf16", index="i64"),
    GroupedGemmProblem(M=60, N=40, K=64, G=4, layout="masked"),
    GroupedGemmProblem(M=3, N=40, K=64, G=9),
    PromotedGemmProblem(M=70, N=160, K=416, G=5),
    PromotedGemmProblem(
        *(60, 160, 288, 4, "fp32", "masked", "i64", 0),
        a_row=1,
        a_step=15,
        a_group=45,
        b_block=1,
        b_step=2,
        b_group=6,
    ),
    MoeGemmProblem(M=9, N=96, K=64, E=6, top_k=3, block_m=4, out_dtype="fp32"),
    MoeGemmProblem(M=9, N=96, K=64, E=6, top_k=3, block_m=8, bias="fp32", weights="by_t"),
    MoeGemmProblem(M=9, N=96, K=64, E=2, top_k=3, block_m=8, ids="aiter", weights="by_place"),
    MoeGemmProblem(M=9, N=96, K=64, E=2, top_k=3, block_m=8, num_experts=6),
    MoeGemmProblem(9, 128, 96, 3, 2, 16, "mxfp8", "silu", ids="aiter", num_experts=12),
    MoeGemmProblem(7, 128, 96, 5, 2, 16, "mxfp8", "silu", a_div=2),
    MoeGemmProblem(7, 128, 96, 5, 2, 16, "mxfp8", "swiglu_oai", "interleaved", bias="bf16"),
    GroupedGemmProblem(M=70, N=64, K=96, G=3, layout="runs", run_rows=9),
    PromotedGemmProblem(M=70, N=160, K=416, G=3, layout="runs", run_rows=9),
]


@pytest.mark.parametrize("problem", OTHERS, ids=lambda problem: type(problem).__name__)
def test_other_ops_judge_their_torch_reference(problem: object) -> None:
    op = op_of(problem)
    workload = workload_of(op)
    operands = workload.operands(problem, CPU)
    assert 0 < workload.read_bytes(problem, operands) < 3 * workload.read_bytes(problem, None)
    again = workload.another(problem, operands, 0)
    for tensors in (operands, again):
        judge = workload.judge(problem, tensors)
        poison(tensors, workload.results)
        assert op == "grouped_gemm" or not judge(tensors).right
        runner(reference(op))(problem, tensors, {})
        assert judge(tensors).right
        out = tensors[workload.results[0]]
        first = out.view(torch.uint8).clone()
        rows = out.float().abs().nan_to_num().sum(1).nonzero().flatten()
        out.view(torch.uint8)[rows[-1]] = first[rows[0]]  # one row is another's
        assert rows.numel() == 1 or not judge(tensors).right
    assert judge(operands).right is False  # other weights give other results


LISTS = [
    MoeAlignProblem(M=30, top_k=3, E=6, block_m=8, expert_map="numbers", drop_absent=1),
    MoeAlignProblem(M=9, top_k=2, E=5, ids="aiter", id_dtype="i64", expert_map="mask"),
    MoeAlignProblem(M=9, top_k=2, E=5, shared=1, first_shared=5, x_dtype="bf16", K=96),
    MoeAlignProblem(M=35, top_k=1, E=5, block_m=4, masked=1),
    MoeCombineProblem(M=9, N=64, top_k=3, E=5, shared=1),
    MoeCombineProblem(M=5, N=260, top_k=2, E=4, y_dtype="bf16", out_dtype="fp32", id_dtype="i64"),
    MoeCombineProblem(M=7, N=96, top_k=2, E=4, shared=1, sorted_y=True),
    GroupRunsProblem(M=70, N=64, G=3, run_rows=9),
]


@pytest.mark.parametrize("problem", LISTS, ids=lambda problem: type(problem).__name__)
def test_routing_ops_judge_torch_and_a_simulated_launch(problem: object) -> None:
    op = op_of(problem)
    name = "scan" if op == "group_runs" else op.removeprefix("moe_")
    workload, kernel = workload_of(op), find_kernel(op, "gfx950", "hip", name)
    operands = workload.operands(problem, CPU)
    judge = workload.judge(problem, operands)
    poison(operands, workload.results)
    assert not judge(operands).right
    runner(reference(op))(problem, operands, {})
    assert judge(operands).right
    config = kernel.configure(hardware("gfx950"), problem)
    trial = try_out(kernel, problem, config)
    again = workload.another(problem, trial.operands, 1)
    assert workload.judge(problem, trial.operands)(trial.operands).right
    assert not workload.judge(problem, again)(trial.operands).right


EMPTY = [
    (LinearProblem(0, 40, 64), 0),
    (LinearProblem(3, 40, 64, bias="bf16"), 1),
    (MoeAlignProblem(M=0, top_k=2, E=5), 0),
    *((problem, 2) for problem in LISTS[:4]),
    *((problem, 4) for problem in LISTS[4:7]),
    (LISTS[7], 1),
    *((problem, 1) for problem in OTHERS),
    (MoeGemmProblem(M=9, N=96, K=64, E=6, top_k=3, block_m=4, sorted_out=True), 1),
    (QuantizeProblem(64, 96, to="both", groups=2), 1),
]


@pytest.mark.parametrize(("problem", "count"), EMPTY, ids=lambda v: type(v).__name__)
def test_calls_have_the_tensors_of_operands_and_nothing_to_do(problem: object, count: int) -> None:
    """The shapes and dtypes of what is drawn, for each way of leaving out what may be None."""
    op = op_of(problem)
    workload = workload_of(op)
    drawn, calls = workload.operands(problem, CPU), [*workload.calls(problem, CPU)]
    assert len(calls) == count
    for at, operands in enumerate(calls):
        assert len(operands) == len(drawn)
        for place, (tensor, like) in enumerate(zip(operands, drawn, strict=True)):
            if tensor is None:
                assert like is None or (at and place in workload.optional)
            else:
                assert like is not None
                assert (tensor.shape, tensor.dtype) == (like.shape, like.dtype)
                assert tensor.dtype not in INDICES.values() or not tensor.any()
        runner(reference(op))(problem, operands, {})


@pytest.mark.parametrize("ids", ["vllm", "aiter"])
def test_experts_of_other_gpus_get_their_share_of_rows(ids: str) -> None:
    problem = MoeGemmProblem(M=16, N=32, K=32, E=8, top_k=4, block_m=8, ids=ids, num_experts=64)
    workload = workload_of("moe_gemm")
    listed, read = 0, 0
    for number in range(100):
        operands = workload.operands(problem, CPU, number)
        sorted_ids, blocks, used = operands[4:7]
        assert sorted_ids.numel() >= int(used[0])
        assert len(blocks) == problem.blocks
        in_use = sorted_ids[: int(used[0])]
        listed += int(((in_use & 0xFFFFFF) < (16 if ids == "aiter" else 64)).sum())
        read += workload.read_bytes(problem, operands)
    assert 7 < listed / 100 < 9  # 16 tokens by 4 of 64 experts, of which 8 are here
    assert abs(read / 100 / workload.read_bytes(problem, None) - 1) < 0.1
    few = replace(problem, M=1, E=1)  # one call in 16 has a row here, and those count
    assert all(workload.read_bytes(few, workload.operands(few, CPU, i)) for i in range(20))


def test_a_rank_of_parallel_experts_has_rows_of_its_own() -> None:
    posed = workload_of("moe_gemm").problems(MODELS["wide-6144"], 8, "sm_90a")
    keys = {key_of("moe_gemm")(problem) for problem in posed}
    assert {(key[3], key[4], key[0]) for key in keys} == {
        (E, every, M) for E, every in ((128, 0), (16, 128)) for M in ROWS
    }
    layer = FusedMoeProblem(100, 6144, 3072, 16, 4, num_experts=128, has_map=1)
    called = [problem for op, problem in layer.parts() if op == "moe_gemm"]
    for problem in called:  # an engine's call finds the rows that were tuned for its rank
        key = key_of("moe_gemm")(problem)
        assert {key, *stand_ins("moe_gemm")(key)} & keys


def test_models_with_experts_pose_moe_and_grouped_problems() -> None:
    moe = workload_of("moe_gemm").problems(MODELS["wide-6144"], 4, "sm_90a")
    divided = {(1536, 6144, 128, 4, "silu"), (6144, 768, 128, 4, "none")}
    whole = {(6144, 6144, 32, 4, "silu"), (6144, 3072, 32, 4, "none")}
    assert {(p.N, p.K, p.E, p.top_k, p.activation) for p in moe} == divided | whole
    grouped = workload_of("grouped_gemm").problems(MODELS["deepseek-v3"], 16, "sm_90a")
    assert {(p.G, p.N, p.K) for p in grouped} == {(16, 4096, 7168), (16, 7168, 2048)}
    assert workload_of("moe_gemm").problems(MODELS["llama-3.1-8b"], 1, "sm_90a") == []


@pytest.mark.parametrize("layout", ["jagged", "masked"])
def test_grouped_operands_have_the_layouts_of_scales_that_are_asked_for(layout: str) -> None:
    names = {"a_scale_layout": "16x4", "b_scale_layout": "256x8"}
    problem = GroupedGemmProblem(M=60, N=64, K=160, G=3, layout=layout, index="i64", **names)
    workload = workload_of("grouped_gemm")
    a, a_scale, b, b_scale, bias, out, starts, ends = workload.operands(problem, CPU)
    shaped = (3, 20, -1) if layout == "masked" else (60, -1)
    judge = workload.judge(problem, [a, a_scale, b, b_scale, bias, out, starts, ends])
    grouped_gemm_ranges(
        a.view(shaped), a_scale, b, b_scale, starts, ends, out.view(shaped), out.dtype, **names
    )
    assert judge([a, a_scale, b, b_scale, bias, out, starts, ends]).right


DIGESTED = [("linear", PROBLEM), ("grouped_gemm", OTHERS[2]), ("moe_gemm", OTHERS[8])]


@pytest.fixture(scope="module")
def digests_elsewhere() -> dict[str, list[str]]:
    """Digests of the operands of each op's problem, drawn by another process."""
    script = (
        "from op_tests.tune.test_workloads import *\n"
        "for op, problem in DIGESTED:\n"
        "    print(op, *digests(workload_of(op), problem, range(3)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    return {op: found for op, *found in map(str.split, done.stdout.splitlines())}


@pytest.mark.parametrize(("op", "problem"), DIGESTED)
def test_a_problems_operands_are_the_same_in_every_process(
    op: str, problem: object, digests_elsewhere: dict[str, list[str]]
) -> None:
    workload = workload_of(op)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first = digests(workload, problem, range(3))
    assert torch.equal(torch.get_rng_state(), state)  # nobody else's draws change
    torch.manual_seed(4)
    assert digests(workload, problem, range(3)) == first
    assert len(set(first)) == len(first)
    assert digests_elsewhere[op] == first


def digests(workload: Workload, problem: object, numbers: Iterable[int]) -> list[str]:
    """A hash of each draw of a problem's operands, and of those drawn again."""
    found = []
    for number in numbers:
        operands = workload.operands(problem, CPU, number)
        for tensors in (operands, workload.another(problem, operands, number)):
            whole = hashlib.sha256()
            for at, tensor in enumerate(tensors):
                if tensor is not None and at not in workload.results:
                    whole.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
            found.append(whole.hexdigest())
    return found
