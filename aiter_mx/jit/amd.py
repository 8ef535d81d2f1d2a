"""Compilers for AMD GPUs: ROCm's own, else a plain clang."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from aiter_mx.errors import BuildError
from aiter_mx.jit.compiler import Candidate, Command, Refused, Toolchain, first_error, run
from aiter_mx.jit.folder import NO_DESCRIPTORS

SUFFIX = "hsaco"
FLAGS = (
    "-O3",
    "-std=c++17",
    "--cuda-device-only",
    "--no-gpu-bundle-output",
    "-fuse-cuid=none",  # a symbol named after the path of the source helps nobody here
    "-nogpuinc",  # kernels need neither HIP's headers, a second of each build, ...
    "-nogpulib",  # ... nor its device libraries
)
LINES_ROOT = "/csrc"
"""What code objects with source lines call ``csrc/``, wherever that was when they were built:
installations that share a cache find their own files."""
LINE_FLAGS = ("-gline-tables-only", f"-fdebug-compilation-dir={LINES_ROOT}")
"""That add source lines to a code object and change nothing else of it."""
PRELOAD = "MX_PRELOAD"
"""A definition: the dwords of a kernel's first arguments that its waves begin with in registers,
without a load."""
INSTALL = (
    "install ROCm 7 (and set ROCM_PATH if it is not in /opt/rocm), or clang 20 or newer with its "
    "lld (on Debian and Ubuntu: apt-get install clang-22 lld-22 llvm-22)"
)
ENVIRONMENT = ("HIPCC", "ROCM_PATH")
OLDEST_CLANG = 20
_OPT = Path("/opt")
_HIP_VERSION = "include/hip/hip_version.h"
_IN_ROCM = ("bin/amdclang++", "bin/hipcc", "lib/llvm/bin/clang++", "llvm/bin/clang++")

_PROBE = """extern "C" __attribute__((global)) void probe(float *x) {
  x[__builtin_amdgcn_workitem_id_x()] *= 2;
}
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
        except OSError as error:
            if error.errno in NO_DESCRIPTORS:
                raise
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


def probe(candidate: Candidate, arch: str, work: Path) -> Toolchain:
    """Try a candidate.

    Raises:
        Refused: it cannot compile for ``arch``.
    """
    clang = _clang(candidate, work)
    tool = (_rocm(clang, arch) if candidate.kind == "rocm" else None) or _llvm(clang, arch)
    source = work / "probe.cu"
    source.write_text(_PROBE)
    try:
        run([*command(tool), source, "-o", work / "probe.out"], work)
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


def _rocm(clang: _Clang, arch: str) -> Toolchain | None:
    """The toolchain of a ROCm tree, or None when the compiler is in none."""
    # hipcc is a wrapper: the clang that it names is run directly, so that flags mean one thing.
    behind = clang.bin_dir / "clang++"
    compiler = behind if behind.exists() else clang.path
    near = (clang.path.parent.parent, clang.path.resolve().parent.parent)
    places = dict.fromkeys([*near, *list(clang.bin_dir.parents)[1:3]])
    root = next((place for place in places if (place / _HIP_VERSION).exists()), None)
    if root is None:
        return None
    hip = _hip_version(root)
    # The loader of an older ROCm knows no newer code object.
    flags = ("-mcode-object-version=5",) if hip < (6, 3) else ()
    return Toolchain(
        kind="rocm",
        arch=arch,
        compiler=compiler,
        identity=f"{clang.version}; HIP {_dotted(hip)}",
        reason=f"ROCm {_dotted(hip)}, found by {clang.origin}: {clang.path}",
        flags=flags,
        watch=(clang.path, compiler, root / _HIP_VERSION),
    )


def _llvm(clang: _Clang, arch: str) -> Toolchain:
    if clang.major < OLDEST_CLANG:
        raise Refused(f"{clang.version} is older than {OLDEST_CLANG}")
    return Toolchain(
        kind="llvm",
        arch=arch,
        compiler=clang.path,
        identity=clang.version,
        reason=f"{clang.version}, found by {clang.origin}: {clang.path}",
        watch=(clang.path, clang.bin_dir / "clang++"),
    )


def _hip_version(root: Path) -> tuple[int, int, int]:
    text = (root / _HIP_VERSION).read_text(errors="replace")
    numbers = dict(re.findall(r"#define\s+HIP_VERSION_(MAJOR|MINOR|PATCH)\s+(\d+)", text))
    major, minor, patch = (int(numbers.get(part, 0)) for part in ("MAJOR", "MINOR", "PATCH"))
    return major, minor, patch


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def command(tool: Toolchain) -> Command:
    """The beginning of a command line: all of it that does not depend on the kernel."""
    return [tool.compiler, "-x", "hip", f"--offload-arch={tool.arch}", *FLAGS, *tool.flags]


def where_lines_are(csrc: Path) -> list[str]:
    """Has source lines name files from ``LINES_ROOT`` on, not from where ``csrc/`` is."""
    return [f"-fdebug-prefix-map={csrc}={LINES_ROOT}"]


def flags_for(defines: Mapping[str, int]) -> list[str]:
    """What a kernel's definitions ask of the compiler itself."""
    dwords = defines.get(PRELOAD, 0)
    return ["-mllvm", f"-amdgpu-kernarg-preload-count={dwords}"] if dwords else []
