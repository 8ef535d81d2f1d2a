"""What a grouped GEMM whose scales are fp32, one for each 128 k, asks for: DeepGEMM's recipe.

    out[m] = sum over s of (a[m, s] @ b[g, :, s].T) * a_scale[m, s] * b_scale[g, n // 128, s]

for each group g, each row m of it, and each step s of 128 k, the last of which may be shorter.
Groups are those of ``aiter_mx.kernels.grouped_gemm.problem``, with the same rules.

Scales may be any value. A kernel multiplies what a step sums up to by both of its scales so that
nothing is lost where their product alone is outside of fp32. They have any strides, counted in
elements.
"""

from __future__ import annotations

from dataclasses import dataclass

from aiter_mx.kernels.grouped_gemm.problem import (
    INDEX_BYTES,
    LAYOUT_CODES,
    GroupedGemmProblem,
    require_groups,
)
from aiter_mx.kernels.spec import Arg, numbers

COARSE = 128
"""k that a scale is for, and rows of b."""
ARGS = (
    Arg("xq", "pointer", "r"),  # a, e4m3 [M, K]
    Arg("xs", "pointer", "r"),  # fp32
    Arg("wq", "pointer", "r"),  # b, e4m3 [G, N, K]
    Arg("ws", "pointer", "r"),  # fp32
    Arg("y", "pointer", "w"),  # out [M, N]
    Arg("starts", "pointer", "r"),  # [G], or null
    Arg("ends", "pointer", "r"),  # [G]
    *numbers("i64", "M", "N", "K", "G"),
    *numbers("i32", "layout", "index_bytes"),
    *numbers("i64", "a_row", "a_step", "a_group", "b_block", "b_step", "b_group"),
)
"""The arguments of every kernel."""


@dataclass(frozen=True)
class PromotedGemmProblem:
    """A grouped GEMM with scales for 128 k, as this module's docstring defines it.

    Attributes:
        M, N, K, G, layout, index, expected, run_rows: as of ``GroupedGemmProblem``; N a multiple of
            32 too.
        out_dtype: ``bf16``, ``fp16`` or ``fp32``.
        a_row, a_step, a_group: elements from a scale of a to that of the next row, step, and
            group where groups are masked; all 0 for scales that are ``[M, K / 128]``.
        b_block, b_step, b_group: from a scale of b to that of the next 128 rows, step and group;
            all 0 for scales that are ``[G, N / 128, K / 128]``.

    Raises:
        ValueError: a field is none of the above.
    """

    M: int
    N: int
    K: int
    G: int
    out_dtype: str = "bf16"
    layout: str = "jagged"
    index: str = "i32"
    expected: int = 0
    a_row: int = 0
    a_step: int = 0
    a_group: int = 0
    b_block: int = 0
    b_step: int = 0
    b_group: int = 0
    run_rows: int = 0

    def __post_init__(self) -> None:
        require_groups(self)

    @property
    def groups(self) -> GroupedGemmProblem:
        """The product of the same groups with MX scales."""
        return GroupedGemmProblem(
            self.M,
            self.N,
            self.K,
            self.G,
            self.out_dtype,
            layout=self.layout,
            index=self.index,
            expected=self.expected,
            run_rows=self.run_rows,
        )

    @property
    def a_strides(self) -> tuple[int, int, int]:
        """Of a's scales: row, step, group."""
        given = (self.a_row, self.a_step, self.a_group)
        steps = -(-self.K // COARSE)
        return given if any(given) else (steps, 1, self.M // self.G * steps)

    @property
    def b_strides(self) -> tuple[int, int, int]:
        """Of b's scales: 128 rows, step, group."""
        given = (self.b_block, self.b_step, self.b_group)
        steps = -(-self.K // COARSE)
        return given if any(given) else (steps, 1, -(-self.N // COARSE) * steps)


KEY = ("M", "N", "K", "G", "out_dtype")


def scalars(problem: PromotedGemmProblem) -> tuple[int, ...]:
    """The values of ``ARGS``'s scalars."""
    return (
        problem.M,
        problem.N,
        problem.K,
        problem.G,
        LAYOUT_CODES[problem.layout] - problem.groups.most_runs,
        INDEX_BYTES[problem.index],
        *problem.a_strides,
        *problem.b_strides,
    )
