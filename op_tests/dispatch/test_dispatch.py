"""Routing: which row or rule decides, and what a malformed table says."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import aiter_mx
from aiter_mx.dispatch import dispatcher, tables
from aiter_mx.dispatch.cells import SIDE_FILES, format_config, parse_config
from aiter_mx.dispatch.dispatcher import route
from aiter_mx.errors import TableError
from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.registry import find_kernel, kernels_of
from aiter_mx.kernels.spec import Key
from aiter_mx.paths import configs_dir
from aiter_mx.plan import build_requests
from aiter_mx.target import CPU, hardware

GFX950 = hardware("gfx950")
PROBLEM = LinearProblem(M=3, N=1000, K=96, out_dtype="bf16")  # in no shipped table


def gemv_row(**changes: object) -> dict[str, object]:
    """A legal row that chooses gemv for PROBLEM, with some cells changed."""
    config = find_kernel("linear", "gfx950", "hip", "gemv").configure(GFX950, PROBLEM)
    row: dict[str, object] = {"gfx": "gfx950", "cu_num": 256, "op": "linear"}
    row |= {"M": 3, "N": 1000, "K": 96, "out_dtype": "bf16", "backend": "hip", "kernel": "gemv"}
    named = {name: changes.pop(name, value) for name, value in config.items()}
    row["config"] = format_config({name: value for name, value in named.items() if value != ""})
    return row | {"us": 2.5, "triton_us": 9.5, "source": "measured"} | changes


def write_table(path: Path, *rows: dict[str, object]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_exact_row_decides_and_the_reason_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    legal = next(
        p for p in find_kernel("linear", "gfx950", "hip", "gemv").params if len(p.values) > 1
    )
    usual = parse_config(gemv_row()["config"])[legal.name]
    unusual = next(value for value in legal.values if value != usual)
    path = write_table(tmp_path / "mine.csv", gemv_row(M=4), gemv_row(**{legal.name: unusual}))
    monkeypatch.setenv("AITER_MX_CONFIG", str(path))
    chosen = route("linear", GFX950, PROBLEM)
    assert (chosen.backend, chosen.kernel) == ("hip", "gemv")
    assert chosen.config[legal.name] == unusual
    assert chosen.source == f"{path}:3"
    assert "2.5 us" in chosen.reason
    assert chosen == route("linear", GFX950, PROBLEM)


def test_a_reason_tells_a_model_and_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = gemv_row(source="model 8.3% unmeasured")
    monkeypatch.setenv("AITER_MX_CONFIG", str(write_table(tmp_path / "mine.csv", row)))
    reason = aiter_mx.explain("linear", arch="gfx950", **vars(PROBLEM)).reason
    told = "in 2.5 us (modelled, median error 8.3 %, faster than anything measured)"
    assert told in reason


def test_bias_does_not_change_the_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_table(tmp_path / "mine.csv", gemv_row())
    monkeypatch.setenv("AITER_MX_CONFIG", str(path))
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


def test_rows_for_another_cu_count_explain_why_they_do_not_apply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AITER_MX_CONFIG", str(write_table(tmp_path / "a.csv", gemv_row(cu_num=80))))
    chosen = route("linear", GFX950, PROBLEM)
    assert chosen.source == "envelope"
    assert "for 80 CUs, not 256" in chosen.reason


def test_a_miss_names_the_nearest_shape_or_the_gpus_that_the_table_is_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "configs_dir", lambda: tmp_path / "none")
    row = gemv_row(K=128)
    path = write_table(tmp_path / "a.csv", row | {"M": 8}, row | {"M": 4}, row | {"N": 10})
    monkeypatch.setenv("AITER_MX_CONFIG", str(path))
    reason = route("linear", GFX950, PROBLEM).reason
    assert "none of the 3 tuned shapes for gfx950 is this one" in reason
    assert "the nearest is M=4 N=1000 K=128 out_dtype=bf16" in reason
    other = replace(GFX950, cu_num=304)
    reason = route("linear", other, PROBLEM).reason
    assert "all tuned rows for gfx950 are for 256 CUs, not 304" in reason
    reason = route("linear", hardware("sm_90a"), PROBLEM).reason
    assert "no tuned table for linear on sm_90a" in reason


def test_nearest_tuned_rows_stand_in_and_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_table(tmp_path / "mine.csv", gemv_row(M=4), gemv_row(M=16))
    monkeypatch.setenv("AITER_MX_CONFIG", str(path))
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kernel": "gemw"}, "no kernel hip/gemw for gfx950; it has hip/gemv"),
        (
            {"gfx": "sm_90a", "kernel": "direct"},
            "direct is called mma_registers now: rename it, or make a new table with aiter-mx tune",
        ),
        ({"op": "lineal"}, "unknown op 'lineal'"),
        ({"gfx": "gfx90c"}, "unknown architecture 'gfx90c'"),
        ({"M": "three"}, "M must be a whole number, got 'three'"),
        ({"N": ""}, "key column 'N' is missing or empty"),
        ({"out_dtype": "int8"}, "int8"),
        ({"frobnicate": 1}, "unknown column 'frobnicate'; those of 'linear' are M, N, K"),
        ({"config": "rows"}, "config must be like 'rows=2 waves=1', each once, got 'rows'"),
        ({"config": "rows=1 rows=2"}, "each once, got 'rows=1 rows=2'"),
        ({"config": "rows=two"}, "rows must be a whole number, got 'two'"),
        ({"config": "split=1"}, "kernel 'gemv' has no parameter 'split'; it has rows"),
        ({"cu_num": "many"}, "cu_num must be a whole number"),
        ({"us": "fast"}, "us must be a number, got 'fast'"),
        ({"us": "nan"}, "us must be above 0 and finite"),
        ({"source": "guess"}, "source must be measured or model, got 'guess'"),
        ({"source": "model 8%x"}, "source must be measured or model, got 'model 8%x'"),
    ],
)
def test_malformed_row_is_an_error_with_file_and_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, object],
    message: str,
) -> None:
    path = write_table(tmp_path / "bad.csv", gemv_row(**changes), gemv_row(M=5, us=1))
    monkeypatch.setenv("AITER_MX_CONFIG", str(path))
    with pytest.raises(TableError) as caught:
        route("linear", GFX950, PROBLEM)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert message in str(caught.value)


def test_a_row_outside_its_kernels_envelope_is_an_error_where_it_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_table(tmp_path / "bad.csv", gemv_row(), gemv_row(M=32))
    monkeypatch.setenv("AITER_MX_CONFIG", str(path))
    assert route("linear", GFX950, PROBLEM).source == f"{path}:2"
    for M in (32, 17):  # its own shape, and one that it stands in for
        with pytest.raises(TableError, match=r"bad\.csv:3: hip/gemv does not cover this row: M=32"):
            route("linear", GFX950, replace(PROBLEM, M=M))
    with pytest.raises(TableError, match=r"bad\.csv:3: hip/gemv does not cover"):
        list(tables.read_table(path))


def test_illegal_parameter_values_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for param in find_kernel("linear", "gfx950", "hip", "gemv").params:
        for cell in (max(param.values) + 1, ""):
            path = write_table(tmp_path / f"{param.name}{cell}.csv", gemv_row(**{param.name: cell}))
            monkeypatch.setenv("AITER_MX_CONFIG", str(path))
            with pytest.raises(TableError, match=param.name):
                route("linear", GFX950, PROBLEM)


def test_files_that_are_no_tables_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = ",".join(gemv_row())
    for text, message in [
        ("", "empty"),
        ("gfx,cu_num,op\n", "column 'backend' is missing"),
        (
            f"{header.replace('config', 'rows,waves')}\n",
            r"1: column 'config' is missing; aiter-mx tables convert \S+\.csv brings an older",
        ),
        (f"{header}\ngfx950,256\n", ":2: has 2 fields, the header has"),
        (f"{header}\n{'1,' * 40}1\n", ":2: has 41 fields"),
        (f'{header}\n"gfx950', "cannot be read"),
        (b"\xff\xfe\x00", "cannot be read"),
    ]:
        path = tmp_path / f"{len(text)}.csv"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        monkeypatch.setenv("AITER_MX_CONFIG", str(path))
        with pytest.raises(TableError, match=message):
            route("linear", GFX950, PROBLEM)
    monkeypatch.setenv("AITER_MX_CONFIG", str(tmp_path / "absent.csv"))
    with pytest.raises(TableError, match="does not exist"):
        route("linear", GFX950, PROBLEM)


def test_shipped_tables_are_legal() -> None:
    for arch in ("gfx950", "sm_90a"):
        for path in tables.table_files(arch, "linear"):
            rows = [row for _, row in tables.read_table(path)]
            assert rows, path
            assert len({(row.problem, row.cu_num) for row in rows}) == len(rows), path


def test_shipped_tables_are_known_as_they_stand() -> None:
    shipped = {
        path.relative_to(configs_dir()).as_posix(): path
        for path in configs_dir().rglob("*.csv")
        if not path.name.endswith(SIDE_FILES)
    }
    found = {name: tables.digest_of(path) for name, path in shipped.items()}
    assert found == tables.shipped_digests(), "aiter-mx tables check --record"


def test_a_shipped_table_that_was_changed_is_checked_like_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "configs_dir", lambda: tmp_path)
    (tmp_path / "gfx950").mkdir()
    path = write_table(tmp_path / "gfx950" / "linear.csv", gemv_row(rows=5), gemv_row(M=4))
    digests = tmp_path / "digests.json"
    problem = replace(PROBLEM, M=4)
    with pytest.raises(TableError, match=r"linear\.csv:2: parameter 'rows'"):
        route("linear", GFX950, problem)
    tables._is_shipped.cache_clear()
    digests.write_text(json.dumps({"gfx950/linear.csv": tables.digest_of(path)}))
    assert route("linear", GFX950, problem).source == f"{path}:3"
    tables._is_shipped.cache_clear()


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


def test_rows_for_overlap_or_unquantised_x_come_before_those_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, fused, overlapping = (
        gemv_row(M=4, x_dtype=x_dtype, pdl=pdl)
        for x_dtype, pdl in (("e4m3", False), ("bf16", False), ("e4m3", True))
    )
    path = write_table(tmp_path / "mine.csv", plain, fused, overlapping)
    monkeypatch.setenv("AITER_MX_CONFIG", str(path))
    for fields, line in [
        ({}, 2),
        ({"pdl": True}, 4),
        ({"x_dtype": "bf16"}, 3),
        ({"x_dtype": "fp16"}, 3),
        ({"x_dtype": "bf16", "pdl": True}, 3),
        ({"out_dtype": "fp32", "pdl": True}, 4),
    ]:
        assert route("linear", GFX950, replace(PROBLEM, **fields)).source == f"{path}:{line}"
    monkeypatch.setenv("AITER_MX_CONFIG", str(write_table(tmp_path / "plain.csv", plain)))
    chosen = route("linear", GFX950, replace(PROBLEM, pdl=True, x_dtype="bf16"))
    assert "it is for M=4 and x_dtype=e4m3 and pdl=False, the nearest" in chosen.reason


def test_a_tables_row_computes_the_linear_after_a_quantisation_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = LinearProblem(M=16, N=96, K=2048, x_dtype="bf16")
    gemv = find_kernel("linear", "gfx950", "hip", "gemv")
    for waves in (2, 4):
        config = {"rows": 1, "waves": waves, "unroll": 1}
        assert gemv.parts(GFX950, problem, config)
        fields = {name: getattr(problem, name) for name in ("M", "N", "K", "x_dtype")}
        path = write_table(tmp_path / f"{waves}.csv", gemv_row(**fields, **config))
        monkeypatch.setenv("AITER_MX_CONFIG", str(path))
        chosen = route("linear", GFX950, problem)
        assert "it is quantize and then linear" in chosen.reason
        built = build_requests(GFX950, [problem], [chosen])
        assert [request.source[:6] for request in built] == ["quanti", "linear"]
        assert dict(built[1].defines)["MX_WAVES"] == waves
