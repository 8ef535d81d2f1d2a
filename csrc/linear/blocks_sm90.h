// What wgmma_fp8_sm90.cu computes of blocks of 32 k apart from its matrix instructions.
#pragma once

#include "common/scale.h"
#include "common/target.h"
#include "sm90/rows.h"

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

// An output's sum over every step-th chunk, with scales applied one after the other.
MX_DEVICE float exact_sum(const Tensors& t, int m, long n, int first_chunk, int end, int step) {
    float sum = 0;
#pragma unroll 1
    for (int c = first_chunk; c < end; c += step)
        sum +=
            exact_output(t.xq + m * t.K + c * kChunk, t.xs + m * t.blocks() + c * kBlocks,
                         t.wq + n * t.K + c * kChunk, t.ws + n * t.blocks() + c * kBlocks, kChunk);
    return sum;
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
