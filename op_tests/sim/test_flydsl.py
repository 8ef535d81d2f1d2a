"""The simulator runs what a second compiler, FlyDSL, makes for gfx950. It needs FlyDSL's wheel."""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from aiter_mx.region import Region
from aiter_mx.sim.program import Program, SimOptions
from op_tests.sim.tools import KERNELS

pytestmark = pytest.mark.skipif(
    find_spec("flydsl") is None, reason="FlyDSL is not installed: pip install flydsl (77 MB)"
)


def compiled(kind: str, folder: Path) -> bytes:
    """The code object, out of the MLIR that FlyDSL writes down after its last pass."""
    linker = shutil.which("ld.lld-22") or shutil.which("ld.lld")
    assert linker, "FlyDSL links with ld.lld: install lld"
    (folder / "llvm" / "bin").mkdir(parents=True)
    (folder / "llvm" / "bin" / "ld.lld").symlink_to(linker)
    environment = {
        "HOME": str(folder), "ROCM_PATH": str(folder), "COMPILE_ONLY": "1",
        "FLYDSL_GPU_ARCH": "gfx950", "FLYDSL_DUMP_IR": "1", "FLYDSL_DUMP_DIR": str(folder),
    }  # fmt: skip
    run = subprocess.run(
        [sys.executable, str(KERNELS / "flydsl_product.py"), kind],
        env=os.environ | environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    (path,) = folder.rglob("*gpu_module_to_binary.mlir")
    literal = re.search(r'"(\\7FELF(?:[^"\\]|\\.)*)"', path.read_text())
    assert literal is not None
    escaped = re.compile(rb"\\([0-9A-F]{2}|[\\\"])")
    return escaped.sub(
        lambda match: bytes.fromhex(match[1].decode()) if len(match[1]) == 2 else match[1],
        literal[1].encode(),
    )


@pytest.mark.parametrize("kind", ["f32", "bf16", "fp8"])
def test_a_product_that_flydsl_compiled_matches_float64(kind: str, tmp_path: Path) -> None:
    program = Program.from_image(compiled(kind, tmp_path))
    generator = torch.Generator().manual_seed(1)
    dtypes = {"f32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
    K = 256 if kind == "fp8" else 32
    a, b = (torch.randn(rows, K, generator=generator).to(dtypes[kind]) for rows in (128, 64))
    c = torch.zeros(128, 64)
    arguments = b"".join(
        struct.pack("<Qiiq", x.data_ptr(), *x.shape, x.shape[1]) for x in (a, b, c)
    )
    regions = [
        Region(name, x.data_ptr(), x.nbytes, access)
        for name, x, access in (("a", a, "r"), ("b", b, "r"), ("c", c, "w"))
    ]
    (name,) = program.code_object.kernels
    report = program.launch(
        name, (2, 1, 1), (256, 1, 1), arguments, 0, regions, SimOptions(delay=True)
    )
    scale = 2.0 ** (0x7E + 0x81 - 254) if kind == "fp8" else 1
    np.testing.assert_allclose(c, scale * (a.double() @ b.double().T), rtol=1e-5, atol=1e-5)
    assert list(report.mfma_passes) == ["scaled fp8 x fp8" if kind == "fp8" else kind]
