"""The CDNA4 gradient of weights against float64: strict in the simulator, or on an MI350X."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import aiter_mx
from aiter_mx.code_object import parse_code_object
from aiter_mx.jit.build import build_all
from aiter_mx.kernels.grouped_wgrad import GroupedWgradProblem
from aiter_mx.kernels.grouped_wgrad.persistent_gfx950 import PERSISTENT
from aiter_mx.kernels.spec import Config
from aiter_mx.launch import bind, build_request
from aiter_mx.numerics import DTYPE_NAMES, INDEX_NAMES
from aiter_mx.runtimes.sim import last_report
from aiter_mx.target import hardware, target_of
from op_tests.grouped.test_isa import difference
from op_tests.training.cases import Case, check, draw_case

GFX950 = hardware("gfx950")
SCHEDULES = ("random", "round-robin", "run-to-barrier")
EDGES = (0, 0, 1, 15, 16, 17, 31, 33, 64, 97, 127, 128, 129, 200, 256, 259, 400)
TILES = ((256, 256), (128, 256), (128, 128), (64, 128), (32, 256))
GUARD, POISON = 64, 0x5A


@pytest.fixture(params=["sim", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    if request.param == "cuda":
        if target_of(torch.device("cuda")).arch != "gfx950":
            pytest.skip("the kernel is for another GPU")
        yield torch.device("cuda")
    else:
        with aiter_mx.simulate("gfx950"):
            yield torch.device("cpu")


def config_of(tile: tuple[int, int]) -> Config:
    return {"tile_m": tile[0], "tile_n": tile[1], "swath": 4, "xcds": 8}


def launch(
    device: torch.device,
    tile: tuple[int, int],
    case: Case,
    dtype: torch.dtype = torch.bfloat16,
    old: Tensor | None = None,
    before: Tensor | None = None,
    cus: int = 256,
) -> Tensor:
    """The kernel's result on the CPU, written between guards over poison or over ``old``."""
    (G, N, K), P = case.shape, case.grad.shape[1]
    index, accumulate = INDEX_NAMES[case.offs.dtype], int(old is not None)
    problem = GroupedWgradProblem(P, N, K, G, DTYPE_NAMES[dtype], accumulate, index)
    target = replace(target_of(device), cu_num=cus)
    assert PERSISTENT.refusal(target, problem) is None
    whole = torch.empty(2 * GUARD + G * N * K, dtype=dtype)
    whole.view(torch.uint8).fill_(POISON)
    if old is not None:
        whole[GUARD:-GUARD] = old.flatten()
    whole = whole.to(device)
    operands = [each.to(device) for each in case.operands]
    tensors = [*operands[:4], before, whole[GUARD:-GUARD], *operands[4:]]
    run = bind(PERSISTENT, target, problem, config_of(tile), 0)
    run(tensors, [0 if each is None else each.data_ptr() for each in tensors])
    whole = whole.cpu()
    for outside in (whole[:GUARD], whole[-GUARD:]):
        assert (outside.view(torch.uint8) == POISON).all(), "wrote outside the output"
    return whole[GUARD:-GUARD].view(G, N, K)


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_random_groups_match_float64_in_every_schedule(
    device: torch.device, tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(str(tile))
    for seed in range(3 if tile[1] == 256 else 6):
        monkeypatch.setenv("AITER_MX_SIM_SCHEDULE", SCHEDULES[seed % 3])
        monkeypatch.setenv("AITER_MX_SIM_SEED", str(seed))
        monkeypatch.setenv("AITER_MX_SIM_DELAY", draw.choice("01"))
        lens = [draw.choice(EDGES) for _ in range(draw.randint(1, 5))]
        N = 32 * draw.choice([1, 2, 3, tile[0] // 32, tile[0] // 32 + 1])
        K = 32 * draw.choice([1, 2, 3, tile[1] // 32, tile[1] // 32 + 1])
        index = draw.choice([torch.int32, torch.int64])
        exponents = draw.choice([(-20, 20), (-6, 6)])
        case = draw_case(N, K, lens, seed, exponents, index, draw.choice([0, 128]))
        if not case.grad.shape[1]:
            continue
        dtype, old = (torch.bfloat16, torch.float32)[seed % 2], None
        if dtype == torch.float32:
            old = torch.randn(case.shape, generator=torch.Generator().manual_seed(seed)) * 1e3
        cus = draw.choice([1, 2, 3, 8, 256])
        check(launch(device, tile, case, dtype, old, cus=cus), case, old)


@pytest.mark.parametrize("exponents", [(-127, 127), (90, 127), (-80, -50)], ids=str)
def test_scales_over_their_whole_range_are_exact(
    device: torch.device, exponents: tuple[int, int]
) -> None:
    case = draw_case(64, 96, (37, 130), 1, exponents)
    check(launch(device, (64, 128), case, torch.float32), case, underflow=2.0**-149)


@pytest.mark.parametrize("tile", [(256, 256), (64, 128)], ids=str)
def test_padding_and_other_groups_take_no_part(device: torch.device, tile: tuple[int, int]) -> None:
    case = draw_case(64, 96, (1, 33, 128, 217, 40))
    expected = launch(device, tile, case)
    for payload, scale in ((0x7E, 187), (0, 0)):
        found = launch(device, tile, case.with_other_padding(payload, scale))
        assert torch.equal(found, expected)
    case.grad.view(torch.uint8)[:, case.columns(2)] = 0x7F
    found = launch(device, tile, case)
    assert found[2].isnan().all()
    others = torch.arange(5) != 2
    assert torch.equal(found[others], expected[others])


@pytest.mark.parametrize("tile", [(256, 256), (64, 128)], ids=str)
def test_nan_payloads_and_scales_reach_their_rows_alone(
    device: torch.device, tile: tuple[int, int]
) -> None:
    case = draw_case(64, 96, (40, 33))
    case.grad.view(torch.uint8)[3, 7], case.x_scale[5, 4] = 0x7F, 255
    case.x.view(torch.uint8)[9, 160] = 0xFF  # the last row of the second group
    out = launch(device, tile, case)
    expected = torch.zeros(case.shape, dtype=torch.bool)
    expected[0, 3], expected[1, :, 5], expected[1, :, 9] = True, True, True
    assert torch.equal(out.isnan(), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_gradients_are_added_and_rounded_once(device: torch.device, dtype: torch.dtype) -> None:
    case = draw_case(96, 160, (0, 33, 200), exponents=(-10, -6))
    old = (torch.randn(case.shape) * 30).to(dtype)
    check(launch(device, (64, 128), case, dtype, old), case, old)


def test_bounds_that_lead_outside_harm_no_memory(device: torch.device) -> None:
    """The simulator tells of every access outside a tensor."""
    case = draw_case(64, 64, (100, 128, 128))
    wrong = torch.tensor([-5, 10**6, 70, 200], dtype=torch.int32)
    for lens in ([10**9, -3, 10**6], [0, 0, 0]):
        counts = torch.tensor(lens, dtype=torch.int32)
        launch(device, (64, 128), replace(case, offs=wrong, lens=counts))


def test_results_repeat_bitwise_however_waves_are_scheduled(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, found = draw_case(160, 288, (65, 0, 257)), []
    for seed, schedule in enumerate(SCHEDULES):
        monkeypatch.setenv("AITER_MX_SIM_SCHEDULE", schedule)
        monkeypatch.setenv("AITER_MX_SIM_SEED", str(seed))
        found.append(launch(device, (64, 128), case, cus=(1, 7, 256)[seed]))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


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
        with aiter_mx.simulate("gfx950"):
            case = draw_case(256, 256, (depth,), room=4096 - depth)  # whole lines of scales
            launch(torch.device("cpu"), (256, 256), case)
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
    requests = [
        build_request(
            PERSISTENT, GFX950, GroupedWgradProblem(256, 64, 64, 2, dtype, add), config_of(tile)
        )
        for tile, dtype, add in variants
    ]
    for code, variant in zip(build_all(requests), variants, strict=True):
        (kernel,) = parse_code_object(code.image).kernels.values()
        spilled = (kernel.vgpr_spills, kernel.sgpr_spills, kernel.scratch_bytes)
        assert spilled == (0, 0, 0), f"{variant}: {kernel}"


def test_what_it_cannot_is_refused() -> None:
    problem = GroupedWgradProblem(256, 64, 64, 2)
    assert "sm_90a" in (PERSISTENT.refusal(hardware("sm_90a"), problem) or "")
    assert "M=4194304" in (PERSISTENT.refusal(GFX950, replace(problem, M=1 << 22)) or "")
