"""Compilers for NVIDIA GPUs: nvcc of a CUDA toolkit, or of the nvidia-cuda-nvcc wheel."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

from aiter_mx.errors import BuildError
from aiter_mx.jit.compiler import Candidate, Command, Refused, Toolchain, first_error, run

SUFFIX = "cubin"
FLAGS = ("-O3", "-std=c++17", "-cubin")
LINE_FLAGS = ("-lineinfo",)
INSTALL = (
    "install a CUDA toolkit of 12.4 or newer (and set CUDA_HOME if its nvcc is not on PATH), or "
    "pip install nvidia-cuda-nvcc nvidia-cuda-cccl"
)
ENVIRONMENT = ("CUDA_HOME", "CUDA_PATH")
_USUAL = Path("/usr/local/cuda/bin/nvcc")
OLDEST_CUDA = (12, 4)


def candidates() -> Iterator[Candidate | str]:
    """Every place where a compiler may be, best first; in words where there is none."""
    places = [(name, os.environ[name]) for name in ENVIRONMENT if os.environ.get(name)]
    programs = [(origin, Path(root) / "bin/nvcc") for origin, root in places]
    if on_path := shutil.which("nvcc"):
        programs.append(("PATH", Path(on_path)))
    else:
        yield "PATH: no nvcc"
    programs.append(("installed", _USUAL))
    in_wheels = [path for folder in _wheels() for path in sorted(folder.glob("*/bin/nvcc"))]
    programs += [("wheel", path) for path in reversed(in_wheels)]
    for origin, path in programs:
        yield Candidate("nvcc", origin, path) if path.exists() else f"{origin}: no {path}"
    if not in_wheels:
        yield "wheel: nvidia-cuda-nvcc is not installed"


def _wheels() -> list[Path]:
    spec = find_spec("nvidia")
    return [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]


def _wheel_headers() -> list[str]:
    found = [path for folder in _wheels() for path in folder.glob("*/include/cuda_runtime.h")]
    return [f"-I{folder}" for path in found for folder in (path.parent, path.parent / "cccl")]


def _gencode(arch: str) -> tuple[str, str]:
    return "-gencode", f"arch=compute_{arch.removeprefix('sm_')},code={arch}"


def probe(candidate: Candidate, arch: str, work: Path) -> Toolchain:
    """Try a candidate.

    Raises:
        Refused: it cannot compile for ``arch``.
    """
    path = candidate.path
    try:
        version = run([path, "--version"], work)
    except BuildError as error:
        raise Refused(f"it does not tell its version: {first_error(error)}") from None
    release = re.search(r"release (\d+)\.(\d+), V([\d.]+)", version)
    if release is None:
        raise Refused("it is no nvcc: --version names no release")
    if (int(release[1]), int(release[2])) < OLDEST_CUDA:
        oldest = ".".join(map(str, OLDEST_CUDA))
        raise Refused(f"CUDA {release[1]}.{release[2]} is older than {oldest}")
    source = work / "probe.cu"
    source.write_text("#include <cuda_runtime.h>\n__global__ void probe(float *x) { *x = 1; }\n")
    command: Command = [path, *FLAGS, *_gencode(arch), source, "-o", work / "probe.out"]
    flags: list[str] = []
    try:
        try:
            run(command, work)
        except BuildError as error:
            flags = _wheel_headers()  # a toolkit may come without the headers that a wheel has
            if not flags or "cuda_runtime.h" not in str(error):
                raise
            run([*command, *flags], work)
        plan = run([*command, *flags, "--dryrun"], work)
    except BuildError as error:
        raise Refused(f"CUDA {release[3]} does not compile: {first_error(error)}") from None
    # nvcc may be a wrapper script: its plan names the programs that really do the work.
    folders = {name: Path(value) for name, value in re.findall(r"#\$ (\w+)=(\S+)\s", plan)}
    parts = [folders.get("_HERE_", path.parent) / name for name in ("nvcc", "ptxas")]
    parts.append(folders.get("CICC_PATH", path.parent) / "cicc")
    headers = [Path(folder) for folder in re.findall(r'-I"?([^"\s]+)', plan)]
    runtime = next((p for h in headers if (p := h / "cuda_runtime_api.h").exists()), None)
    return Toolchain(
        kind="nvcc",
        arch=arch,
        compiler=path,
        identity=f"nvcc {release[3]} {version.strip().splitlines()[-1]}; {_cudart(runtime)}",
        reason=f"CUDA {release[3]}, found by {candidate.origin}: {path}"
        + (f", with headers from {flags[0][2:]}" if flags else ""),
        flags=tuple(flags),
        watch=(path, *parts, *filter(None, [runtime])),
    )


def _cudart(header: Path | None) -> str:
    text = header.read_text(errors="replace") if header else ""
    version = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", text)
    return f"runtime headers {version[1] if version else 'of unknown version'}"


def command(tool: Toolchain) -> Command:
    """The beginning of a command line: all of it that does not depend on the kernel."""
    return [tool.compiler, *FLAGS, *_gencode(tool.arch), *tool.flags]


def where_lines_are(csrc: Path) -> list[str]:
    """nvcc names the files where they are."""
    return []


def flags_for(defines: Mapping[str, int]) -> list[str]:
    """What a kernel's definitions ask of the compiler itself: nothing."""
    return []
