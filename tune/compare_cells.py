"""The cells that tune/compare.py times: which there are, and their calls in a tree of any age.

What makes calls uses what is public alone, as one of the trees is old.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

SHAPES, ROWS = 40, (1, 8, 16, 17, 32, 48, 64)
MOE_ROWS = (1, 8, 16, 32, 64, 128, 256, 512)
OUT_DTYPES, X_DTYPES = ("bf16", "fp16", "fp32"), ("e4m3", "bf16")
GROUPED = tuple(
    product(
        ((16, 4096, 7168), (16, 7168, 2048), (4, 5760, 2880), (32, 2880, 2880)),
        ("balanced", "skewed"),
    )
)
"""Groups, N and K, of 2048 rows each or as many in all."""
QUANTIZE = tuple(product(("rows", "columns", "both"), ("bf16", "fp32"), (8192, 32768)))
"""Directions, dtypes and rows, of 4096 columns."""
BENCHED = ((2304, 6144), (1536, 6144), (6144, 2048), (6144, 1536), (9216, 6144))
"""N and K that the benchmark of linears has, at 1 to 64 rows."""
BENCHED_LAYER = {"N": 768, "K": 6144, "E": 128, "top_k": 4}
"""The layer of that of expert layers, at 1 to 512 tokens; those of grouped GEMMs and quantisation
have the shapes above."""
MOST_MOE_BYTES = 3 << 30
Cell = dict[str, Any]
EAGER: list[Cell] = [
    {"op": "linear", "timed": "host", "M": 1, "N": 64, "K": 64}
    | {"out_dtype": "bf16", "x_dtype": "e4m3", "bias": "none", "pdl": False},
    {"op": "fused_moe", "timed": "host", "M": 1, "N": 64, "K": 64, "E": 4, "top_k": 2},
    {"op": "quantize", "timed": "host", "M": 1, "N": 64, "to": "rows", "x_dtype": "bf16"},
]
"""Eager calls whose host's time is compared: so small that the GPU always waits."""


def draw_cells(linears: int, layers: int, grouped: int, quantize: int, seed: int) -> list[Cell]:
    """The cells, the same for each seed, in an order whose beginning is a sample of them all."""
    from aiter_mx.workloads.models import MODELS, TENSOR_PARALLEL

    dice = random.Random(seed)
    known = sorted({s for m in MODELS.values() for g in TENSOR_PARALLEL for s in m.linears(g)})
    shapes = dice.sample([shape for shape in known if shape[1] % 32 == 0], SHAPES)
    kinds = list(product(shapes, ROWS, OUT_DTYPES, X_DTYPES, (False, True), (False, True)))
    cells: list[Cell] = [
        {"op": "linear", "M": M, "N": N, "K": K, "out_dtype": out, "x_dtype": x}
        | {"bias": "bf16" if bias else "none", "pdl": pdl}
        for (N, K), M, out, x, bias, pdl in sorted(dice.sample(kinds, min(linears, len(kinds))))
    ]
    found = set()
    for model, gpus, M in product(MODELS.values(), TENSOR_PARALLEL, MOE_ROWS):
        if model.experts and model.experts.intermediate % (32 * gpus) == 0:
            width = model.experts.intermediate // gpus
            if 3 * model.experts.count * width * model.hidden <= MOST_MOE_BYTES:
                found.add((model.hidden, width, model.experts.count, model.experts.top_k, M))
    for H, width, E, top_k, M in sorted(dice.sample(sorted(found), min(layers, len(found)))):
        cells.append({"op": "fused_moe", "M": M, "N": width, "K": H, "E": E, "top_k": top_k})
    for (G, N, K), mode in dice.sample(GROUPED, min(grouped, len(GROUPED))):
        cells.append({"op": "grouped_gemm", "M": 2048 * G, "N": N, "K": K, "G": G, "mode": mode})
    for to, dtype, M in dice.sample(QUANTIZE, min(quantize, len(QUANTIZE))):
        cells.append({"op": "quantize", "M": M, "N": 4096, "to": to, "x_dtype": dtype})
    dice.shuffle(cells)
    return cells


def benched_cells() -> list[Cell]:
    """Those of the benchmarks of linears and of expert layers."""
    usual = {"out_dtype": "bf16", "x_dtype": "e4m3", "bias": "none"}
    rows = product(BENCHED, (1, 2, 4, 8, 16, 32, 64), (False, True))
    linears = [
        {"op": "linear", "M": M, "N": N, "K": K, **usual, "pdl": pdl} for (N, K), M, pdl in rows
    ]
    return linears + [{"op": "fused_moe", "M": M} | BENCHED_LAYER for M in (1, 2, 4, *MOE_ROWS[1:])]


def tiny(cells: Iterable[Cell]) -> list[Cell]:
    """The same kinds of cells at sizes that a simulator takes."""
    few = {
        "linear": {"N": 64, "K": 96, "M": 2},
        "fused_moe": {"N": 64, "K": 96, "M": 2, "E": 4, "top_k": 2},
        "grouped_gemm": {"N": 64, "K": 96, "M": 40, "G": 3},
        "quantize": {"N": 64, "M": 32},
    }
    return [cell | few[cell["op"]] for cell in cells]


Calls = tuple[list[Callable[[], object]], list[Any]]
"""Calls, and where they leave their results."""


class _Dice:
    """Operands of a cell, drawn as its fields seed them."""

    def __init__(self, cell: Cell, device: Any) -> None:
        import torch

        fields = json.dumps(cell, sort_keys=True).encode()
        seed = int.from_bytes(hashlib.sha256(fields).digest()[:7], "big")
        self.device, self.generator = device, torch.Generator(device).manual_seed(seed)
        self.dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

    def integers(self, first: int, end: int, *shape: int) -> Any:
        import torch

        drawn = torch.empty(shape, device=self.device, dtype=torch.uint8)
        return drawn.random_(first, end, generator=self.generator)

    def mx(self, *shape: int) -> tuple[Any, Any]:
        import torch

        payload = self.integers(0, 254, *shape)
        payload += payload >= 127  # neither of the two that are NaN
        scale = self.integers(118, 124, *shape[:-1], shape[-1] // 32)
        return payload.view(torch.float8_e4m3fn), scale

    def normal(self, *shape: int, dtype: str = "bf16") -> Any:
        import torch

        drawn = torch.randn(shape, device=self.device, generator=self.generator)
        return drawn.to(self.dtypes[dtype])

    def uniform(self, *shape: int) -> Any:
        import torch

        return torch.rand(*shape, device=self.device, generator=self.generator)

    def empty(self, *shape: int, dtype: str = "bf16") -> Any:
        import torch

        return torch.empty(shape, dtype=self.dtypes[dtype], device=self.device)


def operands_of(cell: Cell, device: Any, cold_bytes: int) -> Calls:
    """Calls of a cell over operands that its fields seed, as many as read so many bytes of weights,
    or of what is quantised, but one at least."""
    calls = {
        "linear": _linear,
        "fused_moe": _layer,
        "grouped_gemm": _grouped,
        "quantize": _quantise,
    }
    return calls[cell["op"]](cell, _Dice(cell, device), cold_bytes)


def _linear(cell: Cell, dice: _Dice, cold_bytes: int) -> Calls:
    import aiter_mx

    M, N, K = cell["M"], cell["N"], cell["K"]
    copies = _copies(N * K, cold_bytes)
    weights, scales = dice.mx(copies, N, K)
    x = dice.mx(M, K) if cell["x_dtype"] == "e4m3" else (dice.normal(M, K), None)
    bias = dice.normal(N) if cell["bias"] != "none" else None
    out = dice.empty(copies, M, N, dtype=cell["out_dtype"])

    def call(i: int) -> Callable[[], object]:
        arguments = (*x, weights[i], scales[i], bias, out.dtype, out[i])
        return lambda: aiter_mx.linear(*arguments, pdl=cell["pdl"])

    return [call(i) for i in range(copies)], list(out)


def _layer(cell: Cell, dice: _Dice, cold_bytes: int) -> Calls:
    import aiter_mx

    M, N, K, E, top_k = (cell[name] for name in ("M", "N", "K", "E", "top_k"))
    copies = _copies(3 * E * N * K, cold_bytes)
    gate_up, down = dice.mx(copies, E, 2 * N, K), dice.mx(copies, E, K, N)
    x, draws = dice.normal(M, K), max(copies, 4 if cold_bytes else 1)
    ids = dice.uniform(draws, M, E).argsort(2)[..., :top_k].int().contiguous()
    shares = dice.uniform(draws, M, top_k)
    out = dice.empty(draws, M, K)

    def call(i: int) -> Callable[[], object]:
        w = [part[i % copies] for part in (*gate_up, *down)]
        return lambda: aiter_mx.fused_moe(x, *w, ids[i], shares[i], out=out[i])

    return [call(i) for i in range(draws)], list(out)


def _grouped(cell: Cell, dice: _Dice, cold_bytes: int) -> Calls:
    import torch

    import aiter_mx

    M, N, K, G = (cell[name] for name in ("M", "N", "K", "G"))
    copies = _copies(G * N * K, cold_bytes)
    parts = dice.uniform(G) ** (4 if cell["mode"] == "skewed" else 0)
    ends = (parts.cumsum(0) / parts.sum() * M).round().int()
    offsets = torch.nn.functional.pad(ends, (1, 0)).contiguous()
    a, (b, b_scale) = dice.mx(M, K), dice.mx(copies, G, N, K)
    out = dice.empty(copies, M, N)

    def call(i: int) -> Callable[[], object]:
        arguments = (*a, b[i], b_scale[i], offsets)
        return lambda: aiter_mx.grouped_gemm(*arguments, out=out[i])

    return [call(i) for i in range(copies)], list(out)


def _quantise(cell: Cell, dice: _Dice, cold_bytes: int) -> Calls:
    import aiter_mx

    M, N, dtype = cell["M"], cell["N"], cell["x_dtype"]
    copies = _copies(M * N * dice.dtypes[dtype].itemsize, cold_bytes)
    x = [dice.normal(M, N, dtype=dtype) for _ in range(copies)]
    results: list[Any] = [None] * copies

    def call(i: int) -> Callable[[], object]:
        def quantise() -> None:
            if cell["to"] == "both":
                results[i] = aiter_mx.quantize_dual(x[i])[0]
            else:
                results[i] = aiter_mx.quantize(x[i], -1 if cell["to"] == "rows" else -2)[0]

        return quantise

    return [call(i) for i in range(copies)], results


def _copies(size_bytes: int, cold_bytes: int) -> int:
    return max(1, -(-cold_bytes // max(size_bytes, 1 << 20)))
