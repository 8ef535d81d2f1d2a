"""Tuning gfx950 by the model of time: what is chosen, from which traces, and what rows say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
import torch

from aiter_mx.dispatch.cells import told_source
from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.moe_gemm import MoeGemmProblem
from aiter_mx.kernels.quantize import QuantizeProblem
from aiter_mx.kernels.registry import find_kernel
from aiter_mx.kernels.spec import Problem
from aiter_mx.sim.program import SimOptions
from aiter_mx.sim.timing.constants import Constants, shipped
from aiter_mx.sim.timing.draws import drawn
from aiter_mx.target import hardware
from aiter_mx.trial import try_out
from aiter_mx.tuning import modelled, traces
from aiter_mx.tuning.candidates import (
    Admission,
    Built,
    Candidate,
    Unfit,
    candidate_of,
    candidates_of,
)
from aiter_mx.tuning.modelled import RULES, ModelBench, decide
from aiter_mx.workloads.workload import workload_of

PROBLEM = LinearProblem(16, 96, 256)
USUAL, OTHER, THIRD = (
    Candidate("linear", "gfx950", "hip", "gemv", (("rows", rows), ("waves", 1), ("unroll", 1)))
    for rows in (1, 2, 3)
)
EVERY = (USUAL, OTHER, THIRD)


@dataclass
class FakeBench(ModelBench):
    """Candidates whose time is given: in all, and by how much more in each fourth draw."""

    op: str = "linear"
    problem: LinearProblem = PROBLEM
    us: Mapping[Candidate, float] = field(default_factory=dict)
    late: Mapping[Candidate, float] = field(default_factory=dict)
    floors: Mapping[Candidate, float] = field(default_factory=dict)
    wrong: tuple[Candidate, ...] = ()

    def admit(self, candidate: Candidate) -> Admission:
        if candidate not in self.us:
            raise Unfit("it spills")
        return Admission(self.floor_us(candidate, shipped()), float("nan"))

    def replay_us(self, candidate: Candidate, constants: Constants) -> float:
        is_fourth = constants in drawn()[::4]
        return self.us[candidate] + is_fourth * self.late.get(candidate, 0.0)

    def floor_us(self, candidate: Candidate, constants: Constants) -> float:
        return self.floors.get(candidate, 5.0)

    def rel_err(self, candidate: Candidate) -> float:
        if candidate in self.wrong:
            raise Unfit("wrong")
        return 1e-3

    def build_of(self, candidate: Candidate) -> Built:
        return Built()

    def source(self, candidate: Candidate) -> str:
        return "model 1.0%"


def chosen(
    bench: ModelBench, known: dict[str, dict[Candidate, float]] | None = None
) -> Candidate | None:
    outcome = decide({} if known is None else known, bench, EVERY, None, RULES)
    return outcome.chosen.candidate if outcome.chosen else None


def test_the_usual_stays_unless_another_is_3_percent_faster() -> None:
    assert chosen(FakeBench(us={USUAL: 10.0, OTHER: 9.8, THIRD: 9.75})) == USUAL
    assert chosen(FakeBench(us={USUAL: 10.0, OTHER: 9.6, THIRD: 9.65})) == OTHER


def test_the_usual_stays_where_another_loses_in_a_quarter_of_the_draws() -> None:
    us = {USUAL: 10.0, OTHER: 9.0, THIRD: 9.5}
    assert chosen(FakeBench(us=us)) == OTHER
    assert chosen(FakeBench(us=us, late={OTHER: 1.5})) == THIRD
    assert chosen(FakeBench(us=us, late={OTHER: 1.5, THIRD: 1.5})) == USUAL
    assert chosen(FakeBench(us=us, late={OTHER: 1.5, THIRD: 1.5, USUAL: 1.5})) == OTHER


def test_floor_1_has_a_say() -> None:
    us = {USUAL: 10.0, OTHER: 9.0, THIRD: 9.5}
    assert chosen(FakeBench(us=us, floors={OTHER: 5.6})) == THIRD  # 9 x 5.6 is more than 10 x 5
    assert chosen(FakeBench(us=us, floors={OTHER: 5.5})) == OTHER
    # Beyond 1.25 times the best of floor 1, floor 2 is not asked.
    outcome = decide({}, FakeBench(us=us, floors={OTHER: 6.3}), EVERY, None, RULES)
    assert [timing.candidate for timing in outcome.timings] == [THIRD, USUAL]


def test_what_is_wrong_or_unfit_is_passed_over() -> None:
    us = {USUAL: 10.0, OTHER: 9.0, THIRD: 9.5}
    bench = FakeBench(us=us, wrong=(OTHER,))
    outcome = decide({}, bench, EVERY, None, RULES)
    assert outcome.chosen is not None and outcome.chosen.candidate == THIRD
    assert outcome.chosen.admission.rel_err == 1e-3 and outcome.source == "model 1.0%"
    assert [(failure.candidate, failure.why) for failure in outcome.failures] == [(OTHER, "wrong")]
    assert chosen(FakeBench(us={THIRD: 9.5, OTHER: 9.4})) == OTHER  # it is the usual one then
    assert chosen(FakeBench(us=us, wrong=EVERY)) is None
    assert chosen(FakeBench()) is None


def test_what_fails_on_a_later_draw_of_indices_is_passed_over() -> None:
    class Late(FakeBench):
        def sample_us(self, candidate: Candidate) -> float:
            if candidate in self.wrong:
                raise Unfit("it reads what is not there")
            return super().sample_us(candidate)

    us = {USUAL: 10.0, OTHER: 9.9, THIRD: 9.95}
    assert chosen(Late(us=us, wrong=(USUAL,))) == OTHER
    assert chosen(Late(us=us, wrong=(USUAL, OTHER))) == THIRD
    assert chosen(Late(us=us, wrong=EVERY)) is None


def test_what_more_rows_take_is_a_candidate_for_fewer() -> None:
    known: dict[str, dict[Candidate, float]] = {}
    fourth = Candidate("linear", "gfx950", "hip", "gemv", (("rows", 4),))
    for M, expected in ((32, fourth), (16, fourth), (8, fourth)):
        bench = FakeBench(
            problem=LinearProblem(M, 96, 256), us=dict.fromkeys(EVERY, 10.0) | {fourth: 9.0}
        )
        candidates = (*EVERY, fourth) if M == 32 else EVERY
        outcome = decide(known, bench, candidates, None, RULES)
        assert outcome.chosen is not None and outcome.chosen.candidate == expected
    other = FakeBench(problem=LinearProblem(8, 128, 256), us=dict.fromkeys(EVERY, 10.0))
    assert chosen(other, known) == USUAL


def test_fewer_rows_take_the_fastest_where_more_take_less() -> None:
    known: dict[str, dict[Candidate, float]] = {}
    for M, us, expected in (
        (32, {USUAL: 9.4}, USUAL),
        (16, {USUAL: 9.6, OTHER: 9.5}, USUAL),  # within 3 % of what 32 rows take
        (8, {USUAL: 9.8, OTHER: 9.6}, OTHER),
    ):
        bench = FakeBench(problem=LinearProblem(M, 96, 256), us=us)
        assert chosen(bench, known) == expected
    # Also where what the table names is ahead in a quarter of the draws.
    bench = FakeBench(
        problem=LinearProblem(4, 96, 256), us={USUAL: 9.9, OTHER: 9.6}, late={OTHER: 1.5}
    )
    outcome = decide(known, bench, (USUAL, OTHER), USUAL, RULES)
    assert outcome.chosen is not None and outcome.chosen.candidate == OTHER


@pytest.mark.parametrize("candidates", [EVERY, (OTHER, THIRD)])
def test_a_row_stays_where_what_would_replace_it_is_slower(
    candidates: tuple[Candidate, ...],
) -> None:
    """Also where it is no candidate, or floor 1 would leave it out."""
    held = Candidate("linear", "gfx950", "hip", "gemv", (("rows", 4),))
    us = {USUAL: 10.0, OTHER: 9.9, THIRD: 9.8, held: 9.7}
    for more, expected in (({}, held), ({THIRD: 9.5}, THIRD)):
        bench = FakeBench(us=us | more, floors={held: 9.0, USUAL: 6.0, OTHER: 6.0})
        outcome = decide({}, bench, candidates, held, RULES)
        assert outcome.chosen is not None and outcome.chosen.candidate == expected
    bench = FakeBench(us=us | {held: 9.9}, late={THIRD: 1.5})  # in a quarter of the draws
    outcome = decide({}, bench, candidates, held, RULES)
    assert outcome.chosen is not None and outcome.chosen.candidate == held
    slower = FakeBench(us=us | {held: 10.1}, late={candidates[0]: 1.5})
    outcome = decide({}, slower, candidates, held, RULES)
    assert outcome.chosen is not None and outcome.chosen.candidate == candidates[0]
    failing = FakeBench(us=us, wrong=(held,))
    outcome = decide({}, failing, candidates, held, RULES)
    assert outcome.chosen is not None and outcome.chosen.candidate == candidates[0]


def test_the_spread_is_that_of_the_draws() -> None:
    outcome = decide({}, FakeBench(us={USUAL: 10.0}, late={USUAL: 2.0}), EVERY, None, RULES)
    assert outcome.chosen is not None
    assert outcome.chosen.spread == pytest.approx(0.2)


def candidates_for(problem: Problem) -> list[Candidate]:
    target, rules = hardware("gfx950"), RULES
    return candidates_of("linear", target, problem, modelled.BACKENDS, rules.most, rules.of_next)


def test_a_time_does_not_depend_on_what_operands_hold() -> None:
    problem = LinearProblem(5, 192, 1024)
    for name in ("gemv", "mfma"):
        candidate = next(c for c in candidates_for(problem) if c.kernel == name)
        bench = ModelBench("linear", problem)
        bench.admit(candidate)
        options = SimOptions(trace=True, count_conflicts=True, schedule="round-robin")
        whole = try_out(candidate.spec, problem, candidate.config, options)
        assert whole.prediction is not None
        assert bench.sample_us(candidate) == pytest.approx(whole.prediction.us, rel=0.02)
        assert bench.rel_err(candidate) < 4e-3


def test_a_trace_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = LinearProblem(3, 96, 512)
    candidate = candidates_for(problem)[0]
    first = ModelBench("linear", problem)
    first.admit(candidate)
    monkeypatch.setattr(traces, "sample", None)
    again = ModelBench("linear", problem)
    again.admit(candidate)
    assert again.sample_us(candidate) == first.sample_us(candidate)
    with pytest.raises(TypeError):
        ModelBench("linear", LinearProblem(3, 128, 512)).admit(candidate)


@pytest.mark.parametrize(
    ("op", "problem", "kernel", "config"),
    [
        ("linear", LinearProblem(1, 106496, 16384), "gemv", (6, 6, 1)),  # a rest of rows
        ("linear", LinearProblem(1, 106496, 16384), "gemv", (4, 1, 3)),  # many rounds, no rest
        ("linear", LinearProblem(2, 53250, 8192), "gemv", (8, 1, 1)),
        ("linear", LinearProblem(8, 53250, 8192), "mfma", ()),
        ("linear", LinearProblem(32, 106496, 16384), "persistent", (64, 256, 8, 8)),  # uneven
        ("moe_gemm", MoeGemmProblem(16, 2304, 6144, 64, 2, 16, a_div=2), "mfma", ()),
        ("quantize", QuantizeProblem(16384, 7168), "rows", ()),
        ("quantize", QuantizeProblem(16384, 7168, to="both"), "tiles", ()),
    ],
)
def test_no_launch_is_faster_than_the_bytes_that_it_needs(
    op: str, problem: Problem, kernel: str, config: tuple[int, ...]
) -> None:
    """Whichever its operands, and in every draw: weights of experts count where some token goes."""
    spec = find_kernel(op, "gfx950", "hip", kernel)
    target, names = hardware("gfx950"), (param.name for param in spec.params)
    values = dict(zip(names, config, strict=True)) if config else spec.configure(target, problem)
    candidate = candidate_of(spec, "gfx950", values)
    bench = ModelBench(op, problem)
    bench.admit(candidate)
    workload = workload_of(op)
    if op == "moe_gemm":
        least = min(workload.read_bytes(problem, workload.hollow(problem, n)) for n in range(3))
    else:
        least = sum(tensor.nbytes for tensor in workload.hollow(problem) if tensor is not None)
    for draw in (shipped(), *drawn()):
        of_bytes = least / draw.memory_tb_s / 1e6
        assert of_bytes > 20
        assert bench.replay_us(candidate, draw) >= (draw.launch_us + of_bytes) * (1 - 1e-6)


@pytest.mark.parametrize(("E", "num_experts"), [(16, 0), (4, 16)])
def test_the_routing_of_fewer_tokens_is_part_of_that_of_more(E: int, num_experts: int) -> None:
    workload = workload_of("moe_gemm")
    assert workload.touched is not None
    for number in range(3):
        touched = []
        for M in (1, 2, 4, 8, 16, 32):
            problem = MoeGemmProblem(M, 64, 256, E, 2, 16, a_div=2, num_experts=num_experts)
            operands = workload.hollow(problem, number)
            again = workload.hollow(problem, number)
            for one, other in zip(operands[4:7], again[4:7], strict=True):
                assert one is not None and other is not None and torch.equal(one, other)
            touched.append(workload.touched(problem, operands))
        assert touched == sorted(touched) and touched[0] >= 1 and touched[-1] <= E
    few = MoeGemmProblem(4, 64, 256, E, 2, 16, a_div=2, num_experts=num_experts)
    assert len({workload.touched(few, workload.hollow(few, number)) for number in range(9)}) > 1


def test_hollow_operands_are_those_of_the_kernel_in_shape_and_zero() -> None:
    for op, problem in (
        ("linear", PROBLEM),
        ("moe_gemm", MoeGemmProblem(3, 64, 256, 8, 2, 16, a_div=2)),
    ):
        workload = workload_of(op)
        drawn_ones = workload.operands(problem, torch.device("cpu"))
        for place, (real, hollow) in enumerate(
            zip(drawn_ones, workload.hollow(problem), strict=True)
        ):
            assert (real is None) == (hollow is None)
            if real is not None and hollow is not None:
                assert (real.shape, real.dtype) == (hollow.shape, hollow.dtype)
                is_index = real.dtype == torch.int32
                assert is_index or not hollow.view(torch.uint8).any(), place


@pytest.mark.parametrize(
    ("cell", "told"),
    [
        ("", ""),
        ("measured", "measured"),
        ("model", "modelled"),
        ("model 8.3%", "modelled, median error 8.3 %"),
        (
            "model 8.3% extrapolated unmeasured",
            "modelled, median error 8.3 %, an extrapolation, faster than anything measured",
        ),
    ],
)
def test_what_a_row_says_of_its_time_reads_well(cell: str, told: str) -> None:
    assert told_source(cell) == told
