// Kernels in the shape of a gemv, of a tile product and of one that takes several tiles of groups,
// into which slow-downs are planted.
#ifndef EARLY
#define EARLY 0 // vector instructions before the first load
#endif
#ifndef LATE
#define LATE 0 // vector instructions after the last wait
#endif
#ifndef SERIAL
#define SERIAL 0 // loads before the first, each for the address of the next
#endif
#ifndef BARRIERS
#define BARRIERS 0 // additional barriers a step
#endif
#ifndef AHEAD
#define AHEAD 4 // steps whose loads are under way together
#endif
#ifndef STRIDE
#define STRIDE 16 // bytes from lane to lane of a load
#endif
#ifndef X_READS
#define X_READS 1 // times that x is loaded in each step
#endif
#ifndef CONFLICTS
#define CONFLICTS 1 // ways of bank conflicts
#endif
#ifndef LDS_BYTES
#define LDS_BYTES 4096
#endif
#ifndef SCALAR
#define SCALAR 0 // scales by scalar loads that are waited for in each step
#endif
#ifndef BUSY
#define BUSY 0 // vector instructions of the first workgroup alone
#endif
#ifndef SPILL
#define SPILL 0 // registers that each step puts aside
#endif
#ifndef TILES
#define TILES 4 // that a workgroup takes one after the other
#endif

template <int count>
DEVICE void vector_work(u32& x) {
#pragma unroll
    for (int i = 0; i < count; i++)
        asm volatile("v_add_u32 %0, 1, %0" : "+v"(x));
}
// Loads and waits as they stand: a compiler would put waits of its own between them.
DEVICE void load(u32x4& to, const void* from) {
    asm volatile("global_load_dwordx4 %0, %1, off" : "=v"(to) : "v"(from));
}
DEVICE void wait() { asm volatile("s_waitcnt vmcnt(0)" ::: "memory"); }
DEVICE void arrived(u32x4& x) { asm volatile("" : "+v"(x)); }
DEVICE u64 followed(const u64* links) {
    u64 at = 0;
#pragma unroll
    for (int i = 0; i < SERIAL; i++) {
        u32x4 link;
        load(link, links + 64 * i + at);
        wait();
        arrived(link);
        at = link.x; // all are zero
    }
    return at;
}

DEVICE u32 scalar_loads(const u64* links, int count) {
    u32 sum = 0;
#pragma unroll
    for (int i = 0; i < count; i++) {
        u32 scale;
        asm volatile("s_load_dword %0, %1, 0x0\n\ts_waitcnt lgkmcnt(0)" : "=s"(scale) : "s"(links));
        sum += scale;
    }
    return sum;
}

// A register's way through memory of the lane's own, as the compiler's spills go.
DEVICE void spill(u32& x) {
    volatile u32 aside[SPILL + 1];
#pragma unroll
    for (int i = 0; i < SPILL; i++)
        aside[i] = x + i;
#pragma unroll
    for (int i = 0; i < SPILL; i++)
        x += aside[i] - i;
}
DEVICE void early_work(u32& x) {
    vector_work<EARLY>(x);
    if (BUSY && group_id() == 0)
        vector_work<BUSY>(x);
}

// Arguments are loaded at once, whatever is planted.
DEVICE void together(const void* w, const void* x, const void* links, void* out, int steps) {
    asm volatile("" ::"s"(w), "s"(x), "s"(links), "s"(out), "s"(steps));
}

// Each workgroup adds up its own rows of w, `steps` times 4 KiB, times x.
KERNEL(256) gemv(const u32x4* w, const u32x4* x, const u64* links, u32* out, int steps) {
    together(w, x, links, out, steps);
    u32 work = lane_id();
    early_work(work);
    u64 zero = followed(links);
    const char* from = (const char*)w + (u64)group_id() * steps * 256 * STRIDE + zero;
    u32 sum = work;
    for (int step = 0; step < steps; step += AHEAD) {
        u32x4 a[AHEAD], b[AHEAD * X_READS];
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            load(a[i], from + ((u64)(step + i) * 256 + lane_id()) * STRIDE);
#pragma unroll
        for (int i = 0; i < AHEAD * X_READS; i++)
            load(b[i], x + (i * 256 + lane_id()) % 1024);
        wait();
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            arrived(a[i]);
#pragma unroll
        for (int i = 0; i < AHEAD * X_READS; i++)
            arrived(b[i]);
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            sum += a[i].x ^ a[i].y ^ a[i].z ^ a[i].w;
#pragma unroll
        for (int i = 0; i < AHEAD * X_READS; i++)
            sum += b[i].x ^ b[i].w;
        spill(sum);
#pragma unroll
        for (int i = 0; i < BARRIERS * AHEAD; i++)
            __builtin_amdgcn_s_barrier();
        sum += scalar_loads(links, SCALAR * AHEAD);
    }
    vector_work<LATE>(sum);
    out[group_id() * 256 + lane_id()] = sum;
}

// What a lane loads for a step of a tile: its own 16 bytes, and of x where that is planted.
struct Loaded {
    u32x4 own, x[X_READS];
};
DEVICE Loaded of_step(const char* from, const u32x4* x, int step) {
    Loaded loaded;
    loaded.own = *(const u32x4*)(from + (u64)step * 256 * STRIDE);
#pragma unroll
    for (int i = 1; i < X_READS; i++)
        loaded.x[i] = x[(step * 256 + i * 64 + lane_id()) % 1024];
    return loaded;
}

// The product of a tile that is passed through LDS, `steps` times.
DEVICE u32 product(const char* from, const u32x4* x, const u64* links, u32x4* lds, int steps,
                   u32 work) {
    f32x4 sums[4] = {};
    Loaded next = of_step(from, x, 0);
    int at = lane_id() * CONFLICTS % 256;
    for (int step = 0; step < steps; step++) {
        u32x4 now = next.own;
#pragma unroll
        for (int i = 1; i < X_READS; i++)
            now ^= next.x[i];
        barrier();
        lds[lane_id()] = now;
        if (AHEAD > 1 && step + 1 < steps)
            next = of_step(from, x, step + 1);
        barrier();
        work += scalar_loads(links, SCALAR);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32x4 a = lds[(at + 64 * i) % 256], b = lds[(at + 64 * i + 32) % 256];
            i32x8 p = {(int)a.x, (int)a.y, (int)a.z, (int)a.w,
                       (int)b.x, (int)b.y, (int)b.z, (int)b.w};
            sums[i] = __builtin_amdgcn_mfma_scale_f32_16x16x128_f8f6f4(p, p, sums[i], 0, 0, 0, work,
                                                                       0, work);
        }
        if (AHEAD == 1 && step + 1 < steps)
            next = of_step(from, x, step + 1);
        spill(work);
#pragma unroll
        for (int i = 0; i < BARRIERS; i++)
            __builtin_amdgcn_s_barrier();
    }
    u32 sum = work;
#pragma unroll
    for (int i = 0; i < 4; i++)
        sum += __builtin_bit_cast(u32, sums[i].x + sums[i].y + sums[i].z + sums[i].w);
    vector_work<LATE>(sum);
    return sum;
}

KERNEL(256) tile(const u32x4* w, const u32x4* x, const u64* links, u32* out, int steps) {
    SHARED u32x4 lds[LDS_BYTES / 16];
    together(w, x, links, out, steps);
    u32 work = lane_id();
    early_work(work);
    u64 zero = followed(links);
    const char* from = (const char*)w + ((u64)group_id() * steps * 256 + lane_id()) * STRIDE + zero;
    out[group_id() * 256 + lane_id()] = product(from, x, links, lds, steps, work);
}

// Persistent: looks up where each of its tiles begins, and shares `steps` among them.
KERNEL(256) grouped(const u32x4* w, const u32x4* x, const u64* links, u32* out, int steps) {
    SHARED u32x4 lds[LDS_BYTES / 16];
    together(w, x, links, out, steps);
    u32 work = lane_id();
    early_work(work);
    u64 zero = followed(links);
    int each = steps / TILES;
    u32 sum = 0;
    for (int tile = 0; tile < TILES; tile++) {
        u32x4 group;
        load(group, links + 64 * tile + zero);
        wait();
        arrived(group);
        u64 begins = (u64)(group_id() * TILES + tile + group.x) * each * 256;
        const char* from = (const char*)w + (begins + lane_id()) * STRIDE;
        sum += product(from, x, links, lds, each, work);
        out[group_id() * 256 + lane_id()] = sum;
    }
}
