"""The CUDA runtime, over cuda-bindings' driver API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

try:
    from cuda.bindings import driver
except ImportError as error:  # the one dependency that only NVIDIA machines have
    raise ImportError(
        "aiter_mx launches on NVIDIA GPUs through cuda-bindings: pip install 'aiter-mx[cuda]'"
    ) from error

from aiter_mx.errors import LaunchError
from aiter_mx.kernels.spec import Geometry
from aiter_mx.runtimes.base import LaunchConfig, PackedArgs

name = "cuda"

_END = 0  # CU_LAUNCH_PARAM_END, cuda.h
_SUCCESS = driver.CUresult.CUDA_SUCCESS

current_stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream


def is_capturing(device: int) -> bool:
    """Whether torch's current stream is being captured into a graph."""
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def load(image: bytes, device: int) -> Any:
    """Load a cubin into the device's primary context, which is torch's."""
    with torch.cuda.device(device):
        _ensure_context()
        return _checked("cuModuleLoadData", driver.cuModuleLoadData(image))


def get_function(module: Any, symbol: str, shared_bytes: int) -> Any:
    """The kernel named ``symbol``, allowed to use ``shared_bytes`` of dynamic shared memory."""
    function = _checked(
        f"cuModuleGetFunction({symbol})", driver.cuModuleGetFunction(module, symbol.encode())
    )
    if shared_bytes:  # beyond 48 KiB with what the kernel declares, it must be allowed to
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _checked(
            f"allowing {symbol} {shared_bytes} bytes of shared memory",
            driver.cuFuncSetAttribute(function, attribute, shared_bytes),
        )
    return function


def bind(function: Any, geometry: Geometry, args: PackedArgs) -> Callable[[int], None]:
    """A function of a stream handle that launches with what ``args`` then holds.

    It belongs to the thread that bound it: launching needs a current context.
    """
    _ensure_context()
    packed = LaunchConfig(args, end=_END)
    launch = driver.CUlaunchConfig()
    launch.gridDimX, launch.gridDimY, launch.gridDimZ = geometry.grid
    launch.blockDimX, launch.blockDimY, launch.blockDimZ = geometry.block
    launch.sharedMemBytes = geometry.shared_bytes
    if geometry.overlaps:
        attribute = driver.CUlaunchAttribute()
        attribute.id = (
            driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        )
        attribute.value.programmaticStreamSerializationAllowed = 1
        launch.attrs = [attribute]
    launch.numAttrs = int(geometry.overlaps)
    launch.hStream = last_stream = 0
    launch_kernel, success = driver.cuLaunchKernelEx, _SUCCESS

    def start(stream: int) -> None:
        nonlocal last_stream
        if stream != last_stream:  # setting it costs a third of a launch, and it seldom changes
            launch.hStream = last_stream = stream
        (status,) = launch_kernel(launch, function, 0, packed.address)
        if status is not success:
            raise LaunchError(
                f"cuLaunchKernelEx: {status.name} (grid {geometry.grid}, block {geometry.block})"
            )

    return start


def _ensure_context() -> None:
    """Give this thread torch's context if it has none yet, as a fresh thread has."""
    torch.cuda.init()
    if int(_checked("cuCtxGetCurrent", driver.cuCtxGetCurrent())):
        return
    device = _checked("cuDeviceGet", driver.cuDeviceGet(torch.cuda.current_device()))
    context = _checked("cuDevicePrimaryCtxRetain", driver.cuDevicePrimaryCtxRetain(device))
    _checked("cuCtxSetCurrent", driver.cuCtxSetCurrent(context))


def _checked(what: str, result: tuple[Any, ...]) -> Any:
    status, *values = result
    if status != _SUCCESS:
        raise LaunchError(f"{what}: {status.name}")
    return values[0] if values else None
