"""Tables as files: what is refused in them, what is fast, and what may happen to them."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from aiter_mx.dispatch import dispatcher
from aiter_mx.dispatch.dispatcher import route
from aiter_mx.dispatch.tables import load_rows, read_table
from aiter_mx.errors import TableError
from aiter_mx.kernels.linear import LinearProblem
from aiter_mx.kernels.registry import key_of
from op_tests.dispatch.test_dispatch import GFX950, PROBLEM, gemv_row, write_table

HEADER = ",".join(gemv_row())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"M": "\uff13"}, "M must be a whole number, got '\uff13'"),
        ({"M": "1_0"}, "M must be a whole number, got '1_0'"),
        ({"N": "-1000"}, "N must be at least 0, got '-1000'"),
        ({"cu_num": "-256"}, "cu_num must be at least 0, got '-256'"),
        ({"cu_num": "0"}, "cu_num must be at least 1, or empty for any, got '0'"),
        ({"cu_num": "\u00b2"}, "cu_num must be a whole number, got '\u00b2'"),
        ({"us": "\uff12.5"}, "us must be a number, got '\uff12.5'"),
        ({"us": "-2.5"}, "us must be above 0 and finite, got '-2.5'"),
        ({"rows": "\u0662"}, "rows must be a whole number, got '\u0662'"),
        ({"rows": "-2"}, "rows must be at least 0, got '-2'"),
    ],
)
def test_numbers_of_other_scripts_and_negative_ones_are_refused(
    changes: dict[str, object], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_table(tmp_path / "bad.csv", gemv_row(M=5), gemv_row(**changes), gemv_row(us=1))
    monkeypatch.setenv("AITER_MX_CONFIG", str(path))
    for read in (lambda: route("linear", GFX950, PROBLEM), lambda: list(read_table(path))):
        with pytest.raises(TableError) as caught:
            read()
        assert str(caught.value) == f"{path}:3: {message}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"\ufeff{HEADER}\n", "1: begins with a byte order mark; save it as UTF-8 without one"),
        (f"{HEADER},M\n", "1: column 'M' is there twice"),
        (f"\n{HEADER}\n", " the file is empty; expected a header line"),
    ],
)
def test_headers_that_cannot_be_right_are_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(TableError) as caught:
        list(read_table(path))
    assert str(caught.value) == f"{path}:{message}"


def test_cells_may_have_spaces_around_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "spaced.csv"
    rows = [",".join(gemv_row()), ",".join(map(str, gemv_row().values()))]
    path.write_text("".join(row.replace(",", " , ") + " \n" for row in rows))
    monkeypatch.setenv("AITER_MX_CONFIG", str(path))
    assert route("linear", GFX950, PROBLEM).source == f"{path}:2"


def test_a_hundred_thousand_rows_are_loaded_in_two_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_rows("gfx950", "linear")  # imports the kernels
    row = gemv_row()
    cells = {name: place for place, name in enumerate(row)}
    lines = [HEADER]
    for number in range(100_000):  # every second one for a shape that was there before
        changed = list(map(str, row.values()))
        changed[cells["M"]], changed[cells["N"]] = str(1 + number % 5), str(40 + number // 10)
        changed[cells["us"]] = f"{1 + number / 7:.3f}"
        lines.append(",".join(changed))
    path = tmp_path / "large.csv"
    path.write_text("\n".join(lines) + "\n")
    monkeypatch.setenv("AITER_MX_CONFIG", str(path))
    start = time.thread_time()
    rows = load_rows("gfx950", "linear")
    assert time.thread_time() - start < 2
    found = rows.find(key_of("linear")(LinearProblem(M=4, N=47, K=96)), 256)
    assert found is not None and found.where == f"{path}:{2 + 78}"  # the later one of two
    monkeypatch.setenv("AITER_MX_CONFIG", f"{path}{os.pathsep}{path}")
    start = time.thread_time()
    load_rows("gfx950", "moe_gemm")
    assert time.thread_time() - start < 0.5  # it is read once a process


def test_a_file_that_vanishes_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_table(tmp_path / "mine.csv", gemv_row(), gemv_row(M=4))
    monkeypatch.setenv("AITER_MX_CONFIG", str(path))
    assert route("linear", GFX950, PROBLEM).source == f"{path}:2"
    path.unlink()
    assert route("linear", GFX950, replace(PROBLEM, M=4)).source == f"{path}:3"
    for op in ("quantize", "moe_gemm"):
        assert str(path) not in {row.where for row in load_rows("gfx950", op)._taken.values()}
    assert load_rows("sm_90a", "linear")


def test_an_edited_file_is_for_later_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_table(tmp_path / "mine.csv", gemv_row(us=2))
    monkeypatch.setenv("AITER_MX_CONFIG", str(path))
    assert "in 2 us" in route("linear", GFX950, PROBLEM).reason
    write_table(path, gemv_row(us=3))
    assert "in 2 us" in route("linear", GFX950, PROBLEM).reason


def without_waiting(work: object) -> None:
    """Run ``work`` in a thread that may hang, and fail if it does."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()  # type: ignore[operator]
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "it waits for somebody at the other end of the pipe"
    if raised:
        raise raised[0]


def test_a_pipe_is_no_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = tmp_path / "pipe.csv"
    os.mkfifo(pipe)
    for named, message in [
        (pipe, f"AITER_MX_CONFIG names '{pipe}', which is neither a file nor a folder"),
        (tmp_path, f"{pipe}: cannot be read as a table: it is no regular file"),
    ]:
        monkeypatch.setenv("AITER_MX_CONFIG", str(named))
        with pytest.raises(TableError) as caught:
            without_waiting(lambda: route("linear", GFX950, PROBLEM))
        assert str(caught.value) == message


def test_misses_are_not_logged_to_a_pipe_that_nobody_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pipe = tmp_path / "misses"
    os.mkfifo(pipe)
    monkeypatch.setenv("AITER_MX_LOG_UNTUNED", str(pipe))
    monkeypatch.setattr(dispatcher, "_logged", set())
    without_waiting(lambda: route("linear", GFX950, PROBLEM))
    (warning,) = [record.getMessage() for record in caplog.records]
    assert f"{str(pipe)!r}, which cannot be written" in warning
