"""``aiter-mx convert``: what it writes, when it is stopped, and what it refuses."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    Qwen3MoeConfig,
    T5Config,
    T5ForConditionalGeneration,
)

import aiter_mx
from aiter_mx.cli.main import app
from aiter_mx.integrations import convert as module
from aiter_mx.integrations.checkpoint import CheckpointError
from aiter_mx.integrations.convert import convert
from aiter_mx.integrations.layers import MxExperts
from aiter_mx.integrations.transformers import AiterMxConfig
from op_tests.integrations.test_transformers import EXPERTS, SIZES, load, saved

IDS = torch.arange(3, 27).view(2, 12)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    torch.manual_seed(1)
    config = Qwen3MoeConfig(**(SIZES | {"head_dim": 20, "num_attention_heads": 2}), **EXPERTS)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    (folder / "tokenizer.json").write_text("{}")
    return folder


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


@pytest.mark.parametrize("engine", module.ENGINES)
def test_weights_are_quantised_and_the_rest_stays(
    engine: str, source: Path, tmp_path: Path
) -> None:
    done = convert(source, tmp_path / "out", engine, keep=["model.layers.1.self_attn.v*"])
    before, after = tensors(source), tensors(tmp_path / "out")
    scale_name = "weight_scale" if engine == "vllm" else "weight_scale_inv"
    assert set(done.quantised) | set(done.kept) == set(before)
    for name, weight in before.items():
        if name in done.quantised:
            payload, scale = aiter_mx.quantize(weight)
            assert torch.equal(after.pop(name).view(torch.uint8), payload.view(torch.uint8))
            assert torch.equal(after.pop(name.removesuffix("weight") + scale_name), scale)
        else:
            assert torch.equal(after.pop(name), weight)
    assert not after
    layer = "model.layers.1"
    assert done.kept[f"{layer}.mlp.gate.weight"] == "a router"
    assert done.kept["model.embed_tokens.weight"] == "an embedding"
    assert done.kept["lm_head.weight"] == "the output head"
    assert done.kept[f"{layer}.input_layernorm.weight"] == "a vector"
    assert done.kept[f"{layer}.self_attn.v_proj.weight"] == "named by --keep"
    assert done.kept[f"{layer}.self_attn.o_proj.weight"] == "K=40 is no multiple of 32"
    assert f"{layer}.mlp.experts.3.down_proj.weight" in done.quantised
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(tensors(tmp_path / "out"))
    written = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    ignored = written["modules_to_not_convert" if engine == "transformers" else "ignored_layers"]
    assert f"{layer}.self_attn.o_proj" in ignored and "lm_head" in ignored
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"


def test_an_index_of_one_shard_names_its_scales_too(tmp_path: Path) -> None:
    source = tmp_path / "plain"
    source.mkdir()
    (source / "config.json").write_text("{}")
    save_file({"up_proj.weight": torch.randn(32, 64)}, source / "model.safetensors")
    weight_map = {"up_proj.weight": "model.safetensors"}
    index = {"metadata": {"total_size": 8192}, "weight_map": weight_map}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    convert(source, tmp_path / "out", "vllm")
    written = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(written["weight_map"]) == {"up_proj.weight", "up_proj.weight_scale"}


@torch.no_grad()
def test_transformers_loads_what_was_converted(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out", "transformers")
    converted, quantised = load(tmp_path / "out", quantised=False), load(source)
    assert torch.equal(converted(IDS).logits, quantised(IDS).logits)


@torch.no_grad()
def test_transformers_loads_a_model_whose_head_is_its_embeddings(tmp_path: Path) -> None:
    config = LlamaConfig(**SIZES, tie_word_embeddings=True)
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    plain.save_pretrained(tmp_path / "plain")
    done = convert(tmp_path / "plain", tmp_path / "out", "transformers")
    assert len(done.quantised) == 14
    expected = plain(IDS).logits
    found = load(tmp_path / "out", quantised=False)(IDS).logits
    assert (found - expected).norm() < 0.1 * expected.norm()


@torch.no_grad()
def test_embeddings_of_other_names_and_what_stays_in_fp32_are_left(tmp_path: Path) -> None:
    sizes = {"d_model": 64, "d_kv": 32, "d_ff": 96, "num_layers": 1, "num_heads": 32}
    plain = T5ForConditionalGeneration(T5Config(**sizes, vocab_size=128)).eval()
    plain.save_pretrained(tmp_path / "plain")
    done = convert(tmp_path / "plain", tmp_path / "out", "transformers")
    attention = "encoder.block.0.layer.0.SelfAttention"
    assert done.kept["shared.weight"] == "an embedding"
    assert done.kept[f"{attention}.relative_attention_bias.weight"] == "an embedding"
    assert f"{attention}.q.weight" in done.quantised
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out").eval()
    expected = plain(IDS, decoder_input_ids=IDS).logits
    found = model(IDS, decoder_input_ids=IDS).logits
    assert (found - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize("where", [{"vocab_size": 96}, {"text_config": {"vocab_size": 96}}])
def test_a_weight_as_long_as_the_vocabulary_stays(where: dict[str, Any], tmp_path: Path) -> None:
    source = tmp_path / "plain"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(where))
    weights = {"tokens.weight": torch.randn(96, 64), "up_proj.weight": torch.randn(32, 64)}
    save_file(weights, source / "model.safetensors")
    done = convert(source, tmp_path / "out", "vllm")
    assert done.quantised == ["up_proj.weight"]
    assert done.kept == {"tokens.weight": "as long as the vocabulary"}


def test_weights_with_k_ahead_of_n_stay_and_nothing_to_quantise_is_said(tmp_path: Path) -> None:
    config = GPT2Config(n_embd=64, n_layer=1, n_head=2, vocab_size=128)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "plain")
    message = r"no weight to quantise: each is a vector \(\d+\), a weight with K ahead of N.* \(4\)"
    with pytest.raises(CheckpointError, match=message):
        convert(tmp_path / "plain", tmp_path / "out", "vllm")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "told",
    [
        None,
        {"dtype": "F32", "data_offsets": None},
        {"data_offsets": [0, 4096]},  # half of it
        {"data_offsets": [-64, 8128]},
        {"data_offsets": [8192, 0]},
        {"data_offsets": [0, 1, 2]},
        {"shape": [-32, -64]},
        {"shape": [32.0, 64.0]},
    ],
    ids=str,
)
def test_a_header_that_cannot_be_right_is_refused(told: Any, tmp_path: Path) -> None:
    source = tmp_path / "plain"
    source.mkdir()
    (source / "config.json").write_text("{}")
    usual = {"dtype": "F32", "shape": [32, 64], "data_offsets": [0, 8192]}
    header = json.dumps(told and {"up_proj.weight": {**usual, **told}}).encode()
    length = len(header).to_bytes(8, "little")
    (source / "model.safetensors").write_bytes(length + header + bytes(8192))
    with pytest.raises(CheckpointError, match=r"model\.safetensors has no readable header"):
        convert(source, tmp_path / "out", "vllm")


@pytest.mark.parametrize("is_sharded", [False, True])
def test_files_that_hold_the_checkpoint_once_more_are_left(
    is_sharded: bool, source: Path, tmp_path: Path
) -> None:
    plain = tmp_path / "plain"
    if is_sharded:
        shutil.copytree(source, plain)
    else:
        saved("llama", plain)
    expected = convert(plain, tmp_path / "expected", "vllm")
    save_file(
        {"layers.0.attention.wq.weight": torch.randn(32, 64)}, plain / "consolidated.safetensors"
    )
    assert convert(plain, tmp_path / "out", "vllm") == expected
    assert digests(tmp_path / "out") == digests(tmp_path / "expected")


@torch.no_grad()
@pytest.mark.parametrize("keep", [(), ("*.1.mlp.experts",)])
def test_experts_with_k_ahead_of_n_are_those_that_transformers_quantises(
    keep: tuple[str, ...], tmp_path: Path
) -> None:
    plain = saved("gpt_oss", tmp_path / "plain")
    read: dict[str, int] = {}

    def on_bytes(shard: str, count: int) -> None:
        read[shard] = read.get(shard, 0) + count

    done = convert(tmp_path / "plain", tmp_path / "out", "transformers", keep, on_bytes)
    assert read == {"model.safetensors": done.bytes_before}
    stay = ["lm_head", *("layers.1.mlp.experts" for _ in keep)]
    config = AiterMxConfig(modules_to_not_convert=stay)
    expected = load(tmp_path / "plain", quantised=False, quantization_config=config)
    converted = load(tmp_path / "out", quantised=False)
    kinds = [type(layer.mlp.experts) for layer in converted.model.layers]
    other = type(plain.model.layers[1].mlp.experts)
    assert kinds == [MxExperts, other if keep else MxExperts]
    assert torch.equal(converted(IDS).logits, expected(IDS).logits)


def test_experts_with_k_ahead_of_n_stay_where_an_engine_does_not_load_them(tmp_path: Path) -> None:
    saved("gpt_oss", tmp_path / "plain")
    done = convert(tmp_path / "plain", tmp_path / "out", "vllm")
    experts = "model.layers.0.mlp.experts"
    assert done.kept[f"{experts}.down_proj"].startswith("experts with K ahead of N")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert experts in config["quantization_config"]["ignored_layers"]
    before, after = tensors(tmp_path / "plain"), tensors(tmp_path / "out")
    name = f"{experts}.gate_up_proj"
    assert torch.equal(after[name], before[name])


_SLOWLY = """
import sys, time
from pathlib import Path
from aiter_mx.integrations.convert import convert
convert(Path(sys.argv[1]), Path(sys.argv[2]), on_bytes=lambda *_: time.sleep(0.002))
"""


class _Killed(BaseException):
    """In place of a signal, at a step that a signal would rarely meet."""


def _cut(path: Path) -> None:
    path.write_bytes(b"cut")


def _killed_at(step: int, source: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a conversion meets its death at this step of those that change the folder, which
    leaves what it writes cut off."""
    steps = iter(range(step))
    writers = {
        (Path, "mkdir"): lambda *_: None,
        (Path, "write_text"): lambda path, *_: _cut(path),
        (Path, "rename"): lambda *_: None,
        (Path, "unlink"): lambda *_: None,
        (os, "fsync"): lambda *_: None,
        (shutil, "copy"): lambda _, path: _cut(path),
    }
    with monkeypatch.context() as patched, suppress(_Killed):
        for (owner, name), leave in writers.items():
            original = getattr(owner, name)

            def dies(*given: Any, of: Any = original, leave: Any = leave, **more: Any) -> Any:
                if next(steps, None) is None:
                    patched.undo()
                    leave(*given)
                    raise _Killed
                return of(*given, **more)

            patched.setattr(owner, name, dies)
        convert(source, target)
        return False
    return True


def test_killed_at_any_step_and_run_again_it_leaves_the_same_bytes(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(source, tmp_path / "whole")
    expected, step = digests(tmp_path / "whole"), 0
    while _killed_at(step, source, target := tmp_path / str(step), monkeypatch):
        convert(source, target)
        assert digests(target) == expected, step
        step += 1
    assert step > 3 * len(list(source.glob("*.safetensors")))


@pytest.mark.parametrize("shards", [0, 2])
def test_killed_and_run_again_it_leaves_the_same_bytes(
    shards: int, source: Path, tmp_path: Path
) -> None:
    convert(source, tmp_path / "whole")
    target = tmp_path / "killed"
    process = subprocess.Popen(
        [sys.executable, "-c", _SLOWLY, str(source), str(target)],
        env={**os.environ, "PYTHONPATH": str(Path(aiter_mx.__file__).parents[1])},
    )
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        if (target / module._STATE).exists() and len(list(target.glob("*.safetensors"))) >= shards:
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.001)
    process.wait()
    assert (target / module._STATE).exists(), "it was to be killed before it ended"
    (target / ".model-00001.safetensors.partial").write_bytes(b"cut")
    convert(source, target)
    assert digests(target) == digests(tmp_path / "whole")


def test_two_processes_do_not_convert_into_one_folder(source: Path, tmp_path: Path) -> None:
    refused: list[subprocess.CompletedProcess[str]] = []

    def begin_another(shard: str, count: int) -> None:
        if not refused:
            command = [sys.executable, "-m", "aiter_mx.cli", "convert", source, tmp_path / "out"]
            refused.append(subprocess.run(command, capture_output=True, text=True, check=False))

    convert(source, tmp_path / "out", on_bytes=begin_another)
    (other,) = refused
    assert other.returncode == 1
    assert other.stderr == f"error: another process is converting into {tmp_path / 'out'}\n"
    convert(source, tmp_path / "alone")
    assert digests(tmp_path / "out") == digests(tmp_path / "alone")


def test_memory_is_that_of_pieces(tmp_path: Path) -> None:
    source = tmp_path / "plain"
    source.mkdir()
    (source / "config.json").write_text("{}")
    weight = torch.randn(1 << 16, 2048, dtype=torch.bfloat16)  # 268 MB
    save_file({"model.up_proj.weight": weight}, source / "model.safetensors")
    del weight
    script = (
        "import resource, sys; from pathlib import Path; import torch, aiter_mx;"
        "from aiter_mx.integrations.convert import convert;"
        "aiter_mx.quantize(torch.zeros(32, 32));"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss;"
        "before = peak(); convert(Path(sys.argv[1]), Path(sys.argv[2])); print(peak() - before)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script, str(source), str(tmp_path / "out")],
        env={**os.environ, "PYTHONPATH": str(Path(aiter_mx.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(ran.stdout) * 1024 < (1 << 30) + (1 << 28)


def test_what_cannot_be_converted_is_said(source: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no config\.json beside \*\.safetensors"):
        convert(tmp_path, tmp_path / "out")
    with pytest.raises(CheckpointError, match="engine must be one of sglang, vllm, transformers"):
        convert(source, tmp_path / "out", "ollama")
    convert(source, tmp_path / "out")
    with pytest.raises(CheckpointError, match="out is not empty; name a new folder"):
        convert(source, tmp_path / "out")
    with pytest.raises(CheckpointError, match="is quantised already, by 'mxfp8'"):
        convert(tmp_path / "out", tmp_path / "again")
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / module._STATE).write_text("{}")
    with pytest.raises(CheckpointError, match="holds the beginning of another conversion"):
        convert(source, tmp_path / "begun")
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "config.json").write_text("{}")
    shard = next(source.glob("*.safetensors")).read_bytes()
    for length, message in ((4, "header would end behind"), (len(shard) - 1, "would end at byte")):
        (damaged / "model.safetensors").write_bytes(shard[:length])
        with pytest.raises(CheckpointError, match=message):
            convert(damaged, tmp_path / "of_damaged")


def test_a_checkpoint_with_shards_that_are_missing_is_refused(source: Path, tmp_path: Path) -> None:
    part = tmp_path / "part"
    shutil.copytree(source, part)
    shard = sorted(part.glob("*.safetensors"))[1]
    first = min(load_file(shard))
    shard.unlink()
    message = rf"lacks \d+ of the \d+ tensors that .*\.json names, such as {first} of {shard.name}"
    with pytest.raises(CheckpointError, match=message):
        convert(part, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"config\.json is no JSON: Expecting property name"),
        ("[]", r"config\.json must hold an object, got a list"),
        ('{"quantization_config": "fp8"}', "is quantised already, by 'fp8'"),
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused(
    source: Path, tmp_path: Path, text: str, message: str
) -> None:
    shutil.copytree(source, tmp_path / "other")
    (tmp_path / "other" / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        convert(tmp_path / "other", tmp_path / "out")


def test_a_configuration_that_says_none_is_as_if_it_said_nothing(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "config.json").write_text('{"quantization_config": null}')
    save_file({"up_proj.weight": torch.randn(32, 64)}, tmp_path / "plain" / "model.safetensors")
    assert convert(tmp_path / "plain", tmp_path / "out").quantised == ["up_proj.weight"]


def test_command_lists_what_stays(source: Path, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    ran = CliRunner().invoke(app, ["convert", str(source), str(tmp_path / "out")])
    assert ran.exit_code == 0, ran.output
    assert "a router" in ran.output and "K=40 is no multiple of 32" in ran.output
    assert "weights in MX-FP8" in ran.output
