// The second half of an expert layer of few tokens on CDNA4: aiter_mx/kernels/moe_down.py defines
// what it computes.
//
// A workgroup computes kRows features of a token. Its waves take turns at the steps of all slots,
// each of which has kSteps of its own. h is asked for ahead of the ids: what nobody has written is
// not used.

#include "slots_gfx950.h"

using namespace mx;

constexpr int kTopK = MX_TOP_K, kShared = MX_SHARED, kSlots = kTopK + kShared;
constexpr int kSteps = MX_STEPS, kAll = kSlots * kSteps;
constexpr int kRounds = (kAll + kWaves - 1) / kWaves;

// What a wave does in a round.
struct Share {
    bool is_any;
    int slot;
    unsigned k;
    bool is_shared;

    MX_MEMBER Share(int round, int wave) {
        const int number = round * kWaves + wave;
        is_any = (round + 1) * kWaves <= kAll || number < kAll;
        slot = is_any ? number / kSteps : 0;
        k = is_any ? number % kSteps * kStep : 0;
        is_shared = kShared > 0 && slot >= kTopK;
    }
};

MX_KERNEL(kThreads)
aiter_mx_moe_down(const float* h, const Id* topk_ids, const float* topk_weights,
                  const int* expert_map, const int* num_tokens, const unsigned char* wq,
                  const unsigned char* ws, const void* bias, Out* out, unsigned N, unsigned K,
                  int experts, int here, int bias_kind) {
    const unsigned token = group_y();
    const int lane = thread_in_group() % kLanes, wave = wave_in_group();
    const unsigned first_row = group_x() * kRows;
    const Routing routing{topk_ids, expert_map, num_tokens, kTopK, experts, kShared, here};
    int tokens = routing.tokens();

    Id ids[kRounds];
    float weights[kRounds];
    each<kRounds>([&](auto round) {
        const Share share(round.value, wave);
        const int of_routed = share.is_shared ? 0 : share.slot;
        ids[round.value] = routing.id(token, of_routed);
        weights[round.value] = topk_weights[token * kTopK + of_routed];
    });
    finish_before_next();
    const Lane own_lane(lane);
    finish_before_next(); // arguments are under way

    MX_LDS typename Values<kF32>::Room room[kWaves];
    MX_LDS Sums shared_sums;
    MX_LDS int expert_of[kRounds * kWaves];
    MX_LDS float weight_of[kRounds * kWaves];
    f32x4 sums[kRows] = {};
    bool is_past = false;
    each<kRounds>([&](auto round) {
        const Share share(round.value, wave);
        const int slot = share.slot;
        const unsigned k = share.k;
        Id id = ids[round.value];
        float weight = weights[round.value];
        const unsigned blocks = K / kBlock;
        const unsigned h_bytes = K * sizeof(float);
        const Buffer values(reinterpret_cast<const unsigned char*>(h) +
                                static_cast<Offset>(token * kSlots + slot) * h_bytes,
                            h_bytes);
        Values<kF32> x;
        x.load(values, k, lane);
        asm volatile("" ::"s"(bias), "s"(out), "s"(bias_kind)); // else LLVM loads them at the end
        const unsigned expert_bytes = N * K, expert_scales = N * blocks;
        const Places places(k, K, first_row + lane % 4, own_lane);
        finish_before_next();

        arrive_together(tokens, id, weight);
        is_past = routing.is_past(token, tokens);
        const int routed = routing.number(id, is_past);
        const int expert = share.is_shared ? routing.shared_expert(slot, is_past) : routed;
        const bool is_here = share.is_any && expert >= 0;
        weight = !is_here ? 0.0f : share.is_shared ? 1.0f : weight;
        const Offset number_here = is_here ? expert : 0;
        const Buffer w_rows(wq + number_here * expert_bytes, is_here ? expert_bytes : 0),
            w_scales(ws + number_here * expert_scales, is_here ? expert_scales : 0);
        Rows w;
        w.load(w_rows, w_scales, places, K, [&](int r) { return first_row + r; }, 4);
        expert_of[round.value * kWaves + wave] = expert; // whoever adds a bias asks for them
        weight_of[round.value * kWaves + wave] = weight;
        Factor factor = x.quantised(room[wave], lane, own_lane);
        if (!is_here) // x may be anything
            factor = {};
        finish_before_next();
        f32x4 products[kRows] = {};
        NanNotes nans[kWords];
        w.add_products(products, factor, nans, own_lane);
        if (are_any(nans))
            add_nans(products, nans);
#pragma unroll
        for (int r = 0; r < kRows; ++r)
            sums[r] = __builtin_elementwise_fma(products[r], f32x4{} + weight, sums[r]);
        finish_before_next();
    });
    shared_sums.put(sums, wave, own_lane);
    group_barrier();
    each_four_rows(wave, [&](int first) {
        const unsigned r = first + lane / kSide, n = first_row + r;
        float sum = shared_sums.take(first, own_lane);
        if (lane % kSide != 0 || r >= kRows || n >= N || is_past)
            return;
        if (bias_kind != kNone)
            each<kSlots>([&](auto s) {
                const int expert = expert_of[s.value * kSteps];
                const Offset at = static_cast<Offset>(expert) * N + n;
                if (expert >= 0)
                    sum = mx::fma(load_bias(bias, bias_kind, at), weight_of[s.value * kSteps], sum);
            });
        store(out + static_cast<Offset>(token) * N + n, sum);
    });
}
