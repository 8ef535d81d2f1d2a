"""The kernels of the linear that the conformance suite tries, and the cases it tries them with."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from aiter_mx.kernels.linear import mma_registers_sm90, mma_ring_sm90, wgmma_fp8_sm90
from aiter_mx.kernels.linear.gemv import MAX_M as GEMV_MAX_M
from aiter_mx.kernels.linear.mfma_gfx950 import MAX_M as MFMA_MAX_M
from aiter_mx.kernels.registry import find_kernel
from aiter_mx.kernels.spec import Config, KernelSpec


class Case(NamedTuple):
    """A problem and a configuration.

    ``config`` None is the kernel's own choice. ``cu_num`` is what work is divided for where it is
    not the GPU there is, ``dtype`` the result's where it is not the subject's, ``bias`` its dtype.
    """

    M: int
    N: int
    K: int
    config: Config | None
    cu_num: int | None = None
    dtype: str | None = None
    bias: str = "none"


@dataclass(frozen=True)
class Subject:
    """A kernel, and what each property is tried with.

    Attributes:
        backend, name: the kernel's.
        places: ``sim`` (the simulated gfx950), ``torch`` (no GPU), or an architecture, which
            ``-m gpu`` tests where such a GPU is.
        groups: cases of any shape and configuration; those of a group share what is compiled.
        few: cases for properties that draw operands of many kinds.
        dtypes: the results that the kernel makes; the first shows most of its errors.
        least_rows, most_rows: M of the envelope, or of what its end is like.
        of_rows: the configuration for each M.
        width: N and K for every M.
        with_bias: cases for every dtype of bias and result.
        accumulation_error: where sums have fewer bits than fp32's.
        underflow: what a block of 32 products may lose at the lower end of fp32.
        repeats: M, N, K and configuration of a thousand launches on two streams.
        chained: M of chains of overlapping launches; none where launches do not overlap.
        beyond_4_gib: M and K of a launch whose weights take more than 4 GiB.
    """

    name: str
    places: tuple[str, ...]
    groups: Sequence[Sequence[Case]]
    few: Sequence[Case]
    most_rows: int
    with_bias: Sequence[Case]
    backend: str = "hip"
    least_rows: int = 1
    dtypes: tuple[str, ...] = ("fp32", "bf16", "fp16")
    of_rows: Callable[[int], Config | None] = lambda M: None
    width: tuple[int, int] = (130, 1120)
    accumulation_error: float | None = None
    underflow: float = 2.0**-126
    repeats: Sequence[tuple[int, int, int, Config | None]] = ()
    chained: Sequence[int] = ()
    beyond_4_gib: Sequence[tuple[int, int]] = ()

    def kernel(self, arch: str) -> KernelSpec:
        return find_kernel("linear", arch, self.backend, self.name)


def named(*names: str) -> Callable[..., dict[str, int]]:
    """What makes configurations of values in the order of these parameters."""
    return lambda *values: dict(zip(names, values, strict=True))


def alone(cases: Sequence[Case]) -> list[list[Case]]:
    """Groups of one case each."""
    return [[case] for case in cases]


# -- gemv ------------------------------------------------------------------------------------------
# A wave's step is 1024 k on gfx950 and 512 on sm_90a; the last of these K take several rounds of
# every configuration below, and most leave lanes, waves or both without work at the end.
_GEMV_SHAPES = [
    *((1, 32), (3, 96), (5, 160), (17, 416), (2, 1024), (33, 1056), (7, 2080), (64, 512)),
    *((31, 3104), (4, 9248), (130, 64), (19, 4096)),
]
_gemv = named("rows", "waves", "unroll")


def gemv_config(M: int) -> dict[str, int]:
    """Configurations that between them take every small value of every parameter."""
    rows = (1, 2, 3)[M % 3] if M > 14 else (4, 1, 2, 3)[M % 4]
    return _gemv(rows, (1, 2, 3, 4, 6)[M % 5], {1: 3, 2: 2, 3: 4, 4: 2, 5: 2}.get(M, 1))


GEMV = Subject(
    "gemv",
    ("sim", "gfx950", "sm_90a"),
    [
        *(
            [Case(M, N, K, gemv_config(M), dtype="bf16") for N, K in _GEMV_SHAPES]
            for M in range(1, GEMV_MAX_M + 1)
        ),
        *(
            [Case(1, 25, 8224, config), Case(1, 5, 37920, config)]
            for config in (_gemv(8, 12, 1), _gemv(6, 1, 2), _gemv(3, 8, 4))
        ),
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

# -- mfma on gfx950 --------------------------------------------------------------------------------
_mfma = named("row_tiles", "fold", "waves", "unroll")

# Between them these take every value of every parameter and every number of tiles of x. An odd
# number of blocks in K is a variant of its own.
_MFMA_SWEPT = [
    (_mfma(1, 1, 1, 1), 1, True, "bf16"),
    (_mfma(1, 1, 12, 2), 1, False, "fp32"),
    (_mfma(2, 1, 3, 2), 2, False, "bf16"),
    (_mfma(1, 1, 8, 1), 3, True, "fp16"),
    (_mfma(3, 1, 4, 1), 4, False, "fp32"),
    (_mfma(4, 1, 2, 1), 2, True, "bf16"),
    (_mfma(2, 2, 6, 1), 1, True, "fp32"),
    (_mfma(1, 2, 2, 3), 2, False, "bf16"),
    (_mfma(3, 2, 1, 1), 4, True, "bf16"),
    (_mfma(1, 4, 4, 4), 1, False, "fp16"),
    (_mfma(4, 4, 3, 1), 1, True, "bf16"),
    (_mfma(3, 4, 16, 1), 3, False, "fp32"),
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


_MFMA_FOLDS = [_mfma(1, 1, 2, 1), _mfma(2, 2, 2, 1), _mfma(1, 4, 1, 1)]

MFMA_GFX950 = Subject(
    "mfma",
    ("sim", "gfx950"),
    [_mfma_swept(*swept) for swept in _MFMA_SWEPT],
    few=[
        *(Case(3, 37, 64, config, 1) for config in _MFMA_FOLDS),
        *(Case(4, 21, 1344, config, 1) for config in _MFMA_FOLDS),
        Case(4, 67, 1312, _MFMA_FOLDS[0], 1),
        Case(13, 41, 9280, _mfma(2, 1, 3, 2), 1),
    ],
    most_rows=MFMA_MAX_M,
    of_rows=lambda M: _MFMA_FOLDS[0],
    width=(19, 416),
    with_bias=[Case(3, 37, 1120, _MFMA_FOLDS[0], 1)],
    underflow=2.0**-149,
)

# -- mma_registers ---------------------------------------------------------------------------------
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

# -- mma_ring --------------------------------------------------------------------------------------
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

# -- wgmma_fp8 -------------------------------------------------------------------------------------
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
]
# Of so many rows of w that eight SMs take them in passes.
WGMMA_FP8_PASSES = [
    Case(9, 17001, 256, _wgmma_fp8(1, 2, 1, 2), 8),
    Case(33, 16900, 384, _wgmma_fp8(2, 3, 1, 4), 8),
    Case(64, 20003, 512, _wgmma_fp8(1, 2, 1, 3), 8),
    Case(61, 18000, 256, _wgmma_fp8(2, 2, 1, 4), 8),
]
_WGMMA_FP8_OWN = [
    *(Case(17, 1537, 6144, None), Case(33, 6143, 1536, None), Case(47, 2304, 6144, None)),
    *(Case(63, 6144, 2048, None), Case(64, 1535, 6144, None)),
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
        *(Case(M, 1371, 1152, None) for M in (9, 40, 64)),
    ],
    accumulation_error=wgmma_fp8_sm90.ACCUMULATION_ERROR,
    repeats=[(M, N, K, None) for M in (32, 64) for N, K in ((2304, 6144), (6144, 1536))],
    chained=(8, 32, 64),
)

# -- wgmma_bf16 ------------------------------------------------------------------------------------
_wgmma_bf16 = named("tile_m", "tile_n", "split")

# Between them: tiles of every size, several tiles of tokens, the last one of one token, clusters
# of every size, parts of K that differ and of one chunk, K that ends within a chunk and within
# 64 k, features that no tile divides, and odd ones.
WGMMA_BF16_CASES = [
    Case(65, 64, 128, _wgmma_bf16(80, 64, 1)),
    Case(65, 2304, 6144, _wgmma_bf16(80, 128, 7)),
    Case(70, 777, 2880, _wgmma_bf16(80, 192, 5)),
    Case(81, 300, 160, _wgmma_bf16(80, 64, 2)),
    Case(96, 1001, 736, _wgmma_bf16(96, 128, 3)),
    Case(97, 1536, 3200, _wgmma_bf16(112, 192, 8)),
    Case(128, 2000, 896, _wgmma_bf16(128, 64, 6)),
    Case(129, 515, 2368, _wgmma_bf16(128, 192, 4)),
    Case(144, 6144, 1536, _wgmma_bf16(160, 128, 2)),
    Case(191, 322, 1056, _wgmma_bf16(96, 64, 1)),
    Case(193, 1990, 2304, _wgmma_bf16(224, 128, 8)),
    Case(200, 130, 7392, _wgmma_bf16(192, 64, 8)),
    Case(255, 1371, 1152, _wgmma_bf16(256, 128, 4)),
    Case(256, 640, 4096, _wgmma_bf16(256, 64, 5)),
    Case(257, 1000, 512, _wgmma_bf16(256, 128, 1)),
    Case(511, 900, 384, _wgmma_bf16(224, 128, 3)),
    Case(1000, 700, 544, _wgmma_bf16(192, 128, 2)),
]
WGMMA_BF16_SMALL = [
    Case(65, 64, 128, _wgmma_bf16(80, 64, 1)),
    Case(70, 300, 1120, _wgmma_bf16(80, 192, 5)),
    Case(97, 300, 992, _wgmma_bf16(96, 128, 4)),
    Case(129, 290, 1152, _wgmma_bf16(128, 64, 3)),
    Case(161, 250, 736, _wgmma_bf16(160, 128, 2)),
    Case(200, 299, 2048, _wgmma_bf16(224, 128, 8)),
    Case(255, 131, 608, _wgmma_bf16(256, 64, 1)),
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
        *(Case(83, 137, 1120, _wgmma_bf16(*values)) for values in ((80, 128, 3), (112, 64, 1))),
        Case(83, 1372, 1152, _wgmma_bf16(80, 128, 3)),
    ],
    repeats=[(M, 2304, 6144, None) for M in (65, 200, 512)],
    chained=(65, 200),
    beyond_4_gib=[(65, 6176)],
)

# -- wide ------------------------------------------------------------------------------------------
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

# -- fallbacks -------------------------------------------------------------------------------------
_SHAPES = [(1, 1, 32), (3, 40, 160), (17, 65, 1056), (150, 20, 64), (2, 16, 64)]

TORCH = Subject(
    "reference",
    ("torch",),
    alone([Case(*shape, {}, None, dtype) for shape in _SHAPES for dtype in ("fp32", "bf16")]),
    few=[Case(9, 33, 256, {}), Case(17, 65, 1056, {})],
    most_rows=64,
    of_rows=lambda M: {},
    with_bias=[Case(3, 37, 1120, {})],
    backend="torch",
    accumulation_error=2.0**-45,
    underflow=0.0,
)

SUBJECTS = (GEMV, MFMA_GFX950, MMA_REGISTERS, MMA_RING, WGMMA_FP8, WGMMA_BF16, WIDE, TORCH)
