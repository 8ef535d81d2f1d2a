"""Traces of public kernels as one file: what calibration needs when the kernels are not there.

A trace says which unit each instruction keeps busy and for how long, in which order waves pass the
kernel's blocks, and how many lines each access touches; it holds no instruction of a kernel.
"""

from __future__ import annotations

import io
import json
import lzma
from collections.abc import Iterable, Iterator
from dataclasses import asdict, astuple, replace
from pathlib import Path

import numpy as np

from aiter_mx.sim.report import Trace
from aiter_mx.sim.timing.code import Cost, Kind, costs
from aiter_mx.sim.timing.cu import SplitTrace
from aiter_mx.sim.timing.model import Traced
from aiter_mx.sim.timing.sharing import L2_BYTES, MALL_BYTES, Left
from tune.published.rows import Row
from tune.published.sample import Sample

_SETS = 101
ROTATED = Left(L2_BYTES // _SETS, MALL_BYTES // _SETS)
"""What of a launch caches still hold when it is timed: aiter's profiler writes 101 sets of operands
and then launches once on each."""
REPEATED = Left(L2_BYTES, MALL_BYTES)
"""The same of launches on one set, again and again."""


def save(path: Path, rows: Iterable[tuple[Row, list[Sample]]]) -> None:
    """Write the samples of rows."""
    index, arrays = [], {}
    for row, samples in rows:
        launches = []
        for sample in samples:
            trace, number = sample.trace, len(arrays) // 2
            arrays[f"words{number}"] = np.frombuffer(trace.words, np.uint32)
            arrays[f"costs{number}"] = np.array(
                [astuple(cost) for cost in costs(trace.texts)], np.uint16
            )
            launches.append({
                "traced": trace.groups, "waves": trace.waves, "groups": sample.groups,
                "resident": sample.resident, "fills": sample.fills,
                "blocks": list(trace.block_sizes), "regions": list(trace.region_bytes),
                "fresh": [round(share, 4) for share in sample.fresh],
            })  # fmt: skip
        index.append({"row": asdict(row), "launches": launches})
    buffer = io.BytesIO()
    np.savez(buffer, index=np.frombuffer(json.dumps(index).encode(), np.uint8), **arrays)
    path.write_bytes(lzma.compress(buffer.getvalue(), preset=9))


def load(path: Path, left: Left = ROTATED) -> Iterator[tuple[Row, list[Traced]]]:
    """Rows and their launches, ready for the model.

    Args:
        path: what ``save`` wrote.
        left: what caches hold of a row's first launch when it is timed. Those behind it take what
            it has written, which no L2 has yet.
    """
    with np.load(io.BytesIO(lzma.decompress(path.read_bytes()))) as arrays:
        number = 0
        for entry in json.loads(arrays["index"].tobytes()):
            launches = []
            for at in entry["launches"]:
                words, table = arrays[f"words{number}"], arrays[f"costs{number}"]
                number += 1
                known = [Cost(Kind(line[0]), *map(int, line[1:])) for line in table.tolist()]
                trace = Trace(
                    words.tobytes(), at["traced"], at["waves"], [""] * len(known), at["blocks"],
                    at["regions"],
                )  # fmt: skip
                split = SplitTrace(trace, known)
                before = replace(left, l2_bytes=0) if launches else left
                launches.append(Traced(split, at["groups"], at["resident"], at["fills"],
                                       tuple(at.get("fresh", ())), before))  # fmt: skip
            yield Row(**entry["row"]), launches
