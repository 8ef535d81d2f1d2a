"""What every kernel of ``promoted_gemm`` must do (``op_tests/conformance.py`` adds kernels)."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from aiter_mx.kernels.promoted_gemm import PromotedGemmProblem
from aiter_mx.kernels.promoted_gemm.wgmma_fp8_sm90 import ACCUMULATION_ERROR
from aiter_mx.kernels.registry import find_kernel
from aiter_mx.kernels.spec import Config
from aiter_mx.launch import build_request
from aiter_mx.target import hardware
from op_tests import conformance
from op_tests.conformance import (
    DTYPES,
    bench_of,
    each,
    every_order,
    in_drawn_orders,
    named,
)
from op_tests.grouped.cases import (
    Groups,
    draw_groups,
    draw_runs,
    ending_at,
    of_every_size,
    one_group,
)
from op_tests.launches import (
    Out,
    assert_repeats_on_two_streams,
    bound,
    is_poison,
    launch,
    same_bytes,
)
from op_tests.spills import assert_no_spills

Operands = tuple[Tensor, Tensor, Tensor, Tensor]
HALF_ULP = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-23}
LEAST = {"bf16": 2.0**-130, "fp16": 2.0**-24, "fp32": 2.0**-144}
"""What may be lost below the least normal numbers, of sums and of their rounding."""


class Case(NamedTuple):
    """Groups, the other sizes, the configuration, and whether scales lie column by column."""

    groups: Groups
    N: int
    K: int
    config: Config | None = None
    dtype: str = "bf16"
    turned: bool = False
    cu_num: int | None = None


@dataclass(frozen=True)
class Subject(conformance.Subject):
    """A kernel, and what each property is tried with.

    Attributes:
        groups: cases of any groups, shape and configuration.
        few: cases for properties that draw operands of many kinds.
        every_size: a group of every size.
        dtypes: of results.
        error: what sums may be off, of the sum of their products' magnitudes.
    """

    op: str = field(default="promoted_gemm", kw_only=True)
    groups: Sequence[Case]
    few: Sequence[Case]
    every_size: Case
    dtypes: Sequence[str]
    error: float


config_of = named("tile_m", "cluster")


def _drawn(configs: Sequence[Config | None], dtypes: Sequence[str], count: int) -> list[Case]:
    draw, cases = random.Random(1), []
    for seed in range(count):
        config, dtype = configs[seed % len(configs)], dtypes[seed % len(dtypes)]
        N, K = 32 * draw.choice([1, 3, 4, 5, 8, 9, 19]), 32 * draw.choice([1, 3, 4, 5, 8, 13, 33])
        tile = config["tile_m"] if config else 32
        groups, cu_num = draw_groups(draw, tile), draw.choice([None, 2, 4, 8])
        cases.append(Case(groups, N, K, config, dtype, draw.random() < 0.5, cu_num))
    return cases


ON_HOPPER = [config_of(*values) for values in ((64, 1), (128, 2), (256, 2), (128, 1), (64, 2))]
SUBJECTS = (
    Subject(
        "wgmma_fp8",
        ("sm_90a",),
        [
            *_drawn(ON_HOPPER, ("bf16", "fp16"), 80),
            Case(ending_at([700, 701, 1500], 1600), 1056, 2048, config_of(256, 2)),
        ],
        few=[
            Case(one_group(70), 96, 160, config_of(64, 1)),
            Case(one_group(150), 160, 416, config_of(128, 2), turned=True),
            Case(one_group(300), 288, 352, config_of(256, 2), "fp16"),
        ],
        every_size=Case(of_every_size(70), 96, 288, config_of(64, 1)),
        dtypes=("bf16", "fp16"),
        error=ACCUMULATION_ERROR,
    ),
    Subject(
        "mfma",
        ("sim", "gfx950"),
        [
            *_drawn([{"tile_m": tile} for tile in (64, 128, 256)], ("bf16", "fp32", "fp16"), 9),
            Case(ending_at([65, 66, 200], 210), 288, 416, {"tile_m": 64}, "fp32", cu_num=1),
        ],
        few=[
            Case(one_group(37), 160, 160, {"tile_m": 64}, "fp32", cu_num=1),
            Case(one_group(130), 96, 416, {"tile_m": 128}, turned=True),
            Case(one_group(140), 160, 288, {"tile_m": 256}, "fp32"),
        ],
        every_size=Case(of_every_size(24), 64, 288, {"tile_m": 64}, "fp32"),
        dtypes=tuple(DTYPES),
        error=2.0**-20,
    ),
    Subject(
        "reference",
        ("torch",),
        _drawn([None], ("bf16", "fp32"), 10),
        few=[Case(one_group(20), 64, 288, None, "fp32", turned=True)],
        every_size=Case(of_every_size(12), 32, 160, None, "fp32"),
        dtypes=tuple(DTYPES),
        error=2.0**-30,
        backend="torch",
    ),
)


class Bench(conformance.Bench):
    """A subject where it is tried."""

    subject: Subject

    def few(self) -> Iterator[tuple[Case, Operands]]:
        for seed, case in enumerate(self.subject.few):
            yield case, draw(case, seed)

    def launch(self, case: Case, drawn: Operands) -> Tensor:
        a, a_scale, b, b_scale = drawn
        masked = case.groups.told == "masked"
        (M, K), (G, N, _) = a.shape, b.shape
        strides = {}
        if case.turned:
            rows = M // G if masked else M
            a_scale = a_scale.view(-1, rows, a_scale.shape[-1]).transpose(1, 2).contiguous()
            b_scale = b_scale.transpose(1, 2).contiguous()
            strides = dict(zip(("a_group", "a_step", "a_row"), a_scale.stride(), strict=True))
            strides |= zip(("b_group", "b_step", "b_block"), b_scale.stride(), strict=True)
        layout = case.groups.told if case.groups.told in ("masked", "runs") else "jagged"
        problem = PromotedGemmProblem(
            *(M, N, K, G, case.dtype, layout, case.groups.index),
            **strides,
            run_rows=case.groups.run_rows,
        )
        tensors = (a, a_scale, b, b_scale, Out((M, N), DTYPES[case.dtype]), *case.groups.bounds())
        (out,) = launch(self.kernel, self.device, problem, case.config, tensors, case.cu_num)
        return out

    def assert_right(self, case: Case, drawn: Operands) -> Tensor:
        """The result, once it is compared with float64."""
        out = self.launch(case, drawn)
        assert_groups(out, case, drawn, self.subject.error)
        return out


bench = bench_of(Bench)


def draw(case: Case, seed: int) -> Operands:
    """Payloads over the whole e4m3 range but NaN; scales that are no powers of two."""
    generator = torch.Generator().manual_seed(seed)
    M, N, K, G = case.groups.M, case.N, case.K, len(case.groups.ranges)

    def payload(*shape: int) -> Tensor:
        drawn = torch.randint(0, 0x7F, shape, generator=generator, dtype=torch.uint8)
        drawn |= torch.randint(0, 2, shape, generator=generator, dtype=torch.uint8) << 7
        return drawn.view(torch.float8_e4m3fn)

    def scale(*shape: int) -> Tensor:
        return torch.exp2(torch.rand(shape, generator=generator) * 8 - 14)

    steps = -(-K // 128)
    return payload(M, K), scale(M, steps), payload(G, N, K), scale(G, -(-N // 128), steps)


def exact(payload: Tensor, scale: Tensor) -> Tensor:
    """Values in float64, of scales for each row and step."""
    every = scale.double().repeat_interleave(128, -1)[..., : payload.shape[-1]]
    return payload.double() * every


def assert_groups(out: Tensor, case: Case, drawn: Operands, bound_of_error: float) -> None:
    """Every group's rows are right, and all others as they were."""
    a, a_scale, b, b_scale = drawn
    untouched = torch.ones(len(out), dtype=torch.bool)
    largest = torch.finfo(out.dtype).max
    for g, (start, end) in enumerate(case.groups.ranges):
        if start >= end:
            continue
        untouched[start:end] = False
        x = exact(a[start:end], a_scale[start:end])
        w = exact(b[g], b_scale[g].repeat_interleave(128, 0)[: case.N])
        wanted, most = x @ w.T, x.abs() @ w.T.abs()
        error = (out[start:end].double() - wanted).abs()
        allowed = bound_of_error * most + HALF_ULP[case.dtype] * wanted.abs() + LEAST[case.dtype]
        fits = (most < largest / 2) & wanted.isfinite()
        assert (error <= allowed)[fits].all(), f"{case}: {float((error / allowed)[fits].max())}"
        beyond = wanted.abs() > largest * (1 + 2 * bound_of_error)
        assert not out[start:end][beyond].isfinite().any()
        assert torch.equal(out[start:end].isnan(), wanted.isnan())
    assert is_poison(out[untouched]), "wrote between groups"


@each(SUBJECTS)
def test_any_groups_shape_and_configuration_match_float64(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed, case, _ in in_drawn_orders(monkeypatch, 0, bench.subject.groups):
        bench.assert_right(case, draw(case, seed))


@each(SUBJECTS)
def test_a_group_of_every_size_matches_float64(bench: Bench) -> None:
    case = bench.subject.every_size
    bench.assert_right(case, draw(case, 1))


@each(SUBJECTS, dtype=DTYPES)
def test_results_of_every_dtype_match_float64(bench: Bench, dtype: str) -> None:
    if dtype not in bench.subject.dtypes:
        pytest.skip(f"{bench.subject.name} makes no {dtype} results")
    case = bench.subject.few[0]._replace(dtype=dtype)
    bench.assert_right(case, draw(case, 2))


@each(SUBJECTS, of=(0.0, float("nan"), 1e-30, 1e30, 3e38, 1e-44, -0.37))
def test_scales_of_any_value_are_exact(bench: Bench, of: float) -> None:
    """Also where their product is outside of fp32, and what it makes of a sum is not."""
    for case, (a, a_scale, b, b_scale) in bench.few():
        a_scale[::3, 0] = of
        a_scale[1::3, -1] = of
        for other in (1.0, 1e-30, 1e-38):
            scale = b_scale.clone()
            scale[0, -1, 0] = other
            bench.assert_right(case, (a, a_scale, b, scale))


@each(SUBJECTS, ends=("top", "bottom"))
def test_a_product_of_scales_may_lie_outside_of_fp32(bench: Bench, ends: str) -> None:
    """Small payloads under large scales, and the other way around: results are ordinary numbers."""
    for case, (a, a_scale, b, b_scale) in bench.few():
        if case.dtype == "fp16":
            case = case._replace(dtype="bf16")
        first, last, exponents = (0, 3, (100, 30)) if ends == "top" else (0x70, 0x7E, (-70, -75))
        for payload in (a, b):
            payload.view(torch.uint8).bitwise_and_(0x83).bitwise_or_(first & last)
        for scale, exponent in zip((a_scale, b_scale), exponents, strict=True):
            scale.mul_(2.0**14).log2_().frac_().exp2_().mul_(2.0**exponent)
        out = bench.assert_right(case, (a, a_scale, b, b_scale))
        assert out.isfinite().all() and (out != 0).float().mean() > 0.9


@each(SUBJECTS)
def test_nan_reaches_its_outputs_alone(bench: Bench) -> None:
    for case, (a, a_scale, b, b_scale) in bench.few():
        row, column = case.groups.M // 2, case.N // 2
        a.view(torch.uint8)[row, -1] = 0x7F
        b.view(torch.uint8)[0, column, 0] = 0xFF
        nans = bench.launch(case, (a, a_scale, b, b_scale)).isnan()
        assert nans[row].all() and nans[:, column].all()
        assert nans.sum() == case.groups.M + case.N - 1


@each(SUBJECTS)
def test_no_step_and_no_product_is_missing(bench: Bench) -> None:
    """One product of each step at a time, so that every other one would show as it is large."""
    for case, (a, a_scale, b, b_scale) in bench.few():
        a.view(torch.uint8).fill_(0)
        for k in range(0, case.K, 37):
            a.view(torch.uint8)[:, k] = 0x38
            bench.assert_right(case, (a, a_scale, b, b_scale))
            a.view(torch.uint8)[:, k] = 0


@each(SUBJECTS)
def test_bounds_that_make_no_sense_touch_nothing_else(bench: Bench) -> None:
    wild = [(-7, 9), (9, 4), (30, 1 << 40), (1 << 33, 1 << 34), (60, -3)]
    case = bench.subject.few[0]._replace(groups=Groups(wild, "ranges", "i64", 50))
    drawn = draw(case, 4)
    cut = [(0, 9), (9, 9), (30, 50), (50, 50), (50, 50)]
    inside = case._replace(groups=Groups(cut, "ranges", "i64", 50))
    assert_groups(bench.launch(case, drawn), inside, drawn, bench.subject.error)


@each(SUBJECTS, of=[(3, 11, 64), (2, 9, 128), (3, 150, 1)])
def test_groups_of_several_ranges_are_as_if_each_were_one(
    bench: Bench, of: tuple[int, int, int]
) -> None:
    for at, few in enumerate(bench.subject.few):
        case = few._replace(groups=draw_runs(random.Random(at), *of))
        a, a_scale, *weights = draw(case, at)
        shared = [t[: of[0]] for t in weights]
        out = bench.launch(case, (a, a_scale, *shared))
        each_own = [t[list(case.groups.owners)] for t in shared]
        apart = case._replace(groups=case.groups.as_groups)
        assert same_bytes(out, bench.assert_right(apart, (a, a_scale, *each_own)))


@each(SUBJECTS, "sim")
def test_results_are_bitwise_the_same_whatever_the_order_of_waves(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = bench.subject.few[-1]
    drawn = draw(case, 5)
    runs = [bench.launch(case, drawn) for _ in every_order(monkeypatch)]
    assert_groups(runs[0], case, drawn, bench.subject.error)
    assert all(same_bytes(runs[0], run) for run in runs)


@each(SUBJECTS, "gpu")
def test_results_are_bitwise_equal_over_launches_on_two_streams(bench: Bench) -> None:
    case = Case(ending_at([100, 100, 700], 700), 160, 2048)
    bounds = [bound.cuda() for bound in case.groups.bounds()[1:] if bound is not None]
    calls: list[list[Any]] = []
    for seed in range(2):
        here = [t.cuda() for t in draw(case, seed)]
        calls.append([*here, Out((700, 160), torch.bfloat16), None, *bounds])
    problem = PromotedGemmProblem(700, 160, 2048, 3)
    assert_repeats_on_two_streams(bound(bench.kernel, bench.device, problem), calls)


def test_no_variant_for_cdna4_spills_or_has_scratch() -> None:
    target, kernel = hardware("gfx950"), find_kernel("promoted_gemm", "gfx950", "hip", "mfma")
    problems = [PromotedGemmProblem(1000, 256, 512, 4, dtype) for dtype in DTYPES]
    configs = kernel.candidates(target, problems[0])
    requests = (build_request(kernel, target, p, config) for p in problems for config in configs)
    assert_no_spills(requests, accumulators=True)
