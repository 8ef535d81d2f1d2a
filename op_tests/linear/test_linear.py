"""``aiter_mx.linear`` as its callers see it: arguments, outputs, torch.compile, errors."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch

import aiter_mx
from aiter_mx.errors import BuildError
from aiter_mx.ops import linear as linear_module
from op_tests.mx_reference import assert_close_to_reference, linear_reference64, random_mx
from op_tests.threads import in_threads

Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def operands(M: int, N: int, K: int, seed: int = 0) -> Operands:
    generator = torch.Generator().manual_seed(seed)
    return (*random_mx(M, K, generator), *random_mx(N, K, generator))


@pytest.fixture(params=["cpu", "sim"])
def computing(request: pytest.FixtureRequest) -> object:
    """Once with the torch reference, once with the gfx950 kernel in the simulator."""
    if request.param == "cpu":
        yield
    else:
        with aiter_mx.simulate("gfx950"):
            yield


@pytest.mark.usefixtures("computing")
@pytest.mark.parametrize(("M", "N"), [(2, 70), (100, 96)])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_result_matches_reference(out_dtype: torch.dtype, M: int, N: int) -> None:
    xq, xs, wq, ws = operands(M, N, 160)
    bias = torch.randn(N)
    out = aiter_mx.linear(xq, xs, wq, ws, bias, out_dtype=out_dtype)
    assert (out.shape, out.dtype) == ((M, N), out_dtype)
    assert_close_to_reference(out, xq, xs, wq, ws, bias)


@pytest.mark.usefixtures("computing")
def test_out_is_written_and_returned_and_scales_may_be_e8m0() -> None:
    xq, xs, wq, ws = operands(2, 70, 160)
    out = torch.full((2, 70), float("nan"), dtype=torch.float32)
    e8m0 = torch.float8_e8m0fnu
    result = aiter_mx.linear(xq, xs.view(e8m0), wq, ws.view(e8m0), None, torch.float32, out)
    assert result is out
    assert_close_to_reference(out, xq, xs, wq, ws, None)
    assert torch.equal(out, aiter_mx.linear(xq, xs, wq, ws, out_dtype=torch.float32))


@pytest.mark.usefixtures("computing")
@pytest.mark.parametrize(("M", "N"), [(0, 8), (8, 0), (0, 0)])
def test_no_rows_or_no_features_give_an_empty_result(M: int, N: int) -> None:
    xq, xs, wq, ws = operands(M, N, 64)
    assert aiter_mx.linear(xq, xs, wq, ws).shape == (M, N)


def replace(index: int, change: Callable[[torch.Tensor], torch.Tensor]) -> Operands:
    changed = list(operands(4, 8, 64))
    changed[index] = change(changed[index])
    return tuple(changed)


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    space = torch.empty(tensor.nbytes + 1, dtype=torch.uint8)
    return space[1:].view(tensor.dtype).view(tensor.shape).copy_(tensor)


BAD_OPERANDS: list[tuple[Operands, type[Exception], str]] = [
    (replace(0, lambda t: t.float()), TypeError, "or torch.float16, got torch.float32"),
    (replace(0, lambda t: t.view(torch.float8_e5m2)), TypeError, "got torch.float8_e5m2"),
    (replace(1, lambda t: t.int()), TypeError, "xs must be torch.uint8 or torch.float8_e8m0fnu"),
    (replace(2, lambda t: t.view(torch.uint8)), TypeError, "wq must be torch.float8_e4m3fn"),
    (replace(3, lambda t: t.tolist()), TypeError, "ws must be a tensor, got list"),
    (replace(0, lambda t: t[0]), ValueError, r"xs must be \[2\], got \[4, 2\] \(xq: \[64\]\)"),
    (
        replace(0, lambda t: t[0, 0]),
        ValueError,
        r"xq must have the dimensions \[..., K\], got \[\]",
    ),
    (replace(2, lambda t: t[None]), ValueError, r"wq must have two dimensions"),
    (
        replace(2, lambda t: t[:, :32].contiguous()),
        ValueError,
        r"wq must be \[8, 64\], got \[8, 32\]",
    ),
    (replace(1, lambda t: t[:3]), ValueError, r"xs must be \[4, 2\], got \[3, 2\]"),
    (replace(3, lambda t: t.T.contiguous()), ValueError, r"ws must be \[8, 2\], got \[2, 8\]"),
    (replace(0, lambda t: t.T.contiguous().T), ValueError, "xq must be contiguous, got strides"),
    (replace(3, lambda t: t.T.contiguous().T), ValueError, "ws must be contiguous, got strides"),
    (replace(2, misaligned), ValueError, "wq must start at a multiple of 16 bytes"),
    (replace(2, lambda t: t.to("meta")), ValueError, "wq is on meta, but xq is on cpu"),
]


@pytest.mark.usefixtures("computing")
@pytest.mark.parametrize(("arguments", "error", "message"), BAD_OPERANDS)
def test_bad_operand_is_refused_with_what_was_given_and_expected(
    arguments: Operands, error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[object] = []
    monkeypatch.setattr(linear_module._plans, "by_call", {})
    monkeypatch.setattr(linear_module, "bind", lambda *_: lambda *call: launched.append(call))
    with pytest.raises(error, match=message):
        aiter_mx.linear(*arguments)
    assert not launched


def test_other_bad_arguments_are_refused() -> None:
    good = operands(4, 8, 64)
    storage = torch.zeros(4 * 64, dtype=torch.uint8)
    xq = storage.view(torch.float8_e4m3fn).view(4, 64)
    for arguments, keywords, error, message in [
        (operands(4, 8, 64)[:2] + operands(8, 8, 96)[:2], {}, ValueError, r"wq must be \[8, 64\]"),
        (good, {"bias": torch.randn(7)}, ValueError, r"bias must be \[8\], got \[7\]"),
        (good, {"bias": torch.randn(16)[::2]}, ValueError, "bias must be contiguous"),
        (good, {"bias": torch.randn(8).double()}, TypeError, "bias must be torch.bfloat16 or"),
        (good, {"out_dtype": torch.int32}, TypeError, "out_dtype must be torch.bfloat16 or"),
        (good, {"out": torch.empty(4, 8)}, TypeError, "out must be of out_dtype torch.bfloat16"),
        (good, {"out": torch.empty(8, 4).bfloat16()}, ValueError, r"out must be \[4, 8\]"),
        (good, {"out": torch.empty(8, 4).bfloat16().T}, ValueError, "out must be contiguous"),
        (good, {"out": torch.empty(4, 8).bfloat16().to("meta")}, ValueError, "out must be on cpu"),
        (
            (xq, *good[1:]),
            {"out": storage[192:].view(torch.bfloat16).view(4, 8)},
            ValueError,
            "out overlaps xq",
        ),
    ]:
        with pytest.raises(error, match=message):
            aiter_mx.linear(*arguments, **keywords)
    tail = torch.empty(4, 100, dtype=torch.float8_e4m3fn)
    scales = torch.empty(4, 3, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"K must be a multiple of 32, got K=100 \(xq: \[4, 100\]"):
        aiter_mx.linear(tail, scales, tail, scales)


@pytest.mark.usefixtures("payloads_compared_by_bytes")
def test_torch_library_checks_pass() -> None:
    xq, xs, wq, ws = operands(4, 8, 64)
    bias = torch.randn(8)
    torch.library.opcheck(torch.ops.aiter_mx.linear.default, (xq, xs, wq, ws, bias, torch.float16))
    torch.library.opcheck(
        torch.ops.aiter_mx.linear_out.default, (xq, xs, wq, ws, None, torch.empty(4, 8))
    )


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_as_one_graph(dynamic: bool) -> None:
    @torch.compile(fullgraph=True, dynamic=dynamic, backend="aot_eager")
    def layer(x: torch.Tensor, wq: torch.Tensor, ws: torch.Tensor) -> torch.Tensor:
        xq, xs = aiter_mx.quantize(x)
        y = torch.empty(x.shape[0], wq.shape[0], dtype=torch.float32)
        aiter_mx.linear(xq, xs, wq, ws, out_dtype=torch.float32, out=y)
        return y + aiter_mx.linear(xq, xs, wq, ws, out_dtype=torch.float32)

    for M in (4, 5, 7):
        x = torch.randn(M, 64)
        _, _, wq, ws = operands(M, 24, 64, seed=M)
        expected = 2 * aiter_mx.linear(*aiter_mx.quantize(x), wq, ws, out_dtype=torch.float32)
        assert torch.equal(layer(x, wq, ws), expected)


def test_threads_do_not_share_argument_buffers() -> None:
    cases = [operands(1, 70, 160, seed) for seed in range(4)]
    with aiter_mx.simulate("gfx950"):
        expected = [aiter_mx.linear(*case) for case in cases]
    wrong: list[int] = []

    def call(index: int) -> None:
        with aiter_mx.simulate("gfx950"):
            for _ in range(25):
                if not torch.equal(aiter_mx.linear(*cases[index]), expected[index]):
                    wrong.append(index)

    in_threads(call, len(cases))
    assert not wrong


def test_failed_build_raises_unless_fallback_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise BuildError("the compiler had a bad day")

    monkeypatch.setattr("aiter_mx.launch.build", refuse)
    monkeypatch.setattr("aiter_mx.launch._functions", {})
    monkeypatch.setattr(linear_module._plans, "by_call", {})
    case = operands(2, 33, 352)
    with aiter_mx.simulate("gfx950"):
        with pytest.raises(BuildError, match="bad day"):
            aiter_mx.linear(*case, out_dtype=torch.float32)
        monkeypatch.setenv("AITER_MX_ON_ERROR", "fall back")
        with pytest.raises(ValueError, match="AITER_MX_ON_ERROR must be raise or fallback, got 'f"):
            aiter_mx.linear(*case, out_dtype=torch.float32)
        monkeypatch.setenv("AITER_MX_ON_ERROR", "fallback")
        with pytest.warns(RuntimeWarning, match="hip/(gemv|mfma) failed .*had a bad day"):
            out = aiter_mx.linear(*case, out_dtype=torch.float32)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            aiter_mx.linear(*operands(1, 33, 352))
    assert_close_to_reference(out, *case, None)


def test_a_simulator_that_there_is_not_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AITER_MX_SIMULATE", "gfx942")
    with pytest.raises(ValueError, match="runs gfx950, AITER_MX_SIMULATE names 'gfx942'"):
        aiter_mx.linear(*operands(2, 33, 352))
    with pytest.raises(ValueError, match="runs gfx950, got 'sm_90a'"), aiter_mx.simulate("sm_90a"):
        pass


@pytest.mark.parametrize("M", [65, 127, 129, 511, 1000])
def test_more_than_64_rows_of_an_odd_number_of_features_on_gfx950(M: int) -> None:
    drawn = torch.Generator().manual_seed(M)
    operands = (*random_mx(M, 256, drawn), *random_mx(77, 256, drawn))
    reference = linear_reference64(*operands)
    with aiter_mx.simulate("gfx950"):
        out = aiter_mx.linear(*operands, out_dtype=torch.float32).double()
    assert (out - reference).norm() <= 1e-6 * reference.norm()
