"""Who tunes what: one process alone, or the workers that ``torchrun`` started.

Each worker has a part of the problems for its own, which it compiles ahead, and helps the others
with theirs in the end. Counters in torchrun's own TCPStore say what is taken; workers leave what
they found there, where the first of them collects it. There is nothing else between them.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias

from aiter_mx.tuning.journal import Record, merge

Parts: TypeAlias = "Sequence[Sequence[str]]"
"""The problems that each worker begins with, in their order."""
_POLL_S = 0.05
_PATIENCE_S = 3600.0
"""The most that a worker waits for another: as long as a race, or all builds, may take."""


class Share(Protocol):
    """A worker's part of a sweep."""

    rank: int
    workers: int
    name: str
    local_rank: int

    def publish(self, records: Iterable[Record]) -> None:
        """Show what was found to the other workers."""

    def found(self, problems: Sequence[str]) -> list[Record]:
        """What all workers have found so far of these problems."""

    def claim(self, parts: Parts) -> Iterator[str]:
        """The problems that are this worker's to tune, of its own part first: each goes to one."""

    def meet(self, where: str) -> None:
        """Wait until every worker is here."""

    def leave(self) -> None:
        """Say that nothing more is wanted of the others; the first worker goes last."""


class Alone:
    """The only worker."""

    def __init__(self) -> None:
        self.rank, self.workers = 0, 1
        self.local_rank = 0
        self.name = "worker"
        self._found: dict[str, Record] = {}

    def publish(self, records: Iterable[Record]) -> None:
        self._found |= merge(records)

    def found(self, problems: Sequence[str]) -> list[Record]:
        return [self._found[name] for name in problems if name in self._found]

    def claim(self, parts: Parts) -> Iterator[str]:
        for name in parts[0]:
            if name not in self._found:
                yield name

    def meet(self, where: str) -> None:
        return

    def leave(self) -> None:
        return


class Shared:
    """One of torchrun's workers."""

    def __init__(self, store: Any, environment: dict[str, str] | None = None) -> None:
        """Join; ``store`` is a torch.distributed store that all workers share."""
        env = os.environ if environment is None else environment
        self.rank, self.workers = int(env["RANK"]), int(env["WORLD_SIZE"])
        self.local_rank = int(env.get("LOCAL_RANK", self.rank))
        self.name = f"{socket.gethostname()}-{self.rank}"
        self._store = store
        self._found: dict[str, Record] = {}
        self._read = 0  # of what was published

    def publish(self, records: Iterable[Record]) -> None:
        for record in merge(records).values():
            place = self._store.add("published", 1) - 1
            self._store.set(f"found/{place}", json.dumps(record))

    def found(self, problems: Sequence[str]) -> list[Record]:
        # Whoever has taken a place may not have filled it yet; those behind wait for it then.
        new: list[Record] = []
        while self._store.check([f"found/{self._read + len(new)}"]):
            new.append(json.loads(self._store.get(f"found/{self._read + len(new)}")))
        self._read += len(new)
        self._found = merge([*self._found.values(), *new])
        return [self._found[name] for name in problems if name in self._found]

    def claim(self, parts: Parts) -> Iterator[str]:
        for whose in (*range(self.rank, self.workers), *range(self.rank)):
            part = parts[whose]
            while (turn := self._store.add(f"next/{whose}", 1) - 1) < len(part):
                if part[turn] not in self._found:  # in an earlier run, of which all were told
                    yield part[turn]

    def meet(self, where: str) -> None:
        self._store.add(f"meet/{where}", 1)
        self._wait_for_all(where)

    def leave(self) -> None:
        self._store.add("meet/the end", 1)
        if self.rank == 0:  # whose process may be the one that holds the store
            self._wait_for_all("the end")

    def _wait_for_all(self, where: str) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while (here := self._store.add(f"meet/{where}", 0)) < self.workers:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{here} of {self.workers} workers came to {where!r} within {_PATIENCE_S:g} s"
                )
            time.sleep(_POLL_S)


def join() -> Share:
    """This process's part: what torchrun's environment says, and without one everything."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Alone()
    from torch import distributed

    store, _, _ = next(distributed.rendezvous("env://"))  # type: ignore[attr-defined]
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Shared(distributed.PrefixStore(f"aiter_mx-tune-{attempt}", store))  # type: ignore[attr-defined]
