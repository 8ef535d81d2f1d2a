"""The CUDA runtime, over cuda-bindings' driver API."""

from __future__ import annotations

import ctypes
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
from aiter_mx.kernels.spec import Geometry, TensorMap
from aiter_mx.runtimes.base import MAP_BYTES, LaunchConfig, PackedArgs

name = "cuda"

_END = 0  # CU_LAUNCH_PARAM_END, cuda.h
_MOST_SHARED_BYTES = 228 << 10  # of an SM of Hopper
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
    launch.attrs = attributes = _attributes(geometry)
    launch.numAttrs = len(attributes)
    launch.hStream = last_stream = 0
    # The driver's own entry point: the bindings would wrap each launch's arguments and status anew.
    launch_kernel = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    launch_at, function_at = ctypes.c_void_p(launch.getPtr()), ctypes.c_void_p(int(function))
    extra_at = ctypes.c_void_p(packed.address)

    def start(stream: int) -> None:
        nonlocal last_stream
        if stream != last_stream:  # setting it costs a third of a launch, and it seldom changes
            launch.hStream = last_stream = stream
        if status := launch_kernel(launch_at, function_at, None, extra_at):
            raise LaunchError(
                f"cuLaunchKernelEx: {driver.CUresult(status).name} "
                f"(grid {geometry.grid}, block {geometry.block})"
            )

    start.packed = packed  # type: ignore[attr-defined]  # lives as long as its address is used
    return start


def _attributes(geometry: Geometry) -> list[Any]:
    of, found = driver.CUlaunchAttributeID, []
    if geometry.overlaps:
        found.append(driver.CUlaunchAttribute())
        found[-1].id = of.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        found[-1].value.programmaticStreamSerializationAllowed = 1
    if geometry.carveout_bytes:
        found.append(driver.CUlaunchAttribute())
        found[-1].id = of.CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        percent = -(-100 * geometry.carveout_bytes // _MOST_SHARED_BYTES)
        found[-1].value.sharedMemCarveout = min(percent, 100)
    return found


def map_offset(function: Any, index: int) -> int:
    """Where in the buffer of arguments a tensor map lies.

    Its 64 bytes of alignment hold for the place in constant memory, of which the buffer's begin is
    no multiple: only the compiler knows.
    """
    offset, size = _checked(
        f"cuFuncGetParamInfo({index})", driver.cuFuncGetParamInfo(function, index)
    )
    if size != MAP_BYTES:
        raise LaunchError(f"argument {index} has {size} bytes, not the {MAP_BYTES} of a map")
    return int(offset)


def encode_map(described: TensorMap, address: int) -> bytes:
    """A CUtensorMap of the matrix that starts at ``address``."""
    if described.only_aligned and address % 16:
        return bytes(MAP_BYTES)
    u32, u64 = driver.cuuint32_t, driver.cuuint64_t
    swizzle = f"{described.box_bytes}B" if described.swizzled else "NONE"
    encoded = _checked(
        f"cuTensorMapEncodeTiled({described})",
        driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
            2,
            address,
            [u64(described.row_bytes), u64(described.rows)],
            [u64(described.row_bytes)],
            [u32(described.box_bytes), u32(described.box_rows)],
            [u32(1), u32(1)],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{swizzle}"),
            getattr(
                driver.CUtensorMapL2promotion,
                f"CU_TENSOR_MAP_L2_PROMOTION_L2_{described.fetch_bytes}B",
            ),
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        ),
    )
    return ctypes.string_at(int(encoded.getPtr()), MAP_BYTES)


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
    return values[0] if len(values) == 1 else values
