"""The kernels of ``grouped_gemm`` that the conformance suite tries, and what it tries them with."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch

from aiter_mx.kernels.grouped_gemm.problem import A_FORMATS, LAYOUT_CODES
from aiter_mx.kernels.linear import wgmma_fp8_rescaled_sm90 as rescaled
from aiter_mx.kernels.spec import Config
from op_tests import conformance
from op_tests.conformance import DTYPES, alone, named
from op_tests.grouped.cases import (
    Case,
    Groups,
    Operands,
    draw_groups,
    ending_at,
    of_every_size,
    one_group,
)
from op_tests.linear.rescaled import both_rescaled, rescaled_in_place
from op_tests.linear.subjects.wgmma_fp8_rescaled_sm90 import LESS_NEAR, NEAR
from op_tests.operands import Exponents

config_of = named("tile_m", "tile_n", "swath", "xcds")


@dataclass(frozen=True)
class Subject(conformance.Subject):
    """A kernel of ``grouped_gemm``, and what each property is tried with.

    Attributes:
        groups: cases of any groups, shape and configuration; those of one share what is compiled.
        few: cases for properties that draw operands of many kinds, each of one group.
        every_size: a group of every size.
        ordered: cases that take waves, and tiles, in orders of their own.
        biases: dtypes of bias to try with each result.
        dtypes: the results that the kernel makes.
        layouts, a_formats: as of ``GroupedGemmProblem``, that it covers.
        accumulation_error: where sums have fewer bits than fp32's.
        multiplied: what it multiplies in place of a group's operands, where it rounds them.
        rescaling_error: what an element of them changes by, of the largest of its block.
        exponents: more ranges of scales to draw, where how near they are decides what is computed.
        underflow: what a block of 32 products may lose at the lower end of fp32.
    """

    op: str = field(default="grouped_gemm", kw_only=True)
    groups: Sequence[Sequence[Case]]
    few: Sequence[Case]
    every_size: Case
    ordered: Sequence[Case] = ()
    biases: Sequence[str] = ("none", *DTYPES)
    dtypes: Sequence[str] = tuple(DTYPES)
    layouts: Sequence[str] = tuple(LAYOUT_CODES)
    a_formats: Sequence[str] = A_FORMATS
    accumulation_error: float | None = None
    multiplied: Callable[[Operands], Operands] | None = None
    rescaling_error: float = 0.0
    exponents: Sequence[Exponents] = ()
    underflow: float = 2.0**-126


# -- persistent on gfx950 --------------------------------------------------------------------------
LAYOUTS = [*itertools.product(("row_major", "16x4"), repeat=2)]  # of a's and b's scales

# (tile, blocks of 32 k a multiple of this, dtype, cases): between them every way of copying scales,
# whole steps and others, and sums in either kind of register. Layouts of scales and kinds of bias
# take turns, as every pair compiles anew.
Swept = tuple[tuple[int, int], int, str, int]
SWEPT: list[Swept] = [
    ((256, 256), 4, "bf16", 8),
    ((256, 256), 2, "fp32", 6),
    ((160, 256), 4, "bf16", 8),
    ((160, 128), 1, "fp16", 16),
    ((128, 256), 1, "bf16", 12),
    ((128, 128), 4, "fp16", 16),
    ((64, 128), 2, "bf16", 20),
    ((32, 256), 1, "fp32", 20),
]


def swept_layouts(swept: Swept) -> tuple[int, ...]:
    """Which layouts a tile is tried with: the largest with all, of two kinds of K; others with one
    in turn, which is ``few``'s where they have that too."""
    at = SWEPT.index(swept)
    return [(1, 2), (0, 3), (1,), (0,), (2,), (3,), (1,), (0,)][at]


def swept_in_runs(swept: Swept) -> bool:
    """Whether a's scales are whole dwords in all. Where those of a row are not, either compiles
    anew, so that a tile is tried with one: three with whole dwords, two with others."""
    return swept in SWEPT[4:] or swept[1] == 4


def swept_bias(swept: Swept, layout: int) -> str:
    """Which dtype of bias goes with a layout, counted round and round."""
    return ["none", *DTYPES][(layout + SWEPT.index(swept)) % 4]


def zero_bias(swept: Swept, layout: int, N: int) -> torch.Tensor | None:
    """Of one group, zeros: with it a launch runs what the sweep has compiled already."""
    name = swept_bias(swept, layout)
    return None if name == "none" else torch.zeros(1, N, dtype=DTYPES[name])


def _swept(swept: Swept) -> list[Case]:
    tile, blocks, dtype, count = swept
    draw, cases = random.Random(f"{tile} {dtype}"), []
    for seed in range(count):
        N = 32 * draw.choice([1, 2, 3, tile[1] // 32, tile[1] // 32 + 1])
        K = 32 * blocks * (draw.randint(2, 5) if blocks == 4 else 2 * draw.randint(0, 4) + 1)
        cu_num, config = draw.choice([1, 2, 3, 8, 256]), config_of(*tile, 4, 8)
        layouts = swept_layouts(swept)
        layout = layouts[seed % len(layouts)]
        groups = draw_groups(draw, tile[0])
        while (groups.M * (K // 32) % 4 == 0) != swept_in_runs(swept):
            groups = draw_groups(draw, tile[0])
        bias = swept_bias(swept, layout)
        cases.append(Case(groups, N, K, config, dtype, bias, cu_num, LAYOUTS[layout]))
    return cases


ONE_TILE: Config = config_of(64, 128, 4, 8)
PERSISTENT_GFX950 = Subject(
    "persistent",
    ("sim", "gfx950"),
    [_swept(swept) for swept in SWEPT],
    # Two tiles for one workgroup: the second must not inherit what the first noted.
    few=[
        Case(one_group(37), 160, 320, ONE_TILE, "fp32", cu_num=1),
        Case(one_group(69), 160, 576, ONE_TILE, "fp32", cu_num=1),
        Case(one_group(261), 160, 576, config_of(256, 256, 4, 8), "fp32", swept_bias(SWEPT[1], 0)),
        Case(one_group(167), 160, 288, config_of(160, 128, 4, 8), "fp16", swept_bias(SWEPT[3], 0)),
    ],
    every_size=Case(of_every_size(40), 64, 320, ONE_TILE, "fp32"),
    ordered=[
        Case(ending_at([129, 129, 180], 180, "offsets", "i64"), 288, 320, config, "fp32")
        for config in (config_of(64, 128, 1, 1), config_of(32, 128, 16, 8))
    ],
    biases=("none",),  # the sweep has each of them
    underflow=2.0**-149,
)

# -- persistent on Hopper --------------------------------------------------------------------------
EDGES = (0, 1, 7, 63, 64, 65, 127, 128, 129, 191, 192, 255, 256, 257, 320, 511, 513)


def _around_edges(index: str) -> list[Case]:
    draw, cases = random.Random(index), []
    for _ in range(25):
        N, K = draw.choice([32, 96, 160, 256, 288]), draw.choice([32, 64, 96, 160, 352, 544])
        sizes = [draw.choice(EDGES) for _ in range(draw.choice([1, 2, 3, 5, 9]))]
        ends = [*accumulate(sizes)]
        groups = ending_at(ends, ends[-1] + draw.choice([0, 5]) or 5, index=index)
        cases.append(Case(groups, N, K, dtype="bf16"))
    return cases


def _many_groups() -> Groups:
    draw = random.Random(0)
    return ending_at(sorted(draw.randrange(700) for _ in range(600)), 700)


_SLABS = [*accumulate((640, 193, 0, 100, 1, 385, 300, 129))]
PERSISTENT_SM90 = Subject(
    "persistent",
    ("sm_90a",),
    [
        [
            Case(ending_at([1, 66, 66, 322, 700, 990], 1000), 416, 1056, None, dtype, dtype)
            for dtype in DTYPES
        ],
        *(_around_edges(index) for index in ("i32", "i64")),
        # Rows of w beyond whole tiles: up to two slabs of them are shared by all consumers, in
        # tiles of one to four slabs.
        *alone(
            Case(ending_at(_SLABS, _SLABS[-1] + 3), N, 352, None, "fp32", "fp32")
            for N in (64, 128, 320, 352, 384, 448, 608)
        ),
        # Clusters take more tiles than there is room to tell of at a time.
        [Case(ending_at([30000, 69999], 70000), 576, 32, None, "bf16")],
        # More groups than threads.
        [Case(_many_groups(), 32, 64, None, "bf16")],
        [
            Case(draw_groups(random.Random(seed), 128), 160, 352, None, dtype, bias)
            for seed, (dtype, bias) in enumerate(itertools.product(DTYPES, ("none", *DTYPES)))
        ],
    ],
    few=[
        Case(one_group(300), 160, 352, None, "fp32"),
        Case(one_group(70), 96, 1056, None, "fp32"),
        Case(one_group(257), 608, 448, None, "fp32"),
    ],
    every_size=Case(of_every_size(130), 96, 352, None, "fp32"),
)

# -- rescaled on Hopper ----------------------------------------------------------------------------
SIZES = (0, 1, 63, 64, 65, 127, 128, 129, 1000, 0, 257)  # rows of groups
_NARROW = {"ring_mib": 16}  # room for 45 tiles of 2880 k of w


def _of_sizes(sizes: Sequence[int], more: int = 0, **told: str) -> Groups:
    ends = [*accumulate(sizes)]
    return ending_at(ends, ends[-1] + more, **told)


def _masked(sizes: Sequence[int]) -> Groups:
    room = max(sizes) + 3
    ranges = [(g * room, g * room + rows) for g, rows in enumerate(sizes)]
    return Groups(ranges, "masked", "i32", room * len(sizes))


def _rescaled_drawn(dtype: str) -> list[Case]:
    """Groups of every kind, results of one dtype, biases in turn."""
    draw, cases = random.Random(dtype), []
    for seed, bias in enumerate(("none", "bf16", "fp16", "fp32") * 5):
        N = 32 * draw.choice([1, 3, 4, 5, 8, 9, 13])
        K = draw.choice([32, 64, 96, 128, 224, 352, 1056])
        groups = draw_groups(draw, draw.choice([64, 128]))
        cases.append(Case(groups, N, K, None, dtype, bias, (None, 1, 2, 5, 78)[seed % 5]))
    return cases


RESCALED_SM90 = Subject(
    "rescaled",
    ("sm_90a",),
    [
        _rescaled_drawn("bf16"),
        _rescaled_drawn("fp16"),
        [
            Case(_of_sizes(SIZES, 5), 416, 352, None, "bf16", "fp32"),
            Case(_of_sizes(SIZES[::-1], index="i64"), 160, 32, None, "bf16"),
            Case(_of_sizes(SIZES), 96, 96, None, "fp16", "fp16", 3),
            Case(_masked(SIZES), 288, 608, None, "bf16", "bf16"),
            Case(_masked((5, 0, 128)), 128, 1120, None, "fp16"),
            Case(one_group(1000), 1056, 2880, None, "bf16", "bf16"),
        ],
        # More tiles of w than the ring has room for, of groups of which some have no rows; places
        # are taken again by other tiles of a group, and by those of other groups.
        [
            Case(_of_sizes((70, 0, 200, 1, 129, 333, 64)), 1056, 2880, _NARROW, "bf16", "bf16"),
            Case(_of_sizes((0, 0, 1, 0, 130, 0, 0, 20)), 2880, 2880, _NARROW, "bf16", "fp32", 7),
            Case(_of_sizes((130, 65)), 5792, 2880, _NARROW, "bf16"),
            Case(_of_sizes([*range(0, 640, 10)]), 160, 2880, _NARROW, "bf16"),
            Case(_masked([*range(0, 160, 5)] * 2), 160, 2880, _NARROW, "fp16", "fp16"),
        ],
        # More groups than the list has threads.
        [Case(_many_groups(), 32, 64, None, "bf16")],
    ],
    few=[
        Case(one_group(300), 160, 352, None, "bf16"),
        Case(one_group(70), 96, 1056, None, "bf16"),
        Case(one_group(257), 608, 448, None, "bf16", cu_num=3),
    ],
    every_size=Case(of_every_size(130), 96, 352, None, "bf16"),
    dtypes=("bf16", "fp16"),
    layouts=("jagged", "masked"),
    a_formats=("e4m3",),
    accumulation_error=rescaled.ACCUMULATION_ERROR,
    multiplied=both_rescaled,
    rescaling_error=rescaled.RESCALING_ERROR,
    exponents=[NEAR, LESS_NEAR],
)

# -- rescaled_in_place on Hopper -------------------------------------------------------------------
IN_PLACE_SM90 = replace(
    RESCALED_SM90,
    name="rescaled_in_place",
    groups=[
        *([case._replace(config=None) for case in group] for group in RESCALED_SM90.groups),
        # More pairs of blocks than share a tile of w before the next, lone blocks, and some beyond.
        [
            Case(_of_sizes((2400, 1300, 300)), 416, 352, None, "bf16", "fp32", 5),
            Case(_of_sizes((100, 1025, 2048)), 1184, 160, None, "bf16"),
            Case(_of_sizes((129, 192, 193, 256, 257, 1, 66)), 160, 352, None, "bf16", "fp16"),
        ],
    ],
    multiplied=rescaled_in_place,
)

# -- fallbacks -------------------------------------------------------------------------------------
_DRAWN = [
    Case(draw_groups(random.Random(seed), 32), N, K, {}, dtype, bias)
    for seed, ((N, K), dtype, bias) in enumerate(
        itertools.product(((32, 96), (64, 160)), DTYPES, ("none", "bf16", "fp16", "fp32"))
    )
]
TORCH = Subject(
    "reference",
    ("torch",),
    [_DRAWN],
    few=[Case(one_group(20), 64, 288, {}, "fp32"), Case(one_group(33), 32, 576, {}, "fp32")],
    every_size=Case(of_every_size(20), 64, 96, {}, "fp32"),
    backend="torch",
    underflow=0.0,
)

SUBJECTS = (PERSISTENT_GFX950, PERSISTENT_SM90, RESCALED_SM90, IN_PLACE_SM90, TORCH)
