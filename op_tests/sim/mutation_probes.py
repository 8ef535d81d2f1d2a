"""Kernels of ours to plant mistakes in, and the launches that have to notice them.

A probe is one launch with random data under one schedule, compared with float64. Between them the
probes of a kernel reach all of its code that tensors below 16 GiB can reach: ends of rows and of K,
several rounds, each bias, NaN, offsets above 4 GiB and addresses that carry into their high word.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from aiter_mx.errors import SimulatorError
from aiter_mx.jit.build import build
from aiter_mx.kernels.linear import KERNELS, LinearProblem
from aiter_mx.kernels.linear.mfma_gfx950 import MFMA, MFMA_SPLIT
from aiter_mx.kernels.linear.persistent_gfx950 import PERSISTENT_SPLIT
from aiter_mx.kernels.spec import KernelSpec, Module
from aiter_mx.launch import build_request
from aiter_mx.region import Region
from aiter_mx.runtimes.base import PackedArgs
from aiter_mx.sim.program import Program, SimOptions
from aiter_mx.target import hardware
from op_tests.far_memory import Memory
from op_tests.mx_reference import assert_close_to_reference, linear_reference64, random_mx
from op_tests.sim.mutation_cases import WORKLOAD_CASES
from op_tests.sim.mutation_past import PastLaunch
from op_tests.sim.mutation_workloads import WorkloadCase, WorkloadLaunch
from op_tests.sim.tools import without_preload

GFX950 = replace(hardware("gfx950"), cu_num=1)  # whose workgroups have all the rows they may
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_GRID_X = 1 << 20  # workgroups in a grid's x, MX_MAX_GRID_X of the kernels
_MAX_STEPS = 1 << 18  # of a launch; the probes take at most a quarter of them
_POISON = 0x5A
_COUNTERS = ("slots", "counts")  # what kernels call them
_NAN = 0xFF  # in each byte of fp32


@dataclass(frozen=True)
class Probe:
    """One launch.

    Attributes:
        M, N, K: the shape; with ``far``, the grid's y, the last but one workgroup, which has the
            last rows of w, is launched and checked, and one past the end.
        bias: its dtype, or ``none``.
        draw: options of ``random_mx`` for x and w.
        nan: which of x and w has NaN, and what: ``payload``, ``scale``, ``every scale``, or of
            every second row ``start`` for the whole first block and ``first scale`` for its scale,
            which whoever reads past the end of a row meets.
        schedule, seed, delay, finite_scales, coherence: of the simulator.
    """

    M: int
    N: int
    K: int
    bias: str = "none"
    draw: Mapping[str, Any] = field(default_factory=dict)
    schedule: str = "random"
    seed: int = 0
    delay: bool = False
    finite_scales: bool = False
    coherence: bool = False
    far: int = 0
    nan: tuple[str, str] = ("", "")


@dataclass(frozen=True, eq=False)
class Case:
    """A kernel variant and the probes that it is held against."""

    name: str
    spec: KernelSpec
    config: Mapping[str, int]
    out_dtype: str
    probes: tuple[Probe, ...]

    @property
    def module(self) -> Module:
        assert self.spec.module is not None
        return self.spec.module

    @cached_property
    def image(self) -> bytes:
        """The code object."""
        problem = self.problem(self.probes[0])
        return build(build_request(self.spec, GFX950, problem, self.config)).image

    def problem(self, probe: Probe) -> LinearProblem:
        """What a probe computes."""
        return LinearProblem(probe.M, probe.N, probe.K, self.out_dtype, probe.bias)

    @cached_property
    def launches(self) -> list[Launch]:
        """The probes with their data."""
        return [Launch(self, probe, seed) for seed, probe in enumerate(self.probes)]


AnyCase: TypeAlias = Case | WorkloadCase
AnyLaunch: TypeAlias = "Launch | WorkloadLaunch | PastLaunch"


def _probes(
    ms: tuple[int, ...], N: int, ks: tuple[int, int, int], dtype: str, rows: int, unit: int
) -> tuple[Probe, ...]:
    few, some, many = ks
    narrow, wide = ((-12, -6), (-20, -6)) if dtype == "fp16" else ((-6, 6), (-20, 20))
    draw = {"scale_exponents": narrow}
    far_k = ((1 << 32) // (_GRID_X * rows) // unit + 1) * unit + few % unit
    probes = [
        Probe(ms[0], N, many, draw=draw),
        Probe(ms[-1], N + 1, some, "fp32", {"scale_exponents": wide}, "round-robin"),
        Probe(ms[0], N, some, "bf16", draw, "run-to-barrier"),
        Probe(ms[-1], N, few, "fp16", draw, seed=1, delay=True),
        Probe(ms[-1], N + 2, few, draw={"scale_exponents": (-127, 127)}, seed=2),
    ]
    for what, K in [
        ("payload", some),
        ("scale", few),
        ("scale", many),
        ("start", few),
        ("start", some),
        ("start", many),
    ]:
        for of in "xw":
            probes.append(Probe(ms[-1], N, K, draw=draw, seed=len(probes), nan=(of, what)))
    for of in "xw":  # the kernel provides for NaN by itself
        nan = (of, "scale")
        probes.append(Probe(ms[-1], N, few, draw=draw, seed=3, nan=nan, finite_scales=True))
    # Bytes of w beyond 2^32, then as many workgroups as results have offsets for. How scales are
    # loaded by gemv depends on K, so that it stays in the variant of the other probes.
    far_y = ((1 << 29) // (ms[0] * rows) - 1) // _GRID_X + 1
    if far_y > 1:
        probes.append(Probe(ms[0], (_GRID_X + 1) * rows, far_k, draw=draw, seed=3, far=2))
        last = (_GRID_X * (far_y - 1) + 1) * rows
        K = unit + few % unit if unit == 64 else few
        probes.append(Probe(ms[0], last, K, draw=draw, far=far_y))
    for of in "xw":
        probes.append(Probe(ms[-1], N, few, draw=draw, seed=7, nan=(of, "first scale")))
        nan = (of, "scale")
        probes.append(Probe(ms[-1], N, many, draw=draw, seed=8, nan=nan, finite_scales=True))
    return tuple(probes)


def _gemv(M: int, rows: int, waves: int, unroll: int, dtype: str) -> Case:
    config = {"rows": rows, "waves": waves, "unroll": unroll}
    ks = (416, 1024 * waves * unroll + 96, 3 * 1024 * waves * unroll - 480)
    name = f"gemv m{M} r{rows} w{waves} u{unroll} {dtype}"
    probes = _probes((M,), 2 * rows + 1, ks, dtype, rows, 32)
    K = 1024 * waves * unroll - 1056  # ends in the last loads of the first round
    last = tuple(replace(probes[3], K=K, seed=10, delay=False, nan=(of, "start")) for of in "xw")
    return Case(name, KERNELS[0], config, dtype, probes + last)


def _mfma(
    ms: tuple[int, ...], row_tiles: int, fold: int, waves: int, unroll: int, dtype: str, odd: int
) -> Case:
    config = {"row_tiles": row_tiles, "fold": fold, "waves": waves, "unroll": unroll, "blocks": 1}
    rows, step = row_tiles * 16 // fold, 256 * fold * waves * unroll
    ks = (128 + 32 * odd, step + 64 + 32 * odd, 3 * step - 128 + 32 * odd)
    name = f"mfma t{row_tiles} f{fold} w{waves} u{unroll} {dtype}"
    return Case(name, MFMA, config, dtype, _probes(ms, 2 * rows + 3, ks, dtype, rows, 64))


def _mfma_split(
    ms: tuple[int, ...], row_tiles: int, waves: int, splits: int, dtype: str, odd: int
) -> Case:
    tiles = {"row_tiles": row_tiles, "fold": 1, "waves": waves, "unroll": 1}
    step = 256 * waves * splits
    ks = (128 + 32 * odd, step + 64 + 32 * odd, 3 * step - 128 + 32 * odd)
    # mfma's have the bytes of w beyond 2^32. Caches of XCDs apart show what is stored for one.
    probes = [
        replace(probe, coherence=not probe.delay)
        for probe in _probes(ms, 2 * 16 * row_tiles + 3, ks, dtype, 16 * row_tiles, 64)
        if not probe.far
    ]
    probes.append(replace(probes[0], nan=("w", "every scale"), finite_scales=True))
    name = f"mfma_split t{row_tiles} s{splits} w{waves} u1 {dtype}"
    return Case(name, MFMA_SPLIT, {**tiles, "blocks": 1, "splits": splits}, dtype, tuple(probes))


def _persistent_split() -> Case:
    """K has an odd number of blocks. What its two workgroups leave each other shows in caches of
    XCDs apart; a bias is compiled in."""
    draw = {"scale_exponents": (-6, 6)}

    def probe(M: int, N: int, K: int, **more: Any) -> Probe:
        return Probe(M, N, K, "bf16", **{"draw": draw, "coherence": True, **more})

    wide, apart = {"scale_exponents": (-20, 20)}, {"coherence": False}
    finite = {"finite_scales": True, **apart}
    probes = (
        probe(40, 96, 672),
        probe(133, 160, 1312, seed=1, draw=wide),
        probe(17, 288, 2080, seed=2, schedule="round-robin", **apart),
        probe(133, 160, 3232, seed=3, delay=True, **apart),
        probe(70, 160, 672, seed=4, nan=("x", "scale"), **finite),
        probe(70, 160, 928, seed=5, nan=("w", "scale"), **finite),
        probe(40, 160, 416, seed=6, nan=("w", "payload"), schedule="run-to-barrier", **apart),
        probe(40, 96, 672, seed=7, nan=("x", "start"), **apart),
        probe(40, 96, 672, seed=8, nan=("w", "first scale"), **apart),
        probe(1100, 160, 416, seed=9, **apart),
    )
    config = {"tile_m": 128, "tile_n": 128, "splits": 2}
    return Case("persistent_split m128 n128", PERSISTENT_SPLIT, config, "bf16", probes)


CASES = (
    _gemv(2, 2, 2, 1, "bf16"),
    _gemv(5, 3, 2, 1, "fp32"),
    _gemv(1, 4, 3, 2, "fp16"),
    _mfma((3, 8), 1, 2, 2, 2, "bf16", odd=1),
    _mfma((17, 30), 2, 1, 2, 1, "fp32", odd=0),
    _mfma((2, 4), 1, 4, 3, 1, "fp16", odd=0),
    _mfma_split((17, 30), 2, 2, 3, "bf16", odd=1),
    _persistent_split(),
)
EVERY_CASE: tuple[AnyCase, ...] = (*CASES, *WORKLOAD_CASES)


class Launch:
    """A probe with its data in place."""

    def __init__(self, case: Case, probe: Probe, seed: int) -> None:
        self.case, self.probe = case, probe
        M, N = probe.M, probe.N
        problem = case.problem(probe)
        geometry = case.module.geometry(GFX950, problem, case.config)
        self.block = geometry.block
        self.grid = (2, probe.far, 1) if probe.far else geometry.grid
        before_last = _GRID_X * (probe.far - 1)
        group_rows = N // (before_last + 1)
        self.rows = np.arange(before_last * group_rows if probe.far else 0, N)
        generator = torch.Generator().manual_seed(seed)
        self.x = self._draw("x", M, generator)
        self.w = self._draw("w", len(self.rows), generator)
        self.bias: Tensor | None = None
        if probe.bias != "none":
            size = linear_reference64(*self.x, *self.w).nan_to_num(0).abs().mean()
            drawn = torch.randn(len(self.rows), generator=generator, dtype=torch.float64) * size
            self.bias = drawn.to(_DTYPES[probe.bias])
        self.dtype = _DTYPES[case.out_dtype]
        scalars = case.module.scalars(GFX950, problem, case.config)
        self._args = PackedArgs(case.module.args, scalars)
        self._place(N)

    def _draw(self, of: str, rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Random data; where it is to have NaN, about a quarter of the rows have one."""
        where, what = self.probe.nan
        share = {"payload": 0.3 / self.probe.K, "scale": 10 / self.probe.K}
        options = dict(self.probe.draw)
        if where == of and what in share:
            options[f"nan_{what}"] = share[what]
        payload, scale = random_mx(rows, self.probe.K, generator, **options)
        if (where, what) == (of, "start"):
            payload.view(torch.uint8)[1::2, :32] = 0x7F
        elif (where, what) == (of, "first scale"):
            scale.view(torch.uint8)[1::2, 0] = 255
        elif (where, what) == (of, "every scale"):
            scale.view(torch.uint8).fill_(255)
        return payload, scale

    def _place(self, N: int) -> None:
        tensors = {
            "xq": self.x[0],
            "xs": self.x[1],
            "wq": self.w[0],
            "ws": self.w[1],
            "bias": self.bias,
        }
        spec, problem = self.case.spec, self.case.problem(self.probe)
        told = GFX950, problem, self.case.config
        shared = dict.fromkeys(_COUNTERS, 4 * spec.counters(*told))
        shared["sums"] = spec.workspace_bytes(*told)
        self._shared: dict[str, np.ndarray[Any, Any]] = {}
        addresses, regions, self._memory = [], [], []
        for arg in self.case.module.pointers:
            values = tensors.get(arg.name)
            if arg.name == "y":
                memory = Memory(self.probe.M * N * self.dtype.itemsize)
                self._y = memory.array().reshape(self.probe.M, N, self.dtype.itemsize)
            elif arg.name in shared:
                memory = Memory(shared[arg.name])
                self._shared[arg.name] = memory.array()
            elif values is None:
                addresses.append(0)
                continue
            else:
                raw = values.view(torch.uint8).numpy().reshape(len(values), -1)
                of_x = arg.name.startswith("x")
                memory = Memory(raw.size if of_x else N * raw.shape[1])
                placed = memory.array().reshape(-1, raw.shape[1])
                placed[slice(None) if of_x else self.rows] = raw
            self._memory.append(memory)
            addresses.append(memory.address)
            regions.append(Region(arg.name, memory.address, memory.size, arg.access))
        self._args.set_pointers(*addresses)
        self._regions = regions

    def run(self, program: Program, strict: bool = True) -> None:
        """Launch and compare.

        Raises:
            SimulatorError: the simulator found a mistake.
            AssertionError: the result is wrong.
        """
        self._y[:, self.rows] = _POISON
        for name, values in self._shared.items():
            values[:] = 0 if name in _COUNTERS else _NAN
        probe, module = self.probe, self.case.module
        options = SimOptions(
            strict,
            probe.schedule,
            probe.seed,
            1,
            _MAX_STEPS,
            delay=probe.delay,
            first_group=2 * (probe.far - 1) if probe.far else 0,
            finite_scales=probe.finite_scales,
            coherence=probe.coherence,
        )
        program.launch(
            module.symbol, self.grid, self.block, self._args.to_bytes(), 0, self._regions, options
        )
        out = torch.from_numpy(np.ascontiguousarray(self._y[:, self.rows])).view(self.dtype)
        assert_close_to_reference(out.squeeze(-1), *self.x, *self.w, self.bias, underflow=2.0**-126)
        left = (values for name, values in self._shared.items() if name in _COUNTERS)
        assert not any(values.any() for values in left), "counters are left"


def runs(case: AnyCase, image: bytes) -> Iterator[tuple[AnyLaunch, Program]]:
    """The launches of a code object; where waves begin with arguments in registers one more, on
    firmware that does not know of that."""
    program = Program.from_image(image)
    for launch in case.launches:
        yield launch, program
    if program.kernel(case.module.symbol).descriptor.preload_dwords:
        yield case.launches[0], Program.from_image(without_preload(image))


def verdict(case: AnyCase, image: bytes) -> tuple[str, str]:
    """What catches a mutant of a code object, and its message; both empty if nothing does."""
    for launch, program in runs(case, image):
        try:
            launch.run(program)
        except SimulatorError as error:
            kind = f" ({error.kind})" if error.kind else ""
            return type(error).__name__ + kind, str(error)
        except AssertionError as error:
            return "wrong result", str(error)
    return "", ""
