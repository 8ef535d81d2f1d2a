"""The linear of Hopper's ``wgmma_f16``: its host side here, its results with ``-m gpu``."""

from __future__ import annotations

import pytest
import torch

from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.linear.wgmma_f16_sm90 import layout
from aiter_mx.kernels.registry import find_kernel
from aiter_mx.target import hardware
from op_tests.linear.launches import launch_linear
from op_tests.linear.operands import Operands, operands, with_zero_blocks
from op_tests.linear.subjects.wgmma_bf16_sm90 import WIDE_RUNNING_ON as RUNNING_ON
from op_tests.mx_reference import assert_close_to_reference

WGMMA_F16 = find_kernel("linear", "sm_90a", "hip", "wgmma_f16")
TARGET = hardware("sm_90a")


def config(split: int, rows: int, depth: int) -> dict[str, int]:
    return {"split": split, "rows": rows, "depth": depth}


@pytest.mark.parametrize(("N", "K"), [(1, 32), (300, 96), (2304, 6144), (9216, 6144), (70, 8224)])
def test_clusters_of_candidates_cover_w_and_are_there_at_once_or_for_one_pass(
    N: int, K: int
) -> None:
    for M in (1, 8, 9, 17, 33, 64):
        problem = LinearProblem(M, N, K)
        for chosen in WGMMA_F16.candidates(TARGET, problem):
            found = layout(TARGET, problem, chosen)
            assert found is not None
            assert found.clusters * chosen["split"] <= TARGET.cu_num or found.passes == 1
            assert found.clusters * found.passes * chosen["rows"] >= N


def test_passes_run_on_where_each_has_chunks_for_it() -> None:
    for M, N, K, chosen, *_ in RUNNING_ON:
        found = layout(TARGET, LinearProblem(M, N, K), chosen)
        assert found is not None and found.late
        short = layout(TARGET, LinearProblem(M, N, 128 * 4 * chosen["split"]), chosen)
        one_pass = layout(TARGET, LinearProblem(M, chosen["rows"], K), chosen)
        few_rows = layout(TARGET, LinearProblem(32, N, K), chosen)
        for other in (short, one_pass, few_rows):
            assert other is not None and not other.late


def test_maps_have_boxes_of_a_stage_of_w_and_a_chunk_of_x() -> None:
    assert WGMMA_F16.module is not None
    problem, chosen = LinearProblem(20, 300, 416), config(2, 48, 2)
    for of, name, rows, box_rows in zip(
        WGMMA_F16.module.tensor_maps, ("wq", "xq"), (300, 20), (48, 32), strict=True
    ):
        described = of(TARGET, problem, chosen)
        assert (described.rows, described.row_bytes) == (rows, 416)
        assert (described.box_rows, described.box_bytes) == (box_rows, 128)
        assert WGMMA_F16.module.args[described.pointer].name == name


def launch(
    arguments: Operands,
    chosen: dict[str, int],
    bias: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    return launch_linear(WGMMA_F16, torch.device("cuda"), chosen, arguments, bias, dtype)


@pytest.mark.gpu
def test_passes_that_run_on_keep_what_is_out_of_the_ordinary_in_its_pass() -> None:
    generator = torch.Generator().manual_seed(9)
    for M, N, K, chosen, *_ in RUNNING_ON[2:]:
        far = operands(M, N, K, 7, scale_exponents=(-3, 3))
        far[3][len(far[3]) // 3, ::2] -= 60
        trials = [
            far,
            with_zero_blocks(operands(M, N, K, 4, scale_exponents=(-6, 6)), generator),
            operands(M, N, K, M, nan_payload=2e-5, nan_scale=1e-4),
            operands(M, N, K, 5, scale_exponents=(-127, 127)),
        ]
        for drawn in trials:
            assert_close_to_reference(launch(drawn, chosen), *drawn)
