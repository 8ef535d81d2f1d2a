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

// Whether a workgroup touches a line for the first time: it waits in L1 for what is under way.
static int is_new_line(Trace* trace, u64 key) {
    if (2 * trace->line_count >= trace->line_room) {
        Trace more = {.line_room = 4 * trace->line_room + 1024};
        more.lines = calloc(more.line_room, sizeof *more.lines);
        if (!more.lines)
            return 1;
        for (u64 i = 0; i < trace->line_room; i++)
            if (trace->lines[i])
                is_new_line(&more, trace->lines[i]);
        free(trace->lines);
        trace->lines = more.lines;
        trace->line_room = more.line_room;
    }
    for (u64 i = key * 0x9e3779b97f4a7c15ull % trace->line_room;; i = (i + 1) % trace->line_room) {
        if (trace->lines[i] == key)
            return 0;
        if (!trace->lines[i]) {
            trace->lines[i] = key;
            trace->line_count++;
            return 1;
        }
    }
}
void forget_lines(Trace* trace) {
    if (!trace)
        return;
    free(trace->lines);
    trace->lines = NULL;
    trace->line_count = trace->line_room = 0;
}

NOINLINE void lds_conflicts(Wave* w, u32 instruction, u32 count) {
    w->group->counters->lds_conflicts += count;
    if (count)
        note(w->trace, TRACE_LDS, instruction, 1, &count);
}
