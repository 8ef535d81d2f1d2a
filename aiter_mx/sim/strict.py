"""Strict mode's bookkeeping around each instruction, with the checks that cannot fail left out."""

from __future__ import annotations

from aiter_mx.sim.emit import Code

_EXEC, _ALL = "w->exec", "~0ull"


class Strict:
    """Wraps instructions in checks, remembering within a block what is known to be valid."""

    def __init__(self, codes: list[Code | None]) -> None:
        self._loaded = {row for c in codes if c and c.issue for row in c.writes}
        self._known: set[int] = set()
        self._known_all: set[int] = set()
        self._known_scalars: set[int] = set()

    def forget(self) -> None:
        """At a label: nothing is known of what came before."""
        self._known.clear()
        self._known_all.clear()
        self._known_scalars.clear()

    def wrap(self, code: Code, changes_exec: bool) -> str:
        """The instruction with its checks before it and its effect on validity after it."""
        facts = (self._known, self._known_all, self._known_scalars)
        before = [set(known) for known in facts] if code.may_skip else []
        text = self._wrapped(code, changes_exec)
        for known, kept in zip(facts, before, strict=False):
            known.intersection_update(kept)  # it may have been left out
        return text

    def _wrapped(self, code: Code, changes_exec: bool) -> str:
        self._known.difference_update(code.copies)
        self._known_all.difference_update(code.copies)
        parts = [code.prepare]
        after = []
        if code.scalar_flow:
            parts.append(self._scalar_flow(code))
        else:
            parts.append(self._check_scalars(code))
        parts += self._check_rows(code)
        if code.issue:
            parts.append(code.issue)
            self._known.difference_update(code.writes)
            self._known_all.difference_update(code.writes)
            self._known_scalars.difference_update(code.scalar_writes)
        elif code.lane_copy:
            parts.append(code.lane_copy)
            self._known.difference_update(code.writes)
            self._known_all.difference_update(code.writes)
            self._known_scalars.difference_update(code.scalar_writes)
        else:
            overwrite = self._check_overwrite(code)
            if code.flows:
                parts.append(self._flow(code))
            else:
                after = self._mark(code)
            parts.append(overwrite)
            if not code.scalar_flow:
                after.append(self.set_scalars(code.scalar_writes))
        if changes_exec:
            self._known.clear()
        return " ".join(part for part in [*parts, code.body, *after] if part)

    def _scalar_flow(self, code: Code) -> str:
        wanted = set(code.scalar_reads) - self._known_scalars
        if not wanted:
            return self.set_scalars(code.scalar_writes)
        self._known_scalars.difference_update(code.scalar_writes)
        masks = (*_masks(wanted), *_masks(set(code.scalar_writes)))
        return f"flow_scalars(w, $I, {', '.join(f'{mask:#x}ull' for mask in masks)});"

    def _flow(self, code: Code) -> str:
        """Work out before the instruction how valid its results are going to be."""
        parts = []
        known_after = []
        for row, sources in code.flows.items():
            tests = [
                (reads.lanes, rows)
                for reads in sources
                if (rows := [r for r in dict.fromkeys(reads.rows) if not self._is_known(r)])
            ]
            if not tests:
                known_after.append(row)
                if not self._is_known(row):
                    parts.append(f"w->set[{row}] |= w->exec;")
                continue
            self._known.discard(row)
            self._known_all.discard(row)
            if all(lanes == _EXEC for lanes, _ in tests):
                rows = list(dict.fromkeys(r for _, rows in tests for r in rows))
                parts.append(_call("flow", rows, f"{row}, "))
            else:
                unset = " | ".join(
                    f"unset_lanes(w, $I, {lanes}, {len(rows)}, {', '.join(map(str, rows))})"
                    for lanes, rows in tests
                )
                parts.append(f"become(w, {row}, {unset});")
        self._known.update(known_after)
        return " ".join(parts)

    def _is_known(self, row: int) -> bool:
        return row in self._known or row in self._known_all

    def _check_scalars(self, code: Code) -> str:
        wanted = {r for r in code.scalar_reads if r not in self._known_scalars}
        if not wanted:
            return ""
        self._known_scalars |= wanted
        low, high = _masks(wanted)
        tests = [
            f"({mask:#x}ull & ~w->sset[{half}])" for half, mask in ((0, low), (1, high)) if mask
        ]
        return (
            f"if (UNLIKELY({' | '.join(tests)})) bad_scalar_read(w, $I, {low:#x}ull, {high:#x}ull);"
        )

    def _check_rows(self, code: Code) -> list[str]:
        checks = []
        for reads in code.reads:
            known = self._known_all | (self._known if reads.lanes == _EXEC else set())
            rows = [row for row in dict.fromkeys(reads.rows) if row not in known]
            if not rows:
                continue
            if reads.lanes == _EXEC:
                self._known.update(rows)
            elif reads.lanes == _ALL:
                self._known_all.update(rows)
            if reads.lanes == _EXEC:
                checks.append(_call("need", rows))
            else:
                listed = ", ".join(map(str, rows))
                checks.append(f"need_lanes(w, $I, {reads.lanes}, {len(rows)}, {listed});")
        return checks

    def _check_overwrite(self, code: Code) -> str:
        rows = [row for row in code.writes if row in self._loaded and row not in self._known_all]
        if not rows:
            return ""
        due = " | ".join(f"w->due[{row}]" for row in rows)
        return (
            f"if (UNLIKELY({due})) late_write(w, $I, {code.write_lanes}, {len(rows)}, "
            f"{', '.join(map(str, rows))});"
        )

    def _mark(self, code: Code) -> list[str]:
        marks = []
        for row in code.writes:
            if code.write_lanes == _ALL:
                if row not in self._known_all:
                    marks.append(f"w->set[{row}] = ~0ull;")
                self._known_all.add(row)
            elif code.write_lanes == _EXEC:
                if row not in self._known | self._known_all:
                    marks.append(f"w->set[{row}] |= w->exec;")
                self._known.add(row)
            elif row not in self._known_all:
                marks.append(f"w->set[{row}] |= {code.write_lanes};")
        return marks

    def set_scalars(self, registers: tuple[int, ...]) -> str:
        """Mark scalar registers as holding a value."""
        new = set(registers) - self._known_scalars
        self._known_scalars |= new
        return _set_bits(*_masks(new))


def _call(name: str, rows: list[int], before: str = "") -> str:
    """A check of one to three rows, or of more."""
    listed = ", ".join(map(str, rows))
    if len(rows) <= 3:
        return f"{name}{len(rows)}(w, $I, {before}{listed});"
    return f"{name}_many(w, $I, {before}{len(rows)}, {listed});"


def _masks(registers: set[int]) -> tuple[int, int]:
    low = sum(1 << r for r in registers if r < 64)
    return low, sum(1 << (r - 64) for r in registers if r >= 64)


def _set_bits(low: int, high: int) -> str:
    return " ".join(
        f"w->sset[{half}] |= {mask:#x}ull;" for half, mask in enumerate((low, high)) if mask
    )
