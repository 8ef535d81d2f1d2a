"""The interface of a runtime, and the argument buffer that all of them launch with."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from aiter_mx.kernels.spec import Arg, Geometry, TensorMap
from aiter_mx.region import Region

_FORMAT = {"pointer": "P", "i32": "i", "i64": "q", "f32": "f"}
MAP_BYTES = 128  # of a CUtensorMap, cuda.h


class PackedArgs:
    """Kernel arguments laid out as the compiler expects them, written in place before a launch.

    One instance belongs to one thread: a second thread patching it between a patch and its launch
    would send its own pointers.

    Attributes:
        address: where the buffer is; it never moves.
        size_bytes: the kernel-argument segment's length.
        regions: what the pointers may reach; only the simulator reads it.
        set_pointers: writes the pointer arguments, in order; 0 is a null pointer.
        set_maps: each writes a tensor map behind the others, where there are any.
    """

    def __init__(
        self, args: tuple[Arg, ...], scalars: tuple[int | float, ...], maps_at: Sequence[int] = ()
    ) -> None:
        layout = struct.Struct("@" + "".join(_FORMAT[arg.kind] for arg in args))
        places = [place for place, arg in enumerate(args) if arg.kind == "pointer"]
        pointers, first = len(places), min(places, default=0)
        if places != list(range(first, first + pointers)):
            raise ValueError("a kernel's pointers must follow each other")
        if len(scalars) != len(args) - pointers:
            raise ValueError(
                f"the kernel takes {len(args) - pointers} scalars, got {len(scalars)}: {scalars}"
            )
        self.size_bytes = max([layout.size, *(at + MAP_BYTES for at in maps_at)])
        self._buffer = ctypes.create_string_buffer(self.size_bytes)
        layout.pack_into(self._buffer, 0, *scalars[:first], *([0] * pointers), *scalars[first:])
        self.address = ctypes.addressof(self._buffer)
        self.regions: tuple[Region, ...] = ()
        ahead = "".join(_FORMAT[arg.kind] for arg in args[:first])
        self.set_pointers = partial(
            struct.Struct(f"@{pointers}P").pack_into,
            self._buffer,
            struct.calcsize(f"@{ahead}0P"),
        )
        set_map = struct.Struct(f"{MAP_BYTES}s").pack_into
        self.set_maps = [partial(set_map, self._buffer, at) for at in maps_at]

    def to_bytes(self) -> bytes:
        """A copy of the buffer."""
        return self._buffer.raw


class LaunchConfig:
    """The ``extra`` array through which HIP's and CUDA's driver calls take packed arguments.

    Attributes:
        address: of the array; valid as long as this object lives.
    """

    # HIP_LAUNCH_PARAM_* and CU_LAUNCH_PARAM_* agree on these two; their end markers differ.
    _BUFFER_POINTER, _BUFFER_SIZE = 1, 2

    def __init__(self, args: PackedArgs, end: int) -> None:
        self._args = args
        self._size = ctypes.c_size_t(args.size_bytes)
        self._extra = (ctypes.c_void_p * 5)(
            self._BUFFER_POINTER,
            args.address,
            self._BUFFER_SIZE,
            ctypes.addressof(self._size),
            end,
        )
        self.address = ctypes.addressof(self._extra)


class Runtime(Protocol):
    """Loads code objects and launches their kernels on a stream."""

    name: str

    def load(self, image: bytes, device: int) -> Any:
        """Load a code object on a device and return its module."""

    def get_function(self, module: Any, symbol: str, shared_bytes: int) -> Any:
        """The kernel named ``symbol``, allowed to use ``shared_bytes`` of dynamic LDS."""

    def bind(self, function: Any, geometry: Geometry, args: PackedArgs) -> Callable[[int], None]:
        """A function of a stream handle that launches the kernel with what ``args`` then holds."""

    def current_stream(self, device: int) -> int:
        """Handle of torch's current stream on a device."""

    def is_capturing(self, device: int) -> bool:
        """Whether torch's current stream is being captured into a graph."""

    def map_offset(self, function: Any, index: int) -> int:
        """Where argument ``index``, a tensor map, lies; of ``cuda`` alone, as are such kernels."""

    def encode_map(self, described: TensorMap, address: int) -> bytes:
        """A tensor map of the matrix at an address; of ``cuda`` alone."""
