"""Launches of one kernel of the linear: into poisoned memory, over and over, in a chain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

import aiter_mx
from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.spec import Config, KernelSpec
from aiter_mx.launch import bind
from aiter_mx.plan import runner
from aiter_mx.target import target_of
from aiter_mx.timing import random_mx as random_mx_there
from op_tests.linear.operands import DTYPES, Operands, operands
from op_tests.mx_reference import random_mx

GUARD = 64  # elements
POISON = 0x5A


def launch_linear(
    kernel: KernelSpec,
    device: torch.device,
    config: Config | None,
    arguments: Operands,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    cu_num: int | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """The kernel's result on the CPU, in its own configuration where ``config`` is None.

    Its output starts out poisoned, between guards that must stay so. Work is divided as for so many
    compute units, where ``cu_num`` says how many. ``pdl`` is the problem's.
    """
    names = {dtype: name for name, dtype in DTYPES.items()}
    (M, K), N = arguments[0].shape, arguments[2].shape[0]
    bias_name = "none" if bias is None else names[bias.dtype]
    problem = LinearProblem(M, N, K, names[dtype], bias_name, pdl)
    target = target_of(device)
    target = replace(target, cu_num=cu_num or target.cu_num)
    assert kernel.refusal(target, problem) is None
    config = kernel.configure(target, problem) if config is None else config
    kernel.check_config(config)
    whole = torch.empty(2 * GUARD + M * N, dtype=dtype)
    whole.view(torch.uint8).fill_(POISON)
    whole = whole.to(device)
    out = whole[GUARD : GUARD + M * N].view(M, N)
    tensors = (*(None if t is None else t.to(device) for t in (*arguments, bias)), out)
    if kernel.backend == "hip":
        index = torch.cuda.current_device() if out.is_cuda else 0
        run = bind(kernel, target, problem, config, index)
        run(tensors, [0 if t is None else t.data_ptr() for t in tensors])
    else:
        runner(kernel)(problem, tensors, config)
    whole = whole.cpu()
    for outside in (whole[:GUARD], whole[GUARD + M * N :]):
        assert (outside.view(torch.uint8) == POISON).all(), "wrote outside the output"
    return whole[GUARD : GUARD + M * N].view(M, N)


def assert_repeats_on_two_streams(
    kernel: KernelSpec, problem: LinearProblem, config: Config | None = None
) -> None:
    """A thousand launches in graphs on each of two streams at once give the same bits."""
    here = [t.cuda() for t in operands(problem.M, problem.N, problem.K, 1)]
    target = target_of(torch.device("cuda"))
    run = bind(kernel, target, problem, config or kernel.configure(target, problem), 0)
    streams = [torch.cuda.Stream() for _ in range(2)]
    shape = (100, problem.M, problem.N)
    outs = [torch.empty(shape, dtype=DTYPES[problem.out_dtype], device="cuda") for _ in streams]
    graphs = []
    torch.cuda.synchronize()
    for stream, out in zip(streams, outs, strict=True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for one in out:
                tensors = (*here, None, one)
                run(tensors, [0 if t is None else t.data_ptr() for t in tensors])
        graphs.append(graph)
    expected = None
    for _ in range(10):
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        expected = outs[0][0].clone() if expected is None else expected
        assert all(torch.equal(out, expected.expand_as(out)) for out in outs)


def launch_beyond_4_gib(
    kernel: KernelSpec, M: int, K: int, dtype: str
) -> tuple[torch.Tensor, Operands]:
    """Some columns of a result whose weights take more than 4 GiB, and the operands of these."""
    N, device = 700_000, torch.device("cuda")
    (xq, xs), (wq, ws) = random_mx_there(M, K, device), random_mx_there(N, K, device)
    assert wq.nbytes > 4 << 30
    out = torch.full((M, N), float("nan"), dtype=DTYPES[dtype], device=device)
    problem, target = LinearProblem(M, N, K, dtype), target_of(device)
    tensors = (xq, xs, wq, ws, None, out)
    run = bind(kernel, target, problem, kernel.configure(target, problem), 0)
    run(tensors, [0 if t is None else t.data_ptr() for t in tensors])
    generator = torch.Generator().manual_seed(9)
    some = torch.cat([torch.randint(0, N, (300,), generator=generator), torch.tensor([0, N - 1])])
    there = some.cuda()
    weights = wq.view(torch.uint8)[there].view(torch.float8_e4m3fn).cpu(), ws[there].cpu()
    return out[:, there].cpu(), (xq.cpu(), xs.cpu(), *weights)


def chain_of_layers(kernel: KernelSpec, M: int) -> Callable[[bool], torch.Tensor]:
    """Layers each of whose activations are made from the result of the one ahead, in one stream.

    It is told whether launches overlap, and takes one configuration either way: another one may add
    in another order. Both ways are loaded here, so that either can be captured at once.
    """
    width, layers = 1536, 12
    generator = torch.Generator().manual_seed(7)
    weights = [
        [t.cuda() for t in random_mx(width, width, generator, scale_exponents=(-14, -12))]
        for _ in range(layers)
    ]
    first = [t.cuda() for t in random_mx(M, width, generator, scale_exponents=(-3, 3))]
    target, problem = target_of(torch.device("cuda")), LinearProblem(M, width, width)
    config = kernel.configure(target, problem)
    runs = {
        pdl: bind(kernel, target, replace(problem, pdl=pdl), config, 0) for pdl in (False, True)
    }

    def chain(pdl: bool) -> torch.Tensor:
        xq, xs = first
        for wq, ws in weights:
            y = torch.empty(M, width, dtype=torch.bfloat16, device="cuda")
            tensors = (xq, xs, wq, ws, None, y)
            # One right after the other: the second writes where the first wrote.
            for _ in range(2):
                runs[pdl](tensors, [0 if t is None else t.data_ptr() for t in tensors])
            xq, xs = aiter_mx.quantize(y)
        return y

    return chain
