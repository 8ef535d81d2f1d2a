"""Tests against the engines' own packages, where those are installed (``make test-engines``)."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore = [
    f"test_{name}.py" for name in ("torchao", "vllm", "sglang") if not find_spec(name)
]
