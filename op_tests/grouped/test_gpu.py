"""``aiter_mx.grouped_gemm`` on Hopper: shapes, bounds, scales, repeatability, large memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

import aiter_mx
from aiter_mx.kernels.grouped_gemm import GroupedGemmProblem
from aiter_mx.kernels.registry import find_kernel
from aiter_mx.ops.grouped_gemm import grouped_gemm_ranges
from aiter_mx.target import target_of
from aiter_mx.timing import random_mx as random_mx_on_device
from op_tests.conformance import NAMES
from op_tests.grouped.cases import Operands, assert_group_rows
from op_tests.launches import moved
from op_tests.mx_reference import assert_close_to_reference, random_mx, random_mx_groups
from op_tests.sums import stated_errors

POISON = 7.25


@pytest.fixture
def hopper() -> Iterator[None]:
    if target_of(torch.device("cuda")).arch != "sm_90a":
        pytest.skip("the kernel is for another GPU")
    yield


ON_HOPPER = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]


def check(
    case: Operands,
    ends: Sequence[int],
    dtype: torch.dtype = torch.bfloat16,
    bias: torch.Tensor | None = None,
    index: torch.dtype = torch.int32,
    exact_sums: bool | None = None,
) -> torch.Tensor:
    out = torch.full((case[0].shape[0], case[2].shape[1]), POISON, dtype=dtype, device="cuda")
    offs = torch.tensor(ends, dtype=index, device="cuda")
    own = None if bias is None else bias.cuda()
    on_gpu = [t.cuda() for t in case]
    aiter_mx.grouped_gemm(*on_gpu, offs, out, dtype, own, exact_sums=exact_sums)
    result, (G, N, K) = out.cpu(), case[2].shape
    problem = GroupedGemmProblem(
        *(len(result), N, K, G, NAMES[dtype]),
        bias="none" if bias is None else NAMES[bias.dtype],
        index="i32" if index == torch.int32 else "i64",
    )
    errors = stated_errors("grouped_gemm", target_of(out.device, exact_sums), problem)
    assert_group_rows(result, case, [*zip([0, *ends], ends, strict=False)], bias, **errors)
    assert (result[ends[-1] :] == POISON).all()
    return out


class TestOnHopper:
    pytestmark = ON_HOPPER

    @pytest.mark.parametrize("K", [96, 352, 448])
    @pytest.mark.parametrize("N", [288, 608])
    @pytest.mark.parametrize("exact_sums", [None, True])
    def test_nan_in_w_reaches_all_tiles_of_its_group(
        self, exact_sums: bool | None, N: int, K: int
    ) -> None:
        """One tile of tokens looks for it: the others may be multiplied sooner or later, and a
        group may end in a tile of one row, or begin in one that was cut."""
        ends = [1030, 1030, 1287, 1288, 1800, 2900]
        case = random_mx_groups(2910, len(ends), N, K)
        a_scale, b, b_scale = case[1], case[2].view(torch.uint8), case[3]
        b[0, 5, 7] = b[2, N - 1, K - 1] = b[3, 64, 0] = b[5, 31, 33] = 0x7F
        b[0, N - 1, 95] = b[5, 127, 64] = b[5, N - 32, 32] = 0xFF
        b_scale[0, 70, 1], b_scale[5, 31], b_scale[5, 130, 0] = 250, 1, 255
        a_scale[1029, 0], a_scale[2899, 2], a_scale[1900, 1] = 200, 255, 240
        first = check(case, ends, exact_sums=exact_sums)
        for _ in range(10):
            again = check(case, ends, exact_sums=exact_sums)
            assert torch.equal(again.isnan(), first.isnan())
            assert torch.equal(again.nan_to_num(1.0), first.nan_to_num(1.0))

    @pytest.mark.parametrize("exact_sums", [None, True])
    def test_nan_in_all_of_w_makes_nan_of_its_group_alone(self, exact_sums: bool | None) -> None:
        case = random_mx_groups(2000, 3, 416, 160)
        case[2].view(torch.uint8)[1, :, 77] = 0x7F
        out = check(case, [600, 1500, 2000], exact_sums=exact_sums).float()
        assert out[600:1500].isnan().all() and not out[:600].isnan().any()
        assert not out[1500:].isnan().any()

    @pytest.mark.parametrize("layouts", [("16x4", "row_major"), ("256x8", "16x4")])
    def test_shuffled_scales_are_converted_eagerly_and_in_a_graph(
        self, layouts: tuple[str, str]
    ) -> None:
        a, a_scale, b, b_scale = (t.cuda() for t in random_mx_groups(300, 2, 160, 352))
        offs = torch.tensor([100, 300], dtype=torch.int32, device="cuda")
        expected = aiter_mx.grouped_gemm(a, a_scale, b, b_scale, offs)
        a_scale, b_scale = map(aiter_mx.shuffle_scales, (a_scale, b_scale), layouts)
        names = dict(zip(("a_scale_layout", "b_scale_layout"), layouts, strict=True))
        out = torch.full_like(expected, POISON)
        aiter_mx.grouped_gemm(a, a_scale, b, b_scale, offs, out, **names)
        assert torch.equal(out, expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            aiter_mx.grouped_gemm(a, a_scale, b, b_scale, offs, out, **names)
        out.fill_(POISON)
        graph.replay()
        assert torch.equal(out, expected)

    def test_wrong_bounds_harm_no_memory(self) -> None:
        a, a_scale, b, b_scale = (t.cuda() for t in random_mx_groups(300, 4, 96, 160))
        for bounds in ([0, 900, -5, 10**9, 7], [300, 0, 300, 0, 300]):
            offs = torch.tensor(bounds, device="cuda")
            starts, ends = torch.zeros_like(offs[1:]), torch.full_like(offs[1:], 300)
            aiter_mx.grouped_gemm(a, a_scale, b, b_scale, offs)
            grouped_gemm_ranges(a, a_scale, b, b_scale, starts, ends)  # all overlap
        torch.cuda.synchronize()
        check(random_mx_groups(300, 2, 96, 160), [100, 300])

    def test_linear_of_many_rows_is_one_group(self) -> None:
        generator = torch.Generator().manual_seed(0)
        xq, xs = random_mx(700, 544, generator, scale_exponents=(-6, 6))
        wq, ws = random_mx(416, 544, generator, scale_exponents=(-6, 6))
        bias = torch.randn(416)
        problem = {"M": 700, "N": 416, "K": 544}
        assert aiter_mx.warmup("linear", **problem)[0].kernel
        spec = find_kernel("linear", "sm_90a", "hip", "persistent")
        assert spec.workspace_bytes is not None
        out = aiter_mx.linear(
            *(t.cuda() for t in (xq, xs, wq, ws, bias)), out_dtype=torch.float32
        ).cpu()
        assert_close_to_reference(out, xq, xs, wq, ws, bias)

    @pytest.mark.parametrize("K", [128, 160, 352, 1088])
    def test_ops_take_scales_at_any_address(self, K: int) -> None:
        case = random_mx_groups(300, 2, 96, K)
        a, a_scale, b, b_scale = (t.cuda() for t in case)
        offs = torch.tensor([100, 300], dtype=torch.int32, device="cuda")
        expected = check(case, [100, 300])
        for shift in (1, 2, 3):
            views = [moved(scale, shift) for scale in (a_scale, b_scale)]
            assert torch.equal(aiter_mx.grouped_gemm(a, views[0], b, views[1], offs), expected)
        of_all = aiter_mx.linear(a, a_scale, b[1], b_scale[1].clone())
        again = aiter_mx.linear(a, moved(a_scale, 3), b[1], moved(b_scale[1], 1))
        assert torch.equal(of_all, again)

    def test_out_that_is_not_aligned_is_written_all_the_same(self) -> None:
        case = random_mx_groups(100, 1, 96, 160)
        memory = torch.full((100 * 96 + 1,), POISON, dtype=torch.bfloat16, device="cuda")
        out = memory[1:].view(100, 96)
        offs = torch.tensor([100], dtype=torch.int32, device="cuda")
        aiter_mx.grouped_gemm(*(t.cuda() for t in case), offs, out)
        assert torch.equal(out, check(case, [100])) and memory[0] == POISON

    def test_a_replay_takes_new_bounds(self) -> None:
        case = random_mx_groups(500, 3, 160, 352)
        on_gpu = [t.cuda() for t in case]
        offs = torch.tensor([100, 100, 500], dtype=torch.int32, device="cuda")
        out = torch.empty(500, 160, dtype=torch.bfloat16, device="cuda")
        aiter_mx.warmup("grouped_gemm", M=500, N=160, K=352, G=3)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            aiter_mx.grouped_gemm(*on_gpu, offs, out)
        for ends in ([3, 250, 500], [500, 500, 500]):
            offs.copy_(torch.tensor(ends))
            graph.replay()
            assert torch.equal(out, check(case, ends))

    def test_calls_on_two_streams_have_workspaces_of_their_own(self) -> None:
        """One shape, so one plan; other values, so that a shared expansion would show."""
        cases = [[t.cuda() for t in random_mx_groups(500, 3, 160, 4096, seed)] for seed in range(2)]
        offs = torch.tensor([100, 100, 500], dtype=torch.int32, device="cuda")
        expected = [aiter_mx.grouped_gemm(*case, offs) for case in cases]
        assert not torch.equal(*expected)
        streams = [torch.cuda.Stream() for _ in cases]
        for _ in range(10):
            outs = [
                torch.full((50, *one.shape), POISON, dtype=one.dtype).cuda() for one in expected
            ]
            torch.cuda.synchronize()
            for at in range(50):  # in turns, so that the streams overlap
                for stream, case, out in zip(streams, cases, outs, strict=True):
                    with torch.cuda.stream(stream):
                        aiter_mx.grouped_gemm(*case, offs, out[at])
            torch.cuda.synchronize()
            for out, one in zip(outs, expected, strict=True):
                assert torch.equal(out, one.expand_as(out))

    def test_launches_that_fill_the_gpu_on_two_streams_finish_and_are_bitwise_equal(self) -> None:
        """Each alone has a workgroup for every SM: together, some of each wait for the other, those
        of ``persistent``."""
        device = torch.device("cuda")
        G, rows, N, K = 5, 700, 2880, 1056
        ends = torch.arange(1, G + 1, dtype=torch.int32, device=device) * rows
        ends[1:3] = ends[1].item() - 99  # an empty group, and others that are not aligned
        cases = []
        for _ in range(2):
            b, b_scale = random_mx_on_device(G * N, K, device)
            weights = (b.view(G, N, K), b_scale.view(G, N, K // 32))
            cases.append((*random_mx_on_device(G * rows, K, device), *weights))
        expected = [aiter_mx.grouped_gemm(*case, ends, exact_sums=True) for case in cases]
        assert not torch.equal(*expected)
        outs = [torch.full((20, *one.shape), POISON, dtype=one.dtype).cuda() for one in expected]
        streams = [torch.cuda.Stream() for _ in cases]
        torch.cuda.synchronize()
        for at in range(20):
            for stream, case, out in zip(streams, cases, outs, strict=True):
                with torch.cuda.stream(stream):
                    aiter_mx.grouped_gemm(*case, ends, out[at], exact_sums=True)
        torch.cuda.synchronize()
        for out, one in zip(outs, expected, strict=True):
            assert torch.equal(out, one.expand_as(out))

    def test_16_bit_results_that_are_computed_again_replace_those_on_their_way(self) -> None:
        """By ``persistent``, boxes of whole slabs are stored by the copy engine, and some of theirs
        once more."""
        case = random_mx_groups(1300, 2, 320, 416)
        _, a_scale, b, b_scale = case
        b_scale[0, 5, 7], b_scale[1, 300], a_scale[60, 3] = 250, 1, 200
        b.view(torch.uint8)[0, 70, 7] = 0x7F
        first = check(case, [1030, 1300], exact_sums=True)
        for _ in range(20):
            again = check(case, [1030, 1300], exact_sums=True)
            assert torch.equal(again.nan_to_num(1.0), first.nan_to_num(1.0))

    @pytest.mark.slow
    @pytest.mark.parametrize("exact_sums", [None, True])
    @pytest.mark.parametrize(
        ("G", "rows", "N", "K"), [(4, 512, 2880, 2880), (8, 256, 4096, 7168), (4, 300, 7168, 2048)]
    )
    def test_ten_thousand_launches_are_bitwise_equal(
        self, G: int, rows: int, N: int, K: int, exact_sums: bool | None
    ) -> None:
        device = torch.device("cuda")
        a = random_mx_on_device(G * rows, K, device)
        b, b_scale = random_mx_on_device(G * N, K, device)
        weights = (b.view(G, N, K), b_scale.view(G, N, K // 32))
        ends = torch.arange(1, G + 1, dtype=torch.int32, device=device) * rows
        ends[:-1] -= 37
        first = aiter_mx.grouped_gemm(*a, *weights, ends, exact_sums=exact_sums)
        out, differ = torch.empty_like(first), torch.zeros((), dtype=torch.int64, device=device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(10):
                aiter_mx.grouped_gemm(*a, *weights, ends, out, exact_sums=exact_sums)
                differ += (out != first).any()
                out.fill_(POISON)
        for _ in range(1000):
            graph.replay()
        assert not differ.item()

    @pytest.mark.slow
    @pytest.mark.parametrize("exact_sums", [None, True])
    def test_operands_and_results_above_4_gib_are_right_in_their_last_rows(
        self, exact_sums: bool | None
    ) -> None:
        device = torch.device("cuda")
        target = target_of(device, exact_sums)
        for M, G, N, K in ((2048, 3, 20480, 73728), (69000, 2, 32768, 1024)):
            a = random_mx_on_device(M, K, device)
            b, b_scale = random_mx_on_device(G * N, K, device)
            weights = (b.view(G, N, K), b_scale.view(G, N, K // 32))
            ends = torch.arange(1, G + 1, dtype=torch.int32, device=device) * (M // G)
            ends[-1] = M
            out = aiter_mx.grouped_gemm(*a, *weights, ends, exact_sums=exact_sums)
            assert max(weights[0].nbytes, out.nbytes) > 4 << 30
            few = slice(M - 40, M)
            columns = slice(N - 64, N)
            assert_close_to_reference(
                out[few, columns].cpu(),
                a[0][few].cpu(),
                a[1][few].cpu(),
                weights[0][-1, columns].cpu(),
                weights[1][-1, columns].cpu(),
                **stated_errors("grouped_gemm", target, GroupedGemmProblem(M, N, K, G)),
            )
