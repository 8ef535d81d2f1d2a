"""The saved counts of gfx950's kernels: what they are to stay within."""

from __future__ import annotations

import pandas as pd
import pytest

from op_tests.bench.common import MEASURED
from op_tests.bench.counters import HBM_BYTES_A_CYCLE, SHAPES, name_of

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
    halves = saved[saved.kernel.isin(["moe_up gemv", "moe_down gemv"])]
    assert (halves.busiest_cu_over_mean <= 1.25).all()
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
