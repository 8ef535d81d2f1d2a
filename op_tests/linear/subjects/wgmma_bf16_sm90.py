"""Subjects on Hopper whose wgmma multiplies 16 bits: ``wgmma_bf16`` of several forms,
``wgmma_f16_tiled`` and ``wgmma_f16``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from aiter_mx.kernels.linear.wgmma_bf16_layout_sm90 import FEW
from aiter_mx.kernels.linear.wgmma_f16_tiled_sm90 import (
    WGMMA_F16_TILED as WGMMA_F16_TILED_KERNEL,
)
from op_tests.conformance import alone
from op_tests.linear.subjects.subject import Case, Subject, cases

_BF16 = ("tile_m", "tile_n", "split", "pairs")

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
     145 1001 1120  144 128 3 0
     353  515 2368  176 64 1 0
     209  322  736  208 128 1 0
     448 1280 2880  224 64 2 0
     257 1990 1056  272 64 2 0
     545  300  416  272 128 1 0
     289  777 2368  288 128 4 0
     576  130  896  288 64 1 0
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
     289 1001 1120  144 128 1 13
     513  900 2368  176 64 1 29
     417 1280  736  208 128 1 9
     449 2304  896  224 64 1 40
     257 1990 2304  272 128 1 11
     577  300 7392  288 128 1 23
     290  515 1056  288 64 1 5
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
    with_bias=cases(
        _BF16,
        """
        83  137 1120   96 128 3 0
        83  137 1120  128  64 1 3
        83 1372 1152   96 128 1 9
        """,
    ),
    repeats=[(M, 2304, 6144, None) for M in (65, 200, 512, 2048)],
    chained=(65, 200),
    beyond_4_gib=[(65, 6176)],
)


def _of_f16(of_bf16: Sequence[Case]) -> list[Case]:
    """Those of wgmma_bf16's that wgmma_f16_tiled has tiles for."""
    legal = WGMMA_F16_TILED_KERNEL.params[0].values
    return [c for c in of_bf16 if c.M > FEW and (c.config is None or c.config["tile_m"] in legal)]


# So long that a warp of the launch ahead has more than the four units that it loads at once.
_WGMMA_F16_TILED_CASES = [
    *_of_f16(WGMMA_BF16_CASES),
    *cases(_BF16, "66 130 33312  96 64 1 0\n 130 300 33312  128 128 1 7"),
]
WGMMA_F16_TILED = replace(
    WGMMA_BF16,
    name="wgmma_f16_tiled",
    groups=alone([*_WGMMA_F16_TILED_CASES, *_of_f16(_WGMMA_BF16_OWN)]),
    few=_of_f16(WGMMA_BF16_SMALL),
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
    few=cases(
        _FEW,
        """
         7 300 1120   8 2 1 2
        14 250  736  16 1 2 1
        30 130 2080  32 3 1 1
        """,
        cu_num=8,
    ),
    most_rows=32,
    dtypes=("bf16", "fp32", "fp16"),
    with_bias=cases(_FEW, "19 137 1120  24 3 1 1\n 10 1372 1152  16 1 2 1"),
    repeats=[(M, 2304, 6144, None) for M in (1, 17)],
    chained=(1, 17),
    beyond_4_gib=[(3, 6176)],
)

_WIDE = ("split", "rows", "depth")


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
    of_rows=lambda M: {"split": 3, "rows": 48, "depth": 2},
    with_bias=cases(_WIDE, "19 137 1120  2 64 2\n 19 137 1120  1 80 2"),
    repeats=[(M, N, 6144, None) for M, N in ((8, 2304), (64, 2304), (64, 3072), (64, 9216))],
    beyond_4_gib=[(40, 6240)],
)
