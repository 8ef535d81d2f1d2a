"""What Hopper's linear of more than 64 rows is chosen from without a table: a menu of each weight.

``wgmma_fp8_tiled`` and ``wgmma_bf16`` have tiles for any number of rows, and each tile is a code
object. Of both together a weight has the few that lose the least by the models of both; a call
takes the one that its number of rows takes the least time with, unless ``wgmma_fp8`` takes less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import compress
from math import inf
from typing import NamedTuple

from aiter_mx.kernels.linear import wgmma_bf16_sm90 as bf16
from aiter_mx.kernels.linear import wgmma_bf16_swapped_sm90 as swapped
from aiter_mx.kernels.linear import wgmma_fp8_sm90 as fp8
from aiter_mx.kernels.linear import wgmma_fp8_tiled_sm90 as tiled
from aiter_mx.kernels.linear.fitted_sm90 import START_OF_BF16, START_OF_FP8
from aiter_mx.kernels.linear.many_rows_sm90 import persistent_cycles
from aiter_mx.kernels.linear.problem import LinearProblem, Sizes
from aiter_mx.kernels.linear.wgmma_bf16_layout_sm90 import PARAMS as BF16_PARAMS
from aiter_mx.kernels.linear.wgmma_bf16_layout_sm90 import chunks_of
from aiter_mx.kernels.sm90 import GROUP_ROWS
from aiter_mx.kernels.spec import Config
from aiter_mx.target import Target

_ROWS = (
    *(80, 96, 112, 128, 129, 144, 160, 176, 192, 193, 208, 224, 240, 256, 257, 288, 320, 352, 384),
    *(416, 448, 480, 512, 513, 576, 640, 704, 768, 832, 896, 960, 1024, 1025, 1152, 1280, 1408),
    *(1536, 1792, 2048, 2560, 3072, 4096),
    *(256, 384, 512, 768, 1024, 2048),
)
"""Numbers of rows that have a say in a menu, about as many between each and twice as many; those
that batches have most often count twice."""
_MOST_CODES = 8  # of a weight
_WORTH_A_CODE = 0.008  # times their number: of fourth powers of times beside the best, on average
_EXCHANGES = 2  # of each code of a menu
_NEAR_BEST = 1.03  # times the best, at some number of rows: others are not weighed
_MIN_TILED_M = 81  # below, wgmma_fp8 has tiles that fit
_FEWEST_OF_MANY = 192  # tokens of a tile for more than 4,096 rows


class Code(NamedTuple):
    """A code object: of wgmma_fp8_tiled, or a tile of wgmma_bf16 with parts of K."""

    of_fp8: tiled.Code | None
    of_bf16: tuple[bf16.Tile, int] | None

    def cost(self, target: Target, sizes: Sizes) -> tuple[float, tuple[int, ...]]:
        """A model of a call, and the values of its configuration."""
        if self.of_fp8 is not None:
            within = _MIN_TILED_M <= sizes.M <= tiled.MOST_OWN_M
            return (self.of_fp8.cost(sizes.M) if within else inf), self.of_fp8.values
        assert self.of_bf16 is not None
        cycles, _, values = min(bf16.costs_of(target, sizes, *self.of_bf16))
        return START_OF_BF16 + cycles, values


class Choice(NamedTuple):
    """What takes the least of a menu."""

    cycles: float
    values: tuple[int, ...]
    of_fp8: bool


@lru_cache(maxsize=1024)
def menu(target: Target, N: int, K: int, exact: bool) -> tuple[Code, ...]:
    """The code objects of a weight; of wgmma_bf16 alone where sums have to be exact."""
    chunks = chunks_of(Sizes(1, N, K))
    codes = [Code(None, code) for code in bf16.codes() if code[1] <= chunks]
    if not exact:
        codes += [Code(code, None) for code in tiled.own_codes(target, N, K)]
    every = [[code.cost(target, Sizes(M, N, K))[0] for M in _ROWS] for code in codes]
    least = [*map(min, zip(*every, strict=True))]
    counts = [
        exact or cycles < _fp8_cycles(target, M, N, K)
        for M, cycles in zip(_ROWS, least, strict=True)
    ]
    best = [*compress(least, counts)]
    lost = [
        (code, [(c / b) ** 4 for c, b in zip(compress(costs, counts), best, strict=True)])
        for code, costs in zip(codes, every, strict=True)
    ]
    return tuple(_fewest([each for each in lost if min(each[1]) < _NEAR_BEST**4], len(best)))


Lost = Sequence[tuple[Code, list[float]]]
"""What codes lose, at each number of rows."""


def _fewest(lost: Lost, rows: int) -> list[Code]:
    """Those that lose the least together, one after the other, while each gains its worth; then
    each is exchanged for what loses less beside the others, and left out if that loses nothing."""
    chosen: list[int] = []
    left, worth_of_one = [inf] * rows, _WORTH_A_CODE * rows
    while len(chosen) < _MOST_CODES:
        at, least = _next(lost, left)
        if chosen and sum(left) - least <= worth_of_one * (len(chosen) + 1):
            break
        chosen.append(at)
        left = [*map(min, left, lost[at][1])]
    for _ in range(_EXCHANGES):
        for at in tuple(chosen):
            chosen.remove(at)
            without = _least_of(lost, chosen, rows)
            best, least = _next(lost, without)
            if sum(without) > least:
                chosen.append(best)
    return [lost[at][0] for at in chosen]


def _least_of(lost: Lost, chosen: Sequence[int], rows: int) -> list[float]:
    return [*map(min, zip([inf] * rows, *(lost[at][1] for at in chosen), strict=True))]


def _next(lost: Lost, left: list[float]) -> tuple[int, float]:
    """What loses the least beside others, and how much is lost then."""
    sums = [sum(map(min, left, of_code)) for _, of_code in lost]
    return sums.index(min(sums)), min(sums)


def _fp8_cycles(target: Target, M: int, N: int, K: int) -> float:
    """What wgmma_fp8 takes of up to 128 rows."""
    if M > fp8.MAX_M:
        return inf
    return fp8.cycles_of(target, M, N, K) + START_OF_FP8


@lru_cache(maxsize=1 << 14)
def best(target: Target, M: int, N: int, K: int, exact: bool) -> Choice:
    """Of up to 4,096 rows."""
    sizes = Sizes(M, N, K)
    return min(
        Choice(*code.cost(target, sizes), code.of_fp8 is not None)
        for code in menu(target, N, K, exact)
    )


def _chosen(target: Target, problem: LinearProblem) -> Choice:
    return best(target, problem.M, problem.N, problem.K, _is_exact(target, problem))


def _is_exact(target: Target, problem: LinearProblem) -> bool:
    return target.exact_sums or problem.out_dtype == "fp32"


def _cheapest_of_many(target: Target, problem: LinearProblem) -> tuple[float, Config]:
    """Of more than 4,096 rows, by wgmma_bf16 with large tiles of the menu if it has some."""
    M, N, K = problem.M, problem.N, problem.K
    codes = menu(target, N, K, _is_exact(target, problem))
    tiles = [code.of_bf16[0] for code in codes if code.of_bf16 is not None]
    large = {tile.tile_m for tile in tiles if tile.pairs and tile.tile_m >= _FEWEST_OF_MANY}
    return bf16.cheapest_of_many(target, Sizes(M, N, K), tuple(sorted(large)))


def _configure_tiled(target: Target, problem: LinearProblem) -> Config:
    if problem.M <= tiled.MOST_OWN_M:
        chosen = _chosen(target, problem)
        if chosen.of_fp8:
            return {p.name: v for p, v in zip(tiled.PARAMS, chosen.values, strict=True)}
    return tiled.WGMMA_FP8_TILED.configure(target, problem)


def _configure_bf16(target: Target, problem: LinearProblem) -> Config:
    M, N, K = problem.M, problem.N, problem.K
    if M > bf16.MOST_OWN_M:
        return _cheapest_of_many(target, problem)[1]
    chosen = _chosen(target, problem)
    if chosen.of_fp8:
        chosen = best(target, M, N, K, True)
    return {p.name: v for p, v in zip(BF16_PARAMS, chosen.values, strict=True)}


def _tiled_candidates(target: Target, problem: LinearProblem) -> list[Config]:
    chosen = _configure_tiled(target, problem)
    others = tiled.WGMMA_FP8_TILED.candidates(target, problem)
    return [chosen, *(found for found in others if found != chosen)]


def _bf16_candidates(target: Target, problem: LinearProblem) -> list[Config]:
    """The choice, then the best for this number of rows."""
    chosen = _configure_bf16(target, problem)
    return [chosen, *bf16.others_of(target, problem, chosen)]


def _tiled_yields(target: Target, problem: LinearProblem) -> str | None:
    M, N, K = problem.M, problem.N, problem.K
    if M <= tiled.MOST_OWN_M:
        chosen = _chosen(target, problem)
        if chosen.of_fp8 and chosen.cycles < _fp8_cycles(target, M, N, K):
            return None
    return f"others multiply M={M} rows in less time"


def _fp8_yields(target: Target, problem: LinearProblem) -> str | None:
    M, N, K = problem.M, problem.N, problem.K
    if M <= GROUP_ROWS:
        return fp8.WGMMA_FP8.yields(target, problem)
    if _fp8_cycles(target, M, N, K) <= _chosen(target, problem).cycles:
        return None
    return "wgmma_fp8 adds for longer than wgmma_bf16 launches x ahead and multiplies"


def _others_cycles(target: Target, problem: LinearProblem) -> float:
    """What wgmma_bf16 and persistent take at least, as their numbers have it."""
    sizes = Sizes(problem.M, problem.N, problem.K)
    if problem.M <= bf16.MOST_OWN_M:
        return _chosen(target, problem).cycles - START_OF_BF16
    return min(_cheapest_of_many(target, problem)[0], persistent_cycles(target, sizes))


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
    if _cheapest_of_many(target, problem)[0] < persistent_cycles(target, sizes):
        return None
    return "persistent expands x while it multiplies"


WGMMA_FP8_TILED = replace(
    tiled.WGMMA_FP8_TILED,
    configure=_configure_tiled,
    candidates=_tiled_candidates,
    yields=_tiled_yields,
)
WGMMA_FP8 = replace(fp8.WGMMA_FP8, yields=_fp8_yields)
WGMMA_BF16_SWAPPED = replace(swapped.WGMMA_BF16_SWAPPED, yields=_swapped_yields)
WGMMA_BF16 = replace(
    bf16.WGMMA_BF16, configure=_configure_bf16, candidates=_bf16_candidates, yields=_bf16_yields
)
