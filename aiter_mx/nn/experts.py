"""A layer of experts that trains: routing, two grouped linears, and the weighted sum."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from aiter_mx.checks import INDEX_NAMES, checking, either, refuse_expert_ids, shape_text
from aiter_mx.nn.linear import MxGroupedLinear

ACTIVATIONS = ("silu", "swiglu_oai")
ALPHA, LIMIT = 1.702, 7.0  # of gpt-oss


class MxExperts(nn.Module):
    """Experts over routed tokens, with gradients of tokens, weights and routing weights.

    Each token goes to ``top_k`` experts; an expert is a gated linear to ``intermediate`` features
    and a linear back. All products, forward and backward, run over MX-FP8 operands. Results are
    bitwise the same on every run, and nothing is read on the host.

    Args:
        num_experts: experts.
        hidden: features of a token, a multiple of 32.
        intermediate: activated features of an expert, likewise.
        activation: ``"silu"``, ``silu(gate) * up``, or ``"swiglu_oai"``, as gpt-oss has it.
        bias: whether both linears have one.
        device, dtype: of the parameters, as torch has them.
        reuse_quantized, grad_format: as in ``MxLinear``.

    Example:
        >>> layer = aiter_mx.nn.MxExperts(4, 64, 32)
        >>> ids, weights = torch.tensor([[0, 3], [1, 3]]), torch.rand(2, 2)
        >>> layer(torch.randn(2, 64), ids, weights).shape
        torch.Size([2, 64])
    """

    def __init__(
        self,
        num_experts: int,
        hidden: int,
        intermediate: int,
        activation: str = "silu",
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        reuse_quantized: bool = False,
        grad_format: str = "e4m3",
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise ValueError(f"activation must be one of {known}, got {activation!r}")
        self.num_experts, self.activation = num_experts, activation
        self.gate_up = MxGroupedLinear(
            num_experts, hidden, 2 * intermediate, bias, device, dtype,
            reuse_quantized=reuse_quantized, grad_format=grad_format,
        )  # fmt: skip
        self.down = MxGroupedLinear(
            num_experts, intermediate, hidden, bias, device, dtype,
            reuse_quantized=reuse_quantized, grad_format=grad_format,
        )  # fmt: skip

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """The weighted sum of each token's experts.

        Args:
            x: ``[T, hidden]``.
            topk_ids: the experts of each token, int32 or int64 ``[T, top_k]``, within 0 to
                ``num_experts - 1``.
            topk_weights: their weights, of a floating-point dtype, ``[T, top_k]``.

        Returns:
            ``[T, hidden]`` of x's dtype.

        Raises:
            TypeError: ids that are no whole numbers, or weights that are.
            ValueError: shapes that do not fit each other; on the CPU, or with ``AITER_MX_CHECK=1``,
                also an id that is out of range.
        """
        indices = tuple(INDEX_NAMES)
        if topk_ids.dtype not in indices:
            raise TypeError(f"topk_ids must be {either(indices)}, got {topk_ids.dtype}")
        if not topk_weights.is_floating_point():
            raise TypeError(
                f"topk_weights must be of a floating-point dtype, got {topk_weights.dtype}"
            )
        if x.ndim != 2 or topk_ids.ndim != 2 or topk_ids.shape[0] != x.shape[0]:
            raise ValueError(
                f"x must be [T, hidden] and topk_ids [T, top_k], got {shape_text(x)} and "
                f"{shape_text(topk_ids)}"
            )
        if topk_weights.shape != topk_ids.shape:
            raise ValueError(
                f"topk_weights must be {list(topk_ids.shape)}, as topk_ids, got "
                f"{shape_text(topk_weights)}"
            )
        if not torch.compiler.is_compiling() and (topk_ids.device.type == "cpu" or checking()):
            refuse_expert_ids(topk_ids, self.num_experts)
        (T, top_k), H = topk_ids.shape, x.shape[1]
        ids, order = topk_ids.flatten().sort(stable=True)
        experts = torch.arange(self.num_experts + 1, device=x.device, dtype=ids.dtype)
        offs = torch.searchsorted(ids, experts)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(T * top_k, device=x.device))

        rows = _rows(x, order // top_k, place)
        routed = self.down(self._activated(self.gate_up(rows, offs)), offs)
        slots = _rows(routed, place, order)
        weighted = slots.view(T, top_k, H).float() * topk_weights[..., None].float()
        return weighted.sum(1).to(x.dtype)

    def _activated(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        if self.activation == "silu":
            return (nn.functional.silu(gate) * up).to(gate_up.dtype)
        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        return ((up + 1) * gate * torch.sigmoid(ALPHA * gate)).to(gate_up.dtype)


def _rows(x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
    rows: Tensor = _Rows.apply(x, index, inverse)  # type: ignore[no-untyped-call]
    return rows


class _Rows(torch.autograd.Function):
    """``x[index]``, where ``inverse`` says which rows of the result are of each row of x.

    torch's own gradient of it adds by atomics, in any order.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.rows = x.shape[0]
        return x[index]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        each = grad.shape[0] // max(ctx.rows, 1)
        of_rows = grad[inverse].view(ctx.rows, each, grad.shape[1])
        summed = of_rows[:, 0] if of_rows.shape[1] == 1 else of_rows.float().sum(1).to(grad.dtype)
        return summed, None, None
