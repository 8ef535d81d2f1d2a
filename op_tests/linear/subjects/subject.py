"""What a subject of the linear's conformance suite says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, product
from typing import NamedTuple

from aiter_mx.kernels.spec import Config
from op_tests import conformance
from op_tests.linear.operands import Operands
from op_tests.operands import Exponents


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


def cases(params: Sequence[str], table: str, cu_num: int | None = None) -> list[Case]:
    """The cases of each line of a table: M, N, K, then the values of the kernel's parameters, or
    none where it chooses them; one for each combination where commas are between values.

    Args:
        params: the kernel's parameters.
        table: the lines; what follows a ``#`` is a comment.
        cu_num: of every case.
    """
    lines = (line.partition("#")[0].split() for line in table.splitlines())
    rows = (product(*(map(int, cell.split(",")) for cell in line)) for line in lines if line)
    return [
        Case(M, N, K, dict(zip(params, values, strict=True)) if values else None, cu_num)
        for M, N, K, *values in chain.from_iterable(rows)
    ]


@dataclass(frozen=True)
class Subject(conformance.Subject):
    """A kernel of the linear, and what each property is tried with.

    Attributes:
        groups: cases of any shape and configuration; those of a group share what is compiled.
        simulated: those of ``groups`` that the simulator takes, where some differ in nothing that
            compiles or runs there; all of them where there are none.
        few: cases for properties that draw operands of many kinds.
        dtypes: the results that the kernel makes; the first shows most of its errors.
        least_rows, most_rows: M of the envelope, or of what its end is like.
        of_rows: the configuration for each M.
        width: N and K for every M.
        with_bias: cases for every dtype of bias and result.
        accumulation_error: where sums have fewer bits than fp32's.
        multiplied: what it multiplies in place of operands, where it rounds them.
        rescaling_error: what an element of them changes by, of the largest of its block.
        exponents: more ranges of scales to draw, where how near they are decides what is computed.
        underflow: what a block of 32 products may lose at the lower end of fp32.
        repeats: M, N, K and configuration of a thousand launches on two streams.
        chained: M of chains of overlapping launches; none where launches do not overlap.
        chained_in: likewise, and a configuration for 1536 features and as many k.
        beyond_4_gib: M and K of a launch whose weights take more than 4 GiB.
    """

    op: str = field(default="linear", kw_only=True)
    groups: Sequence[Sequence[Case]]
    few: Sequence[Case]
    most_rows: int
    with_bias: Sequence[Case]
    simulated: Sequence[Sequence[Case]] = ()
    least_rows: int = 1
    dtypes: tuple[str, ...] = ("fp32", "bf16", "fp16")
    of_rows: Callable[[int], Config | None] = lambda M: None
    width: tuple[int, int] = (130, 1120)
    accumulation_error: float | None = None
    multiplied: Callable[[Operands], Operands] | None = None
    rescaling_error: float = 0.0
    exponents: Sequence[Exponents] = ()
    underflow: float = 2.0**-126
    repeats: Sequence[tuple[int, int, int, Config | None]] = ()
    chained: Sequence[int] = ()
    chained_in: Sequence[tuple[int, Config]] = ()
    beyond_4_gib: Sequence[tuple[int, int]] = ()
