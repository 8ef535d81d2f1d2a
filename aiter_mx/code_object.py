"""Reads an AMDGPU code object: what each kernel uses, and how a wave of it starts.

Layouts are those of LLVM's AMDGPU usage guide (code object version 5 and 6, kernel descriptor,
``NT_AMDGPU_METADATA`` note) and of the System V ELF specification.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from aiter_mx.errors import LaunchError

_SIMDS_PER_CU = 4
_MAX_WAVES_PER_SIMD = 8
_VGPRS_PER_SIMD_LANE = 512
_VGPR_GRANULE = 8
_SGPRS_PER_SIMD = 800
LDS_BYTES = 160 * 1024  # of a compute unit
_LDS_GRANULE = 1280
_WAVE_SIZE = 64

_EM_AMDGPU = 224
# e_flags: the machine in the low byte, then two bits each of XNACK and SRAM-ECC. Hand-written code
# objects name their target nowhere else.
_MACHINES = {
    0x30: "gfx908",
    0x3F: "gfx90a",
    0x40: "gfx940",
    0x41: "gfx1100",
    0x4C: "gfx942",
    0x4E: "gfx1201",
    0x4F: "gfx950",
}
_FEATURES = ((8, "xnack"), (10, "sramecc"))
_FEATURE_SIGNS = ("", "", "-", "+")
_NT_AMDGPU_METADATA = 32
_SHT_SYMTAB, _SHT_RELA, _SHT_NOTE, _SHT_NOBITS, _SHT_DYNSYM = 2, 4, 7, 8, 11
_STT_FUNC = 2
_SHF_ALLOC = 2


@dataclass(frozen=True)
class KernelArg:
    """One entry of the kernel-argument segment; ``value_kind`` is the metadata's own word."""

    offset: int
    size: int
    value_kind: str
    name: str = ""


@dataclass(frozen=True)
class Descriptor:
    """The kernel descriptor's fields that decide how a wave starts.

    Attributes:
        entry: address of the first instruction, in the code object's own address space.
        rsrc1, rsrc2, rsrc3: the ``COMPUTE_PGM_RSRC`` words.
        properties: ``KERNEL_CODE_PROPERTIES``, which SGPRs are set up.
        preload_dwords, preload_offset: kernel arguments copied to SGPRs, in dwords.
    """

    entry: int
    rsrc1: int
    rsrc2: int
    rsrc3: int
    properties: int
    preload_dwords: int
    preload_offset: int


@dataclass(frozen=True)
class KernelInfo:
    """A kernel of a code object.

    Attributes:
        name: as a launch names it.
        vgprs: vector registers a lane, accumulation registers included (one unified file).
        agprs: accumulation registers among them.
        sgprs: scalar registers a wave.
        vgpr_spills, sgpr_spills: registers spilled.
        lds_bytes: static LDS of a workgroup.
        scratch_bytes: private memory of a lane.
        kernarg_bytes: length of the kernel-argument segment.
        max_workgroup: most lanes that a workgroup may have.
        args: the segment's entries, hidden ones included.
        descriptor: how a wave starts.
    """

    name: str
    vgprs: int
    agprs: int
    sgprs: int
    vgpr_spills: int
    sgpr_spills: int
    lds_bytes: int
    scratch_bytes: int
    kernarg_bytes: int
    max_workgroup: int
    args: tuple[KernelArg, ...]
    descriptor: Descriptor


@dataclass(frozen=True)
class Segment:
    """A section that is part of the loaded image; ``data`` is empty-padded for ``.bss``."""

    name: str
    address: int
    data: bytes


@dataclass(frozen=True)
class Relocation:
    """Eight bytes at ``address`` that become ``kind``'s function of symbol value and addend."""

    address: int
    kind: int
    symbol: int
    addend: int


@dataclass(frozen=True)
class CodeObject:
    """A parsed code object.

    Attributes:
        target: architecture with its features, as in ``gfx950`` or ``gfx950:xnack-``.
        kernels: by name.
        segments: what is loaded into memory, by address.
        functions: address and size in bytes of each function, kernels among them.
        relocations: what the loader patches.
    """

    target: str
    kernels: Mapping[str, KernelInfo]
    segments: tuple[Segment, ...]
    functions: Mapping[str, tuple[int, int]]
    relocations: tuple[Relocation, ...]

    @property
    def arch(self) -> str:
        """The architecture without features."""
        return self.target.split(":")[0]


@dataclass(frozen=True)
class _Section:
    name: str
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int


@dataclass(frozen=True)
class _Symbol:
    name: str
    kind: int
    address: int
    size: int


def occupancy(kernel: KernelInfo, block: int = 0, shared_bytes: int = 0) -> int:
    """Waves of ``kernel`` that one SIMD of a gfx950 holds at once, 0 when it cannot run.

    Args:
        kernel: what it uses.
        block: lanes of a workgroup; the kernel's maximum when 0.
        shared_bytes: dynamic LDS added to the static LDS.
    """
    by_vgprs = _VGPRS_PER_SIMD_LANE // _round_up(max(kernel.vgprs, 1), _VGPR_GRANULE)
    by_sgprs = _SGPRS_PER_SIMD // max(kernel.sgprs, 1)
    waves = min(_MAX_WAVES_PER_SIMD, by_vgprs, by_sgprs)
    lds = kernel.lds_bytes + shared_bytes
    if not lds:
        return waves
    groups = LDS_BYTES // _round_up(lds, _LDS_GRANULE)
    waves_per_group = -(-(block or kernel.max_workgroup) // _WAVE_SIZE)
    return min(waves, -(-groups * waves_per_group // _SIMDS_PER_CU))


def resident(kernel: KernelInfo, block: int, shared_bytes: int = 0) -> int:
    """Workgroups that a compute unit holds at once, as SIMDs have room; arguments as above."""
    waves = -(-block // _WAVE_SIZE)
    return max(1, occupancy(kernel, block, shared_bytes) * _SIMDS_PER_CU // waves)


def parse_code_object(image: bytes) -> CodeObject:
    """Parse the ELF image of an AMDGPU code object.

    Raises:
        LaunchError: the image is not one, is truncated, or has no kernel metadata.
    """
    try:
        return _parse(image)
    except (struct.error, IndexError, KeyError, ValueError, TypeError) as error:
        raise LaunchError(
            f"not a whole AMDGPU code object ({len(image)} bytes): {type(error).__name__}: {error}"
        ) from error


def _parse(image: bytes) -> CodeObject:
    if image[:6] != b"\x7fELF\x02\x01":
        raise LaunchError(
            f"expected a 64-bit little-endian ELF code object, got {image[:8]!r}; "
            "an offload bundle must be unbundled (--no-gpu-bundle-output)"
        )
    (machine,) = struct.unpack_from("<H", image, 18)
    if machine != _EM_AMDGPU:
        raise LaunchError(f"expected an AMDGPU ELF (machine {_EM_AMDGPU}), got machine {machine}")
    sections = _sections(image)
    metadata = _metadata(image, sections)
    symbols = {s.name: s for section in sections for s in _symbols(image, sections, section)}
    segments = tuple(
        Segment(s.name, s.address, _section_data(image, s))
        for s in sorted(sections, key=lambda s: s.address)
        if s.flags & _SHF_ALLOC and s.size
    )
    kernels = {
        entry[".name"]: _kernel(entry, symbols[entry[".symbol"]].address, segments)
        for entry in metadata["amdhsa.kernels"]
    }
    target = _target(image, metadata)
    functions = {s.name: (s.address, s.size) for s in symbols.values() if s.kind == _STT_FUNC}
    return CodeObject(
        target,
        MappingProxyType(kernels),
        segments,
        MappingProxyType(functions),
        tuple(_relocations(image, sections)),
    )


def _target(image: bytes, metadata: Mapping[str, Any]) -> str:
    """The target that the metadata names, or else the ELF header's flags."""
    if triple := metadata.get("amdhsa.target"):
        return str(triple[triple.index("gfx") :])
    (flags,) = struct.unpack_from("<I", image, 48)
    machine = flags & 0xFF
    if machine not in _MACHINES:
        known = ", ".join(f"{number:#x} ({name})" for number, name in _MACHINES.items())
        raise LaunchError(
            f"the code object's metadata names no target, and machine {machine:#x} of its ELF "
            f"flags is none of {known}"
        )
    signs = ((name, _FEATURE_SIGNS[flags >> bit & 3]) for bit, name in _FEATURES)
    return ":".join([_MACHINES[machine], *(name + sign for name, sign in signs if sign)])


def _kernel(entry: Mapping[str, Any], address: int, segments: tuple[Segment, ...]) -> KernelInfo:
    args = tuple(
        KernelArg(arg[".offset"], arg[".size"], arg[".value_kind"], arg.get(".name", ""))
        for arg in entry.get(".args", ())
    )
    return KernelInfo(
        name=entry[".name"],
        vgprs=entry[".vgpr_count"],
        agprs=entry.get(".agpr_count", 0),
        sgprs=entry[".sgpr_count"],
        vgpr_spills=entry.get(".vgpr_spill_count", 0),
        sgpr_spills=entry.get(".sgpr_spill_count", 0),
        lds_bytes=entry[".group_segment_fixed_size"],
        scratch_bytes=entry[".private_segment_fixed_size"],
        kernarg_bytes=entry[".kernarg_segment_size"],
        max_workgroup=entry[".max_flat_workgroup_size"],
        args=args,
        descriptor=_descriptor(address, segments),
    )


def _descriptor(address: int, segments: tuple[Segment, ...]) -> Descriptor:
    for segment in segments:
        if segment.address <= address < segment.address + len(segment.data):
            at = address - segment.address
            (entry,) = struct.unpack_from("<q", segment.data, at + 16)
            rsrc3, rsrc1, rsrc2, properties, preload = struct.unpack_from(
                "<IIIHH", segment.data, at + 44
            )
            return Descriptor(
                address + entry, rsrc1, rsrc2, rsrc3, properties, preload & 0x7F, preload >> 7
            )
    raise LaunchError(f"kernel descriptor at {address:#x} is in no section of the code object")


def _sections(image: bytes) -> list[_Section]:
    (table,) = struct.unpack_from("<Q", image, 40)
    size, count, names_index = struct.unpack_from("<HHH", image, 58)
    raw = [struct.unpack_from("<IIQQQQIIQQ", image, table + i * size) for i in range(count)]
    names = raw[names_index][4]
    return [_Section(_string(image, names + r[0]), r[1], r[2], r[3], r[4], r[5], r[6]) for r in raw]


def _section_data(image: bytes, section: _Section) -> bytes:
    if section.kind == _SHT_NOBITS:
        return bytes(section.size)
    data = image[section.offset : section.offset + section.size]
    if len(data) != section.size:
        raise LaunchError(f"the code object ends inside section {section.name}")
    return data


def _symbols(image: bytes, sections: list[_Section], section: _Section) -> Iterator[_Symbol]:
    if section.kind in (_SHT_SYMTAB, _SHT_DYNSYM):
        names = sections[section.link].offset
        for at in range(section.offset, section.offset + section.size, 24):
            name, info, _, _, address, size = struct.unpack_from("<IBBHQQ", image, at)
            yield _Symbol(_string(image, names + name), info & 15, address, size)


def _relocations(image: bytes, sections: list[_Section]) -> Iterator[Relocation]:
    for section in sections:
        if section.kind == _SHT_RELA and section.flags & _SHF_ALLOC:
            symbols = list(_symbols(image, sections, sections[section.link]))
            for at in range(section.offset, section.offset + section.size, 24):
                address, info, addend = struct.unpack_from("<QQq", image, at)
                index = info >> 32
                symbol = symbols[index].address if index else 0
                yield Relocation(address, info & 0xFFFFFFFF, symbol, addend)


def _metadata(image: bytes, sections: list[_Section]) -> dict[str, Any]:
    for section in sections:
        if section.kind != _SHT_NOTE:
            continue
        at, end = section.offset, section.offset + section.size
        while at < end:
            name_size, size, kind = struct.unpack_from("<III", image, at)
            data = at + 12 + _round_up(name_size, 4)
            if kind == _NT_AMDGPU_METADATA:
                found: dict[str, Any] = _unpack(image, data)[0]
                return found
            at = data + _round_up(size, 4)
    raise LaunchError("the code object has no AMDGPU metadata note")


def _string(image: bytes, at: int) -> str:
    return image[at : image.index(0, at)].decode()


def _round_up(value: int, to: int) -> int:
    return -(-value // to) * to


_MSGPACK_NUMBERS = {
    0xCA: ">f",
    0xCB: ">d",
    0xCC: ">B",
    0xCD: ">H",
    0xCE: ">I",
    0xCF: ">Q",
    0xD0: ">b",
    0xD1: ">h",
    0xD2: ">i",
    0xD3: ">q",
}
_MSGPACK_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
_MSGPACK_SIZED = {
    0xC4: ("bytes", ">B"),
    0xC5: ("bytes", ">H"),
    0xC6: ("bytes", ">I"),
    0xD9: ("str", ">B"),
    0xDA: ("str", ">H"),
    0xDB: ("str", ">I"),
    0xDC: ("array", ">H"),
    0xDD: ("array", ">I"),
    0xDE: ("map", ">H"),
    0xDF: ("map", ">I"),
}


def _unpack(data: bytes, at: int) -> tuple[Any, int]:
    """One MessagePack value at ``at``, and where the next one starts."""
    tag = data[at]
    at += 1
    if tag < 0x80:
        return tag, at
    if tag >= 0xE0:
        return tag - 256, at
    if tag in _MSGPACK_CONSTANTS:
        return _MSGPACK_CONSTANTS[tag], at
    if tag in _MSGPACK_NUMBERS:
        layout = _MSGPACK_NUMBERS[tag]
        return struct.unpack_from(layout, data, at)[0], at + struct.calcsize(layout)
    if tag < 0xC0:
        kind, size = ("map", tag & 15) if tag < 0x90 else ("array", tag & 15)
        if tag >= 0xA0:
            kind, size = "str", tag & 31
    elif tag in _MSGPACK_SIZED:
        kind, layout = _MSGPACK_SIZED[tag]
        (size,) = struct.unpack_from(layout, data, at)
        at += struct.calcsize(layout)
    else:
        raise LaunchError(f"MessagePack tag {tag:#x} in the code object's metadata is not known")
    return _unpack_body(data, at, kind, size)


def _unpack_body(data: bytes, at: int, kind: str, size: int) -> tuple[Any, int]:
    if kind in ("str", "bytes"):
        raw = data[at : at + size]
        return (raw.decode() if kind == "str" else raw), at + size
    items = []
    for _ in range(size * 2 if kind == "map" else size):
        item, at = _unpack(data, at)
        items.append(item)
    if kind == "map":
        return dict(zip(items[::2], items[1::2], strict=True)), at
    return items, at
