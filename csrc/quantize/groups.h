// Groups of rows, each padded to whole tiles: which rows of the input a tile of the output holds.
// Every wave finds out for itself from the groups' offsets, so that the host need not know them,
// one launch is enough, and no wave waits for another.
#pragma once

#include "common/packed.h"

namespace mx {

constexpr unsigned kGroupRows = 128; // a group is padded to a multiple of so many rows

struct TileRows {
    unsigned long first; // row of the input
    unsigned count;      // rows there are; those after them are zeros
};

// Offsets of groups, [groups + 1], in 32 or 64 bits, and the rows of the input.
struct Groups {
    const void* offsets;
    bool wide;
    unsigned count;
    unsigned long rows;

    // A group's first row, or the last one's end; wrong offsets stay within the input.
    MX_MEMBER unsigned long begin(unsigned group) const {
        const long at = wide ? static_cast<const long*>(offsets)[group]
                             : static_cast<const int*>(offsets)[group];
        if (at < 0)
            return 0;
        return static_cast<unsigned long>(at) < rows ? at : rows;
    }
};

MX_DEVICE void store_offset(void* offsets, bool wide, unsigned at, unsigned long value) {
    if (wide)
        static_cast<long*>(offsets)[at] = value;
    else
        static_cast<int*>(offsets)[at] = value;
}

// Sum of x over this lane and those before it.
MX_DEVICE unsigned sum_up_to_lane(unsigned x, int lane) {
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) {
        const unsigned below = from_lane((lane - distance) & (kLanes - 1), x);
        x += lane >= distance ? below : 0;
    }
    return x;
}

// x of a lane, which is the same for all, in all of them.
MX_DEVICE unsigned long wide_from_lane(int from, unsigned long x) {
    const unsigned long high = from_lane(from, static_cast<unsigned>(x >> 32));
    return high << 32 | from_lane(from, static_cast<unsigned>(x));
}

// The rows of a tile, which each wave finds on its own: all its lanes take part. Where padded is
// not null, the padded groups' offsets go there, [groups + 1].
MX_DEVICE TileRows rows_of_tile(const Groups& groups, unsigned tile, void* padded) {
    const int lane = thread_in_group() % kLanes;
    TileRows found{0, 0};
    unsigned tiles_before = 0;
    for (unsigned first = 0; first < groups.count; first += kLanes) {
        const unsigned group = first + lane;
        unsigned long begin = 0, end = 0;
        if (group < groups.count) {
            begin = groups.begin(group);
            end = groups.begin(group + 1);
        }
        const unsigned size = end > begin ? end - begin : 0;
        const unsigned tiles = (size + kGroupRows - 1) / kGroupRows;
        const unsigned end_tile = tiles_before + sum_up_to_lane(tiles, lane);
        const unsigned inside = tile - (end_tile - tiles); // huge before the group
        if (const LaneMask here = lanes_where(inside < tiles)) {
            const int owner = lanes_of((here & (0 - here)) - 1);
            const unsigned left = size - inside * kGroupRows;
            found.first = wide_from_lane(owner, begin + inside * kGroupRows);
            found.count = from_lane(owner, left < kGroupRows ? left : kGroupRows);
            if (padded == nullptr)
                break;
        }
        if (padded != nullptr && group < groups.count)
            store_offset(padded, groups.wide, group + 1,
                         static_cast<unsigned long>(end_tile) * kGroupRows);
        tiles_before = from_lane(kLanes - 1, end_tile);
    }
    if (padded != nullptr)
        store_offset(padded, groups.wide, 0, 0);
    return found;
}

} // namespace mx
