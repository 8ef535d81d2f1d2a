// The first half of an expert layer of few tokens on CDNA4: aiter_mx/kernels/moe_up.py defines what
// it computes.
//
// A workgroup computes kFeatures activated features of one slot of a token, of as many gate rows
// and up rows of the expert's w. Its waves split K as in linear/gemv.h, and quantise x on their
// way.

#include "moe.h"
#include "slots_gfx950.h"

using namespace mx;

constexpr int kFeatures = kRows / 2;
constexpr bool kInterleaved = MX_INTERLEAVED; // gate and up rows alternate; else halves of w
constexpr bool kDwords = MX_SCALE_DWORDS;     // K / 32 is a multiple of 4

// Row r of the workgroup's in w, of which first is the first feature.
MX_DEVICE unsigned row_of(unsigned r, unsigned first, unsigned features) {
    if (kInterleaved)
        return 2 * first + r;
    return first + r + (r < kFeatures ? 0 : features - kFeatures);
}

MX_KERNEL(kThreads)
aiter_mx_moe_up(const Id* topk_ids, const int* expert_map, const int* num_tokens,
                const unsigned char* x, const unsigned char* xs, const unsigned char* wq,
                const unsigned char* ws, const void* bias, float* h, Offset wide_n, Offset wide_k,
                int top_k, int experts, int shared, int here, int bias_kind, float alpha,
                float beta, float limit) {
    unsigned token = group_z();
    asm("" : "+s"(token) : "s"(x), "s"(wq), "s"(ws), "s"(wide_n), "s"(wide_k), "s"(here));
    const unsigned N = wide_n, K = wide_k, blocks = K / kBlock, features = N / 2;
    const int slot = group_y();
    const unsigned t = token * (top_k + shared) + slot;
    const Routing routing{topk_ids, expert_map, num_tokens, top_k, experts, shared, here};
    const bool is_shared = slot >= top_k;
    Id id = routing.id(token, is_shared ? 0 : slot);
    int tokens = routing.tokens();
    finish_before_next();
    const unsigned first_feature = group_x() * kFeatures;
    const int lane = thread_in_group() % kLanes;
    const Buffer values(x + static_cast<Offset>(token) * K * Values<MX_X>::kBytes,
                        K * Values<MX_X>::kBytes);
    const Buffer x_scales(xs + token * blocks, kQuantises ? 0 : blocks);

    Values<MX_X> x_now[kUnroll];
    unsigned x_scale[kUnroll];
    const unsigned first = wave_in_group() * kStep;
    const auto place = [&](int i, unsigned k) {
        const unsigned own = k + i * kStride + lane * kPiece;
        return own < K ? own : kNowhere;
    };
    const auto load_x = [&](unsigned k) {
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
            x_now[i].load(values, place(i, k));
            if constexpr (!kQuantises)
                x_scale[i] = x_scales.load_byte(place(i, k) / kBlock);
        }
        finish_before_next();
    };
    load_x(first); // under way while ids are

    asm("" : "+s"(id), "+s"(tokens)); // one wait for both
    const bool is_past = routing.is_past(token, tokens);
    const int routed = routing.number(id, is_past);
    const int expert = is_shared ? routing.shared_expert(slot, is_past) : routed;
    if (expert < 0)
        return;
    const Offset expert_row = static_cast<Offset>(expert) * N;
    const Buffer w_rows(wq + expert_row * K, N * K), w_scales(ws + expert_row * blocks, N * blocks);

    unsigned scales_at[kScaleLoads]; // of this lane's dwords
#pragma unroll
    for (int i = 0; i < kScaleLoads; ++i) {
        const unsigned r = i * kRowsOfLoad + lane / kStepDwords;
        scales_at[i] = r < kRows ? row_of(r, first_feature, features) * blocks : kNowhere;
    }
    float sums[kRows] = {};
    for (unsigned k = first; k < K; k += kUnroll * kStride) {
        if (k != first)
            load_x(k);
        Piece w[kUnroll][kRows];
        unsigned words[kUnroll][kScaleLoads];
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
            const unsigned at = place(i, k);
            const unsigned block = (k + i * kStride) / kBlock + lane % kStepDwords * 4;
            if constexpr (kDwords)
#pragma unroll
                for (int j = 0; j < kScaleLoads; ++j)
                    words[i][j] =
                        w_scales.load_dword(block < blocks ? scales_at[j] + block : kNowhere);
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                const unsigned row = row_of(r, first_feature, features);
                w[i][r].payload = w_rows.load_once(at, row * K);
                if constexpr (!kDwords)
                    w[i][r].scale =
                        w_scales.load_byte(at < K ? row * blocks + at / kBlock : kNowhere);
            }
            finish_before_next();
        }
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
            Piece x_piece[1];
            if constexpr (kQuantises)
                x_piece[0] = x_now[i].quantise();
            else
                x_piece[0] = {x_now[i].pieces[0], x_scale[i]};
            if constexpr (kDwords)
                for (int r = 0; r < kRows; ++r)
                    w[i][r].scale = scale_of_row(words[i], r, lane);
            const auto taken = [](int) {};
            accumulate_step(sums, w[i], x_piece, taken, taken);
            finish_before_next();
        }
    }
    MX_LDS float partial[kWaves][kRows];
    sum_lanes(sums, partial[wave_in_group()], lane);
    group_barrier();
    const unsigned own = thread_in_group(), feature = first_feature + own;
    if (own >= kFeatures || feature >= features)
        return;
    const auto sum = [&](unsigned r) {
        float sum = 0.0f;
#pragma unroll
        for (int v = 0; v < kWaves; ++v)
            sum += partial[v][r];
        return sum + load_bias(bias, bias_kind, expert_row + row_of(r, first_feature, features));
    };
    const float gate = sum(kInterleaved ? 2 * own : own);
    const float up = sum(kInterleaved ? 2 * own + 1 : own + kFeatures);
    const ActivationArgs args{alpha, beta, limit};
    h[static_cast<Offset>(t) * features + feature] = activate<MX_ACTIVATION>(gate, up, args);
}
