"""The small-M MX-FP8 kernels of aiter's pull request 3783: gemv and mfma for dense layers.

They are compiled from a checkout of that branch (``refs/pull/3783/head`` of ROCm/aiter);
``hip_headers`` stands for the headers of HIP that they include.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from aiter_mx.sim.program import Dim3, Program
from tune.published.operands import assert_product, operand, values_of
from tune.published.run import Launch, PublishedRun, compile_gfx950, packed, regions_of

_BYTES = "const unsigned char*"
_SIGNATURES = {
    "smallm_mxfp8_gemv_kernel_db": f"{_BYTES}, {_BYTES}, {_BYTES}, {_BYTES}, bf16*, int, int, int",
    "smallm_mxfp8_mfma_kernel_db": (
        f"{_BYTES}, {_BYTES}, {_BYTES}, {_BYTES}, bf16*, float*, int, int, int"
    ),
    "smallm_mxfp8_mfma_reduce_kernel": "const float*, bf16*, int, int",
}


class Pr3783:
    """The pull request's dense kernels.

    Args:
        checkout: a checkout of its branch.
        work: a folder for what is compiled.
    """

    def __init__(self, checkout: Path, work: Path) -> None:
        self._sources, self._work = checkout / "csrc" / "smallm_gemm_mxfp8", work
        work.mkdir(parents=True, exist_ok=True)

    def gemv(self, M: int, N: int, K: int, seed: int | None = None) -> PublishedRun:
        """M in 1, 2, 4, 8, 16, as its wrapper launches it; operands by a seed, or as they are."""
        columns = 4 if K >= 6144 and M <= 8 else 8
        (x, xs), (w, ws) = operand(M, K, seed, 0), operand(N, K, seed, 1)
        out = torch.empty(M, N, dtype=torch.bfloat16)
        kernarg = packed((x, xs, w, ws, out), M, N, K)
        name = f"smallm_mxfp8_gemv_kernel_db<{M}, {columns}>"
        launch = self._launch("dense", name, (-(-N // columns), 1, 1), 256, kernarg)
        return _run([launch], (x, xs, w, ws), (out,))

    def mfma(
        self, M: int, N: int, K: int, n_sub: int, k_splits: int, seed: int | None = None
    ) -> PublishedRun:
        """M in 8, 16, 32, 64; N in tiles of 16 by ``n_sub``, K in ``k_splits`` that are added."""
        (x, xs), (w, ws) = operand(M, K, seed, 0), operand(N, K, seed, 1)
        out = torch.empty(M, N, dtype=torch.bfloat16)
        sums = torch.empty(k_splits, M, N) if k_splits > 1 else None
        result = out if sums is None else None
        grid = -(-N // (16 * n_sub)), k_splits, -(-M // 16)
        name = f"smallm_mxfp8_mfma_kernel_db<16, {n_sub}, {k_splits}>"
        kernarg = packed((x, xs, w, ws, result, sums), M, N, K)
        launches = [self._launch("dense_mfma", name, grid, 64, kernarg)]
        if sums is None:
            return _run(launches, (x, xs, w, ws), (out,))
        name, kernarg = f"smallm_mxfp8_mfma_reduce_kernel<{k_splits}>", packed((sums, out), M, N)
        launches.append(self._launch("dense_mfma", name, (-(-M * N // 256), 1, 1), 256, kernarg))
        return _run(launches, (x, xs, w, ws), (out, sums))

    def _launch(self, file: str, kernel: str, grid: Dim3, lanes: int, kernarg: bytes) -> Launch:
        program = _compiled(self._sources / f"smallm_mxfp8_{file}.cu", self._work, kernel)
        (name,) = program.code_object.kernels
        return Launch(program, name, grid, (lanes, 1, 1), 0, kernarg)


@cache
def _compiled(path: Path, work: Path, kernel: str) -> Program:
    device_code, _, _ = path.read_text().partition("#include <torch/extension.h>")
    signature = _SIGNATURES[kernel.partition("<")[0]]
    stem = "".join(each if each.isalnum() else "_" for each in kernel)
    source, image = work / f"{stem}.cu", work / f"{stem}.hsaco"
    source.write_text(f"{device_code}\ntemplate __global__ void {kernel}({signature});\n")
    compile_gfx950(source, image)
    return Program.from_image(image.read_bytes())


def _run(
    launches: list[Launch], read: tuple[torch.Tensor, ...], written: tuple[torch.Tensor, ...]
) -> PublishedRun:
    def check() -> None:
        x, xs, w, ws = read
        assert_product(written[0], values_of(x, xs), values_of(w, ws))

    return PublishedRun(launches, regions_of(read, written), (*read, *written), check)
