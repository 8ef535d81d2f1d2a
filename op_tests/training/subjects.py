"""The kernels of ``grouped_wgrad`` that the conformance suite tries, and with what it does."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from aiter_mx.kernels.spec import Config
from op_tests import conformance
from op_tests.conformance import DTYPES, INDICES, alone, named

config_of = named("tile_m", "tile_n", "swath", "xcds")


@dataclass(frozen=True)
class Shape:
    """A gradient ``[len(lens), N, K]``, and how a kernel is told to compute it.

    Attributes:
        N, K: rows of grad and of x.
        lens: columns of each group.
        config: the kernel's, or None for its own choice.
        dtype: of the result.
        adds: whether it is added to what is there.
        cu_num: compute units to divide the work among, or None for the GPU's.
        index: dtype of the groups' bounds.
        room: columns after the last group.
    """

    N: int
    K: int
    lens: Sequence[int]
    config: Config | None = None
    dtype: str = "bf16"
    adds: bool = False
    cu_num: int | None = None
    index: str = "i32"
    room: int = 0


@dataclass(frozen=True)
class Subject(conformance.Subject):
    """A kernel of ``grouped_wgrad``, and what each property is tried with.

    Attributes:
        swept: shapes of any kind; those of one entry share what is compiled.
        few: for properties that draw operands of many kinds, each of two groups, in fp32.
        underflow: what a block of 32 products may lose at the lower end of fp32.
    """

    op: str = field(default="grouped_wgrad", kw_only=True)
    swept: Sequence[Sequence[Shape]]
    few: Sequence[Shape]
    underflow: float = 2.0**-126


EDGES = (0, 0, 1, 15, 16, 17, 31, 33, 64, 97, 127, 128, 129, 200, 256, 259, 400)
TILES = ((256, 256), (128, 256), (128, 128), (64, 128), (32, 256))
WAYS = (("bf16", False), ("fp32", True))  # the result's dtype, and whether it is added to another


def _any_of(draw: random.Random, sides: tuple[int, int], config: Config | None, at: int) -> Shape:
    lens = [draw.choice(EDGES) for _ in range(draw.randint(1, 5))]
    N, K = (32 * draw.choice([1, 2, 3, side // 32, side // 32 + 1]) for side in sides)
    dtype, adds = WAYS[at % 2]
    cus, index = draw.choice([2, 3, 8, 256]), draw.choice([*INDICES])
    return Shape(N, K, lens, config, dtype, adds, cus, index, draw.choice([0, 128]))


def _swept_by_tile(tile: tuple[int, int]) -> list[Shape]:
    """Tiles are stored and added in turn, as either compiles anew; the largest in both ways, in
    fp32, as with ``few``."""
    draw, config = random.Random(str(tile)), config_of(*tile, 4, 8)
    shapes = [_any_of(draw, tile, config, at) for at in range(4)]
    if tile == TILES[0]:
        return [replace(shape, dtype="fp32") for shape in shapes]
    dtype, adds = WAYS[TILES.index(tile) % 2]
    return [replace(shape, dtype=dtype, adds=adds) for shape in shapes]


def _swept_on_hopper() -> Iterator[Shape]:
    draw = random.Random(0)
    for at in range(40):
        drawn = _any_of(draw, draw.choice([(64, 64), (256, 128), (320, 320), (512, 448)]), None, at)
        yield replace(drawn, dtype=draw.choice([*DTYPES]), adds=bool(draw.randrange(2)))


PERSISTENT_GFX950 = Subject(
    "persistent",
    ("sim", "gfx950"),
    [_swept_by_tile(tile) for tile in TILES],
    few=[
        Shape(64, 96, (37, 130), config_of(64, 128, 4, 8), "fp32"),
        Shape(288, 64, (33, 128), config_of(256, 256, 4, 8), "fp32"),
    ],
    underflow=2.0**-149,
)
PERSISTENT_SM90 = Subject(
    "persistent",
    ("sm_90a",),
    [
        [*_swept_on_hopper()],
        # Rows of either operand beyond whole tiles, in tiles of one to four slabs.
        *alone(
            Shape(N, K, (640, 0, 33, 1000, 129, 384), None, "fp32")
            for N, K in ((64, 608), (320, 128), (416, 384), (448, 320), (608, 352), (1056, 448))
        ),
        # More groups than threads, few of which have columns.
        [Shape(96, 160, [random.Random(g).choice((0, 0, 0, 1, 65)) for g in range(700)])],
        # One tells more words than a warp has lanes, and clusters stay through many tiles.
        [Shape(32, 64, (1, 70_000, 0, 200)), Shape(8192, 4096, (30, 200), None, "bf16")],
    ],
    few=[
        Shape(96, 160, (300, 37), None, "fp32"),
        Shape(608, 64, (33, 1056), None, "fp32"),
        Shape(64, 352, (257, 448), None, "fp32"),
    ],
)
TORCH = Subject(
    "reference",
    ("torch",),
    [[_any_of(random.Random(at), (64, 64), {}, at) for at in range(8)]],
    few=[Shape(32, 64, (37, 130), {}, "fp32")],
    backend="torch",
    underflow=0.0,
)
SUBJECTS = (PERSISTENT_GFX950, PERSISTENT_SM90, TORCH)
