"""Where tests have tensors: the simulated gfx950, plain torch, a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import aiter_mx


def device_in(*places: str) -> Any:
    """The fixture ``device``: where tensors are, once in each of these places.

    Args:
        places: ``sim`` (CPU tensors whose kernels run on the simulated gfx950), ``torch`` (CPU
            tensors that plain torch computes) and ``cuda``, which ``-m gpu`` asks for.
    """
    marks = {"cuda": [pytest.mark.gpu]}

    @pytest.fixture(params=[pytest.param(place, marks=marks.get(place, [])) for place in places])
    def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
        with aiter_mx.simulate("gfx950") if request.param == "sim" else nullcontext():
            yield torch.device("cuda" if request.param == "cuda" else "cpu")

    return device
