"""One kernel of a code object to C."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass

from aiter_mx.code_object import CodeObject, KernelInfo
from aiter_mx.sim.checks import BITS
from aiter_mx.sim.condition import early_readers
from aiter_mx.sim.disasm import Instruction
from aiter_mx.sim.emit import Code, Context, unknown
from aiter_mx.sim.hazards import find_hazards
from aiter_mx.sim.isa.salu import BRANCHES, IGNORED
from aiter_mx.sim.matrix import matrix_passes, translate_matrix
from aiter_mx.sim.memory import translate_memory
from aiter_mx.sim.modes import Modes, find_modes, translate_mode, with_indexed_source
from aiter_mx.sim.scalar import changes_exec, translate_scalar
from aiter_mx.sim.start import start_wave
from aiter_mx.sim.strict import Strict
from aiter_mx.sim.vector import translate_vector

_INDIRECT = {"s_setpc_b64", "s_swappc_b64", "s_call_b64"}
_SPARE_ROWS = 2  # for the copy of an indexed source, of up to 64 bits
_TRANSLATORS = (translate_scalar, translate_vector, translate_memory, translate_matrix)


@dataclass(frozen=True)
class Translation:
    """A kernel as C.

    Attributes:
        source: the C file of its waves.
        functions: the vector functions that it calls, by name.
        instructions: those translated; their position is their number in the C code.
        too_soon: the rules of wait states that some path through the kernel breaks, one for each
            instruction that comes too soon.
    """

    source: str
    functions: dict[str, str]
    instructions: tuple[Instruction, ...]
    too_soon: tuple[str, ...]


@dataclass(frozen=True)
class Blocks:
    """A kernel's instructions, and those of the functions that it calls.

    Attributes:
        instructions: by address.
        leaders: numbers of those that begin a basic block.
        entry: number of the one that waves begin at.
    """

    instructions: list[Instruction]
    leaders: list[int]
    entry: int


def blocks_of(code_object: CodeObject, kernel: KernelInfo, listing: list[Instruction]) -> Blocks:
    """What of a code object's disassembly a kernel may run."""
    instructions = _reachable(code_object, kernel, listing)
    number = {ins.address: i for i, ins in enumerate(instructions)}
    entry = kernel.descriptor.entry + (256 if kernel.descriptor.preload_dwords else 0)
    if entry not in number:
        raise unknown(listing[0], f"no instruction at the entry point {entry:#x}")
    return Blocks(instructions, _leaders(instructions, number, entry), number[entry])


def accumulators_from(kernel: KernelInfo) -> int:
    """The vector register that is a kernel's first accumulator, too."""
    return ((kernel.descriptor.rsrc3 & 63) + 1) * 4


def translate_kernel(
    code_object: CodeObject, kernel: KernelInfo, listing: list[Instruction], strict: bool
) -> Translation:
    """Translate a kernel and, if it calls any, the code object's functions.

    Raises:
        UnknownInstruction: there is an instruction whose meaning the simulator lacks.
    """
    code = blocks_of(code_object, kernel, listing)
    instructions, leaders = code.instructions, code.leaders
    number = {ins.address: i for i, ins in enumerate(instructions)}
    allocated = ((kernel.descriptor.rsrc1 & 63) + 1) * 8
    modes = find_modes(instructions, leaders)
    spare = _SPARE_ROWS if any(mode.indexed for mode in modes) else 0
    context = Context(min(accumulators_from(kernel), allocated), allocated, spare)
    codes = [_translate(*both, context) for both in zip(instructions, modes, strict=True)]
    _check_overflow_mode(instructions)
    hazards = find_hazards(instructions, leaders) if strict else {}
    early = early_readers(instructions, leaders, code.entry) if strict else set()
    rules = {i: BITS[hazard.rule] for i, hazard in hazards.items()}
    body = _Body(instructions, codes, number, leaders, strict, rules, early).render()
    blocks = _blocks(instructions, leaders)
    meta = {
        "texts": [ins.text for ins in instructions],
        "addresses": [ins.address for ins in instructions],
        "leaders": leaders,
        "blocks": [Counter(ins.mnemonic for ins in block) for block in blocks],
        "passes": [matrix_passes(block) for block in blocks],
        "entry_pc": 2 * code.entry,
        "hazards": {
            i: (hazard.rule, hazard.describe(instructions)) for i, hazard in hazards.items()
        },
    }
    source = "\n".join(
        (
            '#include "machine.h"',
            "#undef ROW",
            "#define ROW(n) (rows + 64 * (n)) // rows: w->v, which each would load anew",
            *(f"{text.partition(' {')[0]};" for text in context.functions.values()),
            f"const u32 sim_registers = {context.rows + context.spare_rows};",
            '__attribute__((visibility("default"))) const char sim_meta[] =',
            f"{_c_string(json.dumps(meta))};",
            start_wave(kernel, strict),
            _jump_table(leaders, instructions),
            body,
        )
    )
    too_soon = tuple(hazard.rule for hazard in hazards.values())
    return Translation(source, context.functions, tuple(instructions), too_soon)


def _c_string(text: str) -> str:
    """A C string literal, in pieces that compilers accept."""
    pieces = (text[i : i + 2000] for i in range(0, len(text), 2000))
    return "\n".join(json.dumps(piece) for piece in pieces)


def _reachable(
    code_object: CodeObject, kernel: KernelInfo, listing: list[Instruction]
) -> list[Instruction]:
    own = code_object.functions.get(kernel.name, (kernel.descriptor.entry, 0))
    ranges = [(own[0], own[0] + own[1] if own[1] else listing[-1].end)]
    found = [ins for ins in listing if ranges[0][0] <= ins.address < ranges[0][1]]
    if any(ins.mnemonic in _INDIRECT for ins in found):
        ranges += [
            (at, at + size)
            for name, (at, size) in code_object.functions.items()
            if name not in code_object.kernels
        ]
        found = [ins for ins in listing if any(a <= ins.address < b for a, b in ranges)]
    return found


def _translate(ins: Instruction, modes: Modes, context: Context) -> Code | None:
    """The C of an instruction; None for what the control flow handles."""
    name = ins.mnemonic
    if name in BRANCHES or name in _INDIRECT or name in ("s_endpgm", "s_barrier", "s_waitcnt"):
        return None
    if name == "buffer_inv":
        return Code(f"synchronise(w); invalidate(w, {int('sc1' in ins.modifiers)});")
    if name == "buffer_wbl2":
        return Code("write_back(w, $I);" if "sc1" in ins.modifiers else "")
    if name == "s_dcache_inv":
        return Code("invalidate_scalars(w);")
    if name in IGNORED:
        return Code("")
    if name == "s_trap":
        return Code("trap(w, $I);")
    if (code := translate_mode(ins)) is not None:
        return code
    copying = None
    if modes.indexed and name.startswith("v_"):
        ins, copying = with_indexed_source(ins, modes.indexed, context)
    for translate in _TRANSLATORS:
        if (code := translate(ins, context)) is not None:
            if copying:
                code.prepare = copying.prepare + code.prepare
                code.copies = copying.copies
            code.may_skip = modes.may_skip
            return code
    raise unknown(ins)


def _check_overflow_mode(instructions: list[Instruction]) -> None:
    """FP16_OVFL is simulated for fp8 alone: refuse kernels that also make f16 numbers."""
    setter = next((i for i in instructions if "HW_REG_MODE, 23" in i.text), None)
    for ins in instructions if setter else ():
        if re.match(r"v_(?!cvt_scalef32_pk_(fp|bf)).*_f16(_|$)", ins.mnemonic):
            raise unknown(ins, "with MODE.FP16_OVFL set")


def _leaders(instructions: list[Instruction], number: dict[int, int], entry: int) -> list[int]:
    """Numbers of the instructions that begin a basic block."""
    leaders = {0, number[entry]}
    for i, ins in enumerate(instructions):
        if ins.mnemonic in BRANCHES or ins.mnemonic == "s_call_b64":
            if ins.branch_target not in number:
                raise unknown(ins, "branch out of the kernel")
            leaders.add(number[ins.branch_target])
        ends = ins.mnemonic in BRANCHES or ins.mnemonic in _INDIRECT or ins.mnemonic == "s_endpgm"
        gap = i + 1 < len(instructions) and instructions[i + 1].address != ins.end
        if (ends or gap) and i + 1 < len(instructions):
            leaders.add(i + 1)
    return sorted(leaders)


def _blocks(instructions: list[Instruction], leaders: list[int]) -> list[list[Instruction]]:
    ends = [*leaders[1:], len(instructions)]
    return [instructions[a:b] for a, b in zip(leaders, ends, strict=True)]


def _jump_table(leaders: list[int], instructions: list[Instruction]) -> str:
    """``pc_at``: the number of the block that an address begins."""
    if not any(ins.mnemonic in _INDIRECT for ins in instructions):
        return ""
    cases = "\n".join(f"  case {instructions[i].address:#x}: return {2 * i};" for i in leaders)
    return (
        "static u32 pc_at(Wave *w, u32 instruction, u64 address) {\n"
        "  switch (address - w->group->launch->image_base) {\n"
        f"{cases}\n  }}\n  bad_jump(w, instruction, address);\n}}"
    )


class _Body:
    """Writes ``run_wave``: a state machine that can stop and go on at every yield point."""

    def __init__(
        self,
        instructions: list[Instruction],
        codes: list[Code | None],
        number: dict[int, int],
        leaders: list[int],
        strict: bool,
        too_soon: dict[int, int],
        reads_scc_early: set[int],
    ) -> None:
        self.instructions, self.codes, self.number = instructions, codes, number
        self.leaders = {leader: i for i, leader in enumerate(leaders)}
        self.strict = Strict(codes) if strict else None
        self.too_soon = too_soon
        self.reads_scc_early = reads_scc_early
        self.indirect = any(ins.mnemonic in _INDIRECT for ins in instructions)
        self.targets = {
            number[ins.branch_target] for ins in instructions if ins.mnemonic in BRANCHES
        }
        self.resumable = {
            number[ins.branch_target]
            for ins in instructions
            if ins.mnemonic in BRANCHES and ins.branch_target <= ins.address
        }

    def render(self) -> str:
        lines = [
            "u32 run_wave(Wave *w) {",
            "  u64 *blocks = w->group->block_counts;",
            "  u32 *const rows = w->v;",
        ]
        if self.indirect:
            lines.append("dispatch:")
        lines.append("  switch (w->pc) {")
        entry_like = self.leaders if self.indirect else {}
        for i, ins in enumerate(self.instructions):
            if i in self.leaders:
                if self.strict and (i in self.targets or i in entry_like or self._is_entry(i)):
                    self.strict.forget()
                if i in self.targets:
                    lines.append(f"L{i}:;")
                if i in self.resumable or i in entry_like or self._is_entry(i):
                    lines.append(f"  case {2 * i}:;")
                lines.append(f"  ENTER({self.leaders[i]});")
            lines.append(f"  // {ins.text}")
            if i in self.too_soon:
                lines.append(f"  too_soon(w, {i}, {self.too_soon[i]});")
            if i in self.reads_scc_early:
                lines.append(f"  if (UNLIKELY(w->scc > 1)) unset_scc(w, {i});")
            lines += self._instruction(i, ins)
        lines += ["  }", "  bad_jump(w, w->pc, 0);", "}"]
        return "\n".join(lines)

    def _is_entry(self, i: int) -> bool:
        # The first instruction, and the one after a kernel-argument preload header.
        return i == 0 or self.instructions[i].address == self.instructions[0].address + 256

    def _instruction(self, i: int, ins: Instruction) -> list[str]:
        name = ins.mnemonic
        if name in BRANCHES:
            return [self._branch(ins)]
        if name == "s_endpgm":
            return ["  return ENDED;"]
        if name == "s_barrier":
            return [f"  w->pc = {2 * i + 1}; return AT_BARRIER; case {2 * i + 1}:;"]
        if name == "s_waitcnt":
            return self._wait(i, ins)
        if name in _INDIRECT:
            return [self._jump(i, ins)]
        code = self.codes[i]
        assert code is not None
        lines = [_yield(i, "--w->budget")] if code.yields else []
        body = code.body
        if self.strict:
            body = self.strict.wrap(code, changes_exec(ins))
        elif code.prepare:
            body = code.prepare + " " + body
        if body and code.may_skip:
            body = f"if (!w->skips) {{ {body} }}"
        if body:
            lines.append(f"  {{ {body} }}".replace("$I", str(i)))
        return lines

    def _branch(self, ins: Instruction) -> str:
        target = self.number[ins.branch_target]
        condition = BRANCHES[ins.mnemonic]
        go = f"goto L{target};"
        if ins.branch_target <= ins.address:
            go = f"{{ if (--w->budget < 0) {{ w->pc = {2 * target}; return YIELDED; }} {go} }}"
        return f"  {go}" if condition == "1" else f"  if ({condition}) {go}"

    def _wait(self, i: int, ins: Instruction) -> list[str]:
        fields = ins.words[0] & 0xFFFF
        lines = [_yield(i, "(w->budget -= w->wait_cost)")]
        if self.strict:
            vm, lgkm = (fields & 15) | (fields >> 14 & 3) << 4, fields >> 8 & 15
            calls = [f"wait_vm(w, {vm});"] * (vm < 63) + [f"wait_lgkm(w, {lgkm});"] * (lgkm < 15)
            lines.append("  " + " ".join(calls))
        return lines

    def _jump(self, i: int, ins: Instruction) -> str:
        back = f"w->group->launch->image_base + {ins.end:#x}"
        if ins.mnemonic == "s_call_b64":
            save = f"set_s64(w, {ins.operands[0].index}, {back});"
            return f"  {save} w->pc = {2 * self.number[ins.branch_target]}; goto dispatch;"
        source = ins.operands[-1]
        save = ""
        if ins.mnemonic == "s_swappc_b64":
            save = f"set_s64(w, {ins.operands[0].index}, {back});"
        mark = ""
        if self.strict and save:
            mark = self.strict.set_scalars(
                tuple(range(ins.operands[0].index, ins.operands[0].index + 2))
            )
        return (
            f"  {{ u64 to = s64(w, {source.index}); {save} {mark} w->pc = pc_at(w, {i}, to); }} "
            "goto dispatch;"
        )


def _yield(i: int, spend: str) -> str:
    """End the turn when it is spent. `pc` is twice an instruction's number, plus one past this."""
    return (
        f"  if (UNLIKELY({spend} < 0)) {{ w->pc = {2 * i + 1}; return YIELDED; }} "
        f"case {2 * i + 1}:;"
    )
