from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from aiter_mx.errors import BuildError, CacheError
from aiter_mx.jit import cache, contents
from aiter_mx.jit.folder import cache_dir
from op_tests.jit.fakes import forget, unwritable, writer
from op_tests.threads import in_threads


def random_bytes() -> bytes:
    return random.randbytes(random.randint(1000, 5000))


def refuse_locks(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def unsupported(descriptor: int, how: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", unsupported)


def never(out: Path) -> None:
    raise AssertionError("this must not be built again")


def full(out: Path) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_an_artifact_is_built_once_and_then_found(folder: Path) -> None:
    data = random_bytes()
    assert cache.lookup("thing", "a-1", "so") is None
    first = cache.get_or_build("thing", "a-1", "so", writer(data))
    again = cache.get_or_build("thing", "a-1", ".so", never)
    assert first.built and first.data == data and first.path.read_bytes() == data
    assert not again.built and again.data == data and again.path == first.path
    assert first.path.suffix == ".so"
    assert cache.lookup("thing", "a-1", "so") == again


def test_a_folder_is_listed_again_only_when_it_has_changed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = random_bytes()
    cache.get_or_build("thing", "a-1", "so", writer(data))
    long_ago = time.time() - 60
    os.utime(folder / "thing", (long_ago, long_ago))
    assert cache.lookup("thing", "a-1", "so") is not None
    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", never)
        found = cache.lookup("thing", "a-1", "so")
        assert found is not None and found.data == data
        assert cache.lookup("thing", "a-2", "so") is None
    cache.get_or_build("thing", "a-2", "so", writer(data))
    assert cache.lookup("thing", "a-2", "so") is not None


@pytest.mark.parametrize(
    "kind, key, suffix", [("thing", "a", "so"), ("other", "a-1", "so"), ("thing", "a-1", "o")]
)
def test_another_kind_key_or_suffix_is_another_artifact(
    folder: Path, kind: str, key: str, suffix: str
) -> None:
    cache.get_or_build("thing", "a-1", "so", writer(random_bytes()))
    assert cache.lookup(kind, key, suffix) is None


def test_the_folder_is_private(folder: Path) -> None:
    cache.get_or_build("thing", "a", "so", writer(b"x"))
    assert folder.stat().st_mode & 0o777 == 0o700


def test_the_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AITER_MX_CACHE_DIR", "/a/b")
    assert cache_dir() == Path("/a/b")
    monkeypatch.delenv("AITER_MX_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert cache_dir() == Path("/c/aiter_mx")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache_dir() == Path("/home/somebody/.cache/aiter_mx")


def test_a_folder_that_others_can_write_is_refused(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(CacheError, match=r"others can write to .*mode 777.*chmod 700"):
        cache.get_or_build("thing", "a", "so", writer(b"x"))
    assert list(folder.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(folder: Path) -> None:
    folder.mkdir(0o700)
    os.chown(folder, 65534, 65534)
    with pytest.raises(CacheError, match=r"belongs to user 65534.*a folder of your own"):
        cache.get_or_build("thing", "a", "so", writer(b"x"))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: random.randint(1, 900)])


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    path.write_bytes(data)


def make_empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, make_empty])
def test_a_damaged_artifact_is_built_anew_with_a_warning(
    folder: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    data = random_bytes()
    damaged = cache.get_or_build("thing", "a", "so", writer(data)).path
    damage(damaged)
    assert [entry.intact for entry in contents.entries()] == [False]
    with caplog.at_level(logging.WARNING, logger="aiter_mx"):
        assert cache.lookup("thing", "a", "so") is None
        again = cache.get_or_build("thing", "a", "so", writer(data))
    assert again.built and again.data == data == again.path.read_bytes()
    assert [entry.intact for entry in contents.entries()] == [True]
    assert [str(damaged) in record.message for record in caplog.records] == [True]


@pytest.mark.parametrize("built_again", [False, True])
def test_an_artifact_that_another_process_clears_meanwhile_is_not_called_damaged(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    built_again: bool,
) -> None:
    first, calls = random_bytes(), []
    path = cache.get_or_build("thing", "a", "so", writer(first)).path

    def read_late(path: Path) -> bytes | None:
        path.unlink()
        if built_again:
            (path.parent / "new").write_bytes(first)
            (path.parent / "new").rename(path)
        return None

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, logger="aiter_mx"):
        patch.setattr(cache, "read_regular", read_late)
        forget(patch)  # so that the folder is listed
        assert cache.lookup("thing", "a", "so") is None
    assert not caplog.records
    assert cache.get_or_build("thing", "a", "so", writer(first, calls)).data == first
    assert path.is_file() and len(calls) == (not built_again)


def test_a_failed_build_leaves_nothing_behind(folder: Path) -> None:
    def fail(out: Path) -> None:
        out.write_bytes(b"half")
        raise BuildError("no")

    with pytest.raises(BuildError):
        cache.get_or_build("thing", "a", "so", fail)
    assert cache.lookup("thing", "a", "so") is None
    assert [path for path in folder.rglob("*") if path.is_file()] == [
        folder / "manifest",
        folder / "locks/thing-a.lock",
    ]
    assert cache.get_or_build("thing", "a", "so", writer(b"whole")).data == b"whole"


def test_a_build_that_writes_nothing_is_an_error(folder: Path) -> None:
    with pytest.raises(BuildError, match="building my thing failed"):
        cache.get_or_build("thing", "a", "so", lambda out: None, "my thing")


@pytest.mark.parametrize("locks", [True, False])
def test_threads_that_ask_at_once_build_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, locks: bool
) -> None:
    if not locks:
        refuse_locks(monkeypatch, errno.ENOLCK)
    calls: list[Path] = []
    results = []
    barrier = threading.Barrier(8)

    def build(out: Path) -> None:
        calls.append(out)
        time.sleep(0.1)
        out.write_bytes(b"x")

    def ask(_: int) -> None:
        barrier.wait()
        results.append(cache.get_or_build("thing", "a", "so", build).built)

    in_threads(ask, 8)
    assert len(calls) == 1
    assert sorted(results) == [False] * 7 + [True]


def test_an_unwritable_folder_is_read_and_otherwise_built_in_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    old, new, calls = random_bytes(), random_bytes(), []
    cache.get_or_build("thing", "old", "so", writer(old))
    (folder.parent / "tmp").mkdir()
    (folder.parent / "tmp").chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(folder.parent / "tmp"))
    before = sorted(folder.rglob("*"))
    with caplog.at_level(logging.WARNING, logger="aiter_mx"), unwritable(folder):
        assert cache.get_or_build("thing", "old", "so", never).data == old
        assert not caplog.records
        built = cache.get_or_build("thing", "new", "so", writer(new, calls))
        again = cache.get_or_build("thing", "new", "so", never)
        cache.get_or_build("thing", "newer", "so", writer(new, calls))
    assert built.built and built.data == new
    assert cache.lookup("thing", "new", "so") == again
    assert cache.lookup("thing", "ne", "so") is None
    assert not again.built and again.data == new
    assert built.path.read_bytes() == new
    assert len(caplog.records) == 1 and str(folder) in caplog.text
    assert sorted(folder.rglob("*")) == before
    assert list((folder.parent / "tmp").iterdir()) == []


def test_a_damaged_artifact_in_an_unwritable_folder_is_not_used(folder: Path) -> None:
    data = random_bytes()
    flip_a_bit(cache.get_or_build("thing", "a", "so", writer(data)).path)
    with unwritable(folder):
        assert cache.get_or_build("thing", "a", "so", writer(data)).data == data


def test_an_artifact_in_memory_can_be_loaded_as_a_library(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = Path("/proc/self/maps").read_text().split()
    real = Path(next(word for word in loaded if "/libm.so" in word or "/libm-" in word))
    folder.write_bytes(b"")
    monkeypatch.setenv("AITER_MX_CACHE_DIR", str(folder / "below-a-file"))
    artifact = cache.get_or_build("thing", "m", "so", writer(real.read_bytes()))
    cosine = ctypes.CDLL(str(artifact.path)).cos
    cosine.restype, cosine.argtypes = ctypes.c_double, [ctypes.c_double]
    assert cosine(0.0) == 1.0


def test_a_disk_that_is_full_when_publishing_costs_only_the_sharing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_space(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    data = random_bytes()
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, logger="aiter_mx"):
        patch.setattr(os, "fsync", no_space)
        assert cache.get_or_build("thing", "a", "so", writer(data)).data == data
        assert cache.get_or_build("thing", "a", "so", never).data == data
    assert "No space left" in caplog.text and "AITER_MX_CACHE_DIR" in caplog.text
    assert contents.entries() == []
    assert list((folder / "tmp").iterdir()) == []


def test_a_disk_that_is_full_when_building_moves_the_build(folder: Path) -> None:
    data = random_bytes()

    def build(out: Path) -> None:
        (full if folder in out.parents else writer(data))(out)

    assert cache.get_or_build("thing", "a", "so", build).data == data
    assert contents.entries() == []


def test_no_space_anywhere_is_an_error_that_says_what_to_do(folder: Path) -> None:
    with pytest.raises(CacheError, match=r"cannot build my thing.*No space.*free some space"):
        cache.get_or_build("thing", "a", "so", full, "my thing")


def test_waiting_for_a_builder_is_bounded_and_names_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, release = threading.Event(), threading.Event()

    def slow(out: Path) -> None:
        started.set()
        release.wait(20)
        out.write_bytes(b"x")

    holder = threading.Thread(
        target=cache.get_or_build, args=("thing", "a", "so", slow, "my thing")
    )
    holder.start()
    started.wait(20)
    monkeypatch.setenv("AITER_MX_LOCK_TIMEOUT", "0.2")
    forget(monkeypatch)
    start = time.monotonic()
    try:
        with pytest.raises(CacheError) as caught:
            cache.get_or_build("thing", "a", "so", never)
    finally:
        release.set()
        holder.join()
    assert 0.2 <= time.monotonic() - start < 5
    for part in (
        f"{folder}/locks/thing-a.lock",
        f"Process {os.getpid()} on host",
        "my thing",
        "0.2 s",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize("text", ["soon", "-1", "nan"])
def test_a_lock_timeout_that_is_no_time_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("AITER_MX_LOCK_TIMEOUT", text)
    with pytest.raises(CacheError, match=f"AITER_MX_LOCK_TIMEOUT must be .*{text}"):
        cache.get_or_build("thing", "a", "so", writer(b"x"))


@pytest.mark.filterwarnings("ignore:flock not supported")
@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_without_locks_is_built_on_without_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    refuse_locks(monkeypatch, number)
    data = random_bytes()
    with caplog.at_level(logging.WARNING, logger="aiter_mx"):
        assert cache.get_or_build("thing", "a", "so", writer(data)).data == data
    assert "without locks" in caplog.text
    assert cache.lookup("thing", "a", "so") is not None


def test_what_a_killed_builder_left_is_swept_later(folder: Path) -> None:
    cache.get_or_build("thing", "a", "so", writer(b"x"))
    old, young = folder / "tmp/aiter_mx-build-old", folder / "tmp/aiter_mx-build-young"
    for work in (old, young):
        work.mkdir()
        (work / "half.o").write_bytes(b"x")
    hours_ago = time.time() - 7200
    os.utime(old, (hours_ago, hours_ago))
    cache.get_or_build("thing", "b", "so", writer(b"x"))
    assert not old.exists() and young.exists()


def test_clear_removes_what_the_cache_made_and_nothing_else(folder: Path) -> None:
    folder.mkdir(0o700)
    foreign = [folder / "thesis.txt", folder / "thing/notes.txt", folder / "tmp/other/x"]
    for path in foreign:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("precious")
    for key in ("a", "b"):
        cache.get_or_build("thing", key, "so", writer(random_bytes()), f"thing {key}")
    listed = contents.entries()
    assert [(e.kind, e.key, e.describe, e.intact) for e in listed] == [
        ("thing", "a", "thing a", True),
        ("thing", "b", "thing b", True),
    ]
    assert [e.size_bytes for e in listed] == [e.path.stat().st_size for e in listed]
    assert contents.clear() == 2
    assert sorted(path for path in folder.rglob("*") if path.is_file()) == sorted(foreign)
    assert cache.get_or_build("thing", "a", "so", writer(b"x")).built


def test_what_is_built_while_the_cache_is_cleared_is_cleared_the_next_time(folder: Path) -> None:
    def clear_and_write(out: Path) -> None:
        assert contents.clear() == 0
        out.write_bytes(random_bytes())

    cache.get_or_build("thing", "a", "so", clear_and_write)
    assert [entry.key for entry in contents.entries()] == ["a"]
    assert contents.clear() == 1
    assert [path for path in folder.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("killed", ["manifest", "manifest.cleared.1"], ids=["note", "clearing"])
def test_a_note_or_a_clearing_that_was_cut_short_hides_nothing(folder: Path, killed: str) -> None:
    folder.mkdir(0o700)
    (folder / "manifest").write_text("thing/of-a-full-di")
    cache.get_or_build("thing", "a", "so", writer(random_bytes()))
    (folder / "manifest").rename(folder / killed)
    cache.get_or_build("thing", "b", "so", writer(random_bytes()))
    assert [entry.key for entry in contents.entries()] == ["a", "b"]
    assert contents.clear() == 2
    assert [path for path in folder.rglob("*") if path.is_file()] == []


def test_a_cache_that_was_never_used_is_empty(folder: Path) -> None:
    assert contents.entries() == [] and contents.clear() == 0
    assert not folder.exists()
