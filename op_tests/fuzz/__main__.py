"""The fuzzer's command line.

    python -m op_tests.fuzz --seconds 600                    every op, torch's reference
    python -m op_tests.fuzz --seconds 600 --arch gfx950      our kernels in the simulator
    python -m op_tests.fuzz --seed 1/417 --calls 1           one call again

A call whose result is not the reference's, or a spoilt one that ends in anything but an error that
names an argument, is printed with the seed that draws it again, and makes the program fail.
``--save`` adds a row of counts to ``fuzz.csv`` under ``docs/measured``.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import count

import pandas as pd
from torch import Tensor

import aiter_mx
from aiter_mx.errors import AiterMxError
from aiter_mx.tuning import origin
from op_tests.bench.common import MEASURED, cpu_name, folder_name
from op_tests.fuzz.trials import TRIALS, Trial, spoilt

SPOILT = 0.3  # share of calls with an argument that is not right


@dataclass(frozen=True)
class Finding:
    """A call that did what it must not."""

    seed: str
    what: str
    trace: str


def described(trial: Trial) -> str:
    """A call as one line: shapes and dtypes of tensors, other values as they are."""
    shown = {
        name: f"{str(v.dtype)[6:]}{list(v.shape)}" if isinstance(v, Tensor) else repr(v)
        for name, v in trial.arguments.items()
    }
    return f"{trial.op}({', '.join(f'{name}={text}' for name, text in shown.items())})"


def attempt(seed: str, ops: Sequence[str]) -> tuple[str, Finding | None]:
    """One call: what it was a call of, and what is wrong."""
    draw = random.Random(seed)
    trial = TRIALS[draw.choice(list(ops))](draw)
    is_spoilt = draw.random() < SPOILT
    if is_spoilt and (changed := spoilt(trial, draw)):
        how, arguments = changed
        try:
            trial.call(**arguments)
        except (TypeError, ValueError, AiterMxError) as error:
            if str(error):
                return f"{trial.op}, spoilt", None
            wrong = traceback.format_exc()
        except Exception:
            wrong = traceback.format_exc()
        else:  # harmless, such as another dtype that is taken as well
            return f"{trial.op}, spoilt", None
        return f"{trial.op}, spoilt", Finding(seed, f"{described(trial)}, {how}", wrong)
    try:
        trial.check(trial.call(**trial.arguments))
    except Exception:
        return trial.op, Finding(seed, described(trial), traceback.format_exc())
    return trial.op, None


def run(
    seed: str, seconds: float, calls: int | None, ops: Sequence[str]
) -> tuple[Counter[str], list[Finding]]:
    """Calls until the time is over, or so many of them."""
    end, made, findings = time.monotonic() + seconds, Counter[str](), []
    base, _, first = seed.partition("/")
    for number in count(int(first or 0)):
        if time.monotonic() > end or (calls is not None and made.total() >= calls):
            return made, findings
        op, finding = attempt(f"{base}/{number}", ops)
        made[op] += 1
        if finding is not None:
            findings.append(finding)
            print(f"--seed {finding.seed}: {finding.what}\n{finding.trace}", flush=True)
    raise AssertionError("never")


def save(arch: str | None, seed: str, made: Counter[str], wrong: int) -> None:
    """Add the counts of a run to those of other runs on the same hardware, or of it before."""
    folder = MEASURED / ("gfx950_simulated" if arch else folder_name(cpu_name()))
    folder.mkdir(parents=True, exist_ok=True)
    base, _, first = seed.partition("/")
    row = {
        "seed": base,
        "first": int(first or 0),
        "calls": made.total(),
        "spoilt": sum(calls for op, calls in made.items() if op.endswith(", spoilt")),
        "wrong": wrong,
        "commit": origin.commit(),
        "date": origin.today(),
    }
    path = folder / "fuzz.csv"
    frame = pd.DataFrame([row])
    if path.is_file():
        kept = pd.read_csv(path)
        again = (kept["seed"].astype(str) == base) & (kept["first"] == row["first"])
        frame = pd.concat([kept[~again], frame])
    frame.to_csv(path, index=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 1 when there are findings."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, help="60, or as long as the calls take")
    parser.add_argument("--calls", type=int, help="at most so many")
    parser.add_argument("--seed", default=str(int(time.time())), help="of all calls, or S/N")
    parser.add_argument("--arch", choices=["gfx950"], help="simulate it")
    parser.add_argument("--ops", nargs="+", choices=[*TRIALS], default=[*TRIALS])
    parser.add_argument("--save", action="store_true", help="keep the counts in docs/measured")
    options = parser.parse_args(arguments)
    with aiter_mx.simulate(options.arch) if options.arch else nullcontext():
        seconds = options.seconds or (60 if options.calls is None else float("inf"))
        made, findings = run(options.seed, seconds, options.calls, options.ops)
    for op, calls in sorted(made.items()):
        print(f"{calls:7} {op}")
    print(f"{made.total():7} calls by seed {options.seed}, {len(findings)} wrong")
    if options.save:
        save(options.arch, options.seed, made, len(findings))
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
