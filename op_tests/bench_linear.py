"""Decode linear: ours, Triton's best tile and bf16 matmul beside reading the weights alone.

    python op_tests/bench_linear.py [--save] [--sweep] [--M 1 4 16] [--shapes 2304x6144 ...]

All in one run on one GPU, cold weights (buffers rotated past the last-level cache), graph replay,
medians. With --sweep, each configuration of our kernels is timed and the fastest is reported;
without it, the one that dispatch routes to.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from itertools import product

import torch
from bench_common import report
from mx_reference import linear_reference64

import aiter_mx
from aiter_mx.dispatch.dispatcher import route
from aiter_mx.errors import AiterMxError
from aiter_mx.fallbacks.linear_tiles import CANDIDATES, bucket
from aiter_mx.fallbacks.linear_triton import linear_triton
from aiter_mx.jit.build import BuildRequest, build, build_all
from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.registry import kernels_of
from aiter_mx.kernels.spec import Arg, Config, Geometry
from aiter_mx.launch import bind, build_request, runtime_of
from aiter_mx.runtimes.base import PackedArgs
from aiter_mx.target import Target, target_of
from aiter_mx.timing import copies_to_stay_cold, random_mx, time_graph_us

SHAPES = ((2304, 6144), (1536, 6144), (6144, 2048), (6144, 1536), (9216, 6144))
"""(N, K): qkv, gate_up, o_proj and down of a 6144-wide model at TP4, and qkv at TP1."""
ROWS = (1, 2, 4, 8, 16)
DEVICE = torch.device("cuda", 0)
Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Timed = tuple[float, str, Config]
"""Microseconds, kernel, configuration."""


def reader(target: Target) -> Callable[[list[torch.Tensor]], float]:
    """Times reading one of several tensors alone, with the fastest of a few grids and unrolls."""
    threads = 256
    runtime = runtime_of(target.runtime)
    functions = []
    for unroll, groups_a_cu in product((4, 8), (2, 4, 8)):
        defines = (("MX_THREADS", threads), ("MX_UNROLL", unroll))
        image = build(BuildRequest("read_only.cu", target.arch, defines)).image
        function = runtime.get_function(runtime.load(image, 0), "aiter_mx_read_only", 0)
        functions.append((function, groups_a_cu * target.cu_num))
    pointers = (Arg("data", "pointer", "r"), Arg("sink", "pointer", "w"))
    kinds = (*pointers, Arg("size_bytes", "i64"), Arg("groups", "i32"))
    sink = torch.empty(1, dtype=torch.int32, device=DEVICE)

    def calls(variant: int, tensor: torch.Tensor) -> Callable[[], None]:
        function, groups = functions[variant]
        args = PackedArgs(kinds, (tensor.nbytes, groups))
        args.set_pointers(tensor.data_ptr(), sink.data_ptr())
        start = runtime.bind(function, Geometry((groups, 1, 1), (threads, 1, 1)), args)
        return lambda: start(runtime.current_stream(0))

    def best_of(tensors: list[torch.Tensor]) -> float:
        return min(
            time_graph_us([calls(variant, tensor) for tensor in tensors])
            for variant in range(len(functions))
        )

    return best_of


def time_ours(problem: LinearProblem, copies: list[Operands], sweep: bool) -> list[Timed]:
    """Times of our kernels on ``problem``: as routed, or of each configuration that builds."""
    target = target_of(DEVICE)
    out = torch.empty(problem.M, problem.N, dtype=torch.bfloat16, device=DEVICE)
    if not sweep:
        chosen = route("linear", target, problem)
        us = time_graph_us([partial(aiter_mx.linear, *operands, out=out) for operands in copies])
        return [(us, chosen.kernel, chosen.config)]
    timed = []
    for kernel in kernels_of("linear"):
        if kernel.backend != "hip" or kernel.refusal(target, problem):
            continue
        configs = kernel.candidates(target, problem)
        build_all([build_request(kernel, target, problem, config) for config in configs])
        for config in configs:
            try:
                launch = bind(kernel, target, problem, config, 0)
            except AiterMxError as error:
                print(f"{kernel.name} {config}: {error}"[:200])
                continue
            calls = []
            for operands in copies:
                tensors = (*operands, None, out)
                addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
                calls.append(partial(launch, tensors, addresses))
            timed.append((time_graph_us(calls), kernel.name, config))
    return sorted(timed, key=lambda entry: entry[0])


def time_triton(problem: LinearProblem, copies: list[Operands]) -> tuple[float, Config]:
    """Time of the fastest of Triton's candidate tiles, and which it is."""
    out = torch.empty(problem.M, problem.N, dtype=torch.bfloat16, device=DEVICE)
    timed = []
    for tiles in CANDIDATES[target_of(DEVICE).arch][bucket(problem.M)]:
        calls = [partial(linear_triton, *operands, None, out, tiles) for operands in copies]
        timed.append((time_graph_us(calls), tiles))
    return min(timed, key=lambda entry: entry[0])


def error_of(operands: Operands) -> float:
    """Relative error (Frobenius norm) of the routed result, in fp32, against float64."""
    out = aiter_mx.linear(*operands, out_dtype=torch.float32).double()
    reference = linear_reference64(*operands)
    return float((out - reference).norm() / reference.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="write docs/measured/<gpu>/linear.csv")
    parser.add_argument("--sweep", action="store_true", help="time every configuration of ours")
    parser.add_argument("--M", type=int, nargs="+", default=ROWS)
    parser.add_argument("--shapes", nargs="+", default=[f"{N}x{K}" for N, K in SHAPES])
    arguments = parser.parse_args()
    read_us = reader(target_of(DEVICE))
    rows: list[dict[str, object]] = []
    for shape in arguments.shapes:
        N, K = map(int, shape.split("x"))
        weights = [random_mx(N, K, DEVICE) for _ in range(copies_to_stay_cold(N * K))]
        dense = [wq.bfloat16() for wq, _ in weights[: copies_to_stay_cold(2 * N * K)]]
        floor_us = read_us([wq for wq, _ in weights])
        for M in arguments.M:
            problem = LinearProblem(M=M, N=N, K=K, out_dtype="bf16")
            activations = random_mx(M, K, DEVICE)
            copies = [(*activations, *w) for w in weights]
            timed = time_ours(problem, copies, arguments.sweep)
            for entry in timed[1:5]:
                print(M, N, K, *entry)
            ours_us, kernel, config = timed[0]
            triton_us, tiles = time_triton(problem, copies)
            x = torch.randn(M, K, device=DEVICE).bfloat16()
            bf16_us = time_graph_us([partial(torch.mm, x, w.t()) for w in dense])
            row: dict[str, object] = {"M": M, "N": N, "K": K, "kernel": kernel, **config}
            row |= {"ours_us": ours_us, "triton_us": triton_us, "bf16_us": bf16_us}
            row |= {"floor_us": floor_us, "ours_over_floor": ours_us / floor_us}
            row |= {"tb_per_s": N * K * (1 + 1 / 32) / ours_us / 1e6}
            row |= {"triton_tiles": "x".join(map(str, tiles.values()))}
            row |= {"rel_err": error_of(copies[0])}
            rows.append(row)
    report("Decode linear, cold weights", rows, "linear" if arguments.save else None)


if __name__ == "__main__":
    main()
