"""Compiles small gfx950 kernels for the simulator's tests, and launches them on numpy arrays."""

from __future__ import annotations

import struct
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from aiter_mx.code_object import parse_code_object
from aiter_mx.jit.toolchain import find_toolchain
from aiter_mx.region import Region
from aiter_mx.sim.program import Dim3, Program, SimOptions
from aiter_mx.sim.report import LaunchReport

KERNELS = Path(__file__).parent / "kernels"
TRACED = SimOptions(count_conflicts=True, trace=True, schedule="round-robin")
COPY = """
KERNEL(256) copy(const u32x4* in, u32x4* out, int steps) {
    u32 at = group_id() * 256 * steps + lane_id();
    for (int i = 0; i < steps; i++)
        out[at + 256 * i] = in[at + 256 * i];
}
"""
Array = np.ndarray[Any, Any]


@cache
def compile_gfx950(source: str, *flags: str) -> bytes:
    """The code object of a kernel source, a file of ``kernels`` or the text itself."""
    text = (KERNELS / source).read_text() if source.endswith(".cu") else source
    with tempfile.TemporaryDirectory() as folder:
        path, out = Path(folder) / "k.cu", Path(folder) / "k.hsaco"
        path.write_text('#include "sim_test.h"\n' + text)
        command = [
            str(find_toolchain("gfx950").compiler),
            *("-x", "hip", "--offload-arch=gfx950", "--cuda-device-only", "-nogpuinc", "-nogpulib"),
            *("--no-gpu-bundle-output", "-std=c++17", f"-I{KERNELS}", *(flags or ("-O3",))),
            *(str(path), "-o", str(out)),
        ]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
        return out.read_bytes()


@cache
def program(source: str, *flags: str) -> Program:
    """The loaded code object of a kernel source."""
    return Program.from_image(compile_gfx950(source, *flags))


def launch(
    loaded: Program,
    kernel: str,
    grid: int | Dim3,
    block: int | Dim3,
    arguments: Sequence[Array | int | float],
    *,
    access: str = "",
    shared_bytes: int = 0,
    options: SimOptions | None = None,
) -> LaunchReport:
    """Launch with arrays as pointers, Python ints as i32 and floats as f32.

    ``access`` has a letter for each array: r, w, or b for both; all may be both by default.
    """
    packed, regions = b"", []
    arrays = [a for a in arguments if isinstance(a, np.ndarray)]
    letters = dict(zip(map(id, arrays), access or "b" * len(arrays), strict=True))
    for i, argument in enumerate(arguments):
        if isinstance(argument, np.ndarray):
            packed += bytes(-len(packed) % 8) + struct.pack("<Q", argument.ctypes.data)
            letter = letters[id(argument)].replace("b", "rw")
            regions.append(Region(f"argument {i}", argument.ctypes.data, argument.nbytes, letter))
        else:
            packed += struct.pack("<i" if isinstance(argument, int) else "<f", argument)
    grid = (grid, 1, 1) if isinstance(grid, int) else grid
    block = (block, 1, 1) if isinstance(block, int) else block
    return loaded.launch(
        kernel, grid, block, packed, shared_bytes, regions, options or SimOptions()
    )


def e4m3_to_f64(codes: Array) -> Array:
    """The value of each e4m3 code."""
    return torch.from_numpy(codes).view(torch.float8_e4m3fn).double().numpy()


def dequantise(codes: Array, scales: Array) -> Array:
    """Rows of e4m3 times the e8m0 scale of each block of 32."""
    factors = np.where(scales == 255, np.nan, np.exp2(scales.astype(np.float64) - 127))
    return e4m3_to_f64(codes) * np.repeat(factors, 32, axis=1)


def random_e4m3(rng: np.random.Generator, *shape: int) -> Array:
    """Codes over the whole e4m3 range, NaN apart."""
    codes = rng.integers(0, 256, shape, dtype=np.uint8)
    codes[codes & 0x7F == 0x7F] ^= 1
    return codes


def without_preload(image: bytes) -> bytes:
    """A code object of one kernel as it runs where firmware puts no arguments into registers."""
    code = parse_code_object(image)
    (kernel,) = code.kernels.values()
    for segment in code.segments:
        for at in range(-segment.address % 64, len(segment.data) - 63, 64):
            (entry,) = struct.unpack_from("<q", segment.data, at + 16)
            if segment.address + at + entry == kernel.descriptor.entry:
                field = image.index(segment.data) + at + 58  # LLVM's AMDGPU usage guide
                return image[:field] + bytes(2) + image[field + 2 :]
    raise ValueError(f"the descriptor of {kernel.name} is in no section")
