"""``aiter_mx.distributed`` over gloo on CPUs, and over NCCL where there are two GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import aiter_mx
from aiter_mx import distributed
from op_tests.forked import start_ranks

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
    device, options = torch.device("cpu"), {}
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        options["device_id"] = device
    store = f"file://{folder}/store"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=ranks, **options)
    with aiter_mx.batch_invariant():  # one rank adds in the same order, whatever its kernel
        torch.save(results(rank, ranks, device), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def results(rank: int, ranks: int, device: torch.device) -> dict[str, Any]:
    """Of several calls, and of one rank that has all experts."""
    each = E // ranks
    whole = [w.to(device) for w in weights()]
    own = [w[rank * each : (rank + 1) * each] for w in whole]
    x, ids, topk = (tensor.to(device) for tensor in tokens(rank))
    found: dict[str, Any] = {"out": distributed.fused_moe(x, *own, ids, topk, E)}
    found["again"] = distributed.fused_moe(x, *own, ids, topk, E)
    xq, xs = aiter_mx.quantize(x)
    found["quantised"] = distributed.fused_moe(xq, *own, ids, topk, E, x_scale=xs)
    fp32 = distributed.fused_moe(xq, *own, ids, topk, E, x_scale=xs, out_dtype=torch.float32)
    found["fp32"] = fp32
    wide = torch.where((ids < 0) | (ids >= E), 1 << 32, ids.long())
    found["wide"] = distributed.fused_moe(x, *own, wide, topk, E)
    found["one"] = aiter_mx.fused_moe(xq, *whole, ids, topk, x_scale=xs, out_dtype=torch.float32)
    at = distributed.prepare(x, ids, topk, E)
    found["bytes"], found["sent"] = at.bytes_sent, [len(each) for each in at.sent]
    plain = distributed.prepare(x, ids, topk, E, quantise=False)
    found["plain_bytes"] = plain.bytes_sent
    assert plain.x_scale is None
    arrived = aiter_mx.quantize(plain.x)
    for sent, quantised in zip(arrived, (at.x, at.x_scale), strict=True):
        assert torch.equal(sent.view(torch.uint8), quantised.view(torch.uint8))
    assert torch.equal(plain.topk_ids, at.topk_ids)
    assert torch.equal(plain.topk_weights, at.topk_weights)
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
    for layer, named in ((own, {"shared_experts": 1}), ([w[:1] for w in own], {})):
        try:
            distributed.fused_moe(x, *layer, ids, topk, E, **named)
        except (TypeError, ValueError) as error:
            found["others"].append(str(error))
    return {k: v.cpu() if isinstance(v, Tensor) else v for k, v in found.items()}


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
    start = mp.spawn if backend == "nccl" else start_ranks
    start(work, (ranks, str(tmp_path), backend), ranks)
    row_bytes = H + H // 32 + 8 * TOP_K
    for rank in range(ranks):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        x, ids, topk = tokens(rank)
        one, reference = found["one"], aiter_mx.fused_moe(x.float(), *weights(), ids, topk)
        # On a GPU a value between two steps of e4m3 may go the other way.
        assert (one - reference).norm() <= (0.02 if backend == "nccl" else 1e-6) * reference.norm()
        assert found["out"].shape == (TOKENS[rank], H) and found["out"].dtype == torch.bfloat16
        torch.testing.assert_close(found["fp32"], one, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found["out"].float(), one, rtol=2**-6, atol=2**-6)
        assert torch.equal(found["again"], found["out"])
        assert torch.equal(found["quantised"], found["out"])
        assert torch.equal(found["wide"], found["out"])
        valid = (ids >= 0) & (ids < E)
        owners = [
            set((row[ok] // (E // ranks)).tolist()) for row, ok in zip(ids, valid, strict=True)
        ]
        sent = [sum(to in each for each in owners) for to in range(ranks)]
        assert found["sent"] == sent
        copies = sum(sent) - sent[rank]
        assert found["bytes"] == copies * row_bytes
        assert found["plain_bytes"] == copies * (2 * H + 8 * TOP_K)
        assert found["others"] == [
            "x must be torch.float8_e4m3fn where x_scale is given, got torch.bfloat16",
            f"x_scale must be bytes [{len(x)}, 3], got torch.uint8 [{len(x)}, 2]",
            "experts on many ranks have no shared_experts; the options are "
            + ", ".join(distributed._OPTIONS),
            f"w1q must have the weights of {E // ranks} experts, as num_experts={E} are divided "
            f"among {ranks} ranks, got 1",
        ]
        assert found["error"] == f"num_experts={ranks + 1} cannot be divided among {ranks} ranks"
