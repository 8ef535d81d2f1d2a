"""Forms of operands that ``aiter_mx.linear`` brings to matrices: any rank, strided rows, compact
scales of weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import aiter_mx
from op_tests.linear.operands import operands

N, K = 40, 96


@pytest.fixture(params=["eager", "compiled"])
def linear(request: pytest.FixtureRequest) -> Callable[..., torch.Tensor]:
    if request.param == "eager":
        return aiter_mx.linear
    torch._dynamo.reset()
    return torch.compile(aiter_mx.linear, backend="eager", fullgraph=True)


@pytest.mark.parametrize("leading", [(), (6,), (2, 3), (2, 1, 3), (0, 3)])
@pytest.mark.parametrize("quantised", [True, False])
def test_x_of_any_rank_is_that_of_its_rows(
    linear: Callable[..., torch.Tensor], leading: tuple[int, ...], quantised: bool
) -> None:
    M = torch.Size(leading).numel()
    xq, xs, wq, ws = operands(M, N, K, 7)
    if not quantised:
        xq, xs = torch.randn(M, K, dtype=torch.bfloat16), None
    expected = aiter_mx.linear(xq, xs, wq, ws)
    shaped = None if xs is None else xs.view(*leading, K // 32)
    assert torch.equal(linear(xq.view(*leading, K), shaped, wq, ws), expected.view(*leading, N))
    out = torch.full((*leading, N), torch.nan, dtype=torch.bfloat16)
    assert linear(xq.view(*leading, K), shaped, wq, ws, out=out) is out
    assert torch.equal(out, expected.view(*leading, N))


def test_rows_may_lie_apart(linear: Callable[..., torch.Tensor]) -> None:
    xq, xs, wq, ws = operands(6, N, K, 7)
    wide = torch.zeros(6, K + 32, dtype=torch.uint8).view(torch.float8_e4m3fn)
    wide[:, :K] = xq
    scales = torch.full((6, K // 32 + 5), 255, dtype=torch.uint8)
    scales[:, : K // 32] = xs
    found = linear(wide[:, :K], scales[:, : K // 32], wq, ws)
    assert torch.equal(found, aiter_mx.linear(xq, xs, wq, ws))


@pytest.mark.parametrize("rows", [1, 31, 32, 40, 64])
def test_a_scale_of_weights_may_stand_for_32_rows(
    linear: Callable[..., torch.Tensor], rows: int
) -> None:
    xq, xs, wq, _ = operands(5, rows, K, 7)
    compact = torch.randint(120, 134, (-(-rows // 32), K // 32), dtype=torch.uint8)
    repeated = compact.repeat_interleave(32, 0)[:rows].contiguous()
    expected = aiter_mx.linear(xq, xs, wq, repeated)
    assert torch.equal(linear(xq, xs, wq, compact), expected)
    assert torch.equal(linear(xq[None], xs[None], wq, compact), expected[None])


def test_what_does_not_fit_is_refused() -> None:
    xq, xs, wq, ws = operands(6, N, K, 7)
    x = xq.view(2, 3, K)
    for arguments, options, message in [
        ((x, xs, wq, ws), {}, r"xs must be \[2, 3, 3\], got \[6, 3\]"),
        ((x, xs.view(2, 3, 3), wq, ws), {"out": torch.empty(6, N).bfloat16()}, r"out must be \[2"),
        ((xq, xs, wq, ws[:3]), {}, r"ws must be \[40, 3\], got \[3, 3\]"),
        ((x, xs.view(2, 3, 3), wq[None], ws), {}, r"wq must have the dimensions \[N, K\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            aiter_mx.linear(*arguments, **options)
