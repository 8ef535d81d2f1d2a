"""``aiter_mx.linear`` on a real GPU: streams, graphs, threads, repeatability."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import aiter_mx
from aiter_mx.errors import CaptureError
from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.target import target_of
from op_tests.launches import name_triton
from op_tests.mx_reference import assert_close_to_reference, random_mx
from op_tests.sums import stated_errors
from op_tests.threads import in_threads

pytestmark = pytest.mark.gpu

Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def operands(M: int, N: int, K: int, seed: int = 0) -> Operands:
    generator = torch.Generator().manual_seed(seed)
    xq, xs = random_mx(M, K, generator, scale_exponents=(-6, 6))
    wq, ws = random_mx(N, K, generator, scale_exponents=(-6, 6))
    return xq.cuda(), xs.cuda(), wq.cuda(), ws.cuda()


def assert_right(out: torch.Tensor, case: Operands) -> None:
    (M, K), N = case[0].shape, case[2].shape[0]
    dtype = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[out.dtype]
    stated = stated_errors("linear", target_of(out.device), LinearProblem(M, N, K, dtype))
    assert_close_to_reference(out.cpu(), *(t.cpu() for t in case), **stated)


@pytest.mark.parametrize("M", [1, 7, 16])
def test_thousand_launches_are_bitwise_equal(M: int) -> None:
    case = operands(M, 2304, 6144)
    first = aiter_mx.linear(*case)
    assert_right(first, case)
    out = torch.empty_like(first)
    for _ in range(1000):
        out.fill_(float("nan"))
        aiter_mx.linear(*case, out=out)
        assert torch.equal(out, first)


def test_capture_needs_a_warm_kernel_and_then_replays_new_inputs() -> None:
    M, N, K = 3, 200, 1056
    case = operands(M, N, K)
    out = torch.empty(M, N, dtype=torch.float16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    warmup_call = r"aiter_mx.warmup\('linear', M=3, N=200, K=1056"
    with (
        pytest.raises(CaptureError, match=warmup_call),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        aiter_mx.linear(*case, None, torch.float16, out)
    routes = aiter_mx.warmup("linear", M=M, N=N, K=K, out_dtype=torch.float16)
    assert [route.backend for route in routes] == ["hip"]
    with torch.cuda.graph(graph):
        aiter_mx.linear(*case, None, torch.float16, out)
    for seed in (1, 2):
        for held, new in zip(case, operands(M, N, K, seed), strict=True):
            held.copy_(new)
        out.fill_(float("nan"))
        graph.replay()
        assert_right(out, case)


def test_fallback_is_warmed_and_captured_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    M, N, K = 150, 100, 352
    name_triton([("linear", LinearProblem(M, N, K))], tmp_path, monkeypatch)
    case = operands(M, N, K)
    out = torch.empty(M, N, dtype=torch.bfloat16, device="cuda")
    assert [r.backend for r in aiter_mx.warmup("linear", M=M, N=N, K=K)] == ["triton"]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        aiter_mx.linear(*case, out=out)
    out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(out, aiter_mx.linear(*case))


def test_two_streams_replay_at_once_and_stay_right() -> None:
    cases = [operands(5, 1536, 2048, seed) for seed in range(2)]
    expected = [aiter_mx.linear(*case) for case in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    outs, graphs = [], []
    for case, stream in zip(cases, streams, strict=True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            outs.append([aiter_mx.linear(*case) for _ in range(20)])
        graphs.append(graph)
    for _ in range(20):
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for same, value in zip(outs, expected, strict=True):
        assert all(torch.equal(out, value) for out in same)


def test_threads_launch_on_their_own_streams() -> None:
    cases = [operands(2, 768, 1024, seed) for seed in range(4)]
    expected = [aiter_mx.linear(*case) for case in cases]
    torch.cuda.synchronize()
    wrong: list[int] = []

    def call(index: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(200):
                out = aiter_mx.linear(*cases[index])
            torch.cuda.current_stream().synchronize()
        if not torch.equal(out, expected[index]):
            wrong.append(index)

    in_threads(call, len(cases))
    assert not wrong


def test_compiles_as_one_graph_on_the_gpu() -> None:
    @torch.compile(fullgraph=True)
    def layer(x: torch.Tensor, wq: torch.Tensor, ws: torch.Tensor) -> torch.Tensor:
        return aiter_mx.linear(*aiter_mx.quantize(x), wq, ws, out_dtype=torch.float32).relu()

    _, _, wq, ws = operands(1, 512, 1024)
    x = torch.randn(4, 1024, device="cuda")
    expected = aiter_mx.linear(*aiter_mx.quantize(x), wq, ws, out_dtype=torch.float32).relu()
    assert torch.equal(layer(x, wq, ws), expected)
