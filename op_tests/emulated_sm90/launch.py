"""All launches of a kernel for Hopper, as its spec has them, on the emulator."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aiter_mx.kernels.spec import Config, Geometry, KernelSpec, Module, Problem, TensorMap
from aiter_mx.paths import csrc_dir
from aiter_mx.target import hardware
from op_tests.emulated_sm90.build import library, runtime, with_lines
from op_tests.launches import POISON, Out

TARGET = hardware("sm_90a")
_RIGHTS = {"": 0, "r": 1}  # PROT_NONE, PROT_READ; else both of PROT_READ and PROT_WRITE
_MAP_MARK = 0x3A973A97  # by which runtime.cpp knows a tensor map
_MOST_SWITCHES = 100_000_000
_ALLOCATION = 512  # what torch's allocator aligns to
_FROM_AHEAD = ("xq", "xs")  # what a launch ahead of an op's first may write


class EmulatedError(Exception):
    """The kernel did what hardware would punish, or what it leaves undefined."""


@dataclass(frozen=True)
class Schedule:
    """How threads, copies and wgmmas take turns, which a seed repeats exactly.

    Attributes:
        seed: of every choice: which fiber goes on, when a copy comes and a wgmma reads.
        resident: most blocks of a grid that run interleaved; all where None. Whether
            they start together, or late and one by one, is drawn.
        guarded_ends: whether tensors end where memory ends, or begin where it begins.
    """

    seed: int
    resident: int | None = 1
    guarded_ends: bool = True


class _Kernel(ctypes.Structure):
    """An entry point, as ``Kernel`` of runtime.h has it."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("call", ctypes.c_void_p),
        ("count", ctypes.c_int),
        ("sizes", ctypes.POINTER(ctypes.c_uint)),
    )


class _Memory:
    """Bytes between pages that no one may touch; ``bytes`` is a view of them."""

    def __init__(self, size: int, align: int, at_end: bool) -> None:
        allocate = runtime().emulated_allocate
        allocate.restype = ctypes.c_void_p
        base, mapped = ctypes.c_void_p(), ctypes.c_size_t()
        given = ctypes.c_size_t(size), ctypes.c_size_t(align), int(at_end)
        address = allocate(*given, ctypes.byref(base), ctypes.byref(mapped))
        if not address:
            raise MemoryError(f"no room for {size} bytes between guards")
        self.address, self.size, self._mapping = int(address), size, (base, mapped)
        held = (ctypes.c_uint8 * max(size, 1)).from_address(self.address)
        self.bytes = torch.frombuffer(held, dtype=torch.uint8)[:size]

    def protect(self, access: str) -> None:
        assert not runtime().emulated_protect(*self._mapping, _RIGHTS.get(access, 3))

    def free(self) -> None:
        runtime().emulated_free(*self._mapping)


@contextmanager
def _placed(
    tensors: Sequence[Tensor | Out | None], room: int, counters: int, schedule: Schedule
) -> Iterator[list[_Memory | None]]:
    """Tensors in guarded memory; behind them the workspace and the counters, where there are
    any."""
    with ExitStack() as stack:

        def memory(size: int, align: int = 16) -> _Memory:
            made = _Memory(size, align, schedule.guarded_ends)
            stack.callback(made.free)
            return made

        placed: list[_Memory | None] = []
        for each in tensors:
            if isinstance(each, Out):
                made = memory(prod(each.shape) * each.dtype.itemsize)
                made.bytes.fill_(POISON)
            elif each is not None:
                made = memory(each.nbytes)
                made.bytes.copy_(each.contiguous().view(torch.uint8).flatten())
            placed.append(None if each is None else made)
        if room:
            made = memory(room, _ALLOCATION)
            generator = torch.Generator().manual_seed(schedule.seed)
            made.bytes.random_(generator=generator)
            placed.append(made)
        if counters:
            made = memory(4 * counters)
            made.bytes.zero_()
            placed.append(made)
        yield placed


def launch(
    kernel: KernelSpec,
    problem: Problem,
    config: Config,
    tensors: Sequence[Tensor | Out | None],
    schedule: Schedule,
    after: Callable[[int, Tensor], None] = lambda index, workspace: None,
    csrc: Path | None = None,
) -> list[Tensor]:
    """The results of a call, one for each ``Out`` among ``tensors``.

    What a ``wgmma`` reads before a proxy fence counts as NaN, and who wrote it is printed.

    Args:
        kernel, problem, config: what is launched; everything that the host computes comes from
            the kernel's spec.
        tensors: in the order of the kernel's pointers, without workspace and counters.
        schedule: of every launch, each of which has a seed of its own made of this one.
        after: called with the number of each launch and the workspace.
        csrc: sources to take in place of the package's.

    Raises:
        EmulatedError: something is wrong; says in which launch, block and thread, and at which
            lines.
    """
    given = TARGET, problem, config
    refusal = kernel.refusal(TARGET, problem)
    assert refusal is None, refusal
    modules = kernel.launches(*given)
    tensors = [*tensors, *[None for arg in modules[-1].pointers if arg.access == "null"]]
    room, counters = kernel.workspace_bytes(*given), kernel.counters(*given)
    with _placed(tensors, room, counters, schedule) as memories:
        workspace = memories[len(tensors)] if room else None
        for index, module in enumerate(modules):
            run = _Launch(module, given, memories, csrc or csrc_dir(), index)
            run(schedule)
            after(index, torch.empty(0) if workspace is None else workspace.bytes)
        if counters:
            left = memories[-1]
            assert left is not None and not left.bytes.any(), "counters are not zero at the end"
        made = zip(tensors, memories, strict=False)
        return [
            memory.bytes.clone().view(out.dtype).view(out.shape)
            for out, memory in made
            if isinstance(out, Out) and memory is not None
        ]


class _Launch:
    """One launch of a module over memories."""

    def __init__(
        self,
        module: Module,
        given: tuple[Any, Problem, Config],
        memories: Sequence[_Memory | None],
        csrc: Path,
        index: int,
    ) -> None:
        self.module, self.memories, self.index = module, memories, index
        self.geometry: Geometry = module.geometry(*given)
        built = library(csrc, module.sources[TARGET.arch], module.defines(*given))
        self.kernel = _Kernel.in_dll(built, f"emulated_{module.symbol}")
        self.args = self._args(given)
        expected = list(self.kernel.sizes[: self.kernel.count])
        assert [len(arg) for arg in self.args] == expected, f"parameters have {expected} bytes"

    def _args(self, given: tuple[Any, Problem, Config]) -> list[bytes]:
        pointers, scalars = iter(self.memories), iter(self.module.scalars(*given))
        types = {"i32": np.int32, "i64": np.int64, "f32": np.float32}
        args = []
        for arg in self.module.args:
            if arg.kind == "pointer":
                memory = next(pointers)
                args.append(np.uint64(0 if memory is None else memory.address).tobytes())
            else:
                args.append(np.array(next(scalars)).astype(types[arg.kind]).tobytes())
        assert not [*pointers, *scalars], "arguments and what is given for them differ"
        for describe in self.module.tensor_maps:
            args.append(_map_bytes(describe(*given), self.memories))
        return args

    def __call__(self, schedule: Schedule) -> None:
        pointers = list(zip(self.memories, self.module.pointers, strict=True))
        try:
            if self.geometry.overlaps:
                self._protect(pointers, ahead=True)
                self._run(schedule, until_wait=True)
            self._protect(pointers, ahead=False)
            self._run(schedule)
        finally:
            for memory, _ in pointers:
                if memory:
                    memory.protect("rw")

    def _protect(self, pointers: Sequence[tuple[_Memory | None, Any]], ahead: bool) -> None:
        """Take away what the kernel does not say that it does to a tensor, or what it may not do
        as long as a launch ahead of it may run."""
        for memory, arg in pointers:
            if memory is not None:
                written = arg.access != "r" or (self.index == 0 and arg.name in _FROM_AHEAD)
                memory.protect("" if ahead and written else arg.access)

    def _run(self, schedule: Schedule, until_wait: bool = False) -> None:
        """Run all blocks, or one of them up to the wait for the launch ahead."""
        held = [ctypes.create_string_buffer(len(arg) + 64) for arg in self.args]
        places = (ctypes.c_void_p * len(held))()
        for i, (arg, room) in enumerate(zip(self.args, held, strict=True)):
            places[i] = -(-ctypes.addressof(room) // 64) * 64
            ctypes.memmove(places[i], arg, len(arg))
        three, message = ctypes.c_uint * 3, ctypes.create_string_buffer(1 << 16)
        geometry = self.geometry
        resident = schedule.resident or prod(geometry.grid)
        failed = runtime().emulated_launch(
            *(ctypes.byref(self.kernel), three(*geometry.grid), three(*geometry.block)),
            *(geometry.shared_bytes, places, ctypes.c_ulonglong(schedule.seed + 1000 * self.index)),
            *(resident, ctypes.c_ulonglong(_MOST_SWITCHES), int(until_wait)),
            *(message, ctypes.c_size_t(len(message))),
        )
        said = message.value.decode()
        if said and not failed:  # pytest shows it where the test fails
            print(f"launch {self.index}, {self.module.symbol}: {with_lines(said)}\n  read as NaN")
        if failed:
            how = ctypes.create_string_buffer(400)
            runtime().emulated_schedule(how, ctypes.c_size_t(len(how)))
            when = "before the launch ahead is waited for: " if until_wait else ""
            raise EmulatedError(
                f"launch {self.index}, {self.module.symbol} {geometry.grid}: {when}"
                f"{with_lines(said)}\n  {schedule}; {how.value.decode()}"
            )


def _map_bytes(described: TensorMap, memories: Sequence[_Memory | None]) -> bytes:
    """A tensor map as ``Map`` of runtime.cpp reads it, of the 128 bytes that hardware's has."""
    memory = memories[described.pointer]
    assert memory is not None and described.rows * described.row_bytes <= memory.size
    if described.only_aligned and memory.address % 16:
        return bytes(128)
    assert not (memory.address | described.row_bytes | described.box_bytes) % 16
    assert max(described.box_rows, described.box_bytes) <= 256
    words = [memory.address, described.rows, described.row_bytes]
    words += [described.box_rows, described.box_bytes, int(described.swizzled)]
    return np.array([*words, *[0] * (15 - len(words)), _MAP_MARK], np.uint64).tobytes()
