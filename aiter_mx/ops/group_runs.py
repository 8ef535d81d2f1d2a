"""Runs of rows of one group, which ``aiter_mx.compat.deep_gemm`` has found on the device."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from aiter_mx.checks import DTYPE_NAMES
from aiter_mx.kernels.group_runs import GroupRunsProblem
from aiter_mx.launch import Run, call
from aiter_mx.plan import Plans, bind
from aiter_mx.registration import is_traced, register
from aiter_mx.target import target_of

_plans: Plans[Run] = Plans()


class Runs(NamedTuple):
    """Runs of rows of one group, as ``grouped_gemm_ranges`` takes them.

    Attributes:
        starts: first row of each, int32 ``[R]``.
        ends: int32 ``[2 R + 1]``: the row after the last of each; how many there are; the group of
            each.
        lost: int32 ``[1]``, the first row of the runs for which there is no room, or M.
    """

    starts: Tensor
    ends: Tensor
    lost: Tensor


def group_runs(layout: Tensor, groups: int, run_rows: int, out: Tensor) -> Runs:
    """The runs of a layout. Rows of ``out`` that have no group become 0, those of lost runs NaN.

    Nothing is read on the host, and after a first call it can be captured into a graph.

    Args:
        layout: the group of each row, int32 ``[M]``, contiguous; what is outside of 0 to
            ``groups - 1`` is none.
        groups: G.
        run_rows: rows at multiples of which runs begin. Where any begins elsewhere, only as many
            as groups have room.
        out: bf16, fp16 or fp32 ``[M, N]``, of which other rows are left as they are.
    """
    if is_traced((layout, out)):
        table = _through_torch(layout, groups, run_rows, out)
    else:
        table = _run(layout, groups, run_rows, out)
    return _split(table)


def _split(table: Tensor) -> Runs:
    R = (len(table) - 2) // 3
    return Runs(table[:R], table[R:-1], table[-1:])


def _run(layout: Tensor, groups: int, run_rows: int, out: Tensor) -> Tensor:
    M, N = out.shape
    problem = GroupRunsProblem(M, N, groups, run_rows, DTYPE_NAMES[out.dtype])
    table = layout.new_empty(3 * problem.most_runs + 2)
    starts, ends, lost = _split(table)
    if out.numel() == 0:  # nothing that a product would be launched for
        starts.fill_(M)
        ends.zero_()
        lost.fill_(M)
        return table
    dense = out if out.is_contiguous() else out.contiguous()
    target = target_of(layout.device)
    key = (target, layout.device, problem)
    run = _plans.by_call.get(key)
    if run is None:
        run = _plans.keep(key, bind("group_runs", target, problem, layout.device))
    call(run, layout, dense, starts, ends, lost)
    if dense is not out:
        out.copy_(dense)
    return table


def _fake(layout: Tensor, groups: int, run_rows: int, out: Tensor) -> Tensor:
    M, N = out.shape
    problem = GroupRunsProblem(M, N, groups, run_rows, DTYPE_NAMES[out.dtype])
    return layout.new_empty(3 * problem.most_runs + 2)


_through_torch = register(
    "group_runs",
    "(Tensor layout, SymInt groups, SymInt run_rows, Tensor(a!) out) -> Tensor",
    _run,
    _fake,
)
