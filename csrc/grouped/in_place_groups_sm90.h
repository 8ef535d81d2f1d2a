// What the launches of `rescaled_in_place` hand each other. x is as ../linear/rescaled_sm90.h has
// it, in blocks of 128 rows, but what belongs to 64 rows in a step lies together:
//
//   payload    [rows, K]
//   for each step and unit of 64 rows a record of 68 words:
//     scales   [64]
//     common, kind  fp32, of its block
//   lists      see GroupLists
//   claimed    int, tiles that CTAs have taken; cleared
//
// Rows of a block that its group has not are zeros. A tile of results is of a pair of blocks of x
// and a tile of w.
#pragma once

#include "groups_sm90.h"

namespace mx {

constexpr int kUnitRows = 64, kRecordWords = kUnitRows + 4;

struct RescaledRows {
    unsigned char* memory;
    long rows, K;

    static constexpr int kRows = RescaledOperands::kRows, kStepK = RescaledOperands::kStepK;
    MX_MEMBER int steps() const { return (K + kStepK - 1) / kStepK; }
    MX_MEMBER unsigned char* payload() const { return memory; }
    // Of a step those of units follow one another.
    MX_MEMBER unsigned words_of_step() const { return rows / kUnitRows * kRecordWords; }
    MX_MEMBER unsigned* record(int step, long row) const {
        unsigned* const first = reinterpret_cast<unsigned*>(memory + rows * K);
        return first + static_cast<long>(step) * words_of_step() + row / kUnitRows * kRecordWords;
    }
    MX_MEMBER unsigned* word(int step, long row) const {
        return record(step, row) + row % kUnitRows;
    }
    MX_MEMBER void tell(int step, long first_row, float common, float kind) const {
#pragma unroll
        for (int row = 0; row < kRows; row += kUnitRows) {
            float* const to = reinterpret_cast<float*>(record(step, first_row + row) + kUnitRows);
            to[0] = common;
            to[1] = kind;
        }
    }
    MX_MEMBER unsigned* ended() const { return record(steps(), 0); }
};

struct GroupWorkspace : GroupSizes {
    unsigned char* memory;
    int most_blocks; // of x

    MX_MEMBER RescaledRows operands() const {
        return {memory, static_cast<long>(most_blocks) * kTileRows, K};
    }
    MX_MEMBER GroupLists lists() const {
        return {reinterpret_cast<int*>(operands().ended()), groups, most_blocks};
    }
    MX_MEMBER unsigned* claimed() const { return lists().behind(); }
    // Words from claimed() on that are cleared.
    MX_MEMBER static constexpr int counters() { return 1; }
};

#define MX_SIZES int most_blocks
#define MX_WORKSPACE {{M, N, K, static_cast<int>(G)}, workspace, most_blocks}

} // namespace mx
