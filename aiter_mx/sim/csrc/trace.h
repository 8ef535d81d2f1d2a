// What waves do, written down for a model of time: aiter_mx/sim/timing/replay.c reads it.
#pragma once
#include "machine.h"
#include <stdlib.h>

void note(Trace* trace, u32 kind, u32 number, u32 count, const u32* details) {
    if (!trace)
        return;
    if (trace->count + count >= trace->room) {
        u64 room = 2 * trace->room + 4096;
        u32* words = realloc(trace->words, room * sizeof *words);
        if (!words)
            return;
        trace->words = words;
        trace->room = room;
    }
    trace->words[trace->count++] = kind << 28 | number;
    for (u32 i = 0; i < count; i++)
        trace->words[trace->count++] = details[i];
}

NOINLINE void lds_conflicts(Wave* w, u32 instruction, u32 count) {
    w->group->counters->lds_conflicts += count;
    if (count)
        note(w->trace, TRACE_LDS, instruction, 1, &count);
}
