"""``grouped_gemm_dgrad`` and ``grouped_gemm_wgrad`` by their fallbacks: what they compute."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import aiter_mx
from aiter_mx.fallbacks import grouped_wgrad_torch
from aiter_mx.kernels.grouped_wgrad import GroupedWgradProblem
from aiter_mx.workloads import workload_of
from op_tests.interpreted import assert_passes_in_the_interpreter
from op_tests.mx_reference import assert_close_to_reference
from op_tests.training.cases import Case, check, draw_case

LENS = (0, 1, 31, 33, 127, 128, 160, 0)


def wgrad(case: Case, out: Tensor | None = None, **options: object) -> Tensor:
    return aiter_mx.grouped_gemm_wgrad(*case.operands, out, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_groups_of_any_length_match_float64(dtype: torch.dtype, index: torch.dtype) -> None:
    exponents = (-12, -6) if dtype == torch.float16 else (-6, 6)
    case = draw_case(96, 64, LENS, exponents=exponents, index=index, room=128)
    check(wgrad(case, out_dtype=dtype), case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_are_added_to_what_is_there_and_rounded_once(dtype: torch.dtype) -> None:
    case = draw_case(64, 96, (0, 33, 128))
    old = (torch.randn(case.shape) * 1e4).to(dtype)
    out = old.clone()
    assert wgrad(case, out, out_dtype=dtype, accumulate=True) is out
    check(out, case, old)


def test_lengths_are_given_as_offsets_before_padding_or_left_out() -> None:
    case = draw_case(64, 32, (5, 0, 128, 129))
    expected = wgrad(case)
    before = torch.nn.functional.pad(case.lens.cumsum(0), (1, 0)).int()
    assert torch.equal(wgrad(replace(case, lens=before)), expected)
    zeros = case.with_other_padding(0, 0)
    assert torch.equal(wgrad(zeros), expected)
    assert torch.equal(aiter_mx.grouped_gemm_wgrad(*zeros.operands[:5]), expected)


@pytest.mark.parametrize(("payload", "scale"), [(0x7F, 255), (0x7E, 187), (0xFF, 0)])
def test_padding_takes_no_part(payload: int, scale: int) -> None:
    case = draw_case(64, 64, (1, 33, 200))
    assert torch.equal(wgrad(case.with_other_padding(payload, scale)), wgrad(case))


def test_nan_reaches_its_group_and_row_alone() -> None:
    case = draw_case(64, 64, (40, 33))
    case.grad.view(torch.uint8)[3, 7] = 0x7F
    case.x_scale[5, 4] = 255
    out = wgrad(case)
    expected = torch.zeros(case.shape, dtype=torch.bool)
    expected[0, 3], expected[1, :, 5] = True, True
    assert torch.equal(out.isnan(), expected)


def test_what_the_quantiser_pads_is_multiplied_as_it_is() -> None:
    offs = torch.tensor([0, 41, 41, 300])
    dy, x = torch.randn(300, 96), torch.randn(300, 64)
    grad, rows = (aiter_mx.quantize_dual_grouped(each, offs) for each in (dy, x))
    operands = (grad.columns, grad.column_scales, rows.columns, rows.column_scales)
    out = aiter_mx.grouped_gemm_wgrad(*operands, rows.group_offs, offs, out_dtype=torch.float32)
    for g, (begin, end) in enumerate(((0, 41), (41, 41), (41, 300))):
        expected = dy[begin:end].T @ x[begin:end]
        assert (out[g] - expected).norm() <= 0.06 * expected.norm()


def test_dgrad_multiplies_by_the_weights_of_each_group() -> None:
    generator = torch.Generator().manual_seed(0)
    w, dy = torch.randn(2, 96, 64, generator=generator), torch.randn(70, 96, generator=generator)
    offs = torch.tensor([0, 30, 70])
    dual, rows = aiter_mx.quantize_dual_batched(w), aiter_mx.quantize(dy)
    out = aiter_mx.grouped_gemm_dgrad(*rows, dual.columns, dual.column_scales, offs)
    for g, part in enumerate((slice(0, 30), slice(30, 70))):
        of_group = (dual.columns[g], dual.column_scales[g])
        assert_close_to_reference(out[part], rows[0][part], rows[1][part], *of_group)


@pytest.mark.usefixtures("payloads_compared_by_bytes")
def test_torch_sees_the_op_as_it_is() -> None:
    case = draw_case(32, 64, (5, 33))
    call = torch.ops.aiter_mx.grouped_gemm_wgrad
    torch.library.opcheck(call, (*case.operands, torch.bfloat16, False))
    out = torch.zeros(case.shape)
    torch.library.opcheck(torch.ops.aiter_mx.grouped_gemm_wgrad_out, (*case.operands, out, True))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"x": torch.zeros(64, 160).to(torch.float8_e4m3fn)}, r"x must be \[K, 256\]"),
        ({"x_scale": torch.zeros(64, 7, dtype=torch.uint8)}, r"x_scale must be \[64, 8\]"),
        ({"lens": torch.zeros(4, dtype=torch.int32)}, r"group_lens must be \[2\] or"),
        ({"offs": torch.tensor([0, 128, 100], dtype=torch.int32)}, "group 1 is 128 to 100"),
        ({"offs": torch.tensor([0, 128, 384], dtype=torch.int32)}, "group 1 is 128 to 384"),
        ({"offs": torch.tensor([0, 96, 256], dtype=torch.int32)}, "multiples of 128"),
        ({"lens": torch.tensor([5, 129], dtype=torch.int32)}, "group 1 has 129 columns"),
        ({"lens": torch.tensor([-1, 9], dtype=torch.int32)}, "group 0 has -1 columns"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Tensor], expected: str) -> None:
    case = draw_case(32, 64, (5, 33))
    with pytest.raises(ValueError, match=expected):
        wgrad(replace(case, **changes))


def test_other_mistakes_are_told() -> None:
    case = draw_case(32, 64, (5, 33))
    with pytest.raises(ValueError, match="there is none; give out="):
        wgrad(case, accumulate=True)
    with pytest.raises(TypeError, match=r"group_lens must be torch\.int32"):
        wgrad(replace(case, lens=case.lens.long()))
    with pytest.raises(ValueError, match="out overlaps x"):
        wgrad(case, case.x.view(torch.bfloat16).flatten()[:4096].view(2, 32, 64))
    for field, value in (("M", 100), ("N", 40), ("out_dtype", "fp8"), ("accumulate", 2)):
        with pytest.raises(ValueError, match=field):
            GroupedWgradProblem(**{"M": 128, "N": 32, "K": 32, "G": 1} | {field: value})


def test_no_rows_at_all_give_zeros() -> None:
    case = draw_case(32, 64, (0, 0))
    assert not wgrad(case).any()
    out = torch.ones(case.shape, dtype=torch.bfloat16)
    assert wgrad(case, out, accumulate=True).eq(1).all()


def test_pieces_of_groups_add_up_to_them() -> None:
    case = draw_case(32, 64, (700, 0, 5, 128))
    (G, N, K), P = case.shape, case.grad.shape[1]
    operands, bounds = case.operands[:4], case.operands[4:]
    out = torch.empty(3 * G, N, K)
    problem = GroupedWgradProblem(P, N, K, 3 * G, "fp32", pieces=3)
    grouped_wgrad_torch.run(problem, (*operands, None, out, *bounds), {})
    pieces = out.view(G, 3, N, K)
    assert pieces[0].abs().amax((1, 2)).bool().all() and not pieces[1].any()
    assert not pieces[2:, 1:].any()  # a piece takes 128 columns at least
    check(pieces.sum(1), case)


def test_triton_matches_float64() -> None:
    assert_passes_in_the_interpreter("op_tests.training.triton_wgrad")


@pytest.mark.parametrize("accumulate", [0, 1])
def test_the_workload_judges_right_and_wrong_gradients(accumulate: int) -> None:
    problem = GroupedWgradProblem(512, 64, 96, 3, accumulate=accumulate)
    workload = workload_of("grouped_wgrad")
    operands = workload.operands(problem, torch.device("cpu"))
    judge = workload.judge(problem, operands)
    grouped_wgrad_torch.run(problem, operands, {})
    assert judge(operands).right
    out = operands[5]
    assert out is not None
    out[1, 3, 5] += out[1].abs().max() * 0.1
    assert not judge(operands).right
    sample = workload.sample(problem, 0.5)
    assert sample.M % 128 == 0 and sample.N % 32 == 0
