"""Hopper's kernels of ``moe_gemm`` against float64, with ``-m gpu``."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

import aiter_mx
from aiter_mx import launch
from aiter_mx.kernels.moe_gemm import MoeGemmProblem
from aiter_mx.kernels.moe_gemm.mma_ring_sm90 import MMA_RING, fits
from aiter_mx.kernels.moe_gemm.wgmma_f16_sm90 import WGMMA_F16
from aiter_mx.kernels.moe_gemm.wgmma_fp8_sm90 import ACCUMULATION_ERROR, WGMMA_FP8
from aiter_mx.kernels.spec import Config, KernelSpec
from aiter_mx.target import hardware
from aiter_mx.timing import random_mx as random_mx_there
from op_tests.moe.reference import Layer, assert_activated, assert_rows, lists_of, random_weights
from op_tests.moe.test_gemm import DTYPES, POISON, SWIGLU
from op_tests.mx_reference import random_mx

SM90 = hardware("sm_90a")
GUARD = 256
KERNELS = (MMA_RING, WGMMA_F16, WGMMA_FP8)


def mma_ring(row_tiles: int, col_tiles: int, k_warps: int, depth: int, groups: int = 1) -> Config:
    values = (row_tiles, col_tiles, k_warps, depth, groups)
    return dict(zip((param.name for param in MMA_RING.params), values, strict=True))


def wgmma_f16(col_tiles: int, groups: int, depth: int, slots: int, ahead: int) -> Config:
    values = (col_tiles, groups, 1, depth, slots, ahead)
    return dict(zip((param.name for param in WGMMA_F16.params), values, strict=True))


def two_tiles(col_tiles: int, depth: int, slots: int, ahead: int) -> Config:
    return {**wgmma_f16(col_tiles, 2, depth, slots, ahead), "tiles": 2}


def wgmma_fp8(col_tiles: int, depth: int, slots: int) -> Config:
    return {"col_tiles": col_tiles, "depth": depth, "slots": slots}


def exact_dtype(spec: KernelSpec) -> str:
    """The plain result of a kernel that shows most of its error."""
    return "bf16" if spec is WGMMA_FP8 else "fp32"


def accumulation_error(spec: KernelSpec) -> float:
    return ACCUMULATION_ERROR if spec is WGMMA_FP8 else 0.0


# Kernel, configuration, tokens, N, K, experts, top_k, block_m.
CASES = [
    (MMA_RING, mma_ring(1, 1, 2, 2), 3, 96, 256, 8, 4, 16),
    (MMA_RING, mma_ring(4, 2, 8, 2), 30, 200, 1152, 8, 4, 16),
    (MMA_RING, mma_ring(2, 4, 3, 4), 100, 136, 768, 8, 2, 64),
    (MMA_RING, mma_ring(2, 2, 4, 3), 17, 64, 1056, 5, 3, 16),
    (MMA_RING, mma_ring(1, 1, 1, 4, 2), 9, 40, 32, 6, 2, 4),
    (MMA_RING, mma_ring(3, 2, 1, 4, 2), 70, 333, 96, 4, 3, 20),
    (MMA_RING, mma_ring(4, 1, 4, 2), 200, 64, 512, 3, 2, 128),
    (WGMMA_F16, wgmma_f16(16, 2, 3, 3, 3), 300, 64, 384, 3, 2, 128),
    (WGMMA_F16, wgmma_f16(16, 2, 3, 2, 4), 400, 328, 640, 4, 2, 96),
    (WGMMA_F16, wgmma_f16(14, 2, 3, 2, 3), 150, 203, 640, 5, 3, 128),
    (WGMMA_F16, wgmma_f16(16, 2, 2, 0, 2), 260, 200, 384, 3, 2, 128),
    (MMA_RING, mma_ring(2, 1, 4, 2, 2), 40, 384, 640, 6, 3, 16),
    (MMA_RING, mma_ring(1, 4, 8, 2), 90, 448, 1024, 3, 2, 64),
    (WGMMA_F16, wgmma_f16(8, 3, 4, 3, 3), 200, 520, 1024, 8, 2, 64),
    (WGMMA_F16, wgmma_f16(8, 2, 3, 0, 2), 150, 203, 640, 5, 3, 128),
    (WGMMA_F16, wgmma_f16(12, 3, 3, 3, 3), 400, 328, 1152, 4, 2, 96),
    (WGMMA_F16, wgmma_f16(10, 3, 2, 0, 2), 400, 1000, 768, 4, 2, 96),
    (WGMMA_F16, wgmma_f16(4, 3, 4, 3, 3), 60, 328, 128, 6, 2, 32),
    (WGMMA_F16, wgmma_f16(4, 3, 2, 0, 2), 30, 256, 256, 8, 4, 16),
    (WGMMA_F16, wgmma_f16(6, 3, 5, 2, 2), 260, 200, 384, 3, 2, 128),
    (WGMMA_F16, wgmma_f16(12, 2, 2, 4, 4), 900, 64, 384, 3, 2, 96),
    # More than two blocks a workgroup.
    (WGMMA_F16, wgmma_f16(4, 3, 2, 0, 2), 700, 200, 256, 40, 4, 8),
    (WGMMA_F16, two_tiles(8, 4, 2, 3), 200, 520, 1024, 8, 2, 64),
    (WGMMA_F16, two_tiles(12, 3, 3, 2), 400, 328, 1536, 4, 2, 96),
    (WGMMA_F16, two_tiles(10, 6, 2, 4), 260, 1000, 512, 3, 2, 80),
    (WGMMA_F16, two_tiles(10, 4, 2, 3), 500, 1600, 1024, 40, 4, 80),
    (WGMMA_F16, two_tiles(8, 5, 3, 2), 150, 203, 512, 5, 3, 128),
    (WGMMA_F16, wgmma_f16(12, 3, 3, 3, 2), 600, 328, 384, 5, 4, 16),  # joined blocks, as the next
    (WGMMA_F16, wgmma_f16(6, 2, 4, 3, 2), 500, 200, 256, 60, 4, 4),
    (WGMMA_F16, two_tiles(10, 4, 2, 3), 400, 520, 512, 20, 2, 20),
    (WGMMA_FP8, wgmma_fp8(4, 4, 6), 60, 328, 512, 6, 2, 32),
    (WGMMA_FP8, wgmma_fp8(6, 4, 5), 200, 520, 1024, 8, 2, 64),
    (WGMMA_FP8, wgmma_fp8(4, 6, 8), 300, 800, 512, 40, 4, 8),
    (WGMMA_FP8, wgmma_fp8(6, 3, 4), 150, 203, 1536, 5, 3, 20),
    (WGMMA_FP8, wgmma_fp8(4, 3, 5), 30, 64, 512, 8, 4, 16),
    (WGMMA_FP8, wgmma_fp8(6, 5, 6), 600, 328, 1024, 5, 4, 128),
]


def run_on_gpu(
    spec: KernelSpec, config: Config, problem: MoeGemmProblem, tensors: list[Tensor | None]
) -> tuple[Tensor, Tensor]:
    """Result and scales of one launch into poisoned memory with guards around it."""
    assert spec.refusal(SM90, problem) is None
    spec.check_config(config)
    activated = problem.activation != "none"
    dtype = torch.float8_e4m3fn if activated else DTYPES[problem.out_dtype]
    guarded = []
    for kind, width in ((dtype, problem.out_features), (torch.uint8, problem.out_features // 32)):
        size = problem.routed * width * kind.itemsize
        whole = torch.full((size + 2 * GUARD,), POISON, dtype=torch.uint8, device="cuda")
        guarded.append((whole, whole[GUARD : GUARD + size].view(kind).view(problem.routed, width)))
    results = (guarded[0][1], guarded[1][1] if activated else None)
    every = [*(t if t is None else t.cuda() for t in tensors), *results]
    run = launch.bind(spec, SM90, problem, config, 0)
    run(every, [0 if t is None else t.data_ptr() for t in every])
    for whole, _ in guarded:
        for guard in (whole[:GUARD], whole[-GUARD:]):
            assert (guard == POISON).all(), "wrote outside the result"
    return guarded[0][1].cpu(), guarded[1][1].cpu()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["plain", "packed", "extremes", "nan", "activated"])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_matches_float64(case: int, kind: str) -> None:
    spec, config, M, N, K, E, top_k, block_m = CASES[case]
    activated = kind == "activated"
    if activated:
        N = -(-N // 64) * 64
    draw, generator = random.Random(case), torch.Generator().manual_seed(case)
    options: dict[str, object] = {"scale_exponents": (-11, -8) if activated else (-6, 6)}
    if kind == "extremes":
        options = {"scale_exponents": (-127, 127)}
    if kind == "nan":
        options |= {"nan_payload": 1e-3, "nan_scale": 2e-3}
    # Experts E and E + 1 are not here; a row in ten has none at all.
    chosen = [draw.randrange(E + 2) if draw.random() < 0.9 else -1 for _ in range(M * top_k)]
    a_div = draw.choice([1, top_k])
    weights = torch.rand(M * top_k, generator=generator) if kind in ("plain", "packed") else None
    bias = torch.randn(E, N, generator=generator) if kind != "extremes" else None
    layer = Layer(
        *random_mx(M * top_k // a_div, K, generator, **options),  # type: ignore[arg-type]
        *random_weights(E, N, K, generator, **options),
        bias if bias is None else bias.bfloat16(),
        chosen,
        a_div,
        weights,
        accumulation_error(spec),
    )
    packed = kind == "packed"
    lists = lists_of(chosen, E, block_m, top_k if packed else 0, draw)
    by_place = weights
    if packed and weights is not None:
        ids = lists[0].long()
        rows = ((ids & 0xFFFFFF) * top_k + (ids >> 24)).clamp(max=M * top_k - 1)
        by_place = weights[rows]
    problem = MoeGemmProblem(
        M=M,
        N=N,
        K=K,
        E=E,
        top_k=top_k,
        block_m=block_m,
        out_dtype="mxfp8" if activated else "bf16" if kind == "plain" else exact_dtype(spec),
        activation=draw.choice(["silu", "swiglu_oai"]) if activated else "none",
        layout=draw.choice(["halves", "interleaved"]),
        bias="none" if bias is None else "bf16",
        weights="none" if weights is None else "by_place" if packed else "by_t",
        ids="aiter" if packed else "vllm",
        a_div=a_div,
        max_blocks=len(lists[1]),
    )
    if spec is MMA_RING and not fits(problem, config):
        config = {**config, "row_tiles": 4, "depth": 2}  # as an activation demands
    interleaved = problem.layout == "interleaved"
    tensors = [layer.xq, layer.xs, layer.wq, layer.ws, *lists, by_place, layer.bias]
    out, scales = run_on_gpu(spec, config, problem, tensors)
    if activated:
        assert_activated(out, scales, layer, problem.activation, interleaved, SWIGLU)
    else:
        assert_rows(out, layer, POISON)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("spec", "activation"),
    [(spec, activation) for activation in ("none", "silu") for spec in KERNELS],
    ids=lambda value: getattr(value, "name", value),
)
def test_blocks_without_rows_are_passed_over(spec: KernelSpec, activation: str) -> None:
    generator, draw = torch.Generator().manual_seed(2), random.Random(2)
    M, N, K, E, top_k, block_m = 30, 640, 1024, 8, 4, 16
    chosen = [draw.randrange(E) for _ in range(M * top_k)]
    ids, blocks, _ = lists_of(chosen, E, block_m, 0, draw)
    rows, experts = list(ids[: -2 * block_m].view(-1, block_m)), blocks[:-2].tolist()
    for _ in range(40):  # of garbage; workgroups begin with most of them
        place = draw.choice([0, 0, draw.randrange(len(rows))])
        rows.insert(place, torch.full((block_m,), draw.choice([-1, M * top_k, 1 << 30])))
        experts.insert(place, draw.choice([-1, E, *range(E)]))
    used = torch.tensor([len(rows) * block_m], dtype=torch.int32)
    lists = (torch.cat(rows).int(), torch.tensor(experts, dtype=torch.int32), used)
    layer = Layer(
        *random_mx(M * top_k, K, generator, scale_exponents=(-11, -8)),
        *random_weights(E, N, K, generator, scale_exponents=(-11, -8)),
        None,
        chosen,
        1,
        accumulation_error=accumulation_error(spec),
    )
    out_dtype = exact_dtype(spec) if activation == "none" else "mxfp8"
    problem = MoeGemmProblem(
        *(M, N, K, E, top_k, block_m, out_dtype, activation), max_blocks=len(experts)
    )
    tensors = [layer.xq, layer.xs, layer.wq, layer.ws, *lists, None, None]
    for config in spec.candidates(SM90, problem)[:4]:
        out, scales = run_on_gpu(spec, config, problem, tensors)
        if activation == "none":
            assert_rows(out, layer, POISON)
        else:
            assert_activated(out, scales, layer, activation, False, SWIGLU)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("spec", "config", "K"),
    [(WGMMA_F16, wgmma_f16(4, 3, 2, 0, 2), 256), (WGMMA_F16, two_tiles(8, 4, 3, 3), 512)],
    ids=["one_tile", "two_tiles"],
)
@pytest.mark.parametrize(("M", "block_m"), [(500, 8), (900, 16), (3000, 128), (2700, 4)])
def test_pieces_that_are_left_over_are_shared_whatever_they_cost(
    M: int, block_m: int, spec: KernelSpec, config: Config, K: int
) -> None:
    generator, draw = torch.Generator().manual_seed(M), random.Random(M)
    N, E, top_k = 1200, 40, 4
    # One expert has half of the rows; some blocks have a single one, others none.
    chosen = [draw.choice([0, draw.randrange(E)]) for _ in range(M * top_k)]
    blocks: list[list[int]] = []
    experts: list[int] = []
    for expert in range(E):
        rows = [t for t, e in enumerate(chosen) if e == expert]
        while rows:
            count = draw.choice([0, 1, *[block_m] * 8])
            taken, rows = rows[:count], rows[count:]
            before = [-1] * draw.randrange(block_m if count == 1 else 1)
            blocks.append([*before, *taken, *[-1] * (block_m - len(before) - len(taken))])
            experts.append(expert)
            if draw.random() < 0.1:  # one of an expert that is not here
                blocks.append([-1] * block_m)
                experts.append(draw.choice([-1, E]))
    used = torch.tensor([len(blocks) * block_m], dtype=torch.int32)
    lists = (torch.tensor(blocks).int().flatten(), torch.tensor(experts).int(), used)
    layer = Layer(
        *random_mx(M * top_k, K, generator, scale_exponents=(-6, 6)),
        *random_weights(E, N, K, generator, scale_exponents=(-6, 6)),
        None,
        chosen,
        1,
    )
    problem = MoeGemmProblem(M, N, K, E, top_k, block_m, "fp32", max_blocks=len(blocks))
    tensors = [layer.xq, layer.xs, layer.wq, layer.ws, *lists, None, None]
    out, _ = run_on_gpu(spec, config, problem, tensors)
    assert_rows(out, layer, POISON)
    again, _ = run_on_gpu(spec, config, problem, tensors)
    assert torch.equal(out, again)


@pytest.mark.gpu
@pytest.mark.parametrize("spec", KERNELS, ids=lambda spec: spec.name)
def test_thousand_launches_are_bitwise_equal(spec: KernelSpec) -> None:
    generator, draw = torch.Generator().manual_seed(1), random.Random(1)
    M, N, K, E, top_k, block_m = 40, 512, 1024, 8, 4, 32
    chosen = [draw.randrange(E) for _ in range(M * top_k)]
    lists = lists_of(chosen, E, block_m, 0, draw)
    dtype = exact_dtype(spec)
    problem = MoeGemmProblem(M, N, K, E, top_k, block_m, dtype, max_blocks=len(lists[1]))
    x, w = random_mx(M * top_k, K, generator), random_weights(E, N, K, generator)
    out = torch.empty(M * top_k, N, dtype=DTYPES[dtype], device="cuda")
    every = [*(t.cuda() for t in (*x, *w, *lists)), None, None, out, None]
    run = launch.bind(spec, SM90, problem, spec.configure(SM90, problem), 0)
    first = None
    for _ in range(1000):
        out.fill_(float("nan"))
        run(every, [0 if t is None else t.data_ptr() for t in every])
        first = out.clone() if first is None else first
        assert torch.equal(out, first)


@pytest.mark.gpu
@pytest.mark.parametrize("spec", KERNELS, ids=lambda spec: spec.name)
def test_experts_beyond_2_and_4_gib_are_addressed_rightly(spec: KernelSpec) -> None:
    generator, draw = torch.Generator().manual_seed(6), random.Random(6)
    M, N, K, E, top_k, block_m = 96, 1024, 4096, 1040, 2, 64
    some = [0, 511, 513, 1023, 1025, E - 1]  # on either side of both
    assert 512 * N * K == 2 << 30 and E * N * K > 4 << 30
    payload, scale = random_mx_there(E * N, K, torch.device("cuda"))
    wq, ws = payload.view(E, N, K), scale.view(E, N, K // 32)
    chosen = [draw.choice(some) for _ in range(M * top_k)]
    lists = lists_of(chosen, E, block_m, 0, draw)
    x = random_mx(M * top_k, K, generator, scale_exponents=(-6, 6))
    problem = MoeGemmProblem(M, N, K, E, top_k, block_m, max_blocks=len(lists[1]))
    tensors: list[Tensor | None] = [*x, wq, ws, *lists, None, None]
    out, _ = run_on_gpu(spec, spec.configure(SM90, problem), problem, tensors)
    few = [torch.stack([t.view(torch.uint8)[expert] for expert in some]).cpu() for t in (wq, ws)]
    experts = [some.index(expert) for expert in chosen]
    operands = (*x, few[0].view(wq.dtype), few[1], None, experts, 1)
    assert_rows(out, Layer(*operands, accumulation_error=accumulation_error(spec)), POISON)


@pytest.mark.gpu
@pytest.mark.parametrize("is_activated", [False, True])
@pytest.mark.parametrize("M", [1, 6, 200])
def test_replays_with_other_tokens_and_routings_in_the_same_buffers(
    M: int, is_activated: bool
) -> None:
    generator = torch.Generator().manual_seed(M)
    N, K, E, top_k = 256, 512, 8, 2
    block_m = 64 if M == 200 else 16
    w = [t.cuda() for t in random_weights(E, N, K, generator, scale_exponents=(-11, -8))]
    tokens = torch.zeros(M, K, dtype=torch.bfloat16, device="cuda")
    ids = torch.zeros(M, top_k, dtype=torch.int32, device="cuda")

    def layer() -> tuple[Tensor, ...]:  # launches that may each begin before the one ahead ends
        x = aiter_mx.quantize(tokens)
        lists = aiter_mx.moe_align(ids, block_m, E)
        arguments = (*x, *w, *lists, M * top_k, top_k, block_m)
        if is_activated:
            return (*x, *aiter_mx.moe_gemm_activated(*arguments, a_div=top_k))
        return (*x, aiter_mx.moe_gemm(*arguments, a_div=top_k))

    layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        xq, xs, *results = layer()
    for _ in range(20):
        chosen = torch.randint(0, E, (M, top_k), generator=generator, dtype=torch.int32)
        spread = torch.exp2(torch.randint(-4, 5, (M, K // 32, 1), generator=generator))
        drawn = (torch.randn(M, K // 32, 32, generator=generator) * spread).view(M, K).bfloat16()
        ids.copy_(chosen)
        tokens.copy_(drawn)
        for result in results:
            result.view(torch.uint8).fill_(POISON)
        graph.replay()
        for got, expected in zip((xq, xs), aiter_mx.quantize(drawn.cuda()), strict=True):
            assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))
        cpu = [t.cpu() for t in (xq, xs, *w)]
        reference = Layer(*cpu, None, chosen.flatten().tolist(), top_k)  # type: ignore[arg-type]
        if is_activated:
            payload, scales = (t.cpu() for t in results)
            assert_activated(payload, scales, reference, "silu", False, SWIGLU)
        else:
            assert_rows(results[0].cpu(), reference, POISON)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("spec", "config"),
    [(WGMMA_F16, two_tiles(10, 4, 2, 3)), (WGMMA_FP8, wgmma_fp8(6, 4, 5))],
    ids=lambda value: getattr(value, "name", ""),
)
def test_scales_may_be_at_any_multiple_of_four(spec: KernelSpec, config: Config) -> None:
    generator, draw = torch.Generator().manual_seed(5), random.Random(5)
    M, N, K, E = 300, 300, 1024, 4
    x, w = random_mx(M, K, generator), random_weights(E, N, K, generator)
    chosen = torch.randint(0, E, (M * 2,), generator=generator).tolist()
    lists = lists_of(chosen, E, 80, 0, draw)
    dtype = exact_dtype(spec)
    problem = MoeGemmProblem(M, N, K, E, 2, 80, dtype, a_div=2, max_blocks=len(lists[1]))
    run = launch.bind(spec, SM90, problem, config, 0)
    results = []
    for offset in (0, 4):
        scales = []
        for scale in (x[1], w[1]):
            place = torch.empty(scale.numel() + 16, dtype=torch.uint8, device="cuda")[offset:]
            scales.append(place[: scale.numel()].view(scale.shape))
            scales[-1].copy_(scale)
        out = torch.full((M * 2, N), -1.0, dtype=DTYPES[dtype], device="cuda")
        operands = (x[0].cuda(), scales[0], w[0].cuda(), scales[1])
        every = [*operands, *(t.cuda() for t in lists), None, None, out, None]
        run(every, [0 if t is None else t.data_ptr() for t in every])
        results.append(out.cpu())
    assert torch.equal(*results)
