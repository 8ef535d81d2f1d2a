"""What Hopper's linear of more than 64 rows is chosen from without a table: a menu of each weight.

``wgmma_fp8_tiled``, ``wgmma_f16_tiled`` and ``wgmma_bf16`` have tiles for any number of rows, and
each tile is a code object. Of all together a weight has the few that lose the least by their models
beside ``wgmma_fp8_rescaled``, which has one; a call takes what its number of rows takes the least
time with, unless ``wgmma_fp8`` takes less.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import inf
from typing import NamedTuple

import numpy as np

from aiter_mx.kernels.linear import wgmma_bf16_sm90 as bf16
from aiter_mx.kernels.linear import wgmma_bf16_swapped_sm90 as swapped
from aiter_mx.kernels.linear import wgmma_f16_tiled_sm90 as f16
from aiter_mx.kernels.linear import wgmma_fp8_rescaled_sm90 as rescaled
from aiter_mx.kernels.linear import wgmma_fp8_sm90 as fp8
from aiter_mx.kernels.linear import wgmma_fp8_tiled_sm90 as tiled
from aiter_mx.kernels.linear.fitted_sm90 import START_OF_BF16, START_OF_FP8
from aiter_mx.kernels.linear.many_rows_sm90 import Array, persistent_cycles
from aiter_mx.kernels.linear.problem import LinearProblem, Sizes
from aiter_mx.kernels.linear.wgmma_bf16_codes_sm90 import LARGE, costs_of_codes
from aiter_mx.kernels.sm90 import GROUP_ROWS
from aiter_mx.kernels.spec import Config, KernelSpec
from aiter_mx.target import Target

_SERVED_BY_FP8 = 1  # of the numbers of rows below, unless sums have to be exact
_ROWS: tuple[int, ...] = (
    *(96, 128, 129, 144, 160, 176, 192, 193, 224, 256, 257, 288, 320, 384, 448, 512, 513, 576, 704),
    *(768, 896, 1024, 1025, 1152, 1280, 1408, 1536, 1537, 1792, 2048, 2049, 2560, 3072, 3073, 4096),
)
"""Numbers of rows that have a say in a menu, about as many between each and twice as many."""
_SAYS = 1.0 + np.isin(_ROWS, (96, 128, 129, 256, 384, 512, 768, 1024, 2048))
"""How much: those that batches have most often, and the fewest, count twice."""
_MOST_CODES = 8  # of a weight
_WORTH_A_CODE = 0.005  # times their number: of fourth powers of times beside the best, on average
_NEAR_BEST = 1.03  # times the best, at some number of rows: others are not weighed
_MIN_TILED_M = 81  # below, wgmma_fp8 has tiles that fit


class Code(NamedTuple):
    """A code object: of wgmma_fp8_tiled, or a tile of wgmma_bf16 or wgmma_f16_tiled with parts of
    K."""

    of_fp8: tiled.Code | None
    of_bf16: tuple[bf16.Tile, int] | None

    @property
    def kernel(self) -> str:
        """What it is of."""
        if self.of_bf16 is None:
            return tiled.WGMMA_FP8_TILED.name
        return f16.WGMMA_F16_TILED.name if self.of_bf16[0].f16 else bf16.WGMMA_BF16.name

    def cost(self, target: Target, sizes: Sizes) -> tuple[float, tuple[int, ...]]:
        """A model of a call, and the values of its configuration."""
        if self.of_fp8 is not None:
            within = _MIN_TILED_M <= sizes.M <= tiled.MOST_OWN_M
            return (self.of_fp8.cost(sizes.M) if within else inf), self.of_fp8.values
        assert self.of_bf16 is not None
        tile, _ = self.of_bf16
        cycles, _, values = min(bf16.costs_of(target, sizes, *self.of_bf16))
        within = not tile.f16 or sizes.M <= f16.MOST_OWN_M
        return (START_OF_BF16 + cycles if within else inf), values


class Choice(NamedTuple):
    """What takes the least of a menu."""

    cycles: float
    values: tuple[int, ...]
    kernel: str

    def config(self, of: KernelSpec) -> Config:
        """Its values by their names."""
        return {p.name: v for p, v in zip(of.params, self.values, strict=True)}


@lru_cache(maxsize=1024)
def menu(target: Target, N: int, K: int, exact: bool) -> tuple[Code, ...]:
    """The code objects of a weight; none over fp8 where sums have to be exact."""
    served = slice(0 if exact else _SERVED_BY_FP8, None)
    rows, says = _ROWS[served], _SAYS[served]
    of_bf16, costs = costs_of_codes(target, rows, N, K)
    if exact:
        first = costs[LARGE]  # for more rows, too
    else:
        first = rescaled.costs_of_rows(target, np.array(rows, float), N, K)
        of_fp8, costs_of_fp8 = tiled.costs_of_codes(target, rows, N, K)
        costs = np.concatenate((costs, costs_of_fp8))
    best = np.minimum(first, np.minimum.reduce(costs))
    near = np.logical_or.reduce(costs < _NEAR_BEST * best, axis=1)
    (weighed,) = near.nonzero()
    every = np.concatenate((first[None], costs[weighed]))
    codes = [LARGE] if exact else []
    codes += [
        weighed[at - 1] for at in _fewest(np.square(np.square(every / best)) * says, says.sum())
    ]
    return tuple(
        Code(None, of_bf16[at]) if at < len(of_bf16) else Code(of_fp8.code(at - len(of_bf16)), None)
        for at in codes
    )


def _fewest(lost: Array, says: float) -> list[int]:
    """Those that lose the least together, beside the first, one after the other, while each gains
    its worth."""
    chosen, had = [0], lost[0].sum()
    while len(chosen) < _MOST_CODES:
        lost = np.minimum(lost, lost[chosen[-1]])  # beside those that are chosen
        sums = np.add.reduce(lost, axis=1)
        at = int(sums.argmin())
        if had - sums[at] <= _WORTH_A_CODE * says * (len(chosen) + 1):
            break
        chosen.append(at)
        had = sums[at]
    return chosen[1:]


def _fp8_cycles(target: Target, M: int, N: int, K: int) -> float:
    """What wgmma_fp8 takes of up to 128 rows."""
    if M > fp8.MAX_M:
        return inf
    return fp8.cycles_of(target, M, N, K) + START_OF_FP8


@lru_cache(maxsize=1 << 14)
def best(target: Target, M: int, N: int, K: int, exact: bool) -> Choice:
    """Of up to 4,096 rows."""
    sizes = Sizes(M, N, K)
    codes = menu(target, N, K, exact)
    choices = [Choice(*code.cost(target, sizes), code.kernel) for code in codes]
    if not exact and M >= rescaled.MIN_OWN_M:
        choices.append(_rescaled(target, sizes))
    return min(choices)


def _rescaled(target: Target, sizes: Sizes) -> Choice:
    found = rescaled.cheapest(target, sizes)
    return Choice(found[0], tuple(found[1].values()), rescaled.WGMMA_FP8_RESCALED.name)


def _best_of(of: KernelSpec, target: Target, problem: LinearProblem) -> Choice | None:
    """The best of a kernel's code objects in either of a weight's menus, if there are any."""
    sizes = Sizes(problem.M, problem.N, problem.K)
    for exact in (_is_exact(target, problem), True):
        codes = [c for c in menu(target, problem.N, problem.K, exact) if c.kernel == of.name]
        if codes:
            return min(Choice(*code.cost(target, sizes), of.name) for code in codes)
    return None


def _chosen(target: Target, problem: LinearProblem) -> Choice:
    return best(target, problem.M, problem.N, problem.K, _is_exact(target, problem))


def _is_exact(target: Target, problem: LinearProblem) -> bool:
    return target.exact_sums or problem.out_dtype == "fp32"


def _configure_tiled(target: Target, problem: LinearProblem) -> Config:
    if problem.M <= tiled.MOST_OWN_M:
        chosen = _chosen(target, problem)
        if chosen.kernel == tiled.WGMMA_FP8_TILED.name:
            return chosen.config(tiled.WGMMA_FP8_TILED)
    return tiled.WGMMA_FP8_TILED.configure(target, problem)


def _configure_bf16(target: Target, problem: LinearProblem) -> Config:
    M, N, K = problem.M, problem.N, problem.K
    if M > bf16.MOST_OWN_M:
        return bf16.cheapest_of_many(target, Sizes(M, N, K))[1]
    chosen = _best_of(bf16.WGMMA_BF16, target, problem)
    assert chosen is not None  # each menu has its largest tile
    return chosen.config(bf16.WGMMA_BF16)


def _configure_f16(target: Target, problem: LinearProblem) -> Config:
    if problem.M <= f16.MOST_OWN_M:
        chosen = _best_of(f16.WGMMA_F16_TILED, target, problem)
        if chosen is not None:
            return chosen.config(f16.WGMMA_F16_TILED)
    return f16.WGMMA_F16_TILED.configure(target, problem)


def _tiled_candidates(target: Target, problem: LinearProblem) -> list[Config]:
    chosen = _configure_tiled(target, problem)
    others = tiled.WGMMA_FP8_TILED.candidates(target, problem)
    return [chosen, *(found for found in others if found != chosen)]


def _bf16_candidates(target: Target, problem: LinearProblem) -> list[Config]:
    """The choice, then the best for this number of rows."""
    chosen = _configure_bf16(target, problem)
    return [chosen, *bf16.others_of(target, problem, chosen)]


def _f16_candidates(target: Target, problem: LinearProblem) -> list[Config]:
    chosen = _configure_f16(target, problem)
    return [chosen, *f16.others_of(target, problem, chosen)]


def _others_take_less(problem: LinearProblem) -> str:
    return f"others multiply M={problem.M} rows in less time"


def _f16_yields(target: Target, problem: LinearProblem) -> str | None:
    within = problem.M <= f16.MOST_OWN_M
    if within and _chosen(target, problem).kernel == f16.WGMMA_F16_TILED.name:
        return None
    return _others_take_less(problem)


def _tiled_yields(target: Target, problem: LinearProblem) -> str | None:
    M, N, K = problem.M, problem.N, problem.K
    if M <= tiled.MOST_OWN_M:
        chosen = _chosen(target, problem)
        of_fp8 = chosen.kernel == tiled.WGMMA_FP8_TILED.name
        if of_fp8 and chosen.cycles < _fp8_cycles(target, M, N, K):
            return None
    return _others_take_less(problem)


def _fp8_yields(target: Target, problem: LinearProblem) -> str | None:
    M, N, K = problem.M, problem.N, problem.K
    if M <= GROUP_ROWS:
        return fp8.WGMMA_FP8.yields(target, problem)
    if _fp8_cycles(target, M, N, K) <= _chosen(target, problem).cycles:
        return None
    return _others_take_less(problem)


def _others_cycles(target: Target, problem: LinearProblem) -> float:
    """What a menu's and persistent take at least, as their numbers have it."""
    sizes = Sizes(problem.M, problem.N, problem.K)
    if problem.M <= bf16.MOST_OWN_M:
        return _chosen(target, problem).cycles - START_OF_BF16
    others = min(bf16.cheapest_of_many(target, sizes)[0], persistent_cycles(target, sizes))
    return others if _is_exact(target, problem) else min(others, _rescaled(target, sizes).cycles)


def _rescaled_yields(target: Target, problem: LinearProblem) -> str | None:
    if problem.M < rescaled.MIN_OWN_M:
        return f"w takes longer to rescale than M={problem.M} rows to multiply"
    if problem.M <= bf16.MOST_OWN_M:
        own = _chosen(target, problem).kernel == rescaled.WGMMA_FP8_RESCALED.name
    else:
        sizes = Sizes(problem.M, problem.N, problem.K)
        own = _rescaled(target, sizes).cycles <= _others_cycles(target, problem)
    return None if own else _others_take_less(problem)


def _swapped_yields(target: Target, problem: LinearProblem) -> str | None:
    if problem.M < swapped.MIN_OWN_M:
        return f"others have tiles of fewer rows for M={problem.M} below {swapped.MIN_OWN_M}"
    if swapped.takes_less(target, problem, _others_cycles(target, problem)):
        return None
    return "expanding x takes little of the others' time"


def _bf16_yields(target: Target, problem: LinearProblem) -> str | None:
    if problem.M <= GROUP_ROWS:
        return "the other kernels have tiles of so few rows"
    if problem.M <= bf16.MOST_OWN_M:
        return None
    sizes = Sizes(problem.M, problem.N, problem.K)
    if bf16.cheapest_of_many(target, sizes)[0] <= _others_cycles(target, problem):
        return None
    return _others_take_less(problem)


WGMMA_FP8_TILED = replace(
    tiled.WGMMA_FP8_TILED,
    configure=_configure_tiled,
    candidates=_tiled_candidates,
    yields=_tiled_yields,
)
WGMMA_F16_TILED = replace(
    f16.WGMMA_F16_TILED,
    configure=_configure_f16,
    candidates=_f16_candidates,
    yields=_f16_yields,
)
WGMMA_FP8_RESCALED = replace(rescaled.WGMMA_FP8_RESCALED, yields=_rescaled_yields)
WGMMA_FP8 = replace(fp8.WGMMA_FP8, yields=_fp8_yields)
WGMMA_BF16_SWAPPED = replace(swapped.WGMMA_BF16_SWAPPED, yields=_swapped_yields)
WGMMA_BF16 = replace(
    bf16.WGMMA_BF16, configure=_configure_bf16, candidates=_bf16_candidates, yields=_bf16_yields
)
