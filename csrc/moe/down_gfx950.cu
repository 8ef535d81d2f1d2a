// The second half of an expert layer of few tokens on CDNA4: aiter_mx/kernels/moe_down.py defines
// what it computes.
//
// A workgroup computes kRows features of a token. The k of all slots follow each other, and waves
// split them as linear/gemv.h splits K; a lane's 16 k are of one slot. All of h is asked for ahead
// of the ids; what nobody has written counts as zeros.
//
//   h of a token   |  slot 0, K values  |  slot 1  |  slot 2  | ...
//   step           |<-- 1024 k -->|<-- 1024 k -->|<-- 1024 k -->|

#include "slots_gfx950.h"

using namespace mx;

constexpr int kTopK = MX_TOP_K, kShared = MX_SHARED, kSlots = kTopK + kShared;
constexpr bool kDwords = MX_SCALE_DWORDS;  // K / 32 is a multiple of 4
constexpr bool kIsOneRound = MX_ONE_ROUND; // all of a wave's k are in its first steps

MX_KERNEL(kThreads)
aiter_mx_moe_down(const float* h, const Id* topk_ids, const float* topk_weights,
                  const int* expert_map, const int* num_tokens, const unsigned char* wq,
                  const unsigned char* ws, const void* bias, Out* out, Offset wide_n, Offset wide_k,
                  int experts, int here, int bias_kind) {
    unsigned token = group_y();
    asm(""
        : "+s"(token)
        : "s"(h), "s"(topk_weights), "s"(num_tokens), "s"(wq), "s"(ws), "s"(wide_n), "s"(wide_k),
          "s"(here)); // one wait for all arguments
    const unsigned N = wide_n, K = wide_k, blocks = K / kBlock, all = kSlots * K;
    const unsigned first_row = group_x() * kRows;
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
    int tokens = routing.tokens();
    finish_before_next();

    const Buffer values(
        reinterpret_cast<const unsigned char*>(h + static_cast<Offset>(token) * all),
        all * sizeof(float));
    const unsigned first = wave_in_group() * kStep;
    Values<kF32> x[kUnroll];
    const auto load_x = [&](unsigned step) {
#pragma unroll
        for (int i = 0; i < kUnroll; ++i)
            x[i].load(values, step + i * kStride + lane * kPiece);
        finish_before_next();
    };
    load_x(first); // under way while ids are

    each<kTopK>([&](auto s) { arrive_together(tokens, id[s.value], weight[s.value]); });
    const bool is_past = routing.is_past(token, tokens);
    int expert[kSlots]; // or -1
    each<kSlots>([&](auto s) {
        if constexpr (s.value < kTopK)
            expert[s.value] = routing.number(id[s.value], is_past);
        else
            expert[s.value] = routing.shared_expert(s.value, is_past);
        if (expert[s.value] < 0)
            weight[s.value] = 0.0f;
    });
    const Buffer w_rows(wq, here * N * K), w_scales(ws, here * N * blocks);

    // The word of p's slot; p counts the k of all slots.
    const auto of_slot = [&](unsigned p, auto word, unsigned beyond) {
        unsigned found = word(Constant<0>{});
        each<kSlots - 1>([&](auto before) {
            unsigned next = word(Constant<before.value + 1>{});
            // Else LLVM indexes the arrays by the lane's slot, in memory.
            asm("" : "+s"(next));
            found = p >= (before.value + 1) * K ? next : found;
        });
        return p < all ? found : beyond;
    };
    unsigned expert_bytes = N * K;
    asm("" : "+s"(expert_bytes)); // else LLVM multiplies twice for each slot
    // What leads from p to the first row's payload of p's k, or kNowhere.
    const auto rows_at = [&](unsigned p) {
        const auto of = [&](auto s) {
            const int number = expert[s.value];
            return number < 0 ? kNowhere : number * expert_bytes + (first_row - s.value) * K;
        };
        return of_slot(p, of, kNowhere);
    };
    const auto weight_at = [&](unsigned p) {
        asm("" : "+v"(p)); // compared anew: to keep what rows_at found takes two SGPRs a slot
        const auto of = [&](auto s) { return float_to_bits(weight[s.value]); };
        return bits_to_float(of_slot(p, of, 0));
    };

    float sums[kRows] = {};
    for (unsigned step = first; kIsOneRound || step < all; step += kUnroll * kStride) {
        if (step != first)
            load_x(step);
        Piece w[kUnroll][kRows];
        unsigned words[kUnroll][kScaleLoads];
        bool is_here[kUnroll];
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
            const unsigned p = step + i * kStride + lane * kPiece, rows = rows_at(p);
            const unsigned at = rows + p; // beyond every buffer still where rows is kNowhere
            is_here[i] = rows != kNowhere;
            if constexpr (kDwords) {
                // A 32nd of kNowhere is beyond the scales too, of fewer than 2^31 payloads.
                const unsigned p_of_dword = p - lane * kPiece + lane % kStepDwords * 4 * kBlock;
                const unsigned of_dword = (rows_at(p_of_dword) + p_of_dword) / kBlock;
#pragma unroll
                for (int j = 0; j < kScaleLoads; ++j) {
                    const unsigned r = j * kRowsOfLoad + lane / kStepDwords;
                    words[i][j] = w_scales.load_dword(r < kRows ? of_dword + r * blocks : kNowhere);
                }
            }
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                w[i][r].payload = w_rows.load_once(at, r * K);
                if constexpr (!kDwords)
                    w[i][r].scale = w_scales.load_byte(at / kBlock + r * blocks);
            }
            finish_before_next();
        }
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
            Piece x_piece[1] = {x[i].quantise()};
            if (!is_here[i]) // nobody has written x
                x_piece[0] = {};
            if constexpr (kDwords)
                for (int r = 0; r < kRows; ++r)
                    w[i][r].scale = scale_of_row(words[i], r, lane);
            const float weight = weight_at(step + i * kStride + lane * kPiece);
            float of_step[kRows] = {};
            const auto taken = [](int) {};
            accumulate_step(of_step, w[i], x_piece, taken, taken);
#pragma unroll
            for (int r = 0; r < kRows; ++r)
                sums[r] = mx::fma(of_step[r], weight, sums[r]);
            finish_before_next();
        }
        if (kIsOneRound)
            break;
    }
    MX_LDS float partial[kWaves][kRows];
    sum_lanes(sums, partial[wave_in_group()], lane);
    group_barrier();
    const unsigned own = thread_in_group(), n = first_row + own;
    if (own >= kRows || n >= N || is_past)
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
