"""Which source line each instruction of a code object comes from, by LLVM's symbolizer."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from aiter_mx.jit.amd import LINES_ROOT
from aiter_mx.jit.toolchain import llvm_tool
from aiter_mx.paths import csrc_dir


@dataclass(frozen=True)
class SourceLine:
    """A line of a kernel's sources.

    Attributes:
        path: within ``csrc/`` where it is there.
        line: its number, from 1; 0 where the compiler made the instruction by itself.
        caller: ``path:line`` that the line's function is inlined into, if it is one.
    """

    path: str
    line: int
    caller: str = ""

    @property
    def text(self) -> str:
        """What stands there; empty where the file cannot be read."""
        try:
            lines = (csrc_dir() / self.path).read_text(encoding="utf-8").splitlines()
        except OSError:
            return ""
        return lines[self.line - 1].strip() if 0 < self.line <= len(lines) else ""

    def __str__(self) -> str:
        inlined = f", inlined at {self.caller}" if self.caller else ""
        return f"{self.path}:{self.line}{inlined}"


def source_lines(code_object: Path, addresses: Sequence[int]) -> list[SourceLine | None]:
    """The lines of instructions at these addresses; None where the code object does not say.

    Raises:
        ToolchainError: there is no llvm-symbolizer.
    """
    command = [str(llvm_tool("llvm-symbolizer")), f"--obj={code_object}", "--output-style=JSON"]
    command += ["--inlines", *map(hex, addresses)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [_parse(frames) for frames in json.loads(done.stdout)]


def _parse(answer: dict[str, object]) -> SourceLine | None:
    frames = answer.get("Symbol")
    if not isinstance(frames, list) or not frames or not frames[0].get("FileName"):
        return None
    places = [(_name(frame["FileName"]), int(frame["Line"])) for frame in frames]
    (path, line), *_, (outer, at) = places if len(places) > 1 else [*places, ("", 0)]
    return SourceLine(path, line, f"{outer}:{at}" if outer else "")


def _name(path: str) -> str:
    whole = Path(path)
    return str(whole.relative_to(LINES_ROOT)) if whole.is_relative_to(LINES_ROOT) else whole.name
