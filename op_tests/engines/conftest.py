"""Tests against the engines' own packages, where those are installed (``make test-engines``)."""

from __future__ import annotations

import os
from importlib.util import find_spec

from op_tests.engines.stubs import without_pictures

TESTS = {"torchao": "test_torchao.py", "sglang": "test_sglang.py", "vllm": "vllm"}
collect_ignore = [tests for name, tests in TESTS.items() if not find_spec(name)]

if not collect_ignore:
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
    without_pictures()
