// Expert layers of few tokens: each slot of a token is a GEMV of its own, without a list of routed
// rows. aiter_mx/kernels/moe_up.py and moe_down.py define the two halves.
#pragma once

#include "../linear/gemv.h"
#include "common/epilogue.h"
#include "gfx950/memory.h"

namespace mx {

#if MX_WIDE_IDS
using Id = long long;
#else
using Id = int;
#endif

constexpr bool kHasMap = MX_HAS_MAP;

struct Routing {
    const Id* topk_ids;
    const int *expert_map, *num_tokens;
    int top_k, experts, shared, here; // experts: on all ranks; here: with the shared ones

    MX_MEMBER Id id(unsigned token, int slot) const { return topk_ids[token * top_k + slot]; }
    // Tokens that count, the first ones. Memory is asked without a branch, together with ids.
    MX_MEMBER int tokens() const {
        return *(num_tokens ? num_tokens : reinterpret_cast<const int*>(topk_ids));
    }
    MX_MEMBER bool is_past(int token, int tokens) const {
        return (num_tokens != nullptr) & (token >= tokens);
    }
    // The number here of an expert, or -1, as for all of a token that is past.
    MX_MEMBER int number(Id id, bool is_past) const {
        const unsigned low = id, known = is_past ? 0 : kHasMap ? experts : min(experts, here);
        const bool is_known = (sizeof(Id) == sizeof(low) || id == low) & (low < known);
        if constexpr (!kHasMap)
            return is_known ? low : -1;
        const int number = expert_map[is_known ? low : 0];
        return (is_known & (number < here)) ? number : -1;
    }
    MX_MEMBER int shared_expert(int slot, bool is_past) const {
        return is_past ? -1 : here - shared + slot - top_k;
    }
};

// What depends on any of the three waits for all, whose loads are then under way at once: LLVM
// would put each near its use.
template <class A, class B, class C>
MX_DEVICE void arrive_together(A& a, B& b, C& c) {
    asm("" : "+s"(a), "+s"(b), "+s"(c));
}

// 16 consecutive values, half a block, as loaded: the lane whose number differs in bit 0 has the
// other half.
template <int Code>
struct Values {
    static constexpr int kPieces = Code == kF32 ? 4 : Code == kNone ? 1 : 2;
    static constexpr unsigned kBytes = kPieces; // of a value
    u32x4 pieces[kPieces];

    // at: the first value, or kNowhere.
    MX_MEMBER void load(const Buffer& from, unsigned at) {
#pragma unroll
        for (int i = 0; i < kPieces; ++i)
            pieces[i] = from.load(at < kNowhere ? at * kBytes : kNowhere, i * kPiece);
    }
    // All lanes of the wave take part; those with nothing have zeros.
    MX_MEMBER Piece quantise() const {
        static_assert(Code != kNone);
        if constexpr (Code == kF32) {
            float v[16];
#pragma unroll
            for (int i = 0; i < 16; ++i)
                v[i] = bits_to_float(pieces[i / 4][i % 4]);
            const BlockScale scale = block_scale<E4M3, kRoundUp>(max_of_lanes<2>(amax_bits(v)));
            Piece piece;
#pragma unroll
            for (int i = 0; i < 4; ++i)
                piece.payload[i] =
                    to_e4m3x4<kRoundUp>(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3], scale);
            piece.scale = scale.byte;
            return piece;
        } else {
            const QuantisedHalf half = quantised(HalfBlock<Code>{pieces[0], pieces[1]});
            return {half.payload, half.scale};
        }
    }
};

// The scales of a step of up to 8 rows, each 4 blocks of a row in one lane: those of row r and of
// the blocks from 4 i on in lane 8 r + i.
constexpr int kStepDwords = kStep / kBlock / 4;
constexpr int kRowsOfLoad = kLanes / kStepDwords;
constexpr int kScaleLoads = (kRows + kRowsOfLoad - 1) / kRowsOfLoad;

// That of this lane's payload of a row.
MX_DEVICE unsigned scale_of_row(const unsigned (&words)[kScaleLoads], int row, int lane) {
    const int holder = row % kRowsOfLoad * kStepDwords + lane / kStepDwords;
    return __builtin_amdgcn_ubfe(of_lane(holder, words[row / kRowsOfLoad]), lane / 2 % 4 * 8, 8);
}

} // namespace mx
