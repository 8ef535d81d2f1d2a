// Copies of boxes of a tensor that a tensor map describes (PTX ISA manual, cp.async.bulk.tensor).
// The host makes the map: aiter_mx/runtimes/cuda.py.
#pragma once

#include "common/target.h"

namespace mx {

struct alignas(64) TensorMap {
    unsigned long long words[16];
};

MX_DEVICE void prefetch_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Where the map says so, the copy turns the 16-byte pieces of a row: of rows of 128 bytes piece p
// of row r lies at place p ^ (r % 8), of 64 bytes at p ^ (r / 2 % 4), and boxes begin at multiples
// of 1024 bytes. Others begin at multiples of 128.
MX_DEVICE void copy_box(unsigned to, const TensorMap& map, int column, int row, unsigned barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3}], [%4];" ::"r"(to),
                 "l"(&map), "r"(column), "r"(row), "r"(barrier)
                 : "memory");
}

// The box, of so many columns and rows as the map has them, to the matrix; what is beyond its edges
// is not stored. Writes to the box by threads need fence_async before.
MX_DEVICE void store_box(const TensorMap& map, int column, int row, unsigned from) {
    asm volatile(
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map),
        "r"(column), "r"(row), "r"(from)
        : "memory");
}
// Closes a group of this thread's boxes.
MX_DEVICE void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until the boxes of all but Pending of this thread's groups have been read.
template <int Pending>
MX_DEVICE void store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Pending) : "memory");
}
// Waits until all of this thread's boxes are in memory.
MX_DEVICE void store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

} // namespace mx
