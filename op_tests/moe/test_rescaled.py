"""Routed ``rescaled`` kernels on Hopper: what the host does, and with ``-m gpu`` bits and forms."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from aiter_mx.kernels.grouped_gemm import GroupedGemmProblem
from aiter_mx.kernels.grouped_gemm.in_place_sm90 import IN_PLACE as IN_PLACE_OF_GROUPS
from aiter_mx.kernels.grouped_gemm.rescaled_groups_sm90 import most_blocks
from aiter_mx.kernels.grouped_gemm.rescaled_sm90 import RESCALED as RESCALED_OF_GROUPS
from aiter_mx.kernels.moe_gemm import MoeGemmProblem
from aiter_mx.kernels.moe_gemm.problem import ACTIVATION_CODES, LAYOUTS
from aiter_mx.kernels.registry import find_kernel
from aiter_mx.kernels.spec import KernelSpec, place_of
from aiter_mx.target import hardware
from op_tests.conformance import DTYPES, Bench, bench_of, each
from op_tests.grouped.rescaled import with_room_for
from op_tests.launches import Out, is_poison, launch, same_bytes
from op_tests.linear.subjects.wgmma_fp8_rescaled_sm90 import LESS_NEAR, NEAR
from op_tests.moe.operands import Case, Drawn, activated, draw_layer
from op_tests.moe.reference import assert_activated
from op_tests.moe.subjects import IN_PLACE, RESCALED
from op_tests.mx_reference import NAN_SCALE

OF_GROUPS = {kernel.name: kernel for kernel in (RESCALED_OF_GROUPS, IN_PLACE_OF_GROUPS)}
ROUTED = {name: find_kernel("moe_gemm", "sm_90a", "hip", name) for name in OF_GROUPS}
each_kernel = pytest.mark.parametrize("kernel", ROUTED.values(), ids=lambda kernel: kernel.name)
TARGET = hardware("sm_90a")
E4M3 = torch.float8_e4m3fn
ACTIVATIONS = [*ACTIVATION_CODES][1:]
FORMS = [(0, 0), NEAR, LESS_NEAR, (-20, 20)]
CASES = [
    Case(300, 320, 352, 5, 2, 64),
    Case(150, 448, 96, 12, 3, 16),
    Case(260, 128, 608, 2, 4, 128),
]
bench = bench_of(Bench)
ON_HOPPER, OF_THE_RING = each((RESCALED, IN_PLACE)), each((RESCALED,))


# -- what the host does ----------------------------------------------------------------------------
@each_kernel
@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"out_dtype": "fp32"}, "which fp32 results would show"),
        ({"weights": "by_t"}, "routing weights"),
        ({"N": 100}, "not a multiple of 32"),
        ({"E": 4097}, "above 4096"),
        ({"max_blocks": 0}, "nothing to multiply"),
    ],
)
def test_what_they_do_not_cover_is_refused(
    more: dict[str, object], reason: str, kernel: KernelSpec
) -> None:
    problem = MoeGemmProblem(4096, 1536, 2880, 32, 4)
    assert kernel.refusal(TARGET, problem) is None
    assert reason in (kernel.refusal(TARGET, replace(problem, **more)) or "")
    exact = replace(TARGET, exact_sums=True)
    assert "14 bits" in (kernel.refusal(exact, problem) or "")
    assert "only for sm_90a" in (kernel.refusal(hardware("gfx950"), problem) or "")


@each_kernel
@pytest.mark.parametrize("layout", LAYOUTS)
def test_launches_are_those_of_groups_of_places(layout: str, kernel: KernelSpec) -> None:
    problem = MoeGemmProblem(
        *(700, 320, 352, 5, 3, 20, "mxfp8", "swiglu_oai", layout),
        bias="bf16",
        a_div=3,
        ids="aiter",
        max_blocks=120,
        alpha=1.5,
        beta=0.5,
        limit=6.0,
    )
    groups, plain = GroupedGemmProblem(2400, 320, 352, 5, bias="bf16"), OF_GROUPS[kernel.name]
    config, blocks = kernel.configure(TARGET, problem), most_blocks(groups)
    assert [*kernel.candidates(TARGET, problem)] == [*plain.candidates(TARGET, groups)]
    with with_room_for(4):
        launches = kernel.launches(TARGET, problem, config)
        of_groups = plain.launches(TARGET, groups, config)
        assert len(launches) == len(of_groups) == 3
        in_place = kernel.name == IN_PLACE.name
        sizes = (blocks,) if in_place else (blocks, 4, 2)
        for ours, other in zip(launches, of_groups, strict=True):
            assert (ours.symbol, ours.sources) == (other.symbol, other.sources)
            geometry = ours.geometry(TARGET, problem, config)
            assert geometry == other.geometry(TARGET, groups, config)
            scalars = ours.scalars(TARGET, problem, config)
            assert scalars == (
                *(2400, 320, 352, 5, 2100, 3, 3, 120, 20, 2),
                *sizes,
                *(1.5, 0.5, 6.0),
            )
            assert len(scalars) + 12 == len(ours.args)
        assert not launches[0].tensor_maps and not launches[1].tensor_maps
        operands, weights = (of(TARGET, problem, config) for of in launches[2].tensor_maps)
        assert kernel.workspace_bytes(TARGET, problem, config) == plain.workspace_bytes(
            TARGET, groups, config
        )
    assert operands.pointer == place_of(launches[2].args, "workspace")
    assert (operands.rows, operands.row_bytes) == (128 * (blocks if in_place else blocks + 4), 352)
    assert (operands.box_rows, operands.box_bytes) == (64 if in_place else 128, 128)
    assert weights.pointer == place_of(launches[2].args, "wq")
    assert (weights.rows, weights.row_bytes) == (5 * 320, 352)
    assert (weights.box_rows, weights.box_bytes) == (64 if layout == "halves" else 128, 128)
    found = launches[2].defines(TARGET, problem, config)
    assert found["MX_ACTIVATION"] == 2 and found["MX_INTERLEAVED"] == (layout == "interleaved")
    assert all(each.defines(TARGET, problem, config) == found for each in launches)  # one object


@each_kernel
def test_only_results_by_routed_rows_are_scattered(kernel: KernelSpec) -> None:
    plain = MoeGemmProblem(4096, 1536, 2880, 32, 4)
    config = kernel.configure(TARGET, plain)
    ((op, sums),) = kernel.parts(TARGET, plain, config)
    assert op == "moe_gemm" and sums.sorted_out and sums.out_dtype == "bf16"
    assert kernel.refusal(TARGET, sums) is None and kernel.parts(TARGET, sums, config) == ()
    gated = replace(plain, out_dtype="mxfp8", activation="silu")
    assert kernel.parts(TARGET, gated, config) == ()


@each_kernel
def test_boxes_of_sums_have_the_rows_of_a_tile(kernel: KernelSpec) -> None:
    sums = MoeGemmProblem(700, 320, 352, 5, 3, 20, "bf16", sorted_out=True)
    config = kernel.configure(TARGET, sums)
    *_, product_of_tiles = kernel.launches(TARGET, sums, config)
    _, weights = product_of_tiles.tensor_maps
    assert weights(TARGET, sums, config).box_rows == 128


@each_kernel
@pytest.mark.parametrize("activation", ["none", *ACTIVATIONS])
def test_one_code_object_is_of_all_shapes_and_rooms(activation: str, kernel: KernelSpec) -> None:
    dtype = "bf16" if activation == "none" else "mxfp8"
    problem = MoeGemmProblem(4096, 1536, 2880, 128, 4, 64, dtype, activation)
    other = MoeGemmProblem(300, 320, 96, 5, 2, 16, dtype, activation)
    configs = [*kernel.candidates(TARGET, problem)]
    assert len(configs) == (1 if kernel.name == IN_PLACE.name else 4)
    found = [
        module.defines(TARGET, of, config)
        for module in kernel.modules
        for of in (problem, other)
        for config in configs
    ]
    assert all(each == found[0] for each in found)


def test_cases_are_covered_and_reach_every_form_of_lists() -> None:
    cases = [*(c for group in RESCALED.groups for c in group), *(c for c, *_ in RESCALED.activated)]
    for case in cases:
        problem = MoeGemmProblem(*case[:6], out_dtype="bf16")
        assert all(kernel.refusal(TARGET, problem) is None for kernel in ROUTED.values())
    assert {(kind, layout) for _, kind, layout in RESCALED.activated} == {
        *product(ACTIVATIONS, LAYOUTS)
    }
    assert {case.block_m for case in cases} >= {16, 64, 128}
    assert {case.top_k for case in cases} >= {1, 2, 3, 4, 5, 6, 8}
    assert {case.K for case in cases} >= {32, 96, 2880}
    assert any(case.M * case.top_k < case.E * case.block_m for case in cases)


# -- on a GPU --------------------------------------------------------------------------------------
def outs_of(problem: MoeGemmProblem) -> list[Out]:
    if problem.sorted_out:
        places = Out((problem.routed,), torch.int32)
        rows = problem.blocks * problem.block_m
        return [Out((rows, problem.N), DTYPES[problem.out_dtype]), places]
    features = problem.N // 2
    scales = Out((problem.routed, features // 32), torch.uint8)
    return [Out((problem.routed, features), E4M3), scales]


def results_of(bench: Bench, drawn: Drawn, cu_num: int | None = None) -> list[Tensor]:
    tensors = [*drawn.tensors, *outs_of(drawn.problem)]
    return launch(bench.kernel, bench.device, drawn.problem, None, tensors, cu_num)


def stated(drawn: Drawn) -> Drawn:
    """With the errors that the kernel states."""
    errors = {
        "accumulation_error": RESCALED.accumulation_error,
        "rescaling_error": RESCALED.rescaling_error,
    }
    return replace(drawn, layer=replace(drawn.layer, **errors))


def assert_right(drawn: Drawn, results: list[Tensor]) -> None:
    p, layer = drawn.problem, stated(drawn).layer
    swiglu = (p.alpha, p.beta, p.limit)
    assert_activated(*results, layer, p.activation, p.layout == "interleaved", swiglu)
    assert all(is_poison(result[layer.rows_of(-1)]) for result in results)


@ON_HOPPER
@pytest.mark.sanitized
@pytest.mark.parametrize("exponents", FORMS, ids=str)
@pytest.mark.parametrize("ids", ["vllm", "aiter"])
def test_sorted_results_are_those_of_groups_of_gathered_rows(
    bench: Bench, ids: str, exponents: tuple[int, int]
) -> None:
    """Bit for bit, where rows that are none are zeros."""
    for seed, case in enumerate(CASES):
        drawn = draw_layer(case, seed, "bf16", (exponents, exponents), weighted=False, ids=ids)
        p, layer = replace(drawn.problem, sorted_out=True), drawn.layer
        out, places = results_of(bench, replace(drawn, problem=p))
        sorted_ids, experts, used = (t for t in drawn.tensors[4:7] if t is not None)
        rows = p.blocks * p.block_m
        xq = torch.zeros(rows, p.K, dtype=torch.uint8)
        xs = torch.full((rows, p.K // 32), 127, dtype=torch.uint8)
        at = {}
        for place, word in enumerate(sorted_ids[: int(used)].tolist()):
            t = word if ids == "vllm" else (word & 0xFFFFFF) * p.top_k + (word >> 24)
            is_row = 0 <= t < p.routed and (ids == "vllm" or word >> 24 < p.top_k)
            if is_row:
                xq[place] = layer.xq.view(torch.uint8)[t // p.a_div]
                xs[place] = layer.xs[t // p.a_div]
                at[t] = place
        bounds = torch.zeros(2, p.E, dtype=torch.int32)
        for block, expert in reversed([*enumerate(experts.tolist()[: int(used) // p.block_m])]):
            if 0 <= expert < p.E:
                bounds[0, expert] = block * p.block_m
                bounds[1, expert] = max(int(bounds[1, expert]), (block + 1) * p.block_m)
        groups = GroupedGemmProblem(rows, p.N, p.K, p.E, "bf16", p.bias)
        tensors = (xq.view(E4M3), xs, layer.wq, layer.ws, layer.bias)
        one = Out((rows, p.N), torch.bfloat16)
        (expected,) = launch(
            OF_GROUPS[bench.kernel.name], bench.device, groups, None, (*tensors, one, *bounds)
        )
        for t, expert in enumerate(layer.experts):
            place = at.get(t)
            if place is None:
                assert is_poison(places[t : t + 1])
            elif expert >= p.E:
                assert places[t] == -1
            else:
                assert places[t] == place
                assert same_bytes(out[place], expected[place])


@ON_HOPPER
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("exponents", [(-8, -8), (-9, -4), (-10, -4), (-30, -8)], ids=str)
def test_activated_rows_of_steps_of_each_form_match_float64(
    bench: Bench, exponents: tuple[int, int], layout: str
) -> None:
    for seed, (case, kind) in enumerate(product(CASES, ("silu", "swiglu_oai"))):
        drawn = draw_layer(case, seed, "mxfp8", ((-11, -8), exponents))
        drawn = activated(drawn, kind, layout)
        assert_right(drawn, results_of(bench, drawn))


@OF_THE_RING
@pytest.mark.parametrize("tiles", [1, 2, 3, 7])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bits_are_the_same_with_room_for_any_number_of_tiles_of_w(
    bench: Bench, layout: str, tiles: int
) -> None:
    for seed, case in enumerate(CASES):
        drawn = activated(draw_layer(case, seed, "mxfp8"), ACTIVATIONS[seed], layout)
        whole = results_of(bench, drawn)
        with with_room_for(tiles):
            assert all(map(same_bytes, results_of(bench, drawn), whole))
        assert_right(drawn, whole)


@ON_HOPPER
@pytest.mark.parametrize("cu_num", [1, 2, 3, 7])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bits_are_the_same_on_any_number_of_multiprocessors(
    bench: Bench, layout: str, cu_num: int
) -> None:
    for seed, case in enumerate(CASES):
        drawn = activated(draw_layer(case, seed, "mxfp8"), ACTIVATIONS[seed], layout)
        whole = results_of(bench, drawn)
        assert all(map(same_bytes, results_of(bench, drawn, cu_num), whole))
        assert_right(drawn, whole)


@ON_HOPPER
@pytest.mark.sanitized
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_of_w_of_other_experts_change_no_bits(bench: Bench, layout: str) -> None:
    """They lie behind an expert's last, in the same tile: NaN, and under any scales."""
    for seed, N in enumerate((64, 192, 320)):
        drawn = draw_layer(Case(150, N, 352, 5, 2, 64), seed, "mxfp8", (NEAR, NEAR))
        drawn = activated(drawn, "silu", layout)
        plain, layer = results_of(bench, drawn), drawn.layer
        for spoilt in (0, 1):
            w, ws = layer.wq.view(torch.uint8).clone(), layer.ws.clone()
            w[spoilt::2, 0::3] = 0x7F
            ws[spoilt::2, 1::3] = NAN_SCALE
            ws[spoilt::2, 2::3, 0::2], ws[spoilt::2, 2::3, 1::2] = 250, 1
            tensors = [*drawn.tensors]
            tensors[2:4] = w.view(E4M3), ws
            out = results_of(bench, replace(drawn, tensors=tensors))
            rows = [
                t for t, expert in enumerate(layer.experts) if expert in range(1 - spoilt, 5, 2)
            ]
            assert rows
            for one, other in zip(out, plain, strict=True):
                assert same_bytes(one[rows], other[rows])


@ON_HOPPER
def test_layouts_of_gate_and_up_make_the_same_bits(bench: Bench) -> None:
    """Where scales are alike, so that which rows of w are in one tile changes nothing."""
    for seed, case in enumerate(CASES):
        drawn = activated(draw_layer(case, seed, "mxfp8", ((-9, -9), (-9, -9))), "silu", "halves")
        alternate = torch.stack(torch.arange(case.N).chunk(2), 1).flatten()
        wq, ws, bias = drawn.tensors[2], drawn.tensors[3], drawn.tensors[8]
        assert wq is not None and ws is not None
        tensors = [*drawn.tensors]
        tensors[2] = wq.view(torch.uint8)[:, alternate].view(E4M3)
        tensors[3] = ws[:, alternate]
        tensors[8] = None if bias is None else bias[:, alternate]
        problem = replace(drawn.problem, layout="interleaved")
        found = results_of(bench, replace(drawn, problem=problem, tensors=tensors))
        assert all(map(same_bytes, found, results_of(bench, drawn)))


@ON_HOPPER
def test_experts_of_other_ranks_make_zeros(bench: Bench) -> None:
    """Their blocks stand among those of experts that are here."""
    for seed in range(40):
        case = Case(120, 192, 160, 3, 2, 16)
        drawn = draw_layer(case, seed, "mxfp8", ids="vllm")
        if not drawn.layer.rows_of(case.E):
            continue
        drawn = activated(drawn, "silu", random.Random(seed).choice(LAYOUTS))
        payload, scales = results = results_of(bench, drawn)
        rows = drawn.layer.rows_of(case.E)
        assert not payload.view(torch.uint8)[rows].any() and not scales[rows].any()
        assert_right(drawn, results)
