"""What ``aiter-mx isa --run`` prints: a simulated launch beside the limits of an MI355X."""

from __future__ import annotations

from rich.console import Console

from aiter_mx.cli.screen import format_bytes, heading, make_table, print_fields
from aiter_mx.kernels.spec import Config, KernelSpec, Problem
from aiter_mx.sim.program import SimOptions
from aiter_mx.sim.report import LaunchReport
from aiter_mx.sim.roofline import CUS, MEMORY_BYTES_A_US, PASS_CYCLES
from aiter_mx.trial import Trial, try_out


def print_trial(console: Console, spec: KernelSpec, problem: Problem, config: Config) -> None:
    """Simulate a gfx950 kernel once and print what it did and the bounds on its time."""
    trial = try_out(spec, problem, config, SimOptions(count_unique=True, count_conflicts=True))
    heading(console, "One launch, simulated on random operands")
    print_fields(console, _counters(trial))
    heading(console, "Instructions, as they run")
    table = make_table("class", "count", "share", numbers=("count", "share"))
    report = trial.report
    for name, count in sorted(report.by_class.items(), key=lambda item: -item[1]):
        table.add_row(name, f"{count}", f"{count / report.instructions:.0%}")
    table.add_row("all", str(report.instructions), "")
    console.print(table)
    heading(console, f"At best on an MI355X ({CUS} CUs), for its busiest CU")
    table = make_table("limit", "us", "of the longest", numbers=("us", "of the longest"))
    limits = _limits(trial)
    longest = max(limits.values())
    for name, us in limits.items():
        table.add_row(name, f"{us:.3f}", f"{us / longest:.0%}")
    console.print(table)


def _counters(trial: Trial) -> dict[str, object]:
    report, least = trial.report, trial.minimal_bytes
    moved = (report.unique_bytes_read or 0) + (report.unique_bytes_written or 0)
    every = report.bytes_read + report.scalar_bytes_read + report.bytes_written
    passes = ", ".join(f"{count} {name}" for name, count in report.mfma_passes.items())
    cycles = sum(report.mfma_passes.values()) * PASS_CYCLES
    return {
        "waves": report.waves,
        "operands and results": format_bytes(least),
        "distinct bytes": _traffic(moved, least, report.unique_bytes_read),
        "all bytes": _traffic(every, least, report.bytes_read + report.scalar_bytes_read),
        "LDS": f"{format_bytes(report.lds_bytes_read)} read, "
        f"{format_bytes(report.lds_bytes_written)} written, {_conflicts(report)}",
        "address units": f"{report.address_cycles} cycles",
        "scratch": format_bytes(report.scratch_bytes),
        "MFMA passes": f"{passes} ({cycles} cycles)" if passes else "none",
        "under way at a wait": f"{format_bytes(int(trial.bounds.wave_bytes))} a wave, "
        f"{format_bytes(int(trial.bounds.cu_bytes))} a CU, over {report.waits} waits",
    }


def _traffic(moved: int, least: int, read: int | None) -> str:
    times = f"{moved / least:.2f} times those"
    return f"{format_bytes(moved)}, {times}; {format_bytes(read or 0)} of it read"


def _conflicts(report: LaunchReport) -> str:
    accesses = report.by_class.get("lds", 0)
    each = f", {report.lds_conflicts / accesses:.2f} an instruction" if accesses else ""
    return f"{report.lds_conflicts} bank conflicts{each}"


def _limits(trial: Trial) -> dict[str, float]:
    bounds = trial.bounds
    return {
        "operands and results at 8 TB/s, all CUs alike": trial.minimal_bytes / MEMORY_BYTES_A_US,
        "the same, work divided as the grid is": bounds.memory_us,
        "latency: waits in a row, 1 us each": bounds.latency_us,
        "vector instructions": bounds.valu_us,
        "matrix instructions": bounds.mfma_us,
        "LDS, conflicts included": bounds.lds_us,
        "address units": bounds.address_us,
    }
