"""AMD's own gfx950 code objects in the simulator: do they load, are they right, what is found.

    pip download --no-deps amd-aiter==0.1.7.post2.dev18    (unpack aiter_meta/hsa/gfx950)
    python -m op_tests.sim.public FOLDER [--only f4gemm] [--decode]

The objects are AMD's and not part of this project. Those whose arguments their public callers show
are launched and compared with float64: f4gemm, the fp8 block scale and the bf16 products.
``--decode`` translates every object of the folder, strict, without running it.

Proven findings that are true stand in ``public_findings.csv``: for objects, the rule, the
instructions that break it, and why. Any other makes the program fail, and so does a rule of the
list that an object no longer breaks.
"""

from __future__ import annotations

import argparse
import csv
import re
import struct
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pandas as pd
import torch

from aiter_mx.errors import AiterMxError
from aiter_mx.region import Region
from aiter_mx.sim.checks import CHECKS, STYLE_RULES
from aiter_mx.sim.program import SCHEDULES, Dim3, Program, SimOptions
from aiter_mx.sim.report import Finding
from aiter_mx.sim.translate import translate_kernel
from aiter_mx.tuning.origin import commit
from aiter_mx.tuning.table import write_csv
from op_tests.sim.tools import Array, e4m3_to_f64

K = 1024
KNOWN = Path(__file__).with_name("public_findings.csv")
ROOT = Path(__file__).resolve().parents[2]
SAVED = ROOT / "docs" / "measured" / "gfx950_simulated"
Broken: TypeAlias = "set[tuple[str, str]]"
"""Rules, and the mnemonics by which they are broken."""
_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
_FP4 = np.concatenate([_FP4, -_FP4])


@dataclass(frozen=True)
class Launch:
    """A launch of an object: its argument slots of 16 bytes, and what must come out."""

    slots: Sequence[Array | int | float]
    grid: Dim3
    out: Array
    expected: Array
    bound: Array


def tiled(codes: Array) -> Array:
    """Weights as the kernels want them: 16 rows of 16 bytes side by side, two such in a row."""
    rows, width = codes.shape
    parts = codes.reshape(rows // 16, 16, width // 32, 2, 16)
    return np.ascontiguousarray(parts.transpose(0, 2, 3, 1, 4)).reshape(rows, width)


def tiled_scales(scales: Array) -> Array:
    """Scales of whole blocks of 256 rows and 8 columns, in the order in which lanes take them."""
    rows, columns = scales.shape
    padded = np.full((-(-rows // 256) * 256, -(-columns // 8) * 8), 127, np.uint8)
    padded[:rows, :columns] = scales
    parts = padded.reshape(padded.shape[0] // 32, 2, 16, padded.shape[1] // 8, 2, 4)
    return np.ascontiguousarray(parts.transpose(0, 3, 5, 2, 4, 1)).reshape(padded.shape)


def _fp4(rng: np.random.Generator, rows: int) -> tuple[Array, Array, Array]:
    codes = rng.integers(0, 256, (rows, K // 2), dtype=np.uint8)
    scales = rng.integers(120, 134, (rows, K // 32), dtype=np.uint8)
    values = np.stack([_FP4[codes & 15], _FP4[codes >> 4]], -1).reshape(rows, K)
    return codes, scales, values * np.repeat(np.exp2(scales.astype(np.float64) - 127), 32, 1)


def f4gemm(name: str, rng: np.random.Generator) -> Launch:
    """D[M, N] in bf16 of A and B in MX-FP4."""
    found = re.search(r"_(\d+)x(\d+)\.co", name)
    assert found
    tile_m, N = map(int, found.groups())
    M = tile_m - 5  # rows of the last tile that are not there
    (a, scale_a, A), (b, scale_b, B) = _fp4(rng, M), _fp4(rng, N)
    out = np.zeros((-(-M // 32) * 32, N), np.uint16)
    if "noBpreShuffle" not in name:
        b = tiled(b)
    scales = tiled_scales(scale_a), tiled_scales(scale_b)
    slots = [out, 0, a, b, 1.0, 0.0, 0, 0, N, 0, K, 0, K, 0, M, N, K, *scales, scales[0].shape[1],
             0, scales[1].shape[1], 0, 0]  # fmt: skip
    return Launch(slots, (1, 1, 1), out[:M], A @ B.T, np.abs(A) @ np.abs(B).T)


def block_scale(name: str, rng: np.random.Generator) -> Launch:
    """C[M, N] in bf16 of e4m3 with f32 scales for 1 x 128 and 128 x 128 elements."""
    found = re.search(r"_x(\d+)\.co", name)
    assert found
    M, N = int(found[1]), 256
    x, w = (rng.integers(0, 126, (rows, K), dtype=np.uint8) for rows in (M, N))
    x |= rng.integers(0, 2, x.shape, dtype=np.uint8) << 7
    xs = rng.uniform(0.5, 2, (K // 128, M)).astype(np.float32)
    ws = rng.uniform(0.5, 2, (N // 128, K // 128)).astype(np.float32)
    X = e4m3_to_f64(x) * np.repeat(xs.T.astype(np.float64), 128, 1)
    W = e4m3_to_f64(w) * np.repeat(np.repeat(ws.astype(np.float64), 128, 0), 128, 1)
    out = np.zeros((M, N), np.uint16)
    slots = [out, x, tiled(w), 0, xs, ws, 0, 0, 0, K, N, M, 1, K, K, 2 * N, 0, 0, 0, 0, 0, 0,
             0]  # fmt: skip
    return Launch(slots, (1, 1, 1), out, X @ W.T, np.abs(X) @ np.abs(W).T)


def bf16gemm(name: str, rng: np.random.Generator) -> Launch:
    """D[M, N] in f32 of A and B in bf16."""
    found = re.search(r"_(\d+)x(\d+)_", name)
    assert found
    M, N = map(int, found.groups())
    tensors = [torch.from_numpy(rng.normal(size=(rows, K))).bfloat16() for rows in (M, N)]
    a, b = (t.view(torch.int16).numpy() for t in tensors)
    A, B = (t.double().numpy() for t in tensors)
    out = np.zeros((M, N), np.float32)
    slots = [out, 0, a, b, 1.0, 0.0, 0, 0, 4 * N, 4 * N, 2 * K, 2 * K, 2 * K, 2 * K, M, N, K,
             1]  # fmt: skip
    return Launch(slots, (1, 1, 1), out, A @ B.T, np.abs(A) @ np.abs(B).T)


_FAMILIES = {"f4gemm/": f4gemm, "f8_block_scale": block_scale, "bf16gemm/": bf16gemm}


def launch(path: Path, prepared: Launch, options: SimOptions) -> tuple[float, tuple[Finding, ...]]:
    """Run an object: the largest error in units of the bound, and what was found."""
    program = Program.from_image(path.read_bytes())
    (kernel,) = program.code_object.kernels.values()
    packed, regions = bytearray(kernel.kernarg_bytes), []
    for i, slot in enumerate(prepared.slots):
        if isinstance(slot, np.ndarray):
            access = "rw" if slot is prepared.slots[0] else "r"
            regions.append(Region(f"slot {i}", slot.ctypes.data, slot.nbytes, access))
            struct.pack_into("<Q", packed, 16 * i, slot.ctypes.data)
        elif slot:
            struct.pack_into("<f" if isinstance(slot, float) else "<I", packed, 16 * i, slot)
    block = (kernel.max_workgroup, 1, 1)
    report = program.launch(kernel.name, prepared.grid, block, bytes(packed), 0, regions, options)
    out = prepared.out
    if out.dtype == np.uint16:
        got = torch.from_numpy(out.view(np.int16).copy()).view(torch.bfloat16).double().numpy()
        bound = np.abs(prepared.expected) * 2.0**-8 + prepared.bound * 2.0**-20
    else:
        got, bound = out.astype(np.float64), prepared.bound * 2.0**-18
    return float((np.abs(got - prepared.expected) / bound).max()), report.findings


def known_rules(name: str) -> Broken:
    """The rules that an object is known to break, and by which instructions."""
    with KNOWN.open(newline="") as file:
        return {
            (row["rule"], instruction)
            for row in csv.DictReader(file)
            if fnmatch(name, row["objects"])
            for instruction in row["instructions"].split()
        }


def proven(findings: Iterable[Finding]) -> Broken:
    """The rules of class proven that findings have broken."""
    return {(f.check, f.instruction.split()[0]) for f in findings if f.kind == "proven"}


def objects(folder: Path, only: str) -> Iterator[tuple[str, Path]]:
    """The folder's code objects, by name."""
    for path in sorted(folder.rglob("*.co")):
        name = path.relative_to(folder).as_posix()
        if only in name:
            yield name, path


def decode(folder: Path, only: str, saves: bool) -> int:
    """Translate every object; 1 when one has something unknown."""
    families: dict[str, Counter[str]] = {}
    for name, path in objects(folder, only):
        counts = families.setdefault(name.partition("/")[0], Counter())
        counts["objects"] += 1
        try:
            program = Program.from_image(path.read_bytes())
            for kernel in program.code_object.kernels.values():
                found = translate_kernel(program.code_object, kernel, program.listing, strict=True)
                counts["instructions"] += len(found.instructions)
                counts.update(f"wait states, {CHECKS[rule].kind}" for rule in found.too_soon)
                counts.update(each.rule for each in program.idle(kernel.name).values())
            counts["known"] += 1
        except AiterMxError as error:
            print(f"{name}: {error}")
    columns = ("objects", "known", "instructions", "wait states, proven", "wait states, llvm",
               *sorted(STYLE_RULES))  # fmt: skip
    rows = [{"family": f, **{c: counts[c] for c in columns}} for f, counts in families.items()]
    total = {column: sum(row[column] for row in rows) for column in columns}
    print(f"{total['known']} of {total['objects']} code objects hold only known instructions")
    if saves:
        save_counts("public_decoded", [*rows, {"family": "all", **total}])
    return int(total["known"] < total["objects"])


def save_counts(name: str, rows: Sequence[Mapping[str, object]]) -> None:
    """Write ``docs/measured/gfx950_simulated/<name>.csv``, with the commit that counted."""
    of_commit = commit()  # before the file is another
    counts = pd.DataFrame(rows, columns=[*rows[0]], dtype=object)
    write_csv(SAVED / f"{name}.csv", counts.assign(commit=of_commit))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 1 when a result is wrong or an object not known."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="part of the objects' names")
    parser.add_argument("--schedule", choices=SCHEDULES, default="random", help="of the waves")
    parser.add_argument("--decode", action="store_true", help="translate all, run none")
    parser.add_argument("--save", action="store_true", help=f"write {SAVED.relative_to(ROOT)}")
    options = parser.parse_args(arguments)
    if options.decode:
        return decode(options.folder, options.only, options.save)
    rows = []
    right = ran = unknown = missed = 0
    by_class: Counter[str] = Counter()
    for name, path in objects(options.folder, options.only):
        family = next((make for part, make in _FAMILIES.items() if part in f"{name}/"), None)
        if not family:
            continue
        ran += 1
        begin = time.perf_counter()
        try:
            error, findings = launch(
                path,
                family(name, np.random.default_rng(ran)),
                SimOptions(collect=True, schedule=options.schedule, checks=("all",)),
            )
        except AiterMxError as fault:
            print(f"{name}: {type(fault).__name__}: {fault}")
            continue
        right += error <= 1
        seconds = time.perf_counter() - begin
        rules = Counter(f"{f.kind} {f.check}" for f in findings)
        print(f"{name}: {error:.3f} of its bound, {dict(rules)} ({seconds:.1f} s)", flush=True)
        by_class.update(found.kind for found in findings)
        row: dict[str, object] = {"object": name, "error_over_bound": f"{error:.3f}"}
        rows.append(row | {"findings": "; ".join(f"{r} {n}" for r, n in sorted(rules.items()))})
        known = known_rules(name)
        for found in findings:
            if proven([found]) - known:
                unknown += 1
                print(f"    {found.check}: {found.message}")
        for rule in sorted({rule for rule, _ in known} - {found.check for found in findings}):
            missed += 1
            print(f"    {rule} is no longer found")
    if options.save:
        save_counts("public_launched", rows)
    print(f"{right} of {ran} right; findings by class {dict(by_class)}, {unknown} proven and new, "
          f"{missed} no longer found")  # fmt: skip
    return int(right < ran or unknown + missed > 0)


if __name__ == "__main__":
    sys.exit(main())
