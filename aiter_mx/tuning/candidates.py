"""What may compute a problem: kernels and configurations, and what is told of how they did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from aiter_mx.dispatch.route import Route
from aiter_mx.errors import AiterMxError
from aiter_mx.kernels.registry import find_kernel, in_line
from aiter_mx.kernels.spec import Config, KernelSpec, Problem
from aiter_mx.target import Target

NO_CANDIDATES = ("torch",)
"""Backends that no table names: the reference is there for whatever nothing else covers."""


class Unfit(AiterMxError):
    """A candidate cannot be chosen: it does not build or launch, or computes something else."""


class ContextLost(AiterMxError):
    """A candidate broke this process's connection to the GPU; the next process must avoid it."""


@dataclass(frozen=True)
class Candidate:
    """A kernel with a configuration.

    Attributes:
        op, arch, backend, kernel: as tables name them.
        values: the configuration's names and values.
    """

    op: str
    arch: str
    backend: str
    kernel: str
    values: tuple[tuple[str, int], ...]

    @property
    def config(self) -> Config:
        return dict(self.values)

    @property
    def route(self) -> Route:
        """As though dispatch had chosen it."""
        return Route(self.spec, self.config, "tuner", ("a candidate of the tuner's",))

    @property
    def spec(self) -> KernelSpec:
        return find_kernel(self.op, self.arch, self.backend, self.kernel)

    def __str__(self) -> str:
        return " ".join([f"{self.backend}/{self.kernel}", *(f"{k}={v}" for k, v in self.values)])


@dataclass(frozen=True)
class Admission:
    """What was seen of a candidate that computes the right thing.

    Attributes:
        us: a first look at its time.
        rel_err: norm of its error over the norm of the reference.
    """

    us: float
    rel_err: float


@dataclass(frozen=True)
class Built:
    """What is known of a candidate's code object, as hashes; empty where it has none.

    Attributes:
        build: of its sources, flags and definitions.
        code: of the object itself, which other sources may give too.
    """

    build: str = ""
    code: str = ""


class Ahead(Protocol):
    """Compiles what races will need."""

    def add(self, problem: Problem, candidates: Iterable[Candidate]) -> None:
        """Begin with what these need."""

    def wait(self, problem: Problem, candidates: Iterable[Candidate]) -> None:
        """Return when all that these need is compiled."""

    def is_ready(self, problem: Problem, candidates: Iterable[Candidate]) -> bool:
        """Whether none of these is yet to be compiled."""

    def settle(self) -> None:
        """Return when nothing is being compiled."""

    @property
    def is_busy(self) -> bool:
        """Whether there is enough to do for the time being."""


class Bench(Protocol):
    """Where the candidates for one problem are tried."""

    def admit(self, candidate: Candidate) -> Admission:
        """Run it on random inputs; raise Unfit unless it gives what the reference gives."""

    def sample_us(self, candidate: Candidate) -> float:
        """Time one that was admitted, over one round; raise Unfit where it fails now."""

    def confirm(self, candidate: Candidate) -> None:
        """Raise Unfit unless its results are still right after all that timing."""

    def drop(self, candidate: Candidate) -> None:
        """Forget one that is out of the race."""

    def build_of(self, candidate: Candidate) -> Built:
        """What is known of its code object."""

    def touched(self) -> float | None:
        """The experts that a timed call reads on average; None for an op that has none."""


def candidate_of(kernel: KernelSpec, arch: str, config: Config) -> Candidate:
    """A configuration of a kernel as a candidate."""
    values = tuple((param.name, config[param.name]) for param in kernel.params)
    return Candidate(kernel.op, arch, kernel.backend, kernel.name, values)


def candidates_of(
    op: str,
    target: Target,
    problem: Problem,
    backends: Sequence[str],
    most: int,
    of_next: Sequence[int] = (),
    only: Sequence[str] = (),
) -> list[Candidate]:
    """What may compute a problem.

    Of each kernel its own choice comes first, then its ``candidates`` in their order, which is that
    of the kernel's own cost model where it has one.

    Args:
        op: name of the op.
        target: what computes it.
        problem: shape and dtypes.
        backends: whose kernels are wanted.
        most: candidates of each kernel.
        of_next: the most of a backend's second kernel, third, and so on, in the order in which
            they are taken where no table decides; the last number is for all that are left.
        only: names of kernels; of a backend that has some of these the others are left out.
    """
    found: dict[Candidate, None] = {}
    places: Counter[str] = Counter()
    line = [kernel for kernel in in_line(op, target, problem) if kernel.is_for(target.arch)]
    named = {kernel.backend for kernel in line if kernel.name in only}
    for kernel in line:
        if (
            kernel.backend in NO_CANDIDATES
            or kernel.backend not in backends
            or (kernel.backend in named and kernel.name not in only)
            or kernel.refusal(target, problem) is not None
        ):
            continue
        limits = (most, *(min(limit, most) for limit in of_next))
        limit = limits[min(places[kernel.backend], len(limits) - 1)]
        places[kernel.backend] += 1
        own = kernel.configure(target, problem)
        others = [config for config in kernel.candidates(target, problem) if config != own]
        for config in [own, *others][:limit]:
            found[candidate_of(kernel, target.arch, config)] = None
    return list(found)
