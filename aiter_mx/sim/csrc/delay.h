// Memory operations that take effect late: at a random moment between their issue and the wait that
// covers them. Those of one wave may overtake each other where they touch different memory.
#pragma once
#include "coherence.h"

typedef enum { LATE_LOAD, LATE_STORE, LATE_COPY, LATE_ATOMIC } LateKind;
// What an entry of a wave's vm queue has still to do.
typedef struct Delayed {
    u64 address[64], low, high, lanes; // `high` is past the last byte
    u32 data[4 * 64];                  // stored, or on its way to LDS
    u32* row;
    LateKind kind;
    Element element;
    u32 operation, dwords, is_waiting;
    u32 lds_base, lds_step; // of a copy: where lane 0 lands, bytes from lane to lane
    u64 lds_lanes;
} Delayed;

static void atomic_lanes(Wave* w, const u64* address, u32* d, const u32* data, u32 operation,
                         u32 size);
static void store_to_lds(Wave* w, const u32* rows, u32 base, u32 step);

static void complete(Wave* w, Delayed* late) {
    u64 exec = w->exec;
    late->is_waiting = 0;
    w->exec = late->lanes;
    switch (late->kind) {
    case LATE_STORE:
        store_lanes(w, late->address, late->data, late->element, late->dwords);
        break;
    case LATE_ATOMIC:
        atomic_lanes(w, late->address, late->row, late->data, late->operation, 4 * late->dwords);
        break;
    default:
        load_lanes(w, late->address, late->row, late->element, late->dwords);
    }
    if (late->kind == LATE_COPY) {
        w->exec = late->lds_lanes;
        store_to_lds(w, late->data, late->lds_base, late->lds_step);
    }
    w->exec = exec;
}
static Delayed* delayed(Wave* w, u32 i) { return &w->delayed[(w->vm.first + i) % QUEUE]; }
static void complete_oldest(Wave* w, u32 count) {
    for (u32 i = 0; i < count; i++)
        if (delayed(w, i)->is_waiting)
            complete(w, delayed(w, i));
}
// Everything issued so far takes effect now.
INLINE void complete_all(Wave* w) {
    if (STRICT && UNLIKELY(w->group->launch->delay))
        complete_oldest(w, w->vm.count);
}
static int must_follow(const Delayed* late, const Delayed* older) {
    int both_to_lds = late->kind == LATE_COPY && older->kind == LATE_COPY;
    int both_read = (late->kind == LATE_LOAD || late->kind == LATE_COPY) &&
                    (older->kind == LATE_LOAD || older->kind == LATE_COPY);
    return both_to_lds || (!both_read && late->low < older->high && older->low < late->high);
}
#define NOWHERE (~0ull) // where a scalar load out of a buffer's range reads 0
static void complete_scalar(Wave* w, Pending* p) {
    u64 from[16];
    memcpy(from, p->address, sizeof from);
    p->is_waiting = 0;
    for (u32 i = 0; i < p->reg_count; i++) {
        w->s[p->reg + i] = 0;
        if (from[i] != NOWHERE)
            memcpy(w->s + p->reg + i, (const void*)from[i], 4);
    }
}
// Between turns: some of a wave's operations take effect, in any order that they may have.
static void complete_some(Wave* w, u64* random) {
    for (u32 tries = (u32)(next_random(random) % (w->vm.count + 1)); tries; tries--) {
        u32 pick = (u32)(next_random(random) % w->vm.count), i = 0;
        Delayed* late = delayed(w, pick);
        while (i < pick && !(delayed(w, i)->is_waiting && must_follow(late, delayed(w, i))))
            i++;
        if (late->is_waiting && i == pick)
            complete(w, late);
    }
    for (u32 i = 0; i < w->lgkm.count; i++)
        if (queued(&w->lgkm, i)->is_waiting && next_random(random) & 1)
            complete_scalar(w, queued(&w->lgkm, i));
}
// What the operation issued last has to do, when its time has come.
static Delayed* postpone(Wave* w, LateKind kind, const u64* address, u32 size, const u32* data,
                         u32 rows) {
    Delayed* late = delayed(w, w->vm.count - 1);
    memcpy(late->address, address, sizeof late->address);
    if (data)
        memcpy(late->data, data, 256 * rows);
    late->kind = kind;
    late->lanes = w->exec;
    late->dwords = size / 4;
    late->is_waiting = 1;
    late->low = ~0ull;
    late->high = 0;
    EACH_ACTIVE(w) {
        u64 at = address[ACTIVE_LANE];
        late->low = at < late->low ? at : late->low;
        late->high = at + size > late->high ? at + size : late->high;
    }
    return late;
}
// The load or store issued last: at once, or later.
NOINLINE void move_lanes(Wave* w, u32 instruction, const u64* address, u32* row, Element element,
                         u32 size, int is_write) {
    if (STRICT && UNLIKELY(w->group->launch->delay)) {
        Delayed* late = postpone(w, is_write ? LATE_STORE : LATE_LOAD, address, size,
                                 is_write ? row : NULL, size < 4 ? 1 : size / 4);
        late->row = row;
        late->element = element;
    } else if (is_write) {
        u32 shift = element == U8_HI || element == U16_HI ? 16 : 0;
        int tracks = STRICT && w->group->launch->shadow != NULL;
        if (tracks)
            note_writes(w, instruction, address, row, size, shift);
        if (STRICT && UNLIKELY(w->group->launch->coherence != NULL))
            store_versions(w, instruction, address, row, size, shift);
        store_lanes(w, address, row, element, size / 4);
        if (tracks)
            check_lanes_agree(w, instruction, address, row, size, shift);
    } else {
        const Region* r = w->group->last_region;
        if (STRICT && w->group->launch->shadow && r && r->writable)
            check_reads(w, instruction, address, size);
        load_lanes(w, address, row, element, size / 4);
        if (STRICT && UNLIKELY(w->group->launch->coherence != NULL))
            load_as_seen(w, instruction, address, row, element, size);
    }
}
