"""``aiter-mx tune`` and ``aiter-mx tables``, by the simulator where something has to run."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
import torch

import aiter_mx
import aiter_mx.jit.build
from aiter_mx import plan
from aiter_mx.cli.tune import with_fields
from aiter_mx.dispatch import dispatcher
from aiter_mx.dispatch.tables import read_table
from aiter_mx.kernels import linear as kernels
from aiter_mx.kernels.grouped_gemm import GroupedGemmProblem
from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.moe_gemm import MoeGemmProblem
from aiter_mx.kernels.spec import KernelSpec
from aiter_mx.sim.timing.constants import shipped
from aiter_mx.sim.timing.floor import floor
from aiter_mx.target import hardware
from aiter_mx.tuning.candidates import Candidate
from aiter_mx.tuning.modelled import ModelBench
from aiter_mx.tuning.shapes import model_shapes, read_shapes
from aiter_mx.tuning.share import Alone
from aiter_mx.tuning.table import columns_of, read_rows, side_files, write_table
from op_tests.cli.conftest import assert_refused

SHAPE = ("--M", "2", "--N", "96", "--K", "128")
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure on")


def poisoned(spec: KernelSpec) -> KernelSpec:
    """A kernel that is fast, as it reads but half of K, and wrong."""
    module = spec.module
    assert module is not None

    names = [argument.name for argument in module.args if argument.kind != "pointer"]

    def half(target, problem, config):
        values = dict(zip(names, module.scalars(target, problem, config), strict=True))
        return tuple(v // 2 if name == "K" else v for name, v in values.items())

    return replace(spec, name=f"half_{spec.name}", modules=(replace(module, scalars=half),))


def test_modelled_table_and_a_poisoned_kernel(command, tmp_path, monkeypatch) -> None:
    gemv = kernels.KERNELS[0]
    monkeypatch.setattr(kernels, "KERNELS", (poisoned(gemv), *kernels.KERNELS))
    table, timings = tmp_path / "linear.csv", tmp_path / "timings.csv"
    shape = ("--M", 1, "--N", 64, "--K", 10240)  # of a row that gemv has
    tune = ("tune", "linear", *shape, "--arch", "gfx950", "--table", table, "--most", 2)
    status, out, err = command(*tune, "--timings", timings)
    assert (status, err) == (0, "")
    assert "1 rows modelled in" in out
    assert "of them wrong, as hip/half_gemv" in out
    (row,) = read_rows(table, "linear").values()
    assert row["kernel"] in ("gemv", "mfma")
    assert re.match(r"model \d+\.\d%( extrapolated)?( unmeasured)?$", row["source"])
    assert float(row["us"]) > 0 and float(row["rel_err"]) < 4e-3
    lines = timings.read_text().splitlines()
    assert sum("half_gemv" in line and "wrong" in line for line in lines) >= 1
    assert sum("half_gemv" not in line for line in lines) >= 3


def test_the_model_knows_of_the_unit_that_takes_addresses() -> None:
    """64 rows of x are more to load than any other unit has to do."""
    values = (("row_tiles", 1), ("fold", 1), ("waves", 6), ("unroll", 1), ("blocks", 1))
    candidate = Candidate("linear", "gfx950", "hip", "mfma", values)
    bench = ModelBench("linear", LinearProblem(64, 6144, 1536))
    bench.admit(candidate)
    found = floor(bench.launches(candidate)[0])
    groups, steps, tiles, cycles = 2, 6, 5, 80  # docs/kernels/gemv.md counts these
    fours = groups * steps * tiles * cycles * shipped().address_cycles
    data = groups * steps * tiles * 16 * 256 * 33 / 32 / shipped().data_bytes_a_cycle
    assert found.units["address"] == pytest.approx((fours + data) / 2400, rel=0.05)
    assert found.busiest in ("address", "lines", "memory")


@no_gpu
def test_a_table_is_checked_row_by_row_and_every_variant_compiled(
    command, tmp_path, monkeypatch
) -> None:
    table = tmp_path / "linear.csv"
    command("tune", "linear", *SHAPE, "--arch", "gfx950", "--table", table, "--most", 1)
    with monkeypatch.context() as nothing_to_compile_with:
        nothing_to_compile_with.setattr("aiter_mx.jit.compiler.subprocess.Popen", None)
        status, out, _ = command("tables", "check", table)
    assert status == 0
    assert "1 kernel variants in all, which --build compiles" in out
    status, out, _ = command("tables", "check", "--build", table)
    assert status == 0
    assert "1 rows, 1 kernel variants" in out
    assert "0 of 1 kernel variants are to be compiled" in out
    assert "1 variants compile" in out
    text = table.read_text()
    header, row = text.splitlines()
    for broken, message in [
        (f"{text}{row}\n", "is for the same shape as"),
        (text.replace(",hip,", ",hip,x"), "no kernel hip/x"),
        (f"{header}\n{row[:20]}\n", "fields, the header has"),
    ]:
        table.write_text(broken)
        status, _, err = command("tables", "check", table)
        assert status == 1
        assert err.startswith(f"error: {table}:")
        assert message in err


def test_rows_that_were_tuned_with_other_sources_are_told_from_those_of_another_kernel(
    command, tmp_path, monkeypatch
) -> None:
    table, csrc = tmp_path / "linear.csv", tmp_path / "csrc"
    tune = ("tune", "linear", "--N", 64, "--K", 10240, "--arch", "gfx950", "--most", 1)
    command(*tune, "--M", "1,8", "--table", table)
    status, out, _ = command("tables", "check", "--build", table)
    assert status == 0
    assert "have changed" not in out
    shutil.copytree(aiter_mx.jit.build.csrc_dir(), csrc)
    header = csrc / "include/common/target.h"
    header.write_text(f"// More to say.\n{header.read_text()}")
    monkeypatch.setattr(aiter_mx.jit.build, "csrc_dir", lambda: csrc)
    status, out, err = command("tables", "check", "--build", table)
    assert (status, err) == (0, "")
    assert re.search(r"the sources of gemv \(1 row\), mfma \(1 row\) have changed since", out)
    assert "2 of them compile to the same machine code" in out
    assert "other machine code" not in out
    assert "2 of them are not known" in command("tables", "check", table)[1]
    provenance, _ = side_files(table)
    rows = provenance.read_text().splitlines()
    code = rows[0].split(",").index("code")
    cells = [row.split(",") for row in rows]
    for changed, message in [
        ("0" * 16, r"1 of them compile to other machine code.* \(lines 3\)"),
        ("", "1 of them are not known to compile to the same machine code still"),
    ]:
        cells[2][code] = changed
        provenance.write_text("\n".join(map(",".join, cells)) + "\n")
        status, out, _ = command("tables", "check", "--build", table)
        assert status == 0
        assert re.search(message, out)
        assert "1 of them compile to the same machine code" in out
    status, out, err = command(*tune, "--M", "1,2,8", "--table", table, "--stale")
    assert (status, err) == (0, "")
    assert "2 of 3 shapes are stale" in out and "2 rows modelled" in out
    assert "0 of 3 shapes are" in command(*tune, "--M", "1,2,8", "--table", table, "--stale")[1]
    assert len(read_rows(table, "linear")) == 3


def test_shipped_tables_pass_the_check(command) -> None:
    status, out, err = command("tables", "check")
    assert (status, err) == (0, "")
    assert "sm_90a/linear.csv: " in out


def test_a_table_that_is_not_there_is_not_converted(command, tmp_path) -> None:
    missing = tmp_path / "missing.csv"
    status, _, err = command("tables", "convert", missing)
    assert (status, err) == (1, f"error: {missing}: there is no such file\n")
    assert not missing.exists()


def test_a_table_of_the_layout_of_before_is_refused_and_converted(command, tmp_path) -> None:
    table = tmp_path / "mine.csv"
    versions = "aiter-mx=0.1.0 torch=2.11.0"
    table.write_text(
        "gfx,cu_num,op,M,N,K,out_dtype,backend,kernel,rows,waves,unroll,BLOCK_M,us,hip_us,"
        "triton_us,rel_err,spread,build,code,versions,commit,date,source\n"
        "sm_90a,132,linear,4,96,64,bf16,hip,gemv,2,1,1,,3.5,3.4,9.0,1e-3,0.01,"
        f"0a,0b,{versions},abc,2026-11-20,measured\n"
        "sm_90a,132,linear,1,96,64,bf16,hip,gone,2,1,1,,3.5,3.4,9.0,1e-3,0.01,"
        f"0a,0b,{versions},abc,2026-11-20,measured\n"
    )
    status, _, err = command("tables", "check", table)
    assert status == 1
    assert f"column 'config' is missing; aiter-mx tables convert {table}" in err
    status, out, _ = command("tables", "convert", table)
    assert status == 0
    assert out == f"{table}: 1 rows; dropped those of kernels that are gone: gone (1)\n"
    assert table.read_text() == (
        f"{','.join(columns_of('linear', ['triton_us']))}\n"
        "sm_90a,132,linear,4,96,64,bf16,e4m3,False,hip,gemv,rows=2 waves=1 unroll=1,3.5,9.0,1e-3,"
        "measured\n"
    )
    (row,) = read_rows(table, "linear").values()
    facts = {"spread": "0.01", "build": "0a", "code": "0b", "versions": versions, "commit": "abc"}
    assert facts.items() <= row.items()
    again = table.read_text(), [path.read_text() for path in side_files(table)]
    command("tables", "convert", table)
    assert again == (table.read_text(), [path.read_text() for path in side_files(table)])


LINE = "gfx950,256,linear,4,96,64,bf16,hip,gemv,rows=2 waves=1 unroll=1,3.5,measured"
HEADER = "gfx,cu_num,op,M,N,K,out_dtype,backend,kernel,config,us,source"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{HEADER}\n{LINE},more,and more\n{LINE}\n", ":2: has 14 fields, the header has 12"),
        (f"{HEADER}\n{LINE}\n{LINE},more\n", ":3: has 13 fields, the header has 12"),
        (f"{HEADER}\n{LINE.replace('waves=1', 'waves')}\n", r":2: config must be like 'rows=2"),
        (f"{HEADER}\n{LINE}\n{LINE.replace('3.5', 'fast')}\n", r":3: could not convert .*'fast'"),
        (f"{HEADER}\n{LINE.replace('96', 'many')}\n", r":2: invalid literal for int.*'many'"),
        (f"{HEADER.replace('K', 'k')}\n{LINE}\n", ": column 'K' is missing"),
        (f"{HEADER.replace('gfx', 'arch')}\n{LINE}\n", ": column 'gfx' is missing"),
        (f"{HEADER.replace('backend', 'by')}\n{LINE}\n", ": column 'backend' is missing"),
    ],
)
def test_a_broken_table_is_not_converted_and_named(command, tmp_path, text, message) -> None:
    table = tmp_path / "mine.csv"
    table.write_text(text)
    status, _, err = command("tables", "convert", table)
    assert status == 1
    assert re.fullmatch(rf"error: {table}{message}.*\n", err)
    assert table.read_text() == text and [*tmp_path.iterdir()] == [table]


def test_a_broken_provenance_is_named_and_an_older_one_read(command, tmp_path) -> None:
    table = tmp_path / "linear.csv"
    table.write_text(f"{HEADER}\n{LINE}\n")
    provenance, _ = side_files(table)
    header = "gfx,cu_num,op,M,N,K,out_dtype,spread,build,code,run"
    for missing in ("K", "gfx"):
        provenance.write_text(f"{header.replace(missing, 'other')}\n")
        status, _, err = command("tables", "check", table)
        assert (status, err) == (1, f"error: {provenance}: column '{missing}' is missing\n")
    provenance.write_text(f"{header}\ngfx950,256,linear,4,96,64,bf16,0.02,0a,0b,r1\n")
    (row,) = read_rows(table, "linear").values()
    assert (row["spread"], row["build"]) == ("0.02", "0a")


def test_recording_a_table_drops_runs_that_no_row_of_its_folder_names(command, tmp_path) -> None:
    table, runs = tmp_path / "linear.csv", tmp_path / "runs.csv"
    table.write_text(f"{HEADER}\n{LINE}\n")
    header = "gfx,cu_num,op,M,N,K,out_dtype,spread,build,code,run"
    side_files(table)[0].write_text(f"{header}\ngfx950,256,linear,4,96,64,bf16,,0a,0b,r2\n")
    other = side_files(tmp_path / "moe_gemm.csv")[0]
    other.write_text("gfx,run\ngfx950,r3\n")
    lines = ["run,date,commit,versions"]
    lines += [f"r{n},2026-11-2{n},abc,aiter-mx=0.1.0 torch=2.13.0" for n in (1, 2, 3, 4)]
    runs.write_text("".join(f"{line}\n" for line in lines))
    (tmp_path / "moe_gemm.csv.journal").mkdir()  # of a sweep that may have rows of r4 yet to write
    for wanted in (("--no-record",), ("--record",)):
        assert command("tables", "check", *wanted, table)[0] == 0
        assert runs.read_text().splitlines() == lines
    (tmp_path / "moe_gemm.csv.journal").rmdir()
    assert command("tables", "check", table)[0] == 0
    assert runs.read_text().splitlines() == lines
    for _ in range(2):
        assert command("tables", "check", "--record", table)[0] == 0
        assert runs.read_text().splitlines() == [lines[0], lines[2], lines[3]]
    runs.unlink()
    assert command("tables", "check", "--record", table)[0] == 0
    assert not runs.exists()


def test_a_folder_of_tables_holds_their_provenance_too(command, tmp_path, monkeypatch) -> None:
    tune = ("tune", "linear", *SHAPE, "--arch", "gfx950", "--most", 1)
    command(*tune, "--table", tmp_path / "linear.csv")
    monkeypatch.setenv("AITER_MX_CONFIG", str(tmp_path))
    chosen = aiter_mx.explain("linear", arch="gfx950", M=2, N=96, K=128)
    assert chosen.source == f"{tmp_path / 'linear.csv'}:2"


def test_diff_shows_what_changed_and_counts_the_rest(command, tmp_path) -> None:
    header = "gfx,cu_num,op,M,N,K,out_dtype,backend,kernel,config,us"

    def write(name: str, *rows: str) -> Path:
        path = tmp_path / name
        path.write_text("\n".join([header, *rows]) + "\n")
        return path

    def row(M: int, rows: int, us: float) -> str:
        return f"gfx950,256,linear,{M},64,96,bf16,hip,gemv,rows={rows} waves=1 unroll=1,{us}"

    before = write("a.csv", row(1, 2, 4.0), row(2, 2, 5.0), row(3, 2, 5.0))
    after = write("b.csv", row(1, 2, 4.5), row(2, 1, 4.0), row(4, 1, 7.0))
    status, out, _ = command("tables", "diff", before, after)
    assert status == 0
    assert "1 same, 1 changed, 1 added, 1 removed" in out
    (changed,) = (line for line in out.splitlines() if "-20.0%" in line)
    assert "M=2 N=64" in changed
    assert "hip/gemv rows=2 unroll=1 waves=1" in changed
    assert "+12.5%" not in out
    assert "+12.5%" in command("tables", "diff", before, after, "--all")[1]


def test_report_draws_a_picture(command, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    shipped = Path(aiter_mx.__file__).parents[1] / "configs" / "sm_90a" / "linear.csv"
    status, out, _ = command("tables", "report", shipped, "--out", tmp_path)
    assert status == 0
    picture = tmp_path / "sm_90a_linear.png"
    assert str(picture) in out
    assert picture.read_bytes().startswith(b"\x89PNG")


WIDE = ("--model", "wide-6144")


@pytest.mark.parametrize("option", ["--table", "--timings"])
def test_what_is_no_regular_file_is_not_replaced(command, tmp_path, option):
    pipe, files = tmp_path / "pipe", ("--table", str(tmp_path / "table.csv"))
    os.mkfifo(pipe)
    found = command("tune", "linear", "--arch", "gfx950", *SHAPE, *files, option, str(pipe))
    assert_refused(found, f"{option} must be a regular file")
    assert pipe.is_fifo() and [*tmp_path.iterdir()] == [pipe]


@no_gpu
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tune", "linear", *SHAPE), "no GPU here: --arch gfx950 writes a table by a model"),
        (("tune", "linear", *SHAPE, "--arch", "sm_90a"), "times for sm_90a need such a GPU"),
        (("tune", "conv", "--arch", "gfx950"), "unknown op 'conv'"),
        (("tune", "linear", "--arch", "gfx950"), "no shapes: give --shapes, --model"),
        (("tune", "linear", "--arch", "gfx950", "--model", "gpt-9"), "unknown model 'gpt-9'"),
        (("tune", "linear", "--arch", "gfx950", *SHAPE, "--most", "0"), "--most must be at least"),
        (("tune", "linear", "--arch", "gfx950", *WIDE, "--tp", "1,0"), "numbers of GPUs, as in"),
        (("tune", "linear", "--arch", "gfx950", *WIDE, "--tp", "two"), "--tp takes numbers of"),
        (("tune", "linear", "--arch", "gfx950", *SHAPE, "--table", "."), "got the folder '.'"),
        (("tune", "linear", "--arch", "gfx950", *SHAPE, "--M", "0"), "nothing to time"),
        (("tables", "diff", "a.csv", "b.csv"), "a.csv: cannot be read as a table"),
        (("tables", "verify", "linear"), "no GPU here"),
    ],
)
def test_wrong_input_is_one_message_and_status_1(command, arguments, message) -> None:
    assert_refused(command(*arguments), message)


def test_misses_of_production_are_what_the_tuner_reads(tmp_path, monkeypatch) -> None:
    log = tmp_path / "untuned.csv"
    monkeypatch.setenv("AITER_MX_LOG_UNTUNED", str(log))
    for arch, cu_num, M in (("gfx950", None, 3), ("gfx950", 80, 5), ("sm_90a", None, 7)):
        aiter_mx.explain("linear", arch=arch, cu_num=cu_num, M=M, N=1001, K=96, out_dtype="fp32")
    found = read_shapes(log, "linear", hardware("gfx950"))
    assert found == [LinearProblem(M=3, N=1001, K=96, out_dtype="fp32")]
    assert [problem.M for problem in read_shapes(log, "linear")] == [3, 5, 7]
    aiter_mx.explain("grouped_gemm", arch="gfx950", M=31, N=1001, K=96, G=3)  # the same file
    grouped = read_shapes(log, "grouped_gemm", hardware("gfx950"))
    assert grouped == [GroupedGemmProblem(M=31, N=1001, K=96, G=3)]
    assert [problem.M for problem in read_shapes(log, "linear")] == [3, 5, 7]
    log.write_text(log.read_text().replace("G=3", "H=3"))
    with pytest.raises(ValueError, match="line 5: 'H' is no field of grouped_gemm"):
        read_shapes(log, "grouped_gemm")


def test_only_a_shapes_first_call_looks_for_its_row(tmp_path, monkeypatch) -> None:
    log = tmp_path / "untuned.csv"
    monkeypatch.setenv("AITER_MX_LOG_UNTUNED", str(log))
    with aiter_mx.simulate("gfx950"):
        x, w = (aiter_mx.quantize(torch.randn(rows, 160)) for rows in (3, 37))
        first = aiter_mx.linear(*x, *w)
        monkeypatch.setattr(plan, "route", None)
        monkeypatch.setattr(dispatcher, "_log_miss", None)
        assert torch.equal(aiter_mx.linear(*x, *w), first)
    assert read_shapes(log, "linear") == [LinearProblem(M=3, N=37, K=160)]


def test_lists_of_shapes_are_read_or_refused_by_line(tmp_path) -> None:
    path = tmp_path / "shapes.csv"

    def read(text: str) -> list[LinearProblem]:
        path.write_text(text)
        return read_shapes(path, "linear")

    assert read("M,N,K\n1,64,96\n1,64,96\n2,64,96\n") == [
        LinearProblem(1, 64, 96),
        LinearProblem(2, 64, 96),
    ]
    assert read("op,M,N,K,out_dtype\nother,1,2,3,x\nlinear,1,64,96,fp16\n") == [
        LinearProblem(1, 64, 96, "fp16")
    ]
    for text, message in [
        ("M,N\n1,2\n", "column 'K' is missing"),
        ("M,N,K,L\n1,2,3,4\n", "column 'L' is no field of linear"),
        ("M,N,K\n1,2\n", "line 2 does not have 3 fields"),
        ("M,N,K\n1,64,96\n1,x,96\n", "line 3: N must be a whole number, got 'x'"),
        ("M,N,K\n1,64,97\n", "line 2: K must be a multiple of 32"),
    ]:
        with pytest.raises(ValueError, match=r"shapes\.csv cannot be read") as caught:
            read(text)
        assert message in str(caught.value)


def test_lists_of_shapes_may_have_numbers_with_a_point(tmp_path) -> None:
    path = tmp_path / "shapes.csv"

    def read(alpha: str) -> list[MoeGemmProblem]:
        path.write_text(
            "M,N,K,E,top_k,out_dtype,activation,alpha,beta,limit\n"
            f'3,128,96,5,2,mxfp8,swiglu_oai,"{alpha}",0.5,inf\n'
        )
        return read_shapes(path, "moe_gemm")

    (found,) = read("1.625")
    assert (found.alpha, found.beta, found.limit) == (1.625, 0.5, inf)
    for wrong in ("1,7", "nan", "1_0", "\uff13", "much"):
        with pytest.raises(ValueError, match=f"line 2: alpha must be a number, got '{wrong}'"):
            read(wrong)


def test_builds_alone_need_no_gpu_and_write_no_table(command, tmp_path) -> None:
    table = tmp_path / "linear.csv"
    tune = ("tune", "linear", *SHAPE, "--arch", "gfx950", "--table", table, "--most", 1)
    for _ in range(2):  # the second finds all of them in the cache
        status, out, err = command(*tune, "--build-only")
        assert (status, err) == (0, "")
        assert re.fullmatch(r"[1-9]\d* kernel variants were compiled\n", out)
    assert not list(tmp_path.glob("linear*"))


def test_of_our_kernels_only_those_named_are_built_and_what_the_table_names(
    command, tmp_path, monkeypatch
) -> None:
    table = tmp_path / "linear.csv"
    tune = ("tune", "linear", *SHAPE, "--arch", "gfx950", "--table", table, "--most", 1)
    status, _, err = command(*tune, "--kernel", "gemv")
    assert (status, err) == (0, "")
    (row,) = read_rows(table, "linear").values()
    assert row["kernel"] == "gemv"
    row["source"] = "measured"
    write_table(table, "linear", [row])
    text = table.read_text()
    monkeypatch.setenv("AITER_MX_CACHE_DIR", str(tmp_path / "cache"))
    status, _, err = command(*tune, "--kernel", "mfma", "--build-only")
    assert (status, err) == (0, "")
    built = [path.read_text() for path in (tmp_path / "cache" / "gfx950").glob("*.about")]
    for name in ("gemv", "mfma"):
        assert sum(f"linear/{name}" in about for about in built) == 1
    assert table.read_text() == text
    status, _, err = command(*tune, "--kernel", "mma_registers")
    assert status == 1
    assert "linear has no kernel 'mma_registers' on gfx950" in err


def test_workers_share_out_builds(command, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("AITER_MX_CACHE_DIR", str(tmp_path / "cache"))
    counts = []
    for rank in range(2):
        worker = Alone()
        worker.rank, worker.workers = rank, 2
        monkeypatch.setattr("aiter_mx.tuning.share.join", lambda worker=worker: worker)
        shapes = ("--M", "2", "--N", "96", "--K", "128,160", "--table", tmp_path / "t.csv")
        build = ("tune", "linear", *shapes, "--arch", "gfx950", "--most", 2, "--build-only")
        status, out, _ = command(*build)
        assert status == 0
        counts.append(int(out.split()[0]))
    built = len(list((tmp_path / "cache" / "gfx950").glob("*.hsaco")))
    assert 0 < max(counts) < built <= sum(counts)


def test_models_pose_each_shape_once() -> None:
    both = model_shapes(["llama-3.1-8b", "qwen3-8b"], "linear", (1, 2), "sm_90a")
    assert len(both) == len(set(both)) > 28
    assert LinearProblem(M=1, N=6144, K=4096) in both
    with pytest.raises(ValueError, match=r"unknown model 'llama'; there are llama-3\.2-1b"):
        model_shapes(["llama"], "linear", (1,), "sm_90a")


def test_fields_beside_a_list_of_shapes_take_the_place_of_its_own() -> None:
    shapes = model_shapes(["llama-3.1-8b"], "linear", (1,), "gfx950")
    found = with_fields("linear", shapes, {"M": [128, 256], "out_dtype": ["fp32"]})
    assert len(found) == 2 * len({(p.N, p.K) for p in shapes})
    assert {(p.M, p.out_dtype) for p in found} == {(128, "fp32"), (256, "fp32")}
    with pytest.raises(ValueError, match="'L' is none of them"):
        with_fields("linear", shapes, {"L": [1]})


def test_table_that_is_malformed_stops_a_sweep_before_it_begins(command, tmp_path) -> None:
    table = tmp_path / "linear.csv"
    table.write_text("gfx,op\n")
    arguments = ("tune", "linear", *SHAPE, "--arch", "gfx950", "--table", table)
    status, _, err = command(*arguments)
    assert status == 1
    assert "column 'cu_num' is missing" in err
    assert table.read_text() == "gfx,op\n"
    assert [path.name for path in tmp_path.iterdir()] == ["linear.csv"]


def test_read_rows_refuses_another_ops_table(tmp_path) -> None:
    shipped = Path(aiter_mx.__file__).parents[1] / "configs" / "sm_90a" / "linear.csv"
    assert len(read_rows(shipped, "linear")) == len(list(read_table(shipped)))
    with pytest.raises(ValueError, match="is a row of 'linear'"):
        read_rows(shipped, "moe_gemm")
