// The runs of rows of one group, where a layout names the group of each row, for the grouped GEMMs:
// aiter_mx/kernels/group_runs.py says what is passed.
//
//   layout [M]       the group of each row; what is outside of 0 .. G - 1 is none
//   starts [R]       first row of each run, in their order; M where there is none
//   ends [2 R + 1]   the row after its last, 0 where there is none; how many there are; whose
//   lost [1]         the first row of the runs for which there is no room, or M
//   y [M, ..]        rows of no group become 0, those with a group from `lost` on NaN
//
// Workgroup 0 finds the runs: each thread looks at kRows rows next to each other, and counts are
// summed over waves and threads. In the others each wave takes kRows rows, and fills those of no
// group.

#include "common/scan.h"
#include "common/target.h"

using namespace mx;

constexpr int kWaves = MX_WAVES;
constexpr int kRows = MX_ROWS;
constexpr int kThreads = kWaves * kLanes;
constexpr int kPiece = 16; // bytes of a lane

struct alignas(kPiece) Piece {
    unsigned words[4];
};

struct Layout {
    const int* of;
    unsigned rows;
    int groups;

    // The group of a row, or -1.
    MX_MEMBER int at(unsigned row) const {
        const int group = row < rows ? of[row] : -1;
        return group >= 0 && group < groups ? group : -1;
    }
};

// A wave fills a row with a word, over and over.
MX_DEVICE void fill(unsigned char* row, long bytes, unsigned word) {
    const int lane = thread_in_group() % kLanes;
    if ((reinterpret_cast<unsigned long>(row) | bytes) % kPiece == 0) {
        for (long at = lane * kPiece; at < bytes; at += kLanes * kPiece)
            *reinterpret_cast<Piece*>(row + at) = {{word, word, word, word}};
        return;
    }
    for (long at = lane * 2; at < bytes; at += kLanes * 2)
        *reinterpret_cast<unsigned short*>(row + at) = word >> at % 4 * 8;
}

// Writes the runs, and returns the first row of those for which there is no room: there is for
// `most` that begin at multiples of `each`, and for one a group where any begins elsewhere.
MX_DEVICE unsigned find(const Layout& layout, int* starts, int* ends, int most, unsigned each) {
    MX_LDS int sums[kWaves];
    MX_LDS unsigned beyond; // where the run begins that is one more than there are groups
    const int thread = thread_in_group(), lane = thread % kLanes, wave = wave_in_group();
    int* const owners = ends + most + 1;
    if (thread == 0)
        beyond = layout.rows;
    bool unaligned = false;
    int before = 0; // runs that have begun
    for (unsigned base = 0; base < layout.rows; base += kThreads * kRows) {
        const unsigned first = base + thread * kRows;
        int group[kRows + 2]; // and of the rows beside them
#pragma unroll
        for (int i = 0; i < kRows + 2; ++i)
            group[i] = layout.at(first + i - 1);
        int begun = 0;
#pragma unroll
        for (int i = 1; i <= kRows; ++i)
            begun += group[i] >= 0 && group[i] != group[i - 1];
        const int so_far = sum_so_far(begun, lane);
        if (lane == kLanes - 1)
            sums[wave] = so_far;
        group_barrier();
        const int of_waves = sum_so_far(lane < kWaves ? sums[lane] : 0, lane);
        const int ahead = of_lane(wave - 1, of_waves); // anything in the first wave
        int number = before + (wave > 0 ? ahead : 0) + so_far - begun;
        before += of_lane(kWaves - 1, of_waves);
#pragma unroll
        for (int i = 1; i <= kRows; ++i) {
            const unsigned row = first + i - 1;
            if (group[i] < 0)
                continue;
            if (group[i] != group[i - 1]) {
                unaligned |= row % each != 0;
                if (number == layout.groups)
                    beyond = row;
                if (number < most) {
                    starts[number] = row;
                    owners[number] = group[i];
                }
                ++number;
            }
            if (group[i] != group[i + 1] && number <= most)
                ends[number - 1] = row + 1;
        }
        group_barrier(); // all have read the sums
    }
    const bool of_wave = lanes_where(unaligned) != 0;
    if (lane == 0)
        sums[wave] = of_wave;
    group_memory_barrier(); // what follows may be written over what was
    const bool is_unaligned = lanes_where(lane < kWaves && sums[lane]) != 0;
    const int room = is_unaligned ? layout.groups : most, count = before < room ? before : room;
    for (int i = count + thread; i < most; i += kThreads) {
        starts[i] = layout.rows;
        ends[i] = 0;
    }
    if (thread == 0)
        ends[most] = count;
    return is_unaligned ? beyond : layout.rows;
}

MX_KERNEL(kThreads)
aiter_mx_group_runs_scan(const int* layout_of, unsigned char* y, int* starts, int* ends, int* lost,
                         long row_bytes, unsigned rows, int groups, int most, unsigned each,
                         unsigned nan) {
    launch_dependents();
    wait_for_grid_ahead();
    const Layout layout{layout_of, rows, groups};
    const int wave = wave_in_group();
    if (group_x() == 0) {
        const unsigned first = find(layout, starts, ends, most, each);
        if (thread_in_group() == 0)
            *lost = first;
        for (long row = first + wave; row < rows; row += kWaves)
            if (layout.at(row) >= 0)
                fill(y + row * row_bytes, row_bytes, nan);
        return;
    }
    const unsigned first = (static_cast<unsigned>(group_x() - 1) * kWaves + wave) * kRows;
    int group[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i)
        group[i] = layout.at(first + i);
#pragma unroll
    for (int i = 0; i < kRows; ++i)
        if (group[i] < 0 && first + i < rows)
            fill(y + static_cast<long>(first + i) * row_bytes, row_bytes, 0);
}
