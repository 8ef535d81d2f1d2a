"""Tuning on a GPU: what is wrong, broken or hangs there is never chosen."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from aiter_mx.kernels import linear as kernels
from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.target import target_of
from aiter_mx.tuning import sweep
from aiter_mx.tuning.candidates import ContextLost
from aiter_mx.tuning.measured import measured_meter
from aiter_mx.tuning.race import Rules
from aiter_mx.tuning.share import Alone
from aiter_mx.tuning.table import read_rows

pytestmark = pytest.mark.gpu
PROBLEM = LinearProblem(M=2, N=512, K=1024)
RULES = Rules(most=3, final_rounds=3)
GEMV = kernels.KERNELS[0]


def changed(name, change):
    """The GEMV under another name, which is told another N and K."""
    module = GEMV.module
    names = [argument.name for argument in module.args if argument.kind != "pointer"]

    def scalars(target, problem, config):
        values = dict(zip(names, module.scalars(target, problem, config), strict=True))
        values["N"], values["K"] = change(values["N"], values["K"])
        return tuple(values.values())

    return replace(GEMV, name=name, modules=(replace(module, scalars=scalars),))


def tune(table: Path) -> list[sweep.Record]:
    device = torch.device("cuda", torch.cuda.current_device())
    target = target_of(device)
    meter = measured_meter("linear", target, device, jobs=8)
    meter = replace(meter, backends=("hip",))  # Triton would take a second for each tile
    plan = sweep.make_plan("linear", target, [PROBLEM], table, "measured", RULES)
    return sweep.run(plan, meter, Alone())


def test_a_fast_and_wrong_kernel_is_never_chosen(tmp_path, monkeypatch) -> None:
    half = changed("half", lambda N, K: (N, K // 2))
    most = changed("most", lambda N, K: (N - 1, K))  # all but the last column
    monkeypatch.setattr(kernels, "KERNELS", (half, most, *kernels.KERNELS))
    (record,) = tune(tmp_path / "linear.csv")
    (row,) = read_rows(tmp_path / "linear.csv", "linear").values()
    assert row["kernel"] not in ("half", "most")
    assert row["source"] == "measured"
    assert float(row["us"]) < 50
    wrong = {f["candidate"].split()[0] for f in record["failures"] if f["why"][:5] == "wrong"}
    assert wrong == {"hip/half", "hip/most"}


def test_a_kernel_that_does_not_compile_is_passed_over(tmp_path, monkeypatch) -> None:
    module = GEMV.module
    broken = replace(
        GEMV,
        name="broken",
        modules=(replace(module, defines=lambda *of: {**module.defines(*of), "MX_ROWS": -1}),),
    )
    monkeypatch.setattr(kernels, "KERNELS", (broken, *kernels.KERNELS))
    (record,) = tune(tmp_path / "linear.csv")
    assert any("BuildError" in f["why"] for f in record["failures"])
    (row,) = read_rows(tmp_path / "linear.csv", "linear").values()
    assert row["kernel"] != "broken"


def test_a_kernel_that_ends_the_context_is_left_out_by_the_next_process(tmp_path) -> None:
    table = tmp_path / "linear.csv"
    for attempt in range(2):
        done = subprocess.run(
            [sys.executable, "-m", __name__, str(table)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        # The one candidate of the kernel is journaled, and the second process knows it.
        assert done.returncode == (3 if attempt == 0 else 0), done.stderr
    (row,) = read_rows(table, "linear").values()
    assert row["kernel"] != "far"


if __name__ == "__main__":
    far = changed("far", lambda N, K: (N << 24, K))
    far = replace(far, candidates=lambda target, problem: ())
    kernels.KERNELS = (far, *kernels.KERNELS)
    try:
        tune(Path(sys.argv[1]))
    except ContextLost:
        os._exit(3)  # torch's own clean-up would fail too
