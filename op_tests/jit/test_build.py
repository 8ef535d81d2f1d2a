from __future__ import annotations

import os
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from aiter_mx.errors import BuildError, CacheError, ToolchainError
from aiter_mx.jit import compiler, toolchain
from aiter_mx.jit.build import BuildRequest, build, build_all, is_cached
from op_tests.jit.fakes import REQUEST, Workshop, hide_compilers, wait_until


def test_compilers_of_a_thread_that_gives_way_are_nice(tmp_path: Path) -> None:
    here = os.getpriority(os.PRIO_PROCESS, 0)
    show = ["sh", "-c", "sleep 0.2; nice"]
    with ThreadPoolExecutor(1, initializer=compiler.give_way) as pool:
        assert int(pool.submit(compiler.run, show, tmp_path).result()) == min(here + 10, 19)
    assert int(compiler.run(show, tmp_path)) == here


def test_sixteen_processes_on_a_cold_cache_compile_once(workshop: Workshop) -> None:
    code = "c = b.build(request); print(c.built, c.key, c.image.hex()[:64], len(c.image))"
    processes = [workshop.start(code, FAKE_SECONDS="0.3") for _ in range(16)]
    answers = [process.communicate(timeout=50)[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0] * 16
    assert sorted(answer[0] for answer in answers) == ["False"] * 15 + ["True"]
    assert len({tuple(answer[1:]) for answer in answers}) == 1
    assert len(workshop.compilations()) == 1


def test_a_builder_killed_while_compiling_does_not_hold_up_the_next(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder = workshop.start("b.build(request)", FAKE_SECONDS="60")
    wait_until(lambda: len(workshop.compilations()) == 1)
    builder.send_signal(signal.SIGKILL)
    builder.wait()
    start = time.monotonic()
    made = build(REQUEST)
    seconds = time.monotonic() - start
    os.killpg(int(workshop.compilations()[0].split()[0]), signal.SIGKILL)  # the orphaned compiler
    assert made.built and len(made.image) == 5000
    assert seconds < 5


def test_a_second_process_starts_no_compiler(workshop: Workshop) -> None:
    assert workshop.start("b.build(request)").wait(timeout=30) == 0
    blind = workshop.start(
        "import subprocess\nsubprocess.Popen = None\n"
        "print(b.is_cached(request), b.build(request).built)"
    )
    assert blind.communicate(timeout=30)[0].split() == ["True", "False"]


def test_is_cached_tells_whether_a_build_would_compile(workshop: Workshop) -> None:
    assert not is_cached(REQUEST)
    path = build(REQUEST).path
    assert is_cached(REQUEST)
    path.write_bytes(path.read_bytes()[:-1])
    assert not is_cached(REQUEST)


@pytest.mark.parametrize("header", ["outer.h", "inner.h"])
def test_a_changed_header_means_another_key(workshop: Workshop, header: str) -> None:
    before = build(REQUEST)
    with (workshop.csrc / "include" / header).open("a") as file:
        file.write("// changed\n")
    assert not is_cached(REQUEST)
    after = build(REQUEST)
    assert after.built and after.key != before.key and after.image != before.image


def test_sources_are_read_again_only_when_they_have_changed(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = [path for path in workshop.csrc.rglob("*") if path.is_file()]
    long_ago = time.time() - 60
    for path in sources:
        os.utime(path, (long_ago, long_ago))
    before = build(REQUEST)
    read: list[Path] = []
    read_bytes = Path.read_bytes

    def noted(path: Path) -> bytes:
        read.append(path)
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", noted)
    assert is_cached(REQUEST)
    assert not set(read) & set(sources)
    header = workshop.csrc / "include" / "inner.h"
    header.write_bytes(header.read_bytes().swapcase())  # as long as it was
    assert build(REQUEST).key != before.key


def test_source_defines_and_arch_are_part_of_the_key(workshop: Workshop) -> None:
    (workshop.csrc / "kernel_2.cu").write_text((workshop.csrc / "kernel.cu").read_text() + " ")
    requests = [
        REQUEST,
        BuildRequest("kernel.cu", "gfx950", (("M", 2),)),
        BuildRequest("kernel.cu", "gfx950", (("N", 1),)),
        BuildRequest("kernel.cu", "gfx950"),
        BuildRequest("kernel.cu", "gfx942", (("M", 1),)),
        BuildRequest("kernel_2.cu", "gfx950", (("M", 1),)),
    ]
    assert len({build(request).key for request in requests}) == len(requests)


def test_the_order_of_defines_does_not_matter(workshop: Workshop) -> None:
    first = build(BuildRequest("kernel.cu", "gfx950", (("A", 1), ("B", 2))))
    second = build(BuildRequest("kernel.cu", "gfx950", (("B", 2), ("A", 1))))
    assert not second.built and second.image == first.image
    assert "-DA=1 -DB=2" in workshop.compilations()[0]


def test_another_compiler_does_not_reuse_the_artifact(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = build(REQUEST)
    monkeypatch.setenv("FAKE_CLANG_VERSION", "99.1.1")
    workshop.hipcc.write_text(workshop.hipcc.read_text() + "# updated\n")
    toolchain._find.cache_clear()
    after = build(REQUEST)
    assert after.built and after.key != before.key


def test_environment_that_steers_the_compiler_is_part_of_the_key(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = build(REQUEST)
    monkeypatch.setenv("CPATH", "/elsewhere/include")
    assert build(REQUEST).key != before.key


def test_without_any_compiler_a_cache_filled_ahead_of_time_serves(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    filled = build(REQUEST)
    hide_compilers(monkeypatch, tmp_path / "nothing")
    assert is_cached(REQUEST)
    served = build(REQUEST)
    assert not served.built and served.image == filled.image and served.key == filled.key
    other = BuildRequest("kernel.cu", "gfx950", (("M", 7),))
    assert not is_cached(other)
    with pytest.raises(ToolchainError, match=r"M=7.* is not in the cache .*no compiler for gfx950"):
        build(other)
    filled.path.write_bytes(b"garbled")
    with pytest.raises(ToolchainError):
        build(REQUEST)


def test_a_failing_compiler_shows_command_and_output(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise = "\n".join(f"kernel.cu:{line}: error: nonsense {line}" for line in range(500))
    monkeypatch.setenv("FAKE_ERROR", noise)
    with pytest.raises(BuildError) as caught:
        build(REQUEST)
    text = str(caught.value)
    assert "kernel.cu for gfx950 (M=1)" in text and "-DM=1" in text and str(workshop.hipcc) in text
    assert "nonsense 0\n" in text and "nonsense 499" in text and "420 lines left out" in text
    assert not is_cached(REQUEST)
    monkeypatch.delenv("FAKE_ERROR")
    assert build(REQUEST).built


def test_a_compiler_that_runs_out_of_disk_is_no_kernel_error(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_ERROR", "error: cannot write: No space left on device")
    with pytest.raises(CacheError, match=r"No space left on device.*free some space"):
        build(REQUEST)


def test_a_compiler_that_fails_where_space_is_scarce_is_tried_elsewhere(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = workshop.hipcc.read_text()
    fail_there = f'case "$*" in *{workshop.cache}*.hsaco) echo error: odd; exit 1 ;; esac\nhead'
    workshop.hipcc.write_text(text.replace("\nhead", "\n" + fail_there))
    usage = shutil.disk_usage

    def scarce(path: Path) -> object:
        return usage(path)._replace(free=1 << 20 if workshop.cache in path.parents else 1 << 40)

    monkeypatch.setattr(shutil, "disk_usage", scarce)
    assert build(REQUEST).built
    assert len(workshop.compilations()) == 2
    assert is_cached(REQUEST) and not build(REQUEST).built


def test_sources_that_change_during_the_build_are_not_stored(workshop: Workshop) -> None:
    text = workshop.hipcc.read_text()
    change = f"echo >> {workshop.csrc}/include/inner.h; head"
    workshop.hipcc.write_text(text.replace("\nhead", "\n" + change))
    with pytest.raises(BuildError, match="changed meanwhile"):
        build(REQUEST)
    assert not (workshop.cache / "gfx950").exists()


def test_unusable_requests_are_refused(workshop: Workshop) -> None:
    with pytest.raises(ValueError, match=r"no kernel source 'missing.cu'"):
        build(BuildRequest("missing.cu", "gfx950"))
    with pytest.raises(ValueError, match="like gfx950 or sm_90a, got 'mi350'"):
        build(BuildRequest("kernel.cu", "mi350"))
    (workshop.csrc / "computed.cu").write_text("#include HEADER_OF(M)\n")
    with pytest.raises(ValueError, match="includes what a macro names"):
        build(BuildRequest("computed.cu", "gfx950"))


def test_build_all_keeps_the_order_and_reports_each_once(workshop: Workshop) -> None:
    requests = [BuildRequest("kernel.cu", "gfx950", (("M", m),)) for m in (3, 1, 2, 1)]
    seen: list[BuildRequest] = []
    made = build_all(requests, jobs=3, on_done=lambda request, _: seen.append(request))
    assert sorted(seen, key=str) == sorted(set(requests), key=str)
    assert [code.image for code in made] == [build(request).image for request in requests]
    assert len(workshop.compilations()) == 3


def test_build_all_stops_at_a_failure(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_ERROR", "error: nonsense")
    requests = [BuildRequest("kernel.cu", "gfx950", (("M", m),)) for m in range(40)]
    with pytest.raises(BuildError, match="nonsense"):
        build_all(requests, jobs=2)
    assert len(workshop.compilations()) < 40
