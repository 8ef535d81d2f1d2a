"""What the conformance suites of all ops share: subjects, the places they are tried in, orders.

A suite (``op_tests/<op>/test_conformance.py``) has a test for each property, and runs it for every
subject: a kernel with the cases that it is tried with (``op_tests/<op>/subjects``). A new kernel is
one more entry there; it then has every property to show, in the simulator, with ``-m gpu``, or as a
fallback, as its ``places`` say. A new property is one more test under ``@each(SUBJECTS)``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
import torch

import aiter_mx
from aiter_mx.kernels.registry import find_kernel
from aiter_mx.kernels.spec import KernelSpec
from aiter_mx.target import target_of

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
INDICES = {"i32": torch.int32, "i64": torch.int64}
_Case = TypeVar("_Case")
SCHEDULES = ("random", "round-robin", "run-to-barrier")
ORDERS = [*(("random", seed) for seed in range(3)), ("round-robin", 0), ("run-to-barrier", 0)]
"""Schedules of waves, and seeds."""


@dataclass(frozen=True)
class Subject:
    """A kernel that a suite tries.

    Attributes:
        name, op, backend: the kernel's.
        places: ``sim`` (the simulated gfx950), ``torch`` (no GPU), or an architecture, which
            ``-m gpu`` tests where such a GPU is.
    """

    name: str
    places: tuple[str, ...]
    op: str = field(kw_only=True)
    backend: str = field(default="hip", kw_only=True)

    def kernel(self, arch: str) -> KernelSpec:
        """The declaration for an architecture, or for ``cpu``."""
        return find_kernel(self.op, arch, self.backend, self.name)


def named(*names: str) -> Callable[..., dict[str, int]]:
    """What makes configurations of values in the order of these parameters."""
    return lambda *values: dict(zip(names, values, strict=True))


def alone(cases: Iterable[_Case]) -> list[list[_Case]]:
    """Groups of one case each."""
    return [[case] for case in cases]


@contextmanager
def tried(subject: Subject, place: str) -> Iterator[tuple[KernelSpec, torch.device]]:
    """A subject's kernel in a place, and the device of its tensors."""
    if place == "gpu":
        device = torch.device("cuda", torch.cuda.current_device())
        arch = target_of(device).arch
        if arch not in subject.places:
            pytest.skip(f"{subject.name} is for another GPU")
        yield subject.kernel(arch), device
    elif place == "sim":
        with aiter_mx.simulate("gfx950"):
            yield subject.kernel("gfx950"), torch.device("cpu")
    else:
        yield subject.kernel("cpu"), torch.device("cpu")


@dataclass(frozen=True)
class Bench:
    """A subject where it is tried; a suite's own class says how it is launched and judged."""

    subject: Any
    kernel: KernelSpec
    device: torch.device


def bench_of(kind: type[Bench]) -> Any:
    """The fixture ``bench`` of a suite, for the subjects and places that ``each`` names."""

    @pytest.fixture(name="bench")
    def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
        subject, place = request.param
        with tried(subject, place) as (kernel, device):
            yield kind(subject, kernel, device)

    return bench


def trial(subject: Subject, place: str, *more: Any) -> Any:
    """A subject in a place, with more values, as a test's parameters."""
    marks = [pytest.mark.gpu] if place == "gpu" else []
    name = "-".join(map(str, (subject.name, place, *more)))
    return pytest.param((subject, place), *more, id=name, marks=marks)


def places(subject: Subject) -> list[str]:
    """Where it is tried: ``gpu`` stands for the architectures that it is for."""
    return [*dict.fromkeys(p if p in ("sim", "torch") else "gpu" for p in subject.places)]


def each(
    subjects: Iterable[Any], place: str | None = None, **by: Sequence[Any]
) -> pytest.MarkDecorator:
    """A test for every subject, in one place or in all; ``by`` names one more parameter.

    Its values are the same for all subjects, or those that a function of the subject gives.
    """
    trials = []
    for subject in subjects:
        values = next(iter(by.values()), [()])
        for here in places(subject):
            if place in (None, here):
                for value in values(subject) if callable(values) else values:
                    trials.append(trial(subject, here, *([value] if by else [])))
    return pytest.mark.parametrize(("bench", *by), trials, indirect=["bench"])


def in_order(monkeypatch: pytest.MonkeyPatch, draw: random.Random, seed: int) -> None:
    """Have simulated waves take turns in an order that is drawn, with late stores at times."""
    schedule, order = draw.choice(ORDERS)
    monkeypatch.setenv("AITER_MX_SIM_SCHEDULE", schedule)
    monkeypatch.setenv("AITER_MX_SIM_SEED", str(order + seed))
    monkeypatch.setenv("AITER_MX_SIM_DELAY", draw.choice("01"))


def in_drawn_orders(
    monkeypatch: pytest.MonkeyPatch, number: int, cases: Iterable[_Case]
) -> Iterator[tuple[int, _Case, random.Random]]:
    """Cases, each with its place and with waves in an order of its own, as ``number`` has it drawn.

    The third value has drawn the orders so far, and may draw more.
    """
    draw = random.Random(number)
    for seed, case in enumerate(cases):
        in_order(monkeypatch, draw, seed)
        yield seed, case, draw


def every_order(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set one order of simulated waves after the other, and late stores for half of them."""
    for at, (schedule, seed) in enumerate(ORDERS):
        monkeypatch.setenv("AITER_MX_SIM_SCHEDULE", schedule)
        monkeypatch.setenv("AITER_MX_SIM_SEED", str(seed))
        monkeypatch.setenv("AITER_MX_SIM_DELAY", str(at % 2))
        yield
