"""What came of mutants: the table, the survivors and the reasons for them."""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from rich.console import Console
from rich.table import Table

from op_tests.sim.mutation_kinds import KINDS
from op_tests.sim.mutation_planting import Mutant, code_around
from op_tests.sim.mutation_probes import CASES

HERE = Path(__file__).resolve().parent
REASONS = HERE / "mutation_reasons.json"


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


def reasons() -> list[Reason]:
    """The reasons on file."""
    return [Reason(**entry) for entry in json.loads(REASONS.read_text())]


def reason_of(outcome: Outcome, known: Sequence[Reason]) -> Reason | None:
    """The reason for a survivor, None when there is none."""
    code = code_around(outcome.mutant)
    return next((reason for reason in known if reason.explains(outcome.mutant, code)), None)


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
        "differs from float64, in one of the launches of `op_tests/sim/mutation_probes.py`.",
        "*Harmless* survivors do the same as the original, *missed* ones do not.",
        "`op_tests/sim/mutation_reasons.json` holds the reasons; a survivor without one makes the",
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
