"""Workgroups of CDNA4's decode kernel that share K: what they hand over, and how they count."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

import aiter_mx
from aiter_mx import counters
from aiter_mx.jit.build import build
from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.linear.mfma_gfx950 import MFMA_SPLIT
from aiter_mx.kernels.registry import find_kernel
from aiter_mx.launch import build_request
from aiter_mx.region import Region
from aiter_mx.runtimes.base import PackedArgs
from aiter_mx.sim.program import Program, SimOptions
from aiter_mx.target import hardware
from op_tests.linear.launches import assert_same_bits_whoever_ends_last
from op_tests.linear.operands import operands
from op_tests.mx_reference import assert_close_to_reference

GFX950, CPU = hardware("gfx950"), torch.device("cpu")
CONFIG = {"row_tiles": 2, "fold": 1, "waves": 2, "unroll": 1, "blocks": 1, "splits": 3}
SHAPES = [
    (13, 75, 1312),
    (33, 40, 2048),
    (127, 35, 1056),
    (5, 9, 96),
]  # the last K leaves two parts empty


@pytest.mark.parametrize(("M", "N", "K"), SHAPES)
def test_whoever_comes_last_the_bits_are_the_same(
    M: int, N: int, K: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_same_bits_whoever_ends_last(MFMA_SPLIT, CONFIG, (M, N, K), monkeypatch, 8)


def test_a_launch_leaves_its_slots_as_it_found_them() -> None:
    M, N, K = SHAPES[0]
    drawn, problem = operands(M, N, K, 8), LinearProblem(M, N, K, "fp32")
    target, module = replace(GFX950, cu_num=8), MFMA_SPLIT.module
    assert module is not None
    program = Program.from_image(build(build_request(MFMA_SPLIT, target, problem, CONFIG)).image)
    slots = torch.zeros(MFMA_SPLIT.counters(target, problem, CONFIG), dtype=torch.int32)
    args = PackedArgs(module.args, module.scalars(target, problem, CONFIG))
    launch = module.geometry(target, problem, CONFIG)
    for seed in range(3):
        y = torch.full((M, N), float("nan"))
        tensors = (*drawn, None, y, slots)
        args.set_pointers(*(0 if t is None else t.data_ptr() for t in tensors))
        regions = [
            Region(arg.name, t.data_ptr(), t.nbytes, arg.access)
            for arg, t in zip(module.pointers, tensors, strict=False)
            if t is not None
        ]
        options = SimOptions(coherence=True, seed=seed)
        program.launch(
            module.symbol, launch.grid, launch.block, args.to_bytes(), 0, regions, options
        )
        assert_close_to_reference(y, *drawn)
        assert not slots.any()


def test_k_is_split_where_rows_are_many_and_workgroups_read_much_of_x() -> None:
    def splits(M: int, N: int, K: int) -> bool:
        return MFMA_SPLIT.yields(GFX950, LinearProblem(M, N, K)) is None

    assert splits(64, 2304, 16384) and splits(40, 2304, 16384) and splits(33, 4096, 14336)
    assert not splits(16, 2304, 6144) and not splits(64, 384, 384) and not splits(64, 57344, 8192)
    with aiter_mx.simulate("gfx950"):
        chosen = aiter_mx.explain("linear", M=64, N=2336, K=16384)
    assert chosen.kernel == "mfma_split"
    assert "hip/mfma: mfma_split is faster here by the model of time" in chosen.reason


@pytest.mark.parametrize(("kernel", "most"), [("gemv", 16), ("mfma", 128), ("mfma_split", 128)])
def test_results_beyond_32_bit_offsets_are_refused(kernel: str, most: int) -> None:
    refusal = find_kernel("linear", "gfx950", "hip", kernel).refusal
    for M in (1, most):
        N = (1 << 29) // M
        assert refusal(GFX950, LinearProblem(M, N - 1, 1024)) is None
        told = f"{M} rows of N={N} are too many results for offsets of 31 bits"
        assert refusal(GFX950, LinearProblem(M, N, 1024)) == told


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    for name, empty in (("_of_streams", {}), ("_slabs", []), ("_left", {})):
        monkeypatch.setattr(counters, name, empty)
    monkeypatch.setattr(counters, "_SLAB_WORDS", 100)
    return torch.device("meta")  # stands for a GPU; places tell memory apart


def test_launches_of_a_stream_share_counters_and_those_of_others_do_not(gpu: torch.device) -> None:
    first = counters.counters(30, gpu, stream=1, capturing=False)
    assert counters.counters(30, gpu, stream=1, capturing=False) is first
    assert counters.counters(20, gpu, stream=1, capturing=False) is first
    other = counters.counters(30, gpu, stream=2, capturing=False)
    assert other.untyped_storage()._cdata != first.untyped_storage()._cdata
    assert counters.counters(5000, gpu, stream=1, capturing=False).numel() >= 5000


def test_captured_launches_keep_counters_of_their_own(gpu: torch.device) -> None:
    counters.prepare(gpu)
    taken = [counters.counters(30, gpu, stream=1, capturing=True) for _ in range(3)]
    slab = counters._slabs[0].untyped_storage()._cdata
    assert [t.untyped_storage()._cdata for t in taken] == [slab] * 3
    assert [t.storage_offset() for t in taken] == [0, 30, 60]
    by_the_graph = counters.counters(30, gpu, stream=1, capturing=True)  # 10 words are left
    assert by_the_graph.untyped_storage()._cdata != slab
    counters.prepare(gpu)
    assert len(counters._slabs) == 2 and counters._slabs[0].untyped_storage()._cdata == slab
    eager = counters.counters(30, gpu, stream=1, capturing=False)
    kept = {s.untyped_storage()._cdata for s in counters._slabs}
    assert eager.untyped_storage()._cdata not in kept


def test_many_rows_of_few_steps_are_refused_where_no_configuration_would_fit() -> None:
    for M, K in product((65, 129, 256), (32, 512, 544, 2048)):
        problem = LinearProblem(M, 48, K)
        refusal = MFMA_SPLIT.refusal(GFX950, problem)
        assert bool(MFMA_SPLIT.candidates(GFX950, problem)) == (refusal is None) == (K > 512)
        assert refusal is None or f"K={K} is not above 512" in refusal
