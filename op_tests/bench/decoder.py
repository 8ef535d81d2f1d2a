"""transformers' decoders as steps that can be timed: what op_tests.bench.model measures."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3MoeConfig
from transformers.cache_utils import Cache, StaticLayer

import aiter_mx
from aiter_mx.integrations.transformers import MxExperts, MxLinear, quantize_model

CONFIGS: dict[str, PretrainedConfig] = {
    "llama-3.1-8b": LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
    ),
    "qwen3-30b-a3b": Qwen3MoeConfig(
        vocab_size=151936,
        hidden_size=2048,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
    ),
}
SIDES = ("ours", "bf16", "torchao")


@dataclass(frozen=True)
class Cell:
    """A step: ``decode`` of the last of ``tokens`` in each sequence, or ``prefill`` of them all."""

    phase: str
    batch: int
    tokens: int

    @property
    def new(self) -> int:
        """Tokens of a sequence that the step computes."""
        return 1 if self.phase == "decode" else self.tokens


def has_experts(config: PretrainedConfig) -> bool:
    """Whether a model has layers of experts."""
    return hasattr(config, "num_experts")


def build(config: PretrainedConfig, device: torch.device) -> Any:
    """A model with random weights in bf16, the same ones for each side."""
    options = {"experts_implementation": "grouped_mm"} if has_experts(config) else {}
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, **options)
    for layer in model.model.layers:
        layer.self_attn.layer_idx = 0  # each has a cache of its own, so that all compile to one
    return model.eval().requires_grad_(False)


def convert(model: Any, side: str) -> None:
    """Put a side's layers into a model in bf16."""
    if side == "ours":
        quantize_model(model)
    elif side == "torchao":
        from torchao.quantization import (
            Float8DynamicActivationFloat8WeightConfig,
            PerRow,
            quantize_,
        )

        quantize_(model.model, Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()))
    elif side != "bf16":
        raise ValueError(f"side must be one of {', '.join(SIDES)}, got {side!r}")


def refusal(side: str, config: PretrainedConfig) -> str:
    """Why a side does not compute a model; nothing if it does."""
    if side != "torchao":
        return ""
    if find_spec("torchao") is None:
        return "torchao is not installed"
    return "its experts would stay in bf16" if has_experts(config) else ""


# What is compiled. Modules are arguments, so that layers share what was compiled.


def _before(model: Any, ids: Tensor, positions: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    x = model.embed_tokens(ids)
    return x, model.rotary_emb(x, positions)


def _layer(layer: nn.Module, x: Tensor, embeddings: tuple[Tensor, Tensor], cache: Cache) -> Tensor:
    out: Tensor = layer(x, position_embeddings=embeddings, past_key_values=cache, use_cache=True)
    return out


def _after(norm: nn.Module, head: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = head(norm(x[:, -1]))
    return out


def build_ahead(model: Any, cells: Iterable[Cell], device: torch.device) -> None:
    """Build the kernels of our layers in parallel; a first call would build one after the other."""
    rows = sorted({cell.batch * cell.new for cell in cells})
    linears, experts = set(), set()
    for module in model.modules():
        if isinstance(module, MxLinear):
            siblings, _ = module.together or (None, 0)
            features = siblings.out_features if siblings else module.out_features
            linears.add((features, module.in_features))
        elif isinstance(module, MxExperts):
            experts.add(tuple(module.down_proj.shape))
    for N, K in sorted(linears):
        aiter_mx.warmup("linear", device=device, M=rows, N=N, K=K, x_dtype="bf16", out_dtype="bf16")
    for E, hidden, intermediate in sorted(experts):
        aiter_mx.warmup(
            "fused_moe",
            device=device,
            M=rows,
            hidden=hidden,
            intermediate=intermediate,
            E=E,
            top_k=model.config.num_experts_per_tok,
            id_dtype="i64",
        )


@dataclass(frozen=True)
class Parts:
    """What a step consists of: all before the decoder layers, one of them, and all after."""

    before: Callable[..., Any] = _before
    layer: Callable[..., Any] = _layer
    after: Callable[..., Any] = _after

    @classmethod
    def compiled(cls, backend: str) -> Parts:
        """Parts by torch.compile: a layer for each shape, the rest once for all batches."""
        torch._dynamo.config.recompile_limit = 64

        def by(function: Callable[..., Any], dynamic: bool) -> Callable[..., Any]:
            return torch.compile(function, fullgraph=True, dynamic=dynamic, backend=backend)

        return cls(by(_before, True), by(_layer, False), by(_after, True))


class Step:
    """A call that computes a cell's logits ``[batch, vocabulary]``, again and again the same.

    Attributes:
        ids: the tokens ``[batch, new]``.
        caches: one for each layer, random where the step does not write.
    """

    def __init__(self, model: Any, cell: Cell, parts: Parts, layers: int | None = None) -> None:
        """
        Args:
            model: with the layers of a side.
            cell: the step.
            parts: compiled or not.
            layers: of the model, if not all.
        """
        self.model, self.parts, self.layers = model, parts, model.model.layers[:layers]
        device = model.lm_head.weight.device
        generator = torch.Generator(device).manual_seed(cell.batch + cell.tokens)
        self._start = cell.tokens - cell.new
        # torch.compile copies what does not begin at a multiple of 16 bytes.
        self._lengths = torch.empty(len(self.layers), 2, dtype=torch.int64, device=device)
        self.caches = [_cache(model.config, cell, each[0], generator) for each in self._lengths]
        places = torch.arange(self._start, cell.tokens, device=device)
        self._positions = places.expand(cell.batch, -1).contiguous()
        shape = (cell.batch, cell.new)
        self.ids = torch.randint(model.config.vocab_size, shape, device=device, generator=generator)

    @torch.no_grad()
    def __call__(self) -> Tensor:
        self._lengths.fill_(self._start)
        decoder = self.model.model
        x, embeddings = self.parts.before(decoder, self.ids, self._positions)
        for layer, cache in zip(self.layers, self.caches, strict=True):
            x = self.parts.layer(layer, x, embeddings, cache)
        out: Tensor = self.parts.after(decoder.norm, self.model.lm_head, x)
        return out


def _cache(
    config: PretrainedConfig, cell: Cell, length: Tensor, generator: torch.Generator
) -> Cache:
    """A layer's static cache, made by hand: torch.compile would take one that transformers fills
    for a constant, and compile each layer anew."""
    made = StaticLayer(max_cache_len=cell.tokens)
    made.batch_size, made.num_heads = cell.batch, config.num_key_value_heads
    made.k_head_dim = made.v_head_dim = config.head_dim
    made.dtype, made.device = torch.bfloat16, length.device
    shape = (cell.batch, made.num_heads, cell.tokens, config.head_dim)
    made.keys, made.values = (
        torch.randn(shape, dtype=made.dtype, device=made.device, generator=generator)
        for _ in range(2)
    )
    made.cumulative_length, made.is_initialized = length, True
    return Cache(layers=[made])
