"""What the host does for the decode GEMV, and what it asks memory for."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import aiter_mx
from aiter_mx.dispatch.cells import format_config
from aiter_mx.jit.build import build
from aiter_mx.kernels.linear import KERNELS, LinearProblem
from aiter_mx.kernels.linear import gemv as registry
from aiter_mx.launch import build_request
from aiter_mx.ops.linear import _plans
from aiter_mx.sim.disasm import disassemble
from aiter_mx.sim.program import SimOptions
from aiter_mx.target import hardware, target_of
from aiter_mx.trial import prepare, try_out
from op_tests.bench.counters import GEMV as COUNTED
from op_tests.bench.counters import chosen, name_of
from op_tests.linear.launches import launch_linear
from op_tests.linear.operands import operands
from op_tests.mx_reference import assert_close_to_reference
from op_tests.places import device_in

GEMV = KERNELS[0]
GFX950 = hardware("gfx950")
AT_ONCE = SimOptions(count_groups=True, schedule="run-to-barrier", threads=1)

device = device_in("sim", "cuda")


launch = partial(launch_linear, GEMV)


def test_more_workgroups_than_a_grid_row_holds(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "MAX_GRID_X", 4)
    drawn = operands(2, 53, 96, 4)
    config = {"rows": 3, "waves": 1, "unroll": 1}
    grid = GEMV.module.geometry(target_of(device), LinearProblem(2, 53, 96), config).grid
    assert grid == (4, 5, 1)
    assert_close_to_reference(launch(device, config, drawn), *drawn)


@pytest.mark.parametrize(("M", "N", "K"), [(1, 2304, 6144), (16, 384, 1536), (5, 1536, 384)])
def test_the_op_takes_the_gemv_where_a_table_names_it(
    device: torch.device, M: int, N: int, K: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = operands(M, N, K, N)
    arguments = [t.to(device) for t in drawn]
    target = target_of(device)
    config = GEMV.configure(target, LinearProblem(M, N, K))
    columns = ("gfx", "op", "M", "N", "K", "out_dtype", "backend", "kernel", "cu_num", "config")
    choice = ("hip", "gemv", target.cu_num, format_config(config))
    row = (target.arch, "linear", M, N, K, "bf16", *choice)
    table = tmp_path / "linear.csv"
    table.write_text("".join(",".join(map(str, line)) + "\n" for line in (columns, row)))
    monkeypatch.setenv("AITER_MX_CONFIG", str(table))
    monkeypatch.setattr(_plans, "by_call", {})
    assert aiter_mx.explain("linear", M=M, N=N, K=K, arch=target.arch).kernel == "gemv"
    aiter_mx.linear(*arguments)
    start = time.process_time()  # of all threads: others may use the machine meanwhile
    out = aiter_mx.linear(*arguments).cpu()
    seconds = time.process_time() - start
    assert_close_to_reference(out, *drawn)
    assert seconds < 1, f"a decode shape took {seconds:.2f} s after its translation"


def test_each_weight_is_read_once_in_pieces_of_16_bytes() -> None:
    from aiter_mx.runtimes.sim import last_report

    M, N, K, config = 2, 96, 6144, {"rows": 3, "waves": 3, "unroll": 1}
    with aiter_mx.simulate("gfx950"):
        launch(torch.device("cpu"), config, operands(M, N, K, 0))
    report = last_report()
    rows_read = N + M * N // config["rows"]
    assert report.bytes_read == rows_read * (K + K // 32)
    assert report.bytes_written == 2 * M * N
    pieces = rows_read * K // (16 * 64)
    loads = {name: n for name, n in report.mnemonics.items() if "load" in name and name[0] != "s"}
    waves = N // config["rows"] * config["waves"]
    rounds = K // (1024 * config["waves"] * config["unroll"])
    of_scales = 2 * waves * rounds  # a dword a lane of x's rows, and of w's
    assert loads == {
        "buffer_load_dwordx4": pieces,
        "buffer_load_dword": of_scales,
        "buffer_load_ushort": 2 * waves,  # both halves of a bias that there is not
    }
    assert report.scratch_bytes == 0


@pytest.mark.parametrize(("K", "unroll"), [(6144, 1), (2880, 2), (1536, 1)])
def test_memory_is_asked_for_weights_at_once(K: int, unroll: int) -> None:
    config = {"rows": 3, "waves": 2, "unroll": unroll}
    report = try_out(GEMV, LinearProblem(1, 96, K), config, AT_ONCE).report
    assert report.first_load is not None
    assert report.first_load.instructions <= 40
    assert report.first_load.waits <= 1  # for the arguments


@pytest.mark.parametrize("problem", COUNTED, ids=name_of)
def test_half_of_a_step_is_asked_for_at_once(problem: LinearProblem) -> None:
    """Without a branch, so that what stands ahead of it is what is executed."""
    _, config = chosen("linear", "gemv", problem)
    code = disassemble(build(build_request(GEMV, GFX950, problem, config)).image)
    loads = [at for at, ins in enumerate(code) if ins.mnemonic == "buffer_load_dwordx4"]
    ahead = [ins.mnemonic for ins in code[: loads[(config["rows"] + problem.M - 1) // 2]]]
    assert len(ahead) <= 40 and ahead.count("s_waitcnt") <= 1
    assert not any("branch" in name for name in ahead)


def test_memory_is_asked_for_weights_above_4_gib_at_once() -> None:
    K, rows = 6144, 3
    N = (1 << 32) // (K * rows) * rows + 8 * rows
    wq = torch.empty((N, K), dtype=torch.float8_e4m3fn)  # memory that is never touched is free
    ws = torch.empty((N, K // 32), dtype=torch.uint8)
    xq, xs, *near = operands(1, rows, K, 9)
    wq[-rows:], ws[-rows:] = near
    assert (N - rows) * K > 1 << 32
    y = torch.empty((1, N), dtype=torch.bfloat16)
    problem, config = LinearProblem(1, N, K), {"rows": rows, "waves": 3, "unroll": 2}
    launched = prepare(GEMV, problem, config, operands=[xq, xs, wq, ws, None, y])
    options = replace(AT_ONCE, first_group=launched.groups - 1)
    first = launched.run(options).first_load
    assert_close_to_reference(y[:, -rows:], xq, xs, *near)
    assert first is not None
    assert first.instructions <= 40 and first.waits <= 1


@pytest.mark.gpu
def test_more_workgroups_than_a_grid_row_holds_at_full_size() -> None:
    N, K = 6 * (1 << 20) + 7, 32
    drawn = operands(1, N, K, 2)
    out = aiter_mx.linear(*(t.cuda() for t in drawn), out_dtype=torch.float32)
    assert_close_to_reference(out.cpu(), *drawn)


@pytest.mark.parametrize("arch", ["gfx950", "sm_90a"])
def test_refusals_say_what_is_covered(arch: str) -> None:
    target = hardware(arch)
    assert GEMV.refusal(target, LinearProblem(16, 3, 32)) is None
    assert (
        GEMV.refusal(target, LinearProblem(17, 3, 32))
        == "M=17 is above 16, the most rows gemv holds in registers"
    )
    assert (
        GEMV.refusal(replace(target, arch="sm_89"), LinearProblem(1, 3, 32))
        == "no gemv kernel for sm_89, only for gfx950 and sm_90a"
    )


def test_on_gfx950_offsets_within_the_operands_have_32_bits() -> None:
    target = hardware("gfx950")
    assert GEMV.refusal(target, LinearProblem(16, 3, (1 << 27) - 32)) is None
    assert (
        GEMV.refusal(target, LinearProblem(1, 3, 1 << 27))
        == f"K={1 << 27} is not below {1 << 27}, as the 32-bit offsets of gemv demand"
    )
    assert GEMV.refusal(target, LinearProblem(1, 1 << 31, 32)) is not None
    assert GEMV.refusal(hardware("sm_90a"), LinearProblem(1, 3, 1 << 27)) is None


@pytest.mark.parametrize(
    ("N", "K", "config"),
    [(1536, 6144, (6, 6, 2)), (2304, 6144, (3, 4, 1)), (6144, 1536, (6, 3, 1))],
)
def test_hopper_takes_what_was_fastest_there_and_yields_where_it_lost(
    N: int, K: int, config: tuple[int, int, int]
) -> None:
    target = hardware("sm_90a")
    assert GEMV.yields is not None
    for M, pdl in product((1, 4), (False, True)):
        problem = LinearProblem(M, N, K, pdl=pdl)
        assert GEMV.yields(target, problem)  # to mma_registers
        assert GEMV.yields(target, replace(problem, x_dtype="bf16"))
        if M == 1:
            assert tuple(GEMV.configure(target, problem).values()) == config
    assert GEMV.yields(target, LinearProblem(2, 9216, 6144))
    assert GEMV.yields(target, LinearProblem(2, 384, 384))
    assert not GEMV.yields(target, LinearProblem(4, 640, 2880))  # K ends within a chunk


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"K": 100}, "K must be a multiple of 32, got K=100"),
        ({"M": -1}, "M must be at least 0, got -1"),
        ({"out_dtype": "fp8"}, "out_dtype must be one of bf16, fp16, fp32, got 'fp8'"),
        ({"bias": "int8"}, "bias must be one of none, bf16, fp16, fp32, got 'int8'"),
    ],
    ids=str,
)
def test_impossible_problems_are_refused_with_the_value(
    field: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        LinearProblem(**{"M": 1, "N": 8, "K": 64, **field})
