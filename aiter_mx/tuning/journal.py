"""What a sweep has found so far, kept so that a kill at any moment loses one problem at most.

A journal is a folder beside the table, ``linear.csv.journal``, with one file for each worker that
only ever grows: a line of JSON a record, the first of which says which sweep it belongs to. A line
that a kill cut short is dropped when the file is next opened.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeAlias

Record: TypeAlias = dict[str, Any]
"""``kind`` is ``sweep`` (the header), ``problem`` (a race's outcome) or ``lost`` (a candidate that
took the process with it)."""


def folder_of(table: Path) -> Path:
    """The journal of the sweep that writes a table."""
    return table.with_name(f"{table.name}.journal")


def read_folder(folder: Path, fingerprint: str) -> list[Record]:
    """The records of all workers, in the order of their files' names.

    Raises:
        ValueError: the journal belongs to another sweep, or is damaged.
    """
    records: list[Record] = []
    for path in sorted(folder.glob("*.jsonl")):
        lines, _ = _whole_lines(path)
        if not lines:
            continue
        _check(path, lines[0], fingerprint)
        records += lines[1:]
    return records


def merge(records: Iterable[Record]) -> dict[str, Record]:
    """The last outcome of each problem, whatever the order of the records."""
    found: dict[str, Record] = {}
    for record in records:
        if record["kind"] == "problem":
            before = found.get(record["problem"])
            if before is None or _age(before) < _age(record):
                found[record["problem"]] = record
    return found


def _age(record: Record) -> tuple[Any, ...]:
    return (record["at"], record["worker"], json.dumps(record, sort_keys=True))


class Journal:
    """The file of one worker, open for appending. No two processes can have it open."""

    def __init__(self, folder: Path, worker: str, fingerprint: str) -> None:
        """Open or make it.

        Raises:
            ValueError: another process writes it, it belongs to another sweep, or is damaged.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{worker}.jsonl"
        self.worker = worker
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._file)
            raise ValueError(f"{self.path} is being written: this sweep already runs") from None
        try:
            lines, whole_bytes = _whole_lines(self.path)
            if lines:
                _check(self.path, lines[0], fingerprint)
        except ValueError:
            self.close()
            raise
        os.ftruncate(self._file, whole_bytes)
        if not lines:
            self.append({"kind": "sweep", "fingerprint": fingerprint})

    def append(self, record: Record) -> None:
        """Add a record; when this returns it survives a kill, and a crash of the machine."""
        line = json.dumps(record, sort_keys=True).encode() + b"\n"
        while line:
            line = line[os.write(self._file, line) :]
        os.fsync(self._file)

    def close(self) -> None:
        """Let another process have it."""
        os.close(self._file)


def _whole_lines(path: Path) -> tuple[list[Record], int]:
    """The records of a file, and the length of the part that holds them."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return [], 0
    whole = data[: data.rfind(b"\n") + 1]
    records = []
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            record = json.loads(line)
            if not isinstance(record, dict) or "kind" not in record:
                raise ValueError("no record of a sweep")
        except ValueError as error:
            raise ValueError(
                f"{path}:{number} is damaged ({error}); delete that line, or give --fresh to "
                "discard all that the sweep found"
            ) from None
        records.append(record)
    return records, len(whole)


def _check(path: Path, header: Record, fingerprint: str) -> None:
    if header.get("fingerprint") != fingerprint:
        raise ValueError(
            f"{path} is of another sweep, or of other kernels, than this one; give --fresh to "
            "discard what it found, or the arguments and sources that it was begun with"
        )
