"""What the host does for Hopper's ``wgmma_fp8_tiled`` kernel of the linear."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import inf

import pytest

from aiter_mx.dispatch.dispatcher import route
from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.linear.fitted_sm90 import WGMMA_FP8_TILED as FITTED
from aiter_mx.kernels.linear.wgmma_fp8_sm90 import cycles_of_pass
from aiter_mx.kernels.linear.wgmma_fp8_tiled_sm90 import (
    _TILES,
    PARAMS,
    _codes,
    costs_of_codes,
    layout,
)
from aiter_mx.kernels.registry import find_kernel
from aiter_mx.plan import build_requests
from aiter_mx.target import hardware
from op_tests.linear.subjects.wgmma_fp8_sm90 import WGMMA_FP8_TILED_CASES as CASES
from op_tests.linear.subjects.wgmma_fp8_sm90 import WGMMA_FP8_TILED_SMALL as SMALL

TILED = find_kernel("linear", "sm_90a", "hip", "wgmma_fp8_tiled")
TARGET = hardware("sm_90a")
SMALL_WEIGHTS = [(768, 3584), (4096, 512), (3072, 1536), (2560, 2048), (1536, 4096), (1280, 2880)]


def test_cases_fit_and_reach_what_differs_between_configurations() -> None:
    found = []
    for M, N, K, chosen, cu_num, *_ in [*CASES, *SMALL]:
        TILED.check_config(chosen)
        target = replace(TARGET, cu_num=cu_num or TARGET.cu_num)
        one = layout(target, LinearProblem(M, N, K), chosen)
        assert one is not None, (M, N, K, chosen)
        found.append((one, chosen, N))
    assert {one.kept for one, *_ in found} == {False, True}
    parts = {(chosen["split"] > 1, chosen["k_groups"] > 1) for _, chosen, _ in found}
    assert len(parts) == 4
    assert {one.columns // 8 % 2 for one, *_ in found} == {0, 1}
    assert {one.stages < one.chunks for one, *_ in found} == {False, True}
    assert {N % 8 for *_, N in found} >= {0, 1, 4, 6}
    for param in TILED.params:
        if param.name != "tile_n":
            assert {chosen[param.name] for _, chosen, _ in found} == set(param.values), param.name


def test_every_token_and_feature_is_of_one_tile() -> None:
    assert TILED.module is not None
    for M, N, K, chosen, *_ in CASES:
        problem = LinearProblem(M, N, K)
        geometry = TILED.module.geometry(TARGET, problem, chosen)
        clusters, of_m = geometry.grid[0] // chosen["split"], geometry.grid[1]
        assert clusters * chosen["tile_n"] >= N > (clusters - 1) * chosen["tile_n"]
        assert of_m * chosen["tile_m"] >= M > (of_m - 1) * chosen["tile_m"]
        *_, chunks, chunks_more, _ = TILED.module.scalars(TARGET, problem, chosen)
        assert chosen["split"] * chunks + chunks_more == -(-K // 128)
        weights, x = (describe(TARGET, problem, chosen) for describe in TILED.module.tensor_maps)
        assert (weights.rows, weights.box_rows) == (N, chosen["tile_n"])
        assert (x.rows, x.box_rows) == (M, chosen["tile_m"])


@pytest.mark.parametrize("K", [32, 128, 1536, 2880, 6144, 14336, 128 * 320, 128 * 600, 128 * 770])
def test_what_is_weighed_is_what_fits_with_the_time_of_its_layout(K: int) -> None:
    fitting = {}
    for tile, split in product(_TILES, PARAMS[-1].values):
        values = (*tile, split)
        config = dict(zip((param.name for param in PARAMS), values, strict=True))
        one = layout(TARGET, LinearProblem(65, 64, K), config)
        if one is not None:
            passing = cycles_of_pass(FITTED, one, split, *tile[2:])
            fitting[values] = pytest.approx(passing + FITTED.between_passes, rel=1e-12)
    every, (own, _) = _codes(TARGET, 64, K, PARAMS[-1].values), costs_of_codes(TARGET, (65,), 64, K)
    weighed = [
        {code.values: code.cycles for code in map(codes.code, range(codes.cycles.size))}
        for codes in (every, own)
    ]
    of_every, of_own = (
        {values: cycles for values, cycles in each.items() if cycles < inf} for each in weighed
    )
    assert of_every == fitting
    assert of_own.items() <= of_every.items()
    assert bool(of_own) is bool(fitting)


@pytest.mark.parametrize(("N", "K"), SMALL_WEIGHTS)
@pytest.mark.parametrize("x_dtype", ["e4m3", "bf16"])
def test_it_is_for_some_hundreds_of_rows_of_few_weights_without_a_table(
    N: int, K: int, x_dtype: str
) -> None:
    for M, is_own in ((72, False), (129, True), (300, True), (2049, False)):
        problem = LinearProblem(M, N, K, x_dtype=x_dtype)
        assert (route("linear", TARGET, problem).kernel == TILED.name) is is_own
    large = LinearProblem(512, 9216, 6144)
    assert "in less time" in (TILED.yields(TARGET, large) or "")


def test_what_it_does_not_cover_goes_to_another_kernel() -> None:
    problem = LinearProblem(300, 1536, 2048, out_dtype="fp32")
    assert route("linear", TARGET, problem).kernel in ("wgmma_f16_tiled", "wgmma_bf16")
    exact, plain = replace(TARGET, exact_sums=True), LinearProblem(300, 1536, 2048)
    assert route("linear", exact, plain).kernel in ("wgmma_f16_tiled", "wgmma_bf16")


@pytest.mark.parametrize(("N", "K"), SMALL_WEIGHTS)
def test_few_code_objects_serve_its_numbers_of_rows(N: int, K: int) -> None:
    problems = [LinearProblem(M, N, K) for M in range(129, 1100, 16)]
    routes = [route("linear", TARGET, problem) for problem in problems]
    pairs = [(p, r) for p, r in zip(problems, routes, strict=True) if r.kernel == TILED.name]
    assert len(build_requests(TARGET, *zip(*pairs, strict=True))) <= 7


@pytest.mark.parametrize(("N", "K"), [(64, 40960), (8, 128), (136, 128), (8192, 256), (64, 96)])
def test_it_is_configured_for_weights_of_any_sides(N: int, K: int) -> None:
    for M in (65, 129, 400, 30_000):
        problem = LinearProblem(M, N, K)
        for chosen in (TILED.configure(TARGET, problem), *TILED.candidates(TARGET, problem)):
            TILED.check_config(chosen)
            assert layout(TARGET, problem, chosen) is not None
