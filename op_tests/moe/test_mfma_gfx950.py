"""The CDNA4 kernel of ``moe_gemm``: what it costs, what it holds, and the extremes it must take."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import aiter_mx
from aiter_mx.kernels.moe_gemm import MoeGemmProblem
from aiter_mx.kernels.moe_gemm.mfma_gfx950 import MAX_K, MFMA, PARAMS, _registers, _resident
from aiter_mx.kernels.spec import Config, combinations
from aiter_mx.launch import build_request
from aiter_mx.runtimes.sim import last_report
from aiter_mx.target import hardware
from op_tests.launches import Out, launch
from op_tests.moe.operands import SWIGLU, random_weights
from op_tests.moe.reference import Layer, assert_activated, assert_rows
from op_tests.moe.subjects import MFMA as SUBJECT
from op_tests.mx_reference import random_mx
from op_tests.spills import kernels_without_spills

GFX950 = hardware("gfx950")
CPU = torch.device("cpu")
# Of ``wide-6144`` at TP4 and TP8: 6144 wide with 3072 intermediate features.
SHAPES = [(1536, 6144, "silu"), (6144, 768, "none"), (768, 6144, "silu"), (6144, 384, "none")]


def problem_of(
    M: int, N: int, K: int, activation: str, E: int = 128, **more: int | str
) -> MoeGemmProblem:
    dtype = "fp32" if activation == "none" else "mxfp8"
    fields = {"block_m": 16, "out_dtype": dtype, "activation": activation, **more}
    return MoeGemmProblem(M, N, K, E, 4, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(("N", "K", "activation"), SHAPES)
def test_decode_reads_hardly_more_than_it_must(
    monkeypatch: pytest.MonkeyPatch, N: int, K: int, activation: str
) -> None:
    """One token of four experts of eight, at the sizes of a real layer."""
    monkeypatch.setenv("AITER_MX_SIM_UNIQUE", "1")
    generator = torch.Generator().manual_seed(N)
    options = {"scale_exponents": (-11, -8)}
    wq, ws = random_weights(8, N, K, generator, **options)
    xq, xs = random_mx(1 if activation == "silu" else 4, K, generator, **options)
    experts = [6, 1, 3, 4]
    with aiter_mx.simulate("gfx950"):
        lists = aiter_mx.moe_align(torch.tensor([experts]), 16, 8)
        arguments = (xq, xs, wq, ws, *lists, 4, 4, 16)
        if activation == "silu":
            payload, scales = aiter_mx.moe_gemm_activated(*arguments, a_div=4)
        else:
            out = aiter_mx.moe_gemm(*arguments, out_dtype=torch.float32)
    report = last_report()
    assert report is not None and report.unique_bytes_read is not None
    operands = (4 * N + len(xq)) * (K + K // 32)
    assert report.unique_bytes_read <= 1.05 * operands
    assert report.unique_bytes_written == (4 * N * 4 if activation == "none" else 4 * N * 33 // 64)
    layer = Layer(xq, xs, wq, ws, None, experts, 4 // len(xq))
    if activation == "silu":
        assert_activated(payload, scales, layer, "silu", False, SWIGLU)
    else:
        assert_rows(out, layer)


@pytest.mark.parametrize(("block_m", "chunks"), [(16, 1), (64, 4)])
def test_what_is_looked_up_takes_one_latency(block_m: int, chunks: int) -> None:
    """Then weights take one, and so do lookups of chunks without an id; for stores nobody waits."""
    generator = torch.Generator().manual_seed(block_m)
    wq, ws = random_weights(8, 64, 512, generator)
    xq, xs = random_mx(4, 512, generator)
    config = {"row_tiles": 1, "col_tiles": 1, "waves": 2, "unroll": 1}
    with aiter_mx.simulate("gfx950"):
        lists = aiter_mx.moe_align(torch.tensor([[6, 1, 3, 4]]), block_m, 8)
        problem = MoeGemmProblem(1, 64, 512, 8, 4, block_m, "fp32")
        tensors = [xq, xs, wq, ws, *lists, None, None, Out((4, 64), torch.float32), None]
        (out,) = launch(MFMA, CPU, problem, config, tensors)
    report = last_report()
    assert report is not None
    assert_rows(out, Layer(xq, xs, wq, ws, None, [6, 1, 3, 4], 1))
    assert report.latencies <= 4 * 4 * (chunks + 1)  # of four workgroups for each of four experts


@pytest.mark.parametrize(("block_m", "col_tiles"), [(16, 1), (32, 1), (32, 2)])
def test_workgroups_take_the_blocks_beyond_the_grid_in_turn(block_m: int, col_tiles: int) -> None:
    """All tokens choose experts of this rank, though one in 64 was expected to."""
    generator = torch.Generator().manual_seed(block_m + col_tiles)
    M, N, K, E = 37, 1024, 160, 8
    wq, ws = random_weights(E, N, K, generator)
    xq, xs = random_mx(M, K, generator)
    chosen = torch.stack([torch.randperm(E, generator=generator)[:2] for _ in range(M)])
    chosen[:, 0] = torch.where(torch.arange(M) % 2 == 0, 5, chosen[:, 0])  # of many rows
    experts = chosen.flatten().tolist()
    problem = MoeGemmProblem(M, N, K, E, 2, block_m, "fp32", a_div=2, num_experts=64 * E)
    config = {"row_tiles": 1, "col_tiles": col_tiles, "waves": 2, "unroll": 1}
    with aiter_mx.simulate("gfx950"):
        lists = aiter_mx.moe_align(chosen, block_m, E)
        tensors = [xq, xs, wq, ws, *lists, None, None, Out((2 * M, N), torch.float32), None]
        (out,) = launch(MFMA, CPU, problem, config, tensors)
    used = int(lists[2]) // block_m
    module = MFMA.module
    assert module is not None
    assert module.geometry(GFX950, problem, config).grid[1] < used
    assert_rows(out, Layer(xq, xs, wq, ws, None, experts, 2))


@pytest.mark.parametrize("M", [1, 4, 16, 64])
def test_a_rank_of_eight_launches_hardly_more_workgroups_than_find_a_block(M: int) -> None:
    module = MFMA.module
    assert module is not None
    config = {"row_tiles": 2, "col_tiles": 1, "waves": 2, "unroll": 1}
    problem = MoeGemmProblem(M, 7168, 2048, 32, 8, 16, "fp32", num_experts=256)
    (groups_x, groups_y, _), whole = module.geometry(GFX950, problem, config).grid, 8 * M
    assert problem.touched < groups_y < max(whole / 2, 5)
    assert groups_x * groups_y >= GFX950.cu_num
    roomy = replace(problem, M=8192, expected=M)  # a fixed buffer, most of which stays empty
    assert module.geometry(GFX950, roomy, config).grid[1] == groups_y
    every = replace(problem, E=256)
    assert module.geometry(GFX950, every, config).grid[1] > every.touched


@pytest.mark.parametrize(
    ("M", "N", "K", "activation", "E"),
    [
        (12, 4096, 14336, "none", 8),
        (16, 4096, 14336, "none", 8),
        (24, 2048, 8192, "none", 16),
        (64, 1024, 4096, "silu", 32),
    ],
)
def test_a_compute_unit_with_two_workgroups_has_six_waves(
    M: int, N: int, K: int, activation: str, E: int
) -> None:
    """By the bound two of each would do, but waits that just fit in it are not all hidden."""
    config = MFMA.configure(GFX950, problem_of(M, N, K, activation, E))
    assert config == {"row_tiles": 4, "col_tiles": 1, "waves": 3, "unroll": 1}


def test_operands_beyond_four_gib() -> None:
    """Memory that no one touches costs nothing, so all but a few rows are left as they come."""
    generator = torch.Generator().manual_seed(8)
    M, N, K, E = 4100, 16, 1 << 20, 260
    xq, xs = (
        torch.empty(M, K, dtype=torch.float8_e4m3fn),
        torch.empty(M, K // 32, dtype=torch.uint8),
    )
    wq = torch.empty(E, N, K, dtype=torch.float8_e4m3fn)
    ws = torch.empty(E, N, K // 32, dtype=torch.uint8)
    assert min(xq.nbytes, wq.nbytes) > 1 << 32
    few = [(0, E - 1), (M - 1, 0), (M - 2, E - 1)]
    for row, expert in few:
        xq[row : row + 1], xs[row : row + 1] = random_mx(1, K, generator)
        wq[expert], ws[expert] = (t[0] for t in random_weights(1, N, K, generator))
    sorted_ids = torch.full((8,), M, dtype=torch.int32)
    sorted_ids[0], sorted_ids[1], sorted_ids[4] = 0, M - 2, M - 1
    expert_ids = torch.tensor([E - 1, 0], dtype=torch.int32)
    used = torch.tensor([8], dtype=torch.int32)
    problem = MoeGemmProblem(M, N, K, E, 1, 4, "fp32", max_blocks=2)
    tensors = (xq, xs, wq, ws, sorted_ids, expert_ids, used, None, None)
    config = {"row_tiles": 1, "col_tiles": 1, "waves": 16, "unroll": 1}
    every = (*tensors, Out((M, N), torch.float32), None)
    with aiter_mx.simulate("gfx950"):
        (out,) = launch(MFMA, CPU, problem, config, every)
    experts = [-1] * M
    for row, expert in few:
        experts[row] = expert
    assert_rows(out, Layer(xq, xs, wq, ws, None, experts, 1))


def test_no_variant_that_may_be_chosen_spills() -> None:
    """Each number of tiles with the most steps of loads that 8 waves admit."""
    most: dict[tuple[int, ...], Config] = {}
    for config in combinations(PARAMS):
        if config["waves"] == 8 and _resident(**config):
            most[config["row_tiles"], config["col_tiles"], config["waves"]] = config  # rising
    requests = {}
    for config in most.values():
        activations = ["none", "silu"] if config["row_tiles"] == 4 else ["none"]
        for activation in activations:
            problem = problem_of(64, 1536, (1 << 14) + 32, activation, block_m=64)
            requests[build_request(MFMA, GFX950, problem, config)] = config
    assert len(requests) >= 8
    for request, kernel in kernels_without_spills(requests):
        config = requests[request]
        expected = _registers(config["row_tiles"], config["col_tiles"], config["unroll"])
        assert kernel.vgprs <= -(-expected // 8) * 8, f"{request}: {kernel}"


def test_sweeps_take_every_value_of_every_parameter() -> None:
    cases = [*(case for group in SUBJECT.groups for case in group)]
    cases += [case for case, *_ in SUBJECT.activated]
    for param in PARAMS:
        values = {case.config[param.name] for case in cases if case.config}
        assert values == set(param.values), param.name


def test_refusals_say_what_is_covered() -> None:
    assert MFMA.refusal(GFX950, problem_of(1, 64, MAX_K - 32, "none")) is None
    too_long = MFMA.refusal(GFX950, problem_of(1, 64, MAX_K, "none"))
    assert too_long == f"K={MAX_K} is not below {MAX_K}, as the 32-bit offsets of mfma demand"
    assert "no mfma kernel for sm_90a" in str(
        MFMA.refusal(hardware("sm_90a"), problem_of(1, 64, 64, "none"))
    )


def test_a_last_block_that_is_counted_in_part_and_experts_beyond_those_here() -> None:
    """20 ids in use are two blocks of 16, the second of an expert that is not here."""
    generator, absent = torch.Generator().manual_seed(4), 2
    xq, xs = random_mx(20, 160, generator, scale_exponents=(-6, 6))
    wq, ws = random_weights(2, 48, 160, generator, scale_exponents=(-6, 6))
    ids = torch.arange(48, dtype=torch.int32)
    for last in (1, absent, absent + 5, 1 << 30):
        experts = torch.tensor([1, last, 0], dtype=torch.int32)
        used = torch.tensor([20], dtype=torch.int32)
        out = torch.full((20, 48), torch.nan)
        with aiter_mx.simulate("gfx950"):
            call = (xq, xs, wq, ws, ids, experts, used, 20, 1, 16)
            aiter_mx.moe_gemm(*call, out_dtype=torch.float32, out=out)
        assert_rows(out, Layer(xq, xs, wq, ws, None, [1] * 16 + [last] * 4, 1))
