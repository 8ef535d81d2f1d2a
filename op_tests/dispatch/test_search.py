"""The choice of a configuration: bounds leave nothing out, and equal costs are decided one way."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import pytest

from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.linear.choice_gfx950 import LARGEST, MOST_CODES, fastest_of, menu
from aiter_mx.kernels.linear.mfma_choice_gfx950 import (
    FITTED,
    SEARCHES,
    Code,
    code_cycles,
    every_code,
    fastest_of_codes,
    in_blocks,
    tuned_for,
)
from aiter_mx.kernels.linear.mfma_gfx950 import MAX_K
from aiter_mx.kernels.linear.mfma_ways_gfx950 import BLOCK_M, way_of
from aiter_mx.kernels.linear.persistent_choice_gfx950 import (
    LARGE,
    config_of_large,
    cycles_of,
    fastest_large,
    in_rows,
    large_cycles,
    worth_of,
)
from aiter_mx.kernels.registry import kernels_of, ops, problem_type
from aiter_mx.kernels.search import Costed, Least, Search, without_waste
from aiter_mx.kernels.spec import KernelSpec, Param, Problem, combinations
from aiter_mx.target import ARCHS, Target, hardware
from op_tests.bench.routes import DRAWS

PROBLEMS = 120
EXTREMES = tuple(
    LinearProblem(M, N, K)
    for M in (1, 4, 16, 17, 64, 65, 129, 4096)
    for N, K in ((1, 32), (1 << 22, 32), (70, 65568), (9216, 28672), (3, MAX_K - 32))
)
SUBJECTS = [
    pytest.param(kernel, arch, id=f"{kernel.op}-{kernel.name}-{arch}")
    for op in ops()
    if op in DRAWS
    for kernel in kernels_of(op)
    for arch in ARCHS
    if kernel.module is not None and kernel.params and kernel.is_for(arch)
]


def _problems(kernel: KernelSpec, target: Target) -> Iterator[tuple[Target, Problem]]:
    """Problems that the kernel covers, on GPUs of several sizes; some are small, some uneven."""
    draw, of_type = random.Random(f"{kernel.op} {kernel.name}"), problem_type(kernel.op)
    found = 0
    while found < PROBLEMS:
        fields: dict[str, Any] = DRAWS[kernel.op](draw)
        if kernel.op == "linear" and draw.random() < 0.5:
            more = {"M": draw.randrange(1, 20), "N": draw.randrange(1, 20000)}
            fields |= {**more, "K": 32 * draw.randrange(1, 300)}
        elif kernel.op == "moe_gemm" and draw.random() < 0.5:
            fields |= {"block_m": draw.choice((4, 48, 128, 256)), "E": draw.choice((1, 32, 256))}
        problem = of_type(**fields)
        cu_num = draw.choice((target.cu_num, target.cu_num, 8, 114))
        of_size = replace(target, cu_num=cu_num)
        if kernel.refusal(of_size, problem) is None:
            found += 1
            yield of_size, problem
    for problem in EXTREMES if kernel.op == "linear" else ():
        if kernel.refusal(target, problem) is None:
            yield target, problem


@pytest.mark.parametrize(("kernel", "arch"), SUBJECTS)
def test_candidates_are_legal_and_fit_and_the_first_is_chosen(
    kernel: KernelSpec, arch: str
) -> None:
    for target, problem in _problems(kernel, hardware(arch)):
        candidates = kernel.candidates(target, problem)
        for config in candidates:
            kernel.check_config(config)
            assert kernel.misfit(target, problem, config) is None
        if kernel.op == "quantize" or (kernel.name, arch) == ("gemv", "gfx950"):
            assert kernel.configure(target, problem) in candidates  # it is a rule of its own
        elif kernel.op == "linear" and kernel.name in ("mfma", "mfma_split"):
            most = replace(problem, M=tuned_for(problem.M))
            config = kernel.configure(target, problem)
            way = way_of(most, config)
            code = Code(way.row_tiles, way.col_tiles, config["waves"], way.splits)
            is_of_menu = most.M > BLOCK_M and code in menu(target, problem.N, problem.K).codes
            assert is_of_menu or config == kernel.candidates(target, most)[0]
        elif (kernel.op, kernel.name, arch) == ("linear", "persistent", "gfx950"):
            config = kernel.configure(target, problem)
            tile = (config["tile_m"], config["tile_n"])
            own = [c for c in candidates if (c["tile_m"], c["tile_n"]) == tile]
            assert config == own[0]
        else:
            assert kernel.configure(target, problem) == candidates[0], problem


def _weights(seed: str, count: int) -> Iterator[tuple[Target, int, int]]:
    """GPUs, N and K; some of these are few, and some N suit no large tile."""
    draw, target = random.Random(seed), hardware("gfx950")
    for _ in range(count):
        cu_num = draw.choice((target.cu_num, target.cu_num, 8, 114))
        N, K = draw.randrange(1, draw.choice((300, 20_000))), 32 * draw.randrange(1, 400)
        yield replace(target, cu_num=cu_num), draw.choice((N, 32 * N)), K


def test_what_a_menu_weighs_takes_what_it_takes_beside_others() -> None:
    """Columns of rows by numpy, one number of rows, and the search of all configurations."""
    draw = random.Random("columns")
    for target, N, K in _weights("weights", 60):
        rows = [draw.randrange(65, most) for most in (129, 257, 2049, 4097, 20_000)]
        rows = [tuned_for(M) for M in rows]
        of_large = large_cycles(target, in_rows(np.array(rows)), N, K)
        codes = every_code(K % 64 != 0)
        of_codes = code_cycles(target, codes, in_blocks(codes, np.array(rows)), N, K)
        for column, M in enumerate(rows):
            problem = LinearProblem(M, N, K)
            one_by_one = [cycles_of(target, large, problem) for large in LARGE]
            assert of_large[:, column] == pytest.approx(one_by_one, rel=1e-12)
            fits = np.flatnonzero(np.isfinite(of_codes[:, column])).tolist()
            for at in draw.sample(fits, min(len(fits), 6)):
                code, cycles = codes.code(at), of_codes[at, column]
                one, kernel, config = fastest_of_codes(target, [code], problem)
                assert one == pytest.approx(cycles, rel=1e-12)
                own = tuple(config.values())
                costs = SEARCHES[kernel].costs(target, problem, Least())
                searched = [cost for cost, _, values in costs if values == own]
                # It leaves out waves that have no more steps to take.
                assert all(FITTED["launch"] + cost == pytest.approx(one) for cost in searched)


def test_a_call_takes_the_fastest_of_a_menu() -> None:
    draw = random.Random("calls")
    for target, N, K in _weights("menus", 60):
        codes, larges = menu(target, N, K)
        assert 0 < len({*codes, *larges}) == len(codes) + len(larges) <= MOST_CODES
        for most in (129, 257, 1025, 4097):
            problem = LinearProblem(tuned_for(draw.randrange(65, most)), N, K)
            of_large = [cycles_of(target, large, problem) / worth_of(large) for large in larges]
            of_codes, kernel, config = fastest_of_codes(target, codes, problem)
            chosen, chosen_config = fastest_of(target, problem)
            if of_codes < min(of_large, default=inf):
                assert (chosen, chosen_config) == (kernel, config)
            else:
                tile = (chosen_config["tile_m"], chosen_config["tile_n"])
                at = [(large.kernel, large.tile) for large in larges].index((chosen, tile))
                assert of_large[at] == min(of_large)


def test_many_rows_wait_for_no_menu_where_the_largest_tile_is_the_fastest_of_all() -> None:
    draw, spared = random.Random("many"), 0
    for target, N, K in _weights("many", 60):
        problem = LinearProblem(tuned_for(draw.randrange(4097, 32_769)), N, K)
        menu.cache_clear()
        kernel, config = fastest_of(target, problem)
        _, large = fastest_large(target, LARGE, problem)
        made = menu.cache_info().misses
        assert made == (large != LARGEST)
        if not made:
            spared += 1
            assert (kernel, config) == (large.kernel, config_of_large(large))
    assert spared > 20


def test_the_largest_tile_is_no_code_object_beside_a_menu_of_seven() -> None:
    draw, full = random.Random("eighth"), 0
    rows = [draw.randrange(4097, 32_769) for _ in range(200)]
    small = [(hardware("gfx950"), *shape) for shape in ((384, 1536), (384, 2048), (288, 15424))]
    for target, N, K in (*small, *_weights("eighth", 30)):
        codes, larges = menu(target, N, K)
        fastest = {fastest_large(target, LARGE, LinearProblem(M, N, K))[1] for M in rows}
        assert len({*codes, *larges} | ({LARGEST} & fastest)) <= MOST_CODES
        full += len({*codes, *larges}) == MOST_CODES
    assert full > 10


def test_a_menu_loses_little_beside_all_code_objects() -> None:
    """Of what is the fastest of all at each number of rows: on average, and at most."""
    draw, lost = random.Random("lost"), []
    for target, N, K in _weights("losses", 120):
        if target.cu_num < 256 or N % 32 or N < 1024 or K < 1024:
            continue
        codes, (own, larges) = every_code(K % 64 != 0), menu(target, N, K)
        for _ in range(20):
            M = tuned_for(round(2 ** draw.uniform(6.05, 14)))
            rows, problem = np.array([M]), LinearProblem(M, N, K)
            every = [cycles_of(target, large, problem) / worth_of(large) for large in LARGE]
            every += code_cycles(target, codes, in_blocks(codes, rows), N, K)[:, 0].tolist()
            of_menu = [cycles_of(target, large, problem) / worth_of(large) for large in larges]
            of_menu.append(fastest_of_codes(target, own, problem)[0])
            lost.append(min(of_menu) / min(every))
    assert len(lost) > 200 and sum(lost) / len(lost) < 1.015 and max(lost) < 1.35


PARAMS = (Param("split", (1, 2), ""), Param("rows", (3, 4, 5), ""), Param("depth", (6, 7), ""))


def _fake(seed: int) -> Search:
    """Costs with many that are equal, in an order of their own; it prunes what it may."""
    draw = random.Random(seed)
    costs = {tuple(c.values()): float(draw.randrange(4)) for c in combinations(PARAMS)}
    order = sorted(costs, key=lambda _: draw.random())

    def found(target: Target, problem: Problem, least: Least) -> Iterator[Costed]:
        for values in order:
            if costs[values] <= least.cost:
                yield costs[values], (), values

    return Search(PARAMS, found, most=6, alike=("split", "depth"), most_alike=2)


@pytest.mark.parametrize("seed", range(20))
def test_candidates_are_the_cheapest_and_few_of_them_alike(seed: int) -> None:
    search, target = _fake(seed), hardware("sm_90a")
    costs = {values: cost for cost, _, values in search.costs(target, None, Least())}

    def key(config: Any) -> tuple[float, tuple[int, ...]]:
        values = tuple(config.values())
        return costs[values], values

    chosen = search.candidates(target, None)
    assert len(chosen) == 6
    assert [key(config) for config in chosen] == sorted(map(key, chosen))
    assert search.best(target, None) == chosen[0]
    for config in combinations(PARAMS):
        kind = (config["split"], config["depth"])
        cheaper = [c for c in combinations(PARAMS) if key(c) < key(config)]
        alike = [c for c in cheaper if (c["split"], c["depth"]) == kind]
        ahead = [c for c in chosen if key(c) < key(config)]
        assert (config in chosen) == (len(alike) < 2 and len(ahead) < 6)


def test_a_search_that_finds_nothing_says_for_what() -> None:
    nothing = Search(PARAMS, lambda target, problem, least: (), most=1)
    with pytest.raises(ValueError, match="no configuration is known to fit this"):
        nothing.best(hardware("sm_90a"), "this")
    assert nothing.candidates(hardware("sm_90a"), "this") == []


@pytest.mark.parametrize("unroll", [1, 2, 3])
def test_no_fewer_waves_take_as_few_rounds(unroll: int) -> None:
    counts = (1, 2, 3, 4, 6, 8)
    for steps in range(1, 60):
        found = dict(without_waste(counts, steps, unroll))
        for waves in counts:
            rounds = -(-steps // (waves * unroll))
            fewer = [w for w in counts if w < waves and -(-steps // (w * unroll)) <= rounds]
            has_work = unroll <= -(-steps // waves)
            assert found.get(waves) == (rounds if has_work and not fewer else None)
