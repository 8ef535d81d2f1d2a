"""Code objects loaded into the simulator, and launches of their kernels."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from aiter_mx.code_object import LDS_BYTES, CodeObject, KernelInfo, parse_code_object, resident
from aiter_mx.errors import LaunchError, SimulatorError
from aiter_mx.forks import Lock
from aiter_mx.region import Region
from aiter_mx.sim import checks
from aiter_mx.sim.compile import library
from aiter_mx.sim.counts import GroupCounts
from aiter_mx.sim.disasm import Instruction, disassemble
from aiter_mx.sim.findings import Shadow, check_of, idle_findings, merged_findings, named
from aiter_mx.sim.idle import Idle, idle_instructions
from aiter_mx.sim.image import LoadedImage, disjoint, dispatch_packet, kernel_arguments
from aiter_mx.sim.report import CFault, LaunchReport, Trace, fault_error
from aiter_mx.sim.run import (
    CLaunch,
    CRegion,
    CTrace,
    Translated,
    launch_report,
    run_threads,
    trace_words,
)
from aiter_mx.sim.translate import accumulators_from, blocks_of, translate_kernel

SCHEDULES = ("random", "round-robin", "run-to-barrier")
SUM_ORDERS = ("exact", "forward", "backward", "tree")
_ARCH = "gfx950"
_MAX_LANES = 1024
_LANES = 64
_CUS = 256  # of an MI355X
_MOST_GROUPS = 16  # of a CU, if they have more than one wave
_MOST_FOLLOWED_WAVES = 1 << 14

Dim3 = tuple[int, int, int]


@dataclass(frozen=True)
class SimOptions:
    """How launches are simulated.

    Attributes:
        strict: check registers, waits and LDS order, not addresses alone.
        schedule: how the waves of a workgroup take turns: ``random`` (by the seed, a few memory
            operations at a time), ``round-robin`` (at every ``s_waitcnt``) or ``run-to-barrier``.
        seed: of the random schedule; the same seed repeats a run exactly.
        threads: host threads over workgroups; 0 means one for each core.
        max_steps: memory operations and waits a workgroup may take before it counts as stuck.
        count_unique: count the distinct bytes of memory read and written.
        count_conflicts: count bank conflicts of LDS, and cycles of the address units.
        count_groups: count the bytes that each workgroup reads of each region, and what the first
            wave executes ahead of its first load of 16 bytes a lane.
        delay: memory operations take effect at moments drawn by the seed, between their issue and
            the wait that covers them; needs ``strict``.
        first_group: number of the first workgroup that runs, counting x first; those before it are
            left out.
        group_count: workgroups that run, from ``first_group`` on; 0 means all that are left.
        trace: write down what waves do, for ``aiter_mx.sim.timing``; on one thread.
        finite_scales: matrix instructions take an e8m0 byte of 255 for 2^128, not for NaN: for
            kernels that do not rely on the instruction for NaN.
        sum_order: how matrix instructions add: ``exact`` (in double, rounded once), or ``forward``,
            ``backward`` or as a ``tree``, rounded to f32 at each step.
        perturb: seed by which ``v_rcp``, ``v_rsq``, ``v_sqrt``, ``v_exp`` and ``v_log`` of f32 are
            off by up to one ulp; 0 leaves them as near as they get.
        checks: rules and classes of ``aiter_mx.sim.checks`` that strict mode follows, those after
            a minus sign not; by default all but the class ``style``.
        coherence: workgroups run side by side, as many as an MI355X holds, and may wait for each
            other; each XCD has an L2 of its own and each CU caches, which hide what others write
            until waits, write-backs, flags and invalidations bring it; needs ``strict``.
        collect: go on after a finding of a check, and list it in the report.
    """

    strict: bool = True
    schedule: str = "random"
    seed: int = 0
    threads: int = 0
    max_steps: int = 1 << 30
    count_unique: bool = False
    count_conflicts: bool = False
    count_groups: bool = False
    delay: bool = False
    first_group: int = 0
    group_count: int = 0
    trace: bool = False
    finite_scales: bool = False
    sum_order: str = "exact"
    perturb: int = 0
    checks: tuple[str, ...] = checks.DEFAULT
    coherence: bool = False
    collect: bool = False

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ValueError(
                f"schedule must be one of {', '.join(SCHEDULES)}, got {self.schedule!r}"
            )

        if self.sum_order not in SUM_ORDERS:
            raise ValueError(
                f"sum_order must be one of {', '.join(SUM_ORDERS)}, got {self.sum_order!r}"
            )

        checks.selected(self.checks)
        for name in ("delay", "coherence"):
            if getattr(self, name) and not self.strict:
                raise ValueError(f"{name}=True needs strict=True, which follows the waits")
        if self.delay and self.coherence:
            raise ValueError(
                "delay=True and coherence=True are two ways to be late: run the launch twice"
            )

    @classmethod
    def from_environment(cls) -> SimOptions:
        """Options from the variables ``AITER_MX_SIM_...`` that docs/simulator.md lists.

        Raises:
            ValueError: one of them has a value that cannot be used.
        """

        def number(name: str, default: int) -> int:
            text = os.environ.get(f"AITER_MX_SIM_{name}", "")
            try:
                return int(text) if text else default
            except ValueError:
                raise ValueError(f"AITER_MX_SIM_{name} must be a number, got {text!r}") from None

        return cls(
            strict=bool(number("STRICT", 1)),
            schedule=os.environ.get("AITER_MX_SIM_SCHEDULE") or cls.schedule,
            seed=number("SEED", 0),
            max_steps=number("MAX_STEPS", cls.max_steps),
            count_unique=bool(number("UNIQUE", 0)),
            count_conflicts=bool(number("CONFLICTS", 0)),
            count_groups=bool(number("GROUPS", 0)),
            delay=bool(number("DELAY", 0)),
            coherence=bool(number("COHERENCE", 0)),
            first_group=number("FIRST_GROUP", 0),
            finite_scales=bool(number("FINITE_SCALES", 0)),
            sum_order=os.environ.get("AITER_MX_SIM_SUM_ORDER") or cls.sum_order,
            perturb=number("PERTURB", 0),
            checks=tuple(os.environ.get("AITER_MX_SIM_CHECKS", "").replace(",", " ").split())
            or cls.checks,
        )


class Program:
    """One code object. Make it with ``from_image``; it may be used by several threads."""

    def __init__(self, image: bytes, code_object: CodeObject) -> None:
        self.code_object = code_object
        self._image = image
        self._kept = threading.local()
        self._loaded = LoadedImage(code_object)
        self._translated: dict[tuple[str, bool], Translated] = {}
        self._idle: dict[str, dict[int, Idle]] = {}
        self._lock = Lock()

    @classmethod
    def from_image(cls, image: bytes) -> Program:
        """Load a code object.

        Raises:
            LaunchError: the image is not a code object, or not one for gfx950.
        """
        code_object = parse_code_object(image)
        if code_object.arch != _ARCH:
            raise LaunchError(f"the simulator runs {_ARCH}, got {code_object.target}")
        return cls(image, code_object)

    @property
    def image(self) -> bytes:
        """The code object, as it was given."""
        return self._image

    @cached_property
    def listing(self) -> list[Instruction]:
        """The code object's disassembly."""
        return disassemble(self._image)

    def kernel(self, name: str) -> KernelInfo:
        """A kernel by name. Raises LaunchError when there is none."""
        if name not in self.code_object.kernels:
            known = ", ".join(self.code_object.kernels) or "none"
            raise LaunchError(f"the code object has no kernel {name!r}; it has {known}")
        return self.code_object.kernels[name]

    def prepare(self, kernel: str, strict: bool = True) -> None:
        """Translate and compile a kernel now, so that its first launch does not have to.

        Raises:
            UnknownInstruction: it has an instruction whose meaning the simulator lacks.
        """
        self._translate(self.kernel(kernel), strict)

    def idle(self, kernel: str) -> dict[int, Idle]:
        """The instructions of a kernel that could be left out, by their number."""
        if kernel not in self._idle:
            info = self.kernel(kernel)
            code = blocks_of(self.code_object, info, self.listing)
            self._idle[kernel] = idle_instructions(
                code.instructions, code.leaders, code.entry, accumulators_from(info)
            )
        return self._idle[kernel]

    def _buffers(self, size: int) -> tuple[ctypes.Array[ctypes.c_char], ...]:
        """Memory for arguments and dispatch packet, the same for all launches of a thread.

        So traces of one launch, run workgroup by workgroup, number its regions alike.
        """
        kept: dict[int, tuple[ctypes.Array[ctypes.c_char], ...]]
        kept = self._kept.__dict__.setdefault("buffers", {})
        if size not in kept:
            kept[size] = (ctypes.create_string_buffer(size), ctypes.create_string_buffer(64))
        return kept[size]

    def _translate(self, kernel: KernelInfo, strict: bool) -> Translated:
        with self._lock:
            if found := self._translated.get((kernel.name, strict)):
                return found
            key = hashlib.sha256(self._image).digest() + f"{kernel.name}:{strict}".encode()
            loaded = library(
                key,
                lambda: translate_kernel(self.code_object, kernel, self.listing, strict),
                strict,
                f"simulated {kernel.name}",
            )
            meta = json.loads(
                ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(loaded, "sim_meta")))
            )
            self._translated[kernel.name, strict] = found = Translated(run=loaded.sim_run, **meta)
            return found

    def launch(
        self,
        kernel: str,
        grid: Dim3,
        block: Dim3,
        kernarg: bytes,
        shared_bytes: int = 0,
        regions: Sequence[Region] = (),
        options: SimOptions | None = None,
    ) -> LaunchReport:
        """Run a kernel to its end.

        Args:
            kernel: its name.
            grid: workgroups.
            block: lanes of a workgroup.
            kernarg: the kernel's arguments as laid out by the compiler; hidden ones are added.
            shared_bytes: dynamic LDS.
            regions: host memory that the kernel may touch, and how.
            options: how to simulate; the environment's when None.

        Raises:
            LaunchError: a geometry or argument buffer that the kernel cannot be launched with.
            SimulatorError: the kernel did what it must not; see ``aiter_mx.sim.faults``.
        """
        options = options or SimOptions.from_environment()
        info = self.kernel(kernel)
        lds_bytes = info.lds_bytes + shared_bytes
        _check_geometry(info, grid, block, lds_bytes)
        translated = self._translate(info, options.strict)
        segment = kernel_arguments(info, kernarg, grid, block, shared_bytes)
        arguments, packet = self._buffers(len(segment) + 64)
        start = ctypes.addressof(arguments)
        ctypes.memmove(arguments, segment, len(segment))
        told = dispatch_packet(info, grid, block, lds_bytes, start)
        ctypes.memmove(packet, told, len(told))
        everything = [
            *regions,
            *self._loaded.regions,
            # Compilers widen loads of the segment, which the runtime aligns to 16 bytes.
            Region("kernel arguments", start, -(-len(segment) // 16) * 16, "r"),
            Region("dispatch packet", ctypes.addressof(packet), 64, "r"),
        ]
        pieces = disjoint(everything)
        groups = grid[0] * grid[1] * grid[2]
        if not 0 <= options.first_group < groups:
            raise LaunchError(f"first_group is {options.first_group} of {groups} workgroups")
        end_group = min(groups, options.first_group + (options.group_count or groups))
        launch = CLaunch(
            next_group=options.first_group,
            end_group=end_group,
            schedule=SCHEDULES.index(options.schedule),
            grid=grid,
            block=block,
            seed=options.seed & (1 << 64) - 1,
            max_steps=options.max_steps,
            kernarg=start,
            dispatch_packet=ctypes.addressof(packet),
            image_base=self._loaded.base,
            regions=(CRegion * len(pieces))(*(CRegion(*piece) for piece in pieces)),
            region_count=len(pieces),
            lds_bytes=lds_bytes,
            scratch_bytes=info.scratch_bytes,
            entry_pc=translated.entry_pc,
            count_conflicts=options.count_conflicts,
            delay=options.delay,
            finite_scales=options.finite_scales,
            sum_order=SUM_ORDERS.index(options.sum_order),
            perturbing=options.perturb & 0xFFFFFFFF,
            collect=options.collect,
            checks=checks.mask(options.checks),
        )
        shadow = Shadow(pieces) if _follows_writes(options) else None
        if shadow:
            launch.shadow = ctypes.addressof(shadow.pointers)
        counts = (
            GroupCounts(groups, len(pieces), len(translated.blocks))
            if options.count_groups
            else None
        )
        if counts:
            launch.group_bytes, launch.first_load = counts.addresses
            launch.blocks = len(translated.blocks)
        trace = CTrace()
        if options.trace:
            launch.trace = ctypes.addressof(trace)
        groups = end_group - options.first_group
        cores = options.threads or len(os.sched_getaffinity(0))
        threads = 1 if options.trace or options.coherence else min(cores, groups)
        if options.coherence:
            launch.resident = _resident(info, block, shared_bytes)
            waves = groups * -(-prod(block) // _LANES)
            if waves > _MOST_FOLLOWED_WAVES:
                raise LaunchError(
                    f"coherence=True follows what each wave knows of every other, and "
                    f"{waves} are too many: at most {_MOST_FOLLOWED_WAVES}, by a smaller grid or "
                    f"first_group"
                )
            history = Shadow(pieces)
            launch.history = ctypes.addressof(history.pointers)
        begin = time.perf_counter()
        sizes = [end - begin for begin, end, *_ in pieces] if options.count_unique else None
        results = run_threads(translated, launch, threads, sizes)
        seconds = time.perf_counter() - begin
        words = trace_words(trace) if options.trace else b""

        def error(fault: CFault) -> SimulatorError:
            return fault_error(
                fault,
                kernel,
                translated.texts,
                translated.addresses,
                [r for r in everything if r.size_bytes],
                lds_bytes,
                info.scratch_bytes,
                self._row_name(info, fault.reg),
                translated.hazards,
            )

        if faults := [result.fault for result in results if result.fault.kind]:
            fault = min(faults, key=lambda fault: tuple(fault.group)[::-1])
            raise named(error(fault), check_of(fault, translated.hazards))
        waves = groups * -(-block[0] * block[1] * block[2] // _LANES)
        report = launch_report(kernel, waves, seconds, translated, results)
        lists = [result.findings for result in results]
        known = translated.hazards, translated.texts, translated.addresses
        report = replace(report, findings=merged_findings(lists, *known, error))
        rules = checks.selected(options.checks) if options.strict else frozenset()
        if rules & checks.STYLE_RULES:
            asked = {i: each for i, each in self.idle(kernel).items() if each.rule in rules}
            idle = idle_findings(asked, kernel, translated, results)
            if idle and not options.collect:
                check = checks.CHECKS[idle[0].check]
                raise named(check.error(idle[0].message), check)
            report = replace(report, findings=report.findings + idle)
        if counts:
            report = replace(
                report,
                group_bytes=counts.by_region(pieces, everything),
                first_load=counts.ahead_of_first_load(translated.texts, translated.leaders),
            )
        if options.trace:
            sizes = [sum(block.values()) for block in translated.blocks]
            region_bytes = [end - begin for begin, end, *_ in pieces]
            listed = translated.texts, sizes, region_bytes, translated.addresses
            report = replace(report, trace=Trace(words, groups, waves // groups, *listed))
        return report

    def _row_name(self, kernel: KernelInfo, row: int) -> str:
        base = ((kernel.descriptor.rsrc3 & 63) + 1) * 4
        if row >= ((kernel.descriptor.rsrc1 & 63) + 1) * 8:
            return "the register that s_set_gpr_idx_on picks"
        return f"v{row}" if row < base else f"a{row - base}"


def _follows_writes(options: SimOptions) -> bool:
    rules = checks.selected(options.checks)
    # What is late is not compared with memory: `delay` shows the same mistakes in the results.
    return options.strict and not options.delay and bool(rules & {"global-race", "lanes-differ"})


def _resident(kernel: KernelInfo, block: Dim3, shared_bytes: int) -> int:
    """How many workgroups an MI355X holds at once; no fewer than one a CU, which the launch has."""
    lanes = prod(block)
    of_cu = resident(kernel, lanes, shared_bytes)
    lds = kernel.lds_bytes + shared_bytes
    if lds:
        of_cu = min(of_cu, max(1, LDS_BYTES // lds))
    return _CUS * (of_cu if lanes <= _LANES else min(of_cu, _MOST_GROUPS))


def _check_geometry(kernel: KernelInfo, grid: Dim3, block: Dim3, lds_bytes: int) -> None:
    lanes = block[0] * block[1] * block[2]
    if min(*grid, *block) < 1:
        raise LaunchError(f"grid {grid} and block {block} must be positive")
    if lanes > min(kernel.max_workgroup, _MAX_LANES):
        raise LaunchError(
            f"kernel {kernel.name} takes workgroups of at most {kernel.max_workgroup} lanes, "
            f"got {block}"
        )
    if lds_bytes > LDS_BYTES:
        raise LaunchError(
            f"kernel {kernel.name} wants {lds_bytes} bytes of LDS; a workgroup has {LDS_BYTES}"
        )
