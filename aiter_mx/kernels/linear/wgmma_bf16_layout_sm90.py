"""How ``wgmma_bf16`` of Hopper's linear is laid out: tiles, stages and who computes what."""

from __future__ import annotations

from typing import NamedTuple

from aiter_mx.kernels.linear.problem import LinearProblem, Sizes
from aiter_mx.kernels.sm90 import CHUNK, GROUP_ROWS, RESERVED_BYTES, SHARED_BYTES
from aiter_mx.kernels.spec import Config, Param
from aiter_mx.target import Target

_TOKENS = (32, 64, 96, 128, 144, 160, 176, 192, 208, 224, 256, 272, 288)
PARAMS = (
    Param("tile_m", _TOKENS, "tokens of a tile"),
    Param("tile_n", (64, 128, 192), "features of a CTA, 64 for each warpgroup that multiplies"),
    Param("split", (1, 2, 3, 4, 6, 8), "parts of K: CTAs of a cluster, or of pairs in turn"),
    Param("pairs", tuple(range(67)), "of CTAs that stay and share all tiles, or 0"),
)

MOST_F16 = 128  # tokens of a tile of wgmma_f16_tiled: those of more multiply for longer anyway
FEW = 64  # tokens of a tile of which two CTAs fit an SM; such tiles are for one order of addition
PAIR = 2  # CTAs of a cluster
MOST_TOKENS = {64: 288, 128: 288, 192: 128}  # of a tile, by its features: registers for sums
MOST_PAIRED = 128  # features of a CTA of a pair
UNIT = 64  # k that are multiplied at a time
_FLAG_BYTES = 2048  # barriers, and which tokens and features have scales that bf16 does not cover


class Layout(NamedTuple):
    """What the host works out of a configuration: see the constants of the kernel.

    Attributes:
        x_stages: stages of x in bf16.
        w_stages: stages of w.
        shared_bytes: shared memory of a CTA.
        clusters: that are launched.
        rounds: of whole tiles, of which each pair computes one.
        part: chunks of the other tiles that each pair computes,
        parts_with_one_more: and how many have one more.
    """

    x_stages: int
    w_stages: int
    shared_bytes: int
    clusters: int
    rounds: int = 0
    part: int = 0
    parts_with_one_more: int = 0


class Shares(NamedTuple):
    """How persistent CTAs share tiles, or clusters: see csrc/linear/shares_sm90.h.

    Attributes:
        rounds: of whole tiles, of which each computes one.
        part: chunks of the other tiles that each computes,
        parts_with_one_more: and how many have one more.
    """

    rounds: int
    part: int
    parts_with_one_more: int


def shares(tiles: int, chunks: int, sharers: int, rounds: int) -> Shares:
    """Of tiles of so many chunks, after so many rounds of whole tiles."""
    return Shares(rounds, *divmod((tiles - rounds * sharers) * chunks, sharers))


def chunks_of(problem: LinearProblem | Sizes) -> int:
    return -(-problem.K // CHUNK)


def layout(target: Target, problem: LinearProblem, config: Config) -> Layout | None:
    """How a configuration is laid out, or None where it does not fit."""
    tile_m, tile_n, split, pairs = (config[p.name] for p in PARAMS)
    chunks = chunks_of(problem)
    if tile_m > MOST_TOKENS[tile_n] or split > chunks:
        return None
    if pairs and (tile_n > MOST_PAIRED or pairs > target.cu_num // PAIR):
        return None
    tiles = tile_count(problem, tile_m, tile_n * (PAIR if pairs else 1))
    if pairs > tiles * chunks:
        return None
    two_of_sm = tile_m <= FEW and tile_n == GROUP_ROWS
    room = (SHARED_BYTES - RESERVED_BYTES) // 2 if two_of_sm else SHARED_BYTES
    kept = tile_m * tile_n * 4 if pairs and split > 1 else 0  # sums of parts of K
    most = room - _FLAG_BYTES - kept
    x, w = tile_m * UNIT * 2, tile_n * CHUNK
    chunks_ahead = min(most // (2 * x + w), 6)  # of both operands
    if chunks_ahead < 2:
        return None
    x_stages, w_stages = 2 * chunks_ahead, chunks_ahead
    w_stages += min((most - x_stages * x - w_stages * w) // w, 2)  # it comes from further away
    x_stages += min((most - x_stages * x - w_stages * w) // x, 2)
    stages = x_stages * x + w_stages * w
    sums = 0 if pairs or split == 1 else tile_m * (tile_n + 4) * 4
    found = Layout(x_stages, w_stages, max(stages, sums) + kept + _FLAG_BYTES, pairs or tiles)
    if split > 1:
        return found
    if not pairs:
        return found
    whole, left = divmod(tiles, pairs)
    rounds = max(whole - (left > 0), 0)  # the last is shared with what is left
    return found._replace(**shares(tiles, chunks, pairs, rounds)._asdict())


def tile_count(problem: LinearProblem | Sizes, tile_m: int, features: int) -> int:
    return -(-problem.M // tile_m) * -(-problem.N // features)
