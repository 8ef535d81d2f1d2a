"""Compilers for AMD GPUs: ROCm's own, else a plain clang with the HIP headers of Triton's wheel."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterator
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
_IN_ROCM = ("bin/amdclang++", "bin/hipcc", "lib/llvm/bin/clang++", "llvm/bin/clang++")

# The constants by which ROCm's device libraries are told what they are linked for; a ROCm tree has
# each in a bitcode file of its own (oclc_*.bc).
_CONTROLS = (
    ("ISA_version", "i32"),
    ("ABI_version", "i32"),
    ("wavefrontsize64", "i8"),
    ("wavefrontsize_log2", "i32"),
    ("finite_only_opt", "i8"),
    ("unsafe_math_opt", "i8"),
    ("daz_opt", "i8"),
    ("correctly_rounded_sqrt32", "i8"),
)


def candidates() -> Iterator[Candidate]:
    """Every place where a compiler may be, best first."""
    if named := os.environ.get("HIPCC"):
        path = shutil.which(named)
        yield Candidate("rocm", "HIPCC", Path(path) if path else None, f"{named} is no program")
    roots = [("ROCM_PATH", Path(root))] if (root := os.environ.get("ROCM_PATH")) else []
    newest_first = sorted(_OPT.glob("rocm-*"), reverse=True)
    roots += [("installed", path) for path in (_OPT / "rocm", *newest_first)]
    for origin, folder in roots:
        programs = [folder / name for name in _IN_ROCM if (folder / name).exists()]
        yield from (Candidate("rocm", origin, program) for program in programs)
        if not programs:
            yield Candidate("rocm", origin, None, f"{folder} has none of {', '.join(_IN_ROCM)}")
    for name in ("amdclang++", "hipcc"):
        path = shutil.which(name)
        yield Candidate("rocm", "PATH", Path(path) if path else None, f"no {name}")
    plain = versioned_programs("clang++")
    if unversioned := shutil.which("clang++"):
        plain.append(Path(unversioned))
    yield from (Candidate("llvm", "PATH", path) for path in plain)
    if not plain:
        yield Candidate("llvm", "PATH", None, f"no clang++ or clang++-N with N >= {OLDEST_CLANG}")


def versioned_programs(name: str) -> list[Path]:
    """Programs called ``name-N`` on PATH with N at least 20, newest first."""
    found: dict[int, Path] = {}
    for folder in os.get_exec_path():
        for path in Path(folder or ".").glob(f"{name}-*"):
            number = path.name[len(name) + 1 :]
            if number.isdigit() and int(number) >= OLDEST_CLANG and os.access(path, os.X_OK):
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
    assert candidate.path is not None
    try:
        version = run([candidate.path, "--version"], work)
    except BuildError as error:
        raise Refused(f"it does not tell its version: {first_error(error)}") from None
    clang = re.search(r"^.*clang version (\d+).*$", version, re.MULTILINE)
    if clang is None:
        raise Refused("it is no clang: --version does not say so")
    attempt = _rocm if candidate.kind == "rocm" else _llvm
    tool = attempt(candidate, arch, version, int(clang[1]), clang[0].strip())
    source = work / "probe.cu"
    if candidate.kind == "rocm":
        text = "#include <hip/hip_runtime.h>\n__global__ void probe(float *x) { *x = expf(*x); }\n"
        extra = tool.flags
    else:
        text = "__attribute__((global)) void probe(float *x) { *x = 1; }\n"
        extra = ("-nogpuinc", "-nogpulib")
    source.write_text(text)
    command: Command = [tool.compiler, "-x", "hip", f"--offload-arch={arch}", *FLAGS, *extra]
    try:
        run([*command, source, "-o", work / "probe.out"], work)
    except BuildError as error:
        raise Refused(f"{clang[0]} cannot compile for {arch}: {first_error(error)}") from None
    return tool


def _installed_dir(version: str, path: Path) -> Path:
    told = re.search(r"^InstalledDir: *(.+)$", version, re.MULTILINE)
    return Path(told[1].strip()) if told else path.resolve().parent


def _rocm(candidate: Candidate, arch: str, version: str, major: int, line: str) -> Toolchain:
    path = candidate.path
    assert path is not None
    # hipcc is a wrapper: the clang that it names is run directly, so that flags mean one thing.
    bin_dir = _installed_dir(version, path)
    clang = bin_dir / "clang++"
    compiler = clang if clang.exists() else path
    places = [path.parent.parent, path.resolve().parent.parent, *list(bin_dir.parents)[1:3]]
    roots = [place for place in places if (place / "include/hip/hip_version.h").exists()]
    if not roots:
        raise Refused(
            "no include/hip/hip_version.h beside it, in "
            + ", ".join(sorted({str(place) for place in places}))
        )
    header = roots[0] / "include/hip/hip_version.h"
    hip = _hip_version(header)
    flags = [f"--rocm-path={roots[0]}"]
    if hip < (6, 3):
        flags.append("-mcode-object-version=5")  # its loader knows no newer one
    return Toolchain(
        kind="rocm",
        arch=arch,
        compiler=compiler,
        identity=f"{line}; HIP {'.'.join(map(str, hip))} {_digest([header])}",
        reason=f"ROCm {hip[0]}.{hip[1]}, found by {candidate.origin}: {path}",
        flags=tuple(flags),
        watch=(path, compiler, header),
    )


def _llvm(candidate: Candidate, arch: str, version: str, major: int, line: str) -> Toolchain:
    path = candidate.path
    assert path is not None
    if major < OLDEST_CLANG:
        raise Refused(f"{line} is older than {OLDEST_CLANG}")
    headers = triton_headers()
    if headers is None:
        raise Refused("it has no HIP headers of its own, and triton's wheel, which has, is absent")
    files = sorted(path for path in (headers / "include/hip").rglob("*") if path.is_file())
    files += [headers / "lib/ocml.bc", headers / "lib/ockl.bc"]
    hip_header = headers / "include/hip/hip_version.h"
    hip = ".".join(map(str, _hip_version(hip_header)))
    clang = _installed_dir(version, path) / "clang++"
    return Toolchain(
        kind="llvm",
        arch=arch,
        compiler=path,
        identity=f"{line}; HIP {hip} of triton {_digest(files)}",
        reason=f"{line} on {candidate.origin} as {path}, with the HIP {hip} headers of {headers}",
        watch=(path, clang, hip_header, *files[-2:]),
        headers=headers,
    )


def _hip_version(header: Path) -> tuple[int, int, int]:
    text = header.read_text(errors="replace")
    numbers = [
        re.search(rf"#define\s+HIP_VERSION_{part}\s+(\d+)", text)
        for part in ("MAJOR", "MINOR", "PATCH")
    ]
    major, minor, patch = (int(number[1]) if number else 0 for number in numbers)
    return major, minor, patch


def _digest(files: list[Path]) -> str:
    whole = hashlib.sha256()
    for path in files:
        whole.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return whole.hexdigest()[:16]


def command(tool: Toolchain, work: Path) -> Command:
    """The beginning of a command line: compiler and everything that does not depend on the kernel.

    For a clang without ROCm this lays out in ``work`` the little that makes up a ROCm tree.
    """
    words: Command = [tool.compiler, "-x", "hip", f"--offload-arch={tool.arch}", *FLAGS]
    if tool.headers is None:
        return [*words, *tool.flags]
    root = work / "rocm"
    (root / "share/hip").mkdir(parents=True)
    (root / "include").symlink_to(tool.headers / "include")
    major, minor, patch = _hip_version(tool.headers / "include/hip/hip_version.h")
    # Without this file clang takes HIP for a 3.5 and leaves out its own wrapper header.
    (root / "share/hip/version").write_text(
        f"HIP_VERSION_MAJOR={major}\nHIP_VERSION_MINOR={minor}\nHIP_VERSION_PATCH={patch}\n"
    )
    controls = root / "controls.bc"
    (root / "controls.ll").write_text(_controls(tool.arch))
    target = "--target=amdgcn-amd-amdhsa"
    assemble: Command = ["-x", "ir", "-c", "-emit-llvm", "-nogpulib", target, root / "controls.ll"]
    run([tool.compiler, *assemble, "-o", controls], work)
    libraries = (tool.headers / "lib/ocml.bc", tool.headers / "lib/ockl.bc", controls)
    links: Command = [
        word
        for path in libraries
        for word in ("-Xclang", "-mlink-builtin-bitcode", "-Xclang", path)
    ]
    return [*words, f"--rocm-path={root}", "-nogpulib", *links]


def _controls(arch: str) -> str:
    digits = arch.removeprefix("gfx")
    # gfx950 is 9500, gfx90a is 9010, gfx1100 is 11000: major, then minor and stepping in hex.
    isa = int(digits[:-2]) * 1000 + int(digits[-2], 16) * 100 + int(digits[-1], 16)
    wave64 = digits.startswith("9")
    values = {
        "ISA_version": isa,
        "ABI_version": 600,
        "wavefrontsize64": int(wave64),
        "wavefrontsize_log2": 6 if wave64 else 5,
        "correctly_rounded_sqrt32": 1,
    }
    lines = ['target triple = "amdgcn-amd-amdhsa"']
    for name, kind in _CONTROLS:
        lines.append(
            f"@__oclc_{name} = linkonce_odr protected local_unnamed_addr addrspace(4) "
            f"constant {kind} {values.get(name, 0)}, align {int(kind[1:]) // 8}"
        )
    return "\n".join(lines) + "\n"
