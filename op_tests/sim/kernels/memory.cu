// Memory of every kind: loads and stores of every width, LDS, buffers, copies to LDS, atomics.

KERNEL(256) widths(const u8* in, u8* out) {
    const int at = group_id() * 256 + lane_id();
    ((u8*)out)[at] = in[at] + 1;
    ((u16*)(out + 1024))[at] = ((const u16*)in)[at] + 1;
    ((u32*)(out + 4096))[at] = ((const signed char*)in)[at];
    ((u32*)(out + 8192))[at] = ((const short*)in)[at];
    ((u64*)(out + 16384))[at] = ((const u64*)in)[at] * 3;
    struct Three {
        u32 x[3];
    } three = ((const Three*)in)[at];
    three.x[1] += 5;
    ((Three*)(out + 32768))[at] = three;
    ((u32x4*)(out + 65536))[at] = ((const u32x4*)in)[at] ^ 7u;
}

KERNEL(256) through_lds(const u32* in, u32* out) {
    SHARED u32 words[1024];
    SHARED u8 bytes[256];
    const int t = lane_id();
    *(u32x4*)(words + 4 * t) = ((const u32x4*)in)[t];
    bytes[t] = (u8)(in[t] >> 3);
    barrier();
    out[t] = words[(t * 37) & 1023];
    out[256 + t] = bytes[255 - t];
    ((u32x2*)(out + 512))[t] = ((u32x2*)words)[(t + 100) & 511];
    out[1024 + t] = words[t] + words[t + 512];
    ((u32x4*)(out + 2048))[t] = ((u32x4*)words)[t ^ 70];
}

// out[0]: buffer loads of which the last lanes are out of range; out[1..]: copies to LDS.
KERNEL(64) buffers(const u32* in, u32* out, int bytes) {
    SHARED u32 copied[2 * 64 * 4];
    const int l = lane_id();
    const auto buffer = __builtin_amdgcn_make_buffer_rsrc((void*)in, 0, bytes, 0x27000);
    ((u32x4*)out)[l] = __builtin_amdgcn_raw_buffer_load_b128(buffer, l * 16, 8, 0);
    typedef __attribute__((address_space(3))) void* LdsPointer;
    typedef __attribute__((address_space(1))) void* GlobalPointer;
    __builtin_amdgcn_raw_ptr_buffer_load_lds(buffer, (LdsPointer)copied, 16, (63 - l) * 16, 0, 0,
                                             0);
    __builtin_amdgcn_global_load_lds((GlobalPointer)(in + (l ^ 5) * 4), (LdsPointer)(copied + 256),
                                     16, 0, 0);
    __builtin_amdgcn_s_waitcnt(0);
    ((u32x4*)out)[64 + l] = ((u32x4*)copied)[l];
    ((u32x4*)out)[128 + l] = ((u32x4*)copied)[64 + l];
    __builtin_amdgcn_raw_buffer_store_b32(l, buffer, 0x7fffffff, 0, 0);
}

KERNEL(256) atomics(const u32* in, u32* sums, float* total, u32* old, u64* wide) {
    SHARED u32 count;
    SHARED float partial;
    const int t = lane_id(), at = group_id() * 256 + t;
    if (t == 0)
        count = 0, partial = 0;
    barrier();
    __hip_atomic_fetch_add(&count, in[at] & 3, __ATOMIC_RELAXED, 3);
    __hip_atomic_fetch_add(&partial, 0.5f, __ATOMIC_RELAXED, 3);
    old[at] = __hip_atomic_fetch_add(sums + (in[at] & 7), 1u, __ATOMIC_RELAXED, 4);
    __hip_atomic_fetch_max(sums + 8, in[at], __ATOMIC_RELAXED, 4);
    __hip_atomic_fetch_xor(sums + 9, in[at], __ATOMIC_RELAXED, 4);
    __hip_atomic_fetch_add(wide, (u64)in[at], __ATOMIC_RELAXED, 4);
    const u64 most = 999;
    asm volatile("global_atomic_inc_x2 %0, %1, off offset:8\n"
                 "global_atomic_dec_x2 %0, %1, off offset:16" ::"v"(wide),
                 "v"(most)
                 : "memory");
    barrier();
    if (t == 0) {
        __hip_atomic_fetch_add(sums + 10, count, __ATOMIC_RELAXED, 4);
        __hip_atomic_fetch_add(total, partial, __ATOMIC_RELAXED, 4);
    }
}

// An array indexed by data lives in scratch.
KERNEL(64) scratch(const u32* in, u32* out) {
    const int l = lane_id();
    volatile u32 mine[40];
    for (int i = 0; i < 40; ++i)
        mine[i] = in[l] * (i + 1);
    u32 sum = 0;
    for (int i = 0; i < 5; ++i)
        sum += mine[in[l + i] % 40];
    out[l] = sum;
}

// A table in the code object and a function that is called, not inlined.
static __attribute__((device, constant)) const u32 primes[8] = {2, 3, 5, 7, 11, 13, 17, 19};
__attribute__((device, noinline)) u32 twisted(u32 x, u32 depth) {
    return x * primes[depth & 7] + (x >> 5);
}
KERNEL(64) called(const u32* in, u32* out) {
    const u32 x = in[lane_id()];
    out[lane_id()] = twisted(twisted(x, x), x >> 3);
}

KERNEL(64) writes_at(u32* out, const u32* in, int offset) {
    out[lane_id() + offset] = in[lane_id()];
}
KERNEL(64) lds_at(u32* out, int offset) {
    SHARED u32 small[64];
    small[lane_id() + offset] = lane_id();
    out[lane_id()] = small[lane_id()];
}

// One LDS access of each kind at addresses in bytes from `in`.
KERNEL(64) one_access(const u32* in, u32* out, int kind) {
    const int l = lane_id();
    u32 at = in[l];
    u32x4 x = {at, at, at, at};
    u32x2 y = {at, at};
#define READ(text, value)                                                                          \
    asm volatile(text " %0, %1\ns_waitcnt lgkmcnt(0)" : "=v"(value) : "v"(at));                    \
    break
#define WRITE(text, value)                                                                         \
    asm volatile(text " %0, %1\ns_waitcnt lgkmcnt(0)" ::"v"(at), "v"(value));                      \
    break
    switch (kind) {
    case 0:
        READ("ds_read_u8", y[0]);
    case 1:
        READ("ds_read_b32", y[0]);
    case 2:
        READ("ds_read_b64", y);
    case 3:
        READ("ds_read_b128", x);
    case 4:
        WRITE("ds_write_b32", y[0]);
    case 5:
        WRITE("ds_write_b64", y);
    case 6:
        WRITE("ds_write_b128", x);
    case 7:
        WRITE("ds_add_u32", y[0]);
    case 8:
        WRITE("ds_add_u64", y);
    }
    out[l] = x[0] ^ x[1] ^ x[2] ^ x[3] ^ y[0] ^ y[1];
}
