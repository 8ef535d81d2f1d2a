"""A cache folder that somebody has tampered with, and a process that has run out of things."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from aiter_mx.errors import CacheError
from aiter_mx.jit import cache, contents, toolchain
from aiter_mx.jit import folder as folders
from aiter_mx.jit.build import BuildRequest, build
from aiter_mx.sim import compile as sim_compile
from op_tests.jit.fakes import REQUEST, Workshop, forget, writer


def fresh() -> None:
    cache._listings.clear()
    folders._refuse_open_way.cache_clear()


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_link(path: Path) -> None:
    path.with_name("elsewhere").write_bytes(b"data")
    path.symlink_to(path.with_name("elsewhere"))


def a_folder(path: Path) -> None:
    path.mkdir()


def a_huge_file(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 33)


@pytest.mark.parametrize("plant", [a_pipe, a_link, a_folder, a_huge_file])
def test_what_is_no_file_of_ours_is_never_opened(
    folder: Path,
    plant: Callable[[Path], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = cache.get_or_build("thing", "a", "so", writer(b"data")).path
    about = path.with_suffix(".about")
    for place in (path, about):
        place.unlink()
        plant(place)
    fresh()
    opened: list[object] = []
    open_ = os.open
    with monkeypatch.context() as noting:
        noting.setattr(os, "open", lambda path, *how: opened.append(path) or open_(path, *how))
        assert cache.lookup("thing", "a", "so") is None
        assert [entry.intact for entry in contents.entries()] == [False]
    assert not {path, about} & {*opened}


def test_an_artifact_under_another_name_is_refused(folder: Path) -> None:
    path = cache.get_or_build("thing", "a", "so", writer(b"of a")).path
    other = path.with_name(path.name.replace("a.", "b.", 1))
    elsewhere = folder / "other" / path.name
    elsewhere.parent.mkdir(mode=0o700)
    for place in (other, path.with_suffix(".bin"), elsewhere):
        place.write_bytes(b"of a")
    fresh()
    assert cache.lookup("thing", "a", "so") is not None
    assert cache.lookup("thing", "b", "so") is None
    assert cache.lookup("thing", "a", "bin") is None
    assert cache.lookup("other", "a", "so") is None
    assert cache.get_or_build("thing", "b", "so", writer(b"of b")).data == b"of b"


def test_folders_on_the_way_are_looked_at(folder: Path) -> None:
    cache.get_or_build("thing", "a", "so", writer(b"x"))
    (folder / "thing").chmod(0o777)
    assert cache.lookup("thing", "a", "so")  # nobody else can enter the folder above it
    folder.chmod(0o755)
    with pytest.raises(CacheError, match=r"others can write to .*/thing \(mode 777\).*chmod 700"):
        cache.lookup("thing", "a", "so")
    (folder / "thing").chmod(0o700)
    assert cache.lookup("thing", "a", "so")
    (folder / "thing").rename(folder / "moved")
    (folder / "thing").symlink_to(folder / "moved")
    with pytest.raises(CacheError, match="thing in the cache folder is a link or a file"):
        cache.lookup("thing", "a", "so")
    (folder / "thing").unlink()
    fresh()
    folder.parent.chmod(0o777)
    with pytest.raises(CacheError, match=r"anybody can write to .* \(mode 777\).*chmod o-w it"):
        cache.get_or_build("thing", "a", "so", writer(b"x"))
    folder.parent.chmod(0o1777)
    assert cache.get_or_build("thing", "a", "so", writer(b"x")).built


def test_clear_deletes_nothing_that_no_manifest_names(folder: Path) -> None:
    path = cache.get_or_build("thing", "a", "so", writer(b"x")).path
    named_alike = [
        path.with_name(path.name.replace("a.", "z.", 1)),
        folder / "photos" / path.name,
        folder / "locks" / "mine.lock",
        folder / "tmp" / "build-of-mine" / "x",
    ]
    for place in named_alike:
        place.parent.mkdir(exist_ok=True)
        place.write_text("precious")
        os.utime(place.parent, (0, 0))
    assert contents.clear() == 1
    assert sorted(p for p in folder.rglob("*") if p.is_file()) == sorted(named_alike)
    with (folder / "manifest").open("w") as manifest:
        manifest.write("../photos/a.so\n/etc/a.so\nphotos\n")
    assert contents.clear() == 0
    assert all(place.exists() for place in named_alike)


@pytest.mark.parametrize(
    "change",
    [
        lambda record: [],
        lambda record: None,
        lambda record: record | {"arch": "gfx90a"},
        lambda record: record | {"identity": 7},
        lambda record: record | {"flags": [None]},
        lambda record: record | {"watch": 1},
        lambda record: {name: value for name, value in record.items() if name != "compiler"},
    ],
)
def test_a_remembered_choice_that_is_none_is_made_again(
    workshop: Workshop, change: Callable[[object], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = toolchain.find_toolchain("gfx950")
    (path,) = (workshop.cache / "toolchain").glob("*.json")
    key = path.name.partition(".")[0]
    garbled = json.dumps(change(json.loads(path.read_text()))).encode()
    path.unlink()
    forget(monkeypatch)
    cache.get_or_build("toolchain", key, "json", writer(garbled))
    toolchain._find.cache_clear()
    assert toolchain.find_toolchain("gfx950") == found


def test_a_wrapper_whose_flags_change_makes_other_code(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build(REQUEST)
    assert not build(REQUEST).built
    text = workshop.hipcc.read_text()
    workshop.hipcc.write_text(text.replace("-c 5000", "-c 6000"))
    toolchain._find.cache_clear()
    second = build(REQUEST)
    assert second.built and second.key != first.key
    monkeypatch.setenv("HIPCC_COMPILE_FLAGS_APPEND", "-ffast-math")
    assert build(REQUEST).key not in (first.key, second.key)


@contextmanager
def no_more_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = os.dup(0)
    resource.setrlimit(resource.RLIMIT_NOFILE, (held, hard))
    os.close(held)
    spare = []
    try:
        while True:
            spare.append(os.dup(0))
    except OSError as error:
        assert error.errno == errno.EMFILE
    try:
        yield
    finally:
        for descriptor in spare:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_process_without_file_descriptors_is_told_so_and_loses_nothing(
    workshop: Workshop,
) -> None:
    kept = build(REQUEST)
    message = r"cannot build kernel\.cu for gfx950.*may have \d+; raise the limit with ulimit -n"
    for request in (REQUEST, BuildRequest("kernel.cu", "gfx950", (("M", 2),))):
        toolchain._find.cache_clear()
        fresh()
        with no_more_files(), pytest.raises(CacheError, match=message):
            build(request)
    assert kept.path.exists()
    assert not build(REQUEST).built


def test_a_library_on_a_file_system_without_execution_says_where_to_put_it(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(path: str) -> None:
        raise OSError(f"{path}: failed to map segment from shared object")

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    monkeypatch.setattr(sim_compile, "_build", lambda kernel, strict, out: out.write_bytes(b"so"))
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_NOEXEC))
    with pytest.raises(CacheError, match=r"noexec; set AITER_MX_CACHE_DIR to a folder on another"):
        sim_compile.library(b"key", lambda: None, True, "a kernel")  # type: ignore


def test_processes_that_clear_and_build_leave_a_cache_that_works(
    folder: Path,
) -> None:
    script = (
        "import os, sys\nfrom aiter_mx.jit import cache, contents\n"
        "for turn in range(20):\n"
        "    if (turn + int(sys.argv[1])) % 5 == 0: contents.clear()\n"
        "    made = cache.get_or_build('thing', str(turn), 'so', lambda o: o.write_bytes(b'x'))\n"
        "    assert made.data == b'x'\n"
    )
    children = [
        subprocess.Popen([sys.executable, "-c", script, str(number)], stderr=subprocess.PIPE)
        for number in range(4)
    ]
    assert [child.communicate()[1] for child in children] == [b""] * 4
    contents.clear()
    assert contents.entries() == []
