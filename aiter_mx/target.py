"""What a call runs on: an architecture, and the runtime that launches on it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

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
    """

    arch: str
    runtime: str
    cu_num: int
    wave_size: int
    name: str


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


def target_of(device: torch.device) -> Target:
    """The target that tensors on ``device`` run on.

    Raises:
        ValueError: a device that is neither a CPU nor a CUDA/ROCm GPU, or the environment asks for
            a simulator that there is not.
    """
    if device.type == "cpu":
        return cpu_target()
    if device.type == "cuda":
        import torch

        return gpu_target(torch.cuda.current_device() if device.index is None else device.index)
    raise ValueError(f"tensors must be on a GPU or on the CPU, got device {device}")
