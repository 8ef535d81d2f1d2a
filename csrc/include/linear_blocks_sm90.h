// What the linears share that have blocks of 32 k multiplied by wgmma over fp8: linear_fp8_sm90.cu
// and linear_outer_sm90.cu.
#pragma once

#include "mx_target.h"
#include "sm90_rows.h"

namespace mx {

template <int I>
struct Int {
    static constexpr int value = I;
};

// Four scales, which may be at any address.
MX_DEVICE unsigned load_scale_word(const unsigned char* p) {
    if (reinterpret_cast<unsigned long>(p) % 4 == 0)
        return load_word(p);
    unsigned v = 0;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i)
        v |= load_byte(p + i) << (8 * i);
    return v;
}

// Waits for a stage while wgmmas are under way. ptxas lets these run on only past a loop that does
// not go on for ever.
MX_DEVICE void wait_for_stage(unsigned barrier, unsigned parity) {
#pragma unroll 1
    for (int i = 0; i < 1 << 30; ++i) {
        unsigned done;
        asm volatile("{\n"
                     ".reg .pred done;\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, done;\n"
                     "}"
                     : "=r"(done)
                     : "r"(barrier), "r"(parity)
                     : "memory");
        if (done)
            return;
    }
    __trap();
}

} // namespace mx
