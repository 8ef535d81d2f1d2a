"""PTX instructions as calls of runtime.h.

An instruction that is not known compiles all the same, and fails where a thread comes to it, with
its text: sources include headers of which they use a part. To add one, give ``_CALLS`` its text, or
write a function under ``@_instruction``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from op_tests.emulated_sm90.brackets import split


class UnknownPTX(Exception):
    """An instruction or operand that the emulator does not know."""


@dataclass(frozen=True)
class Operands:
    """Operands of an instruction.

    Attributes:
        site: the number of its statement.
        texts: as PTX has them.
        expressions: what the statement's operands %0, %1, ... are in C++.
    """

    site: int
    texts: Sequence[str]
    expressions: Sequence[str]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, n: int) -> str:
        return _value(self.texts[n])

    def vector(self, n: int) -> list[str]:
        """All of ``{a, b}``, or a single one."""
        text = self.texts[n]
        return [_value(each) for each in (split(text[1:-1], ",") if text[0] == "{" else [text])]

    def box(self, n: int) -> tuple[str, str]:
        """Tensor map, and column and row, of ``[map, {column, row}]``."""
        found = re.fullmatch(r"\[\s*(%\d+)\s*,\s*\{(.*)\}\s*\]", self.texts[n])
        assert found, self.texts
        place = ", ".join(map(_value, split(found[2], ",")))
        return f"(const void*){_value(found[1])}", place


def _value(text: str) -> str:
    text = text.strip()
    if text.startswith("["):
        return _value(text[1:-1])
    if found := re.fullmatch(r"%(\d+)", text):
        return f"a{found[1]}_"
    if found := re.fullmatch(r"(.+?)\s*\+\s*(\w+)", text):
        return f"({_value(found[1])} + {_value(found[2])})"
    if text == "%%cluster_ctarank":
        return "emulated::cluster_rank()"
    if found := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})", text):
        return f"emulated::float_of_bits(0x{found[1]})"
    if re.fullmatch(r"-?\d+|0[xX][0-9a-fA-F]+", text):
        return text
    if re.fullmatch(r"!?\w+", text) and text != "_":
        return text + "_"
    raise UnknownPTX(f"operand {text}")


_BYTES = {f"{kind}{8 * size}": size for kind in "usbf" for size in (1, 2, 4, 8)}
_TYPES = {
    "s16": "int16_t",
    "u16": "uint16_t",
    "b16": "uint16_t",
    "f32": "float",
    "s32": "int",
    "u32": "unsigned",
    "b32": "unsigned",
    "s64": "long long",
    "u64": "unsigned long long",
    "b64": "unsigned long long",
}
_FUNCTIONS = {  # of all operands but the first, which gets the result
    **{
        opcode: "emulated::" + name
        for opcode, name in {
            "cvt.rn.f16x2.e4m3x2": "cvt_f16x2_e4m3x2",
            "cvt.rn.satfinite.e4m3x2.f16x2": "cvt_e4m3x2_f16x2",
            "cvt.rn.satfinite.e4m3x2.f32": "cvt_e4m3x2_f32",
            "cvt.rn.satfinite.e5m2x2.f32": "cvt_e5m2x2_f32",
            "cvt.f32.f16": "float_of_half",
            "cvt.rn.f16.f32": "half_of",
            "cvt.rn.bf16.f32": "bf16_of",
            "cvt.rn.bf16x2.f32": "cvt_bf16x2_f32",
            "cvt.rn.f16x2.f32": "cvt_f16x2_f32",
            "mul.rn.f16x2": "mul_f16x2",
            "mul.rn.bf16x2": "mul_bf16x2",
            "fma.rn.f16x2": "fma_f16x2",
            "fma.rn.bf16x2": "fma_bf16x2",
            "max.u16x2": "max_u16x2",
            "min.u16x2": "min_u16x2",
            "max.NaN.xorsign.abs.bf16x2": "max_nan_xorsign_abs<0x7f80>",
            "max.NaN.xorsign.abs.f16x2": "max_nan_xorsign_abs<0x7c00>",
            "prmt.b32": "prmt",
            "lop3.b32": "lop3",
        }.items()
    },
    "ex2.approx.ftz.f32": "exp2f",
    "rcp.approx.ftz.f32": "1.0f / ",
}
_OPERATORS = {
    "and.b32": "&",
    "or.b32": "|",
    "or.b64": "|",
    "add.u32": "+",
    "or.pred": "||",
}
_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_ATOMICS = {
    "add": "x_ + y_",
    "or": "x_ | y_",
    "exch": "y_",
}
# {0} is the first operand, {site} the number of the statement.
_CALLS = {
    r"fence\.proxy\.async": "proxy_fence(true, true)",
    r"fence\.proxy\.async\.shared::c.*": "proxy_fence(true, false)",
    r"fence\.proxy\.async\.global": "proxy_fence(false, true)",
    r"(fence|prefetch|griddepcontrol\.launch).*": "maybe_yield()",
    r"bar\.arrive": "named_barrier({site}, {0}, {1}, 0, 0, true, false)",
    r"mbarrier\.init.*": "mbarrier_init({0}, {1})",
    r"mbarrier\.arrive\.expect_tx.*": "mbarrier_arrive({1}, {2})",
    r"mbarrier\.arrive\.(?!expect_tx).*": "mbarrier_arrive({1}, 0)",
    r"cp\.async\.mbarrier\.arrive\.noinc.*": "mbarrier_arrive_copied({0})",
    r"cp\.async\.bulk\.commit_group": "bulk_commit()",
    r"cp\.async\.bulk\.wait_group": "bulk_wait({0}, false)",
    r"cp\.async\.bulk\.wait_group\.read": "bulk_wait({0}, true)",
    r"cp\.async\.commit_group": "cp_async_commit()",
    r"cp\.async\.wait_group": "cp_async_wait({0})",
    r"barrier\.cluster\.arrive.*": "cluster_arrive()",
    r"barrier\.cluster\.wait.*": "cluster_wait()",
    r"setmaxnreg\..*": "setmaxnreg({site}, {0})",
    r"griddepcontrol\.wait": "grid_wait()",
    r"nanosleep.*": "nanosleep()",
    r"wgmma\.fence.*": "wgmma_fence({site})",
    r"wgmma\.commit_group.*": "wgmma_commit({site})",
    r"wgmma\.wait_group.*": "wgmma_wait({site}, {0})",
}

_Emitter: TypeAlias = Callable[[re.Match[str], Operands], str]
_EMITTERS: list[tuple[re.Pattern[str], _Emitter]] = []


def _instruction(pattern: str) -> Callable[[_Emitter], _Emitter]:
    def add(emitter: _Emitter) -> _Emitter:
        _EMITTERS.append((re.compile(pattern), emitter))
        return emitter

    return add


def emit(opcode: str, of: Operands) -> str:
    """C++ statements that do what an instruction does.

    Raises:
        UnknownPTX: the emulator has no such instruction.
    """
    if function := _FUNCTIONS.get(opcode):
        return f"{of[0]} = {function}({', '.join(of[n] for n in range(1, len(of)))});"
    if operator := _OPERATORS.get(opcode):
        return f"{of[0]} = {of[1]} {operator} {of[2]};"
    for pattern, call in _CALLS.items():
        if re.fullmatch(pattern, opcode):
            needed = range(len(of) if "{0}" in call or "{1}" in call else 0)
            values = [of[n] if f"{{{n}}}" in call else "" for n in needed]
            return f"emulated::{call.format(*values, site=of.site)};"
    for expression, emitter in _EMITTERS:
        if found := expression.fullmatch(opcode):
            return emitter(found, of)
    raise UnknownPTX(opcode)


@_instruction("bra")
def _branch(found: re.Match[str], of: Operands) -> str:
    return f"goto {of.texts[0]}_{of.site}_;"


@_instruction(r"mov\.(\w+)")
def _move(found: re.Match[str], of: Operands) -> str:
    half, type_ = (16, "unsigned") if found[1] == "b32" else (32, "unsigned long long")
    if of.texts[0].startswith("{"):
        low, high = of.vector(0)
        return (
            f"const {type_} w_ = {of[1]}; "
            f"{low} = (decltype({low}))(w_ & ((({type_})1 << {half}) - 1)); "
            f"{high} = (decltype({high}))(w_ >> {half});"
        )
    if of.texts[1].startswith("{"):
        low, high = of.vector(1)
        return f"{of[0]} = ({type_}){low} | ({type_}){high} << {half};"
    return f"{of[0]} = {of[1]};"


@_instruction(r"setp\.(\w+)\.(\w+)")
def _compare(found: re.Match[str], of: Operands) -> str:
    type_ = _TYPES[found[2]]
    return f"{of[0]} = ({type_}){of[1]} {_COMPARISONS[found[1]]} ({type_}){of[2]};"


@_instruction(r"selp\..*")
def _select(found: re.Match[str], of: Operands) -> str:
    return f"{of[0]} = {of[3]} ? {of[1]} : {of[2]};"


def _space(modifiers: str) -> str:
    return "shared" if ".shared" in modifiers else "global"


@_instruction(r"(ld|st)((?:\.[\w:]+)*?)(?:\.v([24]))?\.([ubf]\d+)")
def _load_or_store(found: re.Match[str], of: Operands) -> str:
    loads, modifiers, size = found[1] == "ld", found[2], _BYTES[found[4]]
    registers, address = (of.vector(0), of[1]) if loads else (of.vector(1), of[0])
    assert len(registers) == int(found[3] or 1), found[0]
    meets = {"acquire", "release", "volatile"} & set(modifiers.split("."))
    bytes_ = size * len(registers)
    space = _space(modifiers)
    where = f'emulated::{space}_place({address}, {bytes_}, "{found[0]}")'
    code = ["emulated::contend();"] * bool(meets) + [f"char* const p_ = (char*){where};"]
    for i, register in enumerate(registers):
        place = f"p_ + {i * size}"
        if loads:
            code.append(f"{register} = emulated::ld<{size}, decltype({register})>({place});")
        else:
            code.append(f"emulated::st<{size}>({place}, {register});")
    if not loads:
        code.append(f"emulated::wrote_{space}(p_, {bytes_});")
    if meets or ("relaxed" in modifiers and ".cta.global" not in modifiers):
        code.append(f"emulated::polled(p_, {bytes_});" if loads else "emulated::written(p_);")
    return " ".join(code)


@_instruction(r"(atom|red)((?:\.[\w:]+)*?)\.(add|or|exch)\.(\w+)")
def _atomic(found: re.Match[str], of: Operands) -> str:
    returns, type_ = found[1] == "atom", _TYPES[found[4]]
    first = 1 if returns else 0
    where = f'emulated::{_space(found[2])}_place({of[first]}, sizeof({type_}), "{found[0]}")'
    result = f"{of[0]} = x_; " if returns and of.texts[0] != "_" else ""
    met = "if (*p_ != x_) emulated::written(p_);"
    met += " else emulated::polled(p_, sizeof x_);" if returns else ""
    return (
        f"emulated::contend(); auto* const p_ = ({type_}*){where}; const {type_} x_ = *p_, "
        f"y_ = ({type_}){of[first + 1]}; *p_ = {_ATOMICS[found[3]]}; {result}{met} "
        "emulated::contend();"
    )


@_instruction(r"bar\.sync|barrier(\.cta)?\.sync\.aligned")
def _barrier(found: re.Match[str], of: Operands) -> str:
    threads = of[1] if len(of) > 1 else -1
    return f"emulated::named_barrier({of.site}, {of[0]}, {threads}, 0, 0, true, true);"


@_instruction(r"(bar|barrier)(?:\.cta)?\.red\.(or|and)\.pred")
def _reducing_barrier(found: re.Match[str], of: Operands) -> str:
    aligned, kind = "true" if found[1] == "bar" else "false", 1 if found[2] == "or" else 2
    given = f"{of.site}, {of[1]}, {of[2]}, {kind}, {of[3]}, {aligned}, true"
    return f"{of[0]} = emulated::named_barrier({given});"


@_instruction(r"mbarrier\.(try|test)_wait\.parity.*")
def _wait(found: re.Match[str], of: Operands) -> str:
    may_wait = "true" if found[1] == "try" else "false"
    return f"{of[0]} = emulated::mbarrier_test({of[1]}, {of[2]}, {may_wait});"


@_instruction(r"elect\.sync")
def _elect(found: re.Match[str], of: Operands) -> str:
    predicate = of.texts[0].split("|")[1]
    return (
        f"emulated::aligned({of.site}); {predicate}_ = emulated::current->thread_index.x % 32 == 0;"
    )


@_instruction(r"cp\.async\.bulk\.tensor\.2d\.shared.*")
def _load_box(found: re.Match[str], of: Operands) -> str:
    (tensor_map, place), mask = of.box(1), of[3] if "multicast" in found[0] else "0"
    return f"emulated::tma_load({of[0]}, {tensor_map}, {place}, {of[2]}, {mask});"


@_instruction(r"cp\.async\.bulk\.tensor\.2d\.global.*")
def _store_box(found: re.Match[str], of: Operands) -> str:
    tensor_map, place = of.box(0)
    return f"emulated::tma_store({tensor_map}, {place}, {of[1]});"


@_instruction(r"cp\.async\.bulk\.shared.*")
def _copy_bulk(found: re.Match[str], of: Operands) -> str:
    mask = of[4] if "multicast" in found[0] else "0"
    return f"emulated::bulk_load({of[0]}, {of[1]}, {of[2]}, {of[3]}, {mask});"


@_instruction(r"cp\.async\.c[ag]\..*")
def _copy_async(found: re.Match[str], of: Operands) -> str:
    return f"emulated::cp_async({of[0]}, {of[1]}, {of[2]}, {of[3] if len(of) > 3 else of[2]});"


@_instruction(r"st\.async.*[bf]32")
def _store_async(found: re.Match[str], of: Operands) -> str:
    words = ", ".join(f"emulated::as<unsigned>({word})" for word in of.vector(1))
    return (
        f"const unsigned w_[] = {{{words}}}; emulated::st_async({of[0]}, w_, sizeof w_, {of[2]});"
    )


@_instruction(r"mapa\..*")
def _map_to_cluster(found: re.Match[str], of: Operands) -> str:
    return f"{of[0]} = emulated::map_cluster({of[1]}, {of[2]});"


@_instruction(r"ldmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared\.b16")
def _load_matrices(found: re.Match[str], of: Operands) -> str:
    transposed = "true" if found[2] else "false"
    call = f"emulated::load_matrices({of.site}, w_, {found[1]}, {of[1]}, {transposed});"
    moved = (f"{register} = w_[{i}];" for i, register in enumerate(of.vector(0)))
    return " ".join(["unsigned w_[4];", call, *moved])


@_instruction(r"stmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared\.b16")
def _store_matrices(found: re.Match[str], of: Operands) -> str:
    transposed = "true" if found[2] else "false"
    call = f"emulated::store_matrices({of.site}, w_, {found[1]}, {of[0]}, {transposed});"
    return f"const unsigned w_[] = {{{', '.join(of.vector(1))}}}; {call}"


@_instruction(r"movmatrix\.sync\.aligned\.m8n8\.trans\.b16")
def _move_matrix(found: re.Match[str], of: Operands) -> str:
    return f"{of[0]} = emulated::move_matrix({of.site}, {of[1]});"


_WGMMA_TYPES = {("e4m3", "32"): 0, ("bf16", "16"): 1, ("f16", "16"): 2}


@_instruction(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(\d+)\.f32\.(\w+)\.(\w+)")
def _wgmma(found: re.Match[str], of: Operands) -> str:
    n, k, of_a, of_b = found.groups()
    if of_a != of_b or (of_a, k) not in _WGMMA_TYPES:
        raise UnknownPTX(found[0])
    names = [int(each.strip()[1:]) for each in split(of.texts[0][1:-1], ",")]
    assert len(names) == int(n) // 2, found[0]
    sums = ", ".join(f"&{of.expressions[name]}" for name in names)
    in_registers = of.texts[1].startswith("{")
    registers, descriptor = (", ".join(of.vector(1)), "0") if in_registers else ("0", of[1])
    adds, negates_a, negates_b, *transposed = [of[i] for i in range(3, len(of))]
    negates = f"({negates_a} < 0 ? 1 : 0) | ({negates_b} < 0 ? 2 : 0)"
    first = 2 - len(transposed)  # a in registers has no order
    transposes = " | ".join(f"({each}) << {first + i}" for i, each in enumerate(transposed)) or "0"
    return (
        f"float* const d_[] = {{{sums}}}; const unsigned ra_[] = {{{registers}}}; "
        f"emulated::wgmma({of.site}, {n}, {_WGMMA_TYPES[of_a, k]}, d_, {len(names)}, "
        f"{str(in_registers).lower()}, ra_, {descriptor}, {of[2]}, {adds} != 0, {negates}, "
        f"{transposes});"
    )
