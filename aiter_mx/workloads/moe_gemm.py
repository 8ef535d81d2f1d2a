"""The GEMM over routed tokens, tried out: each call routes to other experts, as decode does.

Where experts are divided among GPUs, tokens choose among all of them, and this one has those that
chose its own; at least one did, since the others wait for a GPU that has some.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from aiter_mx.codec import DTYPES, as_scale_bytes, dequantize_block_scaled
from aiter_mx.kernels.fused_moe import FusedMoeProblem
from aiter_mx.kernels.moe_align import MoeAlignProblem
from aiter_mx.kernels.moe_gemm import MoeGemmProblem
from aiter_mx.kernels.moe_up import MoeUpProblem
from aiter_mx.launch import Tensors
from aiter_mx.numerics import BLOCK
from aiter_mx.timing import COLD_BYTES, random_mx
from aiter_mx.workloads.models import Model
from aiter_mx.workloads.workload import (
    ACCUMULATION,
    Judge,
    Operands,
    Verdict,
    Workload,
    compare,
    normal_mx,
    seeded,
)

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Tokens that tables have: the others take the rows of the next power of two."""
_SAMPLE_ROWS, _SAMPLE_EXPERTS = 256, 8
_ROUNDING_E4M3 = 2.0**-4 * 1.01
_SMALLEST_OF_BLOCK = 2.0**-17
"""Half of the step of an e4m3's subnormals, 2^-10, in a block whose largest is 224 at least."""


def _operands(problem: MoeGemmProblem, device: torch.device) -> Operands:
    p = problem
    bias = None
    if p.bias != "none":
        bias = torch.randn(p.E, p.N, dtype=DTYPES[p.bias], device=device)
    x = _drawn(-(-p.routed // p.a_div), p, device)
    routing = _routing(p, device)
    return [*x, *_weights(p, device), *routing, bias, *_results(p, device)]


def _weights(p: MoeGemmProblem, device: torch.device) -> list[torch.Tensor]:
    payload, scale = _drawn(p.E * p.N, p, device)
    if p.activation != "none":
        scale -= 6  # sums near one, where activations are curved, and not all saturated
    return [payload.view(p.E, p.N, p.K), scale.view(p.E, p.N, p.K // BLOCK)]


def _drawn(rows: int, p: MoeGemmProblem, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return (normal_mx if device.type == "cuda" else random_mx)(rows, p.K, device)


def _results(p: MoeGemmProblem, device: torch.device) -> list[torch.Tensor | None]:
    if p.activation == "none":
        rows, places = p.routed, None
        if p.sorted_out:
            rows = p.blocks * p.block_m
            places = torch.empty(p.routed, dtype=torch.int32, device=device)
        return [torch.empty(rows, p.N, dtype=DTYPES[p.out_dtype], device=device), places]
    width = p.out_features
    payload = torch.empty(p.routed, width, dtype=torch.float8_e4m3fn, device=device)
    return [payload, torch.empty(p.routed, width // BLOCK, dtype=torch.uint8, device=device)]


def _routing(p: MoeGemmProblem, device: torch.device) -> list[torch.Tensor | None]:
    """Sorted ids, experts, ids in use and routing weights, of experts drawn for each token."""
    align = _align(p)
    if device.type == "meta":
        counts = (align.max_ids, align.max_ids // p.block_m, 2 if p.ids == "aiter" else 1)
        weights_shape = {"none": None, "by_t": (p.M, p.top_k), "by_place": (align.max_ids,)}[
            p.weights
        ]
        return [
            *(torch.empty(n, dtype=torch.int32, device=device) for n in counts),
            None if weights_shape is None else torch.empty(weights_shape, device=device),
        ]
    experts = _experts(p, p.M)
    if p.routed and not bool((experts < p.E).any()):
        experts[0, 0] = torch.randint(p.E, ())
    return [None if tensor is None else tensor.to(device) for tensor in sorted_by(p, experts)]


def _experts(p: MoeGemmProblem, tokens: int) -> torch.Tensor:
    """Those that each of so many tokens chooses, drawn from all of the model's."""
    every = p.num_experts or p.E
    slots = min(p.top_k, every)
    experts = torch.rand(tokens, every, dtype=torch.float32).argsort(dim=1)[:, :slots]
    return experts.repeat(1, -(-p.top_k // slots))[:, : p.top_k].contiguous()


def _indices(p: MoeGemmProblem, number: int) -> dict[int, torch.Tensor | None]:
    """A routing of which that of fewer tokens is the first part."""
    tokens = max(ROWS[-1], 1 << (p.M - 1).bit_length())
    with seeded(f"routing {p.num_experts or p.E} {p.E} {p.top_k} {number}", torch.device("cpu")):
        experts = _experts(p, tokens)[: p.M]
        if not bool((experts < p.E).any()):
            experts[0, 0] = torch.randint(p.E, ())
        return dict(enumerate(sorted_by(p, experts), 4))


def sorted_by(p: MoeGemmProblem, experts: torch.Tensor) -> list[torch.Tensor | None]:
    """What moe_align makes of the tokens' experts, and random routing weights."""
    from aiter_mx.fallbacks import moe_align_torch

    align = _align(p)
    every = p.num_experts or p.E
    weights = torch.rand(p.M, p.top_k, dtype=torch.float32) + 0.1
    numbers = torch.arange(every, dtype=torch.int32)
    by_place = p.weights == "by_place"
    sorted_ids = torch.empty(align.max_ids, dtype=torch.int32)
    packed = by_place or p.ids == "aiter"
    sorted_weights = torch.empty(align.max_ids, dtype=torch.float32) if packed else None
    blocks = torch.empty(align.max_ids // p.block_m, dtype=torch.int32)
    used = torch.empty(2 if p.ids == "aiter" else 1, dtype=torch.int32)
    given = weights if p.ids == "aiter" else None
    here = numbers.where(numbers < p.E, -1)
    outputs = (sorted_ids, sorted_weights, blocks, used, None, None)
    moe_align_torch.run(align, (experts, given, here, None, None, *outputs), {})
    of_rows = {"none": None, "by_t": weights, "by_place": sorted_weights}[p.weights]
    return [sorted_ids, blocks, used, of_rows]


def _align(p: MoeGemmProblem) -> MoeAlignProblem:
    """The sorting of tokens by expert that the GEMM needs."""
    shape = p.M, p.top_k, p.num_experts or p.E, p.block_m, p.ids, "i64"
    return MoeAlignProblem(*shape, expert_map="numbers", drop_absent=1)


def _another(problem: MoeGemmProblem, operands: Operands) -> Operands:
    wq, bias = operands[2], operands[8]
    assert wq is not None
    device = wq.device
    # Few experts would be in a cache whatever the routing; all of many need not be copied.
    few = wq.nbytes < COLD_BYTES
    weights = _weights(problem, device) if few else operands[2:4]
    routing = _routing(problem, device)
    return [*operands[:2], *weights, *routing, bias, *_results(problem, device)]


def _read_bytes(problem: MoeGemmProblem, operands: Operands | None) -> float:
    p = problem
    if operands is None:
        every = p.num_experts or p.E
        experts = p.E * (1 - max(0.0, 1 - p.top_k / every) ** p.M)
        experts += (1 - p.E / every) ** p.routed  # where none would be here, one is
    else:
        experts = _touched(p, operands)
    return experts * p.N * p.K * (BLOCK + 1) / BLOCK


def _touched(problem: MoeGemmProblem, operands: Operands) -> int:
    blocks, used = operands[5], operands[6]
    assert blocks is not None and used is not None
    return int(blocks[: -(-int(used[0]) // problem.block_m)].unique().numel())


def _judge(problem: MoeGemmProblem, tensors: Tensors) -> Judge:
    reference, bound, listed = _reference(problem, tensors)

    def judge(results: Tensors) -> Verdict:
        rows = results[10][listed].clamp(0, len(results[9]) - 1) if problem.sorted_out else listed
        out = results[9][rows]
        if problem.activation == "none":
            return compare(out, reference, bound, problem.out_dtype)
        scales = as_scale_bytes(results[10][listed])
        values = dequantize_block_scaled(out, scales, torch.float64)
        blocks = reference.abs().unflatten(1, (-1, BLOCK)).amax(2).repeat_interleave(BLOCK, 1)
        error = (values - reference).abs()
        allowed = reference.abs() * _ROUNDING_E4M3 + blocks * _SMALLEST_OF_BLOCK + bound
        worst = float((error / allowed.clamp(min=2.0**-140)).max())
        return Verdict(float(error.norm() / reference.norm()), worst)

    return judge


def _reference(
    problem: MoeGemmProblem, tensors: Tensors
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What each row that the routing lists must be, in float64, what the error of sums may be (for
    plain outputs relative to ``ACCUMULATION``, for activated ones as it is), and these rows."""
    p = problem
    xq, xs, wq, ws, sorted_ids, blocks, used, weights, bias, _, _ = tensors
    shape = (p.routed, p.out_features)
    reference = torch.zeros(shape, dtype=torch.float64, device=xq.device)
    bound = torch.zeros_like(reference)
    found = []
    for block in range(-(-int(used[0]) // p.block_m)):
        places = slice(block * p.block_m, (block + 1) * p.block_m)
        ids = sorted_ids[places].long()
        if p.ids == "vllm":
            rows, valid = ids, ids < p.routed
        else:
            tokens, slots = ids & 0xFFFFFF, ids >> 24 & 0xFF
            rows, valid = tokens * p.top_k + slots, (tokens < p.M) & (slots < p.top_k)
        rows, expert = rows[valid], int(blocks[block])
        found.append(rows)
        if not rows.numel() or not 0 <= expert < p.E:
            continue
        sources = rows // p.a_div
        x = dequantize_block_scaled(xq[sources], as_scale_bytes(xs)[sources], torch.float64)
        w = dequantize_block_scaled(wq[expert], as_scale_bytes(ws)[expert], torch.float64)
        y, size = x @ w.T, torch.outer(x.norm(dim=1), w.norm(dim=1))
        if bias is not None:
            y += bias[expert].double()
            size += bias[expert].double().abs()
        if weights is not None:
            of_rows = weights.flatten()[rows] if p.weights == "by_t" else weights[places][valid]
            y *= of_rows.double().unsqueeze(1)
            size *= of_rows.double().abs().unsqueeze(1)
        if p.activation != "none":
            y, size = activated(p, y, size * ACCUMULATION)
        reference[rows], bound[rows] = y, size
    listed = torch.cat(found) if found else torch.empty(0, dtype=torch.int64, device=xq.device)
    return reference[listed], bound[listed], listed


def activated(
    problem: MoeGemmProblem | MoeUpProblem, y: torch.Tensor, error: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The activation of gate and up values, and the most by which errors of these change it."""
    from aiter_mx.fallbacks.moe_gemm_torch import activate

    middle = activate(problem, y)
    most = torch.zeros_like(middle)
    for gate in (-1, 1):
        for up in (-1, 1):
            signs = torch.empty(y.shape[1], dtype=torch.float64, device=y.device)
            if problem.layout == "interleaved":
                signs[::2], signs[1::2] = gate, up
            else:
                half = y.shape[1] // 2
                signs[:half], signs[half:] = gate, up
            most = torch.maximum(most, (activate(problem, y + error * signs) - middle).abs())
    return middle, 2 * most


def _sample(problem: MoeGemmProblem, share: float) -> MoeGemmProblem:
    """Few experts with as many tokens each as before, and some of their rows."""
    p = problem
    rows = max(_SAMPLE_ROWS, round(p.N * share) // _SAMPLE_ROWS * _SAMPLE_ROWS)
    E = min(p.E, max(_SAMPLE_EXPERTS, p.top_k))
    every = p.num_experts * E // p.E
    return replace(p, N=min(p.N, rows), E=E, num_experts=every, M=-(-p.M * E // p.E))


def _problems(model: Model, gpus: int, arch: str) -> list[MoeGemmProblem]:
    """Both GEMMs of the fused layer at decode, with each expert divided among the GPUs, and with
    whole experts divided among them."""
    if model.experts is None:
        return []
    hidden, experts = model.hidden, model.experts
    layers = [
        FusedMoeProblem(M, hidden, experts.intermediate // gpus, experts.count, experts.top_k)
        for M in ROWS
        if experts.intermediate // gpus % BLOCK == 0
    ]
    if gpus > 1 and experts.count % gpus == 0:
        layers += [
            FusedMoeProblem(
                *(M, hidden, experts.intermediate, experts.count // gpus, experts.top_k),
                num_experts=experts.count,
                has_map=1,
            )
            for M in ROWS
        ]
    return [part for layer in layers for op, part in layer.parts() if op == "moe_gemm"]


WORKLOAD = Workload(
    op="moe_gemm",
    draw=_operands,
    redraw=_another,
    read_bytes=_read_bytes,
    results=(9, 10),
    judge=_judge,
    sample=_sample,
    problems=_problems,
    touched=_touched,
    indices=_indices,
)
