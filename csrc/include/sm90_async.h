// Hopper's asynchronous machinery: barriers in shared memory, bulk copies, clusters. Each function
// is one instruction of the PTX ISA manual; addresses of shared memory are 32 bits wide.
#pragma once

#include "mx_target.h"

namespace mx {

MX_DEVICE unsigned shared_address(const void* p) {
    return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

MX_DEVICE void barrier_init(unsigned barrier, unsigned arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals)
                 : "memory");
}

MX_DEVICE void barrier_arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

MX_DEVICE void barrier_arrive_expect(unsigned barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

// Arrives at a barrier of any workgroup of the cluster.
MX_DEVICE void barrier_arrive_cluster(unsigned barrier) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier)
                 : "memory");
}

MX_DEVICE bool barrier_is_over(unsigned barrier, unsigned parity) {
    unsigned over;
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, done;\n"
                 "}"
                 : "=r"(over)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    return over;
}

// Waits until the phase of this parity is over.
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

// The same where other workgroups of the cluster arrive.
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

// Copies bytes, a multiple of 16, from global to shared memory; the barrier counts them. They are
// read once: first to leave L2.
MX_DEVICE void copy_bulk(unsigned to, const void* from, unsigned bytes, unsigned barrier) {
    constexpr unsigned long long evict_first = 0x12f0000000000000; // createpolicy.fractional, 1.0
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier), "l"(evict_first)
                 : "memory");
}

// Stores to shared memory of any workgroup of the cluster, whose barrier counts the 8 bytes.
MX_DEVICE void store_async(unsigned to, float x, float y, unsigned barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::
            "r"(to),
        "f"(x), "f"(y), "r"(barrier)
        : "memory");
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
MX_DEVICE void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// A barrier of some warps of a workgroup; id 0 is group_barrier's.
MX_DEVICE void named_barrier(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

} // namespace mx
