"""The MoE ops as ``torch.library`` has them: schemas, fake tensors, and a compiled layer."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import aiter_mx
import aiter_mx.ops.fused_moe
import aiter_mx.ops.moe_align
import aiter_mx.ops.moe_gemm  # each registers its own ops
from op_tests.moe.layers import random_call


def layer_call() -> dict[str, Any]:
    fixed = {"M": 5, "experts": 4, "top_k": 2, "hidden": 64, "intermediate": 32, "shared": 0}
    fixed |= {"activation": "swiglu_oai", "layout": "halves", "has_map": True, "biased": True}
    return random_call(random.Random(0), 0, dtype=torch.bfloat16, id_dtype=torch.int32, **fixed)


def gemm_arguments(activation: str) -> tuple[Any, ...]:
    call = layer_call()
    xq, xs = aiter_mx.quantize(call["x"])
    E = call["w1q"].shape[0]
    lists = aiter_mx.moe_align(call["topk_ids"].clamp(0, E - 1), 8, E)
    dtype = "bf16" if activation == "none" else "mxfp8"
    swiglu = [1.7, 1.0, 7.0] if activation == "swiglu_oai" else []
    weights = call["topk_weights"] if activation == "none" else None
    options = (dtype, 10, 2, 8, 2, "vllm", activation, "halves", swiglu)
    return (xq, xs, call["w1q"], call["w1s"], *lists, weights, call["bias1"], *options)


@pytest.mark.usefixtures("payloads_compared_by_bytes")
@pytest.mark.parametrize("activation", ["none", "silu", "swiglu_oai"])
def test_gemm_is_a_proper_op(activation: str) -> None:
    arguments = gemm_arguments(activation)
    torch.library.opcheck(torch.ops.aiter_mx.moe_gemm.default, arguments)
    if activation == "none":
        out = torch.empty(10, arguments[2].shape[1], dtype=torch.bfloat16)
        with_out = (*arguments[:9], out, *arguments[10:])
        torch.library.opcheck(torch.ops.aiter_mx.moe_gemm_out.default, with_out)


@pytest.mark.usefixtures("payloads_compared_by_bytes")
def test_layer_and_routing_are_proper_ops() -> None:
    call = layer_call()
    layer = (
        *(call[name] for name in ("x", "w1q", "w1s", "w2q", "w2s", "topk_ids", "topk_weights")),
        *(call[name] for name in ("expert_map", "bias1", "bias2")),
        *(None, torch.tensor([len(call["x"])], dtype=torch.int32)),
        *(len(call["expert_map"]), 0, "swiglu_oai", "halves", [1.7, 1.0, 7.0], 16),
        *(True, call["x"].dtype),
    )
    ops = torch.ops.aiter_mx
    torch.library.opcheck(ops.fused_moe.default, layer)
    out = torch.empty_like(call["x"])
    torch.library.opcheck(ops.fused_moe_out.default, (*layer[:12], out, *layer[12:]))
    routing = (call["topk_ids"], 8, 4, call["expert_map"], True, 1, 3, None)
    torch.library.opcheck(ops.moe_align.default, routing)
    mask, tokens = (torch.tensor(v, dtype=torch.int32) for v in ([1, 0, 1, 1], [3]))
    sorting = (call["topk_ids"], call["topk_weights"], 4, 8, mask, tokens)
    torch.library.opcheck(ops.moe_sort.default, sorting)


def test_sorting_compiles_as_one_graph() -> None:
    call = layer_call()
    topk_ids, weights = call["topk_ids"], call["topk_weights"]
    compiled = torch.compile(aiter_mx.moe_sort, fullgraph=True, backend="aot_eager")
    expected = aiter_mx.moe_sort(topk_ids, weights, 4, 8)
    for found, wanted in zip(compiled(topk_ids, weights, 4, 8), expected, strict=True):
        assert torch.equal(found, wanted)


def test_layer_compiles_as_one_graph() -> None:
    call = layer_call()
    call["layout"] = "interleaved"

    @torch.compile(fullgraph=True, backend="aot_eager")
    def layer(x: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        inside = {**call, "x": x.relu(), "topk_ids": topk_ids}
        return aiter_mx.fused_moe(**inside) * 2

    expected = aiter_mx.fused_moe(**{**call, "x": call["x"].relu()}) * 2
    assert torch.equal(layer(call["x"], call["topk_ids"]), expected)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def parts(x: torch.Tensor, topk_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        xq, xs = aiter_mx.quantize(x)
        lists = aiter_mx.moe_align(topk_ids, 8, 4, call["expert_map"], drop_absent=True)
        weights = (call["w1q"], call["w1s"], *lists, 10, 2, 8)
        return aiter_mx.moe_gemm_activated(xq, xs, *weights, a_div=2)

    payload, scales = parts(call["x"], call["topk_ids"])
    assert (payload.shape, scales.shape) == ((10, 32), (10, 1))


def test_traced_results_are_written_where_the_caller_said_and_nowhere_else() -> None:
    call = layer_call()
    xq, xs = aiter_mx.quantize(call["x"])
    absent = call["topk_ids"].clamp(0, 3)
    absent[0, 0] = 99  # a routed row that no id names, which stays as it is
    lists = aiter_mx.moe_align(absent, 8, 4)
    gemm = (xq, xs, call["w1q"], call["w1s"], *lists, 10, 2, 8)

    def run_gemm(out: torch.Tensor) -> torch.Tensor:
        return aiter_mx.moe_gemm(*gemm, a_div=2, out=out)

    def run_layer(out: torch.Tensor) -> torch.Tensor:
        return aiter_mx.fused_moe(**call, out=out)

    for run, shape in ((run_gemm, (10, 64)), (run_layer, (5, 64))):
        eager, traced = (torch.full(shape, 7.0, dtype=torch.bfloat16) for _ in range(2))
        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        run(eager)
        compiled(traced)
        assert torch.equal(eager, traced)
        for wrong, message in (
            (torch.empty(shape), "out must be of out_dtype torch.bfloat16, got torch.float32"),
            (torch.empty((2, *shape), dtype=torch.bfloat16), r"out must be \[\d+, 64\], got \["),
        ):
            with pytest.raises(Exception, match=message):
                compiled(wrong)
    assert (run_gemm(torch.full((10, 64), 7.0, dtype=torch.bfloat16))[0] == 7).all()


@pytest.mark.parametrize("exact_sums", [None, False, True])
@pytest.mark.parametrize("reduce", [False, True])
def test_a_layers_shape_is_known_whatever_is_asked_for(
    reduce: bool, exact_sums: bool | None
) -> None:
    call = {
        name: value.to("meta") if isinstance(value, torch.Tensor) else value
        for name, value in layer_call().items()
    }
    found = aiter_mx.fused_moe(**call, reduce=reduce, exact_sums=exact_sums)
    assert found.shape == ((5, 64) if reduce else (5, 2, 64))
    assert found.is_meta and found.dtype == torch.bfloat16
