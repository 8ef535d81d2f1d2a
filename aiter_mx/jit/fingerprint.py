"""Knows compiled kernels again by their machine code, whatever they and their sources are called.

Names are in many places of a compiled kernel: symbol tables, notes, names of sections. What a GPU
runs is in few: instructions, constants, and what says how a wave or warp starts.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass

_EM_AMDGPU = 224
_SHT_SYMTAB, _SHT_NOBITS = 2, 8
_DESCRIPTOR = b".kd"  # how LLVM's AMDGPU usage guide names kernel descriptors, ...
_ENTRY_OFFSET = 16  # ... and where one has eight bytes of its distance from the code
_REGISTERS = 24  # sh_info of a cubin's .text holds registers above this bit, a symbol below
_NVIDIA_ROOMS = (b".text.", b".nv.info.", b".nv.constant", b".nv.shared.", b".nv.global")


@dataclass(frozen=True)
class _Section:
    name: bytes
    kind: int
    address: int
    offset: int
    size: int
    link: int
    info: int

    def data(self, image: bytes) -> bytes:
        return b"" if self.kind == _SHT_NOBITS else image[self.offset : self.offset + self.size]


def code_hash(image: bytes) -> str:
    """Hash of what an image has a GPU do; two whose kernels differ in names alone have the same.

    Args:
        image: ELF for either vendor's GPU. Of anything else it is the hash of all.
    """
    parts = _parts(image) if image[:6] == b"\x7fELF\x02\x01" else iter((image,))
    whole = hashlib.sha256()
    for part in parts:
        whole.update(struct.pack("<Q", len(part)) + part)
    return whole.hexdigest()


def _parts(image: bytes) -> Iterator[bytes]:
    (machine,) = struct.unpack_from("<H", image, 18)
    sections = _sections(image)
    if machine == _EM_AMDGPU:
        yield from _amd(image, sections)
        return
    for section in sorted(sections, key=lambda section: section.name):
        for room in filter(section.name.startswith, _NVIDIA_ROOMS):
            yield room + struct.pack("<QI", section.size, section.info >> _REGISTERS)
            yield section.data(image)


def _amd(image: bytes, sections: list[_Section]) -> Iterator[bytes]:
    """Instructions and constants, in which a kernel's descriptor says not how far it is away."""
    for section in sections:
        if section.name in (b".text", b".rodata"):
            data = bytearray(section.data(image))
            for name, address in _symbols(image, sections):
                if name.endswith(_DESCRIPTOR) and section.name == b".rodata":
                    entry = address - section.address + _ENTRY_OFFSET
                    data[entry : entry + 8] = bytes(8)
            yield bytes(data)


def _sections(image: bytes) -> list[_Section]:
    (table,) = struct.unpack_from("<Q", image, 40)
    size, count, names_index = struct.unpack_from("<HHH", image, 58)
    raw = [struct.unpack_from("<IIQQQQII", image, table + i * size) for i in range(count)]
    names = raw[names_index][4]
    return [_Section(_string(image, names + r[0]), r[1], *r[3:]) for r in raw]


def _symbols(image: bytes, sections: list[_Section]) -> Iterator[tuple[bytes, int]]:
    for section in sections:
        if section.kind == _SHT_SYMTAB:
            names = sections[section.link].offset
            for at in range(section.offset, section.offset + section.size, 24):
                name, address = struct.unpack_from("<I4xQ", image, at)
                yield _string(image, names + name), address


def _string(image: bytes, at: int) -> bytes:
    return image[at : image.index(0, at)]
