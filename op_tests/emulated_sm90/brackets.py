"""C++ text by its brackets and strings."""

from __future__ import annotations

import re

_OPEN, _CLOSE = "([{", ")]}"


def _behind_string(text: str, at: int) -> int:
    quote = text[at]
    at += 1
    while text[at] != quote:
        at += 2 if text[at] == "\\" else 1
    return at + 1


def matching(text: str, at: int) -> int:
    """The place behind the bracket that closes the one at ``at``."""
    depth = 0
    while True:
        character = text[at]
        if character == "'" and re.match(r"[0-9a-fA-F]'[0-9a-fA-F]", text[at - 1 : at + 2]):
            at += 1  # it separates digits
            continue
        if character in "\"'":
            at = _behind_string(text, at)
            continue
        depth += (character in _OPEN) - (character in _CLOSE)
        at += 1
        if depth == 0:
            return at


def split(text: str, separator: str) -> list[str]:
    """The parts of a text between separators that are in no string and in no bracket."""
    parts, depth, start, at = [], 0, 0, 0
    while at < len(text):
        character = text[at]
        if character in "\"'":
            at = _behind_string(text, at)
            continue
        depth += (character in _OPEN) - (character in _CLOSE)
        if character == separator and depth == 0:
            parts.append(text[start:at])
            start = at + 1
        at += 1
    return [*parts, text[start:]]
