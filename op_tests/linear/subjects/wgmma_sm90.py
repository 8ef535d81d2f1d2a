"""Subjects on Hopper that multiply by wgmma: ``wgmma_fp8``, ``wgmma_bf16`` and ``wgmma_f16``."""

from __future__ import annotations

from aiter_mx.kernels.linear import wgmma_fp8_sm90, wgmma_fp8_tiled_sm90
from op_tests.conformance import alone, named
from op_tests.linear.subjects.subject import Case, Subject, cases

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
    with_bias=[
        *(Case(M, N, 1152, _wgmma_fp8(2, 1, 2, 4, 1)) for M in (19, 61) for N in (1371, 1376)),
        *(Case(M, 1371, 1152, None) for M in (9, 40, 64, 85, 111)),
        *(Case(M, 1376, 1152, _wgmma_fp8(1, 1, 1, 4, 1)) for M in (30, 61, 90)),
    ],
    accumulation_error=wgmma_fp8_sm90.ACCUMULATION_ERROR,
    repeats=[
        *((M, *w, None) for M in (32, 64, 80, 128) for w in ((2304, 6144), (6144, 1536))),
        *((M, 1536, 6144, _wgmma_fp8(8, 1, k_groups, 6, 2)) for M in (1, 8) for k_groups in (1, 2)),
    ],
    chained=(8, 32, 64, 128),
    chained_in=[(1, _wgmma_fp8(8, 1, 1, 2, 2)), (8, _wgmma_fp8(4, 1, 1, 3, 3))],
)

_FP8_TILED = ("tile_m", "tile_n", "row_groups", "k_groups", "split")
_wgmma_fp8_tiled = named(*_FP8_TILED)

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
    # Two warpgroups along tokens.
     129  300 1152  128  40 2 1 1
     200 1371 2048  128  64 2 1 2
     321 4096  512  128  88 2 1 1
     512  516 2368  128  96 2 1 3
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
     140  131 1120  128  72 2 1 2
     257  130  768  128  96 2 1 1
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
    with_bias=[
        *(Case(140, N, 1152, _wgmma_fp8_tiled(64, 96, 1, 2, 1)) for N in (1371, 1376)),
        *(Case(83, N, 1152, _wgmma_fp8_tiled(64, 120, 3, 1, 1)) for N in (1371, 1376)),
        *(Case(150, N, 1120, _wgmma_fp8_tiled(128, 72, 2, 1, 1)) for N in (1371, 1376)),
    ],
    accumulation_error=wgmma_fp8_sm90.ACCUMULATION_ERROR,
    repeats=[(M, 2304, 3072, None) for M in (129, 320)],
    chained=(129, 320),
)

_BF16 = ("tile_m", "tile_n", "split", "pairs")
_wgmma_bf16 = named(*_BF16)

# Between them: tiles of every size, several tiles of tokens, the last one of one token, clusters
# of every size, parts of K that differ and of one chunk, K that ends within a chunk and within
# 64 k, features that no tile divides, and odd ones.
_WGMMA_BF16_SPLITS = cases(
    _BF16,
    """
      17 1001  736  32 64 4 0
      33  777 2880  64 64 2 0
      64 1536 3200  64 128 1 0
      90  300  160  64 64 2 0
      65   64  128  96 64 1 0
      65 2304 6144  96 128 6 0
      70  777 2880  96 192 4 0
      81  300  160  96 64 2 0
      96 1001  736  96 128 3 0
      97 1536 3200  128 192 8 0
     128 2000  896  128 64 6 0
     129  515 2368  128 192 4 0
     144 6144 1536  160 128 2 0
     191  322 1056  96 64 1 0
     193 1990 2304  256 128 8 0
     200  130 7392  192 64 8 0
     255 1371 1152  256 128 4 0
     256  640 4096  256 64 3 0
     257 1000  512  256 128 1 0
     511  900  384  160 64 3 0
    1000  700  544  192 128 2 0
    """,
)
# As many tiles as pairs, fewer, more and many more; pairs that share one tile, that end within it
# and begin another, that have one chunk, and whose second CTA has no features.
_WGMMA_BF16_PAIRS = cases(
    _BF16,
    """
      65 2304 6144  96 128 1 66
      81  300  160  96 64 1 6
      97 1536 3200  128 64 1 65
     129  515 2368  128 128 1 57
     144 6144 1536  160 128 1 64
     191  322 1056  96 64 1 5
     193 1990 2304  256 128 1 8
     200  130 7392  192 64 1 66
     256  640 4096  256 64 1 2
     257 1000  512  256 128 1 1
     511  900  384  160 64 1 13
    1000  700  544  192 128 1 7
     600 3000 1184  128 64 1 50
    # Parts of K in turn.
     300 1001 2368  128 128 3 7
     513  900  736  160 64 2 6
    """,
)
WGMMA_BF16_CASES = [*_WGMMA_BF16_SPLITS, *_WGMMA_BF16_PAIRS]
WGMMA_BF16_SMALL = cases(
    _BF16,
    """
     65  64  128  96 64 1 0
     70 300 1120  96 192 4 0
     97 300  992  128 128 6 0
    129 290 1152  128 64 3 0
    255 131  608  256 64 1 0
     70 300 1120  96 128 1 4
    129 290 1152  128 64 1 3
    161 250  736  160 128 1 2
    200 299 2048  192 128 1 4
    255 131  608  256 64 1 1
    """,
    cu_num=8,
)
_WGMMA_BF16_OWN = cases(
    (),
    """
      65 1537 6144
     127 2304 6144
     600 6143 1536
    """,
)

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

# As many tiles as pairs, fewer, more and many more, of whole and cut features, of an odd number of
# them too, which no store of 16 bytes fits.
WGMMA_BF16_SWAPPED = Subject(
    "wgmma_bf16_swapped",
    ("sm_90a",),
    alone(
        cases(
            ("tile_n", "pairs"),
            """
              65   64  128  192  1
             300  160 1120  256  4
             513  513 7392  256  4
             700  259 1184  192  3
            1000  700  544  192  7
            1537 1001  736  192 66
            2304  515 2368  256 66
            4100  520 2880  256 60
            """,
        )
    ),
    few=cases(
        ("tile_n", "pairs"),
        """
         140  64  128  192  1
         300 130  608  256  3
         299 264 2368  192  4
        """,
        cu_num=8,
    ),
    least_rows=130,
    most_rows=270,
    dtypes=("bf16", "fp32", "fp16"),
    with_bias=[],
    repeats=[(M, 2304, 6144, None) for M in (2304, 6144)],
    chained=(2048,),
)

_FEW = ("tile_m", "split", "k_groups", "ctas")
_few = named(*_FEW)

# Between them: tiles of every size, one and two CTAs of an SM, clusters and warpgroups that share
# K, both, parts that differ in either order, of one chunk, and K that ends within a chunk and
# within 64 k.
WGMMA_BF16_FEW_CASES = cases(
    _FEW,
    """
       1   64  128  8 1 1 2
       8 2304 6144  8 3 1 1
       3  777 2048  8 3 2 1
       5  300 2880  8 1 4 1
      13 1001  736  16 2 2 1
      16 1536  416  16 4 1 2
      17  322 1056  24 1 3 1
      21  900  384  24 3 1 1
      29  130 7392  32 8 1 1
      32  515 2368  32 2 2 1
      32   64   32  32 1 1 1
       7 1001  736  8 2 1 3
    """,
)
WGMMA_BF16_FEW = Subject(
    "wgmma_bf16_few",
    ("sm_90a",),
    alone(WGMMA_BF16_FEW_CASES),
    few=[
        Case(7, 300, 1120, _few(8, 2, 1, 2), 8),
        Case(14, 250, 736, _few(16, 1, 2, 1), 8),
        Case(30, 130, 2080, _few(32, 3, 1, 1), 8),
    ],
    most_rows=32,
    dtypes=("bf16", "fp32", "fp16"),
    with_bias=[
        Case(19, 137, 1120, _few(24, 3, 1, 1)),
        Case(10, 1372, 1152, _few(16, 1, 2, 1)),
    ],
    repeats=[(M, 2304, 6144, None) for M in (1, 17)],
    chained=(1, 17),
    beyond_4_gib=[(3, 6176)],
)

_WIDE = ("split", "rows", "depth")
_wide = named(*_WIDE)


# Between them: no cluster, clusters of several sizes, parts of K without a chunk, parts of unequal
# length, K that ends within a chunk, more scales of a row than a lane has words, warps without
# rows, several passes, fewer rows than a pass, a ring of one stage, rings longer than a part, one
# as long as five passes, and parts of x that come in two and in four batches.
_WIDE_CASES = cases(
    _WIDE,
    """
     1   64    64  1 64 2
     2    3    32  4 32 1
     5  100   416  2 48 2
     8 4000  1024  7 208 3
    16   70  1056  4 64 4
    17  130  2080  3 96 3
    24  700  2880  2 112 4
    31    7  3104  5 32 3
    33  640  1536  4 160 1
    40 7000   512  1 48 6
    48 3000  1056  8 176 2
    64  200  6144  6 128 2
    64 1700  6144  8 96 4
    64 6000  1024  2 64 3
     8  130 16384  8 32 4
    11  130  2048  1 80 8
    33 9000   512  4 64 5
    48  150  6144  4 160 1
    64  130 12288  8 32 1
    64 5000  4096  8 112 3
    57 9100  2048  4 96 4
    """,
)
# Several passes, two to four, from one to the next of which the loop runs on.
WIDE_RUNNING_ON = cases(
    _WIDE,
    """
    64 6000 6144  8 112 3
    57 9100 2560  4 96 4
    40 2450 5120  8 80 4
    64 2100 5120  8 128 5
    """,
)

WGMMA_F16 = Subject(
    "wgmma_f16",
    ("sm_90a",),
    alone([*_WIDE_CASES, *WIDE_RUNNING_ON]),
    few=_WIDE_CASES[1:12],
    most_rows=64,
    of_rows=lambda M: _wide(3, 48, 2),
    with_bias=[Case(19, 137, 1120, _wide(2, 64, 2)), Case(19, 137, 1120, _wide(1, 80, 2))],
    repeats=[(M, N, 6144, None) for M, N in ((8, 2304), (64, 2304), (64, 3072), (64, 9216))],
    beyond_4_gib=[(40, 6240)],
)
