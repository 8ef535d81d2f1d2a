"""``AITER_MX_CHECK=1``: groups of rows that cannot be are errors, and silence elsewhere."""

from __future__ import annotations

import pytest
import torch

import aiter_mx
from aiter_mx.checks import checking
from aiter_mx.ops.grouped_gemm import grouped_gemm_ranges

ROWS, G, N, K = 6, 2, 32, 64
A, B = aiter_mx.quantize(torch.randn(ROWS, K)), aiter_mx.quantize(torch.randn(G, N, K))


@pytest.mark.parametrize(
    ("text", "on"),
    [("", 0), ("0", 0), ("false", 0), ("No", 0), ("OFF", 0), ("1", 1), ("true", 1), ("on", 1)],
)
def test_the_variable_reads_as_words(text: str, on: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AITER_MX_CHECK", text)
    assert checking() == bool(on)
    monkeypatch.delenv("AITER_MX_CHECK")
    assert not checking()


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([0, 4, 2], "group 1 is 4 to 2"),
        ([0, 3, 7], "group 1 is 3 to 7"),
        ([-1, 3, 6], "group 0 is -1 to 3"),
        ([7, 6], "group 0 is 0 to 7"),
        ([0, 3, 6], ""),
        ([2, 2, 5], ""),
        ([3, 6], ""),
    ],
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offsets_of_groups_are_read(
    offsets: list[int], message: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    group_offs = torch.tensor(offsets, dtype=dtype)
    calls = [lambda: aiter_mx.grouped_gemm(*A, *B, group_offs)]
    if len(offsets) == G + 1:
        x = torch.randn(ROWS, K)
        calls.append(lambda: aiter_mx.quantize_grouped(x, group_offs))
        calls.append(lambda: aiter_mx.quantize_dual_grouped(x, group_offs))
    monkeypatch.setenv("AITER_MX_CHECK", "1")
    for call in calls:
        if not message:
            call()
            continue
        with pytest.raises(
            ValueError, match=f"group_offs must give groups.*within 0 to 6.*{message}"
        ):
            call()
    monkeypatch.setenv("AITER_MX_CHECK", "0")
    for call in calls[:1] if not message or "-1" in message else []:
        call()


@pytest.mark.parametrize(
    ("starts", "ends", "message"),
    [
        ([0, 2], [3, 6], "group 1 begins at row 2, and another one ends at 3"),
        ([0, 3], [3, 8], "within 0 to 6 .* group 1 is 3 to 8"),
        ([-2, 3], [3, 6], "group 0 is -2 to 3"),
        ([4, 0], [6, 4], ""),
        ([6, 1], [0, 5], ""),
    ],
)
def test_ranges_of_groups_are_read(
    starts: list[int], ends: list[int], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AITER_MX_CHECK", "yes")
    groups = (torch.tensor(starts, dtype=torch.int32), torch.tensor(ends, dtype=torch.int32))
    if not message:
        grouped_gemm_ranges(*A, *B, *groups)
        return
    with pytest.raises(ValueError, match=message):
        grouped_gemm_ranges(*A, *B, *groups)
