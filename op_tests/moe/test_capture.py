"""A first use of the MoE ops under stream capture: the error names the one call to make before."""

from __future__ import annotations

import random
import re
from importlib import import_module
from typing import Any

import pytest
import torch

import aiter_mx
from aiter_mx.errors import CaptureError
from aiter_mx.runtimes import sim
from op_tests.moe.layers import random_call, variants


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    for op in ("fused_moe_call", "moe_gemm", "moe_align"):
        plans = import_module(f"aiter_mx.ops.{op}")._plans
        monkeypatch.setattr(plans, "by_call", {})
    monkeypatch.setattr("aiter_mx.launch._functions", {})


def warmup_call(message: str) -> tuple[str, dict[str, Any]]:
    """The op and the fields of the call that an error names."""
    found = re.search(r"before the capture call aiter_mx\.warmup\('(\w+)', (.*)\)$", message)
    assert found is not None, message
    return found[1], eval(f"dict({found[2]})", {})


def check(op: str, call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with aiter_mx.simulate("gfx950"):
        monkeypatch.setattr(sim, "is_capturing", lambda device: True)
        with pytest.raises(CaptureError) as error:
            call()
        named, fields = warmup_call(str(error.value))
        assert named == op
        monkeypatch.setattr(sim, "is_capturing", lambda device: False)
        aiter_mx.warmup(named, device="cpu", **fields)
        monkeypatch.setattr(sim, "is_capturing", lambda device: True)
        call()


def test_a_layer_is_warmed_by_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = variants()[1] | {"M": 5, "experts": 8, "top_k": 2, "shared": 1, "has_map": True}
    call = random_call(random.Random(1), 1, **fixed)
    check("fused_moe", lambda: aiter_mx.fused_moe(**call), monkeypatch)


@pytest.mark.parametrize("M", [3, 300])  # which takes another route
def test_a_gemm_is_warmed_by_one_call(M: int, monkeypatch: pytest.MonkeyPatch) -> None:
    topk_ids = torch.randint(0, 2, (M, 2), dtype=torch.int32)
    lists = aiter_mx.moe_align(topk_ids, 16, 2)
    x, w = aiter_mx.quantize(torch.randn(M, 96)), aiter_mx.quantize(torch.randn(2 * 64, 96))
    operands = (*x, w[0].view(2, 64, 96), w[1].view(2, 64, 3), *lists, 2 * M, 2, 16)
    check("moe_gemm", lambda: aiter_mx.moe_gemm(*operands, a_div=2), monkeypatch)
    check("moe_align", lambda: aiter_mx.moe_align(topk_ids, 16, 2), monkeypatch)
