"""Compares two tables: which rows choose another kernel or configuration, and at what time."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from aiter_mx.dispatch.cells import format_config
from aiter_mx.dispatch.tables import read_table
from aiter_mx.kernels.registry import key_columns

KINDS = ("same", "changed", "added", "removed")


def compare_tables(before: Path, after: Path) -> pd.DataFrame:
    """What became of each shape, in the order of the second table and then of the first.

    Returns:
        By shape the ``kind``, one of ``KINDS`` (``same`` means the same choice), the choices and
        times ``before`` and ``after``, and by how much the time changed, all but times as text.
    """
    olds, news = _by_shape(before), _by_shape(after)
    shapes = [*news.index, *olds.index.difference(news.index, sort=False)]
    both = olds.add_suffix("_before").join(news.add_suffix("_after"), how="outer").loc[shapes]
    kinds = pd.Series("changed", index=both.index)
    kinds[both.choice_before == both.choice_after] = "same"
    kinds[both.choice_before.isna()] = "added"
    kinds[both.choice_after.isna()] = "removed"
    change = (both.us_after / both.us_before - 1).map("{:+.1%}".format, na_action="ignore")
    return both.assign(kind=kinds, change=change)


def _by_shape(path: Path) -> pd.DataFrame:
    found = {}
    for op, row in read_table(path):
        fields = [f"{name}={getattr(row.problem, name)}" for name in key_columns(op)]
        cus = f"{row.cu_num} CUs" if row.cu_num else "any CUs"
        config = format_config(dict(sorted(row.config.items())))
        choice = f"{row.backend}/{row.kernel} {config}".rstrip()
        found[" ".join([op, row.gfx, cus, *fields])] = choice, row.us
    frame = pd.DataFrame.from_dict(found, "index", columns=["choice", "us"])
    return frame.astype({"us": float})
