"""Training on a GPU: gradients against float64, graphs of both passes, no synchronisation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import accumulate

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import aiter_mx
from aiter_mx.kernels.grouped_gemm import GroupedGemmProblem
from aiter_mx.nn import MxExperts
from aiter_mx.target import target_of
from aiter_mx.timing import random_mx
from op_tests.mx_reference import assert_close_to_reference
from op_tests.sums import stated_errors
from op_tests.training.cases import check, draw_case

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Torch raises where a call waits for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gradients_of_weights_match_float64_and_repeat(dtype: torch.dtype) -> None:
    case = draw_case(352, 288, (1, 0, 33, 1000, 127, 256), room=128)
    operands = [each.cuda() for each in case.operands]
    out = aiter_mx.grouped_gemm_wgrad(*operands, out_dtype=dtype)
    check(out.cpu(), case)
    for _ in range(100):
        assert torch.equal(aiter_mx.grouped_gemm_wgrad(*operands, out_dtype=dtype), out)
    old = torch.randn(case.shape).to(dtype)
    main = old.cuda()
    aiter_mx.grouped_gemm_wgrad(*operands, main, dtype, accumulate=True)
    check(main.cpu(), case, old)
    other = case.with_other_padding(0x7E, 187)
    again = aiter_mx.grouped_gemm_wgrad(*(t.cuda() for t in other.operands), out_dtype=dtype)
    assert torch.equal(again, out)


@pytest.mark.parametrize("exact_sums", [None, True])
@pytest.mark.parametrize("M", [500, 3000])
def test_gradients_of_rows_match_float64(M: int, exact_sums: bool | None) -> None:
    generator = torch.Generator().manual_seed(0)
    w, dy = torch.randn(3, 288, 352, generator=generator), torch.randn(M, 288)
    offs = torch.tensor([0, 130, 130, M])
    dual, rows = aiter_mx.quantize_dual_batched(w), aiter_mx.quantize(dy)
    operands = (each.cuda() for each in (*rows, dual.columns, dual.column_scales, offs))
    out = aiter_mx.grouped_gemm_dgrad(*operands, exact_sums=exact_sums).cpu()
    problem = GroupedGemmProblem(M, 352, 288, 3, index="i64")
    errors = stated_errors("grouped_gemm", target_of(DEVICE, exact_sums), problem)
    for g, part in ((0, slice(0, 130)), (2, slice(130, M))):
        of_group = (dual.columns[g], dual.column_scales[g])
        assert_close_to_reference(out[part], rows[0][part], rows[1][part], *of_group, **errors)


@pytest.mark.parametrize("lens", [(0, 33, 1, 200), (6000,)], ids=["groups", "pieces"])
@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.bfloat16, marks=pytest.mark.sanitized), torch.float16], ids=str
)
def test_a_step_matches_the_fallbacks(
    dtype: torch.dtype, format: str, lens: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gradients of weights, of few tiles, are added up in pieces where a group is long."""
    monkeypatch.setenv("AITER_MX_EXACT_SUMS", "1")  # as the fallbacks' are
    drawn = [torch.randn(sum(lens), size).to(dtype) for size in (64, 96)]
    w = (torch.randn(len(lens), 96, 64) / 8).to(dtype)
    main_grad, offs = torch.randn(w.shape), torch.tensor([0, *accumulate(lens)])
    results = []
    for device in ("cuda", "cpu"):
        x, dy, own_w, main = (t.detach().clone().to(device) for t in (*drawn, w, main_grad))
        x.requires_grad_(), own_w.requires_grad_()
        options = {"grad_format": format}
        y = aiter_mx.grouped_linear(x, own_w, offs.to(device), **options)
        aiter_mx.grouped_linear(x, own_w, offs.to(device), main_grad=main, **options).backward(dy)
        first, x.grad = x.grad, None  # initcheck sees no bulk store: their sum would be reported
        y.backward(dy)
        results.append([t.cpu().float() for t in (y.detach(), first, x.grad, own_w.grad, main)])
    for ours, right in zip(*results, strict=True):
        assert ((ours - right).abs() <= 2**-7 * right.abs() + 1e-4 * right.abs().max()).all()


def leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
    drawn = (torch.randn(shape, device="cuda") / shape[-1] ** 0.5 for shape in shapes)
    return [each.bfloat16().requires_grad_() for each in drawn]


@pytest.mark.parametrize("groups", [False, True], ids=["linear", "grouped"])
@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
def test_a_graph_of_both_passes_follows_its_inputs(format: str, groups: bool) -> None:
    x, w = leaves((300, 352), (3, 288, 352) if groups else (288, 352))
    offs = torch.arange(4, device="cuda") * 100
    dy = torch.randn(300, 288, device="cuda").bfloat16()

    def step() -> Tensor:
        x.grad = w.grad = None
        forward = aiter_mx.grouped_linear if groups else aiter_mx.linear_autograd
        y = forward(x, w, *([offs] if groups else []), grad_format=format)
        y.backward(dy)
        return y.detach()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    in_graph = (captured, x.grad, w.grad)
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
        offs[1:3] += 37
    graph.replay()
    replayed = [each.clone() for each in in_graph if each is not None]
    with no_synchronisation():
        expected = (step(), x.grad, w.grad)
    for found, right in zip(replayed, expected, strict=True):
        assert right is not None and torch.equal(found, right)


@pytest.mark.parametrize("groups", [False, True], ids=["linear", "grouped"])
def test_compiled_and_checkpointed_steps_are_bitwise_the_same(groups: bool) -> None:
    x, w, bias = leaves(
        (300, 352), *(((3, 288, 352), (3, 288)) if groups else ((288, 352), (288,)))
    )
    offs = torch.tensor([0, 100, 137, 300], device="cuda")
    dy = torch.randn(300, 288, device="cuda").bfloat16()

    def forward(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        if groups:
            return aiter_mx.grouped_linear(x, w, offs, bias)
        return aiter_mx.linear_autograd(x, w, bias)

    def again(*operands: Tensor) -> Tensor:
        y: Tensor = checkpoint(forward, *operands, use_reentrant=False)
        return y

    results = []
    for call in (forward, torch.compile(forward, fullgraph=True), again):
        x.grad = w.grad = bias.grad = None
        y = call(x, w, bias)
        y.backward(dy)
        results.append((y.detach(), x.grad, w.grad, bias.grad))
    for found in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found, results[0], strict=True))


def test_groups_may_be_told_on_the_cpu_and_are_read_on_demand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, w = leaves((300, 64), (3, 96, 64))
    offs = torch.tensor([0, 100, 137, 300])
    results = []
    for bounds in (offs, offs.cuda(), offs.int()[1:], offs.int().cuda()):
        x.grad = w.grad = None
        y = aiter_mx.grouped_linear(x, w, bounds)
        y.sum().backward()
        results.append((y.detach(), x.grad, w.grad))
    for found in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found, results[0], strict=True))
    wrong = torch.tensor([0, 137, 100, 300])
    with pytest.raises(ValueError, match="group 1 would be rows 137 to 100"):
        aiter_mx.grouped_linear(x, w, wrong)
    aiter_mx.grouped_linear(x, w, wrong.cuda()).sum().backward()  # harms no memory
    monkeypatch.setenv("AITER_MX_CHECK", "1")
    with pytest.raises(ValueError, match="group 1 would be rows 137 to 100"):
        aiter_mx.grouped_linear(x, w, wrong.cuda())
    made = aiter_mx.quantize_dual_grouped(x.detach(), offs.cuda(), pad_rows=False)
    columns = (made.columns, made.column_scales)
    for bounds in (wrong.cuda() * 128, made.group_offs + 4096):
        with pytest.raises(ValueError, match=r"group \d is \d+ to \d+"):
            aiter_mx.grouped_gemm_wgrad(*columns, *columns, bounds)
    with pytest.raises(ValueError, match="group 2 begins at row 100, and another"):
        aiter_mx.grouped_gemm_dgrad(*made[:2], *aiter_mx.quantize(w.detach()), wrong.cuda())


def test_experts_train_without_waiting_and_repeat() -> None:
    layer = MxExperts(8, 256, 352, device="cuda", dtype=torch.bfloat16)
    ids = torch.randint(0, 8, (500, 2), device="cuda")
    results = []
    for attempt in range(3):
        x = torch.linspace(-1, 1, 500 * 256, device="cuda").view(500, 256)
        x = x.bfloat16().requires_grad_()
        weights = torch.full((500, 2), 0.5, device="cuda", requires_grad=True)
        layer.zero_grad()
        with no_synchronisation() if attempt else nullcontext():
            layer(x, ids, weights).sum().backward()
        results.append([x.grad, weights.grad, *(p.grad.clone() for p in layer.parameters())])
    torch.cuda.synchronize()
    for again in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(again, results[0], strict=True))


def test_ten_thousand_launches_repeat_bitwise() -> None:
    case = draw_case(352, 288, (1, 0, 33, 600, 127, 256))
    operands = [each.cuda() for each in case.operands]
    dual = aiter_mx.quantize_dual_batched(torch.randn(2, 352, 288, device="cuda"))
    rows = aiter_mx.quantize(torch.randn(700, 352, device="cuda"))
    offs = torch.tensor([0, 333, 700], device="cuda")
    calls = (
        lambda out: aiter_mx.grouped_gemm_wgrad(*operands, out),
        lambda out: aiter_mx.grouped_gemm_dgrad(*rows, *dual[2:], offs, out),
    )
    for call, shape in zip(calls, (case.shape, (700, 288)), strict=True):
        expected, out = (torch.zeros(shape, device="cuda").bfloat16() for _ in range(2))
        call(expected)
        differ = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(10_000):
            call(out.fill_(float("nan")))
            differ += (out != expected).any()
        assert differ.item() == 0


def test_gradients_of_weights_reach_beyond_4_gib() -> None:
    few = slice(-48, None)
    P, N, K = (1 << 20) + 1024, 4128, 64  # operands
    (grad, grad_scale), (x, x_scale) = (random_mx(rows, P, DEVICE) for rows in (N, K))
    assert grad.nbytes > 1 << 32
    offs = torch.tensor([0, P - 1024, P], device="cuda")
    lens = torch.tensor([P - 2048, 1000], device="cuda")
    out = aiter_mx.grouped_gemm_wgrad(grad, grad_scale, x, x_scale, offs, lens)
    own = [t[few].cpu() for t in (grad[:, -1024:-24], x[:, -1024:-24])]
    scales = [t[few, -32:].cpu() for t in (grad_scale, x_scale)]
    padded = [torch.nn.functional.pad(t.view(torch.uint8), (0, 24)).view(t.dtype) for t in own]
    assert_close_to_reference(out[1][few, few].cpu(), padded[0], scales[0], padded[1], scales[1])
    del grad, x, out

    G, N, K = 40, 8192, 8192  # results
    (grad, grad_scale), (x, x_scale) = (random_mx(rows, G * 128, DEVICE) for rows in (N, K))
    out = aiter_mx.grouped_gemm_wgrad(
        grad, grad_scale, x, x_scale, torch.arange(G + 1, device="cuda") * 128
    )
    assert out.nbytes > 1 << 32
    of_last = [t[few, -128:].cpu() for t in (grad, x)]
    scales = [t[few, -4:].cpu() for t in (grad_scale, x_scale)]
    assert_close_to_reference(out[-1][few, few].cpu(), of_last[0], scales[0], of_last[1], scales[1])
