"""``fused_moe`` against float64: in the simulator, in torch, and with ``-m gpu`` on a GPU."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import aiter_mx
from aiter_mx.jit.build import BuildRequest
from aiter_mx.kernels.fused_moe import FusedMoeProblem
from aiter_mx.sim.program import Program
from op_tests.conformance import in_order
from op_tests.launches import on
from op_tests.moe.layers import CONSTANTS, assert_layer, gpu_call, random_call, variants
from op_tests.moe.operands import SWIGLU


def test_random_layers_match_float64(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(3)
    for seed in range(8):
        in_order(monkeypatch, draw, seed)
        fixed = variants()[seed % 2]
        fixed |= {"dtype": torch.bfloat16, "top_k": 2, "shared": seed % 2, "experts": 8}
        call = random_call(draw, seed, id_dtype=torch.int32, **fixed)
        out = aiter_mx.fused_moe(**on(device, call))
        assert_layer(out.cpu(), call, device)


@pytest.mark.parametrize("seed", range(2))
def test_dtypes_slots_and_experts(device: torch.device, seed: int) -> None:
    draw = random.Random(seed)
    given = {"intermediate": 32, "hidden": 64, "layout": "halves", "activation": "silu"}
    dtype = [torch.float16, torch.float32][seed % 2]
    call = random_call(draw, seed, dtype=dtype, id_dtype=torch.int64, **given)
    out = torch.full_like(call["x"], torch.nan, device=device)
    assert aiter_mx.fused_moe(**on(device, call), out=out) is out
    assert_layer(out.cpu(), call, device)


@pytest.mark.parametrize(("top_k", "shared", "bits"), [(4, 1, 32), (8, 0, 64), (9, 2, 32)])
def test_a_token_may_have_many_slots(
    device: torch.device, top_k: int, shared: int, bits: int
) -> None:
    fixed = variants()[1] | {"M": 5, "experts": 8, "top_k": top_k, "shared": shared}
    id_dtype = torch.int32 if bits == 32 else torch.int64
    call = random_call(random.Random(6), 6, id_dtype=id_dtype, dtype=torch.bfloat16, **fixed)
    assert_layer(aiter_mx.fused_moe(**on(device, call)).cpu(), call, device)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu2"])
def test_other_activations(device: torch.device, activation: str) -> None:
    fixed = variants()[1] | {"activation": activation, "M": 9, "dtype": torch.bfloat16}
    call = random_call(random.Random(8), 8, **fixed)
    out = aiter_mx.fused_moe(**on(device, call)).cpu()
    assert_layer(out, call, device)


def test_swiglu_takes_other_constants_and_tokens_several_shared_experts(
    device: torch.device,
) -> None:
    call = random_call(random.Random(4), 4, M=5, shared=2, has_map=True, **variants()[1])
    call |= {"alpha": 1.2, "beta": 0.5, "limit": 0.75}
    out = aiter_mx.fused_moe(**on(device, call)).cpu()
    assert_layer(out, call, device)
    usual = {**call, **dict(zip(CONSTANTS, SWIGLU, strict=True))}
    assert not torch.equal(out, aiter_mx.fused_moe(**on(device, usual)).cpu())


def test_slots_whose_expert_is_out_of_range_are_left_out_and_reported_on_request(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed = {"M": 5, "top_k": 2, "experts": 8, "shared": 0, "has_map": True, "biased": True}
    call = random_call(random.Random(5), 5, id_dtype=torch.int64, **variants()[0], **fixed)
    num_experts, E = len(call["expert_map"]), len(call["w1q"])
    here = [e for e, number in enumerate(call["expert_map"].tolist()) if number >= 0]
    call["topk_ids"] = torch.tensor((here * 10)[:10]).view(5, 2)

    def changed(name: str, at: tuple[int, ...], value: int) -> dict[str, Any]:
        tensor = call[name].clone()
        tensor[at] = value
        return on(device, {**call, name: tensor})

    beyond = (-1, num_experts, 1 << 31, (1 << 32) + here[0], -(1 << 40))  # the fourth ends in an id
    wrong = [changed("topk_ids", (2, 1), value) for value in beyond]
    outs = [aiter_mx.fused_moe(**arguments).cpu() for arguments in wrong]
    left_out = {**call, "topk_ids": wrong[0]["topk_ids"].cpu()}
    assert_layer(outs[0], left_out, device)
    assert all(torch.equal(outs[0], out) for out in outs)
    absent = changed("expert_map", (here[0],), E)
    unmapped = {**call, "expert_map": changed("expert_map", (here[0],), -1)["expert_map"].cpu()}
    assert_layer(aiter_mx.fused_moe(**absent).cpu(), unmapped, device)

    monkeypatch.setenv("AITER_MX_CHECK", "1")
    aiter_mx.fused_moe(**on(device, call))
    for value, arguments in zip(beyond, wrong, strict=True):
        with pytest.raises(ValueError, match=rf"the first is topk_ids\[2, 1\] = {value}"):
            aiter_mx.fused_moe(**arguments)
    with pytest.raises(ValueError, match=rf"expert_map\[{here[0]}\] is {E}"):
        aiter_mx.fused_moe(**absent)
    twice = changed("expert_map", (here[1],), int(call["expert_map"][here[0]]))
    with pytest.raises(ValueError, match=rf"expert_map\[{here[0]}\] and expert_map\[{here[1]}\]"):
        aiter_mx.fused_moe(**twice)


def test_tokens_without_an_expert_here_are_zero(device: torch.device) -> None:
    call = random_call(random.Random(0), 0, M=5, shared=0, has_map=False, top_k=2, experts=8)
    call["topk_ids"].fill_(-1)
    assert (aiter_mx.fused_moe(**on(device, call)) == 0).all()


def test_no_tokens_are_an_empty_result(device: torch.device) -> None:
    call = on(device, random_call(random.Random(0), 0, M=5, has_map=False))
    for name in ("x", "topk_ids", "topk_weights"):
        call[name] = call[name][:0]
    assert aiter_mx.fused_moe(**call).shape == (0, call["w1q"].shape[2])
    with pytest.raises(ValueError, match="activation must be one of"):
        aiter_mx.fused_moe(**{**call, "activation": "tanh"})


INT32 = partial(torch.zeros, dtype=torch.int32)
BAD = [
    ("x", lambda t: t.double(), TypeError, "x must be torch.bfloat16 or"),
    ("w2q", lambda t: t[:, :, :32], ValueError, r"w2q must be \[8, 64, 96\], got \[8, 64, 32\]"),
    ("w1s", lambda t: t.int(), TypeError, "w1s must be torch.uint8"),
    ("topk_weights", lambda t: t.half(), TypeError, "topk_weights must be torch.float32"),
    ("topk_ids", lambda t: t[:1], ValueError, r"topk_ids must be \[5, top_k\], got \[1, 2\]"),
    ("w1q", lambda t: t[:0], ValueError, r"w1q must have at least one expert, got \[0, 192, 64\]"),
    ("shared_experts", lambda n: 8, ValueError, "must be fewer than the 8 experts"),
    (
        "activation",
        lambda n: "tanh",
        ValueError,
        "activation must be one of silu, swiglu",
    ),
    (
        "activation",
        lambda n: "none",
        ValueError,
        "activation must be one of silu, swiglu",
    ),
    ("shared_experts", lambda n: -1, ValueError, "shared_experts must be at least 0, got -1"),
    ("w1q", lambda t: t[:, :0], ValueError, "w1q must have a multiple of 64 rows, got 0"),
    ("layout", lambda n: "thirds", ValueError, "layout must be one of halves, interleaved"),
    ("block_m", lambda n: 10, ValueError, "block_m must be a multiple of 4, got 10"),
    ("block_m", lambda n: 0, ValueError, "block_m must be at least 1, or None, got 0"),
    ("block_m", lambda n: "16", TypeError, "block_m must be a whole number, an int, got str"),
    ("num_experts", lambda n: 0, ValueError, "num_experts must be at least 1, or None, got 0"),
    ("out", lambda n: "here", TypeError, "out must be a tensor, got str"),
    ("reduce", lambda n: -1, ValueError, "reduce must be False or True, got -1"),
    ("reduce", lambda n: "sum", ValueError, "reduce must be False or True, got 'sum'"),
    ("num_experts", lambda n: 9, ValueError, "num_experts=9 but 8 routed experts are here"),
    ("expert_map", lambda t: INT32(0), ValueError, "expert_map must name at least one expert"),
    ("expert_map", lambda t: INT32(()), ValueError, r"must be \[num_experts\], got \[\]"),
]


@pytest.mark.parametrize(("name", "spoil", "error", "message"), BAD, ids=[bad[3] for bad in BAD])
def test_bad_arguments_are_refused(
    name: str, spoil: Any, error: type[Exception], message: str
) -> None:
    fixed = {"shared": 0, "has_map": False, "experts": 8, "hidden": 64, "intermediate": 96}
    call = random_call(random.Random(0), 0, M=5, top_k=2, **fixed)
    call[name] = spoil(call.get(name))
    with aiter_mx.simulate("gfx950"), pytest.raises(error, match=message):
        aiter_mx.fused_moe(**call)


@pytest.mark.parametrize(("name", "moved"), [("w1s", 1), ("w2s", 2)])
def test_scales_that_a_launch_cannot_load_are_refused(name: str, moved: int) -> None:
    fixed = {"shared": 0, "has_map": False, "experts": 8, "hidden": 64, "intermediate": 96}
    call = random_call(random.Random(0), 0, M=5, top_k=2, **fixed)
    memory = torch.empty(call[name].numel() + moved, dtype=torch.uint8)
    call[name] = memory[moved:].view(call[name].shape).copy_(call[name])
    message = f"{name} must start at a multiple of 4 bytes, got a view that is {moved} bytes"
    with aiter_mx.simulate("gfx950"), pytest.raises(ValueError, match=message):
        aiter_mx.fused_moe(**call)


def test_layer_of_many_tokens_is_four_launches() -> None:
    problem = FusedMoeProblem(M=8, hidden=6144, intermediate=768, E=128, top_k=4)
    ops = [aiter_mx.explain(op, arch="gfx950", **vars(part)) for op, part in problem.parts()]
    assert [route.backend for route in ops] == ["hip"] * 4
    assert problem.block_m == 16


def test_launches_are_as_many_as_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    launch = Program.launch

    def noted(program: Program, kernel: str, *arguments: Any) -> Any:
        launched.append(kernel.removeprefix("aiter_mx_"))
        return launch(program, kernel, *arguments)

    monkeypatch.setattr(Program, "launch", noted)
    fixed = variants()[0] | {"experts": 8, "top_k": 2}
    call = random_call(random.Random(1), 1, M=5, shared=1, has_map=True, **fixed)
    ids, weights = call["topk_ids"], call["topk_weights"]
    with aiter_mx.simulate("gfx950"):
        aiter_mx.fused_moe(**call)
        assert launched == ["moe_align", "moe_gemm_mfma", "moe_gemm_mfma", "moe_combine"]
        launched.clear()
        few = {name: call[name][:2] for name in ("x", "topk_ids", "topk_weights")}
        aiter_mx.fused_moe(**{**call, **few})
        assert launched == ["moe_up", "moe_down"]
        launched.clear()
        aiter_mx.moe_align(ids, 16, 8)
        assert launched == ["moe_align"]
        aiter_mx.moe_sort(ids, weights, 8, 16)
        assert launched == ["moe_align"] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("M", [1, 8, 64])
def test_thousand_launches_are_bitwise_equal(M: int) -> None:
    call = gpu_call(M)
    first = aiter_mx.fused_moe(**call)
    out = torch.empty_like(first)
    for _ in range(1000):
        out.fill_(torch.nan)
        aiter_mx.fused_moe(**call, out=out)
        assert torch.equal(out, first)


@pytest.mark.gpu
def test_capture_after_warmup_replays_other_routings() -> None:
    call = gpu_call(7)
    options = {"hidden": 1024, "intermediate": 256, "E": 33, "top_k": 4, "shared": 1}
    aiter_mx.warmup("fused_moe", M=7, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = aiter_mx.fused_moe(**call)
    for seed in (1, 2):
        fresh = gpu_call(7, seed)
        for name in ("x", "topk_ids", "topk_weights"):
            call[name].copy_(fresh[name])
        graph.replay()
        assert torch.equal(out, aiter_mx.fused_moe(**call))


def test_warmup_makes_every_launch_ready() -> None:
    with aiter_mx.simulate("gfx950"):
        routes = aiter_mx.warmup("fused_moe", M=[1, 5], hidden=64, intermediate=32, E=8, top_k=2)
    few, many = ["moe_up", "moe_down"], ["moe_align", "moe_gemm", "moe_gemm", "moe_combine"]
    assert [(route.op, route.backend) for route in routes] == [(op, "hip") for op in few + many]


def test_warmup_builds_all_launches_of_all_layers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def noted(requests: Sequence[BuildRequest], **_: Any) -> None:
        asked.append([request.source for request in requests])

    monkeypatch.setattr("aiter_mx.warm.build_all", noted)
    monkeypatch.setattr("aiter_mx.warm.bind", lambda *_: None)
    with aiter_mx.simulate("gfx950"):
        aiter_mx.warmup("fused_moe", M=[1, 40], hidden=64, intermediate=32, E=8, top_k=2)
    (sources,) = asked
    assert len(sources) == len(set(sources)) + 1, "both GEMMs are of one file"
    few, many = ("up_gfx950", "down_gfx950"), ("align", "mfma_gfx950", "combine_gfx950")
    assert set(sources) == {f"moe/{name}.cu" for name in (*few, *many)}


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"E": 0}, "E must be at least 1, got 0"),
        ({"M": -1}, "M must be at least 0, got -1"),
        ({"intermediate": 0}, "intermediate must be at least 1, got 0"),
        ({"intermediate": 48}, "H and I must be multiples of 32, got H=64 and I=48"),
        ({"shared": 8}, "shared experts must be fewer than the experts here, got 8 of 8"),
        ({"activation": "none"}, "activation must be one of .* relu2, got 'none'"),
    ],
    ids=str,
)
def test_layers_that_cannot_be_are_refused_by_name(field: dict[str, Any], message: str) -> None:
    layer = {"M": 1, "hidden": 64, "intermediate": 32, "E": 8, "top_k": 2}
    with pytest.raises(ValueError, match=message):
        aiter_mx.warmup("fused_moe", **{**layer, **field})


def test_builds_ahead_of_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from aiter_mx.cli.main import app

    monkeypatch.setenv("AITER_MX_CACHE_DIR", str(tmp_path))
    sizes = ["--hidden", "64", "--intermediate", "32", "--E", "8", "--top-k", "2"]
    command = ["build", "fused_moe", "--arch", "gfx950", "--M", "1,8", *sizes]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert "2 shapes, 6 kernel variants" in done.output


def test_real_size_layer_matches_float64() -> None:
    """Two tokens of a layer of eight experts, 6144 wide, 768 intermediate features."""
    fixed = {"M": 2, "experts": 8, "top_k": 4, "hidden": 6144, "intermediate": 768, "shared": 0}
    fixed |= {"has_map": False, "dtype": torch.bfloat16, "id_dtype": torch.int32, "biased": False}
    call = random_call(random.Random(0), 0, activation="silu", layout="halves", **fixed)
    for name in ("w1s", "w2s"):
        call[name] -= 3  # as many more products in a sum
    with aiter_mx.simulate("gfx950"):
        assert_layer(aiter_mx.fused_moe(**call), call, torch.device("cpu"))
