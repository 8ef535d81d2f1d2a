"""What measures: warm-ups that do not count, operands that stay cold, a gate that judges results.

There is no GPU here: a clock that tests set stands in for events, streams and graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from aiter_mx import timing
from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.moe_gemm import MoeGemmProblem
from aiter_mx.target import CPU
from aiter_mx.tuning import measured
from aiter_mx.tuning.candidates import Candidate, Unfit
from aiter_mx.workloads import workload_of

MIB = 1 << 20


class FakeGpu:
    """``torch.cuda`` as far as timing uses it.

    Attributes:
        now_ms: the clock, which a replay moves on by the next of ``replays_ms``.
        log: what was done, in order.
    """

    def __init__(self, replays_ms: list[float]) -> None:
        self.now_ms, self.replays_ms = 0.0, iter(replays_ms)
        self.log: list[str] = []
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                self.at = 0.0

            def record(self) -> None:
                self.at = gpu.now_ms

            def elapsed_time(self, other: Event) -> float:
                return other.at - self.at

            def query(self) -> bool:
                return True

        class Graph:
            def capture_begin(self) -> None:
                gpu.log.append("begin")

            def capture_end(self) -> None:
                gpu.log.append("end")

            def replay(self) -> None:
                gpu.now_ms += next(gpu.replays_ms)

        class Stream:
            def synchronize(self) -> None:
                gpu.log.append("synchronize")

            def wait_stream(self, other: str) -> None:
                gpu.log.append(f"wait for {other}")

        self.names: dict[str, Any] = {"Event": Event, "CUDAGraph": Graph, "Stream": Stream}
        self.names["stream"] = self._stream
        self.names["current_stream"] = lambda: "what draws operands"
        self.names["synchronize"] = lambda *_: self.log.append("synchronize")

    @contextmanager
    def _stream(self, stream: object) -> Iterator[None]:
        yield

    def call(self, name: str) -> Callable[[], None]:
        return lambda: self.log.append(name)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[float]], FakeGpu]:
    def make(replays_ms: list[float]) -> FakeGpu:
        fake = FakeGpu(replays_ms)
        for name, value in fake.names.items():
            monkeypatch.setattr(torch.cuda, name, value)
        return fake

    return make


def test_replays_before_the_first_timed_one_do_not_count(
    gpu: Callable[[list[float]], FakeGpu],
) -> None:
    fake = gpu([900.0, 800.0, 700.0, 4.0, 6.0, 5.0, 50.0, 5.0])
    graph = timing.GraphedCalls([fake.call("a"), fake.call("b")])
    assert graph.time_us(replays=5, warm=3) == 5.0 * 1e3 / 2  # the median, of each of two calls
    fake.replays_ms = iter([1.0, 7.0, 3.0, 9.0])
    assert graph.time_us(replays=3, warm=1, of=min) == 3.0 * 1e3 / 2


def test_what_builds_is_called_before_the_capture_and_every_copy_is_captured_once(
    gpu: Callable[[list[float]], FakeGpu],
) -> None:
    fake = gpu([])
    timing.GraphedCalls([fake.call(name) for name in "abcd"])
    first, *then = fake.log
    assert first == "wait for what draws operands"
    assert then == ["a", "b", "synchronize", "begin", *"abcd", "end"]


def test_a_capture_ends_where_a_call_fails(gpu: Callable[[list[float]], FakeGpu]) -> None:
    fake, left = gpu([]), [2]

    def fails_later() -> None:
        left[0] -= 1
        if left[0] == 0:
            raise ValueError("in the capture")

    with pytest.raises(ValueError, match="in the capture"):
        timing.GraphedCalls([fails_later])
    assert fake.log[-1] == "end"


def test_host_time_has_neither_the_first_calls_nor_the_waits_nor_a_disturbance(
    gpu: Callable[[list[float]], FakeGpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu([])
    now, made = [0.0], {"fast": 0, "slow": 0}
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: now.__setitem__(0, now[0] + 1.0))

    def call(name: str, us: float) -> None:
        made[name] += 1
        disturbed = made[name] <= 4 or made[name] in (6, 13)  # the first, and in two of the rounds
        now[0] += 1.0 if disturbed else us * 1e-6

    calls = [partial(call, "fast", 2.0), partial(call, "slow", 5.0)]
    assert timing.time_hosts_us(calls, repeats=4, rounds=3) == pytest.approx([2.0, 5.0])
    assert made == {"fast": 4 * 4, "slow": 4 * 4}


@pytest.mark.parametrize("size", [1, MIB, 100 * MIB, 511 * MIB, 512 * MIB, 4096 * MIB])
def test_copies_fill_more_than_any_cache(size: int) -> None:
    copies = timing.copies_to_stay_cold(size)
    assert copies >= 2 and copies * max(size, MIB) >= timing.COLD_BYTES >= 2 * 256 * MIB
    assert copies == 2 or (copies - 1) * max(size, MIB) < timing.COLD_BYTES


@pytest.mark.parametrize(
    "problem",
    [LinearProblem(3, 64, 96, bias="fp32"), MoeGemmProblem(6, 32, 64, 4, 2, 8)],
    ids=lambda problem: type(problem).__name__,
)
def test_weights_of_every_call_are_others_and_activations_stay_where_they_are(
    problem: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = "linear" if isinstance(problem, LinearProblem) else "moe_gemm"
    workload = workload_of(op)
    monkeypatch.setattr(measured, "copies_to_stay_cold", lambda size: 5)
    sets = measured._operand_sets(workload, problem, torch.device("cpu"))
    assert len(sets) == 5

    def places(at: int) -> set[int]:
        return {operands[at].data_ptr() for operands in sets}

    assert len(places(2)) == len(places(3)) == len(places(workload.results[0])) == 5
    assert len(places(0)) == 2  # of the two draws, which are judged
    weights = [operands[2].view(torch.uint8) for operands in sets]
    assert not any(torch.equal(weights[0], other) for other in weights[1:])


@pytest.fixture
def bench(
    gpu: Callable[[list[float]], FakeGpu], monkeypatch: pytest.MonkeyPatch
) -> measured.GpuBench:
    gpu([1.0] * 1000)
    monkeypatch.setattr(measured, "copies_to_stay_cold", lambda size: 3)
    problem = LinearProblem(3, 64, 96)
    here = torch.device("cpu")
    return measured.GpuBench(workload_of("linear"), CPU, problem, here)


CANDIDATE = Candidate("linear", "cpu", "torch", "reference", ())


def test_a_right_kernel_is_admitted_with_its_error(bench: measured.GpuBench) -> None:
    admission = bench.admit(CANDIDATE)
    assert admission.us == pytest.approx(1e3 / 3) and 0 < admission.rel_err < 1e-2
    bench.confirm(CANDIDATE)


def nothing(problem: Any, tensors: Any, config: Any) -> None:
    pass


def one_late_row(problem: Any, tensors: Any, config: Any) -> None:
    from aiter_mx.fallbacks import linear_torch

    linear_torch.run(problem, tensors, config)
    tensors[5][-1] = 0


@pytest.mark.parametrize("run", [nothing, one_late_row])
def test_a_kernel_that_does_less_is_not_admitted(
    run: Callable[..., None], bench: measured.GpuBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bound(*arguments: object) -> Callable[..., None]:
        return lambda tensors, addresses: run(LinearProblem(3, 64, 96), tensors, {})

    monkeypatch.setattr(measured, "bind_route", bound)
    with pytest.raises(Unfit, match="wrong: relative error"):
        bench.admit(CANDIDATE)


def test_a_kernel_that_goes_wrong_after_its_race_is_not_confirmed(
    bench: measured.GpuBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = [0]

    def bound(*arguments: object) -> Callable[..., None]:
        def run(tensors: Any, addresses: object) -> None:
            from aiter_mx.fallbacks import linear_torch

            calls[0] += 1
            if calls[0] <= 7:  # two that are judged, two before the capture, three in it
                linear_torch.run(LinearProblem(3, 64, 96), tensors, {})

        return run

    monkeypatch.setattr(measured, "bind_route", bound)
    bench.admit(CANDIDATE)
    assert calls == [7]
    with pytest.raises(Unfit, match="wrong: relative error"):
        bench.confirm(CANDIDATE)
