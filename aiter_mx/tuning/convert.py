"""Brings a table of an older layout up to date: its columns, and the names that kernels had."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from aiter_mx.dispatch.cells import format_config, parse_config
from aiter_mx.dispatch.tables import read_table
from aiter_mx.errors import TableError
from aiter_mx.kernels.registry import kernels_of
from aiter_mx.tuning.table import (
    Cells,
    Rows,
    key_of,
    order_of,
    read_csv,
    with_provenance,
    write_table,
)

RENAMED = {
    ("linear", "direct"): "mma_registers",
    ("linear", "outer"): "wgmma_fp8",
    ("linear", "mma"): "mma_ring",
    ("linear", "wide"): "wgmma_f16",
    ("moe_gemm", "stream"): "mma_ring",
    ("moe_gemm", "outer"): "wgmma_fp8",
    ("moe_gemm", "boxes"): "wgmma_f16",
    ("moe_gemm", "slabs"): "wgmma_f16",
}
"""What kernels are called now, by op and the name that they had."""
ADDED = {
    ("linear", "outer"): {"per_sm": 1},
    ("linear", "wgmma_fp8"): {"per_sm": 1},
    ("moe_gemm", "boxes"): {"tiles": 1},
    ("moe_gemm", "wgmma_f16"): {"tiles": 1},
    ("moe_gemm", "slabs"): {"groups": 2, "tiles": 2},
}
"""Parameters that kernels have gained, and what rows without them meant."""


@dataclass(frozen=True)
class Converted:
    """What became of a table.

    Attributes:
        rows: how many it has now.
        dropped: how many rows named each kernel that is gone, or has other parameters now.
        doubled: how many rows were slower than another for what is one shape now.
    """

    rows: int
    dropped: Counter[str]
    doubled: int


def convert(path: Path) -> Converted:
    """Rewrite a table as one of today's, with its provenance beside it.

    Raises:
        TableError: the file is no table of one op, or has a row that cannot be right.
    """
    if not path.exists():
        raise TableError(f"{path}: there is no such file")
    named = read_csv(path)
    ops = sorted(set(named["op"])) if "op" in named else []
    if len(ops) != 1:
        raise TableError(f"{path}: expected the rows of one op, got those of {ops or 'none'}")
    for column in ("gfx", "backend", "kernel"):
        if column not in named:
            raise TableError(f"{path}: column {column!r} is missing")
    op = ops[0]
    rows: Rows = {}
    dropped: Counter[str] = Counter()
    records: list[Cells] = with_provenance(path, op).to_dict("records")
    for line, row in enumerate(records, start=2):
        try:
            config, us = _config_today(op, row), _us(row)
            order_of(op, row)
        except ValueError as error:
            raise TableError(f"{path}:{line}: {error}") from error
        if config is None:
            dropped[row["kernel"]] += 1
            continue
        row |= {"kernel": _name_today(op, row), "config": config, f"{row['backend']}_us": ""}
        rival = rows.get(key_of(op, row))
        if rival is None or us < _us(rival):
            rows[key_of(op, row)] = row
    write_table(path, op, rows.values())
    count = sum(1 for _ in read_table(path))
    return Converted(count, dropped, len(records) - dropped.total() - count)


def _us(row: Cells) -> float:
    return float(row.get("us") or "inf")


def _name_today(op: str, row: Cells) -> str:
    known = {kernel.name for kernel in kernels_of(op) if kernel.is_for(row["gfx"])}
    name = row["kernel"]
    return name if name in known else RENAMED.get((op, name), name)


def _config_today(op: str, row: Cells) -> str | None:
    """The parameters of a row's kernel; None where no kernel of today takes them."""
    for kernel in kernels_of(op):
        if kernel.is_for(row["gfx"]) and (kernel.backend, kernel.name) == (
            row["backend"],
            _name_today(op, row),
        ):
            given = parse_config(row.get("config", "")) or {
                param.name: int(row[param.name]) for param in kernel.params if row.get(param.name)
            }
            given = {**ADDED.get((op, row["kernel"]), {}), **given}
            try:
                kernel.check_config(given)
            except ValueError:
                return None
            return format_config({param.name: given[param.name] for param in kernel.params})
    return None
