"""What only the device knows of a routing, checked on request: ``AITER_MX_CHECK=1``.

The kernels leave out rows whose ids are out of range. With the variable set, ops read the ids back
and raise instead. That synchronises, so it is for finding a mistake, not for serving.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor


def checking() -> bool:
    """Whether ``AITER_MX_CHECK=1`` asks for checks; never while a stream is captured."""
    if os.environ.get("AITER_MX_CHECK", "0") in ("", "0"):
        return False
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def check_expert_ids(topk_ids: Tensor, num_experts: int) -> None:
    """Raise ValueError if checks are on and an id is not within 0 to num_experts - 1."""
    if not checking():
        return
    wrong = (topk_ids < 0) | (topk_ids >= num_experts)
    if wrong.any():
        token, slot = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"{int(wrong.sum())} of {topk_ids.numel()} ids in topk_ids are not within 0 to "
            f"{num_experts - 1}; the first is topk_ids[{token}, {slot}] = "
            f"{int(topk_ids[token, slot])}"
        )
