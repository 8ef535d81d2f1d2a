"""How DTensor may divide the ops among ranks: ``aiter_mx.sharding.register()``.

Tensors of one mesh dimension are divided alike: payloads with their scales. Where a call's tensors
are divided in another way, DTensor brings them into one of these first, as for any op.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

import aiter_mx.ops.grouped_gemm
import aiter_mx.ops.linear
import aiter_mx.ops.moe_gemm
import aiter_mx.ops.quantize  # noqa: F401
from aiter_mx.numerics import BLOCK

_Rule = tuple[list[Any], list[Any]]
"""Placements of results, and of arguments; None for those that are no tensors."""


@cache
def register() -> None:
    """Teach DTensor the ops of ``linear``, ``quantize``, ``grouped_gemm`` and ``moe_gemm``.

    ============== ============================================= =======================
    op             what may be divided                           its result
    ============== ============================================= =======================
    linear         rows of x                                     divided along rows
    linear         rows of w, and the bias                       divided along columns
    linear         K, in whole blocks, without a bias            partial sums
    quantize       any dimension before the last, for axis -1    payload and scales alike
    quantize       K, in whole blocks                            payload and scales alike
    grouped_gemm   rows of each group's b, and the bias          divided along columns
    moe_gemm       rows of each expert's w, and the bias         divided along columns
    ============== ============================================= =======================

    Scales must be row-major. Call it once before DTensors reach an op; more calls do nothing.

    Example:
        >>> import aiter_mx.sharding
        >>> aiter_mx.sharding.register()
    """
    from torch.distributed.tensor.experimental import register_sharding

    ops = torch.ops.aiter_mx
    for op, rules in (
        (ops.linear.default, _linear),
        (ops.quantize.default, _quantize),
        (ops.grouped_gemm.default, _grouped_gemm),
        (ops.moe_gemm.default, _moe_gemm),
    ):
        register_sharding(op)(rules)


def _linear(xq: Any, xs: Any, wq: Any, ws: Any, bias: Any = None, *options: Any) -> list[_Rule]:
    from torch.distributed.tensor import Partial, Replicate, Shard

    def rule(result: Any, x: Any, w: Any, of_bias: Any) -> _Rule:
        placed = [x, xs and x, w, w, bias and of_bias]
        return [result], [*placed, *[None] * len(options)]

    R, rows, columns = Replicate(), Shard(0), Shard(1)
    rules = [rule(R, R, R, R), rule(rows, rows, R, R), rule(columns, R, rows, rows)]
    if bias is None and _splits(xq, 1):
        rules.append(rule(Partial(), columns, columns, R))
    return rules


def _quantize(x: Any, *options: Any) -> list[_Rule]:
    from torch.distributed.tensor import Replicate, Shard

    rest = [None] * len(options)
    rules: list[_Rule] = [([Replicate()] * 2, [Replicate(), *rest])]
    defaults = ("rceil", -1, False, "e4m3", "row_major")
    given: tuple[Any, ...] = (*options, *defaults[len(options) :])
    _, axis, square, _, layout = given
    if axis == -1 and not square and layout == "row_major":
        last = len(x.shape) - 1
        dimensions = [*range(last), *([last] if _splits(x, last) else [])]
        rules += [([Shard(d)] * 2, [Shard(d), *rest]) for d in dimensions]
    return rules


def _by_columns(
    arguments: tuple[Any, ...], divided: tuple[int, ...], others: int = 0
) -> list[_Rule]:
    """All replicated; and the tensors in these places, and the first of the results, divided along
    their second dimension. ``others`` are further results."""
    from torch.distributed.tensor import Replicate, Shard

    tensors = [hasattr(argument, "tensor_meta") for argument in arguments]
    alone = [Replicate() if is_tensor else None for is_tensor in tensors]
    split = [
        Shard(1) if is_tensor and at in divided else placement
        for at, (is_tensor, placement) in enumerate(zip(tensors, alone, strict=True))
    ]
    rest = [Replicate()] * others
    return [([Replicate(), *rest], alone), ([Shard(1), *rest], split)]


def _grouped_gemm(*arguments: Any) -> list[_Rule]:
    rules = _by_columns(arguments, (2, 3, 7))
    return rules if arguments[10] == "row_major" else rules[:1]


def _moe_gemm(*arguments: Any) -> list[_Rule]:
    rules = _by_columns(arguments, (2, 3, 8), others=1)
    return rules if arguments[15] == "none" else rules[:1]


def _splits(x: Any, dimension: int) -> bool:
    """Whether blocks along a dimension can be divided evenly, so that payloads go with scales."""
    return bool((x.shape[dimension] // BLOCK) % x.mesh.size() == 0)
