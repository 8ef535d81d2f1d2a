// Routing of a mixture of experts: lists routed rows expert by expert, in blocks, in one launch.
//
//   topk_ids [M, top_k]   expert of each slot of a token; anything outside 0 .. E-1 is left out
//   expert_map [E]        number of an expert here, -1 where it is not; or a mask of those here
//   sorted_ids            for each expert in turn its ids in rising order of t, then padding up to
//                         a multiple of block_m
//   expert_ids            of each block: the expert's number here, or -1
//   post_padded           ids in use, padding included; aiter's second number is the tokens routed
//
// t = token * slots + slot, where slots past top_k belong to shared experts, which every token has.
// vLLM's ids are t, padding is M * slots; aiter's are slot << 24 | token, padding slots << 24 | M.
//
// One workgroup does it. Each wave counts its part of the ids, the counts are summed over waves and
// experts in a fixed order, and each wave then places its part. Nothing is added atomically, so the
// lists are the same on every run.
//
//   ids     |<---- wave 0 ---->|<---- wave 1 ---->|...     chunks of a wave's lanes
//   place = first of the expert + its ids in waves before + in chunks before + in lanes before

//
// With kQuantizes the other workgroups of the launch meanwhile quantise the tokens' activations, as
// aiter_mx.quantize does: two launches of which neither needs the other's result are one.

#include "mx_quantize.h"
#include "mx_target.h"

using namespace mx;

constexpr int kWaves = MX_WAVES;     // of the workgroup
constexpr int kExperts = MX_EXPERTS; // room for experts: a power of two, at least kLanes
constexpr bool kPacked = MX_PACKED;  // aiter's ids
constexpr bool kQuantizes = MX_X != kNone;
using X = DType<kQuantizes ? MX_X : kF32>; // of the activations
#if MX_WIDE_IDS
using Id = long long;
#else
using Id = int;
#endif

constexpr int kThreads = kWaves * kLanes;
constexpr int kHeld = 4;                        // chunks of a wave whose experts stay in registers
constexpr int kScanned = kExperts / kLanes;     // experts of a lane in the scan
enum Map { kAll = 0, kNumbers = 1, kMask = 2 }; // what expert_map holds

struct Routing {
    const Id* topk_ids;
    const int* expert_map;
    int tokens, top_k, experts, shared, map_kind, drop_absent;

    MX_MEMBER int slots() const { return top_k + shared; }

    // The expert of routed row t, counted over all ranks and then the shared ones, or -1.
    MX_MEMBER int expert(int t) const {
        if (t >= tokens * slots())
            return -1;
        const int token = static_cast<unsigned>(t) / static_cast<unsigned>(slots());
        const int slot = t - token * slots();
        if (slot >= top_k)
            return experts + slot - top_k;
        const Id id = topk_ids[static_cast<long>(token) * top_k + slot];
        if (id < 0 || id >= experts)
            return -1;
        const int expert = static_cast<int>(id);
        if (drop_absent && map_kind != kAll) {
            const int mapped = expert_map[expert];
            if (map_kind == kMask ? mapped == 0 : mapped < 0)
                return -1;
        }
        return expert;
    }
};

// Lanes whose expert is the same as this lane's.
MX_DEVICE LaneMask same_expert(int expert) {
    LaneMask same = lanes_where(expert >= 0);
#pragma unroll
    for (int bit = 1; bit < kExperts; bit *= 2) {
        const LaneMask set = lanes_where(expert & bit);
        same &= expert & bit ? set : ~set;
    }
    return same;
}

// Sum of x over this lane and those before it.
MX_DEVICE int sum_so_far(int x, int lane) {
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) {
        const int before = of_lane(lane - distance, x);
        x += lane >= distance ? before : 0;
    }
    return x;
}

// Eight elements of one block, which 4 lanes hold together.
struct alignas(16) Piece {
    X values[8];
};
struct alignas(8) Payload {
    unsigned words[2];
};

MX_DEVICE float to_f32(float x) { return x; }

MX_DEVICE void quantize(const X* x, unsigned char* xq, unsigned char* xs, long elements,
                        int group) {
    const long i = static_cast<long>(group) * kThreads + thread_in_group();
    const bool is_inside = i * 8 < elements;
    Piece piece = {};
    if (is_inside)
        piece = reinterpret_cast<const Piece*>(x)[i];
    float v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j)
        v[j] = to_f32(piece.values[j]);
    const BlockScale scale = block_scale<E4M3, kRoundUp>(max_of_lanes<4>(amax_bits(v)));
    if (!is_inside)
        return;
    reinterpret_cast<Payload*>(xq)[i] = {{to_e4m3x4<kRoundUp>(v[0], v[1], v[2], v[3], scale),
                                          to_e4m3x4<kRoundUp>(v[4], v[5], v[6], v[7], scale)}};
    if (i % 4 == 0)
        xs[i / 4] = scale.byte;
}

MX_KERNEL(kThreads)
aiter_mx_moe_align(const Id* topk_ids, const float* topk_weights, const int* expert_map,
                   const int* num_tokens, const X* x, int* sorted_ids, float* sorted_weights,
                   int* expert_ids, int* post_padded, unsigned char* xq, unsigned char* xs,
                   long elements, int M, int top_k, int experts, int shared, int first_shared,
                   int map_kind, int drop_absent, int block_m, int max_ids, int max_blocks) {
    if (kQuantizes && group_x() > 0) {
        quantize(x, xq, xs, elements, static_cast<int>(group_x()) - 1);
        return;
    }
    const int lane = thread_in_group() % kLanes;
    const int wave = wave_in_group();
    MX_LDS int counts[kWaves][kExperts]; // then ids of the expert in waves and chunks before
    MX_LDS int totals[kExperts], firsts[kExperts], numbers[kExperts];
    MX_LDS int padded_total;

    int tokens = M;
    if (num_tokens)
        tokens = *num_tokens < 0 ? 0 : *num_tokens < M ? *num_tokens : M;
    const Routing routing{topk_ids, expert_map, tokens,   top_k,
                          experts,  shared,     map_kind, drop_absent};
    const int routed = tokens * routing.slots();
    const int chunks = (routed + kThreads - 1) / kThreads; // of each wave
    const int first_t = wave * chunks * kLanes + lane;
    int held[kHeld];
#pragma unroll
    for (int c = 0; c < kHeld; ++c)
        held[c] = c < chunks ? routing.expert(first_t + c * kLanes) : -1;

    for (int i = thread_in_group(); i < kWaves * kExperts; i += kThreads)
        counts[i / kExperts][i % kExperts] = 0;
    group_barrier();

    const auto count_chunk = [&](int expert) {
        const LaneMask same = same_expert(expert);
        if (expert >= 0 && lanes_before(same, lane) == 0)
            counts[wave][expert] += lanes_of(same);
        wave_in_order();
    };
#pragma unroll
    for (int c = 0; c < kHeld; ++c)
        if (c < chunks)
            count_chunk(held[c]);
    for (int c = kHeld; c < chunks; ++c)
        count_chunk(routing.expert(first_t + c * kLanes));
    group_barrier();

    for (int e = thread_in_group(); e < kExperts; e += kThreads) {
        int total = 0;
#pragma unroll
        for (int w = 0; w < kWaves; ++w) {
            const int count = counts[w][e];
            counts[w][e] = total;
            total += count;
        }
        totals[e] = total;
        int number = e;
        if (e >= experts)
            number = first_shared + e - experts;
        else if (map_kind != kAll)
            number = expert_map[e];
        numbers[e] = number;
    }
    group_barrier();

    if (wave == 0) {
        int ids = 0, present = 0;
#pragma unroll
        for (int i = 0; i < kScanned; ++i) {
            const int e = lane * kScanned + i;
            ids += (totals[e] + block_m - 1) / block_m * block_m;
            present += e < experts && numbers[e] != 0;
        }
        int first = sum_so_far(ids, lane) - ids;
        int number = sum_so_far(present, lane) - present;
#pragma unroll
        for (int i = 0; i < kScanned; ++i) {
            const int e = lane * kScanned + i;
            firsts[e] = first;
            first += (totals[e] + block_m - 1) / block_m * block_m;
            if (map_kind == kMask && e < experts) {
                const bool is_present = numbers[e] != 0;
                numbers[e] = is_present ? number : -1;
                number += is_present;
            }
        }
        if (lane == kLanes - 1) {
            padded_total = first;
            post_padded[0] = first;
            if (kPacked)
                post_padded[1] = tokens;
        }
    }
    group_barrier();

    const auto put = [&](int place, int id, float weight) {
        if (place < max_ids) {
            sorted_ids[place] = id;
            if (kPacked)
                sorted_weights[place] = weight;
        }
    };
    const auto place_chunk = [&](int t, int expert) {
        const LaneMask same = same_expert(expert);
        const int before = lanes_before(same, lane);
        int placed = 0;
        if (expert >= 0)
            placed = counts[wave][expert];
        wave_in_order();
        if (expert < 0)
            return;
        if (before == 0)
            counts[wave][expert] = placed + lanes_of(same);
        const int token = static_cast<unsigned>(t) / static_cast<unsigned>(routing.slots());
        const int slot = t - token * routing.slots();
        float weight = 1.0f; // of a shared expert
        if (kPacked && slot < top_k)
            weight = topk_weights[static_cast<long>(token) * top_k + slot];
        put(firsts[expert] + placed + before, kPacked ? slot << 24 | token : t, weight);
    };
#pragma unroll
    for (int c = 0; c < kHeld; ++c)
        if (c < chunks) {
            place_chunk(first_t + c * kLanes, held[c]);
            wave_in_order();
        }
    for (int c = kHeld; c < chunks; ++c) {
        place_chunk(first_t + c * kLanes, routing.expert(first_t + c * kLanes));
        wave_in_order();
    }

    const int padding = kPacked ? routing.slots() << 24 | M : M * routing.slots();
    for (int e = wave; e < experts + shared; e += kWaves) {
        const int first = firsts[e], total = totals[e];
        const int blocks = (total + block_m - 1) / block_m;
        for (int p = total + lane; p < blocks * block_m; p += kLanes)
            put(first + p, padding, 0.0f);
        for (int b = lane; b < blocks; b += kLanes)
            if (first / block_m + b < max_blocks)
                expert_ids[first / block_m + b] = numbers[e];
    }
    for (int p = padded_total + thread_in_group(); p < max_ids; p += kThreads)
        put(p, padding, 0.0f);
    for (int b = padded_total / block_m + thread_in_group(); b < max_blocks; b += kThreads)
        expert_ids[b] = -1;
}
