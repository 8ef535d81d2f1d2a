"""Stand-ins for compilers, so that the JIT's own tests need none and can count what is compiled."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import aiter_mx.jit.build
from aiter_mx.jit import amd, cache, nvidia, toolchain
from aiter_mx.jit.build import BuildRequest

# Writes random bytes, so that two compilations never give the same image.
FAKE_CLANG = """#!/bin/sh
PATH=/usr/bin:/bin
case "$*" in
*--version*) echo "$FAKE_NAME clang version $FAKE_CLANG_VERSION"; exit 0 ;;
*kernel.cu*) echo "$$ $*" >> "$FAKE_LOG"; sleep "${FAKE_SECONDS:-0}"
    if [ -n "$FAKE_ERROR" ]; then echo "$FAKE_ERROR"; exit 1; fi ;;
*) if [ -n "$FAKE_PROBE_ERROR" ]; then echo "$FAKE_PROBE_ERROR"; exit 1; fi ;;
esac
while [ "$1" != -o ]; do shift; done
head -c 5000 /dev/urandom > "$2"
"""


def write_program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def write_rocm(root: Path, hip: tuple[int, int] = (7, 1)) -> Path:
    """A ROCm tree around the fake clang; its hipcc."""
    header = root / "include/hip/hip_version.h"
    header.parent.mkdir(parents=True)
    header.write_text(
        f"#define HIP_VERSION_MAJOR {hip[0]}\n#define HIP_VERSION_MINOR {hip[1]}\n"
        "#define HIP_VERSION_PATCH 25424\n"
    )
    return write_program(root / "bin/hipcc", FAKE_CLANG)


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the cache behave as in a new process."""
    monkeypatch.setattr(cache, "_warned", set())
    monkeypatch.setattr(cache, "_unshared", {})
    monkeypatch.setattr(cache, "_thread_locks", {})
    monkeypatch.setattr(cache, "_listings", {})


def hide_compilers(monkeypatch: pytest.MonkeyPatch, empty: Path) -> None:
    """Leave nothing to be found that the test does not put there."""
    for name in ("HIPCC", "ROCM_PATH", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(empty))
    monkeypatch.setattr(amd, "_OPT", empty)
    monkeypatch.setattr(nvidia, "_USUAL", empty / "nvcc")
    monkeypatch.setattr(nvidia, "_wheels", list)
    toolchain._find.cache_clear()


REQUEST = BuildRequest("kernel.cu", "gfx950", (("M", 1),))
"""What a workshop builds."""


class Workshop:
    """A cache folder, kernel sources and a fake compiler of a test's own."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.csrc = root / "csrc"
        self.log = root / "compiled.log"
        self.cache = root / "cache"
        self.hipcc = write_rocm(root / "rocm")
        (self.csrc / "include").mkdir(parents=True)
        (self.csrc / "kernel.cu").write_text('#include "outer.h"\nint kernel;\n')
        (self.csrc / "include/outer.h").write_text("#  include <inner.h>\n")
        (self.csrc / "include/inner.h").write_text("#pragma once\n")
        hide_compilers(monkeypatch, root / "nothing")
        monkeypatch.setattr(aiter_mx.jit.build, "csrc_dir", lambda: self.csrc)
        forget(monkeypatch)
        for name, value in {
            "AITER_MX_CACHE_DIR": self.cache,
            "HIPCC": self.hipcc,
            "FAKE_LOG": self.log,
            "FAKE_NAME": "fake",
            "FAKE_CLANG_VERSION": "99.1.0",
        }.items():
            monkeypatch.setenv(name, str(value))

    def compilations(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def start(self, code: str, **environment: str) -> subprocess.Popen[str]:
        """A process that runs ``code`` after setting ``request`` to the workshop's kernel."""
        head = (
            "import sys\nfrom pathlib import Path\nimport aiter_mx.jit.build as b\n"
            f"b.csrc_dir = lambda: Path({str(self.csrc)!r})\n"
            "request = b.BuildRequest('kernel.cu', 'gfx950', (('M', 1),))\n"
        )
        return subprocess.Popen(
            [sys.executable, "-c", head + code],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
            stdout=subprocess.PIPE,
            text=True,
        )


def wait_until(condition: Callable[[], bool], timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


@contextmanager
def unwritable(folder: Path) -> Iterator[None]:
    """Keep this process from writing into a folder that it can read, also when it is root."""
    for path in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        path.chmod(0o555)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
        for path in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
            path.chmod(0o700)


def writer(data: bytes, calls: list[Path] | None = None) -> Callable[[Path], None]:
    def build(out: Path) -> None:
        if calls is not None:
            calls.append(out)
        out.write_bytes(data)

    return build
