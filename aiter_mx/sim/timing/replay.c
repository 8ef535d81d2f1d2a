// A compute unit in time: replays what waves did (the trace of a functional run) on four SIMDs,
// with their vector and matrix pipes, one address unit, LDS, and a share of the memory system.
// Times are cycles of the CU. aiter_mx/sim/timing/cu.py mirrors the structures.
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef uint32_t u32;
typedef uint64_t u64;

enum { VALU, MFMA, SALU, SMEM, LDS, LOAD, STORE, SCRATCH, WAIT, BARRIER, BRANCH, NOP, END, KINDS };
enum { BLOCK, WAVE, GROUP, MEMORY, CONFLICTS };
enum { SIMDS = 4, SLOT = 4, QUEUE = 64, REGIONS = 64, MISSES = 4096 };
// Of an access' first word. FIRST_TOUCH: it touches lines that are new to its workgroup.
// COUNTS_NEW_LINES: its number of lines is that of new ones; without it, as in docs/measured's
// published traces, the number is of all its lines, which are new where the lowest of them is.
enum { FIRST_TOUCH = 1u << 31, COUNTS_NEW_LINES = 1 << 30 };
// What a wave's time goes to.
enum { ISSUING, ON_MATRIX, ON_ADDRESS, ON_LDS, ON_MEMORY, ON_SCALAR, ON_BARRIER, REASONS };

typedef struct {
    u32 kind, cycles, vm_left, lgkm_left, bytes;
} Instruction;

typedef struct {
    double issue, branch, address, address_queue, lds_latency, lds_bytes, scalar_latency;
    double cached_latency, memory_latency, line_bytes, memory_bytes, barrier, deal, data_bytes;
    double missing_bytes, mall_bytes, l2_hit;
} Machine;

typedef struct {
    double cycles, matrix, vector, address, lds, memory_bytes, wave_cycles;
    double reasons[REASONS];
    double issued[KINDS];
    struct Span* spans; // room for some of them, where a timeline is wanted
    u64 span_room, span_count;
} Result;

// What a wave of a slot of the unit does: it is there (REASONS), or it waits.
typedef struct Span {
    double from, to;
    u32 slot, wave, simd, what;
} Span;

typedef struct {
    u32* at;
    u64 count, room;
} Words;

typedef struct {
    u32 group_count, waves;
    Words* waves_of; // one for each wave of each workgroup
    double footprint[REGIONS];
    double* touched;     // bytes of lines, by workgroup
    u64* addressed;      // cycles of the address unit, by workgroup
    u32* firsts;         // by workgroup and region: 1 + the lowest line that it touches, or 0
    u32 stored[REGIONS]; // whether any workgroup stores to it
} Trace;

static int append(Words* words, u32 word) {
    if (words->count == words->room) {
        u64 room = 2 * words->room + 64;
        u32* at = realloc(words->at, room * sizeof *at);
        if (!at)
            return 0;
        words->at = at;
        words->room = room;
    }
    words->at[words->count++] = word;
    return 1;
}

// Lines that a workgroup has touched.
typedef struct {
    u64* slots;
    u64 room, count;
} Lines;
static int is_new(Lines* lines, u64 key) {
    if (2 * lines->count >= lines->room) {
        Lines more = {.room = 4 * lines->room + 1024};
        more.slots = calloc(more.room, sizeof *more.slots);
        for (u64 i = 0; i < lines->room; i++)
            if (lines->slots[i])
                is_new(&more, lines->slots[i]);
        free(lines->slots);
        *lines = more;
    }
    for (u64 i = key * 0x9e3779b97f4a7c15ull % lines->room;; i = (i + 1) % lines->room) {
        if (lines->slots[i] == key)
            return 0;
        if (!lines->slots[i]) {
            lines->slots[i] = key;
            lines->count++;
            return 1;
        }
    }
}

void trace_free(Trace* trace) {
    if (!trace)
        return;
    for (u32 i = 0; trace->waves_of && i < trace->group_count * trace->waves; i++)
        free(trace->waves_of[i].at);
    free(trace->waves_of);
    free(trace->firsts);
    free(trace->touched);
    free(trace->addressed);
    free(trace);
}

// The words of each wave, with the lines of a region that its workgroup touches first marked.
Trace* trace_split(const Instruction* code, const u32* words, u64 count, u32 groups, u32 waves) {
    static const u32 details[] = {0, 0, 0, 4, 1};
    Trace* trace = calloc(1, sizeof *trace);
    trace->group_count = groups;
    trace->waves = waves;
    trace->waves_of = calloc((u64)groups * waves, sizeof *trace->waves_of);
    trace->touched = calloc(groups, sizeof *trace->touched);
    trace->addressed = calloc(groups, sizeof *trace->addressed);
    trace->firsts = calloc((u64)groups * REGIONS, sizeof *trace->firsts);
    Lines lines = {0};
    u32 group = ~0u, wave = 0;
    for (u64 i = 0; i < count;) {
        u32 kind = words[i] >> 28;
        if (kind == GROUP) {
            group++;
            free(lines.slots);
            lines = (Lines){0};
        } else if (kind == WAVE) {
            wave = words[i] & 0xfffffff;
        } else if (group < groups && wave < waves) {
            Words* to = trace->waves_of + group * waves + wave;
            u32 copy[5], size = details[kind] + 1;
            memcpy(copy, words + i, size * sizeof *copy);
            if (kind == MEMORY) {
                u32 region = copy[1] >> 16 & (REGIONS - 1);
                trace->addressed[group] += copy[1] & 0xffff;
                int is_first = copy[1] & COUNTS_NEW_LINES
                                   ? copy[3] > 0
                                   : is_new(&lines, (u64)(region + 1) << 40 | copy[2]);
                if (is_first) {
                    trace->footprint[region] += 128.0 * copy[3];
                    trace->touched[group] += 128.0 * copy[3];
                    copy[1] |= FIRST_TOUCH;
                }
                u32* first = trace->firsts + (u64)group * REGIONS + region;
                *first = *first && *first <= copy[2] ? *first : copy[2] + 1;
                trace->stored[region] |= code[copy[0] & 0xfffffff].kind == STORE;
            }
            for (u32 k = 0; k < size; k++)
                if (!append(to, copy[k]))
                    return NULL;
        }
        i += kind <= CONFLICTS ? details[kind] + 1 : 1;
    }
    free(lines.slots);
    return trace;
}
double trace_footprint(const Trace* trace, u32 region) { return trace->footprint[region]; }
double trace_touched(const Trace* trace, u32 group) { return trace->touched[group]; }
u64 trace_addressed(const Trace* trace, u32 group) { return trace->addressed[group]; }
u32 trace_stored(const Trace* trace, u32 region) { return trace->stored[region]; }
const u32* trace_firsts(const Trace* trace) { return trace->firsts; }

typedef struct {
    double start, ready, vm[QUEUE], lgkm[QUEUE], last_vm;
    u32 reason_of[QUEUE];
    const Words* words;
    u64 at;
    u32 next, end, vm_first, vm_count, lgkm_first, lgkm_count, simd, slot, number, state;
} Wave;
enum { IDLE, RUNS, AT_BARRIER, ENDED };

typedef struct {
    const Instruction* code;
    const u32* block_starts;
    const Machine* machine;
    const double* shares;   // of a region's line, how much comes from memory for this CU
    const double* crossing; // likewise, how much comes to its XCD
    double* waited;         // by instruction
    Result* result;
    double unit[SIMDS][KINDS], address_free, lds_free, line_free, memory_free, mall_free;
    // Lines that loads wait for: when they arrive, and bytes.
    double missing_until[MISSES], missing_size[MISSES], missing;
    u32 missing_first, missing_count;
} Cu;

static double later(double a, double b) { return a > b ? a : b; }
static void push(double* queue, u32 first, u32* count, double value) {
    queue[(first + (*count)++) % QUEUE] = value;
}

// When a load may ask for so many bytes more: the L1 cache keeps room for all that is on its way.
static double room_for(Cu* cu, double begin, double bytes) {
    while (cu->missing_count) {
        double until = cu->missing_until[cu->missing_first];
        if (until > begin && cu->missing + bytes <= cu->machine->missing_bytes &&
            cu->missing_count < MISSES)
            break;
        begin = later(begin, until);
        cu->missing -= cu->missing_size[cu->missing_first];
        cu->missing_first = (cu->missing_first + 1) % MISSES;
        cu->missing_count--;
    }
    return begin;
}

static void expect(Cu* cu, double bytes, double until) {
    u32 last = (cu->missing_first + cu->missing_count++) % MISSES;
    cu->missing_until[last] = until;
    cu->missing_size[last] = bytes;
    cu->missing += bytes;
}

// When a vector memory access that the address unit takes at `start` is done.
static double access_memory(Cu* cu, Wave* w, u32 number, double start) {
    const Machine* m = cu->machine;
    u32 loads = cu->code[number].kind == LOAD;
    double done = start, latency = m->cached_latency;
    u32 any = 0;
    while (w->at < w->words->count) {
        const u32* event = w->words->at + w->at;
        if (event[0] >> 28 != MEMORY || (event[0] & 0xfffffff) != number)
            break;
        u32 cycles = event[1] & 0xffff, region = event[1] >> 16 & (REGIONS - 1);
        u32 is_first = event[1] >> 31;
        if (loads && cu->crossing[region] == 0) // L2 holds it from before the launch
            latency = m->l2_hit;
        double begin = later(start, cu->address_free), bytes = 128.0 * event[3];
        double busy = cycles * m->address + event[4] / m->data_bytes;
        if (is_first && loads)
            begin = room_for(cu, begin, bytes);
        cu->address_free = begin + busy;
        cu->result->address += busy;
        double arrives = cu->address_free;
        if (is_first) {
            cu->line_free = later(cu->line_free, begin) + bytes / m->line_bytes;
            cu->memory_free =
                later(cu->memory_free, begin) + bytes * cu->shares[region] / m->memory_bytes;
            cu->result->memory_bytes += bytes * cu->shares[region];
            cu->mall_free =
                later(cu->mall_free, begin) + bytes * cu->crossing[region] / m->mall_bytes;
            arrives = later(arrives, later(cu->line_free, later(cu->memory_free, cu->mall_free)));
            arrives += latency; // which is all that a store waits for
            if (loads) {
                arrives += (m->memory_latency - latency) * cu->shares[region];
                expect(cu, bytes, arrives);
            }
        } else {
            arrives += latency;
        }
        done = later(done, arrives);
        w->at += 5;
        any = 1;
    }
    if (!any) // no lane is active, or none in range
        done = start + m->cached_latency;
    return done;
}

static void span(Result* result, const Wave* w, double from, double to, u32 what) {
    if (result->span_count < result->span_room)
        result->spans[result->span_count++] = (Span){from, to, w->slot, w->number, w->simd, what};
}

// Before the wave's time goes on.
static void stall(Cu* cu, const Wave* w, u32 number, u32 reason, double cycles) {
    if (cycles <= 0)
        return;
    span(cu->result, w, w->ready, w->ready + cycles, reason);
    cu->result->reasons[reason] += cycles;
    cu->waited[number] += cycles;
}

// One instruction of a wave; returns 0 where it has to be tried again later.
static int step(Cu* cu, Wave* w) {
    const Machine* m = cu->machine;
    Result* result = cu->result;
    while (w->next == w->end) { // the next block
        const u32* event = w->words->at + w->at;
        if (w->at >= w->words->count || event[0] >> 28 != BLOCK) {
            if (w->at < w->words->count) { // details that no instruction took
                w->at += event[0] >> 28 == MEMORY ? 5 : 2;
                continue;
            }
            w->state = ENDED;
            return 1;
        }
        u32 block = event[0] & 0xfffffff;
        w->next = cu->block_starts[block];
        w->end = cu->block_starts[block + 1];
        w->at++;
    }
    u32 number = w->next;
    const Instruction* i = cu->code + number;
    u32 unit = i->kind == STORE || i->kind == SCRATCH ? LOAD : i->kind;
    double* pipe = &cu->unit[w->simd][unit];
    double now = w->ready;
    if (i->kind < WAIT && *pipe > now) {
        stall(cu, w, number, i->kind == MFMA ? ON_MATRIX : ISSUING, *pipe - now);
        w->ready = *pipe;
        return 0;
    }
    double busy = SLOT;
    switch (i->kind) {
    case VALU:
        busy = i->cycles;
        result->vector += busy;
        w->ready = now + later(busy, m->issue);
        break;
    case MFMA:
        busy = i->cycles;
        result->matrix += busy;
        w->ready = now + m->issue;
        break;
    case SMEM:
        push(w->lgkm, w->lgkm_first, &w->lgkm_count, now + m->scalar_latency);
        w->reason_of[(w->lgkm_first + w->lgkm_count - 1) % QUEUE] = ON_SCALAR;
        w->ready = now + m->issue;
        break;
    case LDS: {
        double cycles = i->bytes / m->lds_bytes;
        const u32* event = w->words->at + w->at;
        if (w->at < w->words->count && event[0] == (CONFLICTS << 28 | number)) {
            cycles += event[1];
            w->at += 2;
        }
        cu->lds_free = later(cu->lds_free, now) + cycles;
        result->lds += cycles;
        push(w->lgkm, w->lgkm_first, &w->lgkm_count, cu->lds_free + m->lds_latency);
        w->reason_of[(w->lgkm_first + w->lgkm_count - 1) % QUEUE] = ON_LDS;
        w->ready = now + m->issue;
        break;
    }
    case LOAD:
    case STORE:
    case SCRATCH: {
        double full = cu->address_free - m->address_queue;
        if (full > now + 1e-6) { // the address unit's queue is full
            stall(cu, w, number, ON_ADDRESS, full - now);
            w->ready = full;
            return 0;
        }
        double done;
        if (i->kind == SCRATCH) {
            cu->address_free = later(cu->address_free, now) + i->cycles * m->address;
            result->address += i->cycles * m->address;
            done = cu->address_free + m->cached_latency;
        } else {
            done = access_memory(cu, w, number, now);
        }
        if (i->bytes) { // a copy to LDS
            cu->lds_free = later(cu->lds_free, now) + i->bytes / m->lds_bytes;
            result->lds += i->bytes / m->lds_bytes;
        }
        w->last_vm = done = later(done, w->last_vm); // they count down in their order
        if (w->vm_count < QUEUE)
            push(w->vm, w->vm_first, &w->vm_count, done);
        w->ready = now + m->issue;
        break;
    }
    case WAIT: {
        double until = now;
        u32 reason = ON_MEMORY;
        while (w->vm_count > i->vm_left) {
            until = later(until, w->vm[w->vm_first]);
            w->vm_first = (w->vm_first + 1) % QUEUE;
            w->vm_count--;
        }
        while (w->lgkm_count > i->lgkm_left) {
            if (w->lgkm[w->lgkm_first] > until) {
                until = w->lgkm[w->lgkm_first];
                reason = w->reason_of[w->lgkm_first];
            }
            w->lgkm_first = (w->lgkm_first + 1) % QUEUE;
            w->lgkm_count--;
        }
        stall(cu, w, number, reason, until - now);
        w->ready = later(now + m->issue, until);
        break;
    }
    case BARRIER:
        w->state = AT_BARRIER;
        w->ready = now + m->barrier;
        break;
    case BRANCH:
        w->ready = now + m->branch;
        break;
    case NOP:
        w->ready = now + i->cycles;
        break;
    case END:
        w->state = ENDED;
        break;
    default:
        w->ready = now + m->issue;
    }
    if (i->kind < WAIT)
        *pipe = now + busy;
    result->issued[i->kind]++;
    w->next++;
    return 1;
}

// The workgroups of a barrier's slot go on together.
static void release(Cu* cu, Wave* waves, u32 first, u32 count) {
    double last = 0;
    for (u32 i = first; i < first + count; i++) {
        if (waves[i].state == RUNS)
            return;
        if (waves[i].state == AT_BARRIER)
            last = later(last, waves[i].ready);
    }
    for (u32 i = first; i < first + count; i++)
        if (waves[i].state == AT_BARRIER) {
            stall(cu, waves + i, waves[i].next - 1, ON_BARRIER, last - waves[i].ready);
            waves[i].ready = last;
            waves[i].state = RUNS;
        }
}

static void begin(Wave* w, const Trace* trace, u32 group, u32 slot, u32 i, double now) {
    *w = (Wave){
        .words = trace->waves_of + group * trace->waves + i,
        .simd = (slot * trace->waves + i) % SIMDS,
        .slot = slot,
        .number = i,
        .state = RUNS,
        .start = now,
        .ready = now,
    };
}

// Runs the `dealt` workgroups that `groups` names on a CU that holds `resident` of them at once;
// `ends` takes when each ends.
int replay(const Trace* trace, const Instruction* code, const u32* block_starts,
           const Machine* machine, const double* shares, const double* crossing, const u32* groups,
           u32 dealt, u32 resident, Result* result, double* waited, double* ends) {
    u32 waves = trace->waves, held = resident < dealt ? resident : dealt;
    Wave* all = calloc((u64)held * waves, sizeof *all);
    if (!all)
        return 1;
    Cu cu = {code, block_starts, machine, shares, crossing, waited, result};
    u32 next = 0, ended = 0;
    for (u32 slot = 0; slot < held; slot++, next++)
        for (u32 i = 0; i < waves; i++)
            begin(all + slot * waves + i, trace, groups[next], slot, i, next * machine->deal);
    while (ended < dealt) {
        Wave* w = NULL;
        for (u32 i = 0; i < held * waves; i++)
            if (all[i].state == RUNS && (!w || all[i].ready < w->ready))
                w = all + i;
        if (!w)
            break;
        step(&cu, w);
        if (w->state == RUNS)
            continue;
        u32 first = w->slot * waves, done = 0;
        for (u32 i = first; i < first + waves; i++)
            done += all[i].state == ENDED;
        if (done < waves) {
            release(&cu, all, first, waves);
            continue;
        }
        double end = 0;
        for (u32 i = first; i < first + waves; i++) {
            end = later(end, all[i].ready);
            result->wave_cycles += all[i].ready - all[i].start;
            span(result, all + i, all[i].start, all[i].ready, REASONS);
            // An empty launch, too, ends only when its stores would be acknowledged.
            result->cycles = later(result->cycles, all[i].last_vm - machine->cached_latency);
        }
        result->cycles = later(result->cycles, end);
        ends[ended++] = end;
        if (next >= dealt)
            continue;
        u32 slot = w->slot;
        for (u32 i = 0; i < waves; i++)
            begin(all + first + i, trace, groups[next], slot, i, end + machine->deal);
        next++;
    }
    free(all);
    return ended < dealt;
}
