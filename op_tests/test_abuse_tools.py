"""The tools that run peers' tests and random rows: what they count as wrong."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest
import torch

import aiter_mx
from aiter_mx.kernels.registry import find_kernel
from aiter_mx.target import hardware
from aiter_mx.workloads.workload import compare
from op_tests import peers, rows
from op_tests.bench.common import MEASURED
from op_tests.shards import Shard

ALL = Shard(1, 1)

CPU = torch.device("cpu")


def test_random_rows_are_legal_and_right() -> None:
    kernel, target = find_kernel("linear", "gfx950", "hip", "gemv"), hardware("gfx950")
    drawn = list(islice(rows.rows(kernel, target, 0), 3))
    assert drawn == list(islice(rows.rows(kernel, target, 0), 3))
    assert len({problem for _, problem, _ in drawn}) == 3
    with aiter_mx.simulate("gfx950"):
        for _, problem, config in drawn:
            assert rows.ran(kernel, problem, config, CPU) == ""


def test_rows_that_raise_or_are_wrong_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, target = find_kernel("linear", "gfx950", "hip", "gemv"), hardware("gfx950")
    _, problem, config = next(rows.rows(kernel, target, 0))
    with aiter_mx.simulate("gfx950"):
        monkeypatch.setattr(rows, "call", lambda *_: None)
        assert rows.ran(kernel, problem, config, CPU).startswith("another result")

        def fails(*_: object) -> None:
            raise RuntimeError("out of luck")

        monkeypatch.setattr(rows, "call", fails)
        assert rows.ran(kernel, problem, config, CPU) == "RuntimeError: out of luck"


def test_saved_rows_of_a_kernel_stand_once(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    for kernel, count in (("op/c", 1), ("op/b", 1), ("op/a", 2), ("op/b", 3)):
        rows.save(path, {"kernel": kernel, "rows": count}, {"op/a", "op/b"})  # op/c is gone
    assert path.read_text() == "kernel,rows\nop/a,2\nop/b,3\n"


@pytest.mark.parametrize(
    ("folder", "arch", "least"),
    [("gfx950_simulated", "gfx950", 200), ("nvidia_h200", "sm_90a", 50)],
)
def test_saved_rows_are_of_kernels_of_now_and_none_is_wrong(
    folder: str, arch: str, least: int
) -> None:
    saved = pd.read_csv(MEASURED / folder / "rows.csv").set_index("kernel")
    kernels = set(rows.tried(arch))
    assert set(saved.index) == kernels if arch == "gfx950" else set(saved.index) <= kernels
    assert (saved["rows"] >= least).all() and not saved["wrong"].any()


def test_the_judge_allows_one_rounding_of_least_numbers_and_no_more() -> None:
    values = torch.tensor([1e-5, 3e-6, 0.0, 70000.0], dtype=torch.float64)
    assert compare(values.half(), values, values.abs(), "fp16").right
    for at, step in ((0, 2.0**-24), (2, 2.0**-24), (3, -64.0)):
        wrong = values.half()
        wrong[at] = min(float(wrong[at]), 65504.0) + step
        assert not compare(wrong, values, values.abs(), "fp16").right


def test_a_peers_case_is_not_there_where_this_package_says_so() -> None:
    module = peers.stand_in("peer_of_a_test")
    assert peers.ended("absent", module.anything) == "not there"
    assert peers.ended("refused", lambda: aiter_mx.quantize(torch.zeros(2, 33))) == "not there"
    assert peers.ended("own", lambda: int("x")) == "failed"
    assert peers.ended("right", lambda: None) == "passed"


def test_a_peers_cases_are_run_one_by_one() -> None:
    file = ModuleType("file")
    file.draw = lambda *_, **__: iter([(2, 3), (4, 5), (9, 9)])  # type: ignore[attr-defined]

    def test() -> None:
        assert [sum(case) for case in file.draw(dtype=None)] != [9]

    file.test = test  # type: ignore[attr-defined]
    counts = peers.each_case(file, "test", "draw", peers.Limits.of(["--most=20"], ALL))
    assert counts == {("test", "passed"): 1, ("test", "failed"): 1, ("test", "skipped"): 1}
    limits = [peers.Limits.of(["--most=20"], part) for part in ALL.parts(3)]
    parts = [peers.each_case(file, "test", "draw", of_part) for of_part in limits]
    assert sum(parts, start=type(counts)()) == counts and counts not in parts


def test_a_peers_file_of_tests_is_counted(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('n', [1, 2, 3])\n"
        "def test_small(n):\n    assert n < 3\n"
        "def test_skipped():\n    pytest.skip('no')\n"
    )
    counts = peers.by_pytest("test_it.py")(tmp_path, [], ALL)
    ends = {
        ("test_small", "passed"): 2,
        ("test_small", "failed"): 1,
        ("test_skipped", "skipped"): 1,
    }
    assert counts == ends
    parts = [peers.by_pytest("test_it.py")(tmp_path, [], part) for part in ALL.parts(3)]
    assert sum(parts, start=type(counts)()) == ends
