// Copies of boxes of a tensor that a tensor map describes (PTX ISA manual, cp.async.bulk.tensor).
// The host makes the map: aiter_mx/runtimes/cuda.py.
#pragma once

#include "mx_target.h"

namespace mx {

struct alignas(64) TensorMap {
    unsigned long long words[16];
};

MX_DEVICE void prefetch_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Of rows of 128 bytes the copy turns the 16-byte pieces: piece p of row r lies at place p ^ (r %
// 8); of rows of 64 bytes at p ^ (r / 2 % 4). Boxes begin at multiples of 1024 bytes.
MX_DEVICE void copy_box(unsigned to, const TensorMap& map, int column, int row, unsigned barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3}], [%4];" ::"r"(to),
                 "l"(&map), "r"(column), "r"(row), "r"(barrier)
                 : "memory");
}

} // namespace mx
