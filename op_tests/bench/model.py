"""Decoders of whole models at decode and prefill: ours beside bf16 and torchao's fp8, compiled.

    python -m op_tests.bench.model [--save] [--models llama-3.1-8b qwen3-30b-a3b]
                                   [--batch 1 8 64 256] [--context 128] [--prefill 2048 8192]
                                   [--sides ours bf16 torchao] [--layers N] [--together]
                                   [--seconds S]
    python -m op_tests.bench.pictures       # the picture of what is saved

The code is transformers' own, with a static cache and random weights. ``ours`` has the layers of
``aiter_mx.integrations.transformers``; ``bf16`` is the model as it is, experts by grouped_mm;
``torchao`` has fp8 by rows in its linear layers and is left out where there are experts. The output
head is bf16 on each side. A decoder layer is compiled once by torch.compile and stands for all.

A decode step is one token of each sequence, the last of its context, and a prefill is one sequence,
of which the last token's logits are computed. Both are replays of a CUDA graph, so that no time of
the host counts. ``memory_gib`` is the most that is allocated meanwhile; ``cosine`` is that of
the first cell's logits and those of the same weights in bf16, uncompiled. ``--layers`` takes the
first layers of a model alone, and ``layers`` says so.

Each side of a model has a process. They compile at the same time and measure in turn, the models
one after the other or ``--together``. torchao compiles several times as long as the others, which
would wait for it: give it a run of its own. Rows are written as they come; those that this commit
has saved are not measured again, and where a model's side is measured no other commit's are kept.
``--seconds`` is for each round: after six tenths of them no cell is compiled, after them none is
measured.
"""

from __future__ import annotations

import argparse
import datetime
import multiprocessing
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from transformers import PretrainedConfig

from aiter_mx.timing import GraphedCalls
from aiter_mx.tuning.origin import commit
from op_tests.bench.common import MEASURED, gpu_name, refuse_no_gpu, report
from op_tests.bench.decoder import (
    CONFIGS,
    SIDES,
    Cell,
    Parts,
    Step,
    build,
    build_ahead,
    convert,
    refusal,
)

PROCESSES = multiprocessing.get_context("spawn")
KEYS = ["model", "layers", "phase", "batch", "tokens", "side"]
"""What tells a row from others of its commit."""


def time_ms(step: Callable[[], object], device: torch.device, seconds: float = 0.2) -> float:
    """Milliseconds of a step: median of the replays of its graph, or of calls on a CPU."""
    if device.type == "cuda":
        graph = GraphedCalls([step])
        once = graph.time_us(replays=1, warm=1)
        return graph.time_us(max(5, min(50, int(seconds * 1e6 / once))), warm=2) / 1e3
    times = []
    for _ in range(3):
        begun = time.perf_counter()
        step()
        times.append((time.perf_counter() - begun) * 1e3)
    return median(times)


def cosine(a: Tensor, b: Tensor) -> float:
    """Between two tensors, as one vector each."""
    a, b = a.double().flatten(), b.double().flatten()
    return float(a @ b / (a.norm() * b.norm()))


class Together:
    """How processes that run at once keep out of each other's way.

    They build their models in turn, so that one alone has more than it will keep; they compile at
    the same time; and they measure in turn, while nobody compiles.
    """

    def __init__(self, parties: int) -> None:
        self.barrier = PROCESSES.Barrier(parties)
        self._turns = {
            what: [PROCESSES.Event() for _ in range(parties + 1)] for what in ("build", "measure")
        }
        for turns in self._turns.values():
            turns[0].set()

    @contextmanager
    def building(self, place: int) -> Iterator[None]:
        """After those of the places before."""
        yield from self._in_turn("build", place)

    @contextmanager
    def measuring(self, place: int) -> Iterator[None]:
        """Likewise, once everyone has compiled or one has failed."""
        try:
            self.barrier.wait(timeout=600)
        except threading.BrokenBarrierError:
            print("a side has failed; the others are measured without it", flush=True)
        yield from self._in_turn("measure", place)

    def fail(self, place: int) -> None:
        """Have nobody wait for this one."""
        self.barrier.abort()
        with self.measuring(place):
            pass

    def _in_turn(self, what: str, place: int) -> Iterator[None]:
        self._turns[what][place].wait(timeout=600)
        try:
            yield
        finally:
            self._turns[what][place + 1].set()


@dataclass(frozen=True)
class Side:
    """What a process measures.

    Attributes:
        model: its name.
        config: its configuration, with as many layers as are measured.
        of_layers: how many it has in all.
        name: one of ``SIDES``.
        cells: the steps.
        place: among those that run at once.
    """

    model: str
    config: PretrainedConfig
    of_layers: int
    name: str
    cells: Sequence[Cell]
    place: int = 0

    def keys(self, cell: Cell) -> dict[str, object]:
        """What tells a row from others."""
        layers = self.config.num_hidden_layers
        found = (self.model, layers, cell.phase, cell.batch, cell.tokens, self.name)
        return dict(zip(KEYS, found, strict=True))


def measure(
    side: Side,
    device: torch.device,
    together: Together,
    backend: str = "inductor",
    seconds: float = float("inf"),
) -> Iterator[dict[str, object]]:
    """The rows of a side.

    Args:
        side: what to measure.
        device: a GPU, or a CPU for tests.
        together: shared by all that run at once.
        backend: of torch.compile.
        seconds: after six tenths of them no cell is compiled, after them none is measured.
    """
    begun = time.monotonic()
    on_gpu = device.type == "cuda"
    with together.building(side.place):
        model = build(side.config, device)
        expected = Step(model, side.cells[0], Parts())()
        convert(model, side.name)
        if on_gpu:
            torch.cuda.empty_cache()
    build_ahead(model, side.cells, device)
    parts, ready = Parts.compiled(backend), []
    for cell in side.cells:
        if time.monotonic() - begun < 0.6 * seconds:
            Step(model, cell, parts, layers=1)()
            ready.append(cell)
            print(f"{time.monotonic() - begun:.1f} s: compiled {side.keys(cell)}", flush=True)
    if on_gpu:
        torch.cuda.empty_cache()  # for those that measure first
    weights = sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())
    likeness = None
    with together.measuring(side.place):
        for cell in ready:
            if time.monotonic() - begun >= seconds:
                break
            if on_gpu:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            step = Step(model, cell, parts)
            logits = step()
            if not logits.isfinite().all():
                raise ArithmeticError(f"logits are not finite: {side.keys(cell)}")
            if cell == side.cells[0]:
                likeness = cosine(logits, expected)
            yield side.keys(cell) | {
                "of_layers": side.of_layers,
                "ms": time_ms(step, device),
                "weights_gib": weights / 2**30,
                "memory_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
                "cosine": likeness,
            }
            del step


def run(
    side: Side, table: Path, together: Together, seconds: float,
    device: str = "cuda:0", backend: str = "inductor",
) -> None:  # fmt: skip
    """A process: measure a side and write its rows as they come."""
    try:
        for row in measure(side, torch.device(device), together, backend, seconds):
            print(row, flush=True)
            write(row, table)
    except BaseException:
        together.fail(side.place)
        raise


def run_all(sides: Sequence[Side], table: Path, *options: Any) -> bool:
    """Measure sides at once, each in a process; whether all went well."""
    together = Together(len(sides))
    processes = [
        PROCESSES.Process(target=run, args=(side, table, together, *options)) for side in sides
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return not any(process.exitcode for process in processes)


def saved(table: Path) -> pd.DataFrame:
    """The rows that are there already."""
    if not table.is_file():
        return pd.DataFrame(columns=[*KEYS, "commit"])
    return pd.read_csv(table, dtype={"commit": str})


def forget(table: Path, models: Sequence[str], sides: Sequence[str]) -> None:
    """Leave out rows of other commits where these are measured: a model's side is of one commit."""
    frame = saved(table)
    measured = frame.model.isin(models) & frame.side.isin(sides)
    kept = frame[frame.commit.eq(commit()) | ~measured]
    if len(kept) < len(frame):
        kept.to_csv(table, index=False)


def write(row: dict[str, object], table: Path) -> None:
    """Append a row."""
    frame = pd.DataFrame([row]).assign(commit=commit(), date=datetime.date.today().isoformat())
    table.parent.mkdir(parents=True, exist_ok=True)
    frame.to_csv(table, mode="a", header=not table.is_file(), index=False, float_format="%.5g")


def beside(frame: pd.DataFrame) -> pd.DataFrame:
    """A row a cell: the sides' times and memory, and how many times faster ours is."""
    keys = [*(key for key in KEYS if key != "side"), "of_layers"]
    wide = frame.pivot(index=keys, columns="side", values=["ms", "weights_gib", "memory_gib"])
    wide.columns = [f"{side}_{value}" for value, side in wide.columns]
    for peer in ("bf16", "torchao"):
        if {"ours_ms", f"{peer}_ms"} <= set(wide.columns):
            wide[f"over_{peer}"] = wide[f"{peer}_ms"] / wide.ours_ms
    return wide.reset_index()


def cells_of(
    batches: Iterable[int], contexts: Iterable[int], prefills: Iterable[int]
) -> list[Cell]:
    """What is measured of each model."""
    decodes = [Cell("decode", batch, tokens) for tokens, batch in product(contexts, batches)]
    return decodes + [Cell("prefill", 1, tokens) for tokens in prefills]


def sides_of(
    models: Iterable[str], names: Iterable[str], cells: Sequence[Cell], layers: int | None,
    done: pd.DataFrame,
) -> list[Side]:  # fmt: skip
    """What is left to measure, in the order in which it will be."""
    found: list[Side] = []
    had = set(done.loc[done.commit == commit(), KEYS].itertuples(index=False, name=None))
    for model, name in product(models, names):
        config, of_layers = CONFIGS[model], CONFIGS[model].num_hidden_layers
        config = type(config)(**{**config.to_dict(), "num_hidden_layers": layers or of_layers})
        side = Side(model, config, of_layers, name, cells)
        left = [cell for cell in cells if tuple(side.keys(cell).values()) not in had]
        if reason := refusal(name, config) or ("" if left else "it is saved"):
            print(f"{model}, {name}: left out, as {reason}")
        else:
            found.append(replace(side, cells=left, place=len(found)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="write docs/measured/<gpu>/model.csv")
    parser.add_argument("--models", nargs="+", choices=CONFIGS, default=list(CONFIGS))
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 64, 256])
    parser.add_argument("--context", type=int, nargs="*", default=[128])
    parser.add_argument("--prefill", type=int, nargs="*", default=[2048, 8192])
    parser.add_argument("--layers", type=int, help="of each model, if not all")
    parser.add_argument("--together", action="store_true", help="all models at once, if they fit")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for each wave")
    arguments = parser.parse_args()
    refuse_no_gpu()
    cells = cells_of(arguments.batch, arguments.context, arguments.prefill)
    folder = MEASURED / gpu_name() if arguments.save else Path(tempfile.mkdtemp())
    table = folder / "model.csv"
    models = arguments.models
    forget(table, models, arguments.sides)
    failed = False
    for wave in [models] if arguments.together else [[model] for model in models]:
        sides = sides_of(wave, arguments.sides, cells, arguments.layers, saved(table))
        failed |= bool(sides) and not run_all(sides, table, arguments.seconds)
    rows = beside(saved(table)).to_dict("records")
    if rows:
        report("Whole models", rows, None)
    if failed:
        raise SystemExit("a side has failed")


if __name__ == "__main__":
    main()
