"""Counts the kernels of an older tree in this tree's simulator, beside what counters.csv has.

    python -m op_tests.bench.counters_before FOLDER [--only gemv,mfma] [--save]

FOLDER is a checkout of the older tree, which has ``op_tests.bench.counters`` too. A process of its
own compiles and launches its kernels there; the code objects, arguments and memory of the launches
are run again here, so that both sides are counted by one simulator. The result is
docs/measured/gfx950_simulated/counters_before.csv.
"""

from __future__ import annotations

import argparse
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from aiter_mx.region import Region
from aiter_mx.sim.program import Program
from aiter_mx.sim.report import LaunchReport
from op_tests.bench.common import MEASURED
from op_tests.bench.counters import COUNTED

FOLDER = MEASURED / "gfx950_simulated"
KERNELS = ("gemv", "mfma")
WORD_BYTES = 8

# Runs in the older tree: what each launch is made of, in the order of the rows.
_CHILD = """
import ctypes, pickle, sys
from unittest.mock import patch
from aiter_mx.sim.program import Program
from op_tests.bench import counters
path, *kernels = sys.argv[1:]
launch, found = Program.launch, []
def noted(program, kernel, grid, block, kernarg, shared_bytes=0, regions=(), options=None):
    memory = [(vars(r), ctypes.string_at(r.address, r.size_bytes)) for r in regions]
    found.append((program._image, (kernel, grid, block), kernarg, shared_bytes, memory))
    return launch(program, kernel, grid, block, kernarg, shared_bytes, regions, options)
with patch.object(Program, "launch", noted):
    rows = [row for kernel in kernels for row in counters.rows_of(kernel)]
with open(path, "wb") as file:
    pickle.dump((rows, found), file)
"""


def launches_of(tree: Path, kernels: list[str]) -> tuple[list[dict[str, Any]], list[Any]]:
    """The rows that an older tree counts, and the launch of each."""
    with tempfile.TemporaryDirectory(prefix="aiter_mx-") as folder:
        path = Path(folder, "launches")
        command = [sys.executable, "-c", _CHILD, str(path), *kernels]
        environment = {**os.environ, "PYTHONPATH": str(tree)}
        subprocess.run(command, cwd=tree, env=environment, check=True)
        with path.open("rb") as file:
            rows, found = pickle.load(file)
    if len(rows) != len(found):
        raise ValueError(f"{tree} takes {len(found)} launches for {len(rows)} rows")
    return rows, found


def run_again(
    image: bytes,
    geometry: tuple[str, tuple[int, int, int], tuple[int, int, int]],
    kernarg: bytes,
    shared_bytes: int,
    memory: list[tuple[dict[str, Any], bytes]],
) -> LaunchReport:
    """A launch, with its memory at other addresses."""
    padded = kernarg.ljust(-(-len(kernarg) // WORD_BYTES) * WORD_BYTES, b"\0")
    before, regions, held = np.frombuffer(padded, np.uint64), [], []
    words = before.copy()
    for told, data in memory:
        room = np.frombuffer(data.ljust(len(data) + 256, b"\0"), np.uint8).copy()
        address = -(-room.ctypes.data // 128) * 128 + told["address"] % 128
        room[address - room.ctypes.data :][: len(data)] = np.frombuffer(data, np.uint8)
        held.append(room)
        words[before == told["address"]] = address  # new ones may be old ones of other regions
        regions.append(Region(told["name"], address, told["size_bytes"], told["access"]))
    return Program.from_image(image).launch(
        *geometry, words.tobytes()[: len(kernarg)], shared_bytes, regions, COUNTED
    )


def compared(tree: Path, kernels: list[str]) -> pd.DataFrame:
    """A row for each that both trees have."""
    saved = pd.read_csv(FOLDER / "counters.csv").set_index(["kernel", "problem"])
    found = []
    for row, launch in zip(*launches_of(tree, kernels), strict=True):
        key = row["kernel"], row["problem"]
        if key in saved.index:
            before, now = run_again(*launch).address_cycles, saved.address_cycles[key]
            found.append(
                {
                    "kernel": key[0],
                    "problem": key[1],
                    "address_cycles_before": before,
                    "address_cycles": now,
                    "share": now / before,
                }
            )
    return pd.DataFrame(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("tree", type=Path, help="a checkout of the older tree")
    parser.add_argument("--only", default=",".join(KERNELS), help="kernels, with commas between")
    parser.add_argument("--save", action="store_true", help="write counters_before.csv")
    arguments = parser.parse_args()
    frame = compared(arguments.tree.resolve(), arguments.only.split(","))
    print(frame.to_string())
    if arguments.save:
        frame.to_csv(FOLDER / "counters_before.csv", index=False, float_format="%.5g")


if __name__ == "__main__":
    main()
