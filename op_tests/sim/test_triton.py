"""Kernels that Triton compiled for gfx950, in the simulator, against float64.

Triton's scaled dots are validated on MI350 by its makers, so they confirm operand and scale layouts
independently of our own kernels.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from aiter_mx.sim.program import Program, SimOptions
from aiter_mx.sim.report import LaunchReport
from op_tests.sim.tools import Array, launch

WARPS = 4
SCRATCH_POINTERS = [0] * 5  # two arguments that Triton adds, unused here
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
NUMPY = {"fp8e4nv": np.uint8, "fp8e5": np.uint8, "u8": np.uint8, "fp32": np.float32,
         "bf16": np.uint16, "fp16": np.float16, "i32": np.int32}  # fmt: skip


def run(
    kernel: object,
    grid: tuple[int, ...],
    constants: dict[str, object],
    options: dict[str, int],
    **arguments: tuple[str, Array] | int,
) -> LaunchReport:
    """Compile a Triton kernel for gfx950 and launch it; arrays come with Triton's element type."""
    signature = {
        name: "i32" if isinstance(value, int) else f"*{value[0]}"
        for name, value in arguments.items()
    } | dict.fromkeys(constants, "constexpr")
    divisible = {
        (i,): [["tt.divisibility", 16]]
        for i, value in enumerate(arguments.values())
        if not isinstance(value, int) or value % 16 == 0
    }
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, divisible),
        target=GPUTarget("hip", "gfx950", 64),
        options={"num_warps": WARPS, **options},
    )
    loaded = Program.from_image(compiled.asm["hsaco"])
    name = compiled.metadata.name
    values = [value if isinstance(value, int) else value[1] for value in arguments.values()]
    block = 64 * compiled.metadata.num_warps
    return launch(loaded, name, (*grid, 1, 1)[:3], block, [*values, *SCRATCH_POINTERS],
                  shared_bytes=compiled.metadata.shared, options=SimOptions(seed=1))  # fmt: skip


@triton.jit
def scaled_matmul(
    a, sa, b, sb, c, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    A: tl.constexpr, B: tl.constexpr, PA: tl.constexpr, PB: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    ka, kb, ks = tl.arange(0, BK // PA), tl.arange(0, BK // PB), tl.arange(0, BK // 32)
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        x = tl.load(a + m[:, None] * (K // PA) + (k // PA + ka)[None, :])
        y = tl.load(b + n[None, :] * (K // PB) + (k // PB + kb)[:, None])
        u = tl.load(sa + m[:, None] * (K // 32) + (k // 32 + ks)[None, :])
        v = tl.load(sb + n[:, None] * (K // 32) + (k // 32 + ks)[None, :])
        total = tl.dot_scaled(x, u, A, y, v, B, total)
    tl.store(c + m[:, None] * N + n[None, :], total)


@triton.jit
def packed_along_n(
    a, sa, b, sb, c, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    m, n, half = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BN // 2)
    ka, kb, ks = tl.arange(0, BK // 2), tl.arange(0, BK), tl.arange(0, BK // 32)
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        x = tl.load(a + m[:, None] * (K // 2) + (k // 2 + ka)[None, :])
        y = tl.load(b + (k + kb)[:, None] * (N // 2) + half[None, :])
        u = tl.load(sa + m[:, None] * (K // 32) + (k // 32 + ks)[None, :])
        v = tl.load(sb + n[:, None] * (K // 32) + (k // 32 + ks)[None, :])
        total = tl.dot_scaled(x, u, "e2m1", y, v, "e2m1", total, rhs_k_pack=False)
    tl.store(c + m[:, None] * N + n[None, :], total)


@triton.jit
def matmul(a, b, c, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    ks = tl.arange(0, BK)
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        x = tl.load(a + m[:, None] * K + (k + ks)[None, :])
        y = tl.load(b + n[None, :] * K + (k + ks)[:, None])
        total = tl.dot(x, y, total)
    tl.store(c + m[:, None] * N + n[None, :], total)


@triton.jit
def softmax(x, y, N, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    values = tl.load(x + row * N + at, mask=at < N, other=-float("inf"))
    powers = tl.exp(values - tl.max(values, axis=0))
    tl.store(y + row * N + at, powers / tl.sum(powers, axis=0), mask=at < N)


@triton.jit
def layer_norm(x, w, y, N, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    values = tl.load(x + row * N + at, mask=at < N, other=0.0).to(tl.float32)
    mean = tl.sum(values, axis=0) / N
    centred = tl.where(at < N, values - mean, 0.0)
    scale = 1 / tl.sqrt(tl.sum(centred * centred, axis=0) / N + 1e-5)
    weights = tl.load(w + at, mask=at < N, other=0.0)
    tl.store(y + row * N + at, (centred * scale * weights).to(tl.bfloat16), mask=at < N)


@triton.jit
def histogram(x, counts, sums, N, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + at, mask=at < N, other=0)
    tl.atomic_add(counts + values % 16, 1, mask=at < N)
    tl.atomic_add(sums, tl.sum(values.to(tl.float32), axis=0))


@triton.jit
def attention(q, k, v, o, N, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    m, d, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, D), tl.arange(0, BN)
    x = tl.load(q + m[:, None] * D + d[None, :])
    top, weight = tl.full((BM,), -1e30, tl.float32), tl.zeros((BM,), tl.float32)
    total = tl.zeros((BM, D), tl.float32)
    for at in range(0, N, BN):
        y = tl.load(k + (at + n)[None, :] * D + d[:, None])
        s = tl.where(m[:, None] >= (at + n)[None, :], tl.dot(x, y), -1e30)
        new = tl.maximum(top, tl.max(s, 1))
        p, fade = tl.exp2(s - new[:, None]), tl.exp2(top - new)
        weight, total, top = weight * fade + tl.sum(p, 1), total * fade[:, None], new
        total = tl.dot(p.to(tl.float16), tl.load(v + (at + n)[:, None] * D + d[None, :]), total)
    tl.store(o + m[:, None] * D + d[None, :], total / weight[:, None])


@triton.jit
def quantise(x, q, s, K: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, K)
    blocks = tl.reshape(tl.load(x + row * K + at).to(tl.float32), (K // 32, 32))
    exponent = tl.floor(tl.log2(tl.max(tl.abs(blocks), 1))) - 8
    codes = (blocks * tl.exp2(-exponent)[:, None]).to(tl.float8e4nv)
    tl.store(q + row * K + at, tl.reshape(codes, (K,)))
    tl.store(s + row * (K // 32) + tl.arange(0, K // 32), (exponent + 127).to(tl.uint8))


def random_codes(rng: np.random.Generator, kind: str, rows: int, depth: int) -> tuple[Array, Array]:
    """Stored bytes, and the values that they mean."""
    if kind == "e2m1":
        packed = rng.integers(0, 256, (rows, depth // 2), dtype=np.uint8)
        nibbles = np.stack([packed & 15, packed >> 4], axis=-1).reshape(rows, depth)
        return packed, FP4[nibbles]
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[kind]
    codes = rng.integers(0, 256, (rows, depth), dtype=np.uint8)
    codes[codes & 0x7C == 0x7C] &= 0x87  # no infinities and NaNs
    return codes, torch.from_numpy(codes).view(dtype).double().numpy()


POINTER = {"e4m3": "fp8e4nv", "e5m2": "fp8e5", "e2m1": "u8"}


@pytest.mark.parametrize(
    ("kinds", "tile", "instruction"),
    [
        (("e4m3", "e4m3"), (64, 64, 128), "v_mfma_scale_f32_32x32x64_f8f6f4"),
        (("e4m3", "e4m3"), (32, 64, 256), "v_mfma_scale_f32_16x16x128_f8f6f4"),
        (("e2m1", "e2m1"), (64, 32, 256), "v_mfma_scale_f32_16x16x128_f8f6f4"),
        (("e4m3", "e2m1"), (32, 32, 128), "v_mfma_scale_f32_16x16x128_f8f6f4"),
        (("e5m2", "e4m3"), (32, 64, 128), "v_mfma_scale_f32_16x16x128_f8f6f4"),
    ],
)
def test_scaled_dots_with_a_different_scale_for_every_block(
    kinds: tuple[str, str], tile: tuple[int, int, int], instruction: str
) -> None:
    rng = np.random.default_rng(sum(tile))
    M, N, K = 64, 64, 512
    (a, x), (b, y) = (random_codes(rng, kind, 64, K) for kind in kinds)
    sa, sb = rng.integers(110, 145, (2, 64, K // 32), dtype=np.uint8)
    c = np.zeros((M, N), np.float32)
    report = run(
        scaled_matmul,
        (M // tile[0], N // tile[1]),
        dict(zip(("BM", "BN", "BK"), tile, strict=True))
        | dict(zip("AB", kinds, strict=True))
        | {f"P{x}": 1 + (kind == "e2m1") for x, kind in zip("AB", kinds, strict=True)},
        {"matrix_instr_nonkdim": int(instruction.split("_")[4].split("x")[0])},
        a=(POINTER[kinds[0]], a),
        sa=("u8", np.ascontiguousarray(sa)),
        b=(POINTER[kinds[1]], b),
        sb=("u8", np.ascontiguousarray(sb)),
        c=("fp32", c),
        N=N,
        K=K,
    )  # fmt: skip
    x, y = (v * np.repeat(np.exp2(s - 127.0), 32, axis=1) for v, s in ((x, sa), (y, sb)))
    np.testing.assert_array_less(np.abs(c - x @ y.T), np.abs(x) @ np.abs(y.T) * 2.0**-20 + 1e-30)
    assert set(report.mfma) == {instruction}


def test_fp4_packed_along_n_is_turned_by_a_transposing_read() -> None:
    rng = np.random.default_rng(8)
    (a, x), (b, y) = (random_codes(rng, "e2m1", *shape) for shape in ((64, 512), (512, 64)))
    sa, sb = (np.ascontiguousarray(s) for s in rng.integers(110, 145, (2, 64, 16), dtype=np.uint8))
    c = np.zeros((64, 64), np.float32)
    report = run(
        packed_along_n, (1,), {"BM": 64, "BN": 64, "BK": 256}, {"matrix_instr_nonkdim": 16},
        a=("u8", a), sa=("u8", sa), b=("u8", b), sb=("u8", sb), c=("fp32", c), N=64, K=512,
    )  # fmt: skip
    x, y = (v * np.repeat(np.exp2(s - 127.0), 32, axis=1) for v, s in ((x, sa), (y.T, sb)))
    np.testing.assert_array_less(np.abs(c - x @ y.T), np.abs(x) @ np.abs(y.T) * 2.0**-20 + 1e-30)
    assert report.mnemonics["ds_read_b64_tr_b4"]


@pytest.mark.parametrize("kind", ["fp16", "bf16", "fp8e4nv"])
def test_unscaled_dots(kind: str) -> None:
    rng = np.random.default_rng(3)
    M, N, K = 64, 64, 128
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8e4nv": torch.float8_e4m3fn}[kind]
    a, b = (torch.from_numpy(rng.normal(0, 2, (64, K))).to(dtype) for _ in range(2))
    c = np.zeros((M, N), np.float32)
    bits = torch.uint8 if kind == "fp8e4nv" else torch.int16
    stored = [v.view(bits).numpy().view(NUMPY[kind]) for v in (a, b)]
    report = run(
        matmul, (M // 32, N // 64), {"BM": 32, "BN": 64, "BK": 64}, {},
        a=(kind, stored[0]), b=(kind, stored[1]), c=("fp32", c), N=N, K=K,
    )  # fmt: skip
    x, y = a.double().numpy(), b.double().numpy()
    np.testing.assert_allclose(c, x @ y.T, atol=2.0**-20 * (np.abs(x) @ np.abs(y.T)).max())
    assert report.mfma


def test_softmax_and_layer_norm() -> None:
    rng = np.random.default_rng(4)
    x, w = rng.normal(0, 3, (6, 1000)).astype(np.float32), rng.normal(0, 1, 1000).astype(np.float32)
    y = np.zeros_like(x)
    run(softmax, (6,), {"BLOCK": 1024}, {}, x=("fp32", x), y=("fp32", y), N=1000)
    powers = np.exp(x.astype(np.float64) - x.max(axis=1, keepdims=True))
    np.testing.assert_allclose(y, powers / powers.sum(axis=1, keepdims=True), rtol=2e-5)
    z = np.zeros(x.shape, np.uint16)
    run(layer_norm, (6,), {"BLOCK": 1024}, {}, x=("fp32", x), w=("fp32", w), y=("bf16", z), N=1000)
    centred = x - x.mean(axis=1, keepdims=True, dtype=np.float64)
    want = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + 1e-5) * w
    got = (z.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_allclose(got, want, rtol=2.0**-8, atol=1e-4)


def test_atomics() -> None:
    x = np.random.default_rng(5).integers(0, 1000, 3000, dtype=np.int32)
    counts, sums = np.zeros(16, np.int32), np.zeros(1, np.float32)
    run(histogram, (6,), {"BLOCK": 512}, {}, x=("i32", x), counts=("i32", counts),
        sums=("fp32", sums), N=3000)  # fmt: skip
    np.testing.assert_array_equal(counts, np.bincount(x % 16, minlength=16))
    assert sums[0] == x.sum()


def test_attention() -> None:
    N, D = 128, 64
    q, k, v = np.random.default_rng(6).normal(0, 0.5, (3, N, D)).astype(np.float16)
    out = np.zeros((N, D), np.float32)
    run(attention, (2,), {"D": D, "BM": 64, "BN": 32}, {}, q=("fp16", q), k=("fp16", k),
        v=("fp16", v), o=("fp32", out), N=N)  # fmt: skip
    scores = np.where(np.tri(N) > 0, q.astype(np.float64) @ k.T.astype(np.float64), -np.inf)
    powers = np.exp2(scores - scores.max(axis=1, keepdims=True))
    want = powers / powers.sum(axis=1, keepdims=True) @ v.astype(np.float64)
    np.testing.assert_allclose(out, want, atol=2e-3)


def test_quantisation_to_fp8_saturates_where_its_mode_says_so() -> None:
    x = torch.from_numpy(np.random.default_rng(7).normal(0, 1, (4, 2048))).bfloat16()
    x *= torch.exp2(torch.arange(4 * 64).reshape(4, 64) % 23 - 11.0).repeat_interleave(32, 1)
    codes, scales = np.zeros((4, 2048), np.uint8), np.zeros((4, 64), np.uint8)
    stored = np.ascontiguousarray(x.view(torch.int16).numpy().view(np.uint16))
    run(quantise, (4,), {"K": 2048}, {}, x=("bf16", stored), q=("fp8e4nv", codes), s=("u8", scales))
    blocks = x.double().reshape(4, 64, 32)
    exponent = torch.floor(torch.log2(blocks.abs().amax(-1))) - 8
    np.testing.assert_array_equal(scales, (exponent + 127).numpy())
    scaled = (blocks * torch.exp2(-exponent)[..., None]).clamp(-448, 448).reshape(4, 2048)
    want = scaled.float().to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert (scaled.abs() == 448).any()
    np.testing.assert_array_equal(codes, want)
