"""Mistakes that a gradient of weights could make, each of which the tests' judge must see.

A judge over a whole tensor misses most of them: the last 32 of 4,096 rows left out of every group
change it by less than quantisation does.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from op_tests.mx_reference import dequantize64
from op_tests.training.cases import Case, check, draw_case

LENS = (256, 33, 0, 160, 97)


def values(payload: Tensor, scale: Tensor) -> Tensor:
    return dequantize64(payload.contiguous(), scale.contiguous())


def gradient(case: Case, cut: Callable[[Case, int], tuple[slice, slice]] | None = None) -> Tensor:
    """The gradient in float64, by the columns of each group, or by others for each operand."""
    clean = case.with_other_padding(0x38, 127)  # ones, which make padding felt
    grad, x = values(clean.grad, clean.grad_scale), values(clean.x, clean.x_scale)
    groups = []
    for g, count in enumerate(case.lens.tolist()):
        begin = int(case.offs[g])
        of_grad, of_x = cut(case, g) if cut else (slice(begin, begin + count),) * 2
        groups.append(grad[:, of_grad] @ x[:, of_x].T)
    return torch.stack(groups)


def columns(case: Case, g: int, first: int = 0, more: int = 0) -> tuple[slice, slice]:
    begin, count = int(case.offs[g]), int(case.lens[g])
    both = slice(begin + first, begin + max(count + more, first))
    return both, both


def tail_dropped(case: Case) -> Tensor:
    return gradient(case, lambda case, g: columns(case, g, more=-(int(case.lens[g]) % 32 or 32)))


def last_row_dropped(case: Case) -> Tensor:
    return gradient(case, lambda case, g: columns(case, g, more=-1))


def padding_read(case: Case) -> Tensor:
    return gradient(case, lambda case, g: columns(case, g, more=-int(case.lens[g]) % 128))


def groups_off_by_one(case: Case) -> Tensor:
    return gradient(case).roll(1, 0)


def neighbours_scale(case: Case) -> Tensor:
    moved = case.grad_scale.roll(1, 1)
    return gradient(Case(case.grad, moved, case.x, case.x_scale, case.offs, case.lens))


def operands_transposed(case: Case) -> Tensor:
    return gradient(case).mT.reshape(case.shape)


MISTAKES = (
    tail_dropped,
    last_row_dropped,
    padding_read,
    groups_off_by_one,
    neighbours_scale,
    operands_transposed,
)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_seen(mistake: Callable[[Case], Tensor]) -> None:
    case = draw_case(64, 96, LENS)
    check(gradient(case).float(), case)
    with pytest.raises(AssertionError, match=r"elements are wrong|has no rows"):
        check(mistake(case).float(), case)


def test_a_missed_accumulation_and_one_that_is_done_twice_are_seen() -> None:
    case = draw_case(64, 96, LENS)
    old, right = torch.randn(case.shape), gradient(case)
    check((right + old).float(), case, old)
    for wrong in (right, right + 2 * old):
        with pytest.raises(AssertionError, match=r"elements are wrong|has no rows"):
            check(wrong.float(), case, old)
