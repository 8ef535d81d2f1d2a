// Groups of rows, each padded to whole tiles: which rows of the input a tile of the output holds.
// Every workgroup finds out for itself from the groups' offsets, so that the host need not know
// them and one launch is enough.
#pragma once

#include "mx_piece.h"

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

// The rows of a tile, for a workgroup of Threads threads, all of which take part. Where padded is
// not null, the padded groups' offsets go there, [groups + 1].
template <int Threads>
MX_DEVICE TileRows rows_of_tile(const Groups& groups, unsigned tile, void* padded) {
    constexpr int waves = Threads / kLanes;
    MX_LDS TileRows found;
    MX_LDS unsigned sums[waves];
    const int thread = thread_in_group(), lane = thread % kLanes, wave = wave_in_group();
    if (thread == 0) {
        found = {0, 0};
        if (padded != nullptr)
            store_offset(padded, groups.wide, 0, 0);
    }
    unsigned tiles_before = 0;
    for (unsigned first = 0; first < groups.count; first += Threads) {
        const unsigned group = first + thread;
        unsigned long begin = 0, end = 0;
        if (group < groups.count) {
            begin = groups.begin(group);
            end = groups.begin(group + 1);
        }
        const unsigned size = end > begin ? end - begin : 0;
        const unsigned tiles = (size + kGroupRows - 1) / kGroupRows;
        const unsigned up_to_lane = sum_up_to_lane(tiles, lane);
        if (lane == kLanes - 1)
            sums[wave] = up_to_lane;
        group_barrier();
        unsigned end_tile = tiles_before + up_to_lane;
#pragma unroll
        for (int w = 0; w < waves; ++w) {
            end_tile += w < wave ? sums[w] : 0;
            tiles_before += sums[w];
        }
        const unsigned inside = tile - (end_tile - tiles); // huge before the group
        if (inside < tiles) {
            const unsigned left = size - inside * kGroupRows;
            found = {begin + inside * kGroupRows, left < kGroupRows ? left : kGroupRows};
        }
        if (padded != nullptr && group < groups.count)
            store_offset(padded, groups.wide, group + 1,
                         static_cast<unsigned long>(end_tile) * kGroupRows);
        group_barrier(); // sums are read, and found is there
    }
    const TileRows rows = found;
    group_barrier(); // before another call
    return rows;
}

} // namespace mx
