// AMD CDNA4. Instructions are named as in the CDNA4 ISA manual.
#pragma once

#define MX_DEVICE static __attribute__((device, always_inline)) inline
#define MX_MEMBER __attribute__((device, always_inline)) inline
#define MX_LDS __attribute__((shared))
// A kernel that is launched with exactly so many threads a workgroup.
#define MX_KERNEL(threads)                                                                         \
    extern "C" __attribute__((global, amdgpu_flat_work_group_size(threads, threads))) void
// A kernel whose registers let so many workgroups share a compute unit of four SIMDs.
#define MX_KERNEL_RESIDENT(threads, groups)                                                        \
    extern "C" __attribute__((global, amdgpu_flat_work_group_size(threads, threads),               \
                              amdgpu_waves_per_eu((threads) * (groups) / (4 * 64)))) void

namespace mx {

using f32x2 = float __attribute__((ext_vector_type(2)));
using u32x4 = unsigned __attribute__((ext_vector_type(4)));
using bf16 = __bf16;
using fp16 = _Float16;

constexpr int kLanes = 64;

// A number as a type: what a generic lambda can be told.
template <int Value>
struct Constant {
    static constexpr int value = Value;
};

template <class T, T... I>
struct Sequence {};
template <class Do, int... I>
MX_DEVICE void each_of(Do work, Sequence<int, I...>) {
    (work(Constant<I>{}), ...);
}
// work(Constant<0>), ..., work(Constant<Count - 1>): LLVM unrolls loops too late to see that arrays
// are indexed by constants alone, and puts them into memory.
template <int Count, class Do>
MX_DEVICE void each(Do work) {
    each_of(work, __make_integer_seq<Sequence, int, Count>{});
}

MX_DEVICE int thread_in_group() { return __builtin_amdgcn_workitem_id_x(); }
MX_DEVICE int wave_in_group() {
    return __builtin_amdgcn_readfirstlane(__builtin_amdgcn_workitem_id_x() / kLanes);
}
MX_DEVICE unsigned long group_x() { return __builtin_amdgcn_workgroup_id_x(); }
MX_DEVICE unsigned long group_y() { return __builtin_amdgcn_workgroup_id_y(); }
MX_DEVICE unsigned long group_z() { return __builtin_amdgcn_workgroup_id_z(); }
MX_DEVICE void launch_dependents() {} // a launch here always waits for the one before
MX_DEVICE void wait_for_grid_ahead() {}
MX_DEVICE void group_barrier() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup", "local");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup", "local");
}
// Orders the workgroup's accesses to memory too, not to LDS alone. The compiler trusts waves of one
// compute unit to reach memory in order and waits for nothing; this does not.
MX_DEVICE void group_memory_barrier() {
    constexpr int no_vmcnt = 0x0f70; // ISA manual, section 4.4: only vmcnt is waited for
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_waitcnt(no_vmcnt);
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

// What lanes of a wave exchange through LDS stays in the order of the source. It costs nothing.
MX_DEVICE void wave_in_order() {
    __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront", "local");
    __builtin_amdgcn_wave_barrier();
}

// The compiler may move no instruction across this.
MX_DEVICE void finish_before_next() { __builtin_amdgcn_sched_barrier(0); }

// 16 bytes that no one reads again: marked non-temporal, so that they leave the caches first.
MX_DEVICE u32x4 load_once(const void* p) {
    return __builtin_nontemporal_load(static_cast<const u32x4*>(p));
}
MX_DEVICE u32x4 load_once_in_lines(const void* p) { return load_once(p); }
MX_DEVICE u32x4 load(const void* p) { return *static_cast<const u32x4*>(p); }
MX_DEVICE unsigned load_byte(const unsigned char* p) { return *p; }

// Four e4m3 bytes to two pairs of floats, exactly; 0x7f and 0xff become NaN.
MX_DEVICE void e4m3x4_to_f32(unsigned word, f32x2& low, f32x2& high) {
    low = __builtin_amdgcn_cvt_pk_f32_fp8(word, false);
    high = __builtin_amdgcn_cvt_pk_f32_fp8(word, true);
}

// Sum of products of 2 * Pairs floats: v_pk_fma_f32 does two a lane.
template <int Pairs>
MX_DEVICE float dot(const f32x2 (&a)[Pairs], const f32x2 (&b)[Pairs]) {
    f32x2 sum = a[0] * b[0];
    for (int i = 1; i < Pairs; ++i)
        sum = __builtin_elementwise_fma(a[i], b[i], sum);
    float total; // as assembly, because LLVM would pair two such sums with three moves
    asm("v_add_f32 %0, %1, %2" : "=v"(total) : "v"(sum.x), "v"(sum.y));
    return total;
}

MX_DEVICE unsigned min(unsigned a, unsigned b) { return __builtin_elementwise_min(a, b); }
MX_DEVICE unsigned max(unsigned a, unsigned b) { return __builtin_elementwise_max(a, b); }
MX_DEVICE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
MX_DEVICE float bits_to_float(unsigned bits) { return __builtin_bit_cast(float, bits); }
MX_DEVICE unsigned float_to_bits(float x) { return __builtin_bit_cast(unsigned, x); }
MX_DEVICE float power_of_two(float x) {
    return __builtin_amdgcn_exp2f(x);
} // subnormal results become 0
MX_DEVICE float reciprocal(float x) { return __builtin_amdgcn_rcpf(x); }

// x of lane `from`, modulo kLanes.
MX_DEVICE unsigned of_lane(int from, unsigned x) {
    return __builtin_amdgcn_ds_bpermute(4 * from, x);
}

using LaneMask = unsigned long; // a bit for each lane of a wave
MX_DEVICE LaneMask lanes_where(bool x) { return __builtin_amdgcn_ballot_w64(x); }
MX_DEVICE int lanes_of(LaneMask mask) { return __builtin_popcountl(mask); }
MX_DEVICE int lanes_before(LaneMask mask, int lane) {
    return __builtin_popcountl(mask & ((1ul << lane) - 1));
}

// x of the lane that differs in the bit Distance. For 8 and 4 the mirror and half mirror of DPP
// also reverse the lanes below that bit: as good for a sum whose lower lanes are still to be added.
template <int Distance>
MX_DEVICE float across(float x) {
    constexpr int control = Distance == 8   ? 0x140 // row_mirror
                            : Distance == 4 ? 0x141 // row_half_mirror
                            : Distance == 2 ? 0x4e  // quad_perm [2,3,0,1]
                                            : 0xb1; // quad_perm [1,0,3,2]
    return bits_to_float(__builtin_amdgcn_mov_dpp(float_to_bits(x), control, 0xf, 0xf, true));
}

template <int Distance>
MX_DEVICE auto swap(float a, float b) {
    if constexpr (Distance == 32)
        return __builtin_amdgcn_permlane32_swap(float_to_bits(a), float_to_bits(b), false, false);
    else
        return __builtin_amdgcn_permlane16_swap(float_to_bits(a), float_to_bits(b), false, false);
}

// Lanes whose bit Distance is clear get a's sum over both sides of that bit, the others b's.
template <int Distance>
MX_DEVICE float fold(float a, float b) {
    if constexpr (Distance >= 16) {
        const auto halves = swap<Distance>(a, b);
        return bits_to_float(halves[0]) + bits_to_float(halves[1]);
    } else {
        const bool upper = thread_in_group() & Distance;
        return (upper ? b : a) + across<Distance>(upper ? a : b);
    }
}

MX_DEVICE void store(float* p, float x) { *p = x; }
MX_DEVICE void store(bf16* p, float x) { *p = static_cast<bf16>(x); }
MX_DEVICE void store(fp16* p, float x) { *p = static_cast<fp16>(x); }
MX_DEVICE float to_f32(bf16 x) { return static_cast<float>(x); }
MX_DEVICE float to_f32(fp16 x) { return static_cast<float>(x); }

} // namespace mx
