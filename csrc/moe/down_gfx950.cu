// The second half of an expert layer of few tokens on CDNA4: aiter_mx/kernels/moe_down.py defines
// what it computes.
//
// A workgroup computes kRows features of a token. The k of all slots follow each other, and waves
// split them as linear/gemv.h splits K; a lane's 16 k are of one slot.
//
//   h of a token   |  slot 0, K values  |  slot 1  |  slot 2  | ...
//   step           |<-- 1024 k -->|<-- 1024 k -->|<-- 1024 k -->|

#include "slots_gfx950.h"

using namespace mx;

constexpr int kTopK = MX_TOP_K, kShared = MX_SHARED, kSlots = kTopK + kShared;
constexpr bool kDwords = MX_SCALE_DWORDS; // K / 32 is a multiple of 4

MX_KERNEL(kThreads)
aiter_mx_moe_down(const float* h, const Id* topk_ids, const float* topk_weights,
                  const int* expert_map, const int* num_tokens, const unsigned char* wq,
                  const unsigned char* ws, const void* bias, Out* out, Offset wide_n, Offset wide_k,
                  int experts, int here, int bias_kind) {
    const unsigned N = wide_n, K = wide_k, blocks = K / kBlock, all = kSlots * K;
    const unsigned token = group_y(), first_row = group_x() * kRows;
    const int lane = thread_in_group() % kLanes;
    const Routing routing{topk_ids, expert_map, num_tokens, kTopK, experts, kShared, here};
    Id id[kTopK];
    float weight[kSlots];
    each<kSlots>([&](auto s) {
        if constexpr (s.value < kTopK) {
            id[s.value] = routing.id(token, s.value);
            weight[s.value] = topk_weights[token * kTopK + s.value];
        } else {
            weight[s.value] = 1.0f;
        }
    });
    if (routing.is_past(token))
        return;
    int expert[kSlots]; // or -1
    each<kSlots>([&](auto s) {
        if constexpr (s.value < kTopK)
            expert[s.value] = routing.number(id[s.value]);
        else
            expert[s.value] = routing.shared_expert(s.value);
    });
    const Buffer values(
        reinterpret_cast<const unsigned char*>(h + static_cast<Offset>(token) * all),
        all * sizeof(float));
    const Buffer w_rows(wq, here * N * K), w_scales(ws, here * N * blocks);

    // A lane's place in a step: where its slot's expert has its rows, or -1, and its k.
    struct Place {
        int expert;
        unsigned k;
        float weight;
    };
    const auto place_of = [&](unsigned p) {
        Place place{expert[0], p, weight[0]};
        each<kSlots - 1>([&](auto before) {
            constexpr int s = before.value + 1;
            int of_slot = expert[s];
            float weight_of_slot = weight[s];
            // Else LLVM indexes the arrays by the lane's slot, in memory.
            asm("" : "+s"(of_slot), "+s"(weight_of_slot));
            const bool is_reached = p >= s * K;
            place.expert = is_reached ? of_slot : place.expert;
            place.weight = is_reached ? weight_of_slot : place.weight;
            place.k = is_reached ? p - s * K : place.k;
        });
        if (p >= all)
            place.expert = -1;
        if (place.expert < 0)
            place.weight = 0.0f;
        return place;
    };

    float sums[kRows] = {};
    for (unsigned first = wave_in_group() * kStep; first < all; first += kUnroll * kStride) {
        Values<kF32> x[kUnroll];
        Piece w[kUnroll][kRows];
        unsigned words[kUnroll][kScaleLoads];
        float weights[kUnroll];
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
            const unsigned p = first + i * kStride + lane * kPiece;
            const Place place = place_of(p);
            weights[i] = place.weight;
            x[i].load(values, place.expert < 0 ? kNowhere : p);
            if constexpr (kDwords) {
                // The lane whose payload is the first of this lane's dword has the same slot.
                const int from = lane % kStepDwords * kStepDwords;
                const int owner = of_lane(from, place.expert);
                const unsigned block = of_lane(from, place.k) / kBlock;
#pragma unroll
                for (int j = 0; j < kScaleLoads; ++j) {
                    const unsigned r = j * kRowsOfLoad + lane / kStepDwords;
                    const unsigned row = owner * N + first_row + r;
                    const bool is_any = owner >= 0 && r < kRows;
                    words[i][j] = w_scales.load_dword(is_any ? row * blocks + block : kNowhere);
                }
            }
            const unsigned row = place.expert * N + first_row;
            const unsigned at = place.expert < 0 ? kNowhere : row * K + place.k;
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                w[i][r].payload = w_rows.load_once(at, r * K);
                if constexpr (!kDwords)
                    w[i][r].scale = w_scales.load_byte(
                        place.expert < 0 ? kNowhere : (row + r) * blocks + place.k / kBlock);
            }
            finish_before_next();
        }
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
            const Piece x_piece[1] = {x[i].quantise()};
            if constexpr (kDwords)
                for (int r = 0; r < kRows; ++r)
                    w[i][r].scale = scale_of_row(words[i], r, lane);
            float of_step[kRows] = {};
            const auto taken = [](int) {};
            accumulate_step(of_step, w[i], x_piece, taken, taken);
#pragma unroll
            for (int r = 0; r < kRows; ++r)
                sums[r] = mx::fma(of_step[r], weights[i], sums[r]);
            finish_before_next();
        }
    }
    MX_LDS float partial[kWaves][kRows];
    sum_lanes(sums, partial[wave_in_group()], lane);
    group_barrier();
    const unsigned own = thread_in_group(), n = first_row + own;
    if (own >= kRows || n >= N)
        return;
    float sum = 0.0f;
#pragma unroll
    for (int v = 0; v < kWaves; ++v)
        sum += partial[v][own];
    if (bias_kind != kNone)
        each<kSlots>([&](auto s) {
            const Offset at = static_cast<Offset>(expert[s.value]) * N + n;
            if (expert[s.value] >= 0)
                sum = mx::fma(load_bias(bias, bias_kind, at), weight[s.value], sum);
        });
    store(out + static_cast<Offset>(token) * N + n, sum);
}
