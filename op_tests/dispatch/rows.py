"""Rows and tables for tests of dispatch."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Protocol

from aiter_mx.dispatch.cells import format_config
from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.registry import find_kernel
from aiter_mx.target import hardware

GFX950 = hardware("gfx950")
PROBLEM = LinearProblem(M=3, N=1000, K=96, out_dtype="bf16")  # in no shipped table


def gemv_row(**changes: object) -> dict[str, object]:
    """A legal row that chooses gemv for PROBLEM, with some cells changed."""
    config = find_kernel("linear", "gfx950", "hip", "gemv").configure(GFX950, PROBLEM)
    row: dict[str, object] = {"gfx": "gfx950", "cu_num": 256, "op": "linear"}
    row |= {"M": 3, "N": 1000, "K": 96, "out_dtype": "bf16", "backend": "hip", "kernel": "gemv"}
    named = {name: changes.pop(name, value) for name, value in config.items()}
    row["config"] = format_config({name: value for name, value in named.items() if value != ""})
    return row | {"us": 2.5, "triton_us": 9.5, "source": "measured"} | changes


def write_table(path: Path, *rows: dict[str, object]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


class UseTable(Protocol):
    """Writes rows to a table of its own, the only one that ``AITER_MX_CONFIG`` names then."""

    def __call__(self, *rows: dict[str, object]) -> Path: ...
