// Loads of CDNA4 through buffer descriptors (ISA manual, section 9.1): a base, a length, and zeros
// beyond the length. They go to registers, or to LDS directly.
#pragma once

#include "gfx950/target.h"

namespace mx {

// An offset that is beyond the length of every buffer, with room for another to be added.
constexpr unsigned kNowhere = 1u << 31;

using u32x2 = unsigned __attribute__((ext_vector_type(2)));
using f32x4 = float __attribute__((ext_vector_type(4)));

// What clang has no builtin for.
__attribute__((device)) unsigned long
buffer_atomic_swap(unsigned long value, __amdgpu_buffer_rsrc_t rsrc, int offset, int further,
                   int flags) __asm("llvm.amdgcn.raw.ptr.buffer.atomic.swap.i64");

__attribute__((device)) unsigned
buffer_atomic_add(unsigned value, __amdgpu_buffer_rsrc_t rsrc, int offset, int further,
                  int flags) __asm("llvm.amdgcn.raw.ptr.buffer.atomic.add.i32");

class Buffer {
  public:
    // first is the same in all lanes; size_bytes is below kNowhere.
    MX_MEMBER Buffer(const unsigned char* first, unsigned size_bytes)
        : rsrc(__builtin_amdgcn_make_buffer_rsrc(const_cast<unsigned char*>(first), kRaw,
                                                 static_cast<int>(size_bytes), kFormat)) {}

    MX_MEMBER u32x4 load(unsigned offset) const {
        return __builtin_amdgcn_raw_buffer_load_b128(rsrc, offset, 0, kCached);
    }
    // 16 bytes at offset + further, which is the same in all lanes.
    MX_MEMBER u32x4 load(unsigned offset, unsigned further) const {
        return __builtin_amdgcn_raw_buffer_load_b128(rsrc, offset, further, kCached);
    }
    // 16 bytes that no one reads again.
    MX_MEMBER u32x4 load_once(unsigned offset, unsigned further = 0) const {
        return __builtin_amdgcn_raw_buffer_load_b128(rsrc, offset, further, kNonTemporal);
    }
    MX_MEMBER u32x2 load_two(unsigned offset) const {
        return __builtin_amdgcn_raw_buffer_load_b64(rsrc, offset, 0, kCached);
    }
    MX_MEMBER unsigned load_dword(unsigned offset) const {
        return __builtin_amdgcn_raw_buffer_load_b32(rsrc, offset, 0, kCached);
    }
    MX_MEMBER unsigned load_byte(unsigned offset, unsigned further = 0) const {
        return __builtin_amdgcn_raw_buffer_load_b8(rsrc, offset, further, kCached);
    }
    MX_MEMBER unsigned load_two_bytes(unsigned offset, unsigned further = 0) const {
        return __builtin_amdgcn_raw_buffer_load_b16(rsrc, offset, further, kCached);
    }
    // 16 bytes; none beyond the length.
    MX_MEMBER void store(unsigned offset, u32x4 values) const {
        __builtin_amdgcn_raw_buffer_store_b128(values, rsrc, offset, 0, kCached);
    }
    // A result; none beyond the length.
    template <class T>
    MX_MEMBER void store(unsigned offset, T value) const {
        if constexpr (sizeof(T) == 4)
            __builtin_amdgcn_raw_buffer_store_b32(__builtin_bit_cast(unsigned, value), rsrc, offset,
                                                  0, kCached);
        else
            __builtin_amdgcn_raw_buffer_store_b16(__builtin_bit_cast(unsigned short, value), rsrc,
                                                  offset, 0, kCached);
    }
    // Leaves 8 bytes for all workgroups of the GPU, and says what was there: zeros beyond the
    // length.
    MX_MEMBER unsigned long exchange_for_all(unsigned offset, unsigned long value) const {
        return buffer_atomic_swap(value, rsrc, offset, 0, kCached);
    }
    // Adds to 4 bytes for all of them, and says what was there: zero beyond the length.
    MX_MEMBER unsigned add_for_all(unsigned offset, unsigned value) const {
        return buffer_atomic_add(value, rsrc, offset, 0, kCached);
    }
    // What is left for all of them, and what one of them may have left.
    MX_MEMBER void store_for_all(unsigned offset, unsigned value) const {
        __builtin_amdgcn_raw_buffer_store_b32(value, rsrc, offset, 0, kPastCaches);
    }
    MX_MEMBER void store_for_all(unsigned offset, u32x4 values) const {
        __builtin_amdgcn_raw_buffer_store_b128(values, rsrc, offset, 0, kPastCaches);
    }
    MX_MEMBER unsigned load_for_all(unsigned offset) const {
        asm volatile("" ::: "memory"); // anew, each time
        return __builtin_amdgcn_raw_buffer_load_b32(rsrc, offset, 0, kPastCaches);
    }
    MX_MEMBER u32x4 load_16_for_all(unsigned offset) const {
        return __builtin_amdgcn_raw_buffer_load_b128(rsrc, offset, 0, kPastCaches);
    }
    // Zeros for all of them.
    MX_MEMBER void clear_for_all(unsigned offset) const {
        __builtin_amdgcn_raw_buffer_store_b64(u32x2{}, rsrc, offset, 0, kPastCaches);
    }

  private:
    static constexpr short kRaw = 0;           // stride: none
    static constexpr int kFormat = 0x00027000; // 32-bit words, no swizzle
    static constexpr int kCached = 0, kNonTemporal = 2, kPastCaches = 16; // nt, sc1
    __amdgpu_buffer_rsrc_t rsrc;
};

// Copies from memory to LDS that pass no register (ISA manual, section 9.1.9): lane l's bytes land
// at M0 + l * size, at 4 bytes a lane where fewer are copied.
//
// They are assembly: given the builtin, LLVM has every read of LDS wait for all copies under way
// that it cannot tell apart. So it counts none of them, and each kernel waits on its own.

using Offset = unsigned long; // elements and bytes: tensors may exceed 4 GiB
using Resource = u32x4;       // the words of a buffer descriptor, the same in all lanes
constexpr int kSizeWord = 2;  // which of them has the length

MX_DEVICE Resource resource(const unsigned char* first, unsigned size_bytes) {
    constexpr unsigned raw_words = 0x00027000; // 32-bit words, no swizzle
    const Offset address = reinterpret_cast<Offset>(first);
    return {static_cast<unsigned>(address), static_cast<unsigned>(address >> 32) & 0xffff,
            size_bytes, raw_words};
}

// M0 may be written by the scalar unit one wait state before a copy: ISA manual, section 4.5.
#define MX_COPY(load)                                                                              \
    asm volatile("s_add_u32 m0, %3, %4\n\ts_nop 0\n\t" load " %0, %1, %2 offen lds"                \
                 :                                                                                 \
                 : "v"(offset), "s"(from), "s"(further), "s"(to), "i"(at)                          \
                 : "memory", "scc")

// 16 bytes a lane, from `from` at offset + further, to the LDS at to + at, where `at` is a constant
// once loops are unrolled. Beyond the descriptor's length they are zeros.
MX_DEVICE void copy_16_bytes(Resource from, unsigned offset, unsigned further, unsigned to,
                             int at) {
    MX_COPY("buffer_load_dwordx4");
}

// The same for the first few lanes, fewer than 32. Saving the mask of lanes is the wait state.
template <int Lanes>
MX_DEVICE void copy_16_bytes_of(Resource from, unsigned offset, unsigned further, unsigned to,
                                int at) {
    LaneMask all;
    asm volatile("s_add_u32 m0, %4, %5\n\ts_and_saveexec_b64 %0, %6\n\t"
                 "buffer_load_dwordx4 %1, %2, %3 offen lds\n\ts_mov_b64 exec, %0"
                 : "=&s"(all)
                 : "v"(offset), "s"(from), "s"(further), "s"(to), "i"(at), "i"((1 << Lanes) - 1)
                 : "memory", "scc");
}

// The same where `zero`, which is the same in all lanes, is 0, for any number of first lanes; else
// nothing is copied.
template <int Lanes>
MX_DEVICE void copy_16_bytes_at_zero(unsigned zero, Resource from, unsigned offset,
                                     unsigned further, unsigned to, int at) {
#define MX_COPY_AT_ZERO(set_lanes, lanes, number)                                                  \
    asm volatile("s_add_u32 m0, %4, %5\n\ts_mov_b64 %0, exec\n\t" set_lanes                        \
                 "s_cmp_eq_u32 %6, 0\n\ts_cselect_b64 exec, " lanes ", 0\n\t"                      \
                 "buffer_load_dwordx4 %1, %2, %3 offen lds\n\ts_mov_b64 exec, %0"                  \
                 : "=&s"(all)                                                                      \
                 : "v"(offset), "s"(from), "s"(further), "s"(to), "i"(at), "s"(zero), "i"(number)  \
                 : "memory", "scc")
    LaneMask all;
    if constexpr (Lanes == kLanes)
        MX_COPY_AT_ZERO("", "%7", -1);
    else if constexpr (Lanes <= 32) // the mask is a literal
        MX_COPY_AT_ZERO("", "%7", (1l << Lanes) - 1);
    else
        MX_COPY_AT_ZERO("s_bfm_b64 exec, %7, 0\n\t", "exec", Lanes);
#undef MX_COPY_AT_ZERO
}

// Size bytes a lane, each in a dword of LDS.
template <int Size>
MX_DEVICE void copy_piece(Resource from, unsigned offset, unsigned further, unsigned to, int at) {
    if constexpr (Size == 4)
        MX_COPY("buffer_load_dword");
    else if constexpr (Size == 2)
        MX_COPY("buffer_load_ushort");
    else
        MX_COPY("buffer_load_ubyte");
}
#undef MX_COPY

// Every wave is here, its reads of LDS are done, and its copies but for the youngest few.
template <int Youngest>
MX_DEVICE void copies_arrived() {
    asm volatile("s_waitcnt vmcnt(%0) lgkmcnt(0)\n\ts_barrier" ::"i"(Youngest) : "memory");
}
// Every wave is here, and its reads of LDS are done.
MX_DEVICE void reads_arrived() { asm volatile("s_waitcnt lgkmcnt(0)\n\ts_barrier" ::: "memory"); }

} // namespace mx
