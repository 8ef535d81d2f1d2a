// Grouped GEMM over routed tokens on Hopper, for some tens of tokens an expert.
// aiter_mx/kernels/moe_gemm/problem.py defines what it computes and its arguments.
//
// A workgroup takes kRows rows of an expert's w and up to kCols rows of x, those of a block of ids,
// and goes along K. Both become fp16 with their scales applied, relative to the largest of the row,
// so that sums over all of K stay in the matrix unit and take both rows' largest scales at its end:
//
//   w  -> a ring in shared memory for each warpgroup that adds, by TMA, 128 k at a time ->
//   registers
//      -> fp16, wgmma's A
//   x  -> shared memory, kAhead chunks ahead -> fp16, by a warpgroup of its own -> shared memory:
//      wgmma's B. Where there is room for all of K it stays there from tile to tile.
//
// A row whose scales are too far apart for fp16, zero blocks aside, is computed again in fp32.

#include "wgmma_sm90.h"

namespace mx {

struct Shared {
    unsigned char ring[kGroups][kDepth][kStageBytes];
    unsigned char x[kSlots][kPieces * kStepBytes];
    unsigned char fetched[kAhead][kCols][kChunk]; // x, as it is
    alignas(16) unsigned fetched_scales[kScalePlaces][kCols][kScaleChunks];
    // Of a row of w: bytes of factors, and its power of two.
    uint2 factors[kGroups][kDepth][kGroupRows];
    Entry queue[kEntries];
    unsigned amax[2][kGroups][kGroupWarps][kActivated ? kCols : 2];   // of a warp's features
    unsigned long long full[kGroups][kDepth], empty[kGroups][kDepth]; // barriers of w
    unsigned long long arrived[kAhead], drained[kAhead];              // of x as fetched
    unsigned long long ready[kSlots], taken[kSlots];                  // of x
    unsigned long long opened[kEntries], closed[kEntries];            // of the queue
};
static_assert(
    sizeof(Shared) <= MX_SHARED_BYTES,
    "the host gives too little shared memory: aiter_mx/kernels/moe_gemm/wgmma_f16_sm90.py");

MX_DEVICE void set_up_barriers_of_x(Shared& shared) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
        barrier_init(shared_address(shared.arrived + i), kFetchWarps * kLanes);
        barrier_init(shared_address(shared.drained + i), kGroupWarps);
    }
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
        barrier_init(shared_address(shared.ready + i), kGroupWarps);
        barrier_init(shared_address(shared.taken + i), kAddWarps);
    }
}

} // namespace mx

#include "sm90/memory.h"
#include "sm90/mma.h"
#include "wgmma_roles_sm90.h"

using namespace mx;

// Some warps bring x and make it fp16, as wgmma takes it: 8x16-byte pieces of 8 rows by the lower,
// then the upper halves of the words of 16 k.

// For how many chunks x of an entry comes.
MX_DEVICE int chunks_of(const MoeArgs& a, const Entry& entry) {
    return kResident ? a.chunks() : static_cast<int>(entry.end - entry.tile) * a.chunks();
}

// Starts copies of x. Other warps do so than those that make x fp16, whose fences would wait for
// them.
MX_DEVICE void fetch_x(const MoeArgs& a, Shared& shared, int warp, int lane) {
    wait_for_grid_ahead(); // which made x
    const int piece = lane % kPieces;
    constexpr int rows_at_once = kFetchWarps * kLanes / kPieces;
    constexpr int batches = (kCols + rows_at_once - 1) / rows_at_once;
    const int first_row = (warp * kLanes + lane) / kPieces, first_scale = warp * kLanes + lane;
    constexpr int lanes = kFetchWarps * kLanes, scale_rows = (kCols + lanes - 1) / lanes;
    PipelineState<kEntries> turn;
    PipelineState<kAhead> to;
    PipelineState<kScalePlaces> scales_to;
    for (; has_entry(shared, turn); turn.next()) {
        const Entry& entry = shared.queue[turn.at];
        const int rows = (entry.col_tiles + 1) / 2 * 16, chunks = a.chunks();
        int row[batches]; // of x, or -1: looked up once, not for each chunk
#pragma unroll
        for (int i = 0; i < batches; ++i)
            row[i] = i * rows_at_once + first_row < rows ? entry.x_row[i * rows_at_once + first_row]
                                                         : -1;
        int scale_row[scale_rows];
#pragma unroll
        for (int i = 0; i < scale_rows; ++i)
            scale_row[i] =
                i * lanes + first_scale < rows ? entry.x_row[i * lanes + first_scale] : -1;
        int chunk = 0;
        for (int left = chunks_of(a, entry); left > 0; --left, to.next()) {
            barrier_wait(shared_address(shared.drained + to.at), to.parity ^ 1);
            const unsigned place = shared_address(shared.fetched[to.at][first_row]) + piece * 16;
            const unsigned char* const x = a.xq + chunk * kChunk + piece * 16;
#pragma unroll
            for (int i = 0; i < batches; ++i)
                if (i * rows_at_once + first_row < rows)
                    copy_async(place + i * rows_at_once * kChunk, row_at(x, row[i], a.K),
                               row[i] >= 0);
            if (chunk % kScaleChunks == 0) {
#pragma unroll
                for (int i = 0; i < scale_rows; ++i)
                    if (const int to_row = i * lanes + first_scale; to_row < rows)
                        copy_scales(shared_address(shared.fetched_scales[scales_to.at][to_row]),
                                    row_at(a.xs + chunk * kBlocks, scale_row[i], a.K / kBlock),
                                    scale_row[i] >= 0);
                scales_to.next();
            }
            barrier_arrive_copied(shared_address(shared.arrived + to.at));
            if (++chunk == chunks)
                chunk = 0;
        }
    }
    copy_wait<0>(); // copies must not outlive the warp
}

// A thread has 16 k of a chunk of every 16th row. A warp has 4 adjacent ones of each 16, and of
// these lane 4 * pass + i has the scales of the one that is i-th.
struct Bringer {
    const MoeArgs& a;
    Shared& shared;
    const int thread; // of these

    static_assert(kPasses * 4 <= kLanes, "a lane has scales of one row");

    MX_MEMBER int piece() const { return thread % kPieces; }
    MX_MEMBER int column(int pass) const { return pass * 16 + thread / kPieces; }
    // Whose scales the lane has.
    MX_MEMBER int scaled_column() const {
        const int lane = thread % kLanes;
        return min(lane / 4, kPasses - 1) * 16 + thread / kLanes * 4 + lane % 4;
    }

    static constexpr int kTopRows = kPasses < 3 ? kPasses : 3, kTopWords = 6; // loads at once
    // Finds the largest scale of each row.
    MX_MEMBER void find_tops(Entry& entry) const {
        const int chunks = a.chunks(), passes = (entry.col_tiles + 1) / 2;
#pragma unroll 1
        for (int first = 0; first < passes; first += kTopRows) {
            Largest largest[kTopRows];
            const unsigned char* scales[kTopRows];
            bool exists[kTopRows];
#pragma unroll
            for (int i = 0; i < kTopRows; ++i) {
                const int row = first + i < passes ? entry.x_row[column(first + i)] : -1;
                exists[i] = row >= 0;
                scales[i] = row_at(a.xs, row, a.K / kBlock);
            }
#pragma unroll 1
            for (int c = piece(); c < chunks; c += kTopWords * kPieces) {
                unsigned words[kTopWords][kTopRows];
#pragma unroll
                for (int n = 0; n < kTopWords; ++n)
#pragma unroll
                    for (int i = 0; i < kTopRows; ++i) {
                        const int at = c + n * kPieces;
                        words[n][i] = 0;
                        if (exists[i] && at < chunks)
                            words[n][i] = load_word(scales[i] + at * kBlocks);
                    }
#pragma unroll
                for (int n = 0; n < kTopWords; ++n)
#pragma unroll
                    for (int i = 0; i < kTopRows; ++i)
                        largest[i].take(words[n][i]);
            }
#pragma unroll
            for (int i = 0; i < kTopRows; ++i) {
                const unsigned top = largest[i].top<kPieces>();
                const int m = column(first + i);
                if (piece() == 0 && first + i < passes) {
                    entry.x_top[m] = top;
                    entry.x_power[m] = power_of(top);
                }
            }
        }
        __syncwarp();
    }

    static constexpr int kBatch = 3; // passes at once
    // factors: of the row whose scales the lane has.
    MX_MEMBER void expand_batch(int from, int first, int passes, unsigned slot,
                                unsigned factors) const {
        const int b = piece() / 2, row = thread % kLanes / kPieces; // a block; of 4
        u32x4 v[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int m = column(min(first + i, kPasses - 1));
            v[i] = load_shared_16(shared_address(shared.fetched[from][m] + piece() * 16));
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int m = column(first + i);
            const unsigned of_row = __shfl_sync(~0u, factors, (first + i) * 4 + row);
            const unsigned factor = __byte_perm(of_row, 0, 0x0404 | b << 4 | b << 12);
            if (first + i >= passes)
                continue;
            store_f16_times(slot + m * 16, kCols * 16, v[i], factor);
        }
    }

    // Notes rows of blocks that fp16 takes for zero, though they are not.
    MX_MEMBER void look_for_lost(Entry& entry, int from, int passes, unsigned factors) const {
#pragma unroll 1
        for (int pass = 0; pass < passes; ++pass) {
            const int m = column(pass);
            const u32x4 v = load_shared_16(shared_address(shared.fetched[from][m] + piece() * 16));
            const unsigned of_row = __shfl_sync(~0u, factors, pass * 4 + thread % kLanes / kPieces);
            if ((of_row >> piece() / 2 * 8 & 255) == 0 && (v[0] | v[1] | v[2] | v[3]) & 0x7f7f7f7f)
                entry.x_outside[m] = entry.any_x_outside = 1;
        }
    }

    MX_MEMBER void run() const {
        wait_for_grid_ahead(); // which made x
        PipelineState<kEntries> turn;
        PipelineState<kAhead> from;
        PipelineState<kScalePlaces> scales_from;
        PipelineState<kScaleChunks> word; // of these
        PipelineState<kSlots> to;
        for (; has_entry(shared, turn); turn.next()) {
            Entry& entry = shared.queue[turn.at];
            const int passes = (entry.col_tiles + 1) / 2, own = scaled_column();
            find_tops(entry);
            const bool exists = own < passes * 16 && entry.x_row[own] >= 0;
            const unsigned top = exists ? entry.x_top[own] : kFirstTop;
            for (int left = chunks_of(a, entry); left > 0; --left, from.next(), to.next()) {
                barrier_wait(shared_address(shared.arrived + from.at), from.parity);
                unsigned scales = kFirstTop * 0x01010101;
                if (exists)
                    scales = load_shared_4(
                        shared_address(&shared.fetched_scales[scales_from.at][own][word.at]));
                const unsigned factors = factors_of(scales, top);
                const bool any_zero = __any_sync(~0u, zero_bytes(factors) != 0);
                barrier_wait(shared_address(shared.taken + to.at), to.parity ^ 1);
                const unsigned slot = shared_address(shared.x[to.at]) + piece() * kStepBytes;
#pragma unroll
                for (int first = 0; first < kPasses; first += kBatch) {
                    if (first >= passes)
                        break;
                    expand_batch(from.at, first, passes, slot, factors);
                }
                if (__builtin_expect(any_zero, false))
                    look_for_lost(entry, from.at, passes, factors);
                fence_async();
                __syncwarp();
                word.next();
                if (word.at == 0)
                    scales_from.next();
                if (thread % kLanes == 0) {
                    barrier_arrive(shared_address(shared.drained + from.at));
                    barrier_arrive(shared_address(shared.ready + to.at));
                }
            }
        }
    }
};

// Each warp has its role.

// Adder is the kernel's own; Scaler, one warp for each warpgroup that adds, makes factors of w's
// scales.
template <class Adder, class Scaler, class Places>
MX_DEVICE void take_roles(const MoeArgs& a, Places& shared, const TensorMap& weights_map) {
    const int lane = threadIdx.x % kLanes, warp = warp_uniform(threadIdx.x / kLanes);
    set_up_barriers(shared);
    if (warp < kAddWarps) {
        increase_registers<kAddingRegisters>();
        Adder(a, shared, warp / kGroupWarps, warp % kGroupWarps, lane).run();
    } else {
        decrease_registers<kBringingRegisters>();
        const int role = warp - kAddWarps;
        if (role < kGroupWarps)
            Bringer{a, shared, role * kLanes + lane}.run();
        else if (role < kGroupWarps + kGroups)
            Scaler{a, shared, role - kGroupWarps, lane}.run();
        else if (role == 2 * kGroupWarps - 1)
            open_entries(a, shared, lane);
        else if (role >= 2 * kGroupWarps && role < 2 * kGroupWarps + kFetchWarps)
            fetch_x(a, shared, role - 2 * kGroupWarps, lane);
        else if (role == 2 * kGroupWarps + kFetchWarps)
            copy_weights(a, shared, weights_map, lane);
    }
}

#if MX_TILES == 1

// A warp for each warpgroup that adds makes factors of w's scales.

// Makes factors of scales of w: relative to the row's largest, which is found while the tile before
// is under way. A warp for each warpgroup that adds, whose lanes have a row every kLanes.
struct Scaler {
    static constexpr int kOwned = kGroupRows / kLanes, kBatch = 2; // rows, chunks
    const MoeArgs& a;
    Shared& shared;
    const int group, lane;

    using Words = unsigned[kOwned][kBatch];
    MX_MEMBER static void load(Words& words, const unsigned char* const (&from)[kOwned], int c,
                               int chunks) {
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
#pragma unroll
            for (int r = 0; r < kOwned; ++r) {
                words[r][i] = 0;
                if (c + i < chunks)
                    words[r][i] = load_word(from[r] + (c + i) * kBlocks);
            }
    }
    MX_MEMBER void locate(const unsigned char* (&rows)[kOwned], int expert, unsigned tile) const {
#pragma unroll
        for (int r = 0; r < kOwned; ++r) {
            const unsigned row = row_of_w(a, tile, group, lane + r * kLanes);
            rows[r] = a.ws + (expert * static_cast<Offset>(a.N) + row) * a.blocks();
        }
    }
    // The largest scales of the first tile, which waits for all of them: they are asked for at
    // once, and loaded many at a time.
    MX_MEMBER static void begin(Largest (&largest)[kOwned],
                                const unsigned char* const (&from)[kOwned], int chunks) {
#pragma unroll 1
        for (int c = 0; c < chunks; c += 32 / kBlocks) // of a sector
#pragma unroll
            for (int r = 0; r < kOwned; ++r)
                prefetch_l2(from[r] + c * kBlocks);
        constexpr int vectors = 3; // at once
        const int whole = chunks / kVectorChunks * kVectorChunks;
#pragma unroll 1
        for (int c = 0; c < whole; c += vectors * kVectorChunks) {
            unsigned some[kOwned][vectors][kVectorChunks] = {};
#pragma unroll
            for (int r = 0; r < kOwned; ++r)
#pragma unroll
                for (int i = 0; i < vectors; ++i)
                    if (c + i * kVectorChunks < whole)
                        load_scales(some[r][i], from[r] + (c + i * kVectorChunks) * kBlocks);
#pragma unroll
            for (int r = 0; r < kOwned; ++r)
#pragma unroll
                for (int i = 0; i < vectors; ++i)
#pragma unroll
                    for (unsigned word : some[r][i])
                        largest[r].take(word);
        }
        for (int c = whole; c < chunks; ++c)
#pragma unroll
            for (int r = 0; r < kOwned; ++r)
                largest[r].take(load_word(from[r] + c * kBlocks));
    }
    MX_MEMBER void run() const {
        const int chunks = a.chunks();
        PipelineState<kEntries> turn;
        PipelineState<kDepth> to;
        barrier_wait(shared_address(shared.opened + turn.at), turn.parity);
        int expert = shared.queue[turn.at].expert;
        unsigned tile = shared.queue[turn.at].tile, end = shared.queue[turn.at].end;
        if (expert < 0)
            return;
        const unsigned char *rows[kOwned], *next[kOwned];
        Words words;
        unsigned top[kOwned];
        locate(rows, expert, tile);
        Largest largest[kOwned];
        begin(largest, rows, chunks);
        while (expert >= 0) {
#pragma unroll
            for (int r = 0; r < kOwned; ++r) {
                top[r] = largest[r].top();
                largest[r] = {};
            }
            load(words, rows, 0, chunks);
            if (++tile == end) {
                turn.next();
                barrier_wait(shared_address(shared.opened + turn.at), turn.parity);
                expert = shared.queue[turn.at].expert;
                tile = shared.queue[turn.at].tile;
                end = shared.queue[turn.at].end;
            }
            locate(next, max(expert, 0), tile);
            for (int c = 0; c < chunks; c += kBatch) {
                Words later, ahead;
                load(later, rows, c + kBatch, chunks);
                load(ahead, next, c, expert < 0 ? 0 : chunks);
#pragma unroll
                for (int i = 0; i < kBatch; ++i) {
                    if (c + i >= chunks)
                        break;
                    barrier_wait(shared_address(shared.empty[group] + to.at), to.parity ^ 1);
#pragma unroll
                    for (int r = 0; r < kOwned; ++r)
                        shared.factors[group][to.at][lane + r * kLanes] = uint2{
                            factors_of(words[r][i], top[r]), __float_as_uint(power_of(top[r]))};
                    barrier_arrive_warp(shared_address(shared.full[group] + to.at), lane);
                    to.next();
                }
#pragma unroll
                for (int r = 0; r < kOwned; ++r)
#pragma unroll
                    for (int i = 0; i < kBatch; ++i) {
                        largest[r].take(ahead[r][i]);
                        words[r][i] = later[r][i];
                    }
            }
#pragma unroll
            for (int r = 0; r < kOwned; ++r)
                rows[r] = next[r];
        }
    }
};

// A warpgroup that adds has one tile of 64 rows of w.

constexpr int kSteps = 4; // matrix instructions of a unit, of 64 k

// Adds tiles and stores what they come to.
struct Adder {
    const MoeArgs& a;
    Shared& shared;
    const int group, warp, lane; // warp: of the group
    const unsigned base;         // of its ring
    unsigned place[2];           // in a stage: of what the lane gives ldmatrix the address of
    PipelineState<kDepth> ring;
    PipelineState<kSlots> from;
    unsigned words[2][4], scale[2];
    float by_w[2];
    unsigned outside[2]; // whether a row of w has scales too far apart, as far as the lane sees it

    MX_MEMBER Adder(const MoeArgs& a, Shared& shared, int group, int warp, int lane)
        : a(a), shared(shared), group(group), warp(warp), lane(lane),
          base(held(shared_address(shared.ring[group][0]))) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = row_of(warp, lane % 8 * 4, i);
            place[i] = held(swizzled_128(0, row, lane / 8));
        }
    }
    MX_MEMBER void fetch(int u) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
            load_matrices(words[i], base + ring.at * kStageBytes + (place[i] ^ u * 64));
    }
    // Notes rows of blocks that fp16 takes for zero, though they are not.
    MX_MEMBER void look_for_lost() {
#pragma unroll 1
        for (int at = 0; at < 4; ++at) {
            const int row = row_of(warp, lane, at % 2), piece = lane % 4 * 2 + at / 2;
            const u32x4 v = load_shared_16(swizzled_128(base + ring.at * kStageBytes, row, piece));
            const unsigned byte = (at % 2 ? scale[1] : scale[0]) >> lane % 4 * 8 & 255;
            const bool lost = byte == 0 && (v[0] | v[1] | v[2] | v[3]) & 0x7f7f7f7f;
            outside[0] |= lost && at % 2 == 0;
            outside[1] |= lost && at % 2;
        }
    }
    MX_MEMBER void open() {
        barrier_wait(shared_address(shared.full[group] + ring.at), ring.parity);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint2 both = load_shared_8(
                shared_address(&shared.factors[group][ring.at][row_of(warp, lane, i)]));
            scale[i] = both.x;
            by_w[i] = __uint_as_float(both.y);
        }
        fetch(0);
        if (__builtin_expect((zero_bytes(scale[0]) | zero_bytes(scale[1])) != 0, false))
            look_for_lost();
    }
    MX_MEMBER void close() {
        barrier_arrive_warp(shared_address(shared.empty[group] + ring.at), lane);
        ring.next();
    }
    MX_MEMBER void expand(unsigned (&to)[kSteps][4], int u) const {
#pragma unroll
        for (int j = 0; j < kSteps; ++j) {
#pragma unroll
            for (int i = 0; i < 2; ++i)
                e4m3x4_to_f16_times(words[i][j], factor_of_block(scale[i], u * 2 + j / 2), to[j][i],
                                    to[j][2 + i]);
        }
    }
    MX_MEMBER void take(int slot) const {
        if (lane == 0)
            barrier_arrive(shared_address(shared.taken + slot));
    }
    // Multiplies as many columns as the least of these widths that holds them.
    template <int Width, int... Narrower>
    MX_MEMBER static void multiply(float (&sums)[kCols / 2], const unsigned (&w)[kSteps][4],
                                   const MatrixDescriptor& x, int columns) {
        if constexpr (sizeof...(Narrower) > 0) {
            constexpr int widths[] = {Narrower...};
            if (Width > kCols || columns <= widths[0])
                return multiply<Narrower...>(sums, w, x, columns);
        }
        if constexpr (Width <= kCols)
            multiply_by<Width>(sums, w, x);
    }
    template <int Width>
    MX_MEMBER static void multiply_by(float (&sums)[kCols / 2], const unsigned (&w)[kSteps][4],
                                      const MatrixDescriptor& x) {
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < kSteps; ++j)
            wgmma_f16_first<Width>(sums, w[j], x.at(j * kStepBytes));
        wgmma_commit();
    }
    // frees: whether x is not needed again.
    MX_MEMBER void add(float (&sums)[kCols / 2], int columns, bool frees) {
        unsigned operand[2][kSteps][4];
        const int chunks = a.chunks();
        int before = 0; // the slot of the chunk before
        outside[0] = outside[1] = 0;
        open();
#pragma unroll 1
        for (int c = 0; c < chunks; ++c) {
#pragma unroll
            for (int u = 0; u < 2; ++u) {
                expand(operand[u], u);
                if (u == 0)
                    barrier_wait(shared_address(shared.ready + from.at), from.parity);
                const MatrixDescriptor x(
                    shared_address(shared.x[from.at]) + u * kSteps * kStepBytes, kCols * 16, 128);
                multiply<128, 112, 96, 88, 80, 72, 64, 56, 48, 40, 32, 24, 16>(sums, operand[u], x,
                                                                               columns);
                if (u == 0) {
                    fetch(1);
                } else {
                    close();
                    if (c + 1 < chunks)
                        open();
                }
                wgmma_wait<1>();
                if (u == 0 && c > 0 && frees)
                    take(before);
            }
            before = from.at;
            if (kResident && !frees)
                from.at = from.at + 1 == kSlots ? 0 : from.at + 1; // the same once more
            else
                from.next();
        }
        wgmma_wait<0>();
        keep_in_order(sums);
        if (frees)
            take(before);
    }

    MX_MEMBER void run() {
        PipelineState<kEntries> turn;
        for (int amax_turn = 0;; turn.next()) {
            const Entry& entry = shared.queue[turn.at];
            if (!has_entry(shared, turn))
                break;
            for (unsigned tile = entry.tile; tile < entry.end; ++tile, amax_turn ^= 1) {
                float sums[kCols / 2] = {};
                add(sums, entry.col_tiles * 8, !kResident || tile + 1 == entry.end);
                Finisher{a, group, warp, lane}.run(entry, tile, group, by_w,
                                                   outside[0] | outside[1] << 1, sums,
                                                   shared.amax[amax_turn][group]);
            }
            barrier_arrive_warp(shared_address(shared.closed + turn.at), lane);
        }
    }
};

using Places = Shared;
using Factors = Scaler;

#else

// The warps that make factors of w's scales, where there are two tiles.

// Beside what one tile needs, scales of w as they are: of the tile that is under way and of the
// next one, so many times of each as are there or on their way.
constexpr int kScaleTurns = 2;
struct SharedOfTwo : Shared {
    alignas(16) unsigned w_scales[2][kScaleTurns][kParts][kGroupRows][kVectorChunks];
};
static_assert(
    sizeof(SharedOfTwo) <= MX_SHARED_BYTES,
    "the host gives too little shared memory: aiter_mx/kernels/moe_gemm/wgmma_f16_sm90.py");

// The largest scales of the first tile's rows, for which all wait. The warps that add have nothing
// to do yet, and registers for all scales of a row at once: they leave them where the first factors
// of the row will be, for the warp that makes these.
struct FirstTops {
    static constexpr int kMeet = kGroupThreads + kLanes;          // threads
    static constexpr int kLanesOfRow = kLanes / 16, kVectors = 6; // loads at once
    static_assert(kTiles <= kDepth, "a part has a stage");

    MX_MEMBER static int barrier(int group) { return 1 + kGroups + group; }
    // By all warps of a group that adds.
    MX_MEMBER static void leave(const MoeArgs& a, Shared& shared, const Entry& first, int group,
                                int warp, int lane) {
        const int vectors = a.chunks() / kVectorChunks; // K is a multiple of 512
        const int row = warp * 16 + lane / kLanesOfRow, own = lane % kLanesOfRow;
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
            const unsigned in_w = row_of_w(a, first.tile, group * kTiles + t, row);
            const unsigned char* const scales =
                row_at(a.ws, first.expert * static_cast<int>(a.N) + static_cast<int>(in_w),
                       static_cast<unsigned>(a.K) / kBlock);
            Largest largest;
#pragma unroll 1
            for (int v = own; v < vectors; v += kLanesOfRow * kVectors) {
                unsigned some[kVectors][kVectorChunks] = {};
#pragma unroll
                for (int i = 0; i < kVectors; ++i)
                    if (v + i * kLanesOfRow < vectors)
                        load_scales(some[i], scales + (v + i * kLanesOfRow) * 16);
#pragma unroll
                for (int i = 0; i < kVectors; ++i)
#pragma unroll
                    for (unsigned word : some[i])
                        largest.take(word);
            }
            const unsigned top = largest.top<kLanesOfRow>();
            if (own == 0)
                shared.factors[group][t][row].y = top;
        }
        named_barrier_arrive(barrier(group), kMeet);
    }
    MX_MEMBER static void wait(int group) { named_barrier(barrier(group), kMeet); }
    MX_MEMBER static unsigned take(const Shared& shared, int group, int t, int row) {
        return shared.factors[group][t][row].y;
    }
};

// Fills the ring of a warpgroup that adds, one warp for each, with factors of scales, relative to
// the row's largest, which is found while the tile before is under way. A lane has a row every
// kLanes, and copies the scales of these itself, so that it waits for no other's.
struct Filler {
    static constexpr int kOwned = kGroupRows / kLanes; // rows of a part
    static constexpr int kBatch = kVectorChunks;       // chunks
    const MoeArgs& a;
    SharedOfTwo& shared;
    const int group, lane;

    using Words = unsigned[kTiles][kOwned][kBatch];
    using Tops = unsigned[kTiles][kOwned];
    using Largests = Largest[kTiles][kOwned];
    struct Place {
        int expert;
        unsigned tile, end;
    };

    // The scales of row r of part t. Worked out where they are used, as places of all rows would
    // not fit the registers.
    MX_MEMBER const unsigned char* scales_at(const Place& of, int t, int r) const {
        const unsigned row = row_of_w(a, held(of.tile), group * kTiles + t, lane + r * kLanes);
        return row_at(a.ws, of.expert * static_cast<int>(a.N) + static_cast<int>(row),
                      static_cast<unsigned>(a.K) / kBlock);
    }
    // Starts copies of kBatch chunks, from c on, of all of a lane's rows. which: 0 of the tile that
    // is under way, 1 of the next one.
    MX_MEMBER void ask(int which, int turn, const Place& of, int c) const {
#pragma unroll
        for (int t = 0; t < kTiles; ++t)
#pragma unroll
            for (int r = 0; r < kOwned; ++r)
                copy_scales(asked_at(which, turn, t, r), scales_at(of, t, r) + c * kBlocks, true);
    }
    MX_MEMBER unsigned asked_at(int which, int turn, int t, int r) const {
        return shared_address(shared.w_scales[which][turn][group * kTiles + t][lane + r * kLanes]);
    }
    MX_MEMBER void take_asked(unsigned (&words)[kBatch], int which, int turn, int t, int r) const {
        const u32x4 v = load_shared_16(asked_at(which, turn, t, r));
        words[0] = v[0];
        words[1] = v[1];
        words[2] = v[2];
        words[3] = v[3];
    }
    // Makes the factors of the next stage.
    MX_MEMBER void fill_stage(const unsigned (&scales)[kOwned], const unsigned (&top)[kOwned],
                              PipelineState<kDepth>& to) const {
        barrier_wait(shared_address(shared.empty[group] + to.at), to.parity ^ 1);
#pragma unroll
        for (int r = 0; r < kOwned; ++r)
            shared.factors[group][to.at][lane + r * kLanes] =
                uint2{factors_of(scales[r], top[r]), exponent_of(top[r])};
        barrier_arrive_warp(shared_address(shared.full[group] + to.at), lane);
        to.next();
    }
    // Fills all of a tile's stages, and finds the largest scales of the next tile's rows.
    MX_MEMBER void fill(const Place& now, const Place& next, const Tops& top, Largests& largest,
                        PipelineState<kDepth>& to, int chunks) const {
        static_assert(kTiles * kOwned <= kVectorChunks, "each row has a chunk");
        const bool any_next = next.expert >= 0;
        int turn = 0;
        ask(0, turn, now, 0);
        if (any_next)
            ask(1, turn, next, 0);
        copy_commit();
#pragma unroll 1
        for (int c = 0; c < chunks; c += kBatch, turn ^= 1) {
            if (c + kBatch < chunks) {
                ask(0, turn ^ 1, now, c + kBatch);
                if (any_next)
                    ask(1, turn ^ 1, next, c + kBatch);
            }
            copy_commit();
            copy_wait<1>();
            Words words;
#pragma unroll
            for (int t = 0; t < kTiles; ++t)
#pragma unroll
                for (int r = 0; r < kOwned; ++r)
                    take_asked(words[t][r], 0, turn, t, r);
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
#pragma unroll
                for (int t = 0; t < kTiles; ++t) {
                    const unsigned scales[kOwned] = {words[t][0][i], words[t][1][i]};
                    fill_stage(scales, top[t], to);
                }
                if (i < kTiles * kOwned && any_next) {
                    unsigned ahead[kBatch];
                    take_asked(ahead, 1, turn, i / kOwned, i % kOwned);
#pragma unroll
                    for (unsigned word : ahead)
                        largest[i / kOwned][i % kOwned].take(word);
                }
            }
        }
    }
    // The next entry, once it is there.
    MX_MEMBER Place open(const PipelineState<kEntries>& turn) const {
        barrier_wait(shared_address(shared.opened + turn.at), turn.parity);
        const Entry& entry = shared.queue[turn.at];
        return {entry.expert, entry.tile, entry.end};
    }
    MX_MEMBER void run() const {
        const int chunks = a.chunks();
        PipelineState<kEntries> turn;
        PipelineState<kDepth> to;
        Place next = open(turn);
        Tops top;
        Largests largest;
        if (next.expert < 0)
            return;
        FirstTops::wait(group);
#pragma unroll
        for (int t = 0; t < kTiles; ++t)
#pragma unroll
            for (int r = 0; r < kOwned; ++r)
                top[t][r] = FirstTops::take(shared, group, t, lane + r * kLanes);
        while (next.expert >= 0) {
#pragma unroll
            for (int t = 0; t < kTiles; ++t)
#pragma unroll
                for (int r = 0; r < kOwned; ++r)
                    largest[t][r] = {};
            const Place now = next;
            if (++next.tile == next.end) {
                turn.next();
                next = open(turn);
            }
            fill(now, next, top, largest, to, chunks);
#pragma unroll
            for (int t = 0; t < kTiles; ++t)
#pragma unroll
                for (int r = 0; r < kOwned; ++r)
                    top[t][r] = largest[t][r].top();
        }
        copy_wait<0>(); // copies must not outlive the warp
    }
};

// A warpgroup that adds has two tiles of 64 rows of w, for 40 to 96 tokens an
// expert where x does not stay: x, which both read, is brought and made fp16 for 256 rows at a
// time. By count the memory pipe of an SM has the most to do for each 128 k, beside the copies of
// tensor maps. So scales are copied 16 bytes at a time; and ahead of their use, as what waits for
// them keeps all that add waiting.

// Adds tiles and stores what they come to.
struct Adder {
    using Sums = float[kTiles][kCols / 2];
    const MoeArgs& a;
    Shared& shared;
    const int group, warp, lane; // warp: of the group
    const unsigned base;         // of its ring
    unsigned place; // in a stage: of what the lane gives ldmatrix the address of, for row 0 of two
    PipelineState<kDepth> ring;
    PipelineState<kSlots> from;
    unsigned words[2][2][4], scale[2], next_scale[2];
    unsigned powers;  // of two of a lane's rows of w: a byte of each, its exponent
    unsigned outside; // a bit of each: whether scales are too far apart, as far as the lane sees it

    MX_MEMBER Adder(const MoeArgs& a, Shared& shared, int group, int warp, int lane)
        : a(a), shared(shared), group(group), warp(warp), lane(lane),
          base(held(shared_address(shared.ring[group][0]))) {
        const int row = row_of(warp, lane % 8 * 4, 0);
        place = held(swizzled_128(0, row, lane / 8));
    }
    // Half of a stage, 64 k.
    MX_MEMBER void fetch(int stage, int half) {
        // Row 1 is that with another last bit, or lies a box away.
        constexpr unsigned other = kHalves ? kBoxRows * kChunk : kChunk | 16;
#pragma unroll
        for (int i = 0; i < 2; ++i)
            load_matrices(words[half][i],
                          base + stage * kStageBytes + (place ^ half * 64 ^ i * other));
    }
    // Notes rows of blocks that fp16 takes for zero, though they are not.
    MX_MEMBER void look_for_lost(int stage, int t) {
#pragma unroll 1
        for (int at = 0; at < 4; ++at) {
            const int row = row_of(warp, lane, at % 2), piece = lane % 4 * 2 + at / 2;
            const u32x4 v = load_shared_16(swizzled_128(base + stage * kStageBytes, row, piece));
            const unsigned byte = (at % 2 ? scale[1] : scale[0]) >> lane % 4 * 8 & 255;
            const bool lost = byte == 0 && (v[0] | v[1] | v[2] | v[3]) & 0x7f7f7f7f;
            outside |= (lost ? 1u : 0u) << (t * 2 + at % 2);
        }
    }
    // Loads the scales and the first half of the next stage, which is part t's.
    MX_MEMBER void open(int t) {
        barrier_wait(shared_address(shared.full[group] + ring.at), ring.parity);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint2 both = load_shared_8(
                shared_address(&shared.factors[group][ring.at][row_of(warp, lane, i)]));
            next_scale[i] = both.x;
            powers = __byte_perm(powers, both.y, 0x3210 ^ (t * 2 + i ^ 4) << (t * 2 + i) * 4);
        }
        fetch(ring.at, 0);
    }
    MX_MEMBER void close(int stage) const {
        barrier_arrive_warp(shared_address(shared.empty[group] + stage), lane);
    }
    // Step j of 16 k of the chunk.
    MX_MEMBER void expand(unsigned (&to)[4], int j) const {
#pragma unroll
        for (int i = 0; i < 2; ++i)
            e4m3x4_to_f16_times(words[j / 4][i][j % 4], factor_of_block(scale[i], j / 2), to[i],
                                to[2 + i]);
    }
    MX_MEMBER void take(int slot) const {
        if (lane == 0)
            barrier_arrive(shared_address(shared.taken + slot));
    }
    static constexpr int kUnit = 2, kSteps = kChunk / 16; // of 16 k
    // Adds a tile of both parts. What the next stage needs is asked for in the middle of each, and
    // the next x at the end of a chunk, while wgmmas run.
    template <int Width>
    MX_MEMBER void add_columns(Sums& sums) {
        unsigned operand[2][kUnit][4];
        const int chunks = a.chunks();
        int before = 0; // the slot of the chunk before
        outside = 0;
        open(0);
        barrier_wait(shared_address(shared.ready + from.at), from.parity);
#pragma unroll 1
        for (int c = 0; c < chunks; ++c) {
            const MatrixDescriptor x(shared_address(shared.x[from.at]), kCols * 16, 128);
            const int slot = from.at;
            from.next();
#pragma unroll
            for (int t = 0; t < kTiles; ++t) {
                const int stage = ring.at;
                ring.next();
                scale[0] = next_scale[0];
                scale[1] = next_scale[1];
                fetch(stage, 1);
                if (__builtin_expect((zero_bytes(scale[0]) | zero_bytes(scale[1])) != 0, false))
                    look_for_lost(stage, t);
#pragma unroll
                for (int j = 0; j < kSteps; j += kUnit) {
                    unsigned (&w)[kUnit][4] = operand[j / kUnit % 2];
#pragma unroll
                    for (int n = 0; n < kUnit; ++n)
                        expand(w[n], j + n);
                    wgmma_fence();
#pragma unroll
                    for (int n = 0; n < kUnit; ++n)
                        wgmma_f16_first<Width>(sums[t], w[n], x.at((j + n) * kStepBytes));
                    wgmma_commit();
                    if (j + kUnit == kSteps / 2 && (t + 1 < kTiles || c + 1 < chunks))
                        open((t + 1) % kTiles);
                    if (j == kSteps / 2)
                        close(stage);
                    if (j + kUnit == kSteps && t + 1 == kTiles && c + 1 < chunks)
                        barrier_wait(shared_address(shared.ready + from.at), from.parity);
                    wgmma_wait<1>();
                    if (j == 0 && t == 0 && c > 0)
                        take(before);
                }
            }
            before = slot;
        }
        wgmma_wait<0>();
#pragma unroll
        for (int t = 0; t < kTiles; ++t)
            keep_in_order(sums[t]);
        take(before);
    }
    // Adds as many columns as the least of these widths that holds them. A loop for each: ptxas
    // takes wgmmas in branches of one loop apart.
    template <int Width, int... Narrower>
    MX_MEMBER void add_some(Sums& sums, int columns) {
        if constexpr (sizeof...(Narrower) > 0) {
            constexpr int widths[] = {Narrower...};
            if (columns <= widths[0])
                return add_some<Narrower...>(sums, columns);
        }
        add_columns<Width>(sums);
    }
    MX_MEMBER void add(Sums& sums, int columns) {
        add_some<kCols, kCols - 8, kCols - 16, kCols - 32>(sums, columns);
    }

    // Makes results of a part's sums.
    MX_MEMBER void finish(const Entry& entry, unsigned tile, int t, float (&sums)[kCols / 2],
                          unsigned (&amaxes)[kGroupWarps][kActivated ? kCols : 2]) const {
        const float by_w[2] = {bits_to_float((powers >> t * 16 & 255) << 23),
                               bits_to_float((powers >> t * 16 + 8 & 255) << 23)};
        Finisher{a, group, warp, lane}.run(entry, tile, group * kTiles + t, by_w,
                                           outside >> t * 2 & 3, sums, amaxes);
    }

    MX_MEMBER void run() {
        PipelineState<kEntries> turn;
        bool is_first = true;
        for (int amax_turn = 0;; turn.next()) {
            const Entry& entry = shared.queue[turn.at];
            if (!has_entry(shared, turn))
                break;
            if (is_first)
                FirstTops::leave(a, shared, entry, group, warp, lane);
            is_first = false;
            for (unsigned tile = entry.tile; tile < entry.end; ++tile) {
                Sums sums = {};
                add(sums, entry.col_tiles * 8);
#pragma unroll
                for (int t = 0; t < kTiles; ++t, amax_turn ^= 1)
                    finish(entry, tile, t, sums[t], shared.amax[amax_turn][group]);
            }
            barrier_arrive_warp(shared_address(shared.closed + turn.at), lane);
        }
    }
};

using Places = SharedOfTwo;
using Factors = Filler;

#endif

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    aiter_mx_moe_gemm_wgmma_f16(MX_MOE_PARAMETERS, const __grid_constant__ TensorMap weights_map) {
    extern __shared__ __align__(1024) unsigned char dynamic[];
    take_roles<Adder, Factors>(MX_MOE_ARGS, *reinterpret_cast<Places*>(dynamic), weights_map);
}
