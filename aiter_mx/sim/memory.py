"""Memory instructions to C: global, flat, scratch, buffer, LDS, and permutes through LDS."""

from __future__ import annotations

import re

from aiter_mx.sim.disasm import Instruction, Operand
from aiter_mx.sim.emit import (
    Code,
    Context,
    Modifiers,
    Reads,
    is_vector,
    scalar,
    scalar_registers,
    unknown,
)

_M0 = 124
# Name of the data type: element of access.h, bytes.
_GLOBAL = {
    "ubyte": ("U8", 1), "sbyte": ("I8", 1), "ushort": ("U16", 2), "sshort": ("I16", 2),
    "ubyte_d16": ("U8_LO", 1), "ubyte_d16_hi": ("U8_HI", 1), "sbyte_d16": ("I8_LO", 1),
    "sbyte_d16_hi": ("I8_HI", 1), "short_d16": ("U16_LO", 2), "short_d16_hi": ("U16_HI", 2),
    "dword": ("DWORDS", 4), "dwordx2": ("DWORDS", 8), "dwordx3": ("DWORDS", 12),
    "dwordx4": ("DWORDS", 16), "byte": ("U8", 1), "byte_d16_hi": ("U8_HI", 1),
    "short": ("U16", 2),
}  # fmt: skip
_LDS = {
    "u8": ("U8", 1), "i8": ("I8", 1), "u16": ("U16", 2), "i16": ("I16", 2),
    "u8_d16": ("U8_LO", 1), "u8_d16_hi": ("U8_HI", 1), "i8_d16": ("I8_LO", 1),
    "i8_d16_hi": ("I8_HI", 1), "u16_d16": ("U16_LO", 2), "u16_d16_hi": ("U16_HI", 2),
    "b8": ("U8", 1), "b16": ("U16", 2), "b8_d16_hi": ("U8_HI", 1), "b16_d16_hi": ("U16_HI", 2),
    "b32": ("DWORDS", 4), "b64": ("DWORDS", 8), "b96": ("DWORDS", 12), "b128": ("DWORDS", 16),
}  # fmt: skip
_ATOMICS = {
    name: f"A_{name.upper()}"
    for name in (
        "swap", "cmpswap", "add", "sub", "smin", "umin", "smax", "umax", "and", "or", "xor", "inc",
        "dec", "add_f32", "pk_add_f16", "pk_add_bf16", "add_f64", "min_f64", "max_f64",
    )
}  # fmt: skip
_LDS_ATOMICS = {
    "add": "ADD", "sub": "SUB", "min_i": "SMIN", "min_u": "UMIN", "max_i": "SMAX",
    "max_u": "UMAX", "and": "AND", "or": "OR", "xor": "XOR", "inc": "INC", "dec": "DEC",
    "add_f": "ADD_F", "min_f": "MIN_F", "max_f": "MAX_F", "pk_add_f16": "PK_ADD_F16",
    "pk_add_bf16": "PK_ADD_BF16", "wrxchg": "SWAP", "cmpst": "CMPSWAP",
}  # fmt: skip

_VMEM = re.compile(r"(global|flat|scratch|buffer)_(load|store|atomic)_(lds_)?(\w+)")
_DS = re.compile(r"ds_(read|write)(2st64|2)?_(\w+)")


def translate_memory(ins: Instruction, ctx: Context) -> Code | None:
    """The C of a memory instruction, or None when it is not one."""
    if match := _VMEM.fullmatch(ins.mnemonic):
        space, action, lds, kind = match.groups()
        if action == "atomic":
            return _atomic(ins, ctx, space, kind)
        if kind not in _GLOBAL:
            raise unknown(ins)
        return _move(ins, ctx, space, action == "store", bool(lds), *_GLOBAL[kind])
    if ins.mnemonic in ("ds_bpermute_b32", "ds_permute_b32", "ds_swizzle_b32"):
        return _permute(ins, ctx)
    if match := re.fullmatch(r"ds_read_b64_tr_b(8|16|4)", ins.mnemonic):
        return _lds(ins, ctx, True, None, "DWORDS", 8, transpose=int(match[1]))
    if match := _DS.fullmatch(ins.mnemonic):
        action, pair, kind = match.groups()
        if kind not in _LDS:
            raise unknown(ins)
        return _lds(ins, ctx, action == "read", pair, *_LDS[kind])
    if ins.mnemonic.startswith("ds_"):
        return _lds_atomic(ins, ctx)
    return None


def _dwords(size: int) -> int:
    return -(-size // 4)


class _Address:
    """Where a vector-memory instruction points: C that fills ``at``, or buffer arguments."""

    def __init__(
        self, ins: Instruction, ctx: Context, space: str, operands: list[Operand], mods: Modifiers
    ) -> None:
        self.reads: list[Reads] = []
        self.scalars: tuple[int, ...] = ()
        self.arguments = ""
        self.fill = ""
        offset = mods.number("offset")
        if space == "buffer":
            self._buffer(ins, ctx, operands, mods, offset)
            return
        vector, *rest = operands
        base = rest[0] if rest else Operand("off")
        if is_vector(vector):
            self.reads.append(Reads(ctx.rows_of(vector, ins)))
        elif vector.kind != "off":
            raise unknown(ins, f"address {vector.text!r}")
        self.scalars = scalar_registers(base)
        if space == "scratch":
            index = f"ROW({ctx.row(vector, ins)})" if is_vector(vector) else "NULL"
            uniform = f"(i64)(i32){scalar(base, 'u', ins)}" if base.kind == "s" else "0"
            self.arguments = f"{index}, {uniform} + {offset}"
        elif base.kind == "s":
            if vector.count != 1 or not is_vector(vector):
                raise unknown(ins, "address form")
            row = ctx.row(vector, ins)
            self.fill = f"address_s(at, {scalar(base, 'U', ins)}, ROW({row}), {offset});"
        else:
            if vector.count != 2:
                raise unknown(ins, "address form")
            self.fill = f"address_v(at, ROW({ctx.row(vector, ins)}), {offset});"

    def _buffer(
        self,
        ins: Instruction,
        ctx: Context,
        operands: list[Operand],
        mods: Modifiers,
        offset: int,
    ) -> None:
        vector, resource, soffset = operands
        has_index, has_offset = mods.flag("idxen"), mods.flag("offen")
        if vector.kind == "off":
            rows: tuple[int, ...] = ()
        else:
            rows = ctx.rows_of(vector, ins)
            self.reads.append(Reads(rows))
        if len(rows) != has_index + has_offset:
            raise unknown(ins, "address form")
        index = f"ROW({rows[0]})" if has_index else "NULL"
        offsets = f"ROW({rows[-1]})" if has_offset else "NULL"
        self.scalars = scalar_registers(resource) + scalar_registers(soffset)
        fixed = scalar(soffset, "u", ins)
        self.arguments = (
            f"&(BufferAddress){{w->s + {resource.index}, {index}, {offsets}, {offset}, {fixed}}}"
        )


def _take_cache_flags(mods: Modifiers) -> bool:
    """Drop cache hints; say whether ``sc0`` was set, which makes an atomic return."""
    returns = mods.flag("sc0")
    for name in ("sc1", "nt"):
        mods.flag(name)
    return returns


def _move(
    ins: Instruction,
    ctx: Context,
    space: str,
    is_store: bool,
    to_lds: bool,
    element: str,
    size: int,
) -> Code:
    mods = Modifiers(ins)
    _take_cache_flags(mods)
    to_lds = mods.flag("lds") or to_lds
    operands = list(ins.operands)
    data: Operand | None = None
    if not to_lds:
        data = operands.pop(1 if is_store and space != "buffer" else 0)
    written_offset = int(ins.modifiers.get("offset", "0"), 0)
    address = _Address(ins, ctx, space, operands, mods)
    mods.finish()
    code = Code("", reads=address.reads, scalar_reads=address.scalars, yields=True)
    is_coherent = "sc1" in ins.modifiers  # with other workgroups: for loads, a way to wait
    if is_coherent and not is_store:
        code.prepare = "synchronise(w);"
    before, after = ("w->is_coherent = 1; ", " w->is_coherent = 0;") if is_coherent else ("", "")
    if data is None:
        if is_store or space in ("flat", "scratch"):
            raise unknown(ins)
        code.scalar_reads += (_M0,)
        code.issue = f"issue_vm(w, $I, 0, 0, {size});"
        if space == "buffer":
            copy = f"buffer_to_lds(w, $I, {address.arguments}, {element}, {size});"
        else:
            base = f"(w->s[M0] & 0x3ffff) + {written_offset}"
            copy = (
                f"{{ u64 at[64]; {address.fill} "
                f"copy_to_lds(w, $I, at, {base}, {element}, {size}); }}"
            )
        code.body = before + copy + after
        return code
    rows = ctx.rows_of(data, ins)
    if len(rows) != _dwords(size):
        raise unknown(ins, f"width of {data.text!r}")
    if is_store:
        if space != "scratch":  # which keeps what a register lacks, for spills
            code.reads.append(Reads(rows))
        code.issue = "issue_vm(w, $I, 0, 0, 0);"
    else:
        code.issue = f"issue_vm(w, $I, {rows[0]}, {len(rows)}, {size});"
        code.writes = rows
    if space == "flat":
        code.issue += f"issue_lds(w, $I, {rows[0]}, {0 if is_store else len(rows)});"
    tail = f"ROW({rows[0]}), {element}, {size}"
    if space == "buffer":
        code.body = f"buffer_access(w, $I, {address.arguments}, {tail}, {int(is_store)});"
    elif space == "scratch":
        code.body = f"scratch_access(w, $I, {address.arguments}, {tail}, {int(is_store)});"
    elif space == "flat":
        code.body = (
            f"{{ u64 at[64]; {address.fill} flat_access(w, $I, at, {tail}, {int(is_store)}); }}"
        )
    else:
        action = "global_store" if is_store else "global_load"
        code.body = f"{{ u64 at[64]; {address.fill} {action}(w, $I, at, {tail}); }}"
    code.body = before + code.body + after
    return code


def _atomic(ins: Instruction, ctx: Context, space: str, kind: str) -> Code:
    size = 4
    if kind.endswith("_x2"):
        kind, size = kind[:-3], 8
    if kind.endswith("f64"):
        size = 8
    if kind not in _ATOMICS or space == "scratch":
        raise unknown(ins)
    mods = Modifiers(ins)
    returns = _take_cache_flags(mods)
    operands = list(ins.operands)
    target: Operand | None = None
    if space == "buffer":
        data = operands.pop(0)
        target = data if returns else None
    else:
        target = operands.pop(0) if returns else None
        data = operands.pop(1)
    address = _Address(ins, ctx, space, operands, mods)
    mods.finish()
    rows = ctx.rows_of(data, ins)
    old: tuple[int, ...] = ()
    if target:
        first = ctx.row(target, ins)
        old = tuple(range(first, first + size // 4))
    registers = f"{old[0] if old else 0}, {len(old)}"
    issue = f"issue_vm(w, $I, {registers}, {size if old else 0});"
    if space == "flat":
        issue += f"issue_lds(w, $I, {registers});"
    destination = f"ROW({old[0]})" if old else "NULL"
    tail = f"{destination}, ROW({rows[0]}), {_ATOMICS[kind]}, {size}"
    if space == "buffer":
        body = f"buffer_atomic(w, $I, {address.arguments}, {tail});"
    else:
        body = f"{{ u64 at[64]; {address.fill} global_atomic(w, $I, at, {tail}); }}"
    return Code(
        body,
        reads=[*address.reads, Reads(rows)],
        scalar_reads=address.scalars,
        issue=issue,
        writes=old,
        yields=True,
    )


def _lds(
    ins: Instruction,
    ctx: Context,
    is_read: bool,
    pair: str | None,
    element: str,
    size: int,
    transpose: int = 0,
) -> Code:
    mods = Modifiers(ins)
    unit = size * (64 if pair == "2st64" else 1)
    offsets = [mods.number("offset0") * unit, mods.number("offset1") * unit] if pair else [0]
    if not pair:
        offsets = [mods.number("offset")]
    mods.finish()
    operands = list(ins.operands)
    target = operands.pop(0) if is_read else None
    address, *data = operands
    at = f"ROW({ctx.row(address, ins)})"
    code = Code("", reads=[Reads(ctx.rows_of(address, ins))], yields=True)
    each = _dwords(size)
    if target:
        rows = ctx.rows_of(target, ins)
        starts = [rows[0] + each * i for i in range(len(offsets))]
        code.writes = rows
        code.issue = f"issue_lds(w, $I, {rows[0]}, {len(rows)});"
    else:
        rows = tuple(row for operand in data for row in ctx.rows_of(operand, ins))
        starts = [ctx.row(operand, ins) for operand in data]
        code.reads.append(Reads(rows))
        code.issue = "issue_lds(w, $I, 0, 0);"
    if len(rows) != each * len(offsets) or len(starts) != len(offsets):
        raise unknown(ins, "width of the data")
    if target and len(offsets) == 2:  # the first half may overwrite the address
        code.body = f"u32 base[64]; memcpy(base, {at}, sizeof base);"
        at = "base"
    action = "lds_load" if is_read else "lds_store"
    for start, offset in zip(starts, offsets, strict=True):
        code.body += f" {action}(w, $I, {at}, {offset}, ROW({start}), {element}, {size});"
    if transpose:
        code.body += f" transpose_read(w, ROW({starts[0]}), {transpose});"
    code.body = f"{{ {code.body} }}"
    return code


def _lds_atomic(ins: Instruction, ctx: Context) -> Code:
    match = re.fullmatch(r"ds_(\w+?)(_rtn)?_([uibf])(32|64)", ins.mnemonic)
    packed = re.fullmatch(r"ds_(pk_add)(_rtn)?_(f16|bf16)", ins.mnemonic)
    if packed:
        name, returns, size = f"pk_add_{packed[3]}", bool(packed[2]), 4
    elif match:
        name, returns, size = match[1], bool(match[2]), int(match[4]) // 8
        if name in ("min", "max") or match[3] == "f":
            name += f"_{match[3]}"
    else:
        raise unknown(ins)
    if name not in _LDS_ATOMICS:
        raise unknown(ins)
    operation = f"A_{_LDS_ATOMICS[name]}"
    if operation.endswith("_F"):
        operation += str(8 * size)
    mods = Modifiers(ins)
    offset = mods.number("offset")
    mods.finish()
    operands = list(ins.operands)
    target = operands.pop(0) if returns else None
    address, *data = operands
    code = Code("", reads=[Reads(ctx.rows_of(address, ins))], yields=True)
    for operand in data:
        code.reads.append(Reads(ctx.rows_of(operand, ins)))
    source = f"ROW({ctx.row(data[0], ins)})"
    if len(data) == 2:  # compare-and-store: the expected value comes first
        rows = size // 4
        code.prepare = "".join(
            f"memcpy(w->tmp[0] + {64 * (rows * (1 - i))}, ROW({ctx.row(d, ins)}), {256 * rows});"
            for i, d in enumerate(data)
        )
        source = "w->tmp[0]"
    old = ctx.rows_of(target, ins) if target else ()
    code.writes = old
    code.issue = f"issue_lds(w, $I, {old[0] if old else 0}, {len(old)});"
    destination = f"ROW({old[0]})" if old else "NULL"
    at = f"ROW({ctx.row(address, ins)})"
    code.body = f"lds_atomic(w, $I, {at}, {offset}, {destination}, {source}, {operation}, {size});"
    return code


def _permute(ins: Instruction, ctx: Context) -> Code:
    mods = Modifiers(ins)
    mods.take("offset")
    mods.finish()
    target, *sources = ins.operands
    rows = ctx.rows_of(target, ins)
    arguments = ", ".join(f"ROW({ctx.row(source, ins)})" for source in sources)
    name = ins.mnemonic.removeprefix("ds_").removesuffix("_b32")
    return Code(
        f"{name}(w, ROW({rows[0]}), {arguments}, {ins.words[0] & 0xFFFF:#x});",
        reads=[Reads(ctx.rows_of(source, ins)) for source in sources],
        issue=f"issue_lds(w, $I, {rows[0]}, 1);",
        writes=rows,
        yields=True,
    )
