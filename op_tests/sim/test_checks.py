"""Rules by name and class, findings that do not end a launch, and races in global memory."""

from __future__ import annotations

import re

import numpy as np
import pytest

from aiter_mx.errors import SimulatorError
from aiter_mx.sim import checks
from aiter_mx.sim.faults import HazardError, MemoryFault, RaceError, UninitializedRead
from aiter_mx.sim.program import SimOptions
from aiter_mx.sim.report import LaunchReport
from op_tests.sim.tools import Array, launch, program

DATA = np.random.default_rng(9).integers(0, 2**32, 1024, dtype=np.uint32)


def run(
    kernel: str, *more: int, grid: int = 1, block: int = 64, options: SimOptions | None = None
) -> tuple[Array, LaunchReport]:
    out = np.zeros(1025, np.uint32)
    report = launch(program("strict.cu"), kernel, grid, block, [DATA, out, *more], access="rb",
                    options=options)  # fmt: skip
    return out, report


def rule_of(kernel: str, *more: int, **geometry: int) -> tuple[str, str]:
    """The rule that a kernel breaks first, and its class."""
    try:
        run(kernel, *more, **geometry)
    except SimulatorError as error:
        return error.check, error.kind
    return "", ""


@pytest.mark.parametrize(
    ("kernel", "more", "geometry", "rule"),
    [
        ("lanes_differ", (2,), {}, ""),
        ("lanes_differ", (0,), {}, "lanes-differ"),
        ("waves_write", (0,), {"block": 256}, ""),
        ("waves_write", (1,), {"block": 256}, ""),
        ("waves_write", (2,), {"block": 256}, "global-race"),
        ("waves_write", (3,), {"block": 256}, ""),
        ("waves_read", (1,), {"block": 256}, ""),
        ("waves_read", (0,), {"block": 256}, "global-race"),
        ("groups_overlap", (0, 0), {"grid": 8}, ""),
        ("groups_overlap", (5, 1), {"grid": 8}, ""),
        ("groups_overlap", (5, 0), {"grid": 8}, "global-race"),
        ("groups_overlap", (1, 0), {"grid": 8}, "global-race"),
        ("groups_read", (0,), {"grid": 4}, "global-race"),
        ("atomic_at", (0,), {}, ""),
        ("atomic_at", (2,), {}, "misaligned-atomic"),
        ("lds_atomic_at", (0,), {}, ""),
        ("lds_atomic_at", (1,), {}, "misaligned-atomic"),
        ("scratch_word", (3,), {}, ""),
        ("scratch_word", (4,), {}, "unset-scratch"),
        ("spilled_unset", (0,), {}, ""),
        ("spilled_unset", (1,), {}, "unset-register"),
        ("copy_over_reads", (), {"block": 256}, "lds-copy-over-reads"),
        ("copy_after_reads", (), {"block": 256}, ""),
        ("write_over_reads", (), {"block": 256}, "lds-race"),
        ("neighbour_no_wait", (), {"block": 256}, "lds-race"),
        ("unset_register", (), {}, "unset-register"),
        ("early_read", (), {}, "early-register"),
        ("late_write", (), {}, "overwritten-load"),
    ],
)
def test_a_mistake_is_named_by_its_rule(
    kernel: str, more: tuple[int, ...], geometry: dict[str, int], rule: str
) -> None:
    kind = checks.CHECKS[rule].kind if rule else ""
    assert rule_of(kernel, *more, **geometry) == (rule, kind)


def test_workgroups_that_store_the_same_values_at_once_do_not_race() -> None:
    rounds, data = 4000, np.random.default_rng(3).integers(0, 2**32, 64 * 4000, dtype=np.uint32)
    options = SimOptions(threads=4)  # of the host, which may meet at any moment of a store
    for _ in range(4):
        out = np.zeros_like(data)
        launch(program("strict.cu"), "groups_agree", 8, 64, [data, out, rounds], access="rb",
               options=options)  # fmt: skip
        np.testing.assert_array_equal(out, data)


def test_workgroups_that_wait_for_each_other_by_atomics_may_read_each_others_writes() -> None:
    out, _ = run("groups_read", 1, grid=2, options=SimOptions(threads=2))
    np.testing.assert_array_equal(out[512:640], np.tile(DATA[:64], 2))


def test_races_in_global_memory_say_who_wrote() -> None:
    with pytest.raises(RaceError, match=r"writes the byte at 0x\w+, byte \d+ of argument 1 .*, "
                       r"which wave 0 of workgroup number 0 wrote"):  # fmt: skip
        run("groups_overlap", 5, 0, grid=2, options=SimOptions(threads=1))
    with pytest.raises(RaceError, match="where another of its lanes writes a different value"):
        run("lanes_differ", 0)
    with pytest.raises(MemoryFault, match=r"is an atomic of 4 bytes at 0x.*no multiple of 4"):
        run("atomic_at", 2)
    with pytest.raises(UninitializedRead, match="reads the scratch byte at"):
        run("scratch_word", 4)


def test_address_zero_is_no_ones() -> None:
    np.testing.assert_array_equal(run("scalar_at", 0, 0)[0][:64], DATA[:64])  # out of range
    with pytest.raises(MemoryFault, match="reads 4 bytes at 0x0"):
        run("scalar_at", 0, 4096)


def test_scc_is_unset_until_an_instruction_writes_it() -> None:
    image = program("strict.cu")
    kernel = image.kernel("scc_unset")
    begin = kernel.descriptor.entry + (256 if kernel.descriptor.preload_dwords else 0)
    text = next(s for s in image.code_object.segments if s.name == ".text")
    at = image._image.index(text.data) + begin - text.address
    cselect = (0x85008080).to_bytes(4, "little")  # s_cselect_b32 s0, 0, 0
    first = next(ins for ins in image.listing if ins.address == begin)
    patch = cselect + (0xBF800000).to_bytes(4, "little") * (len(first.words) - 1)
    changed = bytearray(image._image)
    changed[at : at + len(patch)] = patch
    out = np.zeros(1025, np.uint32)
    with pytest.raises(UninitializedRead, match=r"'s_cselect_b32 .* reads scc, which nothing has"):
        launch(type(image).from_image(bytes(changed)), "scc_unset", 1, 64, [DATA, out, 0])


def test_rules_are_switched_by_name_and_class() -> None:
    copy = ("copy_over_reads",)
    for switched in (("proven",), ("all", "-llvm"), ("-lds-copy-over-reads",)):
        out, _ = run(*copy, block=256, options=SimOptions(checks=switched))
        np.testing.assert_array_equal(out[:256], DATA[np.arange(256) ^ 64])
    with pytest.raises(RaceError, match="copies to the LDS byte"):
        run(*copy, block=256, options=SimOptions(checks=("llvm",)))
    with pytest.raises(ValueError, match=r"rules \(unset-register, .* got 'lds'"):
        SimOptions(checks=("lds",))


def test_the_environment_switches_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AITER_MX_SIM_CHECKS", "all,-llvm")
    assert SimOptions.from_environment().checks == ("all", "-llvm")
    run("copy_over_reads", block=256, options=SimOptions.from_environment())


def test_findings_are_collected_and_the_launch_goes_on() -> None:
    out, report = run("copy_over_reads", block=256, options=SimOptions(collect=True))
    np.testing.assert_array_equal(out[:256], DATA[np.arange(256) ^ 64])
    (found,) = report.findings
    assert (found.check, found.kind) == ("lds-copy-over-reads", "llvm")
    assert found.instruction.startswith("global_load_lds_dword") and found.count >= 1
    assert re.search(r"copies to the LDS byte at \d+, which wave \d read", found.message)
    _, report = run("early_read", options=SimOptions(collect=True))
    assert {f.check for f in report.findings} == {"early-register", "overwritten-load"}


def test_wait_states_are_rules_of_their_own() -> None:
    data, out = np.arange(64, dtype=np.uint32), np.zeros(64, np.uint32)
    arguments = [data, out]
    with pytest.raises(HazardError) as caught:
        launch(program("hazards.cu"), "too_soon", 1, 64, arguments)
    assert (caught.value.check, caught.value.kind) == ("dpp-source", "llvm")
    launch(program("hazards.cu"), "too_soon", 1, 64, arguments,
           options=SimOptions(checks=("proven",)))  # fmt: skip
