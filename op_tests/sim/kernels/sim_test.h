// What the simulator's test kernels share: HIP's words without HIP's headers.
#pragma once
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long u64;
typedef u32 u32x2 __attribute__((ext_vector_type(2)));
typedef u32 u32x4 __attribute__((ext_vector_type(4)));
typedef int i32x8 __attribute__((ext_vector_type(8)));
typedef float f32x2 __attribute__((ext_vector_type(2)));
typedef float f32x4 __attribute__((ext_vector_type(4)));
typedef float f32x16 __attribute__((ext_vector_type(16)));

#define KERNEL(lanes)                                                                              \
    extern "C" __attribute__((global)) __attribute__((amdgpu_flat_work_group_size(1, lanes))) void
#define DEVICE static __attribute__((device))
#define SHARED __attribute__((shared))

DEVICE int lane_id() { return __builtin_amdgcn_workitem_id_x(); }
DEVICE int group_id() { return __builtin_amdgcn_workgroup_id_x(); }
DEVICE void barrier() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
