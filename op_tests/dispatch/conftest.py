"""Fixtures of the tests of dispatch."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest

from op_tests.dispatch.rows import UseTable, write_table


@pytest.fixture
def use_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> UseTable:
    numbers = count(1)

    def use(*rows: dict[str, object]) -> Path:
        path = write_table(tmp_path / f"table{next(numbers)}.csv", *rows)
        monkeypatch.setenv("AITER_MX_CONFIG", str(path))
        return path

    return use
