"""Host time of a launch: ours bare, whole eager ops, and Triton's, in one run.

    python -m op_tests.bench.host [--save]

The problem is so small that the GPU is always waiting, and the host's time is what is seen.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch

import aiter_mx
from aiter_mx.dispatch.dispatcher import route
from aiter_mx.fallbacks import linear_triton
from aiter_mx.fallbacks.linear_triton import linear_tile_kernel
from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.linear.triton import configure
from aiter_mx.kernels.registry import find_kernel
from aiter_mx.launch import bind, load_function, runtime_of
from aiter_mx.runtimes.base import PackedArgs
from aiter_mx.target import target_of
from aiter_mx.timing import time_hosts_us
from op_tests.bench.common import refuse_no_gpu, report
from op_tests.mx_reference import random_mx

M, N, K = 1, 64, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="write docs/measured/<gpu>/host.csv")
    save = parser.parse_args().save
    refuse_no_gpu()

    generator = torch.Generator().manual_seed(0)
    operands = [t.cuda() for t in (*random_mx(M, K, generator), *random_mx(N, K, generator))]
    out = torch.empty(M, N, dtype=torch.bfloat16, device="cuda")
    x, w = torch.randn(M, K).bfloat16().cuda(), torch.randn(N, K).bfloat16().cuda()
    target = target_of(out.device)
    problem = LinearProblem(M=M, N=N, K=K, out_dtype="bf16")
    chosen = route("linear", target, problem)
    assert chosen.backend == "hip", chosen
    spec = find_kernel("linear", target.arch, "hip", chosen.kernel)
    variant = (spec, target, problem, chosen.config)
    launch = bind(*variant, 0)
    tensors = (*operands, None, out)
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    function = load_function(*variant, 0)
    module, runtime = spec.module, runtime_of(target.runtime)
    args = PackedArgs(module.args, module.scalars(*variant[1:]))
    args.set_pointers(*addresses)
    start = runtime.bind(function, module.geometry(*variant[1:]), args)
    tiles = dict(configure(target, problem), SPLIT_K=1)  # one launch, as a bare launch is

    hidden, width, experts = 64, 64, 4
    gate_up = random_mx(experts * 2 * width, hidden, generator)
    down = random_mx(experts * hidden, width, generator)
    layer = [t.view(experts, -1, t.shape[-1]).cuda() for t in (*gate_up, *down)]
    ids = torch.tensor([[0, 2]], dtype=torch.int32, device="cuda")
    shares = torch.rand(1, 2, device="cuda")

    flags = {"HAS_BIAS": False, "WHOLE_STEPS": False, "enable_fp_fusion": False}

    calls = {
        "bare launch": partial(start, 0),
        "launch with new pointers": partial(launch, tensors, addresses),
        "aiter_mx.linear": partial(aiter_mx.linear, *operands),
        "aiter_mx.linear, out given": partial(aiter_mx.linear, *operands, out=out),
        "aiter_mx.fused_moe": partial(aiter_mx.fused_moe, x, *layer, ids, shares),
        "aiter_mx.quantize": partial(aiter_mx.quantize, x),
        "bare Triton launch": lambda: linear_tile_kernel[(1, 1)](
            *tensors, M, N, K, **tiles, **flags
        ),
        "linear through Triton": partial(linear_triton.run, problem, tensors, tiles),
        "torch.nn.functional.linear, bf16": partial(torch.nn.functional.linear, x, w),
        "torch.empty": partial(torch.empty, (M, N), dtype=torch.bfloat16, device="cuda"),
    }
    times = time_hosts_us(list(calls.values()))
    rows = [{"call": name, "host_us": us} for name, us in zip(calls, times, strict=True)]
    report("Host time of one call", rows, "host" if save else None)


if __name__ == "__main__":
    main()
