"""``make test-gpu``, as far as it runs where no GPU is."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from aiter_mx.jit.build import BuildRequest
from aiter_mx.kernels.registry import kernels_of
from aiter_mx.paths import csrc_dir
from op_tests import gpu, planted, sanitize
from op_tests.mistakes import MISTAKES
from op_tests.rehearsal import line_of
from op_tests.shards import Shard

JUNIT = """<testsuites><testsuite>
<testcase classname="op_tests.linear.test_gpu" name="a" time="1.25"/>
<testcase classname="op_tests.linear.test_gpu" name="b" time="0.5"><failure/></testcase>
<testcase classname="op_tests.grouped.test_gpu.TestOnHopper" name="c" time="2"><skipped/></testcase>
<testcase classname="op_tests.grouped.test_gpu.TestOnHopper" name="d" time="1"><error/></testcase>
<testcase time="0.001" />
</testsuite></testsuites>"""


def test_every_test_is_in_one_shard_and_in_one_part_of_it() -> None:
    tests = [f"op_tests/test_a.py::test_b[{i}]" for i in range(500)]
    for count in (1, 2, 3):
        shards = [Shard(i + 1, count) for i in range(count)]
        parts = [part for shard in shards for part in shard.parts(4)]
        for test in tests:
            (shard,) = (shard for shard in shards if shard.has(test))
            (part,) = (part for part in parts if part.has(test))
            assert part in shard.parts(4)


@pytest.mark.parametrize("text", ["0/2", "3/2", "2", "a/b"])
def test_a_shard_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Shard.parse(text)


def test_a_result_has_a_row_for_each_file_and_how_many_did_not_end(tmp_path: Path) -> None:
    (tmp_path / "junit.xml").write_text(JUNIT)
    assert [list(row.values()) for row in gpu.rows_of([tmp_path / "junit.xml"])] == [
        ["op_tests/grouped/test_gpu.py", 2, 1, 1, 3.0, 1],
        ["op_tests/linear/test_gpu.py", 2, 1, 0, 1.8, 1],
    ]


def test_a_saved_run_of_other_code_is_told(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    for name in ("csrc/linear/a_sm90.cu", "aiter_mx/a.py", "configs/sm_90a/a.csv"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("one")
    saved = tmp_path / "gpu_tests.csv"
    assert "no run is saved" in gpu.state(saved)
    row = {"file": "a", "tests": 3, "failed": 1, "skipped": 0, "seconds": 1.0, "date": "2026-01-02"}
    pd.DataFrame([row | gpu.digests()]).to_csv(saved, index=False)
    assert "3 tests, of which 1 failed" in gpu.state(saved)
    assert "and ended before" not in gpu.state(saved)
    pd.DataFrame([row | gpu.digests() | {"unfinished": 2}]).to_csv(saved, index=False)
    assert "1 failed and 0 were skipped, and ended before 2 more" in gpu.state(saved)
    assert "is of this code" in gpu.state(saved)
    (tmp_path / "csrc/linear/a_gfx950.cu").write_text("for another GPU")
    assert gpu.of_other_code(saved) == []
    (tmp_path / "csrc/linear/a_sm90.cu").write_text("two")
    (tmp_path / "configs/sm_90a/b.csv").write_text("")
    assert gpu.of_other_code(saved) == ["csrc", "configs"]
    assert "csrc, configs changed since" in gpu.state(saved)
    runs = [tmp_path / folder / saved.name for folder in ("nvidia_a", "nvidia_b", "nvidia_c")]
    assert gpu.latest(tmp_path) == gpu.SAVED
    for run, date in zip(runs, ("2026-01-03", "2026-01-01", "2026-01-02"), strict=True):
        run.parent.mkdir()
        pd.DataFrame([row | {"csrc": "other", "date": date}]).to_csv(run, index=False)
    assert gpu.latest(tmp_path) == runs[0], "the last"
    pd.DataFrame([row | gpu.digests()]).to_csv(runs[1], index=False)
    assert gpu.latest(tmp_path) == runs[1], "of this code"
    assert "2026-01-02, nvidia_b, had 3 tests" in gpu.state(runs[1])


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[list[str]]]:
    """A rehearsal of what compute-sanitizer is shown, as if a GPU were there: the tests, and of
    each code object that they ask for the source and the architecture."""
    requests = tmp_path_factory.mktemp("rehearsal") / "requests"
    arguments = ("-p", "op_tests.rehearsal", "--assert=plain", "-q", "-p", "no:cacheprovider")
    only = ("--one-each", "-rA", "--requests", str(requests))
    command = [sys.executable, "-O", "-m", "pytest", *arguments, *only, *sanitize.TESTS]
    done = subprocess.run(command, cwd=gpu.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    ends = [line.partition(" ") for line in done.stdout.splitlines()]
    tests = [test for end, _, test in ends if end == "PASSED"]
    return tests, [json.loads(line)[:2] for line in requests.read_text().splitlines()]


def test_what_a_list_names_is_what_is_compiled(tmp_path: Path, monkeypatch, capsys) -> None:
    """Made where no GPU is, and read where one is."""
    requests = [BuildRequest(f"linear/{name}.cu", "sm_90a", (("N", 96),)) for name in "cab"]
    listed, asked = tmp_path / "requests", []
    monkeypatch.setattr(gpu, "requests", lambda *_: map(line_of, requests))
    monkeypatch.setattr(gpu, "build", asked.append)
    monkeypatch.setattr(gpu, "BUILD", tmp_path)
    for options in (["--list", str(listed)], ["--listed", str(listed), "--ahead-only"]):
        assert asked == []
        monkeypatch.setattr(sys, "argv", ["gpu", *options])
        assert gpu.main() == 0
        monkeypatch.setattr(gpu, "requests", None)
    assert {*asked} == {*requests} and len(asked) == 3
    assert "compiled 3 ahead" in capsys.readouterr().out


@pytest.mark.parametrize("gpus", [[], ["0"], ["2", "5", "7"]])
def test_every_gpu_runs_a_part_of_the_tests(gpus: list[str], tmp_path, monkeypatch) -> None:
    runs: list[tuple[Shard, int, str | None]] = []

    def run(tests, shard, jobs, seconds, variables) -> int:
        runs.append((shard, jobs, variables.get("CUDA_VISIBLE_DEVICES")))
        return int(shard == parts[-1])

    monkeypatch.setattr(gpu, "visible", lambda: gpus)
    monkeypatch.setattr(gpu, "run_tests", run)
    parts = Shard(1, 2).parts(len(gpu.of_each_gpu()))
    assert gpu.run_all(["op_tests"], parts, 16, 1.0) == 1, "as the last part had a failure"
    seen = {shard: (jobs, names) for shard, jobs, names in runs}
    assert {*seen} == {*parts} and len(runs) == len(parts)
    firsts = [names and names.split(",")[0] for _, names in (seen[part] for part in parts)]
    assert firsts == (gpus or [None])
    assert all({*names.split(",")} == {*gpus} for _, names in seen.values() if names)
    assert {jobs for jobs, _ in seen.values()} == {16 // len(parts)}


def test_a_rehearsal_asks_for_what_tests_launch(rehearsed) -> None:
    tests, sources = rehearsed
    asked = {source for source, arch in sources if arch == "sm_90a"}
    assert "grouped/persistent_sm90.cu" in asked
    for kernel in ("gemv", "wgmma_fp8", "wgmma_f16"):
        assert any(f"[{kernel}-gpu" in test for test in tests)
        assert f"linear/{kernel}_sm90.cu" in asked


def test_every_kernel_for_hopper_is_sanitized_once(rehearsed) -> None:
    tests, _ = rehearsed
    assert len(tests) == len(set(tests))
    tried = {(Path(test).parts[1], test.partition("[")[2].partition("-")[0]) for test in tests}
    rooms = {"linear": "linear", "grouped_gemm": "grouped", "promoted_gemm": "grouped"}
    rooms |= {"grouped_wgrad": "training", "moe_gemm": "moe", "quantize": "quantize"}
    ours = {
        (room, kernel.name)
        for op, room in rooms.items()
        for kernel in kernels_of(op)
        if kernel.backend == "hip" and kernel.is_for("sm_90a")
    }
    assert ours <= tried | {("linear", "persistent"), ("moe", "grouped")}, ours - tried
    assert sum("test_a_step_matches_the_fallbacks[" in test for test in tests) == 4


@pytest.mark.parametrize(
    ("log", "errors"),
    [
        ("========= ERROR SUMMARY: 0 errors", 0),
        ("========= ERROR SUMMARY: 3 errors\n========= ERROR SUMMARY: 1 error", 4),
        ("= ERROR SUMMARY: 9 errors\n= ERROR SUMMARY: 8 errors were not printed. Use", 9),
        ("========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)", 2),
        ("========= Error: process didn't terminate successfully", None),
    ],
)
def test_a_sanitizers_log_is_summed_up(log: str, errors: int | None) -> None:
    assert sanitize.errors_of(log) == errors


def test_reports_are_counted_by_kernel_and_line() -> None:
    report = """========= Uninitialized __global__ memory read of size 4 bytes
=========     at mx::copy(unsigned int, int)+0x1610 in tma.h:32
=========     by thread ({},0,0) in block (2,0,0)
=========         Device Frame: f(int)::[lambda(int)]::operator ()(int) const+0x1 in a.cu:9
=========         Device Frame: aiter_mx_linear(void *)+0xff0 in a.cu:30
=========
"""
    plain = """========= Invalid __global__ read of size 1 bytes
=========     at aiter_mx_other+0x20
=========     by thread (0,0,0) in block (2,0,0)
"""
    log = "========= COMPUTE-SANITIZER\n" + report.format(0) + report.format(4) + plain
    assert sanitize.reports_of(log + "========= ERROR SUMMARY: 3 errors") == {
        (report.split("\n")[0][10:], "aiter_mx_linear", "a.cu:30", "a.cu:9", "tma.h:32"): 2,
        ("Invalid __global__ read of size 1 bytes", "aiter_mx_other"): 1,
    }


def test_races_in_the_known_order_alone_are_counted_apart() -> None:
    race = "Error: Race reported between {} access at {}+0x10 in {}:1\n"
    other = "=========     and {} access at {}+0x20 in {}:2 [4 hazards]\n"
    opened = ("Write", "mx::Opener::open()", "wgmma_roles_sm90.h")
    fetched = ("Read", "void fetch_x<2>(const mx::MoeArgs &)", "wgmma_f16_sm90.cu")
    unknown = ("Read", "mx::load_shared(unsigned int)", "memory.h")
    log = race.format(*opened) + other.format(*fetched)
    log += race.format(*opened) + other.format(*fetched) + other.format(*unknown)
    log += race.format(*fetched) + other.format("Write", *unknown[1:])
    log += race.format(*opened) + other.format(*opened)
    log += "========= RACECHECK SUMMARY: 4 hazards displayed (4 errors, 0 warnings)"
    assert (sanitize.errors_of(log), sanitize.races_of_handing_over(log)) == (4, 1)


def test_every_function_that_hands_over_is_in_its_file() -> None:
    csrc = gpu.ROOT / "csrc"
    for (writer, file), readers in sanitize.HANDED_OVER.items():
        paths = csrc.rglob(file) if file != "memory.h" else [csrc / "include/sm90/memory.h"]
        function = f" {writer.rpartition('::')[2]}("
        assert any(function in path.read_text() for path in paths)
        sources = "".join(each.read_text() for each in csrc.rglob("*sm90*.*"))
        sources += (csrc / "include/sm90/memory.h").read_text()
        assert all(f" {reader}(" in sources for reader in readers)


def test_tools_and_their_options_come_before_the_tests() -> None:
    words = sanitize.command("memcheck", Path("log"))
    assert words[:3] == ["compute-sanitizer", "--tool", "memcheck"]
    assert words[words.index("--report-api-errors") + 1] == "no"
    assert "op_tests/training/test_conformance.py" in words[words.index("pytest") :]


def test_every_mistake_can_be_planted(tmp_path: Path) -> None:
    """In the sources as they are: ``python -m op_tests.planted`` plants them where a GPU is."""
    assert len(MISTAKES) >= 20
    assert len({mistake.name for mistake in MISTAKES}) == len(MISTAKES)
    for mistake in MISTAKES:
        copy = tmp_path / mistake.source
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(csrc_dir() / mistake.source, copy)
        mistake.plant(tmp_path)
        assert copy.read_text() != (csrc_dir() / mistake.source).read_text()
        with pytest.raises(ValueError, match=r"has .* times, not once"):
            replace(mistake, right="text that is not there").plant(tmp_path)


def test_a_mistake_that_was_found_in_the_same_sources_is_not_sought_again(
    tmp_path: Path, monkeypatch
) -> None:
    one, *_ = MISTAKES
    runs: list[str] = []
    monkeypatch.setattr(planted, "BUILD", tmp_path)
    monkeypatch.setattr(planted, "tested", lambda *_: runs.append("test_c[0]") or runs[-1])
    assert [planted.found_by(one, resume) for resume in (True, True, False)] == ["test_c[0]"] * 3
    assert len(runs) == 2
    (tmp_path / one.name / "found").write_text("other test_c[1]")
    assert planted.found_by(one, resume=True) == "test_c[0]"
    (tmp_path / one.name / "found").write_text(f"{gpu.digests()['csrc']} ended with 124")
    assert planted.found_by(one, resume=True) == "test_c[0]"


def test_what_should_find_a_mistake_is_run_before_all_else(tmp_path: Path, monkeypatch) -> None:
    one, *_ = MISTAKES
    runs: list[str] = []
    monkeypatch.setattr(planted, "BUILD", tmp_path)
    monkeypatch.setattr(planted, "tested", lambda *words: runs.append(words[3]) or "")
    assert planted.found_by(one) == ""
    assert runs == [f"{one.kernel}-gpu and {one.sought}", f"{one.kernel}-gpu"]
    for mistake in MISTAKES:
        suite = (gpu.ROOT / mistake.suite).read_text()
        assert f"def {mistake.sought}" in suite, mistake.name


def test_tests_that_found_mistakes_are_run_over_the_sources_as_they_are() -> None:
    failed = "FAILED op_tests/a/test_b.py::test_c[gemv-gpu-0]: AssertionError: far off\n"
    assert planted.ending(1, f".\n{failed}") == "test_c[gemv-gpu-0]"
    assert planted.ending(1, failed.partition(":")[0] + "::test_c[x]\n") == "test_c[x]"
    spaced = "test_c[wgmma_fp8-gpu-huge x]"
    for rest in (" - AssertionError: a[0] is b]", ": a[1]", ""):
        assert planted.ending(1, f"FAILED op_tests/a/test_b.py::{spaced}{rest}\n") == spaced
    assert (
        planted.is_test(spaced) and not planted.is_test("") and not planted.is_test("ended with 2")
    )
    assert planted.ending(0, "") == ""
    assert planted.ending(124, failed) == "ended with 124"
    for words in ("BuildError", "CUDA_ERROR_OUT_OF_MEMORY", "CUDA out of memory."):
        assert planted.ending(1, failed + words) == "ended with 1"
    one, other, third, *_ = MISTAKES
    found = {one: "test_c[0]", other: "test_c[0]", third: "ended with 124"}
    assert planted.controls(found) == [f"{one.suite}::test_c[0]"]
