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
from aiter_mx.kernels.linear import KERNELS, LinearProblem
from aiter_mx.kernels.linear import gemv as registry
from aiter_mx.ops.linear import _plans
from aiter_mx.sim.program import SimOptions
from aiter_mx.target import hardware, target_of
from aiter_mx.trial import try_out
from op_tests.linear.launches import launch_linear
from op_tests.linear.operands import operands
from op_tests.mx_reference import assert_close_to_reference
from op_tests.places import device_in

GEMV = KERNELS[0]

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
    start = time.perf_counter()
    out = aiter_mx.linear(*arguments).cpu()
    seconds = time.perf_counter() - start
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
    options = SimOptions(count_groups=True, schedule="run-to-barrier", threads=1)
    report = try_out(GEMV, LinearProblem(1, 96, K), config, options).report
    assert report.first_load is not None
    assert report.first_load.instructions <= 40
    assert report.first_load.waits <= 1  # for the arguments


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
        assert bool(GEMV.yields(target, replace(problem, x_dtype="bf16"))) is (M == 4)
        if M == 1:
            assert tuple(GEMV.configure(target, problem).values()) == config
    assert GEMV.yields(target, LinearProblem(2, 9216, 6144))
    assert not GEMV.yields(target, LinearProblem(16, 384, 384))


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
