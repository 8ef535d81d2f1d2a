"""``moe_gemm`` against float64: in the simulator, in torch, and with ``-m gpu`` on a GPU."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import aiter_mx
from aiter_mx import launch
from aiter_mx.fallbacks import moe_gemm_torch
from aiter_mx.kernels.moe_gemm import MoeGemmProblem
from aiter_mx.kernels.moe_gemm.mfma_gfx950 import MFMA, PARAMS
from aiter_mx.kernels.spec import Config
from aiter_mx.target import target_of
from op_tests.moe.reference import Layer, assert_activated, assert_rows, random_weights
from op_tests.mx_reference import random_mx

SCHEDULES = ("random", "round-robin", "run-to-barrier")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
POISON = 0x5A
SWIGLU = (1.702, 1.0, 7.0)


@pytest.fixture(params=["sim", "torch", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    if request.param == "sim":
        with aiter_mx.simulate("gfx950"):
            yield torch.device("cpu")
    else:
        yield torch.device("cpu" if request.param == "torch" else "cuda")


def run_kernel(
    device: torch.device,
    problem: MoeGemmProblem,
    config: Config | None,
    tensors: tuple[Tensor | None, ...],
) -> tuple[Tensor, Tensor | None]:
    """The result of one kernel: ours with ``config``, or torch where it is None.

    It starts out poisoned, and has guards that must stay so.
    """
    target = target_of(device)
    shape = (problem.routed, problem.out_features)
    activated = problem.activation != "none"
    guarded = []
    for dtype, (rows, columns) in (
        (torch.uint8 if activated else DTYPES[problem.out_dtype], shape),
        (torch.uint8, (shape[0], shape[1] // 32)),
    ):
        whole = torch.empty(rows * columns + 128, dtype=dtype, device=device)
        whole.view(torch.uint8).fill_(POISON)
        guarded.append((whole, whole[64:-64].view(rows, columns)))
    out = guarded[0][1].view(torch.float8_e4m3fn) if activated else guarded[0][1]
    every = (*(t if t is None else t.to(device) for t in tensors), out)
    every = (*every, guarded[1][1] if activated else None)
    if config is None:
        moe_gemm_torch.run(problem, every, {})
    else:
        assert MFMA.refusal(target, problem) is None
        MFMA.check_config(config)
        run = launch.bind(MFMA, target, problem, config, 0)
        run(every, [0 if t is None else t.data_ptr() for t in every])
    for whole, _ in guarded:
        for guard in (whole[:64], whole[-64:]):
            assert (guard.view(torch.uint8) == POISON).all(), "wrote outside the result"
    return out.cpu(), guarded[1][1].cpu() if activated else None


def draw_experts(draw: random.Random, M: int, top_k: int, E: int) -> Tensor:
    """Experts that are uniform, skewed, or all the same; a few may be none."""
    kind = draw.choice(["uniform", "skewed", "one", "some none"])
    few = list(range(E)) if kind in ("uniform", "some none") else [draw.randrange(E)]
    few += [draw.randrange(E) for _ in range(2 * (kind == "skewed"))]
    few += [-1] * (2 * (kind == "some none"))
    ids = [[draw.choice(few) for _ in range(top_k)] for _ in range(M)]
    return torch.tensor(ids, dtype=torch.int32).view(M, top_k)


def route(
    draw: random.Random, topk_ids: Tensor, E: int, block_m: int, ids: str, weights: Tensor | None
) -> tuple[tuple[Tensor, ...], Tensor | None, list[int]]:
    """Lists for a kernel, its routing weights, and the expert of each routed row, E if absent.

    Some experts are not here; blocks have their ids in any order, among padding.
    """
    M, top_k = topk_ids.shape
    here = [draw.random() < 0.8 for _ in range(E)]
    numbers = [e if here[e] else -1 for e in range(E)]
    if ids == "aiter":
        # No numbering of its own: the kernel's experts are those of the ids.
        sorted_ids, sorted_weights, expert_ids, padded = aiter_mx.moe_sort(
            topk_ids, torch.ones(M, top_k) if weights is None else weights, E, block_m
        )
        weights = None if weights is None else sorted_weights
        numbers = list(range(E))
    else:
        expert_map = torch.tensor(numbers, dtype=torch.int32)
        sorted_ids, expert_ids, padded = aiter_mx.moe_align(topk_ids, block_m, E, expert_map)
        if len(sorted_ids):
            blocks = sorted_ids[: len(sorted_ids) // block_m * block_m].view(-1, block_m)
            blocks.copy_(blocks[:, torch.randperm(block_m)])
            sorted_ids = torch.where(
                sorted_ids == M * top_k,
                torch.tensor(draw.choice([M * top_k, -1, 2**31 - 1]), dtype=torch.int32),
                sorted_ids,
            )
    experts = [-1 if e < 0 else (e if numbers[e] >= 0 else E) for e in topk_ids.flatten().tolist()]
    return (sorted_ids, expert_ids, padded), weights, experts


def config_of(row_tiles: int, col_tiles: int, waves: int, unroll: int) -> dict[str, int]:
    return {"row_tiles": row_tiles, "col_tiles": col_tiles, "waves": waves, "unroll": unroll}


# Configuration, whether K / 32 is odd, dtype. With those of activations they take every value of
# every parameter.
SWEPT = [
    (config_of(1, 4, 2, 1), True, "fp32"),
    (config_of(1, 1, 3, 4), True, "fp16"),
    (config_of(2, 2, 6, 1), False, "bf16"),
    (config_of(1, 1, 16, 1), True, "fp32"),
    (config_of(2, 1, 1, 3), False, "bf16"),
    (config_of(1, 1, 12, 2), False, "fp32"),
]
CASES_EACH = 16


def random_layer(
    draw: random.Random,
    seed: int,
    N: int,
    K: int,
    dtype: str,
    activated: bool = False,
    size: tuple[int, int, int] | None = None,
) -> tuple[MoeGemmProblem, Layer, tuple[Tensor | None, ...]]:
    """A problem in all that is left to chance, its operands, and the kernel's tensors.

    size: M, top_k and a_div, where they are not.
    """
    generator = torch.Generator().manual_seed(seed)
    E, top_k = draw.randint(1, 6), draw.randint(1, 4)
    M, block_m = draw.choice([1, draw.randint(2, 40)]), draw.choice([4, 12, 16, 32, 64, 72])
    a_div, ids = draw.choice([1, top_k]), draw.choice(["vllm", "aiter"])
    M, top_k, a_div = size or (M, top_k, a_div)
    exponents = (-12, -6) if dtype == "fp16" else draw.choice([(-20, 20), (-6, 6)])
    if activated:
        exponents = (-11, -8)  # gate and up of a few units
    options = {"scale_exponents": exponents}
    weighted = not activated and draw.random() < 0.5
    weights = torch.rand(M, top_k, generator=generator) if weighted else None
    topk_ids = draw_experts(draw, M, top_k, E)
    lists, listed_weights, experts = route(draw, topk_ids, E, block_m, ids, weights)
    bias_dtype = draw.choice([None, *DTYPES.values()])
    bias = None if bias_dtype is None else torch.randn(E, N, generator=generator).to(bias_dtype)
    layer = Layer(
        *random_mx(-(-M * top_k // a_div), K, generator, **options),  # type: ignore[arg-type]
        *random_weights(E, N, K, generator, **options),
        bias,
        experts,
        a_div,
        None if weights is None else weights.flatten(),
    )
    names = {value: name for name, value in DTYPES.items()}
    problem = MoeGemmProblem(
        M=M,
        N=N,
        K=K,
        E=E,
        top_k=top_k,
        block_m=block_m,
        out_dtype=dtype,
        bias="none" if bias is None else names[bias.dtype],
        weights="none" if weights is None else "by_place" if ids == "aiter" else "by_t",
        ids=ids,
        a_div=a_div,
        max_blocks=len(lists[0]) // block_m,
    )
    return problem, layer, (layer.xq, layer.xs, layer.wq, layer.ws, *lists, listed_weights, bias)


@pytest.mark.parametrize(("config", "odd_blocks", "dtype"), SWEPT, ids=str)
def test_random_routings_match_float64(
    config: dict[str, int], odd_blocks: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(str(config))
    for seed in range(CASES_EACH):
        monkeypatch.setenv("AITER_MX_SIM_SCHEDULE", draw.choice(SCHEDULES))
        monkeypatch.setenv("AITER_MX_SIM_SEED", str(seed))
        K = 32 * (draw.randint(1, 20) * 2 - odd_blocks)
        N = draw.choice([1, draw.randint(2, 60), draw.randint(61, 150)])
        problem, layer, tensors = random_layer(draw, seed, N, K, dtype)
        with aiter_mx.simulate("gfx950"):
            out, _ = run_kernel(torch.device("cpu"), problem, config, tensors)
        assert_rows(out, layer, POISON)


@pytest.mark.parametrize("size", [(1, 5, 3), (9, 4, 7), (700, 4, 4), (1100, 3, 2)], ids=str)
def test_thousands_of_rows_and_any_a_div_match_float64(size: tuple[int, int, int]) -> None:
    config, odd_blocks, dtype = SWEPT[0]
    problem, layer, tensors = random_layer(
        random.Random(str(size)), 1, 70, 64 + 32 * odd_blocks, dtype, size=size
    )
    with aiter_mx.simulate("gfx950"):
        out, _ = run_kernel(torch.device("cpu"), problem, config, tensors)
    assert_rows(out, layer, POISON)
    reference, _ = run_kernel(torch.device("cpu"), problem, None, tensors)
    assert_rows(reference, layer, POISON)


def test_torch_matches_float64() -> None:
    draw = random.Random(1)
    for seed in range(24):
        dtype = draw.choice(list(DTYPES))
        N, K = draw.randint(1, 70), 32 * draw.randint(1, 8)
        problem, layer, tensors = random_layer(draw, seed, N, K, dtype)
        out, _ = run_kernel(torch.device("cpu"), problem, None, tensors)
        assert_rows(out, layer, POISON)


ACTIVATED = [
    (config_of(4, 1, 8, 1), "silu", "halves"),
    (config_of(4, 2, 4, 1), "swiglu_oai", "interleaved"),
    (None, "silu", "halves"),
    (None, "swiglu_oai", "interleaved"),
    (None, "swiglu_oai", "halves"),
]


@pytest.mark.parametrize(("config", "activation", "layout"), ACTIVATED, ids=str)
def test_activated_rows_are_quantised_as_the_exact_ones(
    config: dict[str, int] | None, activation: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(f"{activation} {layout}")
    for seed in range(CASES_EACH):
        monkeypatch.setenv("AITER_MX_SIM_SCHEDULE", draw.choice(SCHEDULES))
        monkeypatch.setenv("AITER_MX_SIM_SEED", str(seed))
        N, K = 64 * draw.randint(1, 3), 64 * draw.randint(1, 10)
        problem, layer, tensors = random_layer(draw, seed, N, K, "fp32", activated=True)
        swiglu = SWIGLU if seed % 2 else (1.2, 0.5, 3.0)
        more = dict(zip(("alpha", "beta", "limit"), swiglu, strict=True))
        fields = {"out_dtype": "mxfp8", "activation": activation, "layout": layout, **more}
        problem = replace(problem, **fields)
        with aiter_mx.simulate("gfx950"):
            out, scales = run_kernel(torch.device("cpu"), problem, config, tensors)
        assert scales is not None
        unwritten = [t for t, expert in enumerate(layer.experts) if expert == -1]
        assert (out.view(torch.uint8)[unwritten] == POISON).all()
        assert (scales[unwritten] == POISON).all()
        assert_activated(out, scales, layer, activation, layout == "interleaved", swiglu)


def test_sweeps_take_every_value_of_every_parameter() -> None:
    configs = [config for config, *_ in [*SWEPT, *ACTIVATED] if config is not None]
    for param in PARAMS:
        assert {config[param.name] for config in configs} == set(param.values), param.name


def gemm_call() -> dict[str, Any]:
    """Arguments of a call that is right."""
    generator = torch.Generator().manual_seed(0)
    topk_ids = torch.tensor([[0, 1], [2, 1], [1, 1]], dtype=torch.int32)
    sorted_ids, expert_ids, padded = aiter_mx.moe_align(topk_ids, 4, 3)
    xq, xs = random_mx(3, 64, generator, scale_exponents=(-6, 6))
    wq, ws = random_weights(3, 20, 64, generator, scale_exponents=(-6, 6))
    return {
        "xq": xq,
        "xs": xs,
        "wq": wq,
        "ws": ws,
        "sorted_token_ids": sorted_ids,
        "expert_ids": expert_ids,
        "num_tokens_post_padded": padded,
        "num_valid_tokens": 6,
        "top_k": 2,
        "block_m": 4,
        "a_div": 2,
    }


@pytest.fixture
def call() -> dict[str, Any]:
    return gemm_call()


def layer_of(call: dict[str, Any], **more: Any) -> Layer:
    return Layer(
        *(call[name].cpu() for name in ("xq", "xs", "wq", "ws")),
        more.get("bias"),
        [0, 1, 2, 1, 1, 1],
        2,
        more.get("weights"),
    )


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_op_matches_float64(device: torch.device, call: dict[str, Any], dtype: torch.dtype) -> None:
    if dtype == torch.float16:
        call["xs"] -= 12
    here = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in call.items()}
    bias, weights = torch.randn(3, 20), torch.rand(3, 2)
    assert_rows(aiter_mx.moe_gemm(**here, out_dtype=dtype).cpu(), layer_of(call), POISON)
    out = torch.full((6, 20), torch.nan, dtype=dtype, device=device)
    options = {"bias": bias.to(device), "topk_weights": weights.to(device)}
    same = aiter_mx.moe_gemm(**here, **options, out_dtype=dtype, out=out)
    assert same is out
    assert_rows(out.cpu(), layer_of(call, bias=bias, weights=weights.flatten()), POISON)


def test_e8m0_scales_are_taken_as_bytes(device: torch.device, call: dict[str, Any]) -> None:
    here = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in call.items()}
    first = aiter_mx.moe_gemm(**here)
    for name in ("xs", "ws"):
        here[name] = here[name].view(torch.float8_e8m0fnu)
    assert torch.equal(aiter_mx.moe_gemm(**here), first)


def test_no_rows_or_features_are_an_empty_result(
    device: torch.device, call: dict[str, Any]
) -> None:
    here = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in call.items()}
    none = aiter_mx.moe_gemm(**{**here, "wq": here["wq"][:, :0], "ws": here["ws"][:, :0]})
    assert none.shape == (6, 0)
    lists = aiter_mx.moe_align(torch.empty(0, 2, dtype=torch.int32, device=device), 4, 3)
    names = ("sorted_token_ids", "expert_ids", "num_tokens_post_padded")
    empty = {**here, **dict(zip(names, lists, strict=True)), "num_valid_tokens": 0}
    assert aiter_mx.moe_gemm(**empty).shape == (0, 20)
