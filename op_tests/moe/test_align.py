"""``moe_align`` and ``moe_sort`` against lists made by hand."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import aiter_mx
from aiter_mx.dispatch.explain import explain
from aiter_mx.kernels.moe_align import MoeAlignProblem
from aiter_mx.kernels.registry import find_kernel
from aiter_mx.target import hardware, target_of
from aiter_mx.trial import try_out
from op_tests.conformance import in_order
from op_tests.launches import (
    Out,
    assert_repeats_on_two_streams,
    bound,
    launch,
    moved,
    same_bytes,
)
from op_tests.moe.operands import draw_ids
from op_tests.places import device_in

kernels_device = device_in("sim", "cuda")


def lists_by_hand(
    rows: list[list[int]], block_m: int, numbers: list[int], drop_absent: bool
) -> tuple[list[list[tuple[int, int]]], list[int]]:
    """For each block its (token, slot) pairs, without padding, and its expert's number.

    rows: the experts of each token, in the order of its slots.
    """
    by_expert: dict[int, list[tuple[int, int]]] = {}
    for token, experts in enumerate(rows):
        for slot, expert in enumerate(experts):
            if 0 <= expert < len(numbers) and (numbers[expert] >= 0 or not drop_absent):
                by_expert.setdefault(expert, []).append((token, slot))
    blocks, owners = [], []
    for expert in sorted(by_expert):
        pairs = by_expert[expert]
        for first in range(0, len(pairs), block_m):
            blocks.append(pairs[first : first + block_m])
            owners.append(numbers[expert])
    return blocks, owners


def randomise(monkeypatch: pytest.MonkeyPatch, draw: random.Random) -> None:
    in_order(monkeypatch, draw, draw.randrange(1000))
    monkeypatch.setenv("AITER_MX_SIM_DELAY", "1")  # ids are written over padding


def assert_lists(
    ids: Tensor, expert_ids: Tensor, padded: Tensor, expected: object, block_m: int, M: int, k: int
) -> None:
    """vLLM's lists are the expected ones; k: slots of a token, shared ones included."""
    blocks, owners = expected  # type: ignore[misc]
    assert padded.tolist() == [len(blocks) * block_m]
    assert expert_ids.tolist() == owners + [-1] * (len(expert_ids) - len(owners))
    wanted = []
    for pairs in blocks:
        wanted += [token * k + slot for token, slot in pairs] + [M * k] * (block_m - len(pairs))
    assert ids.tolist() == wanted + [M * k] * (len(ids) - len(wanted))


# Most experts, id dtype: what compiled kernels depend on.
VARIANTS = [(64, torch.int32), (256, torch.int64)]
CASES_EACH = 20
BLOCKS_M = (4, 12, 16, 20, 32, 64, 128, 260)


@pytest.mark.parametrize(("most_experts", "dtype"), VARIANTS, ids=str)
def test_align_lists_every_routed_row_once(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, most_experts: int, dtype: torch.dtype
) -> None:
    draw = random.Random(most_experts)
    for case in range(CASES_EACH):
        randomise(monkeypatch, draw)
        shared, mapped = draw.choice([0, 0, 1, 2]), draw.random() < 0.5
        E, block_m = draw.randint(most_experts // 2 + 1, most_experts - 2), draw.choice(BLOCKS_M)
        top_k = draw.choice([1, 2, 4, 6])
        M = draw.choice([0, 1, 2, draw.randint(3, 40), draw.randint(41, 1000 // (top_k + shared))])
        topk_ids = draw_ids(draw, M, top_k, E).to(dtype)
        numbers, expert_map, local = list(range(E)), None, E
        if mapped:
            here = [draw.random() < 0.3 for _ in range(E)]
            numbers = [sum(here[:e]) if here[e] else -1 for e in range(E)]
            expert_map = torch.tensor(numbers, dtype=torch.int32, device=device)
            local = sum(here)
        drop = mapped and case % 2 == 0
        count = draw.randint(-1, M + 2) if case % 3 == 1 else M
        number = torch.tensor([count], dtype=torch.int32, device=device)
        ids, expert_ids, padded = aiter_mx.moe_align(
            topk_ids.to(device),
            block_m,
            E,
            expert_map,
            drop_absent=drop,
            shared_experts=shared,
            first_shared=local,
            num_tokens=number if case % 3 == 1 else None,
        )
        all_numbers = numbers + [local + s for s in range(shared)]
        rows = [
            [e if 0 <= e < E else -1 for e in row] + [E + s for s in range(shared)]
            for row in topk_ids[: max(count, 0)].tolist()
        ]
        expected = lists_by_hand(rows, block_m, all_numbers, drop)
        assert_lists(ids, expert_ids, padded, expected, block_m, M, top_k + shared)


def test_sort_lists_packed_ids_with_their_weights(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(2)
    for case in range(CASES_EACH):
        randomise(monkeypatch, draw)
        E, block_m, top_k = draw.randint(1, 64), draw.choice(BLOCKS_M), draw.randint(1, 8)
        M, masked = draw.choice([0, 1, draw.randint(2, 90)]), draw.random() < 0.5
        topk_ids = draw_ids(draw, M, top_k, E).to(torch.int32)
        weights = torch.rand(M, top_k)
        numbers, mask = list(range(E)), None
        if masked:
            here = [draw.random() < 0.5 for _ in range(E)]
            numbers = [sum(here[:e]) if here[e] else -1 for e in range(E)]
            mask = torch.tensor(here).to(device, torch.int32)
        count = draw.randint(0, M + 2) if case % 2 else M
        local_tokens = torch.tensor([count], dtype=torch.int32, device=device)
        ids, sorted_weights, expert_ids, valid = aiter_mx.moe_sort(
            topk_ids.to(device),
            weights.to(device),
            E,
            block_m,
            mask,
            local_tokens if case % 2 else None,
        )
        count = min(count, M)
        blocks, owners = lists_by_hand(topk_ids[:count].tolist(), block_m, numbers, True)
        assert valid.tolist() == [len(blocks) * block_m, count]
        assert expert_ids.tolist() == owners + [-1] * (len(expert_ids) - len(owners))
        wanted, wanted_weights = [], []
        padding = top_k << 24 | M
        for pairs in blocks:
            wanted += [slot << 24 | token for token, slot in pairs]
            wanted_weights += [float(weights[token, slot]) for token, slot in pairs]
            wanted += [padding] * (block_m - len(pairs))
            wanted_weights += [0.0] * (block_m - len(pairs))
        left = len(ids) - len(wanted)
        assert ids.tolist() == wanted + [padding] * left
        assert sorted_weights.tolist() == wanted_weights + [0.0] * left


def test_packed_ids_hold_128_slots(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    M, top_k = 3, 128
    topk_ids = draw_ids(random.Random(8), M, top_k, 5).clamp(0, 4).to(device, torch.int32)
    weights = torch.rand(M, top_k).to(device)
    ids, sorted_weights, expert_ids, valid = aiter_mx.moe_sort(topk_ids, weights, 5, 8)
    padding = -(2**31) | M  # 128 << 24 | M in 32 bits
    listed = ids[ids != padding]
    assert sorted((t & 0xFFFFFF) * top_k + (t >> 24) for t in listed.tolist()) == list(range(384))
    assert (ids[valid[0] :] == padding).all()
    monkeypatch.setenv("AITER_MX_CHECK", "1")
    x, w = aiter_mx.quantize(torch.randn(M, 32)), aiter_mx.quantize(torch.randn(5 * 4, 32))
    operands = (*x, w[0].view(5, 4, 32), w[1].view(5, 4, 1))
    on_device = [tensor.to(device) for tensor in operands]
    lists = (ids, expert_ids, valid, M * top_k, top_k, 8)
    out = aiter_mx.moe_gemm(*on_device, *lists, a_div=top_k, topk_weights=sorted_weights,
                            ids="aiter", out_dtype=torch.float32)  # fmt: skip
    dense = (aiter_mx.dequantize(*x) @ aiter_mx.dequantize(*w).T).view(M, 1, 5, 4)
    expected = dense.expand(M, top_k, 5, 4)[
        torch.arange(M)[:, None], torch.arange(top_k), topk_ids.cpu().long()
    ]
    torch.testing.assert_close(out.cpu().view(M, top_k, 4), expected * weights.cpu()[..., None])


def test_ids_and_weights_may_be_views(device: torch.device) -> None:
    ids = draw_ids(random.Random(4), 50, 2, 6).to(device, torch.int32)
    weights = torch.rand(50, 2).to(device)
    for plain, views in (
        (aiter_mx.moe_align(ids, 16, 6), aiter_mx.moe_align(moved(ids), 16, 6)),
        (
            aiter_mx.moe_sort(ids, weights, 6, 16),
            aiter_mx.moe_sort(moved(ids), moved(weights), 6, 16),
        ),
    ):
        assert all(map(torch.equal, plain, views))


@pytest.mark.parametrize("M", [128, 129, 512, 513, 1500])
def test_as_many_ids_as_the_workgroup_holds_at_once_and_more(device: torch.device, M: int) -> None:
    topk_ids = draw_ids(random.Random(M), M, 8, 200).to(torch.int32)
    ids, expert_ids, padded = aiter_mx.moe_align(topk_ids.to(device), 64, 200)
    expected = lists_by_hand(topk_ids.tolist(), 64, list(range(200)), False)
    assert_lists(ids, expert_ids, padded, expected, 64, M, 8)


# Of several workgroups that sort: tokens, slots, experts, block_m, waves, compute units.
SPLIT = [
    (300, 2, 60, 16, 2, 256),  # the last workgroup has few ids
    (3, 1, 5, 4, 2, 256),  # one workgroup, most of whose waves have none
    (300, 3, 130, 64, 2, 2),  # more ids than two workgroups hold
    (220, 6, 1020, 8, 2, 3),
]


# Kinds take turns over the cases, as each pair compiles anew.
@pytest.mark.parametrize(
    ("case", "kind"),
    [
        *((SPLIT[0], "vllm"), (SPLIT[0], "aiter"), (SPLIT[1], "few count"), (SPLIT[1], "vllm")),
        *((SPLIT[2], "aiter"), (SPLIT[2], "few count"), (SPLIT[3], "vllm"), (SPLIT[3], "aiter")),
    ],
    ids=str,
)
def test_several_workgroups_list_what_one_does(
    kernels_device: torch.device, monkeypatch: pytest.MonkeyPatch, case: tuple[int, ...], kind: str
) -> None:
    (M, top_k, E, block_m, waves, cu_num), draw = case, random.Random(f"{case} {kind}")
    randomise(monkeypatch, draw)
    packed, mapped = kind == "aiter", kind != "few count"
    ids, maps = ("aiter", "mask") if packed else ("vllm", "numbers" if mapped else "none")
    problem = MoeAlignProblem(
        *(M, top_k, E, block_m, ids),
        expert_map=maps,
        drop_absent=int(packed),
        shared=0 if packed else 2,
        first_shared=E,
        x_dtype="bf16",
        K=64,
    )
    experts = draw_ids(draw, M, top_k, E).clamp(-1, E).int()
    here = torch.tensor([draw.random() < 0.6 for _ in range(E)]).int()
    numbers = torch.where(here > 0, here.cumsum(0).int() - 1, -1)
    blocks = problem.max_ids // block_m
    tensors = [
        experts,
        torch.rand(M, top_k) if packed else None,
        {"mask": here, "numbers": numbers, "none": None}[maps],
        torch.tensor([M - M // 3], dtype=torch.int32) if kind == "few count" else None,
        torch.randn(M, 64).bfloat16(),
        Out((problem.max_ids,), torch.int32),
        Out((problem.max_ids,), torch.float32) if packed else None,
        Out((blocks,), torch.int32),
        Out((2 if packed else 1,), torch.int32),
        Out((M, 64), torch.float8_e4m3fn),
        Out((M, 2), torch.uint8),
    ]
    arch, config = target_of(kernels_device).arch, {"waves": waves}
    one, split = (find_kernel("moe_align", arch, "hip", name) for name in ("align", "align_split"))
    expected = launch(one, kernels_device, problem, config, tensors)
    found = launch(split, kernels_device, problem, config, tensors, cu_num)
    assert all(map(same_bytes, found, expected))
    assert int(expected[3 if packed else 2][0]) > 0


@pytest.mark.parametrize("arch", ["gfx950", "sm_90a"])
def test_many_ids_are_split_and_those_of_a_mask_are_not(arch: str) -> None:
    def kernel(M: int, **more: int) -> str:
        return explain("moe_align", arch=arch, M=M, top_k=1, E=128, **more).kernel

    assert kernel(1024) == "align"
    assert kernel(8193) == kernel(1 << 20) == "align_split"
    assert kernel(1 << 18, masked=1) == "align"


def test_few_waves_hold_fewer_ids_than_are_few_for_more_waves() -> None:
    kernel, target = find_kernel("moe_align", "gfx950", "hip", "align"), hardware("gfx950")
    many = [
        kernel.modules[-1].defines(target, MoeAlignProblem(M=M, E=8, top_k=8), {"waves": waves})
        for M, waves in ((64, 2), (65, 2), (128, 8), (129, 8))
    ]
    assert [defines["MX_MANY"] for defines in many] == [0, 1, 0, 1]


def test_many_experts_and_too_many(device: torch.device) -> None:
    topk_ids = torch.tensor([[1023, 5, 700], [5, 0, 1023]], dtype=torch.int32)
    ids, expert_ids, padded = aiter_mx.moe_align(topk_ids.to(device), 4, 1024)
    expected = lists_by_hand(topk_ids.tolist(), 4, list(range(1024)), False)
    assert_lists(ids, expert_ids, padded, expected, 4, 2, 3)
    if target_of(device).runtime != "none":
        route = explain("moe_align", arch="gfx950", M=2, top_k=3, E=1025)
        assert route.backend == "triton" and "1025 is above 1024" in route.reason


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(4, 2, dtype=torch.int16), 64, 8), "topk_ids must be torch.int32 or"),
        ((torch.zeros(4, dtype=torch.int32), 64, 8), r"topk_ids must be \[M, top_k\], got \[4\]"),
        ((torch.zeros(4, 2, dtype=torch.int32), 6, 8), "block_m must be a multiple of 4, got 6"),
        ((torch.zeros(4, 2, dtype=torch.int32), 64, 0), "num_experts must be at least 1, got 0"),
        (
            (torch.zeros(4, 2, dtype=torch.int32), 64, 8, torch.zeros(7, dtype=torch.int32)),
            r"expert_map must be \[8\], got \[7\]",
        ),
        (
            (torch.zeros(4, 2, dtype=torch.int32), 64.0, 8),
            "block_m must be a whole number, an int, got fl",
        ),
        ((torch.zeros(4, 2, dtype=torch.int32), 64, "8"), "num_experts must be a whole number"),
        (([[0]], 64, 8), "topk_ids must be a tensor, got list"),
        ((torch.zeros(4, 0, dtype=torch.int32), 64, 8), "top_k must be at least 1, got 0"),
        ((torch.zeros(4, 2, dtype=torch.int32), 1 << 28, 8), "may hold 2147483648 ids, padding"),
    ],
)
def test_bad_arguments_are_refused(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        aiter_mx.moe_align(*arguments)  # type: ignore[arg-type]


def test_options_are_refused_by_name() -> None:
    topk_ids = torch.zeros(4, 2, dtype=torch.int32)
    with pytest.raises(TypeError, match="drop_absent must be True or False, got 'no'"):
        aiter_mx.moe_align(topk_ids, 64, 8, drop_absent="no")  # type: ignore[arg-type]
    for name in ("shared_experts", "first_shared"):
        options: dict[str, Any] = {name: -1}
        with pytest.raises(ValueError, match=f"{name} must be at least 0, got -1"):
            aiter_mx.moe_align(topk_ids, 64, 8, **options)
    with pytest.raises(ValueError, match="num_experts must be at least 1, got -3"):
        aiter_mx.moe_sort(topk_ids, torch.rand(4, 2), -3)
    numpy = pytest.importorskip("numpy")
    with pytest.raises(TypeError, match=r"block_m must be a whole number, .*got numpy\.float64"):
        aiter_mx.moe_align(topk_ids, numpy.float64(64), 8)


def test_check_mode_reports_ids_out_of_range(monkeypatch: pytest.MonkeyPatch) -> None:
    topk_ids = torch.tensor([[0, 3], [8, -1]], dtype=torch.int32)
    aiter_mx.moe_align(topk_ids, 4, 8)
    monkeypatch.setenv("AITER_MX_CHECK", "1")
    with pytest.raises(ValueError, match=r"2 of 4 ids .* the first is topk_ids\[1, 0\] = 8"):
        aiter_mx.moe_align(topk_ids, 4, 8)
    with pytest.raises(ValueError, match="are not within 0 to 7"):
        aiter_mx.moe_sort(topk_ids, torch.rand(2, 2), 8)
    one = torch.tensor([1], dtype=torch.int32)  # the second token does not count
    aiter_mx.moe_sort(topk_ids, torch.rand(2, 2), 8, num_local_tokens=one)
    aiter_mx.moe_align(topk_ids.clamp(0, 7), 4, 8)


def test_sorted_weights_have_no_gradient_and_say_so(device: torch.device) -> None:
    topk_ids = torch.tensor([[0, 3], [2, 1]], dtype=torch.int32, device=device)
    weights = torch.rand(2, 2, device=device, requires_grad=True)
    sorted_weights = aiter_mx.moe_sort(topk_ids, weights, 8, 4)[1]
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        sorted_weights.sum().backward()


@pytest.mark.gpu
@pytest.mark.parametrize("M", [100, 3000], ids=["one workgroup", "several"])
def test_replays_with_other_routings(M: int) -> None:
    draw = random.Random(9)
    topk_ids = draw_ids(draw, M, 4, 64).to("cuda", torch.int32)
    aiter_mx.moe_align(topk_ids, 16, 64)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lists = aiter_mx.moe_align(topk_ids, 16, 64)
    for _ in range(3):
        fresh = draw_ids(draw, M, 4, 64).to(torch.int32)
        topk_ids.copy_(fresh)
        graph.replay()
        expected = lists_by_hand(fresh.tolist(), 16, list(range(64)), False)
        assert_lists(*lists, expected, 16, M, 4)


@pytest.mark.gpu
def test_several_workgroups_on_two_streams_list_the_same() -> None:
    device, problem = torch.device("cuda"), MoeAlignProblem(20_000, 8, 128, 64)
    kernel = find_kernel("moe_align", target_of(device).arch, "hip", "align_split")
    lists = (
        *(Out((problem.max_ids,), torch.int32), None),
        *(Out((problem.max_ids // 64,), torch.int32), Out((1,), torch.int32), None, None),
    )
    calls = [
        (torch.randint(0, 128, (20_000, 8), dtype=torch.int32, device=device), *[None] * 4, *lists)
        for _ in range(2)
    ]
    assert_repeats_on_two_streams(bound(kernel, device, problem), calls, launches=20)


def test_rows_that_a_mask_leaves_out_are_not_quantised() -> None:
    problem = MoeAlignProblem(M=44, top_k=1, E=4, block_m=8, x_dtype="bf16", K=160, masked=1)
    kernel = find_kernel("moe_align", "gfx950", "hip", "align")
    tried = try_out(kernel, problem, kernel.configure(hardware("gfx950"), problem)).operands
    counts, x, *found = (tried[at] for at in (0, 4, 9, 10))
    counted = (torch.arange(11) < counts.unsqueeze(1)).flatten()
    assert 0 < counted.sum() < len(counted)
    for each, expected in zip(found, aiter_mx.quantize(x), strict=True):
        each, expected = each.view(torch.uint8), expected.view(torch.uint8)
        assert torch.equal(each[counted], expected[counted])
        assert not (each[~counted] == expected[~counted]).all(1).any()
