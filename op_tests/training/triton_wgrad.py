"""The Triton gradient of weights against float64; a script, for Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import torch

from aiter_mx.fallbacks import grouped_wgrad_triton
from aiter_mx.kernels.grouped_wgrad import GroupedWgradProblem
from op_tests.mx_reference import in_e5m2
from op_tests.training.cases import check, draw_case


def main() -> None:
    config = {"BLOCK_N": 64, "BLOCK_K": 64, "BLOCK_M": 64, "num_warps": 4, "num_stages": 2}
    for accumulate, format in ((0, "e5m2"), (1, "e4m3")):
        case = draw_case(96, 160, (0, 1, 33, 200), room=128)
        if format == "e5m2":
            case = replace(case, grad=in_e5m2(case.grad))
        (G, N, K), P = case.shape, case.grad.shape[1]
        old = torch.randn(case.shape)
        out = old.clone()
        problem = GroupedWgradProblem(P, N, K, G, "fp32", accumulate, grad_format=format)
        operands = (*case.operands[:4], None, out, case.offs, case.lens)
        grouped_wgrad_triton.run(problem, operands, config)
        check(out, case, old if accumulate else None)


if __name__ == "__main__":
    main()
