"""Many builds at a time, of which some may fail."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from aiter_mx.ahead import build_requests
from aiter_mx.errors import AiterMxError
from aiter_mx.jit.build import BuildRequest, build
from aiter_mx.kernels.spec import Problem
from aiter_mx.target import Target
from aiter_mx.tuning.candidates import Candidate


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


def build_of(target: Target, problem: Problem, candidate: Candidate) -> str:
    """What a candidate's own code object is stored under, shortened; empty where it has none."""
    requests = build_requests(target, [problem], [candidate.route])
    return build(requests[-1]).key[:16] if candidate.spec.module is not None else ""


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
