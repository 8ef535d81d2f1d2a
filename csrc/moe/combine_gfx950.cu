// The kernel of combine.h on CDNA4. A workgroup has features of one token, so that what it looks up
// of the routing are scalar loads; combine_sm90.cu has lanes do it.

#include "combine.h"

using namespace mx;

constexpr int kWidth = 4; // features of a thread; N is a multiple of it

struct alignas(sizeof(Y) * kWidth) Piece {
    Y values[kWidth];
};

MX_KERNEL(kMaxThreads)
aiter_mx_moe_combine(const Y* y, const int* places, const Id* topk_ids, const float* weights,
                     const int* expert_map, const int* num_tokens, Out* out, long N, int M,
                     int experts, int threads) {
    const long n = (static_cast<long>(group_x()) * threads + thread_in_group()) * kWidth;
    if (n >= N)
        return;
    const int tokens = num_tokens && *num_tokens < M ? *num_tokens : M;
    for (long token = group_y(); token < tokens; token += kMaxGroupsY) {
        Piece pieces[kSlots];
        float factors[kSlots];
        bool is_here[kSlots];
        [[maybe_unused]] int rows[kSlots]; // of y
        const auto load = [&](int s) {
            const long row = kSorted ? rows[s] : token * kSlots + s;
            return *reinterpret_cast<const Piece*>(y + row * N + n);
        };
#pragma unroll
        for (int s = 0; s < kSlots; ++s) {
            is_here[s] = true;
            factors[s] = 1.0f;
            if (s < kTopK) {
                const Id id = topk_ids[token * kTopK + s];
                is_here[s] = id >= 0 && id < experts;
                if (is_here[s] && expert_map)
                    is_here[s] = expert_map[id] >= 0;
                factors[s] = weights[token * kTopK + s];
            }
            if (!kSorted && is_here[s])
                pieces[s] = load(s);
        }
        if constexpr (kSorted) {
#pragma unroll
            for (int s = 0; s < kSlots; ++s) {
                rows[s] = places[token * kSlots + s]; // anything where the expert is not here
                is_here[s] &= rows[s] >= 0;
            }
        }
#pragma unroll
        for (int s = 0; s < kSlots; ++s)
            if (kSorted && is_here[s])
                pieces[s] = load(s);
        float sums[kWidth] = {};
#pragma unroll
        for (int s = 0; s < kSlots; ++s)
            if (is_here[s])
#pragma unroll
                for (int i = 0; i < kWidth; ++i)
                    sums[i] = mx::fma(to_f32(pieces[s].values[i]), factors[s], sums[i]);
#pragma unroll
        for (int i = 0; i < kWidth; ++i)
            store(out + token * N + n + i, sums[i]);
    }
}
