"""``aiter_mx.grouped_gemm`` as its callers see it: bounds, outputs, torch.compile, errors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

import aiter_mx
from aiter_mx.kernels.grouped_gemm import GroupedGemmProblem
from aiter_mx.kernels.grouped_gemm import triton as triton_tiles
from aiter_mx.kernels.registry import find_kernel
from aiter_mx.ops import grouped_gemm as grouped_module
from aiter_mx.ops.grouped_gemm import grouped_gemm_ranges
from aiter_mx.target import hardware
from op_tests.grouped.cases import Operands, assert_group_rows
from op_tests.interpreted import assert_passes_in_the_interpreter
from op_tests.launches import moved
from op_tests.mx_reference import in_e5m2, random_mx_groups

OFFS = torch.tensor([0, 41, 41, 42, 90])


def operands(M: int = 90, G: int = 4, N: int = 64, K: int = 160) -> Operands:
    return random_mx_groups(M, G, N, K)


@pytest.fixture(params=["cpu", "sim"])
def computing(request: pytest.FixtureRequest) -> object:
    """Once with the torch reference, once with the gfx950 kernel in the simulator."""
    with aiter_mx.simulate("gfx950") if request.param == "sim" else nullcontext():
        yield


@pytest.mark.usefixtures("computing")
@pytest.mark.parametrize("offs", [OFFS, OFFS.int(), OFFS[1:], OFFS[1:].int()])
def test_offsets_and_ends_of_either_width_match_reference(offs: torch.Tensor) -> None:
    case, bias = operands(), torch.randn(4, 64)
    out = aiter_mx.grouped_gemm(*case, offs, out_dtype=torch.float32, bias=bias)
    assert (out.shape, out.dtype) == ((90, 64), torch.float32)
    assert_group_rows(out, case, [(0, 41), (41, 41), (41, 42), (42, 90)], bias)


@pytest.mark.usefixtures("computing")
def test_out_is_written_for_the_rows_of_groups_alone() -> None:
    case = operands()
    a, a_scale, b, b_scale = case
    e8m0 = torch.float8_e8m0fnu
    out = torch.full((90, 64), 7.0, dtype=torch.bfloat16)
    offs = torch.tensor([3, 41, 41, 42, 80])
    result = aiter_mx.grouped_gemm(a, a_scale.view(e8m0), b, b_scale.view(e8m0), offs, out=out)
    assert result is out
    assert_group_rows(out, case, [(3, 41), (41, 41), (41, 42), (42, 80)])
    assert (out[:3] == 7).all() and (out[80:] == 7).all()


@pytest.mark.usefixtures("computing")
def test_ranges_in_any_order_and_masked_groups_match_reference() -> None:
    case = operands()
    starts, ends = torch.tensor([50, 0, 13, 70]), torch.tensor([70, 12, 13, 90])
    out = torch.full((90, 64), 7.0)
    grouped_gemm_ranges(*case, starts, ends, out, torch.float32, expected_rows=8)
    assert_group_rows(out, case, [(50, 70), (0, 12), (13, 13), (70, 90)])
    assert (out[12:50] == 7).all()

    a, a_scale, b, b_scale = operands(80)
    masked = torch.tensor([3, 0, 20, 99], dtype=torch.int32)
    out = torch.full((4, 20, 64), 7.0)
    shaped = (a.view(4, 20, 160), a_scale.view(4, 20, 5), b, b_scale)
    grouped_gemm_ranges(*shaped, None, masked, out, torch.float32)
    assert_group_rows(
        out.view(80, 64), (a, a_scale, b, b_scale), [(0, 3), (20, 20), (40, 60), (60, 80)]
    )
    assert (out[0, 3:] == 7).all() and (out[1] == 7).all()


@pytest.mark.usefixtures("computing")
@pytest.mark.parametrize("layouts", [("16x4", "16x4"), ("256x8", "16x4"), ("32_8", "32_4_4")])
def test_scales_of_any_layout_give_the_same_result(layouts: tuple[str, str]) -> None:
    case = operands()
    a, a_scale, b, b_scale = case
    names = dict(zip(("a_scale_layout", "b_scale_layout"), layouts, strict=True))
    shuffled = [*map(aiter_mx.shuffle_scales, (a_scale, b_scale), layouts)]
    expected = aiter_mx.grouped_gemm(*case, OFFS)
    assert torch.equal(
        expected, aiter_mx.grouped_gemm(a, shuffled[0], b, shuffled[1], OFFS, **names)
    )

    masked = torch.tensor([3, 0, 20, 18], dtype=torch.int32)
    a, a_scale = operands(80)[:2]
    a, a_scale = a.view(4, 20, 160), a_scale.view(4, 20, 5)
    expected = torch.zeros(4, 20, 64, dtype=torch.bfloat16)
    found = expected.clone()
    grouped_gemm_ranges(a, a_scale, b, b_scale, None, masked, expected)
    a_scale = aiter_mx.shuffle_scales(a_scale, layouts[0])
    grouped_gemm_ranges(a, a_scale, b, shuffled[1], None, masked, found, **names)
    assert torch.equal(expected, found) and expected.any()


@pytest.mark.usefixtures("computing")
def test_what_quantisation_shuffles_is_taken_as_it_is() -> None:
    x, offs = torch.randn(90, 160), OFFS
    _, _, b, b_scale = operands()
    plain = aiter_mx.quantize_grouped(x, offs)
    expected = aiter_mx.grouped_gemm(*plain[:2], b, b_scale, plain[2])
    shuffled = aiter_mx.quantize_grouped(x, offs, scale_layout="16x4")
    found = aiter_mx.grouped_gemm(*shuffled[:2], b, b_scale, shuffled[2], a_scale_layout="16x4")
    end = plain[2][-1]
    assert torch.equal(expected[:end], found[:end]) and expected[:end].any()


def test_explain_says_which_scales_are_made_row_major_first() -> None:
    def reason(arch: str, a: str, b: str) -> str:
        shape = {"M": 512, "N": 256, "K": 512, "G": 2}
        return aiter_mx.explain(
            "grouped_gemm", arch=arch, **shape, a_scale_layout=a, b_scale_layout=b
        ).reason

    assert "row_major" not in reason("gfx950", "16x4", "16x4")
    assert "row_major" not in reason("gfx950", "row_major", "16x4")
    assert reason("gfx950", "256x8", "16x4").endswith(
        "it is grouped_gemm with a_scale_layout=row_major"
    )
    assert "a_scale_layout=row_major and b_scale_layout=row_major" in reason(
        "sm_90a", "16x4", "16x4"
    )


@pytest.mark.usefixtures("computing")
@pytest.mark.parametrize(("M", "N"), [(0, 64), (90, 0), (0, 0)])
def test_no_rows_or_no_features_give_an_empty_result(M: int, N: int) -> None:
    offs = torch.zeros(5, dtype=torch.int64)
    assert aiter_mx.grouped_gemm(*operands(M, N=N), offs).shape == (M, N)


@pytest.mark.usefixtures("computing")
def test_a_call_takes_the_bounds_that_are_in_memory_then() -> None:
    case, offs = operands(), OFFS.clone()
    aiter_mx.grouped_gemm(*case, offs)
    offs.copy_(torch.tensor([0, 1, 30, 30, 90]))
    out = aiter_mx.grouped_gemm(*case, offs)
    assert_group_rows(out, case, [(0, 1), (1, 30), (30, 30), (30, 90)])


def replaced(index: int, change: Callable[[torch.Tensor], object]) -> list[object]:
    changed: list[object] = [*operands(), OFFS]
    changed[index] = change(changed[index])
    return changed


BAD_OPERANDS: list[tuple[list[object], type[Exception], str]] = [
    (replaced(0, lambda t: t.float()), TypeError, "e4m3fn or torch.float8_e5m2, got torch.fl"),
    (replaced(1, lambda t: t.int()), TypeError, "a_scale must be torch.uint8 or torch.float8_e8m0"),
    (replaced(2, lambda t: t.tolist()), TypeError, "b must be a tensor, got list"),
    (replaced(3, lambda t: t[:, :, :4]), ValueError, r"b_scale must be \[4, 64, 5\], got"),
    (replaced(4, lambda t: t.float()), TypeError, "group_offs must be torch.int32 or torch.int64"),
    (replaced(4, lambda t: t[:3]), ValueError, r"group_offs must be \[4\] or \[5\], got \[3\]"),
    (replaced(4, lambda t: t.to("meta")), ValueError, "group_offs is on meta, but a is on cpu"),
    (replaced(0, lambda t: t[0]), ValueError, r"a must be \[M, K\] or, masked, \[G, rows, K\]"),
    (replaced(0, lambda t: t[None]), ValueError, r"a must be \[4, 90, 160\], got \[1, 90, 160\]"),
    (replaced(1, lambda t: t[:3]), ValueError, r"a_scale must be \[90, 5\], got \[3, 5\]"),
    (replaced(2, lambda t: t[0]), ValueError, r"b must have three dimensions, \[G, N, K\]"),
    (replaced(2, lambda t: t[:, :40]), ValueError, "N must be a multiple of 32, got N=40"),
    (replaced(2, lambda t: t[:0]), ValueError, "there must be at least one group, got none"),
    (replaced(0, lambda t: t.T.contiguous().T), ValueError, "a must be contiguous, got strides"),
    (replaced(4, lambda t: t.repeat(2)[::2]), ValueError, "group_offs must be contiguous"),
    (replaced(2, moved), ValueError, "b must start at a multiple of 16 bytes"),
]


@pytest.mark.usefixtures("computing")
@pytest.mark.parametrize(("arguments", "error", "message"), BAD_OPERANDS)
def test_bad_operand_is_refused_with_what_was_given_and_expected(
    arguments: list[object],
    error: type[Exception],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched: list[object] = []
    monkeypatch.setattr(grouped_module._plans, "by_call", {})
    monkeypatch.setattr(grouped_module, "bind", lambda *_: lambda *call: launched.append(call))
    with pytest.raises(error, match=message):
        aiter_mx.grouped_gemm(*arguments)
    assert not launched


def test_other_bad_arguments_are_refused() -> None:
    case = operands()
    for keywords, error, message in [
        ({"bias": torch.randn(4, 32)}, ValueError, r"bias must be \[4, 64\], got \[4, 32\]"),
        ({"out_dtype": torch.int32}, TypeError, "out_dtype must be torch.bfloat16 or"),
        ({"a_scale_layout": "4x16"}, ValueError, "a_scale_layout must be one of row_major, 16x4"),
        ({"b_scale_layout": None}, ValueError, "b_scale_layout must be one of .*, got None"),
        ({"a_scale_layout": "16x4"}, ValueError, r"a_scale must be \[96, 8\], got \[90, 5\]"),
        ({"b_scale_layout": "16x4"}, ValueError, r"b_scale must be \[4, 64, 8\], got \[4, 64, 5\]"),
        ({"out": torch.empty(90, 64)}, TypeError, "out must be of out_dtype torch.bfloat16"),
        ({"out": torch.empty(64, 90).bfloat16()}, ValueError, r"out must be \[90, 64\]"),
    ]:
        with pytest.raises(error, match=message):
            aiter_mx.grouped_gemm(*case, OFFS, **keywords)
    shared = torch.zeros(90 * 160, dtype=torch.uint8)
    a = shared.view(torch.float8_e4m3fn).view(90, 160)
    out = shared[: 90 * 64 * 2].view(torch.bfloat16).view(90, 64)
    with pytest.raises(ValueError, match="out overlaps a; give it memory of its own"):
        aiter_mx.grouped_gemm(a, *case[1:], OFFS, out=out)
    b_scale = moved(aiter_mx.shuffle_scales(case[3], "16x4"))
    with pytest.raises(ValueError, match="b_scale must start at a multiple of 16 bytes"):
        aiter_mx.grouped_gemm(*case[:3], b_scale, OFFS, b_scale_layout="16x4")
    tail = torch.empty(4, 64, 100, dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"K must be a multiple of 32, got K=100"):
        aiter_mx.grouped_gemm(tail[0], case[1], tail, case[3], OFFS)


@pytest.mark.usefixtures("payloads_compared_by_bytes")
def test_torch_library_checks_pass() -> None:
    case = operands()
    ops, options = torch.ops.aiter_mx, (None, 0, "row_major", "row_major")
    arguments = (*case, None, OFFS)
    torch.library.opcheck(ops.grouped_gemm.default, (*arguments, torch.float16, *options))
    out = torch.zeros(case[0].shape[0], case[2].shape[1])
    torch.library.opcheck(ops.grouped_gemm_out.default, (*arguments, out, *options))
    every = (*arguments, torch.float16, *options, None, 0, 0, True)
    torch.library.opcheck(ops.grouped_gemm.default, every)


def test_compiles_as_one_graph() -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def layer(x: torch.Tensor, b: torch.Tensor, s: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
        a, a_scale = aiter_mx.quantize(x)
        y = torch.zeros(x.shape[0], b.shape[1], dtype=torch.float32)
        aiter_mx.grouped_gemm(a, a_scale, b, s, o, out=y, out_dtype=torch.float32)
        a_scale = aiter_mx.quantize(x, scale_layout="16x4")[1]
        return y + aiter_mx.grouped_gemm(
            *(a, a_scale, b, s, o),
            out_dtype=torch.float32,
            a_scale_layout="16x4",
            exact_sums=True,
        )

    x = torch.randn(90, 160)
    _, _, b, s = operands()
    a, a_scale = aiter_mx.quantize(x)
    expected = 2 * aiter_mx.grouped_gemm(a, a_scale, b, s, OFFS, out_dtype=torch.float32)
    assert torch.equal(layer(x, b, s, OFFS), expected)


def test_most_tiles_is_the_most_there_can_be() -> None:
    for M in range(9):
        for G in (1, 2, 3):
            problem = GroupedGemmProblem(M, 32, 32, G)
            every = [[M]] if G == 1 else []
            if G == 2:
                every = [[i, M - i] for i in range(M + 1)]
            if G == 3:
                every = [[i, j, M - i - j] for i in range(M + 1) for j in range(M + 1 - i)]
            for rows in (1, 2, 4):
                most = max(sum(-(-size // rows) for size in sizes) for sizes in every)
                assert problem.most_tiles(rows) == most


@pytest.mark.parametrize("arch", ["gfx950", "sm_90a"])
def test_triton_has_legal_candidates_and_refuses_very_many_groups(arch: str) -> None:
    target, triton = hardware(arch), find_kernel("grouped_gemm", arch, "triton", "dot_scaled")
    for shape in ((1, 32, 32, 1), (8192, 7168, 2048, 16), (9, 64, 96, 256)):
        problem = GroupedGemmProblem(*shape)
        candidates = triton.candidates(target, problem)
        assert triton.configure(target, problem) in candidates
        for candidate in candidates:
            triton.check_config(candidate)
    many = GroupedGemmProblem(1, 32, 32, 5000)
    assert "G=5000 is above 4096" in (triton.refusal(target, many) or "")


@pytest.mark.parametrize(
    ("arch", "tiles"),
    [
        ("sm_90a", {1: (16, 128), 16: (16, 128), 17: (64, 64), 64: (64, 64), 65: (128, 128)}),
        ("sm_90a", {256: (128, 128), 257: (128, 256), 4096: (128, 256)}),
        ("gfx950", {1: (16, 128), 17: (32, 128), 33: (64, 128), 65: (128, 128)}),
    ],
)
def test_tritons_tile_is_that_for_an_average_groups_rows(
    arch: str, tiles: dict[int, tuple[int, int]]
) -> None:
    target = hardware(arch)
    for rows, tile in tiles.items():
        config = triton_tiles.configure(target, GroupedGemmProblem(8 * rows, 256, 256, 8))
        assert (config["BLOCK_M"], config["BLOCK_N"]) == tile
        assert config in triton_tiles.candidates(target, GroupedGemmProblem(8, 256, 256, 8))


def test_triton_matches_float64_in_its_interpreter() -> None:
    assert_passes_in_the_interpreter(__name__)


def run_triton_in_its_interpreter() -> None:
    from aiter_mx.fallbacks import grouped_gemm_triton

    torch.cuda.device_of = lambda tensor: nullcontext()
    tile = {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 64, "num_warps": 4, "num_stages": 2}
    (a, *others), bias = operands(N=96), torch.randn(4, 96)
    starts, ends = torch.tensor([50, -5, 13, 70]), torch.tensor([70, 12, 13, 999])
    for format, payload in (("e4m3", a), ("e5m2", in_e5m2(a))):
        out, case = torch.full((90, 96), 7.0), (payload, *others)
        problem = GroupedGemmProblem(90, 96, 160, 4, a_format=format)
        grouped_gemm_triton.run(problem, (*case, bias, out, starts, ends), tile)
        assert_group_rows(out, case, [(50, 70), (0, 12), (13, 13), (70, 90)], bias)
        assert (out[12:50] == 7).all()
        out.fill_(7.0)
        # Six ranges, and then two places more for 90 rows of 12 rows each.
        firsts = torch.tensor([0, 12, 24, 36, 60, 72, 90, 90], dtype=torch.int32)
        lasts = torch.tensor([12, 24, 30, 48, 72, 90, 0, 0], dtype=torch.int32)
        owners = torch.tensor([6, 1, 0, 1, 3, 0, 1, 9, 9], dtype=torch.int32)
        problem = replace(problem, layout="runs", run_rows=12)
        table = torch.cat([lasts, owners])
        grouped_gemm_triton.run(problem, (*case, bias, out, firsts, table), tile)
        of = owners[1:7].long()
        own = (*case[:2], case[2][of], case[3][of])
        assert_group_rows(out, own, [*zip(firsts[:6], lasts[:6], strict=True)], bias[of])
        assert (out[30:36] == 7).all() and (out[48:60] == 7).all()


if __name__ == "__main__":
    run_triton_in_its_interpreter()


def padded_operands() -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """The product of rows where they are, and what computes it of groups that are padded."""
    x, (_, _, b, b_scale) = torch.randn(90, 160), operands()
    padded = aiter_mx.quantize_dual_grouped(x, OFFS)
    expected = aiter_mx.grouped_gemm(*aiter_mx.quantize(x), b, b_scale, OFFS)
    return expected, (padded.rows, padded.row_scales, b, b_scale, padded.group_offs)


@pytest.mark.usefixtures("computing")
def test_padded_groups_are_stored_without_their_padding() -> None:
    expected, call = padded_operands()
    found = aiter_mx.grouped_gemm(*call, out_offs=OFFS, out_rows=90)
    assert torch.equal(found, expected)
    out = torch.full((95, 64), 7.0, dtype=torch.bfloat16)
    aiter_mx.grouped_gemm_dgrad(*call, out, out_offs=OFFS)
    assert torch.equal(out[:90], expected) and (out[90:] == 7).all()


def test_padded_groups_are_compiled_whole() -> None:
    expected, call = padded_operands()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def product(*call: torch.Tensor) -> torch.Tensor:
        return aiter_mx.grouped_gemm(*call, out_offs=OFFS, out_rows=90)

    assert torch.equal(product(*call), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"out_rows": 90}, "give out_offs"),
        ({"out_offs": OFFS[1:]}, r"must be \[5\]"),
        ({"out_offs": OFFS.int()}, "out_offs must be torch.int64"),
        (
            {"out_offs": OFFS, "out_rows": "90"},
            "out_rows must be a whole number, an int",
        ),
        ({"out_offs": OFFS, "out_rows": 89}, "within the 89 rows of the result; group 3 is 42 to"),
        ({"out_offs": torch.tensor([0, 41, 40, 42, 90])}, "group 1 is 41 to 40"),
        ({"out_offs": torch.tensor([0, 0, 0, 0, 129])}, "gives group 3 129 rows, and group_offs"),
    ],
)
def test_places_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    _, call = padded_operands()
    aiter_mx.grouped_gemm(*call)  # whose plan must not serve the next call
    with pytest.raises((ValueError, TypeError), match=message):
        aiter_mx.grouped_gemm(*call, **options)
