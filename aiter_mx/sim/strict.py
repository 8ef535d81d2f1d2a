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
        is_load = bool(code.issue)
        parts = [code.prepare]
        if not code.copies:
            parts += [self._check_scalars(code), *self._check_rows(code)]
        if not is_load:
            parts.append(self._check_overwrite(code))
        parts.append(code.issue)
        parts.append(code.body)
        if is_load:
            self._known.difference_update(code.writes)
            self._known_all.difference_update(code.writes)
            self._known_scalars.difference_update(code.scalar_writes)
        elif code.copies:
            parts += self._copy(code)
        else:
            parts += self._mark(code)
            parts.append(self.set_scalars(code.scalar_writes))
        if changes_exec:
            self._known.clear()
        return " ".join(part for part in parts if part)

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
            valid = " & ".join(f"w->set[{row}]" for row in rows)
            listed = ", ".join(map(str, rows))
            checks.append(
                f"if (UNLIKELY({reads.lanes} & ~({valid}))) "
                f"bad_read(w, $I, {reads.lanes}, {len(rows)}, {listed});"
            )
        return checks

    def _check_overwrite(self, code: Code) -> str:
        rows = [row for row in code.writes if row in self._loaded and row not in self._settled()]
        if not rows:
            return ""
        due = " | ".join(f"w->due[{row}]" for row in rows)
        return (
            f"if (UNLIKELY({due})) late_write(w, $I, {code.write_lanes}, {len(rows)}, "
            f"{', '.join(map(str, rows))});"
        )

    def _settled(self) -> set[int]:
        # A register that was just found valid in every active lane has no load under way into it.
        return self._known_all

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

    def _copy(self, code: Code) -> list[str]:
        parts = []
        sources = [row for reads in code.reads for row in reads.rows]
        if code.writes and len(sources) == len(code.writes):
            for row, source in zip(code.writes, sources, strict=True):
                parts.append(
                    f"w->set[{row}] = (w->set[{row}] & ~w->exec) | (w->set[{source}] & w->exec);"
                )
                self._move_known(row, source)
            return parts
        parts.append(self._check_scalars(code) if code.writes else "")
        parts += self._mark(code)
        if code.scalar_writes:
            for target, source in zip(code.scalar_writes, code.scalar_reads, strict=True):
                if source in self._known_scalars:
                    parts.append(self.set_scalars((target,)))
                else:
                    parts.append(f"copy_valid(w, {target}, {source});")
                    self._known_scalars.discard(target)
        return parts

    def _move_known(self, row: int, source: int) -> None:
        for known in (self._known, self._known_all):
            if source not in known:
                known.discard(row)
        if source in self._known | self._known_all:
            self._known.add(row)

    def set_scalars(self, registers: tuple[int, ...]) -> str:
        """Mark scalar registers as holding a value."""
        new = set(registers) - self._known_scalars
        self._known_scalars |= new
        low, high = _masks(new)
        return " ".join(
            f"w->sset[{half}] |= {mask:#x}ull;" for half, mask in ((0, low), (1, high)) if mask
        )


def _masks(registers: set[int]) -> tuple[int, int]:
    low = sum(1 << r for r in registers if r < 64)
    return low, sum(1 << (r - 64) for r in registers if r >= 64)
