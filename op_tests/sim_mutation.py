"""The simulator's mutation score: plant mistakes in our kernels' machine code, see who notices.

    python op_tests/sim_mutation.py                  a sample of every kind in every kernel
    python op_tests/sim_mutation.py --per-class 0    every mutant there is
    python op_tests/sim_mutation.py --save           the sample, and write docs/mutation.md

Each mutant is the code object with one instruction changed. It runs in the simulator (strict, under
several schedules and seeds) and its results are compared with float64. What neither notices is a
survivor; ``mutation_reasons.json`` says why it is harmless or why no launch can show it. A survivor
without a reason makes the program fail.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import torch
from mutation_kinds import KINDS, NOP, mutants_of
from mutation_probes import CASES, Case, verdict
from rich.console import Console
from rich.progress import track
from rich.table import Table

from aiter_mx.code_object import parse_code_object
from aiter_mx.jit.toolchain import llvm_tool
from aiter_mx.sim.disasm import Instruction
from aiter_mx.sim.program import Program

HERE = Path(__file__).resolve().parent
REASONS = HERE / "mutation_reasons.json"
PAGE = HERE.parent / "docs" / "mutation.md"
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


@dataclass(frozen=True)
class Outcome:
    """What came of a mutant; ``by`` is empty for a survivor."""

    mutant: Mutant
    by: str
    message: str = ""


@dataclass(frozen=True)
class Reason:
    """Why survivors are to be expected.

    Attributes:
        kernel: pattern of case names, as of file names.
        kind: of mistake.
        change: regular expression for the change, all of it.
        code: regular expression for the instructions around it, the changed one in ``>>>`` ``<<<``.
        verdict: ``harmless`` (the mutant does the same) or ``missed`` (it does not, and no check or
            probe can tell).
        why: a sentence.
    """

    kernel: str
    kind: str
    change: str
    code: str
    verdict: str
    why: str

    def explains(self, mutant: Mutant, code: str) -> bool:
        """Whether this is the reason for a survivor."""
        return (
            fnmatch(mutant.case, self.kernel)
            and self.kind == mutant.kind
            and re.fullmatch(self.change, mutant.change) is not None
            and re.search(self.code, code) is not None
        )


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
def listing(case: Case) -> tuple[Instruction, ...]:
    """The kernel's own instructions."""
    program = Program.from_image(case.image)
    begin, size = program.code_object.functions[case.module.symbol]
    return tuple(ins for ins in program.listing if begin <= ins.address < begin + size)


def mutants(case: Case, kinds: Sequence[str]) -> list[Mutant]:
    """Every mutant of a case that the assembler accepts and that fits into the kernel."""
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
    return found


def _highest_vgpr(text: str) -> int:
    return max((int(n) for n in re.findall(r"\bv(?:\[\d+:)?(\d+)", text)), default=-1)


def patched(case: Case, mutant: Mutant) -> bytes:
    """The code object with a mutant in it."""
    address = listing(case)[mutant.index].address
    for segment in parse_code_object(case.image).segments:
        if segment.address <= address < segment.address + len(segment.data):
            at = case.image.index(segment.data) + address - segment.address
            code = b"".join(word.to_bytes(4, "little") for word in mutant.words)
            return case.image[:at] + code + case.image[at + len(code) :]
    raise ValueError(f"{address:#x} is in no section of {case.name}")


def sample(case: Case, kinds: Sequence[str], per_class: int, seed: int) -> list[Mutant]:
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


def judge(mutant: Mutant) -> Outcome:
    """Run a mutant against its case's probes."""
    case = _case(mutant.case)
    by, message = verdict(case, patched(case, mutant))
    if not by and not _executed(case, mutant):
        message = "no probe executes it"
    return Outcome(mutant, by, message)


def _executed(case: Case, mutant: Mutant) -> bool:
    """Whether any probe reaches the instruction: an endless loop in its place is noticed."""
    (loop,) = assemble(["s_branch -1"])
    (nop,) = assemble([NOP])
    assert loop and nop
    words = loop + nop * (len(mutant.words) - 1)
    there = Mutant(mutant.case, "", mutant.index, "", "", "", words)
    return bool(verdict(case, patched(case, there))[0])


def _case(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def code_around(mutant: Mutant) -> str:
    """The instructions around a mutant's, one a line."""
    code = listing(_case(mutant.case))
    first = max(mutant.index - _CONTEXT, 0)
    lines = [ins.text for ins in code[first : mutant.index + _CONTEXT + 1]]
    lines[mutant.index - first] = f">>>{mutant.old}<<<"
    return "\n".join(lines)


def reasons() -> list[Reason]:
    """The reasons on file."""
    return [Reason(**entry) for entry in json.loads(REASONS.read_text())]


def reason_of(outcome: Outcome, known: Sequence[Reason]) -> Reason | None:
    """The reason for a survivor, None when there is none."""
    code = code_around(outcome.mutant)
    return next((reason for reason in known if reason.explains(outcome.mutant, code)), None)


def quick_compiler(folder: Path) -> Path:
    """A C compiler that does not optimise, written to a folder.

    A mutant's translation runs for milliseconds; optimising it would take longer than all else.
    """
    compiler = folder / "cc"
    compiler.write_text(f'#!/bin/sh\nexec {llvm_tool("clang")} "$@" -O0\n')
    compiler.chmod(0o700)
    return compiler


def _start_worker() -> None:
    torch.set_num_threads(1)
    for case in CASES:
        _ = case.image  # by the usual cache
    folder = Path(tempfile.mkdtemp(dir=os.environ["MUTANTS_DIR"]))
    os.environ["CC"] = str(quick_compiler(folder))
    os.environ["AITER_MX_CACHE_DIR"] = str(folder)  # a mutant's translation is of no use later


def judge_all(chosen: Sequence[Mutant], jobs: int, console: Console) -> Iterator[Outcome]:
    """Outcomes as they come."""
    with tempfile.TemporaryDirectory(prefix="aiter_mx-") as folder:
        os.environ["MUTANTS_DIR"] = folder
        fresh = get_context("spawn")  # a fork would inherit threads, and the choice of compiler
        with ProcessPoolExecutor(jobs, fresh, _start_worker) as pool:
            outcomes = pool.map(judge, chosen)
            yield from track(outcomes, "mutants", len(chosen), console=console, transient=True)


@dataclass(frozen=True)
class Row:
    """The table's line for one kind of mistake, or for all."""

    name: str
    count: int
    by: Counter[str]
    harmless: int
    missed: int
    unexplained: int

    @property
    def caught(self) -> int:
        return self.by.total()

    def cells(self) -> list[str]:
        """As text."""
        by = ", ".join(f"{name} {count}" for name, count in self.by.most_common())
        counts = (self.count, self.count - self.harmless)
        shares = [f"{100 * self.caught / n:.1f} %" if n else "-" for n in counts]
        numbers = (self.harmless, self.missed, self.unexplained)
        return [self.name, str(self.count), str(self.caught), *shares, by, *map(str, numbers)]


_HEADS = (
    *("mistake", "mutants", "caught", "of all", "of harmful"),
    *("by", "harmless", "missed", "unexplained"),
)


def rows(outcomes: Sequence[Outcome], known: Sequence[Reason]) -> list[Row]:
    """The table: a row for each kind, and the total."""

    def row(name: str, of: list[Outcome]) -> Row:
        why = [reason_of(o, known) for o in of if not o.by]
        verdicts = Counter(reason.verdict if reason else "" for reason in why)
        by = Counter(o.by for o in of if o.by)
        return Row(name, len(of), by, verdicts["harmless"], verdicts["missed"], verdicts[""])

    kinds = {kind: [o for o in outcomes if o.mutant.kind == kind] for kind in KINDS}
    table = [row(kind, of) for kind, of in kinds.items() if of]
    return [*table, row("all", list(outcomes))]


def survivors(
    outcomes: Sequence[Outcome], known: Sequence[Reason]
) -> Iterator[tuple[Outcome, Reason | None]]:
    """Those that nothing noticed, with the reason if there is one."""
    for outcome in outcomes:
        if not outcome.by:
            yield outcome, reason_of(outcome, known)


def show(outcomes: Sequence[Outcome], known: Sequence[Reason], console: Console) -> None:
    """Print the table, and each survivor that no reason explains."""
    table = Table(*_HEADS)
    for row in rows(outcomes, known):
        table.add_row(*row.cells())
    for outcome, reason in survivors(outcomes, known):
        if not reason:
            mutant = outcome.mutant
            console.print(
                f"\n{mutant.case}: {mutant.kind}, {mutant.change}: {mutant.new}\n"
                f"{outcome.message}\n{code_around(mutant)}",
                highlight=False,
                markup=False,
            )
    console.print(table)


def page(outcomes: Sequence[Outcome], known: Sequence[Reason], command: str) -> str:
    """docs/mutation.md."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True
    ).stdout.strip()
    lines = [
        "# What the simulator catches",
        "",
        f"Written by `{command}` at commit {commit or 'unknown'}; not to be edited by hand.",
        "",
        "One instruction at a time of our gfx950 kernels is changed in the machine code. A mutant",
        "is caught when the simulator reports it (the name of the error is given) or its result",
        "differs from float64, in one of the launches of `op_tests/mutation_probes.py`.",
        "*Harmless* survivors do the same as the original, *missed* ones do not.",
        "`op_tests/mutation_reasons.json` holds the reasons; a survivor without one makes the",
        "program fail.",
        "",
        "| " + " | ".join(_HEADS) + " |",
        "| --- | ---: | ---: | ---: | ---: | --- | ---: | ---: | ---: |",
        *("| " + " | ".join(row.cells()) + " |" for row in rows(outcomes, known)),
        "",
        "## Kernels",
        "",
        "| kernel | mutants | caught |",
        "| --- | ---: | ---: |",
    ]
    for case in CASES:
        of = [o for o in outcomes if o.mutant.case == case.name]
        if of:
            lines.append(f"| {case.name} | {len(of)} | {sum(bool(o.by) for o in of)} |")
    lines += [
        "",
        "A kernel's name has its parameters: rows or tiles, waves, unroll and the output's dtype.",
        "",
        "## Survivors",
        "",
    ]
    grouped: dict[str, list[Outcome]] = {}
    for outcome, reason in survivors(outcomes, known):
        text = f"{reason.verdict}: {reason.why}" if reason else "unexplained"
        grouped.setdefault(text, []).append(outcome)
    for text, of in sorted(grouped.items()):
        lines += [f"**{text[0].upper()}{text[1:]}**", ""]
        lines += [
            f"- {o.mutant.case}, {o.mutant.kind}: `{o.mutant.old}`, {o.mutant.change}" for o in of
        ]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 1 when a survivor has no reason."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kernels", default="*", help="pattern of the variants' names")
    parser.add_argument("--classes", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--per-class", type=int, default=8, metavar="N", help="0: all")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--save", action="store_true", help=f"write {PAGE.name}")
    options = parser.parse_args(arguments)
    console = Console()
    begin = time.perf_counter()
    chosen = [
        mutant
        for case in CASES
        if fnmatch(case.name, options.kernels)
        for mutant in sample(case, options.classes, options.per_class, options.seed)
    ]
    known = reasons()
    outcomes = list(judge_all(chosen, options.jobs, console))
    show(outcomes, known, console)
    console.print(f"{len(outcomes)} mutants in {time.perf_counter() - begin:.0f} s")
    if options.save:
        given = " ".join(sys.argv[1:] if arguments is None else arguments)
        PAGE.write_text(page(outcomes, known, f"python op_tests/sim_mutation.py {given}".strip()))
    return 1 if any(reason is None for _, reason in survivors(outcomes, known)) else 0


if __name__ == "__main__":
    sys.exit(main())
