"""Calls in torch's odd corners: right answers, shapes, or an error that says what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import aiter_mx
from op_tests.mx_reference import random_mx

pytestmark = pytest.mark.filterwarnings("ignore")  # of betas and tracers

M, N, K, E = 4, 32, 64, 4


@pytest.fixture(params=["torch", "sim"], autouse=True)
def computing(request: pytest.FixtureRequest) -> Iterator[None]:
    with aiter_mx.simulate("gfx950") if request.param == "sim" else nullcontext():
        yield


def mx(*shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    *leading, k = shape
    rows = int(np.prod(leading))
    payload, scale = random_mx(rows, k, generator, scale_exponents=(-3, 3))
    return payload.view(shape), scale.view(*leading, k // 32)


IDS = torch.tensor([[0, 1], [2, 3], [3, 0], [1, 2]])
LISTS = aiter_mx.moe_align(IDS, 16, E)
W, GATE_UP, DOWN, EXPERTS = mx(N, K), mx(E, 2 * N, K), mx(E, K, N), mx(E, N, K)
XQ, XS = mx(M, K)
SHARES = torch.rand(M, 2, generator=torch.Generator().manual_seed(0))


def grouped(x: Tensor, **options: Any) -> Tensor:
    offsets = torch.tensor([0, 1, 1, 3, M], device=x.device)
    operands = (t.to(x.device) for t in (XS, *EXPERTS))
    return aiter_mx.grouped_gemm(x.to(torch.float8_e4m3fn), *operands, offsets, **options)


def moe(x: Tensor, **options: Any) -> Tensor:
    tensors = [t.to(x.device) for t in (XS, *EXPERTS, *LISTS)]
    return aiter_mx.moe_gemm(x.to(torch.float8_e4m3fn), *tensors, M * 2, 2, 16, a_div=2, **options)


def fused(x: Tensor, **options: Any) -> Tensor:
    weights = [t.to(x.device) for t in (*GATE_UP, *DOWN, IDS, SHARES)]
    return aiter_mx.fused_moe(x, *weights, **options)


def linear(x: Tensor, **options: Any) -> Tensor:
    return aiter_mx.linear(x, None, *(t.to(x.device) for t in W), **options)


def quantize(x: Tensor, **options: Any) -> Tensor:
    return aiter_mx.quantize(x, **options)[0]


def dual(x: Tensor, **options: Any) -> Tensor:
    return aiter_mx.quantize_dual(x.expand(8, M, K).reshape(8 * M, K), **options).rows


def quantize_grouped(x: Tensor, **options: Any) -> Tensor:
    offsets = torch.tensor([0, 1, M], device=x.device)
    return aiter_mx.quantize_grouped(x, offsets, **options).rows


OPS: dict[str, Callable[..., Tensor]] = {
    "linear": linear, "quantize": quantize, "quantize_dual": dual, "fused_moe": fused,
    "quantize_grouped": quantize_grouped, "grouped_gemm": grouped, "moe_gemm": moe,
}  # fmt: skip
every_op = pytest.mark.parametrize("name", OPS)
FLOAT_OPS = ("linear", "quantize", "fused_moe", "quantize_grouped")


def x_of() -> Tensor:
    return torch.randn(M, K, generator=torch.Generator().manual_seed(0)).bfloat16()


@every_op
@pytest.mark.parametrize("transform", ["vmap", "jvp", "grad"])
def test_function_transforms_are_refused_by_name(name: str, transform: str) -> None:
    op, x = OPS[name], x_of()
    calls: dict[str, Callable[[], object]] = {
        "vmap": lambda: torch.vmap(op)(torch.stack([x, x])),
        "jvp": lambda: torch.func.jvp(op, (x,), (x,)),
        "grad": lambda: torch.func.grad(lambda x: op(x).float().sum())(x),
    }
    with pytest.raises(NotImplementedError, match=rf"{name} has no rule for torch\.func's"):
        calls[transform]()


def test_tangents_are_refused_and_plain_tensors_beside_them_are_not() -> None:
    with forward_ad.dual_level():
        for op in (linear, fused):
            with pytest.raises(NotImplementedError, match=r"carries a tangent.*unpack_dual"):
                op(forward_ad.make_dual(x_of(), x_of()))
            assert torch.equal(op(x_of()), op(x_of()))


@every_op
def test_a_trace_is_refused_by_name(name: str) -> None:
    for _ in range(2):
        with pytest.raises(
            NotImplementedError, match=rf"torch\.jit\.trace cannot record {name}: use torch\.comp"
        ):
            torch.jit.trace(OPS[name], (x_of(),), check_trace=False)
        OPS[name](x_of())


@pytest.mark.parametrize("name", FLOAT_OPS)
@pytest.mark.parametrize(
    "make", [Tensor.to_sparse, Tensor.to_sparse_csr, lambda x: x.float().to_mkldnn()]
)
def test_tensors_that_are_not_dense_are_named(name: str, make: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(ValueError, match=r"^xq? must be a dense tensor, got one of layout.*dense"):
        OPS[name](make(x_of()))


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("linear", "out_dtype", []),
        ("linear", "pdl", {}),
        ("quantize", "mode", ["rceil"]),
        ("quantize", "format", {}),
        ("quantize_dual", "scale_layout", []),
        ("grouped_gemm", "out_dtype", [torch.float32]),
        ("fused_moe", "activation", ["silu"]),
        ("moe_gemm", "out_dtype", []),
    ],
)
def test_options_that_cannot_be_hashed_are_named(name: str, option: str, value: object) -> None:
    with pytest.raises(TypeError, match=rf"{name}(_ranges)? takes no {option}="):
        OPS[name](x_of(), **{option: value})


class Marked(Tensor):
    pass


@pytest.mark.parametrize(
    ("name", "option", "value", "message"),
    [
        ("linear", "out_dtype", "bf16", r"out_dtype must be a torch\.dtype, got 'bf16'"),
        ("linear", "pdl", "yes", "pdl must be True or False, got 'yes'"),
        ("quantize", "mode", 1, "mode must be text, got 1"),
        ("quantize", "scale_layout", None, "scale_layout must be text, got None|layout must be"),
    ],
)
def test_a_subclass_gets_the_same_errors(
    name: str, option: str, value: object, message: str
) -> None:
    assert OPS[name](x_of().as_subclass(Marked)).shape
    with pytest.raises(TypeError, match=message):
        OPS[name](x_of().as_subclass(Marked), **{option: value})


@every_op
def test_meta_tensors_propagate_shapes(name: str) -> None:
    wanted = OPS[name](x_of())
    found = OPS[name](x_of().to("meta"))
    assert (found.shape, found.dtype, found.device.type) == (wanted.shape, wanted.dtype, "meta")


def test_a_meta_out_is_taken() -> None:
    out = torch.empty(M, N, dtype=torch.bfloat16, device="meta")
    assert linear(x_of().to("meta"), out=out) is out
    values = aiter_mx.dequantize(*(t.to("meta") for t in (XQ, XS)))
    assert (values.shape, values.device.type) == ((M, K), "meta")


@pytest.mark.parametrize("inside", [True, False])
def test_fake_tensors_propagate_shapes_inside_of_their_mode_and_outside(inside: bool) -> None:
    mode = FakeTensorMode()
    x, *weights = (mode.from_tensor(t) for t in (x_of(), *W))
    with mode if inside else nullcontext():
        assert aiter_mx.linear(x, None, *weights).shape == (M, N)
        payload, scale = aiter_mx.quantize(x)
        assert aiter_mx.dequantize(payload, scale).shape == (M, K)


def test_a_flop_counter_changes_nothing() -> None:
    wanted = linear(x_of())
    with FlopCounterMode(display=False):
        assert torch.equal(linear(x_of()), wanted)


def test_numpys_whole_numbers_are_whole_numbers() -> None:
    for found, wanted in (
        (aiter_mx.moe_align(IDS, np.int64(16), np.int32(E)), aiter_mx.moe_align(IDS, 16, E)),
        (
            aiter_mx.moe_sort(IDS, SHARES, np.int64(E), block_m=np.uint8(32)),
            aiter_mx.moe_sort(IDS, SHARES, E, block_m=32),
        ),
    ):
        used = int(wanted[-1][0])
        assert torch.equal(found[0][:used], wanted[0][:used]) and torch.equal(found[-1], wanted[-1])
    assert torch.equal(fused(x_of(), block_m=np.int64(16)), fused(x_of(), block_m=16))
    assert torch.equal(
        quantize(x_of(), axis=np.int64(-1), block=np.int64(32)).view(torch.uint8),
        quantize(x_of()).view(torch.uint8),
    )
    for wrong in (4.0, "4", None, np.float64(4)):
        with pytest.raises(TypeError, match="num_experts must be a whole number"):
            aiter_mx.moe_align(IDS, 16, wrong)


@pytest.mark.parametrize("E", [(1 << 16) + 1, 1 << 31, 1 << 40, 1 << 80])
def test_more_experts_than_anybody_has_are_refused_before_memory_is(E: int) -> None:
    with pytest.raises(ValueError, match="E must be at most 65536"):
        aiter_mx.moe_align(IDS, 16, E)
    with pytest.raises(ValueError, match="E must be at most 65536"):
        aiter_mx.moe_sort(IDS, SHARES, E)


@pytest.mark.parametrize("name", FLOAT_OPS)
def test_views_with_a_negative_bit_are_their_values(name: str) -> None:
    negative = torch._neg_view(x_of())
    assert negative.is_neg() and negative.is_contiguous()
    found, wanted = OPS[name](negative), OPS[name](-x_of())
    assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))


def test_a_negative_bias_is_its_values() -> None:
    bias = torch.randn(N)
    assert torch.equal(linear(x_of(), bias=torch._neg_view(bias)), linear(x_of(), bias=-bias))


@pytest.mark.parametrize("name", FLOAT_OPS)
def test_zeros_without_memory_are_zeros(name: str) -> None:
    zeros = torch._efficientzerotensor((M, K), dtype=torch.bfloat16)
    assert zeros.data_ptr() == 0
    found, wanted = OPS[name](zeros), OPS[name](torch.zeros_like(zeros))
    assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("name", ["linear", "grouped_gemm", "moe_gemm", "fused_moe"])
def test_an_out_that_requires_a_gradient_is_refused(name: str) -> None:
    wanted = OPS[name](x_of())
    out = torch.empty_like(wanted).requires_grad_()
    with pytest.raises(ValueError, match=r"out requires a gradient.*out\.detach\(\)"):
        OPS[name](x_of(), out=out)
    with torch.no_grad():
        assert torch.equal(OPS[name](x_of(), out=out), wanted)
    assert torch.equal(OPS[name](x_of(), out=out.detach()), wanted)


def test_an_architecture_that_is_no_text_is_named() -> None:
    with pytest.raises(ValueError, match=r"unknown architecture \['gfx950'\]"):
        aiter_mx.explain("linear", M=1, N=64, K=64, arch=["gfx950"])  # type: ignore[arg-type]
