// Buffer loads of CDNA4 (ISA manual, section 9.1): a base, a length, and zeros beyond the length.
#pragma once

#include "gfx950/target.h"

namespace mx {

// An offset that is beyond the length of every buffer, with room for another to be added.
constexpr unsigned kNowhere = 1u << 31;

class Buffer {
  public:
    // first is the same in all lanes; size_bytes is below kNowhere.
    MX_MEMBER Buffer(const unsigned char* first, unsigned size_bytes)
        : rsrc(__builtin_amdgcn_make_buffer_rsrc(const_cast<unsigned char*>(first), kRaw,
                                                 static_cast<int>(size_bytes), kFormat)) {}

    MX_MEMBER u32x4 load(unsigned offset) const {
        return __builtin_amdgcn_raw_buffer_load_b128(rsrc, offset, 0, kCached);
    }
    // 16 bytes that no one reads again.
    MX_MEMBER u32x4 load_once(unsigned offset) const {
        return __builtin_amdgcn_raw_buffer_load_b128(rsrc, offset, 0, kNonTemporal);
    }
    MX_MEMBER unsigned load_byte(unsigned offset) const {
        return __builtin_amdgcn_raw_buffer_load_b8(rsrc, offset, 0, kCached);
    }
    MX_MEMBER unsigned load_two_bytes(unsigned offset) const {
        return __builtin_amdgcn_raw_buffer_load_b16(rsrc, offset, 0, kCached);
    }
    // 16 bytes; none beyond the length.
    MX_MEMBER void store(unsigned offset, u32x4 values) const {
        __builtin_amdgcn_raw_buffer_store_b128(values, rsrc, offset, 0, kCached);
    }

  private:
    static constexpr short kRaw = 0;           // stride: none
    static constexpr int kFormat = 0x00027000; // 32-bit words, no swizzle
    static constexpr int kCached = 0, kNonTemporal = 2;
    __amdgpu_buffer_rsrc_t rsrc;
};

} // namespace mx
