"""What the host does for Hopper's ``mma_ring`` kernel of the linear."""

from __future__ import annotations

from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.linear.mma_ring_sm90 import layout
from aiter_mx.kernels.registry import find_kernel
from aiter_mx.target import hardware
from op_tests.linear.subjects.mma_sm90 import MMA_RING_CASES as CASES

MMA_RING = find_kernel("linear", "sm_90a", "hip", "mma_ring")
TARGET = hardware("sm_90a")


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


def test_no_cluster_of_a_candidate_is_without_rows() -> None:
    for N in (1, 70, 300, 2304, 9216):
        problem = LinearProblem(17, N, 6144)
        for chosen in MMA_RING.candidates(TARGET, problem):
            found = layout(TARGET, problem, chosen)
            assert found is not None and found.clusters <= N
