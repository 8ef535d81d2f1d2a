"""A kernel's preprocessed CUDA C++ as C++ for runtime.h.

``asm`` statements become calls and ``__shared__`` variables places in the block's memory; what
describes an entry point ``aiter_mx_*`` is a variable ``emulated_aiter_mx_*``.
"""

from __future__ import annotations

import re

from op_tests.emulated_sm90.asm import Statement, template_of
from op_tests.emulated_sm90.brackets import matching, split
from op_tests.emulated_sm90.ptx import UnknownPTX

_ASM = re.compile(r"\b(?:asm|__asm__)\b\s*(?:volatile|__volatile__)?\s*\(")
_DYNAMIC = re.compile(
    r"\bextern\s+__shared__\s+(?:__align__\((\d+)\)\s+)?([\w ]+?)\s+(?:__align__\((\d+)\)\s+)?(\w+)"
    r"\s*\[\s*\]\s*;"
)
_SHARED = re.compile(r"(?:\bstatic\s+)?\b__shared__\s+([^;{}()]*(?:__align__\(\d+\))?[^;{}]*);")
_ENTRY = re.compile(r'extern "C"\s+__global__\s+void\b([^;{]*?)\b(aiter_mx_\w+)\s*\(')
_LINE = re.compile(r"^# .*$", re.MULTILINE)  # of the preprocessor
_PRAGMA = re.compile(r"^[ \t]*#pragma (?!once).*$", re.MULTILINE)


def translate(text: str) -> str:
    """C++ that a compiler for the CPU takes, with the same lines."""
    text = _without_asm(_PRAGMA.sub("", text))
    text = _DYNAMIC.sub(_dynamic_memory, text)
    text = _with_static_memory(text)
    left = "__shared__" in _LINE.sub("", text)
    assert not left, "a use of __shared__ was not translated"
    return _with_entries(text)


def _without_asm(text: str) -> str:
    out, at, site = [], 0, 0
    while found := _ASM.search(text, at):
        end = matching(text, found.end() - 1)
        inside = _LINE.sub("", text[found.end() : end - 1])  # macros leave some within
        site += 1
        try:
            new = Statement(site, inside).translated()
        except UnknownPTX as unknown:
            said = f"{unknown} in {template_of(inside)[:80]}".replace("\\", "").replace('"', "'")
            new = f'emulated::fail("PTX that the emulator does not know: %s", "{said}")'
        out += [text[at : found.start()], new, "\n" * text[found.start() : end].count("\n")]
        at = end
    return "".join(out) + text[at:]


def _dynamic_memory(found: re.Match[str]) -> str:
    type_, name, align = found[2], found[4], found[1] or found[3] or 16
    return f"{type_}* const {name} = ({type_}*)emulated::dynamic_shared({align});"


def _with_static_memory(text: str) -> str:
    count = 0

    def declared(found: re.Match[str]) -> str:
        nonlocal count
        count += 1
        names = []
        for one in split(re.sub(r"__align__\(.*?\)", "", found[1]), ","):
            named = re.search(r"(\w+)\s*$", re.sub(r"(\[.*\]\s*)+$", "", " ".join(one.split())))
            assert named, found[0]
            names.append(named[1])
        struct, held = f"EmulatedShared{count}", f"emulated_shared_{count}"
        references = " ".join(f"auto& {name} = {held}.{name};" for name in names)
        return (
            f"struct {struct} {{ {found[1]}; }}; "
            f"{struct}& {held} = emulated::shared<{struct}>(); {references}"
        )

    return _SHARED.sub(declared, text)


def _with_entries(text: str) -> str:
    out, at = [], 0
    while found := _ENTRY.search(text, at):
        end = matching(text, found.end() - 1)
        if text[end:].lstrip()[0] != "{":  # a declaration
            out.append(text[at:end])
            at = end
            continue
        behind, name = matching(text, text.index("{", end)), found[2]
        head = text[found.start() : end]
        if (cluster := head.find("__cluster_dims__")) >= 0:
            head = head[:cluster] + head[matching(head, head.index("(", cluster)) :]
        described = f"emulated::Kernel emulated_{name} = emulated::kernel_of(&{name});"
        out += [text[at : found.start()], head, text[end:behind], f' extern "C" {{ {described} }} ']
        at = behind
    return "".join(out) + text[at:]
