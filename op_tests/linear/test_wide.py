"""The Hopper ``wide`` kernel of the linear: its host side here, its results with ``-m gpu``."""

from __future__ import annotations

import pytest
import torch

from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.linear.wide_sm90 import MAX_M, layout
from aiter_mx.kernels.registry import find_kernel
from aiter_mx.target import hardware
from op_tests.linear.cases import (
    DTYPES,
    Operands,
    assert_repeats_on_two_streams,
    launch_beyond_4_gib,
    launch_linear,
    operands,
    with_zero_blocks,
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

WIDE = find_kernel("linear", "sm_90a", "hip", "wide")
TARGET = hardware("sm_90a")
gpu = pytest.mark.gpu


def config(split: int, rows: int, depth: int) -> dict[str, int]:
    return {"split": split, "rows": rows, "depth": depth}


# Between them: no cluster, clusters of several sizes, parts of K without a chunk, parts of unequal
# length, K that ends within a chunk, more scales of a row than a lane has words, warps without
# rows, several passes, fewer rows than a pass, a ring of one stage, rings longer than a part, one
# as long as five passes, and parts of x that come in two and in four batches.
CASES = [
    (1, 64, 64, config(1, 64, 2)),
    (2, 3, 32, config(4, 32, 1)),
    (5, 100, 416, config(2, 48, 2)),
    (8, 4000, 1024, config(7, 208, 3)),
    (16, 70, 1056, config(4, 64, 4)),
    (17, 130, 2080, config(3, 96, 3)),
    (24, 700, 2880, config(2, 112, 4)),
    (31, 7, 3104, config(5, 32, 3)),
    (33, 640, 1536, config(4, 160, 1)),
    (40, 7000, 512, config(1, 48, 6)),
    (48, 3000, 1056, config(8, 176, 2)),
    (64, 200, 6144, config(6, 128, 2)),
    (64, 1700, 6144, config(8, 96, 4)),
    (64, 6000, 1024, config(2, 64, 3)),
    (8, 130, 16384, config(8, 32, 4)),
    (11, 130, 2048, config(1, 80, 8)),
    (33, 9000, 512, config(4, 64, 5)),
    (48, 150, 6144, config(4, 160, 1)),
    (64, 130, 12288, config(8, 32, 1)),
    (64, 5000, 4096, config(8, 112, 3)),
    (57, 9100, 2048, config(4, 96, 4)),
]
# Several passes, two to four, from one to the next of which the loop runs on.
RUNNING_ON = [
    (64, 6000, 6144, config(8, 112, 3)),
    (57, 9100, 2560, config(4, 96, 4)),
    (40, 2450, 5120, config(8, 80, 4)),
    (64, 2100, 5120, config(8, 128, 5)),
]


@pytest.mark.parametrize("M", [1, 8, 9, 17, 33, 64])
@pytest.mark.parametrize(("N", "K"), [(1, 32), (300, 96), (2304, 6144), (9216, 6144), (70, 8224)])
def test_the_chosen_configuration_is_legal_and_fits(M: int, N: int, K: int) -> None:
    problem = LinearProblem(M, N, K)
    assert WIDE.refusal(TARGET, problem) is None
    candidates = WIDE.candidates(TARGET, problem)
    assert WIDE.configure(TARGET, problem) == candidates[0]
    for chosen in candidates:
        WIDE.check_config(chosen)
        found = layout(TARGET, problem, chosen)
        assert found is not None
        assert found.shared_bytes <= 226 * 1024
        assert found.clusters * chosen["split"] <= TARGET.cu_num or found.passes == 1
        assert found.clusters * found.passes * chosen["rows"] >= N


@pytest.mark.parametrize(
    ("M", "N", "K", "chosen"),
    [
        (32, 2304, 6144, config(8, 160, 4)),
        (64, 2304, 6144, config(8, 160, 4)),
        (64, 9216, 6144, config(8, 128, 5)),
        (32, 6144, 1536, config(2, 96, 4)),
        (64, 1536, 6144, config(8, 112, 4)),
        (64, 6144, 2048, config(2, 96, 4)),
    ],
)
def test_the_default_configurations_are_what_won_on_an_h200(
    M: int, N: int, K: int, chosen: dict[str, int]
) -> None:
    assert WIDE.configure(TARGET, LinearProblem(M, N, K)) == chosen


def test_passes_run_on_where_each_has_chunks_for_it() -> None:
    for M, N, K, chosen in RUNNING_ON:
        found = layout(TARGET, LinearProblem(M, N, K), chosen)
        assert found is not None and found.late
        short = layout(TARGET, LinearProblem(M, N, 128 * 4 * chosen["split"]), chosen)
        one_pass = layout(TARGET, LinearProblem(M, chosen["rows"], K), chosen)
        few_rows = layout(TARGET, LinearProblem(32, N, K), chosen)
        for other in (short, one_pass, few_rows):
            assert other is not None and not other.late


def test_only_the_asked_for_launch_overlaps() -> None:
    assert WIDE.module is not None
    chosen = WIDE.configure(TARGET, LinearProblem(8, 2304, 6144))
    for pdl in (False, True):
        problem = LinearProblem(8, 2304, 6144, pdl=pdl)
        assert WIDE.module.geometry(TARGET, problem, chosen).overlaps is pdl
        assert WIDE.module.scalars(TARGET, problem, chosen)[-1] == pdl


def test_the_map_of_weights_has_a_box_of_a_stage() -> None:
    assert WIDE.module is not None
    weights, _ = WIDE.module.tensor_maps
    described = weights(TARGET, LinearProblem(8, 300, 416), config(2, 48, 2))
    assert (described.rows, described.row_bytes) == (300, 416)
    assert (described.box_rows, described.box_bytes) == (48, 128)
    assert WIDE.module.args[described.pointer].name == "wq"


def test_the_map_of_x_has_a_box_of_a_chunk() -> None:
    assert WIDE.module is not None
    _, x = WIDE.module.tensor_maps
    described = x(TARGET, LinearProblem(20, 300, 416), config(2, 48, 2))
    assert (described.rows, described.row_bytes) == (20, 416)
    assert (described.box_rows, described.box_bytes) == (32, 128)
    assert WIDE.module.args[described.pointer].name == "xq"


def test_what_it_does_not_cover_is_refused() -> None:
    assert WIDE.refusal(TARGET, LinearProblem(MAX_M, 8, 64)) is None
    assert "above 64" in (WIDE.refusal(TARGET, LinearProblem(MAX_M + 1, 8, 64)) or "")
    assert "no room" in (WIDE.refusal(TARGET, LinearProblem(64, 8, 65536)) or "")
    assert "sm_90a" in (WIDE.refusal(hardware("gfx950"), LinearProblem(8, 8, 64)) or "")


def launch(
    arguments: Operands,
    chosen: dict[str, int],
    bias: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    return launch_linear(WIDE, torch.device("cuda"), chosen, arguments, bias, dtype)


@gpu
@pytest.mark.parametrize(("M", "N", "K", "chosen"), CASES + RUNNING_ON)
def test_any_shape_and_configuration_match_float64(
    M: int, N: int, K: int, chosen: dict[str, int]
) -> None:
    assert_right(launch, plain(M, N, K, chosen))


@gpu
def test_every_m_matches_float64() -> None:
    for M in range(1, MAX_M + 1):
        drawn = operands(M, 130, 1120, M, scale_exponents=(-6, 6))
        assert_close_to_reference(launch(drawn, config(3, 48, 2)), *drawn)


@gpu
@pytest.mark.parametrize("exponents", RANGES)
def test_scales_of_the_whole_e8m0_range_are_exact(exponents: tuple[int, int]) -> None:
    assert_right(launch, of_scales(CASES[1:12], exponents))


@gpu
def test_extreme_scales_that_cancel_are_exact() -> None:
    assert_right(launch, of_cancelling_scales(CASES[1:10]))


@gpu
def test_one_row_of_scales_too_far_apart_leaves_the_others_alone() -> None:
    for M, N, K, chosen in CASES[3:10]:
        xq, xs, wq, ws = operands(M, min(N, 300), K, 7, scale_exponents=(-3, 3))
        for scale, row in ((xs, M // 2), (ws, len(ws) // 3)):
            scale[row, ::2] -= 60
        assert_close_to_reference(launch((xq, xs, wq, ws), chosen), xq, xs, wq, ws)


@gpu
def test_passes_that_run_on_keep_what_is_out_of_the_ordinary_in_its_pass() -> None:
    generator = torch.Generator().manual_seed(9)
    for M, N, K, chosen in RUNNING_ON[2:]:
        far = operands(M, N, K, 7, scale_exponents=(-3, 3))
        far[3][len(far[3]) // 3, ::2] -= 60
        trials = [
            far,
            with_zero_blocks(operands(M, N, K, 4, scale_exponents=(-6, 6)), generator),
            operands(M, N, K, M, nan_payload=2e-5, nan_scale=1e-4),
            operands(M, N, K, 5, scale_exponents=(-127, 127)),
        ]
        for drawn in trials:
            assert_close_to_reference(launch(drawn, chosen), *drawn)


@gpu
def test_zero_blocks_of_any_scale_add_nothing() -> None:
    assert_right(launch, of_zero_blocks(CASES[1:10]))


@gpu
def test_nan_payloads_and_scales_reach_their_outputs_alone() -> None:
    assert_right(launch, of_nan(CASES[1:12]))


@gpu
def test_scales_at_any_address_are_read_rightly() -> None:
    assert_right(launch, of_moved_scales(CASES[3:10]))


@gpu
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_outputs_and_biases_of_every_dtype_match_float64(dtype: torch.dtype) -> None:
    assert_outputs_and_biases_right(launch, dtype, [config(2, 64, 2), config(1, 80, 2)])


@gpu
def test_weights_beyond_4_gib_are_addressed_rightly() -> None:
    got, drawn = launch_beyond_4_gib(WIDE, 40, 6240)
    assert_close_to_reference(got, *drawn)


@gpu
@pytest.mark.parametrize(
    ("M", "N", "pdl"), [(8, 2304, True), (64, 2304, False), (64, 3072, True), (64, 9216, False)]
)
def test_results_are_bitwise_equal_over_launches_on_two_streams(M: int, N: int, pdl: bool) -> None:
    assert_repeats_on_two_streams(WIDE, LinearProblem(M, N, 6144, pdl=pdl))
