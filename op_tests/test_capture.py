"""A first use of an op under stream capture: the error names the one call to make before."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

import aiter_mx
from aiter_mx.errors import CaptureError
from aiter_mx.runtimes import sim
from op_tests.moe.layers import random_call, variants
from op_tests.mx_reference import random_mx, random_mx_groups

Call = Callable[[], Any]


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    for op in ("linear", "grouped_gemm", "fused_moe_call", "moe_gemm", "moe_align"):
        plans = import_module(f"aiter_mx.ops.{op}")._plans
        monkeypatch.setattr(plans, "by_call", {})
    monkeypatch.setattr("aiter_mx.launch._functions", {})


def linear(M: int, **options: Any) -> Call:
    generator = torch.Generator().manual_seed(M)
    x, w = random_mx(M, 352, generator), random_mx(34, 352, generator)
    return lambda: aiter_mx.linear(*x, *w, **options)


def linear_of_bf16(M: int) -> Call:
    generator = torch.Generator().manual_seed(M)
    x, w = torch.randn(M, 6176, generator=generator).bfloat16(), random_mx(34, 6176, generator)
    return lambda: aiter_mx.linear(x, None, *w)


def grouped_gemm(**options: Any) -> Call:
    operands, offsets = random_mx_groups(90, 4, 64, 160), torch.tensor([0, 33, 33, 60, 90])
    return lambda: aiter_mx.grouped_gemm(*operands, offsets, **options)


def layer(**options: Any) -> Call:
    fixed = variants()[1] | {"M": 5, "experts": 8, "top_k": 2, "shared": 1, "has_map": True}
    call = random_call(random.Random(1), 1, **fixed)
    return lambda: aiter_mx.fused_moe(**call, **options)


def ids(M: int) -> Tensor:
    return torch.randint(0, 2, (M, 2), generator=torch.Generator().manual_seed(M)).int()


def moe_gemm(M: int) -> Call:
    operands, lists = random_mx_groups(M, 2, 64, 96), aiter_mx.moe_align(ids(M), 16, 2)
    return lambda: aiter_mx.moe_gemm(*operands, *lists, 2 * M, 2, 16, a_div=2)


CASES: list[tuple[str, Call, dict[str, Any]]] = [
    (
        "linear",
        linear(2, out_dtype=torch.float32),
        {"M": 2, "N": 34, "K": 352, "out_dtype": "fp32"},
    ),
    *(
        ("linear", linear_of_bf16(M), {"M": M, "N": 34, "K": 6176, "x_dtype": "bf16"})
        for M in (2, 64)  # which quantise in the kernel, and ahead of it
    ),
    ("grouped_gemm", grouped_gemm(), {"M": 90, "N": 64, "K": 160, "G": 4, "index": "i64"}),
    ("fused_moe", layer(), {"M": 5}),
    *(
        (op, call, {"M": M, "exact_sums": True})
        for op, call, M in (
            ("grouped_gemm", grouped_gemm(exact_sums=True), 90),
            ("fused_moe", layer(exact_sums=True), 5),
        )
    ),
    (
        "linear",
        linear(3, exact_sums=True),
        {"M": 3, "N": 34, "K": 352, "exact_sums": True},
    ),
    *(("moe_gemm", moe_gemm(M), {"M": M, "N": 64}) for M in (3, 300)),  # by different routes
    ("moe_align", lambda: aiter_mx.moe_align(ids(3), 16, 2), {"M": 3}),
]


@pytest.mark.parametrize(("op", "call", "shape"), CASES, ids=[f"{op}" for op, *_ in CASES])
def test_what_the_error_names_makes_the_call_ready(
    op: str, call: Call, shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with aiter_mx.simulate("gfx950"):
        monkeypatch.setattr(sim, "is_capturing", lambda device: True)
        with pytest.raises(CaptureError) as error:
            call()
        found = re.search(
            r"before the capture call aiter_mx\.warmup\('(\w+)', (.*)\)$", str(error.value)
        )
        assert found is not None and found[1] == op
        fields = eval(f"dict({found[2]})", {})
        assert shape.items() <= fields.items() and (op != "linear" or fields == shape)
        monkeypatch.setattr(sim, "is_capturing", lambda device: False)
        aiter_mx.warmup(op, device="cpu", **fields)
        monkeypatch.setattr(sim, "is_capturing", lambda device: True)
        captured = call()
        monkeypatch.setattr(sim, "is_capturing", lambda device: False)
        expected = call()
    for one, other in zip(*(_tensors(each) for each in (captured, expected)), strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _tensors(result: Any) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)
