"""Subjects on Hopper whose wgmma multiplies e4m3: ``wgmma_fp8`` and ``wgmma_fp8_tiled``."""

from __future__ import annotations

from aiter_mx.kernels.linear import wgmma_fp8_sm90, wgmma_fp8_tiled_sm90
from op_tests.conformance import alone, named
from op_tests.linear.subjects.subject import Subject, cases

_FP8 = ("split", "row_groups", "k_groups", "depth", "per_sm")
_wgmma_fp8 = named(*_FP8)

# Between them: x or w as wgmma's A, no cluster, clusters of several sizes, parts of K that differ,
# tiles of few rows and of an odd number of eights, chunks that no warpgroup's turn divides, an odd
# number of them, warps without rows, chunks that wait to be asked for, more of them than there are,
# stages that are used again, several workgroups on an SM, of which some own no sums, and K that
# ends within a chunk after one, two and three blocks, within the first one too.
WGMMA_FP8_CASES = cases(
    _FP8,
    """
      1   64  128  1 1 1 4 1
      2    3  512  1 1 1 4 1
      5 2000  896  2 1 3 2 1
     16  900 1152  8 1 1 4 1
     17 2304 1664  4 2 1 6 1
     31  777 3200  1 1 2 3 1
     32 2300 6144  8 3 1 6 1
     33 5001 1536  2 2 1 6 1
     40 1536 1280  5 2 2 4 1
     47 6144  768  1 1 4 2 1
     48 1990 2304  6 2 1 12 1
     49 1536 1280  5 1 2 4 1
     57 1001 3072  7 1 3 2 1
     63 3001 1152  3 4 1 3 1
     64 1536 6144  8 2 1 3 1
     64  300 2048  1 1 2 8 1
     64 6144 1536  2 2 1 4 1
     64 6144 2048  1 1 3 6 1
     50 5000 2688  1 1 2 8 1
     32 9216 6144  2 3 1 4 1
     20 8000 3200  1 1 3 12 1
    # More rows of x than a warpgroup has: w is A, then x of two of them.
     65 2304 6144  3 1 2 4 1
     79  777 1152  4 1 1 3 1
     80 9216 1536  2 3 1 3 1
     95 6144 2048  1 1 2 4 1
     97 1999  896  2 2 1 3 1
    113 2304 6144  4 4 1 3 1
    127 1501 2048  4 2 1 3 1
    128 6144 2048  1 2 2 4 1
    # Several on an SM.
      1 1536 6144  8 1 1 6 2
      3 1537 6144  8 1 2 4 2
      7 2301 4096  8 1 1 3 3
      8 1535 6144  8 1 2 6 3
     12 1536 5120  4 1 3 12 2
     13 1285 1152  8 1 1 2 3
     16 1536 6144  4 1 2 12 2
     30 2879 2048  4 2 1 4 2
     48  777 1664  3 1 1 4 2
    # K that is no multiple of 128.
      1   64   96  1 1 1 4 1
      9  130  160  1 1 2 4 1
     31 1280 2880  4 1 2 6 1
     33 2880 4096  2 1 2 6 1
     40  600 7392  8 1 1 4 1
     64 1280 2880  4 1 1 6 1
     57 1999 2368  2 1 2 6 1
     79  777 1120  4 1 1 3 1
    128 1280 2880  4 2 1 4 1
    101  300 2368  2 2 1 3 1
     16 1279 2880  8 1 1 3 2
    """,
)
# Of few rows, for what eight SMs would take.
WGMMA_FP8_SMALL = cases(
    _FP8,
    """
      1  64  128  1 1 1 4 1
     13 300  896  1 1 3 2 1
     11 290  736  2 1 1 3 1
     17 300 1664  2 2 1 6 1
     31 290 2176  1 1 4 3 1
     32 250  768  4 4 1 2 1
     40 290 1280  1 1 2 4 1
     48 300 1536  2 2 2 3 1
     49 299 1152  1 1 2 8 1
     57 240  896  4 3 1 2 1
     64 300 1664  2 2 1 4 1
     60 320 4096  1 1 3 4 1
     63 299 1120  1 1 2 4 1
     63 300 1088  1 1 2 4 1
     30 500 4224  1 1 2 6 1
     70 300 1152  1 1 2 4 1
     90 290 1664  2 2 1 3 1
     99 250 1152  2 2 1 4 1
    128 300 2048  2 4 1 3 1
    127 299 1184  2 2 1 3 1
    122 299 1536  1 2 2 4 1
      5  60 1152  8 1 1 2 2
     12 100  896  4 1 1 2 2
    """,
    cu_num=8,
)
# Of so many rows of w that eight SMs take them in passes.
WGMMA_FP8_PASSES = cases(
    _FP8,
    """
      9 17001 256  1 2 1 2 1
     33 16900 384  2 3 1 4 1
     64 20003 512  1 2 1 3 1
     61 18000 256  2 2 1 4 1
    100 17003 256  1 2 1 2 1
    """,
    cu_num=8,
)
_WGMMA_FP8_OWN = cases(
    (),
    """
     17 1537 6144
     33 6143 1536
     47 2304 6144
     63 6144 2048
     64 1535 6144
     65 6143 2048
     90 1537 6144
    128 9215 1536
    """,
)

WGMMA_FP8 = Subject(
    "wgmma_fp8",
    ("sm_90a",),
    alone([*WGMMA_FP8_CASES, *WGMMA_FP8_PASSES, *_WGMMA_FP8_OWN]),
    few=WGMMA_FP8_SMALL,
    most_rows=wgmma_fp8_sm90.MAX_M,
    dtypes=("bf16", "fp16"),
    width=(1370, 1152),
    with_bias=cases(
        _FP8,
        """
        19,61 1371,1376 1152  2 1 2 4 1
        9,40,64,85,111 1371 1152
        30,61,90 1376 1152  1 1 1 4 1
        """,
    ),
    accumulation_error=wgmma_fp8_sm90.ACCUMULATION_ERROR,
    repeats=[
        *((M, *w, None) for M in (32, 64, 80, 128) for w in ((2304, 6144), (6144, 1536))),
        *((M, 1536, 6144, _wgmma_fp8(8, 1, k_groups, 6, 2)) for M in (1, 8) for k_groups in (1, 2)),
    ],
    chained=(8, 32, 64, 128),
    chained_in=[(1, _wgmma_fp8(8, 1, 1, 2, 2)), (8, _wgmma_fp8(4, 1, 1, 3, 3))],
)

_FP8_TILED = ("tile_m", "tile_n", "row_groups", "k_groups", "split")

# Between them: tiles of every size, one of tokens and many, the last one of one token, features
# that no tile divides, whole eights of them and odd ones, clusters of every size and none, parts of
# K that differ, warps that keep tiles of sums and that do not, stages that are used again, and K
# that ends within a chunk.
WGMMA_FP8_TILED_CASES = cases(
    _FP8_TILED,
    """
      65   64  128   64  64 1 1 1
     129 2304 6144   64 128 2 1 2
     130  777 1152   64  96 1 2 1
     191 1001  896   64 120 3 1 3
     200  300 1664   64  64 1 2 4
     255 3072 1536   64 192 2 1 1
     257 1990 2304   64 160 2 1 2
     320  768 3584   64  64 1 2 2
     449  516  640   64 144 3 1 1
     511  136 1280   64  96 1 1 1
     640 1280 2944   64 120 3 1 1
    1000  700  512   64 128 2 1 1
    1537  264 1152   64  64 1 1 2
    2049   64  384   64 192 2 1 3
      65   72   32   64  64 1 1 1
     129  515 2368   64 160 2 1 1
     193 1280 2880   64  96 1 2 2
     257 1001 7392   64  64 1 2 3
     384 2880 1120   64 120 3 1 1
     320 1302 2048   64 216 3 1 2
     257  733 2880   64 240 3 1 1
    # Two warpgroups along tokens.
     129  300 1152  128  40 2 1 1
     200 1371 2048  128  64 2 1 2
     321 4096  512  128  88 2 1 1
     512  516 2368  128  96 2 1 3
    # w as wgmma's A.
      65   64  256   72  64 1 2 1
     129 1371 2944   72 192 3 1 2
     145 2560 2880   72 128 2 1 1
     257 2564 2048   88  64 1 2 1
     176 1001 1120   88 128 2 1 3
     193  516 1664   96 128 2 1 2
     300  136  512   96  64 1 2 2
     209 4096 3072  104  64 1 2 1
     416  777 1152  104 128 2 1 4
     312 1302 2368  104  64 1 2 2
     209  300   96  104 128 2 1 1
    """,
)
WGMMA_FP8_TILED_SMALL = cases(
    _FP8_TILED,
    """
     129  300 1152   64  64 1 2 1
     150  250 1152   64 120 3 1 2
     200  190  896   64 128 2 1 1
     300  130 2048   64  64 1 2 4
     131  131  992   64  96 1 2 2
     193  130 1056   64 144 3 1 1
     257  250 1088   64 240 3 1 1
     140  131 1120  128  72 2 1 2
     257  130  768  128  96 2 1 1
     147  131 1152   72  64 1 2 2
     193  250  992   96 128 2 1 1
    """,
    cu_num=8,
)

WGMMA_FP8_TILED = Subject(
    "wgmma_fp8_tiled",
    ("sm_90a",),
    alone([*WGMMA_FP8_TILED_CASES, *cases((), "129 1537 6144\n 320 4096 512\n 900 383 3072")]),
    few=WGMMA_FP8_TILED_SMALL,
    least_rows=wgmma_fp8_tiled_sm90.MIN_M,
    most_rows=290,
    dtypes=("bf16", "fp16"),
    width=(130, 1152),
    with_bias=cases(
        _FP8_TILED,
        """
        140 1371,1376 1152   64  96 1 2 1
         83 1371,1376 1152   64 120 3 1 1
        150 1371,1376 1120  128  72 2 1 1
        150 1371,1376 1152   88 128 2 1 1
        """,
    ),
    accumulation_error=wgmma_fp8_sm90.ACCUMULATION_ERROR,
    repeats=[(M, 2304, 3072, None) for M in (129, 320)],
    chained=(129, 320),
)
