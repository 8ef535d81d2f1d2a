"""What a compiled kernel uses and which instructions it is made of, for either vendor."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from aiter_mx.errors import ToolchainError
from aiter_mx.kernels.spec import Geometry

_GFX_CLASSES = {
    "v_mfma": "matrix",
    "v_cvt": "conversion",
    "v_": "vector",
    "s_load": "scalar load",
    "s_buffer_load": "scalar load",
    "s_waitcnt": "wait",
    "s_nop": "wait",
    "s_barrier": "barrier",
    "s_branch": "branch",
    "s_cbranch": "branch",
    "s_endpgm": "branch",
    "s_": "scalar",
    "ds_": "LDS",
    "scratch_": "scratch",
}
_SM_CLASSES = {
    "HGMMA": "matrix",
    "QGMMA": "matrix",
    "HMMA": "matrix",
    "QMMA": "matrix",
    "F2F": "conversion",
    "I2F": "conversion",
    "F2I": "conversion",
    "HADD2": "conversion",
    "LDC": "constant load",
    "ULDC": "constant load",
    "LDG": "memory load",
    "LDS": "LDS",
    "STS": "LDS",
    "LDL": "scratch",
    "STL": "scratch",
    "STG": "memory store",
    "ATOM": "memory atomic",
    "RED": "memory atomic",
    "UTMA": "memory load",
    "BAR": "barrier",
    "SYNCS": "barrier",
    "BRA": "branch",
    "EXIT": "branch",
    "BSSY": "branch",
    "BSYNC": "branch",
    "NOP": "wait",
    "": "arithmetic",
}
_SASS = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")
_SASS_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")

_SM90_REGISTERS, _SM90_REGISTER_GRANULE = 65536, 256
_SM90_SHARED_BYTES, _SM90_RESERVED_BYTES = 228 * 1024, 1024
_SM90_WARPS, _SM90_CTAS = 64, 32


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel.

    Attributes:
        usage: resources by name, for people.
        text: its disassembly.
        mix: number of instructions by class, as they stand in the code, not as they run.
    """

    usage: dict[str, str]
    text: str
    mix: Counter[str]


def disassemble(path: Path, image: bytes, arch: str, symbol: str, geometry: Geometry) -> Kernel:
    """Read a code object.

    Args:
        path: where it is stored.
        image: its bytes.
        arch: what it was compiled for.
        symbol: the kernel's name in it.
        geometry: a launch, which occupancy depends on.

    Raises:
        ToolchainError: the disassembler for ``arch`` is missing or fails.
    """
    read = _read_gfx if arch.startswith("gfx") else _read_sm
    return read(path, image, symbol, geometry)


def gfx_class(mnemonic: str) -> str:
    """The class of an AMD instruction."""
    for prefix in ("global", "buffer", "flat"):
        if mnemonic.startswith(f"{prefix}_"):
            kind = mnemonic.split("_")[1]
            return f"memory {kind}" if kind in ("load", "store", "atomic") else "memory"
    return next((c for prefix, c in _GFX_CLASSES.items() if mnemonic.startswith(prefix)), "other")


def sm_class(mnemonic: str) -> str:
    """The class of an NVIDIA instruction."""
    # Conversions from fp8 are spelled as packed moves with the format as a suffix.
    if ".E4M3" in mnemonic and not mnemonic.startswith(("QGMMA", "QMMA")):
        return "conversion"
    return next(c for prefix, c in _SM_CLASSES.items() if mnemonic.startswith(prefix))


def _read_gfx(path: Path, image: bytes, symbol: str, geometry: Geometry) -> Kernel:
    from aiter_mx.code_object import occupancy, parse_code_object
    from aiter_mx.jit.toolchain import llvm_tool

    kernel = parse_code_object(image).kernels[symbol]
    threads = geometry.block[0] * geometry.block[1] * geometry.block[2]
    usage = {
        "VGPRs": f"{kernel.vgprs} ({kernel.agprs} of them AGPRs)",
        "SGPRs": str(kernel.sgprs),
        "spills": f"{kernel.vgpr_spills} VGPRs, {kernel.sgpr_spills} SGPRs",
        "scratch": f"{kernel.scratch_bytes} bytes a lane",
        "LDS": f"{kernel.lds_bytes + geometry.shared_bytes} bytes a workgroup",
        "occupancy": f"{occupancy(kernel, threads, geometry.shared_bytes)} waves a SIMD",
    }
    command = [str(llvm_tool("llvm-objdump")), "-d", f"--disassemble-symbols={symbol}", str(path)]
    text = _output(command)
    # What follows the last s_endpgm is padding.
    code = [line.split()[0] for line in text.splitlines() if line.startswith("\t")]
    last = max((i for i, name in enumerate(code) if name == "s_endpgm"), default=len(code) - 1)
    return Kernel(usage, text, Counter(gfx_class(name) for name in code[: last + 1]))


def _read_sm(path: Path, image: bytes, symbol: str, geometry: Geometry) -> Kernel:
    tool = _cuobjdump()
    found = _SASS_USAGE.search(_output([tool, "-res-usage", str(path)]))
    if found is None:
        raise ToolchainError(f"{tool} -res-usage says nothing of {symbol} in {path}")
    registers, stack, shared, local = map(int, found.groups())
    threads = geometry.block[0] * geometry.block[1] * geometry.block[2]
    shared += geometry.shared_bytes
    usage = {
        "registers": f"{registers} a thread",
        "stack": f"{stack} bytes a thread, {local} local (spills would be here)",
        "shared": f"{shared} bytes a CTA",
        "occupancy": f"{_sm90_warps(registers, shared, threads)} of {_SM90_WARPS} warps an SM",
    }
    text = _output([tool, "-sass", str(path)])
    return Kernel(usage, text, Counter(map(sm_class, _SASS.findall(text))))


def _sm90_warps(registers: int, shared_bytes: int, threads: int) -> int:
    warps = -(-threads // 32)
    a_warp = -(-registers * 32 // _SM90_REGISTER_GRANULE) * _SM90_REGISTER_GRANULE
    ctas = min(
        _SM90_CTAS,
        _SM90_WARPS // warps,
        _SM90_REGISTERS // a_warp // warps,
        _SM90_SHARED_BYTES // (shared_bytes + _SM90_RESERVED_BYTES),
    )
    return ctas * warps


def _cuobjdump() -> str:
    """CUDA's cuobjdump, or the one in Triton's wheel."""
    folders = [
        Path(os.environ[name]) / "bin" for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ
    ]
    triton = find_spec("triton")
    if triton is not None and triton.origin is not None:
        folders.append(Path(triton.origin).parent / "backends" / "nvidia" / "bin")
    search = os.pathsep.join([os.environ.get("PATH", ""), *map(str, folders)])
    found = shutil.which("cuobjdump", path=search)
    if found is None:
        raise ToolchainError(
            "no cuobjdump on PATH, under CUDA_HOME or in Triton's wheel; install CUDA's binary "
            "utilities, or set CUDA_HOME"
        )
    return found


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ToolchainError(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return done.stdout
