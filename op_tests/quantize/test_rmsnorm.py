"""RMSNorm fused with quantisation: torch, the simulated gfx950, and a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import aiter_mx
from aiter_mx.dispatch.route import Route
from aiter_mx.kernels.registry import kernels_of
from aiter_mx.kernels.rmsnorm_quantize import PARAMS, RMSNormQuantizeProblem
from aiter_mx.launch import build_request, call, load_function
from aiter_mx.plan import bind_route
from aiter_mx.target import SIMULATED_GFX950, hardware
from aiter_mx.workloads.workload import workload_of
from op_tests.conformance import every_order
from op_tests.places import device_in
from op_tests.spills import assert_no_spills

ROWS = kernels_of("rmsnorm_quantize")[0]
WORKLOAD = workload_of("rmsnorm_quantize")
PROBLEMS = [
    RMSNormQuantizeProblem(1, 32),
    RMSNormQuantizeProblem(3, 96, "fp32"),
    RMSNormQuantizeProblem(2, 2080, "fp16", N2=40),
    RMSNormQuantizeProblem(5, 1536, N2=576, residual=1, epsilon=1e-5, epsilon2=0.25),
    RMSNormQuantizeProblem(2, 7168, residual=1),
    RMSNormQuantizeProblem(2, 4128, "fp32", N2=8200, residual=1),
]


device = device_in("torch", "sim", "cuda")


def called(problem: RMSNormQuantizeProblem, x: list[Tensor | None]) -> list[Tensor | None]:
    rows, residual, weight, x2, weight2, *_ = x
    assert rows is not None and weight is not None
    return [
        *aiter_mx.rmsnorm_quantize(
            rows, weight, problem.epsilon, residual=residual, x2=x2, weight2=weight2,
            epsilon2=problem.epsilon2, mode=problem.mode,
        )
    ]  # fmt: skip


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_it_is_the_quantised_norm(problem: RMSNormQuantizeProblem, device: torch.device) -> None:
    torch.manual_seed(problem.N)
    operands = WORKLOAD.draw(problem, device)
    judge = WORKLOAD.judge(problem, operands)
    results = called(problem, operands)
    verdict = judge([*operands[:5], *results])
    assert verdict.right, verdict
    again = called(problem, operands)
    for one, other in zip(results, again, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("mode", ["rceil", "floor", "even"])
def test_scales_and_payloads_are_those_of_quantize(mode: str, device: torch.device) -> None:
    """Of rows whose norm is exact: their root mean square, and epsilon 0, make a power of two."""
    x = torch.where(torch.rand(4, 128) < 0.5, 2.0, -2.0).to(device)
    weight = torch.randn(128).to(device)
    found = aiter_mx.rmsnorm_quantize(x, weight, 0.0, mode=mode)
    wanted = aiter_mx.quantize(x / 2 * weight, mode=mode)
    assert torch.equal(found.payload.view(torch.uint8), wanted[0].view(torch.uint8))
    assert torch.equal(found.scale, wanted[1])


def test_rows_do_not_depend_on_each_other_nor_on_leading_dimensions(device: torch.device) -> None:
    x, weight = torch.randn(2, 3, 160).bfloat16().to(device), torch.rand(160).bfloat16().to(device)
    x[1, 2, 7] = float("nan")
    x[0, 1, 5] = float("inf")
    found = aiter_mx.rmsnorm_quantize(x, weight)
    assert found.payload.shape == x.shape and found.scale.shape == (2, 3, 5)
    alone = aiter_mx.rmsnorm_quantize(x[0, 2].contiguous(), weight)
    assert torch.equal(found.payload[0, 2].view(torch.uint8), alone.payload.view(torch.uint8))
    values = aiter_mx.dequantize(found.payload, found.scale)
    assert values[1, 2].isnan().all() and values[0, 0].isfinite().all()
    assert aiter_mx.rmsnorm_quantize(x[:0], weight).payload.shape == (0, 3, 160)


@pytest.mark.parametrize("waves", PARAMS[0].values)
def test_every_configuration_gives_the_same_but_for_the_order_of_sums(waves: int) -> None:
    problem = RMSNormQuantizeProblem(3, 544, N2=96, residual=1)
    config = {"waves": waves}
    if ROWS.misfit(SIMULATED_GFX950, problem, config):
        assert waves == 32
        return
    operands = WORKLOAD.draw(problem, torch.device("cpu"))
    judge = WORKLOAD.judge(problem, operands)
    route = Route(ROWS, config, "a test")
    run = bind_route(route, SIMULATED_GFX950, problem, torch.device("cpu"))
    call(run, *operands)
    assert judge(operands).right
    assert load_function(ROWS, SIMULATED_GFX950, problem, config, 0) is not None


def test_no_interleaving_of_waves_changes_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = RMSNormQuantizeProblem(2, 4128, N2=1032, residual=1)
    operands = WORKLOAD.draw(problem, torch.device("cpu"))
    with aiter_mx.simulate("gfx950"):
        wanted = called(problem, operands)
        for _ in every_order(monkeypatch):
            for one, other in zip(called(problem, operands), wanted, strict=True):
                assert one is not None and other is not None
                assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_no_variant_for_gfx950_spills() -> None:
    target = hardware("gfx950")
    requests = []
    for problem in (*PROBLEMS, RMSNormQuantizeProblem(1, 65536), RMSNormQuantizeProblem(1, 16384)):
        config = ROWS.configure(target, problem)
        assert ROWS.misfit(target, problem, config) is None
        requests.append(build_request(ROWS, target, problem, config))
    assert_no_spills(requests, accumulators=True)
    assert ROWS.refusal(target, RMSNormQuantizeProblem(1, 65536 + 32)) is not None
    fewer = replace(PROBLEMS[0], N=65536)
    assert "a workgroup has a whole row" in str(ROWS.misfit(target, fewer, {"waves": 1}))


def test_wrong_arguments_are_named() -> None:
    x, weight = torch.randn(2, 64), torch.rand(64)
    for arguments, options, error, message in [
        ((x.double(), weight), {}, TypeError, r"x must be bfloat16, float16 or float32, got"),
        ((x[:, :48], weight), {}, ValueError, r"x must be \[\.\.\., N\], N a multiple of 32"),
        ((x, weight.bfloat16()), {}, TypeError, r"weight must be torch\.float32"),
        ((x, weight[:32]), {}, ValueError, r"weight must be \[64\], got \[32\]"),
        ((x.t().contiguous().t(), weight), {}, ValueError, "x must be contiguous"),
        ((x, weight), {"residual": x[:1]}, ValueError, r"residual must be \[2, 64\]"),
        ((x, weight), {"x2": x}, ValueError, "x2 and weight2 go together"),
        ((x, weight), {"x2": x[:1], "weight2": weight}, ValueError, r"x2 must be \[2, N2\]"),
        ((x, weight), {"mode": "up"}, ValueError, "mode must be one of rceil, floor, even"),
        ((x, None), {}, TypeError, "weight must be a tensor, got NoneType"),
    ]:
        with pytest.raises(error, match=message):
            aiter_mx.rmsnorm_quantize(*arguments, **options)


def test_torch_sees_a_proper_op(payloads_compared_by_bytes: None) -> None:
    x, weight = torch.randn(3, 64), torch.rand(64)
    op = torch.ops.aiter_mx.rmsnorm_quantize.default
    aiter_mx.rmsnorm_quantize(x, weight)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(op, (x, x, weight, x, weight, 1e-6, 1e-6, "rceil"), test_utils=tests)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(x: Tensor) -> tuple[Tensor, Tensor]:
        found = aiter_mx.rmsnorm_quantize(x * 2, weight, residual=x)
        return found.payload, found.scale

    wanted = aiter_mx.rmsnorm_quantize(x * 2, weight, residual=x)
    payload, scale = compiled(x)
    assert torch.equal(payload.view(torch.uint8), wanted.payload.view(torch.uint8))
    assert torch.equal(scale, wanted.scale)
    meta = aiter_mx.rmsnorm_quantize(x.to("meta"), weight.to("meta"))
    assert meta.payload.shape == x.shape and meta.residual is None
