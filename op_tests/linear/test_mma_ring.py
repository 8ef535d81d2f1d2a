"""What the host does for Hopper's ``mma_ring`` kernel of the linear."""

from __future__ import annotations

import pytest

from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.linear.mma_ring_sm90 import MAX_M, layout
from aiter_mx.kernels.registry import find_kernel
from aiter_mx.target import hardware
from op_tests.linear.subjects.mma_sm90 import MMA_RING_CASES as CASES

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
    for M, N, K, chosen, *_ in CASES:
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
