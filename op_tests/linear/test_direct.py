"""Hopper's ``mma_registers`` kernel of the linear: its host side, its results with ``-m gpu``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from aiter_mx.cli.disassembly import disassemble
from aiter_mx.jit.build import build_all
from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.linear.mma_registers_sm90 import MAX_M
from aiter_mx.kernels.registry import find_kernel, in_line
from aiter_mx.kernels.spec import combinations
from aiter_mx.launch import build_request
from aiter_mx.target import hardware
from op_tests.linear.cases import (
    DTYPES,
    Operands,
    assert_repeats_on_two_streams,
    chain_of_layers,
    launch_beyond_4_gib,
    launch_linear,
    operands,
)
from op_tests.linear.trials import (
    RANGES,
    Trial,
    assert_outputs_and_biases_right,
    assert_right,
    of_cancelling_scales,
    of_moved_scales,
    of_nan,
    of_scales,
    of_zero_blocks,
    plain,
)
from op_tests.mx_reference import assert_close_to_reference

MMA_REGISTERS = find_kernel("linear", "sm_90a", "hip", "mma_registers")
TARGET = hardware("sm_90a")
gpu = pytest.mark.gpu


def config(rows: int, waves: int, unroll: int, split: int = 1) -> dict[str, int]:
    return {"rows": rows, "waves": waves, "unroll": unroll, "split": split}


# Between them: rows that fill no tile, one and several tiles, K that ends within a chunk and within
# a step, rounds with and without all of their chunks, waves without a chunk; clusters whose parts
# of K are alike, differ, and are none, and that have more and fewer workgroups than tiles.
CASES = [
    (1, 64, 64, config(16, 4, 1)),
    (2, 3, 32, config(8, 1, 1)),
    (3, 100, 416, config(12, 4, 2)),
    (4, 5000, 1536, config(47, 12, 1)),
    (1, 70, 1056, config(3, 2, 3)),
    (4, 2304, 6144, config(18, 16, 3)),
    (3, 130, 2080, config(24, 4, 2)),
    (2, 777, 2048, config(16, 8, 2)),
    (4, 300, 1152, config(9, 3, 1)),
    (4, 33, 6144, config(32, 4, 2)),
    (2, 1000, 1920, config(40, 6, 1)),
    (4, 300, 1536, config(16, 3, 1, 4)),
    (3, 70, 1056, config(24, 2, 1, 2)),
    (2, 33, 640, config(12, 1, 1, 8)),
    (4, 2304, 6144, config(40, 6, 1, 4)),
    (1, 777, 2208, config(48, 3, 2, 4)),
    # and of more rows of x, which another kind of product has
    (8, 64, 64, config(16, 4, 1)),
    (5, 3, 32, config(8, 1, 1)),
    (7, 100, 416, config(12, 4, 2)),
    (8, 5000, 1536, config(47, 12, 1)),
    (6, 70, 1056, config(3, 2, 3)),
    (8, 2304, 6144, config(18, 16, 3)),
    (7, 131, 2080, config(24, 4, 2)),
    (8, 300, 1536, config(16, 3, 1, 4)),
    (7, 70, 1056, config(24, 2, 1, 2)),
    (5, 33, 640, config(12, 1, 1, 8)),
    (8, 2304, 6144, config(40, 3, 1, 8)),
    (6, 777, 2208, config(48, 3, 2, 4)),
    (8, 9216, 6144, config(24, 3, 1, 2)),
    # and of more, a second tile of 8
    (16, 64, 64, config(16, 4, 1)),
    (9, 3, 32, config(8, 1, 1)),
    (11, 100, 416, config(12, 4, 2)),
    (16, 5000, 1536, config(47, 12, 1)),
    (10, 70, 1056, config(3, 2, 3)),
    (15, 131, 2080, config(24, 4, 2)),
    (16, 300, 1536, config(16, 3, 1, 4)),
    (13, 70, 1056, config(24, 2, 1, 2)),
    (12, 33, 640, config(12, 1, 1, 8)),
    (16, 2304, 6144, config(40, 3, 1, 8)),
    (14, 777, 2208, config(48, 3, 2, 4)),
    (16, 777, 2176, config(24, 2, 0, 2)),
    (10, 70, 3072, config(40, 2, 0, 8)),
    (9, 100, 416, config(12, 2, 0)),
    # and chunks that are each asked for while the one before is used, or not, as K ends within one
    (4, 300, 1536, config(16, 3, 0)),
    (8, 2304, 6144, config(32, 3, 0, 4)),
    (7, 777, 2176, config(24, 2, 0, 2)),
    (3, 70, 3072, config(40, 2, 0, 8)),
    (5, 100, 416, config(12, 2, 0)),
]


@pytest.mark.parametrize("M", [1, 4, 5, 8, 9, 16])
@pytest.mark.parametrize(("N", "K"), [(1, 32), (300, 96), (2304, 6144), (9216, 28672), (70, 65568)])
def test_the_chosen_configuration_is_legal_and_leaves_no_wave_idle(M: int, N: int, K: int) -> None:
    for pdl in (False, True):
        problem = LinearProblem(M, N, K, pdl=pdl)
        candidates = MMA_REGISTERS.candidates(TARGET, problem)
        assert MMA_REGISTERS.configure(TARGET, problem) == candidates[0]
        for chosen in candidates:
            MMA_REGISTERS.check_config(chosen)
            assert chosen["waves"] * chosen["split"] <= -(-K // 128)


def test_every_output_has_a_workgroup_and_no_workgroup_is_without() -> None:
    assert MMA_REGISTERS.module is not None
    for M, N, K, chosen in CASES:
        grid = MMA_REGISTERS.module.geometry(TARGET, LinearProblem(M, N, K), chosen).grid
        clusters, rest = divmod(grid[0], chosen["split"])
        assert rest == 0
        assert clusters * chosen["rows"] >= N > (clusters - 1) * chosen["rows"]


def test_rounds_are_called_even_only_where_each_has_all_of_its_chunks() -> None:
    assert MMA_REGISTERS.module is not None
    for M, N, K, chosen in CASES:
        defines = MMA_REGISTERS.module.defines(TARGET, LinearProblem(M, N, K), chosen)
        assert defines["MX_DEPTH"] == K
        rounds = -(-K // 128) / (chosen["waves"] * max(1, chosen["unroll"]) * chosen["split"])
        assert defines["MX_EVEN"] == (rounds == int(rounds))


@pytest.mark.parametrize(("N", "fit"), [(23, 0), (24, 2), (25, 1), (47, 1), (48, 2), (49, 1)])
def test_rows_that_fill_no_workgroup_are_told_from_those_left_over(N: int, fit: int) -> None:
    assert MMA_REGISTERS.module is not None
    defines = MMA_REGISTERS.module.defines(TARGET, LinearProblem(4, N, 512), config(24, 2, 1, 2))
    assert defines["MX_ROWS_FIT"] == fit


@pytest.mark.parametrize(
    ("M", "N", "K"), [(1, 1, 32), (4, 5000, 416), (8, 9216, 6144), (16, 2304, 6144)]
)
def test_any_legal_configuration_can_be_launched_or_is_refused(M: int, N: int, K: int) -> None:
    assert MMA_REGISTERS.module is not None
    problem, refused = LinearProblem(M, N, K), []
    for chosen in combinations(MMA_REGISTERS.params):
        try:
            threads = MMA_REGISTERS.module.geometry(TARGET, problem, chosen).block[0]
        except ValueError as error:
            assert "does not fit" in str(error)
            refused.append(chosen)
            continue
        # A half's sums of all waves that share K are with one workgroup, or with several.
        halves, split = -(-chosen["rows"] // 8), chosen["split"]
        bytes_of_half = chosen["waves"] * split * 32 * (4 if M <= 4 else 8 if M <= 8 else 16)
        whole_halves = -(-halves // split) if 2 * halves > split else 0.5
        assert whole_halves * bytes_of_half < 48 * 1024
        resident = MMA_REGISTERS.module.defines(TARGET, problem, chosen)["MX_RESIDENT"]
        assert 1 <= resident <= 32 and threads <= threads * resident <= 2048
    assert bool(refused) == (M > 8)
    assert all(chosen["rows"] > 32 and chosen["waves"] >= 12 for chosen in refused)


def test_only_the_asked_for_launch_overlaps() -> None:
    assert MMA_REGISTERS.module is not None
    for pdl in (False, True):
        problem = LinearProblem(4, 6144, 2048, pdl=pdl)
        chosen = MMA_REGISTERS.configure(TARGET, problem)
        assert MMA_REGISTERS.module.geometry(TARGET, problem, chosen).overlaps is pdl
        assert MMA_REGISTERS.module.defines(TARGET, problem, chosen)["MX_OVERLAPS"] == pdl


def test_what_it_does_not_cover_is_refused() -> None:
    assert MMA_REGISTERS.refusal(TARGET, LinearProblem(MAX_M, 8, 64)) is None
    assert "above 16" in (MMA_REGISTERS.refusal(TARGET, LinearProblem(MAX_M + 1, 8, 64)) or "")
    assert "31 bits" in (MMA_REGISTERS.refusal(TARGET, LinearProblem(4, 1 << 28, 64)) or "")
    assert "sm_90a" in (MMA_REGISTERS.refusal(hardware("gfx950"), LinearProblem(4, 8, 64)) or "")


@pytest.mark.parametrize(("N", "K"), [(6144, 1536), (6144, 2048), (9216, 6144)])
def test_without_a_table_it_takes_what_it_won_on_an_h200(N: int, K: int) -> None:
    def first(problem: LinearProblem) -> str:
        line = in_line("linear", TARGET, problem)
        return next(kernel.name for kernel in line if kernel.refusal(TARGET, problem) is None)

    for M in (1, 2, 3, 4, 5, 8, 9, 16):
        assert first(LinearProblem(M, N, K)) == "mma_registers"
        overlaps = M <= 8
        assert (first(LinearProblem(M, N, K, pdl=True)) == "mma_registers") is overlaps
        assert first(LinearProblem(M, N, K + 32)) != "mma_registers"
    assert first(LinearProblem(1, 51200, 5120)) == "gemv"
    assert first(LinearProblem(2, 51200, 5120)) == "mma_registers"
    assert first(LinearProblem(2, 51200, 5120, pdl=True)) != "mma_registers"
    assert first(LinearProblem(8, 2048, 512, pdl=True)) == "mma_registers"
    assert first(LinearProblem(2, 1536, 6144)) == "mma_registers"
    assert first(LinearProblem(4, 1536, 6144)) == "mma_registers"
    assert first(LinearProblem(2, N, K, x_dtype="bf16")) != "mma_registers"


def launch(
    arguments: Operands,
    chosen: dict[str, int] | None,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    return launch_linear(MMA_REGISTERS, torch.device("cuda"), chosen, arguments, bias, dtype)


@gpu
@pytest.mark.parametrize(("M", "N", "K", "chosen"), CASES)
def test_any_shape_and_configuration_match_float64(
    M: int, N: int, K: int, chosen: dict[str, int]
) -> None:
    assert_right(launch, plain(M, N, K, chosen))


@gpu
@pytest.mark.parametrize("exponents", RANGES)
def test_scales_of_the_whole_e8m0_range_are_exact(exponents: tuple[int, int]) -> None:
    assert_right(launch, of_scales(CASES[1:], exponents))


@gpu
def test_extreme_scales_that_cancel_are_exact() -> None:
    assert_right(launch, of_cancelling_scales(CASES[1:]))


@gpu
def test_zero_blocks_of_any_scale_add_nothing() -> None:
    assert_right(launch, of_zero_blocks(CASES[1:]))


@gpu
@pytest.mark.parametrize("top", [-56, -55, 0, 63, 64])
@pytest.mark.parametrize("octaves", [21, 22])
def test_scales_at_the_ends_of_what_fp16_takes_are_exact(top: int, octaves: int) -> None:
    """From 5 rows on the scales of a chunk go into fp16, unless they or their largest are beyond
    it: those of w are 2^top and 2^(top - octaves), those of x the other way round."""

    def trials() -> Iterator[Trial]:
        for M, N, K, chosen in (case for case in CASES if case[0] > 4):
            xq, xs, wq, ws = operands(M, min(N, 300), K, 6, scale_exponents=(0, 1))
            for of_x, of_w in ((-top, top), (top, -top)):
                drawn = (
                    xq,
                    127 + of_x - (xs - 127) * octaves,
                    wq,
                    127 + of_w - (ws - 127) * octaves,
                )
                yield drawn, chosen, drawn

    assert_right(launch, trials())


@gpu
def test_tokens_and_rows_of_zeros_of_any_scale_leave_the_others_exact() -> None:
    def trials() -> Iterator[Trial]:
        for M, N, K, chosen in (case for case in CASES if case[0] > 4):
            xq, xs, wq, ws = operands(M, min(N, 300), K, 7, scale_exponents=(-6, 6))
            for payload, scale in ((xq, xs), (wq, ws)):
                payload.view(torch.uint8)[::3] = 0
                scale[::3] = 0
            drawn = (xq, xs, wq, ws)
            yield drawn, chosen, drawn

    assert_right(launch, trials())


@gpu
def test_nan_payloads_and_scales_reach_their_outputs_alone() -> None:
    assert_right(launch, of_nan(CASES[1:]))


@gpu
def test_scales_at_any_address_are_read_rightly() -> None:
    assert_right(launch, of_moved_scales(CASES[1:]))


@gpu
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_outputs_and_biases_of_every_dtype_match_float64(dtype: torch.dtype) -> None:
    for M in (3, 7, 13):
        assert_outputs_and_biases_right(launch, dtype, [config(16, 4, 2)], M=M)


@gpu
def test_weights_beyond_4_gib_are_addressed_rightly() -> None:
    for M in (4, 8, 16):
        got, drawn = launch_beyond_4_gib(MMA_REGISTERS, M, 6240)
        assert_close_to_reference(got, *drawn)


@gpu
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("M", [2, 4, 8, 16])
def test_results_are_bitwise_equal_over_launches_on_two_streams(M: int, pdl: bool) -> None:
    assert_repeats_on_two_streams(MMA_REGISTERS, LinearProblem(M, 2304, 6144, pdl=pdl))


@gpu
@pytest.mark.parametrize("M", [2, 4, 8, 16])
@pytest.mark.parametrize("captured", [False, True])
def test_a_chain_of_overlapping_launches_reads_what_the_one_ahead_wrote(
    captured: bool, M: int
) -> None:
    chain = chain_of_layers(MMA_REGISTERS, M)
    expected = chain(False)
    if not captured:
        for _ in range(20):
            assert torch.equal(chain(True), expected)
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(True)
    for _ in range(20):
        got.fill_(float("nan"))
        graph.replay()
        assert torch.equal(got, expected)


def test_registers_are_held_down_only_where_all_of_a_launch_then_fits() -> None:
    assert MMA_REGISTERS.module is not None
    told = [
        MMA_REGISTERS.module.defines(TARGET, LinearProblem(M, N, K), config(*chosen))["MX_RESIDENT"]
        for M, N, K, chosen in (
            (8, 1536, 6144, (24, 3, 1, 8)),  # 5 of 3 waves, for which 100 of 128 registers will do
            (8, 9216, 6144, (24, 3, 1, 2)),  # 6 of 3 waves, for which there are 96
            (8, 9216, 6144, (16, 4, 1, 2)),  # 9 of 4 waves, for which there are 56: not enough
            (8, 9216, 6144, (24, 3, 0, 2)),  # 6 again
            (8, 9216, 6144, (16, 4, 0, 2)),  # so as many as have room: 6 of a scheduler's waves
        )
    ]
    assert told == [1, 6, 1, 6, 5]


@pytest.mark.parametrize(
    ("N", "K"), [(9216, 4096), (12288, 1536), (10240, 5120), (14336, 8192), (5120, 25600)]
)
def test_no_choice_is_held_to_registers_with_which_its_loop_spills(N: int, K: int) -> None:
    assert MMA_REGISTERS.module is not None
    problem = LinearProblem(1, N, K, pdl=True)
    chosen = MMA_REGISTERS.configure(TARGET, problem)
    (built,) = build_all([build_request(MMA_REGISTERS, TARGET, problem, chosen)])
    geometry = MMA_REGISTERS.module.geometry(TARGET, problem, chosen)
    usage = disassemble(built.path, built.image, "sm_90a", "", geometry).usage
    assert int(usage["stack"].split()[0]) <= 8  # with 16 they took 1.05 to 1.4 times as long
