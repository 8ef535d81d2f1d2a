"""Where the package's own files are: beside the code in a wheel, at the top of a checkout."""

from __future__ import annotations

from functools import cache
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


@cache
def _room(name: str) -> Path:
    in_wheel = _PACKAGE / name
    return in_wheel if in_wheel.is_dir() else _PACKAGE.parent / name


def csrc_dir() -> Path:
    """The folder of the kernels' sources."""
    return _room("csrc")


def configs_dir() -> Path:
    """The folder of the shipped tuned tables: one folder for each architecture."""
    return _room("configs")
