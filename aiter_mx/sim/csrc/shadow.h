// Strict mode: LDS bytes never written, or touched by two waves with no barrier between.
#pragma once
#include "faults.h"

// Shadow of an LDS byte: barrier interval << WHO_BITS | who. Intervals count up from FIRST_EPOCH; 0
// is a byte never touched and SETTLED one last touched in an interval too old to be told apart.
// BY_UNWAITED: a read issued before the barrier and not waited for, of a wave or of several.
enum {
    WHO_BITS = 6,
    BY_COPY = 16,
    BY_MANY = 32,
    BY_ATOMIC = 33,
    BY_UNWAITED = 40,
    BY_MANY_UNWAITED = 56
};
enum { SETTLED = 1 << WHO_BITS, FIRST_EPOCH = 2, LAST_EPOCH = 1023 };

// An LDS access as the shadow sees it; `who` is the wave, or one of BY_COPY + wave and BY_ATOMIC.
__attribute__((cold, noinline, unused)) static void bad_lds(Wave* w, u32 instruction, u32 lane,
                                                            u32 address, int is_write, u32 old,
                                                            int old_is_write, u32 kind) {
    u32 who = old & ((1 << WHO_BITS) - 1);
    found(w,
          (Fault){.kind = kind,
                  .instruction = instruction,
                  .lane = lane,
                  .address = address,
                  .is_write = (u32)is_write,
                  .other_wave = who,
                  .other_is_write = (u32)old_is_write},
          kind);
}
static int is_unwaited(u32 tag) { return (tag & ((1 << WHO_BITS) - 1)) >= BY_UNWAITED; }
// What a byte's readers are once there is another one in this interval.
static u32 readers(u32 before, u32 now, u32 tag) {
    if (before < now)
        return tag;
    return now | (is_unwaited(before) && is_unwaited(tag) ? BY_MANY_UNWAITED : BY_MANY);
}
// An access to check. `data` is the first row written, or NULL where it is not at hand; `shift` the
// bit of a row's word where it begins.
typedef struct {
    const u32* address;
    u32 size, shift;
    u64 lanes;
    int is_write;
    u32 who;
    const u32* data;
} Access;
// Compilers let waves that hold copies of a value all write it: writing what is there is no race.
static int writes_what_is_there(const Group* g, const Access* a, u32 lane, u32 at, u32 old) {
    u32 who = old & ((1 << WHO_BITS) - 1), byte = at - a->address[lane];
    if (!a->data || (who >= BY_COPY && who != BY_MANY))
        return 0;
    u32 word = a->data[lane + 64 * (byte / 4)] >> a->shift;
    return g->lds[at] == (word >> (8 * (byte & 3)) & 255);
}
INLINE void shadow_byte(Wave* w, u32 instruction, const Access* a, u32 lane, u32 at) {
    Group* g = w->group;
    u32 now = g->epoch << WHO_BITS, old = g->writer[at], read = g->reader[at];
    u32 tag = now | a->who, own = now | w->id;
    if (UNLIKELY(!old && !a->is_write))
        bad_lds(w, instruction, lane, at, 0, 0, 1, FAULT_LDS_UNSET);
    u32 by_other = old >= now && old != tag && old != own;
    if (a->is_write) {
        u32 read_by_other =
            read >= now && read != own && read != tag && read != (now | (BY_UNWAITED + w->id));
        if (UNLIKELY(by_other | read_by_other) && writes_what_is_there(g, a, lane, at, old)) {
            g->writer[at] = (u16)(by_other ? now | BY_MANY : tag);
            return;
        }
        if (UNLIKELY(read_by_other & !by_other))
            bad_lds(w, instruction, lane, at, 1, read, 0,
                    is_unwaited(read) && a->who >= BY_COPY && a->who < BY_MANY
                        ? FAULT_LDS_OVER_READS
                        : FAULT_LDS_RACE);
    }
    if (UNLIKELY(by_other))
        bad_lds(w, instruction, lane, at, a->is_write, old, 1,
                old == (now | (BY_COPY + w->id)) ? FAULT_LDS_EARLY : FAULT_LDS_RACE);
    if (a->is_write)
        g->writer[at] = (u16)tag;
    else if (read != tag)
        g->reader[at] = (u16)readers(read, now, tag);
}
NOINLINE void shadow(Wave* w, u32 instruction, const Access* a) {
    Group* g = w->group;
    u32 now = g->epoch << WHO_BITS, tag = now | a->who;
    const u64 four = 0x0001000100010001ull, own = tag * four;
    for (u64 lanes = a->lanes; lanes; lanes &= lanes - 1) {
        u32 lane = (u32)__builtin_ctzll(lanes), at = a->address[lane], end = at + a->size;
        if (a->size < 4 || at & 3) {
            for (; at < end; at++)
                shadow_byte(w, instruction, a, lane, at);
            continue;
        }
        // Four bytes at once when all have the same past, and there is nothing to find in it.
        for (; at < end; at += 4) {
            u64 written, read;
            memcpy(&written, g->writer + at, 8);
            memcpy(&read, g->reader + at, 8);
            if (!a->is_write && read == own)
                continue;
            u32 writer = (u16)written, reader = (u16)read;
            int is_uniform = written == writer * four && read == reader * four;
            int by_other = writer >= now && writer != tag && writer != (now | w->id);
            int read_by_other = reader >= now && reader != tag && reader != (now | w->id) &&
                                reader != (now | (BY_UNWAITED + w->id));
            if (is_uniform && a->is_write && !by_other && !read_by_other) {
                memcpy(g->writer + at, &own, 8);
            } else if (is_uniform && !a->is_write && writer && !by_other) {
                u64 now_read = (u16)readers(reader, now, tag) * four;
                memcpy(g->reader + at, &now_read, 8);
            } else {
                for (u32 i = 0; i < 4; i++)
                    shadow_byte(w, instruction, a, lane, at + i);
            }
        }
    }
}
