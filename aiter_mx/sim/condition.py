"""Instructions that may read SCC before anything has written it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from aiter_mx.sim.disasm import Instruction
from aiter_mx.sim.hazards import block_successors
from aiter_mx.sim.isa.salu import SALU, SAVE_EXEC


def _writes(ins: Instruction) -> bool:
    rule = SALU.get(ins.mnemonic)
    return ins.mnemonic in SAVE_EXEC or (rule is not None and "scc =" in rule.expression)


def _reads(ins: Instruction) -> bool:
    if ins.mnemonic.startswith("s_cbranch_scc") or any(o.kind == "scc" for o in ins.operands):
        return True
    rule = SALU.get(ins.mnemonic)
    return rule is not None and bool(re.search(r"\bscc\b(?! =)", rule.expression))


def early_readers(
    instructions: Sequence[Instruction], leaders: Sequence[int], entry: int
) -> set[int]:
    """Numbers of the instructions that a path from ``entry`` reaches with SCC unwritten."""
    ends = dict(zip(leaders, [*leaders[1:], len(instructions)], strict=True))
    successors = block_successors(instructions, leaders)
    found, seen, waiting = set(), {entry}, [entry]
    while waiting:
        first = waiting.pop()
        for i in range(first, ends[first]):
            if _reads(instructions[i]):
                found.add(i)
            if _writes(instructions[i]):
                break
        else:
            new = [block for block in successors[first] if block not in seen]
            seen.update(new)
            waiting += new
    return found
