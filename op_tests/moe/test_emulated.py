"""Hopper's routed ``rescaled`` kernels on an emulator, where there is no GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from aiter_mx.kernels.grouped_gemm import rescaled_groups_sm90
from aiter_mx.kernels.moe_gemm import MoeGemmProblem
from aiter_mx.kernels.registry import find_kernel
from aiter_mx.kernels.spec import KernelSpec
from op_tests.conformance import DTYPES
from op_tests.emulated_sm90.build import unsupported
from op_tests.emulated_sm90.launch import TARGET, Schedule, launch
from op_tests.grouped.rescaled import with_room_for
from op_tests.launches import Out, is_poison, poisoned, same_bytes
from op_tests.moe.operands import Case, Drawn, activated, draw_layer
from op_tests.moe.reference import assert_activated, assert_rows
from op_tests.moe.subjects import RESCALED as SUBJECT
from op_tests.mx_reference import NAN_SCALE
from op_tests.operands import Exponents, zero_blocks

pytestmark = pytest.mark.skipif(bool(unsupported()), reason=unsupported())

KERNELS = [
    find_kernel("moe_gemm", "sm_90a", "hip", name) for name in ("rescaled", "rescaled_in_place")
]
each_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
KINDS: dict[str, Exponents] = {  # of scales, which with an activation make a few units of gate
    "near": (-9, -8),
    "wide": (-30, -8),
    "nan": (-9, -8),
    "zeros": (-9, -8),
}
HALVES, INTERLEAVED = ("silu", "halves"), ("swiglu_oai", "interleaved")


class Trial(NamedTuple):
    """A case, and how it is launched.

    Attributes:
        kind: of operands, among ``KINDS``.
        epilogue: activation and layout; None leaves sums as the ids are sorted.
        ids: their encoding.
        tiles: of w that the ring has room for.
        ctas: the most that share the tiles of results.
    """

    case: Case
    kind: str
    epilogue: tuple[str, str] | None = None
    ids: str = "vllm"
    tiles: int = 100
    ctas: int = 132


def trials() -> list[Trial]:
    """Experts of less than a tile of rows and of several, absent ones, ones without a row; N of
    whole tiles and of others, K of whole steps and not; rings of a tile, of some, and of all."""
    sums = [
        Trial(Case(1, 32, 32, 1, 1, 16, bias="fp32"), "near"),
        Trial(Case(40, 160, 352, 3, 2, 64, bias="bf16"), "near", None, "aiter", 2, 2),
        Trial(Case(150, 96, 160, 2, 2, 128, None, "fp16"), "wide", None, "vllm", 1, 1),
        Trial(Case(70, 288, 96, 5, 3, 16, bias="fp16"), "nan", None, "aiter", 4, 3),
        Trial(Case(33, 128, 256, 9, 4, 4), "zeros", None, "vllm", 5, 2),
    ]
    of_gates = [
        Case(1, 64, 32, 1, 1, 16),
        Case(40, 192, 352, 3, 2, 64, a_div=2, bias="bf16"),
        Case(150, 128, 160, 2, 2, 128, a_div=1),
        Case(70, 320, 96, 5, 3, 16, bias="fp32"),
    ]
    more = (("vllm", 100, 132), ("aiter", 2, 2), ("vllm", 1, 1), ("aiter", 4, 3))
    gates = [
        Trial(case, kind, epilogue, *rest)
        for case, kind, rest in zip(of_gates, KINDS, more, strict=True)
        for epilogue in (HALVES, INTERLEAVED)
    ]
    gates += [
        Trial(Case(60, N, 416, 3, 2, 32), "near", epilogue, "vllm", 3, 2)
        for N, epilogue in ((320, HALVES), (192, INTERLEAVED))
    ]
    return [*sums, *gates]


TRIALS = trials()


def drawn_of(trial: Trial, seed: int) -> Drawn:
    """Operands; who chooses which experts is drawn as well, absent ones and none among them."""
    dtype = "mxfp8" if trial.epilogue else trial.case.dtype or "bf16"
    nans = {"nan_payload": 1e-4, "nan_scale": 1e-2} if trial.kind == "nan" else {}
    exponents = ((-11, -10), KINDS[trial.kind])
    drawn = draw_layer(trial.case, seed, dtype, exponents, 0.0, False, trial.ids, **nans)
    layer = replace(drawn.layer, rescaling_error=SUBJECT.rescaling_error)
    if trial.kind == "zeros":
        generator = torch.Generator().manual_seed(seed)
        zero_blocks(layer.xq, layer.xs, generator)
        zero_blocks(layer.wq, layer.ws, generator)
    drawn = replace(drawn, layer=layer)
    if trial.epilogue:
        return activated(drawn, *trial.epilogue)
    return replace(drawn, problem=replace(drawn.problem, sorted_out=True))


def outs_of(p: MoeGemmProblem) -> list[Out]:
    if p.sorted_out:
        rows = p.blocks * p.block_m
        return [Out((rows, p.N), DTYPES[p.out_dtype]), Out((p.routed,), torch.int32)]
    shape = (p.routed, p.out_features)
    scales = Out((p.routed, p.out_features // 32), torch.uint8)
    return [Out(shape, torch.float8_e4m3fn), scales]


def by_routed_rows(out: Tensor, places: Tensor, drawn: Drawn) -> Tensor:
    """Results in place order as those of routed rows, of absent experts zeros."""
    layer, E = drawn.layer, drawn.problem.E
    rows = poisoned((len(places), out.shape[1]), out.dtype)
    for t, expert in enumerate(layer.experts):
        if expert < 0:
            assert is_poison(places[t : t + 1]), "a row without an expert has a place"
            continue
        assert (places[t] == -1) == (expert >= E)
        rows[t] = 0 if expert >= E else out[places[t]]
    return rows


def test_cases_draw_experts_of_every_sort() -> None:
    found = set()
    for seed, trial in enumerate(TRIALS):
        experts, E = {*drawn_of(trial, seed).layer.experts}, trial.case.E
        found |= {"none" if e < 0 else "absent" if e >= E else "here" for e in experts}
        found |= {"without a row"} if {*range(E)} - experts else set()
    assert found == {"here", "none", "absent", "without a row"}


@each_kernel
@pytest.mark.parametrize("seed", range(len(TRIALS)))
def test_any_routing_and_schedule_give_the_reference(
    seed: int, kernel: KernelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = TRIALS[seed]
    drawn = drawn_of(trial, seed)
    p, layer = drawn.problem, drawn.layer
    monkeypatch.setattr(rescaled_groups_sm90, "MOST_CTAS", trial.ctas)
    schedule = Schedule(seed, 1 + seed % 3, seed % 2 == 0)
    given = kernel, p, kernel.configure(TARGET, p), [*drawn.tensors, *outs_of(p)], schedule
    with with_room_for(trial.tiles):
        out, other = launch(*given)
    if p.sorted_out:
        assert_rows(by_routed_rows(out, other, drawn), layer)
        return
    swiglu = (p.alpha, p.beta, p.limit)
    assert_activated(out, other, layer, p.activation, p.layout == "interleaved", swiglu)
    unlisted = layer.rows_of(-1)
    assert is_poison(out[unlisted]) and is_poison(other[unlisted])


@each_kernel
@pytest.mark.parametrize("epilogue", [None, HALVES, INTERLEAVED], ids=str)
def test_rows_of_w_of_other_experts_change_no_bits(
    epilogue: tuple[str, str] | None, kernel: KernelSpec
) -> None:
    """They lie behind an expert's last, in the same tile: NaN, and under any scales."""
    drawn = drawn_of(Trial(Case(60, 192, 352, 3, 2, 32), "near", epilogue), 0)
    p, layer = drawn.problem, drawn.layer

    def results(schedule: int) -> list[Tensor]:
        tensors = [*drawn.tensors, *outs_of(p)]
        out, other = launch(kernel, p, kernel.configure(TARGET, p), tensors, Schedule(schedule))
        return [by_routed_rows(out, other, drawn)] if p.sorted_out else [out, other]

    plain = results(0)
    for spoilt in (0, 1):
        w, ws = layer.wq.view(torch.uint8).clone(), layer.ws.clone()
        w[spoilt::2, 0::3] = 0x7F
        ws[spoilt::2, 1::3] = NAN_SCALE
        ws[spoilt::2, 2::3, 0::2], ws[spoilt::2, 2::3, 1::2] = 250, 1
        drawn.tensors[2:4] = w.view(layer.wq.dtype), ws
        rows = [t for t, expert in enumerate(layer.experts) if expert in range(1 - spoilt, 3, 2)]
        assert rows
        for one, other in zip(results(1 + spoilt), plain, strict=True):
            assert same_bytes(one[rows], other[rows])
