"""What hand-written code objects do and compilers' do not."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from aiter_mx.code_object import parse_code_object
from aiter_mx.errors import LaunchError
from aiter_mx.sim.faults import MemoryFault, UninitializedRead, UnknownInstruction
from aiter_mx.sim.program import Program, SimOptions
from op_tests.sim.tools import Array, compile_gfx950, launch, program

DATA = np.random.default_rng(5).integers(0, 2**32, 4096, dtype=np.uint32)


def run(kernel: str, *more: int, options: SimOptions | None = None, lanes: int = 64) -> Array:
    out = np.zeros(lanes, np.uint32)
    launch(program("modes.cu"), kernel, 1, 64, [DATA, out, *more], access="rw", options=options)
    return out


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("bits", [0, 1, 8, 9])
def test_vskip_leaves_out_vector_instructions(bits: int, strict: bool) -> None:
    added = 64 + (bits & 1 == 0) * 1 + (bits & 8 == 0) * 24
    out = run("skipped", bits, options=SimOptions(strict=strict))
    np.testing.assert_array_equal(out, DATA[:64] + np.uint32(added))


def test_what_is_skipped_across_a_branch_writes_nothing() -> None:
    np.testing.assert_array_equal(run("skipped_far", 0), DATA[:64])
    with pytest.raises(UninitializedRead, match="global_store_dword"):
        run("skipped_far", 1)


def test_m0_picks_an_instructions_first_source() -> None:
    for index in range(3):
        np.testing.assert_array_equal(
            run("indexed", index), DATA[64 * index : 64 * index + 64] + np.uint32(1)
        )
    with pytest.raises(UninitializedRead, match="global_store_dword"):
        run("indexed", 3)  # v23 holds nothing
    with pytest.raises(MemoryFault, match=r"reads vector register 220, which M0 picks"):
        run("indexed", 200)


def test_a_vector_register_beyond_the_first_accumulator_is_an_accumulator() -> None:
    image = bytearray(compile_gfx950("modes.cu"))
    kernel = parse_code_object(bytes(image)).kernels["beyond"]
    rsrc3 = struct.pack("<III", kernel.descriptor.rsrc3, kernel.descriptor.rsrc1,
                        kernel.descriptor.rsrc2)  # fmt: skip
    at = [i for i in range(len(image)) if image.startswith(rsrc3, i)]
    assert at and kernel.descriptor.rsrc3 & 63 == 39
    for i in at:
        image[i] = 1  # accumulators from v8 on
    out = np.zeros(64, np.uint32)
    launch(Program.from_image(bytes(image)), "beyond", 1, 64, [DATA, out], access="rw")
    np.testing.assert_array_equal(out, DATA[:64] + np.uint32(5))


@pytest.mark.parametrize("stride", [4, 12, 0])
def test_buffers_by_index_take_records_of_their_stride(stride: int) -> None:
    index = 63 - np.arange(64)
    words = stride // 4
    records = 40 if stride else 40 * 4
    out = run("by_index", stride, records, lanes=128)
    inside = (index < records) if stride else np.full(64, True)
    np.testing.assert_array_equal(out[:64], np.where(inside, DATA[index * words], 0))
    np.testing.assert_array_equal(out[64:], np.where(inside, DATA[index * words + 2], 0))


@pytest.mark.parametrize("stride", [12, 8, 1, 0])
@pytest.mark.parametrize("at", [0, 44, 88, 96])
def test_scalar_loads_of_a_buffer_end_after_its_records_of_their_stride(
    stride: int, at: int
) -> None:
    records = 8 if stride else 96
    size = records * max(stride, 1)
    out = run("scalar_records", stride, records, at, lanes=256)
    inside = at + 4 * np.arange(4) + 4 <= size
    wanted = np.where(inside, DATA[at // 4 : at // 4 + 4], 0)
    np.testing.assert_array_equal(out.reshape(64, 4), np.broadcast_to(wanted, (64, 4)))


@pytest.mark.parametrize(
    ("flags", "word", "what"), [(-1 << 31, 1, "swizzles"), (1 << 23, 3, "adds")]
)
def test_descriptors_of_other_kinds_are_refused(flags: int, word: int, what: str) -> None:
    np.testing.assert_array_equal(run("descriptor", 0, 1), np.full(64, DATA[0]))
    with pytest.raises(UnknownInstruction, match=f"buffer descriptor that {what}"):
        run("descriptor", flags, word)


def anonymous(image: bytes, flags: int) -> bytes:
    """The image with no target in its metadata, and these flags in its header."""
    assert image.count(b"amdhsa.target") == 1
    nameless = bytearray(image.replace(b"amdhsa.target", b"amdhsa.tongue"))
    struct.pack_into("<I", nameless, 48, flags)
    return bytes(nameless)


@pytest.mark.parametrize(
    ("flags", "target"),
    [(0x54F, "gfx950"), (0xA4F, "gfx950:xnack-:sramecc-"), (0xF4C, "gfx942:xnack+:sramecc+")],
)
def test_the_elf_flags_name_a_target_that_the_metadata_does_not(flags: int, target: str) -> None:
    image = compile_gfx950("modes.cu")
    assert parse_code_object(anonymous(image, flags)).target == target
    assert parse_code_object(image).target == "gfx950"


def test_other_targets_and_unknown_machines_are_named() -> None:
    image = compile_gfx950("modes.cu")
    with pytest.raises(LaunchError, match="the simulator runs gfx950, got gfx942:xnack"):
        Program.from_image(anonymous(image, 0xF4C))
    with pytest.raises(LaunchError, match=r"names no target, and machine 0x7e .* 0x4f \(gfx950\)"):
        parse_code_object(anonymous(image, 0x57E))
