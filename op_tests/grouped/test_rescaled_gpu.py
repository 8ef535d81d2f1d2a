"""Grouped ``rescaled`` and ``rescaled_in_place`` on a GPU, beyond the conformance suite."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from aiter_mx.kernels.grouped_gemm import GroupedGemmProblem
from op_tests.conformance import DTYPES, Bench, bench_of, each
from op_tests.grouped.cases import (
    Groups,
    Operands,
    assert_groups,
    ending_at,
    launch_grouped,
    one_group,
)
from op_tests.grouped.rescaled import with_room_for
from op_tests.grouped.subjects import IN_PLACE_SM90, RESCALED_SM90
from op_tests.launches import (
    Out,
    assert_repeats_on_two_streams,
    bound,
    is_poison,
    launch,
    poisoned,
    same_bytes,
)
from op_tests.linear.rescaled import BY_BLOCKS, BY_ROWS, QUARTER, ROWS, TOGETHER, forms_of
from op_tests.linear.subjects.wgmma_fp8_rescaled_sm90 import LESS_NEAR, NEAR
from op_tests.mx_reference import NAN_SCALE, random_mx_groups

bench = bench_of(Bench)
SUBJECTS = {subject.name: subject for subject in (RESCALED_SM90, IN_PLACE_SM90)}
ON_HOPPER, OF_THE_RING = each((*SUBJECTS.values(),)), each((RESCALED_SM90,))
IN_PLACE = each((IN_PLACE_SM90,))
GROUPS = ending_at([130, 130, 131, 400, 464, 593], 600)


def launched(
    bench: Bench,
    drawn: Operands,
    groups: Groups,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    cu_num: int | None = None,
) -> Tensor:
    return launch_grouped(bench.kernel, bench.device, None, drawn, groups, bias, dtype, cu_num)


def assert_right(
    bench: Bench, out: Tensor, drawn: Operands, groups: Groups, bias: Tensor | None = None
) -> None:
    """By what is multiplied, and by what is asked for."""
    assert_groups(
        *(out, drawn, groups, bias, SUBJECTS[bench.kernel.name].multiplied),
        accumulation_error=RESCALED_SM90.accumulation_error,
        rescaling_error=RESCALED_SM90.rescaling_error,
    )


@OF_THE_RING
@pytest.mark.parametrize("cu_num", [1, pytest.param(5, marks=pytest.mark.sanitized), None])
@pytest.mark.parametrize("tiles", [1, 2, 3, 5, 8])
def test_bits_are_the_same_with_room_for_any_number_of_tiles_of_w(
    bench: Bench, tiles: int, cu_num: int | None
) -> None:
    for N in (416, 32):
        drawn = random_mx_groups(GROUPS.M, 6, N, 1120, N, NEAR)
        bias = torch.randn(6, N, generator=torch.Generator().manual_seed(N)) * 100
        whole = launched(bench, drawn, GROUPS, bias, cu_num=cu_num)
        assert_right(bench, whole, drawn, GROUPS, bias)
        with with_room_for(tiles):
            out = launched(bench, drawn, GROUPS, bias, cu_num=cu_num)
        assert same_bytes(out, whole)


@ON_HOPPER
@pytest.mark.parametrize("cu_num", [1, pytest.param(5, marks=pytest.mark.sanitized)])
def test_bits_are_the_same_with_a_bias_whoever_takes_a_tile(bench: Bench, cu_num: int) -> None:
    for N in (416, 32):
        drawn = random_mx_groups(GROUPS.M, 6, N, 1120, N, NEAR)
        bias = torch.randn(6, N, generator=torch.Generator().manual_seed(N)) * 100
        whole = launched(bench, drawn, GROUPS, bias)
        assert_right(bench, whole, drawn, GROUPS, bias)
        assert same_bytes(launched(bench, drawn, GROUPS, bias, cu_num=cu_num), whole)


@ON_HOPPER
@pytest.mark.parametrize("exponents", [(0, 0), NEAR, LESS_NEAR, (-20, 20)], ids=str)
def test_bits_are_the_same_on_any_number_of_multiprocessors(
    bench: Bench, exponents: tuple[int, int]
) -> None:
    drawn = random_mx_groups(GROUPS.M, 6, 672, 736, 1, exponents)
    outs = [launched(bench, drawn, GROUPS, cu_num=cu_num) for cu_num in (None, 1, 2, 7, 78)]
    assert_right(bench, outs[0], drawn, GROUPS)
    assert all(same_bytes(out, outs[0]) for out in outs)


@ON_HOPPER
@pytest.mark.sanitized
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("elements", [1, 4])
def test_results_begin_at_any_address(bench: Bench, dtype: torch.dtype, elements: int) -> None:
    N, K = 288, 608
    drawn = random_mx_groups(GROUPS.M, 6, N, K, 1, (-11, -6))
    expected = launched(bench, drawn, GROUPS, dtype=dtype)
    name = next(name for name, each in DTYPES.items() if each == dtype)
    memory = poisoned((GROUPS.M * N + 16,), dtype, bench.device)
    y = memory[elements : elements + GROUPS.M * N].view(GROUPS.M, N)
    assert y.data_ptr() % 16
    run = bound(bench.kernel, bench.device, GroupedGemmProblem(GROUPS.M, N, K, 6, name))
    _, ends = GROUPS.bounds()
    run([*(t.to(bench.device) for t in drawn), None, y, None, ends.to(bench.device)])
    assert same_bytes(y.cpu(), expected)
    assert is_poison(memory[:elements]) and is_poison(memory[elements + GROUPS.M * N :])


@ON_HOPPER
@pytest.mark.sanitized
def test_steps_of_each_form_are_added_amid_others(bench: Bench) -> None:
    """In one group; in others of the same call none are apart."""
    groups = ending_at([200, 200, 500], 500)
    drawn = random_mx_groups(500, 3, 288, 1120, 4, (0, 0))
    _, xs, _, ws = drawn
    xs[150, 4 * 3 + 1] -= 9  # a block of x in step 3, one of w in step 5, and a row of w in step 4
    ws[0, 200, 4 * 5 + 2] -= 9
    ws[0, 10, 4 * 4 : 4 * 5] -= 9
    ws[0, 280, 4 * 8 : 4 * 9] -= 9  # of the last step, which ends early
    own = [(drawn[0][a:b], xs[a:b], drawn[2][g], ws[g]) for g, (a, b) in enumerate(groups.ranges)]
    together = QUARTER if bench.kernel.name == IN_PLACE_SM90.name else ROWS
    forms = forms_of(own[0], together)
    assert forms.unique().tolist() == [TOGETHER, BY_ROWS, BY_BLOCKS]
    assert (forms_of(own[2], together) == TOGETHER).all()
    for cu_num in (None, 1, 5):
        assert_right(bench, launched(bench, drawn, groups, cu_num=cu_num), drawn, groups)


@ON_HOPPER
def test_what_other_groups_have_changes_no_bits(bench: Bench) -> None:
    """Neither scales far apart nor NaN: tiles are of one group."""
    drawn = random_mx_groups(GROUPS.M, 6, 160, 608, 2, NEAR)
    plain = launched(bench, drawn, GROUPS)
    start, end = GROUPS.ranges[3]
    drawn[1][start:end, 3], drawn[3][3, :, 5] = 250, 1
    drawn[1][start, 0], drawn[3][3, 7, 0] = NAN_SCALE, NAN_SCALE
    out = launched(bench, drawn, GROUPS)
    others = torch.ones(GROUPS.M, dtype=torch.bool)
    others[start:end] = False
    assert same_bytes(out[others], plain[others])
    assert out[start].isnan().all() and out[start:end, 7].isnan().all()
    assert_right(bench, out, drawn, GROUPS)


@OF_THE_RING
@pytest.mark.parametrize("tiles", [1, 2, 5, 40])
def test_bits_are_the_same_where_panels_of_w_are_read_more_than_once(
    bench: Bench, tiles: int
) -> None:
    """By more tiles of x than share a tile of w before the next one."""
    groups = ending_at([1500, 1501, 2600], 2600)
    drawn = random_mx_groups(groups.M, 3, 2592, 224, 5, NEAR)  # 21 tiles of w each
    whole = launched(bench, drawn, groups)
    assert_right(bench, whole, drawn, groups)
    with with_room_for(tiles):
        for cu_num in (None, 3):
            assert same_bytes(launched(bench, drawn, groups, cu_num=cu_num), whole)


@ON_HOPPER
@pytest.mark.sanitized
@pytest.mark.parametrize("N", [32, 160, 224])
def test_rows_of_w_behind_a_groups_last_change_no_bits(bench: Bench, N: int) -> None:
    """The next group's are in the same tile, where they may be NaN and under any scales."""
    groups = ending_at([70, 200, 200, 400, 529], 529)
    drawn = random_mx_groups(529, 5, N, 608, 6, NEAR)
    plain = launched(bench, drawn, groups)
    assert_right(bench, plain, drawn, groups)
    for spoilt in (0, 1):
        xq, xs, w, ws = drawn[0], drawn[1], drawn[2].view(torch.uint8).clone(), drawn[3].clone()
        w[spoilt::2, 0::3] = 0x7F
        ws[spoilt::2, 1::3] = NAN_SCALE
        ws[spoilt::2, 2::3, 0::2], ws[spoilt::2, 2::3, 1::2] = 250, 1
        out = launched(bench, (xq, xs, w.view(torch.float8_e4m3fn), ws), groups)
        for g, (start, end) in enumerate(groups.ranges):
            if g % 2 == spoilt:
                assert out[start:end, 0::3].isnan().all() and out[start:end, 1::3].isnan().all()
            else:
                assert same_bytes(out[start:end], plain[start:end])


@IN_PLACE
@pytest.mark.parametrize("exponents", [NEAR, LESS_NEAR, (-20, 20)], ids=str)
def test_bits_of_a_block_are_the_same_alone_and_in_a_pair(
    bench: Bench, exponents: tuple[int, int]
) -> None:
    """A consumer has all units of a block of a pair, and one of a block that is alone."""
    a, a_scale, b, b_scale = random_mx_groups(385, 1, 288, 608, 7, exponents)
    for rows in (1, 64, 65, 128, 129, 192, 193, 256, 257, 385):
        whole = launched(bench, (a[:rows], a_scale[:rows], b, b_scale), one_group(rows))
        for first in range(0, rows, 128):
            own = slice(first, min(first + 128, rows))
            block = a[own], a_scale[own], b, b_scale
            alone = launched(bench, block, one_group(own.stop - first))
            assert same_bytes(whole[own], alone)


@IN_PLACE
def test_bits_are_the_same_where_pairs_of_blocks_take_turns_at_tiles_of_w(bench: Bench) -> None:
    """By more pairs than share a tile of w before the next one, of which the last is none."""
    groups = ending_at([1500, 1501, 2600], 2600)
    drawn = random_mx_groups(groups.M, 3, 2592, 224, 5, NEAR)  # 21 tiles of w each
    whole = launched(bench, drawn, groups)
    assert_right(bench, whole, drawn, groups)
    for cu_num in (1, 3, 40):
        assert same_bytes(launched(bench, drawn, groups, cu_num=cu_num), whole)


@ON_HOPPER
def test_a_nan_among_large_values_reaches_its_outputs_alone(bench: Bench) -> None:
    """Where all others of its block go under another scale by a subtraction from their bits."""
    drawn = random_mx_groups(GROUPS.M, 6, 160, 608, 3, (-1, 1))
    w, ws = drawn[2].view(torch.uint8), drawn[3]
    w &= 0xFE
    w |= 0x40
    (start, end), at = GROUPS.ranges[3], ((7, 100), (130, 601))
    expected = torch.zeros(GROUPS.M, 160, dtype=torch.bool)
    for n, k in at:
        w[3, n, k], ws[3, n, k // 32] = 0xFF, 126
        expected[start:end, n] = True
    out = launched(bench, drawn, GROUPS)
    assert_right(bench, out, drawn, GROUPS)
    assert (out.isnan() == expected).all()


@ON_HOPPER
def test_scales_of_zeros_change_no_bits(bench: Bench) -> None:
    drawn = random_mx_groups(GROUPS.M, 6, 416, 608, 4, (-11, -9))
    w, ws = drawn[2].view(torch.uint8), drawn[3]
    empty = torch.rand(ws.shape, generator=torch.Generator().manual_seed(0)) < 0.05
    w.view(*ws.shape, 32)[empty] = 0x80
    outs = []
    for scale in (0, 122, 254):
        ws[empty] = scale
        outs.append(launched(bench, drawn, GROUPS, dtype=torch.float16))
    assert_right(bench, outs[0], drawn, GROUPS)
    assert all(same_bytes(out, outs[0]) for out in outs)


@ON_HOPPER
@pytest.mark.sanitized
def test_groups_that_overlap_harm_no_memory(bench: Bench) -> None:
    M, N, K, G = 700, 96, 160, 40
    drawn = random_mx_groups(M, G, N, K, 0)
    problem = GroupedGemmProblem(M, N, K, G)
    starts, ends = torch.zeros(G, dtype=torch.int32), torch.full((G,), M, dtype=torch.int32)
    for tiles in (3, 1000):
        with with_room_for(tiles):
            tensors = (*drawn, None, Out((M, N), torch.bfloat16), starts, ends)
            launch(bench.kernel, bench.device, problem, None, tensors)


@ON_HOPPER
@pytest.mark.parametrize("tiles", [4, 1000])
def test_calls_repeat_bit_for_bit_on_two_streams(bench: Bench, tiles: int) -> None:
    """A launch begins before the one ahead is over, whose workspace it takes."""
    M, N, K, calls = 600, 416, 2880, []
    _, ends = GROUPS.bounds()
    for seed in range(2):
        here = [t.to(bench.device) for t in random_mx_groups(M, 6, N, K, seed, NEAR)]
        calls.append([*here, None, Out((M, N), torch.bfloat16), None, ends.to(bench.device)])
    with with_room_for(tiles):
        run = bound(bench.kernel, bench.device, GroupedGemmProblem(M, N, K, 6))
    assert_repeats_on_two_streams(run, calls, launches=50)


@ON_HOPPER
@pytest.mark.slow
def test_thousands_of_launches_are_bitwise_equal(bench: Bench) -> None:
    M, N, K, G = 4096, 2880, 2880, 4
    groups = ending_at([1000, 1000, 2500, M], M)
    on_gpu = [t.to(bench.device) for t in random_mx_groups(M, G, N, K, 3, NEAR)]
    run = bound(bench.kernel, bench.device, GroupedGemmProblem(M, N, K, G))
    _, ends = groups.bounds()
    outs = [torch.empty(M, N, dtype=torch.bfloat16, device=bench.device) for _ in range(2)]
    bounds = ends.to(bench.device)
    run([*on_gpu, None, outs[0], None, bounds])
    differ = torch.zeros((), dtype=torch.int64, device=bench.device)
    for _ in range(3000):
        run([*on_gpu, None, outs[1], None, bounds])
        differ += (outs[1] != outs[0]).any()
    assert not differ.item()
