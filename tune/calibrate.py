"""Calibrates the model of time for gfx950 against published times of an MI355X.

    python -m tune.calibrate draw --published FOLDER        # which rows fit and which test, by seed
    python -m tune.calibrate trace --published FOLDER --aiter CHECKOUT --work FOLDER
    python -m tune.calibrate fit [--steps 16]               # from the saved traces alone
    python -m tune.calibrate predict                        # likewise, by the constants there are
    python -m tune.calibrate seen                           # likewise: what the launches are like
    python -m tune.calibrate errors                         # from the saved predictions
    python -m tune.calibrate picture                        # likewise

``draw`` writes manifest.csv, before anything is fitted. ``trace`` runs each row's public kernels in
the simulator, those of AMD's repository as they are and FlyDSL's compiled by its wheel, and saves
what they do (traces.xz) and each row's state (traced.csv). ``fit`` fits the constants of
configs/gfx950/timing.json, once with all families and once without each, and writes
predictions.csv, errors.csv and bars.csv. It keeps the present constants where the new ones are
worse without a family. ``predict`` brings what these predict up to date with the model; constants
without a family are not kept, so that what they predicted stays.
``seen`` writes configs/gfx950/timing_seen.json, by which extrapolations are told, and ``picture``
draws predicted.png.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from aiter_mx.paths import configs_dir
from aiter_mx.sim.timing.constants import Constants, described, shipped, with_values
from aiter_mx.sim.timing.fit import (
    Observation,
    at_the_edge,
    fit,
    fitted_names,
    middle_of_ranges,
    modelled_us,
)
from aiter_mx.sim.timing.floor import floor
from aiter_mx.sim.timing.seen import ranges, seen_path
from tune.published.picture import draw
from tune.published.rows import STRATA, Row, drawn, published, read, write

FOLDER = Path(__file__).parents[1] / "docs" / "measured" / "mi355x_published"
_MANIFEST, _TRACES, _STATES = "manifest.csv", "traces.xz", "traced.csv"
_PREDICTIONS = "predictions.csv"
_LABELS = ("M <= 16", "M 17 to 64", "M 65 to 256", "M > 256", "all")
_FEW = 64  # rows, within which ranks are compared
_HBM_TB_S, _FLOOR_US = 6.3, 2.6  # of the baseline that knows bytes alone


def trace(options: argparse.Namespace) -> None:
    """Run the rows' kernels and save what they do."""
    from tune.published.collect import collect
    from tune.published.saved import save

    rows = read(FOLDER / _MANIFEST)
    if options.family:
        for row, found in collect([row for row in rows if row.family == options.family],
                                  options.published, options.aiter, options.work):  # fmt: skip
            state = found if isinstance(found, str) else "traced"
            print(f"{row.family} {row.M} {row.N} {row.K}: {state}", flush=True)
        return
    states, samples = [], []
    for row, found in collect(rows, options.published, options.aiter, options.work):
        if isinstance(found, str):
            states.append((row, found))
            continue
        states.append((row, "traced"))
        samples.append((row, found))
        print(f"{len(states)} of {len(rows)}: {row.family} {row.M} {row.N} {row.K}", flush=True)
    save(FOLDER / _TRACES, samples)
    with (FOLDER / _STATES).open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["family", "M", "N", "K", "kernel", "us", "role", "state"])
        for row, state in states:
            writer.writerow([row.family, row.M, row.N, row.K, row.kernel, row.us, row.role, state])


def write_seen() -> None:
    """Write in which range each feature of the traced launches lies."""
    from tune.published.saved import load

    found = ranges(launch for _, launches in load(FOLDER / _TRACES) for launch in launches)
    lines = ",\n".join(f"  {json.dumps(name)}: [{low:.4g}, {high:.4g}]"
                       for name, (low, high) in found.items())  # fmt: skip
    seen_path().write_text(f"{{\n{lines}\n}}\n")


def calibrate(options: argparse.Namespace) -> int:
    """Fit, judge and write; 1 where the present constants are kept."""
    from tune.published.saved import load

    data = [(row, Observation((row.family, row.stratum), row.us, launches))
            for row, launches in load(FOLDER / _TRACES)]  # fmt: skip
    fitting = [(row, seen) for row, seen in data if row.role == "fit"]
    tests = [(row, seen) for row, seen in data if row.role == "test"]
    present = {name: getattr(shipped(), name) for name in fitted_names()}

    def fitted(
        part: Sequence[tuple[Row, Observation]], start: Mapping[str, float], steps: int
    ) -> dict[str, float]:
        def progress(step: int, error: float) -> None:
            print(f"  step {step}: {error:.4f}", flush=True)

        return fit([seen for _, seen in part], start, steps, report=progress)

    values = fitted(fitting, present, options.steps)
    print("at the edge of its range:", ", ".join(at_the_edge(values)) or "none")
    predicted = {row: modelled_us(seen.launches, with_values(values)) for row, seen in data}
    left_out: dict[Row, float] = {}
    for family in sorted({row.family for row, _ in tests}):
        others = [pair for pair in fitting if pair[0].family != family]
        # Not from the present constants, which know the family.
        apart = with_values(fitted(others, middle_of_ranges(), options.apart_steps))
        left_out |= {row: modelled_us(seen.launches, apart)
                     for row, seen in tests if row.family == family}  # fmt: skip
    found = statistics.median(abs(us / row.us - 1) for row, us in left_out.items())
    present_error = _left_out_error()
    print(f"without their family, rows are {found:.1%} off; now {present_error:.1%}")
    if found > present_error and not options.force:
        print("kept the present constants: without a family the new ones are worse")
        return 1
    _write_predictions([row for row, _ in data], predicted, left_out)
    _write_constants(values, [predicted[row] / row.us for row, _ in tests])
    write_errors(with_values(values))
    return 0


def repredict() -> None:
    """Write what the present constants predict."""
    from tune.published.saved import load

    predicted, left_out = {}, {}
    for (row, launches), line in zip(load(FOLDER / _TRACES), _predictions(), strict=True):
        predicted[row] = modelled_us(launches, shipped())
        if line["family_left_out_us"]:
            left_out[row] = float(line["family_left_out_us"])
    _write_predictions(list(predicted), predicted, left_out)
    _write_constants({}, [us / row.us for row, us in predicted.items() if row.role == "test"])
    write_errors(shipped())


def _predictions() -> list[dict[str, str]]:
    with (FOLDER / _PREDICTIONS).open(newline="") as file:
        return list(csv.DictReader(file))


def _left_out_error() -> float:
    """The saved median error of test rows by constants that were fitted without their family."""
    return statistics.median(
        abs(float(line["family_left_out_us"]) / float(line["us"]) - 1)
        for line in _predictions()
        if line["family_left_out_us"]
    )


def write_errors(constants: Constants) -> None:
    """Write the errors of what is predicted, and beside it of what needs no replay."""
    from tune.published.saved import load

    data = list(load(FOLDER / _TRACES))
    fitting, tests = ([row for row, _ in data if row.role == role] for role in ("fit", "test"))
    lines = _predictions()
    replayed, left_out = (
        {row: float(line[column] or "nan") for (row, _), line in zip(data, lines, strict=True)}
        for column in ("modelled_us", "family_left_out_us")
    )
    sums = {row: sum(floor(each, constants).us for each in launches)
            for row, launches in data if row.role == "test"}  # fmt: skip
    known = {
        "model": replayed,
        "model, family left out": left_out,
        "sums without a replay": sums,
        "bytes and launch": {row: _bytes_us(row) for row in tests},
        "regression": _regression(fitting, tests),
    }
    _write_errors(tests, known)
    _write_bars(tests, left_out, {name: known[name] for name in list(known)[2:]})


def _write_predictions(
    rows: Sequence[Row], predicted: Mapping[Row, float], left_out: Mapping[Row, float]
) -> None:
    with (FOLDER / _PREDICTIONS).open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["family", "M", "N", "K", "kernel", "role", "us", "modelled_us",
                         "family_left_out_us"])  # fmt: skip
        for row in rows:
            apart = f"{left_out[row]:.2f}" if row in left_out else ""
            writer.writerow([row.family, row.M, row.N, row.K, row.kernel, row.role, row.us,
                             f"{predicted[row]:.2f}", apart])  # fmt: skip


def _write_errors(rows: Sequence[Row], known: Mapping[str, Mapping[Row, float]]) -> None:
    with (FOLDER / "errors.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["predictor", "family", "rows of", "rows", "median", "p90"])
        for name, found in known.items():
            for family in [*sorted({row.family for row in rows}), "all"]:
                of_family = [row for row in rows if family in (row.family, "all")]
                for number, label in enumerate(_LABELS):
                    part = [row for row in of_family if number in (row.stratum, len(STRATA))]
                    errors = sorted(abs(found[row] / row.us - 1) for row in part)
                    if errors:
                        p90 = errors[min(len(errors) - 1, int(0.9 * len(errors)))]
                        median = f"{statistics.median(errors):.3f}"
                        writer.writerow([name, family, label, len(errors), median, f"{p90:.3f}"])


def _write_bars(
    rows: Sequence[Row], left_out: Mapping[Row, float], others: Mapping[str, Mapping[Row, float]]
) -> None:
    """Write how much better than others the model is, and how it ranks rows of few M."""

    def median(found: Mapping[Row, float]) -> float:
        return statistics.median(abs(found[row] / row.us - 1) for row in rows)

    few = [row for row in rows if row.M <= _FEW]
    families = sorted({row.family for row in few})
    lines = [("share of the median error", name, len(rows), median(left_out) / median(found),
              "at most 0.667") for name, found in others.items()]  # fmt: skip
    for family in ["all", *families]:
        part = [row for row in few if family in ("all", row.family)]
        rank = spearman([row.us for row in part], [left_out[row] for row in part])
        lines.append((f"Spearman, M <= {_FEW}", family, len(part), rank, "at least 0.95"))
    with (FOLDER / "bars.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["what", "of", "rows", "value", "bar"])
        writer.writerows((*line[:3], f"{line[3]:.3f}", line[4]) for line in lines)


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """The correlation of the ranks; equal values share the mean of theirs."""
    import pandas as pd

    return float(pd.Series(one).rank().corr(pd.Series(other).rank()))


def _write_constants(values: Mapping[str, float], ratios: Sequence[float]) -> None:
    entries = {name: dict(entry) for name, entry in described().items()}
    for name, value in values.items():
        entries[name]["value"] = float(f"{value:.4g}")
    ordered = sorted(1 / ratio for ratio in ratios)
    errors = sorted(abs(ratio - 1) for ratio in ratios)
    entries["error"] = {
        "median": round(statistics.median(errors), 3),
        "ratio_p10": round(ordered[len(ordered) // 10], 3),
        "ratio_p90": round(ordered[9 * len(ordered) // 10], 3),
    }
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entries[name])}" for name in entries)
    (configs_dir() / "gfx950" / "timing.json").write_text(f"{{\n{lines}\n}}\n")


def _sizes(row: Row) -> tuple[float, float]:
    """Bytes that a row must move, and its multiply-adds."""
    if row.experts:
        touched = row.experts * (1 - (1 - row.top_k / row.experts) ** row.M)
        weights = touched * 3 * row.N * row.K * 33 / 32
        return weights + row.M * row.K * 3, 3.0 * row.M * row.top_k * row.N * row.K
    element = {"fp4_asm": 17 / 32, "bf16": 2.0}.get(row.family, 1.0)
    moved = (row.M + row.N) * row.K * element + 2 * row.M * row.N
    return moved, float(row.M) * row.N * row.K


def _bytes_us(row: Row) -> float:
    launches = 2 if row.experts else 1
    return launches * _FLOOR_US + _sizes(row)[0] / _HBM_TB_S / 1e6


def _regression(fitting: Sequence[Row], tests: Sequence[Row]) -> dict[Row, float]:
    """Least squares of log us on logs of M, N, K, bytes and operations."""
    import numpy as np

    def columns(row: Row) -> list[float]:
        moved, operations = _sizes(row)
        return [1.0, *(math.log(size) for size in (row.M, row.N, row.K, moved, operations))]

    wanted = [math.log(row.us) for row in fitting]
    weights, *_ = np.linalg.lstsq(np.array([columns(row) for row in fitting]), wanted, rcond=None)
    return {row: math.exp(float(np.dot(weights, columns(row)))) for row in tests}


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("draw", "trace"):
        command = commands.add_parser(name)
        command.add_argument("--published", type=Path, required=True, help="gemm.csv and moe.csv")
    command.add_argument("--aiter", type=Path, required=True, help="a checkout of ROCm/aiter")
    command.add_argument("--work", type=Path, required=True, help="for what is made on the way")
    command.add_argument("--family", help="make only its samples, for a later call to save")
    command = commands.add_parser("fit")
    command.add_argument("--steps", type=int, default=16, help="of the search")
    command.add_argument("--apart-steps", type=int, default=16, help="without a family, each")
    command.add_argument("--force", action="store_true", help="write constants that are worse")
    commands.add_parser("predict")
    commands.add_parser("seen")
    commands.add_parser("errors")
    commands.add_parser("picture")
    options = parser.parse_args()
    if options.command == "fit":
        return calibrate(options)
    if options.command == "predict":
        repredict()
    elif options.command == "seen":
        write_seen()
    elif options.command == "errors":
        write_errors(shipped())
    elif options.command == "picture":
        draw(FOLDER)
    elif options.command == "draw":
        write(FOLDER / _MANIFEST, drawn(published(options.published)))
    else:
        trace(options)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
