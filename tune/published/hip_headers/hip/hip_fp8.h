#pragma once

struct __hip_fp8_e4m3 {
    unsigned char held;
};
struct __hip_fp8_e5m2 {
    unsigned char held;
};
