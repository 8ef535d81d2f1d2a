// Decode linear for up to 16 rows of x on Hopper, weights straight into registers:
// y = dequantised(x) * dequantised(w)^T + bias.
//
//   xq [M, K], wq [N, K]        e4m3 payload
//   xs [M, K/32], ws [N, K/32]  e8m0 scale of each 32 consecutive k
//   y  [M, N]                   fp32, bf16 or fp16
//   bias [N]                    any of these, or none
//
// A cluster computes kRows consecutive outputs n for all m. Its kSplit workgroups have a part of K
// each, and the waves of a workgroup take turns with that, a chunk of 128 k at a time, and ask for
// kUnroll chunks of w and x before they use the first, or for one as they use the one before it.
// Nothing but sums passes through shared memory, and no one waits for another before the end. A
// launch that overlaps the one ahead of it asks for its first weights before that has ended.
//
// Products are those of mma over fp16, which any e4m3 is. Each of four lanes has 16 bytes of 64 k
// of a row of w, and so two of them another block of 32 k than the others, although mma adds over
// all four. Up to 4 rows of x the sums of both blocks stay apart (mma_registers_few_sm90.h), above
// that fp16 has the blocks' scales in it (mma_registers_many_sm90.h).
//
// Sums are fp32 and added in an order that depends on nothing but the configuration: over blocks,
// then waves, by the workgroup that owns the tile: of a cluster's, they take turns.

#if MX_TOKENS > 4
#include "mma_registers_far_sm90.h"
#else
#include "mma_registers_few_sm90.h"
#endif
#include "common/epilogue.h"

using namespace mx;

#if MX_SPLIT > 1
#define CLUSTER __cluster_dims__(kSplit, 1, 1)
#else
#define CLUSTER
#endif

using Out = DType<MX_OUT>;

struct alignas(4 * kLaneSums) LaneSums { // of a half
    float sums[kLaneSums];
};
// Where a cluster has more workgroups than halves, sums of a part of a half's lanes are owned: then
// more of them add, and other lanes add other parts.
constexpr int kUnits = 4 * kHalves <= kSplit ? 4 : 2 * kHalves <= kSplit ? 2 : 1; // of a half
constexpr int kUnitLanes = kLanes / kUnits;
constexpr int kAllUnits = kHalves * kUnits;
constexpr int kOwned = (kAllUnits + kSplit - 1) / kSplit;
constexpr int kSumBytes = kUnitLanes * sizeof(LaneSums); // of a unit, from one part

// Adds the products of a wave's chunks, from `mine` on, Unroll of them in a round.
template <bool Aligned, int Unroll>
MX_DEVICE void add_chunks(Sums& sums, WeightsReader& w, XReader& x, int mine, int end, int lane) {
    const auto let_next_begin = [] { // what is stored later comes after this as well
        launch_dependents();
        wait_for_grid_ahead();
    };
    if (kOverlaps && !kEven && mine >= end)
        let_next_begin();
    constexpr int a_round = Unroll * kWaves;
    constexpr int rounds = kChunks / (a_round * kSplit); // if kEven
    // One or two are code of their own each, at known distances from where the readers stay.
    constexpr bool in_line = Aligned && kEven && rounds <= 2;
#pragma unroll(in_line ? rounds : 1)
    for (int r = 0; kEven ? r < rounds : mine + r * a_round < end; ++r) {
        const int first = mine + r * a_round, begin = in_line ? r * a_round : 0;
        Chunk loaded[Unroll] = {};
        const auto each = [&](auto do_one) {
#pragma unroll
            for (int u = 0; u < Unroll; ++u)
                if (u == 0 || kEven || first + u * kWaves < end)
                    do_one(loaded[u], begin + u * kWaves, first + u * kWaves);
        };
        const auto ask_w = [&] {
            each([&](Chunk& to, int ahead, int c) { w.load_scales<Aligned>(to.w, ahead, c); });
            each([&](Chunk& to, int ahead, int c) { w.load_payload(to.w, ahead, c); });
        };
        const auto ask_x = [&] {
            each([&](Chunk& to, int ahead, int c) { x.load_payload(to, ahead, c); });
            each([&](Chunk& to, int ahead, int c) { x.load_scales<Aligned>(to, ahead, c); });
        };
        if constexpr (kOverlaps) {
            ask_w();
            if (r == 0)
                let_next_begin();
            ask_x();
        } else {
            ask_x();
            ask_w();
        }
        each([&](Chunk& chunk, int ahead, int c) {
            Ready ready;
            const Here here{w, x, ahead, c, lane};
            const bool far = make_ready(ready, chunk, here);
            add_chunk(sums, chunk, ready, far, here, [](int, int) {}, [](int) {});
        });
        if constexpr (!in_line) {
            w.advance(a_round);
            x.advance(a_round);
        }
    }
}

// The same of one chunk at a time, in the same order: the next is asked for while this one is used,
// piece by piece, as its registers come free.
template <bool Aligned>
MX_DEVICE void add_chunks_in_turn(Sums& sums, WeightsReader& w, XReader& x, int mine, int end,
                                  int lane) {
    Chunk chunk = {};
    const auto ask_x = [&](int c) {
        x.load_payload(chunk, 0, c);
        x.load_scales<Aligned>(chunk, 0, c);
    };
    const auto exists = [&](int r) { return kEven ? r < kRounds : mine + r * kWaves < end; };
    if (!kOverlaps && exists(0))
        ask_x(mine);
    if (exists(0)) {
        w.load_scales<Aligned>(chunk.w, 0, mine);
        w.load_payload(chunk.w, 0, mine);
    }
    if constexpr (kOverlaps) { // what is stored later comes after this as well
        launch_dependents();
        wait_for_grid_ahead();
        if (exists(0))
            ask_x(mine);
    }
#pragma unroll 1
    for (int r = 0; exists(r); ++r) {
        const int c = mine + r * kWaves, next = c + kWaves;
        const bool more = exists(r + 1);
        w.advance(kWaves);
        x.advance(kWaves);
        Ready ready;
        const Here here{w, x, -kWaves, c, lane};
        const bool far = make_ready(ready, chunk, here);
        if (more) {
            if constexpr (!kLateX)
                x.load_payload(chunk, 0, next);
            x.load_scales<Aligned>(chunk, 0, next);
            w.load_scales<Aligned>(chunk.w, 0, next);
        }
        const auto refill_x = [&](int s) {
            if constexpr (kLateX) {
                if (more)
                    x.load_step(chunk, s, 0, next);
            }
        };
        const auto refill_w = [&](int h, int s) {
            if (more)
                w.load_step(chunk.w, h, s, 0, next);
            if (MX_TOKENS <= 8 || h == kHalves - 1)
                keep_loads_in_order(w.payload[0]);
        };
        add_chunk(sums, chunk, ready, far, here, refill_w, refill_x);
    }
}

MX_DEVICE void store_sums_async(unsigned to, const float (&v)[kLaneSums], unsigned barrier) {
    if constexpr (kLaneSums == 1)
        store_async(to, float_to_bits(v[0]), barrier);
    else if constexpr (kLaneSums == 2)
        store_async(to, v[0], v[1], barrier);
    else
        store_async(to, float4{v[0], v[1], v[2], v[3]}, barrier);
}

// Sums of a lane to the workgroups that own its units.
MX_DEVICE void send(const Sums& sums, unsigned inbox, unsigned full, int part, unsigned lane) {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
        const unsigned unit = h * kUnits + lane / kUnitLanes;
        const unsigned to = inbox + (unit / kSplit * kParts + part) * kSumBytes +
                            lane % kUnitLanes * sizeof(LaneSums);
        store_sums_async(address_in_cluster(to, unit % kSplit), sums[h],
                         address_in_cluster(full, unit % kSplit));
    }
}

extern "C" __global__ void CLUSTER __launch_bounds__(kThreads, kResident)
    aiter_mx_linear_mma_registers(const unsigned char* xq, const unsigned char* xs,
                                  const unsigned char* wq, const unsigned char* ws,
                                  const void* bias, Out* y, long M, long N, long K, int bias_kind) {
    const int lane = threadIdx.x % kLanes;
    // In 31 bits each, K known to the compiler, as the first loads wait for all of this.
    const int rank = blockIdx.x % kSplit;
    const int begin = rank * (kChunks / kSplit) + min(rank, kChunks % kSplit);
    const int end = begin + kChunks / kSplit + (rank < kChunks % kSplit);
    const unsigned rows = static_cast<unsigned>(N), own_row = blockIdx.x / kSplit * kRows;
    const unsigned first_row = kRowsFit == 1 ? min(own_row, rows - kRows) : own_row;
    const unsigned last_row = min(first_row + kRows, kRowsFit ? first_row + kRows : rows) - 1;
    WeightsReader w;
    XReader x;
    const unsigned from = begin + threadIdx.x / kLanes;
    x.open(xq, xs, static_cast<unsigned>(M), from, lane);
    w.open(wq, ws, place_of(lane % 4), first_row, last_row, from, lane);
    const int wave = __shfl_sync(0xffffffff, threadIdx.x / kLanes, 0);
    __shared__ LaneSums sums_of[kOwned][kParts][kUnitLanes];
    __shared__ unsigned long long barrier; // of what the cluster sends
    const int owned = (kAllUnits - rank + kSplit - 1) / kSplit;
    if constexpr (kSplit > 1) {
        if (threadIdx.x == kThreads - kLanes) {
            barrier_init(shared_address(&barrier), 1);
            fence_barrier_init();
            barrier_arrive_expect(shared_address(&barrier), owned * kParts * kSumBytes);
        }
        __syncwarp();
        cluster_arrive_relaxed();
    }
    Sums sums = {};
    // Scales that are no words of memory are read byte by byte, with few registers.
    const auto scales = reinterpret_cast<unsigned long>(ws) | reinterpret_cast<unsigned long>(xs);
    if (kWholeChunks && scales % kBlocks == 0)
        if constexpr (kInTurn)
            add_chunks_in_turn<true>(sums, w, x, begin + wave, end, lane);
        else
            add_chunks<true, kUnroll>(sums, w, x, begin + wave, end, lane);
    else
        add_chunks<false, 1>(sums, w, x, begin + wave, end, lane);

    if constexpr (kSplit > 1) {
        cluster_wait(); // all of the cluster have started, and set up their barriers
        send(sums, shared_address(sums_of), shared_address(&barrier), rank * kWaves + wave, lane);
        cluster_arrive_relaxed();
    } else {
#pragma unroll
        for (int h = 0; h < kHalves; ++h)
#pragma unroll
            for (int i = 0; i < kLaneSums; ++i)
                sums_of[h][wave][lane].sums[i] = sums[h][i];
        group_barrier();
    }
#pragma unroll 1
    for (int own = wave; own < owned; own += kWaves) {
        const int unit = own * kSplit + rank;
        const int whose = unit % kUnits * kUnitLanes + lane % kUnitLanes; // lane of a half
        Out* to[kLaneSums];
        bool exists[kLaneSums];
        LaneSums added{};
#pragma unroll
        for (int i = 0; i < kLaneSums; ++i) {
            const int m = token_of(whose, i);
            const unsigned n = first_row + unit / kUnits * 8 + row_of(whose, i);
            to[i] = y + (static_cast<unsigned long>(m) * static_cast<unsigned>(N) + n);
            exists[i] = lane < kUnitLanes && m < M && n <= last_row;
            // Rows of another workgroup are its own to store: scales of a wave's other rows may
            // decide how sums round.
            if (kRowsFit == 1)
                exists[i] = exists[i] && n >= own_row;
            if (exists[i])
                added.sums[i] = load_bias(bias, bias_kind, n);
        }
        if constexpr (kSplit > 1)
            barrier_wait(shared_address(&barrier), 0);
        LaneSums sum{};
#pragma unroll
        for (int part = 0; part < kParts; part += kUnits)
            if (kParts % kUnits == 0 || part + lane / kUnitLanes < kParts)
#pragma unroll
                for (int i = 0; i < kLaneSums; ++i)
                    sum.sums[i] +=
                        sums_of[own][part + lane / kUnitLanes][lane % kUnitLanes].sums[i];
#pragma unroll
        for (int i = 0; i < kLaneSums; ++i) {
            if constexpr (kUnits > 2)
                sum.sums[i] += across<16>(sum.sums[i]);
            if constexpr (kUnits > 1)
                sum.sums[i] += across<kUnitLanes>(sum.sums[i]);
        }
#pragma unroll
        for (int i = 0; i < kLaneSums; ++i)
            if (exists[i])
                store(to[i], sum.sums[i] + added.sums[i]);
    }
    if constexpr (kSplit > 1)
        cluster_wait(); // no one ends while others may still send to it
}
