"""Tests that run as scripts in Triton's interpreter, which must be chosen before Triton starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def assert_passes_in_the_interpreter(script: str) -> None:
    """Run a test file as a script in Triton's interpreter.

    Args:
        script: the file's path, which lies beside this one.
    """
    here = Path(__file__).parent
    path = os.pathsep.join([str(here.parent), str(here)])
    done = subprocess.run(
        [sys.executable, script],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
