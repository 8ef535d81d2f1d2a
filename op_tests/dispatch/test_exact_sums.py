"""Sums as exact as fp32's, where they are asked for; and how inexact others may be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import aiter_mx
from aiter_mx.dispatch.cells import format_config
from aiter_mx.dispatch.dispatcher import route
from aiter_mx.dispatch.tables import load_rows
from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.linear import wgmma_fp8_rescaled_sm90 as rescaled
from aiter_mx.kernels.linear.wgmma_fp8_sm90 import ACCUMULATION_ERROR, MOST_ACCUMULATION_ERROR
from aiter_mx.kernels.promoted_gemm import wgmma_fp8_sm90 as of_128
from aiter_mx.ops import linear as linear_module
from aiter_mx.ops.grouped_gemm import grouped_gemm_ranges
from aiter_mx.ops.promoted_gemm import promoted_gemm
from aiter_mx.target import hardware, target_of, wants_exact_sums
from op_tests.dispatch.products import KINDS, draws, hopper_sums
from op_tests.dispatch.rows import write_table
from op_tests.mx_reference import random_mx
from op_tests.sums import stated_errors

SWITCH = "AITER_MX_EXACT_SUMS"
ON, OFF = ("1", "true", "yes", "on"), ("", "0", "false", "FALSE", "no", "Off")
SHAPES = [
    ("linear", {"M": 32, "N": 4096, "K": 4096}),
    ("linear", {"M": 64, "N": 2311, "K": 6144}),
    ("moe_gemm", {"M": 128, "N": 1536, "K": 6144, "E": 64, "top_k": 4}),
]


@pytest.mark.parametrize(("op", "shape"), SHAPES, ids=str)
def test_exact_sums_pass_over_what_adds_with_fewer_bits(
    op: str, shape: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = aiter_mx.explain(op, arch="sm_90a", **shape)
    assert usual.kernel == "wgmma_fp8"
    exact = aiter_mx.explain(op, arch="sm_90a", exact_sums=True, **shape)
    assert exact.kernel != "wgmma_fp8"
    assert "14 bits, and exact sums are asked for" in exact.reason
    monkeypatch.setenv(SWITCH, "1")
    assert aiter_mx.explain(op, arch="sm_90a", **shape) == exact
    assert aiter_mx.explain(op, arch="sm_90a", exact_sums=False, **shape) == usual


def test_no_row_gives_inexact_sums_where_exact_ones_are_asked_for() -> None:
    for op in ("linear", "moe_gemm", "grouped_gemm"):
        problems = load_rows("sm_90a", op).problems()
        several = [replace(problem, M=300) for problem in problems[::50]]  # rows for tiles
        for problem in [*problems[:: max(1, len(problems) // 150)], *several]:
            chosen = aiter_mx.explain(op, arch="sm_90a", exact_sums=True, **vars(problem))
            assert not chosen.kernel.startswith(("wgmma_fp8", "rescaled")), problem


def test_tests_allow_what_the_kernel_of_a_route_states() -> None:
    target = hardware("sm_90a")
    assert route("linear", target, LinearProblem(2048, 4096, 4096)).kernel == "wgmma_fp8_rescaled"
    few, many = (LinearProblem(rows, 4096, 4096) for rows in (32, 2048))
    assert stated_errors("linear", target, few)["accumulation_error"] == ACCUMULATION_ERROR
    assert stated_errors("linear", target, many) == {
        "accumulation_error": rescaled.ACCUMULATION_ERROR,
        "rescaling_error": rescaled.RESCALING_ERROR,
    }
    for problem in (few, many, replace(many, out_dtype="fp32")):
        exact = problem.out_dtype != "fp32"
        assert not stated_errors("linear", replace(target, exact_sums=exact), problem)


def test_exact_sums_of_16_bits_take_a_row_of_fp32_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = hardware("sm_90a")
    fast = {"split": 1, "row_groups": 1, "k_groups": 2, "depth": 4, "per_sm": 1}
    exact = {"split": 2, "rows": 80, "depth": 3}
    shape: dict[str, object] = {"gfx": "sm_90a", "cu_num": target.cu_num, "op": "linear"}
    shape |= {"M": 64, "N": 6016, "K": 2048, "backend": "hip", "source": "measured"}
    rows = [
        shape | {"out_dtype": out_dtype, "kernel": kernel, "config": format_config(config)}
        for out_dtype, kernel, config in (("bf16", "wgmma_fp8", fast), ("fp32", "wgmma_f16", exact))
    ]
    monkeypatch.setenv("AITER_MX_CONFIG", str(write_table(tmp_path / "mine.csv", *rows)))
    for M, out_dtype in ((64, "bf16"), (50, "bf16"), (64, "fp16"), (33, "fp16")):
        problem = LinearProblem(M, 6016, 2048, out_dtype)
        usual = route("linear", target, problem)
        assert (usual.kernel, usual.config) == ("wgmma_fp8", fast)
        chosen = route("linear", replace(target, exact_sums=True), problem)
        assert (chosen.kernel, chosen.config) == ("wgmma_f16", exact)
        assert "exact sums are asked for" in chosen.reason and "out_dtype=fp32" in chosen.reason
    monkeypatch.setenv("AITER_MX_CONFIG", str(write_table(tmp_path / "fp32.csv", rows[1])))
    assert route("linear", target, LinearProblem(64, 6016, 2048)).source == "envelope"


def test_exact_sums_of_groups_pass_over_a_row_of_rescaled_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {"M": 8192, "N": 4096, "K": 7168, "G": 4}
    row: dict[str, object] = {"gfx": "sm_90a", "cu_num": hardware("sm_90a").cu_num, **shape}
    row |= {"op": "grouped_gemm", "out_dtype": "bf16", "backend": "hip", "kernel": "rescaled"}
    row |= {"config": format_config({"ring_mib": 32}), "source": "measured"}
    monkeypatch.setenv("AITER_MX_CONFIG", str(write_table(tmp_path / "mine.csv", row)))

    def chosen(exact_sums: bool | None) -> aiter_mx.Route:
        return aiter_mx.explain("grouped_gemm", arch="sm_90a", exact_sums=exact_sums, **shape)

    assert (chosen(None).kernel, chosen(None).config) == ("rescaled", {"ring_mib": 32})
    exact = chosen(True)
    assert exact.kernel == "persistent"
    assert "adds with about 14 bits" in exact.reason
    monkeypatch.setenv(SWITCH, "1")
    assert chosen(None) == exact and chosen(False).kernel == "rescaled"


@pytest.mark.parametrize("text", [*ON, *OFF])
def test_the_variable_reads_as_words(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, text)
    assert wants_exact_sums() == (text in ON)
    assert target_of(torch.device("cpu")).exact_sums == (text in ON)
    assert target_of(torch.device("cpu"), exact_sums=False) == target_of(torch.device("cpu"), False)


def operands() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return (*random_mx(4, 64, generator), *random_mx(8, 64, generator))


def test_setting_it_later_counts_in_every_op(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, bool]] = []
    for name in ("linear", "grouped_gemm", "moe_gemm", "fused_moe_call"):
        module = __import__(f"aiter_mx.ops.{name}", fromlist=["bind"])

        def bind(op, target, *others, bind=module.bind):  # type: ignore[no-untyped-def]
            asked.append((op, target.exact_sums))
            return bind(op, target, *others)

        monkeypatch.setattr(module, "bind", bind)
        monkeypatch.setattr(module, "_plans", type(module._plans)())
    generator = torch.Generator().manual_seed(0)
    w1 = [t.view(4, 64, -1) for t in random_mx(4 * 64, 64, generator)]
    w2 = [t.view(4, 64, -1) for t in random_mx(4 * 64, 32, generator)]
    ids, shares = torch.tensor([[0, 1], [2, 3]]), torch.rand(2, 2)
    x = torch.randn(2, 64, generator=generator)
    lists = aiter_mx.moe_align(ids, 4, 4)

    def layer(**options: bool) -> Tensor:
        return aiter_mx.fused_moe(x, *w1, *w2, ids, shares, **options)

    def gemm(**options: bool) -> Tensor:
        xq = aiter_mx.quantize(x)
        return aiter_mx.moe_gemm(*xq, *w1, *lists, 4, 2, 4, a_div=2, **options)

    def activated(**options: bool) -> Tensor:
        xq = aiter_mx.quantize(x)
        return aiter_mx.moe_gemm_activated(*xq, *w1, *lists, 4, 2, 4, a_div=2, **options)[0]

    def linear(**options: bool) -> Tensor:
        return aiter_mx.linear(*operands(), **options)

    def groups(**options: bool) -> Tensor:
        return aiter_mx.grouped_gemm(*aiter_mx.quantize(x), *w1, ends, **options)

    def of_rows(**options: bool) -> Tensor:
        operands = (*aiter_mx.quantize(x), *w1, ends)  # in fp16, as one shape has one plan
        return aiter_mx.grouped_gemm_dgrad(*operands, None, torch.float16, **options)

    def masked(**options: bool) -> Tensor:
        rows = [t.view(1, *t.shape).expand(4, -1, -1).contiguous() for t in aiter_mx.quantize(x)]
        return grouped_gemm_ranges(*rows, *w1, None, counts, **options)

    ends, counts = torch.tensor([1, 1, 2, 2]), torch.tensor([1, 0, 2, 2])
    calls = ((linear, 1), (gemm, 1), (activated, 1), (layer, 4))
    calls += ((groups, 1), (of_rows, 1), (masked, 1))
    for call, binds in calls:
        for option in ({}, {"exact_sums": True}, {"exact_sums": False}):
            for setting in ("0", "1", "0"):
                monkeypatch.setenv(SWITCH, setting)
                call(**option)
        wanted = [option if option is not None else setting for option, setting in
                  ((None, False), (None, True), (True, True), (True, True), (False, False),
                   (False, False))]  # fmt: skip
        assert [exact for _, exact in asked] == [each for each in wanted for _ in range(binds)]
        asked.clear()
    assert linear_module._plans.by_call
    for call, _ in calls:
        with pytest.raises(TypeError, match="exact_sums must be True, False or None, got 'yes'"):
            call(exact_sums="yes")  # type: ignore[arg-type]


def test_kernels_of_other_architectures_are_exact() -> None:
    for op, shape in (*SHAPES, ("grouped_gemm", {"M": 8192, "N": 4096, "K": 7168, "G": 4})):
        both = [aiter_mx.explain(op, arch="gfx950", exact_sums=exact, **shape) for exact in (0, 1)]
        assert both[0] == both[1]
    assert not hardware("sm_90a").exact_sums


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("length", "usual", "most"),
    [
        (32, ACCUMULATION_ERROR, MOST_ACCUMULATION_ERROR),
        (128, of_128.ACCUMULATION_ERROR, of_128.MOST_ACCUMULATION_ERROR),
    ],
)
def test_the_stated_error_of_14_bits_is_a_bound(
    kind: str, length: int, usual: float, most: float
) -> None:
    a, b = draws(kind, 2000, length)
    assert torch.equal(a.float().to(torch.float8_e4m3fn).double(), a)
    assert torch.equal(b.float().to(torch.float8_e4m3fn).double(), b)
    error = (hopper_sums(a, b) - (a * b).sum(-1)).abs() / (a * b).abs().sum(-1)
    assert error.max() <= most
    if kind == "worst":
        assert error.max() > most * 0.75  # so that it is no loose bound
    if kind == "random":
        assert error.max() <= usual


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_the_bound_of_128_products_holds_on_the_gpu(kind: str) -> None:
    rows = 2048
    a, b = draws(kind, rows, 128)
    y = torch.empty(rows, rows, dtype=torch.float16, device="cuda")
    operands = [t.float().to(torch.float8_e4m3fn).cuda() for t in (a, b[None])]
    scales = [torch.full((*n, 1), 2.0**-5, device="cuda") for n in ((rows,), (1, rows // 128))]
    ends = torch.tensor([rows], dtype=torch.int32, device="cuda")
    assert promoted_gemm(operands[0], scales[0], operands[1], scales[1], None, ends, y)
    exact, most = (each.cuda() / 2**10 for each in (a @ b.T, a.abs() @ b.abs().T))
    rounding = 2.0**-11 * exact.abs() + 2.0**-25
    assert ((y.double() - exact).abs() <= of_128.MOST_ACCUMULATION_ERROR * most + rounding).all()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_the_bound_holds_on_the_gpu(kind: str) -> None:
    """10,000 blocks in all, in the columns of x, by a row of w each."""
    if aiter_mx.explain("linear", M=32, N=512, K=4096).kernel != "wgmma_fp8":
        pytest.skip("not the kernel in question")
    rows = 2016  # whole tiles of x
    a, b = draws(kind, rows)
    weights = torch.zeros(rows, 4096)
    weights[:, :32] = b
    w = weights.to(torch.float8_e4m3fn).cuda()
    scale = torch.full((rows, 128), 127, dtype=torch.uint8, device="cuda")
    for first in range(0, rows, 32):
        x = torch.zeros(32, 4096)
        x[:, :32] = a[first : first + 32]
        one = scale[:32].contiguous()
        y = aiter_mx.linear(x.to(torch.float8_e4m3fn).cuda(), one, w, scale).double().cpu()
        exact = a[first : first + 32] @ b.T
        most = a[first : first + 32].abs() @ b.abs().T
        assert ((y - exact).abs() <= MOST_ACCUMULATION_ERROR * most + 2.0**-8 * exact.abs()).all()
