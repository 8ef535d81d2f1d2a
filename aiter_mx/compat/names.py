"""What peers' callers hand over and read: payloads as bytes, and errors in the peers' names."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor


def payload_of(tensor: Tensor) -> Tensor:
    """A payload that may come as the bytes of e4m3, as peers hand it over."""
    return tensor.view(torch.float8_e4m3fn) if tensor.dtype == torch.uint8 else tensor


def renamed(error: Exception, names: Mapping[str, str]) -> Exception:
    """The TypeError or ValueError with arguments named as ``names`` maps this package's names."""
    words = re.compile(rf"\b({'|'.join(names)})\b")
    text = words.sub(lambda found: names[found[0]], str(error))
    return TypeError(text) if isinstance(error, TypeError) else ValueError(text)
