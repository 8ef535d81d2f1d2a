"""The HIP runtime against a stand-in for libamdhip64 that writes down each launch."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from aiter_mx.kernels.spec import Arg
from aiter_mx.runtimes.base import PackedArgs

STAND_IN = r"""
#include <stdio.h>
#include <string.h>

int hipModuleLoadData(void** module, const void* image) {
    *module = (void*)0x1000;
    return memcmp(image, "code", 4) ? 200 : 0; /* hipErrorInvalidImage */
}

int hipModuleGetFunction(void** function, void* module, const char* name) {
    *function = (void*)0x2000;
    return module == (void*)0x1000 && !strcmp(name, "kernel") ? 0 : 500; /* hipErrorNotFound */
}

int hipModuleLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                          unsigned by, unsigned bz, unsigned shared, void* stream, void** params,
                          void** extra) {
    if (bx > 1024) return 1; /* hipErrorInvalidValue */
    if (function != (void*)0x2000 || params || extra[0] != (void*)1 || extra[2] != (void*)2 ||
        extra[4] != (void*)3)
        return 1;
    const unsigned char* buffer = extra[1];
    size_t size = *(size_t*)extra[3];
    printf("{\"grid\": [%u, %u, %u], \"block\": [%u, %u, %u], \"shared\": %u, \"stream\": %zu, "
           "\"args\": \"", gx, gy, gz, bx, by, bz, shared, (size_t)stream);
    for (size_t i = 0; i < size; i++) printf("%02x", buffer[i]);
    puts("\"}");
    fflush(stdout);
    return 0;
}
"""

CALLER = """
import contextlib
import torch
torch.cuda.device = lambda device: contextlib.nullcontext()  # a CPU build of torch has no GPU
torch._C._cuda_getCurrentRawStream = lambda device: 0
from aiter_mx.errors import LaunchError
from aiter_mx.kernels.spec import Arg, Geometry
from aiter_mx.runtimes import hip
from aiter_mx.runtimes.base import PackedArgs

def refused(call):
    try:
        call()
    except LaunchError as error:
        return str(error)
    raise SystemExit("was not refused")

args = PackedArgs(
    (Arg("x", "pointer", "r"), Arg("y", "pointer", "w"), Arg("n", "i32"), Arg("k", "i64"),
     Arg("s", "f32")),
    (-7, 1 << 40, 1.5),
)
function = hip.get_function(hip.load(b"code", 0), "kernel", 0)
start = hip.bind(function, Geometry((1, 2, 3), (64, 4, 1), 5), args)
args.set_pointers(0x7F0000000010, 0)
start(0x33)
args.set_pointers(0x20, 0xFFFFFFFFFFFFFFF0)
start(0)
assert "hipErrorInvalidImage" in refused(lambda: hip.load(b"nonsense", 0))
assert "hipErrorNotFound" in refused(lambda: hip.get_function(0x1000, "absent", 0))
too_wide = hip.bind(function, Geometry((1, 1, 1), (2048, 1, 1)), args)
assert "hipErrorInvalidValue" in refused(lambda: too_wide(0))
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler for the stand-in library")
    source = tmp_path / "stand_in.c"
    source.write_text(STAND_IN)
    library = tmp_path / "libamdhip64.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    return tmp_path


def test_launches_carry_packed_arguments_and_errors_name_the_call(stand_in: Path) -> None:
    environment = os.environ | {"LD_LIBRARY_PATH": str(stand_in)}
    result = subprocess.run(
        [sys.executable, "-c", CALLER], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    first, second = map(json.loads, result.stdout.splitlines())
    assert (first["grid"], first["block"], first["shared"]) == ([1, 2, 3], [64, 4, 1], 5)
    assert (first["stream"], second["stream"]) == (0x33, 0)
    # As the C compiler lays out (void*, void*, int, long, float): k is aligned to 8.
    layout = "<QQi4xqf"
    expected = (-7, 1 << 40, 1.5)
    assert struct.unpack(layout, bytes.fromhex(first["args"])) == (0x7F0000000010, 0, *expected)
    assert struct.unpack(layout, bytes.fromhex(second["args"])) == (0x20, 2**64 - 16, *expected)


def test_scalars_may_lie_on_both_sides_of_the_pointers() -> None:
    kinds = {"n": "i32", "x": "pointer", "y": "pointer", "s": "f32", "k": "i64"}
    args = PackedArgs(tuple(Arg(*each) for each in kinds.items()), (-7, 1.5, 1 << 40))
    args.set_pointers(0x7F0000000010, 0x20)
    assert struct.unpack("<i4xQQf4xq", args.to_bytes()) == (-7, 0x7F0000000010, 0x20, 1.5, 1 << 40)
    with pytest.raises(ValueError, match="pointers must follow each other"):
        PackedArgs((Arg("x", "pointer"), Arg("n", "i32"), Arg("y", "pointer")), (1,))
