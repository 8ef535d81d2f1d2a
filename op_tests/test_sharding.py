"""``aiter_mx.sharding``: DTensors through the ops, over gloo on CPUs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)

import aiter_mx
import aiter_mx.sharding
from op_tests.forked import start_ranks
from op_tests.mx_reference import random_mx

RANKS, M, N, K, G = 2, 6, 10, 192, 3
WHOLE, ROWS, COLUMNS, PLANES = Replicate(), Shard(0), Shard(1), Shard(2)
FP32 = torch.float32


def operands() -> dict[str, Tensor]:
    """Of a linear, a quantisation, groups and experts."""
    g = torch.Generator().manual_seed(5)
    xq, xs = random_mx(M, K, g, scale_exponents=(-6, 6))
    wq, ws = random_mx(N, K, g, scale_exponents=(-6, 6))
    b, bs = (t.view(G, 64, -1) for t in random_mx(G * 64, K, g, scale_exponents=(-6, 6)))
    lists = aiter_mx.moe_align(torch.tensor([[0], [2], [1], [1], [0], [2]]), 4, G)
    return {
        "xq": xq,
        "xs": xs,
        "wq": wq,
        "ws": ws,
        "b": b,
        "bs": bs,
        **dict(zip(("ids", "experts", "padded"), lists, strict=True)),
        "bias": torch.randn(N, generator=g),
        "x": torch.randn(M, K, generator=g),
        "x3": torch.randn(2, 3, K, generator=g).bfloat16(),
        "offs": torch.tensor([0, 2, 2, 6], dtype=torch.int32),
    }


CALLS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "linear": lambda t: aiter_mx.linear(t["xq"], t["xs"], t["wq"], t["ws"], out_dtype=FP32),
    "biased": lambda t: aiter_mx.linear(t["xq"], t["xs"], t["wq"], t["ws"], t["bias"], FP32),
    "x of three dimensions": lambda t: aiter_mx.linear(t["x3"], None, t["wq"], t["ws"]),
    "payload": lambda t: aiter_mx.quantize(t["x"])[0].view(torch.uint8),
    "scale": lambda t: aiter_mx.quantize(t["x"])[1],
    "grouped": lambda t: aiter_mx.grouped_gemm(
        t["xq"], t["xs"], t["b"], t["bs"], t["offs"], out_dtype=FP32
    ),
    "experts": lambda t: aiter_mx.moe_gemm(
        *(t[name] for name in ("xq", "xs", "b", "bs", "ids", "experts", "padded")),
        *(M, 1, 4),
        a_div=1,
        out_dtype=FP32,
    ),
}
# How operands are divided, and in which way the results then are.
DIVISIONS: dict[str, tuple[dict[str, Placement], dict[str, Placement]]] = {
    "rows of x": (
        dict.fromkeys(("xq", "xs", "x", "x3"), ROWS),
        dict.fromkeys(("linear", "biased", "payload", "scale"), ROWS),
    ),
    "rows of w": (
        {**dict.fromkeys(("wq", "ws", "bias"), ROWS), **dict.fromkeys(("b", "bs"), COLUMNS)},
        {
            **dict.fromkeys(("linear", "biased", "grouped", "experts"), COLUMNS),
            "x of three dimensions": PLANES,
        },
    ),
    "K": (
        dict.fromkeys(("xq", "xs", "wq", "ws", "x"), COLUMNS),
        {"linear": Partial(), "payload": COLUMNS, "scale": COLUMNS},
    ),
}


def placed(tensor: Tensor, mesh: Any, placement: Placement) -> DTensor:
    """gloo carries no 8-bit floats, only their bytes."""
    if tensor.dtype != torch.float8_e4m3fn:
        return distribute_tensor(tensor, mesh, [placement])
    local = distribute_tensor(tensor.view(torch.uint8), mesh, [placement]).to_local()
    return DTensor.from_local(local.view(torch.float8_e4m3fn), mesh, [placement])


def work(rank: int, folder: str) -> None:
    """What one rank does; its results go into a file, as its failures go to the parent."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    for _ in range(2):
        aiter_mx.sharding.register()
    found = {}
    for name, (divided, results) in DIVISIONS.items():
        tensors = {at: placed(t, mesh, divided.get(at, WHOLE)) for at, t in operands().items()}
        for call, expected in results.items():
            result = CALLS[call](tensors)
            assert result.placements == (expected,), (name, call, result.placements)
            found[name, call] = result.full_tensor()
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def test_ops_take_tensors_that_are_divided_among_ranks(tmp_path: Path) -> None:
    start_ranks(work, (str(tmp_path),), RANKS)
    plain = {call: run(operands()) for call, run in CALLS.items()}
    for rank in range(RANKS):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert len(found) == sum(len(results) for _, results in DIVISIONS.values())
        for (division, call), result in found.items():
            if division == "K" and call == "linear":  # each rank adds up its part of K
                torch.testing.assert_close(result, plain[call], rtol=1e-5, atol=1e-2)
            else:
                assert torch.equal(result, plain[call]), (division, call)


def test_k_is_divided_in_whole_blocks_alone() -> None:
    class Described:
        def __init__(self, *shape: int) -> None:
            self.shape, self.mesh, self.tensor_meta = shape, self, None

        def size(self) -> int:
            return 4

    def linear(K: int, bias: Any = None) -> int:
        w = Described(64, K)
        return len(aiter_mx.sharding._linear(Described(8, K), Described(8, K // 32), w, w, bias))

    assert [linear(K) for K in (128, 160, 256)] == [4, 3, 4]
    assert linear(128, Described(64)) == 3
    assert len(aiter_mx.sharding._quantize(Described(2, 8, 160), "rceil")) == 3
    assert len(aiter_mx.sharding._quantize(Described(2, 8, 128), "rceil", -2)) == 1
