"""``wgmma_fp8_rescaled`` on a GPU, beyond what the conformance suite asks of every kernel."""

from __future__ import annotations

import pytest
import torch

import aiter_mx
from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.linear.wgmma_fp8_rescaled_sm90 import (
    ACCUMULATION_ERROR,
    RESCALING_ERROR,
    slices,
)
from op_tests.conformance import Bench, bench_of, each
from op_tests.launches import (
    Out,
    assert_repeats_on_two_streams,
    bound,
    is_poison,
    poisoned,
    same_bytes,
)
from op_tests.linear.launches import launch_linear
from op_tests.linear.operands import Operands, bias_as_large_as_outputs, operands
from op_tests.linear.rescaled import (
    BY_BLOCKS,
    BY_ROWS,
    TOGETHER,
    both_rescaled,
    forms_of,
    in_slices_of,
)
from op_tests.linear.subjects.wgmma_fp8_rescaled_sm90 import (
    LESS_NEAR,
    NEAR,
    WGMMA_FP8_RESCALED,
)
from op_tests.mx_reference import NAN_SCALE, assert_close_to_reference

bench = bench_of(Bench)
ON_HOPPER = each((WGMMA_FP8_RESCALED,))


def launch(
    bench: Bench,
    drawn: Operands,
    ctas: int,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    return launch_linear(bench.kernel, bench.device, {"ctas": ctas}, drawn, bias, dtype)


def assert_right(out: torch.Tensor, drawn: Operands, bias: torch.Tensor | None = None) -> None:
    """By what is multiplied, and by what is asked for."""
    error = ACCUMULATION_ERROR
    assert_close_to_reference(out, *both_rescaled(drawn), bias, accumulation_error=error)
    assert_close_to_reference(
        *(out, *drawn, bias), accumulation_error=error, rescaling_error=RESCALING_ERROR
    )


@ON_HOPPER
@pytest.mark.parametrize("ctas", [1, pytest.param(7, marks=pytest.mark.sanitized), 36])
@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_slices_of_w_come_to_what_all_of_it_does(bench: Bench, ctas: int, blocks: int) -> None:
    """Of whole tiles bit for bit; where tiles are shared, others may be shared than without."""
    M, K = 200, 1120
    for N in (1001, 904):  # features of which 16 bytes are not and are whole
        drawn = operands(M, N, K, N, scale_exponents=NEAR)
        bias = bias_as_large_as_outputs(drawn, torch.bfloat16, 3)
        whole = launch(bench, drawn, min(ctas, 18 * blocks), bias)
        with in_slices_of(blocks):
            assert len(slices(M, N, K)) == -(-8 // blocks)
            out = launch(bench, drawn, min(ctas, 18 * blocks), bias)
        assert_right(out, drawn, bias)
        assert ctas > 1 or same_bytes(out, whole)


@ON_HOPPER
@pytest.mark.sanitized
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("elements", [1, 4])
def test_results_begin_at_any_address(bench: Bench, dtype: torch.dtype, elements: int) -> None:
    M, N, K = 140, 264, 608
    drawn = operands(M, N, K, 1, scale_exponents=(-11, -6))
    expected = launch(bench, drawn, 7, dtype=dtype)
    problem = LinearProblem(M, N, K, "bf16" if dtype is torch.bfloat16 else "fp16")
    memory = poisoned((M * N + 16,), dtype, bench.device)
    y = memory[elements : elements + M * N].view(M, N)
    assert y.data_ptr() % 16
    run = bound(bench.kernel, bench.device, problem, {"ctas": 7})
    run([*(t.to(bench.device) for t in drawn), None, y])
    assert same_bytes(y.cpu(), expected)
    assert is_poison(memory[:elements]) and is_poison(memory[elements + M * N :])


@ON_HOPPER
@pytest.mark.sanitized
@pytest.mark.parametrize("ctas", [1, 7, 108])
def test_steps_of_each_form_are_added_amid_others(bench: Bench, ctas: int) -> None:
    M, N, K = 200, 700, 1120
    drawn = operands(M, N, K, 4, scale_exponents=(0, 0))
    assert (forms_of(drawn) == TOGETHER).all()
    _, xs, _, ws = drawn
    xs[150, 4 * 3 + 1] -= 9  # a block of x in step 3, one of w in step 5, and a row of w in step 4
    ws[300, 4 * 5 + 2] -= 9
    ws[10, 4 * 4 : 4 * 5] -= 9
    ws[690, 4 * 8 : 4 * 9] -= 9  # of the last step, which ends early
    ws[131, :4] -= 9
    expected = torch.full((2, 6, 9), TOGETHER)
    expected[:, 0, 4] = expected[:, 5, 8] = expected[:, 1, 0] = BY_ROWS
    expected[1, :, 3] = expected[:, 2, 5] = BY_BLOCKS
    assert torch.equal(forms_of(drawn), expected)
    assert_right(launch(bench, drawn, ctas), drawn)


@ON_HOPPER
@pytest.mark.parametrize("exponents", [(0, 0), LESS_NEAR, (-20, 20)], ids=str)
def test_rows_of_zeros_come_to_zero_under_any_scales(
    bench: Bench, exponents: tuple[int, int]
) -> None:
    drawn = operands(200, 300, 736, 6, scale_exponents=exponents)
    generator = torch.Generator().manual_seed(7)
    zeros = [[3, *range(64, 128), 199], [5, *range(128, 256), 299]]
    for rows, payload, scale in zip(zeros, drawn[::2], drawn[1::2], strict=True):
        payload.view(torch.uint8)[rows] = 0
        anything = torch.randint(0, 255, (len(rows), scale.shape[1]), generator=generator)
        scale[rows] = anything.to(torch.uint8)
    for ctas in (1, 11):
        out = launch(bench, drawn, ctas)
        assert not out[zeros[0]].any() and not out[:, zeros[1]].any()
        assert_right(out, drawn)


@ON_HOPPER
@pytest.mark.parametrize("exponents", [(0, 0), NEAR, (-20, 20)], ids=str)
def test_a_nan_scale_of_one_row_reaches_its_results_alone(
    bench: Bench, exponents: tuple[int, int]
) -> None:
    for seed, (row, block) in enumerate([(0, 0), (140, 5), (299, 22)]):
        drawn = operands(200, 300, 736, seed, scale_exponents=exponents)
        plain = launch(bench, drawn, 11)
        drawn[3][row, block] = NAN_SCALE
        out = launch(bench, drawn, 11)
        assert out.isnan().all(0).nonzero().flatten().tolist() == [row]
        assert int(out.isnan().sum()) == len(out)
        assert_right(out, drawn)
        if exponents == (0, 0):  # nor does it change what the others are multiplied by
            others = torch.arange(300) != row
            assert same_bytes(out[:, others], plain[:, others])


@ON_HOPPER
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_unquantised_x_whose_blocks_are_near_comes_to_what_quantising_first_gives(
    bench: Bench, dtype: torch.dtype
) -> None:
    M, N, K = 270, 300, 1120
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(M, K, generator=generator).to(dtype)
    quantised = aiter_mx.quantize(x)
    w = operands(1, N, K, 3, scale_exponents=LESS_NEAR)[2:]
    assert {*forms_of((*quantised, *w)).unique().tolist()} == {TOGETHER, BY_ROWS, BY_BLOCKS}
    name = "bf16" if dtype is torch.bfloat16 else "fp16"
    problem = LinearProblem(M, N, K, x_dtype=name)
    y = poisoned((M, N), torch.bfloat16, bench.device)
    run = bound(bench.kernel, bench.device, problem, {"ctas": 20})
    run([x.to(bench.device), None, *(t.to(bench.device) for t in w), None, y])
    assert same_bytes(y.cpu(), launch(bench, (*quantised, *w), 20))


@ON_HOPPER
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("x_dtype", ["e4m3", "bf16"])
@pytest.mark.parametrize("exponents", [NEAR, LESS_NEAR], ids=str)
def test_shared_tiles_repeat_bit_for_bit_on_two_streams(
    bench: Bench, pdl: bool, x_dtype: str, exponents: tuple[int, int]
) -> None:
    """Whichever of its parts ends last."""
    for M, N, K, ctas in ((300, 1000, 4096, 132), (129, 384, 6144, 131), (700, 1281, 1184, 50)):
        drawn = operands(M, N, K, ctas, scale_exponents=exponents)
        x: tuple[torch.Tensor | None, ...] = tuple(t.to(bench.device) for t in drawn[:2])
        if x_dtype == "bf16":
            generator = torch.Generator().manual_seed(M)
            x = torch.randn(M, K, generator=generator).bfloat16().to(bench.device), None
        problem = LinearProblem(M, N, K, pdl=pdl, x_dtype=x_dtype)
        run = bound(bench.kernel, bench.device, problem, {"ctas": ctas})
        call = (*x, *(t.to(bench.device) for t in drawn[2:]), None, Out((M, N), torch.bfloat16))
        assert_repeats_on_two_streams(run, [call, call], launches=50)
