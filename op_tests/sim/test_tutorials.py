"""What runs Triton's tutorials: scripts for a GPU run here, and what goes wrong in them is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from aiter_mx.sim.program import SimOptions
from op_tests.sim.tutorials import findings_of, run

SCRIPT = """
import pytest
import torch
import triton
import triton.language as tl

@triton.autotune([triton.Config({{"BLOCK": 64 << i}}) for i in range(3)], key=["n"])
@triton.jit
def add(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) + {added}, mask=at < n)

@pytest.mark.parametrize("n, seed", [(100, 1), (1 << 30, 2)])
def test_add(n, seed):
    torch.manual_seed(seed)
    x = torch.randn(n, device="cuda", dtype=torch.float16)
    y = torch.empty_like(x).cuda()
    assert x.is_cuda
    add[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, y, n)
    print("✅" if torch.allclose(x + 1, y) else "❌ they differ")

@triton.testing.perf_report(None)
def benchmark(n):
    raise AssertionError

benchmark.run(print_data=True)
"""


@pytest.mark.parametrize(("added", "outcome"), [("1", ""), ("1.5", "❌ they differ")])
def test_a_script_runs_on_the_cpu(tmp_path: Path, added: str, outcome: str) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.format(added=added))
    reports, wrong = run(path, 2, SimOptions(collect=True))
    assert wrong == outcome
    # Each of the two configurations is tried, and one is launched then.
    assert [report.kernel for report in reports] == ["add"] * 3
    assert not findings_of(reports)
    assert list(tmp_path.iterdir()) == [path]
