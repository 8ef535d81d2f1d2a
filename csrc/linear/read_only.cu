// Reads a buffer once and does next to nothing with it: the time that a kernel limited by its
// weights cannot beat. The benchmarks hold the decode kernels against it.
//
// Workgroups walk the buffer in strides of the whole grid; each thread keeps kUnroll loads of 16
// bytes in flight. The result goes out only if it is a value that it hardly ever is, so that the
// compiler must keep the loads and the write costs nothing.

#include "common/target.h"

using namespace mx;

constexpr int kThreads = MX_THREADS; // of a workgroup
constexpr int kUnroll = MX_UNROLL;   // loads in flight

extern "C" __global__ void __launch_bounds__(kThreads)
    aiter_mx_read_only(const unsigned char* data, unsigned* sink, long long size_bytes,
                       int groups) {
    launch_dependents(); // where launches may overlap, the next begins as soon as there is room
    const long long stride = 16ll * kThreads * groups;
    unsigned mixed = 0;
    for (long long first = 16ll * (group_x() * kThreads + thread_in_group()); first < size_bytes;
         first += stride * kUnroll) {
        u32x4 loaded[kUnroll] = {};
#pragma unroll
        for (int u = 0; u < kUnroll; ++u)
            if (first + u * stride < size_bytes)
                loaded[u] = load_once_in_lines(data + first + u * stride);
#pragma unroll
        for (int u = 0; u < kUnroll; ++u)
            mixed ^= loaded[u][0] ^ loaded[u][1] ^ loaded[u][2] ^ loaded[u][3];
    }
    if (mixed == 0x9e3779b9u)
        *sink = mixed;
}
