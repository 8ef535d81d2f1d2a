#pragma once

namespace primus_turbo {
struct float8_e4m3_t {
    unsigned char held;
};
struct float8_e5m2_t {
    unsigned char held;
};
struct float8_e8m0_t {
    unsigned char held;
};
} // namespace primus_turbo
