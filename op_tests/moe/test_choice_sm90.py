"""Which of Hopper's kernels of ``moe_gemm`` is chosen, and how, and what they refuse."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest
import torch

from aiter_mx.dispatch.dispatcher import route
from aiter_mx.kernels.fused_moe import FusedMoeProblem
from aiter_mx.kernels.moe_gemm import MoeGemmProblem
from aiter_mx.kernels.moe_gemm.mma_ring_sm90 import MMA_RING
from aiter_mx.kernels.moe_gemm.wgmma_f16_sm90 import WGMMA_F16
from aiter_mx.kernels.moe_gemm.wgmma_fp8_sm90 import WGMMA_FP8
from aiter_mx.kernels.registry import key_of, stand_ins
from aiter_mx.kernels.spec import Config
from aiter_mx.ops.moe_gemm import Plan, compute
from aiter_mx.target import hardware
from op_tests.launches import Out, launch, moved, same_bytes
from op_tests.moe.operands import lists_of, random_weights
from op_tests.moe.reference import Layer, assert_rows
from op_tests.moe.subjects import PIECES
from op_tests.mx_reference import random_mx

SM90 = hardware("sm_90a")


def test_mma_ring_runs_where_experts_have_few_rows_and_others_where_more() -> None:
    few = MoeGemmProblem(16, 1536, 6144, 128, 4, 16)
    many = replace(few, M=1024, block_m=48)
    assert route("moe_gemm", SM90, few).kernel == "mma_ring"
    assert route("moe_gemm", SM90, many).kernel == "wgmma_fp8"
    assert route("moe_gemm", SM90, replace(many, out_dtype="fp32")).kernel == "wgmma_f16"
    assert route("moe_gemm", SM90, replace(many, K=6016)).kernel == "wgmma_f16"  # not of 512
    two = route("moe_gemm", SM90, replace(many, M=2048, block_m=80))
    assert (two.kernel, two.config["tiles"], two.config["groups"]) == ("wgmma_f16", 2, 2)
    wider = route("moe_gemm", SM90, replace(many, M=3000, block_m=128))
    assert (wider.kernel, wider.config["tiles"]) == ("wgmma_f16", 1)
    assert wider.config["col_tiles"] == 16
    activated = replace(many, M=3200, block_m=128, out_dtype="mxfp8", activation="silu")
    assert route("moe_gemm", SM90, activated).kernel == "rescaled_in_place"  # 100 rows an expert
    assert route("moe_gemm", SM90, replace(activated, K=2048)).kernel == "wgmma_f16"
    assert route("moe_gemm", SM90, replace(activated, M=60000)).kernel == "rescaled"
    uneven = replace(many, K=6112)
    assert route("moe_gemm", SM90, uneven).kernel == "rescaled_in_place"
    assert route("moe_gemm", SM90, replace(uneven, out_dtype="fp32")).kernel == "grouped"
    assert route("moe_gemm", SM90, replace(uneven, M=500, block_m=32)).kernel == "mma_ring"
    assert route("moe_gemm", SM90, replace(uneven, N=1544)).kernel == "mma_ring"  # not of 32
    assert WGMMA_F16.refusal(SM90, replace(many, K=6112)) == "K=6112 is not a multiple of 128"


def test_rows_of_the_next_power_of_two_and_of_silu_stand_in() -> None:
    alone = MoeGemmProblem(3, 1536, 6144, 128, 4, 16, "mxfp8", "swiglu_oai")
    key, others = key_of("moe_gemm"), stand_ins("moe_gemm")
    nearest = [(M, activation) for M, *_, activation in others(key(alone))]
    assert nearest == [(4, "swiglu_oai"), (3, "silu"), (4, "silu")]


@pytest.mark.parametrize("K", [1440, 2880])
@pytest.mark.parametrize("M", [2, 8, 16])
def test_lists_in_blocks_of_64_have_the_tiles_of_tables_where_k_is_uneven(M: int, K: int) -> None:
    """Tables have blocks as layers make them, of 16 ids for few rows an expert."""
    tabled = MoeGemmProblem(M, 2880, K, 128, 4, 16, "fp32", weights="by_t")
    chosen, own = (route("moe_gemm", SM90, replace(tabled, block_m=b)) for b in (64, 16))
    assert chosen.source == "envelope" != own.source
    assert (chosen.kernel, chosen.config) == (own.kernel, own.config)


def test_wgmma_f16_holds_whole_blocks_and_keeps_x_where_it_fits() -> None:
    of_layer = MoeGemmProblem(512, 1536, 6144, 128, 4, 32, early_routing=True)
    first, second = of_layer, replace(of_layer, N=6144, K=768)
    few = ((400, 24, 4), (400, 48, 6))
    for M, block_m, col_tiles in (*few, (1024, 48, 6), (1024, 128, 8), (2048, 80, 10)):
        for problem in (first, second):
            config = WGMMA_F16.configure(SM90, replace(problem, M=M, block_m=block_m))
            assert (config["col_tiles"], config["groups"] + config["tiles"]) == (col_tiles, 4)
            assert (config["slots"] == 0) == (problem is second)
    activated = replace(first, out_dtype="mxfp8", activation="silu")
    configs = [WGMMA_F16.configure(SM90, problem) for problem in (first, second, activated)]
    assert [config["col_tiles"] for config in configs] == [6, 4, 4]  # joined blocks: 6
    for rows in (1 << 24, (1 << 24) - 1):
        refusal = WGMMA_F16.refusal(SM90, replace(second, N=rows))
        assert refusal is not None and "E * N" in refusal
    assert WGMMA_F16.refusal(SM90, replace(second, N=(1 << 24) - 2)) is None
    one = replace(second, E=1, top_k=1)
    assert WGMMA_F16.refusal(SM90, replace(one, N=1 << 25)) is None
    assert "N=33554433" in (WGMMA_F16.refusal(SM90, replace(one, N=(1 << 25) + 1)) or "")


def test_layers_have_blocks_that_hold_most_experts_rows() -> None:
    blocks = {M: FusedMoeProblem(M, 6144, 768, 128, 4).block_m for M in (64, 512, 1024, 2048, 4096)}
    assert blocks == {64: 16, 512: 48, 1024: 48, 2048: 80, 4096: 64}
    narrow, broad = (FusedMoeProblem(512, 6144, features, 128, 4) for features in (384, 1536))
    assert (narrow.block_m, broad.block_m) == (32, 32)


def test_wgmma_fp8_is_for_results_that_hide_its_error() -> None:
    bf16 = MoeGemmProblem(512, 1536, 6144, 128, 4, 32)
    activated = replace(bf16, out_dtype="mxfp8", activation="silu")
    for problem in (bf16, activated):
        assert WGMMA_FP8.refusal(SM90, problem) is None
        for M, block_m in product((512, 768, 1024), (16, 32, 48)):
            # One code object, of which no block is split.
            moved = replace(problem, M=M, block_m=block_m)
            assert WGMMA_FP8.configure(SM90, moved) == {"col_tiles": 6, "depth": 3, "slots": 6}
            assert M == 512 or route("moe_gemm", SM90, moved).kernel == "wgmma_fp8"
    for out_dtype in ("fp16", "fp32"):
        refusal = WGMMA_FP8.refusal(SM90, replace(bf16, out_dtype=out_dtype))
        assert refusal is not None and out_dtype in refusal
    assert WGMMA_FP8.refusal(SM90, replace(bf16, K=640)) == "K=640 is not a multiple of 512"


def test_two_tiles_are_for_rows_that_x_has_no_room_to_stay_for() -> None:
    first, second = (MoeGemmProblem(2048, N, K, 128, 4, 80) for N, K in ((1536, 6144), (6144, 768)))
    assert [WGMMA_F16.configure(SM90, p)["tiles"] for p in (first, second)] == [2, 1]
    assert WGMMA_F16.configure(SM90, replace(first, M=1024, block_m=48))["tiles"] == 1
    assert all(c["tiles"] == 1 for c in WGMMA_F16.candidates(SM90, replace(first, K=6016)))


def test_rows_of_other_ranks_experts_do_not_count() -> None:
    layer = {"M": 64, "hidden": 6144, "intermediate": 768, "top_k": 4, "has_map": 1}
    for here in (128, 16):
        problem = FusedMoeProblem(E=here, num_experts=128, **layer)
        routes = [route(op, SM90, part) for op, part in problem.parts() if op == "moe_gemm"]
        assert [chosen.kernel for chosen in routes] == ["mma_ring", "mma_ring"]
    alone = MoeGemmProblem(64, 1536, 6144, 16, 4, 32)
    assert alone.rows_of_expert == pytest.approx(16)
    assert 2 < replace(alone, num_experts=128).rows_of_expert < 3


@pytest.mark.parametrize("name", ["xs", "ws"])
def test_scales_that_kernels_cannot_load_are_refused_before_a_launch(name: str) -> None:
    problem = MoeGemmProblem(3, 32, 512, 2, 1, 4)
    xq, xs = random_mx(3, 512, torch.Generator().manual_seed(0))
    wq, ws = random_weights(2, 32, 512, torch.Generator().manual_seed(1))
    lists = lists_of([0, 1, 1], 2, 4, 0, random.Random(0))
    launches: list[object] = []
    plan = Plan(problem, "hip", lambda tensors, addresses: launches.append(tensors))

    for bytes in (1, 2):
        given = {"xs": xs, "ws": ws, name: moved({"xs": xs, "ws": ws}[name], bytes)}
        message = f"{name} must start at a multiple of 4 bytes, got a view that is {bytes} bytes"
        with pytest.raises(ValueError, match=message):
            compute(plan, (xq, given["xs"], wq, given["ws"], *lists, None, None), None)
    assert not launches
    compute(plan, (xq, moved(xs, 4), wq, ws, *lists, None, None), None)
    assert len(launches) == 1


def test_every_warp_of_mma_ring_must_have_a_whole_chunk_of_k() -> None:
    config = {"row_tiles": 4, "col_tiles": 1, "k_warps": 4, "depth": 2, "groups": 1}
    assert MMA_RING.misfit(SM90, MoeGemmProblem(108, 192, 512, 1, 1, 64), config) is None
    assert MMA_RING.misfit(SM90, MoeGemmProblem(108, 192, 288, 1, 1, 64), config) is None
    refused = MMA_RING.misfit(SM90, MoeGemmProblem(108, 192, 256, 1, 1, 64), config)
    assert refused is not None and "k_warps must be at most 2" in refused


@pytest.mark.gpu
@pytest.mark.parametrize("config", PIECES, ids=["one_tile", "two_tiles"])
@pytest.mark.parametrize(("M", "block_m"), [(500, 8), (900, 16), (3000, 128), (2700, 4)])
def test_pieces_that_are_left_over_are_shared_whatever_they_cost(
    M: int, block_m: int, config: Config
) -> None:
    generator, draw = torch.Generator().manual_seed(M), random.Random(M)
    N, K, E, top_k = 1200, 256 * config["tiles"], 40, 4
    # One expert has half of the rows; some blocks have a single one, others none.
    chosen = [draw.choice([0, draw.randrange(E)]) for _ in range(M * top_k)]
    blocks: list[list[int]] = []
    experts: list[int] = []
    for expert in range(E):
        rows = [t for t, e in enumerate(chosen) if e == expert]
        while rows:
            count = draw.choice([0, 1, *[block_m] * 8])
            taken, rows = rows[:count], rows[count:]
            before = [-1] * draw.randrange(block_m if count == 1 else 1)
            blocks.append([*before, *taken, *[-1] * (block_m - len(before) - len(taken))])
            experts.append(expert)
            if draw.random() < 0.1:  # one of an expert that is not here
                blocks.append([-1] * block_m)
                experts.append(draw.choice([-1, E]))
    used = torch.tensor([len(blocks) * block_m], dtype=torch.int32)
    lists = (torch.tensor(blocks).int().flatten(), torch.tensor(experts).int(), used)
    layer = Layer(
        *random_mx(M * top_k, K, generator, scale_exponents=(-6, 6)),
        *random_weights(E, N, K, generator, scale_exponents=(-6, 6)),
        None,
        chosen,
        1,
    )
    problem = MoeGemmProblem(M, N, K, E, top_k, block_m, "fp32", max_blocks=len(blocks))
    out = Out((M * top_k, N), torch.float32)
    tensors = [layer.xq, layer.xs, layer.wq, layer.ws, *lists, None, None, out, None]
    found, again = (
        launch(WGMMA_F16, torch.device("cuda", 0), problem, config, tensors)[0] for _ in range(2)
    )
    assert_rows(found, layer)
    assert same_bytes(found, again)
