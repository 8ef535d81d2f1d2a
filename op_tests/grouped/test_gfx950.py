"""The CDNA4 grouped kernel: operands beyond 4 GiB, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import aiter_mx
from aiter_mx.kernels.grouped_gemm import GroupedGemmProblem
from aiter_mx.kernels.grouped_gemm.persistent_gfx950 import PERSISTENT
from aiter_mx.target import hardware
from op_tests.grouped.cases import Groups, assert_groups, launch_grouped
from op_tests.grouped.subjects import ONE_TILE, config_of
from op_tests.launches import bound
from op_tests.mx_reference import assert_close_to_reference, random_mx, random_mx_groups

GFX950 = hardware("gfx950")


def test_operands_and_results_above_4_gib_match_float64() -> None:
    """The last rows of each, in memory of which the rest is never touched."""
    N, K, G = 96, 320, 1 << 18
    M = (1 << 32) // K + 300
    assert min(M * K, G * N * K, 4 * M * N) > 1 << 32
    a = torch.empty((M, K), dtype=torch.float8_e4m3fn)
    a_scale = torch.empty((M, K // 32), dtype=torch.uint8)
    b = torch.empty((G, N, K), dtype=torch.float8_e4m3fn)
    b_scale = torch.empty((G, N, K // 32), dtype=torch.uint8)
    rows, near = slice(M - 70, M), random_mx_groups(70, 1, N, K, 6, (-6, 6))
    a[rows], a_scale[rows], b[-1], b_scale[-1] = near[0], near[1], near[2][0], near[3][0]
    ends = torch.zeros(G, dtype=torch.int64)
    starts = torch.zeros(G, dtype=torch.int64)
    starts[-1], ends[-1] = M - 70, M
    out = torch.empty((M, N), dtype=torch.float32)
    problem = GroupedGemmProblem(M, N, K, G, "fp32", index="i64")
    with aiter_mx.simulate("gfx950"):
        run = bound(PERSISTENT, torch.device("cpu"), problem, ONE_TILE, cu_num=1)
        run((a, a_scale, b, b_scale, None, out, starts, ends))
    assert_close_to_reference(out[rows], *near[:2], near[2][0], near[3][0])


@pytest.mark.parametrize("tile_m", [32, 64])
@pytest.mark.parametrize(
    ("K", "M"),
    [(128, 121), (416, 121), (416, 124), (448, 122), (512, 121), (640, 121), (672, 124),
     (896, 121), (992, 120), (1152, 121), (1216, 124)],
)  # fmt: skip
def test_scales_of_several_steps_that_are_copied_at_once(
    K: int, M: int, tile_m: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Last runs of one step and more, tiles one after the other that begin at any row, rows of
    scales that begin anywhere in a dword, and what follows a row's last scale is often NaN."""
    monkeypatch.setenv("AITER_MX_SIM_FINITE_SCALES", "1")
    groups = Groups([(1, 30), (30, 97), (97, 97), (103, 120)], "ranges", "i32", M)
    generator = torch.Generator().manual_seed(K)
    a = random_mx(M, K, generator, nan_scale=0.01)
    b, b_scale = random_mx(4 * 160, K, generator, nan_scale=0.003)
    drawn = (*a, b.view(4, 160, K), b_scale.view(4, 160, K // 32))
    with aiter_mx.simulate("gfx950"):
        config, dtype, device = config_of(tile_m, 128, 4, 8), torch.float32, torch.device("cpu")
        out = launch_grouped(PERSISTENT, device, config, drawn, groups, None, dtype, 1)
    assert_groups(out, drawn, groups)
    shares = [out[begin:end].isnan().float().mean() for begin, end in groups.ranges if end > begin]
    assert any(0 < share < 1 for share in shares)


def test_refusals_say_what_is_covered() -> None:
    def refusal(arch: str = "gfx950", **shape: int) -> str | None:
        problem = GroupedGemmProblem(**{"M": 64, "N": 64, "K": 64, "G": 2, **shape})
        return PERSISTENT.refusal(replace(GFX950, arch=arch), problem)

    assert refusal() is None
    assert refusal(N=70) == "N=70 is not a multiple of 32, the features that a lane stores"
    assert "K=4194304 is not below 4194304" in (refusal(K=1 << 22) or "")
    assert "M=2147483648 is not below 2147483648" in (refusal(M=1 << 31) or "")
    assert "tiles, and their numbers have 31 bits" in (refusal(M=1 << 30, N=1 << 20) or "")
    assert refusal("sm_90a") == "no persistent kernel for sm_90a, only for gfx950"
