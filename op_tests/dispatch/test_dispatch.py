"""Routing: which row or rule decides, and what a malformed table says."""

from __future__ import annotations

import copy
import csv
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import aiter_mx
from aiter_mx.dispatch import dispatcher, tables
from aiter_mx.dispatch.cells import parse_config
from aiter_mx.dispatch.dispatcher import route
from aiter_mx.dispatch.route import Route
from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.registry import find_kernel, kernels_of, ops
from aiter_mx.kernels.spec import Key
from aiter_mx.plan import build_requests
from aiter_mx.target import CPU, hardware
from op_tests.dispatch.rows import GFX950, PROBLEM, UseTable, gemv_row, write_table


def test_exact_row_decides_and_the_reason_names_it(use_table: UseTable) -> None:
    legal = next(
        p for p in find_kernel("linear", "gfx950", "hip", "gemv").params if len(p.values) > 1
    )
    usual = parse_config(gemv_row()["config"])[legal.name]
    unusual = next(value for value in legal.values if value != usual)
    path = use_table(gemv_row(M=4), gemv_row(**{legal.name: unusual}))
    chosen = route("linear", GFX950, PROBLEM)
    assert (chosen.backend, chosen.kernel) == ("hip", "gemv")
    assert chosen.config[legal.name] == unusual
    assert chosen.source == f"{path}:3"
    assert "2.5 us" in chosen.reason
    assert chosen == route("linear", GFX950, PROBLEM)


def test_a_reason_tells_a_model_and_its_error(use_table: UseTable) -> None:
    row = gemv_row(source="model 8.3% unmeasured")
    use_table(row)
    reason = aiter_mx.explain("linear", arch="gfx950", **vars(PROBLEM)).reason
    told = "in 2.5 us (modelled, median error 8.3 %, faster than anything measured)"
    assert told in reason


def test_bias_does_not_change_the_row(use_table: UseTable) -> None:
    path = use_table(gemv_row())
    with_bias = LinearProblem(M=3, N=1000, K=96, out_dtype="bf16", bias="fp32")
    assert route("linear", GFX950, with_bias).source == f"{path}:2"


def test_later_file_wins_and_an_exact_cu_count_beats_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_table(tmp_path / "a.csv", gemv_row())
    write_table(tmp_path / "b.csv", gemv_row(cu_num=""), gemv_row(cu_num=80))
    (tmp_path / "c").mkdir()
    write_table(tmp_path / "c" / "d.csv", gemv_row(us=2.25))
    monkeypatch.setenv("AITER_MX_CONFIG", f"{tmp_path / 'a.csv'}:{tmp_path / 'b.csv'}")
    assert route("linear", GFX950, PROBLEM).source == f"{tmp_path / 'a.csv'}:2"
    monkeypatch.setenv("AITER_MX_CONFIG", f"{tmp_path / 'a.csv'}:{tmp_path / 'c'}")
    assert route("linear", GFX950, PROBLEM).source == f"{tmp_path / 'c' / 'd.csv'}:2"


def test_rows_for_another_cu_count_explain_why_they_do_not_apply(use_table: UseTable) -> None:
    use_table(gemv_row(cu_num=80))
    chosen = route("linear", GFX950, PROBLEM)
    assert chosen.source == "envelope"
    assert "for 80 CUs, not 256" in chosen.reason


def test_a_miss_names_the_nearest_shape_or_the_gpus_that_the_table_is_for(
    use_table: UseTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "configs_dir", lambda: tmp_path / "none")
    row = gemv_row(K=128)
    use_table(row | {"M": 8}, row | {"M": 4}, row | {"N": 10})
    reason = route("linear", GFX950, PROBLEM).reason
    assert "none of the 3 tuned shapes for gfx950 is this one" in reason
    assert "the nearest is M=4 N=1000 K=128 out_dtype=bf16" in reason
    other = replace(GFX950, cu_num=304)
    reason = route("linear", other, PROBLEM).reason
    assert "all tuned rows for gfx950 are for 256 CUs, not 304" in reason
    reason = route("linear", hardware("sm_90a"), PROBLEM).reason
    assert "no tuned table for linear on sm_90a" in reason


def test_nearest_tuned_rows_stand_in_and_say_so(use_table: UseTable) -> None:
    path = use_table(gemv_row(M=4), gemv_row(M=16))
    chosen = route("linear", GFX950, PROBLEM)
    assert chosen.source == f"{path}:2"
    assert "it is for M=4, the nearest that is tuned" in chosen.reason
    in_fp32 = LinearProblem(M=9, N=1000, K=96, out_dtype="fp32")
    chosen = route("linear", GFX950, in_fp32)
    assert chosen.source == f"{path}:3"
    assert "it is for M=16 and out_dtype=bf16" in chosen.reason
    assert route("linear", GFX950, LinearProblem(M=5, N=1000, K=96)).source == "envelope"


def test_envelope_names_each_refusal_on_the_way() -> None:
    problem = LinearProblem(M=4097, N=1000, K=96, out_dtype="bf16")
    chosen = route("linear", GFX950, problem)
    assert chosen.backend == "triton"
    assert "M=4097 is above 16" in chosen.reason and "M=4097 is above 4096" in chosen.reason
    assert len(set(chosen.reason.split("; "))) == len(chosen.reason.split("; "))
    simulated = aiter_mx.explain("linear", arch="gfx950", M=1, N=1000, K=96)
    assert simulated.kernel == "mfma"
    assert route("linear", CPU, problem).backend == "torch"


def test_a_layer_of_several_launches_says_where_its_routes_are() -> None:
    with pytest.raises(ValueError, match=r"fused_moe is several launches.*aiter_mx\.warmup"):
        aiter_mx.explain("fused_moe", M=1, hidden=64, intermediate=32, E=8, top_k=2)
    with pytest.raises(
        ValueError, match="unknown op 'fused_mo'; there are group_runs, grouped_gemm, "
    ):
        aiter_mx.explain("fused_mo", M=1)


def ours() -> frozenset[tuple[str, str]]:
    """The kernels of the linear that are ours."""
    return frozenset(("hip", k.name) for k in kernels_of("linear") if k.backend == "hip")


def test_a_kernel_that_yields_comes_after_the_others_of_its_backend() -> None:
    limited = LinearProblem(M=3, N=4640, K=6144)  # in no shipped table
    chosen = route("linear", GFX950, limited)
    assert (chosen.backend, chosen.kernel) == ("hip", "mfma")
    assert "mfma is as fast or faster by the model of time" in chosen.reason
    assert "mma_ring is faster" not in chosen.reason  # which is Hopper's
    chosen = route("linear", GFX950, limited, ours() - {("hip", "gemv")})
    assert (chosen.backend, chosen.kernel) == ("hip", "gemv")
    kernels = {
        (M, N, K): route("linear", GFX950, LinearProblem(M, N, K)).kernel
        for M, N, K in (
            (1, 4640, 6144),
            (1, 96, 10208),
            (1, 96, 10240),
            (1, 128, 12768),
            (2, 96, 10240),
        )
    }
    assert [shape for shape, kernel in kernels.items() if kernel == "gemv"] == [(1, 96, 10240)]


def test_simulated_gfx950_takes_our_kernels_but_never_triton() -> None:
    with aiter_mx.simulate("gfx950"):
        assert aiter_mx.explain("linear", M=1, N=64, K=16384).kernel == "gemv"
        assert aiter_mx.explain("linear", M=1, N=64, K=64).kernel == "mfma"
        assert aiter_mx.explain("linear", M=100, N=64, K=64).kernel == "mfma"
        assert aiter_mx.explain("linear", M=5000, N=64, K=64).kernel == "persistent"
        assert aiter_mx.explain("linear", M=5000, N=70, K=64).backend == "torch"


def test_failed_kernels_are_passed_over_when_told_so() -> None:
    chosen = route("linear", GFX950, PROBLEM, ours())
    assert chosen.backend == "triton"
    assert "hip/gemv: it failed before" in chosen.reason


def test_a_reason_is_written_when_asked_for_and_says_who_speaks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written: list[Key] = []

    def distance(shape: Key, key: Key) -> float:
        written.append(shape)
        return 0.0

    monkeypatch.setattr(dispatcher, "_distance", distance)
    chosen = route("linear", GFX950, replace(PROBLEM, M=4097))
    assert chosen.spec is find_kernel("linear", "gfx950", "triton", "dot_scaled")
    assert not written
    _, *passed_over = chosen.reason.split("; ")
    assert written
    assert all(clause.startswith(("hip/", "triton/")) for clause in passed_over)
    assert len(repr(chosen)) < 200 and "triton/dot_scaled" in repr(chosen)


def test_misses_are_logged_once_each_for_the_tuner(tmp_path: Path) -> None:
    log = tmp_path / "untuned.csv"
    script = (
        "import aiter_mx\n"
        "for M in (3, 4, 3):\n"
        "    aiter_mx.explain('linear', arch='gfx950', M=M, N=1000, K=96, bias='bf16')\n"
    )
    for _ in range(2):
        subprocess.run(
            [sys.executable, "-c", script],
            check=True,
            env={"AITER_MX_LOG_UNTUNED": str(log), "PATH": ""},
        )
    lines = list(csv.DictReader(log.open()))
    shape = "M={} N=1000 K=96 out_dtype=bf16 x_dtype=e4m3 pdl=False"
    assert [line["shape"] for line in lines] == [shape.format(M) for M in (3, 4, 3, 4)]
    expected = {"gfx": "gfx950", "cu_num": "256", "op": "linear"}
    assert all(expected.items() <= line.items() for line in lines)


@pytest.mark.parametrize("log", ["no/such/folder.csv", "."])
def test_a_list_of_misses_that_cannot_be_written_is_a_warning(
    log: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AITER_MX_LOG_UNTUNED", str(tmp_path / log))
    for M in (3, 5):
        problem = LinearProblem(M=M, N=1001, K=96 + 32 * len(log))
        assert route("linear", GFX950, problem).backend == "hip"
    (warning,) = [record.getMessage() for record in caplog.records]
    assert str(tmp_path / log) in warning and "cannot be written" in warning


def test_explain_takes_torch_dtypes_and_refuses_unknown_fields() -> None:
    by_dtype = aiter_mx.explain("linear", arch="gfx950", M=1, N=64, K=64, out_dtype=torch.float32)
    assert by_dtype == aiter_mx.explain("linear", arch="gfx950", M=1, N=64, K=64, out_dtype="fp32")
    with pytest.raises(ValueError, match="'L' is none of them"):
        aiter_mx.explain("linear", M=1, N=64, K=64, L=2)
    with pytest.raises(ValueError, match="'K' was not given"):
        aiter_mx.explain("linear", M=1, N=64)
    for wrong in ("1", 1.5, None):
        with pytest.raises(ValueError, match=f"M must be a whole number, got {wrong!r}"):
            aiter_mx.explain("linear", M=wrong, N=64, K=64)
    with pytest.raises(ValueError, match="pdl must be True or False, got 'no'"):
        aiter_mx.explain("linear", M=1, N=64, K=64, pdl="no")
    sizes = {"M": 1, "N": 64, "top_k": 2, "E": 4}
    with pytest.raises(ValueError, match="alpha must be a number, got '1'"):
        aiter_mx.explain("moe_gemm", **sizes, K=64, alpha="1")
    for name, wrong in {"M": -1, "top_k": 0, "E": 0, "shared": -1, "y_dtype": "fp8"}.items():
        with pytest.raises(ValueError, match=f"{name} must be"):
            aiter_mx.explain("moe_combine", **{**sizes, name: wrong})
    assert aiter_mx.explain("linear", arch="gfx950", M=torch.tensor(1), N=64, K=64).kernel == "mfma"
    with pytest.raises(ValueError, match="unknown op 'conv'"):
        aiter_mx.explain("conv", M=1)
    with pytest.raises(ValueError, match="gfx42"):
        aiter_mx.explain("linear", arch="gfx42", M=1, N=64, K=64)


@pytest.mark.parametrize("arch", ["gfx950", "sm_90a"])
@pytest.mark.parametrize(("M", "N"), [(0, 72), (5, 0), (0, 0)])
def test_an_empty_linear_needs_no_kernel(arch: str, M: int, N: int) -> None:
    chosen = aiter_mx.explain("linear", arch=arch, M=M, N=N, K=64)
    assert (chosen.backend, chosen.reason) == (
        "torch",
        "the result is empty, so nothing is launched",
    )
    assert build_requests(hardware(arch), [LinearProblem(M, N, 64)], [chosen]) == []


def test_a_warm_up_passes_over_empty_linears() -> None:
    with aiter_mx.simulate("gfx950"):
        routes = aiter_mx.warmup("linear", M=[0, 1], N=72, K=64)
    assert [chosen.kernel for chosen in routes] == ["reference", "mfma"]


def test_rows_for_overlap_or_unquantised_x_come_before_those_without(use_table: UseTable) -> None:
    plain, fused, overlapping = (
        gemv_row(M=4, x_dtype=x_dtype, pdl=pdl)
        for x_dtype, pdl in (("e4m3", False), ("bf16", False), ("e4m3", True))
    )
    path = use_table(plain, fused, overlapping)
    for fields, line in [
        ({}, 2),
        ({"pdl": True}, 4),
        ({"x_dtype": "bf16"}, 3),
        ({"x_dtype": "fp16"}, 3),
        ({"x_dtype": "bf16", "pdl": True}, 3),
        ({"out_dtype": "fp32", "pdl": True}, 4),
    ]:
        assert route("linear", GFX950, replace(PROBLEM, **fields)).source == f"{path}:{line}"
    use_table(plain)
    chosen = route("linear", GFX950, replace(PROBLEM, pdl=True, x_dtype="bf16"))
    assert "it is for M=4 and x_dtype=e4m3 and pdl=False, the nearest" in chosen.reason


def test_a_tables_row_computes_the_linear_after_a_quantisation_too(use_table: UseTable) -> None:
    problem = LinearProblem(M=16, N=96, K=2048, x_dtype="bf16")
    gemv = find_kernel("linear", "gfx950", "hip", "gemv")
    for waves in (2, 4):
        config = {"rows": 1, "waves": waves, "unroll": 1}
        assert gemv.parts(GFX950, problem, config)
        fields = {name: getattr(problem, name) for name in ("M", "N", "K", "x_dtype")}
        use_table(gemv_row(**fields, **config))
        chosen = route("linear", GFX950, problem)
        assert "it is quantize and then linear" in chosen.reason
        built = build_requests(GFX950, [problem], [chosen])
        assert [request.source[:6] for request in built] == ["quanti", "linear"]
        assert dict(built[1].defines)["MX_WAVES"] == waves


def test_a_route_can_be_sent_to_another_process_and_copied(use_table: UseTable) -> None:
    use_table(gemv_row())
    tuned = route("linear", GFX950, PROBLEM)
    for copied in (pickle.loads(pickle.dumps(tuned)), copy.deepcopy(tuned)):
        assert (copied, copied.reason) == (tuned, tuned.reason)
    for kernel in (kernel for op in ops() for kernel in kernels_of(op)):
        assert pickle.loads(pickle.dumps(Route(kernel, {}, "a test"))).spec is kernel
