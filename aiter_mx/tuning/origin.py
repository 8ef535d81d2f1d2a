"""Where a number comes from: commit, versions, date."""

from __future__ import annotations

import datetime
import hashlib
import os
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from aiter_mx._version import __version__
from aiter_mx.paths import csrc_dir

_PACKAGES = ("torch", "triton", "hip-python", "cuda-bindings")


@cache
def commit() -> str:
    """The commit that is being measured; ``AITER_MX_COMMIT`` names it where git cannot."""
    named = os.environ.get("AITER_MX_COMMIT")
    if named:
        return named
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    done = subprocess.run(git, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else f"v{__version__}"


def today() -> str:
    """The date, as in 2026-11-21."""
    return datetime.date.today().isoformat()


@cache
def versions() -> str:
    """What a time depends on beside the kernels: ``aiter-mx=0.1.0 torch=2.11.0 triton=3.6.0``."""
    found = {"aiter-mx": __version__}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return " ".join(f"{name}={value}" for name, value in found.items())


@cache
def sources_hash() -> str:
    """Of the kernels' sources and of what the package says of them."""
    package = Path(__file__).resolve().parents[1]
    folders = (csrc_dir(), package / "kernels", package / "fallbacks", package / "workloads")
    whole = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.suffix != ".pyc":
                whole.update(str(path.relative_to(folder)).encode())
                whole.update(path.read_bytes())
    return whole.hexdigest()[:16]
