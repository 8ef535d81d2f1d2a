"""What scales in common cost ``wgmma_fp8_rescaled``, and that its launch ahead makes no others."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch

import aiter_mx
from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.linear.wgmma_fp8_rescaled_sm90 import (
    ACCUMULATION_ERROR,
    MOST_ACCUMULATION_ERROR,
    RESCALING_ERROR,
    slices,
)
from aiter_mx.launch import bind_module
from aiter_mx.target import target_of
from op_tests.conformance import NAMES, Bench, bench_of, each
from op_tests.dispatch.products import KINDS, draws, hopper_sums
from op_tests.launches import poisoned
from op_tests.linear.operands import Operands, operands
from op_tests.linear.rescaled import (
    BY_BLOCKS,
    BY_ROWS,
    LAST_SCALE,
    LEAST_SCALE,
    NAN,
    ONE,
    ROWS,
    TOGETHER,
    Rescaled,
    both_rescaled,
    in_slices_of,
    rescaled,
)
from op_tests.linear.subjects.wgmma_fp8_rescaled_sm90 import NEAR, WGMMA_FP8_RESCALED
from op_tests.mx_reference import (
    NAN_SCALE,
    assert_close_to_reference,
    dequantize64,
    linear_reference,
    random_mx,
)

Operand = tuple[torch.Tensor, torch.Tensor]
Draw = Callable[[int, int, torch.Generator], Operand]
bench = bench_of(Bench)


def single_values(rows: int, K: int, generator: torch.Generator) -> Operand:
    """A number of any size in each block of 32, and zeros."""
    payload, scale = random_mx(rows, K, generator, scale_exponents=(-5, 5))
    kept = torch.randint(0, 32, (rows, K // 32, 1), generator=generator)
    codes = payload.view(torch.uint8).view(rows, K // 32, 32)
    others = torch.arange(32) != kept
    return codes.masked_fill(others, 0).view(rows, K).view(payload.dtype), scale


def with_outliers(rows: int, K: int, generator: torch.Generator) -> Operand:
    """Small numbers beside one large one of each block, and scales far from the others here and
    there."""
    payload, scale = random_mx(rows, K, generator, scale_exponents=(-2, 2))
    codes = payload.view(torch.uint8) & 0x9E
    codes.view(rows, K // 32, 32)[:, :, 7] |= 0x60
    scale[torch.rand(scale.shape, generator=generator) < 2e-3] += 7
    return codes.view(payload.dtype), scale


def with_zeros(rows: int, K: int, generator: torch.Generator) -> Operand:
    """Whole blocks of zeros whose scales are anything."""
    payload, scale = random_mx(rows, K, generator, scale_exponents=NEAR)
    empty = torch.rand(scale.shape, generator=generator) < 0.5
    payload.view(torch.uint8).view(*scale.shape, 32)[empty] = 0x80
    scale[empty] = torch.randint(0, 255, scale.shape, generator=generator).to(torch.uint8)[empty]
    return payload, scale


def of_random(rows: int, K: int, generator: torch.Generator) -> Operand:
    return random_mx(rows, K, generator, scale_exponents=NEAR)


def of_normal(rows: int, K: int, generator: torch.Generator) -> Operand:
    """What normal values are quantised to."""
    values = torch.randn(rows, K // 32, 32, generator=generator)
    exponent = values.abs().amax(-1, keepdim=True).log2().floor() - 8
    payload = (values / exponent.exp2()).clamp(-448, 448).to(torch.float8_e4m3fn)
    return payload.view(rows, K), (exponent[..., 0] + 127).to(torch.uint8)


def of_rows_of_sizes(rows: int, K: int, generator: torch.Generator) -> Operand:
    """Likewise, of rows that are larger by four and four, and more so in every second step."""
    payload, scale = of_normal(rows, K, generator)
    size = torch.arange(rows)[:, None] // 4 % 4 * (1 + torch.arange(K // 32) // 4 % 2 * 3)
    return payload, scale + size.to(torch.uint8)


EVERY = {TOGETHER, BY_ROWS, BY_BLOCKS}
FORMS: dict[Draw, tuple[set[int], set[int]]] = {  # of x and of w, that are drawn for certain
    of_random: ({TOGETHER, BY_BLOCKS}, EVERY),
    of_normal: ({TOGETHER}, {TOGETHER}),
    with_outliers: ({TOGETHER, BY_BLOCKS}, {BY_BLOCKS}),
    with_zeros: ({TOGETHER}, {TOGETHER}),
    single_values: ({BY_BLOCKS}, {BY_BLOCKS}),
    of_rows_of_sizes: ({TOGETHER}, {TOGETHER, BY_ROWS}),
}


@pytest.mark.parametrize("of_w", [False, True])
@pytest.mark.parametrize("draw", FORMS)
def test_an_element_changes_by_no_more_than_is_stated(draw: Draw, of_w: bool) -> None:
    seen, most = set(), 0.0
    for seed in range(6):
        payload, scale = draw(200, 1120, torch.Generator().manual_seed(seed))
        found = rescaled(payload, scale, of_w)
        before, after = dequantize64(payload, scale), dequantize64(found.payload, found.scale)
        largest = before.abs().view(*scale.shape, 32).amax(-1, keepdim=True)
        change = (after - before).abs().view(*scale.shape, 32)
        assert (change <= RESCALING_ERROR * largest).all()
        most = max(most, (change / largest).nan_to_num(0).max().item())
        steps = found.scale[:, : 8 * 4].view(200, 8, 4)
        alike = (steps == steps[..., :1]).all(-1)
        for block, step in product(range(2), range(8)):
            here, form = slice(ROWS * block, ROWS * (block + 1)), found.form[block, step]
            seen.add(int(form))
            assert form == BY_BLOCKS or alike[here, step].all()
            assert form != TOGETHER or not of_w or len(steps[here, step].unique()) == 1
            kept = found.payload.view(torch.uint8) == payload.view(torch.uint8)
            assert form != BY_BLOCKS or (kept | before.isnan())[here, 128 * step :][:, :128].all()
    assert seen >= FORMS[draw][of_w]
    if draw is of_random and not of_w:
        assert most > 0.4 * RESCALING_ERROR  # so that it is no loose bound


def test_results_of_changed_elements_are_within_the_stated_error_alone() -> None:
    for seed, K in enumerate((32, 64, 160, 1120)):
        drawn = operands(130, 300, K, seed, scale_exponents=NEAR)
        out = linear_reference(*both_rescaled(drawn), out_dtype=torch.float32)
        stated = {"accumulation_error": 0.0, "rescaling_error": RESCALING_ERROR}
        assert_close_to_reference(out, *drawn, **stated)
    with pytest.raises(AssertionError, match="elements are wrong"):
        assert_close_to_reference(out, *drawn, accumulation_error=0.0)
    out[7, 200] += 0.1 * out.abs().max()
    with pytest.raises(AssertionError, match="1 of 39000 elements are wrong"):
        assert_close_to_reference(out, *drawn, **stated)


def test_a_step_has_scales_of_its_blocks_where_one_would_lose_too_much_and_nowhere_else() -> None:
    codes = torch.full((300, 384), 0x78, dtype=torch.uint8)  # 256
    scale = torch.full((300, 12), 127, dtype=torch.uint8)

    def forms(of_w: bool) -> list[list[int]]:
        return rescaled(codes.view(torch.float8_e4m3fn), scale, of_w).form.tolist()

    together = [[TOGETHER] * 3] * 3
    assert forms(False) == forms(True) == together
    scale[140, 4] = 120
    for code, form in ((0x78, TOGETHER), (0x77, BY_BLOCKS)):  # 2.0 seven octaves down, and below
        codes[140, 4 * 32 : 5 * 32] = code
        for of_w in (False, True):
            assert forms(of_w) == [together[0], [TOGETHER, form, TOGETHER], together[0]]
    # A row whose scales are all eight octaves below the others' has them together.
    codes[140], scale[140, 4:8] = 0x78, 119
    assert forms(False) == together
    assert forms(True) == [together[0], [TOGETHER, BY_ROWS, TOGETHER], together[0]]
    codes[140, 128:256] = 0  # under any scale
    assert forms(True) == together
    for outside in (LEAST_SCALE - 1, LAST_SCALE + 1):  # products would leave fp32's range
        scale[:, :4] = outside
        assert forms(False) == forms(True) == [[BY_BLOCKS, TOGETHER, TOGETHER]] * 3


def test_nan_stays_in_its_block_and_row() -> None:
    payload, scale = random_mx(200, 256, torch.Generator().manual_seed(3), scale_exponents=(0, 0))
    payload.view(torch.uint8)[5, 40] = NAN
    scale[130, 6] = NAN_SCALE
    for of_w in (False, True):
        found = rescaled(payload, scale, of_w)
        assert not found.form.any()
        nans = dequantize64(found.payload, found.scale).isnan()
        expected = torch.zeros_like(nans)
        expected[5, 40] = expected[130, 6 * 32 : 7 * 32] = True
        assert torch.equal(nans, expected)


def sums_and_magnitudes(drawn: Operands) -> tuple[torch.Tensor, ...]:
    """Of a thousand drawn results: as the matrix unit adds a step, exact, and of magnitudes."""
    xq, xs, wq, ws = drawn
    generator = torch.Generator().manual_seed(1)
    found = []
    for of_w, (payload, scale) in enumerate(((xq, xs), (wq, ws))):
        one = rescaled(payload, scale, bool(of_w))
        picked = torch.randint(0, len(payload), (1000,), generator=generator)
        found.append(dequantize64(one.payload, one.scale)[picked])
    steps = zip(*(each.split(128, -1) for each in found), strict=True)
    total = sum(hopper_sums(x, w) for x, w in steps)
    assert isinstance(total, torch.Tensor)
    products = found[0] * found[1]
    return total, products.sum(-1), products.abs().sum(-1)


@pytest.mark.parametrize("K", [32, 64, 128, 1120])
def test_the_stated_error_of_random_payloads_is_a_bound_under_scales_in_common(K: int) -> None:
    for seed, exponents in enumerate([(0, 0), NEAR, (-2, 2)] * 2):
        drawn = operands(130, 300, K, seed, scale_exponents=exponents)
        total, exact, magnitudes = sums_and_magnitudes(drawn)
        assert ((total - exact).abs() <= ACCUMULATION_ERROR * magnitudes).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_stated_error_of_any_payloads_is_a_bound(kind: str) -> None:
    a, b = draws(kind, 2000, 128)
    error = (hopper_sums(a, b) - (a * b).sum(-1)).abs() / (a * b).abs().sum(-1)
    assert error.max() <= MOST_ACCUMULATION_ERROR


class Memory:
    """A workspace, as ``RescaledOperands`` of csrc/linear/rescaled_sm90.h lays it out."""

    def __init__(self, held: torch.Tensor, blocks: int, K: int) -> None:
        rows, steps = blocks * ROWS, -(-K // 128)
        pitch = -(-(rows + 2 * blocks) // 4) * 4
        self.payload = held[: rows * K].view(rows, K)
        words = held[rows * K :][: 4 * (steps * pitch + 1024)].clone().view(torch.int32)
        of_steps = words[: steps * pitch].view(steps, pitch)
        scales = of_steps[:, :rows].contiguous().view(torch.uint8).view(steps, rows, 4)
        self.scales = scales.transpose(0, 1).reshape(rows, 4 * steps)[:, : K // 32]
        floats = of_steps[:, rows : rows + 2 * blocks].contiguous().view(torch.float32).T
        self.common, self.kinds = floats.split(blocks)
        self.ended = words[steps * pitch :]

    def assert_holds(self, found: Rescaled, first: int, of_w: bool) -> None:
        """An operand, bit for bit but for the bits of NaN."""
        rows, last = len(found.payload), first + len(found.form) * ROWS
        codes, expected = self.payload[first : first + rows], found.payload.view(torch.uint8)
        nan = (expected & 0x7F) == NAN
        assert torch.equal((codes & 0x7F) == NAN, nan)
        assert torch.equal(codes[~nan], expected[~nan])
        assert torch.equal(self.scales[first : first + rows], found.scale)
        assert not self.payload[first + rows : last].any()  # which are multiplied as well
        of_step = found.scale[::ROWS, ::4].int() - ONE
        common = of_step.float().exp2() if of_w else torch.ones(of_step.shape)
        common[found.form == BY_ROWS], common[found.form == BY_BLOCKS] = -1.0, 0.0
        assert torch.equal(self.common[first // ROWS : last // ROWS], common)
        kinds = self.kinds[first // ROWS : last // ROWS]
        assert torch.equal(kinds < -1, found.form == BY_BLOCKS)
        assert ((kinds == -1) | (kinds == -2) | (kinds == -3)).all()


def assert_launched_ahead(bench: Bench, x: torch.Tensor | Operand, w: Operand) -> None:
    """Each slice's launch alone leaves what is said here of it, and x where it was."""
    unquantised = isinstance(x, torch.Tensor)
    (M, K), N = (x if unquantised else x[0]).shape, len(w[0])
    problem = LinearProblem(M, N, K, x_dtype=NAMES[x.dtype] if unquantised else "e4m3")
    of_x = rescaled(*(aiter_mx.quantize(x) if unquantised else x), False)
    kernel, device, config = bench.kernel, bench.device, {"ctas": 1}
    target = target_of(device)
    room = kernel.workspace_bytes(target, problem, config)
    memory = poisoned((room,), torch.uint8, device)
    there = [t.to(device) for t in ((x,) if unquantised else x)]
    xs = [None] if unquantised else []
    tensors = [*there, *xs, *(t.to(device) for t in w), None, None, memory]
    launches = kernel.launches(target, problem, config)[::2]
    x_blocks = -(-M // ROWS)
    for one, module in zip(slices(M, N, K), launches, strict=True):
        run = bind_module(kernel, module, target, problem, config, device.index)
        run(tensors, [0 if t is None else t.data_ptr() for t in tensors])
        held = Memory(memory.cpu(), slices(M, N, K)[0].blocks(M), K)
        held.assert_holds(of_x, 0, False)  # which the first of them made
        some = slice(one.first, one.first + one.features)
        of_w = rescaled(w[0].view(torch.uint8)[some].view(w[0].dtype), w[1][some], True)
        held.assert_holds(of_w, x_blocks * ROWS, True)
        assert not held.ended.any()


@each((WGMMA_FP8_RESCALED,))
@pytest.mark.parametrize("draw", FORMS)
def test_the_launch_ahead_rescales_as_is_said_here(bench: Bench, draw: Draw) -> None:
    for seed, (M, N, K) in enumerate(
        [(1, 3, 32), (130, 300, 1120), (257, 128, 608), (64, 520, 4096)]
    ):
        generator = torch.Generator().manual_seed(seed)
        assert_launched_ahead(bench, draw(M, K, generator), draw(N, K, generator))


@each((WGMMA_FP8_RESCALED,))
@pytest.mark.sanitized
def test_the_launch_ahead_keeps_scales_of_any_size_and_nan(bench: Bench) -> None:
    ends = [(e, e) for e in (-51, -50, 50, 51)]
    for seed, exponents in enumerate([(-127, 127), (-52, -48), (48, 52), (-6, 6), (0, 0), *ends]):
        x = random_mx(140, 352, torch.Generator().manual_seed(seed), scale_exponents=exponents)
        w = random_mx(
            *(200, 352, torch.Generator().manual_seed(seed + 9)),
            scale_exponents=exponents,
            nan_payload=1e-4,
            nan_scale=1e-2,
        )
        assert_launched_ahead(bench, x, w)
        assert_launched_ahead(bench, (w[0].clone(), w[1]), x)


@each((WGMMA_FP8_RESCALED,))
@pytest.mark.sanitized
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_launch_ahead_quantises_first(bench: Bench, dtype: torch.dtype) -> None:
    for seed, span in enumerate((0, 1, 2, 8)):
        generator = torch.Generator().manual_seed(seed)
        sizes = torch.randint(-span, span + 1, (150, 15), generator=generator).float().exp2()
        x = torch.randn(150, 480, generator=generator) * sizes.repeat_interleave(32, 1)
        x[7, :64], x[140, 100] = 0.0, float("nan")
        assert_launched_ahead(bench, x.to(dtype), of_random(200, 480, generator))


@each((WGMMA_FP8_RESCALED,))
def test_the_launch_ahead_of_a_slice_leaves_x_as_it_is(bench: Bench) -> None:
    generator = torch.Generator().manual_seed(2)
    x, w = of_random(300, 736, generator), of_random(700, 736, generator)
    with in_slices_of(2):
        assert len(slices(300, 700, 736)) == 3
        assert_launched_ahead(bench, x, w)
