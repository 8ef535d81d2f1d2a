// What is seen when memory operations take effect late: out[256..] is what was read, of `in` or
// not.

typedef __attribute__((address_space(3))) void* Lds;
typedef __attribute__((address_space(1))) void* Global;
#define T const int t = lane_id(), l = t % 64

// Neighbours talk through memory. The store of one wave is, or is not, waited for before the
// barrier.
template <bool is_waited>
DEVICE void through_memory(const u32* in, u32* out) {
    T;
    u32 x = in[t];
    asm volatile("global_store_dword %0, %1, off" ::"v"(out + t), "v"(x) : "memory");
    if (is_waited)
        asm volatile("s_waitcnt vmcnt(0)" ::: "memory");
    __builtin_amdgcn_s_barrier();
    asm volatile("global_load_dword %0, %1, off\ns_waitcnt vmcnt(0)"
                 : "=&v"(x)
                 : "v"(out + (t ^ 64))
                 : "memory");
    barrier();
    asm volatile("s_waitcnt vmcnt(0)" ::: "memory");
    out[256 + t] = x;
}
KERNEL(256) memory_waited(const u32* in, u32* out) { through_memory<true>(in, out); }
KERNEL(256) memory_not_waited(const u32* in, u32* out) { through_memory<false>(in, out); }

// The first wave's load is under way when the second overwrites what it reads.
KERNEL(128) load_overtaken(const u32* in, u32* out) {
    T;
    u32 x = in[t];
    asm volatile("" : "+v"(x));
    if (t < 64)
        asm volatile("global_load_dword %0, %1, off" : "=&v"(x) : "v"(out + t) : "memory");
    __builtin_amdgcn_s_barrier();
    if (t >= 64)
        asm volatile("global_store_dword %0, %1, off\ns_waitcnt vmcnt(0)" ::"v"(out + l), "v"(x)
                     : "memory");
    __builtin_amdgcn_s_barrier();
    asm volatile("s_waitcnt vmcnt(0)" : "+v"(x)::"memory");
    if (t < 64)
        out[256 + t] = x;
}

// As above, with the first wave's operation a copy to LDS (kind 0, through a buffer 1), a scalar
// load (2), a flat load (3), or an atomic addition, of which the second wave may see the sum or
// not (4).
template <int kind>
DEVICE void overtaken(const u32* in, u32* out) {
    SHARED u32 words[64];
    T;
    const int wave = __builtin_amdgcn_readfirstlane(t / 64);
    u32 x = in[t], scalar = 0;
    asm volatile("" : "+v"(x));
    if (wave == 0) {
        if (kind == 0)
            __builtin_amdgcn_global_load_lds((Global)(out + t), (Lds)words, 4, 0, 0);
        if (kind == 1)
            __builtin_amdgcn_raw_ptr_buffer_load_lds(
                __builtin_amdgcn_make_buffer_rsrc(out, 0, 256, 0x27000), (Lds)words, 4, 4 * t, 0, 0,
                0);
        if (kind == 2)
            asm volatile("s_load_dword %0, %1, 0" : "=&s"(scalar) : "s"(out) : "memory");
        if (kind == 3)
            asm volatile("flat_load_dword %0, %1" : "=&v"(x) : "v"(out + t) : "memory");
        if (kind == 4)
            asm volatile("global_atomic_add %0, %1, off" ::"v"(out + t), "v"(x) : "memory");
    }
    __builtin_amdgcn_s_barrier();
    if (wave == 1 && kind < 4)
        asm volatile("global_store_dword %0, %1, off\ns_waitcnt vmcnt(0)" ::"v"(out + l), "v"(x)
                     : "memory");
    if (wave == 1 && kind == 4)
        asm volatile("global_load_dword %0, %1, off\ns_waitcnt vmcnt(0)"
                     : "=&v"(x)
                     : "v"(out + l)
                     : "memory");
    __builtin_amdgcn_s_barrier();
    asm volatile("s_waitcnt vmcnt(0) lgkmcnt(0)" : "+v"(x), "+s"(scalar)::"memory");
    if (wave == 0 && kind < 4)
        out[256 + t] = kind < 2 ? words[t] : kind == 2 ? scalar : x;
    if (wave == 1 && kind == 4)
        out[256 + l] = x;
}
KERNEL(128) copy_overtaken(const u32* in, u32* out) { overtaken<0>(in, out); }
KERNEL(128) buffer_copy_overtaken(const u32* in, u32* out) { overtaken<1>(in, out); }
KERNEL(128) scalar_overtaken(const u32* in, u32* out) { overtaken<2>(in, out); }
KERNEL(128) flat_overtaken(const u32* in, u32* out) { overtaken<3>(in, out); }
KERNEL(128) atomic_overtaken(const u32* in, u32* out) { overtaken<4>(in, out); }

// Two stores of one wave as another wave sees them. To words that are `apart`: 0 neither, 1 the
// first, 2 the second, 3 both. To the same word: 0 neither, 2 the first, 1 the second.
KERNEL(128) two_stores(const u32* in, u32* out, int apart) {
    T;
    u32 first = 0, second = 0;
    if (t < 64)
        asm volatile("global_store_dword %0, %2, off\nglobal_store_dword %1, %3, off" ::"v"(out),
                     "v"(out + apart), "v"(apart ? 1 : 2), "v"(1)
                     : "memory");
    __builtin_amdgcn_s_barrier();
    if (t >= 64)
        asm volatile("global_load_dword %0, %2, off\nglobal_load_dword %1, %3, off\n"
                     "s_waitcnt vmcnt(0)"
                     : "=&v"(first), "=&v"(second)
                     : "v"(out), "v"(out + apart)
                     : "memory");
    barrier();
    if (t >= 64)
        out[256 + l] = apart ? first + 2 * second : first;
}
