// How a wave ends when it does what it must not.
#pragma once
#include "machine.h"

COLD void fail(Wave* w, Fault fault) {
    Group* g = w->group;
    fault.wave = w->id;
    memcpy(fault.group, g->id, sizeof g->id);
    *g->fault = fault;
    longjmp(g->on_fault, 1);
}
// What one of the checks found: nothing if it is off, and the launch goes on if it collects.
__attribute__((cold, noinline)) static void found(Wave* w, Fault fault, u32 bit) {
    const Launch* launch = w->group->launch;
    if (!(launch->checks >> bit & 1))
        return;
    if (!launch->collect)
        fail(w, fault);
    Findings* all = w->group->findings;
    for (u32 i = 0; i < all->count; i++)
        if (all->found[i].kind == fault.kind && all->found[i].instruction == fault.instruction) {
            all->found[i].count++;
            return;
        }
    if (all->count == FINDINGS)
        return;
    fault.wave = w->id;
    fault.count = 1;
    memcpy(fault.group, w->group->id, sizeof fault.group);
    all->found[all->count++] = fault;
}
void bad_jump(Wave* w, u32 instruction, u64 target) {
    fail(w, (Fault){.kind = FAULT_JUMP, .instruction = instruction, .address = target});
}

void trap(Wave* w, u32 instruction) {
    fail(w, (Fault){.kind = FAULT_TRAP, .instruction = instruction});
}

void too_soon(Wave* w, u32 instruction, u32 rule) {
    found(w, (Fault){.kind = FAULT_HAZARD, .instruction = instruction}, rule);
}
void unset_scc(Wave* w, u32 instruction) {
    found(w, (Fault){.kind = FAULT_SCC_UNSET, .instruction = instruction}, FAULT_SCC_UNSET);
    w->scc = 0;
}
