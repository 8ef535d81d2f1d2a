"""vLLM's dispatch and combine by ``aiter_mx.distributed``, with our experts between them, on two
ranks: over stand-ins of vLLM, as each process would take a minute to import it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import aiter_mx
from op_tests.forked import start_ranks
from op_tests.integrations.test_adapters import TOP_K, E, H, I, experts_output, mx, vllm_adapters

CPU = torch.device("cpu")
TOKENS = (5, 0)


def work(rank: int, folder: str) -> None:
    """What one rank does; a failed comparison ends the test."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    with pytest.MonkeyPatch.context() as patch:
        for adapters in vllm_adapters(patch):
            for has_map in (False, True):
                for defers in (False, True):
                    compare(rank, adapters, has_map, defers)
    dist.destroy_process_group()


def compare(rank: int, adapters: Any, has_map: bool, defers: bool) -> None:
    whole = (*mx(E, 2 * I, H, seed=1, device=CPU), *mx(E, H, I, seed=2, device=CPU))
    half = slice(rank * E // 2, (rank + 1) * E // 2)
    w1, s1, w2, s2 = (tensor[half] for tensor in whole)
    g = torch.Generator().manual_seed(rank)
    M = TOKENS[rank]
    x = torch.randn(M, H, generator=g).bfloat16()
    ids = torch.randint(-1, E, (M, TOP_K), generator=g, dtype=torch.int32)
    weights = torch.rand(M, TOP_K, generator=g)
    expert_map = torch.full((E,), -1, dtype=torch.int32)
    expert_map[half] = torch.arange(E // 2, dtype=torch.int32)
    dispatch = adapters.AiterMxPrepareAndFinalize()
    assert dispatch.num_dispatchers() == 2 and dispatch.output_is_reduced()
    given = expert_map if has_map else None
    came, scale, _, ids_here, weights_here = dispatch.prepare(
        x, weights, ids, E, given, False, None, defer_input_quant=defers
    )
    assert (scale is None, came.dtype == torch.bfloat16) == (defers, defers)
    layer, routing = (w1, s1, w2, s2), (weights_here, ids_here, E, given)
    sums = experts_output(adapters, layer, came, scale, *routing)
    out = torch.full((M, H), torch.nan, dtype=torch.bfloat16)
    dispatch.finalize(out, sums, weights_here, ids_here, False, None)
    one = aiter_mx.fused_moe(x.float(), *whole, ids, weights)
    assert (out.float() - one).norm() <= 2**-7 * one.norm()


def test_two_ranks_agree_with_one(tmp_path: Path) -> None:
    start_ranks(work, (str(tmp_path),), 2)
