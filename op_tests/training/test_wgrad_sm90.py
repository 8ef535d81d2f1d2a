"""What the host does for ``grouped_gemm_wgrad`` on Hopper: routes, tensor maps, the workspace."""

from __future__ import annotations

from dataclasses import replace

import pytest

from aiter_mx.dispatch.dispatcher import route
from aiter_mx.kernels.grouped_wgrad import GroupedWgradProblem
from aiter_mx.kernels.grouped_wgrad.persistent_sm90 import PERSISTENT
from aiter_mx.kernels.grouped_wgrad.problem import ARGS
from aiter_mx.target import hardware

SM90 = hardware("sm_90a")
PROBLEM = GroupedWgradProblem(M=1024, N=96, K=160, G=3)


def test_it_is_taken_on_hopper_and_refuses_what_numbers_of_31_bits_cannot_count() -> None:
    assert route("grouped_wgrad", SM90, PROBLEM).spec is PERSISTENT
    assert "gfx950" in (PERSISTENT.refusal(hardware("gfx950"), PROBLEM) or "")
    for changes, what in (
        ({"M": 1 << 24}, "M=16777216"),
        ({"M": (1 << 24) - 128, "N": 1 << 15}, "parts of tiles"),
        ({"N": 1 << 16, "G": 1 << 15}, "rows of all groups"),
        ({"K": 1 << 16, "G": 1 << 15}, "columns of all groups"),
        ({"K": 1 << 30, "G": 1, "out_dtype": "fp32"}, "bytes in a row of results"),
    ):
        assert what in (PERSISTENT.refusal(SM90, replace(PROBLEM, **changes)) or "")
    assert PERSISTENT.refusal(SM90, replace(PROBLEM, M=1 << 20, N=8192, K=8192, G=32)) is None


@pytest.mark.parametrize(("dtype", "bytes_each"), [("bf16", 2), ("fp32", 4)])
def test_copies_are_of_x_and_stores_of_the_gradients_of_all_groups(
    dtype: str, bytes_each: int
) -> None:
    problem = replace(PROBLEM, out_dtype=dtype)
    assert PERSISTENT.module is not None
    of_x, results = (each(SM90, problem, {"order": 4}) for each in PERSISTENT.module.tensor_maps)
    assert ARGS[of_x.pointer].name == "x" and ARGS[results.pointer].name == "out"
    assert (of_x.rows, of_x.row_bytes) == (160, 1024)
    assert (results.rows, results.row_bytes) == (3 * 96, 160 * bytes_each)
    assert results.only_aligned  # a result may begin anywhere


def test_the_workspace_holds_grad_in_bf16_and_what_tells_of_it() -> None:
    for M, N, K, G in ((128, 32, 32, 1), (65536, 2880, 5760, 32), (1 << 20, 8192, 64, 300)):
        problem = GroupedWgradProblem(M, N, K, G)
        tiles, slabs = -(-N // 256), -(-N // 64)
        words = tiles * (M // 2048 + G)  # chunks of 128 columns, 16 a word
        told = 256 + 40 * G * tiles + 8 * words + G * K // 8 + 4 * G + 4 * (G * tiles + 1)
        found = PERSISTENT.workspace_bytes(SM90, problem, {"order": 4})
        assert 0 <= found - slabs * 64 * M * 2 - told < 1024
