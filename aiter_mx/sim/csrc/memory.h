// Memory: global, flat, buffer, scratch, LDS, scalar loads. Every address is checked.
#pragma once
#include "delay.h"

API void global_load(Wave* w, u32 instruction, const u64* address, u32* d, Element element,
                     u32 size) {
    check_memory(w, instruction, address, size, 0);
    move_lanes(w, instruction, address, d, element, size, 0);
    u64 moved = (u64)size * (u64)__builtin_popcountll(w->exec);
    w->group->counters->bytes_read += moved;
    count_read(w, instruction, moved, size);
}
API void global_store(Wave* w, u32 instruction, const u64* address, const u32* d, Element element,
                      u32 size) {
    check_memory(w, instruction, address, size, 1);
    move_lanes(w, instruction, address, (u32*)d, element, size, 1);
    w->group->counters->bytes_written += (u64)size * (u64)__builtin_popcountll(w->exec);
}

// Buffers: words 0 and 1 are the base and, from bit 48, the stride; word 2 the records: of a buffer
// that is indexed and has a stride as many strides, of others bytes; word 3 flags. Scalar loads
// count strides wherever there is one, though their offset is in bytes.
NOINLINE u64 resource_base(const u32* r) { return r[0] | (u64)(r[1] & 0xffff) << 32; }
static u32 resource_stride(const u32* r) { return r[1] >> 16 & 0x3fff; }
// Each lane's address; returns the lanes whose `size` bytes are in range.
static u64 buffer_lanes(Wave* w, u32 instruction, const BufferAddress* at, u32 size, u64* address) {
    const u32 *resource = at->resource, *offsets = at->offsets;
    u64 base = resource_base(resource) + at->soffset, records = resource[2], valid = 0;
    int swizzles = resource[1] >> 31, adds_lane = resource[3] >> 23 & 1;
    if (UNLIKELY(swizzles | adds_lane))
        fail(w,
             (Fault){.kind = FAULT_DESCRIPTOR, .instruction = instruction, .reg = (u32)!swizzles});
    u32 stride = at->index ? resource_stride(resource) : 0;
    if (stride) {
        LANES {
            u64 offset = (u64)(offsets ? offsets[l] : 0) + (u64)(i64)at->fixed;
            address[l] = base + offset + (u64)at->index[l] * stride;
            valid |= (u64)(at->index[l] < records) << l;
        }
        return valid;
    }
    LANES {
        u64 offset = (u64)(offsets ? offsets[l] : 0) + (u64)(i64)at->fixed;
        address[l] = base + offset;
        valid |= (u64)(offset + at->soffset + size <= records) << l;
    }
    return valid;
}
// A dword out of range reads 0 and is not written; of a buffer with a stride, a lane.
API void buffer_access(Wave* w, u32 instruction, const BufferAddress* at, u32* d, Element element,
                       u32 size, int is_write) {
    Counters* counters = w->group->counters;
    u32 step = size < 4 ? size : 4;
    u64 base = resource_base(at->resource), exec = w->exec, address[64];
    u64 in_range = buffer_lanes(w, instruction, at, size, address);
    int has_records = !(at->index && resource_stride(at->resource));
    u64 records = has_records ? at->resource[2] : 0, begins_in_range = 0;
    if (UNLIKELY(exec & ~in_range))
        LANES begins_in_range |= (u64)(address[l] - base + step <= records) << l;
    set_exec(w, exec & in_range);
    check_memory(w, instruction, address, size, is_write);
    move_lanes(w, instruction, address, d, element, size, is_write);
    u64 moved = (u64)size * (u64)__builtin_popcountll(w->exec);
    set_exec(w, exec);
    if (exec & ~in_range & begins_in_range)
        complete_all(w); // such a lane's dwords are moved one by one
    for (u64 out = exec & ~in_range; out; out &= out - 1) {
        u32 l = (u32)__builtin_ctzll(out);
        for (u32 part = 0; part < size; part += step) {
            u64 one = 1ull << l, offset = address[l] - base + part;
            u32* row = d + 64 * (part / 4);
            if (offset + step <= records) {
                check_one(w, instruction, l, base + offset, step, is_write);
                u64 where[64];
                where[l] = base + offset;
                w->exec = one;
                int followed = STRICT && w->group->launch->coherence != NULL;
                u32 shift = element == U8_HI || element == U16_HI ? 16 : 0;
                if (is_write && followed)
                    store_versions(w, instruction, where, row, step, shift);
                if (is_write)
                    store_lanes(w, where, row, element, step / 4);
                else
                    load_lanes(w, where, row, element, step / 4);
                if (!is_write && followed)
                    load_as_seen(w, instruction, where, row, element, step);
                w->exec = exec;
                moved += step;
            } else if (!is_write) {
                static const u32 zero = 0;
                u64 where[64];
                where[l] = (u64)&zero;
                w->exec = one;
                load_lanes(w, where, row, element, step / 4);
                w->exec = exec;
            }
        }
    }
    *(is_write ? &counters->bytes_written : &counters->bytes_read) += moved;
    if (!is_write)
        count_read(w, instruction, moved, size);
}

void synchronise(Wave* w) { w->group->synchronises = 1; }

// What a lane's scratch bytes hold: nothing, a value, or what an unset register held.
enum { NOTHING_STORED, VALUE_STORED, UNSET_STORED };
static void scratch_stored(Wave* w, u32 instruction, const u64* offset, const u32* d, u32 size) {
    u32 row = (u32)((d - w->v) / 64);
    for (u32 i = 0; i < size; i += 4) {
        u64 unset = w->exec & ~w->set[row + i / 4];
        if (UNLIKELY(unset))
            unset = unset_lanes(w, instruction, w->exec, 1, row + i / 4);
        EACH_ACTIVE(w)
        memset(w->scratch_state + offset[ACTIVE_LANE] + i,
               unset >> ACTIVE_LANE & 1 ? UNSET_STORED : VALUE_STORED, size < 4 ? size : 4);
    }
}
static void scratch_loaded(Wave* w, u32 instruction, const u64* offset, u32 size) {
    Pending* p = queued(&w->vm, w->vm.count - 1);
    EACH_ACTIVE(w) {
        u32 l = ACTIVE_LANE;
        for (u32 i = 0; i < size; i++) {
            u8 state = w->scratch_state[offset[l] + i];
            if (UNLIKELY(state == NOTHING_STORED)) {
                u64 at = offset[l] + i - (u64)l * w->group->launch->scratch_bytes;
                found(w,
                      (Fault){.kind = FAULT_SCRATCH_UNSET,
                              .instruction = instruction,
                              .lane = l,
                              .address = at},
                      FAULT_SCRATCH_UNSET);
                break;
            }
            if (UNLIKELY(state == UNSET_STORED))
                p->unset[i / 4] |= 1ull << l;
        }
    }
}
// Scratch: a lane's private memory; `base` is the uniform part of the offset.
API void scratch_access(Wave* w, u32 instruction, const u32* offsets, i64 base, u32* d,
                        Element element, u32 size, int is_write) {
    u32 limit = w->group->launch->scratch_bytes;
    u64 address[64], offset[64];
    EACH_ACTIVE(w) {
        u32 l = ACTIVE_LANE;
        i64 at = base + (offsets ? (i64)(i32)offsets[l] : 0);
        if (UNLIKELY(at < 0 || at + size > limit))
            fail(w, (Fault){.kind = FAULT_SCRATCH_OUTSIDE,
                            .instruction = instruction,
                            .lane = l,
                            .address = (u64)at,
                            .size = size,
                            .is_write = (u32)is_write});
        offset[l] = (u64)l * limit + (u64)at;
        address[l] = (u64)w->scratch + offset[l];
    }
    if (STRICT && is_write)
        scratch_stored(w, instruction, offset, d, size);
    else if (STRICT)
        scratch_loaded(w, instruction, offset, size);
    if (is_write)
        store_lanes(w, address, d, element, size / 4);
    else
        load_lanes(w, address, d, element, size / 4);
    w->group->counters->scratch_bytes += (u64)size * (u64)__builtin_popcountll(w->exec);
}

// LDS
NOINLINE void lds_check(Wave* w, u32 instruction, const u32* at, u32 size, int is_write, u32 who,
                        const u32* data, u32 shift) {
    u64 limit = w->group->launch->lds_bytes;
    u32 high = 0;
    for (int l = 0; l < 64; l++) {
        u32 x = at[l] & w->mask[l];
        high = x > high ? x : high;
    }
    if (UNLIKELY((u64)high + size > limit) && w->exec) {
        u32 lane = 0;
        EACH_ACTIVE(w) if (at[ACTIVE_LANE] == high) lane = ACTIVE_LANE;
        fail(w, (Fault){.kind = FAULT_LDS_OUTSIDE,
                        .instruction = instruction,
                        .lane = lane,
                        .address = high,
                        .size = size,
                        .is_write = (u32)is_write});
    }
#if STRICT
    shadow(w, instruction, &(Access){at, size, shift, w->exec, is_write, who, data});
#endif
    Counters* counters = w->group->counters;
    *(is_write ? &counters->lds_bytes_written : &counters->lds_bytes_read) +=
        (u64)size * (u64)__builtin_popcountll(w->exec);
}
INLINE void count_conflicts(Wave* w, u32 instruction, const u32* at, u32 size, int is_write) {
    if (UNLIKELY(w->group->launch->count_conflicts))
        lds_conflicts(w, instruction, bank_conflicts(at, w->exec, size, is_write));
}
INLINE void lds_address(Wave* w, const u32* base, u32 offset, u32* at, u64* address) {
    u64 lds = (u64)w->group->lds;
    LANES {
        at[l] = base[l] + offset;
        address[l] = lds + at[l];
    }
}
API void lds_load(Wave* w, u32 instruction, const u32* base, u32 offset, u32* d, Element element,
                  u32 size) {
    u32 at[64];
    u64 address[64];
    lds_address(w, base, offset, at, address);
    lds_check(w, instruction, at, size, 0, w->id, NULL, 0);
    count_conflicts(w, instruction, at, size, 0);
    load_lanes(w, address, d, element, size / 4);
#if STRICT
    note_lds(w, &w->lgkm, at, size, w->exec, 0);
#endif
}
API void lds_store(Wave* w, u32 instruction, const u32* base, u32 offset, const u32* d,
                   Element element, u32 size) {
    u32 at[64];
    u64 address[64];
    lds_address(w, base, offset, at, address);
    lds_check(w, instruction, at, size, 1, w->id, d,
              element == U8_HI || element == U16_HI ? 16 : 0);
    count_conflicts(w, instruction, at, size, 1);
    store_lanes(w, address, d, element, size / 4);
#if STRICT
    note_lds(w, &w->lgkm, at, size, w->exec, 1);
#endif
}

// Flat: each lane's address says whether it means LDS, its scratch, or memory.
enum { SHARED_APERTURE = 1 << 16, PRIVATE_APERTURE = 1 << 17 };
API void flat_access(Wave* w, u32 instruction, const u64* address, u32* d, Element element,
                     u32 size, int is_write) {
    u32 low[64];
    u64 exec = w->exec, lds = 0, private_lanes = 0;
    for (int l = 0; l < 64; l++) {
        low[l] = (u32)address[l];
        lds |= (u64)(address[l] >> 32 == SHARED_APERTURE) << l;
        private_lanes |= (u64)(address[l] >> 32 == PRIVATE_APERTURE) << l;
    }
    if (exec & lds) {
        set_exec(w, exec & lds);
        if (is_write)
            lds_store(w, instruction, low, 0, d, element, size);
        else
            lds_load(w, instruction, low, 0, d, element, size);
    }
    if (exec & private_lanes) {
        set_exec(w, exec & private_lanes);
        scratch_access(w, instruction, low, 0, d, element, size, is_write);
    }
    set_exec(w, exec & ~lds & ~private_lanes);
    if (is_write)
        global_store(w, instruction, address, d, element, size);
    else
        global_load(w, instruction, address, d, element, size);
    set_exec(w, exec);
}

// Global or buffer memory to LDS: lane l lands at `base`, which comes from M0, plus l dwords or
// more.
static void store_to_lds(Wave* w, const u32* rows, u32 base, u32 step) {
    u64 target[64], lds = (u64)w->group->lds + base;
    LANES target[l] = lds + (u32)l * step;
    store_lanes(w, target, rows, DWORDS, step / 4);
}
// Where the rows of the copy issued last gather: `now`, unless it is to take effect late.
static u32* copied_rows(Wave* w, u32* now) {
    if (!STRICT || !w->group->launch->delay)
        return now;
    Delayed* late = delayed(w, w->vm.count - 1);
    memset(late->data, 0, sizeof late->data);
    return late->data;
}
static void rows_to_lds(Wave* w, u32 instruction, const u32* rows, u32 base, u32 step) {
    u32 at[64];
    LANES at[l] = base + (u32)l * step;
    int is_late = STRICT && w->group->launch->delay;
    lds_check(w, instruction, at, step, 1, BY_COPY + w->id, is_late ? NULL : rows, 0);
    if (is_late) {
        Delayed* late = delayed(w, w->vm.count - 1);
        if (!late->is_waiting)
            late->lanes = 0; // loaded already
        late->kind = LATE_COPY;
        late->is_waiting = 1;
        late->lds_base = base;
        late->lds_step = step;
        late->lds_lanes = w->exec;
    } else {
        store_to_lds(w, rows, base, step);
    }
#if STRICT
    note_lds(w, &w->vm, at, step, w->exec, 1);
#endif
}
API void copy_to_lds(Wave* w, u32 instruction, const u64* address, u32 base, Element element,
                     u32 size) {
    u32 now[4 * 64] = {0}, *rows = copied_rows(w, now);
    global_load(w, instruction, address, rows, element, size);
    rows_to_lds(w, instruction, rows, base, size < 4 ? 4 : size);
}
API void buffer_to_lds(Wave* w, u32 instruction, const BufferAddress* at, Element element,
                       u32 size) {
    u32 now[4 * 64] = {0}, *rows = copied_rows(w, now);
    buffer_access(w, instruction, at, rows, element, size, 0);
    u32 base = (w->s[M0] & 0x3ffff) + (u32)at->fixed;
    rows_to_lds(w, instruction, rows, base, size < 4 ? 4 : size);
}

// The scalar load issued last: a dword from each address, 0 where there is none; now or later.
static void load_scalars(Wave* w, u32 instruction, const u64* from, u32 d, u32 dwords) {
    Pending now = {.reg = (u16)d, .reg_count = (u16)dwords};
    Pending* p = &now;
    if (STRICT && w->group->launch->delay)
        p = queued(&w->lgkm, w->lgkm.count - 1);
    memcpy(p->address, from, 8 * dwords);
    p->is_waiting = 1;
    if (p == &now)
        complete_scalar(w, p);
    if (STRICT && UNLIKELY(w->group->launch->coherence != NULL))
        scalars_as_seen(w, instruction, from, d, dwords);
}
API void scalar_load(Wave* w, u32 instruction, u64 address, u32 d, u32 dwords) {
    u64 from[16];
    address &= ~3ull;
    check_one(w, instruction, 0, address, 4 * dwords, 0);
    for (u32 i = 0; i < dwords; i++)
        from[i] = address + 4 * i;
    load_scalars(w, instruction, from, d, dwords);
    w->group->counters->scalar_bytes_read += 4 * dwords;
    count_read(w, instruction, 4 * dwords, 4);
}
API void scalar_write(Wave* w, u32 instruction, u64 address, u32 s, u32 dwords, ScalarWrite kind) {
    address &= ~3ull;
    check_one(w, instruction, 0, address, 4 * dwords, 1);
    for (u32 i = 0; i < dwords; i++) {
        u32 *at = (u32*)address + i, data = w->s[s + i], old = *at, value;
        do {
            value = kind == SCALAR_STORE ? data
                    : kind == SCALAR_ADD ? old + data
                    : kind == SCALAR_INC ? (old >= data ? 0 : old + 1)
                                         : (old == 0 || old > data ? data : old - 1);
        } while (
            !__atomic_compare_exchange_n(at, &old, value, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
    }
    synchronise(w);
}
API void scalar_buffer_load(Wave* w, u32 instruction, const u32* resource, u32 offset, u32 d,
                            u32 dwords) {
    u64 base = resource_base(resource), at = offset & ~3u, from[16];
    u32 stride = resource_stride(resource);
    u64 bytes = (u64)resource[2] * (stride ? stride : 1);
    for (u32 i = 0; i < dwords; i++, at += 4) {
        from[i] = at + 4 > bytes ? NOWHERE : base + at;
        if (from[i] != NOWHERE)
            check_one(w, instruction, 0, from[i], 4, 0);
    }
    load_scalars(w, instruction, from, d, dwords);
    w->group->counters->scalar_bytes_read += 4 * dwords;
    count_read(w, instruction, 4 * dwords, 4);
}
