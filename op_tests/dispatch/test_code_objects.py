"""How many code objects all numbers of rows take for one weight: a server meets any of them."""

from __future__ import annotations

import csv
import random
import time
from collections.abc import Iterable
from itertools import product

import pytest

from aiter_mx.dispatch.dispatcher import route
from aiter_mx.jit.build import BuildRequest
from aiter_mx.kernels.fused_moe import FusedMoeProblem
from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.paths import configs_dir
from aiter_mx.plan import build_requests
from aiter_mx.target import hardware

# On Hopper the tiles of wgmma_bf16 and the octets of wgmma_fp8 are code objects of their own.
MOST = {"gfx950": 12, "sm_90a": 20}
# Of the two GEMMs of a layer, which tables tune apart for each power of two of tokens, and of what
# is launched around them, which most layers share.
MOST_OF_LAYER = {"gfx950": 17, "sm_90a": 24}
MOST_BETWEEN = 3
LAYERS = (  # hidden, intermediate, experts and top_k
    (6144, 768, 128, 4),
    (2048, 768, 128, 8),
    (2880, 2880, 128, 4),
    (4096, 14336, 8, 2),
    (7168, 2048, 32, 8),
)
EDGES = (512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768)
ROWS = (*range(1, 321), *(M + d for M in EDGES for d in (-1, 0, 1)))
FEW_ROWS = (*(1, 2, 3, 5, 9, 17, 33, 64), *(round(65 * 2 ** (at / 5)) for at in range(45)))


def tuned(arch: str) -> list[tuple[int, int]]:
    """(N, K) of the weights of the table."""
    with (configs_dir() / arch / "linear.csv").open(newline="") as file:
        return sorted({(int(row["N"]), int(row["K"])) for row in csv.DictReader(file)})


def shapes(arch: str) -> list[tuple[int, int]]:
    """(N, K) of two dozen weights of the table, and of ten that it does not have."""
    rng = random.Random(22)
    drawn = [(rng.randrange(96, 20_000), 32 * rng.randrange(40, 512)) for _ in range(10)]
    return rng.sample(tuned(arch), 24) + drawn


def builds(arch: str, problems: Iterable[LinearProblem]) -> set[BuildRequest]:
    """What the linear itself is built of: what quantises x is every linear's, and built once."""
    target, listed = hardware(arch), list(problems)
    routes = [route("linear", target, problem) for problem in listed]
    requests = build_requests(target, listed, routes)
    return {request for request in requests if not request.source.startswith("quantize/")}


@pytest.mark.parametrize("x_dtype", ["e4m3", "bf16"])
@pytest.mark.parametrize("arch", MOST)
def test_few_code_objects_serve_all_numbers_of_rows(arch: str, x_dtype: str) -> None:
    counts = {
        (N, K): len(builds(arch, (LinearProblem(M, N, K, x_dtype=x_dtype) for M in ROWS)))
        for N, K in shapes(arch)
    }
    assert {shape: count for shape, count in counts.items() if count > MOST[arch]} == {}


@pytest.mark.parametrize("x_dtype", ["e4m3", "bf16"])
def test_any_weight_takes_as_few_on_gfx950(x_dtype: str) -> None:
    """All of the table, and as many of any size."""
    rng, arch, counts = random.Random(23), "gfx950", dict[tuple[int, int], int]()
    drawn = [(rng.randrange(1, 40_000), 32 * rng.randrange(1, 900)) for _ in range(40)]
    drawn += [(32 * rng.randrange(1, 1000), 32 * rng.randrange(1, 900)) for _ in range(80)]
    for N, K in tuned(arch) + drawn:
        problems = (LinearProblem(M, N, K, x_dtype=x_dtype) for M in FEW_ROWS)
        counts[N, K] = len(builds(arch, problems))
    assert max(counts.values()) == MOST[arch] and min(counts.values()) > 1


@pytest.mark.parametrize("arch", MOST)
def test_all_rows_to_32768_are_routed_in_seconds(arch: str) -> None:
    begin = time.process_time()
    found = builds(arch, (LinearProblem(M, 2304, 6144) for M in range(1, 32_769)))
    assert len(found) <= MOST[arch]
    assert time.process_time() - begin < 20  # 2 on a core that nobody shares


@pytest.mark.parametrize(("arch", "layer"), [*product(MOST_OF_LAYER, LAYERS)])
def test_few_code_objects_serve_all_numbers_of_tokens(arch: str, layer: tuple[int, ...]) -> None:
    target, gemms, others = hardware(arch), set(), set()
    for op, part in (part for M in ROWS for part in FusedMoeProblem(M, *layer).parts()):
        requests = build_requests(target, [part], [route(op, target, part)])
        (gemms if op == "moe_gemm" else others).update(requests)
    assert len(gemms) <= MOST_OF_LAYER[arch]
    assert len(others - gemms) <= MOST_BETWEEN
