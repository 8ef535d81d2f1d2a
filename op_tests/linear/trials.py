"""What GPU tests of the linear's kernels try each of them with, and how results are checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from op_tests.linear.cases import (
    DTYPES,
    Operands,
    operands,
    with_opposite_scales,
    with_scales_moved,
    with_zero_blocks,
)
from op_tests.mx_reference import assert_close_to_reference, linear_reference64

Chosen = dict[str, int]
Case = tuple[int, int, int, Chosen]
"""M, N, K and a configuration."""
Trial = tuple[Operands, Chosen, Operands]
"""What is launched, in which configuration, and what float64 computes: most often the same."""
Launch = Callable[..., torch.Tensor]
"""Of operands, a configuration, and, where they are asked for, a bias and a dtype."""

RANGES = [(-127, 127), (-127, -40), (40, 127), (-127, -120)]
"""Exponents of scales: all there are, and ends of the range."""
_SHIFTS = (110, 60, 25, -25, -60, -110)
_ROWS = 300  # of w at most: scales that are out of the ordinary are so in any row


def assert_right(launch: Launch, trials: Iterable[Trial], error: float | None = None) -> None:
    """Results are close to float64; ``error`` is ``accumulation_error`` there."""
    for launched, chosen, drawn in trials:
        assert_close_to_reference(launch(launched, chosen), *drawn, accumulation_error=error)


def plain(M: int, N: int, K: int, chosen: Chosen) -> Iterator[Trial]:
    """Scales far apart, and near each other."""
    for seed, exponents in enumerate([(-20, 20), (-6, 6)]):
        drawn = operands(M, N, K, seed, scale_exponents=exponents)
        yield drawn, chosen, drawn


def of_scales(cases: Sequence[Case], exponents: tuple[int, int]) -> Iterator[Trial]:
    """Scales of such exponents."""
    for M, N, K, chosen in cases:
        drawn = operands(M, min(N, _ROWS), K, M, scale_exponents=exponents)
        yield drawn, chosen, drawn


def of_cancelling_scales(cases: Sequence[Case], shifts: Sequence[int] = _SHIFTS) -> Iterator[Trial]:
    """Large scales of x by small ones of w, and the other way round."""
    for M, N, K, chosen in cases:
        ordinary = operands(M, min(N, _ROWS), K, 3, scale_exponents=(-3, 3))
        for shift in shifts:
            drawn = with_opposite_scales(ordinary, shift)
            yield drawn, chosen, drawn


def of_zero_blocks(cases: Sequence[Case]) -> Iterator[Trial]:
    """Blocks of zeros among others, of any scale."""
    generator = torch.Generator().manual_seed(8)
    for M, N, K, chosen in cases:
        ordinary = operands(M, min(N, _ROWS), K, 4, scale_exponents=(-6, 6))
        drawn = with_zero_blocks(ordinary, generator)
        yield drawn, chosen, drawn


def of_nan(cases: Sequence[Case]) -> Iterator[Trial]:
    """NaN payloads and scales here and there."""
    for M, N, K, chosen in cases:
        drawn = operands(M, min(N, _ROWS), K, M, nan_payload=2e-4, nan_scale=1e-3)
        yield drawn, chosen, drawn


def of_moved_scales(cases: Sequence[Case], shifts: Sequence[int] = (1, 2, 3)) -> Iterator[Trial]:
    """Scales at addresses that are no multiple of what could be loaded at once."""
    for M, N, K, chosen in cases:
        drawn = operands(M, min(N, _ROWS), K, 5)
        for shift in shifts:
            yield with_scales_moved(drawn, shift), chosen, drawn


def assert_outputs_and_biases_right(
    launch: Launch, dtype: torch.dtype, configs: Sequence[Chosen | None], M: int = 19
) -> None:
    """Results of such a dtype are close to float64, with a bias of every dtype."""
    exponents = (-12, -6) if dtype is torch.float16 else (-6, 6)
    drawn = operands(M, 137, 1120, 5, scale_exponents=exponents)
    size = linear_reference64(*drawn).abs().mean()
    for bias_dtype in DTYPES.values():
        generator = torch.Generator().manual_seed(6)
        bias = (torch.randn(137, generator=generator, dtype=torch.float64) * size).to(bias_dtype)
        for chosen in configs:
            assert_close_to_reference(launch(drawn, chosen, bias, dtype), *drawn, bias)
