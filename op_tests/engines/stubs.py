"""Stand-ins for what SGLang imports for pictures, which its MX-FP8 layers never call."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from types import ModuleType
from typing import Any


class _Pictures(ModuleType):
    """A package that has every name, as an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _Finder(MetaPathFinder, Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        inside = name.partition(".")[0] == "torchvision"
        return spec_from_loader(name, self, is_package=True) if inside else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Pictures(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def without_pictures() -> None:
    """Let SGLang's layers be imported where torchvision is not installed."""
    if find_spec("torchvision") is not None:
        return
    from transformers.utils import import_utils

    import_utils.is_torchvision_available()  # it remembers what it found
    processors = ModuleType("sglang.srt.configs.utils")
    processors.register_image_processor = lambda *_: None  # type: ignore[attr-defined]
    processors.register_processor = lambda *_: None  # type: ignore[attr-defined]
    sys.modules[processors.__name__] = processors
    sys.meta_path.append(_Finder())
