// Puts a row's blocks of 32 k of a step of 128 under another scale where they lie in shared memory,
// as TMA swizzles them. A thread has a row of w. rescaling_sm90.h says what may be put under one
// scale.
#pragma once

#include "common/target.h"
#include "rescaling_sm90.h"
#include "sm90/memory.h"

namespace mx {

// The scales of a row's blocks, and how many of these there are; others' are 0.
struct RowScales {
    unsigned scales;
    int blocks;

    static constexpr int kBlock = 32, kMost = RescaledOperands::kStepK / kBlock;
    static constexpr unsigned kEach = 0x01010101;
    MX_MEMBER unsigned scale(int i) const { return scales >> 8 * i & 0xff; }
    // How far below another scale each is, in a byte; nothing where there is none.
    MX_MEMBER unsigned below(unsigned common) const {
        const unsigned none = blocks < kMost ? ~0u << 8 * blocks : 0;
        return common * kEach - (scales | common * kEach & none);
    }
};

// What the product finds a row's scales by: those of four blocks; and what its rows have in common,
// or else what has a scale of its own, a constant of rescaled_sm90.h.
struct RescaledRow {
    float common;
    unsigned of_row;
};

struct RowInPlace {
    unsigned first; // address, from which pieces of 16 bytes are found, see swizzled_128

    static constexpr int kBlocks = RowScales::kMost, kWords = RowScales::kBlock / 4;
    static constexpr unsigned kEach = RowScales::kEach, kHigh = 0x80 * kEach;
    static constexpr unsigned kMagnitudes = 0x7f * kEach, kTwos = 0x40 * kEach;
    static constexpr unsigned kOfExponent = 8 * kEach; // 1 in the exponents of e4m3

    struct Words {
        u32x4 halves[2];
        MX_MEMBER unsigned& operator[](int i) { return halves[i / 4].words[i % 4]; }
        MX_MEMBER static Words all(unsigned x) { return {{{x, x, x, x}, {x, x, x, x}}}; }
        MX_MEMBER static Words at(const unsigned char* p) {
            return {{mx::load(p), mx::load(p + 16)}};
        }
        // Of their magnitudes in e4m3.
        MX_MEMBER unsigned largest() const {
            return max(rescaling::largest_magnitude(halves[0]),
                       rescaling::largest_magnitude(halves[1]));
        }
    };

    // The row-th of a box. It is found again where it is used, as registers have no room.
    MX_MEMBER static RowInPlace of(unsigned box, int row) {
        return {held(box + row * RescaledOperands::kStepK + row % 8 * 16)};
    }
    MX_MEMBER unsigned piece(int i) const { return first ^ i * 16; }
    MX_MEMBER Words load(int i) const {
        return {{load_shared_16(piece(2 * i)), load_shared_16(piece(2 * i + 1))}};
    }
    MX_MEMBER void store(int i, const Words& words) const {
        store_shared_16(piece(2 * i), words.halves[0].words);
        store_shared_16(piece(2 * i + 1), words.halves[1].words);
    }

    // Puts the blocks under another scale, and returns true if none loses too much by it; false,
    // too, if one is zero, whose scale does not count.
    MX_MEMBER bool rewrite(const RowScales& own, unsigned common) const {
        const unsigned below = own.below(common);
        bool right = (below & 0xf8 * kEach) == 0 && !rescaling::is_far(common);
        unsigned others = 0; // a bit for each block with values that were not to be subtracted from
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) {
            Words words = load(i);
            const unsigned down = below >> 8 * i & 0xff;
            const bool is_other = subtract(words, down) & kHigh;
            others |= is_other << i;
            right &= is_other || is_right(own, i, down, words);
            store(i, words);
        }
#pragma unroll 1
        for (; others != 0; others &= others - 1)
            right &= multiply_again(own, __ffs(others) - 1, below);
        return right;
    }

    // Rewrites the blocks where rows may have no scale in common: each row has one then, or each
    // block. What was there is overwritten by now: `from` is where it is in w. Of all rows that are
    // to be alike the largest value is largest_of(one of them), and any_of tells whether one is so.
    template <class LargestOf, class AnyOf>
    MX_MEMBER RescaledRow rewrite_apart(const RowScales& own, const unsigned char* from,
                                        const LargestOf& largest_of, const AnyOf& any_of) const {
        using namespace rescaling;
        unsigned most[kBlocks], top = 0; // 0 where no value counts
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) {
            const bool counts = i < own.blocks && own.scale(i) != kNanScale;
            most[i] = counts ? Words::at(from + i * RowScales::kBlock).largest() : 0;
            top = max(top, most[i] == 0 ? 0 : own.scale(i) + 1);
        }
        const unsigned top_of_all = largest_of(top);
        const unsigned common = top_of_all == 0 ? kOne : top_of_all - 1;
        const unsigned of_row = top == 0 ? kOne : top - 1;
        bool rows_apart = false, apart = false, far = false;
        unsigned each = 0;
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) {
            const unsigned scale = most[i] == 0 ? kOne : own.scale(i);
            rows_apart |= loses(most[i], scale, common);
            apart |= loses(most[i], scale, of_row);
            far |= is_far(scale);
            each |= scale << 8 * i;
        }
        const bool some = top_of_all != 0; // where all are zero any scale will do
        rows_apart = any_of(rows_apart && some);
        apart = any_of(apart && some);
        far = any_of(far);
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) {
            if (i >= own.blocks)
                continue;
            Words words = Words::all(kNanPayloads);
            if (own.scale(i) != kNanScale) {
                words = Words::at(from + i * RowScales::kBlock);
                if (most[i] != 0 && !apart)
                    multiply(words, (rows_apart ? of_row : common) - own.scale(i));
            }
            store(i, words);
        }
        return {apart        ? (far ? kFarApart : kBlocksApart)
                : rows_apart ? kRowsApart
                             : e8m0_to_f32(common),
                apart ? each : (rows_apart ? of_row : common) * kEach};
    }

  private:
    // Where e4m3 is normal and stays so, two to the power of -down is a subtraction. Where a value
    // is not, or is NaN, its byte's highest bit is set in the result.
    MX_MEMBER static unsigned subtract(Words& words, unsigned down) {
        const unsigned off = down * kOfExponent;
        const unsigned least = kHigh - (down == 0 ? 0 : off + kOfExponent);
        unsigned small = 0;
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
            const unsigned magnitudes = words[w] & kMagnitudes;
            small |= ~(magnitudes + least) | magnitudes + kEach;
            words[w] -= off;
        }
        return small;
    }
    // Whether a block that went down by less than eight still counts.
    MX_MEMBER static bool is_right(const RowScales& own, int i, unsigned down, Words& words) {
        unsigned any = 0;
#pragma unroll
        for (int w = 0; w < kWords; ++w)
            any |= words[w];
        return (any & (down == 0 ? kMagnitudes : kTwos)) != 0 || i >= own.blocks;
    }
    // Undoes the subtraction from a block, and multiplies.
    MX_MEMBER bool multiply_again(const RowScales& own, int i, unsigned below) const {
        Words words = load(i);
        const unsigned down = below >> 8 * i & 0xff;
#pragma unroll
        for (int w = 0; w < kWords; ++w)
            words[w] += down * kOfExponent;
        multiply(words, down);
        store(i, words);
        return is_right(own, i, down, words);
    }
    MX_MEMBER static void multiply(Words& words, unsigned down) {
        const unsigned factors = (15 - down << 10) * 0x00010001u;
#pragma unroll
        for (int w = 0; w < kWords; ++w)
            words[w] = rescaling::rescaled(words[w], factors);
    }
};

} // namespace mx
