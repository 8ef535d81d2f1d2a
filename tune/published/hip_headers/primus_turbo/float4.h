#pragma once

namespace primus_turbo {
struct float4x2_e2m1_t {
    unsigned char held;
};
} // namespace primus_turbo
