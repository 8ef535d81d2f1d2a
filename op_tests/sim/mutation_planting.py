"""Mutants of our kernels: one instruction of a code object changed."""

from __future__ import annotations

import random
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from aiter_mx.code_object import parse_code_object
from aiter_mx.jit.toolchain import llvm_tool
from aiter_mx.sim.disasm import Instruction
from aiter_mx.sim.program import Program
from op_tests.sim.mutation_kinds import NOP, mutants_of
from op_tests.sim.mutation_probes import EVERY_CASE, AnyCase

_ENCODING = re.compile(r"encoding: \[([^\]]+)\]")
_CONTEXT = 3  # instructions shown, and matched by reasons, on each side of a mutant's


@dataclass(frozen=True)
class Mutant:
    """One changed instruction.

    Attributes:
        case: name of the kernel variant.
        kind: of mistake.
        index: position of the instruction in the kernel.
        change: what was changed.
        old, new: texts.
        words: new encoding, as long as the old one.
    """

    case: str
    kind: str
    index: int
    change: str
    old: str
    new: str
    words: tuple[int, ...]


def assemble(lines: Sequence[str]) -> list[tuple[int, ...] | None]:
    """The encoding of each line, None where the assembler refuses it.

    Raises:
        ToolchainError: there is no llvm-mc that knows gfx950.
    """
    command = [str(llvm_tool("llvm-mc")), "-triple=amdgcn-amd-amdhsa", "-mcpu=gfx950"]
    run = subprocess.run(
        [*command, "--show-encoding"],
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
        check=False,
    )
    refused = {int(line) for line in re.findall(r"^<stdin>:(\d+):\d+: error", run.stderr, re.M)}
    found = [bytes(int(b, 16) for b in m.split(",")) for m in _ENCODING.findall(run.stdout)]
    if len(found) != len(lines) - len(refused):
        raise RuntimeError(f"llvm-mc encoded {len(found)} of {len(lines)} lines: {run.stderr}")
    encodings = iter(found)
    words: list[tuple[int, ...] | None] = []
    for number in range(1, len(lines) + 1):
        code = b"" if number in refused else next(encodings)
        words.append(tuple(memoryview(code).cast("I")) if code else None)
    return words


@cache
def listing(case: AnyCase) -> tuple[Instruction, ...]:
    """The kernel's own instructions."""
    program = Program.from_image(case.image)
    begin, size = program.code_object.functions[case.module.symbol]
    return tuple(ins for ins in program.listing if begin <= ins.address < begin + size)


def mutants(case: AnyCase, kinds: Sequence[str]) -> list[Mutant]:
    """Every mutant of a case that the assembler accepts and that fits into the kernel."""
    return [*_mutants(case, tuple(kinds))]


@cache  # the assembler takes longer than all else, and reasons ask for the same kinds
def _mutants(case: AnyCase, kinds: tuple[str, ...]) -> tuple[Mutant, ...]:
    drafts = [
        (kind, index, change, new)
        for kind in kinds
        for index, ins in enumerate(listing(case))
        for change, new in mutants_of(ins, kind)
    ]
    encodings = assemble([new for *_, new in drafts])
    vgprs = Program.from_image(case.image).kernel(case.module.symbol).vgprs
    (nop,) = assemble([NOP])
    assert nop is not None
    found = []
    for (kind, index, change, new), words in zip(drafts, encodings, strict=True):
        ins = listing(case)[index]
        if words is None or len(words) > len(ins.words) or _highest_vgpr(new) >= vgprs:
            continue
        words += nop * (len(ins.words) - len(words))
        if words != ins.words:
            found.append(Mutant(case.name, kind, index, change, ins.text, new, words))
    return tuple(found)


def _highest_vgpr(text: str) -> int:
    return max((int(n) for n in re.findall(r"\bv(?:\[\d+:)?(\d+)", text)), default=-1)


def patched(case: AnyCase, mutant: Mutant) -> bytes:
    """The code object with a mutant in it."""
    address = listing(case)[mutant.index].address
    for segment in parse_code_object(case.image).segments:
        if segment.address <= address < segment.address + len(segment.data):
            at = case.image.index(segment.data) + address - segment.address
            code = b"".join(word.to_bytes(4, "little") for word in mutant.words)
            return case.image[:at] + code + case.image[at + len(code) :]
    raise ValueError(f"{address:#x} is in no section of {case.name}")


def sample(case: AnyCase, kinds: Sequence[str], per_class: int, seed: int) -> list[Mutant]:
    """At most ``per_class`` mutants of each kind, by a seed; all of them when it is 0."""
    every = mutants(case, kinds)
    if not per_class:
        return every
    chosen = []
    for kind in kinds:
        of_kind = [mutant for mutant in every if mutant.kind == kind]
        draw = random.Random(f"{seed} {case.name} {kind}")
        chosen += draw.sample(of_kind, min(per_class, len(of_kind)))
    return chosen


def case_named(name: str) -> AnyCase:
    """A case by its name."""
    return next(case for case in EVERY_CASE if case.name == name)


def code_around(mutant: Mutant) -> str:
    """The instructions around a mutant's, one a line."""
    return code_at(mutant, mutant.index)


def code_at(mutant: Mutant, index: int) -> str:
    """The instructions around one of a mutant's kernel, which is marked."""
    code = listing(case_named(mutant.case))
    first = max(index - _CONTEXT, 0)
    lines = [ins.text for ins in code[first : index + _CONTEXT + 1]]
    lines[index - first] = f">>>{code[index].text}<<<"
    return "\n".join(lines)
