"""Tests that run as scripts in Triton's interpreter, which must be chosen before Triton starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]


def assert_passes_in_the_interpreter(module: str) -> None:
    """Run a module of tests as a script in Triton's interpreter."""
    done = subprocess.run(
        [sys.executable, "-m", module],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(CHECKOUT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
