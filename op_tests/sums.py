"""How exact the sums of a call are, which depends on the kernel that its route takes."""

from __future__ import annotations

from functools import cache

from aiter_mx.dispatch.dispatcher import route
from aiter_mx.kernels.spec import Problem
from aiter_mx.target import Target
from op_tests.grouped import subjects as grouped
from op_tests.linear import subjects as linear
from op_tests.moe import subjects as moe


@cache
def _stated() -> dict[tuple[str, str], dict[str, float]]:
    """By op and name, of our kernels whose matrix unit keeps fewer bits than fp32."""
    return {
        (each.op, each.name): {
            "accumulation_error": each.accumulation_error,
            "rescaling_error": each.rescaling_error,
        }
        for each in (*linear.SUBJECTS, *grouped.SUBJECTS, *moe.SUBJECTS)
        if each.backend == "hip" and each.accumulation_error
    }


def stated_errors(op: str, target: Target, problem: Problem) -> dict[str, float]:
    """What the kernel that is chosen for a problem says of its sums.

    Returns:
        ``accumulation_error`` and ``rescaling_error``, as ``assert_close_to_reference`` and the
        layers of ``moe_gemm`` have them; nothing where sums are those of fp32.
    """
    chosen = route(op, target, problem)
    return _stated().get((op, chosen.kernel), {}) if chosen.backend == "hip" else {}
