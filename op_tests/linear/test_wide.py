"""The Hopper ``wide`` kernel of the linear: its host side here, its results with ``-m gpu``."""

from __future__ import annotations

import pytest
import torch

from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.linear.wide_sm90 import MAX_M, layout
from aiter_mx.kernels.registry import find_kernel
from aiter_mx.target import hardware
from op_tests.linear.launches import launch_linear
from op_tests.linear.operands import (
    Operands,
    operands,
    with_zero_blocks,
)
from op_tests.linear.subjects.wgmma_sm90 import WIDE_RUNNING_ON as RUNNING_ON
from op_tests.mx_reference import assert_close_to_reference

WIDE = find_kernel("linear", "sm_90a", "hip", "wide")
TARGET = hardware("sm_90a")
gpu = pytest.mark.gpu


def config(split: int, rows: int, depth: int) -> dict[str, int]:
    return {"split": split, "rows": rows, "depth": depth}


@pytest.mark.parametrize("M", [1, 8, 9, 17, 33, 64])
@pytest.mark.parametrize(("N", "K"), [(1, 32), (300, 96), (2304, 6144), (9216, 6144), (70, 8224)])
def test_the_chosen_configuration_is_legal_and_fits(M: int, N: int, K: int) -> None:
    problem = LinearProblem(M, N, K)
    assert WIDE.refusal(TARGET, problem) is None
    candidates = WIDE.candidates(TARGET, problem)
    assert WIDE.configure(TARGET, problem) == candidates[0]
    for chosen in candidates:
        WIDE.check_config(chosen)
        found = layout(TARGET, problem, chosen)
        assert found is not None
        assert found.shared_bytes <= 226 * 1024
        assert found.clusters * chosen["split"] <= TARGET.cu_num or found.passes == 1
        assert found.clusters * found.passes * chosen["rows"] >= N


@pytest.mark.parametrize(
    ("M", "N", "K", "chosen"),
    [
        (32, 2304, 6144, config(8, 160, 4)),
        (64, 2304, 6144, config(8, 160, 4)),
        (64, 9216, 6144, config(8, 128, 5)),
        (32, 6144, 1536, config(2, 96, 4)),
        (64, 1536, 6144, config(8, 112, 4)),
        (64, 6144, 2048, config(2, 96, 3)),
        (64, 7168, 2048, config(2, 112, 3)),
    ],
)
def test_the_default_configurations_are_what_won_on_an_h200(
    M: int, N: int, K: int, chosen: dict[str, int]
) -> None:
    assert WIDE.configure(TARGET, LinearProblem(M, N, K)) == chosen


def test_passes_run_on_where_each_has_chunks_for_it() -> None:
    for M, N, K, chosen, *_ in RUNNING_ON:
        found = layout(TARGET, LinearProblem(M, N, K), chosen)
        assert found is not None and found.late
        short = layout(TARGET, LinearProblem(M, N, 128 * 4 * chosen["split"]), chosen)
        one_pass = layout(TARGET, LinearProblem(M, chosen["rows"], K), chosen)
        few_rows = layout(TARGET, LinearProblem(32, N, K), chosen)
        for other in (short, one_pass, few_rows):
            assert other is not None and not other.late


def test_only_the_asked_for_launch_overlaps() -> None:
    assert WIDE.module is not None
    chosen = WIDE.configure(TARGET, LinearProblem(8, 2304, 6144))
    for pdl in (False, True):
        problem = LinearProblem(8, 2304, 6144, pdl=pdl)
        assert WIDE.module.geometry(TARGET, problem, chosen).overlaps is pdl
        assert WIDE.module.scalars(TARGET, problem, chosen)[-1] == pdl


def test_the_map_of_weights_has_a_box_of_a_stage() -> None:
    assert WIDE.module is not None
    weights, _ = WIDE.module.tensor_maps
    described = weights(TARGET, LinearProblem(8, 300, 416), config(2, 48, 2))
    assert (described.rows, described.row_bytes) == (300, 416)
    assert (described.box_rows, described.box_bytes) == (48, 128)
    assert WIDE.module.args[described.pointer].name == "wq"


def test_the_map_of_x_has_a_box_of_a_chunk() -> None:
    assert WIDE.module is not None
    _, x = WIDE.module.tensor_maps
    described = x(TARGET, LinearProblem(20, 300, 416), config(2, 48, 2))
    assert (described.rows, described.row_bytes) == (20, 416)
    assert (described.box_rows, described.box_bytes) == (32, 128)
    assert WIDE.module.args[described.pointer].name == "xq"


def test_what_it_does_not_cover_is_refused() -> None:
    assert WIDE.refusal(TARGET, LinearProblem(MAX_M, 8, 64)) is None
    assert "above 64" in (WIDE.refusal(TARGET, LinearProblem(MAX_M + 1, 8, 64)) or "")
    assert "no room" in (WIDE.refusal(TARGET, LinearProblem(64, 8, 65536)) or "")
    assert "sm_90a" in (WIDE.refusal(hardware("gfx950"), LinearProblem(8, 8, 64)) or "")


def launch(
    arguments: Operands,
    chosen: dict[str, int],
    bias: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    return launch_linear(WIDE, torch.device("cuda"), chosen, arguments, bias, dtype)


@gpu
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
