"""DeepGEMM's call sites: against the product of what was quantised, and on every kind of scale."""

from __future__ import annotations

import random

import pytest
import torch

import aiter_mx
from aiter_mx.compat import deep_gemm
from aiter_mx.compat.deep_gemm import (
    expand_scales,
    fp8_gemm_nn,
    fp8_gemm_nt,
    fp8_gemm_tn,
    fp8_gemm_tt,
    get_mk_alignment_for_contiguous_layout,
    m_grouped_fp8_gemm_nt_contiguous,
    m_grouped_fp8_gemm_nt_masked,
    set_mk_alignment_for_contiguous_layout,
)
from op_tests.compat.deep_gemm_operands import (
    Pair,
    assert_within,
    both,
    calc_diff,
    coarse,
    exact,
    operands,
    quantize_coarse,
)
from op_tests.places import device_in

device = device_in("sim", "cuda")


KINDS = ["fp32 at 128", "e8m0 at 128", "1x32"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("psum", "zero_padding"), [(False, False), (False, True), (True, False), (True, True)]
)
def test_contiguous_is_close_to_the_unquantised_product(
    device: torch.device, kind: str, psum: bool, zero_padding: bool
) -> None:
    torch.manual_seed(1)
    sizes, aligned, (N, K) = [70, 0, 129, 1], [128, 0, 256, 5], (192, 576)
    layout, ends = torch.full((sum(aligned),), -1, dtype=torch.int32), []
    row, x, w = 0, torch.randn(sum(aligned), K), torch.randn(4, N, K)
    expected = torch.full((len(x), N), 7.0 if psum and not zero_padding else 0.0)
    for g, (size, room) in enumerate(zip(sizes, aligned, strict=True)):
        layout[row : row + size] = g
        expected[row : row + size] = x[row : row + size] @ w[g].T
        ends.append(row + size)
        row += room
    d = torch.full((len(x), N), 7.0, dtype=torch.bfloat16, device=device)
    a, b = ((q.to(device), s.to(device)) for q, s in both(kind, x, w))
    told = torch.tensor(ends, dtype=torch.int32) if psum else layout
    m_grouped_fp8_gemm_nt_contiguous(
        a, b, d, told.to(device), use_psum_layout=psum, ensure_zero_padding=zero_padding
    )
    d, mine = d.cpu(), layout >= 0
    assert calc_diff(d[mine], expected[mine]) < 1e-3
    assert torch.equal(d[~mine].float(), expected[~mine])


@pytest.mark.parametrize("kind", KINDS)
def test_masked_is_close_to_the_unquantised_product(device: torch.device, kind: str) -> None:
    torch.manual_seed(2)
    G, M, N, K = 3, 150, 160, 512
    masked = torch.tensor([150, 0, 37], dtype=torch.int32)
    x, w = torch.randn(G, M, K), torch.randn(G, N, K)
    d = torch.full((G, M, N), 7.0, dtype=torch.bfloat16, device=device)
    a, b = ((q.to(device), s.to(device)) for q, s in both(kind, x, w))
    m_grouped_fp8_gemm_nt_masked(a, b, d, masked.to(device), expected_m=60)
    d = d.cpu()
    for g, rows in enumerate(masked.tolist()):
        assert (d[g, rows:] == 7).all()
        if rows:
            assert calc_diff(d[g, :rows], x[g, :rows] @ w[g].T) < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize(("G", "M", "N", "K"), [(4, 8192, 4096, 7168), (8, 4096, 7168, 2048)])
def test_their_shapes_are_close_to_the_unquantised_product(G: int, M: int, N: int, K: int) -> None:
    torch.manual_seed(3)
    sizes = (torch.randint(int(0.7 * M), int(1.3 * M), (G,)) // 128 * 128).tolist()
    x = torch.randn(sum(sizes), K, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(G, N, K, device="cuda", dtype=torch.bfloat16)
    layout = torch.arange(G, device="cuda", dtype=torch.int32)
    layout = layout.repeat_interleave(torch.tensor(sizes, device="cuda"))
    d = torch.empty(sum(sizes), N, device="cuda", dtype=torch.bfloat16)
    a, b = quantize_coarse(x.float(), 1), quantize_coarse(w.float(), 128)
    m_grouped_fp8_gemm_nt_contiguous(a, b, d, layout)
    row = 0
    for g, size in enumerate(sizes):
        assert calc_diff(d[row : row + size], x[row : row + size] @ w[g].T) < 1e-3
        row += size


def test_scales_are_expanded_exactly() -> None:
    payload = torch.zeros(2, 130, 160, dtype=torch.float8_e4m3fn)
    scale = torch.tensor([2.0**-127, 2.0**-126, 1.0, 2.0**127, 0.75, 0.0, -2.0, float("inf")])
    scale = scale.view(2, 2, 2)
    found = expand_scales(payload, scale)
    assert (found.shape, found.dtype) == ((2, 130, 5), torch.uint8)
    assert found[0, 0].tolist() == [0, 0, 0, 0, 1] and found[0, 127].tolist() == [0, 0, 0, 0, 1]
    assert found[0, 128].tolist() == [127] * 4 + [254]
    assert (found[1] == 255).all()
    fine = torch.randint(0, 256, (2, 130, 5), dtype=torch.uint8)
    assert torch.equal(expand_scales(payload, fine.view(torch.float8_e8m0fnu)), fine)


def test_bad_arguments_are_refused() -> None:
    a, b = aiter_mx.quantize(torch.randn(8, 64)), aiter_mx.quantize(torch.randn(2, 32, 64))
    with pytest.raises(TypeError, match="alpha must be a number or None, got 'half'"):
        fp8_gemm_nt(a, aiter_mx.quantize(torch.randn(8, 64)), torch.empty(8, 8), alpha="half")
    d, layout = torch.empty(8, 32).bfloat16(), torch.zeros(8, dtype=torch.int32)
    for arguments, keywords, error, message in [
        ((a[0], b, d, layout), {}, TypeError, r"a must be a pair \(payload, scale\), got Tensor"),
        (
            ((a[0], a[1][:3]), b, d, layout),
            {},
            ValueError,
            r"must be \[8, 2\], \[8, 1\] or \[1, 1\]",
        ),
        (((a[0], a[1].int()), b, d, layout), {}, TypeError, "scales must be torch.float32"),
        ((a, b, d, layout.long()), {}, TypeError, "grouped_layout must be torch.int32"),
        ((a, b, d, None), {}, TypeError, "grouped_layout must be a tensor, got NoneType"),
        ((a, b, None, layout), {}, TypeError, "d must be a tensor, got NoneType"),
        (((a[0], None), b, d, layout), {}, TypeError, "a's scale must be a tensor, got NoneType"),
        ((a, b, d, layout.to("meta")), {}, ValueError, "grouped_layout is on meta, but a is on"),
        ((a, (b[0], b[1].to("meta")), d, layout), {}, ValueError, "must be there too, got meta"),
        ((a, b, d, layout[:7]), {}, ValueError, r"a must be \[M, K\] and grouped_layout \[M\]"),
        ((a, b, d[:7], layout), {}, ValueError, r"^d must be \[8, 32\], got \[7, 32\]"),
        ((a, b, d.double(), layout), {}, TypeError, "^d's dtype must be torch.bfloat16 or"),
        ((a, (b[0][0], b[1][0]), d, layout), {}, ValueError, r"and b \[G, N, K\], got"),
        ((a, b, d, layout), {"use_psum_layout": True}, ValueError, r"grouped_layout \[G\], got"),
    ]:
        with pytest.raises(error, match=message):
            m_grouped_fp8_gemm_nt_contiguous(*arguments, **keywords)
    with pytest.raises(ValueError, match=r"a must be \[G, M, K\], got \[8, 64\]"):
        m_grouped_fp8_gemm_nt_masked(a, b, d, layout[:2], 4)
    a, d, rows = aiter_mx.quantize(torch.randn(2, 4, 64)), d.view(2, 4, 32), layout[:2]
    for more, error, message in [
        ((d, rows.float(), 4), TypeError, "masked_m must be torch.int32 or torch.int64"),
        ((d, rows[:1], 4), ValueError, r"masked_m must be \[2\], got \[1\]"),
        ((d, None, 4), TypeError, "masked_m must be a tensor, got NoneType"),
        ((d, rows, 4.0), TypeError, "expected_m must be a whole number, an int, got float"),
        ((d, rows, -1), ValueError, "expected_m must not be negative, got -1"),
    ]:
        with pytest.raises(error, match=message):
            m_grouped_fp8_gemm_nt_masked(a, b, *more)


@pytest.mark.parametrize(("dtype", "N"), [(torch.bfloat16, 160), (torch.float32, 256)])
def test_scales_of_any_value_are_right_in_groups(
    device: torch.device, dtype: torch.dtype, N: int
) -> None:
    sizes, room, K = [70, 0, 130, 1], [128, 0, 256, 5], 416
    M = sum(room)
    layout = torch.full((M,), -1, dtype=torch.int32)
    ends, row = [], 0
    for g, (size, taken) in enumerate(zip(sizes, room, strict=True)):
        layout[row : row + size] = g
        ends.append(row + size)
        row += taken
    a, b = coarse(M, K, 1, 0), coarse(N, K, 128, 1, 4)
    on = [(p.to(device), s.to(device)) for p, s in (a, b)]
    strided = (on[0][0], on[0][1].t().contiguous().t())
    turned = (on[0][0], on[0][1].t().contiguous())
    n_major = (on[1][0].transpose(1, 2).contiguous().transpose(1, 2), on[1][1])
    psum = torch.tensor(ends, dtype=torch.int32, device=device)
    results = []
    for x, w, groups, options in [
        (on[0], on[1], layout.to(device), {}),
        (strided, n_major, layout.to(device), {"disable_ue8m0_cast": True}),
        (turned, on[1], psum, {"use_psum_layout": True, "recipe": (1, 128, 128)}),
    ]:
        d = torch.full((M, N), 7.0, dtype=dtype, device=device)
        m_grouped_fp8_gemm_nt_contiguous(x, w, d, groups, **options)
        results.append(d.cpu())
    assert all(torch.equal(d, results[0]) for d in results)
    assert not results[0][layout < 0].any()
    for g in range(4):
        mine = layout == g
        assert_within(results[0][mine], (a[0][mine], a[1][mine]), (b[0][g], b[1][g]), device)


def test_scales_of_any_value_are_right_in_masked_groups(device: torch.device) -> None:
    G, M, N, K = 3, 40, 64, 288
    a, b = coarse(M, K, 1, 2, G), coarse(N, K, 128, 3, G)
    masked = torch.tensor([40, 0, 7], dtype=torch.int32)
    d = torch.full((G, M, N), 7.0, device=device)
    on = [(p.to(device), s.to(device)) for p, s in (a, b)]
    m_grouped_fp8_gemm_nt_masked(*on, d, masked.to(device), 16)
    d = d.cpu()
    for g, rows in enumerate(masked.tolist()):
        assert (d[g, rows:] == 7).all()
        of_group = (a[0][g, :rows], a[1][g, :rows]), (b[0][g], b[1][g])
        assert_within(d[g, :rows], *of_group, device)


def test_extreme_scales_are_right(device: torch.device) -> None:
    M, N, K = 6, 64, 256
    a, b = coarse(M, K, 1, 4), coarse(N, K, 128, 5)
    a[1][:5, 0] = torch.tensor([0.0, float("nan"), 1e-30, 1e30, 3e38])
    b[1][0] = torch.tensor([1e30, 0.75])
    d = torch.empty(M, N, device=device)
    fp8_gemm_nt(*((p.to(device), s.to(device)) for p, s in (a, b)), d)
    d = d.cpu()
    assert d[1].isnan().all() and not d[[0, 2, 5]].isnan().any()
    wanted = exact(a, 1)[0] @ exact(b, 128)[0].T
    beyond = wanted[3:5].abs() > 1e39
    assert not d[3:5][beyond].isfinite().any()
    rows = [0, 2, 5]
    assert_within(d[rows], (a[0][rows], a[1][rows]), b, device)


def test_dense_products_of_all_orders_agree(device: torch.device) -> None:
    M, N, K = 9, 96, 320
    a, b = coarse(M, K, 1, 6), coarse(N, K, 128, 7)
    on = [(p.to(device), s.to(device)) for p, s in (a, b)]
    t = [(p.t().contiguous(), s.t().contiguous()) for p, s in on]
    results = []
    for product, x, w in [
        (fp8_gemm_nt, on[0], on[1]),
        (fp8_gemm_nn, on[0], t[1]),
        (fp8_gemm_tn, t[0], t[1]),
        (fp8_gemm_tt, t[0], on[1]),
    ]:
        d = torch.full((M, N), 7.0, dtype=torch.bfloat16, device=device)
        product(x, w, d)
        results.append(d.cpu())
    assert all(torch.equal(d, results[0]) for d in results)
    assert_within(results[0], a, b, device)
    c = torch.randn(M, N, device=device)
    d = c.clone()
    fp8_gemm_nt(*on, d, d, alpha=0.5)
    plain = torch.empty_like(c)
    fp8_gemm_nt(*on, plain)
    assert torch.equal(d, plain * 0.5 + c)


def test_powers_of_two_are_multiplied_as_mx(device: torch.device) -> None:
    x, w = torch.randn(5, 256), torch.randn(64, 256)
    a, b = quantize_coarse(x, 1), quantize_coarse(w, 128)
    d, of_bytes = (torch.empty(5, 64, device=device) for _ in range(2))
    on = [(p.to(device), s.to(device)) for p, s in (a, b)]
    fp8_gemm_nt(*on, d)
    fp8_gemm_nt(*((p, expand_scales(p, s)) for p, s in on), of_bytes)
    if device.type == "cpu":
        assert torch.equal(d, of_bytes)
    assert torch.allclose(d, of_bytes, rtol=1e-5)
    mixed = torch.empty_like(d)
    fp8_gemm_nt((on[0][0], expand_scales(*on[0])), (on[1][0], on[1][1] * 0.75), mixed)
    assert torch.allclose(mixed, d * 0.75, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [*KINDS, "any"])
@pytest.mark.parametrize("unit", [128, 37])
def test_a_group_may_have_several_runs(
    device: torch.device, kind: str, unit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With others and padding between them; of any lengths where the layout is read."""
    if unit % get_mk_alignment_for_contiguous_layout():
        monkeypatch.setenv("AITER_MX_CHECK", "1")
    torch.manual_seed(4)
    runs, (N, K) = [0, 1, -1, 0, 2, 1], (96, 320)
    owner = torch.tensor(runs, dtype=torch.int32).repeat_interleave(unit)
    x, w = torch.randn(len(owner), K), torch.randn(3, N, K)
    a, b = both("1x32" if kind == "any" else kind, x, w)
    if kind == "any":
        a = coarse(len(owner), K, 1, 3)
        b = coarse(3 * N, K, N, 5)
        b = b[0].view(3, N, K), b[1].view(3, 1, -1)
        x = a[0].float() * a[1].repeat_interleave(128, 1)[:, :K]
        w = b[0].float() * b[1].repeat_interleave(128, 2)[..., :K]
    d = torch.full((len(x), N), 7.0, dtype=torch.bfloat16, device=device)
    on = [(q.to(device), s.to(device)) for q, s in (a, b)]
    m_grouped_fp8_gemm_nt_contiguous(*on, d, owner.to(device))
    expected = torch.einsum("mk,mnk->mn", x, w[owner.long()])
    mine = owner >= 0
    for run in range(len(runs)):
        rows = slice(run * unit, (run + 1) * unit)
        if runs[run] >= 0:
            assert calc_diff(d[rows].cpu(), expected[rows]) < 1e-3
    assert not d.cpu()[~mine].any()


def drawn_layout(draw: random.Random, groups: int, blocks: int, each: int) -> torch.Tensor:
    """Blocks of rows dealt to groups or to nobody, the last rows of some of them nobody's."""
    owner = torch.empty(blocks, each, dtype=torch.int32)
    for block in owner:
        block[:] = draw.randrange(-1, groups)
        block[each - draw.choice([0, 0, 1, each // 2]) :] = -1
    return owner.flatten()


def in_order_of_groups(
    a: Pair, b: Pair, owner: torch.Tensor, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """The product with each group's rows side by side, put back in their order."""
    order = owner.argsort(stable=True)
    rows = a[0].view(torch.uint8)[order].view(a[0].dtype).to(device), a[1][order].to(device)
    by_group = torch.empty(len(owner), b[0].shape[1], dtype=dtype, device=device)
    m_grouped_fp8_gemm_nt_contiguous(rows, b, by_group, owner[order].to(device))
    result = torch.empty_like(by_group)
    result[order.to(device)] = by_group
    return result


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["1x32", "any"])
@pytest.mark.parametrize("alignment", [128, 64])
def test_runs_in_any_order_are_as_those_in_order(
    device: torch.device, kind: str, dtype: torch.dtype, alignment: int
) -> None:
    draw, (G, N, K) = random.Random(f"{kind} {dtype}"), (5, 96, 288)
    set_mk_alignment_for_contiguous_layout(alignment)
    try:
        for seed in range(2):
            owner = drawn_layout(draw, G, draw.randint(6, 12), alignment)
            a, b = operands(kind, len(owner), N, K, G, seed)
            on = [(q.to(device), s.to(device)) for q, s in (a, b)]
            d = torch.full((len(owner), N), 7.0, dtype=dtype, device=device)
            m_grouped_fp8_gemm_nt_contiguous(*on, d, owner.to(device))
            assert torch.equal(d, in_order_of_groups(a, on[1], owner, dtype, device))
            assert not d.cpu()[owner < 0].any() and d.cpu()[owner >= 0].any(1).all()
    finally:
        set_mk_alignment_for_contiguous_layout(128)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_unaligned_runs_beyond_the_number_of_groups_are_nan_on_a_gpu(kind: str) -> None:
    torch.manual_seed(5)
    owner = torch.tensor([0, 1, 0, -1, 0, 1, 2], dtype=torch.int32).repeat_interleave(40)
    x, w = torch.randn(len(owner), 256), torch.randn(3, 32, 256)
    d = torch.empty(len(x), 32, dtype=torch.bfloat16, device="cuda")
    m_grouped_fp8_gemm_nt_contiguous(
        *((q.cuda(), s.cuda()) for q, s in both(kind, x, w)), d, owner.cuda()
    )
    d, expected = d.cpu(), torch.einsum("mk,mnk->mn", x, w[owner.long()])
    assert d[160:].isnan().all() and not d[120:160].any()
    assert calc_diff(d[:120], expected[:120]) < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["1x32", "any"])
def test_a_replay_takes_the_runs_that_are_then_in_memory(kind: str) -> None:
    draw, device, (G, N, K) = random.Random(kind), torch.device("cuda"), (4, 160, 416)
    layouts = [drawn_layout(draw, G, 9, 128) for _ in range(3)]
    layouts.append(torch.arange(9, dtype=torch.int32).div(3).floor().int().repeat_interleave(128))
    a, b = operands(kind, 9 * 128, N, K, G, seed=1)
    on = [(q.to(device), s.to(device)) for q, s in (a, b)]
    now, d = layouts[0].to(device), torch.empty(9 * 128, N, dtype=torch.bfloat16, device=device)
    m_grouped_fp8_gemm_nt_contiguous(*on, d, now)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        m_grouped_fp8_gemm_nt_contiguous(*on, d, now)
    for owner in layouts[1:]:
        now.copy_(owner)
        d.fill_(7)
        graph.replay()
        assert torch.equal(d, in_order_of_groups(a, on[1], owner, d.dtype, device))


def test_groups_that_are_not_there_are_refused_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = aiter_mx.quantize(torch.randn(384, 64)), aiter_mx.quantize(torch.randn(2, 32, 64))
    d = torch.empty(384, 32, dtype=torch.bfloat16)
    layout = torch.tensor([0] * 128 + [1] * 128 + [-1] * 128, dtype=torch.int32)
    layout[300] = 5
    m_grouped_fp8_gemm_nt_contiguous(a, b, d, layout)
    assert not d[256:].any()
    monkeypatch.setenv("AITER_MX_CHECK", "1")
    with pytest.raises(ValueError, match=r"within -1 to 1, .* grouped_layout\[300\] is 5"):
        m_grouped_fp8_gemm_nt_contiguous(a, b, d, layout)
    ends = torch.tensor([100, 385], dtype=torch.int32)
    with pytest.raises(ValueError, match="grouped_layout must give groups of rows within 0 to 384"):
        m_grouped_fp8_gemm_nt_contiguous(a, b, d, ends, use_psum_layout=True)
    masked = (aiter_mx.quantize(torch.randn(2, 4, 64)), b, d[:8].view(2, 4, 32))
    with pytest.raises(ValueError, match="masked_m must give groups of rows within 0 to 4"):
        m_grouped_fp8_gemm_nt_masked(*masked, torch.tensor([4, 5], dtype=torch.int32), 4)


def test_payloads_may_come_as_their_bytes(device: torch.device) -> None:
    a, b = coarse(5, 128, 1, 8), coarse(32, 128, 128, 9)
    d, of_bytes = (torch.empty(5, 32, device=device) for _ in range(2))
    on = [(p.to(device), s.to(device)) for p, s in (a, b)]
    fp8_gemm_nt(*on, d)
    fp8_gemm_nt(*((p.view(torch.uint8), s) for p, s in on), of_bytes)
    assert torch.equal(d, of_bytes)


def test_their_names_are_there() -> None:
    assert get_mk_alignment_for_contiguous_layout() == 128
    for name in ("nt", "nn", "tn", "tt"):
        assert getattr(deep_gemm, f"fp8_gemm_{name}") is getattr(deep_gemm, f"fp8_fp4_gemm_{name}")
