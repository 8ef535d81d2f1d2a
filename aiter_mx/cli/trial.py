"""What ``aiter-mx isa --run`` prints: a simulated launch, and the modelled time of an MI355X."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from aiter_mx.cli.screen import format_bytes, heading, make_table, print_fields
from aiter_mx.cli.source_lines import SourceLine, source_lines
from aiter_mx.cli.timeline import draw_timeline
from aiter_mx.errors import ToolchainError
from aiter_mx.kernels.spec import Config, KernelSpec, Problem
from aiter_mx.sim.matrix import PASS_CYCLES
from aiter_mx.sim.program import SimOptions
from aiter_mx.sim.report import LaunchReport
from aiter_mx.sim.timing.constants import median_error, shipped, spread
from aiter_mx.sim.timing.model import timeline
from aiter_mx.sim.timing.report import MEANINGS, longest_waits
from aiter_mx.sim.timing.seen import outside
from aiter_mx.trial import Trial, prepare, tried

_OPTIONS = SimOptions(count_unique=True, count_conflicts=True, trace=True, schedule="round-robin")
_WAITS = 3


def print_trial(
    console: Console, spec: KernelSpec, problem: Problem, config: Config, plot: Path | None = None
) -> None:
    """Simulate a gfx950 kernel once and print what it did and how long that would take.

    Args:
        console: where to print.
        spec: the kernel.
        problem: the shape and dtypes.
        config: the kernel's compile-time parameters.
        plot: a file for a picture of a compute unit's timeline.
    """
    launch = prepare(spec, problem, config, with_lines=True)
    trial = tried(launch, _OPTIONS)
    heading(console, "One launch, simulated on random operands")
    print_fields(console, _counters(trial))
    heading(console, "Instructions, as they run")
    table = make_table("class", "count", "share", numbers=("count", "share"))
    report = trial.report
    for name, count in sorted(report.by_class.items(), key=lambda item: -item[1]):
        table.add_row(name, f"{count}", f"{count / report.instructions:.0%}")
    table.add_row("all", str(report.instructions), "")
    console.print(table)
    assert trial.trace is not None  # the options ask for it
    model = launch.traced(replace(report, trace=trial.trace))
    _print_time(console, trial)
    _print_waits(console, trial)
    if beyond := outside(model):
        heading(console, "An extrapolation: no launch of the calibration is like this one")
        for text in beyond:
            console.print(text, soft_wrap=True)
    if plot is not None:
        shown = " ".join(f"{name}={value}" for name, value in vars(problem).items())
        title = f"{spec.op}/{spec.name}, {shown.partition(' out_dtype')[0]}: busiest compute unit"
        draw_timeline(plot, timeline(model), shipped().clock_ghz * 1e3, title)
        console.print(f"\n{plot}", soft_wrap=True)


def _print_time(console: Console, trial: Trial) -> None:
    prediction, sums = trial.prediction, trial.floor
    assert prediction is not None and sums is not None
    us, (below, above) = prediction.us, spread()
    heading(
        console,
        f"Modelled on an MI355X: {us:.1f} us, likely {us * below:.1f} to {us * above:.1f}",
    )
    console.print(
        f"median error {median_error():.1%}; by sums alone {sums.us:.1f} us: launch "
        f"{sums.launch:.1f}, waits {sums.waits:.1f}, units {sums.busy:.1f}, for longest "
        f"{sums.busiest}",
        soft_wrap=True,
    )
    table = make_table("waves of the busiest unit spend on", "us", "share", numbers=("us", "share"))
    for name, part in sorted(prediction.parts.items(), key=lambda item: -item[1]):
        table.add_row(MEANINGS[name], f"{part:.2f}", f"{part / us:.0%}")
    console.print(table)
    table = make_table("unit", "busy", numbers=("busy",))
    for name, share in prediction.busy.items():
        table.add_row(name, f"{share:.0%}")
    console.print(table)


def _print_waits(console: Console, trial: Trial) -> None:
    """The instructions that waves wait at for longest, and the source lines they come from."""
    assert trial.prediction is not None and trial.trace is not None
    waits = longest_waits(trial.prediction, trial.trace.texts, _WAITS)
    addresses = [trial.trace.addresses[wait.number] for wait in waits]
    lines: Sequence[SourceLine | None] = [None] * len(waits)
    try:
        lines = source_lines(trial.launch.image, addresses)
    except ToolchainError as error:
        console.print(f"without source lines: {error}", soft_wrap=True)
    table = make_table("waits longest at", "us", "share", "line", numbers=("us", "share"))
    for wait, line in zip(waits, lines, strict=True):
        place = "" if line is None else f"{line}: {line.text}"
        table.add_row(wait.text, f"{wait.us:.2f}", f"{wait.share:.0%}", place)
    console.print(table)


def _counters(trial: Trial) -> dict[str, object]:
    report, least = trial.report, trial.minimal_bytes
    rate = shipped().memory_tb_s
    moved = (report.unique_bytes_read or 0) + (report.unique_bytes_written or 0)
    every = report.bytes_read + report.scalar_bytes_read + report.bytes_written
    passes = ", ".join(f"{count} {name}" for name, count in report.mfma_passes.items())
    cycles = sum(report.mfma_passes.values()) * PASS_CYCLES
    return {
        "waves": report.waves,
        "operands and results": format_bytes(least),
        "at the rate of memory": f"{least / rate / 1e6:.3f} us at {rate:.1f} TB/s",
        "distinct bytes": _traffic(moved, least, report.unique_bytes_read),
        "all bytes": _traffic(every, least, report.bytes_read + report.scalar_bytes_read),
        "LDS": f"{format_bytes(report.lds_bytes_read)} read, "
        f"{format_bytes(report.lds_bytes_written)} written, {_conflicts(report)}",
        "address units": f"{report.address_cycles} cycles",
        "scratch": format_bytes(report.scratch_bytes),
        "MFMA passes": f"{passes} ({cycles} cycles)" if passes else "none",
        "under way at a wait": f"{format_bytes(int(trial.wave_bytes))} a wave, "
        f"{format_bytes(int(trial.cu_bytes))} a CU, over {report.waits} waits",
    }


def _traffic(moved: int, least: int, read: int | None) -> str:
    times = f"{moved / least:.2f} times those"
    return f"{format_bytes(moved)}, {times}; {format_bytes(read or 0)} of it read"


def _conflicts(report: LaunchReport) -> str:
    accesses = report.by_class.get("lds", 0)
    each = f", {report.lds_conflicts / accesses:.2f} an instruction" if accesses else ""
    return f"{report.lds_conflicts} bank conflicts{each}"
