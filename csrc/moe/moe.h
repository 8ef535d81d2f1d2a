// The kernels of a mixture of experts share routed rows, and the activations between the two
// GEMMs. aiter_mx/kernels/moe_gemm/problem.py defines the terms.
#pragma once

#include "common/target.h"

namespace mx {

// Codes that the host names, aiter_mx/kernels/moe_gemm/problem.py.
enum ActivationCode {
    kNoActivation = 0,
    kSilu = 1,
    kSwigluOai = 2,
    kGelu = 3,
    kGeluTanh = 4,
    kRelu2 = 5
};

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

constexpr float kLog2E = 1.44269504088896340736f;

// The normal distribution function, erfc(-x / sqrt(2)) / 2; NaN stays NaN. Of erfc, Numerical
// Recipes' Chebyshev fit (section 6.2), whose relative error is below 1.2e-7 everywhere: also where
// the result is small, which a sum with erf would lose.
MX_DEVICE float normal_below(float x) {
    const float z = (x < 0.0f ? -x : x) * 0.70710678118654752440f;
    const float t = reciprocal(mx::fma(0.5f, z, 1.0f));
    float p = 0.17087277f;
    p = mx::fma(p, t, -0.82215223f);
    p = mx::fma(p, t, 1.48851587f);
    p = mx::fma(p, t, -1.13520398f);
    p = mx::fma(p, t, 0.27886807f);
    p = mx::fma(p, t, -0.18628806f);
    p = mx::fma(p, t, 0.09678418f);
    p = mx::fma(p, t, 0.37409196f);
    p = mx::fma(p, t, 1.00002368f);
    p = mx::fma(p, t, -1.26551223f);
    const float above = 0.5f * t * power_of_two(kLog2E * mx::fma(-z, z, p));
    return x > 0.0f ? 1.0f - above : above;
}

// gate and up to the activated value, in fp32; NaN of either stays NaN.
template <int Code>
MX_DEVICE float activate(float gate, float up, const ActivationArgs& args) {
    static_assert(Code >= kSilu && Code <= kRelu2);
    if constexpr (Code == kSilu) {
        return gate * sigmoid_of_two(gate * kLog2E) * up;
    } else if constexpr (Code == kGelu) {
        return gate * normal_below(gate) * up;
    } else if constexpr (Code == kGeluTanh) {
        // (1 + tanh(y)) / 2 is sigmoid(2 y); y = sqrt(2 / pi) (gate + 0.044715 gate^3)
        const float y = 0.79788456080286535588f * mx::fma(0.044715f * gate * gate, gate, gate);
        return gate * sigmoid_of_two(2.0f * kLog2E * y) * up;
    } else if constexpr (Code == kRelu2) {
        gate = gate < 0.0f ? 0.0f : gate;
        return gate * gate * up;
    } else {
        gate = gate > args.limit ? args.limit : gate;
        up = up > args.limit ? args.limit : up < -args.limit ? -args.limit : up;
        return (up + args.beta) * (gate * sigmoid_of_two(args.alpha * gate * kLog2E));
    }
}

} // namespace mx
