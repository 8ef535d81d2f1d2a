"""``aiter_mx.distributed`` over gloo on CPUs, and over NCCL where there are two GPUs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import aiter_mx
from aiter_mx import distributed

H, I, E, TOP_K = 96, 64, 8, 3
TOKENS = (7, 0, 12, 3)  # of each rank


def weights() -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    found = []
    for shape in ((E, 2 * I, H), (E, H, I)):
        payload = torch.randint(0, 256, shape, generator=g, dtype=torch.uint8)
        payload[payload & 0x7F == 0x7F] = 0x31
        scale = torch.randint(112, 120, (*shape[:2], shape[2] // 32), generator=g)
        found += [payload.view(torch.float8_e4m3fn), scale.to(torch.uint8)]
    return found


def tokens(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(100 + rank)
    M = TOKENS[rank]
    ids = torch.randint(-1, E + 1, (M, TOP_K), generator=g, dtype=torch.int32)
    return torch.randn(M, H, generator=g).bfloat16(), ids, torch.rand(M, TOP_K, generator=g)


def work(rank: int, ranks: int, folder: str, backend: str) -> None:
    """What one rank does; its results go into a file, as its failures go to the parent."""
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    store = f"file://{folder}/store"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=ranks)
    each = E // ranks
    own = [w[rank * each : (rank + 1) * each].to(device) for w in weights()]
    x, ids, topk = (tensor.to(device) for tensor in tokens(rank))
    found: dict[str, Any] = {"out": distributed.fused_moe(x, *own, ids, topk, E)}
    found["again"] = distributed.fused_moe(x, *own, ids, topk, E)
    xq, xs = aiter_mx.quantize(x)
    found["quantised"] = distributed.fused_moe(xq, *own, ids, topk, E, x_scale=xs)
    fp32 = distributed.fused_moe(xq, *own, ids, topk, E, x_scale=xs, out_dtype=torch.float32)
    found["fp32"] = fp32
    at = distributed.prepare(x, ids, topk, E)
    found["bytes"], found["sent"] = at.bytes_sent, [len(each) for each in at.sent]
    try:
        distributed.prepare(x, ids, topk, ranks + 1)
    except ValueError as error:
        found["error"] = str(error)
    found["others"] = []
    for given, scale in ((x, xs), (xq, xs[:, 1:])):
        try:
            distributed.prepare(given, ids, topk, E, x_scale=scale)
        except (TypeError, ValueError) as error:
            found["others"].append(str(error))
    found = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in found.items()}
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("ranks", "backend"),
    [
        (2, "gloo"),
        pytest.param(4, "gloo", marks=pytest.mark.slow),
        pytest.param(2, "nccl", marks=pytest.mark.gpu),
    ],
)
def test_experts_on_many_ranks_agree_with_one(ranks: int, backend: str, tmp_path: Path) -> None:
    if backend == "nccl" and torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    mp.spawn(work, (ranks, str(tmp_path), backend), nprocs=ranks, join=True)
    row_bytes = H + H // 32 + 8 * TOP_K
    for rank in range(ranks):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        x, ids, topk = tokens(rank)
        one = aiter_mx.fused_moe(x.float(), *weights(), ids, topk)
        assert found["out"].shape == (TOKENS[rank], H) and found["out"].dtype == torch.bfloat16
        torch.testing.assert_close(found["fp32"], one, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found["out"].float(), one, rtol=2**-6, atol=2**-6)
        assert torch.equal(found["again"], found["out"])
        assert torch.equal(found["quantised"], found["out"])
        valid = (ids >= 0) & (ids < E)
        owners = [
            set((row[ok] // (E // ranks)).tolist()) for row, ok in zip(ids, valid, strict=True)
        ]
        sent = [sum(to in each for each in owners) for to in range(ranks)]
        assert found["sent"] == sent
        assert found["bytes"] == (sum(sent) - sent[rank]) * row_bytes
        assert found["others"] == [
            "x must be torch.float8_e4m3fn where x_scale is given, got torch.bfloat16",
            f"x_scale must be bytes [{len(x)}, 3], got torch.uint8 [{len(x)}, 2]",
        ]
        assert found["error"] == f"num_experts={ranks + 1} cannot be divided among {ranks} ranks"
