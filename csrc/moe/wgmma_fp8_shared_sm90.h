// The layout of shared memory in wgmma_fp8_sm90.cu, a part of boxes_sm90.h.
#pragma once

namespace mx {

// Scales of a row come for so many chunks at a time, and lie in places for as many. Such a place is
// free again when slots of x are: with these many none is in use that is not.
constexpr int kScalePlacesOuter = (kSlots + 2 * kVectorChunks - 2) / kVectorChunks;

struct Shared {
    unsigned char ring[kGroups][kDepth][kStageBytes];
    unsigned char x[kSlots][kCols * kChunk]; // its pieces turned as those of w are
    // Scales of 4 blocks of x as bf16, then zeros: wgmma's B.
    alignas(16) unsigned x_factors[kSlots][kCols][4];
    alignas(16) unsigned x_scales[kScalePlacesOuter][kCols][kVectorChunks]; // as they are
    alignas(16) unsigned w_scales[kScalePlacesOuter][kRows][kVectorChunks];
    // What warps exchange where gate and up rows lie apart: sums, and whether rows have far scales.
    float traded[kHalves ? kGroups : 1][kGroupWarps][kHalves ? kCols / 4 + 1 : 1][kLanes];
    Entry queue[kEntries];
    unsigned amax[2][kGroups][kGroupWarps][kActivated ? kCols : 2];   // of a warp's features
    unsigned long long full[kGroups][kDepth], empty[kGroups][kDepth]; // barriers of w
    // Of x and all scales: have come; are ready; are not needed any more.
    unsigned long long arrived[kSlots], ready[kSlots], taken[kSlots];
    unsigned long long opened[kEntries], closed[kEntries]; // of the queue
};
static_assert(sizeof(Shared) <= MX_SHARED_BYTES,
              "the host gives too little shared memory: aiter_mx/kernels/moe_gemm/outer_sm90.py");

// By all threads.
MX_DEVICE void set_up_barriers(Shared& shared) {
    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < kDepth; ++i)
            for (int group = 0; group < kGroups; ++group) {
                barrier_init(shared_address(shared.full[group] + i), 1);
                barrier_init(shared_address(shared.empty[group] + i), kGroupWarps);
            }
#pragma unroll
        for (int i = 0; i < kSlots; ++i) {
            barrier_init(shared_address(shared.arrived + i), kLanes);
            barrier_init(shared_address(shared.ready + i), 1);
            barrier_init(shared_address(shared.taken + i), kAddWarps);
        }
#pragma unroll
        for (int i = 0; i < kEntries; ++i) {
            barrier_init(shared_address(shared.opened + i), 1);
            barrier_init(shared_address(shared.closed + i), kAddWarps);
        }
        fence_barrier_init();
    }
    group_barrier();
}

} // namespace mx
