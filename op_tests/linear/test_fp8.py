"""The Hopper ``fp8`` kernel of the linear: its host side here, its results with ``-m gpu``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch

from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.linear.fp8_sm90 import ACCUMULATION_ERROR, MAX_M, layout
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
    launch_beyond_4_gib,
    launch_linear,
    operands,
    operands_that_all_count,
)
from op_tests.linear.trials import (
    RANGES,
    Trial,
    assert_right,
    of_cancelling_scales,
    of_moved_scales,
    of_nan,
    of_scales,
    of_zero_blocks,
    plain,
)
from op_tests.mx_reference import assert_close_to_reference

FP8 = find_kernel("linear", "sm_90a", "hip", "fp8")
TARGET = hardware("sm_90a")
ONE_SM = replace(TARGET, cu_num=1)
gpu = pytest.mark.gpu


def config(
    split: int, row_groups: int, k_groups: int, depth: int, per_sm: int = 1
) -> dict[str, int]:
    return {
        "split": split,
        "row_groups": row_groups,
        "k_groups": k_groups,
        "depth": depth,
        "per_sm": per_sm,
    }


# Between them: no cluster, clusters of several sizes, parts of K that differ, tiles of few rows,
# several passes, rings that are used again and that are not, chunks that no warpgroup's turn
# divides, warps without rows, several on an SM.
CASES = [
    (1, 64, 128, config(1, 1, 1, 4)),
    (2, 3, 512, config(4, 1, 1, 4)),
    (5, 100, 896, config(2, 1, 3, 12)),
    (8, 5000, 1152, config(2, 1, 2, 6)),
    (9, 300, 2176, config(2, 2, 2, 8)),
    (16, 300, 1152, config(8, 1, 1, 4)),
    (17, 2304, 1664, config(4, 2, 1, 6, 1)),
    (31, 7, 3200, config(1, 1, 3, 9)),
    (32, 2300, 6144, config(4, 1, 3, 9)),
    (24, 8600, 640, config(1, 1, 3, 9)),
    (8, 8500, 896, config(1, 1, 4, 8)),
    (3, 777, 1664, config(2, 1, 2, 4, 2)),
    (8, 2304, 6144, config(4, 1, 2, 10, 2)),
    (11, 4500, 1024, config(4, 2, 2, 6, 1)),
    (12, 1001, 3072, config(8, 1, 1, 4, 3)),
    (8, 2304, 6144, config(8, 1, 1, 6, 3)),
    (16, 2300, 2048, config(4, 1, 1, 4, 4)),
]

# With one SM to divide work for, each of several passes, also of the rows that trials take: with
# and without a cluster, a helper, boxes of scales (K is no multiple of 512), parts of K that begin
# between 16 bytes of scales, rings longer than a pass, last passes of few rows or none.
SEVERAL_PASSES = [
    (8, 300, 1536, config(2, 1, 2, 4)),
    (3, 290, 1024, config(1, 1, 1, 4)),
    (5, 257, 512, config(1, 1, 4, 8)),
    (16, 300, 1536, config(4, 1, 1, 8, 2)),
    (9, 300, 3200, config(2, 1, 3, 6)),
    (32, 299, 1536, config(8, 1, 1, 4, 2)),
    (16, 1300, 6144, config(8, 2, 1, 6)),
    (1, 390, 1536, config(4, 1, 1, 10, 2)),
    (13, 195, 3072, config(8, 1, 1, 10, 2)),
]


@pytest.mark.parametrize("M", [1, 8, 9, 17, 32])
@pytest.mark.parametrize(("N", "K"), [(1, 128), (300, 384), (2304, 6144), (9216, 28672)])
@pytest.mark.parametrize("pdl", [False, True])
def test_the_chosen_configuration_is_legal_and_fits(M: int, N: int, K: int, pdl: bool) -> None:
    problem = LinearProblem(M, N, K, pdl=pdl)
    assert FP8.refusal(TARGET, problem) is None
    candidates = FP8.candidates(TARGET, problem)
    assert FP8.configure(TARGET, problem) == candidates[0]
    for chosen in candidates:
        FP8.check_config(chosen)
        found = layout(TARGET, problem, chosen)
        assert found is not None
        assert (found.shared_bytes + 1024) * chosen["per_sm"] <= 228 * 1024
        assert found.tile_rows <= 64 * chosen["row_groups"]


def test_rows_and_chunks_are_dealt_out_whole() -> None:
    assert FP8.module is not None
    for M, N, K, chosen in CASES:
        problem = LinearProblem(M, N, K)
        found = layout(TARGET, problem, chosen)
        assert found is not None, (M, N, K, chosen)
        scalars = FP8.module.scalars(TARGET, problem, chosen)
        _, _, _, _, tile_rows, passes, chunks, chunks_more, overlaps = scalars
        assert not overlaps
        assert found.clusters * passes * tile_rows >= N > (found.clusters - 1) * passes * tile_rows
        assert chosen["split"] * chunks + chunks_more == K // 128
        weights, scales = FP8.module.tensor_maps
        described = weights(TARGET, problem, chosen)
        assert (described.rows, described.row_bytes) == (N, K)
        assert (described.box_rows, described.box_bytes) == (tile_rows, 128)
        if found.scale_pitch:
            described = scales(TARGET, problem, chosen)
            assert (described.rows, described.row_bytes) == (N, K // 32)
            assert (described.box_rows, described.box_bytes) == (tile_rows, found.scale_pitch)


def test_cases_reach_what_differs_between_configurations() -> None:
    found = [layout(TARGET, LinearProblem(M, N, K), chosen) for M, N, K, chosen in CASES]
    assert {one.passes > 1 for one in found if one} == {False, True}
    assert {one.refills for one in found if one} == {False, True}
    assert {one.tiles_m for one in found if one} == {1, 2, 4}


def test_cases_of_several_passes_reach_what_differs_between_them() -> None:
    found = []
    for pdl in (False, True):
        for M, N, K, chosen in SEVERAL_PASSES:
            for rows in (N, min(N, 300)):
                one = layout(ONE_SM, LinearProblem(M, rows, K, pdl=pdl), chosen)
                assert one is not None and one.passes > 1, (M, N, K, chosen)
                found.append(one)
    assert {one.scale_pitch > 0 for one in found} == {False, True}
    assert {one.alone for one in found} == {False, True}
    assert {one.depth > one.chunks for one in found} == {False, True}
    assert max(one.scale_buffers for one in found) > 2


@pytest.mark.parametrize(("M", "N", "K"), [(1, 300, 1536), (8, 9216, 6144), (32, 2304, 6144)])
def test_a_legal_configuration_fits_a_workgroup_or_is_refused(M: int, N: int, K: int) -> None:
    assert FP8.module is not None
    problem, refused = LinearProblem(M, N, K), []
    for chosen in combinations(FP8.params):
        if layout(TARGET, problem, chosen) is None:
            refused.append(chosen)
            continue
        geometry = FP8.module.geometry(TARGET, problem, chosen)
        assert geometry.block[0] <= 1024 and geometry.shared_bytes <= 227 * 1024
    assert config(1, 2, 4, 8) in refused
    with pytest.raises(ValueError, match="does not fit"):
        FP8.module.geometry(TARGET, problem, config(1, 2, 4, 8))


def test_only_the_asked_for_launch_overlaps() -> None:
    assert FP8.module is not None
    for pdl in (False, True):
        problem = LinearProblem(8, 2304, 6144, pdl=pdl)
        chosen = FP8.configure(TARGET, problem)
        assert FP8.module.geometry(TARGET, problem, chosen).overlaps is pdl
        assert FP8.module.scalars(TARGET, problem, chosen)[-1] == pdl


@pytest.mark.parametrize(
    ("problem", "why"),
    [
        (LinearProblem(MAX_M + 1, 8, 128), "above 32"),
        (LinearProblem(8, 8, 128, "fp32"), "not for fp32"),
        (LinearProblem(8, 8, 128, "fp16"), "not for fp16"),
        (LinearProblem(8, 8, 160), "no multiple of 128"),
        (LinearProblem(8, 8, 1 << 20), "fits shared memory"),
    ],
)
def test_what_it_does_not_cover_is_refused(problem: LinearProblem, why: str) -> None:
    assert FP8.refusal(TARGET, LinearProblem(MAX_M, 8, 128)) is None
    assert why in (FP8.refusal(TARGET, problem) or "")
    assert "sm_90a" in (FP8.refusal(hardware("gfx950"), LinearProblem(8, 8, 128)) or "")


def test_without_a_table_it_takes_only_overlapping_launches_that_gain() -> None:
    for M in (1, 4, 8, 16):
        assert FP8.yields(TARGET, LinearProblem(M, 2304, 6144, pdl=True)) is None
    assert FP8.yields(TARGET, LinearProblem(16, 9216, 6144, pdl=True)) is None
    for other in (
        LinearProblem(8, 2304, 6144),
        LinearProblem(17, 2304, 6144, pdl=True),
        LinearProblem(8, 1024, 6144, pdl=True),
        LinearProblem(8, 9216, 6144, pdl=True),
    ):
        assert "fewer bits" in (FP8.yields(TARGET, other) or "")


@pytest.mark.parametrize("pdl", [False, True])
def test_without_a_table_no_one_takes_what_it_would_leave_to_others(pdl: bool) -> None:
    for M, K in product((1, 4, 8, 16, 17, 32, 33, 64), (2048, 12288, 14336, 14400, 16384, 25600)):
        for out_dtype in ("bf16", "fp32"):
            problem = LinearProblem(M, 5000, K, out_dtype=out_dtype, pdl=pdl)
            line = in_line("linear", TARGET, problem)
            first = next(kernel for kernel in line if kernel.refusal(TARGET, problem) is None)
            assert first.yields(TARGET, problem) is None, problem


def launch(
    arguments: Operands, chosen: dict[str, int] | None, bias: torch.Tensor | None = None
) -> torch.Tensor:
    return launch_linear(FP8, torch.device("cuda"), chosen, arguments, bias, torch.bfloat16)


def launch_on_one(arguments: Operands, chosen: dict[str, int], pdl: bool = False) -> torch.Tensor:
    """In as many passes as one SM would take."""
    device = torch.device("cuda")
    return launch_linear(FP8, device, chosen, arguments, cu_num=1, pdl=pdl)


def assert_close(got: torch.Tensor, arguments: Operands, bias: torch.Tensor | None = None) -> None:
    assert_close_to_reference(got, *arguments, bias, accumulation_error=ACCUMULATION_ERROR)


@gpu
@pytest.mark.parametrize(("M", "N", "K", "chosen"), CASES)
def test_any_shape_and_configuration_match_float64(
    M: int, N: int, K: int, chosen: dict[str, int]
) -> None:
    assert_right(launch, plain(M, N, K, chosen), ACCUMULATION_ERROR)


@gpu
def test_no_product_is_missing_however_long_k_is() -> None:
    for M, N, K, chosen in CASES:
        if M >= 8 and N >= 100:
            drawn = operands_that_all_count(M, N, K, M)
            assert_no_product_is_missing(launch(drawn, chosen), drawn)


@gpu
@pytest.mark.parametrize("exponents", RANGES)
def test_scales_of_the_whole_e8m0_range_are_right(exponents: tuple[int, int]) -> None:
    assert_right(launch, of_scales(CASES[1:], exponents), ACCUMULATION_ERROR)


@gpu
def test_extreme_scales_that_cancel_are_right() -> None:
    assert_right(launch, of_cancelling_scales(CASES[1:9]), ACCUMULATION_ERROR)


@gpu
def test_zero_blocks_of_any_scale_add_nothing() -> None:
    assert_right(launch, of_zero_blocks(CASES[1:9]), ACCUMULATION_ERROR)


@gpu
def test_nan_payloads_and_scales_reach_their_outputs_alone() -> None:
    assert_right(launch, of_nan(CASES[1:]), ACCUMULATION_ERROR)


@gpu
def test_scales_at_any_address_are_read_rightly() -> None:
    assert_right(launch, of_moved_scales(CASES[1:9]), ACCUMULATION_ERROR)


@gpu
@pytest.mark.parametrize("pdl", [False, True])
def test_several_passes_match_float64(pdl: bool) -> None:
    launch_them = partial(launch_on_one, pdl=pdl)
    for case in SEVERAL_PASSES:
        assert_right(launch_them, plain(*case), ACCUMULATION_ERROR)
    for M, N, K, chosen in SEVERAL_PASSES:
        drawn = operands_that_all_count(M, N, K, M)
        if M >= 8:
            assert_no_product_is_missing(launch_them(drawn, chosen), drawn)


@gpu
@pytest.mark.parametrize("trials", [of_cancelling_scales, of_zero_blocks, of_nan, of_moved_scales])
def test_several_passes_take_any_scales(trials: Callable[..., Iterator[Trial]]) -> None:
    assert_right(launch_on_one, trials(SEVERAL_PASSES), ACCUMULATION_ERROR)


@gpu
@pytest.mark.parametrize("exponents", RANGES)
def test_several_passes_take_scales_of_the_whole_range(exponents: tuple[int, int]) -> None:
    assert_right(launch_on_one, of_scales(SEVERAL_PASSES, exponents), ACCUMULATION_ERROR)


@gpu
@pytest.mark.parametrize("pdl", [False, True])
def test_several_passes_repeat_bitwise_on_two_streams(pdl: bool) -> None:
    for M, chosen in ((8, config(4, 1, 1, 10, 2)), (8, config(2, 1, 4, 16))):
        assert_repeats_on_two_streams(FP8, LinearProblem(M, 9216, 6144, pdl=pdl), chosen)


@gpu
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_biases_of_every_dtype_match_float64(dtype: torch.dtype) -> None:
    drawn = operands(19, 137, 1152, 5, scale_exponents=(-6, 6))
    bias = bias_as_large_as_outputs(drawn, dtype, 6)
    assert_close(launch(drawn, config(2, 1, 2, 4), bias), drawn, bias)


@gpu
def test_weights_beyond_4_gib_are_addressed_rightly() -> None:
    got, drawn = launch_beyond_4_gib(FP8, 8, 6272, "bf16")
    assert_close(got, drawn)


@gpu
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("M", [8, 32])
def test_results_are_bitwise_equal_over_launches_on_two_streams(M: int, pdl: bool) -> None:
    assert_repeats_on_two_streams(FP8, LinearProblem(M, 2304, 6144, pdl=pdl))


@gpu
@pytest.mark.parametrize("M", [8, 32])
def test_a_chain_of_overlapping_launches_reads_what_the_one_ahead_wrote(M: int) -> None:
    chain = chain_of_layers(FP8, M)
    expected = chain(False)
    for _ in range(20):
        assert torch.equal(chain(True), expected)
