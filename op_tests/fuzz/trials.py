"""Calls of ops drawn at random, and what their results must be."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import aiter_mx
from aiter_mx.compat.deep_gemm import m_grouped_fp8_gemm_nt_contiguous
from aiter_mx.layouts import LAYOUTS
from op_tests.conformance import DTYPES
from op_tests.fuzz.reference import quantised, routed_lists
from op_tests.grouped.cases import assert_group_rows, draw_groups
from op_tests.launches import same_bytes
from op_tests.linear.operands import operands
from op_tests.moe.layers import assert_layer, random_call
from op_tests.moe.operands import Case, activated, draw_layer
from op_tests.moe.reference import assert_activated, assert_rows
from op_tests.mx_reference import (
    E4M3_VALUES,
    assert_close_to_reference,
    dequantize64,
    random_mx_groups,
)
from op_tests.quantize.cases import draw as draw_values

CPU = torch.device("cpu")
Exponents = tuple[int, int]


@dataclass(frozen=True)
class Trial:
    """A call, and what compares its result with a reference; ``call`` takes ``arguments``."""

    op: str
    call: Callable[..., Any]
    arguments: dict[str, Any]
    check: Callable[[Any], None]


def _exponents(draw: random.Random, dtype: torch.dtype) -> Exponents:
    if dtype == torch.float16:
        return (-12, -6)
    return draw.choice([(-6, 6), (-20, 20), (-127, 127)])


def _seed(draw: random.Random) -> int:
    return draw.randrange(1 << 30)


def _bias(draw: random.Random, *shape: int) -> Tensor | None:
    dtype = draw.choice([None, *DTYPES.values()])
    generator = torch.Generator().manual_seed(_seed(draw))
    return None if dtype is None else torch.randn(shape, generator=generator).to(dtype)


def _exact_sums(draw: random.Random) -> bool | None:
    return draw.choice([None, None, False, True])


def linear(draw: random.Random) -> Trial:
    M, N = draw.choice([0, 1, 2, draw.randint(3, 20), draw.randint(21, 90)]), draw.randint(1, 90)
    K, dtype = 32 * draw.choice([1, 2, draw.randint(3, 40)]), draw.choice([*DTYPES.values()])
    nan = draw.choice([0.0, 0.0, 1e-3])
    exponents = _exponents(draw, dtype)
    drawn = operands(M, N, K, _seed(draw), scale_exponents=exponents, nan_scale=nan)
    bias = _bias(draw, N)
    named = dict(zip(("xq", "xs", "wq", "ws"), drawn, strict=True))
    if draw.random() < 0.3:
        named |= {name: named[name].view(torch.float8_e8m0fnu) for name in ("xs", "ws")}
    out = torch.full((M, N), 7.0, dtype=dtype) if draw.random() < 0.3 else None

    def check(result: Tensor) -> None:
        assert out is None or result is out
        assert_close_to_reference(result, *drawn, bias)

    arguments = {**named, "bias": bias, "out_dtype": dtype, "out": out}
    arguments["exact_sums"] = _exact_sums(draw)
    return Trial("linear", aiter_mx.linear, arguments, check)


def quantize(draw: random.Random) -> Trial:
    mode, format = draw.choice(["rceil", "floor"]), draw.choice(["e4m3", "e2m1"])
    layout, dtype = draw.choice(["row_major", *LAYOUTS]), draw.choice([*DTYPES.values()])
    axis = draw.choice([-1, -1, -2])
    M = 32 * draw.randint(0, 5) if axis == -2 else draw.choice([1, draw.randint(2, 70)])
    N = 32 * draw.randint(0, 9)
    x = draw_values((M, N), dtype, torch.Generator().manual_seed(_seed(draw)))
    x = x[::2] if axis == -1 and draw.random() < 0.2 else x

    def check(result: tuple[Tensor, Tensor]) -> None:
        payload, scale = result
        along = x.mT if axis == -2 else x
        if along.numel() == 0:
            assert payload.numel() == 0
            return
        codes, scales = quantised(along, mode, format)
        if format == "e2m1":
            codes = codes[..., ::2] | codes[..., 1::2] << 4
        assert torch.equal(payload.view(torch.uint8).long(), codes)
        assert same_bytes(aiter_mx.unshuffle_scales(scale, layout, *scales.shape), scales)

    options = {"axis": axis, "mode": mode, "format": format, "scale_layout": layout}
    return Trial("quantize", aiter_mx.quantize, {"x": x, **options}, check)


def dequantize(draw: random.Random) -> Trial:
    M, K = draw.randint(0, 40), 32 * draw.randint(1, 9)
    dtype = draw.choice([torch.float64, torch.float32])
    payload, scale, *_ = operands(M, 1, K, _seed(draw), nan_scale=0.01, nan_payload=0.01)

    def check(result: Tensor) -> None:
        expected = dequantize64(payload, scale).to(dtype)
        torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)

    arguments = {"payload": payload, "scale": scale, "dtype": dtype}
    return Trial("dequantize", aiter_mx.dequantize, arguments, check)


def grouped_gemm(draw: random.Random) -> Trial:
    groups = draw_groups(draw, draw.choice([16, 32]))
    while groups.told in ("ranges", "masked"):  # the public op takes offsets and ends
        groups = draw_groups(draw, 16)
    N, K, dtype = 32 * draw.randint(1, 4), 32 * draw.randint(1, 12), draw.choice([*DTYPES.values()])
    G, exponents = len(groups.ranges), _exponents(draw, dtype)
    drawn = random_mx_groups(groups.M, G, N, K, _seed(draw), exponents)
    bias, layouts = _bias(draw, G, N), [draw.choice(["row_major", *LAYOUTS]) for _ in range(2)]
    starts, ends = groups.bounds()
    offs = ends if starts is None else torch.cat((starts[:1], ends))
    scales = [
        aiter_mx.shuffle_scales(drawn[at], name) for at, name in zip((1, 3), layouts, strict=True)
    ]
    arguments = {
        "a": drawn[0],
        "a_scale": scales[0],
        "b": drawn[2],
        "b_scale": scales[1],
        "group_offs": offs,
        "bias": bias,
        "out_dtype": dtype,
        "a_scale_layout": layouts[0],
        "b_scale_layout": layouts[1],
        "exact_sums": _exact_sums(draw),
    }

    def check(result: Tensor) -> None:
        assert_group_rows(result, drawn, groups.ranges, bias)

    return Trial("grouped_gemm", aiter_mx.grouped_gemm, arguments, check)


def deep_gemm(draw: random.Random) -> Trial:
    """Contiguous groups, padded or not, with fp32 scales of any value."""
    N, K, dtype = 32 * draw.randint(1, 9), 32 * draw.randint(1, 12), draw.choice([*DTYPES.values()])
    sizes = [draw.choice([0, 1, 7, 40]) for _ in range(draw.randint(1, 5))]
    rows = [[g] * size + [-1] * draw.choice([0, 0, 3]) for g, size in enumerate(sizes)]
    layout = torch.tensor([g for group in rows for g in group] or [-1], dtype=torch.int32)
    generator = torch.Generator().manual_seed(_seed(draw))
    a, b = (
        torch.randint(0, 0x7F, shape, generator=generator, dtype=torch.uint8)
        for shape in ((len(layout), K), (len(sizes), N, K))
    )
    steps, low = -(-K // 128), draw.choice([1e-3, 1e-3, 1e-20])
    a_scale = (torch.rand(len(layout), steps, generator=generator) - 0.3) * low
    b_scale = torch.rand(len(sizes), -(-N // 128), steps, generator=generator) * 1e-2
    given = a_scale.t().contiguous().t() if draw.random() < 0.5 else a_scale

    def call(
        a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, layout: Tensor, dtype: Any
    ) -> Tensor:
        d = torch.full((len(layout), N), 7.0, dtype=dtype)
        m_grouped_fp8_gemm_nt_contiguous((a, a_scale), (b, b_scale), d, layout)
        return d

    def check(result: Tensor) -> None:
        x = E4M3_VALUES[a.int()] * a_scale.double().repeat_interleave(128, 1)[:, :K]
        wanted, most = torch.zeros(len(layout), N).double(), torch.zeros(len(layout), N).double()
        for g in range(len(sizes)):
            scale = b_scale[g].double().repeat_interleave(128, 0)[:N].repeat_interleave(128, 1)
            w, mine = E4M3_VALUES[b[g].int()] * scale[:, :K], layout == g
            wanted[mine], most[mine] = x[mine] @ w.T, x[mine].abs() @ w.abs().T
        error = (result.double() - wanted).abs()
        ulp = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-23}[dtype]
        fits = most < torch.finfo(dtype).max / 2
        # Below the smallest normal number rounding is of that size.
        assert (error <= 2.0**-18 * most + ulp * wanted.abs() + 2.0**-24)[fits].all()

    arguments = {
        "a": a.view(torch.float8_e4m3fn),
        "a_scale": given,
        "b": b.view(torch.float8_e4m3fn),
        "b_scale": b_scale,
        "layout": layout,
        "dtype": dtype,
    }
    return Trial("deep_gemm", call, arguments, check)


def moe_align(draw: random.Random) -> Trial:
    M, top_k, E = draw.randint(0, 60), draw.randint(1, 6), draw.choice([1, 8, 60, 200])
    block_m, drop = draw.choice([4, 16, 20, 64]), draw.random() < 0.5
    few = [draw.randrange(E) for _ in range(draw.choice([1, 3, 50]))] + [-1, E] * (
        draw.random() < 0.3
    )
    ids = torch.tensor([[draw.choice(few) for _ in range(top_k)] for _ in range(M)])
    ids = ids.view(M, top_k).to(draw.choice([torch.int32, torch.int64]))
    numbers, expert_map = list(range(E)), None
    if draw.random() < 0.5:
        here = [draw.random() < 0.6 for _ in range(E)]
        numbers = [sum(here[:e]) if here[e] else -1 for e in range(E)]
        expert_map = torch.tensor(numbers, dtype=torch.int32)

    def check(result: tuple[Tensor, Tensor, Tensor]) -> None:
        sorted_ids, experts, padded = (t.tolist() for t in result)
        wanted, owners = routed_lists(
            ids.tolist(), block_m, E, numbers, drop and expert_map is not None
        )
        assert padded == [len(wanted)] and sorted_ids[: len(wanted)] == wanted
        assert experts[: len(owners)] == owners
        assert set(sorted_ids[len(wanted) :]) <= {M * top_k} and set(experts[len(owners) :]) <= {-1}

    arguments = {"topk_ids": ids, "block_m": block_m, "num_experts": E, "expert_map": expert_map}
    return Trial("moe_align", aiter_mx.moe_align, {**arguments, "drop_absent": drop}, check)


def moe_gemm(draw: random.Random) -> Trial:
    E, top_k, dtype = draw.randint(1, 6), draw.randint(1, 4), draw.choice([*DTYPES])
    is_activated = draw.random() < 0.4
    N, K = draw.randint(1, 90), 32 * draw.randint(1, 12)
    N = -(-N // 64) * 64 if is_activated else N
    case = Case(draw.randint(1, 40), N, K, E, top_k, draw.choice([4, 12, 16, 64]))
    drawn = draw_layer(case, _seed(draw), "mxfp8" if is_activated else dtype)
    problem, layer = drawn.problem, drawn.layer
    names = ("xq", "xs", "wq", "ws", "sorted_token_ids", "expert_ids", "num_tokens_post_padded")
    arguments = dict(zip(names, drawn.tensors, strict=False))
    arguments |= {"num_valid_tokens": problem.routed, "top_k": top_k, "block_m": problem.block_m}
    arguments |= {"a_div": problem.a_div, "bias": drawn.tensors[8], "ids": problem.ids}
    arguments["exact_sums"] = _exact_sums(draw)
    if is_activated:
        kind, layout = draw.choice(["silu", "swiglu_oai"]), draw.choice(["halves", "interleaved"])
        swiglu = (1.702, 1.0, 7.0)
        problem = activated(drawn, kind, layout, swiglu).problem

        def check_activated(result: tuple[Tensor, Tensor]) -> None:
            assert_activated(*result, layer, kind, layout == "interleaved", swiglu)

        arguments |= {"activation": kind, "layout": layout}
        arguments |= dict(zip(("alpha", "beta", "limit"), swiglu, strict=True))
        call = aiter_mx.moe_gemm_activated
        return Trial("moe_gemm_activated", call, arguments, check_activated)

    def check(result: Tensor) -> None:
        listed = [t for t, expert in enumerate(layer.experts) if expert != -1]
        result.view(torch.uint8)[[t for t in range(len(result)) if t not in listed]] = 0x5A
        assert_rows(result, layer)

    arguments |= {"topk_weights": drawn.tensors[7], "out_dtype": DTYPES[dtype]}
    return Trial("moe_gemm", aiter_mx.moe_gemm, arguments, check)


def fused_moe(draw: random.Random) -> Trial:
    call = random_call(draw, _seed(draw)) | {"exact_sums": _exact_sums(draw)}

    def check(result: Tensor) -> None:
        assert_layer(result, call, CPU)

    return Trial("fused_moe", aiter_mx.fused_moe, dict(call), check)


TRIALS: dict[str, Callable[[random.Random], Trial]] = {
    function.__name__: function
    for function in (
        linear,
        quantize,
        dequantize,
        grouped_gemm,
        deep_gemm,
        moe_align,
        moe_gemm,
        fused_moe,
    )
}

SPOILS: dict[str, Callable[[Any], Any]] = {
    "None": lambda value: None,
    "a list": lambda value: value.tolist() if isinstance(value, Tensor) else [value],
    "one dimension less": lambda t: t[0],
    "one row less": lambda t: t[:-1],
    "one column less": lambda t: t[..., :-1],
    "strided": lambda t: torch.stack((t, t), -1)[..., 0],
    "float64": lambda t: t.double(),
    "int16": lambda t: t.to(torch.int16),
    "on meta": lambda t: t.to("meta"),
    "negative": lambda value: -1 if isinstance(value, int) else value.neg(),
    "huge": lambda value: 1 << 40,
    "text": lambda value: "what",
    "requires grad": lambda t: t.float().requires_grad_(),
}


def spoilt(trial: Trial, draw: random.Random) -> tuple[str, dict[str, Any]] | None:
    """A trial's arguments with one of them changed, and how; None where that cannot be done."""
    name, how = draw.choice([*trial.arguments]), draw.choice([*SPOILS])
    try:
        changed = SPOILS[how](trial.arguments[name])
    except Exception:  # what it is given has no such thing
        return None
    return f"{name}: {how}", {**trial.arguments, name: changed}
