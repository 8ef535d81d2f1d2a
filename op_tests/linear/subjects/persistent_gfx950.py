"""The subject on gfx950 with large tiles whose workgroups share K.

What a tile's steps do otherwise is tried as a grouped GEMM (``op_tests/grouped``).
"""

from __future__ import annotations

import random

from aiter_mx.kernels.linear.persistent_choice_gfx950 import LEAST_SPLIT_K
from op_tests.conformance import named
from op_tests.linear.subjects.subject import Case, Subject

# A tile, what K / 32 is a multiple of, the result and the bias, which compile anew: between them
# whole steps and others, and sums in either kind of register.
_SWEPT = [
    ((128, 128), 4, "bf16", "none"),
    ((128, 128), 1, "fp16", "fp32"),
    ((160, 128), 4, "bf16", "bf16"),
    ((160, 128), 1, "fp32", "none"),
    ((160, 256), 2, "fp32", "bf16"),
]
_split = named("tile_m", "tile_n", "splits")
_SMALL = _split(128, 128, 2)


def _swept(tile: tuple[int, int], blocks: int, dtype: str, bias: str) -> list[Case]:
    draw, cases = random.Random(f"{tile} {blocks}"), []
    first = -(-LEAST_SPLIT_K // (32 * blocks))
    for _ in range(8):
        M = draw.choice([draw.randint(17, tile[0]), draw.randint(tile[0], 2 * tile[0])])
        N = 32 * draw.choice([1, 3, tile[1] // 32, tile[1] // 32 + 1])
        K = 32 * blocks * ((first + draw.randint(0, 20)) | (blocks < 4))  # of no more blocks
        cases.append(Case(M, N, K, _split(*tile, 2), None, dtype, bias))
    return cases


PERSISTENT_SPLIT_GFX950 = Subject(
    "persistent_split",
    ("sim", "gfx950"),
    [_swept(*swept) for swept in _SWEPT],
    few=[Case(37, 160, 672, _SMALL), Case(133, 160, 1312, _SMALL)],
    dtypes=("fp32",),
    least_rows=17,
    most_rows=24,
    of_rows=lambda M: _SMALL,
    width=(160, 672),
    with_bias=[Case(19, 160, 1120, _SMALL)],
    underflow=2.0**-149,
    repeats=[(300, 4096, 3584, _SMALL)],
)
