"""Instructions that do nothing: code that works, but that a careful author would not write.

What is told is sure: on every path that the code shows, the instruction could be left out. Kernels
with calls or computed jumps are not looked at, as not all of their paths are known.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from aiter_mx.sim.disasm import Instruction
from aiter_mx.sim.effects import ACCUMULATORS, M0, Effect, effects_of, row_name
from aiter_mx.sim.hazards import block_successors, needless_nops
from aiter_mx.sim.scalar import changes_exec

_T = TypeVar("_T")
_UNKNOWN_PATHS = {"s_setpc_b64", "s_swappc_b64", "s_call_b64", "s_setvskip"}
_LINE_BYTES = 32  # loops begin at multiples of it, and s_nop fills the gap
_VMEM = ("global_", "flat_", "scratch_", "buffer_")
_LGKM = ("ds_", "flat_", "s_load", "s_buffer", "s_scratch", "s_store", "s_atomic", "s_mem",
         "s_dcache", "s_sendmsg")  # fmt: skip
_MOST_VM, _MOST_LGKM = 63, 15  # that a wait can leave
_READS_M0 = re.compile(r"\w*(movrel|gpr_idx|gws|append|consume|ordered|addtid|sendmsg|ttrace)\w*")
_KEEPS_FIRST = re.compile(
    r"s_(cmp|bitcmp|bitset|cmov|addk|mulk|cbranch|store|buffer_store|scratch_store|atomic)\w*"
)  # reads it, or may leave it as it is
# Other vector instructions may write a part of a register, or other lanes than those of EXEC.
_WRITES_WHOLE = re.compile(
    r"v_(?!cvt_(pk|sr|scale|f16)|writelane|mfma|smfmac|permlane|dot)\w+_[buif](32|64)"
)


@dataclass(frozen=True)
class Idle:
    """An instruction that could be left out.

    Attributes:
        rule: name in ``aiter_mx.sim.checks``.
        why: the end of a sentence that begins with the instruction.
    """

    rule: str
    why: str


@dataclass(frozen=True)
class _Code:
    """A kernel's reachable blocks, each its first instruction and the one past its last."""

    instructions: Sequence[Instruction]
    effects: Sequence[Effect]
    blocks: dict[int, range]
    successors: dict[int, list[int]]


def idle_instructions(
    instructions: Sequence[Instruction], leaders: Sequence[int], entry: int, acc_base: int
) -> dict[int, Idle]:
    """Those of a kernel, by number.

    Args:
        instructions: of the kernel.
        leaders: numbers of those that begin a basic block.
        entry: number of the one that waves begin at.
        acc_base: the vector register that is the first accumulator, too.
    """
    if any(ins.mnemonic in _UNKNOWN_PATHS for ins in instructions):
        return {}
    ends = [*leaders[1:], len(instructions)]
    successors = block_successors(instructions, leaders)
    reached, waiting = {entry}, [entry]
    while waiting:
        new = set(successors[waiting.pop()]) - reached
        reached |= new
        waiting += new
    blocks = {first: range(first, end) for first, end in zip(leaders, ends, strict=True)
              if first in reached}  # fmt: skip
    code = _Code(instructions, effects_of(instructions), blocks, successors)
    found = _idle_nops(code, leaders) | _idle_waits(code, entry) | _unread_m0(code)
    if not any("gpr_idx" in ins.mnemonic or "movrel" in ins.mnemonic for ins in instructions):
        found |= _unread_results(code, acc_base)
    return found


def _idle_nops(code: _Code, leaders: Sequence[int]) -> dict[int, Idle]:
    starts = set(leaders)
    why = "keeps apart no two instructions that must be kept apart"
    return {
        i: Idle("idle-nop", why)
        for i in needless_nops(code.instructions, leaders)
        if any(i in block for block in code.blocks.values()) and not _fills_line(code, i, starts)
    }


def _fills_line(code: _Code, i: int, starts: set[int]) -> bool:
    """Whether a nop only moves a branch's target to where fetching it is fast."""
    while i < len(code.instructions) and code.instructions[i].mnemonic == "s_nop":
        i += 1
    return i in starts and code.instructions[i].address % _LINE_BYTES == 0


def _idle_waits(code: _Code, entry: int) -> dict[int, Idle]:
    """Waits before which no path has as many operations under way as they let pass."""
    most: dict[int, tuple[int, int]] = {entry: (0, 0)}
    waiting = {entry}
    idle: dict[int, bool] = {}
    while waiting:
        first = waiting.pop()
        vm, lgkm = most[first]
        for i in code.blocks[first]:
            ins = code.instructions[i]
            if ins.mnemonic == "s_waitcnt":
                fields = ins.words[0] & 0xFFFF
                vm_left, lgkm_left = (fields & 15) | (fields >> 14 & 3) << 4, fields >> 8 & 15
                idle[i] = vm <= vm_left and lgkm <= lgkm_left
                vm, lgkm = min(vm, vm_left), min(lgkm, lgkm_left)
            vm = min(_MOST_VM, vm + ins.mnemonic.startswith(_VMEM))
            lgkm = min(_MOST_LGKM, lgkm + ins.mnemonic.startswith(_LGKM))
        for successor in code.successors[first]:
            before = most.get(successor, (-1, -1))
            after = max(before[0], vm), max(before[1], lgkm)
            if after != before:
                most[successor] = after
                waiting.add(successor)
    why = "waits for nothing: what may be under way is no more than it lets pass"
    return {i: Idle("idle-wait", why) for i, is_idle in idle.items() if is_idle}


def _unread_m0(code: _Code) -> dict[int, Idle]:
    def touches(i: int) -> tuple[bool, bool]:
        ins = code.instructions[i]
        named = [operand.kind == "s" and operand.index <= M0 < operand.index + operand.count
                 for operand in ins.operands]  # fmt: skip
        is_kept = bool(named) and _KEEPS_FIRST.fullmatch(ins.mnemonic) is not None
        reads = code.effects[i].copies_to_lds or any(named[not is_kept :])
        return (
            reads or _READS_M0.fullmatch(ins.mnemonic) is not None,
            bool(named) and named[0] and not is_kept,
        )

    def live_before(first: int, after: bool) -> bool:
        for i in reversed(code.blocks[first]):
            reads, writes = touches(i)
            after = reads or (after and not writes)
        return after

    live = _backward(code, live_before, lambda one, other: one or other, False)
    found = {}
    for first, block in code.blocks.items():
        after = live[first]
        for i in reversed(block):
            reads, writes = touches(i)
            if writes and not after:
                found[i] = Idle("unread-m0", "sets m0, which nothing reads before it is set again")
            after = reads or (after and not writes)
    return found


def _unread_results(code: _Code, acc_base: int) -> dict[int, Idle]:
    """Vector instructions whose results no path reads."""
    reads, writes = ([_mask(rows, acc_base) for rows in of] for of in (
        [effect.reads for effect in code.effects], [effect.writes for effect in code.effects],
    ))  # fmt: skip
    of_block = dict.fromkeys(code.blocks, 0)
    for first, block in code.blocks.items():
        for i in block:
            of_block[first] |= reads[i]
    # Lanes that are off keep what they have, so that a write beyond the block ends nothing.
    live = _backward(code, lambda first, after: after | of_block[first],
                     lambda one, other: one | other, 0)  # fmt: skip
    found = {}
    for first, block in code.blocks.items():
        needed, overwritten = live[first], 0
        for i in reversed(block):
            effect = code.effects[i]
            if changes_exec(code.instructions[i]):
                overwritten = 0
            if effect.is_valu and writes[i] and not effect.scalar_writes:
                is_whole = _WRITES_WHOLE.fullmatch(effect.name) is not None
                if not writes[i] & needed & ~(overwritten if is_whole else 0):
                    names = ", ".join(map(row_name, effect.writes[:4]))
                    found[i] = Idle("unread-result", f"writes {names}, which nothing reads")
                    continue  # so that it need not read
                overwritten |= writes[i] if is_whole else 0
            needed |= reads[i]
            overwritten &= ~reads[i]
    return found


def _backward(
    code: _Code, before: Callable[[int, _T], _T], join: Callable[[_T, _T], _T], nothing: _T
) -> dict[int, _T]:
    """What holds after each block, from what holds before those that may follow it."""
    after = dict.fromkeys(code.blocks, nothing)
    predecessors: dict[int, list[int]] = {first: [] for first in code.blocks}
    for first in code.blocks:
        for successor in code.successors[first]:
            predecessors[successor].append(first)
    waiting = set(code.blocks)
    while waiting:
        first = waiting.pop()
        found = before(first, after[first])
        for predecessor in predecessors[first]:
            joined = join(after[predecessor], found)
            if joined != after[predecessor]:
                after[predecessor] = joined
                waiting.add(predecessor)
    return after


def _mask(rows: Sequence[int], acc_base: int) -> int:
    """Rows as bits; vector registers beyond the first accumulator are accumulators."""
    return sum(
        1 << (row if row < acc_base or row >= ACCUMULATORS else row - acc_base + ACCUMULATORS)
        for row in set(rows)
    )
