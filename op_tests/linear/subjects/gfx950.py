"""Subjects on gfx950: the gemv, which Hopper has too, and the scaled MFMA."""

from __future__ import annotations

import random

from aiter_mx.kernels.linear.gemv import MAX_M as GEMV_MAX_M
from aiter_mx.kernels.linear.mfma_ways_gfx950 import BLOCK_M as MFMA_BLOCK_M
from op_tests.conformance import named
from op_tests.linear.subjects.subject import Case, Subject

# A wave's step is 1024 k on gfx950 and 512 on sm_90a; the last of these K take several rounds of
# every configuration below, and most leave lanes, waves or both without work at the end.
_GEMV_SHAPES = [
    *((1, 32), (3, 96), (5, 160), (17, 416), (2, 1024), (33, 1056), (7, 2080), (64, 512)),
    *((31, 3104), (4, 9248), (130, 64), (19, 4096)),
]
_gemv = named("rows", "waves", "unroll")


def _gemv_variant(K: int) -> int:
    """Which of the three ways of loading scales K has compiled on gfx950."""
    blocks = K // 32
    return 0 if blocks < 4 else 1 + (blocks % 4 == 0)


def gemv_config(M: int) -> dict[str, int]:
    """Configurations that between them take every small value of every parameter."""
    rows = (1, 2, 3)[M % 3] if M > 14 else (4, 1, 2, 3)[M % 4]
    return _gemv(rows, (1, 2, 3, 4, 6)[M % 5], {1: 3, 2: 2, 3: 4, 4: 2, 5: 2}.get(M, 1))


_GEMV_SWEPT = [
    [Case(M, N, K, gemv_config(M), dtype="bf16") for N, K in _GEMV_SHAPES]
    for M in range(1, GEMV_MAX_M + 1)
]
_GEMV_LONG = [
    [Case(1, 25, 8224, config), Case(1, 5, 37920, config)]
    for config in (_gemv(8, 12, 1), _gemv(6, 1, 2), _gemv(3, 8, 4))
]
GEMV = Subject(
    "gemv",
    ("sim", "gfx950", "sm_90a"),
    [*_GEMV_SWEPT, *_GEMV_LONG],
    # Every number of rows, those between the fewest and the most with one way of loading scales,
    # in turn.
    simulated=[
        *(
            [c for c in of if c.M in (1, 2, 3, GEMV_MAX_M) or _gemv_variant(c.K) == c.M % 3]
            for of in _GEMV_SWEPT
        ),
        *_GEMV_LONG,
    ],
    # The kernel holds the fewer of x's and w's rows, and scales by the rest.
    few=[
        Case(3, 37, 64, _gemv(1, 4, 4)),
        Case(3, 9, 416, _gemv(4, 4, 4)),
        Case(10, 67, 1312, gemv_config(10)),
        Case(5, 41, 9248, gemv_config(5) | {"waves": 6}),
    ],
    most_rows=GEMV_MAX_M,
    of_rows=gemv_config,
    with_bias=[Case(3, 37, 1120, gemv_config(3))],
    underflow=2.0**-149,
    repeats=[(M, 2304, 6144, None) for M in (1, 3, 16)],
    chained=(1,),
    beyond_4_gib=[(2, 6240)],
)

_mfma = named("row_tiles", "fold", "waves", "unroll", "blocks")

# Between them these take every value of every parameter and every number of tiles of x. An odd
# number of blocks in K is a variant of its own.
_MFMA_SWEPT = [
    (_mfma(1, 1, 1, 1, 1), 1, True, "bf16"),
    (_mfma(1, 1, 12, 2, 1), 1, False, "fp32"),
    (_mfma(2, 1, 3, 2, 1), 2, False, "bf16"),
    (_mfma(1, 1, 8, 1, 1), 3, True, "fp16"),
    (_mfma(3, 1, 4, 1, 1), 4, False, "fp32"),
    (_mfma(4, 1, 2, 1, 1), 2, True, "bf16"),
    (_mfma(2, 2, 6, 1, 1), 1, True, "fp32"),
    (_mfma(1, 2, 2, 3, 1), 2, False, "bf16"),
    (_mfma(3, 2, 1, 1, 1), 4, True, "bf16"),
    (_mfma(1, 4, 4, 4, 1), 1, False, "fp16"),
    (_mfma(4, 4, 3, 1, 1), 1, True, "bf16"),
    (_mfma(3, 4, 8, 1, 1), 3, False, "fp32"),
    (_mfma(1, 4, 16, 1, 1), 2, True, "bf16"),
]


def _mfma_swept(config: dict[str, int], col_tiles: int, odd: bool, dtype: str) -> list[Case]:
    """Fourteen shapes for a configuration, x in so many tiles, K / 32 odd or even."""
    draw, cases = random.Random(f"{config} {col_tiles}"), []
    rows = 16 // config["fold"]
    most_k = 3 * 256 * config["fold"] * config["waves"] * config["unroll"]  # three rounds
    for _ in range(14):
        M = draw.randint((col_tiles - 1) * rows + 1, col_tiles * rows)
        most_n = config["row_tiles"] * rows * draw.randint(1, 2)
        N = draw.choice([1, draw.randint(2, 15), draw.randint(16, 70), most_n])
        K = 32 * max(1, draw.randint(1, min(most_k, 5_000) // 64) * 2 - odd)
        bias, cu_num = draw.choice(["none", "bf16", "fp16", "fp32"]), draw.choice([1, 1, 3, 7, 256])
        cases.append(Case(M, N, K, config, cu_num, dtype, bias))
    return cases


_MFMA_FOLDS = [_mfma(1, 1, 2, 1, 1), _mfma(2, 2, 2, 1, 1), _mfma(1, 4, 1, 1, 1)]

# Rows of x that are divided into blocks, evenly and not; the second are too many to split K.
_SEVERAL_BLOCKS = (
    *((1, (65, 128)), (1, (129, 200, 256)), (2, (33, 50, 64)), (4, (33, 37, 49, 64))),
    *((2, (65, 96, 130, 192)), (3, (129, 144)), (5, (65, 127, 129, 255)), (8, (200, 249, 256))),
    (16, (251,)),
)
_MANY_BLOCKS = ((1, (512,)), (5, (300,)), (8, (384, 511, 768)), (16, (511,)), (32, (1000,)))

MFMA_GFX950 = Subject(
    "mfma",
    ("sim", "gfx950"),
    [
        *(_mfma_swept(*swept) for swept in _MFMA_SWEPT),
        *(
            [Case(M, 37, 1120, _mfma(2, 1, 3, 1, blocks), 7) for M in Ms]
            for blocks, Ms in (*_SEVERAL_BLOCKS, *_MANY_BLOCKS)
        ),
    ],
    few=[
        *(Case(3, 37, 64, config, 1) for config in _MFMA_FOLDS),
        *(Case(4, 21, 1344, config, 1) for config in _MFMA_FOLDS),
        Case(4, 67, 1312, _MFMA_FOLDS[0], 1),
        Case(13, 41, 9280, _mfma(2, 1, 3, 2, 1), 1),
    ],
    most_rows=MFMA_BLOCK_M,
    of_rows=lambda M: _MFMA_FOLDS[0],
    width=(19, 416),
    with_bias=[Case(3, 37, 1120, _MFMA_FOLDS[0], 1)],
    underflow=2.0**-149,
)

_split = named("row_tiles", "fold", "waves", "unroll", "blocks", "splits")
_SPLIT_SWEPT = [
    (_split(1, 1, 1, 1, 1, 2), 1, True, "bf16"),
    (_split(2, 1, 3, 1, 1, 3), 2, False, "fp32"),
    (_split(3, 1, 2, 1, 1, 4), 4, True, "fp16"),
    (_split(1, 2, 2, 2, 1, 3), 3, False, "bf16"),
    (_split(4, 1, 1, 1, 1, 2), 3, False, "bf16"),
]
_SPLIT_FEW = _split(1, 1, 2, 1, 1, 3)

MFMA_SPLIT_GFX950 = Subject(
    "mfma_split",
    ("sim", "gfx950"),
    [
        *(_mfma_swept(*swept) for swept in _SPLIT_SWEPT),
        *(
            [Case(M, 37, 1120, _split(2, 1, 1, 1, blocks, 3), 7, "fp32", "bf16") for M in Ms]
            for blocks, Ms in _SEVERAL_BLOCKS
        ),
    ],
    few=[Case(3, 37, 64, _SPLIT_FEW, 1), Case(4, 67, 1312, _split(2, 1, 1, 1, 1, 4), 1)],
    most_rows=MFMA_BLOCK_M,
    of_rows=lambda M: _SPLIT_FEW,
    width=(19, 416),
    with_bias=[Case(3, 37, 1120, _SPLIT_FEW, 1)],
    underflow=2.0**-149,
)
