"""What the host does for Hopper's ``wgmma_bf16_swapped`` kernel of the linear."""

from __future__ import annotations

from dataclasses import replace

import pytest

from aiter_mx.dispatch.dispatcher import route
from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.registry import find_kernel
from aiter_mx.target import hardware

SWAPPED = find_kernel("linear", "sm_90a", "hip", "wgmma_bf16_swapped")
TARGET = hardware("sm_90a")


@pytest.mark.parametrize("x_dtype", ["e4m3", "bf16"])
def test_it_is_for_many_rows_of_few_features_without_a_table(x_dtype: str) -> None:
    for N, K, taken in ((2112, 7168, True), (1280, 2880, True), (4096, 3584, False)):
        for M in (8192, 32768):
            problem = LinearProblem(M, N, K, out_dtype="fp32", x_dtype=x_dtype)
            assert (route("linear", TARGET, problem).kernel == SWAPPED.name) is taken
            biased = route("linear", TARGET, replace(problem, bias="fp32"))
            assert biased.kernel == "persistent"
            rounded = route("linear", TARGET, replace(problem, out_dtype="bf16"))
            assert rounded.kernel == "wgmma_fp8_rescaled"
    assert "1024 below 1025" in (SWAPPED.yields(TARGET, LinearProblem(1024, 768, 6144)) or "")


@pytest.mark.parametrize(("N", "K"), [(17, 32), (768, 3584), (2112, 7168), (4096, 14336)])
@pytest.mark.parametrize("M", [4096, 5000, 32768])
def test_its_workspace_is_at_most_that_of_x_in_bf16_and_64_mb(M: int, N: int, K: int) -> None:
    problem = LinearProblem(M, N, K)
    for config in SWAPPED.candidates(TARGET, problem):
        assert SWAPPED.workspace_bytes(TARGET, problem, config) <= 2 * M * K + 64e6
