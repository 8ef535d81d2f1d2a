"""Many builds at a time, of which some may fail, ahead of what needs them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from threading import Lock
from typing import Protocol

from aiter_mx.dispatch.route import Route
from aiter_mx.errors import AiterMxError
from aiter_mx.jit.build import BuildRequest, build
from aiter_mx.jit.compiler import give_way
from aiter_mx.jit.fingerprint import code_hash
from aiter_mx.jit.toolchain import find_toolchain
from aiter_mx.kernels.spec import Problem
from aiter_mx.plan import build_requests
from aiter_mx.target import Target
from aiter_mx.tuning.candidates import Built, Candidate

OnBuilt = Callable[[int, int], None]
"""Called with the number of builds that ended, and of those begun."""

HASH_DIGITS = 16
"""Of a hash in a table."""
_BACKLOG = 6  # builds that wait for each compiler: races of a few seconds do not use them up


class Others(Protocol):
    """Compiles candidates that are not of our building."""

    def add(self, problem: Problem, candidates: Iterable[Candidate]) -> None:
        """Begin with these."""

    def wait(self, problem: Problem, candidates: Iterable[Candidate]) -> None:
        """Return when these are compiled."""

    def close(self) -> None:
        """Stop; nothing is waited for any more."""


def requests_of(
    target: Target, pairs: Iterable[tuple[Problem, Candidate]]
) -> dict[BuildRequest, None]:
    """What candidates need compiled, each once; those that can have no launch are left out."""
    found: dict[BuildRequest, None] = {}
    for problem, candidate in pairs:
        try:
            found |= dict.fromkeys(build_requests(target, [problem], [candidate.route]))
        except ValueError:
            continue  # the candidate's race says why
    return found


def own_request(target: Target, problem: Problem, chosen: Route) -> BuildRequest | None:
    """What a kernel's own code object is built from; None where it has none of its own."""
    if chosen.spec.module is None:
        return None
    return build_requests(target, [problem], [chosen])[-1]


def build_of(target: Target, problem: Problem, candidate: Candidate) -> Built:
    """What is known of a candidate's own code object."""
    request = own_request(target, problem, candidate.route)
    return Built() if request is None else built(request)


def built(request: BuildRequest) -> Built:
    """What is known of a code object, which is compiled if it is not in the cache."""
    found = build(request)
    return Built(found.key[:HASH_DIGITS], code_hash(found.image)[:HASH_DIGITS])


def build_each(
    requests: Iterable[BuildRequest], jobs: int | None = None
) -> Iterator[tuple[BuildRequest, str | None]]:
    """Build in parallel; each request and what was wrong with it, or None, in their order."""

    def attempt(request: BuildRequest) -> tuple[BuildRequest, str | None]:
        try:
            build(request)
        except AiterMxError as error:
            return request, str(error)
        return request, None

    with ThreadPoolExecutor(jobs or len(os.sched_getaffinity(0)), "aiter_mx-tune") as pool:
        yield from pool.map(attempt, requests)


class Ahead:
    """Compiles what races will need while others are run, in the order in which it is told of them.

    What fails to compile fails again in its race, which says why.
    """

    def __init__(
        self,
        target: Target,
        jobs: int,
        others: Others | None = None,
        on_built: OnBuilt | None = None,
    ) -> None:
        """Have so many compilers at a time; ``others`` compiles what is not of our building."""
        self._target, self._others, self._on_built = target, others, on_built
        self._pool = ThreadPoolExecutor(jobs, "aiter_mx-tune", give_way)
        self._builds: dict[BuildRequest, Future[None]] = {}
        self._needs: dict[tuple[Problem, Candidate], tuple[BuildRequest, ...]] = {}
        self._ended, self._counting = 0, Lock()
        self._enough = _BACKLOG * jobs

    def add(self, problem: Problem, candidates: Iterable[Candidate]) -> None:
        """Begin with what these need.

        Raises:
            ToolchainError: no compiler for the target.
        """
        candidates = list(candidates)
        needed = self._needed(problem, candidates)
        if needed and not self._builds:
            find_toolchain(self._target.arch)
        for request in needed:
            if request not in self._builds:
                build = self._builds[request] = self._pool.submit(_attempt, request)
                build.add_done_callback(self._report)
        if self._others is not None:
            self._others.add(problem, candidates)

    def wait(self, problem: Problem, candidates: Iterable[Candidate]) -> None:
        """Return when all that these need is compiled, whoever of this host's workers did it."""
        candidates = list(candidates)
        self.add(problem, candidates)
        for request in self._needed(problem, candidates):
            self._builds[request].result()
        if self._others is not None:
            self._others.wait(problem, candidates)

    @property
    def is_busy(self) -> bool:
        """Whether there is enough to do for the time being."""
        return len(self._builds) - self._ended >= self._enough

    def is_ready(self, problem: Problem, candidates: Iterable[Candidate]) -> bool:
        """Whether none of these is yet to be compiled."""
        builds = map(self._builds.get, self._needed(problem, candidates))
        return all(build is not None and build.done() for build in builds)

    def settle(self) -> None:
        """Return when nothing of our building is being compiled."""
        wait(self._builds.values())

    def _needed(self, problem: Problem, candidates: Iterable[Candidate]) -> list[BuildRequest]:
        """What these need compiled, worked out once."""
        found: list[BuildRequest] = []
        for candidate in candidates:
            pair = problem, candidate
            if pair not in self._needs:
                self._needs[pair] = tuple(requests_of(self._target, [pair]))
            found += self._needs[pair]
        return found

    def _report(self, _: Future[None]) -> None:
        with self._counting:
            self._ended += 1
            ended = self._ended
        if self._on_built is not None:
            self._on_built(ended, len(self._builds))

    def __enter__(self) -> Ahead:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        if self._others is not None:
            self._others.close()


def _attempt(request: BuildRequest) -> None:
    with suppress(AiterMxError):
        build(request)
