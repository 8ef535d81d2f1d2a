"""The quantisation ops: columns, both ways, groups, e2m1 and layouts against plain definitions."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import aiter_mx
from aiter_mx.dispatch.dispatcher import route
from aiter_mx.errors import CaptureError
from aiter_mx.kernels.quantize import KERNELS, QuantizeProblem
from aiter_mx.target import hardware
from aiter_mx.trial import try_out
from aiter_mx.workloads import workload_of
from op_tests.launches import same_bytes as equal
from op_tests.quantize.cases import draw

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
Tensors = tuple[Tensor, ...]


TILES = next(kernel for kernel in KERNELS if kernel.name == "tiles")


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 1) -> Tensor:
    return draw(shape, dtype, torch.Generator().manual_seed(seed))


def e2m1_by_definition(value: float, scale_byte: int) -> int:
    sign = 8 if math.copysign(1, value) < 0 else 0
    target = abs(value) / 2.0 ** (scale_byte - 127)
    distances = [(abs(number - target), code % 2, code) for code, number in enumerate(E2M1)]
    return sign | (min(distances)[2] if target < 6 else 7)


@pytest.mark.parametrize("mode", ["rceil", "floor"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_e2m1_is_quantised_as_defined(dtype: torch.dtype, mode: str) -> None:
    x = random(24, 96, dtype=dtype, seed=2)
    quarters = torch.arange(32, dtype=torch.float64) / 4  # every number and tie below 8
    x[0, :32] = quarters.to(dtype)
    x[0, 0] = 5.0 if mode == "rceil" else 7.5
    payload, scale = aiter_mx.quantize(x, mode=mode, format="e2m1")
    assert payload.dtype == torch.uint8 and payload.shape == (24, 48)
    codes = torch.stack((payload & 15, payload >> 4), dim=-1).flatten(-2)
    blocks = zip(x.double().view(-1, 32).tolist(), codes.view(-1, 32).tolist(), strict=True)
    for (block, got), byte in zip(blocks, scale.flatten().tolist(), strict=True):
        if not all(map(math.isfinite, block)):
            assert byte == 255 and got == [0] * 32
            continue
        amax = max(map(abs, block))
        exponent = math.frexp(amax)[1] - 1 - 2 if amax else -127
        if mode == "rceil" and amax / 2.0**exponent > 6:
            exponent += 1
        assert byte == min(max(exponent, -127), 127) + 127
        assert got == [e2m1_by_definition(value, byte) for value in block]


def test_every_e2m1_code_is_dequantised() -> None:
    payload = torch.arange(256).to(torch.uint8).repeat(8, 1)
    scale = torch.tensor([0, 1, 64, 127, 130, 200, 254, 255]).to(torch.uint8)[:, None].repeat(1, 16)
    got = aiter_mx.dequantize(payload, scale, torch.float64)
    for row, byte in enumerate(scale[:, 0].tolist()):
        factor = math.nan if byte == 255 else 2.0 ** (byte - 127)
        expected = [
            (-1 if code & 8 else 1) * E2M1[code & 7] * factor
            for pair in range(256)
            for code in (pair & 15, pair >> 4)
        ]
        torch.testing.assert_close(
            got[row], torch.tensor(expected, dtype=torch.float64), rtol=0, atol=0, equal_nan=True
        )


@pytest.mark.parametrize("format", ["e4m3", "e2m1"])
def test_columns_are_the_rows_of_the_transposed(format: str) -> None:
    x = random(2, 64, 96)
    expected = aiter_mx.quantize(x.mT, format=format)
    for got, want in zip(aiter_mx.quantize(x, -2, format=format), expected, strict=True):
        assert equal(got, want)
    both = aiter_mx.quantize_dual(x, format=format)
    rows = aiter_mx.quantize(x, format=format)
    for got, want in zip(both, (*rows, *expected), strict=True):
        assert equal(got, want)


def test_square_blocks_share_a_scale_and_their_elements() -> None:
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(3)) * 10
    both = aiter_mx.quantize_dual(x, block=(32, 32))
    assert equal(both.columns, both.rows.mT.contiguous())
    tiles = both.row_scales.view(2, 32, 3)
    assert (tiles == tiles[:, :1]).all()
    assert torch.equal(both.column_scales, tiles[:, 0].mT.repeat_interleave(32, dim=0))
    for m in range(2):
        for n in range(3):
            tile = x[32 * m : 32 * m + 32, 32 * n : 32 * n + 32]
            _, scale = aiter_mx.quantize(torch.full((1, 32), tile.abs().max().item()))
            assert tiles[m, 0, n] == scale
    assert equal(aiter_mx.quantize(x, block=(32, 32))[0], both.rows)


def test_batched_is_each_matrix_alone() -> None:
    x = random(3, 32, 64)
    batched = aiter_mx.quantize_dual_batched(x)
    for g in range(3):
        for got, want in zip(batched, aiter_mx.quantize_dual(x[g]), strict=True):
            assert equal(got[g], want)
    with pytest.raises(ValueError, match=r"\[G, M, N\], got \[32, 64\]"):
        aiter_mx.quantize_dual_batched(x[0])


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "floor"},
        {"mode": "even", "format": "e2m1"},
        {"format": "e5m2"},
        {"block": (32, 32)},
        {"scale_layout": "16x4"},
    ],
    ids=str,
)
def test_batched_takes_the_options_of_one_matrix(options: dict[str, Any]) -> None:
    x = random(3, 96, 160)
    batched = aiter_mx.quantize_dual_batched(x, **options)
    plain = aiter_mx.quantize_dual_batched(x)
    assert not all(equal(got, without) for got, without in zip(batched, plain, strict=True))
    for g in range(3):
        for got, want in zip(batched, aiter_mx.quantize_dual(x[g], **options), strict=True):
            assert equal(got[g], want)


@pytest.mark.parametrize("offs_dtype", [torch.int32, torch.int64])
def test_groups_are_padded_as_one_would_by_hand(offs_dtype: torch.dtype) -> None:
    sizes, N = [5, 0, 128, 200, 1], 64
    x = random(sum(sizes), N)
    offsets = torch.tensor([0, *sizes]).cumsum(0).to(offs_dtype)
    padded = [
        torch.nn.functional.pad(group, (0, 0, 0, -len(group) % 128)) for group in x.split(sizes)
    ]
    P = (len(x) + 127 * len(sizes)) // 128 * 128
    by_hand = torch.cat(padded)
    by_hand = torch.nn.functional.pad(by_hand, (0, 0, 0, P - len(by_hand)))
    expected = aiter_mx.quantize_dual(by_hand)
    got = aiter_mx.quantize_dual_grouped(x, offsets)
    for one, want in zip(got[:4], expected, strict=True):
        assert equal(one, want)
    ends = torch.tensor([0, *(len(group) for group in padded)]).cumsum(0)
    assert got.group_offs.dtype == offs_dtype and torch.equal(got.group_offs.long(), ends)
    for one, want in zip(aiter_mx.quantize_grouped(x, offsets), (*got[:2], got[4]), strict=True):
        assert equal(one, want)


@pytest.mark.parametrize("layout", ["16x4", "32_8", "256x8", "32_4_4"])
def test_scales_in_a_layout_are_the_shuffled_ones(layout: str) -> None:
    x = random(2, 96, 160)
    plain, shuffled = aiter_mx.quantize_dual(x), aiter_mx.quantize_dual(x, scale_layout=layout)
    for payload, scales in ((0, 1), (2, 3)):
        assert equal(shuffled[payload], plain[payload])
        assert equal(shuffled[scales], aiter_mx.shuffle_scales(plain[scales], layout))
        values = aiter_mx.dequantize(shuffled[payload], shuffled[scales], scale_layout=layout)
        expected = aiter_mx.dequantize(plain[payload], plain[scales])
        torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)
    vector = aiter_mx.quantize(x[0, 0], scale_layout=layout)
    values = aiter_mx.dequantize(*vector, scale_layout=layout)
    torch.testing.assert_close(
        values, aiter_mx.dequantize(*aiter_mx.quantize(x[0, 0])), rtol=0, atol=0, equal_nan=True
    )


def test_empty_tensors_give_empty_results() -> None:
    for shape in ((0, 64), (32, 0), (0, 32, 64), (2, 0, 64)):
        both = aiter_mx.quantize_dual(torch.empty(shape))
        assert both.rows.shape == shape
        assert both.columns.shape == (*shape[:-2], shape[-1], shape[-2])
    grouped = aiter_mx.quantize_grouped(torch.empty(0, 64), torch.zeros(2, dtype=torch.int32))
    assert grouped.rows.shape == (0, 64) and grouped.group_offs.tolist() == [0, 0]
    wide = aiter_mx.quantize_dual_grouped(torch.empty(5, 0), torch.tensor([0, 2, 5]))
    assert wide.rows.shape == (256, 0) and wide.group_offs.tolist() == [0, 128, 256]


def test_misaligned_and_strided_inputs_run_on_the_simulator() -> None:
    x = random(33, 65)[1:, 1:]
    with aiter_mx.simulate("gfx950"):
        got = aiter_mx.quantize_dual(x)
        shifted = aiter_mx.quantize(random(1, 65).flatten()[1:])
    for one, want in zip(got, aiter_mx.quantize_dual(x.contiguous()), strict=True):
        assert equal(one, want)
    assert equal(shifted[0], aiter_mx.quantize(random(1, 65).flatten()[1:].clone())[0])


def test_routes_say_why() -> None:
    rows = aiter_mx.explain("quantize", M=64, N=64, arch="gfx950")
    assert (rows.backend, rows.kernel) == ("hip", "rows")
    both = aiter_mx.explain("quantize", M=64, N=64, to="both", arch="sm_90a")
    assert both.kernel == "tiles" and "blocks along rows alone" in both.reason
    wide = aiter_mx.explain("quantize", M=32, N=1 << 23, to="columns", arch="sm_90a")
    assert wide.backend == "torch" and "columns, not N=8388608" in wide.reason


@pytest.mark.parametrize("groups", [0, 3])
def test_its_workload_judges_a_simulated_launch_right(groups: int) -> None:
    problem = QuantizeProblem(192, 96, to="both", groups=groups)
    trial = try_out(TILES, problem, TILES.configure(hardware("gfx950"), problem))
    judge = workload_of("quantize").judge(problem, trial.operands)
    assert judge(trial.operands).right
    written = trial.operands[4]
    assert written is not None
    written.view(torch.uint8)[..., 0] ^= 1
    assert not judge(trial.operands).right


def test_few_tiles_are_spread_over_the_gpu() -> None:
    target = hardware("gfx950")
    steps = [
        TILES.configure(target, QuantizeProblem(M, 4096, to="both"))["steps"]
        for M in (128, 1 << 13, 1 << 16)
    ]
    assert steps == [1, 4, 4]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: aiter_mx.quantize(x, 0, block=(32, 32)), ValueError, "multiple of 32 for"),
        (lambda x: aiter_mx.quantize(x.tolist()), TypeError, "x must be a tensor, got list"),
        (lambda x: aiter_mx.quantize_dual(None), TypeError, "x must be a tensor, got NoneType"),
        (lambda x: aiter_mx.quantize_dual_batched(0), TypeError, "x must be a tensor, got int"),
        (lambda x: aiter_mx.quantize_grouped(x, [0, 40]), TypeError, "group_offs must be a tensor"),
        (lambda x: aiter_mx.quantize_dual_grouped(x, None), TypeError, "group_offs must be a"),
        (lambda x: aiter_mx.dequantize(x, None), TypeError, "scale must be a tensor, got NoneType"),
        (lambda x: aiter_mx.quantize_dual(x), ValueError, r"got x of shape \[40, 64\]"),
        (lambda x: aiter_mx.quantize(x, 5), ValueError, "axis must be .* got 5"),
        (lambda x: aiter_mx.quantize(x, block=16), ValueError, r"32 or \(32, 32\), got 16"),
        (lambda x: aiter_mx.quantize(x, format="e3m4"), ValueError, "e4m3, e2m1, e5m2, got 'e3m4'"),
        (lambda x: aiter_mx.quantize(x, scale_layout="4x4"), ValueError, "got '4x4'"),
        (
            lambda x: aiter_mx.quantize_grouped(x, torch.tensor([0, 1]).float()),
            TypeError,
            "int32 or int64, got torch.float32",
        ),
        (
            lambda x: aiter_mx.quantize_grouped(x, torch.tensor([0])),
            ValueError,
            r"at least one group, got shape \[1\]",
        ),
        (
            lambda x: aiter_mx.quantize_grouped(x[None], torch.tensor([0, 1])),
            ValueError,
            r"\[rows, N\], got \[1, 40, 64\]",
        ),
    ],
)
def test_wrong_arguments_are_refused(call, error, message) -> None:
    with pytest.raises(error, match=message):
        call(torch.randn(40, 64))


def test_ops_pass_opcheck_and_compile() -> None:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(4))
    offsets = torch.tensor([0, 10, 32])
    ops, tests = torch.ops.aiter_mx, ("test_schema", "test_faketensor")
    for op, arguments in (
        (ops.quantize_dual, (x, "rceil", False, "e2m1", "16x4")),
        (ops.quantize_grouped, (x, offsets, "floor", "e4m3", "row_major")),
        (ops.quantize_dual_grouped, (x, offsets, "rceil", "e4m3", "32_8")),
        (ops.quantize_dual_grouped, (x, offsets, "rceil", "e4m3", "row_major", "columns")),
    ):
        torch.library.opcheck(op.default, arguments, test_utils=tests)

    def every(x: Tensor) -> tuple[Tensor, ...]:
        square = aiter_mx.quantize(x, -2, block=(32, 32))
        return *aiter_mx.quantize_dual_grouped(x, offsets), *aiter_mx.quantize_dual(x), *square

    compiled = torch.compile(every, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(x), every(x), strict=True):
        assert equal(got, want)


@pytest.mark.gpu
def test_a_captured_call_follows_group_sizes_that_change() -> None:
    x = random(1000, 128).cuda()
    offsets = torch.tensor([0, 100, 100, 600, 1000]).cuda()
    with (
        pytest.raises(CaptureError, match=r"aiter_mx.warmup\('quantize', M=1000, N=128"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        aiter_mx.quantize_dual_grouped(x, offsets, mode="floor")
    graph, *outs = captured_groups(x, offsets)
    for cuts in ([0, 100, 100, 600, 1000], [0, 0, 0, 0, 1000], [0, 129, 257, 999, 1000]):
        cut_again(offsets, cuts, *outs)
        graph.replay()
        torch.cuda.synchronize()
        assert_quantised_in_groups(x, cuts, *outs)


@pytest.mark.gpu
def test_graphs_on_two_streams_follow_group_sizes_with_a_workspace_each() -> None:
    """Of as many tiles as on Hopper take two launches, with scales in a workspace between them."""
    M, N = 5000, 2560
    problem = QuantizeProblem(M, N, "bf16", "both", groups=4, mode="floor", offsets="int64")
    assert route("quantize", hardware("sm_90a"), problem).kernel == "staged"
    streams = [torch.cuda.Stream() for _ in range(2)]
    calls = []
    for seed, stream in enumerate(streams):
        x = draw((M, N), torch.bfloat16, torch.Generator().manual_seed(seed)).cuda()
        offsets = torch.tensor([0, 100, 100, 600, M]).cuda()
        calls.append((x, offsets, captured_groups(x, offsets, stream)))
    for cuts in (([0, 1, 2, 3, M], [0, 0, 0, 0, M]), ([0, 129, 257, M - 1, M], [0, 2500, M, M, M])):
        for (_, offsets, (_, *outs)), cut in zip(calls, cuts, strict=True):
            cut_again(offsets, cut, *outs)
        torch.cuda.synchronize()
        for _ in range(20):
            for stream, (_, _, (graph, *_)) in zip(streams, calls, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
        torch.cuda.synchronize()
        for (x, _, (_, *outs)), cut in zip(calls, cuts, strict=True):
            assert_quantised_in_groups(x, cut, *outs)


def captured_groups(
    x: torch.Tensor, offsets: torch.Tensor, stream: torch.cuda.Stream | None = None
) -> tuple[torch.cuda.CUDAGraph, Tensors, Tensors]:
    """A graph that quantises groups of x both ways and along rows, and what it writes."""
    (M, N), groups = x.shape, len(offsets) - 1
    for to in ("rows", "both"):
        aiter_mx.warmup("quantize", M=M, N=N, groups=groups, to=to, mode="floor")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        both = aiter_mx.quantize_dual_grouped(x, offsets, mode="floor")
        rows = aiter_mx.quantize_grouped(x, offsets, mode="floor")
    return graph, both, rows


def cut_again(offsets: torch.Tensor, cuts: list[int], both: Tensors, rows: Tensors) -> None:
    """Other groups from the next replay on, and outputs that are poisoned until then."""
    offsets.copy_(torch.tensor(cuts))
    for out in (*both, *rows):
        out.view(torch.uint8).fill_(0x5A)


def assert_quantised_in_groups(
    x: torch.Tensor, cuts: list[int], both: Tensors, rows: Tensors
) -> None:
    expected = aiter_mx.quantize_dual_grouped(x.cpu(), torch.tensor(cuts), mode="floor")
    for got, want in zip(both, expected, strict=True):
        assert equal(got.cpu(), want)
    for got, want in zip(rows, (*expected[:2], expected[4]), strict=True):
        assert equal(got.cpu(), want)


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["e4m3", "e2m1"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_nan_spoils_no_other_block_of_a_whole_tile(dtype: torch.dtype, format: str) -> None:
    x = draw((384, 640), dtype, torch.Generator().manual_seed(5), finite=True)
    for m, n, bad in ((300, 600, math.nan), (17, 33, math.inf), (200, 5, -math.inf)):
        x[m, n] = bad
    for mode in ("rceil", "floor"):
        got = aiter_mx.quantize_dual(x.cuda(), mode=mode, format=format)
        for one, want in zip(got, aiter_mx.quantize_dual(x, mode=mode, format=format), strict=True):
            assert equal(one.cpu(), want)


@pytest.mark.gpu
def test_tensors_above_4_gib_are_quantised_to_their_ends() -> None:
    rows, N = (1 << 21) + 96, 1024  # 4 GiB and some of bf16
    x = torch.empty(rows, N, dtype=torch.bfloat16, device="cuda")
    x.view(torch.int16).random_(-(2**15), 2**15)
    both = aiter_mx.quantize_dual(x)
    plain = aiter_mx.quantize(x)
    for first in (0, rows // 2 // 32 * 32, rows - 256):
        part = slice(first, first + 256)
        expected = aiter_mx.quantize_dual(x[part].cpu())
        assert equal(both.rows[part].cpu(), expected.rows)
        assert equal(both.row_scales[part].cpu(), expected.row_scales)
        assert equal(both.columns[:, part].cpu(), expected.columns)
        blocks = slice(first // 32, first // 32 + 8)
        assert equal(both.column_scales[:, blocks].cpu(), expected.column_scales)
        assert equal(plain[0][part].cpu(), expected.rows)


@pytest.mark.gpu
def test_thousand_launches_are_bitwise_equal() -> None:
    x = random(512, 1024).cuda()
    first = aiter_mx.quantize_dual(x)
    for _ in range(1000):
        for got, want in zip(aiter_mx.quantize_dual(x), first, strict=True):
            assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize(
    ("device", "sizes", "N"),
    [
        ("cpu", (41, 0, 200), 96),
        pytest.param("cuda", (300, 0, 129, 900), 512, marks=pytest.mark.gpu),
        pytest.param("cuda", (2048, 1, 4000, 0, 1000), 2880, marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rows_that_are_not_padded_are_those_of_quantize(
    device: str, sizes: tuple[int, ...], N: int, dtype: torch.dtype
) -> None:
    offs = torch.tensor([0, *itertools.accumulate(sizes)], device=device)
    x = torch.randn(sum(sizes), N, device=device).to(dtype)
    found = aiter_mx.quantize_dual_grouped(x, offs, pad_rows=False)
    expected = (*aiter_mx.quantize(x), *aiter_mx.quantize_grouped(x, offs, -2))
    assert all(map(equal, found, expected))
    with pytest.raises(ValueError, match="row-major"):
        aiter_mx.quantize_dual_grouped(x, offs, pad_rows=False, scale_layout="16x4")
