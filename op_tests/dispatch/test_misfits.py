"""Rows of tuned tables whose configuration has no launch: reported, and passed over."""

from __future__ import annotations

from pathlib import Path

import pytest

from aiter_mx.dispatch import dispatcher
from aiter_mx.dispatch.cells import format_config
from aiter_mx.dispatch.dispatcher import route
from aiter_mx.errors import TableError
from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.moe_gemm import MoeGemmProblem
from aiter_mx.kernels.registry import kernels_of, key_columns
from aiter_mx.kernels.spec import Problem, combinations
from aiter_mx.target import ARCHS, hardware
from aiter_mx.tuning.check import check_table
from op_tests.dispatch.rows import write_table

H200 = hardware("sm_90a")
LINEAR = LinearProblem(M=33, N=2311, K=6144)  # in no shipped table
EXPERTS = MoeGemmProblem(M=40, N=1544, K=6144, E=16, top_k=4, out_dtype="fp32")
MANY_ROWS = LinearProblem(M=64, N=2311, K=6144)
ACTIVATED = MoeGemmProblem(M=4, N=1536, K=6144, E=16, top_k=4, activation="silu", out_dtype="mxfp8")
ROWS: list[tuple[str, Problem, str, dict[str, int], str]] = [
    ("linear", LINEAR, "wgmma_fp8", {"split": 8, "row_groups": 1, "k_groups": 4, "depth": 2,
     "per_sm": 1}, "depth"),
    ("linear", LINEAR, "wgmma_f16", {"split": 1, "rows": 128, "depth": 8}, "'rows': 128"),
    ("moe_gemm", EXPERTS, "wgmma_f16", {"col_tiles": 8, "groups": 3, "depth": 4, "slots": 0,
     "ahead": 3, "tiles": 1}, "bytes of shared memory, and can have 232448"),
    ("moe_gemm", EXPERTS, "wgmma_f16", {"col_tiles": 12, "depth": 6, "slots": 3, "ahead": 4,
     "groups": 2, "tiles": 2}, "bytes of shared memory, and can have 232448"),
    ("moe_gemm", EXPERTS, "wgmma_f16", {"col_tiles": 12, "depth": 3, "slots": 3, "ahead": 4,
     "groups": 3, "tiles": 2}, "does not fit"),
    ("linear", MANY_ROWS, "mfma", {"row_tiles": 4, "fold": 2, "waves": 12, "unroll": 1,
     "blocks": 1}, "bytes of shared memory, and can have 163840"),
    ("linear", MANY_ROWS, "mfma", {"row_tiles": 5, "fold": 1, "waves": 1, "unroll": 1,
     "blocks": 4}, "fewer lanes than rows"),
    ("moe_gemm", EXPERTS, "mfma", {"row_tiles": 4, "col_tiles": 3, "waves": 16, "unroll": 1},
     "bytes of shared memory, and can have 163840"),
    ("moe_gemm", ACTIVATED, "mfma", {"row_tiles": 2, "col_tiles": 1, "waves": 4, "unroll": 1},
     "with row_tiles=4 alone"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "problem", "kernel", "config", "why"), ROWS, ids=lambda v: str(v))
def test_a_row_that_has_no_launch_is_reported_and_passed_over(
    op: str,
    problem: Problem,
    kernel: str,
    config: dict[str, int],
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(dispatcher, "_misfits", set())
    target = hardware("gfx950") if kernel == "mfma" else H200
    usual = route(op, target, problem)
    assert usual.source == "envelope"
    row: dict[str, object] = {"gfx": target.arch, "cu_num": target.cu_num, "op": op}
    row |= {name: getattr(problem, name) for name in key_columns(op)}
    row |= {"backend": "hip", "kernel": kernel, "config": format_config(config)}
    table = write_table(tmp_path / "mine.csv", row)
    monkeypatch.setenv("AITER_MX_CONFIG", str(table))
    for _ in range(2):
        chosen = route(op, target, problem)
        assert (chosen.kernel, chosen.config) == (usual.kernel, usual.config)
        assert f"{table}:2 names hip/{kernel}, but {{" in chosen.reason and why in chosen.reason
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.startswith(f"tuned row {table}:2 names hip/{kernel} and is passed over: {{")
    with pytest.raises(TableError, match=rf"mine\.csv:2: hip/{kernel}: .* does not fit "):
        check_table(table)


@pytest.mark.parametrize("arch", ARCHS)
def test_candidates_have_a_launch_and_every_other_configuration_says_if_it_has_none(
    arch: str,
) -> None:
    target = hardware(arch)
    quantising = LinearProblem(M=5, N=2304, K=6144, x_dtype="bf16")
    few_k, of_tiles = LinearProblem(1, 40, 96), LinearProblem(300, 2304, 6144)
    of_ops = {"linear": (LINEAR, few_k, quantising, of_tiles), "moe_gemm": (EXPERTS,)}
    for op, problems in of_ops.items():
        for kernel in kernels_of(op):
            for problem in problems:
                if not kernel.is_for(arch) or kernel.refusal(target, problem):
                    continue
                for config in kernel.candidates(target, problem):
                    assert kernel.misfit(target, problem, config) is None
                for config in combinations(kernel.params)[::17]:
                    misfit = kernel.misfit(target, problem, config)
                    assert misfit is None or "does not fit" in misfit
