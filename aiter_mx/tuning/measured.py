"""Candidates timed on a GPU as an engine sees them: cold weights, graph replay, right results."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from statistics import mean

import torch

from aiter_mx.dispatch.cells import MEASURED
from aiter_mx.errors import AiterMxError
from aiter_mx.kernels.spec import Problem
from aiter_mx.plan import bind_route
from aiter_mx.target import Target
from aiter_mx.timing import GraphedCalls, copies_to_stay_cold
from aiter_mx.tuning.builds import Ahead, OnBuilt, build_of
from aiter_mx.tuning.candidates import Admission, Bench, Built, Candidate, ContextLost, Unfit
from aiter_mx.tuning.forked import aside
from aiter_mx.tuning.meter import Meter
from aiter_mx.tuning.triton_ahead import TritonAhead
from aiter_mx.workloads.workload import Operands, Workload, poison, workload_of

BACKENDS = ("hip", "triton", "vendor")
_FIRST_REPLAYS, _FEWEST_REPLAYS, _ROUND_REPLAYS = 3, 3, 5
_ROUND_US = 20e3
"""Beyond this a round has fewer replays: long kernels need fewer of them for a steady median."""
_HANG_S = 20.0
_POLL_S = 2e-4


def measured_meter(
    op: str, target: Target, device: torch.device, jobs: int, on_built: OnBuilt | None = None
) -> Meter:
    """A meter that times on ``device``, and builds with so many compilers at a time."""
    workload = workload_of(op)

    @contextmanager
    def bench(problem: Problem) -> Iterator[Bench]:
        with torch.cuda.device(device):
            yield GpuBench(workload, target, problem, device)

    return Meter(
        source=MEASURED,
        backends=BACKENDS,
        ahead=lambda: Ahead(
            target, jobs, TritonAhead(target, jobs) if find_spec("triton") else None, on_built
        ),
        bench=bench,
        aside=aside,
    )


class GpuBench:
    """The candidates of one problem on a GPU."""

    def __init__(
        self, workload: Workload, target: Target, problem: Problem, device: torch.device
    ) -> None:
        self._workload, self._target, self._problem = workload, target, problem
        self._device = device
        self._sets = _operand_sets(workload, problem, device)
        self._judges = [workload.judge(problem, operands) for operands in self._sets[:2]]
        self._graphs: dict[Candidate, tuple[GraphedCalls, list[Callable[[], object]], float]] = {}
        """Of those admitted: the graph, its calls, and about how long a replay takes in us."""

    def admit(self, candidate: Candidate) -> Admission:
        with self._guard(candidate):
            calls = self._calls(candidate)
            rel_err = max(self._checked(call, i) for i, call in enumerate(calls[:2]))
            graph = GraphedCalls(calls)
            # Whoever holds up this thread between two replays can make several look slow, but none
            # look fast, and a look that is wrong ends the race for a candidate.
            us = graph.time_us(_FIRST_REPLAYS, warm=1, of=min)
        self._graphs[candidate] = graph, calls, us * len(calls)
        return Admission(us, rel_err)

    def sample_us(self, candidate: Candidate) -> float:
        graph, _, once_us = self._graphs[candidate]
        replays = min(_ROUND_REPLAYS, max(_FEWEST_REPLAYS, int(_ROUND_US / once_us)))
        with self._guard(candidate):
            return graph.time_us(replays, warm=1)

    def confirm(self, candidate: Candidate) -> None:
        _, calls, _ = self._graphs[candidate]
        with self._guard(candidate):
            for index, call in enumerate(calls[:2]):
                self._checked(call, index)

    def drop(self, candidate: Candidate) -> None:
        self._graphs.pop(candidate, None)

    def touched(self) -> float | None:
        if self._workload.touched is None:
            return None
        return mean(self._workload.touched(self._problem, operands) for operands in self._sets)

    def build_of(self, candidate: Candidate) -> Built:
        return build_of(self._target, self._problem, candidate)

    def _calls(self, candidate: Candidate) -> list[Callable[[], object]]:
        """One call for each copy of the operands."""
        run = bind_route(candidate.route, self._target, self._problem, self._device)
        calls: list[Callable[[], object]] = []
        for operands in self._sets:
            addresses = [0 if tensor is None else tensor.data_ptr() for tensor in operands]
            calls.append(partial(run, operands, addresses))
        return calls

    def _checked(self, call: Callable[[], object], index: int) -> float:
        """The relative error of a call on a set of operands; raises Unfit where it is wrong."""
        operands = self._sets[index]
        poison(operands, self._workload.results)
        call()
        self._wait()
        verdict = self._judges[index](operands)
        if not verdict.right:
            raise Unfit(
                f"wrong: relative error {verdict.rel_err:.2e}, its worst element "
                f"{verdict.worst:.3g} times what rounding allows"
            )
        return verdict.rel_err

    def _wait(self) -> None:
        event = torch.cuda.Event()
        event.record()
        deadline = time.monotonic() + _HANG_S
        while not event.query():
            if time.monotonic() > deadline:
                raise TimeoutError(f"it did not end within {_HANG_S:g} s")
            time.sleep(_POLL_S)

    @contextmanager
    def _guard(self, candidate: Candidate) -> Iterator[None]:
        """Whatever goes wrong becomes Unfit, or ContextLost where nothing else would work now."""
        try:
            yield
        except Unfit:
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            lost = isinstance(error, TimeoutError)
            if not lost and not isinstance(error, AiterMxError):
                try:  # some errors end a CUDA context, and every later call fails with them
                    torch.cuda.synchronize(self._device)
                except RuntimeError:
                    lost = True
            if lost:
                raise ContextLost(what, candidate) from error
            raise Unfit(what) from None


def _operand_sets(workload: Workload, problem: Problem, device: torch.device) -> list[Operands]:
    """Operands for each call of a graph: two draws of all, and as many as stay cold."""
    sets = [workload.operands(problem, device, number) for number in range(2)]
    for index in range(2, copies_to_stay_cold(round(workload.read_bytes(problem, None)))):
        sets.append(workload.another(problem, sets[index % 2], index))
    return sets


def default_jobs() -> int:
    """Compilers at a time: one for each core, divided among the workers of this host, but for the
    core that each worker races on."""
    workers = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, len(os.sched_getaffinity(0)) // workers - 1)
