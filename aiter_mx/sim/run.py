"""One run of a translated kernel: the structures that its C code takes, threads, and counts."""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from dataclasses import dataclass
from typing import Any

from aiter_mx.sim.report import COUNTERS, CCounters, CFault, CFindings, LaunchReport


class CRegion(ctypes.Structure):
    """A stretch of host memory that the kernel may touch."""

    _fields_ = [
        ("begin", ctypes.c_uint64),
        ("end", ctypes.c_uint64),
        ("readable", ctypes.c_uint32),
        ("writable", ctypes.c_uint32),
    ]


class CLaunch(ctypes.Structure):
    """``Launch`` of csrc/machine.h."""

    _fields_ = [
        ("next_group", ctypes.c_uint64),
        ("stop", ctypes.c_uint32),
        ("schedule", ctypes.c_uint32),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("seed", ctypes.c_uint64),
        ("max_steps", ctypes.c_uint64),
        ("kernarg", ctypes.c_uint64),
        ("dispatch_packet", ctypes.c_uint64),
        ("image_base", ctypes.c_uint64),
        ("regions", ctypes.POINTER(CRegion)),
        ("region_count", ctypes.c_uint32),
        ("lds_bytes", ctypes.c_uint32),
        ("scratch_bytes", ctypes.c_uint32),
        ("entry_pc", ctypes.c_uint32),
        ("count_conflicts", ctypes.c_uint32),
        ("delay", ctypes.c_uint32),
        ("finite_scales", ctypes.c_uint32),
        ("sum_order", ctypes.c_uint32),
        ("perturbing", ctypes.c_uint32),
        ("collect", ctypes.c_uint32),
        ("checks", ctypes.c_uint64),
        ("shadow", ctypes.c_void_p),
        ("group_bytes", ctypes.c_void_p),
        ("first_load", ctypes.c_void_p),
        ("history", ctypes.c_void_p),
        ("coherence", ctypes.c_void_p),
        ("blocks", ctypes.c_uint32),
        ("resident", ctypes.c_uint32),
        ("end_group", ctypes.c_uint64),
        ("trace", ctypes.c_void_p),
    ]


class CTrace(ctypes.Structure):
    """What waves do, as far as it is written down."""

    _fields_ = [
        ("words", ctypes.c_void_p),
        ("count", ctypes.c_uint64),
        ("room", ctypes.c_uint64),
        ("lines", ctypes.c_void_p),
        ("line_count", ctypes.c_uint64),
        ("line_room", ctypes.c_uint64),
    ]


@dataclass(frozen=True)
class Translated:
    """A kernel's compiled translation and what its numbers mean."""

    run: Any
    texts: list[str]
    addresses: list[int]
    leaders: list[int]
    blocks: list[dict[str, int]]
    passes: list[dict[str, int]]
    entry_pc: int
    hazards: dict[str, list[str]]


def trace_words(trace: CTrace) -> bytes:
    """What was written down; the memory that held it is given back."""
    words = ctypes.string_at(trace.words, 4 * trace.count) if trace.count else b""
    free = ctypes.CDLL(None).free
    free.argtypes, free.restype = [ctypes.c_void_p], None
    free(trace.words)
    free(trace.lines)
    return words


class Result:
    """What one thread reports: faults, findings, counters, and bitmaps of the bytes touched."""

    def __init__(self, blocks: int, sizes: list[int] | None) -> None:
        self.fault, self.counters, self.findings = CFault(), CCounters(), CFindings()
        self.blocks = (ctypes.c_uint64 * max(blocks, 1))()
        self.bitmaps = [
            ctypes.create_string_buffer(size // 8 + 8) for size in sizes or () for _ in range(2)
        ]
        addresses = map(ctypes.addressof, self.bitmaps)
        self.seen = (ctypes.c_void_p * len(self.bitmaps))(*addresses) if sizes else None


def run_threads(
    translated: Translated, launch: CLaunch, threads: int, sizes: list[int] | None
) -> list[Result]:
    """Run a launch's workgroups on so many host threads."""
    results = [Result(len(translated.blocks), sizes) for _ in range(threads)]

    def work(result: Result) -> None:
        counted = ctypes.byref(result.counters), ctypes.byref(result.blocks)
        faults = ctypes.byref(result.fault), result.seen, ctypes.byref(result.findings)
        translated.run(ctypes.byref(launch), *counted, *faults)

    workers = [threading.Thread(target=work, args=(result,)) for result in results]
    for worker in workers:
        worker.start()
    try:
        for worker in workers:
            worker.join()
    except BaseException:  # an interrupt: the kernel may be the one that never ends
        launch.stop = 1
        for worker in workers:
            worker.join()
        raise
    return results


def launch_report(
    kernel: str, waves: int, seconds: float, translated: Translated, results: list[Result]
) -> LaunchReport:
    """The counters of all threads together."""
    mnemonics: Counter[str] = Counter()
    passes: Counter[str] = Counter()
    totals: dict[str, Any] = Counter()
    for result in results:
        for i, times in enumerate(result.blocks[: len(translated.blocks)]):
            if times:
                for total, block in ((mnemonics, translated.blocks), (passes, translated.passes)):
                    total.update({name: count * times for name, count in block[i].items()})
        totals.update({name: getattr(result.counters, name) for name in COUNTERS})
    unique = [_unique(results, kind) for kind in (0, 1)] if results[0].seen else [None, None]
    return LaunchReport(
        kernel,
        waves,
        seconds,
        dict(mnemonics),
        dict(passes),
        **totals,
        unique_bytes_read=unique[0],
        unique_bytes_written=unique[1],
    )


def _unique(results: list[Result], kind: int) -> int:
    """Bytes set in any thread's bitmaps of reads (0) or writes (1)."""
    total = 0
    for bitmaps in zip(*(result.bitmaps[kind::2] for result in results), strict=True):
        merged = 0
        for bitmap in bitmaps:
            merged |= int.from_bytes(bitmap.raw, "little")
        total += merged.bit_count()
    return total
