"""The HIP runtime, over hip-python."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from hip import hip

from aiter_mx.errors import LaunchError
from aiter_mx.kernels.spec import Geometry
from aiter_mx.runtimes.base import LaunchConfig, PackedArgs

name = "hip"

_END = 3  # HIP_LAUNCH_PARAM_END, hip_runtime_api.h
_SUCCESS = hip.hipError_t.hipSuccess

current_stream: Callable[[int], int] = (
    torch._C._cuda_getCurrentRawStream
)  # ROCm builds keep the name


def is_capturing(device: int) -> bool:
    """Whether torch's current stream is being captured into a graph."""
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def load(image: bytes, device: int) -> Any:
    """Load a code object on a device."""
    with torch.cuda.device(device):
        return _checked("hipModuleLoadData", hip.hipModuleLoadData(image))


def get_function(module: Any, symbol: str, shared_bytes: int) -> Any:
    """The kernel named ``symbol``; HIP needs no leave for ``shared_bytes`` of dynamic LDS."""
    return _checked(
        f"hipModuleGetFunction({symbol})", hip.hipModuleGetFunction(module, symbol.encode())
    )


def bind(function: Any, geometry: Geometry, args: PackedArgs) -> Callable[[int], None]:
    """A function of a stream handle that launches with what ``args`` then holds."""
    # A tuple of ctypes values as `extra` would cost some 30 us a launch; an address costs 2.
    config = LaunchConfig(args, end=_END)
    launch = partial(
        hip.hipModuleLaunchKernel, function, *geometry.grid, *geometry.block, geometry.shared_bytes
    )

    def start(stream: int) -> None:
        (status,) = launch(stream, None, config.address)
        if status is not _SUCCESS:
            raise LaunchError(
                f"hipModuleLaunchKernel: {status.name} "
                f"(grid {geometry.grid}, block {geometry.block})"
            )

    return start


def _checked(what: str, result: tuple[Any, ...]) -> Any:
    status, *values = result
    if status != _SUCCESS:
        raise LaunchError(f"{what}: {status.name}")
    return values[0] if values else None
