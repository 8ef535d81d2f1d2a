"""What the host does for Hopper's ``wgmma_fp8_rescaled``, and what its scales in common cost."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from math import inf

import numpy as np
import pytest
import torch

from aiter_mx.dispatch.dispatcher import route
from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.linear.problem import Sizes
from aiter_mx.kernels.linear.wgmma_bf16_layout_sm90 import Shares
from aiter_mx.kernels.linear.wgmma_fp8_rescaled_sm90 import (
    MIN_OWN_M,
    Slice,
    cheapest,
    costs_of_rows,
    shares_of,
    slices,
)
from aiter_mx.kernels.registry import find_kernel
from aiter_mx.kernels.spec import place_of
from aiter_mx.target import hardware
from op_tests.linear.operands import operands
from op_tests.linear.rescaled import BY_BLOCKS, forms_of
from op_tests.linear.subjects.wgmma_fp8_rescaled_sm90 import (
    LESS_NEAR,
    NEAR,
    WGMMA_FP8_RESCALED_CASES,
    WGMMA_FP8_RESCALED_SMALL,
    WITH_BIAS,
)

RESCALED = find_kernel("linear", "sm_90a", "hip", "wgmma_fp8_rescaled")
TARGET = hardware("sm_90a")
CASES = [*WGMMA_FP8_RESCALED_CASES, *WGMMA_FP8_RESCALED_SMALL]
ROOM = 64 << 20
Operand = tuple[torch.Tensor, torch.Tensor]


def drawn_sizes(count: int, least: int = MIN_OWN_M) -> Iterator[Sizes]:
    draw = random.Random(4)
    for _ in range(count):
        M = round(2 ** draw.uniform(np.log2(least), 15.5))
        N, K = round(2 ** draw.uniform(3, 17)), 32 * round(2 ** draw.uniform(0, 9.5))
        yield Sizes(max(M, least), N, K)


def chunks_of(K: int) -> int:
    return -(-K // 128)


def segments(of: Shares, ctas: int, cta: int, chunks: int) -> Iterator[tuple[int, int, int]]:
    """A CTA's tiles, and the first of its chunks of each and how many, as ``shared_segment`` of
    csrc/linear/shares_sm90.h has them."""
    for i in range(of.rounds):
        yield i * ctas + cta, 0, chunks
    at, end = (n * of.part + min(n, of.parts_with_one_more) for n in (cta, cta + 1))
    while at < end:
        tile, first = divmod(at, chunks)
        length = min(end - at, chunks - first)
        yield of.rounds * ctas + tile, first, length
        at += length


def test_cases_fit_and_reach_what_differs_between_configurations() -> None:
    rounds, sharing, before, tiles_of_share = set(), set(), set(), set()
    for M, N, K, chosen, *_ in [*CASES, *WITH_BIAS]:
        assert chosen is not None
        RESCALED.check_config(chosen)
        assert RESCALED.misfit(TARGET, LinearProblem(M, N, K), chosen) is None
        tiles, chunks, ctas = -(-M // 128) * -(-N // 128), chunks_of(K), chosen["ctas"]
        of = shares_of(tiles, chunks, ctas)
        rounds.add(min(of.rounds, 2))
        sharing.add((of.part > 0, of.parts_with_one_more > 0))
        every = [(cta, s) for cta in range(ctas) for s in segments(of, ctas, cta, chunks)]
        per_tile = Counter(tile for _, (tile, _, _) in every)
        before |= {min(count - 1, 3) for count in per_tile.values()}
        within = Counter(cta for cta, (tile, *_) in every if tile >= of.rounds * ctas)
        tiles_of_share |= {*within.values()}
    assert rounds == {0, 1, 2} and len(sharing) == 4
    assert before == {0, 1, 2, 3}  # other parts of a tile
    assert tiles_of_share >= {1, 2, 3}
    assert {case.K % 128 // 32 for case in CASES} == {0, 1, 2, 3}
    assert {case.K // 32 for case in CASES} >= {1, 2, 3}  # K that ends within the first step
    assert {(case.M - 1) % 128 // 64 for case in CASES} == {0, 1}
    assert {case.N % 8 for case in CASES} >= {0, 1, 2, 3, 4, 5}
    counts = [
        (c.config["ctas"], -(-c.M // 128) * -(-c.N // 128) * chunks_of(c.K))
        for c in CASES
        if c.config is not None
    ]
    assert any(ctas == 1 < every for ctas, every in counts)
    assert any(1 < ctas == every for ctas, every in counts)
    assert any(ctas == 132 for ctas, _ in counts)


def test_cases_reach_steps_under_scales_of_every_form() -> None:
    """In one call, and in one tile."""
    seen = []
    for seed, case in enumerate(CASES):
        if case.M * case.N * case.K <= 1 << 28:
            for exponents in (NEAR, LESS_NEAR):
                drawn = operands(case.M, case.N, case.K, 100 * seed, scale_exponents=exponents)
                seen.append(forms_of(drawn))
    assert len(seen) > 40
    counts = torch.cat([each.flatten() for each in seen]).bincount()
    assert counts.min() > 0.1 * counts.sum()
    assert sum(len(each.unique()) == 3 for each in seen) > 10
    tiles = [tile for each in seen for tile in each.flatten(0, 1)]
    assert sum(len(tile.unique()) == 3 for tile in tiles) > 20
    far = operands(130, 300, 1120, 1, scale_exponents=(-20, 20))
    assert (forms_of(far) == BY_BLOCKS).all()


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (LinearProblem(2048, 4096, 4096, "fp32"), "which fp32 results would show"),
        (LinearProblem(1, 4096, 1 << 19), "take more room"),
        (LinearProblem(1 << 24, 8, 1 << 15), "31 bits"),
        (LinearProblem(1 << 30, 1 << 16, 32), "31 bits"),
    ],
)
def test_what_it_does_not_cover_is_refused(problem: LinearProblem, reason: str) -> None:
    assert reason in (RESCALED.refusal(TARGET, problem) or "")


def test_exact_sums_and_other_architectures_are_refused() -> None:
    problem = LinearProblem(2048, 4096, 4096)
    assert RESCALED.refusal(TARGET, problem) is None
    exact = replace(TARGET, exact_sums=True)
    assert "14 bits" in (RESCALED.refusal(exact, problem) or "")
    assert "only for sm_90a" in (RESCALED.refusal(hardware("gfx950"), problem) or "")


def test_tiles_of_a_slice_and_scales_are_counted_in_31_bits_at_most() -> None:
    for sizes in drawn_sizes(300):
        if RESCALED.refusal(TARGET, LinearProblem(*sizes)) is None:
            widest = slices(*sizes)[0]
            assert widest.tiles(sizes.M) < 1 << 31
            assert (widest.blocks(sizes.M) * 129 + 3) * chunks_of(sizes.K) < 1 << 32


def test_slices_are_all_features_once_in_order() -> None:
    counts = set()
    for sizes in drawn_sizes(1000, least=1):
        if RESCALED.refusal(TARGET, LinearProblem(*sizes)) is not None:
            continue
        found = slices(*sizes)
        at = 0
        for each in found:
            assert each.first == at and each.features > 0
            at += each.features
        assert at == sizes.N
        assert all(each.features % 128 == 0 for each in found[:-1])  # boxes of whole blocks
        assert all(each.features <= found[0].features for each in found)
        counts.add(min(len(found), 4))
    assert counts == {1, 2, 3, 4}


def test_a_workspace_has_no_more_than_64_mib_beside_x_in_bf16() -> None:
    fullest = 0.0
    for M, N, K in drawn_sizes(1000):
        problem = LinearProblem(M, N, K)
        if RESCALED.refusal(TARGET, problem) is not None:
            continue
        asked = RESCALED.workspace_bytes(TARGET, problem, {"ctas": 1})
        assert asked <= 2 * M * K + ROOM
        if len(slices(M, N, K)) > 8:  # then one block more would hardly fit
            fullest = max(fullest, asked / (2 * M * K + ROOM))
    assert fullest > 0.9


def test_a_workspace_holds_what_both_launches_lay_out() -> None:
    """As ``RescaledOperands`` and the parts of sums behind it have it."""
    for M, N, K in [(300, 1001, 1120), (257, 128, 32), (4096, 9216, 6144), (1000, 28672, 8192)]:
        rows = slices(M, N, K)[0].blocks(M) * 128
        step_words = -(-(rows + 2 * (rows // 128)) // 4) * 4
        words = chunks_of(K) * step_words + 1024
        parts = 132 * 2 * 2 * 64 * 128 * 4  # two of each CTA, of two warpgroups
        asked = RESCALED.workspace_bytes(TARGET, LinearProblem(M, N, K), {"ctas": 132})
        assert asked == rows * K + 4 * words + parts


def test_small_weights_are_one_slice() -> None:
    for N, K in ((8, 32), (1536, 6144), (4096, 4096), (3072, 8192)):
        for M in (257, 1000, 4096):
            assert slices(M, N, K) == (Slice(0, N),)


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("x_dtype", ["e4m3", "bf16"])
def test_each_slice_has_a_pair_of_launches(x_dtype: str, pdl: bool) -> None:
    M, N, K = 300, 28001, 8224
    problem = LinearProblem(M, N, K, "fp16", "bf16", pdl=pdl, x_dtype=x_dtype)
    config, found = {"ctas": 50}, slices(M, N, K)
    assert len(found) > 2 and found[-1].features % 128
    launches = RESCALED.launches(TARGET, problem, config)
    assert len(launches) == 2 * len(found)
    chunks, x_blocks, widest = chunks_of(K), 3, found[0].features
    for i, each in enumerate(found):
        ahead, product = launches[2 * i : 2 * i + 2]
        assert ahead.symbol == RESCALED.modules[0].symbol
        assert product.symbol == RESCALED.modules[1].symbol
        w_blocks = -(-each.features // 128)
        first_block = x_blocks if i else 0  # x is rescaled once
        geometry = ahead.geometry(TARGET, problem, config)
        assert geometry.grid == ((x_blocks + w_blocks - first_block) * chunks, 1, 1)
        assert geometry.overlaps == (pdl and i == 0)  # others would write what is still read
        scalars = ahead.scalars(TARGET, problem, config)
        assert scalars == (M, widest, K, N, each.first, first_block)

        geometry = product.geometry(TARGET, problem, config)
        ctas = min(50, x_blocks * w_blocks * chunks)
        assert geometry.grid == (ctas, 1, 1) and geometry.overlaps
        *sizes, bias, rounds, part, more = product.scalars(TARGET, problem, config)
        assert sizes == [M, widest, K, N, each.first] and bias == 2
        assert (rounds, part, more) == shares_of(x_blocks * w_blocks, chunks, ctas)
        (described,) = (of(TARGET, problem, config) for of in product.tensor_maps)
        assert described.pointer == place_of(product.args, "workspace")
        assert (described.rows, described.row_bytes) == (128 * x_blocks + widest, K)
        assert (described.box_rows, described.box_bytes) == (128, 128)
    defines = [[m.defines(TARGET, problem, config) for m in launches[i::2]] for i in (0, 1)]
    assert all(of == each[0] for each in defines for of in each)  # no further code objects
    assert defines[0][0] == {"MX_X": {"e4m3": 0, "bf16": 2}[x_dtype]}


def test_more_ctas_than_the_first_slice_has_chunks_for_do_not_fit() -> None:
    problem = LinearProblem(100, 200, 256)
    assert RESCALED.misfit(TARGET, problem, {"ctas": 4}) is None
    assert "there is not as much to share" in (RESCALED.misfit(TARGET, problem, {"ctas": 5}) or "")
    for sizes in drawn_sizes(200):
        problem = LinearProblem(*sizes)
        if RESCALED.refusal(TARGET, problem) is not None:
            continue
        for config in RESCALED.candidates(TARGET, problem):
            RESCALED.check_config(config)
            for module in RESCALED.launches(TARGET, problem, config):
                assert module.geometry(TARGET, problem, config).grid[0] >= 1


def test_shares_are_each_chunk_of_each_tile_once() -> None:
    draw = random.Random(7)
    for _ in range(300):
        tiles, chunks = draw.choice([1, 2, 5, draw.randint(1, 700)]), draw.randint(1, 60)
        ctas = min(draw.choice([1, 2, draw.randint(1, 132), 132]), tiles * chunks)
        of = shares_of(tiles, chunks, ctas)
        every = [(cta, s) for cta in range(ctas) for s in segments(of, ctas, cta, chunks)]
        taken = np.zeros((tiles, chunks), int)
        for _, (tile, first, length) in every:
            taken[tile, first : first + length] += 1
        assert (taken == 1).all(), (tiles, chunks, ctas)

        left = of.rounds * ctas
        assert 2 * (tiles - left) <= 1024  # counters
        sharers: dict[int, list[int]] = {}
        for cta, (tile, _, length) in every:
            if length < chunks:
                sharers.setdefault(tile, []).append(cta)
        assert all(tile >= left for tile in sharers)
        places = []
        for tile, ctas_of in sharers.items():
            # Those that ``sharer`` says, of the first chunk to the last, without a gap.
            assert ctas_of == list(range(ctas_of[0], ctas_of[-1] + 1)) and len(ctas_of) > 1
            begin = (tile - left) * chunks
            for chunk, cta in ((begin, ctas_of[0]), (begin + chunks - 1, ctas_of[-1])):
                longer = of.parts_with_one_more * (of.part + 1)
                found = (
                    chunk // (of.part + 1)
                    if chunk < longer
                    else of.parts_with_one_more + (chunk - longer) // of.part
                )
                assert found == cta
            for cta in ctas_of:
                share = cta * of.part + min(cta, of.parts_with_one_more)
                places.append(2 * cta + (share <= begin))
        assert len({*places}) == len(places) and max(places, default=0) < 2 * ctas


def test_costs_of_numbers_of_rows_are_those_of_the_choice() -> None:
    draw = random.Random(5)
    for N, K in [(8, 32), (1536, 6144), (28672, 8192), (129, 1120), (9216, 1 << 16), (4096, 4096)]:
        rows = sorted(draw.sample(range(MIN_OWN_M, 5000), 40))
        costs = costs_of_rows(TARGET, np.array([1.0, 256.0, *map(float, rows)]), N, K)
        assert (costs[:2] == inf).all()
        for M, cost in zip(rows, costs[2:], strict=True):
            expected, config = cheapest(TARGET, Sizes(M, N, K))
            assert cost == pytest.approx(expected, rel=1e-12)
            RESCALED.check_config(config)


def test_it_is_for_hundreds_of_rows_and_more_of_16_bit_results() -> None:
    for M in (2048, 8192):
        for dtype in ("bf16", "fp16"):
            for x_dtype in ("e4m3", "bf16"):
                problem = LinearProblem(M, 4096, 4096, dtype, x_dtype=x_dtype)
                chosen = route("linear", TARGET, problem)
                assert chosen.kernel == RESCALED.name
                assert RESCALED.parts(TARGET, problem, chosen.config) == ()
    for N, K in ((4096, 4096), (9216, 6144), (768, 3584)):
        few = LinearProblem(256, N, K)
        assert route("linear", TARGET, few).kernel != RESCALED.name
        assert "rescale" in (RESCALED.yields(TARGET, few) or "")
    full = LinearProblem(2048, 4096, 4096, "fp32")
    assert route("linear", TARGET, full).kernel != RESCALED.name
    exact, plain = replace(TARGET, exact_sums=True), LinearProblem(2048, 4096, 4096)
    assert route("linear", exact, plain).kernel != RESCALED.name
