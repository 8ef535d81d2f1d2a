"""``aiter-mx tables``: checks tuned tables, compares two, draws them, measures one again."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aiter_mx.cli.screen import make_console, make_progress, make_table

if TYPE_CHECKING:
    from aiter_mx.jit.build import BuildRequest
    from aiter_mx.tuning.verify import Check

app = typer.Typer(help="Check, compare, draw or re-measure tuned tables.", no_args_is_help=True)
Files = Annotated[
    list[Path] | None, typer.Argument(help="Tables; by default all that dispatch would read.")
]


@app.command()
def check(
    files: Files = None,
    build: Annotated[bool, typer.Option("--build", help="Also compile every variant.")] = False,
    record: Annotated[
        bool, typer.Option(help="Write into configs/digests.json that these tables are proven.")
    ] = False,
    jobs: Annotated[int | None, typer.Option(min=1, help="Compilers at a time.")] = None,
) -> None:
    """Check every row against the kernels there are.

    With --build what the rows name is compiled. A shipped table that configs/digests.json does not
    know as it stands is an error: dispatch would check it in every process. --record writes it
    there, and drops runs that no row of its folder's tables names any more.

    Variants for an architecture without a compiler here are not compiled, which is said. Rows that
    were tuned with other sources than those here are counted, and with --build those of them whose
    kernel has become another: their times may no longer hold, but they are no errors.
    """
    from aiter_mx.errors import AiterMxError
    from aiter_mx.jit.build import is_cached
    from aiter_mx.tuning.builds import build_each
    from aiter_mx.tuning.check import CheckedTable, age_of, check_table
    from aiter_mx.tuning.digests import is_unrecorded, record_digest
    from aiter_mx.tuning.table import drop_unnamed_runs

    console = make_console()
    wrong: list[str] = []
    requests: dict[BuildRequest, str] = {}
    checked: list[CheckedTable] = []
    for path in files or _every_table():
        try:
            with make_progress() as progress:
                task = progress.add_task(f"checking {path.name}", total=None)
                table = check_table(path, partial(progress.advance, task))
        except (AiterMxError, ValueError) as error:
            wrong.append(str(error))
            continue
        checked.append(table)
        if record:
            record_digest(path)
            drop_unnamed_runs(path.parent)
        elif is_unrecorded(path):
            wrong.append(f"{path} is not what digests.json has: aiter-mx tables check --record")
        requests.update(table.requests)
        console.print(
            f"{path}: {table.rows} rows, {len(table.requests)} kernel variants", soft_wrap=True
        )
    if not build:
        if checked:
            console.print(f"{len(requests)} kernel variants in all, which --build compiles")
    else:
        wanted = [r for r in requests if _has_compiler(r.arch)]
        missing = sum(not is_cached(r) for r in wanted)
        console.print(f"{missing} of {len(wanted)} kernel variants are to be compiled")
        with make_progress() as progress:
            task = progress.add_task("compiling", total=len(wanted))
            for request, failure in build_each(wanted, jobs):
                progress.advance(task)
                if failure:
                    wrong.append(f"{requests[request]}: {failure}")
        skipped = sorted({r.arch for r in requests} - {r.arch for r in wanted})
        note = f"; there is no compiler for {', '.join(skipped)}" if skipped else ""
        if not wrong:
            console.print(f"{len(wanted)} variants compile{note}")
    compared = build and not wrong
    for table in checked:
        for line in age_of(table, _has_compiler if compared else lambda arch: False):
            console.print(line, soft_wrap=True)
    for message in wrong:
        print(f"error: {message}", file=sys.stderr)
    sys.exit(bool(wrong))


@app.command()
def diff(
    before: Annotated[Path, typer.Argument(help="A table.")],
    after: Annotated[Path, typer.Argument(help="Another, of the same op.")],
    all_rows: Annotated[bool, typer.Option("--all", help="Also rows whose choice stays.")] = False,
) -> None:
    """Show which rows two tables choose differently."""
    from aiter_mx.tuning.compare import KINDS, compare_tables

    console = make_console()
    changes = compare_tables(before, after)
    table = make_table("shape", "before", "us", "after", "us ", "change", numbers=("us", "us "))
    columns = ["choice_before", "us_before", "choice_after", "us_after", "change"]
    shown = changes if all_rows else changes[changes.kind != "same"]
    for shape, *cells in shown[columns].itertuples(name=None):
        texts = (f"{cell:.3f}" if isinstance(cell, float) else cell for cell in cells)
        table.add_row(shape, *("" if text == "nan" else text for text in texts))
    if table.row_count:
        console.print(table)
    console.print(", ".join(f"{(changes.kind == kind).sum()} {kind}" for kind in KINDS))


@app.command()
def convert(
    files: Annotated[list[Path], typer.Argument(help="Tables of an older layout.")],
) -> None:
    """Rewrite tables of an older layout.

    Those that name kernels as they were called before are rewritten too. Rows of kernels that are
    gone are dropped, which is said: aiter-mx tune finds what takes their place.
    """
    from aiter_mx.tuning.convert import convert as converted

    console = make_console()
    for path in files:
        done = converted(path)
        gone = ", ".join(f"{name} ({count})" for name, count in done.dropped.items())
        console.print(
            f"{path}: {done.rows} rows"
            + (f"; dropped those of kernels that are gone: {gone}" if gone else "")
            + (f"; {done.doubled} were for a shape that has a faster row" if done.doubled else ""),
            soft_wrap=True,
        )


@app.command()
def report(
    files: Files = None,
    out: Annotated[Path, typer.Option(help="Folder for the pictures.")] = Path(),
) -> None:
    """Draw which kernel wins where, a picture a table."""
    from aiter_mx.tuning.picture import draw

    console = make_console()
    for path in files or _every_table():
        picture = draw(path, out)
        console.print(f"{picture}" if picture else f"{path}: no rows", soft_wrap=True)


@app.command()
def verify(
    op: Annotated[str, typer.Argument(help="Name of the op, such as linear.")],
    table: Annotated[Path | None, typer.Option(help="By default configs/<arch>/<op>.csv.")] = None,
    save: Annotated[Path | None, typer.Option(help="CSV for what was measured.")] = None,
    sample: Annotated[
        int | None, typer.Option(help="Rows to measure, spread over the table; by default all.")
    ] = None,
    limit: Annotated[float, typer.Option(help="Percent that a row may be slower.")] = 3.0,
    most: Annotated[int, typer.Option(help="Candidates of each kernel.")] = 1000,
    rounds: Annotated[int, typer.Option(help="Times that each finalist is timed.")] = 11,
    jobs: Annotated[int | None, typer.Option(min=1, help="Compilers at a time.")] = None,
) -> None:
    """Time each row's choice again beside all candidates.

    The status is 1 where a choice is slower than the best by more than --limit.
    """
    import pandas as pd
    import torch

    from aiter_mx.cli.tune import default_table, the_meter, the_rules
    from aiter_mx.kernels.registry import ops
    from aiter_mx.tuning.origin import commit, today
    from aiter_mx.tuning.share import Alone
    from aiter_mx.tuning.table import write_csv
    from aiter_mx.tuning.verify import check_cells, named_by, verify

    console = make_console()
    if op not in ops():
        raise ValueError(f"unknown op {op!r}; there are {', '.join(ops())}")
    if not torch.cuda.is_available():
        raise ValueError("tables are verified by measuring, and there is no GPU here")
    target, meter = the_meter(op, None, Alone(), jobs)
    rows = named_by(table or default_table(op, target), op, target)
    if sample is not None:
        rows = rows[:: max(1, len(rows) // max(sample, 1))]

    origin = {"gpu": target.name, "commit": commit(), "date": today()}
    lines: list[dict[str, object]] = []

    def on_check(one: Check) -> None:
        cells = check_cells(op, one)
        console.print(" ".join(f"{name}={value}" for name, value in cells.items()), soft_wrap=True)
        lines.append({**cells, **origin})
        if save is not None:  # what a kill leaves is whole
            write_csv(save, pd.DataFrame(lines))

    checks = verify(rows, op, target, meter, the_rules(most, rounds, meter.rules), on_check)
    slow = [one for one in checks if one.slower > limit / 100]
    worst = max((one.slower for one in checks), default=0.0)
    console.print(
        f"{len(checks)} rows measured again: {len(slow)} more than {limit:g} % slower than the "
        f"best candidate, the worst {worst:.1%}"
    )
    sys.exit(bool(slow))


def _every_table() -> list[Path]:
    from aiter_mx.dispatch.tables import table_files
    from aiter_mx.kernels.registry import ops
    from aiter_mx.target import ARCHS

    return list(dict.fromkeys(p for arch in ARCHS for op in ops() for p in table_files(arch, op)))


def _has_compiler(arch: str) -> bool:
    from aiter_mx.errors import ToolchainError
    from aiter_mx.jit.toolchain import find_toolchain

    try:
        find_toolchain(arch)
    except ToolchainError:
        return False
    return True
