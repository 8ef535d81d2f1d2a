"""MX-FP8 operands for published kernels, and the proof of a product of them."""

from __future__ import annotations

import torch


def operand(rows: int, K: int, seed: int | None, salt: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Payload and scales of ``[rows, K]`` by a seed; None leaves their memory as it is."""
    if seed is None:
        return torch.empty(rows, K, dtype=torch.uint8), torch.empty(
            rows, K // 32, dtype=torch.uint8
        )
    generator = torch.Generator().manual_seed(2 * seed + salt)
    codes = torch.randint(0, 254, (rows, K), generator=generator)
    codes = (codes + (codes >= 127)).to(torch.uint8)  # 127 and 255 are NaN
    scales = torch.randint(120, 135, (rows, K // 32), generator=generator, dtype=torch.uint8)
    return codes, scales


def values_of(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What payload and scales stand for, in float64."""
    factors = torch.exp2(scales.double() - 127).repeat_interleave(32, 1)
    return codes.view(torch.float8_e4m3fn).double() * factors


def assert_product(out: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> None:
    """That ``out`` is ``x @ w.T`` but for one rounding to bf16 and sums in fp32."""
    wanted = x @ w.T
    bound = 2**-8 * wanted.abs() + 2**-20 * (x.abs() @ w.abs().T)
    assert ((out.double() - wanted).abs() <= bound).all()
