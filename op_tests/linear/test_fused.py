"""Linears that quantise x themselves: bit for bit what quantising first gives."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

import aiter_mx
from aiter_mx.dispatch.dispatcher import route
from aiter_mx.kernels.linear import KERNELS, LinearProblem
from aiter_mx.kernels.linear import mfma_ways_gfx950 as ways
from aiter_mx.kernels.linear.gemv import GEMV
from aiter_mx.kernels.linear.mfma_gfx950 import MFMA
from aiter_mx.kernels.linear.mma_registers_sm90 import MMA_REGISTERS
from aiter_mx.kernels.linear.wgmma_bf16_sm90 import WGMMA_BF16
from aiter_mx.kernels.linear.wgmma_f16_tiled_sm90 import WGMMA_F16_TILED
from aiter_mx.kernels.linear.wgmma_fp8_rescaled_sm90 import (
    ACCUMULATION_ERROR,
    RESCALING_ERROR,
    WGMMA_FP8_RESCALED,
)
from aiter_mx.kernels.linear.wgmma_fp8_sm90 import WGMMA_FP8
from aiter_mx.kernels.spec import Config, KernelSpec, combinations
from aiter_mx.launch import build_request
from aiter_mx.plan import bind_route
from aiter_mx.target import hardware, target_of
from op_tests import launches
from op_tests.conformance import DTYPES, SCHEDULES
from op_tests.launches import Out
from op_tests.mx_reference import assert_close_to_reference, random_mx
from op_tests.places import device_in
from op_tests.spills import assert_no_spills

GFX950, SM90A = hardware("gfx950"), hardware("sm_90a")
Weights = tuple[torch.Tensor, torch.Tensor]


device = device_in("sim", "cuda")


def activations(M: int, K: int, dtype: torch.dtype, seed: int, span: int = 12) -> torch.Tensor:
    """Random bits of blocks whose magnitudes differ by as much as 2^(2 span)."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(-span, span + 1, (M, K // 32), generator=generator).float().exp2()
    x = torch.randn(M, K, generator=generator) * sizes.repeat_interleave(32, 1)
    return x.to(dtype)


def weights(N: int, K: int, seed: int) -> Weights:
    return random_mx(N, K, torch.Generator().manual_seed(seed), scale_exponents=(-12, -6))


def launch(
    device: torch.device,
    kernel: KernelSpec,
    config: Config,
    x: tuple[torch.Tensor, torch.Tensor | None],
    w: Weights,
    out_dtype: str = "fp32",
) -> torch.Tensor:
    """The kernel's result in one configuration, on the CPU."""
    (M, K), N = x[0].shape, w[0].shape[0]
    x_dtype = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(x[0].dtype, "e4m3")
    problem = LinearProblem(M, N, K, out_dtype, x_dtype=x_dtype)
    tensors = (*x, *w, None, Out((M, N), DTYPES[out_dtype]))
    (out,) = launches.launch(kernel, device, problem, config, tensors)
    return out


def assert_same_bits(one: torch.Tensor, other: torch.Tensor) -> None:
    same = (one == other) & (one.signbit() == other.signbit())
    assert torch.equal(same | one.isnan(), same | other.isnan())
    assert (same | (one.isnan() & other.isnan())).all()


def gemv_config(rows: int, waves: int, unroll: int) -> dict[str, int]:
    return {"rows": rows, "waves": waves, "unroll": unroll}


def mfma_config(row_tiles: int, fold: int, waves: int, unroll: int) -> dict[str, int]:
    tiles = {"row_tiles": row_tiles, "fold": fold}
    return {**tiles, "waves": waves, "unroll": unroll, "blocks": 1}


def mma_registers_config(rows: int, waves: int, unroll: int, split: int) -> dict[str, int]:
    return {"rows": rows, "waves": waves, "unroll": unroll, "split": split}


def wgmma_bf16_config(tile_m: int, tile_n: int, pairs: int) -> dict[str, int]:
    return {"tile_m": tile_m, "tile_n": tile_n, "split": 1, "pairs": pairs}


# Kernel, configuration, M's range, whether K / 32 is odd, dtypes of x and y.
VARIANTS = [
    (GEMV, gemv_config(3, 2, 2), (1, 1), False, "bf16", "fp32"),
    (GEMV, gemv_config(4, 1, 2), (2, 2), True, "fp16", "bf16"),
    (GEMV, gemv_config(2, 3, 1), (5, 5), True, "bf16", "fp16"),
    (GEMV, gemv_config(1, 4, 1), (8, 8), False, "fp16", "fp32"),
    (MFMA, mfma_config(1, 1, 2, 1), (1, 16), True, "bf16", "fp32"),
    (MFMA, mfma_config(2, 2, 3, 2), (1, 8), False, "fp16", "bf16"),
    (MFMA, mfma_config(3, 4, 2, 1), (5, 8), True, "bf16", "fp16"),
    (MFMA, mfma_config(1, 1, 4, 1), (33, 64), False, "bf16", "fp32"),
    (MMA_REGISTERS, mma_registers_config(16, 2, 2, 1), (1, 4), False, "bf16", "fp32"),
    (MMA_REGISTERS, mma_registers_config(24, 3, 0, 2), (1, 4), True, "fp16", "bf16"),
    (MMA_REGISTERS, mma_registers_config(40, 2, 1, 4), (5, 8), True, "bf16", "fp32"),
    (MMA_REGISTERS, mma_registers_config(12, 2, 0, 1), (5, 8), False, "fp16", "bf16"),
    (WGMMA_BF16, wgmma_bf16_config(128, 64, 0), (33, 300), False, "bf16", "fp32"),
    (WGMMA_BF16, wgmma_bf16_config(96, 64, 1), (90, 200), True, "fp16", "bf16"),
    (WGMMA_F16_TILED, wgmma_bf16_config(128, 64, 0), (65, 300), False, "bf16", "fp32"),
    (WGMMA_F16_TILED, wgmma_bf16_config(96, 128, 1), (90, 200), True, "fp16", "bf16"),
    (WGMMA_FP8_RESCALED, {"ctas": 3}, (257, 300), False, "bf16", "bf16"),
    (WGMMA_FP8_RESCALED, {"ctas": 1}, (40, 200), True, "fp16", "fp16"),
]


ERRORS = {
    WGMMA_FP8_RESCALED.name: {
        "accumulation_error": ACCUMULATION_ERROR,
        "rescaling_error": RESCALING_ERROR,
    }
}
PLACES = {"gfx950": "sim", "sm_90a": "cuda"}
TRIALS = [
    pytest.param(place, *variant, marks=[pytest.mark.gpu] if place == "cuda" else [])
    for variant in VARIANTS
    for arch, place in PLACES.items()
    if variant[0].is_for(arch)
]


@pytest.mark.parametrize(
    ("device", "kernel", "config", "Ms", "odd_blocks", "x_dtype", "out_dtype"),
    TRIALS,
    indirect=["device"],
)
def test_the_result_is_that_of_quantising_first(
    device: torch.device,
    kernel: KernelSpec,
    config: Config,
    Ms: tuple[int, int],
    odd_blocks: bool,
    x_dtype: str,
    out_dtype: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not kernel.is_for(target_of(device).arch):
        pytest.skip("the kernel is for another GPU")
    draw = random.Random(f"{kernel.name} {config}")
    for seed in range(6 if device.type == "cpu" else 10):  # every kind of x there is below
        monkeypatch.setenv("AITER_MX_SIM_SCHEDULE", draw.choice(SCHEDULES))
        monkeypatch.setenv("AITER_MX_SIM_SEED", str(seed))
        col_tiles = -(-Ms[1] * config.get("fold", 1) // 16)
        least = max(Ms[0], (col_tiles - 1) * 16 // config.get("fold", 1) + 1)
        M = draw.randint(least, Ms[1])
        N = draw.choice([1, draw.randint(2, 15), draw.randint(16, 70)])
        K = 32 * max(1, draw.randint(1, 70) * 2 - odd_blocks)
        span = 8 if out_dtype == "fp16" else 12
        x = activations(M, K, DTYPES[x_dtype], seed, span)
        if seed % 3 == 1:  # subnormal numbers, zeros, and blocks of them
            x[:, ::5] *= 2.0**-120 if x_dtype == "bf16" else 2.0**-20
            x[M // 2, : K // 2] = 0.0
        if seed % 3 == 2 and K > 32:
            x[M - 1, K - 1], x[0, 33] = float("nan"), float("-inf")
        if seed % 5 == 3 and x_dtype == "bf16":  # beyond what bf16 holds of e4m3 and its scale
            x[M - 1, :32] *= 2.0**80
        w = weights(N, K, seed)
        quantised = aiter_mx.quantize(x)
        fused = launch(device, kernel, config, (x, None), w, out_dtype)
        assert_same_bits(fused, launch(device, kernel, config, quantised, w, out_dtype))
        if seed % 4 == 0:
            assert_close_to_reference(fused, *quantised, *w, **ERRORS.get(kernel.name, {}))


@pytest.mark.gpu
@pytest.mark.sanitized
@pytest.mark.parametrize("x_dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(("M", "K"), [(70, 33312), (129, 16416)])
def test_a_cluster_quantises_more_units_than_its_warps_have_at_once(
    M: int, K: int, x_dtype: str
) -> None:
    device = torch.device("cuda")
    for config in (wgmma_bf16_config(96, 64, 0), wgmma_bf16_config(128, 128, 1)):
        x, w = activations(M, K, DTYPES[x_dtype], M, 8), weights(130, K, M)
        fused = launch(device, WGMMA_F16_TILED, config, (x, None), w, "fp32")
        quantised = aiter_mx.quantize(x)
        assert_same_bits(fused, launch(device, WGMMA_F16_TILED, config, quantised, w, "fp32"))
        assert_close_to_reference(fused, *quantised, *w)


# M, N, K, then split, row_groups, k_groups, depth and per_sm: w as A and x as A, parts of K that
# differ, chunks of an odd number, K that ends within one, more workgroups than one on an SM.
FP8_CASES = [
    (16, 2304, 6144, (3, 1, 4, 6, 1)),
    (3, 2304, 6144, (3, 1, 3, 8, 1)),
    (8, 6144, 1536, (4, 2, 1, 3, 3)),
    (13, 6144, 1536, (1, 1, 4, 12, 1)),
    (9, 1001, 544, (1, 1, 2, 2, 1)),
    (31, 1001, 1184, (2, 1, 4, 4, 1)),
    (49, 515, 544, (2, 2, 2, 2, 1)),
    (57, 515, 1056, (8, 2, 1, 2, 1)),
    (64, 384, 512, (4, 1, 1, 2, 1)),
    (64, 1536, 1024, (4, 2, 2, 2, 1)),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("M", "N", "K", "values"), FP8_CASES)
@pytest.mark.parametrize(("x_dtype", "out_dtype"), [("bf16", "fp16"), ("fp16", "bf16")])
def test_wgmma_fp8_gives_what_quantising_first_gives(
    M: int, N: int, K: int, values: tuple[int, ...], x_dtype: str, out_dtype: str
) -> None:
    device = torch.device("cuda", 0)
    if target_of(device).arch != "sm_90a":
        pytest.skip("the kernel is for another GPU")
    config = {param.name: v for param, v in zip(WGMMA_FP8.params, values, strict=True)}
    assert not WGMMA_FP8.parts(SM90A, LinearProblem(M, N, K, x_dtype=x_dtype), config)
    w = weights(N, K, 3)
    for kind in range(4):
        x = activations(M, K, DTYPES[x_dtype], kind, span=3)
        if kind == 1:  # blocks of zeros, and subnormal numbers
            x[M // 2, : K // 2] = 0.0
            x[:, ::5] *= 2.0**-120 if x_dtype == "bf16" else 2.0**-20
        if kind == 2:
            x[M - 1, K - 1], x[0, 33] = float("nan"), float("-inf")
        if kind == 3 and x_dtype == "bf16":  # scales that have sums computed again
            x[0, K - 32 :] *= 2.0**-90
            x[M - 1, :32] *= 2.0**-80
        quantised = aiter_mx.quantize(x)
        fused = launch(device, WGMMA_FP8, config, (x, None), w, out_dtype)
        assert_same_bits(fused, launch(device, WGMMA_FP8, config, quantised, w, out_dtype))


@pytest.mark.parametrize(
    ("M", "N", "K", "kernel", "launches", "x_dtype"),
    [
        (1, 70, 10272, "gemv", 1, "bf16"),
        (1, 130, 1056, "mfma", 1, "bf16"),
        (1, 130, 1056, "mfma", 1, "fp16"),
        (20, 200, 1056, "mfma", 1, "fp16"),
        (64, 70, 12320, "mfma_split", 2, "bf16"),
        (4800, 96, 160, "persistent", 2, "fp16"),
    ],
)
def test_the_op_quantises_in_its_kernel_where_that_pays(
    M: int, N: int, K: int, kernel: str, launches: int, x_dtype: str
) -> None:
    x, w = activations(M, K, DTYPES[x_dtype], 3), weights(N, K, 4)
    bias = torch.randn(N)
    with aiter_mx.simulate("gfx950"):
        route = aiter_mx.explain("linear", M=M, N=N, K=K, x_dtype=x_dtype)
        assert route.kernel == kernel
        assert ("quantize and then linear" in route.reason) == (launches == 2)
        y = aiter_mx.linear(x, None, *w, bias)
        out = torch.full((M, N), float("nan"))
        assert aiter_mx.linear(x, None, *w, bias, torch.float32, out) is out
        assert_same_bits(y, aiter_mx.linear(*aiter_mx.quantize(x), *w, bias))
    assert_same_bits(out.bfloat16(), y)


def test_on_an_h200_mma_registers_quantises_where_that_was_faster() -> None:
    def launches(M: int, N: int, K: int, *values: int) -> int:
        problem, config = LinearProblem(M, N, K, x_dtype="bf16"), mma_registers_config(*values)
        return len(MMA_REGISTERS.parts(SM90A, problem, config)) or 1

    assert [launches(M, 2304, 6144, 32, 3, 1, 8) for M in (1, 8, 9)] == [1, 1, 2]
    assert launches(4, 57344, 8192, 48, 2, 1, 2) == 2  # too often


def test_on_an_h200_wgmma_fp8_quantises_what_takes_one_round_of_loads() -> None:
    def launches(M: int, N: int, K: int, *values: int) -> int:
        config = {param.name: v for param, v in zip(WGMMA_FP8.params, values, strict=True)}
        return len(WGMMA_FP8.parts(SM90A, LinearProblem(M, N, K, x_dtype="bf16"), config)) or 1

    assert [launches(M, 2304, 6144, 3, 1, 4, 6, 1) for M in (8, 16, 17)] == [1, 1, 2]
    assert launches(16, 9216, 6144, 1, 2, 2, 6, 1) == 2  # stages are used again


@pytest.mark.parametrize(
    ("N", "K", "rows", "most"), [(2304, 6144, 3, 1), (6144, 1536, 4, 3), (384, 384, 1, 8)]
)
def test_on_an_h200_the_gemv_quantises_where_that_was_faster(
    N: int, K: int, rows: int, most: int
) -> None:
    config = gemv_config(rows, waves=2, unroll=1)
    problems = [LinearProblem(M, N, K, x_dtype="bf16") for M in range(1, 9)]
    fused = [problem.M for problem in problems if not GEMV.parts(SM90A, problem, config)]
    assert fused == list(range(1, most + 1))


def test_the_torch_reference_and_empty_results_take_unquantised_x() -> None:
    x, w = activations(5, 96, torch.bfloat16, 0), weights(33, 96, 1)
    assert_same_bits(aiter_mx.linear(x, None, *w), aiter_mx.linear(*aiter_mx.quantize(x), *w))
    assert aiter_mx.linear(x[:0], None, *w).shape == (0, 33)


def computed_as_routed(x: torch.Tensor, w: Weights, pdl: bool = False) -> torch.Tensor:
    """Quantised first, then multiplied by the kernel and the configuration that x itself gets.

    A table may give quantised x another configuration, whose sums are added in another order.
    """
    (M, K), N = x.shape, w[0].shape[0]
    x_dtype = {torch.bfloat16: "bf16", torch.float16: "fp16"}[x.dtype]
    problem = LinearProblem(M, N, K, "bf16", pdl=pdl, x_dtype=x_dtype)
    target = target_of(x.device)
    run = bind_route(
        route("linear", target, problem),
        target,
        replace(problem, x_dtype="e4m3"),
        x.device,
    )
    out = torch.empty(M, N, dtype=torch.bfloat16, device=x.device)
    tensors = (*aiter_mx.quantize(x), *w, None, out)
    run(tensors, [0 if t is None else t.data_ptr() for t in tensors])
    return out


@pytest.mark.gpu
@pytest.mark.parametrize("M", [1, 2, 3, 4, 7, 16, 32, 64, 128])
def test_the_op_on_a_gpu_gives_what_quantising_first_gives(M: int) -> None:
    N, K = 2304, 6144
    w = [t.cuda() for t in weights(N, K, 5)]
    for dtype in (torch.bfloat16, torch.float16):
        x = activations(M, K, dtype, M).cuda()
        expected = computed_as_routed(x, w)
        assert_same_bits(aiter_mx.linear(x, None, *w), expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = aiter_mx.linear(x, None, *w)
        y.fill_(float("nan"))
        graph.replay()
        assert_same_bits(y, expected)
        early = aiter_mx.linear(x * 1.0, None, *w, pdl=True)  # behind the launch that writes x
        assert_same_bits(early, computed_as_routed(x, w, pdl=True))


def test_bad_activations_are_refused() -> None:
    x, w = activations(4, 64, torch.bfloat16, 0), weights(8, 64, 0)
    xq, xs = aiter_mx.quantize(x)
    for arguments, error, message in [
        ((x, xs, *w), TypeError, "xs must be None for xq of torch.bfloat16"),
        ((xq, None, *w), TypeError, "xs must be given for xq of torch.float8_e4m3fn"),
        ((x.float(), None, *w), TypeError, "xq must be torch.float8_e4m3fn or torch.bfloat16 or"),
        ((x.T.contiguous().T, None, *w), ValueError, "xq must be contiguous"),
        ((x[:, :32].contiguous(), None, *w), ValueError, r"wq must be \[8, 32\]"),
        ((x.tolist(), None, *w), TypeError, "xq must be a tensor, got list"),
    ]:
        with pytest.raises(error, match=message):
            aiter_mx.linear(*arguments)
    with pytest.raises(ValueError, match="x_dtype must be one of e4m3, bf16, fp16, got 'fp32'"):
        LinearProblem(1, 8, 64, x_dtype="fp32")


@pytest.mark.usefixtures("payloads_compared_by_bytes")
def test_torch_library_checks_pass() -> None:
    x, w = activations(4, 64, torch.bfloat16, 0), weights(8, 64, 0)
    torch.library.opcheck(torch.ops.aiter_mx.linear.default, (x, None, *w))
    torch.library.opcheck(
        torch.ops.aiter_mx.linear_out.default, (x, None, *w, None, torch.empty(4, 8))
    )
    layer = torch.compile(
        lambda x: aiter_mx.linear(x, None, *w), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(layer(x), aiter_mx.linear(x, None, *w))


def test_no_variant_that_quantises_spills() -> None:
    variants: dict[tuple[object, ...], tuple[KernelSpec, LinearProblem, Config]] = {}
    for M in range(1, 9):
        problem = LinearProblem(M, 512, 1 << 13, x_dtype="fp16")
        fused = [c for c in GEMV.candidates(GFX950, problem) if not GEMV.parts(GFX950, problem, c)]
        most = max(fused, key=lambda c: (c["unroll"] * (c["rows"] + 2 * M), c["waves"]))
        variants["gemv", M] = (GEMV, problem, most)
    for config in combinations(ways.PARAMS):
        for col_tiles in (1, 2, 4) if config["fold"] == 2 else ():
            problem = LinearProblem(8 * col_tiles, 16, 2048 + 32, x_dtype="fp16")
            if config["waves"] in (4, 8, 12, 16) and ways.resident_of(problem, config, True):
                key = ("mfma", config["row_tiles"], col_tiles, config["waves"])
                variants[key] = (MFMA, problem, config)  # the last one loads most at once
    assert len(variants) > 20
    assert_no_spills(build_request(kernel, GFX950, *rest) for kernel, *rest in variants.values())


def test_every_other_kernel_has_x_quantised_before() -> None:
    for kernel in KERNELS:
        for target in (GFX950, SM90A):
            problem = LinearProblem(64, 512, 1024, x_dtype="bf16")
            if kernel in (GEMV, MFMA) or kernel.name in (WGMMA_BF16.name, WGMMA_FP8_RESCALED.name):
                continue
            if kernel.refusal(target, problem) is not None:
                continue
            parts = kernel.parts(target, problem, kernel.configure(target, problem))
            assert [op for op, _ in parts] == ["quantize", "linear"]
            early = target is SM90A and kernel.name in (
                "wgmma_fp8",
                "mma_ring",
                "wgmma_bf16_few",
            )
            ring = kernel.name == "mma_ring"
            assert parts[1][1] == LinearProblem(64, 512, 1024, pdl=early, after_quantize=ring)
            assert (parts[0][1].carveout_bytes > 0) == ring


@pytest.mark.parametrize(
    ("M", "K", "parts"), [(129, 4096, []), (2048, 8192, []), (9000, 8192, ["quantize", "linear"])]
)
def test_wgmma_bf16_quantises_in_its_launch_ahead_what_its_workspace_has_room_for(
    M: int, K: int, parts: list[str]
) -> None:
    problem = LinearProblem(M, 2304, K, x_dtype="bf16")
    chosen = WGMMA_BF16.configure(SM90A, problem)
    assert [op for op, _ in WGMMA_BF16.parts(SM90A, problem, chosen)] == parts
    if not parts:
        quantised = replace(problem, x_dtype="e4m3")
        more = [WGMMA_BF16.workspace_bytes(SM90A, p, chosen) for p in (problem, quantised)]
        assert more[0] - more[1] >= M * K // 32 * 33
        assert more[0] <= 2 * M * K + (64 << 20)
