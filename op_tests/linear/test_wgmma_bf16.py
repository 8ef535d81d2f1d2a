"""Hopper's ``wgmma_bf16`` kernel of the linear: its host side here, its results with ``-m gpu``."""

from __future__ import annotations

import pytest
import torch

from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.linear.wgmma_bf16_sm90 import layout
from aiter_mx.kernels.registry import find_kernel
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
    assert_outputs_and_biases_right,
    assert_right,
    of_cancelling_scales,
    of_moved_scales,
    of_nan,
    of_scales,
    of_zero_blocks,
    plain,
)
from op_tests.mx_reference import assert_close_to_reference

WGMMA_BF16 = find_kernel("linear", "sm_90a", "hip", "wgmma_bf16")
TARGET = hardware("sm_90a")
gpu = pytest.mark.gpu


def config(tile_m: int, tile_n: int, split: int) -> dict[str, int]:
    return {"tile_m": tile_m, "tile_n": tile_n, "split": split}


# Between them: tiles of every size, several tiles of tokens, the last one of one token, clusters
# of every size, parts of K that differ and of one chunk, K that ends within a chunk and within
# 64 k, features that no tile divides, and odd ones.
CASES = [
    (65, 64, 128, config(80, 64, 1)),
    (65, 2304, 6144, config(80, 128, 7)),
    (70, 777, 2880, config(80, 192, 5)),
    (81, 300, 160, config(80, 64, 2)),
    (96, 1001, 736, config(96, 128, 3)),
    (97, 1536, 3200, config(112, 192, 8)),
    (128, 2000, 896, config(128, 64, 6)),
    (129, 515, 2368, config(128, 192, 4)),
    (144, 6144, 1536, config(160, 128, 2)),
    (191, 322, 1056, config(96, 64, 1)),
    (193, 1990, 2304, config(224, 128, 8)),
    (200, 130, 7392, config(192, 64, 8)),
    (255, 1371, 1152, config(256, 128, 4)),
    (256, 640, 4096, config(256, 64, 5)),
    (257, 1000, 512, config(256, 128, 1)),
    (511, 900, 384, config(224, 128, 3)),
    (1000, 700, 544, config(192, 128, 2)),
]
SMALL = [
    (65, 64, 128, config(80, 64, 1)),
    (70, 300, 1120, config(80, 192, 5)),
    (97, 300, 992, config(96, 128, 4)),
    (129, 290, 1152, config(128, 64, 3)),
    (161, 250, 736, config(160, 128, 2)),
    (200, 299, 2048, config(224, 128, 8)),
    (255, 131, 608, config(256, 64, 1)),
]


def test_cases_fit_and_reach_what_differs_between_configurations() -> None:
    for M, N, K, chosen in [*CASES, *SMALL]:
        WGMMA_BF16.check_config(chosen)
        found = layout(TARGET, LinearProblem(M, N, K), chosen)
        assert found is not None and found.shared_bytes <= 227 * 1024, (M, N, K, chosen)
    for name in ("tile_m", "tile_n", "split"):
        legal = next(param.values for param in WGMMA_BF16.params if param.name == name)
        assert {chosen[name] for *_, chosen in CASES} == set(legal)


@pytest.mark.parametrize("M", [65, 80, 127, 129, 256, 257, 1000, 4096, 32768])
@pytest.mark.parametrize(("N", "K"), [(1, 32), (301, 416), (2304, 6144), (6144, 2048)])
def test_the_chosen_configuration_is_legal_and_fits(M: int, N: int, K: int) -> None:
    for pdl in (False, True):
        problem = LinearProblem(M, N, K, pdl=pdl)
        assert WGMMA_BF16.refusal(TARGET, problem) is None
        assert WGMMA_BF16.module is not None
        for chosen in (
            WGMMA_BF16.configure(TARGET, problem),
            *WGMMA_BF16.candidates(TARGET, problem),
        ):
            WGMMA_BF16.check_config(chosen)
            found = layout(TARGET, problem, chosen)
            assert found is not None and found.shared_bytes <= 227 * 1024
            geometry = WGMMA_BF16.module.geometry(TARGET, problem, chosen)
            assert geometry.grid[0] == found.clusters * chosen["split"]
            assert geometry.overlaps is pdl


@pytest.mark.parametrize(
    ("problem", "why"),
    [
        (LinearProblem(64, 8, 128), "below 65"),
        (LinearProblem(1 << 31, 8, 128), "31 bits"),
        (LinearProblem(65, 1 << 31, 128), "31 bits"),
        (LinearProblem(1 << 30, 1 << 30, 4096), "CTAs"),
    ],
)
def test_what_it_does_not_cover_is_refused(problem: LinearProblem, why: str) -> None:
    assert why in (WGMMA_BF16.refusal(TARGET, problem) or "")
    assert "sm_90a" in (WGMMA_BF16.refusal(hardware("gfx950"), LinearProblem(80, 8, 128)) or "")


def test_a_configuration_that_does_not_fit_is_refused() -> None:
    assert WGMMA_BF16.module is not None
    for problem, chosen in (
        (LinearProblem(65, 64, 256), config(80, 64, 3)),
        (LinearProblem(256, 640, 4096), config(256, 192, 1)),
    ):
        with pytest.raises(ValueError, match="does not fit"):
            WGMMA_BF16.module.geometry(TARGET, problem, chosen)


def launch(
    arguments: Operands,
    chosen: dict[str, int] | None,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    return launch_linear(WGMMA_BF16, torch.device("cuda"), chosen, arguments, bias, dtype)


@gpu
@pytest.mark.parametrize(("M", "N", "K", "chosen"), CASES)
def test_any_shape_and_configuration_match_float64(
    M: int, N: int, K: int, chosen: dict[str, int]
) -> None:
    assert_right(launch, plain(M, N, K, chosen))


@gpu
@pytest.mark.parametrize(("M", "N", "K"), [(65, 1537, 6144), (127, 2304, 6144), (600, 6143, 1536)])
def test_its_own_choice_matches_float64(M: int, N: int, K: int) -> None:
    drawn = operands(M, N, K, M, scale_exponents=(-6, 6))
    assert_close_to_reference(launch(drawn, None), *drawn)


@gpu
def test_no_product_is_missing_however_long_k_is() -> None:
    for M, N, K, chosen in CASES:
        drawn = operands_that_all_count(M, N, K, M)
        assert_no_product_is_missing(launch(drawn, chosen), drawn)


@gpu
@pytest.mark.parametrize("exponents", [*RANGES, (-66, -60), (58, 68)])
def test_scales_of_the_whole_e8m0_range_are_right(exponents: tuple[int, int]) -> None:
    assert_right(launch, of_scales(SMALL, exponents))


@gpu
def test_extreme_scales_that_cancel_are_right() -> None:
    shifts = (*(sign * shift for shift in (110, 69, 65, 62, 59, 25) for sign in (1, -1)),)
    assert_right(launch, of_cancelling_scales(SMALL, shifts))


@gpu
def test_zero_blocks_of_any_scale_add_nothing() -> None:
    assert_right(launch, of_zero_blocks(SMALL))


@gpu
def test_nan_payloads_and_scales_reach_their_outputs_alone() -> None:
    assert_right(launch, of_nan(SMALL))


@gpu
def test_scales_at_any_address_are_read_rightly() -> None:
    assert_right(launch, of_moved_scales(SMALL, (1, 2, 3, 4, 8)))


@gpu
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_outputs_and_biases_of_every_dtype_match_float64(dtype: torch.dtype) -> None:
    configs = [config(80, 128, 3), config(112, 64, 1)]
    assert_outputs_and_biases_right(launch, dtype, configs, M=83)
    drawn = operands(83, 1372, 1152, 5, scale_exponents=(-12, -6))
    bias = bias_as_large_as_outputs(drawn, dtype, 6)
    assert_close_to_reference(launch(drawn, configs[0], bias, dtype), *drawn, bias)


@gpu
@pytest.mark.parametrize("M", [65, 200, 512])
@pytest.mark.parametrize("pdl", [False, True])
def test_results_are_bitwise_equal_over_launches_on_two_streams(M: int, pdl: bool) -> None:
    assert_repeats_on_two_streams(WGMMA_BF16, LinearProblem(M, 2304, 6144, pdl=pdl))


@gpu
@pytest.mark.parametrize("M", [65, 200])
def test_a_chain_of_overlapping_launches_reads_what_the_one_ahead_wrote(M: int) -> None:
    chain = chain_of_layers(WGMMA_BF16, M)
    expected = chain(False)
    for _ in range(20):
        assert torch.equal(chain(True), expected)


@gpu
def test_weights_beyond_4_gib_are_read_rightly() -> None:
    got, drawn = launch_beyond_4_gib(WGMMA_BF16, 65, 6144 + 32)
    assert_close_to_reference(got, *drawn)
