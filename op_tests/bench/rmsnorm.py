"""RMSNorm fused with quantisation, beside a device copy of as many bytes and beside two launches.

    python -m op_tests.bench.rmsnorm [--save] [--rows 64 4096 32768]

All in one run on one GPU, cold inputs and outputs, graph replay, medians. The two launches are
torch's RMSNorm (of the sum, where there is a residual) and ``aiter_mx.quantize``.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch

import aiter_mx
from aiter_mx.dispatch.dispatcher import route
from aiter_mx.kernels.rmsnorm_quantize import RMSNormQuantizeProblem
from aiter_mx.launch import bind, call
from aiter_mx.target import target_of
from aiter_mx.timing import copies_to_stay_cold, time_graph_us
from aiter_mx.workloads.workload import Operands, workload_of
from op_tests.bench.common import refuse_no_gpu, report
from op_tests.bench.quantize import DEVICE, copy_us

CASES = {
    "norm": RMSNormQuantizeProblem(1, 6144),
    "norm_fp32": RMSNormQuantizeProblem(1, 6144, "fp32"),
    "residual": RMSNormQuantizeProblem(1, 6144, residual=1),
    "residual_7168": RMSNormQuantizeProblem(1, 7168, residual=1),
    "two_norms": RMSNormQuantizeProblem(1, 1536, N2=512),
}
WORKLOAD = workload_of("rmsnorm_quantize")


def apart(problem: RMSNormQuantizeProblem, operands: Operands) -> None:
    """The same by torch's norms and a quantisation."""
    x, residual, weight, x2, weight2, *_ = operands
    assert x is not None and weight is not None
    total = x if residual is None else x + residual
    norm = torch.nn.functional.rms_norm(total, (problem.N,), weight, problem.epsilon)
    aiter_mx.quantize(norm)
    if x2 is not None:
        torch.nn.functional.rms_norm(x2, (problem.N2,), weight2, problem.epsilon2)


def measure(name: str, rows: int) -> dict[str, object]:
    fields = {**vars(CASES[name]), "M": rows}
    problem, target = RMSNormQuantizeProblem(**fields), target_of(DEVICE)
    chosen = route("rmsnorm_quantize", target, problem)
    operands = WORKLOAD.draw(problem, DEVICE)
    total = sum(0 if t is None else t.nbytes for t in operands)
    more = range(copies_to_stay_cold(total) - 1)
    copies = [operands, *(WORKLOAD.draw(problem, DEVICE) for _ in more)]
    launch = bind(chosen.spec, target, problem, chosen.config, 0)
    calls = [partial(call, launch, *t) for t in copies]
    ours_us = time_graph_us(calls)
    row: dict[str, object] = {"case": name, "M": rows, "N": problem.N, "N2": problem.N2}
    row |= {"dtype": problem.dtype, "residual": problem.residual, "total_mb": total / 2**20}
    row |= {
        "ours_us": ours_us,
        "apart_us": time_graph_us([partial(apart, problem, t) for t in copies]),
    }
    row["copy_us"] = row["floor_us"] = copy_us(total)
    row["of_copy_speed"] = row["copy_us"] / ours_us
    row["tb_per_s"] = total / ours_us / 1e6
    row["rel_err"] = WORKLOAD.judge(problem, operands)(operands).rel_err
    row["kernel"] = f"{chosen.kernel} {dict(chosen.config)}"
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="write docs/measured/<gpu>/rmsnorm.*")
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 4096, 32768])
    parser.add_argument("--only", nargs="+", default=list(CASES), choices=list(CASES))
    arguments = parser.parse_args()
    refuse_no_gpu()
    rows = []
    for name in arguments.only:
        for M in arguments.rows:
            row = measure(name, M)
            print(name, M, f"{row['ours_us']:.2f} us, {row['of_copy_speed']:.3f} of copy, "
                  f"{row['apart_us']:.2f} us apart", row["kernel"], flush=True)  # fmt: skip
            rows.append(row)
            torch.cuda.empty_cache()
    report("RMSNorm and quantisation, cold", rows, "rmsnorm" if arguments.save else None)


if __name__ == "__main__":
    main()
