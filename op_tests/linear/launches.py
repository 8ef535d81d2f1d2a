"""Launches of one kernel of the linear: alone, over weights beyond 4 GiB, in a chain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import aiter_mx
from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.spec import Config, KernelSpec
from aiter_mx.target import target_of
from aiter_mx.timing import random_mx as random_mx_there
from op_tests.conformance import DTYPES, NAMES
from op_tests.launches import Out, bound, launch
from op_tests.linear.operands import Operands, operands
from op_tests.mx_reference import assert_close_to_reference, random_mx


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

    ``pdl`` is the problem's.
    """
    (M, K), N = arguments[0].shape, arguments[2].shape[0]
    bias_name = "none" if bias is None else NAMES[bias.dtype]
    problem = LinearProblem(M, N, K, NAMES[dtype], bias_name, pdl)
    tensors = (*arguments, bias, Out((M, N), dtype))
    (out,) = launch(kernel, device, problem, config, tensors, cu_num)
    return out


def assert_same_bits_whoever_ends_last(
    kernel: KernelSpec,
    config: Config,
    shape: tuple[int, int, int],
    monkeypatch: pytest.MonkeyPatch,
    cu_num: int | None = None,
) -> None:
    """In the simulator, in several orders, with caches apart and not; for M, N, K and a bias."""
    drawn, bias = operands(*shape, 7), torch.randn(shape[1])
    runs = []
    for seed in range(4):
        monkeypatch.setenv("AITER_MX_SIM_COHERENCE", str(seed % 2))
        monkeypatch.setenv("AITER_MX_SIM_SEED", str(seed))
        with aiter_mx.simulate("gfx950"):
            device = torch.device("cpu")
            runs.append(launch_linear(kernel, device, config, drawn, bias, torch.float32, cu_num))
    assert_close_to_reference(runs[0], *drawn, bias)
    assert all(torch.equal(runs[0].view(torch.int32), run.view(torch.int32)) for run in runs)


def launch_beyond_4_gib(
    kernel: KernelSpec, M: int, K: int, dtype: str
) -> tuple[torch.Tensor, Operands]:
    """Some columns of a result whose weights take more than 4 GiB, and the operands of these."""
    N, device = 700_000, torch.device("cuda")
    (xq, xs), (wq, ws) = random_mx_there(M, K, device), random_mx_there(N, K, device)
    assert wq.nbytes > 4 << 30
    # So that each block counts: one that outweighs all others has every later addition cut alike in
    # units that truncate, and their errors are not those of sqrt(K) additions.
    for scales in (xs, ws):
        scales.random_(126, 129)
    out = torch.full((M, N), float("nan"), dtype=DTYPES[dtype], device=device)
    bound(kernel, device, LinearProblem(M, N, K, dtype))((xq, xs, wq, ws, None, out))
    generator = torch.Generator().manual_seed(9)
    some = torch.cat([torch.randint(0, N, (300,), generator=generator), torch.tensor([0, N - 1])])
    there = some.cuda()
    weights = wq.view(torch.uint8)[there].view(torch.float8_e4m3fn).cpu(), ws[there].cpu()
    return out[:, there].cpu(), (xq.cpu(), xs.cpu(), *weights)


def chain_of_layers(
    kernel: KernelSpec, M: int, config: Config | None = None
) -> Callable[[bool], torch.Tensor]:
    """Layers each of whose activations are made from the result of the one ahead, in one stream.

    It is told whether launches overlap, and takes one configuration either way, the kernel's own
    where ``config`` is None: another one may add in another order. Both ways are loaded here, so
    that either can be captured at once.
    """
    width, layers = 1536, 12
    generator = torch.Generator().manual_seed(7)
    weights = [
        [t.cuda() for t in random_mx(width, width, generator, scale_exponents=(-14, -12))]
        for _ in range(layers)
    ]
    first = [t.cuda() for t in random_mx(M, width, generator, scale_exponents=(-3, 3))]
    target, problem = target_of(torch.device("cuda")), LinearProblem(M, width, width)
    config = config or kernel.configure(target, problem)
    runs = {
        pdl: bound(kernel, first[0].device, replace(problem, pdl=pdl), config)
        for pdl in (False, True)
    }

    def chain(pdl: bool) -> torch.Tensor:
        xq, xs = first
        for wq, ws in weights:
            y = torch.empty(M, width, dtype=torch.bfloat16, device="cuda")
            # One right after the other: the second writes where the first wrote.
            for _ in range(2):
                runs[pdl]((xq, xs, wq, ws, None, y))
            xq, xs = aiter_mx.quantize(y)
        return y

    return chain
