// Hopper's copies into shared memory and matrices from and to it, and what warp specialisation
// needs. Each function is one instruction of the PTX ISA manual.
#pragma once

#include "common/target.h"
#include "sm90/async.h"

namespace mx {

// Arrives at a barrier of any workgroup of the cluster, once this thread has what it loaded from
// shared memory, and its wgmmas are over. Nothing that it wrote is made visible: a release at the
// cluster's scope is a fence of all memory, which takes a thousand cycles.
MX_DEVICE void barrier_arrive_read(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Bytes to the same place in the workgroups of a cluster that the mask names, where the barrier in
// that workgroup counts them.
MX_DEVICE void copy_to_cluster(unsigned to, const void* from, unsigned bytes, unsigned barrier,
                               unsigned short mask) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".multicast::cluster [%0], [%1], %2, [%3], %4;" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier), "h"(mask)
                 : "memory");
}

// Four matrices of 8 rows of 16 bytes; lane 8i + r gives the address of row r of matrix i, lane
// 4g + t gets word t of row g.
MX_DEVICE void load_matrices(unsigned (&v)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "r"(address)
                 : "memory");
}
// Likewise of 16-bit values; lane 4g + t gives column g of rows 2t and 2t + 1.
MX_DEVICE void store_matrices_transposed(unsigned address, const unsigned (&v)[4]) {
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
        "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
        : "memory");
}
MX_DEVICE u32x4 load_shared_vector(unsigned address) {
    u32x4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.words[0]), "=r"(v.words[1]), "=r"(v.words[2]), "=r"(v.words[3])
                 : "r"(address)
                 : "memory");
    return v;
}

// Registers of each thread of this warpgroup from here on.
template <int Registers>
MX_DEVICE void increase_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers>
MX_DEVICE void decrease_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

// A value that the compiler keeps in a register, rather than compute it again at each use.
MX_DEVICE unsigned held(unsigned value) {
    asm volatile("" : "+r"(value));
    return value;
}

// Keeps uses of values that asynchronous instructions write after the wait for these.
template <int Count>
MX_DEVICE void keep_in_order(float (&values)[Count]) {
#pragma unroll
    for (int i = 0; i < Count; ++i)
        asm volatile("" : "+f"(values[i])::"memory");
}

// Two values to 16 bits each, the first in the lower half.
template <class T>
MX_DEVICE unsigned pack(float low, float high);
template <>
MX_MEMBER unsigned pack<bf16>(float low, float high) {
    unsigned packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}
template <>
MX_MEMBER unsigned pack<fp16>(float low, float high) {
    unsigned packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

// Stores two neighbours to memory if `exists` is not negative. One instruction: compilers make two
// of it where another branch has the two stores as well.
template <class T>
MX_DEVICE void store_pair(T* to, float first, float second, int exists) {
    if constexpr (sizeof(T) == 4)
        asm volatile("{\n"
                     ".reg .pred p;\n"
                     "setp.ge.s32 p, %3, 0;\n"
                     "@p st.global.v2.f32 [%0], {%1, %2};\n"
                     "}" ::"l"(to),
                     "f"(first), "f"(second), "r"(exists)
                     : "memory");
    else
        asm volatile("{\n"
                     ".reg .pred p;\n"
                     "setp.ge.s32 p, %2, 0;\n"
                     "@p st.global.u32 [%0], %1;\n"
                     "}" ::"l"(to),
                     "r"(pack<T>(first, second)), "r"(exists)
                     : "memory");
}

} // namespace mx
