"""What ``warmup`` over a range of rows compiles and loads: no number of rows does afterwards."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import aiter_mx
from aiter_mx import launch
from aiter_mx.jit.build import BuildRequest, CodeObject
from aiter_mx.kernels.registry import launches_of, problem_type
from aiter_mx.plan import bind
from aiter_mx.target import hardware

DEVICE = torch.device("cuda", 0)
ROWS = (*range(1, 520), *range(520, 32_768, 63), 32_768)
LINEAR = {"N": 2304, "K": 6144}
LAYER = {"hidden": 2880, "intermediate": 2880, "E": 128, "top_k": 4}
RANGES = [  # and how many code objects one takes at most, those that all weights share among them
    ("linear", "gfx950", LINEAR, 12),
    ("linear", "gfx950", LINEAR | {"x_dtype": "bf16"}, 12),
    ("linear", "sm_90a", LINEAR, 20),
    ("linear", "sm_90a", LINEAR | {"x_dtype": "bf16"}, 23),
    ("fused_moe", "gfx950", LAYER, 21),
    ("fused_moe", "sm_90a", LAYER, 16),
]


class Compiler:
    """Counts compilations: a request's first build is one, as a cache keeps what it made."""

    def __init__(self) -> None:
        self.compiled: Counter[BuildRequest] = Counter()
        self.built: set[BuildRequest] = set()
        self.loaded: list[bytes] = []

    def build(self, request: BuildRequest) -> CodeObject:
        is_new = request not in self.built
        self.built.add(request)
        self.compiled[request] += is_new
        return CodeObject(str(request), str(request).encode(), Path(), is_new, 0.0)

    def load(self, image: bytes, device: int) -> bytes:
        self.loaded.append(image)
        return image


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """In place of all compilers and drivers."""
    made = Compiler()
    driver = SimpleNamespace(
        load=made.load,
        get_function=lambda loaded, symbol, shared_bytes: (loaded, symbol, shared_bytes),
        is_capturing=lambda device: False,
        encode_map=lambda described, address: bytes(128),
        map_offset=lambda function, argument: 128 * argument,
        bind=lambda function, geometry, args: lambda stream: None,
        current_stream=lambda device: 0,
    )
    monkeypatch.setattr("aiter_mx.jit.build.build", made.build)
    monkeypatch.setattr("aiter_mx.launch.build", made.build)
    monkeypatch.setattr("aiter_mx.launch.runtime_of", lambda name: driver)
    monkeypatch.setattr(launch, "_functions", {})
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    return made


@pytest.mark.parametrize(("op", "arch", "shape", "most"), RANGES)
def test_no_number_of_rows_compiles_after_a_range_was_warmed_up(
    op: str,
    arch: str,
    shape: dict[str, Any],
    most: int,
    compiler: Compiler,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, told = hardware(arch), list[BuildRequest]()
    monkeypatch.setattr("aiter_mx.warm.target_of", lambda device, exact_sums: target)
    routes = aiter_mx.warmup(
        op, device=DEVICE, jobs=2, on_built=lambda request, _: told.append(request), M=ROWS, **shape
    )
    assert len(compiler.compiled) <= most
    assert set(told) == set(compiler.compiled) and len(told) == len(set(told))
    assert set(compiler.compiled.values()) == {1}

    warm, loaded = dict(compiler.compiled), len(compiler.loaded)
    problems = [problem_type(op)(M=M, **shape) for M in ROWS]
    launches = [each for problem in problems for each in launches_of(op, problem, arch)]
    assert len(launches) == len(routes)
    for name, problem in dict.fromkeys(launches):
        bind(name, target, problem, DEVICE)
    assert compiler.compiled == warm, "a number of rows compiles"
    assert len(compiler.loaded) == loaded, "a number of rows loads"


def test_a_range_loads_each_function_once(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiter_mx.warm.target_of", lambda *_: hardware("sm_90a"))
    bound: list[Any] = []
    monkeypatch.setattr(
        "aiter_mx.warm.bind", lambda *call: (bound.append(call), bind(*call)) and bound[-1]
    )
    aiter_mx.warmup("linear", device=DEVICE, M=range(1, 257), **LINEAR)
    assert len(bound) <= len(compiler.loaded) == len(launch._functions)
