"""Steps of DeepSeek-V3's and gpt-oss's experts on a GPU, judged part by part.

A ratio of signal to noise over a whole tensor hides what is wrong in a few of its rows, so it is
asked of every group, of every tile of 128 x 128 within it, and of its first and last 32 rows.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from aiter_mx.compat.primus_turbo import Float8QuantConfig, Format, grouped_gemm_fp8
from op_tests.bench.grouped import MODES, group_ends

pytestmark = pytest.mark.gpu
GROUPS = (1, 2, 4, 7, 8, 16, 32)
ROWS = (128, 256, 1000, 2048, 4096, 8192)
FEATURES = ((4096, 7168), (7168, 2048), (5760, 2880), (2880, 2880))
FEW = (1, 31, 33, 127, 1000)
MOST_ROWS = 1 << 16
TILE, TAIL = 128, 32
FORWARD_DB, GRADIENT_DB = 25.0, 20.0


@dataclass(frozen=True)
class Step:
    """A forward and a backward pass of groups of these rows."""

    lens: tuple[int, ...]
    N: int
    K: int
    trans_b: bool
    dtype: torch.dtype
    format: Format

    def __str__(self) -> str:
        numbers = f"{len(self.lens)}x{max(self.lens)}x{self.N}x{self.K}"
        kind = str(self.dtype).removeprefix("torch.")
        return f"{numbers}-{'NT' if self.trans_b else 'NN'}-{kind}-{self.format.name}"


def drawn_steps() -> Iterator[Step]:
    """Each number of groups, of rows, each pair of features and each way of each option."""
    draw = random.Random(0)
    for at in range(14):
        groups, rows = GROUPS[at % len(GROUPS)], ROWS[at % len(ROWS)]
        rows = min(rows, MOST_ROWS // groups)
        ends = group_ends(MODES[at % len(MODES)], groups, rows)
        lens = [end - begin for begin, end in pairwise([0, *ends])]
        if groups > 4:
            places = draw.sample(range(groups), len(FEW[: groups - 2]))
            for place, few in zip(places, FEW, strict=False):
                lens[place] = few
        dtype = (torch.bfloat16, torch.float16)[at // 2 % 2]
        format = (Format.E4M3, Format.HYBRID)[at // 3 % 2]
        yield Step(tuple(lens), *FEATURES[at % len(FEATURES)], at % 3 != 1, dtype, format)


def least_decibels(found: Tensor, exact: Tensor) -> float:
    """The least ratio of a matrix: over all, its tiles, and its first and last 32 rows."""
    powers = []
    for values in (exact, found.float() - exact):
        rows, columns = values.shape
        squares = pad(values.square(), (0, -columns % TILE, 0, -rows % TILE))
        tiles = squares.unflatten(1, (-1, TILE)).sum(2).unflatten(0, (-1, TILE)).sum(1)
        edges = [values[part].square().sum() for part in (slice(TAIL), slice(-TAIL, None))]
        powers.append(torch.stack([tiles.sum(), *edges, *tiles.flatten()]))
    signal, noise = powers
    return float(10 * (signal / noise.clamp(min=1e-30)).log10().min())


def parts(lens: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Groups that have rows, and which."""
    for g, (begin, end) in enumerate(pairwise([0, *accumulate(lens)])):
        if end > begin:
            yield g, slice(begin, end)


def assert_heard(what: str, found: Tensor, exact: Tensor, least: float) -> None:
    ratio = least_decibels(found, exact)
    assert ratio >= least, f"{what}: {ratio:.2f} dB"


@pytest.mark.parametrize("step", drawn_steps(), ids=str)
def test_signal_to_noise_holds_in_every_part(step: Step) -> None:
    """Also in gradients of weights by the last 32 rows of each group alone, which in 4,096 rows
    weigh less than quantisation's noise."""
    torch.manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda").to(step.dtype)

    T, G = sum(step.lens), len(step.lens)
    x, dy = drawn(T, step.K).requires_grad_(), drawn(T, step.N)
    w = torch.stack([drawn(step.N, step.K) * step.K**-0.5 for _ in range(G)])
    stored = (w if step.trans_b else w.mT.contiguous()).requires_grad_()
    config = Float8QuantConfig(step.format)
    lens = torch.tensor(step.lens, device="cuda")
    y = grouped_gemm_fp8(x, stored, lens, trans_b=step.trans_b, config=config)
    tails = torch.zeros_like(dy)
    for _, rows in parts(step.lens):
        tail = slice(max(rows.start, rows.stop - TAIL), rows.stop)
        tails[tail] = dy[tail]
    gradients = []
    for each in (tails, dy):
        x.grad = stored.grad = None
        y.backward(each, retain_graph=True)
        assert x.grad is not None and stored.grad is not None
        gradients.append(stored.grad if step.trans_b else stored.grad.mT)
    by_tails, dw = gradients
    for g, rows in parts(step.lens):
        xg, dyg, wg = x.detach()[rows].float(), dy[rows].float(), w[g].float()
        of_group = f"group {g}, {len(xg)} rows"
        assert_heard(f"y, {of_group}", y.detach()[rows], xg @ wg.T, FORWARD_DB)
        assert_heard(f"dx, {of_group}", x.grad[rows], dyg @ wg, GRADIENT_DB)
        assert_heard(f"dw, {of_group}", dw[g], dyg.T @ xg, GRADIENT_DB)
        exact = tails[rows].float().T @ xg
        assert_heard(f"dw by the tail, {of_group}", by_tails[g], exact, GRADIENT_DB)
    without_rows = [g for g, count in enumerate(step.lens) if not count]
    assert not dw[without_rows].any() and not by_tails[without_rows].any()
