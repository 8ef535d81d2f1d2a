// As much of HIP as the device code of published kernels asks of its headers.

#pragma once

#include <cstddef>
#include <cstdint>

#define __host__ __attribute__((host))
#define __device__ __attribute__((device))
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#define __constant__ __attribute__((constant))
#define __forceinline__ inline __attribute__((always_inline))

#define LANES(most) __attribute__((amdgpu_flat_work_group_size(1, most)))
#define LANES_AND_WAVES(most, waves) LANES(most) __attribute__((amdgpu_waves_per_eu(waves)))
#define PICK_THIRD(first, second, third, ...) third
#define __launch_bounds__(...) PICK_THIRD(__VA_ARGS__, LANES_AND_WAVES, LANES)(__VA_ARGS__)

using hipStream_t = struct Stream*;
using hipError_t = int;

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};

// An index whose parts are read from registers, as threadIdx.x is.
#define INDEX(name, of_x, of_y, of_z)                                                              \
    struct name##_t {                                                                              \
        struct {                                                                                   \
            __device__ operator unsigned() const { return of_x; }                                  \
        } x;                                                                                       \
        struct {                                                                                   \
            __device__ operator unsigned() const { return of_y; }                                  \
        } y;                                                                                       \
        struct {                                                                                   \
            __device__ operator unsigned() const { return of_z; }                                  \
        } z;                                                                                       \
    };                                                                                             \
    extern const __device__ __attribute__((weak)) name##_t name;

#define SIZE(of, axis) __builtin_amdgcn_##of##_size_##axis()
INDEX(threadIdx, __builtin_amdgcn_workitem_id_x(), __builtin_amdgcn_workitem_id_y(),
      __builtin_amdgcn_workitem_id_z())
INDEX(blockIdx, __builtin_amdgcn_workgroup_id_x(), __builtin_amdgcn_workgroup_id_y(),
      __builtin_amdgcn_workgroup_id_z())
INDEX(blockDim, SIZE(workgroup, x), SIZE(workgroup, y), SIZE(workgroup, z))
INDEX(gridDim, SIZE(grid, x) / SIZE(workgroup, x), SIZE(grid, y) / SIZE(workgroup, y),
      SIZE(grid, z) / SIZE(workgroup, z))

__device__ inline void __syncthreads() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

__device__ inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

__device__ inline int __shfl(int value, int lane) {
    return __builtin_amdgcn_ds_bpermute(lane << 2, value);
}

__device__ inline float __shfl_xor(float value, int mask) {
    const int lane = __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0));
    return __builtin_bit_cast(float, __shfl(__builtin_bit_cast(int, value), lane ^ mask));
}

template <typename T>
__host__ __device__ constexpr T min(T a, T b) {
    return a < b ? a : b;
}

template <typename T>
__host__ __device__ constexpr T max(T a, T b) {
    return a > b ? a : b;
}

#undef assert
#define assert(condition) ((void)0)
