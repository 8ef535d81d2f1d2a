"""The menus that Hopper's linear of more than 64 rows is chosen from."""

from __future__ import annotations

import random
from dataclasses import replace
from math import inf

import numpy as np
import pytest

from aiter_mx.dispatch.dispatcher import route
from aiter_mx.kernels.linear import (
    LinearProblem,
    wgmma_f16_tiled_sm90,
    wgmma_fp8_rescaled_sm90,
    wgmma_fp8_tiled_sm90,
)
from aiter_mx.kernels.linear.choice_sm90 import Code, _fewest, best, menu
from aiter_mx.kernels.linear.problem import Sizes
from aiter_mx.kernels.linear.wgmma_bf16_codes_sm90 import costs_of_codes
from aiter_mx.kernels.registry import find_kernel
from aiter_mx.plan import build_requests
from aiter_mx.target import hardware

TARGET = hardware("sm_90a")
WEIGHTS = [(768, 2048), (1280, 2880), (2304, 6144), (9216, 6144), (512, 384), (64, 40960)]


@pytest.mark.parametrize(("N", "K"), WEIGHTS)
@pytest.mark.parametrize("exact", [False, True])
def test_a_call_takes_what_is_the_fastest_of_a_menu_by_the_models(
    N: int, K: int, exact: bool
) -> None:
    codes = menu(TARGET, N, K, exact)
    assert 0 < len(codes) <= 8
    assert not (exact and any(code.of_fp8 for code in codes))
    for M in (65, 128, 129, 257, 300, 1025, 2048, 2049, 4096):
        costs = dict(code.cost(TARGET, Sizes(M, N, K)) for code in codes)
        if not exact and M >= wgmma_fp8_rescaled_sm90.MIN_OWN_M:
            cycles, config = wgmma_fp8_rescaled_sm90.cheapest(TARGET, Sizes(M, N, K))
            costs[cycles] = tuple(config.values())
        chosen = best(TARGET, M, N, K, exact)
        assert chosen.cycles == min(costs)
        assert chosen.cycles == inf or costs[chosen.cycles] == chosen.values
        out_dtype = "fp32" if exact else "bf16"
        taken = route("linear", TARGET, LinearProblem(M, N, K, out_dtype))
        if taken.kernel in (
            "wgmma_bf16",
            "wgmma_f16_tiled",
            "wgmma_fp8_tiled",
            "wgmma_fp8_rescaled",
        ):
            assert tuple(taken.config.values()) == chosen.values
            assert taken.kernel == chosen.kernel
        else:  # of few rows menus may have nothing
            assert taken.kernel == ("wgmma_fp8" if M <= 128 else "wgmma_bf16_swapped")


@pytest.mark.parametrize(("N", "K"), [(16384, 8192), (10240, 8192)])
def test_a_row_more_than_a_tile_of_256_takes_no_second_one(N: int, K: int) -> None:
    config = route("linear", TARGET, LinearProblem(257, N, K)).config
    assert config["tile_m"] in (272, 288)


def test_more_rows_than_4096_take_a_tile_of_every_menu() -> None:
    kernels = set()
    for N, K in [(14336, 4096), (7168, 2048), (4096, 14336), (3072, 1536), *WEIGHTS]:
        large = {
            t.tile_m
            for t, _ in filter(None, (c.of_bf16 for c in menu(TARGET, N, K, True)))
            if t.pairs
        }
        for M in (4097, 5000, 6000, 7000):
            taken = route("linear", TARGET, LinearProblem(M, N, K, "fp32"))
            kernels.add(taken.kernel)
            assert taken.kernel != "wgmma_bf16" or taken.config["tile_m"] in large
    assert "wgmma_bf16" in kernels


@pytest.mark.parametrize(("N", "K"), [(8192, 8192), (16384, 4096), (2304, 6144)])
def test_more_rows_than_menus_have_over_fp16_take_what_its_own_model_says(N: int, K: int) -> None:
    kernel = find_kernel("linear", "sm_90a", "hip", "wgmma_f16_tiled")
    for M in (1025, 4096):
        problem = LinearProblem(M, N, K)
        own = wgmma_f16_tiled_sm90.WGMMA_F16_TILED.configure(TARGET, problem)
        assert kernel.configure(TARGET, problem) == own == kernel.candidates(TARGET, problem)[0]


@pytest.mark.parametrize(("N", "K"), WEIGHTS)
@pytest.mark.parametrize("exact", [False, True])
def test_what_arrays_say_is_what_numbers_say(N: int, K: int, exact: bool) -> None:
    rows = (96, 129, 257, 1025, 2048, 2049, 4096)
    of_bf16, costs = costs_of_codes(TARGET, rows, N, K)
    codes = [Code(None, code) for code in of_bf16]
    if not exact:
        of_fp8, costs_of_fp8 = wgmma_fp8_tiled_sm90.costs_of_codes(TARGET, rows, N, K)
        codes += [Code(of_fp8.code(at), None) for at in range(len(costs_of_fp8))]
        costs = np.concatenate((costs, costs_of_fp8))
    for code, of_code in zip(codes, costs.tolist(), strict=True):
        numbers = [code.cost(TARGET, Sizes(M, N, K))[0] for M in rows]
        assert numbers == pytest.approx(of_code, rel=1e-12)


def test_a_menu_has_the_codes_that_lose_the_least_together() -> None:
    """Each of three is the best for a third of the rows; one is half bad everywhere."""
    lost = np.full((5, 30), 3.0)
    for third in range(3):
        lost[third, 10 * third : 10 * (third + 1)] = 1
    lost[3], lost[4] = 2, 1 + np.arange(30) % 2 * 1e-6
    assert sorted(_fewest(lost[[1, 0, 2, 3]], 30)) == [1, 2]
    assert sorted(_fewest(lost[[3, 0, 1, 2]], 30)) == [1, 2, 3]
    assert _fewest(lost[[4, 0, 1, 2, 3]], 30) == []
    assert _fewest(lost[[3, 0, 1, 2, 4]], 30) == [4]


def test_menus_suit_gpus_of_any_size() -> None:
    draw = random.Random("menus")
    for cu_num in (8, 78, 114):
        target = replace(TARGET, cu_num=cu_num)
        for _ in range(5):
            N, K = draw.randrange(1, 20_000), 32 * draw.randrange(1, 400)
            problems = [LinearProblem(M, N, K) for M in (65, 200, 1000, 5000)]
            routes = [route("linear", target, problem) for problem in problems]
            assert build_requests(target, problems, routes)
