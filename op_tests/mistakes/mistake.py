"""A mistake in Hopper's sources, and who should find it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mistake:
    """Text of a source under ``csrc`` that is there once, and what stands in its place.

    Attributes:
        what: is wrong.
        source, right, wrong: where, and the two texts.
        suite: the file of tests.
        kernel: the subject of that suite.
        sought: part of the names of the tests that are run first, as they should find it.
    """

    what: str
    source: str
    right: str
    wrong: str
    suite: str
    kernel: str
    sought: str = "test_any"

    @property
    def name(self) -> str:
        return re.sub(r"\W+", "_", f"{self.kernel} {self.what}")

    def plant(self, csrc: Path) -> None:
        """Make the mistake in a copy of the sources."""
        path = csrc / self.source
        text = path.read_text()
        if text.count(self.right) != 1:
            raise ValueError(
                f"{self.source} has {self.right!r} {text.count(self.right)} times, not once"
            )
        path.write_text(text.replace(self.right, self.wrong))


def of_source(suite: str, kernel: str, source: str, *mistakes: tuple[str, ...]) -> list[Mistake]:
    return [
        Mistake(what, source, right, wrong, suite, kernel, *sought)
        for what, right, wrong, *sought in mistakes
    ]


LINEAR, RESCALING, RESCALED, MOE, ROUTED, GROUPED, RESCALED_GROUPS, PROMOTED = (
    "op_tests/linear/test_conformance.py",
    "op_tests/linear/test_rescaling.py",
    "op_tests/linear/test_wgmma_fp8_rescaled_gpu.py",
    "op_tests/moe/test_conformance.py",
    "op_tests/moe/test_rescaled.py",
    "op_tests/grouped/test_conformance.py",
    "op_tests/grouped/test_rescaled_gpu.py",
    "op_tests/grouped/test_promoted.py",
)
NOT_STORED = (
    "last eight features not stored",
    "if (8 * i < rows && column < columns)",
    "if (8 * i < rows && column + 8 < columns)",
)
BIAS = "load_bias(bias, bias_kind, n + 8 * i)", "load_bias(bias, bias_kind, n)"
FAR, BIASES = "test_scales_over_their_whole_range", "test_outputs_and_biases"
AHEAD, OF_GROUPS = "test_the_launch_ahead", "test_results_and_biases"
NAN, ANY_ROOM, PANELS, TURNS, EVERY_SIZE = (
    "test_a_nan_scale",
    "test_bits_are_the_same_with_room",
    "test_bits_are_the_same_where_panels",
    "test_bits_are_the_same_where_pairs",
    "test_a_group_of_every_size",
)
