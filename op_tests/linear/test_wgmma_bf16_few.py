"""What the host does for ``wgmma_bf16_few``, and its bits, which are those of ``wgmma_bf16``."""

from __future__ import annotations

import pytest
import torch

import aiter_mx
from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.linear.wgmma_bf16_few_sm90 import layout
from aiter_mx.kernels.registry import find_kernel
from aiter_mx.kernels.spec import Config
from aiter_mx.launch import bind
from aiter_mx.target import hardware
from op_tests.linear.operands import operands
from op_tests.linear.subjects.wgmma_bf16_sm90 import WGMMA_BF16_FEW_CASES as CASES

FEW = find_kernel("linear", "sm_90a", "hip", "wgmma_bf16_few")
MANY = find_kernel("linear", "sm_90a", "hip", "wgmma_bf16")
TARGET = hardware("sm_90a")


def test_cases_fit_and_have_every_value() -> None:
    for M, N, K, chosen, *_ in CASES:
        FEW.check_config(chosen)
        found = layout(TARGET, LinearProblem(M, N, K), chosen)
        assert found is not None, (M, N, K, chosen)
        assert (found.shared_bytes + 1024) * chosen["ctas"] <= 228 * 1024
        assert found.x_stages >= 4 and found.w_stages >= 2
    for name in ("tile_m", "k_groups", "ctas"):
        legal = next(param.values for param in FEW.params if param.name == name)
        assert {case.config[name] for case in CASES} == set(legal)


@pytest.mark.parametrize(("N", "K"), [(1, 32), (301, 416), (2304, 6144), (28672, 4096)])
def test_it_has_one_configuration_and_serves_batch_invariance_alone(N: int, K: int) -> None:
    for M in (1, 8, 9, 16):
        assert len(FEW.candidates(TARGET, LinearProblem(M, N, K))) == 1
        assert aiter_mx.explain("linear", M=M, N=N, K=K, arch="sm_90a").kernel != FEW.name


def _launched(kernel: str, chosen: Config, M: int, drawn: tuple[torch.Tensor, ...]) -> torch.Tensor:
    xq, xs, wq, ws = drawn
    spec = FEW if kernel == "few" else MANY
    out = torch.full((M, len(wq)), float("nan"), device="cuda")
    problem = LinearProblem(M, len(wq), wq.shape[1], out_dtype="fp32")
    tensors = (xq[:M], xs[:M], wq, ws, None, out)
    run = bind(spec, TARGET, problem, chosen, 0)
    run(tensors, [0 if tensor is None else tensor.data_ptr() for tensor in tensors])
    return out


@pytest.mark.gpu
@pytest.mark.parametrize(("split", "k_groups"), [(1, 1), (3, 1), (1, 2), (2, 2), (1, 3), (3, 2)])
def test_bits_are_those_of_as_many_parts(split: int, k_groups: int) -> None:
    """K of 17 chunks, which no number of parts but 1 divides; scales over their whole range too."""
    for exponents in ((-20, 20), (-120, 120)):
        drawn = operands(64, 300, 2112, 7, scale_exponents=exponents)
        drawn = tuple(tensor.cuda() for tensor in drawn)
        tiles = {"tile_m": 128, "tile_n": 128, "split": split * k_groups, "pairs": 0}
        expected = _launched("many", tiles, 64, drawn)
        for M, tile_m in ((1, 8), (13, 16), (18, 24), (30, 32)):
            chosen = {"tile_m": tile_m, "split": split, "k_groups": k_groups, "ctas": 1}
            found = _launched("few", chosen, M, drawn)
            assert torch.equal(found.nan_to_num(), expected[:M].nan_to_num())
