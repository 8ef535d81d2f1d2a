"""Hopper's ``mma_ring`` kernel of the linear: its host side here, its results with ``-m gpu``."""

from __future__ import annotations

import pytest
import torch

from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.linear.gemv import GEMV
from aiter_mx.kernels.linear.mma_ring_sm90 import MAX_M, layout
from aiter_mx.kernels.registry import find_kernel
from aiter_mx.kernels.spec import KernelSpec
from aiter_mx.target import hardware
from op_tests.linear.cases import (
    DTYPES,
    Operands,
    assert_repeats_on_two_streams,
    chain_of_layers,
    launch_beyond_4_gib,
    launch_linear,
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

MMA_RING = find_kernel("linear", "sm_90a", "hip", "mma_ring")
TARGET = hardware("sm_90a")
gpu = pytest.mark.gpu


def config(
    split: int, row_tiles: int, row_warps: int, k_warps: int, depth: int, per_sm: int = 1
) -> dict[str, int]:
    return {
        "split": split,
        "row_tiles": row_tiles,
        "row_warps": row_warps,
        "k_warps": k_warps,
        "depth": depth,
        "per_sm": per_sm,
    }


# Between them: no cluster, clusters of several sizes, parts of K without a chunk, K that ends
# within a chunk, scales at odd addresses, several passes, sums exchanged in turns, rings longer
# than K, warps without rows.
CASES = [
    (1, 64, 64, config(1, 1, 1, 4, 2)),
    (2, 3, 32, config(4, 1, 1, 4, 1)),
    (5, 100, 416, config(2, 2, 1, 4, 2)),
    (8, 9000, 1024, config(2, 3, 1, 4, 2)),
    (16, 70, 1056, config(4, 3, 1, 2, 2, 2)),
    (17, 130, 2080, config(2, 2, 2, 4, 2)),
    (24, 3000, 2880, config(2, 2, 1, 6, 2)),
    (31, 7, 3104, config(8, 1, 1, 4, 2)),
    (33, 640, 1536, config(4, 2, 2, 4, 2)),
    (48, 9000, 1056, config(4, 1, 3, 1, 2, 2)),
    (64, 200, 6144, config(8, 3, 2, 4, 1)),
    (64, 5000, 6144, config(8, 4, 3, 1, 1)),
    (64, 5000, 6144, config(8, 2, 2, 3, 1)),
    (64, 130, 28672, config(2, 1, 1, 4, 2)),
    (64, 20000, 512, config(2, 2, 1, 4, 2)),
]


@pytest.mark.parametrize("M", [1, 8, 9, 17, 33, 64])
@pytest.mark.parametrize(("N", "K"), [(1, 32), (300, 96), (2304, 6144), (9216, 28672), (70, 65568)])
def test_the_chosen_configuration_is_legal_and_fits(M: int, N: int, K: int) -> None:
    problem = LinearProblem(M, N, K)
    candidates = MMA_RING.candidates(TARGET, problem)
    assert MMA_RING.configure(TARGET, problem) == candidates[0]
    for chosen in candidates:
        MMA_RING.check_config(chosen)
        found = layout(TARGET, problem, chosen)
        assert found is not None
        assert found.shared_bytes * chosen["per_sm"] <= 227 * 1024
        assert found.clusters <= N


def test_rows_and_chunks_are_dealt_out_evenly_and_whole() -> None:
    assert MMA_RING.module is not None
    for M, N, K, chosen in CASES:
        problem = LinearProblem(M, N, K)
        found = layout(TARGET, problem, chosen)
        scalars = MMA_RING.module.scalars(TARGET, problem, chosen)
        _, _, _, _, rows, rows_more, chunks, chunks_more, overlaps = scalars
        assert found is not None and not overlaps
        assert found.clusters * rows + rows_more == N
        assert chosen["split"] * chunks + chunks_more == -(-K // 128)
        most_rows = rows + (rows_more > 0)
        assert most_rows <= found.passes * 16 * chosen["row_tiles"] * chosen["row_warps"]


def test_only_the_asked_for_launch_overlaps() -> None:
    assert MMA_RING.module is not None
    chosen = MMA_RING.configure(TARGET, LinearProblem(8, 2304, 6144))
    for pdl in (False, True):
        problem = LinearProblem(8, 2304, 6144, pdl=pdl)
        assert MMA_RING.module.geometry(TARGET, problem, chosen).overlaps is pdl
        assert MMA_RING.module.scalars(TARGET, problem, chosen)[-1] == pdl
        assert MMA_RING.module.defines(TARGET, problem, chosen) == MMA_RING.module.defines(
            TARGET, LinearProblem(8, 2304, 6144), chosen
        )


@pytest.mark.parametrize(
    ("N", "K", "alone", "overlapping"),
    [
        (2304, 6144, config(4, 5, 1, 6, 2), config(4, 3, 1, 6, 2, 2)),
        (6144, 1536, config(1, 3, 1, 6, 2), config(1, 3, 1, 6, 2)),
        (6144, 2048, config(1, 3, 1, 8, 2), config(1, 3, 1, 6, 2)),
        (9216, 6144, config(2, 3, 3, 4, 2), config(2, 3, 3, 4, 2)),
    ],
)
def test_the_default_configurations_are_what_won_on_an_h200(
    N: int, K: int, alone: dict[str, int], overlapping: dict[str, int]
) -> None:
    for M in (2, 8):
        assert MMA_RING.configure(TARGET, LinearProblem(M, N, K)) == alone
        assert MMA_RING.configure(TARGET, LinearProblem(M, N, K, pdl=True)) == overlapping


def test_what_it_does_not_cover_is_refused() -> None:
    assert MMA_RING.refusal(TARGET, LinearProblem(MAX_M, 8, 64)) is None
    assert "above 64" in (MMA_RING.refusal(TARGET, LinearProblem(MAX_M + 1, 8, 64)) or "")
    assert "sm_90a" in (MMA_RING.refusal(hardware("gfx950"), LinearProblem(8, 8, 64)) or "")


def launch(
    arguments: Operands,
    chosen: dict[str, int],
    bias: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    return launch_linear(MMA_RING, torch.device("cuda"), chosen, arguments, bias, dtype)


@gpu
@pytest.mark.parametrize(("M", "N", "K", "chosen"), CASES)
def test_any_shape_and_configuration_match_float64(
    M: int, N: int, K: int, chosen: dict[str, int]
) -> None:
    assert_right(launch, plain(M, N, K, chosen))


@gpu
@pytest.mark.parametrize("exponents", RANGES)
def test_scales_of_the_whole_e8m0_range_are_exact(exponents: tuple[int, int]) -> None:
    assert_right(launch, of_scales(CASES[2:12], exponents))


@gpu
def test_extreme_scales_that_cancel_are_exact() -> None:
    assert_right(launch, of_cancelling_scales(CASES[2:9]))


@gpu
def test_zero_blocks_of_any_scale_add_nothing() -> None:
    assert_right(launch, of_zero_blocks(CASES[2:9]))


@gpu
def test_nan_payloads_and_scales_reach_their_outputs_alone() -> None:
    assert_right(launch, of_nan(CASES[2:11]))


@gpu
def test_scales_at_any_address_are_read_rightly() -> None:
    assert_right(launch, of_moved_scales(CASES[2:9]))


@gpu
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_outputs_and_biases_of_every_dtype_match_float64(dtype: torch.dtype) -> None:
    assert_outputs_and_biases_right(launch, dtype, [config(2, 2, 1, 4, 2)])


@gpu
@pytest.mark.parametrize("M", [8, 40])
def test_weights_beyond_4_gib_are_addressed_rightly(M: int) -> None:
    got, drawn = launch_beyond_4_gib(MMA_RING, M, 6240)
    assert_close_to_reference(got, *drawn)


@gpu
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("M", [8, 32])
def test_results_are_bitwise_equal_over_launches_on_two_streams(M: int, pdl: bool) -> None:
    assert_repeats_on_two_streams(MMA_RING, LinearProblem(M, 2304, 6144, pdl=pdl))


@gpu
@pytest.mark.parametrize(("kernel", "M"), [(GEMV, 1), (MMA_RING, 8)], ids=["gemv", "mma_ring"])
@pytest.mark.parametrize("captured", [False, True])
def test_a_chain_of_overlapping_launches_reads_what_the_one_ahead_wrote(
    captured: bool, kernel: KernelSpec, M: int
) -> None:
    chain = chain_of_layers(kernel, M)
    expected = chain(False)
    if not captured:
        for _ in range(20):
            assert torch.equal(chain(True), expected)
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(True)
    for _ in range(20):
        got.fill_(float("nan"))
        graph.replay()
        assert torch.equal(got, expected)
