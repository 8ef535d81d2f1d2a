"""FlyDSL's kernels of AMD's aiter: its GEMMs and the two products of MX-FP8 expert layers.

Needs FlyDSL in the release that aiter names (``pip install flydsl==0.3.1``) and a checkout of
ROCm/aiter, whose kernels are imported without the package around them, as that one wants a GPU.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from tune.published.hip_capture import Capture, install
from tune.published.run import PublishedRun, regions_of

_PACKAGES = ("aiter", "aiter.ops", "aiter.ops.flydsl", "aiter.ops.flydsl.kernels", "aiter.utility")
_PRESHUFFLED = re.compile(
    r"flydsl_bpreshuflle_(?P<m>\d+)x(?P<n>\d+)x(?P<k>\d+)_F8_F8_B16_"
    # As they are written today, and as they were, with stages first.
    r"(?:(?P<copy>\d)x(?P<waves>\d)(?:x(?P<swizzle>\d+))?(?:x(?P<stages>\d+))?"
    r"|(?P<old_stages>\d)x0x(?P<old_copy>\d)x(?P<old_waves>\d)x(?P<old_swizzle>\d+))"
    r"_(?P<scheduler>\w+)"
)
_EIGHT_WAVES = re.compile(r"flydsl_bpreshuffle_8w_(\d+)x(\d+)x128_F8_F8_B16_(\d+)x(\d+)")
_STOOD_FOR: dict[str, dict[str, Any]] = {  # what asks a GPU, or builds for one
    "aiter.jit": {"__path__": []},
    "aiter.jit.utils": {"__path__": []},
    "aiter.jit.utils.chip_info": {
        "get_gfx": lambda: "gfx950",
        "get_gfx_runtime": lambda: "gfx950",
        "get_cu_num": lambda: 256,
    },
    "aiter.utility.dtypes": {
        "fp8": torch.float8_e4m3fn,
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "fp4x2": torch.uint8,
        "fp8_e8m0": torch.uint8,
    },
}
_UP_OPTIONS = (
    "tile_m", "tile_n", "tile_k", "a_dtype", "b_dtype", "out_dtype", "k_batch", "waves_per_eu",
    "b_nt", "gate_mode", "xcd_swizzle", "k_wave", "a_scale_one",
)  # fmt: skip
_DOWN_OPTIONS = (
    "tile_m", "tile_n", "tile_k", "a_dtype", "b_dtype", "out_dtype", "mode", "sort_block_m",
    "persist", "waves_per_eu", "use_async_copy", "cu_num_mul", "b_nt", "xcd_swizzle",
)  # fmt: skip
_EMPTY = torch.empty
_SIGNALS = 256  # counters of a product with split K


def hip_capture(work: Path, linker: str | None = None) -> Capture:
    """Have FlyDSL compile for gfx950, and note its launches.

    Args:
        work: a folder for what is made on the way.
        linker: of the code objects, ``ld.lld`` by default.
    """
    found = linker or shutil.which("ld.lld-22") or shutil.which("ld.lld")
    if found is None:
        raise FileNotFoundError("FlyDSL links with ld.lld: install lld")
    binaries = work / "rocm" / "llvm" / "bin"
    binaries.mkdir(parents=True, exist_ok=True)
    if not (binaries / "ld.lld").exists():
        (binaries / "ld.lld").symlink_to(found)
    os.environ |= {
        "ROCM_PATH": str(work / "rocm"),
        "FLYDSL_GPU_ARCH": "gfx950",
        "FLYDSL_RUNTIME_CACHE_DIR": str(work / "cache"),
        "GPU_ARCHS": "gfx950",
        "CU_NUM": "256",
    }
    return install(work)


class FlyDsl:
    """FlyDSL and aiter's kernels, loaded for gfx950; make one in a process.

    Args:
        aiter: a checkout of ROCm/aiter.
        work: a folder for what is made on the way.
        linker: of the code objects, ``ld.lld`` by default.
    """

    def __init__(self, aiter: Path, work: Path, linker: str | None = None) -> None:
        self._capture = hip_capture(work, linker)
        for name in _PACKAGES:
            package = types.ModuleType(name)
            package.__path__ = [str(aiter / name.replace(".", "/"))]
            sys.modules[name] = package
        for name, has in _STOOD_FOR.items():
            sys.modules[name] = module = types.ModuleType(name)
            vars(module).update(has)
            package_name, _, last = name.rpartition(".")
            setattr(sys.modules[package_name], last, module)
        vars(sys.modules["aiter"])["logger"] = logging.getLogger("aiter")

    def gemm(self, row: Mapping[str, str], seed: int | None = None) -> PublishedRun:
        """A row of ``gemm.csv`` whose kernel is FlyDSL's.

        Args:
            row: its columns.
            seed: of the operands' values; None leaves their memory as it is, for counts alone.

        Raises:
            ValueError: the row's kernel is of another family.
        """
        kernel = row["kernel"]
        M, N, K = (int(row[name]) for name in "MNK")
        if found := _PRESHUFFLED.fullmatch(kernel):
            return self._fp8(M, N, K, seed, partial(_preshuffled, found))
        if found := _EIGHT_WAVES.fullmatch(kernel):
            return self._fp8(M, N, K, seed, partial(_eight_waves, found))
        if kernel.startswith("flydsl_gemm"):
            return self._bf16(M, N, K, seed, kernel)
        raise ValueError(f"no runner for {kernel}")

    def _fp8(
        self, M: int, N: int, K: int, seed: int | None, start: Callable[..., None]
    ) -> PublishedRun:
        """fp8 by fp8 with a factor a row and a column, weights shuffled."""
        a, b = _bytes(M * K, seed), _bytes(N * K, seed)
        out = torch.empty(M * N, dtype=torch.bfloat16)
        scale_a, scale_b = _factors(M, seed), _factors(N, seed)
        start(M, N, K, a, b, scale_a, scale_b, out)

        def check() -> None:
            x, w = _fp8(a).view(M, K), _fp8(_unshuffled(b.view(N, K)))
            wanted = (x @ w.T) * scale_a.double()[:, None] * scale_b.double()
            bound = 2**-8 * wanted.abs() + 2**-20 * (x.abs() @ w.abs().T)
            assert ((out.view(M, N).double() - wanted).abs() <= bound).all()

        return self._run((a, b, scale_a, scale_b), (out,), check)

    def _bf16(self, M: int, N: int, K: int, seed: int | None, kernel: str) -> PublishedRun:
        """bf16 by bf16, K split over workgroups that add where the first has cleared."""
        import flydsl.expr as fx
        from aiter.ops.flydsl.gemm_kernels import get_flydsl_splitk_hgemm_kernel_params
        from aiter.ops.flydsl.kernels.hgemm_dispatch import compile_flydsl_hgemm_kernel

        params = get_flydsl_splitk_hgemm_kernel_params(kernel)
        if params is None:
            raise ValueError(f"aiter does not know {kernel}")
        dropped = ("out_dtype", "target_gfx", "dtype", "stage", "pack_n", "kind")
        launch = compile_flydsl_hgemm_kernel(
            "bf16", N, K, **{name: each for name, each in params.items() if name not in dropped}
        )
        a, b, out = _normal(M, K, seed), _normal(N, K, seed), torch.empty(M, N).bfloat16()
        signals = [torch.zeros(_SIGNALS, dtype=torch.int32) for _ in range(2)]
        pointers = [_pointer(each) for each in (out, a, b, b)]
        launch(*pointers, M, *(_pointer(each) for each in signals), fx.Stream(0))

        def check() -> None:
            wanted = a.double() @ b.double().T
            bound = 2**-7 * wanted.abs() + 2**-7 * (a.abs() @ b.abs().T).double()
            assert ((out.double() - wanted).abs() <= bound).all()

        return self._run((a, b), (out, *signals), check)

    def moe(self, row: Mapping[str, str], seed: int = 0) -> tuple[PublishedRun, PublishedRun]:
        """The two products of a row of ``moe.csv`` over MX-FP8, with what the second one adds.

        Tokens choose their experts at random, by the seed; the operands' memory is as it is.

        Raises:
            ValueError: the row's kernels are of another family.
        """
        first, second = row["gemm1_kernel"], row["gemm2_kernel"]
        if "_afp8_wfp8_" not in first or "_afp8_wfp8_" not in second:
            raise ValueError(f"no runner for {first} and {second}")
        layer = ExpertLayer(row, seed)
        with patch.object(torch.cuda, "current_stream", lambda *_: 0):
            return self._up(layer, first, "_moe2_layout_" in second), self._down(layer, second)

    def _up(self, layer: ExpertLayer, kernel: str, by_block: bool) -> PublishedRun:
        from aiter.ops.flydsl.moe_kernels import flydsl_moe_stage1, get_flydsl_kernel_params

        params = get_flydsl_kernel_params(kernel)
        if params is None:
            raise ValueError(f"aiter does not know {kernel}")
        H, inner = layer.hidden, layer.intermediate
        x, w = _held(layer.tokens, H), _held(layer.experts, 2 * inner, H)
        x_scale, w_scale = _held(layer.rows, H // 32), _held(layer.experts * 2 * inner, H // 32)
        options = {name: params[name] for name in _UP_OPTIONS if name in params}
        made = flydsl_moe_stage1(
            x, w, *layer.lists, topk=layer.top_k, act=layer.activation, w1_scale=w_scale,
            a1_scale=x_scale, use_async_copy=True,
            v2_output_layout=by_block and params["out_dtype"] == "fp8", **options,
        )  # fmt: skip
        return self._run((x, w, x_scale, w_scale, *layer.lists), _tensors(made))

    def _down(self, layer: ExpertLayer, kernel: str) -> PublishedRun:
        from aiter.ops.flydsl.kernels.mxmoe_dispatcher import mxfp4_moe_gemm2
        from aiter.ops.flydsl.moe_kernels import (
            _run_moe_reduction,
            flydsl_moe_stage2,
            get_flydsl_kernel_params,
        )
        from aiter.ops.flydsl.mxfp4_kname import parse_flydsl_v2_gemm2_kernel

        T, H, inner = layer.tokens, layer.hidden, layer.intermediate
        columns = -(-inner // 256) * 8  # scales of a row, in whole tiles of 8
        w, w_scale = _held(layer.experts, H, inner), _held(layer.experts * H, columns)
        x_scale = _held(-(-layer.rows // 256) * 256, columns)
        out = torch.zeros(T, H, dtype=torch.bfloat16)
        weights = torch.full((layer.rows,), 1 / layer.top_k)
        if tiles := parse_flydsl_v2_gemm2_kernel(kernel):
            x = _held(layer.rows, inner)
            reduces = tiles["epilog"] == "reduce"
            each = torch.empty(T, layer.top_k, H, dtype=out.dtype) if reduces else out
            ids, experts, padded = layer.lists
            mxfp4_moe_gemm2(
                inter_sorted_quant=x, inter_sorted_shuffled_scale=x_scale, w2_u8=w,
                w2_scale_u8=w_scale, sorted_expert_ids=experts, cumsum_tensor=padded,
                sorted_token_ids=ids, sorted_weights=weights, out=each, M_logical=T,
                max_sorted=layer.rows, NE=layer.experts, D_HIDDEN=H, D_INTER=inner,
                topk=layer.top_k, BM=tiles["tile_m"], BN=tiles["tile_n"], BK=tiles["tile_k"],
                SBM=tiles["sort_block_m"] or layer.block, use_nt=tiles["use_nt"],
                a_dtype="fp8", b_dtype="fp8", epilog=tiles["epilog"], persist=tiles["persist"],
                g2_bf16_lds=tiles["bf16_lds"], g2_spart=tiles["spart"], stream=0,
            )  # fmt: skip
            if reduces:
                _run_moe_reduction(
                    each, out, T, layer.top_k, H, expert_mask=None, topk_ids=None, stream=0
                )
            return self._run((x, w, x_scale, w_scale, weights, *layer.lists), (each, out))
        params = get_flydsl_kernel_params(kernel)
        if params is None:
            raise ValueError(f"aiter does not know {kernel}")
        x = _held(T, layer.top_k, inner)
        options = {name: params[name] for name in _DOWN_OPTIONS if name in params}
        scratch: list[torch.Tensor] = []

        def empty(*shape: Any, **options: Any) -> torch.Tensor:
            scratch.append(_EMPTY(*shape, **options))
            return scratch[-1]

        with patch.object(torch, "empty", empty):  # results before they are added live there
            flydsl_moe_stage2(
                x, w, *layer.lists, out=out, topk=layer.top_k, w2_scale=w_scale,
                a2_scale=x_scale, sorted_weights=weights, **options,
            )  # fmt: skip
        return self._run((x, w, x_scale, w_scale, weights, *layer.lists), (out, *scratch))

    def _run(
        self,
        read: Sequence[torch.Tensor],
        written: Sequence[torch.Tensor],
        check: Callable[[], None] = lambda: None,
    ) -> PublishedRun:
        return PublishedRun(
            self._capture.take(), regions_of(read, written), (*read, *written), check
        )


class ExpertLayer:
    """Sizes and routing of a row of ``moe.csv``: tokens sorted by expert, in whole blocks.

    Attributes:
        lists: ids of tokens (their place among a token's experts in the upper byte, the number of
            tokens where there is none), experts of blocks, and the rows in use.
        rows: that the first list has room for.
    """

    def __init__(self, row: Mapping[str, str], seed: int) -> None:
        self.tokens, self.hidden = int(row["tokens"]), int(row["hidden"])
        self.intermediate, self.experts = int(row["intermediate"]), int(row["experts"])
        self.top_k, self.block = int(row["top_k"]), int(row["block_m"])
        self.activation = row["activation"].rsplit(".", 1)[1].lower()
        T, E, B = self.tokens, self.experts, self.block
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.rand(T, E, generator=generator).topk(self.top_k).indices
        blocks = -(-(T * self.top_k + E * B - self.top_k) // B)
        self.rows = blocks * B
        ids = torch.full((self.rows,), T, dtype=torch.int32)
        experts = torch.zeros(blocks, dtype=torch.int32)
        at = 0
        for expert in chosen.unique().tolist():
            tokens, places = (chosen == expert).nonzero(as_tuple=True)
            count = len(tokens)
            ids[at : at + count] = (tokens | places << 24).to(torch.int32)
            taken = -(-count // B)
            experts[at // B : at // B + taken] = expert
            at += taken * B
        self.lists = ids, experts, torch.tensor([at, T], dtype=torch.int32)


def _tensors(made: Any) -> tuple[torch.Tensor, ...]:
    return tuple(made) if isinstance(made, (tuple, list)) else (made,)


def _held(*shape: int) -> torch.Tensor:
    """Bytes whose values do not matter."""
    return _EMPTY(shape, dtype=torch.uint8)


def _preshuffled(name: re.Match[str], M: int, N: int, K: int, *tensors: torch.Tensor) -> None:
    import flydsl.expr as fx
    from aiter.ops.flydsl.kernels.preshuffle_gemm import compile_preshuffle_gemm

    def number(field: str, default: int = 0) -> int:
        return int(name[field] or name[f"old_{field}"] or default)

    a, b, scale_a, scale_b, out = tensors
    launch = compile_preshuffle_gemm(
        N=N, K=K, tile_m=int(name["m"]), tile_n=int(name["n"]), tile_k=int(name["k"]),
        in_dtype="fp8", out_dtype="bf16", use_async_copy=bool(number("copy")),
        waves_per_eu=number("waves") or None, xcd_swizzle=number("swizzle"),
        enable_scheduler=name["scheduler"].lower() != "off", lds_stage=number("stages", 2),
    )  # fmt: skip
    bias = torch.empty(0, dtype=out.dtype)
    launch(out, a, b, scale_a, scale_b, bias, M, N, fx.Stream(0))


def _eight_waves(name: re.Match[str], M: int, N: int, K: int, *tensors: torch.Tensor) -> None:
    import flydsl.expr as fx
    from aiter.ops.flydsl.gemm_a8w8_bpreshuffle_8wave import compile_8wave_gemm

    block_m, block_n, waves, swizzle = map(int, name.groups())
    a, b, scale_a, scale_b, out = tensors
    launch = compile_8wave_gemm(
        K=K, block_m=block_m, block_n=block_n, waves_per_eu=waves, xcd_swizzle=swizzle
    )
    launch(a, b, out, scale_a, scale_b, M, N, fx.Stream(0))


def _pointer(tensor: torch.Tensor) -> Any:
    from aiter.ops.flydsl.kernels.tensor_shim import ptr_arg

    return ptr_arg(tensor)


def _normal(rows: int, columns: int, seed: int | None) -> torch.Tensor:
    if seed is None:
        return torch.empty(rows, columns, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(seed + rows)
    return torch.randn(rows, columns, generator=generator).bfloat16()


def _bytes(count: int, seed: int | None) -> torch.Tensor:
    """e4m3 bytes that are no NaN."""
    if seed is None:
        return torch.empty(count, dtype=torch.int8)
    generator = torch.Generator().manual_seed(seed + count)
    drawn = torch.randint(0, 127, (count,), generator=generator, dtype=torch.int16)
    return (
        (drawn + 128 * torch.randint(0, 2, (count,), generator=generator))
        .to(torch.uint8)
        .view(torch.int8)
    )


def _factors(count: int, seed: int | None) -> torch.Tensor:
    generator = torch.Generator().manual_seed((seed or 0) + count)
    return torch.rand(count, generator=generator) + 0.5


def _fp8(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.float8_e4m3fn).double()


def _unshuffled(codes: torch.Tensor) -> torch.Tensor:
    """Rows of weights out of aiter's order: tiles of 16 rows by 64 bytes, of 16 bytes each."""
    rows, width = codes.shape
    parts = codes.view(rows // 16, width // 64, 4, 16, 16)
    return parts.permute(0, 3, 1, 2, 4).reshape(rows, width)
