"""What the host does for Hopper's ``wgmma_bf16`` kernel of the linear."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from aiter_mx.dispatch.dispatcher import route
from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.linear.many_rows_sm90 import work_of
from aiter_mx.kernels.linear.wgmma_bf16_layout_sm90 import layout
from aiter_mx.kernels.registry import find_kernel
from aiter_mx.target import hardware
from op_tests.linear.subjects.wgmma_bf16_sm90 import WGMMA_BF16_CASES as CASES
from op_tests.linear.subjects.wgmma_bf16_sm90 import WGMMA_BF16_SMALL as SMALL

WGMMA_BF16 = find_kernel("linear", "sm_90a", "hip", "wgmma_bf16")
TARGET = hardware("sm_90a")


def config(tile_m: int, tile_n: int, split: int, pairs: int = 0) -> dict[str, int]:
    return {"tile_m": tile_m, "tile_n": tile_n, "split": split, "pairs": pairs}


def test_cases_fit_and_reach_what_differs_between_configurations() -> None:
    rounds, shares = set(), set()
    for M, N, K, chosen, cu_num, *_ in [*CASES, *SMALL]:
        WGMMA_BF16.check_config(chosen)
        target = replace(TARGET, cu_num=cu_num or TARGET.cu_num)
        found = layout(target, LinearProblem(M, N, K), chosen)
        assert found is not None and found.shared_bytes <= 227 * 1024, (M, N, K, chosen)
        rounds.add(found.rounds)
        shares.add((found.part > 0, found.parts_with_one_more > 0))
    for name in ("tile_m", "tile_n", "split"):
        legal = next(param.values for param in WGMMA_BF16.params if param.name == name)
        assert {case.config[name] for case in CASES} == set(legal)
    assert {0, 1, 2} <= rounds and len(shares) == 3, (rounds, shares)


@pytest.mark.parametrize(("M", "N", "K"), [(300, 2304, 6144), (2048, 6144, 2048), (129, 64, 32)])
def test_pairs_compute_each_chunk_of_each_tile_once(M: int, N: int, K: int) -> None:
    for tile_m, pairs in product((128, 256), (1, 5, 47, 66)):
        chosen = config(tile_m, 64, 1, pairs)
        if (found := layout(TARGET, LinearProblem(M, N, K), chosen)) is None:
            continue
        tiles, chunks = -(-M // tile_m) * -(-N // 128), -(-K // 128)
        shared = pairs * found.part + found.parts_with_one_more
        assert found.rounds * pairs * chunks + shared == tiles * chunks
        assert found.parts_with_one_more < pairs
        # Its places for sums suffice, and its counters.
        assert shared == 0 or found.part >= 1
        assert shared == 0 or (tiles - found.rounds * pairs) * 2 * 2 <= 1024


@pytest.mark.parametrize(("N", "K"), [(1, 32), (301, 416), (2304, 6144), (6144, 2048)])
def test_pairs_that_stay_are_no_more_than_there_are_sms(N: int, K: int) -> None:
    assert WGMMA_BF16.module is not None
    for M in (65, 80, 127, 129, 256, 257, 1000, 4096, 32768):
        problem = LinearProblem(M, N, K)
        for chosen in WGMMA_BF16.candidates(TARGET, problem):
            found = layout(TARGET, problem, chosen)
            assert found is not None
            grid, _, _ = WGMMA_BF16.module.geometry(TARGET, problem, chosen).grid
            assert grid == found.clusters * (2 if chosen["pairs"] else chosen["split"])
            assert not chosen["pairs"] or grid <= TARGET.cu_num


@pytest.mark.parametrize("N", [768, 9216])
def test_it_is_for_65_to_4096_rows_without_a_table(N: int) -> None:
    for M in (64, 65, 4096):
        found = WGMMA_BF16.yields(TARGET, LinearProblem(M, N, 6144))
        assert (found is None) is (65 <= M <= 4096)


@pytest.mark.parametrize(
    ("M", "N", "K", "kernel"),
    [
        (4133, 3072, 1536, "wgmma_bf16"),
        (5246, 3072, 768, "wgmma_bf16"),
        (8192, 4096, 3584, "persistent"),
        (16384, 5120, 6400, "persistent"),
        (5246, 1536, 4096, "wgmma_bf16_swapped"),
        (8192, 1024, 4096, "wgmma_bf16_swapped"),
    ],
)
def test_beyond_4096_rows_is_chosen_what_won_on_an_h200_where_sums_are_exact(
    M: int, N: int, K: int, kernel: str
) -> None:
    assert route("linear", TARGET, LinearProblem(M, N, K, "fp32")).kernel == kernel
    assert (
        route("linear", replace(TARGET, exact_sums=True), LinearProblem(M, N, K)).kernel == kernel
    )


@pytest.mark.parametrize(("N", "K"), [(301, 416), (2304, 6144), (5120, 1024)])
def test_the_busiest_pair_has_the_work_that_it_is_modelled_with(N: int, K: int) -> None:
    for M, pairs in product((300, 1000, 4133, 8192), (1, 3, 17, 64, 66)):
        config = {"tile_m": 256, "tile_n": 128, "split": 1, "pairs": pairs}
        found = layout(TARGET, LinearProblem(M, N, K), config)
        chunks, tiles = -(-K // 128), -(-M // 256) * -(-N // 256)
        if found is None:
            continue
        most = found.rounds * chunks + found.part + (found.parts_with_one_more > 0)
        work = work_of(chunks, tiles, pairs)
        assert work.chunks == most and most * pairs >= tiles * chunks
        assert work.segments * chunks >= most and work.others <= chunks * work.parts
