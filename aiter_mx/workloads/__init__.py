"""How each op is tried out, in the simulator and by the tuner: one file an op, by the op's name.

A file ``aiter_mx/workloads/<op>.py`` holds ``WORKLOAD``. Everything that tries kernels out takes
operands, the reference and the ways to launch from there, and knows nothing of any op.
"""

from __future__ import annotations

from aiter_mx.workloads.workload import Judge, Verdict, Workload, workload_of

__all__ = ["Judge", "Verdict", "Workload", "workload_of"]
