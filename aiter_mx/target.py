"""What a call runs on: an architecture, and the runtime that launches on it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SIMULATED_ARCHS = ("gfx950",)


@dataclass(frozen=True)
class Target:
    """A GPU (or the simulator, or neither) as dispatch sees it.

    Attributes:
        arch: compiler's name of the architecture, ``gfx950`` or ``sm_90a``; ``cpu`` without one.
        runtime: ``hip``, ``cuda``, ``sim`` or ``none``.
        cu_num: compute units (AMD) or streaming multiprocessors (NVIDIA).
        wave_size: lanes of a wave or warp.
        name: the device's own name, for people.
        exact_sums: whether kernels that add with fewer bits than fp32 are out of the question.
    """

    arch: str
    runtime: str
    cu_num: int
    wave_size: int
    name: str
    exact_sums: bool = False


CPU = Target(arch="cpu", runtime="none", cu_num=0, wave_size=1, name="CPU")
SIMULATED_GFX950 = Target(
    arch="gfx950", runtime="sim", cu_num=256, wave_size=64, name="simulated gfx950 (MI355X)"
)

_HARDWARE = {
    "gfx950": Target("gfx950", "hip", 256, 64, "AMD Instinct MI355X"),
    "sm_90a": Target("sm_90a", "cuda", 132, 32, "NVIDIA H200"),
}

ARCHS = tuple(_HARDWARE)
"""Architectures that the package has kernels for."""

_simulated = threading.local()


def hardware(arch: str) -> Target:
    """The GPU that stands for an architecture where none is present, as in building ahead.

    Raises:
        ValueError: the package has no kernels for ``arch``.
    """
    if not isinstance(arch, str) or arch not in _HARDWARE:
        raise ValueError(f"unknown architecture {arch!r}; there are {', '.join(_HARDWARE)}")
    return _HARDWARE[arch]


@contextmanager
def simulate(arch: str = "gfx950") -> Iterator[Target]:
    """Run ops on CPU tensors through the simulator, in this thread, inside the ``with`` block.

    The environment variable ``AITER_MX_SIMULATE=gfx950`` asks for the same everywhere.

    Raises:
        ValueError: the simulator has no such architecture.
    """
    target = _simulated_target(arch)
    before = getattr(_simulated, "target", None)
    _simulated.target = target
    try:
        yield target
    finally:
        _simulated.target = before


def _simulated_target(arch: str, named_by: str = "got ") -> Target:
    if arch not in SIMULATED_ARCHS:
        raise ValueError(f"the simulator runs {', '.join(SIMULATED_ARCHS)}, {named_by}{arch!r}")
    return SIMULATED_GFX950


def cpu_target() -> Target:
    """The target of CPU tensors: the simulator when it was asked for, else the CPU itself."""
    target: Target | None = getattr(_simulated, "target", None)
    if target is not None:
        return target
    arch = os.environ.get("AITER_MX_SIMULATE")
    return _simulated_target(arch, "AITER_MX_SIMULATE names ") if arch else CPU


@cache
def gpu_target(index: int) -> Target:
    """The target of GPU number ``index``, as torch numbers them."""
    import torch

    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        arch, runtime, wave_size = properties.gcnArchName.split(":")[0], "hip", 64
    else:
        arch, runtime, wave_size = f"sm_{properties.major}{properties.minor}", "cuda", 32
        if properties.major == 9:
            arch += "a"  # the architecture-specific feature set: wgmma, setmaxnreg
    return Target(arch, runtime, properties.multi_processor_count, wave_size, properties.name)


OFF = ("", "0", "false", "no", "off")
"""Values of environment variables that ask for nothing, in any case."""
ENVIRONMENT: Mapping[Any, Any] = getattr(os.environ, "_data", os.environ)
"""What ``os.environ`` stands on: asking it takes a tenth of the time, and calls ask."""


def environment_key(name: str) -> Any:
    """What ``ENVIRONMENT`` has a variable under."""
    return getattr(os.environ, "encodekey", str)(name)


EXACT_SUMS = environment_key("AITER_MX_EXACT_SUMS")


def wants_exact_sums() -> bool:
    """Whether ``AITER_MX_EXACT_SUMS`` asks for sums that are as exact as fp32's."""
    if ENVIRONMENT.get(EXACT_SUMS) is None:
        return False
    return os.environ.get("AITER_MX_EXACT_SUMS", "").lower() not in OFF


def with_sums(target: Target, exact_sums: bool | None) -> Target:
    """``target`` with exact sums or without, None for what the environment asks for.

    Raises:
        TypeError: it is none of these.
    """
    if exact_sums not in (None, False, True):
        raise TypeError(f"exact_sums must be True, False or None, got {exact_sums!r}")
    exact = wants_exact_sums() if exact_sums is None else bool(exact_sums)
    return target if exact == target.exact_sums else replace(target, exact_sums=exact)


def target_of(device: torch.device, exact_sums: bool | None = None) -> Target:
    """The target that tensors on ``device`` run on; for ``exact_sums`` see ``with_sums``.

    Raises:
        ValueError: a device that is neither a CPU nor a CUDA/ROCm GPU, or the environment asks for
            a simulator that there is not.
    """
    if device.type == "cpu":
        return with_sums(cpu_target(), exact_sums)
    if device.type == "cuda":
        import torch

        index = torch.cuda.current_device() if device.index is None else device.index
        return with_sums(gpu_target(index), exact_sums)
    raise ValueError(f"tensors must be on a GPU or on the CPU, got device {device}")
