"""Compiles C = A @ B.T with FlyDSL, for test_sim_flydsl.py: its argument is f32, bf16 or fp8."""

import sys

import flydsl.compiler as flyc
import flydsl.expr as fx
import torch

SCALES = 0x7E7E7E7E, 0x81818181  # of A and B where they are fp8: all four bytes alike
TYPES = {
    "f32": (torch.float32, fx.Float32, 4, fx.rocdl.BufferCopy32b),
    "bf16": (torch.bfloat16, fx.BFloat16, 16, fx.rocdl.BufferCopy16b),
    "fp8": (torch.float8_e4m3fn, fx.Float8E4M3FN, 128, fx.rocdl.BufferCopy128b),
}
K = 256 if sys.argv[1] == "fp8" else 32
DTYPE, ELEMENT, DEPTH, LOAD = TYPES[sys.argv[1]]


@flyc.kernel
def product(A: fx.Tensor, B: fx.Tensor, C: fx.Tensor):
    lane, group = fx.thread_idx.x, fx.block_idx.x

    def tile_of(x, shape, index):
        tiles = fx.zipped_divide(fx.rocdl.make_buffer_tensor(x), fx.make_tile(*shape))
        return fx.slice(tiles, (None, index))

    a, b = tile_of(A, (64, K), group), tile_of(B, (64, K), 0)
    c = tile_of(C, (64, 64), group)
    if fx.const_expr(DEPTH == 128):
        unit = fx.make_mma_atom(fx.rocdl.cdna4.MFMA_Scale(16, 16, DEPTH, ELEMENT))
        unit = unit.set_value({"scale_a": fx.Int32(SCALES[0]), "scale_b": fx.Int32(SCALES[1])})
    else:
        unit = fx.make_mma_atom(fx.rocdl.MFMA(16, 16, DEPTH, ELEMENT))
    waves = fx.make_tiled_mma(unit, fx.make_layout((2, 2, 1), (1, 2, 0)))
    mine = waves.thr_slice(lane)
    load = fx.make_copy_atom(LOAD(), ELEMENT)
    store = fx.make_copy_atom(fx.rocdl.BufferCopy32b(), fx.Float32)
    get_a = fx.make_tiled_copy_A(load, waves).get_slice(lane)
    get_b = fx.make_tiled_copy_B(load, waves).get_slice(lane)
    put_c = fx.make_tiled_copy_C(store, waves).get_slice(lane)
    in_a, in_b = mine.make_fragment_A(a), mine.make_fragment_B(b)
    sums = mine.make_fragment_C(c)
    fx.copy(load, get_a.partition_S(a), get_a.retile(in_a))
    fx.copy(load, get_b.partition_S(b), get_b.retile(in_b))
    sums.fill(0)
    fx.gemm(unit, sums, in_a, in_b, sums)
    fx.copy(store, put_c.retile(sums), put_c.partition_S(c))


@flyc.jit
def launch(A: fx.Tensor, B: fx.Tensor, C: fx.Tensor, stream: fx.Stream = fx.Stream(None)):  # noqa: B008 (how FlyDSL spells the current stream)
    product(A, B, C).launch(grid=(2, 1, 1), block=(256, 1, 1), stream=stream)


launch(torch.zeros(128, K, dtype=DTYPE), torch.zeros(64, K, dtype=DTYPE), torch.zeros(128, 64))
