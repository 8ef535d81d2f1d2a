"""Races what it would cost to have fewer kernels.

    python tune/zoo.py linear/wgmma_fp8 --rows 20 --save docs/measured/nvidia_h200/zoo.csv
    python tune/zoo.py --shapes tune/zoo_linear.csv --most 3 --save ...

Every row of this GPU's tables that names one of the kernels given is raced as the tuner races, but
with these kernels left out, beside the row's own configuration; with ``--rows`` at most so many of
them, drawn by a seed. ``--shapes`` names a CSV of further problems (columns ``op``, the op's
fields, and perhaps ``kernel`` and ``config``), each raced beside that kernel, or what dispatch
takes for it now, which is left out too; with ``other`` and ``other_config`` against that kernel
alone. Races that a saved file has and that are not run again stay in it.
"""

from __future__ import annotations

import argparse
import csv
import io
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from aiter_mx.cli.tune import default_table
from aiter_mx.dispatch.cells import parse_config
from aiter_mx.dispatch.dispatcher import route
from aiter_mx.kernels.registry import (
    field_value,
    find_kernel,
    in_line,
    key_columns,
    problem_type,
)
from aiter_mx.kernels.spec import Config, Problem
from aiter_mx.target import Target, gpu_target, hardware
from aiter_mx.tuning.builds import Ahead
from aiter_mx.tuning.candidates import Candidate, candidate_of, candidates_of
from aiter_mx.tuning.measured import default_jobs, measured_meter
from aiter_mx.tuning.origin import commit, versions
from aiter_mx.tuning.race import Outcome, Rules, Timing, race
from aiter_mx.tuning.table import read_rows, write_text

_COLUMNS = ("why", "op", "shape", "kernel", "config", "us", "other", "other_config", "other_us")
_ORIGIN = ("ratio", "failures", "gpu", "versions", "commit")


@dataclass(frozen=True)
class Race:
    """A problem, what computes it now, and what else may.

    Attributes:
        why: ``row`` of a table, or what the list of shapes says.
        op: of the problem.
        problem: the shape and dtypes.
        now: what a table or dispatch names.
        others: candidates of the kernels that stay.
    """

    why: str
    op: str
    problem: Problem
    now: Candidate
    others: tuple[Candidate, ...]


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gone", nargs="*", help="kernels to leave out, as in linear/fp8")
    parser.add_argument("--shapes", type=Path, help="CSV of further problems")
    parser.add_argument("--rows", type=int, help="of a kernel in its table, at most")
    parser.add_argument("--most", type=int, default=8, help="candidates of a kernel")
    parser.add_argument("--few", nargs="*", default=[], help="but of these, as in gemv=2")
    parser.add_argument("--save", type=Path, help="CSV of the races; by default it is printed")
    parser.add_argument("--timings", type=Path, help="CSV of all candidates' times")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no race after so many")
    parser.add_argument("--arch", help="compile what the races need for it, and end")
    args = parser.parse_args()
    gone = {op: {name for at, name in _split(args.gone) if at == op} for op, _ in _split(args.gone)}
    target = hardware(args.arch) if args.arch else gpu_target(0)
    few = {name: int(most) for name, _, most in (each.partition("=") for each in args.few)}
    races = [*_of_rows(target, gone, args.most, few)]
    if args.rows is not None:
        races = random.Random(22).sample(races, min(args.rows, len(races)))
    if args.shapes:
        races += _of_shapes(target, args.shapes, gone, args.most, few)
    began = time.monotonic()
    with Ahead(target, default_jobs()) as ahead:
        for each in races:
            ahead.add(each.problem, (each.now, *each.others))
        if args.arch:
            ahead.settle()
            print(f"{len(races)} races are compiled, in {time.monotonic() - began:.0f} s")
        else:
            _run(target, ahead, races, args.save, args.timings, began + args.seconds)


def _split(names: Sequence[str]) -> list[tuple[str, str]]:
    return [(op, kernel) for op, _, kernel in (name.partition("/") for name in names)]


def _of_rows(
    target: Target, gone: dict[str, set[str]], most: int, few: dict[str, int]
) -> Iterator[Race]:
    for op, names in gone.items():
        for row in read_rows(default_table(op, target), op).values():
            if row["backend"] == "hip" and row["kernel"] in names:
                problem = _problem(op, row)
                kernel = find_kernel(op, target.arch, "hip", row["kernel"])
                config = parse_config(row["config"])
                now = candidate_of(kernel, target.arch, config)
                yield _race("row", op, target, problem, now, gone, most, few)


def _of_shapes(
    target: Target, path: Path, gone: dict[str, set[str]], most: int, few: dict[str, int]
) -> Iterator[Race]:
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            op = row["op"]
            problem = _problem(op, row)
            config: Config
            if row.get("kernel"):
                kernel = find_kernel(op, target.arch, "hip", row["kernel"])
                config = parse_config(row["config"])
            else:
                chosen = route(op, target, problem)
                kernel = find_kernel(op, target.arch, chosen.backend, chosen.kernel)
                config = chosen.config
            now, why = candidate_of(kernel, target.arch, config), row.get("why", "shape")
            if row.get("other"):
                other = find_kernel(op, target.arch, "hip", row["other"])
                against = candidate_of(other, target.arch, parse_config(row["other_config"]))
                yield Race(why, op, problem, now, (against,))
            else:
                without = {op: {*gone.get(op, ()), now.kernel}}
                yield _race(why, op, target, problem, now, without, most, few)


def _problem(op: str, row: dict[str, str]) -> Problem:
    of_type = problem_type(op)
    given = {name: row[name] for name in of_type.__annotations__ if row.get(name)}
    return of_type(**{name: field_value(of_type, name, text) for name, text in given.items()})


def _race(
    why: str,
    op: str,
    target: Target,
    problem: Problem,
    now: Candidate,
    gone: dict[str, set[str]],
    most: int,
    few: dict[str, int],
) -> Race:
    others: list[Candidate] = []
    for kernel in in_line(op, target, problem):
        if kernel.backend == "hip" and kernel.name not in gone.get(op, ()):
            of_it = few.get(kernel.name, most)
            if of_it and kernel.is_for(target.arch):
                others += candidates_of(op, target, problem, ("hip",), of_it, (), (kernel.name,))
    return Race(why, op, problem, now, tuple(c for c in dict.fromkeys(others) if c != now))


def _run(
    target: Target,
    ahead: Ahead,
    races: Sequence[Race],
    save: Path | None,
    timings: Path | None,
    ends_at: float,
) -> None:
    import torch

    device = torch.device("cuda", 0)
    rows: list[dict[str, object]] = []
    kept = _rows_of(save)
    every: list[dict[str, object]] = []
    for place, each in enumerate(races):
        if time.monotonic() >= ends_at:
            print(f"{len(races) - place} races are left")
            break
        ahead.wait(each.problem, (each.now, *each.others))
        torch.manual_seed(0)
        with measured_meter(each.op, target, device, 1).bench(each.problem) as bench:
            outcome = race(bench, each.others, each.now, Rules())
        rows.append(_row(each, outcome))
        shape = rows[-1]["shape"]
        every += [
            {"op": each.op, "shape": shape, "candidate": t.candidate, "us": f"{t.us:.3f}"}
            for t in outcome.timings
        ]
        every += [
            {"op": each.op, "shape": shape, "candidate": f.candidate, "why": f.why}
            for f in outcome.failures
        ]
        print(*rows[-1].values(), flush=True)
        last = place + 1 == len(races)
        if save and (place % 8 == 0 or last):
            write_text(save, _text(_joined(kept, rows), (*_COLUMNS, *_ORIGIN)))
        if timings and (place % 8 == 0 or last):
            write_text(timings, _text(every, ("op", "shape", "candidate", "us", "why")))
    for path, found, columns in (
        (save, _joined(kept, rows), (*_COLUMNS, *_ORIGIN)),
        (timings, every, ("op", "shape", "candidate", "us", "why")),
    ):
        if path:
            write_text(path, _text(found, columns))


def _rows_of(path: Path | None) -> list[dict[str, object]]:
    if path is None or not path.is_file():
        return []
    with path.open(newline="") as file:
        return [dict(row) for row in csv.DictReader(file)]


def _joined(
    kept: Sequence[dict[str, object]], rows: Sequence[dict[str, object]]
) -> list[dict[str, object]]:
    """What a file has but for races that were run again, then these."""

    def race_of(row: dict[str, object]) -> tuple[object, ...]:
        return tuple(row[name] for name in ("why", "op", "shape"))

    again = {race_of(row) for row in rows}
    return [*(row for row in kept if race_of(row) not in again), *rows]


def _row(each: Race, outcome: Outcome) -> dict[str, object]:
    import torch

    shape = " ".join(f"{name}={getattr(each.problem, name)}" for name in key_columns(each.op))
    now = next((t for t in outcome.timings if t.candidate == each.now), None)
    other = next((t for t in outcome.timings if t.candidate != each.now), None)
    return {
        "why": each.why,
        "op": each.op,
        "shape": shape,
        **_told(each.now, now, ("kernel", "config", "us")),
        **_told(other.candidate if other else None, other, ("other", "other_config", "other_us")),
        "ratio": f"{other.us / now.us:.4f}" if now and other else "",
        "failures": len(outcome.failures),
        "gpu": torch.cuda.get_device_name(),
        "versions": versions(),
        "commit": commit(),
    }


def _told(
    candidate: Candidate | None, timing: Timing | None, names: tuple[str, str, str]
) -> dict[str, str]:
    kernel, config, us = names
    if candidate is None:
        return dict.fromkeys(names, "")
    values = " ".join(f"{name}={value}" for name, value in candidate.values)
    return {kernel: candidate.kernel, config: values, us: f"{timing.us:.3f}" if timing else ""}


def _text(rows: Sequence[dict[str, object]], columns: Sequence[str]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


if __name__ == "__main__":
    main()
