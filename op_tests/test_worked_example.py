"""The kernel that docs/add_a_kernel.md adds: its source, its declaration, its suite, its row."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import aiter_mx
from aiter_mx.cli.main import app
from aiter_mx.dispatch.tables import read_table
from aiter_mx.kernels import linear
from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.spec import KernelSpec
from aiter_mx.launch import build_request
from aiter_mx.plan import Plans
from aiter_mx.target import hardware
from op_tests.conformance import DTYPES
from op_tests.linear import test_conformance as conformance
from op_tests.linear.operands import bias_as_large_as_outputs, operands
from op_tests.linear.subjects import Case, Subject
from op_tests.mx_reference import assert_close_to_reference
from op_tests.operands import SPREADS
from op_tests.spills import assert_no_spills

EXAMPLES = Path(__file__).resolve().parent.parent / "docs" / "examples"
TABLE = EXAMPLES / "linear_dot.csv"
N, K = 43, 1312  # of the table's row
GFX950 = hardware("gfx950")

# --8<-- [start:subject]
DOT = Subject(
    "dot",
    ("sim",),
    groups=[
        [Case(1, 43, 32, {"waves": 1}), Case(1, 1, 1056, {"waves": 1})],
        [Case(3, 5, 2080, {"waves": 8}), Case(3, 130, 96, {"waves": 8})],
    ],
    few=[Case(2, 37, 64, {"waves": 2}), Case(4, 21, 1312, {"waves": 4})],
    most_rows=4,
    width=(19, 1056),
    with_bias=[Case(3, 37, 1120, {"waves": 4})],
    underflow=2.0**-149,
)
# --8<-- [end:subject]


@pytest.fixture(scope="module")
def dot() -> KernelSpec:
    """The declaration, as it stands beside the page."""
    place = importlib.util.spec_from_file_location("linear_dot", EXAMPLES / "linear_dot.py")
    assert place is not None and place.loader is not None
    module = importlib.util.module_from_spec(place)
    place.loader.exec_module(module)
    return module.DOT


@pytest.fixture(autouse=True)
def registered(dot: KernelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is last in line, so that a row alone can choose it, and no call has met it yet."""
    monkeypatch.setattr(linear, "KERNELS", (*linear.KERNELS, dot))
    monkeypatch.setattr("aiter_mx.ops.linear._plans", Plans())


@pytest.fixture
def with_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AITER_MX_CONFIG", str(TABLE))


@pytest.fixture
def bench(dot: KernelSpec) -> Iterator[conformance.Bench]:
    with aiter_mx.simulate("gfx950"):
        yield conformance.Bench(DOT, dot, torch.device("cpu"))


def test_the_row_chooses_it_for_its_shape_and_what_it_stands_in_for(with_row: None) -> None:
    for M, dtype in itertools.product((3, 4), DTYPES):
        chosen = aiter_mx.explain("linear", M=M, N=N, K=K, out_dtype=dtype, arch="gfx950")
        assert (chosen.backend, chosen.kernel, chosen.config) == ("hip", "dot", {"waves": 2})
        assert chosen.source == f"{TABLE}:2"
        reason = f"tuned row {TABLE}:2 chooses hip/dot"
        assert chosen.reason.startswith(reason)
        if (M, dtype) == (3, "bf16"):
            assert chosen.reason == f"{reason}; it is for M=4, the nearest that is tuned"


def test_without_the_row_a_kernel_before_it_in_line_is_chosen() -> None:
    chosen = aiter_mx.explain("linear", M=4, N=N, K=K, arch="gfx950")
    assert chosen.kernel != "dot" and chosen.source == "envelope"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_calls_that_the_row_decides_match_float64(
    dtype: str, with_bias: bool, with_row: None
) -> None:
    for M in (3, 4):
        exponents = (-12, -6) if dtype == "fp16" else (-20, 20)
        drawn = operands(M, N, K, M, scale_exponents=exponents)
        bias = bias_as_large_as_outputs(drawn, DTYPES[dtype], M) if with_bias else None
        drawn[3][7, 40] = 255  # NaN for all that depends on the last block of row 7 of w
        with aiter_mx.simulate("gfx950"):
            assert aiter_mx.explain("linear", M=M, N=N, K=K, out_dtype=dtype).kernel == "dot"
            out = aiter_mx.linear(*drawn, bias, out_dtype=DTYPES[dtype])
        assert out[:, 7].isnan().all() and out.isnan().sum() == M
        assert_close_to_reference(out, *drawn, bias)


def test_x_in_bf16_is_quantised_by_a_launch_before(with_row: None) -> None:
    _, _, wq, ws = operands(3, N, K, 5)
    x = torch.randn(3, K, generator=torch.Generator().manual_seed(6)).bfloat16()
    xq, xs = aiter_mx.quantize(x)
    with aiter_mx.simulate("gfx950"):
        out = aiter_mx.linear(x, None, wq, ws, out_dtype=torch.float32)
    assert_close_to_reference(out, xq, xs, wq, ws)
    chosen = aiter_mx.explain("linear", M=3, N=N, K=K, x_dtype="bf16", arch="gfx950")
    assert chosen.kernel == "dot" and "it is quantize and then linear" in chosen.reason


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"arch": "sm_90a"}, "no dot kernel for sm_90a, only for gfx950"),
        ({"M": 5}, "M=5 is above 4, where arithmetic alone outlasts reading w"),
        ({"N": 1 << 21}, "N=2097152 is above 1048576, the most workgroups that dot launches"),
    ],
)
def test_what_it_does_not_cover_it_refuses_with_a_sentence(
    dot: KernelSpec, changes: dict[str, object], sentence: str
) -> None:
    shape = {"M": 4, "N": N, "K": K, "arch": "gfx950"} | changes
    target = hardware(shape.pop("arch"))
    assert dot.refusal(target, LinearProblem(**shape)) == sentence


def test_dispatch_tells_the_refusal_where_it_passes_it_over(
    dot: KernelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "KERNELS", (dot, *linear.KERNELS))
    chosen = aiter_mx.explain("linear", M=5, N=N, K=K, arch="gfx950")
    assert chosen.kernel != "dot"
    assert "hip/dot: M=5 is above 4" in chosen.reason
    first = aiter_mx.explain("linear", M=4, N=N, K=K, arch="gfx950")
    assert (first.kernel, first.source) == ("dot", "envelope")


def test_every_candidate_builds_and_none_spills(dot: KernelSpec) -> None:
    problem = LinearProblem(4, N, K)
    configs = dot.candidates(GFX950, problem)
    assert configs[0] == dot.configure(GFX950, problem)
    assert len(configs) == len(dot.params[0].values)
    for config in configs:
        dot.check_config(config)
    assert_no_spills(build_request(dot, GFX950, problem, config) for config in configs)


def test_isa_shows_it_and_what_a_launch_does() -> None:
    shape = ["--M", "2", "--N", "40", "--K", "96", "--waves", "2"]
    shown = CliRunner().invoke(app, ["isa", "dot", *shape, "--run"])
    assert shown.exit_code == 0, shown.output
    assert "linear/dot for gfx950" in shown.output
    assert "Modelled on an MI355X" in shown.output


def test_the_page_includes_what_runs_here() -> None:
    """By lines that a formatter of the page's Python would break."""
    text = (EXAMPLES.parent / "add_a_kernel.md").read_text(encoding="utf-8")
    sources = [f"docs/examples/{path.name}" for path in EXAMPLES.glob("linear_dot.*")]
    assert len(sources) == 3
    for included in (*sources, "op_tests/test_worked_example.py:subject"):
        assert f'\n--8<-- "{included}"\n' in text


def test_the_table_is_one_row_that_can_be_right(dot: KernelSpec) -> None:
    ((op, row),) = read_table(TABLE)
    assert (op, row.spec.name, row.refusal) == ("linear", "dot", None)


# -- what every kernel of the linear must do, by the suite -----------------------------------------
@pytest.mark.parametrize("group", range(len(DOT.groups)))
def test_any_shape_and_configuration(
    bench: conformance.Bench, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    conformance.test_any_shape_and_configuration_match_float64(bench, group, monkeypatch)


@pytest.mark.parametrize("spread_of", SPREADS)
def test_every_scale(bench: conformance.Bench, spread_of: str) -> None:
    conformance.test_scales_over_their_whole_range_are_exact(bench, spread_of)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(bench: conformance.Bench, dtype: str) -> None:
    conformance.test_outputs_and_biases_of_every_dtype_match_float64(bench, dtype)
    conformance.test_a_sum_is_rounded_to_nearest_with_ties_to_even(bench, dtype)


@pytest.mark.parametrize(
    "of_suite",
    [
        conformance.test_every_m_matches_float64,
        conformance.test_extreme_scales_that_cancel_are_exact,
        conformance.test_zeros_of_any_scale_add_nothing,
        conformance.test_nan_payloads_at_the_ends_of_a_row_do_not_reach_its_neighbours,
        conformance.test_scales_at_any_address_are_read_rightly,
    ],
    ids=lambda check: check.__name__.removeprefix("test_"),
)
def test_every_property(
    bench: conformance.Bench, of_suite: Callable[[conformance.Bench], None]
) -> None:
    of_suite(bench)


@pytest.mark.parametrize(
    "of_suite",
    [
        conformance.test_nan_payloads_and_scales_reach_their_outputs_alone,
        conformance.test_a_nan_scale_counts_even_where_the_payload_is_zero,
    ],
    ids=lambda check: check.__name__.removeprefix("test_"),
)
def test_every_nan(
    bench: conformance.Bench,
    of_suite: Callable[[conformance.Bench, pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of_suite(bench, monkeypatch)
