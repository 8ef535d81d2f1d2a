from __future__ import annotations

import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

import aiter_mx.jit.build
from aiter_mx.errors import ToolchainError
from aiter_mx.jit import amd, nvidia
from aiter_mx.jit.build import BuildRequest, build
from aiter_mx.jit.fingerprint import code_hash
from aiter_mx.jit.toolchain import find_toolchain, llvm_tool
from op_tests.jit.fakes import FAKE_CLANG, hide_compilers, write_program, write_rocm

FAKE_NVCC = """#!/bin/sh
PATH=/usr/bin:/bin
here=${0%%/*}
case "$*" in
*--version*) echo "Cuda compilation tools, release %(release)s, V%(release)s.88"; exit 0 ;;
*--dryrun*) echo "#$ _HERE_=$here"; echo "#$ CICC_PATH=$here/../nvvm/bin"; exit 0 ;;
esac
%(condition)s
while [ "$1" != -o ]; do shift; done
head -c 5000 /dev/urandom > "$2"
"""
NEEDS_HEADERS = """case "$*" in *-I*/include*) ;;
*) echo "fatal error: cuda_runtime.h: No such file or directory"; exit 1 ;; esac"""


def fake_nvcc(path: Path, release: str = "13.0", condition: str = "") -> Path:
    return write_program(path, FAKE_NVCC % {"release": release, "condition": condition})


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without compilers; returns a folder to put some in."""
    monkeypatch.setenv("AITER_MX_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("FAKE_NAME", "fake")
    monkeypatch.setenv("FAKE_CLANG_VERSION", "99.1.0")
    hide_compilers(monkeypatch, tmp_path / "nothing")
    return tmp_path


def test_without_a_compiler_every_place_and_the_remedy_are_named(bare: Path) -> None:
    with pytest.raises(ToolchainError) as caught:
        find_toolchain("gfx950")
    for part in (
        f"{bare}/nothing/rocm",
        "no program hipcc",
        "no clang++",
        "install ROCm",
        "clang-22",
    ):
        assert part in str(caught.value)
    with pytest.raises(ToolchainError) as caught:
        find_toolchain("sm_90a")
    for part in ("PATH: no nvcc", "nvidia-cuda-nvcc is not installed", "12.4", "CUDA_HOME"):
        assert part in str(caught.value)


@pytest.mark.parametrize("name", ["HIPCC", "ROCM_PATH", "PATH", "installed"])
def test_rocm_is_found_wherever_it_may_be(
    bare: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    root = bare / "rocm-7.1.0"
    hipcc = write_rocm(root)
    if name == "installed":
        monkeypatch.setattr(amd, "_OPT", bare)
    else:
        places = {"HIPCC": hipcc, "ROCM_PATH": root, "PATH": root / "bin"}
        monkeypatch.setenv(name, str(places[name]))
    found = find_toolchain("gfx950")
    assert (found.kind, found.arch, found.compiler) == ("rocm", "gfx950", hipcc)
    assert name in found.reason and str(hipcc) in found.reason
    assert "99.1.0" in found.identity and "7.1.25424" in found.identity
    assert found.flags == ()


def test_the_clang_behind_hipcc_is_run_directly(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = bare / "rocm"
    clang = write_program(root / "lib/llvm/bin/clang++", FAKE_CLANG)
    told = f'--version*) echo "InstalledDir: {clang.parent}";'
    write_rocm(root).write_text(FAKE_CLANG.replace("--version*)", told))
    monkeypatch.setenv("HIPCC", str(root / "bin/hipcc"))
    assert find_toolchain("gfx950").compiler == clang


def test_rocm_before_6_3_is_asked_for_an_older_code_object(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIPCC", str(write_rocm(bare / "rocm", hip=(6, 2))))
    assert "-mcode-object-version=5" in find_toolchain("gfx950").flags


def test_a_hipcc_that_does_not_know_the_gpu_is_refused_with_its_words(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIPCC", str(write_rocm(bare / "usr", hip=(5, 2))))
    monkeypatch.setenv("FAKE_CLANG_VERSION", "15.0.6")
    monkeypatch.setenv("FAKE_PROBE_ERROR", "clang: error: invalid target ID 'gfx950'")
    with pytest.raises(ToolchainError, match=r"HIPCC: .*15\.0\.6 cannot .*invalid target ID"):
        find_toolchain("gfx950")


def test_a_clang_that_is_too_old_is_refused(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clang = write_program(bare / "bin/clang++", FAKE_CLANG)
    monkeypatch.setenv("PATH", str(clang.parent))
    monkeypatch.setenv("FAKE_CLANG_VERSION", "19.1.7")
    with pytest.raises(ToolchainError, match=r"19\.1\.7 is older than 20"):
        find_toolchain("gfx950")


def test_the_newest_clang_is_chosen(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("clang++-19", "clang++-20", "clang++-23", "clang++-old", "clang++"):
        write_program(bare / "bin" / name, FAKE_CLANG)
    monkeypatch.setenv("PATH", f"{bare}/absent:{bare}/bin/clang++:{bare}/bin")
    found = find_toolchain("gfx950")
    assert found.kind == "llvm" and found.compiler.name == "clang++-23"
    assert llvm_tool.__wrapped__("clang++") == bare / "bin/clang++"


def test_a_clang_that_was_asked_for_needs_no_rocm(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clang = write_program(bare / "llvm/bin/clang++", FAKE_CLANG)
    monkeypatch.setenv("HIPCC", str(clang))
    found = find_toolchain("gfx950")
    assert (found.kind, found.compiler) == ("llvm", clang)
    assert "HIPCC" in found.reason


def test_a_compiler_that_was_asked_for_is_not_passed_over_in_silence(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(amd, "_OPT", bare)
    write_rocm(bare / "rocm-7.1.0")
    monkeypatch.setenv("HIPCC", str(bare / "no" / "hipcc"))
    monkeypatch.setenv("ROCM_PATH", str(bare / "nowhere"))
    reason = find_toolchain("gfx950").reason
    assert f"passed over HIPCC: no program {bare / 'no' / 'hipcc'}" in reason
    assert f"passed over ROCM_PATH: {bare / 'nowhere'} has none of" in reason
    monkeypatch.setattr(nvidia, "_USUAL", fake_nvcc(bare / "nvidia/cu13/bin/nvcc"))
    monkeypatch.setenv("CUDA_HOME", str(bare / "nowhere"))
    assert "passed over CUDA_HOME: " in find_toolchain("sm_90a").reason


@pytest.mark.parametrize("name", ["CUDA_HOME", "CUDA_PATH", "PATH", "installed", "wheel"])
def test_nvcc_is_found_wherever_it_may_be(
    bare: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    nvcc = fake_nvcc(bare / "nvidia/cu13/bin/nvcc")
    if name == "wheel":
        monkeypatch.setattr(nvidia, "_wheels", lambda: [bare / "nvidia"])
    elif name == "installed":
        monkeypatch.setattr(nvidia, "_USUAL", nvcc)
    else:
        monkeypatch.setenv(name, str(nvcc.parent if name == "PATH" else nvcc.parent.parent))
    found = find_toolchain("sm_90a")
    assert (found.kind, found.compiler) == ("nvcc", nvcc)
    assert name in found.reason and "13.0.88" in found.identity


def test_wheels_are_looked_for_in_the_nvidia_namespace(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (bare / "site/nvidia/cu13").mkdir(parents=True)
    code = "from aiter_mx.jit.nvidia import _wheels; print(*_wheels(), sep='\\n')"
    path = f"{Path(aiter_mx.__file__).parent.parent}:{bare / 'site'}"
    said = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert str(bare / "site/nvidia") in said.stdout.splitlines()


def test_an_old_cuda_is_refused(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(fake_nvcc(bare / "cuda/bin/nvcc", "12.3").parent.parent))
    with pytest.raises(ToolchainError, match=r"CUDA 12\.3 is older than 12\.4"):
        find_toolchain("sm_90a")


def test_nvcc_without_headers_takes_those_of_a_wheel(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvcc = fake_nvcc(bare / "cuda/bin/nvcc", condition=NEEDS_HEADERS)
    monkeypatch.setenv("CUDA_HOME", str(nvcc.parent.parent))
    with pytest.raises(ToolchainError, match=r"does not compile: .*cuda_runtime\.h"):
        find_toolchain("sm_90a")
    include = bare / "nvidia/cu13/include"
    include.mkdir(parents=True)
    (include / "cuda_runtime.h").write_text("")
    monkeypatch.setattr(nvidia, "_wheels", lambda: [bare / "nvidia"])
    found = find_toolchain("sm_90a")
    assert found.compiler == nvcc and f"-I{include}" in found.flags


def test_a_replaced_compiler_behind_a_wrapper_is_noticed(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from aiter_mx.jit import toolchain

    nvcc = fake_nvcc(bare / "cuda/bin/nvcc")
    wrapper = write_program(bare / "bin/nvcc", f'#!/bin/sh\nexec {nvcc} "$@"\n')
    monkeypatch.setenv("PATH", str(wrapper.parent))
    assert "13.0.88" in find_toolchain("sm_90a").identity
    fake_nvcc(nvcc, "13.2")
    assert "13.0.88" in find_toolchain("sm_90a").identity  # one answer for one process
    toolchain._find.cache_clear()
    assert "13.2.88" in find_toolchain("sm_90a").identity


KERNEL = """#include "common/target.h"
MX_KERNEL(64) scale(float *x, int n) {
  int i = mx::kLanes * mx::group_x() + mx::thread_in_group();
  if (i < n) mx::store(x + i, mx::power_of_two(x[i]) * FACTOR);
}
"""


def machine(image: bytes) -> int:
    assert image[:4] == b"\x7fELF"
    number: int = struct.unpack_from("<H", image, 18)[0]
    return number


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    shutil.copytree(aiter_mx.jit.build.csrc_dir() / "include", tmp_path / "csrc/include")
    (tmp_path / "csrc/scale.cu").write_text(KERNEL)
    monkeypatch.setattr(aiter_mx.jit.build, "csrc_dir", lambda: tmp_path / "csrc")
    monkeypatch.setenv("AITER_MX_CACHE_DIR", str(tmp_path / "cache"))
    return "scale.cu"


@pytest.mark.skipif(
    not (amd.versioned_programs("clang++") or shutil.which("hipcc")),
    reason="no compiler for gfx950 on PATH",
)
def test_a_gfx950_code_object_is_built_from_hip(kernel: str) -> None:
    made = build(BuildRequest(kernel, "gfx950", (("FACTOR", 3),)))
    assert machine(made.image) == 224  # EM_AMDGPU
    notes = subprocess.run(
        [llvm_tool("llvm-readelf"), "--notes", "--symbols", made.path],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "amdgcn-amd-amdhsa--gfx950" in notes and "scale.kd" in notes
    assert "UND scale" not in notes


@pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc on PATH")
def test_an_sm_90a_cubin_is_built_from_the_same_source(kernel: str) -> None:
    made = build(BuildRequest(kernel, "sm_90a", (("FACTOR", 3),)))
    assert machine(made.image) == 190  # EM_CUDA
    assert b"scale" in made.image


@pytest.mark.parametrize("arch", ["gfx950", "sm_90a"])
def test_machine_code_is_known_again_under_another_name(
    kernel: str, arch: str, tmp_path: Path
) -> None:
    """A renamed source and kernel are the same code, and another constant is not."""
    if not (amd.versioned_programs("clang++") if arch == "gfx950" else shutil.which("nvcc")):
        pytest.skip(f"no compiler for {arch} on PATH")
    text = (tmp_path / "csrc" / kernel).read_text()
    (tmp_path / "csrc/another.cu").write_text(text.replace("scale(", "a_much_longer_name("))
    codes = [
        code_hash(build(BuildRequest(source, arch, (("FACTOR", factor),))).image)
        for source, factor in ((kernel, 3), ("another.cu", 3), (kernel, 5))
    ]
    assert codes[0] == codes[1] != codes[2]
