"""Matrix and lane-crossing vector instructions to C."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from aiter_mx.sim.disasm import Instruction, Operand
from aiter_mx.sim.emit import Code, Context, Modifiers, Reads, is_vector, scalar, unknown

PASS_CYCLES = 4
_MFMA = re.compile(r"v_mfma_(f32|i32)_(4|16|32)x\2x(\d+)(?:_(\d+)b)?_(\w+)")
_SCALED = re.compile(r"v_mfma_(scale_)?f32_(16x16x128|32x32x64)_f8f6f4")
_TYPES = {
    "f32": ("OF_F32", "OF_F32"),
    "f16": ("OF_F16", "OF_F16"),
    "bf16": ("OF_BF16", "OF_BF16"),
    "bf16_1k": ("OF_BF16", "OF_BF16"),
    "i8": ("OF_I8", "OF_I8"),
    "fp8_fp8": ("OF_E4M3", "OF_E4M3"),
    "fp8_bf8": ("OF_E4M3", "OF_E5M2"),
    "bf8_fp8": ("OF_E5M2", "OF_E4M3"),
    "bf8_bf8": ("OF_E5M2", "OF_E5M2"),
}
_BITS = {"OF_F32": 32, "OF_F16": 16, "OF_BF16": 16}
_SCALED_TYPES = ("OF_E4M3", "OF_E5M2", "OF_E2M3", "OF_E3M2", "OF_E2M1")
_SCALED_NAMES = ("fp8", "bf8", "fp6", "bf6", "fp4")
_SCALED_ROWS = (8, 8, 6, 6, 4)
_ALL_LANES = "~0ull"


def translate_matrix(ins: Instruction, ctx: Context) -> Code | None:
    """The C of a matrix or lane-swapping instruction, or None when it is not one."""
    if match := _SCALED.fullmatch(ins.mnemonic):
        return _scaled(ins, ctx, bool(match[1]), int(match[2][:2]))
    if match := _MFMA.fullmatch(ins.mnemonic):
        result, side, depth, blocks, kind = match.groups()
        if kind not in _TYPES or (result == "i32") != (kind == "i8"):
            raise unknown(ins)
        return _plain(ins, ctx, int(side), int(depth), int(blocks or 1), _TYPES[kind])
    if match := re.fullmatch(r"v_permlane(16|32)_swap_b32", ins.mnemonic):
        return _swap(ins, ctx, f"swap_rows(w, {{}}, {match[1]});")
    if ins.mnemonic == "v_swap_b32":
        return _swap(ins, ctx, "swap_lanes(w, {});")
    return None


def is_matrix(ins: Instruction) -> bool:
    """Whether it runs on the matrix unit."""
    return ins.mnemonic.startswith(("v_mfma", "v_smfmac"))


def passes_of(mnemonic: str, modifiers: Mapping[str, str]) -> tuple[str, int]:
    """The operands' type and the passes of one instruction; 0 of any but a matrix instruction."""
    if match := _SCALED.fullmatch(mnemonic):
        kinds = [int(modifiers.get(name, "0"), 0) for name in ("cbsz", "blgp")]
        name = " x ".join(_SCALED_NAMES[kind] for kind in kinds)
        is_slow = min(kinds) < 2  # an 8-bit operand halves the rate
        return "scaled " * bool(match[1]) + name, int(match[2][:2]) // (2 if is_slow else 4)
    if match := _MFMA.fullmatch(mnemonic):
        _, side, _, blocks, kind = match.groups()
        is_slow = bool(blocks) or kind == "f32"
        return kind.replace("_1k", "").replace("_", " x "), int(side) // (2 if is_slow else 4)
    return "", 0


def matrix_passes(instructions: Sequence[Instruction]) -> dict[str, int]:
    """Passes of the matrix unit, by type: LLVM's scheduling model of gfx950."""
    passes: Counter[str] = Counter()
    for ins in instructions:
        kind, count = passes_of(ins.mnemonic, ins.modifiers)
        if count:
            passes[kind] += count
    return dict(passes)


def _accumulator(
    ins: Instruction, ctx: Context, operand: Operand, rows: int, reads: list[Reads]
) -> str:
    """The arguments ``c, c_bits``: a row pointer, or NULL and a constant."""
    if not is_vector(operand):
        return f"NULL, {scalar(operand, 'f', ins)}"
    found = ctx.rows_of(operand, ins)
    if len(found) != rows:
        raise unknown(ins, f"width of {operand.text!r}")
    reads.append(Reads(found, _ALL_LANES))
    return f"ROW({found[0]}), 0"


def _plain(
    ins: Instruction, ctx: Context, side: int, depth: int, blocks: int, types: tuple[str, str]
) -> Code:
    Modifiers(ins).finish()
    target, a, b, c = ins.operands
    rows = side * side * blocks // 64
    written = ctx.rows_of(target, ins)
    groups = 64 // side // blocks
    bits = _BITS.get(types[0], 8)
    if (
        groups < 1
        or depth % groups
        or len(written) != rows
        or a.count * 32 * groups != depth * bits
    ):
        raise unknown(ins, "shape")
    reads = [Reads(ctx.rows_of(operand, ins), _ALL_LANES) for operand in (a, b)]
    third = _accumulator(ins, ctx, c, rows, reads)
    return Code(
        f"mfma(w, ROW({written[0]}), ROW({ctx.row(a, ins)}), {types[0]}, ROW({ctx.row(b, ins)}), "
        f"{types[1]}, {third}, {side}, {depth}, {blocks});",
        reads=reads,
        writes=written,
        write_lanes=_ALL_LANES,
    )


def _scaled(ins: Instruction, ctx: Context, has_scales: bool, side: int) -> Code:
    mods = Modifiers(ins)
    kinds = [mods.number("cbsz"), mods.number("blgp")]
    low, high = mods.bits("op_sel", 3), mods.bits("op_sel_hi", 3)
    mods.finish()
    if max(kinds) >= len(_SCALED_TYPES):
        raise unknown(ins, "operand format")
    target, a, b, c, *scales = ins.operands
    if len(scales) != (2 if has_scales else 0) or not all(s.kind == "v" for s in scales):
        raise unknown(ins, "scales must be vector registers")
    if any(op.count != _SCALED_ROWS[kind] for op, kind in zip((a, b), kinds, strict=True)):
        raise unknown(ins, "width of the operands")
    written = ctx.rows_of(target, ins)
    rows = side * side // 64
    if len(written) != rows:
        raise unknown(ins, f"width of {target.text!r}")
    reads = [Reads(ctx.rows_of(operand, ins), _ALL_LANES) for operand in (a, b, *scales)]
    third = _accumulator(ins, ctx, c, rows, reads)
    picked = [
        f"ROW({ctx.row(scale, ins)}), {low[i] + 2 * high[i]}" for i, scale in enumerate(scales)
    ] or ["NULL, 0", "NULL, 0"]
    return Code(
        f"mfma_scaled_{side}(ROW({written[0]}), ROW({ctx.row(a, ins)}), {_SCALED_TYPES[kinds[0]]}, "
        f"ROW({ctx.row(b, ins)}), {_SCALED_TYPES[kinds[1]]}, {third}, {', '.join(picked)});",
        reads=reads,
        writes=written,
        write_lanes=_ALL_LANES,
    )


def _swap(ins: Instruction, ctx: Context, call: str) -> Code:
    Modifiers(ins).finish()
    rows = [ctx.row(operand, ins) for operand in ins.operands]
    return Code(
        call.format(f"ROW({rows[0]}), ROW({rows[1]})"),
        reads=[Reads((rows[0],)), Reads((rows[1],))],
        writes=tuple(rows),
    )
