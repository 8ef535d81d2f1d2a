"""What the host does for Hopper's ``mma_registers`` kernel of the linear."""

from __future__ import annotations

from itertools import product

import pytest

from aiter_mx.cli.disassembly import disassemble
from aiter_mx.jit.build import build_all
from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.registry import find_kernel, in_line
from aiter_mx.kernels.spec import combinations
from aiter_mx.launch import build_request
from aiter_mx.target import hardware
from op_tests.linear.subjects.mma_sm90 import MMA_REGISTERS_CASES as CASES

MMA_REGISTERS = find_kernel("linear", "sm_90a", "hip", "mma_registers")
TARGET = hardware("sm_90a")


def config(rows: int, waves: int, unroll: int, split: int = 1) -> dict[str, int]:
    return {"rows": rows, "waves": waves, "unroll": unroll, "split": split}


@pytest.mark.parametrize(("N", "K"), [(1, 32), (300, 96), (2304, 6144), (9216, 28672), (70, 65568)])
def test_no_candidate_leaves_a_wave_idle(N: int, K: int) -> None:
    for M, pdl in product((1, 4, 5, 8, 9, 16), (False, True)):
        for chosen in MMA_REGISTERS.candidates(TARGET, LinearProblem(M, N, K, pdl=pdl)):
            assert chosen["waves"] * chosen["split"] <= -(-K // 128)


def test_every_output_has_a_workgroup_and_no_workgroup_is_without() -> None:
    assert MMA_REGISTERS.module is not None
    for M, N, K, chosen, *_ in CASES:
        grid = MMA_REGISTERS.module.geometry(TARGET, LinearProblem(M, N, K), chosen).grid
        clusters, rest = divmod(grid[0], chosen["split"])
        assert rest == 0
        assert clusters * chosen["rows"] >= N > (clusters - 1) * chosen["rows"]


def test_rounds_are_called_even_only_where_each_has_all_of_its_chunks() -> None:
    assert MMA_REGISTERS.module is not None
    for M, N, K, chosen, *_ in CASES:
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
    for M in (1, 2, 8, 16):
        assert first(LinearProblem(M, 3072, 768)) == "mma_registers"
        assert first(LinearProblem(M, 384, 384)) == "mma_registers"
    assert first(LinearProblem(8, 2048, 512, pdl=True)) == "mma_registers"
    assert first(LinearProblem(2, 1536, 6144)) == "mma_registers"
    assert first(LinearProblem(4, 1536, 6144)) == "mma_registers"
    for M in (1, 4, 8, 9):
        own = first(LinearProblem(M, N, K, x_dtype="bf16")) == "mma_registers"
        assert own is (M <= 8)


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
