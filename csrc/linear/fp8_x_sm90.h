// How a workgroup of the linear over fp8 gets its part of x: payloads as they are, and scales as
// fp32 in order of blocks. Rows that x does not have may be anything.
#pragma once

#include "common/scale.h"
#include "common/target.h"
#include "fp8_sm90.h"
#include "sm90/async.h"
#include "sm90/rows.h"

namespace mx {

struct XCopies {
    static constexpr unsigned kWords = (kRowsM * kMostChunks + kConsumers - 1) / kConsumers;
    static constexpr unsigned kPieces = kChunk / kPiece;
    static constexpr unsigned kXPieces = kRowsM * kPieces; // of a chunk

    const Tensors& t;
    unsigned shared;
    int first_chunk, chunks;
    unsigned words[kWords];

    MX_MEMBER void ask() {
        const unsigned thread = threadIdx.x;
#pragma unroll
        for (unsigned j = 0; j < kWords; ++j) {
            const unsigned i = thread + j * kConsumers, m = i % kRowsM, at = i / kRowsM;
            if (m < t.M && at < chunks)
                words[j] = load_scale_word(t.xs + m * t.blocks() + (first_chunk + at) * kBlocks);
        }
        if constexpr (kConsumers % kXPieces == 0) {
            constexpr unsigned step = kConsumers / kXPieces; // chunks
            const unsigned piece = thread % kPieces, m = thread / kPieces % kRowsM;
            const unsigned first = thread / kXPieces;
            const unsigned to =
                shared + kX + first * kXBytes + m * kChunk + (piece ^ (m % 8)) * kPiece;
            const unsigned char* from =
                t.xq + m * t.K + (first_chunk + first) * kChunk + piece * kPiece;
            if (m < t.M)
#pragma unroll
                for (unsigned j = 0; j < (kMostChunks + step - 1) / step; ++j)
                    if (first + j * step < chunks)
                        copy_async(to + j * step * kXBytes, from + j * step * kChunk, true);
        } else {
#pragma unroll 1
            for (unsigned i = thread; i < kXPieces * chunks; i += kConsumers) {
                const unsigned piece = i % kPieces, m = i / kPieces % kRowsM, at = i / kXPieces;
                if (m < t.M)
                    copy_async(shared + kX + at * kXBytes + m * kChunk + (piece ^ (m % 8)) * kPiece,
                               t.xq + m * t.K + (first_chunk + at) * kChunk + piece * kPiece, true);
            }
        }
        copy_commit();
    }
    MX_MEMBER void put_scales() const {
#pragma unroll
        for (unsigned j = 0; j < kWords; ++j) {
            const unsigned i = threadIdx.x + j * kConsumers, m = i % kRowsM, at = i / kRowsM;
            if (m < t.M && at < chunks)
#pragma unroll
                for (int b = 0; b < kBlocks; ++b)
                    store_shared(shared + kXScales + ((at * kBlocks + b) * kRowsM + m) * 4,
                                 e8m0_to_f32(byte_of(words[j], b)));
        }
    }
};

} // namespace mx
