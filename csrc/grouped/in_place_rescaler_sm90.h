// Puts blocks of w, 128 rows x 128 k, under one scale where they are multiplied from: of 32 rows
// each, a quarter, where they can be.
#pragma once

#include "../linear/rescaled_row_sm90.h"
#include "common/target.h"
#include "groups_sm90.h"
#include "sm90/memory.h"

namespace mx {

constexpr int kStepBytes = RescaledOperands::kStepK, kBlockBytes = kTileRows * kStepBytes;
constexpr int kQuarters = 4, kQuarterRows = kTileRows / kQuarters; // of a block, of a warp each
static_assert(kQuarterRows == kLanes, "a thread has a row");

// Where a block is in w.
struct PlaceOfBlock {
    long row; // its first, of all groups'
    int step;
    int rows, blocks; // that there are: of each run of its rows, and of a row's of 32 k
};

// A block in shared memory, by addresses: its payload as TMA swizzles it, and words of each row,
// scales as they are in w, and those that it is told to have; and what each quarter has in common,
// as of RescaledOperands, or what it is that it has not.
struct BlockInPlace {
    unsigned box, own_words, told_words, commons;
};

// A warp's, of a quarter.
struct Rescaler {
    const unsigned char* wq;
    GroupSizes of;
    const BlockInPlace& block;
    const PlaceOfBlock& place; // in shared memory
    const int quarter, lane;
    const int row = quarter * kQuarterRows + lane;

    MX_MEMBER void run() const {
        constexpr unsigned one = rescaling::kOne;
        if (quarter * kQuarterRows % kRunRows >= place.rows) // results of these are not stored
            return tell({e8m0_to_f32(one), one * RowScales::kEach});
        const RowScales own{load_shared_4(block.own_words + 4 * row),
                            min(place.blocks, RowScales::kMost)};
        const unsigned common = __reduce_max_sync(~0u, largest_byte(own.scales));
        if (__all_sync(~0u, RowInPlace::of(block.box, row).rewrite(own, common)))
            tell({e8m0_to_f32(common), common * RowScales::kEach});
        else
            tell(RowInPlace::of(block.box, row)
                     .rewrite_apart(
                         own, from(), [](unsigned x) { return __reduce_max_sync(~0u, x); },
                         [](bool x) -> bool { return __any_sync(~0u, x); }));
    }

  private:
    MX_MEMBER static unsigned largest_byte(unsigned word) {
        const unsigned two = max(word & 0xff00ff, word >> 8 & 0xff00ff); // the upper half decides
        return max(max(word & 0xff, word >> 8 & 0xff), two >> 16);
    }
    MX_MEMBER void tell(const RescaledRow& found) const {
        store_shared_4(block.told_words + 4 * row, found.of_row);
        if (lane == 0)
            store_shared_4(block.commons + 4 * quarter, float_to_bits(found.common));
    }
    // Where the row's step is in w.
    MX_MEMBER const unsigned char* from() const {
        const long at = place.row + row % kRunRows + row / kRunRows * of.features();
        return wq + at * of.K + place.step * kStepBytes;
    }
};

} // namespace mx
