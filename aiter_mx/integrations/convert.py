"""A checkpoint in MX-FP8, from a folder of safetensors: shard by shard, piece by piece.

Nothing here imports an engine. A shard appears by atomic rename, so that a conversion that was
stopped goes on where it was, and what it leaves is the same.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch

import aiter_mx
from aiter_mx.integrations.checkpoint import (
    HEADER_LENGTH,
    OFFSETS,
    CheckpointError,
    Stored,
    read_header,
)
from aiter_mx.integrations.layers import is_router, why_not
from aiter_mx.numerics import BLOCK

ENGINES = ("sglang", "vllm", "transformers")
"""For whom a checkpoint is written; they differ in names of scales and in the configuration."""

_SCALES = {"sglang": "weight_scale_inv", "vllm": "weight_scale", "transformers": "weight_scale_inv"}
_FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_PIECE_BYTES = 1 << 26
_STATE = ".aiter_mx_convert.json"
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_STACKED = ("gate_up_proj", "down_proj")
"""Weights of all experts of a layer in one tensor."""
_K_FIRST = ("c_attn", "c_proj", "c_fc", "q_attn")
_WITH_K_FIRST = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")
"""Layers whose weight is ``[K, N]``, and the kinds of models that have such."""


@dataclass(frozen=True)
class Written:
    """What a conversion did.

    Attributes:
        quantised: names of weights.
        kept: why other tensors stay as they are, by name.
        bytes_before: of all tensors.
        bytes_after: likewise.
    """

    quantised: list[str]
    kept: dict[str, str]
    bytes_before: int
    bytes_after: int


def convert(
    source: Path,
    target: Path,
    engine: str = "sglang",
    keep: Sequence[str] = (),
    on_bytes: Callable[[str, int], None] = lambda shard, count: None,
) -> Written:
    """Quantise the linear layers and experts of a checkpoint.

    Args:
        source: folder with ``config.json`` and ``*.safetensors``.
        target: folder for the result: a new or empty one, or that of a conversion that was stopped.
        engine: one of ``ENGINES``.
        keep: patterns, as file names have them, of modules that stay as they are.
        on_bytes: called with a shard's name and the bytes of it that were read.

    Returns:
        Which weights were quantised, which tensors stay as they are and why, and bytes of all.

    Raises:
        CheckpointError: not such a folder, a checkpoint that is quantised already or has nothing to
            quantise, a damaged file, or a target that holds something else.
    """
    shards = _shards_of(source)
    if engine not in ENGINES:
        raise CheckpointError(f"engine must be one of {', '.join(ENGINES)}, got {engine!r}")
    if not shards or not (source / "config.json").is_file():
        raise CheckpointError(f"{source} holds no config.json beside *.safetensors")
    config = _object_in(source / "config.json")
    if by := config.get("quantization_config"):
        method = by.get("quant_method") if isinstance(by, dict) else by
        raise CheckpointError(f"{source} is quantised already, by {method!r}")
    headers = {shard.name: read_header(shard) for shard in shards}
    _refuse_missing(source, {stored.name for header in headers.values() for stored in header})
    transposed = _transposed(stored for header in headers.values() for stored in header)
    plans = {
        name: _plan(header, engine, keep, transposed, config) for name, header in headers.items()
    }
    if not any(len(made) > 1 for tensors, _ in plans.values() for _, made in tensors):
        why_each = Counter(why for _, each in plans.values() for why in each.values())
        tally = ", ".join(f"{why} ({count})" for why, count in why_each.most_common())
        raise CheckpointError(f"{source} has no weight to quantise: each is {tally or 'missing'}")
    with _alone_in(target):
        _claim(target, shards, engine, keep)

        weight_map: dict[str, str] = {}
        kept: dict[str, str] = {}
        quantised, before, after = [], 0, 0
        for shard in shards:
            tensors, reasons = plans[shard.name]
            for stored, made in tensors:
                weight_map |= {each.name: shard.name for each in made}
                before += stored.end - stored.begin
                after += sum(each.end - each.begin for each in made)
                if len(made) > 1:
                    quantised.append(stored.name)
            kept |= reasons
            if not (target / shard.name).exists():
                _write_shard(shard, target / shard.name, tensors, transposed, on_bytes)
            else:
                on_bytes(shard.name, shard.stat().st_size)

        ignored = sorted(
            {
                _module_of(name)
                for name, reason in kept.items()
                if reason not in ("a vector", "an embedding")
            }
        )
        config["quantization_config"] = _configuration(engine, ignored)
        for path in sorted(source.iterdir()):
            if path.is_file() and path.suffix not in (".safetensors", ".bin", ".pt", ".pth"):
                shutil.copy(path, target / path.name)
        _write_text(target / "config.json", json.dumps(config, indent=2) + "\n")
        if len(shards) > 1 or (source / _INDEX).is_file():
            index = {
                "metadata": {"total_size": after},
                "weight_map": dict(sorted(weight_map.items())),
            }
            _write_text(target / _INDEX, json.dumps(index, indent=2) + "\n")
        (target / _STATE).unlink()
        return Written(quantised, kept, before, after)


@contextmanager
def _alone_in(target: Path) -> Iterator[None]:
    """Hold a folder, which is made where there is none, against other processes of this machine."""
    target.mkdir(parents=True, exist_ok=True)
    folder = os.open(target, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"another process is converting into {target}") from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(folder)


def _shards_of(source: Path) -> list[Path]:
    """The files that hold the checkpoint: others beside them may hold it once more, in the names of
    whoever trained it."""
    found = sorted(source.glob("*.safetensors"))
    named = {*map(str, _weight_map(source).values())} or {_SINGLE}
    return [shard for shard in found if shard.name in named] or found


def _weight_map(source: Path) -> dict[str, Any]:
    """The file of each tensor, as the checkpoint's index has it; nothing where there is none."""
    path = source / _INDEX
    files = (_object_in(path).get("weight_map") if path.is_file() else None) or {}
    if not isinstance(files, dict):
        raise CheckpointError(f"weight_map of {path} must be an object, got {files!r:.40}")
    return files


def _object_in(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds."""
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise CheckpointError(f"{path} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} must hold an object, got a {type(found).__name__}")
    return found


def _refuse_missing(source: Path, names: set[str]) -> None:
    """Raise where the checkpoint's index names tensors that are not there, as after a download that
    was cut short."""
    shards = _weight_map(source)
    if missing := sorted(set(shards) - names):
        raise CheckpointError(
            f"{source} lacks {len(missing)} of the {len(shards)} tensors that {_INDEX} names, such "
            f"as {missing[0]} of {shards[missing[0]]}; fetch the shards that are missing"
        )


def _configuration(engine: str, ignored: list[str]) -> dict[str, Any]:
    if engine == "transformers":
        return {"quant_method": "aiter_mx", "modules_to_not_convert": ignored}
    return {
        "quant_method": "mxfp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [1, BLOCK],
        "ignored_layers": ignored,
    }


def _claim(target: Path, shards: list[Path], engine: str, keep: Sequence[str]) -> None:
    """Make ``target`` the folder of this conversion, or find that it is."""
    sizes = {shard.name: shard.stat().st_size for shard in shards}
    of = {"version": aiter_mx.__version__, "engine": engine, "keep": list(keep), "shards": sizes}
    text = json.dumps(of, indent=2) + "\n"
    state = target / _STATE
    begun = _partial(state)
    if state.is_file():
        if state.read_text() != text:
            raise CheckpointError(
                f"{target} holds the beginning of another conversion; delete it or name another "
                "folder"
            )
    elif any(path != begun for path in target.iterdir()):
        raise CheckpointError(f"{target} is not empty; name a new folder")
    else:
        _write_text(state, text)
    for left_over in target.glob(".*.partial"):
        left_over.unlink()


_Plan = list[tuple[Stored, list[Stored]]]


def _transposed(tensors: Iterable[Stored]) -> set[str]:
    """Names of stacked weights ``[E, K, N]``, which the two of a layer tell together."""
    shapes = {stored.name: stored.shape for stored in tensors if len(stored.shape) == 3}
    found: set[str] = set()
    for name, (_, rows, columns) in shapes.items():
        module, _, last = name.rpartition(".")
        second = f"{module}.{_STACKED[1]}"
        if last == _STACKED[0] and shapes.get(second, ())[1:] == (columns // 2, rows):
            found |= {name, second}
    return found


def _module_of(name: str) -> str:
    """The module that a configuration names for a tensor that stays as it is."""
    module, _, last = name.rpartition(".")
    return module if last in (*_STACKED, "weight") else name


def _plan(
    tensors: Iterable[Stored],
    engine: str,
    keep: Sequence[str],
    transposed: set[str],
    config: dict[str, Any],
) -> tuple[_Plan, dict[str, str]]:
    """What becomes of each tensor of a shard, and why some stay as they are."""
    plan, kept, at = [], {}, 0
    for stored in tensors:
        shape = stored.shape
        if stored.name in transposed:
            shape = (shape[0], shape[2], shape[1])
        reason = _why_kept(stored, shape, keep, config)
        if not reason and stored.name in transposed and engine != "transformers":
            reason = "experts with K ahead of N, as transformers alone loads them"
        made = [(stored.name, stored.dtype, stored.shape)]
        if reason:
            kept[stored.name] = reason
        else:
            *rows, K = shape
            stem, dot, last = stored.name.rpartition(".")
            scale = _SCALES[engine] if last == "weight" else last + "_scale_inv"
            made = [
                (stored.name, "F8_E4M3", shape),
                (f"{stem}{dot}{scale}", "U8", (*rows, K // BLOCK)),
            ]
        outputs = []
        for name, dtype, of in made:
            size = stored.end - stored.begin if reason else prod(of)
            outputs.append(Stored(name, dtype, of, at, at + size))
            at += size
        plan.append((stored, outputs))
    return plan, kept


def _why_kept(
    stored: Stored, shape: tuple[int, ...], keep: Sequence[str], config: dict[str, Any]
) -> str:
    """Why a tensor stays as it is; nothing if it is quantised, in this shape."""
    module, _, last = stored.name.rpartition(".")
    if len(stored.shape) < 2:
        return "a vector"
    is_stacked = len(stored.shape) == 3 and last in _STACKED
    if not is_stacked and (len(stored.shape) != 2 or last != "weight"):
        return "no weight of a linear layer"
    if stored.dtype not in _FLOATS:
        return f"of dtype {stored.dtype}"
    name = module.rpartition(".")[2]
    if "embed" in name or name in ("wte", "wpe", "shared") or name.endswith("attention_bias"):
        return "an embedding"
    if name in ("lm_head", "output", "score"):
        return "the output head"
    if not is_stacked and shape[0] == _of_text(config, "vocab_size"):
        return "as long as the vocabulary"
    if any(fnmatch(module, pattern) for pattern in keep):
        return "named by --keep"
    if is_router(module):
        return "a router"
    if name in _K_FIRST and config.get("model_type") in _WITH_K_FIRST:
        return "a weight with K ahead of N, which no engine loads quantised"
    if module.endswith("DenseReluDense.wo"):
        return "a layer that transformers keeps in fp32"
    return why_not("", shape)


def _of_text(config: dict[str, Any], name: str) -> Any:
    """What a configuration says of the model of language, which may be a part of the whole."""
    text = config.get("text_config")
    return config.get(name, text.get(name) if isinstance(text, dict) else None)


def _write_shard(
    source: Path,
    target: Path,
    plan: _Plan,
    transposed: set[str],
    on_bytes: Callable[[str, int], None],
) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for _, made in plan:
        for each in made:
            offsets = [each.begin, each.end]
            header[each.name] = {
                "dtype": each.dtype,
                "shape": list(each.shape),
                OFFSETS: offsets,
            }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 16)  # payloads begin where kernels can load them
    partial = _partial(target)
    with source.open("rb") as reader, partial.open("wb") as writer:
        writer.write(len(text).to_bytes(HEADER_LENGTH, "little"))
        writer.write(text)
        for stored, made in plan:
            scales = []
            is_transposed = stored.name in transposed
            for piece in _pieces(reader, stored, is_transposed):
                on_bytes(source.name, len(piece))
                if len(made) == 1:
                    writer.write(piece)
                    continue
                rows = torch.frombuffer(piece, dtype=_FLOATS[stored.dtype])
                rows = rows.view(-1, stored.shape[-1])
                payload, scale = aiter_mx.quantize(rows.T.contiguous() if is_transposed else rows)
                writer.write(payload.view(torch.uint8).numpy().data)
                scales.append(scale)
            for scale in scales:
                writer.write(scale.numpy().data)
        writer.flush()
        os.fsync(writer.fileno())
    partial.rename(target)


def _pieces(reader: BinaryIO, stored: Stored, by_expert: bool) -> Iterator[bytearray]:
    """A tensor's bytes, whole rows at a time, or an expert at a time."""
    rows = prod(stored.shape[:-1]) or 1
    row_bytes = max(1, (stored.end - stored.begin) // rows)
    step = max(1, _PIECE_BYTES // row_bytes) * row_bytes
    if by_expert:
        step = stored.shape[1] * row_bytes
    reader.seek(stored.begin)
    for at in range(stored.begin, stored.end, step):
        piece = bytearray(reader.read(min(step, stored.end - at)))
        yield piece


def _partial(path: Path) -> Path:
    """What a file is called until it is whole."""
    return path.with_name(f".{path.name}.partial")


def _write_text(path: Path, text: str) -> None:
    partial = _partial(path)
    partial.write_text(text)
    partial.rename(path)
