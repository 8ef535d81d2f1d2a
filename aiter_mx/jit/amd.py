"""Compilers for AMD GPUs: ROCm's own, else a plain clang with the HIP headers of Triton's wheel."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from aiter_mx.errors import BuildError
from aiter_mx.jit.compiler import Candidate, Command, Refused, Toolchain, first_error, run

SUFFIX = "hsaco"
FLAGS = (
    "-O3",
    "-std=c++17",
    "--cuda-device-only",
    "--no-gpu-bundle-output",
    "-fuse-cuid=none",  # a symbol named after the path of the source helps nobody here
)
INCLUDES = ("include",)
INSTALL = (
    "install ROCm 7 (and set ROCM_PATH if it is not in /opt/rocm), or clang 20 or newer with its "
    "lld (on Debian and Ubuntu: apt-get install clang-22 lld-22 llvm-22) beside triton's wheel"
)
ENVIRONMENT = ("HIPCC", "ROCM_PATH")
OLDEST_CLANG = 20
_OPT = Path("/opt")
_HIP_VERSION = "include/hip/hip_version.h"
_LIBRARIES = ("lib/ocml.bc", "lib/ockl.bc")
_IN_ROCM = ("bin/amdclang++", "bin/hipcc", "lib/llvm/bin/clang++", "llvm/bin/clang++")

_PROBE = """#include <hip/hip_runtime.h>
__global__ void probe(float *x) { x[threadIdx.x] = expf(x[threadIdx.x]); }
"""


@dataclass(frozen=True)
class _Clang:
    path: Path
    origin: str
    version: str  # the line of --version that says it
    major: int
    bin_dir: Path  # where the programs of its installation are


def candidates() -> Iterator[Candidate | str]:
    """Every place where a compiler may be, best first; in words where there is none."""
    if named := os.environ.get("HIPCC"):
        yield _program("HIPCC", named)
    roots = [("ROCM_PATH", Path(root))] if (root := os.environ.get("ROCM_PATH")) else []
    newest_first = sorted(_OPT.glob("rocm-*"), reverse=True)
    roots += [("installed", path) for path in (_OPT / "rocm", *newest_first)]
    for origin, folder in roots:
        programs = [folder / name for name in _IN_ROCM if (folder / name).exists()]
        yield from (Candidate("rocm", origin, program) for program in programs)
        if not programs:
            yield f"{origin}: {folder} has none of {', '.join(_IN_ROCM)}"
    yield from (_program("PATH", name) for name in ("amdclang++", "hipcc"))
    plain = versioned_programs("clang++")
    if unversioned := shutil.which("clang++"):
        plain.append(Path(unversioned))
    yield from (Candidate("llvm", "PATH", path) for path in plain)
    if not plain:
        yield f"PATH: no clang++ or clang++-N with N >= {OLDEST_CLANG}"


def _program(origin: str, name: str) -> Candidate | str:
    path = shutil.which(name)
    return Candidate("rocm", origin, Path(path)) if path else f"{origin}: no program {name}"


def versioned_programs(name: str) -> list[Path]:
    """Programs called ``name-N`` on PATH with N at least 20, newest first."""
    found: dict[int, Path] = {}
    for folder in os.get_exec_path():
        try:
            paths = list(Path(folder).iterdir())
        except OSError:
            continue  # PATH may name what is absent or not ours to read
        for path in paths:
            stem, _, number = path.name.rpartition("-")
            if (
                stem == name
                and number.isdigit()
                and int(number) >= OLDEST_CLANG
                and os.access(path, os.X_OK)
            ):
                found.setdefault(int(number), path)
    return [found[number] for number in sorted(found, reverse=True)]


def triton_headers() -> Path | None:
    """The folder of Triton's wheel with HIP's ``include`` and ``lib``, or None."""
    spec = find_spec("triton")
    for package in (spec and spec.submodule_search_locations) or ():
        folder = Path(package) / "backends" / "amd"
        if (folder / "include/hip/hip_runtime.h").exists() and (folder / "lib/ocml.bc").exists():
            return folder
    return None


def probe(candidate: Candidate, arch: str, work: Path) -> Toolchain:
    """Try a candidate.

    Raises:
        Refused: it cannot compile for ``arch``.
    """
    clang = _clang(candidate, work)
    tool = _rocm(clang, arch) if candidate.kind == "rocm" else _llvm(clang, arch)
    source = work / "probe.cu"
    source.write_text(_PROBE)
    try:
        run([*command(tool, work), source, "-o", work / "probe.out"], work)
    except BuildError as error:
        raise Refused(f"{clang.version} cannot compile for {arch}: {first_error(error)}") from None
    return tool


def _clang(candidate: Candidate, work: Path) -> _Clang:
    path = candidate.path
    try:
        told = run([path, "--version"], work)
    except BuildError as error:
        raise Refused(f"it does not tell its version: {first_error(error)}") from None
    version = re.search(r"^.*clang version (\d+).*$", told, re.MULTILINE)
    if version is None:
        raise Refused(f"it is no clang: --version says {told.strip()[:100]!r}")
    bin_dir = re.search(r"^InstalledDir: *(.+)$", told, re.MULTILINE)
    return _Clang(
        path=path,
        origin=candidate.origin,
        version=version[0].strip(),
        major=int(version[1]),
        bin_dir=Path(bin_dir[1].strip()) if bin_dir else path.resolve().parent,
    )


def _rocm(clang: _Clang, arch: str) -> Toolchain:
    # hipcc is a wrapper: the clang that it names is run directly, so that flags mean one thing.
    behind = clang.bin_dir / "clang++"
    compiler = behind if behind.exists() else clang.path
    near = (clang.path.parent.parent, clang.path.resolve().parent.parent)
    places = dict.fromkeys([*near, *list(clang.bin_dir.parents)[1:3]])
    root = next((place for place in places if (place / _HIP_VERSION).exists()), None)
    if root is None:
        raise Refused(f"no {_HIP_VERSION} beside it, in {', '.join(map(str, places))}")
    hip = _hip_version(root)
    flags = [f"--rocm-path={root}"]
    if hip < (6, 3):
        flags.append("-mcode-object-version=5")  # its loader knows no newer one
    return Toolchain(
        kind="rocm",
        arch=arch,
        compiler=compiler,
        identity=f"{clang.version}; HIP {_dotted(hip)} {_digest([root / _HIP_VERSION])}",
        reason=f"ROCm {_dotted(hip)}, found by {clang.origin}: {clang.path}",
        flags=tuple(flags),
        watch=(clang.path, compiler, root / _HIP_VERSION),
    )


def _llvm(clang: _Clang, arch: str) -> Toolchain:
    if clang.major < OLDEST_CLANG:
        raise Refused(f"{clang.version} is older than {OLDEST_CLANG}")
    wheel = triton_headers()
    if wheel is None:
        raise Refused("it has no HIP headers of its own, and triton's wheel, which has, is absent")
    libraries = [wheel / name for name in _LIBRARIES]
    headers = sorted(path for path in (wheel / "include/hip").rglob("*") if path.is_file())
    hip = _dotted(_hip_version(wheel))
    return Toolchain(
        kind="llvm",
        arch=arch,
        compiler=clang.path,
        identity=f"{clang.version}; HIP {hip} of triton {_digest([*headers, *libraries])}",
        reason=f"{clang.version}, found by {clang.origin}: {clang.path}; HIP {hip} of {wheel}",
        watch=(clang.path, clang.bin_dir / "clang++", wheel / _HIP_VERSION, *libraries),
        headers=wheel,
    )


def _hip_version(root: Path) -> tuple[int, int, int]:
    text = (root / _HIP_VERSION).read_text(errors="replace")
    numbers = dict(re.findall(r"#define\s+HIP_VERSION_(MAJOR|MINOR|PATCH)\s+(\d+)", text))
    major, minor, patch = (int(numbers.get(part, 0)) for part in ("MAJOR", "MINOR", "PATCH"))
    return major, minor, patch


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _digest(files: list[Path]) -> str:
    whole = hashlib.sha256()
    for path in files:
        whole.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return whole.hexdigest()[:16]


def command(tool: Toolchain, work: Path) -> Command:
    """The beginning of a command line: all of it that does not depend on the kernel.

    For a clang without ROCm this lays out in ``work`` the little that makes up a ROCm tree.
    """
    words: Command = [tool.compiler, "-x", "hip", f"--offload-arch={tool.arch}", *FLAGS]
    if tool.headers is None:
        return [*words, *tool.flags]
    root = Path(tempfile.mkdtemp(prefix="rocm-", dir=work))
    (root / "include").symlink_to(tool.headers / "include")
    major, minor, patch = _hip_version(tool.headers)
    # Without this file clang takes HIP for a 3.5 and leaves out its own wrapper header.
    (root / "share/hip").mkdir(parents=True)
    (root / "share/hip/version").write_text(
        f"HIP_VERSION_MAJOR={major}\nHIP_VERSION_MINOR={minor}\nHIP_VERSION_PATCH={patch}\n"
    )
    controls = root / "controls.bc"
    (root / "controls.ll").write_text(_controls(tool.arch))
    target = "--target=amdgcn-amd-amdhsa"
    assemble: Command = ["-x", "ir", "-c", "-emit-llvm", "-nogpulib", target, root / "controls.ll"]
    run([tool.compiler, *assemble, "-o", controls], work)
    words += [f"--rocm-path={root}", "-nogpulib"]
    for library in (*(tool.headers / name for name in _LIBRARIES), controls):
        words += ["-Xclang", "-mlink-builtin-bitcode", "-Xclang", library]
    return words


def _controls(arch: str) -> str:
    """The constants by which ROCm's device libraries are told what they are linked for.

    A ROCm tree has each in a bitcode file of its own, ``oclc_*.bc``.
    """
    digits = arch.removeprefix("gfx")
    wave64 = digits.startswith("9")
    constants = {
        # gfx950 is 9500, gfx90a is 9010, gfx1100 is 11000: major, then minor and stepping in hex.
        "ISA_version": f"i32 {int(digits[:-2])}{int(digits[-2], 16)}{int(digits[-1], 16):02}",
        "ABI_version": "i32 600",
        "wavefrontsize64": f"i8 {int(wave64)}",
        "wavefrontsize_log2": f"i32 {6 if wave64 else 5}",
        "finite_only_opt": "i8 0",
        "unsafe_math_opt": "i8 0",
        "daz_opt": "i8 0",
        "correctly_rounded_sqrt32": "i8 1",
    }
    linkage = "linkonce_odr protected local_unnamed_addr addrspace(4) constant"
    definitions = (f"@__oclc_{name} = {linkage} {value}" for name, value in constants.items())
    return "\n".join(['target triple = "amdgcn-amd-amdhsa"', *definitions, ""])
