"""The mutation tool plants what it says, its reasons apply, and a sample of mutants is caught."""

from __future__ import annotations

import random
import re
from fnmatch import fnmatch

import pandas as pd
import pytest
from rich.console import Console

from aiter_mx.sim.disasm import disassemble, parse_line
from op_tests.sim.mutation import OUTCOMES, PAGE, judge_all
from op_tests.sim.mutation_cases import WORKLOAD_CASES
from op_tests.sim.mutation_coverage import first_unreached, reached
from op_tests.sim.mutation_kinds import KINDS, Form, mutants_of
from op_tests.sim.mutation_planting import (
    Mutant,
    assemble,
    code_around,
    listing,
    mutants,
    patched,
    sample,
)
from op_tests.sim.mutation_probes import CASES, EVERY_CASE, Case, verdict
from op_tests.sim.mutation_report import (
    UNREACHED,
    Outcome,
    Reason,
    page,
    reason_of,
    reasons,
    rows,
)
from op_tests.sim.mutation_rules import why_harmless
from op_tests.sim.mutation_workloads import WorkloadCase

each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
each_workload = pytest.mark.parametrize("case", WORKLOAD_CASES, ids=lambda case: case.name)


def test_a_sample_of_every_kind_is_caught_or_explained() -> None:
    drawn = [mutant for case in CASES for mutant in sample(case, list(KINDS), 1, seed=1)]
    random.Random(1).shuffle(drawn)
    chosen = [*{mutant.kind: mutant for mutant in drawn}.values()]
    outcomes = list(judge_all(chosen, 1, Console(quiet=True)))
    total = rows(outcomes, known := reasons())[-1]
    unexplained = [o.mutant for o in outcomes if not o.by and not reason_of(o, known)]
    assert not unexplained, "run op_tests/sim/mutation.py and see why these survive"
    assert total.caught >= 0.85 * total.count


def test_of_each_kernel_95_of_100_harmful_mutants_are_caught() -> None:
    """So the page says, and as many mutants are on file."""
    page = PAGE.read_text()
    on_file = pd.read_csv(OUTCOMES)
    shares = re.findall(r"^\| (.+) \| (\d+) \| (\d+) \| (\d+) \| (\d+\.\d) % \|$", page, re.M)
    assert [name for name, *_ in shares] == [case.name for case in EVERY_CASE]
    for name, count, caught, harmless, share in shares:
        of_kernel = on_file[on_file.case == name]
        assert (len(of_kernel), of_kernel.by.count()) == (int(count), int(caught))
        assert int(caught) >= 0.95 * (int(count) - int(harmless)) and float(share) >= 95, name
    assert "## Unexplained" not in page


@each_case
def test_unchanged_kernels_pass_their_probes(case: Case) -> None:
    assert verdict(case, case.image) == ("", "")


@each_workload
def test_problems_of_a_case_share_its_code(case: WorkloadCase) -> None:
    assert len({case.prepared(number, None).image for number in range(len(case.problems))}) == 1


@pytest.mark.slow
@each_workload
def test_unchanged_kernels_pass_their_problems(case: WorkloadCase) -> None:
    assert verdict(case, case.image) == ("", "")


@each_case
def test_assembling_a_kernel_again_gives_its_encoding(case: Case) -> None:
    code = listing(case)
    assert assemble([str(Form.of(ins.text)) for ins in code]) == [ins.words for ins in code]


@each_case
def test_a_mutant_changes_one_instruction_to_what_it_says(case: Case) -> None:
    before = disassemble(case.image)
    for mutant in random.Random(2).sample(sample(case, list(KINDS), 1, seed=2), 4):
        after = {ins.address: ins for ins in disassemble(patched(case, mutant))}
        changed = [now for old in before if (now := after[old.address]) != old]
        assert [ins.address for ins in changed] == [listing(case)[mutant.index].address]
        assert changed[0].words == mutant.words[: len(changed[0].words)]
        assert Form.of(changed[0].text).name == Form.of(mutant.new).name


@pytest.mark.parametrize(
    ("kernel", "kind", "change", "code", "by"),
    [
        ("gemv m2", "drop s_waitcnt", "dropped", r">>>s_waitcnt vmcnt\(0\)", "PendingAccess"),
        ("gemv m2", "drop s_barrier", "dropped", "", "RaceError|UninitializedRead"),
        ("mfma t1 f2", "drop s_barrier", "dropped", "", "RaceError|UninitializedRead"),
        ("mfma t1 f2", "MFMA scale select", "scale byte 1 of a", r"lgkmcnt", "wrong result"),
        ("mfma t1 f2", "MFMA register", "a and b exchanged", r"ds_read", "wrong result"),
        (
            "gemv m5",
            "memory offset",
            r"offset \+1",
            r">>>buffer_load_dword ",
            "wrong result|Memory",
        ),
    ],
)
def test_a_mistake_is_caught_by_the_check_that_is_for_it(
    kernel: str, kind: str, change: str, code: str, by: str
) -> None:
    case = next(case for case in CASES if case.name.startswith(kernel))
    mutant = next(
        m
        for m in mutants(case, [kind])
        if re.fullmatch(change, m.change) and re.search(code, code_around(m))
    )
    assert re.match(by, verdict(case, patched(case, mutant))[0])


def test_reasons_are_known_to_apply_to_mutants_that_exist() -> None:
    for reason in reasons():
        cases = [case for case in EVERY_CASE if fnmatch(case.name, reason.kernel)]
        if reason.unreached:
            code = ["\n".join(ins.text for ins in listing(case)) for case in cases]
            begins = reason.code.replace(">>>", "").replace("<<<", "")
            assert any(re.search(begins, text) for text in code), f"no code for {reason}"
            continue
        assert reason.verdict in ("harmless", "missed") and reason.kind in KINDS
        planted = (mutant for case in cases for mutant in mutants(case, [reason.kind]))
        assert any(reason.explains(m, code_around(m)) for m in planted), f"no mutant for {reason}"


def test_code_that_no_probe_reaches_is_known() -> None:
    case = next(case for case in EVERY_CASE if case.name == "moe_gemm t2 c1 w2 u1")
    known = reached(case)
    left = [i for i in range(len(listing(case))) if i not in known]
    assert 0 in known and 0 < len(left) < 0.2 * len(listing(case))
    begin = next(i for i in left if i - 1 in known and known.isdisjoint(range(i, i + 6)))
    text = listing(case)[begin + 5].text
    mutant = Mutant(case.name, "opcode", begin + 5, "", text, "", (0,))
    found = reason_of(Outcome(mutant, "", UNREACHED), reasons())
    assert found is not None and found.unreached
    assert first_unreached(mutant) == begin


@pytest.mark.parametrize(
    ("kernel", "kind", "code", "is_harmless"),
    [
        ("grouped m32", "drop s_waitcnt", r">>>s_waitcnt lgkmcnt\(5\)", True),
        ("gemv m2", "drop s_waitcnt", r">>>s_waitcnt vmcnt\(0\)", False),
        ("grouped m32", "shorten s_nop", r">>>s_nop 1<<<\nv_writelane", True),
        ("grouped m32", "shorten s_nop", r"row_shr:1 .*\n>>>s_nop 1<<<\nv_add_u32_dpp", False),
        ("moe_combine k3 sorted", "conversion select", r"src1_sel:DWORD<<<", True),
    ],
)
def test_a_rule_tells_harmless_mutants_from_others(
    kernel: str, kind: str, code: str, is_harmless: bool
) -> None:
    case = next(case for case in EVERY_CASE if case.name.startswith(kernel))
    found = [m for m in mutants(case, [kind]) if re.search(code, code_around(m))]
    assert any(bool(why_harmless(m)) == is_harmless for m in found[:4])


def test_banks_that_get_zeros_from_beyond_a_row_may_be_left_out_of_a_sum() -> None:
    case = next(case for case in EVERY_CASE if case.name.startswith("dgrad"))
    found = [m for m in mutants(case, ["lane move"]) if m.change == "bank_mask:0xe"]
    harmless = {m.old for m in found if why_harmless(m)}
    assert harmless == {m.old for m in found if re.search("row_shr:[48] .*bound_ctrl", m.old)
                        and re.match(r"\S+ (v\d+), v\d+, \1 ", m.old)}  # fmt: skip
    assert harmless and len(harmless) < len({m.old for m in found})


def test_survivors_count_against_the_share_and_need_a_reason() -> None:
    (case, *_), words = CASES, (0xBF800000,)
    mutant = Mutant(case.name, "opcode", 5, "dropped", listing(case)[5].text, "", words)
    caught, survivor = Outcome(mutant, "RaceError"), Outcome(mutant, "")
    total = rows([caught, caught, survivor], [])[-1]
    assert (total.count, total.caught, total.unexplained) == (3, 2, 1)
    for verdict_of in ("harmless", "missed"):
        known = [Reason("gemv*", "opcode", "drop.*", ">>>", verdict_of, "because")]
        total = rows([survivor], known)[-1]
        assert (total.unexplained, getattr(total, verdict_of)) == (0, 1)
    assert rows([survivor], [Reason("mfma*", "opcode", ".*", "", "missed", "")])[-1].unexplained
    text = page([caught, survivor], [])
    assert "| all | 2 | 1 | 50.0 % | 50.0 % | RaceError 1 | 0 | 0 | 1 |" in text


@pytest.mark.parametrize(
    ("text", "kind", "expected"),
    [
        ("s_waitcnt vmcnt(3) lgkmcnt(0)", "weaken s_waitcnt",
         ["s_waitcnt vmcnt(4) lgkmcnt(0)", "s_waitcnt lgkmcnt(0)",
          "s_waitcnt vmcnt(3) lgkmcnt(1)", "s_waitcnt vmcnt(3)"]),
        ("buffer_load_dword v1, v2, s[0:3], 0 offen offset:16 nt", "memory offset",
         [f"buffer_load_dword v1, v2, s[0:3], 0 offen{o} nt"
          for o in (" offset:17", " offset:20", " offset:32", " offset:0")]),
        ("v_cndmask_b32_e32 v1, v2, v3, vcc", "opcode", ["v_cndmask_b32_e32 v1, v3, v2, vcc"]),
        ("s_and_saveexec_b64 s[0:1], vcc", "exec mask",
         ["s_andn2_saveexec_b64 s[0:1], vcc", "s_mov_b64 s[0:1], exec"]),
        ("s_cbranch_vccz 7", "negate branch", ["s_cbranch_vccnz 7"]),
        ("s_nop 0", "shorten s_nop", []),
    ],
)  # fmt: skip
def test_texts_of_mutants(text: str, kind: str, expected: list[str]) -> None:
    ins = parse_line(f"\t{text}  // 000000001800: BF800000")
    assert ins is not None
    assert [new for _, new in mutants_of(ins, kind)] == expected
