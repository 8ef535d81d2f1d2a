"""What finds the runs of rows of one group in a layout that names each row's: csrc/grouped/runs.cu.

A run is rows of one group next to each other; a group may have several. ``starts [R]`` and
``ends [2 R + 1]`` are what a grouped product of the layout ``runs`` takes
(aiter_mx/kernels/grouped_gemm/problem.py). Where all runs begin at multiples of ``run_rows`` there
is room for all; where any does not, for as many as there are groups, and those after them are lost:
``lost [1]`` is the first row of these, or M. Rows of the result that no product is written to are
filled: those of no group with 0, those of lost runs with NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from aiter_mx.kernels.declare import declare
from aiter_mx.kernels.grouped_gemm.problem import room_for_runs
from aiter_mx.kernels.spec import (
    MAX_INT,
    OUT_DTYPES,
    Arg,
    Config,
    Geometry,
    numbers,
    pointers,
    reference,
    require,
)
from aiter_mx.numerics import DTYPE_BYTES
from aiter_mx.target import Target

_THREADS, _ROWS = 1024, 8  # of a workgroup, and of a thread
_NANS = {"fp32": 0x7FC00000, "bf16": 0x7FC07FC0, "fp16": 0x7E007E00}
"""Of 32 bits."""


@dataclass(frozen=True)
class GroupRunsProblem:
    """The runs of a layout, and filling of rows of no group, as this module's docstring says.

    Attributes:
        M: rows.
        N: elements of a row of the result.
        G: groups.
        run_rows: rows at multiples of which runs begin, unless they are no more than groups.
        out_dtype: of the result.

    Raises:
        ValueError: a field is none of the above.
    """

    M: int
    N: int
    G: int
    run_rows: int = 128
    out_dtype: str = "bf16"

    def __post_init__(self) -> None:
        require(self, {"M": 0, "N": 0, "G": 1, "run_rows": 1}, {"out_dtype": OUT_DTYPES})

    @property
    def most_runs(self) -> int:
        """How many there is room for."""
        return room_for_runs(self.M, self.G, self.run_rows)


KEY = ("M", "N", "G")


def _refusal(target: Target, problem: GroupRunsProblem) -> str | None:
    if max(problem.M, problem.G, problem.run_rows) >= MAX_INT:
        return f"rows and groups are counted with 31 bits, got M={problem.M} and G={problem.G}"
    return None


def _waves(target: Target) -> int:
    return _THREADS // target.wave_size


def _defines(target: Target, problem: GroupRunsProblem, config: Config) -> Mapping[str, int]:
    return {"MX_WAVES": _waves(target), "MX_ROWS": _ROWS}


def _geometry(target: Target, problem: GroupRunsProblem, config: Config) -> Geometry:
    filling = -(-problem.M // (_waves(target) * _ROWS))
    return Geometry(
        grid=(1 + filling, 1, 1), block=(_THREADS, 1, 1), overlaps=target.arch == "sm_90a"
    )


def _scalars(target: Target, problem: GroupRunsProblem, config: Config) -> tuple[int, ...]:
    row_bytes = problem.N * DTYPE_BYTES[problem.out_dtype]
    sizes = (problem.G, problem.most_runs, problem.run_rows)
    return (row_bytes, problem.M, *sizes, _NANS[problem.out_dtype])


PROBLEM = GroupRunsProblem

KERNELS = (
    declare(
        "group_runs",
        "scan",
        {"gfx950": "grouped/runs.cu", "sm_90a": "grouped/runs.cu"},
        args=(
            Arg("layout", "pointer", "r"),  # i32 [M]
            *pointers("w", "y", "starts", "ends", "lost"),
            Arg("row_bytes", "i64"),
            *numbers("i32", "M", "G", "most_runs", "run_rows", "nan"),
        ),
        defines=_defines,
        geometry=_geometry,
        scalars=_scalars,
        refusal=_refusal,
    ),
    reference("group_runs"),
)
