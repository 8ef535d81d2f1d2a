// Global and buffer loads and stores that take effect late: at a random moment between their issue
// and the wait that covers them, in the order in which vmcnt counts them.
#pragma once
#include "order.h"

typedef struct Delayed {
    u64 address[64];
    u32 data[4 * 64];
    u32* row;
    u64 lanes;
    Element element;
    u32 dwords, is_write, is_waiting;
} Delayed;

static void complete_oldest(Wave* w, u32 count) {
    u64 exec = w->exec;
    for (u32 i = 0; i < count; i++) {
        Delayed* late = &w->delayed[(w->vm.first + i) % QUEUE];
        if (!late->is_waiting)
            continue;
        late->is_waiting = 0;
        w->exec = late->lanes;
        if (late->is_write)
            store_lanes(w, late->address, late->data, late->element, late->dwords);
        else
            load_lanes(w, late->address, late->row, late->element, late->dwords);
    }
    w->exec = exec;
}
// Everything issued so far takes effect now.
INLINE void complete_all(Wave* w) {
    if (STRICT && UNLIKELY(w->group->launch->delay))
        complete_oldest(w, w->vm.count);
}
// The operation issued last: at once, or when its time has come.
NOINLINE void move_lanes(Wave* w, const u64* address, u32* row, Element element, u32 dwords,
                         int is_write) {
    if (STRICT && UNLIKELY(w->group->launch->delay)) {
        Delayed* late = &w->delayed[(w->vm.first + w->vm.count - 1) % QUEUE];
        memcpy(late->address, address, sizeof late->address);
        if (is_write)
            memcpy(late->data, row, 256 * (dwords ? dwords : 1));
        late->row = row;
        late->lanes = w->exec;
        late->element = element;
        late->dwords = dwords;
        late->is_write = (u32)is_write;
        late->is_waiting = 1;
    } else if (is_write) {
        store_lanes(w, address, row, element, dwords);
    } else {
        load_lanes(w, address, row, element, dwords);
    }
}
