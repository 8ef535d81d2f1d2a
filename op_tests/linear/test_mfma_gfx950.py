"""What the host does for CDNA4's decode kernel, its registers, and what it asks memory for."""

from __future__ import annotations

import operator
from dataclasses import replace

import pytest
import torch

import aiter_mx
from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.linear import mfma_gfx950 as registry
from aiter_mx.kernels.linear import mfma_ways_gfx950 as ways
from aiter_mx.kernels.linear.mfma_gfx950 import MAX_K, MAX_M, MFMA, MFMA_SPLIT
from aiter_mx.kernels.linear.mfma_ways_gfx950 import PARAMS, SPLITS
from aiter_mx.kernels.spec import Config, Geometry, KernelSpec, combinations
from aiter_mx.launch import build_request
from aiter_mx.runtimes.sim import last_report
from aiter_mx.sim.program import Program
from aiter_mx.sim.timing.constants import shipped
from aiter_mx.target import hardware
from aiter_mx.trial import prepare
from aiter_mx.workloads import workload_of
from op_tests.linear.launches import launch_linear
from op_tests.linear.operands import Operands, operands
from op_tests.mx_reference import (
    assert_close_to_reference,
)
from op_tests.places import device_in
from op_tests.sim.tools import without_preload
from op_tests.spills import kernels_without_spills

GFX950 = hardware("gfx950")
DECODE_SHAPES = [(2304, 6144), (1536, 6144), (6144, 2048), (6144, 1536), (9216, 6144), (768, 6144)]


device = device_in("sim")


def config_of(row_tiles: int, fold: int, waves: int, unroll: int) -> dict[str, int]:
    tiles = {"row_tiles": row_tiles, "fold": fold}
    return {**tiles, "waves": waves, "unroll": unroll, "blocks": 1}


def launch(
    device: torch.device,
    config: Config,
    arguments: Operands,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    kernel: KernelSpec = MFMA,
    cu_num: int = 1,
) -> torch.Tensor:
    """For one compute unit, workgroups have as many rows as they may."""
    return launch_linear(kernel, device, config, arguments, bias, dtype, cu_num)


def test_results_are_bitwise_the_same_however_rows_are_divided(device: torch.device) -> None:
    drawn, config = operands(13, 75, 1312, 5), config_of(2, 1, 3, 2)
    runs = [
        launch(device, config, drawn, dtype=torch.float32, cu_num=cu_num)
        for cu_num in (1, 2, 4, 5, 20, 256)
    ]
    assert_close_to_reference(runs[0], *drawn)
    assert all(torch.equal(runs[0].view(torch.int32), run.view(torch.int32)) for run in runs)


def test_rows_are_the_same_in_blocks_of_64_and_in_one_of_128(device: torch.device) -> None:
    config, (xq, xs, *w) = config_of(2, 1, 3, 1), operands(130, 37, 1312, 6)
    most, *fewer = (
        launch(device, config, (xq[:M], xs[:M], *w), dtype=torch.float32)
        for M in (130, 65, 91, 128)
    )
    assert_close_to_reference(most, xq, xs, *w)
    assert all(torch.equal(most[: len(each)], each) for each in fewer)


@pytest.mark.parametrize(("fold", "M"), [(2, 13), (2, 32), (4, 5), (4, 8), (4, 16)])
def test_few_rows_are_the_same_in_blocks_of_folded_tiles(
    fold: int, M: int, device: torch.device
) -> None:
    config, drawn = config_of(2, fold, 2, 2), operands(M, 37, 2336, 7)
    bias, runs = torch.randn(37), []
    for blocks in range(1, -(-M * fold // 16) + 1):
        runs.append(launch(device, {**config, "blocks": blocks}, drawn, bias, torch.float32))
    assert len(runs) > 1
    assert_close_to_reference(runs[0], *drawn, bias)
    assert all(torch.equal(runs[0], run) for run in runs)


@pytest.mark.parametrize(("M", "N", "K"), [(8, 384, 5120), (8, 384, 1536), (16, 384, 5120)])
def test_few_rows_are_divided_where_w_has_few_too(M: int, N: int, K: int) -> None:
    chosen = MFMA.configure(GFX950, LinearProblem(M, N, K))
    assert chosen["blocks"] > 1 and chosen["fold"] > 1
    assert MFMA.configure(GFX950, LinearProblem(M, 36864, K))["blocks"] == 1


@pytest.mark.parametrize("cu_num", [1, 6, 64, 256])
def test_compute_units_have_as_many_rows_each(cu_num: int) -> None:
    assert MFMA.module is not None
    target = replace(GFX950, cu_num=cu_num)
    for N in (1, 5, 63, 64, 100, 255, 256, 2304, 6144, 5000):
        problem = LinearProblem(16, N, 6144)
        for config in MFMA.candidates(target, problem)[:12]:
            grid = MFMA.module.geometry(target, problem, config).grid
            _, _, _, each, longer, *_ = MFMA.module.scalars(target, problem, config)
            groups, blocks = grid[0] * grid[1], grid[2]
            assert -groups * blocks % cu_num < blocks or groups == N
            assert groups * each + longer == N
            assert each + (longer > 0) <= config["row_tiles"] * 16 // config["fold"]


def test_more_workgroups_than_a_grid_row_holds(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "MAX_GRID_X", 2)
    drawn, config = operands(2, 53, 96, 4), config_of(1, 2, 1, 1)
    assert MFMA.module is not None
    one = replace(GFX950, cu_num=1)
    assert MFMA.module.geometry(one, LinearProblem(2, 53, 96), config).grid == (2, 4, 1)
    assert_close_to_reference(launch(device, config, drawn), *drawn)


def test_weights_above_4_gib_match_float64() -> None:
    # Of a grid that covers all of N, only its first workgroup in each row of the grid is launched.
    K, config = 320, config_of(1, 1, 2, 1)
    far = registry.MAX_GRID_X * 16
    N = far + 16
    assert far * K > 1 << 32 and MFMA.module is not None
    wq = torch.empty((N, K), dtype=torch.float8_e4m3fn)  # memory that is never touched is free
    ws = torch.empty((N, K // 32), dtype=torch.uint8)
    xq, xs, *near = operands(2, 16, K, 1)
    _, _, *last = operands(2, 16, K, 2)
    wq[:16], ws[:16], wq[far:], ws[far:] = *near, *last
    block = MFMA.module.geometry(GFX950, LinearProblem(2, N, K), config).block
    module = replace(MFMA.module, geometry=lambda *_: Geometry((1, 2, 1), block))
    with aiter_mx.simulate("gfx950"):
        kernel = replace(MFMA, modules=(module,))
        out = launch(torch.device("cpu"), config, (xq, xs, wq, ws), kernel=kernel)
    assert_close_to_reference(out[:, :16], xq, xs, *near)
    assert_close_to_reference(out[:, far:], xq, xs, *last)


@pytest.mark.parametrize(
    ("M", "N", "K"), [(3, 2304, 6144), (16, 6144, 1536), (48, 1536, 6144), (64, 2336, 6144)]
)
def test_the_op_takes_mfma_for_decode_shapes_and_each_block_reads_weights_once(
    M: int, N: int, K: int
) -> None:
    drawn, problem = operands(M, N, K, N), LinearProblem(M, N, K)
    with aiter_mx.simulate("gfx950"):
        chosen = aiter_mx.explain("linear", M=M, N=N, K=K)
        assert chosen.kernel in ("mfma", "mfma_split")
        assert_close_to_reference(aiter_mx.linear(*drawn), *drawn)
    report = last_report()
    assert report is not None
    work = ways.work_of(GFX950, problem, chosen.config)
    way = ways.way_of(problem, chosen.config)
    meetings, tiles = way.splits - 1, work.groups // way.splits // way.blocks
    inputs = (way.blocks * N + tiles * M) * (K + K // 32)
    # Where two workgroups meet, both exchange their sums, by twos of a tile, and one clears them.
    for rows, compare in ((N, operator.le), (N + tiles, operator.ge)):
        sums = 4 * meetings * M * rows
        assert compare(inputs + 2 * sums, report.bytes_read)
        assert compare(2 * M * N + 3 * sums, report.bytes_written)
    assert report.scratch_bytes == 0


@pytest.mark.parametrize(
    ("config", "M"),
    [(config_of(2, 2, 12, 1), 16), (config_of(1, 4, 4, 1), 13), (config_of(4, 1, 2, 1), 32)],
    ids=str,
)
def test_lanes_that_lds_serves_together_are_in_different_banks(
    config: dict[str, int], M: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AITER_MX_SIM_CONFLICTS", "1")
    drawn = operands(M, 70, 3104, 7)
    with aiter_mx.simulate("gfx950"):
        assert_close_to_reference(launch(torch.device("cpu"), config, drawn), *drawn)
    report = last_report()
    assert report is not None and report.lds_bytes_read > 0
    assert report.lds_conflicts == 0


def waves_a_simd(registers: int) -> int:
    return 512 // (-(-registers // 8) * 8)


@pytest.mark.parametrize("kernel", [MFMA, MFMA_SPLIT], ids=lambda kernel: kernel.name)
def test_no_variant_that_may_be_chosen_spills(kernel: KernelSpec) -> None:
    """Each number of tiles and waves with the most steps of loads that its registers admit."""
    most: dict[tuple[int, ...], tuple[LinearProblem, Config]] = {}
    for unfolded in combinations(PARAMS):
        one_block = unfolded["fold"] == unfolded["blocks"] == 1
        if not one_block or unfolded["waves"] not in (4, 8, 12, 16):
            continue  # others have the registers of these; folds and an odd block take a few more
        for col_tiles in (1, 2, 4, 6, 8):
            fold, config = 2, {**unfolded, "fold": 2}
            if kernel is MFMA_SPLIT or col_tiles > 4:  # never folded where it is chosen
                fold, config = 1, unfolded
            if kernel is MFMA_SPLIT:
                config = {**config, "splits": SPLITS.values[-1]}
            problem = LinearProblem(16 // fold * col_tiles, 2304, (1 << 17) + 32)
            if ways.resident_of(problem, config):
                key = (config["row_tiles"], col_tiles, config["waves"])
                most[key] = max(
                    most.get(key, (problem, config)),
                    (problem, config),
                    key=lambda e: e[1]["unroll"],
                )
    assert len(most) >= 30
    requests = {build_request(kernel, GFX950, *entry): entry for entry in most.values()}
    for request, info in kernels_without_spills(requests, accumulators=True):
        problem, config = requests[request]
        assert info.agprs == 0 or config["waves"] == 4, f"{request}: {info}"
        tiles = config["row_tiles"], ways.way_of(problem, config).col_tiles
        is_odd = ways.has_odd_blocks(problem.K)
        expected = ways.registers_of(*tiles, config["unroll"], is_odd)
        assert waves_a_simd(info.vgprs) >= waves_a_simd(expected), f"{request}: {info}"


@pytest.mark.parametrize(("N", "K"), DECODE_SHAPES)
@pytest.mark.parametrize("M", [3, 8, 16, 32, 64])
def test_as_much_is_under_way_as_a_compute_unit_waits_for(M: int, N: int, K: int) -> None:
    """What the first loads of the workgroups on a busy unit ask for, or else all that they do."""
    problem = LinearProblem(M, N, K)
    config = MFMA.configure(GFX950, problem)
    work = ways.work_of(GFX950, problem, config)
    way = ways.way_of(problem, config)
    at_once = min(ways.resident_of(problem, config), -(-work.groups // GFX950.cu_num))
    steps = min(work.steps, config["waves"] * config["unroll"])
    rows = at_once * (work.rows + way.block_rows)
    under_way = rows * min(K, steps * config["fold"] * 256)
    assert under_way >= min(shipped().missing_kib * 1024, rows * K)


@pytest.mark.parametrize("kernel", [MFMA, MFMA_SPLIT], ids=lambda kernel: kernel.name)
def test_waves_begin_with_sizes_x_and_w_in_registers(kernel: KernelSpec) -> None:
    """And load them themselves on firmware that does not know of that."""
    problem = LinearProblem(16, 40, 1536)
    operands = workload_of("linear").operands(problem, torch.device("cpu"))
    config = kernel.configure(GFX950, problem)
    launch = prepare(kernel, problem, config, operands=operands)
    assert launch.kernel.descriptor.preload_dwords == 14
    program = Program.from_image(without_preload(launch.image.read_bytes()))
    assert program.kernel(launch.symbol).descriptor.preload_dwords == 0
    replace(launch, program=program).run()
    assert workload_of("linear").judge(problem, operands)(operands).right


def test_refusals_say_what_is_covered() -> None:
    def refusal(M: int, K: int, arch: str = "gfx950") -> str | None:
        return MFMA.refusal(replace(GFX950, arch=arch), LinearProblem(M, 3, K))

    assert refusal(MAX_M, MAX_K - 32) is None
    assert refusal(4097, 32) == "M=4097 is above 4096, the most rows of mfma"
    assert refusal(1, MAX_K) == (
        f"K={MAX_K} is not below {MAX_K}, as the 32-bit offsets of mfma demand"
    )
    assert refusal(1, 32, "sm_90a") == "no mfma kernel for sm_90a, only for gfx950"
