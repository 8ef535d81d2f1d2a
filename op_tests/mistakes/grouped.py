"""Mistakes in the sources of grouped products."""

from __future__ import annotations

from op_tests.mistakes.mistake import (
    ANY_ROOM,
    EVERY_SIZE,
    FAR,
    GROUPED,
    NAN,
    NOT_STORED,
    OF_GROUPS,
    PANELS,
    PROMOTED,
    RESCALED_GROUPS,
    TURNS,
    of_source,
)

MISTAKES = [
    *of_source(
        *(GROUPED, "rescaled", "grouped/rescale_groups_sm90.h"),
        (
            "last block of x of a group left out where it is not whole",
            "(range.end - range.begin + kTileRows - 1) / kTileRows",
            "(range.end - range.begin) / kTileRows",
            EVERY_SIZE,
        ),
    ),
    *of_source(
        *(RESCALED_GROUPS, "rescaled", "grouped/rescale_groups_sm90.h"),
        (
            "rows of the next group in a block",
            "return i < rows.rows ? rows.row + i : -1;",
            "return min(rows.row + i, static_cast<int>(M) - 1);",
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
    ),
    *of_source(
        *(GROUPED, "rescaled", "linear/rescaled_row_sm90.h"),
        (
            "values that become subnormal subtracted from",
            "kHigh - (down == 0 ? 0 : off + kOfExponent);",
            "kHigh - off;",
        ),
        (
            "subtracted from and multiplied as well",
            "words[w] += down * kOfExponent;",
            "words[w] += 0;",
        ),
        ("blocks below 2 accepted", "down == 0 ? kMagnitudes : kTwos", "kMagnitudes"),
        (
            "scale of all rows told where each has its own",
            "apart ? each : (rows_apart ? of_row : common) * kEach}",
            "apart ? each : common * kEach}",
        ),
        (
            "rows put under the scale of all where each has its own",
            "multiply(words, (rows_apart ? of_row : common) - own.scale(i));",
            "multiply(words, common - own.scale(i));",
        ),
        ("far scales told as near ones", "(far ? kFarApart : kBlocksApart)", "kBlocksApart", FAR),
        (
            "scales put in common at the ends of fp32",
            " && !rescaling::is_far(common);",
            ";",
            FAR,
        ),
        ("payload under NaN scales kept", "if (own.scale(i) != kNanScale) {", "if (true) {", NAN),
    ),
    *of_source(
        *(RESCALED_GROUPS, "rescaled", "linear/rescaled_row_sm90.h"),
        (
            "NaN subtracted from",
            "small |= ~(magnitudes + least) | magnitudes + kEach;",
            "small |= ~(magnitudes + least);",
            "test_a_nan_among",
        ),
        (
            "scales of blocks of zeros counted",
            "return (any & (down == 0 ? kMagnitudes : kTwos)) != 0 ||",
            "return down == 0 || (any & kTwos) != 0 ||",
            "test_scales_of_zeros",
        ),
    ),
    *of_source(*(GROUPED, "rescaled", "linear/rescaled_results_sm90.h"), NOT_STORED),
    *of_source(
        *(GROUPED, "rescaled", "grouped/group_results_sm90.h"),
        ("bias of the first group for all", "group * of.N + row)", "row)", OF_GROUPS),
    ),
    *of_source(
        *(GROUPED, "rescaled", "grouped/groups_sm90.h"),
        (
            "group before for the first of a group's",
            "const bool behind = ends[group + half] <= number;",
            "const bool behind = ends[group + half] < number;",
        ),
    ),
    *of_source(
        *(GROUPED, "rescaled", "grouped/rescaled_sm90.cu"),
        (
            "second warpgroup's rows left out where the tile has a row more than 64",
            "index * kGroupRows >= tile.rows.rows",
            "index * (kGroupRows + 1) >= tile.rows.rows",
            EVERY_SIZE,
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
        *(GROUPED, "rescaled_in_place", "grouped/rescale_groups_sm90.h"),
        ("lone blocks left out", "(cut - begin + 1) / 2", "(cut - begin) / 2", EVERY_SIZE),
    ),
    *of_source(
        *(GROUPED, "rescaled_in_place", "linear/rescaled_row_sm90.h"),
        (
            "rows that are apart made of what they were rewritten to",
            "words = Words::at(from + i * RowScales::kBlock);",
            "words = load(i);",
        ),
    ),
    *of_source(
        *(RESCALED_GROUPS, "rescaled_in_place", "linear/rescaled_row_sm90.h"),
        (
            "scales put under one that is too far above",
            "bool right = (below & 0xf8 * kEach) == 0 && ",
            "bool right = ",
            "test_scales_of_zeros",
        ),
    ),
    *of_source(
        *(GROUPED, "rescaled_in_place", "grouped/in_place_rescaler_sm90.h"),
        (
            "scale of another row for all of a quarter",
            "common = __reduce_max_sync(~0u, largest_byte(own.scales));",
            "common = largest_byte(own.scales);",
        ),
        (
            "scale of another row for all of a quarter with zeros",
            "return __reduce_max_sync(~0u, x);",
            "return x;",
        ),
        ("rows of a quarter apart one by one", "return __any_sync(~0u, x);", "return x;"),
        ("scales of all quarters in one place", "block.commons + 4 * quarter", "block.commons"),
    ),
    *of_source(
        *(RESCALED_GROUPS, "rescaled_in_place", "grouped/in_place_rescaler_sm90.h"),
        (
            "rows behind a group's last rescaled as well",
            "if (quarter * kQuarterRows % kRunRows >= place.rows)",
            "if (place.row + quarter * kQuarterRows >= of.groups * of.N)",
            "test_rows_of_w_behind",
        ),
    ),
    *of_source(
        *(GROUPED, "rescaled_in_place", "grouped/in_place_sm90.cu"),
        (
            "w of the first group for all",
            "const long row = tile.group * a.of.N + in_group;",
            "const long row = in_group;",
        ),
        ("scales of w of the first step for all", "from[i] += kScales;", "from[i] += 0;"),
        (
            "scales of all blocks of w in one place",
            "address + kOwn + i * kBlockWords",
            "address + kOwn",
        ),
        (
            "scales of x of the first step for all",
            "records[c] += from.words_of_step();",
            "records[c] += 0;",
        ),
        (
            "scales of x of the first unit for both",
            "records[c] + i * kRecordWords",
            "records[c]",
        ),
        ("x of the first unit for both", "load(c, rows[c] + i * kUnitRows,", "load(c, rows[c],"),
        (
            "scale of the first quarter for all",
            "bits_to_float(of_w[v / (kValues / kQuarters)])",
            "bits_to_float(of_w[0])",
        ),
        (
            "scale of the upper row for the lower one",
            "of_byte(load_shared_4(words + 4 * 8))",
            "of_byte(load_shared_4(words))",
        ),
        (
            "scale of the upper row for the lower one where these are apart",
            "load_shared_4(words + 4 * 8), of_piece, kind);",
            "load_shared_4(words), of_piece, kind);",
        ),
        (
            "scales of the first columns for all where these are apart",
            "shared.block(w.at).told_words + lane % 4 * 8;",
            "shared.block(w.at).told_words;",
        ),
        (
            "kinds of w not looked at",
            "kind = fminf(kind, bits_to_float(of_w[q]));",
            "kind = fminf(kind, bits_to_float(of_w[0]));",
        ),
        (
            "last unit left out where it is not whole",
            "(rows[0].rows + rows[1].rows + kUnitRows - 1) / kUnitRows",
            "(rows[0].rows + rows[1].rows) / kUnitRows",
            EVERY_SIZE,
        ),
        (
            "second unit of a lone block left out",
            "return rows[1].rows > 0 ? kHalves * consumer : consumer;",
            "return kHalves * consumer;",
            EVERY_SIZE,
        ),
        (
            "results of both units in the place of the first",
            "tile.of_unit(tile.first_unit(index) + i)",
            "tile.of_unit(tile.first_unit(index))",
        ),
    ),
    *of_source(
        *(RESCALED_GROUPS, "rescaled_in_place", "grouped/in_place_sm90.cu"),
        (
            "last pairs as many as of others",
            "const int height = min(kSwath, lists.count(lists.pair_ends(), group) - super);",
            "const int height = kSwath;",
            TURNS,
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
