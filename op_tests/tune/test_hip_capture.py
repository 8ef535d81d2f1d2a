"""The stand-in for the HIP runtime notes what is launched through it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import ctypes, struct, sys
from pathlib import Path
from op_tests.sim.tools import compile_gfx950
from tune.published.hip_capture import install

folder = Path(sys.argv[1])
image = compile_gfx950("KERNEL(64) scale(float* out, int n, double by) { out[n] *= by; }")
capture = install(folder)
hip = ctypes.CDLL("libamdhip64.so.7")
module, function = ctypes.c_void_p(), ctypes.c_void_p()
assert hip.hipModuleLoadData(ctypes.byref(module), image) == 0
assert hip.hipModuleGetFunction(ctypes.byref(function), module, b"scale") == 0
values = [ctypes.c_uint64(0x1234), ctypes.c_int32(7), ctypes.c_double(0.5)]
pointers = (ctypes.c_void_p * 3)(*(ctypes.addressof(each) for each in values))
assert hip.hipModuleLaunchKernel(function, 3, 2, 1, 64, 1, 1, 128, None, pointers, None) == 0
(launch,) = capture.take()
assert (launch.kernel, launch.grid, launch.block) == ("scale", (3, 2, 1), (64, 1, 1))
assert launch.shared_bytes == 128 and capture.take() == []
assert struct.unpack("<Qi4xd", launch.kernarg) == (0x1234, 7, 0.5)
print("noted")
"""


def test_a_launch_is_noted_with_the_arguments_that_its_kernel_reads(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert run.stdout == "noted\n", run.stderr
