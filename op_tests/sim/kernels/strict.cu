// Planted mistakes that hardware would let pass, each beside the right way to do it.

#define OUT ((u32*)out)[t]
typedef __attribute__((address_space(3))) void* Lds;
DEVICE u32 lds_address(const u32* x) { return (u32)(Lds)x; }

#define T const int t = lane_id(), l = t % 64

KERNEL(64) unset_register(const u32* in, u32* out) {
    T;
    u32 x;
    asm volatile("; %0 is not written" : "=v"(x));
    OUT = x * 2 + in[l];
}
KERNEL(64) unset_lanes(const u32* in, u32* out, int fix) {
    T;
    u32 x;
    asm volatile("; %0 is not written" : "=v"(x));
    if (fix || l >= 5)
        asm volatile("v_mov_b32 %0, %1" : "+v"(x) : "v"(in[l]));
    OUT = x;
}
KERNEL(64) early_read(const u32* in, u32* out) {
    T;
    u32 x;
    asm volatile("global_load_dword %0, %1, off\nv_add_u32 %0, %0, 3" : "=&v"(x) : "v"(in + l));
    OUT = x;
}
KERNEL(64) partly_waited(const u32* in, u32* out, int which) {
    T;
    u32 x, y, z;
    asm volatile("global_load_dword %0, %2, off\n"
                 "global_load_dword %1, %2, off offset:256\n"
                 "s_waitcnt vmcnt(1)"
                 : "=&v"(x), "=&v"(y)
                 : "v"(in + l));
    if (which)
        asm volatile("v_add_u32 %0, %1, 1" : "=v"(z) : "v"(y));
    else
        asm volatile("v_add_u32 %0, %1, 1" : "=v"(z) : "v"(x));
    asm volatile("s_waitcnt vmcnt(0)" : "+v"(z), "+v"(x), "+v"(y));
    OUT = z;
}
KERNEL(64) late_write(const u32* in, u32* out) {
    T;
    u32 x;
    asm volatile("global_load_dword %0, %1, off\nv_mov_b32 %0, 7\ns_waitcnt vmcnt(0)"
                 : "=&v"(x)
                 : "v"(in + l));
    OUT = x;
}
KERNEL(64) early_scalar(const u32* in, u32* out) {
    T;
    u32 x;
    asm volatile("s_load_dword %0, %1, 0\ns_add_u32 %0, %0, 1" : "=&s"(x) : "s"(in) : "scc");
    OUT = x;
}
KERNEL(64) half_of_a_pair(const u32* in, u32* out, int both) {
    T;
    typedef float Pair __attribute__((ext_vector_type(2)));
    Pair x = {(float)(in[l] >> 8), (float)(in[l] & 255)};
    if (both)
        asm volatile("s_mov_b32 s40, 2.0\nv_pk_mul_f32 %0, %0, s[40:41]"
                     : "+v"(x)
                     :
                     : "s40", "s41");
    else
        asm volatile("s_mov_b32 s40, 2.0\nv_pk_mul_f32 %0, %0, s[40:41] op_sel_hi:[1,0]"
                     : "+v"(x)
                     :
                     : "s40", "s41");
    OUT = (u32)x.x + (u32)x.y;
}
KERNEL(64) half_of_a_move(const u32* in, u32* out, int other) {
    T;
    u32x2 pair;
    asm volatile("v_mov_b32 v40, %1\nv_pk_mov_b32 %0, v[40:41], v[42:43] op_sel:[0,1]"
                 : "=v"(pair)
                 : "v"(in[l])
                 : "v40", "v41", "v42", "v43");
    OUT = other ? pair.y : pair.x;
}
KERNEL(64) early_lds(const u32* in, u32* out) {
    SHARED u32 words[64];
    T;
    words[l] = in[l];
    barrier();
    u32 x;
    asm volatile("ds_read_b32 %0, %1\nv_add_u32 %0, %0, 1\ns_waitcnt lgkmcnt(0)"
                 : "=&v"(x)
                 : "v"(lds_address(words + l))
                 : "memory");
    OUT = x;
}

// kind 0: right; 1: no barrier; 2: a barrier that does not wait for the write before it.
template <int kind>
DEVICE void neighbour(const u32* in, u32* out) {
    SHARED u32 words[256];
    T;
    words[t] = in[t];
    if (kind == 0)
        barrier();
    if (kind == 1)
        asm volatile("s_waitcnt lgkmcnt(0)" ::: "memory");
    if (kind == 2)
        __builtin_amdgcn_s_barrier();
    OUT = words[t ^ 64];
}
KERNEL(256) neighbour_right(const u32* in, u32* out) { neighbour<0>(in, out); }
KERNEL(256) neighbour_no_barrier(const u32* in, u32* out) { neighbour<1>(in, out); }
KERNEL(256) neighbour_no_wait(const u32* in, u32* out) { neighbour<2>(in, out); }

// A buffer that is filled again: the second barrier keeps the readers of the round before.
template <bool right>
DEVICE void rounds(const u32* in, u32* out) {
    SHARED u32 words[256];
    T;
    u32 sum = 0;
    for (int i = 0; i < 4; ++i) {
        words[t] = in[t + 256 * i];
        barrier();
        sum += words[t ^ 192] * (i + 1);
        if (right)
            barrier();
    }
    OUT = sum;
}
KERNEL(256) rounds_right(const u32* in, u32* out) { rounds<true>(in, out); }
KERNEL(256) rounds_overwrite(const u32* in, u32* out) { rounds<false>(in, out); }

// Copies from memory to LDS. kind 0: right; 1: not waited for; 2: read by others with no barrier;
// 3: the barrier comes before the wait.
template <int kind>
DEVICE void copied(const u32* in, u32* out) {
    SHARED u32 words[256];
    T;
    typedef __attribute__((address_space(1))) void* Global;
    const int wave = __builtin_amdgcn_readfirstlane(t / 64);
    __builtin_amdgcn_global_load_lds((Global)(in + t), (Lds)(words + 64 * wave), 4, 0, 0);
    if (kind == 3)
        __builtin_amdgcn_s_barrier();
    if (kind != 1)
        asm volatile("s_waitcnt vmcnt(0)" ::: "memory");
    if (kind == 0)
        barrier();
    u32 x;
    const int from = kind == 1 ? t : t ^ 128;
    asm volatile("ds_read_b32 %0, %1\ns_waitcnt lgkmcnt(0)"
                 : "=&v"(x)
                 : "v"(lds_address(words + from))
                 : "memory");
    OUT = x;
}
KERNEL(256) copied_right(const u32* in, u32* out) { copied<0>(in, out); }
KERNEL(256) copied_not_waited(const u32* in, u32* out) { copied<1>(in, out); }
KERNEL(256) copied_no_barrier(const u32* in, u32* out) { copied<2>(in, out); }
KERNEL(256) copied_late_wait(const u32* in, u32* out) { copied<3>(in, out); }

// What must not be taken for a mistake: bytes of one word, atomics, loads in both branches.
KERNEL(256) innocent(const u32* in, u32* out) {
    SHARED u8 bytes[256];
    SHARED u32 count;
    T;
    if (t == 0)
        count = 0;
    bytes[(t % 64) * 4 + t / 64] = (u8)in[t];
    barrier();
    __hip_atomic_fetch_add(&count, 1u, __ATOMIC_RELAXED, 3);
    u32 x;
    if (in[t] & 1)
        x = in[t + 256];
    else
        x = in[t + 512];
    barrier();
    OUT = x + bytes[t] + count;
}

// Every wave writes the same words: the same values when `same`, its own otherwise.
KERNEL(256) duplicates(const u32* in, u32* out, int same) {
    SHARED u32 words[64];
    T;
    words[l] = in[same ? l : t];
    barrier();
    OUT = words[l ^ 1];
}

// The order of waves decides: each leaves the number of those that came before it.
KERNEL(1024) order(const u32* in, u32* out) {
    T;
    u32 before = 0;
    for (int i = 0; i < 8; ++i)
        before = before * 17 + __hip_atomic_fetch_add(out + 1024, l == 0, __ATOMIC_RELAXED, 4);
    OUT = before + in[t];
}
KERNEL(64) endless(const u32* in, u32* out) {
    T;
    while (__hip_atomic_load(in + l, __ATOMIC_RELAXED, 4) != 12345)
        ;
    OUT = 1;
}
KERNEL(256) traps(const u32* in, u32* out) {
    T;
    if (t / 64 == 2)
        __builtin_trap();
    OUT = in[t];
}
KERNEL(64) unknown(const u32* in, u32* out) {
    T;
    u32 x;
    asm volatile("v_sad_hi_u8 %0, %1, %1, %1" : "=v"(x) : "v"(in[l]));
    OUT = x;
}

// Global memory that no order decides.
KERNEL(64) lanes_differ(const u32* in, u32* out, int stride) {
    T;
    asm volatile("global_store_dword %0, %1, off\n s_waitcnt vmcnt(0)" ::"v"(out + l * stride / 2),
                 "v"(in[l / 2] + (stride & 1) * l)
                 : "memory");
}
// kind 0: each wave its own, 1: all the same value, 2: different values, 3: in turn, by a barrier.
KERNEL(256) waves_write(const u32* in, u32* out, int kind) {
    T;
    u32 x = kind == 1 ? in[l] : in[t];
    u32* at = out + (kind ? l : t);
    for (int wave = 0; wave < 4; ++wave) {
        if (kind != 3 || t / 64 == wave)
            if (kind == 3 || wave == 0)
                *(volatile u32*)at = x;
        if (kind == 3)
            barrier();
    }
}
DEVICE u32 plain_load(const u32* at) {
    u32 x;
    asm volatile("global_load_dword %0, %1, off\n s_waitcnt vmcnt(0)"
                 : "=v"(x)
                 : "v"(at)
                 : "memory");
    return x;
}
KERNEL(256) waves_read(const u32* in, u32* out, int right) {
    T;
    ((volatile u32*)out)[t] = in[t];
    if (right)
        barrier();
    else
        asm volatile("s_waitcnt vmcnt(0)" ::: "memory");
    out[512 + t] = plain_load(out + (t ^ 64));
}
// Workgroups whose outputs overlap by so many words; with what is there already where `same`.
KERNEL(64) groups_overlap(const u32* in, u32* out, int overlap, int same) {
    T;
    u32 at = group_id() * (64 - overlap) + l;
    out[at] = same ? in[at] : in[at] + group_id();
}
KERNEL(64) groups_agree(const u32* in, u32* out, int count) {
    T;
    for (int i = 0; i < count; i++)
        ((volatile u32*)out)[64 * i + l] = in[64 * i + l];
}
KERNEL(64) groups_read(const u32* in, u32* out, int how) {
    T;
    u32* flag = out + 1000;
    ((volatile u32*)out)[64 * group_id() + l] = in[l];
    if (how) {
        __builtin_amdgcn_fence(__ATOMIC_RELEASE, "agent");
        if (l == 0)
            __hip_atomic_fetch_add(flag, 1, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
        while (__hip_atomic_load(flag, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT) < group_id())
            ;
        __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "agent");
    }
    u32 other = group_id() ? group_id() - 1 : 0;
    out[512 + 64 * group_id() + l] = plain_load(out + 64 * other + l);
}
KERNEL(64) atomic_at(const u32* in, u32* out, int offset) {
    T;
    asm volatile("global_atomic_add %0, %1, off" ::"v"((u64)(out + l) + offset), "v"(in[l])
                 : "memory");
}
KERNEL(64) lds_atomic_at(const u32* in, u32* out, int offset) {
    SHARED u32 words[80];
    T;
    words[l] = words[l + 16] = in[l];
    asm volatile("s_waitcnt lgkmcnt(0)\n ds_add_u32 %0, %1\n s_waitcnt lgkmcnt(0)" ::"v"(
                     lds_address(words + l) + offset),
                 "v"(in[l])
                 : "memory");
    OUT = words[l];
}
// One word of scratch is written, and one read.
KERNEL(64) scratch_word(const u32* in, u32* out, int at) {
    T;
    volatile u32 words[8];
    words[3] = in[l];
    asm volatile("" ::: "memory");
    OUT = words[at];
}
KERNEL(64) spilled_unset(const u32* in, u32* out, int use) {
    T;
    volatile u32 room[4];
    u32 x, y;
    asm volatile("; %0 is not written\n scratch_store_dword off, %0, off offset:4\n"
                 "scratch_load_dword %1, off, off offset:4\n s_waitcnt vmcnt(0)"
                 : "=&v"(x), "=&v"(y));
    room[0] = in[l];
    u32 z = room[0];
    OUT = use ? y : z;
}
KERNEL(64) scc_unset(const u32* in, u32* out, int write) {
    T;
    OUT = in[l];
}
// Address zero, through a descriptor whose base and records are what the arguments say.
KERNEL(64) scalar_at(const u32* in, u32* out, u32 base, u32 records) {
    typedef int i32x4 __attribute__((ext_vector_type(4)));
    T;
    i32x4 descriptor = {(int)base, 0, (int)records, 0x20000};
    u32 x;
    asm volatile("s_buffer_load_dword %0, %1, 0\n s_waitcnt lgkmcnt(0)"
                 : "=s"(x)
                 : "s"(descriptor));
    OUT = x + in[l];
}
// A copy to LDS over what others read: `wait` says whether they waited for it before the barrier,
// `copy` whether it is a copy or a plain write.
template <bool wait, bool copy>
DEVICE void over_reads(const u32* in, u32* out) {
    SHARED u32 words[256];
    T;
    words[t] = in[t];
    barrier();
    u32 x;
    asm volatile("ds_read_b32 %0, %1" : "=v"(x) : "v"(lds_address(words + (t ^ 64))) : "memory");
    if (wait)
        asm volatile("s_waitcnt lgkmcnt(0)" : "+v"(x)::"memory");
    asm volatile("s_barrier" : "+v"(x)::"memory");
    u32 base = __builtin_amdgcn_readfirstlane(lds_address(words + (t & ~63)));
    if (copy)
        asm volatile(
            "s_mov_b32 m0, %1\n s_nop 0\n global_load_lds_dword %0, off" ::"v"(in + 256 + t),
            "s"(base)
            : "memory", "m0");
    else
        asm volatile("ds_write_b32 %0, %1" ::"v"(lds_address(words + t)), "v"(t) : "memory");
    asm volatile("s_waitcnt vmcnt(0) lgkmcnt(0)" : "+v"(x)::"memory");
    OUT = x;
}
KERNEL(256) copy_over_reads(const u32* in, u32* out) { over_reads<false, true>(in, out); }
KERNEL(256) copy_after_reads(const u32* in, u32* out) { over_reads<true, true>(in, out); }
KERNEL(256) write_over_reads(const u32* in, u32* out) { over_reads<false, false>(in, out); }
