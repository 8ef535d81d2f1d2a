"""Hopper's grouped ``rescaled`` and ``rescaled_in_place`` on an emulator, where there is no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from torch import Tensor

from aiter_mx.kernels.grouped_gemm import GroupedGemmProblem, rescaled_groups_sm90
from aiter_mx.kernels.grouped_gemm.in_place_sm90 import IN_PLACE
from aiter_mx.kernels.grouped_gemm.rescaled_groups_sm90 import across
from aiter_mx.kernels.grouped_gemm.rescaled_sm90 import RESCALED, ring_tiles
from aiter_mx.kernels.spec import KernelSpec
from op_tests.conformance import DTYPES
from op_tests.emulated_sm90.build import unsupported
from op_tests.emulated_sm90.launch import TARGET, Schedule, launch
from op_tests.grouped.cases import Case, Groups, Operands, assert_groups, ending_at, one_group
from op_tests.grouped.rescaled import with_room_for
from op_tests.grouped.subjects import IN_PLACE_SM90, RESCALED_SM90
from op_tests.launches import Out, same_bytes
from op_tests.linear.test_emulated import FP32_ERROR
from op_tests.linear.test_emulated import KINDS as KINDS_OF_LINEAR
from op_tests.linear.test_rescaling import Draw, Operand
from op_tests.mx_reference import NAN_SCALE, random_mx, random_mx_groups
from op_tests.operands import Exponents

pytestmark = pytest.mark.skipif(bool(unsupported()), reason=unsupported())
SUBJECTS = {RESCALED.name: RESCALED_SM90, IN_PLACE.name: IN_PLACE_SM90}
each_kernel = pytest.mark.parametrize("kernel", (RESCALED, IN_PLACE), ids=lambda k: k.name)

SIZES = (0, 1, 64, 65, 130, 0)
Bounds = tuple[Tensor | None, Tensor] | None
TILES = 100  # of w: a place for each


def jagged(sizes: Sequence[int], more: int = 0, index: str = "i32") -> Groups:
    """Groups one after the other, and rows of none."""
    ends = [*accumulate(sizes)]
    return ending_at(ends, ends[-1] + more, index=index)


def masked(sizes: Sequence[int]) -> Groups:
    """Groups with as much room each as the largest takes, and a row more."""
    room = max(sizes) + 1
    ranges = [(g * room, g * room + rows) for g, rows in enumerate(sizes)]
    return Groups(ranges, "masked", "i32", room * len(sizes))


def with_large_values(rows: int, K: int, generator: torch.Generator) -> Operand:
    """None that is below 2, and NaN here and there."""
    payload, scale = random_mx(rows, K, generator, scale_exponents=(-1, 1))
    codes = payload.view(torch.uint8) & 0xFE | 0x40
    codes[torch.rand(codes.shape, generator=generator) < 1e-4] = 0x7F
    return codes.view(payload.dtype), scale


def with_blocks_far_below(rows: int, K: int, generator: torch.Generator) -> Operand:
    """A few blocks whose scales are too far below the others, by a little or by much."""
    payload, scale = random_mx(rows, K, generator, scale_exponents=(0, 0))
    below = torch.randint(8, 50, scale.shape, generator=generator, dtype=torch.uint8)
    few = torch.rand(scale.shape, generator=generator) < 2e-3
    scale[few] -= below[few]
    return payload, scale


def of_warps(rows: int, K: int, generator: torch.Generator) -> Operand:
    """Rows whose scales are alike for 32 of them, as many as a warp has, and not for others."""
    payload, scale = KINDS_OF_LINEAR["normal"](rows, K, generator)
    more = torch.randint(0, 4, (-(-rows // 32), K // 32), generator=generator, dtype=torch.uint8)
    return payload, scale + more.repeat_interleave(32, 0)[:rows]


def of_least_values(exponent: int, rows: int, K: int, generator: torch.Generator) -> Operand:
    """The least values of e4m3 under one scale."""
    codes = torch.randint(1, 4, (rows, K), generator=generator, dtype=torch.uint8)
    scale = torch.full((rows, K // 32), 127 + exponent, dtype=torch.uint8)
    return codes.view(torch.float8_e4m3fn), scale


KINDS: dict[str, Draw] = {
    **KINDS_OF_LINEAR,
    "large": with_large_values,
    "far below": with_blocks_far_below,
    "below": partial(random_mx, scale_exponents=(-49, -47)),
    "far above": partial(random_mx, scale_exponents=(100, 126)),
    "warps": of_warps,
    "least, large": partial(of_least_values, 42),
    "least, far": partial(of_least_values, 90),
}
SHUFFLED = Groups([(140, 205), (0, 127), (130, 130), (205, 206)], "ranges", "i64", 210)

# What is multiplied and by how many CTAs, the kinds of a and of b, and the room of the ring for
# tiles of b. N is of whole tiles of 128 rows of b and of others; K of whole steps of 128 k, and of
# others too.
TRIALS: list[tuple[Case, tuple[str, str], int]] = [
    (Case(one_group(1), 32, 32, bias="fp32"), ("near", "near"), TILES),
    (Case(jagged(SIZES, 5), 160, 352, cu_num=2), ("near", "near"), TILES),
    (Case(jagged(SIZES, index="i64"), 96, 288, bias="bf16"), ("wide", "wide"), 2),
    (Case(jagged(SIZES), 288, 160, cu_num=3), ("nan", "nan"), 4),
    (Case(jagged(SIZES, 1), 128, 640, cu_num=1), ("zeros", "zeros"), 1),
    (Case(masked(SIZES), 160, 224, bias="fp32", cu_num=2), ("near", "nan"), 5),
    (Case(masked((5, 0, 128)), 256, 256, None, "fp16", "fp16", 1), ("normal", "normal"), TILES),
    (Case(masked((130, 65)), 416, 96, cu_num=5), ("zeros", "near"), 3),
    (Case(SHUFFLED, 416, 128, None, "fp16", cu_num=2), ("normal", "rows"), 3),
    (Case(jagged((64, 64, 192, 128)), 288, 384, cu_num=1), ("rows", "rows"), 5),
    (Case(jagged((70, 1, 230)), 416, 96, bias="bf16", cu_num=2), ("near", "outliers"), 1),
    (Case(jagged([0, 1, 2, 0, 0] * 60), 32, 32, cu_num=3), ("near", "wide"), 70),
    (Case(jagged((0, 0, 0), 7), 96, 160), ("near", "near"), 2),
    (Case(jagged((130, 3)), 160, 416, cu_num=2), ("wide", "near"), 2),
    (Case(jagged((100,)), 160, 416, cu_num=1), ("wide", "normal"), TILES),
    (Case(jagged((40, 7)), 288, 256, cu_num=2), ("normal", "large"), TILES),
    (Case(jagged((33, 5)), 416, 640, cu_num=2), ("near", "far below"), TILES),
    (Case(jagged((64, 10, 0, 130)), 416, 640, cu_num=1), ("near", "warps"), 5),
    # Products under one of both scales, or of both scales, are out of fp32, and results are not.
    (Case(jagged((20, 1)), 64, 160), ("below", "far above"), TILES),
    (Case(jagged((20, 1)), 64, 32), ("least, large", "least, far"), TILES),
    (Case(jagged((300,)), 672, 128, cu_num=6), ("near", "outliers"), 2),
    # More tiles of a than share one of b before the next.
    (Case(jagged((1030, 3)), 992, 32, cu_num=2), ("near", "near"), 6),
    (Case(jagged((300,)), 672, 256, cu_num=6), ("near", "outliers"), 2),
    # More steps than blocks of b are under way, and a consumer that has none of them to multiply.
    (Case(jagged((33, 70)), 64, 1312, cu_num=1), ("near", "near"), TILES),
    (Case(jagged((400, 200, 20)), 160, 1312, bias="fp32", cu_num=2), ("near", "warps"), TILES),
]
LAST, PANELS = 22, 21


def problem_of(case: Case) -> GroupedGemmProblem:
    groups, sizes = case.groups, (case.N, case.K, len(case.groups.ranges))
    layout = "masked" if groups.told == "masked" else "jagged"
    dtypes = case.dtype or "bf16", case.bias
    return GroupedGemmProblem(groups.M, *sizes, *dtypes, layout, groups.index)


def test_cases_reach_groups_of_every_size_and_places_that_are_taken_again() -> None:
    sizes = {end - start for case, *_ in TRIALS for start, end in case.groups.ranges}
    turns = set()
    for case, _, tiles in TRIALS:
        with with_room_for(tiles):
            problem = problem_of(case)
            room = ring_tiles(problem, RESCALED.configure(TARGET, problem))
            busy = sum(end > start for start, end in case.groups.ranges)
            turns.add(-(-busy * across(problem) // room))
    assert sizes >= {0, 1, 2, 64, 65, 127, 128, 130, 192, 230, 300, 1030}
    assert turns >= {0, 1, 2, 3, 12}


def launched(
    case: Case,
    drawn: Operands,
    bias: Tensor | None,
    tiles: int,
    seed: int,
    bounds: Bounds = None,
    csrc: Path | None = None,
    kernel: KernelSpec = RESCALED,
) -> Tensor:
    """The result for bounds of any values, or those of the case's groups."""
    problem = problem_of(case)
    out = Out((problem.M, problem.N), DTYPES[problem.out_dtype])
    tensors = [*drawn, bias, out, *(bounds or case.groups.bounds())]
    schedule = Schedule(seed, 1 + seed % 3, seed % 2 == 0)
    with with_room_for(tiles), pytest.MonkeyPatch.context() as patch:
        if case.cu_num is not None:
            patch.setattr(rescaled_groups_sm90, "MOST_CTAS", case.cu_num)
        given = kernel, problem, kernel.configure(TARGET, problem)
        (result,) = launch(*given, tensors, schedule, csrc=csrc)
    return result


def check(
    seed: int, csrc: Path | None = None, schedule: int = 0, kernel: KernelSpec = RESCALED
) -> None:
    """Launch a trial, and judge the result."""
    case, kinds, tiles = TRIALS[seed]
    generator = torch.Generator().manual_seed(seed)
    groups, N, K, G = case.groups, case.N, case.K, len(case.groups.ranges)
    a, a_scale = KINDS[kinds[0]](groups.M, K, generator)
    b, b_scale = KINDS[kinds[1]](G * N, K, generator)
    drawn = (a, a_scale, b.view(G, N, K), b_scale.view(G, N, K // 32))
    bias = None
    if case.bias != "none":
        bias = torch.randn(G, N, generator=generator).to(DTYPES[case.bias])
    out = launched(case, drawn, bias, tiles, seed + schedule, csrc=csrc, kernel=kernel)
    subject = SUBJECTS[kernel.name]
    errors = {"accumulation_error": FP32_ERROR, "rescaling_error": subject.rescaling_error}
    assert_groups(out, drawn, groups, bias, subject.multiplied, **errors)


@each_kernel
@pytest.mark.parametrize("seed", range(len(TRIALS)))
def test_any_groups_and_schedule_give_the_reference(seed: int, kernel: KernelSpec) -> None:
    check(seed, kernel=kernel)


@each_kernel
def test_what_other_groups_have_changes_no_bits(kernel: KernelSpec) -> None:
    case = Case(jagged((65, 0, 70, 130)), 160, 352, None, "fp16", cu_num=2)
    drawn = random_mx_groups(case.groups.M, 4, case.N, case.K, 0, (-12, -9))
    others = random_mx_groups(case.groups.M, 4, case.N, case.K, 1, (-30, 0))
    expected = launched(case, drawn, None, TILES, 0, kernel=kernel)
    for own, (start, end) in enumerate(case.groups.ranges):
        kept = [slice(start, end)] * 2 + [slice(own, own + 1)] * 2
        mixed = [other.clone() for other in others]
        for to, of, rows in zip(mixed, drawn, kept, strict=True):
            to.view(torch.uint8)[rows] = of.view(torch.uint8)[rows]
        a, a_scale, b, b_scale = mixed
        found = launched(case, (a, a_scale, b, b_scale), None, 3, own, kernel=kernel)
        assert same_bytes(found[start:end], expected[start:end])


def of_rows(rows: int) -> Case:
    return Case(one_group(rows), 160, 352, None, "bf16", cu_num=2)


@each_kernel
@pytest.mark.parametrize(("N", "K"), [(32, 352), (160, 256), (224, 288)])
def test_rows_of_w_behind_a_groups_last_change_no_bits(N: int, K: int, kernel: KernelSpec) -> None:
    """The next group's are in the same tile, where they may be NaN and under any scales."""
    case = Case(jagged((65, 130, 0, 20)), N, K, None, "fp16", cu_num=2)
    drawn = random_mx_groups(case.groups.M, 4, N, K, 0, (-12, -9))
    plain = launched(case, drawn, None, TILES, 0, kernel=kernel)
    for spoilt in (0, 1):
        w, ws = drawn[2].view(torch.uint8).clone(), drawn[3].clone()
        w[spoilt::2, 0::3] = 0x7F
        ws[spoilt::2, 1::3] = NAN_SCALE
        ws[spoilt::2, 2::3, 0::2], ws[spoilt::2, 2::3, 1::2] = 250, 1
        mixed = (drawn[0], drawn[1], w.view(drawn[2].dtype), ws)
        out = launched(case, mixed, None, 3, 1 + spoilt, kernel=kernel)
        for g, (start, end) in enumerate(case.groups.ranges):
            if g % 2 == spoilt:
                assert out[start:end, 0::3].isnan().all() and out[start:end, 1::3].isnan().all()
            else:
                assert same_bytes(out[start:end], plain[start:end])


@pytest.mark.parametrize("exponents", [(-12, -9), (-40, 0)], ids=str)
def test_bits_of_a_block_are_the_same_alone_and_in_a_pair(exponents: Exponents) -> None:
    """A consumer has all units of a block of a pair, and one of a block that is alone."""
    a, a_scale, b, b_scale = random_mx_groups(257, 1, 160, 352, 0, exponents)

    def bits(rows: slice, seed: int) -> Tensor:
        own = a[rows], a_scale[rows], b, b_scale
        return launched(of_rows(len(own[0])), own, None, TILES, seed, kernel=IN_PLACE)

    for seed, rows in enumerate((64, 65, 128, 129, 192, 193, 256, 257)):
        whole = bits(slice(rows), seed)
        for first in range(0, rows, 128):
            own = slice(first, min(first + 128, rows))
            assert same_bytes(bits(own, seed), whole[own])


@each_kernel
def test_scales_of_zeros_change_no_bits(kernel: KernelSpec) -> None:
    case = Case(jagged((70,)), 416, 640, None, "fp16", cu_num=1)
    a, a_scale, b, b_scale = random_mx_groups(70, 1, case.N, case.K, 0, (-11, -9))
    empty = torch.rand(b_scale.shape, generator=torch.Generator().manual_seed(0)) < 0.05
    b.view(torch.uint8).view(*b_scale.shape, 32)[empty] = 0x80
    outs = []
    for scale in (0, 122, 254):
        b_scale[empty] = scale
        outs.append(launched(case, (a, a_scale, b, b_scale), None, 2, scale, kernel=kernel))
    assert all(same_bytes(out, outs[0]) for out in outs)


@each_kernel
@pytest.mark.parametrize("seed", range(3))
def test_bounds_of_any_value_harm_no_memory(seed: int, kernel: KernelSpec) -> None:
    """Groups that overlap have more tiles than there is room for."""
    case = Case(Groups([(0, 300)] * 7, "ranges", "i32", 300), 96, 160)
    some = torch.tensor([0, 1, 150, 300, 307, -5, -(1 << 31), (1 << 31) - 1], dtype=torch.int32)
    drawn_at = torch.randint(len(some), (2, 7), generator=torch.Generator().manual_seed(seed))
    starts, ends = some[drawn_at]
    bounds = (starts, ends) if seed else None
    launched(case, random_mx_groups(300, 7, 96, 160), None, 3, seed, bounds, kernel=kernel)
