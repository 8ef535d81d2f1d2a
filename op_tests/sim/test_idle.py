"""Class ``style``: instructions that do nothing, and the same ones where they are needed."""

from __future__ import annotations

import numpy as np
import pytest

from aiter_mx.sim.faults import IdleInstruction
from aiter_mx.sim.program import Program, SimOptions
from aiter_mx.sim.translate import blocks_of
from op_tests.sim.tools import Array, launch, program

DATA = np.random.default_rng(5).integers(0, 2**31, 128, dtype=np.uint32)
LANES = np.arange(64)
SWAPPED, ADDED = LANES ^ 1, np.where(LANES < 8, 2, 1)
S_NOP_0 = (0xBF800000).to_bytes(4, "little")
CASES = {
    "nops": ((), DATA[SWAPPED] + 1, [("idle-nop", "s_nop 3")]),
    "nop_of_one_path": ((1,), DATA[SWAPPED] + 1, []),
    "waits": (
        (),
        DATA[:64] + DATA[64:],
        [("idle-wait", "s_waitcnt vmcnt(2)"), ("idle-wait", "s_waitcnt vmcnt(0) lgkmcnt(0)")],
    ),
    "waits_in_a_loop": ((3,), DATA[:64], []),
    "m0_set": (
        (1,),
        DATA[:64] + 7,
        [("unread-m0", "s_mov_b32 m0, 5"), ("unread-m0", "s_mov_b32 m0, 9")],
    ),
    "results": (
        (),
        DATA[:64] + 2,
        [("unread-result", text) for text in
         ("v_mov_b32_e32 v60, 1", "v_add_u32_e32 v61, 1, v60", "v_add_u32_e32 v62, 1, v61")],
    ),
    "result_of_some_lanes": ((), DATA[:64] + ADDED, []),
}  # fmt: skip


def run(
    image: Program, kernel: str, checks: tuple[str, ...]
) -> tuple[Array, list[tuple[str, str]]]:
    out = np.zeros(64, np.uint32)
    report = launch(image, kernel, 1, 64, [DATA, out, *CASES[kernel][0]],
                    options=SimOptions(checks=checks, collect=True))  # fmt: skip
    return out, [(found.check, found.instruction) for found in report.findings]


def without(image: Program, kernel: str, mnemonics: tuple[str, ...]) -> Program:
    """The code object with ``s_nop 0`` in place of a kernel's idle instructions of some kinds."""
    code = blocks_of(image.code_object, image.kernel(kernel), image.listing)
    text = next(s for s in image.code_object.segments if s.name == ".text")
    begin, changed = image.image.index(text.data), bytearray(image.image)
    for i in image.idle(kernel):
        ins = code.instructions[i]
        if ins.mnemonic.startswith(mnemonics):
            at = begin + ins.address - text.address
            changed[at : at + 4 * len(ins.words)] = S_NOP_0 * len(ins.words)
    return Program.from_image(bytes(changed))


@pytest.mark.parametrize("kernel", CASES)
def test_instructions_that_do_nothing_are_told_from_those_that_are_needed(kernel: str) -> None:
    _, expected, idle = CASES[kernel]
    out, found = run(program("idle.cu"), kernel, ("style",))
    np.testing.assert_array_equal(out, expected)
    # clang leaves a state behind assembly, which it does not look into.
    assert [each for each in found if each != ("idle-nop", "s_nop 0")] == idle


@pytest.mark.parametrize("kernel", [name for name, case in CASES.items() if case[2]])
def test_kernels_give_the_same_without_what_does_nothing(kernel: str) -> None:
    changed = without(program("idle.cu"), kernel, ("s_", "v_"))
    out, found = run(changed, kernel, ("proven", "llvm"))
    np.testing.assert_array_equal(out, CASES[kernel][1])
    assert not found


def test_style_is_off_unless_it_is_asked_for() -> None:
    image, out = program("idle.cu"), np.zeros(64, np.uint32)
    for checks in (SimOptions().checks, ("-lds-race",), ("all", "-style"), ("style", "-idle-nop")):
        assert run(image, "nops", checks)[1] == []
    for checks in (("all",), ("idle-nop",)):
        with pytest.raises(IdleInstruction, match=r"kernel nops: 's_nop 3' at 0x\w+ keeps apart no "
                           "two instructions") as caught:  # fmt: skip
            launch(image, "nops", 1, 64, [DATA, out], options=SimOptions(checks=checks))
        assert (caught.value.check, caught.value.kind) == ("idle-nop", "style")


def test_code_that_no_wave_comes_to_is_not_reported() -> None:
    image, out = program("idle.cu"), np.zeros(64, np.uint32)
    options = SimOptions(checks=("style",), collect=True)
    (found,) = launch(image, "nops", 2, 64, [DATA, out], options=options).findings
    assert found.count == 2
