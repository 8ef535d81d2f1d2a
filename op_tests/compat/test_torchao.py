"""Rows and scales of groups, padded and unpadded; operands of older GPUs made MX."""

from __future__ import annotations

import pytest
import torch

import aiter_mx
from aiter_mx.compat.aiter import mx_from_fnuz
from aiter_mx.compat.torchao import (
    pad_token_groups,
    rearrange_group_scales,
    unpad_token_groups,
)

OFFSETS = [[0, 100, 100, 228, 300], [0, 300], [0, 0, 1, 300]]


@pytest.mark.parametrize("offsets", OFFSETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_groups_are_padded_and_unpadded(offsets: list[int], dtype: torch.dtype) -> None:
    x = torch.randn(300, 64).to(dtype)
    group_offs = torch.tensor(offsets, dtype=torch.int32)
    padded, padded_offs = pad_token_groups(x, group_offs)
    wanted = aiter_mx.quantize_grouped(torch.randn(300, 64), group_offs)
    assert torch.equal(padded_offs, wanted.group_offs) and padded.shape == wanted.rows.shape
    covered = torch.zeros(len(padded), dtype=torch.bool)
    for begin, end, at in zip(offsets, offsets[1:], padded_offs.tolist(), strict=False):
        size = end - begin
        assert torch.equal(padded[at : at + size].float(), x[begin:end].float())
        covered[at : at + size] = True
    assert not padded[~covered].float().any()
    again = unpad_token_groups(padded, group_offs, padded_offs, 300)
    assert again.dtype == dtype and torch.equal(again.float(), x.float())


@pytest.mark.parametrize("offsets", OFFSETS)
@pytest.mark.parametrize("layout", ["row_major", "16x4", "32_8", "32_4_4"])
def test_given_scales_are_arranged_as_a_grouped_quantisation_has_them(
    offsets: list[int], layout: str
) -> None:
    x = torch.randn(300, 160) * torch.rand(300, 1).exp2()
    group_offs = torch.tensor(offsets)
    found, padded_offs = rearrange_group_scales(aiter_mx.quantize(x)[1], group_offs, layout)
    wanted = aiter_mx.quantize_grouped(x, group_offs, scale_layout=layout)
    assert torch.equal(found.flatten(), wanted.row_scales.flatten())
    assert torch.equal(padded_offs, wanted.group_offs)


def test_what_is_no_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(8, 64)
    with pytest.raises(TypeError, match=r"group_offs must be torch\.int32 or torch\.int64"):
        pad_token_groups(x, torch.tensor([0.0, 8.0]))
    with pytest.raises(ValueError, match="at least one group"):
        pad_token_groups(x, torch.tensor([0]))
    monkeypatch.setenv("AITER_MX_CHECK", "1")
    with pytest.raises(ValueError, match="group 0 is 0 to 9"):
        pad_token_groups(x, torch.tensor([0, 9]))


def test_fnuz_operands_become_mx() -> None:
    payload = torch.arange(256, dtype=torch.uint8).repeat(3, 1).view(torch.float8_e4m3fnuz)
    payload[:, 128] = 1.0  # 0x80 is NaN, of another row below
    scale = torch.tensor([[0.37, 3.0], [1e-3, 77.0], [1.0, 1.0]])
    found, byte = mx_from_fnuz(payload, scale)
    exact = payload.double() * scale.double().repeat_interleave(128, -1)
    values = aiter_mx.dequantize(found, byte, torch.float64)
    block = exact.unflatten(-1, (-1, 32)).abs().amax(-1).repeat_interleave(32, -1)
    assert ((values - exact).abs() <= exact.abs() / 16 + block * 2.0**-17).all()
    floors = mx_from_fnuz(payload, scale, "floor")
    assert not torch.equal(floors[1], byte)
    assert torch.equal(floors[1], aiter_mx.quantize(exact.float(), mode="floor")[1])
    payload[1, 40] = float("nan")
    nan = aiter_mx.dequantize(*mx_from_fnuz(payload, scale)).isnan()
    assert nan[1, 32:64].all() and nan.sum() == 32
    with pytest.raises(TypeError, match=r"payload must be torch\.float8_e4m3fnuz"):
        mx_from_fnuz(found, scale)
    with pytest.raises(ValueError, match=r"scale must be \[3, 2\], got \[3, 1\]"):
        mx_from_fnuz(payload, scale[:, :1].contiguous())
