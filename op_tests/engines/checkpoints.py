"""A checkpoint of experts as ``aiter-mx convert`` writes it, loaded as engines load one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from aiter_mx.integrations.convert import convert

PREFIX = "mlp.experts"


def converted_experts(
    folder: Path, engine: str, experts: int, hidden: int, intermediate: int
) -> list[list[Tensor]]:
    """Gate, up and down weights of each expert in bf16, once ``folder / "out"`` has them in MX-FP8
    for an engine."""
    shapes = {"gate_proj": (intermediate, hidden), "up_proj": (intermediate, hidden)}
    shapes["down_proj"] = (hidden, intermediate)
    drawn = [
        {name: torch.randn(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
        for _ in range(experts)
    ]
    plain = {
        f"{PREFIX}.{e}.{name}.weight": w for e, of in enumerate(drawn) for name, w in of.items()
    }
    (folder / "plain").mkdir()
    (folder / "plain" / "config.json").write_text("{}")
    save_file(plain, folder / "plain" / "model.safetensors")
    convert(folder / "plain", folder / "out", engine)
    return [list(of.values()) for of in drawn]


def load_experts(
    folder: Path, parameters: Mapping[str, Any], mapping: Iterable[tuple[str, str, int, str]]
) -> int:
    """Hands every tensor to the loader that an engine's mapping names; how many these were."""
    listed, loaded = list(mapping), 0
    for name, value in load_file(folder / "model.safetensors").items():
        for parameter_name, weight_name, expert, shard in listed:
            if weight_name in name:
                mapped = name.replace(weight_name, parameter_name)
                parameter = parameters[mapped.removeprefix(f"{PREFIX}.")]
                parameter.weight_loader(parameter, value, mapped, shard, expert)
                loaded += 1
    return loaded
