"""Judges the model of time by published results that nothing is fitted to.

    python -m tune.published.judges trace --published FOLDER --aiter CHECKOUT --pr3783 CHECKOUT \\
        --pr330 CHECKOUT --work FOLDER
    python -m tune.published.judges judge         # from the saved traces alone

``trace`` runs three sets of public kernels in the simulator and saves what they do (judges.xz):
the sweep of aiter's pull request 3783, whose table names the fastest configuration of each cell;
the grouped GEMMs of Primus-Turbo's pull request 330, whose published times lie on a line in the
rounds of tiles and K; and pairs of published kernels of one shape, one faster than the other by
over 10 %. ``judge`` writes judges.csv, a row a launch with its time by the model, and prints how
often the model ranks and how far it is off.
"""

from __future__ import annotations

import argparse
import csv
import pickle
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from aiter_mx.errors import AiterMxError
from aiter_mx.sim.timing.constants import shipped
from aiter_mx.sim.timing.fit import modelled_us
from tune.published.collect import collect, keep, kept_at
from tune.published.pr330 import Pr330
from tune.published.pr3783 import Pr3783
from tune.published.rows import Row, published
from tune.published.run import PublishedRun
from tune.published.sample import samples, with_neighbours
from tune.published.saved import REPEATED, load, save

FOLDER = Path(__file__).parents[2] / "docs" / "measured" / "mi355x_published"
SWEEP, GROUPED, PAIR = "pr3783_sweep", "pr330", "pair"
_N_SUBS, _K_SPLITS, _K_STEP = (1, 2, 4), (1, 2, 4, 8), 128  # that its tuner tries
_LAYERS = ((4096, 7168), (7168, 2048), (3072, 5120), (5120, 1536), (8192, 4096), (4096, 4096),
           (4096, 2048), (2048, 2048))  # fmt: skip
"""N and K of expert layers in Primus-Turbo's benchmark whose K is in whole steps."""
_GROUPS_ROWS = ((16, 2048), (16, 4096), (32, 4096))
_TRUE_TFLOPS = {"forward": 2343, "dgrad": 2165, "wgrad": 2211}  # of 16 groups of 4096 x 4096 x 7168
_SPREAD, _NEAR = 1.1, 1.1
_EAGER_US = 7.2
"""That the host takes for a launch: the fastest call that pull request 3783 shows, whose times are
those of eager calls, one after the other."""


def sweep(table: Path) -> Iterator[Row]:
    """The configurations of each cell of the pull request's tuned table; winners are marked."""
    with table.open(newline="") as file:
        for line in csv.DictReader(file):
            if line["kernel"] != "mfma":
                continue
            M, N, K = (int(line[name]) for name in "MNK")
            won = int(line["n_sub"]), int(line["k_splits"])
            for n_sub in _N_SUBS:
                for k_splits in _K_SPLITS:
                    if K // _K_STEP % k_splits == 0:
                        role = "winner" if (n_sub, k_splits) == won else ""
                        yield Row(SWEEP, M, N, K, f"n_sub {n_sub}", k_splits, 0, 0, 0.0, role)


def trend_us(groups: int, M: int, N: int, K: int) -> float:
    """The line that 24 published cells of pull request 330 follow to 2 %, in the median."""
    rounds = -(-groups * -(-M // 256) * -(-N // 256) // 256)
    return 43.6 + rounds * (14.6 + 1.51 * K / 128)


def grouped() -> Iterator[Row]:
    """Cells of pull request 330 on its line, and three products of one layer as published."""
    for groups, M in _GROUPS_ROWS:
        for N, K in _LAYERS:
            us = round(trend_us(groups, M, N, K), 1)
            yield Row(GROUPED, M, N, K, "forward", 0, groups, 0, us, "trend")
    for kernel, tflops in _TRUE_TFLOPS.items():
        us = round(2 * 16 * 4096 * 4096 * 7168 / tflops / 1e6, 1)
        yield Row(GROUPED, 4096, 4096, 7168, kernel, 0, 16, 0, us, "published")


def pairs(rows: Iterable[Row]) -> list[Row]:
    """Of each shape with several published kernels, the fastest and the slowest, if over 10 %."""
    shapes = defaultdict(list)
    for row in rows:
        shapes[row.family, row.M, row.N, row.K, row.experts].append(row)
    found = []
    for of_shape in shapes.values():
        best, worst = min(of_shape, key=lambda r: r.us), max(of_shape, key=lambda r: r.us)
        if worst.us > _SPREAD * best.us:
            found += [best, worst]
    return found


def trace(options: argparse.Namespace) -> None:
    """Run what is not in the work folder yet, and save all."""
    old, new = Pr3783(options.pr3783, options.work), Pr330(options.pr330, options.work)
    table = options.pr3783 / "aiter" / "configs" / "smallm_mxfp8_tuned.csv"
    kept = []
    for row in (*sweep(table), *grouped()):
        path = kept_at(options.work, row)
        if not path.exists():
            try:
                run = _sweep_run(old, row) if row.family == SWEEP else _grouped_run(new, row)
                found = samples(run, False, 0, 0)
                keep(path, with_neighbours(run, found) if row.family == SWEEP else found)
            except AiterMxError as error:
                print(f"{row}: {error}", flush=True)
                continue
            print(row.family, row.M, row.N, row.K, row.kernel, row.split_k, flush=True)
        kept.append((row, pickle.loads(path.read_bytes())))
    for row, found in collect(
        pairs(published(options.published)), options.published, options.aiter, options.work
    ):
        if isinstance(found, str):
            print(f"{row}: {found}")
            continue
        kept.append((Row(**{**vars(row), "role": PAIR}), found))
    save(FOLDER / "judges.xz", kept)


def _sweep_run(kernels: Pr3783, row: Row) -> PublishedRun:
    return kernels.mfma(row.M, row.N, row.K, int(row.kernel.split()[1]), row.split_k)


def _grouped_run(kernels: Pr330, row: Row) -> PublishedRun:
    rows = [row.M] * row.experts
    if row.kernel == "wgrad":
        return kernels.wgrad(rows, row.N, row.K)
    return kernels.product(rows, *((row.K, row.N) if row.kernel == "dgrad" else (row.N, row.K)))


def judge() -> None:
    """Write each launch's time by the model, and print what it judges right."""
    data = [(row, launches) for row, launches in load(FOLDER / "judges.xz", REPEATED)
            if row.role != PAIR]  # fmt: skip
    data += [(row, launches) for row, launches in load(FOLDER / "judges.xz") if row.role == PAIR]
    modelled = {row: modelled_us(launches, shipped()) for row, launches in data}
    with (FOLDER / "judges.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["set", "M", "N", "K", "groups", "kernel", "k_splits", "published",
                         "published_us", "modelled_us"])  # fmt: skip
        for row, us in modelled.items():
            known = row.us or ""
            writer.writerow([row.family, row.M, row.N, row.K, row.experts or "", row.kernel,
                             row.split_k, row.role, known, f"{us:.2f}"])  # fmt: skip
    print("\n".join(verdicts(modelled)))


def verdicts(modelled: Mapping[Row, float]) -> list[str]:
    """How often the model ranks and how far it is off, a line for each set."""
    return [
        *_of_sweep({row: us for row, us in modelled.items() if row.family == SWEEP}),
        *_of_grouped({row: us for row, us in modelled.items() if row.family == GROUPED}),
        _of_pairs({row: us for row, us in modelled.items() if row.role == PAIR}),
    ]


def eager_us(row: Row, us: float) -> float:
    """Of a configuration's call: the device's time or the host's, which has two launches to make
    where parts of K are added."""
    return max(us, _EAGER_US * (1 + (row.split_k > 1)))


def rank_of_winner(cell: Mapping[Row, float]) -> int:
    """The winner's place by the model, 1 the first; of equals the worst place."""
    winner = _winner_us(cell)
    return sum(us <= winner * (1 + 1e-9) for us in cell.values())


def _winner_us(cell: Mapping[Row, float]) -> float:
    return next(us for row, us in cell.items() if row.role == "winner")


def _of_sweep(modelled: Mapping[Row, float]) -> list[str]:
    cells: dict[tuple[int, int, int], dict[Row, float]] = defaultdict(dict)
    for row, us in modelled.items():
        cells[row.M, row.N, row.K][row] = eager_us(row, us)
    whole = [cell for cell in cells.values() if any(row.role == "winner" for row in cell)]
    apart = [cell for cell in whole if max(cell.values()) > _SPREAD * min(cell.values())
             and min(cell.values()) > 2 * _EAGER_US]  # fmt: skip
    first_three = sum(rank_of_winner(cell) <= 3 for cell in apart)
    near = sum(_winner_us(cell) <= _NEAR * min(cell.values()) for cell in whole)
    return [
        f"sweep: winner in the first three in {first_three} of {len(apart)} cells",
        f"sweep: winner within 10 % of the model's best in {near} of {len(whole)} cells",
    ]


def _of_grouped(modelled: Mapping[Row, float]) -> list[str]:
    errors = [abs(us / row.us - 1) for row, us in modelled.items() if row.role == "trend"]
    near = sum(error <= 0.2 for error in errors)
    lines = [f"grouped: {near} of {len(errors)} cells within 20 %"]
    if errors:
        lines[0] += f", median error {statistics.median(errors):.1%}"
    return lines + [
        f"grouped {row.kernel}: {us:.0f} us, published {row.us:.0f} us"
        for row, us in modelled.items()
        if row.role == "published"
    ]


def _of_pairs(modelled: Mapping[Row, float]) -> str:
    shapes: dict[Sequence[object], dict[Row, float]] = defaultdict(dict)
    for row, us in modelled.items():
        shapes[row.family, row.M, row.N, row.K, row.experts][row] = us
    both = [shape for shape in shapes.values() if len(shape) > 1]
    right = sum(min(shape, key=lambda r: r.us) == min(shape, key=shape.__getitem__)
                for shape in both)  # fmt: skip
    return f"pairs: the faster kernel named in {right} of {len(both)}"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("trace")
    command.add_argument("--published", type=Path, required=True, help="gemm.csv and moe.csv")
    for name in ("aiter", "pr3783", "pr330"):
        command.add_argument(f"--{name}", type=Path, required=True, help="a checkout")
    command.add_argument("--work", type=Path, required=True, help="for what is made on the way")
    commands.add_parser("judge")
    options = parser.parse_args()
    if options.command == "trace":
        trace(options)
    else:
        judge()


if __name__ == "__main__":
    main()
