// What the emulator of Hopper is tried on: each CTA adds 1 to the bytes of its tiles and stores
// them to a ring in memory, and the CTA before it takes them from there, turns their highest bits
// over, and stores them to the result.
//
//   producer, a thread: tiles of the next CTA's ring
//   maker, a warpgroup: raw tiles, which it rewrites in place
//   consumer, two warpgroups: rewrite what the producer has loaded, and store it
//
// Who made a tile, and who has read one, says so by a counter in memory.

#include "common/target.h"
#include "sm90/memory.h"
#include "sm90/tma.h"

using namespace mx;

constexpr int kThreads = 512, kGroupThreads = 128, kConsumerThreads = 256;
constexpr int kRows = 16, kRowBytes = 128, kBytes = kRows * kRowBytes;
constexpr int kSlots = 2, kStages = 2; // of the ring in memory, of tiles in shared memory

MX_DEVICE void announce(unsigned* counter) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(1) : "memory");
}
MX_DEVICE void wait_for(const unsigned* counter, unsigned least) {
    while (load_acquire(counter) < least)
        sleep(100);
}

struct Args {
    unsigned *made, *taken;
    int tiles;
    const TensorMap &raw, &ring, &out;
    unsigned box, stages, loaded, full, empty; // in shared memory
    int own, next;                             // CTAs

    MX_MEMBER int slot(int cta, int i) const { return (cta * kSlots + i % kSlots) * kRows; }
    MX_MEMBER int tile(int cta, int i) const { return (cta * tiles + i) * kRows; }
};

MX_DEVICE void make(const Args& a, int thread) {
    for (int i = 0; i < a.tiles; ++i) {
        if (thread == 0) {
            tma_store_wait_read<0>();
            barrier_arrive_expect(a.loaded, kBytes);
            tma_load(a.box, a.raw, 0, a.tile(a.own, i), a.loaded);
            if (i > 0) {
                tma_store_wait();
                announce(a.made + a.own);
            }
        }
        barrier_wait(a.loaded, i & 1);
        const unsigned place = a.box + thread * 16;
        u32x4 words = load_shared_16(place);
#pragma unroll
        for (int j = 0; j < 4; ++j)
            words.words[j] = __vadd4(words.words[j], 0x01010101);
        store_shared_16(place, words.words);
        fence_async(); // the maker's
        named_barrier(1, kGroupThreads);
        if (thread == 0) {
            wait_for(a.taken + a.own, i + 1 - min(i + 1, kSlots));
            tma_store(a.ring, 0, a.slot(a.own, i), a.box);
            tma_store_commit();
        }
    }
    if (thread == 0) {
        tma_store_wait(); // the last
        announce(a.made + a.own);
    }
}

MX_DEVICE void produce(const Args& a) {
    PipelineState<kStages> stage;
    for (int i = 0; i < a.tiles; ++i, stage.next()) {
        barrier_wait(a.empty + 8 * stage.at, stage.parity ^ 1);
        wait_for(a.made + a.next, i + 1);
        fence_async_global();
        barrier_arrive_expect(a.full + 8 * stage.at, kBytes);
        tma_load(a.stages + stage.at * kBytes, a.ring, 0, a.slot(a.next, i), a.full + 8 * stage.at);
    }
}

MX_DEVICE void consume(const Args& a, int thread) {
    PipelineState<kStages> stage;
    for (int i = 0; i < a.tiles; ++i, stage.next()) {
        barrier_wait(a.full + 8 * stage.at, stage.parity);
        if (thread == 0)
            announce(a.taken + a.next);
        const unsigned box = a.stages + stage.at * kBytes, place = box + thread * 8;
        const uint2 words = load_shared_8(place);
        store_shared_8(place, words.x ^ 0x80808080, words.y ^ 0x80808080);
        fence_async(); // the consumer's
        named_barrier(2, kConsumerThreads);
        if (thread == 0) {
            tma_store(a.out, 0, a.tile(a.next, i), box);
            tma_store_commit();
            tma_store_wait_read<0>(); // of the stage
            barrier_arrive(a.empty + 8 * stage.at);
        }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    aiter_mx_emulated_ring(const unsigned char* raw, unsigned char* ring, unsigned* counters,
                           unsigned char* out, int tiles, const __grid_constant__ TensorMap of_raw,
                           const __grid_constant__ TensorMap of_ring,
                           const __grid_constant__ TensorMap of_out) {
    extern __shared__ __align__(1024) unsigned char dynamic[];
    __shared__ __align__(16) unsigned long long barriers[1 + 2 * kStages];
    const unsigned box = shared_address(dynamic), loaded = shared_address(barriers);
    const int own = blockIdx.x, ctas = gridDim.x;
    const Args a{counters,
                 counters + ctas,
                 tiles,
                 of_raw,
                 of_ring,
                 of_out,
                 box,
                 box + kBytes,
                 loaded,
                 loaded + 8,
                 loaded + 8 + 8 * kStages,
                 own,
                 (own + 1) % ctas};
    if (threadIdx.x == 0) {
        barrier_init(a.loaded, 1);
        for (int i = 0; i < kStages; ++i) {
            barrier_init(a.full + 8 * i, 1);
            barrier_init(a.empty + 8 * i, 1);
        }
        fence_barrier_init();
    }
    group_barrier();
    const int group = warp_uniform(threadIdx.x / kGroupThreads);
    if (group == 0) {
        decrease_registers<24>();
        if (threadIdx.x == 0)
            produce(a);
        __syncwarp();
    } else if (group == 1) {
        decrease_registers<40>();
        make(a, threadIdx.x - kGroupThreads);
    } else {
        increase_registers<224>();
        consume(a, threadIdx.x - 2 * kGroupThreads);
    }
}
