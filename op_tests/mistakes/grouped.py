"""Mistakes in the sources of grouped products."""

from __future__ import annotations

from op_tests.mistakes.mistake import (
    ANY_ROOM,
    FAR,
    GROUPED,
    NAN,
    NOT_STORED,
    OF_GROUPS,
    PANELS,
    PROMOTED,
    RESCALED_GROUPS,
    of_source,
)

MISTAKES = [
    *of_source(
        *(GROUPED, "rescaled", "grouped/rescale_groups_sm90.h"),
        (
            "last tile of x of a group left out where it is not whole",
            "(range.end - range.begin + kTileRows - 1) / kTileRows",
            "(range.end - range.begin) / kTileRows",
            "test_a_group_of_every_size",
        ),
    ),
    *of_source(
        *(RESCALED_GROUPS, "rescaled", "grouped/rescale_groups_sm90.h"),
        (
            "rows of the next group in a tile",
            "return i < tile.rows ? tile.row + i : -1;",
            "return min(tile.row + i, static_cast<int>(M) - 1);",
            "test_what_other_groups",
        ),
    ),
    *of_source(
        *(GROUPED, "rescaled", "grouped/rescaler_sm90.h"),
        ("w of the first group for all", "row = group * of.N + first;", "row = first;"),
        ("scales of the first step for all", "before = step * (kStepBytes / 32);", "before = 0;"),
        (
            "groups without rows not passed over",
            "const int group = of.busy()[1 + tile / of.across()], first",
            "const int group = tile / of.across(), first",
        ),
        (
            "words of the first step for all",
            "to.words() + step * static_cast<long>(to.words_of_step());",
            "to.words();",
        ),
        ("scale of other rows", "top = max(top, of_warps[i]);", "top = max(top, of_warps[0]);"),
        (
            "scales of the block before where the next one's are not known",
            """                    if (!known)
                        row = load_row(block);
""",
            "",
        ),
        (
            "scale of the block before where the next one's is not known",
            "known ? top_of(next) : kUnknown",
            "top_of(known ? next : row)",
        ),
        ("scales of both blocks in one place", "tops[turn ^ 1]);", "tops[turn]);"),
        ("scales past the end of k", "Row row{0, min(block.blocks, kBlocks)};", "Row row{0, 4};"),
        (
            "values that become subnormal subtracted from",
            "(down + 1) * 8 * kEach);",
            "down * 8 * kEach);",
        ),
        (
            "subtracted from and multiplied as well",
            "            words[w] += down * 8 * kEach;\n",
            "",
        ),
        ("blocks below 2 accepted", "down == 0 ? kMagnitudes : kTwos", "kMagnitudes"),
        (
            "scale of all rows told where each has its own",
            "             : rows_apart ? own * kEach\n",
            "             : rows_apart ? common * kEach\n",
        ),
        (
            "rows put under the scale of all where each has its own",
            "multiply(words, (rows_apart ? own : common) - row.scale(i));",
            "multiply(words, common - row.scale(i));",
        ),
        (
            "far scales told as near ones",
            "             : far  ? kFarApart\n",
            "             : far  ? kBlocksApart\n",
            FAR,
        ),
        (
            "scales put in common at the ends of fp32",
            "bool right = !rescaling::is_far(common) && common != kNanScale;",
            "bool right = true;",
            FAR,
        ),
        ("payload under NaN scales kept", "if (row.scale(i) != kNanScale) {", "if (true) {", NAN),
    ),
    *of_source(
        *(RESCALED_GROUPS, "rescaled", "grouped/rescaler_sm90.h"),
        (
            "tiles overwritten that products still read",
            """            while (!is_free(number / blocks.steps()))
                ;
""",
            "",
            ANY_ROOM,
        ),
        (
            "NaN subtracted from",
            "small |= ~(magnitudes + least) | magnitudes + kEach;",
            "small |= ~(magnitudes + least);",
            "test_a_nan_among",
        ),
        (
            "scales of blocks of zeros counted",
            "(any & (down == 0 ? kMagnitudes : kTwos)) != 0;",
            "(down == 0 || (any & kTwos) != 0);",
            "test_scales_of_zeros",
        ),
    ),
    *of_source(*(GROUPED, "rescaled", "linear/rescaled_results_sm90.h"), NOT_STORED),
    *of_source(
        *(GROUPED, "rescaled", "grouped/rescaled_sm90.cu"),
        ("bias of the first group for all", "tile.group * a.of.N + row)", "row)", OF_GROUPS),
        (
            "second warpgroup's rows left out where the tile has a row more than 64",
            "index * kGroupRows >= tile.rows.rows",
            "index * (kGroupRows + 1) >= tile.rows.rows",
            "test_a_group_of_every_size",
        ),
        (
            "tiles of w read before they are there",
            """            while (load_acquire(a.of.ready() + of_w) != steps)
                tell_of_ended(ring); // whose place it may be that is waited for
""",
            "",
        ),
    ),
    *of_source(
        *(RESCALED_GROUPS, "rescaled", "grouped/rescaled_sm90.cu"),
        (
            "scales of tiles of w as if each had a place of its own",
            "tile.of_w % of.room * static_cast<long>(kTile), 0",
            "tile.of_w * static_cast<long>(kTile), 0",
            ANY_ROOM,
        ),
        (
            "last tiles of x of a panel as many as of others",
            "const int height = min(kSwath, count_of_x - super), place",
            "const int height = kSwath, place",
            PANELS,
        ),
    ),
    *of_source(
        *(GROUPED, "persistent", "grouped/persistent_sm90.cu"),
        ("scales of x of twice their size", "(scale + 60) << 23", "(scale + 61) << 23"),
        (
            "NaN scales not noticed",
            "const bool is_nan = scale == kNanScale,",
            "const bool is_nan = false,",
            "test_a_nan_scale",
        ),
        (
            "scales of w ignored",
            "scales_left > 0 ? load_two(scales_at) : 127 * 0x0101",
            "127 * 0x0101",
        ),
    ),
    *of_source(
        *(PROMOTED, "wgmma_fp8", "grouped/promoted_sm90.cu"),
        ("scale of another row", "__shfl_sync(~0u, own, i, 4);", "__shfl_sync(~0u, own, 0, 4);"),
        ("scales of the first step for all", "factor[i] = next[i];", "factor[i] = factor[i];"),
        ("last 32 k of a step left out", "k < kStepK / 32;", "k < kStepK / 32 - 1;"),
        (
            "last row of a group not stored",
            "if (own < rows && column < a.N)",
            "if (own + 1 < rows && column < a.N)",
        ),
        ("rows of the first group for all", "const int row = begin + (", "const int row = ("),
    ),
]
