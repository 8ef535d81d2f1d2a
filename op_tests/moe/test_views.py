"""Operands of the MoE ops that are views: results do not depend on where they begin."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import aiter_mx
from aiter_mx import launch
from aiter_mx.kernels.moe_gemm import MoeGemmProblem
from aiter_mx.kernels.spec import KernelSpec
from op_tests.moe.reference import lists_of, random_weights
from op_tests.moe.test_fused_moe import on, random_call, variants
from op_tests.moe.test_gemm import DTYPES
from op_tests.moe.test_gemm_sm90 import KERNELS, SM90, exact_dtype
from op_tests.mx_reference import random_mx

SCALES = 4  # bytes: the least that scales may begin at


@pytest.fixture(params=["sim", "torch", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    if request.param == "sim":
        with aiter_mx.simulate("gfx950"):
            yield torch.device("cpu")
    else:
        yield torch.device("cpu" if request.param == "torch" else "cuda")


def moved(tensor: Tensor, elements: int = 1) -> Tensor:
    """The same, beginning so many elements past where torch has a tensor begin."""
    place = torch.empty(tensor.numel() + elements, dtype=tensor.dtype, device=tensor.device)
    view = place[elements:].view(tensor.shape)
    assert view.data_ptr() % 16 == elements * tensor.itemsize % 16
    return view.copy_(tensor)


def all_moved(tensors: dict[str, Any]) -> dict[str, Any]:
    """All of them moved but payloads, tokens and what is no tensor."""
    wide = (torch.float8_e4m3fn, torch.bfloat16)
    return {
        name: moved(t, SCALES if t.dtype == torch.uint8 else 1)
        if isinstance(t, Tensor) and (t.dtype not in wide or name.startswith("bias"))
        else t
        for name, t in tensors.items()
    }


@pytest.mark.parametrize("M", [5, 300])  # which takes another route
def test_gemm_takes_views(device: torch.device, M: int) -> None:
    generator = torch.Generator().manual_seed(M)
    E, N, K = 2, 64, 160
    topk_ids = torch.randint(0, E, (M, 2), generator=generator, dtype=torch.int32, device="cpu")
    x, w = random_mx(M, K, generator), random_weights(E, N, K, generator)
    ids = topk_ids.to(device)
    weights = torch.rand(M, 2, generator=generator).to(device)
    lists = aiter_mx.moe_align(ids, 16, E)
    listed = aiter_mx.moe_sort(ids, weights, E, 16)
    assert all(map(torch.equal, lists, aiter_mx.moe_align(moved(ids), 16, E)))
    views = aiter_mx.moe_sort(moved(ids), moved(weights), E, 16)
    assert all(map(torch.equal, listed, views))
    call = dict(zip(("xq", "xs", "wq", "ws"), (*x, *w), strict=True))
    call |= {"topk_weights": weights, "bias": torch.randn(E, N, generator=generator).half()}
    names = ("sorted_token_ids", "expert_ids", "num_tokens_post_padded")
    call = on(device, call | dict(zip(names, lists, strict=True)))
    options = {"num_valid_tokens": 2 * M, "top_k": 2, "block_m": 16, "a_div": 2}
    expected = aiter_mx.moe_gemm(**call, **options)
    assert torch.equal(aiter_mx.moe_gemm(**all_moved(call), **options), expected)


def test_layer_takes_views(device: torch.device) -> None:
    fixed = variants()[1] | {"M": 5, "experts": 8, "top_k": 2, "shared": 1, "has_map": True}
    fixed |= {"dtype": torch.bfloat16, "biased": True}
    for id_dtype in (torch.int32, torch.int64):
        call = on(device, random_call(random.Random(7), 7, id_dtype=id_dtype, **fixed))
        expected = aiter_mx.fused_moe(**call)
        out = moved(torch.zeros_like(expected))
        assert torch.equal(aiter_mx.fused_moe(**all_moved(call), out=out), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("spec", KERNELS, ids=lambda spec: spec.name)
def test_every_hopper_kernel_takes_views(spec: KernelSpec) -> None:
    generator, draw = torch.Generator().manual_seed(5), random.Random(5)
    M, N, K, E = 90, 300, 1024, 4
    x, w = random_mx(M, K, generator), random_weights(E, N, K, generator)
    chosen = torch.randint(0, E, (M * 2,), generator=generator).tolist()
    lists = lists_of(chosen, E, 48, 0, draw)
    weights, bias = torch.rand(M * 2, generator=generator), torch.randn(E, N, generator=generator)
    problem = MoeGemmProblem(
        *(M, N, K, E, 2, 48, exact_dtype(spec)),
        bias="bf16",
        weights="by_t",
        a_div=2,
        max_blocks=len(lists[1]),
    )
    run = launch.bind(spec, SM90, problem, spec.configure(SM90, problem), 0)
    names = ("xq", "xs", "wq", "ws", "ids", "experts", "used", "weights", "bias")
    call = dict(zip(names, (*x, *w, *lists, weights, bias.bfloat16()), strict=True))
    call = on(torch.device("cuda"), call)
    results = []
    for tensors in (call, all_moved(call)):
        out = torch.full((M * 2, N), -1.0, dtype=DTYPES[problem.out_dtype], device="cuda")
        every = [*tensors.values(), out, None]
        run(every, [0 if t is None else t.data_ptr() for t in every])
        results.append(out.cpu())
    assert torch.equal(*results)
