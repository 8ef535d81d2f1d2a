// The expansion of x to bf16, by some warps of each workgroup while the others multiply.
//
// Chunks of tiles are claimed one after another in about the order in which the product needs them,
// by whoever is there: no workgroup waits for one that may not have started, and a chunk that is
// claimed is expanded without waiting for others, so launches on several streams cannot block each
// other.
#pragma once

#include "sm90/async.h"
#include "sm90/copy.h"
#include "sm90/expand.h"
#include "sm90/global.h"
#include "walk_sm90.h"

namespace mx {

// Tiles of the list are expanded in bands: the first chunk of each tile of the band, then the
// second of each. A band has the tiles that clusters begin with together.
MX_DEVICE int tiles_of_band(int order, int pairs) {
    const int clusters = gridDim.x / kCluster;
    return (clusters + order * pairs - 1) / (order * pairs) * order;
}

template <int Threads, int Barrier>
struct Expander {
    static constexpr int kBlock = 32; // k of one scale
    static constexpr int kOctet = 8;  // rows that a warp expands at a time
    static constexpr int kUnroll = 3; // octets, of a chunk's units each
    static constexpr int kAhead = 1;  // bands beyond the one that this workgroup multiplies
    static constexpr int kWarps = Threads / kLanes;

    const Workspace& workspace;
    const unsigned char *xq, *xs;
    long K;
    int thread;
    unsigned turn; // shared: what was claimed
    unsigned now;  // shared: the tile that this workgroup multiplies, or one beyond all

    MX_MEMBER void run(int band) const {
        unsigned next = thread == 0 ? claim() : 0;
        int tiles = 0;
#pragma unroll
        for (int kind = 1; kind <= kMostSlabs; ++kind)
            tiles += workspace.tiles()[kind];
        const int parts = workspace.chunks() * kChunkParts;
        const unsigned of_band = band * parts, all = tiles * parts;
        while (true) {
            if (thread == 0)
                store_shared(turn, next);
            named_barrier(Barrier, Threads);
            const unsigned mine = load_shared(turn);
            if (mine >= all)
                return;
            if (thread == 0)
                next = claim();
            const int first = mine / of_band * band, height = min(band, tiles - first);
            const int inside = mine % of_band, chunk = inside / (height * kChunkParts);
            const int tile = first + inside / kChunkParts % height, part = inside % kChunkParts;
            if (thread == 0)
                while (tile >= (static_cast<int>(watch_shared(now)) / band + 1 + kAhead) * band)
                    sleep(500);
            named_barrier(Barrier, Threads);
            const bool outside = expand(workspace.tile()[tile], chunk, part);
            fence_async_global();
            const bool any = named_barrier_or(Barrier, Threads, outside);
            const unsigned long long bit = 1ull << (chunk % kChunksOfWord * kChunkParts + part);
            if (thread == 0)
                set_bits_release(workspace.expanded(tile) + chunk / kChunksOfWord,
                                 bit | (any ? bit << 32 : 0));
        }
    }

  private:
    MX_MEMBER unsigned claim() const { return atomicAdd(workspace.claimed(), 1u); }

    // Whether a scale is one that bf16 does not cover.
    MX_MEMBER bool expand(const TokenTile tile, int chunk, int part) const {
        const int lane = thread % kLanes, step = lane % 4, in_octet = lane / 4;
        constexpr int of_slab = kSlabRows / kOctet;
        const int octets = (tile.rows + kSlabRows - 1) / kSlabRows * (of_slab / kChunkParts);
        const long k = static_cast<long>(chunk) * (kChunkUnits * kUnitK) + step * 16;
        const unsigned char* payload = xq + tile.row * K + k;
        const unsigned char* scales = xs + (tile.row * K + k) / kBlock;
        const int units = min(workspace.units() - chunk * kChunkUnits, kChunkUnits);
        unsigned char* const to =
            workspace.x() +
            (static_cast<long>(tile.slab) * workspace.units() + chunk * kChunkUnits) *
                kSlabUnitBytes +
            step * 256 + in_octet * 16;
        bool outside = false;
        for (int from = thread / kLanes; from < octets; from += kWarps * kUnroll) {
            u32x4 words[kUnroll][kChunkUnits];
            unsigned scale[kUnroll][kChunkUnits];
#pragma unroll
            for (int i = 0; i < kUnroll; ++i) {
                const int in_part = min(from + i * kWarps, octets - 1);
                const int octet = part * octets + in_part;
                const int row = min(octet * kOctet + in_octet, tile.rows - 1);
#pragma unroll
                for (int unit = 0; unit < kChunkUnits; ++unit) {
                    words[i][unit] = u32x4{};
                    scale[i][unit] = 127;
                    if (k + unit * kUnitK < K) {
                        words[i][unit] = load(payload + row * K + unit * kUnitK);
                        scale[i][unit] = load_byte(scales + (row * K + unit * kUnitK) / kBlock);
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < kUnroll; ++i) {
                if (from + i * kWarps >= octets)
                    break;
                const int octet = part * octets + from + i * kWarps;
                unsigned char* const slab =
                    to + octet / of_slab * (workspace.units() * static_cast<long>(kSlabUnitBytes)) +
                    octet % of_slab * 1024;
#pragma unroll
                for (int unit = 0; unit < kChunkUnits; ++unit)
                    if (unit < units)
                        outside |= store_expanded(slab + unit * kSlabUnitBytes, words[i][unit],
                                                  scale[i][unit]);
            }
        }
        return outside;
    }

    MX_MEMBER static bool store_expanded(unsigned char* to, const u32x4& words, unsigned scale) {
        const bool is_nan = scale == kNanScale, over = scale > kLastXScale && !is_nan;
        const float factor = bits_to_float(is_nan ? kNanBits : over ? 0 : (scale + 60) << 23);
        u32x4 even, odd;
#pragma unroll
        for (int j = 0; j < 4; ++j)
            e4m3x4_to_bf16(words[j], factor, even.words[j], odd.words[j]);
        store_vector(to, even);
        store_vector(to + 128, odd);
        return over;
    }
};

} // namespace mx
