"""What every kernel of the linear must do, in the simulator, without a GPU, and with ``-m gpu``.

``op_tests/conformance.py`` says how to add a kernel or a property.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from aiter_mx.kernels.linear import LinearProblem
from op_tests import conformance
from op_tests.conformance import DTYPES, bench_of, each, every_order, in_drawn_orders
from op_tests.launches import Out, assert_repeats_on_two_streams, bound, same_bytes
from op_tests.linear.launches import (
    chain_of_layers,
    launch_beyond_4_gib,
    launch_linear,
)
from op_tests.linear.operands import (
    Operands,
    assert_no_product_is_missing,
    bias_as_large_as_outputs,
    operands,
    operands_that_all_count,
    spread,
    with_nan_at,
    with_nan_scales_of_zeros,
    with_opposite_scales,
    with_rows_far_apart,
    with_scales_moved,
    with_two_scales,
    with_zero_blocks,
    with_zero_rows,
)
from op_tests.linear.subjects import SUBJECTS, Case, Subject
from op_tests.mx_reference import assert_close_to_reference, linear_reference64, round_once
from op_tests.operands import NANS, SPREADS, Exponents

MOST_ROWS_OF_W = 300  # where scales are out of the ordinary, as they may be in any row


class Bench(conformance.Bench):
    """A subject where it is tried."""

    subject: Subject

    def launch(
        self, case: Case, drawn: Operands, bias: torch.Tensor | None = None, dtype: str = ""
    ) -> torch.Tensor:
        chosen = DTYPES[dtype or case.dtype or self.subject.dtypes[0]]
        return launch_linear(
            self.kernel, self.device, case.config, drawn, bias, chosen, case.cu_num
        )

    def assert_right(
        self, case: Case, drawn: Operands, bias: torch.Tensor | None = None, dtype: str = ""
    ) -> None:
        self.assert_close(self.launch(case, drawn, bias, dtype), drawn, bias)

    def assert_close(
        self,
        out: torch.Tensor,
        drawn: Operands,
        bias: torch.Tensor | None = None,
        are_all: bool = True,
    ) -> None:
        """``are_all``: whether all rows of the operands are there, as they are multiplied."""
        subject = self.subject
        errors = {
            "accumulation_error": subject.accumulation_error,
            "underflow": subject.underflow,
        }
        if subject.multiplied is not None and are_all:
            assert_close_to_reference(out, *subject.multiplied(drawn), bias, **errors)
        rescaling = subject.rescaling_error
        assert_close_to_reference(out, *drawn, bias, rescaling_error=rescaling, **errors)

    def exact(self, drawn: Operands, bias: torch.Tensor) -> torch.Tensor:
        """The sums before they are rounded."""
        multiplied = self.subject.multiplied
        return linear_reference64(*(multiplied(drawn) if multiplied else drawn), bias)

    def few(
        self, scale_exponents: Exponents = (-20, 20), **options: Any
    ) -> Iterator[tuple[Case, Operands]]:
        """Cases of few rows of w, and operands; of the subject's exponents too that lie within."""
        low, high = scale_exponents
        more = [of for of in self.subject.exponents if low <= of[0] and of[1] <= high]
        for seed, case in enumerate(self.subject.few):
            N = min(case.N, MOST_ROWS_OF_W)
            for exponents in (scale_exponents, *more):
                drawn = operands(case.M, N, case.K, seed, scale_exponents=exponents, **options)
                yield case, drawn


bench = bench_of(Bench)


@each(SUBJECTS, group=lambda subject: range(len(subject.groups)))
def test_any_shape_and_configuration_match_float64(
    bench: Bench, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scales far apart, and near each other; in the simulator in one order of waves or another."""
    subject = bench.subject
    of = (bench.device.type == "cpu" and subject.simulated) or subject.groups
    for seed, case, _ in in_drawn_orders(monkeypatch, group, of[group]):
        of_fp16, own = case.dtype == "fp16", subject.exponents
        ranges = [(-12, -6)] if of_fp16 else [(-20, 20), (-6, 6)]
        ranges += [(low - 9, high - 9) for low, high in own] if of_fp16 else own
        if bench.device.type == "cpu":
            ranges = [ranges[seed % len(ranges)]]
        for exponents in ranges:
            drawn = operands(case.M, case.N, case.K, 100 * group + seed, scale_exponents=exponents)
            bias = None
            if case.bias != "none":
                bias = bias_as_large_as_outputs(drawn, DTYPES[case.bias], seed)
            bench.assert_right(case, drawn, bias)


@each(SUBJECTS)
def test_every_m_matches_float64(bench: Bench) -> None:
    subject, (N, K) = bench.subject, bench.subject.width
    ranges = [(-6, 6), *subject.exponents]
    for M in range(subject.least_rows, subject.most_rows + 1):
        drawn = operands(M, N, K, M, scale_exponents=ranges[M % len(ranges)])
        bench.assert_right(Case(M, N, K, subject.of_rows(M)), drawn, dtype="bf16")


@each(SUBJECTS, spread_of=SPREADS)
def test_scales_over_their_whole_range_are_exact(bench: Bench, spread_of: str) -> None:
    for seed, case in enumerate(bench.subject.few):
        N = min(case.N, MOST_ROWS_OF_W)
        drawn = spread(case.M, N, case.K, seed, *SPREADS[spread_of])
        dtypes = [bench.subject.dtypes[0]]
        if bench.device.type != "cpu" or case == bench.subject.few[-1]:  # each compiles anew
            dtypes.append("bf16")
        for dtype in dict.fromkeys(dtypes):
            bench.assert_right(case, drawn, dtype=dtype)


@each(SUBJECTS)
def test_extreme_scales_that_cancel_are_exact(bench: Bench) -> None:
    for case, ordinary in bench.few(scale_exponents=(-3, 3)):
        for shift in (110, 69, 65, 62, 60, 59, 25, -25, -59, -60, -62, -65, -69, -110):
            bench.assert_right(case, with_opposite_scales(ordinary, shift))


@each(SUBJECTS, top=(-56, -55, 0, 63, 64))
def test_scales_at_the_ends_of_what_fp16_takes_are_exact(bench: Bench, top: int) -> None:
    for case, drawn in bench.few(scale_exponents=(0, 1)):
        for octaves in (21, 22):
            for moved in with_two_scales(drawn, top, octaves):
                bench.assert_right(case, moved)


@each(SUBJECTS)
def test_zeros_of_any_scale_add_nothing(bench: Bench) -> None:
    generator = torch.Generator().manual_seed(8)
    for case, drawn in bench.few(scale_exponents=(-6, 6)):
        bench.assert_right(case, with_zero_blocks(drawn, generator))
        bench.assert_right(case, with_zero_rows(drawn))


@each(SUBJECTS)
def test_a_row_of_scales_far_apart_leaves_the_others_alone(bench: Bench) -> None:
    for case, drawn in bench.few(scale_exponents=(-3, 3)):
        bench.assert_right(case, with_rows_far_apart(drawn))


@each(SUBJECTS)
def test_nan_payloads_and_scales_reach_their_outputs_alone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AITER_MX_SIM_FINITE_SCALES", "1")
    shares = []
    for options in NANS:
        for case, drawn in bench.few(**options):
            out = bench.launch(case, drawn)
            bench.assert_close(out, drawn)
            shares.append(out.isnan().float().mean())
    assert any(0 < share < 1 for share in shares), "the draw must show both outcomes"


def assert_one_row_and_column_are_nan(out: torch.Tensor, row: int, column: int) -> None:
    M, N = out.shape
    nans = out.isnan()
    assert nans[row].all() and nans[:, column].all() and nans.sum() == M + N - 1


@each(SUBJECTS)
def test_nan_payloads_at_the_ends_of_a_row_do_not_reach_its_neighbours(bench: Bench) -> None:
    for case, drawn in bench.few(scale_exponents=(-6, 6)):
        M, N = len(drawn[0]), len(drawn[2])
        row, column = M // 2, N // 2
        for k in (0, case.K - 1):
            out = bench.launch(case, with_nan_at(drawn, (row, k), (column, k)))
            assert_one_row_and_column_are_nan(out, row, column)


@each(SUBJECTS)
def test_a_nan_scale_counts_even_where_the_payload_is_zero(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AITER_MX_SIM_FINITE_SCALES", "1")
    for case, drawn in bench.few(scale_exponents=(-6, 6)):
        row, column, blocks = len(drawn[0]) // 2, len(drawn[2]) // 2, case.K // 32
        for block in range(0, blocks, 1 + blocks // 50):
            of_x, of_w = (row, blocks - 1 - block), (column, block)
            out = bench.launch(case, with_nan_scales_of_zeros(drawn, of_x, of_w))
            assert_one_row_and_column_are_nan(out, row, column)


@each(SUBJECTS)
def test_scales_at_any_address_are_read_rightly(bench: Bench) -> None:
    for case, drawn in bench.few():
        for shift in (1, 2, 3, 4, 8):
            moved = with_scales_moved(drawn, shift, bench.device)
            bench.assert_close(bench.launch(case, moved), drawn)


@each(SUBJECTS, dtype=DTYPES)
def test_outputs_and_biases_of_every_dtype_match_float64(bench: Bench, dtype: str) -> None:
    """Where the kernel does not make such results, biases of that dtype alone."""
    makes = dtype in bench.subject.dtypes
    for case in bench.subject.with_bias:
        exponents = (-12, -6) if makes and dtype == "fp16" else (-6, 6)
        drawn = operands(case.M, case.N, case.K, 5, scale_exponents=exponents)
        for name in DTYPES if makes else (dtype,):
            bias = bias_as_large_as_outputs(drawn, DTYPES[name], 6)
            bench.assert_right(case, drawn, bias, dtype if makes else "")
        if makes:
            bench.assert_right(case, drawn, None, dtype)


@each(SUBJECTS, dtype=DTYPES)
def test_a_sum_is_rounded_to_nearest_with_ties_to_even(bench: Bench, dtype: str) -> None:
    """One product and one bias whose fp32 sum is exact: the result is the rounded sum itself."""
    if dtype not in bench.subject.dtypes:
        pytest.skip(f"{bench.subject.name} makes no {dtype} results")
    for case in bench.subject.with_bias:
        drawn = operands(case.M, case.N, case.K, 8, scale_exponents=(-3, 3))
        drawn[0].view(torch.uint8)[:, 1:] = 0
        generator = torch.Generator().manual_seed(9)
        bias = torch.randint(-(2**11), 2**11, (case.N,), generator=generator) / 2**3
        out = bench.launch(case, drawn, bias.float(), dtype)
        exact = bench.exact(drawn, bias.float())
        representable = exact.float().double() == exact
        assert representable.float().mean() > 0.5
        expected = round_once(exact, DTYPES[dtype])
        assert torch.equal(out[representable], expected[representable])


@each(SUBJECTS)
def test_no_product_is_missing_however_long_k_is(bench: Bench) -> None:
    cases = [case for group in bench.subject.groups for case in group]
    for case in cases:
        if case.M >= 8 and case.N >= 100 and case.config is not None:
            # Too low for a larger scale, and high enough for one.
            for octave in (0, 4) if bench.subject.multiplied else (0,):
                drawn = operands_that_all_count(case.M, case.N, case.K, case.M, octave)
                # With a bias where the case has one, so that no kernel is compiled without.
                zeros = torch.zeros(case.N, dtype=DTYPES.get(case.bias))
                bias = None if case.bias == "none" else zeros
                out = bench.launch(case, drawn, bias, case.dtype or "bf16")
                assert_no_product_is_missing(out, drawn)


@each(SUBJECTS, "sim")
def test_results_are_bitwise_the_same_whatever_the_order_of_waves(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    for case in bench.subject.few[-2:]:
        drawn = operands(case.M, case.N, case.K, 3)
        runs = [bench.launch(case, drawn, dtype="fp32") for _ in every_order(monkeypatch)]
        bench.assert_close(runs[0], drawn)
        assert all(same_bytes(runs[0], run) for run in runs)


@each(SUBJECTS, "gpu", pdl=(False, True))
def test_results_are_bitwise_equal_over_launches_on_two_streams(bench: Bench, pdl: bool) -> None:
    for M, N, K, config in bench.subject.repeats:
        run = bound(bench.kernel, bench.device, LinearProblem(M, N, K, pdl=pdl), config)
        here = [t.cuda() for t in operands(M, N, K, 1)]
        call = (*here, None, Out((M, N), torch.bfloat16))
        assert_repeats_on_two_streams(run, [call, call])


@each(SUBJECTS, "gpu", captured=(False, True))
def test_a_chain_of_overlapping_launches_reads_what_the_one_ahead_wrote(
    bench: Bench, captured: bool
) -> None:
    subject = bench.subject
    for M, config in (*((M, None) for M in subject.chained), *subject.chained_in):
        chain = chain_of_layers(bench.kernel, M, config)
        expected = chain(False)
        if not captured:
            assert all(torch.equal(chain(True), expected) for _ in range(20))
            continue
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = chain(True)
        for _ in range(20):
            got.fill_(float("nan"))
            graph.replay()
            assert torch.equal(got, expected)


@each(SUBJECTS, "gpu")
def test_weights_beyond_4_gib_are_addressed_rightly(bench: Bench) -> None:
    for M, K in bench.subject.beyond_4_gib:
        dtype = "fp32" if "fp32" in bench.subject.dtypes else "bf16"
        out, drawn = launch_beyond_4_gib(bench.kernel, M, K, dtype)
        bench.assert_close(out, drawn, are_all=False)
