"""What the host does for Hopper's ``wgmma_fp8`` kernel of the linear."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.linear.wgmma_fp8_layout_sm90 import layout
from aiter_mx.kernels.registry import find_kernel, in_line
from aiter_mx.target import hardware
from op_tests.linear.subjects.wgmma_fp8_sm90 import WGMMA_FP8_CASES as CASES
from op_tests.linear.subjects.wgmma_fp8_sm90 import WGMMA_FP8_PASSES as PASSES
from op_tests.linear.subjects.wgmma_fp8_sm90 import WGMMA_FP8_SMALL as SMALL

WGMMA_FP8 = find_kernel("linear", "sm_90a", "hip", "wgmma_fp8")
TARGET = hardware("sm_90a")


EIGHT = replace(TARGET, cu_num=8)


def test_cases_fit_and_reach_what_differs_between_configurations() -> None:
    found = []
    for M, N, K, chosen, *_ in CASES:
        WGMMA_FP8.check_config(chosen)
        one = layout(TARGET, LinearProblem(M, N, K), chosen)
        assert one is not None, (M, N, K, chosen)
        found.append((one, chosen))
    for M, N, K, chosen, *_ in SMALL:
        assert layout(EIGHT, LinearProblem(M, N, K), chosen) is not None, (M, N, K, chosen)
    for M, N, K, chosen, *_ in PASSES:
        several = layout(EIGHT, LinearProblem(M, N, K), chosen)
        assert several is not None and several.passes > 1, (M, N, K, chosen)
    assert {one.x_is_a for one, _ in found} == {False, True}
    assert {one.columns // 8 % 2 for one, _ in found if one.x_is_a} == {0, 1}
    assert {one.chunks > chosen["depth"] for one, chosen in found} == {False, True}
    assert {one.stages < one.chunks for one, _ in found} == {False, True}
    assert {one.chunks % 2 for one, _ in found} == {0, 1}
    assert {K % 128 // 32 for _, _, K, *_ in CASES} == {0, 1, 2, 3}
    kept = {(chosen["split"] > 1, chosen["k_groups"] > 1) for one, chosen in found if one.kept}
    assert kept >= {(False, True), (True, False)}
    assert {one.scale_chunks for one, _ in found} == {1, 2, 4}
    assert {chosen["row_groups"] * chosen["k_groups"] for _, chosen in found} == {1, 2, 3, 4}
    shared = [(one, chosen) for one, chosen in found if chosen["per_sm"] > 1]
    assert {chosen["per_sm"] for _, chosen in shared} == {2, 3}
    assert {one.stages < one.chunks for one, _ in shared} == {False, True}
    tiles = [(4 * chosen["row_groups"] * one.columns // 8, chosen) for one, chosen in shared]
    assert {owned < chosen["split"] for owned, chosen in tiles} == {False, True}


@pytest.mark.parametrize(("N", "K"), [(1, 128), (300, 384), (2304, 6144), (6144, 2048)])
def test_all_workgroups_of_a_candidate_are_there_at_once(N: int, K: int) -> None:
    assert WGMMA_FP8.module is not None
    for M, pdl in product((1, 8, 17, 32, 33, 48, 49, 64, 65, 96, 97, 128), (False, True)):
        problem = LinearProblem(M, N, K, pdl=pdl)
        for chosen in WGMMA_FP8.candidates(TARGET, problem):
            per_sm, geometry = chosen["per_sm"], WGMMA_FP8.module.geometry(TARGET, problem, chosen)
            assert geometry.grid[0] <= TARGET.cu_num * per_sm
            assert (geometry.shared_bytes + 1024) * per_sm <= 228 * 1024


def test_rows_and_chunks_are_dealt_out_whole() -> None:
    assert WGMMA_FP8.module is not None
    for M, N, K, chosen, *_ in CASES:
        problem = LinearProblem(M, N, K)
        found = layout(TARGET, problem, chosen)
        assert found is not None, (M, N, K, chosen)
        *_, chunks, chunks_more, overlaps = WGMMA_FP8.module.scalars(TARGET, problem, chosen)
        assert not overlaps and chosen["split"] * chunks + chunks_more == -(-K // 128)
        assert found.clusters * found.rows_w >= N > (found.clusters - 1) * found.rows_w
        weights, x = WGMMA_FP8.module.tensor_maps
        described = weights(TARGET, problem, chosen)
        assert (described.rows, described.row_bytes) == (N, K)
        assert (described.box_rows, described.box_bytes) == (found.rows_w, 128)
        described = x(TARGET, problem, chosen)
        assert (described.rows, described.row_bytes) == (M, K)
        assert (described.box_rows, described.box_bytes) == (found.rows_m, 128)


@pytest.mark.parametrize(("N", "K"), [(2304, 6144), (1536, 6144), (6144, 2048), (9216, 6144)])
@pytest.mark.parametrize("pdl", [False, True])
def test_what_fits_a_power_of_two_of_rows_fits_fewer(N: int, K: int, pdl: bool) -> None:
    for most in (8, 16, 32, 64):
        for chosen in WGMMA_FP8.candidates(TARGET, LinearProblem(most, N, K, pdl=pdl)):
            for M in range(most // 2 + 1, most):
                found = layout(TARGET, LinearProblem(M, N, K), chosen)
                assert found is not None, (M, N, K, chosen)


@pytest.mark.parametrize("M", [1, 8, 16])
@pytest.mark.parametrize(("N", "K"), [(1280, 6144), (1536, 6144), (2304, 4096)])
def test_several_of_an_sm_are_tried_where_launches_overlap(M: int, N: int, K: int) -> None:
    alone = WGMMA_FP8.candidates(TARGET, LinearProblem(M, N, K))
    assert {chosen["per_sm"] for chosen in alone} == {1}
    overlapping = WGMMA_FP8.candidates(TARGET, LinearProblem(M, N, K, pdl=True))
    assert any(chosen["per_sm"] > 1 for chosen in overlapping[:2])
    assert any(chosen["per_sm"] == 1 for chosen in overlapping)


def test_workgroups_of_an_sm_have_its_registers_together() -> None:
    assert WGMMA_FP8.module is not None
    for M, N, K, chosen, *_ in CASES:
        geometry = WGMMA_FP8.module.geometry(TARGET, LinearProblem(M, N, K), chosen)
        groups = chosen["row_groups"] * chosen["k_groups"]
        of_copies = 128 if chosen["per_sm"] == 1 else 64
        assert geometry.block == (128 * groups + of_copies, 1, 1)
        assert geometry.block[0] * chosen["per_sm"] <= 1024  # 64 registers for each, or more


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
