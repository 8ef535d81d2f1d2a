"""The torch and Triton linears against float64, and Triton's code for GPUs that are not here.

Run as a script, this file checks the Triton kernels in Triton's interpreter.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from aiter_mx.dispatch.dispatcher import route
from aiter_mx.errors import LaunchError
from aiter_mx.fallbacks import linear_torch as torch_fallback
from aiter_mx.fallbacks import linear_vendor
from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.linear import triton as tiles
from aiter_mx.kernels.registry import find_kernel
from aiter_mx.target import CPU, SIMULATED_GFX950, Target
from op_tests import mx_reference as mx
from op_tests.interpreted import assert_passes_in_the_interpreter

MI355X = Target(arch="gfx950", runtime="hip", cu_num=256, wave_size=64, name="MI355X")
H200 = Target(arch="sm_90a", runtime="cuda", cu_num=132, wave_size=32, name="H200")
TARGETS = (MI355X, H200)
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FP16_SCALES = (-12, -6)

Operands = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]


def operands(
    seed: int,
    M: int,
    N: int,
    K: int,
    *,
    scale_exponents: tuple[int, int] = (-6, 6),
    nan: float = 0.0,
    bias: torch.dtype | None = torch.float32,
) -> Operands:
    draw = torch.Generator().manual_seed(seed)
    options = {"scale_exponents": scale_exponents, "nan_payload": nan, "nan_scale": 10 * nan}
    xq, xs = mx.random_mx(M, K, draw, **options)
    wq, ws = mx.random_mx(N, K, draw, **options)
    size = 2.0 ** (2 * scale_exponents[1] + 14)  # of the order of one product
    drawn = None if bias is None else (torch.randn(N, generator=draw) * size).to(bias)
    return xq, xs, wq, ws, drawn


def scales_for(dtype: torch.dtype) -> tuple[int, int]:
    return FP16_SCALES if dtype == torch.float16 else (-6, 6)


class TestTorch:
    @pytest.mark.parametrize("dtype", OUT_DTYPES)
    @pytest.mark.parametrize("shape", [(1, 1, 32), (3, 40, 160), (17, 65, 1056)])
    def test_matches_float64_with_one_rounding(self, shape, dtype):
        arguments = operands(1, *shape, scale_exponents=scales_for(dtype), nan=1e-4)
        out = torch.empty(shape[:2], dtype=dtype)
        torch_fallback.linear_torch(*arguments, out)
        mx.assert_close_to_reference(out, *arguments, accumulation_error=2.0**-45, underflow=0.0)

    @pytest.mark.parametrize("bias", [None, torch.bfloat16, torch.float16])
    def test_takes_every_scale_there_is(self, bias):
        arguments = operands(2, 9, 33, 256, scale_exponents=(-127, 127), nan=1e-4, bias=None)
        if bias is not None:
            arguments = (*arguments[:4], torch.randn(33).to(bias))
        out = torch.empty(9, 33)
        torch_fallback.linear_torch(*arguments, out)
        assert out.isinf().any() and out.isfinite().any()
        exact = mx.linear_reference64(*arguments)
        expected = mx.round_once(exact, torch.float32)
        torch.testing.assert_close(out, expected, rtol=2.0**-23, atol=0, equal_nan=True)

    def test_takes_e8m0_scales(self):
        xq, xs, wq, ws, bias = operands(3, 4, 8, 96)
        out = torch.empty(4, 8)
        e8m0 = torch.float8_e8m0fnu
        torch_fallback.linear_torch(xq, xs.view(e8m0), wq, ws.view(e8m0), bias, out)
        mx.assert_close_to_reference(out, xq, xs, wq, ws, bias)

    @pytest.mark.parametrize("chunk_bytes", [1, 8 * 160 * 3])
    def test_chunks_cover_every_element_once(self, monkeypatch, chunk_bytes):
        monkeypatch.setattr(torch_fallback, "_CHUNK_BYTES", chunk_bytes)
        arguments = operands(4, 8, 13, 160)
        out = torch.full((8, 13), torch.nan)
        torch_fallback.linear_torch(*arguments, out)
        mx.assert_close_to_reference(out, *arguments)

    @pytest.mark.parametrize("K", [0, 32, 768, 6144, 2**20, 2**30])
    def test_chunks_stay_below_256_mib(self, K):
        rows = torch_fallback._chunk_rows(K)
        assert rows >= 1
        assert 8 * rows * rows <= 2**28
        assert 8 * rows * K <= 2**28 or rows == 1

    @pytest.mark.parametrize("shape", [(0, 8, 64), (4, 0, 64), (4, 8, 0)])
    def test_takes_empty_shapes(self, shape):
        out = torch.full(shape[:2], torch.nan)
        arguments = operands(5, *shape)
        torch_fallback.linear_torch(*arguments, out)
        mx.assert_close_to_reference(out, *arguments)


class TestTiles:
    def test_are_chosen_without_importing_triton(self):
        code = "import sys, aiter_mx.kernels.linear.triton; print('triton' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.stdout.strip() == "False", done.stderr

    @pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.arch)
    def test_every_candidate_is_legal(self, target):
        spec = find_kernel("linear", target.arch, "triton", "dot_scaled")
        for bucket, candidates in tiles.CANDIDATES[target.arch].items():
            assert 6 <= len(candidates) <= 10
            assert len({tuple(c.items()) for c in candidates}) == len(candidates)
            for candidate in candidates:
                spec.check_config(candidate)
                assert candidate["BLOCK_M"] <= bucket

    @pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.arch)
    @pytest.mark.parametrize("M", [1, 16, 17, 32, 33, 64, 65, 4096])
    def test_follow_the_bucket_and_split_only_where_there_is_room(self, target, M):
        for N, K in [(2304, 6144), (768, 32), (131072, 6144), (16, 65536)]:
            problem = LinearProblem(M=M, N=N, K=K, out_dtype="bf16", bias="none")
            config = tiles.configure(target, problem)
            first, second, *_ = tiles.CANDIDATES[target.arch][tiles.bucket(M)]
            wide = -(-M // second["BLOCK_M"]) * -(-N // second["BLOCK_N"])
            if target.arch == "sm_90a" and M > 64 and wide >= 1.5 * target.cu_num:
                assert config == second
                continue
            assert {**config, "SPLIT_K": 0} == {**first, "SPLIT_K": 0}
            if config["SPLIT_K"] > 1:
                workgroups = -(-M // config["BLOCK_M"]) * -(-N // config["BLOCK_N"])
                most = 8 if M > 64 else 3
                assert workgroups * config["SPLIT_K"] <= most * target.cu_num
                assert K // config["BLOCK_K"] >= 4 * config["SPLIT_K"] - 1
        problem = LinearProblem(M=1, N=2304, K=6144, out_dtype="bf16", bias="none")
        assert tiles.configure(target, problem)["SPLIT_K"] > 1

    def test_are_refused_where_triton_has_no_gpu(self):
        problem = LinearProblem(M=1, N=64, K=64, out_dtype="bf16", bias="none")
        for target in TARGETS:
            assert tiles.DOT_SCALED.refusal(target, problem) is None
        for target in (CPU, SIMULATED_GFX950):
            assert "Triton needs a GPU" in str(tiles.DOT_SCALED.refusal(target, problem))
        other = Target(arch="sm_80", runtime="cuda", cu_num=108, wave_size=32, name="A100")
        assert "not for sm_80" in str(tiles.DOT_SCALED.refusal(other, problem))


def compiled_text(target: Target, config: dict[str, int], *, whole_steps: bool) -> str:
    """What Triton makes of the tile kernel for a GPU that need not be here."""
    import triton
    from triton.backends.compiler import GPUTarget

    from aiter_mx.fallbacks.linear_triton import OPTIONS, linear_tile_kernel

    options = OPTIONS | {name: config[name] for name in ("num_warps", "num_stages")}
    constants = {name: value for name, value in config.items() if name not in options}
    constants |= {"HAS_BIAS": config["SPLIT_K"] == 1, "WHOLE_STEPS": whole_steps}
    types = {"x_ptr": "*fp8e4nv", "w_ptr": "*fp8e4nv", "xs_ptr": "*u8", "ws_ptr": "*u8"}
    types |= {"bias_ptr": "*fp32", "out_ptr": "*bf16" if config["SPLIT_K"] == 1 else "*fp32"}
    names = linear_tile_kernel.arg_names
    aligned = [*types, "N", "K"]
    source = triton.compiler.ASTSource(
        fn=linear_tile_kernel,
        signature={n: "constexpr" if n in constants else types.get(n, "i32") for n in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    backend = {
        "hip": GPUTarget("hip", target.arch, target.wave_size),
        "cuda": GPUTarget("cuda", 90, target.wave_size),
    }[target.runtime]
    asm = triton.compile(source, target=backend, options=options).asm
    return str(asm["amdgcn" if target.runtime == "hip" else "ptx"])


@pytest.mark.parametrize(
    ("bucket", "whole_steps"),
    [(16, True), (16, False), (32, False), (64, True), (128, True), (128, False)],
)
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.arch)
def test_each_bucket_compiles_to_matrix_instructions(
    monkeypatch, tmp_path, target, bucket, whole_steps
):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    config = tiles.CANDIDATES[target.arch][bucket][0]
    text = compiled_text(target, config, whole_steps=whole_steps)
    if target.runtime == "hip":
        assert re.search(r"v_mfma_scale_f32_\d+x\d+x\d+_f8f6f4", text)
        assert re.search(r"\.vgpr_spill_count: *0\b", text)
        assert re.search(r"\.private_segment_fixed_size: *0\b", text)
    else:
        assert re.search(r"wgmma\.mma_async\.\S*f32\.bf16\.bf16", text)


INTERPRETED = [
    # M, N, K, scale exponents, NaN share, bias, out dtype, SPLIT_K, SWAP
    (3, 40, 160, (-20, 20), 1e-3, torch.float32, torch.float32, 1, 0),
    (3, 40, 160, (-20, 20), 1e-3, torch.bfloat16, torch.float32, 1, 1),
    (17, 33, 544, (-6, 6), 0.0, torch.float16, torch.float32, 4, 1),
    (150, 20, 64, (-6, 6), 0.0, None, torch.float32, 1, 0),
    (17, 33, 512, FP16_SCALES, 1e-4, None, torch.float16, 4, 0),
    (2, 16, 64, (-6, 6), 0.0, torch.float32, torch.float32, 8, 0),
    (1, 1, 32, (-6, 6), 0.0, torch.float32, torch.float32, 2, 1),
]


def check_triton(arguments: Operands, dtype: torch.dtype, config: dict[str, int]) -> Tensor:
    from aiter_mx.fallbacks import linear_triton

    xq, _, wq, _, _ = arguments
    problem = LinearProblem(len(xq), len(wq), xq.shape[1])
    out = torch.full((len(xq), len(wq)), 12345.0, dtype=dtype, device=xq.device)
    linear_triton.run(problem, (*arguments, out), config)
    mx.assert_close_to_reference(out, *arguments)
    return out


def check_in_the_interpreter() -> None:
    # The interpreter truncates when it makes bf16, so that only compiled kernels can be held to it.
    config = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 64, "num_warps": 4, "num_stages": 2}
    for seed, (M, N, K, scales, nan, bias, dtype, split, swap) in enumerate(INTERPRETED):
        arguments = operands(seed, M, N, K, scale_exponents=scales, nan=nan, bias=bias)
        check_triton(arguments, dtype, {**config, "SPLIT_K": split, "SWAP": swap})


def test_triton_matches_float64_in_the_interpreter():
    from triton.runtime.interpreter import InterpreterBuilder

    if not hasattr(InterpreterBuilder, "create_dot_scaled"):
        pytest.skip("the interpreter of this Triton has no dot_scaled; 3.9's has")
    assert_passes_in_the_interpreter(__name__)


@pytest.fixture
def gpu() -> Target:
    from aiter_mx.target import gpu_target

    return gpu_target(0)


def on_gpu(arguments: Operands) -> Operands:
    xq, xs, wq, ws, bias = arguments
    return xq.cuda(), xs.cuda(), wq.cuda(), ws.cuda(), None if bias is None else bias.cuda()


@pytest.mark.gpu
@pytest.mark.parametrize("bucket", [16, 32, 64, 128])
def test_every_candidate_matches_float64_on_a_gpu(gpu, bucket):
    for seed, config in enumerate(tiles.CANDIDATES[gpu.arch][bucket]):
        for M, N, K in [(bucket - 1, 200, 1056), (bucket // 2 + 1, 128, 2048)]:
            check_triton(on_gpu(operands(seed, M, N, K, nan=1e-5)), torch.bfloat16, config)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", OUT_DTYPES)
@pytest.mark.parametrize("bias", [None, *OUT_DTYPES])
def test_triton_takes_every_dtype_on_a_gpu(gpu, dtype, bias):
    problem = LinearProblem(M=5, N=72, K=2048, out_dtype="bf16", bias="none")
    config = tiles.configure(gpu, problem)
    for scale_exponents in [scales_for(dtype), (-20, 20)]:
        drawn = operands(7, 5, 72, 2048, scale_exponents=scale_exponents, nan=1e-5, bias=bias)
        if dtype != torch.float16 or scale_exponents == FP16_SCALES:
            check_triton(on_gpu(drawn), dtype, config)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 1, 32), (1, 7, 64), (2, 1, 96), (19, 130, 1056)])
def test_triton_takes_odd_shapes_on_a_gpu(gpu, shape):
    arguments = on_gpu(operands(12, *shape))
    for candidates in tiles.CANDIDATES[gpu.arch].values():
        for split in (1, 4):
            check_triton(arguments, torch.float32, {**candidates[0], "SPLIT_K": split})


@pytest.mark.gpu
@pytest.mark.parametrize("M", [1, 16, 17, 64, 257, 2100])
def test_triton_repeats_itself_bit_by_bit_on_a_gpu(gpu, M):
    problem = LinearProblem(M=M, N=2304, K=6144, out_dtype="bf16", bias="none")
    arguments, config = on_gpu(operands(8, M, 2304, 6144)), tiles.configure(gpu, problem)
    first = check_triton(arguments, torch.bfloat16, config)
    assert torch.equal(first, check_triton(arguments, torch.bfloat16, config))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_a_captured_fallback_replays_on_new_data(gpu, backend):
    from aiter_mx.fallbacks import linear_triton

    problem = LinearProblem(M=4, N=128, K=4096, out_dtype="bf16", bias="none")
    config = tiles.configure(gpu, problem)
    arguments, fresh = on_gpu(operands(9, 4, 128, 4096)), on_gpu(operands(10, 4, 128, 4096))
    out = torch.empty(4, 128, dtype=torch.bfloat16, device="cuda")

    def call() -> None:
        if backend == "triton":
            linear_triton.run(problem, (*arguments, out), config)
        else:
            torch_fallback.linear_torch(*arguments, out)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for kept, new in zip(arguments, fresh, strict=True):
        kept.copy_(new)
    out.fill_(torch.nan)
    graph.replay()
    mx.assert_close_to_reference(out, *fresh)


@pytest.mark.gpu
def test_torch_matches_float64_on_a_gpu():
    arguments = operands(11, 70, 200, 1056, nan=1e-4)
    out = torch.empty(70, 200, dtype=torch.bfloat16, device="cuda")
    torch_fallback.linear_torch(*on_gpu(arguments), out)
    mx.assert_close_to_reference(out.cpu(), *arguments, accumulation_error=2.0**-45, underflow=0.0)


def test_vendors_library_is_asked_for_what_it_has_and_nothing_else(monkeypatch) -> None:
    vendor = find_kernel("linear", "gfx950", "vendor", "scaled_mm")
    gfx950 = MI355X
    fits = LinearProblem(M=32, N=64, K=96)
    assert vendor.refusal(gfx950, fits) is None
    for changes in ({"M": 33}, {"N": 48}, {"out_dtype": "fp32"}, {"bias": "bf16"}):
        assert "the vendor's MX GEMM" in str(vendor.refusal(gfx950, replace(fits, **changes)))
    assert "no MX datapath" in str(vendor.refusal(H200, fits))
    assert "needs a gfx950 GPU" in str(vendor.refusal(SIMULATED_GFX950, fits))
    # It comes after Triton wherever no table decides.
    assert route("linear", gfx950, replace(fits, M=320, N=32 * 7)).backend != "vendor"

    asked = {}

    def scaled_mm(x, wt, *, scale_a, scale_b, out_dtype, out):
        asked.update(x=x, wt=wt, scales=(scale_a.dtype, scale_b.dtype), out_dtype=out_dtype)
        raise NotImplementedError("no gfx950 here")

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    x, w = (torch.zeros(n, 96, dtype=torch.uint8).view(torch.float8_e4m3fn) for n in (32, 64))
    scales = [torch.full((n, 3), 127, dtype=torch.uint8) for n in (32, 64)]
    out = torch.empty(32, 64, dtype=torch.bfloat16)
    with pytest.raises(LaunchError, match="refuses MX-FP8 here: no gfx950 here"):
        linear_vendor.run(fits, (x, scales[0], w, scales[1], None, out), {})
    assert asked["x"].data_ptr() == x.data_ptr()
    assert asked["wt"].shape == (96, 64)
    assert asked["scales"] == (torch.float8_e8m0fnu,) * 2
    assert asked["out_dtype"] == torch.bfloat16


if __name__ == "__main__":
    check_in_the_interpreter()
