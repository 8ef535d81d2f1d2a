"""What MX-FP8 costs a language model: its perplexity beside that of bf16.

    python -m op_tests.bench.perplexity [--save] [--steps 400] [--sequences 128]

Small models of two architectures are trained from scratch, on the spot, on the texts of Python's
``help()``, byte by byte; the last tenth of them is held out. The trained model is saved in bf16 and
loaded twice, as it is and with ``AiterMxConfig``. Both then read the same held-out bytes.
"""

from __future__ import annotations

import argparse
import datetime
import math
import tempfile
import time
from pydoc_data.topics import topics
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3MoeConfig

from aiter_mx.integrations.transformers import AiterMxConfig, MxExperts, MxLinear
from aiter_mx.tuning.origin import commit
from op_tests.bench.common import MEASURED, show

LENGTH = 128  # bytes that a model sees together
_SIZES = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": LENGTH,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**_SIZES),
    "qwen3_moe": Qwen3MoeConfig(
        **_SIZES, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=128
    ),
}


def text() -> tuple[Tensor, Tensor]:
    """Bytes to train on, and bytes to be read."""
    whole = "\n".join(topics[name] for name in sorted(topics)).encode()
    values = torch.frombuffer(bytearray(whole), dtype=torch.uint8).long()
    end = len(values) * 9 // 10
    return values[:end], values[end:]


def train(config: PretrainedConfig, steps: int, batch: int = 16) -> nn.Module:
    """A model after so many steps of AdamW, the learning rate falling to nothing."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    falling = torch.optim.lr_scheduler.OneCycleLR(optimiser, 3e-3, total_steps=steps)
    values, _ = text()
    generator = torch.Generator().manual_seed(1)
    for _step in range(steps):
        first = torch.randint(len(values) - LENGTH, (batch,), generator=generator)
        ids = torch.stack([values[at : at + LENGTH] for at in first.tolist()])
        model(input_ids=ids, labels=ids).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        falling.step()
    return model.eval()


@torch.no_grad()
def perplexity(model: Any, sequences: int) -> float:
    """Of bytes, over so many stretches of the text that was held out."""
    _, values = text()
    losses = []
    for at in range(0, sequences * LENGTH, LENGTH):
        ids = values[at : at + LENGTH].unsqueeze(0)
        logits = model(input_ids=ids).logits[0, :-1].float()
        losses.append(nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none"))
    return math.exp(torch.cat(losses).mean().item())


def compare(name: str, steps: int, sequences: int, batch: int = 16) -> dict[str, object]:
    """A row of the table: one model, trained, and read in both formats."""
    began = time.perf_counter()
    model = train(CONFIGS[name], steps, batch)
    with tempfile.TemporaryDirectory() as folder:
        model.bfloat16().save_pretrained(folder)
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        quantised = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, quantization_config=AiterMxConfig()
        ).eval()
    layers = sum(isinstance(module, (MxLinear, MxExperts)) for module in quantised.modules())
    bf16, mxfp8 = perplexity(plain, sequences), perplexity(quantised, sequences)
    return {
        "model": name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "layers_in_mxfp8": layers,
        "steps": steps,
        "bytes_read": sequences * LENGTH,
        "bf16": bf16,
        "mxfp8": mxfp8,
        "ratio": mxfp8 / bf16,
        "seconds": time.perf_counter() - began,
    }


def main() -> None:
    """Train, compare, print and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--save", action="store_true", help="write docs/measured/amd_epyc/perplexity.csv"
    )
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--sequences", type=int, default=128)
    arguments = parser.parse_args()
    rows = [compare(name, arguments.steps, arguments.sequences) for name in CONFIGS]
    show("perplexity of bytes", rows)
    if arguments.save:
        frame = pd.DataFrame(rows).assign(commit=commit(), date=datetime.date.today().isoformat())
        frame.to_csv(MEASURED / "amd_epyc" / "perplexity.csv", index=False, float_format="%.5g")


if __name__ == "__main__":
    main()
