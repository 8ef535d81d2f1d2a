"""Routing lists as vLLM, SGLang and aiter make them: lengths, order and filling."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import aiter_mx
from aiter_mx.compat import sglang, vllm
from aiter_mx.compat.aiter import moe_sorting

Lists = tuple[list[int], list[int], int]


def blocks_of(ids: Tensor, block: int, experts: range) -> Lists:
    """The ids and the expert of each block in use, and how many ids are."""
    flat, none = ids.flatten().tolist(), ids.numel()
    listed: list[int] = []
    owners: list[int] = []
    for expert in experts:
        mine = [place for place, one in enumerate(flat) if one == expert]
        mine += [none] * (-len(mine) % block)
        listed += mine
        owners += [expert] * (len(mine) // block)
    return listed, owners, len(listed)


def draw(M: int, top_k: int, experts: int, low: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(M * 100 + experts)
    return torch.randint(low, experts, (M, top_k), generator=generator, dtype=torch.int32)


@pytest.mark.parametrize("simulated", [False, True])
@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize(
    ("M", "top_k", "experts", "block"), [(1, 2, 8, 16), (3, 2, 8, 4), (40, 3, 7, 16), (9, 1, 5, 64)]
)
def test_vllms_lists(
    M: int, top_k: int, experts: int, block: int, pad: bool, simulated: bool
) -> None:
    ids = draw(M, top_k, experts)
    routed = M * top_k
    length = routed + experts * (block - 1)
    length = -(-length // block) * block if pad else length
    length = min(length, routed * block) if routed < experts else length
    listed, owners, used = blocks_of(ids, block, range(experts))
    if simulated:
        with aiter_mx.simulate("gfx950"):
            found = vllm.moe_align_block_size(ids, block, experts, pad_sorted_ids=pad)
    else:
        found = vllm.moe_align_block_size(ids, block, experts, pad_sorted_ids=pad)
    assert [t.dtype for t in found] == [torch.int32] * 3
    assert found[0].tolist() == listed + [routed] * (length - used)
    assert found[1].tolist() == owners + [-1] * (-(-length // block) - len(owners))
    assert found[2].tolist() == [used]


def test_vllms_lists_with_experts_elsewhere() -> None:
    experts, block = 6, 4
    ids = draw(11, 2, experts)
    expert_map = torch.tensor([-1, 0, 1, -1, 2, -1], dtype=torch.int32)
    length, listed, owners, used = 22 + 18, *blocks_of(ids, block, range(experts))
    found = vllm.moe_align_block_size(ids, block, experts, expert_map)
    unused = -(-length // block) - len(owners)
    assert found[0].tolist() == listed + [22] * (length - used)
    assert found[1].tolist() == [*expert_map[owners].tolist(), *[-1] * unused]
    here = torch.where(expert_map[ids.long()] >= 0, ids, 99)
    listed, owners, used = blocks_of(here, block, range(experts))
    found = vllm.moe_align_block_size(ids, block, experts, expert_map, ignore_invalid_experts=True)
    unused = -(-length // block) - len(owners)
    assert found[0].tolist() == listed + [22] * (length - used)
    assert found[1].tolist() == [*expert_map[owners].tolist(), *[-1] * unused]
    assert found[2].tolist() == [used]


def test_vllms_lists_tell_which_routed_rows_are_here() -> None:
    ids = torch.tensor([[0, 5], [-1, 2], [6, 4]], dtype=torch.int32)
    expert_map = torch.tensor([-1, 0, 1, -1, 2, -1], dtype=torch.int32)
    usual = vllm.moe_align_block_size(ids, 4, 6)
    found = vllm.moe_align_block_size(ids, 4, 6, return_scatter_idx=True)
    assert all(torch.equal(one, other) for one, other in zip(usual, found, strict=False))
    assert found[3].dtype == torch.int32 and found[3].tolist() == [[0], [1], [-1], [3], [-1], [5]]
    *_, rows = vllm.moe_align_block_size(
        ids, 4, 6, expert_map, ignore_invalid_experts=True, return_scatter_idx=True
    )
    assert rows.flatten().tolist() == [-1, -1, -1, 3, -1, 5]
    with pytest.raises(ValueError, match="expert_map needs ignore_invalid_experts"):
        vllm.moe_align_block_size(ids, 4, 6, expert_map, return_scatter_idx=True)


def test_vllms_lists_of_batches() -> None:
    counts = torch.tensor([2, 3, 0, 6, 8], dtype=torch.int32)
    ids, experts, used = vllm.batched_moe_align_block_size(8, 4, counts)
    wanted = [0, 1, 40, 40, 8, 9, 10, 40, *range(24, 30), 40, 40, *range(32, 40)]
    assert ids.tolist() == wanted + [40] * (40 - len(wanted))
    assert experts.tolist() == [0, 1, 3, 3, 4, 4, -1, -1, -1, -1]
    assert used.tolist() == [24] and {t.dtype for t in (ids, experts, used)} == {torch.int32}
    ids, experts, used = vllm.batched_moe_align_block_size(5, 4, counts.clamp(max=5))
    assert len(ids) == 40 and len(experts) == 10 and used.tolist() == [24]
    assert vllm.batched_moe_align_block_size(8, 4, counts[:0])[0].tolist() == []
    assert not vllm.batched_moe_align_block_size(8, 4, counts * 0)[2].any()


@pytest.mark.parametrize("count", [9, -1, 2**31 - 1])
def test_batches_of_other_rows_than_there_is_room_for_are_refused_or_cut(count: int) -> None:
    counts = torch.tensor([2, count, 3], dtype=torch.int32)
    message = f"must be 0 to max_tokens_per_batch=8, got {count} of batch 1"
    with pytest.raises(ValueError, match=message):
        vllm.batched_moe_align_block_size(8, 4, counts)
    unread = vllm._lists_of_batches(8, 4, counts.long())  # as of a GPU
    cut = vllm.batched_moe_align_block_size(8, 4, counts.clamp(0, 8))
    assert all(torch.equal(a, b) for a, b in zip(unread, cut, strict=True))


@pytest.mark.parametrize(("M", "experts", "block"), [(1, 8, 16), (30, 5, 4), (7, 3, 32)])
def test_sglangs_lists(M: int, experts: int, block: int) -> None:
    ids = draw(M, 2, experts, low=-1)
    routed = 2 * M
    length = routed + (experts + 1) * (block - 1)
    length = routed * block if routed < experts + 1 else length
    length = -(-length // 4) * 4
    listed, owners, used = blocks_of(ids, block, range(-1, experts))
    found = sglang.moe_align_block_size(ids, block, experts)
    assert found[0].tolist() == listed + [routed] * (length - used)
    assert found[1].tolist() == owners + [-1] * (-(-length // block) - len(owners))
    assert found[2].tolist() == [used]


def test_aiters_lists_and_weights_of_fewer_rows() -> None:
    M, top_k, experts, block = 9, 2, 5, 32
    ids, weights = draw(M, top_k, experts), torch.rand(M, top_k)
    length = M * top_k + experts * block - top_k
    tokens = torch.tensor([6], dtype=torch.int32)
    results = []
    for given in (weights, weights[:6]):
        *lists, buffer = moe_sorting(
            ids, given, experts, 64, torch.bfloat16, block, num_local_tokens=tokens
        )
        assert (buffer.shape, buffer.dtype) == ((M, 64), torch.bfloat16)
        assert [len(t) for t in lists] == [length, length, -(-length // block), 2]
        results.append(lists)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    own = aiter_mx.moe_sort(ids, weights, experts, block, num_local_tokens=tokens)
    for found, wanted in zip(results[0], own, strict=True):
        shared = min(len(found), len(wanted))
        assert torch.equal(found[:shared], wanted[:shared])
    with pytest.raises(ValueError, match=r"topk_weights must be \[9, 2\], got \[6, 2\]"):
        aiter_mx.moe_sort(ids, weights[:6], experts, block)


def test_wrong_arguments_are_named_as_peers_name_them() -> None:
    for call in (vllm.moe_align_block_size, sglang.moe_align_block_size):
        with pytest.raises(ValueError, match="block_size must be a multiple of 4"):
            call(draw(3, 2, 4), 6, 4)
    with pytest.raises(TypeError, match=r"expert_num_tokens must be torch\.int32"):
        vllm.batched_moe_align_block_size(8, 4, torch.rand(3))
