// A range of memory with bounds: loads beyond its end give zeros, stores there do nothing. On CDNA4
// that is what a buffer descriptor does (ISA manual, section 9.1), without a branch.
#pragma once

#include "common/target.h"

namespace mx {

template <int Count>
struct alignas(4 * Count) Words {
    unsigned word[Count];
};

// An offset that is beyond the end of every slice, with room for another to be added.
constexpr unsigned kBeyond = 1u << 31;

#if defined(__AMDGCN__)
constexpr bool kBoundsCostNothing = true;

template <bool Bounded = true>
class Slice {
  public:
    // first and size_bytes, which is below kBeyond, are the same in all lanes.
    MX_MEMBER Slice(const void* first, unsigned size_bytes)
        : buffer(__builtin_amdgcn_make_buffer_rsrc(const_cast<void*>(first), kRaw,
                                                   static_cast<int>(size_bytes), kFormat)) {}

    // 16 bytes that no one reads again.
    MX_MEMBER u32x4 load_once(unsigned offset) const {
        return __builtin_amdgcn_raw_buffer_load_b128(buffer, offset, 0, kNonTemporal);
    }
    MX_MEMBER void store(unsigned offset, Words<4> x) const {
        __builtin_amdgcn_raw_buffer_store_b128(u32x4{x.word[0], x.word[1], x.word[2], x.word[3]},
                                               buffer, offset, 0, 0);
    }
    MX_MEMBER void store(unsigned offset, Words<2> x) const {
        using u32x2 = unsigned __attribute__((ext_vector_type(2)));
        __builtin_amdgcn_raw_buffer_store_b64(u32x2{x.word[0], x.word[1]}, buffer, offset, 0, 0);
    }
    MX_MEMBER void store(unsigned offset, Words<1> x) const {
        __builtin_amdgcn_raw_buffer_store_b32(x.word[0], buffer, offset, 0, 0);
    }
    MX_MEMBER void store(unsigned offset, unsigned short x) const {
        __builtin_amdgcn_raw_buffer_store_b16(x, buffer, offset, 0, 0);
    }
    MX_MEMBER void store(unsigned offset, unsigned char x) const {
        __builtin_amdgcn_raw_buffer_store_b8(x, buffer, offset, 0, 0);
    }

  private:
    static constexpr short kRaw = 0;           // stride: none
    static constexpr int kFormat = 0x00027000; // 32-bit words, no swizzle
    static constexpr int kNonTemporal = 2;
    __amdgpu_buffer_rsrc_t buffer;
};
#else
constexpr bool kBoundsCostNothing = false;

// Without Bounded, all offsets must be below size_bytes.
template <bool Bounded = true>
class Slice {
  public:
    MX_MEMBER Slice(const void* first, unsigned size_bytes)
        : first(static_cast<const unsigned char*>(first)), size_bytes(size_bytes) {}

    // 16 bytes that no one reads again.
    MX_MEMBER u32x4 load_once(unsigned offset) const {
        return !Bounded || offset < size_bytes ? mx::load_once(first + offset) : u32x4{};
    }
    MX_MEMBER const unsigned char* address(unsigned offset) const { return first + offset; }
    template <class T>
    MX_MEMBER void store(unsigned offset, T x) const {
        if (!Bounded || offset < size_bytes)
            *reinterpret_cast<T*>(const_cast<unsigned char*>(first) + offset) = x;
    }

  private:
    const unsigned char* first;
    unsigned size_bytes;
};
#endif

// Bytes left of total from offset on, at most `most`.
MX_DEVICE unsigned bytes_left(unsigned long total, unsigned long offset, unsigned most) {
    const unsigned long left = total > offset ? total - offset : 0;
    return left < most ? left : most;
}

} // namespace mx
