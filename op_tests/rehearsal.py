"""Lists what the tests marked ``gpu`` will launch, by running them where no GPU is needed.

``python -O -m pytest -p op_tests.rehearsal`` runs those tests on the CPU as if an H200 were there:
tensors stay in host memory, kernels are neither built nor launched, and nothing is compared, as
``-O`` and ``--assert=plain`` leave out every ``assert``. What a test asks for before something
stops it is written down, a line each, in the file that ``--requests`` names; ``op_tests/gpu.py``
builds it meanwhile, and tests build the rest when they are run.
"""

from __future__ import annotations

import importlib
import json
import signal
import sys
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch.overrides import TorchFunctionMode

from aiter_mx import launch, plan, target, timing
from aiter_mx.jit import build as jit
from aiter_mx.ops import grouped_wgrad
from aiter_mx.runtimes.base import MAP_BYTES
from op_tests import mx_reference
from op_tests.grouped import cases
from op_tests.moe import reference

H200 = target.hardware("sm_90a")
LEFT_OUT = (
    "op_tests/linear/test_fallbacks.py",
    "op_tests/moe/test_triton",
    "op_tests/test_demo.py",
    "op_tests/test_distributed.py",
    "op_tests/training/test_real_shapes.py",
    "op_tests/tune/",
)
"""Tests of Triton's kernels, which are compiled when they are launched, and those that wait for a
GPU's times, start programs, or fill gigabytes to launch what others launch too."""
COMPARISONS = {
    torch.testing: ("assert_close",),
    mx_reference: ("assert_close_to_reference", "assert_rounded"),
    cases: ("assert_groups",),
    reference: ("assert_rows", "assert_activated"),
    grouped_wgrad: ("_check_groups",),
}
"""That raise by themselves, compute at length what to compare with, or read what kernels write."""
asked: dict[jit.BuildRequest, None] = {}
stopped: dict[str, str] = {}
"""What would have been built; tests that something stopped, and what."""


PRODUCTS = (torch.Tensor.matmul, torch.Tensor.__matmul__, torch.matmul, torch.bmm)
DRAWS = (torch.randint, torch.rand, torch.randn)
MOST_ELEMENTS = 1 << 16
"""That are drawn at random: routing takes fewer, and what payloads hold does not matter."""


class HostMemory(TorchFunctionMode):
    """Has every tensor that is asked for on a GPU be on the CPU, and costs little."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.Tensor.cuda, torch.Tensor.random_):
            return args[0]
        kwargs = {name: _on_host(value) for name, value in (kwargs or {}).items()}
        args = tuple(map(_on_host, args))
        if func in PRODUCTS:
            result = func(*(each.to("meta") for each in args))
            return torch.zeros((), dtype=result.dtype).expand(result.shape)
        if func in DRAWS:
            kwargs["device"] = "meta"
            result = func(*args, **{**kwargs, "generator": None})
            if result.numel() > MOST_ELEMENTS:
                return torch.zeros(result.shape, dtype=result.dtype)
            del kwargs["device"]
        return func(*args, **kwargs)


def _on_host(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    if isinstance(value, str) and value.partition(":")[0] == "cuda":
        return "cpu"
    return value


def _runtime() -> ModuleType:
    """A runtime for NVIDIA's GPUs that loads and launches nothing."""
    module: Any = ModuleType("aiter_mx.runtimes.cuda")
    module.name = "cuda"
    module.current_stream = lambda device: 0
    module.is_capturing = lambda device: False
    module.load = lambda image, device: None
    module.get_function = lambda module, symbol, shared_bytes: None
    module.bind = lambda function, geometry, args: lambda stream: None
    module.map_offset = lambda function, index: 1024 + MAP_BYTES * index
    module.encode_map = lambda described, address: bytes(MAP_BYTES)
    return module


def _gpu() -> dict[str, Any]:
    """What ``torch.cuda`` says and does where there is an H200; its other names do nothing."""

    def within(*_: object, **__: object) -> AbstractContextManager[None]:
        return nullcontext()

    others = ("Stream", "Event", "CUDAGraph", "synchronize", "current_stream", "set_device")
    others += ("set_sync_debug_mode", "manual_seed", "empty_cache", "mem_get_info")
    return {
        **{name: MagicMock() for name in (*others, "get_device_properties")},
        **dict.fromkeys(("device", "device_of", "stream", "graph"), within),
        "is_available": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "_is_in_bad_fork": lambda: False,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "get_device_name": lambda *_: H200.name,
        "get_device_capability": lambda *_: (9, 0),
    }


def _small(random_mx: Callable[..., Any]) -> Callable[..., Any]:
    """Has operands beyond any cache be shapes without memory: that is all that building asks."""

    def draw(rows: int, K: int, *more: Any, **options: Any) -> Any:
        if rows * K < 1 << 27:
            return random_mx(rows, K, *more, **options)
        payload = torch.empty(rows, K, dtype=torch.float8_e4m3fn, device="meta")
        return payload, torch.empty(rows, K // 32, dtype=torch.uint8, device="meta")

    return draw


def _nothing(*_: object, **__: object) -> None:
    return None


def _recording(path: Path | None) -> Callable[[jit.BuildRequest], jit.CodeObject]:
    """In place of building: writes down each request, once."""

    def record(request: jit.BuildRequest) -> jit.CodeObject:
        if request not in asked and path is not None:
            with path.open("a") as file:
                file.write(line_of(request))
        asked[request] = None
        return jit.CodeObject("", b"", Path(), False, 0.0)

    return record


def line_of(request: jit.BuildRequest) -> str:
    """A request as a line of text."""
    return json.dumps([request.source, request.arch, request.defines]) + "\n"


def request_of(line: str) -> jit.BuildRequest:
    """The request of a line."""
    source, arch, defines = json.loads(line)
    return jit.BuildRequest(source, arch, tuple((name, value) for name, value in defines))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--requests", type=Path, help="where to list what would be built")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    if __debug__:
        raise pytest.UsageError("a rehearsal compares nothing: run it with python -O")
    importlib.import_module("torch._dynamo")  # which an alarm in a test would leave half there
    options = early_config.known_args_namespace
    options.markexpr = "gpu"
    jit.build = launch.build = _recording(options.requests)
    plan.runner = lambda spec: _nothing
    target.gpu_target = lambda index: H200
    target._simulated.target = H200
    sys.modules["aiter_mx.runtimes.cuda"] = _runtime()
    torch._C._cuda_getDevice = lambda: 0
    timing.random_mx = _small(timing.random_mx)
    for name, stand_in in _gpu().items():
        setattr(torch.cuda, name, stand_in)
    for module, comparisons in COMPARISONS.items():
        for name in comparisons:
            setattr(module, name, _nothing)


MOST_SECONDS = 8
"""For a test here."""


def _stop(*_: object) -> None:
    raise TimeoutError(f"it took {MOST_SECONDS} s")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [item for item in items if item.nodeid.startswith(LEFT_OUT)]
    if left_out:
        items[:] = [item for item in items if not item.nodeid.startswith(LEFT_OUT)]
        config.hook.pytest_deselected(items=left_out)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    signal.signal(signal.SIGALRM, _stop)
    signal.alarm(MOST_SECONDS)
    try:
        with HostMemory():
            return (yield)
    except Exception as error:  # as values are not those of a GPU
        stopped[item.nodeid] = f"{type(error).__name__}: {error}"
        return None
    finally:
        signal.alarm(0)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    for name, why in stopped.items():
        terminalreporter.write_line(f"ended early: {name}: {why.splitlines()[0][:160]}")
    terminalreporter.write_line(f"{len(asked)} code objects, {len(stopped)} tests ended early")


def pytest_configure(config: pytest.Config) -> None:
    config.option.markexpr = "gpu"
