"""What gfx950's decode kernels ask memory for, by the simulator's counters, and from how far."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import pytest
import torch

import aiter_mx
from aiter_mx.dispatch.dispatcher import route
from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.linear.gemv import GEMV
from aiter_mx.kernels.registry import find_kernel
from aiter_mx.kernels.spec import MAX_GRID_X, Geometry
from aiter_mx.sim.program import SimOptions
from aiter_mx.sim.timing.constants import CUS
from aiter_mx.sim.timing.model import SIMDS
from aiter_mx.target import hardware
from aiter_mx.trial import try_out
from op_tests.linear.launches import launch_linear
from op_tests.linear.operands import operands
from op_tests.mx_reference import assert_close_to_reference

MEMORY_BYTES_A_US, LATENCY_US = 8e6, 1.0  # of an MI355X's data sheet, and assumed
GFX950 = hardware("gfx950")
# Shapes of a 6144-wide model on 4 GPUs.
DECODE = [(1, 2304, 6144), (2, 6144, 1536), (3, 2304, 6144), (16, 6144, 1536), (64, 1536, 6144)]


@pytest.mark.parametrize(("M", "N", "K"), DECODE)
def test_decode_reads_each_byte_once_and_enough_of_them_at_a_time(M: int, N: int, K: int) -> None:
    problem = LinearProblem(M, N, K)
    chosen = route("linear", GFX950, problem)
    assert chosen.kernel in ("gemv", "mfma", "mfma_split")
    kernel = find_kernel("linear", "gfx950", chosen.backend, chosen.kernel)
    trial = try_out(kernel, problem, chosen.config, SimOptions(count_unique=True))
    report = trial.report
    inputs = sum(tensor.nbytes for tensor in trial.operands[:4] if tensor is not None)
    assert report.unique_bytes_read is not None and report.unique_bytes_written is not None
    # Where K is split, partial sums and their counters are written and read back.
    handed = (trial.launch.workspace, trial.launch.counters)
    sums = sum(tensor.nbytes for tensor in handed if tensor is not None)
    assert (sums > 0) == (chosen.kernel == "mfma_split")
    assert inputs <= report.unique_bytes_read <= 1.02 * inputs + sums
    assert 2 * M * N <= report.unique_bytes_written <= 2 * M * N + sums
    assert report.scratch_bytes == 0

    # Payload by 16 bytes a lane, scales by one, two, or in gemv four, a bias by two.
    loads = {name for name in report.mnemonics if "load" in name and name[0] != "s"}
    of_scales = "dword" if chosen.kernel == "gemv" else "ubyte"
    assert {name.rpartition("_")[2] for name in loads} <= {"dwordx4", of_scales, "ushort"}

    # At 8 TB/s so much must be under way on each compute unit to cover a latency. What there is, is
    # counted whenever a wave waits; or all of a unit's weights are asked for before any is used.
    needed = MEMORY_BYTES_A_US * LATENCY_US / CUS
    groups = trial.launch.groups
    at_once = max(1, trial.waves_a_simd * SIMDS * groups // report.waves)
    rounds = ceil(ceil(groups / CUS) / at_once)
    assert trial.cu_bytes >= needed or rounds * report.latencies / groups <= 1
    if kernel.name != "gemv":
        assert set(report.mfma) == {"v_mfma_scale_f32_16x16x128_f8f6f4"}  # four blocks of 32


def test_the_gemv_takes_weights_above_2_and_4_gib() -> None:
    # Of a grid that covers all of N, only its first workgroup in each row of the grid is launched.
    rows, K = 3, 32 * (1 + (1 << 31) // (3 * 32 * MAX_GRID_X) + 1)
    firsts = [y * MAX_GRID_X * rows for y in range(3)]
    N = firsts[-1] + rows
    assert 1 << 31 < firsts[1] * K < 1 << 32 < firsts[2] * K
    wq = torch.empty((N, K), dtype=torch.float8_e4m3fn)  # memory that is never touched is free
    ws = torch.empty((N, K // 32), dtype=torch.uint8)
    xq, xs, *_ = operands(2, rows, K, 0)
    drawn = [operands(2, rows, K, 1 + y)[2:] for y in range(3)]
    for first, (some_wq, some_ws) in zip(firsts, drawn, strict=True):
        wq[first : first + rows], ws[first : first + rows] = some_wq, some_ws
    config = {"rows": rows, "waves": 2, "unroll": 1}
    module = GEMV.module
    assert module is not None
    block = module.geometry(GFX950, LinearProblem(2, N, K), config).block
    kernel = replace(
        GEMV, modules=(replace(module, geometry=lambda *_: Geometry((1, 3, 1), block)),)
    )
    with aiter_mx.simulate("gfx950"):
        out = launch_linear(kernel, torch.device("cpu"), config, (xq, xs, wq, ws))
    for first, weights in zip(firsts, drawn, strict=True):
        assert_close_to_reference(out[:, first : first + rows], xq, xs, *weights)
