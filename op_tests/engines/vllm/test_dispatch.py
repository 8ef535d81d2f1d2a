"""vLLM's modular kernel on two ranks, with our dispatch, combine and experts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

import aiter_mx
from aiter_mx import distributed
from op_tests.engines.vllm.layers import BF16, TOP_K, E, H, I, experts_layer, mx, through_kernel

RANKS = 2


def work(rank: int, folder: str) -> None:
    """What one rank does; a failed comparison ends the test."""
    from vllm import plugins
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    torch.set_num_threads(1)
    plugins.load_general_plugins()
    with set_current_vllm_config(VllmConfig()):
        store = f"file://{folder}/store"
        init_distributed_environment(RANKS, rank, store, 0, backend="gloo")
        initialize_model_parallel()
        _, experts = experts_layer("layers.first.experts")
        for quantised in (False, True):
            with pytest.MonkeyPatch.context() as patch:
                compare(rank, experts, quantised, patch)


def compare(rank: int, experts: Any, quantised: bool, patch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEKernel

    from aiter_mx.integrations.vllm_layers import AiterMxExperts, AiterMxPrepareAndFinalize

    whole = (*mx(RANKS * E, 2 * I, H, seed=1), *mx(RANKS * E, H, I, seed=2))
    for name, tensor in zip(
        ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale"), whole, strict=True
    ):
        getattr(experts, name).data.copy_(tensor[rank * E : (rank + 1) * E])
    experts.quant_method.process_weights_after_loading(experts)
    patch.setattr(AiterMxExperts, "expects_unquantized_inputs", property(lambda _: not quantised))
    sent: list[distributed.Dispatched] = []
    prepare = distributed.prepare

    def noted(*given: Any, **options: Any) -> distributed.Dispatched:
        sent.append(prepare(*given, **options))
        return sent[-1]

    patch.setattr(distributed, "prepare", noted)
    of_layer = experts.quant_method.moe_kernel.fused_experts
    kernel = FusedMoEKernel(AiterMxPrepareAndFinalize(), of_layer)
    g = torch.Generator().manual_seed(rank)
    x = torch.randn(6 - rank, H, generator=g).to(BF16)
    ids = torch.randint(0, RANKS * E, (len(x), TOP_K), generator=g, dtype=torch.int32)
    weights = torch.rand(len(x), TOP_K, generator=g)
    found = through_kernel(kernel, experts, x, ids, weights, global_num_experts=RANKS * E)
    one = aiter_mx.fused_moe(x.float(), *whole, ids, weights)
    assert (found.float() - one).norm() <= 2**-7 * one.norm()
    (at,) = sent
    copies = len(at.sent[1 - rank])
    token = H + H // 32 if quantised else 2 * H
    assert at.bytes_sent == copies * (token + 8 * TOP_K) > 0


def test_two_ranks_agree_with_one(tmp_path: Path) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    mp.spawn(work, (str(tmp_path),), nprocs=RANKS)
