// Accesses to memory and shared memory by single instructions of the PTX ISA manual: what
// workgroups of one launch tell each other through memory, and warps through shared memory.
// Addresses of shared memory are 32 bits wide.
#pragma once

#include "common/target.h"

namespace mx {

// Sets bits after all that this thread wrote, and has seen others write, is visible.
MX_DEVICE void set_bits_release(unsigned long long* p, unsigned long long bits) {
    asm volatile("red.release.gpu.global.or.b64 [%0], %1;" ::"l"(p), "l"(bits) : "memory");
}
// Everything written before the bits that are seen here is seen from now on.
MX_DEVICE unsigned long long load_acquire(const unsigned long long* p) {
    unsigned long long v;
    asm volatile("ld.acquire.gpu.global.b64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
MX_DEVICE unsigned long long load_relaxed(const unsigned long long* p) {
    unsigned long long v;
    asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}

// Two bytes, the first one lower.
MX_DEVICE unsigned load_two(const unsigned char* p) {
    unsigned short v;
    asm volatile("ld.relaxed.cta.global.u16 %0, [%1];" : "=h"(v) : "l"(p));
    return v;
}
MX_DEVICE unsigned load_acquire(const unsigned* p) {
    unsigned v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
MX_DEVICE unsigned load_relaxed(const unsigned* p) {
    unsigned v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
// Adds, and returns what was there.
MX_DEVICE unsigned add_relaxed(unsigned* p, unsigned x) {
    unsigned before;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(p), "r"(x)
                 : "memory");
    return before;
}
// Adds, and returns what was there, after all that this thread wrote, and has seen others write, is
// visible; and sees what those wrote who added before.
MX_DEVICE unsigned add_acquire_release(unsigned* p, unsigned x) {
    unsigned before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(p), "r"(x)
                 : "memory");
    return before;
}

// Adds.
MX_DEVICE void count_relaxed(unsigned* p, unsigned x) {
    asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}
// Adds after all that this thread wrote, and has seen others write, is visible.
MX_DEVICE void add_release(unsigned* p, unsigned x) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}

// Orders plain accesses to memory and those of asynchronous copies, of which this thread knows.
MX_DEVICE void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

MX_DEVICE void sleep(unsigned ns) { asm volatile("nanosleep.u32 %0;" ::"r"(ns)); }

// Words in shared memory.
MX_DEVICE unsigned load_shared(unsigned address) {
    unsigned v;
    asm volatile("ld.relaxed.cta.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
    return v;
}
MX_DEVICE void store_shared(unsigned address, unsigned value) {
    asm volatile("st.relaxed.cta.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

// These serve where nothing else orders the two: they are atomics, so that race detectors know.
MX_DEVICE unsigned watch_shared(unsigned address) {
    unsigned v;
    asm volatile("atom.relaxed.cta.shared.or.b32 %0, [%1], 0;" : "=r"(v) : "r"(address) : "memory");
    return v;
}
MX_DEVICE void announce_shared(unsigned address, unsigned value) {
    [[maybe_unused]] unsigned before;
    asm volatile("atom.relaxed.cta.shared.exch.b32 %0, [%1], %2;"
                 : "=r"(before)
                 : "r"(address), "r"(value)
                 : "memory");
}

// named_barrier which tells whether any thread's x was true. The answer goes through a shuffle:
// ptxas 13.0 may wait at the barrier once more where it is used, but does not shuffle again.
MX_DEVICE bool named_barrier_or(int id, int threads, bool x) {
    unsigned any;
    asm volatile("{\n"
                 ".reg .pred own, any;\n"
                 "setp.ne.u32 own, %1, 0;\n"
                 "barrier.cta.red.or.pred any, %2, %3, own;\n"
                 "selp.u32 %0, 1, 0, any;\n"
                 "}"
                 : "=r"(any)
                 : "r"(static_cast<unsigned>(x)), "r"(id), "r"(threads)
                 : "memory");
    return __shfl_sync(0xffffffff, any, 0);
}

// Accesses to shared memory of so many bytes, the lower ones of a register. Loads are volatile, so
// that they stay in the order of the source.

MX_DEVICE unsigned load_shared_1(unsigned address) {
    unsigned v;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(address));
    return v;
}
MX_DEVICE unsigned load_shared_2(unsigned address) {
    unsigned short v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address));
    return v;
}
MX_DEVICE unsigned load_shared_4(unsigned address) {
    unsigned v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
    return v;
}
MX_DEVICE uint2 load_shared_8(unsigned address) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
    return v;
}
MX_DEVICE u32x4 load_shared_16(unsigned address) {
    u32x4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.words[0]), "=r"(v.words[1]), "=r"(v.words[2]), "=r"(v.words[3])
                 : "r"(address)
                 : "memory");
    return v;
}

MX_DEVICE void store_shared_1(unsigned address, unsigned v) {
    asm volatile("st.shared.u8 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}
MX_DEVICE void store_shared_2(unsigned address, unsigned v) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(static_cast<unsigned short>(v))
                 : "memory");
}
MX_DEVICE void store_shared_4(unsigned address, unsigned v) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}
MX_DEVICE void store_shared_8(unsigned address, unsigned x, unsigned y) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(x), "r"(y) : "memory");
}
MX_DEVICE void store_shared_16(unsigned address, const unsigned (&v)[4]) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v[0]), "r"(v[1]),
                 "r"(v[2]), "r"(v[3])
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
// Stores matrices of 16-bit values; lane 4g + t gives column g of rows 2t and 2t + 1.
MX_DEVICE void store_matrices_transposed(unsigned address, const unsigned (&v)[4]) {
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
        "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
        : "memory");
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

// Of four neighbouring lanes, each has a word, such as a pair of columns, of four pieces; then each
// has all words of one piece.
MX_DEVICE void transpose_pairs(u32x4& words, int lane) {
#pragma unroll
    for (int bit = 1; bit < 4; bit *= 2) {
        const bool upper = lane & bit;
#pragma unroll
        for (int low = 0; low < 4; ++low) {
            if (low & bit)
                continue;
            unsigned &one = words.words[low], &other = words.words[low | bit];
            const unsigned got = __shfl_xor_sync(~0u, upper ? one : other, bit);
            (upper ? one : other) = got;
        }
    }
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
