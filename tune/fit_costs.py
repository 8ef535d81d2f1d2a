"""Tells how well the cost models of Hopper's linear choose over a table's rows, and fits them.

    python tune/fit_costs.py                             # every kernel with fitted numbers
    python tune/fit_costs.py mma_ring --rounds 2         # fit, and print the numbers that changed

A row has the configuration that won a race. Its place is that which the model gives it among all
configurations that fit its problem: the first where the two agree. Numbers are fitted one by one,
up and down by ever smaller factors, for the least mean logarithm of the places, over every second
row; the others, which had no part in it, tell whether a fit is more than chance. Nothing is
written: who takes numbers over into aiter_mx/kernels/linear/fitted_sm90.py races the new first
choices, as no row tells how long a configuration takes that its race did not see.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib import import_module
from math import exp, log
from pathlib import Path
from types import ModuleType
from typing import Any

from aiter_mx.dispatch.tables import Row, read_table
from aiter_mx.kernels.search import Least
from aiter_mx.paths import configs_dir

KERNELS = ("mma_registers", "wgmma_fp8", "wgmma_f16", "mma_ring", "wgmma_bf16")
STEPS = (1.3, 1.1, 1.03)
"""By what factor a number is changed, in the first round, the second and all others."""
Number = tuple[str, Any]
"""A field of the fitted numbers, and the key of an entry where it is a mapping."""


@dataclass(frozen=True)
class Choice:
    """How well a model chooses.

    Attributes:
        rows: of the table, whose configuration it knows of.
        first: the share of them that it would choose.
        place: the geometric mean of their places.
    """

    rows: int
    first: float
    place: float

    def __str__(self) -> str:
        return f"{self.rows:4d} rows, {self.first:4.0%} first, place {self.place:5.2f}"


def module_of(kernel: str) -> ModuleType:
    """The module that declares a kernel, with its numbers, ``FITTED``."""
    return import_module(f"aiter_mx.kernels.linear.{kernel}_sm90")


def set_fitted(module: ModuleType, fitted: Any) -> None:
    """Have a kernel's model use other numbers."""
    module.FITTED = fitted  # type: ignore[attr-defined]
    for kept in ("_loops", "_by_stall"):  # bounds that are made of them
        if hasattr(module, kept):
            getattr(module, kept).cache_clear()


def place_of(module: ModuleType, row: Row) -> int | None:
    """The place of a row's configuration, behind all that cost as much, or None if unknown."""
    search, own = module._search, tuple(row.config[p.name] for p in module.PARAMS)
    costs = {values: cost for cost, _, values in search.costs(row.target, row.problem, Least())}
    if own not in costs:
        return None
    return sum(cost <= costs[own] for cost in costs.values())


def judge(module: ModuleType, rows: Iterable[Row]) -> Choice:
    """How well a kernel's model chooses over these rows."""
    places = [place for row in rows if (place := place_of(module, row)) is not None]
    if not places:
        return Choice(0, 0.0, 1.0)
    mean = sum(map(log, places)) / len(places)
    return Choice(len(places), places.count(1) / len(places), exp(mean))


def numbers_of(fitted: Any) -> list[Number]:
    """All that can be fitted: numbers that are not 0."""
    found: list[Number] = []
    for field in fields(fitted):
        value = getattr(fitted, field.name)
        keys = list(value) if isinstance(value, Mapping) else [None]
        found += [(field.name, key) for key in keys if value_of(fitted, (field.name, key))]
    return found


def value_of(fitted: Any, number: Number) -> float:
    """One of the numbers."""
    name, key = number
    value = getattr(fitted, name)
    return float(value if key is None else value[key])


def scaled(fitted: Any, number: Number, factor: float) -> Any:
    """The numbers with one of them times a factor, to four digits."""
    name, key = number
    value = float(f"{value_of(fitted, number) * factor:.4g}")
    return replace(
        fitted, **{name: value if key is None else {**getattr(fitted, name), key: value}}
    )


def fit(module: ModuleType, rows: Sequence[Row], rounds: int) -> Any:
    """The numbers of the least mean place, one after the other; the module has its own again."""
    shipped = best = module.FITTED
    try:
        least = judge(module, rows).place
        for turn in range(rounds):
            step = STEPS[min(turn, len(STEPS) - 1)]
            for number in numbers_of(best):
                for factor in (step, 1 / step):
                    tried = scaled(best, number, factor)
                    set_fitted(module, tried)
                    if (place := judge(module, rows).place) < least:
                        best, least = tried, place
                        break
    finally:
        set_fitted(module, shipped)
    return best


def rows_of(table: Path, kernel: str, most: int) -> list[Row]:
    """A kernel's rows of a table, or so many of them, drawn always alike."""
    rows = [row for _, row in read_table(table) if (row.backend, row.kernel) == ("hip", kernel)]
    return random.Random(kernel).sample(rows, min(most, len(rows)))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kernels", nargs="*", metavar="KERNEL", help=", ".join(KERNELS))
    parser.add_argument("--table", type=Path, default=configs_dir() / "sm_90a" / "linear.csv")
    parser.add_argument("--rows", type=int, default=200, help="of each kernel, at most")
    parser.add_argument("--rounds", type=int, default=0, help="0: judge alone")
    given = parser.parse_args(arguments)
    if unknown := sorted({*given.kernels} - {*KERNELS}):
        parser.error(f"{', '.join(unknown)}: the kernels with fitted numbers are {KERNELS}")
    for kernel in given.kernels or KERNELS:
        module, rows = module_of(kernel), rows_of(given.table, kernel, given.rows)
        halves = {"fitted": rows[::2], "others": rows[1::2]}
        for half, some in halves.items():
            print(f"{kernel:14} {half}: {judge(module, some)}", flush=True)
        if not given.rounds:
            continue
        shipped, found = module.FITTED, fit(module, rows[::2], given.rounds)
        set_fitted(module, found)
        for half, some in halves.items():
            print(f"{kernel:14} {half}: {judge(module, some)} with new numbers")
        set_fitted(module, shipped)
        for number in numbers_of(shipped):
            old, new = value_of(shipped, number), value_of(found, number)
            if old != new:
                name, key = number
                print(f"  {name}{'' if key is None else f'[{key}]'}: {old:g} -> {new:g}")


if __name__ == "__main__":
    main()
