"""The numbers that the cost models of Hopper's kernels of the linear have from times of one H200.

``tune/fit_costs.py`` tells how well the models choose with them over the rows of a table, and fits
them. All are at least 0, as the models' bounds demand. Those of ``MmaRegisters`` are microseconds,
and all others cycles, of which an SM has 1.98 in a nanosecond, unless something else is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class WgmmaFp8:
    """Of ``wgmma_fp8``.

    Attributes:
        bytes_a_cycle: of operands, that an SM copies.
        block, column, sharing: what a warpgroup takes for a block of 32 k: itself, for each column
            of a wgmma, and divided by the warpgroups.
        waited, waited_single: the least of these, divided likewise, with and without registers for
            the products of two blocks.
        kept, sent: for each sum of a workgroup, that stays there or goes to its cluster.
        member: for each workgroup of a cluster.
        odd_cluster: for those of 3, 5, 6 and 7.
        in_words: for each chunk of a row whose scales a thread loads as a word, not in a vector.
        under_way_bytes, off: weights and x under way that suit an SM, and for each byte off it.
        between_passes: until the first weights of the next workgroup on an SM are there.
        together: the exponent by which copying and computing add up.
    """

    bytes_a_cycle: float = 46
    block: float = 22
    column: float = 1.38
    sharing: float = 58
    waited: float = 120
    waited_single: float = 320
    kept: float = 0.11
    sent: float = 0.2
    member: float = 178
    odd_cluster: float = 500
    in_words: float = 0
    under_way_bytes: float = 80_000
    off: float = 0.008
    between_passes: float = 1500
    together: float = 1.5


WGMMA_FP8_MANY = WgmmaFp8(
    bytes_a_cycle=65,
    block=3,
    column=1.34,
    sharing=103,
    waited=120,
    waited_single=355,
    kept=0.26,
    sent=0.42,
    member=166,
    odd_cluster=185,
    together=3.3,
)
"""For more than 64 rows of x."""
WGMMA_FP8_TWO_A = WgmmaFp8(
    bytes_a_cycle=65,
    block=16.6,
    column=1.29,
    sharing=53.8,
    waited=120,
    waited_single=237,
    kept=0.226,
    sent=0.388,
    member=252,
    odd_cluster=284,
    between_passes=1110,
    together=2.18,
)
"""For more than 96, which are wgmma's A of two warpgroups."""
WGMMA_FP8_TILED = WgmmaFp8(
    bytes_a_cycle=44.7,
    block=11.6,
    column=1.58,
    sharing=29.6,
    waited=98,
    waited_single=334,
    kept=0.121,
    sent=0.292,
    member=148,
    odd_cluster=0.08,
    in_words=90,
    between_passes=2190,
    together=3.82,
)
"""In tiles, whether x is wgmma's A or w is. Of these numbers those for 97 to 128 rows are fitted to
what half of some 50 weights took on an H200, 1,900 times; those in tiles to 9,100 times of 36
weights at 88 to 2,048 rows."""
START_OF_FP8, START_OF_FP8_TILED, START_OF_BF16 = 3900, 2570, 4660
"""Of a call of more than 64 rows, beyond what the models of ``wgmma_fp8``, ``wgmma_fp8_tiled`` and
``wgmma_bf16`` have."""


@dataclass(frozen=True)
class WgmmaF16:
    """Of ``wgmma_f16``.

    Attributes:
        bytes_a_cycle: of memory, for all SMs.
        start, start_row: until a workgroup multiplies: itself, for each row and chunk of x.
        chunk, group, group_row: for a chunk of 128 k: itself, for 64 rows of w, for these and each
            row of x.
        exchange, exchange_sum: after a pass: itself, for each sum where K is shared.
        ring_bytes, short_ring: what a ring holds at least so that copies go on meanwhile, and by
            how much they are slower with none.
        shallow, deep: for each chunk of a ring's depth below 4, and above 5; both 3 where x of
            one pass takes the ring's end at first.
        cluster: by its size, and for others ``other_cluster``.
    """

    bytes_a_cycle: float = 2090
    start: float = 3930
    start_row: float = 6.6
    chunk: float = 300
    group: float = 147
    group_row: float = 1.9
    exchange: float = 1000
    exchange_sum: float = 0.34
    ring_bytes: float = 80e3
    short_ring: float = 1.2
    shallow: float = 1290
    deep: float = 60
    cluster: Mapping[int, float] = field(default_factory=lambda: {1: 130, 2: 260, 8: 0})
    other_cluster: float = 340


@dataclass(frozen=True)
class MmaRing:
    """Of ``mma_ring``.

    Attributes:
        unit, unit_tile, unit_share: what a warp issues for 16 rows of w by 32 k: itself, for each
            tile of 8 rows of x, for these divided by its tiles of w.
        stall: cycles for each that is issued, by the warps of a scheduler, else ``many_stall``.
        exchange: by the size of a cluster.
        x_byte: for each byte of x that an SM reads.
        warp, further_pass, second_group: for each of an SM.
        one_chunk: for a chunk where a warp has one alone in flight.
        in_flight_bytes, starved: what an SM has in flight at least, and the price of less.
        alone, shares: of launches that overlap: for workgroups that fill an SM, and what those win
            that leave the next launch a place on some.
    """

    unit: float = 22
    unit_tile: float = 6
    unit_share: float = 12
    stall: Mapping[int, float] = field(default_factory=lambda: {1: 2.6, 2: 2.2, 3: 2.0})
    many_stall: float = 1.9
    exchange: Mapping[int, float] = field(default_factory=lambda: {1: 0, 2: 500, 4: 900, 8: 2500})
    x_byte: float = 0.012
    warp: float = 50
    further_pass: float = 800
    second_group: float = 400
    one_chunk: float = 1200
    in_flight_bytes: float = 40e3
    starved: float = 1e4
    alone: float = 600
    shares: float = 800


@dataclass(frozen=True)
class MmaRegisters:
    """Of ``mma_registers``.

    Attributes:
        half, chunk: cycles of a scheduler for 128 k: for each 8 rows of w, and beside them; up to 4
            rows of x.
        many_half, many_chunk: likewise, for more.
        busy: the share of these that memory does not hide.
        quantised, many_quantised: cycles of a scheduler for x of 128 k that is yet to be quantised.
        quantising: the share of these that memory does not hide.
        idle: for the share of K for which lanes have nothing to do.
        under_way_bytes, starved: of weights that suit an SM, and for each factor of two below.
        waits: where workgroups wait for others to end.
        length, unrolled, waves: for 8 rows of a chunk in a loop's code, for more than a chunk, and
            for each factor of two of waves.
        in_turn, round: for loads in turn with their use, less so much for each round up to 8.
        overlapping_in_turn, overlapping_round: likewise, of launches that overlap.
    """

    half: float = 73
    chunk: float = 90
    many_half: float = 55
    many_chunk: float = 120
    busy: float = 0.08
    quantised: float = 75
    many_quantised: float = 135
    quantising: float = 0.5
    idle: float = 1.7
    under_way_bytes: float = 63e3
    starved: float = 0.65
    waits: float = 1.8
    length: float = 0.22
    unrolled: float = 0.15
    waves: float = 0.18
    in_turn: float = 0.2
    round: float = 0.03
    overlapping_in_turn: float = 0.3
    overlapping_round: float = 0.1


@dataclass(frozen=True)
class WgmmaBf16:
    """Of ``wgmma_bf16``.

    Attributes:
        group, product: for 64 k of 64 features: itself, which is what memory takes to bring them,
            and for each token, which is what the matrix unit takes; whichever is longer.
        group_alone, product_alone: likewise, of a CTA of which one warpgroup multiplies.
        bytes_a_cycle: of operands, that an SM copies.
        crowded: by how much longer x takes, times the square of its size in tens of millions.
        together: the exponent by which copying and computing add up.
        stored, exchanged: bytes of sums a cycle that are stored, and that come from the other parts
            of K.
        tile, exchange: for each tile: itself, and its exchange where K is shared.
        start: of pairs of CTAs, beyond that of others.
        expanded: for each million values of x, by the launch ahead.
    """

    group: float = 323
    product: float = 2.09
    group_alone: float = 353
    product_alone: float = 1.34
    bytes_a_cycle: float = 79.1
    crowded: float = 0.346
    together: float = 1.61
    stored: float = 42.5
    exchanged: float = 16.5
    tile: float = 5700
    exchange: float = 2280
    start: float = 0
    expanded: float = 300


WGMMA_BF16_PAIRS = WgmmaBf16(
    group=348,
    product=2.02,
    group_alone=437,
    product_alone=1.91,
    bytes_a_cycle=41.6,
    crowded=0.304,
    together=1.57,
    stored=24.5,
    exchanged=12.6,
    tile=291,
    exchange=3550,
    start=5010,
)
"""Where pairs of CTAs stay: ``tile`` is for each part of a tile that one computes, ``exchange`` for
each that is not a whole tile, and what is ``exchanged`` for each that another computes. These and
the numbers of ``WgmmaBf16`` are fitted to 11,400 times of 36 weights at 65 to 2,048 rows on an
H200; of 600 other times, up to 4,096 rows, they are 4 to 7 % off."""


WGMMA_F16_SPLITS = replace(WgmmaBf16(), group=260, product=2.37, group_alone=306)
WGMMA_F16_PAIRS = replace(WGMMA_BF16_PAIRS, group=285, product=2.15)
"""Of ``wgmma_f16_tiled``: less to issue beside the products, and more power. They are fitted to 540
times of 18 weights at 96 to 768 rows on an H200, of which they were 5 to 6 % off; those of clusters
are then 4 % less, as much as tiles over bf16 took longer in that run than modelled."""


@dataclass(frozen=True)
class ManyRows:
    """Of a kernel for thousands of rows, whose pairs of CTAs stay.

    Attributes:
        start: of a call.
        unit: for 64 k of 256 x 256 results, of the busiest pair.
        balanced: likewise, were all equally busy.
        segment: for each tile of a pair, or part of one.
        join: for each part of a tile that other pairs have parts of.
        expanded: for each million values of the operand that is made bf16 in memory.
        stored: for each million results.
    """

    start: float
    unit: float
    balanced: float
    segment: float
    join: float
    expanded: float
    stored: float


PERSISTENT_MANY = ManyRows(21500, 243, 1276, 0, 0, 1156, 497)
WGMMA_BF16_MANY = ManyRows(0, 1022, 502, 4080, 3630, 1533, 34)
WGMMA_BF16_SWAPPED_MANY = ManyRows(3430, 1096, 502, 3060, 4090, 0, 251)
"""From 12 shapes at 4,133 to 16,384 rows; nine others lose as little by the choice."""


@dataclass(frozen=True)
class WgmmaFp8Rescaled:
    """Of ``wgmma_fp8_rescaled``, whose CTAs stay.

    Attributes:
        start: of a call.
        rescaled: for each million values of both operands, by the launch ahead.
        again: for each million values of x, by each further slice of w.
        chunk: for 128 k of a tile, of the busiest CTA.
        balanced: likewise, were all equally busy.
        segment: for each of its tiles, or part of one.
        part: where tiles are shared, and
        other: for each part that one of them has.
    """

    start: float
    rescaled: float
    again: float
    chunk: float
    balanced: float
    segment: float
    part: float
    other: float


WGMMA_FP8_RESCALED = WgmmaFp8Rescaled(8230, 1490, 4100, 287, 519, 3410, 5780, 2750)
"""Fitted at 257 to 8,192 rows on an H200; of 403 cells of linear_every_m.csv it is 5 % off."""


@dataclass(frozen=True)
class WgmmaBf16Few:
    """Of ``wgmma_bf16_few``, for up to 8 rows.

    Attributes:
        start: of a call.
        tile: of a CTA.
        unit: for 64 k of 64 features, of a warpgroup that has an SM to itself.
        another: more for each other warpgroup of its CTA that multiplies.
        shared: times as much where there are two CTAs on its SM.
    """

    start: float = 4100
    tile: float = 5000
    unit: float = 294
    another: float = 140
    shared: float = 1.75


WGMMA_BF16_FEW = WgmmaBf16Few()
WGMMA_BF16_ONE = WgmmaBf16Few(start=0, tile=7000, unit=293, another=175)
"""Of ``wgmma_bf16`` for 17 to 64 rows: the times of five weights in 1, 2 and 3 parts, beside those
of one warpgroup, differ as this says."""
