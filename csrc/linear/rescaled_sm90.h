// What wgmma_fp8_rescaled's two launches hand each other: both operands in e4m3, whose four blocks
// of a step of 128 k are under one scale where they can be. x comes first, then w, in blocks of 128
// rows:
//
//   payload   [rows, K]
//   for each step words, a multiple of 4:
//     scales  [rows]    those of four blocks, which are alike where they can be
//     common  [blocks]  in fp32: of x 1, of w the scale that all its rows have; not above 0 where
//                       they have none in common, and then what the step is:
//     kinds   [blocks]  a Kind
//   ended     counters of parts of tiles, cleared
//   sums      of parts of tiles
//
// Where w is taken in slices of its features, each has the place of the one before. All slices are
// laid out alike, with room for the widest one, as x stays where the first slice's launch put it.
#pragma once

#include "common/target.h"

namespace mx {

// What 128 rows of an operand have not in common in a step, and with those of the other operand the
// least of both holds. The scales of the first two kinds are such that products of two are in fp32.
constexpr float kRowsApart = -1;   // each row has a scale of its own
constexpr float kBlocksApart = -2; // each block of 32 k has
constexpr float kFarApart = -3;    // likewise, and their products may be out of fp32

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
