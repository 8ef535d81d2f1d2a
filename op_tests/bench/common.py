"""What the benchmarks share: tables, printed and saved with the commit that they measured."""

from __future__ import annotations

import datetime
import math
import platform
import random
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import pandas as pd
import torch
from rich.console import Console
from rich.table import Table

import aiter_mx
from aiter_mx.errors import AiterMxError
from aiter_mx.jit.build import build_all
from aiter_mx.kernels.registry import kernels_of
from aiter_mx.kernels.spec import Config, Problem
from aiter_mx.launch import Tensors, bind, build_request, call
from aiter_mx.target import target_of
from aiter_mx.timing import GraphedCalls, time_graph_us
from aiter_mx.tuning.origin import commit, today, versions

ROOT = Path(__file__).resolve().parents[2]
MEASURED = ROOT / "docs" / "measured"
DEVICE = torch.device("cuda", 0)
LEAST_ROUNDS = 11


def normal_mx(
    *shape: int, device: torch.device, deviation: float = 1.0
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Normal values in bf16, which bf16's contender multiplies, and what they are in MX-FP8."""
    values = (deviation * torch.randn(shape, device=device)).bfloat16()
    payload, scale = aiter_mx.quantize(values.flatten(0, -2))
    return values, (payload.view(shape), scale.view(*shape[:-1], -1))


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 with one fp32 scale a row: fp8 without MX."""
    scale = x.abs().amax(dim=-1).float() / 448
    return (x / scale[:, None]).to(torch.float8_e4m3fn), scale


def alternated_us(
    graphs: Mapping[str, GraphedCalls], window_ms: float, least_rounds: int = LEAST_ROUNDS
) -> dict[str, float]:
    """Time of a call of each: the median of replays in turns, in random order, for so long, after
    half as long in the same way."""
    draw, order = random.Random(0), list(graphs)

    def turn() -> dict[str, float]:
        draw.shuffle(order)
        return {name: graphs[name].time_us(1, 0) for name in order}

    turn_ms = sum(us * graphs[name].calls for name, us in turn().items()) / 1e3
    rounds = max(least_rounds, math.ceil(window_ms / turn_ms))
    times = [turn() for _ in range(rounds + rounds // 2)][rounds // 2 :]
    return {name: median(each[name] for each in times) for name in graphs}


def swept_us(
    op: str, problem: Problem, copies: Sequence[Tensors], replays: int = 15
) -> list[tuple[float, str, Config]]:
    """The time of each configuration of our kernels that builds, the fastest first."""
    target, timed = target_of(DEVICE), []
    for kernel in kernels_of(op):
        if kernel.backend != "hip" or kernel.refusal(target, problem):
            continue
        configs = kernel.candidates(target, problem)
        build_all([build_request(kernel, target, problem, config) for config in configs])
        for config in configs:
            try:
                launch = bind(kernel, target, problem, config, 0)
                calls = [partial(call, launch, *tensors) for tensors in copies]
                timed.append((time_graph_us(calls, replays), kernel.name, config))
            except AiterMxError as error:
                print(f"{kernel.name} {config}: {error}"[:200])
    return sorted(timed, key=lambda entry: entry[0])


def graph_us(calls: Sequence[Callable[[], object]], seconds: float = 0.1) -> float:
    """``time_graph_us`` with fewer replays of what takes longer than so many seconds."""
    graph = GraphedCalls(calls)
    once_s = graph.time_us(1, 2) * graph.calls * 1e-6
    return graph.time_us(max(3, min(15, int(seconds / once_s))), 1)


def refuse_no_gpu() -> None:
    """End the program where there is nothing to measure."""
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark measures a GPU, and torch finds none here")


def folder_name(hardware: str) -> str:
    """What the folder of a processor or GPU is called, such as ``nvidia_h200``."""
    return re.sub(r"\W+", "_", hardware.lower()).strip("_")


def gpu_name() -> str:
    """The name of this machine's GPU, as its folder has it."""
    return folder_name(torch.cuda.get_device_name())


def cpu_name() -> str:
    """The processor's name."""
    try:
        found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1] if found else platform.processor()


def show(title: str, rows: Sequence[dict[str, object]]) -> None:
    """Print the rows as a table, with the commit in its title."""
    table = Table(title=f"{title}, {commit()}")
    for column in rows[0]:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()))
    Console(width=200).print(table)


def report(title: str, rows: Sequence[dict[str, object]], save_as: str | None) -> None:
    """Print the rows as a table and, given a name, save them under ``docs/measured/<gpu>/``."""
    show(f"{title}, {torch.cuda.get_device_name()}", rows)
    if save_as is not None:
        folder = MEASURED / gpu_name()
        folder.mkdir(parents=True, exist_ok=True)
        frame = pd.DataFrame(rows).assign(commit=commit(), date=datetime.date.today().isoformat())
        frame.to_csv(folder / f"{save_as}.csv", index=False, float_format="%.5g")
        print("python -m op_tests.bench.pictures draws what is saved")


class Saved:
    """The cells of a table that a run adds to, in the file as soon as they are measured."""

    def __init__(self, path: Path, cell: Sequence[str], facts: Mapping[str, str]) -> None:
        """A table that may have cells already.

        Args:
            path: of the file.
            cell: the columns that tell cells apart; the file is sorted by the others, then by the
                first.
            facts: columns that all cells of this run have; a cell with others is not done.
        """
        self._path, self._cell, self._facts = path, tuple(cell), dict(facts)
        self._rows: dict[tuple[str, ...], dict[str, object]] = {}
        if path.is_file():
            for row in pd.read_csv(path, dtype=dict.fromkeys(facts, str)).to_dict("records"):
                self._keep({str(name): value for name, value in row.items()})

    def _keep(self, row: dict[str, object]) -> None:
        self._rows[tuple(str(row[name]) for name in self._cell)] = row

    def has(self, *cell: object) -> bool:
        """Whether a cell was measured with these facts."""
        row = self._rows.get(tuple(map(str, cell)), {})
        return all(row.get(name) == value for name, value in self._facts.items())

    def forget(self, is_gone: Callable[[Mapping[str, object]], bool]) -> None:
        """Leave out cells that are none any more, from the next one on that is added."""
        self._rows = {cell: row for cell, row in self._rows.items() if not is_gone(row)}

    def add(self, row: Mapping[str, object]) -> None:
        """Add a cell, or replace it, in the file too."""
        self._keep({**row, **self._facts})
        self._path.parent.mkdir(parents=True, exist_ok=True)
        first, *others = self._cell
        frame = pd.DataFrame(list(self._rows.values())).sort_values([*others, first])
        partly = self._path.with_suffix(".part")
        frame.to_csv(partly, index=False, float_format="%.5g")
        partly.replace(self._path)

    def report(self, row: Mapping[str, object]) -> None:
        """Add what was measured just now, and print it."""
        self.add({**row, "versions": versions(), "date": today()})
        print(*row.values(), flush=True)


def saved_on_gpu(name: str, cell: Sequence[str]) -> Saved:
    """The table that this commit adds to, ``docs/measured/<gpu>/<name>.csv``; where there is no GPU
    the program ends."""
    refuse_no_gpu()
    facts = {"gpu": torch.cuda.get_device_name(), "commit": commit()}
    return Saved(MEASURED / gpu_name() / f"{name}.csv", cell, facts)
