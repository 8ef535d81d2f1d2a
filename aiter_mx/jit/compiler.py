"""What the two vendors' compilers have in common: how one is named, tried, refused and run."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import signal
import subprocess
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from aiter_mx.errors import BuildError
from aiter_mx.jit.folder import NO_DESCRIPTORS

Command = list[str | Path]
_TIMEOUT_S = 600
_SCARCE_BYTES = 32 << 20  # nvcc writes a few MiB of intermediate files
_NICENESS = 10
_HEAD_LINES, _TAIL_LINES = 60, 20


@dataclass(frozen=True)
class Toolchain:
    """A compiler that was tried and works for an architecture.

    Attributes:
        kind: ``rocm``, ``llvm`` (a clang without ROCm) or ``nvcc``.
        arch: what it was tried for.
        compiler: the program to run.
        identity: the compiler's version and that of the toolkit that it belongs to.
        reason: where it was found, for people.
        flags: what this installation needs on the command line.
        watch: the files that it consists of, as far as known; a change means: try it again.
    """

    kind: str
    arch: str
    compiler: Path
    identity: str
    reason: str
    flags: tuple[str, ...] = ()
    watch: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Candidate:
    """A program that may be a compiler for an architecture.

    Attributes:
        kind: as in Toolchain.
        origin: how it was found, for people: ``HIPCC``, ``PATH``.
        path: the program.
    """

    kind: str
    origin: str
    path: Path

    def __str__(self) -> str:
        return f"{self.origin}: {self.path}"


class Refused(Exception):
    """A candidate cannot be used; the text says why."""


_thread = threading.local()


def give_way() -> None:
    """Have compilers that this thread runs leave the cores to whoever else wants them."""
    _thread.niceness = _NICENESS


def run(command: Command, work: Path) -> str:
    """Run a compiler with ``work`` as its temporary folder and return what it printed.

    Raises:
        BuildError: it failed, did not start, or ran for more than ten minutes; the message carries
            the command line and the output.
        OSError: with ``ENOSPC``, when it failed and little or no space is left for it.
    """
    words = [str(word) for word in command]
    # hipcc would otherwise take a machine with nvcc for one without AMD compilers.
    environment = {**os.environ, "LC_ALL": "C", "TMPDIR": str(work), "HIP_PLATFORM": "amd"}
    try:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        if error.errno in NO_DESCRIPTORS:
            raise
        raise _failure(words, f"could not be started: {error}", "") from None
    with process:
        if niceness := getattr(_thread, "niceness", 0):
            with suppress(OSError):  # it may have ended
                niceness += os.getpriority(os.PRIO_PGRP, process.pid)
                os.setpriority(os.PRIO_PGRP, process.pid, niceness)
        try:
            output, _ = process.communicate(timeout=_TIMEOUT_S)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)  # with the programs that the compiler started
            if isinstance(error, subprocess.TimeoutExpired):
                raise _failure(words, f"did not finish within {_TIMEOUT_S} s", "") from None
            raise
    if process.returncode == 0:
        return output
    status = process.returncode
    how = f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"
    failure = _failure(words, how, output)
    # Programs that find a full disk say so, or something else, or die of a signal.
    if "no space left" in output.lower() or shutil.disk_usage(work).free < _SCARCE_BYTES:
        text = f"too little space for the compiler, which {how}: {first_error(failure)}"
        raise OSError(errno.ENOSPC, text, str(work))
    raise failure


def _failure(words: list[str], what: str, output: str) -> BuildError:
    lines = output.strip().splitlines()
    if len(lines) > _HEAD_LINES + _TAIL_LINES:
        left_out = len(lines) - _HEAD_LINES - _TAIL_LINES
        lines[_HEAD_LINES:-_TAIL_LINES] = [f"[... {left_out} lines left out ...]"]
    return BuildError(
        "\n".join([f"the compiler {what}", f"command: {shlex.join(words)}", "output:", *lines])
    )


def first_error(error: BuildError) -> str:
    """The line of a compiler's output that says most."""
    output = str(error).partition("\noutput:\n")[2].splitlines()
    telling = [line for line in output if "error" in line or "fatal" in line]
    return next(iter(telling + output), str(error).splitlines()[0]).strip()
