"""What SGLang's layers call in place of their own kernels, by hooks around its functions."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput
from sglang.srt.layers.moe.utils import get_moe_a2a_backend
from sglang.srt.layers.quantization import fp8_utils
from torch import Tensor

import aiter_mx
from aiter_mx.integrations.engine import say_once
from aiter_mx.integrations.layers import Gate, linear, unsupported_device, why_not

_log = logging.getLogger("sglang.aiter_mx")

CONFIG_FIELDS = (
    *("activation", "is_gated", "apply_router_weight_on_input", "no_combine"),
    *("routed_scaling_factor", "gemm1_alpha", "gemm1_clamp_limit", "swiglu_limit"),
    *("gate_up_interleaved", "hidden_size", "intermediate_size_per_partition"),
)
"""What is read of ``MoeRunnerConfig``."""


_UNGATED = ("silu", "gelu", "relu2")


def resolve_backend(original: Callable[[], Any]) -> Any:
    """The backend that leaves scales as they were loaded, where ours computes the layer."""
    return fp8_utils.Mxfp8DenseGemmBackend.UNSUPPORTED if _ours() else original()


def dispatch_linear(original: Callable[[], Callable[..., Tensor]]) -> Callable[..., Tensor]:
    """What computes a linear layer."""
    theirs = original()
    if not _ours():
        return theirs
    say_once(_log, "Using aiter_mx.linear for MXFP8 GEMM")
    return partial(mxfp8_linear, theirs=theirs)


def _ours() -> bool:
    """Whether the user left the choice open and there are kernels for the device."""
    return fp8_utils.get_fp8_gemm_runner_backend().is_auto() and unsupported_device() is None


def mxfp8_linear(
    input: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    input_scale: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    theirs: Callable[..., Tensor] | None = None,
    **others: Any,
) -> Tensor:
    """``aiter_mx.linear`` with the arguments of SGLang's MX-FP8 linear functions; or ``theirs``,
    for weights that it does not cover."""
    reason = why_not("", tuple(weight.shape))
    if theirs is not None and reason:
        shape = str(list(weight.shape))
        say_once(_log, f"aiter_mx declines a linear layer {shape}: {reason}")
        return theirs(input, weight, weight_scale, input_scale, bias=bias, **others)
    if input_scale is None:
        return linear(input, weight, weight_scale, bias)
    return aiter_mx.linear(input, input_scale.view(torch.uint8), weight, weight_scale, bias)


def min_capability(original: Callable[[Any], int], config: Any) -> int:
    """Hopper serves MX-FP8 too."""
    least = original(config)
    return min(least, 90) if config.use_mxfp8 and unsupported_device() is None else least


def process_experts(
    original: Callable[..., None], method: Any, layer: Any, quantize: bool = True
) -> None:
    """Leave experts as the checkpoint has them, or quantise them, where ours computes them."""
    if reason := _why_not_experts(method):
        say_once(_log, f"aiter_mx declines an expert layer: {reason}")
        original(method, layer, quantize=quantize)
        return
    for name in ("w13", "w2") if quantize else ():
        weight = getattr(layer, f"{name}_weight")
        payload, scale = aiter_mx.quantize(weight.data)
        for end, tensor in (("weight", payload), ("weight_scale_inv", scale)):
            parameter = torch.nn.Parameter(tensor, requires_grad=False)
            setattr(layer, f"{name}_{end}", parameter)
    layer.w13_input_scale = None
    layer.w2_input_scale = None
    say_once(_log, "Using aiter_mx.fused_moe for MXFP8 MoE")


def _why_not_experts(method: Any) -> str:
    runner = getattr(method, "runner", None)
    if runner is None or not (runner.runner_backend.is_triton() or _is_deep_gemm(runner)):
        return "another MoE runner is asked for"
    if runner.lora_enabled:
        return "adapters (LoRA) are served"
    dispatch = get_moe_a2a_backend()
    if not dispatch.is_none():
        return f"tokens are dispatched by {dispatch.value}"
    return why_not_config(method.moe_runner_config)


def _is_deep_gemm(runner: Any) -> bool:
    found: bool = runner.runner_backend.is_deep_gemm()
    return found


def why_not_config(config: Any) -> str:
    """Why experts of this ``MoeRunnerConfig`` are not computed here; nothing if they are."""
    if unsupported := unsupported_device():
        return unsupported
    if config.activation not in (("silu", "gelu") if config.is_gated else _UNGATED):
        return f"activation {config.activation}, {'gated' if config.is_gated else 'no gate'}"
    for name in ("hidden_size", "intermediate_size_per_partition"):
        value = getattr(config, name)
        if value is not None and (reason := why_not("", (value,))):
            return f"{name}: {reason}"
    return ""


def run_experts(
    original: Callable[..., Any], runner: Any, dispatch_output: Any, quant_info: Any, *more: Any,
    **others: Any,
) -> Any:  # fmt: skip
    """The experts of a layer, if they are MX-FP8 ones that ours computes."""
    scale: Any = getattr(quant_info, "w13_scale", None)
    weight: Any = getattr(quant_info, "w13_weight", None)
    is_mx = (
        isinstance(scale, Tensor)
        and isinstance(weight, Tensor)
        and scale.dtype == torch.uint8
        and weight.dtype == torch.float8_e4m3fn
        and scale.shape == (*weight.shape[:-1], weight.shape[-1] // 32)
    )
    config = runner.config
    if (
        not is_mx
        or runner.lora_enabled
        or not dispatch_output.format.is_standard()
        or why_not_config(config)
    ):
        return original(runner, dispatch_output, quant_info, *more, **others)
    x, topk = dispatch_output.hidden_states, dispatch_output.topk_output
    weights = topk.topk_weights.float()
    if config.apply_router_weight_on_input:
        x = (x * weights).to(x.dtype)
        weights = torch.ones_like(weights)
    if config.routed_scaling_factor is not None:
        weights = weights * config.routed_scaling_factor
    second = (quant_info.w2_weight, quant_info.w2_scale)
    options: dict[str, Any] = {
        "reduce": not config.no_combine,
        "bias1": getattr(quant_info, "b13", None),
        "bias2": getattr(quant_info, "b2", None),
    }

    def call(layer: Callable[..., Tensor], of_gate: dict[str, Any]) -> Tensor:
        return layer(x, weight, scale, *second, topk.topk_ids, weights, **options, **of_gate)

    if config.is_gated:
        out = call(aiter_mx.fused_moe, gate_of(config).options())
    else:
        out = call(aiter_mx.fused_moe_ungated, {"activation": config.activation})
    if config.no_combine and getattr(config, "no_combine_keep_router_weight", False):
        out = (out * weights.unsqueeze(-1)).to(out.dtype)
    return StandardCombineInput(hidden_states=out)


def gate_of(config: Any) -> Gate:
    """SGLang's gate as ``aiter_mx.fused_moe`` has it."""
    if config.activation == "gelu":
        return Gate("gelu")
    limit = config.gemm1_clamp_limit
    if config.gemm1_alpha is not None:
        layout = "interleaved" if config.gate_up_interleaved else "halves"
        bound = float("inf") if limit is None else limit
        return Gate("swiglu_oai", layout, config.gemm1_alpha, 1.0, bound)
    limit = config.swiglu_limit if limit is None else limit
    if limit is None:
        return Gate("silu")
    return Gate("swiglu_oai", "halves", alpha=1.0, beta=0.0, limit=limit)
