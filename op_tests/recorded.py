"""The bits of one or two small results of each gfx950 kernel, recorded from the simulator.

    python -m op_tests.recorded --save    # write op_tests/recorded.csv anew

``op_tests/test_recorded.py`` computes them again. Operands are drawn as whole numbers, so that they
are the same on every CPU and with every torch. Who changes the order in which a kernel adds records
its results anew, and says so.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor

from aiter_mx.kernels.registry import find_kernel, problem_type
from aiter_mx.kernels.spec import Config, Problem
from aiter_mx.launch import bind
from aiter_mx.target import hardware, simulate
from aiter_mx.tuning.table import write_csv
from aiter_mx.workloads import workload_of

ARCH = "gfx950"
FILE = Path(__file__).with_suffix(".csv")
_LINEAR = {"M": 3, "N": 80, "K": 1056}
_EXPERTS = {"M": 9, "N": 128, "K": 160, "E": 5, "top_k": 2}
_LAYER = {"M": 1, "N": 64, "K": 160, "E": 6, "top_k": 3, "num_experts": 6}
_GROUPS = {"M": 300, "N": 160, "K": 192, "G": 3}
CASES: tuple[tuple[str, dict[str, object]], ...] = (
    ("linear/gemv", _LINEAR),
    ("linear/gemv", {**_LINEAR, "M": 11, "out_dtype": "fp32", "bias": "bf16"}),
    ("linear/mfma", {**_LINEAR, "M": 5}),
    ("linear/mfma", {**_LINEAR, "M": 70, "out_dtype": "fp16", "bias": "fp32"}),
    ("linear/mfma_split", {**_LINEAR, "M": 16, "K": 4096}),
    ("linear/persistent", {**_LINEAR, "M": 300}),
    ("linear/persistent_split", {**_LINEAR, "M": 300}),
    ("grouped_gemm/persistent", _GROUPS),
    ("grouped_gemm/persistent", {**_GROUPS, "out_dtype": "fp32", "bias": "bf16", "K": 160}),
    ("grouped_wgrad/persistent", {**_GROUPS, "M": 384, "out_dtype": "fp32"}),
    ("promoted_gemm/mfma", {**_GROUPS, "K": 256}),
    ("group_runs/scan", {"M": 300, "N": 32, "G": 3, "run_rows": 16}),
    ("moe_gemm/mfma", {**_EXPERTS, "block_m": 16}),
    ("moe_gemm/mfma", {**_EXPERTS, "activation": "silu", "out_dtype": "mxfp8"}),
    ("moe_up/gemv", _LAYER),
    ("moe_down/gemv", _LAYER),
    ("moe_align/align", {"M": 40, "top_k": 3, "E": 7, "block_m": 16}),
    ("moe_align/align_split", {"M": 2000, "top_k": 3, "E": 7, "block_m": 16}),
    ("moe_combine/combine", {"M": 9, "N": 72, "top_k": 3, "E": 7}),
    ("quantize/rows", {"M": 7, "N": 416}),
    ("quantize/tiles", {"M": 96, "N": 64, "to": "both"}),
    ("quantize/tiles", {"M": 64, "N": 96, "to": "both", "format": "e2m1", "mode": "floor"}),
    ("rmsnorm_quantize/rows", {"M": 5, "N": 416}),
)
"""Kernels and problems; of each the configuration is recorded that the kernel had by itself."""


def digest(kernel: str, problem: Problem, config: Config) -> str:
    """Of the results, over operands that the kernel and the problem say."""
    op, _, name = kernel.partition("/")
    workload = workload_of(op)
    seed = int(hashlib.sha256(f"{kernel} {problem}".encode()).hexdigest()[:8], 16)
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    tensors = workload.draw(problem, torch.device("cpu"))
    for at, tensor in enumerate(tensors):
        if tensor is not None:
            _fill(tensor, None if at in workload.results else generator)
    with simulate(ARCH) as target:
        spec = find_kernel(op, ARCH, "hip", name)
        run = bind(spec, target, problem, config, 0)
        run(tensors, [0 if tensor is None else tensor.data_ptr() for tensor in tensors])
    whole = hashlib.sha256()
    for at in workload.results:
        result = tensors[at]
        if result is not None:
            whole.update(result.contiguous().view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()[:16]


def _fill(tensor: Tensor, generator: torch.Generator | None) -> None:
    """Poison for a result; for an operand whole numbers, or any bytes but NaN; indices stay."""
    of_bytes = tensor.view(torch.uint8) if tensor.element_size() == 1 else None
    if generator is None:
        tensor.view(torch.uint8).fill_(0x5A)
    elif tensor.dtype == torch.uint8:
        tensor.copy_(torch.randint(108, 124, tensor.shape, generator=generator))
    elif of_bytes is not None:
        drawn = torch.randint(0, 255, tensor.shape, generator=generator, dtype=torch.uint8)
        of_bytes.copy_(torch.where(drawn & 0x7F == 0x7F, drawn - 1, drawn))
    elif tensor.is_floating_point():
        tensor.copy_(torch.randint(-999, 1000, tensor.shape, generator=generator) / 256)


def lines() -> Iterator[dict[str, str]]:
    """Those of the file, computed now."""
    for kernel, shape in CASES:
        op, _, name = kernel.partition("/")
        problem = problem_type(op)(**shape)
        config = find_kernel(op, ARCH, "hip", name).configure(hardware(ARCH), problem)
        yield {
            "kernel": kernel,
            "problem": " ".join(f"{field}={value}" for field, value in shape.items()),
            "config": " ".join(f"{field}={value}" for field, value in config.items()),
            "digest": digest(kernel, problem, config),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help=f"write {FILE.name}")
    save = parser.parse_args().save
    found = list(lines())
    for line in found:
        print(*line.values(), sep="  ")
    if save:
        write_csv(FILE, pd.DataFrame(found))


if __name__ == "__main__":
    main()
