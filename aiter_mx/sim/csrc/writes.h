// Strict mode: who wrote each dword of global memory last, to find stores that no order decides.
#pragma once
#include "access.h"

// Shadow of a dword: workgroup + 1, barrier interval, wave, whether by an atomic, bytes written.
enum { BYTES_WRITTEN = 15, WRITTEN_BY_ATOMIC = 16, WAVE_SHIFT = 8, GROUP_SHIFT = 40 };
#define INTERVALS 0xfffffu

static u64 write_tag(const Wave* w) {
    const Group* g = w->group;
    return (g->index + 1) << GROUP_SHIFT | (g->global_epoch & INTERVALS) << 20 |
           (u64)w->id << WAVE_SHIFT;
}
static u64* dwords_of(Wave* w, u64 address, int is_write) {
    const Launch* launch = w->group->launch;
    const Region* r = w->group->last_region;
    if (!r || address < r->begin || address >= r->end)
        r = find_region(launch, address);
    u64* shadow = r && r->writable ? launch->shadow[r - launch->regions] : NULL;
    if (shadow && is_write)
        shadow[-1] = 1;
    return shadow ? shadow + (address / 4 - r->begin / 4) : NULL;
}
// Whether nothing orders a write before what this wave does now.
static int is_unordered(const Wave* w, u64 written, u64 tag) {
    if (w->group->synchronises || written & WRITTEN_BY_ATOMIC)
        return 0;
    if (written >> GROUP_SHIFT != tag >> GROUP_SHIFT)
        return 1;
    return written >> 20 == tag >> 20 && (written ^ tag) >> WAVE_SHIFT & 255;
}
__attribute__((cold, noinline)) static void bad_order(Wave* w, u32 instruction, u32 lane,
                                                      u64 address, u64 written, int is_write) {
    found(w,
          (Fault){.kind = FAULT_GLOBAL_RACE,
                  .instruction = instruction,
                  .lane = lane,
                  .address = address,
                  .is_write = (u32)is_write,
                  .other_wave = written >> WAVE_SHIFT & 255,
                  .other_group = (written >> GROUP_SHIFT) - 1},
          FAULT_GLOBAL_RACE);
}
// The bits of a lane's data that go to a byte; `shift` is 16 for the instructions of high halves.
INLINE u8 stored_byte(const u32* d, u32 lane, u32 byte, u32 shift) {
    return (u8)(d[lane + 64 * (byte / 4)] >> shift >> (8 * (byte & 3)));
}
static int changes_memory(const u32* d, u32 lane, u64 address, u32 from, u32 to, u32 shift) {
    for (u32 i = from; i < to; i++)
        if (*(const u8*)(address + i) != stored_byte(d, lane, i, shift))
            return 1;
    return 0;
}
static void write_bytes(const u32* d, u32 lane, u64 address, u32 from, u32 to, u32 shift) {
    for (u32 i = from; i < to; i++)
        __atomic_store_n((u8*)(address + i), stored_byte(d, lane, i, shift), __ATOMIC_RELAXED);
}
// Writes what the store is about to write: a workgroup on another host thread that finds the tag
// compares its own value with memory, where this one has to be by then.
NOINLINE void note_writes(Wave* w, u32 instruction, const u64* address, const u32* d, u32 size,
                          u32 shift) {
    u64 tag = write_tag(w);
    int alone = w->group->launch->coherence != NULL; // on one thread, and versions come first
    EACH_ACTIVE(w) {
        u32 l = ACTIVE_LANE;
        u64* at = dwords_of(w, address[l], 1);
        if (!at)
            continue;
        for (u32 from = 0, to; from < size; from = to, at++) {
            u32 first = (u32)(address[l] + from) & 3, left = size - from;
            u32 count = left < 4 - first ? left : 4 - first;
            u64 bytes = ((1u << count) - 1) << first, kept = 0;
            u64 written = __atomic_load_n(at, __ATOMIC_ACQUIRE);
            to = from + count;
            if (written >> WAVE_SHIFT == tag >> WAVE_SHIFT)
                kept = written & BYTES_WRITTEN;
            else if (UNLIKELY(written & bytes && is_unordered(w, written, tag)) &&
                     changes_memory(d, l, address[l], from, to, shift))
                bad_order(w, instruction, l, address[l] + from, written, 1);
            if (!alone)
                write_bytes(d, l, address[l], from, to, shift);
            __atomic_store_n(at, tag | bytes | kept, __ATOMIC_RELEASE);
        }
    }
}
NOINLINE void note_atomics(Wave* w, const u64* address, u32 size) {
    u64 tag = write_tag(w) | WRITTEN_BY_ATOMIC | BYTES_WRITTEN;
    EACH_ACTIVE(w) {
        u64* at = dwords_of(w, address[ACTIVE_LANE], 1);
        for (u32 i = 0; at && i < size / 4; i++)
            at[i] = tag;
    }
}
NOINLINE void check_reads(Wave* w, u32 instruction, const u64* address, u32 size) {
    const Launch* launch = w->group->launch;
    const u64* shadow = launch->shadow[w->group->last_region - launch->regions];
    if (!shadow || !shadow[-1])
        return;
    u64 tag = write_tag(w);
    EACH_ACTIVE(w) {
        u32 l = ACTIVE_LANE;
        const u64* at = dwords_of(w, address[l], 0);
        if (!at)
            continue;
        for (u32 from = 0, to; from < size; from = to, at++) {
            u32 first = (u32)(address[l] + from) & 3, left = size - from;
            u32 count = left < 4 - first ? left : 4 - first;
            to = from + count;
            if (UNLIKELY(*at >> (first) & ((1u << count) - 1)) && is_unordered(w, *at, tag))
                bad_order(w, instruction, l, address[l] + from, *at, 0);
        }
    }
}
// After a store: if a lane's value is not there, another lane of it wrote to the same place.
NOINLINE void check_lanes_agree(Wave* w, u32 instruction, const u64* address, const u32* d,
                                u32 size, u32 shift) {
    u64 end = 0;
    int apart = 1;
    EACH_ACTIVE(w) {
        apart &= address[ACTIVE_LANE] >= end;
        end = address[ACTIVE_LANE] + size;
    }
    if (apart)
        return;
    EACH_ACTIVE(w) {
        u32 l = ACTIVE_LANE;
        if (changes_memory(d, l, address[l], 0, size, shift)) {
            found(w,
                  (Fault){.kind = FAULT_LANES_DIFFER,
                          .instruction = instruction,
                          .lane = l,
                          .address = address[l],
                          .size = size,
                          .is_write = 1},
                  FAULT_LANES_DIFFER);
            return;
        }
    }
}
