"""Operands of the linear that reveal mistakes: draws of scales, zeros and NaN."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from op_tests.mx_reference import linear_reference64, random_mx
from op_tests.operands import Exponents, nan_scale_of_zeros, zero_blocks

Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def operands(M: int, N: int, K: int, seed: int, **options: Any) -> Operands:
    generator = torch.Generator().manual_seed(seed)
    return (*random_mx(M, K, generator, **options), *random_mx(N, K, generator, **options))


def spread(M: int, N: int, K: int, seed: int, of_x: Exponents, of_w: Exponents) -> Operands:
    """Scales of x and of w from ranges of their own."""
    generator = torch.Generator().manual_seed(seed)
    return (
        *random_mx(M, K, generator, scale_exponents=of_x),
        *random_mx(N, K, generator, scale_exponents=of_w),
    )


def bias_as_large_as_outputs(drawn: Operands, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """One for each row of w, so that neither it nor the products are lost in rounding."""
    size = linear_reference64(*drawn).abs().mean()
    scale = size if dtype is not torch.float16 else size.clamp(max=1000.0)
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(len(drawn[2]), generator=generator, dtype=torch.float64) * scale).to(dtype)


def with_opposite_scales(drawn: Operands, shift: int) -> Operands:
    """x times 2^shift and w divided by as much: the same products, from extreme scales."""
    xq, xs, wq, ws = drawn
    return xq, (xs.int() + shift).to(torch.uint8), wq, (ws.int() - shift).to(torch.uint8)


def with_two_scales(drawn: Operands, top: int, octaves: int) -> Iterator[Operands]:
    """Of scales of 1 and 2: those of w become 2^top and 2^(top - octaves), those of x 2^-top and
    2^(-top - octaves), and the other way round.

    A kernel that brings the scales of a chunk into fp16 can do so up to some distance between them.
    """
    xq, xs, wq, ws = drawn
    for of_x, of_w in ((-top, top), (top, -top)):
        yield xq, 127 + of_x - (xs - 127) * octaves, wq, 127 + of_w - (ws - 127) * octaves


def with_zero_blocks(drawn: Operands, generator: torch.Generator) -> Operands:
    """A fifth of all blocks zero, of either sign, with any scale but NaN."""
    xq, xs, wq, ws = (t.clone() for t in drawn)
    zero_blocks(xq, xs, generator)
    zero_blocks(wq, ws, generator)
    return xq, xs, wq, ws


def with_zero_rows(drawn: Operands) -> Operands:
    """Every third row of x and of w zero, under the least scale."""
    xq, xs, wq, ws = (t.clone() for t in drawn)
    for payload, scale in ((xq, xs), (wq, ws)):
        payload.view(torch.uint8)[::3] = 0
        scale[::3] = 0
    return xq, xs, wq, ws


def with_rows_far_apart(drawn: Operands) -> Operands:
    """A row of x and one of w whose blocks take turns between two scales 2^60 apart."""
    xq, xs, wq, ws = (t.clone() for t in drawn)
    for scale, row in ((xs, len(xs) // 2), (ws, len(ws) // 3)):
        scale[row, ::2] -= 60
    return xq, xs, wq, ws


def with_nan_at(drawn: Operands, of_x: tuple[int, int], of_w: tuple[int, int]) -> Operands:
    """One NaN payload in x and one in w, at a row and a column each."""
    xq, xs, wq, ws = (t.clone() for t in drawn)
    xq.view(torch.uint8)[of_x], wq.view(torch.uint8)[of_w] = 0xFF, 0x7F
    return xq, xs, wq, ws


def with_nan_scales_of_zeros(
    drawn: Operands, of_x: tuple[int, int], of_w: tuple[int, int]
) -> Operands:
    """One block of zeros in x and one in w, at a row and a block each, whose scales are NaN."""
    xq, xs, wq, ws = (t.clone() for t in drawn)
    nan_scale_of_zeros(xq, xs, *of_x)
    nan_scale_of_zeros(wq, ws, *of_w)
    return xq, xs, wq, ws


def with_scales_moved(drawn: Operands, shift: int, device: torch.device) -> Operands:
    """The same, with scales on the device that begin ``shift`` bytes past an aligned address."""
    xq, xs, wq, ws = drawn
    moved = []
    for scale in (xs, ws):
        room = torch.full((scale.numel() + 8,), 255, dtype=torch.uint8, device=device)
        room[shift : shift + scale.numel()] = scale.flatten().to(device)
        moved.append(room[shift : shift + scale.numel()].view(scale.shape))
    return xq, moved[0], wq, moved[1]


def operands_that_all_count(M: int, N: int, K: int, seed: int, octave: int = 0) -> Operands:
    """Numbers of 1 to 1.875 of either sign under scales of 1 and 2: no product is negligible.

    ``octave``: payloads are so many octaves up, and scales down.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        payload = torch.randint(0x38, 0x40, (rows, K), generator=generator, dtype=torch.uint8)
        payload += 8 * octave
        payload |= torch.randint(0, 2, (rows, K), generator=generator, dtype=torch.uint8) << 7
        scale = torch.randint(127, 129, (rows, K // 32), generator=generator, dtype=torch.uint8)
        return payload.view(torch.float8_e4m3fn), scale - octave

    return (*draw(M), *draw(N))


def assert_no_product_is_missing(got: torch.Tensor, drawn: Operands) -> None:
    """Of ``operands_that_all_count``, in any dtype: the error of each row and column, by its norm,
    is at most that of rounding to bf16 and the 2^-11 that fp8 sums are allowed here. One product of
    K that all lack makes about 1 / sqrt(K), which is more up to K = 40,000."""
    reference = linear_reference64(*drawn)
    error = got.double() - reference
    for dim in (0, 1):
        relative = error.norm(dim=dim) / reference.norm(dim=dim)
        assert relative.max() <= 2.0**-8 + 2.0**-11, (dim, float(relative.max()))
