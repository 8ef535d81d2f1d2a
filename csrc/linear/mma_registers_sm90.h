// What the two kinds of direct share: parameters, and how weights and scales are read. One, for up
// to 4 rows of x, is mma_registers_few_sm90.h, the other, for up to 16, mma_registers_many_sm90.h.
#pragma once

#include "common/scale.h"
#include "common/target.h"
#include "sm90/mma.h"
#include "sm90/rows.h"
#include "sm90/tma.h"

namespace mx {

constexpr int kRows = MX_ROWS;          // outputs n of a workgroup
constexpr int kWaves = MX_WAVES;        // waves of a workgroup
constexpr int kUnroll = MX_UNROLL;      // chunks of a wave whose loads precede all use, or 0:
constexpr bool kInTurn = kUnroll == 0;  // each is asked for while the one before is used
constexpr int kSplit = MX_SPLIT;        // workgroups of a cluster, which share K
constexpr int kResident = MX_RESIDENT;  // workgroups of an SM that registers are to allow
constexpr bool kOverlaps = MX_OVERLAPS; // may begin before the grid ahead of it ends
constexpr bool kEven = MX_EVEN;         // each round of each wave has all of its chunks
constexpr unsigned kDepth = MX_DEPTH;   // K
// 2: kRows divides N; 1: the last workgroup starts among rows of another; 0: N is less than kRows.
constexpr int kRowsFit = MX_ROWS_FIT;

constexpr int kHalves = (kRows + 7) / 8; // tiles of 8 rows of w
constexpr int kSteps = 2;                // of 64 k of a chunk
constexpr int kStep = kChunk / kSteps;
constexpr int kThreads = kLanes * kWaves;
constexpr int kParts = kSplit * kWaves; // whose sums are added

constexpr int kChunks = kDepth / kChunk + (kDepth % kChunk > 0); // of K
constexpr bool kWholeChunks = kDepth % kChunk == 0;
constexpr int kRoundChunks = (kInTurn ? 1 : kUnroll) * kParts;
static_assert(!kEven || kChunks % kRoundChunks == 0);
constexpr int kRounds = kChunks / kRoundChunks; // if even

// Whether K goes on to k of chunk c.
MX_DEVICE bool within(int c, int k) {
    return kWholeChunks || static_cast<unsigned>(c * kChunk + k) < kDepth;
}
MX_DEVICE int blocks_left(int c) { return static_cast<int>(kDepth / kBlock) - c * kBlocks; }

// Opaque to the compiler, which would keep each address of a loop in registers of its own.
MX_DEVICE void advance_pointer(const unsigned char*& p, int bytes) {
    p += bytes;
    asm volatile("" : "+l"(p));
}

// A way out that no wave takes, as no address is above 2^64 - 2^32. ptxas would gather loads behind
// the products, past __syncwarp too, but moves few past this.
MX_DEVICE void keep_loads_in_order(const unsigned char* p) {
    asm volatile("{\n"
                 ".reg .pred never;\n"
                 "setp.eq.u32 never, %0, 0xffffffff;\n"
                 "@never exit;\n"
                 "}" ::"r"(static_cast<unsigned>(reinterpret_cast<unsigned long>(p) >> 32))
                 : "memory");
}

// Scales of four blocks, of which `left` exist.
template <bool Aligned>
MX_DEVICE unsigned scales_at(const unsigned char* p, int left) {
    if constexpr (Aligned)
        return load_word(p);
    unsigned v = kUnitScales;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i)
        if (i < left)
            v = (v & ~(0xffu << 8 * i)) | load_byte(p + i) << 8 * i;
    return v;
}

// Of bytes' top bits, whether any is set in any lane.
MX_DEVICE bool any_far(unsigned bits) { return __any_sync(0xffffffff, bits & 0x80808080); }

// What a lane has of w in a chunk: 16 bytes of row lane / 4 of each half, twice, and the scales of
// rows lane, 32 + lane and so on, which others need.
constexpr int kScaleWords = (kHalves + 3) / 4;

struct Weights {
    u32x4 payload[kHalves][kSteps];
    unsigned scales[kScaleWords];

    // The scales of some row of half h.
    MX_MEMBER unsigned scales_of(int h, int row) const {
        return of_lane(h % 4 * 8 + row, scales[h / 4]);
    }
};

// Where a lane reads them.
struct WeightsReader {
    // Of the first half, at known distances from which the others are, and of a last one that is no
    // whole half; of each where N has too few rows.
    static constexpr bool kAllBases = kRowsFit == 0;
    static constexpr int kBases = kAllBases ? kHalves : kHalves > 1 && kRows % 8 > 0 ? 2 : 1;

    const unsigned char *payload[kBases], *scales[kScaleWords];
    int place; // which bytes of a step, 16 of 64, the lane reads

    // From a chunk on. Rows past the last are computed from it and not stored.
    MX_MEMBER void open(const unsigned char* wq, const unsigned char* ws, int at,
                        unsigned first_row, unsigned last_row, unsigned chunk, int lane) {
        place = at;
        const auto row = [&](unsigned i, unsigned end) {
            return kAllBases     ? min(first_row + i, last_row)
                   : end > kRows ? first_row + min(i, kRows - 1u)
                                 : first_row + i;
        };
#pragma unroll
        for (int i = 0; i < kBases; ++i) {
            const unsigned first = 8 * (kAllBases || i == 0 ? i : kHalves - 1);
            payload[i] = wq +
                         static_cast<unsigned long>(row(first + lane / 4, first + 8)) * kDepth +
                         (chunk * kChunk + place);
        }
#pragma unroll
        for (int i = 0; i < kScaleWords; ++i)
            scales[i] = ws +
                        static_cast<unsigned long>(row(kLanes * i + lane, kLanes * (i + 1))) *
                            (kDepth / kBlock) +
                        chunk * kBlocks;
    }
    MX_MEMBER const unsigned char* payload_of(int h) const {
        if (kAllBases)
            return payload[h];
        return h > 0 && 8 * h + 8 > kRows ? payload[kBases - 1] : payload[0] + 8l * h * kDepth;
    }
    MX_MEMBER void advance(int chunks) {
#pragma unroll
        for (int i = 0; i < kBases; ++i)
            advance_pointer(payload[i], chunks * kChunk);
#pragma unroll
        for (int i = 0; i < kScaleWords; ++i)
            advance_pointer(scales[i], chunks * kBlocks);
    }
    // ahead: chunks from where the lane is; it is chunk c of K.
    MX_MEMBER void load_payload(Weights& w, int ahead, int c) const {
#pragma unroll
        for (int h = 0; h < kHalves; ++h)
#pragma unroll
            for (int s = 0; s < kSteps; ++s)
                load_step(w, h, s, ahead, c);
    }
    MX_MEMBER void load_step(Weights& w, int h, int s, int ahead, int c) const {
        if (within(c, s * kStep + place))
            w.payload[h][s] = load_once_in_lines(payload_of(h) + ahead * kChunk + s * kStep);
    }
    template <bool Aligned>
    MX_MEMBER void load_scales(Weights& w, int ahead, int c) const {
#pragma unroll
        for (int i = 0; i < kScaleWords; ++i)
            w.scales[i] = scales_at<Aligned>(scales[i] + ahead * kBlocks, blocks_left(c));
    }
};

// A chunk, `ahead` of where the readers are, for what is read of it once more.
struct XReader;
struct Here {
    const WeightsReader& w;
    const XReader& x;
    int ahead, chunk, lane;
};

// What is done with weights at the beginning of both ways after a branch is not to be done ahead of
// it: all of a wave's other work is, while it waits for them.
MX_DEVICE void unlike_the_other_way(u32x4& v) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
        asm volatile("" : "+r"(v.words[i]));
}

} // namespace mx
