"""What changed from one tune to the next."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from aiter_mx.dispatch.tables import Row, read_table
from aiter_mx.kernels.registry import key_columns


@dataclass(frozen=True)
class Change:
    """A shape's row in two tables.

    Attributes:
        shape: what it is for.
        before, after: the rows; None where there is none.
    """

    shape: str
    before: Row | None
    after: Row | None

    @property
    def kind(self) -> str:
        """``same``, ``changed``, ``added`` or ``removed``; ``same`` means the same choice."""
        if self.before is None:
            return "added"
        if self.after is None:
            return "removed"
        return "same" if _choice(self.before) == _choice(self.after) else "changed"

    def cells(self) -> tuple[str, ...]:
        """For a table of text: shape, choice and time before and after, change in percent."""
        before, after = self.before, self.after
        ratio = ""
        if before and after and before.us and after.us:
            ratio = f"{after.us / before.us - 1:+.1%}"
        return (self.shape, *_shown(before), *_shown(after), ratio)


def compare_tables(before: Path, after: Path) -> list[Change]:
    """The changes of every row, in the order of the second table and then of the first."""
    olds, news = _by_shape(before), _by_shape(after)
    return [Change(shape, olds.get(shape), news.get(shape)) for shape in {**news, **olds}]


def _by_shape(path: Path) -> dict[str, Row]:
    found = {}
    for op, row in read_table(path):
        fields = [f"{name}={getattr(row.problem, name)}" for name in key_columns(op)]
        cus = f"{row.cu_num} CUs" if row.cu_num else "any CUs"
        found[" ".join([op, row.gfx, cus, *fields])] = row
    return found


def _choice(row: Row) -> str:
    config = " ".join(f"{name}={value}" for name, value in sorted(row.config.items()))
    return f"{row.backend}/{row.kernel} {config}".rstrip()


def _shown(row: Row | None) -> tuple[str, str]:
    if row is None:
        return "", ""
    return _choice(row), "" if row.us is None else f"{row.us:.3f}"
