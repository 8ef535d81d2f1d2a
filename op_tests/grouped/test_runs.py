"""Runs of rows of one group: their lists, and what rows get that no product is written to."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from aiter_mx.kernels.group_runs import GroupRunsProblem
from aiter_mx.kernels.registry import find_kernel
from aiter_mx.launch import build_request
from aiter_mx.ops.group_runs import group_runs
from aiter_mx.target import hardware
from op_tests.launches import poisoned
from op_tests.places import device_in
from op_tests.spills import assert_no_spills

device = device_in("torch", "sim", "cuda")
Run = tuple[int, int, int]


def runs_in(layout: Sequence[int], groups: int) -> list[Run]:
    """First row of each run, the row after its last, and its group."""
    owners = [group if 0 <= group < groups else -1 for group in layout]
    firsts = [m for m, g in enumerate(owners) if g >= 0 and (m == 0 or owners[m - 1] != g)]
    runs = []
    for first in firsts:
        end = first
        while end < len(owners) and owners[end] == owners[first]:
            end += 1
        runs.append((first, end, owners[first]))
    return runs


def check(
    layout: Sequence[int],
    groups: int,
    each: int,
    device: torch.device,
    N: int = 32,
    dtype: torch.dtype = torch.bfloat16,
    shift: int = 0,
) -> list[Run]:
    """The runs that are found, once they and the rows that are filled are compared."""
    M, of = len(layout), torch.tensor(layout, dtype=torch.int32)
    runs = runs_in(layout, groups)
    if any(first % each for first, *_ in runs):
        kept, beyond = runs[:groups], runs[groups:]
    else:
        kept, beyond = runs, []
    lost = beyond[0][0] if beyond else M
    out = poisoned((M * N + shift,), dtype).to(device)[shift:].view(M, N)
    before = out.clone()
    starts, ends, first_lost = group_runs(of.to(device), groups, each, out)
    R = max(groups, -(-M // each))
    assert len(starts) == R and len(ends) == 2 * R + 1
    count = int(ends[R])
    lists = (starts[:count], ends[:count], ends[R + 1 :][:count])
    assert [*zip(*(each.tolist() for each in lists), strict=True)] == kept
    assert (starts[count:] == M).all() and not ends[count:R].any()
    assert int(first_lost) == lost
    has_group = (of >= 0) & (of < groups)
    is_lost = has_group & (torch.arange(M) >= lost)
    assert not out[(~has_group).to(device)].any()
    assert out[is_lost.to(device)].isnan().all()
    left = (has_group & ~is_lost).to(device)
    assert torch.equal(out[left].view(torch.uint8), before[left].view(torch.uint8))
    return kept


def drawn(draw: random.Random, groups: int, blocks: int, each: int) -> list[int]:
    """Blocks of rows of groups, of some that are not there, or of none; some end sooner."""
    layout: list[int] = []
    for _ in range(blocks):
        group, own = draw.randrange(-2, groups + 1), draw.choice([each, each, each // 2, 1])
        layout += [group] * own + [-1] * (each - own)
    return layout


@pytest.mark.sanitized
def test_runs_are_those_of_a_loop_over_rows(device: torch.device) -> None:
    draw = random.Random(1)
    for groups, blocks, each in [(3, 20, 128), (5, 9, 64), (2, 40, 1), (7, 90, 8), (1, 6, 128)]:
        layout = drawn(draw, groups, blocks, each)[: -draw.randrange(1, 3)]
        assert check(layout, groups, each, device)


def test_more_rows_than_a_workgroup_looks_at_together(device: torch.device) -> None:
    layout = drawn(random.Random(2), 6, 150, 128)
    assert len(layout) > 2 * 1024 * 8
    check(layout, 6, 128, device)
    check([3] * 20000, 6, 128, device)


def test_runs_that_begin_anywhere_have_room_for_one_a_group(device: torch.device) -> None:
    assert check([1] * 5 + [-1] * 2 + [0] * 9 + [2] * 3, 3, 128, device)
    beyond = [1] * 80 + [0] * 40 + [-1] * 40 + [1] * 40 + [0] * 40
    assert check(beyond, 2, 128, device) == [(0, 80, 1), (80, 120, 0)]
    assert check([0, 1] * 300, 3, 128, device) == [(0, 1, 0), (1, 2, 1), (2, 3, 0)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_of_every_dtype_length_and_place_are_filled(
    device: torch.device, dtype: torch.dtype
) -> None:
    layout = [0] * 70 + [-1] * 58 + [1] * 20 + [0] * 30 + [5] * 9
    for N in (32, 288, 1056):
        for shift in (0, 1, 8):
            check(layout, 2, 128, device, N, dtype, shift)


def test_layouts_without_rows_or_groups_have_no_runs(device: torch.device) -> None:
    assert check([], 3, 128, device) == []
    assert check([-1] * 200, 3, 128, device) == []
    assert check([4, 3, -7], 3, 128, device) == []


def test_a_result_of_any_strides_is_filled(device: torch.device) -> None:
    layout = torch.tensor([0] * 128 + [-1] * 70, dtype=torch.int32, device=device)
    out = poisoned((64, 198), torch.bfloat16).to(device).t()
    before = out.clone()
    group_runs(layout, 2, 128, out)
    assert not out[128:].any()
    assert torch.equal(out[:128].view(torch.int16), before[:128].view(torch.int16))


def test_no_variant_for_cdna4_spills_or_has_scratch() -> None:
    target, kernel = hardware("gfx950"), find_kernel("group_runs", "gfx950", "hip", "scan")
    assert_no_spills([build_request(kernel, target, GroupRunsProblem(1000, 64, 4), {})])
