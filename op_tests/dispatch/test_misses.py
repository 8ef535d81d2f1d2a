"""The CSV of shapes without a tuned row, whose file is kept open for a while."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from aiter_mx.dispatch import misses

HEADER = "gfx,cu_num,op,shape"


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(misses, "_kept", None)
    yield tmp_path / "untuned.csv"
    if misses._kept is not None:
        os.close(misses._kept.handle)


def append(log: Path, *lines: str) -> None:
    for line in lines:
        misses.append(str(log), line + "\n")


def lines_of(log: Path) -> list[str]:
    return log.read_text().splitlines()


def opened(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What is opened from now on."""
    found, as_it_was = list[object](), os.open

    def open_(path: str, *arguments: int) -> int:
        found.append(path)
        return as_it_was(path, *arguments)

    monkeypatch.setattr(os, "open", open_)
    return found


def test_a_file_is_opened_once_for_many_lines(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(misses, "KEPT_SECONDS", 1000.0)
    found = opened(monkeypatch)
    append(log, "a", "b", "c")
    assert found == [str(log)] and lines_of(log) == [HEADER, "a", "b", "c"]


def test_a_file_that_is_removed_or_replaced_is_made_anew_at_once(log: Path) -> None:
    append(log, "a")
    log.unlink()
    append(log, "b")
    assert lines_of(log) == [HEADER, "b"]
    other = log.with_name("other.csv")
    other.write_text(HEADER + "\nof another\n")
    other.replace(log)
    append(log, "c")
    assert lines_of(log) == [HEADER, "of another", "c"]


def test_a_file_that_is_moved_away_has_what_comes_within_a_second(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(misses.time, "monotonic", lambda: now[0])
    moved = log.with_name("untuned.1.csv")
    append(log, "a")
    log.rename(moved)
    for now[0], line in ((0.9, "b"), (1.0, "c"), (1.9, "d")):
        append(log, line)
    assert (lines_of(moved), lines_of(log)) == ([HEADER, "a", "b"], [HEADER, "c", "d"])


def test_a_file_that_is_emptied_begins_with_a_header_again(log: Path) -> None:
    append(log, "a")
    os.truncate(log, 0)
    append(log, "b")
    assert lines_of(log) == [HEADER, "b"]


def test_another_path_is_another_file_and_the_first_is_closed(log: Path) -> None:
    append(log, "a")
    first = misses._kept.handle
    other = log.with_name("other.csv")
    append(other, "b")
    append(log, "c")
    assert lines_of(log) == [HEADER, "a", "c"] and lines_of(other) == [HEADER, "b"]
    assert misses._kept.handle == first  # there is one at a time


def test_a_descriptor_that_became_another_files_is_left_alone(log: Path) -> None:
    append(log, "a")
    taken = log.with_name("checkpoint")
    with taken.open("wb", buffering=0) as file:
        os.dup2(file.fileno(), misses._kept.handle)  # as after os.closerange
        of_others = misses._kept.handle
        append(log, "b")
        os.write(of_others, b"weights")
        os.close(of_others)
    assert taken.read_bytes() == b"weights" and lines_of(log) == [HEADER, "a", "b"]
    os.close(misses._kept.handle)
    append(log, "c")
    assert lines_of(log) == [HEADER, "a", "b", "c"]


def test_parents_and_forked_children_append_to_the_same_file(log: Path) -> None:
    append(log, "parent")
    children = []
    for child in range(4):
        pid = os.fork()
        if not pid:
            append(log, *(f"{child} {line}" for line in range(200)))
            os._exit(0)
        children.append(pid)
    append(log, *(f"parent {line}" for line in range(200)))
    assert all(os.waitpid(pid, 0)[1] == 0 for pid in children)
    found = lines_of(log)
    assert found[:2] == [HEADER, "parent"] and len(found) == 2 + 5 * 200
    for who in (*range(4), "parent"):
        own = [line for line in found[2:] if line.startswith(f"{who} ")]
        assert own == [f"{who} {line}" for line in range(200)]


def test_a_process_that_is_killed_has_written_its_lines(log: Path) -> None:
    script = (
        "import os, signal, sys\n"
        "from aiter_mx.dispatch import misses\n"
        "for line in 'ab':\n"
        "    misses.append(sys.argv[1], line + '\\n')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(log)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert lines_of(log) == [HEADER, "a", "b"]


def test_a_full_disk_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, log: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(misses, "_unwritable", set())
    append(Path("/dev/full"), "a", "b")
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "'/dev/full', which cannot be written (No space left on device)" in warning
    append(log, "c")
    assert lines_of(log) == [HEADER, "c"]
