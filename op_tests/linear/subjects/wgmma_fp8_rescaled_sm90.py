"""The subject on Hopper whose blocks of 128 k are under one scale: ``wgmma_fp8_rescaled``."""

from __future__ import annotations

from aiter_mx.kernels.linear import wgmma_fp8_rescaled_sm90 as rescaled
from op_tests.conformance import alone
from op_tests.linear.rescaled import both_rescaled
from op_tests.linear.subjects.subject import Subject, cases

_CTAS = ("ctas",)
NEAR = (-2, 3)
LESS_NEAR = (-3, 3)
"""Exponents of scales: many steps can be under one of 128 rows, or under one of a row; few can."""

# Between them: one tile and many, whose last rows are of both warpgroups and of the first alone,
# features that no tile divides, whole eights of them and odd ones, K that ends after one, two and
# three blocks of a step, the first one too; a CTA, and as many as there are chunks; whole tiles and
# parts, of two CTAs and of many, and CTAs whose share is of two tiles and of more.
WGMMA_FP8_RESCALED_CASES = cases(
    _CTAS,
    """
       1    1    32    1
       2    3   512    4
       3  130   160    4
      64  129   352    5
      65  300   224    1,3
     100  264    96    2,3
     127  777  1056   17
     128 1000  1120   72
     129  515  2368   57
     190   72    64    2
     192  384  4096   64
     193  136  7392  116
     255 1302   896  132
     257 1001  1152    1
     300 1537   736   39
     384  256  1536   24
     385 1005   896   77
     450  128  6144  132
     511 2304  1024   72
     512  640   480   20
     577 1990   384  131
     640 3001   640  120
     641  700  2944   29
     700 1281  1184  132
    1030 1281   544    7
    """,
)
WGMMA_FP8_RESCALED_SMALL = cases(
    _CTAS,
    """
      40  130  352    2
     129  290 1152    8
     150  250  736   24
     200  190 2048    5
     257  131  608    1
     320  300 1056   27
    """,
)
OF_FP16 = [case._replace(dtype="fp16") for case in WGMMA_FP8_RESCALED_CASES[2::5]]
WITH_BIAS = [
    case._replace(bias=bias)
    for case in cases(_CTAS, "83 137 1120 3\n 200 200 800 9\n 131 1371 288 12")
    for bias in ("bf16", "fp16", "fp32")
]

WGMMA_FP8_RESCALED = Subject(
    "wgmma_fp8_rescaled",
    ("sm_90a",),
    alone(
        [
            *WGMMA_FP8_RESCALED_CASES,
            *OF_FP16,
            *WITH_BIAS,
            *cases((), "257 1537 6144\n 700 4096 512\n 1500 383 3072"),
        ]
    ),
    few=WGMMA_FP8_RESCALED_SMALL,
    most_rows=290,
    of_rows=lambda M: {"ctas": 1 + M % 18},
    dtypes=("bf16", "fp16"),
    width=(130, 1120),
    with_bias=cases(_CTAS, "83 137 1120 3\n 140 1376 1152 50\n 200 1371 288 7"),
    accumulation_error=rescaled.ACCUMULATION_ERROR,
    multiplied=both_rescaled,
    rescaling_error=rescaled.RESCALING_ERROR,
    exponents=[NEAR, LESS_NEAR],
    repeats=[(M, *w, None) for M in (300, 2048) for w in ((2304, 6144), (6144, 1536))],
    chained=(129, 520),
    beyond_4_gib=[(65, 6176)],
)
