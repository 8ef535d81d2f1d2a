"""The CDNA4 grouped kernel's code and what it counts: registers, bank conflicts, what limits it."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch

import aiter_mx
from aiter_mx.code_object import parse_code_object
from aiter_mx.jit.build import build_all
from aiter_mx.kernels.grouped_gemm import GroupedGemmProblem
from aiter_mx.kernels.grouped_gemm.persistent_gfx950 import PARAMS, PERSISTENT, _copied, _lds_bytes
from aiter_mx.kernels.spec import Config, combinations
from aiter_mx.launch import build_request
from aiter_mx.runtimes.sim import last_report
from aiter_mx.sim.disasm import disassemble
from aiter_mx.target import hardware
from op_tests.conformance import DTYPES
from op_tests.grouped.cases import Groups, Operands, launch_grouped, one_group
from op_tests.grouped.counts import WAVES, difference
from op_tests.grouped.subjects import (
    LAYOUTS,
    SWEPT,
    config_of,
    swept_bias,
    swept_in_runs,
    swept_layouts,
    zero_bias,
)
from op_tests.mx_reference import random_mx_groups

GFX950 = hardware("gfx950")
K_OF_SCALE_BYTES = {1: 32 * 9, 2: 32 * 10, 4: 32 * 12}
NAMED_FROM = 128 * 256  # elements of a tile whose sums are in accumulation registers
STEP = 128


def launch(
    tile: tuple[int, int], drawn: Operands, groups: Groups, *more: Any, **options: Any
) -> None:
    config = config_of(*tile, 4, 8)
    launch_grouped(PERSISTENT, torch.device("cpu"), config, drawn, groups, *more, **options)


def variants() -> list[tuple[GroupedGemmProblem, Config]]:
    """Every tile, ways of copying scales and dtypes taking turns; the largest with all the ways,
    where K is no whole steps with both operands' scales in one layout alone.

    Those of tiles that the sweep has too are the same, which saves compiling them.
    """
    ks, dtypes = list(K_OF_SCALE_BYTES.items()), ["bf16", "fp32", "fp16"]
    tiles = [c for c in combinations(PARAMS) if (c["swath"], c["xcds"]) == (4, 8)]
    swept = {(one[0], one[1]): one for one in SWEPT}
    of_tile = {one[0]: (one[1], *swept_layouts(one)) for one in SWEPT}

    def is_chosen(tile: tuple[int, int], scale_bytes: int, k: int, turn: tuple[int, int]) -> bool:
        if tile == (256, 256):
            return scale_bytes == 4 or k in (0, 3)
        if tile in of_tile:
            return of_tile[tile] == (scale_bytes, k)
        return (turn[1], k) == (turn[0] % 3, turn[0] % 4)

    def problem(tile: Config, scale_bytes: int, K: int, turn: int, k: int) -> GroupedGemmProblem:
        M, dtype, bias = 64, dtypes[turn % 3], ["none", *dtypes][turn % 4]
        if one := swept.get(((tile["tile_m"], tile["tile_n"]), scale_bytes)):
            M, dtype, bias = 65 - swept_in_runs(one), one[2], swept_bias(one, k)
        return GroupedGemmProblem(M, 64, K, 2, dtype, bias, "jagged", "i32", 0, *LAYOUTS[k])

    return [
        (problem(tile, scale_bytes, K, i + j + k, k), tile)
        for i, tile in enumerate(tiles)
        for j, (scale_bytes, K) in enumerate(ks)
        for k in range(len(LAYOUTS))
        if is_chosen((tile["tile_m"], tile["tile_n"]), scale_bytes, k, (i, j))
    ]


def test_no_variant_spills_and_named_sums_are_touched_by_nothing_else() -> None:
    chosen = variants()
    built = build_all([build_request(PERSISTENT, GFX950, *variant) for variant in chosen])
    for (problem, config), code in zip(chosen, built, strict=True):
        (kernel,) = parse_code_object(code.image).kernels.values()
        spilled = (kernel.vgpr_spills, kernel.sgpr_spills, kernel.scratch_bytes)
        assert spilled == (0, 0, 0), f"{problem} {config}: {kernel}"
        assert kernel.lds_bytes == _lds_bytes(_copied(problem), config["tile_m"], config["tile_n"])
        elements = config["tile_m"] * config["tile_n"]
        is_named = elements >= NAMED_FROM
        assert kernel.agprs == (256 if is_named else 0), f"{config}: {kernel}"
        touching = Counter(
            instruction.mnemonic
            for instruction in disassemble(code.image)
            if re.search(r"\ba(\d|\[)", instruction.text)
        )
        read = elements // 256 * (2 + (elements == 256 * 256)) // 2  # of whole tiles and halves
        assert touching.pop("v_accvgpr_read_b32", 0) == (read if is_named else 0)
        assert set(touching) <= {"v_mfma_scale_f32_16x16x128_f8f6f4"}


def main_loop(
    tile: tuple[int, int],
    first_k: int,
    monkeypatch: pytest.MonkeyPatch,
    swept: int | None = None,
    layout: int = 0,
) -> dict[str, float]:
    """Of a tile, with dtypes and biases of the sweep where ``swept`` says which."""
    monkeypatch.setenv("AITER_MX_SIM_CONFLICTS", "1")
    dtype = torch.bfloat16 if swept is None else DTYPES[SWEPT[swept][2]]
    bias = None if swept is None else zero_bias(SWEPT[swept], layout, tile[1])
    reports = []
    for K in (first_k, first_k + 4 * STEP):
        drawn = random_mx_groups(tile[0], 1, tile[1], K, 1, (-6, 6))
        with aiter_mx.simulate("gfx950"):
            group, layouts = one_group(tile[0]), LAYOUTS[layout]
            # One workgroup takes the whole tile.
            launch(tile, drawn, group, bias, dtype, cu_num=1, layouts=layouts)
        report = last_report()
        assert report is not None
        reports.append(report)
    return difference(*reports, 4)


@pytest.mark.parametrize(
    ("first_k", "swept"), [(1024, 0), (1088, 1)], ids=["dword scales", "word scales"]
)
def test_the_main_loop_of_the_main_tile_is_limited_by_products(
    first_k: int, swept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = main_loop((256, 256), first_k, monkeypatch, swept)
    assert found["matrix_cycles"] == 2048  # 256 * 256 * 128 products, 1024 a cycle and SIMD
    assert found["lds_cycles"] < 0.8 * found["matrix_cycles"]
    assert found["issue_cycles"] < 0.5 * found["matrix_cycles"]
    assert found["conflicts"] == found["scratch"] == 0


def test_shuffled_scales_take_few_cycles_of_the_address_unit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows, payload = 512, 1024  # of the tile and a step; 64 bytes of payload a cycle
    first_k = 4096  # rows of scales are whole lines
    plain = main_loop((256, 256), first_k, monkeypatch, 0)
    assert plain["address_cycles"] == payload + rows / 4  # of four steps at once
    found = main_loop((256, 256), first_k, monkeypatch, 0, LAYOUTS.index(("16x4", "16x4")))
    assert found["address_cycles"] <= payload + 1.05 * rows / 16
    assert found["lds_cycles"] < 0.8 * found["matrix_cycles"]
    assert found["issue_cycles"] < 0.5 * found["matrix_cycles"]
    assert found["conflicts"] == found["scratch"] == 0


@pytest.mark.parametrize("tile", [(128, 128), (64, 128), (32, 256)], ids=str)
def test_smaller_tiles_have_no_bank_conflicts_in_their_main_loop(
    tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = main_loop(tile, 1024, monkeypatch)
    assert found["conflicts"] == found["scratch"] == 0


@pytest.mark.parametrize("tile", [(256, 256), (128, 128), (32, 256), (32, 128)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_results_have_no_bank_conflicts_on_their_way(
    tile: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AITER_MX_SIM_CONFLICTS", "1")
    K, bias = 1024, None
    if (tile, DTYPES[SWEPT[1][2]]) == (SWEPT[1][0], dtype):
        K, bias = 1088, zero_bias(SWEPT[1], 0, tile[1])
    drawn = random_mx_groups(tile[0], 1, tile[1], K, 1, (-6, 6))
    with aiter_mx.simulate("gfx950"):
        launch(tile, drawn, one_group(tile[0]), bias, dtype)
    report = last_report()
    assert report is not None
    assert report.bytes_written == dtype.itemsize * tile[0] * tile[1]
    assert report.lds_conflicts == 0


def test_between_the_steps_of_two_tiles_a_wave_has_few_instructions() -> None:
    def instructions(K: int, tiles: int) -> float:
        drawn = random_mx_groups(256, 1, 256 * tiles, K, 1, (-6, 6))
        with aiter_mx.simulate("gfx950"):
            launch((256, 256), drawn, one_group(256), cu_num=1)
        report = last_report()
        assert report is not None
        return report.instructions / WAVES

    first_k, of_one = 4 * STEP, instructions(4 * STEP, 1)
    of_step = (instructions(first_k + 4 * STEP, 1) - of_one) / 4
    of_tile = (instructions(first_k, 3) - of_one) / 2 - 4 * of_step
    reads, conversions = 256, 128  # of the sums of a lane, two results at a time
    dealing = 128  # of the next tile, whole or by halves
    assert reads + conversions < of_tile < 2.5 * (reads + conversions) + dealing


def test_an_operand_is_read_once_for_each_tile_of_the_other() -> None:
    drawn = random_mx_groups(256, 1, 256, 512, 1, (-6, 6))
    with aiter_mx.simulate("gfx950"):
        launch((128, 128), drawn, one_group(256), cu_num=1)
    report = last_report()
    assert report is not None
    operand_bytes = sum(t.nbytes for t in drawn)
    assert report.bytes_written == 2 * 256 * 256
    assert 2 * operand_bytes <= report.bytes_read <= 2.001 * operand_bytes
