"""``linear_autograd`` and ``grouped_linear``: gradients, what is kept, compiled calls."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import aiter_mx
from aiter_mx.autograd import offsets_of_groups
from op_tests.training.products import (
    OFFSETS,
    K,
    N,
    T,
    assert_products,
    draw,
    forward,
    parts,
)

FORWARD_DB, GRADIENT_DB = 25.0, 20.0


@pytest.mark.parametrize("groups", [False, True], ids=["linear", "grouped"])
@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_result_is_a_product_of_quantised_operands(
    dtype: torch.dtype, format: str, groups: bool
) -> None:
    x, w, bias, dy = draw(dtype, groups)
    y = forward(x, w, bias, grad_format=format)
    y.backward(dy)
    assert [each.grad.dtype for each in (x, w, bias)] == [dtype] * 3
    assert_products(y, dy, x, w, bias, format)


def decibels(found: Tensor, exact: Tensor) -> float:
    noise = (found.double() - exact.double()).norm()
    return float(20 * torch.log10(exact.double().norm() / noise.clamp(min=1e-300)))


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
def test_signal_to_noise_holds_for_every_group_tile_and_tail(format: str) -> None:
    """An error of a few rows drowns in a ratio over all of them."""
    x, w, _, dy = draw(torch.bfloat16, True)
    y = forward(x, w, grad_format=format)
    y.backward(dy)
    for g, (of_w, rows) in enumerate(parts(w.detach())):
        if rows.start == rows.stop:
            continue
        xg, dyg = x.detach()[rows].double(), dy[rows].double()
        for some in (slice(None), slice(-32, None), slice(0, 32)):
            assert decibels(y.detach()[rows][some], (xg @ of_w.double().T)[some]) >= FORWARD_DB
            assert decibels(x.grad[rows][some], (dyg @ of_w.double())[some]) >= GRADIENT_DB
        exact = dyg.T @ xg
        for tile in (slice(None), slice(0, 32), slice(-32, None)):
            assert decibels(w.grad[g][tile], exact[tile]) >= GRADIENT_DB
    tails = torch.zeros_like(dy)
    for _, rows in parts(w.detach()):
        tail = slice(max(rows.start, rows.stop - 32), rows.stop)
        tails[tail] = dy[tail]
    w.grad = None
    forward(x, w, grad_format=format).backward(tails)
    for g, (_, rows) in enumerate(parts(w.detach())):
        if rows.start < rows.stop:
            by_tail = tails[rows].double().T @ x.detach()[rows].double()
            assert decibels(w.grad[g], by_tail) >= GRADIENT_DB


def recorded(function: Callable[[], Tensor]) -> tuple[list[Tensor], Tensor]:
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        return kept, function()


@pytest.mark.parametrize("groups", [False, True], ids=["linear", "grouped"])
def test_payloads_and_scales_alone_are_kept_and_of_them_what_is_needed(groups: bool) -> None:
    x, w, bias, dy = draw(torch.bfloat16, groups)
    kept, _ = recorded(lambda: forward(x, w, bias))
    floats = [t for t in kept if t.dtype not in (torch.float8_e4m3fn, torch.uint8, torch.int64)]
    assert not floats
    padded_rows = sum(-(-(end - begin) // 128) * 128 for begin, end in pairwise(OFFSETS))
    elements = w.numel() + (padded_rows + 128 * len(OFFSETS) if groups else 256) * K
    assert sum(t.nbytes for t in kept) <= 1.1 * elements
    kept, y = recorded(lambda: forward(x.detach(), w, bias))
    assert all(t.shape[-2] != w.shape[-1] or t.shape[-1] * 32 != N for t in kept if t.ndim > 1)
    y.backward(dy)
    assert w.grad is not None
    kept, y = recorded(lambda: forward(x, w.detach()))
    assert sum(t.nbytes for t in kept) <= 1.1 * w.numel() + 64
    y.backward(dy)
    assert x.grad is not None


def test_what_a_layer_keeps_is_11_tenths_of_a_byte_an_element() -> None:
    """Where groups have 2,048 rows in the mean, whatever each has."""
    lens = torch.tensor([4000, 1, 4191, 0])
    x, w = torch.randn(int(lens.sum()), 32, requires_grad=True), torch.randn(4, 32, 32)
    kept, _ = recorded(
        lambda: aiter_mx.grouped_linear(x, w.requires_grad_(), group_lens=lens.to(torch.int32))
    )
    assert sum(t.nbytes for t in kept) <= 1.1 * (x.numel() + w.numel())


@pytest.mark.parametrize("groups", [False, True], ids=["linear", "grouped"])
def test_operands_and_gradients_of_any_strides_are_taken(groups: bool) -> None:
    x, w, bias, dy = draw(torch.bfloat16, groups)
    other = torch.randn(T, 2, N).bfloat16()
    other[:, 1] = dy

    def step(x: Tensor, w: Tensor, dy: Tensor) -> list[Tensor]:
        own = [each.detach().requires_grad_() for each in (x, w, bias)]
        y = forward(*own)
        y.backward(dy)
        return [y.detach(), *(each.grad for each in own)]

    expected = step(x, w, dy)
    for strided in (dy.T.contiguous().T, other[:, 1], other.transpose(1, 2)[..., 1]):
        assert not strided.is_contiguous()
        assert all(map(torch.equal, step(x, w, strided), expected))
    turned = step(x.T.contiguous().T, w.mT.contiguous().mT, dy)
    assert all(map(torch.equal, turned, expected))
    expanded = dy[3].expand(T, N)  # as sum().backward() has it, but for the ones
    assert all(map(torch.equal, step(x, w, expanded), step(x, w, expanded.contiguous())))


@pytest.mark.parametrize("value", [2.0**60, -(2.0**60), torch.nan])
def test_a_groups_rows_are_no_other_groups_gradient(value: float) -> None:
    x, w, bias, dy = draw(torch.bfloat16, True)
    forward(x, w, bias).backward(dy)
    clean = [each.grad.clone() for each in (x, w, bias)]
    rows, groups = torch.zeros(T, dtype=torch.bool), torch.arange(len(w)) == 4
    rows[OFFSETS[4] : OFFSETS[5]] = True
    with torch.no_grad():
        x[rows], dy[rows] = value, -value
    x.grad = w.grad = bias.grad = None
    forward(x, w, bias).backward(dy)
    for each, expected, changed in zip((x, w, bias), clean, (rows, groups, groups), strict=True):
        assert torch.equal(each.grad[~changed], expected[~changed])
        assert not torch.equal(each.grad[changed], expected[changed])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_reaches_its_row_and_its_group_alone(value: float) -> None:
    x, w, bias, dy = draw(torch.bfloat16, True)
    forward(x, w, bias).backward(dy)
    clean = [each.grad.clone() for each in (x, w, bias)]
    for each in (x, w, bias):
        each.grad = None
    row, group = 40, 3
    dy[row, 5] = value
    forward(x, w, bias).backward(dy)
    assert x.grad[row].isnan().all() and w.grad[group, 5].isnan().all()
    for each, expected, own in zip((x, w, bias), clean, (row, group, group), strict=True):
        others = torch.arange(len(each)) != own
        assert torch.equal(each.grad[others], expected[others])
    features = torch.arange(N) != 5
    assert torch.equal(w.grad[group, features], clean[1][group, features])


@pytest.mark.parametrize("spread", [20, 8])
def test_a_tokens_scale_may_be_anything(spread: int) -> None:
    x, w, _, dy = draw(torch.bfloat16, True)
    scales = torch.exp2(torch.randint(-spread, spread + 1, (T, 1)).float()).bfloat16()
    dy = dy * scales
    forward(x, w).backward(dy)
    for g, (of_w, rows) in enumerate(parts(w.detach())):
        exact = dy[rows].double() @ of_w.double()
        for found, expected in zip(x.grad[rows], exact, strict=True):
            assert decibels(found, expected) >= GRADIENT_DB
        if rows.start < rows.stop:  # which the largest tokens make
            of_group = dy[rows].double().T @ x.detach()[rows].double()
            assert decibels(w.grad[g], of_group) >= GRADIENT_DB


def test_sparse_gradients_keep_their_zeros() -> None:
    x, w, _, dy = draw(torch.bfloat16, True)
    generator = torch.Generator().manual_seed(1)
    dy *= torch.rand(dy.shape, generator=generator) < 0.02
    dy[:, 7] = 0
    forward(x, w).backward(dy)
    silent = ~dy.any(1)
    assert silent.any() and not x.grad[silent].any() and not w.grad[:, 7].any()
    for g, (of_w, rows) in enumerate(parts(w.detach())):
        if dy[rows].any():
            exact = dy[rows].double() @ of_w.double()
            assert decibels(x.grad[rows], exact) >= GRADIENT_DB
            of_group = dy[rows].double().T @ x.detach()[rows].double()
            assert decibels(w.grad[g], of_group) >= GRADIENT_DB


def test_scaled_losses_in_fp16_scale_gradients_exactly() -> None:
    """A loss times 2^10 gives each gradient times 2^10, where fp16 has both."""
    x, w, bias, dy = draw(torch.float16, True)
    grads = []
    for scale in (1.0, 1024.0):
        for each in (x, w, bias):
            each.grad = None
        forward(x, w, bias).backward(dy * 2**-6 * scale)
        grads.append([each.grad.double() / scale for each in (x, w, bias)])
    for plain, scaled in zip(*grads, strict=True):
        assert (plain - scaled).abs().max() <= 2**-24  # fp16's subnormal numbers


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("groups", [False, True], ids=["linear", "grouped"])
def test_main_gradients_are_added_to_and_weights_shared(dtype: torch.dtype, groups: bool) -> None:
    x, w, _, dy = draw(torch.bfloat16, groups)
    forward(x, w).backward(dy)
    alone, dx = w.grad, x.grad
    w.grad = x.grad = None
    before = torch.randn(w.shape).to(dtype)
    main = before.clone()
    shared = aiter_mx.quantize_dual(w.detach())
    for _ in range(2):
        x.grad = None
        forward(x, w, main_grad=main, quantized_w=shared).backward(dy)
        assert w.grad is None and torch.equal(x.grad, dx)
    assert (main - before - 2 * alone.to(dtype)).norm() <= 0.01 * main.norm()


@pytest.mark.parametrize("groups", [False, True], ids=["linear", "grouped"])
def test_compiled_and_checkpointed_calls_are_bitwise_the_same(groups: bool) -> None:
    x, w, bias, dy = draw(torch.bfloat16, groups)

    def step(call: Callable[..., Tensor]) -> list[Tensor]:
        for each in (x, w, bias):
            each.grad = None
        y = call(x, w, bias)
        y.backward(dy)
        return [y.detach(), *(each.grad.clone() for each in (x, w, bias))]

    expected = step(forward)
    offs = torch.tensor(OFFSETS)

    def traced(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        if groups:
            return aiter_mx.grouped_linear(x, w, offs, bias)
        return aiter_mx.linear_autograd(x, w, bias)

    compiled = torch.compile(traced, fullgraph=True, backend="aot_eager")
    for call in (compiled, lambda *args: checkpoint(forward, *args, use_reentrant=False)):
        for found, right in zip(step(call), expected, strict=True):
            assert torch.equal(found, right)


@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_autocast_says_in_which_dtype_x_is_taken(groups: bool, is_compiled: bool) -> None:
    x, w, bias, dy = draw(torch.float32, groups)
    torch.compiler.reset()
    call: Callable[..., Tensor] = forward
    if is_compiled:
        offs = torch.tensor(OFFSETS)
        plain = (lambda x, w, b: aiter_mx.grouped_linear(x, w, offs, b)) if groups else (
            aiter_mx.linear_autograd
        )  # fmt: skip
        call = torch.compile(plain, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        y = call(x, w, bias)
    assert y.dtype == torch.bfloat16
    y.backward(dy.bfloat16())
    found = [each.grad for each in (x, w, bias)]
    assert [each.dtype for each in found] == [torch.float32] * 3
    half, x.grad, w.grad, bias.grad = x.detach().bfloat16().requires_grad_(), None, None, None
    expected = forward(half, w, bias)
    expected.backward(dy.bfloat16())
    assert torch.equal(y, expected)
    for mine, right in zip(found, (half.grad.float(), w.grad, bias.grad), strict=True):
        assert torch.equal(mine, right)


def test_one_graph_serves_any_number_of_rows() -> None:
    w, of_groups = torch.randn(64, 32), torch.randn(3, 64, 32)

    def both(x: Tensor, offs: Tensor) -> Tensor:
        y = aiter_mx.linear_autograd(x, w)
        return y + aiter_mx.grouped_linear(x, of_groups, offs)

    compiled = torch.compile(both, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (5, 64, 33):
        offs = torch.tensor([0, 3, 4, rows])
        found = []
        for call in (compiled, both):
            x = torch.randn(rows, 32, generator=torch.Generator().manual_seed(rows))
            call(x.requires_grad_(), offs).sum().backward()
            found.append(x.grad)
        assert torch.equal(*found)


def test_groups_are_told_in_any_form() -> None:
    x, w, _, _ = draw(torch.bfloat16, True)
    offs = torch.tensor(OFFSETS)
    expected = forward(x, w)
    assert torch.equal(aiter_mx.grouped_linear(x, w, offs[1:].int()), expected)
    lens = offs[1:] - offs[:-1]
    assert torch.equal(aiter_mx.grouped_linear(x, w, group_lens=lens), expected)


@pytest.mark.parametrize(
    ("offs", "lens", "expected"),
    [
        ([0, 5, 3, 10], None, "group 1 would be rows 5 to 3"),
        ([0, 3, 5, 9], None, r"groups are rows 0 to 9, and must be all of x, \[10, 32\]"),
        (None, [5, -1, 6], "group_lens: group 1 would be rows 5 to 4"),
        (None, [5, 6, 6], "rows 0 to 17"),
        (None, [5, 5], r"group_lens must be \[3\] for 3 groups, got \[2\]"),
        ([0, 10], None, r"group_offs must be \[3\] or \[4\]"),
        (None, None, "either group_offs or group_lens"),
    ],
)
def test_groups_that_are_not_the_rows_are_refused(
    offs: list[int] | None, lens: list[int] | None, expected: str
) -> None:
    x = torch.randn(10, 32)
    given = [None if each is None else torch.tensor(each) for each in (offs, lens)]
    with pytest.raises(ValueError, match=expected):
        offsets_of_groups(*given, 3, x)


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        (((5, 48), (32, 48)), "K must be a multiple of 32.*K=48"),
        (((5, 64), (40, 64)), "N must be a multiple of 32, which a product of one of the two"),
        (((5, 64), (32, 96)), r"got \[5, 64\] and \[32, 96\]"),
        (((5, 64), (2, 32, 64)), r"w must be \[N, K\], got \[2, 32, 64\]"),
    ],
)
def test_a_shape_without_a_gradient_is_refused_when_it_is_called(
    shapes: tuple[tuple[int, ...], tuple[int, ...]], expected: str
) -> None:
    with pytest.raises(ValueError, match=expected):
        aiter_mx.linear_autograd(*(torch.randn(shape) for shape in shapes))


def test_a_second_derivative_is_an_error_and_not_silence() -> None:
    x, w = torch.randn(5, 64, requires_grad=True), torch.randn(32, 64, requires_grad=True)
    for loss in (Tensor.sum, lambda y: y.relu().sum(), lambda y: y.square().sum()):
        y = aiter_mx.linear_autograd(x, w)
        plain, dx = (
            torch.autograd.grad(loss(y), x, create_graph=again, retain_graph=True)[0]
            for again in (False, True)
        )
        assert torch.equal(dx, plain)
        with pytest.raises(RuntimeError, match="trying to differentiate twice"):
            (x.sum() + dx.square().sum()).backward()
