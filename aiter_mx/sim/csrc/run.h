// Runs workgroups: sets waves up and switches between them as the schedule says.
#pragma once
#include "atomics.h"
#include "lanes.h"
#include "matrix.h"
#include "memory.h"
#include <stdlib.h>

enum { POISON = 0xffbadbad, LONG_RUN = 1 << 20, UNSET_SCC = 2 };

static void begin_wave(Group* g, Wave* w, u32 id) {
    const Launch* launch = g->launch;
    u32 lanes = launch->block[0] * launch->block[1] * launch->block[2];
    w->id = id;
    w->group = g;
    w->state = YIELDED;
    w->pc = launch->entry_pc;
    w->depth = w->skips = 0;
    w->wait_cost = launch->schedule == ROUND_ROBIN ? 2 * LONG_RUN : 1;
    w->sset[0] = w->sset[1] = 0;
    w->vm.first = w->vm.count = w->lgkm.first = w->lgkm.count = 0;
    w->trace = launch->trace;
    for (u32 i = 0; i < SGPRS; i++)
        w->s[i] = POISON;
    for (u32 i = 0; i < sim_registers * 64; i++)
        w->v[i] = POISON;
    memset(w->set, 0, sim_registers * sizeof *w->set);
    memset(w->due, 0, sim_registers);
    u32 left = lanes - 64 * id;
    set_exec(w, left >= 64 ? ~0ull : (1ull << left) - 1);
    w->scc = STRICT ? UNSET_SCC : 0;
    if (launch->coherence)
        begin_views(w);
    if (STRICT && launch->scratch_bytes)
        memset(w->scratch_state, NOTHING_STORED, 64ull * launch->scratch_bytes);
    start_wave(w);
}

static void next_epoch(Group* g) {
    g->global_epoch++;
    if (++g->epoch > LAST_EPOCH) {
        g->epoch = FIRST_EPOCH;
        for (u32 i = 0; i < g->launch->lds_bytes; i++) {
            if (g->writer[i])
                g->writer[i] = SETTLED;
            g->reader[i] = 0;
        }
    }
}

static u32 deepest(const Group* g) {
    u32 depth = 0;
    for (u32 i = 0; i < g->wave_count; i++)
        depth = g->waves[i]->depth > depth ? g->waves[i]->depth : depth;
    return depth;
}

static void begin_group(Group* g, u64 index) {
    const Launch* launch = g->launch;
    g->id[0] = (u32)(index % launch->grid[0]);
    g->id[1] = (u32)(index / launch->grid[0] % launch->grid[1]);
    g->id[2] = (u32)(index / launch->grid[0] / launch->grid[1]);
    g->index = index;
    g->epoch = FIRST_EPOCH;
    g->global_epoch = g->synchronises = 0;
    g->random = launch->seed ^ (index + 1) * 0xd1342543de82ef95ull;
    u64* lds = (u64*)g->lds;
    for (u32 i = 0; i < launch->lds_bytes / 8; i++)
        lds[i] = POISON | (u64)POISON << 32;
    memset(g->writer, 0, launch->lds_bytes * sizeof *g->writer);
    memset(g->reader, 0, launch->lds_bytes * sizeof *g->reader);
    note(launch->trace, TRACE_GROUP, (u32)index, 0, NULL);
    forget_lines(launch->trace);
    for (u32 i = 0; i < g->wave_count; i++)
        begin_wave(g, g->waves[i], i);
    g->turn = 0;
    g->steps = 0;
    g->looks = g->moves = 0;
    g->pause_at = PERIOD;
    memset(g->looked, 0, sizeof g->looked);
}

// Runs a workgroup to its end or, where they run side by side, until it waits for another.
enum { GROUP_ENDED, GROUP_WAITS, GROUP_FAILED };
static int go_on(Group* g) {
    const Launch* launch = g->launch;
    for (;;) {
        if (__atomic_load_n(&launch->stop, __ATOMIC_RELAXED))
            return GROUP_FAILED;
        if (UNLIKELY(launch->coherence != NULL) && g->steps >= g->pause_at) {
            int waits = g->looks && !g->moves;
            g->looks = g->moves = 0;
            g->pause_at = g->steps + PERIOD;
            if (waits)
                return GROUP_WAITS;
        }
        u32 ready = 0, waiting = 0;
        for (u32 i = 0; i < g->wave_count; i++) {
            ready += g->waves[i]->state == YIELDED;
            waiting += g->waves[i]->state == AT_BARRIER;
        }
        if (!ready) {
            u32 depth = deepest(g);
            if (!waiting) {
                g->counters->latencies += depth;
                return GROUP_ENDED;
            }
            if (STRICT && UNLIKELY(launch->coherence != NULL))
                share_knowledge(g);
            next_epoch(g);
            for (u32 i = 0; i < g->wave_count; i++)
                if (g->waves[i]->state == AT_BARRIER) {
                    g->waves[i]->state = YIELDED;
                    g->waves[i]->depth = depth;
#if STRICT
                    carry_over(g->waves[i]);
#endif
                }
            continue;
        }
        if (UNLIKELY(launch->delay)) {
            Wave* any = g->waves[next_random(&g->random) % g->wave_count];
            complete_some(any, &g->random);
        }
        u32 pick = launch->schedule == RANDOM ? (u32)(next_random(&g->random) % ready) : 0;
        u32 i = launch->schedule == RANDOM ? 0 : g->turn % g->wave_count;
        for (;; i = (i + 1) % g->wave_count)
            if (g->waves[i]->state == YIELDED && !pick--)
                break;
        Wave* w = g->waves[i];
        w->budget = launch->schedule == RANDOM ? (i64)(next_random(&g->random) % 24)
                    : launch->coherence        ? PERIOD // it may wait for another workgroup
                                               : LONG_RUN;
        i64 given = w->budget;
        set_float_mode(w->mode);
        w->state = RUNNING;
        note(w->trace, TRACE_WAVE, i, 0, NULL);
        w->state = run_wave(w);
        if (w->state == ENDED)
            complete_all(w);
        if (w->state == ENDED && UNLIKELY(launch->coherence != NULL))
            end_views(w);
        g->steps += 1 + (u64)(given - w->budget) % (2 * LONG_RUN);
        g->turn = launch->schedule == RUN_TO_BARRIER && w->state == YIELDED ? i : i + 1;
        if (g->steps > launch->max_steps)
            fail(w, (Fault){.kind = FAULT_STUCK, .instruction = ~0u});
    }
}

static void* zeroed(u64 size) {
    void* p = aligned_alloc(64, (size + 127) / 64 * 64);
    if (p)
        memset(p, 0, size);
    return p;
}

// What the workgroups of a thread have in common.
typedef struct {
    Launch* launch;
    Counters* counters;
    u64* block_counts;
    Fault* fault;
    u8** seen;
    Findings* findings;
} Thread;

static Group* new_group(const Thread* thread) {
    const Launch* launch = thread->launch;
    u32 lanes = launch->block[0] * launch->block[1] * launch->block[2], waves = (lanes + 63) / 64;
    u64 lds = ((u64)launch->lds_bytes + 127) / 64 * 64, scratch = (u64)launch->scratch_bytes * 64;
    u64 rows = (u64)sim_registers * 256;
    u64 doubts = launch->coherence ? DOUBTS * sizeof(Doubt) : 0;
    u64 views =
        doubts + (launch->coherence ? (4ull * KEPT * launch->coherence->waves + 7) & ~7ull : 0);
    u64 per_wave = (sizeof(Wave) + rows + views + sim_registers * 9 + 2 * scratch + 255) / 64 * 64;
    Group* g = zeroed(sizeof *g);
    u8* memory = zeroed(waves * (per_wave + sizeof(Wave*)) + 5 * lds + 64);
    Delayed* delayed = zeroed(launch->delay ? waves * QUEUE * sizeof *delayed : 0);
    if (!g || !memory || !delayed) {
        free(g), free(memory), free(delayed);
        thread->fault->kind = FAULT_MEMORY;
        return NULL;
    }
    u8* at = memory;
    g->launch = launch;
    g->counters = thread->counters;
    g->seen = thread->seen;
    g->block_counts = thread->block_counts;
    g->fault = thread->fault;
    g->findings = thread->findings;
    g->memory = memory;
    g->wave_count = waves;
    g->lds = at + (u64)waves * per_wave;
    g->writer = (u16*)(g->lds + lds);
    g->reader = g->writer + lds;
    g->waves = (Wave**)(g->reader + lds);
    g->waves = (Wave**)(((u64)g->waves + 7) & ~7ull);
    for (u32 i = 0; i < waves; i++, at += per_wave) {
        Wave* w = g->waves[i] = (Wave*)at;
        w->v = (u32*)(at + (sizeof(Wave) + 63) / 64 * 64);
        w->doubts = (Doubt*)(w->v + sim_registers * 64);
        w->views = (u32*)((u8*)w->doubts + doubts);
        w->set = (u64*)((u8*)w->doubts + views);
        w->due = (u8*)(w->set + sim_registers);
        w->scratch = w->due + sim_registers;
        w->scratch_state = w->scratch + scratch;
        w->delayed = delayed + i * QUEUE;
    }
    return g;
}
static void free_group(Group* g) {
    if (!g)
        return;
    free(g->waves[0]->delayed);
    free(g->memory);
    free(g);
}
static int guarded(Group* g) {
    if (setjmp(g->on_fault)) {
        __atomic_store_n(&((Launch*)g->launch)->stop, 1, __ATOMIC_RELAXED);
        return GROUP_FAILED;
    }
    return go_on(g);
}

// One workgroup after another.
static void run_in_turn(const Thread* thread, u64 total) {
    Launch* launch = thread->launch;
    Group* g = new_group(thread);
    while (g && !__atomic_load_n(&launch->stop, __ATOMIC_RELAXED)) {
        u64 index = __atomic_fetch_add(&launch->next_group, 1, __ATOMIC_RELAXED);
        if (index >= total)
            break;
        begin_group(g, index);
        guarded(g);
    }
    free_group(g);
}

__attribute__((cold, noinline)) static void deadlock(Group** held, u32 count, u64 total) {
    const Group* g = held[0];
    for (u32 i = 1; i < count; i++)
        g = held[i]->index < g->index ? held[i] : g;
    *g->fault = (Fault){.kind = FAULT_DEADLOCK,
                        .instruction = g->look,
                        .wave = g->looker,
                        .count = count,
                        .address = g->launch->next_group,
                        .other_group = total};
    memcpy(g->fault->group, g->id, sizeof g->id);
}
// As many at once as the GPU holds. Each runs until it ends or waits for others; a new one begins
// wherever there is room.
static void run_side_by_side(const Thread* thread, u64 total) {
    Launch* launch = thread->launch;
    const Coherence* c = launch->coherence;
    Group **held = zeroed(launch->resident * sizeof *held), *spare = NULL;
    u64 changes = 0, calm = 0;
    u32 count = 0, at = 0;
    for (;;) {
        int begins = launch->next_group < total && count < launch->resident;
        if (!begins && !count)
            break;
        at = begins ? count : (at + 1) % count;
        if (begins) {
            Group* g = spare ? spare : new_group(thread);
            spare = NULL;
            if (!g)
                break;
            begin_group(g, launch->next_group++);
            held[count++] = g;
        }
        int outcome = guarded(held[at]);
        if (outcome == GROUP_FAILED)
            break;
        calm = outcome == GROUP_WAITS && !begins && changes == c->changes ? calm + 1 : 0;
        changes = c->changes;
        if (outcome == GROUP_ENDED) {
            free_group(spare);
            spare = held[at];
            held[at] = held[--count];
        } else {
            let_writes_end(held[at]);
        }
        if (calm > (u64)CALM_ROUNDS * count) {
            deadlock(held, count, total);
            break;
        }
    }
    while (count)
        free_group(held[--count]);
    free_group(spare);
    free(held);
}

// One thread's share of a launch: takes workgroups until none is left or a thread has failed.
__attribute__((visibility("default"))) int sim_run(Launch* launch, Counters* counters,
                                                   u64* block_counts, Fault* fault, u8** seen,
                                                   Findings* findings) {
    finite_scales = (int)launch->finite_scales;
    sum_order = (int)launch->sum_order;
    perturbing = launch->perturbing;
    u64 total = launch->end_group;
    const Thread thread = {launch, counters, block_counts, fault, seen, findings};
#if defined(__x86_64__)
    u32 csr = __builtin_ia32_stmxcsr();
#endif
    if (launch->resident) {
        launch->coherence = new_coherence(launch, total);
        run_side_by_side(&thread, total);
        free_coherence(launch->coherence);
    } else {
        run_in_turn(&thread, total);
    }
#if defined(__x86_64__)
    __builtin_ia32_ldmxcsr(csr);
#endif
    return fault->kind != FAULT_NONE;
}
