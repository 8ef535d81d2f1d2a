"""The Hopper ``mfma`` kernel of the linear: its host side here, its results with ``-m gpu``."""

from __future__ import annotations

import pytest
import torch

from aiter_mx.dispatch.dispatcher import route
from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.linear.mfma_sm90 import MAX_M, layout
from aiter_mx.kernels.registry import find_kernel
from aiter_mx.target import hardware
from op_tests.linear.cases import (
    DTYPES,
    Operands,
    assert_repeats_on_two_streams,
    launch_linear,
    operands,
)
from op_tests.linear.trials import (
    RANGES,
    assert_outputs_and_biases_right,
    assert_right,
    of_cancelling_scales,
    of_nan,
    of_scales,
    plain,
)
from op_tests.mx_reference import assert_close_to_reference

MFMA = find_kernel("linear", "sm_90a", "hip", "mfma")
TARGET = hardware("sm_90a")
gpu = pytest.mark.gpu


def config(split: int, row_groups: int, k_groups: int, depth: int) -> dict[str, int]:
    return {"split": split, "row_groups": row_groups, "k_groups": k_groups, "depth": depth}


@pytest.mark.parametrize("M", [1, 8, 9, 17, 33, 64])
@pytest.mark.parametrize(("N", "K"), [(1, 32), (300, 96), (2304, 6144), (9216, 28672), (70, 65568)])
def test_the_chosen_configuration_is_legal_and_fits(M: int, N: int, K: int) -> None:
    problem = LinearProblem(M, N, K)
    chosen = MFMA.configure(TARGET, problem)
    MFMA.check_config(chosen)
    found = layout(problem, chosen)
    assert found is not None
    assert found.tile_m >= M
    assert found.shared_bytes <= 227 * 1024


def test_envelope_ends_at_64_rows_and_gemv_has_the_smallest() -> None:
    assert MFMA.refusal(TARGET, LinearProblem(MAX_M, 8, 64)) is None
    assert "above 64" in (MFMA.refusal(TARGET, LinearProblem(MAX_M + 1, 8, 64)) or "")

    def kernels(N: int, K: int) -> list[str]:
        return [route("linear", TARGET, LinearProblem(M, N, K)).kernel for M in (1, 12, 33, 65)]

    assert kernels(4000, 4096) == ["mma_registers", "mma_registers", "wgmma_fp8", "persistent"]
    assert kernels(72, 96) == ["gemv", "gemv", "wide", "dot_scaled"]
    for M, kernel in ((17, "mma_ring"), (32, "mma_ring"), (33, "mfma"), (64, "mfma")):
        longer = LinearProblem(M, 72, 32768)  # than wide has room for
        assert route("linear", TARGET, longer).kernel == kernel


def launch(
    arguments: Operands,
    chosen: dict[str, int] | None = None,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    return launch_linear(MFMA, torch.device("cuda"), chosen, arguments, bias, dtype)


def exact(arguments: Operands, chosen: dict[str, int]) -> torch.Tensor:
    return launch(arguments, chosen or None, dtype=torch.float32)


# Between them: every cluster size, empty parts of K, half a unit at the end, x that does not fit
# shared memory, more tiles than clusters, fewer rows than a tile.
CASES = [
    (1, 64, 64, config(1, 1, 1, 2)),
    (2, 3, 32, config(8, 1, 4, 4)),
    (5, 100, 416, config(3, 1, 2, 4)),
    (8, 9000, 1024, config(7, 1, 4, 2)),
    (16, 70, 1056, config(4, 3, 1, 2)),
    (17, 130, 2080, config(2, 1, 4, 6)),
    (31, 7, 3104, config(5, 1, 3, 2)),
    (33, 640, 1536, config(4, 4, 1, 2)),
    (64, 200, 6144, config(6, 2, 1, 4)),
    (64, 130, 28672, config(2, 2, 1, 4)),
    (64, 20000, 512, config(8, 2, 2, 2)),
]


@gpu
@pytest.mark.parametrize(("M", "N", "K", "chosen"), CASES)
def test_any_shape_and_configuration_match_float64(
    M: int, N: int, K: int, chosen: dict[str, int]
) -> None:
    assert_right(launch, plain(M, N, K, chosen))


@gpu
@pytest.mark.parametrize("M", range(1, MAX_M + 1))
def test_every_m_matches_float64(M: int) -> None:
    drawn = operands(M, 130, 1120, M, scale_exponents=(-6, 6))
    assert_close_to_reference(launch(drawn), *drawn)


@gpu
@pytest.mark.parametrize("exponents", RANGES)
def test_scales_of_the_whole_e8m0_range_are_exact(exponents: tuple[int, int]) -> None:
    assert_right(exact, of_scales(CASES[2:7], exponents))


@gpu
def test_extreme_scales_that_cancel_are_exact() -> None:
    trials = of_cancelling_scales([(9, 140, 416, {})], (110, -110))
    assert_right(exact, trials)


@gpu
def test_nan_payloads_and_scales_reach_their_outputs_alone() -> None:
    assert_right(exact, of_nan(CASES[2:8]))


@gpu
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_outputs_and_biases_of_every_dtype_match_float64(dtype: torch.dtype) -> None:
    assert_outputs_and_biases_right(launch, dtype, [None])


@gpu
@pytest.mark.parametrize("M", [8, 64])
def test_results_are_bitwise_equal_over_launches_on_two_streams(M: int) -> None:
    assert_repeats_on_two_streams(MFMA, LinearProblem(M, 2304, 6144))
