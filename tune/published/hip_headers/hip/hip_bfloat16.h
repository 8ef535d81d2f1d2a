#pragma once

#include <hip/hip_runtime.h>

struct hip_bfloat16 {
    hip_bfloat16() = default;
    __device__ explicit hip_bfloat16(float value) : held(static_cast<__bf16>(value)) {}
    __device__ operator float() const { return static_cast<float>(held); }

    __bf16 held;
};
