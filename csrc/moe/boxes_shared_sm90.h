// The layout of shared memory in wgmma_f16_sm90.cu, a part of
// boxes_sm90.h.
#pragma once

namespace mx {

struct Shared {
    unsigned char ring[kGroups][kDepth][kStageBytes];
    unsigned char x[kSlots][kPieces * kStepBytes];
    unsigned char fetched[kAhead][kCols][kChunk]; // x, as it is
    alignas(16) unsigned fetched_scales[kScalePlaces][kCols][kScaleChunks];
    // Of a row of w: bytes of factors, and its power of two.
    uint2 factors[kGroups][kDepth][kGroupRows];
    Entry queue[kEntries];
    unsigned amax[2][kGroups][kGroupWarps][kActivated ? kCols : 2];   // of a warp's features
    unsigned long long full[kGroups][kDepth], empty[kGroups][kDepth]; // barriers of w
    unsigned long long arrived[kAhead], drained[kAhead];              // of x as fetched
    unsigned long long ready[kSlots], taken[kSlots];                  // of x
    unsigned long long opened[kEntries], closed[kEntries];            // of the queue
};
static_assert(
    sizeof(Shared) <= MX_SHARED_BYTES,
    "the host gives too little shared memory: aiter_mx/kernels/moe_gemm/wgmma_f16_sm90.py");

// By all threads.
MX_DEVICE void set_up_barriers(Shared& shared) {
    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < kDepth; ++i) {
            for (int group = 0; group < kGroups; ++group) {
                barrier_init(shared_address(shared.full[group] + i), 2); // copies, factors
                barrier_init(shared_address(shared.empty[group] + i), kGroupWarps);
            }
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            barrier_init(shared_address(shared.arrived + i), kFetchWarps * kLanes);
            barrier_init(shared_address(shared.drained + i), kGroupWarps);
        }
#pragma unroll
        for (int i = 0; i < kSlots; ++i) {
            barrier_init(shared_address(shared.ready + i), kGroupWarps);
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
