"""What a quantisation asks for, and what its kernels are told: the same for all of them."""

from __future__ import annotations

from dataclasses import dataclass

from aiter_mx.kernels.spec import (
    OUT_DTYPES,
    pointers,
    require,
)
from aiter_mx.layouts import LAYOUTS
from aiter_mx.numerics import BLOCK, MODES, PAYLOADS

POINTERS = (
    *pointers("r", "x", "offsets"),
    *pointers("w", "rows", "row_scales", "columns", "column_scales", "padded_offsets"),
)
"""The pointers of every kernel; those of outputs that are not asked for are null."""

GROUP_ROWS = 128  # a group is padded to a multiple of so many rows

_CHOICES = {
    "dtype": OUT_DTYPES,
    "to": ("rows", "columns", "both"),
    "format": PAYLOADS,
    "mode": MODES,
    "block": ("1x32", "32x32"),
    "layout": tuple(LAYOUTS),
    "offsets": ("int32", "int64"),
    "padded": ("both", "columns"),
}


@dataclass(frozen=True)
class QuantizeProblem:
    """Payloads and scales of matrices ``x[M, N]``, of which some may lie behind each other.

    Attributes:
        M: rows of a matrix.
        N: its columns, a multiple of 32.
        dtype: of x: ``bf16``, ``fp16`` or ``fp32``.
        to: ``rows`` (scales for 32 elements of a row), ``columns`` (of a column; the payload is
            transposed) or ``both``; for columns M is a multiple of 32, or there are groups.
        matrices: how many there are.
        groups: 0, or how many groups the rows of the one matrix are in, each of which is padded.
        format: of the payload: ``e4m3``, ``e2m1`` or ``e5m2``.
        mode: of the scales: ``rceil``, ``floor`` or ``even``.
        block: ``1x32``, or ``32x32`` for scales that 32 rows share too; then M is a multiple of 32.
        layout: of the scales, as aiter_mx.layouts has them.
        offsets: dtype of the groups' offsets: ``int32`` or ``int64``.
        padded: which outputs have groups padded: ``both``, or ``columns`` where rows stay as they
            are in x, and those of no group are not written; only with groups, row-major scales and
            ``to`` both.
        carveout_bytes: of shared memory that an SM needs for the launch behind this one, which
            begins before it ends; 0 where there is none.

    Raises:
        ValueError: a field is none of the above, or they do not go together.
    """

    M: int
    N: int
    dtype: str = "bf16"
    to: str = "rows"
    matrices: int = 1
    groups: int = 0
    format: str = "e4m3"
    mode: str = "rceil"
    block: str = "1x32"
    layout: str = "row_major"
    offsets: str = "int64"
    padded: str = "both"
    carveout_bytes: int = 0

    def __post_init__(self) -> None:
        require(self, {"M": 0, "N": 0, "matrices": 0, "groups": 0}, _CHOICES)
        if self.N % BLOCK:
            raise ValueError(f"N must be a multiple of {BLOCK}, got N={self.N}")
        if self.groups and (self.matrices != 1 or self.block != "1x32"):
            raise ValueError("groups are of the rows of one matrix, with blocks of 1x32")
        if self.padded == "columns" and (
            not self.groups or self.to != "both" or self.layout != "row_major"
        ):
            raise ValueError("rows that stay as they are: of groups, both ways, row-major scales")
        if self.M % BLOCK and not self.groups and (self.to != "rows" or self.block != "1x32"):
            raise ValueError(f"M must be a multiple of {BLOCK} here, got M={self.M}")

    @property
    def out_rows(self) -> int:
        """Rows of each output matrix: M, or with groups the most that padding can make of it."""
        if not self.groups:
            return self.M
        most = self.M + self.groups * (GROUP_ROWS - 1)
        return most // GROUP_ROWS * GROUP_ROWS

    @property
    def rows_along(self) -> int:
        """Rows of the output that has blocks along rows."""
        return self.M if self.padded == "columns" else self.out_rows


KEY = ("M", "N", "dtype", "to", "matrices", "groups", "format", "block")
