"""MX-FP8 for transformers: ``from_pretrained(..., quantization_config=AiterMxConfig())``.

Importing this module registers the configuration, its quantiser and the experts function under the
name ``aiter_mx``; it has to be imported before a checkpoint that was saved so is loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import ConversionOps
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import get_module_from_name, should_convert_module
from transformers.utils.quantization_config import QuantizationConfigMixin

import aiter_mx
from aiter_mx.integrations.checkpoint import CheckpointError, read_header, refuse_misfits
from aiter_mx.integrations.layers import (
    SCALE,
    Gate,
    MxExperts,
    MxLinear,
    experts_forward,
    frozen,
    is_router,
    settle,
    why_not,
)
from aiter_mx.integrations.siblings import join
from aiter_mx.numerics import BLOCK

NAME = "aiter_mx"
_log = logging.getLogger(__name__)


@register_quantization_config(NAME)
class AiterMxConfig(QuantizationConfigMixin):
    """Linear layers and experts in MX-FP8.

    Args:
        modules_to_not_convert: names, ends of names or patterns of modules that stay as they are;
            by default the output head. Routers, modules that share their weights with others, and
            layers whose K is no multiple of 32 stay in any case.
        others: what a saved configuration has besides, which is passed over.
    """

    def __init__(self, modules_to_not_convert: list[str] | None = None, **others: Any) -> None:
        self.quant_method = NAME
        self.modules_to_not_convert = modules_to_not_convert


@register_quantizer(NAME)
class AiterMxQuantizer(HfQuantizer):
    """Puts ``MxLinear`` and ``MxExperts`` into a model before its weights are loaded."""

    requires_calibration = False
    serialized_names: ClassVar = {
        "weight": ["weight", "weight_scale_inv"]
    }  # read by 5.23 and newer
    quantization_config: AiterMxConfig

    @property
    def quantized_element_size(self) -> float:
        return 1

    def param_needs_quantization(self, model: nn.Module, param_name: str, **others: Any) -> bool:
        module, name = get_module_from_name(model, param_name)
        of = {MxLinear: ("weight",), MxExperts: ("gate_up_proj", "down_proj")}
        return not self.pre_quantized and name in of.get(type(module), ())

    def _process_model_before_weight_loading(
        self, model: nn.Module, checkpoint_files: Sequence[str] | None = None, **others: Any
    ) -> None:
        files = [Path(f) for f in checkpoint_files or () if Path(f).suffix == ".safetensors"]
        if self.pre_quantized:
            refuse_misfits(files)
        skip = self.get_modules_to_not_convert(
            model,
            self.quantization_config.modules_to_not_convert,
            getattr(model, "_keep_in_fp32_modules", None),
        )
        tied = {
            key.removesuffix(".weight")
            for pair in getattr(model, "all_tied_weights_keys", {}).items()
            for key in pair
        }
        self.transposed: set[str] = set()
        kept = {}
        for name, module in list(model.named_modules()):
            if isinstance(module, MxExperts):
                continue
            if isinstance(module, nn.Linear) and name in tied:
                reason = "shares its weight with another module"
            elif isinstance(module, nn.Linear):
                reason = _convert_linear(model, name, module, skip)
            elif name.endswith("experts") and hasattr(module, "down_proj"):
                reason = self._convert_experts(model, name, module, skip)
            else:
                continue
            if reason:
                kept[name] = reason
            elif not self.pre_quantized:
                _expect_unquantised(model.get_submodule(name))
        if self.pre_quantized:
            _refuse_unexpected(model, files, kept)
        for kind, op in ((MxLinear, "linear"), (MxExperts, "fused_moe")):
            if count := sum(isinstance(module, kind) for module in model.modules()):
                _log.info("Using aiter_mx.%s for %d %s", op, count, kind.__name__)
        for name, reason in kept.items():
            _log.info("aiter_mx leaves %s as it is: %s", name, reason)
        self.kept: dict[str, str] = kept

    def _convert_experts(
        self, model: nn.Module, name: str, module: nn.Module, skip: list[str]
    ) -> str:
        if not should_convert_module(name, skip):
            return "named in modules_to_not_convert"
        gate = gate_of(module)
        if isinstance(gate, str):
            return gate
        down: Any = module.down_proj
        E, H, I = down.shape
        is_transposed = getattr(module, "is_transposed", False)
        if is_transposed:
            H, I = I, H
        if H % BLOCK or I % BLOCK:
            return f"H={H} or I={I} is no multiple of {BLOCK}"
        bias = getattr(module, "down_proj_bias", None)
        made = MxExperts(E, H, I, gate, None if bias is None else bias.dtype, "meta")
        if is_transposed:
            self.transposed |= {f"{name}.gate_up_proj", f"{name}.down_proj"}
        model.set_submodule(name, made)
        return ""

    def _process_model_after_weight_loading(self, model: nn.Module, **others: Any) -> None:
        for name, module in model.named_modules():
            if isinstance(module, (MxLinear, MxExperts)):
                module.requires_grad_(False)
                settle(name, module)
        join(model)
        conversions = getattr(model, "_weight_conversions", None)
        if conversions and not self.pre_quantized and hasattr(HfQuantizer, "serialized_names"):
            # Saving reverses what loading did, and loading saw no scales.
            without = [each for each in conversions if not _is_of_scales(each)]
            model._weight_conversions = self.update_weight_conversions(without, model)

    def get_quantize_ops(self) -> ConversionOps:
        return _Quantize(self)

    def is_serializable(self, *others: Any, **more: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False

    @property
    def is_compileable(self) -> bool:
        return True


@torch.no_grad()
def quantize_model(model: nn.Module, config: AiterMxConfig | None = None) -> dict[str, str]:
    """Put MX-FP8 layers into a model that has its weights, layer by layer and in place.

    ``model.config`` names the quantisation from then on, so that ``from_pretrained`` loads what
    ``save_pretrained`` writes. Layers that are MX-FP8 already stay so.

    Args:
        model: one of transformers', on any device.
        config: which layers stay as they are.

    Returns:
        The layers that stay, each with the reason.
    """
    quantizer = AiterMxQuantizer(config or AiterMxConfig(), pre_quantized=False)
    before = dict(model.named_modules())
    quantizer.preprocess_model(model)
    convert = _Quantize(quantizer).convert
    for name, module in model.named_modules():
        if not isinstance(module, (MxLinear, MxExperts)) or module is before[name]:
            continue
        for of, weight in before.pop(name).named_parameters(recurse=False):
            made = {of: weight.detach()}
            if quantizer.param_needs_quantization(model, f"{name}.{of}"):
                made = convert({f"{name}.{of}": weight.detach()})
            for key, value in made.items():
                setattr(module, key.rpartition(".")[2], frozen(value))
    if getattr(model, "_weight_conversions", None) is None:  # nobody loaded it: as saving would do
        found: Any = get_model_conversion_mapping(model, add_legacy=False)
        found = [each for each in found if type(each).__name__ != "PrefixChange"]
        model._weight_conversions = found
    model.hf_quantizer = quantizer
    quantizer.postprocess_model(model)
    return quantizer.kept


def _refuse_unexpected(model: nn.Module, files: Sequence[Path], kept: dict[str, str]) -> None:
    """Raise where a checkpoint has MX-FP8 weights for a module that would take their payloads for
    values."""
    stored = {each.name: path for path in files for each in read_header(path)}
    for name, module in model.named_modules():
        scale = f"{name}.weight{SCALE}"
        if scale in stored and not isinstance(module, MxLinear):
            why = kept.get(name, f"a {type(module).__name__}")
            raise CheckpointError(
                f"{stored[scale]}: {name} is MX-FP8 there, but stays as it is ({why}); "
                "give the configuration that the checkpoint was made with"
            )


def _is_of_scales(conversion: Any) -> bool:
    return any(name.endswith(SCALE) for name in getattr(conversion, "source_patterns", ()))


def _expect_unquantised(module: nn.Module) -> None:
    """Have the weights that are to be quantised read from the checkpoint as the model has them."""
    for name, weight in list(module.named_parameters(recurse=False)):
        if weight.dtype == torch.float8_e4m3fn:
            placeholder = torch.empty(weight.shape, dtype=torch.get_default_dtype(), device="meta")
            setattr(module, name, frozen(placeholder))


def _convert_linear(model: nn.Module, name: str, module: nn.Linear, skip: list[str]) -> str:
    """Why this layer stays as it is; nothing if it does not."""
    if not should_convert_module(name, skip):
        return "named in modules_to_not_convert"
    if type(module) is not nn.Linear:
        return f"{type(module).__name__} is a linear layer of its own kind"
    if reason := why_not(name, tuple(module.weight.shape)):
        return reason
    bias = None if module.bias is None else module.bias.dtype
    model.set_submodule(name, MxLinear(module.in_features, module.out_features, bias, "meta"))
    return ""


def gate_of(experts: nn.Module) -> Gate | str:
    """What experts compute between their products, as they say; or why it is not covered."""
    if not getattr(experts, "has_gate", True) or not hasattr(experts, "gate_up_proj"):
        return "experts without a gate"
    if getattr(experts, "has_post_expert_norm", False):
        return "experts that normalise their results"
    apply = getattr(experts, "_apply_gate", None)
    if apply is None:
        return "experts that do not tell their gate"
    with torch.no_grad(), torch.device("cpu"):  # the model itself is on no device yet
        return _gate_like(experts, apply)


def _gate_like(experts: nn.Module, apply: Callable[[Tensor], Tensor]) -> Gate | str:
    probe = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)) * 6
    expected = apply(probe.clone())
    alpha = _first(experts, "swiglu_alpha", "alpha", otherwise=1.0)
    limit = _first(experts, "swiglu_limit", "limit", otherwise=float("inf"))
    candidates = [
        Gate(activation, layout)
        for activation in ("silu", "gelu", "gelu_tanh", "relu2")
        for layout in ("halves", "interleaved")
    ] + [
        Gate("swiglu_oai", layout, slope, beta, limit)
        for layout in ("halves", "interleaved")
        for slope in (alpha, 1.0)
        for beta in (1.0, 0.0)
    ]
    for gate in candidates:
        if torch.allclose(_gated(probe, gate), expected, rtol=1e-4, atol=1e-5):
            return gate
    return "an activation that aiter_mx.fused_moe does not have"


def _first(of: object, *names: str, otherwise: float) -> float:
    return next((float(v) for n in names if (v := getattr(of, n, None)) is not None), otherwise)


def _gated(x: Tensor, gate: Gate) -> Tensor:
    """What ``aiter_mx.fused_moe`` makes of the first product."""
    g, u = x.chunk(2, -1) if gate.layout == "halves" else (x[..., ::2], x[..., 1::2])
    plain: dict[str, Callable[[Tensor], Tensor]] = {
        "silu": nn.functional.silu,
        "gelu": nn.functional.gelu,
        "gelu_tanh": partial(nn.functional.gelu, approximate="tanh"),
        "relu2": lambda x: torch.relu(x).square(),
    }
    if gate.activation in plain:
        return plain[gate.activation](g) * u
    g, u = g.clamp(max=gate.limit), u.clamp(-gate.limit, gate.limit)
    return g * torch.sigmoid(gate.alpha * g) * (u + gate.beta)


class _Quantize(ConversionOps):
    """A weight as payload and scales, while a checkpoint is loaded."""

    def __init__(self, quantizer: AiterMxQuantizer) -> None:
        self.quantizer = quantizer

    def convert(self, input_dict: dict[str, Any], **others: Any) -> dict[str, Tensor]:
        made = {}
        for name, value in input_dict.items():
            weight = value[0] if isinstance(value, list) else value
            axis = -2 if name in self.quantizer.transposed else -1
            made[name], made[name + SCALE] = aiter_mx.quantize(weight, axis)
        return made


ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)

__all__ = [
    "AiterMxConfig",
    "AiterMxQuantizer",
    "MxExperts",
    "MxLinear",
    "is_router",
    "quantize_model",
]
