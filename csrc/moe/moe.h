// The kernels of a mixture of experts share routed rows, and the activations between the two
// GEMMs. aiter_mx/kernels/moe_gemm/problem.py defines the terms.
#pragma once

#include "common/target.h"

namespace mx {

// Codes that the host names, aiter_mx/kernels/moe_gemm/problem.py.
enum ActivationCode { kNoActivation = 0, kSilu = 1, kSwigluOai = 2 };

// The routed row t of an id, or -1 where the id is invalid. packed_top_k is 0 for vLLM's ids, which
// are routed rows; else ids are slot << 24 | token.
MX_DEVICE int routed_row(int id, int num_valid_tokens, int packed_top_k) {
    if (packed_top_k == 0)
        return id >= 0 && id < num_valid_tokens ? id : -1;
    const int token = id & 0xffffff;
    const int slot = static_cast<unsigned>(id) >> 24;
    // 64 bits: a token of padding may be anything.
    const long t = static_cast<long>(token) * packed_top_k + slot;
    return slot < packed_top_k && t < num_valid_tokens ? static_cast<int>(t) : -1;
}

struct ActivationArgs {
    float alpha, beta, limit; // of kSwigluOai
};

// 1 / (1 + 2^-x), which is sigmoid(x * ln 2); NaN stays NaN.
MX_DEVICE float sigmoid_of_two(float x) { return reciprocal(1.0f + power_of_two(-x)); }

// gate and up to the activated value, in fp32; NaN of either stays NaN.
template <int Code>
MX_DEVICE float activate(float gate, float up, const ActivationArgs& args) {
    static_assert(Code == kSilu || Code == kSwigluOai);
    constexpr float log2_e = 1.44269504088896340736f;
    if constexpr (Code == kSilu) {
        return gate * sigmoid_of_two(gate * log2_e) * up;
    } else {
        gate = gate > args.limit ? args.limit : gate;
        up = up > args.limit ? args.limit : up < -args.limit ? -args.limit : up;
        return (up + args.beta) * (gate * sigmoid_of_two(args.alpha * gate * log2_e));
    }
}

} // namespace mx
