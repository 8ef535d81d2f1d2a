"""What the host does for Hopper's grouped ``rescaled_in_place``: workspaces, launches, refusals."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from aiter_mx.kernels.grouped_gemm import GroupedGemmProblem
from aiter_mx.kernels.grouped_gemm.rescaled_groups_sm90 import across, most_blocks, steps_of
from aiter_mx.kernels.registry import find_kernel
from aiter_mx.kernels.spec import MOST_SHARED_BYTES, place_of
from aiter_mx.target import hardware
from op_tests.grouped.subjects import IN_PLACE_SM90

IN_PLACE = find_kernel("grouped_gemm", "sm_90a", "hip", "rescaled_in_place")
TARGET = hardware("sm_90a")


def drawn_problems(count: int) -> Iterator[GroupedGemmProblem]:
    draw = random.Random(7)
    for _ in range(count):
        M, N = round(2 ** draw.uniform(0, 18)), 32 * round(2 ** draw.uniform(0, 8))
        K, G = 32 * round(2 ** draw.uniform(0, 8)), round(2 ** draw.uniform(0, 9))
        layout = draw.choice(["jagged", "masked"])
        yield GroupedGemmProblem(-(-M // G) * G, N, K, G, layout=layout)


def test_there_is_no_parameter_to_tune() -> None:
    assert IN_PLACE.params == ()
    for problem in drawn_problems(50):
        assert [*IN_PLACE.candidates(TARGET, problem)] == [{}]
        assert IN_PLACE.configure(TARGET, problem) == {}


def test_a_workspace_holds_what_all_launches_lay_out() -> None:
    """As ``GroupWorkspace`` of csrc/grouped/in_place_groups_sm90.h has it."""
    for problem in drawn_problems(300):
        blocks, G = most_blocks(problem), problem.G
        payload = 128 * blocks * problem.K
        records = -(-problem.K // 128) * 2 * blocks * (64 + 4)  # words, of units of 64 rows
        # block_ends, pair_ends, busy, starts, ends; then a row and rows of each block
        lists = -(-(5 * G + 1) // 2) * 2 + 2 * blocks
        claimed = 1
        asked = IN_PLACE.workspace_bytes(TARGET, problem, {})
        assert asked == payload + 4 * (records + lists + claimed)


def test_records_of_x_lie_where_a_bulk_copy_may_begin() -> None:
    """Behind the payload, at multiples of 16 bytes."""
    for problem in drawn_problems(300):
        assert 128 * most_blocks(problem) * problem.K % 16 == 0
    assert 4 * (64 + 4) % 16 == 0


def test_there_is_room_for_the_blocks_of_any_groups() -> None:
    draw = random.Random(3)
    for _ in range(2000):
        sizes = [draw.choice([0, 1, 63, 127, 128, 129, 1000]) for _ in range(draw.randint(1, 40))]
        blocks = sum(-(-rows // 128) for rows in sizes)
        M, G = sum(sizes), len(sizes)
        assert blocks <= most_blocks(GroupedGemmProblem(M, 32, 32, G))
        masked = GroupedGemmProblem(max(sizes) * G, 32, 32, G, layout="masked")
        assert blocks <= most_blocks(masked)


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
        (GroupedGemmProblem(1 << 29, 96, 32, 1), "x has up to"),
        (GroupedGemmProblem(1 << 20, 1 << 25, 32, 4), "tiles of results"),
        (GroupedGemmProblem(128, 1 << 28, 1 << 10, 4096), "b has"),
        (GroupedGemmProblem(1 << 27, 32, 32, 4096), "groups of up to"),
    ],
)
def test_what_it_does_not_cover_is_refused(problem: GroupedGemmProblem, reason: str) -> None:
    assert reason in (IN_PLACE.refusal(TARGET, problem) or "")


def test_exact_sums_and_other_architectures_are_refused() -> None:
    problem = GroupedGemmProblem(4096, 4096, 4096, 8)
    assert IN_PLACE.refusal(TARGET, problem) is None
    exact = replace(TARGET, exact_sums=True)
    assert "14 bits" in (IN_PLACE.refusal(exact, problem) or "")
    assert "only for sm_90a" in (IN_PLACE.refusal(hardware("gfx950"), problem) or "")


def test_what_it_counts_has_31_bits() -> None:
    draw, most = random.Random(5), (1 << 31) - 1
    covered = 0
    for _ in range(3000):
        M, N = round(2 ** draw.uniform(0, 32)), 32 * round(2 ** draw.uniform(0, 24))
        K, G = 32 * round(2 ** draw.uniform(0, 16)), round(2 ** draw.uniform(0, 12))
        problem = GroupedGemmProblem(-(-M // G) * G, N, K, G)
        if IN_PLACE.refusal(TARGET, problem) is not None:
            continue
        covered += 1
        steps, of_x = -(-K // 128), most_blocks(problem)
        _, rescale, product = IN_PLACE.modules
        assert 2 * of_x * (64 + 4) <= most  # words of x in a step
        assert 128 * of_x <= most  # its rows
        assert rescale.geometry(TARGET, problem, {}).grid[0] <= most
        # A CTA claims one tile more than there are.
        ctas = product.geometry(TARGET, problem, {}).grid[0]
        assert of_x * across(problem) + ctas <= most and steps * 128 <= most
        assert all(abs(n) <= most for n in product.scalars(TARGET, problem, {})[4:])
    assert covered > 300


@pytest.mark.parametrize("rows", [1, 4096])
def test_rows_of_w_of_all_groups_have_31_bits(rows: int) -> None:
    """As a coordinate of a tensor map does."""
    G, most = 4096, (1 << 31) - 1
    for N in (1 << 19, (1 << 19) + 32, 1 << 20):
        assert IN_PLACE.refusal(TARGET, GroupedGemmProblem(rows, N, 32, G)) is not None
    N = (1 << 19) - 32
    assert IN_PLACE.refusal(TARGET, GroupedGemmProblem(1, N, 32, G)) is None
    assert most - N * G >= 128


def test_three_launches_share_sizes_and_a_workspace() -> None:
    problem = GroupedGemmProblem(1000, 416, 352, 5, "fp16", "bf16", index="i64")
    columns, steps, of_x = 4, 3, 5 + 995 // 128
    launches, given = IN_PLACE.launches(TARGET, problem, {}), (TARGET, problem, {})
    assert launches == IN_PLACE.modules
    assert (across(problem), steps_of(problem), most_blocks(problem)) == (columns, steps, of_x)
    for module in launches:
        assert module.scalars(*given) == (1000, 416, 352, 5, 0, 8, 2, of_x)
        assert module.geometry(*given).overlaps
    listed, rescale, product = (module.geometry(*given) for module in launches)
    assert (listed.grid, listed.block) == ((1, 1, 1), (256, 1, 1))
    assert (rescale.grid, rescale.block) == ((of_x * steps, 1, 1), (256, 1, 1))
    assert (product.grid, product.block) == ((of_x * columns, 1, 1), (512, 1, 1))
    *ahead, last = launches
    assert not any(module.tensor_maps for module in ahead)
    operands, weights = (of(*given) for of in last.tensor_maps)
    assert operands.pointer == place_of(last.args, "workspace")
    assert (operands.rows, operands.row_bytes) == (128 * of_x, 352)
    assert (operands.box_rows, operands.box_bytes) == (64, 128)
    assert weights.pointer == place_of(last.args, "wq")
    assert (weights.rows, weights.row_bytes) == (5 * 416, 352)
    assert (weights.box_rows, weights.box_bytes) == (128, 128)
    assert operands.swizzled and weights.swizzled


def test_shared_memory_has_what_is_under_way() -> None:
    """Payloads, records of x, and of each block of w two words of a row and one of a quarter."""
    problem = GroupedGemmProblem(1000, 416, 352, 5)
    *_, product = IN_PLACE.modules
    found = product.defines(TARGET, problem, {})
    blocks, units = found["MX_BLOCKS"], 2 * found["MX_UNITS"]  # of both consumers
    asked = product.geometry(TARGET, problem, {}).shared_bytes
    payload = (128 * blocks + 64 * units) * 128
    assert asked == payload + 4 * (units * (64 + 4) + blocks * (2 * 128 + 4))
    assert asked == found["MX_SHARED_BYTES"] <= MOST_SHARED_BYTES["sm_90a"]


def test_one_code_object_is_of_all_shapes() -> None:
    expected = None
    for problem in drawn_problems(50):
        for module in IN_PLACE.modules:
            defines = module.defines(TARGET, problem, {})
            expected = expected or defines
            assert defines == expected
    fp16 = GroupedGemmProblem(1000, 416, 352, 5, "fp16")
    assert IN_PLACE.modules[-1].defines(TARGET, fp16, {}) != expected


def test_no_more_ctas_stay_than_there_are_tiles_or_multiprocessors() -> None:
    *_, product = IN_PLACE.modules
    for cu_num, M, ctas in ((132, 1, 2), (132, 8192, 128), (78, 8192, 78), (144, 16384, 132)):
        target = replace(TARGET, cu_num=cu_num)
        problem = GroupedGemmProblem(M, 256, 1024, 1)
        assert product.geometry(target, problem, {}).grid == (ctas, 1, 1)


def test_cases_reach_pairs_of_any_number_of_units() -> None:
    """Pairs of blocks of 64 to 256 rows and lone blocks, and more of them in a group than share a
    tile of w before the next; by few CTAs, too, and where a tile of w ends within its group's."""
    cases = [case for group in IN_PLACE_SM90.groups for case in group]
    units, pairs, ctas, ends, steps = set(), set(), set(), set(), set()
    for case in cases:
        G, M = len(case.groups.ranges), case.groups.M
        problem = GroupedGemmProblem(M, case.N, case.K, G, case.dtype or "bf16")
        assert IN_PLACE.refusal(TARGET, problem) is None
        for start, end in case.groups.ranges:
            whole, left = divmod(end - start, 256)
            pairs.add(whole + (left > 0))
            units |= {4} if whole else set()
            units |= {-(-left // 64)} if left else set()
        ctas.add(case.cu_num)
        ends.add(case.N % 128)
        steps.add(min(9, steps_of(problem)))
    assert units == {1, 2, 3, 4} and pairs >= {0, 1, 2, 4, 5, 6, 8, 10}
    assert ctas >= {None, 1, 2} and ends == {0, 32, 64, 96}
    assert steps >= {1, 2, 3, 9}  # beyond as many blocks of w as are under way
    groups = [case.groups for case in cases]
    sizes = {end - start for of in groups for start, end in of.ranges}
    assert sizes >= {0, 1, 63, 64, 65, 127, 128, 129, 257, 1000}
    assert any(128 < rows <= 192 for rows in sizes) and any(192 < rows <= 256 for rows in sizes)
    assert {of.told for of in groups} >= {"ends", "offsets", "ranges", "masked"}
    assert {len(of.ranges) for of in groups} >= {1, 64, 600}


def test_scales_of_w_are_copied_where_they_begin_within_a_word() -> None:
    """As the kernel loads four of them at once."""
    for module in IN_PLACE.modules:
        assert {arg.name: arg.align for arg in module.pointers if arg.align > 1} == {"ws": 4}
