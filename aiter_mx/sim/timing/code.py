"""What each instruction of a kernel costs a compute unit, from its text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

from aiter_mx.sim.matrix import passes_of
from aiter_mx.sim.report import instruction_class

NO_WAIT = 63
SLOT_CYCLES = 4  # a SIMD takes an instruction of a kind every four cycles: 64 lanes over 16
_QUARTER_RATE = re.compile(
    r"v_(rcp|rsq|sqrt|exp|log|sin|cos)_|v_mul_(lo|hi)_[ui]32|v_mad_[ui]64|v_(fma|mul|add)_f64"
)
_WIDTHS = {
    "dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4, "b128": 16, "b96": 12, "b64": 8,
    "b32": 4, "b16": 2, "b8": 1, "u16": 2, "i16": 2, "u8": 1, "i8": 1, "short": 2, "byte": 1,
    "ushort": 2, "sshort": 2, "ubyte": 1, "sbyte": 1, "f32": 4, "u32": 4, "u64": 8,
}  # fmt: skip
_LANES = 64


class Kind(IntEnum):
    """Of an instruction, as replay.c numbers them."""

    VALU = 0
    MFMA = 1
    SALU = 2
    SMEM = 3
    LDS = 4
    LOAD = 5
    STORE = 6
    SCRATCH = 7
    WAIT = 8
    BARRIER = 9
    BRANCH = 10
    NOP = 11
    END = 12


@dataclass(frozen=True)
class Cost:
    """Of one instruction.

    Attributes:
        kind: the unit that takes it.
        cycles: that a vector or matrix pipe, or a wave, is busy with it.
        vm_left, lgkm_left: of a wait, operations that may be still under way.
        lds_bytes: to or from LDS, by a whole wave.
    """

    kind: Kind
    cycles: int = SLOT_CYCLES
    vm_left: int = NO_WAIT
    lgkm_left: int = NO_WAIT
    lds_bytes: int = 0


def costs(texts: Sequence[str]) -> list[Cost]:
    """Of a kernel's instructions, in their order."""
    return [_cost(text) for text in texts]


@lru_cache(1 << 16)
def _cost(text: str) -> Cost:
    name = text.split()[0]
    if name == "s_waitcnt":
        return _wait(text)
    if name == "s_barrier":
        return Cost(Kind.BARRIER)
    if name in ("s_nop", "s_sleep"):
        count = int(text.split()[1], 0)
        return Cost(Kind.NOP, count * 64 if name == "s_sleep" else SLOT_CYCLES * (count + 1))
    if name == "s_endpgm":
        return Cost(Kind.END)
    kind = instruction_class(name)
    if kind == "mfma":
        return Cost(Kind.MFMA, SLOT_CYCLES * _passes(text))
    if kind == "valu":
        return Cost(Kind.VALU, SLOT_CYCLES * (4 if _QUARTER_RATE.match(name) else 1))
    if kind == "lds":
        pairs = 2 if name.startswith(("ds_read2", "ds_write2")) else 1
        return Cost(Kind.LDS, lds_bytes=pairs * _LANES * _width(name))
    if kind == "smem":
        return Cost(Kind.SMEM)
    if kind == "branch":
        return Cost(Kind.BRANCH)
    if kind == "vmem":
        if name.startswith("scratch"):
            return Cost(Kind.SCRATCH, 4 * max(1, _width(name) // 4))
        if "store" in name or "atomic" in name:
            return Cost(Kind.STORE)
        if not name.startswith(("global_load", "buffer_load", "flat_load")):
            return Cost(Kind.SALU)  # cache control
        to_lds = _LANES * _width(name) if "_lds_" in name or re.search(r"\blds\b", text) else 0
        return Cost(Kind.LOAD, lds_bytes=to_lds)
    return Cost(Kind.SALU)


def _width(name: str) -> int:
    return next((_WIDTHS[part] for part in reversed(name.split("_")) if part in _WIDTHS), 4)


def _wait(text: str) -> Cost:
    fields = {key: int(value) for key, value in re.findall(r"(vmcnt|lgkmcnt)\((\d+)\)", text)}
    if not fields and (raw := re.match(r"s_waitcnt\s+(0x[0-9a-f]+|\d+)$", text)):
        bits = int(raw[1], 0)
        fields = {"vmcnt": bits & 15 | (bits >> 14 & 3) << 4, "lgkmcnt": bits >> 8 & 15}
    lgkm = fields.get("lgkmcnt", NO_WAIT)
    return Cost(
        Kind.WAIT,
        vm_left=fields.get("vmcnt", NO_WAIT),
        lgkm_left=NO_WAIT if lgkm == 15 else lgkm,
    )


def _passes(text: str) -> int:
    name = re.sub(r"_(e32|e64)$", "", text.split()[0])
    modifiers = dict(re.findall(r"(cbsz|blgp):(\w+)", text))
    return passes_of(name, modifiers)[1] or 4
