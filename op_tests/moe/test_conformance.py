"""What every kernel of ``moe_gemm`` must do, in the simulator, without a GPU, and with ``-m gpu``.

``op_tests/conformance.py`` says how to add a kernel or a property.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from aiter_mx.kernels.moe_gemm import MoeGemmProblem
from aiter_mx.timing import random_mx as random_mx_there
from op_tests import conformance
from op_tests.conformance import DTYPES, bench_of, each, every_order, in_drawn_orders
from op_tests.launches import (
    POISON,
    Out,
    assert_repeats_on_two_streams,
    bound,
    is_poison,
    launch,
    moved,
    same_bytes,
)
from op_tests.moe.operands import (
    SWIGLU,
    Case,
    Drawn,
    activated,
    draw_layer,
    lists_of,
    with_stray_blocks,
)
from op_tests.moe.reference import Layer, assert_activated, assert_rows
from op_tests.moe.subjects import SUBJECTS, Subject
from op_tests.mx_reference import random_mx
from op_tests.operands import NANS, SPREADS, nan_scale_of_zeros, zero_blocks

E4M3 = torch.float8_e4m3fn
NEAR = ((-6, 6), (-6, 6))


def outs(problem: MoeGemmProblem) -> tuple[Out, Out | None]:
    """Places of the results."""
    if problem.activation == "none":
        return Out((problem.routed, problem.N), DTYPES[problem.out_dtype]), None
    blocks = problem.out_features // 32
    return Out((problem.routed, 32 * blocks), E4M3), Out((problem.routed, blocks), torch.uint8)


@contextmanager
def poisoned_payloads() -> Iterator[None]:
    """Has payloads be poisoned where a launch makes room for them.

    Those of padding stay so: ``gather`` writes their scales alone, and their sums go nowhere.
    """
    new_empty = Tensor.new_empty

    def make_room(like: Tensor, *shape: Any, **options: Any) -> Tensor:
        room = new_empty(like, *shape, **options)
        if room.dtype == torch.float8_e4m3fn:
            room.view(torch.uint8).fill_(POISON)
        return room

    with mock.patch.object(Tensor, "new_empty", make_room):
        yield


class Bench(conformance.Bench):
    """A subject where it is tried."""

    subject: Subject

    def draw(self, case: Case, seed: int, dtype: str = "", **options: Any) -> Drawn:
        dtype = dtype or case.dtype or self.subject.dtypes[0]
        case = case._replace(bias=options.pop("bias", case.bias))
        subject = self.subject
        if not subject.weighted:
            options["weighted"] = False
        error = subject.accumulation_error
        drawn = draw_layer(case, seed, dtype, accumulation_error=error, **options)
        layer = replace(drawn.layer, rescaling_error=subject.rescaling_error)
        return replace(drawn, layer=layer)

    def few(self, every: bool = False, **options: Any) -> Iterator[tuple[Case, Drawn]]:
        """Cases for draws of many kinds, or every one, in the result that shows most errors."""
        few = [case._replace(dtype=None) for case in self.subject.few]
        cases = itertools.chain.from_iterable(self.subject.groups) if every else few
        for seed, case in enumerate(cases):
            yield case, self.draw(case, seed, **options)

    def few_activated(self, **options: Any) -> Iterator[tuple[Case, Drawn]]:
        """As many with an activation."""
        for seed, (case, *kind) in enumerate(self.subject.activated[: len(self.subject.few)]):
            yield case, activated(self.draw(case, seed, "mxfp8", **options), *kind)

    def launch(self, case: Case, drawn: Drawn) -> list[Tensor]:
        config = case.config
        if config is not None:
            config = self.subject.fitted(drawn.problem, config)
        tensors = [*drawn.tensors, *outs(drawn.problem)]
        with poisoned_payloads():
            return launch(self.kernel, self.device, drawn.problem, config, tensors)

    def assert_right(self, case: Case, drawn: Drawn) -> list[Tensor]:
        """The results, once they are compared with float64."""
        results, problem = self.launch(case, drawn), drawn.problem
        if problem.activation == "none":
            assert_rows(results[0], drawn.layer)
        else:
            swiglu = (problem.alpha, problem.beta, problem.limit)
            interleaved = problem.layout == "interleaved"
            kind, unlisted = problem.activation, drawn.layer.rows_of(-1)
            assert_activated(*results, drawn.layer, kind, interleaved, swiglu)
            assert all(is_poison(result[unlisted]) for result in results)
        return results


bench = bench_of(Bench)


@each(SUBJECTS, group=lambda subject: range(len(subject.groups)))
def test_any_shape_routing_and_configuration_match_float64(
    bench: Bench, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpu = bench.device.type == "cuda"
    for seed, case, _ in in_drawn_orders(monkeypatch, group, bench.subject.groups[group]):
        for ids, dtype in (("vllm", "bf16"), ("aiter", "")) if on_gpu else ((None, ""),):
            bench.assert_right(case, bench.draw(case, 100 * group + seed, dtype, ids=ids))


@each(SUBJECTS)
def test_activated_rows_are_quantised_as_the_exact_ones(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed, (case, *kind), _ in in_drawn_orders(monkeypatch, 1, bench.subject.activated):
        swiglu = SWIGLU if seed % 2 else (1.2, 0.5, 3.0)
        drawn = bench.draw(case, seed, "mxfp8")
        bench.assert_right(case, activated(drawn, *kind, swiglu))


@each(SUBJECTS)
def test_every_number_of_tokens_matches_float64(bench: Bench) -> None:
    for M in range(1, 34):
        case = bench.subject.tokens._replace(M=M)
        bench.assert_right(case, bench.draw(case, M))


@each(SUBJECTS, dtype=DTYPES)
def test_results_and_biases_of_every_dtype_match_float64(bench: Bench, dtype: str) -> None:
    if dtype not in bench.subject.dtypes:
        pytest.skip(f"{bench.subject.name} makes no {dtype} results")
    for bias in bench.subject.biases:
        case = bench.subject.tokens._replace(M=9, bias=bias)
        bench.assert_right(case, bench.draw(case, 1, dtype))


@each(SUBJECTS, spread_of=SPREADS)
def test_scales_over_their_whole_range_are_exact(bench: Bench, spread_of: str) -> None:
    options = {"exponents": SPREADS[spread_of], "weighted": False, "bias": "none"}
    for case, drawn in bench.few(every=spread_of == "any", **options):
        bench.assert_right(case, drawn)


@each(SUBJECTS)
def test_zeros_of_any_scale_add_nothing(bench: Bench) -> None:
    generator = torch.Generator().manual_seed(8)
    for case, drawn in bench.few(exponents=NEAR):
        zero_blocks(drawn.layer.xq, drawn.layer.xs, generator)
        zero_blocks(drawn.layer.wq, drawn.layer.ws, generator)
        bench.assert_right(case, drawn)


@each(SUBJECTS, nans=range(len(NANS)))
def test_nan_reaches_its_outputs_alone(
    bench: Bench, nans: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AITER_MX_SIM_FINITE_SCALES", "1")
    shares = []
    plain = bench.few(every=len(NANS[nans]) > 1, **NANS[nans])
    for case, drawn in itertools.chain(plain, bench.few_activated(**NANS[nans])):
        for result in bench.assert_right(case, drawn):
            nan = result == 255 if result.dtype == torch.uint8 else result.float().isnan()
            shares.append(nan.float().mean())
    assert any(0 < share < 1 for share in shares), "the draw must show both outcomes"


@each(SUBJECTS)
def test_a_nan_scale_counts_even_where_the_payload_is_zero(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AITER_MX_SIM_FINITE_SCALES", "1")
    for case, drawn in itertools.islice(bench.few(exponents=NEAR, weighted=False), 2):
        layer, blocks = drawn.layer, case.K // 32
        for block in range(0, blocks, 1 + blocks // 8):
            xq, wq = (t.view(torch.uint8).clone().view(E4M3) for t in (layer.xq, layer.wq))
            xs, ws = layer.xs.clone(), layer.ws.clone()
            nan_scale_of_zeros(xq, xs, len(xs) // 2, blocks - 1 - block)
            nan_scale_of_zeros(wq, ws, case.E // 2, case.N // 2, block)
            spoilt = replace(layer, xq=xq, xs=xs, wq=wq, ws=ws)
            tensors = [xq, xs, wq, ws, *drawn.tensors[4:]]
            bench.assert_right(case, replace(drawn, layer=spoilt, tensors=tensors))


@each(SUBJECTS)
def test_blocks_without_an_id_are_passed_over(bench: Bench) -> None:
    if not bench.subject.strays:
        pytest.skip(f"{bench.subject.name} takes the blocks of an expert that stand together")
    for seed, (case, drawn) in enumerate(
        [*bench.few(ids="vllm"), *bench.few_activated(ids="vllm")]
    ):
        bench.assert_right(case, with_stray_blocks(drawn, seed))


@each(SUBJECTS)
def test_operands_may_be_views(bench: Bench) -> None:
    """Scales at any multiple of 4 bytes, all others but payloads at any element."""
    for case, drawn in [*bench.few(), *bench.few_activated()]:
        expected = bench.launch(case, drawn)
        there = [None if t is None else t.to(bench.device) for t in drawn.tensors]
        views = [
            t if t is None or t.dtype == E4M3 else moved(t, 4 if t.dtype == torch.uint8 else 1)
            for t in there
        ]
        found = bench.launch(case, replace(drawn, tensors=views))
        assert all(map(same_bytes, found, expected))


@each(SUBJECTS, "sim")
def test_results_are_bitwise_the_same_whatever_the_order_of_waves(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    for case, drawn in [*bench.few(), *bench.few_activated()]:
        first, *others = [bench.launch(case, drawn) for _ in every_order(monkeypatch)]
        assert all(all(map(same_bytes, first, other)) for other in others)


@each(SUBJECTS, "gpu", is_activated=(False, True))
def test_results_are_bitwise_equal_over_launches_on_two_streams(
    bench: Bench, is_activated: bool
) -> None:
    case = Case(40, 512, 1024, 8, 4, 32, bias="bf16")
    drawn = bench.draw(case, 1, ids="vllm", weighted=False)
    drawn = activated(drawn, "silu", "halves") if is_activated else drawn
    xq, *others = [None if t is None else t.to(bench.device) for t in drawn.tensors]
    assert xq is not None
    calls = [[x, *others, *outs(drawn.problem)] for x in (xq, xq.view(torch.uint8).flip(0))]
    assert_repeats_on_two_streams(bound(bench.kernel, bench.device, drawn.problem), calls)


@each([subject for subject in SUBJECTS if subject.sized], "gpu")
def test_experts_beyond_2_and_4_gib_are_addressed_rightly(bench: Bench) -> None:
    generator, draw = torch.Generator().manual_seed(6), random.Random(6)
    M, N, K, E, top_k, block_m = 96, 1024, 4096, 1040, 2, 64
    some = [0, 511, 513, 1023, 1025, E - 1]  # on either side of both
    assert 512 * N * K == 2 << 30 and E * N * K > 4 << 30
    payload, scale = random_mx_there(E * N, K, bench.device)
    wq, ws = payload.view(E, N, K), scale.view(E, N, K // 32)
    chosen = [draw.choice(some) for _ in range(M * top_k)]
    lists = lists_of(chosen, E, block_m, 0, draw)
    x = random_mx(M * top_k, K, generator, scale_exponents=(-6, 6))
    problem = MoeGemmProblem(M, N, K, E, top_k, block_m, max_blocks=len(lists[1]))
    tensors = [*x, wq, ws, *lists, None, None, *outs(problem)]
    (out,) = launch(bench.kernel, bench.device, problem, None, tensors)
    few = [torch.stack([t.view(torch.uint8)[expert] for expert in some]).cpu() for t in (wq, ws)]
    experts = [some.index(expert) for expert in chosen]
    operands = (*x, few[0].view(wq.dtype), few[1], None, experts, 1)
    subject = bench.subject
    errors = (subject.accumulation_error, subject.rescaling_error)
    assert_rows(out, Layer(*operands, None, *errors))
