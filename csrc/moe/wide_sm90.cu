// Grouped GEMM over routed tokens on Hopper, for some tens of tokens an expert.
// aiter_mx/kernels/moe_gemm/problem.py defines what it computes and its arguments.
//
// A workgroup takes kGroups * 64 rows of an expert's w and up to kCols rows of x, those of a block
// of ids, and goes along K. Both become bf16 with their scales applied, which is exact, so that
// sums over all of K stay in the matrix unit (sm90/expand.h). Weights are the A operand of wgmma:
//
//   w  -> registers, kDepth chunks of 128 k ahead, across the ends of tiles -> bf16 -> wgmma
//   x  -> shared memory, kAhead chunks ahead -> bf16 by a warpgroup of its own -> shared memory
//      -> wgmma
//
// A lane reads 16 consecutive bytes of a row. A unit, half a chunk, is 4 lanes wide and feeds 4
// wgmmas: word j of each lane goes to wgmma j, and x is stored in the same order of k. As many
// columns are multiplied as the block has rows, or a few more (Adder::multiply).
//
// Scales that bf16 cannot hold are left out, and the outputs of their row computed again in fp32.

#include "common/epilogue.h"
#include "common/quantize.h"
#include "common/scale.h"
#include "common/target.h"
#include "moe.h"
#include "moe_sm90.h"
#include "sm90/expand.h"
#include "sm90/tma.h"
#include "sm90/wgmma.h"
#include "wide_sm90.h"

using namespace mx;

// Whether scales of a row of w are outside of what bf16 holds is in shared memory: it is rare.
struct Unusual {
    unsigned nan[2]; // any top bit of a byte is set where a lane's row has NaN payloads
    int* const outside;
};

// 128 k of a lane's two rows of w.
struct Weights {
    u32x4 payload[kUnits][2];
    unsigned scales[2]; // of 4 blocks

    // The factors of unit u for row i, 2 * i + u. `place` takes a lane's scales.
    MX_MEMBER void find_factors(unsigned (&factors)[2 * kUnits], unsigned place,
                                Unusual& unusual) const {
        static_assert(kUnits == 2 && kFirstWScale <= 0x80 && kLastWScale >= 0x80);
        constexpr unsigned each = 0x01010101, top = 0x80 * each;
        const unsigned own = __byte_perm(scales[0], scales[1], place), low = own & ~top;
#pragma unroll
        for (int k = 0; k < 2 * kUnits; ++k)
            factors[k] = w_factor(__byte_perm(own, 0, 0x4440 + k));
        const unsigned from_first = low + (0x80 - kFirstWScale) * each; // the top bit says so
        const unsigned past_last = low + (0xff - kLastWScale) * each;
        if (!(((own & past_last) | ~(own | from_first)) & top))
            return;
#pragma unroll
        for (int k = 0; k < 2 * kUnits; ++k) {
            const unsigned scale = own >> 8 * k & 255;
            if (kFirstWScale <= scale && scale <= kLastWScale)
                continue;
            factors[k] = scale == kNanScale ? kNanBF16x2 : 0;
            const u32x4& words = payload[k % kUnits][k / kUnits];
            if (scale != kNanScale && (words[0] | words[1] | words[2] | words[3]) & ~top)
                unusual.outside[k / kUnits] = 1;
        }
    }
    MX_MEMBER void to_bf16(unsigned (&a)[kSteps][4], int u, const unsigned (&factors)[2 * kUnits],
                           unsigned magnitude, Unusual& unusual) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const u32x4& words = payload[u][i];
#pragma unroll
            for (int j = 0; j < kSteps; ++j) {
                e4m3x4_to_bf16(words[j], factors[2 * i + u], magnitude, a[j][i], a[j][2 + i]);
                // Only 0x7f and 0xff turn their top bit, and only 0xff carries into the next byte.
                unusual.nan[i] |= (words[j] + 0x01010101) ^ words[j];
            }
        }
    }
};

// Reads the chunks of one tile after another.
struct Reader {
    const MoeArgs& a;
    Shared& shared;
    const int warp, lane;
    Turn<kEntries> turn; // of the queue
    int left = 0;        // chunks of the open tile from the next ones on; -1: no more tiles
    const unsigned char *payload[2], *scales[2];

    MX_MEMBER void open() {
        if (left < 0)
            return;
        barrier_wait(shared_address(shared.opened + turn.at), turn.parity);
        const int expert = shared.queue[turn.at].expert;
        const unsigned tile = shared.queue[turn.at].tile;
        turn.next();
        left = expert < 0 ? -1 : a.chunks();
        if (expert < 0) {
            launch_dependents(); // not before, else what comes next settles unevenly on the SMs
            return;
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const unsigned row = Rows::row(a, tile, row_of(warp, lane, i));
            const Offset first = expert * static_cast<Offset>(a.N) + row;
            payload[i] = a.wq + first * a.K + lane % 4 * 16;
            scales[i] = a.ws + first * a.blocks();
        }
    }
    // Unit u of the d-th of the next chunks.
    MX_MEMBER void read(Weights& w, int d, int u) const {
        const bool exists = kWhole ? left > 0 : left > d;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (!kWhole) // else those that do not exist are not used
                w.payload[u][i] = u32x4{};
            if (exists)
                w.payload[u][i] = load_once(payload[i] + d * kChunk + u * kUnit);
        }
        if (u == kUnits - 1)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if (!kWhole)
                    w.scales[i] = 0x7f7f7f7f;
                if (exists)
                    w.scales[i] = load_word(scales[i] + d * kBlocks);
            }
    }
    MX_MEMBER void advance() {
        left = left < 0 ? left : max(left - kDepth, 0);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            payload[i] += kDepth * kChunk;
            scales[i] += kDepth * kBlocks;
        }
    }
};

// Adds tiles and stores what they come to.
struct Adder {
    const MoeArgs& a;
    Shared& shared;
    const int group, warp, lane; // warp: of all that add
    const unsigned magnitude, place;
    Weights ring[kDepth] = {};
    Turn<kSlots> from;

    MX_MEMBER void take(int slot) const {
        if (lane == 0)
            barrier_arrive(shared_address(shared.taken + slot));
    }

    // Multiplies as many columns as the least of these widths that holds them.
    template <int Width, int... Wider>
    MX_MEMBER static void multiply(float (&sums)[kCols / 2], const unsigned (&w)[kSteps][4],
                                   const MatrixDescriptor& x, int columns) {
        if constexpr (sizeof...(Wider) > 0 && Width < kCols)
            if (columns > Width)
                return multiply<Wider...>(sums, w, x, columns);
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < kSteps; ++j)
            wgmma_first<Width>(sums, w[j], x.at(j * kStepBytes));
        wgmma_commit();
    }

    MX_MEMBER void add(float (&sums)[kCols / 2], Unusual& unusual, Reader& reader, int columns) {
        unsigned operand[kUnits][kSteps][4], factors[2 * kUnits];
        const int steps = steps_of(a);
        int before = 0; // the slot of the chunk before
        for (int step = 0; step < steps; ++step) {
            if (step + 1 == steps)
                reader.open();
#pragma unroll
            for (int d = 0; d < kDepth; ++d) {
                ring[d].find_factors(factors, place, unusual);
#pragma unroll
                for (int u = 0; u < kUnits; ++u) {
                    ring[d].to_bf16(operand[u], u, factors, magnitude, unusual);
                    reader.read(ring[d], d, u);
                    if (u == 0)
                        barrier_wait(shared_address(shared.ready + from.at), from.parity);
                    const MatrixDescriptor x(shared_address(shared.x[from.at]) +
                                                 u * kSteps * kStepBytes,
                                             kHalfStepBytes, 128);
                    multiply<16, 32, 48, 64, 80, 96, 128>(sums, operand[u], x, columns);
                    wgmma_wait<1>();
                    if (u == 0 && (d > 0 || step > 0))
                        take(before);
                }
                before = from.at;
                from.next();
            }
            reader.advance();
        }
        wgmma_wait<0>();
        keep_in_order(sums);
        take(before);
    }

    // Computes again what has been left out, and spreads NaN.
    template <int Count>
    MX_MEMBER void mend(const Entry& entry, float (&sums)[Count], const Unusual& unusual) const {
        unsigned is_nan = 0, outside = 0; // a bit for each of the two rows, for all lanes of it
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            is_nan |= (any_of_row(unusual.nan[i] & 0x80808080, lane) ? 1 : 0) << i;
            outside |= unusual.outside[i] << i;
        }
        __syncwarp();
        if (lane % 4 == 0)
            unusual.outside[0] = unusual.outside[1] = 0;
#pragma unroll 1
        for (int at = 0; at < Count; ++at) {
            const int i = at / 2 % 2, m = column_of(at / 4, at % 2, lane), t = entry.t[m];
            const bool again = outside >> i & 1 || entry.outside[m];
            if (t < 0 || !(again || is_nan >> i & 1))
                continue;
            float value = bits_to_float(kNanBits);
            if (again) {
                const Offset x = t / a.a_div, w = entry.expert * static_cast<Offset>(a.N) +
                                                  Rows::row(a, entry.tile, row_of(warp, lane, i));
                value = exact_output(a.xq + x * a.K, a.xs + x * a.blocks(), a.wq + w * a.K,
                                     a.ws + w * a.blocks(), a.K);
            }
#pragma unroll
            for (int n = 0; n < Count; ++n)
                sums[n] = n == at ? value : sums[n];
        }
    }

    template <int Count>
    MX_MEMBER void add_bias(const Entry& entry, float (&sums)[Count]) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const unsigned row = Rows::row(a, entry.tile, row_of(warp, lane, i));
            const float bias =
                load_bias(a.bias, a.bias_kind, entry.expert * static_cast<Offset>(a.N) + row);
#pragma unroll
            for (int j = 0; j < Count / 4; ++j)
#pragma unroll
                for (int c = 0; c < 2; ++c)
                    sums[j * 4 + i * 2 + c] += bias;
        }
    }

    template <int Count>
    MX_MEMBER void store_plain(const Entry& entry, const float (&sums)[Count]) const {
        struct alignas(2 * sizeof(Out)) Pair {
            Out values[2];
        };
        const long first = entry.tile * static_cast<long>(kRows) + row_of(warp, lane, 0);
        const bool aligned =
            a.N % 2 == 0 && reinterpret_cast<unsigned long>(a.out) % sizeof(Pair) == 0;
        const int room = max(0L, min(2L, a.N - first)); // for so many of the two features
        Out* const out = static_cast<Out*>(a.out) + first;
#pragma unroll
        for (int j = 0; j < Count / 4; ++j) {
            if (j >= entry.col_tiles)
                break;
            const int m = column_of(j, 0, lane);
            const int2 rows = *reinterpret_cast<const int2*>(entry.t + m);
            const float2 weights = *reinterpret_cast<const float2*>(entry.weights + m);
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int t = c ? rows.y : rows.x;
                const float weight = c ? weights.y : weights.x;
                if (t < 0)
                    continue;
                Out* const to = out + t * a.N;
                Pair pair;
                store(pair.values, sums[j * 4 + c] * weight);
                store(pair.values + 1, sums[j * 4 + 2 + c] * weight);
                if (aligned && room == 2) {
                    *reinterpret_cast<Pair*>(to) = pair;
                } else {
#pragma unroll
                    for (int v = 0; v < 2; ++v)
                        if (v < room)
                            to[v] = pair.values[v];
                }
            }
        }
    }

    // A lane has gate and up of one feature; a warpgroup has a block of 32 features.
    template <int Count>
    MX_MEMBER void store_activated(const Entry& entry, float (&sums)[Count],
                                   unsigned (&amaxes)[kGroupWarps][kActivated ? kCols : 2]) const {
        const int in_group = warp % kGroupWarps;
        const long first = entry.tile * static_cast<long>(Rows::kFeatures) + warp * 8 + lane / 4;
#pragma unroll
        for (int j = 0; j < Count / 4; ++j)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                float& value = sums[j * 4 + c];
                value = activate<kActivation>(value, sums[j * 4 + 2 + c], a.activation);
                note_largest(amaxes, value, column_of(j, c, lane), in_group, lane);
            }
        named_barrier(1 + group, kGroupThreads);
#pragma unroll
        for (int j = 0; j < Count / 4; ++j)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int m = column_of(j, c, lane);
                const long t = entry.t[m];
                if (t < 0 || first >= a.N / 2)
                    continue;
                const BlockScale scale = block_scale<E4M3, kRoundUp>(largest_of(amaxes, m));
                const long n = t * (a.N / 2) + first;
                static_cast<unsigned char*>(a.out)[n] =
                    to_e4m3x4<kRoundUp>(sums[j * 4 + c], 0.0f, 0.0f, 0.0f, scale);
                if (in_group == 0 && lane < 4)
                    a.out_scales[n / kBlock] = scale.byte;
            }
    }

    MX_MEMBER void do_entry(const Entry& entry, Reader& reader, int amax_turn) {
        float sums[kCols / 2] = {};
        Unusual unusual{{}, shared.outside[warp * 8 + lane / 4]};
        add(sums, unusual, reader, entry.col_tiles * 8);
        __syncwarp(); // for what lanes of a row say of it
        if (__any_sync(~0u, (unusual.nan[0] | unusual.nan[1]) & 0x80808080 ||
                                unusual.outside[0] | unusual.outside[1] | entry.any_outside))
            mend(entry, sums, unusual);
        if (a.bias_kind != kNone)
            add_bias(entry, sums);
        if constexpr (kActivated)
            store_activated(entry, sums, shared.amax[amax_turn][group]);
        else
            store_plain(entry, sums);
    }

    MX_MEMBER void run() {
        Reader reader{a, shared, warp, lane};
        reader.open();
#pragma unroll
        for (int d = 0; d < kDepth; ++d)
#pragma unroll
            for (int u = 0; u < kUnits; ++u)
                reader.read(ring[d], d, u);
        reader.advance();
        Turn<kEntries> turn;
        for (int amax_turn = 0;; turn.next(), amax_turn ^= 1) {
            barrier_wait(shared_address(shared.opened + turn.at), turn.parity);
            const Entry& entry = shared.queue[turn.at];
            if (entry.expert < 0)
                break;
            do_entry(entry, reader, amax_turn);
            __syncwarp();
            if (lane == 0)
                barrier_arrive(shared_address(shared.closed + turn.at));
        }
    }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    aiter_mx_moe_gemm_wide(MX_MOE_PARAMETERS) {
    extern __shared__ __align__(128) unsigned char dynamic[];
    Shared& shared = *reinterpret_cast<Shared*>(dynamic);
    const MoeArgs a = MX_MOE_ARGS;
    const int thread = threadIdx.x, lane = thread % kLanes, warp = thread / kLanes;
    const int group = warp / kGroupWarps;
    if (thread < kSlots) {
        barrier_init(shared_address(shared.ready + thread), kGroupWarps);
        barrier_init(shared_address(shared.taken + thread), kGroups * kGroupWarps);
    }
    if (thread < kEntries) {
        barrier_init(shared_address(shared.opened + thread), 1);
        barrier_init(shared_address(shared.closed + thread), kGroups * kGroupWarps);
    }
    if (thread < kRows)
        shared.outside[thread / 2][thread % 2] = 0;
    group_barrier();
    if (group < kGroups) {
        increase_registers<kAddingRegisters>();
        Adder{a, shared, group, warp, lane, held(kMagnitude), 0x6420u + lane % 4 / 2 * 0x1111}
            .run();
    } else {
        decrease_registers<kBringingRegisters>();
        Bringer{a, shared, lane, warp - kGroups * kGroupWarps}.run();
    }
}
