"""What the host does for Hopper's ``wgmma_fp8_rescaled``, and what its scales in common cost."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
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
    ACCUMULATION_ERROR,
    MIN_OWN_M,
    MOST_ACCUMULATION_ERROR,
    RESCALING_ERROR,
    Slice,
    cheapest,
    costs_of_rows,
    shares_of,
    slices,
)
from aiter_mx.kernels.registry import find_kernel
from aiter_mx.kernels.spec import place_of
from aiter_mx.target import hardware
from op_tests.dispatch.products import KINDS, draws, hopper_sums
from op_tests.linear.operands import Operands, operands
from op_tests.linear.rescaled import (
    LEAST_SCALE,
    NAN,
    ROWS,
    both_rescaled,
    rescaled,
    steps_apart,
)
from op_tests.linear.subjects.wgmma_fp8_rescaled_sm90 import (
    NEAR,
    WGMMA_FP8_RESCALED_CASES,
    WGMMA_FP8_RESCALED_SMALL,
    WITH_BIAS,
)
from op_tests.mx_reference import (
    NAN_SCALE,
    assert_close_to_reference,
    dequantize64,
    linear_reference,
    random_mx,
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


def test_cases_reach_steps_under_one_scale_and_others() -> None:
    """In one call, and of one tile."""
    seen = []
    for seed, case in enumerate(CASES):
        if case.M * case.N * case.K <= 1 << 28:
            drawn = operands(case.M, case.N, case.K, 100 * seed, scale_exponents=NEAR)
            seen.append(steps_apart(drawn))
    assert len(seen) > 20
    share = torch.cat([each.flatten() for each in seen]).float().mean()
    assert 0.1 < share < 0.6
    both = [each for each in seen if each.any() and not each.all()]
    assert len(both) > len(seen) // 3
    assert sum(each.any(-1).logical_and(~each.all(-1)).any().item() for each in seen) > 5


def test_far_scales_keep_their_own() -> None:
    drawn = operands(130, 300, 1120, 1, scale_exponents=(-20, 20))
    assert steps_apart(drawn).all()


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
        step_words = -(-(rows + rows // 128) // 4) * 4
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
    chunks, x_blocks = chunks_of(K), 3
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
        assert scalars == (M, found[0].features, K, N, each.first, first_block)

        geometry = product.geometry(TARGET, problem, config)
        assert geometry.grid == (50, 1, 1) and geometry.overlaps
        *sizes, bias, rounds, part, more = product.scalars(TARGET, problem, config)
        assert sizes == [M, found[0].features, K, N, each.first] and bias == 2  # laid out alike
        assert (rounds, part, more) == shares_of(x_blocks * w_blocks, chunks, 50)
        (described,) = (of(TARGET, problem, config) for of in product.tensor_maps)
        assert described.pointer == place_of(product.args, "workspace")
        assert (described.rows, described.row_bytes) == (128 * found[0].blocks(M), K)
        assert (described.box_rows, described.box_bytes) == (128, 128)
    defines = [[m.defines(TARGET, problem, config) for m in launches[i::2]] for i in (0, 1)]
    assert all(of == each[0] for each in defines for of in each)  # no further code objects
    assert defines[0][0] == {"MX_X": {"e4m3": 0, "bf16": 2}[x_dtype]}


def test_more_ctas_than_the_last_slice_has_chunks_for_do_not_fit() -> None:
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


def single_values(rows: int, K: int, generator: torch.Generator) -> Operand:
    """A number of any size in each block of 32, and zeros."""
    payload, scale = random_mx(rows, K, generator, scale_exponents=(-5, 5))
    kept = torch.randint(0, 32, (rows, K // 32, 1), generator=generator)
    codes = payload.view(torch.uint8).view(rows, K // 32, 32)
    others = torch.arange(32) != kept
    return codes.masked_fill(others, 0).view(rows, K).view(payload.dtype), scale


def with_outliers(rows: int, K: int, generator: torch.Generator) -> Operand:
    """Small numbers beside one large one of each block, and scales far from the others here and
    there."""
    payload, scale = random_mx(rows, K, generator, scale_exponents=(-2, 2))
    codes = payload.view(torch.uint8) & 0x9E
    codes.view(rows, K // 32, 32)[:, :, 7] |= 0x60
    scale[torch.rand(scale.shape, generator=generator) < 2e-3] += 7
    return codes.view(payload.dtype), scale


def with_zeros(rows: int, K: int, generator: torch.Generator) -> Operand:
    """Whole blocks of zeros whose scales are anything."""
    payload, scale = random_mx(rows, K, generator, scale_exponents=NEAR)
    empty = torch.rand(scale.shape, generator=generator) < 0.5
    payload.view(torch.uint8).view(*scale.shape, 32)[empty] = 0x80
    scale[empty] = torch.randint(0, 255, scale.shape, generator=generator).to(torch.uint8)[empty]
    return payload, scale


def of_random(rows: int, K: int, generator: torch.Generator) -> Operand:
    return random_mx(rows, K, generator, scale_exponents=NEAR)


def of_normal(rows: int, K: int, generator: torch.Generator) -> Operand:
    """What normal values are quantised to."""
    values = torch.randn(rows, K // 32, 32, generator=generator)
    exponent = values.abs().amax(-1, keepdim=True).log2().floor() - 8
    payload = (values / exponent.exp2()).clamp(-448, 448).to(torch.float8_e4m3fn)
    return payload.view(rows, K), (exponent[..., 0] + 127).to(torch.uint8)


@pytest.mark.parametrize("of_w", [False, True])
@pytest.mark.parametrize("draw", [of_random, of_normal, with_outliers, with_zeros, single_values])
def test_an_element_changes_by_no_more_than_is_stated(
    draw: Callable[[int, int, torch.Generator], Operand], of_w: bool
) -> None:
    shared, most = 0, 0.0
    for seed in range(6):
        payload, scale = draw(200, 1120, torch.Generator().manual_seed(seed))
        found = rescaled(payload, scale, of_w)
        before, after = dequantize64(payload, scale), dequantize64(found.payload, found.scale)
        largest = before.abs().view(*scale.shape, 32).amax(-1, keepdim=True)
        change = (after - before).abs().view(*scale.shape, 32)
        assert (change <= RESCALING_ERROR * largest).all()
        most = max(most, (change / largest).nan_to_num(0).max().item())
        steps = found.scale[:, : 8 * 4].view(200, 8, 4)
        alike = (steps == steps[..., :1]).all(-1)
        for block in range(2):
            for step in range(8):
                here = slice(ROWS * block, ROWS * (block + 1))
                if not found.apart[block, step]:
                    shared += 1
                    assert alike[here, step].all()
                    if of_w:
                        assert len(steps[here, step].unique()) == 1
    assert shared > 0 or draw is single_values  # of which many are below 2.0
    if draw is of_random and not of_w:
        assert most > 0.4 * RESCALING_ERROR  # so that it is no loose bound


def test_results_of_changed_elements_are_within_the_stated_error_alone() -> None:
    for seed, K in enumerate((32, 64, 160, 1120)):
        drawn = operands(130, 300, K, seed, scale_exponents=NEAR)
        out = linear_reference(*both_rescaled(drawn), out_dtype=torch.float32)
        stated = {"accumulation_error": 0.0, "rescaling_error": RESCALING_ERROR}
        assert_close_to_reference(out, *drawn, **stated)
    with pytest.raises(AssertionError, match="elements are wrong"):
        assert_close_to_reference(out, *drawn, accumulation_error=0.0)
    out[7, 200] += 0.1 * out.abs().max()
    with pytest.raises(AssertionError, match="1 of 39000 elements are wrong"):
        assert_close_to_reference(out, *drawn, **stated)


def test_a_step_is_apart_where_one_block_would_lose_too_much_and_nowhere_else() -> None:
    payload = torch.full((300, 384), 0x78, dtype=torch.uint8)  # 256
    scale = torch.full((300, 12), 127, dtype=torch.uint8)
    payload[140, 4 * 32 : 5 * 32], scale[140, 4] = 0x0F, 120  # its largest would be below 2^-12
    for of_w in (False, True):
        apart = rescaled(payload.view(torch.float8_e4m3fn), scale, of_w).apart
        assert apart.nonzero().tolist() == [[1, 1]]
    for code, is_apart in ((0x77, True), (0x78, False)):  # just below 2.0, seven octaves down
        payload[140, 4 * 32 : 5 * 32] = code
        assert rescaled(payload.view(torch.float8_e4m3fn), scale, True).apart.any() == is_apart
    # Another row's scale is of no account to x, and makes all of w's step apart.
    payload[140, 4 * 32 : 5 * 32], scale[140, 4] = 0x78, 127
    scale[:, 4:8], scale[150, 4:8] = 120, 128
    assert not rescaled(payload.view(torch.float8_e4m3fn), scale, False).apart.any()
    apart = rescaled(payload.view(torch.float8_e4m3fn), scale, True).apart
    assert apart.nonzero().tolist() == [[1, 1]]
    scale[...] = LEAST_SCALE - 1  # products would leave fp32's range
    assert rescaled(payload.view(torch.float8_e4m3fn), scale, False).apart.all()


def test_nan_stays_in_its_block_and_row() -> None:
    payload, scale = random_mx(200, 256, torch.Generator().manual_seed(3), scale_exponents=(0, 0))
    payload.view(torch.uint8)[5, 40] = NAN
    scale[130, 6] = NAN_SCALE
    for of_w in (False, True):
        found = rescaled(payload, scale, of_w)
        assert not found.apart.any()
        nans = dequantize64(found.payload, found.scale).isnan()
        expected = torch.zeros_like(nans)
        expected[5, 40] = expected[130, 6 * 32 : 7 * 32] = True
        assert torch.equal(nans, expected)


def sums_and_magnitudes(drawn: Operands) -> tuple[torch.Tensor, ...]:
    """Of a thousand drawn results: as the matrix unit adds a step, exact, and of magnitudes."""
    xq, xs, wq, ws = drawn
    generator = torch.Generator().manual_seed(1)
    found = []
    for of_w, (payload, scale) in enumerate(((xq, xs), (wq, ws))):
        one = rescaled(payload, scale, bool(of_w))
        picked = torch.randint(0, len(payload), (1000,), generator=generator)
        found.append(dequantize64(one.payload, one.scale)[picked])
    steps = zip(*(each.split(128, -1) for each in found), strict=True)
    total = sum(hopper_sums(x, w) for x, w in steps)
    assert isinstance(total, torch.Tensor)
    products = found[0] * found[1]
    return total, products.sum(-1), products.abs().sum(-1)


@pytest.mark.parametrize("K", [32, 64, 128, 1120])
def test_the_stated_error_of_random_payloads_is_a_bound_under_scales_in_common(K: int) -> None:
    for seed, exponents in enumerate([(0, 0), NEAR, (-2, 2)] * 2):
        drawn = operands(130, 300, K, seed, scale_exponents=exponents)
        total, exact, magnitudes = sums_and_magnitudes(drawn)
        assert ((total - exact).abs() <= ACCUMULATION_ERROR * magnitudes).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_stated_error_of_any_payloads_is_a_bound(kind: str) -> None:
    a, b = draws(kind, 2000, 128)
    error = (hopper_sums(a, b) - (a * b).sum(-1)).abs() / (a * b).abs().sum(-1)
    assert error.max() <= MOST_ACCUMULATION_ERROR
