"""How a prediction reads: the parts of the time, the units' shares, and where waves wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aiter_mx.sim.timing.model import Prediction

MEANINGS = {
    "launch": "launch, and launches ahead that fill memory",
    "run": "instructions of its own",
    "issue": "other waves' instructions on the same pipe",
    "matrix": "matrix instructions ahead on the same unit",
    "address": "the queue of the address unit",
    "lds": "LDS",
    "memory": "vector memory",
    "scalar": "scalar loads",
    "barrier": "other waves at a barrier",
}
"""What a wave of the busiest compute unit does or waits for, by part of a prediction."""


@dataclass(frozen=True)
class Wait:
    """An instruction that waves wait at.

    Attributes:
        text: as disassembled.
        number: its place in the kernel.
        us: of the launch's time.
        share: of the waves' time.
    """

    text: str
    number: int
    us: float
    share: float


def longest_waits(prediction: Prediction, texts: Sequence[str], count: int = 3) -> list[Wait]:
    """The instructions that waves wait at for longest."""
    order = sorted(range(len(texts)), key=lambda i: -prediction.waited[i])[:count]
    run_us = prediction.us - prediction.parts["launch"]
    return [
        Wait(texts[i], i, prediction.waited[i] * run_us, prediction.waited[i])
        for i in order
        if prediction.waited[i] > 0
    ]
