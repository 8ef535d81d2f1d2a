// Accesses to shared memory of 4, 8 and 16 bytes at addresses of 32 bits. Loads are volatile, so
// that they stay in the order of the source.
#pragma once

#include "common/target.h"

namespace mx {

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
MX_DEVICE uint4 load_shared_16(unsigned address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address));
    return v;
}

MX_DEVICE void store_shared_4(unsigned address, unsigned v) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}
MX_DEVICE void store_shared_16(unsigned address, const unsigned (&v)[4]) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v[0]), "r"(v[1]),
                 "r"(v[2]), "r"(v[3])
                 : "memory");
}

} // namespace mx
