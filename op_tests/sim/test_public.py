"""What is known of other people's kernels names rules that there are, for the kernels it is of."""

from __future__ import annotations

import csv
import re

from aiter_mx.sim.checks import CHECKS, CLASSES, STYLE_RULES
from aiter_mx.sim.report import Finding
from op_tests.sim.public import KNOWN, SAVED, known_rules, proven

MEMORY_FAULT = "memory-fault"  # no rule: an address is outside every region


def test_known_findings_name_rules_of_class_proven_and_say_why() -> None:
    with KNOWN.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows
    for row in rows:
        assert row["rule"] == MEMORY_FAULT or CHECKS[row["rule"]].kind == "proven"
        assert row["instructions"].split() and row["why"].endswith(".")


def test_findings_are_known_by_object_rule_and_instruction() -> None:
    name = "f8_block_scale_mi350_x32.co"
    found = [
        Finding("lds-race", "proven", "ds_write_b64 v1, v[2:3]", 64, 1, ""),
        Finding("m0-of-copy", "llvm", "buffer_load_dword v1, s[0:3], 0 lds", 80, 1, ""),
    ]
    assert proven(found) == {("lds-race", "ds_write_b64")} <= known_rules(name)
    assert ("lds-race", "v_mfma_f32") not in known_rules(name)
    assert not known_rules("f4gemm/other.co")


def test_every_object_of_the_wheel_is_known_and_counted_by_class() -> None:
    with (SAVED / "public_decoded.csv").open(newline="") as file:
        *families, total = csv.DictReader(file)
    assert total["family"] == "all" and total["objects"] == total["known"] == "1220"
    counted = {"objects", "known", "instructions", "wait states, proven", "wait states, llvm"}
    assert set(total) == counted | STYLE_RULES | {"family", "commit"}
    for column in counted | STYLE_RULES:
        assert int(total[column]) == sum(int(row[column]) for row in families), column
    assert all(int(total[rule]) for rule in STYLE_RULES)  # each is broken by somebody


def test_every_launched_object_is_right_and_breaks_what_is_known_alone() -> None:
    with (SAVED / "public_launched.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 43
    for row in rows:
        assert float(row["error_over_bound"]) <= 1, row["object"]
        found = set(re.findall(r"(\w+) (\S+) \d+", row["findings"]))
        assert {kind for kind, _ in found} <= set(CLASSES)
        known = {rule for rule, _ in known_rules(row["object"])}
        assert {rule for kind, rule in found if kind == "proven"} == known, row["object"]
