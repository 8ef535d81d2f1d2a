"""What vLLM's choosers return and its layers call: a linear kernel and an experts class."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import Tensor
from vllm.logger import init_logger
from vllm.model_executor.kernels.linear.mxfp8.Mxfp8LinearKernel import (
    Mxfp8LinearKernel,
    Mxfp8LinearLayerConfig,
)
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.quantization.utils.quant_utils import kMxfp8Dynamic, kMxfp8Static
from vllm.platforms import current_platform

import aiter_mx
from aiter_mx import distributed
from aiter_mx.integrations.engine import expect, expect_names
from aiter_mx.integrations.layers import Gate, linear, why_not

log = init_logger("vllm.plugins.aiter_mx")


def unsupported_device(compute_capability: int | None = None) -> str | None:
    """Why there is no kernel for vLLM's platform; None if there is. CPUs have the reference."""
    if current_platform.is_cuda():
        found = compute_capability
        if found is None:
            capability = current_platform.get_device_capability()
            found = None if capability is None else capability.to_int()
        return None if found == 90 else f"compute capability {found}, not 90"
    if current_platform.is_rocm():
        return None if current_platform.supports_mx() else "no MX matrix instructions"
    return None if current_platform.is_cpu() else f"platform {current_platform.device_name}"


class AiterMxLinearKernel(Mxfp8LinearKernel):
    """Linear layers by ``aiter_mx.linear``. Weights stay as the checkpoint has them."""

    supports_pre_processed_weights = True

    @classmethod
    def check(cls) -> None:
        """Raise Incompatible unless the base class is as expected."""
        expect(Mxfp8LinearKernel.is_supported, "compute_capability")
        expect(Mxfp8LinearKernel.can_implement, "c")
        expect(Mxfp8LinearKernel.process_weights_after_loading, "layer")
        expect(Mxfp8LinearKernel.apply_weights, "layer", "x", "bias")
        expect(Mxfp8LinearLayerConfig, "weight_shape")

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        reason = unsupported_device(compute_capability)
        return reason is None, reason

    @classmethod
    def can_implement(cls, c: Mxfp8LinearLayerConfig) -> tuple[bool, str | None]:
        if reason := why_not("", tuple(c.weight_shape)):
            shape = str(list(c.weight_shape))
            log.info_once("aiter_mx declines a linear layer %s: %s", shape, reason)
        return not reason, reason or None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Nothing: weights that are loaded again in place are used as they are."""

    def apply_weights(
        self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        weight: Any = layer.weight
        scale: Any = layer.weight_scale
        return linear(x, weight, scale, bias)


class AiterMxExperts(mk.FusedMoEExpertsModular):
    """Expert layers by ``aiter_mx.fused_moe``, which weighs and reduces too."""

    @classmethod
    def check(cls) -> None:
        """Raise Incompatible unless the base class is as expected."""
        base = mk.FusedMoEExpertsModular
        expect(
            base.apply,
            *("output", "hidden_states", "w1", "w2", "topk_weights", "topk_ids", "activation"),
            *("global_num_experts", "expert_map", "a1q_scale", "apply_router_weight_on_input"),
        )
        expect(base.workspace_shapes, "M", "K")
        expect(base.is_supported_config, "cls", "moe_config")
        expect_names(base, "expects_unquantized_inputs", "finalize_weight_and_reduce_impl")

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def is_supported_config(
        cls: Any,
        moe_config: FusedMoEConfig,
        *others: Any,
        **more: Any,
    ) -> tuple[bool, str | None]:
        for name in ("hidden_dim", "intermediate_size_per_partition"):
            if reason := why_not("", (getattr(moe_config, name),)):
                return False, f"{name}: {reason}"
        supported: tuple[bool, str | None] = mk.FusedMoEExpertsModular.is_supported_config(
            cls, moe_config, *others, **more
        )
        return supported

    @staticmethod
    def _supports_current_device() -> bool:
        return unsupported_device() is None

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return (weight_key, activation_key) == (kMxfp8Static, kMxfp8Dynamic)

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return activation in _GATES or activation in _UNGATED

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return True

    @staticmethod
    def _supports_batch_invariance() -> bool:
        return True  # register() asks for it where vLLM does

    @property
    def expects_unquantized_inputs(self) -> bool:
        """A dispatch to other ranks carries quantised tokens; else they are quantised here."""
        return not self.moe_config.moe_parallel_config.use_all2all_kernels

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        return TopKWeightAndReduceNoOP()

    def workspace_shapes(
        self, M: int, N: int, K: int, *others: Any, **more: Any
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        return (0,), (0,), (M, K)

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: Tensor | None,
        a1q_scale: Tensor | None,
        a2_scale: Tensor | None,
        workspace13: Tensor,
        workspace2: Tensor,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        weights = topk_weights.float()
        if apply_router_weight_on_input:  # as the step that prepared the tokens has done
            weights = torch.ones_like(weights)
        operands = (hidden_states, w1, self.w1_scale, w2, self.w2_scale, topk_ids, weights)
        options: dict[str, Any] = {
            "num_experts": None if expert_map is None else global_num_experts,
            "expert_map": expert_map,
            "x_scale": None if a1q_scale is None else a1q_scale.view(torch.uint8),
            "out_dtype": output.dtype,
            "bias1": self.w1_bias,
            "bias2": self.w2_bias,
        }
        if activation in _UNGATED:
            options["activation"] = _UNGATED[activation]
            output.copy_(aiter_mx.fused_moe_ungated(*operands, **options))
            return
        options |= gate_of(activation, self.activation_config).options()
        # The engine may want the result where the tokens are; a tracer cannot tell.
        apart = not torch.compiler.is_compiling() and not _share_memory(output, hidden_states)
        if apart and output.is_contiguous():
            aiter_mx.fused_moe(*operands, **options, out=output)
        else:
            output.copy_(aiter_mx.fused_moe(*operands, **options))


class AiterMxPrepareAndFinalize(mk.FusedMoEPrepareAndFinalizeModular):
    """``aiter_mx.distributed`` as the dispatch and combine of vLLM's modular kernel: quantised
    tokens go to the ranks of their experts, weighted sums come back."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self.group = group
        self.dispatched: distributed.Dispatched | None = None

    @property
    def activation_format(self) -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard

    def topk_indices_dtype(self) -> torch.dtype | None:
        return None

    def max_num_tokens_per_rank(self) -> int | None:
        return None

    def num_dispatchers(self) -> int:
        return dist.get_world_size(self.group)

    def output_is_reduced(self) -> bool:
        return True

    def prepare(
        self,
        a1: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        num_experts: int,
        expert_map: Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool = False,
    ) -> tuple[Tensor, Tensor | None, None, Tensor, Tensor]:
        if apply_router_weight_on_input:
            if topk_ids.shape[1] != 1:
                raise ValueError(
                    f"weights on the input need one expert a token, got {topk_ids.shape[1]}"
                )
            a1 = a1 * topk_weights.to(a1.dtype)
        options = {"quantise": not defer_input_quant, "group": self.group}
        at = distributed.prepare(a1, topk_ids, topk_weights, num_experts, **options)
        self.dispatched = at
        first = dist.get_rank(self.group) * num_experts // dist.get_world_size(self.group)
        if expert_map is None:
            return at.x, at.x_scale, None, at.topk_ids, at.topk_weights
        of_all = torch.where(at.topk_ids < 0, -1, at.topk_ids + first)
        return at.x, at.x_scale, None, of_all, at.topk_weights

    def finalize(
        self,
        output: Tensor,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> None:
        assert self.dispatched is not None, "finalize comes after prepare"
        output.copy_(distributed.finalize(self.dispatched, fused_expert_output))
        self.dispatched = None


def _share_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


_GATES = {
    MoEActivation.SILU: "halves",
    MoEActivation.GELU: "halves",
    MoEActivation.GELU_TANH: "halves",
    MoEActivation.SWIGLUOAI: "interleaved",
    MoEActivation.SWIGLUOAI_UNINTERLEAVE: "halves",
}


_UNGATED = {
    MoEActivation.SILU_NO_MUL: "silu",
    MoEActivation.GELU_NO_MUL: "gelu",
    MoEActivation.GELU_TANH_NO_MUL: "gelu_tanh",
    MoEActivation.RELU2_NO_MUL: "relu2",
}


def gate_of(activation: MoEActivation, config: Any) -> Gate:
    """vLLM's activation as ``aiter_mx.fused_moe`` has it.

    Args:
        activation: one of those that are supported.
        config: its ``clamp_limit``, ``alpha`` and ``beta``.
    """
    layout = _GATES[activation]
    if activation == MoEActivation.SWIGLUOAI:
        return Gate("swiglu_oai", layout)
    if activation in (MoEActivation.GELU, MoEActivation.GELU_TANH):
        return Gate(activation.value, layout)
    limit = float("inf") if config.clamp_limit is None else config.clamp_limit
    if activation == MoEActivation.SWIGLUOAI_UNINTERLEAVE:
        return Gate("swiglu_oai", layout, config.alpha, config.beta, limit)
    if config.clamp_limit is None:
        return Gate("silu", layout)
    return Gate("swiglu_oai", layout, alpha=1.0, beta=0.0, limit=limit)


def choice(config: FusedMoEConfig) -> bool:
    """Whether a layer's experts are computed here; says in the log why not."""
    batched = config.moe_parallel_config.use_batched_activation_format
    form = mk.FusedMoEActivationFormat
    wanted = form.BatchedExperts if batched else form.Standard
    supported, reason = AiterMxExperts.is_supported_config(
        AiterMxExperts, config, kMxfp8Static, kMxfp8Dynamic, wanted
    )
    if supported:
        log.info_once("Using AiterMxExperts for MXFP8 MoE")
    else:
        log.info_once("aiter_mx declines an expert layer: %s", reason)
    return supported
