// Stores sums of rescaled_step_sm90.h as results.
#pragma once

#include "rescaled_step_sm90.h"
#include "sm90/memory.h"

namespace mx {

// A warp's 16 rows, of which a lane has two, eight apart. y is where the first of these begins in
// the tile; from there so many rows and columns exist, and rows are `pitch` values apart. Rows are
// stored 16 bytes at a time where these are whole.
template <class Out>
struct RescaledResults {
    Out* y;
    long pitch;
    int rows, columns, lane;

    MX_MEMBER void store(const RescaledStep::Values& sums, bool whole) const {
        if (whole)
            store_whole(sums);
        else
            store_single(sums);
    }

  private:
    MX_MEMBER void store_whole(const RescaledStep::Values& sums) const {
#pragma unroll
        for (int four = 0; four < RescaledStep::kColumns / 32; ++four) {
            const int column = 32 * four + lane % 4 * 8;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                u32x4 words;
#pragma unroll
                for (int piece = 0; piece < 4; ++piece) {
                    const int v = 4 * (4 * four + piece) + 2 * i;
                    words.words[piece] =
                        pack<Out>(sums[RescaledStep::place(v)], sums[RescaledStep::place(v + 1)]);
                }
                transpose_pairs(words, lane);
                if (8 * i < rows && column < columns)
                    store_vector(y + 8 * i * pitch + column, words);
            }
        }
    }
    MX_MEMBER void store_single(const RescaledStep::Values& sums) const {
#pragma unroll
        for (int v = 0; v < RescaledStep::kValues; ++v) {
            const int own = v / 2 % 2 * 8, column = v / 4 * 8 + lane % 4 * 2 + v % 2;
            if (own < rows && column < columns)
                mx::store(y + own * pitch + column, sums[RescaledStep::place(v)]);
        }
    }
};

// Whether each row's 16 bytes are whole, from the first of y on.
MX_DEVICE bool are_whole(const void* y, long pitch) {
    return pitch % 8 == 0 && reinterpret_cast<unsigned long long>(y) % 16 == 0;
}

} // namespace mx
