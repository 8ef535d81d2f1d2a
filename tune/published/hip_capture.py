"""A stand-in for the HIP runtime that notes launches: kernels and their arguments without a GPU.

It has to be loaded before whatever links against ``libamdhip64``, which then finds this one.
"""

from __future__ import annotations

import ctypes
import struct
import subprocess
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

from aiter_mx.code_object import KernelInfo
from aiter_mx.sim.program import Program
from tune.published.run import Launch

_NAME = "libamdhip64.so.7"
_Load = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))
_Function = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.POINTER(ctypes.c_void_p)
)
_Launch = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.POINTER(ctypes.c_void_p)
)


class Capture:
    """The launches that were noted since ``take`` was last called."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._images: dict[bytes, Program] = {}
        self._modules: list[Program] = []
        self._functions: list[tuple[Program, str]] = []
        self._launches: list[Launch] = []
        self._failure: Exception | None = None  # of a hook, out of which none can be raised
        self._hooks = (
            _Load(partial(self._told, self._load)),
            _Function(partial(self._told, self._function)),
            _Launch(partial(self._told, self._launch)),
        )
        library.capture_hooks(*self._hooks)

    def take(self) -> list[Launch]:
        """The launches noted so far, which are then forgotten.

        Raises:
            Exception: what kept one from being noted.
        """
        launches, self._launches = self._launches, []
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        return launches

    def _told(self, hook: Callable[..., int], *given: Any) -> int:
        try:
            return hook(*given)
        except Exception as error:
            self._failure = error
            return 1

    def _load(self, address: int, module: Any) -> int:
        image = _elf_at(address)
        program = self._images.get(image)
        if program is None:
            program = self._images[image] = Program.from_image(image)
        self._modules.append(program)
        module[0] = len(self._modules)
        return 0

    def _function(self, module: int, name: bytes, function: Any) -> int:
        self._functions.append((self._modules[module - 1], name.decode()))
        function[0] = len(self._functions)
        return 0

    def _launch(self, function: int, *given: Any) -> int:
        *geometry, shared_bytes, arguments = given
        program, name = self._functions[function - 1]
        kernarg = _packed(program.kernel(name), arguments)
        grid, block = tuple(geometry[:3]), tuple(geometry[3:])
        launch = Launch(program, name, grid, block, shared_bytes, kernarg)
        self._launches.append(launch)
        return 0


@cache
def install(folder: Path) -> Capture:
    """Compile the stand-in into ``folder`` and load it, once in a process.

    Raises:
        RuntimeError: a HIP runtime is loaded already.
    """
    if _NAME[: _NAME.index(".so")] in Path("/proc/self/maps").read_text():
        raise RuntimeError("a HIP runtime is loaded already: install the capture before torch's")
    folder.mkdir(parents=True, exist_ok=True)
    versions, library = folder / "versions", folder / _NAME
    versions.write_text("hip_4.2 { global: *; };\n")
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-O1", f"-Wl,-soname,{_NAME}",
         f"-Wl,--version-script={versions}", "-o", str(library),
         str(Path(__file__).with_suffix(".c"))],
        check=True,
    )  # fmt: skip
    return Capture(ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL))


def _elf_at(address: int) -> bytes:
    """A 64-bit ELF image, whose section headers come last."""
    header = ctypes.string_at(address, 64)
    (sections_at,) = struct.unpack_from("<Q", header, 40)
    size, count = struct.unpack_from("<HH", header, 58)
    return ctypes.string_at(address, sections_at + size * count)


def _packed(kernel: KernelInfo, arguments: Any) -> bytes:
    shown = [arg for arg in kernel.args if not arg.value_kind.startswith("hidden_")]
    packed = bytearray(max((arg.offset + arg.size for arg in shown), default=0))
    for at, arg in enumerate(shown):
        packed[arg.offset : arg.offset + arg.size] = ctypes.string_at(arguments[at], arg.size)
    return bytes(packed)
