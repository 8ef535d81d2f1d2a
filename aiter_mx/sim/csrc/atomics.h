// Read-modify-write operations on global memory and LDS, lane after lane.
#pragma once
#include "memory.h"
#include "numbers.h"

// What both widths do, with the signed type.
#define INTEGER_CASES(S)                                                                           \
    case A_SWAP:                                                                                   \
        return x;                                                                                  \
    case A_CMPSWAP:                                                                                \
        return old == expected ? x : old;                                                          \
    case A_ADD:                                                                                    \
        return old + x;                                                                            \
    case A_SUB:                                                                                    \
        return old - x;                                                                            \
    case A_SMIN:                                                                                   \
        return (S)x < (S)old ? x : old;                                                            \
    case A_UMIN:                                                                                   \
        return x < old ? x : old;                                                                  \
    case A_SMAX:                                                                                   \
        return (S)x > (S)old ? x : old;                                                            \
    case A_UMAX:                                                                                   \
        return x > old ? x : old;                                                                  \
    case A_AND:                                                                                    \
        return old & x;                                                                            \
    case A_OR:                                                                                     \
        return old | x;                                                                            \
    case A_XOR:                                                                                    \
        return old ^ x;                                                                            \
    case A_INC:                                                                                    \
        return old >= x ? 0 : old + 1;                                                             \
    case A_DEC:                                                                                    \
        return old == 0 || old > x ? x : old - 1;

static u32 atomic32(Atomic op, u32 old, u32 x, u32 expected) {
    switch (op) {
        INTEGER_CASES(i32)
    case A_ADD_F32:
        return bits32(f32(old) + f32(x));
    case A_MIN_F32:
        return bits32(min_f32(f32(old), f32(x)));
    case A_MAX_F32:
        return bits32(max_f32(f32(old), f32(x)));
    case A_PK_ADD_F16:
        return f32_to_f16(f16_to_f32((u16)old) + f16_to_f32((u16)x)) |
               (u32)f32_to_f16(f16_to_f32((u16)(old >> 16)) + f16_to_f32((u16)(x >> 16))) << 16;
    case A_PK_ADD_BF16:
        return f32_to_bf16(f32(old << 16) + f32(x << 16)) |
               (u32)f32_to_bf16(f32(old & 0xffff0000u) + f32(x & 0xffff0000u)) << 16;
    default:
        __builtin_trap();
    }
}
static u64 atomic64(Atomic op, u64 old, u64 x, u64 expected) {
    switch (op) {
        INTEGER_CASES(i64)
    case A_ADD_F64:
        return bits64(f64(old) + f64(x));
    case A_MIN_F64:
        return bits64(fmin(f64(old), f64(x)));
    case A_MAX_F64:
        return bits64(fmax(f64(old), f64(x)));
    default:
        __builtin_trap();
    }
}

// Stores what `update` makes of the value there, which it leaves in `old`.
#define EXCHANGE(type, update)                                                                     \
    {                                                                                              \
        type *p = (type*)address[l], found = __atomic_load_n(p, __ATOMIC_RELAXED);                 \
        while (!__atomic_compare_exchange_n(p, &found, update(op, found, x, expected), 0,          \
                                            __ATOMIC_SEQ_CST, __ATOMIC_RELAXED)) {                 \
        }                                                                                          \
        old = found;                                                                               \
    }
static void atomic_lanes(Wave* w, const u64* address, u32* d, const u32* data, u32 operation,
                         u32 size) {
    Atomic op = (Atomic)operation;
    u32 wide = size == 8, compared = op == A_CMPSWAP ? 64 << wide : 0; // follows the new value
    EACH_ACTIVE(w) {
        u32 l = ACTIVE_LANE;
        const u32* new = data + l, *compare = new + compared;
        u64 x = wide ? new[0] | (u64) new[64] << 32 : new[0], old;
        u64 expected = wide ? compare[0] | (u64)compare[64] << 32 : compare[0];
        if (wide)
            EXCHANGE(u64, atomic64)
        else
            EXCHANGE(u32, atomic32)
        if (d)
            d[l] = (u32)old;
        if (d && wide)
            d[l + 64] = (u32)(old >> 32);
    }
}
// In LDS the address is that of the host's copy, whose alignment is the same.
static void check_alignment(Wave* w, u32 instruction, const u64* address, u32 size) {
    u64 low = 0;
    EACH_ACTIVE(w) low |= address[ACTIVE_LANE];
    if (!STRICT || !UNLIKELY(low & (size - 1)))
        return;
    EACH_ACTIVE(w)
    if (address[ACTIVE_LANE] & (size - 1)) {
        found(w,
              (Fault){.kind = FAULT_MISALIGNED,
                      .instruction = instruction,
                      .lane = ACTIVE_LANE,
                      .address = address[ACTIVE_LANE],
                      .size = size,
                      .is_write = 1},
              FAULT_MISALIGNED);
        return;
    }
}
// `d` is NULL where the old value is not wanted.
API void global_atomic(Wave* w, u32 instruction, const u64* address, u32* d, const u32* data,
                       Atomic op, u32 size) {
    check_memory(w, instruction, address, size, 0);
    check_memory(w, instruction, address, size, 1);
    check_alignment(w, instruction, address, size);
    synchronise(w);
    if (STRICT && w->group->launch->shadow)
        note_atomics(w, address, size);
    if (STRICT && UNLIKELY(w->group->launch->delay)) {
        Delayed* late =
            postpone(w, LATE_ATOMIC, address, size, data, size / 4 << (op == A_CMPSWAP));
        late->row = d;
        late->operation = op;
    } else {
        int followed = STRICT && w->group->launch->coherence != NULL;
        if (UNLIKELY(followed))
            atomic_sees(w, instruction, address, size, d != NULL);
        atomic_lanes(w, address, d, data, op, size);
        if (UNLIKELY(followed))
            atomic_versions(w, instruction, address, size);
    }
    u64 moved = (u64)size * (u64)__builtin_popcountll(w->exec);
    w->group->counters->bytes_read += moved;
    w->group->counters->bytes_written += moved;
}
API void buffer_atomic(Wave* w, u32 instruction, const BufferAddress* at, u32* d, const u32* data,
                       Atomic op, u32 size) {
    u64 address[64], exec = w->exec;
    set_exec(w, exec & buffer_lanes(w, instruction, at, size, address));
    global_atomic(w, instruction, address, d, data, op, size);
    set_exec(w, exec);
}
API void lds_atomic(Wave* w, u32 instruction, const u32* base, u32 offset, u32* d, const u32* data,
                    Atomic op, u32 size) {
    u32 at[64];
    u64 address[64];
    lds_address(w, base, offset, at, address);
    check_alignment(w, instruction, address, size);
#if STRICT
    EACH_ACTIVE(w) {
        u32 l = ACTIVE_LANE, limit = w->group->launch->lds_bytes;
        for (u32 i = 0; i < size && at[l] + i < limit; i++)
            if (UNLIKELY(!w->group->writer[at[l] + i]))
                bad_lds(w, instruction, l, at[l] + i, 0, 0, 1, FAULT_LDS_UNSET);
    }
#endif
    lds_check(w, instruction, at, size, 1, w->group->wave_count == 1 ? w->id : BY_ATOMIC, NULL, 0);
    if (UNLIKELY(w->group->launch->count_conflicts))
        lds_conflicts(w, instruction, atomic_conflicts(at, w->exec, size));
    atomic_lanes(w, address, d, data, op, size);
#if STRICT
    note_lds(w, &w->lgkm, at, size, w->exec, 1);
#endif
}
