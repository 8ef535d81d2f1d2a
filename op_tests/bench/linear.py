"""Decode linear: ours, Triton's best tile, bf16 matmul and the vendor's MX GEMM (where there is
one) beside reading the weights and their scales alone.

    python -m op_tests.bench.linear [--save] [--sweep] [--M 1 4 16] [--shapes 2304x6144 ...]

All in one run on one GPU, cold weights (buffers rotated past the last-level cache), graph replay,
medians. Operands are normal values, which bf16 multiplies as they are. With --sweep, each
configuration of our kernels is timed and the fastest is reported, in a table of its own; without
it, the one that dispatch routes to. ``pdl_us`` is the same launches one after the other with
``pdl=True``, each free to read its weights before the one ahead of it ends, and ``floor_pdl_us``
reading whose launches overlap as well. A chain begins with x in bf16: ``quantised_us`` with its
quantisation, ``normed_us`` with RMSNorm and quantisation in one launch, and both with ``pdl=True``
for the linear.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from math import inf
from multiprocessing import get_context

import torch

import aiter_mx
from aiter_mx.dispatch.dispatcher import route
from aiter_mx.fallbacks import linear_triton, linear_vendor
from aiter_mx.jit.build import BuildRequest, build
from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.linear.triton import CANDIDATES, bucket
from aiter_mx.kernels.registry import find_kernel
from aiter_mx.kernels.spec import Arg, Config, Geometry
from aiter_mx.launch import bind, call, runtime_of
from aiter_mx.runtimes.base import PackedArgs
from aiter_mx.target import Target, target_of
from aiter_mx.timing import copies_to_stay_cold, time_graph_us
from aiter_mx.tuning.candidates import Candidate
from aiter_mx.tuning.triton_ahead import compile_without_gpu, stand_in_for_a_gpu
from op_tests.bench import every_m, hand_overs, variants
from op_tests.bench.common import DEVICE, normal_mx, refuse_no_gpu, report, swept_us
from op_tests.mx_reference import linear_reference64

SHAPES = ((2304, 6144), (1536, 6144), (6144, 2048), (6144, 1536), (9216, 6144))
"""(N, K): qkv, gate_up, o_proj and down of a 6144-wide model at TP4, and qkv at TP1."""
ROWS = (1, 2, 4, 8, 16, 32, 64)
Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Weights = tuple[torch.Tensor, torch.Tensor]
Timed = tuple[float, str, Config]
"""Microseconds, kernel, configuration."""


def reader(target: Target, overlaps: bool = False) -> Callable[[list[torch.Tensor]], float]:
    """Times reading one of several tensors alone, with the fastest of a few grids and unrolls;
    where launches overlap, one begins as soon as the one ahead leaves room."""
    threads = 256
    runtime = runtime_of(target.runtime)
    functions = []
    for unroll in (4, 8):
        defines = (("MX_THREADS", threads), ("MX_UNROLL", unroll))
        image = build(BuildRequest("linear/read_only.cu", target.arch, defines)).image
        function = runtime.get_function(runtime.load(image, 0), "aiter_mx_read_only", 0)
        functions += [(function, groups_a_cu * target.cu_num) for groups_a_cu in (2, 4, 8)]
    pointers = (Arg("data", "pointer", "r"), Arg("sink", "pointer", "w"))
    kinds = (*pointers, Arg("size_bytes", "i64"), Arg("groups", "i32"))
    sink = torch.empty(1, dtype=torch.int32, device=DEVICE)

    def calls(variant: int, tensor: torch.Tensor) -> Callable[[], None]:
        function, groups = functions[variant]
        args = PackedArgs(kinds, (tensor.nbytes, groups))
        args.set_pointers(tensor.data_ptr(), sink.data_ptr())
        geometry = Geometry((groups, 1, 1), (threads, 1, 1), overlaps=overlaps)
        start = runtime.bind(function, geometry, args)
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
        ours = partial(aiter_mx.linear, out=out, pdl=problem.pdl)
        us = time_graph_us([partial(ours, *operands) for operands in copies])
        return [(us, chosen.kernel, chosen.config)]
    return swept_us("linear", problem, [(*operands, None, out) for operands in copies])


def chain(
    x: torch.Tensor, norm: torch.Tensor | None, w: Weights, out: torch.Tensor, pdl: bool
) -> None:
    """A linear behind what quantises its x, normalised where there is a norm's weight."""
    if norm is None:
        payload, scale = aiter_mx.quantize(x)
    else:
        payload, scale = aiter_mx.rmsnorm_quantize(x, norm)[:2]
    aiter_mx.linear(payload, scale, *w, out=out, pdl=pdl)


def time_chains(x: torch.Tensor, weights: list[Weights], N: int) -> dict[str, float]:
    """Times of a linear behind its quantisation, and behind RMSNorm and quantisation."""
    out = torch.empty(len(x), N, dtype=torch.bfloat16, device=DEVICE)
    norm = torch.ones(x.shape[1], dtype=x.dtype, device=DEVICE)
    times = {}
    for name, weight in (("quantised", None), ("normed", norm)):
        for pdl in (False, True):
            calls = [partial(chain, x, weight, w, out, pdl) for w in weights]
            times[f"{name}_pdl_us" if pdl else f"{name}_us"] = time_graph_us(calls)
    return times


def time_vendor(problem: LinearProblem, copies: list[Operands]) -> float | None:
    """Time of the vendor's MX GEMM, or None where its library has none for this problem."""
    kernel = find_kernel("linear", target_of(DEVICE).arch, "vendor", "scaled_mm")
    refusal = kernel.refusal(target_of(DEVICE), problem)
    if refusal is not None:
        return None
    out = torch.empty(problem.M, problem.N, dtype=torch.bfloat16, device=DEVICE)
    return time_graph_us([partial(linear_vendor.run, problem, (*o, None, out), {}) for o in copies])


def compile_all(target: Target, rows: Sequence[int], shapes: Sequence[tuple[int, int]]) -> None:
    """Compiles what dispatch routes to and all of Triton's tiles, as many as there are cores at a
    time: one after the other they would take longer than the rest of a run."""
    for N, K in shapes:
        aiter_mx.warmup("linear", device=DEVICE, M=rows, N=N, K=K, pdl=(False, True))
    own_rows = {bucket(M): M for M in rows}  # tiles are compiled for these
    own_shapes = {K: N for N, K in shapes}
    with ProcessPoolExecutor(
        min(os.cpu_count() or 1, 16), get_context("spawn"), stand_in_for_a_gpu, (target,)
    ) as pool:
        for (most, M), (K, N) in product(own_rows.items(), own_shapes.items()):
            for tiles in CANDIDATES[target.arch][most]:
                tile = Candidate(
                    "linear", target.arch, "triton", "dot_scaled", tuple(tiles.items())
                )
                pool.submit(compile_without_gpu, LinearProblem(M, N, K), tile)


def time_triton(problem: LinearProblem, copies: list[Operands]) -> tuple[float, Config]:
    """Time of the fastest of Triton's candidate tiles, and which it is."""
    out = torch.empty(problem.M, problem.N, dtype=torch.bfloat16, device=DEVICE)
    timed = []
    for tiles in CANDIDATES[target_of(DEVICE).arch][bucket(problem.M)]:
        calls = [partial(linear_triton.run, problem, (*o, None, out), tiles) for o in copies]
        timed.append((time_graph_us(calls), tiles))
    return min(timed, key=lambda entry: entry[0])


def error_of(problem: LinearProblem, operands: Operands, kernel: str, config: Config) -> float:
    """Relative error (Frobenius norm) of what was timed, rounding to bf16 included."""
    target = target_of(DEVICE)
    out = torch.full((problem.M, problem.N), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    routed = route("linear", target, problem)
    if (routed.kernel, routed.config) == (kernel, config):
        aiter_mx.linear(*operands, out=out)
    else:  # of a sweep
        spec = find_kernel("linear", target.arch, "hip", kernel)
        call(bind(spec, target, problem, config, 0), *operands, None, out)
    reference = linear_reference64(*operands)
    return float((out.double() - reference).norm() / reference.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="write docs/measured/<gpu>/linear.*")
    parser.add_argument("--sweep", action="store_true", help="time every configuration of ours")
    parser.add_argument("--M", type=int, nargs="+", default=ROWS)
    parser.add_argument("--shapes", nargs="+", default=[f"{N}x{K}" for N, K in SHAPES])
    parser.add_argument("--every-m", action="store_true", help="see op_tests/bench/every_m.py")
    parser.add_argument(
        "--hand-overs", action="store_true", help="see op_tests/bench/hand_overs.py"
    )
    parser.add_argument("--variants", action="store_true", help="see op_tests/bench/variants.py")
    parser.add_argument(
        "--share", type=int, default=1, help="of the first two: one in so many shapes"
    )
    parser.add_argument("--seed", type=int, default=22, help="of these: by which they are drawn")
    parser.add_argument(
        "--seconds", type=float, default=inf, help="of the three: end after so many"
    )
    arguments = parser.parse_args()
    others = (every_m, arguments.every_m), (hand_overs, arguments.hand_overs)
    for bench, is_asked in (*others, (variants, arguments.variants)):
        if is_asked:
            bench.main(arguments)
            return
    shapes = [(int(N), int(K)) for N, K in (shape.split("x") for shape in arguments.shapes)]
    refuse_no_gpu()
    target = target_of(DEVICE)
    compile_all(target, arguments.M, shapes)
    readers = reader(target), reader(target, overlaps=True)
    vendor = find_kernel("linear", target.arch, "vendor", "scaled_mm")
    rows: list[dict[str, object]] = []
    for N, K in shapes:
        pairs = [normal_mx(N, K, device=DEVICE) for _ in range(copies_to_stay_cold(N * K))]
        weights = [quantised for _, quantised in pairs]
        dense = [values for values, _ in pairs[: copies_to_stay_cold(2 * N * K)]]
        del pairs
        size_bytes = N * (K + K // 32)
        whole = [torch.cat([part.view(torch.uint8).flatten() for part in pair]) for pair in weights]
        floor_us, floor_pdl_us = (read_us(whole) for read_us in readers)
        del whole
        for M in arguments.M:
            problem = LinearProblem(M=M, N=N, K=K, out_dtype="bf16")
            x, activations = normal_mx(M, K, device=DEVICE)
            copies = [(*activations, *w) for w in weights]
            timed = time_ours(problem, copies, arguments.sweep)
            for entry in timed[1:5]:
                print(M, N, K, *entry)
            ours_us, kernel, config = timed[0]
            pdl_us, *pdl_kernel = time_ours(replace(problem, pdl=True), copies, False)[0]
            triton_us, tiles = time_triton(problem, copies)
            bf16_us = time_graph_us([partial(torch.mm, x, w.t()) for w in dense])
            vendor_us = time_vendor(problem, copies)
            row: dict[str, object] = {"M": M, "N": N, "K": K, "kernel": kernel}
            row |= {"ours_us": ours_us, "pdl_us": pdl_us, **time_chains(x, weights, N)}
            row |= {"triton_us": triton_us}
            row |= {"bf16_us": bf16_us, "vendor_us": "" if vendor_us is None else vendor_us}
            row |= {"floor_us": floor_us, "ours_over_floor": ours_us / floor_us}
            row |= {"floor_pdl_us": floor_pdl_us, "pdl_over_floor": pdl_us / floor_pdl_us}
            row |= {"over_triton": triton_us / ours_us, "over_bf16": bf16_us / ours_us}
            rel_err = error_of(problem, copies[0], kernel, config)
            row |= {"tb_per_s": size_bytes / ours_us / 1e6, "rel_err": rel_err}
            row |= {"config": "x".join(map(str, config.values()))}
            row |= {"pdl_kernel": pdl_kernel[0]}
            row |= {"pdl_config": "x".join(map(str, pdl_kernel[1].values()))}
            row |= {"triton_tiles": "x".join(map(str, tiles.values()))}
            rows.append(row)
    name = "linear_sweep" if arguments.sweep else "linear"
    report("Decode linear, cold weights", rows, name if arguments.save else None)
    if why_not := vendor.refusal(target, LinearProblem(M=32, N=32, K=32)):
        print(f"vendor_us is empty: {why_not}")


if __name__ == "__main__":
    main()
