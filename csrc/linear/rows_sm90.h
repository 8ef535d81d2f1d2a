// Rows of MX-FP8 tensors in a warp's part of shared memory, 128 k at a time, for mma: their copies,
// where these lie, and their block scales.
#pragma once

#include "common/target.h"
#include "sm90/memory.h"
#include "sm90/mma.h"
#include "sm90/tma.h"

namespace mx {

constexpr int kBlock = 32;  // k of one scale
constexpr int kChunk = 128; // k that a warp takes at a time; also bytes of a row
constexpr int kBlocks = kChunk / kBlock;
constexpr int kPiece = 16;     // bytes of a copy
constexpr int kScaleBytes = 8; // of a row in a chunk: two words, which hold 4 in a row

constexpr unsigned kUnitScales = 0x7f7f7f7f; // four scales of 1

struct Tensors {
    const unsigned char *xq, *xs, *wq, *ws;
    int M;
    long N, K;

    MX_MEMBER long blocks() const { return K / kBlock; }
    // True if the scales of each chunk are an aligned word.
    MX_MEMBER bool aligned(const unsigned char* scales) const {
        return ((reinterpret_cast<unsigned long>(scales) | blocks()) & 3) == 0;
    }
};

MX_DEVICE unsigned byte_of(unsigned word, int i) { return (word >> (8 * i)) & 0xff; }

// A tile of sums is 16 rows of w by 8 of x, or the other way round, 4 values a lane.
constexpr int kTileBytes = kLanes * 16;

MX_DEVICE float4 load_tile(unsigned address) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(address));
    return v;
}
MX_DEVICE void store_tile(unsigned address, float4 v) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(v.x), "f"(v.y),
                 "f"(v.z), "f"(v.w)
                 : "memory");
}
MX_DEVICE float4 add(float4 a, float4 b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }
// Of tiles that follow each other, in their order.
template <int Count>
MX_DEVICE float4 sum_of_tiles(unsigned address) {
    float4 sum = load_tile(address);
#pragma unroll
    for (int i = 1; i < Count; ++i)
        sum = add(sum, load_tile(address + i * kTileBytes));
    return sum;
}

// Copies some rows of w or x, every Step-th chunk.
template <int Rows, int Step>
struct Copier {
    static constexpr int kPieces = kChunk / kPiece, kRowsAtOnce = kLanes / kPieces;
    static constexpr int kScaleRows = (Rows + kLanes - 1) / kLanes; // of a lane

    const unsigned char* payload;
    const unsigned char* scales[kScaleRows];
    int rows; // that exist, from the lane's first one on

    // Sets out from a chunk of the rows of a tensor from first to end, or more than there are.
    MX_MEMBER void open(const unsigned char* q, const unsigned char* s, const Tensors& t,
                        long first, long end, long chunk, int lane) {
        const int row = lane / kPieces;
        payload = q + (first + row) * t.K + chunk * kChunk + lane % kPieces * kPiece;
        rows = static_cast<int>(min(end - first, static_cast<long>(Rows))) - row;
#pragma unroll
        for (int i = 0; i < kScaleRows; ++i) {
            const long n = min(first + i * kLanes + lane, end - 1);
            scales[i] = s + n * t.blocks() + chunk * kBlocks;
        }
    }
    // left: of K, from the chunk on. plain: chunks are whole and have aligned words of scales.
    MX_MEMBER void copy(unsigned to, unsigned to_scales, const Tensors& t, long left, bool plain,
                        int lane) {
        const int row = lane / kPieces, piece = lane % kPieces;
        const unsigned stride = static_cast<unsigned>(t.K);
        to += swizzled_for_mma(row, piece);
#pragma unroll
        for (int i = 0; i < Rows / kRowsAtOnce; ++i)
            if (i * kRowsAtOnce < rows) // what is not copied affects its own row alone
                copy_once_in_lines_async(to + i * kRowsAtOnce * kChunk,
                                         payload +
                                             static_cast<unsigned long>(stride) * (i * kRowsAtOnce),
                                         plain || piece * kPiece < left);
#pragma unroll
        for (int i = 0; i < kScaleRows; ++i) {
            if ((i + 1) * kLanes > Rows && lane >= Rows - i * kLanes)
                break;
            const unsigned place = to_scales + (i * kLanes + lane) * kScaleBytes;
            if (plain) {
                copy_word_async(place, scales[i]);
            } else {
                // Only what is the row's is read: the words' other bytes may be beyond the tensor.
                const int offset = reinterpret_cast<unsigned long>(scales[i]) & 3;
                const int last = offset + static_cast<int>(min(left / kBlock, 4l));
                copy_word_async(place, scales[i] - offset, min(last, 4));
                if (last > 4)
                    copy_word_async(place + 4, scales[i] - offset + 4, last - 4);
            }
        }
        payload += Step * kChunk;
#pragma unroll
        for (int i = 0; i < kScaleRows; ++i)
            scales[i] += Step * kBlocks;
    }
};

// Four scales of a row in a stage. first_byte: the address of the row's first scale in memory, of
// which the lowest bits count; left: of K.
MX_DEVICE unsigned load_scales(unsigned from, bool plain, unsigned first_byte, long left) {
    if (plain)
        return load_shared_4(from);
    const uint2 both = load_shared_8(from);
    const unsigned word = __funnelshift_r(both.x, both.y, 8 * (first_byte & 3));
    const unsigned mask = left >= kChunk ? ~0u : (1u << (left / 4)) - 1; // 8 bits for 32 k
    return (word & mask) | (kUnitScales & ~mask);
}

// The top bit of a byte is set unless that scale is in 2^-95 to 2^96.
MX_DEVICE unsigned unusual(unsigned scales) {
    const unsigned lowered = scales - 0x20202020;
    return lowered & (lowered << 1) & 0x80808080;
}

// The largest of some bytes.
template <int Words>
MX_DEVICE unsigned largest_byte(const unsigned (&words)[Words]) {
    constexpr unsigned even = 0x00ff00ff;
    unsigned most = 0;
#pragma unroll
    for (int i = 0; i < Words; ++i)
        most = __vmaxu2(most, __vmaxu2(words[i] & even, (words[i] >> 8) & even));
    return max(most & 0xffff, most >> 16);
}

} // namespace mx
