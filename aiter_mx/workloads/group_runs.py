"""Runs of rows of one group, tried out: a layout whose blocks are dealt to groups and to none."""

from __future__ import annotations

from dataclasses import replace

import torch

from aiter_mx.codec import DTYPES
from aiter_mx.kernels.group_runs import GroupRunsProblem
from aiter_mx.launch import Tensors
from aiter_mx.workloads.workload import Judge, Operands, Verdict, Workload


def _layout(problem: GroupRunsProblem, device: torch.device) -> torch.Tensor:
    blocks = -(-problem.M // problem.run_rows)
    owners = torch.randint(-1, problem.G, (blocks,)).repeat_interleave(problem.run_rows)
    is_padding = torch.arange(problem.run_rows).repeat(blocks) > torch.randint(problem.run_rows, ())
    return owners.masked_fill(is_padding, -1)[: problem.M].int().to(device)


def _operands(problem: GroupRunsProblem, device: torch.device) -> Operands:
    out = torch.empty(problem.M, problem.N, dtype=DTYPES[problem.out_dtype], device=device)
    R = problem.most_runs
    lists = (torch.empty(size, dtype=torch.int32, device=device) for size in (R, 2 * R + 1, 1))
    return [_layout(problem, device), out, *lists]


def _another(problem: GroupRunsProblem, operands: Operands) -> Operands:
    out = operands[1]
    assert out is not None
    return _operands(problem, out.device)


def runs_of(layout: list[int], groups: int) -> list[tuple[int, int, int]]:
    """First row of each run, the row after its last, and its group."""
    found: list[tuple[int, int, int]] = []
    for row, group in enumerate(layout):
        if not 0 <= group < groups:
            continue
        if found and found[-1][1:] == (row, group):
            found[-1] = (found[-1][0], row + 1, group)
        else:
            found.append((row, row + 1, group))
    return found


def _judge(problem: GroupRunsProblem, tensors: Tensors) -> Judge:
    layout = tensors[0].cpu()
    runs, M, R = runs_of(layout.tolist(), problem.G), problem.M, problem.most_runs
    has_room = len(runs) <= problem.G or not any(run[0] % problem.run_rows for run in runs)
    kept = runs if has_room else runs[: problem.G]
    lost = M if has_room else runs[problem.G][0]
    is_known = (layout >= 0) & (layout < problem.G)

    def judge(results: Tensors) -> Verdict:
        out, starts, ends, first = (result.cpu() for result in results[1:])
        count = len(kept)
        lists = (starts[:count], ends[:count], ends[R + 1 :][:count])
        right = [*zip(*(each.tolist() for each in lists), strict=True)] == kept
        right &= (int(ends[R]), int(first)) == (count, lost)
        right &= bool((starts[count:] >= ends[count:R]).all())
        right &= not out[~is_known].any() and bool(out[lost:][is_known[lost:]].isnan().all())
        return Verdict(0.0, 0.0) if right else Verdict(float("inf"), float("inf"))

    return judge


WORKLOAD = Workload(
    op="group_runs",
    draw=_operands,
    redraw=_another,
    read_bytes=lambda problem, operands: 4.0 * problem.M,
    results=(1, 2, 3, 4),
    judge=_judge,
    sample=lambda problem, share: replace(problem, M=max(1, round(problem.M * share))),
)
