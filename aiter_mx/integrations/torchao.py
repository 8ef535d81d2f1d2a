"""MX-FP8 for torchao: ``torchao.quantize_(model, AiterMxConfig())``."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchao.core.config import AOBaseConfig
from torchao.quantization.transform_module import register_quantize_module_handler
from torchao.utils import TorchAOBaseTensor

import aiter_mx
from aiter_mx.integrations.engine import say_once
from aiter_mx.integrations.layers import linear, why_not

_log = logging.getLogger(__name__)


@dataclass
class AiterMxConfig(AOBaseConfig):
    """Weights of linear layers in MX-FP8; activations are quantised on the way."""


class AiterMxTensor(TorchAOBaseTensor):
    """A weight ``[N, K]``: payload ``qdata`` float8_e4m3fn and ``scale`` uint8 ``[N, K // 32]``."""

    tensor_data_names = ["qdata", "scale"]  # noqa: RUF012 - torchao copies and concatenates lists
    tensor_attribute_names = ["orig_dtype"]  # noqa: RUF012

    qdata: Tensor
    scale: Tensor
    orig_dtype: torch.dtype

    def __new__(cls, qdata: Tensor, scale: Tensor, orig_dtype: torch.dtype) -> AiterMxTensor:
        self: AiterMxTensor = torch.Tensor._make_wrapper_subclass(
            cls, qdata.shape, strides=qdata.stride(), dtype=orig_dtype, device=qdata.device
        )
        self.qdata, self.scale, self.orig_dtype = qdata, scale, orig_dtype
        return self

    def __init__(self, qdata: Tensor, scale: Tensor, orig_dtype: torch.dtype) -> None:
        super().__init__()

    @classmethod
    def of(cls, weight: Tensor) -> AiterMxTensor:
        """The quantisation of a weight."""
        return cls(*aiter_mx.quantize(weight), weight.dtype)

    def _quantization_type(self) -> str:
        return "e4m3, a scale for 32 elements, by aiter_mx"

    def dequantize(self) -> Tensor:
        """The weight, in its dtype."""
        return aiter_mx.dequantize(self.qdata, self.scale, dtype=self.orig_dtype)


@AiterMxTensor.implements([torch.ops.aten.linear.default])
@AiterMxTensor.implements_torch_function([nn.functional.linear])
def _linear(func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
    return _computed(*args, **(kwargs or {}))


def _computed(input: Tensor, weight: AiterMxTensor, bias: Tensor | None = None) -> Tensor:
    return linear(input, weight.qdata, weight.scale, bias)


@register_quantize_module_handler(AiterMxConfig)
def _quantise_module(module: nn.Module, config: AiterMxConfig) -> nn.Module:
    weight = getattr(module, "weight", None)
    if not isinstance(module, nn.Linear) or weight is None:
        _log.info("aiter_mx leaves a %s as it is", type(module).__name__)
    elif type(weight.detach()) is not Tensor:
        kind = type(weight).__name__
        _log.info("aiter_mx leaves a linear layer as it is whose weight is a %s", kind)
    elif reason := why_not("", tuple(weight.shape)):
        _log.info("aiter_mx leaves a linear layer %s as it is: %s", list(weight.shape), reason)
    else:
        say_once(_log, "Using aiter_mx.linear for linear layers in MX-FP8")
        quantised = AiterMxTensor.of(weight.detach())
        module.weight = nn.Parameter(quantised, requires_grad=False)
        if module.bias is not None:
            module.bias.requires_grad_(False)  # nor has the product a gradient for it
    return module


torch.serialization.add_safe_globals([AiterMxTensor])
