"""A driver that gives Triton a simulated gfx950, for launches on CPU tensors.

Triton compiles for gfx950 without a GPU. Inside ``triton_launches`` its runtime asks this driver
for the target, loads code objects into it and launches them, autotuning included: configurations
are compared by the wave instructions that they execute, as nothing here takes silicon's time.
"""

from __future__ import annotations

import gc
import struct
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from aiter_mx.code_object import LDS_BYTES
from aiter_mx.errors import LaunchError
from aiter_mx.forks import Lock
from aiter_mx.region import Region
from aiter_mx.sim.program import Program, SimOptions
from aiter_mx.sim.report import LaunchReport

_DEVICE = 950  # apart from the numbers of GPUs, as Triton keeps kernels by device
_MAX_LANES = 1024
_PROPERTIES = {
    "max_shared_mem": LDS_BYTES,
    "multiprocessor_count": 256,
    "warpSize": 64,
    "arch": "gfx950",
    "max_num_regs": 512,
    "max_threads_per_sm": 2048,
    "sm_clock_rate": 2_400_000,
    "mem_clock_rate": 2_000_000,
    "mem_bus_width": 8192,
    "cooperativeLaunch": 1,
}

_lock = Lock()
# Triton's own driver, then those of the blocks that are open, which threads may leave in any order.
_nested: list[Any] = []


@contextmanager
def triton_launches(
    on_report: Callable[[LaunchReport], None] = lambda report: None,
    options: SimOptions | None = None,
) -> Iterator[None]:
    """Run launches of ``@triton.jit`` kernels on CPU tensors in the simulator.

    Triton has one active driver in a process, so that this holds for all its threads.

    Args:
        on_report: called with what each launch did.
        options: how to simulate; the environment's when None.
    """
    from triton.runtime import driver

    mine = _Driver(on_report, options)
    with _lock:
        if not _nested:
            _nested.append(driver._active)
        _nested.append(mine)
        driver.set_active(mine)
    try:
        yield
    finally:
        with _lock:
            _nested.remove(mine)
            driver._active = _nested[-1]
            if len(_nested) == 1:
                _nested.clear()


class _Utils:
    """What Triton's compiler asks of a driver's extension module."""

    def get_device_properties(self, device: int) -> dict[str, Any]:
        return dict(_PROPERTIES)

    def load_binary(
        self, name: str, image: bytes, shared_bytes: int, device: int
    ) -> tuple[None, tuple[Program, str], int, int, int]:
        program = Program.from_image(image)
        info = program.kernel(name)
        # no module: a kernel that has one asks the driver of the day to unload it when it is
        # collected, and outlives this driver
        return None, (program, name), info.vgprs, info.vgpr_spills, _MAX_LANES


class _Driver:
    """The interface of ``triton.backends.driver.GPUDriver`` as far as Triton's runtime uses it."""

    def __init__(
        self, on_report: Callable[[LaunchReport], None], options: SimOptions | None
    ) -> None:
        self.utils = _Utils()
        self.options = options
        self._on_report = on_report
        self._instructions = 0

    def launcher_cls(self, source: Any, metadata: Any) -> _Launcher:
        return _Launcher(source, metadata)

    def done(self, report: LaunchReport) -> None:
        """Take notice of a launch."""
        self._instructions += report.instructions
        self._on_report(report)

    def get_current_device(self) -> int:
        return _DEVICE

    def set_current_device(self, device: int) -> None:
        """There is one device."""

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("hip", "gfx950", 64)

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")

    def map_python_to_cpp_type(self, kind: str) -> str:
        return kind

    def get_benchmarker(self) -> Callable[..., Any]:
        def instructions(call: Callable[[], Any], *, quantiles: Any = None, **_: Any) -> Any:
            self._instructions = 0
            call()
            count = float(self._instructions)
            return [count] * len(quantiles) if quantiles else count

        return instructions

    def get_empty_cache_for_benchmark(self) -> None:
        """Nothing is cached."""

    def clear_cache(self, cache: Any) -> None:
        """Nothing is cached."""


class _Launcher:
    """Launches one compiled kernel."""

    def __init__(self, source: Any, metadata: Any) -> None:
        from triton.backends.driver import expand_signature

        self._signature = tuple(source.signature.values())
        expanded = expand_signature(self._signature, None, "tensordesc")
        self._kinds = [kind for kind in _flat(expanded) if kind != "constexpr"]
        self._metadata = metadata

    def __call__(
        self, x: int, y: int, z: int, stream: int, function: tuple[Program, str], packed: Any,
        launch_metadata: Any, enter: Any, leave: Any, *arguments: Any,
    ) -> None:  # fmt: skip
        import torch
        from triton.runtime import driver

        active = driver.active
        program, name = function
        metadata = self._metadata
        if len(arguments) != len(self._signature):
            raise LaunchError(
                f"the compiled kernel {name} takes {len(self._signature)} arguments, "
                f"constexpr ones among them, got {len(arguments)}"
            )
        values = [value for pair in zip(self._signature, arguments, strict=True)
                  for value in _values(*pair)]  # fmt: skip
        groups = x * y * z
        if not groups:
            return
        for size in (metadata.global_scratch_size, metadata.profile_scratch_size):
            values.append(torch.zeros(groups * size, dtype=torch.uint8) if size else 0)
        kinds = [*self._kinds, "*u8", "*u8"]
        kernarg, regions = _packed(program, name, kinds, values)
        if enter is not None:
            enter(launch_metadata)
        report = program.launch(
            name,
            (x, y, z),
            (64 * metadata.num_warps, 1, 1),
            kernarg,
            metadata.shared,
            regions,
            active.options,
        )
        active.done(report)
        if leave is not None:
            leave(launch_metadata)


def _flat(kinds: Any) -> Iterator[str]:
    for kind in kinds:
        if isinstance(kind, tuple):
            yield from _flat(kind)
        else:
            yield kind


def _values(kind: Any, value: Any) -> Iterator[Any]:
    """What an argument is to a kernel: a descriptor is its base, shape, strides and flags."""
    from triton.backends.driver import decompose_descriptor

    if isinstance(kind, tuple):
        for pair in zip(kind, value, strict=True):
            yield from _values(*pair)
    elif kind.startswith("tensordesc"):
        yield from decompose_descriptor(value)
    elif kind != "constexpr":
        yield value


def _packed(
    program: Program, name: str, kinds: Sequence[str], values: Sequence[Any]
) -> tuple[bytes, list[Region]]:
    """The argument segment as the code object lays it out, and the memory that it points to."""
    info = program.kernel(name)
    visible = [arg for arg in info.args if not arg.value_kind.startswith("hidden_")]
    if len(values) != len(visible):
        raise LaunchError(
            f"kernel {name} takes {len(visible)} arguments, Triton gives {len(values)}: "
            f"{', '.join(kinds)}"
        )
    segment, regions = bytearray(info.kernarg_bytes), []
    for arg, kind, value in zip(visible, kinds, values, strict=True):
        if hasattr(value, "data_ptr"):
            if getattr(value, "device", None) is not None and value.device.type != "cpu":
                raise LaunchError(
                    f"kernel {name} runs in the simulator and takes tensors on the CPU, got one on "
                    f"{value.device} for {arg.name or kind}"
                )
            if region := _region(arg.name or kind, value):
                regions.append(region)
            if kind in _ADDRESSES:
                regions += _pointed_to(arg.name or kind, value)
            value = value.data_ptr()
        if isinstance(value, float) or kind in _FLOATS:
            data = _float_bits(kind, arg.size, float(value))
        else:
            data = (int(value or 0) & (1 << 8 * arg.size) - 1).to_bytes(arg.size, "little")
        segment[arg.offset : arg.offset + arg.size] = data
    return bytes(segment), regions


def _pointed_to(name: str, tensor: Any) -> list[Region]:
    """The tensors whose addresses a tensor holds, as those of a product of groups do."""
    import torch

    held = getattr(tensor, "base", tensor)
    addresses = sorted(held[held > _LOWEST_ADDRESS].tolist())
    found = {}
    for each in gc.get_objects() if addresses else ():
        # Other subclasses may have no memory of their own.
        if type(each) not in (torch.Tensor, torch.nn.Parameter) or each.device.type != "cpu":
            continue
        region = None if each.layout != torch.strided else _region(f"what {name} points to", each)
        if region and region.address not in found:
            at = bisect_left(addresses, region.address)
            if at < len(addresses) and addresses[at] < region.address + region.size_bytes:
                found[region.address] = region
    return list(found.values())


_ADDRESSES = ("*i64", "*u64")
_LOWEST_ADDRESS = 1 << 22  # what is less are other numbers: programs begin there, then their heap
_FLOATS = ("fp16", "bf16", "fp32", "fp64", "f32", "f64")


def _float_bits(kind: str, size: int, value: float) -> bytes:
    if kind == "bf16":
        import torch

        return torch.tensor(value, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
    return struct.pack({2: "<e", 4: "<f", 8: "<d"}[size], value)


def _region(name: str, tensor: Any) -> Region | None:
    """The tensor's whole storage: a kernel may take its strides beyond the view."""
    base = getattr(tensor, "base", tensor)  # of a reinterpreted tensor
    storage = base.untyped_storage()
    if not storage.nbytes():
        return None
    return Region(name, storage.data_ptr(), storage.nbytes(), "rw")
