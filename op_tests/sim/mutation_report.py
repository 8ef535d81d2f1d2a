"""What came of mutants: the table, the survivors and the reasons for them."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from rich.console import Console
from rich.table import Table

from op_tests.sim.mutation_coverage import first_unreached
from op_tests.sim.mutation_kinds import KINDS
from op_tests.sim.mutation_planting import Mutant, code_around, code_at, listing
from op_tests.sim.mutation_probes import EVERY_CASE, AnyCase
from op_tests.sim.mutation_rules import why_harmless

HERE = Path(__file__).resolve().parent
REASONS = HERE / "mutation_reasons.json"
UNREACHED = "no probe executes it"


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
        unreached: the mutant is one that no probe executes, of any kind, and ``code`` is where the
            code around it begins that none does.
    """

    kernel: str
    kind: str
    change: str
    code: str
    verdict: str
    why: str
    unreached: bool = False

    def explains(self, mutant: Mutant, code: str) -> bool:
        """Whether this is the reason for a survivor."""
        return (
            not self.unreached
            and fnmatch(mutant.case, self.kernel)
            and self.kind == mutant.kind
            and re.fullmatch(self.change, mutant.change) is not None
            and re.search(self.code, code) is not None
        )

    def is_entry(self, mutant: Mutant, code: str) -> bool:
        """Whether code of the mutant's kernel that no probe reaches begins where this says."""
        return fnmatch(mutant.case, self.kernel) and re.search(self.code, code) is not None


def reasons() -> list[Reason]:
    """The reasons on file."""
    return [Reason(**entry) for entry in json.loads(REASONS.read_text())]


def reason_of(outcome: Outcome, known: Sequence[Reason]) -> Reason | None:
    """The reason for a survivor, None when there is none."""
    mutant, code = outcome.mutant, code_around(outcome.mutant)
    if why := why_harmless(mutant):
        return Reason(mutant.case, mutant.kind, "", "", "harmless", why)
    if outcome.message == UNREACHED:
        entry = code_at(mutant, first_unreached(mutant))
        of_entry = (reason for reason in known if reason.unreached)
        found = next((r for r in of_entry if r.is_entry(mutant, entry)), None)
        if found:
            return found
    return next((reason for reason in known if reason.explains(mutant, code)), None)


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
        numbers = (self.harmless, self.missed, self.unexplained)
        shares = (self._share(self.count), self.of_harmful)
        return [self.name, str(self.count), str(self.caught), *shares, by, *map(str, numbers)]

    @property
    def of_harmful(self) -> str:
        """The share that is caught of those that are not known to do the same."""
        return self._share(self.count - self.harmless)

    def _share(self, count: int) -> str:
        return f"{100 * self.caught / count:.1f} %" if count else "-"


_HEADS = (
    *("mistake", "mutants", "caught", "of all", "of harmful"),
    *("by", "harmless", "missed", "unexplained"),
)


def rows(outcomes: Sequence[Outcome], known: Sequence[Reason]) -> list[Row]:
    """The table: a row for each kind, and the total."""
    kinds = {kind: [o for o in outcomes if o.mutant.kind == kind] for kind in KINDS}
    table = [row_of(kind, of, known) for kind, of in kinds.items() if of]
    return [*table, row_of("all", outcomes, known)]


def row_of(name: str, of: Sequence[Outcome], known: Sequence[Reason]) -> Row:
    """A line for some mutants."""
    why = [reason_of(o, known) for o in of if not o.by]
    verdicts = Counter(reason.verdict if reason else "" for reason in why)
    by = Counter(o.by for o in of if o.by)
    return Row(name, len(of), by, verdicts["harmless"], verdicts["missed"], verdicts[""])


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


_FIELDS = ("case", "kind", "index", "change", "old", "new", "words")


def save_outcomes(path: Path, outcomes: Sequence[Outcome]) -> None:
    """What came of each mutant, kernel after kernel."""
    cases = [case.name for case in EVERY_CASE]
    ordered = sorted(outcomes, key=lambda outcome: cases.index(outcome.mutant.case))
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow((*_FIELDS, "by", "message"))
        for o in ordered:
            words = " ".join(f"{word:08x}" for word in o.mutant.words)
            fields = [getattr(o.mutant, name) for name in _FIELDS[:-1]]
            writer.writerow((*fields, words, o.by, "" if o.by else o.message))


def load_outcomes(path: Path) -> list[Outcome]:
    """Those on file of kernels whose code is what it was."""
    if not path.exists():
        return []
    found: dict[str, list[Outcome]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            words = tuple(int(word, 16) for word in row["words"].split())
            given = row["case"], row["kind"], int(row["index"]), row["change"], row["old"]
            outcome = Outcome(Mutant(*given, row["new"], words), row["by"], row["message"])
            found.setdefault(row["case"], []).append(outcome)
    known = {case.name for case in EVERY_CASE if _is_of_code(found.get(case.name, ()), case)}
    return [outcome for name, of in found.items() if name in known for outcome in of]


def _is_of_code(outcomes: Sequence[Outcome], case: AnyCase) -> bool:
    code = listing(case)
    mutants = [outcome.mutant for outcome in outcomes]
    return all(m.index < len(code) and code[m.index].text == m.old for m in mutants)


def page(outcomes: Sequence[Outcome], known: Sequence[Reason]) -> str:
    """docs/mutation.md."""
    lines = [
        "# What the simulator catches",
        "",
        "Written by `python -m op_tests.sim.mutation --save`; not to be edited by hand.",
        "",
        "One instruction at a time of our gfx950 kernels is changed in the machine code. A mutant",
        "is caught when the simulator reports it (the name of the error is given) or its result",
        "differs from float64, in one of the launches of `op_tests/sim/mutation_probes.py`.",
        "*Harmless* survivors do the same as the original, *missed* ones do not.",
        "Outcomes are in `docs/measured/gfx950_simulated/mutants.csv`.",
        "`op_tests/sim/mutation_reasons.json` holds the reasons; a survivor without one makes the",
        "program fail.",
        "",
        "| " + " | ".join(_HEADS) + " |",
        "| --- | ---: | ---: | ---: | ---: | --- | ---: | ---: | ---: |",
        *("| " + " | ".join(row.cells()) + " |" for row in rows(outcomes, known)),
        "",
        "## Kernels",
        "",
        "| kernel | mutants | caught | harmless | of harmful |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for case in EVERY_CASE:
        of = [o for o in outcomes if o.mutant.case == case.name]
        if of:
            total = row_of(case.name, of, known)
            cells = (case.name, total.count, total.caught, total.harmless, total.of_harmful)
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += [
        "",
        "A kernel's name has its parameters: rows or tiles, waves, unroll and the output's dtype.",
        "",
        *_survivors_by_reason(outcomes, known),
    ]
    return "\n".join(lines).rstrip() + "\n"


_VERDICTS = {"missed": "Missed", "harmless": "Harmless", "": "Unexplained"}


def _survivors_by_reason(outcomes: Sequence[Outcome], known: Sequence[Reason]) -> Iterator[str]:
    """A table for each verdict: reasons, and how many mutants of which kernels each is for."""
    found: dict[str, dict[str, list[Mutant]]] = {verdict: {} for verdict in _VERDICTS}
    for outcome, reason in survivors(outcomes, known):
        verdict, why = (reason.verdict, reason.why) if reason else ("", "?")
        found[verdict].setdefault(why, []).append(outcome.mutant)
    for verdict, by_reason in found.items():
        if by_reason:
            yield from (f"## {_VERDICTS[verdict]}", "", "| why | mutants |", "| --- | --- |")
            for why, mutants in sorted(by_reason.items()):
                of_kernels: dict[str, Counter[str]] = {}
                for mutant in mutants:
                    of_kernels.setdefault(mutant.case, Counter())[mutant.kind] += 1
                cells = (f"{case}: {_counted(kinds)}" for case, kinds in of_kernels.items())
                yield f"| {why} | {'; '.join(cells)} |"
            yield ""


def _counted(kinds: Counter[str]) -> str:
    return ", ".join(kind if count == 1 else f"{kind} ({count})" for kind, count in kinds.items())
