"""CDNA4: what the declarations of its kernels share (ISA manual, white paper)."""

from __future__ import annotations

from collections.abc import Mapping

SIMDS = 4
"""Of a compute unit."""
LDS_BYTES = 160 * 1024
"""Of a compute unit, all of which a workgroup may have."""
REGISTERS, MOST_REGISTERS = 512, 256
"""Of a lane: in all waves of a SIMD, in one."""
BYTES_A_CYCLE = 13
"""Of memory, for each compute unit. docs/kernels/mfma.md derives this and what follows."""
LATENCY_CYCLES = 4800
TILE_CYCLES = 80
"""Of the address unit, for a tile's loads."""
SIDE = 16
"""Rows of an operand of the matrix instruction."""
TILE_K = 256
"""Elements of an operand's row in a tile."""
WAVES = (1, 2, 3, 4, 6, 8, 12, 16)
"""Of a workgroup that splits K."""
PRELOADED = 14
"""Dwords of arguments that registers have room for as a wave begins: ``MX_PRELOAD``."""


def resident(registers: int, waves: int, lds_bytes: int) -> int:
    """Workgroups that a compute unit holds at once; 0 where not even one fits."""
    rounded = -(-registers // 8) * 8
    if rounded > MOST_REGISTERS:
        return 0
    return min(REGISTERS // rounded // -(-waves // SIMDS), LDS_BYTES // lds_bytes)


def refuse_static_lds(problem: object, config: Mapping[str, int], needed: int) -> None:
    """Raise ValueError where what a gfx950 kernel declares of LDS, in bytes, is more than there is.

    Compilers refuse such a kernel; ``KernelSpec.misfit`` alone sees but the dynamic part.
    """
    if needed > LDS_BYTES:
        raise ValueError(
            f"{dict(config)} does not fit {problem}: a workgroup would have {needed} bytes of "
            f"shared memory, and can have {LDS_BYTES}"
        )
