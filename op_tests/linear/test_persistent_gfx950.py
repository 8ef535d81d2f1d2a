"""Large tiles on gfx950: how they are dealt, and where workgroups that share K meet."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
import torch

import aiter_mx
from aiter_mx.kernels.grouped_gemm.persistent_gfx950 import config_of
from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.linear.persistent_choice_gfx950 import (
    LARGE,
    LEAST_SPLIT_K,
    SPLIT,
    cycles_of,
    fastest_large,
)
from aiter_mx.kernels.linear.persistent_gfx950 import PERSISTENT, PERSISTENT_SPLIT
from aiter_mx.sim.program import SimOptions
from aiter_mx.target import Target, hardware
from aiter_mx.trial import prepare
from op_tests.linear.launches import assert_same_bits_whoever_ends_last, launch_linear
from op_tests.linear.operands import operands
from op_tests.mx_reference import assert_close_to_reference

GFX950, CPU = hardware("gfx950"), torch.device("cpu")
SMALL = {"tile_m": 128, "tile_n": 128, "splits": 2}


@pytest.mark.parametrize(("tile_m", "tile_n"), [(128, 128), (256, 256)])
def test_all_tiles_of_a_linear_are_dealt_once(
    tile_m: int, tile_n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In swaths, in rounds, and the last of the largest by halves; rows are divided evenly."""
    config, K = config_of(tile_m, tile_n) | {"swath": 4}, 288
    shapes = [(17, 32, 1), (tile_m + 1, tile_n + 32, 2), (3 * tile_m + 40, 2 * tile_n, 3)]
    shapes += [(6 * tile_m, tile_n + tile_n // 2, 5), (2 * tile_m + 7, tile_n // 2 + 32, 256)]
    for seed, (M, N, cu_num) in enumerate(shapes):
        monkeypatch.setenv("AITER_MX_SIM_SEED", str(seed))
        drawn = operands(M, N, K, seed)
        with aiter_mx.simulate("gfx950"):
            out = launch_linear(PERSISTENT, CPU, config, drawn, None, torch.float32, cu_num)
        assert_close_to_reference(out, *drawn)


@pytest.mark.parametrize(("M", "N", "K"), [(130, 160, 1312), (33, 64, 480)])
def test_whoever_begins_last_the_bits_are_the_same(
    M: int, N: int, K: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_same_bits_whoever_ends_last(PERSISTENT_SPLIT, SMALL, (M, N, K), monkeypatch)


def test_a_launch_leaves_its_counts_as_it_found_them() -> None:
    problem = LinearProblem(140, 96, 672, "fp32")
    launch = prepare(PERSISTENT_SPLIT, problem, SMALL)
    assert launch.counters is not None and launch.counters.numel() == 2 * 4 * 2
    for seed in range(2):
        launch.run(SimOptions(coherence=True, seed=seed))
        assert not launch.counters.any()


def taken(M: int, N: int, K: int) -> str:
    """The fastest with large tiles, of all code objects."""
    return fastest_large(GFX950, LARGE, LinearProblem(M, N, K))[1].kernel


def test_k_is_shared_where_tiles_are_few_and_deep() -> None:
    assert taken(385, 4096, 14336) == taken(769, 5120, 6400) == "persistent_split"
    assert taken(1024, 4096, 4096) == taken(385, 4096, LEAST_SPLIT_K - 32) == "persistent"
    # A row more than tiles of 128 rows have room for takes those of 160.
    for M, N, K in ((384, 5120, 6400), (512, 4096, 3584)):
        small, large = (fastest_large(GFX950, LARGE, LinearProblem(m, N, K)) for m in (M, M + 1))
        assert (small[1].tile, large[1].tile) == ((128, 128), (160, 128))
        assert large[0] < 1.1 * small[0]
    with aiter_mx.simulate("gfx950"):
        chosen = aiter_mx.explain("linear", M=400, N=4064, K=14336)
    assert chosen.kernel == "persistent_split"
    assert "hip/mfma: persistent_split is faster here by the model of time" in chosen.reason


def _splitting(target: Target, problem: LinearProblem) -> set[tuple[int, int]]:
    """Tiles that two workgroups may share."""
    own = (large for large in LARGE if large.kernel == "persistent_split")
    return {large.tile for large in own if cycles_of(target, large, problem) < inf}


def test_each_workgroup_has_a_compute_unit_of_its_own() -> None:
    for M, N in ((128, 16384), (130, 8192), (160, 32768), (4096, 512)):
        problem = LinearProblem(M, N, 4096)
        assert _splitting(GFX950, problem)
        for tile_m, tile_n in _splitting(GFX950, problem):
            config = {"tile_m": tile_m, "tile_n": tile_n, "splits": 2}
            module = PERSISTENT_SPLIT.module
            assert module is not None
            assert module.geometry(GFX950, problem, config).grid[0] <= GFX950.cu_num
    few = replace(GFX950, cu_num=8)
    assert (128, 128) in _splitting(few, LinearProblem(512, 128, 4096))
    assert (128, 128) not in _splitting(few, LinearProblem(513, 128, 4096))


def test_too_few_steps_and_tiles_that_there_are_not_are_refused() -> None:
    assert PERSISTENT_SPLIT.refusal(GFX950, LinearProblem(64, 64, LEAST_SPLIT_K)) is None
    for problem, told in (
        (LinearProblem(64, 64, LEAST_SPLIT_K - 32), "too few steps of K to be shared"),
        (LinearProblem(16, 64, 1024), "M=16 is below 17"),
        (LinearProblem(64, 50, 1024), "N=50 is not a multiple of 32"),
    ):
        assert told in str(PERSISTENT_SPLIT.refusal(GFX950, problem))
    unknown = {"tile_m": 128, "tile_n": 256, "splits": 2}
    assert (128, 256) not in SPLIT
    problem = LinearProblem(64, 64, 1024)
    assert "no such tiles" in str(PERSISTENT_SPLIT.misfit(GFX950, problem, unknown))
