// Memory: global, flat, buffer, scratch, LDS, scalar loads. Every address is checked.
#pragma once
#include "banks.h"
#include "order.h"

typedef enum { U8, I8, U8_LO, U8_HI, I8_LO, I8_HI, U16, I16, U16_LO, U16_HI, DWORDS } Element;

static const Region* find_region(const Launch* launch, u64 address) {
    u32 low = 0, high = launch->region_count;
    while (low < high) {
        u32 middle = (low + high) / 2;
        if (launch->regions[middle].end <= address)
            low = middle + 1;
        else
            high = middle;
    }
    const Region* found = launch->regions + low;
    return low < launch->region_count && address >= found->begin ? found : NULL;
}
static void mark_seen(Wave* w, const Region* r, u64 address, u32 size, int is_write) {
    u8* bits = w->group->seen[2 * (r - w->group->launch->regions) + is_write];
    u64 at = address - r->begin;
    for (; size; size -= size < 16 ? size : 16, at += 16) {
        u32 word, count = size < 16 ? size : 16;
        memcpy(&word, bits + at / 8, 4);
        word |= ((1u << count) - 1) << (at & 7);
        memcpy(bits + at / 8, &word, 4);
    }
}
static void check_one(Wave* w, u32 instruction, u32 lane, u64 address, u32 size, int is_write) {
    const Region* r = w->group->last_region;
    if (!r || address < r->begin || address >= r->end)
        r = find_region(w->group->launch, address);
    Fault fault = {.instruction = instruction,
                   .lane = lane,
                   .address = address,
                   .size = size,
                   .is_write = (u32)is_write};
    if (UNLIKELY(!r || r->end - address < size)) {
        fault.kind = FAULT_OUTSIDE;
        fail(w, fault);
    }
    if (UNLIKELY(is_write ? !r->writable : !r->readable)) {
        fault.kind = FAULT_ACCESS;
        fail(w, fault);
    }
    w->group->last_region = r;
    if (UNLIKELY(w->group->seen != NULL))
        mark_seen(w, r, address, size, is_write);
}
// Four neighbours take a cycle of the address unit if they begin in one line, else one each.
NOINLINE u64 address_cycles(const u64* address, u64 lanes) {
    enum { LINE_BYTES = 128 };
    u64 cycles = 0;
    for (u32 first = 0; first < 64; first += 4) {
        u64 line = 0, count = 0, same = 0;
        for (u32 l = first; l < first + 4; l++)
            if (lanes >> l & 1) {
                line = count ? line : address[l] / LINE_BYTES;
                same += address[l] / LINE_BYTES == line;
                count++;
            }
        cycles += same == count ? count > 0 : count;
    }
    return cycles;
}
NOINLINE void check_memory(Wave* w, u32 instruction, const u64* address, u32 size, int is_write) {
    if (!w->exec)
        return;
    if (UNLIKELY(w->group->launch->count_conflicts))
        w->group->counters->address_cycles += address_cycles(address, w->exec);
    u64 low = ~0ull, high = 0;
    for (int l = 0; l < 64; l++) {
        u64 m = (u64)(i64)(i32)w->mask[l], a = address[l];
        u64 for_low = a | ~m, for_high = a & m;
        low = for_low < low ? for_low : low;
        high = for_high > high ? for_high : high;
    }
    const Region* r = w->group->last_region;
    if (!r || low < r->begin || low >= r->end)
        r = find_region(w->group->launch, low);
    if (r && high < r->end && r->end - high >= size && (is_write ? r->writable : r->readable)) {
        w->group->last_region = r;
        if (UNLIKELY(w->group->seen != NULL))
            EACH_ACTIVE(w) mark_seen(w, r, address[ACTIVE_LANE], size, is_write);
        return;
    }
    EACH_ACTIVE(w) check_one(w, instruction, ACTIVE_LANE, address[ACTIVE_LANE], size, is_write);
}

NOINLINE void address_v(u64* out, const u32* base, i32 offset) {
    LANES out[l] = (base[l] | (u64)base[l + 64] << 32) + (u64)(i64)offset;
}
NOINLINE void address_s(u64* out, u64 base, const u32* index, i32 offset) {
    LANES out[l] = base + index[l] + (u64)(i64)offset;
}

#define LOAD_EACH(type, expression)                                                                \
    EACH_ACTIVE(w) {                                                                               \
        int l = ACTIVE_LANE;                                                                       \
        type x;                                                                                    \
        memcpy(&x, (const void*)address[l], sizeof x);                                             \
        d[l] = (expression);                                                                       \
    }                                                                                              \
    break
// Loads into row d and those after it; addresses are checked already.
NOINLINE void load_lanes(Wave* w, const u64* address, u32* d, Element element, u32 dwords) {
    switch (element) {
    case U8:
        LOAD_EACH(u8, x);
    case I8:
        LOAD_EACH(i8, (u32)(i32)x);
    case U8_LO:
        LOAD_EACH(u8, (d[l] & 0xffff0000u) | x);
    case U8_HI:
        LOAD_EACH(u8, (d[l] & 0xffffu) | (u32)x << 16);
    case I8_LO:
        LOAD_EACH(i8, (d[l] & 0xffff0000u) | (u16)x);
    case I8_HI:
        LOAD_EACH(i8, (d[l] & 0xffffu) | (u32)(u16)x << 16);
    case U16:
        LOAD_EACH(u16, x);
    case I16:
        LOAD_EACH(i16, (u32)(i32)x);
    case U16_LO:
        LOAD_EACH(u16, (d[l] & 0xffff0000u) | x);
    case U16_HI:
        LOAD_EACH(u16, (d[l] & 0xffffu) | (u32)x << 16);
    case DWORDS:
        if (dwords == 1) {
            LOAD_EACH(u32, x);
        }
        EACH_ACTIVE(w) {
            int l = ACTIVE_LANE;
            u32 x[4];
            if (dwords == 4) {
                memcpy(x, (const void*)address[l], 16);
                d[l] = x[0], d[l + 64] = x[1], d[l + 128] = x[2], d[l + 192] = x[3];
            } else {
                memcpy(x, (const void*)address[l], 4 * dwords);
                for (u32 i = 0; i < dwords; i++)
                    d[l + 64 * i] = x[i];
            }
        }
    }
}
#define STORE_EACH(type, expression)                                                               \
    EACH_ACTIVE(w) {                                                                               \
        int l = ACTIVE_LANE;                                                                       \
        type x = (type)(expression);                                                               \
        memcpy((void*)address[l], &x, sizeof x);                                                   \
    }                                                                                              \
    break
NOINLINE void store_lanes(Wave* w, const u64* address, const u32* d, Element element, u32 dwords) {
    switch (element) {
    case U8:
        STORE_EACH(u8, d[l]);
    case U8_HI:
        STORE_EACH(u8, d[l] >> 16);
    case U16:
        STORE_EACH(u16, d[l]);
    case U16_HI:
        STORE_EACH(u16, d[l] >> 16);
    default:
        if (dwords == 1) {
            STORE_EACH(u32, d[l]);
        }
        EACH_ACTIVE(w) {
            int l = ACTIVE_LANE;
            for (u32 i = 0; i < dwords; i++)
                memcpy((u8*)address[l] + 4 * i, d + l + 64 * i, 4);
        }
    }
}

#include "delay.h"

NOINLINE void global_load(Wave* w, u32 instruction, const u64* address, u32* d, Element element,
                          u32 size) {
    check_memory(w, instruction, address, size, 0);
    move_lanes(w, address, d, element, size, 0);
    w->group->counters->bytes_read += (u64)size * (u64)__builtin_popcountll(w->exec);
}
NOINLINE void global_store(Wave* w, u32 instruction, const u64* address, const u32* d,
                           Element element, u32 size) {
    check_memory(w, instruction, address, size, 1);
    move_lanes(w, address, (u32*)d, element, size, 1);
    w->group->counters->bytes_written += (u64)size * (u64)__builtin_popcountll(w->exec);
}

// Buffers: word 0-1 base, word 1 stride, word 2 records (bytes for a raw buffer), word 3 flags.
// A dword out of range reads 0 and is not written.
NOINLINE void buffer_access(Wave* w, u32 instruction, const u32* resource, const u32* offsets,
                            i32 fixed, u32 soffset, u32* d, Element element, u32 size,
                            int is_write) {
    u64 base = resource[0] | (u64)(resource[1] & 0xffff) << 32, records = resource[2];
    Counters* counters = w->group->counters;
    u32 step = size < 4 ? size : 4;
    u64 exec = w->exec, in_range = 0, begins_in_range = 0;
    u64 address[64];
    LANES {
        u64 at = (u64)(offsets ? offsets[l] : 0) + (u64)(i64)fixed;
        address[l] = base + at + soffset;
        in_range |= (u64)(at + soffset + size <= records) << l;
        begins_in_range |= (u64)(at + soffset + step <= records) << l;
    }
    set_exec(w, exec & in_range);
    check_memory(w, instruction, address, size, is_write);
    move_lanes(w, address, d, element, size, is_write);
    u64 moved = (u64)size * (u64)__builtin_popcountll(w->exec);
    set_exec(w, exec);
    if (exec & ~in_range & begins_in_range)
        complete_all(w); // such a lane's dwords are moved one by one
    for (u64 out = exec & ~in_range; out; out &= out - 1) {
        u32 l = (u32)__builtin_ctzll(out);
        for (u32 part = 0; part < size; part += step) {
            u64 one = 1ull << l, at = address[l] - base + part;
            u32* row = d + 64 * (part / 4);
            if (at + step <= records) {
                check_one(w, instruction, l, base + at, step, is_write);
                u64 where[64];
                where[l] = base + at;
                w->exec = one;
                if (is_write)
                    store_lanes(w, where, row, element, step / 4);
                else
                    load_lanes(w, where, row, element, step / 4);
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
}

NOINLINE u64 resource_base(const u32* r) { return r[0] | (u64)(r[1] & 0xffff) << 32; }

// Scratch: a lane's private memory; `base` is the uniform part of the offset.
NOINLINE void scratch_access(Wave* w, u32 instruction, const u32* offsets, i64 base, u32* d,
                             Element element, u32 size, int is_write) {
    u32 limit = w->group->launch->scratch_bytes;
    u64 address[64];
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
        address[l] = (u64)w->scratch + (u64)l * limit + (u64)at;
    }
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
INLINE void count_conflicts(Wave* w, const u32* at, u32 size, int is_write) {
    if (UNLIKELY(w->group->launch->count_conflicts))
        w->group->counters->lds_conflicts += bank_conflicts(at, w->exec, size, is_write);
}
INLINE void lds_address(Wave* w, const u32* base, u32 offset, u32* at, u64* address) {
    u64 lds = (u64)w->group->lds;
    LANES {
        at[l] = base[l] + offset;
        address[l] = lds + at[l];
    }
}
NOINLINE void lds_load(Wave* w, u32 instruction, const u32* base, u32 offset, u32* d,
                       Element element, u32 size) {
    u32 at[64];
    u64 address[64];
    lds_address(w, base, offset, at, address);
    lds_check(w, instruction, at, size, 0, w->id, NULL, 0);
    count_conflicts(w, at, size, 0);
    load_lanes(w, address, d, element, size / 4);
#if STRICT
    note_lds(w, &w->lgkm, at, size, w->exec, 0);
#endif
}
NOINLINE void lds_store(Wave* w, u32 instruction, const u32* base, u32 offset, const u32* d,
                        Element element, u32 size) {
    u32 at[64];
    u64 address[64];
    lds_address(w, base, offset, at, address);
    lds_check(w, instruction, at, size, 1, w->id, d,
              element == U8_HI || element == U16_HI ? 16 : 0);
    count_conflicts(w, at, size, 1);
    store_lanes(w, address, d, element, size / 4);
#if STRICT
    note_lds(w, &w->lgkm, at, size, w->exec, 1);
#endif
}

// Flat: each lane's address says whether it means LDS, its scratch, or memory.
enum { SHARED_APERTURE = 1 << 16, PRIVATE_APERTURE = 1 << 17 };
NOINLINE void flat_access(Wave* w, u32 instruction, const u64* address, u32* d, Element element,
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
NOINLINE void copy_to_lds(Wave* w, u32 instruction, const u64* address, u32 base, Element element,
                          u32 size) {
    u32 now[4 * 64] = {0}, *rows = copied_rows(w, now);
    global_load(w, instruction, address, rows, element, size);
    rows_to_lds(w, instruction, rows, base, size < 4 ? 4 : size);
}
NOINLINE void buffer_to_lds(Wave* w, u32 instruction, const u32* resource, const u32* offsets,
                            i32 fixed, u32 soffset, Element element, u32 size) {
    u32 now[4 * 64] = {0}, *rows = copied_rows(w, now);
    buffer_access(w, instruction, resource, offsets, fixed, soffset, rows, element, size, 0);
    rows_to_lds(w, instruction, rows, (w->s[M0] & 0x3ffff) + (u32)fixed, size < 4 ? 4 : size);
}

// The scalar load issued last: a dword from each address, 0 where there is none; now or later.
static void load_scalars(Wave* w, const u64* from, u32 d, u32 dwords) {
    Pending now = {.reg = (u16)d, .reg_count = (u16)dwords};
    Pending* p = &now;
    if (STRICT && w->group->launch->delay)
        p = queued(&w->lgkm, w->lgkm.count - 1);
    memcpy(p->address, from, 8 * dwords);
    p->is_waiting = 1;
    if (p == &now)
        complete_scalar(w, p);
}
NOINLINE void scalar_load(Wave* w, u32 instruction, u64 address, u32 d, u32 dwords) {
    u64 from[16];
    address &= ~3ull;
    check_one(w, instruction, 0, address, 4 * dwords, 0);
    for (u32 i = 0; i < dwords; i++)
        from[i] = address + 4 * i;
    load_scalars(w, from, d, dwords);
    w->group->counters->scalar_bytes_read += 4 * dwords;
}
NOINLINE void scalar_buffer_load(Wave* w, u32 instruction, const u32* resource, u32 offset, u32 d,
                                 u32 dwords) {
    u64 base = resource_base(resource), at = offset & ~3u, from[16];
    for (u32 i = 0; i < dwords; i++, at += 4) {
        from[i] = at + 4 > resource[2] ? 0 : base + at;
        if (from[i])
            check_one(w, instruction, 0, from[i], 4, 0);
    }
    load_scalars(w, from, d, dwords);
    w->group->counters->scalar_bytes_read += 4 * dwords;
}
