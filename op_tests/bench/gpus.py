"""Benchmarks on all GPUs of a machine: each measures an item at a time, and one process saves.

An item, such as a shape with its numbers of rows, is measured by one process on one GPU, so that
its contenders compare. CUDA_VISIBLE_DEVICES chooses the GPUs.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from math import inf
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

Item = TypeVar("Item")
Row = Mapping[str, object]
Work = Callable[[Item], Iterable[Row]]
"""Measures an item on the GPU that torch calls 0, a row at a time."""


def visible() -> list[str]:
    """What CUDA_VISIBLE_DEVICES calls each GPU that torch sees."""
    import torch

    names = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(64)))
    return names.split(",")[: torch.cuda.device_count()]


def spread(
    work: Work[Item],
    items: Iterable[Item],
    save: Callable[[Row], None],
    seconds: float = inf,
    gpus: Iterable[str] | None = None,
) -> None:
    """Have every item measured, by whichever GPU is free, and each of its rows saved.

    Args:
        work: of this process where there is one GPU, and else of processes of their own, which
            import it.
        items: each is taken once a GPU is free for it.
        save: called in this process as soon as a row is measured.
        seconds: what is measured later is not saved, and ends with a message.
        gpus: by default all that are visible.

    Raises:
        SystemExit: of several GPUs, an item failed, or its process died; others were measured all
            the same. A single GPU's item raises what it raises.
    """
    until, names = time.monotonic() + seconds, list(visible() if gpus is None else gpus)
    rows = _alone(work, items) if len(names) == 1 else _together(work, iter(items), names, until)
    for row in rows:
        if not row or time.monotonic() > until:
            break
        save(row)
    else:
        return
    print(f"ended after {seconds} s; the same command goes on from here", flush=True)
    rows.close()  # which ends its processes


def _alone(work: Work[Item], items: Iterable[Item]) -> Generator[Row, None, None]:
    for item in items:
        yield from work(item)


def _together(
    work: Work[Item], items: Iterator[Item], gpus: list[str], until: float
) -> Generator[Row, None, None]:
    """The rows of all, as they come, and an empty one where none came in time."""
    context, ends, died = get_context("spawn"), dict[Connection, Any](), list[str]()
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    for gpu in gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # a process inherits it
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(work, theirs), name=gpu, daemon=True)
        process.start()
        theirs.close()
        ends[ours] = process
    os.environ.pop("CUDA_VISIBLE_DEVICES")
    if before is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = before
    try:
        while ends:
            heard = wait(list(ends), None if until == inf else max(0.0, until - time.monotonic()))
            if not heard:
                yield {}
            for end in heard:
                assert isinstance(end, Connection)
                try:
                    row = end.recv()
                    if row is None:  # the process is free
                        end.send(next(items))
                        continue
                    if not row:
                        died.append(ends[end].name)
                        continue
                except StopIteration:
                    ends.pop(end).terminate()
                    continue
                except (EOFError, OSError):
                    died.append(ends.pop(end).name)
                    continue
                yield row
    finally:
        for process in ends.values():
            process.terminate()
    if died:
        raise SystemExit(f"items failed on GPUs {', '.join(died)}; see above")


def _serve(work: Work[Item], to: Connection) -> None:
    """A GPU's process: it asks for items, and answers each by its rows, and by an empty one where
    it fails."""
    while True:
        to.send(None)
        item = to.recv()
        try:
            for row in work(item):
                to.send(row)
        except Exception:
            traceback.print_exc()
            to.send({})
