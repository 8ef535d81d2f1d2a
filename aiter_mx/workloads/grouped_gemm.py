"""The grouped GEMM, tried out: groups of uneven sizes, as a router makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

import torch

from aiter_mx.codec import DTYPES, FORMATS, INDICES, as_scale_bytes, dequantize_block_scaled
from aiter_mx.kernels.grouped_gemm import GroupedGemmProblem
from aiter_mx.kernels.spec import Problem
from aiter_mx.launch import Tensors
from aiter_mx.layouts import shuffle_scales, unshuffle_scales
from aiter_mx.numerics import BLOCK
from aiter_mx.timing import random_mx
from aiter_mx.workloads.models import Model
from aiter_mx.workloads.workload import (
    Judge,
    Operands,
    Verdict,
    Workload,
    compare,
    normal_mx,
    seeded,
    worst_of,
)

ROWS = (8192, 32768)
"""Rows of all groups that tables have."""
_SAMPLE_ROWS = 256
_PADDED_TO = 128  # rows of groups that quantize_grouped pads


def _operands(problem: GroupedGemmProblem, device: torch.device) -> Operands:
    M, N, K, G = problem.M, problem.N, problem.K, problem.G
    bias = None
    if problem.bias != "none":
        bias = torch.randn(G, N, dtype=DTYPES[problem.bias], device=device)
    out = torch.empty(problem.rows_of_out, N, dtype=DTYPES[problem.out_dtype], device=device)
    starts, ends = bounds(problem, device)
    a, a_scale = _drawn(M, K, device)
    a = in_format(a, problem.a_format)
    if problem.layout == "masked":
        a_scale = a_scale.view(G, M // G, K // BLOCK)
    a_scale = shuffle_scales(a_scale, problem.a_scale_layout)
    return [a, a_scale, *_weights(problem, device), bias, out, starts, ends]


def _drawn(rows: int, K: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return (normal_mx if device.type == "cuda" else random_mx)(rows, K, device)


def in_format(payload: torch.Tensor, name: str) -> torch.Tensor:
    """A random payload of e4m3, or numbers of e5m2 in place of it."""
    if name == "e4m3":
        return payload
    return (payload.view(torch.uint8) & 0xFB).view(FORMATS[name].dtype)  # no infinity, no NaN


def _weights(problem: GroupedGemmProblem, device: torch.device) -> list[torch.Tensor]:
    payload, scale = _drawn(problem.G * problem.N, problem.K, device)
    shape = (problem.G, problem.N)
    scale = shuffle_scales(scale.view(*shape, problem.K // BLOCK), problem.b_scale_layout)
    return [payload.view(*shape, problem.K), scale]


def bounds(
    problem: GroupedGemmProblem, device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Groups between half and one and a half of the average, with no rows between them."""
    G, index = problem.G, INDICES[problem.index]
    shares = torch.rand(G) + 0.5
    if problem.layout == "masked":
        room = problem.M // G
        return None, (shares / 1.5 * room).to(index).to(device)
    if problem.unpads:
        ends = (shares.cumsum(0) / shares.sum() * problem.out_rows).to(index)
        offs = torch.nn.functional.pad(ends, (1, 0))
        padded = -(-offs.diff() // _PADDED_TO) * _PADDED_TO
        starts = torch.nn.functional.pad(padded[:-1].cumsum(0), (1, 0))
        return starts.to(index).to(device), offs.to(device)
    if problem.layout == "runs":
        return _runs(problem, device)
    ends = (shares.cumsum(0) / shares.sum() * problem.M).round()
    ends[-1] = problem.M
    return None, ends.to(index).to(device)


def _runs(problem: GroupedGemmProblem, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """As many as there is room for at multiples of ``run_rows``, of random groups."""
    starts = torch.arange(problem.most_runs) * problem.run_rows
    owners = torch.randint(problem.G, (problem.most_runs,))
    ends = (starts + problem.run_rows).clamp(max=problem.M)
    count = (starts < ends).sum().view(1)
    return starts.int().to(device), torch.cat([ends, count, owners]).int().to(device)


def ranges_of(
    problem: GroupedGemmProblem, starts: torch.Tensor, ends: torch.Tensor
) -> Iterable[tuple[int, int, int]]:
    """The group, the first row and the row after the last of each range that ``bounds`` made."""
    owners, lasts = torch.arange(problem.G), ends
    firsts = owners * (problem.M // problem.G)
    if problem.unpads:
        firsts, lasts = starts, starts + ends.diff()
    elif problem.layout == "masked":
        lasts = firsts + ends.cpu()
    elif problem.layout == "runs":
        owners, firsts, lasts = ends[problem.most_runs + 1 :], starts, ends[: problem.most_runs]
    else:
        firsts = torch.nn.functional.pad(ends[:-1], (1, 0))
    return zip(owners.tolist(), firsts.tolist(), lasts.tolist(), strict=True)


def _indices(problem: GroupedGemmProblem, number: int) -> dict[int, torch.Tensor | None]:
    with seeded(f"groups {problem.G} {number}", torch.device("cpu")):
        return dict(enumerate(bounds(problem, torch.device("cpu")), 6))


def _another(problem: GroupedGemmProblem, operands: Operands) -> Operands:
    out = operands[5]
    assert out is not None
    weights = _weights(problem, out.device)
    return [*operands[:2], *weights, operands[4], torch.empty_like(out), *operands[6:]]


def _read_bytes(problem: GroupedGemmProblem, operands: Operands | None) -> float:
    return problem.G * problem.N * problem.K * (BLOCK + 1) / BLOCK


def _judge(problem: GroupedGemmProblem, tensors: Tensors) -> Judge:
    aq, a_scale, bq, b_scale, bias, _, starts, ends = tensors
    room, blocks = problem.M // problem.G, problem.K // BLOCK
    rows_a = room if problem.layout == "masked" else problem.M
    a_scale = unshuffle_scales(a_scale, problem.a_scale_layout, rows_a, blocks).view(-1, blocks)
    b_scale = unshuffle_scales(b_scale, problem.b_scale_layout, problem.N, blocks)
    groups = []
    for g, first, last in ranges_of(problem, starts, ends):
        rows = slice(first, last)
        to = int(ends[g]) if problem.unpads else first
        a = dequantize_block_scaled(aq[rows], as_scale_bytes(a_scale[rows]), torch.float64)
        b = dequantize_block_scaled(bq[g], as_scale_bytes(b_scale[g]), torch.float64)
        # float32 is far closer to the product than what is judged, and takes half the memory.
        reference = a @ b.T
        if bias is not None:
            reference += bias[g].double()
        extra = 0.0 if bias is None else bias[g].double().abs()
        groups.append(
            (slice(to, to + last - first), reference.float(), a.norm(dim=1), b.norm(dim=1), extra)
        )

    def judge(results: Tensors) -> Verdict:
        return worst_of(
            [
                compare(
                    results[5][rows],
                    reference.double(),
                    torch.outer(a_norm, b_norm) + extra,
                    problem.out_dtype,
                )
                for rows, reference, a_norm, b_norm, extra in groups
                if reference.numel()
            ]
        )

    return judge


def two_groups(problem: Problem, share: float, of_m: int = 1, of_n: int = 1) -> Problem:
    """Two groups of their usual size, and some of the output features: multiples of these units."""
    groups = min(problem.G, 2)
    M = problem.M // problem.G * groups // of_m * of_m
    N = min(problem.N, max(_SAMPLE_ROWS, round(problem.N * share / of_n) * of_n))
    return replace(problem, G=groups, M=M, N=N) if M else problem


def _problems(model: Model, gpus: int, arch: str) -> list[GroupedGemmProblem]:
    """A model's experts divided among GPUs, which is how prefill is served and trained."""
    if model.experts is None or model.experts.count % gpus:
        return []
    return [
        GroupedGemmProblem(M=M, N=N, K=K, G=model.experts.count // gpus)
        for N, K in model.expert_linears(1)
        if K % BLOCK == 0
        for M in ROWS
    ]


_Like = TypeVar("_Like")


def problems_like(of: Callable[..., _Like], model: Model, gpus: int, arch: str) -> list[_Like]:
    """Problems of another op with the M, N, K and G of these, where N is whole blocks too."""
    found = _problems(model, gpus, arch)
    return [of(M=p.M, N=p.N, K=p.K, G=p.G) for p in found if p.N % BLOCK == 0]


WORKLOAD = Workload(
    op="grouped_gemm",
    draw=_operands,
    redraw=_another,
    read_bytes=_read_bytes,
    results=(5,),
    judge=_judge,
    sample=two_groups,
    problems=_problems,
    indices=_indices,
)
