"""The command line: what it prints, what it refuses, and what it leaves alone."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

import aiter_mx
from aiter_mx.cli.disassembly import gfx_class, sm_class
from aiter_mx.cli.fields import parse_axis, parse_fields, parse_shape, problems
from aiter_mx.cli.source_lines import source_lines
from aiter_mx.errors import ToolchainError
from aiter_mx.jit.build import BuildRequest, build
from aiter_mx.jit.fingerprint import code_hash
from aiter_mx.jit.folder import cache_dir
from aiter_mx.jit.toolchain import find_toolchain
from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.registry import find_kernel
from aiter_mx.launch import build_request
from aiter_mx.paths import csrc_dir
from aiter_mx.sim.disasm import disassemble
from aiter_mx.sim.timing.constants import shipped
from aiter_mx.target import hardware
from op_tests.cli.conftest import assert_refused

USUAL_CACHE = str(cache_dir())


@pytest.fixture(autouse=True)
def own_cache_and_no_tables(tmp_path, monkeypatch):
    monkeypatch.setenv("AITER_MX_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("aiter_mx.dispatch.tables.configs_dir", lambda: tmp_path / "none")


@pytest.fixture
def usual_cache(own_cache_and_no_tables, monkeypatch):
    """Where the simulator need not be compiled anew."""
    monkeypatch.setenv("AITER_MX_CACHE_DIR", USUAL_CACHE)


def test_help_names_every_command_and_imports_nothing_heavy():
    script = (
        "import sys; sys.argv = ['aiter-mx', '--help']\n"
        "from aiter_mx.cli.main import main\n"
        "try: main()\n"
        "finally: print('heavy:', sorted({'torch', 'triton', 'pandas'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0
    for name in ("info", "demo", "explain", "build", "isa", "cache"):
        assert f"\n  {name} " in done.stdout
    assert done.stdout.endswith("heavy: []\n")
    assert "\x1b" not in done.stdout


def test_the_version_is_told(command):
    assert command("--version") == (0, f"aiter-mx {aiter_mx.__version__}\n", "")


# More than a file's buffer holds, and for the pipe more than that holds.
@pytest.mark.parametrize(
    ("redirected", "lines"), [(">&-", 100), ("| head -n 1", 300), ("2>&1 >/dev/full", 100)]
)
def test_output_that_nobody_takes_is_no_traceback(redirected, lines):
    script = f"{sys.executable} -m aiter_mx.cli explain linear --M 1-{lines} --N 64 --K 64"
    done = subprocess.run(
        f"{script} --arch gfx950 {redirected}", shell=True, capture_output=True, text=True
    )
    said = done.stdout + done.stderr
    assert "Traceback" not in said and "ignored" not in said
    assert done.stderr == "" and len(said.splitlines()) == (redirected != ">&-")


def test_explain_gives_route_config_and_reason(command):
    shape = ("--M", "1", "--N", "1000", "--K", "6144", "--out-dtype=fp32")
    status, out, _ = command("explain", "linear", *shape, "--arch", "gfx950")
    assert status == 0
    lines = dict(line.split(None, 1) for line in out.splitlines())
    assert lines["route"] == "hip/mfma"
    assert "waves=" in lines["config"]
    assert "no tuned table" in lines["reason"]


def test_explain_takes_ranges_and_shows_where_the_route_changes(command):
    shape = ("--M", "1-2,17-18", "--N", "96", "--K", "12288")
    status, out, _ = command("explain", "linear", *shape, "--arch", "gfx950")
    assert status == 0
    routes = [line.split()[3] for line in out.splitlines()[1:]]
    assert routes[:2] == ["hip/gemv", "hip/mfma"]
    assert routes[2] == routes[3] != "hip/gemv"
    assert "M=17 is above 16" in out


SHAPE = ("--M", "1", "--N", "64", "--K", "64", "--arch", "gfx950")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("explain", "lineer", "--M", "1"), "unknown op 'lineer'; there are"),
        (("explain", "lineer", "1x2x3"), "unknown op 'lineer'; there are"),
        (("explain", "linear", "--M", "1", "--N", "8"), "by M, N, K and, optionally, out_dtype, "),
        (("explain", "linear", "--M", "1", "--N", "8"), "'K' was not given"),
        (("explain", "linear", "--M", "9-2"), "the range '9-2' is empty"),
        (("explain", "linear", "--M", "1,,2"), "M must be a whole number, got '1,,2'"),
        (("explain", "linear", "--M", "-1"), "M must be a whole number, got '-1'"),
        (("explain", "moe_gemm", *SHAPE, "--alpha", "much"), "alpha must be a number, got 'much'"),
        (("explain", "linear", "--M"), "expected a field and its value"),
        (("explain", "linear", *SHAPE, "--cu-num", "0"), "cu_num must be a whole number of at"),
        (("explain", "fused_moe", "--M", "1"), "'hidden' was not given"),
        (("build", "fused", "--M", "1"), "unknown op 'fused'; there are fused_moe, group_runs"),
        (("tables", "diff", "no.csv", "none.csv"), "no.csv: cannot be read as a table"),
        (("tables", "verify", "lineer"), "unknown op 'lineer'; there are"),
        (("build", "--shape", "1x2"), "expected a shape MxNxK"),
        (("build", "--arch", "gfx90a"), "unknown architecture 'gfx90a'"),
        (("isa", "gemm"), "no kernel 'gemm' for gfx950; there are group_runs/scan, "),
        (("isa", "gemv", "--M", "1-4"), "isa shows one shape at a time, got 4"),
        (("isa", "gemv", "--rows", "few"), "rows must be a whole number, got 'few'"),
        (("isa", "gemv", "--M", "0"), "M=0 N=2304 K=6144 out_dtype=bf16 bias=none"),
        (("explain", "linear", "--M", "1-1000000000"), "'1-1000000000' has more than 100,000"),
        (("build", "--shape", "1-9000x1-9000x64"), "have 81,000,000 shapes, and 100,000 is"),
        (("isa", "gemv", "--M", "17"), "does not cover this shape: M=17"),
        (("isa", "gemv", "--rows", "1000"), "parameter 'rows' of kernel 'gemv' must be one of"),
    ],
)
def test_wrong_input_is_one_message_and_status_1(command, arguments, message):
    assert_refused(command(*arguments), message)


def test_fields_may_be_numbers_with_a_point():
    text = "--M 1 --N 64 --K 64 --E 4 --top_k 2 --alpha 1.5,2 --limit inf"
    found = problems("moe_gemm", parse_fields(text.split()))
    assert [(each.alpha, each.limit) for each in found] == [(1.5, inf), (2.0, inf)]


def test_explain_shows_each_launch_of_a_layer(command):
    sizes = ("--hidden", "64", "--intermediate", "32", "--E", "8", "--top-k", "2")
    status, out, _ = command("explain", "fused_moe", "--M", "1,8", *sizes, "--arch", "gfx950")
    assert status == 0
    launches = [line.split()[5:7] for line in out.splitlines()[1:]]
    ops = ["moe_up", "moe_down", "moe_align", "moe_gemm", "moe_gemm", "moe_combine"]
    assert [op for op, _ in launches] == ops
    assert all(kernel.startswith("hip/") for _, kernel in launches)


def test_a_folder_that_cannot_be_made_is_one_message_and_status_1(command, tmp_path):
    (tmp_path / "file").touch()
    table = ("--table", str(tmp_path / "file" / "x.csv"), "--most", "1")
    status, _, err = command("tune", "linear", *SHAPE, *table)
    assert status == 1
    assert err.startswith("error: ") and "Not a directory" in err


def test_a_missing_compiler_is_one_message_and_status_1(command, monkeypatch):
    def refuse(arch):
        raise ToolchainError(f"no compiler for {arch} was found")

    monkeypatch.setattr("aiter_mx.jit.toolchain.find_toolchain", refuse)
    status, _, err = command("build")
    assert status == 1
    assert "no compiler for gfx950" in err
    assert "no compiler for sm_90a" in err
    assert "Traceback" not in err


def test_build_fills_the_cache_once_and_cache_lists_and_clears_it(command):
    build = ("build", "--arch", "gfx950", "--shape", "1,2x64x10240", "--out-dtype", "fp16")
    status, out, _ = command(*build)
    assert status == 0
    assert "gfx950: 2 shapes, 2 kernel variants" in out
    assert "2 compiled" in out
    assert "0 were cached" in out
    assert "0 compiled" in command(*build)[1]

    _, listed, _ = command("cache", "list")
    kernels = [line for line in listed.splitlines() if "for gfx950" in line]
    assert sorted(re.findall(r"linear/(\w+)_gfx950.cu", " ".join(kernels))) == ["gemv", "mfma"]
    assert all("intact" in line for line in kernels)
    deleted = command("cache", "clear")[1]
    assert int(deleted.split()[0]) == len(listed.splitlines()) - 2  # a heading, a total
    assert command("cache", "list")[1].startswith("0 artifacts")


def test_build_compiles_the_shapes_of_the_tuned_tables(command, tmp_path, monkeypatch):
    table = tmp_path / "mine.csv"
    table.write_text(
        "gfx,cu_num,op,M,N,K,out_dtype,backend,kernel,config\n"
        "gfx950,,linear,2,320,64,fp32,hip,gemv,rows=2 waves=1 unroll=1\n"
    )
    monkeypatch.setenv("AITER_MX_CONFIG", str(table))
    status, out, _ = command("build", "--tables", "--arch", "gfx950")
    assert status == 0
    assert "gfx950: 1 shapes, 1 kernel variants" in out
    assert "MX_ROWS=2" in command("cache", "list")[1]
    assert "1 rows" in command("info")[1]


def test_isa_reports_resources_and_mix_of_a_gfx950_kernel(command):
    status, out, _ = command("isa", "gemv", "--M", "2", "--text")
    assert status == 0
    summary = out[: out.index("\nParameters")].splitlines()
    fields = dict(line.split(None, 1) for line in summary)
    parameters = out[out.index("\nParameters") : out.index("\nInstructions")]
    assert re.search(r"waves +\d+ +1 2 3 4 6 8 12 +waves of a workgroup, which split K", parameters)
    assert fields["spills"] == "0 VGPRs, 0 SGPRs"
    assert fields["scratch"].startswith("0 bytes")
    assert int(fields["VGPRs"].split()[0]) > 0
    assert "waves a SIMD" in fields["occupancy"]
    assert "M=2" in fields["problem"]
    text = out[out.index("Disassembly") :]
    loads = sum(
        line.split()[0].startswith(("global_load", "buffer_load"))
        for line in text.splitlines()
        if line[:1] == "\t"
    )
    (row,) = (line.split() for line in out.splitlines() if line.startswith("memory load"))
    assert int(row[2]) == loads > 0


@pytest.mark.usefixtures("usual_cache")
def test_isa_run_counts_a_simulated_launch_and_models_its_time(command):
    status, out, _ = command(
        "isa", "mfma", "--M", "5", "--N", "96", "--K", "2048", "--out-dtype", "fp32", "--run"
    )
    assert status == 0
    counters = out[out.index("One launch") : out.index("\nInstructions, as they run")]
    fields = dict(line.split("  ", 1) for line in counters.splitlines()[1:])
    least = (5 + 96) * (2048 + 64) + 4 * 5 * 96
    assert fields["operands and results"].strip() == f"{least / 1024:.1f} KiB"
    assert ", 1.00 times those" in fields["distinct bytes"]
    passes, kind = fields["MFMA passes"].split(None, 1)
    assert kind == f"scaled fp8 x fp8 ({4 * int(passes)} cycles)"
    # At least 6 tiles of 16 features, 16 steps of 128 k, 8 passes each.
    assert int(passes) >= 6 * 16 * 8 and int(passes) % 8 == 0
    rate = shipped().memory_tb_s
    at_best = fields["at the rate of memory"].strip()
    assert at_best == f"{least / rate / 1e6:.3f} us at {rate:.1f} TB/s"
    total, low, high = re.findall(r"[\d.]+", out[out.index("Modelled on an MI355X:") :])[1:4]
    assert float(low) < float(total) < float(high)
    spent = out[out.index("waves of the busiest unit spend on") : out.index("\nunit ")]
    parts = [float(line.split()[-2]) for line in spent.splitlines()[1:] if line.strip()]
    assert sum(parts) == pytest.approx(float(total), abs=0.1) and len(parts) == 9
    (waits,) = re.findall(r"^waits longest at .*\n((?:.+\n)+)", out, re.MULTILINE)
    assert 1 <= len(waits.splitlines()) <= 3
    for line in waits.splitlines():  # each names a line of the kernel, and what stands there
        place = re.search(r" (\S+\.(?:cu|h)):(\d+)(?:, inlined at \S+)?: (.+)", line)
        source = (csrc_dir() / place[1]).read_text().splitlines()
        assert source[int(place[2]) - 1].strip() == place[3].strip()
    assert "An extrapolation: no launch of the calibration is like this one" in out
    assert re.search(r"median error \d+\.\d%; by sums alone \d+\.\d us: launch ", out)
    status, _, error = command("isa", "gemv", "--arch", "sm_90a", "--run")
    assert status != 0
    assert "--run simulates gfx950, not sm_90a" in error


@pytest.mark.usefixtures("usual_cache")
@pytest.mark.parametrize("name", ["unit.png", "unit"])
def test_isa_plots_a_timeline(command, tmp_path, name):
    picture = tmp_path / "unit.png"
    shape = ("--N", "96", "--K", "512")
    status, out, _ = command("isa", "gemv", *shape, "--plot", str(tmp_path / name))
    assert status == 0
    assert picture.read_bytes().startswith(b"\x89PNG") and str(picture) in out


def test_source_lines_leave_the_code_as_it_is():
    request = gemv_request()
    plain, lined = (build(replace(request, with_lines=lines)) for lines in (False, True))
    assert code_hash(plain.image) == code_hash(lined.image) and plain.path != lined.path
    assert source_lines(plain.path, [0]) == [None]


def test_source_lines_are_found_in_what_another_installation_built(monkeypatch, tmp_path):
    elsewhere = shutil.copytree(csrc_dir(), tmp_path / "elsewhere" / "csrc")
    request = replace(gemv_request(), with_lines=True)
    with monkeypatch.context() as patch:
        patch.setattr("aiter_mx.jit.build.csrc_dir", lambda: elsewhere)
        built = build(request)
    shutil.rmtree(elsewhere)
    found = build(request)
    assert built.built and not found.built and found.path == built.path
    lines = source_lines(found.path, [part.address for part in disassemble(found.image)])
    paths = {line.path for line in lines if line}
    assert "linear/gemv_gfx950.cu" in paths and "include/gfx950/target.h" in paths
    assert all((csrc_dir() / path).is_file() for path in paths)
    callers = {line.caller.partition(":")[0] for line in lines if line and line.caller}
    assert callers and all((csrc_dir() / path).is_file() for path in callers)


def gemv_request() -> BuildRequest:
    spec, target = find_kernel("linear", "gfx950", "hip", "gemv"), hardware("gfx950")
    problem = LinearProblem(1, 96, 512)
    return build_request(spec, target, problem, spec.configure(target, problem))


def test_isa_takes_a_usual_size_only_for_what_must_be_given(command):
    for sizes in ((), ("--K", "64", "--x-dtype", "bf16")):
        status, out, _ = command("isa", "align", "--M", "4", "--top-k", "2", "--E", "8", *sizes)
        assert status == 0
        assert "moe_align/align for gfx950" in out


def test_isa_reads_cubins(command):
    try:
        find_toolchain("sm_90a")
    except ToolchainError as error:
        pytest.skip(f"no nvcc: {error}")
    status, out, _ = command("isa", "linear/gemv", "--arch", "sm_90a", "--M", "1")
    assert status == 0
    assert "\nstack      0 bytes a thread, 0 local" in out
    assert "\nmemory load" in out
    assert "\nconversion" in out


def test_info_says_which_compiler_was_found_and_why(command, tmp_path):
    status, out, _ = command("info")
    assert status == 0
    (line,) = (line for line in out.splitlines() if line.startswith("gfx950"))
    assert str(find_toolchain("gfx950").compiler) in line
    assert str(tmp_path / "cache") in out
    assert "hip-python" in out


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1", [1]),
        ("1,4", [1, 4]),
        ("2-4,9", [2, 3, 4, 9]),
        ("fp16", ["fp16"]),
        ("a-b,c", ["a-b", "c"]),
    ],
)
def test_axis_notations(text, values):
    assert parse_axis(text) == values


def test_fields_and_shapes_are_read_by_name():
    assert parse_fields(["--M", "1-2", "--out-dtype=fp32"]) == {"M": [1, 2], "out_dtype": ["fp32"]}
    assert parse_shape("1-2x64x96") == {"M": [1, 2], "N": [64], "K": [96]}


def test_instructions_fall_into_classes():
    amd = {
        "v_mfma_scale_f32_16x16x128_f8f6f4": "matrix",
        "v_cvt_pk_f32_fp8_e32": "conversion",
        "v_pk_fma_f32": "vector",
        "s_load_dwordx4": "scalar load",
        "s_add_u32": "scalar",
        "s_cbranch_scc0": "branch",
        "global_load_dwordx4": "memory load",
        "buffer_store_dword": "memory store",
        "ds_read_b128": "LDS",
        "scratch_load_dword": "scratch",
    }
    nvidia = {
        "HGMMA.64x8x16.F32": "matrix",
        "QGMMA.64x8x32.F32.E4M3.E4M3": "matrix",
        "F2FP.F16.E4M3.UNPACK_B": "conversion",
        "LDG.E.128": "memory load",
        "STL": "scratch",
        "FFMA": "arithmetic",
    }
    assert {name: gfx_class(name) for name in amd} == amd
    assert {name: sm_class(name) for name in nvidia} == nvidia


def test_the_module_runs_like_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "aiter_mx.cli", "explain", "linear", "--M", "1"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: linear is described by")
