"""Operands of ``moe_gemm``: lists of routed rows, layers drawn at random."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import aiter_mx
from aiter_mx.kernels.moe_gemm import MoeGemmProblem
from aiter_mx.kernels.spec import Config
from op_tests.conformance import DTYPES
from op_tests.moe.reference import Layer
from op_tests.mx_reference import random_mx
from op_tests.operands import Exponents

SWIGLU = (1.702, 1.0, 7.0)
BIASES = ("none", *DTYPES)
Lists = tuple[Tensor, Tensor, Tensor]
"""Sorted ids, the expert of each block, and how many ids are in use."""


class Case(NamedTuple):
    """A problem's sizes, and a configuration; None is the kernel's own choice.

    ``a_div``, and the dtypes of result and bias, are drawn where they are not said.
    """

    M: int
    N: int
    K: int
    E: int
    top_k: int
    block_m: int
    config: Config | None = None
    dtype: str | None = None
    a_div: int | None = None
    bias: str | None = None


@dataclass(frozen=True)
class Drawn:
    """A problem, the layer that it is of, and a kernel's tensors but its results."""

    problem: MoeGemmProblem
    layer: Layer
    tensors: list[Tensor | None]


def random_weights(
    E: int, N: int, K: int, generator: torch.Generator, **options: Any
) -> tuple[Tensor, Tensor]:
    """Random MX-FP8 ``[E, N, K]`` and its scales."""
    payload, scale = random_mx(E * N, K, generator, **options)
    return payload.view(E, N, K), scale.view(E, N, K // 32)


def draw_experts(draw: random.Random, rows: int, E: int) -> list[int]:
    """Of each routed row: experts that are uniform, skewed, or all the same; some may be absent
    (E and above) or none (-1)."""
    kind = draw.choice(["uniform", "skewed", "one", "some none", "some absent"])
    few = list(range(E)) if kind not in ("skewed", "one") else [draw.randrange(E)]
    few += [draw.randrange(E) for _ in range(2 * (kind == "skewed"))]
    few += [-1] * (2 * (kind == "some none")) + [E, E + 1] * (kind == "some absent")
    return [draw.choice(few) for _ in range(rows)]


def lists_of(
    experts: list[int], E: int, block_m: int, packed_top_k: int, draw: random.Random
) -> Lists:
    """Blocks of ids with the valid ones anywhere, and garbage after those in use.

    Experts E and up are listed as -1; routed rows of expert -1 are not listed at all.
    """
    ids, blocks = [], []
    M = len(experts) // max(1, packed_top_k)
    padding = draw.choice([len(experts), -1, 2**31 - 1])
    if packed_top_k:
        padding = packed_top_k << 24 | M
    for expert in sorted(set(experts) - {-1}, key=lambda _: draw.random()):
        rows = [t for t, e in enumerate(experts) if e == expert]
        if packed_top_k:
            rows = [(t % packed_top_k) << 24 | t // packed_top_k for t in rows]
        rows += [padding] * (-len(rows) % block_m)
        draw.shuffle(rows)
        ids += rows
        blocks += [expert if expert < E else -1] * (len(rows) // block_m)
    used = torch.tensor([len(ids)], dtype=torch.int32)
    ids += [draw.randrange(1 << 30) for _ in range(2 * block_m)]
    blocks += [draw.randrange(E) for _ in range(2)]
    return torch.tensor(ids, dtype=torch.int32), torch.tensor(blocks, dtype=torch.int32), used


def draw_layer(
    case: Case,
    seed: int,
    dtype: str,
    exponents: tuple[Exponents, Exponents] | None = None,
    accumulation_error: float = 0.0,
    weighted: bool | None = None,
    ids: str | None = None,
    **nans: float,
) -> Drawn:
    """A problem in all that a case leaves to chance, and its operands.

    Args:
        case: its sizes.
        seed: of the draw.
        dtype: the result's; activated results are ``mxfp8``, and see ``activated``.
        exponents: of the scales of x and of w.
        accumulation_error: of the layer's sums.
        weighted: whether rows are multiplied by routing weights; else that is drawn.
        ids: their encoding, ``vllm`` or ``aiter``; else that is drawn.
        nans: shares of NaN, as of ``random_mx``.
    """
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    M, N, K, E, top_k, block_m = case[:6]
    a_div = case.a_div or draw.choice([1, top_k])
    if exponents is None:
        usual = {"fp16": (-12, -6), "mxfp8": (-11, -8)}  # gate and up of a few units
        exponents = (usual.get(dtype) or draw.choice([(-20, 20), (-6, 6)]),) * 2
    experts = draw_experts(draw, M * top_k, E)
    ids = draw.choice(["vllm", "aiter"]) if ids is None else ids
    packed = ids == "aiter"
    lists = lists_of(experts, E, block_m, top_k if packed else 0, draw)
    if weighted is None:
        weighted = draw.random() < 0.5
    weights = torch.rand(M * top_k, generator=generator) if weighted and dtype != "mxfp8" else None
    listed = weights
    if packed and weights is not None:
        t = lists[0].long()
        rows = (t & 0xFFFFFF) * top_k + (t >> 24)
        listed = weights[rows.clamp(0, M * top_k - 1)]
    bias_name = case.bias or draw.choice(BIASES)
    bias = None
    if bias_name != "none":
        bias = torch.randn(E, N, generator=generator).to(DTYPES[bias_name])
    x = random_mx(-(-M * top_k // a_div), K, generator, scale_exponents=exponents[0], **nans)
    w = random_weights(E, N, K, generator, scale_exponents=exponents[1], **nans)
    layer = Layer(*x, *w, bias, experts, a_div, weights, accumulation_error)
    problem = MoeGemmProblem(
        *(M, N, K, E, top_k, block_m),
        out_dtype="fp32" if dtype == "mxfp8" else dtype,
        bias=bias_name,
        weights="none" if weights is None else "by_place" if packed else "by_t",
        ids=ids,
        a_div=a_div,
        max_blocks=len(lists[1]),
    )
    return Drawn(problem, layer, [*x, *w, *lists, listed, bias])


def activated(
    drawn: Drawn, activation: str, layout: str, swiglu: tuple[float, float, float] = SWIGLU
) -> Drawn:
    """The same with an activation after the sums, and quantised results."""
    constants = dict(zip(("alpha", "beta", "limit"), swiglu, strict=True))
    problem = replace(
        drawn.problem, out_dtype="mxfp8", activation=activation, layout=layout, **constants
    )
    return replace(drawn, problem=problem)


def with_other_lists(drawn: Drawn, lists: Lists) -> Drawn:
    """The same routed rows of the same experts, listed in another way; not for packed ids."""
    assert drawn.problem.ids == "vllm"
    problem = replace(drawn.problem, max_blocks=len(lists[1]))
    return replace(drawn, problem=problem, tensors=[*drawn.tensors[:4], *lists, *drawn.tensors[7:]])


def with_stray_blocks(drawn: Drawn, seed: int) -> Drawn:
    """Blocks without a valid id among the others, of experts that are here and that are not."""
    draw, block_m = random.Random(seed), drawn.problem.block_m
    _, _, _, _, ids, experts, used, *_ = drawn.tensors
    assert ids is not None and experts is not None and used is not None
    count, routed = int(used) // block_m, drawn.problem.routed
    blocks, owners = list(ids[: int(used)].view(-1, block_m)), experts[:count].tolist()
    for _ in range(40):  # workgroups begin with most of them
        place = draw.choice([0, 0, draw.randint(0, len(blocks))])
        blocks.insert(place, torch.full((block_m,), draw.choice([-1, routed, 1 << 30])).int())
        owners.insert(place, draw.choice([-1, drawn.problem.E, *range(drawn.problem.E)]))
    total = torch.tensor([len(blocks) * block_m], dtype=torch.int32)
    return with_other_lists(drawn, (torch.cat(blocks).int(), torch.tensor(owners).int(), total))


def draw_ids(draw: random.Random, M: int, top_k: int, E: int) -> Tensor:
    """Experts that are uniform, skewed, or all the same; sometimes some are out of range."""
    kind = draw.choice(["uniform", "skewed", "one", "wrong"])
    if kind == "one":
        return torch.full((M, top_k), draw.randrange(E))
    few = [draw.randrange(E) for _ in range(3)] if kind == "skewed" else list(range(E))
    if kind == "wrong":
        few += [-1, E, E + 5, -(2**31), 2**31 - 1]
    ids = [[draw.choice(few) for _ in range(top_k)] for _ in range(M)]
    return torch.tensor(ids).view(M, top_k)


def mx(*shape: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Any finite payload, and scales around 2^-11."""
    payload = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    payload[payload & 0x7F == 0x7F] = 0x31
    *rows, K = shape
    scale = torch.randint(112, 120, (*rows, K // 32), generator=generator, dtype=torch.uint8)
    return payload.view(torch.float8_e4m3fn), scale


def gemm_call() -> dict[str, Any]:
    """Arguments of a call that is right."""
    generator = torch.Generator().manual_seed(0)
    topk_ids = torch.tensor([[0, 1], [2, 1], [1, 1]], dtype=torch.int32)
    sorted_ids, expert_ids, padded = aiter_mx.moe_align(topk_ids, 4, 3)
    xq, xs = random_mx(3, 64, generator, scale_exponents=(-6, 6))
    wq, ws = random_weights(3, 20, 64, generator, scale_exponents=(-6, 6))
    return {
        "xq": xq,
        "xs": xs,
        "wq": wq,
        "ws": ws,
        "sorted_token_ids": sorted_ids,
        "expert_ids": expert_ids,
        "num_tokens_post_padded": padded,
        "num_valid_tokens": 6,
        "top_k": 2,
        "block_m": 4,
        "a_div": 2,
    }
