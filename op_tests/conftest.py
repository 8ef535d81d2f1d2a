"""Leaves out the tests marked ``gpu`` where there is no GPU that the package has kernels for."""

from __future__ import annotations

import gc
from collections.abc import Iterable

import pytest
import torch

from aiter_mx.target import ARCHS, gpu_target
from op_tests.places import device_in
from op_tests.shards import Shard

HAS_GPU = torch.cuda.is_available() and gpu_target(0).arch in ARCHS
MOST_KEPT_BYTES = 2 << 30
"""Of a GPU's memory between two tests."""


device = device_in("sim", "torch", "cuda")


@pytest.fixture
def payloads_compared_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets ``torch.library.opcheck`` check the schema of an op that takes payloads.

    It compares inputs before and after by allclose, which torch has for no 8-bit float. Comparing
    those by their bytes is stricter.
    """
    allclose = torch.allclose

    def allclose_or_same_bytes(a: torch.Tensor, b: torch.Tensor, **keywords: bool) -> bool:
        if a.dtype == b.dtype == torch.float8_e4m3fn:
            return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        return allclose(a, b, **keywords)

    monkeypatch.setattr(torch, "allclose", allclose_or_same_bytes)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", default="1/1", help="i/n: run the i-th of n parts of the tests")
    parser.addoption("--one-each", action="store_true", help="one test on a GPU of every kernel")


def pytest_report_header() -> str:
    places = " or ".join(ARCHS)
    return "gpu tests: run" if HAS_GPU else f"gpu tests: left out, no GPU of {places} here"


def repeats(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """All but the tests marked ``sanitized``, and the first of each kernel that a conformance suite
    tries on a GPU."""
    seen: set[object] = set()
    found = set()
    for item in items:
        if item.get_closest_marker("sanitized"):
            continue
        trial = getattr(getattr(item, "callspec", None), "params", {}).get("bench")
        kernel = None if trial is None else (item.path, trial[0].name, trial[0].places)
        if trial is None or trial[1] != "gpu" or kernel in seen:
            found.add(item)
        else:
            seen.add(kernel)
    return found


def is_for_another_gpu(item: pytest.Item) -> bool:
    """Whether a conformance suite tries a kernel on a GPU that is not this machine's."""
    trial = getattr(getattr(item, "callspec", None), "params", {}).get("bench")
    return bool(trial and trial[1] == "gpu" and HAS_GPU) and (
        gpu_target(0).arch not in trial[0].places
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    shard = Shard.parse(config.getoption("--shard"))
    repeated = repeats(items) if config.getoption("--one-each") else ()
    kept, left_out = [], []
    for item in items:
        runs = shard.has(item.nodeid) and (HAS_GPU or not item.get_closest_marker("gpu"))
        runs = runs and item not in repeated and not is_for_another_gpu(item)
        (kept if runs else left_out).append(item)
    if left_out:
        items[:] = kept
        config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish() -> None:
    """Leave out of every collection of garbage what lives to the end: torch and all tests."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)  # a simulated kernel's translation makes hundreds of thousands


def pytest_runtest_teardown() -> None:
    """Leave the GPU's memory to the other workers: torch keeps what a test has freed."""
    if HAS_GPU and torch.cuda.memory_reserved() > MOST_KEPT_BYTES:
        torch.cuda.empty_cache()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Name a failure as it happens: a run that is cut short shows no summary."""
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        message = crash.message if crash else report.longreprtext
        print(f"\nFAILED {report.nodeid}: {' '.join(message.split())[:300]}", flush=True)
