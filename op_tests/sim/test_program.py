"""The simulator's surroundings: code objects, disassembly, regions, options, runtime, program."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from aiter_mx.code_object import KernelInfo, occupancy, parse_code_object
from aiter_mx.errors import LaunchError, ToolchainError
from aiter_mx.jit.cache import forget_unshared
from aiter_mx.kernels.spec import Arg, Geometry
from aiter_mx.region import Region
from aiter_mx.runtimes import sim
from aiter_mx.runtimes.base import PackedArgs
from aiter_mx.sim.__main__ import main
from aiter_mx.sim.compile import c_compiler, plain_library
from aiter_mx.sim.disasm import Operand, parse_line, parse_operand
from aiter_mx.sim.faults import UnknownInstruction
from aiter_mx.sim.image import disjoint
from aiter_mx.sim.program import Program, SimOptions
from op_tests.sim.tools import compile_gfx950, launch, program

SAXPY = """
KERNEL(256) saxpy(const float *x, const float *y, float *z, int n, float a) {
    const int i = group_id() * 256 + lane_id();
    if (i < n)
        z[i] = a * x[i] + y[i];
}
KERNEL(128) tiny(const float *x, float *y) {
    y[lane_id()] = x[lane_id()] * 0.5f;
}
"""


@pytest.fixture
def kernel() -> KernelInfo:
    return parse_code_object(compile_gfx950(SAXPY)).kernels["saxpy"]


def test_a_code_object_says_what_its_kernels_use(kernel: KernelInfo) -> None:
    assert (kernel.vgpr_spills, kernel.sgpr_spills, kernel.scratch_bytes) == (0, 0, 0)
    assert 0 < kernel.vgprs <= 16 and kernel.agprs == 0 and 0 < kernel.sgprs <= 32
    assert kernel.max_workgroup == 256 and kernel.kernarg_bytes == 32
    assert [(a.offset, a.size, a.value_kind) for a in kernel.args] == [
        (0, 8, "global_buffer"),
        (8, 8, "global_buffer"),
        (16, 8, "global_buffer"),
        (24, 4, "by_value"),
        (28, 4, "by_value"),
    ]
    whole = parse_code_object(compile_gfx950(SAXPY))
    assert whole.target == "gfx950" and set(whole.kernels) == {"saxpy", "tiny"}


def test_occupancy_follows_registers_and_lds(kernel: KernelInfo) -> None:
    base = replace(kernel, vgprs=64, sgprs=40, lds_bytes=0, max_workgroup=256)
    assert occupancy(base) == 8
    assert [occupancy(replace(base, vgprs=v)) for v in (65, 72, 128, 129, 256, 257, 512)] == [
        7, 7, 4, 3, 2, 1, 1,
    ]  # fmt: skip
    assert occupancy(replace(base, sgprs=102)) == 7
    assert occupancy(base, shared_bytes=160 * 1024) == 1  # one workgroup of four waves
    assert occupancy(replace(base, lds_bytes=40 * 1024)) == 4
    assert occupancy(base, block=64, shared_bytes=80 * 1024) == 1
    assert occupancy(base, shared_bytes=160 * 1024 + 1) == 0


def test_a_damaged_code_object_is_refused() -> None:
    image = compile_gfx950(SAXPY)
    rng = np.random.default_rng(0)
    for size in rng.integers(0, len(image) - 1, 60):
        with pytest.raises(LaunchError):
            parse_code_object(image[:size])
    with pytest.raises(LaunchError, match="expected a 64-bit little-endian ELF"):
        parse_code_object(b"__CLANG_OFFLOAD_BUNDLE__" + image)
    with pytest.raises(LaunchError, match="expected an AMDGPU ELF"):
        parse_code_object(Path("/proc/self/exe").read_bytes())
    for _ in range(60):  # damage inside may go unseen, but never ends in another error
        broken = bytearray(image)
        broken[rng.integers(0, len(image))] ^= 1 << rng.integers(0, 8)
        with suppress(LaunchError):
            parse_code_object(bytes(broken))


def test_another_architecture_is_refused() -> None:
    with pytest.raises(LaunchError, match="runs gfx950, got gfx942"):
        Program.from_image(compile_gfx950(SAXPY, "-O1", "--offload-arch=gfx942",
                                          "--no-offload-arch=gfx950"))  # fmt: skip


def test_operands_and_modifiers_are_read() -> None:
    line = (
        "\tv_pk_fma_f32 v[2:3], s[4:5], -1.0, v[6:7] op_sel:[0,1,0] neg_lo:[0,0,1]"
        "  // 000000001700: D3B04402 1C19E604"
    )
    found = parse_line(line)
    assert found is not None and found.mnemonic == "v_pk_fma_f32" and found.end == 0x1708
    assert found.modifiers == {"op_sel": "[0,1,0]", "neg_lo": "[0,0,1]"}
    assert found.operands[1] == Operand("s", 4, 2, text="s[4:5]")
    assert found.operands[2] == Operand("float", value=-1.0, text="-1.0")
    assert parse_operand("-|v7|") == Operand("v", 7, negate=True, absolute=True, text="-|v7|")
    assert parse_operand("sext(v1)").sign_extend and parse_operand("vcc_hi").index == 107
    assert parse_operand("lit(0x1234)") == Operand("literal", value=0x1234, text="lit(0x1234)")
    assert parse_line("0000000000001600 <k>:") is None
    with pytest.raises(UnknownInstruction, match=r"cannot read modifier 'what!'"):
        parse_line("\tv_mov_b32_e32 v1, v2 what!  // 000000001700: 7E020302")


def test_overlapping_regions_become_pieces_with_the_rights_of_both() -> None:
    regions = [
        Region("base", 100, 50, "r"),
        Region("view", 120, 10, "w"),
        Region("far", 200, 8, "w"),
    ]
    assert disjoint(regions) == [
        (100, 120, True, False),
        (120, 130, True, True),
        (130, 150, True, False),
        (200, 208, False, True),
    ]
    assert disjoint([Region("empty", 5, 0, "rw")]) == []


def test_float_mode_of_the_kernel_decides_about_denormals() -> None:
    x = np.full(128, 2.0**-126, np.float32)
    x[::3] = 3e-39
    y, z = np.ones_like(x), np.ones_like(x)
    launch(program(SAXPY), "tiny", 1, 128, [x, y])
    np.testing.assert_array_equal(y, x * np.float32(0.5))
    flushing = program(SAXPY, "-O3", "-fgpu-flush-denormals-to-zero")
    launch(flushing, "tiny", 1, 128, [x, z])
    np.testing.assert_array_equal(z, np.zeros_like(x))


def test_workgroups_before_the_first_one_asked_for_are_left_out() -> None:
    x, z = np.arange(1, 769, dtype=np.float32), np.zeros(768, np.float32)
    arguments = [x, x, z, 768, 2.0]
    report = launch(program(SAXPY), "saxpy", 3, 256, arguments, options=SimOptions(first_group=2))
    np.testing.assert_array_equal(z, np.where(np.arange(768) < 512, 0, 3 * x))
    assert report.waves == 4
    with pytest.raises(LaunchError, match="first_group is 3 of 3 workgroups"):
        launch(program(SAXPY), "saxpy", 3, 256, arguments, options=SimOptions(first_group=3))


def test_the_runtime_launches_packed_arguments() -> None:
    x, y = np.random.default_rng(1).normal(0, 1, (2, 1000)).astype(np.float32)
    z = np.zeros_like(x)
    args = PackedArgs(
        (Arg("x", "pointer", "r"), Arg("y", "pointer", "r"), Arg("z", "pointer", "w"),
         Arg("n", "i32"), Arg("a", "f32")), (1000, 2.5))  # fmt: skip
    args.set_pointers(*(v.ctypes.data for v in (x, y, z)))
    named = (("x", x, "r"), ("y", y, "r"), ("z", z, "w"))
    args.regions = tuple(Region(n, v.ctypes.data, v.nbytes, access) for n, v, access in named)
    function = sim.get_function(sim.load(compile_gfx950(SAXPY), 0), "saxpy", 0)
    sim.bind(function, Geometry((4, 1, 1), (256, 1, 1)), args)(sim.current_stream(0))
    np.testing.assert_allclose(z, np.float64(2.5) * x + y, rtol=1e-6, atol=1e-6)
    report = sim.last_report()
    assert report is not None and (report.kernel, report.bytes_written) == ("saxpy", 4000)
    assert not sim.is_capturing(0)


def test_the_command_line_runs_a_kernel_on_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image, x = tmp_path / "k.hsaco", np.arange(500, dtype=np.float32)
    image.write_bytes(compile_gfx950(SAXPY))
    np.save(tmp_path / "x.npy", x)
    given = ["run", str(image), "--kernel", "saxpy", "--grid", "2", "--block", "256", "--args",
             f"r={tmp_path}/x.npy", f"r={tmp_path}/x.npy", f"w={tmp_path}/z.npy:f32[500]",
             "i32=500", "f32=3"]  # fmt: skip
    assert main(given) == 0
    assert "2000 B written" in capsys.readouterr().out
    np.testing.assert_array_equal(np.load(tmp_path / "z.npy"), 4 * x)
    assert main([*given[:-2], "i32=600", "f32=3"]) == 1
    assert "MemoryFault: kernel saxpy, workgroup (1, 0, 0)" in capsys.readouterr().err
    assert main([*given, "--delay", "--seed", "3", "--schedule", "round-robin"]) == 0
    assert "0 bank conflicts" in capsys.readouterr().out
    assert main(["info", str(image)]) == 0
    assert "saxpy(global_buffer:8" in capsys.readouterr().out
    assert main(["run", str(image)]) == 1
    assert "name one of the kernels with --kernel: saxpy, tiny" in capsys.readouterr().err


def test_a_cache_folder_without_space_is_passed_over_and_c_that_is_wrong_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, source = tmp_path / "compiler", tmp_path / "answer.c"
    compiler.write_text(
        f'#!/bin/sh\ncase "$*" in *" -o {tmp_path}"*) echo error: No space left on device; exit 1;;'
        f' esac\nexec {c_compiler()} "$@"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setattr("aiter_mx.sim.compile.c_compiler", lambda: str(compiler))
    monkeypatch.setenv("AITER_MX_CACHE_DIR", str(tmp_path / "cache"))
    source.write_text("int answer(void) { return 42; }")
    try:
        assert plain_library(source, "an answer").answer() == 42
    finally:
        forget_unshared()
    source.write_text("int answer(void) { return nothing; }")
    with pytest.raises(ToolchainError, match=r"(?s)C did not compile.*identifier 'nothing'"):
        plain_library(source, "no answer")
