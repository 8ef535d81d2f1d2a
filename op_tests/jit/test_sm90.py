"""Every source for Hopper compiles, without a GPU, and keeps its values in registers."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from aiter_mx.jit import build as builds
from aiter_mx.jit.build import BuildRequest, build, csrc_dir
from aiter_mx.kernels.spec import Problem
from aiter_mx.launch import module_request
from op_tests.jit.launches_sm90 import SM90, launches

MOST_STACK = {  # bytes of a thread
    "grouped/persistent_sm90.cu": 8,
    "grouped/persistent_sm90.cu of moe_gemm": 32,  # six words of a tile, none of its loop
    "moe/wgmma_f16_sm90.cu": 8,
}


def of_the_ring(problem: Problem) -> int:
    """Words of the rescaler's where the scales of a block are apart. Where activated also where the
    scales of a tile begin, and, of gate and up in halves, where a thread's row of a block is, read
    once for each; with relu2 words by which the producer finds tiles and waits for them. The loop
    over a tile's steps has none."""
    activation = getattr(problem, "activation", "none")
    if activation == "none":
        return 8
    if activation == "relu2":
        return 56
    return 24 if getattr(problem, "layout", "") == "halves" else 16


MOST_STACK |= {
    name: of_the_ring(problem)
    for name, (module, problem, _) in launches().items()
    if module.sources["sm_90a"] == "grouped/rescaled_sm90.cu"
}
FRAME_SIZE = 0x11  # EIATTR_FRAME_SIZE of .nv.info: a symbol, and the bytes of its frame
# An instruction has 128 bits. As nvdisasm shows it, B2R.RESULT takes a barrier's answer to a
# register and to a predicate: the opcode, the bits that name these two, and the names of none.
B2R, REGISTER, NO_REGISTER, PREDICATE, NO_PREDICATE = 0x31C, 16, 0xFF, 64 + 17, 7
ASKS_FOR_NOTHING = r"""
extern "C" __global__ void aiter_mx_asks(int* answer) {
    int any;
    asm volatile("{.reg .pred own, any; setp.ne.u32 own, %1, 0;"
                 "barrier.cta.red.or.pred any, 1, 64, own; selp.u32 %0, 1, 0, any;}"
                 : "=r"(any) : "r"(threadIdx.x) : "memory");
    if (USED)
        answer[threadIdx.x] = any;
}
"""


def sections(image: bytes, prefix: bytes) -> Iterator[tuple[int, int]]:
    """Where those of a cubin begin and end whose names begin so."""
    (table,) = struct.unpack_from("<Q", image, 0x28)
    size, count, of_names = struct.unpack_from("<HHH", image, 0x3A)
    found = [struct.unpack_from("<IIQQQQ", image, table + i * size) for i in range(count)]
    names = found[of_names][4]
    for name, _, _, _, at, length in found:
        if image.startswith(prefix, names + name):
            yield at, at + length


def frames(image: bytes) -> Iterator[int]:
    """Bytes of stack of each function of a cubin."""
    for at, end in sections(image, b".nv.info\0"):
        while at < end:
            form, attribute, value = struct.unpack_from("<BBH", image, at)
            at += 4
            if form == 4:  # whose value is the size of what follows
                if attribute == FRAME_SIZE:
                    yield struct.unpack_from("<II", image, at)[1]
                at += value


def answers(image: bytes) -> Iterator[bool]:
    """Of each time that a barrier's answer is taken, whether it goes anywhere."""
    for at, end in sections(image, b".text."):
        for instruction in range(at, end, 16):
            word = int.from_bytes(image[instruction : instruction + 16], "little")
            if word & 0xFFF == B2R:
                register, predicate = word >> REGISTER & 0xFF, word >> PREDICATE & 7
                yield (register, predicate) != (NO_REGISTER, NO_PREDICATE)


@pytest.mark.parametrize("source", launches())
def test_a_source_for_hopper_compiles_and_spills_nothing(source: str) -> None:
    module, problem, config = launches()[source]
    image = build(module_request(module, SM90, problem, config)).image
    found = [*frames(image)]
    assert found, "no .nv.info that says what functions have of stack"
    assert max(found) <= MOST_STACK.get(source, MOST_STACK.get(source.split()[0], 0))


@pytest.mark.parametrize("source", launches())
def test_no_barrier_is_waited_at_again_for_its_answer(source: str) -> None:
    """As ptxas may where the answer is used. In a loop whose rounds differ from warp to warp that
    is an illegal instruction, or never ends."""
    module, problem, config = launches()[source]
    assert all(answers(build(module_request(module, SM90, problem, config)).image))


@pytest.mark.parametrize("used", [0, 1])
def test_answers_that_go_nowhere_are_seen(
    used: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "asks.cu").write_text(ASKS_FOR_NOTHING)
    monkeypatch.setattr(builds, "csrc_dir", lambda: tmp_path)
    image = build(BuildRequest("asks.cu", "sm_90a", (("USED", used),))).image
    assert [*answers(image)] == [bool(used)]


def test_no_source_for_hopper_is_left_out() -> None:
    there = {f"{path.parent.name}/{path.name}" for path in csrc_dir().glob("*/*_sm90.cu")}
    assert there <= set(launches())
