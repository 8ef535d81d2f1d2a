"""Layers over MX-FP8 weights as checkpoints have them, and which layers of a model they cover."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

import aiter_mx
from aiter_mx.checks import ALIGNMENT_BYTES
from aiter_mx.numerics import BLOCK

SCALE = "_scale_inv"
"""What the name of a weight's scales ends in, as SGLang and transformers have it."""


class _OfPayloads(nn.Module):
    """A module whose payloads stay e4m3 where its other tensors are given another dtype."""

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        def applied(tensor: Tensor) -> Tensor:
            if tensor.dtype != torch.float8_e4m3fn:
                made: Tensor = fn(tensor)
                return made
            payload: Tensor = fn(tensor.view(torch.uint8)).view(tensor.dtype)
            return payload

        return super()._apply(applied, recurse)  # type: ignore[no-untyped-call]


class MxLinear(_OfPayloads):
    """A linear layer: ``weight`` float8_e4m3fn ``[N, K]``, ``weight_scale_inv`` uint8
    ``[N, K // 32]`` and perhaps ``bias``. Activations are quantised on the way.

    Args:
        in_features: K, a multiple of 32.
        out_features: N.
        bias: dtype of the bias, or None for none.
        device: of all of them.

    Attributes:
        together: the ``Siblings`` that it is one of, and its place among them.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight, self.weight_scale_inv = _weights((out_features, in_features), device)
        self.bias = (
            None if bias is None else frozen(torch.empty(out_features, dtype=bias, device=device))
        )
        self.together: tuple[Any, int] | None = None

    @classmethod
    def of(cls, linear: nn.Linear) -> MxLinear:
        """The quantisation of a layer."""
        weight, scale = aiter_mx.quantize(linear.weight.detach())
        made = cls(linear.in_features, linear.out_features, device="meta")
        made.weight, made.weight_scale_inv = frozen(weight), frozen(scale)
        made.bias = None if linear.bias is None else frozen(linear.bias.detach())
        return made

    def forward(self, x: Tensor) -> Tensor:
        if self.together is None:
            return self.alone(x)
        siblings, place = self.together
        out: Tensor = siblings.compute(place, x)
        return out

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        if self.together is not None:
            self.together[0].put_together()
        return self

    def alone(self, x: Tensor) -> Tensor:
        """The layer's own product, whichever others have the same x."""
        return linear(x, self.weight, self.weight_scale_inv, self.bias)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"


def linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """``aiter_mx.linear`` of x as an engine has it: any rank and strides, bf16, fp16 or fp32, which
    the result has too."""
    x = x.contiguous()
    if x.dtype in (torch.bfloat16, torch.float16):
        return aiter_mx.linear(x, None, weight, scale, bias, x.dtype)
    return aiter_mx.linear(*aiter_mx.quantize(x), weight, scale, bias, x.dtype)


@dataclass(frozen=True)
class Gate:
    """What stands between an expert's two products, as ``aiter_mx.fused_moe`` takes it.

    Attributes:
        activation, layout, alpha, beta, limit: as ``aiter_mx.fused_moe`` has them.
    """

    activation: str = "silu"
    layout: str = "halves"
    alpha: float = 1.702
    beta: float = 1.0
    limit: float = 7.0

    def options(self) -> dict[str, Any]:
        """Keywords of ``aiter_mx.fused_moe``."""
        return {  # one by one, as torch.compile does not follow dict(vars(self))
            "activation": self.activation,
            "layout": self.layout,
            "alpha": self.alpha,
            "beta": self.beta,
            "limit": self.limit,
        }


class MxExperts(_OfPayloads):
    """The experts of a layer: ``gate_up_proj`` float8_e4m3fn ``[E, 2 * I, H]``, ``down_proj``
    ``[E, H, I]``, their scales and perhaps biases.

    Args:
        experts: E.
        hidden: H, a multiple of 32.
        intermediate: I, likewise.
        gate: what stands between the two products.
        bias: dtype of both biases, or None for none.
        device: of all of them.
    """

    def __init__(
        self,
        experts: int,
        hidden: int,
        intermediate: int,
        gate: Gate,
        bias: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.num_experts, self.gate = experts, gate
        self.gate_up_proj_bias: nn.Parameter | None
        self.down_proj_bias: nn.Parameter | None
        first, second = (experts, 2 * intermediate, hidden), (experts, hidden, intermediate)
        self.gate_up_proj, self.gate_up_proj_scale_inv = _weights(first, device)
        self.down_proj, self.down_proj_scale_inv = _weights(second, device)
        for name, shape in (("gate_up_proj_bias", first), ("down_proj_bias", second)):
            empty = None if bias is None else torch.empty(shape[:2], dtype=bias, device=device)
            setattr(self, name, None if empty is None else frozen(empty))

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        return experts_forward(self, x, topk_ids, topk_weights)

    def extra_repr(self) -> str:
        E, N, H = self.gate_up_proj.shape
        return f"{E}, {H}, {N // 2}, {self.gate}"


def experts_forward(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The forward function of a module with ``MxExperts``' tensors.

    Raises:
        TypeError: it has others.
    """
    if not isinstance(self, MxExperts):
        raise TypeError(
            f"aiter_mx computes experts whose weights are MX-FP8, got {type(self).__name__}; load "
            "the model with quantization_config=AiterMxConfig()"
        )
    out = aiter_mx.fused_moe(
        hidden_states.reshape(-1, hidden_states.shape[-1]).contiguous(),
        self.gate_up_proj,
        self.gate_up_proj_scale_inv,
        self.down_proj,
        self.down_proj_scale_inv,
        top_k_index.reshape(-1, top_k_index.shape[-1]).contiguous(),
        top_k_weights.reshape(-1, top_k_weights.shape[-1]).float().contiguous(),
        bias1=self.gate_up_proj_bias,
        bias2=self.down_proj_bias,
        **self.gate.options(),
    )
    return out.view(hidden_states.shape)


def settle(name: str, module: nn.Module) -> None:
    """Bring what a loader left in a layer into the form that kernels take.

    Tensors that begin where kernels cannot load, as in a mapped file, get memory of their own;
    scales that lost a last dimension of 1 get it back.

    Args:
        name: of the layer, for messages.
        module: the layer.

    Raises:
        ValueError: scales that do not belong to their weight.
    """
    tensors: dict[str, Tensor] = dict(module.named_parameters(recurse=False))
    for of, tensor in tensors.items():
        if tensor.device.type == "meta":
            continue
        weight = tensors[of.removesuffix(SCALE)] if of.endswith(SCALE) else None
        if weight is not None:
            expected = (*weight.shape[:-1], weight.shape[-1] // BLOCK)
            if tensor.numel() != prod(expected):
                raise ValueError(
                    f"{name}.{of} must be {list(expected)}, as its weight is "
                    f"{list(weight.shape)}, got {list(tensor.shape)}"
                )
            tensor = tensor.detach().view(torch.uint8).view(expected)
        if tensor.data_ptr() % ALIGNMENT_BYTES:
            tensor = tensor.detach().clone()
        if tensor is not tensors[of]:
            setattr(module, of, frozen(tensor))


def why_not(name: str, shape: tuple[int, ...]) -> str:
    """Why a weight ``[..., N, K]`` stays as it is; nothing if it can be quantised."""
    if is_router(name):
        return "a router"
    if shape[-1] == 0 or shape[-1] % BLOCK:
        return f"K={shape[-1]} is no multiple of {BLOCK}"
    return ""


def is_router(name: str) -> bool:
    """Whether a module of this name chooses or weighs experts."""
    last = name.rpartition(".")[2]
    return last in ("gate", "router", "shared_expert_gate") or ".router." in f".{name}."


def _weights(
    shape: tuple[int, ...], device: torch.device | str | None
) -> tuple[nn.Parameter, nn.Parameter]:
    payload = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
    scale = torch.empty(*shape[:-1], shape[-1] // BLOCK, dtype=torch.uint8, device=device)
    return frozen(payload), frozen(scale)


def frozen(tensor: Tensor) -> nn.Parameter:
    """A parameter without a gradient."""
    return nn.Parameter(tensor, requires_grad=False)


def unsupported_device() -> str | None:
    """Why there is no kernel for torch's GPU; None if there is, or if there is no GPU at all."""
    if not torch.cuda.is_available():
        return None
    if torch.version.hip is not None:
        arch = torch.cuda.get_device_properties().gcnArchName.partition(":")[0]
        return None if arch == "gfx950" else f"{arch}, not gfx950"
    major, minor = torch.cuda.get_device_capability()
    return None if (major, minor) == (9, 0) else f"compute capability {major}.{minor}, not 9.0"
