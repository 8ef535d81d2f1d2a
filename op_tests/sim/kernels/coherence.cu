// Workgroups that hand each other data through memory, with each piece of the handover left out
// once. Neighbours in the grid lie on different XCDs, every eighth workgroup on the same one.

enum Piece {
    NOTHING,
    DRAIN,          // the wait for the data's stores, before the barrier
    BARRIER,        // between the data's stores and the flag
    WRITE_BACK,     // of the L2, or sc1 at the store
    WRITTEN_BACK,   // the wait for that
    ATOMIC_FLAG,    // the flag is stored or loaded plainly
    FLAG_WAIT,      // the wait for the flag's value comes after the invalidation
    INVALIDATE,     // of the caches, or sc1 at the load
    WORKGROUP_SCOPE // these with sc0 alone
};

DEVICE void store(u32* to, u32 x, bool sc1) {
    if (sc1)
        asm volatile("global_store_dword %0, %1, off sc1" ::"v"(to), "v"(x) : "memory");
    else
        asm volatile("global_store_dword %0, %1, off" ::"v"(to), "v"(x) : "memory");
}
DEVICE u32 load(const u32* from, bool sc1) {
    u32 x;
    if (sc1)
        asm volatile("global_load_dword %0, %1, off sc1\ns_waitcnt vmcnt(0)"
                     : "=&v"(x)
                     : "v"(from)
                     : "memory");
    else
        asm volatile("global_load_dword %0, %1, off\ns_waitcnt vmcnt(0)"
                     : "=&v"(x)
                     : "v"(from)
                     : "memory");
    return x;
}
DEVICE void drain() { asm volatile("s_waitcnt vmcnt(0)" ::: "memory"); }
DEVICE void write_back() { asm volatile("buffer_wbl2 sc1" ::: "memory"); }
DEVICE void invalidate() { asm volatile("buffer_inv sc1" ::: "memory"); }

// Split-K: each workgroup leaves a partial sum of every lane; whoever counts last adds them up.
// Data goes through the caches, which are written back and invalidated.
template <int without>
DEVICE void split(const u32* in, u32* parts, u32* counter, u32* out, int group) {
    SHARED u32 before;
    const int t = lane_id(), lanes = 128, groups = 4;
    store(parts + group * lanes + t, in[group * lanes + t], false);
    if (without != DRAIN)
        drain();
    if (without != BARRIER)
        __builtin_amdgcn_s_barrier();
    if (t == 0) {
        u32 count;
        if (without == WORKGROUP_SCOPE)
            asm volatile("buffer_wbl2 sc0" ::: "memory");
        else if (without != WRITE_BACK)
            write_back();
        if (without != WRITTEN_BACK)
            drain();
        if (without == ATOMIC_FLAG) {
            count = load(counter, false);
            store(counter, count + 1, false);
        } else {
            asm volatile("global_atomic_add %0, %1, %2, off sc0"
                         : "=&v"(count)
                         : "v"(counter), "v"(1)
                         : "memory");
        }
        if (without == FLAG_WAIT)
            invalidate();
        drain();
        before = count;
        if (without == WORKGROUP_SCOPE)
            asm volatile("buffer_inv sc0" ::: "memory");
        else if (without != INVALIDATE && without != FLAG_WAIT)
            invalidate();
    }
    barrier();
    if (before != groups - 1)
        return;
    u32 sum = 0;
    for (int i = 0; i < groups; ++i)
        sum += load(parts + i * lanes + t, false);
    out[t] = sum;
}
#define SPLIT(name, without)                                                                       \
    KERNEL(128) name(const u32* in, u32* parts, u32* counter, u32* out) {                          \
        split<without>(in, parts, counter, out, group_id());                                       \
    }
SPLIT(split_right, NOTHING)
SPLIT(split_no_drain, DRAIN)
SPLIT(split_no_barrier, BARRIER)
SPLIT(split_no_write_back, WRITE_BACK)
SPLIT(split_no_wait_for_write_back, WRITTEN_BACK)
SPLIT(split_plain_counter, ATOMIC_FLAG)
SPLIT(split_early_invalidate, FLAG_WAIT)
SPLIT(split_no_invalidate, INVALIDATE)
SPLIT(split_workgroup_scope, WORKGROUP_SCOPE)
// Those of the first XCD alone.
KERNEL(128) split_in_an_xcd(const u32* in, u32* parts, u32* counter, u32* out) {
    if (group_id() % 8 == 0)
        split<WRITE_BACK>(in, parts, counter, out, group_id() / 8);
}
KERNEL(128) split_in_an_xcd_no_invalidate(const u32* in, u32* parts, u32* counter, u32* out) {
    if (group_id() % 8 == 0)
        split<INVALIDATE>(in, parts, counter, out, group_id() / 8);
}

// Stream-K's fix-up: each workgroup but the last waits for what the next one leaves, which is
// stored and loaded past the caches.
template <int without>
DEVICE void fix_up(const u32* in, u32* parts, u32* flags, u32* out) {
    const int t = lane_id(), lanes = 128, group = group_id();
    const int groups = __builtin_amdgcn_grid_size_x() / lanes;
    u32 sum = in[group * lanes + t];
    if (group + 1 < groups) {
        while (load(flags + group + 1, without != ATOMIC_FLAG) == 0)
            __builtin_amdgcn_s_sleep(1);
        sum += load(parts + (group + 1) * lanes + t, without != INVALIDATE);
    }
    store(parts + group * lanes + t, sum, without != WRITE_BACK);
    out[group * lanes + t] = sum;
    if (without != DRAIN)
        drain();
    if (without != BARRIER)
        __builtin_amdgcn_s_barrier();
    if (t == 0)
        store(flags + group, 1, without != WRITTEN_BACK);
}
#define FIX_UP(name, without)                                                                      \
    KERNEL(128) name(const u32* in, u32* parts, u32* flags, u32* out) {                            \
        fix_up<without>(in, parts, flags, out);                                                    \
    }
FIX_UP(fix_up_right, NOTHING)
FIX_UP(fix_up_no_drain, DRAIN)
FIX_UP(fix_up_no_barrier, BARRIER)
FIX_UP(fix_up_plain_store, WRITE_BACK)
FIX_UP(fix_up_plain_load, INVALIDATE)
FIX_UP(fix_up_plain_flag, WRITTEN_BACK)
FIX_UP(fix_up_plain_poll, ATOMIC_FLAG)

// What compilers make of it.
KERNEL(128) compiled(const u32* in, u32* parts, u32* counter, u32* out) {
    SHARED u32 before;
    const int t = lane_id(), lanes = 128, group = group_id();
    const u32 groups = __builtin_amdgcn_grid_size_x() / lanes;
    parts[group * lanes + t] = in[group * lanes + t];
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "agent");
    __builtin_amdgcn_s_barrier();
    if (t == 0)
        before = __hip_atomic_fetch_add(counter, 1, __ATOMIC_ACQ_REL, __HIP_MEMORY_SCOPE_AGENT);
    barrier();
    if (before != groups - 1)
        return;
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "agent");
    u32 sum = 0;
    for (u32 i = 0; i < groups; ++i)
        sum += parts[i * lanes + t];
    out[t] = sum;
}

// The first workgroup leaves a word, the other reads it by a scalar load.
template <bool invalidates>
DEVICE void scalar(const u32* in, u32* word, u32* flag, u32* out) {
    if (group_id() == 0) {
        store(word, in[0], true);
        drain();
        store(flag, 1, true);
        return;
    }
    while (load(flag, true) == 0)
        __builtin_amdgcn_s_sleep(1);
    invalidate();
    if (invalidates)
        asm volatile("s_dcache_inv" ::: "memory");
    u32 x;
    asm volatile("s_load_dword %0, %1, 0\ns_waitcnt lgkmcnt(0)" : "=&s"(x) : "s"(word) : "memory");
    out[lane_id()] = x;
}
KERNEL(64) scalar_invalidated(const u32* in, u32* word, u32* flag, u32* out) {
    scalar<true>(in, word, flag, out);
}
KERNEL(64) scalar_stale(const u32* in, u32* word, u32* flag, u32* out) {
    scalar<false>(in, word, flag, out);
}

// Every workgroup waits for the last one.
KERNEL(64) wait_for_the_last(u32* flag) {
    SHARED u32 all[40 * 1024];
    const int groups = __builtin_amdgcn_grid_size_x() / 64;
    all[lane_id()] = 0;
    if (group_id() == groups - 1)
        store(flag, 1, true);
    while (load(flag, true) == 0)
        all[lane_id()]++;
}
// The two take two locks in opposite order.
KERNEL(64) two_locks(u32* locks) {
    const int group = group_id();
    for (int i = 0; i < 2; ++i) {
        u32* lock = locks + (group ^ i);
        while (lane_id() == 0 &&
               __hip_atomic_exchange(lock, 1u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT) != 0)
            __builtin_amdgcn_s_sleep(1);
        while (i == 0 && load(locks + (1 - group), true) == 0)
            ;
    }
}
