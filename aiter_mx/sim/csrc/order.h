// Strict mode: what is valid when. Registers never written, results used before their s_waitcnt.
#pragma once
#include "shadow.h"
#include <stdarg.h>

#ifndef STRICT
#define STRICT 1
#endif

INLINE Pending* queued(Queue* q, u32 i) { return &q->entry[(q->first + i) % QUEUE]; }

__attribute__((cold, noinline)) static void bad_read(Wave* w, u32 instruction, u64 lanes, int count,
                                                     ...) {
    Fault fault = {.kind = FAULT_REGISTER_UNSET, .instruction = instruction};
    va_list list;
    va_start(list, count);
    while (count--) {
        u32 reg = (u32)va_arg(list, int);
        u64 missing = lanes & ~w->set[reg];
        if (!missing && !w->due[reg])
            continue;
        fault.reg = reg;
        fault.lane = missing ? (u32)__builtin_ctzll(missing) : 0;
        if (w->due[reg])
            fault.kind = FAULT_REGISTER_EARLY;
        break;
    }
    va_end(list);
    found(w, fault, fault.kind);
}
// A register is written while a load into it is under way: wrong in the lanes of that load.
static u64 lanes_due(Wave* w, u32 reg, const Pending* except) {
    u64 lanes = 0;
    Queue* queues[2] = {&w->vm, &w->lgkm};
    for (int q = 0; q < 2; q++)
        for (u32 i = 0; i < queues[q]->count; i++) {
            const Pending* p = queued(queues[q], i);
            if (p != except && !p->is_scalar && reg - p->reg < p->reg_count)
                lanes |= p->lanes;
        }
    return lanes;
}
API void late_write(Wave* w, u32 instruction, u64 lanes, int count, ...) {
    va_list list;
    va_start(list, count);
    while (count--) {
        u32 reg = (u32)va_arg(list, int);
        u64 hit = lanes_due(w, reg, NULL) & lanes;
        if (hit)
            found(w,
                  (Fault){.kind = FAULT_REGISTER_LATE,
                          .instruction = instruction,
                          .is_write = 1,
                          .reg = reg,
                          .lane = (u32)__builtin_ctzll(hit)},
                  FAULT_REGISTER_LATE);
    }
    va_end(list);
}
static int scalar_is_due(const Wave* w, u32 reg) {
    for (u32 i = 0; i < w->lgkm.count; i++) {
        const Pending* p = &w->lgkm.entry[(w->lgkm.first + i) % QUEUE];
        if (p->is_scalar && reg - p->reg < p->reg_count)
            return 1;
    }
    return 0;
}
// Arithmetic may read what is unset, such as the unused half of a pair: the lanes returned are as
// unset in the result. Reading what is on its way is wrong in any case.
API u64 unset_lanes(Wave* w, u32 instruction, u64 lanes, int count, ...) {
    u64 unset = 0;
    va_list list;
    va_start(list, count);
    while (count--) {
        u32 reg = (u32)va_arg(list, int);
        u64 missing = lanes & ~w->set[reg];
        if (missing && w->due[reg] && (missing & lanes_due(w, reg, NULL)))
            bad_read(w, instruction, missing, 1, reg);
        unset |= missing;
    }
    va_end(list);
    return unset;
}
// What translated code calls: `need` where a row must be valid in all active lanes, `flow` where
// row d becomes as valid as the others are.
API void need1(Wave* w, u32 instruction, u32 a) {
    if (UNLIKELY(w->exec & ~w->set[a]))
        bad_read(w, instruction, w->exec, 1, a);
}
API void need2(Wave* w, u32 instruction, u32 a, u32 b) {
    if (UNLIKELY(w->exec & ~(w->set[a] & w->set[b])))
        bad_read(w, instruction, w->exec, 2, a, b);
}
API void need3(Wave* w, u32 instruction, u32 a, u32 b, u32 c) {
    if (UNLIKELY(w->exec & ~(w->set[a] & w->set[b] & w->set[c])))
        bad_read(w, instruction, w->exec, 3, a, b, c);
}
static void need_rows(Wave* w, u32 instruction, u64 lanes, int count, va_list list) {
    while (count--) {
        u32 reg = (u32)va_arg(list, int);
        if (UNLIKELY(lanes & ~w->set[reg]))
            bad_read(w, instruction, lanes, 1, reg);
    }
}
API void need_lanes(Wave* w, u32 instruction, u64 lanes, int count, ...) {
    va_list list;
    va_start(list, count);
    need_rows(w, instruction, lanes, count, list);
    va_end(list);
}
API void need_many(Wave* w, u32 instruction, int count, ...) {
    va_list list;
    va_start(list, count);
    need_rows(w, instruction, w->exec, count, list);
    va_end(list);
}
void become(Wave* w, u32 d, u64 unset) { w->set[d] = (w->set[d] | w->exec) & ~unset; }
API void flow1(Wave* w, u32 instruction, u32 d, u32 a) {
    u64 unset = w->exec & ~w->set[a];
    if (UNLIKELY(unset))
        unset = unset_lanes(w, instruction, w->exec, 1, a);
    become(w, d, unset);
}
API void flow2(Wave* w, u32 instruction, u32 d, u32 a, u32 b) {
    u64 unset = w->exec & ~(w->set[a] & w->set[b]);
    if (UNLIKELY(unset))
        unset = unset_lanes(w, instruction, w->exec, 2, a, b);
    become(w, d, unset);
}
API void flow3(Wave* w, u32 instruction, u32 d, u32 a, u32 b, u32 c) {
    u64 unset = w->exec & ~(w->set[a] & w->set[b] & w->set[c]);
    if (UNLIKELY(unset))
        unset = unset_lanes(w, instruction, w->exec, 3, a, b, c);
    become(w, d, unset);
}
API void flow_many(Wave* w, u32 instruction, u32 d, int count, ...) {
    u64 unset = 0;
    va_list list;
    va_start(list, count);
    while (count--) {
        u32 reg = (u32)va_arg(list, int);
        if (UNLIKELY(w->exec & ~w->set[reg]))
            unset |= unset_lanes(w, instruction, w->exec, 1, reg);
    }
    va_end(list);
    become(w, d, unset);
}
// Scalar registers `to` become as valid as those of `low` and `high` are together.
API void flow_scalars(Wave* w, u32 instruction, u64 low, u64 high, u64 to_low, u64 to_high) {
    const u64 unset[2] = {low & ~w->sset[0], high & ~w->sset[1]};
    if (!(unset[0] | unset[1])) {
        w->sset[0] |= to_low;
        w->sset[1] |= to_high;
        return;
    }
    for (u32 half = 0; half < 2; half++)
        for (u64 missing = unset[half]; missing; missing &= missing - 1)
            if (scalar_is_due(w, 64 * half + (u32)__builtin_ctzll(missing)))
                bad_scalar_read(w, instruction, low, high);
    w->sset[0] &= ~to_low;
    w->sset[1] &= ~to_high;
}
API void scalar_from_lane(Wave* w, u32 instruction, u32 to, u32 row, u64 lane) {
    u64 bit = 1ull << (to & 63);
    if (unset_lanes(w, instruction, lane, 1, row))
        w->sset[to >> 6] &= ~bit;
    else
        w->sset[to >> 6] |= bit;
}
API void lane_from_scalar(Wave* w, u32 instruction, u32 row, u64 lane, u32 from) {
    u64 bit = 1ull << (from & 63);
    if (w->sset[from >> 6] & bit || from >= EXEC) {
        w->set[row] |= lane;
        return;
    }
    if (scalar_is_due(w, from))
        bad_scalar_read(w, instruction, from < 64 ? bit : 0, from < 64 ? 0 : bit);
    w->set[row] &= ~lane;
}
API void bad_scalar_read(Wave* w, u32 instruction, u64 low, u64 high) {
    u64 missing[2] = {low & ~w->sset[0], high & ~w->sset[1]};
    u32 half = !missing[0], reg = 64 * half + (u32)__builtin_ctzll(missing[half]);
    u32 kind = scalar_is_due(w, reg) ? FAULT_REGISTER_EARLY : FAULT_REGISTER_UNSET;
    found(w, (Fault){.kind = kind, .instruction = instruction, .reg = reg, .is_scalar = 1}, kind);
}

// Copies of the rows that M0 picks, as valid as they are.
API void pick_rows(Wave* w, u32 instruction, u32 to, u32 from, u32 count, u32 limit) {
    from += w->s[M0] & 255;
    if (UNLIKELY(from + count > limit))
        fail(w, (Fault){.kind = FAULT_INDEX, .instruction = instruction, .reg = from + count - 1});
    for (u32 i = 0; i < count; i++) {
        u64 unset = 0;
        if (STRICT && UNLIKELY(w->exec & ~w->set[from + i]))
            unset = unset_lanes(w, instruction, w->exec, 1, from + i);
        memcpy(ROW(to + i), ROW(from + i), 64 * sizeof(u32));
        w->set[to + i] = ~unset;
    }
}

static void complete_scalar(Wave* w, Pending* p);
static void settle(Wave* w, Pending* p) {
    if (p->is_waiting)
        complete_scalar(w, p);
    if (p->is_scalar) {
        for (u32 r = p->reg; r < (u32)p->reg + p->reg_count; r++)
            w->sset[r >> 6] |= 1ull << (r & 63);
        return;
    }
    for (u32 r = p->reg; r < (u32)p->reg + p->reg_count; r++) {
        u64 lanes = p->lanes;
        if (--w->due[r])
            lanes &= ~lanes_due(w, r, p); // another load into it goes on
        w->set[r] |= lanes & ~p->unset[(r - p->reg) & 3];
    }
    if (p->is_copy) { // the copied bytes are this wave's own from here on
        Group* g = w->group;
        u16 from = (u16)(g->epoch << WHO_BITS | (BY_COPY + w->id)), to = (u16)(from - BY_COPY);
        for (u64 lanes = p->lanes; lanes; lanes &= lanes - 1) {
            u32 at = p->address[__builtin_ctzll(lanes)];
            for (u32 i = 0; i < p->size; i++)
                if (g->writer[at + i] == from)
                    g->writer[at + i] = to;
        }
    }
    p->reg_count = 0;
}
static void complete_oldest(Wave* w, u32 count);
static void retired(Wave* w, Pending* p);
static void retire(Wave* w, Queue* q, u32 count) {
    if (q == &w->vm && UNLIKELY(w->group->launch->delay))
        complete_oldest(w, count);
    if (q == &w->vm) { // of operations waited for, none is deeper than the youngest
        u32 depth = queued(q, count - 1)->depth + 1;
        w->depth = depth > w->depth ? depth : w->depth;
    }
    if (q == &w->vm && UNLIKELY(w->group->launch->coherence != NULL))
        for (u32 i = 0; i < count; i++)
            retired(w, queued(q, i));
    for (u32 i = 0; i < count; i++)
        settle(w, queued(q, i));
    q->first += count;
    q->count -= count;
}
API void wait_vm(Wave* w, u32 left) {
    Counters* counters = w->group->counters;
    if (w->vm.count <= left)
        return;
    counters->waits++;
    for (u32 i = 0; i < w->vm.count; i++)
        counters->in_flight_bytes += queued(&w->vm, i)->bytes;
    retire(w, &w->vm, w->vm.count - left);
}
API void wait_lgkm(Wave* w, u32 left) {
    Queue* q = &w->lgkm;
    if (q->count <= left)
        return;
    if (!left)
        return retire(w, q, q->count);
    // Scalar loads return in any order, so those still out may be the ones that were counted down.
    u32 scalar = 0;
    for (u32 i = 0; i < q->count; i++)
        scalar += queued(q, i)->is_scalar;
    u32 sure = q->count - left;
    if (sure <= scalar)
        return;
    sure -= scalar;
    u32 kept = 0;
    for (u32 i = 0; i < q->count; i++) {
        if (sure && !queued(q, i)->is_scalar) {
            settle(w, queued(q, i));
            sure--;
        } else {
            *queued(q, kept++) = *queued(q, i);
        }
    }
    q->count = kept;
}

NOINLINE Pending* enqueue(Wave* w, Queue* q, u32 max, u32 instruction, u32 reg, u32 count) {
    if (q->count == max)
        retire(w, q, 1); // the counter is full: issue stalls
    Pending* p = queued(q, q->count++);
    p->instruction = instruction;
    p->reg = (u16)reg;
    p->reg_count = (u16)count;
    p->is_scalar = p->touches_lds = p->is_write = p->is_copy = p->size = p->is_waiting = 0;
    p->lanes = w->exec;
    p->writes = p->writes_back = 0;
    p->flag = NULL;
    memset(p->unset, 0, sizeof p->unset);
    for (u32 r = reg; r < reg + count; r++) {
        w->due[r]++;
        w->set[r] &= ~w->exec;
    }
    return p;
}
// `size` is what a lane loads, 0 for stores.
API void issue_vm(Wave* w, u32 instruction, u32 reg, u32 count, u32 size) {
    Pending* p = enqueue(w, &w->vm, VM_MAX, instruction, reg, count);
    p->bytes = size * (u32)__builtin_popcountll(w->exec);
    p->depth = w->depth;
}
API void issue_scalar(Wave* w, u32 instruction, u32 reg, u32 count) {
    Pending* p = enqueue(w, &w->lgkm, LGKM_MAX, instruction, 0, 0);
    p->is_scalar = 1;
    p->reg = (u16)reg;
    p->reg_count = (u16)count;
    for (u32 r = reg; r < reg + count; r++)
        w->sset[r >> 6] &= ~(1ull << (r & 63));
}
API void issue_lds(Wave* w, u32 instruction, u32 reg, u32 count) {
    enqueue(w, &w->lgkm, LGKM_MAX, instruction, reg, count);
}
// Say of the operation issued last that it touches LDS, so that it is followed across barriers.
static void note_lds(Wave* w, Queue* q, const u32* address, u32 size, u64 lanes, int is_write) {
    Pending* p = queued(q, q->count - 1);
    p->touches_lds = 1;
    p->is_write = (u8)is_write;
    p->is_copy = q == &w->vm;
    p->size = (u8)size;
    p->lanes = lanes;
    memcpy(p->address, address, sizeof p->address);
}

// After a barrier, whatever was not waited for goes on in the new interval.
static void carry_over(Wave* w) {
    Queue* queues[2] = {&w->vm, &w->lgkm};
    for (int q = 0; q < 2; q++)
        for (u32 i = 0; i < queues[q]->count; i++) {
            const Pending* p = queued(queues[q], i);
            if (p->touches_lds)
                shadow(w, p->instruction,
                       &(Access){.address = p->address,
                                 .size = p->size,
                                 .lanes = p->lanes,
                                 .is_write = p->is_write,
                                 .who = p->is_copy    ? BY_COPY + w->id
                                        : p->is_write ? w->id
                                                      : BY_UNWAITED + w->id});
        }
}
