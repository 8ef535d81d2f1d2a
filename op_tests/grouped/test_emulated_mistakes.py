"""Mistakes in time of Hopper's grouped rescaling kernels, which an emulator has to find."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from aiter_mx.kernels.grouped_gemm.in_place_sm90 import IN_PLACE
from aiter_mx.kernels.grouped_gemm.rescaled_sm90 import RESCALED
from aiter_mx.kernels.spec import KernelSpec
from aiter_mx.paths import csrc_dir
from op_tests.emulated_sm90.build import unsupported
from op_tests.emulated_sm90.launch import EmulatedError
from op_tests.grouped.test_emulated import LAST, PANELS, check
from op_tests.mistakes import Mistake

pytestmark = pytest.mark.skipif(bool(unsupported()), reason=unsupported())

RESCALER, PRODUCT = "grouped/rescaler_sm90.h", "grouped/rescaled_sm90.cu"
SUMS = "linear/rescaled_product_sm90.h"
SCHEDULES = 30  # the most that a mistake is tried under
# What a GPU may not show, or never end with: text of a source that is there once, what stands in
# its place, and a trial that finds it.
UNTIMELY = {
    "a tile told as ready before it is written": (
        RESCALER,
        """
            tma_store_wait();
            fence_async_global();
            add_release(blocks.of.ready() + tile, 1);
""",
        """
            add_release(blocks.of.ready() + tile, 1);
            tma_store_wait();
            fence_async_global();
""",
        6,
    ),
    "a block overwritten before it is stored": (
        RESCALER,
        "            tma_store_wait_read<0>();\n",
        "",
        1,
    ),
    "warps' scales left behind before all have read the last": (
        RESCALER,
        "named_barrier(kBarrier, kThreads); // all have read what was here",
        "",
        17,
    ),
    "an end that one storer alone is told of": (
        RESCALER,
        "for (int i = 0; i < RawBlocks::kStorers; ++i, ring.next())",
        "for (int i = 0; i < RawBlocks::kStorers - 1; ++i, ring.next())",
        0,
    ),
    "a tile told as read while its last step is": (
        PRODUCT,
        "if (step == steps - 1)",
        "if (step == max(0, steps - 2))",
        LAST,
    ),
    "a tile told as read before all lanes have read its scales": (
        SUMS,
        "__syncwarp(); // all lanes have read scales that another tile may take the place of",
        "",
        20,
    ),
    "no tile told as read while another is waited for": (
        PRODUCT,
        "tell_of_ended(ring); // whose place it may be that is waited for",
        ";",
        4,
    ),
    "a last panel as wide as others": (
        PRODUCT,
        "const int count_of_w = min(a.panel, across - first_of_w);",
        "const int count_of_w = a.panel;",
        PANELS,
    ),
    "panels that the ring has no room for": (
        PRODUCT,
        "        of,\n        panel,\n",
        "        of,\n        panel + room,\n",
        PANELS,
    ),
}


PRODUCT_IN_PLACE = "grouped/in_place_sm90.cu"
UNTIMELY_IN_PLACE = {
    "a quarter told as rewritten before its fence": (
        """
                fence_async();
                barrier_arrive_warp(shared.full(ring.at), lane);
""",
        """
                barrier_arrive_warp(shared.full(ring.at), lane);
                fence_async();
""",
        22,
    ),
    "a quarter told as rewritten before all lanes have written": (
        "barrier_arrive_warp(shared.full(ring.at), lane);",
        "if (lane == 0) barrier_arrive(shared.full(ring.at));",
        22,
    ),
    "scales told as there while they are copied": (
        "barrier_arrive_copied(came);",
        "barrier_arrive(came);",
        6,
    ),
    "x's place released before it is multiplied": (
        """
        wgmma_wait<0>();
        keep_in_order(products);
        release_x(x);
""",
        """
        release_x(x);
        wgmma_wait<0>();
        keep_in_order(products);
""",
        1,
    ),
    "x copied to a place that is not free": (
        "        barrier_wait(shared.x_empty(consumer, ring.at), ring.parity ^ 1);\n",
        "",
        1,
    ),
    "the second unit not waited for": (
        """
                expect_x(x);
                add_half<1>(sums, w, x);
""",
        """
                add_half<1>(sums, w, x);
""",
        22,
    ),
    "x's place released before all lanes have read its scales": (
        "__syncwarp(); // all lanes have read the scales",
        "",
        9,
    ),
    "w's place released before both units are multiplied": (
        """
            add_half<0>(sums, w, x);
            if (units > 1) {
                expect_x(x);
                add_half<1>(sums, w, x);
            }
            release_w(w);
""",
        """
            add_half<0>(sums, w, x);
            release_w(w);
            if (units > 1) {
                expect_x(x);
                add_half<1>(sums, w, x);
            }
""",
        9,
    ),
    "w copied to a place that is not free": (
        """
            barrier_wait(shared.empty(ring.at), ring.parity ^ 1);
            const unsigned came = shared.came(ring.at);
""",
        """
            const unsigned came = shared.came(ring.at);
""",
        1,
    ),
    "w's places not released by who has no unit": (
        "                skip(w);\n",
        "",
        1,
    ),
    "the last step's place not released by who has no unit": (
        "for (int left = a.steps(); left > 0; --left, w.next()) {",
        "for (int left = a.steps(); left > 1; --left, w.next()) {",
        2,
    ),
    "w's place released before all lanes of who has no unit have seen it": (
        "__syncwarp(); // all lanes have seen it",
        "",
        24,
    ),
    "a tile told before its place is free": (
        """
        barrier_wait(shared.empty(ring.at), ring.parity ^ 1);
        if (lane == 0) {
            shared.tiles[at] = tile;
""",
        """
        if (lane == 0) {
            shared.tiles[at] = tile;
""",
        21,
    ),
    "a tile told where another's results are stored by it": (
        "constexpr int kTiles = kBlocks + 1;",
        "constexpr int kTiles = kBlocks;",
        11,
    ),
    "an end that some rescalers are not told of": (
        "for (int i = 0; i < kRescalers; i += kQuarters, ring.next())",
        "for (int i = 0; i < kQuarters; i += kQuarters, ring.next())",
        0,
    ),
    "an end told in a place that is not free": (
        """
            barrier_wait(shared.empty(ring.at), ring.parity ^ 1);
            if (lane == 0) {
                shared.places[ring.at].step = -1;
""",
        """
            if (lane == 0) {
                shared.places[ring.at].step = -1;
""",
        20,
    ),
    "a lone block taken as a pair": (
        "const bool is_pair = in_blocks + 1 < lists.count(lists.block_ends(), group);",
        "const bool is_pair = true;",
        8,
    ),
    "last pairs as many as of others": (
        "const int height = min(kSwath, lists.count(lists.pair_ends(), group) - super);",
        "const int height = kSwath;",
        21,
    ),
}


def find(mistake: Mistake, seed: int, kernel: KernelSpec, tmp_path: Path) -> None:
    """Try the kernel with a mistake under schedules until one shows it."""
    csrc = tmp_path / "csrc"
    shutil.copytree(csrc_dir(), csrc)
    mistake.plant(csrc)
    with pytest.raises((EmulatedError, AssertionError)):
        for schedule in range(SCHEDULES):
            check(seed, csrc, schedule, kernel)


@pytest.mark.parametrize("what", UNTIMELY)
def test_a_mistake_planted_where_w_is_rescaled_ahead_is_found(what: str, tmp_path: Path) -> None:
    source, right, wrong, seed = UNTIMELY[what]
    mistake = Mistake(what, source, right, wrong, __file__, RESCALED.name)
    find(mistake, seed, RESCALED, tmp_path)


@pytest.mark.parametrize("what", UNTIMELY_IN_PLACE)
def test_a_mistake_planted_where_w_is_rescaled_in_place_is_found(what: str, tmp_path: Path) -> None:
    right, wrong, seed = UNTIMELY_IN_PLACE[what]
    mistake = Mistake(what, PRODUCT_IN_PLACE, right, wrong, __file__, IN_PLACE.name)
    find(mistake, seed, IN_PLACE, tmp_path)
