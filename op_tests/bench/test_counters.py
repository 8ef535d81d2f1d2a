"""The saved counts of gfx950's kernels: what they are to stay within."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from unittest.mock import patch

import pandas as pd
import pytest

from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.registry import find_kernel
from aiter_mx.region import Region
from aiter_mx.sim.program import Dim3, Program, SimOptions
from aiter_mx.sim.report import LaunchReport
from op_tests.bench.common import MEASURED
from op_tests.bench.counters import HBM_BYTES_A_CYCLE, SHAPES, TARGET, name_of, run
from op_tests.bench.counters_before import run_again

LAUNCH_US, CYCLES_A_US = 2.6, 6.5e6 / HBM_BYTES_A_CYCLE


@pytest.fixture
def saved() -> pd.DataFrame:
    return pd.read_csv(MEASURED / "gfx950_simulated" / "counters.csv")


def test_every_kernel_is_counted_and_none_spills(saved: pd.DataFrame) -> None:
    for kernel, (_, problems) in SHAPES.items():
        of_kernel = saved[saved.kernel == kernel]
        assert list(of_kernel.problem) == [name_of(problem) for problem in problems]
        assert (of_kernel.scratch_bytes == 0).all()


@pytest.mark.parametrize("kernel", ["rows", "tiles"])
def test_quantisation_takes_little_more_than_its_bytes(saved: pd.DataFrame, kernel: str) -> None:
    (large,) = saved[
        (saved.kernel == kernel) & saved.problem.str.startswith("M=8192 ")
    ].itertuples()
    assert large.predicted_us <= 1.25 * (LAUNCH_US + large.hbm_cycles / CYCLES_A_US)


def test_few_tokens_give_every_compute_unit_as_much_of_the_weights(saved: pd.DataFrame) -> None:
    """Whether they choose experts of their own or all the same ones."""
    kernels = [kernel for kernel in SHAPES if kernel.endswith(("moe_up gemv", "moe_down gemv"))]
    halves = saved[saved.kernel.isin(kernels)]
    assert len(halves) == 2 * 2 * 6 and (halves.busiest_cu_over_mean <= 1.25).all()
    assert (halves.cus_with_weights >= 240).all() and (halves.dependent_waits <= 4).all()


def test_an_expert_layer_of_one_token_is_predicted_in_little_more_than_its_bytes(
    saved: pd.DataFrame,
) -> None:
    """Of a class 6144 wide, divided among four GPUs and eight."""
    first = saved[saved.kernel == "moe_up gemv"].set_index("problem").predicted_us
    second = saved[saved.kernel == "moe_down gemv"].set_index("problem").predicted_us
    assert first["M=1 N=1536 K=6144"] + second["M=1 N=6144 K=768"] <= 15.8
    assert first["M=1 N=768 K=6144"] + second["M=1 N=6144 K=384"] <= 11.3


def test_few_rows_are_read_few_times_over_where_k_is_split(saved: pd.DataFrame) -> None:
    split = saved[saved.kernel == "mfma_split"].set_index("problem").asked_over_operands
    assert split["M=16 N=2304 K=6144"] <= 2
    assert split["M=64 N=2304 K=6144"] <= 4


@pytest.mark.parametrize(
    ("kernel", "M", "most"), [("mfma", 16, 0.7), ("mfma_split", 16, 0.7), ("mfma_split", 64, 1.0)]
)
def test_addresses_and_lds_of_few_rows_stay_behind_the_operands(
    saved: pd.DataFrame, kernel: str, M: int, most: float
) -> None:
    (counted,) = saved[
        (saved.kernel == kernel) & (saved.problem == f"M={M} N=2304 K=6144")
    ].itertuples()
    assert counted.address_cycles_a_cu <= most * counted.hbm_cycles
    assert counted.lds_cycles_a_cu <= most * counted.hbm_cycles


def test_few_rows_wait_few_times_for_memory(saved: pd.DataFrame) -> None:
    waits = saved.groupby("kernel").dependent_waits.max()
    assert waits["mfma"] <= 2 and waits["mfma_split"] <= 5


def test_gemv_asks_for_weights_at_once(saved: pd.DataFrame) -> None:
    """The one wait is that for the arguments."""
    gemv = saved[saved.kernel == "gemv"]
    assert (gemv.instructions_ahead_of_load <= 40).all() and (gemv.waits_ahead_of_load <= 1).all()


def test_a_grouped_step_leaves_the_address_unit_idle_part_of_its_products(
    saved: pd.DataFrame,
) -> None:
    """They take 2,048 cycles."""
    cycles = saved[saved.kernel == "grouped step"].set_index("problem").address_cycles
    assert cycles["K=4096, scales 16x4 and 16x4"] <= 1100
    assert cycles["K=4096, scales row_major and 16x4"] <= 1300
    assert cycles["K=2880, scales row_major and row_major"] <= 1600


def test_half_a_round_of_tiles_more_takes_less_than_a_round(saved: pd.DataFrame) -> None:
    whole, more = saved[saved.kernel == "grouped last round"].predicted_us
    assert more - LAUNCH_US <= 1.7 * (whole - LAUNCH_US)


def test_gemv_takes_less_than_two_thirds_of_the_address_cycles_that_it_took() -> None:
    compared = pd.read_csv(MEASURED / "gfx950_simulated" / "counters_before.csv")
    of_gemv = compared[compared.kernel == "gemv"]
    assert list(of_gemv.problem) == [name_of(problem) for problem in SHAPES["gemv"][1]]
    assert (of_gemv.share <= 0.65).all()


def test_decode_of_few_rows_is_predicted_in_little_more_than_its_bytes() -> None:
    decode = pd.read_csv(MEASURED / "gfx950_simulated" / "decode.csv")
    few = decode[decode.M <= 4]
    assert len(few) > 300 and (few.predicted_us <= 1.2 * few.ideal_us).all()


def test_a_launch_that_is_run_again_elsewhere_counts_as_much() -> None:
    problem = LinearProblem(2, 40, 544)
    spec = find_kernel("linear", "gfx950", "hip", "gemv")
    told = []

    def noted(
        program: Program,
        kernel: str,
        grid: Dim3,
        block: Dim3,
        kernarg: bytes,
        shared_bytes: int,
        regions: Sequence[Region],
        options: SimOptions,
    ) -> LaunchReport:
        memory = [(vars(r), ctypes.string_at(r.address, r.size_bytes)) for r in regions]
        told.append((program._image, (kernel, grid, block), kernarg, shared_bytes, memory))
        return launch(program, kernel, grid, block, kernarg, shared_bytes, regions, options)

    launch = Program.launch
    with patch.object(Program, "launch", noted):
        report = run(spec, problem, dict(spec.configure(TARGET, problem))).report
    again = run_again(*told[0])
    assert again.address_cycles == report.address_cycles > 0
    assert again.by_class == report.by_class
