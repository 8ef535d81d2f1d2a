"""``aiter-mx tune``: finds the fastest kernel for each shape and writes the table."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from aiter_mx.cli.explain import describe_config
from aiter_mx.cli.fields import Axis, parse_axis, parse_fields, problems
from aiter_mx.cli.screen import make_console, make_progress

if TYPE_CHECKING:
    from aiter_mx.kernels.spec import Problem
    from aiter_mx.target import Target
    from aiter_mx.tuning.builds import OnBuilt
    from aiter_mx.tuning.journal import Record
    from aiter_mx.tuning.meter import Meter
    from aiter_mx.tuning.race import Rules
    from aiter_mx.tuning.share import Share
    from aiter_mx.tuning.sweep import Plan


def tune(
    context: typer.Context,
    op: Annotated[str, typer.Argument(help="Name of the op, such as linear.")],
    shapes: Annotated[
        Path | None, typer.Option(help="CSV of shapes; its columns are the op's fields.")
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="A known model's shapes; may be repeated.")
    ] = None,
    tp: Annotated[str, typer.Option(help="Numbers of GPUs that share a model.")] = "1,2,4,8",
    untuned: Annotated[
        Path | None, typer.Option(help="CSV that AITER_MX_LOG_UNTUNED collected.")
    ] = None,
    arch: Annotated[
        str | None, typer.Option(help="gfx950 without such a GPU: by a model, not measured.")
    ] = None,
    table: Annotated[Path | None, typer.Option(help="By default configs/<arch>/<op>.csv.")] = None,
    most: Annotated[int | None, typer.Option(help="Candidates of each kernel.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Times that each finalist is timed.")] = None,
    kernel: Annotated[
        list[str] | None,
        typer.Option(help="Of its backend only this one, beside the table's own; may be repeated."),
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Compilers at a time.")] = None,
    budget: Annotated[
        float | None, typer.Option(help="Seconds, after which no race begins; go on later.")
    ] = None,
    timings: Annotated[
        Path | None, typer.Option(help="CSV for the time of every candidate.")
    ] = None,
    stale: Annotated[
        bool, typer.Option(help="Only shapes without a row, or whose kernel's code has changed.")
    ] = False,
    fresh: Annotated[bool, typer.Option(help="Discard what a killed sweep had found.")] = False,
    build_only: Annotated[bool, typer.Option(help="Compile the candidates, and end.")] = False,
) -> None:
    """Race every candidate for each shape; write the tuned table.

    Candidates are timed on this machine's GPU, or with --arch gfx950 by a model. Shapes come from
    --shapes, --model, --untuned or the op's fields (--M 1,4 --N 2304 --K 6144); fields beside
    one of the others take the place of its own (--model qwen3-8b --M 128,256). A sweep that was
    killed, or whose --budget ended, goes on where it was when the same command is given again;
    with a budget the shapes are raced in the order given. Under torchrun they are shared out:
    torchrun --nproc-per-node=8 -m aiter_mx.cli tune linear --model ...
    """
    from aiter_mx.tuning import sweep
    from aiter_mx.tuning.candidates import ContextLost
    from aiter_mx.tuning.check import stale_of
    from aiter_mx.tuning.share import join
    from aiter_mx.tuning.table import write_text

    share = join()
    console = make_console()
    progress = make_progress()
    compiling = progress.add_task("compiling", total=0)

    def on_built(done: int, of: int) -> None:
        progress.update(compiling, completed=done, total=of)

    target, meter = the_meter(op, arch, share, jobs, on_built if build_only else None)
    rules = replace(the_rules(most, rounds, meter.rules), only=_names(op, target, kernel or []))
    wanted = _wanted(op, target, shapes, untuned, model or [], _counts(tp), context.args)
    path = table or default_table(op, target)
    if path.is_dir():
        raise ValueError(f"--table must be a file, got the folder {str(path)!r}")
    for option, file in (("--table", path), ("--timings", timings)):
        if file is not None and file.exists() and not file.is_file():
            raise ValueError(f"{option} must be a regular file, which {str(file)!r} is not")
    if stale:
        asked, wanted = len(wanted), stale_of(path, op, wanted)
        console.print(f"{len(wanted)} of {asked} shapes are stale")
        if not wanted:
            return
    plan = sweep.make_plan(op, target, wanted, path, meter.source, rules)
    if build_only:
        with progress:
            _build(plan, meter, share)
        console.print(f"{progress.tasks[0].total:.0f} kernel variants were compiled")
        return
    if (fresh or stale) and share.local_rank == 0:
        sweep.discard(plan)
    share.meet("fresh")
    started = time.monotonic()
    try:
        records = sweep.run(plan, meter, share, lambda *raced: _print_race(console, *raced), budget)
    except ContextLost as error:
        console.print(f"lost the GPU to {error.args[1]}: {error.args[0]}; starting anew")
        if share.workers > 1:
            sys.exit(1)  # torchrun --max-restarts starts all workers again
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, "-m", "aiter_mx.cli", *sys.argv[1:]])
    if share.rank != 0:
        return
    if timings is not None:
        write_text(timings, sweep.timings_text(records))
    right = sum(record["row"] is not None for record in records)
    failed = sum(len(record["failures"]) for record in records)
    seconds = time.monotonic() - started
    unraced = len(plan.problems) - len(records)
    how = "modelled" if meter.source == "model" else meter.source
    console.print(
        f"{right} rows {how} in {seconds:.1f} s by {share.workers} workers, "
        f"{failed} candidates failed; {path}",
        soft_wrap=True,
    )
    if unraced:
        console.print(f"{unraced} shapes are left: the same command goes on with them")


def _wanted(
    op: str,
    target: Target,
    shapes: Path | None,
    untuned: Path | None,
    models: list[str],
    gpus: list[int],
    arguments: list[str],
) -> list[Problem]:
    """The problems that a command line asks for; raises ValueError where it asks for none."""
    from aiter_mx.tuning.shapes import model_shapes, read_shapes

    wanted: list[Problem] = []
    if shapes is not None:
        wanted += read_shapes(shapes, op)
    if untuned is not None:
        wanted += read_shapes(untuned, op, target)
    wanted += model_shapes(models, op, gpus, target.arch)
    if arguments:
        fields = parse_fields(arguments)
        wanted = with_fields(op, wanted, fields) if wanted else problems(op, fields)
    if not wanted:
        raise ValueError("no shapes: give --shapes, --model, --untuned, or fields such as --M 1")
    for problem in wanted:
        if getattr(problem, "is_empty", False):
            told = describe_config(vars(problem))
            raise ValueError(f"the result of {told} is empty, so there is nothing to time")
    return wanted


def _build(plan: Plan, meter: Meter, share: Share) -> None:
    """Compile the candidates of this worker's part of a sweep, and what the table names so far."""
    from aiter_mx.tuning.candidates import candidates_of
    from aiter_mx.tuning.sweep import name_of, parts_of
    from aiter_mx.tuning.table import incumbent_of, read_rows

    op, target, rules = plan.op, plan.target, plan.rules
    before = read_rows(plan.table, op)
    mine = set(parts_of(plan, plan.problems, share.workers)[share.rank])
    wanted = {}
    with meter.ahead() as ahead:
        for problem in (p for p in plan.problems if name_of(op, p) in mine):
            wanted[problem] = candidates_of(
                *(op, target, problem, meter.backends, rules.most, rules.of_next, rules.only)
            )
            incumbent = incumbent_of(before, op, target, problem, plan.source)
            wanted[problem] += [] if incumbent is None else [incumbent]
            ahead.add(problem, wanted[problem])
        for problem, candidates in wanted.items():
            ahead.wait(problem, candidates)


def _counts(tp: str) -> list[int]:
    counts = [count for count in parse_axis(tp) if isinstance(count, int)]
    if not counts or min(counts) < 1:
        raise ValueError(f"--tp takes numbers of GPUs, as in 1,2,4,8, got {tp!r}")
    return counts


def _names(op: str, target: Target, names: list[str]) -> tuple[str, ...]:
    """Names of kernels, as they are given.

    Raises:
        ValueError: none of the op's kernels on this architecture has such a name.
    """
    from aiter_mx.kernels.registry import kernels_of

    known = {kernel.name for kernel in kernels_of(op) if kernel.is_for(target.arch)}
    for name in names:
        if name not in known:
            raise ValueError(f"{op} has no kernel {name!r} on {target.arch}: {sorted(known)}")
    return tuple(names)


def with_fields(op: str, shapes: list[Problem], fields: dict[str, Axis]) -> list[Problem]:
    """Shapes with some of their fields replaced, by each combination of the values given.

    Raises:
        ValueError: an unknown field, or a value that it cannot have.
    """
    changed = [problems(op, {**_axes(shape), **fields}) for shape in shapes]
    return list(dict.fromkeys(problem for found in changed for problem in found))


def _axes(shape: Problem) -> dict[str, Axis]:
    return {name: [value] for name, value in vars(shape).items()}


def _print_race(console: Console, record: Record, done: int, of: int, seconds_left: float) -> None:
    chosen = record["chosen"] or "nothing computes it"
    row = record["row"] or {}
    backends = [f"{name[:-3]} {us}" for name, us in row.items() if name.endswith("_us")]
    others = f" ({', '.join(backends)})" if backends else ""
    times = f": {row['us']} us{others}" if row else ""
    wrong = [f for f in record["failures"] if f["why"].startswith("wrong")]
    failed = f"; {len(record['failures'])} failed" if record["failures"] else ""
    if wrong:
        failed += f", {len(wrong)} of them wrong, as {wrong[0]['candidate']}"
    console.print(
        f"[{done}/{of}, {_duration(seconds_left)} left] {record['problem']}: {chosen}"
        f"{times}{failed}",
        soft_wrap=True,
    )


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes} min {seconds:02} s" if minutes else f"{seconds} s"


def the_rules(most: int | None, rounds: int | None, usual: Rules) -> Rules:
    """The usual rules of a race, with what was asked for."""
    for name, value in (("most", most), ("rounds", rounds)):
        if value is not None and value < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}")
    return replace(usual, most=most or usual.most, final_rounds=rounds or usual.final_rounds)


def the_meter(
    op: str,
    arch: str | None,
    share: Share,
    jobs: int | None,
    on_built: OnBuilt | None = None,
) -> tuple[Target, Meter]:
    """What is tuned for, and how: measured on this worker's GPU, else modelled for gfx950.

    Args:
        op: the op.
        arch: the architecture; None for that of the GPU here.
        share: this worker's part of the work.
        jobs: compilers at a time; None for one on each core.
        on_built: called as builds end, where only compilers are wanted, which need no GPU.

    Raises:
        ValueError: neither is possible.
    """
    import torch

    from aiter_mx.target import SIMULATED_ARCHS, gpu_target, hardware
    from aiter_mx.tuning.measured import default_jobs, measured_meter

    here = None
    if torch.cuda.is_available():
        index = share.local_rank % torch.cuda.device_count()
        torch.cuda.set_device(index)
        here = gpu_target(index)
    if arch is None and here is None:
        raise ValueError("no GPU here: --arch gfx950 writes a table by a model instead")
    if here is not None and arch in (None, here.arch):
        target = here
    else:
        assert arch is not None
        target = hardware(arch)
        if arch in SIMULATED_ARCHS and on_built is None:
            from aiter_mx.tuning.modelled import modelled_meter

            return target, modelled_meter(op, jobs or default_jobs())
        if on_built is None:
            raise ValueError(
                f"times for {arch} need such a GPU; here is {here.name if here else 'none'}"
            )
    device = torch.device("cuda", torch.cuda.current_device() if here else 0)
    return target, measured_meter(op, target, device, jobs or default_jobs(), on_built)


def default_table(op: str, target: Target) -> Path:
    """The shipped table, in a checkout.

    Raises:
        ValueError: the package is installed, and its files are not to be rewritten.
    """
    from aiter_mx import paths

    folder = paths.configs_dir()
    if folder.is_relative_to(Path(paths.__file__).parent):
        raise ValueError("say with --table where to write; AITER_MX_CONFIG can name the file then")
    return folder / target.arch / f"{op}.csv"
