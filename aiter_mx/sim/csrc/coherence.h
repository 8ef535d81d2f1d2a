// What of other waves' writes to memory a wave may count on, by the rules of gfx942 and gfx950 in
// LLVM's AMDGPU usage guide: each XCD has an L2 of its own, each CU a vector L1, some CUs a scalar
// cache, and none of them hears of what others write.
//
// Memory itself always holds the newest value. For each dword that was written there is a history,
// and a load gets the newest version that nothing may hide from it. What may be hidden follows from
// what waves know of each other, which waits, barriers and flags hand on, and not from the moment
// at which the simulator happens to run them; so the same mistake shows in every run.
#pragma once
#include "writes.h"
#include <stdlib.h>

enum { XCDS = 8, LONGEST_HISTORY = 64, MOVED = 256, PERIOD = 512, CALM_ROUNDS = 8 };

// Of every wave of the launch, how many of its writes ...
enum {
    DONE,           // ... are known to have reached the L2 of its XCD,
    WRITTEN,        // ... and memory; those with sc1 and atomics are there once they are done
    SEEN_DONE,      // the same, when the vector caches were last invalidated
    SEEN_WRITTEN,   //
    SCALAR_DONE,    // the same for scalar caches
    SCALAR_WRITTEN, //
    VIEWS,
    FLUSHED = VIEWS, // DONE when the buffer_wbl2 under way was issued
    KEPT
};

// Writes are stored by loads' opposites: plainly, with sc1, or by an atomic.
typedef enum { PLAIN, WITH_SC1, BY_ATOMIC_UNIT } Manner;
typedef enum { BY_VECTOR, COHERENTLY, AS_ATOMIC, BY_SCALAR } Reader;

typedef struct Version {
    struct Version* older;
    u32 value, bytes, number, wave, instruction; // number: among its wave's writes
    Manner manner;
} Version;
// What who sees a flag then knows.
typedef struct Snapshot {
    struct Snapshot *next, **from; // of all there are
    u32 users, *done, *written;
} Snapshot;
typedef struct History {
    Version* newest;
    Snapshot* flag; // of those that wrote here with sc1 or by atomics
    u32 first, length;
} History;

// A load with sc1 of a store with sc1 that may not be over yet. A loop that polls a flag loads
// again and sees it then; data that is loaded once was not handed over.
enum { DOUBTS = 64 };
typedef struct Doubt {
    const Version* version;
    u64 address;
    u32 instruction, lane, is_over;
} Doubt;

typedef struct Block {
    struct Block* next;
    u64 used;
    u8 memory[(1 << 20) - 16];
} Block;
typedef struct Coherence {
    u32 waves, waves_of_group;
    u64 first_group, changes;
    u32* ended; // writes of each wave that are over, whoever knows
    Block* blocks;
    Snapshot* all;
    Snapshot *one, *other, *both; // joined last
} Coherence;

static void* from_blocks(Coherence* c, u64 size) {
    if (!c->blocks || c->blocks->used + size > sizeof c->blocks->memory) {
        Block* more = malloc(sizeof *more);
        more->next = c->blocks;
        more->used = 0;
        c->blocks = more;
    }
    void* p = c->blocks->memory + c->blocks->used;
    c->blocks->used += (size + 15) & ~15ull;
    return p;
}
static Coherence* new_coherence(const Launch* launch, u64 total) {
    Coherence* c = calloc(1, sizeof *c);
    u32 lanes = launch->block[0] * launch->block[1] * launch->block[2];
    c->waves_of_group = (lanes + 63) / 64;
    c->first_group = launch->next_group;
    c->waves = (u32)(total - c->first_group) * c->waves_of_group;
    c->ended = calloc(c->waves, sizeof *c->ended);
    return c;
}
static void free_coherence(Coherence* c) {
    while (c->blocks) {
        Block* next = c->blocks->next;
        free(c->blocks);
        c->blocks = next;
    }
    while (c->all) {
        Snapshot* next = c->all->next;
        free(c->all);
        c->all = next;
    }
    free(c->ended);
    free(c);
}
INLINE u32* view(const Wave* w, int which) {
    return w->views + (u64)which * w->group->launch->coherence->waves;
}
static u32 xcd_of(const Coherence* c, u32 wave) {
    return (u32)((wave / c->waves_of_group + c->first_group) % XCDS);
}

// Snapshots
static void drop(Snapshot* s) {
    if (!s || --s->users)
        return;
    *s->from = s->next;
    if (s->next)
        s->next->from = s->from;
    free(s);
}
static Snapshot* hold(Snapshot* s) {
    if (s)
        s->users++;
    return s;
}
static Snapshot* new_snapshot(Coherence* c, const u32* done, const u32* written) {
    Snapshot* s = malloc(sizeof *s + 8ull * c->waves);
    s->users = 1;
    s->next = c->all;
    s->from = &c->all;
    if (c->all)
        c->all->from = &s->next;
    c->all = s;
    s->done = (u32*)(s + 1);
    s->written = s->done + c->waves;
    memcpy(s->done, done, 4ull * c->waves);
    memcpy(s->written, written, 4ull * c->waves);
    return s;
}
static int raise(u32* to, const u32* from, u32 count) {
    u32 more = 0;
    for (u32 i = 0; i < count; i++) {
        more |= from[i] > to[i];
        to[i] = from[i] > to[i] ? from[i] : to[i];
    }
    return more != 0;
}
static Snapshot* own_snapshot(Wave* w) {
    if (!w->snapshot)
        w->snapshot = new_snapshot(w->group->launch->coherence, view(w, DONE), view(w, WRITTEN));
    return w->snapshot;
}
// Takes over `one`, and returns what is known by it and by `other` together.
static Snapshot* joined(Coherence* c, Snapshot* one, Snapshot* other) {
    if (!one || one == other) {
        drop(one);
        return hold(other);
    }
    if (c->one != one || c->other != other) {
        drop(c->one), drop(c->other), drop(c->both);
        c->one = hold(one);
        c->other = hold(other);
        c->both = new_snapshot(c, one->done, one->written);
        raise(c->both->done, other->done, c->waves);
        raise(c->both->written, other->written, c->waves);
    }
    drop(one);
    return hold(c->both);
}
static void learned(Wave* w) {
    w->learned = 1;
    drop(w->snapshot);
    w->snapshot = NULL;
}
static void learn(Wave* w, const Snapshot* s) {
    u32 waves = w->group->launch->coherence->waves;
    if (raise(view(w, DONE), s->done, waves) | raise(view(w, WRITTEN), s->written, waves))
        learned(w);
}

// Histories
static History* history_of(Wave* w, u64 address, int makes) {
    const Launch* launch = w->group->launch;
    const Region* r = w->group->last_region;
    if (!r || address < r->begin || address >= r->end)
        r = find_region(launch, address);
    u64* words = r && r->writable ? launch->history[r - launch->regions] : NULL;
    if (!words)
        return NULL;
    if (makes)
        words[-1] = 1;
    else if (!words[-1])
        return NULL;
    u64* at = words + (address / 4 - r->begin / 4);
    if (!*at && makes) {
        History* h = from_blocks(launch->coherence, sizeof *h);
        *h = (History){0};
        // A dword at the edge of a region may lie in it with some of its bytes alone.
        for (u64 i = address & ~3ull; i < (address & ~3ull) + 4; i++)
            if (i >= r->begin && i < r->end)
                h->first |= (u32) * (const u8*)i << 8 * (i & 3);
        *at = (u64)h;
    }
    return (History*)*at;
}
static u32 spread(u32 bytes) { // a mask of bytes as one of bits
    return (bytes & 1 ? 255u : 0) | (bytes & 2 ? 255u << 8 : 0) | (bytes & 4 ? 255u << 16 : 0) |
           (bytes & 8 ? 255u << 24 : 0);
}
static void add_version(Wave* w, History* h, u32 instruction, u32 value, u32 bytes, Manner manner) {
    Coherence* c = w->group->launch->coherence;
    Version* v = h->newest;
    // No one can know of a write that goes on.
    if (!v || v->wave != w->number || v->number <= c->ended[w->number] || v->manner != manner) {
        v = from_blocks(c, sizeof *v);
        *v = (Version){.older = h->newest, .wave = w->number, .manner = manner};
        h->newest = v;
        h->length++;
    }
    v->value = (v->value & ~spread(bytes)) | (value & spread(bytes));
    v->bytes |= bytes;
    v->number = w->writes;
    v->instruction = instruction;
    if (h->length > LONGEST_HISTORY) {
        while (v->older->older)
            v = v->older;
        h->first =
            (h->first & ~spread(v->older->bytes)) | (v->older->value & spread(v->older->bytes));
        v->older = NULL;
        h->length--;
    }
}

// Whether nothing hides a version from a wave.
static int sees(const Wave* w, const Version* v, Reader reader) {
    const Coherence* c = w->group->launch->coherence;
    u32 from = v->wave, number = v->number;
    int of_group = from / c->waves_of_group == w->number / c->waves_of_group;
    int of_xcd = xcd_of(c, from) == xcd_of(c, w->number);
    int is_written = of_xcd || v->manner != PLAIN; // once it is done
    if (reader == BY_SCALAR)
        return view(w, is_written ? SCALAR_DONE : SCALAR_WRITTEN)[from] >= number;
    if (from == w->number)
        return 1;
    if (reader != BY_VECTOR && v->manner != PLAIN)
        return v->manner == BY_ATOMIC_UNIT || c->ended[from] >= number;
    if (of_group)
        return view(w, DONE)[from] >= number;
    if (reader == BY_VECTOR)
        return view(w, is_written ? SEEN_DONE : SEEN_WRITTEN)[from] >= number;
    return view(w, of_xcd ? DONE : WRITTEN)[from] >= number;
}
enum { NOT_ORDERED, NOT_WRITTEN_BACK, NOT_INVALIDATED, NOT_INVALIDATED_SCALAR };
__attribute__((cold, noinline)) static void stale(Wave* w, u32 instruction, u32 lane, u64 address,
                                                  const Version* v, Reader reader) {
    const Coherence* c = w->group->launch->coherence;
    u32 why = reader == BY_SCALAR ? NOT_INVALIDATED_SCALAR : NOT_INVALIDATED;
    int of_xcd = xcd_of(c, v->wave) == xcd_of(c, w->number);
    if (v->wave != w->number && view(w, DONE)[v->wave] < v->number)
        why = NOT_ORDERED;
    else if (!of_xcd && v->manner == PLAIN && view(w, WRITTEN)[v->wave] < v->number)
        why = NOT_WRITTEN_BACK;
    found(w,
          (Fault){.kind = FAULT_STALE,
                  .instruction = instruction,
                  .lane = lane,
                  .address = address,
                  .reg = why,
                  .size = v->instruction,
                  .other_wave = v->wave % c->waves_of_group,
                  .other_group = v->wave / c->waves_of_group + c->first_group},
          FAULT_STALE);
}
static int is_doubtful(Wave* w, u32 instruction, u32 lane, u64 address, const Version* v) {
    Doubt* d = &w->doubts[address / 4 % DOUBTS];
    if (view(w, DONE)[v->wave] >= v->number)
        return 0;
    if (d->version == v && d->address == address) {
        d->is_over = 1;
        return 0;
    }
    if (d->version && !d->is_over)
        return 0;
    *d = (Doubt){v, address, instruction, lane, 0};
    return 1;
}
// Replaces those bytes of a dword, which hold what is newest, that may be hidden by what was there
// before.
static u32 as_seen(Wave* w, u32 instruction, u32 lane, u64 address, const History* h, u32 newest,
                   u32 wanted, Reader reader) {
    const Version* hidden = NULL;
    u32 left = wanted, value = newest;
    for (const Version* v = h->newest; v && left; v = v->older) {
        if (!(v->bytes & left))
            continue;
        int is_seen = sees(w, v, reader);
        if (is_seen && reader == COHERENTLY && v->manner == WITH_SC1 && v->wave != w->number)
            is_seen = !is_doubtful(w, instruction, lane, address, v);
        if (is_seen) {
            value = (value & ~spread(v->bytes & left)) | (v->value & spread(v->bytes & left));
            left &= ~v->bytes;
        } else if (!hidden) {
            hidden = v;
        }
    }
    value = (value & ~spread(left)) | (h->first & spread(left));
    // Whoever polls a flag may see it set late.
    int polls = hidden && reader != BY_VECTOR && reader != BY_SCALAR && hidden->manner != PLAIN;
    if (UNLIKELY(value != newest && !polls))
        stale(w, instruction, lane, address & ~3ull, hidden, reader);
    return value;
}

// Whether a workgroup reads what it has not read before; it waits for others where it does not.
static void note_look(Wave* w, u32 instruction, u64 address, u64 value) {
    Group* g = w->group;
    u64 key = (address ^ value << 32 ^ value >> 7) * 0x9e3779b97f4a7c15ull;
    u32 short_key = (u32)key | 1, *at = &g->looked[(address >> 2 ^ address >> 10) % MOVED];
    g->looks = 1;
    g->looker = w->id;
    g->look = instruction;
    g->moves |= *at != short_key;
    *at = short_key;
}

// What the operation issued last lets its wave know, once it has been waited for.
static void hand_on(Wave* w, Snapshot* flag) {
    Pending* p = queued(&w->vm, w->vm.count - 1);
    if (flag)
        p->flag = joined(w->group->launch->coherence, p->flag, flag);
    drop(flag);
}

// After a load from memory that brought what is newest.
NOINLINE void load_as_seen(Wave* w, u32 instruction, const u64* address, u32* row, Element element,
                           u32 size) {
    Coherence* c = w->group->launch->coherence;
    Reader reader = w->is_coherent ? COHERENTLY : BY_VECTOR;
    u8 bytes[64][16];
    u64 from[64], exec = w->exec, changed = 0;
    Snapshot* flag = NULL;
    EACH_ACTIVE(w) {
        u32 l = ACTIVE_LANE, first = (u32)address[l] & 3;
        u64 at = address[l] & ~3ull, look = 0;
        memcpy(bytes[l], (const void*)address[l], size);
        from[l] = (u64)bytes[l];
        for (; at < address[l] + size; at += 4) {
            const History* h = history_of(w, at < address[l] ? address[l] : at, 0);
            if (!h)
                continue;
            u32 wanted = 15, newest = 0, low = 0, high = 4;
            if (at < address[l])
                low = first;
            if (at + 4 > address[l] + size)
                high = (u32)(address[l] + size - at);
            wanted = ((1u << high) - 1) & ~((1u << low) - 1);
            u8* place = bytes[l] + (at + low - address[l]);
            memcpy((u8*)&newest + low, place, high - low);
            u32 value = as_seen(w, instruction, l, at, h, newest, wanted, reader);
            if (value != newest) {
                memcpy(place, (u8*)&value + low, high - low);
                changed |= 1ull << l;
            }
            if (reader == COHERENTLY && h->flag)
                flag = joined(c, flag, h->flag);
        }
        memcpy(&look, bytes[l], size < 8 ? size : 8);
        note_look(w, instruction, address[l], look);
    }
    hand_on(w, flag);
    if (changed) {
        w->exec = changed;
        load_lanes(w, from, row, element, size / 4);
        w->exec = exec;
    }
}
NOINLINE void scalars_as_seen(Wave* w, u32 instruction, const u64* from, u32 d, u32 dwords) {
    for (u32 i = 0; i < dwords; i++) {
        const History* h = from[i] == ~0ull ? NULL : history_of(w, from[i], 0);
        if (h)
            w->s[d + i] = as_seen(w, instruction, 0, from[i], h, w->s[d + i], 15, BY_SCALAR);
    }
}
static void note_version(Wave* w) {
    w->writes++;
    w->group->moves = 1;
    w->group->launch->coherence->changes++;
    queued(&w->vm, w->vm.count - 1)->writes = w->writes;
}
// Before a store.
NOINLINE void store_versions(Wave* w, u32 instruction, const u64* address, const u32* d, u32 size,
                             u32 shift) {
    Manner manner = w->is_coherent ? WITH_SC1 : PLAIN;
    note_version(w);
    EACH_ACTIVE(w) {
        u32 l = ACTIVE_LANE;
        for (u32 from = 0, to; from < size; from = to) {
            u32 first = (u32)(address[l] + from) & 3, value = 0;
            to = from + 4 - first < size ? from + 4 - first : size;
            History* h = history_of(w, address[l] + from, 1);
            if (!h)
                continue;
            for (u32 i = from; i < to; i++)
                value |= (u32)stored_byte(d, l, i, shift) << 8 * (first + i - from);
            u32 bytes = ((1u << (to - from)) - 1) << first;
            add_version(w, h, instruction, value, bytes, manner);
            if (manner == WITH_SC1) {
                drop(h->flag);
                h->flag = hold(own_snapshot(w));
            }
        }
    }
}
// Before an atomic.
NOINLINE void atomic_sees(Wave* w, u32 instruction, const u64* address, u32 size, int returns) {
    Coherence* c = w->group->launch->coherence;
    Snapshot* flag = NULL;
    EACH_ACTIVE(w) {
        u32 l = ACTIVE_LANE;
        for (u32 i = 0; i < size; i += 4) {
            History* h = history_of(w, address[l] + i, 1);
            if (!h)
                continue;
            u32 newest = *(const u32*)(address[l] + i);
            as_seen(w, instruction, l, address[l] + i, h, newest, 15, AS_ATOMIC);
            if (returns && h->flag)
                flag = joined(c, flag, h->flag);
            h->flag = joined(c, h->flag, own_snapshot(w));
            if (i == 0)
                note_look(w, instruction, address[l], newest);
        }
    }
    hand_on(w, flag);
}
// After it.
NOINLINE void atomic_versions(Wave* w, u32 instruction, const u64* address, u32 size) {
    int counts = 0;
    EACH_ACTIVE(w) {
        u32 l = ACTIVE_LANE;
        for (u32 i = 0; i < size; i += 4) {
            History* h = history_of(w, address[l] + i, 1);
            u32 value = *(const u32*)(address[l] + i);
            const Version* v = h ? h->newest : NULL;
            if (!h || (v && v->bytes == 15 ? v->value : h->first) == value)
                continue;
            if (!counts++)
                note_version(w);
            add_version(w, h, instruction, value, 15, BY_ATOMIC_UNIT);
        }
    }
}

// An operation on memory has been waited for.
static void retired(Wave* w, Pending* p) {
    Coherence* c = w->group->launch->coherence;
    if (p->writes) {
        c->ended[w->number] = p->writes;
        view(w, DONE)[w->number] = p->writes;
        learned(w);
    }
    if (p->writes_back) {
        u32 *written = view(w, WRITTEN), *flushed = view(w, FLUSHED);
        for (u32 i = 0; i < c->waves; i++)
            if (xcd_of(c, i) == xcd_of(c, w->number) && flushed[i] > written[i])
                written[i] = flushed[i];
        learned(w);
    }
    if (p->flag) {
        learn(w, p->flag);
        drop(p->flag);
        p->flag = NULL;
    }
}
API void write_back(Wave* w, u32 instruction) {
    Coherence* c = w->group->launch->coherence;
    if (!STRICT || !c)
        return;
    issue_vm(w, instruction, 0, 0, 0);
    queued(&w->vm, w->vm.count - 1)->writes_back = 1;
    memcpy(view(w, FLUSHED), view(w, DONE), 4ull * c->waves);
    view(w, FLUSHED)[w->number] = w->writes;
}
API void invalidate(Wave* w, int whole_l2) {
    Coherence* c = w->group->launch->coherence;
    if (!STRICT || !c)
        return;
    for (u32 i = 0; i < c->waves; i++)
        if (whole_l2 || xcd_of(c, i) == xcd_of(c, w->number)) {
            view(w, SEEN_DONE)[i] = view(w, DONE)[i];
            view(w, SEEN_WRITTEN)[i] = view(w, WRITTEN)[i];
        }
    w->learned = 1;
}
API void invalidate_scalars(Wave* w) {
    Coherence* c = w->group->launch->coherence;
    if (!STRICT || !c)
        return;
    for (u32 i = 0; i < c->waves; i++) {
        int own = i / c->waves_of_group == w->number / c->waves_of_group;
        view(w, SCALAR_DONE)[i] = view(w, own ? DONE : SEEN_DONE)[i];
        view(w, SCALAR_WRITTEN)[i] = view(w, SEEN_WRITTEN)[i];
    }
    w->learned = 1;
}
// At a barrier all know what each of them knows.
static void share_knowledge(Group* g) {
    u64 words = (u64)VIEWS * g->launch->coherence->waves;
    int any = 0;
    Wave* first = NULL;
    for (u32 i = 0; i < g->wave_count; i++)
        any |= g->waves[i]->state == AT_BARRIER && g->waves[i]->learned;
    for (u32 i = 0; any && i < g->wave_count; i++) {
        Wave* w = g->waves[i];
        if (w->state != AT_BARRIER)
            continue;
        if (first)
            raise(first->views, w->views, (u32)words);
        else
            first = w;
    }
    for (u32 i = 0; any && i < g->wave_count; i++) {
        Wave* w = g->waves[i];
        if (w->state != AT_BARRIER)
            continue;
        if (w != first)
            memcpy(w->views, first->views, 4 * words);
        learned(w);
        w->learned = 0;
    }
}
static void begin_views(Wave* w) {
    const Coherence* c = w->group->launch->coherence;
    w->number = (u32)(w->group->index - c->first_group) * c->waves_of_group + w->id;
    w->writes = w->learned = w->is_coherent = 0;
    memset(w->views, 0, 4ull * KEPT * c->waves);
    memset(w->doubts, 0, DOUBTS * sizeof *w->doubts);
}
static void end_views(Wave* w) {
    w->group->launch->coherence->ended[w->number] = w->writes;
    for (u32 i = 0; i < w->vm.count; i++)
        drop(queued(&w->vm, i)->flag);
    w->vm.count = 0;
    drop(w->snapshot);
    w->snapshot = NULL;
    for (u32 i = 0; i < DOUBTS; i++) {
        const Doubt* d = &w->doubts[i];
        if (UNLIKELY(d->version && !d->is_over))
            stale(w, d->instruction, d->lane, d->address, d->version, COHERENTLY);
    }
}
// What was issued ends by itself at some time, though nobody knows when.
static void let_writes_end(Group* g) {
    for (u32 i = 0; i < g->wave_count; i++)
        g->launch->coherence->ended[g->waves[i]->number] = g->waves[i]->writes;
}
