"""What all ops' calls have in common: gradients that there are not, and plans that are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

import aiter_mx
from aiter_mx import plan as plans_module

M, N, K, E, TOP_K = 3, 64, 64, 4, 2
ROUTED = M * TOP_K


@pytest.fixture(params=["torch", "sim"], autouse=True)
def computing(request: pytest.FixtureRequest) -> Iterator[None]:
    with aiter_mx.simulate("gfx950") if request.param == "sim" else nullcontext():
        yield


def weights(*shape: int) -> tuple[Tensor, Tensor]:
    """As a module of an engine's holds them: payloads that ask for a gradient."""
    payload, scale = aiter_mx.quantize(torch.randn(*shape))
    return torch.nn.Parameter(payload), scale


def linear(x: Tensor, bias: Tensor, _: Tensor, out: Tensor | None = None) -> Tensor:
    return aiter_mx.linear(x, None, *weights(N, K), bias, out=out)


def grouped(x: Tensor, bias: Tensor, _: Tensor, out: Tensor | None = None) -> Tensor:
    offsets = torch.tensor([0, 1, 1, M, M])
    return aiter_mx.grouped_gemm(
        *aiter_mx.quantize(x), *weights(E, N, K), offsets, out, bias=bias.expand(E, N).contiguous()
    )


def moe_gemm(x: Tensor, bias: Tensor, routing: Tensor, out: Tensor | None = None) -> Tensor:
    lists = aiter_mx.moe_align(torch.tensor([[0, 1], [2, 3], [3, 0]]), 16, E)
    operands = (*aiter_mx.quantize(x), *weights(E, N, K), *lists)
    return aiter_mx.moe_gemm(
        *operands, ROUTED, TOP_K, 16, a_div=TOP_K, topk_weights=routing, out=out
    )


def fused_moe(x: Tensor, _: Tensor, routing: Tensor, out: Tensor | None = None) -> Tensor:
    ids = torch.tensor([[0, 1], [2, 3], [3, 0]])
    return aiter_mx.fused_moe(x, *weights(E, 2 * N, K), *weights(E, K, N), ids, routing, out=out)


OPS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...]]] = {
    "linear": (linear, (0, 1)),
    "grouped_gemm": (grouped, (1,)),
    "moe_gemm": (moe_gemm, (2,)),
    "fused_moe": (fused_moe, (0, 2)),
}
CASES = [(run, at) for run, tracked in OPS.values() for at in tracked]


def operands() -> list[Tensor]:
    return [torch.randn(M, K, dtype=torch.bfloat16), torch.randn(N), torch.rand(M, TOP_K)]


@pytest.mark.parametrize(("run", "at"), CASES)
def test_a_gradient_that_there_is_not_is_an_error_and_not_silence(
    run: Callable[..., Tensor], at: int
) -> None:
    inputs = operands()
    inputs[at].requires_grad_()
    with pytest.raises(RuntimeError, match="no autograd formula"):
        run(*inputs).float().sum().backward()
    with torch.no_grad():
        assert not run(*inputs).requires_grad


@pytest.mark.parametrize("run", [run for run, _ in OPS.values()], ids=OPS)
def test_weights_that_are_parameters_leave_no_trace(run: Callable[..., Tensor]) -> None:
    result = run(*operands())
    assert not result.requires_grad
    out = torch.empty_like(result)
    assert run(*operands(), out) is out
    assert out.grad_fn is None


@pytest.fixture
def bf16_by_default() -> Iterator[Callable[[], None]]:
    """Makes bf16 torch's default dtype, as engines do while they build a model."""
    yield lambda: torch.set_default_dtype(torch.bfloat16)
    torch.set_default_dtype(torch.float32)


def test_torchs_default_dtype_changes_nothing(bf16_by_default: Callable[[], None]) -> None:
    ids, routing = torch.tensor([[0, 1], [2, 3], [3, 0]]), torch.rand(M, TOP_K)
    x, w1, w2 = torch.randn(M, K), weights(E, 2 * N, K), weights(E, K, N)
    sorted_lists = aiter_mx.moe_sort(ids, routing, E)
    layer = aiter_mx.fused_moe(x, *w1, *w2, ids, routing)
    pair = aiter_mx.quantize(x, format="e2m1")
    bf16_by_default()
    for now, before in zip(aiter_mx.moe_sort(ids, routing, E), sorted_lists, strict=True):
        assert now.dtype == before.dtype and torch.equal(now, before)
    assert torch.equal(aiter_mx.fused_moe(x, *w1, *w2, ids, routing), layer)
    for now, before in zip(aiter_mx.quantize(x, format="e2m1"), pair, strict=True):
        assert torch.equal(now, before)


def test_plans_are_kept_and_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans_module, "MOST_PLANS", 3)
    plans: plans_module.Plans[str] = plans_module.Plans()
    for shape in range(8):
        assert plans.keep(shape, f"plan {shape}") == f"plan {shape}"
        assert plans.by_call[shape] == f"plan {shape}"
        assert len(plans.by_call) <= 3
