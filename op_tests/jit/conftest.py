"""What tests of the cache share."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from op_tests.jit.fakes import Workshop, forget


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder that does not exist yet, where any user may reach it."""
    with tempfile.TemporaryDirectory() as above:
        Path(above).chmod(0o755)
        monkeypatch.setenv("AITER_MX_CACHE_DIR", f"{above}/cache")
        forget(monkeypatch)
        yield Path(above) / "cache"


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    """Sources and a compiler of a test's own."""
    return Workshop(tmp_path, monkeypatch)
