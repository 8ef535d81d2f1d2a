"""transformers' own models with ``AiterMxConfig``: quantised while loading, saved and reloaded."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

import aiter_mx
from aiter_mx.integrations.checkpoint import CheckpointError
from aiter_mx.integrations.layers import (
    SCALE,
    Gate,
    MxExperts,
    MxLinear,
    experts_forward,
    settle,
)
from aiter_mx.integrations.transformers import AiterMxConfig, gate_of, quantize_model

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 128,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES, attention_bias=True),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **EXPERTS),
    "qwen2_moe": Qwen2MoeConfig(**SIZES, **EXPERTS, shared_expert_intermediate_size=32),
    "gpt_oss": GptOssConfig(**SIZES, num_local_experts=4, sliding_window=8),
}
IDS = torch.arange(3, 27).view(2, 12)


@pytest.fixture(params=CONFIGS)
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


def saved(name: str, folder: Path, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name]), dtype=dtype)
    with torch.no_grad():
        for tensor in model.parameters():  # biases of 0 would not show that they are lost
            if not tensor.any():
                tensor.normal_(std=0.05)
    model.save_pretrained(folder)
    return model.eval()


def load(folder: Path, quantised: bool = True, **options: Any) -> PreTrainedModel:
    options = {"dtype": torch.bfloat16} | options
    if quantised:
        options["quantization_config"] = AiterMxConfig()
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_model_is_quantised_while_loading_and_generates(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    plain = saved(name, tmp_path, dtype)
    model = load(tmp_path, dtype=dtype)
    layers = {n: m for n, m in model.named_modules() if isinstance(m, (MxLinear, MxExperts))}
    assert any(isinstance(m, MxLinear) for m in layers.values())
    assert any(isinstance(m, MxExperts) for m in layers.values()) == (name != "llama")
    assert type(model.lm_head) is torch.nn.Linear
    for at, layer in layers.items():
        source = plain.get_submodule(at)
        for of in ("weight", "gate_up_proj", "down_proj"):
            if hasattr(source, of):
                axis = -2 if getattr(source, "is_transposed", False) else -1
                payload, scale = aiter_mx.quantize(getattr(source, of), axis)
                assert torch.equal(getattr(layer, of).view(torch.uint8), payload.view(torch.uint8))
                assert torch.equal(getattr(layer, f"{of}_scale_inv"), scale)
    found, expected = model(IDS).logits.float(), plain(IDS).logits.float()
    assert (found - expected).norm() < 0.1 * expected.norm()
    assert model.generate(IDS, max_new_tokens=3, do_sample=False).shape == (2, 15)


@torch.no_grad()
def test_model_that_has_its_weights_becomes_the_one_that_is_loaded_quantised(
    name: str, tmp_path: Path
) -> None:
    model = saved(name, tmp_path)
    config = AiterMxConfig(modules_to_not_convert=["lm_head", "layers.1.self_attn.q_proj"])
    kept = quantize_model(model, config)
    assert kept["model.layers.1.self_attn.q_proj"] == "named in modules_to_not_convert"
    loaded = load(tmp_path, False, quantization_config=config)
    found, expected = model.state_dict(), loaded.state_dict()
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key].view(torch.uint8), tensor.view(torch.uint8)), key
    assert torch.equal(model(IDS).logits, loaded(IDS).logits)


@torch.no_grad()
def test_model_that_was_quantised_in_place_is_saved_and_quantised_once(
    name: str, tmp_path: Path
) -> None:
    model = saved(name, tmp_path / "plain")
    stay = ["lm_head", "model.layers.1.self_attn"]
    quantize_model(model, AiterMxConfig(modules_to_not_convert=stay))
    assert type(model.model.layers[1].self_attn.q_proj) is torch.nn.Linear
    first = model(IDS).logits
    assert not any("experts" in name for name in quantize_model(model))
    assert isinstance(model.model.layers[1].self_attn.q_proj, MxLinear)
    second = model(IDS).logits
    assert (second - first).norm() < 0.1 * first.norm()
    model.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved", quantised=False)
    assert torch.equal(again(IDS).logits, second)


@torch.no_grad()
def test_payloads_stay_when_a_model_is_given_another_dtype(name: str, tmp_path: Path) -> None:
    saved(name, tmp_path)
    model = load(tmp_path)
    payloads = {n: p.clone() for n, p in model.named_parameters() if p.dtype.itemsize == 1}
    expected = model(IDS).logits
    found = model.to(torch.float32)(IDS).logits
    assert found.dtype == torch.float32
    assert (found - expected).norm() < 0.1 * expected.norm()
    for at, payload in payloads.items():
        now = model.get_parameter(at)
        assert now.dtype == payload.dtype
        assert torch.equal(now.view(torch.uint8), payload.view(torch.uint8))


@torch.no_grad()
@pytest.mark.parametrize("listed", [None, [], ["layers.1"]], ids=str)
def test_head_that_shares_the_embeddings_stays_whatever_is_listed(
    listed: list[str] | None, tmp_path: Path
) -> None:
    config = LlamaConfig(**SIZES, tie_word_embeddings=True)
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    plain.save_pretrained(tmp_path)
    made = AiterMxConfig(modules_to_not_convert=listed)
    model = load(tmp_path, False, quantization_config=made)
    assert type(model.lm_head) is torch.nn.Linear
    assert model.lm_head.weight is model.model.embed_tokens.weight
    expected = plain(IDS).logits
    assert (model(IDS).logits - expected).norm() < 0.1 * expected.norm()


@torch.no_grad()
def test_saved_model_comes_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    saved(name, tmp_path / "plain")
    model = load(tmp_path / "plain")
    model.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved", quantised=False)
    before, after = model.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert torch.equal(tensor.view(torch.uint8), after[key].view(torch.uint8)), key
    assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_checkpoint_has_the_names_that_engines_read(tmp_path: Path) -> None:
    saved("qwen3_moe", tmp_path / "plain")
    load(tmp_path / "plain").save_pretrained(tmp_path / "saved")
    with safe_open(tmp_path / "saved" / "model.safetensors", "pt") as file:
        kinds = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    layer = "model.layers.1"
    for weight in (f"{layer}.self_attn.q_proj", f"{layer}.mlp.experts.3.gate_proj",
                   f"{layer}.mlp.experts.0.down_proj"):  # fmt: skip
        assert kinds[f"{weight}.weight"] == "F8_E4M3"
        assert kinds[f"{weight}.weight_scale_inv"] == "U8"
    assert kinds[f"{layer}.mlp.gate.weight"] == kinds["lm_head.weight"] == "BF16"
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "aiter_mx"


def test_layers_that_stay_are_named_with_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved("qwen2_moe", tmp_path)
    with caplog.at_level(logging.INFO):
        config = AiterMxConfig(modules_to_not_convert=["model.layers.1", "lm_head"])
        model = load(tmp_path, False, quantization_config=config)
    assert isinstance(model.model.layers[0].self_attn.q_proj, MxLinear)
    assert type(model.model.layers[1].self_attn.q_proj) is torch.nn.Linear
    assert "Using aiter_mx.linear for 7 MxLinear" in caplog.text
    assert "Using aiter_mx.fused_moe for 1 MxExperts" in caplog.text
    assert "mlp.shared_expert_gate as it is: a router" in caplog.text
    assert "lm_head as it is: named in modules_to_not_convert" in caplog.text


def test_layer_whose_k_is_no_multiple_of_32_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = LlamaConfig(**(SIZES | {"intermediate_size": 80}))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with caplog.at_level(logging.INFO):
        model = load(tmp_path)
    assert type(model.model.layers[0].mlp.down_proj) is torch.nn.Linear
    assert isinstance(model.model.layers[0].mlp.up_proj, MxLinear)
    assert "mlp.down_proj as it is: K=80 is no multiple of 32" in caplog.text


class _Experts(torch.nn.Module):
    def __init__(self, gate: Any, **attributes: Any) -> None:
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(torch.zeros(1, 64, 32))
        self._apply_gate = gate
        vars(self).update(attributes)


def _clamped(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate.clamp(max=3.0)) * up.clamp(-3.0, 3.0)


ACTIVATIONS = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu2": lambda x: torch.relu(x) ** 2,
}


def test_gate_is_found_by_asking_and_others_are_declined() -> None:
    clamped = gate_of(_Experts(_clamped, limit=3.0))
    assert clamped == Gate("swiglu_oai", "halves", alpha=1.0, beta=0.0, limit=3.0)
    for activation, function in ACTIVATIONS.items():
        apply = lambda x, f=function: f(x[..., ::2]) * x[..., 1::2]  # noqa: E731
        assert gate_of(_Experts(apply)) == Gate(activation, "interleaved")
    assert gate_of(_Experts(lambda x: torch.tanh(x.chunk(2, -1)[0]))) == (
        "an activation that aiter_mx.fused_moe does not have"
    )
    assert gate_of(_Experts(_clamped, has_gate=False)) == "experts without a gate"
    assert "normalise" in str(gate_of(_Experts(_clamped, has_post_expert_norm=True)))


def test_experts_function_refuses_weights_of_another_kind() -> None:
    x = torch.zeros(1, 32)
    with pytest.raises(TypeError, match=r"load the model with quantization_config=AiterMxConfig"):
        experts_forward(_Experts(_clamped), x, torch.zeros(1, 1).int(), torch.ones(1, 1))


@pytest.mark.parametrize(
    ("name", "tensor", "change", "complaint"),
    [
        ("llama", "mlp.up_proj.weight_scale_inv", lambda t: t[:, :1],
         r"must be U8 \[96, 2\], as its weight is \[96, 64\], got U8 \[96, 1\]"),
        ("qwen3_moe", "mlp.experts.1.up_proj.weight_scale_inv", lambda t: t[:16],
         r"must be U8 \[32, 2\], as its weight is \[32, 64\], got U8 \[16, 2\]"),
        ("llama", "mlp.up_proj.weight_scale_inv", torch.Tensor.float,
         r"must be U8 \[96, 2\].* got F32"),
        ("llama", "mlp.up_proj.weight_scale_inv", lambda t: None,
         r"mlp\.up_proj\.weight has no scales, .*weight_scale_inv, in any file"),
        ("llama", "mlp.up_proj.weight", lambda t: t[:, :48],
         r"mlp\.up_proj\.weight \[96, 48\]: K=48 is no multiple of 32"),
    ],
    ids=["columns", "rows", "dtype", "missing", "K"],
)  # fmt: skip
def test_checkpoint_with_other_scales_is_refused_by_tensor_and_file(
    name: str,
    tensor: str,
    change: Callable[[torch.Tensor], torch.Tensor | None],
    complaint: str,
    tmp_path: Path,
) -> None:
    saved(name, tmp_path / "plain")
    load(tmp_path / "plain").save_pretrained(tmp_path / "saved", max_shard_size="60KB")
    key = f"model.layers.1.{tensor}"
    (file,) = (f for f in (tmp_path / "saved").glob("*.safetensors") if key in load_file(f))
    tensors = load_file(file)
    changed = change(tensors.pop(key))
    if changed is not None:
        tensors[key] = changed.contiguous()
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=complaint) as raised:
        load(tmp_path / "saved", quantised=False)
    assert str(raised.value).startswith(f"{file}: {key.removesuffix(SCALE)}")


def test_quantised_weights_of_a_layer_that_stays_are_refused(tmp_path: Path) -> None:
    saved("llama", tmp_path / "plain")
    load(tmp_path / "plain").save_pretrained(tmp_path / "saved")
    path = tmp_path / "saved" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["modules_to_not_convert"] = ["lm_head", "model.layers.1.mlp"]
    path.write_text(json.dumps(config))
    complaint = (
        r"model\.layers\.1\.mlp\.gate_proj is MX-FP8 there, .* \(named in modules_to_not_con"
    )
    with pytest.raises(CheckpointError, match=complaint):
        load(tmp_path / "saved", quantised=False)


def test_scales_of_another_shape_are_refused_by_name() -> None:
    layer = MxLinear(64, 8)
    layer.weight_scale_inv = torch.nn.Parameter(torch.zeros(8, 3, dtype=torch.uint8), False)
    with pytest.raises(ValueError, match=r"mlp.up.weight_scale_inv must be \[8, 2\].* \[8, 3\]"):
        settle("mlp.up", layer)


@torch.no_grad()
def test_compiled_whole_layer_gives_the_same_bits() -> None:
    torch.manual_seed(2)
    layer = MxLinear.of(torch.nn.Linear(64, 48, dtype=torch.bfloat16))
    x = torch.randn(2, 5, 64, dtype=torch.bfloat16)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), layer(x))
