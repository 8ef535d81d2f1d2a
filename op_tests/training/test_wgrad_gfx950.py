"""The CDNA4 gradient of weights: its schedules, its main loop, what it refuses."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise, starmap

import pytest
import torch
from torch import Tensor

import aiter_mx
from aiter_mx.kernels.grouped_wgrad import GroupedWgradProblem
from aiter_mx.kernels.grouped_wgrad.persistent_gfx950 import PERSISTENT
from aiter_mx.launch import build_request
from aiter_mx.runtimes.sim import last_report
from aiter_mx.target import hardware
from op_tests import launches
from op_tests.grouped.counts import difference
from op_tests.launches import Out
from op_tests.mx_reference import assert_close_to_reference, random_mx
from op_tests.spills import assert_no_spills
from op_tests.training.cases import Case, check, draw_case
from op_tests.training.subjects import TILES, config_of

GFX950 = hardware("gfx950")
SCHEDULES = ("random", "round-robin", "run-to-barrier")


def launch(tile: tuple[int, int], case: Case, cus: int = 256) -> Tensor:
    """The kernel's result, of one strict simulated launch."""
    (G, N, K), P = case.shape, case.grad.shape[1]
    problem = GroupedWgradProblem(P, N, K, G)
    tensors = [*case.operands[:4], None, Out(case.shape, torch.bfloat16), *case.operands[4:]]
    with aiter_mx.simulate("gfx950"):
        config = config_of(*tile, 4, 8)
        (out,) = launches.launch(PERSISTENT, torch.device("cpu"), problem, config, tensors, cus)
    return out


def test_results_repeat_bitwise_however_waves_are_scheduled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case, found = draw_case(160, 288, (65, 0, 257)), []
    for seed, schedule in enumerate(SCHEDULES):
        monkeypatch.setenv("AITER_MX_SIM_SCHEDULE", schedule)
        monkeypatch.setenv("AITER_MX_SIM_SEED", str(seed))
        found.append(launch((64, 128), case, (1, 7, 256)[seed]))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


FEW_AND_MANY = (1, 31, 0, 33, 127, 1000, 128)
OF_32 = tuple(5 * g % 67 for g in range(32))


@pytest.mark.parametrize("lens", [FEW_AND_MANY, OF_32], ids=["few and many", "32 groups"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_both_gradients_are_right_in_every_schedule(
    schedule: str, lens: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AITER_MX_SIM_SCHEDULE", schedule)
    case = draw_case(96, 64, lens)
    rows = random_mx(sum(lens), 96, generator := torch.Generator().manual_seed(1))
    w = random_mx(len(lens) * 64, 96, generator)
    bounds = [0, *accumulate(lens)]
    with aiter_mx.simulate("gfx950"):
        of_w = [each.view(len(lens), 64, -1) for each in w]
        dx = aiter_mx.grouped_gemm_dgrad(*rows, *of_w, torch.tensor(bounds))
        dw = aiter_mx.grouped_gemm_wgrad(*case.operands)
    check(dw, case)
    for g, part in enumerate(starmap(slice, pairwise(bounds))):
        if lens[g]:
            of_group = [each[g] for each in of_w]
            assert_close_to_reference(dx[part], *(each[part] for each in rows), *of_group)


def test_the_op_runs_there_and_trains() -> None:
    with aiter_mx.simulate("gfx950"):
        x, w = torch.randn(70, 64), torch.randn(2, 96, 64) / 8
        offs = torch.tensor([0, 33, 70])
        results = []
        for _ in range(2):
            own = (x.clone().requires_grad_(), w.clone().requires_grad_())
            y = aiter_mx.grouped_linear(*own, offs)
            y.sum().backward()
            results.append([y.detach(), *(each.grad for each in own)])
    route = aiter_mx.explain("grouped_wgrad", arch="gfx950", M=256, N=96, K=64, G=2)
    assert (route.backend, route.kernel) == ("hip", "persistent")
    exact = [torch.zeros(70, 96), torch.zeros(70, 64), torch.zeros(2, 96, 64)]
    for g, rows in enumerate((slice(0, 33), slice(33, 70))):
        exact[0][rows] = x[rows] @ w[g].T
        exact[1][rows] = torch.ones(1, 96) @ w[g]
        exact[2][g] = x[rows].sum(0)
    for first, again, right in zip(*results, exact, strict=True):
        assert torch.equal(first, again)
        assert (first - right).norm() <= 0.06 * right.norm()


def test_its_main_loop_is_limited_by_products_as_the_forward_one_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AITER_MX_SIM_CONFLICTS", "1")
    reports = []
    for depth in (1024, 1536):
        case = draw_case(256, 256, (depth,), room=4096 - depth)  # whole lines of scales
        launch((256, 256), case, cus=1)  # which takes the whole tile
        report = last_report()
        assert report is not None
        reports.append(report)
    found = difference(*reports, 4)
    assert found["matrix_cycles"] == 2048  # 256 * 256 * 128 products, 1024 a cycle and SIMD
    assert found["address_cycles"] <= 1024 + 512  # payload, and scales of each row
    assert found["lds_cycles"] < 0.8 * found["matrix_cycles"]
    assert found["issue_cycles"] < 0.5 * found["matrix_cycles"]
    assert found["conflicts"] == found["scratch"] == 0


def test_no_variant_spills() -> None:
    variants = [
        (tile, dtype, add) for tile in TILES[2:] for dtype, add in (("bf16", 0), ("fp32", 1))
    ]
    variants.append(((256, 256), "bf16", 0))
    problems = [(GroupedWgradProblem(256, 64, 64, 2, *of), tile) for tile, *of in variants]
    assert_no_spills(
        (build_request(PERSISTENT, GFX950, p, config_of(*tile, 4, 8)) for p, tile in problems),
        accumulators=True,
    )


def test_what_it_cannot_is_refused() -> None:
    problem = GroupedWgradProblem(256, 64, 64, 2)
    assert "sm_90a" in (PERSISTENT.refusal(hardware("sm_90a"), problem) or "")
    assert "M=4194304" in (PERSISTENT.refusal(GFX950, replace(problem, M=1 << 22)) or "")
