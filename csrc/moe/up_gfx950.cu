// The first half of an expert layer of few tokens on CDNA4: aiter_mx/kernels/moe_up.py defines what
// it computes.
//
// A workgroup computes kFeatures activated features of one slot of a token, of as many gate rows
// and up rows of the expert's w, which take turns. Its waves split K, and quantise x on their way.

#include "moe.h"
#include "slots_gfx950.h"

using namespace mx;

constexpr int kFeatures = kRows / 2;
constexpr bool kInterleaved = MX_INTERLEAVED; // gate and up rows alternate in w; else halves
constexpr int kTopK = MX_TOP_K, kShared = MX_SHARED, kSlots = kTopK + kShared;
constexpr bool kQuantises = MX_X != kNone; // else x comes quantised
constexpr bool kOnce = MX_ONCE;            // a wave has one step

// Row r of the workgroup's in w, of which first is the first feature.
MX_DEVICE unsigned row_of(unsigned r, unsigned first, unsigned features) {
    return kInterleaved ? 2 * first + r : first + r / 2 + r % 2 * features;
}

MX_KERNEL(kThreads)
aiter_mx_moe_up(const Id* topk_ids, const int* expert_map, const int* num_tokens,
                const unsigned char* x, const unsigned char* xs, const unsigned char* wq,
                const unsigned char* ws, const void* bias, float* h, unsigned N, unsigned K,
                int experts, int here, int bias_kind, float alpha, float beta, float limit) {
    const unsigned token = group_z();
    const int slot = group_y();
    const Routing routing{topk_ids, expert_map, num_tokens, kTopK, experts, kShared, here};
    const bool is_shared = kShared > 0 && slot >= kTopK;
    Id id = routing.id(token, is_shared ? 0 : slot);
    int tokens = routing.tokens();
    finish_before_next();
    const int lane = thread_in_group() % kLanes, wave = wave_in_group();
    const unsigned first_feature = group_x() * kFeatures, first = wave * kStep;
    const Lane own_lane(lane);
    finish_before_next(); // arguments are under way

    const unsigned blocks = K / kBlock, features = N / 2;
    const unsigned x_bytes = kQuantises ? Values<MX_X>::kBytes : 1;
    const Buffer values(x + static_cast<Offset>(token) * (K * x_bytes), K * x_bytes);
    const Buffer x_scales(xs + token * blocks, kQuantises ? 0 : blocks);
    Values<MX_X> x_now;
    u32x4 x_payload[kHalves];
    unsigned x_scale = 0;
    const auto load_x = [&](unsigned k) {
        if constexpr (kQuantises) {
            x_now.load(values, k, lane);
        } else {
#pragma unroll
            for (int half = 0; half < kHalves; ++half)
                x_payload[half] = values.load(k + own_lane.pieces[half]);
            x_scale = x_scales.load_byte(k / kBlock + lane % (kStep / kBlock));
        }
        finish_before_next();
    };
    load_x(first); // under way while ids are
    const auto row = [&](unsigned r) { return row_of(r, first_feature, features); };
    const auto places_of = [&](unsigned k) { return Places(k, K, row(lane % 4), own_lane); };
    Places places = places_of(first);
    const unsigned expert_bytes = N * K, expert_scales = N * blocks;
    const bool has_bias = bias_kind != kNone;
    // Else LLVM loads them where they are used, at the end.
    asm volatile("" ::"s"(bias), "s"(h), "s"(bias_kind), "s"(alpha), "s"(beta), "s"(limit));
    finish_before_next();

    asm("" : "+s"(id), "+s"(tokens)); // one wait for both
    const bool is_past = routing.is_past(token, tokens);
    const int routed = routing.number(id, is_past);
    const int expert = is_shared ? routing.shared_expert(slot, is_past) : routed;
    if (expert < 0)
        return;
    const Buffer w_rows(wq + static_cast<Offset>(expert) * expert_bytes, expert_bytes),
        w_scales(ws + static_cast<Offset>(expert) * expert_scales, expert_scales);

    f32x4 sums[kRows] = {};
    NanNotes nans[kWords], x_nans;
    MX_LDS typename Values<MX_X>::Room room[kWaves];
    MX_LDS Sums shared_sums;
    for (unsigned k = first; kOnce || k < K; k += kWaves * kStep) {
        if (!kOnce && k != first) {
            load_x(k);
            places = places_of(k);
        }
        Rows w;
        w.load(w_rows, w_scales, places, K, row, kInterleaved ? 4 : 2);
        Factor factor;
        if constexpr (kQuantises) {
            factor = x_now.quantised(room[wave], lane, own_lane);
        } else {
            factor = factor_of(x_payload, x_scale);
            x_nans.take(factor.scales);
        }
        finish_before_next();
        w.add_products(sums, factor, nans, own_lane);
        if (kOnce)
            break;
        finish_before_next();
    }
    if constexpr (!kQuantises)
        for (NanNotes& notes : nans)
            notes.bits |= x_nans.in_wave() ? 0x80808080 : 0;
    if (are_any(nans))
        add_nans(sums, nans);
    shared_sums.put(sums, wave, own_lane);
    group_barrier();
    each_four_rows(wave, [&](int first_row) {
        // Both rows of a feature are in groups that follow each other.
        const unsigned r = first_row + lane / kSide;
        float gate = shared_sums.take(first_row, own_lane);
        float up = bits_to_float(swap<kSide>(gate, gate)[1]);
        const unsigned feature = first_feature + r / 2;
        if (lane % (2 * kSide) != 0 || r >= kRows || feature >= features)
            return;
        if (has_bias) {
            const Offset expert_row = static_cast<Offset>(expert) * N;
            gate += load_bias(bias, bias_kind, expert_row + row(r));
            up += load_bias(bias, bias_kind, expert_row + row(r + 1));
        }
        const ActivationArgs args{alpha, beta, limit};
        const Offset t = token * kSlots + slot;
        h[t * features + feature] = activate<MX_ACTIVATION>(gate, up, args);
    });
}
