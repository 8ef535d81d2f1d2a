"""Hopper's ``wgmma_fp8`` kernel of the linear: its host side here, its results with ``-m gpu``."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.linear.wgmma_fp8_sm90 import ACCUMULATION_ERROR, MAX_M, layout
from aiter_mx.kernels.registry import find_kernel, in_line
from aiter_mx.kernels.spec import combinations
from aiter_mx.target import hardware
from op_tests.linear.cases import (
    DTYPES,
    Operands,
    assert_no_product_is_missing,
    assert_repeats_on_two_streams,
    bias_as_large_as_outputs,
    chain_of_layers,
    launch_linear,
    operands,
    operands_that_all_count,
)
from op_tests.linear.trials import (
    RANGES,
    Case,
    assert_right,
    of_cancelling_scales,
    of_moved_scales,
    of_nan,
    of_scales,
    of_zero_blocks,
    plain,
)
from op_tests.mx_reference import assert_close_to_reference

WGMMA_FP8 = find_kernel("linear", "sm_90a", "hip", "wgmma_fp8")
TARGET = hardware("sm_90a")
gpu = pytest.mark.gpu


def config(split: int, row_groups: int, k_groups: int, depth: int) -> dict[str, int]:
    return {"split": split, "row_groups": row_groups, "k_groups": k_groups, "depth": depth}


# Between them: x or w as wgmma's A, no cluster, clusters of several sizes, parts of K that differ,
# tiles of few rows and of an odd number of eights, chunks that no warpgroup's turn divides, an odd
# number of them, warps without rows, chunks that wait to be asked for, more of them than there are,
# and stages that are used again.
CASES = [
    (1, 64, 128, config(1, 1, 1, 4)),
    (2, 3, 512, config(1, 1, 1, 4)),
    (5, 2000, 896, config(2, 1, 3, 2)),
    (16, 900, 1152, config(8, 1, 1, 4)),
    (17, 2304, 1664, config(4, 2, 1, 6)),
    (31, 777, 3200, config(1, 1, 2, 3)),
    (32, 2300, 6144, config(8, 3, 1, 6)),
    (33, 5001, 1536, config(2, 2, 1, 6)),
    (40, 1536, 1280, config(5, 2, 2, 4)),
    (47, 6144, 768, config(1, 1, 4, 2)),
    (48, 1990, 2304, config(6, 2, 1, 12)),
    (49, 1536, 1280, config(5, 1, 2, 4)),
    (57, 1001, 3072, config(7, 1, 3, 2)),
    (63, 3001, 1152, config(3, 4, 1, 3)),
    (64, 1536, 6144, config(8, 2, 1, 3)),
    (64, 300, 2048, config(1, 1, 2, 8)),
    (64, 6144, 1536, config(2, 2, 1, 4)),
    (64, 6144, 2048, config(1, 1, 3, 6)),
    (50, 5000, 2688, config(1, 1, 2, 8)),
    (32, 9216, 6144, config(2, 3, 1, 4)),
    (20, 8000, 3200, config(1, 1, 3, 12)),
]

# Of few rows, for what eight SMs would take.
SMALL = [
    (1, 64, 128, config(1, 1, 1, 4)),
    (13, 300, 896, config(1, 1, 3, 2)),
    (17, 300, 1664, config(2, 2, 1, 6)),
    (31, 290, 2176, config(1, 1, 4, 3)),
    (32, 250, 768, config(4, 4, 1, 2)),
    (40, 290, 1280, config(1, 1, 2, 4)),
    (48, 300, 1536, config(2, 2, 2, 3)),
    (49, 299, 1152, config(1, 1, 2, 8)),
    (57, 240, 896, config(4, 3, 1, 2)),
    (64, 300, 1664, config(2, 2, 1, 4)),
    (60, 320, 4096, config(1, 1, 3, 4)),
    (30, 500, 4224, config(1, 1, 2, 6)),
]
EIGHT = replace(TARGET, cu_num=8)


def test_cases_fit_and_reach_what_differs_between_configurations() -> None:
    found = []
    for M, N, K, chosen in CASES:
        WGMMA_FP8.check_config(chosen)
        one = layout(TARGET, LinearProblem(M, N, K), chosen)
        assert one is not None, (M, N, K, chosen)
        found.append((one, chosen))
    for M, N, K, chosen in SMALL:
        assert layout(EIGHT, LinearProblem(M, N, K), chosen) is not None, (M, N, K, chosen)
    assert {one.x_is_a for one, _ in found} == {False, True}
    assert {one.columns // 8 % 2 for one, _ in found if one.x_is_a} == {0, 1}
    assert {one.chunks > chosen["depth"] for one, chosen in found} == {False, True}
    assert {one.stages < one.chunks for one, _ in found} == {False, True}
    assert {one.chunks % 2 for one, _ in found} == {0, 1}
    kept = {(chosen["split"] > 1, chosen["k_groups"] > 1) for one, chosen in found if one.kept}
    assert kept >= {(False, True), (True, False)}
    assert {one.scale_chunks for one, _ in found} == {1, 2, 4}
    assert {chosen["row_groups"] * chosen["k_groups"] for _, chosen in found} == {1, 2, 3, 4}


@pytest.mark.parametrize("M", [1, 8, 17, 32, 33, 48, 49, 64])
@pytest.mark.parametrize(("N", "K"), [(1, 128), (300, 384), (2304, 6144), (6144, 2048)])
@pytest.mark.parametrize("pdl", [False, True])
def test_the_chosen_configuration_is_legal_and_fits(M: int, N: int, K: int, pdl: bool) -> None:
    problem = LinearProblem(M, N, K, pdl=pdl)
    assert WGMMA_FP8.refusal(TARGET, problem) is None
    candidates = WGMMA_FP8.candidates(TARGET, problem)
    assert WGMMA_FP8.configure(TARGET, problem) == candidates[0]
    assert WGMMA_FP8.module is not None
    for chosen in candidates:
        WGMMA_FP8.check_config(chosen)
        found = layout(TARGET, problem, chosen)
        assert found is not None and found.shared_bytes <= 227 * 1024
        geometry = WGMMA_FP8.module.geometry(TARGET, problem, chosen)
        assert geometry.grid[0] <= TARGET.cu_num and geometry.overlaps is pdl
        scalars = WGMMA_FP8.module.scalars(TARGET, problem, chosen)
        assert scalars[-1] == pdl


def test_rows_and_chunks_are_dealt_out_whole() -> None:
    assert WGMMA_FP8.module is not None
    for M, N, K, chosen in CASES:
        problem = LinearProblem(M, N, K)
        found = layout(TARGET, problem, chosen)
        assert found is not None, (M, N, K, chosen)
        *_, chunks, chunks_more, overlaps = WGMMA_FP8.module.scalars(TARGET, problem, chosen)
        assert not overlaps and chosen["split"] * chunks + chunks_more == K // 128
        assert found.clusters * found.rows_w >= N > (found.clusters - 1) * found.rows_w
        weights, x = WGMMA_FP8.module.tensor_maps
        described = weights(TARGET, problem, chosen)
        assert (described.rows, described.row_bytes) == (N, K)
        assert (described.box_rows, described.box_bytes) == (found.rows_w, 128)
        described = x(TARGET, problem, chosen)
        assert (described.rows, described.row_bytes) == (M, K)
        assert (described.box_rows, described.box_bytes) == (found.rows_m, 128)


@pytest.mark.parametrize(("N", "K"), [(2304, 6144), (1536, 6144), (6144, 2048), (9216, 6144)])
def test_what_fits_a_power_of_two_of_rows_fits_fewer(N: int, K: int) -> None:
    for most in (16, 32, 64):
        for chosen in WGMMA_FP8.candidates(TARGET, LinearProblem(most, N, K)):
            for M in range(most // 2 + 1, most):
                found = layout(TARGET, LinearProblem(M, N, K), chosen)
                assert found is not None, (M, N, K, chosen)


def test_a_configuration_that_does_not_fit_is_refused() -> None:
    assert WGMMA_FP8.module is not None
    problem = LinearProblem(64, 8, 1 << 20)
    for chosen in combinations(WGMMA_FP8.params):
        assert layout(TARGET, problem, chosen) is None
    with pytest.raises(ValueError, match="does not fit"):
        WGMMA_FP8.module.geometry(TARGET, problem, config(8, 2, 1, 3))


@pytest.mark.parametrize(
    ("problem", "why"),
    [
        (LinearProblem(MAX_M + 1, 8, 128), "above 64"),
        (LinearProblem(8, 8, 128, "fp32"), "not for fp32"),
        (LinearProblem(8, 8, 160), "no multiple of 128"),
        (LinearProblem(8, 8, 1 << 20), "no room"),
    ],
)
def test_what_it_does_not_cover_is_refused(problem: LinearProblem, why: str) -> None:
    assert WGMMA_FP8.refusal(TARGET, LinearProblem(MAX_M, 8, 128)) is None
    assert why in (WGMMA_FP8.refusal(TARGET, problem) or "")
    assert "sm_90a" in (WGMMA_FP8.refusal(hardware("gfx950"), LinearProblem(8, 8, 128)) or "")


@pytest.mark.parametrize("pdl", [False, True])
def test_without_a_table_it_takes_what_it_was_measured_to_gain(pdl: bool) -> None:
    for M in (17, 32, 48, 64):
        for N, K in ((1024, 512), (2304, 6144), (9216, 6144), (28672, 8192)):
            assert WGMMA_FP8.yields(TARGET, LinearProblem(M, N, K, pdl=pdl)) is None
    for M, N, K in ((16, 2304, 6144), (32, 512, 512), (32, 383, 8192)):
        assert "fewer bits" in (WGMMA_FP8.yields(TARGET, LinearProblem(M, N, K, pdl=pdl)) or "")


@pytest.mark.parametrize("pdl", [False, True])
def test_without_a_table_no_one_takes_what_it_would_leave_to_others(pdl: bool) -> None:
    for M, K in product((1, 4, 8, 16, 17, 32, 33, 64), (2048, 12288, 14336, 14400, 16384, 25600)):
        for out_dtype in ("bf16", "fp16", "fp32"):
            problem = LinearProblem(M, 5000, K, out_dtype=out_dtype, pdl=pdl)
            line = in_line("linear", TARGET, problem)
            first = next(kernel for kernel in line if kernel.refusal(TARGET, problem) is None)
            assert first.yields(TARGET, problem) is None, problem


@pytest.mark.parametrize(
    ("M", "N", "K"), [(64, 106496, 16384), (32, 13312, 16384), (16, 57344, 8192)]
)
def test_many_rows_of_w_are_taken_in_passes(M: int, N: int, K: int) -> None:
    problem = LinearProblem(M, N, K)
    found = [layout(TARGET, problem, chosen) for chosen in WGMMA_FP8.candidates(TARGET, problem)]
    assert any(each is not None and each.passes > 1 for each in found)
    for each in found:
        assert each is not None
        assert each.clusters * each.rows_w >= N


def launch(
    arguments: Operands, chosen: dict[str, int] | None, bias: torch.Tensor | None = None
) -> torch.Tensor:
    return launch_linear(WGMMA_FP8, torch.device("cuda"), chosen, arguments, bias, torch.bfloat16)


def launch_few(arguments: Operands, chosen: dict[str, int]) -> torch.Tensor:
    device = torch.device("cuda")
    return launch_linear(WGMMA_FP8, device, chosen, arguments, cu_num=EIGHT.cu_num)


def assert_close(got: torch.Tensor, arguments: Operands, bias: torch.Tensor | None = None) -> None:
    assert_close_to_reference(got, *arguments, bias, accumulation_error=ACCUMULATION_ERROR)


@gpu
@pytest.mark.parametrize(("M", "N", "K", "chosen"), CASES)
def test_any_shape_and_configuration_match_float64(
    M: int, N: int, K: int, chosen: dict[str, int]
) -> None:
    assert_right(launch, plain(M, N, K, chosen), ACCUMULATION_ERROR)


@gpu
@pytest.mark.parametrize(
    ("M", "N", "K"),
    [(17, 1537, 6144), (33, 6143, 1536), (47, 2304, 6144), (63, 6144, 2048), (64, 1535, 6144)],
)
def test_its_own_choice_matches_float64(M: int, N: int, K: int) -> None:
    drawn = operands(M, N, K, M, scale_exponents=(-6, 6))
    assert_close(launch(drawn, None), drawn)


PASSES = [
    (9, 17001, 256, config(1, 2, 1, 2)),
    (33, 16900, 384, config(2, 3, 1, 4)),
    (64, 20003, 512, config(1, 2, 1, 3)),
    (61, 18000, 256, config(2, 2, 1, 4)),
]


@gpu
@pytest.mark.parametrize("case", PASSES)
def test_passes_over_the_rows_of_w_match_float64(case: Case) -> None:
    problem = LinearProblem(*case[:3])
    found = layout(EIGHT, problem, case[3])
    assert found is not None
    assert found.passes > 1
    assert_right(launch_few, plain(*case), ACCUMULATION_ERROR)
    assert_right(launch_few, of_nan([case]), ACCUMULATION_ERROR)


@gpu
@pytest.mark.parametrize("M", [9, 40, 64])
def test_fp16_results_match_float64(M: int) -> None:
    drawn = operands(M, 1371, 1152, 5, scale_exponents=(-6, 0))
    device = torch.device("cuda")
    for bias in (None, bias_as_large_as_outputs(drawn, torch.float16, 6)):
        got = launch_linear(WGMMA_FP8, device, None, drawn, bias, torch.float16)
        assert_close(got, drawn, bias)


@gpu
def test_no_product_is_missing_however_long_k_is() -> None:
    for M, N, K, chosen in CASES:
        if M >= 8 and N >= 100:
            drawn = operands_that_all_count(M, N, K, M)
            assert_no_product_is_missing(launch(drawn, chosen), drawn)


@gpu
@pytest.mark.parametrize("exponents", [*RANGES, (-63, 63), (-62, 62)])
def test_scales_of_the_whole_e8m0_range_are_right(exponents: tuple[int, int]) -> None:
    assert_right(launch_few, of_scales(SMALL, exponents), ACCUMULATION_ERROR)


@gpu
def test_extreme_scales_that_cancel_are_right() -> None:
    shifts = (*(sign * shift for shift in (110, 65, 62, 59, 25) for sign in (1, -1)),)
    assert_right(launch_few, of_cancelling_scales(SMALL, shifts), ACCUMULATION_ERROR)


@gpu
def test_zero_blocks_of_any_scale_add_nothing() -> None:
    assert_right(launch_few, of_zero_blocks(SMALL), ACCUMULATION_ERROR)


@gpu
def test_nan_payloads_and_scales_reach_their_outputs_alone() -> None:
    assert_right(launch_few, of_nan(SMALL), ACCUMULATION_ERROR)


@gpu
def test_scales_at_any_address_are_read_rightly() -> None:
    assert_right(launch_few, of_moved_scales(SMALL, (1, 2, 3, 4, 8)), ACCUMULATION_ERROR)


@gpu
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("M", [19, 61])
def test_biases_of_every_dtype_match_float64(dtype: torch.dtype, M: int) -> None:
    for N in (1370, 1371):
        drawn = operands(M, N, 1152, 5, scale_exponents=(-6, 6))
        bias = bias_as_large_as_outputs(drawn, dtype, 6)
        assert_close(launch(drawn, config(2, 1, 2, 4), bias), drawn, bias)


@gpu
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("M", [32, 64])
def test_results_are_bitwise_equal_over_launches_on_two_streams(M: int, pdl: bool) -> None:
    for N, K in ((2304, 6144), (6144, 1536)):
        assert_repeats_on_two_streams(WGMMA_FP8, LinearProblem(M, N, K, pdl=pdl))


@gpu
@pytest.mark.parametrize("M", [8, 32, 64])
def test_a_chain_of_overlapping_launches_reads_what_the_one_ahead_wrote(M: int) -> None:
    chain = chain_of_layers(WGMMA_FP8, M)
    expected = chain(False)
    for _ in range(20):
        assert torch.equal(chain(True), expected)
