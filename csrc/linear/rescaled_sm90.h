// What wgmma_fp8_rescaled's two launches hand each other: both operands in e4m3, whose four blocks
// of a step of 128 k are under one scale where they can be. x comes first, then w, in blocks of 128
// rows:
//
//   payload   [rows, K]
//   for each step words, a multiple of 4:
//     scales  [rows]    those of four blocks, which are alike where they can be
//     common  [blocks]  fp32: of x 1, of w the scale that all its rows have; not above 0 where they
//                       have none in common
//     kinds   [blocks]  fp32: what they have then, one of the constants below
//   ended     counters of parts of tiles, cleared
//   sums      of parts of tiles
//
// Where w is taken in slices of its features, each has the place of the one before. All slices are
// laid out alike, with room for the widest one, as x stays where the first slice's launch put it.
#pragma once

#include "common/target.h"

namespace mx {

// What has a scale of its own in a step of 128 rows; of two operands the lesser constant holds.
constexpr float kRowsApart = -1;   // each row
constexpr float kBlocksApart = -2; // each block of 32 k
constexpr float kFarApart = -3;    // likewise, and the product of two scales may be out of fp32

struct RescaledOperands {
    unsigned char* memory;
    long M, N, K; // N: features that there is room for

    static constexpr int kRows = 128, kStepK = 128, kCounters = 1024;
    MX_MEMBER long x_blocks() const { return (M + kRows - 1) / kRows; }
    MX_MEMBER long blocks() const { return x_blocks() + (N + kRows - 1) / kRows; }
    MX_MEMBER long rows() const { return blocks() * kRows; }
    MX_MEMBER long first_w() const { return x_blocks() * kRows; }
    MX_MEMBER int steps() const { return (K + kStepK - 1) / kStepK; }
    MX_MEMBER unsigned char* payload() const { return memory; }
    MX_MEMBER unsigned* words() const {
        return reinterpret_cast<unsigned*>(memory + rows() * K); // K is a multiple of 32
    }
    MX_MEMBER unsigned words_of_step() const { return (rows() + 2 * blocks() + 3) / 4 * 4; }
    // Of a row, in a step.
    MX_MEMBER unsigned* word(int step, long row) const {
        return words() + static_cast<long>(step) * words_of_step() + row;
    }
    // Stores what the block that begins with a row has in common in a step, and its kind.
    MX_MEMBER void tell(int step, long first_row, float common, float kind) const {
        float* const to = reinterpret_cast<float*>(word(step, rows() + first_row / kRows));
        to[0] = common;
        to[blocks()] = kind;
    }
    MX_MEMBER unsigned* ended() const {
        return words() + static_cast<long>(steps()) * words_of_step();
    }
    MX_MEMBER unsigned char* sums() const {
        return reinterpret_cast<unsigned char*>(ended() + kCounters);
    }
};

// Features of a slice: `room`, but for the last one, which ends with w.
MX_DEVICE long slice_features(long room, long features, long first_feature) {
    return min(room, features - first_feature);
}

} // namespace mx
