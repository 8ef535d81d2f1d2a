"""The grouped MX-FP8 GEMMs of Primus-Turbo's pull request 330: forward, dgrad and wgrad.

Their results are right in the simulator's schedule ``round-robin``; in others two places that lack
a barrier or a wait show.

They are compiled from a checkout of that branch (``refs/pull/330/head`` of AMD-AGI/Primus-Turbo);
``hip_headers`` stands for the headers of HIP that they include.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import torch

from aiter_mx.sim.program import Program
from tune.published.operands import assert_product, operand, values_of
from tune.published.run import Launch, PublishedRun, compile_gfx950, packed, regions_of

_E4M3, _BF16 = "dtype::float8_e4m3", "dtype::bfloat16"
_PRESHUFFLE = re.compile(
    r"^template <int BLOCK_THREADS, int CHUNK_COLS>.*?(?=^static constexpr int PRESHUFFLE)",
    re.DOTALL | re.MULTILINE,
)
_SOURCE = """
#include <hip/hip_runtime.h>
#include "grouped_gemm/turbo/turbo_grouped_gemm_mxfp8_kernel.h"
#include "grouped_gemm/turbo/turbo_grouped_gemm_mxfp8_wgrad_kernel.h"
namespace primus_turbo {
%(preshuffle)s
template __global__ void preshuffle_scale_16x4_dual_kernel<256, 256>(
    const uint8_t*, uint32_t*, int, const uint8_t*, uint32_t*, int, int);
template __global__ void
turbo::turbo_grouped_gemm_mxfp8_256x256x128_16x16x128_4wave_persistent_kernel<
    %(e4m3)s, %(e4m3)s, %(bf16)s>(
    const %(e4m3)s*, const %(e4m3)s*, const uint32_t*, const uint32_t*, %(bf16)s*, const int64_t*,
    const int64_t*, const int64_t*, int32_t, int32_t, uint32_t, uint32_t, int32_t, int32_t);
template __global__ void
turbo::turbo_grouped_gemm_mxfp8_wgrad_256x256x128_16x16x128_4wave_persistent_kernel<
    %(e4m3)s, %(e4m3)s, %(bf16)s>(
    const %(e4m3)s*, const %(e4m3)s*, const uint32_t*, const uint32_t*, %(bf16)s*, const int64_t*,
    const int64_t*, int32_t, uint32_t, uint32_t, uint32_t, int32_t, int32_t);
}
"""
_ROWS_ALIGNED = 32  # that a group's rows are padded to, as the wrapper counts tiles


class Pr330:
    """The pull request's kernels.

    Args:
        checkout: a checkout of its branch.
        work: a folder for what is compiled.
    """

    def __init__(self, checkout: Path, work: Path) -> None:
        self._csrc, self._work = checkout / "csrc", work

    def product(self, rows: Sequence[int], N: int, K: int, seed: int | None = None) -> PublishedRun:
        """``out[rows of g] = a[rows of g] @ b[g].T``: the forward product and the one of dgrad.

        Args:
            rows: of each group, multiples of 16.
            N: rows of ``b``.
            K: that is summed over, a multiple of 128 and at least 384.
            seed: of the operands' values; None leaves their memory as it is, for counts alone.
        """
        total, groups = sum(rows), len(rows)
        a, a_scale = operand(total, K, seed, 0)
        b, b_scale = operand(groups * N, K, seed, 1)
        out = torch.empty(total, N, dtype=torch.bfloat16)
        sizes, offsets = _jagged(rows)
        a_words, b_words = (
            torch.empty(*each.shape, dtype=torch.int32) for each in (a_scale, b_scale)
        )
        padded = total + groups * _ROWS_ALIGNED
        tiles = -(-(-(-padded // _ROWS_ALIGNED) * _ROWS_ALIGNED) // 256), -(-N // 256)
        pointers = (a, b, a_words, b_words, out, sizes, offsets, offsets)
        launches = [
            self._preshuffle(a_scale, a_words, b_scale, b_words),
            self._launch("mxfp8_256x256x128", packed(pointers, 0, groups, N, K, *tiles)),
        ]

        def check() -> None:
            x, w = values_of(a, a_scale), values_of(b, b_scale).view(groups, N, K)
            starts = offsets.tolist()
            for group, (begin, end) in enumerate(pairwise(starts)):
                assert_product(out[begin:end], x[begin:end], w[group])

        read = (a, b, a_scale, b_scale, sizes, offsets)
        return PublishedRun(
            launches,
            regions_of(read, (out, a_words, b_words)),
            (*read, out, a_words, b_words),
            check,
        )

    def wgrad(self, rows: Sequence[int], N: int, K: int, seed: int | None = None) -> PublishedRun:
        """``out[g] = a[:, rows of g] @ b[:, rows of g].T``, of ``[N, total]`` and ``[K, total]``.

        Arguments as of ``product``; the rows of each group are a multiple of 128.
        """
        total, groups = sum(rows), len(rows)
        a, a_scale = operand(N, total, seed, 0)
        b, b_scale = operand(K, total, seed, 1)
        out = torch.empty(groups, N, K, dtype=torch.bfloat16)
        sizes, offsets = _jagged(rows)
        a_words, b_words = (
            torch.empty(*each.shape, dtype=torch.int32) for each in (a_scale, b_scale)
        )
        pointers = (a, b, a_words, b_words, out, sizes, offsets)
        tiles = -(-N // 256), -(-K // 256)
        launches = [
            self._preshuffle(a_scale, a_words, b_scale, b_words),
            self._launch("mxfp8_wgrad", packed(pointers, groups, total, N, K, *tiles)),
        ]

        def check() -> None:
            x, w = values_of(a, a_scale), values_of(b, b_scale)
            starts = offsets.tolist()
            for group, (begin, end) in enumerate(pairwise(starts)):
                assert_product(out[group], x[:, begin:end], w[:, begin:end])

        read = (a, b, a_scale, b_scale, sizes, offsets)
        return PublishedRun(
            launches,
            regions_of(read, (out, a_words, b_words)),
            (*read, out, a_words, b_words),
            check,
        )

    @cached_property
    def _program(self) -> Program:
        self._work.mkdir(parents=True, exist_ok=True)
        grouped = (self._csrc / "kernels/grouped_gemm/turbo_grouped_gemm.cu").read_text()
        found = _PRESHUFFLE.search(grouped)
        assert found, "no preshuffle in turbo_grouped_gemm.cu"
        source, image = self._work / "pr330.cu", self._work / "pr330.hsaco"
        source.write_text(_SOURCE % {"preshuffle": found[0], "e4m3": _E4M3, "bf16": _BF16})
        compile_gfx950(source, image, self._csrc / "include", self._csrc / "kernels")
        return Program.from_image(image.read_bytes())

    def _launch(self, part: str, kernarg: bytes, groups: int = 256) -> Launch:
        (name,) = (each for each in self._program.code_object.kernels if part in each)
        return Launch(self._program, name, (groups, 1, 1), (256, 1, 1), 0, kernarg)

    def _preshuffle(self, *scales: torch.Tensor) -> Launch:
        first, first_words, second, second_words = scales
        columns = first.shape[1]
        kernarg = struct.pack(
            "QQi4xQQii", first.data_ptr(), first_words.data_ptr(), first.shape[0],
            second.data_ptr(), second_words.data_ptr(), columns, columns,
        )  # fmt: skip
        return self._launch("preshuffle", kernarg, (first.shape[0] + second.shape[0]) // 16)


def _jagged(rows: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    sizes = torch.tensor(rows, dtype=torch.int64)
    return sizes, torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
