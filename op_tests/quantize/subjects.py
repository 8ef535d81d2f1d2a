"""The kernels of ``quantize`` that the conformance suite tries, and what it tries them with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from aiter_mx.kernels.quantize import QuantizeProblem
from aiter_mx.kernels.spec import Config
from op_tests import conformance
from op_tests.conformance import named


@dataclass(frozen=True)
class Subject(conformance.Subject):
    """A kernel of ``quantize``, and what each property is tried with.

    Attributes:
        variants: problems of every dtype, format, mode, destination, block and layout; their sizes
            are not looked at.
        shapes: matrices, M and N for each of these.
        grouped: a problem of groups of rows for each format.
        configs: other configurations, and a GPU's own.
        wide: shapes for these.
        configured: variants for these.
    """

    op: str = field(default="quantize", kw_only=True)
    variants: Sequence[QuantizeProblem]
    shapes: Sequence[tuple[int, int, int]]
    grouped: Sequence[QuantizeProblem]
    configs: Sequence[Config]
    on_gpu: Sequence[Config]
    wide: Sequence[tuple[int, int, int]]
    configured: Sequence[QuantizeProblem]


def name_of(problem: QuantizeProblem) -> str:
    """A test's name for a variant: what differs from the defaults."""
    defaults = QuantizeProblem(problem.M, problem.N)
    changed = [str(v) for k, v in vars(problem).items() if v != getattr(defaults, k)]
    return "-".join(changed) or "default"


# Between them every dtype, format, mode, destination, block and layout, in few code objects.
ROWS_VARIANTS = (
    QuantizeProblem(1, 32, "bf16"),
    QuantizeProblem(1, 32, "fp16", mode="floor"),
    QuantizeProblem(1, 32, "fp32", mode="floor"),
    QuantizeProblem(1, 32, "fp32", format="e2m1"),
    QuantizeProblem(1, 32, "bf16", mode="even"),
    QuantizeProblem(1, 32, "fp16", mode="floor", format="e5m2"),
)
TILES_VARIANTS = (
    QuantizeProblem(32, 32, "bf16", "both"),
    QuantizeProblem(32, 32, "fp16", "both", mode="floor", layout="16x4"),
    QuantizeProblem(32, 32, "fp32", "both", mode="floor", format="e2m1", layout="32_4_4"),
    QuantizeProblem(32, 32, "fp32", "columns", layout="256x8"),
    QuantizeProblem(32, 32, "bf16", "both", block="32x32", layout="32_8"),
    QuantizeProblem(32, 32, "bf16", "both", format="e2m1"),
    QuantizeProblem(32, 32, "bf16", "both", mode="even", format="e2m1"),
    QuantizeProblem(32, 32, "fp16", "both", mode="floor", format="e2m1"),
    QuantizeProblem(32, 32, "bf16", "both", format="e5m2"),
    QuantizeProblem(32, 32, "fp32", "both", mode="even", format="e5m2"),
)
STAGED_VARIANTS = tuple(
    dict.fromkeys(replace(p, layout="row_major") for p in TILES_VARIANTS if p.to == "both")
)

_rows = named("waves", "steps", "resident")
_tiles = named("rows", "resident", "steps", "cluster")
_staged = named("resident", "lines")
_ROWS_SHAPES = ((1, 32), (3, 96), (7, 992), (64, 64), (5, 4160), (33, 1056), (130, 288))

ROWS = Subject(
    "rows",
    ("sim", "gfx950", "sm_90a"),
    ROWS_VARIANTS,
    [(1, M, N) for M, N in _ROWS_SHAPES],
    grouped=[QuantizeProblem(1, 32, "bf16", groups=1)],
    configs=[_rows(1, 16, 1), _rows(2, 2, 4)],
    on_gpu=[],
    wide=[(1, 1, 96), (1, 129, 1312)],
    configured=ROWS_VARIANTS[:1],
)
TILES = Subject(
    "tiles",
    ("sim", "gfx950", "sm_90a"),
    # Rows alone, whose number is no multiple of a tile, have shuffled scales.
    (*TILES_VARIANTS, QuantizeProblem(1, 32, layout="16x4")),
    [(1, 32, 32), (1, 96, 160), (3, 64, 96), (1, 288, 416), (2, 160, 32), (1, 32, 1120)],
    grouped=[
        QuantizeProblem(1, 32, "bf16", "both", groups=1, padded=padded)
        for padded in ("both", "columns")
    ],
    configs=[_tiles(128, 2, 2, 1), _tiles(128, 2, 8, 1)],
    on_gpu=[_tiles(128, 2, 1, 8), _tiles(128, 2, 2, 2), _tiles(128, 2, 8, 8)],
    wide=[(1, 1440, 96), (2, 160, 1184), (1, 1056, 1056)],
    configured=[
        QuantizeProblem(32, 32, dtype, "both", block=block)
        for dtype in ("bf16", "fp32")
        for block in ("1x32", "32x32")
    ],
)
STAGED = Subject(
    "staged",
    ("sm_90a",),
    STAGED_VARIANTS,
    # Lines of scales of several waves, and of bytes that are no whole words.
    [
        *((1, 32, 32), (3, 288, 416), (1, 1440, 96), (2, 160, 1184), (2, 256, 384)),
        *((1, 4256, 96), (1, 64, 4192)),
    ],
    grouped=[
        QuantizeProblem(1, 32, "bf16", "both", groups=1, format=format)
        for format in ("e4m3", "e2m1")
    ]
    + [
        QuantizeProblem(1, 32, "bf16", "both", groups=1, padded="columns", format=format)
        for format in ("e4m3", "e5m2")
    ],
    configs=[],
    on_gpu=[_staged(3, 4), _staged(3, 8)],
    wide=[(3, 288, 416), (1, 4256, 96), (1, 64, 4192)],
    configured=STAGED_VARIANTS,
)
SUBJECTS = (ROWS, TILES, STAGED)
