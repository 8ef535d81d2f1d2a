"""Subjects on Hopper that multiply by wgmma: ``wgmma_fp8``, ``wgmma_bf16`` and ``wide``."""

from __future__ import annotations

from aiter_mx.kernels.linear import wgmma_fp8_sm90
from op_tests.conformance import alone, named
from op_tests.linear.subjects.subject import Case, Subject

_wgmma_fp8 = named("split", "row_groups", "k_groups", "depth")

# Between them: x or w as wgmma's A, no cluster, clusters of several sizes, parts of K that differ,
# tiles of few rows and of an odd number of eights, chunks that no warpgroup's turn divides, an odd
# number of them, warps without rows, chunks that wait to be asked for, more of them than there are,
# and stages that are used again.
WGMMA_FP8_CASES = [
    Case(1, 64, 128, _wgmma_fp8(1, 1, 1, 4)),
    Case(2, 3, 512, _wgmma_fp8(1, 1, 1, 4)),
    Case(5, 2000, 896, _wgmma_fp8(2, 1, 3, 2)),
    Case(16, 900, 1152, _wgmma_fp8(8, 1, 1, 4)),
    Case(17, 2304, 1664, _wgmma_fp8(4, 2, 1, 6)),
    Case(31, 777, 3200, _wgmma_fp8(1, 1, 2, 3)),
    Case(32, 2300, 6144, _wgmma_fp8(8, 3, 1, 6)),
    Case(33, 5001, 1536, _wgmma_fp8(2, 2, 1, 6)),
    Case(40, 1536, 1280, _wgmma_fp8(5, 2, 2, 4)),
    Case(47, 6144, 768, _wgmma_fp8(1, 1, 4, 2)),
    Case(48, 1990, 2304, _wgmma_fp8(6, 2, 1, 12)),
    Case(49, 1536, 1280, _wgmma_fp8(5, 1, 2, 4)),
    Case(57, 1001, 3072, _wgmma_fp8(7, 1, 3, 2)),
    Case(63, 3001, 1152, _wgmma_fp8(3, 4, 1, 3)),
    Case(64, 1536, 6144, _wgmma_fp8(8, 2, 1, 3)),
    Case(64, 300, 2048, _wgmma_fp8(1, 1, 2, 8)),
    Case(64, 6144, 1536, _wgmma_fp8(2, 2, 1, 4)),
    Case(64, 6144, 2048, _wgmma_fp8(1, 1, 3, 6)),
    Case(50, 5000, 2688, _wgmma_fp8(1, 1, 2, 8)),
    Case(32, 9216, 6144, _wgmma_fp8(2, 3, 1, 4)),
    Case(20, 8000, 3200, _wgmma_fp8(1, 1, 3, 12)),
    # More rows of x than a warpgroup has: w is A, then x of two of them.
    Case(65, 2304, 6144, _wgmma_fp8(3, 1, 2, 4)),
    Case(79, 777, 1152, _wgmma_fp8(4, 1, 1, 3)),
    Case(80, 9216, 1536, _wgmma_fp8(2, 3, 1, 3)),
    Case(95, 6144, 2048, _wgmma_fp8(1, 1, 2, 4)),
    Case(97, 1999, 896, _wgmma_fp8(2, 2, 1, 3)),
    Case(113, 2304, 6144, _wgmma_fp8(4, 4, 1, 3)),
    Case(127, 1501, 2048, _wgmma_fp8(4, 2, 1, 3)),
    Case(128, 6144, 2048, _wgmma_fp8(1, 2, 2, 4)),
    # Three and four warpgroups along x.
    Case(129, 777, 1152, _wgmma_fp8(4, 3, 1, 2)),
    Case(160, 2304, 6144, _wgmma_fp8(4, 3, 1, 3)),
    Case(191, 6144, 2048, _wgmma_fp8(1, 3, 1, 3)),
    Case(193, 641, 1280, _wgmma_fp8(4, 4, 1, 2)),
    Case(255, 896, 5120, _wgmma_fp8(4, 4, 1, 2)),
]
# Of few rows, for what eight SMs would take.
WGMMA_FP8_SMALL = [
    Case(1, 64, 128, _wgmma_fp8(1, 1, 1, 4), 8),
    Case(13, 300, 896, _wgmma_fp8(1, 1, 3, 2), 8),
    Case(17, 300, 1664, _wgmma_fp8(2, 2, 1, 6), 8),
    Case(31, 290, 2176, _wgmma_fp8(1, 1, 4, 3), 8),
    Case(32, 250, 768, _wgmma_fp8(4, 4, 1, 2), 8),
    Case(40, 290, 1280, _wgmma_fp8(1, 1, 2, 4), 8),
    Case(48, 300, 1536, _wgmma_fp8(2, 2, 2, 3), 8),
    Case(49, 299, 1152, _wgmma_fp8(1, 1, 2, 8), 8),
    Case(57, 240, 896, _wgmma_fp8(4, 3, 1, 2), 8),
    Case(64, 300, 1664, _wgmma_fp8(2, 2, 1, 4), 8),
    Case(60, 320, 4096, _wgmma_fp8(1, 1, 3, 4), 8),
    Case(30, 500, 4224, _wgmma_fp8(1, 1, 2, 6), 8),
    Case(70, 300, 1152, _wgmma_fp8(1, 1, 2, 4), 8),
    Case(90, 290, 1664, _wgmma_fp8(2, 2, 1, 3), 8),
    Case(99, 250, 1152, _wgmma_fp8(2, 2, 1, 4), 8),
    Case(128, 300, 2048, _wgmma_fp8(2, 4, 1, 3), 8),
    Case(122, 299, 1536, _wgmma_fp8(1, 2, 2, 4), 8),
    Case(150, 250, 1152, _wgmma_fp8(2, 3, 1, 2), 8),
    Case(240, 190, 896, _wgmma_fp8(2, 4, 1, 2), 8),
]
# Of so many rows of w that eight SMs take them in passes.
WGMMA_FP8_PASSES = [
    Case(9, 17001, 256, _wgmma_fp8(1, 2, 1, 2), 8),
    Case(33, 16900, 384, _wgmma_fp8(2, 3, 1, 4), 8),
    Case(64, 20003, 512, _wgmma_fp8(1, 2, 1, 3), 8),
    Case(61, 18000, 256, _wgmma_fp8(2, 2, 1, 4), 8),
    Case(100, 17003, 256, _wgmma_fp8(1, 2, 1, 2), 8),
]
_WGMMA_FP8_OWN = [
    *(Case(17, 1537, 6144, None), Case(33, 6143, 1536, None), Case(47, 2304, 6144, None)),
    *(Case(63, 6144, 2048, None), Case(64, 1535, 6144, None)),
    *(Case(65, 6143, 2048, None), Case(90, 1537, 6144, None), Case(128, 9215, 1536, None)),
    *(Case(150, 1537, 6144, None), Case(256, 383, 6144, None)),
]

WGMMA_FP8 = Subject(
    "wgmma_fp8",
    ("sm_90a",),
    alone([*WGMMA_FP8_CASES, *WGMMA_FP8_PASSES, *_WGMMA_FP8_OWN]),
    few=WGMMA_FP8_SMALL,
    most_rows=wgmma_fp8_sm90.MAX_M,
    dtypes=("bf16", "fp16"),
    width=(1370, 1152),
    with_bias=[
        *(Case(M, N, 1152, _wgmma_fp8(2, 1, 2, 4)) for M in (19, 61) for N in (1370, 1371)),
        *(Case(M, 1371, 1152, None) for M in (9, 40, 64, 85, 111)),
    ],
    accumulation_error=wgmma_fp8_sm90.ACCUMULATION_ERROR,
    repeats=[(M, N, K, None) for M in (32, 64, 80, 128) for N, K in ((2304, 6144), (6144, 1536))],
    chained=(8, 32, 64, 128),
)

_wgmma_bf16 = named("tile_m", "tile_n", "split", "pairs")

# Between them: tiles of every size, several tiles of tokens, the last one of one token, clusters
# of every size, parts of K that differ and of one chunk, K that ends within a chunk and within
# 64 k, features that no tile divides, and odd ones.
_WGMMA_BF16_SPLITS = [
    Case(65, 64, 128, _wgmma_bf16(96, 64, 1, 0)),
    Case(65, 2304, 6144, _wgmma_bf16(96, 128, 6, 0)),
    Case(70, 777, 2880, _wgmma_bf16(96, 192, 4, 0)),
    Case(81, 300, 160, _wgmma_bf16(96, 64, 2, 0)),
    Case(96, 1001, 736, _wgmma_bf16(96, 128, 3, 0)),
    Case(97, 1536, 3200, _wgmma_bf16(128, 192, 8, 0)),
    Case(128, 2000, 896, _wgmma_bf16(128, 64, 6, 0)),
    Case(129, 515, 2368, _wgmma_bf16(128, 192, 4, 0)),
    Case(144, 6144, 1536, _wgmma_bf16(160, 128, 2, 0)),
    Case(191, 322, 1056, _wgmma_bf16(96, 64, 1, 0)),
    Case(193, 1990, 2304, _wgmma_bf16(256, 128, 8, 0)),
    Case(200, 130, 7392, _wgmma_bf16(192, 64, 8, 0)),
    Case(255, 1371, 1152, _wgmma_bf16(256, 128, 4, 0)),
    Case(256, 640, 4096, _wgmma_bf16(256, 64, 3, 0)),
    Case(257, 1000, 512, _wgmma_bf16(256, 128, 1, 0)),
    Case(511, 900, 384, _wgmma_bf16(160, 64, 3, 0)),
    Case(1000, 700, 544, _wgmma_bf16(192, 128, 2, 0)),
]
# As many tiles as pairs, fewer, more and many more; pairs that share one tile, that end within it
# and begin another, that have one chunk, and whose second CTA has no features.
_WGMMA_BF16_PAIRS = [
    Case(65, 2304, 6144, _wgmma_bf16(96, 128, 1, 66)),
    Case(81, 300, 160, _wgmma_bf16(96, 64, 1, 6)),
    Case(97, 1536, 3200, _wgmma_bf16(128, 64, 1, 65)),
    Case(129, 515, 2368, _wgmma_bf16(128, 128, 1, 57)),
    Case(144, 6144, 1536, _wgmma_bf16(160, 128, 1, 64)),
    Case(191, 322, 1056, _wgmma_bf16(96, 64, 1, 5)),
    Case(193, 1990, 2304, _wgmma_bf16(256, 128, 1, 8)),
    Case(200, 130, 7392, _wgmma_bf16(192, 64, 1, 66)),
    Case(256, 640, 4096, _wgmma_bf16(256, 64, 1, 2)),
    Case(257, 1000, 512, _wgmma_bf16(256, 128, 1, 1)),
    Case(511, 900, 384, _wgmma_bf16(160, 64, 1, 13)),
    Case(1000, 700, 544, _wgmma_bf16(192, 128, 1, 7)),
    Case(600, 3000, 1184, _wgmma_bf16(128, 64, 1, 50)),
]
WGMMA_BF16_CASES = [*_WGMMA_BF16_SPLITS, *_WGMMA_BF16_PAIRS]
WGMMA_BF16_SMALL = [
    Case(65, 64, 128, _wgmma_bf16(96, 64, 1, 0), 8),
    Case(70, 300, 1120, _wgmma_bf16(96, 192, 4, 0), 8),
    Case(97, 300, 992, _wgmma_bf16(128, 128, 6, 0), 8),
    Case(129, 290, 1152, _wgmma_bf16(128, 64, 3, 0), 8),
    Case(255, 131, 608, _wgmma_bf16(256, 64, 1, 0), 8),
    Case(70, 300, 1120, _wgmma_bf16(96, 128, 1, 4), 8),
    Case(129, 290, 1152, _wgmma_bf16(128, 64, 1, 3), 8),
    Case(161, 250, 736, _wgmma_bf16(160, 128, 1, 2), 8),
    Case(200, 299, 2048, _wgmma_bf16(192, 128, 1, 4), 8),
    Case(255, 131, 608, _wgmma_bf16(256, 64, 1, 1), 8),
]
_WGMMA_BF16_OWN = [
    *(Case(65, 1537, 6144, None), Case(127, 2304, 6144, None), Case(600, 6143, 1536, None))
]

WGMMA_BF16 = Subject(
    "wgmma_bf16",
    ("sm_90a",),
    alone([*WGMMA_BF16_CASES, *_WGMMA_BF16_OWN]),
    few=WGMMA_BF16_SMALL,
    least_rows=65,
    most_rows=290,
    dtypes=("bf16", "fp32", "fp16"),
    with_bias=[
        Case(83, 137, 1120, _wgmma_bf16(96, 128, 3, 0)),
        Case(83, 137, 1120, _wgmma_bf16(128, 64, 1, 3)),
        Case(83, 1372, 1152, _wgmma_bf16(96, 128, 1, 9)),
    ],
    repeats=[(M, 2304, 6144, None) for M in (65, 200, 512, 2048)],
    chained=(65, 200),
    beyond_4_gib=[(65, 6176)],
)

_wide = named("split", "rows", "depth")

# Between them: no cluster, clusters of several sizes, parts of K without a chunk, parts of unequal
# length, K that ends within a chunk, more scales of a row than a lane has words, warps without
# rows, several passes, fewer rows than a pass, a ring of one stage, rings longer than a part, one
# as long as five passes, and parts of x that come in two and in four batches.
_WIDE_CASES = [
    Case(1, 64, 64, _wide(1, 64, 2)),
    Case(2, 3, 32, _wide(4, 32, 1)),
    Case(5, 100, 416, _wide(2, 48, 2)),
    Case(8, 4000, 1024, _wide(7, 208, 3)),
    Case(16, 70, 1056, _wide(4, 64, 4)),
    Case(17, 130, 2080, _wide(3, 96, 3)),
    Case(24, 700, 2880, _wide(2, 112, 4)),
    Case(31, 7, 3104, _wide(5, 32, 3)),
    Case(33, 640, 1536, _wide(4, 160, 1)),
    Case(40, 7000, 512, _wide(1, 48, 6)),
    Case(48, 3000, 1056, _wide(8, 176, 2)),
    Case(64, 200, 6144, _wide(6, 128, 2)),
    Case(64, 1700, 6144, _wide(8, 96, 4)),
    Case(64, 6000, 1024, _wide(2, 64, 3)),
    Case(8, 130, 16384, _wide(8, 32, 4)),
    Case(11, 130, 2048, _wide(1, 80, 8)),
    Case(33, 9000, 512, _wide(4, 64, 5)),
    Case(48, 150, 6144, _wide(4, 160, 1)),
    Case(64, 130, 12288, _wide(8, 32, 1)),
    Case(64, 5000, 4096, _wide(8, 112, 3)),
    Case(57, 9100, 2048, _wide(4, 96, 4)),
]
# Several passes, two to four, from one to the next of which the loop runs on.
WIDE_RUNNING_ON = [
    Case(64, 6000, 6144, _wide(8, 112, 3)),
    Case(57, 9100, 2560, _wide(4, 96, 4)),
    Case(40, 2450, 5120, _wide(8, 80, 4)),
    Case(64, 2100, 5120, _wide(8, 128, 5)),
]

WIDE = Subject(
    "wide",
    ("sm_90a",),
    alone([*_WIDE_CASES, *WIDE_RUNNING_ON]),
    few=_WIDE_CASES[1:12],
    most_rows=64,
    of_rows=lambda M: _wide(3, 48, 2),
    with_bias=[Case(19, 137, 1120, _wide(2, 64, 2)), Case(19, 137, 1120, _wide(1, 80, 2))],
    repeats=[(M, N, 6144, None) for M, N in ((8, 2304), (64, 2304), (64, 3072), (64, 9216))],
    beyond_4_gib=[(40, 6240)],
)
