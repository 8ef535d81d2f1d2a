// NVIDIA Hopper. Instructions are named as in the PTX ISA manual.
#pragma once

#define MX_DEVICE static __device__ __forceinline__
#define MX_MEMBER __device__ __forceinline__
#define MX_LDS __shared__
// A kernel that is launched with exactly so many threads a workgroup. Told that one workgroup an SM
// will do, ptxas keeps all loads before their use; else it saves registers by spreading them.
#define MX_KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads, 1)
// A kernel whose registers let so many workgroups share an SM.
#define MX_KERNEL_RESIDENT(threads, groups)                                                        \
    extern "C" __global__ void __launch_bounds__(threads, groups)

namespace mx {

struct f32x2 {
    float x, y;
};
struct u32x4 {
    unsigned words[4];
    MX_MEMBER unsigned operator[](int i) const { return words[i]; }
};
// Storage of the 16-bit formats; to_f32 and store convert.
struct bf16 {
    unsigned short bits;
};
struct fp16 {
    unsigned short bits;
};

constexpr int kLanes = 32;

MX_DEVICE int thread_in_group() { return threadIdx.x; }
MX_DEVICE int wave_in_group() { return threadIdx.x / kLanes; }
MX_DEVICE unsigned long group_x() { return blockIdx.x; }
MX_DEVICE unsigned long group_y() { return blockIdx.y; }
MX_DEVICE void group_barrier() { __syncthreads(); }
MX_DEVICE void group_memory_barrier() { __syncthreads(); }

// What lanes of a wave exchange through shared memory stays in the order of the source.
MX_DEVICE void wave_in_order() { __syncwarp(); }

// Of a launch that may start before the grid ahead of it in the stream ends: lets the next grid
// start, and waits for the one ahead. Nothing happens where a launch does not ask for it.
MX_DEVICE void launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
MX_DEVICE void wait_for_grid_ahead() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

MX_DEVICE void finish_before_next() {} // ptxas keeps registers low on its own

// Loads are volatile to the compiler so that they stay in the order of the source, before their
// use. 16 bytes that no one reads again: not kept in L1, fetched from memory in long bursts.
MX_DEVICE u32x4 load_once(const void* p) {
    u32x4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.words[0]), "=r"(v.words[1]), "=r"(v.words[2]), "=r"(v.words[3])
                 : "l"(p));
    return v;
}
// This one fetches lines of 128 bytes: where weights come from memory alone, reading takes up
// to 5 % less than with longer bursts.
MX_DEVICE u32x4 load_once_in_lines(const void* p) {
    u32x4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.words[0]), "=r"(v.words[1]), "=r"(v.words[2]), "=r"(v.words[3])
                 : "l"(p));
    return v;
}
// These could be ld.global.nc as well, but ptxas moves such loads down to their first use,
// where each waits for memory anew; relaxed ones it leaves ahead of it.
MX_DEVICE u32x4 load(const void* p) {
    u32x4 v;
    asm volatile("ld.relaxed.cta.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.words[0]), "=r"(v.words[1]), "=r"(v.words[2]), "=r"(v.words[3])
                 : "l"(p));
    return v;
}
MX_DEVICE unsigned load_byte(const unsigned char* p) {
    unsigned v;
    asm volatile("ld.relaxed.cta.global.u8 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}
MX_DEVICE unsigned load_word(const unsigned char* p) {
    unsigned v;
    asm volatile("ld.relaxed.cta.global.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}

MX_DEVICE void store_vector(void* p, const u32x4& v) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.words[0]),
                 "r"(v.words[1]), "r"(v.words[2]), "r"(v.words[3])
                 : "memory");
}

// Four e4m3 bytes to two pairs of floats, exactly; 0x7f and 0xff become NaN.
MX_DEVICE void e4m3x4_to_f32(unsigned word, f32x2& low, f32x2& high) {
    asm("{\n"
        ".reg .b16 low, high, a, b, c, d;\n"
        ".reg .b32 ab, cd;\n"
        "mov.b32 {low, high}, %4;\n"
        "cvt.rn.f16x2.e4m3x2 ab, low;\n"
        "cvt.rn.f16x2.e4m3x2 cd, high;\n"
        "mov.b32 {a, b}, ab;\n"
        "mov.b32 {c, d}, cd;\n"
        "cvt.f32.f16 %0, a;\n"
        "cvt.f32.f16 %1, b;\n"
        "cvt.f32.f16 %2, c;\n"
        "cvt.f32.f16 %3, d;\n"
        "}"
        : "=f"(low.x), "=f"(low.y), "=f"(high.x), "=f"(high.y)
        : "r"(word));
}

// Sum of products of 2 * Pairs floats.
template <int Pairs>
MX_DEVICE float dot(const f32x2 (&a)[Pairs], const f32x2 (&b)[Pairs]) {
    float sum = a[0].x * b[0].x;
    sum = fmaf(a[0].y, b[0].y, sum);
#pragma unroll
    for (int i = 1; i < Pairs; ++i) {
        sum = fmaf(a[i].x, b[i].x, sum);
        sum = fmaf(a[i].y, b[i].y, sum);
    }
    return sum;
}

MX_DEVICE float fma(float a, float b, float c) { return fmaf(a, b, c); }
MX_DEVICE float bits_to_float(unsigned bits) { return __uint_as_float(bits); }
MX_DEVICE unsigned float_to_bits(float x) { return __float_as_uint(x); }
MX_DEVICE float power_of_two(float x) { // subnormal results become 0
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
MX_DEVICE float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// x of lane `from`, modulo kLanes.
MX_DEVICE unsigned of_lane(int from, unsigned x) { return __shfl_sync(0xffffffffu, x, from); }

using LaneMask = unsigned; // a bit for each lane of a wave
MX_DEVICE LaneMask lanes_where(bool x) { return __ballot_sync(0xffffffffu, x); }
MX_DEVICE int lanes_of(LaneMask mask) { return __popc(mask); }
MX_DEVICE int lanes_before(LaneMask mask, int lane) { return __popc(mask & ((1u << lane) - 1)); }

template <int Distance>
MX_DEVICE float across(float x) {
    return __shfl_xor_sync(0xffffffffu, x, Distance);
}

// Lanes whose bit Distance is clear get a's sum over both sides of that bit, the others b's.
template <int Distance>
MX_DEVICE float fold(float a, float b) {
    const bool upper = thread_in_group() & Distance;
    return (upper ? b : a) + across<Distance>(upper ? a : b);
}

MX_DEVICE void store(float* p, float x) { *p = x; }
MX_DEVICE void store(bf16* p, float x) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(p->bits) : "f"(x)); }
MX_DEVICE void store(fp16* p, float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(p->bits) : "f"(x)); }
MX_DEVICE float to_f32(bf16 x) { return __uint_as_float(static_cast<unsigned>(x.bits) << 16); }
MX_DEVICE float to_f32(fp16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}

} // namespace mx
