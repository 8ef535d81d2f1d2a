"""What the host does for Hopper's grouped ``rescaled``: the ring, workspaces, launches."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from aiter_mx.dispatch.dispatcher import route
from aiter_mx.kernels.grouped_gemm import GroupedGemmProblem
from aiter_mx.kernels.grouped_gemm.rescaled_groups_sm90 import across, most_blocks
from aiter_mx.kernels.grouped_gemm.rescaled_sm90 import PARAMS, panel_tiles, ring_tiles
from aiter_mx.kernels.registry import find_kernel
from aiter_mx.kernels.spec import combinations, place_of
from aiter_mx.target import hardware
from op_tests.grouped.rescaled import with_room_for
from op_tests.grouped.subjects import RESCALED_SM90

RESCALED = find_kernel("grouped_gemm", "sm_90a", "hip", "rescaled")
TARGET = hardware("sm_90a")
USUAL = RESCALED.configure(TARGET, GroupedGemmProblem(300, 96, 64, 3))


def drawn_problems(count: int) -> Iterator[GroupedGemmProblem]:
    draw = random.Random(7)
    for _ in range(count):
        M, N = round(2 ** draw.uniform(0, 18)), 32 * round(2 ** draw.uniform(0, 8))
        K, G = 32 * round(2 ** draw.uniform(0, 8)), round(2 ** draw.uniform(0, 9))
        layout = draw.choice(["jagged", "masked"])
        yield GroupedGemmProblem(-(-M // G) * G, N, K, G, layout=layout)


def test_a_ring_has_as_many_tiles_of_w_as_there_is_room_for() -> None:
    holds_all = set()
    for problem in drawn_problems(500):
        for config in combinations(PARAMS):
            found, tiles = ring_tiles(problem, config), problem.G * across(problem)
            room, of_tile = config["ring_mib"] << 20, 128 * problem.K
            assert 0 < found <= tiles
            assert found * of_tile <= max(room, 2 * of_tile)
            assert found == tiles or (found + 1) * of_tile > room
            holds_all.add(found == tiles)
    assert holds_all == {False, True}


def test_there_is_room_for_two_tiles_of_any_k() -> None:
    problem = GroupedGemmProblem(300, 160, 1 << 20, 1)
    assert ring_tiles(problem, {"ring_mib": 16}) == 2 == across(problem)


def test_the_ring_has_room_for_two_panels() -> None:
    for problem in drawn_problems(500):
        for config in combinations(PARAMS):
            ring, panel = ring_tiles(problem, config), panel_tiles(problem, config)
            assert 1 <= panel <= 16
            assert 2 * panel <= ring or ring == panel == 1
    problem = GroupedGemmProblem(300, 416, 64, 20)  # 80 tiles of w
    for room, panel in ((1, 1), (2, 1), (3, 1), (4, 2), (31, 15), (32, 16), (100, 16)):
        with with_room_for(room):
            assert panel_tiles(problem, USUAL) == panel
            sizes = RESCALED.modules[-1].scalars(TARGET, problem, USUAL)[-3:]
            assert sizes == (most_blocks(problem), min(room, 80), panel)


def test_a_workspace_holds_what_all_launches_lay_out() -> None:
    """As ``GroupWorkspace`` of csrc/grouped/rescaled_groups_sm90.h has it."""
    for problem in drawn_problems(300):
        for config in combinations(PARAMS):
            tiles, G = most_blocks(problem) + ring_tiles(problem, config), problem.G
            rows = 128 * tiles
            words = -(-problem.K // 128) * (-(-(rows + 2 * tiles) // 4) * 4)
            lists = -(-(5 * G + 1) // 2) * 2  # block_ends, pair_ends, busy, starts, ends
            counters = 2 + 2 * G * across(problem)  # claimed, ready, used
            asked = RESCALED.workspace_bytes(TARGET, problem, config)
            expected = rows * problem.K + 4 * (words + lists + counters) + 8 * most_blocks(problem)
            assert asked == expected


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (GroupedGemmProblem(4096, 4096, 4096, 8, "fp32"), "which fp32 results would show"),
        (GroupedGemmProblem(4096, 4096, 4096, 8, a_format="e5m2"), "e5m2"),
        (GroupedGemmProblem(4096, 4096, 4096, 8, layout="unpadded", out_rows=9), "unpadded"),
        (GroupedGemmProblem(4096, 4096, 4096, 8, layout="runs", run_rows=128), "runs"),
        (GroupedGemmProblem(9000, 4096, 4096, 4097), "4097 is above 4096"),
        (GroupedGemmProblem(4096, 100, 4096, 8), "not a multiple of 32"),
        (GroupedGemmProblem(0, 96, 4096, 8), "nothing to multiply"),
        (GroupedGemmProblem(4096, 0, 4096, 8), "nothing to multiply"),
        (GroupedGemmProblem(1 << 31, 96, 32, 1), "31 bits"),
        (GroupedGemmProblem(1 << 22, 96, 1 << 17, 8), "scales of both operands"),
        (GroupedGemmProblem(128, 1 << 28, 1 << 10, 4096), "b has"),
        (GroupedGemmProblem(128, 1 << 18, 1 << 18, 4096), "steps"),
        (GroupedGemmProblem(1 << 23, 1 << 23, 32, 4), "tiles of results"),
        (GroupedGemmProblem(1 << 27, 32, 32, 4096), "groups of up to"),
    ],
)
def test_what_it_does_not_cover_is_refused(problem: GroupedGemmProblem, reason: str) -> None:
    assert reason in (RESCALED.refusal(TARGET, problem) or "")


def test_what_it_counts_has_31_bits() -> None:
    draw, most = random.Random(5), (1 << 31) - 1
    covered = 0
    for _ in range(3000):
        M, N = round(2 ** draw.uniform(0, 32)), 32 * round(2 ** draw.uniform(0, 24))
        K, G = 32 * round(2 ** draw.uniform(0, 16)), round(2 ** draw.uniform(0, 12))
        problem = GroupedGemmProblem(-(-M // G) * G, N, K, G)
        if RESCALED.refusal(TARGET, problem) is not None:
            continue
        covered += 1
        steps, of_x, of_w = -(-K // 128), most_blocks(problem), G * across(problem)
        for config in combinations(PARAMS):
            _, rescale, product = RESCALED.modules
            assert steps * 130 * (of_x + ring_tiles(problem, config)) <= most
            assert rescale.geometry(TARGET, problem, config).grid[0] <= most
            # A CTA claims one more of each than there are.
            ctas = product.geometry(TARGET, problem, config).grid[0]
            assert of_w * steps + ctas <= most and of_x * across(problem) + ctas <= most
            assert max(2 + 2 * of_w, G * N + 128) <= most
            assert all(abs(n) <= most for n in product.scalars(TARGET, problem, config)[4:])
    assert covered > 300


def test_three_launches_share_sizes_and_a_workspace() -> None:
    problem = GroupedGemmProblem(1000, 416, 352, 5, "fp16", "bf16", index="i64")
    columns, steps, of_x = 4, 3, 5 + 995 // 128
    with with_room_for(8):
        launches, given = RESCALED.launches(TARGET, problem, USUAL), (TARGET, problem, USUAL)
        assert launches == RESCALED.modules
        for module in launches:
            assert module.scalars(*given) == (1000, 416, 352, 5, 0, 8, 2, of_x, 8, 4)
            assert module.geometry(*given).overlaps
        listed, rescale, product = (module.geometry(*given) for module in launches)
        assert (listed.grid, listed.block) == ((1, 1, 1), (256, 1, 1))
        assert (rescale.grid, rescale.block) == ((of_x * steps, 1, 1), (256, 1, 1))
        assert (product.grid, product.block) == ((of_x * columns, 1, 1), (512, 1, 1))
        assert product.shared_bytes == (2 * 5 + 4) * 128 * 128
        *ahead, last = launches
        assert not any(module.tensor_maps for module in ahead)
        operands, weights = (of(*given) for of in last.tensor_maps)
    assert operands.pointer == place_of(last.args, "workspace")
    assert (operands.rows, operands.row_bytes) == (128 * (of_x + 8), 352)
    assert weights.pointer == place_of(last.args, "wq")
    assert (weights.rows, weights.row_bytes) == (5 * 416, 352)
    for described in (operands, weights):
        assert (described.box_rows, described.box_bytes) == (128, 128)


def test_no_code_object_is_of_one_room_alone() -> None:
    problem = GroupedGemmProblem(8192, 4096, 7168, 32, "fp16", "bf16")
    assert len({ring_tiles(problem, config) for config in combinations(PARAMS)}) > 1
    for module in RESCALED.modules:
        defines = [module.defines(TARGET, problem, config) for config in combinations(PARAMS)]
        assert all(each == defines[0] for each in defines)


def test_no_more_ctas_stay_than_there_are_tiles_or_multiprocessors() -> None:
    *_, product = RESCALED.modules
    for cu_num, M, ctas in ((132, 1, 2), (132, 8192, 132), (78, 8192, 78), (144, 8192, 132)):
        target = replace(TARGET, cu_num=cu_num)
        problem = GroupedGemmProblem(M, 256, 1024, 1)
        assert product.geometry(target, problem, USUAL).grid == (min(ctas, 128), 1, 1)


def test_candidates_are_rings_of_other_numbers_of_tiles() -> None:
    few = GroupedGemmProblem(4096, 512, 1024, 8)  # 4 MiB of w
    assert RESCALED.candidates(TARGET, few) == [{"ring_mib": 64}]
    some = GroupedGemmProblem(4096, 1536, 2048, 8)  # 24 MiB
    assert RESCALED.candidates(TARGET, some) == [{"ring_mib": 64}, {"ring_mib": 16}]
    many = GroupedGemmProblem(4096, 4096, 7168, 32)
    found = RESCALED.candidates(TARGET, many)
    assert [config["ring_mib"] for config in found] == [64, 16, 32, 128]
    assert len({ring_tiles(many, config) for config in found}) == 4


def test_cases_reach_rings_whose_places_several_tiles_take() -> None:
    turns, starts_within, panels = set(), set(), set()
    for case in (case for group in RESCALED_SM90.groups for case in group):
        G, M = len(case.groups.ranges), case.groups.M
        problem = GroupedGemmProblem(M, case.N, case.K, G, case.dtype or "bf16")
        assert RESCALED.refusal(TARGET, problem) is None
        config = case.config or USUAL
        ring, panel = ring_tiles(problem, config), panel_tiles(problem, config)
        busy = sum(end > start for start, end in case.groups.ranges)
        turns.add(min(3, -(-busy * across(problem) // ring)))
        if busy * across(problem) > ring:
            starts_within.add(ring % across(problem) > 0)
        panels.add(min(3, -(-across(problem) // panel)))
    assert turns >= {1, 2, 3} and starts_within == {False, True} and panels == {1, 2, 3}
    groups = [case.groups for group in RESCALED_SM90.groups for case in group]
    sizes = {end - start for of in groups for start, end in of.ranges}
    assert sizes >= {0, 1, 63, 64, 65, 127, 128, 129, 1000}
    assert {of.told for of in groups} >= {"ends", "offsets", "ranges", "masked"}
    assert {len(of.ranges) for of in groups} >= {1, 64, 600}


def test_scales_of_w_are_copied_where_they_begin_within_a_word() -> None:
    """As the kernel loads four of them at once."""
    for module in RESCALED.modules:
        assert {arg.name: arg.align for arg in module.pointers if arg.align > 1} == {"ws": 4}


@pytest.mark.parametrize(
    ("rows", "N", "K", "kernel"),
    [
        (15, 4096, 4096, "persistent"),
        (16, 96, 96, "rescaled_in_place"),
        (1535, 4096, 6144, "rescaled_in_place"),
        (1536, 1536, 2560, "rescaled"),
        (5000, 4096, 2528, "rescaled_in_place"),
        (5000, 1504, 4096, "rescaled_in_place"),
    ],
)
def test_without_a_table_rows_n_and_k_decide(rows: int, N: int, K: int, kernel: str) -> None:
    problem = GroupedGemmProblem(6 * rows, N, K, 6)
    chosen = route("grouped_gemm", TARGET, problem)
    assert (chosen.kernel, chosen.source) == (kernel, "envelope")
    room = replace(problem, M=600 * rows, layout="masked", expected=rows)
    assert route("grouped_gemm", TARGET, room).kernel == kernel
