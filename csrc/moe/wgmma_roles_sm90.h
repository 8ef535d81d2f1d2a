// The warps that kernels over wgmma have alike: one looks up what there is to do, one brings
// weights by TMA, and those that add finish their sums. They need struct Shared and
// set_up_barriers_of_x of the kernel, which includes this after it has defined them.
#pragma once

#include "common/epilogue.h"
#include "common/quantize.h"
#include "common/scale.h"
#include "moe.h"
#include "sm90/f16_factors.h"
#include "sm90/memory.h"
#include "sm90/tma.h"
#include "sm90/wgmma.h"
#include "wgmma_sm90.h"

namespace mx {

// By all threads.
MX_DEVICE void set_up_barriers(Shared& shared) {
    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < kDepth; ++i)
            for (int group = 0; group < kGroups; ++group) {
                barrier_init(shared_address(shared.full[group] + i), kFp8 ? 1 : 2); // and factors
                barrier_init(shared_address(shared.empty[group] + i), kGroupWarps);
            }
        set_up_barriers_of_x(shared);
#pragma unroll
        for (int i = 0; i < kEntries; ++i) {
            barrier_init(shared_address(shared.opened + i), 1);
            barrier_init(shared_address(shared.closed + i), kAddWarps);
        }
        fence_barrier_init();
    }
    group_barrier();
}

// Waits until the queue's entry of this turn is there; false after the last.
MX_DEVICE bool has_entry(const Shared& shared, const PipelineState<kEntries>& turn) {
    barrier_wait(shared_address(shared.opened + turn.at), turn.parity);
    return shared.queue[turn.at].expert >= 0;
}

// Scales of four chunks of a row: 16 bytes, or words where these begin at no multiple of 16.
MX_DEVICE void load_scales(unsigned (&words)[kVectorChunks], const unsigned char* from) {
    if (__builtin_expect(reinterpret_cast<unsigned long>(from) % 16 == 0, true)) {
        const u32x4 v = load(from);
#pragma unroll
        for (int i = 0; i < kVectorChunks; ++i)
            words[i] = v[i];
        return;
    }
#pragma unroll
    for (int i = 0; i < kVectorChunks; ++i)
        words[i] = load_word(from + i * kBlocks);
}

// Rows are held relative to their largest scale, or to the nearest of these, so that the powers of
// two of a row of x and one of w are a float, and a row of zeros needs nothing more. Of a row
// beyond the last nothing is held.
constexpr unsigned kFirstTop = 74, kLastTop = 194, kNoTop = 512;
MX_DEVICE unsigned top_to_use(unsigned top) {
    return top > kLastTop ? kNoTop : max(top, kFirstTop);
}
// What a row's sums are to be multiplied with, and the exponent of that float.
MX_DEVICE unsigned exponent_of(unsigned top) {
    return top == kNoTop ? 127 : top + 15 - kTopExponent;
}
MX_DEVICE float power_of(unsigned top) { return bits_to_float(exponent_of(top) << 23); }
// Those of four blocks.
MX_DEVICE unsigned factors_of(unsigned scales, unsigned top) {
    constexpr unsigned each = 0x01010101;
    const unsigned below = top * each - scales; // where it is right, no byte borrows
    const unsigned nan = ((scales & 0x7f * each) + each) & scales;
    const unsigned far = (below + (128 - kTopExponent) * each) | below | nan;
    if (__builtin_expect(!(far & 0x80 * each) && top != kNoTop, true))
        return (kTopExponent * each - below) << 2;
    unsigned factors = 0;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b)
        factors |= factor_byte(scales >> 8 * b & 255, top) << 8 * b;
    return factors;
}

// The largest of some scales that are numbers.
struct Largest {
    unsigned even = 0, odd = 0; // one more than the largest, of two bytes each

    MX_MEMBER void take(unsigned scales) {
        constexpr unsigned bytes = 0x00ff00ff, one = 0x00010001;
        even = __vmaxu2(even, ((scales & bytes) + one) & bytes); // kNanScale becomes 0
        odd = __vmaxu2(odd, ((scales >> 8 & bytes) + one) & bytes);
    }
    // Of so many neighbouring lanes, in all of them.
    template <int Lanes = 1>
    MX_MEMBER unsigned top() const {
        unsigned both = __vmaxu2(even, odd);
#pragma unroll
        for (int distance = 1; distance < Lanes; distance *= 2)
            both = __vmaxu2(both, __shfl_xor_sync(~0u, both, distance));
        return top_to_use(max(max(both & 0xffff, both >> 16), 1u) - 1);
    }
};

// Fills the queue: entries are the pieces of the routing with the tiles of w that are this
// workgroup's.
struct Opener {
    const MoeArgs& a;
    Shared& shared;
    const int lane;
    Walk walk;
    PipelineState<kEntries> turn;
    int given = 0, rows = 0;           // columns of the walk's rows, in the queue and all
    unsigned pieces = 0;               // where x is resident
    unsigned long first = 0, last = 0; // items of the last part, there
    bool in_parts;                     // not whole pieces
    unsigned items = 0;                // opened

    // Where x is resident, a workgroup has successive tiles. As long as there is a piece for each
    // workgroup, each takes a whole one: blocks of one expert are then under way at the same time,
    // and read its weights from memory but once. Tiles of the pieces that are left over are shared.
    MX_MEMBER Opener(const MoeArgs& a, Shared& shared, int lane)
        : a(a), shared(shared), lane(lane), walk(a, tiles_of(a), lane, !kResident),
          in_parts(!kResident) {
        if constexpr (kResident) {
            walk.padded = *a.padded;
            pieces = blocks() * walk.pieces_of_block();
            walk.next_piece = blockIdx.x;
            walk.next_tile = 0;
            walk.step_pieces = gridDim.x;
            walk.step_tiles = 0;
            walk.end_piece = pieces / gridDim.x * gridDim.x;
            if (walk.end_piece == 0)
                begin_parts();
            else
                walk.look_ahead();
        }
    }
    // About what a piece takes: for each tile of w, and for rows of x besides.
    MX_MEMBER unsigned cost_of(unsigned piece) const {
        constexpr unsigned unit = 64, of_tile = 32 * unit; // measured for K = 768
        int first_id;
        const unsigned block = walk.block_of(piece, first_id);
        const int* const ids = a.ids + block * static_cast<long>(a.block_m) + first_id;
        const int count = min(a.block_m - first_id, Walk::kPiece);
        unsigned cost = of_tile;
#pragma unroll
        for (int m = 0; m < Walk::kPiece; m += 8)
            if (m < count && routed_row(ids[m], a.num_valid, a.packed_top_k) >= 0)
                cost += unit + (m > 0 && m % kCols == 0 ? of_tile : 0);
        return cost;
    }
    MX_MEMBER void begin_parts() {
        in_parts = true;
        const PieceShares shares(lane, walk.end_piece, pieces, walk.tiles,
                                 [&](unsigned piece) { return cost_of(piece); });
        const unsigned long start = walk.end_piece * static_cast<unsigned long>(walk.tiles);
        first = start + shares.first();
        last = start + shares.last();
        walk.next_piece = first / walk.tiles;
        walk.step_pieces = 1;
        walk.end_piece = first == last ? 0 : (last + walk.tiles - 1) / walk.tiles;
        walk.look_ahead();
    }
    // Of the open piece.
    MX_MEMBER unsigned first_tile() const {
        if (!kResident)
            return walk.tile;
        const unsigned long start = (walk.next_piece - 1) * static_cast<unsigned long>(walk.tiles);
        return in_parts ? max(first, start) - start : 0;
    }
    MX_MEMBER unsigned end_tile() const {
        if (!kResident)
            return walk.tile + 1;
        const unsigned long start = (walk.next_piece - 1) * static_cast<unsigned long>(walk.tiles);
        return in_parts ? min(last, start + walk.tiles) - start : walk.tiles;
    }
    // The walk's next rows, if there are any.
    MX_MEMBER bool next() {
        const auto absent = [&] {
            const unsigned end = end_tile();
            for (unsigned tile = first_tile(); tile < end; ++tile) {
                walk.tile = tile;
                store_zeros<Out, kFeatures, kActivated>(a, walk, 0, 1);
            }
        };
        return walk.next(absent, true, [&] {
            if constexpr (kSharesLast)
                share_last_round();
        });
    }
    // Once the next item would be of the round that is not whole, finds the workgroup's, if any.
    MX_MEMBER void share_last_round() {
        const LastRound last(blocks() * walk.pieces_of_block(), walk.tiles);
        if (++items != last.rounds || !last.is_shared())
            return;
        const unsigned item = last.item(lane, [&](unsigned piece) { return col_tiles_of(piece); });
        constexpr unsigned beyond = 1u << 30; // all pieces
        walk.next_piece = item == LastRound::kNone ? beyond : item / walk.tiles;
        walk.next_tile = item == LastRound::kNone ? 0 : item % walk.tiles;
    }
    MX_MEMBER unsigned blocks() const {
        return min((walk.padded + a.block_m - 1) / a.block_m, a.max_blocks);
    }
    // Of a piece, 8 rows of x each, if its ids come first.
    MX_MEMBER unsigned col_tiles_of(unsigned piece) const {
        int first_id;
        const unsigned block = walk.block_of(piece, first_id);
        const int* const ids = a.ids + block * static_cast<long>(a.block_m) + first_id;
        const int count = min(a.block_m - first_id, Walk::kPiece);
        unsigned found = 0;
#pragma unroll
        for (int m = 0; m < Walk::kPiece; m += 8)
            found += m < count && routed_row(ids[m], a.num_valid, a.packed_top_k) >= 0;
        return found;
    }
    // Returns whether there is one more.
    MX_MEMBER bool open() {
        barrier_wait(shared_address(shared.closed + turn.at), turn.parity ^ 1);
        Entry& to = shared.queue[turn.at];
        bool more = given < rows;
        if (!more) {
            more = next();
            if (!more && !in_parts) {
                begin_parts();
                more = next();
            }
            given = 0;
            rows = walk.col_tiles() * 8;
        }
        if (more)
#pragma unroll
            for (int i = 0; i < (kCols + kLanes - 1) / kLanes; ++i) {
                const int m = i * kLanes + lane;
                const int row = walk.row(given + m);
                if (m < kCols) {
                    const bool valid = given + m < rows && row >= 0;
                    to.t[m] = valid ? row : -1;
                    to.x_row[m] = valid ? row / a.a_div : -1;
                    to.x_outside[m] = 0;
                    to.weights[m] =
                        valid && a.weights != nullptr ? *walk.weight(given + m, row) : 1.0f;
                }
            }
        if (lane == 0) {
            to.expert = more ? walk.expert : -1;
            to.tile = more ? first_tile() : 0;
            to.end = more ? end_tile() : 0;
            to.col_tiles = min(kColTiles, (rows - given) / 8);
            to.any_x_outside = 0;
        }
        given += kCols;
        barrier_arrive_warp(shared_address(shared.opened + turn.at), lane);
        turn.next();
        return more;
    }
};

// Fills the queue as far as there is room. One warp.
MX_DEVICE void open_entries(const MoeArgs& a, Shared& shared, int lane) {
    if (!kEarlyRouting)
        wait_for_grid_ahead();
    Opener opener(a, shared, lane);
    while (opener.open())
        ;
}

// Starts TMA copies of weights. A lane of one warp serves each warpgroup that adds: these run at
// their own pace, so that the warp must not wait for one of them alone.
MX_DEVICE void copy_weights(const MoeArgs& a, Shared& shared, const TensorMap& map, int lane) {
    const int group = min(lane, kGroups - 1), chunks = a.chunks();
    bool done = lane >= kGroups;
    int left = 0, chunk = 0, t = 0, row = 0; // stages of the entry; the next one's place
    PipelineState<kEntries> turn;
    PipelineState<kDepth> to;
    if (lane == 0)
        prefetch_map(map);
    while (__any_sync(~0u, !done)) {
        bool asked = false;
        if (!done && left == 0 &&
            barrier_test(shared_address(shared.opened + turn.at), turn.parity)) {
            const Entry& entry = shared.queue[turn.at];
            turn.next();
            done = entry.expert < 0;
            left = static_cast<int>(entry.end - entry.tile) * chunks * kTiles;
            row = entry.expert * static_cast<int>(a.N) +
                  static_cast<int>(entry.tile * kParts + group * kTiles) * kBoxRows;
        }
        if (!done && left > 0 &&
            barrier_test(shared_address(shared.empty[group] + to.at), to.parity ^ 1)) {
            const unsigned full = shared_address(shared.full[group] + to.at);
            barrier_arrive_expect(full, kStageBytes);
            const unsigned stage = shared_address(shared.ring[group][to.at]);
            tma_load(stage, map, chunk * kChunk, row + t * kBoxRows, full);
            if constexpr (kHalves)
                tma_load(stage + kStageBytes / 2, map, chunk * kChunk,
                         row + t * kBoxRows + static_cast<int>(a.N) / 2, full);
            to.next();
            --left;
            if (++t == kTiles) {
                t = 0;
                ++chunk;
            }
            if (chunk == chunks) {
                chunk = 0;
                row += kParts * kBoxRows;
            }
            asked = true;
        }
        if (!__any_sync(~0u, asked))
            __nanosleep(kPollNs);
    }
    launch_dependents(); // not before, else what comes next settles unevenly on the SMs
}

// Row `row` of what begins at `first`; of a negative one, anything. Worked out where it is used:
// all rows' places would not fit the registers.
template <class T>
MX_DEVICE T* any_row_at(T* first, int row, unsigned row_bytes) {
    unsigned long place;
    asm volatile("mad.wide.u32 %0, %1, %2, %3;"
                 : "=l"(place)
                 : "r"(row), "r"(row_bytes), "l"(first));
    return reinterpret_cast<T*>(place);
}
// The first row where there is none.
MX_DEVICE const unsigned char* row_at(const unsigned char* first, int row, unsigned row_bytes) {
    return any_row_at(first, max(row, 0), row_bytes);
}

// Starts copies of kScaleChunks words, or of zeros.
MX_DEVICE void copy_scales(unsigned to, const unsigned char* from, bool exists) {
    if (kLongScales && reinterpret_cast<unsigned long>(from) % 16 == 0)
        return copy_async(to, from, exists);
#pragma unroll
    for (int i = 0; i < kScaleChunks; ++i)
        copy_word_async(to + i * 4, from + i * 4, exists ? 4 : 0);
}

// The warps that add end so.

// Makes results of the sums of a part of a tile, of which a lane has two rows in some columns.
struct Finisher {
    const MoeArgs& a;
    const int group, warp, lane; // warp: of the group

    // Applies what the rows are relative to.
    MX_MEMBER void scale_sums(const Entry& entry, const float (&by_w)[2],
                              float (&sums)[kCols / 2]) const {
#pragma unroll
        for (int j = 0; j < kColTiles; ++j) {
            const float2 by_x =
                *reinterpret_cast<const float2*>(entry.x_power + column_of(j, 0, lane));
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                sums[j * 4 + i * 2] *= by_w[i] * by_x.x;
                sums[j * 4 + i * 2 + 1] *= by_w[i] * by_x.y;
            }
        }
    }

    // Computes again what has been left out.
    MX_MEMBER void mend(const Entry& entry, unsigned tile, int part, unsigned outside,
                        float (&sums)[kCols / 2]) const {
        unsigned again = 0; // a bit for each of the two rows, for all lanes of it
#pragma unroll
        for (int i = 0; i < 2; ++i)
            again |= (any_of_row(outside >> i & 1, lane) ? 1u : 0u) << i;
#pragma unroll 1
        for (int at = 0; at < kCols / 2; ++at) {
            const int i = at / 2 % 2, m = column_of(at / 4, at % 2, lane), t = entry.t[m];
            if (t < 0 || !(again >> i & 1 || entry.x_outside[m]))
                continue;
            const Offset x = t / a.a_div, w = entry.expert * static_cast<Offset>(a.N) +
                                              row_of_w(a, tile, part, row_of(warp, lane, i));
            const float value = exact_output(a.xq + x * a.K, a.xs + x * a.blocks(), a.wq + w * a.K,
                                             a.ws + w * a.blocks(), a.K);
#pragma unroll
            for (int n = 0; n < kCols / 2; ++n)
                sums[n] = n == at ? value : sums[n];
        }
    }

    MX_MEMBER void add_bias(const Entry& entry, unsigned tile, int part,
                            float (&sums)[kCols / 2]) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const unsigned row = row_of_w(a, tile, part, row_of(warp, lane, i));
            const float bias =
                load_bias(a.bias, a.bias_kind, entry.expert * static_cast<Offset>(a.N) + row);
#pragma unroll
            for (int j = 0; j < kColTiles; ++j)
#pragma unroll
                for (int c = 0; c < 2; ++c)
                    sums[j * 4 + i * 2 + c] += bias;
        }
    }
    // Which of a lane's two rows comes first, where they are neighbours.
    MX_MEMBER int first_row() const { return kHalves ? 0 : lane / 16; }

    // room: for so many of a lane's two features. Pairs: for both, which are one store.
    template <bool Pairs>
    MX_MEMBER void store_rows(const Entry& entry, Out* out, int room,
                              const float (&sums)[kCols / 2]) const {
        const unsigned row_bytes = static_cast<unsigned>(a.N) * sizeof(Out);
        const bool turned = first_row();
#pragma unroll
        for (int j = 0; j < kColTiles; ++j) {
            if (j >= entry.col_tiles)
                break;
            const int m = column_of(j, 0, lane);
            const int2 rows = *reinterpret_cast<const int2*>(entry.t + m);
            const float2 weights = *reinterpret_cast<const float2*>(entry.weights + m);
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int t = c ? rows.y : rows.x;
                const float weight = c ? weights.y : weights.x;
                const float one = sums[j * 4 + c], other = sums[j * 4 + 2 + c];
                const float first = (turned ? other : one) * weight;
                const float second = (turned ? one : other) * weight;
                Out* const to = reinterpret_cast<Out*>(
                    reinterpret_cast<unsigned char*>(out) +
                    static_cast<Offset>(static_cast<unsigned>(t)) * row_bytes);
                if constexpr (Pairs) {
                    store_pair(to, first, second, t);
                } else {
                    if (t >= 0 && room > 0)
                        store(to, first);
                    if (t >= 0 && room > 1)
                        store(to + 1, second);
                }
            }
        }
    }
    MX_MEMBER void store_plain(const Entry& entry, unsigned tile, int part,
                               const float (&sums)[kCols / 2]) const {
        const long of_part = (tile * static_cast<long>(kParts) + part) * kGroupRows;
        const long first = of_part + warp * 16 + lane / 4 * 2;
        Out* const out = static_cast<Out*>(a.out) + first;
        if (of_part + kGroupRows <= a.N && a.N % 2 == 0 &&
            reinterpret_cast<unsigned long>(a.out) % (2 * sizeof(Out)) == 0)
            store_rows<true>(entry, out, 2, sums);
        else
            store_rows<false>(entry, out, max(0L, min(2L, a.N - first)), sums);
    }

    // A lane has gate and up of one feature; a warpgroup has a block of 32 features. Once all have
    // noted their largest magnitudes a thread finds the scale of each column, in whose place it
    // then leaves what values are to be multiplied with.
    template <int Count>
    MX_MEMBER void store_activated(const Entry& entry, unsigned tile, int part,
                                   float (&sums)[Count],
                                   unsigned (&amaxes)[kGroupWarps][kActivated ? kCols : 2]) const {
        static_assert(kCols <= kGroupThreads, "a thread has the scale of one column");
        const unsigned features = static_cast<unsigned>(a.N) / 2;
        const unsigned of_part = (tile * kParts + part) * kBlock;
        const bool exists = of_part < features; // blocks are whole
#pragma unroll
        for (int j = 0; j < kColTiles; ++j)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const float one = sums[j * 4 + c], other = sums[j * 4 + 2 + c];
                const float value = activate<Count == 0 ? 0 : kActivation>(
                    first_row() ? other : one, first_row() ? one : other, a.activation);
                sums[j * 4 + c] = value;
                note_largest(amaxes, value, column_of(j, c, lane), warp, lane);
            }
        named_barrier(1 + group, kGroupThreads);
        if (const int m = warp * kLanes + lane; m < kCols) {
            const BlockScale scale = block_scale<E4M3, kRoundUp>(largest_of(amaxes, m));
            const int t = entry.t[m];
            amaxes[0][m] = float_to_bits(scale.inverse);
            if (exists && t >= 0)
                *(any_row_at(a.out_scales, t, features / kBlock) + of_part / kBlock) = scale.byte;
        }
        named_barrier(1 + group, kGroupThreads);
        if (!exists)
            return;
        unsigned char* const out =
            static_cast<unsigned char*>(a.out) + (of_part + warp * 8 + lane / 4);
        unsigned words[kColTiles]; // of two columns
        int2 rows[kColTiles];
#pragma unroll
        for (int j = 0; j < kColTiles; ++j) {
            const int m = column_of(j, 0, lane);
            rows[j] = *reinterpret_cast<const int2*>(entry.t + m);
            const uint2 by = *reinterpret_cast<const uint2*>(amaxes[0] + m);
            words[j] = f32_to_e4m3x4<false>(
                {sums[j * 4] * bits_to_float(by.x), sums[j * 4 + 1] * bits_to_float(by.y)}, {},
                false);
        }
#pragma unroll
        for (int j = 0; j < kColTiles; ++j) {
            store_byte(any_row_at(out, rows[j].x, features), words[j], rows[j].x);
            store_byte(any_row_at(out, rows[j].y, features), words[j] >> 8, rows[j].y);
        }
    }
    // Stores the lowest byte if `exists` is not negative.
    MX_MEMBER static void store_byte(unsigned char* to, unsigned byte, int exists) {
        asm volatile("{\n"
                     ".reg .pred p;\n"
                     "setp.ge.s32 p, %2, 0;\n"
                     "@p st.global.u8 [%0], %1;\n"
                     "}" ::"l"(to),
                     "r"(byte), "r"(exists));
    }

    // by_w: what the lane's two rows' sums are to be multiplied with. outside: a bit for each of
    // the two: whether its scales are too far apart, as far as the lane sees it.
    MX_MEMBER void run(const Entry& entry, unsigned tile, int part, const float (&by_w)[2],
                       unsigned outside, float (&sums)[kCols / 2],
                       unsigned (&amaxes)[kGroupWarps][kActivated ? kCols : 2]) const {
        scale_sums(entry, by_w, sums);
        run_scaled(entry, tile, part, outside, sums, amaxes);
    }
    // The same for sums that are not relative to anything.
    MX_MEMBER void run_scaled(const Entry& entry, unsigned tile, int part, unsigned outside,
                              float (&sums)[kCols / 2],
                              unsigned (&amaxes)[kGroupWarps][kActivated ? kCols : 2]) const {
        if (__builtin_expect(__any_sync(~0u, outside | entry.any_x_outside), false))
            mend(entry, tile, part, outside, sums);
        if (a.bias_kind != kNone)
            add_bias(entry, tile, part, sums);
        if constexpr (kActivated)
            store_activated(entry, tile, part, sums, amaxes);
        else
            store_plain(entry, tile, part, sums);
    }
};

} // namespace mx
