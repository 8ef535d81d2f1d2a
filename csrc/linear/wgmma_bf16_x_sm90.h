// What wgmma_bf16's two launches hand each other: x in bf16 or fp16, as wgmma takes its B without
// swizzle, and counters, cleared, for parts of tiles; what the first one quantised x to, if it did,
// for outputs that are computed again; and where parts of tiles leave their sums.
//
//   ended   counters
//   flags   words of each tile of tokens. Of bf16, for each unit of 64 k: whether bf16 does not
//           cover one of its scales. Of fp16, for each part of K of eight tokens: likewise; then
//           for each token what its scales are relative to, sm90/f16_relative.h
//   tiles   of tokens; in each a unit of 64 k after another, of 128 bytes for each token:
//   unit:   8 tokens (1 KiB) | the next 8 | ...
//   1 KiB:  step of 16 k (256 bytes) | the next | 2 more
//   256:    16 bytes a token | 16 bytes a token of the other k: of four neighbouring k, bf16 has
//           the first and third here, fp16 the first and second
#pragma once

#include "common/target.h"

namespace mx {

template <bool OfF16>
struct XWorkspaceOf {
    unsigned char* memory;
    long M, K;
    int tile_tokens;
    bool quantises; // whether x is yet to be quantised

    static constexpr int kUnit = 64, kCounters = 1024;
    static constexpr int kParts = 8; // of K: as many as tokens
    MX_MEMBER long tiles() const { return (M + tile_tokens - 1) / tile_tokens; }
    MX_MEMBER long units() const { return (K + kUnit - 1) / kUnit; }
    MX_MEMBER unsigned* ended() const { return reinterpret_cast<unsigned*>(memory); }
    MX_MEMBER unsigned* outside() const { return ended() + kCounters; }
    MX_MEMBER long outside_of_tile() const { return OfF16 ? tile_tokens : units(); }
    MX_MEMBER unsigned* references() const { return outside() + tiles() * tile_tokens; }
    MX_MEMBER unsigned char* unit(long tile, long unit) const {
        const long of_tile = OfF16 ? 2L * tile_tokens : units();
        const long flags = (tiles() * of_tile * 4 + 1023) / 1024 * 1024;
        return memory + kCounters * 4 + flags + (tile * units() + unit) * tile_tokens * kUnit * 2;
    }
    MX_MEMBER unsigned char* payload() const { return unit(tiles(), 0); }
    MX_MEMBER unsigned char* scales() const { return payload() + M * K; }
    MX_MEMBER unsigned char* sums() const {
        return payload() + (quantises ? (M * K + M * (K / 32) + 1023) / 1024 * 1024 : 0);
    }
};

} // namespace mx
