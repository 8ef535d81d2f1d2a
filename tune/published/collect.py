"""Runs the kernels of published rows: what each row's launches do, or why that is not known."""

from __future__ import annotations

import csv
import hashlib
import os
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import astuple, replace
from pathlib import Path

from aiter_mx.errors import AiterMxError
from tune.published.asm import Objects
from tune.published.flydsl import FlyDsl
from tune.published.rows import Row
from tune.published.sample import Sample, samples


def collect(
    rows: Sequence[Row], published: Path, aiter: Path, work: Path
) -> Iterator[tuple[Row, list[Sample] | str]]:
    """Each row with its samples, or with what went wrong.

    Args:
        rows: of the manifest.
        published: the folder with ``moe.csv``, which says more of a layer than the manifest.
        aiter: a checkout of ROCm/aiter.
        work: a folder for what is made on the way; samples that lie there are not made again.
    """
    objects, layers = Objects(aiter), _layers(published)
    flydsl = FlyDsl(aiter, work)
    for row in rows:
        kept = kept_at(work, row)
        if kept.exists():
            yield row, pickle.loads(kept.read_bytes())
            continue
        try:
            if row.kernel.startswith("_ZN5aiter"):
                runs = [objects.run(row)]
            elif row.experts:
                runs = list(flydsl.moe(layers[_layer_key(row)]))
            else:
                sizes = {"M": str(row.M), "N": str(row.N), "K": str(row.K)}
                runs = [flydsl.gemm({**sizes, "kernel": row.kernel})]
            found = [
                sample
                for run in runs
                for sample in samples(run, bool(row.experts), row.split_k, _fills(row))
            ]
        except (AiterMxError, ValueError, RuntimeError) as error:
            yield row, f"{type(error).__name__}: {str(error)[:120]}"
        else:
            keep(kept, found)
            yield row, found


def kept_at(work: Path, row: Row) -> Path:
    """Where the samples of a row lie once they are made."""
    key = hashlib.sha256(repr(astuple(replace(row, role=""))).encode()).hexdigest()[:20]
    return work / "samples" / f"{key}.pkl"


def keep(path: Path, found: list[Sample]) -> None:
    """Write the samples of a row to where they are kept."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_bytes(pickle.dumps(found))
    partial.replace(path)


def _fills(row: Row) -> int:
    """Launches ahead that fill the result with zeros, for parts of K to be added to."""
    if row.family == "block_scale_asm":
        return int(row.split_k > 1)
    return int(row.family == "fp4_asm" and row.split_k > 0)


def _layer_key(row: Row) -> tuple[int | str, ...]:
    return row.M, row.N, row.K, row.experts, row.top_k, row.kernel


def _layers(published: Path) -> dict[tuple[int | str, ...], dict[str, str]]:
    with (published / "moe.csv").open(newline="") as file:
        return {
            (*(int(line[name]) for name in
               ("tokens", "intermediate", "hidden", "experts", "top_k")),
             f"{line['gemm1_kernel']}+{line['gemm2_kernel']}"): line
            for line in csv.DictReader(file)
        }  # fmt: skip
