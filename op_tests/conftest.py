"""Leaves out the tests marked ``gpu`` where there is no GPU that the package has kernels for."""

from __future__ import annotations

import pytest
import torch

from aiter_mx.target import ARCHS, gpu_target

HAS_GPU = torch.cuda.is_available() and gpu_target(0).arch in ARCHS


def pytest_report_header() -> str:
    places = " or ".join(ARCHS)
    return "gpu tests: run" if HAS_GPU else f"gpu tests: left out, no GPU of {places} here"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if HAS_GPU:
        return
    left_out = [item for item in items if item.get_closest_marker("gpu")]
    items[:] = [item for item in items if not item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=left_out)
