"""The kernels of ``moe_gemm`` that the conformance suite tries, and what it tries them with."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import lcm

from aiter_mx.kernels.linear import wgmma_fp8_rescaled_sm90 as rescaled
from aiter_mx.kernels.moe_gemm import MoeGemmProblem
from aiter_mx.kernels.moe_gemm import mma_ring_sm90 as mma_ring
from aiter_mx.kernels.moe_gemm import wgmma_fp8_sm90 as wgmma_fp8
from aiter_mx.kernels.moe_gemm.problem import ACTIVATION_CODES, LAYOUTS
from aiter_mx.kernels.spec import Config
from op_tests import conformance
from op_tests.conformance import alone, named
from op_tests.moe.operands import BIASES, Case


@dataclass(frozen=True)
class Subject(conformance.Subject):
    """A kernel of ``moe_gemm``, and what each property is tried with.

    Attributes:
        groups: cases of any shape and configuration; those of a group share what is compiled.
        few: cases for properties that draw operands of many kinds.
        activated: cases, each with an activation and a layout of gate and up.
        tokens: for every number of tokens; M is not looked at.
        dtypes: the results that the kernel makes; the first shows most of its errors.
        biases: dtypes of bias for each of these results.
        accumulation_error: where sums have fewer bits than fp32's.
        rescaling_error: what an element changes by, of the largest of its block.
        weighted: whether it multiplies by routing weights.
        strays: whether blocks without an id may stand among those of an expert.
        sized: whether it has shapes that take memory beyond 4 GiB tried on a GPU.
        fitted: a configuration for a problem that the given one has no room for.
    """

    op: str = field(default="moe_gemm", kw_only=True)
    groups: Sequence[Sequence[Case]]
    few: Sequence[Case]
    activated: Sequence[tuple[Case, str, str]]
    tokens: Case
    dtypes: tuple[str, ...] = ("fp32", "bf16", "fp16")
    biases: tuple[str, ...] = BIASES
    accumulation_error: float = 0.0
    rescaling_error: float = 0.0
    weighted: bool = True
    strays: bool = True
    sized: bool = False
    fitted: Callable[[MoeGemmProblem, Config], Config] = lambda problem, config: config


_KINDS = [(a, layout) for a in ("silu", "swiglu_oai") for layout in ("halves", "interleaved")]


def _activated(cases: Sequence[Case]) -> list[tuple[Case, str, str]]:
    """The cases with activations in turn; gate and up take whole blocks of 32 features."""
    return [
        (case._replace(N=-(-case.N // 64) * 64), *_KINDS[at % len(_KINDS)])
        for at, case in enumerate(cases)
    ]


def _drawn(config: Config, dtype: str, seed: str, count: int, *units: int) -> list[Case]:
    """Cases of any sizes; N is a multiple of the first unit, K of the second, and K / 32 is odd or
    even throughout, as the third says, so that all share what is compiled."""
    draw, cases = random.Random(seed), []
    of_n, of_k, odd = units
    for at in range(count):
        N = draw.choice([of_n, of_n * draw.randint(1, 1 + 60 // of_n), draw.randint(61, 150)])
        K = 32 * (draw.randint(1, 20) * 2 - odd)
        N, K = -(-N // of_n) * of_n, lcm(K, of_k) // K * K
        if at % 3:
            M, E = draw.choice([1, draw.randint(2, 40)]), draw.randint(1, 6)
            block_m = draw.choice([4, 12, 16, 32, 64, 72])
        else:  # blocks that are full, or nearly
            M, E, block_m = draw.randint(30, 60), draw.randint(1, 2), draw.choice([48, 64, 72])
        cases.append(Case(M, N, K, E, draw.randint(1, 4), block_m, config, dtype))
    return cases


# -- mfma on gfx950 --------------------------------------------------------------------------------
_mfma = named("row_tiles", "col_tiles", "waves", "unroll")

# Configuration, whether K / 32 is odd, dtype: with those of activations they take every value of
# every parameter.
_MFMA_SWEPT = [
    (_mfma(1, 3, 2, 1), 1, "fp32"),
    (_mfma(1, 1, 3, 4), 1, "fp16"),
    (_mfma(2, 2, 6, 1), 0, "bf16"),
    (_mfma(1, 1, 16, 1), 1, "fp32"),
    (_mfma(2, 1, 1, 3), 0, "bf16"),
    (_mfma(1, 1, 12, 2), 0, "fp32"),
]
_MFMA_MANY = [(1, 5, 3), (9, 4, 7), (700, 4, 4), (1100, 3, 2)]  # tokens, top_k, a_div
MFMA = Subject(
    "mfma",
    ("sim", "gfx950"),
    [
        *(_drawn(config, dtype, str(config), 24, 1, 32, odd) for config, odd, dtype in _MFMA_SWEPT),
        [
            Case(M, 70, 96, 5, top_k, 32, _MFMA_SWEPT[0][0], "fp32", a_div)
            for M, top_k, a_div in _MFMA_MANY
        ],
    ],
    few=[
        Case(9, 67, 544, 3, 2, 12, _MFMA_SWEPT[0][0], "fp32"),
        Case(23, 70, 640, 4, 3, 16, _MFMA_SWEPT[2][0], "bf16"),
    ],
    activated=[
        (Case(M, N, K, E, top_k, block_m, config), activation, layout)
        for config, activation, layout in (
            (_mfma(4, 1, 8, 1), "silu", "halves"),
            (_mfma(4, 2, 4, 1), "swiglu_oai", "interleaved"),
            (_mfma(4, 3, 1, 1), "gelu", "halves"),
        )
        for M, N, K, E, top_k, block_m, *_ in _drawn(config, "", activation, 16, 64, 64, 0)
    ],
    tokens=Case(0, 40, 96, 3, 2, 16, _MFMA_SWEPT[0][0], "fp32"),
)

# -- by way of grouped_gemm ------------------------------------------------------------------------
_GROUPED = [
    Case(M, N, K, E, top_k, block_m, {}, "fp32", bias=bias)
    for M, N, K, E, top_k, block_m, bias in (
        (1, 32, 256, 1, 1, 4, "none"),
        (30, 64, 512, 4, 2, 12, "fp32"),
        (17, 96, 256, 6, 3, 16, "none"),
        (40, 32, 512, 2, 4, 72, "fp32"),
        (33, 96, 512, 5, 1, 64, "none"),
    )
]
GROUPED = Subject(
    "grouped",
    ("sim", "gfx950", "sm_90a"),
    [_GROUPED],
    few=_GROUPED[1:3],
    activated=[
        (Case(M, 64 * tiles, K, 4, 2, block_m, {}, bias="none"), activation, layout)
        for (activation, layout) in (("silu", "halves"), ("swiglu_oai", "interleaved"))
        for M, tiles, K, block_m in ((1, 1, 256, 16), (40, 2, 512, 12), (23, 1, 256, 64))
    ],
    tokens=Case(0, 64, 256, 3, 2, 16, {}, "fp32", bias="none"),
    biases=("fp16",),  # grouped_gemm adds it
    strays=False,
)

# -- Hopper ----------------------------------------------------------------------------------------
_mma_ring = named(*(param.name for param in mma_ring.PARAMS))
_wgmma_f16 = named("col_tiles", "groups", "tiles", "depth", "slots", "ahead")
_wgmma_fp8 = named("col_tiles", "depth", "slots")

_MMA_RING = [
    Case(3, 96, 256, 8, 4, 16, _mma_ring(1, 1, 2, 2, 1)),
    Case(30, 200, 1152, 8, 4, 16, _mma_ring(4, 2, 8, 2, 1)),
    Case(100, 136, 768, 8, 2, 64, _mma_ring(2, 4, 3, 4, 1)),
    Case(17, 64, 1056, 5, 3, 16, _mma_ring(2, 2, 4, 3, 1)),
    Case(9, 40, 32, 6, 2, 4, _mma_ring(1, 1, 1, 4, 2)),
    Case(70, 333, 96, 4, 3, 20, _mma_ring(3, 2, 1, 4, 2)),
    Case(200, 64, 512, 3, 2, 128, _mma_ring(4, 1, 4, 2, 1)),
    Case(40, 384, 640, 6, 3, 16, _mma_ring(2, 1, 4, 2, 2)),
    Case(90, 448, 1024, 3, 2, 64, _mma_ring(1, 4, 8, 2, 1)),
]
MMA_RING = Subject(
    "mma_ring",
    ("sm_90a",),
    alone([*_MMA_RING, Case(30, 640, 1024, 8, 4, 16)]),
    few=_MMA_RING[:6],
    activated=_activated(_MMA_RING),
    tokens=Case(0, 96, 256, 8, 2, 16),
    sized=True,
    fitted=lambda problem, config: (
        config if mma_ring.fits(problem, config) else {**config, "row_tiles": 4, "depth": 2}
    ),
)

_WGMMA_F16 = [
    Case(300, 64, 384, 3, 2, 128, _wgmma_f16(16, 2, 1, 3, 3, 3)),
    Case(400, 328, 640, 4, 2, 96, _wgmma_f16(16, 2, 1, 3, 2, 4)),
    Case(150, 203, 640, 5, 3, 128, _wgmma_f16(14, 2, 1, 3, 2, 3)),
    Case(260, 200, 384, 3, 2, 128, _wgmma_f16(16, 2, 1, 2, 0, 2)),
    Case(200, 520, 1024, 8, 2, 64, _wgmma_f16(8, 3, 1, 4, 3, 3)),
    Case(150, 203, 640, 5, 3, 128, _wgmma_f16(8, 2, 1, 3, 0, 2)),
    Case(400, 328, 1152, 4, 2, 96, _wgmma_f16(12, 3, 1, 3, 3, 3)),
    Case(400, 1000, 768, 4, 2, 96, _wgmma_f16(10, 3, 1, 2, 0, 2)),
    Case(60, 328, 128, 6, 2, 32, _wgmma_f16(4, 3, 1, 4, 3, 3)),
    Case(30, 256, 256, 8, 4, 16, _wgmma_f16(4, 3, 1, 2, 0, 2)),
    Case(260, 200, 384, 3, 2, 128, _wgmma_f16(6, 3, 1, 5, 2, 2)),
    Case(900, 64, 384, 3, 2, 96, _wgmma_f16(12, 2, 1, 2, 4, 4)),
    # More than two blocks a workgroup.
    Case(700, 200, 256, 40, 4, 8, _wgmma_f16(4, 3, 1, 2, 0, 2)),
    # Two tiles of rows of w a warpgroup.
    Case(200, 520, 1024, 8, 2, 64, _wgmma_f16(8, 2, 2, 4, 2, 3)),
    Case(400, 328, 1536, 4, 2, 96, _wgmma_f16(12, 2, 2, 3, 3, 2)),
    Case(260, 1000, 512, 3, 2, 80, _wgmma_f16(10, 2, 2, 6, 2, 4)),
    Case(500, 1600, 1024, 40, 4, 80, _wgmma_f16(10, 2, 2, 4, 2, 3)),
    Case(150, 203, 512, 5, 3, 128, _wgmma_f16(8, 2, 2, 5, 3, 2)),
    # Joined blocks.
    Case(600, 328, 384, 5, 4, 16, _wgmma_f16(12, 3, 1, 3, 3, 2)),
    Case(500, 200, 256, 60, 4, 4, _wgmma_f16(6, 2, 1, 4, 3, 2)),
    Case(400, 520, 512, 20, 2, 20, _wgmma_f16(10, 2, 2, 4, 2, 3)),
]
WGMMA_F16 = Subject(
    "wgmma_f16",
    ("sm_90a",),
    alone([*_WGMMA_F16, Case(30, 640, 1024, 8, 4, 16)]),
    few=[_WGMMA_F16[at] for at in (2, 8, 9, 10, 17, 19)],  # each kind of tile, the smallest
    activated=_activated(_WGMMA_F16),
    tokens=Case(0, 200, 384, 3, 2, 16),
    sized=True,
)
PIECES = [_wgmma_f16(4, 3, 1, 2, 0, 2), _wgmma_f16(8, 2, 2, 4, 3, 3)]
"""Configurations of ``wgmma_f16`` that share what is left over, of one tile and of two."""

_WGMMA_FP8 = [
    Case(60, 328, 512, 6, 2, 32, _wgmma_fp8(4, 4, 6)),
    Case(200, 520, 1024, 8, 2, 64, _wgmma_fp8(6, 4, 5)),
    Case(300, 800, 512, 40, 4, 8, _wgmma_fp8(4, 6, 8)),
    Case(150, 203, 1536, 5, 3, 20, _wgmma_fp8(6, 3, 4)),
    Case(30, 64, 512, 8, 4, 16, _wgmma_fp8(4, 3, 5)),
    Case(600, 328, 1024, 5, 4, 128, _wgmma_fp8(6, 5, 6)),
]
WGMMA_FP8 = Subject(
    "wgmma_fp8",
    ("sm_90a",),
    alone([*_WGMMA_FP8, Case(30, 640, 1024, 8, 4, 16)]),
    few=[_WGMMA_FP8[at] for at in (0, 3, 4)],
    activated=_activated(_WGMMA_FP8),
    tokens=Case(0, 200, 512, 3, 2, 16),
    dtypes=("bf16",),
    accumulation_error=wgmma_fp8.ACCUMULATION_ERROR,
    sized=True,
)

# Groups' rescaled operands, over routed rows. N: whole tiles, of 128 rows of w, and parts; experts
# of less than a tile and of several, and some without a block.
_RESCALED = [
    Case(1, 32, 32, 1, 1, 16),
    Case(300, 160, 352, 2, 2, 128),
    Case(70, 96, 96, 8, 3, 16),
    Case(150, 448, 1056, 4, 3, 64),
    Case(513, 128, 224, 1, 1, 64),
    Case(130, 416, 128, 40, 8, 64),
    Case(700, 512, 256, 3, 5, 128),
    Case(90, 1056, 2880, 6, 4, 16, {"ring_mib": 16}),
    Case(260, 96, 608, 5, 6, 12),
]
RESCALED = Subject(
    "rescaled",
    ("sm_90a",),
    alone(
        case._replace(config=case.config or {"ring_mib": (16, 64)[at % 2]})
        for at, case in enumerate(_RESCALED)
    ),
    few=[_RESCALED[at] for at in (1, 2, 3)],
    activated=[
        (
            _RESCALED[at % len(_RESCALED)]._replace(N=64 * (1 + at % 9)),
            activation,
            layout,
        )
        for at, (activation, layout) in enumerate(
            [*product([*ACTIVATION_CODES][1:], LAYOUTS), *product(("silu", "swiglu_oai"), LAYOUTS)]
        )
    ],
    tokens=Case(0, 96, 352, 3, 2, 16),
    dtypes=("bf16", "fp16"),
    accumulation_error=rescaled.ACCUMULATION_ERROR,
    rescaling_error=rescaled.RESCALING_ERROR,
    weighted=False,
    strays=False,
    sized=True,
)

IN_PLACE = replace(
    RESCALED,
    name="rescaled_in_place",
    groups=alone(case._replace(config=None) for case in _RESCALED),
    few=[case._replace(config=None) for case in RESCALED.few],
    activated=[(case._replace(config=None), *rest) for case, *rest in RESCALED.activated],
)

# -- fallbacks -------------------------------------------------------------------------------------
_TORCH = [
    *_drawn({}, "fp32", "torch", 8, 1, 32, 0),
    *_drawn({}, "bf16", "torch too", 8, 1, 32, 1),
    *_drawn({}, "fp16", "torch as well", 8, 1, 32, 1),
    *(Case(M, 70, 96, 5, top_k, 32, {}, "fp32", a_div) for M, top_k, a_div in _MFMA_MANY),
]
TORCH = Subject(
    "reference",
    ("torch",),
    [_TORCH],
    few=_TORCH[:4],
    activated=_activated(_TORCH[:16]),
    tokens=Case(0, 40, 96, 3, 2, 16, {}, "fp32"),
    backend="torch",
)

SUBJECTS = (MFMA, GROUPED, MMA_RING, WGMMA_F16, WGMMA_FP8, RESCALED, IN_PLACE, TORCH)
