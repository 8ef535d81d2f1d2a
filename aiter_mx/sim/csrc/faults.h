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
void bad_jump(Wave* w, u32 instruction, u64 target) {
    fail(w, (Fault){.kind = FAULT_JUMP, .instruction = instruction, .address = target});
}

void trap(Wave* w, u32 instruction) {
    fail(w, (Fault){.kind = FAULT_TRAP, .instruction = instruction});
}

void too_soon(Wave* w, u32 instruction) {
    fail(w, (Fault){.kind = FAULT_HAZARD, .instruction = instruction});
}
