"""What every kernel of ``grouped_gemm`` must do: in the simulator, without a GPU, on a GPU.

``op_tests/conformance.py`` says how to add a kernel or a property.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from aiter_mx.kernels.grouped_gemm import GroupedGemmProblem
from op_tests import conformance
from op_tests.conformance import DTYPES, bench_of, each, every_order, in_drawn_orders
from op_tests.grouped.cases import (
    Case,
    Groups,
    Operands,
    assert_groups,
    draw_runs,
    ending_at,
    launch_grouped,
)
from op_tests.grouped.subjects import SUBJECTS, Subject
from op_tests.launches import Out, assert_repeats_on_two_streams, bound, launch, moved, same_bytes
from op_tests.mx_reference import in_e5m2, random_mx, random_mx_groups
from op_tests.operands import NANS, SPREADS, nan_scale_of_zeros, scale_zeros, zero_blocks


class Bench(conformance.Bench):
    """A subject where it is tried."""

    subject: Subject

    def draw(
        self, case: Case, seed: int, exponents: tuple[int, int] = (-6, 6), **nans: float
    ) -> Operands:
        generator = torch.Generator().manual_seed(seed)
        G, options = len(case.groups.ranges), {"scale_exponents": exponents, **nans}
        a = random_mx(case.groups.M, case.K, generator, **options)  # type: ignore[arg-type]
        b, b_scale = random_mx(G * case.N, case.K, generator, **options)  # type: ignore[arg-type]
        return (*a, b.view(G, case.N, case.K), b_scale.view(G, case.N, case.K // 32))

    def few(self, **options: Any) -> Iterator[tuple[Case, Operands]]:
        for seed, case in enumerate(self.subject.few):
            yield case, self.draw(case, seed, **options)

    def bias(self, case: Case, seed: int) -> Tensor | None:
        if case.bias == "none":
            return None
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(len(case.groups.ranges), case.N, generator=generator) * 100
        return drawn.to(DTYPES[case.bias])

    def launch(self, case: Case, drawn: Operands, bias: Tensor | None = None) -> Tensor:
        if bias is None and case.bias != "none":
            bias = self.bias(case, 0)
            assert bias is not None
            bias.zero_()
        dtype = DTYPES[case.dtype or "bf16"]
        more = (case.groups, bias, dtype, case.cu_num, case.layouts)
        return launch_grouped(self.kernel, self.device, case.config, drawn, *more)

    def assert_right(self, case: Case, drawn: Operands, bias: Tensor | None = None) -> Tensor:
        """The result, once it is compared with float64."""
        out = self.launch(case, drawn, bias)
        self.assert_close(out, drawn, case.groups, bias)
        return out

    def assert_close(
        self, out: Tensor, drawn: Operands, groups: Groups, bias: Tensor | None = None
    ) -> None:
        subject = self.subject
        assert_groups(
            *(out, drawn, groups, bias, subject.multiplied),
            accumulation_error=subject.accumulation_error,
            rescaling_error=subject.rescaling_error,
            underflow=subject.underflow,
        )


bench = bench_of(Bench)


def those_of(layout: str) -> list[Subject]:
    """Kernels that cover groups of this layout."""
    return [subject for subject in SUBJECTS if layout in subject.layouts]


@each(SUBJECTS, group=lambda subject: range(len(subject.groups)))
def test_any_groups_shape_and_configuration_match_float64(
    bench: Bench, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed, case, draw in in_drawn_orders(monkeypatch, group, bench.subject.groups[group]):
        of_fp16, own = case.dtype == "fp16", bench.subject.exponents
        ranges = [(-12, -6) if of_fp16 else draw.choice([(-20, 20), (-6, 6)])]
        ranges += [(low - 9, high - 9) for low, high in own] if of_fp16 else own
        for exponents in ranges:
            bench.assert_right(case, bench.draw(case, seed, exponents), bench.bias(case, seed))


@each(SUBJECTS)
def test_a_group_of_every_size_matches_float64(bench: Bench) -> None:
    case = bench.subject.every_size
    bench.assert_right(case, bench.draw(case, 1))


@each(SUBJECTS, dtype=DTYPES)
def test_results_and_biases_of_every_dtype_match_float64(bench: Bench, dtype: str) -> None:
    if dtype not in bench.subject.dtypes:
        pytest.skip(f"{bench.subject.name} makes no {dtype} results")
    for bias in bench.subject.biases:
        case = bench.subject.few[0]._replace(dtype=dtype, bias=bias)
        exponents = (-12, -6) if dtype == "fp16" else (-6, 6)
        bench.assert_right(case, bench.draw(case, 2, exponents), bench.bias(case, 2))


@each(SUBJECTS, spread_of=SPREADS)
def test_scales_over_their_whole_range_are_exact(bench: Bench, spread_of: str) -> None:
    of_a, of_b = SPREADS[spread_of]
    for seed, case in enumerate(bench.subject.few):
        a, a_scale, _, _ = bench.draw(case, seed, of_a)
        _, _, b, b_scale = bench.draw(case, seed + 100, of_b)
        bench.assert_right(case, (a, a_scale, b, b_scale))


@each([s for s in SUBJECTS if "e5m2" in s.a_formats], spread=("usual", *SPREADS))
def test_rows_in_e5m2_match_float64(bench: Bench, spread: str) -> None:
    of_a, of_b = SPREADS.get(spread, ((-6, 6), (-6, 6)))
    for seed, case in enumerate(bench.subject.few):
        a, a_scale, *_ = bench.draw(case, seed, of_a, nan_payload=1e-5)
        *_, b, b_scale = bench.draw(case, seed + 100, of_b)
        a = in_e5m2(a, infinite=seed == 0 and spread == "usual")
        bench.assert_right(case, (a, a_scale, b, b_scale))


@each(SUBJECTS)
def test_zeros_of_any_scale_add_nothing(bench: Bench) -> None:
    generator = torch.Generator().manual_seed(8)
    for case, (a, a_scale, b, b_scale) in bench.few():
        zero_blocks(a, a_scale, generator)
        zero_blocks(b, b_scale, generator)
        bench.assert_right(case, (a, a_scale, b, b_scale))


@each(SUBJECTS)
def test_zeros_under_small_scales_are_multiplied_as_others_are(bench: Bench) -> None:
    """Quantisation makes such blocks of zeros: what bf16 does not cover is another sum."""
    generator = torch.Generator().manual_seed(9)
    for case, (a, a_scale, b, b_scale) in bench.few():
        zero_blocks(a, a_scale, generator)
        zero_blocks(b, b_scale, generator)
        found = []
        for scale in (0, 127):
            scale_zeros(a, a_scale, scale)
            scale_zeros(b, b_scale, scale)
            found.append(bench.launch(case, (a, a_scale, b, b_scale)))
        assert torch.equal(*found)


@each(SUBJECTS)
def test_a_few_scales_far_from_the_others_leave_these_alone(bench: Bench) -> None:
    for case, (a, a_scale, b, b_scale) in bench.few():
        b_scale[0, 5, -3], b_scale[0, case.N // 2] = 250, 1
        a_scale[case.groups.M // 3, 3], a_scale[case.groups.M // 2] = 200, 0
        a_scale[case.groups.M // 2 + 1] = 240
        bench.assert_right(case, (a, a_scale, b, b_scale))


@each(SUBJECTS, nans=range(len(NANS)))
def test_nan_reaches_its_outputs_alone(
    bench: Bench, nans: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AITER_MX_SIM_FINITE_SCALES", "1")
    outs = [bench.assert_right(case, drawn) for case, drawn in bench.few(**NANS[nans])]
    shares = [out.isnan().float().mean() for out in outs]
    assert any(0 < share < 1 for share in shares), "the draw must show both outcomes"


@each(SUBJECTS)
def test_a_nan_scale_counts_even_where_the_payload_is_zero(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AITER_MX_SIM_FINITE_SCALES", "1")
    case = bench.subject.few[1]
    row, column, blocks = case.groups.M // 2, case.N // 2, case.K // 32
    for block in range(blocks):
        a, a_scale, b, b_scale = bench.draw(case, block)
        nan_scale_of_zeros(a, a_scale, row, blocks - 1 - block)
        nan_scale_of_zeros(b, b_scale, 0, column, block)
        nans = bench.launch(case, (a, a_scale, b, b_scale)).isnan()
        assert nans[:, column].all() and nans[row].all()
        assert nans.sum() == case.groups.M + case.N - 1


@each(SUBJECTS)
def test_scales_at_any_address_are_read_rightly(bench: Bench) -> None:
    for case, (a, a_scale, b, b_scale) in bench.few():
        expected = bench.launch(case, (a, a_scale, b, b_scale))
        for shift in (1, 2, 3, 4, 8):
            views = [moved(t.to(bench.device), shift) for t in (a_scale, b_scale)]
            assert same_bytes(bench.launch(case, (a, views[0], b, views[1])), expected)


@each(SUBJECTS)
def test_rows_beyond_a_group_do_not_reach_it(bench: Bench) -> None:
    """Its last tile also holds rows of others, and k past the end is the next row's beginning."""
    case = bench.subject.few[0]._replace(
        groups=Groups([(3, 41), (60, 60)], "ranges", "i64", 90), K=96
    )
    a, a_scale, b, b_scale = bench.draw(case, 3)
    a.view(torch.uint8)[41:] = 0x7F
    a_scale[41:] = 255
    bench.assert_right(case, (a, a_scale, b, b_scale))


@each(SUBJECTS)
def test_bounds_that_make_no_sense_touch_nothing_else(bench: Bench) -> None:
    wild = Groups(
        [(-7, 9), (9, 4), (30, 1 << 40), (1 << 33, 1 << 34), (60, -3)], "ranges", "i64", 50
    )
    case = bench.subject.few[0]._replace(groups=wild)
    drawn = bench.draw(case, 4)
    cut = replace(wild, ranges=[(0, 9), (9, 9), (30, 50), (50, 50), (50, 50)])
    bench.assert_close(bench.launch(case, drawn), drawn, cut)


@each(those_of("unpadded"))
def test_padded_groups_are_stored_without_their_padding(bench: Bench) -> None:
    lens, starts = (5, 0, 130, 33, 257), (128, 0, 384, 256, 640)
    ranges = [(start, start + rows) for start, rows in zip(starts, lens, strict=True)]
    for at, few in enumerate(bench.subject.few):
        groups = Groups(ranges, "unpadded", ("i32", "i64")[at % 2], 1024)
        dtype, bias = (("bf16", "none"), ("fp32", bench.subject.biases[-1]))[at % 2]
        case = few._replace(groups=groups, dtype=dtype, bias=bias)
        drawn = bench.draw(case, at, nan_payload=1e-4 * (at % 3))
        padding = torch.ones(groups.M, dtype=torch.bool)
        for start, end in ranges:
            padding[start:end] = False
        drawn[0].view(torch.uint8)[padding], drawn[1][padding] = 0x7F, 255
        bench.assert_right(case, drawn, bench.bias(case, at))


@each(those_of("runs"), of=[(3, 11, 64), (2, 9, 128), (3, 150, 1)])
def test_groups_of_several_ranges_are_as_if_each_were_one(
    bench: Bench, of: tuple[int, int, int]
) -> None:
    """In any order, with nobody's rows between them; also of more ranges than a wave has lanes."""
    for at, few in enumerate(bench.subject.few):
        case = few._replace(groups=(groups := draw_runs(random.Random(at), *of)))
        if len(bench.subject.biases) > 1:  # else the cases have them, and nothing compiles anew
            dtype, bias = (("bf16", "none"), ("fp32", bench.subject.biases[-1]))[at % 2]
            case = case._replace(dtype=dtype, bias=bias)
        a, a_scale, *weights = bench.draw(case, at, nan_payload=1e-4 * (at % 3))
        shared, given = [t[: of[0]] for t in weights], bench.bias(case, at)
        each_own, bias_of_each = [t[list(groups.owners)] for t in shared], None
        if given is not None:
            given, bias_of_each = given[: of[0]], given[list(groups.owners)]
        out = bench.launch(case, (a, a_scale, *shared), given)
        apart = case._replace(groups=groups.as_groups)
        assert same_bytes(out, bench.assert_right(apart, (a, a_scale, *each_own), bias_of_each))


@each(those_of("unpadded"))
def test_places_that_make_no_sense_harm_no_memory(bench: Bench) -> None:
    few = bench.subject.few[0]
    drawn = bench.draw(few._replace(groups=Groups([(0, 0)] * 4, "ranges", "i64", 300)), 0)
    problem = GroupedGemmProblem(300, few.N, few.K, 4, layout="unpadded", index="i64", out_rows=70)
    for starts in ([0, 128, 128, 256], [-5, 1 << 40, 290, 17]):
        for offs in ([0, 5, 90, 300, 1 << 35], [60, 9, -1 << 33, 500, 20], [70, 70, 0, 70, 0]):
            bounds = (torch.tensor(each) for each in (starts, offs))
            tensors = (*drawn, None, Out((70, few.N), torch.bfloat16), *bounds)
            launch(bench.kernel, bench.device, problem, few.config, tensors)


@each(SUBJECTS)
def test_groups_without_any_rows_write_nothing(bench: Bench) -> None:
    for ends in ([0, 0, 0], [0, 0, 1]):
        case = bench.subject.few[0]._replace(groups=ending_at(ends, 70))
        bench.assert_right(case, bench.draw(case, 5))


@each(SUBJECTS, "sim")
def test_results_are_bitwise_the_same_whatever_the_order_of_waves(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And on however many compute units."""
    cu_nums = (1, 3, 8, 16, 256)
    for case in bench.subject.ordered:
        drawn = bench.draw(case, 5)
        first, *others = [
            bench.launch(case._replace(cu_num=cu_nums[at]), drawn)
            for at, _ in enumerate(every_order(monkeypatch))
        ]
        assert_groups(first, drawn, case.groups)
        assert all(same_bytes(first, other) for other in others)


@each(SUBJECTS, "gpu")
def test_results_are_bitwise_equal_over_launches_on_two_streams(bench: Bench) -> None:
    """One shape, so one plan; other values, so that a shared workspace would show."""
    M, N, K, calls = 500, 160, 4096, []
    ends = torch.tensor([100, 100, M], dtype=torch.int32, device="cuda")
    for seed in range(2):
        here = [t.cuda() for t in random_mx_groups(M, 3, N, K, seed)]
        calls.append([*here, None, Out((M, N), torch.bfloat16), None, ends])
    problem = GroupedGemmProblem(M, N, K, 3)
    assert_repeats_on_two_streams(bound(bench.kernel, bench.device, problem), calls)
