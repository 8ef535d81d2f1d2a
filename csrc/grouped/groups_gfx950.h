// Deals the tiles of a grouped product to workgroups: tile t of all groups' tiles, for any t.
//
// A wave looks at 64 groups at a time, a lane at each, and finds the one that tile t falls into by
// their running number of tiles. A group's tiles are ordered in swaths of `Swath` rows of tiles,
// and in a swath column after column, so that tiles that follow each other share rows of x or of w.
#pragma once

#include "gfx950/copy.h"

namespace mx {

// The arguments of a grouped kernel, as problem.py lists them.
struct GroupedArguments {
    const unsigned char *xq, *xs, *wq, *ws;
    const void* bias;
    void* y;
    const void *starts, *ends;
    Offset M, N, K, count;
    int is_masked, index_bytes, bias_kind;
    unsigned rows_each; // of a masked group
    unsigned workgroups;
};
using ArgumentsPointer = const __attribute__((address_space(4))) GroupedArguments*;

// They are loaded anew wherever they are asked for: kept, they would take the scalar registers that
// the loop needs.
MX_DEVICE ArgumentsPointer arguments() {
    auto at = (ArgumentsPointer)__builtin_amdgcn_kernarg_segment_ptr();
    asm volatile("" : "+s"(at));
    return at;
}

// Bound g of those in `of`, cut to 0 .. most.
MX_DEVICE unsigned bound(const void* of, int index_bytes, unsigned g, unsigned most) {
    const long at =
        index_bytes == 8 ? static_cast<const long*>(of)[g] : static_cast<const int*>(of)[g];
    return at < 0 ? 0 : at < most ? at : most;
}

// The first row of group g, and how many it has.
MX_DEVICE void rows_of(unsigned g, unsigned& first, unsigned& rows) {
    const ArgumentsPointer args = arguments();
    const void *starts = args->starts, *ends = args->ends;
    const int size = args->index_bytes;
    const bool is_masked = args->is_masked;
    const unsigned each = args->rows_each;
    const unsigned most = is_masked ? each : args->M;
    first = 0;
    if (starts)
        first = bound(starts, size, g, most);
    else if (ends && g > 0 && !is_masked)
        first = bound(ends, size, g - 1, most);
    const unsigned end = ends ? bound(ends, size, g, most) : most;
    rows = end > first ? end - first : 0;
    first += is_masked ? g * each : 0;
}

struct Tile {
    unsigned first, rows; // of x
    unsigned group;       // whose weights and bias
    unsigned feature;     // first of the tile
};

// x summed over this lane and all below it.
MX_DEVICE unsigned sum_through(unsigned x) {
    // DPP: rows of 16 lanes shifted right by 1, 2, 4 and 8, then lane 15 of rows 0 and 2 to the
    // rows after them, then lane 31 to the upper half.
    x += __builtin_amdgcn_update_dpp(0, x, 0x111, 0xf, 0xf, false);
    x += __builtin_amdgcn_update_dpp(0, x, 0x112, 0xf, 0xf, false);
    x += __builtin_amdgcn_update_dpp(0, x, 0x114, 0xf, 0xf, false);
    x += __builtin_amdgcn_update_dpp(0, x, 0x118, 0xf, 0xf, false);
    x += __builtin_amdgcn_update_dpp(0, x, 0x142, 0xa, 0xf, false);
    x += __builtin_amdgcn_update_dpp(0, x, 0x143, 0xc, 0xf, false);
    return x;
}

template <int TileM, int TileN, unsigned Swath>
class Deal {
  public:
    MX_MEMBER Deal(unsigned N, int lane) : lane(lane), columns((N + TileN - 1) / TileN) { look(0); }

    // Tile t, if there are so many. The t of successive calls must not decrease.
    MX_MEMBER bool find(unsigned t, Tile& tile) {
        while (t >= before + in_chunk) {
            if (chunk + kLanes >= arguments()->count)
                return false;
            before += in_chunk;
            look(chunk + kLanes);
        }
        t -= before;
        const int owner = __builtin_popcountll(__builtin_amdgcn_ballot_w64(through <= t));
        if (owner > 0)
            t -= at_lane(through, owner - 1);
        const unsigned left = at_lane(rows, owner);
        const unsigned swath = t / (Swath * columns);
        const unsigned in_swath = t % (Swath * columns);
        const unsigned height = min(Swath, (left + TileM - 1) / TileM - swath * Swath);
        const unsigned below = (swath * Swath + in_swath % height) * TileM;
        tile.first = scalar(at_lane(first_row, owner) + below);
        tile.rows = scalar(min(left - below, TileM));
        tile.group = scalar(chunk + owner);
        tile.feature = scalar(in_swath / height * TileN);
        return true;
    }

  private:
    MX_MEMBER void look(unsigned first) {
        chunk = first;
        first_row = rows = 0;
        if (first + lane < arguments()->count)
            rows_of(first + lane, first_row, rows);
        through = sum_through((rows + TileM - 1) / TileM * columns);
        in_chunk = at_lane(through, kLanes - 1);
    }
    MX_MEMBER static unsigned scalar(unsigned x) { return __builtin_amdgcn_readfirstlane(x); }
    MX_MEMBER static unsigned at_lane(unsigned x, int from) {
        return __builtin_amdgcn_readlane(x, from);
    }

    unsigned lane, columns;
    unsigned chunk, before = 0, in_chunk; // first of the 64 groups; tiles before them; of them
    unsigned first_row, rows;             // of the lane's group
    unsigned through;                     // tiles of the 64 groups up to the lane's
};

} // namespace mx
