"""Times two trees of this package against each other on one GPU, cell by cell, in turns.

    python tune/compare.py /path/to/base --out compare.csv      # this tree beside an older one
    python tune/compare.py /path/to/base --dry-run              # on the simulator, tiny shapes
    python tune/compare.py /path/to/base --out compare.csv --where N=1536 M=1,2,4  # these anew

Cells are drawn by a seed from the catalogue: ``linear`` over shapes x rows x dtypes of result and
activations x bias x overlapping launches, whole expert layers, prefill's groups, quantisation, and
the host's time of eager calls; and what the four benchmarks have.
Each tree runs in a process of its own, which compiles what the cells need ahead of all timing, and
then answers for one cell at a time: operands drawn by the cell's seed, one graph of calls over cold
weights, a digest of the results, and times as it is asked for them. Rounds alternate between the
processes, so that clocks and temperature meet both alike. Cells that come out slower than
``--limit`` are timed again. With ``--where`` the cells that it leaves out keep the rows that
``--out`` has of them. Ends with status 1 where a group's geometric mean or a repeated cell misses
its bar.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import select
import subprocess
import sys
import threading
import time
import timeit
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from compare_cells import EAGER, Cell, benched_cells, draw_cells, operands_of, tiny

ROOT = Path(__file__).resolve().parents[1]
GROUPS = ("op", "timed", "M", "out_dtype", "x_dtype", "bias", "pdl")
FIELDS = (*GROUPS, "N", "K", "E", "top_k", "to", "G", "mode")
"""That a cell may have."""
COLD_BYTES = 512 << 20
"""Weights rotate through so much memory, several times the last-level cache."""
EAGER_CALLS = 200
"""Of the host between two waits for the GPU."""
EAGER_ROUNDS = 6
"""Times as many as of other cells: a host's times spread more than a GPU's."""
GEOMEAN_LIMIT = 1.01
BUILD_SHARE = 0.6
"""Of the budget that building ahead may take at most."""


# What follows up to the controller runs in a tree of either age: it calls what is public alone.


class Prepared:
    """A cell's calls, ready to be timed."""

    def __init__(self, cell: Cell, on_gpu: bool) -> None:
        import torch

        device = torch.device("cuda" if on_gpu else "cpu")
        captured = on_gpu and cell.get("timed") != "host"
        cold_bytes = COLD_BYTES if captured else 0
        calls, self._results = operands_of(cell, device, cold_bytes)
        for call in calls[:2]:
            call()
        whole = hashlib.sha256()
        for result in self._results[:2]:
            whole.update(result.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        self.digest, self.calls = whole.hexdigest()[:16], len(calls)
        self._graph: Any = None
        self._first = calls[0]
        if captured:
            torch.cuda.synchronize()
            self._stream, self._graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
            with torch.cuda.stream(self._stream):
                calls[0]()
                self._stream.synchronize()
                self._graph.capture_begin()
                try:
                    for call in calls:
                        call()
                finally:
                    self._graph.capture_end()

    def time_us(self, replays: int) -> float:
        """Microseconds of a call: the median of some replays, after two that are not timed; of the
        host alone for an eager call, which the GPU's queue never holds up."""
        import torch

        if self._graph is None:
            on_gpu = torch.cuda.is_available()
            host_times = [self._host_us(on_gpu) for _ in range(replays + 2 if on_gpu else 1)]
            return median(host_times[2 * on_gpu :])
        times = []
        with torch.cuda.stream(self._stream):
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * (replays + 2))]
            for start, end in zip(events[::2], events[1::2], strict=True):
                start.record()
                self._graph.replay()
                end.record()
            self._stream.synchronize()
        times = [s.elapsed_time(e) for s, e in zip(events[4::2], events[5::2], strict=True)]
        return median(times) * 1e3 / self.calls

    def _host_us(self, on_gpu: bool) -> float:
        """Microseconds of the host for an eager call, or of the call on a CPU."""
        count = EAGER_CALLS if on_gpu else 1
        took = timeit.timeit(self._first, number=count)
        if on_gpu:
            import torch

            torch.cuda.synchronize()
        return took * 1e6 / count


def build_cell(cell: Cell, on_gpu: bool, room: threading.Semaphore) -> str:
    """Have all that a cell calls compiled; what went wrong, if anything did."""
    import torch

    try:
        with room:
            calls, _ = operands_of(cell, torch.device("cuda" if on_gpu else "cpu"), 0)
            calls[0]()
            if on_gpu:
                torch.cuda.synchronize()
    except Exception as error:  # the cell's turn says it again
        return f"{type(error).__name__}: {error}"[:300]
    return ""


def kernel_of(cell: Cell) -> str:
    """The kernel that a cell's call is routed to, as this tree names it."""
    import aiter_mx

    if cell["op"] != "linear":
        return ""
    try:
        chosen = aiter_mx.explain(**{key: cell[key] for key in cell if key != "timed"})
        return f"{chosen.kernel} " + " ".join(f"{k}={v}" for k, v in chosen.config.items())
    except Exception as error:
        return f"{type(error).__name__}"


def serve(tree: Path, on_gpu: bool) -> None:
    """Answer a controller: a line of JSON for each line of JSON."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints must not answer
    import torch

    import aiter_mx

    assert Path(aiter_mx.__file__).is_relative_to(tree), f"{aiter_mx.__file__} is not of {tree}"
    prepared: Prepared | None = None
    with ExitStack() as stack:
        if not on_gpu:
            stack.enter_context(aiter_mx.simulate("gfx950"))
        for line in sys.stdin:
            asked = json.loads(line)
            try:
                if asked["do"] == "build":
                    answer = {"failed": build_cells(asked["cells"], on_gpu, asked["jobs"])}
                elif asked["do"] == "prepare":
                    prepared = None
                    if on_gpu:
                        torch.cuda.empty_cache()
                    prepared = Prepared(asked["cell"], on_gpu)
                    answer = {"digest": prepared.digest, "kernel": kernel_of(asked["cell"])}
                else:
                    assert prepared is not None
                    answer = {"us": prepared.time_us(asked["replays"])}
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"[:300]}
            print(json.dumps({**answer, "to": asked["number"]}), file=answers, flush=True)


def build_cells(cells: list[Cell], on_gpu: bool, jobs: int) -> dict[str, str]:
    """What went wrong, by cell, with so many at a time, but few of those that take much memory."""
    small, large = threading.Semaphore(jobs), threading.Semaphore(2)

    def attempt(cell: Cell) -> str:
        return build_cell(cell, on_gpu, small if cell["op"] == "linear" else large)

    if on_gpu:
        with ThreadPoolExecutor(jobs) as pool:
            found = list(pool.map(attempt, cells))
    else:
        found = [attempt(cell) for cell in cells]
    return {str(cell): why for cell, why in zip(cells, found, strict=True) if why}


# The controller.


class Died(Exception):
    """A tree's process ended or did not answer."""


class Tree:
    """The process of one tree."""

    def __init__(self, path: Path, on_gpu: bool) -> None:
        self.path, self._on_gpu, self._asked = path.resolve(), on_gpu, 0
        self._start()

    def _start(self) -> None:
        command = [sys.executable, __file__, str(self.path), "--serve"]
        command += [] if self._on_gpu else ["--dry-run"]
        self._process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": str(self.path), "AITER_MX_CONFIG": ""},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **what: Any) -> None:
        assert self._process.stdin is not None
        self._asked += 1
        try:
            print(json.dumps({**what, "number": self._asked}), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise Died(f"{self.path} has no process any more") from None

    def answer(self, within_s: float = 120.0) -> dict[str, Any]:
        """What the last question's answer is. Raises Died, after which the next is put anew."""
        pipe = self._process.stdout
        assert pipe is not None
        while True:
            ready, _, _ = select.select([pipe], [], [], within_s)
            line = pipe.readline() if ready else ""
            if not line:
                self._process.kill()
                self._process.wait()
                why = "ended" if ready else f"did not answer within {within_s:g} s"
                self._start()
                raise Died(f"the process of {self.path} {why}")
            found: dict[str, Any] = json.loads(line)
            if found["to"] == self._asked:  # else of a question that was given up
                return found

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()


def compare_cell(trees: tuple[Tree, Tree], cell: Cell, rounds: int, replays: int) -> Cell:
    """A line of the result: times of both trees, in turns."""
    line = dict(cell)
    try:
        for tree in trees:  # both make their operands at the same time, and then one is timed
            tree.ask(do="prepare", cell=cell)
        found = [tree.answer() for tree in trees]
        names = ("base", "new")
        errors = [f"{n}: {f['error']}" for n, f in zip(names, found, strict=True) if "error" in f]
        if errors:
            return line | {"error": "; ".join(errors)}
        times: tuple[list[float], list[float]] = ([], [])
        for turn in range(rounds * EAGER_ROUNDS if cell.get("timed") == "host" else rounds):
            for which in (0, 1) if turn % 2 == 0 else (1, 0):
                trees[which].ask(do="time", replays=replays)
                answer = trees[which].answer()
                if "error" in answer:
                    return line | {"error": f"{names[which]}: {answer['error']}"}
                times[which].append(answer["us"])
    except Died as error:
        return line | {"error": str(error)}
    # Whatever disturbs a host makes it slower: the least of its rounds is what a call takes.
    middle_of = min if cell.get("timed") == "host" else median
    base, new = middle_of(times[0]), middle_of(times[1])
    line |= {"base_kernel": found[0]["kernel"], "new_kernel": found[1]["kernel"]}
    line |= {"base_us": round(base, 3), "new_us": round(new, 3), "ratio": round(new / base, 4)}
    for name, all_of, middle in (("base", times[0], base), ("new", times[1], new)):
        line[f"{name}_spread"] = round((max(all_of) - min(all_of)) / middle, 4)
    return line | {"same_bits": found[0]["digest"] == found[1]["digest"]}


def geomean(ratios: list[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def groups_of(lines: list[Cell]) -> Iterator[tuple[str, list[float]]]:
    """The ratios of each value of each field, and of all lines."""
    timed = [line for line in lines if "ratio" in line]
    yield "all", [line["ratio"] for line in timed]
    for field in GROUPS:
        for value in dict.fromkeys(line[field] for line in timed if field in line):
            yield f"{field}={value}", [x["ratio"] for x in timed if x.get(field) == value]


def summary(lines: list[Cell], limit: float) -> tuple[str, bool]:
    """What to print at the end, and whether every bar is met."""
    text, met = ["geometric mean of new over base, by group:"], True
    for name, ratios in groups_of(lines):
        if ratios:
            mean = geomean(ratios)
            met &= mean <= GEOMEAN_LIMIT
            worst = max(ratios)
            text.append(f"  {name:20} {mean:.4f}  worst {worst:.3f}  of {len(ratios)} cells")
    text.append("worst cells:")
    for line in sorted(lines, key=lambda line: -line.get("ratio", 0))[:15]:
        shown = " ".join(f"{key}={value}" for key, value in line.items() if value != "")
        text.append(f"  {shown}")
    slow = [line for line in lines if line.get("ratio", 0) > limit]
    failed = [line for line in lines if line.get("error")]
    other = sum(line.get("same_bits") is False for line in lines)
    text.append(
        f"{len(lines)} cells: {len(slow)} above {limit:g}, {len(failed)} failed, {other} with "
        "other bits"
    )
    text += [f"  failed: {line}" for line in failed[:10]]
    return "\n".join(text), met and not slow and not failed


def where(cells: Iterable[Cell], conditions: Sequence[str]) -> list[Cell]:
    """The cells that meet every condition: a field and the values that it may have, as M=1,2."""
    wanted = [condition.partition("=") for condition in conditions]
    return [
        cell
        for cell in cells
        if all(str(cell.get(field)) in values.split(",") for field, _, values in wanted)
    ]


def rows_of(path: Path) -> list[Cell]:
    """The rows that a comparison before this one has written."""
    import pandas as pd

    rows = pd.read_csv(path).to_dict("records")
    return [{str(k): v for k, v in row.items() if not pd.isna(v)} for row in rows]


def write(path: Path, lines: list[Cell], before: Sequence[Cell] = ()) -> None:
    """Write the lines; among rows of a comparison before, each in the place of its cell's."""
    import pandas as pd

    if before:
        rows = {_key(row): row for row in before} | {_key(line): line for line in lines}
        lines = list(rows.values())
    pd.DataFrame(lines).to_csv(path, index=False)


def _key(row: Cell) -> tuple[str, ...]:
    """What tells a cell from others; a table has whole numbers as others where some are missing."""
    values = (row.get(field) for field in FIELDS)
    return tuple(str(int(v) if isinstance(v, float) else v) for v in values)


def compare(arguments: argparse.Namespace) -> bool:
    """Compare the trees over all cells; whether every bar is met."""
    on_gpu = not arguments.dry_run
    cells = EAGER + draw_cells(
        arguments.cells, arguments.moe, arguments.grouped, arguments.quantize, arguments.seed
    )
    if on_gpu:
        cells += [cell for cell in benched_cells() if cell not in cells]
    cells = where(cells, arguments.where)
    if not on_gpu:
        cells = tiny(cells)
    before = rows_of(arguments.out) if arguments.where and arguments.out.is_file() else []
    ends_at = time.monotonic() + arguments.budget
    trees = Tree(arguments.base, on_gpu), Tree(ROOT, on_gpu)
    jobs = arguments.jobs or max(2, len(os.sched_getaffinity(0)) // 2)
    lines: list[Cell] = []
    try:
        begun = time.monotonic()
        for tree in trees:
            tree.ask(do="build", cells=cells, jobs=jobs)
        for tree in trees:
            left = begun + BUILD_SHARE * arguments.budget - time.monotonic()
            try:
                failed = tree.answer(within_s=max(left, 1)).get("failed", {})
            except Died as error:  # what is not compiled yet is when its cell has its turn
                failed = {"building": str(error)}
            for cell, why in list(failed.items())[:5]:
                print(f"{tree.path}: {cell}: {why}", flush=True)
        print(f"{len(cells)} cells built in {time.monotonic() - begun:.0f} s", flush=True)
        for done, cell in enumerate(cells, 1):
            if time.monotonic() > ends_at:
                print(f"the budget ends after {len(lines)} of {len(cells)} cells", flush=True)
                break
            lines.append(compare_cell(trees, cell, arguments.rounds, arguments.replays))
            if done % 50 == 0 or done == len(cells):
                write(arguments.out, lines, before)
                print(f"{done} cells, {time.monotonic() - begun:.0f} s", flush=True)
        slowest = sorted(range(len(lines)), key=lambda i: -lines[i].get("ratio", 0.0))
        for at in slowest:
            if lines[at].get("ratio", 0.0) <= arguments.limit or time.monotonic() > ends_at:
                break
            first, cell = lines[at], {k: lines[at][k] for k in cells[at]}
            again = compare_cell(trees, cell, 2 * arguments.rounds, arguments.replays)
            lines[at] = again | {"first_ratio": first["ratio"]}
    finally:
        for tree in trees:
            tree.close()
        if lines:
            write(arguments.out, lines, before)
    text, met = summary(lines, arguments.limit)
    print(text)
    return met


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base", type=Path, help="the other tree, a checkout of it")
    parser.add_argument("--out", type=Path, default=Path("compare.csv"))
    parser.add_argument("--cells", type=int, default=400, help="of linear")
    parser.add_argument("--moe", type=int, default=40, help="expert layers")
    parser.add_argument("--grouped", type=int, default=8, help="grouped GEMMs")
    parser.add_argument("--quantize", type=int, default=12, help="quantisations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--where", nargs="+", default=[], help="field=values of the cells to time")
    parser.add_argument("--jobs", type=int, help="calls that a tree builds for at a time")
    parser.add_argument("--rounds", type=int, default=5, help="of each tree, in turns")
    parser.add_argument("--replays", type=int, default=5, help="of a graph in a round")
    parser.add_argument("--limit", type=float, default=1.05, help="of a cell, after a repeat")
    parser.add_argument("--budget", type=float, default=560, help="seconds for all of it")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes, on the simulator")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.base, not arguments.dry_run)
        return
    sys.path.insert(0, str(ROOT))
    sys.exit(not compare(arguments))


if __name__ == "__main__":
    main()
