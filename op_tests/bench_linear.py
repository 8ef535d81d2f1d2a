"""Decode linear: ours, Triton's best tile and bf16 matmul beside reading the weights alone.

    python op_tests/bench_linear.py [--save] [--sweep] [--M 1 4 16] [--shapes 2304x6144 ...]

All in one run on one GPU, cold weights (buffers rotated past the last-level cache), graph replay,
medians. With --sweep, each configuration of our kernels is timed and the fastest is reported;
without it, the one that dispatch routes to.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from itertools import product

import torch
from aiter_mx.kernels.linear import LinearProblem
from bench_common import copies_to_stay_cold, report, time_graph_us
from mx_reference import linear_reference64
from rich.progress import track

import aiter_mx
from aiter_mx.dispatch.dispatcher import route
from aiter_mx.errors import AiterMxError
from aiter_mx.fallbacks.linear_tiles import CANDIDATES, bucket
from aiter_mx.fallbacks.linear_triton import linear_triton
from aiter_mx.jit.build import BuildRequest, build
from aiter_mx.kernels.registry import kernels_of
from aiter_mx.kernels.spec import Arg, Config, Geometry
from aiter_mx.launch import Launch, runtime_of
from aiter_mx.runtimes.base import PackedArgs
from aiter_mx.target import Target, target_of

SHAPES = ((2304, 6144), (1536, 6144), (6144, 2048), (6144, 1536), (9216, 6144))
"""(N, K): qkv, gate_up, o_proj and down of a 6144-wide model at TP4, and qkv at TP1."""
ROWS = (1, 2, 4, 8, 16)
DEVICE = torch.device("cuda", 0)
Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def random_operands(M: int, N: int, K: int) -> Operands:
    """Random payloads over the whole e4m3 range and random scales, drawn on the GPU."""

    def payload(rows: int) -> torch.Tensor:
        magnitude = torch.randint(0, 127, (rows, K), device=DEVICE, dtype=torch.uint8)
        sign = torch.randint(0, 2, (rows, K), device=DEVICE, dtype=torch.uint8) << 7
        return (magnitude | sign).view(torch.float8_e4m3fn)

    def scale(rows: int) -> torch.Tensor:
        return torch.randint(121, 134, (rows, K // 32), device=DEVICE, dtype=torch.uint8)

    return payload(M), scale(M), payload(N), scale(N)


def reader(target: Target) -> Callable[[torch.Tensor], Callable[[], None]]:
    """Makes a call that only reads a tensor, with the fastest of a few grids and unrolls."""
    threads = 256
    runtime = runtime_of(target.runtime)
    functions = []
    for unroll, groups_a_cu in product((4, 8), (2, 4, 8)):
        defines = (("MX_THREADS", threads), ("MX_UNROLL", unroll))
        image = build(BuildRequest("read_only.cu", target.arch, defines)).image
        function = runtime.get_function(runtime.load(image, 0), "aiter_mx_read_only", 0)
        functions.append((function, groups_a_cu * target.cu_num))
    kinds = (Arg("data", "pointer", "r"), Arg("sink", "pointer", "w"))
    kinds += (Arg("size_bytes", "i64"), Arg("groups", "i32"))
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


def time_ours(problem: LinearProblem, copies: list[Operands], sweep: bool) -> Iterator[dict]:
    """Times of our kernels on ``problem``: as routed, or of each configuration that builds."""
    target = target_of(DEVICE)
    out = torch.empty(problem.M, problem.N, dtype=torch.bfloat16, device=DEVICE)
    if not sweep:
        chosen = route("linear", target, problem)
        calls = [lambda c=c: aiter_mx.linear(*c, out=out) for c in copies]
        yield {"kernel": chosen.kernel, "config": chosen.config, "us": time_graph_us(calls)}
        return
    for kernel in kernels_of("linear"):
        if kernel.backend != "hip" or kernel.refusal(target, problem):
            continue
        for values in product(*(param.values for param in kernel.params)):
            config = dict(zip((param.name for param in kernel.params), values, strict=True))
            us = time_config(kernel, target, problem, config, copies, out)
            if us is not None:
                yield {"kernel": kernel.name, "config": config, "us": us}


def time_config(kernel, target, problem, config: Config, copies, out) -> float | None:
    try:
        launch = Launch(kernel, target, problem, config, 0)
    except AiterMxError:
        return None
    tensors = [(*c, None, out) for c in copies]
    addresses = [[0 if t is None else t.data_ptr() for t in ts] for ts in tensors]
    calls = [lambda t=t, a=a: launch(t, a) for t, a in zip(tensors, addresses, strict=True)]
    return time_graph_us(calls)


def error_of(problem: LinearProblem, operands: Operands) -> float:
    """Relative error (Frobenius norm) of the routed result against float64."""
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
    target = target_of(DEVICE)
    read_us = reader(target)
    rows = []
    for shape in track(arguments.shapes, description="shapes"):
        N, K = map(int, shape.split("x"))
        weights = [random_operands(0, N, K)[2:] for _ in range(copies_to_stay_cold(N * K))]
        dense = [w.bfloat16() for w, _ in weights[: copies_to_stay_cold(2 * N * K)]]
        floor = read_us([w for w, _ in weights])
        for M in arguments.M:
            problem = LinearProblem(M=M, N=N, K=K, out_dtype="bf16")
            xq, xs = random_operands(M, 0, K)[:2]
            copies = [(xq, xs, *w) for w in weights]
            timed = list(time_ours(problem, copies, arguments.sweep))
            best = min(timed, key=lambda t: t["us"])
            out = torch.empty(M, N, dtype=torch.bfloat16, device=DEVICE)
            triton_us = {}
            for tiles in CANDIDATES[target.arch][bucket(M)]:
                calls = [lambda c=c, t=tiles: linear_triton(*c, None, out, t) for c in copies]
                triton_us[str(list(tiles.values()))] = time_graph_us(calls)
            x = torch.randn(M, K, device=DEVICE).bfloat16()
            bf16_us = time_graph_us([lambda w=w: torch.mm(x, w.t(), out=out) for w in dense])
            best_tiles = min(triton_us, key=triton_us.__getitem__)
            rows.append(
                {
                    "M": M,
                    "N": N,
                    "K": K,
                    "kernel": best["kernel"],
                    **best["config"],
                    "ours_us": best["us"],
                    "triton_us": triton_us[best_tiles],
                    "triton_tiles": best_tiles,
                    "bf16_us": bf16_us,
                    "floor_us": floor,
                    "ours/floor": best["us"] / floor,
                    "TB/s": N * K * (1 + 1 / 32) / best["us"] / 1e6,
                    "rel_err": error_of(problem, copies[0]),
                }
            )
            if arguments.sweep:
                for entry in sorted(timed, key=lambda t: t["us"])[:6]:
                    print(problem.M, N, K, entry["kernel"], dict(entry["config"]), entry["us"])
    report("Decode linear, cold weights", rows, "linear" if arguments.save else None)


if __name__ == "__main__":
    main()
