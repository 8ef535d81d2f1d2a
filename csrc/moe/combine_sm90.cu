// The kernel of combine.h on Hopper. A lane looks up the routing of a slot for its warp: if all
// did, it would take as many loads as the rows.

#include "combine.h"

using namespace mx;

// Workgroups that share an SM, where registers hold the rows of all slots.
constexpr int kResident = kSlots <= 8 ? 4 : 1;
constexpr int kWidth = MX_WIDTH; // features of a thread; N is a multiple of it

template <class T>
struct alignas(sizeof(T) * kWidth < 16 ? sizeof(T) * kWidth : 16) Piece {
    T values[kWidth];
};

MX_KERNEL_RESIDENT(kMaxThreads, kResident)
aiter_mx_moe_combine(const Y* y, const int* places, const Id* topk_ids, const float* weights,
                     const int* expert_map, const int* num_tokens, Out* out, long N, int M,
                     int experts, int threads) {
    const int lane = thread_in_group() % kLanes;
    const long n = (static_cast<long>(group_x()) * threads + thread_in_group()) * kWidth;
    // N is whole pieces, so that all rows begin as the first one does.
    const bool is_aligned = reinterpret_cast<unsigned long>(out) % alignof(Piece<Out>) == 0;
    const int tokens = num_tokens && *num_tokens < M ? *num_tokens : M;
    for (long token = group_y(); token < tokens; token += kMaxGroupsY) {
        bool is_own_here = lane < kSlots;
        float own_factor = 1.0f;
        if (lane < kTopK) {
            const Id id = topk_ids[token * kTopK + lane];
            is_own_here = id >= 0 && id < experts;
            if (is_own_here && expert_map)
                is_own_here = expert_map[id] >= 0;
            own_factor = weights[token * kTopK + lane];
        }
        if (token == static_cast<long>(group_y())) { // the routing is older than the launch ahead
            wait_for_grid_ahead();
            launch_dependents();
        }
        int own_row = -1; // of y, negative for none
        if (is_own_here)  // else places has anything
            own_row = kSorted ? places[token * kSlots + lane] : token * kSlots + lane;
        unsigned here = 0; // a bit for each slot
        Piece<Y> pieces[kSlots];
#pragma unroll
        for (int s = 0; s < kSlots; ++s) {
            const int row = of_lane(s, own_row);
            here |= row >= 0 && n < N ? 1u << s : 0;
            if (here >> s & 1)
                pieces[s] = *reinterpret_cast<const Piece<Y>*>(y + row * N + n);
        }
        float sums[kWidth] = {};
#pragma unroll
        for (int s = 0; s < kSlots; ++s) {
            const float factor = bits_to_float(of_lane(s, float_to_bits(own_factor)));
            if (here >> s & 1)
#pragma unroll
                for (int i = 0; i < kWidth; ++i)
                    sums[i] = mx::fma(to_f32(pieces[s].values[i]), factor, sums[i]);
        }
        if (n >= N)
            continue;
        Piece<Out> result;
#pragma unroll
        for (int i = 0; i < kWidth; ++i)
            store(&result.values[i], sums[i]);
        Out* own = out + token * N + n;
        if (is_aligned)
            *reinterpret_cast<Piece<Out>*>(own) = result;
        else
#pragma unroll
            for (int i = 0; i < kWidth; ++i)
                own[i] = result.values[i];
    }
}
