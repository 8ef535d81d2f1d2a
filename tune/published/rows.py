"""Published times of kernels that can be had, and which of them judge the model."""

from __future__ import annotations

import csv
import random
from collections.abc import Iterable
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path

SEED = 950
TEST_A_STRATUM, FIT_A_STRATUM = 27, 15
LEAST_TESTS = 100
STRATA = (16, 64, 256, 1 << 30)
"""Largest M of each stratum."""


@dataclass(frozen=True)
class Row:
    """A published time.

    Attributes:
        family: formats and origin of the kernel.
        M, N, K: the product; of an expert layer tokens, intermediate and hidden size.
        kernel: its name; of an expert layer those of both launches, joined by a plus sign.
        split_k: as the table has it.
        experts, top_k: of an expert layer, else 0.
        us: the published time.
        role: ``fit`` or ``test``.
    """

    family: str
    M: int
    N: int
    K: int
    kernel: str
    split_k: int
    experts: int
    top_k: int
    us: float
    role: str = ""

    @property
    def stratum(self) -> int:
        """The number of the row's stratum."""
        return next(i for i, most in enumerate(STRATA) if most >= self.M)


def published(folder: Path) -> list[Row]:
    """The rows whose kernels are public, of a folder with ``gemm.csv`` and ``moe.csv``."""
    rows = []
    with (folder / "gemm.csv").open(newline="") as file:
        for r in csv.DictReader(file):
            if family := _family(r["family"], r["kernel"]):
                sizes = int(r["M"]), int(r["N"]), int(r["K"])
                split = int(r["split_k"] or 0)
                rows.append(Row(family, *sizes, r["kernel"], split, 0, 0, float(r["us"])))
    with (folder / "moe.csv").open(newline="") as file:
        for r in csv.DictReader(file):
            if r["w_dtype"] == "torch.float8_e4m3fn" and r["scales"] == "QuantType.per_1x32":
                sizes = int(r["tokens"]), int(r["intermediate"]), int(r["hidden"])
                kernel = f"{r['gemm1_kernel']}+{r['gemm2_kernel']}"
                layer = int(r["experts"]), int(r["top_k"])
                rows.append(Row("mxfp8_moe", *sizes, kernel, 0, *layer, float(r["us"])))
    return sorted(rows, key=astuple)


def _family(formats: str, kernel: str) -> str:
    is_asm, is_flydsl = kernel.startswith("_ZN5aiter"), kernel.startswith("flydsl_")
    if formats == "fp4_1x32" and is_asm:
        return "fp4_asm"
    if formats == "fp8_1x128_128x128" and is_asm:
        return "block_scale_asm"
    if formats == "bf16" and (is_asm or is_flydsl):
        return "bf16"
    return "fp8_rowwise_flydsl" if formats == "fp8_rowwise" and is_flydsl else ""


def drawn(rows: Iterable[Row]) -> list[Row]:
    """Rows to test and to fit on, by a fixed seed, spread over the strata of each family."""
    result = []
    by_family: dict[str, list[Row]] = {}
    for row in rows:
        by_family.setdefault(row.family, []).append(row)
    for family, members in sorted(by_family.items()):
        order = list(members)
        random.Random(f"{SEED} {family}").shuffle(order)
        test, fit = [], []
        for stratum in range(len(STRATA)):
            pool = [row for row in order if row.stratum == stratum]
            test += pool[:TEST_A_STRATUM]
            fit += pool[TEST_A_STRATUM : TEST_A_STRATUM + FIT_A_STRATUM]
        chosen = {*test, *fit}
        test += [row for row in order if row not in chosen][: max(0, LEAST_TESTS - len(test))]
        for role, part in (("test", test), ("fit", fit)):
            result += [Row(**{**asdict(row), "role": role}) for row in part]
    return sorted(result, key=astuple)


def write(path: Path, rows: Iterable[Row]) -> None:
    """Save rows as CSV."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([field.name for field in fields(Row)])
        writer.writerows(astuple(row) for row in rows)


def read(path: Path) -> list[Row]:
    """Rows that ``write`` saved."""
    kinds = {field.name: {"int": int, "float": float, "str": str}[str(field.type)]
             for field in fields(Row)}  # fmt: skip
    with path.open(newline="") as file:
        return [Row(**{name: kinds[name](text) for name, text in line.items()})
                for line in csv.DictReader(file)]  # fmt: skip
