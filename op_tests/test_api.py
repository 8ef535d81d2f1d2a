"""The API reference: its pages name every public function, and each tells how it is called."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import aiter_mx
from aiter_mx.errors import AiterMxError

PAGES = Path(__file__).resolve().parent.parent / "docs" / "api"
NOT_INSTALLED = ("aiter_mx.integrations.torchao", "aiter_mx.integrations.transformers")


def _documented() -> Iterator[str]:
    for page in sorted(PAGES.glob("*.md")):
        text = page.read_text("utf-8")
        for name, options in re.findall(r"^::: (\S+)\n((?:    .*\n)*)", text, re.MULTILINE):
            listed = options.partition("members:")[2]
            if not listed:
                yield name
            elif listed.split()[0] == "true":
                module = import_module(name)
                for member, value in vars(module).items():
                    if not member.startswith("_") and getattr(value, "__module__", "") == name:
                        yield f"{name}.{member}"
            else:
                members = listed.partition("show_")[0]
                yield from (f"{name}.{member}" for member in re.findall(r"\w+", members))


def _object(name: str) -> Any:
    module, _, member = name.rpartition(".")
    if module in NOT_INSTALLED:
        pytest.importorskip(module.rpartition(".")[2])
    return getattr(import_module(module), member)


def test_the_reference_has_every_public_name() -> None:
    documented = {id(_object(name)) for name in _documented() if not name.startswith(NOT_INSTALLED)}
    public = [name for name in aiter_mx.__all__ if name != "__version__"]
    assert [name for name in public if id(getattr(aiter_mx, name)) not in documented] == []


@pytest.mark.parametrize("name", _documented())
def test_a_docstring_tells_arguments_results_and_errors(name: str) -> None:
    value = _object(name)
    doc = inspect.getdoc(value) or ""
    assert doc
    is_class = inspect.isclass(value)
    is_plain = is_class and issubclass(value, (AiterMxError, Enum))
    if is_plain or not (is_class or inspect.isfunction(value)):
        return
    sections = dict(re.findall(r"^(\w[\w, ]*):\n((?: .*\n?|\n)+)", doc, re.MULTILINE))
    told = sections.get("Args", "") + sections.get("Attributes", "")
    each = re.findall(r"^    ([\w, ]+):", told, re.MULTILINE)
    signature = inspect.signature(value)
    assert set(signature.parameters) <= {word for words in each for word in words.split(", ")}
    if is_class:
        return
    if signature.return_annotation not in ("None", "Iterator[None]"):
        assert "Returns" in sections or "Yields" in sections
    if name.rpartition(".")[2] in aiter_mx.__all__:
        assert "Raises" in sections
