"""Subjects on Hopper that multiply by mma: ``mma_registers`` and ``mma_ring``."""

from __future__ import annotations

from aiter_mx.kernels.linear import mma_registers_sm90, mma_ring_sm90
from op_tests.conformance import alone, named
from op_tests.linear.subjects.subject import Case, Subject

_mma_registers = named("rows", "waves", "unroll", "split")

# Between them: rows that fill no tile, one and several tiles, K that ends within a chunk and within
# a step, rounds with and without all of their chunks, waves without a chunk; clusters whose parts
# of K are alike, differ, and are none, and that have more and fewer workgroups than tiles.
MMA_REGISTERS_CASES = [
    Case(1, 64, 64, _mma_registers(16, 4, 1, 1)),
    Case(2, 3, 32, _mma_registers(8, 1, 1, 1)),
    Case(3, 100, 416, _mma_registers(12, 4, 2, 1)),
    Case(4, 5000, 1536, _mma_registers(47, 12, 1, 1)),
    Case(1, 70, 1056, _mma_registers(3, 2, 3, 1)),
    Case(4, 2304, 6144, _mma_registers(18, 16, 3, 1)),
    Case(3, 130, 2080, _mma_registers(24, 4, 2, 1)),
    Case(2, 777, 2048, _mma_registers(16, 8, 2, 1)),
    Case(4, 300, 1152, _mma_registers(9, 3, 1, 1)),
    Case(4, 33, 6144, _mma_registers(32, 4, 2, 1)),
    Case(2, 1000, 1920, _mma_registers(40, 6, 1, 1)),
    Case(4, 300, 1536, _mma_registers(16, 3, 1, 4)),
    Case(3, 70, 1056, _mma_registers(24, 2, 1, 2)),
    Case(2, 33, 640, _mma_registers(12, 1, 1, 8)),
    Case(4, 2304, 6144, _mma_registers(40, 6, 1, 4)),
    Case(1, 777, 2208, _mma_registers(48, 3, 2, 4)),
    # and of more rows of x, which another kind of product has
    Case(8, 64, 64, _mma_registers(16, 4, 1, 1)),
    Case(5, 3, 32, _mma_registers(8, 1, 1, 1)),
    Case(7, 100, 416, _mma_registers(12, 4, 2, 1)),
    Case(8, 5000, 1536, _mma_registers(47, 12, 1, 1)),
    Case(6, 70, 1056, _mma_registers(3, 2, 3, 1)),
    Case(8, 2304, 6144, _mma_registers(18, 16, 3, 1)),
    Case(7, 131, 2080, _mma_registers(24, 4, 2, 1)),
    Case(8, 300, 1536, _mma_registers(16, 3, 1, 4)),
    Case(7, 70, 1056, _mma_registers(24, 2, 1, 2)),
    Case(5, 33, 640, _mma_registers(12, 1, 1, 8)),
    Case(8, 2304, 6144, _mma_registers(40, 3, 1, 8)),
    Case(6, 777, 2208, _mma_registers(48, 3, 2, 4)),
    Case(8, 9216, 6144, _mma_registers(24, 3, 1, 2)),
    # and of more, a second tile of 8
    Case(16, 64, 64, _mma_registers(16, 4, 1, 1)),
    Case(9, 3, 32, _mma_registers(8, 1, 1, 1)),
    Case(11, 100, 416, _mma_registers(12, 4, 2, 1)),
    Case(16, 5000, 1536, _mma_registers(47, 12, 1, 1)),
    Case(10, 70, 1056, _mma_registers(3, 2, 3, 1)),
    Case(15, 131, 2080, _mma_registers(24, 4, 2, 1)),
    Case(16, 300, 1536, _mma_registers(16, 3, 1, 4)),
    Case(13, 70, 1056, _mma_registers(24, 2, 1, 2)),
    Case(12, 33, 640, _mma_registers(12, 1, 1, 8)),
    Case(16, 2304, 6144, _mma_registers(40, 3, 1, 8)),
    Case(14, 777, 2208, _mma_registers(48, 3, 2, 4)),
    Case(16, 777, 2176, _mma_registers(24, 2, 0, 2)),
    Case(10, 70, 3072, _mma_registers(40, 2, 0, 8)),
    Case(9, 100, 416, _mma_registers(12, 2, 0, 1)),
    # and chunks that are each asked for while the one before is used, or not, as K ends within one
    Case(4, 300, 1536, _mma_registers(16, 3, 0, 1)),
    Case(8, 2304, 6144, _mma_registers(32, 3, 0, 4)),
    Case(7, 777, 2176, _mma_registers(24, 2, 0, 2)),
    Case(3, 70, 3072, _mma_registers(40, 2, 0, 8)),
    Case(5, 100, 416, _mma_registers(12, 2, 0, 1)),
]

MMA_REGISTERS = Subject(
    "mma_registers",
    ("sm_90a",),
    alone(MMA_REGISTERS_CASES),
    few=MMA_REGISTERS_CASES[1:],
    most_rows=mma_registers_sm90.MAX_M,
    with_bias=[Case(M, 137, 1120, _mma_registers(16, 4, 2, 1)) for M in (3, 7, 13)],
    repeats=[(M, 2304, 6144, None) for M in (2, 4, 8, 16)],
    chained=(2, 4, 8, 16),
    beyond_4_gib=[(M, 6240) for M in (4, 8, 16)],
)

_mma_ring = named("split", "row_tiles", "row_warps", "k_warps", "depth", "per_sm")

# Between them: no cluster, clusters of several sizes, parts of K without a chunk, K that ends
# within a chunk, scales at odd addresses, several passes, sums exchanged in turns, rings longer
# than K, warps without rows.
MMA_RING_CASES = [
    Case(1, 64, 64, _mma_ring(1, 1, 1, 4, 2, 1)),
    Case(2, 3, 32, _mma_ring(4, 1, 1, 4, 1, 1)),
    Case(5, 100, 416, _mma_ring(2, 2, 1, 4, 2, 1)),
    Case(8, 9000, 1024, _mma_ring(2, 3, 1, 4, 2, 1)),
    Case(16, 70, 1056, _mma_ring(4, 3, 1, 2, 2, 2)),
    Case(17, 130, 2080, _mma_ring(2, 2, 2, 4, 2, 1)),
    Case(24, 3000, 2880, _mma_ring(2, 2, 1, 6, 2, 1)),
    Case(31, 7, 3104, _mma_ring(8, 1, 1, 4, 2, 1)),
    Case(33, 640, 1536, _mma_ring(4, 2, 2, 4, 2, 1)),
    Case(48, 9000, 1056, _mma_ring(4, 1, 3, 1, 2, 2)),
    Case(64, 200, 6144, _mma_ring(8, 3, 2, 4, 1, 1)),
    Case(64, 5000, 6144, _mma_ring(8, 4, 3, 1, 1, 1)),
    Case(64, 5000, 6144, _mma_ring(8, 2, 2, 3, 1, 1)),
    Case(64, 130, 28672, _mma_ring(2, 1, 1, 4, 2, 1)),
    Case(64, 20000, 512, _mma_ring(2, 2, 1, 4, 2, 1)),
]

MMA_RING = Subject(
    "mma_ring",
    ("sm_90a",),
    alone(MMA_RING_CASES),
    few=MMA_RING_CASES[2:12],
    most_rows=mma_ring_sm90.MAX_M,
    with_bias=[Case(19, 137, 1120, _mma_ring(2, 2, 1, 4, 2, 1))],
    repeats=[(M, 2304, 6144, None) for M in (8, 32)],
    chained=(8,),
    beyond_4_gib=[(8, 6240)],
)
