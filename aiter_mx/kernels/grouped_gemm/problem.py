"""What a grouped GEMM asks for, and what its kernels are told.

    out[m] = a[m] @ b[g].T + bias[g]   for each group g and each row m of it

A kernel must keep to this:

- ``jagged``: group g is the rows ``starts[g] .. ends[g]`` of a. Where ``starts`` is null a group
  starts where the one before it ends, the first at row 0; where ``ends`` is null too, there is one
  group, of all rows.
- ``masked``: group g is the first ``ends[g]`` rows of the M / G rows from ``g * M / G``.
- ``runs``: a group may have several ranges of rows. ``starts`` has R places, R being ``most_runs``,
  and range r is the rows ``starts[r] .. ends[r]``. ``ends`` has 2 R + 1: after the ends of ranges,
  how many of them there are, and then the group of each. All are 4 bytes.
- ``unpadded``: group g has the rows of a from ``starts[g]`` on, and is the rows
  ``ends[g] .. ends[g + 1]`` of out, which has ``out_rows`` rows.
- Both arrays are on the device, of 4 or 8 bytes an index, and no one reads them on the host. Groups
  may be empty, of any length, in any order and with rows between them, but do not overlap. A kernel
  cuts every bound to 0 .. M (``masked``: the end to M / G; ``unpadded``: one of out to its rows,
  and a group to what is left of a), so that no index whatever leads outside a or out; a group that
  ends before it starts is empty.
- Rows of out outside every group are not written.

Scales are row-major, or shuffled: those of a as all of its rows, ``[M, K / 32]``, whatever the
groups, or ``masked`` as G matrices of M / G rows each; those of b as G matrices ``[N, K / 32]``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from aiter_mx.kernels.spec import (
    BIAS_DTYPES,
    DTYPE_CODES,
    OUT_DTYPES,
    Arg,
    Key,
    numbers,
    require,
    require_blocks,
)
from aiter_mx.layouts import LAYOUTS

ARGS = (
    Arg("xq", "pointer", "r"),  # a, e4m3 or e5m2 [M, K]
    Arg("xs", "pointer", "r"),  # e8m0 [M, K / 32]
    Arg("wq", "pointer", "r"),  # b, e4m3 [G, N, K]
    Arg("ws", "pointer", "r"),  # e8m0 [G, N, K / 32]
    Arg("bias", "pointer", "r"),  # [G, N], or null
    Arg("y", "pointer", "w"),  # out [M, N]
    Arg("starts", "pointer", "r"),  # [G], or null
    Arg("ends", "pointer", "r"),  # [G], or null
    *numbers("i64", "M", "N", "K", "G"),
    Arg("layout", "i32"),  # LAYOUT_CODES; of unpadded that and the rows of out, of runs -R
    Arg("index_bytes", "i32"),  # of starts and ends, 4 or 8
    Arg("bias_kind", "i32"),  # code of the bias's dtype
)
"""The arguments of every grouped kernel; up to y they are those of a linear, which is one group.
A kernel that has a workspace takes its pointer after ends; it may add scalars of its own."""

LAYOUT_CODES = {"jagged": 0, "masked": 1, "unpadded": 2, "runs": 0}
MAX_OUT_ROWS = (1 << 31) - 4  # whose sum with a code has 31 bits
INDEX_BYTES = {"i32": 4, "i64": 8}
A_FORMATS = ("e4m3", "e5m2")


_LEAST = {"M": 0, "N": 0, "G": 1, "expected": 0, "run_rows": 0}
KNOWN_OF_GROUPS: dict[str, tuple[str, ...]] = {
    "out_dtype": OUT_DTYPES,
    "layout": ("jagged", "masked", "runs"),
    "index": tuple(INDEX_BYTES),
}


def require_groups(problem: Any, known: Mapping[str, tuple[str, ...]] = KNOWN_OF_GROUPS) -> None:
    """Raise ValueError unless fields of a grouped product have such values as are known."""
    require(problem, _LEAST, known)
    of_runs = problem.layout == "runs"
    if of_runs:
        require(problem, {"run_rows": 1}, {"index": ("i32",)})
    if problem.run_rows and not of_runs:
        raise ValueError(f"run_rows must be 0 unless the layout is runs, got {problem.run_rows}")
    require_blocks("K", problem.K)
    if problem.layout == "masked" and problem.M % problem.G:
        raise ValueError(f"masked groups have M / G rows each, got M={problem.M} and G={problem.G}")


def room_for_runs(rows: int, groups: int, run_rows: int) -> int:
    """How many ranges of rows there is room for, where they begin at multiples of ``run_rows`` or
    are no more than groups; 0 for ``run_rows`` of 0."""
    return max(groups, -(-rows // run_rows)) if run_rows else 0


_KNOWN = KNOWN_OF_GROUPS | {
    "bias": BIAS_DTYPES,
    "layout": tuple(LAYOUT_CODES),
    "a_scale_layout": tuple(LAYOUTS),
    "b_scale_layout": tuple(LAYOUTS),
    "a_format": A_FORMATS,
}


@dataclass(frozen=True)
class GroupedGemmProblem:
    """A grouped GEMM, as this module's docstring defines it.

    Attributes:
        M: rows of a, whether in a group or not.
        N: output features.
        K: elements of the reduction, a multiple of 32.
        G: groups.
        out_dtype: ``bf16``, ``fp16`` or ``fp32``.
        bias: dtype of the bias, one of those or ``none``.
        layout: ``jagged``, ``masked``, ``runs`` or ``unpadded``.
        index: dtype of the groups' bounds, ``i32`` or ``i64``.
        expected: rows that a group is likely to have, or 0 for M / G. It may choose a kernel's
            tiles, and never bears on results.
        a_scale_layout: of a's scales, as aiter_mx.layouts has them.
        b_scale_layout: of b's.
        a_format: of a's payload, ``e4m3``, or ``e5m2`` as gradients have; b is e4m3.
        out_rows: rows of out where the layout is ``unpadded``, else 0.
        run_rows: rows at multiples of which ranges begin where the layout is ``runs``, unless there
            are no more of them than groups; else 0.

    Raises:
        ValueError: a field is none of the above.
    """

    M: int
    N: int
    K: int
    G: int
    out_dtype: str = "bf16"
    bias: str = "none"
    layout: str = "jagged"
    index: str = "i32"
    expected: int = 0
    a_scale_layout: str = "row_major"
    b_scale_layout: str = "row_major"
    a_format: str = "e4m3"
    out_rows: int = 0
    run_rows: int = 0

    def __post_init__(self) -> None:
        require_groups(self, _KNOWN)
        if not 0 <= self.out_rows <= (MAX_OUT_ROWS if self.unpads else 0):
            raise ValueError(f"a result of {self.layout} groups cannot have {self.out_rows} rows")

    @property
    def unpads(self) -> bool:
        """Whether groups lie otherwise in out than in a."""
        return self.layout == "unpadded"

    @property
    def rows_of_out(self) -> int:
        """Rows of out."""
        return self.out_rows if self.unpads else self.M

    @property
    def most_runs(self) -> int:
        """Ranges of rows that there is room for where the layout is ``runs``, else 0."""
        return room_for_runs(self.M, self.G, self.run_rows)

    @property
    def usual_rows(self) -> int:
        """Rows of a group to choose kernels and tiles by."""
        return self.expected or -(-self.M // self.G)

    def as_expected(self) -> GroupedGemmProblem:
        """This one with room for no more rows than are likely."""
        return replace(self, M=min(self.M, self.expected * self.G), expected=0)

    def with_scales_in(self, *layouts: str) -> GroupedGemmProblem:
        """This one, but with row-major scales where they are in no such layout."""

        def kept(layout: str) -> str:
            return layout if layout in layouts else "row_major"

        return replace(
            self,
            a_scale_layout=kept(self.a_scale_layout),
            b_scale_layout=kept(self.b_scale_layout),
        )

    def most_tiles(self, rows: int) -> int:
        """The most tiles of ``rows`` rows that the groups can have together."""
        if self.layout == "masked":
            return self.G * -(-(self.M // self.G) // rows)
        # A group of full tiles and one row more has the most for its rows.
        with_one_more = min(self.G, self.M)
        most = with_one_more + (self.M - with_one_more) // rows
        if self.layout != "runs":
            return most
        return max(most, -(-self.M // self.run_rows) * -(-self.run_rows // rows))


KEY = ("M", "N", "K", "G", "out_dtype")


def stand_ins(key: Key) -> tuple[Key, ...]:
    """The next power of two rows, and bf16, which is what tables are tuned for."""
    M, N, K, G, out_dtype = key
    rounded = 1 << (M - 1).bit_length() if M else 0
    return ((rounded, N, K, G, out_dtype), (M, N, K, G, "bf16"), (rounded, N, K, G, "bf16"))


def scalars(problem: GroupedGemmProblem) -> tuple[int, ...]:
    """The values of ``ARGS``'s scalars."""
    return (
        problem.M,
        problem.N,
        problem.K,
        problem.G,
        LAYOUT_CODES[problem.layout] + problem.out_rows - problem.most_runs,
        INDEX_BYTES[problem.index],
        DTYPE_CODES[problem.bias],
    )


def unpad_defines(problem: GroupedGemmProblem) -> dict[str, int]:
    """What a kernel is told of where groups lie in out."""
    return {"MX_UNPAD": 1} if problem.unpads else {}
