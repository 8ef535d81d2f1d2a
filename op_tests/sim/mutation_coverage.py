"""Which of a kernel's instructions its probes reach."""

from __future__ import annotations

from functools import cache
from unittest.mock import patch

from aiter_mx.sim.report import LaunchReport
from aiter_mx.sim.run import Result, Translated, launch_report
from op_tests.sim.mutation_planting import Mutant, case_named, listing
from op_tests.sim.mutation_probes import AnyCase, runs


@cache
def reached(case: AnyCase) -> frozenset[int]:
    """Positions in ``listing(case)`` of the instructions that any probe enters."""
    leaders, entered = set[int](), set[int]()

    def noted(kernel: str, waves: int, seconds: float, translated: Translated,
              results: list[Result]) -> LaunchReport:  # fmt: skip
        for i, leader in enumerate(translated.leaders):
            leaders.add(translated.addresses[leader])
            if any(result.blocks[i] for result in results):
                entered.add(translated.addresses[leader])
        return launch_report(kernel, waves, seconds, translated, results)

    with patch("aiter_mx.sim.program.launch_report", noted):
        for launch, program in runs(case, case.image):
            launch.run(program)
    found, is_entered = [], False
    for position, ins in enumerate(listing(case)):
        if ins.address in leaders:
            is_entered = ins.address in entered
        if is_entered:
            found.append(position)
    return frozenset(found)


def first_unreached(mutant: Mutant) -> int:
    """Where the code around a mutant begins that no probe reaches."""
    known, index = reached(case_named(mutant.case)), mutant.index
    while index > 0 and index - 1 not in known:
        index -= 1
    return index
