// What memory instructions are made of: addresses are checked and counted, lanes are moved.
#pragma once
#include "banks.h"
#include "order.h"

enum { LINE_BYTES = 128 };

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
// What a load read, by the workgroup and the region that was checked last.
INLINE void count_read(Wave* w, u32 instruction, u64 bytes, u32 size) {
    const Launch* launch = w->group->launch;
    if (UNLIKELY(launch->group_bytes != NULL) && w->group->last_region)
        launch->group_bytes[w->group->index * launch->region_count +
                            (u64)(w->group->last_region - launch->regions)] += bytes;
    if (UNLIKELY(launch->first_load != NULL) && size == 16 && !launch->first_load[0]) {
        launch->first_load[0] = 1 + instruction;
        memcpy(launch->first_load + 1, w->group->block_counts, launch->blocks * sizeof(u64));
    }
}
static u32 new_lines(Trace* trace, u32 region, const u64* offset, u64 lanes, u32 size) {
    u32 count = 0;
    for (; lanes; lanes &= lanes - 1) {
        u64 first = offset[__builtin_ctzll(lanes)], last = first + size - 1;
        for (u64 line = first / LINE_BYTES; line <= last / LINE_BYTES; line++)
            count += is_new_line(trace, (u64)(region + 1) << 40 | line);
    }
    return count;
}
// Four neighbours take a cycle of the address unit if they begin in one line, else one each.
NOINLINE u64 address_cycles(const u64* address, u64 lanes) {
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
// A region begins at a line, as what a GPU allocates does, wherever the host put it.
NOINLINE void note_memory(Wave* w, u32 instruction, const u64* address, u32 size) {
    const Region* r = w->group->last_region;
    u64 first = address[__builtin_ctzll(w->exec)], offset[64];
    if (!r || first < r->begin || first >= r->end)
        r = find_region(w->group->launch, first);
    if (!r)
        return;
    LANES offset[l] = address[l] - r->begin;
    u32 region = (u32)(r - w->group->launch->regions);
    u32 words[4] = {COUNTS_NEW_LINES | region << 16 | (u32)address_cycles(offset, w->exec),
                    (u32)((first - r->begin) / LINE_BYTES),
                    new_lines(w->trace, region, offset, w->exec, size),
                    size * (u32)__builtin_popcountll(w->exec)};
    note(w->trace, TRACE_MEMORY, instruction, 4, words);
}
NOINLINE void check_memory(Wave* w, u32 instruction, const u64* address, u32 size, int is_write) {
    if (!w->exec)
        return;
    if (UNLIKELY(w->group->launch->count_conflicts)) {
        u64 cycles = address_cycles(address, w->exec);
        w->group->counters->address_cycles += cycles;
        if (UNLIKELY(w->trace != NULL))
            note_memory(w, instruction, address, size);
    }
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

API void address_v(u64* out, const u32* base, i32 offset) {
    LANES out[l] = (base[l] | (u64)base[l + 64] << 32) + (u64)(i64)offset;
}
API void address_s(u64* out, u64 base, const u32* index, i32 offset) {
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
