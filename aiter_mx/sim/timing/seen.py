"""What launches the model was calibrated on, so that a prediction for another kind says so."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from aiter_mx.paths import configs_dir
from aiter_mx.sim.timing.constants import CUS, shipped
from aiter_mx.sim.timing.model import Traced

_PAST = 1.5  # times the largest that was seen, or the smallest by it, is still alike


def seen_path() -> Path:
    """The file that says in which range each feature of published launches lies."""
    return configs_dir() / "gfx950" / "timing_seen.json"


@cache
def seen() -> Mapping[str, tuple[float, float]]:
    """The least and the most of each feature that was seen."""
    told = json.loads(seen_path().read_text())
    return {name: (low, high) for name, (low, high) in told.items()}


def features(launch: Traced) -> dict[str, float]:
    """What a launch is like, by numbers that a reader can check.

    Workgroups, waves, instructions, and KiB: ``of a unit`` is of the busiest compute unit.
    """
    split, dealt = launch.split, -(-launch.groups // CUS)
    once = split.replay(shipped().machine(1), launch.shares(), [0], 1)
    issued = {name: count / split.waves for name, count in once.issued.items()}
    return {
        "workgroups of a unit": dealt,
        "waves that a unit holds": min(launch.resident, dealt) * split.waves,
        "instructions of a wave": sum(issued.values()),
        "matrix instructions of a wave": issued["mfma"],
        "loads of a wave": issued["load"],
        "LDS instructions of a wave": issued["lds"],
        "KiB that a workgroup touches": sum(split.footprint()) / split.groups / 1024,
    }


def ranges(launches: Iterable[Traced]) -> dict[str, tuple[float, float]]:
    """The least and the most of each feature."""
    found = [features(launch) for launch in launches]
    return {
        name: (min(each[name] for each in found), max(each[name] for each in found))
        for name in found[0]
    }


def outside(launch: Traced) -> list[str]:
    """Why a prediction is an extrapolation: each feature that is far from all that was seen."""
    found = []
    for name, value in features(launch).items():
        low, high = seen()[name]
        if value < low / _PAST or value > high * _PAST:
            found.append(f"{name}: {value:.4g}, seen were {low:.4g} to {high:.4g}")
    return found
