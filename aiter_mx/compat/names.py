"""Errors about arguments, in the names that another package's callers know them by."""

from __future__ import annotations

import re
from collections.abc import Mapping


def renamed(error: Exception, names: Mapping[str, str]) -> Exception:
    """The TypeError or ValueError with arguments named as ``names`` maps this package's names."""
    words = re.compile(rf"\b({'|'.join(names)})\b")
    text = words.sub(lambda found: names[found[0]], str(error))
    return TypeError(text) if isinstance(error, TypeError) else ValueError(text)
