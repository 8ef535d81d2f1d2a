"""What tests of the linear's kernels share: random operands, and launches of one kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import aiter_mx
from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.spec import Config, KernelSpec
from aiter_mx.launch import bind
from aiter_mx.target import target_of
from aiter_mx.timing import random_mx as random_mx_there
from op_tests.mx_reference import linear_reference64, random_mx

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
GUARD = 64  # elements
POISON = 0x5A


def operands(M: int, N: int, K: int, seed: int, **options: Any) -> Operands:
    generator = torch.Generator().manual_seed(seed)
    return (*random_mx(M, K, generator, **options), *random_mx(N, K, generator, **options))


def bias_as_large_as_outputs(drawn: Operands, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """One for each row of w, so that neither it nor the products are lost in rounding."""
    size = linear_reference64(*drawn).abs().mean()
    scale = size if dtype is not torch.float16 else size.clamp(max=1000.0)
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(len(drawn[2]), generator=generator, dtype=torch.float64) * scale).to(dtype)


def with_opposite_scales(drawn: Operands, shift: int) -> Operands:
    """x times 2^shift and w divided by as much: the same products, from extreme scales."""
    xq, xs, wq, ws = drawn
    return xq, (xs.int() + shift).to(torch.uint8), wq, (ws.int() - shift).to(torch.uint8)


def operands_that_all_count(M: int, N: int, K: int, seed: int) -> Operands:
    """Payloads of 1 to 1.875 of either sign under scales of 1 and 2: no product is negligible."""
    generator = torch.Generator().manual_seed(seed)

    def draw(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        payload = torch.randint(0x38, 0x40, (rows, K), generator=generator, dtype=torch.uint8)
        payload |= torch.randint(0, 2, (rows, K), generator=generator, dtype=torch.uint8) << 7
        scale = torch.randint(127, 129, (rows, K // 32), generator=generator, dtype=torch.uint8)
        return payload.view(torch.float8_e4m3fn), scale

    return (*draw(M), *draw(N))


def assert_no_product_is_missing(got: torch.Tensor, drawn: Operands) -> None:
    """Of ``operands_that_all_count``, in bf16: the error of each row and column, by its norm, is at
    most that of rounding and the 2^-11 that fp8 sums are allowed here. One product of K that all
    lack makes about 1 / sqrt(K), which is more up to K = 40,000."""
    reference = linear_reference64(*drawn)
    error = got.double() - reference
    for dim in (0, 1):
        relative = error.norm(dim=dim) / reference.norm(dim=dim)
        assert relative.max() <= 2.0**-8 + 2.0**-11, (dim, float(relative.max()))


def with_zero_blocks(drawn: Operands, generator: torch.Generator) -> Operands:
    """A fifth of all blocks zero, of either sign, with any scale but NaN."""
    xq, xs, wq, ws = (t.clone() for t in drawn)
    for payload, scale in ((xq, xs), (wq, ws)):
        blocks = payload.view(torch.uint8).view(*scale.shape, 32)
        empty = torch.rand(scale.shape, generator=generator) < 0.2
        blocks[empty] &= 0x80
        anything = torch.randint(0, 255, scale.shape, generator=generator, dtype=torch.uint8)
        scale[empty] = anything[empty]
    return xq, xs, wq, ws


def with_scales_moved(drawn: Operands, shift: int) -> Operands:
    """The same, with scales on the GPU that begin ``shift`` bytes past an aligned address."""
    xq, xs, wq, ws = drawn
    moved = []
    for scale in (xs, ws):
        room = torch.full((scale.numel() + 8,), 255, dtype=torch.uint8, device="cuda")
        room[shift : shift + scale.numel()] = scale.flatten().cuda()
        moved.append(room[shift : shift + scale.numel()].view(scale.shape))
    return xq, moved[0], wq, moved[1]


def launch_beyond_4_gib(
    kernel: KernelSpec, M: int, K: int, out_dtype: str = "fp32"
) -> tuple[torch.Tensor, Operands]:
    """Some columns of a result whose weights take more than 4 GiB, and the operands of these."""
    N, device = 700_000, torch.device("cuda")
    (xq, xs), (wq, ws) = random_mx_there(M, K, device), random_mx_there(N, K, device)
    assert wq.nbytes > 4 << 30
    out = torch.full((M, N), float("nan"), dtype=DTYPES[out_dtype], device=device)
    problem, target = LinearProblem(M, N, K, out_dtype), target_of(device)
    tensors = (xq, xs, wq, ws, None, out)
    run = bind(kernel, target, problem, kernel.configure(target, problem), 0)
    run(tensors, [0 if t is None else t.data_ptr() for t in tensors])
    generator = torch.Generator().manual_seed(9)
    some = torch.cat([torch.randint(0, N, (300,), generator=generator), torch.tensor([0, N - 1])])
    there = some.cuda()
    weights = wq.view(torch.uint8)[there].view(torch.float8_e4m3fn).cpu(), ws[there].cpu()
    return out[:, there].cpu(), (xq.cpu(), xs.cpu(), *weights)


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
    config = config or kernel.configure(target, problem)
    kernel.check_config(config)
    whole = torch.empty(2 * GUARD + M * N, dtype=dtype)
    whole.view(torch.uint8).fill_(POISON)
    whole = whole.to(device)
    out = whole[GUARD : GUARD + M * N].view(M, N)
    here = [None if t is None else t.to(device) for t in (*arguments, bias)]
    run = bind(kernel, target, problem, config, torch.cuda.current_device() if out.is_cuda else 0)
    tensors = (*here, out)
    run(tensors, [0 if t is None else t.data_ptr() for t in tensors])
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
