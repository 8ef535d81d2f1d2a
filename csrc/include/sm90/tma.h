// Hopper's asynchronous machinery: cp.async, TMA, barriers in shared memory, clusters, and what
// warp specialisation needs. Most functions are one instruction of the PTX ISA manual; addresses of
// shared memory are 32 bits wide.
#pragma once

#include "common/target.h"

namespace mx {

MX_DEVICE unsigned shared_address(const void* p) {
    return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// Starts a copy of 16 bytes to shared memory that no one reads again from memory, or of zeros, for
// which nothing is read. The L2 fetches lines of 128 bytes for it.
MX_DEVICE void copy_once_in_lines_async(unsigned to, const void* from, bool exists) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(exists ? 16 : 0)
                 : "memory");
}
// Starts a copy of 16 bytes that others read too, or of zeros.
MX_DEVICE void copy_async(unsigned to, const void* from, bool exists) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(exists ? 16 : 0)
                 : "memory");
}
MX_DEVICE void copy_word_async(unsigned to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
// The first `bytes` of a word, and zeros.
MX_DEVICE void copy_word_async(unsigned to, const void* from, int bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes)
                 : "memory");
}
// Closes a group of this thread's copies, which may be empty.
MX_DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most Pending of this thread's groups are under way.
template <int Pending>
MX_DEVICE void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// True in the lane that is to act for its warp, all of whose lanes ask. ptxas knows that it
// is one: after lane == 0 it makes a loop over lanes of each copy by a tensor map.
MX_DEVICE bool elected_lane() {
    unsigned elected;
    asm volatile("{\n"
                 ".reg .pred one;\n"
                 "elect.sync _|one, 0xffffffff;\n"
                 "selp.u32 %0, 1, 0, one;\n"
                 "}"
                 : "=r"(elected));
    return elected;
}

MX_DEVICE void barrier_init(unsigned barrier, unsigned arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals)
                 : "memory");
}

MX_DEVICE void barrier_arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives for a warp once all of its lanes are here.
MX_DEVICE void barrier_arrive_warp(unsigned barrier, int lane) {
    __syncwarp();
    if (lane == 0)
        barrier_arrive(barrier);
}

// Arrives once this thread's copies so far, those of cp.async, have come.
MX_DEVICE void barrier_arrive_copied(unsigned barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

MX_DEVICE void barrier_arrive_expect(unsigned barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

// Waits until the phase of this parity is over, to which only this workgroup adds.
MX_DEVICE void barrier_wait(unsigned barrier, unsigned parity) {
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n"
                 "}" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
}

// True if the phase of this parity is over, to which only this workgroup adds.
MX_DEVICE bool barrier_test(unsigned barrier, unsigned parity) {
    unsigned done;
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, done;\n"
                 "}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    return done;
}

// The stage of a ring of Size stages, and the parity of its barriers' phase.
template <int Size>
struct PipelineState {
    int at = 0;
    unsigned parity = 0;

    MX_MEMBER void next() {
        if (++at == Size) {
            at = 0;
            parity ^= 1;
        }
    }
};

// Waits until the phase of this parity is over, to which other workgroups of the cluster add.
MX_DEVICE void barrier_wait_cluster(unsigned barrier, unsigned parity) {
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n"
                 "}" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
}

// Makes this thread's barrier_init visible to the cluster and to copies.
MX_DEVICE void fence_barrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Orders this thread's own accesses to shared memory before later ones by copies and wgmma.
MX_DEVICE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Stores to shared memory of any workgroup of the cluster, whose barrier counts the bytes.
MX_DEVICE void store_async(unsigned to, float x, float y, unsigned barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::
            "r"(to),
        "f"(x), "f"(y), "r"(barrier)
        : "memory");
}

MX_DEVICE void store_async(unsigned to, unsigned x, unsigned barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
        "r"(x), "r"(barrier)
        : "memory");
}

MX_DEVICE void store_async(unsigned to, const u32x4& v, unsigned barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, "
                 "%3, %4}, [%5];" ::"r"(to),
                 "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]), "r"(barrier)
                 : "memory");
}
MX_DEVICE void store_async(unsigned to, float4 v, unsigned barrier) {
    const u32x4 words{__float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z),
                      __float_as_uint(v.w)};
    store_async(to, words, barrier);
}

// Address, in the workgroup of this rank, of what address is in one's own.
MX_DEVICE unsigned address_in_cluster(unsigned address, int rank) {
    unsigned mapped;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
    return mapped;
}

MX_DEVICE int rank_in_cluster() {
    int rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

MX_DEVICE void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
// This leaves out the fence that makes earlier writes visible, which takes hundreds of cycles.
MX_DEVICE void cluster_arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
MX_DEVICE void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// A barrier of some warps of a workgroup; id 0 is group_barrier's.
MX_DEVICE void named_barrier(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Arrives at it, and does not wait.
MX_DEVICE void named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Arrives at a barrier of any workgroup of the cluster, once this thread has what it loaded from
// shared memory, and its wgmmas are over. Nothing that it wrote is made visible: a release at the
// cluster's scope is a fence of all memory, which takes a thousand cycles.
MX_DEVICE void barrier_arrive_read(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Bytes to the same place in the workgroups of a cluster that the mask names, where the barrier in
// that workgroup counts them.
MX_DEVICE void copy_to_cluster(unsigned to, const void* from, unsigned bytes, unsigned barrier,
                               unsigned short mask) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".multicast::cluster [%0], [%1], %2, [%3], %4;" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier), "h"(mask)
                 : "memory");
}

// Bytes to this workgroup's shared memory, where the barrier counts them.
MX_DEVICE void copy_bulk(unsigned to, const void* from, unsigned bytes, unsigned barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
        "[%3];" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}

// Registers of each thread of this warpgroup from here on.
template <int Registers>
MX_DEVICE void increase_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers>
MX_DEVICE void decrease_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

// A value that the compiler keeps in a register, rather than compute it again at each use.
MX_DEVICE unsigned held(unsigned value) {
    asm volatile("" : "+r"(value));
    return value;
}
template <class T>
MX_DEVICE T* held(T* value) {
    asm volatile("" : "+l"(value));
    return value;
}

// x, which all lanes of a warp have alike. Told so, ptxas keeps it in a uniform register, and what
// follows from it.
MX_DEVICE int warp_uniform(int x) { return __shfl_sync(0xffffffff, x, 0); }

// Keeps uses of values that asynchronous instructions write after the wait for these.
template <int Count>
MX_DEVICE void keep_in_order(float (&values)[Count]) {
#pragma unroll
    for (int i = 0; i < Count; ++i)
        asm volatile("" : "+f"(values[i])::"memory");
}

// TMA (cp.async.bulk.tensor) copies boxes of a tensor that a tensor map describes. The host makes
// the map: aiter_mx/runtimes/cuda.py.

struct alignas(64) TensorMap {
    unsigned long long words[16];
};

MX_DEVICE void prefetch_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Where the map has a swizzle, it permutes the 16-byte pieces of a row: of rows of 128 bytes piece
// p of row r lies at place p ^ (r % 8), of 64 bytes at p ^ (r / 2 % 4), and boxes begin at
// multiples of 1024 bytes. Others begin at multiples of 128.
MX_DEVICE void tma_load(unsigned to, const TensorMap& map, int column, int row, unsigned barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3}], [%4];" ::"r"(to),
                 "l"(&map), "r"(column), "r"(row), "r"(barrier)
                 : "memory");
}
// Where that piece of a row of 128 bytes lies, of such a box.
MX_DEVICE unsigned swizzled_128(unsigned box, int row, int piece) {
    return box + row * 128 + (piece ^ row % 8) * 16;
}
// The box to the same place in the workgroups of a cluster that the mask names, where the barrier
// in that workgroup counts its bytes.
MX_DEVICE void tma_load_to_cluster(unsigned to, const TensorMap& map, int column, int row,
                                   unsigned barrier, unsigned short mask) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
                 "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"(mask)
                 : "memory");
}

// The box, of so many columns and rows as the map has them, to the matrix; what is beyond its edges
// is not stored. Writes to the box by threads need fence_async before.
MX_DEVICE void tma_store(const TensorMap& map, int column, int row, unsigned from) {
    asm volatile(
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map),
        "r"(column), "r"(row), "r"(from)
        : "memory");
}
// Closes a group of this thread's stores.
MX_DEVICE void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until all but Pending of this thread's groups of stores have read shared memory.
template <int Pending>
MX_DEVICE void tma_store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Pending) : "memory");
}
// Waits until all but Pending of them are in memory.
template <int Pending = 0>
MX_DEVICE void tma_store_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(Pending) : "memory");
}

} // namespace mx
