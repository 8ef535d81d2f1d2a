"""The runs of rows of one group in plain torch, on any device, without a host sync."""

from __future__ import annotations

import torch

from aiter_mx.kernels.group_runs import GroupRunsProblem
from aiter_mx.kernels.spec import Config
from aiter_mx.launch import Tensors


def run(problem: GroupRunsProblem, tensors: Tensors, config: Config) -> None:
    """Find the runs, and fill rows of no group and those of lost runs."""
    layout, out, starts, ends, lost = tensors
    M, G, most = problem.M, problem.G, problem.most_runs
    row = torch.arange(M, dtype=torch.int32, device=layout.device)
    known = (layout >= 0) & (layout < G)
    owner = torch.where(known, layout, -1)
    begins = known & (owner != torch.nn.functional.pad(owner[:-1], (1, 0), value=-1))
    number = begins.cumsum(0)  # from 1
    room = torch.where((begins & (row % problem.run_rows != 0)).any(), G, most)
    is_lost = known & (number > room)
    slot = torch.where(known & ~is_lost, number, 0)  # 0 is for no run
    first = row.new_full((most + 1,), M).scatter_reduce_(0, slot, row, "amin")
    last = row.new_zeros(most + 1).scatter_reduce_(0, slot, row + 1, "amax")
    of = row.new_zeros(most + 1).scatter_(0, slot, owner)
    count = torch.minimum(begins.sum(), room).to(torch.int32)
    starts.copy_(first[1:])
    ends.copy_(torch.cat([last[1:], count.view(1), of[1:]]))
    lost.copy_(torch.where(is_lost, row, M).amin(0, keepdim=True))
    value = torch.where(is_lost, float("nan"), 0.0).to(out.dtype).unsqueeze(1)
    torch.where((~known | is_lost).unsqueeze(1), value, out, out=out)
