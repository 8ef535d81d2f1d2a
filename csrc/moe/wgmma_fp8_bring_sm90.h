// The warps of wgmma_fp8_sm90.cu that bring x, and the scales of x and w.
#pragma once

#include "boxes_rows_sm90.h"
#include "boxes_sm90.h"
#include "sm90/memory.h"

namespace mx {

// The top bit of a byte is set unless that scale of x is in 2^-62 to 2^62, or of w in 2^-63 to
// 2^64: then the product of both, and times a sum of a block, is in fp32.
MX_DEVICE unsigned far_of_x(unsigned scales) {
    return (__vabsdiffu4(scales, 0x7f7f7f7f) + 0x41414141) & 0x80808080;
}
MX_DEVICE unsigned far_of_w(unsigned scales) { return ~(scales ^ scales << 1) & 0x80808080; }

// Where row `row` of a chunk, of 128 bytes, has its 16-byte piece.
MX_DEVICE unsigned turned(int row, int piece) { return row * kChunk + (piece ^ row % 8) * 16; }

// Of a row's four scales, some of which are far: those that are not, else 0. Blocks are those of
// row `row` of what is at `payload`; notes in `counts` whether one with a far scale is not zero.
MX_DEVICE unsigned without_far(unsigned scales, unsigned far, unsigned payload, int row,
                               bool& counts) {
    unsigned kept = scales;
#pragma unroll 1
    for (int b = 0; b < kBlocks; ++b) {
        if (!(far >> 8 * b & 128))
            continue;
        unsigned any = 0;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint4 v = load_shared_16(payload + turned(row, b * 2 + i));
            any |= (v.x | v.y | v.z | v.w) & 0x7f7f7f7f;
        }
        counts |= any != 0 || (scales >> 8 * b & 255) == kNanScale;
        kept &= ~(255u << 8 * b);
    }
    return kept;
}

// Starts copies of x, and of the scales of x and w. One warp.
MX_DEVICE void fetch_all(const MoeArgs& a, Shared& shared, int lane) {
    wait_for_grid_ahead(); // which made x
    constexpr int rows_at_once = kLanes / kPieces, batches = kCols / rows_at_once;
    const int piece = lane % kPieces, first_row = lane / kPieces;
    const unsigned places[2] = {turned(first_row, piece), turned(first_row + rows_at_once, piece)};
    const unsigned blocks = static_cast<unsigned>(a.K) / kBlock;
    static_assert(kLongScales && kScaleChunks == kVectorChunks, "K is a multiple of these chunks");
    static_assert(2 * rows_at_once == 8, "after two batches pieces are turned the same way");
    Turn<kEntries> turn;
    Turn<kSlots> to;
    Turn<kScalePlacesOuter> scales_to;
    for (;; turn.next()) {
        barrier_wait(shared_address(shared.opened + turn.at), turn.parity);
        const Entry& entry = shared.queue[turn.at];
        if (entry.expert < 0)
            break;
        const int rows = entry.col_tiles * 8, chunks = a.chunks();
        int row[batches]; // of x, or -1: looked up once, not for each chunk
#pragma unroll
        for (int i = 0; i < batches; ++i)
            row[i] = i * rows_at_once < rows ? entry.x_row[i * rows_at_once + first_row] : -1;
#pragma unroll 1
        for (int chunk = 0; chunk < chunks; ++chunk, to.next()) {
            barrier_wait(shared_address(shared.taken + to.at), to.parity ^ 1);
            if (chunk % kVectorChunks == 0) {
                const unsigned char* const ws = a.ws + chunk * kBlocks;
#pragma unroll
                for (int i = 0; i < kRows / kLanes; ++i) {
                    const int r = i * kLanes + lane;
                    const unsigned w = row_of_w(a, entry.tile, r / kGroupRows, r % kGroupRows);
                    copy_scales(shared_address(shared.w_scales[scales_to.at][r]),
                                row_at(ws,
                                       entry.expert * static_cast<int>(a.N) + static_cast<int>(w),
                                       blocks),
                                true);
                }
                for (int m = lane; m < rows; m += kLanes)
                    copy_scales(shared_address(shared.x_scales[scales_to.at][m]),
                                row_at(a.xs + chunk * kBlocks, entry.x_row[m], blocks),
                                entry.x_row[m] >= 0);
                scales_to.next();
            }
            const unsigned slot = shared_address(shared.x[to.at]);
            const unsigned char* const x = a.xq + chunk * kChunk + piece * 16;
#pragma unroll
            for (int i = 0; i < batches; ++i)
                if (i * rows_at_once < rows)
                    copy_async(slot + places[i % 2] + i / 2 * 8 * kChunk, row_at(x, row[i], a.K),
                               row[i] >= 0);
            barrier_arrive_copied(shared_address(shared.arrived + to.at));
        }
    }
    copy_wait<0>(); // copies must not outlive the warp
}

// Makes wgmma's B of x's scales, and hands it and x over to wgmma. One warp, which fetches nothing,
// as its fences would wait for that.
MX_DEVICE void hand_over(const MoeArgs& a, Shared& shared, int lane) {
    Turn<kEntries> turn;
    Turn<kSlots> at;
    Turn<kScalePlacesOuter> place;
    for (;; turn.next()) {
        barrier_wait(shared_address(shared.opened + turn.at), turn.parity);
        Entry& entry = shared.queue[turn.at];
        if (entry.expert < 0)
            break;
        const int rows = entry.col_tiles * 8, chunks = a.chunks();
#pragma unroll 1
        for (int chunk = 0; chunk < chunks; ++chunk, at.next()) {
            barrier_wait(shared_address(shared.arrived + at.at), at.parity);
            for (int m = lane; m < rows; m += kLanes) {
                unsigned scales = load_shared_4(
                    shared_address(&shared.x_scales[place.at][m][chunk % kVectorChunks]));
                const unsigned far = far_of_x(scales);
                if (__builtin_expect(far != 0 && entry.x_row[m] >= 0, false)) {
                    bool counts = false;
                    scales = without_far(scales, far, shared_address(shared.x[at.at]), m, counts);
                    if (counts)
                        entry.x_outside[m] = entry.any_x_outside = 1;
                }
                const unsigned factors[4] = {__byte_perm(scales, 0, 0x4140) << 7,
                                             __byte_perm(scales, 0, 0x4342) << 7, 0, 0};
                store_shared_16(shared_address(shared.x_factors[at.at][m]), factors);
            }
            fence_async();
            __syncwarp();
            if (lane == 0)
                barrier_arrive(shared_address(shared.ready + at.at));
            if (chunk % kVectorChunks == kVectorChunks - 1)
                place.next();
        }
    }
}

} // namespace mx
