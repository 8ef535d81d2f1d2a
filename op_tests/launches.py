"""Launches of one kernel of any op: into poisoned memory between guards, on two streams at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aiter_mx.dispatch.cells import format_config
from aiter_mx.dispatch.route import Route
from aiter_mx.kernels.registry import kernels_of, key_columns
from aiter_mx.kernels.spec import Config, KernelSpec, Problem
from aiter_mx.plan import bind_route
from aiter_mx.sim.report import LaunchReport
from aiter_mx.target import target_of

GUARD = 256  # bytes before and after a result
POISON = 0x5A


@dataclass(frozen=True)
class Out:
    """The place of a result among a kernel's tensors; it starts out poisoned, between guards."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def poisoned(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Tensor:
    """A tensor all of whose bytes are ``POISON``."""
    memory = torch.full((prod(shape) * dtype.itemsize,), POISON, dtype=torch.uint8, device=device)
    return memory.view(dtype).view(*shape)


def is_poison(tensor: Tensor) -> bool:
    """Whether nothing has been written there."""
    return bool((tensor.contiguous().view(torch.uint8) == POISON).all())


def moved(tensor: Tensor, elements: int = 1) -> Tensor:
    """The same, beginning so many elements past an address that is a multiple of 16 bytes."""
    room = torch.empty(tensor.numel() + elements, dtype=tensor.dtype, device=tensor.device)
    room.view(torch.uint8).fill_(0xFF)
    view = room[elements:].view(tensor.shape)
    assert view.data_ptr() % 16 == elements * tensor.itemsize % 16
    return view.copy_(tensor)


def placed(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on ``device``, poisoned up to the end of its last word.

    compute-sanitizer takes a copy of part of a word for one of the whole.
    """
    left = -tensor.nbytes % 4
    if not left or tensor.device == device or not tensor.is_contiguous():
        return tensor.to(device)
    memory = poisoned((tensor.nbytes + left,), torch.uint8, device)
    return memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)


def on(device: torch.device, call: dict[str, Any]) -> dict[str, Any]:
    """A call's arguments, with tensors on ``device``."""
    return {name: v.to(device) if isinstance(v, Tensor) else v for name, v in call.items()}


def bound(
    kernel: KernelSpec,
    device: torch.device,
    problem: Problem,
    config: Config | None = None,
    cu_num: int | None = None,
) -> Callable[[Sequence[Tensor | None]], None]:
    """What launches a kernel over tensors on ``device``, with its own configuration where there is
    none. Work is divided as for so many compute units, where ``cu_num`` says how many."""
    target = target_of(device)
    target = replace(target, cu_num=cu_num or target.cu_num)
    assert kernel.refusal(target, problem) is None
    config = kernel.configure(target, problem) if config is None else config
    kernel.check_config(config)
    run = bind_route(Route(kernel, config, "a test"), target, problem, device)
    return lambda tensors: run(tensors, [0 if t is None else t.data_ptr() for t in tensors])


def launch(
    kernel: KernelSpec,
    device: torch.device,
    problem: Problem,
    config: Config | None,
    tensors: Sequence[Tensor | Out | None],
    cu_num: int | None = None,
) -> list[Tensor]:
    """The results of one launch on the CPU, one for each ``Out`` among ``tensors``."""
    run = bound(kernel, device, problem, config, cu_num)
    every: list[Tensor | None] = []
    memories: list[Tensor] = []
    for each in tensors:
        if isinstance(each, Out):
            size = prod(each.shape) * each.dtype.itemsize
            memories.append(poisoned((size + 2 * GUARD,), torch.uint8, device))
            every.append(memories[-1][GUARD:][:size].view(each.dtype).view(each.shape))
        else:
            every.append(None if each is None else placed(each, device))
    run(every)
    for memory in memories:
        assert is_poison(memory[:GUARD]) and is_poison(memory[-GUARD:]), "wrote outside a result"
    return [t.cpu() for t, asked in zip(every, tensors, strict=True) if isinstance(asked, Out)]


def same_bytes(one: Tensor, other: Tensor) -> bool:
    """Whether shapes, dtypes and all bits are the same; NaN is as good as any number."""
    alike = (one.shape, one.dtype) == (other.shape, other.dtype)
    return alike and torch.equal(
        one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
    )


def with_results(
    tensors: Sequence[Tensor | Out | None], results: Iterable[Tensor]
) -> list[Tensor | None]:
    """A kernel's tensors with these results in the places that are kept for them."""
    following = iter(results)
    return [next(following) if isinstance(each, Out) else each for each in tensors]


def assert_repeats_on_two_streams(
    run: Callable[[Sequence[Tensor | None]], None],
    calls: Sequence[Sequence[Tensor | Out | None]],
    launches: int = 100,
) -> None:
    """Ten replays of many launches, on a stream for each of ``calls`` at once, give the same bits.

    Args:
        run: launches over tensors, as ``bound`` gives it.
        calls: tensors on the GPU, with an ``Out`` for each result.
        launches: of a graph.
    """
    streams, graphs, every = [torch.cuda.Stream() for _ in calls], [], []
    torch.cuda.synchronize()
    for stream, tensors in zip(streams, calls, strict=True):
        asked = [each for each in tensors if isinstance(each, Out)]
        results = [poisoned((launches, *out.shape), out.dtype, "cuda") for out in asked]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for of_launch in zip(*results, strict=True):
                run(with_results(tensors, of_launch))
        graphs.append(graph)
        every.append(results)
    expected: list[list[Tensor]] = []
    for _ in range(10):
        torch.cuda.synchronize()  # results are poisoned on a stream that no other waits for
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        expected = expected or [[result[0].clone() for result in results] for results in every]
        for results, firsts in zip(every, expected, strict=True):
            for result, first in zip(results, firsts, strict=True):
                assert same_bytes(result, first.expand_as(result))
                result.view(torch.uint8).fill_(POISON)


def name_triton(
    problems: Iterable[tuple[str, Problem]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Have tables in ``folder`` name Triton for problems of these ops on the GPU."""
    target, rows = target_of(torch.device("cuda")), {}
    for op, problem in problems:
        triton = next(kernel for kernel in kernels_of(op) if kernel.backend == "triton")
        row = {"gfx": target.arch, "op": op, "cu_num": target.cu_num}
        row |= {name: getattr(problem, name) for name in key_columns(op)}
        config = format_config(triton.configure(target, problem))
        row |= {"backend": "triton", "kernel": triton.name, "config": config}
        rows.setdefault(op, [list(row)]).append(list(row.values()))
    for op, lines in rows.items():
        text = "".join(",".join(map(str, line)) + "\n" for line in lines)
        (folder / f"{op}.csv").write_text(text)
    monkeypatch.setenv("AITER_MX_CONFIG", str(folder))


def most_read(report: LaunchReport) -> int:
    """Bytes that a workgroup reads at most; 0 where they are not counted."""
    by_region = (report.group_bytes or {}).values()
    return max((sum(of_group) for of_group in zip(*by_region, strict=True)), default=0)
