"""What a candidate's launch does and whether it is right: simulated once, then cached.

Both depend on the machine code, the launch and the problem, and on the simulator; the constants of
the model of time may change without them.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TypeAlias

from aiter_mx import sim
from aiter_mx.code_object import resident
from aiter_mx.jit.cache import get_or_build
from aiter_mx.jit.fingerprint import code_hash
from aiter_mx.kernels.spec import Problem
from aiter_mx.sim.program import SimOptions
from aiter_mx.sim.report import LaunchReport, Trace
from aiter_mx.sim.timing.cu import SplitTrace
from aiter_mx.sim.timing.model import Traced
from aiter_mx.sim.timing.sample import Sample, sample
from aiter_mx.trial import Prepared, prepare, try_out
from aiter_mx.tuning.candidates import Candidate, Unfit
from aiter_mx.workloads.workload import Operands, Verdict, workload_of

TRACED = SimOptions(
    schedule="round-robin",
    count_conflicts=True,
    trace=True,
    checks=("-global-race", "-lanes-differ"),  # those take memory as the tensors do
)
"""How launches are simulated whose time is asked for."""

Alike: TypeAlias = "tuple[int, str, tuple[int, int, int]]"
"""Launches with as many workgroups that work: draw of indices, kernel, grid."""


@dataclass(frozen=True)
class _Saved:
    """A sampled trace as the cache has it."""

    working: int
    resident: int
    trace: Trace

    def to_bytes(self) -> bytes:
        trace = self.trace
        header = {
            "working": self.working,
            "resident": self.resident,
            "groups": trace.groups,
            "waves": trace.waves,
            "texts": list(trace.texts),
            "block_sizes": list(trace.block_sizes),
            "region_bytes": list(trace.region_bytes),
        }
        return zlib.compress(json.dumps(header).encode() + b"\n" + trace.words, 1)

    @classmethod
    def from_bytes(cls, data: bytes) -> _Saved:
        header, _, words = zlib.decompress(data).partition(b"\n")
        told = json.loads(header)
        working, resident = told.pop("working"), told.pop("resident")
        return cls(working, resident, Trace(words=words, **told))


def traced_launch(
    candidate: Candidate,
    problem: Problem,
    operands: Operands,
    number: int,
    count: int,
    working: dict[Alike, int],
) -> Traced:
    """Some workgroups of a candidate's launch, for the model of time.

    Args:
        candidate: a kernel of one launch, and its configuration.
        problem: shape and dtypes.
        operands: hollow ones.
        number: by which they are drawn.
        count: workgroups to run.
        working: those of a launch that have something to do, where launches of the same kernel and
            grid have told; this one's are added.
    """
    launch = prepare(candidate.spec, problem, candidate.config, operands=operands)
    _refuse_spills(launch)
    alike = number, candidate.kernel, launch.geometry.grid

    def trace_it(path: Path) -> None:
        found = sampled(launch, count, working.get(alike))
        path.write_bytes(_Saved(found.working, held_by_unit(launch), found.trace).to_bytes())

    key = _key(candidate, launch, problem, number, count)
    saved = _Saved.from_bytes(get_or_build(_kind(key), key, "trace", trace_it).data)
    working[alike] = saved.working
    traced = Traced(SplitTrace(saved.trace), saved.working, saved.resident)
    return replace(traced, least_bytes=_needed(candidate.op, problem, operands))


def _needed(op: str, problem: Problem, operands: Operands) -> float:
    """Bytes of memory that any kernel has to read or write: of all operands, unless a call says
    which experts or rows of them it uses."""
    if workload_of(op).indices is not None or hasattr(problem, "E"):
        return 0.0
    return float(sum(tensor.nbytes for tensor in operands if tensor is not None))


def sampled(launch: Prepared, count: int, working: int | None = None) -> Sample:
    """Some workgroups of a launch, each simulated by itself.

    Args:
        launch: of hollow operands.
        count: workgroups to run.
        working: how many have something to do, where that is known.
    """

    def run(group: int) -> LaunchReport:
        return launch.run(replace(TRACED, first_group=group, group_count=1))

    return sample(run, launch.groups, count, working)


def held_by_unit(launch: Prepared) -> int:
    """The workgroups of a launch that a compute unit holds at once."""
    return resident(launch.kernel, launch.lanes, launch.geometry.shared_bytes)


def judged(candidate: Candidate, part: Problem, cu_num: int) -> Verdict:
    """The worst of a candidate's results on two draws of random operands, in strict mode.

    Args:
        candidate: a kernel of one launch, and its configuration.
        part: a problem that the simulator runs whole.
        cu_num: compute units that it is divided among.
    """
    workload = workload_of(candidate.op)

    def judge(path: Path) -> None:
        found = []
        for number in range(2):
            trial = try_out(candidate.spec, part, candidate.config, SimOptions(), cu_num, number)
            found.append(workload.judge(part, trial.operands)(trial.operands))
        worst = Verdict(max(v.rel_err for v in found), max(v.worst for v in found))
        path.write_text(json.dumps([worst.rel_err, worst.worst]))

    launch = prepare(candidate.spec, part, candidate.config, cu_num, workload.hollow(part))
    key = _key(candidate, launch, part, cu_num, workload.judge.__module__)
    return Verdict(*json.loads(get_or_build(_kind(key), key, "verdict", judge).data))


def _refuse_spills(launch: Prepared) -> None:
    kernel = launch.kernel
    spilled = kernel.vgpr_spills + kernel.sgpr_spills
    if spilled or kernel.scratch_bytes:
        raise Unfit(f"it spills {spilled} registers and uses {kernel.scratch_bytes} scratch bytes")


def _kind(key: str) -> str:
    """One of 16 folders of the cache: a catalogue's traces are some ten thousand files, and each
    that is missing has its folder listed."""
    return f"timing-{key[0]}"


def _key(candidate: Candidate, launch: Prepared, problem: Problem, *more: object) -> str:
    geometry = launch.geometry
    parts = (
        *(simulator_hash(), code_hash(launch.program.image), launch.symbol),
        *(geometry.grid, geometry.block, geometry.shared_bytes),
        *(launch.scalars, candidate.config, problem, *more),
    )
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:32]


@cache
def simulator_hash() -> str:
    """Of the simulator's sources; of the model of time, only what picks workgroups counts."""
    folder = Path(sim.__file__).parent
    whole = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        is_model = name.parts[0] == "timing" and name.name != "sample.py"
        if path.suffix in (".py", ".c", ".h") and not is_model:
            whole.update(str(name).encode() + path.read_bytes())
    return whole.hexdigest()
