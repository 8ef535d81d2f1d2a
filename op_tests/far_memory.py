"""Memory of the host at addresses that show what 32 bits lose."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np
import torch


class Memory:
    """Zeroed memory that is reserved and not there before it is touched.

    Its middle is at a multiple of 4 GiB, so that addresses within it differ in their high words.
    """

    _next = 0x2000_0000_0000
    _libc = ctypes.CDLL(None, use_errno=True)
    _libc.mmap.restype = ctypes.c_void_p

    def __init__(self, size: int) -> None:
        self.size = size
        pages = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE + 2 * mmap.PAGESIZE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000 | 0x100000  # NORESERVE, no clobber
        for _ in range(1000):
            middle = Memory._next
            Memory._next += (pages // 2 >> 32) + 2 << 32
            self.address = middle - size // 2 // 16 * 16
            start = self.address // mmap.PAGESIZE * mmap.PAGESIZE
            found = self._libc.mmap(
                ctypes.c_void_p(start),
                ctypes.c_size_t(pages),
                mmap.PROT_READ | mmap.PROT_WRITE,
                flags,
                -1,
                ctypes.c_long(0),
            )
            if found == start:
                return
        raise MemoryError(f"no {size} bytes of address space: errno {ctypes.get_errno()}")

    def array(self) -> np.ndarray[Any, Any]:
        """The bytes."""
        memory = memoryview((ctypes.c_uint8 * self.size).from_address(self.address))
        return np.frombuffer(memory, np.uint8)


def across(tensor: torch.Tensor) -> torch.Tensor:
    """The same, with its middle at a multiple of 4 GiB, where addresses carry."""
    memory = Memory(max(tensor.nbytes, 1)).array()[: tensor.nbytes]
    return torch.from_numpy(memory).view(tensor.dtype).view(tensor.shape).copy_(tensor)
