"""``aiter_mx.batch_invariant``: a row's bits do not depend on the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import aiter_mx
from aiter_mx import invariance
from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.linear.wgmma_bf16_layout_sm90 import layout
from aiter_mx.target import hardware

ROWS = {"cpu": (*range(1, 9), 17, 33, 64, 150), "sim": (1, 2, 17, 33, 70)}
ROWS["cuda"] = (*range(1, 301), 1024, 8192)
EDGES = [edge + past for edge in (192, 224, 256, 288) for past in (-1, 0, 1)]
HUNDREDS = (*range(1, 162), *EDGES, 300, 1024)  # every number to a tile's, then around others
N, K, E, TOP_K = 96, 416, 6, 3


@pytest.fixture(params=["cpu", "sim", pytest.param("cuda", marks=pytest.mark.gpu)])
def where(request: pytest.FixtureRequest) -> Iterator[str]:
    with aiter_mx.simulate("gfx950") if request.param == "sim" else nullcontext():
        yield request.param


def on(where: str, *tensors: Tensor) -> list[Tensor]:
    return [tensor.to("cuda" if where == "cuda" else "cpu") for tensor in tensors]


def mx(*shape: int, seed: int) -> tuple[Tensor, Tensor]:
    """Payloads over the whole range and scales far apart: sums that depend on their order."""
    g = torch.Generator().manual_seed(seed)
    payload = torch.randint(0, 256, shape, generator=g, dtype=torch.uint8)
    payload[payload & 0x7F == 0x7F] = 0x31
    scale = torch.randint(118, 130, (*shape[:-1], shape[-1] // 32), generator=g, dtype=torch.uint8)
    return payload.view(torch.float8_e4m3fn), scale


Rows = Callable[[Tensor], Tensor]


def linear(where: str, features: int = N, depth: int = K, spoilt: bool = False) -> tuple[Rows, int]:
    weights = on(where, *mx(features, depth, seed=1))
    most = max(ROWS[where])
    xq, xs = on(where, *mx(most, depth, seed=2))
    if spoilt:
        xs[1::2] = 255
    return lambda rows: aiter_mx.linear(xq[rows], xs[rows], *weights, out_dtype=torch.float32), most


def grouped(where: str, spoilt: bool = False) -> tuple[Rows, int]:
    weights = on(where, *mx(2, N, K, seed=1))
    most = max(ROWS[where])
    xq, xs = on(where, *mx(most, K, seed=2))
    if spoilt:
        xs[1::2] = 255

    def compute(rows: Tensor) -> Tensor:
        """Pairs of rows are the first group's and the second's in turn."""
        group = rows // 2 % 2
        order = group.argsort(stable=True)
        ends = torch.stack(((group == 0).sum(), torch.tensor(len(rows), device=rows.device)))
        offsets = torch.nn.functional.pad(ends, (1, 0)).to(torch.int32)
        picked = rows[order]
        out = aiter_mx.grouped_gemm(
            xq[picked], xs[picked], *weights, offsets, out_dtype=torch.float32
        )
        return torch.empty_like(out).index_copy_(0, order, out)

    return compute, most


def experts(
    where: str,
    hidden: int = 96,
    intermediate: int = 64,
    spoilt: bool = False,
    top_k: int = TOP_K,
) -> tuple[Rows, int]:
    first, second = (E, 2 * intermediate, hidden), (E, hidden, intermediate)
    weights = on(where, *mx(*first, seed=1), *mx(*second, seed=2))
    most = max(ROWS[where])
    g = torch.Generator().manual_seed(3)
    (x,) = on(where, torch.randn(most, hidden, generator=g).bfloat16())
    if spoilt:
        x[1::2] = torch.nan
    ids, topk = on(
        where,
        torch.randint(0, E, (most, top_k), generator=g, dtype=torch.int32),
        torch.rand(most, top_k, generator=g),
    )
    return lambda rows: aiter_mx.fused_moe(x[rows], *weights, ids[rows], topk[rows]), most


@pytest.mark.parametrize("make", [linear, grouped, experts])
def test_bits_of_a_row_are_the_same_in_every_batch(
    make: Callable[[str], tuple[Rows, int]], where: str
) -> None:
    assert_same_bits(*make(where), where)


def small_experts(where: str) -> tuple[Rows, int]:
    return experts(where, hidden=64, intermediate=32, top_k=2)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["cpu", "sim"], indirect=True)
@pytest.mark.parametrize("make", [linear, grouped, small_experts])
def test_bits_of_a_row_are_the_same_in_every_batch_of_hundreds(
    make: Callable[[str], tuple[Rows, int]], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A layer takes ten times as long as the others; every third number has every remainder of one
    # that tiles divide.
    monkeypatch.setitem(ROWS, where, HUNDREDS[:: 3 if make is small_experts else 1])
    assert_same_bits(*make(where), where)


@pytest.mark.gpu
@pytest.mark.parametrize(("features", "depth"), [(300, 2592), (2304, 6144), (6144, 2048)])
def test_bits_of_a_linear_do_not_depend_on_the_tiles_that_hopper_takes(
    features: int, depth: int
) -> None:
    assert_same_bits(*linear("cuda", features, depth), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(("hidden", "intermediate"), [(256, 128), (1024, 512)])
def test_bits_of_experts_for_which_hopper_has_a_kernel_of_its_own(
    hidden: int, intermediate: int
) -> None:
    assert_same_bits(*experts("cuda", hidden, intermediate), "cuda")


def assert_same_bits(compute: Rows, most: int, where: str) -> None:
    device = "cuda" if where == "cuda" else "cpu"
    with aiter_mx.batch_invariant():
        whole = compute(torch.arange(most, device=device))
        for M in ROWS[where]:
            first = torch.arange(M, device=device)
            assert torch.equal(compute(first), whole[:M]), f"the first {M} rows"
        permuted = torch.randperm(most, generator=torch.Generator().manual_seed(5)).to(device)
        assert torch.equal(compute(permuted), whole[permuted])
        alone = torch.tensor([most // 2], device=device)
        assert torch.equal(compute(alone), whole[alone])


def test_rows_would_tell_where_the_order_depends_on_the_batch() -> None:
    with aiter_mx.simulate("gfx950"):
        compute, most = linear("sim", depth=3072)
        whole = compute(torch.arange(most))
        assert not all(torch.equal(compute(torch.arange(M)), whole[:M]) for M in (1, 17))


@pytest.mark.parametrize("make", [linear, grouped, experts])
def test_neighbours_that_are_nan_change_nothing(
    make: Callable[..., tuple[Rows, int]], where: str
) -> None:
    rows = torch.arange(40, device="cuda" if where == "cuda" else "cpu")
    with aiter_mx.batch_invariant():
        clean, found = (make(where, spoilt=spoilt)[0](rows) for spoilt in (False, True))
    assert torch.equal(found[::2], clean[::2])
    assert not clean.isnan().any() and found[1::2].isnan().all()


def test_x_yet_to_be_quantised_and_a_bias_too(where: str) -> None:
    (x, wq, ws, bias) = on(where, torch.randn(33, K).bfloat16(), *mx(N, K, seed=1), torch.randn(N))
    with aiter_mx.batch_invariant():
        whole = aiter_mx.linear(x, None, wq, ws, bias)
        for row in (0, 16, 32):
            assert torch.equal(aiter_mx.linear(x[row], None, wq, ws, bias), whole[row])


def test_features_that_no_kernel_covers_are_computed_all_the_same(where: str) -> None:
    xq, xs, wq, ws = on(where, *mx(5, K, seed=2), *mx(37, K, seed=1))
    with aiter_mx.batch_invariant():
        whole = aiter_mx.linear(xq, xs, wq, ws)
        assert torch.equal(aiter_mx.linear(xq[3:4], xs[3:4], wq, ws), whole[3:4])


def test_route_says_so_and_ends_with_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(**options: Any) -> aiter_mx.Route:
        return aiter_mx.explain("linear", M=1, N=N, K=K, arch="gfx950", **options)

    assert chosen().kernel != "persistent"
    with aiter_mx.batch_invariant():
        assert chosen().kernel == "persistent"
        assert "batch invariance asks for one order of addition" in chosen().reason
        with aiter_mx.batch_invariant():
            assert invariance.is_on()
        assert invariance.is_on()
    assert not invariance.is_on()
    assert chosen().kernel != "persistent"
    monkeypatch.setenv("AITER_MX_BATCH_INVARIANT", "1")
    assert chosen().kernel == "persistent"
    monkeypatch.setenv("AITER_MX_BATCH_INVARIANT", "always")
    with pytest.raises(ValueError, match="AITER_MX_BATCH_INVARIANT must be 0 or 1, got 'always'"):
        chosen()


def test_experts_on_hopper_have_one_kernel() -> None:
    """Whose tiles may differ: it adds up all of K in its order, whatever they are."""

    def chosen(M: int, block_m: int, K: int) -> str:
        shape = {"M": M, "N": 2048, "K": K, "E": 128, "top_k": 8, "block_m": block_m}
        with aiter_mx.batch_invariant():
            return aiter_mx.explain("moe_gemm", arch="sm_90a", **shape).kernel

    for K, kernel in ((768, "wgmma_f16"), (96, "grouped")):
        for M, block_m in ((1, 16), (300, 48), (8192, 128)):
            assert chosen(M, block_m, K) == kernel


@pytest.mark.parametrize("M", [1, 300, 8192, 65536])
def test_groups_on_hopper_have_one_kernel(M: int) -> None:
    with aiter_mx.batch_invariant():
        chosen = aiter_mx.explain("grouped_gemm", M=M, N=4096, K=7168, G=4, arch="sm_90a")
    assert chosen.kernel == "persistent"


@pytest.mark.parametrize(("N", "K"), [(1, 32), (96, 416), (2304, 6144), (6144, 2048), (9216, 6144)])
def test_linears_on_hopper_divide_k_as_its_shape_alone_says(N: int, K: int) -> None:
    """Into so many parts, whichever kernel and tiles the number of rows is for."""
    parts = set()
    for M in (1, 9, 17, 64, 65, 300, 2048, 8192):
        with aiter_mx.batch_invariant():
            chosen = aiter_mx.explain("linear", M=M, N=N, K=K, arch="sm_90a")
        config = chosen.config
        if M <= 64:
            assert M <= config["tile_m"] < max(2 * M, 9)
        assert chosen.kernel == "wgmma_bf16_few" if M <= 16 else "wgmma_bf16" in chosen.kernel
        if config.get("pairs", 0):  # which compute whole tiles
            assert not layout(hardware("sm_90a"), LinearProblem(M, N, K), config).part
        parts.add(config["split"] * config.get("k_groups", 1))
    assert len(parts) == 1


def test_plans_of_both_modes_are_kept_apart(where: str) -> None:
    xq, xs, wq, ws = on(where, *mx(1, K, seed=2), *mx(N, K, seed=1))
    before = aiter_mx.linear(xq, xs, wq, ws)
    with aiter_mx.batch_invariant():
        inside = aiter_mx.linear(xq, xs, wq, ws)
    torch.testing.assert_close(inside, before, rtol=2**-6, atol=0.5)
    assert torch.equal(aiter_mx.linear(xq, xs, wq, ws), before)
