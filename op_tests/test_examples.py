"""The examples of docstrings and pages: they run as they stand, and print what they say."""

from __future__ import annotations

import doctest
import re
from importlib import import_module
from pathlib import Path

import pytest
import torch

import aiter_mx

ROOT = Path(__file__).resolve().parent.parent
WITH_EXAMPLES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in (ROOT / "aiter_mx").rglob("*.py")
    if ">>>" in path.read_text(encoding="utf-8")
)
PAGES = {
    page: [
        code
        for code in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text("utf-8"), re.DOTALL)
        if '"MODEL"' not in code  # takes a checkpoint
    ]
    for page in ("README.md", "docs/serving.md", "docs/training.md")
}


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_examples_of_docstrings_give_what_they_say(module: str) -> None:
    torch.manual_seed(0)
    names = {"torch": torch, "aiter_mx": aiter_mx}
    result = doctest.testmod(import_module(module), extraglobs=names)
    assert result.attempted and not result.failed


@pytest.mark.parametrize("page", PAGES)
def test_examples_of_pages_run(page: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    wq, ws = aiter_mx.quantize(torch.randn(96, 64))
    w1q, w1s = aiter_mx.quantize(torch.randn(4, 64, 64))
    w2q, w2s = aiter_mx.quantize(torch.randn(4, 64, 32))
    topk_weights, topk_ids = torch.rand(4, 4).topk(2)
    known = {"torch": torch, "aiter_mx": aiter_mx, **locals()}
    assert PAGES[page]
    for code in PAGES[page]:
        exec(compile(code, page, "exec"), known)
